"""How near decoding runs to the memory roof: us, TB/s and fraction of the floor per operation, per kind of layer and for the whole model.

    python helpers/bench_decode.py --preset pro [--format nvidia|all-nvfp4] [--context 4096] [--tokens 1] [--json FILE] [--plot FILE]

Random weights of true size are drawn on the GPU; no checkpoint is needed. Every number is a median over replays of a CUDA graph of at
least 50 calls that walk over copies of the weights, 400 MB and more apart, so that nothing is read again from L2 (50 MB). The whole model
is its layers by kind, the embedding's and the head's step and, for 8 GPUs, 7 hops. The floor is packed bytes, scales included, over --roof.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import ops, runtime  # noqa: E402
from dsv4.config import PRESETS, ModelConfig  # noqa: E402
from dsv4.errors import UserError  # noqa: E402
from dsv4.layers import Numerics  # noqa: E402
from dsv4.layers.mhc import Streams  # noqa: E402
from dsv4.layers.step import Step  # noqa: E402
from dsv4.model import Model  # noqa: E402
from dsv4.ops import backend  # noqa: E402
from dsv4.plan import DevicePlan, Plan  # noqa: E402
from dsv4.sampler import Sampler, Sampling  # noqa: E402
from helpers.make_checkpoint import FORMATS  # noqa: E402
from helpers.synthetic import SyntheticCheckpoint  # noqa: E402
from single_shot_inference import OneLineParser, whole  # noqa: E402

CALLS, WARM, TIMED = 50, 3, 20
COLD = 400 << 20  # bytes between two reads of the same weight
HOPS, HOP_US = 7, 8.7  # of 8 GPUs; us of a hop, as events on two H200 measured it
Call = Callable[[], object]


# ------------------------------------------------------------------------------------------------------------- timing


def graph_of(device: torch.device, calls: list[Call]) -> Call:
    """The calls, one after the other, as one CUDA graph; on a CPU, where only the plumbing is tested, as they are."""
    if device.type == "cpu":
        return lambda: [call() for call in calls]
    for call in calls[: len(calls) // 2 + 1]:  # builds and loads what a capture cannot
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def interleaved(device: torch.device, graphs: list[Call]) -> list[list[float]]:
    """Microseconds of each replay of each graph, a round of all graphs after the other, so that clocks and heat are the same for all."""
    times: list[list[float]] = [[] for _ in graphs]
    for n in range(WARM + TIMED):
        for graph, mine in zip(graphs, times, strict=True):
            if device.type == "cpu":
                start = time.perf_counter()
                graph()
                elapsed = 1e6 * (time.perf_counter() - start)
            else:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph()
                end.record()
                end.synchronize()
                elapsed = 1e3 * begin.elapsed_time(end)
            if n >= WARM:
                mine.append(elapsed)
    return times


def spread(times: list[float], calls: int) -> dict[str, float]:
    """Median, 10th and 90th percentile of one call."""
    ordered = sorted(t / calls for t in times)
    return {"us": statistics.median(ordered), "p10": ordered[len(ordered) // 10], "p90": ordered[-1 - len(ordered) // 10]}


def kernels_of(device: torch.device, call: Call) -> int | None:
    """Kernels that one call launches, counted by the profiler; None on a CPU."""
    if device.type == "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize(device)
    return sum(1 for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA and "memcpy" not in event.name.lower())


# -------------------------------------------------------------------------------------------------------------- bytes


def step_bytes(checkpoint: SyntheticCheckpoint, layer: int, context: int, tokens: int) -> dict[str, int]:
    """Bytes that each operation must read for a step at the end of `context`, by the row it has in the table.

    Routed experts: top_k of one token; for several tokens the expected number of distinct ones under uniform routing.
    """
    c, p, ratio = checkpoint.config, f"layers.{layer}.", checkpoint.config.compress_ratios[layer]

    def weights(*names: str) -> int:
        return sum(checkpoint.bytes_of(n) for name, n in checkpoint.needs.items() if n.linear and name in {p + x for x in names})

    compressor = ("attn.compressor.wkv", "attn.compressor.wgate") if ratio else ()
    indexer = ("attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate", "attn.indexer.weights_proj") if ratio == 4 else ()
    expert = weights(*(f"ffn.experts.0.{w}" for w in ("w1", "w2", "w3")))
    E, k = c.n_routed_experts, c.num_experts_per_tok
    distinct = E * (1 - (1 - k / E) ** tokens)
    entries = context // ratio if ratio else 0
    row = c.head_dim + c.qk_rope_head_dim + 8  # FP8, bf16 rotary dims, scales
    attended = min(context, c.sliding_window) + (min(entries, c.index_topk) if ratio == 4 else entries)
    fn = checkpoint.bytes_of(checkpoint.needs[p + "hc_attn_fn"])
    rows = {
        "mhc_pre attn": fn, "projections of x": weights("attn.wq_a", "attn.wkv", *compressor, *indexer),
        "update_caches": 0, "projections of q": weights("attn.wq_b", *(("attn.indexer.wq_b",) if ratio == 4 else ())),
        "attention": attended * row, "wo_a": weights("attn.wo_a"), "wo_b": weights("attn.wo_b"), "mhc_pre ffn": fn,
        "router": checkpoint.bytes_of(checkpoint.needs[p + "ffn.gate.weight"]),
        "moe": round(distinct * expert) + weights(*(f"ffn.shared_experts.{w}" for w in ("w1", "w2", "w3"))),
    }
    if ratio == 4:
        scored = entries if entries > c.index_topk else 0
        rows |= {"index_scores": scored * (c.index_head_dim // 2 + c.index_head_dim // 32), "select_entries": 4 * scored}
    return rows


ROWS = {  # operation -> its table rows, in the order of its calls within a layer
    "mhc_pre": ("mhc_pre attn", "mhc_pre ffn"), "projections": ("projections of x", "projections of q"),
    "update_caches": ("update_caches",), "index_scores": ("index_scores",), "select_entries": ("select_entries",),
    "attention": ("attention",), "grouped_linear": ("wo_a",), "linear": ("wo_b",), "router": ("router",), "moe": ("moe",),
}


# ------------------------------------------------------------------------------------------------------------ measure


class Bench:
    """Copies of each kind of layer, at the end of a context, and what their steps take."""

    def __init__(self, config: ModelConfig, format: str, device: torch.device, context: int, tokens: int, backend_name: str):
        self.config, self.device, self.context, self.tokens = config, device, context, tokens
        ops.select_backend(backend_name)
        self.checkpoint = SyntheticCheckpoint(config, format, device)
        self.kinds = self._kinds()
        layers = tuple(sorted(n for layers in self.kinds.values() for n in layers))
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        plan = Plan(layers, (DevicePlan(device, layers, 0, 0, 0, 0),), context, tokens, False)
        self.model = Model(self.checkpoint, plan, Numerics(dtype=dtype))
        self.cache = self.model.new_cache()
        self._fill()
        generator = torch.Generator(device).manual_seed(1)
        self.ids = torch.randint(config.vocab_size, (tokens,), generator=generator, device=device)
        self.positions = torch.arange(context - tokens, context, device=device)
        self.X = self.model.embedded(self.ids)

    def _kinds(self) -> dict[str, list[int]]:
        """Kind -> layers that stand for it: as many as it takes for COLD bytes a round, with a learned router where there are such."""
        of_kind: dict[str, list[int]] = {}
        for n in range(self.config.num_hidden_layers):
            of_kind.setdefault(self.config.kind(n), []).append(n)
        chosen = {}
        for kind, layers in of_kind.items():
            layers = sorted(layers, key=self.config.is_hash_layer)
            read = sum(step_bytes(self.checkpoint, layers[0], self.context, self.tokens).values())
            chosen[kind] = layers[: max(2, math.ceil(COLD / read))]
        return chosen

    def _fill(self) -> None:
        """Random keys everywhere: what is attended and selected must not be a row of zeros."""
        for cache in self.cache.layers.values():
            keys = [cache.window] + [part.entries for part in (cache.main, cache.index) if part]
            for rows in keys:
                if isinstance(rows, torch.Tensor):
                    rows.normal_()
                    continue
                values, scales = rows
                values.random_(0, 0x58)  # e4m3 up to 8, the upper byte of a bf16 below 2^49: finite in both
                if len(values[0]) > 512:
                    values[:, 448:] = torch.randn(len(values), 64, device=values.device, dtype=torch.bfloat16).view(torch.uint8)
                scales.random_(125, 129)

    def step(self) -> Step:
        return Step.at(self.positions, self.ids, self.model.rope)

    def layers(self, kind: str) -> dict:
        """us of a layer of this kind in a chain of them, its kernels and its floor."""
        numbers, step = self.kinds[kind], self.step()
        count = -(-CALLS // len(numbers)) * len(numbers)
        state = {"streams": Streams(self.X)}

        def one(n: int) -> Call:
            def call():
                streams = self.model.layers[n](state["streams"], step, self.cache.layers[n])
                state["streams"] = Streams(self.X, streams.pending)  # the next layer waits for this one; random weights do not pile up
            return call

        calls = [one(numbers[i % len(numbers)]) for i in range(count)]
        calls[0]()
        kernels = kernels_of(self.device, calls[1])
        (times,) = interleaved(self.device, [graph_of(self.device, calls)])
        read = sum(step_bytes(self.checkpoint, numbers[0], self.context, self.tokens).values())
        return {"row": f"{kind} layer", "bytes": read, "kernels": kernels} | spread(times, count)

    def operations(self, kind: str, compare: bool) -> list[dict]:
        """The same for each operation alone, called with what the layers call it with; linears beside torch's bf16 product."""
        numbers, step = self.kinds[kind], self.step()
        recorded: dict[str, list[tuple[Call, tuple]]] = {}
        for n in numbers:
            with recording() as calls:
                self.model.layers[n](Streams(self.X, ops.Pending(self.X[:, 0].contiguous(), *self._returns())), step, self.cache.layers[n])
            seen: dict[str, int] = {}
            for name, call, arguments in calls:
                if name in ROWS:
                    place = seen[name] = seen.get(name, -1) + 1
                    recorded.setdefault(ROWS[name][place], []).append((call, arguments))
        read, out = step_bytes(self.checkpoint, numbers[0], self.context, self.tokens), []
        for row, calls in recorded.items():
            count = -(-CALLS // len(calls)) * len(calls)
            graphs = [graph_of(self.device, [calls[i % len(calls)][0] for i in range(count)])]
            product = bf16_product(self.checkpoint, numbers, row, self.X[:, 0]) if compare else None
            if product:
                graphs.append(graph_of(self.device, [product[i % len(product)] for i in range(count)]))
            times = interleaved(self.device, graphs)
            kernels = kernels_of(self.device, calls[0][0])
            out.append({"row": f"{kind}: {row}", "bytes": read[row], "kernels": kernels} | spread(times[0], count))
            if product:
                out[-1]["torch_bf16_us"] = spread(times[1], count)["us"]
        return out

    def _returns(self) -> tuple[torch.Tensor, torch.Tensor]:
        ones = torch.ones(self.tokens, 4, device=self.device)
        return ones, torch.eye(4, device=self.device).expand(self.tokens, 4, 4).contiguous()

    def ends(self) -> dict:
        """The head with the sampler, greedy, and the embedding: what a token costs beside its layers. Two copies of a head of over 1 GB are
        not needed: one is 20 times L2."""
        sampler = Sampler(Sampling(temperature=0), [], self.config.vocab_size, self.context, self.device)

        def call():
            self.model.embedded(self.ids)
            sampler(self.model.head(self.X[-1:])[0], self.positions)

        kernels = kernels_of(self.device, call)
        (times,) = interleaved(self.device, [graph_of(self.device, [call] * 5)])
        return {"row": "head and sampler", "bytes": self.checkpoint.nbytes("head"), "kernels": kernels} | spread(times, 5)


@contextlib.contextmanager
def recording():
    """Every operation's call within the block, as (name, what calls it again, its arguments)."""
    calls: list[tuple[str, Call, tuple]] = []
    before = dict(backend._chosen)

    def recorder(name, function):
        def call(*args, **kwargs):
            calls.append((name, lambda: function(*args, **kwargs), args))
            return function(*args, **kwargs)
        return call

    for name, definition in backend._definitions.items():
        backend._chosen[name] = recorder(name, before.get(name, definition))
    try:
        yield calls
    finally:
        backend._chosen.clear()
        backend._chosen.update(before)


def bf16_product(checkpoint: SyntheticCheckpoint, layers: list[int], row: str, x: torch.Tensor) -> list[Call] | None:
    """torch's bf16 product of the shapes of a row that is one linear, a copy of the weights a layer; None for other rows."""
    name = {"wo_a": "wo_a", "wo_b": "wo_b", "projections of q": "wq_b", "projections of x": "wq_a"}.get(row)
    if name is None:
        return None
    rows, columns = checkpoint.needs[f"layers.{layers[0]}.attn.{name}"].shape
    groups = checkpoint.config.o_groups if name == "wo_a" else 1
    calls = []
    for _ in layers:
        weight = torch.randn(groups, columns, rows // groups, device=x.device, dtype=torch.bfloat16)
        given = torch.randn(groups, len(x), columns, device=x.device, dtype=torch.bfloat16)
        calls.append(lambda weight=weight, given=given: torch.bmm(given, weight))
    return calls


# ------------------------------------------------------------------------------------------------ what is asked for


def number(above: float, most: float = math.inf) -> Callable[[str], float]:
    """An argument type: a finite number above `above` and up to `most`."""
    limits = f"above {above:g}" + (f" and up to {most:g}" if math.isfinite(most) else "")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and above < value <= most):
            raise argparse.ArgumentTypeError(f"expected a finite number {limits}, found {text[:40]!r}")
        return value

    return parse


def check_format(name: str, device: torch.device) -> None:
    """Raises UserError for a format that no kernel takes, if it is kernels that are to run."""
    fine = [other for other, form in FORMATS.items() if form.plain != torch.float32]
    if device.type != "cpu" and name not in fine:
        raise UserError(f"--format: expected one of {', '.join(fine)} on a GPU, found {name}: its weights are fp32, which the kernels' "
                        "bf16 does not hold")


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Raises UserError for a file that could not be written in the end, or a picture that could not be drawn."""
    for flag, path in (("--json", json), ("--plot", plot)):
        if path is None:
            continue
        try:
            there = os.path.lexists(path)
            path.open("ab").close()  # which leaves what is there as it is
            if not there:
                path.unlink()
        except OSError as error:
            name = str(path)
            raise UserError(f"{flag}: {name[:100]} cannot be written: {error.strerror}: give a file name in a writable folder") from None
    if plot is not None:
        kinds = pyplot().gcf().canvas.get_supported_filetypes()
        if plot.suffix and plot.suffix[1:].lower() not in kinds:
            raise UserError(f"--plot: expected a name that ends in one of .{', .'.join(sorted(kinds))}, found {plot.name[:100]}")


def pyplot():
    """matplotlib's, which draws into files. Raises UserError where there is none."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot: expected matplotlib, found none: pip install 'dsv4[plot]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


# -------------------------------------------------------------------------------------------------------------- report


def table(results: list[dict], roof: float) -> list[str]:
    lines = [f"{'':<34}{'us':>9}{'p10':>8}{'p90':>8}{'MB':>9}{'TB/s':>7}{'floor us':>10}{'of floor':>9}{'kernels':>9}{'torch bf16':>12}"]
    for r in results:
        floor = 1e-6 * r["bytes"] / roof
        speed = f"{1e-6 * r['bytes'] / r['us']:7.2f}{floor:10.1f}{floor / r['us']:8.0%} " if r["bytes"] else f"{'':26}"
        kernels = r["kernels"] if r.get("kernels") is not None else ""
        peer = format(r["torch_bf16_us"], "12.1f") if "torch_bf16_us" in r else ""
        lines.append(f"{r['row']:<34}{r['us']:9.1f}{r.get('p10', r['us']):8.1f}{r.get('p90', r['us']):8.1f}{1e-6 * r['bytes']:9.1f}{speed}"
                     f"{kernels:>9}{peer}")
    return lines


def whole_model(config: ModelConfig, kinds: dict[str, dict], ends: dict) -> dict:
    """Layers by kind, the ends, and the hops of 8 GPUs. us and bytes."""
    counts = {kind: sum(config.kind(n) == kind for n in range(config.num_hidden_layers)) for kind in kinds}
    total = {key: sum(counts[kind] * r[key] for kind, r in kinds.items()) + ends[key] for key in ("us", "bytes")}
    total["us"] += HOPS * HOP_US
    return {"row": "model, 8 GPUs in a row"} | total


def plot(results: list[dict], roof: float, title: str, path: Path) -> None:
    """Time against bytes for every row, with the roof."""
    rows = [r for r in results if r["bytes"]]
    figure, axes = pyplot().subplots(figsize=(9, 6))
    sizes = [min(r["bytes"] for r in rows), max(r["bytes"] for r in rows)]
    axes.loglog([1e-6 * b for b in sizes], [1e-6 * b / roof for b in sizes], color="grey", label=f"{roof} TB/s")
    axes.scatter([1e-6 * r["bytes"] for r in rows], [r["us"] for r in rows], s=14)
    for r in rows:
        axes.annotate(r["row"], (1e-6 * r["bytes"], r["us"]), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.set(xlabel="packed MB read", ylabel="us", title=title)
    axes.legend()
    figure.savefig(path, dpi=150)


def clocks(device: torch.device) -> str:
    """SM and memory clock now, where torch can tell."""
    try:
        return f"SM clock {torch.cuda.clock_rate(device)} MHz"
    except Exception:  # needs nvidia-ml-py; a benchmark without it is still one
        return "clocks unknown (pip install nvidia-ml-py)"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--format", choices=sorted(FORMATS), default="nvidia",
                        help="of the weights (default: nvidia); f32, transformers and hybrid on a CPU only")
    parser.add_argument("--context", type=whole(1), default=4096, help="the step is the last of so many tokens")
    parser.add_argument("--tokens", type=whole(1, 8), default=1, help="of the step, at most --context (default: 1)")
    parser.add_argument("--device", default="cuda:0", help="cpu tests the plumbing with the definitions; its times mean nothing")
    parser.add_argument("--roof", type=number(0), default=4.3, metavar="TB/S", help="of the floors (default: 4.3, an H200's)")
    parser.add_argument("--no-ops", action="store_true", help="layers and model only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a roofline plot (needs matplotlib)")
    args = parser.parse_args(argv)
    try:
        if args.tokens > args.context:
            raise UserError(f"--tokens: expected at most --context, {args.context}, found {args.tokens}")
        check_outputs(args.json, args.plot)
        device = runtime.resolve_devices(args.device)[0]
        check_format(args.format, device)
        runtime.prepare_torch(1 << 30)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.inference_mode():
            bench = Bench(PRESETS[args.preset], args.format, device, args.context, args.tokens, "torch" if device.type == "cpu" else "cuda")
            before = clocks(device) if device.type == "cuda" else "a CPU: the times mean nothing"
            kinds = {kind: bench.layers(kind) for kind in bench.kinds}
            ends = bench.ends()
            results = [*kinds.values(), ends, whole_model(bench.config, kinds, ends)]
            for kind in () if args.no_ops else bench.kinds:
                results += bench.operations(kind, compare=device.type == "cuda")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    title = f"{args.preset}, {args.format}, {args.tokens} token(s) at context {args.context}"
    print(f"{title}; {before}" + (f", {clocks(device)} at the end" if device.type == "cuda" else ""))
    print("\n".join(table(results, args.roof)))
    if args.json:
        args.json.write_text(json.dumps({"title": title, "roof_tb_s": args.roof, "results": results}, indent=1) + "\n")
    if args.plot:
        plot(results, args.roof, title, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
