"""Index scores and the exact top-k against definitions that look at one query and one entry at a time (model.md section 7)."""

import math

import pytest
import torch

from dsv4 import ops
from dsv4.ops import indexer as module


def slow_scores(q, keys, weights):
    return [[math.fsum(w * max(math.fsum(a * b for a, b in zip(head, key, strict=True)), 0.0) for head, w in zip(heads, ws, strict=True))
             for key in keys] for heads, ws in zip(q, weights, strict=True)]


def slow_select(scores, visible, top_k):
    """Repeatedly takes the best entry not taken yet: a number before NaN, more before less, the lower index at a tie."""
    out = []
    for row, count in zip(scores, visible, strict=True):
        left, taken = list(range(count)), set()
        while left and len(taken) < top_k:
            best = left[0]
            for s in left[1:]:
                if not math.isnan(row[s]) and (math.isnan(row[best]) or row[s] > row[best]):
                    best = s
            left.remove(best)
            taken.add(best)
        out.append([s in taken for s in range(len(row))])
    return out


@pytest.mark.parametrize("S,H,d,T", [(1, 64, 128, 1), (2, 64, 128, 7), (5, 3, 32, 33), (4, 1, 8, 0)])
def test_weighted_relu(rng, S, H, d, T):
    q, keys, weights = torch.randn(S, H, d, generator=rng), torch.randn(T, d, generator=rng), torch.randn(S, H, generator=rng)
    weights *= d**-0.5 * H**-0.5
    got = ops.weighted_relu(q, keys, weights)
    want = torch.tensor(slow_scores(*(t.double().tolist() for t in (q, keys, weights)))).reshape(S, T)
    assert got.dtype == torch.float32 and got.shape == (S, T)
    # Dot products of d = 128 terms (1e-5 absolute at order 11), times weights of 0.01, over 64 heads.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_relu_comes_before_the_weights_which_may_be_negative():
    q, keys = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[2.0], [-3.0]])
    assert ops.weighted_relu(q, keys, torch.tensor([[-1.0, 0.25]])).tolist() == [[-1.5, 0.0]]


def test_weighted_relu_are_fp32_for_bf16_inputs_and_in_tiles(rng, monkeypatch):
    q, keys = torch.randn(9, 4, 32, generator=rng).bfloat16(), torch.randn(21, 32, generator=rng).bfloat16()
    weights = torch.randn(9, 4, generator=rng)
    whole = ops.weighted_relu(q, keys, weights)
    assert torch.equal(whole, ops.weighted_relu(q.float(), keys.float(), weights))
    for tile in (1, 4 * 21 * 2, 4 * 21 * 9):
        monkeypatch.setattr(module, "TILE", tile)
        torch.testing.assert_close(ops.weighted_relu(q, keys, weights), whole, rtol=0, atol=1e-5)  # another order of summation


def chosen(scores, visible, top_k):
    """The entries as a mask [S, T]; the list itself is ascending, with -1 behind the last. Ratio 1: a query at t sees t + 1 entries."""
    got = ops.select_entries(scores, visible - 1, 1, top_k)
    assert got.dtype == torch.int32 and got.shape == (len(scores), top_k)
    for row in got.tolist():
        real = [i for i in row if i >= 0]
        assert real == sorted(set(real)) and row == real + [-1] * (top_k - len(real))
    mask = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool)
    return mask.scatter_(1, torch.where(got < 0, scores.shape[1], got).long(), True)[:, :-1]


def select(scores, visible, top_k):
    got = chosen(scores, visible, top_k)
    assert got.tolist() == slow_select(scores.tolist(), visible.tolist(), top_k)
    return got


@pytest.mark.parametrize("S,T,top_k", [(1, 1, 1), (6, 40, 5), (3, 40, 39), (3, 40, 40), (3, 40, 41), (5, 300, 128), (2, 0, 4)])
def test_select_entries(rng, S, T, top_k):
    visible = torch.randint(0, T + 1, (S,), generator=rng)
    visible[-1] = T
    got = select(torch.randn(S, T, generator=rng), visible, top_k)
    assert got.sum(-1).tolist() == [min(top_k, v) for v in visible.tolist()]


@pytest.mark.parametrize("fill", [-1.0, 0.0, -0.0, float("-inf"), float("inf"), float("nan"), 1e-45, -3.4e38])
def test_select_entries_among_equal_scores_takes_the_first(fill):
    """All-negative scores and -inf must not lose to the entries that cannot be seen."""
    got = select(torch.full((2, 20), fill), torch.tensor([13, 3]), 5)
    assert got[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4] and got[1].nonzero().flatten().tolist() == [0, 1, 2]


def test_trap_22_the_top_k_is_exact_wherever_the_best_lie(rng):
    """A list of 8 candidates a thread, or buckets, lose some of the best when they lie side by side or a fixed stride apart."""
    T, top_k = 4096, 512
    for places in (range(1000, 1512), range(3, 3 + 7 * 512, 7), range(T - 512, T), range(0, T, 8)):
        scores = torch.rand(1, T, generator=rng)
        best = torch.tensor(list(places))
        scores[0, best] += 2
        got = chosen(scores, torch.tensor([T]), top_k)
        assert got[0].nonzero().flatten().tolist() == sorted(places)


def test_trap_25_every_query_has_its_own_causal_limit_and_its_own_top_k(rng):
    """Scores that grow with the index tempt every query past its limit; scores of one query must not choose for another."""
    position, S, T = 37, 60, 24
    visible = (torch.arange(position, position + S) + 1) // 4
    scores = torch.arange(T).float().expand(S, T).clone()
    got = select(scores, visible, 6)
    for s in range(S):
        v = min(int(visible[s]), T)
        assert got[s].nonzero().flatten().tolist() == list(range(max(0, v - 6), v))
    scores = torch.randn(S, T, generator=rng)
    together = select(scores, visible, 6)
    for s in range(S):
        assert torch.equal(chosen(scores[s : s + 1], visible[s : s + 1], 6)[0], together[s])


def test_trap_26_nan_never_becomes_an_index(rng):
    """NaN is the worst of the visible scores: it pushes no number out, and none beyond the limit is chosen for it."""
    scores = torch.randn(30, 50, generator=rng)
    scores[torch.rand(30, 50, generator=rng) < 0.3] = float("nan")
    scores[0] = float("nan")
    scores[1] = torch.cat((torch.full((40,), float("nan")), torch.randn(10, generator=rng)))  # more NaN than not, numbers last
    scores[2, 5] = float("-inf")
    visible = torch.randint(0, 51, (30,), generator=rng)
    visible[:3] = torch.tensor([30, 50, 9])
    got = select(scores, visible, 10)
    assert not (got & (torch.arange(50) >= visible[:, None])).any()
    assert got[1].nonzero().flatten().tolist() == list(range(40, 50))


def test_trap_27_ties_go_to_the_lower_index(rng):
    """With few index heads ReLU makes exact zeros: many entries tie there, and the choice must not depend on T or on the sort."""
    q, keys, weights = torch.randn(20, 2, 8, generator=rng), torch.randn(90, 8, generator=rng), torch.rand(20, 2, generator=rng)
    scores = ops.weighted_relu(q, keys, weights)
    assert (scores == 0).sum() > 100  # a quarter of 1800 where both heads are negative
    for T in (33, 64, 90):
        select(scores[:, :T], torch.full((20,), T), T - 5)  # the cut runs through the zeros
    select(torch.randint(0, 3, (20, 90), generator=rng).float(), torch.randint(0, 91, (20,), generator=rng), 30)
    select(torch.tensor([[0.0, -0.0, 0.0, -0.0, 1.0]]), torch.tensor([5]), 2)


@pytest.mark.parametrize("quantize", [False, True])
def test_index_scores_is_its_parts(rng, quantize):
    """RoPE by the tokens' angles, then Hadamard and FP4, the weights scaled by (d H)^-0.5; no scores while all are among the best."""
    S, H, d, first = 5, 64, 128, 30
    q, keys, weights = torch.randn(S, H * d, generator=rng), torch.randn(40, d, generator=rng), torch.randn(S, H, generator=rng)
    positions = torch.arange(first, first + S)
    cos, sin = ops.rope_table(positions, ops.rope_frequencies(64, 1.6e5))
    turned = ops.apply_rope(q.view(S, H, d), cos, sin)
    if quantize:
        turned = ops.fp4_round_trip(ops.hadamard(turned))
    got = ops.index_scores(q, cos, sin, weights, keys, positions, 7, quantize)
    want = torch.einsum("sh,sht->st", weights / math.sqrt(d * H), torch.relu(turned @ keys.T))
    assert got.shape == (S, 8)  # (34 + 1) // 4
    torch.testing.assert_close(got, want[:, :8], rtol=0, atol=1e-5)
    assert (ops.index_scores(q, cos, sin, weights, keys, positions, 8, quantize) == 0).all()
