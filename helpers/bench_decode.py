"""How near decoding runs to the memory roof: us, TB/s and fraction of the floor per operation, per kind of layer and for the whole model.

    python helpers/bench_decode.py --preset pro [--format nvidia|all-nvfp4] [--context 4096,1048576] [--tokens 1] [--json F] [--plot F]

Random weights of true size are drawn on the GPU; no checkpoint is needed. Every number is a median over replays of a CUDA graph of at
least 50 calls that walk over copies of what they read, so that nothing is read again before 400 MB of other bytes were, 8 times L2; where
memory does not hold so many copies, the row has a mark. The floor is packed bytes, scales included, over --roof.

A layer is measured where no compressor's block closes and where one does, and counts with how often each happens. The whole model is its
layers by kind, the embedding's and the head's step, what 8 GPUs do at the start and the end of their shares, and 7 hops.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import ops, runtime  # noqa: E402
from dsv4.config import PRESETS, ModelConfig  # noqa: E402
from dsv4.errors import UserError  # noqa: E402
from dsv4.exports import FORMATS  # noqa: E402
from dsv4.kernels import attention, indexer  # noqa: E402
from dsv4.layers import Numerics  # noqa: E402
from dsv4.layers.mhc import Streams  # noqa: E402
from dsv4.layers.step import Step  # noqa: E402
from dsv4.model import Model  # noqa: E402
from dsv4.plan import DevicePlan, Plan  # noqa: E402
from dsv4.sampler import Sampler, Sampling  # noqa: E402
from dsv4.synthetic import SyntheticCheckpoint, fill  # noqa: E402
from helpers import replayed, timing  # noqa: E402
from helpers.replayed import Recorded, bf16_products, cold, recording, storages  # noqa: E402
from helpers.timing import Call, graph_of, kernels_of, launches, measured, shares_of_kernels  # noqa: E402
from single_shot_inference import OneLineParser, whole  # noqa: E402

GPUS, HOP_US = 8, 2.1  # us of a hop, as two H200 measured it (docs/measurements.md)


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
    entries = context // ratio if ratio else 0
    row = c.head_dim + c.qk_rope_head_dim + 8  # FP8, bf16 rotary dims, scales
    attended = min(context, c.sliding_window) + (min(entries, c.index_topk) if ratio == 4 else entries)
    fn = checkpoint.bytes_of(checkpoint.needs[p + "hc_attn_fn"])
    rows = {
        "mhc_pre attn": fn, "projections of x": weights("attn.wq_a", "attn.wkv", *compressor, *indexer),
        "update_caches": 0, "projections of q": weights("attn.wq_b", *(("attn.indexer.wq_b",) if ratio == 4 else ())),
        "attention": attended * row, "wo_a": weights("attn.wo_a"), "wo_b": weights("attn.wo_b"), "mhc_pre ffn": fn,
        "router": checkpoint.bytes_of(checkpoint.needs[p + "ffn.gate.weight"]),
        "moe": round(distinct_experts(c, tokens) * expert) + weights(*(f"ffn.shared_experts.{w}" for w in ("w1", "w2", "w3"))),
    }
    if ratio == 4:
        scored = entries if entries > c.index_topk else 0
        rows |= {"index_scores": scored * (c.index_head_dim // 2 + c.index_head_dim // 32), "select_entries": 4 * scored}
    return rows


def distinct_experts(config: ModelConfig, tokens: int) -> float:
    """How many of a layer's experts so many tokens choose, as expected."""
    return config.n_routed_experts * (1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** tokens)


ROWS = {  # operation -> its table rows, in the order of its calls within a layer
    "mhc_pre": ("mhc_pre attn", "mhc_pre ffn"), "projections": ("projections of x", "projections of q"),
    "update_caches": ("update_caches",), "index_scores": ("index_scores",), "select_entries": ("select_entries",),
    "attention": ("attention",), "grouped_linear": ("wo_a",), "linear": ("wo_b",), "router": ("router",), "moe": ("moe",),
}
ALONE = {"wo_b": ("attn.wo_b",), "wq_b": ("attn.wq_b",), "shared w1 + w3": ("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
         "shared w2": ("ffn.shared_experts.w2",)}
END_ROWS = {"hc_head": "hc_head", "projections": "head", "sample": "sample"}  # the same of the model's end


def products(checkpoint: SyntheticCheckpoint, layer: int, row: str, tokens: int) -> list[tuple[int, int, int]]:
    """(batch, rows, columns) of the products that a row makes, one after the other; [] for a row that makes none. Experts: as many as are
    read, as one batch."""
    c, p = checkpoint.config, f"layers.{layer}."

    def together(*names: str) -> list[tuple[int, int, int]]:
        shapes = [checkpoint.needs[p + name].shape for name in names if p + name in checkpoint.needs]
        return [(1, sum(rows for rows, _ in shapes), shapes[0][1])]

    if row == "projections of x":
        return together("attn.wq_a", "attn.wkv", "attn.compressor.wkv", "attn.compressor.wgate", "attn.indexer.compressor.wkv",
                        "attn.indexer.compressor.wgate", "attn.indexer.weights_proj")
    if row == "projections of q":
        return together("attn.wq_b", "attn.indexer.wq_b")
    if row == "wo_a":
        rows, columns = checkpoint.needs[p + "attn.wo_a"].shape
        return [(c.o_groups, rows // c.o_groups, columns)]
    if row == "wo_b":
        return together("attn.wo_b")
    if row == "router":
        return together("ffn.gate.weight")
    if row == "moe":
        experts = round(distinct_experts(c, tokens)) + 1
        return [(experts, 2 * c.moe_intermediate_size, c.hidden_size), (experts, c.hidden_size, c.moe_intermediate_size)]
    return []


def blackwell_forms(device: torch.device) -> dict[str, Callable]:
    """Operation -> its kernel on Blackwell's tensor cores, which no layer calls yet (docs/kernels.md); {} on any other device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10:
        return {}
    return {"attention": attention.attention_sm100, "index_scores": indexer.index_scores_sm100}


@dataclass(frozen=True)
class Case:
    """What a step can be for a layer: its name, how often it is that, and its last position."""

    name: str
    share: float
    last: int


def cases(ratio: int, context: int, tokens: int) -> list[Case]:
    """The steps of so many tokens near the end of `context`, by whether a block of `ratio` tokens closes within them."""
    if tokens >= ratio or context < ratio:  # always (or there are no blocks), and never
        return [Case("", 1.0, context - 1)]
    closing, share = context // ratio * ratio - 1, tokens / ratio
    return [Case(", no block closes", 1 - share, closing - 1), Case(f", a block closes (1 step in {1 / share:g})", share, closing)]


# ------------------------------------------------------------------------------------------------------------ measure


class Bench:
    """Copies of each kind of layer, near the end of a context, and what their steps take."""

    def __init__(self, config: ModelConfig, format: str, device: torch.device, context: int, tokens: int, backend_name: str,
                 kinds: Iterable[str] | None = None):
        """`kinds`: of layers; all that the model has unless given."""
        self.config, self.device, self.tokens = config, device, tokens
        ops.select_backend(backend_name)
        self.checkpoint = SyntheticCheckpoint(config, format, device)
        self.kinds = {kind: layers for kind, layers in self._kinds().items() if kinds is None or kind in kinds}
        layers = tuple(sorted(n for layers in self.kinds.values() for n in layers))
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        plan = Plan(layers, (DevicePlan(device, layers, 0, 0, 0, 0),), context, tokens, False)
        self.model = Model(self.checkpoint, plan, Numerics(dtype=dtype))
        generator = torch.Generator(device).manual_seed(1)
        self.ids = torch.randint(config.vocab_size, (tokens,), generator=generator, device=device)
        self.X = self.model.embedded(self.ids)
        self.at(context)

    def at(self, context: int) -> None:
        """Goes to the end of another context: new caches."""
        self.cache = None  # before the next one is there
        self.context, self.cache = context, self.model.new_cache(context)
        fill(self.cache)

    def _kinds(self) -> dict[str, list[int]]:
        """Kind -> layers that stand for it: as many as it takes for COLD bytes a round, with a learned router where there are such."""
        of_kind: dict[str, list[int]] = {}
        for n in range(self.config.num_hidden_layers):
            of_kind.setdefault(self.config.kind(n), []).append(n)
        chosen = {}
        for kind, layers in of_kind.items():
            layers = sorted(layers, key=self.config.is_hash_layer)
            read = sum(step_bytes(self.checkpoint, layers[0], self.tokens, self.tokens).values())
            chosen[kind] = layers[: max(2, math.ceil(replayed.COLD / read))]
        return chosen

    def cases(self, kind: str) -> list[Case]:
        return cases(self.config.compress_ratios[self.kinds[kind][0]], self.context, self.tokens)

    def read(self, kind: str) -> dict[str, int]:
        return step_bytes(self.checkpoint, self.kinds[kind][0], self.context, self.tokens)

    def step(self, last: int | None = None) -> Step:
        """The step whose last token has this position; the context's last one unless given."""
        last = self.context - 1 if last is None else last
        return Step.at(torch.arange(last - self.tokens + 1, last + 1, device=self.device), self.ids, self.model.rope)

    def pending(self) -> ops.Pending:
        """An output on its way back to the streams, as every layer but the first finds one."""
        ones, eye = torch.ones(self.tokens, 4, device=self.device), torch.eye(4, device=self.device)
        return ops.Pending(self.X[:, 0].contiguous(), ones, eye.expand(self.tokens, 4, 4).contiguous())

    def layers(self, kind: str) -> list[dict]:
        """us of a layer of this kind in a chain of them, its kernels and its floor: in each case, and over all positions, which is last."""
        numbers, state = self.kinds[kind], {"streams": Streams(self.X, self.pending())}

        def one(n: int, step: Step) -> Call:
            def call():
                streams = self.model.layers[n](state["streams"], step, self.cache.layers[n])
                state["streams"] = Streams(self.X, streams.pending)  # the next layer waits for this one; random weights do not pile up
            return call

        of_kind = self.cases(kind)
        chains = [[one(n, step) for n in numbers] for step in (self.step(case.last) for case in of_kind)]
        read = sum(self.read(kind).values())
        common = {"bytes": read, "kernels": launches(self.device, chains[0][0]), "apart": len(numbers) * read}
        times = measured(self.device, *chains)
        rows = [{"row": f"{kind} layer{case.name}", "share": case.share} | common | time
                for case, time in zip(of_kind, times, strict=True)]
        if len(rows) > 1:
            mean = {key: sum(case.share * time[key] for case, time in zip(of_kind, times, strict=True)) for key in ("us", "p10", "p90")}
            rows.append({"row": f"{kind} layer"} | common | mean)
        return rows

    def operations(self, kind: str, compare: bool, only: Iterable[str] | None = None) -> list[dict]:
        """The same for each operation alone (`only` some rows), called with what the layers call it with; products beside torch's in bf16.
        Where a block closes, the one operation that does more for it too. On Blackwell its own forms have rows too."""
        out, read, of_kind, forms = [], self.read(kind), self.cases(kind), blackwell_forms(self.device)
        for case in of_kind:
            recorded: dict[str, list[Recorded]] = {}
            step = self.step(case.last)
            keep = storages(self.X, vars(step))
            for n in self.kinds[kind]:
                with recording() as calls:
                    self.model.layers[n](Streams(self.X, self.pending()), step, self.cache.layers[n])
                keep |= storages([call.result for call in calls])
                seen: dict[str, int] = {}
                for call in calls:
                    if call.name in ROWS:
                        place = seen[call.name] = seen.get(call.name, -1) + 1
                        recorded.setdefault(ROWS[call.name][place], []).append(call)
            for row, calls in recorded.items():
                depends = row == "update_caches"
                if (only is None or row in only) and (depends or case is of_kind[0]):
                    shapes = products(self.checkpoint, self.kinds[kind][0], row, self.tokens) if compare else []
                    out.append(self._row(f"{kind}: {row}{case.name if depends else ''}", calls, read[row], keep, shapes))
                    if form := forms.get(calls[0].name):
                        calls = [replace(call, function=form) for call in calls]
                        out.append(self._row(f"{kind}: {row}, {form.__name__}", calls, read[row], keep, []))
        return out

    def _row(self, name: str, calls: list[Recorded], read: int, keep: set[int], shapes: list[tuple[int, int, int]]) -> dict:
        calls = cold(self.device, calls, read, keep, self.config.n_routed_experts)
        graphs: list[list[Call]] = [calls]
        if shapes:
            graphs.append(bf16_products(shapes, self.tokens, self.device))
        times = measured(self.device, *graphs)
        out = {"row": name, "bytes": read, "kernels": launches(self.device, calls[0]), "apart": len(calls) * read} | times[0]
        return out | ({"torch_bf16_us": times[1]["us"]} if shapes else {})

    # ---- what belongs to no layer

    def ends(self, compare: bool) -> list[dict]:
        """What a token costs beside its layers: embedding, head and sampler (greedy); what a GPU does at the start and the end of its
        share; and the end's operations alone."""
        sampler = Sampler(Sampling(temperature=0), [], self.config.vocab_size, self.context, self.device)
        positions, pending, read = self.step().positions, self.pending(), self.checkpoint.nbytes("head")

        def end():
            self.model.embedded(self.ids)
            return sampler(self.model.head(self.X[-1:])[0], positions[-1:])

        def share():
            step = Step.at(positions, self.ids, self.model.rope)
            return step, Streams(self.X, pending).settled(), positions + 1

        rows = []
        for name, call, size in (("head and sampler", end, read), ("start and end of a share", share, 0)):
            (time,) = measured(self.device, [call])
            rows.append({"row": name, "bytes": size, "kernels": launches(self.device, call)} | time)
        with recording() as calls:
            end()
        keep = storages(self.X, [call.result for call in calls])
        sizes = {"hc_head": self.checkpoint.bytes_of(self.checkpoint.needs["hc_head_fn"]), "projections": read, "sample": 0}
        for call in calls:
            shapes = [(1, self.config.vocab_size, self.config.hidden_size)] if compare and call.name == "projections" else []
            rows.append(self._row(f"end: {END_ROWS[call.name]}", [call], sizes[call.name], keep, shapes))
        return rows

    def alone(self, compare: bool) -> list[dict]:
        """Products that a layer makes together with others, each by itself, as one linear; and a token's routed experts."""
        rows = []
        for name, modules in ALONE.items():
            modules = [f"layers.0.{module}" for module in modules]
            needs = [self.checkpoint.needs[module] for module in modules]
            columns = needs[0].shape[1]
            x = torch.randn(self.tokens, columns, device=self.device).to(self.model.numerics.dtype)
            first, *others = (self.checkpoint.weight(module) for module in modules)
            for other in others:  # one matrix below the other
                first = replace(first, shape=(first.shape[0] + other.shape[0], columns), payload=torch.cat((first.payload, other.payload)),
                                scale=None if first.scale is None else torch.cat((first.scale, other.scale)))
            call = Recorded("linear", ops.linear, (x, ops.pack_weights((first,)), "bf16"), {})
            shapes = [(1, sum(need.shape[0] for need in needs), columns)] if compare else []
            rows.append(self._row(f"alone: {name}, {self.checkpoint.kind(modules[0])}", [call],
                                  sum(map(self.checkpoint.bytes_of, needs)), storages(x), shapes))
        return rows + self._experts_alone(compare)

    def _experts_alone(self, compare: bool) -> list[dict]:
        """As many experts as a token chooses, and no other: one of them stands in the shared one's place, in their format (so its bytes may
        be on the way before the router has ended, as the shared one's are). Then w1 + w3 and w2, by their kernels' shares of the chain."""
        c, k, p = self.config, self.config.num_experts_per_tok, "layers.0.ffn.experts."

        def expert(number: int) -> ops.Expert:
            return ops.Expert(*(self.checkpoint.weight(f"{p}{number % c.n_routed_experts}.{w}") for w in ("w1", "w2", "w3")))

        w1, w2, w3 = (k * self.checkpoint.bytes_of(self.checkpoint.needs[f"{p}0.{w}"]) for w in ("w1", "w2", "w3"))
        x = torch.randn(self.tokens, c.hidden_size, device=self.device).to(self.model.numerics.dtype)
        chosen = torch.arange(k - 1, dtype=torch.int32, device=self.device).expand(self.tokens, -1).contiguous()
        weights = torch.full(chosen.shape, c.routed_scaling_factor / k, device=self.device)
        calls = []
        for n in range(math.ceil(replayed.COLD / (w1 + w2 + w3)) if self.device.type != "cpu" else 1):
            packed = ops.pack_experts([expert(n * k + i) for i in range(k - 1)], expert(n * k + k - 1))
            calls.append(Recorded("moe", ops.moe, (x, packed, chosen, weights, c.swiglu_limit), {}))
        name = f"alone: {k} experts, {self.checkpoint.kind(p + '0.w1')}"
        shapes = [(k, 2 * c.moe_intermediate_size, c.hidden_size), (k, c.hidden_size, c.moe_intermediate_size)] if compare else []
        rows = [self._row(name, calls, w1 + w2 + w3, set(), shapes)]
        chain = calls * math.ceil(timing.CALLS / len(calls))
        *up, down = shares_of_kernels(kernels_of(self.device, graph_of(self.device, chain)), len(chain)) or [0.0]
        for half, size, share in ((", w1 + w3", w1 + w3, sum(up)), (", w2", w2, down)):
            if share:
                rows.append({"row": name + half, "bytes": size, "apart": rows[0]["apart"]}
                            | {key: share * rows[0][key] for key in ("us", "p10", "p90")})
        return rows


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


def contexts(text: str) -> list[int]:
    """An argument type: lengths such as 4096,1048576, each another."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) <= 10]
    if len(numbers) < len(parts) or 0 in numbers or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"expected different numbers of tokens such as 4096,1048576, found {text[:40]!r}")
    return numbers


def check_format(name: str, device: torch.device) -> None:
    """Raises UserError for a format that no kernel takes, if it is kernels that are to run."""
    fine = [other for other, form in FORMATS.items() if form.plain != torch.float32]
    if device.type != "cpu" and name not in fine:
        raise UserError(f"--format: expected one of {', '.join(fine)} on a GPU, found {name}: its weights are fp32, which the kernels' "
                        "bf16 does not hold")


def check_contexts(lengths: list[int], tokens: int, config: ModelConfig) -> None:
    """Raises UserError for a context that is too short for the step, which may end before its last token, or too long for the model."""
    if tokens >= min(lengths):
        raise UserError(f"--tokens: expected fewer than --context, {min(lengths)}, found {tokens}")
    if max(lengths) > config.max_position_embeddings:
        raise UserError(f"--context: expected at most the model's {config.max_position_embeddings} positions, found {max(lengths)}")


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
    """Of the rows' numbers, with a * where copies are nearer than they should be."""
    lines = [f"{'':<54}{'us':>9}{'p10':>8}{'p90':>8}{'MB':>9}{'TB/s':>7}{'floor us':>10}{'of floor':>9}{'kernels':>9}{'torch bf16':>12}"]
    for r in results:
        floor = 1e-6 * r["bytes"] / roof
        speed = f"{1e-6 * r['bytes'] / r['us']:7.2f}{floor:10.1f}{floor / r['us']:8.0%} " if r["bytes"] else f"{'':26}"
        kernels = r["kernels"] if r.get("kernels") is not None else ""
        peer = format(r["torch_bf16_us"], "12.1f") if "torch_bf16_us" in r else ""
        mark = "*" if r["bytes"] and r.get("apart", replayed.COLD) < replayed.COLD else " "
        lines.append(f"{r['row'] + ' ' + mark:<54}{r['us']:9.1f}{r.get('p10', r['us']):8.1f}{r.get('p90', r['us']):8.1f}"
                     f"{1e-6 * r['bytes']:9.1f}{speed}{kernels:>9}{peer}".rstrip())
    return lines


def whole_model(config: ModelConfig, kinds: dict[str, dict], end: dict, share: dict) -> dict:
    """Layers by kind, over all positions; the ends; 8 GPUs' starts and ends of their shares, and the hops between them. us and bytes."""
    counts = {kind: sum(config.kind(n) == kind for n in range(config.num_hidden_layers)) for kind in kinds}
    total = {key: sum(counts[kind] * r[key] for kind, r in kinds.items()) + end[key] for key in ("us", "bytes")}
    total["us"] += GPUS * share["us"] + (GPUS - 1) * HOP_US
    return {"row": f"model, {GPUS} GPUs in a row"} | total


def growth(models: list[dict]) -> list[dict]:
    """From the first context to each other one: of the model's time, and of its floor."""
    first, *others = models
    return [{"from": first["context"], "to": r["context"], "us": r["us"] / first["us"] - 1, "floor": r["bytes"] / first["bytes"] - 1}
            for r in others]


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
    """SM clock now, where torch can tell."""
    try:
        return f"SM clock {torch.cuda.clock_rate(device)} MHz"
    except Exception:  # needs nvidia-ml-py; a benchmark without it is still one
        return "clocks unknown (pip install nvidia-ml-py)"


def measure(bench: Bench, lengths: list[int], operations: bool) -> list[dict]:
    """All rows, each with its context. What no context changes is measured once."""
    results, end, share, compare, before = [], None, None, bench.device.type == "cuda", {}
    for context in lengths:
        if context != bench.context:
            bench.at(context)
        rows, changed = [], {}
        for kind in bench.kinds:
            read = bench.read(kind)
            changed[kind] = [row for row in read if before.get(kind, {}).get(row) != read[row]]
            before[kind] = read
        of_kind = {kind: bench.layers(kind) for kind in bench.kinds}
        rows += [row for kind in of_kind.values() for row in kind]
        if end is None:
            end, share, *parts = bench.ends(compare)
            rows += [end, share]
        rows.append(whole_model(bench.config, {kind: r[-1] for kind, r in of_kind.items()}, end, share))
        if operations:
            rows += [row for kind in bench.kinds for row in bench.operations(kind, compare, changed[kind])]
            if not results:
                rows += parts + bench.alone(compare)
        results += [{"context": context} | row for row in rows]
    return results


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--format", choices=sorted(FORMATS), default="nvidia",
                        help="of the weights (default: nvidia); f32, transformers and hybrid on a CPU only")
    parser.add_argument("--context", type=contexts, default=[4096], metavar="N,..",
                        help="the step is one of the last of so many tokens; for several, how the model grows with them (default: 4096)")
    parser.add_argument("--tokens", type=whole(1, 8), default=1, help="of the step, fewer than --context (default: 1)")
    parser.add_argument("--device", default="cuda:0", help="cpu tests the plumbing with the definitions; its times mean nothing")
    parser.add_argument("--roof", type=number(0), default=4.3, metavar="TB/S", help="of the floors (default: 4.3, an H200's)")
    parser.add_argument("--no-ops", action="store_true", help="layers and model only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a roofline plot (needs matplotlib)")
    args = parser.parse_args(argv)
    try:
        check_contexts(args.context, args.tokens, PRESETS[args.preset])
        check_outputs(args.json, args.plot)
        device = runtime.resolve_device(args.device)
        check_format(args.format, device)
        runtime.prepare_torch(1 << 30)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.inference_mode():
            chosen = "torch" if device.type == "cpu" else "cuda"
            bench = Bench(PRESETS[args.preset], args.format, device, args.context[0], args.tokens, chosen)
            clock = clocks(device) if device.type == "cuda" else "a CPU: the times mean nothing"
            results = measure(bench, args.context, not args.no_ops)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    title = f"{args.preset}, {args.format}, {args.tokens} token(s)"
    print(f"{title}; {clock}" + (f", {clocks(device)} at the end" if device.type == "cuda" else ""))
    for context in args.context:
        rows = table([r for r in results if r["context"] == context], args.roof)
        print("\n".join([f"context {context}" + rows[0][len(f"context {context}") :], *rows[1:]]))
    grown = growth([r for r in results if r["row"].startswith("model")])
    for g in grown:
        print(f"growth of the model from {g['from']} to {g['to']} tokens: {g['us']:.1%}, of its floor {g['floor']:.1%}")
    print(f"* the same bytes are read again after less than {replayed.COLD >> 20} MiB of others: some come from L2")
    if args.json:
        args.json.write_text(json.dumps({"title": title, "roof_tb_s": args.roof, "results": results, "growth": grown}, indent=1) + "\n")
    if args.plot:
        plot([r for r in results if r["context"] == args.context[0]], args.roof, f"{title} at context {args.context[0]}", args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
