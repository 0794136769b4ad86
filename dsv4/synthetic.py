"""A checkpoint that is made, not read: random weights of a preset at true size and in true formats, drawn on the devices that run them.

It stands where a Checkpoint does (Model, Binder, Planner), so that a whole model, kernels and plans can be run and measured without a
download. What is drawn, drawing.py says: the same values that helpers/make_checkpoint.py writes to files (on a CPU, for one seed).
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections import Counter

import torch

from .cache import Cache
from .checkpoint import Need, Stored, family, needs_of_layer, needs_outside_layers
from .config import ModelConfig
from .drawing import draw_linear, draw_tensor, generator_of
from .exports import FORMATS, Format, kind_of, plain_dtype, to_tensors
from .formats import Weight


def draw(need: Need, config: ModelConfig, fmt: Format, generator: torch.Generator | None, device: torch.device | str = "cpu") -> Weight:
    """A linear of random codes as `fmt` stores it (drawing.py)."""
    return draw_linear(need.name, need.shape, kind_of(fmt, need.name), plain_dtype(fmt, need.name), generator, device,
                       config.weight_block_size, fmt.fp8_scale[1] != "E8M0")


def stored_as(need: Need, config: ModelConfig, fmt: Format) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{what follows the name in a key: (dtype, shape)} of a linear's or tensor's parts in a file."""
    plain = plain_dtype(fmt, need.name)
    if not need.linear:
        return {"": (plain, need.shape)}
    return _stored_as(need.shape, kind_of(fmt, need.name), plain, fmt, config.weight_block_size)


@functools.cache
def _stored_as(shape, kind, plain, fmt, block):
    weight = draw_linear("", shape, kind, plain, None, "meta", block, fmt.fp8_scale[1] != "E8M0")
    return {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in to_tensors("", weight, fmt).items()}


class SyntheticCheckpoint:
    """Weights of `config` in a format of exports.py ("nvidia", "official", "all-nvfp4", "bf16", ..), by native names.

    A tensor's draw depends on the seed, its name and the device's kind alone, so that a model is the same however it is split over GPUs.
    `folder` is what reports call it by.
    """

    def __init__(self, config: ModelConfig, format: str, device: torch.device | str, seed: int = 0):
        self.config, self.format, self.device, self.seed = config, FORMATS[format], torch.device(device), seed
        self.folder = f"synthetic {family(config)}, {format}"
        self.block, self.needs = config.weight_block_size, {n.name: n for n in needs_outside_layers(config)}
        self._stored: dict[tuple, Stored] = {}  # of Pro's 70,000 needs few differ, and a plan asks for each several times
        for layer in range(config.num_hidden_layers):
            self.needs |= {n.name: n for n in needs_of_layer(config, layer)}

    def on(self, device: torch.device) -> SyntheticCheckpoint:
        """The same weights, drawn on another device."""
        other = copy.copy(self)
        other.device = device
        return other

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor that is no linear, in the dtype it has in a file of this format."""
        shape, dtype = self.needs[name].shape, plain_dtype(self.format, name)
        return draw_tensor(name, shape, self.config.n_routed_experts, dtype, generator_of(self.seed, name, self.device), self.device)

    def weight(self, name: str) -> Weight:
        """A linear's weight: random codes, with scales such that its elements have variance 1 / in."""
        return draw(self.needs[name], self.config, self.format, generator_of(self.seed, name, self.device), self.device)

    def fp8_scales(self, name: str) -> None:
        """As Checkpoint.fp8_scales: what is drawn are powers of two, in any dtype."""

    def kind(self, name: str) -> str:
        """As Checkpoint.kind."""
        return kind_of(self.format, name).removesuffix("-ct")

    def nbytes(self, prefix: str = "") -> int:
        """Bytes of everything whose name begins so."""
        return sum(self.bytes_of(n) for name, n in self.needs.items() if name.startswith(prefix))

    def layer_bytes(self, layer: int) -> int:
        """As Checkpoint.layer_bytes."""
        return self._layer_sizes[layer]

    @functools.cached_property
    def _layer_sizes(self):
        sizes = Counter()  # all layers in one pass over the names: Pro has 70,000
        for name, need in self.needs.items():
            if match := re.match(r"layers\.(\d+)\.", name):
                sizes[int(match[1])] += self.bytes_of(need)
        return sizes

    def stored(self, need: Need) -> Stored:
        """As Checkpoint.stored."""
        kind = kind_of(self.format, need.name) if need.linear else "plain"
        key = kind, plain_dtype(self.format, need.name) if kind == "plain" else None, need.shape
        if key not in self._stored:
            counted = stored_as(need, self.config, self.format).items()
            size = sum(math.prod(shape) * dtype.itemsize for suffix, (dtype, shape) in counted if not suffix.startswith(".input_"))
            name = "F8_E4M3" if kind == "fp8" else "U8"
            if kind == "plain":
                name = {2: "BF16", 4: "F32", 8: "I64"}[size // math.prod(need.shape)]
            self._stored[key] = Stored(kind.removesuffix("-ct"), name, size)
        return self._stored[key]

    def bytes_of(self, need: Need) -> int:
        """As it would lie in a file: what Checkpoint counts, which is payload, scales and global scale."""
        return self.stored(need).nbytes


def fill(cache: Cache, seed: int = 0) -> None:
    """Random keys everywhere in a cache, as if tokens had been read: what is attended and selected must not be a row of zeros. The same
    keys however the layers are split over GPUs."""
    for number, layer in cache.layers.items():
        parts = {"window": layer.window} | {name: part.entries for name, part in (("main", layer.main), ("index", layer.index)) if part}
        for name, rows in parts.items():
            packed = not isinstance(rows, torch.Tensor)
            values = rows[0] if packed else rows
            generator = generator_of(seed, f"cache {number} {name}", values.device)
            if not packed:
                rows.normal_(generator=generator)
                continue
            values.random_(0, 0x58, generator=generator)  # e4m3 up to 8, the upper byte of a bf16 below 2^49: finite in both
            if len(values) and len(values[0]) > 512:
                rotary = torch.randn(len(values), 64, device=values.device, dtype=torch.bfloat16, generator=generator)
                values[:, 448:] = rotary.view(torch.uint8)
            rows[1].random_(125, 129, generator=generator)
