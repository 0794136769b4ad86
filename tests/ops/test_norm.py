"""RMS norms, plain and fused with RoPE, against sums in float64 (model.md sections 2, 4 and 6)."""

import math

import pytest
import torch

from dsv4 import ops

EPS = 1e-6


def slow_rms(vector, weight=None):
    scale = 1 / math.sqrt(math.fsum(v * v for v in vector) / len(vector) + EPS)
    return [v * scale * (1.0 if weight is None else w) for v, w in zip(vector, weight or vector, strict=True)]


def slow_rope(vector, cos, sin):
    out, start = list(vector), len(vector) - 2 * len(cos)
    for i, (c, s) in enumerate(zip(cos, sin, strict=True)):
        a, b = vector[start + 2 * i], vector[start + 2 * i + 1]
        out[start + 2 * i], out[start + 2 * i + 1] = a * c - b * s, a * s + b * c
    return out


def inputs(rng, width):
    """Ordinary rows, zeros, one value alone, the smallest and large ones."""
    x = torch.randn(6, width, generator=rng)
    x[1], x[3], x[4] = 0, 1e-20, x[4] * 1e12
    x[2, 1:] = 0
    return x


@pytest.mark.parametrize("width", [1, 7, 192, 512, 4097])
def test_rms_norm(rng, width):
    x, w = inputs(rng, width), torch.randn(width, generator=rng)
    got = ops.rms_norm(x, w, EPS)
    want = torch.tensor([slow_rms(row, w.double().tolist()) for row in x.double().tolist()])
    # Sum of `width` positive squares in fp32 and four roundings: about 1e-6 relative at these widths; 1e-30 for underflowing squares.
    torch.testing.assert_close(got, want, rtol=3e-6, atol=1e-30)
    assert (got[1] == 0).all() and got[2, 0] != 0


def rounded_once(got, exact):
    """Whether bf16 `got` is within half a step of `exact` everywhere; 1 % more for the fp32 noise of test_rms_norm at a tie."""
    half_step = torch.exp2(torch.frexp(exact.double()).exponent.double() - 9)  # 8 significant bits
    return ((got.double() - exact.double()).abs() <= 1.01 * half_step).all()


def test_rms_norm_rounds_once_in_bf16(rng):
    """One rounding, after the weight: rounding before it as well, as older transformers did, differs."""
    x, w = torch.randn(40, 96, generator=rng).bfloat16(), torch.randn(96, generator=rng)
    got, exact = ops.rms_norm(x, w, EPS), torch.tensor([slow_rms(row, w.double().tolist()) for row in x.double().tolist()])
    assert got.dtype == torch.bfloat16
    # Two roundings come to as much as a whole step.
    assert rounded_once(got, exact)


@pytest.mark.parametrize("d,turned", [(512, 64), (80, 24)])
def test_trap_04_q_has_an_rms_norm_per_head_without_a_weight(rng, d, turned):
    q = torch.stack([inputs(rng, d) for _ in range(3)], 1)
    q[:, 2] *= 50  # the norm is each head's own: a common one would let this head drown the others
    cos, sin = ops.rope_table(torch.tensor([0, 1, 3, 4, 127, 128]), ops.rope_frequencies(turned, 1e4))
    got = ops.query_norm_rope(q, cos, sin, EPS)
    want = [[slow_rope(slow_rms(v), c, s) for v in heads]
            for heads, c, s in zip(q.double().tolist(), cos.double().tolist(), sin.double().tolist(), strict=True)]
    torch.testing.assert_close(got, torch.tensor(want), rtol=3e-6, atol=5e-6)  # the norm's 3e-6 on values of up to sqrt(d) in row 2
    assert abs(got[0].square().mean(-1) - 1).max() < 1e-5  # every head has an RMS of 1: rope keeps lengths
    low = q.bfloat16()
    assert torch.equal(ops.query_norm_rope(low, cos, sin, EPS), ops.query_norm_rope(low.float(), cos, sin, EPS).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d,turned", [(512, 64), (80, 24), (64, 16)])
def test_kv_norm_rope(rng, d, turned, dtype):
    # Weights over 2^16: with values of one size, blocks of 32 or of 128 would give the same numbers as blocks of 64.
    kv, w = inputs(rng, d).to(dtype), torch.randn(d, generator=rng) * torch.exp2(torch.randint(-16, 1, (d,), generator=rng))
    cos, sin = ops.rope_table(torch.tensor([0, 1, 3, 4, 127, 128]), ops.rope_frequencies(turned, 1e4))
    exact = ops.kv_norm_rope(kv, w, cos, sin, EPS, False)
    assert exact.dtype == dtype
    want = torch.tensor([slow_rope(slow_rms(v, w.double().tolist()), c, s)
                         for v, c, s in zip(kv.double().tolist(), cos.double().tolist(), sin.double().tolist(), strict=True)])
    if dtype == torch.float32:
        torch.testing.assert_close(exact, want, rtol=3e-6, atol=5e-6)  # as in test_trap_04
    else:  # row 2's values of sqrt(d) bring an fp32 noise that is large beside the small values RoPE makes of them
        ordinary = [0, 1, 3, 4, 5]
        assert rounded_once(exact[ordinary][want[ordinary].abs() > 0.01], want[ordinary][want[ordinary].abs() > 0.01])
    quantised = ops.kv_norm_rope(kv, w, cos, sin, EPS, True)
    plain = d - turned
    assert torch.equal(quantised[:, plain:], exact[:, plain:])  # the rotary dims stay as they are
    for start in range(0, plain, 64):  # blocks of 64, after norm, rope and rounding (tests/ops/test_quant.py holds the rule itself)
        stop = min(start + 64, plain)
        assert torch.equal(quantised[:, start:stop], ops.fp8_round_trip(exact[:, start:stop], 64))
    assert not torch.equal(quantised, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first,S,R", [(0, 1, 20), (18, 5, 20), (127, 3, 131)])
def test_latents_norms_both_and_writes_the_ring(rng, first, S, R, dtype):
    qa, kv, q_norm, kv_norm = (torch.randn(*shape, generator=rng) for shape in ((S, 48), (S, 512), (48,), (512,)))
    positions, window = torch.arange(first, first + S), torch.randn(R, 512, generator=rng).to(dtype)
    cos, sin = ops.rope_table(positions, ops.rope_frequencies(64, 1e4))
    before = window.clone()
    qr = ops.latents(qa, kv, q_norm, kv_norm, cos, sin, positions, window, EPS, True)
    assert torch.equal(qr, ops.rms_norm(qa, q_norm, EPS).to(dtype))
    want = ops.kv_norm_rope(kv.to(dtype), kv_norm, cos, sin, EPS, True)
    for s in range(S):
        before[(first + s) % R] = want[s]
    assert torch.equal(window, before)
