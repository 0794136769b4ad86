"""The hc_head kernel on the CPU emulator against its definition: the last collapse of the streams and the last norm."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import mhc
from dsv4.ops.mhc import hc_head_ref

from ..emulator.emulator import emulated, needs_gxx
from . import compare

pytestmark = needs_gxx
CONSTANTS = {"norm_eps": 1e-6, "hc_eps": 1e-6}


def hc_head(X, *site, constants=CONSTANTS, **how):
    with emulated(**how):
        return mhc.hc_head(X, *site, **constants)


def random_inputs(rng, S, D):
    """X, and a site whose projections are about 1."""
    return (torch.randn(S, 4, D, generator=rng).bfloat16(), torch.randn(4, 4 * D, generator=rng) / (4 * D) ** 0.5,
            torch.randn(4, generator=rng), torch.randn(1, generator=rng), torch.randn(D, generator=rng))


def assert_as_good(got, X, fn, base, scale, norm, constants=CONSTANTS):
    """8 roundings: of the dot product's partial sums, the roots, the sigmoid's parts, the sum of four and the products behind it."""
    X64, fn64, base64, scale64, norm64 = (t.double() for t in (X, fn, base, scale, norm))
    v = X64.flatten(1)
    rho = torch.rsqrt(v.square().mean(-1, keepdim=True) + constants["norm_eps"])
    weights = torch.sigmoid(v @ fn64.T * rho * scale64 + base64) + constants["hc_eps"]
    terms = v.abs() @ fn64.abs().T * rho * scale64.abs() + base64.abs()
    y = torch.einsum("sj,sjd->sd", weights, X64)
    want = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + constants["norm_eps"]) * norm64
    low = hc_head_ref(X, fn, base, scale, norm, **constants)
    compare.assert_as_good(got, low, want, roundings=8, scale=want.abs() * (1 + terms.amax(-1, keepdim=True)))


# As for mhc_pre: one slice, five, tiny's width, 128 slices and 64 with half a one, blocks of 512 columns and of 8, Flash and Pro.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("D", [8, 40, 192, 1024, 1032, 2048, 2056, 4096, 7168, 8184, 8192])
def test_against_the_definition(rng, D, reverse):
    inputs = random_inputs(rng, 1, D)
    assert_as_good(hc_head(*inputs, reverse=reverse), *inputs)


@pytest.mark.parametrize("S", range(1, 9))
def test_every_token_has_its_own_weights(rng, S):
    """And the bits that it has alone."""
    X, *site = random_inputs(rng, S, 72)
    got = hc_head(X, *site)
    assert_as_good(got, X, *site)
    assert torch.equal(got[-1:], hc_head(X[-1:], *site, reverse=True))


def test_no_factor_two_and_no_softmax(rng):
    """Base 200, -200, 0, 0 and no projection: weights 1, 0, 1/2, 1/2, each with hc_eps, as the norm hides a common factor but no ratio."""
    X, _, _, _, norm = random_inputs(rng, 2, 24)
    site = torch.zeros(4, 96), torch.tensor([200.0, -200, 0, 0]), torch.ones(1), norm
    got = hc_head(X, *site)
    assert_as_good(got, X, *site)
    y = (X[:, 0].double() + X[:, 2:].double().sum(1) / 2)
    want = y * torch.rsqrt(y.square().mean(-1, keepdim=True)) * norm.double()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=0.05)


def test_extremes(rng):
    """Zeros; large and vanishing squares; one huge stream; one sign; squares beyond fp32 (the norm gives zeros); NaN in one token."""
    X, *site = random_inputs(rng, 7, 72)
    X = X.float()
    X[0], X[1], X[2], X[3, 2], X[4], X[5], X[6, 1, 9] = 0, X[1] * 1e15, X[2] * 1e-21, X[3, 2] * 1e8, X[4].abs(), X[5] * 1e25, float("nan")
    X = X.bfloat16()
    got = hc_head(X, *site)
    assert_as_good(got[:5], X[:5], *site)
    assert (got[0] == 0).all() and (got[5] == 0).all() and got[6].isnan().all()


@pytest.mark.parametrize("left", [0, 0.1, 1])
def test_the_norm_of_streams_that_cancel(rng, left):
    """As in mhc_pre's test: stream 3 takes away what stream 1 adds."""
    D, base = 1032, torch.randn(4, generator=rng)
    X, weights = 100 * torch.randn(2, 4, D, generator=rng), torch.sigmoid(base) + CONSTANTS["hc_eps"]
    X[:, 3], X[:, ::2] = -X[:, 1].bfloat16() * weights[1] / weights[3], X[:, ::2] * left
    inputs = X.bfloat16(), torch.zeros(4, 4 * D), base, torch.ones(1), torch.randn(D, generator=rng)
    assert_as_good(hc_head(*inputs), *inputs)


def test_eps_counts(rng):
    inputs, constants = random_inputs(rng, 2, 40), {"norm_eps": 0.5, "hc_eps": 0.1}
    assert_as_good(hc_head(*inputs, constants=constants), *inputs, constants=constants)


@pytest.mark.parametrize("change", [
    lambda X, *site: (X.float(), *site), lambda X, *site: (X[0], *site), lambda X, *site: (X[:, :3], *site),
    lambda X, *site: (X.expand(1025, 4, 24), *site), lambda X, fn, *rest: (X, fn.repeat(6, 1), *rest),
    lambda X, fn, base, *rest: (X, fn, base[:3], *rest), lambda X, fn, base, scale, norm: (X, fn, base, scale.expand(3), norm),
    lambda X, fn, base, scale, norm: (X, fn, base, scale, norm.bfloat16()),
    lambda X, fn, base, scale, norm: (X[:, :, :20], fn[:, :80], base, scale, norm[:20]),
])
def test_what_the_kernel_does_not_take(rng, change):
    X, *site = random_inputs(rng, 1, 24)
    with pytest.raises(UserError, match=r"hc_head: expected X \[S, 4, D\] in bf16.*, found X \["):
        hc_head(*change(X, *site))
