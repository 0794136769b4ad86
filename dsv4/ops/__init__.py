"""The operations, a file a family: their torch definitions (the meaning) and, through `backend`, the choice of implementation."""

from .attention import attention
from .backend import register as register_kernel
from .backend import select as select_backend
from .backend import trying as trying_kernel
from .compressor import compress
from .experts import Expert, moe
from .indexer import index_scores, select_entries
from .linear import grouped_linear, linear, linear_fp32
from .mhc import hc_head, mhc_post, mhc_pre
from .norm import kv_norm_rope, query_norm_rope, rms_norm
from .quant import fp4_round_trip, fp8_round_trip, hadamard, nvfp4_round_trip
from .rope import apply_rope, rope_frequencies, rope_table
from .router import router

__all__ = [
    "Expert", "apply_rope", "attention", "compress", "fp4_round_trip", "fp8_round_trip", "grouped_linear", "hadamard", "hc_head",
    "index_scores", "kv_norm_rope", "linear", "linear_fp32", "mhc_post", "mhc_pre", "moe", "nvfp4_round_trip", "query_norm_rope",
    "register_kernel", "rms_norm", "rope_frequencies", "rope_table", "router", "select_backend", "select_entries", "trying_kernel",
]
