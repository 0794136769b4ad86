"""Every tile compiles, without a GPU, to the instructions that it should, without spills, and with the emulator's descriptors."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from dsv4.kernels.cute import build
from dsv4.kernels.cute.gemm import KERNELS
from dsv4.kernels.cute.tiles import ARCHITECTURES, COLUMNS_OUT, SCALE_PART, STEPS, TILES, TURN
from dsv4.kernels.launch import OUT, Kernel

from ...emulator.emulator import machine, needs_gxx
from .emulate import emulated_kernel

ARCH = "sm_90a"
HOPPER, NVFP4 = [t for t in TILES if not t.nvfp4], [t for t in TILES if t.nvfp4]
INSTRUCTION = {False: "m64n{}k16.f32.bf16.bf16", True: "m64n{}k32.f32.e4m3.e4m3"}  # scaled or not


@pytest.fixture(params=HOPPER, ids=lambda tile: tile.name)
def tile(request, dsl):
    return built(request.param)


@pytest.fixture(params=[(t, arch) for arch in ARCHITECTURES["nvfp4"] for t in NVFP4], ids=lambda p: f"{p[0].name}-{p[1]}")
def nvfp4(request, dsl):
    tile, arch = request.param
    if arch == ARCHITECTURES["nvfp4"][0]:
        return built(tile), arch
    build.build_ahead(NVFP4, arch)  # by one child process
    return tile, arch


def built(tile):
    emulated_kernel(tile)  # which makes the object too, so that it is compiled once for all tests
    build.build(tile, ARCHITECTURES[tile.kind][0])
    return tile


def ptxas(nvcc, tmp_path, ptx, arch):
    """What it says about registers, spills and the rest."""
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    done = subprocess.run([nvcc.path, "-cubin", "-gencode", f"arch=compute_{arch[3:]},code={arch}", "-Xptxas", "-v", str(source), "-o",
                           str(tmp_path / "kernel.cubin")], capture_output=True, text=True)
    if "Unsupported .version" in done.stderr:
        pytest.skip("this ptxas is older than the PTX")
    assert done.returncode == 0, done.stderr
    return done.stderr


def encodings():
    """Those of encodings.cu."""
    out = torch.empty(10, dtype=torch.int32)
    assert machine(Path(__file__).parent / "encodings.cu", False).run(Kernel("encodings", {"out": OUT}), [out]) == 0
    halves = [int(v) for v in out.long() % 2**32]
    return [low + (high << 32) for low, high in zip(halves[::2], halves[1::2], strict=True)]


def test_compiles_to_the_tensor_cores_and_the_copy_engine(tile):
    report = build.report(tile, ARCH)
    ptx, threads = report.ptx, (tile.rows // 64 + 1) * 128
    assert report.stack == 0 and ".local" not in ptx
    assert report.registers * threads <= 65536 and f".reqntid {threads}," in ptx and ".target sm_90a" in ptx

    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.([\w.]+)", ptx)
    assert set(products) == {INSTRUCTION[tile.scaled].format(tile.columns)}
    assert len(products) == 4 * tile.turn  # a stage is 4 instructions wide

    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::(\w+)\.global\S*", ptx)
    multicast = len(re.findall(r"cp\.async\.bulk\.tensor\S*multicast::cluster", ptx))
    x_rank = "2" if tile.grouped else "3"  # of x and the output; of several experts these have no third dimension
    first_w = [] if tile.grouped else ["3"]  # before the kernel in front has ended
    assert sorted(rank for rank, _ in loads) == sorted(["2"] * tile.scaled + [x_rank, "3"] + first_w)
    assert multicast == (2 if tile.cluster > 1 else 0)
    parts = tile.columns // COLUMNS_OUT
    assert len(re.findall(rf"cp\.async\.bulk\.tensor\.{x_rank}d\.global\.shared::cta", ptx)) == (0 if tile.split > 1 else parts)
    assert f", {tile.stage_bytes};" in ptx  # what a stage's barrier expects

    # Operands and output pass through the copy engine alone; e4m3 reads the weight's scales. Of several experts: how many entries there
    # are, and an entry (twice); rows of which TMA would store too many leave the buffers by 16 bytes.
    scales = (2 * TURN if tile.in_turns else tile.columns // SCALE_PART * (1 + tile.turn)) if tile.scaled else 0  # before the loop, within
    read, written = (sorted(re.findall(rf"{what}\.global\.(\S+)", ptx)) for what in ("ld", "st"))
    assert read == (["b32"] * (1 + scales) + ["v4.b32"] * 2 if tile.grouped else ["b32"] * scales)
    # Split: for every place in the cluster a thread sends what it has of that share, or stores it, two rows, with the others' added. After
    # that no block needs to wait for another one's end, which those do that share loads.
    pieces = tile.columns // 8 if tile.split > 1 else 0
    assert written == (["v4.b32"] * (parts * 4) if tile.grouped else ["b32"] * (2 * pieces))
    assert ptx.count("ld.shared.v4.b32") == (len(written) if tile.grouped else (tile.split - 1) * pieces)
    assert ptx.count("st.async") == ptx.count("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32") == pieces
    assert ptx.count("barrier.cluster.wait") == (1 if tile.split > 1 else 2 if tile.cluster > 1 else 0)
    assert tile.split == 1 or f", {tile.received_bytes};" in ptx  # what their barrier expects
    assert ("setmaxnreg" in ptx) == (tile.grouped or (tile.scaled and tile.rows == 128))


def test_it_overlaps_the_kernel_before_and_the_one_behind(tile):
    """The launch says so; and the first weights, which alone may be read before, stand in front of the wait. Not so of several experts,
    whose first place the kernel before has written."""
    kernel = emulated_kernel(tile)
    if tile.grouped:
        assert "griddepcontrol" not in kernel.ptx
        return
    assert kernel.launch([1 << 40] * 5 + [70, 264, 256, 1, 132]).early
    steps = "cp.async.bulk.tensor", "griddepcontrol.launch_dependents", "griddepcontrol.wait"
    asked, launches, waits = (kernel.ptx.find(step) for step in steps)
    assert 0 < asked < launches < waits and kernel.ptx.count("griddepcontrol") == 2


def test_products_run_without_waiting_for_each_other(tile, nvcc, tmp_path):
    """ptxas puts a wait behind each wgmma where it cannot follow the sums, and says so (C75..)."""
    said = ptxas(nvcc, tmp_path, build.report(tile, ARCH).ptx, ARCH)
    assert "Used" in said and "C75" not in said and "wgmma" not in said, said
    assert "0 bytes spill stores, 0 bytes spill loads" in said


@needs_gxx
def test_descriptors_are_those_that_the_emulator_decodes(tile):
    """The bits around the address; test_gemm.py runs what they point to."""
    constants = re.findall(r"(?:or\.b64|add\.s64) \s*%rd\d+, %rd\d+, (\d{15,});", build.report(tile, ARCH).ptx)
    assert len(constants) >= 2 and {int(constant) & ~0x3FFF for constant in constants} == {encodings()[0]}  # x and w


def test_object_has_the_function_and_loads_without_a_gpu(tile):
    KERNELS[tile].bind(ctypes.CDLL(str(build.build(tile, ARCH))))


def test_serialized_products_would_be_seen(dsl, nvcc, tmp_path):
    """Reading a sum while its product is in flight."""
    ptx = build.report(built(TILES[0]), ARCH).ptx
    said = ptxas(nvcc, tmp_path, re.sub(r"wgmma\.wait_group\.sync\.aligned\s+0;", "wgmma.wait_group.sync.aligned 1;", ptx), ARCH)
    assert "C75" in said


def test_nvfp4_compiles_to_the_tensor_cores_and_the_copy_engine(nvfp4):
    tile, arch = nvfp4
    report = build.report(tile, arch)
    ptx, group = report.ptx, f"cta_group::{tile.cluster}"
    assert report.stack == 0 and ".local" not in ptx
    assert report.registers * 192 <= 65536 and ".reqntid 192," in ptx and f".target {arch}" in ptx
    assert set(re.findall(r"cta_group::\d", ptx)) == {group}

    products = re.findall(r"tcgen05\.mma\.\S+", ptx)
    assert set(products) == {f"tcgen05.mma.{group}.kind::mxf4nvf4.block_scale.block16.collector::a::discard"} and len(products) == STEPS
    assert len(re.findall(r"tcgen05\.cp\.cta_group::\d\.32x128b\.warpx4", ptx)) == (1 + tile.columns // 128) * STEPS
    assert len(re.findall(r"tcgen05\.commit\S+", ptx)) == 2 == len(re.findall(r"tcgen05\.(?:alloc|dealloc)\S+", ptx))
    assert len(re.findall(r"tcgen05\.commit\S+multicast::cluster", ptx)) == (2 if tile.cluster == 2 else 0)

    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::\w+\.global\S*", ptx)
    assert sorted(loads) == (["2", "3", "3", "4"] if tile.grouped else ["2", "2", "3", "3"]) and "multicast::cluster.L2" not in ptx
    parts = tile.columns // COLUMNS_OUT
    assert len(re.findall(r"tcgen05\.ld\.sync\.aligned\.32x32b\.x64", ptx)) == parts == ptx.count("tcgen05.wait::ld")
    assert f", {tile.stage_bytes * tile.cluster};" in ptx  # what a stage's barrier expects, of a pair that of both
    # Operands pass through the copy engine alone. And sums are handed on between fences.
    read, written = (sorted(re.findall(rf"{what}\.global\.(\S+)", ptx)) for what in ("ld", "st"))
    if tile.kind == "nvfp4":  # a row's scale; the output is the copy engine's too
        assert (read, written) == (["b32"], [])
    elif tile.kind == "nvfp4_grouped":  # how many entries, an entry (twice), a row's and an expert's scale; 16 bytes of a row
        assert (read, written) == (["b32"] * 3 + ["v4.b32"] * 2, ["v4.b32"] * parts * 8)
    else:  # two scales of an expert, a row's choice and its weight; half a word of scales, 32 codes, a row's scale
        assert (read, written) == (["b32"] * 4 + ["v2.b32"] + ["v4.b32"] * 2, ["b16"] * parts + ["b32"] + ["v4.b32"] * parts)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta", ptx)) == (0 if tile.grouped else parts)
    assert ptx.count("tcgen05.fence::before_thread_sync") == 3 and ptx.count("tcgen05.fence::after_thread_sync") == 5


@pytest.mark.parametrize("tile", [t for t in NVFP4 if t.kind == "nvfp4_swiglu"], ids=lambda t: t.name)
def test_swiglu_is_computed_as_it_is_defined(dsl, tile):
    """Quotients are divisions, the exponential is the accurate one, roundings are the hardware's; NaN is let through."""
    ptx, values = build.report(built(tile), ARCHITECTURES[tile.kind][0]).ptx, tile.columns // 2
    assert ptx.count("div.rn.f32") == values + 2 * values // 16 and ptx.count("rcp.rn.f32") == values // 16
    assert not re.findall(r"(?:div|rcp)\.(?:approx|full)|(?:min|max)\.f32", ptx)
    assert ptx.count("ex2.approx.ftz.f32") == ptx.count("fma.rm.f32") == values  # 2^fraction, times 2^whole
    assert ptx.count("cvt.rn.bf16.f32") == 2 * values and ptx.count("cvt.rn.satfinite.e4m3x2.f32") == values // 32
    assert ptx.count("cvt.rn.satfinite.e2m1x2.f32") == values // 2


def test_nvfp4_does_not_spill(nvfp4, nvcc, tmp_path):
    """By this nvcc's ptxas too, which is not the DSL's."""
    tile, arch = nvfp4
    said = ptxas(nvcc, tmp_path, build.report(tile, arch).ptx, arch)
    assert "Used" in said and "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said


@needs_gxx
def test_nvfp4_descriptors_are_those_that_the_emulator_decodes(nvfp4):
    """Operands, scales, instruction. Of a pair's the emulator has none: there the product has 256 rows, in bits 27 and 28."""
    tile, arch = nvfp4
    ptx, (_, values, scales, *shapes) = build.report(tile, arch).ptx, encodings()
    constants = re.findall(r"or\.b64 \s*%rd\d+, %rd\d+, (\d{12,});", ptx)
    assert sorted(constants) == sorted([str(values), str(scales)] * 2)  # of x and w
    shape = shapes[tile.columns // 256] + (tile.cluster - 1 << 27)
    assert set(re.findall(r"or\.b32 \s*%r\d+, %r\d+, (\d{8,});", ptx)) == {str(shape)}


def test_nvfp4_object_has_the_function_and_loads_without_a_gpu(nvfp4):
    tile, arch = nvfp4
    KERNELS[tile].bind(ctypes.CDLL(str(build.build(tile, arch))))
