"""Attention with a sink against its formula in plain Python floats (model.md sections 4 and 5)."""

import importlib
import math

import pytest
import torch

from dsv4 import ops

module = importlib.import_module("dsv4.ops.attention")  # the package gives the operation that name


def slow_attention(q, keys, mask, sink):
    """q [S][H][d], keys [K][d], mask [S][K], sink [H]: p_i = exp(a_i - M) / (sum exp(a_i - M) + exp(sink - M))."""
    out = []
    for heads, seen in zip(q, mask, strict=True):
        visible = [k for k, yes in zip(keys, seen, strict=True) if yes]
        row = []
        for head, extra in zip(heads, sink, strict=True):
            a = [math.fsum(x * y for x, y in zip(head, k, strict=True)) / math.sqrt(len(head)) for k in visible]
            top = max([*a, extra])
            p = [math.exp(v - top) for v in a]
            total = math.fsum(p) + math.exp(extra - top)
            row.append([math.fsum(w * k[i] for w, k in zip(p, visible, strict=True)) / total for i in range(len(head))])
        out.append(row)
    return out


def case(rng, S, H, d, K):
    q, keys = torch.randn(S, H, d, generator=rng), torch.randn(K, d, generator=rng)
    mask = torch.rand(S, K, generator=rng) < 0.5
    mask[torch.arange(S), torch.randint(0, K, (S,), generator=rng)] = True
    return q, keys, mask, torch.randn(H, generator=rng) * 3


def slow(q, keys, mask, sink):
    return torch.tensor(slow_attention(q.double().tolist(), keys.double().tolist(), mask.tolist(), sink.double().tolist()))


# Scores of order 1..10 in fp32: exp turns 1e-6 absolute into 1e-6 relative, and weights sum to at most 1 over values of order 1..4.
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize("S,H,d,K", [(1, 1, 512, 1), (3, 2, 512, 5), (4, 3, 80, 17), (7, 5, 64, 130), (1, 4, 8, 33)])
def test_attention(rng, S, H, d, K):
    inputs = case(rng, S, H, d, K)
    torch.testing.assert_close(ops.attend(*inputs), slow(*inputs), **CLOSE)


def test_large_scores_and_sinks_do_not_overflow(rng):
    q, keys, mask, sink = case(rng, 4, 4, 16, 9)
    q *= 100  # scores of several hundred: exp overflows without the maximum
    sink = torch.tensor([-1e4, 0.0, 300.0, 1e4])
    got = ops.attend(q, keys, mask, sink)
    # Scores up to 1000 have an fp32 step of 6e-5, which exp makes relative.
    torch.testing.assert_close(got, slow(q, keys, mask, sink), rtol=0, atol=1e-3)
    assert (got[:, 3] == 0).all()  # such a sink takes all of the weight
    assert got.isfinite().all()


def test_trap_05_the_sink_is_unscaled_and_only_in_the_denominator():
    """q = 0 makes every score 0: each of K keys weighs 1 / (K + exp(sink)), with the sink as it is and without a value of its own."""
    d, sink = 512, torch.tensor([-3.0, 0.0, 2.0, 5.0])
    keys = torch.arange(1, 4, dtype=torch.float32)[:, None].expand(3, d)
    got = ops.attend(torch.zeros(1, 4, d), keys, torch.ones(1, 3, dtype=torch.bool), sink)
    for h in range(4):
        want = (1 + 2 + 3) / (3 + math.exp(sink[h]))
        assert got[0, h].tolist() == pytest.approx([want] * d, rel=1e-6)  # a few fp32 roundings


def test_a_key_outside_the_mask_does_not_matter(rng):
    q, keys, mask, sink = case(rng, 3, 2, 32, 20)
    mask[:, 7], mask[:, 3] = False, True
    want = ops.attend(q, keys, mask, sink)
    keys[7] = 1e30
    assert torch.equal(ops.attend(q, keys, mask, sink), want)


def test_bf16_rounds_the_weights_before_the_values_but_sums_them_unrounded():
    """As the official kernel: P in bf16 meets the values, the denominator sums fp32 P, the division comes last.

    q = 0 and a sink s give every key p = e^-s against the maximum s. p a little under 0.5 (1 + 2^-8) rounds down to 0.5: 4000 keys of
    value 1 then give 0.5 / p = 0.9956, in bf16 1 - 2^-8. With the rounded p in the sum too, or never rounded, it would be 0.9995, 1.0.
    """
    p = 0.5 * (1 + 2.0**-8 - 2.0**-12)
    got = ops.attend(torch.zeros(1, 1, 2).bfloat16(), torch.ones(4000, 2).bfloat16(), torch.ones(1, 4000, dtype=torch.bool),
                        torch.tensor([-math.log(p)]))
    assert got.dtype == torch.bfloat16 and got.flatten().tolist() == [1 - 2.0**-8] * 2
    exact = ops.attend(torch.zeros(1, 1, 2), torch.ones(4000, 2), torch.ones(1, 4000, dtype=torch.bool), torch.tensor([-math.log(p)]))
    assert exact.flatten().tolist() == pytest.approx([4000 * p / (4000 * p + 1)] * 2, rel=1e-6)  # fp32: no rounding of p


def test_tiles_give_what_one_piece_gives(rng, monkeypatch):
    inputs = case(rng, 11, 3, 16, 50)
    whole = ops.attend(*inputs)
    for tile in (1, 151, 3 * 50 * 4, 3 * 50 * 11):  # one row at a time; several; exactly all
        monkeypatch.setattr(module, "TILE", tile)
        torch.testing.assert_close(ops.attend(*inputs), whole, rtol=0, atol=1e-6)  # another GEMM shape sums in another order
