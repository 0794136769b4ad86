"""Packed keys: their bytes, written out by hand, and that unpacking them gives the definitions' values bit for bit."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.keys import IndexKeys, Keys
from dsv4.ops.norm import kv_norm_rope
from dsv4.ops.quant import fp4_round_trip, fp8_round_trip, hadamard


def assert_same_bits(got, want):
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def rows(rng, d):
    """Rows of ordinary size, of every size that stays finite, zeros of both signs, one value alone, and powers of two."""
    x = torch.randn(60, d, generator=rng)
    x[20:40] *= torch.exp2(torch.randint(-140, 128, (20, d // 32), generator=rng).float()).repeat_interleave(32, 1)
    x[40], x[41], x[42, 1:] = 0, -0.0, 0
    x[43:50] = torch.exp2(torch.randint(-130, 127, (7, d), generator=rng).float()) * torch.tensor([1.0, -1.0]).repeat(d // 2)
    x[50:] *= torch.exp2(torch.randint(-12, 12, (10, d), generator=rng).float())
    return x.clamp(-1.5e38, 1.5e38).to(torch.bfloat16)


def fp8(x):
    return torch.cat((fp8_round_trip(x[:, :448], 64), x[:, 448:]), 1)


def test_keys_hold_the_values_of_the_definition(rng):
    x = rows(rng, 512)
    keys = Keys.pack(x)
    assert keys.values.shape == (60, 576) and keys.scales.shape == (60, 8)
    assert_same_bits(keys.unpack(), fp8(x))
    assert_same_bits(Keys.pack(keys.unpack()).unpack(), fp8(x))  # values that are FP8 already stay what they are
    assert_same_bits(Keys.pack(x.float()).unpack(), fp8(x))


def test_a_window_key_is_that_of_kv_norm_rope(rng):
    kv, weight, angle = torch.randn(9, 512, generator=rng), torch.randn(512, generator=rng), torch.randn(9, 32, generator=rng)
    before, after = (kv_norm_rope(kv.bfloat16(), weight, angle.cos(), angle.sin(), 1e-6, quantize) for quantize in (False, True))
    assert_same_bits(Keys.pack(before).unpack(), after)


def test_index_keys_hold_the_values_of_the_definition(rng):
    x = rows(rng, 128)
    keys = IndexKeys.pack(x)
    assert keys.values.shape == (60, 64) and keys.scales.shape == (60, 4)
    assert_same_bits(keys.unpack(), fp4_round_trip(x))
    assert torch.equal(IndexKeys.pack(keys.unpack()).unpack(), fp4_round_trip(x))
    rotated = hadamard(torch.randn(5, 128, generator=rng).bfloat16())
    assert_same_bits(IndexKeys.pack(rotated).unpack(), fp4_round_trip(rotated))


def test_the_bytes():
    """448 and 450 lie on both sides of a power of two; 1e-4 is the smallest amax: a scale of 2^-22.

    450 / 2 is rounded to 224, 1.5e-6 * 2^22 to 6.5.
    """
    x = torch.zeros(2, 512)
    x[0, 0], x[0, 1], x[0, 64], x[0, 128], x[0, 448], x[0, 511] = 448, -1, 450, 1.5e-6, 1, -2
    x[1, 447] = 1
    keys = Keys.pack(x)
    assert keys.values[0, [0, 1, 2, 64, 128]].tolist() == [0x7E, 0xB8, 0, 0x76, 0x4D]
    assert keys.values[0, [448, 449, 574, 575]].tolist() == [0x80, 0x3F, 0x00, 0xC0]  # little-endian bf16
    assert keys.scales[0].tolist() == [127, 128, 105, 105, 105, 105, 105, 0]
    assert keys.scales[1, 6] == 127 - 8 and keys.values[1, 447] == 0x78  # 1 = 256 * 2^-8
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1], x[0, 33], x[0, 34], x[0, 127] = 6, -0.5, 7, -1, -3
    index = IndexKeys.pack(x)
    assert index.values[0, [0, 16, 17, 63]].tolist() == [0x97, 0x60, 0x09, 0xF0]
    assert index.scales[0].tolist() == [127, 128, 1, 126]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_its_block_alone(rng, bad):
    x = torch.randn(2, 512, generator=rng)
    x[0, 70] = bad
    keys = Keys.pack(x)
    assert keys.scales[0, 1] == 255 and keys.unpack()[0].isnan().nonzero().flatten().tolist() == list(range(64, 128))
    index = IndexKeys.pack(x[:, :128])
    assert index.scales[0, 2] == 255 and index.unpack()[0].isnan().nonzero().flatten().tolist() == list(range(64, 96))
    assert keys.unpack()[1].isfinite().all() and index.unpack()[1].isfinite().all()


def test_empty_rows_are_zeros_and_other_widths_are_refused():
    assert (Keys.empty(3).unpack() == 0).all() and (IndexKeys.empty(3).unpack() == 0).all()
    assert Keys.empty(3)[0].shape == (3, 576) and IndexKeys.empty(0).scales.shape == (0, 4)
    with pytest.raises(UserError, match=r"Keys.pack: expected keys \[n, 512\], found keys \[2, 128\]"):
        Keys.pack(torch.zeros(2, 128))
    with pytest.raises(UserError, match=r"IndexKeys.pack: expected keys \[n, 128\], found keys \[128\]"):
        IndexKeys.pack(torch.zeros(128))
