"""helpers/first_light.py: what fails, dies or hangs is a verdict and stops nothing; the report; the real checks on a CPU, where definitions
stand in the kernels' place, and with wrong kernels planted. Times need a GPU."""

import functools
import inspect
import json
import os
import re
import time
from types import SimpleNamespace

import pytest
import torch

from dsv4 import kernels
from dsv4.errors import UserError
from dsv4.kernels import build
from dsv4.kernels.cute import build as cute_build
from dsv4.kernels.cute.tiles import TILES
from dsv4.ops.attention import attention_ref
from dsv4.ops.experts import moe_ref
from dsv4.ops.mhc import mhc_pre_ref
from dsv4.ops.nvfp4 import rms_norm_to_nvfp4_ref, swiglu_to_nvfp4_ref, to_nvfp4_ref
from dsv4.ops.router import router_ref
from dsv4.ops.sample import sample_ref
from helpers import bench_gemm, children, first_light, light_checks, timing
from helpers.first_light import Check, Report
from helpers.light_checks import row

from .emulator.emulator import emulated, needs_gxx
from .planted_checks import dies, good, hangs, names_its_kernel, raises, settings, wrong
from .test_bench_gemm import values_of

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


KERNELS = ["good", "wrong", "first of raises", "second of raises", "culprit", "bystander", "before death", "dies", "never", "hopper",
           "none"]


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """main() with these checks instead, of these kernels -> (exit code, report, Markdown, lines on stdout)."""
    def run(checks, *argv, kernels=KERNELS):
        monkeypatch.setattr(first_light, "plan", lambda *_: checks)
        monkeypatch.setattr(first_light, "all_kernels", lambda: kernels)
        code = first_light.main(["--device", "cpu", "--out", str(tmp_path / "out"), *argv])
        return code, json.loads((tmp_path / "out" / "first_light.json").read_text()), (tmp_path / "out" / "first_light.md").read_text()
    return run


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def tables(text: str) -> list[list[list[str]]]:
    """The Markdown's tables as cells; each has its rule and as many cells in every row."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        assert set(rows[1]) == {"---"} and len({len(cells) for cells in rows}) == 1 and len(rows) > 2, block
        found.append(rows)
    return found


def test_what_fails_is_a_verdict_and_stops_nothing(planted, tmp_path, capsys):
    note = tmp_path / "pid"
    code, report, text = planted([
        Check("good", good, kernels=("good",)), Check("wrong", wrong, kernels=("wrong",)),
        Check("raises", raises, kernels=("first of raises", "second of raises")),
        Check("named", names_its_kernel, kernels=("culprit", "bystander")),
        Check("dies", dies, {"how": "exit"}, kernels=("before death", "dies")), Check("killed", dies, {"how": "signal"}),
        Check("hangs", hangs, {"note": str(note)}, 2.0, ("never",)),
        Check("hopper", good, architectures=("sm_90a",), kernels=("hopper",)), Check("good again", good)])
    assert code == 1 and report["verdict"] == "fail" and report["complete"]
    checks = {check["name"]: check for check in report["checks"]}
    assert {name: check["verdict"] for name, check in checks.items()} == {
        "good": "pass", "wrong": "fail", "raises": "fail", "named": "fail", "dies": "fail", "killed": "fail", "hangs": "fail",
        "hopper": "skipped", "good again": "pass"}
    assert checks["raises"]["why"].startswith("ValueError: no such thing\nbefore the end\n") and "in two lines" in checks["raises"]["why"]
    assert checks["dies"]["why"] == "died: the process ended with exit code 7\nthese are\nthe last words"
    assert checks["killed"]["why"].startswith("died: the process was ended by SIGSEGV\nthese are\nthe last words\nFatal Python error")
    assert checks["hangs"]["why"] == "hung: not done within 2 s, killed\nwaiting" and 2 <= checks["hangs"]["seconds"] < 30
    assert not alive(int(note.read_text()))
    kernels = {name: kernel["verdict"] for name, kernel in report["kernels"].items()}
    assert kernels == {"good": "pass", "wrong": "fail", "first of raises": "pass", "second of raises": "fail", "culprit": "fail",
                       "bystander": "skipped", "before death": "pass", "dies": "fail", "never": "fail", "hopper": "skipped",
                       "none": "skipped"}
    why = {name: kernel["why"] for name, kernel in report["kernels"].items()}
    assert why["wrong"] == "a | b\nc: cosine 0.5" and why["hopper"] == "needs sm_90" and why["none"] == "no check of it was run"
    assert "illegal access" in why["culprit"] and "culprit" in why["bystander"]
    out = capsys.readouterr().out
    assert re.search(r"^fail    hangs +\d+\.\d s  hung: not done within 2 s, killed$", out, re.MULTILINE)
    by_title = dict(re.findall(r"^## (.*)\n\n(?:[^|].*\n\n)*((?:\|.*\n)+)", text, re.MULTILINE))
    assert {"Kernels", "Against the definitions", "Checks"} <= by_title.keys() and len(tables(text)) == len(by_title)
    assert ["`wrong`", "fail", r"a \| b c: cosine 0.5", "0.5", r"a \| b c", ""] in tables(text)[0]
    assert "### dies: its last lines\n\n```\ndied: the process ended with exit code 7\nthese are\nthe last words\n```\n" in text
    assert "**FAIL**: of 11 kernels 3 pass, 0 slow, 5 fail, 3 skipped; 6 of 9 checks failed." in text
    assert text.splitlines()[0] == "# First light: cpu" and "Not complete" not in text


def test_the_report_has_what_a_program_needs(planted):
    code, report, _ = planted([Check("good", good, kernels=("good",))])
    assert code == 0 and report["verdict"] == "pass"
    assert report.keys() == {"facts", "complete", "verdict", "kernels", "roofs", "checks", "rows"}
    assert report["facts"].keys() == {"device", "torch", "python", "commit", "date", "seconds", "command"}
    assert report["facts"]["command"] == "python helpers/first_light.py --device cpu"
    (check,) = report["checks"]
    assert check.keys() == {"name", "verdict", "why", "seconds", "kernels", "rows"} and check["rows"] == 2
    for found in report["rows"]:
        assert found.keys() >= {"shows", "what", "kernel", "verdict", "why", "check"} and found["check"] == "good"
    assert [found["relative"] for found in report["rows"]] == [1e-3, None]  # JSON has no NaN


def test_checks_share_a_process_until_one_ends_it_and_are_told_to_wait_for_kernels(planted):
    environment = os.environ.get("DSV4_SYNC")
    _, report, _ = planted([Check("a", settings), Check("b", raises), Check("c", settings), Check("d", settings, sync=True),
                            Check("e", dies, {"how": "exit"}, sync=True), Check("f", settings, sync=True)])
    found = {r["check"]: r for r in report["rows"] if r["what"] == "environment"}
    assert found["a"]["process"] == found["c"]["process"] and len({r["process"] for r in found.values()}) == 3
    assert {name: r["sync"] for name, r in found.items()} == {"a": "unset", "c": "unset", "d": "1", "f": "1"}
    assert os.environ.get("DSV4_SYNC") == environment


def test_quick_ends_in_time_and_says_what_it_left_out(planted, monkeypatch, tmp_path):
    """A task that is under way at the deadline is neither wrong nor hung."""
    monkeypatch.setattr(first_light, "QUICK_S", 8)
    start = time.monotonic()
    code, report, _ = planted([Check("good", good, kernels=("good",)),
                               Check("hangs", hangs, {"note": str(tmp_path / "pid")}, 60, ("never",)),
                               Check("late", good, {"kernel": "hopper"}, kernels=("hopper",))], "--quick")
    assert time.monotonic() - start < 30 and code == 0
    assert [check["verdict"] for check in report["checks"]] == ["pass", "skipped", "skipped"]
    assert report["kernels"]["never"] == {"verdict": "skipped", "why": "cut off: no time was left for it"}
    assert report["kernels"]["hopper"] == {"verdict": "skipped", "why": "no time was left for it"}


def test_a_child_that_does_not_start_is_reported(planted, monkeypatch):
    """Here: its work is called with what it does not take."""
    monkeypatch.setattr(children, "_work", os._exit)
    _, report, _ = planted([Check("a", good), Check("b", good)])
    assert [check["why"].splitlines()[0] for check in report["checks"]] == ["died: the process ended with exit code 1"] * 2


def test_interrupted(planted, monkeypatch, capsys, tmp_path):
    def stopped(tasks, *_):
        yield children.Outcome(next(iter(tasks)), [row("right", "a product", "good")], 0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(children, "run", stopped)
    code, report, text = planted([Check("good", good, kernels=("good",)), Check("next", good)])
    assert code == 130 and not report["complete"] and report["kernels"]["good"]["verdict"] == "pass" and "**Not complete" in text
    assert capsys.readouterr().err == "interrupted\n"


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out"
    report = Report({"device": "cpu", "command": "", "date": "", "seconds": 0.0, "torch": "", "python": "", "commit": ""})
    report.write(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == {"first_light.json", "first_light.md"}
    whole = os.replace

    def full(source, target):
        assert target.read_bytes() == before[target.name] and os.path.getsize(source) > 0  # the old one is there until the new one is whole
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    report.rows.append(row("right", "x", "moe") | {"check": "c"})
    with pytest.raises(UserError, match="--out: .* cannot be written: No space left on device"):
        report.write(folder)
    monkeypatch.setattr(os, "replace", whole)
    assert {name: (folder / name).read_bytes() for name in before} == before
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert first_light.main(["--device", "cpu", "--out", str(blocked / "x")]) == 2
    assert re.fullmatch(r"error: --out: .* cannot be written: Not a directory: give a folder that can\n", capsys.readouterr().err)


# ------------------------------------------------------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_kernel_is_looked_at(arch):
    """By a check that shows it right, quick or not; and quick has fewer of everything."""
    plans = {quick: first_light.plan(GPU, arch, quick) for quick in (True, False)}
    for checks in plans.values():
        seen = {kernel for check in checks if not check.name.startswith("build") for kernel in check.kernels}
        assert seen == set(first_light.all_kernels())
        assert len({check.name for check in checks}) == len(checks)
        for check in checks:
            inspect.signature(check.function).bind(**check.arguments)  # or it raises
        here = {kernel for check in checks if arch in (check.architectures or (arch,)) and not check.name.startswith("build")
                for kernel in check.kernels}
        elsewhere = {"gemm_nvfp4", "nvfp4_linear"} if arch == "sm_90a" else {"gemm_bf16", "gemm_e4m3"}
        assert seen - here <= elsewhere
    quick, full = ({check.name: check for check in plans[quick]} for quick in (True, False))
    assert quick.keys() < full.keys()
    for name, check in quick.items():
        for key, value in check.arguments.items():
            most = full[name].arguments[key]
            assert value == most or most is None or set(value) <= set(most), (name, key)
    assert sum(check.arguments != full[name].arguments for name, check in quick.items()) >= 8


def test_layers_are_of_every_kind():
    assert first_light.layers_of("flash") == [0, 2, 3, 4] and first_light.layers_of("pro") == [0, 2, 3, 4]
    assert first_light.layers_of("tiny") == [0, 1, 2, 3, 4, 5]
    assert first_light.needs(Check("x", good, architectures=("sm_100a", "sm_103a"))) == "needs sm_100"


def test_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert first_light.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --device: cuda:0: torch ") and error.count("\n") == 1


@pytest.mark.parametrize("only, found", [("layers of", "layers of"), ("roofs,layers of", "layers of"), ("roofs,", ""), ("", ""),
                                         ("sample, tiny,layer, pro", "layer, pro")])
def test_a_check_that_is_not_there(only, found, capsys):
    assert first_light.main(["--device", "cpu", "--only", only]) == 2
    error = capsys.readouterr().err
    assert error == ("error: --only: expected the beginning of a check's name (roofs, tiles, sample, layer, head, quantisers, products, "
                     f"decode), found '{found}'\n")


def test_the_real_checks_on_a_cpu(tmp_path, monkeypatch):
    """All that --quick has for a CPU, in child processes: the definitions pass for every kernel."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert first_light.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "first_light.json").read_text())
    only_by_file = {kernel for of in light_checks.test_files().values() for kernel in of}  # which run on a GPU; some have a check too
    verdicts = {kernel: of["verdict"] for kernel, of in report["kernels"].items()}
    assert set(verdicts.values()) <= {"pass", "skipped"} and {k for k, v in verdicts.items() if v == "skipped"} <= only_by_file, verdicts
    assert sum(v == "pass" for v in verdicts.values()) >= 18  # the operations of a layer, the head, and the quantisers
    assert {check["verdict"] for check in report["checks"]} == {"pass"} and report["complete"]
    assert {r["shows"] for r in report["rows"]} == {"roof", "right", "layer", "fast"} and report["roofs"].keys() >= {"read", "bf16"}
    voices = next(r for r in report["rows"] if r.get("kind") == "nvfp4" and "definition_error" in r)
    assert voices["error"] == voices["raw_error"] == voices["definition_error"] and voices["torch_refuses"]
    text = (tmp_path / "first_light.md").read_text()
    assert len(tables(text)) >= 6 and "times mean nothing" in text and "slow" not in {r["verdict"] for r in report["rows"]}


# -------------------------------------------------------------------------------------------------------------- the checks themselves


@needs_gxx
@pytest.mark.parametrize("check, arguments", [
    (light_checks.quantisers, {"tokens": (3,)}), (light_checks.sample, {"draws": 1}),
    (light_checks.products, {"kind": "nvfp4", "tokens": (3,), "names": ("wkv",)}),
])
def test_the_kernels_pass_on_the_emulator(products_on_cpu, monkeypatch, check, arguments):
    """The checks call the wrappers as they are to be called (those of layers: test_compare_layers.py)."""
    monkeypatch.setattr(light_checks, "implementations", lambda _: kernels.wrappers())
    monkeypatch.setattr(bench_gemm.Product, "raw", lambda self, i: lambda: kernels.nvfp4.nvfp4_linear(self.x, self.weights[0]))
    with emulated():
        rows = list(check(CPU, "tiny", **arguments))
    assert {r["verdict"] for r in rows} == {"pass"}, [r for r in rows if r["verdict"] != "pass"]


def test_decoding_at_several_contexts(products_on_cpu):
    """What a longer context changes is measured again, and nothing else."""
    rows = list(light_checks.decode(CPU, "tiny", "CSA", (130, 700)))
    later = {r["row"] for r in rows if r["context"] == 700}
    assert {name for name in later if ": " in name} == {"CSA: attention", "CSA: index_scores", "CSA: select_entries"}
    assert "CSA layer" in later and {r["kernel"] for r in rows} >= {None, "attention", "moe", "linear", "router", "mhc_pre"}


def verdicts(rows) -> dict[str, set[str]]:
    """By kernel."""
    found: dict[str, set[str]] = {}
    for r in rows:
        found.setdefault(r["kernel"], set()).add(r["verdict"])
    return found


def times(factor, definition):
    return lambda *a: factor * definition(*a)


@pytest.mark.parametrize("operation, definition, factor", [("moe", moe_ref, 1.05), ("attention", attention_ref, -1.0),
                                                           ("attention", attention_ref, float("nan"))])
def test_a_wrong_kernel_of_a_layer_fails_and_no_other(monkeypatch, operation, definition, factor):
    monkeypatch.setattr(light_checks, "implementations", lambda _: {operation: times(factor, definition)})
    monkeypatch.setattr(light_checks, "prepare", lambda _: None)
    rows = list(light_checks.layer(CPU, "tiny", 4, past=640, prompt=3, decode=1))
    found = verdicts(rows)
    assert found.pop(operation) == {"fail"}
    assert found.pop(None) == {"pass" if factor == 1.05 else "fail"}  # of the layer as a whole, whose cosine a factor hardly changes
    assert set().union(*found.values()) == {"pass"} and {"linear", "router", "index_scores", "select_entries", "mhc_pre"} <= found.keys()


@pytest.mark.parametrize("number, noise, fine", [(4, 0.005, True), (4, 0.2, False), (0, 0.2, False)])
def test_near_ties_that_inputs_turn_are_at_most_their_part_of_a_layer(monkeypatch, number, noise, fine):
    """Inputs that are off by half a percent turn some choices of entries and experts, so that the layer is off by more than they are
    without any kernel being wrong; an H200 had 6e-3 where a learned router follows CSA. A fifth turns too many, and where nothing is
    chosen (SWA with hashed experts) has no excuse."""
    draw = torch.Generator().manual_seed(7)

    def noisy(*a, **k):
        X, x, post, comb = mhc_pre_ref(*a, **k)
        return X, (x * (1 + noise * torch.randn(x.shape, generator=draw))).to(x.dtype), post, comb

    monkeypatch.setattr(light_checks, "implementations", lambda _: {"mhc_pre": noisy})
    monkeypatch.setattr(light_checks, "prepare", lambda _: None)
    *_, whole = light_checks.layer(CPU, "tiny", number, past=640, prompt=60, decode=4)
    assert whole["kernel"] is None and whole["cosine_accumulated"] < 0.999 and whole["verdict"] == ("pass" if fine else "fail")
    if number:
        assert whole["overlap_accumulated"] < 1 and fine == (whole["overlap_accumulated"] >= 0.95)
    else:
        assert whole["overlap_accumulated"] == 1


def test_streams_differ_so_that_a_transposed_comb_shows(monkeypatch):
    """Where the first output of a layer returns to the streams: embeddings, four streams alike, would hide it, as comb's rows and columns
    sum to 1."""
    def transposed(X, pending, *a, **k):
        return mhc_pre_ref(X, pending and pending._replace(comb=pending.comb.transpose(-1, -2).contiguous()), *a, **k)

    monkeypatch.setattr(light_checks, "implementations", lambda _: {"mhc_pre": transposed})
    monkeypatch.setattr(light_checks, "prepare", lambda _: None)
    assert verdicts(light_checks.layer(CPU, "tiny", 0, past=0, prompt=2, decode=1))["mhc_pre"] == {"fail"}


def test_a_wrong_choice_fails(monkeypatch):
    def others(*a, **k):
        chosen, weights = router_ref(*a, **k)
        return (chosen + 1) % 8, weights

    monkeypatch.setattr(light_checks, "implementations", lambda _: {"router": others})
    monkeypatch.setattr(light_checks, "prepare", lambda _: None)
    rows = [r for r in light_checks.layer(CPU, "tiny", 5, past=0, prompt=2, decode=1) if r["kernel"] == "router"]
    assert rows[0]["verdict"] == "fail" and rows[0]["overlap"] < 0.95 and "of the definition's choices" in rows[0]["why"]


def off_by_one(packed):
    values = packed.values.clone()
    values[-1, -1] ^= 1
    return packed._replace(values=values)


def norm_off(x, weight, eps, swizzled=False):
    y, packed = rms_norm_to_nvfp4_ref(x, weight, eps, swizzled)
    return y, off_by_one(packed)


def norm_scaled(x, weight, eps, swizzled=False):
    y = (1.01 * rms_norm_to_nvfp4_ref(x, weight, eps, swizzled)[0].float()).bfloat16()
    return y, to_nvfp4_ref(y, swizzled)


def rows_of_ones(h, weights, limit, swizzled=False):
    packed = swiglu_to_nvfp4_ref(h, weights, limit, swizzled)
    return packed._replace(row_scales=torch.ones_like(packed.row_scales))


@pytest.mark.parametrize("name, broken", [
    ("to_nvfp4", lambda x, swizzled=False: off_by_one(to_nvfp4_ref(x, swizzled))), ("to_nvfp4", lambda x, _=False: to_nvfp4_ref(x, False)),
    ("rms_norm_to_nvfp4", norm_off), ("rms_norm_to_nvfp4", norm_scaled), ("swiglu_to_nvfp4", rows_of_ones),
    ("swiglu_to_nvfp4", lambda h, w, limit, s=False: swiglu_to_nvfp4_ref(-h, w, limit, s)),
])
def test_a_wrong_quantiser_fails_and_no_other(monkeypatch, name, broken):
    monkeypatch.setattr(light_checks, "implementations", lambda _: {name: broken})
    monkeypatch.setattr(light_checks, "prepare", lambda _: None)
    for setting, few in (("CALLS", 1), ("WARM", 0), ("TIMED", 2)):
        monkeypatch.setattr(timing, setting, few)
    rows = [r for r in light_checks.quantisers(CPU, "tiny", (5,)) if r["shows"] == "right"]
    found = verdicts(rows)
    assert "fail" in found.pop(name) and set().union(*found.values()) == {"pass"} and len(found) == 2


@pytest.mark.parametrize("broken, word", [(lambda logits, *a, **k: sample_ref(-logits, *a, **k), "token "),
                                          (lambda logits, seen, *a, **k: sample_ref(logits, seen.clone(), *a, **k), "marked")])
def test_a_wrong_sampler_fails(monkeypatch, broken, word):
    monkeypatch.setattr(light_checks, "implementations", lambda _: {"sample": broken})
    monkeypatch.setattr(light_checks, "prepare", lambda _: None)
    rows = list(light_checks.sample(CPU, "tiny"))
    assert len(rows) == 3 and all(r["verdict"] == "fail" and word in r["why"] for r in rows)


@pytest.fixture
def products_on_cpu(monkeypatch):
    """What `prepare` does in a child, until the test ends."""
    for name in ("COLD", "GRAPH_US", "MIN_CALLS", "TIMED"):
        monkeypatch.setattr(bench_gemm, name, 1)
    for name, few in (("CALLS", 1), ("WARM", 0), ("TIMED", 2)):
        monkeypatch.setattr(timing, name, few)
    monkeypatch.setattr(light_checks, "prepare", lambda _: None)
    monkeypatch.setattr(bench_gemm.Product, "raw", lambda self, i: self.definition())
    monkeypatch.setattr(bench_gemm.Product, "ours", lambda self, i, tile=None: lambda: self.exact().bfloat16())


@pytest.mark.parametrize("kind", bench_gemm.KINDS)
def test_a_product_that_is_off_by_more_than_rounding_fails(products_on_cpu, monkeypatch, kind):
    assert verdicts(light_checks.tiles(CPU, kind)) == {f"gemm_{kind}": {"pass"}}
    monkeypatch.setattr(bench_gemm.Product, "ours", lambda self, i, tile=None: lambda: (1.002 * self.exact()).bfloat16())
    assert verdicts(light_checks.tiles(CPU, kind)) == {f"gemm_{kind}": {"fail"}}
    found = verdicts(light_checks.products(CPU, "tiny", kind, (3,), ("wkv",)))
    assert found.pop(f"gemm_{kind}") == {"fail"} and found == ({"nvfp4_linear": {"pass"}} if kind == "nvfp4" else {})


def test_grouped_products_by_torchs_reading(products_on_cpu, monkeypatch):
    """What scaled_grouped_mm is called with, read by its documentation: rows and scales of each group, in tiles of 128 rows each."""
    def scaled_grouped_mm(a, b, a_scales, a_recipe, b_scales, b_recipe, a_swizzle, b_swizzle, offs, output_dtype):
        assert [r.name for r in a_recipe] == [r.name for r in b_recipe] == ["BlockWise1x16", "TensorWise"]
        assert a_swizzle.name == b_swizzle.name == "SWIZZLE_32_4_4" and offs.dtype == torch.int32
        K, start, tile, out = 2 * a.shape[1], 0, 0, []
        for group, end in enumerate(offs.tolist()):
            rows, tiles = end - start, -(-(end - start) // 128) * 128
            x = values_of(a[start:end], a_scales[0][tile : tile + tiles].flatten(), a_scales[1][group], rows, K)
            w = values_of(b[group].T.contiguous(), b_scales[0][group], b_scales[1][group], b.shape[2], K)
            out.append(x @ w.T)
            start, tile = end, tile + tiles
        assert tile == len(a_scales[0])
        return torch.cat(out).to(output_dtype)

    monkeypatch.setattr("torch.nn.functional.scaled_grouped_mm", scaled_grouped_mm)
    (found,) = light_checks.grouped(CPU, "tiny", tokens=300, experts=5)
    assert found["verdict"] == "pass" and found["torch_error"] <= 1.02 * found["rounding"] and found["torch_us"] > 0
    monkeypatch.setattr("torch.nn.functional.scaled_grouped_mm", _refuse)
    (found,) = light_checks.grouped(CPU, "tiny", tokens=40, experts=3)
    assert found["verdict"] == "pass" and found["torch_refuses"] == "needs another GPU" and "torch_error" not in found


def _refuse(*_, **__):
    raise RuntimeError("needs another GPU\nat line 7")


def test_what_is_slow():
    report = Report({"device": "NVIDIA B200, sm_100a"})
    shown = {"shows": "fast", "verdict": "pass", "why": "", "kernel": "moe", "what": "x", "check": "c"}
    roofs = [row("roof", "read", tb_s=4.0) | {"check": "roofs"}, row("roof", "bf16", tflops=800.0) | {"check": "roofs"}]
    report.rows = [*roofs, *(shown | more for more in (
        {"us": 35.0, "bytes": 100_000_000, "launches": 1}, {"us": 50.0, "bytes": 100_000_000, "launches": 1},  # 25 us of bytes, 3.5
        {"us": 50.0, "bytes": 100_000_000, "launches": 3}, {"us": 50.0, "bytes": 100_000_000},  # how many launches nobody knows
        *({"us": 10.0, "bytes": 1, "flops": 4e9, "kind": "bf16", "ratio": ratio} for ratio in (0.94, 0.96)),
        {"spilled": 8}, {"spilled": 0}))]
    report.judge()
    found = report.rows[2:]
    assert [r["verdict"] for r in found] == ["pass", "slow", "pass", "pass", "slow", "pass", "slow", "pass"]
    assert found[0]["of_roof"] == pytest.approx(25 / 35) and found[4]["of_roof"] == pytest.approx(0.5)  # 4 GFLOP at 800 TFLOP/s: 5 us
    assert found[4]["why"] == "0.94 of torch's speed, 0.95 wanted"
    right = row("right", "x", "moe") | {"check": "c"}
    report.rows.append(right)
    assert report.kernels()["moe"]["verdict"] == "slow" and not report.failed
    report.rows = [right]
    assert report.kernels()["moe"] == {"verdict": "pass", "why": ""} and report.kernels()["router"]["verdict"] == "skipped"


def test_every_row_of_bench_decode_has_its_kernel():
    found = {light_checks.kernel_of_row(name): name for name in (
        "HCA layer, no block closes", "HCA: mhc_pre attn", "CSA: projections of x", "SWA: update_caches, a block closes (1 step in 4)",
        "CSA: wo_a", "CSA: moe", "end: hc_head", "end: head", "end: sample", "alone: wo_b, fp8", "alone: 6 experts, nvfp4, w2",
        "head and sampler")}
    assert found.keys() == {None, "mhc_pre", "linear", "update_caches", "moe", "hc_head", "sample"}
    assert {light_checks.source_of(op) for op in light_checks.OPERATION_OF_ROW.values()} <= set(build.names())
    assert {light_checks.source_of(op) for op in light_checks.OPERATION_OF.values()} <= set(build.names())


def test_what_the_machine_says(monkeypatch, tmp_path):
    """An H200's answers, then each thing that is wrong with one."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ncase "$*" in *--id=GPU-abc*) echo "580.159.04, 700.00 W, 1980 MHz, 0, 5";; *) exit 6;; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    properties = SimpleNamespace(uuid="abc", name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    free = iter(())
    for name, value in (("get_device_properties", lambda _: properties), ("get_device_name", lambda _: "NVIDIA H200"),
                        ("get_device_capability", lambda _: (9, 0)), ("mem_get_info", lambda _: next(free)), ("device_count", lambda: 1),
                        ("synchronize", lambda _: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(light_checks, "driver_cuda", lambda: (13, 0))
    monkeypatch.setattr(light_checks, "GIB", gib := 1 << 10)
    monkeypatch.setattr(build, "find_nvcc", lambda: build.Nvcc("nvcc", "Cuda compilation tools, release 13.0, V13.0.88\n"))

    def found(*sizes):
        nonlocal free
        free = iter([(size * gib, 139.8 * gib) for size in sizes])
        return {r["what"]: r for r in light_checks.machine(CPU)}

    rows = found(139, 5, 4, 3)
    assert {what for what, r in rows.items() if r["verdict"] == "fail"} == set()
    assert rows["driver"]["driver"] == "580.159.04" and rows["GPU"]["power.limit"] == "700.00 W" and rows["toolkit"]["nvcc"] == "13.0"
    assert rows["memory, written and read"]["gib"] == 2
    assert found(120, 3)["memory"]["why"].startswith("19.8 GiB are in use: ")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA B200")
    assert "expected about 178.35 GiB" in found(139, 3)["memory"]["why"]
    monkeypatch.setattr(light_checks, "driver_cuda", lambda: (12, 4))
    assert {what for what, r in found(139, 3).items() if r["verdict"] == "fail"} == {"driver", "toolkit", "memory"}
    smi.write_text('#!/bin/sh\necho "580.1, 700.00 W, 1980 MHz, 3, 5"\n')
    assert found(139, 3)["ECC"]["why"].startswith("3 uncorrected memory errors")
    monkeypatch.setattr(torch, "aminmax", lambda chunk: (chunk[0], chunk[-1] + 1))
    assert "the memory is broken" in found(139, 5, 3)["memory, written and read"]["why"]
    monkeypatch.setattr(torch, "empty", functools.partial(lambda real, *a, pin_memory=False, **k: real(*a, **k), torch.empty))
    links = {r["what"]: r for r in light_checks.links(CPU)}
    assert links["host to GPU"]["gb_s"] > 0 and links["GPU to GPU"]["why"] == "one GPU"


def test_what_does_not_build_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "names", lambda: ["fine", "spills", "bad"])

    def built(name, arch):
        if name == "bad":
            raise UserError(f"kernels: bad.cu does not compile for {arch} with nvcc:\nmany lines")
        return name

    monkeypatch.setattr(build, "build", built)
    monkeypatch.setattr(build, "usage", lambda name: [build.Usage("f", 40, 0, 0, 0), build.Usage("g", 255, 16, 4, 4 * (name == "spills"))])
    rows = {r["kernel"]: r for r in light_checks.build_cuda("sm_90a")}
    assert rows["bad"]["why"] == "kernels: bad.cu does not compile for sm_90a with nvcc:" and rows["bad"]["verdict"] == "fail"
    assert rows["spills"]["spilled"] == 24 and rows["fine"]["registers"] == 255

    bf16 = [tile for tile in TILES if tile.kind == "bf16"]

    def no_dsl(tiles, arch):
        for tile in bf16:
            (tmp_path / cute_build.target(tile, arch)).write_text("")
            (tmp_path / f"{cute_build.target(tile, arch)}.txt").write_text('{"registers": 168, "stack": 0, "ptx": ""}')
        raise UserError("kernels: expected nvidia-cutlass-dsl 4.8.1, found none")

    monkeypatch.setattr(cute_build, "build_ahead", no_dsl)
    rows = {r["kernel"]: r for r in light_checks.build_cute("sm_90a")}
    assert rows["gemm_bf16"]["verdict"] == "pass" and rows["gemm_bf16"]["tiles"] == len(bf16)
    missing = [tile for tile in TILES if tile.kind == "e4m3"]
    assert rows["gemm_e4m3"]["why"] == (f"{len(missing)} of {len(missing)} tiles are not there, {missing[0].name} the first: kernels: "
                                        "expected nvidia-cutlass-dsl 4.8.1, found none")


def test_a_test_file_as_a_check(monkeypatch, tmp_path):
    """Its failure's first line; what skips this machine is skipped."""
    monkeypatch.setattr(light_checks, "TESTS", folder := tmp_path / "tests" / "kernels")
    folder.mkdir(parents=True)
    (folder / "test_mixed.py").write_text(
        "import os, pytest\ndef test_fine():\n    assert os.environ['DSV4_TEST_GPU'] == '1'\n"
        "def test_bad():\n    assert 1 == 2, 'row 3'\n@pytest.mark.skip\ndef test_other(): pass\n")
    (folder / "test_elsewhere.py").write_text("import pytest\npytestmark = pytest.mark.skip(reason='no')\ndef test_x(): pass\n")
    (found,) = light_checks.tests("test_mixed.py", ["moe"])
    assert found["verdict"] == "fail" and found["kernel"] == "moe" and found["why"].startswith("test_bad: AssertionError: row 3")
    assert found["what"] == "test_mixed.py: 1 of 3 tests pass, 1 are skipped"
    assert [r["verdict"] for r in light_checks.tests("test_elsewhere.py", ["a", "b"])] == ["skipped", "skipped"]
    assert [r["verdict"] for r in light_checks.tests("test_missing.py", ["a"])] == ["fail"]


def test_test_files_are_those_of_the_kernels(monkeypatch, tmp_path):
    files = light_checks.test_files()
    assert files["test_moe.py"] == ["moe"] and files["cute/test_gemm.py"] == ["gemm_bf16", "gemm_e4m3"]
    assert {kernel for of in files.values() for kernel in of} == set(first_light.all_kernels())
    monkeypatch.setattr(build, "names", lambda: ["moe", "moe_grouped", "moe_grouped_fp8", "other"])
    monkeypatch.setattr(light_checks, "TESTS", tmp_path)
    for name in ("test_moe.py", "test_moe_grouped.py"):
        (tmp_path / name).write_text("")
    assert light_checks.test_files() == {"test_moe.py": ["moe"], "test_moe_grouped.py": ["moe_grouped", "moe_grouped_fp8"]}
