"""Attention: low-rank queries over one shared row of keys, a window of recent tokens and compressed entries of the past
(model.md sections 4 and 5)."""

from __future__ import annotations

import torch

from .. import ops
from ..cache import LayerCache
from ..config import ModelConfig
from .binder import Binder
from .compressor import Compressor
from .indexer import Indexer
from .linear import Linear, Projections
from .step import Step


class Attention:
    """One layer's attention: SWA (window only), CSA (ratio 4, entries chosen by the indexer) or HCA (ratio 128, all entries)."""

    def __init__(self, bind: Binder, config: ModelConfig, layer: int):
        self.config, self.ratio, self.quantize = config, config.compress_ratios[layer], bind.numerics.kv_quant
        self.compressor = Compressor(bind.below("compressor")) if self.ratio else None
        self.indexer = Indexer(bind.below("indexer"), config) if self.ratio == 4 else None
        below = tuple(f"compressor.{name}" for name in Compressor.PROJECTIONS) if self.compressor else ()
        below += tuple(f"indexer.{name}" for name in Indexer.PROJECTIONS) if self.indexer else ()
        self.of_input = Projections(bind, ("wq_a", "wkv", *below), exact=below, decisive=below)
        self.of_latent = Projections(bind, ("wq_b", "indexer.wq_b") if self.indexer else ("wq_b",), decisive=("indexer.wq_b",))
        self.wo_a, self.wo_b = bind.packing("wo_a", ops.pack_weights, (bind.weight("wo_a"),)), Linear(bind, "wo_b")
        self.q_norm, self.kv_norm, self.sink = bind.fp32("q_norm.weight"), bind.fp32("kv_norm.weight"), bind.fp32("attn_sink")

    def __call__(self, x: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """x [S, D], attention-normed -> [S, D]; extends the cache by the step's tokens."""
        c, eps = self.config, self.config.rms_norm_eps
        cos, sin = step.angles(self.ratio)
        qa, kv, *compressed = self.of_input(x)
        entries, selected, pools, of_entries = None, None, [], (None, None)
        if self.compressor:
            entries, of_entries = cache.main.entries, step.block_angles(self.ratio)
            pools.append(self.compressor.pool(cache.main))
        if self.indexer:
            pools.append(self.indexer.compressor.pool(cache.index))
        pairs = tuple(zip(compressed[0::2], compressed[1::2], strict=False))  # the indexer's head weights are left over
        qr = ops.update_caches(qa, kv, self.q_norm, self.kv_norm, cos, sin, cache.window, pairs, tuple(pools), *of_entries, step.positions,
                               eps, self.quantize)
        q, *index_q = self.of_latent(qr)
        if self.indexer:
            selected = self.indexer(index_q[0], compressed[-1], step, cache)
        o = ops.attention(q, self.sink, cos, sin, step.positions, cache.window, c.sliding_window, entries, self.ratio, selected, eps)
        z = ops.grouped_linear(o.unflatten(1, (c.o_groups, -1)), self.wo_a)
        return self.wo_b(z.flatten(1))
