"""The operations, a file a family: their torch definitions (the meaning) and, through `backend`, the choice of implementation."""

from .attention import attend, attention
from .backend import allow_prompts, max_tokens
from .backend import register as register_kernel
from .backend import select as select_backend
from .backend import selected as selected_backend
from .backend import trying as trying_kernel
from .compressor import Pool, compress, pool
from .experts import Expert, Experts, moe, pack_experts
from .grouped import group_choices, group_nvfp4, grouped_nvfp4_linear, grouped_swiglu_nvfp4, sum_choices
from .indexer import index_scores, select_entries, weighted_relu
from .keys import new_index_keys, new_keys, new_window
from .linear import grouped_linear, linear, pack_weights, projections
from .mhc import Pending, collapse, hc_head, mhc_post, mhc_pre, whole
from .norm import kv_norm_rope, latents, query_norm_rope, rms_norm
from .nvfp4 import nvfp4_linear, rms_norm_to_nvfp4, swiglu_to_nvfp4, to_nvfp4, unpack_nvfp4
from .quant import fp4_round_trip, fp8_round_trip, hadamard, nvfp4_round_trip
from .rope import apply_rope, rope_frequencies, rope_table
from .router import pack_gate, router
from .sample import sample
from .update_caches import update_caches

__all__ = [
    "Expert", "Experts", "Pending", "Pool", "allow_prompts", "apply_rope", "attend", "attention", "collapse", "compress",
    "fp4_round_trip", "fp8_round_trip", "group_choices", "group_nvfp4", "grouped_linear", "grouped_nvfp4_linear",
    "grouped_swiglu_nvfp4", "hadamard", "hc_head", "index_scores", "kv_norm_rope", "latents", "linear", "max_tokens", "mhc_post",
    "mhc_pre", "moe", "new_index_keys", "new_keys", "new_window", "nvfp4_linear", "nvfp4_round_trip", "pack_experts", "pack_gate",
    "pack_weights", "pool", "projections", "query_norm_rope", "register_kernel", "rms_norm", "rms_norm_to_nvfp4",
    "rope_frequencies", "rope_table", "router", "sample", "select_backend", "select_entries", "selected_backend", "sum_choices",
    "swiglu_to_nvfp4", "to_nvfp4", "trying_kernel", "unpack_nvfp4", "update_caches", "weighted_relu", "whole",
]
