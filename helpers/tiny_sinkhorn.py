"""Sinkhorn's forward and backward in one Triton kernel each, for training on a GPU (in PyTorch they are 200 small kernels).

Owns nothing but these two kernels; `tiny_model.Sinkhorn` says what they compute and is their definition on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 64  # matrices per program


@triton.jit
def _softmax_eps(x, eps):
    e = tl.exp(x - tl.max(x, axis=2)[:, :, None])
    return e / tl.sum(e, axis=2)[:, :, None], e / tl.sum(e, axis=2)[:, :, None] + eps


@triton.jit
def _places(count, BLOCK: tl.constexpr):
    matrix = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = matrix[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    return place, place < count * 16


@triton.jit
def _forward(logits, out, count, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
    place, live = _places(count, BLOCK)
    _, c = _softmax_eps(tl.load(logits + place, mask=live, other=0.0), eps)
    c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
    for _ in range(ITERATIONS - 1):
        c = c / (tl.sum(c, axis=2)[:, :, None] + eps)
        c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
    tl.store(out + place, c, mask=live)


@triton.jit
def _backward(logits, values, upstream, out, count, eps, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
    place, live = _places(count, BLOCK)
    soft, a = _softmax_eps(tl.load(logits + place, mask=live, other=0.0), eps)
    c = tl.load(values + place, mask=live, other=0.25)
    g = tl.load(upstream + place, mask=live, other=0.0)
    for _ in range(ITERATIONS):
        g -= tl.sum(g * c, axis=1)[:, None, :]
        g -= tl.sum(g * c, axis=2)[:, :, None]
    g = g * c / a
    tl.store(out + place, soft * (g - tl.sum(g * soft, axis=2)[:, :, None]), mask=live)


def forward(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Contiguous fp32 logits [..., 4, 4] -> Sinkhorn's values."""
    out, count = torch.empty_like(logits), logits.numel() // 16
    _forward[(triton.cdiv(count, BLOCK),)](logits, out, count, eps, ITERATIONS=iterations, BLOCK=BLOCK)
    return out


def backward(logits: torch.Tensor, values: torch.Tensor, upstream: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """The gradient for the logits, all contiguous fp32 [..., 4, 4]."""
    out, count = torch.empty_like(logits), logits.numel() // 16
    _backward[(triton.cdiv(count, BLOCK),)](logits, values, upstream, out, count, eps, ITERATIONS=iterations, BLOCK=BLOCK)
    return out
