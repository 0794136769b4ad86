"""The machine: which devices, how much memory they have free, how much was used; torch's settings for exact fp32."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .errors import UserError


def prepare_torch() -> None:
    """fp32 products in full fp32: TF32 would change which experts and entries are chosen (docs/design.md, numerics)."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def resolve_devices(spec: str) -> list[torch.device]:
    """`auto` (the GPUs that torch sees, else the CPU), `cpu`, or `cuda:0,cuda:1`. Raises UserError for what is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if spec == "auto":
        return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    devices = []
    for name in spec.split(","):
        try:
            device = torch.device(name.strip())
        except RuntimeError:
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise UserError(f"--devices: expected auto, cpu or a list such as cuda:0,cuda:1, found {spec!r}")
        if device.type == "cuda":
            index = device.index or 0
            if index >= count:
                raise UserError(f"--devices: {name.strip()}: torch {torch.__version__} sees {count} GPUs; use --devices cpu or auto")
            device = torch.device("cuda", index)
        devices.append(device)
    if len(set(devices)) < len(devices) or (len(devices) > 1 and any(d.type == "cpu" for d in devices)):
        raise UserError(f"--devices: expected different GPUs, or cpu alone, found {spec!r}")
    return devices


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on a device now; for the CPU what the system calls available, within its control group's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
                break
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else min(free, int(limit) - used)
    except FileNotFoundError:  # no such file outside Linux, and no such limit in the root group
        if "free" in locals():
            return free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def peak_bytes(devices: list[torch.device]) -> dict[str, int]:
    """Peak memory so far: this process on the host, and torch's allocations on each GPU."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return peaks | {str(d): torch.cuda.max_memory_allocated(d) for d in devices if d.type == "cuda"}
