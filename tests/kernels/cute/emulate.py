"""CuTeDSL kernels on CPU tensors: with `emulated()`, the wrappers of dsv4/kernels/cute run their PTX (ptx.py), or, with DSV4_TEST_GPU=1,
the GPU on copies of the tensors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from dsv4.kernels import build as cuda_build
from dsv4.kernels import launch
from dsv4.kernels.cute import build
from dsv4.kernels.cute.gemm import KERNELS, CuteKernel
from dsv4.kernels.cute.tiles import ARCHITECTURES, TILES, Tile
from dsv4.kernels.launch import OUT, WEIGHT, WORK

from ...emulator.emulator import ON_GPU, run_on_gpu
from .ptx import Machine, Program, captured

HERE = Path(__file__).parent
APART = 1 << 40  # bytes between two tensors' addresses


class Emulated:
    """One tile's kernel: its host function, linked with capture.c, and its PTX."""

    def __init__(self, tile: Tile, arch: str | None = None):
        self.tile, self.arch = tile, arch or ARCHITECTURES[tile.kind][0]
        self.kinds = list(KERNELS[tile].arguments.values())
        self.path = cuda_build.cache_folder() / capturing(tile, self.arch)
        if not self.path.exists():
            compile_kind(tile.kind, self.arch)
        about = json.loads(Path(f"{self.path}.txt").read_text())
        self.program, self.ptx = Program.parse(about["ptx"]), about["ptx"]
        self.library = ctypes.CDLL(str(self.path))
        self.function = getattr(self.library, about["call"])
        at, error, device = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        place = ctypes.pointer(at)
        for step, arguments in (("init", (place, error)), ("load_to_device", (place, device, error))):
            getattr(self.library, f"_mlir_{tile.name}_cuda_{step}")(addresses(arguments))
            assert error.value == 0

    def launch(self, values: list):
        """What the host function launches for these arguments: addresses and numbers."""
        types = {int: ctypes.c_int32, float: ctypes.c_float}
        held = [types.get(kind, ctypes.c_void_p)(v) for kind, v in zip(self.kinds, values, strict=True)]
        error = ctypes.c_int32()
        held += [ctypes.c_void_p(), error]
        found = captured(self.library, lambda: self.function(addresses(held), len(held)), [size for _, size in self.program.parameters])
        assert error.value == 0
        return found

    def run(self, values: list, seed: int) -> int:
        """As the C function: tensors, of which OUT must be wholly written and WORK may be, and numbers."""
        memory, arguments, weights = [], [], set()
        for i, (kind, value) in enumerate(zip(self.kinds, values, strict=True)):
            if value is None or kind in (int, float):
                arguments.append(value)
                continue
            arguments.append((i + 1) * APART)
            data = value.contiguous().view(torch.uint8).reshape(-1).numpy().copy()
            data.flags.writeable = kind in (OUT, WORK)
            if data.flags.writeable:
                data[:] = 0xFF
            memory.append((arguments[-1], data))
            weights |= {arguments[-1]} if kind == WEIGHT else set()
        machine = Machine(self.program, self.launch(arguments), memory, np.random.default_rng(seed), frozenset(weights))
        machine.run()
        for kind, value, (address, data) in zip(
                (k for k, v in zip(self.kinds, values, strict=True) if isinstance(v, torch.Tensor)),
                (v for v in values if isinstance(v, torch.Tensor)), memory, strict=True):
            if kind in (OUT, WORK):
                missing = int((~machine.written[address]).sum())
                assert kind == WORK or not missing, f"{missing} of {len(data)} bytes of an output were never written"
                value.view(torch.uint8).reshape(-1).copy_(torch.from_numpy(data))
        return 0


def capturing(tile: Tile, arch: str) -> str:
    """The name in the cache folder of a tile's host function that is linked with capture.c."""
    return f"capture-{build.target(tile, arch)}"


def compile_kind(kind: str, arch: str) -> None:
    """Makes what there is not of all tiles of a kind, by one process: the DSL starts in the time that it takes for a tile."""
    cache = cuda_build.cache_folder()
    names = {tile.name: tile for tile in TILES if tile.kind == kind and not (cache / capturing(tile, arch)).exists()}
    environment = {**os.environ, "CUTE_DSL_ARCH": arch, "CUTE_DSL_NO_CACHE": "1"}
    with cuda_build.building_folder(cache) as folder:
        command = [sys.executable, "-m", "dsv4.kernels.cute.compile", folder, *names]
        subprocess.run(command, env=environment, cwd=HERE.parents[2], check=True, capture_output=True)
        for name, tile in names.items():
            report, product, parts = Path(folder, f"{name}.json").read_text(), Path(folder, f"{name}.so"), Path(folder, f"{name}.parts")
            made = parts / "capture.so"
            sources = str(HERE / "capture.c"), str(parts / f"{name}.o")
            subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(made), *sources], check=True)
            call = re.search(r"void (_mlir_\w+_mlir_ciface_\w+)\(void \*\*args", (parts / f"{name}.h").read_text())[1]
            about = json.dumps({"call": call, "ptx": json.loads(report)["ptx"]})
            for target, result in ((build.target(tile, arch), (product, report)),  # made on the way: the tests of the object find it
                                   (capturing(tile, arch), (made, about))):
                cuda_build.compile_into(cache, target, lambda _, result=result: result)


def addresses(values) -> ctypes.Array:
    """An array of the addresses of ctypes values."""
    return (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])


emulated_kernel = functools.lru_cache(Emulated)


@contextlib.contextmanager
def emulated(seed: int = 0):
    """Within it, the GEMMs take CPU tensors. `seed` decides who goes first wherever that is open."""
    def run(kernel: CuteKernel, values: list) -> int:
        if ON_GPU:
            return run_on_gpu(kernel, values)
        return emulated_kernel(kernel.tile).run(values, seed)

    before, launch.emulator = launch.emulator, run
    try:
        yield
    finally:
        launch.emulator = before
