"""Which product a step gets: up to 8 tokens stream the weights as decode does (linear.py, experts.py); more are a prompt's, whose tokens
share each weight that is read (prompts.py). The weights are the same bytes for both.

The names are those of dsv4/ops. Whether steps may have more than 8 tokens is decided once, at start (runtime.choose_steps).
"""

from __future__ import annotations

import torch

from . import MAX_TOKENS, PROMPT_TOKENS, experts, prompts
from . import linear as streamed
from .experts import PackedExperts
from .launch import expect
from .linear import PackedWeights, refuse_activations


def projections(x: torch.Tensor, weights: PackedWeights, activations: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    """As ops.projections: x [S, in] bf16 -> fp32 [S, out_i] each, S up to 1,024. Raises UserError as the kernels do."""
    if not _is_prompt("projections", x):
        return streamed.projections(x, weights, activations)
    refuse_activations("projections", activations)
    return prompts.projections(x, weights)


def linear(x: torch.Tensor, weight: PackedWeights, activations: str = "bf16") -> torch.Tensor:
    """As ops.linear: x [S, in] bf16 -> bf16 [S, out] or partial sums, S up to 1,024. Raises UserError as the kernels do."""
    if not _is_prompt("linear", x):
        return streamed.linear(x, weight, activations)
    refuse_activations("linear", (activations,))
    expect(len(weight.rows) == 1, "linear", f"one weight, not {len(weight.rows)}", x=x)
    return prompts.linear(_arranged(x, weight), weight)[0]


def grouped_linear(x: torch.Tensor, weight: PackedWeights) -> torch.Tensor:
    """As ops.grouped_linear: x [S, G, in] bf16 -> bf16 [S, G, R], S up to 1,024. Raises UserError as the kernels do."""
    if not _is_prompt("grouped_linear", x):
        return streamed.grouped_linear(x, weight)
    return prompts.grouped_linear(_arranged(x, weight), weight)


def moe(x: torch.Tensor, packed: PackedExperts, chosen: torch.Tensor, weights: torch.Tensor, limit: float, activations: str = "bf16",
        shared_activations: str = "bf16") -> torch.Tensor:
    """As ops.moe: x [S, D] bf16, chosen [S, k] int32, weights [S, k] fp32 -> bf16 [S, D] or partial sums, S up to 1,024. Raises UserError
    as the kernels do."""
    if not _is_prompt("moe", x):
        return experts.moe(x, packed, chosen, weights, limit, activations, shared_activations)
    refuse_activations("moe", (activations, shared_activations))
    return prompts.moe(x, packed, chosen, weights, limit)


def _is_prompt(name: str, x: torch.Tensor) -> bool:
    expect(len(x) <= PROMPT_TOKENS, name, f"x of up to {PROMPT_TOKENS} tokens", x=x)
    return len(x) > MAX_TOKENS


def _arranged(x: torch.Tensor, weight: PackedWeights) -> prompts.Arranged:
    return prompts.arrange(x, prompts.takes_short_order(int(weight.table[0, 1])))
