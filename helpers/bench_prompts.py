"""How fast the products for prompts on packed weights are (dsv4/kernels/prompts.py), at the model's shapes, on a Hopper GPU.

    python helpers/bench_prompts.py [--preset pro,flash] [--formats nvfp4,fp8] [--tokens 1024,4096] [--sweep] [--experts] [--json FILE]

Dense: one weight, read cold (copies of 240 MB and more together), beside torch.mm of the same shape in bf16 on the same values; both are
replayed in turn. `tile` is the product's cut: tokens of a tile, and parts that share K. `rate` is torch's time over ours, the fraction of
the bf16 dense rate that is reached; `arrange` is the time to bring x into its order of columns, once for all weights of an input, and
`with it` the rate if one product pays for it alone. --sweep measures every cut, of experts those of one part.

--experts: a layer's routed experts at true size, in NVFP4, all with memory of their own, for a random choice: w1 with w3 and SwiGLU, w2,
and all of `moe` without the shared expert. `rate` is that of the products beside torch.mm's in bf16 on as many rows (S * k) by one
expert's w1 and w3, which is the bf16 dense rate; `floor` is the time to read the weights of the chosen experts once at 4.3 TB/s, which
few tokens an expert cannot beat. Values repeat after 8 experts. `error` is the distance to the product in fp32 of the same values,
relative to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import formats, runtime  # noqa: E402
from dsv4.config import PRESETS, ModelConfig  # noqa: E402
from dsv4.errors import UserError  # noqa: E402
from dsv4.kernels import grouped, launch, prompts  # noqa: E402
from dsv4.kernels.experts import PackedExperts, pack_experts  # noqa: E402
from dsv4.kernels.linear import pack_weights  # noqa: E402
from dsv4.ops.experts import Expert  # noqa: E402
from helpers.bench_decode import check_outputs  # noqa: E402
from helpers.bench_gemm import COLD, GRAPH_US, MAX_CALLS, MIN_CALLS, error, machine, medians, names, shapes  # noqa: E402
from helpers.timing import Call, graph_of  # noqa: E402
from single_shot_inference import OneLineParser, whole  # noqa: E402

FORMATS = {"nvfp4": formats.quantize_nvfp4, "mxfp4": formats.quantize_mxfp4, "fp8": formats.quantize_fp8_block,
           "plain": lambda w: formats.Weight.plain(w.bfloat16())}
CHECKED, TIMED = 64, 10  # tokens whose error is looked at; replays
DISTINCT = 8  # experts with values of their own
READ = 4.3e6  # bytes a us, of the floor
RATE = 700e6  # additions and multiplications a us: the guess that a graph's number of calls is made of


class Dense:
    """One shape's operands: x once, and so many copies of the weight that each is read cold."""

    def __init__(self, kind: str, m: int, k: int, n: int, groups: int, device: torch.device):
        draw = torch.Generator(device).manual_seed(1)
        self.m, self.k, self.n, self.groups = m, k, n, groups
        self.x = torch.randn(*((m, groups, k) if groups > 1 else (m, k)), generator=draw, device=device, dtype=torch.bfloat16)
        weight = FORMATS[kind](torch.randn(groups * n, k, generator=draw, device=device) * k**-0.5)
        packed, self.values = pack_weights((weight,)), weight.dequantize()
        self.packed = [packed._replace(data=packed.data.clone()) for _ in range(max(1, -(-COLD // packed.nbytes)))]
        self.copies = [self.values.bfloat16() for _ in range(max(1, -(-COLD // (2 * self.values.numel()))))]  # torch's, which are rounded
        self.short = prompts.takes_short_order(int(packed.table[0, 1]))
        self.arranged = self.arrange()

    def arrange(self) -> prompts.Arranged:
        return prompts.arrange(self.x, self.short)

    def ours(self, i: int, tile: prompts.Cut | None = None) -> Call:
        weight = self.packed[i % len(self.packed)]
        if self.groups > 1:
            return lambda: prompts.grouped_linear(self.arranged, weight, tile)
        return lambda: prompts.linear(self.arranged, weight, tile)[0]

    def torchs(self, i: int) -> Call:
        w = self.copies[i % len(self.copies)]
        if self.groups == 1:
            return lambda: torch.mm(self.x, w.T)
        by_group, w = self.x.transpose(0, 1), w.view(self.groups, self.n, self.k).transpose(1, 2)
        return lambda: torch.bmm(by_group, w).transpose(0, 1)

    def exact(self) -> torch.Tensor:
        x = self.x[:CHECKED].float().view(-1, self.groups, self.k)
        return torch.einsum("mgk,gnk->mgn", x, self.values.view(self.groups, self.n, self.k))


def measure_dense(kind: str, m: int, k: int, n: int, groups: int, device: torch.device, sweep: bool) -> dict:
    p = Dense(kind, m, k, n, groups, device)
    exact, flops = p.exact(), 2.0 * m * k * n * groups
    calls = min(MAX_CALLS, max(MIN_CALLS, round(GRAPH_US / (flops / RATE))))
    tiles = [None, *(prompts.CUTS if sweep else ())]
    graphs = [graph_of(device, [p.ours(i, tile) for i in range(calls)]) for tile in tiles]
    graphs += [graph_of(device, [p.torchs(i) for i in range(calls)]), graph_of(device, [p.arrange] * calls)]
    *ours, theirs, arrange = (t / calls for t in medians(device, graphs, TIMED))
    most, parts = prompts.cut(m, groups * n, k, None, prompts.blocks_of(device))
    row = {"kind": kind, "tokens": m, "K": k, "N": n, "groups": groups, "tile": most, "parts": parts, "us": ours[0],
           "tflops": 1e-6 * flops / ours[0], "torch_us": theirs, "rate": theirs / ours[0], "arrange_us": arrange,
           "rate_with_arrange": theirs / (ours[0] + arrange), "error": error(p.ours(0), exact), "torch_error": error(p.torchs(0), exact)}
    if sweep:
        row["tiles"] = {f"{most}x{parts}": us for (most, parts), us in zip(prompts.CUTS, ours[1:], strict=True)}
    return row


def many_experts(config: ModelConfig, device: torch.device) -> tuple[PackedExperts, list[list[torch.Tensor]]]:
    """All routed experts of a layer, packed, and the values of the first ones (w1, w2, w3 in bf16): expert e has those of e modulo their
    number."""
    draw, c = torch.Generator(device).manual_seed(1), config
    D, inner, few = c.hidden_size, c.moe_intermediate_size, min(DISTINCT, c.n_routed_experts)

    def quantized(rows, columns):
        return formats.quantize_nvfp4(torch.randn(rows, columns, generator=draw, device=device) * columns**-0.5)

    distinct = [Expert(quantized(inner, D), quantized(D, inner), quantized(inner, D)) for _ in range(few)]
    packed, index = pack_experts(distinct, distinct[0]), torch.arange(c.n_routed_experts, device=device) % few
    factors = torch.cat((packed.factors[:-1][index], packed.factors[-1:]))
    return (packed._replace(up_routed=packed.up_routed[index], down_routed=packed.down_routed[index], factors=factors),
            [[w.dequantize().bfloat16() for w in e] for e in distinct])


def measure_experts(config: ModelConfig, packed: PackedExperts, values, m: int, device: torch.device, sweep: bool) -> list[dict]:
    """Rows for w1 with w3, for w2 and for everything."""
    D, inner, E, k = packed.columns, packed.inner, config.n_routed_experts, config.num_experts_per_tok
    draw = torch.Generator(device).manual_seed(2)
    x = torch.randn(m, D, generator=draw, device=device, dtype=torch.bfloat16)
    chosen = torch.rand(m, E, generator=draw, device=device).topk(k, 1).indices.int()
    weights = torch.rand(m, k, generator=draw, device=device) + 0.1
    up, down, limit = packed.formats[1], packed.formats[3], 10.0
    factors, no_shared = packed.factors[:E], torch.zeros(m, D, device=device)
    routing = prompts.route(chosen, weights, E)

    def gather(by=routing):
        return prompts.arrange(x, False, by.source)

    def first(of=None, tile=None, by=routing):
        return prompts.expert_up(of or rows, packed.up_routed, up, down, factors, inner, limit, by, tile)

    def second(of=None, tile=None, by=routing):
        return prompts.expert_down(of or hidden, packed.down_routed, down, factors, D, by, tile)

    def everything():
        by = prompts.route(chosen, weights, E)
        return grouped.sum_choices(second(first(gather(by), by=by), by=by), by.groups, no_shared)

    rows = gather()
    hidden = first()
    got, exact = everything()[:CHECKED].float(), torch.zeros(min(m, CHECKED), D, device=device)
    for t in range(len(exact)):
        for e, weight in zip(chosen[t].tolist(), weights[t].tolist(), strict=True):
            w1, w2, w3 = (v.float() for v in values[e % len(values)])
            gate, upper = (w1 @ x[t].float()).clamp(max=limit), (w3 @ x[t].float()).clamp(-limit, limit)
            exact[t] += w2 @ (torch.nn.functional.silu(gate) * upper * weight)
    distance = float((got - exact).norm() / exact.norm())
    dense_x = torch.randn(m * k, D, generator=draw, device=device, dtype=torch.bfloat16)
    dense_w = torch.cat((values[0][0], values[0][2]))
    torch_rate = 2.0 * m * k * D * len(dense_w)
    calls = {"w1 w3": first, "w2": second, "moe": everything, "gather": gather}
    if sweep:
        calls |= {(name, tile): lambda of=of, tile=tile: of(None, tile) for name, of in (("w1 w3", first), ("w2", second))
                  for tile in prompts.CUTS if tile.parts == 1}
    graphs = [graph_of(device, [call] * MIN_CALLS) for call in (*calls.values(), lambda: torch.mm(dense_x, dense_w.T))]
    *times, dense = (t / MIN_CALLS for t in medians(device, graphs, TIMED))
    torch_rate /= dense
    live, found = len(torch.unique(chosen)), []
    times = dict(zip(calls, times, strict=True))
    for name, matrices, size in (("w1 w3", 2, packed.up_routed[0].numel()), ("w2", 1, packed.down_routed[0].numel()),
                                 ("moe", 3, packed.up_routed[0].numel() + packed.down_routed[0].numel())):
        flops = 2.0 * m * k * D * inner * matrices
        row = {"kind": "nvfp4", "part": name, "tokens": m, "experts": live, "us": times[name], "tflops": 1e-6 * flops / times[name],
               "torch_tflops": 1e-6 * torch_rate, "rate": flops / times[name] / torch_rate, "floor_us": live * size / READ,
               "of_floor": live * size / READ / times[name], "error": distance, "gather_us": times["gather"]}
        if sweep and name != "moe":
            row["tiles"] = {f"{call[1].most}x1": us for call, us in times.items() if call[0] == name}
        found.append(row)
    return found


def sizes(row: dict) -> str:
    return "  " + ", ".join(f"{tile}: {us:.1f}" for tile, us in row["tiles"].items()) if "tiles" in row else ""


DENSE_HEADER = (f"{'':<20}{'kind':>6}{'K':>7}{'N':>7}{'grp':>4}{'tokens':>7}{'tile':>8}{'us':>9}{'TFLOP/s':>8}{'torch us':>9}{'rate':>6}"
                f"{'arrange':>8}{'with it':>8}{'error':>9}{'torch':>9}")
EXPERTS_HEADER = (f"{'':<20}{'kind':>6}{'part':>7}{'tokens':>7}{'experts':>8}{'us':>9}{'TFLOP/s':>8}{'dense':>7}{'rate':>6}{'floor us':>9}"
                  f"{'of it':>6}{'gather':>8}{'error':>9}")


def dense_line(r: dict) -> str:
    return (f"{r['row']:<20}{r['kind']:>6}{r['K']:>7}{r['N']:>7}{r['groups']:>4}{r['tokens']:>7}{r['tile']:>6}x{r['parts']}"
            f"{r['us']:9.1f}{r['tflops']:8.0f}{r['torch_us']:9.1f}{r['rate']:6.2f}{r['arrange_us']:8.1f}{r['rate_with_arrange']:8.2f}"
            f"{r['error']:9.1e}{r['torch_error']:9.1e}" + sizes(r))


def experts_line(r: dict) -> str:
    return (f"{r['row']:<20}{r['kind']:>6}{r['part']:>7}{r['tokens']:>7}{r['experts']:>8}{r['us']:9.1f}{r['tflops']:8.0f}"
            f"{r['torch_tflops']:7.0f}{r['rate']:6.2f}{r['floor_us']:9.1f}{r['of_floor']:6.2f}{r['gather_us']:8.1f}{r['error']:9.1e}"
            + sizes(r))


def check_device(device: torch.device) -> None:
    """Raises UserError, before weights are drawn, where the kernels do not run: they need Hopper's wgmma, or the tests' emulator."""
    if device.type == "cpu":
        if launch.emulator is None:
            raise UserError("--device: expected a Hopper GPU such as cuda:0, found cpu: helpers/bench_cpu.py measures there")
    elif (arch := launch.architecture(device)) != "sm_90a":
        raise UserError(f"--device: expected a Hopper GPU, found {torch.cuda.get_device_name(device)} ({arch}): its prompts go through the "
                        "kernels of decode, which helpers/bench_decode.py measures")


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", type=names(sorted(PRESETS)), default=["pro", "flash"], help="default: pro,flash")
    parser.add_argument("--formats", type=names(list(FORMATS)), default=["nvfp4"], help="of dense weights (default: nvfp4)")
    parser.add_argument("--tokens", type=lambda text: [whole(1)(part) for part in text.split(",")], default=[1024, 4096],
                        help="of a step, with commas (default: 1024,4096)")
    parser.add_argument("--sweep", action="store_true", help="every cut, not the chosen one alone")
    parser.add_argument("--experts", action="store_true", help="the routed experts in place of the dense products")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        check_outputs(args.json, None)
        device = runtime.resolve_device(args.device, "a machine with one")
        check_device(device)
        runtime.prepare_torch(1 << 30)
        start, results = machine(device), []
        print(EXPERTS_HEADER if args.experts else DENSE_HEADER)
        for preset in args.preset:
            config = PRESETS[preset]
            if args.experts:
                packed, values = many_experts(config, device)
                for m in args.tokens:
                    for row in measure_experts(config, packed, values, m, device, args.sweep):
                        results.append({"row": f"{preset} experts"} | row)
                        print(experts_line(results[-1]), flush=True)
                continue
            for name, k, n, groups in shapes(config):
                for kind in args.formats:
                    for m in args.tokens:
                        row = measure_dense(kind, m, k, n, groups, device, args.sweep)
                        results.append({"row": f"{preset} {name}"} | row)
                        print(dense_line(results[-1]), flush=True)
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
