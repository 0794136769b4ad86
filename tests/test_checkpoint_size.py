"""dsv4/checkpoint.py at size: the published checkpoints' headers in full, and the memory that reading takes."""

import json
import struct
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.checkpoint import Checkpoint
from dsv4.config import PRESETS
from tests.checkpoints import MINI, layout_bytes, published_layout, raw_save, save_sparse


@pytest.mark.parametrize("name,nvfp4,keys,size", [
    # metadata.total_size and key counts of the published index files; NVIDIA's sizes are those of its repositories in GB
    ("pro", False, 145_116, 864_704_792_696), ("flash", False, 69_187, 159_609_485_896),
    ("pro", True, 285_660, 913.06e9), ("flash", True, 135_235, 168.27e9)])
def test_the_layout_of_these_tests_is_the_published_one(name, nvfp4, keys, size):
    """The layout that the next test holds against dsv4/checkpoint.py is typed from DeepSeek's table; its sums are the published ones."""
    layout = published_layout(PRESETS[name], nvfp4)
    assert len(layout) == keys and layout_bytes(layout) == pytest.approx(size, abs=0 if isinstance(size, int) else 5e6)


@pytest.mark.parametrize("name,nvfp4,layers", [("flash", False, 43), ("pro", True, 8)])
def test_the_published_checkpoints_are_what_the_config_needs(name, nvfp4, layers, tmp_path):
    """Real headers of full size over holes instead of data: all of Flash; the first 8 layers of Pro, whose 285,660 keys take 10 s."""
    config = replace(PRESETS[name], num_hidden_layers=layers, compress_ratios=PRESETS[name].compress_ratios[:layers])
    layout = published_layout(config, nvfp4)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    save_sparse(tmp_path, layout, 46)
    audit = Checkpoint.open(tmp_path).audit()
    assert (audit.family, audit.unknown, audit.problems) == ("flash" if name == "flash" else "custom", [], [])
    assert audit.total_bytes + sum(n for _, n in audit.skipped.values()) == layout_bytes(layout)
    assert audit.skipped["mtp.* (multi-token prediction; not used for plain generation)"][0] == {"pro": 2343, "flash": 1575}[name]
    experts = layers * config.n_routed_experts * 3
    assert {k: v[0] for k, v in audit.formats["routed experts"].items()} == {"NVFP4 (ModelOpt)" if nvfp4 else "MXFP4": experts}


READER = textwrap.dedent("""
    import sys, torch
    from dsv4.checkpoint import Checkpoint
    def resident(field):
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
    checkpoint = Checkpoint.open(sys.argv[1])
    Checkpoint.open(sys.argv[1]).weight("layers.0.attn.wq_a").dequantize()  # warms torch's own pools
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts from here
    before, kept = resident("VmRSS:"), []
    for layer in range(checkpoint.config.num_hidden_layers):
        for name in list(checkpoint._sizes):
            if name.startswith(f"layers.{layer}."):
                kept.append(checkpoint.weight(name) if name in checkpoint._layouts else checkpoint.tensor(name))
    print(resident("VmHWM:") - before, resident("VmRSS:") - before, len(kept))
""")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_reading_layer_by_layer_holds_the_model_and_at_most_one_layer_more(tmp_path):
    config = replace(MINI, hidden_size=512, num_hidden_layers=8, compress_ratios=(0, 4, 128, 4, 128, 4, 128, 0), n_routed_experts=32,
                     moe_intermediate_size=512)
    layout = published_layout(config, nvfp4=True, mtp=False)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    halves = list(layout.items())
    halves = [dict(halves[:len(halves) // 2]), dict(halves[len(halves) // 2:])]
    weight_map = {}
    for number, part in enumerate(halves):
        values = {k: (d, s, (struct.pack("<f", 0.01) if d == "F32" and not s else b"\x30" * (layout_bytes({k: (d, s)}))))
                  for k, (d, s) in part.items() if not k.endswith("tid2eid")}
        values |= {k: (d, s, bytes(layout_bytes({k: (d, s)}))) for k, (d, s) in part.items() if k.endswith("tid2eid")}
        raw_save(tmp_path / f"{number}.safetensors", values)
        weight_map |= dict.fromkeys(part, f"{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint.open(tmp_path)
    model = sum(checkpoint.layer_bytes(n) for n in range(8))
    layer = max(checkpoint.layer_bytes(n) for n in range(8))
    assert model > 100e6 and layer < 20e6
    done = subprocess.run([sys.executable, "-c", READER, str(tmp_path)], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).resolve().parent.parent)
    peak, after, count = map(int, done.stdout.split())
    assert count == sum(name.startswith("layers.") for name in checkpoint._sizes)
    # 4 MiB for the interpreter's own objects (3,000 Weights, each with its tensors' headers) beside the bytes of the weights.
    assert after > 0.9 * model and peak <= model + layer + (4 << 20), (model, layer, peak, after)
