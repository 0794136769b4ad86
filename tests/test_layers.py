"""How layers bind weights: which input precision a linear gets, and that dequantised copies change no value."""

from __future__ import annotations

import pytest
import torch

from dsv4 import formats, ops
from dsv4.errors import CheckpointError, UserError
from dsv4.formats import Weight
from dsv4.layers import Binder, Numerics
from dsv4.layers.linear import Linear, Projections
from dsv4.layers.moe import MoE
from tests.memory_checkpoint import CPU, MemoryCheckpoint, random_checkpoint


class PackedCheckpoint(MemoryCheckpoint):
    """Routed experts in NVFP4 and all other linears in FP8, as in NVIDIA's export."""

    def weight(self, name: str) -> Weight:
        w = self.state[name + ".weight"]
        return formats.quantize_nvfp4(w) if ".experts." in name else formats.quantize_fp8_block(w)

    def kind(self, name: str) -> str:
        return "nvfp4" if ".experts." in name else "fp8"


@pytest.mark.parametrize("activations,plain,fp8,mxfp4,nvfp4", [
    ("bf16", "bf16", "bf16", "bf16", "bf16"), ("fp8", "bf16", "fp8", "fp8", "fp8"), ("nvfp4", "bf16", "fp8", "fp8", "nvfp4"),
])
def test_only_quantised_weights_get_quantised_inputs_and_nvfp4_only_nvfp4_ones(activations, plain, fp8, mxfp4, nvfp4):
    numerics = Numerics(activations=activations)
    assert [numerics.input_of(kind) for kind in ("plain", "fp8", "mxfp4", "nvfp4")] == [plain, fp8, mxfp4, nvfp4]


@pytest.fixture
def packed(seed):
    checkpoint = random_checkpoint("small", seed)
    return PackedCheckpoint(checkpoint.config, checkpoint.state)


@pytest.mark.parametrize("keep", [False, True])
def test_linears_take_the_input_of_their_stored_format_also_when_kept_dequantised(packed, rng, keep):
    bind = Binder(packed, "layers.2.attn.", CPU, Numerics(activations="fp8", keep_dequantised=keep))
    weight = packed.weight("layers.2.attn.wq_a")
    x = torch.randn(4, weight.shape[1], generator=rng)
    linear = Linear(bind, "wq_a")
    assert linear.weights[0].kind == ("plain" if keep else "fp8")
    assert torch.equal(linear.weights[0].dequantize(), weight.dequantize())
    assert torch.equal(linear(x), ops.linear(x, (weight,), "fp8")) and not torch.equal(linear(x), ops.linear(x, (weight,)))
    rounded, exact = Projections(bind, ("wq_a", "wkv"), exact=("wkv",))(x)  # what decides something discrete never sees a quantised input
    assert torch.equal(rounded, linear(x))
    assert torch.equal(exact, *ops.projections(x, (packed.weight("layers.2.attn.wkv"),), ("bf16",)))


def test_routed_and_shared_experts_have_their_own_input_precision(packed):
    for activations, routed, shared in (("bf16", "bf16", "bf16"), ("fp8", "fp8", "fp8"), ("nvfp4", "nvfp4", "fp8")):
        moe = MoE(Binder(packed, "layers.2.ffn.", CPU, Numerics(activations=activations)), packed.config, 2)
        assert (moe.activations, moe.shared_activations) == (routed, shared)
    routed, shared = moe.experts
    assert len(routed) == 8 and {w.kind for e in routed for w in e} == {"nvfp4"} and {w.kind for w in shared} == {"fp8"}


def test_experts_of_two_formats_are_refused_where_it_would_matter(packed, monkeypatch):
    """One of a layer's experts is plain: its input must not be quantised, the others' must. The headers say so: no expert is read."""
    weight, kind = PackedCheckpoint.weight, PackedCheckpoint.kind
    odd = "layers.2.ffn.experts.5.w2"
    monkeypatch.setattr(PackedCheckpoint, "kind", lambda self, name: "plain" if name == odd else kind(self, name))
    monkeypatch.setattr(PackedCheckpoint, "weight", lambda self, name: pytest.fail(f"{name} is read"))
    with pytest.raises(CheckpointError, match="one format for the experts of a layer under --activations nvfp4, found nvfp4 and plain"):
        MoE(Binder(packed, "layers.2.ffn.", CPU, Numerics(activations="nvfp4")), packed.config, 2)
    monkeypatch.setattr(PackedCheckpoint, "weight",
                        lambda self, name: Weight.plain(self.state[odd + ".weight"]) if name == odd else weight(self, name))
    assert MoE(Binder(packed, "layers.2.ffn.", CPU, Numerics()), packed.config, 2).activations == "bf16"


def test_experts_are_read_one_by_one_as_they_are_packed(packed, monkeypatch):
    """Whoever packs them has never more than one in its stored form; and what fails in reading one is not the end of them."""
    read, weight = [], PackedCheckpoint.weight
    monkeypatch.setattr(PackedCheckpoint, "weight", lambda self, name: read.append(name) or weight(self, name))

    def pack(routed, shared):
        assert len(routed) == 8 and [name for name in read if ".experts." in name] == []
        for number, expert in enumerate(routed):
            assert read[-3:] == [f"layers.2.ffn.experts.{number}.{w}" for w in ("w1", "w2", "w3")] and len(read) == 3 * (number + 2)
            assert torch.equal(expert.w2.dequantize(), weight(packed, f"layers.2.ffn.experts.{number}.w2").dequantize())
        return number

    with ops.trying_kernel("pack_experts", pack):
        assert MoE(Binder(packed, "layers.2.ffn.", CPU, Numerics()), packed.config, 2).experts == 7

    def fail(self, name):
        if name.endswith("experts.5.w2"):
            raise IndexError("a mistake in reading")
        return weight(self, name)

    monkeypatch.setattr(PackedCheckpoint, "weight", fail)
    with pytest.raises(IndexError, match="a mistake in reading"):
        MoE(Binder(packed, "layers.2.ffn.", CPU, Numerics()), packed.config, 2)


def test_binder_reads_below_its_prefix_in_fp32_or_as_stored(packed):
    bind = Binder(packed, "layers.0.", CPU, Numerics()).below("ffn")
    assert bind.prefix == "layers.0.ffn." and bind.stored("gate.tid2eid").dtype == torch.int64
    assert bind.fp32("gate.weight").dtype == torch.float32
    assert torch.equal(bind.fp32("gate.weight"), packed.state["layers.0.ffn.gate.weight"])


def test_what_a_kernel_refuses_of_a_weight_is_said_with_its_name(packed):
    def refuse(*_):
        raise UserError("packing: expected other weights, found these")

    with ops.trying_kernel("pack_weights", refuse), pytest.raises(UserError, match=r"^layers.2.attn.wq_a \+ wkv: packing: .*torch$"):
        Projections(Binder(packed, "layers.2.attn.", CPU, Numerics()), ("wq_a", "wkv"))
    with ops.trying_kernel("pack_experts", refuse), pytest.raises(UserError, match=r"^layers.2.ffn.experts: packing: .*torch$"):
        MoE(Binder(packed, "layers.2.ffn.", CPU, Numerics()), packed.config, 2)
