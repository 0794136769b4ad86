"""Counters of the kernels whose last block to arrive goes on alone (last_to_arrive in cuda/common.cuh)."""

from __future__ import annotations

import functools

import torch


@functools.cache
def arrivals(kernel: str, device: torch.device, count: int = 1) -> torch.Tensor:
    """The counters of a kernel on a device, int32 [count]: made once, as every launch leaves them at 0.

    Launches of one kernel on a device follow each other, as all of a step go through one stream; two at once, on two streams, would count
    each other's blocks.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)
