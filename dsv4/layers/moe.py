"""The mixture of experts: router, routed experts, shared expert (model.md section 8). Every layer of the model has one."""

from __future__ import annotations

import torch

from .. import ops
from ..config import ModelConfig
from ..errors import CheckpointError
from .binder import Binder
from .step import Step


class MoE:
    """Hash layers take a token's experts from a table by its id, the others by score; both weigh them by score."""

    def __init__(self, bind: Binder, config: ModelConfig, layer: int):
        self.config = config
        self.gate = ops.pack_gate(bind.fp32("gate.weight"))
        hashed = config.is_hash_layer(layer)
        self.experts_of_token = bind.stored("gate.tid2eid").long() if hashed else None
        self.bias = None if hashed else bind.fp32("gate.bias")
        routed, self.activations = self._bind(bind, [f"experts.{e}" for e in range(config.n_routed_experts)])
        (shared,), self.shared_activations = self._bind(bind, ["shared_experts"])
        self.experts = bind.packing("experts", ops.pack_experts, routed, shared)

    @staticmethod
    def _bind(bind: Binder, names: list[str]) -> tuple[list[ops.Expert], str]:
        """The experts, and what their inputs may be quantised to, which takes one format for all of them."""
        weights = {(name, w): bind.weight_and_kind(f"{name}.{w}") for name in names for w in ("w1", "w2", "w3")}
        inputs = {kind: bind.numerics.input_of(kind) for _, kind in weights.values()}
        if len(set(inputs.values())) > 1:
            raise CheckpointError(f"{bind.prefix}{names[0]}: expected one format for the experts of a layer under --activations "
                                  f"{bind.numerics.activations}, found {' and '.join(sorted(inputs))}: use --activations bf16")
        return [ops.Expert(*(weights[name, w][0] for w in ("w1", "w2", "w3"))) for name in names], next(iter(inputs.values()))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [S, D], ffn-normed -> [S, D]."""
        c = self.config
        chosen, weights = ops.router(x, self.gate, c.num_experts_per_tok, c.routed_scaling_factor, bias=self.bias,
                                     table=self.experts_of_token, ids=step.ids)
        return ops.moe(x, self.experts, chosen, weights, c.swiglu_limit, self.activations, self.shared_activations)
