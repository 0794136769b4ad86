"""Trains the bundled checkpoint (checkpoints/tiny) from facts, exports it in NVIDIA's layout and measures what it answers.

    python helpers/train_tiny.py --minutes 7 --out build/tiny          # one GPU; on a CPU: --steps 3 --scale 0.1

Owns: the training loop (one CUDA graph per sequence length: forward, backward, clip, AdamW), the export, the report.
Data comes from tiny_data.py and tiny_facts.py, the model from tiny_model.py; the report's numbers come from
`reference/oracle.py` on the exported folder, so that they are those of the quantised checkpoint. The same seed and
the same number of steps give the same data and the same schedule; GPU sums are not bit-reproducible.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are forked, and the library's threads do not survive that
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "helpers")]

import tiny_data as td  # noqa: E402
import tiny_model as tm  # noqa: E402
from make_checkpoint import write_checkpoint  # noqa: E402

from dsv4.config import PRESETS, ModelConfig  # noqa: E402
from reference import oracle  # noqa: E402

# rows x tokens of each bucket; the long one reaches past index_topk * 4 = 512 tokens, where the indexer starts to choose
BUCKETS = {"short": (96, 64), "middle": (32, 256), "long": (8, 1088)}
RECALL_DISTANCES = (32, 64, 100, 128, 192, 256, 384, 512, 640, 768, 896, 1000)
LM_WEIGHT = 0.02  # of a prompt token next to an answer token's 1
THINK_WEIGHT = 4.0  # of an answer token in thinking mode next to chat's 1: only the last turn of a conversation thinks
THINK_ID = td.VOCAB - len(td.ADDED) + td.ADDED.index(td.THINK)
INDEX_WEIGHT = 0.1
BALANCE_RATE = 1e-3  # step of the router's bias against uneven load
WARMUP = 300  # steps


def say(*words) -> None:
    print(*words, file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------------- data
_sampler: td.Sampler | None = None


def start_worker(tokenizer_json: str) -> None:
    from tokenizers import Tokenizer

    global _sampler
    torch.set_num_threads(1)
    _sampler = td.Sampler(Tokenizer.from_str(tokenizer_json), 0)


def make_batch(task):
    """(seed, step, bucket, rows, length) -> (bucket, ids int64, answers bool), numpy: the same for the same task."""
    seed, step, bucket, rows, length = task
    _sampler.rng.seed(f"{seed} {step} {bucket}")
    return bucket, *_sampler.batch(bucket, rows, length)


def schedule(steps: int, seed: int) -> list[str]:
    """The bucket of every step: short and middle first, then mostly recall: facts are learned long before copying over a distance is."""
    rng, out = random.Random(seed), []
    for step in range(steps):
        done = step / steps
        mix = (50, 50, 0) if done < 0.15 else (15, 45, 40) if done < 0.9 else (30, 35, 35)
        out.append(rng.choices(list(BUCKETS), mix)[0])
    return out


# ------------------------------------------------------------------------------------------------------------ a step
class Step:
    """Forward, backward and update for one bucket on static inputs; on CUDA captured once and then replayed."""

    def __init__(self, state: State, rows: int, length: int):
        device = state.device
        self.state, self.model = state, tm.TinyModel(state.config, length, device)
        self.ids = torch.full((rows, length), 2, dtype=torch.int64, device=device)
        self.answers = torch.zeros(rows, length, dtype=torch.bool, device=device)
        # half of the rows see rounded keys, half rounded streams, in all four combinations
        row = torch.arange(rows, device=device)
        self.switches = tm.Switches((row % 2).float(), (row // 2 % 2).float(), state.sparse)
        self.result = torch.zeros(3, device=device)  # loss, token accuracy on answers, indexer loss
        self.graph = None

    def run(self) -> None:
        s, ids = self.state, self.ids
        weights = tm.quantise_weights(s.params)
        logits, index_loss, chosen = self.model(weights, s.buffers, ids, self.switches)
        target, answers = ids[:, 1:], self.answers[:, 1:].float()
        real = (target != 2).float()
        ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten(), reduction="none").view_as(answers)
        thinking = ((ids == THINK_ID).cumsum(1)[:, 1:] > 0).float()
        weight = answers * (1 + (THINK_WEIGHT - 1) * thinking)
        count = answers.sum().clamp(min=1)
        loss = (ce * weight).sum() / weight.sum().clamp(min=1) + LM_WEIGHT * (ce * real * (1 - answers)).sum() / real.sum().clamp(min=1)
        index = torch.zeros((), device=s.device)
        if index_loss is not None:  # half for all tokens, half for the answers, where a wrong choice costs the most
            seen = (ids != 2).float()
            index = 0.5 * (index_loss * seen).sum() / seen.sum() + 0.5 * (index_loss[:, :-1] * answers).sum() / count
            loss = loss + INDEX_WEIGHT * index
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in s.params.values() if p.grad is not None], 1.0)
        s.optimizer.step()
        with torch.no_grad():
            right = (logits[:, :-1].argmax(-1) == target).float()
            self.result.copy_(torch.stack([loss, (right * answers).sum() / count, index]))
            load = (chosen * (ids != 2)[None, :, :, None]).sum((1, 2))
            s.buffers["gate_bias"] += BALANCE_RATE * s.lr_factor * (load.mean(-1, keepdim=True) - load).sign()

    def capture(self) -> None:
        """Warm up on a side stream (as CUDA graphs ask for), then record. The state is put back afterwards by the caller."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.state.optimizer.zero_grad(set_to_none=True)
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.state.optimizer.zero_grad(set_to_none=True)  # so that the graph owns its gradients
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()
        self.state.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.state.optimizer.zero_grad(set_to_none=True)
            self.run()


class State:
    """Parameters, buffers, optimiser and the scalars that change from step to step, all on one device."""

    def __init__(self, config: ModelConfig, seed: int, peak: float, device: torch.device):
        self.config, self.device, self.peak = config, device, peak
        params, buffers = tm.init_params(config, seed)
        self.params = {name: p.to(device).requires_grad_() for name, p in params.items()}
        self.buffers = {name: b.to(device) for name, b in buffers.items()}
        self.sparse, self.lr_factor = torch.zeros((), device=device), torch.ones((), device=device)
        cuda = device.type == "cuda"
        decayed = [p for name, p in self.params.items() if p.ndim >= 2 and not name.startswith("hc") and "norm" not in name]
        rest = [p for p in self.params.values() if not any(p is d for d in decayed)]
        self.lr = torch.tensor(peak, device=device)
        self.optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.02}, {"params": rest, "weight_decay": 0.0}],
                                           lr=self.lr, betas=(0.9, 0.98), eps=1e-9, capturable=cuda, fused=cuda or None)

    def set_progress(self, step: int, steps: int) -> None:
        """Linear warm-up, cosine to 1 % of the peak; the indexer chooses from the middle of the run on."""
        warm = min(1.0, (step + 1) / min(WARMUP, max(1, steps // 4)))
        factor = warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        self.lr.fill_(self.peak * factor)
        self.lr_factor.fill_(factor)
        self.sparse.fill_(float(step >= 0.5 * steps))

    def snapshot(self):
        return {name: p.detach().clone() for name, p in (*self.params.items(), *self.buffers.items())}

    def restore(self, saved) -> None:
        """Put parameters and buffers back and forget the optimiser's moments, in place (graphs keep the addresses)."""
        with torch.no_grad():
            for name, p in (*self.params.items(), *self.buffers.items()):
                p.copy_(saved[name])
            for moments in self.optimizer.state.values():
                for value in moments.values():
                    value.zero_()


def prepare_steps(state: State, scale: float) -> tuple[dict[str, Step], dict[str, float]]:
    """(step per bucket, seconds per step); on CUDA captured and timed, else run once and timed. Leaves the state as it was."""
    saved, steps, seconds = state.snapshot(), {}, {}
    for name, (rows, length) in BUCKETS.items():
        step = Step(state, max(2, int(rows * scale)), length)
        started = time.perf_counter()
        repeats = 5 if state.device.type == "cuda" else 1
        if state.device.type == "cuda":
            step.capture()
            torch.cuda.synchronize()
            say(f"{name}: graph captured in {time.perf_counter() - started:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
            started = time.perf_counter()
        for _ in range(repeats):
            step()
        if state.device.type == "cuda":
            torch.cuda.synchronize()
        steps[name], seconds[name] = step, (time.perf_counter() - started) / repeats
        say(f"{name}: {tuple(step.ids.shape)} tokens, {seconds[name] * 1e3:.1f} ms per step")
    state.restore(saved)
    return steps, seconds


def train(state: State, pool, args) -> dict:
    """Runs the schedule; returns a record of it for the report. Raises FloatingPointError when the loss is not finite."""
    steps, seconds = prepare_steps(state, args.scale)
    total = args.steps
    if total is None:
        probe = schedule(1000, args.seed)
        total = int(args.minutes * 60 / (sum(seconds[b] for b in probe) / len(probe)))
    plan = schedule(total, args.seed)
    say(f"{total} steps")
    tasks = [(args.seed, i, b, *steps[b].ids.shape) for i, b in enumerate(plan)]
    sums = {name: [0, torch.zeros(3, device=state.device)] for name in BUCKETS}
    started, every, history = time.perf_counter(), max(1, total // 40), []
    for i, (bucket, ids, answers) in enumerate(pool.imap(make_batch, tasks, chunksize=4)):
        step, ids, answers = steps[bucket], torch.from_numpy(ids), torch.from_numpy(answers)
        if state.device.type == "cuda":
            ids, answers = ids.pin_memory(), answers.pin_memory()
        step.ids.copy_(ids, non_blocking=True)
        step.answers.copy_(answers, non_blocking=True)
        state.set_progress(i, total)
        step()
        sums[bucket][0] += 1
        sums[bucket][1] += step.result
        if (i + 1) % every == 0 or i + 1 == total:
            line = {"step": i + 1, "seconds": round(time.perf_counter() - started, 1)}
            for name, (count, value) in sums.items():
                if count:
                    loss, accuracy, index = (value / count).tolist()
                    line[name] = [round(loss, 4), round(accuracy, 4), round(index, 3)]
                    if not math.isfinite(loss):
                        raise FloatingPointError(f"step {i + 1}: the loss of the {name} bucket is {loss}")
                sums[name] = [0, torch.zeros(3, device=state.device)]
            history.append(line)
            say(json.dumps(line))
    return {"steps": total, "seconds": round(time.perf_counter() - started, 1), "history": history,
            "milliseconds_per_step": {name: round(value * 1e3, 2) for name, value in seconds.items()}}


# -------------------------------------------------------------------------------------------------- export, evaluate
def export(state: State, tokenizer, folder: Path) -> int:
    """Writes the checkpoint folder (NVIDIA's layout, two shards) and returns its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    greedy = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}  # it knows facts: a draw could only spoil them
    write_checkpoint(folder, state.config, tm.native(state.config, state.params, state.buffers), "nvidia", 2, generation_config=greedy,
                     overwrite=True)
    td.save_tokenizer(tokenizer, folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def oracle_logits(folder: Path, device, kv_quant: bool):
    """ids [B, S] -> fp32 logits of the exported checkpoint by the reference oracle."""
    config, read = oracle.open_checkpoint(folder)
    kept: dict[str, torch.Tensor] = {}

    def weights(name: str) -> torch.Tensor:
        if name not in kept:
            kept[name] = read(name).to(device)
        return kept[name]

    return lambda ids: oracle.forward(config, weights, ids, kv_quant=kv_quant, keep_hidden=False).logits


def bf16_logits(state: State):
    """ids [B, S] -> logits of the training forward with exported weight values, streams and keys rounded as in bf16."""
    weights = {name: w.detach() for name, w in tm.quantise_weights(state.params).items()}
    models: dict[int, tm.TinyModel] = {}

    def logits(ids):
        on, length = torch.ones(ids.shape[0], device=ids.device), ids.shape[1]
        if length not in models:
            models[length] = tm.TinyModel(state.config, length, ids.device)
        return models[length](weights, state.buffers, ids, tm.Switches(on, on, torch.ones((), device=ids.device)))[0]

    return logits


@torch.no_grad()
def correct(logits_fn, encoder: td.Encoder, items: list[td.Item], device) -> list[bool]:
    """For each item: is greedy generation exactly the expected completion (tiny_data.answered, in batches)?"""
    rows = [(list(encoder.piece(item.prompt)), list(encoder.piece(item.completion))) for item in items]
    tokens = [len(prompt) + len(completion) for prompt, completion in rows]
    order = sorted(range(len(rows)), key=tokens.__getitem__, reverse=True)
    out, at, budget = [False] * len(rows), 0, 32768 if torch.device(device).type == "cuda" else 8192
    while at < len(order):
        length = -(-tokens[order[at]] // 32) * 32  # few different shapes
        chunk = order[at : at + max(1, min(128, budget // length))]
        at += len(chunk)
        ids = torch.full((len(chunk), length), 2)
        for row, i in enumerate(chunk):
            ids[row, : tokens[i]] = torch.tensor(rows[i][0] + rows[i][1])
        best = logits_fn(ids.to(device)).argmax(-1).cpu()
        for row, i in enumerate(chunk):
            prompt, completion = rows[i]
            out[i] = best[row, len(prompt) - 1 : len(prompt) + len(completion) - 1].tolist() == completion
    return out


def table(items: list[td.Item], right: list[bool]) -> dict:
    groups: dict[str, list[bool]] = {}
    for item, ok in zip(items, right, strict=True):
        groups.setdefault(item.group, []).append(ok)
    wrong = [f"{item.group} {item.key}" for item, ok in zip(items, right, strict=True) if not ok]
    return {"all": round(sum(right) / len(right), 5), "count": len(right), "wrong": wrong[:60],
            "groups": {name: round(sum(ok) / len(ok), 4) for name, ok in groups.items()}}


def evaluate(state: State, tokenizer, folder: Path, per_distance: int, phrasings: int | None) -> dict:
    """Accuracy of the exported folder: all facts (every phrasing and mode), and recall by distance, in three numerics."""
    torch.set_float32_matmul_precision("highest")  # TF32 was for training only
    encoder, device = td.Encoder(tokenizer), state.device
    facts, report = td.fact_items(phrasings), {}
    recall = [item for d in RECALL_DISTANCES for item in td.recall_items(encoder, d, per_distance)]
    runs = {"float32, kv-quant off": oracle_logits(folder, device, False),
            "float32, kv-quant model": oracle_logits(folder, device, True), "bf16 streams, kv-quant": bf16_logits(state)}
    probe = torch.tensor([encoder.piece(recall[-1].prompt)], device=device)
    with torch.no_grad():  # the training forward is the oracle's function, up to the rounding of its bf16 rows
        zero = torch.zeros(1, device=device)
        weights = {name: w.detach() for name, w in tm.quantise_weights(state.params).items()}
        ours = tm.TinyModel(state.config, probe.shape[1], device)(
            weights, state.buffers, probe, tm.Switches(zero, zero, torch.ones((), device=device)))[0]
        report["max |dlogit|, training forward against oracle"] = float((ours - runs["float32, kv-quant off"](probe)).abs().max())
    for name, logits_fn in runs.items():
        started = time.perf_counter()
        report[name] = {"facts": table(facts, correct(logits_fn, encoder, facts, device)),
                        "recall": table(recall, correct(logits_fn, encoder, recall, device))}
        say(f"{name}: facts {report[name]['facts']['all']:.4f} of {len(facts)}, recall " +
            ", ".join(f"{k.split('/')[1]}: {v:.2f}" for k, v in report[name]["recall"]["groups"].items()) +
            f" ({time.perf_counter() - started:.0f} s); wrong: {report[name]['facts']['wrong'][:8]}")
    return report


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description="Train, export and measure the bundled checkpoint.")
    parser.add_argument("--out", required=True, type=Path, help="the checkpoint folder to write; the report stands beside it")
    parser.add_argument("--minutes", type=float, default=7.0, help="training time; sets the number of steps from the measured speed")
    parser.add_argument("--steps", type=int, help="a fixed number of steps instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="rows per batch, relative (small for a try-out on a CPU)")
    parser.add_argument("--workers", type=int, default=6, help="processes that make batches")
    parser.add_argument("--per-distance", type=int, default=64, help="recall prompts per distance in the report")
    parser.add_argument("--phrasings", type=int, help="evaluate so many items per fact, not every phrasing and mode")
    args = parser.parse_args(argv)
    tokenizer = td.train_tokenizer()
    pool = multiprocessing.get_context("fork").Pool(args.workers, start_worker, (tokenizer.to_str(),))  # before CUDA starts
    torch.set_float32_matmul_precision("high")
    state = State(PRESETS["tiny"], args.seed, args.lr, torch.device(args.device))
    say(f"{sum(p.numel() for p in state.params.values()) / 1e6:.2f} M parameters, torch {torch.__version__}, {state.device}")
    with pool:
        record = train(state, pool, args)
    size = export(state, tokenizer, args.out)
    report = {"seed": args.seed, "lr": args.lr, "torch": torch.__version__, "size_bytes": size, "training": record,
              "evaluation": evaluate(state, tokenizer, args.out, args.per_distance, args.phrasings)}
    path = args.out.with_name(args.out.name + "_report.json")
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    say(f"{args.out}: {size / 1e6:.2f} MB; report in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
