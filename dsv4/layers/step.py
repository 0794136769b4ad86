"""What all layers share in one call: the positions of its tokens and their rotary angles."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Step:
    """S tokens at positions position .. position + S - 1 of one sequence, on one device: `ids` and `positions` [S] int64, and the tokens'
    own (cos, sin), fp32 [S, rope/2] each, for layers without and with a compressor."""

    ids: torch.Tensor
    position: int
    rope: Rope
    positions: torch.Tensor
    plain: tuple[torch.Tensor, torch.Tensor]
    compressed: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def at(cls, position: int, ids: torch.Tensor, rope: Rope) -> Step:
        """The step of these tokens, which stand from `position` on."""
        positions = torch.arange(position, position + len(ids), device=ids.device)
        return cls(ids, position, rope, positions, rope.table(0, positions), rope.table(4, positions))

    def cos_sin(self, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens' own angles in a layer of this compress ratio."""
        return self.compressed if ratio else self.plain

    def to(self, device: torch.device) -> Step:
        """The same step on another device."""
        if self.ids.device == device:
            return self
        plain, compressed = (tuple(t.to(device) for t in table) for table in (self.plain, self.compressed))
        return replace(self, ids=self.ids.to(device), positions=self.positions.to(device), plain=plain, compressed=compressed)
