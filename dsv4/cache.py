"""A layer's memory of the sequence: the ring of window keys, the compressed entries, the indexer's keys, the compressors' open
blocks. Allocated once for the planned context; extended, never rewound; `reset` before a new sequence."""

from __future__ import annotations

import torch

from . import ops
from .config import ModelConfig


class CompressorCache:
    """The memory of one compressor: `entries` (see ops.new_keys), entry s covering tokens up to (s + 1) r - 1; and the open block, fp32
    rows of `kv` and biased `score`, [r, d], or [2r, 2d] where blocks overlap (ratio 4)."""

    def __init__(self, ratio: int, head_dim: int, entries, device):
        c = 2 if ratio == 4 else 1
        self.entries = entries
        self.kv = torch.zeros(c * ratio, c * head_dim, device=device)
        self.score = torch.empty_like(self.kv)
        self.reset()

    def reset(self) -> None:
        """A block that never was has weight exactly 0: score -inf, value 0."""
        self.kv.zero_()
        self.score.fill_(float("-inf"))


class LayerCache:
    """The cache of one layer for `context` tokens in steps of at most `chunk`, keys in `dtype`.

    window: see ops.new_window. `main` (layers with a compressor) and `index` (CSA): context // r entries each.
    """

    def __init__(self, config: ModelConfig, layer: int, context: int, chunk: int, dtype: torch.dtype, device):
        self.ratio = ratio = config.compress_ratios[layer]
        self.window = ops.new_window(config.sliding_window, min(chunk, context), config.head_dim, dtype, device)
        self.main = self.index = None
        if ratio:
            entries = ops.new_keys(context // ratio, config.head_dim, dtype, device)
            self.main = CompressorCache(ratio, config.head_dim, entries, device)
        if ratio == 4:
            keys = ops.new_index_keys(context // ratio, config.index_head_dim, dtype, device)
            self.index = CompressorCache(ratio, config.index_head_dim, keys, device)

    def reset(self) -> None:
        """Forgets the sequence. Window and entries need no clearing: positions say what of them is valid."""
        for part in (self.main, self.index):
            if part:
                part.reset()


class Cache:
    """All layers' caches, for `context` tokens in steps of at most `chunk`, and the number of tokens they have seen."""

    def __init__(self, layers: dict[int, LayerCache], context: int, chunk: int):
        self.layers, self.context, self.chunk, self.position = layers, context, chunk, 0

    def reset(self) -> None:
        """Makes it ready for a new sequence."""
        self.position = 0
        for layer in self.layers.values():
            layer.reset()


def layer_cache_bytes(config: ModelConfig, layer: int, context: int, chunk: int, dtype: torch.dtype) -> int:
    """Bytes that LayerCache allocates, for the plan; counted on torch's meta device, so it cannot drift from the allocation."""
    cache = LayerCache(config, layer, context, chunk, dtype, "meta")
    parts = [cache.window]
    for part in (cache.main, cache.index):
        parts += [part.entries, part.kv, part.score] if part else []
    tensors = [t for part in parts for t in ((part,) if isinstance(part, torch.Tensor) else part)]  # packed keys are several tensors
    return sum(t.numel() * t.element_size() for t in tensors)
