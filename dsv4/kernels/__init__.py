"""Hand-written CUDA kernels, each under the name of the operation it implements. See docs/kernels.md."""

from __future__ import annotations

from collections.abc import Callable

MAX_TOKENS = 8  # of one step: the columns of an mma


def wrappers() -> dict[str, Callable]:
    """Operation name -> kernel. Nothing is compiled until the first call."""
    from .mhc import mhc_post

    return {"mhc_post": mhc_post}
