"""All that a step leaves in an attention layer's caches, which needs the layer's first projections alone (model.md sections 4 and 6)."""

from __future__ import annotations

import torch

from .backend import operation
from .compressor import Pool, compress
from .norm import latents


def update_caches_ref(qa: torch.Tensor, kv: torch.Tensor, q_norm: torch.Tensor, kv_norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                      window: torch.Tensor, compressed: tuple[tuple[torch.Tensor, torch.Tensor], ...], pools: tuple[Pool, ...],
                      entry_cos: torch.Tensor | None, entry_sin: torch.Tensor | None, positions: torch.Tensor, eps: float,
                      quantize: bool) -> torch.Tensor:
    """Writes the keys of the step's tokens into the window and takes the tokens into the pools, which writes the entries of the blocks that
    they close: `latents` and `compress`. Returns the query latent, normed: [S, q_lora_rank] in the window's dtype.

    qa [S, q_lora_rank] and kv [S, d] fp32, as projected; compressed: each pool's two projections (kv, score). pools: none (SWA),
    attention's (HCA), or attention's and the indexer's (CSA). cos, sin [S, rope/2]: the tokens' angles; entry_cos, entry_sin: those of the
    first position of each token's block, None without pools. positions [S], consecutive.
    """
    if pools:
        compress(compressed, pools, positions, entry_cos, entry_sin, eps, quantize)
    return latents(qa, kv, q_norm, kv_norm, cos, sin, positions, window, eps, quantize)


update_caches = operation(update_caches_ref)
