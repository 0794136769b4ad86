"""dsv4/checkpoint.py and dsv4/shards.py: every format and spelling loads to the same weights, every fault is named, and
reading keeps nothing but what was asked for."""

import json
import math
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import Checkpoint, native_name
from dsv4.errors import CheckpointError
from dsv4.exports import FORMATS, Format
from dsv4.formats import Weight
from helpers.make_checkpoint import random_weights, write_checkpoint
from tests.checkpoints import MINI, edit, layout_bytes, published_layout, raw_load, raw_save


@pytest.fixture(scope="module")
def weights():
    return random_weights(MINI, seed=3, mtp=True)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, weights):
    """An NVIDIA-style checkpoint of two shards, not to be changed."""
    folder = tmp_path_factory.mktemp("pristine") / "nvidia"
    write_checkpoint(folder, MINI, weights, "nvidia", share_w13=False)
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def problems(folder):
    return Checkpoint.open(folder, strict=False).audit().problems


def assert_same(checkpoint, encoded):
    """Every linear of the checkpoint dequantises to the bits of `encoded`, every tensor is equal, and nothing is left out."""
    audit = checkpoint.audit()
    assert audit.problems == [] and audit.unknown == []
    for name, value in encoded.items():
        if name.startswith("mtp."):
            continue
        if isinstance(value, Weight):
            got = checkpoint.weight(name)
            assert got.kind == value.kind and got.shape == value.shape, name
            assert torch.equal(got.dequantize().view(torch.int32), value.dequantize().view(torch.int32)), name
        else:
            got = checkpoint.tensor(name)
            assert got.dtype == value.dtype and torch.equal(got, value), name


# ------------------------------------------------------------------------------------------------------ formats and names

# Besides the exports that make_checkpoint knows by name: scales as the other public ones spell them.
OTHERS = {
    "redhat": Format("nvfp4-ct", "plain", "fp8", fp8_scale=("weight_scale", "BF16")),
    "quark": Format("nvfp4", "fp8", "fp8", "mxfp4", fp8_scale=("weight_scale", "E8M0")),
    "f16": Format(plain=torch.float16),
}


@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
def test_every_format_loads_to_the_weights_it_was_made_from(name, tmp_path, weights):
    encoded = write_checkpoint(tmp_path, MINI, weights, OTHERS.get(name, name), shards=3)
    checkpoint = Checkpoint.open(tmp_path)
    assert_same(checkpoint, encoded)
    fmt = OTHERS.get(name) or FORMATS[name]
    kinds = {"plain": "plain", "fp8": "fp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "nvfp4-ct": "nvfp4"}
    for module, expected in (("ffn.experts.3.w2", fmt.routed), ("ffn.shared_experts.w1", fmt.shared), ("attn.wo_a", fmt.attention)):
        assert checkpoint.weight(f"layers.1.{module}").kind == kinds[expected]
    for key, value in weights.items():
        if key.startswith("mtp.") or key.endswith("tid2eid"):
            continue
        got = checkpoint.weight(key) if isinstance(encoded[key], Weight) else Weight.plain(checkpoint.tensor(key))
        error = (got.dequantize() - value).abs()
        if got.kind == "plain":  # half a unit in the last place; 2^-25 is half of F16's smallest subnormal
            relative = {torch.float32: 0.0, torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}[got.payload.dtype]
            bound = relative * value.abs() + (2.0 ** -25 if relative else 0.0)
        else:  # half the format's largest step: 1 of E2M1's 6, 16 of E4M3's 448, times the largest scale of the tensor
            scales = got._float_scales().max() * got.global_scale
            bound = scales * (16.0 if got.kind == "fp8" else 1.0)
        assert bool((error <= bound).all()), key


def test_one_shard_without_an_index(tmp_path, weights):
    encoded = write_checkpoint(tmp_path, MINI, weights, "official", shards=1)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert_same(Checkpoint.open(tmp_path), encoded)


@pytest.fixture(scope="module")
def hf_model():
    """transformers' own model with re-drawn weights (its default initialisation leaves norms at 1 and sinks at 0)."""
    transformers = pytest.importorskip("transformers")
    raw = MINI.to_dict() | {"torch_dtype": "float32"}
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**raw))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        for name, tensor in model.named_buffers():
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(tensor.shape[0], MINI.n_routed_experts, generator=generator).argsort(1)[:, :tensor.shape[1]])
    return model


def state_in_native_names(model):
    """The model's state_dict renamed by hand, for a few tensors of every kind: the yardstick of the two tests below."""
    state, inter = model.state_dict(), MINI.moe_intermediate_size
    layer = {
        "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
        "attn.wq_a": "self_attn.q_a_proj.weight", "attn.q_norm.weight": "self_attn.q_a_norm.weight",
        "attn.wq_b": "self_attn.q_b_proj.weight",
        "attn.wkv": "self_attn.kv_proj.weight", "attn.kv_norm.weight": "self_attn.kv_norm.weight", "attn.wo_a": "self_attn.o_a_proj.weight",
        "attn.wo_b": "self_attn.o_b_proj.weight", "attn.attn_sink": "self_attn.sinks",
        "attn.compressor.wkv": "self_attn.compressor.kv_proj.weight", "attn.compressor.wgate": "self_attn.compressor.gate_proj.weight",
        "attn.compressor.ape": "self_attn.compressor.position_bias", "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
        "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj.weight",
        "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj.weight",
        "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj.weight",
        "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
        "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
        "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base", "hc_attn_scale": "attn_hc.scale",
        "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale",
        "ffn.gate.weight": "mlp.gate.weight", "ffn.gate.bias": "mlp.gate.e_score_correction_bias", "ffn.gate.tid2eid": "mlp.gate.tid2eid",
        "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj.weight", "ffn.shared_experts.w2": "mlp.shared_experts.down_proj.weight",
        "ffn.shared_experts.w3": "mlp.shared_experts.up_proj.weight",
    }
    top = {"embed.weight": "model.embed_tokens.weight", "head": "lm_head.weight", "norm.weight": "model.norm.weight",
           "hc_head_fn": "model.hc_head.hc_fn", "hc_head_base": "model.hc_head.hc_base", "hc_head_scale": "model.hc_head.hc_scale"}
    out = {native: state[name] for native, name in top.items()}
    for n in range(MINI.num_hidden_layers):
        prefix = f"model.layers.{n}."
        out |= {f"layers.{n}.{native}": state[prefix + name] for native, name in layer.items() if prefix + name in state}
        for e in range(MINI.n_routed_experts):
            gate_up = state[f"{prefix}mlp.experts.gate_up_proj"][e]
            out[f"layers.{n}.ffn.experts.{e}.w1"], out[f"layers.{n}.ffn.experts.{e}.w3"] = gate_up[:inter], gate_up[inter:]
            out[f"layers.{n}.ffn.experts.{e}.w2"] = state[f"{prefix}mlp.experts.down_proj"][e]
    return out


def assert_holds(checkpoint, expected, linears):
    audit = checkpoint.audit()
    assert audit.problems == [] and audit.unknown == []
    assert set(expected) == set(checkpoint._sizes)  # every name the config needs was compared, and no other
    for name, value in expected.items():
        got = checkpoint.weight(name).dequantize() if name in linears else checkpoint.tensor(name)
        assert torch.equal(got, value), name


def test_hybrid_names_that_save_pretrained_writes(hf_model, tmp_path, weights):
    hf_model.save_pretrained(tmp_path, max_shard_size="200KB")
    names = set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"])
    assert "model.layers.0.attn.norm.weight" in names and "head.weight" in names  # the hybrid that this test is about
    linears = {name for name, value in weights.items() if name + ".weight" not in weights and not name.endswith(".weight")}
    assert_holds(Checkpoint.open(tmp_path), state_in_native_names(hf_model), linears & set(Checkpoint.open(tmp_path)._layouts))


def test_transformers_names_with_fused_experts_and_rotary_buffers(hf_model, tmp_path):
    from safetensors.torch import save_file

    state = hf_model.state_dict() | {"model.rotary_emb.main_inv_freq": torch.ones(8),
                                     "model.layers.1.self_attn.compressor.rotary_emb.compress_inv_freq": torch.ones(8)}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors")
    hf_model.config.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert_holds(checkpoint, state_in_native_names(hf_model), checkpoint._layouts)
    assert [(reason[:10], n) for reason, (n, _) in checkpoint.audit().skipped.items()] == [("*.inv_freq", 2)]
    # A fused tensor is read in parts, never whole: the entry of one expert's w3 is its own range of the file.
    entry = checkpoint._layouts["layers.2.ffn.experts.3.w3"].payload
    assert entry.nbytes == MINI.moe_intermediate_size * MINI.hidden_size * 4


def test_transformers_reads_what_make_checkpoint_writes(tmp_path, weights):
    # The other direction: native F32 names through transformers' own conversion give back our weights.
    transformers = pytest.importorskip("transformers")
    trunk = {name: value for name, value in weights.items() if not name.startswith("mtp.")}
    write_checkpoint(tmp_path, MINI, trunk, "f32")
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in state_in_native_names(model).items():
        assert torch.equal(value, trunk[name]), name


def test_fused_experts_with_fp8_blocks(tmp_path):
    # transformers' FP8 experts keep the fused shape and add block scales; I = 128 so that w1 and w3 split between blocks.
    config = replace(MINI, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=0, moe_intermediate_size=128)
    encoded = write_checkpoint(tmp_path, config, random_weights(config, 5), Format(routed="fp8"))

    def fuse(t):
        for name, parts in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            for ending, suffix in (("", "weight"), ("_scale_inv", "scale")):
                tensors = [t.pop(f"layers.0.ffn.experts.{e}.{w}.{suffix}") for e in range(4) for w in parts]
                dtype, (rows, columns), _ = tensors[0]
                key = f"model.layers.0.mlp.experts.{name}{ending}"
                t[key] = (dtype, [4, rows * len(parts), columns], b"".join(data for _, _, data in tensors))

    edit(tmp_path, fuse)
    assert_same(Checkpoint.open(tmp_path), encoded)
    edit(tmp_path, lambda t: t.update({"model.layers.0.mlp.experts.down_proj": ("BF16", [3, 64, 128], bytes(3 * 64 * 128 * 2))}))
    assert any("down_proj: expected [4 experts, rows, columns], found [3, 64, 128]" in line for line in problems(tmp_path))


def test_per_expert_transformers_names(folder, weights):
    def rename(tensors):
        for key in list(tensors):
            new = key.replace(".ffn.experts.", ".mlp.experts.").replace("layers.", "model.layers.", 1)
            for native, other in ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")):
                new = new.replace(native, other)
            if ".experts." in key and not key.startswith("mtp."):
                tensors[new] = tensors.pop(key)

    before = {n: Checkpoint.open(folder).weight(n).dequantize() for n in ("layers.2.ffn.experts.3.w1", "layers.2.ffn.experts.3.w2")}
    edit(folder, rename)
    checkpoint = Checkpoint.open(folder)
    assert all(torch.equal(checkpoint.weight(n).dequantize(), value) for n, value in before.items())


@pytest.mark.parametrize("key,native", [
    ("model.embed_tokens.weight", "embed.weight"), ("lm_head.weight", "head.weight"), ("model.hc_head.hc_base", "hc_head_base"),
    ("model.norm.weight", "norm.weight"), ("model.layers.12.attn.norm.weight", "layers.12.attn.kv_norm.weight"),
    ("model.layers.3.self_attn.compressor.kv_norm.weight", "layers.3.attn.compressor.norm.weight"),
    ("model.layers.3.self_attn.compressor.indexer.kv_norm.weight", "layers.3.attn.indexer.compressor.norm.weight"),
    ("model.layers.3.self_attn.q_a_proj.weight_scale_inv", "layers.3.attn.wq_a.weight_scale_inv"),
    ("model.layers.3.mlp.experts.17.up_proj.weight_packed", "layers.3.ffn.experts.17.w3.weight_packed"),
    ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
    ("layers.3.attn.q_norm.weight", "layers.3.attn.q_norm.weight"), ("model.visual.patch.weight", "visual.patch.weight"),
    ("mtp.0.ffn.experts.1.w1.scale", "mtp.0.ffn.experts.1.w1.scale"), ("model.mtp.0.norm.weight", "mtp.0.norm.weight"),
])
def test_native_name(key, native):
    assert native_name(key) == native


# ----------------------------------------------------------------------------------------------------------------- traps


def test_trap_13_w1_and_w3_may_have_different_global_scales(pristine, weights):
    checkpoint = Checkpoint.open(pristine)
    w1, w3 = (checkpoint.weight(f"layers.2.ffn.experts.1.{w}") for w in ("w1", "w3"))
    assert w1.global_scale != w3.global_scale
    for name, weight in (("w1", w1), ("w3", w3)):
        source = weights[f"layers.2.ffn.experts.1.{name}"]
        assert weight.global_scale == float(source.abs().max() / (6 * 448))
        # Each with its own scalar: within half the largest step (1 of E2M1's 6). The other's would be off by their ratio.
        assert float((weight.dequantize() - source).abs().max()) <= float(weight.scale.float().max()) * weight.global_scale


def test_trap_14_e8m0_scales_come_as_bytes(pristine):
    checkpoint = Checkpoint.open(pristine)
    scale = checkpoint.weight("layers.0.attn.wq_a").scale
    stored = {k: v for path in pristine.glob("*.safetensors") for k, v in raw_load(path).items()}["layers.0.attn.wq_a.scale"]
    assert stored[0] == "F8_E8M0" and scale.dtype == torch.uint8 and bytes(scale.flatten().tolist()) == stored[2]
    assert 100 < int(scale.min()) < 127  # a numeric cast of 2^-12 or so would have made 0


def test_trap_16_every_name_of_an_fp8_scale_multiplies(tmp_path, weights):
    got = []
    for name in ("scale", "weight_scale", "weight_scale_inv"):
        for dtype in ("F32", "E8M0"):
            encoded = write_checkpoint(tmp_path / name / dtype, MINI, weights, Format(attention="fp8", fp8_scale=(name, dtype)))
            assert f"layers.1.attn.wq_b.{name}" in json.loads(
                (tmp_path / name / dtype / "model.safetensors.index.json").read_text())["weight_map"]
            got.append(Checkpoint.open(tmp_path / name / dtype).weight("layers.1.attn.wq_b").dequantize())
            assert torch.equal(got[-1], encoded["layers.1.attn.wq_b"].dequantize())
    source = weights["layers.1.attn.wq_b"]
    for value in got:  # FP8 with 3 bits of mantissa: within 2^-4 of the value, and 2^-10 of the largest near zero
        assert bool(((value - source).abs() <= source.abs() * 2 ** -4 + float(source.abs().max()) * 2 ** -10).all())


def test_trap_17_an_excluded_module_is_fp8_on_disk(pristine):
    block = json.loads((pristine / "config.json").read_text())["quantization_config"]
    assert "*.attn.*" in block["ignore"] and "*.ffn.shared_experts.*" in block["ignore"]
    checkpoint = Checkpoint.open(pristine)
    for name in ("layers.0.attn.wo_b", "layers.3.ffn.shared_experts.w2", "layers.1.attn.indexer.wq_b"):
        assert checkpoint.weight(name).kind == "fp8"


def test_metadata_alone_never_decides(folder):
    # Whatever quantization_config claims, or with none at all, the tensors are what they are.
    expected = Checkpoint.open(folder).weight("layers.0.ffn.experts.0.w1").dequantize()
    raw = json.loads((folder / "config.json").read_text())
    for claim in (None, {"quant_method": "bitsandbytes", "load_in_4bit": True}):
        raw["quantization_config"] = claim
        (folder / "config.json").write_text(json.dumps(raw))
        assert torch.equal(Checkpoint.open(folder).weight("layers.0.ffn.experts.0.w1").dequantize(), expected)


@pytest.mark.parametrize("style", ["weight_block_size", "block_structure"])
def test_the_fp8_block_comes_from_the_config(tmp_path, weights, style):
    config = replace(MINI, weight_block_size=(32, 16))
    encoded = write_checkpoint(tmp_path, config, weights, "official" if style == "weight_block_size" else "compressed-tensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.weight("layers.0.attn.wo_b").block == (32, 16)
    assert checkpoint.weight("layers.0.attn.wo_b").scale.shape == (2, 4)
    assert_same(checkpoint, encoded)


# --------------------------------------------------------------------------------------- packings and dtypes of other exports


def as_dtype(tensors, key, dtype, shape=None):
    old = tensors[key]
    tensors[key] = (dtype, shape or old[1], old[2])


@pytest.mark.parametrize("change", ["U8 for I8 and E8M0", "F4 payload", "compressed-tensors MXFP4", "scalars of shape [1]",
                                    "tid2eid as I32"])
def test_the_same_bytes_under_other_dtypes(tmp_path, weights, change):
    name = "nvidia" if change == "scalars of shape [1]" else "official"
    encoded = write_checkpoint(tmp_path, MINI, weights, name)

    def apply(t):
        for key in [k for k in t if k.startswith("layers.") and ".ffn.experts." in k]:
            module, _, suffix = key.rpartition(".")
            dtype, shape, data = t[key]
            if change == "F4 payload" and suffix == "weight":
                as_dtype(t, key, "F4", [shape[0], shape[1] * 2])
            elif change == "scalars of shape [1]" and suffix in ("weight_scale_2", "input_scale"):
                as_dtype(t, key, "F32", [1])
            elif change == "U8 for I8 and E8M0":
                as_dtype(t, key, "U8")
            elif change == "compressed-tensors MXFP4":
                t[f"{module}.weight_packed" if suffix == "weight" else f"{module}.weight_scale"] = ("U8", shape, t.pop(key)[2])
        if change == "tid2eid as I32":
            for key in [k for k in t if k.endswith("tid2eid")]:
                _, shape, data = t[key]
                t[key] = ("I32", shape, b"".join(data[i:i + 4] for i in range(0, len(data), 8)))

    edit(tmp_path, apply)
    checkpoint = Checkpoint.open(tmp_path)
    if change == "tid2eid as I32":
        encoded = {n: v.int() if n.endswith("tid2eid") else v for n, v in encoded.items()}
        assert checkpoint.tensor("layers.0.ffn.gate.tid2eid").dtype == torch.int32
    assert_same(checkpoint, encoded)


# ----------------------------------------------------------------------------------------------------------------- audit


def test_the_audit_reports_what_is_there(pristine):
    checkpoint = Checkpoint.open(pristine)
    audit = checkpoint.audit()
    assert audit.family == "custom" and audit.shards == 2
    assert audit.layers == {"SWA": 1, "CSA": 2, "HCA": 1, "hash router": 2, "learned router": 2}
    assert {kind: {label: n for label, (n, _) in rows.items()} for kind, rows in audit.formats.items()} == {
        "embed": {"BF16": 1}, "head": {"BF16": 1}, "norms": {"BF16": 4 * 4 + 3 + 2 + 1}, "mHC": {"F32": 4 * 6 + 3},
        "attention": {"FP8 128x128, F8_E8M0 scales": 20, "F32": 4}, "gate": {"BF16": 4, "I64": 2, "F32": 2},
        "shared experts": {"FP8 128x128, F8_E8M0 scales": 12}, "routed experts": {"NVFP4 (ModelOpt)": 48},
        "compressor": {"BF16": 6, "F32": 3}, "indexer": {"FP8 128x128, F8_E8M0 scales": 2, "BF16": 6, "F32": 2}}
    # One expert's w1 [32, 64]: 1024 bytes of nibbles, 128 scales, 4 for the global scale; w2 and w3 hold as many.
    assert audit.formats["routed experts"]["NVFP4 (ModelOpt)"][1] == 48 * (1024 + 128 + 4)
    assert {reason.split()[0] for reason in audit.skipped} == {"*.input_scale", "mtp.*"}
    assert checkpoint.nbytes("layers.2.ffn.experts.1.") == 3 * (1024 + 128 + 4)
    assert checkpoint.nbytes() == audit.total_bytes == sum(checkpoint.layer_bytes(n) for n in range(4)) + checkpoint.nbytes(
        "embed") + checkpoint.nbytes("head") + checkpoint.nbytes("norm") + checkpoint.nbytes("hc_head")
    on_disk = sum(len(v[2]) for path in pristine.glob("*.safetensors") for v in raw_load(path).values())
    assert audit.total_bytes + sum(size for _, size in audit.skipped.values()) == on_disk
    assert json.loads(json.dumps(audit.to_dict()))["formats"]["routed experts"]["NVFP4 (ModelOpt)"]["count"] == 48
    text = "\n".join(audit.lines())
    assert "routed experts  NVFP4 (ModelOpt)" in text and "problems: none" in text and "unknown keys: none" in text


def test_what_is_skipped_by_name_and_what_is_reported(folder):
    extra = {"layers.0.ffn.gate.bias": [4], "layers.3.ffn.gate.bias_vl": [4], "layers.1.attn.k_scale": [1],
             "mtp.2.anything": [3], "model.layers.2.self_attn.rotary_emb.inv_freq": [8], "visual.patch_embed.weight": [2, 2],
             "layers.7.attn.wkv.weight": [2, 2], "layers.7.attn.wkv.weight_scale": [1], "layers.2.attn.wkv.bias": [64]}
    edit(folder, lambda t: t.update({key: ("F32", shape, bytes(4 * math.prod(shape))) for key, shape in extra.items()}))
    checkpoint = Checkpoint.open(folder)  # reported, not refused
    audit = checkpoint.audit()
    assert sorted(audit.unknown) == ["layers.2.attn.wkv.bias", "layers.7.attn.wkv.weight", "layers.7.attn.wkv.weight_scale",
                                     "visual.patch_embed.weight"]
    counts = {reason.split()[0]: n for reason, (n, _) in audit.skipped.items()}
    assert counts["gate.bias"] == 1 and counts["*.bias_vl"] == 1 and counts["*.k_scale"] == 1 and counts["*.inv_freq"] == 1
    assert "unknown keys: 4" in audit.lines()


def test_a_pruned_checkpoint_is_named_in_one_line(folder):
    def prune(t):
        for key in [k for k in t if ".ffn.experts.3." in k and not k.startswith("mtp.")]:
            del t[key]

    edit(folder, prune)
    assert problems(folder)[0] == "layers.0: expected 4 routed experts, as config.json says, found 3"


# ---------------------------------------------------------------------------------------------------------------- faults


def refused(folder, *pieces):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    text = str(caught.value)
    assert "\n" not in text and caught.value.exit_code == 3
    for piece in pieces:
        assert piece in text, text
    return text


def test_folders_that_are_none(folder, tmp_path):
    refused(tmp_path / "absent", "absent", "expected a checkpoint folder, found no such folder", "download")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty: expected config.json, found none")
    gguf = tmp_path / "model-q4.gguf"
    gguf.write_bytes(b"GGUF\3\0\0\0")
    refused(gguf, "model-q4.gguf: expected a folder", "found a GGUF file", "use the safetensors release")
    disguised = tmp_path / "model.bin"
    disguised.write_bytes(b"GGUF\3\0\0\0")
    refused(disguised, "found a GGUF file")
    refused(folder / "config.json", "config.json: expected a folder with config.json and *.safetensors, found a file")
    only = tmp_path / "only"
    only.mkdir()
    gguf.rename(only / "x.gguf")
    refused(only, "expected config.json, found only GGUF files")
    shutil.copy(folder / "config.json", only)
    refused(only, "expected *.safetensors shards, found none but GGUF files")


@pytest.mark.parametrize("text,pieces", [
    ("{", ("config.json", "expected the model's config, found")),
    ("[1]", ("config.json", "a JSON object", "found list")),
    ('{"model_type": "deepseek_v3"}', ("config.json", "expected model_type 'deepseek_v4', found 'deepseek_v3'")),
    ('{"model_type": "deepseek_v41"}', ("expected model_type 'deepseek_v4', found 'deepseek_v41'",)),
    ("\xff\xfe", ("config.json", "expected the model's config, found")),
])
def test_configs_that_are_none(folder, text, pieces):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, *pieces)


def test_a_bad_generation_config(folder):
    (folder / "generation_config.json").write_text("{oops")
    refused(folder, "generation_config.json: expected generation settings, found")
    (folder / "generation_config.json").unlink()
    assert Checkpoint.open(folder).generation_config == {}


SHARD = "model-00002-of-00002.safetensors"


def corrupt_header(data):
    return data[:8] + b"\x00" * 40 + data[48:]


def shift_offsets(data):
    """The second tensor of the header begins 4 bytes early: it overlaps the first."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    keys = [k for k in header if k != "__metadata__"]
    second = sorted(keys, key=lambda k: header[k]["data_offsets"])[1]
    header[second]["data_offsets"] = [x - 4 for x in header[second]["data_offsets"]]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length:]


@pytest.mark.parametrize("damage,pieces", [
    (lambda d: d[:-1000], ("bytes, as its header says, found", "truncated or corrupt")),
    (lambda d: d[:5000], ("expected a header that fits the file of 5000 bytes, found a header length of",)),
    (lambda d: d[:5], ("expected a header that fits the file of 5 bytes",)),
    (lambda d: b"", ("found a file of zero length",)),
    (lambda d: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", ("found a Git LFS pointer (run git lfs pull)",)),
    (lambda d: d + b"xx", ("bytes, as its header says, found",)),
    (corrupt_header, ("expected a JSON header, found",)),
    (lambda d: b"\xff" * 8 + d[8:], ("found a header length of 18446744073709551615",)),
    (shift_offsets, ("overlaps the tensor before it",)),
    (lambda d: d.replace(b'"F8_E4M3"', b'"F8_E4M9"', 1), ("expected a known dtype, found 'F8_E4M9'",)),
    (lambda d: d.replace(b'"data_offsets"', b'"data_0ffsets"', 1), ("expected dtype, shape and data_offsets",)),
    (lambda d: d.replace(b'"F8_E4M3"', b'"F64"    ', 1), ("bytes for F64",)),
])
def test_damaged_shards(folder, damage, pieces):
    path = folder / SHARD
    path.write_bytes(damage(path.read_bytes()))
    refused(folder, str(folder), SHARD, *pieces)
    # The audit goes on with the other shard, and does not list as missing what the damaged one holds.
    lines = problems(folder)
    assert len(lines) == 1, lines[:5]


def test_a_damaged_single_file_is_refused_even_for_inspection(tmp_path, weights):
    write_checkpoint(tmp_path, MINI, weights, "bf16", shards=1)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="model.safetensors: expected .* bytes, as its header says"):
        Checkpoint.open(tmp_path, strict=False)


def test_shards_and_index_that_disagree(folder):
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def with_map(change):
        weight_map = dict(good["weight_map"])
        change(weight_map)
        index.write_text(json.dumps({"weight_map": weight_map}))

    shutil.copy(folder / SHARD, folder / "extra.safetensors")
    refused(folder, "extra.safetensors: a shard that the index does not name")
    (folder / "extra.safetensors").unlink()

    with_map(lambda m: m.pop("norm.weight"))
    refused(folder, "norm.weight: expected this tensor where the index says, but it does not name it")
    first = good["weight_map"]["embed.weight"]
    with_map(lambda m: m.update({"norm.weight": first}))
    refused(folder, f"{first}: norm.weight: missing: the index puts this tensor here")
    with_map(lambda m: m.update({"norm.weight": "../norm.safetensors"}))
    refused(folder, "expected weight_map, from tensor to shard")
    index.write_text("[]")
    refused(folder, "index.json: expected an index of shards (a JSON object), found list")
    index.unlink()
    refused(folder, "expected model.safetensors.index.json for 2 shards, found none")

    index.write_text(json.dumps(good))
    (folder / SHARD).unlink()
    refused(folder, f"{SHARD}: missing: the index names this shard")
    assert len(problems(folder)) == 1


def test_a_tensor_in_two_shards(folder):
    path = folder / SHARD
    tensors = raw_load(path)
    tensors["embed.weight"] = ("BF16", [48, 64], bytes(48 * 64 * 2))
    raw_save(path, tensors)
    refused(folder, f"{SHARD}: embed.weight: expected each tensor once, found it in model-00001-of-00002.safetensors as well")
    del tensors["embed.weight"]
    tensors["model.embed_tokens.weight"] = ("BF16", [48, 64], bytes(48 * 64 * 2))  # the same tensor in another spelling
    raw_save(path, tensors)
    refused(folder, "model.embed_tokens.weight: expected each tensor once")


def pop(key):
    return lambda t: t.pop(key)


def put(key, dtype, shape, itemsize=1):
    return lambda t: t.update({key: (dtype, shape, bytes(math.prod(shape) * itemsize))})


@pytest.mark.parametrize("change,pieces", [
    (pop("layers.1.attn.wkv.weight"), ("layers.1.attn.wkv.weight: missing: expected [out, in] = [64, 64]",)),
    (pop("layers.3.ffn.gate.bias"), ("layers.3.ffn.gate.bias: missing: expected [4]",)),
    (pop("layers.1.ffn.gate.tid2eid"), ("layers.1.ffn.gate.tid2eid: missing: expected [48, 2]",)),
    (pop("hc_head_fn"), ("hc_head_fn: missing: expected [4, 256]",)),
    (pop("head.weight"), ("head.weight: missing: expected [out, in] = [48, 64]",)),
    (put("norm.weight", "BF16", [63], 2), ("model.safetensors: norm.weight: expected shape [64], found [63]",)),
    (put("layers.0.attn.wq_a.weight", "F8_E4M3", [32, 63]),
     ("layers.0.attn.wq_a.weight: expected shape [32, 64] for FP8 128x128", "found [32, 63]")),
    (put("layers.0.attn.wq_b.scale", "F8_E8M0", [1, 1]), ("layers.0.attn.wq_b.scale: expected shape [2, 1] for FP8", "found [1, 1]")),
    (put("layers.0.ffn.experts.2.w1.weight", "U8", [32, 64]), ("w1.weight: expected shape [32, 32] for NVFP4 (ModelOpt), found [32, 64]",)),
    (put("layers.0.ffn.experts.2.w1.weight_scale", "F8_E4M3", [32, 2]), ("w1.weight_scale: expected shape [32, 4]", "found [32, 2]")),
    (put("norm.weight", "I64", [64], 8), ("norm.weight: expected dtype BF16 or F16 or F32, found I64",)),
    (put("layers.1.ffn.gate.tid2eid", "F32", [48, 2], 4), ("tid2eid: expected dtype I64 or I32, found F32",)),
    (put("layers.0.attn.wq_a.weight", "I64", [32, 64], 8), ("wq_a.weight: expected dtype BF16, F16, F32, F8_E4M3, U8 or I8, found I64",)),
    (put("layers.0.attn.wq_a.scale", "I64", [1, 1], 8),
     ("wq_a.scale: expected dtype F8_E8M0, F32 or BF16 for an FP8 block scale, found I64",)),
    (put("layers.0.ffn.experts.2.w1.weight_scale", "F32", [32, 4], 4),
     ("expected dtype F8_E4M3 (NVFP4) or F8_E8M0 or U8 (MXFP4)", "found F32")),
    (put("layers.0.ffn.experts.2.w1.weight_scale_2", "F32", [32], 4), ("w1.weight_scale_2: expected one F32 number, found F32 [32]",)),
    (put("layers.0.ffn.experts.2.w1.weight_scale_2", "BF16", [], 2), ("w1.weight_scale_2: expected one F32 number, found BF16 []",)),
    (put("layers.0.ffn.experts.2.w1.weight_scale", "U8", [32, 2]),
     ("w1.weight_scale_2: expected no global scale beside U8 scales (MXFP4), found one",)),
    (pop("layers.0.ffn.experts.2.w1.weight_scale_2"), ("expected weight_scale_2 or weight_global_scale beside NVFP4, found neither",)),
    (pop("layers.0.ffn.experts.2.w1.weight_scale"), ("w1.weight: expected a scale beside packed U8, found none",)),
    (pop("layers.0.attn.wq_a.scale"), ("wq_a.weight: expected a block scale", "beside F8_E4M3, found none")),
    (put("layers.0.attn.wq_a.weight", "BF16", [32, 64], 2),
     ("wq_a.scale: expected no such scale beside BF16 [32, 64], found F8_E8M0 [1, 1]",)),
    (put("layers.1.ffn.gate.weight_scale", "F32", [1], 4), ("gate.weight_scale: expected no such scale beside BF16 [4, 64]",)),
    (put("layers.0.attn.wq_a.weight_zero_point", "I8", [1]), ("weight_zero_point: expected no such scale beside F8_E4M3",)),
    (put("layers.9.attn.wkv.scale", "F8_E8M0", [1, 1]),
     ("layers.9.attn.wkv.scale: a scale without payload: expected layers.9.attn.wkv.weight or .weight_packed beside it, found neither",)),
])
def test_tensors_that_do_not_fit(folder, change, pieces):
    edit(folder, change)
    refused(folder, str(folder), *pieces)


@pytest.mark.parametrize("nvfp4,what", [(False, "a multiple of 32 for MXFP4, found 40"),
                                        (True, "a multiple of 16 for NVFP4 (ModelOpt), found 40")])
def test_rows_that_do_not_divide_into_blocks(tmp_path, nvfp4, what):
    config = replace(MINI, moe_intermediate_size=40)
    layout = published_layout(config, nvfp4, mtp=False)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    raw_save(tmp_path / "model.safetensors", {k: (d, s, bytes(layout_bytes({k: (d, s)}))) for k, (d, s) in layout.items()})
    refused(tmp_path, f"layers.0.ffn.experts.0.w2.weight: expected columns in {what}")


def test_bf16_block_scales_are_widened(tmp_path, weights):
    write_checkpoint(tmp_path, MINI, weights, OTHERS["redhat"])
    assert Checkpoint.open(tmp_path)._layouts["layers.0.attn.wkv"].scale.dtype == "BF16"
    assert Checkpoint.open(tmp_path).weight("layers.0.attn.wkv").scale.dtype == torch.float32  # as Weight promises


def test_a_scale_whose_payload_is_missing_is_named_beside_the_missing_payload(folder):
    edit(folder, pop("layers.1.attn.wkv.weight"))
    first, second = problems(folder)
    assert first.startswith("layers.1.attn.wkv.weight: missing") and "layers.1.attn.wkv.scale: a scale without payload" in second
    text = refused(folder)
    assert text.endswith("(and 1 more; --inspect lists them)")


@pytest.mark.parametrize("key,data,pieces", [
    ("layers.2.ffn.experts.1.w3.weight_scale_2", struct.pack("<f", math.nan), ("found nan",)),
    ("layers.2.ffn.experts.1.w3.weight_scale_2", struct.pack("<f", 0.0), ("expected a finite global scale above zero, found 0.0",)),
    ("layers.2.ffn.experts.1.w3.weight_scale_2", struct.pack("<f", -1.0), ("found -1.0",)),
    ("layers.2.ffn.experts.1.w3.weight_scale_2", struct.pack("<f", math.inf), ("found inf",)),
    ("layers.2.ffn.experts.1.w3.weight_scale", b"\x30" * 127 + b"\x7f", ("an E4M3 scale that is NaN at [31, 3]",)),
    ("layers.2.attn.wq_b.scale", b"\x70\xff", ("an E8M0 scale of 0xFF, which is NaN at [1, 0]",)),
])
def test_scales_that_cannot_be_are_refused_when_read(folder, key, data, pieces):
    edit(folder, lambda t: t.update({key: (t[key][0], t[key][1], data)}))
    checkpoint = Checkpoint.open(folder)  # the headers are sound
    with pytest.raises(CheckpointError) as caught:
        checkpoint.weight(key.rpartition(".")[0])
    assert all(piece in str(caught.value) for piece in (f"model.safetensors: {key}: ", "damaged", *pieces)), caught.value
    checkpoint.weight("layers.2.ffn.experts.1.w1")  # its neighbour is sound


@pytest.mark.parametrize("number", [math.nan, 0.0, math.inf])
def test_a_compressed_tensors_global_scale_that_cannot_be(tmp_path, weights, number):
    write_checkpoint(tmp_path, MINI, weights, "compressed-tensors")
    key = "layers.2.ffn.experts.1.w3.weight_global_scale"
    edit(tmp_path, lambda t: t.update({key: ("F32", [1], struct.pack("<f", number))}))
    with pytest.raises(CheckpointError, match=rf"{key}: expected a finite global scale above zero, found {number}"):
        Checkpoint.open(tmp_path).weight("layers.2.ffn.experts.1.w3")


@pytest.mark.parametrize("expert", [-1, 4])
def test_a_hash_table_that_points_outside(folder, expert):
    key = "layers.1.ffn.gate.tid2eid"
    edit(folder, lambda t: t.update({key: ("I64", [48, 2], struct.pack("<96q", *[0] * 95, expert))}))
    with pytest.raises(CheckpointError, match=rf"tid2eid: expected experts from 0 to 3, found {min(0, expert)} to {max(0, expert)}"):
        Checkpoint.open(folder).tensor(key)


def test_a_shard_that_shrinks_after_its_header_was_read(folder):
    checkpoint = Checkpoint.open(folder)
    last = max((layout.payload for layout in checkpoint._layouts.values() if layout.payload.shard == SHARD), key=lambda e: e.end)
    with open(folder / SHARD, "r+b") as file:
        file.truncate(last.end - 10)
    name = native_name(last.key).removesuffix(".weight")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.weight(name)
    assert str(caught.value).startswith(f"{SHARD}: {last.key}: expected {last.nbytes} bytes at offset {last.begin}, "
                                        f"found {last.nbytes - 10}")
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD}: .*: reading at offset {last.begin} failed: No such file"):
        checkpoint.weight(name)


def test_names_that_are_not_there(pristine):
    checkpoint = Checkpoint.open(pristine)
    with pytest.raises(CheckpointError, match="layers.0.ffn.gate.bias: missing"):
        checkpoint.tensor("layers.0.ffn.gate.bias")
    with pytest.raises(CheckpointError, match="wq_a.weight: expected a plain tensor, found F8_E4M3; read it as a weight"):
        checkpoint.tensor("layers.0.attn.wq_a.weight")
    assert checkpoint.weight("embed").shape == (48, 64) and checkpoint.weight("layers.0.ffn.gate").kind == "plain"
