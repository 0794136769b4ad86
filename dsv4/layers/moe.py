"""The mixture of experts: router, routed experts, shared expert (model.md section 8). Every layer of the model has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .. import ops
from ..config import ModelConfig
from ..errors import CheckpointError
from .binder import Binder
from .step import Step


class MoE:
    """Hash layers take a token's experts from a table by its id, the others by score; both weigh them by score. Experts that are streamed
    (Binder.streamed) are brought once they are chosen."""

    def __init__(self, bind: Binder, config: ModelConfig, layer: int):
        self.config = config
        self.gate = ops.pack_gate(bind.fp32("gate.weight"))
        hashed = config.is_hash_layer(layer)
        self.experts_of_token = bind.stored("gate.tid2eid").long() if hashed else None
        self.bias = None if hashed else bind.fp32("gate.bias")
        routed = _Experts(bind, [f"experts.{e}" for e in range(config.n_routed_experts)])
        shared = _Experts(bind, ["shared_experts"])
        self.activations, self.shared_activations = routed.input(), shared.input()
        self.streamed = bind.streamed is not None
        self.experts = bind.packing("experts", bind.streamed or ops.pack_experts, routed, shared[0])
        if self.streamed:
            self.experts.table = self.experts_of_token

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [S, D], ffn-normed -> [S, D]."""
        c = self.config
        chosen, weights = ops.router(x, self.gate, c.num_experts_per_tok, c.routed_scaling_factor, bias=self.bias,
                                     table=self.experts_of_token, ids=step.ids)
        experts = self.experts
        if self.streamed:
            experts, chosen = experts.bring(chosen, step.ids)
        return ops.moe(x, experts, chosen, weights, c.swiglu_limit, self.activations, self.shared_activations)


class _Experts(Sequence):
    """Experts of a checkpoint, each read when it is asked for: who packs them one by one has one of them unpacked, not a layer's."""

    def __init__(self, bind: Binder, names: list[str]):
        self.bind, self.names = bind, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> ops.Expert:
        return ops.Expert(*(self.bind.weight(f"{self.names[number]}.{w}") for w in ("w1", "w2", "w3")))

    def __iter__(self) -> Iterator[ops.Expert]:  # Sequence's takes an IndexError in reading for the end
        return map(self.__getitem__, range(len(self)))

    def input(self) -> str:
        """What their inputs may be quantised to, which takes one format for all of them. Reads no weight."""
        modules = [f"{name}.{w}" for name in self.names for w in ("w1", "w2", "w3")]
        found = sorted({self.bind.input_of(module) for module in modules})
        if len(found) > 1:
            kinds = sorted({self.bind.checkpoint.kind(self.bind.prefix + module) for module in modules})
            raise CheckpointError(f"{self.bind.prefix}{self.names[0]}: expected one format for the experts of a layer under --activations "
                                  f"{self.bind.numerics.activations}, found {' and '.join(kinds)}: use --activations bf16")
        return found[0]
