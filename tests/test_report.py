"""--plan: the table, the object, the exit code, and one line for every argument that is wrong. Reads headers, never weights."""

import json
import shutil
from collections import namedtuple

import pytest
import torch

import single_shot_inference as script
from dsv4 import runtime
from dsv4.config import PRESETS
from dsv4.errors import UserError
from dsv4.machines import CONTEXT, GIB, reserved
from dsv4.plan import DevicePlan, Plan
from dsv4.report import planned_bytes, run_line
from tests.checkpoints import published_layout, save_sparse
from tests.test_announced import announce
from tests.test_cli import one_line, run  # noqa: F401

QUESTION = "What is the capital of France?"
DISK = namedtuple("usage", "total used free")


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    """Flash NVFP4 before the download: config.json and the index."""
    config = PRESETS["flash"]
    return announce(tmp_path_factory.mktemp("flash"), config, published_layout(config, nvfp4=True))


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count, GiB free, GiB free on the host, disk's GB free): makes this machine one with such Hopper GPUs, and nvcc."""

    def pretend(count, free=150, host=1000, disk=10_000):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(runtime.build, "find_nvcc", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(runtime, "free_bytes", lambda device: (host if device.type == "cpu" else free) * GIB)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, disk * 10**9))

    return pretend


def plan_of(run, *argv):  # noqa: F811
    code, out, err = run("--plan", "--json", *argv)
    assert err == ""
    return code, json.loads(out)


# ------------------------------------------------------------------------------------------------------------- reports


def test_the_table(run, flash):  # noqa: F811
    code, out, err = run("--plan", "--assume", "2xH200", "--context", 131072, "--model", flash)
    lines = out.splitlines()
    assert (code, err) == (0, "") and max(map(len, lines)) < 140
    assert lines[0] == f"model      {flash} (flash), by its index: the shards' headers are not all here; all of 43 layers"
    assert lines[1] == ("run        131072 tokens of context, prompts in chunks of 1024, bfloat16, backend cuda, weights packed for "
                        "the kernels")
    assert lines[2] == "machine    2 x H200, assumed, 2 used: 139.72 GiB each as torch reports it, less 0.62 for the CUDA context"
    assert lines[4].split() == ["device", "layers", "weights", "caches", "scratch", "graphs", "loading", "needed", "reserve", "free", "GiB"]
    first, second, both = (line.split() for line in lines[5:8])
    assert first[:3] == ["cuda:0", "embed,", "0-21"] and second[:3] == ["cuda:1", "22-42,", "head"] and both[0] == "all"
    for i in range(1, 9):
        assert float(both[i]) == pytest.approx(float(first[i + 2]) + float(second[i + 2]), abs=0.011)
    assert first[-1] == "139.09"
    weights, caches, scratch, graphs, loading, needed = map(float, first[3:9])
    assert weights + max(loading, caches + scratch + graphs) == pytest.approx(needed, abs=0.02)
    assert lines[9] == "host       2.31 GiB needed, free: not known"
    assert lines[10].startswith("disk       168.27 GB, 0 B of it there, ") and lines[10].endswith(" free")
    assert lines[12] == "fits       up to 1048576 tokens of context on all 2 devices; the fewest such GPUs that do: 2"


def test_the_table_of_what_does_not_fit(run, flash):  # noqa: F811
    code, out, err = run("--plan", "--assume", "1xH200", "--model", flash)
    row, verdict = (next(line for line in out.splitlines() if line.startswith(start)) for start in ("cuda:0", "does not fit"))
    assert (code, err) == (4, "") and row.endswith(" missing")
    assert verdict == "does not fit: cuda:0; it fits with 2 such GPUs, or with --layers 0:37, or with --stream-weights disk"
    _, out, err = run("--plan", "--assume", "5x20", "--model", flash)
    assert err == ("note: the torch definitions run, and not the kernels: --assume: expected a GPU by its name, found GPU of 20 GiB, which "
                   "tells no architecture\n")
    assert out.splitlines()[1].endswith("chunks of 512, bfloat16, backend torch, weights as stored")
    assert out.splitlines()[-1].startswith("does not fit: 5 of 5 devices; it fits with 11 such GPUs, or with --layers 0:20")


def test_the_table_of_this_machine(run):  # noqa: F811
    code, out, err = run("--plan")
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[2] == "machine    this one, 1 device used" and lines[4].endswith("  MiB")
    assert lines[1].endswith("float32, backend torch, weights dequantised to fp32") and lines[5].startswith("cpu      embed, 0-5, head")
    assert not any(line.startswith(("host", "all")) for line in lines) and any("all of it there" in line for line in lines)


def test_the_line_after_a_run():
    timing = {"load_s": 11.5, "prefill_s": 1.0, "prefill_tokens": 16, "prefill_tokens_per_s": 900.0, "decode_tokens": 49,
              "decode_tokens_per_s": 80.0, "decode_ms_per_token": 12.5, "decode_ms_median": 7.125, "hop_us": 8.66}
    memory, planned = {"host": 3 << 30, "cuda:0": 79 << 30, "cuda:1": 76 << 30}, {"host": 2 << 30, "cuda:0": 80 << 30, "cuda:1": 77 << 30}
    assert run_line(timing, memory, planned, "length", hop="peer stores") == (
        "load 11.50 s | prefill 16 tokens, 900.0 tokens/s | decode 49 tokens, 80.0 tokens/s, 12.5 ms/token, median 7.12 | "
        "hop 8.7 us by peer stores | peak memory host 3,072 MiB (planned 2,048), "
        "cuda:0 80,896 MiB (planned 81,920), cuda:1 77,824 MiB (planned 78,848)")
    less = {name: timing[name] for name in ("load_s", "prefill_s", "prefill_tokens", "prefill_tokens_per_s")}
    assert run_line(less | {"decode_tokens": 0}, {"host": 0}, {"host": 0}, "interrupt") == (
        "interrupt | load 11.50 s | prefill 16 tokens, 900.0 tokens/s | peak memory host 0 MiB (planned 0)")


def test_what_is_planned_has_the_names_of_what_is_measured():
    cpu, gpus = torch.device("cpu"), [torch.device("cuda", i) for i in range(2)]
    shares = tuple(DevicePlan(d, (i,), 100 + i, 10, 1, 10**9, loading=3) for i, d in enumerate(gpus))
    assert planned_bytes(Plan((0, 1), shares, 8, 8, False, host=77), resident=5) == {"host": 77, "cuda:0": 111, "cuda:1": 112}
    share = DevicePlan(cpu, (0,), 100, 10, 1, 10**9)
    assert planned_bytes(Plan((0,), (share,), 8, 8, False, host=111), resident=5) == {"host": 116}


SCHEMA = {
    "model": str, "family": str, "sizes_from": str, "assumed": {"name": str, "count": int, "total": int, "context": int}, "backend": str,
    "dtype": str, "layers": [int], "context": int, "chunk": int, "dequantised": bool, "stream": (str, type(None)),
    "fits": bool,
    "devices": [{"device": str, "layers": [int], "embedding": bool, "head": bool, "weights": int, "caches": int, "scratch": int,
                 "graphs": int, "loading": int, "slots": int, "needed": int, "reserved": int, "free": int, "missing": int, "streamed": int,
                 "streamed_layers": ([int], type(None))}],
    "host": {"needed": int, "free": (int, type(None)), "missing": int}, "disk": {"total": int, "present": int, "free": int, "missing": int},
    "would_fit": {"context": (int, type(None)), "devices": (int, type(None)), "layers": ([int], type(None)), "stream": (str, type(None)),
                  "prefill_chunk": (int, type(None))},
}


def check(value, schema, path="plan"):
    if isinstance(schema, dict):
        assert list(value) == list(schema), path
        for key in schema:
            check(value[key], schema[key], f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, path
        for item in value:
            check(item, schema[0], path)
    elif isinstance(schema, tuple):
        if value is not None:
            check(value, schema[0], path)
    else:
        assert type(value) is schema, (path, value)


@pytest.mark.parametrize("asked, chunk, note", [
    (1024, 1024, ""), (1025, 1024, "note: --prefill-chunk: expected at most 1024 on the kernels, found 1025: 1024 are taken\n"),
])
def test_a_chunk_that_the_kernels_do_not_take(run, flash, asked, chunk, note):  # noqa: F811
    code, out, err = run("--plan", "--json", "--assume", "2xH200", "--backend", "cuda", "--model", flash, "--prefill-chunk", asked)
    assert (code, json.loads(out)["chunk"], err) == (0, chunk, note)


def test_the_object(run, flash):  # noqa: F811
    code, out, err = run("--plan", "--json", "--assume", "2x96", "--backend", "cuda", "--model", flash)
    plan = json.loads(out)
    assert err == ("note: a prompt is read 8 tokens at a time: expected a GPU with wgmma (compute capability 9.0) for more, found GPU of "
                   "96 GiB\n")
    check(plan, SCHEMA)
    assert code == 0 and plan["fits"] and plan["backend"] == "cuda" and plan["chunk"] == 8 and plan["sizes_from"] == "index"
    assert plan["assumed"] == {"name": "GPU of 96 GiB", "count": 2, "total": 96 * GIB, "context": CONTEXT}
    assert [d["layers"] for d in plan["devices"]] == [[0, 22], [22, 43]] and plan["layers"] == [0, 43]
    assert [(d["embedding"], d["head"]) for d in plan["devices"]] == [(True, False), (False, True)]
    for d in plan["devices"]:
        assert d["needed"] == d["weights"] + max(d["loading"], d["caches"] + d["scratch"] + d["graphs"])
        assert d["free"] == 96 * GIB - CONTEXT and d["reserved"] == reserved(d["weights"]) and d["missing"] == 0 < d["graphs"]
    assert plan["would_fit"] == {"context": 1 << 20, "devices": 2, "layers": [0, 43], "stream": None, "prefill_chunk": None}
    code, plan = plan_of(run, "--assume", "1x8", "--backend", "torch", "--model", flash)
    check(plan, SCHEMA)
    assert code == 4 and not plan["fits"] and plan["devices"][0]["missing"] > 100 * GIB and plan["host"]["free"] is None
    needed = plan["devices"][0]["needed"] + plan["devices"][0]["reserved"]
    assert plan["devices"][0]["missing"] == needed - plan["devices"][0]["free"]


def test_a_folder_with_shards_says_headers_and_no_weight_is_read(run, tmp_path, monkeypatch):  # noqa: F811
    """Real headers over holes; reading a tensor would fail the test."""
    from dsv4 import checkpoint

    config = PRESETS["tiny"]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    save_sparse(tmp_path, published_layout(config), 2)
    monkeypatch.setattr(checkpoint, "read_entry", lambda *_: pytest.fail("read a weight"))
    code, plan = plan_of(run, "--model", tmp_path, "--assume", "1xH100")
    assert code == 0 and plan["sizes_from"] == "headers" and plan["disk"]["total"] == plan["disk"]["present"]


def test_what_is_planned_is_what_runs(run, monkeypatch):  # noqa: F811
    from dsv4 import model

    seen, original = [], model.Model.__init__
    monkeypatch.setattr(model.Model, "__init__", lambda self, c, plan, *rest: (seen.append(plan), original(self, c, plan, *rest))[1])
    assert run("--layers-per-device", 6, "--temperature", 0, "--context", 300, "--prefill-chunk", 5, QUESTION)[0] == 0
    _, told = plan_of(run, "--context", 300, "--prefill-chunk", 5)
    (plan,), (device,) = seen, seen[0].devices
    assert (plan.context, plan.chunk, plan.keep_dequantised, plan.host) == (300, 5, True, device.needed)
    assert told["devices"][0] | {"free": 0} == told["devices"][0] | {
        "free": 0, "weights": device.weights, "caches": device.cache, "scratch": device.scratch, "needed": device.needed}


# -------------------------------------------------------------------------------------------------- devices and layers


def test_named_devices_are_used_and_auto_takes_the_fewest(run, flash, gpus):  # noqa: F811
    gpus(4, free=150)
    for more in ([], ["--assume", "4xH200"]):
        code, plan = plan_of(run, "--model", flash, "--devices", "cuda:0,cuda:2", *more)
        assert code == 0 and [d["device"] for d in plan["devices"]] == ["cuda:0", "cuda:2"]
        assert [d["device"] for d in plan_of(run, "--model", flash, *more)[1]["devices"]] == ["cuda:0", "cuda:1"]
        code, plan = plan_of(run, "--model", flash, "--devices", "cuda:3,cuda:0,cuda:1", *more)
        assert [(d["device"], d["layers"]) for d in plan["devices"]] == [("cuda:3", [0, 14]), ("cuda:0", [14, 29]), ("cuda:1", [29, 43])]


def test_layers_per_device(run, flash, gpus):  # noqa: F811
    gpus(2, free=150)
    code, plan = plan_of(run, "--model", flash, "--layers-per-device", "20,23")
    assert code == 0 and [d["layers"] for d in plan["devices"]] == [[0, 20], [20, 43]]
    code, plan = plan_of(run, "--model", flash, "--layers-per-device", "1,42")
    assert code == 4 and [d["layers"] for d in plan["devices"]] == [[0, 1], [1, 43]]
    code, plan = plan_of(run, "--model", flash, "--layers", "5:8", "--layers-per-device", "1,2", "--devices", "cuda:1,cuda:0")
    assert [(d["device"], d["layers"]) for d in plan["devices"]] == [("cuda:1", [5, 6]), ("cuda:0", [6, 8])]


def test_the_host_and_the_disk_of_this_machine_count(run, flash, gpus):  # noqa: F811
    gpus(2, free=150, host=2)
    code, out, _ = run("--plan", "--model", flash)
    assert code == 4 and out.splitlines()[-1] == "does not fit: host" and "host       2.31 GiB needed, free: 2.00 GiB" in out
    gpus(2, free=150, disk=100)
    code, out, _ = run("--plan", "--model", flash)
    assert code == 4 and out.splitlines()[-1] == "does not fit: disk" and "100.00 GB free: 68.27 GB missing" in out
    assert run("--plan", "--model", flash, "--assume", "2xH200")[0] == 0  # of another machine they are stated and not judged
    gpus(2, free=150)
    assert run("--plan", "--model", flash)[0] == 0


def test_a_run_that_does_not_fit_says_what_would(run, gpus, tmp_path):  # noqa: F811
    gpus(1, free=1)
    code, out, err = run("--devices", "cuda:0", "--backend", "torch", "--context", 1000000, "--prefill-chunk", 64, "--prompt-ids",
                         ",".join(["5"] * 64))
    line = one_line(err)
    assert code == 4 and line.startswith("error: cuda:0: needs ") and "it fits with --context " in line
    assert line.endswith("--plan shows all of it")


def test_a_gpu_runs_the_kernels_unless_something_else_is_asked_for(run, gpus, monkeypatch):  # noqa: F811
    """The kernels are built before anything is loaded; why they are not taken is told in one line."""
    def stop(what):
        raise UserError(f"stopped at {what}")

    gpus(1)
    monkeypatch.setattr(runtime, "build_kernels", lambda devices: stop(f"the kernels for {devices[0]}"))
    monkeypatch.setattr(runtime, "prepare_torch", lambda _: stop("the definitions"))
    assert run(QUESTION)[2] == "error: stopped at the kernels for cuda:0\n"
    assert run("--dtype", "bfloat16", "--activations", "bf16", QUESTION)[2] == "error: stopped at the kernels for cuda:0\n"
    for argv, why in ((["--dtype", "float32"], "--dtype: expected bfloat16 with --backend cuda, found float32"),
                      (["--activations", "nvfp4"], "--activations: expected bf16 with --backend cuda, which decodes on exact activations, "
                                                   "found nvfp4")):
        assert run(*argv, QUESTION)[2] == (f"note: the torch definitions run, and not the kernels: {why}\n"
                                           "error: stopped at the definitions\n")
    assert run("--backend", "torch", QUESTION)[2] == run("--devices", "cpu", QUESTION)[2] == "error: stopped at the definitions\n"


# --------------------------------------------------------------------------------------------------- bad arguments: 2, 3


@pytest.mark.parametrize("argv, words", [
    (["--plan", "a"], "--plan does not go with PROMPT"),
    (["--plan", "--prompt-ids", "1"], "--plan does not go with --prompt-ids"),
    (["--plan", "--inspect"], "--inspect does not go with --plan"),
    (["--plan", "--print-prompt"], "--plan does not go with --print-prompt"),
    (["--plan", "--dump-logits", "x"], "--dump-logits does not go with --plan: no tokens are run"),
    (["--plan", "--decode-consistency", "3"], "--decode-consistency does not go with --plan: no tokens are run"),
    (["--assume", "8xB200", "a"], "--assume does not go without --plan"),
    (["--plan", "--assume", "8xA100"], "expected a number of GPUs and their name or GiB, such as 8xB200 or 2x96 (names: H100, H200, B200, "
                                       "B300, RTX PRO 6000), found '8xA100'"),
    (["--plan", "--assume", "0xB200"], "found '0xB200'"),
    (["--plan", "--assume", "8x" + "9" * 5000], "expected a number of GPUs"),
    (["--plan", "--assume", "2xB200", "--devices", "cuda:2"], "--devices: cuda:2: --assume has 2 GPUs"),
    (["--plan", "--assume", "2xB200", "--devices", "cpu"], "--devices: expected GPUs with --assume, found cpu"),
    (["--plan", "--assume", "2xB200", "--devices", "cuda:1,cuda:1"], "--devices: expected different GPUs"),
    (["--plan", "--assume", "2xRTX PRO 6000", "--backend", "cuda"], "capability 9.0, 10.0 or 10.3, found RTX PRO 6000 with 12.0"),
    (["--plan", "--assume", "2xB200", "--backend", "cuda", "--dtype", "float32"], "--dtype: expected bfloat16 with --backend cuda"),
    (["--plan", "--layers-per-device", "20,23"], "--layers-per-device: expected counts that add up to 6 layers, found 43"),
    (["--plan", "--layers-per-device", "3,3"], "--layers-per-device: expected a count for each of 1 devices, found 2"),
    (["--plan", "--assume", "3xB200", "--devices", "cuda:0,cuda:1", "--layers-per-device", "6"], "for each of 2 devices, found 1"),
    (["--plan", "--layers-per-device", "6,0"], "expected at least one layer for each device, found '6,0'"),
    (["--plan", "--layers-per-device", "a"], "expected layers for each device such as 20,23, found 'a'"),
    (["--layers-per-device", "5", "a"], "--layers-per-device: expected counts that add up to 6 layers, found 5"),
    (["--plan", "--context", "1048577"], "--context: expected at most the model's 1048576 positions, found 1048577: ask for less"),
    (["--plan", "--layers", "0:7"], "--layers: expected at most 0:6, found 0:7"),
])
def test_bad_arguments(run, argv, words):  # noqa: F811
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and words in one_line(err)


def test_bad_folders(run, flash, tmp_path):  # noqa: F811
    code, out, err = run("--plan", "--model", tmp_path)
    assert (code, out) == (3, "") and "expected config.json" in one_line(err)
    shutil.copy(flash / "config.json", tmp_path)
    code, out, err = run("--plan", "--model", tmp_path)
    assert (code, out) == (3, "") and "model.safetensors.index.json, found neither: fetch the index" in one_line(err)
    code, out, err = run("--model", flash, "--prompt-ids", "1")  # a run needs the shards
    assert (code, out) == (3, "") and "missing: the index names this shard" in one_line(err)


def test_answers_at_once_without_torch():
    """A wrong machine is told before anything heavy is imported."""
    import subprocess
    import sys

    code = ("import sys, single_shot_inference as s\ntry: s.main(['--plan', '--assume', 'x'])\nexcept SystemExit: pass\n"
            "print([m for m in ('torch', 'numpy') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=script.BUNDLED.parent.parent, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n" and done.stderr.startswith("error: argument --assume: expected a number of GPUs")
