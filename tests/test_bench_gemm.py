"""helpers/bench_gemm.py: its shapes and operands, its plumbing with torch's products in place of the kernels; its times need a GPU."""

import json

import pytest
import torch

from dsv4.config import PRESETS
from dsv4.formats import e2m1_to_float
from dsv4.kernels.cute import gemm, grouped
from dsv4.kernels.cute.tiles import TILES
from dsv4.kernels.layouts import unpack_k_major, unswizzle_scales
from dsv4.ops.nvfp4 import nvfp4_linear_ref
from helpers import bench_gemm

CPU = torch.device("cpu")


@pytest.fixture
def on_cpu(monkeypatch):
    """The wrappers by their definitions."""
    def fp8(x, x_scale, w, w_scale, tile=None):
        K, N = x.shape[1], w.shape[0]
        x = x.float() * x_scale[:, : len(x)].T.repeat_interleave(128, 1)[:, :K]
        return (x @ (w.float() * w_scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]).T).bfloat16()

    def bf16(x, w, tile=None):
        x3 = x.view(len(x), -1, w.shape[1]).float()
        out = torch.einsum("mgk,gnk->mgn", x3, w.float().view(x3.shape[1], -1, w.shape[1])).bfloat16()
        return out if x.dim() == 3 else out[:, 0]

    def by_expert(product, groups):
        offsets = groups.offsets.tolist()
        return torch.cat([product(e, slice(*ends)) for e, ends in enumerate(zip(offsets, offsets[1:], strict=False))])

    def grouped_fp8(x, x_scale, groups, w, w_scale, tile=None):
        tiles = [0, *((groups.offsets.diff() + 127) // 128).cumsum(0).tolist()]

        def product(e, rows):
            return fp8(x[rows], x_scale[:, 128 * tiles[e] : 128 * tiles[e + 1]], w[e], w_scale[e])
        return by_expert(product, groups)

    monkeypatch.setattr(gemm, "gemm", bf16)
    monkeypatch.setattr(gemm, "gemm_fp8", fp8)
    monkeypatch.setattr(grouped, "grouped_gemm", lambda x, groups, w, tile=None: by_expert(
        lambda e, rows: (x[rows].float() @ w[e].float().T).bfloat16(), groups))
    monkeypatch.setattr(grouped, "grouped_gemm_fp8", grouped_fp8)
    for name, few in (("COLD", 1), ("GRAPH_US", 1), ("MIN_CALLS", 1), ("WARM", 0), ("TIMED_SWEEP", 1)):
        monkeypatch.setattr(bench_gemm, name, few)


def test_shapes_are_those_of_the_models():
    pro, flash = ({s[1:] for s in bench_gemm.shapes(PRESETS[name])} for name in ("pro", "flash"))
    assert pro == {(7168, 1536, 1), (7168, 512, 1), (1536, 65536, 1), (4096, 1024, 16), (16384, 7168, 1), (7168, 6144, 1), (3072, 7168, 1),
                   (1536, 8192, 1)}
    assert flash == {(4096, 1024, 1), (4096, 512, 1), (1024, 32768, 1), (4096, 1024, 8), (8192, 4096, 1), (4096, 4096, 1), (2048, 4096, 1),
                     (1024, 8192, 1)}


def test_copies_of_weights_are_more_than_l2():
    product = bench_gemm.Product("e4m3", 4, 256, 512, 1, CPU, cold=1 << 20)
    assert len(product.weights) == 8 and len({w.data_ptr() for w in product.weights}) == 8
    assert len(bench_gemm.Product("bf16", 4, 256, 512, 1, CPU, cold=1 << 20).weights) == 4


def test_every_row_of_the_table(on_cpu, monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.json"
    monkeypatch.setattr(bench_gemm, "shapes", lambda config: [("wq_b", 64, 136, 1), ("wo_a", 136, 64, 2)])
    assert bench_gemm.main(["--preset", "tiny", "--tokens", "1,12", "--device", "cpu", "--sweep", "--json", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    results = json.loads(path.read_text())["results"]
    assert len(out) == 2 + len(results) == 2 + 2 * 3  # bf16 and e4m3, wo_a in bf16 alone
    for row, text in zip(results, out[1:], strict=False):
        assert text.startswith(row["row"]) and row["us"] > 0 and row["tflops"] > 0
        assert row["error"] < 3e-3 and set(row["tiles"]) == {t.name for t in TILES if t.kind == row["kind"]}
        assert ("ratio" in row) != ("torch_refuses" in row)
    bf16 = [row for row in results if row["kind"] == "bf16"]
    assert all(row["ratio"] > 0 and row["torch_error"] < 3e-3 for row in bf16)


def test_every_row_of_the_experts(on_cpu, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--preset", "tiny", "--kinds", "bf16_grouped,e4m3_grouped", "--tokens", "1,150", "--device", "cpu", "--sweep"]
    assert bench_gemm.main([*arguments, "--json", str(path)]) == 0
    out, results = capsys.readouterr().out.splitlines(), json.loads(path.read_text())["results"]
    assert len(out) == 2 + len(results) == 2 + 2 * 2 * 2  # w1 with w3, and w2
    slots, experts = PRESETS["tiny"].num_experts_per_tok, PRESETS["tiny"].n_routed_experts
    for row, text in zip(results, out[1:], strict=False):
        assert text.startswith(row["row"]) and " TB/s" in text and row["us"] > 0 and row["tflops"] > 0 and row["tb_s"] > 0
        assert row["rows"] == slots * row["tokens"] and row["experts_with_rows"] == (slots if row["tokens"] == 1 else experts)
        assert row["error"] < 3e-3 and set(row["tiles"]) == {t.name for t in TILES if t.kind == row["kind"]}
        if row["kind"] == "bf16_grouped":
            assert row["torch_error"] < 3e-3 and row["ratio"] > 0 and "dense " in text
        else:
            assert row["torch_refuses"] == "torch has no grouped product with a scale per token and 128 of K"


def test_experts_weights_are_repeated_few(on_cpu):
    product = bench_gemm.Experts("e4m3_grouped", 40, 128, 32, 20, 3, CPU, cold=1)
    (w,) = product.weights
    assert w.shape == (20, 32, 128) and torch.equal(w[11].float(), w[3].float()) and not torch.equal(w[1].float(), w[0].float())
    assert sorted(product.chosen.order.tolist()) == list(range(120)) and product.bytes == (20 * 32 + 120) * 128 + 2 * 120 * 32
    assert [(name, k, n) for name, k, n in bench_gemm.expert_shapes(PRESETS["pro"])] == [
        ("experts w1 w3", 7168, 6144), ("experts w2", 3072, 7168)]
    exact = product.exact()
    assert bench_gemm.error(product.ours(0), exact) < 3e-3
    product.x_scale = product.x_scale.roll(128, 1)
    assert bench_gemm.error(product.ours(0), exact) > 0.1


def test_torchs_fp8_operands_are_the_same_numbers(on_cpu, monkeypatch):
    """What scaled_mm is called with: token scales [M, K / 128] and weight scales [K / 128, N / 128], each along its first axis."""
    seen = {}

    def scaled_mm(x, w, x_scale, x_kind, w_scale, w_kind, output_dtype):
        seen.update(x=x_scale, w=w_scale, kinds=(x_kind.name, w_kind.name))
        values = w.float() * w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (x.float() * x_scale.repeat_interleave(128, 1) @ values).to(output_dtype)

    monkeypatch.setattr("torch.nn.functional.scaled_mm", scaled_mm)
    product = bench_gemm.Product("e4m3", 12, 512, 256, 1, CPU, cold=1)
    exact = product.exact()
    assert bench_gemm.error(product.ours(0), exact) < 3e-3 and bench_gemm.error(product.torchs(0), exact) < 3e-3
    assert seen["kinds"] == ("BlockWise1x128", "BlockWise128x128")
    assert (seen["x"].shape, seen["x"].stride()) == ((12, 4), (1, 12)) and (seen["w"].shape, seen["w"].stride()) == ((4, 2), (1, 4))


@pytest.mark.parametrize("wrong", [["--preset", "huge"], ["--kinds", "bf16,fp4"], ["--tokens", "0"], ["--tokens", "8,x"]])
def test_refusals(wrong, capsys):
    with pytest.raises(SystemExit):
        bench_gemm.main(["--device", "cpu", *wrong])
    assert "expected" in capsys.readouterr().err


def values_of(codes, scales, of_all, rows, K):
    """An NVFP4 matrix as scaled_mm is given it: packed codes, swizzled e4m3 scales, one fp32 scale."""
    code = unpack_k_major(codes.view(torch.uint8), rows, K)
    scale = unswizzle_scales(scales, rows, K // 16).float() * of_all
    return e2m1_to_float(code) * scale.repeat_interleave(16, 1)


def test_every_voice_of_an_nvfp4_product_gets_the_same_numbers(monkeypatch):
    """What scaled_mm is called with, read by its documentation, gives our product once the tokens' scales are there; a scale at a wrong
    place would not."""
    seen = {}

    def scaled_mm(x, w, x_scales, x_recipe, w_scales, w_recipe, x_swizzle, w_swizzle, output_dtype):
        assert x.dtype == w.dtype == torch.float4_e2m1fn_x2 and x_scales[0].dtype == w_scales[0].dtype == torch.float8_e4m3fn
        for recipe, swizzle in ((x_recipe, x_swizzle), (w_recipe, w_swizzle)):
            assert [r.name for r in recipe] == ["BlockWise1x16", "TensorWise"]
            assert [s.name for s in swizzle] == ["SWIZZLE_32_4_4", "NO_SWIZZLE"]
        seen.update(x=x.shape, w=w.shape, strides=w.stride())
        M, K, N = len(x), 2 * x.shape[1], w.shape[1]
        return (values_of(x, *x_scales, M, K) @ values_of(w.T, *w_scales, N, K).T).to(output_dtype)

    monkeypatch.setattr("torch.nn.functional.scaled_mm", scaled_mm)
    monkeypatch.setattr(gemm, "gemm_nvfp4", lambda x, w, tile=None: nvfp4_linear_ref(x, w))
    monkeypatch.setattr(bench_gemm, "nvfp4_linear", nvfp4_linear_ref)
    for name, few in (("COLD", 1), ("GRAPH_US", 1), ("MIN_CALLS", 1), ("WARM", 0), ("TIMED", 1)):
        monkeypatch.setattr(bench_gemm, name, few)
    product = bench_gemm.Product("nvfp4", 130, 352, 264, 1, CPU)
    assert len({float(row) for row in product.x.row_scales}) > 5
    assert product.raw(0) is None  # more tokens than it takes
    row = bench_gemm.measure(product, CPU, False)
    assert (seen["x"], seen["w"], seen["strides"]) == ((130, 176), (176, 264), (1, 176))
    assert "raw_us" not in row and row["ratio"] > 0
    for voice in ("error", "torch_error", "definition_error"):
        assert 0 < row[voice] <= 1.02 * row["rounding"] < 2e-3, voice
    product.weights[0] = product.weights[0]._replace(scales=product.weights[0].scales.roll(16))
    assert bench_gemm.error(product.as_ours(product.torchs(0)), bench_gemm.Product("nvfp4", 130, 352, 264, 1, CPU).exact()) > 0.1
    small = bench_gemm.measure(bench_gemm.Product("nvfp4", 3, 64, 40, 1, CPU), CPU, False)
    assert small["raw_us"] > 0 and small["raw_error"] == small["error"]


def test_kinds_are_those_of_the_gpu(monkeypatch):
    assert bench_gemm.kinds_of(CPU) == ["bf16", "e4m3"]
    for capability, kinds in (((9, 0), ["bf16", "e4m3"]), ((10, 0), ["nvfp4"]), ((10, 3), ["nvfp4"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert bench_gemm.kinds_of(torch.device("cuda", 0)) == kinds
