"""A checkpoint that is made, not read: random weights of a preset at true size and in true formats, drawn on the device that runs them.

It stands where a Checkpoint does (Model, Binder, make_plan), so that kernels, layers and plans can be run and measured without a download.
Values are well conditioned: matrices keep the size of what passes through them, so streams stay in range at any depth.
"""

from __future__ import annotations

import math
import zlib

import torch

from dsv4.checkpoint import Need, Stored, needs_of_layer, needs_outside_layers
from dsv4.config import ModelConfig
from dsv4.formats import MXFP4_BLOCK, NVFP4_BLOCK, Weight, from_reciprocal

from .make_checkpoint import FORMATS, kind_of

_E2M1_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)  # of uniform codes
FP8_BLOCK = 128


class SyntheticCheckpoint:
    """Weights of `config` in a format of helpers/make_checkpoint.py ("nvidia", "official", "all-nvfp4", "bf16", ..), by native names.

    A tensor's draw depends on the seed, its name and the device's kind alone.
    """

    def __init__(self, config: ModelConfig, format: str, device: torch.device | str, seed: int = 0):
        self.config, self.format, self.device, self.seed = config, FORMATS[format], torch.device(device), seed
        self.needs = {n.name: n for n in needs_outside_layers(config)}
        for layer in range(config.num_hidden_layers):
            self.needs |= {n.name: n for n in needs_of_layer(config, layer)}

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor that is no linear: norms near 1, ape, biases, mHC and router as helpers/make_checkpoint.py draws them."""
        need, generator = self.needs[name], self._generator(name)
        if name.endswith("tid2eid"):
            start = torch.randint(need.shape[0] * 997, (need.shape[0], 1), generator=generator, device=self.device)
            return (start + torch.arange(need.shape[1], device=self.device)) % self.config.n_routed_experts  # distinct in a row
        noise = torch.randn(need.shape, generator=generator, device=self.device)
        if name.endswith("norm.weight"):
            return 1.0 + 0.1 * noise
        if name.endswith("gate.bias"):
            return 0.1 * noise
        if len(need.shape) == 1:
            return 0.5 * noise
        if name.endswith("ape"):
            return 0.3 * noise
        noise = noise if name == "embed.weight" else noise * need.shape[1] ** -0.5
        return noise.bfloat16() if name.endswith(("embed.weight", "gate.weight")) else noise  # as published

    def weight(self, name: str) -> Weight:
        """A linear's weight: random codes, with scales such that its elements have variance 1 / in."""
        (rows, columns), generator = self.needs[name].shape, self._generator(name)
        kind = self._kind(name)
        if kind == "plain":
            value = torch.randn(rows, columns, generator=generator, device=self.device) * columns**-0.5
            return Weight.plain(value.to(self.format.plain))
        if kind == "fp8":
            payload = torch.randn(rows, columns, generator=generator, device=self.device).mul_(64).to(torch.float8_e4m3fn)
            exponent = 127 - 6 - round(0.5 * math.log2(columns))
            scale = torch.full((-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)), exponent, dtype=torch.uint8, device=self.device)
            return Weight("fp8", (rows, columns), payload, scale, block=(FP8_BLOCK, FP8_BLOCK))
        payload = self._bytes(generator, 0, 256, rows, columns // 2)
        size = columns**-0.5 / _E2M1_RMS
        if kind == "mxfp4":
            middle = 127 + round(math.log2(size))
            scale = self._bytes(generator, middle - 1, middle + 2, rows, columns // MXFP4_BLOCK)
            return Weight("mxfp4", (rows, columns), payload, scale, block=(1, MXFP4_BLOCK))
        codes = self._bytes(generator, 0x34, 0x3C, rows, columns // NVFP4_BLOCK)  # e4m3 0.75 to 1.375
        size = torch.tensor(size).item()  # an fp32 value
        weight = Weight("nvfp4", (rows, columns), payload, codes.view(torch.float8_e4m3fn), size, block=(1, NVFP4_BLOCK))
        return weight if kind == "nvfp4" else from_reciprocal(weight, 1.0 / weight.global_scale)

    def nbytes(self, prefix: str = "") -> int:
        """Bytes of everything whose name begins so."""
        return sum(self.bytes_of(n) for name, n in self.needs.items() if name.startswith(prefix))

    def layer_bytes(self, layer: int) -> int:
        return self.nbytes(f"layers.{layer}.")

    def stored(self, need: Need) -> Stored:
        """As Checkpoint.stored."""
        kind = self._kind(need.name).removesuffix("-ct") if need.linear else "plain"
        size = self.bytes_of(need)
        plain = {2: "BF16", 4: "F32", 8: "I64"}[size // math.prod(need.shape)] if kind == "plain" else "F8_E4M3" if kind == "fp8" else "U8"
        return Stored(kind, plain, size)

    def bytes_of(self, need: Need) -> int:
        """As it would lie in a file, scales included."""
        count, name = math.prod(need.shape), need.name
        if not need.linear:
            size = 8 if name.endswith("tid2eid") else 2 if name.endswith(("embed.weight", "gate.weight")) else 4
            return count * size
        rows, columns = need.shape
        kind = self._kind(name)
        if kind == "plain":
            return count * self.format.plain.itemsize
        if kind == "fp8":
            return count + -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
        return count // 2 + count // (MXFP4_BLOCK if kind == "mxfp4" else NVFP4_BLOCK)

    def _kind(self, name):
        return kind_of(self.format, name)

    def _generator(self, name):
        return torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def _bytes(self, generator, low, high, rows, columns):
        return torch.randint(low, high, (rows, columns), generator=generator, device=self.device, dtype=torch.uint8)
