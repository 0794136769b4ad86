"""RMS norms: the plain one, and those of attention's inputs with RoPE behind them. fp32 inside, one rounding at the end."""

from __future__ import annotations

import torch

from .quant import fp8_round_trip
from .rope import apply_rope


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] any float dtype, weight [D] fp32 -> x's dtype (model.md section 2)."""
    v = x.float()
    return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def query_norm_rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float) -> torch.Tensor:
    """Per-head RMS norm without a weight, then RoPE: q [S, H, d], cos and sin [S, rope/2] fp32 -> q's dtype (model.md section 4)."""
    v = q.float()
    v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return apply_rope(v, cos, sin).to(q.dtype)


def kv_norm_rope(kv: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float,
                     quantize: bool) -> torch.Tensor:
    """RMS norm with weight, RoPE and, if `quantize`, the KV cache's FP8 on the non-rotary dims (64 per scale).

    kv [S, d], weight [d] fp32, cos and sin [S, rope/2] fp32 -> kv's dtype. Used for window keys and compressed entries alike
    (model.md sections 4 and 6). The rotary dims stay unquantised.
    """
    v = kv.float()
    v = apply_rope(v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight, cos, sin).to(kv.dtype)
    if quantize:
        plain = v.shape[-1] - 2 * cos.shape[-1]
        v = torch.cat((fp8_round_trip(v[..., :plain], 64), v[..., plain:]), -1)
    return v


def latents(qa: torch.Tensor, kv: torch.Tensor, q_norm: torch.Tensor, kv_norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
            positions: torch.Tensor, window: torch.Tensor, eps: float, quantize: bool) -> torch.Tensor:
    """The query latent, normed, and the step's keys, normed, rotated, quantised and written into the window (model.md section 4).

    qa [S, q_lora_rank] and kv [S, d] fp32, as projected; q_norm [q_lora_rank], kv_norm [d]; cos, sin [S, rope/2]; positions [S],
    consecutive; window [R, d], written in place: the key of position p in slot p mod R. Returns [S, q_lora_rank] in the window's dtype.
    """
    window[positions % len(window)] = kv_norm_rope(kv.to(window.dtype), kv_norm, cos, sin, eps, quantize)
    return rms_norm(qa, q_norm, eps).to(window.dtype)
