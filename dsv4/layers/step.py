"""What all layers share in one call: the positions of its tokens and their rotary angles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..config import ModelConfig


class Rope:
    """The two kinds of angles: plain with rope_theta in SWA layers; compress_rope_theta with YaRN for everything in a layer with
    a compressor (model.md section 4.1). Frequencies are fp32."""

    def __init__(self, config: ModelConfig):
        dim = config.qk_rope_head_dim
        self.ratios = sorted(set(config.compress_ratios))
        self._of_device: dict[tuple[bool, torch.device], torch.Tensor] = {}  # so that a step copies nothing from the host
        self.plain = ops.rope_frequencies(dim, config.rope_theta)
        self.compressed = ops.rope_frequencies(
            dim, config.compress_rope_theta, factor=config.rope_factor, original_length=config.rope_original_length,
            beta_fast=config.rope_beta_fast, beta_slow=config.rope_beta_slow)

    def table(self, ratio: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [len(positions), rope/2], for a layer of this compress ratio."""
        key = bool(ratio), positions.device
        if key not in self._of_device:
            self._of_device[key] = (self.compressed if ratio else self.plain).to(positions.device)
        return ops.rope_table(positions, self._of_device[key])


Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """S tokens of one sequence on one device: `ids` and `positions` [S] int64, consecutive; and by compress ratio (cos, sin), fp32
    [S, rope/2] each, of the tokens and of the first tokens of their blocks, where entries stand.

    Everything comes from tensors of the device, so a captured graph serves every position.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    of_tokens: dict[int, Angles]
    of_blocks: dict[int, Angles]

    @classmethod
    def at(cls, positions: torch.Tensor, ids: torch.Tensor, rope: Rope) -> Step:
        """The step of these tokens at these positions."""
        plain = rope.table(0, positions)
        compressed = rope.table(4, positions) if any(rope.ratios) else plain
        blocks = {r: rope.table(r, positions // r * r) for r in rope.ratios if r}
        return cls(ids, positions, {r: compressed if r else plain for r in rope.ratios}, blocks)

    def angles(self, ratio: int) -> Angles:
        """The tokens' own, in a layer of this compress ratio."""
        return self.of_tokens[ratio]

    def block_angles(self, ratio: int) -> Angles:
        """Those of the first token of each token's block."""
        return self.of_blocks[ratio]
