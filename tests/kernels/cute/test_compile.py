"""Every tile compiles, without a GPU, to the instructions that it should, without spills, and with the emulator's descriptors."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from dsv4.kernels.cute import build
from dsv4.kernels.cute.gemm import KERNELS
from dsv4.kernels.cute.tiles import COLUMNS_OUT, TILES, TURN
from dsv4.kernels.launch import OUT, Kernel

from ...emulator.emulator import machine, needs_gxx
from .emulate import ARCH, emulated_kernel

INSTRUCTION = {"bf16": "m64n{}k16.f32.bf16.bf16", "e4m3": "m64n{}k32.f32.e4m3.e4m3"}


@pytest.fixture(params=TILES, ids=lambda tile: tile.name)
def tile(request, dsl):
    return built(request.param)


def built(tile):
    emulated_kernel(tile)  # which makes the object too, so that it is compiled once for all tests
    build.build(tile, ARCH)
    return tile


def test_compiles_to_the_tensor_cores_and_the_copy_engine(tile):
    report = build.report(tile, ARCH)
    ptx, threads = report.ptx, (tile.rows // 64 + 1) * 128
    assert report.stack == 0 and ".local" not in ptx
    assert report.registers * threads <= 65536 and f".reqntid {threads}," in ptx and ".target sm_90a" in ptx

    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.([\w.]+)", ptx)
    assert set(products) == {INSTRUCTION[tile.kind].format(tile.columns)}
    assert len(products) == (4 if tile.kind == "bf16" else 4 * TURN)  # a stage is 4 instructions wide

    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::(\w+)\.global\S*", ptx)
    multicast = len(re.findall(r"cp\.async\.bulk\.tensor\S*multicast::cluster", ptx))
    assert sorted(rank for rank, _ in loads) == (["3", "3"] if tile.kind == "bf16" else ["2", "3", "3"])
    assert multicast == (1 if tile.cluster > 1 else 0)
    stores = len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.global\.shared::cta", ptx))
    assert stores == (0 if tile.split > 1 else tile.columns // COLUMNS_OUT)
    assert f", {tile.stage_bytes};" in ptx  # what a stage's barrier expects

    # Operands and output pass through the copy engine alone; e4m3 reads the weight's scales, split blocks each other's sums.
    assert len(re.findall(r"ld\.global", ptx)) == (0 if tile.kind == "bf16" else 2 * TURN)
    assert ("st.global" in ptx) == (tile.split > 1) == ("ld.shared::cluster" in ptx)
    assert ("setmaxnreg" in ptx) == (tile.kind == "e4m3" and tile.rows == 128)


def test_products_run_without_waiting_for_each_other(tile, nvcc, tmp_path):
    """ptxas puts a wait behind each wgmma where it cannot follow the sums, and says so (C75..)."""
    source = tmp_path / "kernel.ptx"
    source.write_text(build.report(tile, ARCH).ptx)
    done = subprocess.run([nvcc.path, "-cubin", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", str(source), "-o",
                           str(tmp_path / "kernel.cubin")], capture_output=True, text=True)
    if "Unsupported .version" in done.stderr:
        pytest.skip("this ptxas is older than the PTX")
    assert done.returncode == 0, done.stderr
    assert "Used" in done.stderr and "C75" not in done.stderr and "wgmma" not in done.stderr, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


@needs_gxx
def test_descriptors_are_those_that_the_emulator_decodes(tile):
    """The bits around the address; test_gemm.py runs what they point to."""
    out = torch.empty(2, dtype=torch.int32)
    assert machine(Path(__file__).parent / "encodings.cu", False).run(Kernel("encodings", {"out": OUT}), [out]) == 0
    low, high = (int(v) for v in out.long() % 2**32)
    constants = re.findall(r"or\.b64 \s*%rd\d+, %rd\d+, (\d{15,});", build.report(tile, ARCH).ptx)
    assert len(constants) >= 2 and set(constants) == {str(low + (high << 32))}  # x and w


def test_object_has_the_function_and_loads_without_a_gpu(tile):
    KERNELS[tile].bind(ctypes.CDLL(str(build.build(tile, ARCH))))


def test_serialized_products_would_be_seen(dsl, nvcc, tmp_path):
    """Reading a sum while its product is in flight."""
    ptx = build.report(built(TILES[0]), ARCH).ptx
    source = tmp_path / "kernel.ptx"
    source.write_text(re.sub(r"wgmma\.wait_group\.sync\.aligned\s+0;", "wgmma.wait_group.sync.aligned 1;", ptx))
    done = subprocess.run([nvcc.path, "-cubin", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", str(source), "-o",
                           str(tmp_path / "kernel.cubin")], capture_output=True, text=True)
    assert "C75" in done.stderr or "Unsupported .version" in done.stderr
