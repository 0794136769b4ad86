"""The mhc_pre kernel on the CPU emulator against its definition: pending return, projection, sinkhorn, collapse, norm."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import mhc
from dsv4.ops.mhc import Pending, mhc_post_ref, mhc_pre_ref, sinkhorn, whole

from ..emulator.emulator import emulated, needs_gxx
from ..ops.test_mhc import parts_of
from . import compare

pytestmark = needs_gxx
CONSTANTS = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iterations": 20}


def mhc_pre(X, pending, *site, constants=CONSTANTS, **how):
    with emulated(**how):
        return mhc.mhc_pre(X, pending, *site, **constants)


def random_site(rng, D):
    """fn, base, scale, norm; projections of about 1."""
    return (torch.randn(24, 4 * D, generator=rng) / (4 * D) ** 0.5, torch.randn(24, generator=rng), torch.randn(3, generator=rng),
            torch.randn(D, generator=rng))


def random_streams(rng, S, D):
    return torch.randn(S, 4, D, generator=rng).bfloat16()


def random_pending(rng, S, D):
    return Pending(torch.randn(S, D, generator=rng).bfloat16(), 2 * torch.rand(S, 4, generator=rng),
                   torch.randn(S, 4, 4, generator=rng).softmax(-1))


def exact(X, fn, base, scale, norm, norm_eps, hc_eps, iterations):
    """(x, post, comb) in float64 without rounding, and for each the size of what fp32 rounds on the way to it."""
    X, fn, base, scale, norm = (t.double() for t in (X, fn, base, scale, norm))
    v = X.flatten(1)
    rho = torch.rsqrt(v.square().mean(-1, keepdim=True) + norm_eps)
    slope = torch.cat((scale[:1].expand(4), scale[1:2].expand(4), scale[2:].expand(16)))
    logits = (v @ fn.T) * rho * slope + base
    terms = (v.abs() @ fn.abs().T) * rho * slope.abs() + base.abs()
    half = torch.sigmoid(logits)
    pre, post = half[:, :4] + hc_eps, 2 * half[:, 4:8]
    comb = sinkhorn(logits[:, 8:].unflatten(-1, (4, 4)), iterations, hc_eps)
    x = torch.einsum("sj,sjd->sd", pre, X)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps) * norm
    return (x, post, comb), (x.abs() * (1 + terms[:, :4].amax(-1, keepdim=True)), post * (1 + (1 - half[:, 4:8]) * terms[:, 4:8]),
                             comb * (1 + terms[:, 8:].amax(-1)[:, None, None]))


def assert_as_good(got, X, pending, *site, constants=CONSTANTS):
    """X' against the return in float64, the rest against what float64 makes of that X'.

    Roundings: 5 of a sum of five products; 8 for x and post (the dot product's partial sums, the root, the sigmoid's parts); 16 for comb,
    whose every entry has an error of its row's and column's divisors and, by the softmax and its norming, of four logits.
    """
    streams, *rest = got
    if pending is None:
        assert torch.equal(streams, X)
    else:
        o, post, comb, X64 = (t.double() for t in (*pending, X))
        low = mhc_post_ref(pending.o, X, pending.post, pending.comb)
        returned, size = (torch.einsum("sk,sd->skd", *a) + torch.einsum("sjk,sjd->skd", *b) for a, b in (
            ((post, o), (comb, X64)), ((post.abs(), o.abs()), (comb.abs(), X64.abs()))))
        compare.assert_as_good(streams, low, returned, roundings=5, scale=size)
    want, size = exact(streams, *site, **constants)
    low = mhc_pre_ref(streams, None, *site, **constants)[1:]
    for value, of_low, of_double, roundings, scale in zip(rest, low, want, (8, 8, 16), size, strict=True):
        compare.assert_as_good(value, of_low, of_double, roundings, scale)


# One slice; five; tiny's width; 128 slices of 8 and 64 of 16 with half a one; blocks of 512 columns, whole and with one of 8; the widest
# slices, whole and with a ragged last one; Flash's and Pro's width.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("D", [8, 40, 192, 1024, 1032, 2048, 2056, 4096, 7168, 8184, 8192])
def test_against_the_definition(rng, D, reverse):
    X, pending, site = random_streams(rng, 1, D), random_pending(rng, 1, D), random_site(rng, D)
    assert_as_good(mhc_pre(X, pending, *site, reverse=reverse), X, pending, *site)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("D", [40, 4096])
def test_nothing_pending(rng, D, reverse):
    X, site = random_streams(rng, 2, D), random_site(rng, D)
    got = mhc_pre(X, None, *site, reverse=reverse)
    assert got[0] is X
    assert_as_good(got, X, None, *site)


@pytest.mark.parametrize("S", range(1, 9))
def test_every_token_has_its_own_weights(rng, S):
    """And the bits that it has alone."""
    X, pending, site = random_streams(rng, S, 72), random_pending(rng, S, 72), random_site(rng, 72)
    got = mhc_pre(X, pending, *site)
    assert_as_good(got, X, pending, *site)
    last = mhc_pre(X[-1:], Pending(*(t[-1:] for t in pending)), *site, reverse=True)
    assert all(torch.equal(a[-1:], b) for a, b in zip(got, last, strict=True))


def test_eight_tokens_at_full_width(rng):
    X, pending, site = random_streams(rng, 8, 7168), random_pending(rng, 8, 7168), random_site(rng, 7168)
    assert_as_good(mhc_pre(X, pending, *site), X, pending, *site)


@pytest.mark.parametrize("S", [1, 3, 8])
@pytest.mark.parametrize("D", [8, 72, 1032])
@pytest.mark.parametrize("P", range(1, 5))
def test_a_pending_output_in_parts_is_its_sum(rng, P, D, S):
    """Bit for bit, however the parts lie in memory."""
    X, pending, site, parts = random_streams(rng, S, D), random_pending(rng, S, D), random_site(rng, D), parts_of(rng, P, S, D)
    want = mhc_pre(X, pending._replace(o=whole(parts, torch.bfloat16)), *site)
    for o, how in ((parts, {}), (parts.transpose(0, 1).contiguous().transpose(0, 1), {"reverse": True})):
        assert all(torch.equal(a, b) for a, b in zip(mhc_pre(X, pending._replace(o=o), *site, **how), want, strict=True))


def test_trap_02_comb_is_used_transposed(rng):
    """comb[0, 1] = 1 moves stream 0 into stream 1; one entry of post moves the output into its stream."""
    X, pending, site = random_streams(rng, 2, 24), random_pending(rng, 2, 24), random_site(rng, 24)
    comb, post = torch.zeros(2, 4, 4), torch.zeros(2, 4)
    comb[0, 0, 1] = comb[1, 2, 3] = post[0, 2] = post[1, 0] = 1
    streams = mhc_pre(X, Pending(pending.o, post, comb), *site)[0]
    zero = torch.zeros(24).bfloat16()
    assert torch.equal(streams, torch.stack((torch.stack((zero, X[0, 0], pending.o[0], zero)),
                                             torch.stack((pending.o[1], zero, zero, X[1, 2])))))


def given_logits(rng, comb, pre=None, post=None, D=24):
    """A site whose logits are the base's, as fn is zero."""
    base = torch.cat([torch.zeros(4) if t is None else torch.tensor(t) for t in (pre, post)] + [comb.flatten()])
    return torch.zeros(24, 4 * D), base.float(), torch.ones(3), torch.ones(D)


def test_trap_03_sinkhorn_ends_on_the_column_step(rng):
    """Column sums are 1 to about hc_eps; row sums are not, for logits that 20 iterations do not bring to balance."""
    X = random_streams(rng, 1, 24)
    far = 0
    for _ in range(8):
        site = given_logits(rng, 8 * torch.randn(4, 4, generator=rng))
        got = mhc_pre(X, None, *site)
        assert_as_good(got, X, None, *site)
        assert (got[3].sum(-2) - 1).abs().max() < 4e-6  # hc_eps = 1e-6 and a few fp32 roundings of sums of 4
        far = max(far, float((got[3].sum(-1) - 1).abs().max()))
    assert far > 1e-3


@pytest.mark.parametrize("iterations", [1, 2, 3, 20])
@pytest.mark.parametrize("kind", ["equal", "identity", "permutation", "one column", "one row", "60", "1e4"])
def test_sinkhorn_of_extreme_logits(rng, kind, iterations):
    comb = {
        "equal": torch.full((4, 4), -3.5), "identity": 200 * torch.eye(4), "permutation": 90 * torch.eye(4)[[2, 0, 3, 1]],
        "one column": torch.tensor([100.0, 0, 0, 0]).expand(4, 4), "one row": torch.tensor([100.0, 0, 0, 0])[:, None].expand(4, 4),
        "60": 60 * torch.randn(4, 4, generator=rng), "1e4": 1e4 * torch.randn(4, 4, generator=rng),
    }[kind]
    X, site, constants = random_streams(rng, 1, 24), given_logits(rng, comb), CONSTANTS | {"iterations": iterations}
    got = mhc_pre(X, None, *site, constants=constants)
    assert_as_good(got, X, None, *site, constants=constants)
    assert (got[3] >= 0).all()
    if kind == "equal":
        torch.testing.assert_close(got[3], torch.full((1, 4, 4), 0.25), rtol=0, atol=1e-6)


def test_saturated_sigmoids(rng):
    """pre is hc_eps to 1 + hc_eps, post 0 to 2, exactly where the sigmoid is 0 or 1."""
    X = random_streams(rng, 2, 24)
    site = given_logits(rng, torch.zeros(4, 4), [200.0, -200.0, 0.0, -1e4], [200.0, -200.0, 0.0, 1e4])
    got = mhc_pre(X, None, *site)
    assert_as_good(got, X, None, *site)
    assert torch.equal(got[2], torch.tensor([2.0, 0, 1, 2]).expand(2, 4))


def test_extreme_streams(rng):
    """Zeros; values whose squares are large or vanish beside norm_eps; one stream that is huge beside the others; streams that cancel."""
    S, D = 6, 72
    X, site = random_streams(rng, S, D).float(), random_site(rng, D)
    X[0] = 0
    X[1] *= 1e15
    X[2] *= 1e-21
    X[3, 2] *= 1e8
    X[4, 1:] = -X[4, :1] * torch.tensor([1, 1, 0.996])[:, None]
    X[5] = X[5].abs()
    X = X.bfloat16()
    got = mhc_pre(X, None, *site)
    assert_as_good(got, X, None, *site)
    assert (got[1][0] == 0).all()
    pending = random_pending(rng, S, D)
    pending = pending._replace(o=pending.o * torch.tensor([0, 1e15, 1e-21, 1e8, 1, 1])[:, None].bfloat16())
    assert_as_good(mhc_pre(X, pending, *site), X, pending, *site)


@pytest.mark.parametrize("left", [0, 0.03, 0.1, 0.3, 1, 3])
@pytest.mark.parametrize("D", [24, 1032])
def test_the_norm_of_streams_that_cancel(rng, D, left):
    """Stream 1 takes away what stream 0 adds, but for its rounding (2^-9); `left` is the size of the others beside them."""
    X = 100 * torch.randn(2, 4, D, generator=rng)
    site = given_logits(rng, torch.zeros(4, 4), torch.randn(4, generator=rng).tolist(), D=D)
    weights = torch.sigmoid(site[1][:4]) + CONSTANTS["hc_eps"]
    X[:, 1], X[:, 2:] = -X[:, 0].bfloat16() * weights[0] / weights[1], X[:, 2:] * left
    X = X.bfloat16()
    assert_as_good(mhc_pre(X, None, *site), X, None, *site)


def test_a_column_that_outweighs_all_others_is_rounded_once(rng):
    """It lies half between two bf16 numbers before the norm, and near one behind it."""
    D = 40
    X, (fn, base, scale, norm) = random_streams(rng, 2, D), given_logits(rng, torch.zeros(4, 4), D=D)
    X[:, :, 5] = torch.tensor([1, 1, 1 + 2**-7, 1 + 2**-7]) * 2**14
    site = fn, base, scale, 1.5 / D**0.5 * norm
    assert_as_good(mhc_pre(X, None, *site), X, None, *site)


def test_products_beyond_fp32_of_a_stream_with_no_weight(rng):
    """Its weight is hc_eps, so that the squares of x are within fp32."""
    X = random_streams(rng, 2, 24)
    X[0, 1] *= 1e20
    site = given_logits(rng, torch.zeros(4, 4), [1.0, -200.0, 0.5, -1.0])
    assert_as_good(mhc_pre(X, None, *site), X, None, *site)


def test_squares_beyond_fp32_are_as_defined(rng):
    """rho is 0 then, so that the weights are the base's; the norm of x gives zeros."""
    X, site = (random_streams(rng, 2, 24).float() * torch.tensor([1e25, 1])[:, None, None]).bfloat16(), random_site(rng, 24)
    got, want = mhc_pre(X, None, *site), mhc_pre_ref(X, None, *site, **CONSTANTS)
    assert (got[1][0] == 0).all() and (want[1][0] == 0).all()
    for a, b in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


def test_not_finite_spoils_its_own_token_alone(rng):
    X, pending, site = random_streams(rng, 3, 24), random_pending(rng, 3, 24), random_site(rng, 24)
    X[0, 2, 5], pending.o[2, 7] = float("nan"), float("inf")
    streams, *rest = mhc_pre(X, pending, *site)
    assert streams[0, :, 5].isnan().all() and (streams[2, :, 7] == float("inf")).all() and streams.isfinite().sum() == 3 * 4 * 24 - 8
    assert all(t[0].isnan().all() and t[2].isnan().all() and t[1].isfinite().all() for t in rest)


def test_eps_counts(rng):
    X, pending, site = random_streams(rng, 2, 40), random_pending(rng, 2, 40), random_site(rng, 40)
    constants = {"norm_eps": 0.5, "hc_eps": 0.01, "iterations": 20}
    assert_as_good(mhc_pre(X, pending, *site, constants=constants), X, pending, *site, constants=constants)


def test_strided_inputs(rng):
    X, pending, site = random_streams(rng, 3, 40), random_pending(rng, 3, 40), random_site(rng, 40)
    strided = X[:1].expand(3, 4, 40), Pending(pending.o.T.contiguous().T, pending.post.T.contiguous().T, pending.comb.mT.contiguous().mT)
    got = mhc_pre(*strided, site[0].T.contiguous().T, *site[1:])
    assert all(torch.equal(a, b) for a, b in zip(got, mhc_pre(strided[0].contiguous(), pending, *site), strict=True))


@pytest.mark.parametrize("change", [
    lambda X, *site: (X.float(), *site), lambda X, *site: (X[0], *site), lambda X, *site: (X[:, :3], *site),
    lambda X, *site: (X[:0], *site), lambda X, *site: (X.expand(1025, 4, 24), *site),
    lambda X, fn, *rest: (X, fn[:23], *rest), lambda X, fn, *rest: (X, fn.bfloat16(), *rest),
    lambda X, fn, base, *rest: (X, fn, base[:4], *rest), lambda X, fn, base, scale, norm: (X, fn, base, scale[:1], norm),
    lambda X, fn, base, scale, norm: (X, fn, base, scale, norm[1:]), lambda X, fn, base, scale, norm: (X, fn, base, scale, norm.bfloat16()),
    lambda X, fn, base, scale, norm: (X[:, :, :20], fn[:, :80], base, scale, norm[:20]),
    lambda X, fn, base, scale, norm: (X.repeat(1, 1, 342), fn.repeat(1, 342), base, scale, norm.repeat(342)),
])
def test_what_the_kernel_does_not_take(rng, change):
    X, *site = change(random_streams(rng, 1, 24), *random_site(rng, 24))
    with pytest.raises(UserError, match=r"mhc_pre: expected X \[S, 4, D\] in bf16.*, found X \["):
        mhc_pre(X, None, *site)


@pytest.mark.parametrize("change", [
    lambda o, post, comb: (o[:1], post, comb), lambda o, post, comb: (o.float(), post, comb), lambda o, post, comb: (o, post[:, :3], comb),
    lambda o, post, comb: (o, post.bfloat16(), comb), lambda o, post, comb: (o, post, comb[:, :3]),
    lambda o, post, comb: (o[:, :16], post, comb), lambda o, post, comb: (o.float().expand(5, 2, 24), post, comb),
    lambda o, post, comb: (o.float().expand(0, 2, 24), post, comb), lambda o, post, comb: (o.expand(2, 2, 24), post, comb),
    lambda o, post, comb: (o[:1].float().expand(2, 1, 24), post, comb),
])
def test_what_it_does_not_take_as_pending(rng, change):
    with pytest.raises(UserError, match=r"mhc_pre: expected pending o \[S, D\] in bf16.*, found X \["):
        mhc_pre(random_streams(rng, 2, 24), change(*random_pending(rng, 2, 24)), *random_site(rng, 24))


def test_no_iterations(rng):
    with pytest.raises(UserError, match="at least one iteration instead of 0"):
        mhc_pre(random_streams(rng, 1, 24), None, *random_site(rng, 24), constants=CONSTANTS | {"iterations": 0})
