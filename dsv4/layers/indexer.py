"""The lightning indexer: which compressed entries each query of a CSA layer attends to (model.md section 7)."""

from __future__ import annotations

import torch

from .. import ops
from ..cache import LayerCache
from ..config import ModelConfig
from .binder import Binder
from .compressor import Compressor
from .linear import Linear, LinearFP32
from .step import Step


class Indexer:
    """Scores the entries by 64 small heads and keeps the index_topk best of those a query may see."""

    def __init__(self, bind: Binder, config: ModelConfig, layer: int):
        self.heads, self.head_dim, self.top_k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b, self.weights_proj = Linear(bind, "wq_b"), LinearFP32(bind, "weights_proj")
        bind.refuse_non_finite("wq_b.weight", self.wq_b.weight.dequantize())  # a NaN score chooses nothing, and would pass unseen
        self.compressor = Compressor(bind.below("compressor"), config, layer, for_index=True)
        self.numerics = bind.numerics

    def __call__(self, x: torch.Tensor, qr: torch.Tensor, step: Step, cache: LayerCache, visible: torch.Tensor) -> torch.Tensor:
        """bool [S, T]: the entries each query attends to. x [S, D], qr [S, q_lora_rank] the query latent, visible [S]."""
        self.compressor(x, step, cache.index_state, cache.index_keys)
        count = (step.position + len(x)) // cache.ratio
        if count <= self.top_k:  # every visible entry is among the best: no scores needed
            return torch.arange(count, device=x.device) < visible[:, None]
        q = self.wq_b(qr).unflatten(-1, (self.heads, self.head_dim))
        q = ops.apply_rope(q, *step.cos_sin(cache.ratio))
        if self.numerics.kv_quant:
            q = ops.fp4_round_trip(ops.hadamard(q))
        weights = self.weights_proj(x) * (self.head_dim**-0.5 * self.heads**-0.5)
        return ops.select_entries(ops.index_scores(q, cache.index_keys[:count], weights), visible, self.top_k)
