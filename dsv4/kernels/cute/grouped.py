"""The products of dsv4/ops/grouped.py on a Blackwell GPU: a kernel for all experts, by the tile that choice.py finds for as many rows as
each has if they are spread evenly. gemm_sm100_grouped.py has the arithmetic."""

from __future__ import annotations

import torch

from ...formats import NVFP4_BLOCK
from ..launch import expect
from ..layouts import SCALE_ROWS, TMA_COLUMNS, GroupedNvfp4, GroupedOperand, Groups, swiglu_scale, swizzled_bytes
from .choice import choose
from .gemm import KERNELS, processors
from .tiles import Tile

LIMITS = 2.0**-16, 2.0**16  # of the clamp: within them a block's scale is far from fp32's smallest, and codes are the definition's


def grouped_swiglu_nvfp4(x: GroupedNvfp4, groups: Groups, weight: GroupedOperand, weights: torch.Tensor, limit: float,
                         tile: Tile | None = None) -> GroupedNvfp4:
    """x [N, K], weight [E, 2 I, K] of layouts.grouped_gate_up, weights [S, k] fp32 -> NVFP4 [N, I]. I and K multiples of 32, limit from
    2^-16 to 2^16. `tile`: instead of the chosen one. Raises UserError for others, and on a GPU without NVFP4 tensor cores."""
    fine = weights.shape == groups.rows.shape and weights.dtype == torch.float32 and LIMITS[0] <= limit <= LIMITS[1]
    n = _check("grouped_swiglu_nvfp4", x, groups, weight, 2, 64, fine, "the rows of w1 and w3 by 16 in turn and two scales an expert, "
               f"weights [S, k] in fp32, a limit from 2^-16 to 2^16 instead of {limit}", weights=weights)
    rows, device = len(x.values), x.values.device
    out = GroupedNvfp4(torch.empty(rows, n // 4, dtype=torch.uint8, device=device),
                       torch.empty(swizzled_bytes(SCALE_ROWS * len(groups.tiles), n // 2 // NVFP4_BLOCK), dtype=torch.uint8, device=device),
                       torch.empty(rows, device=device))
    _launch("nvfp4_swiglu", x, groups, weight, tile, order=groups.order, weights=weights.contiguous(), out=out.values,
            out_scales=out.scales, out_row_scales=out.row_scales, limit=limit, scale=swiglu_scale(limit))
    return out


def grouped_nvfp4_linear(x: GroupedNvfp4, groups: Groups, weight: GroupedOperand, tile: Tile | None = None) -> torch.Tensor:
    """x [N, K], weight [E, out, K] of layouts.grouped_operand -> bf16 [N, out]. K a multiple of 32, out of 8. `tile`: instead of the chosen
    one. Raises UserError for others, and on a GPU without NVFP4 tensor cores."""
    n = _check("grouped_nvfp4_linear", x, groups, weight, 1, 8, True, "a scale an expert")
    out = torch.empty(len(x.values), n, dtype=torch.bfloat16, device=x.values.device)
    _launch("nvfp4_grouped", x, groups, weight, tile, order=None, weights=None, out=out, out_scales=None, out_row_scales=None, limit=0.0,
            scale=0.0)
    return out


def _check(name: str, x: GroupedNvfp4, groups: Groups, weight: GroupedOperand, scales: int, multiple: int, fine: bool, wanted: str,
           **others: torch.Tensor) -> int:
    """The weight's rows."""
    (rows, width), (experts, n, _) = x.values.shape, weight.values.shape
    k_blocks = 2 * width // NVFP4_BLOCK
    shape = (experts, 2) if scales == 2 else (experts,)
    expect(fine and width and 2 * width % TMA_COLUMNS == 0 and n and n % multiple == 0 and weight.values.shape[2] == width
           and x.scales.numel() == swizzled_bytes(SCALE_ROWS * len(groups.tiles), k_blocks) and groups.order.shape == (rows,)
           and groups.offsets.shape == (experts + 1,) and weight.scales.shape == (experts, swizzled_bytes(n, k_blocks))
           and weight.scale.shape == shape and weight.scale.dtype == torch.float32 and rows * n < 2**31, name,
           f"x [N, K] of these groups, K a multiple of {TMA_COLUMNS}, a weight [E, n, K] of as many experts and columns, n a multiple of "
           f"{multiple}, with {wanted}", x=x.values, x_scales=x.scales, offsets=groups.offsets, weight=weight.values,
           weight_scales=weight.scales, scale=weight.scale, **others)
    return n


def _launch(kind: str, x: GroupedNvfp4, groups: Groups, weight: GroupedOperand, tile: Tile | None, **arguments) -> None:
    (rows, width), (experts, n, _) = x.values.shape, weight.values.shape
    if not rows:
        return
    count, some = processors(x.values.device), min(rows, experts)
    tile = tile or choose(kind, -(-rows // some), n, 2 * width, some, count)
    plan = groups.pairs if tile.cluster == 2 else groups.tiles
    KERNELS[tile](x=x.values, w=weight.values, x_scale=x.scales, w_scale=weight.scales, row_scales=x.row_scales, scales=weight.scale,
                  plan=plan, counts=groups.counts, m=rows, n=n, k=2 * width, experts=experts, entries=len(plan),
                  scale_tiles=len(groups.tiles), processors=count, **arguments)
