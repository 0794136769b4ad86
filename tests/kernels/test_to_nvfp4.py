"""The to_nvfp4 kernel on the CPU emulator: every byte the definition's."""

import subprocess
from pathlib import Path

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import build
from dsv4.kernels.nvfp4 import to_nvfp4
from dsv4.ops.nvfp4 import to_nvfp4_ref

from ..emulator import emulator
from ..emulator.emulator import emulated, needs_gxx
from ..ops.test_nvfp4 import scale_ties
from .packed import assert_same_nvfp4

pytestmark = needs_gxx
ORDERS = pytest.mark.parametrize("swizzled", [False, True])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def check(x, swizzled=False, **how):
    with emulated(**how):
        got = to_nvfp4(x, swizzled)
    assert_same_nvfp4(got, to_nvfp4_ref(x, swizzled))
    return got


def spread(rng, *shape):
    """Normal values at magnitudes 2^-20 .. 2^20 by block of 16, and another 2^-30 .. 2^30 by row."""
    rows, columns = shape
    blocks = torch.randint(-20, 21, (rows, columns // 16, 1), generator=rng) + torch.randint(-30, 31, (rows, 1, 1), generator=rng)
    return (torch.randn(rows, columns // 16, 16, generator=rng) * torch.exp2(blocks.float())).flatten(1)


# One block, less and more than a warp, ragged groups of four, one, two, four and eight chunks, Pro's widths, the largest.
@ORDERS
@DTYPES
@pytest.mark.parametrize("K", [16, 48, 64, 272, 1536, 2064, 3072, 4096, 7168, 16384])
def test_widths(rng, K, dtype, swizzled):
    check(spread(rng, 2, K).to(dtype), swizzled, reverse=bool(K % 64))


@ORDERS
@pytest.mark.parametrize("M", [1, 3, 31, 127, 128, 129, 260])
def test_numbers_of_tokens(rng, M, swizzled):
    check(spread(rng, M, 80).bfloat16(), swizzled, reverse=bool(M % 2))


@ORDERS
def test_a_prefill_of_16384_tokens(rng, swizzled):
    check(torch.randn(16384, 16, generator=rng).bfloat16(), swizzled)


def test_no_token():
    assert check(torch.empty(0, 64)).values.shape == (0, 32) and check(torch.empty(0, 64), True).scales.numel() == 0


@DTYPES
def test_every_boundary_and_its_neighbours(rng, dtype):
    """A block whose scale is s holds values next to s times each boundary of e2m1, where the division's last bit decides the code."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    blocks = []
    for _ in range(400):
        s = torch.rand((), generator=rng).double() + 1
        block = torch.cat((middles * s, torch.tensor([6.0, 0.5]).double() * s, middles * s)).to(dtype)
        steps = torch.randint(-3, 4, (16,), generator=rng)
        for _ in range(3):
            block = torch.where(steps > 0, torch.nextafter(block, torch.full_like(block, 99)),
                                torch.where(steps < 0, torch.nextafter(block, -torch.full_like(block, 99)), block))
            steps = steps - steps.sign()
        blocks.append(block)
    x = torch.stack(blocks).view(25, 256)
    check(torch.cat((x, -x, x * 2.0**-90)))


def quotients_of(rng, count):
    """fp32 rows of 16 whose scale is a power of two times a row scale of 24 random bits, values within 2 steps of a boundary times it."""
    row = (torch.rand(count, generator=rng) + 1) * torch.exp2(torch.randint(-90, 60, (count,), generator=rng).float())
    top = row * 2688  # rounded; the definition divides it again
    g = top / torch.tensor(2688.0)
    s = (448 * g)[:, None]
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1.75])
    v = (s * middle).view(torch.int32) + torch.randint(-2, 3, (count, 15), generator=rng, dtype=torch.int32)
    return torch.cat((top[:, None], v.view(torch.float32)), 1)


def test_the_division_is_exact_at_the_boundaries(rng):
    """30,000 quotients within two steps of a boundary: the quick division's code is that of the rounded quotient."""
    x = quotients_of(rng, 2000)
    got = check(x)
    assert (got.scales == 0x7E).all()
    q = x[:, 1:] / (448 * got.row_scales[:, None])
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert 0.1 < (q[..., None] == middles).any(-1).float().mean() < 0.9  # ties, and what lies on both sides of them


def test_ties_of_the_scales(rng):
    check(scale_ties(rng, 300))


# In what follows a reciprocal may be any of three: the GPU's instruction is right within a unit in the last place.
ARITHMETIC = r"""
#include <cstdio>
#include <cstdlib>
#include "nvfp4.cuh"
static float at(unsigned bits) { return __uint_as_float(bits); }
static float stepped(float x, int steps) { return at(__float_as_uint(x) + steps); }
static unsigned code(float q) { return (q > 0.25f) + (q >= 0.75f) + (q > 1.25f) + (q >= 1.75f) + (q > 2.5f) + (q >= 3.5f) + (q > 5.0f); }
int main(int, char** arguments) {
    const unsigned start = atoi(arguments[1]), step = atoi(arguments[2]), end = 1u << 23, near = 4096;
    const float boundaries[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}, divisors[] = {6.0f, 2688.0f};
    long cases[4] = {}, wrong[4] = {};
    for (unsigned m = 0; m < end; m++) {
        if (m % step != start && m > near && (m < end / 2 - near || m > end / 2 + near) && m < end - near) continue;
        const float b = at(0x3f800000u + m);
        for (float divisor : divisors) cases[0]++, wrong[0] += quotient(b, divisor, 1.0f / divisor) != b / divisor;
        for (int unit = -1; unit <= 1; unit++) {
            const Divisor by = divisor(b, stepped(1.0f / b, unit));
            for (float boundary : boundaries)
                for (int i = -3; i <= 3; i++) {
                    const float a = stepped(b * boundary, i);
                    cases[1]++, wrong[1] += biased_code(by.divide(a)) != kCodeBias + code(a / b);
                    if (!unit) wrong[1] += code(quotient(a, b, 1.0f / b)) != code(a / b);  // as a product's epilogue has it
                }
            for (int k = 0; k < 16; k++)  // between e4m3's numbers: those of one exponent, and the subnormal ones
                for (int i = -3; i <= 3; i++) {
                    const float middle = k < 8 ? 1.0625f + 0.125f * k : (k - 7.5f) * 0x1p-9f, a = stepped(b * middle, i);
                    const float q = by.divide(a), want = a / b;
                    cases[2]++, wrong[2] += (q < middle) != (want < middle) || (q > middle) != (want > middle);
                }
        }
    }
    for (unsigned exponent = 0; exponent < 130; exponent++)  // all of up to 12 bits of mantissa, with the numbers next to them
        for (unsigned m = 0; m < 1u << 12; m++)
            for (int i = -2; i <= 2; i++) {
                const unsigned bits = (exponent << 23) + (m << 11) + i;
                if (bits > 0x41400000u) continue;  // 12
                cases[3]++, wrong[3] += biased_code(at(bits)) != kCodeBias + code(at(bits));
            }
    for (int i = 0; i < 4; i++) printf("%ld of %ld\n", wrong[i], cases[i]);
}"""


def test_the_arithmetic_for_every_scale(rng, tmp_path):
    """The sources' own quotients and codes, compiled by g++. For a 16th of the 2^23 mantissas, another one in each run, and all that are
    within 4,096 steps of 1, 1.5 and 2: a 6th and a 2,688th to the last bit; as a scale, times each boundary of e2m1 and of e4m3 and the
    seven numbers around that, the codes of the rounded quotient. Then codes of quotients with any exponent and next to any 12 bits."""
    (tmp_path / "arithmetic.cpp").write_text(ARITHMETIC)
    folders = [f"-I{Path(emulator.__file__).parent}", f"-I{build.SOURCES}"]
    subprocess.run(["g++", "-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-Wno-unknown-pragmas", "-Wno-psabi", *folders,
                    "-include", "emulator.h", "-o", "arithmetic", "arithmetic.cpp"], cwd=tmp_path, check=True)
    start = int(torch.randint(16, (), generator=rng))
    done = subprocess.run([tmp_path / "arithmetic", str(start), "16"], capture_output=True, text=True, check=True)
    wrong, cases = zip(*(map(int, line.split(" of ")) for line in done.stdout.splitlines()), strict=True)
    assert wrong == (0, 0, 0, 0) and cases[1] > 2**23 / 16 * 3 * 49 and cases[3] > 2**21, done.stdout


@ORDERS
def test_extremes(rng, swizzled):
    """Zeros of both signs, one value alone, the largest, the smallest, a row that is subnormal, scales that are subnormal or zero."""
    x = torch.randn(12, 128, generator=rng)
    x[0] = 0
    x[1] = -0.0
    x[2] = 0
    x[2, 77] = -3.7
    x[3] = torch.finfo(torch.float32).max
    x[4] = x[4].sign() * torch.finfo(torch.bfloat16).max
    x[5] = 2.0**-149
    x[6] *= 2.0**-130
    x[7] *= 2.0**-110
    x[8] *= torch.exp2(-torch.arange(128) // 16 * 2.0)  # the blocks' scales go through e4m3's exponents
    x[9] = torch.exp2(-torch.arange(128) / 5)  # and here to subnormal ones and zero
    x[10, 16:] *= 1e-30
    x[11] *= 2.0**-100
    x[11, ::3] = -0.0
    got = check(x, swizzled)
    scales = got.plain_scales()
    assert got.row_scales[:2].tolist() == [1.0, 1.0] and (scales[:2] == 0).all()
    assert ((scales[9] < 8) & (scales[9] > 0)).any() and (scales[9] == 0).any()
    check(x.bfloat16(), swizzled)


@DTYPES
def test_rows_at_both_ends_of_the_usual_ones(rng, dtype):
    """Amax 2^-50 and 2^60, between which quotients are products, with what is next to them; blocks go down to scales of zero."""
    x = torch.randn(6, 256, generator=rng).clamp(-3, 3) / 4 * torch.exp2(-(torch.arange(256) // 16 * 1.5))
    for row, end in enumerate((2.0**-50, 2.0**60)):
        ends = torch.full((3,), end, dtype=dtype)
        ends[0], ends[2] = torch.nextafter(ends[:1], torch.zeros(1, dtype=dtype)), torch.nextafter(ends[:1], ends[:1] * 2)
        x[3 * row : 3 * row + 3] *= end
        x[3 * row : 3 * row + 3, 0] = ends.float()
    got = check(x.to(dtype))
    assert (got.scales[:, 0] == 0x7E).all() and (got.scales[:, -1] == 0).all()


@DTYPES
def test_blocks_beyond_six_of_their_scale(rng, dtype):
    """Subnormal scales are coarse: a block's amax may be 9 times its scale. Row scale 1, amax / 6 around each number and each tie there."""
    amax = 6 * 2.0**-9 * torch.arange(0.5, 9, 0.125)
    amax = torch.stack((amax, amax * (1 - 2.0**-8), amax * (1 + 2.0**-7))).flatten()
    blocks = (torch.rand(len(amax), 16, generator=rng) * 2 - 1) * amax[:, None]
    blocks[:, 7] = -amax
    x = torch.cat((torch.full((1, 16), 2688.0), blocks)).flatten()[None]
    got = check(x.to(dtype))
    assert got.row_scales.item() == 1 and set(range(10)) <= set(got.scales.flatten().tolist())


@ORDERS
@DTYPES
def test_not_finite(rng, swizzled, dtype):
    x = torch.randn(6, 80, generator=rng)
    x[0, 5], x[1, 40], x[2, 79], x[4, 3], x[4, 60] = float("nan"), float("inf"), -float("inf"), float("nan"), float("inf")
    x[3] = float("nan")
    check(x.to(dtype), swizzled)


@ORDERS
def test_a_token_alone_gives_the_same_bits(rng, swizzled):
    x = spread(rng, 5, 96)
    together = check(x, swizzled, reverse=True)
    for s in range(5):
        alone = check(x[s : s + 1], swizzled)
        assert torch.equal(alone.values[0], together.values[s]) and torch.equal(alone.plain_scales()[0], together.plain_scales()[s])
        assert alone.row_scales[0] == together.row_scales[s]


def test_strided_input(rng):
    check(torch.randn(64, 3, generator=rng).T)


@pytest.mark.parametrize("x", [torch.zeros(2, 24), torch.zeros(2, 0), torch.zeros(2, 16400), torch.zeros(2, 16).double(), torch.zeros(16)])
def test_what_the_kernel_does_not_take(x):
    with emulated(), pytest.raises(UserError, match=r"to_nvfp4: expected x \[S, K\] in bf16 or fp32, K a multiple of 16.*, found x \["):
        to_nvfp4(x)
