"""Rotary position embedding on the last dims of a vector, interleaved pairs, cos and sin in fp32 (model.md section 4.1)."""

from __future__ import annotations

import math

import torch


def rope_frequencies(dim: int, theta: float, *, factor: float = 1.0, original_length: int = 65536, beta_fast: float = 32.0,
                     beta_slow: float = 1.0) -> torch.Tensor:
    """The dim / 2 angular frequencies, fp32 [dim/2]: theta^(-2i/dim), under YaRN (factor != 1) the slow ones divided by `factor`.

    DeepSeek's YaRN: pairs that turn more than beta_fast times in original_length positions stay, those under beta_slow turns are
    divided, linear between. It is always on where it applies, and there is no attention factor.
    """
    f = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if factor == 1.0:
        return f
    low, high = (dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (beta_fast, beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return f / factor * ramp + f * (1 - ramp)


def rope_table(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each fp32 [..., dim/2], of positions [...] and frequencies [dim/2], or such as broadcast to the result. The angle is the
    fp32 product t * f, as in the official code: at t near 1M it is off by up to 0.03 rad, and the model was trained with that."""
    angles = positions.to(torch.float32)[..., None] * frequencies.to(positions.device)
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotates the last 2 * cos.shape[-1] dims of x [S, ..., d] by its row's angles (cos, sin [S, pairs] fp32); the rest is copied.

    Pair i is dims (d - 2P + 2i, d - 2P + 2i + 1): (a cos - b sin, a sin + b cos). `inverse` rotates back. fp32 inside, one rounding.
    """
    turned = 2 * cos.shape[-1]
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[1],)
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    a, b = x[..., -turned::2].float(), x[..., 1 - turned :: 2].float()
    y = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-turned], y.to(x.dtype)), -1)
