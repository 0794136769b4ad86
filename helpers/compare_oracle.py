"""The package against reference/oracle.py, layer by layer: the streams after every layer and the logits, for one prompt.

    python helpers/compare_oracle.py --model DIR --prompt-ids 0,5,9,27 --kv-quant off [--layers A:B] [--chunk N]

Compare with --kv-quant off first: both then compute the same formulas, and a relative error above 1e-4 is a mistake. With the trained
quantisation on, fp32 noise that crosses a rounding boundary becomes a whole FP8 step in either program, so single tokens may differ.
The oracle reads native names only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from dsv4 import runtime  # noqa: E402
from dsv4.checkpoint import Checkpoint  # noqa: E402
from dsv4.errors import UserError  # noqa: E402
from dsv4.layers import Numerics  # noqa: E402
from dsv4.model import Model  # noqa: E402
from dsv4.plan import make_plan  # noqa: E402
from reference import oracle  # noqa: E402
from single_shot_inference import BUNDLED, layer_range, token_ids, whole  # noqa: E402


def package(args, checkpoint: Checkpoint, layers: range) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """(streams after each layer [S, n, D], logits [S, vocab]) of the package, in chunks of --chunk tokens."""
    runtime.prepare_torch(max(checkpoint.layer_bytes(n) for n in layers))
    plan = make_plan(checkpoint, [torch.device("cpu")], layers=layers, context=len(args.prompt_ids), chunk=len(args.prompt_ids),
                     dtype=torch.float32, free_bytes=runtime.free_bytes)
    model = Model(checkpoint, plan, Numerics(kv_quant=args.kv_quant == "model", keep_dequantised=plan.keep_dequantised))
    cache, pieces, rows = model.new_cache(), {n: [] for n in layers}, []
    model.on_layer = lambda n, streams: pieces[n].append(streams.settled())
    for i in range(0, len(args.prompt_ids), args.chunk):
        rows.append(model.forward(args.prompt_ids[i : i + args.chunk], cache, "all"))
    return {n: torch.cat(X) for n, X in pieces.items()}, torch.cat(rows)


def row(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Prints one comparison, returns its relative error ||a - b|| / ||b||."""
    error, a, b = (ours - theirs).abs(), ours.double().flatten(), theirs.double().flatten()
    relative = float((a - b).norm() / b.norm())
    cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
    token = int(error.flatten(1).amax(1).argmax())
    print(f"{name:<18}{relative:12.2e}{1 - cosine:12.2e}{float(error.max()):12.2e}{token:10d}")
    return relative


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--prompt-ids", type=token_ids, default=list(range(3, 203)), help="default: 200 tokens, 3 to 202")
    parser.add_argument("--kv-quant", choices=("model", "off"), default="off")
    parser.add_argument("--layers", type=layer_range)
    parser.add_argument("--chunk", type=whole(1), default=512)
    args = parser.parse_args(argv)
    try:
        checkpoint = Checkpoint.open(args.model)
        layers = range(*(args.layers or (0, checkpoint.config.num_hidden_layers)))
        if layers[-1] >= checkpoint.config.num_hidden_layers:
            raise UserError(f"--layers: expected at most 0:{checkpoint.config.num_hidden_layers}, found {layers[0]}:{layers[-1] + 1}")
        streams, logits = package(args, checkpoint, layers)
        config, weights = oracle.open_checkpoint(args.model)
        with torch.inference_mode():
            expected = oracle.forward(config, weights, torch.tensor([args.prompt_ids]), kv_quant=args.kv_quant == "model", layers=layers)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyError as error:
        print(f"error: the oracle reads native names only: {error.args[0]}", file=sys.stderr)
        return 3
    print(f"{'':<18}{'relative':>12}{'1 - cosine':>12}{'max |d|':>12}{'at token':>10}")
    kinds = {0: "SWA", 4: "CSA", 128: "HCA"}
    errors = {n: row(f"layer {n} ({kinds[config['compress_ratios'][n]]})", streams[n], hidden[0])
              for n, hidden in zip(layers, expected.hidden[1:], strict=True)}
    worst_logits = row("logits", logits, expected.logits[0])
    first = next((n for n, error in errors.items() if not error <= 1e-4), None)  # NaN fails too
    if first is not None or not worst_logits <= 1e-4:
        print(f"first over 1e-4: {'the head' if first is None else f'layer {first}'}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
