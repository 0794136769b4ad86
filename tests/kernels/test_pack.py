"""The pack kernel on the CPU emulator: every byte, factor and refusal the definition's (the torch code of packing.py)."""

from dataclasses import replace

import pytest
import torch

from dsv4.errors import UserError
from dsv4.formats import Weight
from dsv4.kernels import build, packing
from dsv4.kernels.experts import pack_experts
from dsv4.kernels.packing import Packing, packed_shape
from dsv4.ops.experts import Expert

from ..emulator.emulator import emulated, needs_gxx
from .test_packing import SHAPES
from .weights import KINDS, any_weight, pack_matrix, pack_pair

pytestmark = needs_gxx


def outcome(pack, *weights):
    try:
        return pack(*weights)
    except UserError as error:
        return str(error)


def check(*weights, **how):
    """What the kernel makes of one weight or a pair, once it was compared; bytes and factors, or an error's text."""
    pack = pack_matrix if len(weights) == 1 else pack_pair
    want = outcome(pack, *weights)
    with emulated(**how):
        got = outcome(pack, *weights)
    if isinstance(want, str):
        assert got == want
    else:
        assert got[1] == want[1] and torch.equal(got[0], want[0])
    return got


def drawn(rng, kind, rows, columns, **more):
    """As any_weight, NVFP4's scales of both signs."""
    weight = any_weight(rng, kind, rows, columns + (-columns % 32 if kind == "mxfp4" else 0), **more)
    if weight.kind == "nvfp4":
        weight.scale.view(torch.uint8).bitwise_or_(torch.randint(0, 8, weight.scale.shape, generator=rng, dtype=torch.uint8) // 7 * 128)
    return weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", [*SHAPES, (7, 4096), (257, 32)])
def test_shapes(rng, kind, rows, columns):
    check(drawn(rng, kind, rows, columns), reverse=bool(rows % 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", [(8, 32), (13, 16), (130, 544)])
def test_pairs(rng, kind, rows, columns):
    check(drawn(rng, kind, rows, columns), drawn(rng, kind, rows, columns), reverse=bool(rows % 2))


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 6, 127, 254, 255, 257, 260])
@pytest.mark.parametrize("kind", ["plain", "fp8", "fp8 fp32"])
def test_rows_of_any_number_of_bytes(rng, kind, columns):
    check(drawn(rng, kind, 19, columns))
    check(drawn(rng, kind, 19, columns), drawn(rng, kind, 19, columns))


@pytest.mark.parametrize("offset", [4, 8, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_places_in_a_larger_buffer(rng, kind, offset):
    """Tensors are slices of what was read, at multiples of 4 bytes (loader.py)."""
    weights = drawn(rng, kind, 24, 544), drawn(rng, kind, 24, 544)
    offsets = dict.fromkeys(("codes", "scales", "second_codes", "second_scales"), offset)
    check(weights[0], offsets=offsets)
    check(*weights, offsets=offsets | {"second_codes": 0})


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_of_rows_and_other_strides(rng, kind):
    whole = drawn(rng, kind, 300, 288)
    check(whole.rows(24, 299))
    check(whole.rows(128, 136))
    check(whole.rows(8, 80), whole.rows(8, 80))
    strided = replace(whole, payload=whole.payload.T.contiguous().T, scale=None if whole.scale is None else whole.scale.T.contiguous().T)
    assert not strided.payload.is_contiguous()
    check(strided)


def test_fp8_blocks(rng):
    for rows, columns, block in ((40, 700, (8, 256)), (40, 700, (24, 128)), (30, 300, (37, 301)), (7, 100, (7, 100)), (20, 512, (30, 384)),
                                 (40, 700, (12, 128)), (40, 700, (8, 64))):
        for kind in ("fp8", "fp8 fp32"):
            check(any_weight(rng, kind, rows, columns, block))
            check(any_weight(rng, kind, rows, columns, block), any_weight(rng, kind, rows, columns, block))
    check(any_weight(rng, "fp8", 300, 128).rows(3, 200))


def test_every_code_and_every_scale():
    """All e2m1 pairs under all 254 e4m3 scales; all e4m3 codes under E8M0 scales from the smallest to the largest."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(254, 1)
    scale = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)[:, None].repeat(1, 32)
    check(Weight("nvfp4", (254, 512), codes, scale.view(torch.float8_e4m3fn), 1.5, block=(1, 16)))
    numbers = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)[None].repeat(3, 1)
    for exponent in (0, 1, 127, 254):
        check(Weight("fp8", (3, 254), numbers.view(torch.float8_e4m3fn), torch.full((1, 2), exponent, dtype=torch.uint8), block=(128, 128)))


def test_any_words(rng):
    """4,096 random words of each kind of code: the inverse is right beyond single codes."""
    codes = torch.randint(0, 256, (64, 256), generator=rng, dtype=torch.uint8)
    check(Weight("nvfp4", (64, 512), codes, torch.full((64, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn), 1.0, block=(1, 16)))
    codes[codes & 127 == 127] = 0
    check(Weight("fp8", (64, 256), codes.view(torch.float8_e4m3fn), torch.full((1, 2), 127, dtype=torch.uint8), block=(128, 128)))


def test_mxfp4_range():
    """Offsets, groups of zeros and refusals, each alone and as the second of a pair."""
    codes, zeros = (torch.full((1, 32), x, dtype=torch.uint8) for x in (0x21, 0x21))
    zeros[:, :16] = 0x80

    def weight(low, high, codes=codes):
        return Weight("mxfp4", (1, 64), codes, torch.tensor([[low, high]], dtype=torch.uint8), block=(1, 32))

    for low, high in ((2, 128), (128, 254), (60, 186), (100, 100), (254, 254), (129, 130), (2, 2), (1, 100), (2, 129), (0, 0), (255, 200)):
        check(weight(low, high))
        check(weight(100, 110), weight(low, high))
        check(weight(low, high, zeros), weight(120, 130))
    for low in (0, 1, 255, 200):
        check(weight(low, 100, zeros))
        check(weight(low, 140, zeros))
    check(weight(0, 254, torch.zeros_like(zeros)))


def test_mxfp4_extremes_in_single_groups(rng):
    """The largest and the smallest live scale, at either end."""
    rows = 700
    weight = any_weight(rng, "mxfp4", rows, 32)
    weight.scale[0], weight.scale[rows - 1] = 60, 186
    data, factor = check(weight)
    assert factor == 2.0 ** (186 - 254 + 126)


def test_mxfp4_beyond_the_first_round_of_the_extremes(rng):
    """More than kMaxBlocks x kThreads groups."""
    rows, groups = 1 << 13, 33
    weight = Weight("mxfp4", (rows, 32 * groups), torch.full((rows, 16 * groups), 0x11, dtype=torch.uint8),
                    torch.full((rows, groups), 120, dtype=torch.uint8), block=(1, 32))
    weight.scale[-1, -1] = 200
    assert rows * groups > 1024 * 256 and check(weight)[1] == 2.0 ** (200 - 254 + 126)


def test_what_is_refused(rng):
    """In a corner, in each of a pair; the first one is told."""
    cases = {"fp8": "FP8 weights that are numbers, found NaN", "nvfp4": "NVFP4 scales that are numbers, found NaN",
             "fp8 fp32": "FP8 scales that are numbers, found NaN or infinity"}
    for kind, text in cases.items():
        for value in (0x7F, 0xFF):
            good, bad = (any_weight(rng, kind, 300, 272) for _ in range(2))
            if kind == "fp8":
                bad.payload.view(torch.uint8)[299, 271] = value
            elif kind == "nvfp4":
                bad.scale.view(torch.uint8)[299, 16] = value
            else:
                bad.scale[2, 2] = float("nan") if value == 0x7F else float("inf")
            for weights in ((bad,), (good, bad), (bad, good)):
                assert check(*weights) == f"packing: expected {text}"
    scale = any_weight(rng, "fp8", 20, 64)
    scale.scale[0, 0] = 255
    assert check(scale) == "packing: expected FP8 scales that are numbers, found NaN or infinity"
    for number in (0.0, float("inf"), 2.0**110, -1.0):
        assert "expected an NVFP4 global scale above 0" in check(replace(any_weight(rng, "nvfp4", 20, 64), global_scale=number))
    assert "bf16 holds exactly, found float32" in check(Weight.plain(torch.full((3, 8), 1.001)))
    check(Weight.plain(torch.randn(5, 40, generator=rng).bfloat16().float()))
    with emulated():
        for wrong in (torch.empty(1, 1, 4096, dtype=torch.uint8), torch.empty(1, 1, 4608, dtype=torch.int8)):
            with pytest.raises(UserError, match=r"expected a contiguous uint8 \[1, 1, 4608\]"):
                pack_matrix(any_weight(rng, "nvfp4", 16, 64), wrong)


@pytest.mark.parametrize("kind, where", [("nvfp4", "scale"), ("fp8", "payload"), ("fp8", "scale"), ("fp8 fp32", "scale")])
def test_the_host_looks_once(rng, kind, where):
    """At the end: nothing is raised before, and each weight's fault stands in its own record."""
    good, bad = any_weight(rng, kind, 20, 64), any_weight(rng, kind, 20, 64)
    if kind == "fp8 fp32":
        bad.scale[0, 0] = float("nan")
    else:
        getattr(bad, where).view(torch.uint8).view(-1)[0] = 0xFF
    matrix, pair = (torch.empty(packed_shape(good.kind, 20, 64, rows), dtype=torch.uint8) for rows in (16, 8))
    with emulated():
        many = Packing(6, torch.device("cpu"))
        many.matrix(0, good, matrix)
        many.pair(1, good, bad, pair)
        many.matrix(3, good, matrix)
        many.pair(4, bad, good, pair)
        assert [number for number, wrong in enumerate(many._found[:, 0].tolist()) if wrong] == [2, 4]
        with pytest.raises(UserError, match="packing: expected .* that are numbers, found NaN"):
            many.factors()


def test_groups_of_mxfp4_that_are_zero_but_for_one_code():
    """Wherever it is: a group is two threads'."""
    scale = torch.tensor([[140, 150]], dtype=torch.uint8).repeat(32, 1)
    for fill in (0, 0x80):
        codes = torch.full((32, 32), fill, dtype=torch.uint8)
        for row in range(32):
            codes[row, row % 16 + 16 * (row // 16)] = 0x10
        check(Weight("mxfp4", (32, 64), codes, scale, block=(1, 32)))


def test_experts_of_both_fp4_formats(rng):
    """Factors by expert: of MXFP4 those that came from the device."""
    for kind in ("nvfp4", "mxfp4", "fp8", "plain"):
        experts = [Expert(*(drawn(rng, kind, *shape) for shape in ((32, 64), (64, 32), (32, 64)))) for _ in range(4)]
        if kind == "mxfp4":
            for n, expert in enumerate(experts):
                expert.w3.scale[5, 1], expert.w2.scale[3, 0] = 140 + n, 150 + n
        want = pack_experts(experts[:3], experts[3])
        with emulated():
            got = pack_experts(experts[:3], experts[3])
        assert all(torch.equal(a, b) for a, b in zip(got[:5], want[:5], strict=True)) and got[5:] == want[5:]
        assert kind != "mxfp4" or len(set(want.factors.view(-1).tolist())) > 4


def test_the_host_and_the_kernel_have_the_same_numbers():
    source = (build.SOURCES / "pack.cu").read_text()
    assert f"kNatural = {packing._MX_NATURAL}, kHighest = {packing._MX_HIGHEST};" in source and f"kRecord = {packing._RECORD}" in source
    assert f"kCodeIsNaN = {packing._CODE_IS_NAN}, kScaleIsNaN = {packing._SCALE_IS_NAN}" in source
