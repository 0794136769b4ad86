"""The sampler: what may be drawn and how often, from the definitions of its settings."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4 import sampler as module
from dsv4.errors import UserError
from dsv4.sampler import Sampling

DRAWS = 1500


class Sampler:
    """The package's, called once a token: position after position, for a vocabulary of the logits' size."""

    def __init__(self, sampling, prompt_ids):
        self.sampling, self.prompt_ids, self.sampler, self.position = sampling, prompt_ids, None, 0

    def __call__(self, logits):
        if self.sampler is None:
            self.sampler = module.Sampler(self.sampling, self.prompt_ids, len(logits), DRAWS, "cpu")
        (token,) = self.sampler(logits.float(), torch.tensor([self.position])).tolist()
        self.position += 1
        return token


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """id -> probability. Ids from the most likely on, the lower id first at a tie; the first top_k of them; of those, renormalised,
    the fewest whose sum reaches top_p; renormalised again."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = [math.exp((logits[i] - max(logits)) / temperature) for i in order]
    total, kept, reached = sum(weights), {}, 0.0
    for i, w in zip(order, weights, strict=True):
        kept[i] = w
        reached += w / total
        if reached >= top_p:
            break
    return {i: w / sum(kept.values()) for i, w in kept.items()}


def frequencies(logits, seed, **settings):
    sampler = Sampler(Sampling(seed=seed, **settings), [])
    counts = [0] * len(logits)
    for _ in range(DRAWS):
        counts[sampler(torch.tensor(logits))] += 1
    return counts


@pytest.mark.parametrize("settings", [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 3}, {"top_k": 8}, {"top_k": 100}, {"top_p": 0.3},
    {"top_p": 0.9}, {"top_k": 4, "top_p": 0.6}, {"temperature": 2.0, "top_k": 6, "top_p": 0.8}, {"top_p": 1e-9},
])
def test_draws_come_from_the_right_set_at_the_right_rates(settings, seed):
    logits = [0.3, 2.0, -1.0, 1.5, 0.0, 1.0, -0.5, 0.7]  # distinct; the rarest has 1.5 % at temperature 1
    want = probabilities(logits, **settings)
    counts = frequencies(logits, seed, **settings)
    for token, count in enumerate(counts):
        p = want.get(token, 0.0)
        # Six standard deviations of a binomial: one run in 10^8 fails by chance. Outside the set the count is exactly 0.
        assert abs(count - DRAWS * p) <= 6 * math.sqrt(DRAWS * p * (1 - p)) + 1e-9, (token, count, p)


def test_top_p_keeps_the_fewest_that_reach_it_and_ties_go_to_the_lower_ids(seed):
    """Four equal tokens of exactly 1/4: top_p 0.5 keeps two, a hair more keeps three; top_k at a tie keeps the first ids."""
    logits = [0.0] * 4
    for settings, kept in (({"top_p": 0.5}, 2), ({"top_p": 0.500001}, 3), ({"top_p": 0.25}, 1), ({"top_p": 0.76}, 4), ({"top_k": 3}, 3)):
        counts = frequencies(logits, seed, **settings)
        assert [c > 0 for c in counts] == [i < kept for i in range(4)], settings


def test_greedy_takes_the_largest_and_the_lowest_id_at_a_tie(rng):
    sampler = Sampler(Sampling(temperature=0), [])
    for _ in range(50):
        logits = torch.randint(0, 4, (1000,), generator=rng).float()
        assert sampler(logits) == min(i for i, v in enumerate(logits.tolist()) if v == logits.max())
    assert Sampler(Sampling(temperature=0), [])(torch.zeros(7)) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_give_no_token(bad):
    assert Sampler(Sampling(temperature=0), [])(torch.tensor([0.0, bad, 5.0])) == -1


def test_a_seed_repeats_and_another_does_not(rng):
    logits = torch.randn(200, 50, generator=rng)
    runs = [[sampler(row) for row in logits] for sampler in (Sampler(Sampling(seed=s), []) for s in (1, 1, 2, None, None))]
    assert runs[0] == runs[1] and len({tuple(run) for run in runs}) == 4  # 200 draws of 50 tokens agree by chance never


def test_the_global_generator_is_neither_used_nor_moved(rng):
    logits = torch.randn(20, 50, generator=rng)
    state = torch.get_rng_state()
    first = [Sampler(Sampling(seed=3), [])(row) for row in logits]
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(5)
    assert [Sampler(Sampling(seed=3), [])(row) for row in logits] == first


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1e-30, 1e-45, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature, rng):
    sampler = Sampler(Sampling(temperature=temperature, seed=0), [])
    for _ in range(20):
        logits = torch.randn(100, generator=rng)
        logits[7] = logits.max() + 1
        assert sampler(logits) == 7


@pytest.mark.parametrize("temperature", [1e5, 1e38, 1e300])
def test_a_huge_temperature_is_uniform(temperature, seed):
    counts = frequencies([50.0, 0.0, -50.0, 3.0], seed, temperature=temperature)
    assert all(abs(c - DRAWS / 4) < 6 * math.sqrt(DRAWS * 3 / 16) for c in counts)  # six standard deviations


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores_of_seen_tokens():
    logits = torch.tensor([4.0, 3.0, -1.0, -1.5, 2.5])
    assert Sampler(Sampling(temperature=0, repetition_penalty=2.0), [0, 0])(logits) == 1  # 4 becomes 2, once
    assert Sampler(Sampling(temperature=0, repetition_penalty=2.0), [0, 1])(logits) == 4  # 4 -> 2, 3 -> 1.5
    assert Sampler(Sampling(temperature=0, repetition_penalty=0.5), [1])(logits) == 1  # 3 becomes 6
    negative = torch.tensor([-1.0, -1.5, -1.8])
    assert Sampler(Sampling(temperature=0, repetition_penalty=2.0), [0])(negative) == 1  # -1 becomes -2
    assert Sampler(Sampling(temperature=0, repetition_penalty=0.5), [2])(negative) == 2  # -1.8 becomes -0.9
    assert torch.equal(logits, torch.tensor([4.0, 3.0, -1.0, -1.5, 2.5]))  # the caller's logits stay


def test_repetition_penalty_sees_what_was_generated_and_works_without_a_prompt():
    sampler = Sampler(Sampling(temperature=0, repetition_penalty=1.5), [])
    logits = torch.tensor([3.0, 2.9, 2.8, 0.1])
    assert [sampler(logits) for _ in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_repetition_penalty_beyond_fp32_still_gives_a_token(penalty):
    """As limits: a huge one takes seen tokens of any score out of the way, a tiny one prefers them; neither makes NaN."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    for temperature in (0.0, 1.0):
        assert Sampler(Sampling(temperature=temperature, repetition_penalty=penalty, seed=0), [0, 1, 2])(logits) in range(4)


@pytest.mark.parametrize("name,values,flag", [
    ("temperature", (-0.1, float("nan"), float("inf"), float("-inf")), "--temperature"),
    ("top_k", (-1,), "--top-k"), ("top_p", (0.0, -0.5, 1.0001, float("nan")), "--top-p"),
    ("repetition_penalty", (0.0, -1.0, float("nan"), float("inf")), "--repetition-penalty"),
    ("seed", (-1, 2**63), "--seed"),
])
def test_bad_values_each_get_a_line(name, values, flag):
    for value in values:
        with pytest.raises(UserError) as caught:
            Sampling(**{name: value})
        assert flag in str(caught.value) and str(value) in str(caught.value) and "\n" not in str(caught.value)
        assert caught.value.exit_code == 2


def test_edges_of_the_allowed_values():
    for settings in ({"temperature": 0}, {"top_k": 0}, {"top_p": 1.0}, {"seed": 0}, {"seed": 2**63 - 1}, {"top_k": 10**9},
                     {"top_p": 1e-30}):
        assert Sampler(Sampling(**settings), [1])(torch.tensor([0.0, 5.0])) in (0, 1)
