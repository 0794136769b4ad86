"""The rms_norm kernel on the CPU emulator against its definition."""

import pytest
import torch

from dsv4 import kernels
from dsv4.errors import UserError
from dsv4.ops.norm import rms_norm_ref

from ..emulator.emulator import emulated, needs_gxx
from . import compare

pytestmark = needs_gxx
EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16)


def rms_norm(x, w, eps=EPS, **how):
    with emulated(**how):
        return kernels.wrappers()["rms_norm"](x, w, eps)


def exact(x, w, eps=EPS):
    v = x.double()
    return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * w.double()


def assert_as_good(got, x, w, eps=EPS):
    """4 roundings: half of the mean's, the reciprocal root's one and a half, and two products."""
    compare.assert_as_good(got, rms_norm_ref(x, w, eps), exact(x, w, eps), roundings=4)


# One value, less and more than a warp, ragged, multiples of the 16-byte access and one more, Flash's and Pro's width, and beyond one
# pass of 1,024 threads.
WIDTHS = [1, 3, 8, 31, 32, 33, 192, 255, 512, 1025, 4096, 7168, 8200]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_against_the_definition(rng, width, dtype, reverse):
    x, w = torch.randn(3, width, generator=rng).to(dtype), torch.randn(width, generator=rng)
    assert_as_good(rms_norm(x, w, reverse=reverse), x, w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 512])
def test_extremes(rng, width, dtype):
    """Zeros, one value alone, rows whose squares underflow or are large, and a row of one sign."""
    x, w = torch.randn(6, width, generator=rng), torch.randn(width, generator=rng)
    x[0], x[2], x[3], x[4] = 0, x[2] * 1e-21, x[3] * 1e15, -x[4].abs()
    x[1, 1:] = 0
    x = x.to(dtype)
    got = rms_norm(x, w)
    assert_as_good(got, x, w)
    assert (got[0] == 0).all() and (got[1, 1:] == 0).all() and got[1, 0] != 0


def test_not_finite_and_overflowing_squares_are_as_defined(rng):
    """A sum of squares beyond fp32 gives zeros; an infinity or a NaN spoils its row alone."""
    x, w = torch.randn(4, 96, generator=rng), torch.randn(96, generator=rng)
    x[0], x[1, 5], x[2, 7] = x[0] * 1e25, float("inf"), float("nan")
    got, want = rms_norm(x, w), rms_norm_ref(x, w, EPS)
    assert torch.equal(got.isnan(), want.isnan()) and (got[0] == 0).all() and (want[0] == 0).all()
    assert_as_good(got[3:], x[3:], w)


def test_eps_counts(rng):
    x, w = torch.randn(2, 64, generator=rng) * 1e-3, torch.ones(64)
    assert_as_good(rms_norm(x, w, eps=0.5), x, w, 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["x", "weight", "out"])
def test_memory_that_is_not_16_byte_aligned_takes_the_other_path(rng, name, dtype):
    """One tensor 4 bytes past a multiple of 256: the emulator refuses a 16-byte access there."""
    x, w = torch.randn(2, 512, generator=rng).to(dtype), torch.randn(512, generator=rng)
    assert_as_good(rms_norm(x, w, offsets={name: 4}), x, w)


def test_shapes(rng):
    """Leading dimensions, strided inputs, no rows at all."""
    w = torch.randn(40, generator=rng)
    for x in (torch.randn(40, generator=rng), torch.randn(2, 3, 40, generator=rng), torch.randn(40, 5, generator=rng).T):
        assert_as_good(rms_norm(x, w), x, w)
    assert rms_norm(torch.empty(0, 40), w).shape == (0, 40)


def test_the_same_row_gives_the_same_bits(rng):
    """Wherever it stands, whatever stands beside it, in either order of threads."""
    x, w = torch.randn(5, 1025, generator=rng), torch.randn(1025, generator=rng)
    whole = rms_norm(x, w)
    assert torch.equal(whole, rms_norm(x, w, reverse=True)) and torch.equal(whole[3:4], rms_norm(x[3:4], w))


@pytest.mark.parametrize("x,w", [
    (torch.ones(2, 4), torch.ones(5)), (torch.ones(2, 4).double(), torch.ones(4)), (torch.ones(2, 4), torch.ones(4).bfloat16()),
    (torch.tensor(1.0), torch.ones(1)), (torch.ones(2, 4).half(), torch.ones(4)),
])
def test_what_the_kernel_does_not_take(x, w):
    with pytest.raises(UserError, match=r"rms_norm: expected x \[\.\.\., D\] in fp32 or bf16 and weight \[D\] in fp32, found x \["):
        rms_norm(x, w)
