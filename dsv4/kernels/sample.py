"""The kernel of dsv4/ops/sample.py."""

from __future__ import annotations

import torch

from .launch import IN, INOUT, OUT, Kernel, expect

_MAX_VOCAB = 150_000  # a block of the cluster keeps an eighth of the ids in shared memory, 12 bytes each

_sample = Kernel("sample", {"logits": IN, "seen": INOUT, "uniforms": IN, "positions": IN, "token": OUT, "vocab": int, "count": int,
                            "tokens": int, "temperature": float, "top_k": int, "top_p": int, "penalty": float})


def _settings(temperature: float, top_p: float, repetition_penalty: float) -> tuple[float, int, float]:
    """As dsv4/ops/sample.py's `settings`, which a test holds it to: values within fp32, top_p in steps of 2^-30, 0 for off."""
    if temperature:
        temperature = min(max(temperature, 1e-30), 3e38)
    return temperature, 0 if top_p >= 1 else max(1, round(top_p * (1 << 30))), min(max(repetition_penalty, 1e-30), 1e30)


def sample(logits: torch.Tensor, seen: torch.Tensor, uniforms: torch.Tensor, positions: torch.Tensor, *, temperature: float, top_k: int,
           top_p: float, repetition_penalty: float) -> torch.Tensor:
    """logits [V] fp32, seen [V] uint8 (marked in place), uniforms [N] fp32, positions [S] int64 -> the token [1] int64, or -1 if a logit is
    not finite. Bit for bit what the definition draws. Raises UserError for other shapes or dtypes, and for V above 150,000."""
    expect(logits.dim() == uniforms.dim() == positions.dim() == 1 and 1 <= len(logits) <= _MAX_VOCAB and seen.shape == logits.shape
           and len(uniforms) > 0 and len(positions) > 0 and logits.dtype == uniforms.dtype == torch.float32 and seen.dtype == torch.uint8
           and positions.dtype == torch.int64, "sample",
           f"logits [V] and uniforms [N] in fp32, seen [V] in uint8 and positions [S] in int64, V from 1 to {_MAX_VOCAB}",
           logits=logits, seen=seen, uniforms=uniforms, positions=positions)
    temperature, top_p_steps, penalty = _settings(temperature, top_p, repetition_penalty)
    token = torch.empty(1, dtype=torch.int64, device=logits.device)
    _sample(logits=logits, seen=seen, uniforms=uniforms, positions=positions, token=token, vocab=len(logits), count=len(uniforms),
            tokens=len(positions), temperature=temperature, top_k=min(top_k, len(logits)), top_p=top_p_steps, penalty=penalty)
    return token
