"""Attention of many heads over one row of keys that are also the values, with a sink in the denominator (model.md section 4)."""

from __future__ import annotations

import torch

from .backend import operation

# Scores held at once, in elements: 128 heads x 128 queries x 8,192 keys are 2^27 (512 MB in fp32).
TILE = 1 << 27


def attention_ref(q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """softmax(q . k * d^-0.5, with one extra logit `sink` per head that has no value) . keys.

    q [S, H, d]; keys [K, d], both keys and values; mask [S, K] bool, true where the query sees the key (at least one a row);
    sink [H] fp32, not scaled. Returns [S, H, d] in q's dtype. Scores and sums are fp32; the unnormalised weights are rounded to
    q's dtype before they meet the values, as the official kernel does, and the division comes last.
    """
    S, H, d = q.shape
    rows = max(1, TILE // (H * keys.shape[0]))
    if rows < S:
        return torch.cat([attention_ref(q[i : i + rows], keys, mask[i : i + rows], sink) for i in range(0, S, rows)])
    keys = keys.float()
    scores = (q.float() @ keys.T) * d**-0.5
    scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
    top = torch.maximum(scores.amax(-1), sink)  # with the sink in it nothing overflows; the value is the same
    p = torch.exp(scores - top[..., None])
    total = p.sum(-1) + torch.exp(sink - top)
    return ((p.to(q.dtype).float() @ keys) / total[..., None]).to(q.dtype)


attention = operation(attention_ref)
