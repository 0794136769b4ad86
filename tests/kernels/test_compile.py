"""Every kernel source compiles for both GPUs without spills, and its C declaration is what its Python side declares."""

import ctypes
import importlib
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import dsv4.kernels
from dsv4.kernels import build
from dsv4.kernels.launch import HOST, IN, INOUT, OUT, PEER, WEIGHT, WORK, Kernel
from dsv4.ops import backend

ARCHITECTURES = ("sm_90a", "sm_100a")
# Instructions of Blackwell's tensor cores in the machine code: products by format, copies of scales to tensor memory, tensor copies.
BLACKWELL = {"nvfp4_linear": (r"UTCOMMA\.(4X|BLOCK16)", r"UTCCP\..*", r"UTMALDG\.2D"),
             "attention_sm100": ("UTCHMMA", r"LDTM\.x8", r"STTM\.x8", "UCGABAR_ARV", "UCGABAR_WAIT"),
             "index_scores_sm100": ("UTCOMMA", r"UTCCP\..*", r"UTMALDG\.2D", r"LDTM\.x8", "FFMA2")}


def kernels() -> dict[str, Kernel]:
    modules = [importlib.import_module(f"dsv4.kernels.{m.name}") for m in pkgutil.iter_modules(dsv4.kernels.__path__)]
    return {k.name: k for module in modules for k in vars(module).values() if isinstance(k, Kernel)}


def test_every_source_has_a_python_side_and_every_wrapper_is_an_operation():
    assert kernels().keys() == set(build.names()) and build.names()
    assert dsv4.kernels.wrappers().keys() <= backend._definitions.keys()


@pytest.mark.parametrize("name", build.names())
def test_c_declaration_equals_the_python_declaration(name):
    declaration = re.search(rf'extern "C" int {name}\((.*?)\)', (build.SOURCES / f"{name}.cu").read_text(), re.DOTALL)[1]
    kinds = {}
    for argument in (" ".join(a.split()) for a in declaration.split(",")):
        kind, argument_name = re.fullmatch(r"(.*?[ *])(\w+)", argument).groups()
        kinds[argument_name] = kind.strip()
    assert kinds.pop("stream") == "cudaStream_t"
    address = {kind: r"const \w+\*" for kind in (IN, WEIGHT)} | {kind: r"(?!const )\w+\*" for kind in (OUT, WORK, INOUT, PEER)}
    python = {int: r"int", float: r"float", HOST: r"(const )?\w+\*"} | address
    assert list(kinds) == list(kernels()[name].arguments)
    for argument, kind in kernels()[name].arguments.items():
        assert re.fullmatch(python[kind], kinds[argument]), f"{argument}: {kinds[argument]}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", build.names())
def test_compiles_without_spills(nvcc, kernel_cache, name, arch):
    """No register goes to local memory in any entry function of the file."""
    built = build.build(name, arch)
    entries = build.usage(built)
    assert bool(entries) == (name != "read_to_gpu") and all(name in e.entry for e in entries)
    for entry in entries:
        assert (entry.spill_stores, entry.spill_loads, entry.stack) == (0, 0, 0), entry
    assert arch in built.name
    kernels()[name].bind(ctypes.CDLL(str(built)))  # the object loads without a GPU, and has the function


@pytest.fixture
def nvdisasm():
    """PATH's, or that of the package nvidia-cuda-nvdisasm, which the tests' extra brings; the toolkit's own is not always there."""
    spec = importlib.util.find_spec("nvidia")
    folders = [str(f) for place in (spec.submodule_search_locations if spec else []) for f in Path(place).glob("cu*/bin")]
    found = shutil.which("nvdisasm") or shutil.which("nvdisasm", path=os.pathsep.join(folders))
    return found or pytest.skip("no nvdisasm (pip install nvidia-cuda-nvdisasm)")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("name", BLACKWELL)
def test_machine_code_for_blackwell(nvcc, nvdisasm, tmp_path, name, arch):
    """The products are those of the tensor cores, and nothing goes to local memory."""
    flags = [flag for flag in build.FLAGS if flag not in ("-shared", "-Xcompiler", "-fPIC")]
    subprocess.run([nvcc.path, *flags, "-gencode", f"arch=compute_{arch[3:]},code={arch}", "-cubin", "-o", tmp_path / "cubin",
                    build.SOURCES / f"{name}.cu"], check=True, capture_output=True)
    code = subprocess.run([nvdisasm, "-c", tmp_path / "cubin"], check=True, capture_output=True, text=True).stdout
    found = set(re.findall(r"[A-Z][A-Z0-9_]+(?:\.\w+)*", code))
    for instruction in BLACKWELL[name]:
        assert any(re.fullmatch(instruction, f) for f in found), instruction
    assert not any(f.split(".")[0] in ("LDL", "STL", "HMMA", "QMMA") for f in found)


def test_spills_would_be_seen(nvcc, tmp_path, monkeypatch):
    """A kernel that must spill: 200 live values in 32 registers."""
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "spilling.cu"
    source.write_text("""
        extern "C" __global__ void __launch_bounds__(1024, 2) spilling(const float* x, float* out, int n) {
            float v[200];
            #pragma unroll
            for (int i = 0; i < 200; i++) v[i] = x[i * 1024 + threadIdx.x];
            for (int k = 0; k < n; k++) {
                #pragma unroll
                for (int i = 0; i < 200; i++) v[i] = v[i] * v[(i + 7) % 200] + x[k];
            }
            float sum = 0;
            #pragma unroll
            for (int i = 0; i < 200; i++) sum += v[i] * i;
            out[threadIdx.x] = sum;
        }""")
    (entry,) = build.usage(build.build("spilling", "sm_90a", source))
    assert entry.entry == "spilling" and entry.registers <= 32 and entry.spill_stores > 0 and entry.spill_loads > 0
