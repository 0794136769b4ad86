"""A plan before the download: sizes from config.json and the index alone, and one line where they cannot be told."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.announced import Announced, open_for_plan
from dsv4.checkpoint import Checkpoint, needs_of_layer, needs_outside_layers
from dsv4.config import PRESETS
from dsv4.errors import CheckpointError
from dsv4.exports import FORMATS
from helpers.make_checkpoint import random_weights, write_checkpoint
from tests.checkpoints import MINI, layout_bytes, published_layout, save_sparse

INDEX = "model.safetensors.index.json"


def announce(folder: Path, config, layout: dict, total: int | None = None, **more) -> Path:
    """config.json and the index of a folder whose shards are elsewhere."""
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"expert_dtype": "fp4"} | more))
    total = layout_bytes(layout) if total is None else total
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(layout, "a.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@functools.cache
def weights():
    return random_weights(PRESETS["tiny"], 1, mtp=True)


def needs(config):
    return needs_outside_layers(config) + [need for n in range(config.num_hidden_layers) for need in needs_of_layer(config, n)]


@pytest.mark.parametrize("name,nvfp4", [("pro", True), ("flash", False)])
def test_the_index_of_a_published_checkpoint_tells_every_size(name, nvfp4, tmp_path):
    """To the byte, of Pro's NVFP4 export and Flash's release."""
    config = PRESETS[name]
    layout = published_layout(config, nvfp4)
    checkpoint, disk = open_for_plan(announce(tmp_path, config, layout))
    assert isinstance(checkpoint, Announced) and (disk.total, disk.present) == (layout_bytes(layout), 0) and disk.free > 0
    used = {key: value for key, value in layout.items() if not key.startswith("mtp.") and not key.endswith("input_scale")}
    assert sum(checkpoint.stored(need).nbytes for need in needs(config)) == layout_bytes(used)


@pytest.mark.parametrize("format", FORMATS)
def test_what_the_index_tells_is_what_the_headers_tell(format, tmp_path):
    """For every export that helpers/make_checkpoint.py writes, with one of two shards gone."""
    write_checkpoint(tmp_path, PRESETS["tiny"], weights(), format, shards=2)
    whole = Checkpoint.open(tmp_path)
    if FORMATS[format].names == "transformers":  # fused experts
        next(tmp_path.glob("*.safetensors")).unlink()
        with pytest.raises(CheckpointError, match="does not name layers.0.ffn.experts.0.w1: what is missing to plan"):
            open_for_plan(tmp_path)
        return
    headers = {need.name: whole.stored(need) for need in needs(whole.config)}
    next(tmp_path.glob("*.safetensors")).unlink()
    checkpoint, disk = open_for_plan(tmp_path)
    assert 0 < disk.present < disk.total
    for need in needs(checkpoint.config):
        told = checkpoint.stored(need)
        assert told.kind == headers[need.name].kind, need.name
        assert told.nbytes == pytest.approx(headers[need.name].nbytes, rel=1e-3, abs=16), need.name


def test_a_whole_folder_is_planned_by_its_headers(tmp_path):
    layout = published_layout(MINI)
    (tmp_path / "config.json").write_text(json.dumps(MINI.to_dict()))
    save_sparse(tmp_path, layout, 3)
    checkpoint, disk = open_for_plan(tmp_path)
    assert isinstance(checkpoint, Checkpoint) and disk.total == disk.present > layout_bytes(layout) and disk.missing == 0
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="found no such thing"):  # the index of save_sparse has no total
        open_for_plan(tmp_path)


def test_missing_disk():
    from dsv4.announced import Disk

    assert (Disk(100, 30, 69).missing, Disk(100, 30, 70).missing, Disk(100, 100, 0).missing) == (1, 0, 0)


def one_line(caught, *words):
    text = str(caught.value)
    assert "\n" not in text and caught.value.exit_code == 3 and all(word in text for word in words), text


@pytest.mark.parametrize("total", [0, 10**15, "many", None, 1.5, True, []])
def test_a_total_that_cannot_be(tmp_path, total):
    announce(tmp_path, MINI, published_layout(MINI))
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"] = {"total_size": total} if total != [] else []
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        open_for_plan(tmp_path)
    one_line(caught, "what is missing to plan are the shards")


def test_a_total_of_other_formats_is_refused(tmp_path):
    """Experts that are named like MXFP4 and are FP8 (as -Base) are told by the total, whatever config.json says; bytes between are not."""
    layout = published_layout(replace(MINI, n_routed_experts=64), mtp=False)
    size = layout_bytes(layout)
    experts = {k: v for k, v in layout.items() if ".ffn.experts." in k}
    codes, scales = (layout_bytes({k: v for k, v in experts.items() if k.endswith(end)}) for end in ("weight", "scale"))
    fp8 = codes - scales + 4 * 64 * 3  # twice the codes, a scale of a byte for each matrix
    config = replace(MINI, n_routed_experts=64)
    with pytest.raises(CheckpointError) as caught:
        open_for_plan(announce(tmp_path, config, layout, size + fp8 // 2))
    one_line(caught, "says", "come to")
    for told in ("fp8", "fp4"):
        checkpoint, _ = open_for_plan(announce(tmp_path, config, layout, size + fp8, expert_dtype=told))
        assert checkpoint.stored(needs_of_layer(config, 0)[-1]).kind == "fp8"
        checkpoint, _ = open_for_plan(announce(tmp_path, config, layout, size, expert_dtype=told))
        assert checkpoint.stored(needs_of_layer(config, 0)[-1]).kind == "mxfp4"
    for name in ("layers.1.attn.wq_a.weight", "layers.1.attn.attn_sink", "head.weight"):
        with pytest.raises(CheckpointError) as caught:
            open_for_plan(announce(tmp_path, config, {k: v for k, v in layout.items() if k != name}))
        one_line(caught, f"does not name {name.removesuffix('.weight')}")


def test_fused_experts_need_headers(tmp_path):
    layout = {k: v for k, v in published_layout(MINI).items() if ".ffn.experts." not in k}
    layout["model.layers.0.mlp.experts.gate_up_proj"] = ("BF16", [4])
    with pytest.raises(CheckpointError) as caught:
        open_for_plan(announce(tmp_path, MINI, layout))
    one_line(caught, "does not name layers.0.ffn.experts.0.w1", "what is missing to plan are the shards")


def test_config_alone_and_what_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        open_for_plan(tmp_path / "nothing")
    one_line(caught, "no such folder")
    with pytest.raises(CheckpointError) as caught:
        open_for_plan(tmp_path)
    one_line(caught, "expected config.json")
    with pytest.raises(CheckpointError) as caught:
        open_for_plan(Path("x" * 300))
    one_line(caught, "too long")
    (tmp_path / "config.json").write_text(json.dumps(MINI.to_dict()))
    with pytest.raises(CheckpointError) as caught:
        open_for_plan(tmp_path)
    one_line(caught, "found neither", "fetch the index")
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CheckpointError) as caught:
        open_for_plan(tmp_path)
    one_line(caught, "an index of shards")
