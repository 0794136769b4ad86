"""helpers/compare_layers.py: kernels that are right agree, one that is not is found at its place, and what it cannot do is said."""

import json

import pytest
import torch

from dsv4 import kernels, runtime
from dsv4.kernels.keys import IndexKeys, Keys
from dsv4.ops import backend
from dsv4.ops.attention import attention_ref
from dsv4.ops.experts import moe_ref
from dsv4.ops.indexer import index_scores_ref, select_entries_ref
from dsv4.ops.update_caches import update_caches_ref
from helpers import compare_layers
from helpers.compare_layers import OPERATION_OF

from .emulator.emulator import emulated, needs_gxx
from .test_bench_decode import refused, refuses_outputs_early

CPU = ["--device", "cpu"]


def stand_ins() -> dict:
    """The definitions on packed caches, with scores that are NaN beyond the entries: what kernels look like from outside."""
    def into(memory, values):
        for part, packed in zip(memory, type(memory).pack(values), strict=True):
            part.copy_(packed)

    def update_caches(qa, kv, q_norm, kv_norm, cos, sin, window, compressed, pools, *rest):
        memories = [window, *(pool.entries for pool in pools)]
        keys, *entries = values = [memory.unpack() for memory in memories]
        unpacked = tuple(pool._replace(entries=v) for pool, v in zip(pools, entries, strict=True))
        result = update_caches_ref(qa, kv, q_norm, kv_norm, cos, sin, keys, compressed, unpacked, *rest)
        for memory, v in zip(memories, values, strict=True):
            into(memory, v)
        return result

    def attention(q, sink, cos, sin, positions, window, window_size, entries, *rest):
        return attention_ref(q, sink, cos, sin, positions, window.unpack(), window_size, entries and entries.unpack(), *rest)

    def index_scores(q, cos, sin, head_weights, keys, *rest):
        scores = index_scores_ref(q, cos, sin, head_weights, keys.unpack(), *rest)
        return torch.nn.functional.pad(scores, (0, len(keys.values) - scores.shape[1]), value=float("nan"))

    return {"update_caches": update_caches, "attention": attention, "index_scores": index_scores,
            "new_keys": lambda rows, width, dtype, device: Keys.empty(rows, device),
            "new_index_keys": lambda rows, width, dtype, device: IndexKeys.empty(rows, device)}


def rows(path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


def test_kernels_that_do_what_the_definitions_do_agree_exactly(monkeypatch, capsys, tmp_path):
    """Every kind of layer, entries that close, choices that exclude; in both runs, so that neither adds anything of its own."""
    monkeypatch.setattr(kernels, "wrappers", stand_ins)
    path = tmp_path / "out.json"
    assert compare_layers.main(["--preset", "tiny", "--prompt", "130", "--decode", "6", "--past", "640", "--json", str(path), *CPU]) == 0
    found = rows(path)
    for row in found:
        for run in ("same_input", "accumulated"):
            assert row[run].get("overlap", 1.0) == 1.0 and row[run].get("relative", 0.0) == 0.0, row
    seen = {(row["layer"], row["stage"]) for row in found}
    assert {"layer 0 SWA hash", "layer 1 HCA hash", "layer 2 CSA hash", "layer 3 HCA learned", "layer 4 CSA learned", "layer 5 SWA learned",
            "head"} == {layer for layer, _ in seen}
    assert {stage for _, stage in seen} == set(compare_layers.ORDER)
    assert ("layer 4 CSA learned", "index scores") in seen and ("layer 1 HCA hash", "compressed") in seen
    lines = capsys.readouterr().out.splitlines()
    without = lines[0].removeprefix("no kernel for ").split(":")[0].split(", ")
    assert {"grouped_linear", "hc_head"} <= set(without) and len({len(line) for line in lines[1:]}) == 1


def noise(t):
    return t + 0.05 * t.float().square().mean().sqrt() * torch.randn(t.shape, dtype=torch.float32)


@pytest.mark.parametrize("name, stage, broken", [
    ("moe", "MoE", lambda *a: noise(moe_ref(*a)).bfloat16()),
    ("moe", "MoE", lambda *a: 1.05 * moe_ref(*a)),  # which has the same direction
    ("moe", "MoE", lambda *a: moe_ref(*a) * float("nan")),
    ("attention", "attention", lambda *a: noise(attention_ref(*a)).bfloat16()),
])
def test_a_wrong_kernel_is_found_at_its_place_alone(monkeypatch, capsys, tmp_path, name, stage, broken):
    monkeypatch.setattr(kernels, "wrappers", lambda: {name: broken})
    path = tmp_path / "out.json"
    argv = ["--preset", "tiny", "--layers", "4:6", "--prompt", "6", "--decode", "1", "--json", str(path), *CPU]
    assert compare_layers.main(argv) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("too far apart")]
    places = [line.split(": ")[1].rsplit(", ", 1)[0] for line in told]
    assert places == [f"layer {layer}, {stage}" for layer in ("4 CSA learned", "5 SWA learned") for _ in ("prefill", "decode")]
    by_stage = {(row["layer"], row["stage"], row["phase"]): row for row in rows(path)}
    after = by_stage["layer 5 SWA learned", "q", "decode"]
    assert after["same_input"]["relative"] == 0 and after["accumulated"]["relative"] != 0


def test_a_wrong_choice_shows_in_its_overlap_and_what_follows_only_accumulated(monkeypatch, tmp_path):
    def worst_instead_of_best(scores, positions, ratio, top_k):
        return select_entries_ref(-scores, positions, ratio, top_k)

    monkeypatch.setattr(kernels, "wrappers", lambda: {"select_entries": worst_instead_of_best})
    path = tmp_path / "out.json"
    argv = ["--preset", "tiny", "--layers", "2:3", "--prompt", "4", "--decode", "1", "--past", "1024", "--json", str(path), *CPU]
    assert compare_layers.main(argv) == 0
    found = {row["stage"]: row for row in rows(path) if row["phase"] == "decode"}
    assert found["top-k"]["same_input"]["overlap"] < 0.1  # 128 of 257 entries
    assert found["attention"]["same_input"]["relative"] == 0 and found["attention"]["accumulated"]["relative"] > 0.1


def test_states_go_on_as_the_definitions_left_them_but_for_the_accumulated_run(monkeypatch, tmp_path):
    """A kernel that spoils the open block: its next entry shows it, made from its own states alone."""
    def forgetful(*a):
        result = update_caches_ref(*a)
        for pool in a[8]:
            pool.kv_state.mul_(0.5)
        return result

    monkeypatch.setattr(kernels, "wrappers", lambda: {"update_caches": forgetful})
    path = tmp_path / "out.json"
    argv = ["--preset", "tiny", "--layers", "2:3", "--prompt", "3", "--decode", "1", "--json", str(path), *CPU]
    assert compare_layers.main(argv) == 0
    found = {row["stage"]: row for row in rows(path) if row["phase"] == "decode"}
    for stage in ("compressed", "index keys"):
        assert found[stage]["same_input"]["relative"] == 0 and found[stage]["accumulated"]["relative"] > 0


@needs_gxx
def test_the_kernels_agree_on_the_emulator(tmp_path):
    """All there are, in a CSA layer whose entries are more than it may choose, and in an HCA layer."""
    path = tmp_path / "out.json"
    argv = ["--preset", "tiny", "--layers", "2:4", "--prompt", "9", "--decode", "2", "--past", "640", "--json", str(path)]
    with emulated():
        assert compare_layers.main([*argv, *CPU]) == 0
    for row in rows(path):
        if row["stage"] in compare_layers.CHOICES:
            assert row["same_input"]["overlap"] > 0.95, row


def test_what_cannot_be_compared(capsys):
    for argv, code, words in ((["--layers", "5:9"], 2, "--layers: expected at most 0:6"), (["--model", "/nonexistent"], 3, "/nonexistent"),
                              (["--past", "100"], 2, "--past: expected a multiple of 128"), (["--prompt-ids", "5000"], 2, "token id 5000"),
                              (["--prompt", "1", "--decode", "0"], 2, "expected tensors on a GPU")):
        assert compare_layers.main([*argv, *CPU]) == code
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and words in error
    assert not torch.is_inference_mode_enabled()


def test_outputs_that_cannot_be_written_are_refused_before_the_run(tmp_path, monkeypatch, capsys):
    refuses_outputs_early(compare_layers, ["--preset", "tiny", *CPU], tmp_path, monkeypatch, capsys)


def test_limits_and_formats_that_are_refused(monkeypatch, capsys):
    for limit in ("0", "-0.5", "1.0001", "nan", "inf", "tight"):
        error = refused(compare_layers, ["--preset", "tiny", "--limit", limit, *CPU], monkeypatch, capsys)
        assert f"--limit: expected a finite number above 0 and up to 1, found '{limit}'" in error
    assert compare_layers.parse(["--limit", "1"]).limit == 1
    monkeypatch.setattr(runtime, "resolve_device", lambda *_: torch.device("cuda", 0))
    error = refused(compare_layers, ["--preset", "tiny", "--format", "f32"], monkeypatch, capsys)
    assert "found f32: its weights are fp32, which the kernels' bf16 does not hold" in error


def test_the_first_gpu_is_the_one_that_nobody_names(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert runtime.resolve_device(compare_layers.parse([]).device) == torch.device("cuda", 0)


def test_the_plot(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'dsv4[plot]'")
    monkeypatch.setattr(kernels, "wrappers", stand_ins)
    path = tmp_path / "out.png"
    assert compare_layers.main(["--preset", "tiny", "--layers", "1:4", "--prompt", "4", "--decode", "1", "--plot", str(path), *CPU]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_every_stage_is_of_an_operation():
    assert OPERATION_OF.keys() == set(compare_layers.ORDER) and set(OPERATION_OF.values()) <= backend._definitions.keys()
