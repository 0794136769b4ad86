"""A compressor: every token's two projections go into its state, and an entry comes out whenever a block closes (model.md section 6)."""

from __future__ import annotations

from .. import ops
from ..cache import CompressorCache
from .binder import Binder


class Compressor:
    """The entries of attention, or, as `for_index`, the keys of the indexer."""

    PROJECTIONS = ("wkv", "wgate")

    def __init__(self, bind: Binder, for_index: bool = False):
        self.ape, self.norm, self.for_index = bind.fp32("ape"), bind.fp32("norm.weight"), for_index

    def pool(self, cache: CompressorCache) -> ops.Pool:
        """Its weights with its memory, as `ops.update_caches` takes them."""
        return ops.Pool(self.ape, self.norm, cache.kv, cache.score, cache.entries, self.for_index)
