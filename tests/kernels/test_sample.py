"""The sample kernel on the CPU emulator: the token and the marks of its definition, always."""

import re

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import build
from dsv4.kernels import sample as module
from dsv4.ops.sample import POWER_OF_TWO, sample_ref
from dsv4.ops.sample import settings as settings_ref

from ..emulator.emulator import emulated, needs_gxx

pytestmark = needs_gxx
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
DRAW = GREEDY | {"temperature": 1.0}


def run(*args, how=None, **settings):
    with emulated(**(how or {})):
        return module.sample(*args, **settings)


def assert_same(logits, seen, u, how=None, **settings):
    """Token and marks; returns the token."""
    uniforms, positions = torch.tensor([2.0, u, 2.0]), torch.tensor([0, 1])
    marks = seen.clone(), seen.clone()
    got = run(logits, marks[0], uniforms, positions, how=how, **settings)
    want = sample_ref(logits, marks[1], uniforms, positions, **settings)
    assert torch.equal(got, want), (got, want, u, settings)
    assert torch.equal(*marks)
    return int(got)


def some(rng, V, distinct=None):
    """Logits, of few distinct values if asked, and marks on a third of the tokens."""
    logits = 4 * torch.randn(V, generator=rng) if distinct is None else torch.randint(-distinct, distinct + 1, (V,), generator=rng) / 2
    return logits, (torch.rand(V, generator=rng) < 1 / 3).to(torch.uint8)


# One token; fewer than the cluster has blocks; slices that end early and empty ones; several warps a block.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("V", [1, 2, 7, 8, 9, 64, 257, 1000])
@pytest.mark.parametrize("settings", [GREEDY, GREEDY | {"repetition_penalty": 1.3}, DRAW, DRAW | {"top_k": 5}, DRAW | {"top_p": 0.7},
                                      {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_against_the_definition(rng, V, settings, reverse):
    assert_same(*some(rng, V), float(torch.rand(1, generator=rng)), how={"reverse": reverse}, **settings)


@pytest.mark.parametrize("settings", [GREEDY, DRAW, DRAW | {"top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}])
def test_the_published_vocabulary(rng, settings):
    logits, seen = some(rng, 129_280)
    assert_same(logits, seen, float(torch.rand(1, generator=rng)), **settings)


def test_the_largest_vocabulary_fits(rng):
    logits, seen = some(rng, 150_000)
    logits[149_999] = 40.0
    assert assert_same(logits, seen, 0.5, **DRAW) == 149_999


def test_the_smallest_masses_count_too(rng):
    """A large logit and thousands of small ones, each of a few units of 2^-40 of it: u just below 1 falls among them."""
    for low, high in ((-24.0, -20.0), (-28.6, -25.0)):
        logits = torch.cat([torch.zeros(1), torch.rand(20_000, generator=rng) * (high - low) + low])
        seen = torch.zeros(20_001, dtype=torch.uint8)
        assert {assert_same(logits, seen, 1 - step * 2**-24, **DRAW) for step in (1, 2, 3)} != {0}
        assert_same(logits, seen, 1 - 2**-24, **DRAW | {"top_p": 1 - 2**-29})


def test_thresholds_among_equals(rng):
    """Nine distinct logits over 70 tokens in 8 blocks: top_k and top_p end inside a run of equal ones, which crosses warps and blocks."""
    for _ in range(20):
        logits, seen = some(rng, 70, distinct=4)
        settings = {"temperature": float(torch.rand(1, generator=rng)) + 0.5, "top_k": int(torch.randint(0, 75, (1,), generator=rng)),
                    "top_p": min(1.0, float(torch.rand(1, generator=rng)) * 1.4 + 1e-6), "repetition_penalty": 1.0}
        for u in torch.rand(5, generator=rng).tolist():
            assert_same(logits, seen, u, **settings)


def test_some_of_a_warps_equals_are_kept():
    """12,000 tokens: the first warp has 47 ids, more than its lanes. Of 24 equals before and behind id 32 the first 12 are kept (to id 34),
    and a larger one (45)."""
    logits, seen = torch.full((12_000,), -30.0), torch.zeros(12_000, dtype=torch.uint8)
    logits[:10] = logits[33:47] = 0
    logits[45] = 1
    for u, token in ((0.1, 1), (0.7, 33), (0.8, 34), (0.85, 45), (0.9, 45)):
        assert assert_same(logits, seen, u, **DRAW | {"top_k": 13}) == token


def test_both_sides_have_the_same_polynomial():
    """No token shows a difference in its last digits, but a rare one would."""
    source = (build.SOURCES / "sample.cu").read_text()
    lower = [int(number) for number in re.search(r"coefficients\[\] = \{(.*?)\}", source)[1].replace("u", "").split(",")]
    assert (*lower, int(re.search(r"uint32_t power = (\d+)u", source)[1])) == POWER_OF_TWO


def test_every_token_at_both_ends_of_its_share():
    """Twelve equal tokens, and the same with a threshold among them: u just below and at each boundary."""
    logits, seen = torch.zeros(12), torch.zeros(12, dtype=torch.uint8)
    for k in range(8):
        for u in (k / 8, k / 8 + 1 / 8 - 2**-24):
            assert assert_same(logits, seen, u, **DRAW | {"top_k": 8}) == k
    assert assert_same(logits, seen, 1 - 2**-24, **DRAW) == 11
    assert assert_same(logits, seen, 1 - 2**-24, **DRAW | {"top_p": 0.5}) == 5
    assert assert_same(logits, seen, 1 - 2**-24, **DRAW | {"top_p": 1e-9}) == 0


def test_greedy_ties(rng):
    for V in (9, 300):
        logits, seen = some(rng, V, distinct=1)
        assert assert_same(logits, seen, 0.5, **GREEDY) == logits.tolist().index(float(logits.max()))
    assert assert_same(torch.tensor([-1.0, -0.0, 0.0]), torch.zeros(3, dtype=torch.uint8), 0.5, **GREEDY) == 1
    assert assert_same(torch.full((40,), -3e38), torch.zeros(40, dtype=torch.uint8), 0.5, **GREEDY) == 0


@pytest.mark.parametrize("settings", [GREEDY, DRAW | {"top_k": 3, "repetition_penalty": 2.0}])
@pytest.mark.parametrize("bad", [float("nan"), float("-nan"), float("inf"), float("-inf")])
def test_not_finite_gives_no_token_and_marks_none(rng, bad, settings):
    for at in (0, 49, 99):
        logits, seen = some(rng, 100)
        logits[at] = bad
        assert assert_same(logits, seen, 0.5, **settings) == -1


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 1e3, 1e38, 1e300])
@pytest.mark.parametrize("penalty", [1e-300, 1.0, 1e300])
def test_extreme_settings(rng, temperature, penalty):
    logits, seen = some(rng, 33)
    logits[[0, 1, 2]], seen[[0, 1]] = torch.tensor([3e38, -3e38, 1e-40]), 1
    assert_same(logits, seen, 0.7, **DRAW | {"temperature": temperature, "repetition_penalty": penalty, "top_p": 0.9})


def test_uniforms_outside_their_range_still_give_a_token():
    logits, seen = torch.zeros(5), torch.zeros(5, dtype=torch.uint8)
    assert assert_same(logits, seen, 1.0, **DRAW) == assert_same(logits, seen, 3e9, **DRAW) == 4
    assert assert_same(logits, seen, -1.0, **DRAW) == 0
    for positions, token in (([0], 0), ([1, 2], 3), ([2**40], 3)):  # beyond the numbers there are: the last one
        uniforms = torch.tensor([0.1, 0.3, 0.6])
        assert int(run(logits, seen.clone(), uniforms, torch.tensor(positions), **DRAW)) == token


def test_what_the_kernel_does_not_take():
    logits, seen, uniforms, positions = torch.zeros(5), torch.zeros(5, dtype=torch.uint8), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    for args in ((logits.double(), seen, uniforms, positions), (logits, seen[:4], uniforms, positions),
                 (logits[:0], seen[:0], uniforms, positions),
                 (logits, seen.bool(), uniforms, positions), (logits, seen, uniforms[:0], positions),
                 (logits, seen, uniforms, positions[:0]), (logits, seen, uniforms, positions.int()),
                 (logits[None], seen[None], uniforms, positions),
                 (torch.zeros(150_001), torch.zeros(150_001, dtype=torch.uint8), uniforms, positions)):
        with pytest.raises(UserError, match=r"sample: expected logits \[V\] and uniforms \[N\] in fp32.*, found logits \["):
            run(*args, **DRAW)


def test_settings_are_those_of_the_definition():
    for temperature in (0.0, 1e-300, 1e-3, 1.0, 1e300):
        for top_p in (1e-30, 0.3, 0.999999999, 1.0):
            for penalty in (1e-300, 0.5, 1.0, 1e300):
                assert module._settings(temperature, top_p, penalty) == settings_ref(temperature, top_p, penalty)
