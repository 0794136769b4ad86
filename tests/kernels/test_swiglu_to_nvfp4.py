"""The swiglu_to_nvfp4 kernel on the CPU emulator against exact values, and byte by byte where silu's last bit is sure."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.layouts import interleave_gate_up, swiglu_scale
from dsv4.kernels.nvfp4 import swiglu_to_nvfp4
from dsv4.ops.nvfp4 import swiglu_to_nvfp4_ref

from ..emulator.emulator import emulated, needs_gxx
from . import packed

pytestmark = needs_gxx
LIMIT = 10.0
ORDERS = pytest.mark.parametrize("swizzled", [False, True])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def interleaved(gate, up):
    return interleave_gate_up(gate.T, up.T).T.contiguous()


def run(h, weights=None, limit=LIMIT, swizzled=False, **how):
    with emulated(**how):
        return swiglu_to_nvfp4(h, weights, limit, swizzled)


def check(gate, up, weights=None, limit=LIMIT, swizzled=False, **how):
    """Values within what fp32 may be off: exp's, the sum's, the quotient's and the product's roundings, and as many of a GPU's exp."""
    h = interleaved(gate, up)
    got = run(h, weights, limit, swizzled, **how)
    g, u = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    exact = g * torch.sigmoid(g) * u
    packed.assert_nvfp4_of(got, packed.around(exact, 8 * packed.ROUNDING * exact.abs()), swiglu_scale(limit))
    want = swiglu_to_nvfp4_ref(h, weights, limit, swizzled)
    assert torch.equal(got.row_scales, want.row_scales)
    differ = [(a != b).float().mean() for a, b in zip(got[:2], want[:2], strict=False)]
    assert max(differ) < 0.02, differ  # the definition's own fp32 is uncertain in the same few places
    if swizzled:  # the fill
        assert torch.equal(got.scales == 0, want.scales == 0)
    return got


def random_halves(rng, S, inner, dtype=torch.float32, size=4.0):
    return [(torch.randn(S, inner, generator=rng) * size).to(dtype) for _ in range(2)]


# One block, ragged groups of four, tiny, Flash, Pro, more than a pass of the block's threads.
@ORDERS
@DTYPES
@pytest.mark.parametrize("inner", [16, 80, 128, 2048, 3072])
def test_widths(rng, inner, dtype, swizzled):
    check(*random_halves(rng, 2, inner, dtype), torch.rand(2, generator=rng), swizzled=swizzled, reverse=bool(inner % 64))


@ORDERS
@pytest.mark.parametrize("S", [1, 5, 127, 128, 130])
def test_numbers_of_rows(rng, S, swizzled):
    check(*random_halves(rng, S, 64), None if S % 2 else torch.rand(S, generator=rng), swizzled=swizzled, reverse=bool(S % 2))


@ORDERS
@DTYPES
def test_bit_for_bit_where_silu_is_sure(rng, swizzled, dtype):
    """Gates of 0, of the limit and beyond: silu is 0 or one number, and every byte the definition's."""
    gate, up = random_halves(rng, 20, 272, dtype, 20.0)
    gate[gate.abs() < 10] = 0
    gate = gate.clamp(min=0)
    weights = torch.randn(20, generator=rng)
    weights[3] = 0
    h = interleaved(gate, up)
    packed.assert_same_nvfp4(run(h, weights, swizzled=swizzled), swiglu_to_nvfp4_ref(h, weights, LIMIT, swizzled))


@DTYPES
def test_gates_far_below_zero_leave_zeros_with_their_sign(rng, dtype):
    """From exp(-gate) = infinity on silu is -0, and so it is for gates whose product with a tiny reciprocal would not be tiny."""
    gate, up = torch.full((4, 64), -200.0), torch.randn(4, 64, generator=rng)
    gate[1], gate[2], gate[3, ::16] = -3e38, -1e30, LIMIT
    h = interleaved(gate.to(dtype), up.to(dtype))
    got = run(h)
    packed.assert_same_nvfp4(got, swiglu_to_nvfp4_ref(h, None, LIMIT))
    signs = torch.stack((got.values[3] >> 3 & 1, got.values[3] >> 7), -1).flatten()
    assert torch.equal(signs.bool(), (up[3] > 0) ^ (gate[3] > 0)) and (got.scales[:3] == 0).all()


@pytest.mark.parametrize("limit", [1e-12, 2e12])
def test_limits_whose_scales_are_not_usual(rng, limit):
    gate, up = torch.rand(5, 64, generator=rng).round() * 2 * limit, torch.randn(5, 64, generator=rng) * limit
    h = interleaved(gate, up * torch.exp2(-torch.arange(64) // 16 * 2.0))
    packed.assert_same_nvfp4(run(h, limit=limit), swiglu_to_nvfp4_ref(h, None, limit))


def test_extremes_of_size(rng):
    """Rows at the bound, rows far below it: scales through e4m3's exponents, subnormal ones, and zero."""
    gate, up = random_halves(rng, 24, 64)
    size = torch.exp2(-torch.arange(24.0))[:, None]
    up[0], gate[0] = 1e9, 1e9
    got = check(gate, up * size)
    assert (got.scales[0] == 0x7E).all() and (got.scales[-1] == 0).all() and ((got.scales > 0) & (got.scales < 8)).any()
    check(-gate * 10, up)  # far on the other side, where silu vanishes


@pytest.mark.parametrize("limit", [0.5, 7.0, 100.0])
def test_other_limits(rng, limit):
    check(*random_halves(rng, 3, 64), limit=limit)


@pytest.mark.parametrize("limit", [2.0**-16, 0.01, 0.1, 0.27, 0.28])
def test_limits_that_gates_below_zero_pass(rng, limit):
    """silu is -0.278 at -1.28, which no clamp cuts: at limits below, values pass limit^2, and their codes are cut to 6 times the scale."""
    gate, up = random_halves(rng, 5, 64)
    gate[0], up[0, ::2], up[0, 1::2] = -1.28, limit, -limit
    gate[1, ::3], up[1] = -1.0, 1.0
    got = check(gate, up, limit=limit)
    assert ((got.values[0] & 0x77) == 0x77).all()


def test_not_finite(rng):
    """NaN passes the clamp and spoils its block; +inf is cut to the limit; -inf as a gate is NaN, as in the definition."""
    gate, up = random_halves(rng, 6, 48)
    gate[0, 1], up[1, 20], gate[2, 33], up[3, 2], up[4, 4], gate[5, 17] = (float(v) for v in ("nan", "nan", "inf", "inf", "-inf", "-inf"))
    h = interleaved(gate, up)
    got, want = run(h), swiglu_to_nvfp4_ref(h, None, LIMIT)
    assert (got.scales == 0x7F).nonzero().tolist() == [[0, 0], [1, 1], [5, 1]] == (want.scales == 0x7F).nonzero().tolist()
    assert (got.values[0, :8] == 0).all()
    others = torch.ones(6, 3, dtype=torch.bool)
    others[[0, 1, 5], [0, 1, 1]] = False
    clean = check(gate.nan_to_num(1, 11, 1), up.nan_to_num(1, 11, -11))
    assert torch.equal(got.scales[others], clean.scales[others])
    assert torch.equal(got.values.unflatten(1, (3, 8))[others], clean.values.unflatten(1, (3, 8))[others])


def test_a_row_alone_gives_the_same_bits(rng):
    h = interleaved(*random_halves(rng, 4, 80))
    together = run(h, reverse=True)
    for s in range(4):
        packed.assert_same_nvfp4(run(h[s : s + 1]), together._replace(**{n: getattr(together, n)[s : s + 1] for n in together._fields[:3]}))


def test_no_row():
    assert run(torch.empty(0, 64), swizzled=True).values.shape == (0, 16)


@pytest.mark.parametrize("h,weights,limit", [
    (torch.zeros(2, 48), None, 10.0), (torch.zeros(2, 32).double(), None, 10.0), (torch.zeros(2, 32), torch.zeros(3), 10.0),
    (torch.zeros(2, 32), torch.zeros(2).bfloat16(), 10.0), (torch.zeros(2, 32), None, 0.0), (torch.zeros(2, 0), None, 10.0),
])
def test_what_the_kernel_does_not_take(h, weights, limit):
    with pytest.raises(UserError, match=r"swiglu_to_nvfp4: expected h \[S, 2 I\] in bf16 or fp32, I a multiple of 16.*, found h \[2, "):
        run(h, weights, limit)
