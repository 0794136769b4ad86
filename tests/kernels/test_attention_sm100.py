"""The attention_sm100 kernel (tcgen05) on the CPU emulator against the definition of attention."""

import ctypes
import math

import pytest
import torch

from dsv4 import ops
from dsv4.errors import UserError
from dsv4.kernels import attention as module
from dsv4.kernels import build
from dsv4.kernels.keys import Keys

from ..emulator.emulator import ON_GPU, emulated, needs_gxx
from . import compare
from .test_attention import Case, D, assert_as_good, definition, exact, nans, put

pytestmark = needs_gxx
if ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 10:
    pytestmark = pytest.mark.skip(reason="this GPU has no tensor memory")


def run(case, **how):
    """[S, H, 512]"""
    with emulated(**how):
        return module.attention_sm100(*case.arguments()).unflatten(1, (-1, D))


# A window that is not full, full, and that wraps in its ring of 136 rows.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("position", [0, 3, 62, 63, 64, 127, 128, 135, 136, 1000])
def test_window(rng, position, reverse):
    case = Case(rng, position=position)
    assert_as_good(run(case, reverse=reverse), case)


# Blocks of 4 end at 3, 7, ...; nothing, one entry, fewer entries than are selected, as many, more. Pro's and Flash's top-k.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("position,top_k", [(0, 5), (3, 5), (19, 5), (23, 5), (127, 8), (300, 512), (2500, 512)])
def test_selected_entries(rng, position, top_k, reverse):
    case = Case(rng, position=position, ratio=4, top_k=top_k)
    assert_as_good(run(case, reverse=reverse), case)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("position", [0, 127, 128, 255, 128 * 64 - 1, 128 * 200])
def test_all_entries(rng, position, reverse):
    case = Case(rng, position=position, ratio=128)
    assert_as_good(run(case, reverse=reverse), case)


# Each token has its own window, angles, entries and selection; more than a step of decode has.
@pytest.mark.parametrize("S", [2, 9])
@pytest.mark.parametrize("position,kind", [(0, {"ratio": 4, "top_k": 20}), (125, {}), (125, {"ratio": 4, "top_k": 20}),
                                           (253, {"ratio": 128})])
def test_tokens(rng, position, kind, S):
    case = Case(rng, S=S, position=position, **kind)
    assert_as_good(run(case, reverse=S % 2 == 0), case)


# A product's rows are 128 heads: fewer, Flash, Pro, one more.
@pytest.mark.parametrize("H", [1, 15, 64, 127, 128, 129])
def test_heads(rng, H):
    case = Case(rng, S=2, H=H, position=200, ratio=4, top_k=30)
    assert_as_good(run(case, reverse=H % 2 == 0), case)


@pytest.mark.parametrize("S,H,top_k", [(1, 128, 1024), (2, 64, 512)])
def test_sizes_of_pro_and_flash(rng, S, H, top_k):
    """Of a CSA layer: 128 keys of the window and top_k entries. Of 7,000."""
    case = Case(rng, S=S, H=H, position=28000, ratio=4, top_k=top_k)
    assert_as_good(run(case), case)


# 128 + 75 keys are 4 tiles, the last one ragged: pairs of blocks with all, two or one of them; and with none, where there are fewer keys.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("position", [30, 90, 300 + 4 * 75])
def test_splits(rng, monkeypatch, splits, position, reverse):
    monkeypatch.setattr(module, "_pairs", lambda *_: splits)
    case = Case(rng, S=2, H=5, position=position, ratio=4, top_k=75)
    assert_as_good(run(case, reverse=reverse), case)
    case = Case(rng, H=5, position=128 * 75 + position, ratio=128)
    assert_as_good(run(case, reverse=reverse), case)


def test_how_many_pairs():
    """Pro: 1 to 8 tokens of a step, a prompt; few keys; a second group of heads."""
    cases = {(1, 18): 4, (8, 18): 4, (18, 18): 4, (19, 18): 2, (38, 18): 1, (4096, 18): 1, (1, 3): 2, (1, 1): 1}
    assert {case: module._pairs(*case, 148) for case in cases} == cases


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("spread", [1e-3, 30.0, 300.0])
def test_small_and_huge_scores(rng, monkeypatch, spread, splits):
    """Scores of up to several thousand: exp overflows without the maximum, and most weights are 0. Sums are rescaled from tile to tile."""
    monkeypatch.setattr(module, "_pairs", lambda *_: splits)
    case = Case(rng, S=2, position=1000, ratio=4, top_k=200, spread=spread)
    assert_as_good(run(case), case)


@pytest.mark.parametrize("step", [-2.0, 2.0])
def test_the_reference_follows_the_largest_score(rng, step):
    """Scores that rise, or fall, from key to key: by 60 over a tile of 64, so that every tile rescales what was summed up, or none does."""
    case = Case(rng, H=3, position=127, ratio=0)
    keys = torch.randn(128, D, generator=rng) * 0.2
    case.q[:, -64:] = 0
    case.q.view(3, D)[:] = case.q.view(3, D)[0]
    direction = torch.nn.functional.normalize(case.q.view(3, D)[0], dim=0)
    keys = keys - (keys @ direction)[:, None] * direction + step / 2 * torch.arange(128.0)[:, None] * direction
    put(case.window, torch.arange(128), keys)
    assert_as_good(run(case), case)


def test_scales_of_a_key_s_blocks_that_are_far_apart(rng):
    """2^24 between the blocks of 64 dims costs no bit. The blocks with the large scales are where q is 0, so that no key takes all of the
    weight."""
    case = Case(rng, H=20, position=300, ratio=128)
    case.q.view(20, D)[:, 64:256] = 0
    for keys in (case.window, case.entries):
        rows = (keys.scales[:, 0] != 255).nonzero().flatten()
        values = torch.randn(len(rows), 8, 64, generator=rng) * torch.exp2(torch.randint(-12, 13, (len(rows), 8, 1), generator=rng).float())
        values[:, [0, 4, 5, 6, 7]] = torch.randn(len(rows), 5, 64, generator=rng)
        put(keys, rows, values.flatten(1))
    want, noise = exact(case)
    got, low = run(case), definition(case)
    for block in range(8):  # each for itself: the errors of the large ones would hide the others
        dims = slice(64 * block, 64 * block + 64)
        compare.assert_as_good(got[..., dims], low[..., dims], want[..., dims], roundings=2**14, scale=noise[..., dims])


@pytest.mark.parametrize("scale", [42, 105, 127, 160])
def test_every_e4m3_code_is_expanded_exactly(rng, scale):
    """With q = 0, one key and no sink the output is the key, at position 0 turned by no angle. Scales from 2^-85 to 2^39."""
    codes = torch.cat((torch.arange(0x7F), torch.arange(0x80, 0xFF)))  # all but the two NaN
    for first in (0, 100):
        case = Case(rng, H=1)
        case.q[:], case.sink[:] = 0, -math.inf
        case.window.values[0, :448] = codes.roll(-first).repeat(2)[:448].to(torch.uint8)
        case.window.scales[0, :7] = torch.arange(scale, scale + 7)
        assert torch.equal(run(case)[0], case.window.unpack()[:1])


@pytest.mark.parametrize("block", range(7))
def test_a_scale_that_is_too_large_is_nan(rng, block):
    """Up to 2^39 (byte 166) keys are exact; above, a key is NaN rather than wrong."""
    case = Case(rng, H=1)
    case.window.scales[0, block] = 166
    assert run(case).isfinite().all()
    case.window.scales[0, block] = 167
    assert run(case).isnan().all()


def test_not_finite_keys_spoil_what_sees_them(rng):
    """A NaN in an entry that only the last token selects, in its FP8 dims or in its rotated ones."""
    case = Case(rng, S=2, position=302, ratio=4, top_k=10)
    case.selected[0] = torch.arange(10)
    case.selected[1] = torch.arange(10) + 1
    put(case.entries, torch.arange(11), torch.randn(11, D, generator=rng))
    for part in (slice(0, 64), slice(448, 450)):
        spoilt = Keys(*(t.clone() for t in case.entries))
        spoilt.values[10, part] = 255
        if part.start == 0:
            spoilt.scales[10, 0] = 255
        case.entries, whole = spoilt, case.entries
        got = run(case)
        assert got[0].isfinite().all() and got[1].isnan().all()
        case.entries = whole


@pytest.mark.parametrize("splits", [1, 4])
def test_sinks(rng, monkeypatch, splits):
    """A sink that takes all of the weight leaves zeros; one that takes none is as if it were not there."""
    monkeypatch.setattr(module, "_pairs", lambda *_: splits)
    case = Case(rng, H=5, position=140, ratio=4, top_k=30)
    case.sink = torch.tensor([1e4, -1e4, -math.inf, 30.0, 5.0])
    got = run(case)
    assert_as_good(got, case)
    assert (got[:, 0] == 0).all()
    case.sink = torch.tensor([-math.inf, -math.inf, -1e4, 0.0, 0.0])
    assert torch.equal(run(case)[:, 1:3], got[:, 1:3])


@pytest.mark.parametrize("splits", [1, 4])
def test_holes_in_a_selection(rng, monkeypatch, splits):
    """Whole tiles of names that are none, and splits that have nothing else."""
    monkeypatch.setattr(module, "_pairs", lambda *_: splits)
    case = Case(rng, position=2000, ratio=4, top_k=256)
    case.selected[:, 33:140], case.selected[:, 150:] = -1, -1
    assert_as_good(run(case), case)
    case.selected[:] = -1
    assert_as_good(run(case), case)


def test_entries_without_a_row(rng):
    """A context of less than a block: what is named are none."""
    case = Case(rng, S=2, position=1)
    want = run(case)
    case.entries, case.ratio = Keys.empty(0), 4
    assert torch.equal(run(case), want)
    case.selected = torch.full((2, 9), -1, dtype=torch.int32)
    assert torch.equal(run(case), want)


def test_trap_04_each_head_of_q_is_normed_without_a_weight(rng):
    """The norm is over all 512 dims, of which a block has half: the same output for a head times any power of two."""
    case = Case(rng, position=200, ratio=128)
    case.q.view(4, D)[:, :256] *= 8
    assert_as_good(run(case), case)
    want = run(case)
    case.q = (case.q.unflatten(1, (4, D)) * torch.tensor([4.0, 2.0**40, 2.0, 2.0**10])[:, None]).flatten(1)
    torch.testing.assert_close(run(case).float(), want.float(), rtol=2**-7, atol=1e-3)  # but for eps, 1e-6 of the mean square
    case.q[:] = 0
    assert_as_good(run(case), case)


def test_trap_06_the_output_is_turned_back_by_the_query_s_angle(rng):
    """One key, seen by two tokens: its plain dims come out alike, its rotated ones turned by each token's angle."""
    case = Case(rng, S=2, H=1)
    case.sink[:], case.q[:] = -math.inf, 0
    put(case.window, torch.arange(2), torch.ones(2, D))
    case.cos[0], case.sin[0], case.cos[1], case.sin[1] = 0, 1, -1, 0
    got = run(case)[:, 0]
    assert (got[:, :448] == 1).all() and (got[0, 448::2] == 1).all() and (got[0, 449::2] == -1).all() and (got[1, 448:] == -1).all()


def test_a_token_alone_gives_the_same_bits(rng, monkeypatch):
    """With the same number of splits, whatever its neighbours are."""
    case = Case(rng, S=3, position=301, ratio=4, top_k=40)
    monkeypatch.setattr(module, "_pairs", lambda *_: 2)
    together = run(case)
    case.q, case.cos, case.sin, case.positions, case.selected = (
        t[1:2] for t in (case.q, case.cos, case.sin, case.positions, case.selected))
    assert torch.equal(run(case)[0], together[1])


def test_it_can_be_tried_in_the_place_of_attention(rng):
    """As docs/kernels.md says, until a B200 has run it."""
    case = Case(rng, S=2, position=40)
    with emulated(), ops.trying_kernel("attention", module.attention_sm100):
        assert_as_good(ops.attention(*case.arguments()).unflatten(1, (-1, D)), case)


def test_sm_90a_refuses(nvcc, kernel_cache):
    """The object for sm_90a says cudaErrorNotSupported (801) before it touches anything; that for sm_100a finds these arguments wrong."""
    results = {}
    for arch in ("sm_90a", "sm_100a"):
        function = module._attention_sm100.bind(ctypes.CDLL(str(build.build("attention_sm100", arch))))
        results[arch] = function(*[None] * 11, *[0] * 8, 0.0, None)
    assert results == {"sm_90a": 801, "sm_100a": 1}


def test_what_the_kernel_does_not_take(rng):
    case = Case(rng, S=10)
    with pytest.raises(UserError, match="attention_sm100: expected a window of at least 128 \\+ 10 - 1 rows, found"):
        run(case)
    case = Case(rng)
    for field, value in (("q", case.q.bfloat16()), ("sink", case.sink[:3]), ("cos", case.cos[:, :31]), ("window", nans(0))):
        before = getattr(case, field)
        setattr(case, field, value)
        with pytest.raises(UserError, match="attention_sm100: expected"):
            run(case)
        setattr(case, field, before)
