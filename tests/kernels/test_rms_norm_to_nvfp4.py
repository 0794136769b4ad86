"""The rms_norm_to_nvfp4 kernel on the CPU emulator: the norm as near as any in fp32, and the packed form of that norm byte by byte."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.nvfp4 import rms_norm_to_nvfp4
from dsv4.ops.nvfp4 import rms_norm_to_nvfp4_ref, to_nvfp4_ref

from ..emulator.emulator import emulated, needs_gxx
from . import compare
from .packed import assert_same_nvfp4

pytestmark = needs_gxx
EPS = 1e-6
ORDERS = pytest.mark.parametrize("swizzled", [False, True])


def run(x, weight, swizzled=False, eps=EPS, **how):
    with emulated(**how):
        return rms_norm_to_nvfp4(x, weight, eps, swizzled)


def check(x, weight, swizzled=False, eps=EPS, **how):
    y, packed = run(x, weight, swizzled, eps, **how)
    v = x.double()
    exact = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight.double()
    compare.assert_as_good(y, rms_norm_to_nvfp4_ref(x, weight, eps)[0], exact, roundings=4)
    assert_same_nvfp4(packed, to_nvfp4_ref(y, swizzled))
    return y, packed


# One block, ragged groups of four, one to eight chunks, Flash, Pro, the largest.
@ORDERS
@pytest.mark.parametrize("K", [16, 80, 272, 2064, 4096, 7168, 16384])
def test_widths(rng, K, swizzled):
    check(torch.randn(2, K, generator=rng).bfloat16(), torch.randn(K, generator=rng), swizzled, reverse=bool(K % 64))


@ORDERS
@pytest.mark.parametrize("M", [1, 5, 127, 128, 130])
def test_numbers_of_tokens(rng, M, swizzled):
    check(torch.randn(M, 64, generator=rng).bfloat16(), torch.randn(64, generator=rng), swizzled, reverse=bool(M % 2))


@ORDERS
def test_bit_for_bit_where_the_sum_is_exact(rng, swizzled):
    """Small whole numbers, whose squares add up without a rounding in any order: the norm's bits too are the definition's."""
    x, weight = torch.randint(-60, 61, (40, 4096), generator=rng).bfloat16(), torch.randn(4096, generator=rng)
    y, packed = run(x, weight, swizzled)
    want, want_packed = rms_norm_to_nvfp4_ref(x, weight, EPS, swizzled)
    assert torch.equal(y, want)
    assert_same_nvfp4(packed, want_packed)


def test_extremes(rng):
    """Zeros, one value alone, squares that underflow, large ones, a weight of zero, scales of every size."""
    x, weight = torch.randn(6, 256, generator=rng), torch.randn(256, generator=rng)
    x[0], x[1, 1:], x[2], x[3] = 0, 0, x[2] * 1e-25, x[3] * 1e17
    x[4] *= torch.exp2(-torch.arange(256) / 8)
    weight[32:48] = 0
    y, packed = check(x.bfloat16(), weight)
    assert (packed.scales[:, 2] == 0).all() and (packed.values[:, 16:24] == 0).all() and (y[0] == 0).all() and packed.row_scales[0] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_not_finite_and_overflowing_squares_are_as_defined(rng, bad):
    x, weight = torch.randn(3, 64, generator=rng).bfloat16(), torch.rand(64, generator=rng) + 0.5
    x[1, 5] = bad
    (y, packed), (want, want_packed) = run(x, weight), rms_norm_to_nvfp4_ref(x, weight, EPS)
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y[1].nan_to_num(9), want[1].nan_to_num(9)) and y[0].isfinite().all()
    assert_same_nvfp4(packed, to_nvfp4_ref(y))
    assert torch.equal(packed.values[1], want_packed.values[1]) and torch.equal(packed.scales[1], want_packed.scales[1])


def test_eps_counts_and_strides_do_not(rng):
    x, weight = torch.randn(64, 3, generator=rng).bfloat16().T * 1e-3, torch.randn(64, generator=rng)
    check(x, weight, eps=0.5)


def test_no_token():
    y, packed = run(torch.empty(0, 64, dtype=torch.bfloat16), torch.ones(64), True)
    assert y.shape == (0, 64) and packed.values.shape == (0, 32)


@pytest.mark.parametrize("x,weight", [
    (torch.zeros(2, 24).bfloat16(), torch.zeros(24)), (torch.zeros(2, 16), torch.zeros(16)),
    (torch.zeros(2, 16).bfloat16(), torch.zeros(32)),
    (torch.zeros(2, 16400).bfloat16(), torch.zeros(16400)), (torch.zeros(2, 16).bfloat16(), torch.zeros(16).bfloat16()),
])
def test_what_the_kernel_does_not_take(x, weight):
    with pytest.raises(UserError, match=r"rms_norm_to_nvfp4: expected x \[S, K\] in bf16 and weight \[K\] in fp32.*, found x \[2, "):
        run(x, weight)
