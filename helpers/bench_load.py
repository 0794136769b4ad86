"""How fast a checkpoint is loaded here, warm (from the page cache), beside what this machine allows in the same run: plain reads of the
same shards by 1, 2, 4 .. threads, into memory that is used again and into fresh memory, and copies from pinned memory to a GPU.

    python helpers/bench_load.py --model DIR [--layers 2:3] [--devices auto] [--threads 1,2,4,8] [--repeat 3]

A folder of true size comes from helpers/make_checkpoint.py. Medians; GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4.errors import UserError  # noqa: E402
from single_shot_inference import OneLineParser, layer_range, whole  # noqa: E402

PIECE = 32 << 20


def read_rate(files: list[Path], threads: int, fresh: bool) -> float:
    """GB/s of reading `files` whole with preadv, by `threads` threads, into one buffer a thread or into memory of their size."""
    import torch

    pieces = [(path, at, min(PIECE, path.stat().st_size - at)) for path in files for at in range(0, path.stat().st_size, PIECE)]
    target, place, lock, total = None, {}, threading.Lock(), sum(size for *_, size in pieces)
    if fresh:
        target, at = memoryview(torch.empty(total, dtype=torch.uint8).numpy()), 0
        for piece in pieces:
            place[piece] = at
            at += piece[2]

    def work(mine):
        while True:
            with lock:
                if not pieces:
                    return
                piece = pieces.pop()
            path, at, size = piece
            view = target[place[piece] : place[piece] + size] if fresh else mine[:size]
            file = os.open(path, os.O_RDONLY)
            while len(view):
                got = os.preadv(file, [view], at)
                view, at = view[got:], at + got
            os.close(file)

    buffers = [None if fresh else memoryview(bytearray(PIECE)) for _ in range(threads)]
    workers = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return total / (time.perf_counter() - start) / 1e9


def link_rate(device) -> float:
    """GB/s of copies of PIECE bytes from pinned memory to a GPU."""
    import torch

    source = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(PIECE, dtype=torch.uint8, device=device)
    target.copy_(source)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(64):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return 64 * PIECE / (time.perf_counter() - start) / 1e9


def load_rate(checkpoint, plan, numerics, threads: int | None = None) -> float:
    """GB/s of loading the planned layers, embedding and head included; the model is dropped."""
    import torch

    from dsv4 import loader
    from dsv4.model import Model

    if threads is not None:
        loader.reading_threads = lambda gpus=0: threads
    total, start = [], time.perf_counter()
    model = Model(checkpoint, plan, numerics, lambda size, part, device: total.append(size))
    for share in plan.devices:
        if share.device.type == "cuda":
            torch.cuda.synchronize(share.device)
    seconds = time.perf_counter() - start
    del model
    gc.collect()
    return sum(total) / seconds / 1e9


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__.split(":")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=layer_range)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=lambda text: [whole(1, 256)(part) for part in text.split(",")], default=[1, 2, 4, 8],
                        help="reading threads, with commas (default: 1,2,4,8)")
    parser.add_argument("--repeat", type=whole(1), default=3)
    args = parser.parse_args(argv)
    try:
        measure(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure(args: argparse.Namespace) -> None:
    """Prints the table."""
    import torch

    from dsv4 import ops, runtime
    from dsv4.checkpoint import Checkpoint
    from dsv4.layers import Numerics
    from dsv4.plan import make_plan

    checkpoint = Checkpoint.open(args.model)
    layers = range(*(args.layers or (0, checkpoint.config.num_hidden_layers)))
    if layers.stop > checkpoint.config.num_hidden_layers:
        raise UserError(f"--layers: expected at most 0:{checkpoint.config.num_hidden_layers}, found {layers.start}:{layers.stop}")
    runtime.prepare_torch(max(checkpoint.layer_bytes(n) for n in layers))
    devices = runtime.resolve_devices(args.devices)
    dtype = torch.float32 if devices[0].type == "cpu" else torch.bfloat16
    runtime.choose_backend(args.backend, checkpoint, layers, devices, dtype, "model", "auto")
    plan = make_plan(checkpoint, devices, layers=layers, context=8, chunk=min(8, ops.max_tokens() or 8), dtype=dtype,
                     free_bytes=runtime.free_bytes, auto=args.devices == "auto", expand=ops.selected_backend() == "torch")
    numerics = Numerics(dtype=dtype, keep_dequantised=plan.keep_dequantised)
    parts = ["embed.", "head.", *(f"layers.{n}." for n in layers)]
    files = sorted({args.model / entry.shard for module, entries in checkpoint._modules.items() for entry in entries.values()
                    if f"{module}.".startswith(tuple(parts))})
    load_rate(checkpoint, plan, numerics)  # warms the page cache
    size = sum(file.stat().st_size for file in files) / 1e9
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {size:.2f} GB in {len(files)} shards, "
          f"torch {torch.__version__}, {', '.join(str(d.device) for d in plan.devices)}, "
          f"backend {ops.selected_backend()}{', dequantised' * plan.keep_dequantised}")
    rates = {}
    for _ in range(args.repeat):
        for count in args.threads:
            for fresh in (False, True):
                name = f"plain reads, {count} threads, {'fresh memory' if fresh else 'one buffer each'}"
                rates.setdefault(name, []).append(read_rate(files, count, fresh))
        for share in plan.devices:
            if share.device.type == "cuda":
                rates.setdefault(f"pinned copies to {share.device}", []).append(link_rate(share.device))
        for count in args.threads:
            rates.setdefault(f"load, {count} reading threads", []).append(load_rate(checkpoint, plan, numerics, count))
    for name, values in rates.items():
        print(f"{name:<44}{statistics.median(values):7.2f} GB/s   ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    sys.exit(main())
