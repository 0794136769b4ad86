"""The synthetic checkpoint: true shapes and formats, values that keep the size of what passes through, and a model that runs on it."""

import pytest
import torch

from dsv4.config import PRESETS
from dsv4.exports import FORMATS
from dsv4.layers import Numerics
from dsv4.model import Model
from dsv4.plan import make_plan
from dsv4.synthetic import SyntheticCheckpoint

CPU = torch.device("cpu")
SIMPLE = ("nvidia", "official", "all-nvfp4", "bf16")


@pytest.mark.parametrize("format", FORMATS)
def test_every_linear_is_what_the_format_says_and_has_variance_1_over_in(format):
    checkpoint = SyntheticCheckpoint(PRESETS["tiny"], format, CPU)
    for name in ("layers.2.attn.wq_b", "layers.2.attn.wkv", "layers.2.ffn.experts.3.w2", "layers.2.ffn.shared_experts.w1", "head"):
        need, weight = checkpoint.needs[name], checkpoint.weight(name)
        values = weight.dequantize()
        assert weight.problem() is None and tuple(values.shape) == need.shape
        assert values.std() * need.shape[1] ** 0.5 == pytest.approx(1, abs=0.45)  # a power of two as scale is up to 1.41 off
        assert abs(values.mean()) < 0.03 * values.std() and len(values.unique()) > 15  # both signs alike, all codes
        assert weight.nbytes == checkpoint.bytes_of(need)
        assert torch.equal(values, checkpoint.weight(name).dequantize())  # a name's draw is its own
    assert checkpoint.tensor("layers.0.hc_attn_fn").dtype == torch.float32
    assert not torch.equal(checkpoint.tensor("layers.0.attn_norm.weight"), checkpoint.tensor("layers.1.attn_norm.weight"))
    table = checkpoint.tensor("layers.0.ffn.gate.tid2eid")
    assert table.shape == (1024, 2) and (table[:, 0] != table[:, 1]).all() and len(table.unique()) == 8
    other = SyntheticCheckpoint(PRESETS["tiny"], format, CPU, seed=1)
    assert not torch.equal(other.weight("head").dequantize(), checkpoint.weight("head").dequantize())


def test_bytes_are_those_of_the_published_layers():
    """A Pro CSA layer's experts, NVFP4: 14.27 GB; its attention in FP8."""
    checkpoint = SyntheticCheckpoint(PRESETS["pro"], "nvidia", "meta")
    assert checkpoint.nbytes("layers.2.ffn.experts.") == pytest.approx(14.27e9, rel=1e-3)
    assert checkpoint.nbytes("layers.2.attn.wo_b") == 16384 * 7168 * (1 + 1 / 16384)
    assert checkpoint.layer_bytes(2) > checkpoint.layer_bytes(3) > checkpoint.nbytes("layers.3.ffn.")


@pytest.mark.parametrize("format", SIMPLE)
def test_a_model_runs_on_it_and_its_streams_keep_their_size(format):
    checkpoint = SyntheticCheckpoint(PRESETS["tiny"], format, CPU)
    plan = make_plan(checkpoint, [CPU], layers=range(6), context=64, chunk=64, dtype=torch.float32, free_bytes=lambda device: 10**12)
    model, sizes = Model(checkpoint, plan, Numerics()), []
    model.on_layer = lambda n, streams: sizes.append(float(streams.settled().square().mean().sqrt()))
    logits = model.forward(list(range(40)), model.new_cache(), "all")
    assert logits.isfinite().all() and 0.3 < logits.std() < 3
    assert all(0.1 < size < 10 for size in sizes), sizes
