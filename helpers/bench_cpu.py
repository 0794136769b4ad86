"""How fast the bundled checkpoint answers on this CPU: --help, first token, whole answer (each a new process, so with start-up),
and decode tokens/s of a loaded model. Medians; run it on an idle machine.

    python helpers/bench_cpu.py [--runs 5] [--tokens 200] [--model DIR]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from single_shot_inference import whole  # noqa: E402

SCRIPT = str(ROOT / "single_shot_inference.py")
QUESTION = "What is the capital of France?"


def seconds(*argv: str) -> tuple[float, float]:
    """(to the first byte on standard output, to the end) of one run of the script."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, SCRIPT, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(1)
    first = time.perf_counter() - start
    said = child.communicate()[1].decode().strip()
    if child.returncode:
        print(said.splitlines()[-1] if said else f"error: {' '.join(argv)}: exit code {child.returncode}", file=sys.stderr)
        sys.exit(child.returncode)
    return first, time.perf_counter() - start


def decode_ms(model_folder: Path, tokens: int) -> list[float]:
    """Milliseconds of each of `tokens` decode steps after a short prompt, greedy, float32."""
    import torch

    from dsv4 import runtime
    from dsv4.checkpoint import Checkpoint
    from dsv4.layers import Numerics
    from dsv4.model import Model
    from dsv4.plan import make_plan

    checkpoint = Checkpoint.open(model_folder)
    layers = range(checkpoint.config.num_hidden_layers)
    runtime.prepare_torch(max(checkpoint.layer_bytes(n) for n in layers))
    plan = make_plan(checkpoint, [torch.device("cpu")], layers=layers, context=tokens + 32, chunk=32, dtype=torch.float32,
                     free_bytes=runtime.free_bytes)
    model = Model(checkpoint, plan, Numerics(keep_dequantised=plan.keep_dequantised))
    cache, times = model.new_cache(), []
    logits = model.forward(list(range(16)), cache)
    for _ in range(tokens):
        start = time.perf_counter()
        logits = model.forward([int(logits.argmax())], cache)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=whole(1), default=5)
    parser.add_argument("--tokens", type=whole(1), default=200)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "tiny")
    args = parser.parse_args()
    helps = [seconds("--help")[1] for _ in range(args.runs)]
    answers = [seconds("--model", str(args.model), "--temperature", "0", QUESTION) for _ in range(args.runs)]
    steps = decode_ms(args.model, args.tokens)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, medians of {args.runs} runs, {args.tokens} decode steps")
    for name, value, unit, target in (
        ("--help", statistics.median(helps), "s", "under 1"),
        ("first token, from process start", statistics.median(a for a, _ in answers), "s", "under 3"),
        ("whole answer", statistics.median(b for _, b in answers), "s", "under 6"),
        ("decode", 1e3 / statistics.median(steps), "tokens/s", "at least 40"),
    ):
        print(f"{name:<34}{value:8.2f} {unit:<9} ({target})")


if __name__ == "__main__":
    main()
