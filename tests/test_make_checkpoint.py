"""helpers/make_checkpoint.py: what it draws, what it writes, and its command line."""

import errno
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4 import shards
from dsv4.checkpoint import Checkpoint, needs_of_layer
from dsv4.config import PRESETS, ModelConfig
from dsv4.errors import CheckpointError
from dsv4.exports import FORMATS
from dsv4.formats import Weight
from dsv4.layers import Numerics
from dsv4.model import Model
from dsv4.plan import DevicePlan, Plan
from dsv4.shards import NewShard
from dsv4.synthetic import SyntheticCheckpoint
from helpers import make_checkpoint
from helpers.make_checkpoint import (
    TRUE_SIZE_FORMATS,
    encode,
    listing,
    random_weights,
    shards_of,
    write_checkpoint,
    write_true_size,
)
from tests.checkpoints import BYTES, MINI, layout_bytes, published_layout, raw_load

ROOT = Path(__file__).resolve().parent.parent
SAFETENSORS = {torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
               torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}


def stored(folder):
    """{key: (dtype, shape)} of all shards."""
    return {k: (v[0], v[1]) for path in sorted(folder.glob("*.safetensors")) for k, v in raw_load(path).items()}


def test_random_weights_leave_nothing_neutral():
    weights = random_weights(MINI, seed=1, mtp=True)
    assert any(name.startswith("mtp.0.ffn.experts") for name in weights)
    for name, value in weights.items():
        if name.endswith("tid2eid"):
            assert value.dtype == torch.int64 and value.shape == (48, 2)
            assert 0 <= int(value.min()) and int(value.max()) == MINI.n_routed_experts - 1
            assert bool((value[:, 0] != value[:, 1]).all())  # distinct experts per token
            continue
        assert value.dtype == torch.float32 and bool(torch.isfinite(value).all())
        assert value.numel() == 1 or float(value.std()) > 0.01, name
    # Matrices keep the size of what passes through: rows of norm about 1.
    assert float(weights["layers.0.attn.wq_a"].norm(dim=1).mean()) == pytest.approx(1, abs=0.1)


def test_a_seed_and_a_name_decide_a_tensor():
    first, again, other = (random_weights(MINI, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.attn.wkv"], other["layers.0.attn.wkv"])
    with_mtp = random_weights(MINI, 1, mtp=True)
    assert all(torch.equal(first[name], with_mtp[name]) for name in first)


@pytest.mark.parametrize("name,nvfp4", [("official", False), ("nvidia", True)])
def test_the_layout_is_the_published_one(tmp_path, name, nvfp4):
    write_checkpoint(tmp_path, MINI, random_weights(MINI, mtp=True), name, shards=3)
    want = published_layout(MINI, nvfp4)
    got = stored(tmp_path)
    assert got.keys() == want.keys()
    assert {k: v for k, v in got.items() if v != want[k]} == {}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == layout_bytes(want)
    assert {p.name for p in tmp_path.glob("*.safetensors")} == set(index["weight_map"].values())
    assert len(set(index["weight_map"].values())) == 3
    assert not [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


@pytest.mark.parametrize("name,keys", [
    ("compressed-tensors", {"layers.0.ffn.experts.0.w1.weight_packed": ("U8", [32, 32]),
                            "layers.0.ffn.experts.0.w1.weight_scale": ("F8_E4M3", [32, 4]),
                            "layers.0.ffn.experts.0.w1.weight_global_scale": ("F32", [1]),
                            "layers.0.ffn.experts.0.w1.input_global_scale": ("F32", [1]),
                            "layers.0.attn.wq_a.weight_scale_inv": ("F32", [1, 1]),
                            "layers.0.ffn.shared_experts.w1.weight": ("BF16", [32, 64])}),
    ("all-nvfp4", {"layers.0.attn.wo_a.weight_scale_2": ("F32", []), "layers.0.attn.wo_a.weight": ("U8", [64, 64]),
                   "layers.0.ffn.shared_experts.w2.weight_scale": ("F8_E4M3", [64, 2])}),
    ("base-fp8", {"layers.0.ffn.experts.0.w2.weight": ("F8_E4M3", [64, 32]), "layers.0.ffn.experts.0.w2.scale": ("F32", [1, 1]),
                  "mtp.0.head.weight": ("BF16", [48, 64])}),
    ("bf16", {"layers.0.attn.wq_a.weight": ("BF16", [32, 64]), "layers.0.hc_attn_fn": ("F32", [24, 256]), "norm.weight": ("BF16", [64])}),
    ("f32", {"layers.0.attn.wq_a.weight": ("F32", [32, 64]), "embed.weight": ("F32", [48, 64])}),
    ("transformers", {"model.layers.1.mlp.experts.gate_up_proj": ("F32", [4, 64, 64]),
                      "model.layers.1.mlp.experts.down_proj": ("F32", [4, 64, 32]),
                      "model.layers.1.self_attn.compressor.indexer.kv_norm.weight": ("F32", [32]), "lm_head.weight": ("F32", [48, 64]),
                      "model.layers.1.self_attn.kv_norm.weight": ("F32", [64]), "model.hc_head.hc_fn": ("F32", [4, 256])}),
    ("hybrid", {"model.layers.1.attn.norm.weight": ("F32", [64]), "head.weight": ("F32", [48, 64]),
                "model.embed_tokens.weight": ("F32", [48, 64]), "model.layers.1.ffn.experts.3.w1.weight": ("F32", [32, 64]),
                "model.layers.3.ffn.gate.bias": ("F32", [4]), "model.hc_head.hc_fn": ("F32", [4, 256])}),
])
def test_each_export_has_its_names_and_dtypes(tmp_path, name, keys):
    write_checkpoint(tmp_path, MINI, random_weights(MINI, mtp=name == "base-fp8"), name)
    got = stored(tmp_path)
    assert {key: got.get(key) for key in keys} == keys


@pytest.mark.parametrize("name", ["transformers", "hybrid"])
def test_names_are_those_that_transformers_itself_uses(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**MINI.to_dict()))
    write_checkpoint(tmp_path / "ours", MINI, random_weights(MINI), name, shards=1)
    if name == "hybrid":
        model.save_pretrained(tmp_path / "theirs")
        theirs = stored(tmp_path / "theirs")
    else:
        theirs = model.state_dict()
    assert stored(tmp_path / "ours").keys() == theirs.keys()


def test_w1_and_w3_share_a_global_scale_as_modelopt_exports_them():
    weights = random_weights(MINI, seed=2)
    together, apart = (encode(MINI, weights, FORMATS["nvidia"], share_w13=share) for share in (True, False))
    one, three, two = (f"layers.0.ffn.experts.0.w{n}" for n in (1, 3, 2))
    assert together[one].global_scale == together[three].global_scale != together[two].global_scale
    assert apart[one].global_scale != apart[three].global_scale


def test_the_cast_checkpoint_holds_the_values_of_the_official_one(tmp_path):
    weights = random_weights(MINI, seed=4)
    weights = {name: 9 * value if name.endswith(".w3") else value for name, value in weights.items()}  # w1 and w3 differ in range
    write_checkpoint(tmp_path / "official", MINI, weights, "official")
    write_checkpoint(tmp_path / "cast", MINI, weights, "nvidia", cast_mxfp4=True)
    write_checkpoint(tmp_path / "lossy", MINI, weights, "nvidia")
    official, cast, lossy = (Checkpoint.open(tmp_path / name) for name in ("official", "cast", "lossy"))
    differs = 0
    for name in weights:
        if ".ffn.experts." not in name:
            continue
        source, copy = official.weight(name), cast.weight(name)
        assert (source.kind, copy.kind) == ("mxfp4", "nvfp4")
        assert torch.equal(copy.dequantize().view(torch.int32), source.dequantize().view(torch.int32)), name
        differs += not torch.equal(lossy.weight(name).dequantize(), source.dequantize())
    assert differs > 0
    assert cast.weight("layers.0.ffn.experts.0.w1").global_scale == cast.weight("layers.0.ffn.experts.0.w3").global_scale


def test_a_config_survives_the_round_trip(tmp_path):
    write_checkpoint(tmp_path, MINI, random_weights(MINI), "nvidia", generation_config={"temperature": 0.6, "eos_token_id": [1, 3]},
                     extra_files={"tokenizer.json": "{}", "notes.bin": b"\x00"})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == MINI and checkpoint.generation_config == {"temperature": 0.6, "eos_token_id": [1, 3]}
    assert (tmp_path / "notes.bin").read_bytes() == b"\x00"
    block = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert block["moe_quant_algo"] == "NVFP4" and block["quant_method"] == "fp8" and block["weight_block_size"] == [128, 128]
    twin = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert twin["exclude_modules"] == block["ignore"] and "ignore" not in twin


def test_an_existing_checkpoint_is_kept_unless_overwritten(tmp_path):
    weights = random_weights(MINI)
    write_checkpoint(tmp_path, MINI, weights, "bf16", shards=4)
    with pytest.raises(CheckpointError, match="expected a folder without shards, found model-00001-of-00004.safetensors"):
        write_checkpoint(tmp_path, MINI, weights, "f32")
    write_checkpoint(tmp_path, MINI, weights, "f32", shards=2, overwrite=True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2 and Checkpoint.open(tmp_path).weight("head").payload.dtype == torch.float32


@pytest.mark.parametrize("shards", [1, 2, 7, 1000])
def test_shards_hold_everything_once_and_none_is_empty(tmp_path, shards):
    weights = random_weights(MINI)
    write_checkpoint(tmp_path, MINI, weights, "bf16", shards=shards)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == min(shards, len(weights)) and all(raw_load(path) for path in files)
    sizes = [path.stat().st_size for path in files]
    assert shards > 7 or max(sizes) < 2 * sum(sizes) / len(sizes)
    assert Checkpoint.open(tmp_path).audit().problems == []


def test_dimensions_that_a_format_cannot_hold(tmp_path):
    config = replace(MINI, moe_intermediate_size=40)
    with pytest.raises(CheckpointError, match=r"official: MXFP4: expected \[out, in\] with in a multiple of 32, found \(64, 40\)"):
        write_checkpoint(tmp_path, config, random_weights(config), "official")
    assert not list(tmp_path.glob("*"))


def test_the_command_line(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MINI.to_dict()))
    args = ["--out", str(tmp_path / "out"), "--config", str(config), "--seed", "3", "--shards", "2"]
    assert make_checkpoint.main([*args, "--format", "nvidia", "--cast-mxfp4", "--mtp"]) == 0
    assert "nvidia, 2 shards" in capsys.readouterr().out
    assert Checkpoint.open(tmp_path / "out").audit().problems == []
    assert make_checkpoint.main([*args, "--format", "bf16"]) == 3
    assert "expected a folder without shards" in capsys.readouterr().err
    assert make_checkpoint.main([*args, "--format", "bf16", "--overwrite"]) == 0
    for extra, message in ((["--format", "bf16", "--shards", "0"], "--shards: expected 1 or more, found 0"),
                           (["--format", "bf16", "--cast-mxfp4"], "--cast-mxfp4: expected --format nvidia or all-nvfp4, found bf16"),
                           (["--format", "bf16", "--config", str(tmp_path)], "expected a JSON file"),
                           (["--format", "gguf"], "invalid choice: 'gguf'")):
        with pytest.raises(SystemExit) as caught:
            make_checkpoint.main([*args, *extra])
        assert caught.value.code == 2 and message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ true size


@pytest.mark.parametrize("preset,count", [("pro", 64), ("flash", 46)])
@pytest.mark.parametrize("name", ["official", "nvidia"])
def test_a_release_s_listing_is_the_published_one(preset, count, name):
    """Every key with its dtype and shape, MTP included; tests/test_checkpoint_size.py holds the sums of published_layout to the published
    bytes and keys."""
    config, parts = PRESETS[preset], shards_of(PRESETS[preset])
    listings = [listing(needs, config, FORMATS[name]) for needs in parts]
    got = {key: (SAFETENSORS[dtype], list(shape)) for part in listings for key, (dtype, shape) in part.items()}
    assert len(parts) == count and got == published_layout(config, name == "nvidia") and sum(map(len, listings)) == len(got)
    if name == "official":
        size = sum(math.prod(shape) * dtype.itemsize for part in listings for dtype, shape in part.values())
        assert (len(got), size) == {"pro": (145_116, 864_704_792_696), "flash": (69_187, 159_609_485_896)}[preset]


@pytest.mark.parametrize("name", TRUE_SIZE_FORMATS)
def test_a_release_of_true_layout_holds_what_was_drawn_and_holes(tmp_path, name):
    drawn = write_true_size(tmp_path, MINI, name, range(1, 3), seed=5, threads=2)
    checkpoint, made = Checkpoint.open(tmp_path), SyntheticCheckpoint(MINI, name, "cpu", seed=5)
    assert checkpoint.audit().problems == [] == checkpoint.audit().unknown and len(list(tmp_path.glob("*.safetensors"))) == 4 + 3
    assert checkpoint.config == MINI
    for need_name, need in made.needs.items():
        hole = need_name.startswith(("layers.0.", "layers.3."))
        if not need.linear:
            got, want = checkpoint.tensor(need_name), made.tensor(need_name)
        elif hole and FORMATS[name].routed in ("nvfp4", "nvfp4-ct") and ".ffn.experts." in need_name:
            with pytest.raises(CheckpointError, match="expected a finite global scale above zero, found 0.0"):
                checkpoint.weight(need_name)  # a hole is no weight
            continue
        elif hole:
            layout = checkpoint.entries(need)
            got, want = checkpoint.read(layout.payload), made.weight(need_name).payload
        else:
            got, want = checkpoint.weight(need_name).dequantize(), made.weight(need_name).dequantize()
            assert checkpoint.weight(need_name).nbytes == made.bytes_of(need)
        assert got.dtype == want.dtype if not need.linear else got.shape == want.shape
        assert not got.view(torch.uint8).any() if hole else torch.equal(got, want), need_name
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = {key: math.prod(shape) * BYTES[dtype] for key, (dtype, shape) in stored(tmp_path).items()}
    assert index["metadata"]["total_size"] == sum(sizes.values()) and index["weight_map"].keys() == sizes.keys()
    assert stored(tmp_path)["layers.1.attn.wq_a." + ("weight_scale_2" if name == "all-nvfp4" else FORMATS[name].fp8_scale[0])][0] == {
        "nvidia": "F8_E8M0", "official": "F8_E8M0", "compressed-tensors": "F32", "all-nvfp4": "F32"}[name]
    outside = ("embed", "head", "norm", "hc_head", "layers.1.", "layers.2.")
    assert drawn == sum(size for key, size in sizes.items() if key.startswith(outside))


def test_holes_take_no_room(tmp_path):
    config = replace(MINI, vocab_size=16, hidden_size=256, moe_intermediate_size=1024)
    write_true_size(tmp_path, config, "official", range(1, 2), threads=1)
    sizes = [(path.stat().st_size, path.stat().st_blocks * 512) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert all(taken < size / 4 for size, taken in (sizes[1], sizes[3], sizes[4])) and sizes[2][1] >= sizes[2][0] > 1 << 20


def test_a_model_of_a_written_release_keeps_its_streams_in_range(tmp_path):
    config = replace(MINI, num_hidden_layers=12, compress_ratios=(0, 4, 128) * 4)
    write_true_size(tmp_path, config, "nvidia", range(12), threads=1)
    layers = tuple(range(12))
    plan = Plan(layers, (DevicePlan(torch.device("cpu"), layers, 0, 0, 0, 0),), 32, 32, False)
    model, sizes = Model(Checkpoint.open(tmp_path), plan, Numerics()), []
    model.on_layer = lambda n, streams: sizes.append(float(streams.settled().square().mean().sqrt()))
    logits = model.forward(list(range(32)), model.new_cache(), "all")
    assert 0.1 < min(sizes) and max(sizes) < 10 and 0.2 < logits.std() < 5


def test_a_new_shard_is_the_library_s_byte_for_byte(tmp_path, monkeypatch):
    """In the library's order of dtypes and names: what a release's exporter writes. The disk takes 10 bytes at a time."""
    pwrite = os.pwrite
    monkeypatch.setattr(shards.os, "pwrite", lambda file, view, at: pwrite(file, view[:10], at))
    tensors = {f"{name}.{i}": torch.arange(24).reshape(2, -1).to(torch.uint8).view(2, -1) for name in ("b", "a") for i in (1, 10, 2)}
    for number, dtype in enumerate((torch.int64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
                                    torch.float8_e8m0fnu, torch.int8, torch.uint8)):
        tensors |= {f"z{(number * 5) % 9}.{name}": torch.arange(48, dtype=torch.uint8).view(dtype).clone() for name in "ba"}
    tensors["scalar"] = torch.tensor(1.5)
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    with NewShard(tmp_path / "ours", {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()}) as shard:
        with pytest.raises(ValueError, match="scalar: expected"):
            shard.write("scalar", torch.zeros(1))
        for key in sorted(tensors, reverse=True):
            shard.write(key, tensors[key])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.fixture
def small_flash(monkeypatch):
    monkeypatch.setitem(make_checkpoint.PRESETS, "flash", MINI)
    monkeypatch.setattr(make_checkpoint.torch, "set_num_threads", lambda n: None)


def test_the_command_line_of_a_release(tmp_path, capsys, small_flash):
    args = ["--out", str(tmp_path / "out"), "--preset", "flash", "--format", "nvidia"]
    assert make_checkpoint.main([*args, "--layers", "2:3"]) == 0
    out = capsys.readouterr().out
    assert "nvidia, 7 shards, " in out and "of them drawn (layers 2:3), the rest holes" in out and "GB/s" in out
    assert make_checkpoint.main(args) == 3
    assert "expected a folder without shards" in capsys.readouterr().err
    assert make_checkpoint.main([*args, "--overwrite", "--seed", "1"]) == 0
    assert "drawn (layers 0:4)" in capsys.readouterr().out
    for extra, message in ((["--layers", "3:5"], "--layers: expected at most 0:4, found 3:5"),
                           (["--layers", "3"], "expected A:B with A < B"),
                           (["--shards", "3"], "--shards does not go with --preset flash"), (["--mtp"], "--mtp does not go with"),
                           (["--cast-mxfp4"], "--cast-mxfp4 does not go with"),
                           (["--format", "bf16"], "--format: expected one of nvidia, official, compressed-tensors, all-nvfp4 with"),
                           (["--preset", "tiny", "--layers", "0:1"], "--layers: expected --preset pro or flash")):
        with pytest.raises(SystemExit) as caught:
            make_checkpoint.main([*args, *extra])
        assert caught.value.code == 2 and message in capsys.readouterr().err


def test_a_full_disk_leaves_no_folder_that_looks_whole(tmp_path, capsys, small_flash, monkeypatch):
    pwrite, calls = os.pwrite, []

    def full(file, view, at):
        calls.append(at)
        if len(calls) > 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, view[:100], at)  # a disk may take less than it was given

    monkeypatch.setattr(shards.os, "pwrite", full)
    assert make_checkpoint.main(["--out", str(tmp_path), "--preset", "flash", "--format", "nvidia"]) == 2
    assert capsys.readouterr().err == f"make_checkpoint: --out {tmp_path} cannot be written: No space left on device\n"
    assert not list(tmp_path.glob("*.json")) and not list(tmp_path.glob(".*"))


def test_an_interrupted_release_leaves_no_folder_that_looks_whole(tmp_path, small_flash, monkeypatch):
    """Ctrl-C in the second shard; what was not begun is not drawn."""
    drawn, original = [], make_checkpoint._draw_into

    def draw(shard, need, *rest):
        drawn.append(need.name)
        time.sleep(0.002)
        if need.name == "layers.0.attn.wq_a":
            raise KeyboardInterrupt
        original(shard, need, *rest)

    monkeypatch.setattr(make_checkpoint, "_draw_into", draw)
    with pytest.raises(KeyboardInterrupt):
        write_true_size(tmp_path, MINI, "nvidia", range(4), threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["model-00001-of-00007.safetensors"]
    assert drawn[-1] not in (needs_of_layer(MINI, 0)[-1].name, needs_of_layer(MINI, 1)[-1].name)


def test_the_script_runs_by_its_path(tmp_path):
    script = str(ROOT / "helpers" / "make_checkpoint.py")
    done = subprocess.run([sys.executable, script, "--out", str(tmp_path / "tiny"), "--format", "nvidia"],
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checkpoint = Checkpoint.open(tmp_path / "tiny")
    assert isinstance(checkpoint.config, ModelConfig) and checkpoint.audit().family == "tiny"
    assert checkpoint.config == PRESETS["tiny"] and isinstance(checkpoint.weight("head"), Weight)
