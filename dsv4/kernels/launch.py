"""From a Python wrapper to a compiled kernel: argument types, the object for the tensor's device, the stream, the error."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch

from ..errors import UserError
from . import build

# What an argument is to the kernel. A tensor goes as its address; the direction is what the emulator checks.
IN, OUT = "in", "out"
_CTYPES = {IN: ctypes.c_void_p, OUT: ctypes.c_void_p, int: ctypes.c_int, float: ctypes.c_float}
_CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

# The `dtype` argument of the C functions (cuda/common.cuh).
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

# Tests set this: it runs a kernel whose tensors are on the CPU, as emulator(kernel, values) -> the C function's result.
emulator: Callable[[Kernel, list], int] | None = None


def architecture(device: torch.device) -> str:
    """The architecture to compile for. Raises UserError for a GPU that has none of ours."""
    capability = torch.cuda.get_device_capability(device)
    if capability not in _CAPABILITIES:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"--backend cuda: expected a GPU of compute capability 9.0, 10.0 or 10.3, found {name} with {capability[0]}."
                        f"{capability[1]}: run with --backend torch")
    return _CAPABILITIES[capability]


class Kernel:
    """One C function `int name(arguments..., stream)` of cuda/NAME.cu.

    `arguments`: name -> IN or OUT (a contiguous tensor), int or float; in the order of the C declaration.
    """

    def __init__(self, name: str, arguments: dict):
        self.name, self.arguments = name, arguments
        self._functions: dict[int, Callable] = {}  # by device index

    def bind(self, library: ctypes.CDLL) -> Callable:
        """The C function with its argument types declared."""
        function = getattr(library, self.name)
        function.argtypes = [*(_CTYPES[kind] for kind in self.arguments.values()), ctypes.c_void_p]
        function.restype = ctypes.c_int
        return function

    def __call__(self, **values) -> None:
        """Launches on the tensors' device and torch's current stream. Raises RuntimeError with the kernel's name if CUDA refuses."""
        if values.keys() != self.arguments.keys():
            raise TypeError(f"{self.name} takes {', '.join(self.arguments)}, got {', '.join(values)}")
        values = [values[name] for name in self.arguments]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        device = tensors[0].device
        if any(t.device != device or not t.is_contiguous() for t in tensors):
            found = ", ".join(f"{list(t.shape)} of strides {list(t.stride())} on {t.device}" for t in tensors)
            raise UserError(f"{self.name}: expected contiguous tensors of one device, found {found}")
        if device.type == "cuda":
            error = self._on_gpu(device, values)
        elif emulator is not None:
            error = emulator(self, values)
        else:
            raise UserError(f"{self.name}: expected tensors on a GPU, found {device}: run with --backend torch")
        if error:
            raise RuntimeError(f"{self.name}: the kernel's launch failed with CUDA error {error}")

    def _on_gpu(self, device: torch.device, values: list) -> int:
        if device.index not in self._functions:
            self._functions[device.index] = self.bind(ctypes.CDLL(str(build.build(self.name, architecture(device)))))
        arguments = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
        with torch.cuda.device(device):
            error = self._functions[device.index](*arguments, torch.cuda.current_stream(device).cuda_stream)
            if os.environ.get("DSV4_SYNC") == "1" and not error:
                try:
                    torch.cuda.synchronize(device)
                except RuntimeError as fault:
                    raise RuntimeError(f"{self.name}: the kernel failed: {str(fault).splitlines()[0]}") from fault
        return error


def expect(condition: bool, name: str, wanted: str, **tensors: torch.Tensor) -> None:
    """Raises UserError with the shapes and dtypes unless `condition` holds."""
    if not condition:
        found = ", ".join(f"{key} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for key, t in tensors.items())
        raise UserError(f"{name}: expected {wanted}, found {found}")
