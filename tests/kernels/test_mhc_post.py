"""The mhc_post kernel on the CPU emulator against its definition."""

import pytest
import torch

from dsv4 import kernels
from dsv4.errors import UserError
from dsv4.ops.mhc import mhc_post_ref, whole

from ..emulator.emulator import emulated, needs_gxx
from ..ops.test_mhc import parts_of
from . import compare

pytestmark = needs_gxx
DTYPES = (torch.float32, torch.bfloat16)


def mhc_post(*tensors, **how):
    with emulated(**how):
        return kernels.wrappers()["mhc_post"](*tensors)


def exact(o, X, post, comb):
    o, X, post, comb = (t.double() for t in (o, X, post, comb))
    return torch.einsum("sk,sd->skd", post, o) + torch.einsum("sjk,sjd->skd", comb, X)


def assert_as_good(got, *inputs):
    """5 roundings of the absolute terms: the error bound of a sum of five products."""
    compare.assert_as_good(got, mhc_post_ref(*inputs), exact(*inputs), roundings=5, scale=exact(*(t.abs() for t in inputs)))


def site(rng, S, D, dtype):
    return (torch.randn(S, D, generator=rng).to(dtype), torch.randn(S, 4, D, generator=rng).to(dtype), 2 * torch.rand(S, 4, generator=rng),
            torch.randn(S, 4, 4, generator=rng).softmax(-1))


# One column, ragged, a 16-byte access, one block of 128 threads and one more of each path (512, 1,024 columns), Flash's and Pro's width.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 7, 8, 33, 128, 129, 192, 512, 516, 1024, 1032, 4096, 7168])
def test_against_the_definition(rng, D, dtype, reverse):
    inputs = site(rng, 2, D, dtype)
    assert_as_good(mhc_post(*inputs, reverse=reverse), *inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 3, 8, 17])
def test_every_token_has_its_own_weights(rng, S, dtype):
    inputs = site(rng, S, 40, dtype)
    assert_as_good(mhc_post(*inputs), *inputs)


def test_trap_02_comb_is_used_transposed(rng):
    """comb[0, 1] = 1 moves stream 0 into stream 1; one entry of post moves the output into its stream."""
    o, X, post, comb = site(rng, 2, 9, torch.float32)
    comb = torch.zeros(2, 4, 4)
    comb[0, 0, 1] = comb[1, 2, 3] = 1
    after = mhc_post(o, X, post * 0, comb)
    assert torch.equal(after[0, 1], X[0, 0]) and torch.equal(after[1, 3], X[1, 2]) and after.count_nonzero() == 18
    after = mhc_post(o, X, torch.eye(4)[[2, 0]], comb * 0)
    assert torch.equal(after[0, 2], o[0]) and torch.equal(after[1, 0], o[1]) and after.count_nonzero() == 18


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(rng, dtype):
    """Zeros, values near the largest and the smallest normal numbers of the dtype."""
    o, X, post, comb = site(rng, 4, 40, dtype)
    o[0], X[0] = 0, 0
    o[1], X[1] = (o[1].float() * 1e37).to(dtype), (X[1].float() * 1e37).to(dtype)
    o[2], X[2] = (o[2].float() * 1e-36).to(dtype), (X[2].float() * 1e-36).to(dtype)
    inputs = o, X, post, comb
    got = mhc_post(*inputs)
    assert (got[0] == 0).all()
    assert_as_good(got, *inputs)


def test_not_finite_spoils_its_own_column_alone(rng):
    o, X, post, comb = site(rng, 2, 24, torch.float32)
    X[0, 2, 5], o[1, 7] = float("nan"), float("inf")
    got = mhc_post(o, X, post, comb)
    assert got[0, :, 5].isnan().all() and (got[1, :, 7] == float("inf")).all() and got.isfinite().sum() == 2 * 4 * 24 - 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["o", "X", "out"])
def test_memory_that_is_not_16_byte_aligned_takes_the_other_path(rng, name, dtype):
    """One tensor 4 bytes past a multiple of 256: the emulator refuses a 16-byte access there."""
    inputs = site(rng, 2, 512, dtype)
    assert_as_good(mhc_post(*inputs, offsets={name: 4}), *inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [7, 129, 192, 1032])
@pytest.mark.parametrize("P", range(1, 5))
def test_an_output_in_parts_is_its_sum(rng, P, D, dtype):
    """Bit for bit, on both paths, strided and where the parts alone are not 16-byte aligned."""
    parts, (_, X, post, comb) = parts_of(rng, P, 3, D), site(rng, 3, D, dtype)
    want = mhc_post(whole(parts, dtype), X, post, comb)
    assert torch.equal(mhc_post(parts, X, post, comb), want)
    strided = parts.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(mhc_post(strided, X, post, comb, reverse=True, offsets={"o": 4}), want)


def test_strided_inputs_and_no_tokens(rng):
    o, X, post, comb = site(rng, 3, 40, torch.float32)
    strided = o.T.contiguous().T, X.transpose(1, 2).contiguous().transpose(1, 2), post.T.contiguous().T, comb.mT.contiguous().mT
    assert torch.equal(mhc_post(*strided), mhc_post(o, X, post, comb))
    assert mhc_post(o[:0], X[:0], post[:0], comb[:0]).shape == (0, 4, 40)
    assert mhc_post(torch.zeros(2, 0, 40), X[:0], post[:0], comb[:0]).shape == (0, 4, 40)


@pytest.mark.parametrize("change", [
    lambda o, X, p, c: (o[:, :5], X, p, c), lambda o, X, p, c: (o, X[:, :3], p[:, :3], c[:, :3, :3]),
    lambda o, X, p, c: (o.bfloat16(), X, p, c),
    lambda o, X, p, c: (o, X, p.bfloat16(), c), lambda o, X, p, c: (o, X, p, c[:1]), lambda o, X, p, c: (o.half(), X.half(), p, c),
    lambda o, X, p, c: (o[0], X, p, c), lambda o, X, p, c: (o.expand(5, 2, 8), X, p, c), lambda o, X, p, c: (o.expand(0, 2, 8), X, p, c),
    lambda o, X, p, c: (o.expand(2, 2, 8).bfloat16(), X, p, c), lambda o, X, p, c: (o[:1].expand(2, 1, 8), X, p, c),
    lambda o, X, p, c: (o.expand(1, 2, 2, 8), X, p, c), lambda o, X, p, c: (o, X[0], p, c),
])
def test_what_the_kernel_does_not_take(rng, change):
    with pytest.raises(UserError, match=r"mhc_post: expected o \[S, D\] and X \[S, 4, D\] in one dtype.*, found o \["):
        mhc_post(*change(*site(rng, 2, 8, torch.float32)))


def test_more_tokens_than_the_grid_has_rows():
    o = torch.zeros(1, 1).expand(65536, 1)
    with pytest.raises(UserError, match="S up to 65535, found"):
        mhc_post(o, o[:, None].expand(-1, 4, -1), o.expand(-1, 4), o[:, None].expand(-1, 4, 4))
