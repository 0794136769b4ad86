"""helpers/bench_decode.py: its bytes against the specification's, and its plumbing on the definitions; its times need a GPU."""

import json

import pytest
import torch

from dsv4.config import PRESETS
from helpers import bench_decode
from helpers.synthetic import SyntheticCheckpoint


@pytest.mark.parametrize("preset,format,layer,context,megabytes", [
    ("pro", "nvidia", 1, 4096, 614.7), ("pro", "nvidia", 2, 4096, 650.2), ("pro", "all-nvfp4", 1, 4096, 454.5),
    ("pro", "all-nvfp4", 2, 4096, 484.5), ("flash", "nvidia", 3, 4096, 230.7), ("flash", "nvidia", 2, 4096, 252.2),
])
def test_bytes_of_a_layer_are_the_published_ones(preset, format, layer, context, megabytes):
    """spec/speed.md 3.2, which rounds and leaves out the rows of zero bytes here."""
    read = bench_decode.step_bytes(SyntheticCheckpoint(PRESETS[preset], format, "meta"), layer, context, 1)
    assert 1e-6 * sum(read.values()) == pytest.approx(megabytes, rel=2e-3)


def test_long_context_and_several_tokens_read_more():
    checkpoint = SyntheticCheckpoint(PRESETS["pro"], "nvidia", "meta")
    short, long = (bench_decode.step_bytes(checkpoint, 2, context, 1) for context in (4096, 1 << 20))
    assert short["index_scores"] == 0 and long["index_scores"] == (1 << 18) * 68  # 1,024 entries need no scores
    eight = bench_decode.step_bytes(checkpoint, 2, 4096, 8)
    assert 7.5 < (eight["moe"] - 66.1e6) / (short["moe"] - 66.1e6) < 8  # a few of 48 choices fall on the same expert


def test_every_operation_of_a_layer_has_its_row(tmp_path, capsys, monkeypatch):
    for name, few in (("CALLS", 2), ("WARM", 1), ("TIMED", 3)):
        monkeypatch.setattr(bench_decode, name, few)
    path = tmp_path / "out.json"
    assert bench_decode.main(["--preset", "tiny", "--device", "cpu", "--context", "700", "--json", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    results = {r["row"]: r for r in json.loads(path.read_text())["results"]}
    assert len(out) == 2 + len(results)
    assert {"SWA layer", "HCA layer", "CSA layer", "head and sampler", "model, 8 GPUs in a row"} <= results.keys()
    indexer = {"index_scores", "select_entries"}
    for kind, missing in (("SWA", indexer), ("HCA", indexer), ("CSA", set())):
        rows = {row for rows in bench_decode.ROWS.values() for row in rows} - missing
        assert {name.split(": ")[1] for name in results if name.startswith(f"{kind}: ")} == rows
        layer = sum(r["bytes"] for name, r in results.items() if name.startswith(f"{kind}: "))
        assert layer == results[f"{kind} layer"]["bytes"]
    model, config = results["model, 8 GPUs in a row"], PRESETS["tiny"]
    layers = [results[f"{config.kind(n)} layer"] for n in range(6)]
    assert model["bytes"] == sum(r["bytes"] for r in layers) + results["head and sampler"]["bytes"]
    assert model["us"] == pytest.approx(sum(r["us"] for r in layers) + results["head and sampler"]["us"] + 7 * bench_decode.HOP_US)
    assert all(r["us"] > 0 and r.get("p10", 0) <= r["us"] <= r.get("p90", r["us"]) for r in results.values())


def test_recording_sees_every_call_and_leaves_no_trace():
    from dsv4 import ops
    from dsv4.ops import backend

    with bench_decode.recording() as calls:
        ops.pack_weights((1,))
        ops.new_keys(1, 2, torch.float32, "cpu")
    assert [name for name, *_ in calls] == ["pack_weights", "new_keys"] and calls[0][1]() == (1,) and not backend._chosen


def test_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert bench_decode.main(["--preset", "tiny"]) == 2
    assert capsys.readouterr().err.startswith("error: --devices: cuda:0: torch")
