"""The router against its formulas in plain Python floats (model.md section 8)."""

import math

import pytest
import torch

from dsv4 import ops


def slow_scores(x, gate):
    """sqrt(ln(1 + e^z)) per expert, without overflow."""
    out = []
    for row in x:
        z = [math.fsum(a * b for a, b in zip(row, g, strict=True)) for g in gate]
        out.append([math.sqrt(max(v, 0.0) + math.log1p(math.exp(-abs(v)))) for v in z])
    return out


def slow_router(x, gate, top_k, scale, bias=None, chosen=None):
    scores = slow_scores(x, gate)
    if chosen is None:
        chosen = [sorted(range(len(row)), key=lambda e: (-(row[e] + bias[e]), e))[:top_k] for row in scores]
    weights = [[row[e] / sum(row[f] for f in picks) * scale for e in picks] for row, picks in zip(scores, chosen, strict=True)]
    return chosen, weights


@pytest.mark.parametrize("S,D,E,k,scale", [
    (1, 192, 8, 2, 1.5), (9, 33, 7, 3, 2.5), (5, 64, 384, 6, 2.5), (3, 16, 4, 4, 1.0), (2, 8, 1, 1, 1.5),
])
def test_learned_router(rng, S, D, E, k, scale):
    x, gate, bias = torch.randn(S, D, generator=rng), torch.randn(E, D, generator=rng), torch.randn(E, generator=rng)
    chosen, weights = ops.router(x, gate, k, scale, bias=bias)
    want, want_weights = slow_router(x.double().tolist(), gate.double().tolist(), k, scale, bias.double().tolist())
    assert chosen.dtype == torch.int32 and weights.dtype == torch.float32
    ranked = torch.tensor(slow_scores(x.double().tolist(), gate.double().tolist())) + bias
    for s in range(S):
        if chosen[s].tolist() != want[s]:  # only where fp32 cannot tell two experts apart: scores of order 3, sums of D products
            torch.testing.assert_close(ranked[s, chosen[s]], ranked[s, want[s]], rtol=0, atol=1e-5)
            continue
        # fp32 sums of D products through a root; a score near 0 comes from a z of about -20, e^z relative to 1e-5.
        torch.testing.assert_close(weights[s], torch.tensor(want_weights[s]), rtol=5e-5, atol=1e-6)


def test_bias_selects_but_does_not_weigh(rng):
    x, gate = torch.randn(4, 16, generator=rng), torch.randn(8, 16, generator=rng) * 0.1
    bias = torch.zeros(8)
    bias[[2, 5]] = torch.tensor([100.0, 50.0])
    chosen, weights = ops.router(x, gate, 2, 1.5, bias=bias)
    assert chosen.sort(-1).values.tolist() == [[2, 5]] * 4
    _, want = ops.router(x, gate, 2, 1.5, table=chosen.long(), ids=torch.arange(4))
    assert torch.equal(weights, want)


def test_ties_go_to_the_lower_index():
    x, gate = torch.ones(1, 4), torch.ones(9, 4)
    gate[6] = 2.0
    chosen, weights = ops.router(x, gate, 4, 1.0, bias=torch.zeros(9))
    assert chosen.tolist() == [[6, 0, 1, 2]]
    chosen, weights = ops.router(torch.zeros(2, 4), gate, 3, 1.5, bias=torch.zeros(9))  # all scores sqrt(ln 2)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [pytest.approx([0.5] * 3, rel=1e-6)] * 2


def test_large_and_small_logits():
    """softplus(z) is z from 20 on and e^z far below 0; neither overflows."""
    gate = torch.tensor([[500.0], [19.99], [20.01], [-80.0], [0.0]])
    chosen, weights = ops.router(torch.ones(1, 1), gate, 5, 1.0, table=torch.arange(5)[None], ids=torch.tensor([0]))
    _, want = slow_router([[1.0]], gate.double().tolist(), 5, 1.0, chosen=[list(range(5))])
    # torch takes softplus(z) = z above 20, which is off by 2e-9.
    assert weights[0].tolist() == pytest.approx(want[0], rel=2e-6)


def test_trap_11_hash_layers_weigh_by_gathered_scores_and_have_no_bias(rng):
    """The experts come from the token's id, the weights from the gate all the same: not 1/k each."""
    x, gate = torch.randn(6, 24, generator=rng), torch.randn(8, 24, generator=rng)
    table = torch.stack([torch.randperm(8, generator=rng)[:3] for _ in range(6)])
    order = torch.randperm(6, generator=rng)  # token s has the id order[s]
    chosen, weights = ops.router(x, gate, 3, 2.5, table=table[order.argsort()], ids=order)
    _, want = slow_router(x.double().tolist(), gate.double().tolist(), 3, 2.5, chosen=table.tolist())
    assert torch.equal(chosen, table)
    torch.testing.assert_close(weights, torch.tensor(want), rtol=5e-5, atol=1e-6)  # as in test_learned_router
    torch.testing.assert_close(weights.sum(-1), torch.full((6,), 2.5), rtol=1e-6, atol=0)  # 3 roundings
    assert (weights - 2.5 / 3).abs().max() > 0.05


def test_router_is_fp32_inside_for_bf16_inputs(rng):
    """Products of bf16 inputs summed in fp32: a router in bf16 would choose other experts."""
    x, gate, bias = torch.randn(20, 64, generator=rng).bfloat16(), torch.randn(32, 64, generator=rng), torch.randn(32, generator=rng)
    for got, want in zip(ops.router(x, gate, 4, 1.5, bias=bias), ops.router(x.float(), gate, 4, 1.5, bias=bias), strict=True):
        assert torch.equal(got, want)
