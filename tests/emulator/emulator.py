"""Builds a kernel source for the CPU emulator and runs it on torch tensors, each in memory of its own with unused space around it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from dsv4.kernels import build, launch

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "emulator"  # ignored by git, removed by `make clean`
GUARD = 1 << 16  # bytes around every tensor
# -O1 without the vectoriser: the accesses of the source, at their own size. Never -ffast-math; x86-64 without -mfma contracts nothing.
KERNEL_FLAGS = ("-std=c++17", "-O1", "-g", "-fno-tree-vectorize", "-fsanitize=thread", "-fPIC", "-Wall", "-Wextra", "-Werror",
                "-Wno-unknown-pragmas", f"-I{HERE}", "-include", "emulator.h", "-x", "c++")
RUNTIME_FLAGS = ("-std=c++17", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror")

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU emulator needs g++ (Debian, Ubuntu: apt install g++)")


class EmulatorError(AssertionError):
    """A mistake in a kernel that the emulator found."""


def _gxx(*arguments: str) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"g++ {' '.join(arguments)}\n{done.stdout}{done.stderr}"


@functools.lru_cache
def _version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def compile_for_cpu(source: Path) -> Path:
    """The shared object of one kernel source with the emulator, from build/emulator or compiled now."""
    machine = build.content_hash(HERE / "runtime.cpp", *RUNTIME_FLAGS, _version())

    def runtime(folder: Path):
        _gxx(*RUNTIME_FLAGS, "-c", str(HERE / "runtime.cpp"), "-o", str(folder / "runtime.o"))
        return folder / "runtime.o", ""

    def kernel(folder: Path):
        _gxx(*KERNEL_FLAGS, "-c", str(source), "-o", str(folder / "kernel.o"))
        _gxx("-shared", "-Wl,--no-undefined", str(folder / "kernel.o"), str(machine_object), "-o", str(folder / "kernel.so"))
        return folder / "kernel.so", ""

    machine_object = build.compile_into(CACHE, f"runtime-{machine}.o", runtime)
    flags = [flag.replace(str(HERE), "") for flag in KERNEL_FLAGS]
    return build.compile_into(CACHE, f"{source.stem}-{build.content_hash(source, *flags, machine)}.so", kernel)


class Machine:
    """One kernel source, emulated. `reverse` runs blocks and threads from the last to the first."""

    def __init__(self, source: Path, reverse: bool = False):
        self.path, self.reverse = compile_for_cpu(source), reverse
        self.library = ctypes.CDLL(str(self.path))
        self.library.emu_region.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        self.library.emu_unwritten.argtypes, self.library.emu_unwritten.restype = [ctypes.c_size_t], ctypes.c_size_t
        self.library.emu_error.restype = ctypes.c_char_p

    def run(self, kernel: launch.Kernel, values: list, offsets: dict[str, int] | None = None) -> int:
        """Calls the C function; tensors are copied into guarded memory, and outputs back.

        A tensor starts at a multiple of 256, or as many bytes past one as `offsets` has for its name.
        Outputs start as 0xFF bytes (NaN, -1) that the kernel may not read and must all write. Raises EmulatorError.
        """
        self.library.emu_reset(int(self.reverse))
        arguments, outputs, keep = [], [], []
        for (name, kind), value in zip(kernel.arguments.items(), values, strict=True):
            if not isinstance(value, torch.Tensor):
                arguments.append(value)
                continue
            size = value.numel() * value.element_size()
            memory = torch.full((size + 2 * GUARD + 512,), 0xFF, dtype=torch.uint8)
            start = -(-(memory.data_ptr() + GUARD) // 256) * 256 + (offsets or {}).get(name, 0)
            if kind == launch.OUT:
                outputs.append((len(keep), name, value, start, size))
            else:
                ctypes.memmove(start, value.data_ptr(), size)
            self.library.emu_region(name.encode(), start, size, kind == launch.OUT, kind != launch.OUT)
            keep.append(memory)
            arguments.append(start)
        result = kernel.bind(self.library)(*arguments, None)
        if error := self.library.emu_error().decode():
            raise EmulatorError(f"{kernel.name}: {self._with_source_lines(error)}")
        if result:
            return result
        for index, name, value, start, size in outputs:
            if missing := self.library.emu_unwritten(index):
                raise EmulatorError(f"{kernel.name}: {missing} of the {size} bytes of output {name} were never written")
            ctypes.memmove(value.data_ptr(), start, size)
        return 0

    def _with_source_lines(self, error: str) -> str:
        """Replaces the place in the object by the file and line, where addr2line (which comes with g++) knows it."""
        def line(match: re.Match) -> str:
            address = hex(int(match[1], 16) - 1)  # of the call, not of what follows it
            done = subprocess.run(["addr2line", "-e", str(self.path), address], capture_output=True, text=True)
            return "at " + Path(done.stdout.split(" (")[0].strip() or "unknown").name  # without "(discriminator 1)"
        return re.sub(r"@\+(0x[0-9a-f]+)", line, error) if shutil.which("addr2line") else error


@contextlib.contextmanager
def emulated(reverse: bool = False, offsets: dict[str, int] | None = None):
    """Within it, kernels' wrappers take CPU tensors and run on the emulator. The arguments are Machine's."""
    def run(kernel: launch.Kernel, values: list) -> int:
        return Machine(build.SOURCES / f"{kernel.name}.cu", reverse).run(kernel, values, offsets)

    before, launch.emulator = launch.emulator, run
    try:
        yield
    finally:
        launch.emulator = before
