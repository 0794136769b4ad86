"""The packed layout: what the kernels read back from it is the weight, value for value."""

from dataclasses import replace

import pytest
import torch

from dsv4.errors import UserError
from dsv4.formats import Weight
from dsv4.kernels import build, packing
from dsv4.kernels.packing import BF16, FP8, MXFP4, NVFP4, packed_shape

from .weights import KINDS, any_weight, pack_matrix, pack_pair

SHAPES = [(1, 16), (15, 48), (16, 512), (17, 528), (40, 192), (130, 1040), (33, 1024)]


def pairs(*words):
    """int64 words of bf16 pairs [..., n] -> fp32 [..., 2 n], the low half of a word first."""
    words = torch.stack(words, -1)
    halves = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), -1).flatten(-2)
    return _float(halves << 16)


def _float(bits):
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def unpack(data, kind, rows, columns, tile_rows=16):
    """The values that stream.cuh multiplies with x, fp32 [2, tiles * 8, columns], by half of the tile; written from stream.cuh and the
    table of packing.py."""
    code = packing.FORMATS[kind]
    tiles, items, size = data.shape
    assert data.shape == packed_shape(kind, rows, columns, tile_rows)
    words = data[..., :4096].contiguous().view(torch.int32).view(tiles, items, 4, 2, 8, 4, 4).long() & 0xFFFFFFFF
    behind = data[..., 4096:].contiguous()
    if code == BF16:
        of_both = words.unflatten(6, (2, 2)).permute(0, 1, 2, 7, 4, 5, 3, 6).flatten(6)  # half is a lane's odd words
        values = pairs(of_both)  # [tile, item, u, half, g, q, value]
    elif code == FP8:
        mask = 0x87F087F0
        values = pairs(words << 4 & mask, (words ^ words >> 4) & mask) * 2.0**120
        scales = behind.view(torch.float32).view(tiles, items, 2, 2)  # 128 columns, half
        values = values * scales.repeat_interleave(2, 2)[..., None, None, None, None]
    else:
        mask = 0x81C081C0
        rotated = (words << 12 | words >> 20) & 0xFFFFFFFF
        values = pairs(words << 2 & mask, words << 6 & mask, (words ^ words >> 8) & mask, rotated & mask)
        lanes = behind.view(tiles, items, 8, -1, 4, 2, 2).long()
        bits = lanes * 16 + 0x7000 if code == NVFP4 else (lanes * 128).repeat_interleave(2, 3)
        scales = _float(bits << 16).permute(0, 1, 4, 6, 2, 3, 5)  # [tile, item, u, half, g, q, v]
        values = values.unflatten(6, (2, 2)) * scales[..., None, None]
        values = values.permute(0, 1, 2, 6, 3, 4, 5, 7, 8).flatten(2, 3)  # u and v are one
    values = values.permute(3, 0, 4, 1, 2, 5, 6, 7)  # [half, tile, g, item, u, q, word, value]
    return values.reshape(2, tiles * 8, -1)


def rows_of(values, rows, columns):
    """unpack's halves of 16-row tiles as [rows, columns], and that all padding is zero."""
    whole = values.unflatten(1, (-1, 8)).transpose(0, 1).flatten(0, 2)
    assert not whole[rows:].any() and not whole[:, columns:].any()
    return whole[:rows, :columns]


def unscaled(weight):
    """The weight without its global scale, which the kernels apply to the sums."""
    return replace(weight, global_scale=1.0, divisor=None)


def assert_packs(weight, data, factor):
    stored = rows_of(unpack(data, weight.kind, *weight.shape), *weight.shape)
    assert torch.equal(stored.bfloat16().float(), stored) or weight.kind == "fp8"  # FP8's scales multiply sums, not codes
    of_codes = 2.0**packing.NVFP4_SHIFT if weight.kind == "nvfp4" else factor
    assert torch.equal(stored * of_codes, unscaled(weight).dequantize())
    if weight.kind == "nvfp4":
        assert factor == float(torch.tensor(weight.global_scale) * 2**20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_every_value_comes_back(rng, kind, rows, columns):
    columns += -columns % 32 if kind == "mxfp4" else 0
    weight = any_weight(rng, kind, rows, columns)
    assert_packs(weight, *pack_matrix(weight))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_row_slices(rng, kind):
    """A matrix of several chunks; rows that start inside a scale block; memory that is given."""
    whole = any_weight(rng, kind, 8192 + 40, 256)
    part = whole.rows(24, 8192 + 39)
    out = torch.full(packed_shape(part.kind, *part.shape), 0xFF, dtype=torch.uint8)
    data, factor = pack_matrix(part, out)
    assert data is out
    assert_packs(part, data, factor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", [(8, 32), (130, 544)])
def test_a_pair_alternates_every_8_rows(rng, kind, rows, columns):
    first, second = any_weight(rng, kind, rows, columns), any_weight(rng, kind, rows, columns)
    data, factors = pack_pair(first, second)
    halves = unpack(data, first.kind, rows, columns, tile_rows=8)
    for half, weight, factor in zip(halves, (first, second), factors, strict=True):
        alone, of_alone = pack_matrix(weight)
        assert factor == of_alone
        assert torch.equal(half[:rows, :columns], rows_of(unpack(alone, weight.kind, rows, columns), rows, columns))
        assert not half[rows:].any()


def test_every_code_and_every_scale():
    """All 256 pairs of e2m1 under all 127 e4m3 scales, zero and the subnormal ones among them, and negative ones; all e4m3 codes."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 32)
    for sign in (0, 128):
        weight = Weight("nvfp4", (127, 512), codes, (scale | sign).view(torch.float8_e4m3fn), 1.5, block=(1, 16))
        assert_packs(weight, *pack_matrix(weight))
    numbers = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)[None].repeat(3, 1)
    for exponent in (0, 1, 127, 254):
        scale = torch.full((1, 2), exponent, dtype=torch.uint8)
        weight = Weight("fp8", (3, 254), numbers.view(torch.float8_e4m3fn), scale, block=(128, 128))
        data, _ = pack_matrix(weight)
        stored = rows_of(unpack(data, "fp8", 3, 254), 3, 254)
        assert torch.equal(stored, weight.dequantize())


def test_mxfp4_range():
    """Any scales within 2^126 of each other; beyond, refused. A group of zeros may have any scale that is a number."""
    codes = torch.full((1, 32), 0x21, dtype=torch.uint8)

    def weight(low, high, codes=codes):
        return Weight("mxfp4", (1, 64), codes, torch.tensor([[low, high]], dtype=torch.uint8), block=(1, 32))

    for low, high in ((2, 128), (128, 254), (60, 186), (100, 100), (254, 254), (129, 130), (2, 2)):
        assert_packs(weight(low, high), *pack_matrix(weight(low, high)))
    assert pack_matrix(weight(2, 128))[1] == pack_matrix(weight(110, 120))[1] == 1
    for low, high in ((1, 100), (2, 129), (0, 0), (255, 200)):
        with pytest.raises(UserError, match="packing: expected MXFP4 scales from"):
            pack_matrix(weight(low, high))
    zeros = codes.clone()
    zeros[:, :16] = 0x80
    with pytest.raises(UserError, match=r"packing: expected MXFP4 scales from .*, found 2\^-27 to 2\^128"):
        pack_matrix(weight(255, 100, zeros))
    for low in (0, 1, 200):
        data, factor = pack_matrix(weight(low, 100, zeros))
        assert factor == 1
        stored = rows_of(unpack(data, "mxfp4", 1, 64), 1, 64)
        assert torch.equal(stored, weight(100, 100, zeros).dequantize())
    zeros[:] = 0
    assert not unpack(pack_matrix(weight(0, 254, zeros))[0], "mxfp4", 1, 64).any()


def test_fp8_blocks(rng):
    """Any multiples of 8 rows and 128 columns, any block that covers the matrix."""
    for rows, columns, block in ((40, 700, (8, 256)), (40, 700, (24, 128)), (30, 300, (37, 301)), (7, 100, (7, 100)), (20, 512, (30, 384))):
        weight = any_weight(rng, "fp8 fp32", rows, columns, block)
        assert_packs(weight, *pack_matrix(weight))
    for rows, columns, block in ((40, 700, (12, 128)), (40, 700, (8, 64)), (140, 128, (129, 128))):
        with pytest.raises(UserError, match=r"expected FP8 blocks of a multiple of 8 rows and 128 columns, found \d+x\d+ from row 0"):
            pack_matrix(any_weight(rng, "fp8", rows, columns, block))
    with pytest.raises(UserError, match="found 128x128 from row 3"):
        pack_matrix(any_weight(rng, "fp8", 300, 128).rows(3, 200))


def test_plain_weights(rng):
    exact = torch.randint(-128, 129, (5, 40), generator=rng) / 64  # 8 bits: every dtype has them
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        weight = Weight.plain(exact.to(dtype))
        assert_packs(weight, *pack_matrix(weight))
    for dtype in (torch.float32, torch.float16):
        inexact = torch.ones(5, 40, dtype=dtype)
        inexact[4, 39] += 2.0**-10
        with pytest.raises(UserError, match=f"expected weights that bf16 holds exactly, found {str(dtype)[6:]} ones that it does not"):
            pack_matrix(Weight.plain(inexact))


def test_what_is_refused(rng):
    nan = any_weight(rng, "fp8", 20, 64)
    for code in (0x7F, 0xFF):
        nan.payload.view(torch.uint8)[19, 63] = code
        with pytest.raises(UserError, match="packing: expected FP8 weights that are numbers, found NaN"):
            pack_matrix(nan)
    for code in (0x7F, 0xFF):
        weight = any_weight(rng, "nvfp4", 20, 64)
        weight.scale.view(torch.uint8)[19, 3] = code
        with pytest.raises(UserError, match="packing: expected NVFP4 scales that are numbers, found NaN"):
            pack_matrix(weight)
    for scale in (0.0, float("inf"), 2.0**110, -1.0):
        with pytest.raises(UserError, match="packing: expected an NVFP4 global scale above 0 and below 2"):
            pack_matrix(replace(any_weight(rng, "nvfp4", 20, 64), global_scale=scale))
    with pytest.raises(UserError, match="packing: expected two weights of one format and shape, found nvfp4 .* and mxfp4"):
        pack_pair(any_weight(rng, "nvfp4", 16, 64), any_weight(rng, "mxfp4", 16, 64))
    with pytest.raises(UserError, match=r"packing: expected a contiguous uint8 \[1, 1, 4608\] to write to"):
        pack_matrix(any_weight(rng, "nvfp4", 16, 64), torch.empty(1, 1, 4096, dtype=torch.uint8))


def test_formats_have_the_numbers_they_have_in_the_kernels():
    assert (BF16, FP8, NVFP4, MXFP4) == (0, 1, 2, 3)
    assert "enum Format { kBf16 = 0, kFp8 = 1, kNvfp4 = 2, kMxfp4 = 3 };" in (build.SOURCES / "stream.cuh").read_text()
