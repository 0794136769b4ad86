"""The compressors of update_caches on the CPU emulator against their definition: states bit for bit, entries byte by byte.

The exact entry is pooled in float64 from the sequence's rows, by their positions and not by way of a state; `packed` says how bytes are
compared.
"""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.arrivals import arrivals
from dsv4.kernels.keys import IndexKeys, Keys
from dsv4.ops import quant
from dsv4.ops.compressor import Pool, compress, pool

from ..emulator.emulator import emulated, needs_gxx
from . import packed
from .test_latents import Site

pytestmark = needs_gxx
EPS = 1e-6
INF = float("inf")


class Sequence:
    """Random projections and weights of a layer's compressors for the positions first .. first + n - 1; ratio 4 has two, ratio 128 one.

    A first position that is not 0 starts a state with the tokens before it: those of its open block and, for ratio 4, of the block before.
    """

    def __init__(self, rng, ratio, n, first=0, pools=None):
        def randn(*shape):
            return torch.randn(*shape, generator=rng)
        self.ratio, self.first, self.n = ratio, first, n
        self.start = 0 if first < 2 * ratio else (first // ratio - 1) * ratio  # from here on there are rows
        self.pools = []
        for d in (512, 128)[: pools or (2 if ratio == 4 else 1)]:
            width = (2 if ratio == 4 else 1) * d
            self.pools.append({"kv": randn(first + n - self.start, width), "score": 2 * randn(first + n - self.start, width),
                               "ape": randn(ratio, width), "norm": randn(d), "d": d})
        angle = 3 * randn((first + n) // ratio + 1, 32)
        self.cos, self.sin = angle.cos(), angle.sin()  # by block

    def rows(self, p, a, b):
        """(kv, biased score) of positions a .. b - 1; before the sequence (0, -inf)."""
        at = torch.arange(a, b)
        kv, score = torch.zeros(b - a, p["kv"].shape[1]), torch.full((b - a, p["kv"].shape[1]), -INF)
        real = at >= self.start
        kv[real], score[real] = p["kv"][at[real] - self.start], p["score"][at[real] - self.start] + p["ape"][at[real] % self.ratio]
        return kv, score

    def state(self, stale=float("nan")):
        """What the state holds before the first position; `stale` in the rows that no open block has filled."""
        held, out = self.first % self.ratio, []
        for p in self.pools:
            parts = [self.rows(p, self.first - held - self.ratio, self.first - held)] if self.ratio == 4 else []
            parts.append(self.rows(p, self.first - held, self.first))
            rest = torch.full((self.ratio - held, p["kv"].shape[1]), stale)
            out.append(tuple(torch.cat([*(part[i] for part in parts), rest]) for i in (0, 1)))
        return out

    def interval(self, p, block):
        """[1, d] before the entry's last rounding to bf16."""
        r, d = self.ratio, p["d"]
        kv, score = (t.double() for t in self.rows(p, block * r, block * r + r))
        if r == 4:
            before = [t.double() for t in self.rows(p, block * r - r, block * r)]
            kv, score = (torch.cat((b[:, :d], t[:, d:])) for b, t in zip(before, (kv, score), strict=True))
        weights = score.softmax(0)
        # 8 roundings of the sum's terms, and those of exp's argument, which are as large as it is and independent of each other.
        apart = (score - score.amax(0)).nan_to_num(0, neginf=0)
        noise = packed.ROUNDING * (8 * (weights * kv.abs()).sum(0) + 4 * (weights * kv * apart).norm(dim=0))
        pooled = packed.bf16(packed.around((weights * kv).sum(0)[None], noise[None]))
        return packed.norm_rope(pooled, p["norm"], self.cos[block, None], self.sin[block, None], EPS)


class Cache:
    """States and entries that `run` changes. Entries start as bytes of 0x5A."""

    def __init__(self, sequence, stale=float("nan")):
        T = (sequence.first + sequence.n) // sequence.ratio + 1
        self.states = sequence.state(stale)
        self.entries = [kind(*(torch.full_like(t, 0x5A) for t in kind.empty(T))) for kind in (Keys, IndexKeys)[: len(sequence.pools)]]

    def tensors(self):
        return flat((*self.states, *self.entries))


def feed(sequence, first, S):
    """(inputs, positions, cos, sin) of one call."""
    positions = torch.arange(first, first + S)
    at = slice(first - sequence.start, first - sequence.start + S)
    return (tuple((p["kv"][at], p["score"][at]) for p in sequence.pools), positions, sequence.cos[positions // sequence.ratio],
            sequence.sin[positions // sequence.ratio])


def pools_of(sequence, states, entries):
    return tuple(Pool(p["ape"], p["norm"], *state, part, p["d"] == 128)
                 for p, state, part in zip(sequence.pools, states, entries, strict=True))


def call(sequence, cache, inputs, positions, cos, sin, quantize=True, **how):
    """Beside a small query and key a token, which test_update_caches.py looks at."""
    beside = Site(torch.Generator(), S=len(positions), rank=4, R=8)
    beside.positions = positions
    with emulated(**how):
        beside.call(beside.window, EPS, quantize, inputs, pools_of(sequence, cache.states, cache.entries), cos, sin)


def run(sequence, cuts=None, cache=None, **how):
    """The cache after the whole sequence, fed in pieces of the given lengths."""
    cache, first = cache or Cache(sequence), sequence.first
    for S in cuts or [sequence.n]:
        call(sequence, cache, *feed(sequence, first, S), **how)
        assert int(arrivals("update_caches", torch.device("cpu"))) == 0  # for the next launch
        first += S
    assert first == sequence.first + sequence.n
    return cache


def same(got, want):
    """Whether two lists of tensors hold the same bits."""
    return all(torch.equal(*(t.view(torch.int32) if t.dtype == torch.float32 else t for t in pair))
               for pair in zip(got, want, strict=True))


def flat(parts):
    return [t for part in parts for t in part]


def check(sequence, cache, cuts=None):
    """States as the definition leaves them, stale rows included; the closed blocks' entries; all others as they were."""
    first = sequence.first
    want = [tuple(t.clone() for t in state) for state in Cache(sequence).states]
    for S in cuts or [sequence.n]:
        for p, (kv, score), state in zip(sequence.pools, feed(sequence, first, S)[0], want, strict=True):
            pool(kv, score, p["ape"], *state, first)
        first += S
    assert same(flat(cache.states), flat(want))
    blocks = range(sequence.first // sequence.ratio, first // sequence.ratio)
    for p, entries in zip(sequence.pools, cache.entries, strict=True):
        rest = torch.ones(len(entries.values), dtype=torch.bool)
        rest[list(blocks)] = False
        assert (entries.values[rest] == 0x5A).all() and (entries.scales[rest] == 0x5A).all()
        for block in blocks:
            one = type(entries)(*(t[block : block + 1] for t in entries))
            (packed.assert_keys if p["d"] == 512 else packed.assert_index_keys)(one, sequence.interval(p, block))


# ------------------------------------------------------------------------------------------------------- one call


@pytest.mark.parametrize("held", range(4))
@pytest.mark.parametrize("S", range(1, 9))
def test_csa_every_length_at_every_phase(rng, S, held):
    """None, one or two blocks close. Rows of the state that hold nothing are NaN."""
    sequence = Sequence(rng, 4, S, first=4 * int(torch.randint(2, 50, (), generator=rng)) + held)
    check(sequence, run(sequence, reverse=bool(S % 2)))


@pytest.mark.parametrize("S", range(1, 9))
@pytest.mark.parametrize("held", [0, 3, 64, 119, 120, 127])
def test_hca_lengths_and_phases(rng, S, held):
    sequence = Sequence(rng, 128, S, first=128 * int(torch.randint(4, (), generator=rng)) + held)
    check(sequence, run(sequence, reverse=bool(S % 2)))


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("position", [0, 3, 4, 127, 128, 129])
@pytest.mark.parametrize("reverse", [False, True])
def test_positions(rng, position, ratio, reverse):
    for S in (1, 5):
        sequence = Sequence(rng, ratio, S, first=position)
        check(sequence, run(sequence, reverse=reverse))


@pytest.mark.parametrize("ratio,position", [(4, 40_003), (128, 1_048_575)])
def test_far_positions(rng, ratio, position):
    sequence = Sequence(rng, ratio, 2, first=position)
    check(sequence, run(sequence))


def test_a_pool_alone(rng):
    """A CSA pool without an indexer gives the same bits as beside one."""
    both = Sequence(rng, 4, 6, first=13)
    want = run(both)
    both.pools = both.pools[:1]
    got = run(both)
    assert same(got.tensors(), [*want.states[0], *want.entries[0]])


# ------------------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize("ratio,n,first", [(4, 27, 0), (4, 21, 1002), (128, 20, 120), (128, 133, 0)])
def test_token_by_token_equals_pieces_bit_for_bit(rng, ratio, n, first):
    """Entries, and the rows of the state that count: the block before and the open block's tokens."""
    sequence = Sequence(rng, ratio, n, first=first)
    single = run(sequence, [1] * n)
    check(sequence, single, [1] * n)
    cuts = []
    while sum(cuts) < n:
        cuts.append(min(int(torch.randint(1, 9, (), generator=rng)), n - sum(cuts)))
    eights = [8] * (n // 8) + [n % 8] * (n % 8 > 0)
    live = (4 if ratio == 4 else 0) + (first + n) % ratio
    for pieces in (cuts, eights):
        got = run(sequence, pieces)
        assert same(flat(got.entries), flat(single.entries))
        assert same([t[:live] for t in flat(got.states)], [t[:live] for t in flat(single.states)])


def test_entries_agree_with_the_whole_definition(rng):
    """The definition itself with bf16 entries, fed the same pieces: fp32 sums in another order turn few roundings."""
    for ratio, n in ((4, 32), (128, 128)):
        sequence = Sequence(rng, ratio, n)
        got, cuts = run(sequence, [8] * (n // 8)), [8] * (n // 8)
        states = sequence.state()
        entries = [torch.zeros(n // ratio, p["d"], dtype=torch.bfloat16) for p in sequence.pools]
        for i, _ in enumerate(cuts):
            inputs, *where = feed(sequence, 8 * i, 8)
            compress(inputs, pools_of(sequence, states, entries), *where, EPS, True)
        for keys, want in zip(got.entries, entries, strict=True):
            have = type(keys)(*(t[: n // ratio] for t in keys)).unpack()
            assert (have == want).double().mean() > 0.99
            assert ((have - want).double().norm(dim=-1) <= 0.02 * want.double().norm(dim=-1)).all()


# ------------------------------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("ratio,first", [(4, 0), (4, 9), (128, 123)])
def test_extremes(rng, ratio, first):
    """Zeros, equal and huge scores, a token that does not count, huge and tiny values."""
    n = 7
    for change in ("zero", "equal", "high", "low", "masked", "big", "small"):
        sequence = Sequence(rng, ratio, n, first=first)
        for p in sequence.pools:
            kv, score = p["kv"], p["score"]
            if change == "zero":
                kv.zero_()
            elif change == "equal":
                score.zero_()
                p["ape"].zero_()
            elif change in ("high", "low"):
                score += 1e4 if change == "high" else -1e4
            elif change == "masked":
                score[: 20 if ratio == 128 else -5] = -INF  # more than the 8 rows that are added up at once
            else:
                kv *= 1e15 if change == "big" else 1e-18
        cache = run(sequence)
        check(sequence, cache)
        if change == "zero":
            block = first // ratio
            assert (cache.entries[0].values[block, :448] & 0x7F == 0).all() and cache.entries[0].scales[block].tolist() == [105] * 7 + [0]


@pytest.mark.parametrize("ratio", [4, 128])
def test_scores_that_differ_much(rng, ratio):
    """The largest score takes all: its token's value is the pooled one."""
    sequence = Sequence(rng, ratio, 1, first=2 * ratio - 1)
    for p in sequence.pools:
        p["score"] *= 1e6
    check(sequence, run(sequence))


@pytest.mark.parametrize("first", [100, 127])
@pytest.mark.parametrize("counts", ["one group", "all but one group", "one row", "a low group"])
def test_groups_of_rows_without_weight(rng, counts, first):
    """HCA's rows are pooled in 16 groups, the i-th has rows i, i + 16 and so on: some have nothing, or next to nothing, of the whole."""
    sequence, group = Sequence(rng, 128, 128 - first, first=first), int(torch.randint(16, (), generator=rng))
    (p,), at = sequence.pools, torch.arange(128)
    if counts == "one row":
        p["score"][at != 16 * 3 + group] = -INF
    elif counts == "a low group":
        p["score"][at % 16 == group] -= 1e30
    else:
        p["score"][(at % 16 == group) == (counts != "one group")] = -INF
    cuts = [8] * (sequence.n // 8) + [sequence.n % 8] * (sequence.n % 8 > 0)
    check(sequence, run(sequence, cuts), cuts)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("bad", ["nan", "inf", "inf score", "all masked", "overflow"])
def test_not_finite_spoils_its_entry_alone(rng, ratio, bad):
    """A NaN, an infinity, a channel without weight: NaN where the definition has one. Squares beyond fp32 make zeros."""
    sequence = Sequence(rng, ratio, ratio + 3, first=3 * ratio - 2)
    for p in sequence.pools:
        block, channel = slice(2 * ratio - sequence.start, 3 * ratio - sequence.start), 5 - p["d"]  # of the block's own half
        if bad == "all masked":
            p["score"][: block.stop, [5, channel]] = -INF
        elif bad == "overflow":
            p["kv"][: block.stop] *= 1e25
        else:
            p["score" if "score" in bad else "kv"][block][-1, channel] = float("nan") if bad == "nan" else INF
    cache = run(sequence, [8] * (sequence.n // 8) + [sequence.n % 8])
    states, entries = sequence.state(), [torch.zeros(4, p["d"], dtype=torch.bfloat16) for p in sequence.pools]
    inputs, *where = feed(sequence, sequence.first, 2)
    compress(inputs, pools_of(sequence, states, entries), *where, EPS, False)
    for keys, want in zip(cache.entries, entries, strict=True):
        want = Keys.pack(want) if want.shape[1] == 512 else IndexKeys.pack(quant.hadamard(want))
        assert torch.equal(keys.values[2, :448], want.values[2, :448]) and torch.equal(keys.scales[2], want.scales[2])
        got, want = keys.unpack(), want.unpack()
        assert torch.equal(got[2].isnan(), want[2].isnan()) and want[2].isnan().any() == (bad != "overflow")
        assert bad != "overflow" or (got[2] == 0).all()
        assert got[3].isfinite().all() and (keys.scales[4] == 0x5A).all()


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_same_bits_in_either_order_of_threads(rng, ratio):
    sequence = Sequence(rng, ratio, 8, first=2 * ratio - 3)
    assert same(run(sequence).tensors(), run(sequence, reverse=True).tensors())


# ------------------------------------------------------------------------------------------------------- what it takes


def test_strided_inputs(rng):
    sequence = Sequence(rng, 4, 5, first=6)
    want, got = run(sequence), Cache(sequence)
    inputs, *where = feed(sequence, 6, 5)
    call(sequence, got, tuple(tuple(t.T.contiguous().T for t in pair) for pair in inputs), *where)
    assert same(got.tensors(), want.tensors())


def refused(sequence, message, cache=None, quantize=True, **changes):
    cache = cache or Cache(sequence)
    inputs, positions, cos, sin = feed(sequence, sequence.first, sequence.n)
    arguments = {"inputs": inputs, "positions": positions, "cos": cos, "sin": sin, **changes}
    with pytest.raises(UserError, match=message):
        call(sequence, cache, quantize=quantize, **arguments)


def test_what_the_kernel_does_not_take(rng):
    csa, hca = Sequence(rng, 4, 2, first=7), Sequence(rng, 128, 2, first=7)
    refused(csa, "update_caches: expected quantize=True.*found False: run with --backend torch", quantize=False)
    for wrong in (torch.zeros(2, 16), torch.zeros(1, 32), torch.zeros(2, 32).double()):
        refused(csa, r"update_caches: expected entry_cos and entry_sin \[S, 32\] in fp32 with pools, found entry_cos", cos=wrong)
        refused(csa, r"update_caches: expected entry_cos and entry_sin \[S, 32\] in fp32 with pools, found entry_cos", sin=wrong)
    refused(hca, r"update_caches: expected entry_cos .* with pools, found entry_sin \[2, 32\] float32$", cos=None)
    pools = "update_caches: expected no pool, one of ratio 128, or one or two of 4, and projections for each, found ape_0"
    refused(csa, pools, inputs=feed(csa, 7, 2)[0][:1])
    refused(hca, pools, inputs=())
    kv, score = feed(hca, 7, 2)[0][0]
    refused(hca, r"update_caches: expected kv and score \[S, 512\], ape \[128, 512\].*found kv \[1, 512\]", inputs=((kv[:1], score),))
    refused(hca, "all fp32, found .*score .2, 512. bfloat16", inputs=((kv, score.bfloat16()),))
    wrong = Cache(csa)
    wrong.entries[1] = wrong.entries[0]
    refused(csa, r"update_caches: expected entries of values \[T, 64\] and scales \[T, 4\] in uint8, found values \[3, 576\]", cache=wrong)
    wrong = Cache(hca)
    wrong.states[0] = tuple(t.T.contiguous().T for t in wrong.states[0])
    refused(hca, "update_caches: expected contiguous tensors of one device", cache=wrong)
    cache = Cache(hca)
    hca.pools[0]["ape"] = torch.zeros(8, 512)
    refused(hca, pools + " .8, 512.", cache=cache)
