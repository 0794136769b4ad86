"""Hand-written CUDA kernels, each under the name of the operation it implements. See docs/kernels.md."""

from __future__ import annotations

from collections.abc import Callable

MAX_TOKENS = 8  # of one step: the columns of an mma


def wrappers() -> dict[str, Callable]:
    """Operation name -> kernel. Nothing is compiled until the first call."""
    from .attention import attention
    from .experts import moe, pack_experts
    from .indexer import index_scores, select_entries
    from .keys import new_index_keys, new_keys
    from .linear import grouped_linear, linear, pack_weights, projections
    from .mhc import hc_head, mhc_post, mhc_pre
    from .router import pack_gate, router
    from .sample import sample
    from .update_caches import update_caches

    return {f.__name__: f for f in (
        attention, grouped_linear, hc_head, index_scores, linear, mhc_post, mhc_pre, moe, new_index_keys, new_keys, pack_experts, pack_gate,
        pack_weights, projections, router, sample, select_entries, update_caches)}
