"""The kernels of dsv4/ops/nvfp4.py."""

from __future__ import annotations

import torch

from ..formats import NVFP4_BLOCK
from .launch import DTYPES, IN, OUT, WEIGHT, Kernel, expect, tensor_memory_blocks
from .layouts import SCALE_ROWS, TMA_COLUMNS, Nvfp4, Nvfp4Operand, pad_k_major, swiglu_scale, swizzled_bytes

MAX_COLUMNS = 16384  # kMaxColumns of cuda/nvfp4.cuh
MAX_LINEAR_TOKENS, CHUNK_COLUMNS = 128, 256  # cuda/nvfp4_linear.cu
_MAX_SPLITS = 8

_PACKED = {"values": OUT, "scales": OUT, "row_scales": OUT, "tokens": int, "columns": int}
_to_nvfp4 = Kernel("to_nvfp4", {"x": IN, **_PACKED, "dtype": int, "swizzled": int})
_rms_norm_to_nvfp4 = Kernel("rms_norm_to_nvfp4", {"x": IN, "weight": WEIGHT, "y": OUT, **_PACKED, "eps": float, "swizzled": int})
_swiglu_to_nvfp4 = Kernel("swiglu_to_nvfp4", {"h": IN, "weights": IN, **_PACKED, "dtype": int, "limit": float, "scale": float,
                                              "swizzled": int})
_nvfp4_linear = Kernel("nvfp4_linear", {"weights": WEIGHT, "weight_scales": WEIGHT, "x": IN, "x_scales": IN, "row_scales": IN, "out": OUT,
                                        "tokens": int, "rows": int, "columns": int, "splits": int, "scale": float})


def _empty(tokens: int, columns: int, swizzled: bool, device: torch.device) -> Nvfp4:
    groups = columns // NVFP4_BLOCK
    shape = (swizzled_bytes(tokens, groups),) if swizzled else (tokens, groups)
    return Nvfp4(torch.empty(tokens, columns // 2, dtype=torch.uint8, device=device),
                 torch.empty(shape, dtype=torch.uint8, device=device), torch.empty(tokens, device=device), swizzled)


def _tensors(packed: Nvfp4) -> dict[str, torch.Tensor]:
    return {"values": packed.values, "scales": packed.scales, "row_scales": packed.row_scales}


def to_nvfp4(x: torch.Tensor, swizzled: bool = False) -> Nvfp4:
    """x [S, K] bf16 or fp32, any S, K a multiple of 16 up to 16,384. Raises UserError for other shapes or dtypes."""
    expect(x.dim() == 2 and 16 <= x.shape[1] <= MAX_COLUMNS and x.shape[1] % 16 == 0 and x.dtype in DTYPES, "to_nvfp4",
           f"x [S, K] in bf16 or fp32, K a multiple of 16 up to {MAX_COLUMNS}", x=x)
    S, K = x.shape
    out = _empty(S, K, swizzled, x.device)
    if S:
        _to_nvfp4(x=x.contiguous(), **_tensors(out), tokens=S, columns=K, dtype=DTYPES[x.dtype], swizzled=int(swizzled))
    return out


def rms_norm_to_nvfp4(x: torch.Tensor, weight: torch.Tensor, eps: float, swizzled: bool = False) -> tuple[torch.Tensor, Nvfp4]:
    """x [S, K] bf16, weight [K] fp32, any S, K a multiple of 16 up to 16,384 -> y [S, K] bf16 and its NVFP4.

    Raises UserError for other shapes or dtypes.
    """
    expect(x.dim() == 2 and 16 <= x.shape[1] <= MAX_COLUMNS and x.shape[1] % 16 == 0 and x.dtype == torch.bfloat16
           and weight.shape == x.shape[1:] and weight.dtype == torch.float32, "rms_norm_to_nvfp4",
           f"x [S, K] in bf16 and weight [K] in fp32, K a multiple of 16 up to {MAX_COLUMNS}", x=x, weight=weight)
    S, K = x.shape
    y, out = torch.empty(S, K, dtype=x.dtype, device=x.device), _empty(S, K, swizzled, x.device)
    if S:
        _rms_norm_to_nvfp4(x=x.contiguous(), weight=weight.contiguous(), y=y, **_tensors(out), tokens=S, columns=K, eps=eps,
                           swizzled=int(swizzled))
    return y, out


def swiglu_to_nvfp4(h: torch.Tensor, weights: torch.Tensor | None, limit: float, swizzled: bool = False) -> Nvfp4:
    """h [S, 2 I] bf16 or fp32, interleaved by 16, weights [S] fp32 or None, any S, I a multiple of 16 -> rows of I values.

    Raises UserError for other shapes or dtypes, and for a limit that is not above zero.
    """
    given = {"h": h} if weights is None else {"h": h, "weights": weights}
    expect(h.dim() == 2 and h.shape[1] and h.shape[1] % 32 == 0 and h.dtype in DTYPES and limit > 0
           and (weights is None or (weights.shape == h.shape[:1] and weights.dtype == torch.float32)), "swiglu_to_nvfp4",
           f"h [S, 2 I] in bf16 or fp32, I a multiple of 16, weights [S] in fp32 or None, a limit above zero instead of {limit}", **given)
    S, columns = h.shape[0], h.shape[1] // 2
    out = _empty(S, columns, swizzled, h.device)
    if S:
        _swiglu_to_nvfp4(h=h.contiguous(), weights=None if weights is None else weights.contiguous(), **_tensors(out), tokens=S,
                         columns=columns, dtype=DTYPES[h.dtype], limit=limit, scale=swiglu_scale(limit), swizzled=int(swizzled))
    return out


def nvfp4_linear(x: Nvfp4, weight: Nvfp4Operand) -> torch.Tensor:
    """x of 1 to 128 rows with swizzled scales, weight of `layouts.nvfp4_operand` and as many columns -> bf16 [S, out].

    Raises UserError for others, and on a GPU without NVFP4 tensor cores.
    """
    S, K, rows = len(x.values), 2 * x.values.shape[1], len(weight.values)
    columns = -(-K // TMA_COLUMNS) * TMA_COLUMNS
    expect(x.swizzled and 1 <= S <= MAX_LINEAR_TOKENS and K and weight.values.shape[1] == columns // 2
           and weight.scales.numel() == swizzled_bytes(rows, K // NVFP4_BLOCK), "nvfp4_linear",
           f"x of 1 to {MAX_LINEAR_TOKENS} rows, its scales swizzled, and a weight of as many columns", values=x.values, scales=x.scales,
           weight=weight.values, weight_scales=weight.scales)
    blocks = tensor_memory_blocks("nvfp4_linear", x.values.device, "linear, which takes NVFP4 weights on it")
    out = torch.empty(S, rows, dtype=torch.bfloat16, device=x.values.device)
    _nvfp4_linear(weights=weight.values, weight_scales=weight.scales, x=pad_k_major(x.values, TMA_COLUMNS), x_scales=x.scales,
                  row_scales=x.row_scales, out=out, tokens=S, rows=rows, columns=columns, splits=_splits(rows, columns, blocks),
                  scale=weight.scale)
    return out


def _splits(rows: int, columns: int, blocks: int) -> int:
    """How many blocks share the K of 128 rows: as many as fit, in powers of two."""
    splits, tiles, chunks = 1, -(-rows // SCALE_ROWS), -(-columns // CHUNK_COLUMNS)
    while splits < _MAX_SPLITS and 2 * splits * tiles <= blocks and 2 * splits <= chunks:
        splits *= 2
    return splits
