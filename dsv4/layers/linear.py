"""A linear layer: a weight in its stored format and the precision of its input."""

from __future__ import annotations

import torch

from .. import ops
from .binder import Binder


class Linear:
    """x [..., in] -> [..., out] in x's dtype."""

    def __init__(self, bind: Binder, name: str):
        self.weight, kind = bind.weight_and_kind(name)
        self.activations = bind.numerics.input_of(kind)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.activations)


class LinearFP32:
    """x [..., in] -> fp32 [..., out], never from a quantised input: the projections whose result decides something discrete, and where a
    NaN could decide it unseen."""

    def __init__(self, bind: Binder, name: str):
        self.weight = bind.weight(name)
        bind.refuse_non_finite(f"{name}.weight", self.weight.dequantize())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear_fp32(x, self.weight)
