"""The mixture of experts: router, routed experts, shared expert (model.md section 8). Every layer of the model has one."""

from __future__ import annotations

import torch

from .. import ops
from ..config import ModelConfig
from . import Binder
from .step import Step


class MoE:
    """Hash layers take a token's experts from a table by its id, the others by score; both weigh them by score."""

    def __init__(self, bind: Binder, config: ModelConfig, layer: int):
        self.config = config
        self.gate = bind.fp32("gate.weight")
        hashed = config.is_hash_layer(layer)
        self.experts_of_token = bind.stored("gate.tid2eid").long() if hashed else None
        self.bias = None if hashed else bind.fp32("gate.bias")
        routed = [self._expert(bind.below(f"experts.{e}")) for e in range(config.n_routed_experts)]
        self.experts, (self.shared, shared_kind) = [expert for expert, _ in routed], self._expert(bind.below("shared_experts"))
        self.activations = bind.numerics.input_of(routed[0][1])
        self.shared_activations = bind.numerics.input_of(shared_kind)

    @staticmethod
    def _expert(bind: Binder) -> tuple[ops.Expert, str]:
        (w1, kind), w2, w3 = bind.weight_and_kind("w1"), bind.weight("w2"), bind.weight("w3")
        return ops.Expert(w1, w2, w3), kind

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [S, D], ffn-normed -> [S, D]."""
        c = self.config
        fixed = None if self.experts_of_token is None else self.experts_of_token[step.ids]
        chosen, weights = ops.router(x, self.gate, c.num_experts_per_tok, c.routed_scaling_factor, bias=self.bias, chosen=fixed)
        return ops.moe(x, self.experts, self.shared, chosen, weights, c.swiglu_limit, self.activations, self.shared_activations)
