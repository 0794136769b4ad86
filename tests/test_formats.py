"""dsv4/formats.py against slow definitions: one element at a time, from the bit fields of each format, in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from dsv4 import formats
from dsv4.formats import (
    Weight,
    e8m0_to_float,
    from_reciprocal,
    mxfp4_largest_exponent,
    mxfp4_to_nvfp4,
    nvfp4_global_scale,
    quantize_fp8_block,
    quantize_mxfp4,
    quantize_nvfp4,
    round_e2m1,
)

# ------------------------------------------------------------------------------------------- the formats by their bit fields


def e2m1(code):
    """1 sign, 2 exponent, 1 mantissa bit, bias 1."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if code >> 3 else value


def e4m3(byte):
    """1 sign, 4 exponent, 3 mantissa bits, bias 7; no infinity, NaN where exponent and mantissa are all ones."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa * 2.0 ** -9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if byte >> 7 else value


def e8m0(byte):
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def fp32(x):
    """A python float rounded once to fp32 (overflow: infinity, as the hardware does)."""
    with np.errstate(over="ignore"):
        return float(np.float32(x))


VALID_E4M3 = [b for b in range(256) if b & 127 != 127]
E4M3_SORTED = sorted((e4m3(b), b) for b in range(127))  # not negative


def nearest(x, table):
    """Index into a sorted [(value, code)] of the value nearest to the Fraction x >= 0; a tie goes to the even code."""
    best = min(range(len(table)), key=lambda i: (abs(Fraction(table[i][0]) - x), table[i][1] & 1))
    return table[best][1]


def bits(tensor):
    """fp32 -> int32 bit patterns, so that -0.0 and 0.0 differ and NaN equals itself."""
    return tensor.contiguous().view(torch.int32)


def assert_bit_equal(got, want):
    """`want` a list of rows of python floats that fp32 holds."""
    want = torch.tensor(want, dtype=torch.float64).float()
    assert got.dtype == torch.float32 and got.shape == want.shape
    wrong = (bits(got) != bits(want)).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} differ, first {wrong[0].tolist()}: {got[tuple(wrong[0])]} for {want[tuple(wrong[0])]}"


def random_bytes(generator, *shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def shuffled(codes, count, generator):
    """`count` bytes in which every one of `codes` occurs."""
    assert count >= len(codes)
    picks = torch.cat([torch.arange(len(codes)), torch.randint(0, len(codes), (count - len(codes),), generator=generator)])
    return torch.tensor(codes, dtype=torch.uint8)[picks[torch.randperm(count, generator=generator)]]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


# ------------------------------------------------------------------------------------------------------------ dequantise


def nvfp4_weight(generator, global_scale=1.0, rows=32, columns=128):
    payload = shuffled(list(range(256)), rows * columns // 2, generator).view(rows, columns // 2)
    scale = shuffled(VALID_E4M3, rows * columns // 16, generator).view(rows, columns // 16)
    return Weight("nvfp4", (rows, columns), payload, scale.view(torch.float8_e4m3fn), global_scale, block=(1, 16))


def slow_four_bit(weight, scale_value, finish, block):
    nibbles = weight.payload.tolist()
    scales = weight.scale.view(torch.uint8).tolist()
    return [[finish(e2m1(nibbles[o][i // 2] >> 4 * (i % 2) & 15) * scale_value(scales[o][i // block]))
             for i in range(weight.shape[1])] for o in range(weight.shape[0])]


def test_the_slow_definitions_agree_with_torch_on_every_code():
    # The definitions above are the yardstick of this file: check them against torch's own E4M3 and E8M0 decoders.
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for table, dtype in ((e4m3, torch.float8_e4m3fn), (e8m0, torch.float8_e8m0fnu)):
        want = torch.tensor([table(b) for b in range(256)], dtype=torch.float64).float()
        got = every.view(dtype).float()
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got[~got.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("global_scale", [1.0, fp32(0.0123), 2.0 ** -13, fp32(3.1e-39), fp32(7e30)])
def test_nvfp4_dequantizes_every_nibble_and_scale_bit_exactly(generator, global_scale):
    weight = nvfp4_weight(generator, global_scale)
    assert_bit_equal(weight.dequantize(), slow_four_bit(weight, e4m3, lambda v: fp32(v * global_scale), 16))


@pytest.mark.parametrize("stored", [1.0, fp32(81.3), fp32(20641.2), fp32(1e-3), 2.0 ** 20])
def test_trap_15_compressed_tensors_global_scale_divides(generator, stored):
    weight = from_reciprocal(nvfp4_weight(generator), stored)
    assert_bit_equal(weight.dequantize(), slow_four_bit(weight, e4m3, lambda v: fp32(v / stored), 16))
    # What a kernel that multiplies sees: 1/stored, rounded once; two roundings against one are at most 1.5 ulp apart.
    assert weight.global_scale == fp32(1 / stored)
    multiplied = Weight("nvfp4", weight.shape, weight.payload, weight.scale, weight.global_scale, block=(1, 16)).dequantize()
    torch.testing.assert_close(multiplied, weight.dequantize(), rtol=1.5 * 2.0 ** -23, atol=0)


def test_mxfp4_dequantizes_every_nibble_and_scale_bit_exactly(generator):
    payload = shuffled(list(range(256)), 20 * 256, generator).view(20, 256)
    scale = shuffled(list(range(255)), 20 * 16, generator).view(20, 16)
    weight = Weight("mxfp4", (20, 512), payload, scale, block=(1, 32))
    assert_bit_equal(weight.dequantize(), slow_four_bit(weight, e8m0, fp32, 32))


@pytest.mark.parametrize("kind", ["E8M0", "F32"])
@pytest.mark.parametrize("shape,block", [((48, 80), (16, 16)), ((70, 150), (32, 64)), ((5, 7), (128, 128)), ((3, 129), (1, 128))])
def test_fp8_blocks_dequantize_bit_exactly_with_ragged_edges(generator, kind, shape, block):
    count = shape[0] * shape[1]
    codes = shuffled(VALID_E4M3, max(count, 254), generator)[:count].view(shape)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if kind == "E8M0":
        scale = torch.randint(0, 255, grid, dtype=torch.uint8, generator=generator)
        number = [[e8m0(b) for b in row] for row in scale.tolist()]
    else:
        scale = torch.rand(grid, generator=generator) * 3e-3
        number = scale.double().tolist()
    weight = Weight("fp8", shape, codes.view(torch.float8_e4m3fn), scale, block=block)
    rows = codes.tolist()
    assert_bit_equal(weight.dequantize(), [[fp32(e4m3(rows[o][i]) * number[o // block[0]][i // block[1]])
                                            for i in range(shape[1])] for o in range(shape[0])])


def test_fp8_decodes_every_code(generator):
    codes = torch.tensor(VALID_E4M3, dtype=torch.uint8).view(2, 127)
    weight = Weight("fp8", (2, 127), codes.view(torch.float8_e4m3fn), torch.full((1, 1), 127, dtype=torch.uint8), block=(128, 128))
    assert_bit_equal(weight.dequantize(), [[e4m3(b) for b in row] for row in codes.tolist()])


def test_trap_14_e8m0_bytes_are_reinterpreted_never_cast():
    every = torch.arange(255, dtype=torch.int32).to(torch.uint8)
    assert_bit_equal(e8m0_to_float(every)[None], [[e8m0(b) for b in range(255)]])
    as_stored = torch.tensor([2.0 ** -7, 1.0, 2.0 ** 5]).to(torch.float8_e8m0fnu)
    assert as_stored.to(torch.uint8).tolist() == [0, 1, 32]  # what a numeric cast would make of them
    assert e8m0_to_float(as_stored).tolist() == [2.0 ** -7, 1.0, 32.0]
    assert math.isnan(float(e8m0_to_float(torch.tensor([255], dtype=torch.uint8))))


def test_negative_scales_are_numbers(generator):
    weight = nvfp4_weight(generator)  # holds every valid E4M3 code, the negative ones too
    assert int(weight.scale.view(torch.int8).min()) < 0 and weight.problem() is None
    weight.scale.view(torch.uint8)[31, 7] = 0xFF
    assert weight.problem() == "an E4M3 scale that is NaN at [31, 7]"


def some_weights(generator):
    w = torch.randn(40, 96, generator=generator)
    nvfp4 = quantize_nvfp4(w)
    return [nvfp4, from_reciprocal(nvfp4, 77.7), quantize_mxfp4(w), quantize_fp8_block(w, (16, 32)),
            quantize_fp8_block(w, (16, 64), ue8m0=False), Weight.plain(w.bfloat16()), Weight.plain(w)]


def test_chunks_do_not_change_the_values(generator, monkeypatch):
    whole = [weight.dequantize() for weight in some_weights(generator)]
    monkeypatch.setattr(formats, "_CHUNK", 96 * 7)  # 7 rows at a time, also across FP8 block edges
    for before, weight in zip(whole, some_weights(generator.manual_seed(7)), strict=True):
        assert torch.equal(bits(before), bits(weight.dequantize()))


def test_another_dtype_is_the_fp32_value_rounded_once(generator):
    for weight in some_weights(generator):
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(weight.dequantize(dtype), weight.dequantize().to(dtype))


def test_rows_are_views_and_dequantize_like_the_whole(generator):
    for weight in some_weights(generator):
        full = weight.dequantize()
        for start, stop in ((0, 40), (0, 16), (16, 32), (5, 9), (15, 33), (39, 40), (8, 8)):
            part = weight.rows(start, stop)
            assert part.shape == (stop - start, 96)
            assert torch.equal(part.dequantize(), full[start:stop]), (weight.kind, start, stop)
        inner = weight.rows(7, 37).rows(4, 20)
        assert torch.equal(inner.dequantize(), full[11:27])
        assert inner.payload.untyped_storage().data_ptr() == weight.payload.untyped_storage().data_ptr()
        with pytest.raises(IndexError, match="rows 3:41 of a weight with 40 rows"):
            weight.rows(3, 41)


def test_nbytes_counts_payload_scales_and_global_scale(generator):
    nvfp4, _, mxfp4, fp8, fp8_f32, bf16, full = some_weights(generator)
    assert nvfp4.nbytes == 40 * 48 + 40 * 6 + 4
    assert mxfp4.nbytes == 40 * 48 + 40 * 3
    assert fp8.nbytes == 40 * 96 + 3 * 3
    assert fp8_f32.nbytes == 40 * 96 + 4 * 3 * 2
    assert (bf16.nbytes, full.nbytes) == (2 * 40 * 96, 4 * 40 * 96)
    moved = nvfp4.to("cpu")
    assert moved.kind == "nvfp4" and torch.equal(moved.dequantize(), nvfp4.dequantize())


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_bad_scales_are_named(generator, byte):
    nvfp4, divided, mxfp4, fp8, fp8_f32, plain, _ = some_weights(generator)
    assert all(weight.problem() is None for weight in (nvfp4, divided, mxfp4, fp8, fp8_f32, plain))
    nvfp4.scale.view(torch.uint8)[3, 2] = byte
    assert nvfp4.problem() == "an E4M3 scale that is NaN at [3, 2]"
    mxfp4.scale[1, 0] = byte
    assert mxfp4.problem() == (None if byte == 0x7F else "an E8M0 scale of 0xFF, which is NaN at [1, 0]")
    fp8_f32.scale[0, 1] = math.nan if byte == 0x7F else math.inf
    assert fp8_f32.problem() == "a block scale that is NaN or infinite at [0, 1]"


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
def test_a_global_scale_must_be_finite_and_above_zero(generator, number):
    weight = nvfp4_weight(generator)
    weight.global_scale = number
    assert weight.problem() == f"expected a finite global scale above zero, found {number}"
    assert from_reciprocal(nvfp4_weight(generator), number).problem() is not None


# ------------------------------------------------------------------------------------------------------------ quantisers

E2M1_SORTED = [(e2m1(code), code) for code in range(8)]


def slow_e2m1(x):
    """Code of a python float, by distance to all eight magnitudes; ties to the even code."""
    return nearest(min(Fraction(abs(x)), Fraction(6)), E2M1_SORTED) | (8 if x < 0 else 0)


def slow_power_of_two(amax, largest):
    """The E8M0 byte of the smallest 2^k with amax <= largest * 2^k."""
    if amax == 0:
        return 0
    k = -127
    while Fraction(amax) > Fraction(largest) * Fraction(2) ** k:
        k += 1
    return k + 127


def edge_matrix(generator, columns):
    """Rows of random values of all sizes, zeros, subnormals, ties of E2M1 and E4M3, fp32's largest."""
    random = torch.randn(24, columns, generator=generator) * torch.exp2(torch.randint(-40, 30, (24, 1), generator=generator).float())
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    rows = [torch.zeros(columns), torch.full((columns,), 1e-45), torch.full((columns,), 2.0 ** -126),
            torch.randn(columns, generator=generator) * 1e-40, ties.repeat(columns // 8), -ties.repeat(columns // 8) * 2.0 ** -9,
            torch.arange(columns) * 0.5, torch.full((columns,), -448.0), torch.full((columns,), torch.finfo(torch.float32).max),
            torch.nn.functional.one_hot(torch.tensor(columns - 1), columns).float() * 3e-6]
    return torch.cat([random, torch.stack(rows)])


def test_round_e2m1_at_every_tie_and_its_neighbours():
    points = []
    for low, high in zip(formats.E2M1_VALUES[:7], formats.E2M1_VALUES[1:8], strict=True):
        tie = np.float32((low + high) / 2)
        points += [np.nextafter(tie, np.float32(0)), tie, np.nextafter(tie, np.float32(9))]
    points += [0.0, 1e-45, 5.999, 6.0, 7.0, 3e38, *formats.E2M1_VALUES[:8]]
    points = [float(p) for p in points] + [-float(p) for p in points]
    assert round_e2m1(torch.tensor(points)).tolist() == [slow_e2m1(p) for p in points]


def slow_codes(weight):
    return [[weight.payload[o, i // 2].item() >> 4 * (i % 2) & 15 for i in range(weight.shape[1])] for o in range(weight.shape[0])]


def test_quantize_mxfp4_matches_the_slow_definition(generator):
    w = edge_matrix(generator, 64)
    got = quantize_mxfp4(w)
    rows, scales, codes = w.double().tolist(), [], []
    for row in rows:
        scales.append([slow_power_of_two(max(map(abs, row[b:b + 32])), 6) for b in (0, 32)])
        # Dividing by a power of two is exact in fp32 but for results below 2^-126, all of which round to 0.
        codes.append([slow_e2m1(x / 2.0 ** (scales[-1][i // 32] - 127)) for i, x in enumerate(row)])
    assert got.scale.tolist() == scales
    assert slow_codes(got) == codes


def test_quantize_nvfp4_matches_the_slow_definition(generator):
    # Ties of E2M1 under a global scale that is no power of two, at every E4M3 scale: the order of the roundings decides them.
    steps = torch.tensor([e4m3(b) for b in range(8, 127)]) * torch.tensor(fp32(0.004))
    ties = steps[:, None] * torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2)
    # And block maxima in the middle between two E4M3 scales.
    middles = torch.tensor([(e4m3(b) + e4m3(b + 1)) / 2 for b in range(126)]) * (torch.tensor(6.0) * torch.tensor(fp32(0.004)))
    middles = middles[:, None] * torch.linspace(1, -1, 16)
    for w in (edge_matrix(generator, 32), torch.randn(16, 64, generator=generator), torch.zeros(2, 32), ties, middles):
        for shared in (None, fp32(0.004)):
            got = quantize_nvfp4(w, shared)
            f = np.float32
            with np.errstate(over="ignore", under="ignore", divide="ignore"):
                g = f(shared) if shared else f(w.abs().max().item()) / f(2688)
                g = g if g > 0 else f(1)
                assert got.global_scale == float(g)
                scales, codes = [], []
                for row in w.numpy():
                    blocks = [min(max(f(np.abs(row[b:b + 16]).max()) / (f(6) * g), f(2.0 ** -9)), f(448)) for b in range(0, len(row), 16)]
                    scales.append([nearest(Fraction(float(s)), E4M3_SORTED) for s in blocks])
                    codes.append([slow_e2m1(min(max(float(x / (f(e4m3(scales[-1][i // 16])) * g)), -1e9), 1e9))
                                  for i, x in enumerate(row)])
            assert got.scale.view(torch.uint8).tolist() == scales
            assert slow_codes(got) == codes


@pytest.mark.parametrize("ue8m0", [True, False])
def test_quantize_fp8_block_matches_the_slow_definition(generator, ue8m0):
    high, wide = 3, 24  # 34 rows and 64 columns: ragged at both edges
    w = edge_matrix(generator, 64)
    got = quantize_fp8_block(w, (high, wide), ue8m0)
    assert got.block == (high, wide) and got.shape == (34, 64)
    numbers, payload = w.double().tolist(), got.payload.view(torch.uint8).tolist()
    for top in range(0, 34, high):
        for left in range(0, 64, wide):
            block = [(o, i) for o in range(top, min(34, top + high)) for i in range(left, min(64, left + wide))]
            amax = max(abs(numbers[o][i]) for o, i in block)
            stored = got.scale[top // high, left // wide].item()
            if ue8m0:
                assert stored == slow_power_of_two(amax, 448)
                scale = e8m0(stored)
            else:
                scale = float(np.float32(amax) / np.float32(448)) or 1.0
                assert stored == scale
            for o, i in block:
                x = min(Fraction(fp32(abs(numbers[o][i]) / scale)), Fraction(448))
                want = nearest(x, E4M3_SORTED) | (0x80 if math.copysign(1, numbers[o][i]) < 0 else 0)
                assert payload[o][i] == want, (o, i, numbers[o][i], scale)


def test_quantised_values_are_fixed_points(generator):
    # What a format holds exactly must survive it: quantising a dequantised weight changes no value.
    w = torch.randn(64, 128, generator=generator)
    for quantise in (quantize_mxfp4, quantize_fp8_block):
        once = quantise(w).dequantize()
        assert torch.equal(quantise(once).dequantize(), once)


def test_w1_and_w3_can_share_a_global_scale(generator):
    w1, w3 = torch.randn(16, 32, generator=generator), 5 * torch.randn(16, 32, generator=generator)
    shared = nvfp4_global_scale(w1, w3)
    assert shared == nvfp4_global_scale(w3) > nvfp4_global_scale(w1)
    assert quantize_nvfp4(w1, shared).global_scale == quantize_nvfp4(w3, shared).global_scale == shared


@pytest.mark.parametrize("quantise,columns", [(quantize_nvfp4, 24), (quantize_mxfp4, 48)])
def test_quantisers_refuse_what_they_cannot_hold(quantise, columns):
    with pytest.raises(ValueError, match=rf"multiple of {16 if quantise is quantize_nvfp4 else 32}, found \(2, {columns}\)"):
        quantise(torch.ones(2, columns))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="holds NaN or infinity"):
            quantise(torch.full((2, 96), bad))
        with pytest.raises(ValueError, match="holds NaN or infinity"):
            quantize_fp8_block(torch.full((2, 96), bad))
    with pytest.raises(ValueError, match="global scale above zero, found 0.0"):
        quantize_nvfp4(torch.ones(2, 32), 0.0)


# ------------------------------------------------------------------------------------------------------ MXFP4 to NVFP4


@pytest.mark.parametrize("largest", [-100, -8, 0, 40, 100])
def test_mxfp4_to_nvfp4_is_lossless(generator, largest):
    payload = random_bytes(generator, 36, 64)
    exponent = largest - torch.arange(36 * 4).remainder(18).view(36, 4)  # the whole span of 2^17
    weight = Weight("mxfp4", (36, 128), payload, (exponent + 127).to(torch.uint8), block=(1, 32))
    cast = mxfp4_to_nvfp4(weight)
    assert cast.kind == "nvfp4" and cast.global_scale == 2.0 ** (largest - 8) and torch.equal(cast.payload, payload)
    assert cast.scale.shape == (36, 8) and torch.equal(cast.scale[:, 0::2].float(), cast.scale[:, 1::2].float())
    assert torch.equal(bits(cast.dequantize()), bits(weight.dequantize()))


def test_mxfp4_to_nvfp4_ignores_the_scales_of_zeros_and_shares_an_exponent(generator):
    weight = quantize_mxfp4(torch.randn(8, 64, generator=generator))
    weight.payload[2, :16], weight.scale[2, 0] = 0x80, 0  # a block of +0 and -0 with the smallest scale
    weight.payload[3, 16:], weight.scale[3, 1] = 0, 254  # and one with the largest
    small = quantize_mxfp4(1e-2 * torch.randn(8, 64, generator=generator))
    largest = mxfp4_largest_exponent(weight, small)
    assert largest == mxfp4_largest_exponent(weight) < 20
    for source in (weight, small):
        cast = mxfp4_to_nvfp4(source, largest)
        assert cast.global_scale == 2.0 ** (largest - 8) and cast.problem() is None
        assert torch.equal(bits(cast.dequantize()), bits(source.dequantize()))
    zeros = quantize_mxfp4(torch.zeros(2, 32))
    assert torch.equal(mxfp4_to_nvfp4(zeros).dequantize(), torch.zeros(2, 32)) and mxfp4_to_nvfp4(zeros).problem() is None


def test_mxfp4_to_nvfp4_refuses_to_lose_anything(generator):
    scale = torch.tensor([[127, 127 - 18]], dtype=torch.uint8)
    weight = Weight("mxfp4", (1, 64), torch.full((1, 32), 0x11, dtype=torch.uint8), scale, block=(1, 32))
    with pytest.raises(ValueError, match=r"within 2\^17 of the largest, found exponents -18 to 0"):
        mxfp4_to_nvfp4(weight)
    with pytest.raises(ValueError, match="expected an mxfp4 weight, found plain"):
        mxfp4_to_nvfp4(Weight.plain(torch.ones(1, 32)))
