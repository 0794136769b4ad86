"""A compressor: every token's two projections, and an entry whenever a block closes (model.md section 6)."""

from __future__ import annotations

import torch

from .. import ops
from ..cache import CompressorState
from ..config import ModelConfig
from .binder import Binder
from .linear import LinearFP32
from .step import Step


class Compressor:
    """The entries of attention (`head_dim` wide), or, as `for_index`, the keys of the indexer."""

    def __init__(self, bind: Binder, config: ModelConfig, layer: int, for_index: bool = False):
        self.ratio, self.for_index = config.compress_ratios[layer], for_index
        self.wkv, self.wgate = LinearFP32(bind, "wkv"), LinearFP32(bind, "wgate")
        self.ape, self.norm = bind.fp32("ape"), bind.fp32("norm.weight")
        self.eps, self.numerics = config.rms_norm_eps, bind.numerics

    def __call__(self, x: torch.Tensor, step: Step, state: CompressorState, entries: torch.Tensor) -> None:
        """Takes the step's tokens (x [S, D], attention-normed) into `state` and writes the entries they close into `entries`."""
        pooled = ops.compress(self.wkv(x), self.wgate(x), self.ape, state.kv, state.score, step.position)
        if not len(pooled):
            return
        first = step.position // self.ratio
        blocks = torch.arange(first, first + len(pooled), device=x.device)
        cos, sin = step.rope.table(self.ratio, blocks * self.ratio)  # an entry stands at its block's first token
        quantize = self.numerics.kv_quant
        entry = ops.kv_norm_rope(pooled.to(x.dtype), self.norm, cos, sin, self.eps, quantize and not self.for_index)
        if self.for_index and quantize:
            entry = ops.fp4_round_trip(ops.hadamard(entry))
        entries[first : first + len(pooled)] = entry
