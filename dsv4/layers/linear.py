"""Linear layers: weights in their stored formats and the precision of their input."""

from __future__ import annotations

import torch

from .. import ops
from .binder import Binder


class Linear:
    """x [S, in] -> [S, out] in x's dtype, or its partial sums: o as in ops.Pending."""

    def __init__(self, bind: Binder, name: str):
        self.weights, self.activations = bind.packing(name, ops.pack_weights, (bind.weight(name),)), bind.input_of(name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weights, self.activations)


class Projections:
    """Several projections of one input, fp32 and not rounded, in one go: x [S, in] -> fp32 [S, out] of each.

    The input of those in `exact` is never quantised. A weight in `decisive` that is not finite is refused: its result chooses something,
    and a NaN would choose unseen.
    """

    def __init__(self, bind: Binder, names: tuple[str, ...], *, exact: tuple[str, ...] = (), decisive: tuple[str, ...] = ()):
        weights, self.activations = [], ()
        for name in names:
            weight = bind.weight(name)
            if name in decisive:
                bind.refuse_non_finite(f"{name}.weight", weight.dequantize())
            weights.append(weight)
            self.activations += ("bf16" if name in exact else bind.input_of(name),)
        self.weights = bind.packing(" + ".join(names), ops.pack_weights, tuple(weights))

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.projections(x, self.weights, self.activations)
