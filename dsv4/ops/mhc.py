"""mHC, the manifold-constrained hyper-connections: n residual streams, mixed by weights computed from the streams themselves
(model.md section 3). All fp32 inside; the streams are rounded once, at the end."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .backend import operation
from .norm import rms_norm


class Pending(NamedTuple):
    """A block's output o that has not returned to the streams yet, and how it will: post [S, n], comb [S, n, n] fp32.

    o is [S, D] in the streams' dtype or, as the last product left it, partial sums [P, S, D] in fp32 (`whole`).
    """

    o: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def whole(o: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A block's output [S, D]: o itself or, of partial sums [P, S, D] in fp32, their sum in order of p, rounded once to `dtype`."""
    if o.dim() == 2:
        return o
    total = o[0]
    for part in o[1:]:
        total = total + part
    return total.to(dtype)


def _mix(X: torch.Tensor, fn: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(X in fp32, the projection of all streams by fn [rows, n*D], scaled by one RMS over all n*D values)."""
    X = X.float()
    v = X.flatten(-2)
    return X, (v @ fn.T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)


def sinkhorn(C: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Doubly stochastic matrix from logits C [..., n, n]: softmax is the first row step, and the last step is on the columns."""
    C = C.softmax(-1) + eps
    C = C / (C.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        C = C / (C.sum(-1, keepdim=True) + eps)
        C = C / (C.sum(-2, keepdim=True) + eps)
    return C


def collapse(X: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, norm_eps: float, hc_eps: float,
             iterations: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a block needs of the streams: their weighted sum, before its norm, and how its output returns to them.

    X [S, n, D]; fn [(2+n)n, n*D], base [(2+n)n], scale [3], fp32. Returns x [S, D] in X's dtype, post [S, n] and comb [S, n, n] fp32.
    """
    n = X.shape[-2]
    X32, m = _mix(X, fn, norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = sinkhorn((m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), iterations, hc_eps)
    return (pre[:, :, None] * X32).sum(-2).to(X.dtype), post, comb


def mhc_pre_ref(X: torch.Tensor, pending: Pending | None, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, norm: torch.Tensor, *,
                norm_eps: float, hc_eps: float, iterations: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Before a block: the streams X' with the last block's output returned (X itself if none is pending), the block's input, its return.

    X [S, n, D]; fn, base, scale as `collapse`; norm [D] fp32, the weight of the block's RMS norm. Returns X' and x [S, D] in X's dtype,
    post [S, n] and comb [S, n, n] fp32.
    """
    if pending is not None:
        X = mhc_post_ref(pending.o, X, pending.post, pending.comb)
    x, post, comb = collapse(X, fn, base, scale, norm_eps=norm_eps, hc_eps=hc_eps, iterations=iterations)
    return X, rms_norm(x, norm, norm_eps), post, comb


def mhc_post_ref(o: torch.Tensor, X: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after the block: X'_k = post_k o + sum_j comb[j, k] X_j. The sum runs over comb's FIRST index.

    o as in Pending, X [S, n, D] (the streams before mhc_pre), post [S, n], comb [S, n, n] -> [S, n, D] in X's dtype.
    """
    return (post[:, :, None] * whole(o, X.dtype).float()[:, None, :] + comb.transpose(-1, -2) @ X.float()).to(X.dtype)


def hc_head_ref(X: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, norm: torch.Tensor, *, norm_eps: float,
                hc_eps: float) -> torch.Tensor:
    """The final collapse of the streams and the last norm: X [S, n, D], fn [n, n*D], base [n], scale [1], norm [D] -> [S, D]."""
    X32, m = _mix(X, fn, norm_eps)
    weights = torch.sigmoid(m * scale + base) + hc_eps
    return rms_norm((weights[:, :, None] * X32).sum(-2).to(X.dtype), norm, norm_eps)


mhc_pre = operation(mhc_pre_ref)
mhc_post = operation(mhc_post_ref)
hc_head = operation(hc_head_ref)
