"""The first hour on a new GPU (a B200, an H200), one command: is it sound, does all build, is every kernel right, how fast is it?

    python helpers/first_light.py [--quick] [--out DIR]

Writes DIR/first_light.md and DIR/first_light.json, anew after every check: the machine, a verdict for every kernel (pass, fail, slow or
skipped, and why) and the numbers behind it. The checks (light_checks.py) run in child processes with a time limit each: one that fails,
hangs or takes its process down is a verdict and stops no other. --quick ends within 5 minutes; what it has no time for, it says. What
needs another architecture says so: on an H200 the NVFP4 products need sm_100.

A kernel is right by compare_layers' limits for the same input (layers and head at true size, random weights), byte by byte (quantisers),
token by token (sample), or by a product's error over that of rounding it (GEMMs, beside torch's cuBLAS as an independent voice); without
--quick, and for a kernel that none of these covers, by its tests too (tests/kernels, on the GPU). It is slow if it takes over SLOW times
its bytes at the measured read rate and LAUNCH_US a launch, or, a GEMM, over 1 / OF_TORCH of torch's time.

Exit code 0 (slow and skipped are no failure), 1 if anything failed, 2 without a GPU or with a wrong argument, 130 interrupted.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from dsv4 import runtime  # noqa: E402
from dsv4.config import PRESETS  # noqa: E402
from dsv4.errors import UserError  # noqa: E402
from dsv4.kernels import build  # noqa: E402
from dsv4.kernels.cute.tiles import ARCHITECTURES  # noqa: E402
from dsv4.kernels.launch import architecture  # noqa: E402
from helpers import bench_decode, children, light_checks, replayed  # noqa: E402
from helpers.bench_gemm import KINDS  # noqa: E402
from helpers.make_checkpoint import write_file  # noqa: E402
from single_shot_inference import OneLineParser  # noqa: E402

QUICK_S = 280  # of the 5 minutes that --quick promises; the rest is for the last child to end
QUICK_LIMIT_S = 90  # of one of its checks, so that a hang leaves time for others
SLOW, LAUNCH_US = 1.5, 3.5  # us: what a launch of a stream costs beside its bytes on an H200 (docs/measurements.md); elsewhere a guess
OF_TORCH = 0.95  # of torch's speed, which a GEMM is to have
BLACKWELL = ARCHITECTURES["nvfp4"]
VERDICTS = ("fail", "slow", "pass", "skipped")  # the worst first
IN_LAYERS = ("attention", "index_scores", "linear", "mhc_post", "mhc_pre", "moe", "router", "select_entries", "update_caches")


@dataclass(frozen=True)
class Check(children.Task):
    """`kernels`: whose verdict it is; `architectures`: where it can run (any if none); `sync`: every launch is waited for, so that a fault
    has its kernel's name, and no time is measured."""

    kernels: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    sync: bool = False


def all_kernels() -> list[str]:
    """Every kernel that is to have a verdict."""
    return [*build.names(), *(f"gemm_{kind}" for kind in ARCHITECTURES)]


# ------------------------------------------------------------------------------------------------------------ the plan


def layers_of(preset: str) -> list[int]:
    """The first layer of each kind and way of choosing experts."""
    config = PRESETS[preset]
    first = {(config.kind(n), config.is_hash_layer(n)): n for n in reversed(range(config.num_hidden_layers))}
    return sorted(first.values())


def plan(device: torch.device, arch: str, quick: bool) -> list[Check]:
    """All checks in their order: what is cheap and what others rest on first."""
    gpu, on = device.type == "cuda", {"device": device}
    presets = ("flash", "pro") if gpu else ("tiny",)
    checks = []
    if gpu:
        checks += [Check("machine", light_checks.machine, on), Check("links", light_checks.links, on),
                   Check("build, raw CUDA", light_checks.build_cuda, {"arch": arch}, 600, tuple(build.names())),
                   Check("build, CuTeDSL", light_checks.build_cute, {"arch": arch}, 600,
                         tuple(f"gemm_{kind}" for kind, where in ARCHITECTURES.items() if arch in where))]
    checks.append(Check("roofs", light_checks.roofs, on))
    checks += [*_right(on, presets, gpu, quick), *_fast(on, presets, gpu, quick)]
    seen = {kernel for check in checks if not check.name.startswith("build") for kernel in check.kernels}
    files = light_checks.test_files() if gpu else {}
    checks += [Check(f"tests, {file}", light_checks.tests, {"file": file, "of": of}, 900, tuple(of))
               for file, of in files.items() if not quick or not seen.issuperset(of)]
    if not quick:
        return checks
    return [replace(check, limit_s=min(check.limit_s, math.inf if check.name.startswith("build") else QUICK_LIMIT_S)) for check in checks]


def _right(on: dict, presets: tuple[str, ...], gpu: bool, quick: bool) -> list[Check]:
    make = functools.partial(Check, sync=True)
    checks = [make(f"tiles, {kind}", light_checks.tiles, on | {"kind": kind}, kernels=(f"gemm_{kind}",),
                   architectures=ARCHITECTURES[kind] if gpu else ()) for kind in KINDS]
    steps = {} if gpu else {"past": 640, "prompt": 6, "decode": 1}
    for preset in presets:
        checks.append(make(f"sample, {preset}", light_checks.sample, on | {"preset": preset}, kernels=("sample",)))
        layers = layers_of(preset)
        if quick:  # of Pro one layer of each kind, one hash and one learned
            layers = {"pro": [layers[0], layers[-1]], "tiny": layers[2:3]}.get(preset, layers)
        for n in layers:
            kind, how = PRESETS[preset].kind(n), "hash" if PRESETS[preset].is_hash_layer(n) else "learned"
            of_layer = IN_LAYERS if kind == "CSA" else tuple(k for k in IN_LAYERS if k not in ("index_scores", "select_entries"))
            checks.append(make(f"layer, {preset} {kind} {how}", light_checks.layer, on | {"preset": preset, "number": n} | steps, 180,
                               of_layer))
        checks.append(make(f"head, {preset}", light_checks.layer, on | {"preset": preset, "number": None} | steps,
                           kernels=("hc_head", "linear")))
    if not quick and gpu:
        checks += [make(f"layer, flash CSA learned, {form}", light_checks.layer, on | {"preset": "flash", "number": 4, "format": form},
                        180, IN_LAYERS) for form in ("official", "all-nvfp4", "bf16")]
    return checks


def _fast(on: dict, presets: tuple[str, ...], gpu: bool, quick: bool) -> list[Check]:
    checks = []
    for preset in presets:
        checks.append(Check(f"quantisers, {preset}", light_checks.quantisers,
                            on | {"preset": preset, "tokens": (1, 129, 4096) if gpu else (1, 3)},
                            kernels=("to_nvfp4", "rms_norm_to_nvfp4", "swiglu_to_nvfp4")))
    for preset, kind in itertools.product(presets, KINDS):
        few = ("wkv", "wo_a", "wo_b", "shared w1 w3") if quick else None
        tokens = (1, 5) if not gpu else (128, 2048) if quick else (1, 128, 2048, 8192)
        raw = ("nvfp4_linear",) if kind == "nvfp4" else ()
        checks.append(Check(f"products, {preset} {kind}", light_checks.products,
                            on | {"preset": preset, "kind": kind, "tokens": tokens, "names": few}, 300, (f"gemm_{kind}", *raw),
                            ARCHITECTURES[kind] if gpu else ()))
    checks += [Check(f"grouped, {preset}", light_checks.grouped, on | {"preset": preset}, kernels=("gemm_nvfp4",), architectures=BLACKWELL)
               for preset in presets if gpu]
    lengths = {True: (4096,) if quick else (4096, 1 << 20), False: (130,)}[gpu]
    for preset in presets:
        kinds = list(dict.fromkeys(map(PRESETS[preset].kind, range(PRESETS[preset].num_hidden_layers))))
        for kind in kinds if gpu or not quick else kinds[:1]:
            checks.append(Check(f"decode, {preset} {kind}", light_checks.decode, on | {"preset": preset, "kind": kind, "contexts": lengths},
                                240))
        checks.append(Check(f"decode, {preset} ends", light_checks.decode, on | {"preset": preset, "kind": None, "contexts": lengths[:1]},
                            240))
    return checks


def needs(check: Check) -> str:
    """Why a check cannot run here."""
    return "needs " + " or ".join(dict.fromkeys({"sm_103a": "sm_100a"}.get(a, a).removesuffix("a") for a in check.architectures))


# ---------------------------------------------------------------------------------------------------------- the report


@dataclass
class Report:
    """What was found so far."""

    facts: dict
    rows: list[dict] = field(default_factory=list)
    checks: list[dict] = field(default_factory=list)
    complete: bool = False

    def skip(self, check: Check, why: str) -> None:
        self.checks.append({"name": check.name, "verdict": "skipped", "why": why, "seconds": 0.0, "kernels": list(check.kernels)})
        self.rows += [light_checks.skipped("right", check.name, why, kernel) | {"check": check.name} for kernel in check.kernels or (None,)]

    def add(self, outcome: children.Outcome) -> dict:
        """What a check has found; returns its entry."""
        check, rows = outcome.task, [row | {"check": outcome.task.name} for row in outcome.rows]
        self.rows += rows
        if outcome.cut:
            seen = {row["kernel"] for row in rows}
            self.rows += [light_checks.skipped("right", check.name, outcome.failure.splitlines()[0], kernel) | {"check": check.name}
                          for kernel in (check.kernels or (None,)) if kernel not in seen]
        elif outcome.failure:
            self.rows.append(light_checks.row("right", check.name, culprit(outcome.failure), outcome.failure.splitlines()[0])
                             | {"check": check.name})
        self.judge()
        mine = [row for row in self.rows if row["check"] == check.name]
        verdict = min((row["verdict"] for row in mine), key=VERDICTS.index, default="pass")
        self.checks.append({"name": check.name, "verdict": verdict, "why": outcome.failure or "", "seconds": outcome.seconds,
                            "kernels": list(check.kernels), "rows": len(rows)})
        return self.checks[-1]

    @property
    def roofs(self) -> dict[str, float]:
        """read: TB/s; bf16, e4m3, nvfp4: TFLOP/s; what was measured of them."""
        return {row["what"]: row.get("tb_s", row.get("tflops")) for row in self.rows if row["shows"] == "roof" and row["verdict"] == "pass"}

    def judge(self) -> None:
        """The roof of every row that has a time, and whether the row is slow. On a CPU neither would mean anything."""
        if self.facts["device"] == "cpu":
            return
        roofs = self.roofs
        for row in self.rows:
            if row.get("us") and row.get("bytes") and "read" in roofs:
                compute = row["flops"] / roofs[row["kind"]] if "flops" in row and row.get("kind") in roofs else 0
                row["floor_us"] = 1e-6 * max(row["bytes"] / roofs["read"], compute)
                row["of_roof"] = row["floor_us"] / row["us"]
            if row["verdict"] == "pass" and row["kernel"]:
                if (why := slow(row)) is not None:
                    row.update(verdict="slow", why=why)

    def kernels(self) -> dict[str, dict]:
        """Kernel -> its verdict and why."""
        found = {}
        for kernel in all_kernels():
            mine = [row for row in self.rows if row["kernel"] == kernel]
            bad = [row for row in mine if row["verdict"] == "fail"]
            lost = [check for check in self.checks if check["verdict"] == "fail" and check["why"] and kernel in check["kernels"]
                    and not any(row["check"] == check["name"] and row["shows"] in ("right", "compiles") for row in mine)]
            blamed = [check for check in lost if culprit(check["why"]) is None]
            right = [row for row in mine if row["shows"] == "right" and row["verdict"] in ("pass", "slow")]
            lagging = [row for row in mine if row["verdict"] == "slow"]
            if bad:
                verdict, why = "fail", f"{bad[0]['what']}: {bad[0]['why']}" + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
            elif blamed:
                verdict, why = "fail", f"{blamed[0]['name']}: {blamed[0]['why'].splitlines()[0]}"
            elif lost and not right:
                verdict, why = "skipped", f"{lost[0]['name']} ended before it: {lost[0]['why'].splitlines()[0]}"
            elif not right:
                reasons = [row["why"] for row in mine if row["verdict"] == "skipped"]
                verdict, why = "skipped", reasons[0] if reasons else "no check of it was run"
            elif lagging:
                worst = min(lagging, key=lambda row: row.get("of_roof", 0))
                verdict, why = "slow", f"{worst['what']}: {worst['why']}" + (f" (and {len(lagging) - 1} more)" if len(lagging) > 1 else "")
            else:
                verdict, why = "pass", ""
            found[kernel] = {"verdict": verdict, "why": why}
        return found

    @property
    def failed(self) -> bool:
        return any(row["verdict"] == "fail" for row in self.rows)

    def as_dict(self) -> dict:
        return {"facts": self.facts, "complete": self.complete, "verdict": "fail" if self.failed else "pass", "kernels": self.kernels(),
                "roofs": self.roofs, "checks": self.checks, "rows": self.rows}

    def write(self, folder: Path) -> None:
        """Both files, each whole or as it was before."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / "first_light.json", json.dumps(_finite(self.as_dict()), indent=1, allow_nan=False) + "\n")
            write_file(folder / "first_light.md", markdown(self))
        except OSError as error:
            raise UserError(f"--out: {str(folder)[:100]} cannot be written: {error.strerror}: give a folder that can") from None


def _finite(value):
    """The same for JSON, which has no NaN: None."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def culprit(failure: str) -> str | None:
    """The kernel that a failure names: the launcher says which one it was (KernelError)."""
    match = re.match(r"(?:KernelError|UserError): (\w+):", failure)
    if match is None:
        return None
    return max((name for name in all_kernels() if match[1] == name or match[1].startswith(f"{name}_")), key=len, default=None)


def slow(row: dict) -> str | None:
    """Why a row that is right is slow, if it is."""
    if row.get("spilled"):
        return f"{row['spilled']} bytes of stack and spills a thread"
    if "ratio" in row:
        return None if row["ratio"] >= OF_TORCH else f"{row['ratio']:.2f} of torch's speed, {OF_TORCH} wanted"
    if "floor_us" in row and row.get("launches"):
        most = SLOW * (row["floor_us"] + LAUNCH_US * row["launches"])
        if row["us"] > most:
            return f"{row['us']:.1f} us, at most {most:.1f} wanted ({row['floor_us']:.1f} us of bytes, {row['launches']} launches)"
    return None


# ------------------------------------------------------------------------------------------------------------ Markdown


def table(header: str, rows: Iterable[Iterable]) -> list[str]:
    """A Markdown table; `header`: its columns, with commas."""
    columns = [name.strip() for name in header.split(",")]
    cells = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    if any(len(row) != len(columns) for row in cells):
        raise AssertionError(f"expected {len(columns)} cells a row: {header}")
    return [f"| {' | '.join(row)} |" for row in cells] + [""]


def _cell(value) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.1e}" if value and abs(value) < 1e-2 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return " ".join(str(value).split()).replace("|", "\\|")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def markdown(report: Report) -> str:
    """The whole report."""
    facts, rows, kernels = report.facts, report.rows, report.kernels()
    counts = {verdict: sum(k["verdict"] == verdict for k in kernels.values()) for verdict in VERDICTS}
    state = "" if report.complete else " **Not complete: it is still running, or was stopped.**"
    lines = [f"# First light: {facts['device']}", "", f"`{facts['command']}`, {facts['date']}, {facts['seconds']:.0f} s, torch "
             f"{facts['torch']}, Python {facts['python']}{', commit ' + facts['commit'] if facts['commit'] else ''}.{state}", "",
             f"**{'FAIL' if report.failed else 'PASS'}**: of {len(kernels)} kernels {counts['pass']} pass, {counts['slow']} slow, "
             f"{counts['fail']} fail, {counts['skipped']} skipped; {sum(c['verdict'] == 'fail' for c in report.checks)} of "
             f"{len(report.checks)} checks failed.", ""]
    if facts["device"] == "cpu":
        lines += ["A CPU: the definitions stand in the kernels' place and times mean nothing. This tests the plumbing alone.", ""]
    lines += ["## Kernels", "",
              *table("kernel, verdict, why, worst relative error, where, of the roof", map(_kernel_row(rows), kernels.items())),
              "Of the roof: the least and the most of its rows, bytes at the measured read rate (products: or their arithmetic at torch's "
              f"rate) over time. Slow: over {SLOW} x (bytes and {LAUNCH_US} us a launch), or under {OF_TORCH} of torch's speed.", ""]
    for title, shows, header, words, cells in (
        ("Machine", "machine", "what, verdict, found", "", lambda r: (_found(r),)),
        ("Roofs", "roof", "what, verdict, rate, by", "", lambda r: (_rate(r), r.get("by"))),
        ("Building", "compiles", "for, verdict, kernel, found", "", lambda r: (f"`{r['kernel']}`", _found(r))),
        ("One synthetic layer of each kind", "layer",
         "layer, verdict, 1 - cosine (same input), 1 - cosine (accumulated), least overlap of choices",
         "Of the streams behind the layer, all tokens as one vector, kernels against definitions: where every stage gets what the "
         "definition before it made, and where it gets what kernels made. Choices: the accumulated ones, of entries and experts.",
         lambda r: (1 - r["cosine"], 1 - r["cosine_accumulated"], r.get("overlap_accumulated"))),
    ):
        mine = [(r["what"], _verdict(r), *cells(r)) for r in rows if r["shows"] == shows]
        lines += [f"## {title}", "", *([words, ""] if words else []), *table(header, mine)] if mine else []
    if products := [r for r in rows if _is_product(r)]:
        lines += ["## Products", "", "us and relative errors of one product on the same bytes, by each voice. Rounding: the error of "
                  "rounding the exact product to bf16. Ratio: torch's time over CuTeDSL's.", "",
                  *table("product, kind, verdict, CuTeDSL us, raw CUDA us, torch us, ratio, of the roof, CuTeDSL error, raw CUDA, torch, "
                         "definition, rounding", map(_product_row, products))]
    if fast := [r for r in rows if r["shows"] == "fast"]:
        lines += ["## Decode", "", "One token, weights cold; medians of graph replays. The quantisers: of a prompt. * : the same bytes are "
                  f"read again after less than {replayed.COLD >> 20} MiB of others, so that some come from L2.", "", *_models(rows),
                  *table("row, verdict, us, p10, p90, MB, TB/s, of the roof, launches, torch bf16 us", map(_decode_row, fast))]
    lines += _against(rows)
    for check in report.checks:
        if check["verdict"] == "fail" and check["why"]:
            said = [line.replace("```", "'''") for line in check["why"].splitlines()]
            lines += [f"### {check['name']}: its last lines", "", "```", *said, "```", ""]
    lines += ["## Checks", "", *table("check, verdict, seconds, why", (
        (c["name"], c["verdict"], round(c["seconds"], 1), (c["why"].splitlines() or [""])[0]) for c in report.checks))]
    return "\n".join(lines)


def _rate(row: dict) -> str:
    return f"{row['tb_s']:.2f} TB/s" if "tb_s" in row else f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""


def _verdict(row: dict) -> str:
    return row["verdict"] + (f": {row['why']}" if row["why"] else "")


def _found(row: dict) -> str:
    skip = {"shows", "what", "kernel", "verdict", "why", "check"}
    return ", ".join(f"{key} {_cell(value)}" for key, value in row.items() if key not in skip)


def _kernel_row(rows: list[dict]):
    def make(item: tuple[str, dict]) -> tuple:
        kernel, verdict = item
        mine = [row for row in rows if row["kernel"] == kernel]
        errors = [(_error(row), row["what"] + (f", {row['at']}" if row.get("at") else "")) for row in mine if _error(row) is not None]
        error, where = max(errors, default=(None, ""), key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf)
        shares = [row["of_roof"] for row in mine if "of_roof" in row]
        span = "" if not shares else f"{min(shares):.0%} to {max(shares):.0%}" if min(shares) < max(shares) else _share(shares[0])
        return f"`{kernel}`", verdict["verdict"], verdict["why"], error, where, span
    return make


def _error(row: dict) -> float | None:
    return row.get("relative", row.get("error"))


def _is_product(row: dict) -> bool:
    """Measured by several voices."""
    return "kind" in row and "error" in row


def _product_row(row: dict) -> tuple:
    refused = f" (torch refuses: {row['torch_refuses']})" if "torch_refuses" in row else ""
    errors = (row.get(f"{voice}error") for voice in ("", "raw_", "torch_", "definition_"))
    return (row["what"] + refused, row["kind"], _verdict(row), row.get("us"), row.get("raw_us"), row.get("torch_us"), row.get("ratio"),
            _share(row.get("of_roof")), *errors, row["rounding"])


def _decode_row(row: dict) -> tuple:
    speed = 1e-6 * row["bytes"] / row["us"] if row.get("bytes") else None
    mark = " *" if row.get("bytes") and row.get("apart", replayed.COLD) < replayed.COLD else ""
    size = 1e-6 * row["bytes"] if row.get("bytes") else None
    return (row["what"] + mark, _verdict(row), row["us"], row.get("p10"), row.get("p90"), size, speed, _share(row.get("of_roof")),
            row.get("launches"), row.get("torch_bf16_us"))


def _models(rows: list[dict]) -> list[str]:
    """The whole model of each preset, where every part of it was measured."""
    lines = []
    for preset, context in dict.fromkeys((r["preset"], r["context"]) for r in rows if "preset" in r):
        config = PRESETS[preset]
        named = {r["row"]: r for r in rows if r.get("preset") == preset and r.get("context") == context}
        kinds = {config.kind(n) for n in range(config.num_hidden_layers)}
        layers = {kind: named.get(f"{kind} layer", named.get(f"{kind} layer, no block closes")) for kind in kinds}
        if all(layers.values()) and {"head and sampler", "start and end of a share"} <= named.keys():
            total = bench_decode.whole_model(config, layers, named["head and sampler"], named["start and end of a share"])
            lines += [f"{preset}, {context} tokens of context, {total['row']}, put together from these rows: {1e-3 * total['us']:.2f} ms a "
                      f"token, {1e-9 * total['bytes']:.1f} GB.", ""]
    return lines


def _against(rows: list[dict]) -> list[str]:
    """Each kernel's rows against its definition, by the model; products stand above."""
    right = [r for r in rows if r["shows"] == "right" and r["kernel"] and not _is_product(r) and r["verdict"] != "skipped"]
    groups: dict[tuple[str, str], list[dict]] = {}
    for r in right:
        groups.setdefault((r["kernel"], next((p for p in PRESETS if p in re.split(r"\W", r["check"])), "tiles")), []).append(r)
    lines = []
    for (kernel, of), mine in sorted(groups.items()):
        worst = max(mine, key=lambda r: (r["verdict"] == "fail", _error(r) or 0))
        overlaps = [r["overlap"] for r in mine if "overlap" in r]
        where = worst["what"] + (f", {worst['at']}" if worst.get("at") else "") if _error(worst) is not None else ""
        lines.append((f"`{kernel}`", of, len(mine), _verdict(worst), _error(worst), worst.get("one_minus_cosine"), where,
                      min(overlaps, default=None)))
    return ["## Against the definitions", "", "The worst of so many rows (first_light.json has them all). Same bytes where there is no "
            "error: quantisers, sample. Overlap: of choices, the least part that are the definition's.", "",
            *table("kernel, of, rows, verdict, relative error, 1 - cosine, where, overlap", lines)]


# ----------------------------------------------------------------------------------------------------------- the run


def facts_of(device: torch.device, argv: list[str]) -> dict:
    """What the report is of. Without the place that it is written to, as it may be published."""
    places = [i for i, word in enumerate(argv) if word == "--out"]
    argv = [word for i, word in enumerate(argv) if not word.startswith("--out") and i - 1 not in places]
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=20)
        commit = asked.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    name = "cpu" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)}, {architecture(device)}"
    return {"device": name, "torch": torch.__version__, "python": sys.version.split()[0], "commit": commit,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "seconds": 0.0,
            "command": " ".join(["python helpers/first_light.py", *argv])}


def run(report: Report, checks: list[Check], arch: str, folder: Path, deadline: float) -> None:
    """All checks that can run here, in order; the report is written after each."""
    start = time.monotonic()

    def done(entry: dict) -> None:
        report.facts["seconds"] = time.monotonic() - start
        report.write(folder)
        why = entry["why"].splitlines()[0] if entry["why"] else ""
        print(f"{entry['verdict']:<8}{entry['name']:<36}{entry['seconds']:7.1f} s  {why}".rstrip(), flush=True)

    report.write(folder)
    possible = []
    for check in checks:
        if not check.architectures or arch in check.architectures:
            possible.append(check)
        else:
            report.skip(check, needs(check))
            done(report.checks[-1])
    for sync, together in itertools.groupby(possible, key=lambda check: check.sync):
        for outcome in children.run(together, {"DSV4_SYNC": "1"} if sync else {}, deadline):
            done(report.add(outcome))
    report.complete = True
    report.facts["seconds"] = time.monotonic() - start
    report.write(folder)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and layers, within 5 minutes")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "first_light", metavar="DIR", help="default: build/first_light")
    parser.add_argument("--only", type=lambda text: re.split(",(?! )", text), metavar="NAME,..",
                        help="checks whose names begin so, such as machine,layer or 'layer, pro'")
    parser.add_argument("--device", default="cuda:0", help="cpu tests the plumbing with the definitions; its times mean nothing")
    args = parser.parse_args(argv)
    report = None
    try:
        device = runtime.resolve_device(args.device)
        arch = architecture(device) if device.type == "cuda" else "cpu"
        checks = plan(device, arch, args.quick)
        if args.only is not None:
            for begins in args.only:
                if not begins or not any(check.name.startswith(begins) for check in checks):
                    kinds = dict.fromkeys(check.name.split(",")[0] for check in checks)
                    raise UserError(f"--only: expected the beginning of a check's name ({', '.join(kinds)}), found {begins[:100]!r}")
            checks = [check for check in checks if check.name.startswith(tuple(args.only))]
        report = Report(facts_of(device, sys.argv[1:] if argv is None else argv))
        run(report, checks, arch, args.out, time.monotonic() + QUICK_S if args.quick else math.inf)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if report is not None:
            report.write(args.out)
        print("interrupted", file=sys.stderr)
        return 130
    for kernel, found in report.kernels().items():
        print(f"{found['verdict']:<8}{kernel:<24}{found['why']}".rstrip())
    print(f"{args.out / 'first_light.md'}, {args.out / 'first_light.json'}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
