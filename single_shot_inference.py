#!/usr/bin/env python3
"""One prompt through DeepSeek-V4 (Pro, Flash, or the bundled tiny one), from the command line.

Read it top to bottom: arguments, prompt, the story (`generate`), and then its parts in the order in which it calls them: plan, load,
prefill and decode. What is not the story lives in `dsv4` (the model; arguments, answer and report) and `encoding` (messages <-> text).
Standard output carries the answer and nothing else; everything else goes to standard error.

Exit codes: 0 done; 1 standard output cannot be written, a kernel failed, a package is missing, or --decode-consistency found a
difference; 2 an argument or prompt is wrong; 3 the checkpoint is; 4 it does not fit; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

# torch and the layers are imported where they are first used: --help and argument errors answer at once.
from dsv4.answer import Answer
from dsv4.arguments import OneLineParser, gibibytes, layer_counts, layer_range, machine, output_file, token_ids, whole
from dsv4.errors import UserError, in_words
from dsv4.terminal import Interrupt, progress_bar, read_text, say

BUNDLED = Path(__file__).resolve().parent / "checkpoints" / "tiny"


# ------------------------------------------------------------------------------------------------------------ arguments


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    p = OneLineParser(prog="single_shot_inference.py", description="Runs one prompt through DeepSeek-V4.", allow_abbrev=False)
    g = p.add_argument_group("prompt (one of these)")
    g.add_argument("prompt", nargs="?", metavar="PROMPT", help="the user's message; - reads it from standard input")
    g.add_argument("--prompt-file", metavar="FILE", help="the user's message from a file (UTF-8); - is standard input")
    g.add_argument("--messages", metavar="FILE", help="JSON: OpenAI-style messages, or an object with messages, tools, response_format")
    g.add_argument("--prompt-ids", metavar="1,2,3", type=token_ids, help="token ids as they are; the folder then needs no tokenizer")
    g.add_argument("--random-prompt", metavar="N", type=whole(1), help="N random token ids, the same ones for a --seed: to measure with")
    g = p.add_argument_group("how the prompt is read")
    g.add_argument("--raw", action="store_true", help="no chat template: the text is the prompt, special tokens in it are recognised")
    g.add_argument("--system", metavar="TEXT", help="a system message")
    g.add_argument("--think", choices=("off", "on", "max"), default="off", help="reason before the answer (default: off)")
    g.add_argument("--print-prompt", action="store_true", help="print the rendered prompt, then stop")
    g = p.add_argument_group("model")
    g.add_argument("--model", metavar="DIR", type=Path, help="checkpoint folder (default: the bundled tiny one)")
    g.add_argument("--synthetic", choices=("pro", "flash", "tiny"),
                   help="no folder: random weights of this model at true size, drawn on the devices; the answer is token ids")
    g.add_argument("--synthetic-format", choices=("nvidia", "official", "compressed-tensors", "all-nvfp4"),
                   help="whose export the random weights are like (default: nvidia, which is NVFP4 experts and FP8 attention)")
    g.add_argument("--past", metavar="N", type=whole(1),
                   help="with --synthetic: the prompt comes behind N tokens, whose keys are random too and not computed")
    g.add_argument("--inspect", action="store_true", help="print what the checkpoint holds, then stop")
    g.add_argument("--plan", action="store_true", help="print which layer goes on which device and what that takes, then stop")
    g.add_argument("--assume", metavar="8xB200", type=machine, help="with --plan: GPUs that are not here, by name or in GiB (2x96)")
    g.add_argument("--backend", choices=("auto", "torch", "cuda"), default="auto",
                   help="auto: cuda (the kernels) on GPUs that they know, else torch (the definitions)")
    g.add_argument("--devices", metavar="LIST", default="auto", help="auto, cpu, or a list such as cuda:0,cuda:1 (default: auto)")
    g.add_argument("--layers-per-device", metavar="20,23", type=layer_counts, help="so many layers on each device (default: equal bytes)")
    g.add_argument("--memory", metavar="GIB", type=gibibytes, help="use at most so much of each device (default: what it has free)")
    g.add_argument("--stream-weights", choices=("host", "disk"),
                   help="routed experts that do not fit the devices stay in host memory or in the files, and come when they are chosen")
    g.add_argument("--dtype", choices=("float32", "bfloat16"), help="of activations and caches (default: float32 on a CPU, else bfloat16)")
    g.add_argument("--context", metavar="N", type=whole(1),
                   help="tokens to plan the caches for (default: prompt + new tokens; with --plan 4096 behind --past)")
    g.add_argument("--prefill-chunk", metavar="N", type=whole(1),
                   help="prompt tokens run at once (default: 512; on the kernels as many as they take: 1024 on H100 and H200, else 8)")
    g.add_argument("--kv-quant", choices=("model", "off"), default="model", help="the trained KV FP8 and indexer FP4 (default: model)")
    g.add_argument("--activations", choices=("auto", "bf16", "fp8", "nvfp4"), default="auto",
                   help="what quantised weights see of their input; emulated where the hardware lacks it (default: auto, which is bf16)")
    g.add_argument("--layers", metavar="A:B", type=layer_range, help="run only the layers A to B - 1, for diagnosis")
    g.add_argument("--decode-consistency", metavar="N", type=whole(1),
                   help="decode N tokens, then hold their logits to a fresh prefill of the same tokens; exit 1 if they differ")
    g = p.add_argument_group("generation (defaults: the checkpoint's generation_config.json)")
    g.add_argument("--max-new-tokens", metavar="N", type=whole(0), default=512, help="0 only reads the prompt (default: 512)")
    g.add_argument("--temperature", metavar="T", type=float, help="0 is greedy, and bit-identical from run to run")
    g.add_argument("--top-k", metavar="K", type=whole(0), help="0 is off")
    g.add_argument("--top-p", metavar="P", type=float)
    g.add_argument("--repetition-penalty", metavar="R", type=float)
    g.add_argument("--seed", metavar="N", type=whole(0, 2**63 - 1), help="makes sampling repeatable")
    g = p.add_argument_group("output")
    g.add_argument("--json", action="store_true", help="one JSON object on standard output instead of the stream")
    g.add_argument("--dump-logits", metavar="FILE",
                   help="safetensors: token_ids [n], logits [n, vocab]; row i is the prediction after token i")
    args = p.parse_args(argv)
    check_arguments(p, args)
    args.model, args.synthetic_format = args.model or BUNDLED, args.synthetic_format or "nvidia"
    return args


def check_arguments(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What argparse cannot say: which arguments exclude each other, and an output that could not be written at the end."""
    sources = [name for name, value in (("PROMPT", args.prompt), ("--prompt-file", args.prompt_file), ("--messages", args.messages),
                                        ("--prompt-ids", args.prompt_ids), ("--random-prompt", args.random_prompt)) if value is not None]
    if len(sources) > 1:
        p.error(f"expected one prompt, found {' and '.join(sources)}: give one of them")
    alone = [flag for flag, given in (("--inspect", args.inspect), ("--plan", args.plan)) if given]
    if others := alone and alone[1:] + sources + ["--print-prompt"] * args.print_prompt:
        p.error(f"{alone[0]} does not go with {others[0]}: it runs nothing; leave one out (--context N plans for N tokens)")
    if not sources and not alone:
        p.error("expected a prompt, found none: give PROMPT, --prompt-file, --messages, --prompt-ids or --random-prompt")
    ids = args.prompt_ids or args.random_prompt
    if args.messages or ids or args.raw:
        for flag, given in (("--system", args.system is not None), ("--raw", args.raw and (args.messages or ids)),
                            ("--think", args.think != "off" and (args.raw or ids))):
            if given:
                p.error(f"{flag} does not go with {sources[0] if args.messages or ids else '--raw'}")
    if args.synthetic:
        if others := ["--model"] * (args.model is not None) + ["--inspect"] * args.inspect:
            p.error(f"--synthetic does not go with {others[0]}: its weights are in no folder")
        if sources and not ids:
            p.error(f"--synthetic does not go with {sources[0]}: random weights have no tokenizer: give --prompt-ids or --random-prompt")
    elif args.synthetic_format:
        p.error("--synthetic-format does not go without --synthetic")
    if args.past and not args.synthetic:
        p.error("--past does not go without --synthetic: the keys of a real past are computed from its tokens")
    for flag, given in (("--dump-logits", args.dump_logits is not None), ("--decode-consistency", args.decode_consistency is not None)):
        if args.past and given:
            p.error(f"{flag} does not go with --past: tokens that were not run have no logits")
    if args.random_prompt and args.print_prompt:
        p.error("--print-prompt does not go with --random-prompt: it has no text")
    idle = "--inspect" if args.inspect else "--plan" if args.plan else "--print-prompt" if args.print_prompt else None
    for flag, given in (("--dump-logits", args.dump_logits is not None), ("--decode-consistency", args.plan and args.decode_consistency)):
        if idle and given:
            p.error(f"{flag} does not go with {idle}: no tokens are run")
    if args.assume and not args.plan:
        p.error("--assume does not go without --plan: a machine that is not here runs nothing")
    if args.dump_logits is not None:
        args.dump_logits = output_file(p, "--dump-logits", args.dump_logits)


# --------------------------------------------------------------------------------------------------------------- prompt


def render_prompt(args: argparse.Namespace):
    """The rendered prompt (encoding.Prompt), or None where token ids were given or are drawn."""
    import encoding

    if args.prompt_ids is not None or args.random_prompt is not None:
        return None
    if args.messages is not None:
        try:
            document = json.loads(read_text(args.messages, "--messages"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"--messages: {args.messages} is not JSON: {error}") from None
        try:
            messages, tools, response_format = encoding.messages_from_json(document)
            return encoding.render(messages, think=args.think, tools=tools, response_format=response_format)
        except encoding.EncodingError as error:
            raise UserError(f"--messages: {args.messages}: {error}") from None
    text = args.prompt
    if args.prompt_file is not None or text == "-":
        text = read_text(text, "PROMPT") if args.prompt_file is None else read_text(args.prompt_file, "--prompt-file")
    if not text:
        raise UserError("expected a prompt, found an empty one: give at least one character")
    try:
        (text + (args.system or "")).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("PROMPT: expected UTF-8, found bytes that are not: convert the text to UTF-8") from None
    if args.raw:
        return encoding.Prompt.raw(text)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return encoding.render([*system, {"role": "user", "content": text}], think=args.think)


def print_prompt(args: argparse.Namespace) -> int:
    """--print-prompt: the text, or with --json the text and its ids, which takes the checkpoint's tokenizer."""
    prompt = render_prompt(args)
    if args.json:
        ids = args.prompt_ids or encode(open_tokenizer(args.model), prompt)
        print(json.dumps({"prompt": prompt and prompt.text, "prompt_ids": ids}, ensure_ascii=False))
    else:
        sys.stdout.write(",".join(map(str, args.prompt_ids)) if prompt is None else prompt.text)  # exactly it: no newline behind
    return 0


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer.json; a folder that cannot be entered has none."""
    with contextlib.suppress(OSError):
        return (folder / "tokenizer.json").is_file()
    return False


def open_tokenizer(folder: Path):
    """The checkpoint's tokenizer. Raises CheckpointError where there is none that can be used."""
    import encoding
    from dsv4.errors import CheckpointError

    path = folder / "tokenizer.json"
    if not has_tokenizer(folder):
        raise CheckpointError(f"{path}: expected the tokenizer beside the shards, found no such file: give --prompt-ids, which needs none")
    try:
        return encoding.Tokenizer(path)
    except encoding.EncodingError as error:
        raise CheckpointError(str(error)) from None


def encode(tokenizer, prompt) -> list[int]:
    """The prompt's ids. Raises CheckpointError for a tokenizer that lacks one of the template's special tokens."""
    import encoding
    from dsv4.errors import CheckpointError

    try:
        return tokenizer.encode(prompt)
    except encoding.EncodingError as error:
        raise CheckpointError(str(error)) from None


def prompt_ids(args: argparse.Namespace, config, tokenizer, prompt) -> list[int]:
    """The ids to run, of the checkpoint's vocabulary."""
    from dsv4.errors import CheckpointError
    from dsv4.sampler import random_ids

    if args.random_prompt is not None:
        check_against(args, config, args.random_prompt)  # before so many are drawn
        return random_ids(args.random_prompt, config.vocab_size, args.seed or 0)
    ids = args.prompt_ids if prompt is None else encode(tokenizer, prompt)
    try:
        config.check_tokens(ids)
    except UserError as error:
        raise error if prompt is None else CheckpointError(f"{args.model / 'tokenizer.json'}: {error}: it is another model's") from None
    return ids


# ----------------------------------------------------------------------------------------------------------- the story


def generate(args: argparse.Namespace) -> int:
    """Reads the prompt, where Ctrl-C just stops, and runs it, where Ctrl-C asks and what there is is kept."""
    started = time.perf_counter()  # the first token's time counts from here, imports included
    prompt = render_prompt(args)
    with Interrupt() as interrupt:
        return run_prompt(args, prompt, interrupt, started)


def run_prompt(args: argparse.Namespace, prompt, interrupt: Interrupt, started: float) -> int:
    """The story: checkpoint, ids, plan, load, prefill, decode, report."""
    import encoding
    from dsv4 import ops, runtime, streaming  # brings torch
    from dsv4.decode import compare_with_prefill, hop_us, hops
    from dsv4.report import planned_bytes, run_line
    from dsv4.sampler import Sampler
    from dsv4.synthetic import fill

    checkpoint, defaults, eos = open_checkpoint(args)
    sampling = choose_sampling(args, defaults)
    if args.decode_consistency is not None:  # exactly N tokens, whatever they are
        args.max_new_tokens, eos = args.decode_consistency, set()
    tokenizer = open_tokenizer(args.model) if prompt is not None or not args.synthetic and has_tokenizer(args.model) else None
    ids = prompt_ids(args, checkpoint.config, tokenizer, prompt)
    planner = planner_of(args, checkpoint, len(ids))
    plan = planner.fitting()
    planned = planned_bytes(plan, runtime.resident_bytes())
    if args.layers:
        layers = checkpoint.config.num_hidden_layers
        say(f"partial model: layers {plan.layers[0]} to {plan.layers[-1]} of {layers}: the text means nothing")
    finish, exit_code, failure, streamed = "interrupt", 130, None, None
    parser = None if args.raw or tokenizer is None else encoding.StreamParser(thinking=tokenizer.decode(ids[-1:]) == "<think>")
    answer = Answer(tokenizer, parser, eos, quiet=args.json)
    run, hop = None, None
    try:
        if ops.selected_backend() == "cuda":
            runtime.build_kernels([d.device for d in plan.devices])
        loading = time.perf_counter()
        runtime.prepare_torch(max(checkpoint.layer_bytes(n) for n in plan.layers))
        model = load(checkpoint, plan, numerics_of(args, planner), interrupt)
        model.on_layer, hop = interrupt.check, hops(model)
        sampler = Sampler(sampling, ids, checkpoint.config.vocab_size, plan.context, plan.devices[-1].device)
        run = Run(model, sampler, interrupt, keep_logits=args.dump_logits is not None or args.decode_consistency is not None)
        if args.past:
            fill(run.cache)
            run.cache.position = args.past
        run.timing["load_s"] = time.perf_counter() - loading
        logits = run.prefill(ids)
        run.timing["first_token_s"] = time.perf_counter() - started
        finish = run.decode(logits, answer, args.max_new_tokens)
        exit_code = 130 if finish == "interrupt" else 0
        if run.rows is not None and exit_code == 0:
            run.last_row(answer.ids)
        if hop:
            run.timing["hop_us"] = hop_us(model)
        streamed = streaming.report(model.supplies.values(), run.timing.get("decode_ms_median"))
    except Interrupt.Stop:
        finish, exit_code = "interrupt", 130
    except UserError as error:  # what was generated before it is kept
        finish, exit_code, failure = "error", error.exit_code, str(error)
    except RuntimeError as error:
        fault = runtime.gpu_fault(error)
        finish, exit_code, failure = "error", fault.exit_code, str(fault)
    answer.close()
    if args.decode_consistency is not None and exit_code == 0:
        told, failure = compare_with_prefill(model, (ids + answer.ids)[: run.cache.position], run.rows, len(ids))
        say(told)
        exit_code = 1 if failure else 0
    if run is not None and args.dump_logits is not None:
        try:
            run.dump_logits(args.dump_logits, ids + answer.ids)
        except UserError as error:
            exit_code, failure = exit_code or error.exit_code, failure or str(error)
    timing = run.timing if run else {}
    memory = runtime.peak_bytes([d.device for d in plan.devices])
    if args.json and answer.broken is None:
        result = {"model": str(checkpoint.folder), "prompt_ids": ids, "output_ids": answer.ids, "text": answer.text,
                  "message": answer.message, "finish_reason": finish, "timing": {k: round(v, 4) for k, v in timing.items()}, "hop": hop,
                  "streamed": streamed, "memory": memory, "planned": planned,
                  "reserved": runtime.reserved_bytes([d.device for d in plan.devices])}
        print(json.dumps(result | ({"error": failure} if failure else {}), ensure_ascii=False))
    if failure is None or answer.ids:
        say(run_line(timing, memory, planned, "error" if answer.broken else finish, streamed, hop))
    if failure is not None:
        say(f"error: {failure}")
    if answer.broken is not None:
        raise answer.broken
    return exit_code


def open_checkpoint(args: argparse.Namespace):
    """The checkpoint, the sampling that it asks for, and the ids that end an answer. Random weights have no wishes: greedy, no end."""
    from dsv4.checkpoint import Checkpoint
    from dsv4.sampler import generation_defaults

    if args.synthetic:
        return synthetic(args), {"temperature": 0.0}, set()
    checkpoint = Checkpoint.open(args.model)
    if unknown := checkpoint.audit().unknown:
        say(f"warning: {args.model} holds {len(unknown)} unknown tensors, {unknown[0]} first: see --inspect")
    return checkpoint, *generation_defaults(checkpoint)


def synthetic(args: argparse.Namespace):
    """The checkpoint that is drawn, each tensor on the device that it is for."""
    from dsv4.config import PRESETS
    from dsv4.synthetic import SyntheticCheckpoint

    return SyntheticCheckpoint(PRESETS[args.synthetic], args.synthetic_format, "cpu")


# ---------------------------------------------------------------------------------------------------------------- plan


def planner_of(args: argparse.Namespace, checkpoint, prompt_tokens: int | None):
    """Backend, devices and what is to be run: everything that can be refused before a byte of weights is read. --plan has no prompt."""
    import torch

    from dsv4 import ops, runtime
    from dsv4.errors import DoesNotFit
    from dsv4.plan import Planner, Room, Wish

    config = checkpoint.config
    context, layers = check_against(args, config, prompt_tokens)
    devices = runtime.resolve_devices(args.devices, args.assume)
    counts = check_counts(args, len(layers), len(devices))
    dtype = getattr(torch, args.dtype) if args.dtype else torch.float32 if devices[0].type == "cpu" else torch.bfloat16
    why = runtime.choose_backend(args.backend, checkpoint, layers, devices, dtype, args.kv_quant, args.activations, args.assume)
    if why is not None:
        say(f"note: the torch definitions run, and not the kernels: {why}")
    if (why := runtime.choose_steps(checkpoint, layers, devices, args.assume)) is not None:
        say(f"note: a prompt is read 8 tokens at a time: {why}")
    elif (most := ops.max_tokens()) and (args.prefill_chunk or 0) > most:
        say(f"note: --prefill-chunk: expected at most {most} on the kernels, found {args.prefill_chunk}: {most} are taken")
    rows = 0 if args.dump_logits is None and args.decode_consistency is None else context
    dump = 4 * rows * config.vocab_size

    def free_bytes(device):  # the rows to dump are kept on the host
        free = args.assume.free if args.assume else runtime.free_bytes(device) - (dump if device.type == "cpu" else 0)
        return min(free, args.memory or free)

    left = runtime.free_bytes(torch.device("cpu")) - dump
    if left < 0:
        flag, less = "--dump-logits", "fewer --max-new-tokens"
        if args.decode_consistency:
            flag, less = "--decode-consistency", "a smaller number"
        raise DoesNotFit(f"{flag}: {context} rows of {config.vocab_size} numbers need {dump / 2**30:.2f} GiB of host memory, "
                         f"{(left + dump) / 2**30:.2f} GiB are free: give a shorter prompt or {less}")
    tokens = prompt_tokens or context
    chunk = min(args.prefill_chunk or ops.max_tokens() or 512, tokens, ops.max_tokens() or tokens)
    wish = Wish(layers, context, chunk, dtype, logit_rows=chunk if dump else 1, dump_rows=rows,
                caches=1 if args.decode_consistency is None else 2, auto=args.devices == "auto", per_device=counts,
                drawn=bool(args.synthetic), stream=args.stream_weights)
    return Planner(checkpoint, [Room(device, free_bytes(device)) for device in devices], wish, None if args.assume else left)


def check_against(args: argparse.Namespace, config, prompt_tokens: int | None) -> tuple[int, range]:
    """The context and the layers to run, which the model must have."""
    most, past = config.max_position_embeddings, args.past or 0
    context, found = args.context or min(past + 4096, most), ""
    if prompt_tokens is None and past >= context:
        raise UserError(f"--context: expected more than the {past} tokens of --past, found {context}")
    if prompt_tokens is not None:
        context = args.context or past + prompt_tokens + args.max_new_tokens
        found = f" ({f'{past} tokens of --past, ' * bool(past)}a prompt of {prompt_tokens} tokens and {args.max_new_tokens} new ones)"
        prompt_tokens += past
        if prompt_tokens > context:
            before = f"the {past} of --past and " * bool(past)
            raise UserError(f"--context: expected at least {before}the prompt's {prompt_tokens - past} tokens, found {context}")
    if context > most:
        raise UserError(f"--context: expected at most the model's {most} positions, found {context}{found}: ask for less")
    first, last = args.layers or (0, config.num_hidden_layers)
    if last > config.num_hidden_layers:
        raise UserError(f"--layers: expected at most 0:{config.num_hidden_layers}, found {first}:{last}")
    width = config.index_head_dim
    if args.kv_quant == "model" and 4 in config.compress_ratios and width & (width - 1):
        raise UserError(f"--kv-quant model: the indexer's Hadamard rotation needs index_head_dim to be a power of two, found {width}: "
                        "use --kv-quant off")
    return context, range(first, last)


def check_counts(args: argparse.Namespace, layers: int, devices: int) -> tuple[int, ...] | None:
    """--layers-per-device: as many as there are layers, for each of the devices that were named."""
    counts = args.layers_per_device
    if counts and sum(counts) != layers:
        raise UserError(f"--layers-per-device: expected counts that add up to {layers} layers, found {sum(counts)}")
    if counts and (len(counts) > devices or len(counts) < devices and args.devices != "auto"):
        raise UserError(f"--layers-per-device: expected a count for each of {devices} devices, found {len(counts)}")
    return counts


def show_plan(args: argparse.Namespace) -> int:
    """--plan: what would go where, from headers (or the index) alone; exit code 4 where it does not fit."""
    import torch

    from dsv4 import runtime
    from dsv4.announced import Disk, open_for_plan
    from dsv4.errors import DoesNotFit
    from dsv4.report import PlanReport

    checkpoint, disk = (synthetic(args), Disk(0, 0, 0)) if args.synthetic else open_for_plan(args.model)
    planner = planner_of(args, checkpoint, None)
    report = PlanReport(planner, args.assume, runtime.free_bytes(torch.device("cpu")), disk)
    print(json.dumps(report.to_dict(), ensure_ascii=False, indent=2) if args.json else "\n".join(report.lines()))
    return 0 if report.fits else DoesNotFit.exit_code


def numerics_of(args: argparse.Namespace, planner):
    """The run's choices about numbers; whether weights are kept dequantised was the plan's."""
    from dsv4.layers import Numerics

    return Numerics(dtype=planner.wish.dtype, kv_quant=args.kv_quant == "model", keep_dequantised=planner.plan.keep_dequantised,
                    activations="bf16" if args.activations == "auto" else args.activations)


def choose_sampling(args: argparse.Namespace, defaults: dict):
    """The flags, else the checkpoint's generation_config.json, else 1.0 / off / 1.0 / 1.0."""
    from dsv4.sampler import Sampling

    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    flags = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return Sampling(**defaults | flags, seed=args.seed)


# ---------------------------------------------------------------------------------------------------------------- load


def load(checkpoint, plan, numerics, interrupt: Interrupt):
    """The model, layer by layer, under a bar of bytes that names the layer and its device."""
    from dsv4.model import Model, loaded_bytes

    total = checkpoint.nbytes("embed") + checkpoint.nbytes("head") + sum(loaded_bytes(checkpoint, plan, n) for n in plan.layers)
    with progress_bar(total, "load", "B") as bar:

        def on_progress(count, part, device):
            interrupt.check()
            bar.update(count)
            bar.set_postfix_str(f"{part} on {device}")

        return Model(checkpoint, plan, numerics, on_progress)


# -------------------------------------------------------------------------------------------------- prefill and decode


class Run:
    """A loaded model and one sequence: prefill, decode, and what they took."""

    def __init__(self, model, sampler, interrupt: Interrupt, keep_logits: bool):
        import torch

        from dsv4.decode import decoder
        from dsv4.prefill import Prefill

        self.model, self.interrupt, self.cache = model, interrupt, model.new_cache()
        self.reader, self.decoder = Prefill(model, self.cache), decoder(model, self.cache, sampler)
        # One row a token, fp32 on the host, allocated once: the plan counted it.
        self.rows = torch.empty(self.cache.context, model.config.vocab_size) if keep_logits else None
        self.timing: dict[str, float] = {}

    def prefill(self, ids: list[int]):
        """Reads the prompt in chunks; returns the logits after its last token."""
        start, begun = time.perf_counter(), self.cache.position
        self.interrupt.check()
        try:
            with progress_bar(len(ids), "prefill", "tok", hidden=len(ids) <= self.cache.chunk) as bar:

                def on_chunk(tokens, rows):
                    end = self.cache.position
                    if rows is not None:
                        self.rows[end - tokens : end] = rows
                    bar.update(tokens)
                    if end < begun + len(ids):  # what is read to its end is used
                        self.interrupt.check()

                return self.reader.read(ids, on_chunk, rows=self.rows is not None)
        finally:
            tokens, seconds = self.cache.position - begun, time.perf_counter() - start
            self.timing |= {"prefill_s": seconds, "prefill_tokens": tokens, "prefill_tokens_per_s": tokens / seconds}

    def decode(self, logits, answer: Answer, max_new_tokens: int) -> str:
        """Samples, streams and feeds back until the end; returns the finish reason."""
        start, times = time.perf_counter(), []
        try:
            while len(answer.ids) < max_new_tokens:
                begun = time.perf_counter()
                answer.push(self.decoder.step() if answer.ids else self.decoder.sample(logits))
                times.append(time.perf_counter() - begun)
                if self.rows is not None:
                    self.rows[self.cache.position - 1] = self.decoder.logits
                if answer.ids[-1] in answer.eos:
                    return "stop"
                if self.interrupt.asked or answer.broken:
                    return "interrupt"
                if self.cache.position >= self.cache.context:
                    break
            return "length"
        except Interrupt.Stop:
            return "interrupt"
        finally:
            steps, seconds = max(len(answer.ids) - 1, 0), time.perf_counter() - start  # the first token came with the prefill
            self.timing |= {"decode_s": seconds, "decode_tokens": steps, "decode_tokens_per_s": steps / seconds if steps else 0.0,
                            "decode_ms_per_token": 1e3 * seconds / steps if steps else 0.0}
            if len(times) > 1:  # the mean has what the first step does once (graphs are captured), the median has not
                self.timing["decode_ms_median"] = 1e3 * statistics.median(times[1:])

    def last_row(self, generated: list[int]) -> None:
        """Runs the last generated token too, if the context has room: a dump has a row for every token."""
        if generated and self.cache.position < self.cache.context:
            self.rows[self.cache.position - 1] = self.model.forward(generated[-1:], self.cache)

    def dump_logits(self, path: Path, ids: list[int]) -> None:
        """Writes the row of every token that was run. Atomic: a new file or none."""
        import torch

        from dsv4.shards import write_shard

        rows = self.rows[: self.cache.position]
        try:
            write_shard(path, {"token_ids": torch.tensor(ids[: len(rows)], dtype=torch.int64), "logits": rows})
        except OSError as error:
            raise UserError(f"--dump-logits: {path} cannot be written: {error.strerror or error}") from None


# --------------------------------------------------------------------------------------------------------------- start


def inspect(args: argparse.Namespace) -> int:
    """--inspect: the audit of the headers; exit code 3 where something is wrong."""
    from dsv4.checkpoint import Checkpoint

    audit = Checkpoint.open(args.model, strict=False).audit()
    print(json.dumps(audit.to_dict(), ensure_ascii=False, indent=2) if args.json else "\n".join(audit.lines()))
    return 3 if audit.problems else 0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        work = print_prompt if args.print_prompt else inspect if args.inspect else show_plan if args.plan else generate
        code = work(args)
        sys.stdout.flush()
        return code
    except (UserError, ModuleNotFoundError) as error:
        say(f"error: {in_words(error)}")
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # every other file is handled where it is opened: this is standard output
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit does not fail on it again
        if not isinstance(error, BrokenPipeError):  # a reader that went away needs no telling
            say(f"error: standard output cannot be written: {error.strerror}")
        return 1


def start() -> int:
    """`main` as a program: closed streams count as /dev/null, text is UTF-8 whatever the locale says."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(encoding="utf-8", errors="backslashreplace")
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late Ctrl-C must not change the exit code
    return code


if __name__ == "__main__":
    sys.exit(start())
