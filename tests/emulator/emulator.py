"""Builds a kernel source for the CPU emulator and runs it on torch tensors, each in memory of its own with unused space around it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
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
LIBRARY = ("emulator.h", "common.cuh")  # a mistake is reported at the place that calls into these
KINDS = (launch.IN, launch.OUT, launch.INOUT, launch.WEIGHT, launch.WORK)  # as emu_region numbers them; PEER is INOUT to it
# -O1 without the vectoriser: the accesses of the source, at their own size. Never -ffast-math; x86-64 without -mfma contracts nothing.
# -g1 has the lines and what is inlined where, which is all that reports take; with -g compiling took a third longer.
KERNEL_FLAGS = ("-std=c++17", "-O1", "-g1", "-fno-tree-vectorize", "-fsanitize=thread", "-fPIC", "-Wall", "-Wextra", "-Werror",
                "-Wno-unknown-pragmas", "-Wno-psabi", f"-I{HERE}", "-include", "emulator.h", "-x", "c++")
RUNTIME_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror")

ON_GPU = os.environ.get("DSV4_TEST_GPU") == "1"
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
        self.library.emu_region.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.library.emu_unwritten.argtypes, self.library.emu_unwritten.restype = [ctypes.c_size_t], ctypes.c_size_t
        self.library.emu_error.restype = ctypes.c_char_p

    def run(self, kernel: launch.Kernel, values: list, offsets: dict[str, int] | None = None) -> int:
        """Calls the C function; tensors are copied into guarded memory, and what it may write back.

        A tensor starts at a multiple of 256, or as many bytes past one as `offsets` has for its name. OUT and WORK start as 0xFF bytes
        (NaN, -1) that the kernel may not read, and OUT must be wholly written. None is a null pointer. Raises EmulatorError.
        """
        try:
            return self._run(kernel, values, offsets)
        finally:
            self.library.emu_reset(0)  # a library keeps nothing of its last launch

    def _run(self, kernel: launch.Kernel, values: list, offsets: dict[str, int] | None) -> int:
        self.library.emu_reset(int(self.reverse))
        guarded = Guarded(kernel, values, offsets or {}, torch.device("cpu"))
        for (name, kind, _, view), address in zip(guarded.tensors, guarded.addresses, strict=True):
            self.library.emu_region(name.encode(), address, view.numel(), KINDS.index(kind))
        result = kernel.bind(self.library)(*guarded.arguments, None)
        if error := self.library.emu_error().decode():
            raise EmulatorError(f"{kernel.name}: {self._with_source_lines(error)}")
        if result:
            return result
        for index, (name, kind, _, view) in enumerate(guarded.tensors):
            if kind == launch.OUT and (missing := self.library.emu_unwritten(index)):
                raise EmulatorError(f"{kernel.name}: {missing} of the {view.numel()} bytes of output {name} were never written")
        guarded.copy_back()
        return 0

    def _with_source_lines(self, error: str) -> str:
        """Replaces the place in the object by the file and line, where addr2line (which comes with g++) knows it."""
        def line(match: re.Match) -> str:
            address = hex(int(match[1], 16) - 1)  # of the call, not of what follows it
            done = subprocess.run(["addr2line", "-i", "-e", str(self.path), address], capture_output=True, text=True)
            frames = [Path(frame.split(" (")[0]).name for frame in done.stdout.splitlines()]  # without "(discriminator 1)"
            return "at " + next((frame for frame in frames if frame.split(":")[0] not in LIBRARY), "unknown")
        return re.sub(r"@\+(0x[0-9a-f]+)", line, error) if shutil.which("addr2line") else error


machine = functools.lru_cache(Machine)  # by source and order


def run_on_gpu(kernel: launch.Kernel, values: list, offsets: dict[str, int] | None = None, source: Path | None = None) -> int:
    """What Machine.run does, by this machine's GPU: of the checks, only that nothing around the tensors was written."""
    device = torch.device("cuda", torch.cuda.current_device())
    arch = launch.architecture(device)
    function = kernel.bind(ctypes.CDLL(str(build.build(source.stem, arch, source) if source else kernel.built(arch))))
    guarded = Guarded(kernel, values, offsets or {}, device)
    if error := function(*guarded.arguments, torch.cuda.current_stream(device).cuda_stream):
        return error
    torch.cuda.synchronize(device)
    guarded.check_surroundings()
    guarded.copy_back()
    return 0


class Guarded:
    """A call's arguments, each tensor copied to memory of its own with GUARD unused bytes of 0xFF around it."""

    def __init__(self, kernel: launch.Kernel, values: list, offsets: dict[str, int], device: torch.device):
        self.name = kernel.name
        self.arguments: list = []
        self.tensors: list[tuple] = []  # name, kind, the caller's tensor, its copy as bytes; HOST tensors are not among them
        self.addresses: list[int] = []  # of the copies, empty ones too, whose data_ptr() is null
        self.memory: list[torch.Tensor] = []
        for (name, kind), value in zip(kernel.arguments.items(), values, strict=True):
            kind = launch.INOUT if kind == launch.PEER else kind
            if not isinstance(value, torch.Tensor) or kind == launch.HOST:
                self.arguments.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
                continue
            size = value.numel() * value.element_size()
            memory = torch.full((size + 2 * GUARD + 512,), 0xFF, dtype=torch.uint8, device=device)
            first = -(-(memory.data_ptr() + GUARD) // 256) * 256 - memory.data_ptr() + offsets.get(name, 0)
            view = memory[first:first + size]
            if kind not in (launch.OUT, launch.WORK):
                view.copy_(value.reshape(-1).view(torch.uint8))
            self.addresses.append(memory.data_ptr() + first)
            self.arguments.append(self.addresses[-1])
            self.tensors.append((name, kind, value, view))
            self.memory.append(memory)

    def check_surroundings(self) -> None:
        """Raises EmulatorError if anything around a tensor is no longer 0xFF. (The emulator has seen each access; a GPU has not.)"""
        for (name, _, _, view), memory in zip(self.tensors, self.memory, strict=True):
            first = view.storage_offset()
            if (memory[:first] != 0xFF).any() or (memory[first + view.numel():] != 0xFF).any():
                raise EmulatorError(f"{self.name}: wrote outside {name}")

    def copy_back(self) -> None:
        """What the kernel may have written, to the caller's tensors."""
        for _, kind, value, view in self.tensors:
            if kind in (launch.OUT, launch.INOUT, launch.WORK):
                value.view(-1).view(torch.uint8).copy_(view)


@contextlib.contextmanager
def emulated(reverse: bool = False, offsets: dict[str, int] | None = None):
    """Within it, kernels' wrappers take CPU tensors and run on the emulator. The arguments are Machine's.

    With DSV4_TEST_GPU=1 the kernels run on this machine's GPU instead, on copies of the CPU tensors: the same tests then test the GPU.
    """
    def run(kernel: launch.Kernel, values: list) -> int:
        if ON_GPU:
            return run_on_gpu(kernel, values, offsets)
        return machine(build.SOURCES / f"{kernel.name}.cu", reverse).run(kernel, values, offsets)

    before, launch.emulator = launch.emulator, run
    try:
        yield
    finally:
        launch.emulator = before
