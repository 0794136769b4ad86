"""The kernels of dsv4/ops/nvfp4.py."""

from __future__ import annotations

import torch

from ..formats import NVFP4_BLOCK
from .launch import DTYPES, IN, OUT, WEIGHT, Kernel, expect
from .layouts import Nvfp4, swiglu_scale, swizzled_bytes

MAX_COLUMNS = 16384  # kMaxColumns of cuda/nvfp4.cuh

_PACKED = {"values": OUT, "scales": OUT, "row_scales": OUT, "tokens": int, "columns": int}
_to_nvfp4 = Kernel("to_nvfp4", {"x": IN, **_PACKED, "dtype": int, "swizzled": int})
_rms_norm_to_nvfp4 = Kernel("rms_norm_to_nvfp4", {"x": IN, "weight": WEIGHT, "y": OUT, **_PACKED, "eps": float, "swizzled": int})
_swiglu_to_nvfp4 = Kernel("swiglu_to_nvfp4", {"h": IN, "weights": IN, **_PACKED, "dtype": int, "limit": float, "scale": float,
                                              "swizzled": int})


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
