"""A product for each routed expert by one kernel, by the tile that choice.py finds for as many rows as each has if they are spread evenly:
bf16 and e4m3 on a Hopper GPU, the NVFP4 ones of dsv4/ops/grouped.py on a Blackwell one. gemm_sm90_grouped.py and gemm_sm100_grouped.py have
the arithmetic."""

from __future__ import annotations

import torch

from ...formats import NVFP4_BLOCK
from ..launch import expect
from ..layouts import SCALE_ROWS, TMA_COLUMNS, GroupedNvfp4, GroupedOperand, Groups, group_scales, swiglu_scale, swizzled_bytes
from .choice import choose
from .gemm import KERNELS, fp8_rows, processors
from .tiles import SCALE_BLOCK, Tile

LIMITS = 2.0**-16, 2.0**16  # of the clamp: within them a block's scale is far from fp32's smallest, and codes are the definition's


def grouped_gemm(x: torch.Tensor, groups: Groups, w: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    """x [N, K], the rows of `groups`, times w [E, n, K]^T of each row's expert -> [N, n].

    All in bf16; fp32 sums, one rounding. Any N, K and n multiples of 8. `tile`: instead of the chosen one. Raises UserError for other
    shapes or dtypes.
    """
    expect(_fits(x, groups, w, 8) and x.dtype == w.dtype == torch.bfloat16, "grouped_gemm",
           "x [N, K] of these groups and w [E, n, K] of as many experts in bf16, K and n multiples of 8", x=x, w=w, order=groups.order,
           offsets=groups.offsets)
    return _launch_rows("bf16_grouped", x, groups, w, None, None, tile)


def grouped_fp8_rows(x: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] -> what grouped_gemm_fp8 takes: e4m3 [N, K] and fp32 scales [ceil(K / 128), 128 * len(groups.tiles)], those of `fp8_rows`
    where layouts.group_scales puts them."""
    values, scales = fp8_rows(x)
    return values, group_scales(scales[:, : len(x)], groups)


def grouped_gemm_fp8(x: torch.Tensor, x_scale: torch.Tensor, groups: Groups, w: torch.Tensor, w_scale: torch.Tensor,
                     tile: Tile | None = None) -> torch.Tensor:
    """x [N, K], the rows of `groups`, and w [E, n, K] in e4m3, x_scale as `grouped_fp8_rows` makes it, w_scale fp32 [E, ceil(n / 128),
    ceil(K / 128)] -> x times w^T of each row's expert [N, n] in bf16.

    Any N, K a multiple of 16, n of 8. Arithmetic and bits are gemm_fp8's by the same tile. Raises UserError for other shapes or dtypes.
    """
    fine = _fits(x, groups, w, 16)
    if fine:
        experts, n_blocks, k_blocks = len(w), *(-(-size // SCALE_BLOCK) for size in w.shape[1:])
        fine = x_scale.shape == (k_blocks, SCALE_ROWS * len(groups.tiles)) and w_scale.shape == (experts, n_blocks, k_blocks)
    expect(fine and x.dtype == w.dtype == torch.float8_e4m3fn and x_scale.dtype == w_scale.dtype == torch.float32, "grouped_gemm_fp8",
           "x [N, K] of these groups and w [E, n, K] of as many experts in e4m3, K a multiple of 16, n of 8, with fp32 scales "
           "[ceil(K / 128), 128 tiles of the groups] and [E, ceil(n / 128), ceil(K / 128)]", x=x, w=w, order=groups.order,
           offsets=groups.offsets, tiles=groups.tiles, x_scale=x_scale, w_scale=w_scale)
    return _launch_rows("e4m3_grouped", x, groups, w, x_scale, w_scale, tile)


def _fits(x: torch.Tensor, groups: Groups, w: torch.Tensor, multiple: int) -> bool:
    """Whether the shapes are those of one product an expert, K a multiple of so many."""
    return (x.dim() == 2 and w.dim() == 3 and x.shape[1] == w.shape[2] > 0 and w.shape[2] % multiple == 0 and w.shape[1] % 8 == 0
            and groups.order.shape == (len(x),) and groups.offsets.shape == (len(w) + 1,))


def _launch_rows(kind: str, x: torch.Tensor, groups: Groups, w: torch.Tensor, x_scale: torch.Tensor | None, w_scale: torch.Tensor | None,
                 tile: Tile | None) -> torch.Tensor:
    rows, (experts, n, k) = len(x), w.shape
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    if out.numel():
        count = processors(x.device)
        tile = tile or _chosen(kind, rows, experts, n, k, count)
        KERNELS[tile](x=x.contiguous(), w=w, x_scale=x_scale, w_scale=w_scale, plan=groups.tiles, counts=groups.counts, out=out, m=rows,
                      n=n, k=k, experts=experts, entries=len(groups.tiles), processors=count)
    return out


def _chosen(kind: str, rows: int, experts: int, n: int, k: int, count: int) -> Tile:
    some = min(rows, experts)
    return choose(kind, -(-rows // some), n, k, some, count)


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
    count = processors(x.values.device)
    tile = tile or _chosen(kind, rows, experts, n, 2 * width, count)
    plan = groups.pairs if tile.cluster == 2 else groups.tiles
    KERNELS[tile](x=x.values, w=weight.values, x_scale=x.scales, w_scale=weight.scales, row_scales=x.row_scales, scales=weight.scale,
                  plan=plan, counts=groups.counts, m=rows, n=n, k=2 * width, experts=experts, entries=len(plan),
                  scale_tiles=len(groups.tiles), processors=count, **arguments)
