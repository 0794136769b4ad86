"""One mHC site: the streams collapse to a block's input, and the block's output returns to them. And the final collapse."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import ops
from ..config import ModelConfig
from .binder import Binder


class Streams(NamedTuple):
    """The residual streams X [S, n, D], and the last block's output where it has not returned to them yet: the next site does that on
    its way, which saves a pass over X."""

    X: torch.Tensor
    pending: ops.Pending | None = None

    def settled(self) -> torch.Tensor:
        """The streams with nothing pending."""
        return self.X if self.pending is None else ops.mhc_post(self.pending.o, self.X, self.pending.post, self.pending.comb)


class HyperConnection:
    """A block and its norm within the streams: X' = post * block(norm(collapse(X))) + comb^T X, and no residual addition besides
    (model.md section 3)."""

    def __init__(self, bind: Binder, config: ModelConfig, site: str):
        self.fn, self.base, self.scale = (bind.fp32(f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        self.norm = bind.fp32(f"{site}_norm.weight")
        self.constants = {"norm_eps": config.rms_norm_eps, "hc_eps": config.hc_eps, "iterations": config.hc_sinkhorn_iters}

    def __call__(self, streams: Streams, block: Callable[[torch.Tensor], torch.Tensor]) -> Streams:
        """The streams before the block -> the same with its output (block: x [S, D] -> o as in ops.Pending) pending."""
        X, x, post, comb = ops.mhc_pre(*streams, self.fn, self.base, self.scale, self.norm, **self.constants)
        return Streams(X, ops.Pending(block(x), post, comb))


class Head:
    """Streams -> logits: hc_head with the last norm, and the output matrix with fp32 sums (model.md sections 2 and 3.3)."""

    def __init__(self, bind: Binder, config: ModelConfig):
        self.fn, self.base, self.scale = (bind.fp32(f"hc_head_{part}") for part in ("fn", "base", "scale"))
        self.norm, self.weights = bind.fp32("norm.weight"), bind.packing("head", ops.pack_weights, (bind.weight("head"),))
        self.constants = {"norm_eps": config.rms_norm_eps, "hc_eps": config.hc_eps}

    def __call__(self, X: torch.Tensor) -> torch.Tensor:
        """X [S, n, D] -> fp32 [S, vocab]."""
        y = ops.hc_head(X, self.fn, self.base, self.scale, self.norm, **self.constants)
        (logits,) = ops.projections(y, self.weights, ("bf16",))
        return logits
