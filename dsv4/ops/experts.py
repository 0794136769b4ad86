"""SwiGLU experts with a clamp: the routed ones of a token, weighted, and the shared one (model.md section 8)."""

from __future__ import annotations

from collections.abc import Sequence
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


class Experts(NamedTuple):
    """A layer's experts: the routed ones by number, each of which is there when it is asked for, and the shared one."""

    routed: Sequence[Expert]
    shared: Expert


def pack_experts_ref(routed: Sequence[Expert], shared: Expert) -> Experts:
    """The experts as `moe` takes them; what else they become is the kernels' business. Each of `routed` is taken once, in order: it may be
    a sequence that reads them one by one."""
    return Experts(list(routed), shared)


def _expert(x: torch.Tensor, expert: Expert, limit: float, activations: str, weights: torch.Tensor | None) -> torch.Tensor:
    quantized = quantize_input(x, activations)
    gate = matmul_fp32(quantized, expert.w1).clamp(max=limit)  # from above only
    up = matmul_fp32(quantized, expert.w3).clamp(-limit, limit)
    a = F.silu(gate) * up
    if weights is not None:
        a = a * weights[:, None]  # before w2, as in the official code
    return matmul_fp32(quantize_input(a.to(x.dtype), activations), expert.w2)


def moe_ref(x: torch.Tensor, experts: Experts, chosen: torch.Tensor, weights: torch.Tensor, limit: float, activations: str = "bf16",
            shared_activations: str = "bf16") -> torch.Tensor:
    """sum over the chosen experts of weight * expert(x), plus the shared expert, summed in fp32 in the order of the experts' numbers.

    x [S, D], experts of `pack_experts`, chosen [S, k] int32, weights [S, k] fp32 -> [S, D] in x's dtype. The clamp comes before silu, in
    the shared expert too. A kernel may leave partial sums (`whole` of mhc.py).
    """
    total = _expert(x, experts.shared, limit, shared_activations, None)
    for e in torch.unique(chosen).tolist():
        token, slot = torch.where(chosen == e)
        total.index_add_(0, token, _expert(x[token], experts.routed[e], limit, activations, weights[token, slot]))
    return total.to(x.dtype)


pack_experts = operation(pack_experts_ref)
moe = operation(moe_ref)
