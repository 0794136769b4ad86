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
from .linear import Linear
from .step import Step


def visible_entries(positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """How many entries each query may see: entry s iff s < (t + 1) // r, so the block that ends at t is visible to t."""
    return (positions + 1) // ratio


class Attention:
    """One layer's attention: SWA (window only), CSA (ratio 4, entries chosen by the indexer) or HCA (ratio 128, all entries)."""

    def __init__(self, bind: Binder, config: ModelConfig, layer: int):
        self.config, self.ratio, self.numerics = config, config.compress_ratios[layer], bind.numerics
        self.wq_a, self.wq_b, self.wkv, self.wo_b = (Linear(bind, name) for name in ("wq_a", "wq_b", "wkv", "wo_b"))
        self.wo_a = bind.weight("wo_a")
        self.q_norm, self.kv_norm, self.sink = bind.fp32("q_norm.weight"), bind.fp32("kv_norm.weight"), bind.fp32("attn_sink")
        if self.ratio:
            self.compressor = Compressor(bind.below("compressor"), config, layer)
        self.indexer = Indexer(bind.below("indexer"), config, layer) if self.ratio == 4 else None

    def __call__(self, x: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """x [S, D], attention-normed -> [S, D]; extends the cache by the step's tokens."""
        c, eps = self.config, self.config.rms_norm_eps
        cos, sin = step.cos_sin(self.ratio)
        qr = ops.rms_norm(self.wq_a(x), self.q_norm, eps)
        q = ops.query_norm_rope(self.wq_b(qr).unflatten(-1, (c.num_attention_heads, c.head_dim)), cos, sin, eps)
        k = ops.kv_norm_rope(self.wkv(x), self.kv_norm, cos, sin, eps, self.numerics.kv_quant)
        keys, mask = self._window(k, step, cache)
        if self.ratio:
            entries, seen = self._compressed(x, qr, step, cache)
            keys, mask = torch.cat((keys, entries)), torch.cat((mask, seen), 1)
        o = ops.apply_rope(ops.attention(q, keys, mask, self.sink), cos, sin, inverse=True)  # K = V: the values carry RoPE too
        z = ops.grouped_linear(o.flatten(1).unflatten(-1, (c.o_groups, -1)), self.wo_a)
        return self.wo_b(z.flatten(1))

    def _window(self, k, step, cache):
        """The reachable window keys and who sees them: query t sees j with t - W < j <= t, itself included."""
        keys = cache.extend_window(k, step.position)
        ends = step.position + len(k)
        j = torch.arange(ends - len(keys), ends, device=k.device)
        t = step.positions[:, None]
        return keys, (j <= t) & (j > t - self.config.sliding_window)

    def _compressed(self, x, qr, step, cache):
        """The entries that some query of the step attends to, and who does."""
        self.compressor(x, step, cache.state, cache.entries)
        visible = visible_entries(step.positions, self.ratio)
        count = (step.position + len(x)) // self.ratio
        if self.indexer is None:
            return cache.entries[:count], torch.arange(count, device=x.device) < visible[:, None]
        seen = self.indexer(x, qr, step, cache, visible)
        if count <= self.indexer.top_k:
            return cache.entries[:count], seen
        used = seen.any(0).nonzero().squeeze(1)
        return cache.entries[used], seen[:, used]
