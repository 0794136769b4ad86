"""Hand-written CUDA kernels, each under the name of the operation it implements. See docs/kernels.md."""

from __future__ import annotations

from collections.abc import Callable


def wrappers() -> dict[str, Callable]:
    """Operation name -> kernel. Nothing is compiled until the first call."""
    from .mhc import mhc_post
    from .norm import rms_norm

    return {"mhc_post": mhc_post, "rms_norm": rms_norm}
