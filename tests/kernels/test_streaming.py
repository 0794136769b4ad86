"""Streamed experts on the kernels: slots, their order, their factors, against resident experts, bit for bit; and their memory against the
plan's. On the emulator."""

from dataclasses import replace

import pytest
import torch

from dsv4 import ops, streaming
from dsv4.checkpoint import Checkpoint
from dsv4.config import PRESETS
from dsv4.decode import Decoder
from dsv4.errors import UserError
from dsv4.formats import Weight
from dsv4.layers import Binder, Numerics
from dsv4.layers.moe import MoE
from dsv4.layers.step import Rope, Step
from dsv4.model import Model
from dsv4.ops import backend
from dsv4.plan import DevicePlan, Plan, Planner, Room, Wish
from dsv4.sampler import Sampler, Sampling
from dsv4.streaming import Supply
from dsv4.synthetic import SyntheticCheckpoint
from helpers.make_checkpoint import write_true_size

from ..emulator.emulator import emulated, needs_gxx

CPU = torch.device("cpu")
NUMERICS = Numerics(dtype=torch.bfloat16)
CONFIG = replace(PRESETS["tiny"], num_hidden_layers=2, compress_ratios=(4, 0), num_hash_layers=1)  # one router of each kind


@pytest.fixture(autouse=True)
def kernels():
    ops.select_backend("cuda")
    yield
    ops.select_backend("torch")
    backend._kernels.clear()


@pytest.fixture(scope="module", params=["nvidia", "official"])
def checkpoint(request, tmp_path_factory):
    """MXFP4's factors are of the scales, so they are known only when an expert is read."""
    folder = tmp_path_factory.mktemp("release") / request.param
    write_true_size(folder, CONFIG, request.param, range(2), seed=4, threads=1)
    return Checkpoint.open(folder)


def layers_of(checkpoint, supply=None):
    return [MoE(Binder(checkpoint, f"layers.{n}.ffn.", CPU, NUMERICS, supply and supply.of(n)), CONFIG, n) for n in range(2)]


def step_of(rng, tokens):
    ids = torch.randint(CONFIG.vocab_size, (tokens,), generator=rng)
    return Step.at(torch.arange(tokens), ids, Rope(CONFIG))


def poison(supply):
    """No slot holds anything that could be taken for an expert: NaN for scales."""
    for pair in supply._places.values():
        for places in pair:
            places.fill_(0xFF)


@needs_gxx
@pytest.mark.parametrize("source", ["host", "disk"])
def test_a_layer_gives_the_sums_of_the_resident_one(checkpoint, source, rng):
    """Layers in turn share the slots; steps of 1 and 5 tokens."""
    supply = Supply(checkpoint, source, CPU, range(2), 8)
    resident, streamed = layers_of(checkpoint), layers_of(checkpoint, supply)
    for tokens in (1, 5):
        step = step_of(rng, tokens)
        x = torch.randn(tokens, CONFIG.hidden_size, generator=rng).bfloat16()
        for kept, brought in zip(resident, streamed, strict=True):
            poison(supply)
            with emulated():
                want, got = kept(x, step), brought(x, step)
            assert want.isfinite().all() and torch.equal(got, want), (tokens, source)


@needs_gxx
@pytest.mark.parametrize("source", ["host", "disk"])
def test_a_captured_step_brings_what_was_chosen_then(checkpoint, source, rng):
    """In a capture nothing is brought; every replay fills the same tensors by what the choice is by then."""
    supply, later = Supply(checkpoint, source, CPU, range(2), 8), []
    (_, kept), (_, brought) = layers_of(checkpoint), layers_of(checkpoint, supply)
    chosen, ids, weights = torch.tensor([[7, 2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.tensor([[0.5, 1.25]])
    x = torch.randn(1, CONFIG.hidden_size, generator=rng).bfloat16()
    poison(supply)
    with streaming.cutting(later.append):
        experts, slots = brought.experts.bring(chosen, ids)
    assert len(later) == 1 and supply.tally.bytes == 0 and all((p == 0xFF).all() for pair in supply._places.values() for p in pair)
    for again in ([[7, 2]], [[0, 5]], [[3, 3]]):
        chosen.copy_(torch.tensor(again))
        later[0]()
        assert slots.tolist() == [[int(e > min(again[0])) for e in again[0]]]  # by ascending number
        with emulated():
            assert torch.equal(ops.moe(x, experts, slots, weights, 1.0), ops.moe(x, kept.experts, chosen, weights, 1.0))


@needs_gxx
def test_the_whole_model(rng):
    """Two layers of the bundled checkpoint: a prompt and a token, resident, and one of them from the files."""
    tiny = Checkpoint.open("checkpoints/tiny")
    prompt, rows, counts = torch.randint(1000, (2,), generator=rng).tolist(), [], []
    for source in (None, "disk"):
        share = DevicePlan(CPU, (2, 3), 0, 0, 0, 0, streamed=(3,) if source else ())
        model = Model(tiny, Plan((2, 3), (share,), 16, 8, False, stream=source), NUMERICS)
        cache = model.new_cache()
        it = Decoder(model, cache, Sampler(Sampling(temperature=0), prompt, 1024, 16, CPU))
        with emulated():
            it.sample(model.forward(prompt, cache))
            rows.append(it.logits.clone())
            it.step()
        rows.append(it.logits)
        counts.append(sum(s.tally.bytes for s in model.supplies.values()))
    assert all(torch.equal(row, rows[i % 2]) for i, row in enumerate(rows)) and len(rows) == 4
    assert counts[0] == 0 < counts[1]


def test_an_expert_of_another_format_is_named(tmp_path, monkeypatch):
    write_true_size(tmp_path / "model", CONFIG, "nvidia", range(2), threads=1)
    checkpoint = Checkpoint.open(tmp_path / "model")
    supply = Supply(checkpoint, "disk", CPU, range(2), 8)
    layer = layers_of(checkpoint, supply)[1]
    take = supply.reader.take
    monkeypatch.setattr(supply.reader, "take", lambda key: take(key)._replace(w2=Weight.plain(torch.zeros(192, 128).bfloat16())))
    with pytest.raises(UserError, match=r"pack_experts: expected experts of one format.* of nvfp4, plain, nvfp4.* in expert 5 of layer 1$"):
        layer.experts.bring(torch.tensor([[5, 6]], dtype=torch.int32), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("format", ["nvidia", "official", "bf16"])
@pytest.mark.parametrize("chunk", [1, 8])
def test_slots_and_weights_are_what_the_plan_says_to_the_byte(format, chunk):
    drawn = SyntheticCheckpoint(CONFIG, format, CPU)
    wish = Wish(range(2), 64, chunk, torch.bfloat16, drawn=True, stream="host")
    (planned,) = Planner(drawn, [Room(torch.device("cuda", 0), 0)], wish).plan.devices  # no room: all that can be is streamed
    share = DevicePlan(CPU, (0, 1), 0, 0, 0, 0, streamed=(0, 1))
    model = Model(drawn, Plan((0, 1), (share,), 64, chunk, False, stream="host"), NUMERICS)
    experts = [block.moe.experts for block in model.layers.values()]
    places = {t.data_ptr(): t.nbytes for e in experts for t in (e.packed.up_routed, e.packed.down_routed)}
    slots = sum(places.values()) + sum(e.packed.factors.nbytes + e.slots.nbytes for e in experts)
    assert planned.streamed == (0, 1) and planned.slots == slots
    assert planned.streamed_bytes == sum(part.nbytes for e in experts for number in range(8) for part in e.shelf.parts(number))
    assert len(experts[0].packed.up_routed) == min(8, 2 * chunk)
