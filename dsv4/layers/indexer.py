"""The lightning indexer: which compressed entries each query of a CSA layer attends to (model.md section 7)."""

from __future__ import annotations

import torch

from .. import ops
from ..cache import LayerCache
from ..config import ModelConfig
from .binder import Binder
from .compressor import Compressor
from .step import Step


class Indexer:
    """Scores the entries by 64 small heads and keeps the index_topk best of those a query may see."""

    PROJECTIONS = (*(f"compressor.{name}" for name in Compressor.PROJECTIONS), "weights_proj")

    def __init__(self, bind: Binder, config: ModelConfig):
        self.compressor, self.top_k = Compressor(bind.below("compressor"), for_index=True), config.index_topk
        self.quantize = bind.numerics.kv_quant

    def __call__(self, q: torch.Tensor, head_weights: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """int32 [S, index_topk]: the entries each query attends to. q [S, heads * d] and head_weights [S, heads] fp32, as projected."""
        cos, sin = step.angles(cache.ratio)
        scores = ops.index_scores(q, cos, sin, head_weights, cache.index.entries, step.positions, self.top_k, self.quantize)
        return ops.select_entries(scores, step.positions, cache.ratio, self.top_k)
