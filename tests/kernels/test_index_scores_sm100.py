"""The index_scores_sm100 kernel (tcgen05) on the CPU emulator against the definition of index_scores."""

import ctypes

import pytest
import torch

from dsv4 import ops
from dsv4.errors import UserError
from dsv4.kernels import build
from dsv4.kernels import indexer as module
from dsv4.kernels.keys import IndexKeys
from dsv4.ops.indexer import index_scores_ref
from dsv4.ops.quant import fp4_round_trip, hadamard
from dsv4.ops.rope import apply_rope

from ..emulator.emulator import ON_GPU, emulated, needs_gxx
from .test_index_scores import INF, NAN, D, H, assert_right, site

pytestmark = needs_gxx
if ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 10:
    pytestmark = pytest.mark.skip(reason="this GPU has no tensor memory")
GROUP, TILE = module.GROUP_TOKENS, module.TILE_ENTRIES
STAGES, SLOTS = 8, 6  # cuda/index_scores_sm100.cu


def run(q, cos, sin, head_weights, keys, positions, top_k=0, quantize=True, **how):
    with emulated(**how):
        return module.index_scores_sm100(q, cos, sin, head_weights, keys, positions, top_k, quantize)


# One token, as in decode; around a tile of entries; all blocks of the emulator with one tile and with two.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [1, 31, 33, TILE - 1, TILE, TILE + 1, 3 * TILE + 5, 8 * TILE, 9 * TILE + 77])
def test_one_token(rng, n, reverse):
    inputs = site(rng, 1, n)
    assert_right(run(*inputs, reverse=reverse), inputs)


@pytest.mark.parametrize("S", range(1, GROUP + 1))
def test_every_token_has_its_own_query_weights_angles_and_count(rng, S):
    inputs = site(rng, S, 177, capacity=191)
    together = run(*inputs, reverse=S % 2 == 0)
    assert_right(together, inputs)
    *query, keys, positions = inputs
    for s in {0, S - 1}:  # and its scores do not depend on its neighbours
        n = int(positions[s] + 1) // 4
        alone = run(*(t[s : s + 1] for t in query), keys, positions[s : s + 1])
        assert torch.equal(alone[0, :n], together[s, :n])


# Whole groups, one token more and less; entries that only the last of them sees, which are a tile more than the others do.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("S,n", [(GROUP + 1, 40), (2 * GROUP - 1, TILE + 1), (2 * GROUP, TILE), (3 * GROUP + 3, 2 * TILE + 2)])
def test_a_prompt(rng, S, n, reverse):
    inputs = site(rng, S, n)
    assert_right(run(*inputs, reverse=reverse), inputs)


def test_the_start_of_a_prompt(rng):
    """Positions 0 to 18: the first three see nothing, and the first group only two of the four entries."""
    inputs = site(rng, 19, 4)
    assert inputs[-1].tolist() == list(range(19))
    assert_right(run(*inputs), inputs)


# More tiles than stages, more units than accumulators; stages come round again in one block, where tiles are a stride apart.
@pytest.mark.parametrize("S,splits", [(1, 1), (1, 2), (3, 1)])
def test_a_block_that_goes_round_its_stages(rng, monkeypatch, S, splits):
    monkeypatch.setattr(module, "_splits", lambda *_: splits)
    tiles = (2 * STAGES + 3) * splits if S == 1 else STAGES + 2
    assert tiles * S > 2 * SLOTS
    inputs = site(rng, S, tiles * TILE - 3)
    assert_right(run(*inputs, reverse=S == 3), inputs)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 9])
def test_splits_cover_the_entries_once(rng, monkeypatch, splits):
    """More blocks than tiles too."""
    inputs = site(rng, 2, 4 * TILE + 9)
    whole = run(*inputs)
    monkeypatch.setattr(module, "_splits", lambda *_: splits)
    assert torch.equal(run(*inputs)[1, : 4 * TILE + 9], whole[1, : 4 * TILE + 9])
    assert_right(whole, inputs)


def test_how_many_splits():
    """Never more blocks than tiles; a wave of blocks where that is best; one split where the groups fill the GPU."""
    cases = {(1, 262144): 147, (1, 1024): 8, (1, 129): 2, (64, 4096): 16, (160, 8192): 7, (800, 8192): 1, (4096, 32768): 1}
    assert {case: module._splits(*case, 148) for case in cases} == cases


@pytest.mark.parametrize("top_k", [0, 15, 16, 512])
def test_nothing_is_computed_where_every_entry_is_chosen(rng, top_k):
    """Nothing is written then: what comes back is the emulator's poison. With one entry more there are numbers."""
    inputs = site(rng, 3, 16, capacity=600)
    got = run(*inputs, top_k)
    assert got.isnan().all() if top_k >= 16 else got[2, :16].isfinite().all()


@pytest.mark.parametrize("first", range(8))
def test_the_first_positions(rng, first):
    """Position 3 is the first that sees an entry; a capacity that the positions have outgrown ends what is seen."""
    inputs = site(rng, 2, 1, capacity=2)
    inputs[-1] = torch.tensor([first, first + 1])
    inputs[-2] = IndexKeys.pack(torch.randn(2, D, generator=rng))
    assert_right(run(*inputs), inputs)
    inputs[-1] = inputs[-1] + 4000
    assert_right(run(*inputs), inputs)


def test_exact_where_the_sum_is(rng):
    """One head of each token has a weight, and sums of products of e2m1 with scales of 2^-2 to 2^2 are exact in fp32: every bit."""
    S, n = GROUP + 1, 300
    inputs = site(rng, S, n)
    inputs[3] *= torch.nn.functional.one_hot((7 * torch.arange(S) + 3) % H, H)
    inputs[4] = IndexKeys(torch.randint(0, 256, (n, D // 2), generator=rng).to(torch.uint8),
                          torch.randint(125, 130, (n, 4), generator=rng).to(torch.uint8))
    q = fp4_round_trip(hadamard(apply_rope(inputs[0].bfloat16().unflatten(-1, (H, D)), *inputs[1:3]))).double()
    products = torch.relu(torch.einsum("shd,td->sht", q, inputs[4].unpack().double())).float()
    want = ((inputs[3] * torch.tensor(D**-0.5 * H**-0.5, dtype=torch.float32))[..., None] * products).sum(1)
    got = run(*inputs)
    for s, seen in enumerate(((inputs[-1] + 1) // 4).tolist()):
        assert torch.equal(got[s, :seen], want[s, :seen])


def test_all_sixteen_values_of_a_nibble_at_every_place():
    """Every code at every dim, against one dim of the query at a time (a unit vector stays one under two Hadamard rotations)."""
    S, T = GROUP, 16
    keys = IndexKeys(torch.empty(T, D // 2, dtype=torch.uint8), torch.full((T, 4), 127, dtype=torch.uint8))
    keys.values[:] = torch.arange(16, dtype=torch.uint8)[:, None] * 17
    dims = torch.arange(S * 16).view(S, 16)
    q, weights = torch.zeros(S, H, D), torch.zeros(S, H)
    q[:, :16] = hadamard(torch.nn.functional.one_hot(dims, D).float()) * 16
    weights[:, :16] = 1
    inputs = [q.flatten(1), torch.ones(S, 32), torch.zeros(S, 32), weights, keys, torch.arange(64, 64 + S)]
    assert_right(run(*inputs), inputs)


def test_each_of_a_rows_four_scales_counts(rng):
    """One block of 32 dims at a time is not zero, in keys and queries of scales that differ by up to 2^24."""
    inputs = site(rng, 2, 64)
    grow = torch.exp2(torch.randint(-12, 13, (64, 4), generator=rng).float())
    only = torch.nn.functional.one_hot(torch.arange(64) % 4, 4).float()
    inputs[4] = IndexKeys.pack(torch.randn(64, D, generator=rng) * (grow * only).repeat_interleave(32, 1))
    inputs[0] *= torch.exp2(torch.randint(-12, 13, (2, H), generator=rng).float()).repeat_interleave(D, 1)
    assert_right(run(*inputs), inputs)
    inputs[4] = IndexKeys.pack(torch.randn(64, D, generator=rng) * grow.repeat_interleave(32, 1))
    assert_right(run(*inputs), inputs)


@pytest.mark.parametrize("of_q,of_keys,of_weights", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1e4, 1, 1), (1, 1e-3, 1), (1, 1, -1e6),
                                                     (1e15, 1e-12, 1), (1e-9, 1e9, 1), (2.0**-80, 1, 1), (1, 2.0**-50, 1),
                                                     (2.0**-100, 2.0**100, 1)])
def test_extremes(rng, of_q, of_keys, of_weights):
    inputs = site(rng, 2, 50, size=of_q)
    inputs[3] *= of_weights
    inputs[4] = IndexKeys.pack(of_keys * torch.randn(50, D, generator=rng))
    got = run(*inputs)
    assert_right(got, inputs)
    assert of_q and of_keys and of_weights or (got[:, :50].nan_to_num(0) == 0).all()


def test_trap_27_relu_makes_exact_zeros(rng):
    """Keys that are opposite to every head's query score exactly 0, with either sign of the weights; their negatives do not."""
    inputs = site(rng, 1, 40)
    inputs[0] = inputs[0][:, :D].repeat(1, H)
    q = fp4_round_trip(hadamard(apply_rope(inputs[0].bfloat16().unflatten(-1, (H, D)), *inputs[1:3])))[0, 0]
    inputs[4] = IndexKeys.pack(torch.stack((q, -q)).repeat(20, 1))
    got = run(*inputs)[0]
    assert (got[1::2] == 0).all() and (got[::2] != 0).all()
    assert_right(got[None], inputs)


def test_trap_26_what_is_not_finite_gives_nan_and_only_there(rng):
    """A key's NaN (any of its four scales) spoils its entry, a query's or a weight's its token; an infinite weight does what fp32 does."""
    inputs = site(rng, 4, 40)
    inputs[-1] = torch.arange(160, 164)
    inputs[4].scales[[5, 33, 34, 39], [0, 1, 2, 3]] = 255
    inputs[0][0, 3 * D + 100], inputs[0][1, 10 * D] = NAN, -INF
    inputs[3][2, 63] = NAN
    got = run(*inputs)
    assert got[:3].isnan().all() and got[3].isnan().nonzero().flatten().tolist() == [5, 33, 34, 39]
    inputs = site(rng, 1, 40)
    inputs[3][0, 7] = INF
    want = index_scores_ref(*inputs[:4], inputs[4].unpack(), inputs[5], 0, True)
    got = run(*inputs)
    assert torch.equal(got.isnan(), want.isnan()) and (got[~got.isnan()] == INF).all()


def test_what_lies_behind_is_not_read(rng):
    """The keys end with the last entry of the last token, beyond which the emulator lets nobody read; before that, they are NaN."""
    for n in (5, 39, 129):
        inputs = site(rng, 2, n)
        inputs[-1] = inputs[-1] - 8
        inputs[4] = IndexKeys.pack(inputs[4].unpack().index_fill(0, torch.arange(max(0, n - 2), n), NAN))
        assert_right(run(*inputs), inputs)


def test_strided_inputs_and_no_entries(rng):
    inputs = site(rng, 3, 20)
    strided = [t.T.contiguous().T for t in inputs[:4]]
    assert torch.equal(run(*strided, *inputs[4:])[2, :20], run(*inputs)[2, :20])
    assert run(*inputs[:4], IndexKeys.empty(0), inputs[5]).shape == (3, 0)


def test_it_can_be_tried_in_the_place_of_index_scores(rng):
    """As docs/kernels.md says, until a B200 has run it."""
    inputs = site(rng, 2, 30)
    with emulated(), ops.trying_kernel("index_scores", module.index_scores_sm100):
        assert_right(ops.index_scores(*inputs, 0, True), inputs)


def test_sm_90a_refuses(nvcc, kernel_cache):
    """The object for sm_90a says cudaErrorNotSupported (801) before it touches anything; that for sm_100a finds these arguments wrong."""
    results = {}
    for arch in ("sm_90a", "sm_100a"):
        function = module._index_scores_sm100.bind(ctypes.CDLL(str(build.build("index_scores_sm100", arch))))
        results[arch] = function(None, None, None, None, None, None, None, None, 0, 0, 0, 0, None)
    assert results == {"sm_90a": 801, "sm_100a": 1}


@pytest.mark.parametrize("change", [
    lambda q, c, s, w, k, p: (q[:, :-1], c, s, w, k, p), lambda q, c, s, w, k, p: (q.bfloat16(), c, s, w, k, p),
    lambda q, c, s, w, k, p: (q, c[:, :31], s, w, k, p), lambda q, c, s, w, k, p: (q, c, s, w, k, p[:1]),
    lambda q, c, s, w, k, p: (q[:0], c[:0], s[:0], w[:0], k, p[:0]),
])
def test_what_the_kernel_does_not_take(rng, change):
    with pytest.raises(UserError, match=r"index_scores_sm100: expected q \[S, 64 \* 128\], .*, S at least 1, found q \["):
        run(*change(*site(rng, 2, 8)))
    with pytest.raises(UserError, match=r"index_scores_sm100: expected quantised queries \(--kv-quant on\)"):
        run(*site(rng, 2, 8), quantize=False)
