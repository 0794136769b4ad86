"""The select_entries kernel on the CPU emulator: exactly the indices of its definition."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import indexer as module
from dsv4.ops.indexer import select_entries_ref

from ..emulator.emulator import emulated, needs_gxx

pytestmark = needs_gxx
INF, NAN = float("inf"), float("nan")
ONE_BLOCK, MOST = 16384, 262144  # above the first a cluster of 8 blocks has a token


def select(scores, positions, ratio, top_k, **how):
    """The kernel's indices, compared with the definition's."""
    with emulated(**how):
        got = module.select_entries(scores, positions, ratio, top_k)
    assert got.dtype == torch.int32 and torch.equal(got, select_entries_ref(scores, positions, ratio, top_k))
    return got


def one(scores, top_k, behind=3, **how):
    """One token that sees all of `scores` [n], ratio 4; behind them lie scores that nobody may take."""
    row = torch.cat((scores, torch.full((behind,), INF)))[None]
    return select(row, torch.tensor([4 * len(scores) - 1]), 4, top_k, **how)[0]


# One entry, quads, warps (128 entries), rounds (2,048), a block's limit; then clusters: one more entry, rounds (16,384), ragged ends.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("top_k", [1, 37, 512, 1024])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 127, 129, 511, 513, 1023, 1024, 1025, 2047, 2048, 2049, 6000, 16381, 16384, 16385, 16386, 20003,
                               32768, 32771])
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


@pytest.mark.parametrize("quads,warps", [(range(0, 16, 4), 4), (range(0, 16, 2), 2)])
def test_as_many_keys_above_the_bound_as_there_can_be(rng, quads, warps):
    """All 16 keys of each of top_k groups are above the least of the groups' largest: 16 top_k - 16 candidates at 262,144 entries."""
    j, lane, warp, block = torch.tensor(quads)[:, None], torch.arange(32), torch.arange(warps), torch.arange(8)
    # [block, warp, quad, lane]: one or two groups of four quads for each thread.
    places = ((block[:, None] * 16 + warp)[..., None, None] * 16 + j) * 128 + lane * 4
    places = places[..., None] + torch.arange(4)
    least = places[7, -1, :: len(quads) // 4, 31].flatten()  # a whole group
    places = places.flatten()
    assert len(places.unique()) == 16 * 1024 and len(least) == 16
    scores = torch.rand(MOST, generator=rng)
    scores[places] = 3 + torch.randperm(len(places), generator=rng) / len(places)
    scores[least] = 2.0
    one(scores, 1024, behind=0)
    scores[places] = 3
    one(scores, 1024, behind=0)


def test_trap_25_every_token_has_its_own_count(rng):
    """Scores that grow with the index tempt every token past its limit. Position 0 to 3 see one entry at most."""
    for first, S in ((0, 8), (1, 3), (30, 8), (2050, 5), (65533, 8), (90000, 8)):
        T = (first + S) // 4 + 2
        select(torch.arange(T).float().expand(S, T), torch.arange(first, first + S), 4, 16)
        select(torch.randn(S, T, generator=rng), torch.arange(first, first + S), 4, 7)
    for first in (13, 16380):  # with ratio 1 each has one more than the last; here from one block to a cluster
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
    lambda s, p: (s[:, :1].expand(2, MOST + 1), p, 4, 8),
])
def test_what_the_kernel_does_not_take(rng, change):
    with pytest.raises(UserError, match=r"select_entries: expected scores \[S, T\] in fp32 .*, found scores \["):
        module.select_entries(*change(torch.randn(2, 8, generator=rng), torch.tensor([5, 6])))
