"""The lightning indexer of CSA layers: scores of compressed entries and the exact top-k (model.md section 7)."""

from __future__ import annotations

import torch

from .backend import operation

TILE = 1 << 26  # query x head x entry products held at once: 256 MB in fp32


def index_scores_ref(q: torch.Tensor, keys: torch.Tensor, head_weights: torch.Tensor) -> torch.Tensor:
    """sum over heads of w * relu(q . k), fp32: q [S, H, d], keys [T, d], head_weights [S, H] fp32 (scales folded in) -> [S, T]."""
    S, H, _ = q.shape
    rows = max(1, TILE // (H * max(keys.shape[0], 1)))
    if rows < S:
        return torch.cat([index_scores_ref(q[i : i + rows], keys, head_weights[i : i + rows]) for i in range(0, S, rows)])
    products = torch.relu(q.float() @ keys.float().T)
    return (head_weights[:, None, :] @ products).squeeze(1)


def select_entries_ref(scores: torch.Tensor, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """Which entries each query attends to: bool [S, T], true for the top_k best of its first visible[s] entries.

    scores [S, T] fp32, visible [S] int64. Exact; ties go to the lower index. NaN counts as the worst score of the visible ones, so
    it never pushes a number out and never becomes an index outside them.
    """
    T = scores.shape[1]
    seen = torch.arange(T, device=scores.device) < visible[:, None]
    if T <= top_k:
        return seen
    # The visible entries come first, so a stable sort prefers any of them to the hidden ones behind, also at -inf.
    ranked = scores.masked_fill(scores.isnan() | ~seen, float("-inf"))
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :top_k]
    return torch.zeros_like(seen).scatter_(1, order, True) & seen


index_scores = operation(index_scores_ref)
select_entries = operation(select_entries_ref)
