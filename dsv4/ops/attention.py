"""Attention of many heads over one row of keys that are also the values, with a sink in the denominator: window keys and compressed
entries, from the caches to the output that the projections take (model.md sections 4 and 5)."""

from __future__ import annotations

import torch

from .backend import operation
from .norm import query_norm_rope
from .rope import apply_rope

# Scores held at once, in elements: 128 heads x 128 queries x 8,192 keys are 2^27 (512 MB in fp32).
TILE = 1 << 27


def visible_entries(positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """How many entries each query may see: entry s iff s < (t + 1) // r, so the block that ends at t is visible to t."""
    return (positions + 1) // ratio


def attend(q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """softmax(q . k * d^-0.5, with one extra logit `sink` per head that has no value) . keys.

    q [S, H, d]; keys [K, d], both keys and values; mask [S, K] bool, true where the query sees the key (at least one a row);
    sink [H] fp32, not scaled. Returns [S, H, d] in q's dtype. Scores and sums are fp32; the unnormalised weights are rounded to
    q's dtype before they meet the values, as the official kernel does, and the division comes last.
    """
    S, H, d = q.shape
    rows = max(1, TILE // (H * keys.shape[0]))
    if rows < S:
        return torch.cat([attend(q[i : i + rows], keys, mask[i : i + rows], sink) for i in range(0, S, rows)])
    keys = keys.float()
    scores = (q.float() @ keys.T) * d**-0.5
    scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
    top = torch.maximum(scores.amax(-1), sink)  # with the sink in it nothing overflows; the value is the same
    p = torch.exp(scores - top[..., None])
    total = p.sum(-1) + torch.exp(sink - top)
    return ((p.to(q.dtype).float() @ keys) / total[..., None]).to(q.dtype)


def attention_ref(q: torch.Tensor, sink: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, window: torch.Tensor,
                  window_size: int, entries: torch.Tensor | None, ratio: int, selected: torch.Tensor | None, eps: float) -> torch.Tensor:
    """A step's queries, normed per head and rotated, over the keys that each may see; the output is rotated back (K = V: the values
    carry RoPE too) by the query's own position.

    q [S, H * d] fp32, as projected; sink [H] fp32; cos, sin [S, rope/2] fp32; positions [S], consecutive. window [R, d]: the key of
    position p in slot p mod R, R at least window_size + S - 1, with the step's own keys in it. entries [T, d] or None; a query t sees
    the first (t + 1) // ratio of them, or of these only the `selected` [S, k], where -1 is none. Returns [S, H * d] in the keys' dtype.
    """
    S, first, device = len(q), int(positions[0]), q.device
    q = query_norm_rope(q.unflatten(-1, (len(sink), -1)), cos, sin, eps).to(window.dtype)
    t = positions[:, None]
    j = torch.arange(max(0, first - window_size + 1), first + S, device=device)
    keys, mask = window[j % len(window)], (j <= t) & (j > t - window_size)
    if entries is not None:
        count = visible_entries(first + S - 1, ratio)
        if selected is None:
            seen = torch.arange(count, device=device) < visible_entries(t, ratio)
            keys = torch.cat((keys, entries[:count]))
        else:
            chosen = torch.where(selected < 0, count, selected).long()
            seen = torch.zeros(S, count + 1, dtype=torch.bool, device=device).scatter_(1, chosen, True)[:, :count]
            used = seen.any(0).nonzero().squeeze(1)
            keys, seen = torch.cat((keys, entries[used])), seen[:, used]
        mask = torch.cat((mask, seen), 1)
    return apply_rope(attend(q, keys, mask, sink), cos, sin, inverse=True).flatten(1)


attention = operation(attention_ref)
