"""The sampling operation: its integer masses against exp, and its choice against a walk over a sorted list in Python integers."""

import math

import pytest
import torch

from dsv4.ops.sample import FLT_MAX, STEPS, masses, sample, share

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


def draw(logits, u=0.0, seen=None, **how):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    seen = torch.zeros(len(logits), dtype=torch.uint8) if seen is None else seen
    return int(sample(logits, seen, torch.tensor([u]), torch.tensor([0]), **OFF | how))


def test_masses_are_exp(rng):
    quotient = torch.cat([-40 * torch.rand(20000, generator=rng), -torch.rand(20000, generator=rng) * 1e-3, torch.linspace(-29, 0, 9999)])
    got = masses(quotient)
    for q, m in zip(quotient.tolist(), got.tolist(), strict=True):
        want = math.exp(q) * 2**40
        # the polynomial and log2(e) to 27 bits, over up to 41 powers of two; steps of 2^-30 of the quotient; the last rounding
        assert abs(m - want) <= want * (3.2e-9 + 2**-30 + 41 * 2**-29) + 1, q
    assert (got.sort(descending=True).values == got[quotient.argsort(descending=True)]).all()  # never more for less
    one = masses(torch.zeros(1)).item()
    assert masses(torch.tensor([-0.0, -1e-30, -28.4, -28.5, -28.6, -FLT_MAX, -math.inf])).tolist() == [one, one, 1, 0, 0, 0, 0]


def test_share_is_exact(rng):
    totals = torch.cat([torch.randint(0, 2**58, (500,), generator=rng), torch.tensor([0, 1, 2**58 - 1])])
    for steps in (0, 1, 2**29, 2**30 - 1, 2**30, 123456789):
        assert share(totals, steps).tolist() == [t * steps >> 30 for t in totals.tolist()]
        assert (-share(-totals, steps)).tolist() == [-(-t * steps >> 30) for t in totals.tolist()]


def slow(logits, u, temperature=1.0, top_k=0, top_p=1.0):
    """The token by the definition's words, with Python's integers."""
    top = max(logits)
    mass = masses((torch.tensor(logits) - top) / torch.tensor(temperature)).tolist()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    if top_p < 1:
        need, reached, kept = round(top_p * STEPS) * sum(mass[i] for i in order), 0, []
        for i in order:
            if reached * STEPS >= need:
                break
            kept.append(i)
            reached += mass[i]
        order = kept
    total, reached = sum(mass[i] for i in order), 0
    for i in sorted(order):
        reached += mass[i]
        if reached * STEPS > math.floor(u * STEPS) * total:
            return i
    raise AssertionError("no token")


def test_against_the_walk(rng):
    """Few distinct logits, so that thresholds fall on ties; every combination of the settings."""
    for _ in range(400):
        V = int(torch.randint(1, 13, (1,), generator=rng))
        logits = (torch.randint(-4, 5, (V,), generator=rng) / 2).tolist()
        how = {"temperature": float(torch.rand(1, generator=rng) * 2 + 0.1), "top_k": int(torch.randint(0, V + 2, (1,), generator=rng)),
               "top_p": float(torch.rand(1, generator=rng)) * 1.2 + 1e-6}
        how["top_p"] = min(how["top_p"], 1.0)
        u = float(torch.rand(1, generator=rng))
        assert draw(logits, u, **how) == slow(logits, u, **how), (logits, u, how)


@pytest.mark.parametrize("settings", [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 3}, {"top_k": 8}, {"top_k": 100}, {"top_p": 0.3},
    {"top_p": 0.9}, {"top_k": 4, "top_p": 0.6}, {"temperature": 2.0, "top_k": 6, "top_p": 0.8}, {"top_p": 1e-9},
])
def test_evenly_spaced_uniforms_draw_in_proportion(settings):
    """1,024 numbers in steps of 1/1024: each token's count is its probability's share but for one at each of its two ends."""
    logits = [0.3, 2.0, -1.0, 1.5, 0.0, 1.0, -0.5, 0.7]
    order = sorted(range(8), key=lambda i: -logits[i])[: settings.get("top_k") or None]
    weight = {i: math.exp((logits[i] - 2.0) / settings.get("temperature", 1.0)) for i in order}
    kept, reached = {}, 0.0
    for i in order:
        kept[i] = weight[i]
        reached += weight[i]
        if reached >= settings.get("top_p", 1.0) * sum(weight.values()):
            break
    counts = [0] * 8
    for k in range(1024):
        counts[draw(logits, k / 1024, **settings)] += 1
    for i, count in enumerate(counts):
        assert abs(count - 1024 * kept.get(i, 0.0) / sum(kept.values())) <= (1 + 1e-3 if i in kept else 0), (i, counts)


def test_equal_tokens_are_exact_parts():
    """Four equal tokens: u in quarters; top_p 0.5 keeps two, a hair more three; the lower ids stay at a tie."""
    equal = [0.0] * 4
    assert [draw(equal, u) for u in (0.0, 0.2499, 0.25, 0.4999, 0.5, 0.75, 1 - 2**-24)] == [0, 0, 1, 1, 2, 3, 3]
    last = 1 - 2**-24
    for settings, kept in (({"top_p": 0.5}, 2), ({"top_p": 0.500001}, 3), ({"top_p": 0.25}, 1), ({"top_p": 0.76}, 4), ({"top_k": 3}, 3),
                           ({"top_k": 3, "top_p": 0.5}, 2), ({"top_k": 2, "top_p": 0.5}, 1)):
        assert draw(equal, last, **settings) == kept - 1, settings


def test_greedy_takes_the_lowest_of_the_largest(rng):
    for _ in range(50):
        logits = torch.randint(0, 4, (1000,), generator=rng).float()
        assert draw(logits, temperature=0) == logits.tolist().index(float(logits.max()))
    assert draw([0.0, -0.0, 0.0], temperature=0) == draw([-0.0, 0.0], temperature=0) == draw([5.0], temperature=0) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_logit_that_is_not_finite_gives_no_token(bad, temperature):
    seen = torch.tensor([0, 1, 0], dtype=torch.uint8)
    assert draw([1.0, bad, 2.0], seen=seen, temperature=temperature, repetition_penalty=2.0) == -1 and seen.tolist() == [0, 1, 0]


def test_the_token_is_marked_and_the_next_one_sees_it():
    seen = torch.zeros(4, dtype=torch.uint8)
    how = {"temperature": 0.0, "repetition_penalty": 1.5}
    assert [draw([3.0, 2.9, 2.8, 0.1], seen=seen, **how) for _ in range(4)] == [0, 1, 2, 0] and seen.tolist() == [1, 1, 1, 0]
    result = sample(torch.zeros(3), torch.zeros(3, dtype=torch.uint8), torch.zeros(1), torch.zeros(1, dtype=torch.int64), **OFF)
    assert result.shape == (1,) and result.dtype == torch.int64


def test_penalty_divides_positive_and_multiplies_other_logits_of_seen_tokens():
    def greedy(logits, ids, penalty):
        return draw(logits, seen=torch.zeros(len(logits), dtype=torch.uint8).index_fill(0, torch.tensor(ids), 1), temperature=0.0,
                    repetition_penalty=penalty)
    logits = [4.0, 3.0, -1.0, -1.5, 2.5]
    assert greedy(logits, [0], 2.0) == 1 and greedy(logits, [0, 1], 2.0) == 4 and greedy(logits, [1], 0.5) == 1
    assert greedy([-1.0, -1.5, -1.8], [0], 2.0) == 1 and greedy([-1.0, -1.5, -1.8], [2], 0.5) == 2
    assert greedy([1.0, 2.0, 0.5], [0, 1], 1e300) == 2 and greedy([1e10, 2.0, 3e38], [0], 1e-300) == 0  # beyond fp32: its largest number


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1e-30, 1e-45, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature, rng):
    logits = torch.randn(100, generator=rng)
    logits[7] = logits.max() + 1
    assert {draw(logits, u, temperature=temperature) for u in (0.0, 0.5, 1 - 2**-24)} == {7}


@pytest.mark.parametrize("temperature", [1e10, 1e38, 1e300])
def test_a_huge_temperature_is_uniform(temperature):
    assert [draw([50.0, 0.0, -50.0, 3.0], k / 8 + 1 / 16, temperature=temperature) for k in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_last_position_chooses_the_uniform():
    logits, uniforms, seen = torch.zeros(4), torch.tensor([0.1, 0.3, 0.6, 0.9]), torch.zeros(4, dtype=torch.uint8)
    for positions, token in (([0], 0), ([1, 2], 2), ([2, 3], 3), ([9], 3)):
        assert int(sample(logits, seen, uniforms, torch.tensor(positions), **OFF)) == token
