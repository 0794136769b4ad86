"""The kernels of dsv4/ops/mhc.py."""

from __future__ import annotations

import torch

from . import PROMPT_TOKENS
from .launch import DTYPES, IN, OUT, WEIGHT, Kernel, expect

STREAMS = 4  # hc_mult of every published checkpoint
_MAX_TOKENS = 65535  # mhc_post: a token is a block row of the grid
_MAX_PARTS = 4  # partial sums of a block's output
_MAX_COLUMNS, _SLICES, _SUMS = 8192, 128, 11  # mhc_pre and hc_head (cuda/mhc.cuh)

_mhc_pre = Kernel("mhc_pre", {"o": IN, "X": IN, "post": IN, "comb": IN, "fn": WEIGHT, "base": WEIGHT, "scale": WEIGHT, "norm": WEIGHT,
                              "streams": OUT, "partials": OUT, "x": OUT, "next_post": OUT, "next_comb": OUT, "parts": int, "tokens": int,
                              "columns": int, "slice": int, "iterations": int, "norm_eps": float, "hc_eps": float})
_hc_head = Kernel("hc_head", {"X": IN, "fn": WEIGHT, "base": WEIGHT, "scale": WEIGHT, "norm": WEIGHT, "partials": OUT, "out": OUT,
                              "tokens": int, "columns": int, "slice": int, "norm_eps": float, "hc_eps": float})
_mhc_post = Kernel("mhc_post", {"o": IN, "X": IN, "post": IN, "comb": IN, "out": OUT, "parts": int, "tokens": int, "columns": int,
                                "dtype": int})


def _parts(o: torch.Tensor, S: int, D: int, dtype: torch.dtype) -> int:
    """What the kernels take as `parts`: 0 for o [S, D] in `dtype`, P for partial sums [P, S, D] in fp32, -1 for anything else."""
    if o.shape == (S, D) and o.dtype == dtype:
        return 0
    return o.shape[0] if o.dim() == 3 and 1 <= o.shape[0] <= _MAX_PARTS and o.shape[1:] == (S, D) and o.dtype == torch.float32 else -1


def mhc_post(o: torch.Tensor, X: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X [S, 4, D] fp32 or bf16; o [S, D] in its dtype, or 1 to 4 partial sums [P, S, D] in fp32; post [S, 4], comb [S, 4, 4] fp32
    -> [S, 4, D] in X's dtype.

    Raises UserError for other shapes or dtypes.
    """
    S, D = (X.shape[0], X.shape[2]) if X.dim() == 3 else (-1, -1)
    parts = _parts(o, S, D, X.dtype)
    expect(parts >= 0 and X.shape == (S, STREAMS, D) and post.shape == (S, STREAMS) and comb.shape == (S, STREAMS, STREAMS)
           and S <= _MAX_TOKENS and X.dtype in DTYPES and post.dtype == comb.dtype == torch.float32, "mhc_post",
           f"o [S, D] and X [S, 4, D] in one dtype, fp32 or bf16, or o [P, S, D] in fp32, P up to {_MAX_PARTS}, post [S, 4] and comb "
           f"[S, 4, 4] in fp32, S up to {_MAX_TOKENS}", o=o, X=X, post=post, comb=comb)
    out = torch.empty_like(X, memory_format=torch.contiguous_format)
    if out.numel():
        _mhc_post(o=o.contiguous(), X=X.contiguous(), post=post.contiguous(), comb=comb.contiguous(), out=out, parts=parts, tokens=S,
                  columns=D, dtype=DTYPES[X.dtype])
    return out


def _site(name: str, X: torch.Tensor, rows: int, scales: int, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor,
          norm: torch.Tensor) -> tuple[int, int, int, torch.Tensor]:
    """(S, D, columns a slice, the partial sums' workspace) of a site, whose tensors must have the shapes of its `rows` and `scales`."""
    S, D = (X.shape[0], X.shape[2]) if X.dim() == 3 else (0, 0)
    expect(1 <= S <= PROMPT_TOKENS and 8 <= D <= _MAX_COLUMNS and D % 8 == 0 and X.shape == (S, STREAMS, D) and X.dtype == torch.bfloat16
           and fn.shape == (rows, STREAMS * D) and base.shape == (rows,) and scale.shape == (scales,) and norm.shape == (D,)
           and all(t.dtype == torch.float32 for t in (fn, base, scale, norm)), name,
           f"X [S, 4, D] in bf16, S up to {PROMPT_TOKENS}, D a multiple of 8 up to {_MAX_COLUMNS}, and fn [{rows}, 4 D], base [{rows}], "
           f"scale [{scales}] and norm [D] in fp32", X=X, fn=fn, base=base, scale=scale, norm=norm)
    return S, D, -(-D // (8 * _SLICES)) * 8, torch.empty(S, rows + _SUMS, _SLICES, device=X.device)


def mhc_pre(X: torch.Tensor, pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None, fn: torch.Tensor, base: torch.Tensor,
            scale: torch.Tensor, norm: torch.Tensor, *, norm_eps: float, hc_eps: float,
            iterations: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """X [S, 4, D] bf16; pending (o [S, D] bf16 or 1 to 4 partial sums [P, S, D] fp32, post [S, 4] and comb [S, 4, 4] fp32) or None;
    fn [24, 4 D], base [24], scale [3] and norm [D] fp32.

    Returns X' [S, 4, D] (X itself if nothing is pending) and x [S, D] bf16, post [S, 4] and comb [S, 4, 4] fp32. S is 1 to 1,024, D a
    multiple of 8 up to 8,192. Raises UserError for other shapes or dtypes.
    """
    rows = (2 + STREAMS) * STREAMS
    S, D, columns, partials = _site("mhc_pre", X, rows, 3, fn, base, scale, norm)
    expect(iterations >= 1, "mhc_pre", f"at least one iteration instead of {iterations}", X=X)
    X, o, post, comb, streams, parts = X.contiguous(), None, None, None, None, 0
    if pending is not None:
        o, post, comb = (t.contiguous() for t in pending)
        parts = _parts(o, S, D, X.dtype)
        expect(parts >= 0 and post.shape == (S, STREAMS) and comb.shape == (S, STREAMS, STREAMS)
               and post.dtype == comb.dtype == torch.float32, "mhc_pre",
               f"pending o [S, D] in bf16 or [P, S, D] in fp32, P up to {_MAX_PARTS}, post [S, 4] and comb [S, 4, 4] in fp32 for "
               "X [S, 4, D]", X=X, o=o, post=post, comb=comb)
        streams = torch.empty_like(X)
    x, next_post, next_comb = X.new_empty(S, D), partials.new_empty(S, STREAMS), partials.new_empty(S, STREAMS, STREAMS)
    _mhc_pre(o=o, X=X, post=post, comb=comb, fn=fn.contiguous(), base=base.contiguous(), scale=scale.contiguous(), norm=norm.contiguous(),
             streams=streams, partials=partials, x=x, next_post=next_post, next_comb=next_comb, parts=parts, tokens=S, columns=D,
             slice=columns, iterations=iterations, norm_eps=norm_eps, hc_eps=hc_eps)
    return X if streams is None else streams, x, next_post, next_comb


def hc_head(X: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, norm: torch.Tensor, *, norm_eps: float,
            hc_eps: float) -> torch.Tensor:
    """X [S, 4, D] bf16; fn [4, 4 D], base [4], scale [1], norm [D] fp32 -> [S, D] bf16, collapsed and normed.

    S is 1 to 1,024, D a multiple of 8 up to 8,192. Raises UserError for other shapes or dtypes.
    """
    S, D, columns, partials = _site("hc_head", X, STREAMS, 1, fn, base, scale, norm)
    out = X.new_empty(S, D)
    _hc_head(X=X.contiguous(), fn=fn.contiguous(), base=base.contiguous(), scale=scale.contiguous(), norm=norm.contiguous(),
             partials=partials, out=out, tokens=S, columns=D, slice=columns, norm_eps=norm_eps, hc_eps=hc_eps)
    return out
