"""The child process of build.py: compiles tiles for one architecture into shared objects, with no GPU. This module imports the DSL.

    CUTE_DSL_ARCH=sm_90a python -m dsv4.kernels.cute.compile FOLDER NAME...

The DSL makes a host function that takes addresses of its arguments, builds the TMA descriptors and launches. A few lines of C++ around it
give it the interface of the kernels of ../cuda and load its code onto each GPU that it is first called on. nvcc links both with the DSL's
static runtime and CUDA's. For each NAME, FOLDER gets NAME.so and NAME.json (registers, stack, ptx), and a line "NAME" on stdout says so.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Uint8, Uint16
from cutlass.cute.runtime import make_ptr

from ..build import find_nvcc
from .gemm_sm90 import Gemm
from .gemm_sm90_grouped import GroupedGemm
from .gemm_sm100 import Nvfp4Gemm
from .gemm_sm100_grouped import GroupedNvfp4Gemm
from .tiles import TILES, Tile

# The arguments of the C function by kind, in their order: what an address points to, or the type of a value.
_GEMM = {"x_scale": Float32, "w_scale": Float32, "out": BFloat16}, {"m": Int32, "n": Int32, "k": Int32, "batch": Int32, "processors": Int32}
ARGUMENTS = {
    "bf16": ({"x": BFloat16, "w": BFloat16} | _GEMM[0], _GEMM[1]),
    "e4m3": ({"x": Float8E4M3FN, "w": Float8E4M3FN} | _GEMM[0], _GEMM[1]),
    **{kind: ({"x": value, "w": value, "x_scale": Float32, "w_scale": Float32, "plan": Int32, "counts": Int32, "out": BFloat16},
              {"m": Int32, "n": Int32, "k": Int32, "experts": Int32, "entries": Int32, "processors": Int32})
       for kind, value in (("bf16_grouped", BFloat16), ("e4m3_grouped", Float8E4M3FN))},
    "nvfp4": ({"x": Uint8, "w": Uint8, "x_scale": Int32, "w_scale": Int32, "row_scales": Float32, "out": BFloat16},
              {"m": Int32, "n": Int32, "k": Int32, "processors": Int32, "scale": Float32}),
    **{kind: ({"x": Uint8, "w": Uint8, "x_scale": Int32, "w_scale": Int32, "row_scales": Float32, "scales": Float32, "plan": Int32,
               "counts": Int32, "order": Int32, "weights": Float32, "out": out, "out_scales": Uint16, "out_row_scales": Float32},
              {"m": Int32, "n": Int32, "k": Int32, "experts": Int32, "entries": Int32, "scale_tiles": Int32, "processors": Int32,
               "limit": Float32, "scale": Float32}) for kind, out in (("nvfp4_grouped", BFloat16), ("nvfp4_swiglu", Int32))},
}
KERNELS = {"bf16": Gemm, "e4m3": Gemm, "bf16_grouped": GroupedGemm, "e4m3_grouped": GroupedGemm,
           "nvfp4": Nvfp4Gemm, "nvfp4_grouped": GroupedNvfp4Gemm, "nvfp4_swiglu": GroupedNvfp4Gemm}
SHIM = """
// Declared here and not included: an object of one CUDA release must not depend on another one's headers.
#include <pthread.h>  // and not <mutex>, with which this took three times as long to compile: 0.33 s a tile
extern "C" {
int cudaGetDevice(int*);
void %(prefix)s_init(void**);            // (&library, &error)
void %(prefix)s_load_to_device(void**);  // (&library, &device, &error)
void %(call)s(void**, int);              // (addresses of all arguments, of the error; how many)

static int load_to(int device) {
    static void* library;
    static bool made, loaded[64];
    void* at = &library;
    int error = 0;
    if (device >= 64) return 101;  // cudaErrorInvalidDevice
    if (!made) {
        void* arguments[] = {&at, &error};
        %(prefix)s_init(arguments);
        if (error) return error;
        made = true;
    }
    if (!loaded[device]) {
        void* arguments[] = {&at, &device, &error};
        %(prefix)s_load_to_device(arguments);
        loaded[device] = !error;
    }
    return error;
}

static int load() {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    int device, error = cudaGetDevice(&device);
    if (error) return error;
    pthread_mutex_lock(&mutex);
    error = load_to(device);
    pthread_mutex_unlock(&mutex);
    return error;
}

int %(name)s(%(declaration)s, void* stream) {
    int error = load();
    if (error) return error;
    void* arguments[] = {%(addresses)s, &stream, &error};
    %(call)s(arguments, sizeof arguments / sizeof *arguments);
    return error;
}
}
"""


def shim(tile: Tile, header: str) -> str:
    """The C++ source for the object whose header the DSL wrote."""
    name, (addresses, values) = tile.name, ARGUMENTS[tile.kind]
    call = re.search(r"void (_mlir_\w+_mlir_ciface_\w+)\(void \*\*args", header)[1]
    declaration = ", ".join([f"const void* {a}" for a in addresses] +
                            [f"{'float' if t is Float32 else 'int'} {v}" for v, t in values.items()])
    return SHIM % {"name": name, "prefix": f"_mlir_{name}_cuda", "call": call, "declaration": declaration,
                   "addresses": ", ".join(f"&{a}" for a in (*addresses, *values))}


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of the cubin's one kernel. Spilled registers lie on the stack.

    From the ELF's .nv.info sections: records of a format byte, a kind byte and 2 bytes of size (format 4) or value.
    """
    at, = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    found = {}
    for i in range(count):
        kind, = struct.unpack_from("<I", cubin, at + i * size + 4)
        offset, length = struct.unpack_from("<QQ", cubin, at + i * size + 24)
        if kind != 0x70000000:  # SHT_CUDA_INFO
            continue
        place = offset
        while place < offset + length:
            form, record, extent = struct.unpack_from("<BBH", cubin, place)
            if form == 4 and record in (0x2F, 0x11) and extent == 8:  # register count, frame size: (symbol, value)
                found[record] = max(found.get(record, 0), struct.unpack_from("<II", cubin, place + 4)[1])
            place += 4 + (extent if form == 4 else 0)
    return found[0x2F], found[0x11]


def compile_tile(tile: Tile, folder: Path) -> None:
    """folder/NAME.so and folder/NAME.json."""
    parts = folder / f"{tile.name}.parts"  # a folder a tile: the DSL names its files by the types of the arguments alone
    parts.mkdir()
    addresses, values = ARGUMENTS[tile.kind]
    pointers = [make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=16) for t in addresses.values()]
    made = cute.compile(KERNELS[tile.kind](tile), *pointers, *[t(1) for t in values.values()], cuda.CUstream(0),
                        options=f"--keep-ptx --keep-cubin --dump-dir={parts}")
    made.export_to_c(file_path=str(parts), file_name=tile.name, function_prefix=tile.name)
    source = parts / "shim.cpp"
    source.write_text(shim(tile, (parts / f"{tile.name}.h").read_text()))
    nvcc = find_nvcc()
    runtime = next(Path(cutlass.__file__).parents[2].glob("cu1*/lib/libcuda_dialect_runtime_static.a"))
    command = [nvcc.path, *nvcc.link, "-shared", "-O2", "-Xcompiler", "-fPIC", str(source), str(parts / f"{tile.name}.o"), str(runtime),
               "-o", str(folder / f"{tile.name}.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tile.name} does not link: {' '.join(command)}\n{done.stdout}{done.stderr}")
    registers, stack = usage(made.__cubin__)
    (folder / f"{tile.name}.json").write_text(json.dumps({"registers": registers, "stack": stack, "ptx": made.__ptx__}))


def main() -> None:
    folder, wanted = Path(sys.argv[1]), set(sys.argv[2:])
    for tile in TILES:
        if tile.name in wanted:
            compile_tile(tile, folder)
            print(tile.name, flush=True)


if __name__ == "__main__":
    main()
