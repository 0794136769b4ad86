"""The kernels of dsv4/ops/norm.py."""

from __future__ import annotations

import torch

from .launch import DTYPES, IN, OUT, Kernel, expect

_rms_norm = Kernel("rms_norm", {"x": IN, "weight": IN, "out": OUT, "rows": int, "columns": int, "eps": float, "dtype": int})


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] fp32 or bf16, weight [D] fp32 -> x's shape and dtype. Raises UserError for other shapes or dtypes."""
    expect(x.dim() >= 1 and x.dtype in DTYPES and weight.dtype == torch.float32 and weight.shape == x.shape[-1:], "rms_norm",
           "x [..., D] in fp32 or bf16 and weight [D] in fp32", x=x, weight=weight)
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        columns = x.shape[-1]
        _rms_norm(x=x, weight=weight.contiguous(), out=out, rows=x.numel() // columns, columns=columns, eps=eps, dtype=DTYPES[x.dtype])
    return out
