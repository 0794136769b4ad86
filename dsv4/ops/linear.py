"""y = x @ W^T for weights as the checkpoint holds them, dequantised where they are used (model.md section 9)."""

from __future__ import annotations

import torch

from ..formats import Weight
from .backend import operation
from .quant import fp8_round_trip, nvfp4_round_trip

TILE = 1 << 24  # weights dequantised at once, in elements: 64 MB in fp32


def quantize_input(x: torch.Tensor, activations: str) -> torch.Tensor:
    """The values a GEMM of that input precision would see: "bf16" (x as it is), "fp8" (1x128, ue8m0) or "nvfp4"."""
    if activations == "fp8":
        return fp8_round_trip(x, 128)
    return nvfp4_round_trip(x) if activations == "nvfp4" else x


def matmul_fp32(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [S, in] (any float dtype) @ weight [out, in]^T with exact weights and fp32 sums -> fp32 [S, out]."""
    out, k = weight.shape
    x, rows = x.float(), max(128, TILE // k // 128 * 128)
    if weight.payload.dtype == torch.float32 or rows >= out:
        return x @ weight.dequantize().T
    return torch.cat([x @ weight.rows(i, min(i + rows, out)).dequantize().T for i in range(0, out, rows)], -1)


def pack_weights_ref(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The weights of one launch as the three products below take them; what else they become is the kernels' business."""
    return weights


def projections_ref(x: torch.Tensor, weights: tuple[Weight, ...], activations: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    """Several projections of one input, fp32 and not rounded: x [S, in] -> [S, out_i] each. `activations`: see quantize_input."""
    return tuple(matmul_fp32(quantize_input(x, a), w) for w, a in zip(weights, activations, strict=True))


def linear_ref(x: torch.Tensor, weights: tuple[Weight], activations: str = "bf16") -> torch.Tensor:
    """x [S, in] -> [S, out] in x's dtype; fp32 accumulation, one rounding. A kernel may leave partial sums (`whole` of mhc.py).
    `activations`: see quantize_input."""
    (weight,) = weights
    return matmul_fp32(quantize_input(x, activations), weight).to(x.dtype)


def grouped_linear_ref(x: torch.Tensor, weights: tuple[Weight]) -> torch.Tensor:
    """wo_a: group g of x [S, G, in] meets rows [g * R, (g + 1) * R) of the one weight [G * R, in] -> [S, G, R] in x's dtype.

    The official code runs it on bf16 activations, never on quantised ones (model.md section 4).
    """
    (weight,) = weights
    groups, rows = x.shape[1], weight.shape[0] // x.shape[1]
    return torch.stack([matmul_fp32(x[:, g], weight.rows(g * rows, (g + 1) * rows)) for g in range(groups)], 1).to(x.dtype)


pack_weights = operation(pack_weights_ref)
projections = operation(projections_ref)
linear = operation(linear_ref)
grouped_linear = operation(grouped_linear_ref)
