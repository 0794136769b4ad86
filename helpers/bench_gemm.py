"""How fast the CuTeDSL GEMMs are beside torch's (cuBLAS) at the model's shapes: us, TFLOP/s and their ratio.

    python helpers/bench_gemm.py [--preset pro,flash] [--kinds bf16,e4m3|nvfp4] [--tokens 128,512,2048,8192] [--sweep] [--json FILE]
    python helpers/bench_gemm.py --kinds bf16_grouped,e4m3_grouped --tokens 1024,4096

Weights are read cold: each CUDA graph walks over copies that are 240 MB and more (4 times L2) together. Ours and torch's are replayed in
turn without a pause, so that clocks and heat are the same for both; numbers are medians. bf16 stands beside torch.mm (torch.bmm for wo_a's
groups), e4m3 beside torch.nn.functional.scaled_mm with the same scales, one per token and 128 of K and one per 128 x 128 of the weight;
nvfp4 (Blackwell alone) beside scaled_mm and, up to 128 tokens, the raw CUDA nvfp4_linear, on the same bytes. `error` is a token's distance
to its product in fp32 of the same operands, relative to it, root mean square over the first 256 tokens. --sweep measures every tile, to see
what choice.py missed.

bf16_grouped and e4m3_grouped (Hopper) are the routed experts' products, where each token has chosen as many experts as in the model, at
random; Pro's w1 and w3 in bf16 are 34 GB. They stand beside torch's grouped_mm (of e4m3 with these scales torch has none) and, as "dense",
the rate of torch's product of as many rows with one expert's weight (e4m3: with one scale a tensor). TB/s counts every operand once, of the
weights those of experts that have rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import runtime  # noqa: E402
from dsv4.config import PRESETS, ModelConfig  # noqa: E402
from dsv4.errors import UserError  # noqa: E402
from dsv4.kernels.cute import build, gemm, grouped  # noqa: E402
from dsv4.kernels.cute.choice import choose, predicted_us  # noqa: E402
from dsv4.kernels.cute.tiles import ARCHITECTURES, BITS, SCALE_BLOCK, TILES, Tile  # noqa: E402
from dsv4.kernels.launch import architecture  # noqa: E402
from dsv4.kernels.layouts import SCALE_ROWS, Nvfp4, Nvfp4Operand, swizzle_scales, unswizzle_scales  # noqa: E402
from dsv4.kernels.nvfp4 import MAX_LINEAR_TOKENS, nvfp4_linear  # noqa: E402
from dsv4.ops.grouped import group_choices_ref  # noqa: E402
from dsv4.ops.nvfp4 import nvfp4_linear_ref, to_nvfp4_ref, unpack_nvfp4  # noqa: E402
from helpers.bench_decode import check_outputs, graph_of  # noqa: E402
from single_shot_inference import OneLineParser, whole  # noqa: E402

COLD = 240 << 20
GRAPH_US, MIN_CALLS, MAX_CALLS = 1500, 2, 40  # of a graph
WARM, TIMED, TIMED_SWEEP = 2, 12, 6  # replays
CHECKED = 256  # tokens whose error is looked at
KINDS = "bf16", "e4m3", "nvfp4"  # of tiles.py's those of one product
EXPERTS_KINDS = "bf16_grouped", "e4m3_grouped"  # those of a product an expert; NVFP4's have operands of another form
DISTINCT = 8  # experts whose weights are drawn; the others repeat them
Call = Callable[[], torch.Tensor]


def shapes(config: ModelConfig) -> list[tuple[str, int, int, int]]:
    """(name, K, N, groups) of the linears of a layer that a prompt goes through; not the routed experts, nor what stays fp32."""
    c, heads = config, config.num_attention_heads * config.head_dim
    found = [("wq_a", c.hidden_size, c.q_lora_rank, 1), ("wkv", c.hidden_size, c.head_dim, 1), ("wq_b", c.q_lora_rank, heads, 1),
             ("wo_a", heads // c.o_groups, c.o_lora_rank, c.o_groups), ("wo_b", c.o_groups * c.o_lora_rank, c.hidden_size, 1),
             ("shared w1 w3", c.hidden_size, 2 * c.moe_intermediate_size, 1), ("shared w2", c.moe_intermediate_size, c.hidden_size, 1)]
    if 4 in c.compress_ratios:
        found.append(("index wq_b", c.q_lora_rank, c.index_n_heads * c.index_head_dim, 1))
    return found


def expert_shapes(config: ModelConfig) -> list[tuple[str, int, int]]:
    """(name, K, N) of a routed expert's products."""
    c = config
    return [("experts w1 w3", c.hidden_size, 2 * c.moe_intermediate_size), ("experts w2", c.moe_intermediate_size, c.hidden_size)]


class Product:
    """One shape's operands: x once, as if just made, and so many copies of w that each is read cold."""

    def __init__(self, kind: str, m: int, k: int, n: int, groups: int, device: torch.device, cold: int | None = None):
        self.kind, self.m, self.k, self.n, self.groups = kind, m, k, n, groups
        copies = -(-8 * (COLD if cold is None else cold) // (groups * n * k * BITS[kind]))
        draw = torch.Generator(device).manual_seed(1)
        x = torch.randn(m, groups, k, generator=draw, device=device)
        if kind == "nvfp4":
            # Powers of two: torch's product has one scale for all tokens, and its result times these is rounded as ours is.
            rows = torch.exp2(torch.randint(-8, 9, (m,), generator=draw, device=device).float())
            self.x = to_nvfp4_ref(x[:, 0], swizzled=True)._replace(row_scales=rows)
            self.weights = [self._drawn_nvfp4(draw) for _ in range(copies)]
            return
        self.weights = [torch.randn(groups * n, k, generator=draw, device=device, dtype=torch.bfloat16) for _ in range(copies)]
        if kind == "bf16":
            self.x = x.bfloat16() if groups > 1 else x[:, 0].bfloat16()
            return
        self.x, self.x_scale = gemm.fp8_rows(x[:, 0])
        self.weights = [w.to(torch.float8_e4m3fn) for w in self.weights]
        exponents = torch.randint(-3, 4, (-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)), generator=draw, device=device)
        self.w_scale = torch.exp2(exponents.float())

    def _drawn_nvfp4(self, draw: torch.Generator) -> Nvfp4Operand:
        """Any codes; scales from 0.5 to 3.75."""
        def drawn(low, high, columns):
            return torch.randint(low, high, (self.n, columns), generator=draw, device=draw.device, dtype=torch.uint8)

        return Nvfp4Operand(drawn(0, 256, self.k // 2), swizzle_scales(drawn(0x30, 0x48, self.k // 16)), 0.0123)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(M, N, K, groups) as choice.py takes them."""
        return self.m, self.n, self.k, self.groups

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.groups

    def ours(self, i: int, tile: Tile | None = None) -> Call:
        w = self.weights[i % len(self.weights)]
        if self.kind == "nvfp4":
            return lambda: gemm.gemm_nvfp4(self.x, w, tile)
        if self.kind == "bf16":
            return lambda: gemm.gemm(self.x, w, tile)
        return lambda: gemm.gemm_fp8(self.x, self.x_scale, w, self.w_scale, tile)

    def torchs(self, i: int) -> Call:
        w = self.weights[i % len(self.weights)]
        if self.kind == "bf16" and self.groups == 1:
            return lambda: torch.mm(self.x, w.T)
        if self.kind == "bf16":
            by_group, w = self.x.transpose(0, 1), w.view(self.groups, self.n, self.k).transpose(1, 2)
            return lambda: torch.bmm(by_group, w).transpose(0, 1)
        from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

        if self.kind == "nvfp4":
            recipe, swizzle = [ScalingType.BlockWise1x16, ScalingType.TensorWise], [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
            (x, x_scales), (y, y_scales) = ((part.values.view(torch.float4_e2m1fn_x2), part.scales.view(torch.float8_e4m3fn))
                                            for part in (self.x, w))
            one, all_of = (torch.tensor([scale], device=x.device) for scale in (1.0, w.scale))
            return lambda: scaled_mm(x, y.T, [x_scales, one], recipe, [y_scales, all_of], recipe, swizzle, swizzle,
                                     output_dtype=torch.bfloat16)
        scales = self.x_scale[:, : self.m].T, ScalingType.BlockWise1x128, self.w_scale.T, ScalingType.BlockWise128x128
        return lambda: scaled_mm(self.x, w.T, *scales, output_dtype=torch.bfloat16)

    def raw(self, i: int) -> Call | None:
        """The raw CUDA kernel of the same product, where there is one."""
        if self.kind != "nvfp4" or self.m > MAX_LINEAR_TOKENS:
            return None
        return lambda: nvfp4_linear(self.x, self.weights[i % len(self.weights)])

    def definition(self) -> Call | None:
        """The torch definition of the first tokens' product with copy 0, where it is an operation of ours."""
        return (lambda: nvfp4_linear_ref(self._first(), self.weights[0])) if self.kind == "nvfp4" else None

    def as_ours(self, theirs: Call) -> Call:
        """torch's product with the tokens' scales, which its nvfp4 form has not."""
        return (lambda: theirs().float() * self.x.row_scales[:, None]) if self.kind == "nvfp4" else theirs

    def _first(self) -> Nvfp4:
        """The first tokens, their scales plain."""
        x = self.x
        return Nvfp4(x.values[:CHECKED], x.plain_scales()[:CHECKED], x.row_scales[:CHECKED], False)

    def exact(self) -> torch.Tensor:
        """The first tokens' product with copy 0 in fp32."""
        if self.kind == "nvfp4":
            w = self.weights[0]
            scales, of_all = unswizzle_scales(w.scales, self.n, self.k // 16), torch.full((self.n,), w.scale, device=w.values.device)
            return unpack_nvfp4(self._first()) @ unpack_nvfp4(Nvfp4(w.values, scales, of_all, False)).T
        m, w = min(self.m, CHECKED), self.weights[0].float()
        if self.kind == "bf16":
            x = self.x[:m].float().view(m, self.groups, self.k)
            return torch.einsum("mgk,gnk->mgn", x, w.view(self.groups, self.n, self.k))
        x = self.x[:m].float() * self.x_scale[:, :m].T.repeat_interleave(SCALE_BLOCK, 1)[:, : self.k]
        w *= self.w_scale.repeat_interleave(SCALE_BLOCK, 0)[: self.n].repeat_interleave(SCALE_BLOCK, 1)[:, : self.k]
        return x @ w.T


class Experts(Product):
    """A product of each routed expert: tokens' rows by expert, and `groups` of them."""

    def __init__(self, kind: str, tokens: int, k: int, n: int, experts: int, slots: int, device: torch.device, cold: int | None = None):
        self.kind, self.m, self.k, self.n, self.groups = kind, tokens, k, n, experts
        copies = -(-8 * (COLD if cold is None else cold) // (experts * n * k * BITS[kind]))
        draw = torch.Generator(device).manual_seed(1)
        chosen = torch.rand(tokens, experts, generator=draw, device=device).topk(slots).indices.int()
        self.chosen = group_choices_ref(chosen, experts)
        self.rows = tokens * slots
        self.used = int((self.chosen.offsets.diff() > 0).sum())
        x = torch.randn(tokens, k, generator=draw, device=device)[self.chosen.order.long() // slots]
        self.weights = [self._drawn(draw) for _ in range(copies)]
        if kind == "bf16_grouped":
            self.x = x.bfloat16()
            return
        self.x, self.x_scale = grouped.grouped_fp8_rows(x, self.chosen)
        exponents = torch.randint(-3, 4, (experts, -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)), generator=draw, device=device)
        self.w_scale = torch.exp2(exponents.float())

    def _drawn(self, draw: torch.Generator) -> torch.Tensor:
        """[experts, n, k], with nothing as large beside it."""
        values = torch.randn(min(DISTINCT, self.groups), self.n, self.k, generator=draw, device=draw.device, dtype=torch.bfloat16)
        values = values if self.kind == "bf16_grouped" else values.to(torch.float8_e4m3fn)
        w = torch.empty(self.groups, self.n, self.k, dtype=values.dtype, device=draw.device)
        for e in range(self.groups):
            w[e] = values[e % len(values)]
        return w

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        some = min(self.rows, self.groups)
        return -(-self.rows // some), self.n, self.k, some

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.n * self.k

    @property
    def bytes(self) -> float:
        """Of x, the weights of experts with rows and the result, scales left out."""
        return (self.used * self.n + self.rows) * self.k * BITS[self.kind] / 8 + 2 * self.rows * self.n

    def ours(self, i: int, tile: Tile | None = None) -> Call:
        w = self.weights[i % len(self.weights)]
        if self.kind == "bf16_grouped":
            return lambda: grouped.grouped_gemm(self.x, self.chosen, w, tile)
        return lambda: grouped.grouped_gemm_fp8(self.x, self.x_scale, self.chosen, w, self.w_scale, tile)

    def torchs(self, i: int) -> Call:
        if self.kind != "bf16_grouped":
            raise NotImplementedError("torch has no grouped product with a scale per token and 128 of K")
        from torch.nn.functional import grouped_mm

        w, ends = self.weights[i % len(self.weights)].transpose(1, 2), self.chosen.offsets[1:]
        return lambda: grouped_mm(self.x, w, offs=ends)

    def dense(self, i: int) -> Call:
        """torch's product of all rows with one expert's weight."""
        w = self.weights[i % len(self.weights)][i % self.groups].T
        if self.kind == "bf16_grouped":
            return lambda: torch.mm(self.x, w)
        from torch.nn.functional import ScalingType, scaled_mm

        one = torch.ones(1, device=w.device)
        return lambda: scaled_mm(self.x, w, one, ScalingType.TensorWise, one, ScalingType.TensorWise, output_dtype=torch.bfloat16)

    def exact(self) -> torch.Tensor:
        """The first rows' products with copy 0 in fp32."""
        parts = []
        for e, first, rows, tile in self.chosen.tiles[: self.chosen.counts[0]].tolist():
            x, w = self.x[first : min(first + rows, CHECKED)].float(), self.weights[0][e].float()
            if self.kind != "bf16_grouped":
                scales = self.x_scale[:, SCALE_ROWS * tile : SCALE_ROWS * tile + len(x)].T
                x *= scales.repeat_interleave(SCALE_BLOCK, 1)[:, : self.k]
                w *= self.w_scale[e].repeat_interleave(SCALE_BLOCK, 0)[: self.n].repeat_interleave(SCALE_BLOCK, 1)[:, : self.k]
            parts.append(x @ w.T)
            if first + rows >= CHECKED:
                break
        return torch.cat(parts)


def error(call: Call, exact: torch.Tensor) -> float:
    """Of the first tokens' result, relative, root mean square over tokens (and groups)."""
    got = call()[: len(exact)].float().view(exact.shape)
    return float(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).square().mean().sqrt())


def medians(device: torch.device, graphs: list[Call], timed: int) -> list[float]:
    """us of a replay of each, one after the other in every round; the host waits for nothing in between."""
    events, times = [], [[] for _ in graphs]
    for n in range(WARM + timed):
        for graph, mine in zip(graphs, times, strict=True):
            if device.type == "cpu":
                start = time.perf_counter()
                graph()
                mine.append(1e6 * (time.perf_counter() - start))
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph()
            end.record()
            if n >= WARM:
                events.append((mine, begin, end))
    if events:
        torch.cuda.synchronize(device)
    for mine, begin, end in events:
        mine.append(1e3 * begin.elapsed_time(end))
    return [statistics.median(t) for t in times]


def measure(product: Product, device: torch.device, sweep: bool) -> dict:
    """Ours, torch's and, for `sweep`, every tile, in turn."""
    p = product
    arguments = *p.sizes, gemm.processors(device)
    chosen, exact = choose(p.kind, *arguments), p.exact()
    tiles = [chosen] + [t for t in TILES if sweep and t.kind == p.kind and t != chosen]
    calls = min(MAX_CALLS, max(MIN_CALLS, len(p.weights), round(GRAPH_US / predicted_us(chosen, *arguments))))
    row = {"kind": p.kind, "tokens": p.m, "K": p.k, "N": p.n, "groups": p.groups, "tile": chosen.name, "calls": calls,
           "error": error(p.ours(0), exact), "rounding": error(exact.bfloat16, exact)}
    graphs, others = [graph_of(device, [p.ours(i, tile) for i in range(calls)]) for tile in tiles], []
    if p.definition() is not None:
        row["definition_error"] = error(p.definition(), exact)
    if p.raw(0) is not None:
        row["raw_error"] = error(p.raw(0), exact)
        others.append("raw_us")
        graphs.append(graph_of(device, [p.raw(i) for i in range(calls)]))
    try:
        row["torch_error"] = error(p.as_ours(p.torchs(0)), exact)
        graphs.append(graph_of(device, [p.torchs(i) for i in range(calls)]))
        others.append("torch_us")
    except (RuntimeError, ValueError, ImportError, AttributeError) as refusal:  # a torch that lacks this form: ours is all the same
        row["torch_refuses"] = str(refusal).splitlines()[0]
    if isinstance(p, Experts):
        try:
            graphs.append(graph_of(device, [p.dense(i) for i in range(calls)]))
            others.append("dense_us")
        except (RuntimeError, ValueError, ImportError) as refusal:
            row["dense_refuses"] = str(refusal).splitlines()[0]
    times = [t / calls for t in medians(device, graphs, TIMED_SWEEP if sweep else TIMED)]
    row["us"], row["tflops"] = times[0], 1e-6 * p.flops / times[0]
    row |= dict(zip(others, times[len(tiles) :], strict=True))
    if isinstance(p, Experts):
        row |= {"rows": p.rows, "experts_with_rows": p.used, "tb_s": 1e-6 * p.bytes / times[0]}
        if "dense_us" in row:
            row["dense_tflops"] = 1e-6 * p.flops / row["dense_us"]
    if "torch_us" in row:
        row["ratio"] = row["torch_us"] / row["us"]
    if sweep:
        row["tiles"] = {tile.name: {"us": us, "predicted_us": predicted_us(tile, *arguments), "error": error(p.ours(0, tile), exact)}
                        for tile, us in zip(tiles, times, strict=False)}
    return row


HEADER = (f"{'':<20}{'kind':>13}{'K':>7}{'N':>7}{'grp':>4}{'tokens':>7}{'us':>9}{'TFLOP/s':>8}{'torch us':>9}{'ratio':>7}{'error':>9}"
          f"{'torch':>9}{'raw us':>9}  tile")


def line(row: dict) -> str:
    """A row of the table: ratio above 1 means that ours is faster."""
    best = ""
    if "tiles" in row:
        name, found = min(row["tiles"].items(), key=lambda item: item[1]["us"])
        best = f"  best {name.removeprefix('gemm_')} {found['us']:.1f}, worst error {max(t['error'] for t in row['tiles'].values()):.1e}"
    if "tb_s" in row:
        best += f"  {row['tb_s']:.2f} TB/s" + (f", dense {row['dense_tflops']:.0f} TFLOP/s" if "dense_us" in row else "")
    peer = f"{row['torch_us']:9.1f}{row['ratio']:7.2f}" if "ratio" in row else f"{'-':>9}{'-':>7}"
    theirs = f"{row['torch_error']:9.1e}" if "torch_error" in row else f"{'-':>9}"
    theirs += f"{row['raw_us']:9.1f}" if "raw_us" in row else f"{'-':>9}"
    return (f"{row['row']:<20}{row['kind']:>13}{row['K']:>7}{row['N']:>7}{row['groups']:>4}{row['tokens']:>7}{row['us']:9.1f}"
            f"{row['tflops']:8.0f}{peer}{row['error']:9.1e}{theirs}  {row['tile'].removeprefix('gemm_')}{best}")


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers are of, with clocks and power at this moment where nvidia-smi tells."""
    if device.type == "cpu":
        return {"device": "cpu"}
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found = "unknown"
    return {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, query: found}


def kinds_of(device: torch.device) -> list[str]:
    """The products that a GPU has kernels for; on a CPU, where the plumbing is tested, Hopper's."""
    arch = architecture(device) if device.type == "cuda" else "sm_90a"
    return [kind for kind in KINDS if arch in ARCHITECTURES[kind]]


def names(known: list[str]) -> Callable[[str], list[str]]:
    """An argument type: names out of these, with commas."""
    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected names out of {', '.join(known)}, found {name[:40]!r}")
        return text.split(",")
    return parse


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", type=names(sorted(PRESETS)), default=["pro", "flash"], help="default: pro,flash")
    kinds = [*KINDS, *EXPERTS_KINDS]
    parser.add_argument("--kinds", type=names(kinds), help=f"out of {', '.join(kinds)} (default: the GPU's of {', '.join(KINDS)})")
    parser.add_argument("--tokens", type=lambda text: [whole(1)(part) for part in text.split(",")], default=[128, 512, 2048, 8192],
                        help="of a step, with commas (default: 128,512,2048,8192)")
    parser.add_argument("--sweep", action="store_true", help="every tile, not the chosen one alone")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        check_outputs(args.json, None)
        device = runtime.resolve_device(args.device, "a machine with one")
        args.kinds = args.kinds or kinds_of(device)
        runtime.prepare_torch(1 << 30)
        start, results = machine(device), []
        if device.type != "cpu":
            build.build_ahead([t for t in TILES if t.kind in args.kinds], architecture(device))
        print(HEADER)
        for preset in args.preset:
            for name, k, n, groups in shapes(PRESETS[preset]):
                for kind in (kind for kind in args.kinds if kind in KINDS):
                    if kind != "bf16" and groups > 1:
                        continue  # wo_a's activations stay bf16
                    for m in args.tokens:
                        row = measure(Product(kind, m, k, n, groups, device), device, args.sweep)
                        results.append({"row": f"{preset} {name}"} | row)
                        print(line(results[-1]), flush=True)
            config = PRESETS[preset]
            for name, k, n in expert_shapes(config):
                for kind in (kind for kind in args.kinds if kind in EXPERTS_KINDS):
                    for m in args.tokens:
                        sizes = m, k, n, config.n_routed_experts, config.num_experts_per_tok
                        results.append({"row": f"{preset} {name}"} | measure(Experts(kind, *sizes, device), device, args.sweep))
                        print(line(results[-1]), flush=True)
        measured = {"start": start, "end": machine(device), "results": results}
        print(json.dumps({key: measured[key] for key in ("start", "end")}))
        if args.json:
            args.json.write_text(json.dumps(measured, indent=1))
    except UserError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return wrong.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
