"""Quantise-dequantise ops, bit exact against the rules of model.md section 9 (DeepSeek's inference/kernel.py), one number at a time."""

import math

import pytest
import torch

from dsv4 import ops

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # index = code; an even index has an even mantissa bit
# Codes 0..126 of E4M3 (bias 7, 3 mantissa bits; 0x7F is NaN): the grid itself, from the definition of the format.
E4M3 = tuple(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8))[:127]


def f32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).float().item()


def nearest(x: float, grid: tuple[float, ...]) -> float:
    """The grid's nearest value to x, ties to the even code, x's sign."""
    a = abs(x)
    code = min(range(len(grid)), key=lambda i: (abs(grid[i] - a), i % 2))
    return math.copysign(grid[code], x)


def power_of_two_at_least(v: float) -> float:
    """2^ceil(log2 v), from frexp: v = m 2^e with m in [0.5, 1)."""
    m, e = math.frexp(v)
    return math.ldexp(1.0, e - 1 if m == 0.5 else e)


def slow_block(values: list[float], floor: float, largest: float, grid: tuple[float, ...]) -> list[float]:
    """The shared rule of the FP8 and FP4 kernels for one block: scale in fp32, then everything is exact in float64."""
    amax = max(max(abs(v) for v in values), floor)
    scale = power_of_two_at_least(f32(amax * f32(1 / largest)))
    return [nearest(max(-largest, min(largest, v / scale)), grid) * scale for v in values]


def slow_fp8(row: list[float], block: int) -> list[float]:
    return [y for i in range(0, len(row), block) for y in slow_block(row[i : i + block], f32(1e-4), 448.0, E4M3)]


def slow_fp4(row: list[float]) -> list[float]:
    return [y for i in range(0, len(row), 32) for y in slow_block(row[i : i + 32], 6 * 2.0**-126, 6.0, E2M1)]


def slow_nvfp4(row: list[float]) -> list[float]:
    """e2m1 x e4m3 per 16 x one fp32 scale per row; every intermediate rounded to fp32 as the op's arithmetic is."""
    amax = max(abs(v) for v in row)
    g = f32(amax / 2688)
    if g == 0:
        return [0.0] * len(row)
    out = []
    for i in range(0, len(row), 16):
        block = row[i : i + 16]
        wanted = f32(f32(max(abs(v) for v in block) / 6) / g)
        scale = f32(nearest(min(wanted, 448.0), E4M3) * g)
        for v in block:
            q = nearest(max(-6.0, min(6.0, f32(v / scale))), E2M1) if scale > 0 else 0.0
            out.append(f32(q * scale))
    return out


def rows(rng, width: int) -> torch.Tensor:
    """Random rows at magnitudes 2^-20 .. 2^20, and the edges: zeros, one value alone, all equal, the largest, subnormals, ties."""
    scaled = torch.randn(12, width, generator=rng) * torch.exp2(torch.randint(-20, 21, (12, 1), generator=rng).float())
    alone = torch.zeros(width)
    alone[int(torch.randint(0, width, (1,), generator=rng))] = -3.7
    mixed = torch.randn(width, generator=rng) * torch.exp2(torch.randint(-30, 5, (width,), generator=rng).float())
    edges = [torch.zeros(width), alone, mixed, torch.full((width,), 448.0), torch.full((width,), -6.0), torch.full((width,), 2.0**-140),
             torch.full((width,), 1e-4), torch.full((width,), torch.finfo(torch.bfloat16).max)]
    return torch.cat((scaled, torch.stack(edges)))


def same(got: torch.Tensor, expected: list[list[float]], dtype: torch.dtype, zero_signs: bool = True) -> None:
    """Bit for bit (the sign of zero too); the fp32 result is rounded once to the op's output dtype."""
    want = torch.tensor(expected, dtype=torch.float64).float().to(dtype)
    assert got.dtype == dtype and got.shape == want.shape
    if not zero_signs:
        got, want = got + 0.0, want + 0.0
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    wrong = (got.view(bits) != want.view(bits)).nonzero()
    assert not len(wrong), f"{len(wrong)} differ, first at {wrong[0].tolist()}: {got[tuple(wrong[0])]} expected {want[tuple(wrong[0])]}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width,block", [(448, 64), (64, 64), (48, 64), (129, 64), (7, 128), (200, 128)])
def test_fp8_round_trip_bit_exact(rng, width, block, dtype):
    x = rows(rng, width).to(dtype)
    same(ops.fp8_round_trip(x, block), [slow_fp8(row, block) for row in x.double().tolist()], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [128, 32, 40, 5])
def test_fp4_round_trip_bit_exact(rng, width, dtype):
    x = rows(rng, width).to(dtype)
    same(ops.fp4_round_trip(x), [slow_fp4(row) for row in x.double().tolist()], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [128, 16, 24, 3])
def test_nvfp4_round_trip_bit_exact(rng, width, dtype):
    x = rows(rng, width).to(dtype)
    # A block whose scale rounded to zero is +0 in the op; the sign of such a zero is nobody's rule.
    same(ops.nvfp4_round_trip(x), [slow_nvfp4(row) for row in x.double().tolist()], dtype, zero_signs=False)


def test_every_tie_and_its_neighbours_round_as_the_format_says():
    """Midpoints between neighbouring codes go to the even code, one fp32 step to either side to the nearer one."""
    for grid, largest, op in ((E2M1, 6.0, ops.fp4_round_trip), (E4M3, 448.0, lambda x: ops.fp8_round_trip(x, 64))):
        middles = torch.tensor([(a + b) / 2 for a, b in zip(grid, grid[1:], strict=False)])
        x = torch.cat([torch.nextafter(middles, torch.tensor(towards)) for towards in (0.0, 1e9)] + [middles])
        x = torch.cat((x, -x))
        # The largest value rides along in each block of two, so the scale is 1 and the tie is one of the format itself.
        got = torch.stack([op(torch.stack((v, torch.tensor(largest)))) for v in x])
        assert (got[:, 1] == largest).all()
        assert got[:, 0].tolist() == [nearest(v, grid) for v in x.double().tolist()]


@pytest.mark.parametrize("exponent", [-30, -1, 0, 7, 40])
def test_scale_is_exact_at_powers_of_two(exponent):
    """amax = 448 * 2^e needs exactly 2^e: a logarithm that is off by one unit would double the scale and lose a mantissa bit."""
    x = torch.tensor([448.0, 416.0, 288.0]) * 2.0**exponent  # all three are E4M3 values times 2^e
    if exponent >= -20:  # below, the floor of 1e-4 takes over
        assert torch.equal(ops.fp8_round_trip(x, 64), x)
    y = torch.tensor([6.0, 0.5, 4.0]) * 2.0**exponent
    assert torch.equal(ops.fp4_round_trip(y), y)
    y[0] = torch.nextafter(y[0], torch.tensor(float("inf")))  # one fp32 step above 6 * 2^e the scale doubles:
    assert ops.fp4_round_trip(y).tolist() == [6 * 2.0**exponent, 0.0, 4 * 2.0**exponent]  # 0.5 becomes the tie 0.25, which goes to 0


def test_fp8_floor_of_1e_4_makes_small_values_vanish_as_the_kernel_does():
    """amax below 1e-4 keeps the scale 2^ceil(log2(1e-4 / 448)) = 2^-22: half of E4M3's smallest step of that is 2^-32."""
    assert ops.fp8_round_trip(torch.full((64,), 2.0**-32), 64).abs().max() == 0  # a tie, to the even code 0
    assert ops.fp8_round_trip(torch.full((64,), 1.5 * 2.0**-32), 64)[0] == 2.0**-31


def test_trap_18_a_tokens_activation_scale_does_not_depend_on_its_neighbours(rng):
    """NVFP4's global activation scale is one per row: with one for all rows (their maximum) a small row next to a large one is lost."""
    small, large = torch.randn(1, 64, generator=rng), torch.randn(1, 64, generator=rng) * 1e6
    alone, beside = ops.nvfp4_round_trip(small), ops.nvfp4_round_trip(torch.cat((small, large)))[:1]
    assert torch.equal(alone, beside)
    one_scale_for_both = ops.nvfp4_round_trip(torch.cat((small, large), -1))[:, :64]
    assert not torch.equal(alone, one_scale_for_both)


def slow_hadamard(row: list[float]) -> list[float]:
    """H[i, j] = (-1)^popcount(i & j), Sylvester's matrix in natural order."""
    d = len(row)
    return [sum(v if bin(i & j).count("1") % 2 == 0 else -v for j, v in enumerate(row)) / math.sqrt(d) for i in range(d)]


@pytest.mark.parametrize("d", [1, 2, 32, 64, 128])
def test_hadamard_is_sylvesters_matrix(rng, d):
    x = torch.randn(3, 2, d, generator=rng)
    want = torch.tensor([[slow_hadamard(v) for v in row] for row in x.double().tolist()])
    # log2(d) = 7 fp32 additions of numbers of about 1..10, then one product: 8 roundings of 2^-24 of at most ~12 each.
    torch.testing.assert_close(ops.hadamard(x), want.float(), rtol=0, atol=1e-5)


def test_hadamard_cancels_in_products_and_undoes_itself(rng):
    q, k = torch.randn(2, 5, 128, generator=rng)
    # Sums of 128 products of order 1 in fp32: 128 roundings of 2^-24 at magnitudes up to ~50.
    torch.testing.assert_close(ops.hadamard(q) @ ops.hadamard(k).T, q @ k.T, rtol=0, atol=1e-4)
    torch.testing.assert_close(ops.hadamard(ops.hadamard(q)), q, rtol=0, atol=1e-5)


def test_hadamard_rounds_once_to_bf16_and_refuses_other_lengths(rng):
    x = torch.randn(4, 128, generator=rng).bfloat16()
    assert torch.equal(ops.hadamard(x), ops.hadamard(x.float()).bfloat16())
    with pytest.raises(ValueError, match="power of two"):
        ops.hadamard(torch.zeros(2, 96))
