"""The attention kernel on the CPU emulator against its definition."""

import math

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import attention as module
from dsv4.kernels.attention import attention
from dsv4.kernels.keys import Keys
from dsv4.ops.attention import attention_ref
from dsv4.ops.rope import rope_frequencies, rope_table

from ..emulator.emulator import emulated, needs_gxx
from . import compare

pytestmark = needs_gxx
D, W, R, EPS = 512, 128, 136, 1e-6


class Case:
    """One call's inputs: fresh q, sinks, and keys for every row that some token sees; all other rows of the caches are NaN."""

    def __init__(self, rng, *, S=1, H=4, position=0, ratio=0, top_k=None, spread=1.0):
        self.q, self.sink = torch.randn(S, H * D, generator=rng), torch.randn(H, generator=rng)
        self.positions = torch.arange(position, position + S)
        self.cos, self.sin = rope_table(self.positions, rope_frequencies(64, 10000.0))
        self.window, self.entries, self.ratio, self.selected = nans(R), None, ratio, None
        seen = torch.arange(max(0, position - W + 1), position + S) % R
        put(self.window, seen, torch.randn(len(seen), D, generator=rng) * spread)
        if ratio:
            visible = (self.positions + 1) // ratio
            self.entries, seen = nans(int(visible[-1]) + 3), torch.arange(visible[-1])
            if top_k:
                self.selected = torch.full((S, top_k), -1, dtype=torch.int32)
                for row, n in zip(self.selected, visible.tolist(), strict=True):
                    some = torch.randperm(n, generator=rng)[:top_k].sort().values
                    row[: len(some)] = some
                seen = self.selected[self.selected >= 0].unique()
            put(self.entries, seen, torch.randn(len(seen), D, generator=rng) * spread)

    def keys(self, s):
        """bf16 [K, 512]: what token s sees."""
        t = int(self.positions[s])
        keys = self.window.unpack()[torch.arange(max(0, t - W + 1), t + 1) % R]
        if self.entries is None:
            return keys
        rows = slice((t + 1) // self.ratio) if self.selected is None else self.selected[s][self.selected[s] >= 0]
        return torch.cat((keys, self.entries.unpack()[rows]))

    def arguments(self):
        return [self.q, self.sink, self.cos, self.sin, self.positions, self.window, W, self.entries, self.ratio, self.selected, EPS]


def nans(rows):
    return Keys(*(torch.full((rows, width), 255, dtype=torch.uint8) for width in (576, 8)))


def put(keys, rows, values):
    for whole, part in zip(keys, Keys.pack(values), strict=True):
        whole[rows] = part


def run(case, **how):
    """[S, H, 512]"""
    with emulated(**how):
        return attention(*case.arguments()).unflatten(1, (-1, D))


def turn(x, cos, sin):
    """RoPE of x [S, H, 512] in its own precision."""
    a, b, cos, sin = x[..., -64::2], x[..., -63::2], cos[:, None], sin[:, None]
    return torch.cat((x[..., :-64], torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)), -1)


def exact(case):
    """float64 [S, H, 512]: the output of q rounded to bf16, and what rounding of the weights adds to it, in units of that error."""
    q, cos, sin, sink = (x.double() for x in (case.q.unflatten(1, (-1, D)), case.cos, case.sin, case.sink))
    q = turn(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS), cos, sin).bfloat16().double()
    out, noise = [], []
    for s in range(len(q)):
        keys = case.keys(s).double()
        scores = q[s] @ keys.T * D**-0.5
        top = torch.maximum(scores.amax(-1), sink)[:, None]
        p = torch.exp(scores - top)
        total = p.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top)
        out.append(p @ keys / total)
        noise.append((p.square() @ keys.square()).sqrt() / total)
    return turn(torch.stack(out), cos, -sin), torch.stack(noise)


def definition(case):
    """In bf16, as the kernel: q and the weights are rounded to it, scores and sums are fp32."""
    arguments = case.arguments()
    arguments[5], arguments[7] = case.window.unpack(), None if case.entries is None else case.entries.unpack()
    return attention_ref(*arguments).unflatten(1, (-1, D))


def assert_as_good(got, case):
    """Both round q to bf16 at the same place, and so does the reference: with one key that rounding alone would be the error, a single draw
    that the definition's second rounding may cancel. A row of few keys has few roundings of weights, which the definition may escape by
    luck: 2^-10 of what they do is allowed on top."""
    want, noise = exact(case)
    compare.assert_as_good(got, definition(case), want, roundings=2**14, scale=noise)


# A window that is not full, full, and that wraps in its ring of 136 rows.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("position", [0, 3, 4, 126, 127, 128, 129, 135, 136, 137, 1000])
def test_window(rng, position, reverse):
    case = Case(rng, position=position)
    assert_as_good(run(case, reverse=reverse), case)


# Blocks of 4 end at 3, 7, ...; nothing, one entry, fewer entries than are selected, as many, more.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("position,top_k", [(0, 5), (2, 5), (3, 5), (4, 5), (18, 5), (19, 5), (22, 5), (23, 5), (127, 8), (300, 512),
                                            (900, 100), (2500, 512)])
def test_selected_entries(rng, position, top_k, reverse):
    case = Case(rng, position=position, ratio=4, top_k=top_k)
    assert_as_good(run(case, reverse=reverse), case)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("position", [0, 126, 127, 128, 254, 255, 256, 128 * 64 - 1, 128 * 65, 128 * 500])
def test_all_entries(rng, position, reverse):
    case = Case(rng, position=position, ratio=128)
    assert_as_good(run(case, reverse=reverse), case)


# Each token has its own window, angles, entries and selection.
@pytest.mark.parametrize("S", range(1, 9))
@pytest.mark.parametrize("kind", [{}, {"ratio": 4, "top_k": 20}, {"ratio": 128}])
@pytest.mark.parametrize("position", [0, 125, 253])
def test_tokens(rng, position, kind, S):
    case = Case(rng, S=S, position=position, **kind)
    assert_as_good(run(case, reverse=S % 2 == 0), case)


# A tensor core's rows are 16 heads: fewer, all, one more, Flash, Pro.
@pytest.mark.parametrize("H", [1, 4, 15, 16, 17, 40, 64, 128])
def test_heads(rng, H):
    case = Case(rng, S=2, H=H, position=200, ratio=4, top_k=30)
    assert_as_good(run(case, reverse=H % 2 == 0), case)


# The forms of the kernel, by the number of SMs that they get: 40 heads and 28 units of 16 keys are 5 x 14, 3 x 14 and 3 x 6 blocks; then
# two blocks, of 32 and 8 heads, and splits of one tile and of several, ragged last ones.
FORMS = {70: (14, 8, 2), 42: (14, 16, 2), 18: (6, 16, 5), 16: (8, 32, 4), 12: (6, 32, 4), 4: (2, 32, 4), 3: (1, 32, 4)}
HEADS = 40


def shares(monkeypatch, sms):
    monkeypatch.setattr(module, "_SMS", sms)
    assert module.shares_of(28, HEADS, 1) == dict(zip(("splits", "block_heads", "tile"), FORMS[sms], strict=True))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sms", FORMS)
def test_few_blocks_take_several_tiles_each(rng, monkeypatch, sms, reverse):
    """428 keys. What the ring has beyond the window and what is behind the last entry is NaN."""
    shares(monkeypatch, sms)
    case = Case(rng, H=HEADS, position=128 * 300, ratio=128)
    assert_as_good(run(case, reverse=reverse), case)


@pytest.mark.parametrize("position", [0, 40, 300, 1203])
@pytest.mark.parametrize("sms", FORMS)
def test_splits_that_see_no_key(rng, monkeypatch, sms, position):
    """Room for 428 keys, of which there are few yet; whole splits and the last tiles of others are empty."""
    shares(monkeypatch, sms)
    case = Case(rng, H=HEADS, position=position, ratio=4, top_k=300)
    assert_as_good(run(case), case)
    case = Case(rng, H=HEADS, position=position, ratio=128)
    case.entries = Keys(*(torch.cat((part, part.new_full((300 - len(part), part.shape[1]), 255))) for part in case.entries))
    assert_as_good(run(case), case)


def test_shares_of_the_published_models():
    """Pro and Flash, one token: HCA and SWA at 4K, CSA; HCA at 1M; eight tokens."""
    for units, heads, tokens, want in ((11, 128, 1, (6, 8, 2)), (73, 128, 1, (15, 16, 5)), (9, 64, 1, (5, 8, 2)), (41, 64, 1, (21, 16, 2)),
                                       (521, 128, 1, (33, 32, 4)), (73, 128, 8, (4, 32, 4)), (1, 4, 1, (1, 8, 2))):
        assert tuple(module.shares_of(units, heads, tokens).values()) == want


# Up to 64 splits of 2 units; of 5; more than 32 splits to merge, and more than 24; several tiles each.
@pytest.mark.parametrize("keys", [500, 1024, 1025, 2050, 4096, 4097, 5200])
def test_many_keys(rng, keys):
    case = Case(rng, H=2, position=128 * (keys - 128), ratio=128)
    assert_as_good(run(case), case)


def test_shares_without_a_single_key(rng):
    """A selection may have holes and end before what the position allows: whole shares of 32 keys, and of 16, are empty."""
    case = Case(rng, position=2000, ratio=4, top_k=256)
    case.selected[:, 33:100], case.selected[:, 130:] = -1, -1
    assert_as_good(run(case), case)
    case.selected[:] = -1
    assert_as_good(run(case), case)


@pytest.mark.parametrize("spread", [1e-3, 30.0, 300.0])
def test_small_and_huge_scores(rng, spread):
    """Scores of up to several thousand: exp overflows without the maximum, and most weights are 0."""
    case = Case(rng, S=2, position=300, ratio=4, top_k=60, spread=spread)
    assert_as_good(run(case), case)


@pytest.mark.parametrize("sms", FORMS)
def test_scales_of_a_key_s_blocks_that_are_far_apart(rng, monkeypatch, sms):
    """Weights are f16 relative to the largest scale of a warp's keys: 2^12 between them costs no bit. The blocks with the large scales are
    where q is 0, so that no key takes all of the weight."""
    shares(monkeypatch, sms)
    case = Case(rng, H=HEADS, position=300, ratio=128)
    case.q.view(HEADS, D)[:, 64:256] = 0
    for keys in (case.window, case.entries):
        rows = (keys.scales[:, 0] != 255).nonzero().flatten()
        values = torch.randn(len(rows), 8, 64, generator=rng) * torch.exp2(torch.randint(-6, 7, (len(rows), 8, 1), generator=rng).float())
        values[:, [0, 4, 5, 6, 7]] = torch.randn(len(rows), 5, 64, generator=rng)
        put(keys, rows, values.flatten(1))
    want, noise = exact(case)
    got, low = run(case), definition(case)
    assert_as_good(got, case)
    for block in range(8):  # each for itself: the errors of the large ones would hide the others
        dims = slice(64 * block, 64 * block + 64)
        compare.assert_as_good(got[..., dims], low[..., dims], want[..., dims], roundings=2**14, scale=noise[..., dims])


def test_entries_without_a_row(rng):
    """A context of less than a block: what is named are none."""
    case = Case(rng, S=2, position=1)
    want = run(case)
    case.entries, case.ratio = Keys.empty(0), 4
    assert torch.equal(run(case), want)
    case.selected = torch.full((2, 9), -1, dtype=torch.int32)
    assert torch.equal(run(case), want)


def test_scores_that_are_all_negative(rng):
    case = Case(rng, H=1, position=150, ratio=4, top_k=30)
    case.q[:, -64:] = 0  # RoPE turns nothing
    for keys in (case.window, case.entries):
        rows = keys.scales[:, 0] != 255
        put(keys, rows, -case.q * torch.rand(int(rows.sum()), 1, generator=rng) * 3)
    assert_as_good(run(case), case)


def test_sinks(rng):
    """A sink that takes all of the weight leaves zeros; one that takes none is as if it were not there."""
    case = Case(rng, H=5, position=140, ratio=4, top_k=30)
    case.sink = torch.tensor([1e4, -1e4, -math.inf, 30.0, 5.0])
    got = run(case)
    assert_as_good(got, case)
    assert (got[:, 0] == 0).all()
    case.sink = torch.tensor([-math.inf, -math.inf, -1e4, 0.0, 0.0])
    assert torch.equal(run(case)[:, 1:3], got[:, 1:3])


def test_equal_keys(rng):
    """All weights are equal."""
    case = Case(rng, position=300, ratio=4, top_k=40)
    key = torch.randn(1, D, generator=rng)
    for keys in (case.window, case.entries):
        rows = keys.scales[:, 0] != 255
        put(keys, rows, key.expand(int(rows.sum()), D))
    assert_as_good(run(case), case)


@pytest.mark.parametrize("scale", [10, 40, 105, 120, 127, 134, 135, 150, 200, 240])
def test_every_e4m3_code_is_expanded_exactly(rng, scale):
    """With q = 0, one key and no sink the output is the key, at position 0 turned by no angle. From scales that the packing never makes
    (its smallest is 105) to bf16's largest values."""
    codes = torch.cat((torch.arange(0x7F), torch.arange(0x80, 0xFF)))  # all but the two NaN
    for first in (0, 100):
        case = Case(rng, H=1)
        case.q[:], case.sink[:] = 0, -math.inf
        case.window.values[0, :448] = codes.roll(-first).repeat(2)[:448].to(torch.uint8)
        case.window.scales[0, :7] = torch.arange(scale, scale + 7).clamp_max(246)
        assert torch.equal(run(case)[0], case.window.unpack()[:1])


def test_not_finite_keys_spoil_what_sees_them(rng):
    """A NaN in an entry that only the last token selects; the same in the window."""
    case = Case(rng, S=2, position=302, ratio=4, top_k=10)
    case.selected[0] = torch.arange(10)
    case.selected[1] = torch.arange(10) + 1
    put(case.entries, torch.arange(11), torch.randn(11, D, generator=rng))
    case.entries.scales[10] = case.entries.values[10] = 255
    got = run(case)
    assert got[0].isfinite().all() and got[1].isnan().all()


def test_trap_04_each_head_of_q_is_normed_without_a_weight(rng):
    """A head times any number, however large: the same output (eps is small against both)."""
    case = Case(rng, position=200, ratio=128)
    want = run(case)
    case.q = (case.q.unflatten(1, (4, D)) * torch.tensor([4.0, 2.0**40, 0.5, 2.0**-2])[:, None]).flatten(1)
    # Powers of two leave the same bits but for eps, which is 1e-6 of the mean square here.
    torch.testing.assert_close(run(case).float(), want.float(), rtol=2**-7, atol=1e-3)
    case.q[:] = 0
    assert_as_good(run(case), case)


def test_trap_05_the_sink_is_unscaled_and_only_in_the_denominator(rng):
    """q = 0 makes every score 0: each of K equal keys weighs 1 / (K + exp(sink))."""
    case = Case(rng, H=5, position=255, ratio=128)
    case.q[:], case.sink = 0, torch.tensor([-3.0, 0.0, 2.0, 4.0, 6.0])
    case.cos[:], case.sin[:] = 1, 0
    for keys, n in ((case.window, R), (case.entries, 2)):
        put(keys, torch.arange(n), torch.ones(n, D))
    got = run(case).float()
    for h in range(5):
        assert got[0, h].tolist() == pytest.approx([130 / (130 + math.exp(case.sink[h]))] * D, rel=2**-8)


def test_trap_06_the_output_is_turned_back_by_the_query_s_angle(rng):
    """One key, seen by two tokens: its plain dims come out alike, its rotated ones turned by each token's angle."""
    case = Case(rng, S=2, H=1)
    case.sink[:], case.q[:] = -math.inf, 0
    put(case.window, torch.arange(2), torch.ones(2, D))
    case.cos[0], case.sin[0], case.cos[1], case.sin[1] = 0, 1, -1, 0
    got = run(case)[:, 0]
    assert (got[:, :448] == 1).all() and (got[0, 448::2] == 1).all() and (got[0, 449::2] == -1).all() and (got[1, 448:] == -1).all()


@pytest.mark.parametrize("position", [126, 127, 128, 255])
def test_trap_08_the_window_is_128_keys_with_the_token_s_own(rng, position):
    """q = 0: the output is the mean of what is seen. The oldest position, the token's own and the entry that ends with it count; the
    position before, the one after and later entries do not."""
    case = Case(rng, H=1, position=position, ratio=128)
    case.q[:], case.sink[:] = 0, -math.inf
    case.cos[:], case.sin[:] = 1, 0
    put(case.window, torch.arange(R), torch.zeros(R, D))
    for weight, p in ((1.0, position), (2.0, position - 127), (100.0, position - 128), (100.0, position + 1)):
        if p >= 0:
            put(case.window, [p % R], torch.full((1, D), weight))
    entries = (position + 1) // 128
    put(case.entries, torch.arange(len(case.entries.values)), torch.full((len(case.entries.values), D), 100.0))
    put(case.entries, torch.arange(entries), torch.full((entries, D), 4.0))
    total, keys = 1 + 2 * (position >= 127) + 4 * entries, min(position + 1, 128) + entries
    assert run(case).float().flatten().tolist() == pytest.approx([total / keys] * D, rel=2**-8)


def test_the_order_of_threads_changes_no_bit(rng):
    case = Case(rng, S=3, H=20, position=1000, ratio=4, top_k=200)
    assert torch.equal(run(case), run(case, reverse=True))


def test_strided_inputs(rng):
    case = Case(rng, S=2, position=200, ratio=4, top_k=10)
    want = run(case)
    case.q, case.cos, case.sin, case.selected = (x.T.contiguous().T for x in (case.q, case.cos, case.sin, case.selected))
    assert torch.equal(run(case), want)


@pytest.mark.parametrize("change,expected", [
    ({0: lambda q: q[:, :-1]}, "q .S, H"),
    ({0: lambda q: q.bfloat16()}, "q .S, H"),
    ({0: lambda q: torch.zeros(q.numel() + 1)[1:].view(q.shape)}, "q 16-byte aligned"),
    ({1: lambda sink: sink[:3]}, "q .S, H"),
    ({2: lambda cos: cos[:, :16]}, "cos and sin"),
    ({3: lambda sin: sin[:1]}, "cos and sin"),
    ({4: lambda positions: positions.int()}, "positions"),
    ({4: lambda positions: positions[:1]}, "positions"),
    (dict.fromkeys((0, 2, 3, 4), lambda x: x[:0]), "S 1 to 8"),
    (dict.fromkeys((0, 2, 3, 4), lambda x: x.repeat(5, *[1] * (x.dim() - 1))), "S 1 to 8"),
    ({5: lambda keys: Keys(keys.values[:, :512], keys.scales)}, "window's values"),
    ({5: lambda keys: Keys(keys.values[:128], keys.scales[:128])}, r"window of at least 128 \+ 2 - 1 rows"),
    ({5: lambda keys: Keys(torch.zeros(R * 576 + 8, dtype=torch.uint8)[8:].view(R, 576), keys.scales)}, "16-byte aligned"),
    ({6: lambda size: 0}, "window of at least 0"),
    ({7: lambda keys: Keys(keys.values, keys.scales[:1])}, "entries' values"),
    ({7: lambda keys: None}, "entries, and selected"),
    ({8: lambda ratio: 0}, "ratio of at least 1"),
    ({9: lambda selected: selected.long()}, r"selected \[2, k\] in int32"),
    ({9: lambda selected: selected[:1]}, r"selected \[2, k\] in int32"),
])
def test_what_the_kernel_does_not_take(rng, change, expected):
    arguments = Case(rng, S=2, position=20, ratio=4, top_k=3).arguments()
    for i, f in change.items():
        arguments[i] = f(arguments[i])
    with pytest.raises(UserError, match=rf"^attention: expected .*{expected}.*, found .* \["):
        attention(*arguments)
