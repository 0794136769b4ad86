"""Ranges of a file to a GPU's memory by one call, in which no other Python thread waits for this one: cuda/read_to_gpu.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .launch import HOST, WORK, Kernel

# `to` is written where the ranges say.
_read = Kernel("read_to_gpu", {"ranges": HOST, "to": WORK, "slots": HOST, "found": HOST, "stop": HOST, "file": int, "count": int,
                               "slot_bytes": int, "slot_count": int})


def prepare(device: torch.device) -> None:
    """Before threads call it, which would all build it at once, and among whose errors one of loading looks like a file's."""
    _read.load(device.index or 0)


def read_to_gpu(file: int, ranges: Sequence[tuple[int, int, int]], to: torch.Tensor, slots: torch.Tensor,
                stop: torch.Tensor) -> tuple[int, int, int]:
    """Reads `ranges` (where in the open file, bytes, where in `to`) to `to`, uint8 [n] of a GPU, by way of `slots`, uint8 [count, bytes]
    pinned, on its current stream; returns when they are there.

    stop: int32 [1] of the host; another thread sets it to have no more read. Returns how far it came: the range, bytes of it, and an errno;
    (len(ranges), 0, 0) is all. Short of that a read has failed or, with the errno 0, the file has ended or `stop` is set. Raises
    KernelError for a copy that fails.
    """
    found = torch.zeros(3, dtype=torch.int64)
    _read(ranges=torch.tensor(ranges, dtype=torch.int64), to=to, slots=slots, found=found, stop=stop, file=file, count=len(ranges),
          slot_bytes=slots.shape[1], slot_count=slots.shape[0])
    return tuple(found.tolist())
