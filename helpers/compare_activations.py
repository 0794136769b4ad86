"""What quantised activations cost (W4A4): `--activations nvfp4` and `fp8` against exact ones, by emulation with the torch definitions.

    python helpers/compare_activations.py [--questions N] [--recall N]                     the bundled checkpoint: its answers
    python helpers/compare_activations.py --preset pro --format nvidia --layers 1:5        random weights at true width: layer by layer
    python helpers/compare_activations.py --model DIR --layers 0:4 --prompt-ids 0,5,9      the same of a checkpoint

Exact means float32 streams and inputs as they are; the weights are exact and the trained KV quantisers on everywhere. Against it:

    bf16 streams      exact inputs, streams and caches in bfloat16: what a GPU run has anyway, the scale for the rest
    fp8               the input of every quantised linear but wo_a in e4m3, 1x128
    nvfp4             NVFP4 where the weight is NVFP4, e4m3 1x128 where it is FP8; scales from each row's own amax
    nvfp4 constant    the same, but behind SwiGLU with the constant scale of swiglu_to_nvfp4, which is what a Blackwell GEMM's epilogue has

All tokens are quantised, prompt and answer.

Answers: the exact run answers greedily; the others read the prompt and that answer, and all tokens' logits are compared. An answer is the
same if each of its tokens is the best there, which is when greedy generation gives it too.

Layers: the whole prompt in one step, from position 0. `attention` and `moe`: that block alone, on its input in the exact run (for moe also
with that run's choice of experts). `layer`: the streams after the whole layer, which got the exact run's streams. `accumulated`: the same
streams, with every layer before it quantised too. All tokens are taken as one vector, as in compare_layers.py. `experts`: the part of the
exact run's choices that was chosen too. Behind the model's last layer come the logits, accumulated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "helpers")]

import tiny_data as td  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from dsv4 import ops, runtime  # noqa: E402
from dsv4.cache import LayerCache  # noqa: E402
from dsv4.checkpoint import Checkpoint  # noqa: E402
from dsv4.config import PRESETS  # noqa: E402
from dsv4.errors import UserError  # noqa: E402
from dsv4.exports import FORMATS  # noqa: E402
from dsv4.formats import Weight  # noqa: E402
from dsv4.kernels.layouts import interleave_gate_up  # noqa: E402
from dsv4.layers import Binder, Numerics  # noqa: E402
from dsv4.layers.mhc import Head, Streams  # noqa: E402
from dsv4.layers.step import Rope, Step  # noqa: E402
from dsv4.model import Block, Model  # noqa: E402
from dsv4.ops.experts import _expert  # noqa: E402
from dsv4.ops.linear import linear_ref, matmul_fp32, quantize_input  # noqa: E402
from dsv4.ops.nvfp4 import swiglu_to_nvfp4_ref, unpack_nvfp4  # noqa: E402
from dsv4.plan import make_plan  # noqa: E402
from dsv4.synthetic import SyntheticCheckpoint  # noqa: E402
from helpers.bench_decode import check_outputs  # noqa: E402
from helpers.compare_layers import Agreement, Overlap  # noqa: E402
from single_shot_inference import BUNDLED, OneLineParser, layer_range, token_ids, whole  # noqa: E402

DISTANCES = 64, 256, 768  # of the recalled sentence: within the window of 128, beyond it, and beyond what the indexer may all choose


def constant_expert(x: torch.Tensor, expert: ops.Expert, limit: float, activations: str, weights: torch.Tensor | None) -> torch.Tensor:
    """An expert as ops.experts has it, but NVFP4 behind SwiGLU by swiglu_to_nvfp4: a constant scale, the routing weight in the row's."""
    if activations != "nvfp4":
        return _expert(x, expert, limit, activations, weights)
    x = quantize_input(x, activations)
    h = interleave_gate_up(matmul_fp32(x, expert.w1).T, matmul_fp32(x, expert.w3).T).T
    return matmul_fp32(unpack_nvfp4(swiglu_to_nvfp4_ref(h, weights, limit)), expert.w2)


class Variant(NamedTuple):
    numerics: Numerics
    expert: Callable = _expert


EXACT = Variant(Numerics())
VARIANTS = {
    "bf16 streams": Variant(Numerics(dtype=torch.bfloat16)),
    "fp8": Variant(Numerics(activations="fp8")),
    "nvfp4": Variant(Numerics(activations="nvfp4")),
    "nvfp4 constant": Variant(Numerics(activations="nvfp4"), constant_expert),
}


# -------------------------------------------------------------------------------------------------------------- experts


class Call(NamedTuple):
    """A call of `moe` by a variant, and where its result belongs."""

    x: torch.Tensor
    experts: ops.Experts
    chosen: torch.Tensor
    weights: torch.Tensor
    limit: float
    activations: str
    shared_activations: str
    expert: Callable
    out: torch.Tensor


def compute(calls: list[Call]) -> None:
    """`moe` for several inputs of one layer: every expert that one of them chose is made and expanded to fp32 once for all of them, as at
    true width that takes longer than its products and a layer of them would not fit."""
    totals = [c.expert(c.x, c.experts.shared, c.limit, c.shared_activations, None) for c in calls]
    for e in torch.unique(torch.cat([c.chosen.flatten() for c in calls])).tolist():
        expert = ops.Expert(*(Weight.plain(weight.dequantize()) for weight in calls[0].experts.routed[e]))
        for call, total in zip(calls, totals, strict=True):
            token, slot = torch.where(call.chosen == e)
            if len(token):
                total.index_add_(0, token, call.expert(call.x[token], expert, call.limit, call.activations, call.weights[token, slot]))
    for call, total in zip(calls, totals, strict=True):
        call.out.copy_(total)


def moe_by(expert: Callable) -> Callable:
    """The operation `moe` with this definition of an expert."""
    def moe(x, experts, chosen, weights, limit, activations, shared_activations):
        call = Call(x, experts, chosen, weights, limit, activations, shared_activations, expert, torch.empty_like(x))
        compute([call])
        return call.out

    return moe


# --------------------------------------------------------------------------------------------------------------- layers


@dataclass
class Outcome:
    """What one run of a layer made; the streams are right once its moe has been computed."""

    attention: torch.Tensor
    moe: Call
    streams: Streams


def run_layer(block: Block, variant: Variant, streams: Streams, step: Step, cache: LayerCache) -> Outcome:
    """Runs a layer but for its `moe`, which is left to `compute`."""
    attention, calls = [], []

    def linear(*args):  # a layer has one, wo_b
        attention.append(linear_ref(*args))
        return attention[-1]

    def moe(x, *args):
        calls.append(Call(x, *args, variant.expert, torch.empty_like(x)))
        return calls[-1].out

    with ops.trying_kernel("linear", linear), ops.trying_kernel("moe", moe):
        out = block(streams, step, cache)
    (attended,), (call,) = attention, calls
    return Outcome(attended, call, out)


@dataclass
class Row:
    """One variant in one layer: its agreement with the exact run (the docstring above says in what)."""

    layer: str
    variant: str
    attention: Agreement = field(default_factory=Agreement)
    moe: Agreement = field(default_factory=Agreement)
    streams: Agreement = field(default_factory=Agreement)
    experts: Overlap = field(default_factory=Overlap)
    accumulated: Agreement = field(default_factory=Agreement)
    accumulated_experts: Overlap = field(default_factory=Overlap)

    def as_dict(self) -> dict:
        return {key: value.as_dict() if isinstance(value, Agreement | Overlap) else value for key, value in vars(self).items()}


class Layers:
    """The exact run and the variants through the same tokens, layer after layer; only the experts that tokens chose are ever made."""

    def __init__(self, checkpoint, ids: list[int], device: torch.device):
        self.checkpoint, self.config, self.device = checkpoint, checkpoint.config, device
        self.step = Step.at(torch.arange(len(ids), device=device), torch.tensor(ids, device=device), Rope(self.config))
        X = self.bind("").stored("embed.weight")[self.step.ids].float()[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        self.exact = X
        self.found = {name: X.to(variant.numerics.dtype) for name, variant in VARIANTS.items()}
        self.first = True

    def bind(self, prefix: str, numerics: Numerics = EXACT.numerics) -> Binder:
        return Binder(self.checkpoint, prefix, self.device, numerics)

    @torch.inference_mode()
    def layer(self, layer: int) -> list[Row]:
        """Runs a layer; its weights are held no longer than that."""
        config, tokens = self.config, len(self.step.ids)
        with ops.trying_kernel("pack_experts", ops.Experts):  # which leaves the routed ones to be made when they are asked for
            blocks = {variant.numerics: Block(self.bind(f"layers.{layer}.", variant.numerics), config, layer)
                      for variant in (EXACT, *VARIANTS.values())}

        def run(variant: Variant, X: torch.Tensor) -> Outcome:
            dtype = variant.numerics.dtype
            cache = LayerCache(config, layer, tokens, tokens, dtype, self.device)
            return run_layer(blocks[variant.numerics], variant, Streams(X.to(dtype)), self.step, cache)

        exact = run(EXACT, self.exact)
        same = {name: run(variant, self.exact) for name, variant in VARIANTS.items()}
        far = same if self.first else {name: run(variant, self.found[name]) for name, variant in VARIANTS.items()}
        alone = {}
        for name, outcome in same.items():
            x = exact.moe.x.to(outcome.moe.x.dtype)
            alone[name] = outcome.moe._replace(x=x, chosen=exact.moe.chosen, weights=exact.moe.weights, out=torch.empty_like(x))
        compute([exact.moe, *(o.moe for o in same.values()), *(() if self.first else (o.moe for o in far.values())), *alone.values()])

        self.exact, self.first = exact.streams.settled(), False
        self.found = {name: outcome.streams.settled() for name, outcome in far.items()}
        title = f"layer {layer} {config.kind(layer)} {'hash' if config.is_hash_layer(layer) else 'learned'}"
        rows = [Row(title, name) for name in VARIANTS]
        for row in rows:
            near = same[row.variant]
            for agreement, got, want in (
                (row.attention, near.attention, exact.attention),
                (row.moe, alone[row.variant].out, exact.moe.out),
                (row.streams, near.streams.settled(), self.exact),
                (row.experts, near.moe.chosen, exact.moe.chosen),
                (row.accumulated, self.found[row.variant], self.exact),
                (row.accumulated_experts, far[row.variant].moe.chosen, exact.moe.chosen),
            ):
                agreement.add(got, want, self.step.positions)
        return rows

    @torch.inference_mode()
    def head(self) -> list[Agreeing]:
        """The logits behind the last layer, accumulated."""
        head, rows = Head(self.bind(""), self.config), []
        want = head(self.exact)
        for name, X in self.found.items():
            rows.append(Agreeing("logits", name))
            rows[-1].add(head(X), want, 0)
        return rows


def cells(agreement: Agreement) -> str:
    return f"{agreement.relative:>10.2e}{agreement.cosine:>9.5f}"


def layer_header() -> str:
    columns = "".join(f"{name:>19}" for name in ("attention", "moe", "layer"))
    below = f"{'relative':>10}{'cosine':>9}"
    return (f"{'':<36}{columns}{'experts':>9}{'accumulated':>19}{'experts':>9}\n"
            f"{'':<36}{below * 3}{'overlap':>9}{below}{'overlap':>9}")


def layer_line(row: Row) -> str:
    return (f"{row.layer:<21}{row.variant:<15}{cells(row.attention)}{cells(row.moe)}{cells(row.streams)}{row.experts.overlap:>9.4f}"
            f"{cells(row.accumulated)}{row.accumulated_experts.overlap:>9.4f}")


# -------------------------------------------------------------------------------------------------------------- answers


@dataclass
class Agreeing:
    """One variant's logits over a group of prompts beside the exact run's: rows of prompt and answer, and of the answers alone."""

    group: str
    variant: str
    rows: int = 0
    best: int = 0  # rows with the same best token
    answer_rows: int = 0
    answer_best: int = 0
    divergence: float = 0.0  # sum of KL(exact, variant), nats
    worst_divergence: float = 0.0
    prompts: int = 0
    same: int = 0  # prompts with the same greedy answer
    right: int = 0  # with the expected one

    def add(self, got: torch.Tensor, want: torch.Tensor, answer: int) -> None:
        """Logits [n, vocab] of one prompt, the last `answer` rows of which choose the answer's tokens."""
        best = got.argmax(-1) == want.argmax(-1)
        p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum(-1)
        self.rows += len(best)
        self.best += int(best.sum())
        self.answer_rows += answer
        self.answer_best += int(best[len(best) - answer:].sum())
        self.divergence += float(divergence.sum())
        self.worst_divergence = max(self.worst_divergence, float(divergence.max()))

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


def load(checkpoint: Checkpoint, context: int, variant: Variant) -> Model:
    plan = make_plan(checkpoint, [torch.device("cpu")], layers=range(checkpoint.config.num_hidden_layers), context=context, chunk=context,
                     dtype=variant.numerics.dtype, free_bytes=runtime.free_bytes)
    return Model(checkpoint, plan, dataclasses.replace(variant.numerics, keep_dequantised=plan.keep_dequantised))


def greedy(model: Model, cache, prompt: list[int], end: int, most: int) -> list[int]:
    """The tokens behind a prompt up to and including `end`; at most so many."""
    cache.reset()
    out = [int(model.forward(prompt, cache).argmax())]
    while len(out) < most and out[-1] != end:
        out.append(int(model.forward(out[-1:], cache).argmax()))
    return out


def bundled_items(questions: int | None, recall: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    """{group: [(prompt's ids, expected answer's ids)]} for the bundled checkpoint: every fact once, evenly thinned to `questions`, and
    `recall` prompts at each distance."""
    encoder = td.Encoder(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")))
    facts = td.fact_items(phrasings=1)
    if questions is not None:
        facts = [facts[i * len(facts) // questions] for i in range(min(questions, len(facts)))]
    groups = {"questions": facts} | {f"recall {d}": td.recall_items(encoder, d, recall) for d in DISTANCES}
    return {group: [(list(encoder.piece(i.prompt)), list(encoder.piece(i.completion))) for i in items] for group, items in groups.items()
            if items}


def answers(groups: dict[str, list[tuple[list[int], list[int]]]]) -> list[Agreeing]:
    """Answers every prompt exactly and holds the variants to it. The first row of a group is the exact run's."""
    checkpoint = Checkpoint.open(BUNDLED)
    runtime.prepare_torch(max(map(checkpoint.layer_bytes, range(checkpoint.config.num_hidden_layers))))
    context = max(len(prompt) + len(expected) + 8 for items in groups.values() for prompt, expected in items)
    exact = load(checkpoint, context, EXACT)
    models = {"exact": (exact, EXACT)} | {name: (load(checkpoint, context, variant), variant) for name, variant in VARIANTS.items()}
    caches, rows = {name: model.new_cache() for name, (model, _) in models.items()}, []
    for group, items in groups.items():
        table = {name: Agreeing(group, name) for name in models}
        for prompt, expected in items:
            answer = greedy(exact, caches["exact"], prompt, expected[-1], len(expected) + 8)
            want = None
            for name, (model, variant) in models.items():
                caches[name].reset()
                # Only where it differs: the helper's moe expands every expert that a token chose.
                other = contextlib.nullcontext() if variant.expert is _expert else ops.trying_kernel("moe", moe_by(variant.expert))
                with other:
                    got = model.forward(prompt + answer[:-1], caches[name], "all")
                want = got if want is None else want
                table[name].add(got, want, len(answer))
                same = got[len(prompt) - 1:].argmax(-1).tolist() == answer
                table[name].prompts += 1
                table[name].same += same
                table[name].right += same and answer == expected
        rows += table.values()
        for row in table.values():
            print(answer_line(row), flush=True)
    return rows


def answer_header() -> str:
    return (f"{'':<27}{'tokens':>8}{'same best':>11}{'mean KL':>10}{'max KL':>10}{'of answers':>12}{'same best':>11}{'same answer':>13}"
            f"{'right':>9}")


def answer_line(row: Agreeing) -> str:
    line = (f"{row.group:<12}{row.variant:<15}{row.rows:>8}{row.best / row.rows:>11.5f}{row.divergence / row.rows:>10.1e}"
            f"{row.worst_divergence:>10.1e}")
    if not row.prompts:
        return line
    return (line + f"{row.answer_rows:>12}{row.answer_best / row.answer_rows:>11.5f}{row.same:>9}/{row.prompts:<3}"
            f"{row.right:>5}/{row.prompts:<3}")


# ----------------------------------------------------------------------------------------------------------------- main


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, metavar="DIR", help="layers of this checkpoint (default: answers of the bundled one)")
    source.add_argument("--preset", choices=sorted(PRESETS), help="layers of random weights of this shape")
    parser.add_argument("--format", choices=[name for name, form in FORMATS.items() if form.names == "native"], default="nvidia",
                        help="of --preset's weights (default: nvidia)")
    parser.add_argument("--layers", type=layer_range, help="A:B, the layers A to B - 1 (default: all)")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--prompt", metavar="N", type=whole(1), default=32, help="so many random tokens through the layers (default: 32)")
    tokens.add_argument("--prompt-ids", type=token_ids, help="these instead")
    parser.add_argument("--seed", type=whole(0), default=0, help="of --preset's weights and of random tokens (default: 0)")
    parser.add_argument("--device", default="cpu", help="of the layers: cpu (default) or a GPU")
    parser.add_argument("--questions", metavar="N", type=whole(1), help="so many of the bundled checkpoint's (default: every fact once)")
    parser.add_argument("--recall", metavar="N", type=whole(0),
                        help=f"prompts that ask for a sentence {', '.join(map(str, DISTANCES))} tokens back, each (default: 32)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.preset or args.model:
        for flag in ("questions", "recall"):
            if getattr(args, flag) is not None:
                source = "--preset" if args.preset else "--model"
                parser.error(f"--{flag}: expected no {source}, whose layers are compared on tokens, not on answers")
    else:
        for flag in ("format", "layers", "prompt", "prompt_ids", "seed", "device"):
            if getattr(args, flag) != parser.get_default(flag):
                parser.error(f"--{flag.replace('_', '-')}: expected --model or --preset with it: without, the bundled checkpoint's answers "
                             "are compared, on the CPU")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(args: argparse.Namespace) -> int:
    check_outputs(args.json, None)
    ops.select_backend("torch")
    what: dict = {"torch": torch.__version__}
    if args.preset or args.model:
        what |= layers(args)
    else:
        print(answer_header())
        rows = answers(bundled_items(args.questions, 32 if args.recall is None else args.recall))
        what |= {"source": str(BUNDLED.relative_to(ROOT)), "answers": [row.as_dict() for row in rows]}
    if args.json:
        args.json.write_text(json.dumps(what, indent=1) + "\n")
    return 0


def layers(args: argparse.Namespace) -> dict:
    """Compares and prints layer after layer; returns what --json has of it."""
    device = runtime.resolve_device(args.device)
    checkpoint = SyntheticCheckpoint(PRESETS[args.preset], args.format, device, args.seed) if args.preset else Checkpoint.open(args.model)
    config = checkpoint.config
    chosen = range(*(args.layers or (0, config.num_hidden_layers)))
    if chosen[-1] >= config.num_hidden_layers:
        raise UserError(f"--layers: expected at most 0:{config.num_hidden_layers}, found {chosen[0]}:{chosen[-1] + 1}")
    ids = args.prompt_ids or torch.randint(config.vocab_size, (args.prompt,), generator=torch.Generator().manual_seed(args.seed)).tolist()
    config.check_tokens(ids)
    runtime.prepare_torch(1 << 40)
    print(layer_header())
    runs, rows, logits = Layers(checkpoint, ids, device), [], []
    for n in chosen:
        rows += (more := runs.layer(n))
        print("\n".join(map(layer_line, more)), flush=True)
    if chosen[-1] == config.num_hidden_layers - 1:
        logits = runs.head()
        print(answer_header().partition("of answers")[0].rstrip(), *map(answer_line, logits), sep="\n")
    return {"source": args.preset or str(args.model), "format": args.format if args.preset else None, "device": str(device),
            "layers": [chosen[0], chosen[-1] + 1], "prompt": len(ids), "seed": args.seed, "rows": [row.as_dict() for row in rows],
            "logits": [row.as_dict() for row in logits]}


if __name__ == "__main__":
    sys.exit(main())
