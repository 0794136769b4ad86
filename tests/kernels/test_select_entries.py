"""The select_entries kernel on the CPU emulator: exactly the indices of its definition."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import PROMPT_TOKENS
from dsv4.kernels import indexer as module
from dsv4.kernels.arrivals import arrivals
from dsv4.ops.indexer import select_entries_ref

from ..emulator.emulator import emulated, needs_gxx

pytestmark = needs_gxx
INF, NAN = float("inf"), float("nan")
ONE_BLOCK, MOST = 16384, 262144  # above the first 64 blocks have a token
BLOCKS, REACH, SLOTS = 64, 40, 64  # of a long row: quad q is of block q % 64, which passes on 39 to 64 keys


def select(scores, positions, ratio, top_k, **how):
    """The kernel's indices, compared with the definition's."""
    with emulated(**how):
        got = module.select_entries(scores, positions, ratio, top_k)
        assert not arrivals("select_entries", scores.device, PROMPT_TOKENS).any()  # for the next launch
    assert got.dtype == torch.int32 and torch.equal(got, select_entries_ref(scores, positions, ratio, top_k))
    return got


def one(scores, top_k, behind=3, **how):
    """One token that sees all of `scores` [n], ratio 4; behind them lie scores that nobody may take."""
    row = torch.cat((scores, torch.full((behind,), INF)))[None]
    return select(row, torch.tensor([4 * len(scores) - 1]), 4, top_k, **how)[0]


# One entry, quads, warps, a round of all threads (512), what is read ahead (4,096), a block's limit; then 64 blocks: one more entry, as
# many keys as threads in each (32,768), ragged ends.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("top_k", [1, 37, 512, 1024])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 127, 129, 511, 513, 1023, 1024, 1025, 2047, 2049, 4095, 4097, 6000, 16381, 16384, 16385, 16386,
                               20003, 32768, 32771])
def test_counts_around_every_edge(rng, n, top_k, reverse):
    one(torch.randn(n, generator=rng), top_k, behind=int(torch.randint(0, 9, (1,), generator=rng)), reverse=reverse)


@pytest.mark.parametrize("top_k", [1, 512, 1023, 1024])
def test_the_largest_context(rng, top_k):
    one(torch.randn(MOST, generator=rng), top_k, behind=0)
    one(torch.rand(MOST - 1, generator=rng) ** 4, top_k, behind=1)


def denormals(n, rng):
    magnitudes = torch.randint(0, 1000, (n,), generator=rng).to(torch.int32).view(torch.float32)
    return torch.where(torch.rand(n, generator=rng) < 0.5, magnitudes, -magnitudes)


def mixed(n, rng):
    """Every kind of float: random bits, with NaN of both signs and infinities among them."""
    return torch.randint(-(2**31), 2**31, (n,), generator=rng).to(torch.int32).view(torch.float32)


def special(n, rng):
    values = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e-45, -1e-45])
    return values[torch.randint(0, len(values), (n,), generator=rng)]


DISTRIBUTIONS = {
    "normal": lambda n, rng: torch.randn(n, generator=rng),
    "all negative": lambda n, rng: -torch.rand(n, generator=rng) - 1e-3,
    "wide": lambda n, rng: torch.randn(n, generator=rng) * torch.exp2(torch.randint(-120, 120, (n,), generator=rng).float()),
    "ascending": lambda n, rng: torch.arange(n).float(),
    "descending": lambda n, rng: -torch.arange(n).float(),
    "neighbouring floats": lambda n, rng: (torch.randint(0, 5000, (n,), generator=rng).to(torch.int32) + 0x3F800000).view(torch.float32),
    "three values": lambda n, rng: torch.randint(-1, 2, (n,), generator=rng).float(),
    "half zeros": lambda n, rng: torch.randn(n, generator=rng).relu(),
    "nearly all zeros": lambda n, rng: (torch.randn(n, generator=rng) - 3.5).relu(),
    "signed zeros": lambda n, rng: torch.where(torch.rand(n, generator=rng) < 0.5, 0.0, -0.0),
    "denormals": denormals, "random bits": mixed, "special": special,
    "nearly all NaN": lambda n, rng: torch.where(torch.rand(n, generator=rng) < 0.003, torch.randn(n, generator=rng), NAN),
    "outlier": lambda n, rng: torch.cat((torch.rand(n - 1, generator=rng), torch.tensor([INF]))),
}


@pytest.mark.parametrize("n,top_k", [(777, 128), (4099, 512), (ONE_BLOCK + 999, 1024), (70001, 301)])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_distributions(rng, kind, n, top_k):
    one(DISTRIBUTIONS[kind](n, rng), top_k)


@pytest.mark.parametrize("n", [900, 20001])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, -3.4e38])
def test_trap_27_equal_scores_take_the_first(value, n):
    assert one(torch.full((n,), value), 512).tolist() == list(range(512))


@pytest.mark.parametrize("n", [3000, 40000])
def test_trap_27_a_cut_that_runs_through_ties(rng, n):
    """Some are above the ties, some below; the ties that are taken end in any warp, block and quad."""
    for top_k in (100, 1000, 1024):
        scores = torch.zeros(n)
        scores[torch.randperm(n, generator=rng)[: n // 2]] = -1
        scores[torch.randperm(n, generator=rng)[: top_k - 37]] = 1 + torch.rand(top_k - 37, generator=rng)
        one(scores, top_k)
        for larger in (0, 1, top_k - 1, top_k, top_k + 1):  # all else ties; a first cut may be the last
            scores = torch.zeros(n)
            scores[torch.randperm(n, generator=rng)[:larger]] = 1 + torch.rand(larger, generator=rng)
            one(scores, top_k)
    ties = torch.full((n,), -5.0)
    ties[-300:] = 0.5  # too few without some of the first ones
    assert one(ties, 512).tolist() == [*range(212), *range(n - 300, n)]


@pytest.mark.parametrize("n", [4096, 50000])
def test_trap_22_the_top_k_is_exact_wherever_the_best_lie(rng, n):
    """Side by side, at fixed strides (one thread's, one warp's, one group's own entries), at the end."""
    top_k = 512
    for places in (range(1000, 1512), range(3, 3 + 7 * top_k, 7), range(n - top_k, n), range(0, 8 * top_k, 8)):
        scores = torch.rand(n, generator=rng)
        scores[list(places)] += 2
        assert one(scores, top_k).tolist() == list(places)


def block_of(entries):
    return entries // 4 % BLOCKS


def crowded(rng, n, blocks, of_each, ties):
    """Uniform scores, and in some blocks `of_each` that are larger than all others: more than a block passes on."""
    scores = torch.rand(n, generator=rng)
    for block in blocks:
        own = (block_of(torch.arange(n)) == block).nonzero().flatten()
        best = own[torch.randperm(len(own), generator=rng)[:of_each]]
        scores[best] = 3 if ties else 3 + torch.rand(of_each, generator=rng)
    return scores


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("blocks,of_each", [([0], 1), ([63], REACH - 1), ([5], REACH), ([31], REACH + 1), ([32], SLOTS), ([7], SLOTS + 1),
                                            ([0, 31, 32, 63], 100), ([9], 300), (range(0, BLOCKS, 2), SLOTS + 1), (range(BLOCKS), 41)])
def test_blocks_with_more_of_the_best_than_they_pass_on(rng, blocks, of_each, ties):
    """The last block reads these blocks' entries again, and no others."""
    for n, top_k in ((20483, 300), (50000, 1024)):
        one(crowded(rng, n, blocks, of_each, ties), top_k)


@pytest.mark.parametrize("of_group", [1, 16, 32])
def test_as_many_keys_above_a_bound_as_there_can_be(rng, of_group):
    """A block's bound is the 40th of the maxima of 128 groups of threads (t, t + 128, ...). All keys of 39 groups of a block above the
    rest: 39 x 32 keys are above the bound where 64 find a place. With one key of each, 39."""
    scores = torch.rand(MOST, generator=rng)
    of_block = torch.arange(MOST // BLOCKS)
    for block in (0, 17, 63):
        for group in range(REACH - 1):
            numbers = of_block[of_block % 128 == group][:of_group]
            scores[(numbers // 4 * BLOCKS + block) * 4 + numbers % 4] = 3 + torch.rand(len(numbers), generator=rng)
    one(scores, 1024, behind=0)
    one(scores, 30, behind=0)


@pytest.mark.parametrize("kind", ["all equal", "ascending", "descending", "all NaN"])
def test_the_largest_context_at_its_worst(kind):
    """Every block is read again, or the last ones hold nearly all of the best."""
    one({"all equal": torch.zeros(MOST), "ascending": torch.arange(MOST).float(), "descending": -torch.arange(MOST).float(),
         "all NaN": torch.full((MOST,), NAN)}[kind], 1024, behind=0)


def test_a_step_of_eight_tokens_with_long_rows(rng):
    """Each has its own blocks, counter and candidates; some rows are short although there is room for more, and nothing of them is left
    behind for the next launch."""
    scores = torch.randn(8, 16400, generator=rng)
    scores[2] = 0
    scores[5, ::5] = NAN
    for first in (4 * ONE_BLOCK - 4, 3):
        positions = torch.arange(first, first + 8)
        assert torch.equal(select(scores, positions, 4, 512), select(scores, positions, 4, 512, reverse=True))


def test_trap_25_every_token_has_its_own_count(rng):
    """Scores that grow with the index tempt every token past its limit. Position 0 to 3 see one entry at most."""
    for first, S in ((0, 8), (1, 3), (30, 8), (2050, 5), (65533, 8), (90000, 8)):
        T = (first + S) // 4 + 2
        select(torch.arange(T).float().expand(S, T), torch.arange(first, first + S), 4, 16)
        select(torch.randn(S, T, generator=rng), torch.arange(first, first + S), 4, 7)
    for first in (13, 16380):  # with ratio 1 each has one more than the last; here from one block to 64
        T = first + 8
        got = select(torch.arange(T).float().expand(8, T), torch.arange(first, first + 8), 1, 9)
        assert got[:, -1].tolist() == list(range(first, first + 8))


def test_tokens_do_not_see_each_other(rng):
    scores, positions = torch.randn(4, 20000, generator=rng), torch.arange(79990, 79994)
    together = select(scores, positions, 4, 99)
    for s in range(4):
        assert torch.equal(select(scores[s : s + 1], positions[s : s + 1], 4, 99)[0], together[s])


def test_trap_26_nan_never_becomes_an_index(rng):
    for n in (50, 17000):
        scores = torch.randn(n, generator=rng)
        scores[torch.rand(n, generator=rng) < 0.4] = NAN
        one(scores, 40)
        scores[:] = NAN
        scores[-10:] = -1e30  # numbers last, and fewer than top_k
        assert one(scores, 40).tolist() == [*range(30), *range(n - 10, n)]
        scores[3] = -INF
        one(scores, 40)


@pytest.mark.parametrize("n", [20, 5000, 17001])
def test_what_lies_behind_is_not_read(rng, n):
    """Not by its value, and not at all: the last row ends where the tensor does, beyond which the emulator lets nobody read."""
    scores = torch.randn(2, n, generator=rng)
    positions = torch.tensor([4 * n - 2, 4 * n - 1])  # the first sees one less
    kept = select(scores, positions, 4, 15)
    scores[0, n - 1] = NAN
    assert torch.equal(select(scores, positions, 4, 15), kept)
    scores[0, n - 1] = INF
    assert torch.equal(select(scores, positions, 4, 15), kept)
    assert torch.equal(select(torch.cat((scores, torch.full((2, 64), INF)), 1), positions, 4, 15), kept)
    assert torch.equal(select(scores, positions + 4000, 4, 15)[1], kept[1])  # positions beyond the capacity see what there is


@pytest.mark.parametrize("n", [4096, 20480])
@pytest.mark.parametrize("offset", [4, 8])
def test_memory_that_is_not_16_byte_aligned(rng, n, offset):
    one(torch.randn(n, generator=rng), 100, behind=0, offsets={"scores": offset})


def test_strided_scores_and_nothing_to_do(rng):
    scores = torch.randn(100, 3, generator=rng).T
    select(scores, torch.tensor([300, 301, 302]), 4, 8)
    assert select(scores[:0], torch.zeros(0, dtype=torch.int64), 4, 8).shape == (0, 8)
    assert select(scores[:, :0], torch.tensor([0, 1, 2]), 4, 8).eq(-1).all()


@pytest.mark.parametrize("change", [
    lambda s, p: (s.double(), p, 4, 8), lambda s, p: (s, p.int(), 4, 8), lambda s, p: (s, p[:1], 4, 8), lambda s, p: (s[0], p, 4, 8),
    lambda s, p: (s, p, 0, 8), lambda s, p: (s, p, 4, 0), lambda s, p: (s, p, 4, 1025),
    lambda s, p: (s[:, :1].expand(2, MOST + 1), p, 4, 8), lambda s, p: (s[:1].expand(1025, 8), p[:1].expand(1025), 4, 8),
])
def test_what_the_kernel_does_not_take(rng, change):
    with pytest.raises(UserError, match=r"select_entries: expected scores \[S, T\] in fp32 .*, found scores \["):
        module.select_entries(*change(torch.randn(2, 8, generator=rng), torch.tensor([5, 6])))
