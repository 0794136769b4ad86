"""Hand-written CUDA kernels, each under the name of the operation it implements. See docs/kernels.md."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UserError

MAX_TOKENS = 8  # of one step on the products of decode: the columns of an mma
# Of one step of a prompt, where prompts.py multiplies. All routed experts of a layer are read for 32 tokens each as for one, so more tokens
# cost little more: 1,024 give an expert 16 (Pro) or 24 (Flash). Twice as many would be up to a seventh faster (predicted), but take twice
# the memory (Pro 1 GB), and a prompt's way through 8 GPUs needs many chunks.
PROMPT_TOKENS = 1024


def refuse_sizes(config) -> None:
    """Raises UserError if the kernels are not written for this model's sizes (a ModelConfig), before anything is loaded."""
    c, indexed = config, 4 in config.compress_ratios
    for name, expected, fine in (
        ("head_dim", "512", c.head_dim == 512), ("qk_rope_head_dim", "64", c.qk_rope_head_dim == 64), ("hc_mult", "4", c.hc_mult == 4),
        ("index_head_dim", "128", not indexed or c.index_head_dim == 128), ("index_n_heads", "64", not indexed or c.index_n_heads == 64),
        ("index_topk", "at most 1024", not indexed or c.index_topk <= 1024),
        ("hidden_size", "a multiple of 8 up to 8192", c.hidden_size % 8 == 0 and c.hidden_size <= 8192),
        ("q_lora_rank", "a multiple of 8 up to 2048", c.q_lora_rank % 8 == 0 and c.q_lora_rank <= 2048),
        ("o_lora_rank", "a multiple of 16", c.o_lora_rank % 16 == 0),
        ("moe_intermediate_size", "a multiple of 8", c.moe_intermediate_size % 8 == 0),
        ("n_routed_experts", "at most 384", c.n_routed_experts <= 384), ("num_experts_per_tok", "at most 8", c.num_experts_per_tok <= 8),
        ("vocab_size", "at most 150000", c.vocab_size <= 150_000),
    ):
        if not fine:
            raise UserError(f"--backend cuda: expected {name} to be {expected}, which the kernels are written for, found "
                            f"{getattr(c, name)}: run with --backend torch")


def wrappers() -> dict[str, Callable]:
    """Operation name -> kernel. Nothing is compiled until the first call."""
    from .attention import attention
    from .cute.grouped import grouped_nvfp4_linear, grouped_swiglu_nvfp4
    from .experts import pack_experts
    from .front import grouped_linear, linear, moe, projections
    from .grouped import group_choices, group_nvfp4, sum_choices
    from .indexer import index_scores, select_entries
    from .keys import new_index_keys, new_keys, new_window
    from .linear import pack_weights
    from .mhc import hc_head, mhc_post, mhc_pre
    from .nvfp4 import nvfp4_linear, rms_norm_to_nvfp4, swiglu_to_nvfp4, to_nvfp4
    from .router import pack_gate, router
    from .sample import sample
    from .update_caches import update_caches

    return {f.__name__: f for f in (
        attention, group_choices, group_nvfp4, grouped_linear, grouped_nvfp4_linear, grouped_swiglu_nvfp4, hc_head, index_scores, linear,
        mhc_post, mhc_pre, moe, new_index_keys, new_keys, new_window, nvfp4_linear, pack_experts, pack_gate, pack_weights, projections,
        rms_norm_to_nvfp4, router, sample, select_entries, sum_choices, swiglu_to_nvfp4, to_nvfp4, update_caches)}
