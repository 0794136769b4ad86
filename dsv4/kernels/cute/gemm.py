"""Matrix products for many tokens, by the tile that choice.py finds: bf16 and e4m3 on a Hopper GPU, NVFP4 on a Blackwell one. gemm_sm90.py
and gemm_sm100.py have the arithmetic."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from ...formats import E4M3_MAX, NVFP4_BLOCK, power_of_two_ceil
from ..launch import IN, OUT, WEIGHT, WORK, Kernel, expect
from ..layouts import TMA_COLUMNS, Nvfp4, Nvfp4Operand, pad_k_major, swizzled_bytes
from . import build
from .choice import choose
from .tiles import SCALE_BLOCK, TILES, Tile

_ARGUMENTS = {"x": IN, "w": WEIGHT, "x_scale": IN, "w_scale": WEIGHT, "out": OUT,
              "m": int, "n": int, "k": int, "batch": int, "processors": int}
_NVFP4_ARGUMENTS = {"x": IN, "w": WEIGHT, "x_scale": IN, "w_scale": WEIGHT, "row_scales": IN, "out": OUT,
                    "m": int, "n": int, "k": int, "processors": int, "scale": float}
_GROUPED_ARGUMENTS = {"x": IN, "w": WEIGHT, "x_scale": IN, "w_scale": WEIGHT, "plan": IN, "counts": IN, "out": OUT,
                      "m": int, "n": int, "k": int, "experts": int, "entries": int, "processors": int}
_GROUPED_NVFP4_ARGUMENTS = {
    "x": IN, "w": WEIGHT, "x_scale": IN, "w_scale": WEIGHT, "row_scales": IN, "scales": WEIGHT, "plan": IN, "counts": IN, "order": IN,
    "weights": IN, "out": OUT, "out_scales": WORK, "out_row_scales": OUT, "m": int, "n": int, "k": int, "experts": int, "entries": int,
    "scale_tiles": int, "processors": int, "limit": float, "scale": float}


class CuteKernel(Kernel):
    """The C function of one tile."""

    def __init__(self, tile: Tile):
        one, grouped = (_NVFP4_ARGUMENTS, _GROUPED_NVFP4_ARGUMENTS) if tile.nvfp4 else (_ARGUMENTS, _GROUPED_ARGUMENTS)
        super().__init__(tile.name, grouped if tile.grouped else one)
        self.tile = tile

    def built(self, arch: str) -> Path:
        return build.build(self.tile, arch)


KERNELS = {tile: CuteKernel(tile) for tile in TILES}


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; an H200's for a CPU, where kernels are emulated."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def gemm(x: torch.Tensor, w: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    """x [M, K] @ w [N, K]^T -> [M, N], or x [M, G, K] with w [G * N, K] -> [M, G, N]: group g of x meets rows [g * N, (g + 1) * N) of w.

    All in bf16; fp32 sums, one rounding. Any M and G, K and N multiples of 8. w is a weight: it is read before the kernels in front have
    ended, so none of ours may just have written it. `tile`: instead of the chosen one. Raises UserError for other shapes or dtypes.
    """
    groups = x.shape[1] if x.dim() == 3 else 1
    expect(x.dim() in (2, 3) and w.dim() == 2 and x.shape[-1] == w.shape[1] and groups > 0 and w.shape[0] % groups == 0 and w.shape[1] > 0
           and w.shape[1] % 8 == 0 and w.shape[0] // groups % 8 == 0 and x.dtype == w.dtype == torch.bfloat16, "gemm",
           "x [M, K] and w [N, K], or x [M, G, K] and w [G N, K], in bf16, K and N multiples of 8", x=x, w=w)
    return _launch("bf16", x.contiguous(), w, None, None, groups, tile)


def fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> what gemm_fp8 takes: e4m3 [M, K] and fp32 scales [ceil(K / 128), M rounded up to 4], zeros in the fill.

    The values of ops.quant.fp8_round_trip with blocks of 128. Scales of one block of K lie together, as a tile of tokens needs them.
    """
    M, K = x.shape
    v = torch.nn.functional.pad(x.float(), (0, -K % SCALE_BLOCK)).unflatten(-1, (-1, SCALE_BLOCK))
    scale = power_of_two_ceil(v.abs().amax(-1).clamp_min(1e-4) * torch.tensor(1 / E4M3_MAX, dtype=torch.float32, device=x.device))
    values = (v / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.flatten(-2)[:, :K].contiguous(), torch.nn.functional.pad(scale.T, (0, -M % 4)).contiguous()


def gemm_fp8(x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    """x [M, K] and w [N, K] in e4m3, x_scale as `fp8_rows` makes it, w_scale fp32 [ceil(N / 128), ceil(K / 128)] -> x @ w^T [M, N] in bf16.

    Any M, K a multiple of 16, N of 8. The tensor cores sum 128 products, fp32 FMAs the rest, one rounding. w and its scales are weights, as
    in `gemm`. Raises UserError for other shapes or dtypes.
    """
    fine = x.dim() == w.dim() == 2 and x.shape[1] == w.shape[1] > 0 and w.shape[1] % 16 == 0 and w.shape[0] % 8 == 0
    if fine:
        (M, K), N = x.shape, w.shape[0]
        blocks = -(-K // SCALE_BLOCK)
        fine = x_scale.shape == (blocks, -(-M // 4) * 4) and w_scale.shape == (-(-N // SCALE_BLOCK), blocks)
    expect(fine and x.dtype == w.dtype == torch.float8_e4m3fn and x_scale.dtype == w_scale.dtype == torch.float32, "gemm_fp8",
           "x [M, K] and w [N, K] in e4m3, K a multiple of 16, N of 8, with fp32 scales [ceil(K / 128), M rounded up to 4] and "
           "[ceil(N / 128), ceil(K / 128)]", x=x, x_scale=x_scale, w=w, w_scale=w_scale)
    return _launch("e4m3", x.contiguous(), w, x_scale, w_scale, 1, tile)


def gemm_nvfp4(x: Nvfp4, weight: Nvfp4Operand, tile: Tile | None = None) -> torch.Tensor:
    """ops.nvfp4.nvfp4_linear for any number of tokens: x of K columns (scales swizzled) times weight [N, K]^T -> [M, N] in bf16.

    The operands are those of kernels.nvfp4.nvfp4_linear. N a multiple of 8. Raises UserError for others.
    """
    m, n, k = len(x.values), len(weight.values), 2 * x.values.shape[1]
    columns, groups = -(-k // TMA_COLUMNS) * TMA_COLUMNS, k // NVFP4_BLOCK
    expect(x.swizzled and n % 8 == 0 and k > 0 and weight.values.shape[1] == columns // 2
           and x.scales.numel() == swizzled_bytes(m, groups) and weight.scales.numel() == swizzled_bytes(n, groups), "gemm_nvfp4",
           "x [M, K / 2] and a weight of as many columns, N a multiple of 8, the scales of both swizzled", x=x.values, x_scales=x.scales,
           weight=weight.values, weight_scales=weight.scales)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.values.device)
    if out.numel():
        count = processors(x.values.device)
        tile = tile or choose("nvfp4", m, n, columns, 1, count)
        KERNELS[tile](x=pad_k_major(x.values, TMA_COLUMNS), w=weight.values, x_scale=x.scales, w_scale=weight.scales,
                      row_scales=x.row_scales, out=out, m=m, n=n, k=columns, processors=count, scale=weight.scale)
    return out


def _launch(kind: str, x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor | None, w_scale: torch.Tensor | None, groups: int,
            tile: Tile | None) -> torch.Tensor:
    m, n, k = x.shape[0], w.shape[0] // groups, w.shape[1]
    out = torch.empty(*x.shape[:-1], n, dtype=torch.bfloat16, device=x.device)
    if out.numel():
        count = processors(x.device)
        tile = tile or choose(kind, m, n, k, groups, count)
        KERNELS[tile](x=x, w=w, x_scale=x_scale, w_scale=w_scale, out=out, m=m, n=n, k=k, batch=groups, processors=count)
    return out
