"""A layer's memory of the sequence: the ring of window keys, the compressed entries, the indexer's keys, the compressors' open
blocks. Allocated once for the planned context; extended, never rewound; `reset` before a new sequence."""

from __future__ import annotations

import torch

from .config import ModelConfig


class CompressorState:
    """The open block of one compressor, fp32: rows of kv and biased score, [r, d], or [2r, 2d] where blocks overlap (ratio 4)."""

    def __init__(self, ratio: int, head_dim: int, device):
        c = 2 if ratio == 4 else 1
        self.kv = torch.zeros(c * ratio, c * head_dim, device=device)
        self.score = torch.empty_like(self.kv)
        self.reset()

    def reset(self) -> None:
        """A block that never was has weight exactly 0: score -inf, value 0."""
        self.kv.zero_()
        self.score.fill_(float("-inf"))


class LayerCache:
    """The cache of one layer for `context` tokens, keys in `dtype`.

    window [W, d]: the key of position p lies in slot p mod W. entries [context // r, d] and, in CSA layers, index_keys
    [context // r, d_index]: entry s covers tokens up to (s + 1) r - 1, entries past that are not written yet.
    """

    def __init__(self, config: ModelConfig, layer: int, context: int, dtype: torch.dtype, device):
        self.ratio = ratio = config.compress_ratios[layer]
        self.window = torch.zeros(config.sliding_window, config.head_dim, dtype=dtype, device=device)
        self.states: list[CompressorState] = []
        if ratio:
            self.entries = torch.zeros(context // ratio, config.head_dim, dtype=dtype, device=device)
            self.state = CompressorState(ratio, config.head_dim, device)
            self.states.append(self.state)
        if ratio == 4:
            self.index_keys = torch.zeros(context // ratio, config.index_head_dim, dtype=dtype, device=device)
            self.index_state = CompressorState(ratio, config.index_head_dim, device)
            self.states.append(self.index_state)

    def reset(self) -> None:
        """Forgets the sequence. Window and entries need no clearing: position and counts say what of them is valid."""
        for state in self.states:
            state.reset()

    def extend_window(self, keys: torch.Tensor, position: int) -> torch.Tensor:
        """Writes the keys [S, d] of positions position.. and returns those of [max(0, position - W + 1), position + S), in order."""
        W, S = self.window.shape[0], keys.shape[0]
        before = torch.arange(max(0, position - W + 1), position, device=keys.device) % W
        reachable = torch.cat((self.window[before], keys))
        kept = min(S, W)
        self.window[torch.arange(position + S - kept, position + S, device=keys.device) % W] = keys[S - kept :]
        return reachable


class Cache:
    """All layers' caches and the number of tokens they have seen."""

    def __init__(self, layers: dict[int, LayerCache], context: int):
        self.layers, self.context, self.position = layers, context, 0

    def reset(self) -> None:
        """Makes it ready for a new sequence."""
        self.position = 0
        for layer in self.layers.values():
            layer.reset()


def layer_cache_bytes(config: ModelConfig, layer: int, context: int, dtype: torch.dtype) -> int:
    """Bytes that LayerCache allocates, for the plan; counted on torch's meta device, so it cannot drift from the allocation."""
    cache = LayerCache(config, layer, context, dtype, "meta")
    tensors = [cache.window, *(t for s in cache.states for t in (s.kv, s.score))]
    tensors += [getattr(cache, name) for name in ("entries", "index_keys") if hasattr(cache, name)]
    return sum(t.numel() * t.element_size() for t in tensors)
