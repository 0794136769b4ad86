"""The whole package against transformers (fp32, kv-quant off) and against reference/oracle.py (every format, kv-quant on).

The checkpoint is written in transformers' own names, so the reader's translation and the fused experts are under test too.
"""

import importlib
import json
import random

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from dsv4 import ops
from dsv4.checkpoint import Checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, UserError
from dsv4.layers import Numerics
from dsv4.model import Model
from dsv4.ops import backend, experts
from dsv4.plan import make_plan
from dsv4.runtime import free_bytes
from helpers.make_checkpoint import random_weights, write_checkpoint
from reference import oracle
from tests.hf import hf_configs, hf_model

# The package gives operations these names, so the modules come this way.
attention, mhc = (importlib.import_module(f"dsv4.ops.{name}") for name in ("attention", "mhc"))

LENGTH = 300
# fp32 sums in another order: 1e-5 was the largest difference seen over all lengths, chunks and decode steps of the three configs.
# A wrong formula gives 0.01 and more (test_mistake_is_seen), so 1e-4 separates the two by a factor of ten on both sides.
TOLERANCE = 1e-4


def open_model(folder, numerics=Numerics(kv_quant=False), context=LENGTH, layers=None):  # noqa: B008
    checkpoint = Checkpoint.open(folder)
    layers = layers or range(checkpoint.config.num_hidden_layers)
    plan = make_plan(checkpoint, [torch.device("cpu")], layers=layers, context=context, chunk=context, dtype=numerics.dtype,
                     free_bytes=free_bytes)
    return Model(checkpoint, plan, numerics)


class Case:
    """A transformers model, its logits for LENGTH random tokens, and the package's model of the same weights."""

    def __init__(self, name, folder):
        hf, raw = hf_model(name, seed=1)
        save_file({k: v.contiguous() for k, v in hf.state_dict().items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw))
        self.ids = torch.randint(raw["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
        with torch.inference_mode():
            self.expected = hf(torch.tensor([self.ids])).logits[0]
        self.model = open_model(folder)
        self.cache = self.model.new_cache()

    def run(self, lengths, logits="all"):
        """Logits of a fresh sequence whose tokens come in chunks of these lengths."""
        self.cache.reset()
        rows, at = [], 0
        for n in lengths:
            rows.append(self.model.forward(self.ids[at : at + n], self.cache, logits))
            at += n
        return torch.cat(rows) if logits == "all" else rows[-1]

    def error(self, rows, upto=LENGTH):
        return (rows - self.expected[upto - len(rows) : upto]).abs().max().item()


@pytest.fixture(scope="module", params=list(hf_configs()))
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_every_prompt_length(case):
    errors = {n: (case.run([n], "last") - case.expected[n - 1]).abs().max().item() for n in range(1, LENGTH + 1)}
    worst = max(errors, key=errors.get)
    print(f"largest |dlogit| over {LENGTH} prompt lengths: {errors[worst]:.1e}")  # pytest -rP shows it
    failed = sum(error > TOLERANCE for error in errors.values())
    assert not failed, f"{failed} lengths fail, most at {worst} tokens: {errors[worst]:.1e}"


@pytest.mark.parametrize("prompt", [1, 2, 3, 5, 7, 127, 128, 129, 130])
def test_decode_after_prompt(case, prompt):
    """After one token to the end; after others for 150 steps, which is until none of the prompt's rows is in a window (128 tokens) or in
    the block of 128 that is being gathered."""
    until = LENGTH if prompt == 1 else prompt + 150
    rows = case.run([prompt] + [1] * (until - prompt))
    error = (rows - case.expected[:until]).abs().amax(-1)
    assert error.max() <= TOLERANCE, f"token {int(error.argmax())}: {error.max():.1e}"


@pytest.mark.parametrize("chunks", [[37, 93, 1, 129, 40], [4] * 75, [3] * 100, [127, 1, 1, 127, 44], [5, 128, 128, 39], "random"])
def test_chunked_prefill(case, chunks, seed):
    if chunks == "random":
        cuts = sorted(random.Random(seed).sample(range(1, LENGTH), 12))
        chunks = [b - a for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)]
    assert case.error(case.run(chunks)) <= TOLERANCE, f"chunks {chunks}"


def test_new_sequence_forgets_the_last(case):
    """Trap 10: a prompt shorter than a block would pool rows of the sequence before it if the state were not reset."""
    case.run([LENGTH])
    assert case.error(case.run([2, 1, 1, 1]), 5) <= TOLERANCE


def _after(name, change):
    """A mistake in operation `name`: its arguments pass through `change(definition, *args, **kwargs)`."""
    definition = backend._definitions[name]
    return lambda monkeypatch: monkeypatch.setitem(backend._chosen, name, lambda *a, **k: change(definition, *a, **k))


def _no_inverse(x, cos, sin, inverse=False):
    return x if inverse else ops.apply_rope(x, cos, sin)


def _uniform(definition, x, gate, top_k, route_scale, *, table=None, **others):
    chosen, weights = definition(x, gate, top_k, route_scale, table=table, **others)
    return chosen, weights if table is None else torch.full_like(weights, route_scale / top_k)


def _clamp_after_silu(x, expert, limit, activations, weights):
    a = F.silu(experts.matmul_fp32(x, expert.w1)).clamp(max=limit) * experts.matmul_fp32(x, expert.w3).clamp(-limit, limit)
    return experts.matmul_fp32(a if weights is None else a * weights[:, None], expert.w2)


def _comb_not_transposed(monkeypatch):
    """Where it is done alone and within mhc_pre."""
    definition = backend._definitions["mhc_post"]
    for place, name in ((backend._chosen, "mhc_post"), (vars(mhc), "mhc_post_ref")):
        monkeypatch.setitem(place, name, lambda o, X, post, comb: definition(o, X, post, comb.transpose(-1, -2)))


def _wider_window(definition, q, sink, cos, sin, positions, window, window_size, *others):
    return definition(q, sink, cos, sin, positions, window, window_size + 1, *others)


MISTAKES = {
    "stream 0 instead of hc_head": _after("hc_head", lambda f, X, fn, base, scale, norm, **k: ops.rms_norm(X[:, 0], norm, k["norm_eps"])),
    "comb not transposed": _comb_not_transposed,
    "uniform hash weights": _after("router", _uniform),
    "sink left out": _after("attention", lambda f, q, sink, *a: f(q, torch.full_like(sink, -1e30), *a)),
    "no inverse RoPE": lambda monkeypatch: monkeypatch.setattr(attention, "apply_rope", _no_inverse),
    "window of W + 1": _after("attention", _wider_window),
    "clamp after silu": lambda monkeypatch: monkeypatch.setattr(experts, "_expert", _clamp_after_silu),
    "entry visible one token late": lambda monkeypatch: monkeypatch.setattr(attention, "visible_entries", lambda t, r: t // r),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_seen(case, mistake, monkeypatch):
    """The comparison above has teeth: each of these silent mistakes moves the logits by at least 0.01, 100 times the tolerance."""
    MISTAKES[mistake](monkeypatch)
    assert case.error(case.run([200] + [1] * 20 + [80])) > 100 * TOLERANCE





# ------------------------------------------------------------------------------------- formats, against the oracle

SMALL = ModelConfig.from_dict(hf_configs()["small"])
FORMATS = ["nvidia", "official", "compressed-tensors", "all-nvfp4", "base-fp8", "bf16", "f32", "transformers", "hybrid"]


@pytest.fixture(scope="module")
def weights():
    return random_weights(SMALL, seed=3)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(SMALL.vocab_size, (140,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_agrees_with_the_oracle(format, weights, ids, tmp_path):
    """After every layer and in the logits. The oracle has its own reader and dequantisation, of native names only: the other spellings
    hold the same numbers as f32. kv-quant is off, as a rounding boundary would turn 1e-6 into a step."""
    write_checkpoint(tmp_path / "ours", SMALL, weights, format)
    write_checkpoint(tmp_path / "native", SMALL, weights, "f32" if format in ("transformers", "hybrid") else format)
    config, read = oracle.open_checkpoint(tmp_path / "native")
    with torch.inference_mode():
        expected = oracle.forward(config, read, torch.tensor([ids]))
    model = open_model(tmp_path / "ours")
    streams = {}
    model.on_layer = lambda n, after: streams.__setitem__(n, after.settled())
    actual = model.forward(ids, model.new_cache(), "all")
    for n, X in streams.items():
        assert (X - expected.hidden[n + 1][0]).abs().max() <= TOLERANCE, f"streams after layer {n}"
    assert (actual - expected.logits[0]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kv_quant", [True, False])
def test_keeping_dequantised_copies_changes_nothing(kv_quant, weights, ids, tmp_path):
    write_checkpoint(tmp_path, SMALL, weights, "nvidia")
    rows = []
    for keep in (True, False):
        model = open_model(tmp_path, Numerics(kv_quant=kv_quant, keep_dequantised=keep))
        rows.append(model.forward(ids, model.new_cache(), "all"))
    assert torch.equal(*rows)


def test_packed_weights_stay_packed(weights, tmp_path):
    write_checkpoint(tmp_path, SMALL, weights, "nvidia")
    model = open_model(tmp_path)
    kinds = {model.layers[2].moe.experts.routed[0].w1.kind, model.layers[2].attention.of_latent.weights[0].kind}
    assert kinds == {"nvfp4", "fp8"}


def test_kv_quant_agrees_with_the_oracle(weights, ids, tmp_path):
    """FP8 and FP4 rounding turns fp32 noise into whole steps wherever a value lies on a boundary, so most rows agree to fp32 noise and a
    few may not: the median is held to the tolerance, and the worst row to a tenth of what switching the quantisation off does."""
    write_checkpoint(tmp_path, SMALL, weights, "nvidia")
    config, read = oracle.open_checkpoint(tmp_path)
    with torch.inference_mode():
        expected, off = (oracle.forward(config, read, torch.tensor([ids]), kv_quant=q).logits[0] for q in (True, False))
    model = open_model(tmp_path, Numerics(kv_quant=True))
    actual = model.forward(ids, model.new_cache(), "all")
    error, effect = (actual - expected).abs().amax(-1), (off - expected).abs().amax(-1)
    assert error.median() <= TOLERANCE
    assert error.max() <= effect.max() / 10, f"worst row {error.max():.1e}, effect of kv-quant {effect.max():.1e}"


def test_bfloat16_is_near_float32(weights, ids, tmp_path):
    """bf16 activations have 8 bits: 2^-9 relative per rounding, a few dozen roundings deep, and now and then another expert."""
    write_checkpoint(tmp_path, SMALL, weights, "nvidia")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model = open_model(tmp_path, Numerics(dtype=dtype, kv_quant=False))
        rows.append(model.forward(ids, model.new_cache(), "all"))
    assert F.cosine_similarity(*rows, dim=-1).median() > 0.999


def test_forward_refuses_what_does_not_fit(case):
    case.cache.reset()
    with pytest.raises(UserError, match="at least one token, found none"):
        case.model.forward([], case.cache)
    with pytest.raises(UserError, match=f"token id {case.model.config.vocab_size}: expected 0 to"):
        case.model.forward([case.model.config.vocab_size], case.cache)
    with pytest.raises(UserError, match="caches hold 300 tokens, found 301"):
        case.model.forward([1] * (LENGTH + 1), case.cache)
    case.cache.chunk = 7
    try:
        with pytest.raises(UserError, match="caches take 7 tokens a step, found 8"):
            case.model.forward([1] * 8, case.cache)
    finally:
        case.cache.chunk = LENGTH


@pytest.mark.parametrize("chunks", [[60], [50, 10], [1] * 60])
@pytest.mark.parametrize("broken, where", [
    ("layers.3.attn.wo_b", r"layer 3 \(HCA\)"), ("embed.weight", "the embedding"), ("head", "the head"),
])
def test_non_finite_logits_name_the_first_layer(broken, where, chunks, weights, ids, tmp_path):
    """An infinity in one tensor: the run stops in the chunk that meets it and says where it began, however the prompt is cut."""
    damaged = dict(weights)
    damaged[broken] = weights[broken].clone()
    damaged[broken][ids[0] if broken == "embed.weight" else 0] = float("inf")
    write_checkpoint(tmp_path, SMALL, damaged, "f32")
    model = open_model(tmp_path)
    cache = model.new_cache()
    with pytest.raises(CheckpointError, match=f"non-finite logits after .* tokens: .* {where} made the first"):
        for i, n in enumerate(chunks):
            model.forward(ids[cache.position : cache.position + n], cache, "last" if i + 1 == len(chunks) else "none")


def test_layers_runs_only_these(weights, ids, tmp_path):
    write_checkpoint(tmp_path, SMALL, weights, "f32")
    seen = []
    model = open_model(tmp_path, layers=range(2, 4))
    model.on_layer = lambda n, streams: seen.append((n, tuple(streams.X.shape)))
    model.forward(ids[:9], model.new_cache())
    assert seen == [(2, (9, 4, SMALL.hidden_size)), (3, (9, 4, SMALL.hidden_size))]
    config, read = oracle.open_checkpoint(tmp_path)
    expected = oracle.forward(config, read, torch.tensor([ids[:9]]), layers=range(2, 4)).logits[0]
    assert (model.forward(ids[:9], model.new_cache(), "all") - expected).abs().max() <= TOLERANCE
