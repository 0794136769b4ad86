"""RoPE against complex rotations and YaRN's definition in float64 (model.md section 4.1)."""

import cmath
import math
from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.config import PRESETS
from dsv4.layers.step import Rope, Step

POSITIONS = [0, 1, 3, 4, 127, 128, 1023, 65535]


def slow_frequencies(dim, theta, factor=1.0, original=65536, fast=32, slow=1):
    """theta^(-2i/dim); under YaRN pair i is blended with itself / factor by its place between the two corner pairs."""
    out = []
    for i in range(dim // 2):
        f = theta ** (-2 * i / dim)
        if factor != 1.0:
            def corner(turns):
                return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

            low, high = max(math.floor(corner(fast)), 0), min(math.ceil(corner(slow)), dim - 1)
            ramp = min(max((i - low) / ((high - low) or 0.001), 0), 1)
            f = f / factor * ramp + f * (1 - ramp)
        out.append(f)
    return out


@pytest.mark.parametrize("dim,theta,factor,original", [
    (64, 1e4, 1.0, 65536), (64, 1.6e5, 16.0, 65536), (16, 1.6e5, 16.0, 256), (24, 1.6e5, 4.0, 128), (2, 1e4, 16.0, 65536),
])
def test_frequencies(dim, theta, factor, original):
    got = ops.rope_frequencies(dim, theta, factor=factor, original_length=original)
    want = torch.tensor(slow_frequencies(dim, theta, factor, original), dtype=torch.float64)
    assert got.dtype == torch.float32
    # The power's exponent is an fp32 number of up to 1 times ln(theta) = 12: 12 * 2^-24 relative, and a few roundings.
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)


def test_published_yarn_keeps_pairs_to_15_and_divides_pairs_from_25():
    plain, yarn = ops.rope_frequencies(64, 1.6e5), ops.rope_frequencies(64, 1.6e5, factor=16.0)
    assert torch.equal(yarn[:16], plain[:16])
    assert torch.equal(yarn[25:], plain[25:] / 16)
    assert ((yarn[16:25] < plain[16:25]) & (yarn[16:25] > plain[16:25] / 16)).all()


def test_trap_07_cos_and_sin_are_fp32_and_the_angle_is_the_fp32_product():
    """At t near 1M the fp32 product t * f is off by up to 0.03 rad: the model was trained with that. bf16 would be off by radians."""
    f = ops.rope_frequencies(64, 1e4)
    t = torch.tensor([0, 1, 127, 65535, 1048575])
    cos, sin = ops.rope_table(t, f)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (5, 32)
    for row, position in enumerate(t.tolist()):
        for i in range(32):
            angle = torch.tensor(position * float(f[i]), dtype=torch.float64).float().item()  # one rounding of the exact product
            # 2e-7: the last bit of an fp32 cosine, plus the library's.
            assert abs(cos[row, i] - math.cos(angle)) < 2e-7 and abs(sin[row, i] - math.sin(angle)) < 2e-7, (position, i)


def test_trap_07_the_layers_without_a_compressor_have_the_plain_base():
    config = replace(PRESETS["pro"], compress_ratios=(0, *PRESETS["pro"].compress_ratios[1:]))
    step = Step.at(torch.tensor([100]), torch.tensor([7]), Rope(config))
    for ratio in (0, 4, 128):
        want = slow_frequencies(64, 160000.0, 16.0) if ratio else slow_frequencies(64, 10000.0)
        cos, sin = step.angles(ratio)
        # The angle is at most 100 rad, its fp32 error 100 * 2e-6 (test_frequencies).
        torch.testing.assert_close(cos[0].double(), torch.tensor([math.cos(100 * f) for f in want], dtype=torch.float64), rtol=0, atol=2e-4)
        torch.testing.assert_close(sin[0].double(), torch.tensor([math.sin(100 * f) for f in want], dtype=torch.float64), rtol=0, atol=2e-4)


@pytest.mark.parametrize("ratios", [(0,), (4,), (128, 4), (0, 4, 128)])
def test_a_steps_angles_are_those_of_its_tokens_and_of_their_blocks(ratios):
    """Bit for bit those of one table at a time; blocks' entries stand at the block's first token."""
    config = replace(PRESETS["pro"], num_hidden_layers=len(ratios), compress_ratios=ratios)
    t = torch.tensor([0, 3, 4, 5, 127, 128, 131, 65535, 1048575])
    step = Step.at(t, torch.zeros_like(t), Rope(config))
    of_kind = [ops.rope_frequencies(64, config.rope_theta), ops.rope_frequencies(
        64, config.compress_rope_theta, factor=config.rope_factor, original_length=config.rope_original_length)]
    assert set(step.of_tokens) == set(ratios) and set(step.of_blocks) == set(ratios) - {0}
    for ratio in ratios:
        for got, positions in ((step.angles(ratio), t), *([(step.block_angles(ratio), t - t % ratio)] if ratio else [])):
            for a, b in zip(got, ops.rope_table(positions, of_kind[ratio > 0]), strict=True):
                assert torch.equal(a, b) and a.is_contiguous()


def slow_rotate(vector, angles, inverse):
    """Pairs of neighbours as complex numbers, on the last 2 * len(angles) dims."""
    out, start = list(vector), len(vector) - 2 * len(angles)
    for i, angle in enumerate(angles):
        z = complex(*vector[start + 2 * i : start + 2 * i + 2]) * cmath.exp(1j * (-angle if inverse else angle))
        out[start + 2 * i : start + 2 * i + 2] = z.real, z.imag
    return out


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("d,turned", [(512, 64), (128, 64), (80, 24), (16, 16)])
def test_apply_rope(rng, d, turned, inverse):
    angles = torch.rand(len(POSITIONS), turned // 2, generator=rng) * 20 - 10
    x = torch.randn(len(POSITIONS), 3, d, generator=rng)
    got = ops.apply_rope(x, angles.cos(), angles.sin(), inverse)
    want = [[slow_rotate(v, a, inverse) for v in heads] for heads, a in zip(x.double().tolist(), angles.double().tolist(), strict=True)]
    # Two products and a sum of numbers of order 1..4 in fp32 with cosines of fp32.
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=2e-6)
    assert torch.equal(got[..., : d - turned], x[..., : d - turned])  # the rest is copied


def test_rotation_and_its_inverse_cancel_and_rounds_once(rng):
    x = torch.randn(5, 2, 64, generator=rng)
    cos, sin = ops.rope_table(torch.tensor(POSITIONS[:5]), ops.rope_frequencies(32, 1e4))
    back = ops.apply_rope(ops.apply_rope(x, cos, sin), cos, sin, inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=2e-6)  # two rotations, as above
    low = x.bfloat16()
    assert torch.equal(ops.apply_rope(low, cos, sin), ops.apply_rope(low.float(), cos, sin).bfloat16())
    assert torch.equal(ops.apply_rope(x[:, 0], cos, sin), ops.apply_rope(x, cos, sin)[:, 0])  # without a head axis
    assert torch.equal(ops.apply_rope(x, cos, sin)[0], x[0])  # position 0 turns nothing
