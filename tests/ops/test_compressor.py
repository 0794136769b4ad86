"""The compressor against the definition that looks up each block's tokens by their positions (model.md section 6), and its state
over every way to cut a sequence."""

import math

import pytest
import torch

from dsv4 import ops
from dsv4.cache import CompressorCache


def slow_entries(kv, score, ape, ratio):
    """kv, score [S][c*d] of a sequence from position 0, ape [r][c*d] -> entries [S // r][d]."""
    width, S = len(ape[0]), len(kv)
    d = width // 2 if ratio == 4 else width
    out = []
    for s in range(S // ratio):
        entry = []
        for channel in range(d):
            if ratio == 4:  # the previous block by its first half of the channels, this one by its second
                slots = [(t, channel) for t in range(4 * s - 4, 4 * s)] + [(t, d + channel) for t in range(4 * s, 4 * s + 4)]
            else:
                slots = [(t, channel) for t in range(ratio * s, ratio * s + ratio)]
            slots = [(t, c) for t, c in slots if t >= 0]  # before the sequence there is nothing, not even a weight
            a = [score[t][c] + ape[t % ratio][c] for t, c in slots]
            p = [math.exp(v - max(a)) for v in a]
            entry.append(math.fsum(w * kv[t][c] for w, (t, c) in zip(p, slots, strict=True)) / math.fsum(p))
        out.append(entry)
    return out


def sequence(rng, ratio, d, S):
    width = (2 if ratio == 4 else 1) * d
    kv, score = torch.randn(S, width, generator=rng), torch.randn(S, width, generator=rng) * 2
    return kv, score, torch.randn(ratio, width, generator=rng)


def run(kv, score, ape, ratio, cuts, state=None, position=0):
    """The entries of a sequence fed in pieces of the given lengths; all of it must be used."""
    d = ape.shape[1] // (2 if ratio == 4 else 1)
    state = state or CompressorCache(ratio, d, None, "cpu")
    out, first = [], 0
    for n in cuts:
        piece = ops.pool(kv[first : first + n], score[first : first + n], ape, state.kv, state.score, position + first)
        assert piece.shape == ((position + first + n) // ratio - (position + first) // ratio, d) and piece.dtype == torch.float32
        out.append(piece)
        first += n
    assert first == len(kv)
    return torch.cat(out), state


def expected(kv, score, ape, ratio):
    d = ape.shape[1] // (2 if ratio == 4 else 1)
    return torch.tensor(slow_entries(*(t.double().tolist() for t in (kv, score, ape)), ratio)).reshape(-1, d)


# A softmax over at most 128 scores of order 1..10 in fp32, then a weighted mean of values of order 1..4.
CLOSE = {"rtol": 0, "atol": 5e-6}


@pytest.mark.parametrize("ratio,d,S", [(4, 3, 1), (4, 3, 3), (4, 3, 4), (4, 5, 5), (4, 2, 8), (4, 3, 41), (128, 3, 127), (128, 2, 128),
                                       (128, 2, 129), (128, 1, 300)])
def test_pool_in_one_piece(rng, ratio, d, S):
    inputs = sequence(rng, ratio, d, S)
    got, _ = run(*inputs, ratio, [S])
    torch.testing.assert_close(got, expected(*inputs, ratio), **CLOSE)


@pytest.mark.parametrize("ratio", [4, 128])
def test_trap_10_the_state_after_a_piece_of_any_length(rng, ratio):
    """A first piece of 1, 2, 3, 4, 5.. tokens, also shorter than a block, then token by token, then the rest."""
    S = 31 if ratio == 4 else 290
    inputs = sequence(rng, ratio, 2, S)
    want = expected(*inputs, ratio)
    firsts = range(1, 14) if ratio == 4 else (1, 3, 126, 127, 128, 129, 255, 256, 257)
    for first in firsts:
        singles = min(9, S - first)
        for cuts in ([first, S - first], [first, *[1] * singles, S - first - singles]):
            got, _ = run(*inputs, ratio, [n for n in cuts if n])
            torch.testing.assert_close(got, want, **CLOSE, msg=lambda m, cuts=cuts: f"pieces {cuts[:3]}..: {m}")
    got, _ = run(*inputs, ratio, [1] * S)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("ratio,S", [(4, 60), (128, 400)])
def test_random_cuts(rng, ratio, S):
    inputs = sequence(rng, ratio, 2, S)
    want = expected(*inputs, ratio)
    for _ in range(10):
        marks = torch.randperm(S - 1, generator=rng)[: int(torch.randint(1, 8, (1,), generator=rng))] + 1
        edges = [0, *marks.sort().values.tolist(), S]
        got, _ = run(*inputs, ratio, [b - a for a, b in zip(edges, edges[1:], strict=False)])
        torch.testing.assert_close(got, want, **CLOSE, msg=lambda m, edges=edges: f"cut at {edges}: {m}")


def test_trap_09_csa_pools_eight_slots():
    """Previous block by the first half of the channels, this block by the second: values that name their token and half."""
    d, S = 1, 12
    kv = torch.stack([torch.tensor([float(t), 100.0 + t]) for t in range(S)])
    score, ape = torch.zeros(S, 2), torch.zeros(4, 2)
    got, _ = run(kv, score, ape, 4, [S])
    first = sum(100 + t for t in range(4)) / 4  # the first block has no block before it: four slots, not eight
    second = (sum(range(4)) + sum(100 + t for t in range(4, 8))) / 8
    third = (sum(range(4, 8)) + sum(100 + t for t in range(8, 12))) / 8
    assert got.flatten().tolist() == pytest.approx([first, second, third], rel=1e-6)  # sums of eight fp32 numbers
    assert got.shape == (3, d)


def test_ape_goes_by_the_absolute_position(rng):
    """ape[t mod r], also when a piece starts inside a block; a shift by one would give other entries."""
    kv, score, ape = sequence(rng, 4, 2, 16)
    want = expected(kv, score, ape, 4)
    got, _ = run(kv, score, ape, 4, [6, 10])
    torch.testing.assert_close(got, want, **CLOSE)
    shifted = expected(kv, score, ape.roll(1, 0), 4)
    assert (shifted - want).abs().max() > 1e-2


@pytest.mark.parametrize("ratio,S", [(4, 11), (128, 200)])
def test_the_state_holds_the_open_and_the_last_closed_block(rng, ratio, S):
    """Rows of model.md section 6.1: [r, 2r) or [0, r) the open block's tokens, scores with ape; CSA rows 0..3 the closed one."""
    kv, score, ape = sequence(rng, ratio, 2, S)
    _, state = run(kv, score, ape, ratio, [S])
    held, off = S % ratio, ratio if ratio == 4 else 0
    for i in range(held):
        t = S - held + i
        assert torch.equal(state.kv[off + i], kv[t]) and torch.equal(state.score[off + i], score[t] + ape[t % ratio])
    if ratio == 4:
        for i in range(4):
            t = S - held - 4 + i
            assert torch.equal(state.kv[i], kv[t]) and torch.equal(state.score[i], score[t] + ape[i])


def test_large_and_equal_scores(rng):
    """Scores of 1e4 do not overflow; a block of equal scores is the mean; a token of score -inf does not count."""
    kv, score, ape = sequence(rng, 4, 2, 8)
    score[:4], score[4:] = 1e4, -1e4
    score[6] = float("-inf")
    got, _ = run(kv, score, torch.zeros_like(ape), 4, [8])
    torch.testing.assert_close(got[0], kv[:4, 2:].mean(0), **CLOSE)
    torch.testing.assert_close(got[1], kv[:4, :2].mean(0), **CLOSE)  # this block's own slots weigh e^-20000


def test_inputs_are_left_alone(rng):
    kv, score, ape = sequence(rng, 4, 2, 9)
    before = [t.clone() for t in (kv, score, ape)]
    run(kv, score, ape, 4, [5, 4])
    assert all(torch.equal(a, b) for a, b in zip(before, (kv, score, ape), strict=True))
