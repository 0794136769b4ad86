"""A checkpoint that is made, not read: random weights of a preset at true size and in true formats, drawn on the device that runs them.

It stands where a Checkpoint does (Model, Binder, make_plan), so that kernels, layers and plans can be run and measured without a download.
What is drawn, drawing.py says: the same values that make_checkpoint.py writes to files (on a CPU, for one seed).
"""

from __future__ import annotations

import math

import torch

from dsv4.checkpoint import Need, Stored, needs_of_layer, needs_outside_layers
from dsv4.config import ModelConfig
from dsv4.formats import Weight

from .drawing import draw_tensor, generator_of
from .make_checkpoint import FORMATS, draw, kind_of, plain_dtype, stored_as


class SyntheticCheckpoint:
    """Weights of `config` in a format of helpers/make_checkpoint.py ("nvidia", "official", "all-nvfp4", "bf16", ..), by native names.

    A tensor's draw depends on the seed, its name and the device's kind alone.
    """

    def __init__(self, config: ModelConfig, format: str, device: torch.device | str, seed: int = 0):
        self.config, self.format, self.device, self.seed = config, FORMATS[format], torch.device(device), seed
        self.block, self.needs = config.weight_block_size, {n.name: n for n in needs_outside_layers(config)}
        for layer in range(config.num_hidden_layers):
            self.needs |= {n.name: n for n in needs_of_layer(config, layer)}

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor that is no linear, in the dtype it has in a file of this format."""
        shape, dtype = self.needs[name].shape, plain_dtype(self.format, name)
        return draw_tensor(name, shape, self.config.n_routed_experts, dtype, generator_of(self.seed, name, self.device), self.device)

    def weight(self, name: str) -> Weight:
        """A linear's weight: random codes, with scales such that its elements have variance 1 / in."""
        return draw(self.needs[name], self.config, self.format, generator_of(self.seed, name, self.device), self.device)

    def kind(self, name: str) -> str:
        """As Checkpoint.kind."""
        return kind_of(self.format, name).removesuffix("-ct")

    def nbytes(self, prefix: str = "") -> int:
        """Bytes of everything whose name begins so."""
        return sum(self.bytes_of(n) for name, n in self.needs.items() if name.startswith(prefix))

    def layer_bytes(self, layer: int) -> int:
        return self.nbytes(f"layers.{layer}.")

    def stored(self, need: Need) -> Stored:
        """As Checkpoint.stored."""
        kind = self.kind(need.name) if need.linear else "plain"
        size = self.bytes_of(need)
        plain = {2: "BF16", 4: "F32", 8: "I64"}[size // math.prod(need.shape)] if kind == "plain" else "F8_E4M3" if kind == "fp8" else "U8"
        return Stored(kind, plain, size)

    def bytes_of(self, need: Need) -> int:
        """As it would lie in a file: what Checkpoint counts, which is payload, scales and global scale."""
        counted = stored_as(need, self.config, self.format).items()
        return sum(math.prod(shape) * dtype.itemsize for suffix, (dtype, shape) in counted if not suffix.startswith(".input_"))
