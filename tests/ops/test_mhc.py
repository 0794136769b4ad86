"""mHC against its formulas in plain Python floats, element by element (model.md section 3)."""

import math

import pytest
import torch

from dsv4 import ops
from dsv4.layers.mhc import Streams

from .test_norm import slow_rms

EPS, HC_EPS, ITERATIONS = 1e-6, 1e-6, 20
CONSTANTS = {"norm_eps": EPS, "hc_eps": HC_EPS, "iterations": ITERATIONS}


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def slow_sinkhorn(C, iterations):
    """Softmax of the rows, columns; then (iterations - 1) times rows, columns. The columns come last."""
    n = len(C)
    tops = [max(row) for row in C]
    C = [[math.exp(v - top) for v in row] for row, top in zip(C, tops, strict=True)]
    C = [[v / sum(row) + HC_EPS for v in row] for row in C]

    def columns(C):
        sums = [sum(C[j][k] for j in range(n)) for k in range(n)]
        return [[C[j][k] / (sums[k] + HC_EPS) for k in range(n)] for j in range(n)]

    C = columns(C)
    for _ in range(iterations - 1):
        C = columns([[v / (sum(row) + HC_EPS) for v in row] for row in C])
    return C


def slow_project(X, fn):
    """X: n lists of D; stream-major flattening, one RMS over all n*D values."""
    v = [value for stream in X for value in stream]
    rho = 1 / math.sqrt(math.fsum(value * value for value in v) / len(v) + EPS)
    return [math.fsum(f * value for f, value in zip(row, v, strict=True)) * rho for row in fn]


def slow_pre(X, fn, base, scale, iterations):
    n, m = len(X), slow_project(X, fn)
    pre = [sigmoid(m[j] * scale[0] + base[j]) + HC_EPS for j in range(n)]
    post = [2 * sigmoid(m[n + j] * scale[1] + base[n + j]) for j in range(n)]
    C = [[m[2 * n + n * j + k] * scale[2] + base[2 * n + n * j + k] for k in range(n)] for j in range(n)]
    x = [sum(pre[j] * X[j][i] for j in range(n)) for i in range(len(X[0]))]
    return x, post, slow_sinkhorn(C, iterations)


def slow_post(o, X, post, comb):
    n = len(X)
    return [[post[k] * o[i] + sum(comb[j][k] * X[j][i] for j in range(n)) for i in range(len(o))] for k in range(n)]


def slow_head(X, fn, base, scale):
    m = slow_project(X, fn)
    weights = [sigmoid(m[j] * scale[0] + base[j]) + HC_EPS for j in range(len(X))]
    return [sum(weights[j] * X[j][i] for j in range(len(X))) for i in range(len(X[0]))]


def site(rng, S, n, D, head=False):
    rows = n if head else (2 + n) * n
    X = torch.randn(S, n, D, generator=rng)
    return X, torch.randn(rows, n * D, generator=rng) * 0.1, torch.randn(rows, generator=rng), torch.randn(1 if head else 3, generator=rng)


# fp32: the projection sums n*D products of magnitude 0.1 (error about 1e-6), and 39 normalisations add 2^-24 each.
CLOSE = {"rtol": 0, "atol": 2e-5}


def tensors(*lists):
    return tuple(torch.tensor(x) for x in lists)


@pytest.mark.parametrize("S,n,D", [(1, 4, 192), (5, 4, 33), (3, 4, 1), (2, 2, 7), (4, 3, 40)])
def test_collapse_and_post(rng, S, n, D):
    X, fn, base, scale = site(rng, S, n, D)
    X[-1] *= 1e-3
    x, post, comb = ops.collapse(X, fn, base, scale, **CONSTANTS)
    o = torch.randn(S, D, generator=rng)
    after = ops.mhc_post(o, X, post, comb)
    assert post.dtype == comb.dtype == torch.float32
    for s in range(S):
        want = tensors(*slow_pre(*(t.double().tolist() for t in (X[s], fn, base, scale)), ITERATIONS))
        for got, expected in zip((x[s], post[s], comb[s]), want, strict=True):
            torch.testing.assert_close(got, expected, **CLOSE)
        want = slow_post(*(t.double().tolist() for t in (o[s], X[s], post[s], comb[s])))
        torch.testing.assert_close(after[s], torch.tensor(want), **CLOSE)


def test_collapse_with_zeros_one_iteration_and_saturated_logits(rng):
    X, fn, base, scale = site(rng, 3, 4, 24)
    X[0] = 0
    base[:8] = torch.tensor([200.0, -200.0, 0, 0] * 2)
    base[8:] = torch.randn(16, generator=rng) * 60
    for iterations in (1, 2, 20):
        x, post, comb = ops.collapse(X, fn, base, scale, norm_eps=EPS, hc_eps=HC_EPS, iterations=iterations)
        assert (x[0] == 0).all()
        for s in range(3):
            want = tensors(*slow_pre(*(t.double().tolist() for t in (X[s], fn, base, scale)), iterations))
            for got, expected in zip((x[s], post[s], comb[s]), want, strict=True):
                # Logits of 60 carry 60 * 2^-24 = 4e-6 into the exponent, and rows of ~1e-6 are divided by their own sum.
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_trap_03_sinkhorn_ends_on_the_column_step(rng):
    """Column sums are 1 to about hc_eps; row sums are not, for logits that 20 iterations do not bring to balance: those of a triangle,
    whose upper half a balanced matrix has to give up."""
    X, fn, base, scale = site(rng, 50, 4, 16)
    base[8:] = -30 * torch.ones(4, 4).tril(-1).flatten()
    _, _, comb = ops.collapse(X, fn, base, scale, **CONSTANTS)
    assert (comb.sum(-2) - 1).abs().max() < 4e-6  # hc_eps = 1e-6 and a few fp32 roundings of sums of 4
    assert (comb.sum(-1) - 1).abs().max() > 1e-4


def test_trap_02_comb_is_used_transposed(rng):
    """X'_k sums comb[j, k] X_j over the first index. An all-ones column 1 of comb's row 0 moves stream 0 into stream 1."""
    X, o = torch.randn(2, 4, 9, generator=rng), torch.zeros(2, 9)
    comb = torch.zeros(2, 4, 4)
    comb[:, 0, 1] = 1
    after = ops.mhc_post(o, X, torch.zeros(2, 4), comb)
    assert torch.equal(after[:, 1], X[:, 0]) and (after[:, [0, 2, 3]] == 0).all()


def test_mhc_post_rounds_once_and_adds_no_residual(rng):
    X, o = torch.randn(3, 4, 40, generator=rng).bfloat16(), torch.randn(3, 40, generator=rng).bfloat16()
    post, comb = torch.rand(3, 4, generator=rng), torch.rand(3, 4, 4, generator=rng)
    after = ops.mhc_post(o, X, post, comb)
    assert torch.equal(after, ops.mhc_post(o.float(), X.float(), post, comb).bfloat16())
    assert (ops.mhc_post(o, X, post * 0, comb * 0) == 0).all()


@pytest.mark.parametrize("S,n,D", [(1, 4, 192), (5, 4, 33), (2, 2, 1)])
def test_hc_head(rng, S, n, D):
    X, fn, base, scale = site(rng, S, n, D, head=True)
    norm = torch.randn(D, generator=rng)
    y = ops.hc_head(X, fn, base, scale, norm, norm_eps=EPS, hc_eps=HC_EPS)
    for s in range(S):
        want = slow_rms(slow_head(*(t.double().tolist() for t in (X[s], fn, base, scale))), norm.double().tolist())
        torch.testing.assert_close(y[s], torch.tensor(want), **CLOSE)


def test_trap_01_the_final_collapse_is_hc_head_and_not_stream_0(rng):
    """Nor the mean or the sum: every stream has its own weight, sigmoid + eps, with no factor 2 and no normalisation."""
    X, fn, base, _ = site(rng, 1, 4, 12, head=True)
    base = torch.tensor([-40.0, 0.0, 40.0, math.log(3.0)])  # weights 0, 1/2, 1, 3/4 when the projection is switched off
    y = ops.hc_head(X, fn, base, torch.zeros(1), torch.ones(12), norm_eps=EPS, hc_eps=HC_EPS)
    want = ops.rms_norm(0.5 * X[0, 1] + X[0, 2] + 0.75 * X[0, 3], torch.ones(12), EPS)
    torch.testing.assert_close(y[0], want, rtol=0, atol=2e-5)  # 4 streams of hc_eps = 1e-6 of ~3


@pytest.mark.parametrize("pending", [False, True])
def test_mhc_pre_returns_what_is_pending_then_collapses_then_norms(rng, pending):
    X, fn, base, scale = site(rng, 3, 4, 24)
    norm = torch.randn(24, generator=rng)
    last = ops.Pending(torch.randn(3, 24, generator=rng), torch.rand(3, 4, generator=rng), torch.rand(3, 4, 4, generator=rng))
    after, x, post, comb = ops.mhc_pre(X, last if pending else None, fn, base, scale, norm, **CONSTANTS)
    assert torch.equal(after, ops.mhc_post(last.o, X, last.post, last.comb) if pending else X)
    want, *returns = ops.collapse(after, fn, base, scale, **CONSTANTS)
    assert torch.equal(x, ops.rms_norm(want, norm, EPS)) and torch.equal(post, returns[0]) and torch.equal(comb, returns[1])


def parts_of(rng, P, S, D):
    """Partial sums whose sum depends on the order in every entry: the first and the last but one cancel, far larger than the others."""
    parts = torch.randn(P, S, D, generator=rng)
    if P > 2:
        parts[0] *= 1e6
        parts[-2] -= parts[0]
    return parts


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("P", range(1, 5))
def test_whole_adds_in_order_and_rounds_once(rng, P, dtype):
    parts = parts_of(rng, P, 3, 20)
    whole = ops.whole(parts, dtype)
    assert whole.dtype == dtype and whole.shape == (3, 20)
    for s in range(3):
        for d in range(20):
            total = parts[0, s, d]
            for p in range(1, P):
                total = total + parts[p, s, d]
            assert whole[s, d] == total.to(dtype)
    assert ops.whole(whole, torch.float32) is whole


def test_the_order_of_parts_counts(rng):
    """What the tests of the order rest on."""
    parts = parts_of(rng, 4, 3, 20)
    assert not torch.equal(ops.whole(parts, torch.float32), ops.whole(parts.flip(0), torch.float32))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("P", range(1, 5))
def test_a_pending_output_in_parts_is_its_sum(rng, P, dtype):
    """Where it returns alone, in mhc_pre, and in the streams that a model ends with."""
    X, fn, base, scale = site(rng, 3, 4, 24)
    X, norm, parts = X.to(dtype), torch.randn(24, generator=rng), parts_of(rng, P, 3, 24)
    returns = torch.rand(3, 4, generator=rng), torch.rand(3, 4, 4, generator=rng)
    whole = ops.whole(parts, dtype)
    want = ops.mhc_post(whole, X, *returns)
    assert torch.equal(ops.mhc_post(parts, X, *returns), want)
    assert torch.equal(Streams(X, ops.Pending(parts, *returns)).settled(), want)
    results = (ops.mhc_pre(X, ops.Pending(o, *returns), fn, base, scale, norm, **CONSTANTS) for o in (parts, whole))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
