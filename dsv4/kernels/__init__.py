"""Hand-written CUDA kernels, each under the name of the operation it implements. See docs/kernels.md."""

from __future__ import annotations

from collections.abc import Callable

MAX_TOKENS = 8  # of one step: the columns of an mma


def wrappers() -> dict[str, Callable]:
    """Operation name -> kernel. Nothing is compiled until the first call."""
    from .attention import attention
    from .compressor import compress
    from .experts import moe, pack_experts
    from .indexer import index_scores, select_entries
    from .keys import new_index_keys, new_keys
    from .linear import grouped_linear, linear, pack_weights, projections
    from .mhc import hc_head, mhc_post, mhc_pre
    from .norm import latents
    from .nvfp4 import nvfp4_linear, rms_norm_to_nvfp4, swiglu_to_nvfp4, to_nvfp4
    from .router import pack_gate, router
    from .sample import sample

    return {f.__name__: f for f in (
        attention, compress, grouped_linear, hc_head, index_scores, latents, linear, mhc_post, mhc_pre, moe, new_index_keys, new_keys,
        nvfp4_linear, pack_experts, pack_gate, pack_weights, projections, rms_norm_to_nvfp4, router, sample, select_entries,
        swiglu_to_nvfp4, to_nvfp4)}
