"""The interpreter of PTX: its arithmetic against Python's, its formats against torch's, and planted faults that it must find."""

import re

import numpy as np
import pytest
import torch

from dsv4.formats import e2m1_to_float
from dsv4.kernels.cute.gemm import KERNELS, gemm, gemm_nvfp4
from dsv4.kernels.cute.grouped import grouped_nvfp4_linear, grouped_swiglu_nvfp4
from dsv4.kernels.cute.tiles import Tile
from dsv4.kernels.launch import OUT
from dsv4.kernels.layouts import grouped_gate_up, grouped_operand, nvfp4_operand
from dsv4.ops.grouped import group_choices_ref, grouped_nvfp4_linear_ref, grouped_swiglu_nvfp4_ref
from dsv4.ops.nvfp4 import nvfp4_linear_ref, to_nvfp4_ref, unpack_nvfp4

from ...emulator.emulator import ON_GPU
from ..weights import any_weight
from . import emulate, ptx
from .emulate import emulated, emulated_kernel
from .ptx import Launch, Machine, Program, PtxError, TensorMap
from .test_grouped_gemm import exact_values, multiply, operands
from .test_grouped_nvfp4 import spread, tokens, weights_of

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the CPU's interpreter")
SMALL, LARGE = Tile("bf16", 64, 128), Tile("bf16", 128, 192, cluster=2)
SPLIT, FOUR = Tile("bf16", 64, 64, split=2), Tile("bf16", 64, 64, split=4)
NVFP4, OVERLAPPING = Tile("nvfp4", 128, 128), Tile("nvfp4", 128, 256)
PAIR = Tile("nvfp4", 128, 128, cluster=2)
SWIGLU, SWIGLU_PAIR, ROWS = Tile("nvfp4_swiglu", 128, 128), Tile("nvfp4_swiglu", 128, 128, cluster=2), Tile("nvfp4_grouped", 128, 256)
BF16_ROWS, E4M3_ROWS = Tile("bf16_grouped", 128, 128), Tile("e4m3_grouped", 128, 192)


def test_formats_are_torchs(rng):
    bytes_ = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(ptx.E4M3, bytes_.view(torch.float8_e4m3fn).double().numpy(), equal_nan=True)
    x = torch.randn(4096, generator=rng) * torch.exp2(torch.randint(-126, 127, (4096,), generator=rng).float())
    x = torch.cat([x, torch.tensor([0.0, -0.0, float("inf"), 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, float("nan")])])
    assert torch.equal(torch.from_numpy(ptx.bf16(x.numpy()).view(np.int16))[:-1], x.bfloat16().view(torch.int16)[:-1])
    codes = torch.arange(16, dtype=torch.uint8)
    assert np.array_equal(ptx.E2M1, e2m1_to_float(codes).double().numpy())
    assert np.isnan((ptx.bf16(x.numpy()).astype(np.uint32) << 16).view(np.float32)[-1])


def run_snippet(body: str, warps: int = 1, blocks: int = 1, seed: int = 0) -> np.ndarray:
    """The lanes' %r0, stored to memory, after these statements. `blocks`: of a cluster."""
    text = f"""
.visible .entry snippet(
\t.param .b64 snippet_param_0
)
{{
\tld.param.b64 %rd0, [snippet_param_0];
\tmov.u32 %r9, %tid.x;
\tmov.u32 %r8, %ctaid.x;
\tmad.lo.s32 %r7, %r8, {32 * warps}, %r9;
\tmul.wide.s32 %rd1, %r7, 4;
\tadd.s64 %rd2, %rd0, %rd1;
{body}
\tst.global.b32 [%rd2], %r0;
\tret;
}}
"""
    out = np.zeros(128 * warps * blocks, np.uint8)
    launch = Launch((blocks, 1, 1), (32 * warps, 1, 1), blocks, 1024, [(1 << 40).to_bytes(8, "little")])
    Machine(Program.parse(text), launch, [(1 << 40, out)], np.random.default_rng(seed)).run()
    return out.view(np.int32)


@pytest.mark.parametrize("statement,expected", [
    ("div.s32 %r0, %r1, %r2;", 3), ("rem.s32 %r0, %r1, %r2;", -1), ("shr.s32 %r0, %r1, 1;", -4),
    ("shr.u32 %r0, %r1, 28;", 15), ("shl.b32 %r0, %r1, 33;", 0), ("shf.l.wrap.b32 %r0, %r2, %r1, 3;", -49),
    ("shf.l.wrap.b32 %r0, %r2, %r1, 32;", -7), ("mul.hi.s32 %r0, %r1, 1000000000;", -2), ("min.s32 %r0, %r1, %r2;", -7),
    ("mul.lo.s32 %r0, %r1, %r2;", 14), ("mad.lo.s32 %r0, %r1, %r2, 1;", 15), ("xor.b32 %r0, %r1, -1;", 6), ("neg.s32 %r0, %r1;", 7),
    ("sub.s32 %r0, %r2, %r1;", 5), ("mov.b32 %r0, 0fBF800000;", -(2**31) + 0x3F800000),
])
def test_arithmetic(statement, expected):
    assert (run_snippet(f"mov.b32 %r1, -7;\nmov.b32 %r2, -2;\n{statement}") == expected).all()


TURNS = """
    mov.b32 %r0, 0;
    setp.lt.s32 %p0, %r9, 32;
    @%p0 bra FIRST;
    bar.sync 1, 64;
    mov.b32 %r0, 1;
    bra.uni END;
FIRST:
    bar.arrive 1, 64;
END:"""


def test_named_barriers():
    """One who arrives goes on, one who syncs waits for it; no arrival may be left over."""
    assert run_snippet(TURNS, 2).tolist() == [0] * 32 + [1] * 32
    with pytest.raises(PtxError, match="ends with warps at a named barrier that others have not come to"):
        run_snippet(TURNS.replace("bar.arrive 1, 64;", "bar.arrive 1, 64;\n    bar.arrive 2, 64;"), 2)
    with pytest.raises(PtxError, match="nobody can go on"):
        run_snippet(TURNS.replace("bar.arrive 1, 64;", ""), 2)


EXCHANGE = """
    mov.b32 %r1, __dynamic_shmem__0;
    setp.ne.s32 %p0, %r9, 0;
    @%p0 bra $L__met;
    mov.b32 %r2, 1;
    mbarrier.init.shared.b64 [%r1], %r2;
    mov.b32 %r2, 512;
    mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r1], %r2;
$L__met:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    xor.b32 %r3, %r8, 1;
    mapa.shared::cluster.u32 %r4, %r1, %r3;
    shl.b32 %r5, %r9, 4;
    add.s32 %r6, %r4, %r5;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r6+64], {%r9, %r9, %r9, %r8}, [%r4];
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0, 1000;
    add.s32 %r6, %r1, %r5;
    ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r6+64];
    mad.lo.s32 %r0, %r13, 100, %r11;"""


@pytest.mark.parametrize("error,pattern,becomes", [
    ("which is not written", r"mbarrier\.try_wait[^;]*;", ""),
    ("a block that has ended", r"mbarrier\.try_wait.*", "mov.b32 %r0, 0;"),
    ("an mbarrier that is not initialised", r"mbarrier\.init[^;]*;\s+mov[^;]*;\s+mbarrier\.arrive[^;]*;", ""),
    ("more bytes than its mbarrier expects", ", 512;", ", 496;"),
    ("nobody can go on", ", 512;", ", 528;"),
    ("outside of the 1024 bytes", r"\[%r6\+64\], \{", "[%r6+528], {"),
    ("no multiple of 16", r"\[%r6\+64\], \{", "[%r6+72], {"),
    ("shared memory of several blocks", r"\[%r4\];", "[%r1];"),
    ("shared memory of block 3 of a cluster of 2", "xor.b32 %r3, %r8, 1", "or.b32 %r3, %r8, 3"),
    ("another block's shared memory", r"add\.s32 %r6, %r1, %r5;", "add.s32 %r6, %r4, %r5;"),
])
def test_stores_to_another_block(error, pattern, becomes):
    """Each lane sends its number and its block's to its fellow. Faults are found in one of a few orders."""
    for seed in range(4):
        assert run_snippet(EXCHANGE, blocks=2, seed=seed).tolist() == [*range(100, 132), *range(32)]
    broken, count = re.subn(pattern, becomes, EXCHANGE, flags=re.DOTALL)
    assert count
    with pytest.raises(PtxError, match=error):
        for seed in range(20):
            run_snippet(broken, blocks=2, seed=seed)


def test_branches_part_and_meet_again():
    """Lanes below 5 count to their number, the others skip; all add one."""
    body = """
    mov.b32 %r0, 0;
    setp.ge.s32 %p1, %r9, 5;
    @%p1 bra $L__end;
$L__loop:
    setp.ge.s32 %p2, %r0, %r9;
    @%p2 bra $L__end;
    add.s32 %r0, %r0, 1;
    bra.uni $L__loop;
$L__end:
    elect.sync %r3|%p3, -1;
    selp.b32 %r4, 100, 1, %p3;
    add.s32 %r0, %r0, %r4;
"""
    assert list(run_snippet(body)) == [(n if n < 5 else 0) + (100 if n == 0 else 1) for n in range(32)]


def test_a_tensor_map_is_what_the_host_function_was_given(dsl):
    """x [70, 3 groups, 136] and out [70, 3, 264] of bf16; boxes of the tile, 128-byte swizzle."""
    tensors = [(i + 1) << 40 for i in range(5)]
    launch = emulated_kernel(LARGE).launch(tensors + [70, 264, 136, 3, 10])
    maps = [TensorMap.decode(p) for p in launch.parameters if len(p) == 128]
    assert maps == [TensorMap(1 << 40, 2, (136, 70, 3), (2, 3 * 136 * 2, 136 * 2), (64, 128, 1), True),
                    TensorMap(2 << 40, 2, (136, 264, 3), (2, 136 * 2, 264 * 136 * 2), (64, 96, 1), True),  # half of the tile's 192 rows
                    TensorMap(5 << 40, 2, (264, 70, 3), (2, 3 * 264 * 2, 264 * 2), (64, 64, 1), True)]
    # 70 rows are one tile and, to fill the cluster, another one; two columns of tiles in three groups, on 10 multiprocessors.
    assert (launch.grid, launch.block, launch.cluster) == ((10, 1, 1), (384, 1, 1), 2)


def without_wait(number):
    """(pattern, replacement): the wait of that number, as they stand in the text of an NVFP4 kernel: empty, free, full, done."""
    wait, other = r"mbarrier\.try_wait[^;]*;", r"(?:(?!mbarrier\.try_wait).)*"
    return r"\A(" + f"{other}{wait}" * number + rf"{other}){wait}", r"\1mov.pred P1, -1;"


def entry(part, becomes):
    """(pattern, replacement): a part of a plan's entries, counted from 1, is another number; or, for None, one more."""
    change = rf"add.s32 \{part + 1}, \{part + 1}, 1;" if becomes is None else rf"mov.b32 \{part + 1}, {becomes};"
    return r"(ld\.global\.v4\.b32\s+\{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}[^;]*;)", r"\1 " + change


LAST_ENTRY = r"\A(.*?)(ld\.global\.b32 \s*(%r\d+)[^;]*;)", r"\1\2 add.s32 \3, \3, -1;"  # (pattern, replacement): is left out
FAULTS = [  # (what is broken, tile, pattern, what it becomes)
    ("products are not waited for", SMALL, r"wgmma\.wait_group\.sync\.aligned\s+0;", "wgmma.wait_group.sync.aligned 1;"),
    ("a stage is given back while it is read", SMALL, r"wgmma\.wait_group\.sync\.aligned\s+1;", ""),
    ("a stage is never given back", SMALL, r"mbarrier\.arrive\.shared\.b64[^;]*;", ""),
    ("fewer bytes are expected than come", SMALL, r"mov\.b32 (\s*%r\d+), 24576;", r"mov.b32 \1, 24512;"),
    ("more bytes are expected than come", SMALL, r"mov\.b32 (\s*%r\d+), 24576;", r"mov.b32 \1, 24640;"),
    ("the output is stored before it is complete", SMALL, r"bar\.sync\s+%r\d+, 128;", ""),
    ("a buffer is filled while it is stored", LARGE, r"cp\.async\.bulk\.wait_group\.read\s+\d;", ""),
    ("no swizzle in the descriptors", SMALL, "4611686293305360384", "274877972480"),
    ("groups of eight rows at the wrong distance", SMALL, "4611686293305360384", str(4611686293305360384 + (64 << 32))),
    ("the weight comes to one block alone", LARGE, r"mov\.b16 (\s*%rs\d+), 3;", r"mov.b16 \1, 1;"),
    ("blocks do not wait for each other's sums", SPLIT, *without_wait(2)),
    ("fewer bytes of sums are expected than come", SPLIT, r"mov\.b32 (\s*%r\d+), 8192;", r"mov.b32 \1, 8176;"),
    ("more bytes of sums are expected than come", SPLIT, r"mov\.b32 (\s*%r\d+), 8192;", r"mov.b32 \1, 8208;"),
    ("a block's sums in the place of another one's", FOUR, r"selp\.b32 (\s*%r\d+), -1, 0,", r"selp.b32 \1, 0, 0,"),
    ("sums of other columns", SPLIT, r"mapa\.shared::cluster\.u32 (\s*%r\d+, %r\d+), 1;", r"mapa.shared::cluster.u32 \1, 0;"),
    ("sums of a block that is not there", SPLIT, r"mapa\.shared::cluster\.u32 (\s*%r\d+, %r\d+), 1;", r"mapa.shared::cluster.u32 \1, 2;"),
    ("a sum is in the wrong register", SMALL, r"stmatrix(\S+ \[%r\d+\]), \{(%r\d+), (%r\d+),", r"stmatrix\1, {\3, \2,"),
    ("the first product adds to what was there", SMALL, r"setp\.ne\.b32 (\s*%p\d+, %r\d+), 0;(\s+shl)", r"setp.ne.b32 \1, -1;\2"),
    ("x is asked for before the kernel before has ended", SMALL, r"griddepcontrol\.wait;", ""),
    ("an instruction that it does not know", SMALL, r"fence\.proxy", "mystery.proxy"),
    ("nvfp4: a stage is filled while it is read", NVFP4, *without_wait(0)),
    ("nvfp4: a tile's sums go where others are read", NVFP4, *without_wait(1)),
    ("nvfp4: overlapping sums go where others are read", OVERLAPPING, *without_wait(1)),
    ("nvfp4: a stage is read before it has come", NVFP4, *without_wait(2)),
    ("nvfp4: sums are read before they are complete", NVFP4, *without_wait(3)),
    ("nvfp4: sums are given back while they are read", NVFP4, r"tcgen05\.wait::ld\.sync\.aligned;", ""),
    ("nvfp4: overlapping sums lie too near", OVERLAPPING, r"mad\.lo\.s32 (\s*%r\d+, %r\d+), 208,", r"mad.lo.s32 \1, 176,"),
    ("nvfp4: scales of two steps in one place", NVFP4, r"add\.s32 (\s*%r\d+, %r\d+), 484;", r"add.s32 \1, 488;"),
    ("nvfp4: scales at the wrong place in shared memory", NVFP4, r"add\.s32 (\s*%r\d+, %r\d+), 175104;", r"add.s32 \1, 176128;"),
    ("nvfp4: scales to columns that are not allocated", NVFP4, r"mov\.b32 (\s*%r\d+), 512;", r"mov.b32 \1, 256;"),
    ("nvfp4: no swizzle in the descriptors", NVFP4, "4611756662049538048", str(4611756662049538048 - (2 << 61))),
    ("nvfp4: fewer columns in the instruction", NVFP4, "136316032", str(136316032 - (2 << 17))),
    ("nvfp4: every thread of the warp starts a product", NVFP4, r"@%p\d+ bra \s*\$L__BB0_\d+;(\s+mov\.b64 \s*\{_)", r"\1"),
    ("nvfp4: tensor memory is not freed", NVFP4, r"tcgen05\.dealloc[^;]*;", ""),
    ("nvfp4: a buffer is filled while it is stored", OVERLAPPING, r"cp\.async\.bulk\.wait_group\.read\s+\d;", ""),
    ("nvfp4: a pair's lower block does not hear", PAIR, r"mov\.b16 (\s*%rs\d+), 3;", r"mov.b16 \1, 1;"),
    ("nvfp4: a pair's lower block tells itself", PAIR, r"and\.b32 (\s*%r\d+, %r\d+), -16777224;", r"and.b32 \1, -8;"),
    ("nvfp4: a pair's upper block does not wait for the lower one's stage", PAIR, r"mov\.b32 (\s*%r\d+), (57344);", r"mov.b32 \1, 28672;"),
    ("nvfp4: a pair is one block's instruction", PAIR, "270533760", "136316032"),
    ("swiglu: a stage is filled while it is read", SWIGLU, *without_wait(0)),
    ("swiglu: a tile's sums go where others are read", SWIGLU, *without_wait(1)),
    ("swiglu: sums are read before they are complete", SWIGLU, *without_wait(3)),
    ("swiglu: sums are given back while they are read", SWIGLU, r"tcgen05\.wait::ld\.sync\.aligned;", ""),
    ("swiglu: a tile has more rows than the expert", SWIGLU, *entry(3, 128)),
    ("swiglu: the weight is another expert's", SWIGLU, *entry(1, 0)),
    ("swiglu: a row too far down", SWIGLU, *entry(2, None)),
    ("swiglu: scales are another expert's", SWIGLU, *entry(4, 0)),
    ("swiglu: w1's scale is w3's", SWIGLU, r"ld\.global\.v2\.b32 \s*\{(%r\d+), (%r\d+)\}", r"ld.global.v2.b32 {\2, \1}"),
    ("swiglu: the last entry is left out", SWIGLU, *LAST_ENTRY),
    ("swiglu: nothing is clamped", SWIGLU, r"setp\.lt\.f32 (\s*%p\d+), (%r\d+), (%r\d+);", r"setp.lt.f32 \1, \2, \2;"),
    ("swiglu: codes in another order", SWIGLU, r"\{e2m1_0, e2m1_1,", "{e2m1_1, e2m1_0,"),
    ("swiglu: scales in another order", SWIGLU, r"(cvt\.rn\.satfinite\.e4m3x2\.f32 \S+) (\S+), (\S+);", r"\1 \3, \2;"),
    ("swiglu: a routing weight is another row's", SWIGLU, r"(st\.global\.b32 \s*\[%rd\d+)\]", r"\1+4]"),
    ("swiglu: a pair's lower block tells itself", SWIGLU_PAIR, r"and\.b32 (\s*%r\d+, %r\d+), -16777224;", r"and.b32 \1, -8;"),
    ("grouped: overlapping sums go where others are read", ROWS, *without_wait(1)),
    ("grouped: a tile has more rows than the expert", ROWS, *entry(3, 128)),
    ("bf16 of experts: a tile has more rows than the expert", BF16_ROWS, *entry(3, 128)),
    ("bf16 of experts: a tile has fewer rows than the expert", BF16_ROWS, *entry(3, 64)),
    ("bf16 of experts: the weight is another expert's", BF16_ROWS, *entry(1, 0)),
    ("bf16 of experts: a row too far down", BF16_ROWS, *entry(2, None)),
    ("bf16 of experts: the last entry is left out", BF16_ROWS, *LAST_ENTRY),
    ("bf16 of experts: values in another order", BF16_ROWS, r"(st\.global\.v4\.b32\s+\[%rd\d+\S*) \{(%r\d+), (%r\d+),", r"\1 {\3, \2,"),
    ("bf16 of experts: rows leave before they are complete", BF16_ROWS, r"bar\.sync\s+%r\d+, 128;", ""),
    ("bf16 of experts: a warpgroup without rows keeps the stages", BF16_ROWS, r"(.*)mbarrier\.arrive\.shared\.b64[^;]*;", r"\1"),
    ("e4m3 of experts: scales are another expert's", E4M3_ROWS, *entry(4, 0)),
    ("e4m3 of experts: the weight is another expert's", E4M3_ROWS, *entry(1, 0)),
    ("e4m3 of experts: a warpgroup without rows keeps its turn", E4M3_ROWS, r"(.*)bar\.arrive[^;]*;", r"\1"),
    ("grouped: values in another order", ROWS, r"(st\.global\.v4\.b32\s+\[%rd\d+\S*) \{(%r\d+), (%r\d+),", r"\1 {\3, \2,"),
]


@pytest.mark.parametrize("tile,pattern,becomes", [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_planted_faults_are_found(dsl, rng, monkeypatch, tile, pattern, becomes):
    """Each by an error, or by a result that is far off in one of a few orders."""
    good = emulated_kernel(tile)
    broken = object.__new__(emulate.Emulated)
    broken.__dict__.update(good.__dict__)
    text, count = re.subn(pattern, becomes, good.ptx, flags=re.DOTALL)
    assert count, "the fault is nowhere in this PTX"
    broken.program = Program.parse(text)
    monkeypatch.setattr(emulate, "emulated_kernel", lambda _: broken)
    count = 3 if tile in (BF16_ROWS, E4M3_ROWS) else 2  # with two columns of tiles: experts' tiles are not run in the order of their rows
    for module in ("gemm", "grouped"):
        monkeypatch.setattr(f"dsv4.kernels.cute.{module}.processors", lambda device: count)
    if tile.grouped and not tile.nvfp4:
        groups = group_choices_ref(spread(rng, [40, 0, 3, 130]), 4)
        given = operands(rng, tile.kind, groups, 64 * 11, 200)
        x, w = exact_values(given, groups)
        expert = torch.searchsorted(groups.offsets[1:], torch.arange(173, dtype=torch.int32), right=True)
        run, exact = (lambda: multiply(given, groups, tile)), torch.einsum("rk,rnk->rn", x, w[expert])
    elif tile.grouped:
        groups, x = tokens(rng, spread(rng, [40, 0, 3, 130]), 4, 288)
        w1, w3 = weights_of(rng, 4, 96, 288, 8.0), weights_of(rng, 4, 96, 288, 8.0)
        w, weights = grouped_gate_up(w1, w3), torch.rand(173, 1, generator=rng) + 0.5

        def values(hidden):
            return torch.cat([unpack_nvfp4(hidden.of(groups, e)) for e in (0, 2, 3)])
        run, exact = {
            "nvfp4_swiglu": (lambda: values(grouped_swiglu_nvfp4(x, groups, w, weights, 10.0, tile)),
                             lambda: values(grouped_swiglu_nvfp4_ref(x, groups, w, weights, 10.0))),
            "nvfp4_grouped": (lambda: grouped_nvfp4_linear(x, groups, grouped_operand(w1), tile),
                              lambda: grouped_nvfp4_linear_ref(x, groups, grouped_operand(w1)).float())}[tile.kind]
        exact = exact()
    elif tile.kind == "nvfp4":
        # Many tiles of one stage or two: a block goes round its stages, its sums and its buffers, and nothing holds it back but barriers.
        weight = any_weight(rng, "nvfp4", 6 * tile.columns, 272)
        x, w = to_nvfp4_ref(torch.randn(260, 272, generator=rng), True), nvfp4_operand(weight)
        run, exact = (lambda: gemm_nvfp4(x, w, tile)), nvfp4_linear_ref(x, w).float()
    else:
        x, w = (torch.randn(n, 64 * 11, generator=rng).bfloat16() for n in (140, 200))
        run, exact = (lambda: gemm(x, w, tile)), x.float() @ w.float().T
    for seed in range(4):
        try:
            with emulated(seed):
                got = run()
        except (PtxError, AssertionError):
            return
        if not ((got.float() - exact).norm() < 0.01 * exact.norm()):
            return
    pytest.fail("went unseen")


@pytest.mark.parametrize("what", ["out", "w"])
def test_accesses_outside_of_the_tensors_and_writes_to_inputs_are_found(dsl, rng, monkeypatch, what):
    """The kernel is told of a longer tensor than there is; of an output that is an input."""
    kernel = KERNELS[SPLIT]
    x, w, out = (torch.randn(*s, generator=rng).bfloat16() for s in ((64, 64), (128, 64), (64, 128)))
    sizes = {"m": 64, "n": 136 if what == "w" else 128, "k": 64, "batch": 1, "processors": 2}
    values = {"x": x, "w": w, "x_scale": None, "w_scale": None, "out": torch.empty(64, sizes["n"], dtype=torch.bfloat16)} | sizes
    if what == "out":
        values["out"] = out[:60].contiguous()
    assert kernel.arguments["out"] == OUT
    with emulated(), pytest.raises(PtxError, match="which is in no tensor"):
        kernel(**values)
