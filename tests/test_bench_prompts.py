"""helpers/bench_prompts.py on the emulator: its rows, their operands and errors; its times need a GPU."""

import json

import pytest
import torch

from dsv4.config import PRESETS
from dsv4.kernels import prompts
from helpers import bench_gemm, bench_prompts

from .emulator.emulator import emulated, needs_gxx

pytestmark = needs_gxx


@pytest.fixture
def few(monkeypatch):
    for module, name, value in ((bench_prompts, "COLD", 1), (bench_prompts, "MIN_CALLS", 1), (bench_prompts, "MAX_CALLS", 1),
                                (bench_prompts, "TIMED", 1), (bench_gemm, "WARM", 0)):
        monkeypatch.setattr(module, name, value)
    with emulated():
        yield


def rows(path, capsys, *arguments):
    assert bench_prompts.main(["--preset", "tiny", "--device", "cpu", "--json", str(path), *arguments]) == 0
    results, out = json.loads(path.read_text())["results"], capsys.readouterr().out.splitlines()
    assert len(out) == 2 + len(results)
    for row, text in zip(results, out[1:], strict=False):
        assert text.startswith(row["row"]) and row["us"] > 0 and row["tflops"] > 0 and row["rate"] > 0 and 1e-4 < row["error"] < 5e-3
    return results


def test_dense_rows(few, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_prompts, "shapes", lambda config: [("wq_b", 64, 72, 1), ("wo_a", 64, 32, 2)])
    results = rows(tmp_path / "out.json", capsys, "--tokens", "3,34", "--formats", "nvfp4,fp8", "--sweep")
    assert [(r["tokens"], r["groups"], r["kind"]) for r in results] == [(m, g, kind) for g in (1, 2) for kind in ("nvfp4", "fp8")
                                                                        for m in (3, 34)]
    assert all(prompts.Cut(r["tile"], r["parts"]) == prompts.cut(r["tokens"], r["groups"] * r["N"], r["K"], None, 3) for r in results)
    assert all(set(r["tiles"]) == {f"{most}x{parts}" for most, parts in prompts.CUTS} for r in results)
    assert all(r["rate_with_arrange"] < r["rate"] for r in results)


def test_experts_rows(few, tmp_path, capsys):
    results = rows(tmp_path / "out.json", capsys, "--tokens", "20", "--experts", "--sweep")
    assert [r["part"] for r in results] == ["w1 w3", "w2", "moe"]
    assert all(0 < r["experts"] <= PRESETS["tiny"].n_routed_experts and r["floor_us"] > 0 for r in results)
    assert [len(r.get("tiles", ())) for r in results] == [7, 7, 0]


def test_copies_are_cold(few, monkeypatch):
    monkeypatch.setattr(bench_prompts, "COLD", 1 << 20)
    product = bench_prompts.Dense("fp8", 2, 256, 1024, 1, torch.device("cpu"))
    assert len({p.data.data_ptr() for p in product.packed}) == len(product.packed) == 4
    assert len({w.data_ptr() for w in product.copies}) == len(product.copies) == 2


def test_devices_whose_tensor_cores_it_does_not_need(monkeypatch, capsys):
    """Refused before weights are drawn."""
    monkeypatch.setattr(bench_prompts, "Dense", lambda *_: pytest.fail("drew weights"))
    assert bench_prompts.main(["--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("error: --device: expected a Hopper GPU such as cuda:0, found cpu: ")
    monkeypatch.setattr(bench_prompts.runtime, "resolve_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA B200")
    assert bench_prompts.main([]) == 2
    assert capsys.readouterr().err.startswith("error: --device: expected a Hopper GPU, found NVIDIA B200 (sm_100a): ")
