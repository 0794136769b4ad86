"""Random checkpoints in every format that the reader knows. Owns the writing of checkpoint folders.

    python helpers/make_checkpoint.py --out DIR --format nvidia --preset tiny --seed 1 --shards 3 --mtp
    python helpers/make_checkpoint.py --out DIR --format nvidia --preset flash --layers 2:4

Small ones, all formats from one set of floats: `random_weights`, `encode` (quantise, per format), `write_checkpoint`; tests and the
training script use these three. Those of Pro and Flash at true size, drawn as codes and streamed to the files: `write_true_size`.

The layouts are those of the public exports (checkpoints.md sections 2, 4 and 5): names, dtypes, scale shapes and the
quantization_config of each. A shard is written under a temporary name and renamed, the index last, so that an interrupted run
leaves no folder that looks whole.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

if __name__ == "__main__":  # a script's own folder is on the path, the project's is not
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.checkpoint import LAYER_ALIASES, TOP_ALIASES, Need, human_bytes, needs_of_layer, needs_outside_layers
from dsv4.config import PRESETS, ModelConfig
from dsv4.drawing import draw_tensor, generator_of
from dsv4.errors import CheckpointError
from dsv4.exports import FORMATS, Format, kind_of, plain_dtype, to_tensors
from dsv4.formats import (
    Weight,
    from_reciprocal,
    mxfp4_largest_exponent,
    mxfp4_to_nvfp4,
    nvfp4_global_scale,
    quantize_fp8_block,
    quantize_mxfp4,
    quantize_nvfp4,
)
from dsv4.shards import NewShard, write_shard
from dsv4.synthetic import draw, stored_as

# ------------------------------------------------------------------------------------------------------------ weights


def needs_of_mtp(config: ModelConfig) -> list[Need]:
    """The MTP block `mtp.0.*`: a layer without compressor and with a learned router, two projections, norms, its own hc_head."""
    block = replace(config, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=0)
    needs = [replace(n, name=n.name.replace("layers.0.", "mtp.0.", 1)) for n in needs_of_layer(block, 0)]
    dim, streams = config.hidden_size, config.hc_mult
    needs += [Need(f"mtp.0.{p}", "mtp", (dim, dim), True) for p in ("e_proj", "h_proj")]
    needs += [Need(f"mtp.0.{n}.weight", "norms", (dim,)) for n in ("enorm", "hnorm", "norm")]
    return needs + [Need("mtp.0.hc_head_fn", "mHC", (streams, streams * dim)), Need("mtp.0.hc_head_base", "mHC", (streams,)),
                    Need("mtp.0.hc_head_scale", "mHC", (1,))]


def all_needs(config: ModelConfig, mtp: bool = False) -> list[Need]:
    """Everything in a checkpoint's usual order: embedding, layers, what follows them."""
    outside = needs_outside_layers(config)
    layers = [need for layer in range(config.num_hidden_layers) for need in needs_of_layer(config, layer)]
    return outside[:1] + layers + outside[1:] + (needs_of_mtp(config) if mtp else [])


def random_weights(config: ModelConfig, seed: int = 0, mtp: bool = False) -> dict[str, torch.Tensor]:
    """{native name: fp32 tensor} (tid2eid int64), drawn as drawing.py says; linears by module name, to be quantised by `encode`."""
    return {need.name: draw_tensor(need.name, need.shape, config.n_routed_experts, torch.float32, generator_of(seed, need.name))
            for need in all_needs(config, mtp)}


# ------------------------------------------------------------------------------------------------------------- encode


def _plain(fmt, name, tensor):
    return tensor.to(plain_dtype(fmt, name))


def _group(name):
    """The linears that share a global scale: w1 and w3 of an expert. As ModelOpt exports them."""
    return re.sub(r"\.w[13]$", ".w1+w3", name) if "experts." in name else name


def encode(config: ModelConfig, weights: dict[str, torch.Tensor], fmt: Format, cast_mxfp4: bool = False,
           share_w13: bool = True) -> dict[str, Weight | torch.Tensor]:
    """{native name: Weight for a linear, tensor for the rest} as `fmt` stores them. `cast_mxfp4` makes NVFP4 experts from MXFP4 ones
    without loss; `share_w13` gives w1 and w3 of an expert one global scale (ModelOpt does, other exporters do not)."""
    linears = [need.name for need in all_needs(config, any(name.startswith("mtp.") for name in weights)) if need.linear]
    groups: dict[str, list[str]] = {}
    for name in linears:
        groups.setdefault(_group(name) if share_w13 else name, []).append(name)
    out: dict[str, Weight | torch.Tensor] = {}
    for names in groups.values():
        members = [weights[name].float() for name in names]
        kind = kind_of(fmt, names[0])
        if kind == "plain":
            encoded = [Weight.plain(_plain(fmt, name, w)) for name, w in zip(names, members, strict=True)]
        elif kind == "fp8":
            encoded = [quantize_fp8_block(w, config.weight_block_size, ue8m0=fmt.fp8_scale[1] == "E8M0") for w in members]
            if fmt.fp8_scale[1] == "BF16":
                encoded = [_bf16_scales(w, q) for w, q in zip(members, encoded, strict=True)]
        elif kind == "mxfp4":
            encoded = [quantize_mxfp4(w) for w in members]
        elif cast_mxfp4:
            source = [quantize_mxfp4(w) for w in members]
            largest = mxfp4_largest_exponent(*source)
            encoded = [mxfp4_to_nvfp4(w, largest) for w in source]
        else:
            shared = nvfp4_global_scale(*members)
            encoded = [quantize_nvfp4(w, shared) for w in members]
        if kind == "nvfp4-ct":
            encoded = [from_reciprocal(w, float(torch.tensor(1.0) / torch.tensor(w.global_scale))) for w in encoded]
        out |= dict(zip(names, encoded, strict=True))
    order = {name: None for name in weights}
    out |= {name: _plain(fmt, name, tensor) for name, tensor in weights.items() if name not in out}
    return {name: out[name] for name in order}


def _bf16_scales(w, quantized):
    """FP8 blocks whose F32 scales were rounded to BF16: the payload made for the rounded scale."""
    scale = quantized.scale.bfloat16().float()
    rows = scale.repeat_interleave(quantized.block[0], 0)[:w.shape[0]]
    full = rows.repeat_interleave(quantized.block[1], 1)[:, :w.shape[1]]
    return replace(quantized, payload=(w / full).clamp(-448, 448).to(torch.float8_e4m3fn), scale=scale)


# -------------------------------------------------------------------------------------------------------------- names

_HYBRID = {"attn.kv_norm": "attn.norm"}


def _spell(key, table):
    """`key` with the longest native prefix of `table` (native -> other) replaced."""
    for native in sorted(table, key=len, reverse=True):
        if key == native or key.startswith(native + "."):
            return table[native] + key[len(native):]
    return key


def other_spelling(key: str, names: str) -> str:
    """A native key in "transformers" names (of the module tree), or the "hybrid" names that save_pretrained writes."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", key)
    if match is None:
        table = {native: other for other, native in TOP_ALIASES.items()}
        if names == "hybrid":
            table["head"] = "head"
        top = _spell(key, table)
        return top if top.startswith(("lm_head", "head")) else f"model.{top}"
    if names == "hybrid":
        return f"model.layers.{match[1]}.{_spell(match[2], _HYBRID)}"
    table = {native: other for other, native in LAYER_ALIASES.items() if other != "attn.norm"}
    tail = _spell(match[2], table)
    prefix, dot, rest = tail.partition(".")
    return f"model.layers.{match[1]}.{ {'attn': 'self_attn', 'ffn': 'mlp'}.get(prefix, prefix) }{dot}{rest}"


def _fuse_experts(tensors, config):
    """Transformers' fused experts: gate_up_proj [E, 2I, D] (w1's rows, then w3's) and down_proj [E, D, I]."""
    for layer in range(config.num_hidden_layers):
        stacks = {w: [tensors.pop(f"layers.{layer}.ffn.experts.{e}.{w}.weight") for e in range(config.n_routed_experts)]
                  for w in ("w1", "w2", "w3")}
        gate_up = torch.stack([torch.cat([gate, up]) for gate, up in zip(stacks["w1"], stacks["w3"], strict=True)])
        tensors[f"layers.{layer}.ffn.experts.gate_up_proj"] = gate_up
        tensors[f"layers.{layer}.ffn.experts.down_proj"] = torch.stack(stacks["w2"])


# -------------------------------------------------------------------------------------------------------------- write


def quantization_config(config: ModelConfig, name: str) -> dict | None:
    """The block that the exporter of format `name` writes into config.json; None for the plain ones."""
    fp8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
           "weight_block_size": list(config.weight_block_size)}
    four = {"num_bits": 4, "type": "float", "group_size": 16}
    layers = range(config.num_hidden_layers)
    if name == "official":
        return fp8
    if name == "base-fp8":
        return {key: value for key, value in fp8.items() if key != "scale_fmt"}
    if name in ("nvidia", "all-nvfp4"):
        ignore = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"] if name == "nvidia" else ["head", "mtp.*"]
        return fp8 | {"moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "group_size": 16,
                      "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"}, "ignore": ignore,
                      "config_groups": {"group_0": {"weights": four, "input_activations": four, "targets": ["Linear"]}},
                      "quantized_layers": {f"layers.{n}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for n in layers}}
    if name == "compressed-tensors":
        block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(config.weight_block_size)}
        return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
            "group_0": {"format": "nvfp4-pack-quantized", "weights": four, "targets": [r"re:.*ffn\.experts\..*"]},
            "group_1": {"format": "float-quantized", "weights": block, "targets": [r"re:.*attn\.(fused_wqa_wkv|wq_b|wo_a|wo_b)$"]}}}
    return None


def _assign(tensors, shards):
    """Runs of tensors in order, `shards` of them, near to equal in bytes and none empty."""
    sizes = [(key, value.numel() * value.element_size()) for key, value in tensors.items()]
    total, done, runs = sum(size for _, size in sizes), 0, [[] for _ in range(min(shards, len(sizes)))]
    for place, (key, size) in enumerate(sizes):
        wanted = min(len(runs) - 1, done * len(runs) // max(1, total))
        left = len(sizes) - place
        current = next((i for i, run in enumerate(runs) if not run), len(runs))  # the first still empty run
        index = min(wanted, current)
        if left <= len(runs) - current:  # as many tensors as empty runs: one each
            index = current
        runs[index].append(key)
        done += size
    return runs


def write_checkpoint(folder, config: ModelConfig, weights: dict[str, torch.Tensor], format: str | Format, shards: int = 2,
                     cast_mxfp4: bool = False, share_w13: bool = True, generation_config: dict | None = None,
                     extra_files: dict[str, str | bytes] | None = None, overwrite: bool = False) -> dict[str, Weight | torch.Tensor]:
    """Writes a checkpoint folder: config.json, generation_config.json, shards with an index (one shard: model.safetensors alone), and
    `extra_files` (name -> content, a tokenizer for instance). `weights` as `random_weights` gives them; `format` a name of FORMATS or
    a Format. Returns what `encode` made. Raises CheckpointError for a folder that holds shards, unless `overwrite` removes them."""
    folder, name = Path(folder), format if isinstance(format, str) else "custom"
    fmt = FORMATS[format] if isinstance(format, str) else format
    old = _old_shards(folder, overwrite)
    try:
        encoded = encode(config, weights, fmt, cast_mxfp4, share_w13)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from None
    tensors: dict[str, torch.Tensor] = {}
    for key, value in encoded.items():
        tensors |= to_tensors(key, value, fmt) if isinstance(value, Weight) else {key: value}
    if name == "base-fp8" and any(key.startswith("mtp.") for key in tensors):
        tensors["mtp.0.head.weight"] = tensors["head.weight"].clone()
    if fmt.names == "transformers":
        _fuse_experts(tensors, config)
    if fmt.names != "native":
        tensors = {other_spelling(key, fmt.names): value for key, value in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for path in old:
        path.unlink()
    _write_shards(folder, tensors, shards)
    _write_configs(folder, config, name, fmt, generation_config)
    for file, content in (extra_files or {}).items():
        write_file(folder / file, content)
    return encoded


# ---------------------------------------------------------------------------------------------------------- true size

TRUE_SIZE_FORMATS = ("nvidia", "official", "compressed-tensors", "all-nvfp4")


def shards_of(config: ModelConfig, mtp: bool = True) -> list[list[Need]]:
    """The needs of each shard of a release: the embedding, every layer, what follows the layers, the MTP block: one shard each, which makes
    the published 64 (Pro) and 46 (Flash)."""
    outside = needs_outside_layers(config)
    layers = [needs_of_layer(config, n) for n in range(config.num_hidden_layers)]
    return [outside[:1], *layers, outside[1:], *([needs_of_mtp(config)] if mtp else [])]


def listing(needs: list[Need], config: ModelConfig, fmt: Format) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{key: (dtype, shape)} of everything that a file of this format holds for `needs`."""
    return {need.name + suffix: what for need in needs for suffix, what in stored_as(need, config, fmt).items()}


def write_true_size(folder, config: ModelConfig, format: str, layers: range, seed: int = 0, overwrite: bool = False,
                    threads: int | None = None) -> int:
    """Writes a whole release: all names, shapes, dtypes and shards, with random codes in embedding, head and `layers`. All other tensors
    are holes in their files: there for the audit, zeros if read, no room on the disk. Returns the bytes drawn.

    Never holds more than a tensor for each of its threads. Raises CheckpointError for a folder that holds shards, unless `overwrite`.
    """
    folder, fmt, total, drawn, weight_map = Path(folder), FORMATS[format], 0, 0, {}
    old = _old_shards(folder, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    for path in old:
        path.unlink()
    shards = shards_of(config)
    wanted = {0, len(shards) - 2, *(1 + n for n in layers)}
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for number, needs in enumerate(shards):
            tensors, name = listing(needs, config, fmt), f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            with NewShard(folder / name, tensors) as shard:
                # An exception, Ctrl-C too, ends the iteration, which gives up what was not begun.
                for _ in pool.map(lambda need: _draw_into(shard, need, config, fmt, seed), needs if number in wanted else ()):  # noqa: B023
                    pass
            weight_map |= dict.fromkeys(tensors, name)
            total += shard.nbytes
            drawn += shard.nbytes if number in wanted else 0
    _write_index(folder, total, weight_map)
    _write_configs(folder, config, format, fmt, None)
    return drawn


def _draw_into(shard, need, config, fmt, seed):
    generator = generator_of(seed, need.name)
    if need.linear:
        parts = to_tensors(need.name, draw(need, config, fmt, generator), fmt)
    else:
        parts = {need.name: draw_tensor(need.name, need.shape, config.n_routed_experts, plain_dtype(fmt, need.name), generator)}
    for key, tensor in parts.items():
        shard.write(key, tensor)


def _old_shards(folder, overwrite):
    old = sorted([*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")])
    if old and not overwrite:
        raise CheckpointError(f"{folder}: expected a folder without shards, found {old[0].name}: give another folder, or --overwrite")
    return old


def _write_index(folder, total, weight_map):
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def write_file(path: Path, content: str | bytes) -> None:
    """Under a temporary name beside `path`, then a rename: the new file or the old one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


def _write_shards(folder, tensors, shards):
    runs = _assign(tensors, shards)
    weight_map = {}
    for number, keys in enumerate(runs, 1):
        shard = "model.safetensors" if len(runs) == 1 else f"model-{number:05d}-of-{len(runs):05d}.safetensors"
        write_shard(folder / shard, {key: tensors[key].contiguous() for key in keys}, {"format": "pt"})
        weight_map |= dict.fromkeys(keys, shard)
    if len(runs) > 1:
        _write_index(folder, sum(value.numel() * value.element_size() for value in tensors.values()), weight_map)


def _write_configs(folder, config, name, fmt, generation_config):
    raw = config.to_dict()
    block = quantization_config(config, name)
    if block is not None:
        raw["quantization_config"] = block
    if fmt.routed != "plain":
        raw["expert_dtype"] = "fp8" if fmt.routed == "fp8" else "fp4"
    raw["torch_dtype"] = "float32" if fmt.plain == torch.float32 else "bfloat16"
    write_file(folder / "config.json", json.dumps(raw, indent=2) + "\n")
    if block is not None and "quantized_layers" in block:  # ModelOpt writes its part a second time
        twin = {key: value for key, value in block.items() if key not in ("ignore", "quant_method")}
        write_file(folder / "hf_quant_config.json",
               json.dumps({"producer": block["producer"], "quantization": twin | {"exclude_modules": block["ignore"]}}, indent=2) + "\n")
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": raw["eos_token_id"], "do_sample": True, "temperature": 1.0,
                  "top_p": 1.0} if generation_config is None else generation_config
    write_file(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")


def _layer_range(text):
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"expected A:B with A < B, the layers A to B - 1, found {text!r}")
    return range(int(first), int(last))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description="Write a random DeepSeek-V4 checkpoint: a small one, quantised from floats, or with "
                                     "--preset pro or flash a release's names, shapes, dtypes and shards at true size, drawn as codes.")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument("--format", required=True, choices=list(FORMATS), help=f"pro and flash: {', '.join(TRUE_SIZE_FORMATS)}")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--config", type=Path, help="a config.json with the model's shape")
    shape.add_argument("--preset", choices=["tiny", "pro", "flash"], default="tiny", help="tiny is the bundled checkpoint's shape")
    parser.add_argument("--layers", metavar="A:B", type=_layer_range, help="pro and flash: draw the layers A to B - 1 with embedding and "
                        "head; the rest are holes, which take no room and read as zeros (default: all layers; MTP is always a hole)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, help="of a small one (default: 2)")
    parser.add_argument("--mtp", action="store_true", help="a small one with the keys of an MTP block, which the reader skips")
    parser.add_argument("--cast-mxfp4", action="store_true", help="NVFP4 experts from MXFP4 ones, without loss (format nvidia, small)")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards that the folder holds")
    args = parser.parse_args(argv)
    true_size = args.preset in ("pro", "flash")
    if true_size:
        for flag, given in (("--shards", args.shards is not None), ("--mtp", args.mtp), ("--cast-mxfp4", args.cast_mxfp4)):
            if given:
                parser.error(f"{flag} does not go with --preset {args.preset}, which writes the release's own layout")
        if args.format not in TRUE_SIZE_FORMATS:
            parser.error(f"--format: expected one of {', '.join(TRUE_SIZE_FORMATS)} with --preset {args.preset}, found {args.format}")
    elif args.layers is not None:
        parser.error("--layers: expected --preset pro or flash with it")
    if args.shards is not None and args.shards < 1:
        parser.error(f"--shards: expected 1 or more, found {args.shards}")
    if args.cast_mxfp4 and FORMATS[args.format].routed != "nvfp4":
        parser.error(f"--cast-mxfp4: expected --format nvidia or all-nvfp4, found {args.format}")
    started = time.perf_counter()
    try:
        if args.config is None:
            config = PRESETS[args.preset]
        else:
            try:
                raw = json.loads(args.config.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                parser.error(f"--config {args.config}: expected a JSON file, found: {error}")
            config = ModelConfig.from_dict(raw, source=str(args.config))
        if true_size:
            layers = args.layers or range(config.num_hidden_layers)
            if layers.stop > config.num_hidden_layers:
                parser.error(f"--layers: expected at most 0:{config.num_hidden_layers}, found {layers.start}:{layers.stop}")
            torch.set_num_threads(1)  # the writer has a thread a core
            drawn = write_true_size(args.out, config, args.format, layers, args.seed, args.overwrite)
        else:
            weights = random_weights(config, args.seed, mtp=args.mtp)
            write_checkpoint(args.out, config, weights, args.format, args.shards or 2, args.cast_mxfp4, overwrite=args.overwrite)
    except CheckpointError as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"make_checkpoint: --out {args.out} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    files, seconds = list(args.out.glob("*.safetensors")), time.perf_counter() - started
    size = sum(path.stat().st_size for path in files)
    print(f"{args.out}: {args.format}, {len(files)} shards, {human_bytes(size)}" + (
        f", {human_bytes(drawn)} of them drawn (layers {layers.start}:{layers.stop}), the rest holes; {seconds:.1f} s, "
        f"{drawn / seconds / 1e9:.2f} GB/s" if true_size else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
