"""The router kernel on the CPU emulator against its definition."""

import pytest
import torch
import torch.nn.functional as F

from dsv4.errors import UserError
from dsv4.kernels import MAX_TOKENS, PROMPT_TOKENS
from dsv4.kernels import router as module
from dsv4.kernels.arrivals import arrivals
from dsv4.ops.router import router_ref

from ..emulator.emulator import emulated, needs_gxx
from . import compare

pytestmark = needs_gxx


def run(*args, how=None, **kwargs):
    with emulated(**(how or {})):
        return module.router(*args, **kwargs)


def assert_right(got, x, gate, top_k, scale, **selection):
    """The experts: those of float64 but where two of its ranks are closer than fp32 can tell. The weights: as good as the definition's."""
    chosen, weights = got
    S = len(x)
    assert chosen.shape == weights.shape == (S, top_k) and chosen.dtype == torch.int32 and weights.dtype == torch.float32
    gate, rows = gate.float(), torch.arange(S)
    scores = F.softplus(x.double() @ gate.double().T).sqrt()
    if "bias" in selection:
        ranks = scores + selection["bias"].double()
        torch.testing.assert_close(ranks.gather(1, chosen.long()), ranks.sort(-1, descending=True).values[:, :top_k], rtol=1e-5, atol=1e-5)
        assert all(len(set(row)) == top_k for row in chosen.tolist())
    else:
        assert torch.equal(chosen.long(), selection["table"][selection["ids"]])
    _, low = router_ref(x, gate, top_k, scale, table=chosen.long(), ids=rows)
    exact = scores.gather(1, chosen.long())
    exact = exact / exact.sum(-1, keepdim=True) * scale
    products = (x.double().abs() @ gate.double().abs().T).gather(1, chosen.long()) * exact  # an error follows the size of what was summed
    compare.assert_as_good(weights, low, exact, roundings=24, scale=products + exact)


# The tiny checkpoint, one expert, ragged D, Flash's and Pro's width and number of experts, more columns than are loaded at once.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("S,D,E,k", [(1, 192, 8, 2), (3, 8, 1, 1), (2, 200, 7, 7), (5, 1032, 33, 8), (1, 4096, 3, 2), (1, 7168, 4, 3),
                                     (8, 7168, 2, 1), (2, 8200, 2, 2), (1, 16, 256, 6), (2, 24, 384, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned(rng, S, D, E, k, dtype, reverse):
    x, gate = torch.randn(S, D, generator=rng).bfloat16(), (torch.randn(E, D, generator=rng) * D**-0.5 * 2).to(dtype)
    bias = torch.randn(E, generator=rng)
    assert_right(run(x, gate, k, 2.5, bias=bias, how={"reverse": reverse}), x, gate, k, 2.5, bias=bias)


@pytest.mark.parametrize("S,D,E", [(1, 200, 40), (8, 4096, 13), (3, 7168, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_either_order_alone_and_after_another_launch(rng, S, D, E, dtype):
    """Whichever block is the last to arrive, whatever the other tokens are; every launch leaves the counter at 0."""
    x, gate = torch.randn(S, D, generator=rng).bfloat16(), (torch.randn(E, D, generator=rng) * D**-0.5 * 2).to(dtype)
    bias = torch.randn(E, generator=rng)
    first = run(x, gate, 3, 2.5, bias=bias)
    for again in (run(x, gate, 3, 2.5, bias=bias), run(x, gate, 3, 2.5, bias=bias, how={"reverse": True}),
                  [torch.cat(part) for part in zip(*(run(row[None], gate, 3, 2.5, bias=bias) for row in x), strict=True)]):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not arrivals("router", x.device, PROMPT_TOKENS // MAX_TOKENS).any()


@pytest.mark.parametrize("S", range(1, 9))
def test_hash_layers_weigh_by_score_too(rng, S):
    x, gate = torch.randn(S, 64, generator=rng).bfloat16(), torch.randn(8, 64, generator=rng) * 0.3
    table = torch.stack([torch.randperm(8, generator=rng)[:3] for _ in range(11)])
    ids = torch.randint(0, 11, (S,), generator=rng)
    ids[0] = 10
    assert_right(run(x, gate, 3, 1.5, table=table, ids=ids), x, gate, 3, 1.5, table=table, ids=ids)


def test_equal_ranks_go_to_the_lower_index(rng):
    """Small whole numbers: sums are exact, so equal logits are equal scores, whatever the order of the additions."""
    x = torch.randint(-1, 2, (8, 64), generator=rng).bfloat16()
    gate = torch.randint(-1, 2, (384, 64), generator=rng).float()
    chosen, _ = run(x, gate, 8, 2.5, bias=torch.zeros(384))
    logits = x.float() @ gate.T
    assert torch.equal(chosen.long(), torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :8])
    assert any((logits[s] == logits[s, chosen[s, 7]]).sum() > 1 for s in range(8))  # there are ties at the last place
    chosen, weights = run(torch.zeros(2, 64).bfloat16(), gate, 8, 2.5, bias=torch.zeros(384))
    assert chosen.tolist() == [list(range(8))] * 2
    torch.testing.assert_close(weights, torch.full((2, 8), 2.5 / 8), rtol=1e-6, atol=0)


@pytest.mark.parametrize("E", [1, 32, 100, 384])
def test_the_largest_of_any_keys(rng, E):
    """Scores that are all the same, so the bias is the order: few values, all different, the largest in a row or 32 apart, NaN."""
    values = [torch.randint(0, n, (E,), generator=rng).float() for n in (1, 2, 5, 40)] + [torch.randperm(E, generator=rng).float()]
    spread = torch.randn(E, generator=rng)
    near, apart, most, two = spread.clone(), spread.clone(), spread.clone(), torch.zeros(E)
    first = int(torch.randint(E, (), generator=rng))
    near[first : first + 20] += 100
    apart[first % 32 :: 32] += 100
    most[: E - 3] = float("nan")
    two[9 % E], two[40 % E] = 2, 1
    for k in {1, min(2, E), min(6, E), min(8, E)}:
        for bias in (*values, near, apart, most, two):
            chosen, _ = run(torch.zeros(1, 8).bfloat16(), torch.zeros(E, 8).bfloat16(), k, 1.0, bias=bias)
            want = torch.sort(bias.nan_to_num(-1e30), descending=True, stable=True).indices[:k]
            assert chosen[0].tolist() == want.tolist()


def test_bias_selects_but_does_not_weigh(rng):
    x, gate, bias = torch.randn(4, 16, generator=rng).bfloat16(), torch.randn(9, 16, generator=rng) * 0.1, torch.zeros(9)
    bias[[2, 5]], bias[7] = torch.tensor([50.0, 100.0]), -100.0
    chosen, weights = run(x, gate, 8, 1.5, bias=bias)
    assert (chosen[:, 0] == 5).all() and (chosen[:, 1] == 2).all() and not (chosen == 7).any()
    ids = torch.arange(4)
    same, alike = run(x, gate, 8, 1.5, table=chosen.long(), ids=ids)
    assert torch.equal(same, chosen) and torch.equal(alike, weights)


def test_negative_ranks_and_signed_zeros():
    """score 0 (softplus of -200 underflows) plus a bias of either zero is one rank; below them come negative ones in their order."""
    x, gate = torch.ones(1, 8).bfloat16(), torch.full((6, 8), -25.0)
    chosen, _ = run(x, gate, 6, 1.0, bias=torch.tensor([-2.0, 0.0, -0.0, -1.0, 0.0, -3.0]))
    assert chosen.tolist() == [[1, 2, 4, 3, 0, 5]]


@pytest.mark.parametrize("D", [192, 8200])
def test_a_packed_gate_gives_the_same_bits(rng, D):
    x, gate = torch.randn(2, D, generator=rng).bfloat16(), torch.randn(8, D, generator=rng).bfloat16().float()
    packed = module.pack_gate(gate)
    assert packed.dtype == torch.bfloat16
    for a, b in zip(run(x, packed, 2, 2.5, bias=torch.zeros(8)), run(x, gate, 2, 2.5, bias=torch.zeros(8)), strict=True):
        assert torch.equal(a, b)
    gate[7, -1] = 1 + 2.0**-20
    assert module.pack_gate(gate) is gate


def test_softplus_is_torchs(rng):
    """Linear above 20; near 0 for very negative logits, where exp and log1p must not lose the value."""
    logits = torch.tensor([20.0, 20.125, 19.875, 0.0, -5.0, -20.0, -60.0, 88.0, 300.0, 1e30])
    gate = torch.zeros(10, 8)
    gate[:, 3] = logits
    x = torch.zeros(1, 8).bfloat16()
    x[0, 3] = 1
    for experts in ([0, 1, 2, 3], [4, 5, 6, 6], [7, 8, 7, 8], [9, 9, 9, 9]):
        _, weights = run(x, gate, 4, 1.0, table=torch.tensor([experts]), ids=torch.zeros(1, dtype=torch.int64))
        want = F.softplus(logits[experts].double()).sqrt()
        torch.testing.assert_close(weights[0].double(), want / want.sum(), rtol=1e-6, atol=0)


def test_an_fp32_gate_counts_to_its_last_bits(rng):
    """Which two bf16 do not hold: logits in the linear part of softplus, each one gate times 1."""
    gate, x = torch.zeros(64, 8), torch.zeros(1, 8).bfloat16()
    gate[:, 3], x[0, 3] = 21 + 20 * torch.rand(64, generator=rng), 1
    _, weights = run(x.expand(8, 8), gate, 8, 1.0, table=torch.arange(64).view(8, 8), ids=torch.arange(8))
    want = gate[:, 3].double().sqrt().view(8, 8)
    torch.testing.assert_close(weights.double(), want / want.sum(-1, keepdim=True), rtol=4e-7, atol=0)


def test_not_finite_never_leaves_the_experts(rng):
    x, gate = torch.randn(4, 16, generator=rng).bfloat16(), torch.randn(9, 16, generator=rng)
    x[1], x[2, 3] = float("nan"), float("inf")
    gate[4, 0] = float("nan")
    chosen, weights = run(x, gate, 8, 1.5, bias=torch.zeros(9))
    assert ((0 <= chosen) & (chosen < 9)).all() and all(len(set(row)) == 8 for row in chosen.tolist())
    assert not (chosen[[0, 3]] == 4).any() and weights[[0, 3]].isfinite().all()  # NaN comes last
    assert chosen[1].tolist() == list(range(8)) and weights[1].isnan().all()


def test_ids_and_entries_that_do_not_exist_stay_inside(rng):
    """Token -1 is what the sampler gives for logits that are not finite: the step after it must not fault."""
    x, gate, table = torch.ones(3, 8).bfloat16(), torch.ones(4, 8), torch.tensor([[0, 1], [3, -7], [2, 99]])
    chosen, _ = run(x, gate, 2, 1.0, table=table, ids=torch.tensor([-1, 1, 2**40]))
    assert chosen.tolist() == [[0, 1], [3, 0], [2, 3]]


def test_what_the_kernel_does_not_take():
    x, gate, bias = torch.zeros(2, 16).bfloat16(), torch.zeros(8, 16), torch.zeros(8)
    table, ids = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for args, selection in (
        ((x.float(), gate, 2), {"bias": bias}), ((x, gate[:, :8], 2), {"bias": bias}), ((x, gate.half(), 2), {"bias": bias}),
        ((x[:, :12], gate[:, :12], 2), {"bias": bias}), ((x, gate, 9), {"bias": bias}), ((x, gate[:1], 2), {"bias": bias[:1]}),
        ((x.new_zeros(1025, 16), gate, 2), {"bias": bias}), ((x[0], gate, 2), {"bias": bias}), ((x[:0], gate, 2), {"bias": bias}),
        ((x, gate, 2), {"bias": bias[:7]}), ((x, gate, 2), {"bias": bias.double()}), ((x, gate, 2), {}),
        ((x, gate, 2), {"bias": bias, "table": table, "ids": ids}), ((x, gate, 2), {"table": table}),
        ((x, gate, 3), {"table": table, "ids": ids}), ((x, gate, 2), {"table": table.int(), "ids": ids}),
        ((x, gate, 2), {"table": table, "ids": ids[:1]}),
        ((x, torch.zeros(385, 16), 2), {"bias": torch.zeros(385)}),
    ):
        with pytest.raises(UserError, match=r"router: expected x \[S, D\] in bf16.*, found x \["):
            run(*args, 1.0, **selection)
