"""helpers/bench_decode.py: its bytes against known ones, its plumbing on the definitions, what it refuses; its times need a GPU."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from dsv4 import ops, runtime
from dsv4.config import PRESETS
from dsv4.errors import UserError
from dsv4.exports import FORMATS
from dsv4.kernels import launch, linear
from dsv4.synthetic import SyntheticCheckpoint
from helpers import bench_decode, replayed, timing
from helpers.replayed import cold, recording, storage, storages


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


@pytest.mark.parametrize("ratio,context,tokens,expected", [
    (0, 4096, 1, [(1, 4095)]), (4, 4096, 1, [(3 / 4, 4094), (1 / 4, 4095)]), (128, 4096, 1, [(127 / 128, 4094), (1 / 128, 4095)]),
    (4, 4097, 1, [(3 / 4, 4094), (1 / 4, 4095)]), (128, 4096, 8, [(15 / 16, 4094), (1 / 16, 4095)]), (4, 4096, 8, [(1, 4095)]),
    (4, 4096, 4, [(1, 4095)]), (128, 127, 1, [(1, 126)]), (128, 128, 1, [(127 / 128, 126), (1 / 128, 127)]),
])
def test_cases_of_a_step(ratio, context, tokens, expected):
    """Over all positions a step of so many tokens closes a block as often as its case says, and at the position of the case."""
    found = bench_decode.cases(ratio, context, tokens)
    assert [(case.share, case.last) for case in found] == expected and len({case.name for case in found}) == len(found)

    def closes(last):
        return bool(ratio) and any((p + 1) % ratio == 0 for p in range(last - tokens + 1, last + 1))

    if len(found) == 2:
        assert not closes(found[0].last) and closes(found[1].last) and all(case.last - tokens + 1 >= 0 for case in found)
        assert sum(closes(last) for last in range(1000, 1000 + 128)) / 128 == found[1].share
    elif context >= ratio:
        assert all(closes(last) == bool(ratio) for last in range(1000, 1000 + 128))


@pytest.fixture
def short(monkeypatch):
    """A few calls: the numbers mean nothing anyway."""
    for name, few in (("CALLS", 2), ("WARM", 1), ("TIMED", 3)):
        monkeypatch.setattr(timing, name, few)


def test_every_operation_of_a_layer_has_its_row(tmp_path, capsys, short):
    path = tmp_path / "out.json"
    assert bench_decode.main(["--preset", "tiny", "--device", "cpu", "--context", "700,1500", "--json", str(path)]) == 0
    out, told = capsys.readouterr().out.splitlines(), json.loads(path.read_text())
    results, later = ({r["row"]: r for r in told["results"] if r["context"] == context} for context in (700, 1500))
    assert len(out) == 1 + 2 + len(results) + len(later) + 2 and len(results) + len(later) == len(told["results"])
    for found in (results, later):
        assert {"SWA layer", "HCA layer", "CSA layer", "model, 8 GPUs in a row"} <= found.keys()
        for kind, ratio in (("HCA", 128), ("CSA", 4)):
            open_, closing = found[f"{kind} layer, no block closes"], found[f"{kind} layer, a block closes (1 step in {ratio})"]
            assert closing["share"] == 1 - open_["share"] == 1 / ratio
            assert found[f"{kind} layer"]["us"] == pytest.approx(open_["us"] * (1 - 1 / ratio) + closing["us"] / ratio)
    indexer = {"index_scores", "select_entries"}
    for kind, missing in (("SWA", indexer), ("HCA", indexer), ("CSA", set())):
        rows = {row for rows in bench_decode.ROWS.values() for row in rows} - missing
        assert {name.split(": ")[1].split(",")[0] for name in results if name.startswith(f"{kind}: ")} == rows
        assert sum(name.startswith(f"{kind}: update_caches") for name in results) == (1 if kind == "SWA" else 2)
        layer = sum(r["bytes"] for name, r in results.items() if name.startswith(f"{kind}: "))
        assert layer == results[f"{kind} layer"]["bytes"]
    assert {name for name in later if ": " in name} == {"HCA: attention", "CSA: index_scores", "CSA: select_entries"}  # which read more
    assert {name for name in results if name.startswith("end: ")} == {"end: hc_head", "end: head", "end: sample"}
    assert {name for name in results if name.startswith("alone: ")} == {
        "alone: wo_b, fp8", "alone: wq_b, fp8", "alone: shared w1 + w3, fp8", "alone: shared w2, fp8", "alone: 2 experts, nvfp4"}
    config, ends = PRESETS["tiny"], [results["head and sampler"], results["start and end of a share"]]
    for found in (results, later):
        model, layers = found["model, 8 GPUs in a row"], [found[f"{config.kind(n)} layer"] for n in range(6)]
        assert model["bytes"] == sum(r["bytes"] for r in layers) + ends[0]["bytes"]
        assert model["us"] == pytest.approx(sum(r["us"] for r in layers) + ends[0]["us"] + 8 * ends[1]["us"] + 7 * bench_decode.HOP_US)
    assert all(r["us"] > 0 and r.get("p10", 0) <= r["us"] <= r.get("p90", r["us"]) for r in told["results"])
    (grown,) = told["growth"]
    first, second = (found["model, 8 GPUs in a row"] for found in (results, later))
    assert grown == {"from": 700, "to": 1500, "us": pytest.approx(second["us"] / first["us"] - 1),
                     "floor": pytest.approx(second["bytes"] / first["bytes"] - 1)} and grown["floor"] > 0


def test_blackwell_s_forms_have_rows_of_their_own(monkeypatch, tmp_path, short):
    """Called with what the operation was called with, and only where they can run."""
    calls = []

    def attention_sm100(*args):
        calls.append(args)
        return ops.attention(*args)

    assert bench_decode.blackwell_forms(torch.device("cpu")) == {}
    for capability, names in (((9, 0), []), ((10, 0), ["attention", "index_scores"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert list(bench_decode.blackwell_forms(torch.device("cuda"))) == names
    monkeypatch.setattr(bench_decode, "blackwell_forms", lambda _: {"attention": attention_sm100})
    path = tmp_path / "out.json"
    assert bench_decode.main(["--preset", "tiny", "--device", "cpu", "--context", "700", "--json", str(path)]) == 0
    rows = {r["row"]: r for r in json.loads(path.read_text())["results"]}
    for kind in ("SWA", "HCA", "CSA"):
        assert rows[f"{kind}: attention, attention_sm100"]["bytes"] == rows[f"{kind}: attention"]["bytes"]
    assert len(calls) >= 3 and all(len(args) == 11 for args in calls)


def test_recording_sees_every_call_and_leaves_no_trace():
    from dsv4 import ops
    from dsv4.ops import backend

    with recording() as calls:
        ops.pack_weights((1,))
        ops.new_keys(1, 2, torch.float32, "cpu")
    assert [call.name for call in calls] == ["pack_weights", "new_keys"] and calls[0]() == (1,) and not backend._chosen


@pytest.fixture
def recorded(monkeypatch):
    """(a bench, the operations of a CSA layer) with the kernels' wrappers, whose kernels compute nothing."""
    monkeypatch.setattr(launch, "emulator", lambda kernel, values: 0)
    bench = bench_decode.Bench(PRESETS["tiny"], "nvidia", torch.device("cpu"), 700, 1, "cuda")
    bench.model.numerics = replace(bench.model.numerics, dtype=torch.bfloat16)
    bench.X, step = bench.X.bfloat16(), bench.step()
    with torch.inference_mode(), recording() as calls:
        n = bench.kinds["CSA"][0]
        bench.model.layers[n](bench_decode.Streams(bench.X, bench.pending()), step, bench.cache.layers[n])
    yield bench, calls, storages(bench.X, vars(step), [call.result for call in calls])
    ops.select_backend("torch")


def test_copies_are_of_what_is_read_and_of_nothing_that_the_step_made(recorded, monkeypatch):
    """As many as it takes, within the memory for them; weights and caches are others, activations the same."""
    bench, calls, keep = recorded
    gpu, read = torch.device("cuda"), bench.read("CSA")
    by_name = {call.name: call for call in calls}
    monkeypatch.setattr(replayed, "COLD", 5 * read["wo_a"])
    copies = cold(gpu, [by_name["grouped_linear"]], read["wo_a"], keep, 8)
    assert len(copies) == 5 and len({storage(copy.args[1].data) for copy in copies}) == 5
    assert len({storage(copy.args[0]) for copy in copies}) == 1 and all(torch.equal(c.args[1].data, copies[0].args[1].data) for c in copies)
    assert all(copy() is not None for copy in copies)  # they can be called
    attention = cold(gpu, [by_name["attention"]], -(-replayed.COLD // 3), keep, 8)
    ours, theirs = attention[0].args, attention[2].args
    shared = [storages(a) == storages(b) for a, b in zip(ours, theirs, strict=True) if storages(a)]
    assert len(attention) == 3 and shared == [True, False, True, True, True, False, False, True]  # but sink, window and entries
    assert cold(gpu, [by_name["update_caches"]], 0, keep, 8) == [by_name["update_caches"]]  # which reads nothing to speak of
    assert cold(torch.device("cpu"), [by_name["grouped_linear"]], read["wo_a"], keep, 8) == [by_name["grouped_linear"]]
    monkeypatch.setattr(replayed, "COPIES", copies[0].args[1].data.numel() * 2 + 1000)
    assert len(cold(gpu, [by_name["grouped_linear"]], read["wo_a"], keep, 8)) == 3
    monkeypatch.setattr(replayed, "MOST_CALLS", 2)
    assert len(cold(gpu, [by_name["grouped_linear"]], read["wo_a"], keep, 8)) == 2


def test_of_a_layers_experts_others_are_chosen(recorded, monkeypatch):
    bench, calls, keep = recorded
    moe = next(call for call in calls if call.name == "moe")
    copies = cold(torch.device("cuda"), [moe], replayed.COLD // 4, keep, 8)
    assert len(copies) == 4 and len({storage(copy.args[1].up_routed) for copy in copies}) == 1
    chosen = [set(copy.args[2].flatten().tolist()) for copy in copies[1:]]
    assert chosen == [{2, 3}, {4, 5}, {6, 7}] and all(copy.args[2].dtype == torch.int32 for copy in copies)
    several = replayed.other_experts(torch.zeros(8, 6, dtype=torch.int32), 384, 3)
    assert several.shape == (8, 6) and several.max() < 384 and all(len(set(row)) == 6 for row in several.tolist())


def test_products_are_those_of_a_row():
    """The elements of torch's products are those of the weights that a row reads; of experts, of as many as are read."""
    checkpoint, c = SyntheticCheckpoint(PRESETS["pro"], "bf16", "meta"), PRESETS["pro"]
    for layer in (1, 2):
        read = bench_decode.step_bytes(checkpoint, layer, 4096, 1)
        for row in read:
            shapes = bench_decode.products(checkpoint, layer, row, 1)
            size = sum(2 * a * b * d for a, b, d in shapes)
            assert size == (read[row] if row in ("projections of x", "projections of q", "wo_a", "wo_b", "router", "moe") else 0), row
    assert bench_decode.products(checkpoint, 2, "projections of x", 1) == [(1, 1536 + 512 + 2 * 1024 + 2 * 256 + 64, 7168)]
    assert bench_decode.products(checkpoint, 1, "wo_a", 1) == [(c.o_groups, c.o_lora_rank, 128 * 512 // c.o_groups)]
    assert bench_decode.products(checkpoint, 1, "moe", 8)[0][0] == 1 + round(384 * (1 - (1 - 6 / 384) ** 8))


def test_torchs_products_have_these_shapes(monkeypatch):
    monkeypatch.setattr(replayed, "COLD", 2 * (6 * 10 * 8 + 3 * 10) * 3)
    calls = replayed.bf16_products([(6, 10, 8), (1, 3, 10)], 5, torch.device("cpu"))
    assert len(calls) == 3 and [tuple(y.shape) for y in calls[0]()] == [(6, 5, 10), (5, 3)]


def test_a_kernels_share_of_a_chain_is_from_the_end_before_it_to_its_own():
    """Of overlapping kernels: each call ends its first after 3 and its second 1 later, whenever they began."""
    spans = [(0, 3), (1, 4), (2, 7), (4.5, 8), (5, 11), (8, 12)]
    assert timing.shares_of_kernels(spans, 3) == pytest.approx([3 / 4, 1 / 4])
    assert timing.shares_of_kernels(spans, 6) == [1] and timing.shares_of_kernels(spans, 4) == []
    assert timing.shares_of_kernels(None, 3) == timing.shares_of_kernels([], 3) == []


def test_the_table_marks_what_may_come_from_l2():
    row = {"us": 10.0, "p10": 9.0, "p90": 11.0, "kernels": 2}
    lines = bench_decode.table([{"row": "near", "bytes": 10**6, "apart": 10**7} | row, {"row": "far", "bytes": 10**6, "apart": 10**9} | row,
                                {"row": "none", "bytes": 0, "apart": 0} | row], 4.3)
    assert [line.split()[1] == "*" for line in lines[1:]] == [True, False, False]


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
    (["--context", "4096,8", "--tokens", "8"], "--tokens: expected fewer than --context, 8, found 8"),
    (["--context", "4096,1048577"], "--context: expected at most the model's 1048576 positions, found 1048577"),
    *((["--context", x], f"expected different numbers of tokens such as 4096,1048576, found '{x}'") for x in ("", "0", "7,7", "1,x", "-5")),
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
        monkeypatch.setattr(runtime, "resolve_device", lambda _: torch.device("cuda", 0))
        error = refused(bench_decode, ["--preset", "tiny", "--format", format], monkeypatch, capsys)
        assert "on a GPU" in error and f"found {format}: its weights are fp32, which the kernels' bf16 does not hold" in error
    else:
        bench_decode.check_format(format, torch.device("cuda", 0))


@pytest.mark.parametrize("format", [name for name, form in FORMATS.items() if form.plain == torch.float32])
def test_every_format_runs_on_a_cpu(format, monkeypatch, short):
    monkeypatch.setattr(replayed, "COLD", 1)
    assert bench_decode.main(["--preset", "tiny", "--device", "cpu", "--context", "130", "--format", format, "--no-ops"]) == 0


def test_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert bench_decode.main(["--preset", "tiny"]) == 2
    assert capsys.readouterr().err.startswith("error: --device: cuda:0: torch")
