"""The routed experts of many tokens in NVFP4, as two products an expert: which rows are whose, the two products, a token's sum. None of
them waits for the device but the definitions. model.md section 8 is what they compute, layouts.py says how their operands lie."""

from __future__ import annotations

import torch

from ..formats import NVFP4_BLOCK
from ..kernels.layouts import (
    SCALE_ROWS,
    GroupedNvfp4,
    GroupedOperand,
    Groups,
    Nvfp4,
    Nvfp4Operand,
    interleave_gate_up,
    plan_entries,
    separate_gate_up,
    swizzle_scales,
    swizzled_bytes,
    unswizzle_scales,
)
from .backend import operation
from .nvfp4 import nvfp4_linear_ref, swiglu_to_nvfp4_ref


def group_choices_ref(chosen: torch.Tensor, experts: int) -> Groups:
    """chosen [S, k] int32, each of 0 .. experts - 1 -> which rows each expert gets."""
    number = chosen.flatten().long()
    order = torch.argsort(number, stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(number, minlength=experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    plans, first_tile = {SCALE_ROWS: [], 2 * SCALE_ROWS: []}, 0
    for e, (first, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        for height, plan in plans.items():
            plan += [(e, first + r, min(height, count - r), first_tile + r // SCALE_ROWS) for r in range(0, count, height)]
        first_tile += -(-count // SCALE_ROWS)
    tiles, pairs = (torch.zeros(plan_entries(len(order), experts, height), 4, dtype=torch.int32) for height in plans)
    for entries, plan in zip((tiles, pairs), plans.values(), strict=True):
        entries[: len(plan)] = torch.tensor(plan, dtype=torch.int32).view(-1, 4)
    counts = torch.tensor([len(plan) for plan in plans.values()], dtype=torch.int32)
    return Groups(order.int(), rows.int().view(chosen.shape), offsets.int(), *(t.to(chosen.device) for t in (tiles, pairs, counts)))


def _assemble(parts: dict[int, Nvfp4], groups: Groups, columns: int, like: torch.Tensor) -> GroupedNvfp4:
    """The experts' rows, by their numbers in order, as one."""
    scales = [p.scales if p.swizzled else swizzle_scales(p.scales) for p in parts.values()]
    missing = swizzled_bytes(SCALE_ROWS * len(groups.tiles), columns // NVFP4_BLOCK) - sum(s.numel() for s in scales)
    values = [torch.empty(0, columns // 2, dtype=torch.uint8, device=like.device), *(p.values for p in parts.values())]
    rows = [torch.empty(0, device=like.device), *(p.row_scales for p in parts.values())]
    fill = torch.zeros(missing, dtype=torch.uint8, device=like.device)
    return GroupedNvfp4(torch.cat(values), torch.cat([*scales, fill]), torch.cat(rows))


def _experts(groups: Groups) -> list[tuple[int, slice]]:
    """(number, rows) of the experts that have rows."""
    offsets = groups.offsets.tolist()
    return [(e, slice(*span)) for e, span in enumerate(zip(offsets, offsets[1:], strict=False)) if span[0] < span[1]]


def group_nvfp4_ref(x: Nvfp4, groups: Groups) -> GroupedNvfp4:
    """Tokens [S, K], K a multiple of 32, as rows of the experts that they chose. Codes and scales are copied, none is changed."""
    token = groups.order.long() // groups.rows.shape[1]
    plain = x.plain_scales()
    parts = {e: Nvfp4(x.values[token[rows]], plain[token[rows]], x.row_scales[token[rows]], False) for e, rows in _experts(groups)}
    return _assemble(parts, groups, 2 * x.values.shape[1], x.values)


def grouped_swiglu_nvfp4_ref(x: GroupedNvfp4, groups: Groups, weight: GroupedOperand, weights: torch.Tensor, limit: float) -> GroupedNvfp4:
    """w1 and w3 of each expert times its rows, and what swiglu_to_nvfp4 makes of these in bf16: x [N, K], weight [E, 2 I, K] of
    layouts.grouped_gate_up, weights [S, k] fp32 (routing weights) -> rows of I values, I and K multiples of 32."""
    inner = weight.values.shape[1] // 2
    parts = {}
    for e, rows in _experts(groups):
        mine = x.of(groups, e)
        groups_of_k = mine.values.shape[1] // 8
        scales = separate_gate_up(unswizzle_scales(weight.scales[e], 2 * inner, groups_of_k), inner)
        halves = [nvfp4_linear_ref(mine, Nvfp4Operand(values, swizzle_scales(s), scale)) for values, s, scale in
                  zip(separate_gate_up(weight.values[e], inner), scales, weight.scale[e].tolist(), strict=True)]
        h = interleave_gate_up(*(half.T for half in halves)).T
        parts[e] = swiglu_to_nvfp4_ref(h, weights.flatten()[groups.order[rows].long()], limit, True)
    return _assemble(parts, groups, inner, x.values)


def grouped_nvfp4_linear_ref(x: GroupedNvfp4, groups: Groups, weight: GroupedOperand) -> torch.Tensor:
    """nvfp4_linear of each expert's rows: x [N, K], weight [E, out, K] of layouts.grouped_operand, K a multiple of 32 -> bf16 [N, out]."""
    out = torch.empty(len(x.values), weight.values.shape[1], dtype=torch.bfloat16, device=x.values.device)
    for e, rows in _experts(groups):
        out[rows] = nvfp4_linear_ref(x.of(groups, e), Nvfp4Operand(weight.values[e], weight.scales[e], weight.scale[e].item()))
    return out


def sum_choices_ref(y: torch.Tensor, groups: Groups, shared: torch.Tensor) -> torch.Tensor:
    """A token's shared expert [S, D] and the rows y [N, D] of its choices, bf16 or fp32 each, added in fp32 in the order of the experts'
    numbers -> bf16 [S, D]. bf16 rows are each expert's result rounded before, as in the official code."""
    total = shared.float()
    for rows in groups.rows.sort(-1).values.long().unbind(-1):  # rows are sorted by expert
        total = total + y[rows].float()
    return total.to(torch.bfloat16)


group_choices = operation(group_choices_ref)
group_nvfp4 = operation(group_nvfp4_ref)
grouped_swiglu_nvfp4 = operation(grouped_swiglu_nvfp4_ref)
grouped_nvfp4_linear = operation(grouped_nvfp4_linear_ref)
sum_choices = operation(sum_choices_ref)
