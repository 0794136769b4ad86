"""The kernels of dsv4/ops/mhc.py."""

from __future__ import annotations

import torch

from .launch import DTYPES, IN, OUT, Kernel, expect

STREAMS = 4  # hc_mult of every published checkpoint
_MAX_TOKENS = 65535  # a token is a block row of the grid

_mhc_post = Kernel("mhc_post", {"o": IN, "X": IN, "post": IN, "comb": IN, "out": OUT, "tokens": int, "columns": int, "dtype": int})


def mhc_post(o: torch.Tensor, X: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """o [S, D], X [S, 4, D], both fp32 or both bf16; post [S, 4], comb [S, 4, 4] fp32 -> [S, 4, D] in X's dtype.

    Raises UserError for other shapes or dtypes.
    """
    S, D = o.shape if o.dim() == 2 else (-1, -1)
    expect(X.shape == (S, STREAMS, D) and post.shape == (S, STREAMS) and comb.shape == (S, STREAMS, STREAMS) and S <= _MAX_TOKENS
           and o.dtype == X.dtype and X.dtype in DTYPES and post.dtype == comb.dtype == torch.float32, "mhc_post",
           f"o [S, D] and X [S, 4, D] in one dtype, fp32 or bf16, post [S, 4] and comb [S, 4, 4] in fp32, S up to {_MAX_TOKENS}",
           o=o, X=X, post=post, comb=comb)
    out = torch.empty_like(X, memory_format=torch.contiguous_format)
    if out.numel():
        _mhc_post(o=o.contiguous(), X=X.contiguous(), post=post.contiguous(), comb=comb.contiguous(), out=out, tokens=S, columns=D,
                  dtype=DTYPES[X.dtype])
    return out
