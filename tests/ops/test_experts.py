"""The experts against SwiGLU with its clamp in plain Python floats, one token and one expert at a time (model.md section 8)."""

import math

import pytest
import torch

from dsv4 import formats, ops
from dsv4.formats import Weight

LIMIT = 1.0  # binds for about a third of the gates and ups here


def slow_matvec(w, v):
    return [math.fsum(a * b for a, b in zip(row, v, strict=True)) for row in w]


def slow_expert(x, w1, w2, w3, limit, weight=1.0):
    gate = [min(g, limit) for g in slow_matvec(w1, x)]  # from above only, and before silu
    up = [max(-limit, min(limit, u)) for u in slow_matvec(w3, x)]
    a = [weight * g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    return slow_matvec(w2, a)


def values(expert):
    return tuple(w.dequantize().double().tolist() for w in (expert.w1, expert.w2, expert.w3))


def moe(x, routed, shared, *rest):
    return ops.moe(x, ops.pack_experts(routed, shared), *rest)


def slow_moe(x, experts, shared, chosen, weights, limit):
    tables, common = [values(e) for e in experts], values(shared)
    out = []
    for row, picks, ws in zip(x.double().tolist(), chosen.tolist(), weights.double().tolist(), strict=True):
        total = slow_expert(row, *common, limit)
        for e, w in zip(picks, ws, strict=True):
            total = [a + b for a, b in zip(total, slow_expert(row, *tables[e], limit, w), strict=True)]
        out.append(total)
    return torch.tensor(out)


def expert(rng, D, width, kind="plain", scale=1.0):
    def draw(rows, columns):
        w = torch.randn(rows, columns, generator=rng) * scale * columns**-0.5
        if kind == "nvfp4":
            return formats.quantize_nvfp4(w)
        return formats.quantize_mxfp4(w) if kind == "mxfp4" else formats.quantize_fp8_block(w) if kind == "fp8" else Weight.plain(w)

    return ops.Expert(draw(width, D), draw(D, width), draw(width, D))


def case(rng, S, D, width, E, k, kind="plain"):
    x = torch.randn(S, D, generator=rng)
    experts, shared = [expert(rng, D, width, kind) for _ in range(E)], expert(rng, D, width, kind)
    chosen = torch.stack([torch.randperm(E, generator=rng)[:k] for _ in range(S)])
    return x, experts, shared, chosen, torch.rand(S, k, generator=rng)


# Two products in fp32 over sums of order 1 and k + 1 terms: a few 2^-24 of values of order 1..10.
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize("S,D,width,E,k,kind", [
    (1, 32, 64, 8, 2, "plain"), (7, 24, 40, 7, 3, "plain"), (5, 64, 32, 4, 4, "nvfp4"), (4, 32, 64, 3, 1, "mxfp4"),
    (3, 40, 24, 5, 2, "fp8"),
])
def test_moe(rng, S, D, width, E, k, kind):
    inputs = case(rng, S, D, width, E, k, kind)
    torch.testing.assert_close(moe(*inputs, LIMIT), slow_moe(*inputs, LIMIT), **CLOSE)


def one_unit(gate, up):
    """An expert of one hidden unit over a one-dimensional input 1: output silu(clamped gate) * clamped up."""
    return ops.Expert(*(Weight.plain(torch.tensor([[v]])) for v in (gate, 1.0, up)))


NOTHING = one_unit(0.0, 0.0)
ONE = (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("gate,up", [(20.0, 3.0), (-20.0, 3.0), (-9.0, 30.0), (2.0, -30.0), (11.0, -11.0), (9.99, 9.99), (0.0, 5.0)])
def test_trap_12_the_clamp_comes_before_silu_and_spares_the_gates_negative_side(gate, up):
    """silu(min(g, 10)) * clamp(u, -10, 10), for a routed expert and for the shared one alike."""
    g, u = min(gate, 10.0), max(-10.0, min(10.0, up))
    want = g / (1 + math.exp(-g)) * u
    x, chosen = ONE
    routed = moe(x, [one_unit(gate, up)], NOTHING, chosen, torch.ones(1, 1), 10.0)
    shared = moe(x, [NOTHING], one_unit(gate, up), chosen, torch.ones(1, 1), 10.0)
    assert routed.item() == shared.item() == pytest.approx(want, rel=1e-5, abs=1e-12)  # silu in fp32
    if gate == 20.0:
        assert abs(want - 10.0 * 3.0) > 1e-3  # after silu the clamp would give 10 exactly


def test_trap_13_w1_and_w3_with_different_global_scales(rng):
    """The two are multiplied by their own scales, 2^10 apart here."""
    w1, w2, w3 = torch.randn(16, 32, generator=rng), torch.randn(32, 16, generator=rng), torch.randn(16, 32, generator=rng) / 1024
    packed = ops.Expert(*(formats.quantize_nvfp4(w) for w in (w1, w2, w3)))
    assert packed.w1.global_scale / packed.w3.global_scale > 256
    x, chosen = torch.randn(2, 32, generator=rng), torch.zeros(2, 1, dtype=torch.int64)
    inputs = (x, [packed], packed, chosen, torch.rand(2, 1, generator=rng))
    torch.testing.assert_close(moe(*inputs, LIMIT), slow_moe(*inputs, LIMIT), **CLOSE)


def test_an_expert_chosen_twice_counts_twice_and_unchosen_ones_are_not_touched(rng):
    x, experts, shared, _, _ = case(rng, 2, 16, 8, 3, 2)
    poison = ops.Expert(*(Weight.plain(torch.full(w.shape, float("nan"))) for w in experts[0]))
    chosen, weights = torch.tensor([[1, 1], [1, 2]]), torch.tensor([[0.25, 0.5], [1.0, 0.0]])
    got = moe(x, [poison, *experts[1:]], shared, chosen, weights, LIMIT)
    torch.testing.assert_close(got, slow_moe(x, experts, shared, chosen, weights, LIMIT), **CLOSE)


def test_bf16_rounds_the_weighted_activation_once_and_the_sum_once(rng):
    """The weight comes before w2, inside the one rounding of w2's input; experts are summed in fp32 and the sum rounded."""
    x, experts, shared, chosen, weights = case(rng, 6, 32, 16, 4, 2)
    low = x.bfloat16()
    got = moe(low, experts, shared, chosen, weights, LIMIT)
    assert got.dtype == torch.bfloat16

    def part(row, e, weight):
        w1, w2, w3 = values(e)
        gate, up = [min(g, LIMIT) for g in slow_matvec(w1, row)], [max(-LIMIT, min(LIMIT, u)) for u in slow_matvec(w3, row)]
        a = torch.tensor([weight * g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]).bfloat16()
        return torch.tensor(slow_matvec(w2, a.double().tolist()), dtype=torch.float64)

    want = torch.stack([part(row, shared, 1.0) + sum(part(row, experts[e], w) for e, w in zip(picks, ws, strict=True)) for row, picks, ws
                        in zip(low.double().tolist(), chosen.tolist(), weights.double().tolist(), strict=True)])
    half_step = torch.exp2(torch.frexp(want).exponent.double() - 9)  # bf16's 8 bits
    # One activation in a thousand sits on a rounding boundary in fp32: each such flip moves a sum by 2^-8 * 0.5 * 0.25.
    assert ((got.double() - want).abs() <= half_step + 1e-3).all()
    assert ((got.double() - want).abs() <= half_step * 1.01 + 1e-6).float().mean() > 0.75


@pytest.mark.parametrize("activations", ["fp8", "nvfp4"])
def test_activation_precision_of_routed_and_shared_are_separate_and_apply_to_both_products(rng, activations):
    quantise = {"fp8": lambda v: ops.fp8_round_trip(v, 128), "nvfp4": ops.nvfp4_round_trip}[activations]

    def by_hand(x, e, weight, q):
        w1, w2, w3 = (w.dequantize() for w in e)
        gate, up = (q(x) @ w1.T).clamp(max=LIMIT), (q(x) @ w3.T).clamp(-LIMIT, LIMIT)
        return q(gate * torch.sigmoid(gate) * up * weight) @ w2.T

    x, experts, shared, _, _ = case(rng, 1, 48, 32, 1, 1)
    chosen, weights = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[0.7]])
    for routed, common in ((activations, "bf16"), ("bf16", activations), (activations, activations)):
        got = moe(x, experts, shared, chosen, weights, LIMIT, routed, common)
        want = by_hand(x, experts[0], 0.7, quantise if routed == activations else lambda v: v)
        want = want + by_hand(x, shared, 1.0, quantise if common == activations else lambda v: v)
        exact = moe(x, experts, shared, chosen, weights, LIMIT)
        assert (got - exact).abs().max() > 1e-4
        # fp32 noise may flip one quantised value: a step of 2^-4 of its size, through a column of w2, once.
        assert (got - want).abs().max() < 0.25 * (got - exact).abs().max() + 1e-5
