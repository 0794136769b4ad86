"""The definitions of routed experts as two products an expert: groups choice by choice, and the whole against `moe`."""

import pytest
import torch

from dsv4 import ops
from dsv4.formats import Weight, quantize_nvfp4
from dsv4.kernels.layouts import Nvfp4Operand, group_scales, grouped_gate_up, grouped_operand, nvfp4_operand, plan_entries
from dsv4.ops.experts import Expert, Experts, moe_ref
from dsv4.ops.nvfp4 import nvfp4_linear_ref


def draw(rng, S, k, E, last=None):
    """chosen [S, k]; no expert from `last` on."""
    return torch.randint(0, last or E, (S, k), generator=rng, dtype=torch.int32)


@pytest.mark.parametrize("S,k,E", [(1, 1, 1), (1, 6, 384), (40, 2, 5), (300, 3, 4), (513, 1, 3), (0, 2, 3)])
def test_group_choices_choice_by_choice(rng, S, k, E):
    chosen = draw(rng, S, k, E, max(1, E - 1))
    groups = ops.group_choices(chosen, E)
    flat = chosen.flatten().tolist()
    order = sorted(range(S * k), key=lambda choice: (flat[choice], choice))
    assert groups.order.tolist() == order and all(t.dtype == torch.int32 for t in groups)
    assert all(order[row] == choice for choice, row in enumerate(groups.rows.flatten().tolist())) and groups.rows.shape == (S, k)
    assert groups.offsets.tolist() == [sum(e < n for e in flat) for n in range(E + 1)]
    for entries, count, height in zip(groups[3:5], groups.counts.tolist(), (128, 256), strict=True):
        want, tile = [], 0
        for e in range(E):
            mine = [row for row, choice in enumerate(order) if flat[choice] == e]
            want += [[e, mine[i], len(mine[i : i + height]), tile + i // 128] for i in range(0, len(mine), height)]
            tile += -(-len(mine) // 128)
        assert entries[:count].tolist() == want and len(entries) == plan_entries(S * k, E, height) >= count


def test_there_are_never_more_entries_than_planned_for(rng):
    """The worst: as many experts with one row as there can be, and the rest at one row more than a tile."""
    for rows, experts, height in ((6, 384, 128), (129, 2, 128), (130, 1, 128), (300, 3, 256), (24576, 384, 128), (0, 4, 128)):
        some = min(rows, experts)
        counts = [1] * some
        for e in range(some):
            more = min(height * ((rows - sum(counts)) // height), rows - sum(counts))
            counts[e] += more
        assert plan_entries(rows, experts, height) >= sum(-(-c // height) for c in counts)
    assert plan_entries(6, 384, 128) == 6 and plan_entries(128, 1, 128) == 1 and plan_entries(129, 2, 128) == 2


@pytest.mark.parametrize("S,k,E", [(1, 1, 1), (300, 3, 5), (2, 6, 384), (0, 2, 3)])
def test_group_scales_are_where_the_plan_has_them(rng, S, k, E):
    """Each expert's from its tile on; zeros in the rest, also of tiles that there are not."""
    groups = ops.group_choices(draw(rng, S, k, E, max(1, E - 1)), E)
    scales = torch.rand(3, S * k, generator=rng) + 1
    want = torch.zeros(3, len(groups.tiles), 128)
    for _, first, rows, tile in groups.tiles[: groups.counts[0]].tolist():
        want[:, tile, :rows] = scales[:, first : first + rows]
    assert torch.equal(group_scales(scales, groups), want.flatten(1))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("K", [32, 96, 256])
def test_group_nvfp4_copies_each_token_to_its_experts(rng, K, swizzled):
    chosen = draw(rng, 150, 2, 5, 4)
    x, groups = ops.to_nvfp4(torch.randn(150, K, generator=rng), swizzled), ops.group_choices(chosen, 5)
    got, values = ops.group_nvfp4(x, groups), ops.unpack_nvfp4(x)
    for e in range(5):
        rows = groups.order[groups.offsets[e] : groups.offsets[e + 1]].long()
        assert torch.equal(ops.unpack_nvfp4(got.of(groups, e)), values[rows // 2])
    tiles = -(-torch.bincount(chosen.flatten(), minlength=5) // 128)
    assert groups.counts[0] == tiles.sum() and (got.scales[groups.counts[0] * got.scales.numel() // len(groups.tiles) :] == 0).all()


def test_grouped_nvfp4_linear_is_each_expert_s_product(rng):
    chosen = draw(rng, 70, 2, 4, 3)
    weights = [quantize_nvfp4(torch.randn(24, 64, generator=rng)) for _ in range(4)]
    x, groups = ops.to_nvfp4(torch.randn(70, 64, generator=rng)), ops.group_choices(chosen, 4)
    got = ops.grouped_nvfp4_linear(ops.group_nvfp4(x, groups), groups, grouped_operand(weights))
    for row, choice in enumerate(groups.order.tolist()):
        expert = chosen.flatten()[choice]
        one = x._replace(values=x.values[choice // 2][None], scales=x.scales[choice // 2][None], row_scales=x.row_scales[choice // 2][None])
        assert torch.equal(got[row], nvfp4_linear_ref(one, nvfp4_operand(weights[expert]))[0])


def test_grouped_swiglu_is_two_products_and_the_quantiser(rng):
    chosen, weights = draw(rng, 70, 2, 3), torch.rand(70, 2, generator=rng)
    w1, w3 = ([quantize_nvfp4(torch.randn(64, 32, generator=rng) * size, size / 300) for _ in range(3)] for size in (1.0, 3.0))
    x, groups = ops.to_nvfp4(torch.randn(70, 32, generator=rng)), ops.group_choices(chosen, 3)
    mine = ops.group_nvfp4(x, groups)
    got = ops.grouped_swiglu_nvfp4(mine, groups, grouped_gate_up(w1, w3), weights, 10.0)
    for e in range(3):
        rows = mine.of(groups, e)
        gate, up = (nvfp4_linear_ref(rows, nvfp4_operand(w[e])) for w in (w1, w3))
        h = torch.cat([half for i in range(0, 64, 16) for half in (gate[:, i : i + 16], up[:, i : i + 16])], 1)
        order = groups.order[groups.offsets[e] : groups.offsets[e + 1]].long()
        want = ops.swiglu_to_nvfp4(h, weights.flatten()[order], 10.0, True)
        assert all(torch.equal(a, b) for a, b in zip(got.of(groups, e)[:3], want[:3], strict=True))


def test_sum_choices_adds_in_the_order_of_the_experts(rng):
    """Numbers whose sum depends on the order, so that another one shows."""
    chosen = torch.tensor([[2, 0, 1], [1, 1, 0]], dtype=torch.int32)
    groups = ops.group_choices(chosen, 3)
    of_choice = torch.tensor([[1.0, 2.0**30, -(2.0**30)], [2.0**30, 3.0, -(2.0**30)]])
    y = torch.empty(6, 8, dtype=torch.bfloat16)
    y[groups.rows.long()] = of_choice[:, :, None].bfloat16().expand(2, 3, 8)
    got = ops.sum_choices(y, groups, torch.full((2, 8), 0.5))
    # Expert 0, then 1, then 2, in fp32, where 2^30 + 0.5 is 2^30: the first token's 1 comes last, the second one's 3 when all is 0.
    assert got.dtype == torch.bfloat16 and got[:, 0].tolist() == [1.0, 3.0] and (got == got[:, :1]).all()


def test_the_experts_together_are_moe_s(rng):
    """The same experts through `moe` with NVFP4 activations, which scales and rounds the middle in its own way. So the results differ by
    these two roundings: 0.055 to 0.079 over 30 seeds; a routing weight or a scale in the wrong place makes 0.28 and more."""
    S, k, E, D, inner = 60, 3, 6, 96, 64
    experts = [Expert(*(quantize_nvfp4(torch.randn(*shape, generator=rng) * size) for shape, size in
                        (((inner, D), 0.2), ((D, inner), 0.1), ((inner, D), 0.6)))) for _ in range(E)]
    shared = Expert(*(Weight.plain(torch.zeros(*s)) for s in ((inner, D), (D, inner), (inner, D))))
    x, weights = torch.randn(S, D, generator=rng), torch.rand(S, k, generator=rng) * 2
    chosen = torch.stack([torch.randperm(E, generator=rng)[:k] for _ in range(S)]).int()
    want = moe_ref(x, Experts(experts, shared), chosen, weights, 10.0, "nvfp4")
    groups = ops.group_choices(chosen, E)
    gate_up = grouped_gate_up([e.w1 for e in experts], [e.w3 for e in experts])
    hidden = ops.grouped_swiglu_nvfp4(ops.group_nvfp4(ops.to_nvfp4(x), groups), groups, gate_up, weights, 10.0)
    y = ops.grouped_nvfp4_linear(hidden, groups, grouped_operand([e.w2 for e in experts]))
    got = ops.sum_choices(y, groups, torch.zeros(S, D)).float()
    assert (got - want).norm() < 0.12 * want.norm()


def test_operands_refuse_other_formats(rng):
    plain, four = Weight.plain(torch.zeros(32, 32)), quantize_nvfp4(torch.randn(32, 32, generator=rng))
    with pytest.raises(ValueError, match="expected an nvfp4 weight, found plain"):
        grouped_operand([four, plain])
    with pytest.raises(ValueError, match="expected nvfp4 weights, found nvfp4 and plain"):
        grouped_gate_up([four], [plain])
    with pytest.raises(ValueError, match="gate and up: expected one shape"):
        grouped_gate_up([four], [quantize_nvfp4(torch.randn(16, 32, generator=rng))])
    assert isinstance(nvfp4_operand(four), Nvfp4Operand)
