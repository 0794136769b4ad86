"""What all layers share in one call: the positions of its tokens and their rotary angles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..config import ModelConfig

Angles = tuple[torch.Tensor, torch.Tensor]


class Rope:
    """The two kinds of angles: plain with rope_theta in SWA layers; compress_rope_theta with YaRN for everything in a layer with
    a compressor (model.md section 4.1). Frequencies are fp32."""

    def __init__(self, config: ModelConfig):
        dim = config.qk_rope_head_dim
        plain = ops.rope_frequencies(dim, config.rope_theta)
        compressed = ops.rope_frequencies(
            dim, config.compress_rope_theta, factor=config.rope_factor, original_length=config.rope_original_length,
            beta_fast=config.rope_beta_fast, beta_slow=config.rope_beta_slow)
        self.ratios = sorted(set(config.compress_ratios))
        self.kinds = list(dict.fromkeys([(bool(r), 1) for r in self.ratios] + [(True, r) for r in self.ratios if r]))
        self._frequencies = torch.stack([compressed if with_compressor else plain for with_compressor, _ in self.kinds])[:, None]
        self._blocks = torch.tensor([block for _, block in self.kinds])[:, None]
        self._of_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}  # so that a step copies nothing from the host

    def angles(self, positions: torch.Tensor) -> dict[tuple[bool, int], Angles]:
        """cos and sin, fp32 [len(positions), rope/2] each, by (whether the layer has a compressor, tokens of a block): of the first token
        of each position's block. All of them together, as in a decode step each launch costs a microsecond or two."""
        if positions.device not in self._of_device:
            self._of_device[positions.device] = self._frequencies.to(positions.device), self._blocks.to(positions.device)
        frequencies, blocks = self._of_device[positions.device]
        cos, sin = ops.rope_table(positions // blocks * blocks, frequencies)
        return {kind: (cos[i], sin[i]) for i, kind in enumerate(self.kinds)}


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
        angles = rope.angles(positions)
        return cls(ids, positions, {r: angles[bool(r), 1] for r in rope.ratios}, {r: angles[True, r] for r in rope.ratios if r})

    def angles(self, ratio: int) -> Angles:
        """The tokens' own, in a layer of this compress ratio."""
        return self.of_tokens[ratio]

    def block_angles(self, ratio: int) -> Angles:
        """Those of the first token of each token's block."""
        return self.of_blocks[ratio]
