"""The kernel of dsv4/ops/norm.py."""

from __future__ import annotations

import torch

from ..errors import UserError
from . import MAX_TOKENS
from .keys import HEAD_DIM, KEY_BYTES, KEY_SCALES, ROPE_DIM, Keys
from .launch import IN, INOUT, OUT, WEIGHT, Kernel, expect

MAX_Q_RANK = 2048

_latents = Kernel("latents", {"qa": IN, "kv": IN, "q_norm": WEIGHT, "kv_norm": WEIGHT, "cos": IN, "sin": IN, "positions": IN, "qr": OUT,
                              "values": INOUT, "scales": INOUT, "tokens": int, "rank": int, "ring": int, "eps": float})


def latents(qa: torch.Tensor, kv: torch.Tensor, q_norm: torch.Tensor, kv_norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
            positions: torch.Tensor, window: Keys, eps: float, quantize: bool) -> torch.Tensor:
    """RMS norm of the query's latent, returned; RMS norm and RoPE of the keys, packed into `window`: kv[s] in row positions[s] % R of R.

    qa [S, q_rank], kv [S, 512], q_norm [q_rank], kv_norm [512], cos and sin [S, 32] fp32, positions int64 [S]; S = 1..8 and at most R,
    q_rank a multiple of 4 up to 2,048 -> bf16 [S, q_rank]. Raises UserError for other shapes or dtypes, and without `quantize`.
    """
    if not quantize:
        raise UserError("latents: expected quantize=True, as the kernels' window is FP8, found False: run with --backend torch")
    (S, rank), R = qa.shape if qa.dim() == 2 else (-1, -1), len(window.values)
    half = ROPE_DIM // 2
    expect(1 <= S <= MAX_TOKENS and 4 <= rank <= MAX_Q_RANK and rank % 4 == 0 and kv.shape == (S, HEAD_DIM) and q_norm.shape == (rank,)
           and kv_norm.shape == (HEAD_DIM,) and cos.shape == sin.shape == (S, half) and positions.shape == (S,)
           and positions.dtype == torch.int64 and all(t.dtype == torch.float32 for t in (qa, kv, q_norm, kv_norm, cos, sin)), "latents",
           f"qa [S, q_rank], kv [S, {HEAD_DIM}], q_norm [q_rank], kv_norm [{HEAD_DIM}], cos and sin [S, {half}] in fp32, positions [S] in "
           f"int64, S from 1 to {MAX_TOKENS}, q_rank a multiple of 4 up to {MAX_Q_RANK}",
           qa=qa, kv=kv, q_norm=q_norm, kv_norm=kv_norm, cos=cos, sin=sin, positions=positions)
    expect(S <= R and window.values.shape == (R, KEY_BYTES) and window.scales.shape == (R, KEY_SCALES)
           and window.values.dtype == window.scales.dtype == torch.uint8, "latents",
           f"a window of values [R, {KEY_BYTES}] and scales [R, {KEY_SCALES}] in uint8, R at least S",
           values=window.values, scales=window.scales)
    qr = torch.empty(S, rank, dtype=torch.bfloat16, device=qa.device)
    _latents(qa=qa.contiguous(), kv=kv.contiguous(), q_norm=q_norm.contiguous(), kv_norm=kv_norm.contiguous(), cos=cos.contiguous(),
             sin=sin.contiguous(), positions=positions.contiguous(), qr=qr, values=window.values, scales=window.scales, tokens=S, rank=rank,
             ring=R, eps=eps)
    return qr
