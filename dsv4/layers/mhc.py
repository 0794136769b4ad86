"""One mHC site: the streams collapse to a block's input, and the block's output returns to them. And the final collapse."""

from __future__ import annotations

import torch

from .. import ops
from ..config import ModelConfig
from .binder import Binder


class HyperConnection:
    """What a block takes from the streams (`pre`), and how its output returns to them (`post`). There is no residual addition besides:
    X' = post * block(x) + comb^T X (model.md section 3)."""

    def __init__(self, bind: Binder, config: ModelConfig, site: str):
        self.fn, self.base, self.scale = (bind.fp32(f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        self.constants = {"norm_eps": config.rms_norm_eps, "hc_eps": config.hc_eps, "iterations": config.hc_sinkhorn_iters}

    def pre(self, X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """X [S, n, D] -> the block's input x [S, D], and post [S, n], comb [S, n, n] for its return."""
        return ops.mhc_pre(X, self.fn, self.base, self.scale, **self.constants)

    def post(self, o: torch.Tensor, X: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The block's output o [S, D] and the streams before it -> the streams after it."""
        return ops.mhc_post(o, X, post, comb)


class Head:
    """Streams -> logits: hc_head, the last norm, and the output matrix with fp32 sums (model.md sections 2 and 3.3)."""

    def __init__(self, bind: Binder, config: ModelConfig):
        self.fn, self.base, self.scale = (bind.fp32(f"hc_head_{part}") for part in ("fn", "base", "scale"))
        self.norm, self.weight, self.config = bind.fp32("norm.weight"), bind.weight("head"), config

    def __call__(self, X: torch.Tensor) -> torch.Tensor:
        """X [S, n, D] -> fp32 [S, vocab]."""
        eps = self.config.rms_norm_eps
        y = ops.hc_head(X, self.fn, self.base, self.scale, norm_eps=eps, hc_eps=self.config.hc_eps)
        return ops.linear_fp32(ops.rms_norm(y, self.norm, eps), self.weight)
