"""SwiGLU experts with a clamp: the routed ones of a token, weighted, and the shared one (model.md section 8)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..formats import Weight
from .backend import operation
from .linear import matmul_fp32, quantize_input


class Expert(NamedTuple):
    """w1 (gate) and w3 (up) [I, D], w2 (down) [D, I]. Each has its own scales: w1's and w3's global ones may differ."""

    w1: Weight
    w2: Weight
    w3: Weight


def _expert(x: torch.Tensor, expert: Expert, limit: float, activations: str, weights: torch.Tensor | None) -> torch.Tensor:
    quantized = quantize_input(x, activations)
    gate = matmul_fp32(quantized, expert.w1).clamp(max=limit)  # from above only
    up = matmul_fp32(quantized, expert.w3).clamp(-limit, limit)
    a = F.silu(gate) * up
    if weights is not None:
        a = a * weights[:, None]  # before w2, as in the official code
    return matmul_fp32(quantize_input(a.to(x.dtype), activations), expert.w2)


def moe_ref(x: torch.Tensor, experts: list[Expert], shared: Expert, chosen: torch.Tensor, weights: torch.Tensor, limit: float,
            activations: str = "bf16", shared_activations: str = "bf16") -> torch.Tensor:
    """sum over the chosen experts of weight * expert(x), plus the shared expert, summed in fp32 in the order of the experts' numbers.

    x [S, D], chosen [S, k] int64, weights [S, k] fp32 -> [S, D] in x's dtype. The clamp comes before silu, in the shared expert too.
    """
    total = _expert(x, shared, limit, shared_activations, None)
    for e in torch.unique(chosen).tolist():
        token, slot = torch.where(chosen == e)
        total.index_add_(0, token, _expert(x[token], experts[e], limit, activations, weights[token, slot]))
    return total.to(x.dtype)


moe = operation(moe_ref)
