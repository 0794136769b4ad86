"""The router of the experts: fp32 scores, selection by score plus bias or by the token's id, weights from the scores alone
(model.md section 8)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .backend import operation


def pack_gate_ref(gate: torch.Tensor) -> torch.Tensor:
    """The gate [E, D] fp32 as `router` takes it; what else it becomes is the kernels' business."""
    return gate


def router_ref(x: torch.Tensor, gate: torch.Tensor, top_k: int, route_scale: float, *, bias: torch.Tensor | None = None,
               table: torch.Tensor | None = None, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts [S, k] int32, weights [S, k] fp32) for x [S, D], gate [E, D] fp32.

    Learned layers give `bias` [E] fp32: it decides which experts, not their weights; ties go to the lower index. Hash layers give
    `table` [vocab, k] int64, each token's experts, and the tokens' `ids` [S]: the weights are the gathered scores all the same, not 1/k.
    """
    scores = F.softplus(x.float() @ gate.T).sqrt()
    if table is not None:
        chosen = table[ids]
    else:
        chosen = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, chosen)
    return chosen.int(), weights / weights.sum(-1, keepdim=True) * route_scale


pack_gate = operation(pack_gate_ref)
router = operation(router_ref)
