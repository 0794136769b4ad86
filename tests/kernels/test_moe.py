"""The moe kernel on the CPU emulator against its definition."""

import pytest
import torch
import torch.nn.functional as F

from dsv4 import formats, ops
from dsv4.errors import KernelError, UserError
from dsv4.kernels import experts as module
from dsv4.ops.experts import Expert, Experts, moe_ref

from ..emulator.emulator import emulated, needs_gxx
from . import compare

pytestmark = needs_gxx
LIMIT = 1.0  # so low that random values hit it


def quantized(w, kind):
    return {"nvfp4": formats.quantize_nvfp4, "mxfp4": formats.quantize_mxfp4, "fp8": formats.quantize_fp8_block,
            "plain": lambda w: formats.Weight.plain(w.bfloat16())}[kind](w)


def expert(rng, D, inner, kind, scale=1.0):
    """Each projection has its own global scale."""
    w1, w3 = (torch.randn(inner, D, generator=rng) * D**-0.5 * scale * s for s in (1.0, 1.7))
    return Expert(*(quantized(w, kind) for w in (w1, torch.randn(D, inner, generator=rng) * inner**-0.5 * scale, w3)))


def layer(rng, D, inner, E, kind, shared_kind):
    return [expert(rng, D, inner, kind, 1 + e / 4) for e in range(E)], expert(rng, D, inner, shared_kind)


def choice(rng, S, k, E):
    chosen = torch.stack([torch.randperm(E, generator=rng)[:k] for _ in range(S)]).int()
    return chosen, torch.rand(S, k, generator=rng) + 0.1


def run(x, packed, chosen, weights, limit=LIMIT, how=None):
    with emulated(**(how or {})):
        return ops.whole(module.moe(x, packed, chosen, weights, limit), x.dtype)


def exact(x, e, limit, weight):
    """One expert of one token, in float64."""
    w1, w2, w3 = (w.dequantize().double() for w in e)
    gate, up = (w1 @ x.double()).clamp(max=limit), (w3 @ x.double()).clamp(-limit, limit)
    return w2 @ (F.silu(gate) * up * weight)


def assert_as_good(got, x, experts, shared, chosen, weights, limit=LIMIT):
    low = moe_ref(x, Experts(experts, shared), chosen, weights, limit)
    rows = zip(x, chosen.tolist(), weights.double(), strict=True)
    want = [exact(t, shared, limit, 1) + sum(exact(t, experts[e], limit, w) for e, w in zip(row, ws, strict=True)) for t, row, ws in rows]
    compare.assert_as_good(got, low, torch.stack(want), roundings=x.shape[1] ** 0.5)


def assert_right(rng, S, D, inner, E, k, kind, shared_kind, how=None):
    x = torch.randn(S, D, generator=rng).bfloat16()
    experts, shared = layer(rng, D, inner, E, kind, shared_kind)
    chosen, weights = choice(rng, S, k, E)
    got = run(x, module.pack_experts(experts, shared), chosen, weights, how=how)
    assert_as_good(got, x, experts, shared, chosen, weights)
    return got


KINDS = [("nvfp4", "fp8"), ("mxfp4", "fp8"), ("fp8", "fp8"), ("plain", "plain"), ("nvfp4", "nvfp4"), ("plain", "nvfp4")]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind,shared_kind", KINDS)
def test_the_tiny_checkpoint(rng, kind, shared_kind, reverse):
    assert_right(rng, 1, 192, 128, 8, 2, kind, shared_kind, how={"reverse": reverse})


@pytest.mark.parametrize("kind,shared_kind", KINDS)
@pytest.mark.parametrize("S", [2, 5, 8])
def test_several_tokens(rng, S, kind, shared_kind):
    assert_right(rng, S, 192, 128, 8, 2, kind, shared_kind)


# Several items a tile and a ragged last one; rows that fill no tile; fewer tiles than blocks; one expert; all experts; Pro's widths.
@pytest.mark.parametrize("S,D,inner,E,k,kind", [
    (1, 1040, 528, 7, 6, "nvfp4"), (3, 544, 544, 3, 2, "mxfp4"), (1, 712, 392, 3, 3, "fp8"), (2, 264, 136, 3, 1, "plain"),
    (1, 16, 16, 1, 1, "nvfp4"), (4, 8, 8, 2, 2, "plain"), (8, 64, 48, 9, 8, "nvfp4"), (1, 7168, 16, 2, 1, "nvfp4"),
    (1, 16, 3072, 2, 1, "nvfp4"),
])
def test_sizes(rng, S, D, inner, E, k, kind):
    assert_right(rng, S, D, inner, E, k, kind, "plain" if kind == "plain" else "fp8")


def test_a_shared_expert_that_is_most_of_the_work(rng, monkeypatch):
    """Eight tiles over six blocks: some have two of the shared expert's, more than an even part of all the bytes."""
    monkeypatch.setattr(module, "blocks_at_once", lambda device: 6)
    assert_right(rng, 1, 512, 64, 1, 1, "mxfp4", "plain")


@pytest.mark.parametrize("blocks", [1, 4, 7, 64, 264])
def test_any_number_of_blocks(rng, monkeypatch, blocks):
    """From one block with everything to more blocks than there are tiles."""
    monkeypatch.setattr(module, "blocks_at_once", lambda device: blocks)
    assert_right(rng, 2, 64, 48, 6, 2, "nvfp4", "fp8")


@pytest.mark.parametrize("kind,shared_kind", [("nvfp4", "fp8"), ("fp8", "plain")])
def test_more_tiles_than_are_summed_at_a_time(rng, monkeypatch, kind, shared_kind):
    """Eight tokens with up to 48 experts: a block has several hundred tiles, memory for about 15 at a time."""
    monkeypatch.setattr(module, "blocks_at_once", lambda device: 1)
    assert_right(rng, 8, 144, 80, 48, 6, kind, shared_kind)


def test_more_tiles_than_fit_a_block(rng, monkeypatch):
    """w2 of 65 tiles on one block: it becomes more blocks."""
    monkeypatch.setattr(module, "blocks_at_once", lambda device: 1)
    assert_right(rng, 8, 1040, 16, 2, 1, "plain", "plain")


def test_the_result_does_not_depend_on_the_order_of_threads(rng):
    x = torch.randn(4, 192, generator=rng).bfloat16()
    packed, (chosen, weights) = module.pack_experts(*layer(rng, 192, 128, 8, "nvfp4", "fp8")), choice(rng, 4, 3, 8)
    assert torch.equal(run(x, packed, chosen, weights), run(x, packed, chosen, weights, how={"reverse": True}))


def test_a_token_does_not_depend_on_its_neighbours(rng):
    """Nor on the order of its choices: experts are summed by number. The partition depends on the number of experts, so only nearly."""
    x = torch.randn(8, 192, generator=rng).bfloat16()
    packed, (chosen, weights) = module.pack_experts(*layer(rng, 192, 128, 8, "nvfp4", "fp8")), choice(rng, 8, 3, 8)
    together = run(x, packed, chosen, weights)
    alone = torch.cat([run(x[s : s + 1], packed, chosen[s : s + 1], weights[s : s + 1]) for s in range(8)])
    torch.testing.assert_close(together, alone, rtol=2**-7, atol=1e-3 * float(alone.abs().max()))
    assert torch.equal(run(x, packed, chosen.flip(1), weights.flip(1)), together)


@pytest.mark.parametrize("same", ["all tokens", "all experts"])
def test_equal_ones(rng, same):
    """All tokens chose one pair of experts; or all experts are one, with weights of 1/3: then their sum is that one."""
    x = torch.randn(6, 192, generator=rng).bfloat16()
    experts, shared = layer(rng, 192, 128, 8, "nvfp4", "fp8")
    chosen, weights = choice(rng, 6, 3, 8)
    if same == "all tokens":
        chosen = torch.tensor([[7, 2, 5]] * 6, dtype=torch.int32)
    else:
        experts, weights = experts[:1] * 8, torch.full((6, 3), 1 / 3)
    assert_as_good(run(x, module.pack_experts(experts, shared), chosen, weights), x, experts, shared, chosen, weights)


@pytest.mark.parametrize("tokens", [[0, 1], [0], [1]])  # a single one has a shorter way while no expert is there twice
def test_an_expert_that_a_token_chose_twice_counts_twice(rng, tokens):
    x = torch.randn(len(tokens), 192, generator=rng).bfloat16()
    experts, shared = layer(rng, 192, 128, 4, "fp8", "fp8")
    chosen, weights = torch.tensor([[1, 3, 1], [0, 0, 0]], dtype=torch.int32), torch.tensor([[0.25, 1.0, 0.5], [0.5, 0.25, 0.125]])
    got = run(x, module.pack_experts(experts, shared), chosen[tokens], weights[tokens])
    once, together = torch.tensor([[1, 3], [0, 0]]), torch.tensor([[0.75, 1.0], [0.875, 0.0]])
    assert_as_good(got, x, experts, shared, once[tokens], together[tokens])


def test_the_gate_is_clamped_from_above_only_and_up_on_both_sides():
    """w1 = a, w3 = b, w2 = 1 of one column each: silu(min(a, 2)) * clamp(b, -2, 2), twice with the shared expert."""
    for a, b in ((5.0, 1.0), (-5.0, 1.0), (1.0, 5.0), (1.0, -5.0), (-100.0, 3.0), (2.0, 2.0)):
        w = [torch.zeros(8, 8) for _ in range(3)]
        w[0][0, 0], w[1][3, 0], w[2][0, 0] = a, 1.0, b
        e = Expert(*(formats.Weight.plain(m.bfloat16()) for m in w))
        x = torch.zeros(1, 8).bfloat16()
        x[0, 0] = 1
        got = run(x, module.pack_experts([e, e], e), torch.tensor([[1]], dtype=torch.int32), torch.ones(1, 1), limit=2.0)
        half = (F.silu(torch.tensor(min(a, 2.0))) * max(-2.0, min(b, 2.0))).bfloat16().float()
        assert got[0].tolist() == [0, 0, 0, float((2 * half).bfloat16()), 0, 0, 0, 0], (a, b)


def test_zeros(rng):
    """Weights of the choice, of an expert, of everything; tokens of zeros."""
    x = torch.randn(3, 192, generator=rng).bfloat16()
    x[2] = 0
    experts, shared = layer(rng, 192, 128, 4, "nvfp4", "fp8")
    nothing = Expert(*(quantized(torch.zeros(w.shape), "nvfp4") for w in experts[0]))
    chosen, weights = torch.tensor([[0, 1], [2, 3], [0, 3]], dtype=torch.int32), torch.zeros(3, 2)
    only_shared = run(x, module.pack_experts(experts, shared), chosen, weights)
    assert_as_good(only_shared, x, experts, shared, chosen, weights)
    assert torch.equal(run(x, module.pack_experts([nothing] * 4, shared), chosen, weights + 1), only_shared)
    assert (only_shared[2] == 0).all()
    no_shared = Expert(*(quantized(torch.zeros(w.shape), "fp8") for w in shared))
    assert (run(x, module.pack_experts([nothing] * 4, no_shared), chosen, weights + 1) == 0).all()


def test_not_finite_stays_with_its_token(rng):
    x = torch.randn(3, 192, generator=rng).bfloat16()
    x[1, 5] = float("nan")
    packed, (chosen, weights) = module.pack_experts(*layer(rng, 192, 128, 8, "fp8", "fp8")), choice(rng, 3, 2, 8)
    got = run(x, packed, chosen, weights)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


def test_packed_experts_take_the_bytes_of_their_weights(rng):
    """But for FP8's scales, fp32 for 8 rows x 128 columns, and the factors."""
    experts, shared = layer(rng, 512, 256, 4, "nvfp4", "plain")
    weights = sum(w.payload.numel() + w.scale.numel() for e in experts for w in e) + sum(w.nbytes for w in shared)
    padding = 4 * 512 * 256 * 9 // 16  # w2's 256 columns fill half an item
    assert module.pack_experts(experts, shared).nbytes == weights + padding + 5 * 3 * 4


def test_experts_are_taken_one_by_one(rng):
    """From a sequence that makes them when they are asked for."""
    experts, shared = layer(rng, 64, 32, 3, "nvfp4", "fp8")

    class Lazy:
        def __len__(self):
            return 3

        def __iter__(self):
            for e in experts:
                taken[0] += 1
                yield e

    taken = [0]
    got, want = module.pack_experts(Lazy(), shared), module.pack_experts(experts, shared)
    assert taken == [3] and all(torch.equal(a, b) for a, b in zip(got[:5], want[:5], strict=True)) and got[5:] == want[5:]


def test_what_cannot_be_packed(rng):
    experts, shared = layer(rng, 64, 32, 3, "nvfp4", "fp8")
    for wrong in ([*experts, expert(rng, 64, 32, "mxfp4")], [*experts, expert(rng, 64, 48, "nvfp4")],
                  [e._replace(w3=quantized(torch.zeros(32, 64), "fp8")) for e in experts]):
        with pytest.raises(UserError, match=r"pack_experts: expected experts of one format, .* in expert [03]"):
            module.pack_experts(wrong, shared)
    with pytest.raises(UserError, match=r"found w1, w2, w3 of fp8, fp8, nvfp4 and .* in the shared expert$"):
        module.pack_experts(experts, shared._replace(w3=experts[0].w3))
    for wrong in ([], experts[:1] * 385):
        with pytest.raises(UserError, match=f"pack_experts: expected 1 to 384 experts, found {len(wrong)}"):
            module.pack_experts(wrong, shared)


def test_a_table_of_items_that_leaves_no_room_is_refused(rng):
    """64 distinct experts of 27 items each, and the shared one's: no number of blocks makes a tile's table smaller."""
    packed = module.pack_experts([expert(rng, 16, 3336, "plain")] * 64, expert(rng, 16, 3336, "plain"))
    chosen = torch.arange(64, dtype=torch.int32).view(8, 8)
    with pytest.raises(KernelError, match="moe: expected the kernel to launch, found CUDA error 1"):
        run(torch.zeros(8, 16).bfloat16(), packed, chosen, torch.ones(8, 8))


def test_what_the_kernel_does_not_take(rng):
    packed = module.pack_experts(*layer(rng, 64, 32, 3, "nvfp4", "fp8"))
    x, chosen, weights = torch.zeros(2, 64).bfloat16(), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    for args in ((x.float(), chosen, weights), (x[:, :32], chosen, weights), (x[:1], chosen, weights), (x, chosen.long(), weights),
                 (x, chosen, weights.double()), (x, chosen, weights[:, :1]), (x[:0], chosen[:0], weights[:0]),
                 (x.new_zeros(9, 64), chosen.new_zeros(9, 2), weights.new_zeros(9, 2)),
                 (x, chosen.new_zeros(2, 9), weights.new_zeros(2, 9))):
        with pytest.raises(UserError, match=r"moe: expected x \[S, 64\] in bf16.*, found x \["):
            run(args[0], packed, *args[1:])
    with pytest.raises(UserError, match="moe: expected bf16 activations, found fp8 and bf16: run with --backend torch"):
        module.moe(x, packed, chosen, weights, 1.0, "fp8", "bf16")
