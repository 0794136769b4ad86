"""Small random checkpoints in every format that the reader knows, all from one set of weights. Owns the writing of checkpoint
folders: `random_weights`, `encode` (quantise, per format), `write_checkpoint`. Tests and the training script use these three.

    python helpers/make_checkpoint.py --out DIR --format nvidia --preset tiny --seed 1 --shards 3 --mtp

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
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

if __name__ == "__main__":  # a script's own folder is on the path, the project's is not
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.checkpoint import LAYER_ALIASES, TOP_ALIASES, Need, needs_of_layer, needs_outside_layers
from dsv4.config import PRESETS, ModelConfig
from dsv4.errors import CheckpointError
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
from dsv4.shards import write_shard


@dataclass(frozen=True)
class Format:
    """How an export stores each kind of linear: "nvfp4" (ModelOpt), "nvfp4-ct" (compressed-tensors), "mxfp4", "fp8" or "plain"."""

    routed: str = "plain"
    shared: str = "plain"
    attention: str = "plain"  # wq_a, wq_b, wkv, wo_a, wo_b and the indexer's wq_b
    mtp_routed: str = "plain"
    fp8_scale: tuple[str, str] = ("scale", "E8M0")  # name and dtype (E8M0, F32, BF16) of an FP8 linear's scale
    plain: torch.dtype = torch.bfloat16
    names: str = "native"


FORMATS = {
    "nvidia": Format("nvfp4", "fp8", "fp8", "mxfp4"),
    "official": Format("mxfp4", "fp8", "fp8", "mxfp4"),
    "compressed-tensors": Format("nvfp4-ct", "plain", "fp8", fp8_scale=("weight_scale_inv", "F32")),
    "all-nvfp4": Format("nvfp4", "nvfp4", "nvfp4", "nvfp4"),
    "base-fp8": Format("fp8", "fp8", "fp8", "fp8", fp8_scale=("scale", "F32")),
    "bf16": Format(),
    "f32": Format(plain=torch.float32),
    "transformers": Format(plain=torch.float32, names="transformers"),
    "hybrid": Format(plain=torch.float32, names="hybrid"),
}
# F32 in every export, whatever the rest is (DeepSeek's table): small, and the router and mHC need the precision.
_ALWAYS_F32 = re.compile(r"(hc_\w+_(fn|base|scale)|attn_sink|ape|gate\.bias)$")
_QUANTIZED_ATTENTION = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)$|mtp\.0\.[eh]_proj$")


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
    """{native name: fp32 tensor} (tid2eid int64); linears by module name. Each tensor's draw depends on the seed and its name only.

    Nothing is left at a neutral value that would hide a mistake: norms are 1 + 0.1 N(0,1), sinks, hc base and scale N(0, 0.5), the
    router's bias N(0, 0.1), tid2eid distinct experts per token; matrices N(0, 1/in), so that activations keep their size."""
    weights = {}
    for need in all_needs(config, mtp):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {need.name}".encode()))
        name, shape = need.name, need.shape
        if name.endswith("tid2eid"):
            order = torch.rand(shape[0], config.n_routed_experts, generator=generator).argsort(dim=1)
            weights[name] = order[:, :shape[1]].contiguous()
            continue
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith("gate.bias"):
            weights[name] = 0.1 * noise
        elif len(shape) == 1:
            weights[name] = 0.5 * noise
        elif name.endswith("ape"):
            weights[name] = 0.3 * noise
        else:
            weights[name] = noise if name == "embed.weight" else noise * shape[1] ** -0.5
    return weights


# ------------------------------------------------------------------------------------------------------------- encode


def kind_of(fmt: Format, name: str) -> str:
    """How a linear of this native name is stored: one of Format's kinds."""
    if ".ffn.experts." in name:
        return fmt.mtp_routed if name.startswith("mtp.") else fmt.routed
    if ".shared_experts." in name:
        return fmt.shared
    return fmt.attention if _QUANTIZED_ATTENTION.search(name) else "plain"


def _plain(fmt, name, tensor):
    if tensor.dtype == torch.int64:
        return tensor
    return tensor.to(torch.float32 if _ALWAYS_F32.search(name) else fmt.plain)


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


def to_tensors(name: str, weight: Weight, fmt: Format) -> dict[str, torch.Tensor]:
    """The tensors under which a linear is stored, by key, in the spelling of its export."""
    if weight.kind == "plain":
        return {f"{name}.weight": weight.payload}
    if weight.kind == "mxfp4":
        return {f"{name}.weight": weight.payload.view(torch.int8), f"{name}.scale": weight.scale.view(torch.float8_e8m0fnu)}
    if weight.kind == "fp8":
        suffix, dtype = fmt.fp8_scale
        scale = weight.scale.view(torch.float8_e8m0fnu) if dtype == "E8M0" else weight.scale
        return {f"{name}.weight": weight.payload, f"{name}.{suffix}": scale.to(torch.bfloat16) if dtype == "BF16" else scale}
    if weight.divisor is not None:
        return {f"{name}.weight_packed": weight.payload, f"{name}.weight_scale": weight.scale,
                f"{name}.weight_global_scale": torch.tensor([weight.divisor], dtype=torch.float32),
                f"{name}.input_global_scale": torch.ones(1)}
    return {f"{name}.weight": weight.payload, f"{name}.weight_scale": weight.scale,
            f"{name}.weight_scale_2": torch.tensor(weight.global_scale, dtype=torch.float32), f"{name}.input_scale": torch.tensor(1.0)}


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
    old = sorted([*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")])
    if old and not overwrite:
        raise CheckpointError(f"{folder}: expected a folder without shards, found {old[0].name}: give another folder, or --overwrite")
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
        _write(folder / file, content)
    return encoded


def _write(path, content):
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
        total = sum(value.numel() * value.element_size() for value in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _write_configs(folder, config, name, fmt, generation_config):
    raw = config.to_dict()
    block = quantization_config(config, name)
    if block is not None:
        raw["quantization_config"] = block
    if fmt.routed != "plain":
        raw["expert_dtype"] = "fp8" if fmt.routed == "fp8" else "fp4"
    raw["torch_dtype"] = "float32" if fmt.plain == torch.float32 else "bfloat16"
    _write(folder / "config.json", json.dumps(raw, indent=2) + "\n")
    if block is not None and "quantized_layers" in block:  # ModelOpt writes its part a second time
        twin = {key: value for key, value in block.items() if key not in ("ignore", "quant_method")}
        _write(folder / "hf_quant_config.json",
               json.dumps({"producer": block["producer"], "quantization": twin | {"exclude_modules": block["ignore"]}}, indent=2) + "\n")
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": raw["eos_token_id"], "do_sample": True, "temperature": 1.0,
                  "top_p": 1.0} if generation_config is None else generation_config
    _write(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description="Write a small random DeepSeek-V4 checkpoint.")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument("--format", required=True, choices=list(FORMATS))
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--config", type=Path, help="a config.json with the model's shape")
    shape.add_argument("--preset", choices=["tiny"], default="tiny", help="the bundled checkpoint's shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--mtp", action="store_true", help="with the keys of an MTP block, which the reader skips")
    parser.add_argument("--cast-mxfp4", action="store_true", help="NVFP4 experts from MXFP4 ones, without loss (format nvidia)")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards that the folder holds")
    args = parser.parse_args(argv)
    if args.shards < 1:
        parser.error(f"--shards: expected 1 or more, found {args.shards}")
    if args.cast_mxfp4 and FORMATS[args.format].routed != "nvfp4":
        parser.error(f"--cast-mxfp4: expected --format nvidia or all-nvfp4, found {args.format}")
    try:
        if args.config is None:
            config = PRESETS[args.preset]
        else:
            try:
                raw = json.loads(args.config.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                parser.error(f"--config {args.config}: expected a JSON file, found: {error}")
            config = ModelConfig.from_dict(raw, source=str(args.config))
        weights = random_weights(config, args.seed, mtp=args.mtp)
        write_checkpoint(args.out, config, weights, args.format, args.shards, args.cast_mxfp4, overwrite=args.overwrite)
    except CheckpointError as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"make_checkpoint: --out {args.out} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in args.out.glob("*.safetensors"))
    print(f"{args.out}: {args.format}, {len(list(args.out.glob('*.safetensors')))} shards, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
