"""The lightning indexer of CSA layers: scores of compressed entries and the exact top-k (model.md section 7)."""

from __future__ import annotations

import torch

from .attention import visible_entries
from .backend import operation
from .quant import fp4_round_trip, hadamard
from .rope import apply_rope

RATIO = 4  # only CSA layers have an indexer
TILE = 1 << 26  # query x head x entry products held at once: 256 MB in fp32


def weighted_relu(q: torch.Tensor, keys: torch.Tensor, head_weights: torch.Tensor) -> torch.Tensor:
    """sum over heads of w * relu(q . k), fp32: q [S, H, d], keys [T, d], head_weights [S, H] fp32 -> [S, T]."""
    S, H, _ = q.shape
    rows = max(1, TILE // (H * max(keys.shape[0], 1)))
    if rows < S:
        return torch.cat([weighted_relu(q[i : i + rows], keys, head_weights[i : i + rows]) for i in range(0, S, rows)])
    products = torch.relu(q.float() @ keys.float().T)
    return (head_weights[:, None, :] @ products).squeeze(1)


def index_scores_ref(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor,
                     positions: torch.Tensor, top_k: int, quantize: bool) -> torch.Tensor:
    """Score of every entry that some query of the step may see: sum over heads of w * relu(q . k) * (d H)^-0.5, fp32 [S, T].

    q [S, H * d] fp32, as projected; it is rounded to the run's dtype, rotated and, if `quantize`, Hadamard-rotated and rounded to FP4, as
    the keys [capacity, d] were. cos, sin [S, rope/2]; head_weights [S, H] fp32. Row s holds numbers for its first (positions[s] + 1) // 4
    entries; nothing is computed when these are at most top_k for every query, as all of them are then among the best.
    """
    count = int(visible_entries(positions[-1], RATIO))
    if count <= top_k:
        return q.new_zeros(len(q), count)
    H = head_weights.shape[1]
    q = apply_rope(q.to(keys.dtype).unflatten(-1, (H, -1)), cos, sin)
    d = q.shape[-1]
    if quantize:
        q = fp4_round_trip(hadamard(q))
    return weighted_relu(q, keys[:count], head_weights * (d**-0.5 * H**-0.5))


def select_entries_ref(scores: torch.Tensor, positions: torch.Tensor, ratio: int, top_k: int) -> torch.Tensor:
    """Which entries each query attends to: int32 [S, top_k], ascending, the top_k best of the first (positions[s] + 1) // ratio; -1 for
    none, behind the others.

    scores [S, T] fp32, positions [S]. Exact; ties go to the lower index. NaN counts as the worst score of the visible ones, so
    it never pushes a number out and never becomes an index outside them.
    """
    S, T = scores.shape
    visible = visible_entries(positions, ratio)[:, None]
    index = torch.arange(T, device=scores.device)
    if T <= top_k:
        chosen = index.expand(S, T)
    else:
        # The visible entries come first, so a stable sort prefers any of them to the hidden ones behind, also at -inf.
        ranked = scores.masked_fill(scores.isnan() | (index >= visible), float("-inf"))
        chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :top_k].sort(-1).values
    out = scores.new_full((S, top_k), -1, dtype=torch.int32)
    out[:, : chosen.shape[1]] = torch.where(chosen < visible, chosen, -1)
    return out


index_scores = operation(index_scores_ref)
select_entries = operation(select_entries_ref)
