"""A checkpoint that lives in memory, so that layers and models can be tested without files."""

from __future__ import annotations

import functools

import torch

from dsv4.checkpoint import Need, Stored
from dsv4.config import ModelConfig
from dsv4.formats import Weight
from dsv4.layers import Numerics
from dsv4.model import Model
from dsv4.plan import DevicePlan, Plan
from tests.hf import hf_model, native_state

CPU = torch.device("cpu")


class MemoryCheckpoint:
    """The part of dsv4.checkpoint.Checkpoint that layers and plan use: native names -> tensors, every weight a plain one."""

    def __init__(self, config: ModelConfig, state: dict[str, torch.Tensor]):
        self.config, self.state = config, state

    def tensor(self, name: str) -> torch.Tensor:
        return self.state[name]

    def weight(self, name: str) -> Weight:
        return Weight.plain(self.state[name + ".weight"])

    def kind(self, name: str) -> str:
        return "plain"

    def stored(self, need: Need) -> Stored:
        tensor = self.state[need.name + ".weight" * need.linear]
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
        return Stored("plain", dtype, tensor.numel() * tensor.element_size())

    def nbytes(self, prefix: str = "") -> int:
        return sum(t.numel() * t.element_size() for name, t in self.state.items() if name.startswith(prefix))

    def layer_bytes(self, layer: int) -> int:
        return self.nbytes(f"layers.{layer}.")


@functools.cache
def random_checkpoint(name: str, seed: int) -> MemoryCheckpoint:
    """One of tests/hf.py's configs with weights drawn from `seed`. Shared between tests: do not write into it."""
    model, raw = hf_model(name, seed)
    return MemoryCheckpoint(ModelConfig.from_dict(raw), native_state(model))


def model_of(checkpoint: MemoryCheckpoint, context: int, numerics: Numerics | None = None) -> Model:
    """The whole model on the CPU, by default in fp32 without the trained quantisers."""
    layers = tuple(range(checkpoint.config.num_hidden_layers))
    plan = Plan(layers, (DevicePlan(CPU, layers, 0, 0, 0, 0),), context, context, False)
    return Model(checkpoint, plan, numerics or Numerics(kv_quant=False))
