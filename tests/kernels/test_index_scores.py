"""The index_scores kernel on the CPU emulator against its definition."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import build
from dsv4.kernels import indexer as module
from dsv4.kernels.keys import IndexKeys
from dsv4.ops.indexer import index_scores_ref
from dsv4.ops.quant import fp4_round_trip, hadamard
from dsv4.ops.rope import apply_rope, rope_frequencies, rope_table

from ..emulator.emulator import ON_GPU, emulated, needs_gxx
from . import compare

pytestmark = needs_gxx
INF, NAN = float("inf"), float("nan")
H, D = 64, 128
BLOCKS, WARPS, ENTRIES, STAGES = 132, 16, 16, 3  # of the grid, of a block; of a warp at a time; of these on their way
ROUNDINGS = 16  # of the absolute terms: 128 products, 64 heads, the weight; the tensor cores add 16 products at a time


def run(q, cos, sin, head_weights, keys, positions, top_k=0, quantize=True, **how):
    with emulated(**how):
        return module.index_scores(q, cos, sin, head_weights, keys, positions, top_k, quantize)


@pytest.fixture(params=["of a warpgroup", "of a warp"])
def products(request, tmp_path, monkeypatch):
    """wgmma, which only Hopper has, and in its place mma.sync, which the other GPUs run. (On a GPU its own is what there is.)"""
    if request.param == "of a warp":
        if ON_GPU:
            pytest.skip("the emulator's")
        source = (build.SOURCES / "index_scores.cu").read_text()
        include = '#include "index_query.cuh"\n'
        assert source.count(include) == source.count("#include") == 1 and "DSV4_WARPGROUPS" in source
        copy = source.replace(include, f'#include "{build.SOURCES}/index_query.cuh"\n#undef DSV4_WARPGROUPS\n')
        (tmp_path / "index_scores.cu").write_text(copy)
        monkeypatch.setattr(build, "SOURCES", tmp_path)


def site(rng, S, n, capacity=None, size=1.0):
    """S tokens of which the last sees n entries; the keys behind them, up to the capacity, are NaN."""
    positions = torch.arange(4 * n - S, 4 * n) if 4 * n >= S else torch.arange(S)
    angles = rope_table(positions, rope_frequencies(64, 160000.0, factor=16.0))
    keys = IndexKeys.pack(torch.cat((torch.randn(n, D, generator=rng), torch.full(((capacity or n) - n, D), NAN))))
    return [size * torch.randn(S, H * D, generator=rng), *angles, torch.randn(S, H, generator=rng), keys, positions]


def exact(q, cos, sin, head_weights, keys, positions, absolute=False):
    """In float64 from the FP4 values of the definition's queries on; `absolute`: the size of what is added up."""
    q = fp4_round_trip(hadamard(apply_rope(q.bfloat16().unflatten(-1, (H, D)), cos, sin))).double()
    keys, weights = keys.unpack().double(), head_weights.double() * (D**-0.5 * H**-0.5)
    if absolute:
        q, keys, weights = q.abs(), keys.abs(), weights.abs()
    return torch.einsum("sh,sht->st", weights, torch.relu(torch.einsum("shd,td->sht", q, keys)))


def assert_right(got, inputs):
    """Row by row: what the token may see."""
    *query, keys, positions = inputs
    assert got.dtype == torch.float32 and got.shape == (len(positions), len(keys.values))
    for s, n in enumerate(((positions + 1) // 4).clamp(max=len(keys.values)).tolist()):
        one = [t[s : s + 1] for t in query]
        if n:
            seen = IndexKeys(keys.values[:n], keys.scales[:n])
            low = index_scores_ref(*one, seen.unpack(), torch.tensor([4 * n - 1]), 0, True)
            compare.assert_as_good(got[s : s + 1, :n], low, exact(*one, seen, None), ROUNDINGS, exact(*one, seen, None, absolute=True))


# One entry, 8 (half of a warp's), 16 (a warp's), 64 (a warpgroup's), around the first tiles of all blocks, and into a second warpgroup.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, BLOCKS * 4 * ENTRIES - 1, BLOCKS * 4 * ENTRIES + 1])
def test_against_the_definition(rng, n, reverse, products):
    inputs = site(rng, 1, n)
    assert_right(run(*inputs, reverse=reverse), inputs)


@pytest.mark.parametrize("S", range(1, 9))
def test_every_token_has_its_own_query_weights_angles_and_count(rng, S, products):
    inputs = site(rng, S, 77, capacity=91)
    together = run(*inputs)
    assert_right(together, inputs)
    *query, keys, positions = inputs
    for s in range(S):  # and its scores do not depend on its neighbours
        n = int(positions[s] + 1) // 4
        alone = run(*(t[s : s + 1] for t in query), keys, positions[s : s + 1])
        assert torch.equal(alone[0, :n], together[s, :n])


@pytest.mark.parametrize("rounds", [1, STAGES + 1])
def test_several_rounds_of_every_warp(rng, rounds):
    """More entries than all warps take at a time, up to where the first stage is used a third time by some."""
    inputs = site(rng, 1, rounds * BLOCKS * WARPS * ENTRIES + 45)
    assert_right(run(*inputs, reverse=rounds > 1), inputs)


def test_several_rounds_of_several_tokens(rng):
    inputs = site(rng, 2, BLOCKS * WARPS * ENTRIES + 21)
    assert_right(run(*inputs), inputs)


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


def test_the_top_k_is_that_of_float64(rng):
    """Equal as sets, but for entries whose exact score differs from the exact k-th best by less than 2^-18 of the largest score: 32 to 64
    of its fp32 steps, where neighbours near the cut are 70 times as far apart. So at most two can differ."""
    n, top_k = 3000, 512
    inputs = site(rng, 2, n)
    got, want = run(*inputs), exact(*inputs)
    for s in range(2):
        best = want[s].sort(descending=True)
        chosen = set(got[s].sort(descending=True, stable=True).indices[:top_k].tolist())
        differ = chosen ^ set(best.indices[:top_k].tolist())
        assert all(abs(want[s, i] - best.values[top_k - 1]) < 2**-18 * best.values[0] for i in differ) and len(differ) <= 2


def test_trap_27_relu_makes_exact_zeros(rng):
    """Keys that are opposite to every head's query score exactly 0, with either sign of the weights; their negatives do not."""
    inputs = site(rng, 1, 40)
    inputs[0] = inputs[0][:, :D].repeat(1, H)
    q = fp4_round_trip(hadamard(apply_rope(inputs[0].bfloat16().unflatten(-1, (H, D)), *inputs[1:3])))[0, 0]
    inputs[4] = IndexKeys.pack(torch.stack((q, -q)).repeat(20, 1))
    got = run(*inputs)[0]
    assert (got[1::2] == 0).all() and (got[::2] != 0).all()
    assert_right(got[None], inputs)


@pytest.mark.parametrize("of_q,of_keys,of_weights", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1e4, 1, 1), (1e-4, 1, 1), (1, 100, 1), (1, 1e-3, 1),
                                                     (1, 1, -1e6), (1e15, 1e-12, 1), (1e-9, 1e9, 1), (2.0**-80, 1, 1), (1, 2.0**-50, 1)])
def test_extremes(rng, of_q, of_keys, of_weights):
    inputs = site(rng, 2, 50, size=of_q)
    inputs[3] *= of_weights
    inputs[4] = IndexKeys.pack(of_keys * torch.randn(50, D, generator=rng))
    got = run(*inputs)
    assert_right(got, inputs)
    assert of_q and of_keys and of_weights or (got[:, :50].nan_to_num(0) == 0).all()


def test_the_largest_scale_of_a_key(rng):
    """Up to 2^33 (byte 160) keys are exact; above, an entry is NaN rather than wrong."""
    inputs = site(rng, 1, 9)
    inputs[4].scales[:] = torch.tensor([100, 127, 160, 130])
    assert_right(run(*inputs), inputs)
    inputs[4].scales[3, 2], inputs[4].scales[6, 0] = 161, 254
    assert run(*inputs)[0].isnan().nonzero().flatten().tolist() == [3, 6]


def test_the_blocks_of_a_key_and_of_a_query_have_scales_of_their_own(rng):
    inputs = site(rng, 2, 64)
    grow = torch.exp2(torch.randint(-12, 13, (64, 4), generator=rng).float()).repeat_interleave(32, 1)
    inputs[4] = IndexKeys.pack(torch.randn(64, D, generator=rng) * grow)
    inputs[0] *= torch.exp2(torch.randint(-12, 13, (2, H), generator=rng).float()).repeat_interleave(D, 1)
    assert_right(run(*inputs), inputs)


def test_all_sixteen_values_of_a_nibble_at_every_place():
    """Every code at every dim, against one dim of the query at a time (a unit vector stays one under two Hadamard rotations)."""
    S, T = 8, 16
    keys = IndexKeys(torch.empty(T, D // 2, dtype=torch.uint8), torch.full((T, 4), 127, dtype=torch.uint8))
    keys.values[:] = torch.arange(16, dtype=torch.uint8)[:, None] * 17
    positions = torch.arange(64, 64 + S)
    for tokens in range(0, D, S * 16):
        dims = (tokens + torch.arange(S * 16)).view(S, 16) % D
        q = torch.zeros(S, H, D)
        q[:, :16] = hadamard(torch.nn.functional.one_hot(dims, D).float()) * 16
        cos, sin = torch.ones(S, 32), torch.zeros(S, 32)
        weights = torch.zeros(S, H)
        weights[:, :16] = 1
        inputs = [q.flatten(1), cos, sin, weights, keys, positions]
        assert_right(run(*inputs), inputs)


def test_trap_26_what_is_not_finite_gives_nan_and_only_there(rng):
    """A key's NaN spoils its entry, a query's or a weight's its token; an infinite weight does what fp32 does with it."""
    inputs = site(rng, 4, 40)
    inputs[-1] = torch.arange(160, 164)
    inputs[4] = IndexKeys.pack(inputs[4].unpack().index_fill(0, torch.tensor([5, 33]), NAN))
    inputs[0][0, 3 * D + 100], inputs[0][1, 9 * D] = NAN, -INF
    inputs[3][2, 63] = NAN
    got = run(*inputs)
    assert got[:3].isnan().all() and got[3].isnan().nonzero().flatten().tolist() == [5, 33]
    inputs = site(rng, 1, 40)
    inputs[3][0, 7] = INF
    want = index_scores_ref(*inputs[:4], inputs[4].unpack(), inputs[5], 0, True)
    got = run(*inputs)
    assert torch.equal(got.isnan(), want.isnan()) and (got[~got.isnan()] == INF).all()


def test_what_lies_behind_is_not_read(rng):
    """The keys end with the last entry of the last token, beyond which the emulator lets nobody read; before that, they are NaN."""
    for n in (5, 39, 64):
        inputs = site(rng, 2, n)
        inputs[-1] = inputs[-1] - 8
        assert_right(run(*inputs), inputs)
        inputs[4] = IndexKeys.pack(inputs[4].unpack().index_fill(0, torch.arange(max(0, n - 2), n), NAN))
        assert_right(run(*inputs), inputs)


def test_strided_inputs(rng):
    inputs = site(rng, 3, 20)
    strided = [t.T.contiguous().T for t in inputs[:4]]
    assert torch.equal(run(*strided, *inputs[4:])[2, :20], run(*inputs)[2, :20])
    assert run(*inputs[:4], IndexKeys.empty(0), inputs[5]).shape == (3, 0)


@pytest.mark.parametrize("change", [
    lambda q, c, s, w, k, p: (q[:, :-1], c, s, w, k, p), lambda q, c, s, w, k, p: (q.bfloat16(), c, s, w, k, p),
    lambda q, c, s, w, k, p: (q, c[:, :31], s, w, k, p), lambda q, c, s, w, k, p: (q, c, s.double(), w, k, p),
    lambda q, c, s, w, k, p: (q, c, s, w[:, :63], k, p), lambda q, c, s, w, k, p: (q, c, s, w, k, p.int()),
    lambda q, c, s, w, k, p: (q, c, s, w, k, p[:1]), lambda q, c, s, w, k, p: (q[:, :16 * D], c, s, w[:, :16], k, p),
    lambda q, c, s, w, k, p: (*(t.repeat(513, 1) for t in (q, c, s, w)), k, p.repeat(513)),
    lambda q, c, s, w, k, p: (q[:0], c[:0], s[:0], w[:0], k, p[:0]),
])
def test_what_the_kernel_does_not_take(rng, change):
    with pytest.raises(UserError, match=r"index_scores: expected q \[S, 64 \* 128\], .*, found q \["):
        run(*change(*site(rng, 2, 8)))


@pytest.mark.parametrize("keys", [IndexKeys(torch.zeros(8, 63, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.uint8)),
                                  IndexKeys(torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(7, 4, dtype=torch.uint8)),
                                  IndexKeys(torch.zeros(8, 64, dtype=torch.int8), torch.zeros(8, 4, dtype=torch.uint8))])
def test_keys_that_it_does_not_take(rng, keys):
    inputs = site(rng, 2, 8)
    with pytest.raises(UserError, match=r"index_scores: expected values \[T, 64\] and scales \[T, 4\] in uint8, found values \["):
        run(*inputs[:4], keys, inputs[5])
    with pytest.raises(UserError, match=r"index_scores: expected quantised queries \(--kv-quant on\)"):
        run(*inputs, quantize=False)
