"""From a Python wrapper to a compiled kernel: argument types, the object for the tensor's device, the stream, the error."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import KernelError, UserError
from . import build

# What a tensor is to the kernel; all go as addresses. The emulator checks it: IN and WEIGHT are only read, OUT is wholly written and never
# read before, WORK (a workspace) too but not wholly, INOUT holds data and may be written. HOST is a CPU tensor that the C function itself
# reads or writes. PEER is INOUT in any place, another GPU's memory or pinned memory of the host. Kernels overlap the end of the
# one before (LAUNCH in cuda/common.cuh): only a WEIGHT, which no kernel writes, may be read before grid_dependency_wait().
IN, WEIGHT, OUT, WORK, INOUT, HOST, PEER = TENSORS = "in", "weight", "out", "work", "inout", "host", "peer"
_CTYPES = {**dict.fromkeys(TENSORS, ctypes.c_void_p), int: ctypes.c_int, float: ctypes.c_float}
_CPU_BLOCKS = 8  # what the emulator runs of a kernel that wants a block an SM
_CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

# The `dtype` argument of the C functions (cuda/common.cuh).
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

SYNC = os.environ.get("DSV4_SYNC") == "1"  # wait for each kernel, so that a fault is reported with its name

# Tests set this: it runs a kernel whose tensors are on the CPU, as emulator(kernel, values) -> the C function's result.
emulator: Callable[[Kernel, list], int] | None = None


def architecture(device: torch.device) -> str:
    """The architecture to compile for. Raises UserError for a GPU that has none of ours."""
    capability = torch.cuda.get_device_capability(device)
    return architecture_of(capability, "" if capability in _CAPABILITIES else torch.cuda.get_device_name(device))


def architecture_of(capability: tuple[int, int], name: str) -> str:
    """The same for a GPU of this compute capability that need not be there."""
    if capability not in _CAPABILITIES:
        raise UserError(f"--backend cuda: expected a GPU of compute capability 9.0, 10.0 or 10.3, found {name} with {capability[0]}."
                        f"{capability[1]}: run with --backend torch")
    return _CAPABILITIES[capability]


class Kernel:
    """One C function `int name(arguments..., stream)` of cuda/NAME.cu.

    `arguments`: name -> one of TENSORS (a contiguous tensor, or None for a null pointer), int or float; in the order of the C declaration.
    """

    def __init__(self, name: str, arguments: dict):
        self.name, self.arguments = name, arguments
        self._elsewhere = [kind if kind in (HOST, PEER) else None for kind in arguments.values()]
        self._functions: dict[int, Callable] = {}  # by device index

    def built(self, arch: str) -> Path:
        """The shared object for an architecture, compiled if need be."""
        return build.build(self.name, arch)

    def bind(self, library: ctypes.CDLL) -> Callable:
        """The C function with its argument types declared."""
        function = getattr(library, self.name)
        function.argtypes = [*(_CTYPES[kind] for kind in self.arguments.values()), ctypes.c_void_p]
        function.restype = ctypes.c_int
        return function

    def __call__(self, **values) -> None:
        """Launches on the tensors' device and torch's current stream. Raises KernelError with the kernel's name if CUDA refuses.

        Called about a thousand times a token outside of graphs, so there is nothing here that could be done once.
        """
        try:
            ordered = [values[name] for name in self.arguments]
        except KeyError:
            ordered = []
        if len(values) != len(ordered):
            raise TypeError(f"{self.name} takes {', '.join(self.arguments)}, got {', '.join(values)}")
        addresses, device = [], None
        for value, elsewhere in zip(ordered, self._elsewhere, strict=True):
            if isinstance(value, torch.Tensor):
                here = value.get_device()  # -1: the CPU
                if elsewhere and (elsewhere == PEER or here < 0) and value.is_contiguous():
                    addresses.append(value.data_ptr())
                    continue
                if (here != device and device is not None) or not value.is_contiguous():
                    tensors = [v for v in ordered if isinstance(v, torch.Tensor)]
                    found = ", ".join(f"{list(t.shape)} of strides {list(t.stride())} on {t.device}" for t in tensors)
                    raise UserError(f"{self.name}: expected contiguous tensors of one device, found {found}")
                device = here
                addresses.append(value.data_ptr())
            else:
                addresses.append(value)
        if device is None:
            raise TypeError(f"{self.name}: expected at least one tensor")
        if device >= 0:
            error = self._on_gpu(device, addresses)
        elif emulator is not None:
            error = emulator(self, ordered)
        else:
            raise UserError(f"{self.name}: expected tensors on a GPU, found cpu: run with --backend torch")
        if error:
            raise KernelError(f"{self.name}: expected the kernel to launch, found CUDA error {error}: DSV4_SYNC=1 shows whether an earlier "
                              "kernel made it, --backend torch does without kernels")

    def load(self, device: int) -> None:
        """Builds it for that GPU if need be, and loads it. Raises KernelError for an object that does not load, UserError as `built`."""
        built = str(self.built(architecture(torch.device("cuda", device))))
        try:
            self._functions[device] = self.bind(ctypes.CDLL(built))
        except OSError as error:
            raise KernelError(f"{self.name}: expected an object that loads, found {error}: remove it, so that it is built again, or set "
                              "DSV4_KERNEL_CACHE to a folder whose files may be run") from None

    def _on_gpu(self, device: int, addresses: list) -> int:
        if device not in self._functions:
            self.load(device)
        before = torch.cuda.current_device()
        if before != device:
            torch.cuda.set_device(device)
        try:
            error = self._functions[device](*addresses, _raw_stream(device))
            if SYNC and not error:
                try:
                    torch.cuda.synchronize(device)
                except RuntimeError as fault:
                    raise KernelError(f"{self.name}: expected the kernel to end, found {str(fault).splitlines()[0]}: --backend torch does "
                                      "without kernels") from fault
        finally:
            if before != device:
                torch.cuda.set_device(before)
        return error


def _raw_stream(device: int) -> int:
    """The address of torch's current stream on a GPU; 0.1 us, where making a torch.cuda.Stream of it takes over 1."""
    return torch._C._cuda_getCurrentRawStream(device)


@functools.lru_cache
def tensor_memory_blocks(name: str, device: torch.device, instead: str) -> int:
    """How many blocks of kernel `name`, which needs Blackwell's tensor memory, run at once: one an SM. Raises UserError for another GPU,
    naming what to use `instead`."""
    if device.type != "cuda":
        return _CPU_BLOCKS
    properties = torch.cuda.get_device_properties(device)
    if properties.major != 10:
        raise UserError(f"{name}: expected a GPU with tensor memory (compute capability 10), found {properties.name} with "
                        f"{properties.major}.{properties.minor}: use {instead}")
    return properties.multi_processor_count


def expect(condition: bool, name: str, wanted: str, **tensors: torch.Tensor) -> None:
    """Raises UserError with the shapes and dtypes unless `condition` holds."""
    if not condition:
        found = ", ".join(f"{key} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for key, t in tensors.items())
        raise UserError(f"{name}: expected {wanted}, found {found}")
