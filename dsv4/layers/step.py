"""What all layers share in one call: the positions of its tokens and their rotary angles."""

from __future__ import annotations

import torch

from .. import ops
from ..config import ModelConfig


class Rope:
    """The two kinds of angles: plain with rope_theta in SWA layers; compress_rope_theta with YaRN for everything in a layer with
    a compressor (model.md section 4.1). Frequencies are fp32."""

    def __init__(self, config: ModelConfig):
        dim = config.qk_rope_head_dim
        self.plain = ops.rope_frequencies(dim, config.rope_theta)
        self.compressed = ops.rope_frequencies(
            dim, config.compress_rope_theta, factor=config.rope_factor, original_length=config.rope_original_length,
            beta_fast=config.rope_beta_fast, beta_slow=config.rope_beta_slow)

    def table(self, ratio: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [len(positions), rope/2], for a layer of this compress ratio."""
        return ops.rope_table(positions, self.compressed if ratio else self.plain)


class Step:
    """S tokens at positions position .. position + S - 1 of one sequence, on one device."""

    def __init__(self, config: ModelConfig, rope: Rope, ids: torch.Tensor, position: int):
        self.ids, self.position, self.rope = ids, position, rope
        self.positions = torch.arange(position, position + len(ids), device=ids.device)
        self.angles = {kind: rope.table(kind, self.positions) for kind in {min(r, 1) for r in config.compress_ratios}}

    def cos_sin(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens' own angles in a layer of this compress ratio."""
        return self.angles[min(ratio, 1)]

    def to(self, device: torch.device) -> Step:
        """The same step on another device."""
        if self.ids.device == device:
            return self
        moved = object.__new__(Step)
        moved.position, moved.rope = self.position, self.rope
        moved.ids, moved.positions = self.ids.to(device), self.positions.to(device)
        moved.angles = {kind: (cos.to(device), sin.to(device)) for kind, (cos, sin) in self.angles.items()}
        return moved
