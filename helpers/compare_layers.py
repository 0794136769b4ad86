"""The cuda backend against the torch definitions, stage by stage in every layer: cosine and relative error, prefill and decode.

    python helpers/compare_layers.py --model DIR [--layers A:B]
    python helpers/compare_layers.py --preset pro --format nvidia --layers 0:4 [--past 8192] [--json FILE] [--plot FILE]

Both run the same tokens in steps of up to 8 and then one by one, in bfloat16, layer after layer: only one layer's weights are held, so a
layer of Pro needs 30 GB and the whole model no more. Each stage is compared twice:

    same input     every kernel gets what the definition before it made, caches included: the error of this kernel alone
    accumulated    the kernels get what kernels made, from the first layer on: what a user of the backend sees

A stage's tensors of all tokens are taken as one vector: relative is |kernel - definition| / |definition|. Choices (the indexer's top-k, the
router's experts) are sets: overlap is the part of the definition's that the kernel chose too. Weights of --preset are drawn on the device
from --seed. --past N starts at position N with N random keys in the caches, which both share.

Exit code 1 if a stage's cosine for the same input is below --limit, or its relative error above that of such a turn, 0.014 for 0.9999.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from dsv4 import kernels, ops, runtime  # noqa: E402
from dsv4.cache import LayerCache  # noqa: E402
from dsv4.checkpoint import Checkpoint  # noqa: E402
from dsv4.config import PRESETS, ModelConfig  # noqa: E402
from dsv4.errors import UserError  # noqa: E402
from dsv4.exports import FORMATS  # noqa: E402
from dsv4.layers import Binder, Numerics  # noqa: E402
from dsv4.layers.mhc import Head, Streams  # noqa: E402
from dsv4.layers.step import Rope, Step  # noqa: E402
from dsv4.model import Block  # noqa: E402
from dsv4.ops import backend  # noqa: E402
from dsv4.ops.attention import visible_entries  # noqa: E402
from dsv4.ops.quant import fp4_round_trip, fp8_round_trip  # noqa: E402
from dsv4.synthetic import SyntheticCheckpoint  # noqa: E402
from helpers.bench_decode import check_format, check_outputs, number, pyplot  # noqa: E402
from single_shot_inference import BUNDLED, OneLineParser, layer_range, token_ids, whole  # noqa: E402

CHUNK = kernels.MAX_TOKENS
RUNS = ("same input", "accumulated")
CHOICES = ("top-k", "experts")  # stages that are sets


# ------------------------------------------------------------------------------------------------------------ agreement


@dataclass
class Agreement:
    """Of one stage in one layer: sums in float64 over all tokens so far, and the worst token."""

    dot: float = 0.0
    ours: float = 0.0  # squares of the kernel's values
    theirs: float = 0.0
    difference: float = 0.0
    worst: float = 0.0
    worst_position: int = -1

    def add(self, got: torch.Tensor, want: torch.Tensor, positions: torch.Tensor) -> None:
        """Row s of both [n, ...] is the token at positions[s]."""
        if got.shape != want.shape:
            raise AssertionError(f"expected shape {list(want.shape)}, found {list(got.shape)}")
        a, b = got.double().flatten(1), want.double().flatten(1)
        squares = (a - b).square().sum(1)
        self.dot += float((a * b).sum())
        self.ours += float(a.square().sum())
        self.theirs += float(b.square().sum())
        self.difference += float(squares.sum())
        errors = (squares / b.square().sum(1).clamp_min(1e-300)).sqrt()
        errors = torch.where(errors.isnan(), float("inf"), errors)
        if float(errors.max()) > self.worst:
            self.worst, self.worst_position = float(errors.max()), int(positions[int(errors.argmax())])

    @property
    def relative(self) -> float:
        return math.sqrt(self.difference / self.theirs) if self.theirs else (math.inf if self.difference else 0.0)

    @property
    def cosine(self) -> float:
        if not (math.isfinite(self.ours) and math.isfinite(self.theirs)):
            return math.nan
        return self.dot / math.sqrt(self.ours * self.theirs) if self.ours and self.theirs else float(self.ours == self.theirs)

    def as_dict(self) -> dict:
        return {"relative": self.relative, "cosine": self.cosine, "worst_token": self.worst, "worst_position": self.worst_position}


@dataclass
class Overlap:
    """Of one stage that chooses: how many of the definition's choices the kernel made too."""

    shared: int = 0
    total: int = 0

    def add(self, got: torch.Tensor, want: torch.Tensor, positions: torch.Tensor) -> None:
        """[S, k] integers, distinct in a row but for -1, which is none."""
        same = (got[:, :, None] == want[:, None, :]).any(1) & (want >= 0)
        self.shared += int(same.sum())
        self.total += int((want >= 0).sum())

    @property
    def overlap(self) -> float:
        return self.shared / self.total if self.total else 1.0

    def as_dict(self) -> dict:
        return {"overlap": self.overlap, "chosen": self.total}


# -------------------------------------------------------------------------------------------------------------- caches


def rows_of(keys, index: torch.Tensor) -> torch.Tensor:
    """These rows of a cache's keys as values: a tensor's, or packed ones unpacked."""
    return keys[index].clone() if isinstance(keys, torch.Tensor) else type(keys)(*(t[index] for t in keys)).unpack()


def set_rows(keys, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes values into rows of a cache's keys. Packing loses nothing of values that have been quantised."""
    if isinstance(keys, torch.Tensor):
        keys[index] = rows.to(keys.dtype)
    elif len(rows):
        for memory, part in zip(keys, type(keys).pack(rows), strict=True):
            memory[index] = part


def written(name: str, a: dict) -> list[tuple]:
    """(keys, the numbers of the rows) that a call of an operation, with its arguments by name, has written."""
    if name != "update_caches":
        return []
    positions, window = a["positions"], a["window"]
    places = [(window, positions % len(window if isinstance(window, torch.Tensor) else window[0]))]
    for pool in a["pools"]:
        ratio = len(pool.ape)
        places.append((pool.entries, positions[(positions + 1) % ratio == 0] // ratio))
    return places


def states(name: str, a: dict) -> list[torch.Tensor]:
    """The open blocks that a call of an operation has changed."""
    return [state for pool in a["pools"] for state in (pool.kv_state, pool.score_state)] if name == "update_caches" else []


def remember(config: ModelConfig, caches: list[LayerCache], past: int, generator: torch.Generator) -> None:
    """Gives all these caches of one layer, the definitions' first, the same random keys for the positions before `past`."""
    device, ratio = generator.device, caches[0].ratio

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def attention_keys(n: int) -> torch.Tensor:
        values, plain = random(n, config.head_dim).bfloat16(), config.head_dim - config.qk_rope_head_dim
        return torch.cat((fp8_round_trip(values[:, :plain], 64), values[:, plain:]), 1)

    def index_keys(n: int) -> torch.Tensor:
        return fp4_round_trip(random(n, config.index_head_dim).bfloat16())

    def put(memories: list, rows: torch.Tensor, values: torch.Tensor) -> None:
        for memory in memories:
            set_rows(memory, rows, values)

    recent = torch.arange(max(0, past - config.sliding_window), past, device=device)
    put([cache.window for cache in caches], recent % len(caches[0].window), attention_keys(len(recent)))
    for part, make in (("main", attention_keys), ("index", index_keys)):
        compressors = [getattr(cache, part) for cache in caches]
        if compressors[0] is None:
            continue
        entries = torch.arange(past // ratio, device=device)
        put([compressor.entries for compressor in compressors], entries, make(len(entries)))
        if ratio == 4 and past:  # the last closed block, which the next one overlaps
            for states in ([c.kv for c in compressors], [c.score for c in compressors]):
                values = random(4, states[0].shape[1])
                for state in states:
                    state[:4] = values


# --------------------------------------------------------------------------------------------------------------- stages

# What the first and the second call in a layer project; a single result of the first is the head's.
PROJECTED = (("q latent, projected", "kv, projected", "compressor kv", "compressor score", "index compressor kv", "index compressor score",
              "index weights"), ("q", "index q"))
SITES = ("attention mHC", "MoE mHC")
MHC = ("streams", "x", "post", "comb")
OTHERS = {"select_entries": "top-k", "attention": "attention", "grouped_linear": "wo_a", "linear": "attention out", "moe": "MoE",
          "mhc_post": "streams", "hc_head": "last norm"}
OPERATION_OF = {  # stage -> the operation that makes it
    **{f"{site} {part}": "mhc_pre" for site in SITES for part in MHC},
    **dict.fromkeys((*PROJECTED[0], *PROJECTED[1], "logits"), "projections"),
    **dict.fromkeys(("q latent", "kv", "compressed", "index keys"), "update_caches"), "index scores": "index_scores",
    **dict.fromkeys(("experts", "expert weights"), "router"), **{stage: name for name, stage in OTHERS.items()}}
# Of a layer and the head: an entry may first close long after what follows it was first made.
ORDER = (*(f"{SITES[0]} {part}" for part in MHC), *PROJECTED[0], "q latent", "kv", "compressed", "index keys", *PROJECTED[1],
         "index scores", "top-k", "attention", "wo_a", "attention out", *(f"{SITES[1]} {part}" for part in MHC), "experts",
         "expert weights", "MoE", "streams", "last norm", "logits")


def stages(name: str, nth: int, a: dict, result) -> dict[str, torch.Tensor]:
    """What there is to compare after the nth call of an operation in a layer, arguments by name: stage -> [tokens, ...]."""
    if name == "mhc_pre":
        return {f"{SITES[nth]} {part}": t for part, t in zip(MHC, result, strict=True)}
    if name == "projections":
        return {"logits": result[0]} if len(result) == 1 and nth == 0 else dict(zip(PROJECTED[nth], result, strict=False))
    if name == "update_caches":
        keys, *entries = (rows_of(*place) for place in written(name, a))
        closed = {"index keys" if pool.for_index else "compressed": r for pool, r in zip(a["pools"], entries, strict=True) if len(r)}
        return {"q latent": result, "kv": keys, **closed}
    if name == "index_scores":  # numbers only where a query sees the entry, and only if there are more than it may choose
        count = visible_entries(a["positions"], 4)[:, None]
        most = int(count[-1])
        if most <= a["top_k"]:
            return {}
        return {"index scores": result[:, :most].masked_fill(torch.arange(most, device=count.device) >= count, 0.0)}
    if name == "router":
        chosen, weights = result
        return {"experts": chosen, "expert weights": weights.new_zeros(len(chosen), len(a["gate"])).scatter_(1, chosen.long(), weights)}
    if name in ("linear", "moe"):  # kernels leave sums in parts
        result = ops.whole(result, torch.bfloat16)
    return {OTHERS[name]: result}


@dataclass
class Call:
    """One call of an operation by the definitions: its result, its stages, and what it left in the caches."""

    name: str
    result: object
    stages: dict[str, torch.Tensor]
    rows: list[torch.Tensor]
    states: list[torch.Tensor]


@contextlib.contextmanager
def operations(functions: dict[str, Callable], watch: Callable | None = None) -> Iterator[None]:
    """Runs `functions` as operations, and the definitions as the others; `watch(name, nth, arguments by name, result)`, if given, sees
    every call and says what is returned."""
    calls: dict[str, int] = {}

    def watched(name: str, function: Callable) -> Callable:
        signature = inspect.signature(backend._definitions[name])

        def call(*args, **kwargs):
            nth = calls[name] = calls.get(name, -1) + 1
            return watch(name, nth, signature.bind(*args, **kwargs).arguments, function(*args, **kwargs))

        return call

    with contextlib.ExitStack() as stack:
        for name, definition in backend._definitions.items():
            function = functions.get(name, definition)
            stack.enter_context(backend.trying(name, watched(name, function) if watch else function))
        yield


Table = dict[str, "Agreement | Overlap"]


class Comparison:
    """One step of one layer: the definitions first (`define`), then the kernels as often as wanted (`follow`)."""

    def __init__(self, wrappers: dict[str, Callable], positions: torch.Tensor):
        self.wrappers, self.positions, self.tape = wrappers, positions, []

    def define(self, block: Callable):
        """block() with the definitions."""
        def watch(name, nth, a, result):
            self.tape.append(Call(name, result, stages(name, nth, a, result), [rows_of(*place) for place in written(name, a)],
                                  [state.clone() for state in states(name, a)]))
            return result

        with operations({}, watch):
            return block()

    def follow(self, block: Callable, table: Table, same_input: bool):
        """block() with the kernels, each stage compared into `table`; with `same_input` each goes on as the definition's."""
        tape = iter(self.tape)

        def watch(name, nth, a, result):
            call = next(tape)
            assert call.name == name, f"expected the operation {call.name}, found {name}"
            for stage, got in stages(name, nth, a, result).items():
                at = self.positions if len(got) == len(self.positions) else self.positions[-len(got):]
                table.setdefault(stage, Overlap() if stage in CHOICES else Agreement()).add(got, call.stages[stage], at)
            if not same_input or name == "index_scores":  # whose result shows in the choice that follows
                return result
            for (keys, index), rows in zip(written(name, a), call.rows, strict=True):
                set_rows(keys, index, rows)
            for state, value in zip(states(name, a), call.states, strict=True):
                state.copy_(value)
            return call.result

        with operations(self.wrappers, watch):
            return block()


# ------------------------------------------------------------------------------------------------------------ the layers


@dataclass
class Row:
    """One stage of one layer in one phase, prefill or decode: its agreement in both runs."""

    layer: str
    stage: str
    phase: str
    runs: dict[str, Agreement | Overlap] = field(default_factory=dict)

    def as_dict(self) -> dict:
        return {"layer": self.layer, "stage": self.stage, "phase": self.phase} | {
            run.replace(" ", "_"): {k: v if math.isfinite(v) else None for k, v in agreement.as_dict().items()}
            for run, agreement in self.runs.items()}


def rows_from(name: str, tables: dict[tuple[str, str], Table]) -> list[Row]:
    """A layer's rows from its tables by (phase, run)."""
    rows: dict[tuple[str, str], Row] = {}
    for (phase, run), table in tables.items():
        for stage, agreement in table.items():
            rows.setdefault((stage, phase), Row(name, stage, phase)).runs[run] = agreement
    return sorted(rows.values(), key=lambda row: ORDER.index(row.stage))


class Layers:
    """Both runs of the same tokens, layer after layer. `wanted` and `found`: by step, the streams that the definitions and the kernels
    have made so far."""

    def __init__(self, checkpoint, ids: list[int], decode: int, past: int, device: torch.device, wrappers: dict[str, Callable], seed: int):
        """`ids`: the prompt, and then `decode` tokens that come one by one; the first is at position `past`."""
        self.checkpoint, self.config, self.past, self.device, self.wrappers = checkpoint, checkpoint.config, past, device, wrappers
        self.numerics, self.context, self.seed = Numerics(dtype=torch.bfloat16), past + len(ids), seed
        prompt = len(ids) - decode
        starts = [*range(0, prompt, CHUNK), *range(prompt, len(ids))]
        rope, tokens = Rope(self.config), torch.tensor(ids, device=device)
        self.steps = [Step.at(torch.arange(past + i, past + j, device=device), tokens[i:j], rope)
                      for i, j in zip(starts, [*starts[1:], len(ids)], strict=True)]
        self.phases = ["prefill" if i < prompt else "decode" for i in starts]
        embed = self.bind("").stored("embed.weight")
        X = [embed[step.ids].bfloat16()[:, None].expand(-1, self.config.hc_mult, -1).contiguous() for step in self.steps]
        self.wanted, self.found = [Streams(x) for x in X], [Streams(x) for x in X]

    def bind(self, prefix: str) -> Binder:
        return Binder(self.checkpoint, prefix, self.device, self.numerics)

    def cache(self, layer: int) -> LayerCache:
        return LayerCache(self.config, layer, self.context, CHUNK, self.numerics.dtype, self.device)

    @torch.inference_mode()
    def layer(self, layer: int) -> list[Row]:
        """Runs a layer; its weights are held no longer than that."""
        bind, config = self.bind(f"layers.{layer}."), self.config
        definition, memory = Block(bind, config, layer), self.cache(layer)
        with operations(self.wrappers):
            block, caches = Block(bind, config, layer), {run: self.cache(layer) for run in RUNS}
        remember(config, [memory, *caches.values()], self.past, torch.Generator(self.device).manual_seed(self.seed + layer))

        def through(block: Block, streams: Streams, step: Step, cache: LayerCache) -> Streams:
            streams = block(streams, step, cache)
            streams.settled()  # for the comparison; the next layer takes what is pending
            return streams

        return self._both(f"layer {layer} {config.kind(layer)} {'hash' if config.is_hash_layer(layer) else 'learned'}",
                          lambda streams, step: through(definition, streams, step, memory),
                          lambda streams, step, run: through(block, streams, step, caches[run]))

    @torch.inference_mode()
    def head(self) -> list[Row]:
        """Runs the head, behind the last layer."""
        self.wanted = [streams.settled() for streams in self.wanted]
        with operations(self.wrappers):
            self.found, head = [streams.settled() for streams in self.found], Head(self.bind(""), self.config)
        definition = Head(self.bind(""), self.config)
        return self._both("head", lambda X, step: definition(X), lambda X, step, run: head(X))

    def _both(self, name: str, definition: Callable, kernels: Callable) -> list[Row]:
        """Runs definition(streams, step) and kernels(streams, step, run) for every step."""
        tables: dict[tuple[str, str], Table] = {(phase, run): {} for phase in dict.fromkeys(self.phases) for run in RUNS}
        for i in range(len(self.steps)):
            self._step(i, definition, kernels, tables)
        return rows_from(name, tables)

    def _step(self, i: int, definition: Callable, kernels: Callable, tables: dict[tuple[str, str], Table]) -> None:
        step, wanted, found = self.steps[i], self.wanted[i], self.found[i]
        both, (same, accumulated) = Comparison(self.wrappers, step.positions), RUNS
        self.wanted[i] = both.define(lambda: definition(wanted, step))
        both.follow(lambda: kernels(wanted, step, same), tables[self.phases[i], same], same_input=True)
        self.found[i] = both.follow(lambda: kernels(found, step, accumulated), tables[self.phases[i], accumulated], same_input=False)


# --------------------------------------------------------------------------------------------------------------- report


def cells(agreement: Agreement | Overlap | None) -> str:
    """Two columns: relative error and 1 - cosine, or the overlap."""
    if agreement is None:
        return f"{'':>20}"
    if isinstance(agreement, Overlap):
        return f"{'overlap':>10}{agreement.overlap:>10.4f}"
    return f"{agreement.relative:>10.1e}{1 - min(agreement.cosine, 1.0):>10.1e}"


PHASES = ("prefill", "decode")


def header() -> str:
    columns = [(run, phase) for run in RUNS for phase in PHASES]
    lines = ("".join(f"{part:>20}" for part in parts) for parts in zip(*columns, strict=True))
    return "\n".join(f"{'':<46}{line}" for line in (*lines, f"{'relative':>10}{'1 - cos':>10}" * len(columns)))


def table_lines(rows: list[Row]) -> list[str]:
    """One line a stage of a layer."""
    lines: dict[tuple[str, str], dict] = {}
    for row in rows:
        lines.setdefault((row.layer, row.stage), {})[row.phase] = row.runs
    return [f"{layer:<22}{stage:<24}" + "".join(cells(by_phase.get(phase, {}).get(run)) for run in RUNS for phase in PHASES)
            for (layer, stage), by_phase in lines.items()]


def beyond(rows: list[Row], limit: float) -> list[Row]:
    """The rows that for the same input are further apart than vectors of one length at this cosine; NaN is. A cosine alone would let a
    wrong factor pass."""
    most = math.sqrt(2 * (1 - limit))
    return [row for row in rows if isinstance(a := row.runs[RUNS[0]], Agreement) and not (a.cosine >= limit and a.relative <= most)]


def plot(rows: list[Row], path: Path) -> None:
    """1 - cosine by layer for the main stages, and the overlaps; of prefill and decode the worse."""
    plt = pyplot()
    layers = list(dict.fromkeys(row.layer for row in rows if row.layer != "head"))
    figure, axes = plt.subplots(3, 1, figsize=(10, 12), sharex=True)
    for axis, run in zip(axes, RUNS, strict=False):
        for stage in ("attention mHC x", "q", "kv", "compressed", "attention", "MoE", "streams"):
            points: dict[int, float] = {}
            for row in rows:
                if row.stage == stage and run in row.runs:
                    at, cosine = layers.index(row.layer), row.runs[run].cosine
                    points[at] = max(points.get(at, 1e-9), 1.0 if math.isnan(cosine) else 1 - cosine)
            axis.plot(list(points), list(points.values()), marker=".", label=stage)
        axis.set(yscale="log", ylabel=f"1 - cosine, {run}")
        axis.legend(fontsize=8, ncol=4)
    for run in RUNS:
        for stage in CHOICES:
            points = {}
            for row in rows:
                if row.stage == stage and run in row.runs:
                    at = layers.index(row.layer)
                    points[at] = min(points.get(at, 1.0), row.runs[run].overlap)
            axes[2].plot(list(points), list(points.values()), marker=".", label=f"{stage}, {run}")
    axes[2].set(ylabel="overlap", xlabel="layer")
    axes[2].set_xticks(range(len(layers)), [layer.split()[1] for layer in layers])
    axes[2].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, default=BUNDLED, help="checkpoint folder (default: the bundled tiny one)")
    source.add_argument("--preset", choices=sorted(PRESETS), help="random weights of this shape instead")
    parser.add_argument("--format", choices=[name for name, form in FORMATS.items() if form.names == "native"], default="nvidia",
                        help="of --preset's weights (default: nvidia); f32 on a CPU only")
    parser.add_argument("--layers", type=layer_range, help="A:B, the layers A to B - 1 (default: all)")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--prompt", metavar="N", type=whole(1), default=144, help="random tokens in steps of 8 (default: 144)")
    tokens.add_argument("--prompt-ids", type=token_ids, help="these instead")
    parser.add_argument("--decode", metavar="N", type=whole(0), default=16, help="random tokens one by one behind the prompt (default: 16)")
    parser.add_argument("--past", metavar="N", type=whole(0), default=0,
                        help="this many positions before the prompt, a multiple of 128, have random keys (default: 0)")
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--limit", type=number(0, 1), default=0.9999, help="least cosine for the same input (default: 0.9999)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture; takes matplotlib")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(args: argparse.Namespace) -> int:
    check_outputs(args.json, args.plot)
    device, wrappers = runtime.resolve_device(args.device, "a machine with one"), kernels.wrappers()
    if args.preset:
        check_format(args.format, device)
    checkpoint = SyntheticCheckpoint(PRESETS[args.preset], args.format, device, args.seed) if args.preset else Checkpoint.open(args.model)
    config = checkpoint.config
    layers = range(*(args.layers or (0, config.num_hidden_layers)))
    if layers[-1] >= config.num_hidden_layers:
        raise UserError(f"--layers: expected at most 0:{config.num_hidden_layers}, found {layers[0]}:{layers[-1] + 1}")
    if args.past % 128:
        raise UserError(f"--past: expected a multiple of 128, found {args.past}")
    generator = torch.Generator().manual_seed(args.seed)
    ids = args.prompt_ids or torch.randint(config.vocab_size, (args.prompt,), generator=generator).tolist()
    config.check_tokens(ids)
    ids = ids + torch.randint(config.vocab_size, (args.decode,), generator=generator).tolist()
    runtime.prepare_torch(1 << 40)

    rows: list[Row] = []
    without = sorted(backend._definitions.keys() - wrappers.keys() - {"sample"})  # which no layer calls
    if without:
        print(f"no kernel for {', '.join(without)}: compared with itself")
    print(header())
    both = Layers(checkpoint, ids, args.decode, args.past, device, wrappers, args.seed)
    for part in (*layers, None):
        rows += (more := both.head() if part is None else both.layer(part))
        print("\n".join(table_lines(more)), flush=True)
    bad = beyond(rows, args.limit)
    for row in bad:
        print(f"too far apart: {row.layer}, {row.stage}, {row.phase}: cosine {row.runs[RUNS[0]].cosine:.6f}, relative "
              f"{row.runs[RUNS[0]].relative:.1e}")
    if args.json:
        what = {"source": args.preset or str(args.model), "format": args.format if args.preset else None, "device": str(device),
                "torch": torch.__version__, "layers": [layers[0], layers[-1] + 1], "prompt": len(ids) - args.decode, "decode": args.decode,
                "past": args.past, "seed": args.seed, "limit": args.limit, "without_kernel": without, "rows": [r.as_dict() for r in rows]}
        args.json.write_text(json.dumps(what, indent=1, allow_nan=False) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
