"""helpers/bench_decode.py: its bytes against known ones, its plumbing on the definitions, what it refuses; its times need a GPU."""

import json
import sys

import pytest
import torch

from dsv4 import runtime
from dsv4.config import PRESETS
from dsv4.errors import UserError
from dsv4.kernels import linear
from helpers import bench_decode
from helpers.make_checkpoint import FORMATS
from helpers.synthetic import SyntheticCheckpoint


@pytest.mark.parametrize("preset,format,layer,context,megabytes", [
    ("pro", "nvidia", 1, 4096, 614.7), ("pro", "nvidia", 2, 4096, 650.2), ("pro", "all-nvfp4", 1, 4096, 454.5),
    ("pro", "all-nvfp4", 2, 4096, 484.5), ("flash", "nvidia", 3, 4096, 230.7), ("flash", "nvidia", 2, 4096, 252.2),
])
def test_bytes_of_a_layer_are_those_of_the_floors(preset, format, layer, context, megabytes):
    """Rounded, and without the rows of zero bytes. At 4.3 TB/s they take what docs/measurements.md has: 143 us for an HCA layer of Pro."""
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


def refused(module, argv, monkeypatch, capsys) -> str:
    """The one line with which module.main refuses before it reads or draws a weight."""
    def early(*_, **__):
        raise AssertionError("weights are drawn")
    monkeypatch.setattr(module, "SyntheticCheckpoint", early)
    try:
        code = module.main(argv)
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def refuses_outputs_early(module, argv, tmp_path, monkeypatch, capsys):
    """Files that cannot be written in the end, and pictures that cannot be drawn; what is there stays as it is."""
    old, new = tmp_path / "old", tmp_path / "new.png"
    old.write_text("as it was")
    cannot = "cannot be written: {}: give a file name in a writable folder"
    for flag in ("--json", "--plot"):
        for path, why in ((tmp_path / "none" / "x.png", "No such file or directory"), (tmp_path, "Is a directory"),
                          (old / "x.png", "Not a directory"), (tmp_path / ("x" * 300), "File name too long")):
            error = refused(module, [*argv, flag, str(path)], monkeypatch, capsys)
            assert error.startswith(f"error: {flag}: {str(path)[:100]} ") and cannot.format(why) in error
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if there were none
    for path in (old, new):
        error = refused(module, [*argv, "--json", str(path), "--plot", str(new)], monkeypatch, capsys)
        assert error == "error: --plot: expected matplotlib, found none: pip install 'dsv4[plot]'\n"
    assert old.read_text() == "as it was" and not new.exists()


def test_outputs_that_cannot_be_written_are_refused_before_measuring(tmp_path, monkeypatch, capsys):
    refuses_outputs_early(bench_decode, ["--preset", "tiny", "--device", "cpu"], tmp_path, monkeypatch, capsys)


def test_the_name_of_a_picture_says_its_kind(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="pip install 'dsv4[plot]'")
    error = refused(bench_decode, ["--preset", "tiny", "--device", "cpu", "--plot", str(tmp_path / "x.txt")], monkeypatch, capsys)
    assert "--plot: expected a name that ends in one of ." in error and ".png" in error and "found x.txt" in error
    bench_decode.check_outputs(None, tmp_path / "x.PNG")


@pytest.mark.parametrize("argv, words", [
    (["--context", "2", "--tokens", "8"], "--tokens: expected at most --context, 2, found 8"),
    *((["--roof", x], f"--roof: expected a finite number above 0, found '{x}'") for x in ("0", "-1", "nan", "inf", "1e400", "much")),
    (["--format", "fp5"], "--format: invalid choice: 'fp5'"),
])
def test_what_is_refused(argv, words, monkeypatch, capsys):
    assert words in refused(bench_decode, ["--preset", "tiny", "--device", "cpu", *argv], monkeypatch, capsys)


@pytest.mark.parametrize("format", FORMATS)
def test_the_formats_are_those_that_the_kernels_take(format, monkeypatch, capsys):
    """On a GPU; what kernels there would refuse the packing refuses here."""
    checkpoint = SyntheticCheckpoint(PRESETS["tiny"], format, "cpu")
    bench_decode.check_format(format, torch.device("cpu"))
    try:
        for name in ("head", "layers.2.attn.wq_a", "layers.2.ffn.experts.0.w1"):
            linear.pack_weights((checkpoint.weight(name),))
    except UserError as error:
        assert "weights that bf16 holds exactly" in str(error)
        monkeypatch.setattr(runtime, "resolve_devices", lambda _: [torch.device("cuda", 0)])
        error = refused(bench_decode, ["--preset", "tiny", "--format", format], monkeypatch, capsys)
        assert "on a GPU" in error and f"found {format}: its weights are fp32, which the kernels' bf16 does not hold" in error
    else:
        bench_decode.check_format(format, torch.device("cuda", 0))


@pytest.mark.parametrize("format", [name for name, form in FORMATS.items() if form.plain == torch.float32])
def test_every_format_runs_on_a_cpu(format, monkeypatch):
    for name, few in (("CALLS", 2), ("WARM", 0), ("TIMED", 1), ("COLD", 1)):
        monkeypatch.setattr(bench_decode, name, few)
    assert bench_decode.main(["--preset", "tiny", "--device", "cpu", "--context", "130", "--format", format, "--no-ops"]) == 0


def test_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert bench_decode.main(["--preset", "tiny"]) == 2
    assert capsys.readouterr().err.startswith("error: --devices: cuda:0: torch")
