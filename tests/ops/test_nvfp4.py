"""The packed NVFP4 of tensor-core inputs, element by element: the byte of each code, each scale, each row, in both orders."""

import math

import pytest
import torch

from dsv4 import ops
from dsv4.formats import from_reciprocal, quantize_mxfp4, quantize_nvfp4
from dsv4.kernels.layouts import interleave_gate_up, nvfp4_operand, unpack_k_major, unswizzle_scales

from .test_quant import E2M1, E4M3, f32, nearest, rows


def slow_codes(row: list[float], g: float) -> tuple[list[int], list[int]]:
    """(codes, scale bytes) of finite values with the row's scale g; every intermediate rounded to fp32."""
    codes, scales = [], []
    for i in range(0, len(row), 16):
        block = row[i : i + 16]
        wanted = f32(f32(max(abs(v) for v in block) / 6) / g)
        scales.append(E4M3.index(nearest(min(wanted, 448.0), E4M3)))
        factor = f32(E4M3[scales[-1]] * g)
        for v in block:
            code = E2M1.index(nearest(min(6.0, f32(abs(v) / factor)), E2M1)) if factor > 0 else 0
            codes.append(code + 8 * (math.copysign(1, v) < 0) * (factor > 0))
    return codes, scales


def assert_packed(got, want_rows: list[tuple[list[int], list[int], float]]):
    codes, scales, row_scales = zip(*want_rows, strict=True)
    assert [[c for byte in row for c in (byte & 15, byte >> 4)] for row in got.values.tolist()] == list(codes)
    assert got.plain_scales().tolist() == list(scales) and got.values.dtype == got.scales.dtype == torch.uint8
    assert got.row_scales.tolist() == list(row_scales) and got.row_scales.dtype == torch.float32


def slow_row(row: list[float]) -> tuple[list[int], list[int], float]:
    g = f32(max(abs(v) for v in row) / 2688) or 1.0
    return *slow_codes(row, g), g


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 80, 128])
def test_to_nvfp4_element_by_element(rng, width, dtype, swizzled):
    x = rows(rng, width).to(dtype)
    x[1, :4] = torch.tensor([-0.0, 0.0, -1e-30, 1e-30])
    got = ops.to_nvfp4(x, swizzled)
    assert_packed(got, [slow_row(row) for row in x.double().tolist()])
    assert got.swizzled == swizzled and (not swizzled or torch.equal(unswizzle_scales(got.scales, len(x), width // 16), got.plain_scales()))


def scale_ties(rng, count: int) -> torch.Tensor:
    """fp32 [count, 144]: the first block makes the row's scale, of 24 random bits; the largest of each other block is within a step of six
    times a tie of e4m3 times that scale, so that the last bits of both divisions decide its scale."""
    g = (torch.rand(count, 1, generator=rng) + 1) * torch.exp2(torch.randint(-60, 60, (count, 1), generator=rng).float())
    x = torch.zeros(count, 9, 16)
    x[:, 0, 0] = g[:, 0] * 2688
    code = torch.randint(1, 125, (count, 8), generator=rng)
    middle = (torch.tensor(E4M3)[code] + torch.tensor(E4M3)[code + 1]) / 2
    steps = torch.randint(-1, 2, (count, 8), generator=rng, dtype=torch.int32)
    x[:, 1:, 3] = ((g * 6 * middle).view(torch.int32) + steps).view(torch.float32)
    x[:, 1:, 9] = -x[:, 1:, 3] / 3
    return x.flatten(1)


def test_ties_of_the_scales(rng):
    x = scale_ties(rng, 200)
    assert_packed(ops.to_nvfp4(x), [slow_row(row) for row in x.double().tolist()])


@pytest.mark.parametrize("swizzled", [False, True])
def test_the_packed_form_reads_as_the_round_trip_does(rng, swizzled):
    x = rows(rng, 96)
    assert torch.equal(ops.unpack_nvfp4(ops.to_nvfp4(x, swizzled)), ops.nvfp4_round_trip(x))


def test_what_is_not_finite_stays_seen(rng):
    """A NaN spoils its block, an infinity its row; the other rows are as they were."""
    x = torch.randn(3, 64, generator=rng)
    clean = ops.to_nvfp4(x)
    x[0, 20], x[1, 3] = float("nan"), -float("inf")
    got = ops.to_nvfp4(x)
    values = ops.unpack_nvfp4(got)
    assert values.isnan().sum(1).tolist() == [16, 64, 0] and values[0, 16:32].isnan().all()
    assert torch.equal(values.isnan(), ops.nvfp4_round_trip(x).isnan())
    assert got.scales[0, 1] == got.scales[1, 0] == 0x7F and (got.values[0, 8:16] == 0).all()
    assert got.row_scales[:2].tolist() == [1.0, float("inf")]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(got[:3], clean[:3], strict=True))


def test_rms_norm_to_nvfp4_is_the_norm_and_its_packed_form(rng):
    x, weight = torch.randn(5, 96, generator=rng).bfloat16(), torch.randn(96, generator=rng)
    for swizzled in (False, True):
        y, got = ops.rms_norm_to_nvfp4(x, weight, 1e-6, swizzled)
        want = ops.to_nvfp4(ops.rms_norm(x, weight, 1e-6), swizzled)
        assert torch.equal(y, ops.rms_norm(x, weight, 1e-6)) and y.dtype == torch.bfloat16
        assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True)) and got.swizzled == swizzled


@pytest.mark.parametrize("swizzled", [False, True])
def test_swiglu_to_nvfp4_element_by_element(rng, swizzled):
    """Where silu is sure in fp32: gates of 0, of the limit and beyond it, and ups of all sizes."""
    gate, up = torch.zeros(4, 48), torch.randn(4, 48, generator=rng) * 20
    gate[:, ::2], gate[:, 1::6] = 10, 1e6
    weights = torch.tensor([1.5, 0.25, 0.0, 2.0])
    h = interleave_gate_up(gate.T, up.T).T
    got = ops.swiglu_to_nvfp4(h, weights, 10.0, swizzled)
    silu, g = torch.nn.functional.silu(torch.tensor(10.0)).item(), f32(100 / 2688)
    want = []
    for row in range(4):
        values = [f32(silu * max(-10.0, min(10.0, u))) if x else math.copysign(0.0, u)
                  for x, u in zip(gate[row].tolist(), up[row].tolist(), strict=True)]
        want.append((*slow_codes(values, g), f32(g * weights[row].item())))
    assert_packed(got, want)
    assert torch.equal(ops.swiglu_to_nvfp4(h, None, 10.0).row_scales, torch.full((4,), g))


def test_swiglus_clamps(rng):
    """The gate's from above only, the up's on both sides."""
    gate, up = torch.randn(2, 4, 16, generator=rng) * 20
    inside = gate.clamp(max=10), up.clamp(-10, 10)
    got, clamped = (ops.swiglu_to_nvfp4(torch.cat(halves, 1), None, 10.0) for halves in ((gate, up), inside))
    assert all(torch.equal(a, b) for a, b in zip(got[:3], clamped[:3], strict=True))
    gate = torch.full((1, 16), -20.0)  # silu: -4e-8, and -5e-4 at -10
    assert ops.unpack_nvfp4(ops.swiglu_to_nvfp4(torch.cat((gate, gate), 1), None, 10.0)).abs().max() == 0


def test_swiglus_constant_scale_holds_the_largest_and_costs_little(rng):
    """The bound of 100 is reached and not cut, and the error of a usual row is that of 4-bit values, not of a scale that is too coarse."""
    h = torch.full((1, 32), 1e9)
    packed = ops.swiglu_to_nvfp4(h, None, 10.0)
    assert packed.scales.view(torch.float8_e4m3fn).float().item() == 448 and (packed.values == 0x77).all()
    torch.testing.assert_close(ops.unpack_nvfp4(packed), torch.full((1, 16), 100.0), rtol=1e-5, atol=0)
    gate, up = torch.randn(2, 64, 512, generator=rng)
    exact = torch.nn.functional.silu(gate) * up
    constant = ops.unpack_nvfp4(ops.swiglu_to_nvfp4(interleave_gate_up(gate.T, up.T).T, None, 10.0))
    of_row = ops.nvfp4_round_trip(exact)
    errors = [((y - exact).norm() / exact.norm()).item() for y in (constant, of_row)]
    assert errors[0] < 1.05 * errors[1] and errors[1] < 0.12, errors


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("divisor", [None, 81.3])
def test_nvfp4_linear_is_the_product_of_the_values(rng, divisor, swizzled):
    weight = quantize_nvfp4(torch.randn(40, 96, generator=rng))
    weight = weight if divisor is None else from_reciprocal(weight, divisor)
    x = ops.to_nvfp4(torch.randn(5, 96, generator=rng) * torch.exp2(torch.arange(5.0))[:, None], swizzled)
    exact = ops.unpack_nvfp4(x).double() @ weight.dequantize().double().T
    got = ops.nvfp4_linear(x, nvfp4_operand(weight))
    assert got.dtype == torch.bfloat16 and got.shape == (5, 40)
    # One rounding to bf16, and 100 to fp32 of what is added up.
    noise = ops.unpack_nvfp4(x).double().abs() @ weight.dequantize().double().abs().T
    assert ((got.double() - exact).abs() <= 2.0**-8 * exact.abs() + 100 * 2.0**-24 * noise).all()


@pytest.mark.parametrize("rows,columns", [(1, 16), (40, 48), (128, 64), (130, 96)])
def test_nvfp4_operand_element_by_element(rng, rows, columns):
    """The weight's own codes and scales; columns are filled up to 32 with zeros, which is what tensor copies want."""
    weight = quantize_nvfp4(torch.randn(rows, columns, generator=rng))
    got = nvfp4_operand(weight)
    assert got.values.shape == (rows, -(-columns // 32) * 16) and (got.values[:, columns // 2 :] == 0).all()
    assert torch.equal(got.values[:, : columns // 2], weight.payload) and got.scale == weight.global_scale
    assert torch.equal(unswizzle_scales(got.scales, rows, columns // 16), weight.scale.view(torch.uint8))
    assert (unpack_k_major(got.values, rows, columns)[0, :2].tolist()) == [int(weight.payload[0, 0]) & 15, int(weight.payload[0, 0]) >> 4]


def test_other_formats_are_no_nvfp4_operand():
    with pytest.raises(ValueError, match="expected an nvfp4 weight, found mxfp4"):
        nvfp4_operand(quantize_mxfp4(torch.ones(2, 32)))
