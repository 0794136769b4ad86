"""What the checkpoint tests share: a small config, a raw reader and writer of shards (independent of dsv4/shards.py, any dtype,
also wrong files), and the published layout: every key with its dtype and shape, typed from the table in DeepSeek's release."""

import json
import struct
from pathlib import Path

from dsv4.config import ModelConfig

# All layer kinds, both routers, groups, and numbers that a 4-bit block of 32 divides; an FP8 block of 128 is ragged everywhere.
MINI = ModelConfig(
    vocab_size=48, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=64, qk_rope_head_dim=16, q_lora_rank=32,
    o_groups=2, o_lora_rank=32, sliding_window=16, compress_ratios=(0, 4, 128, 4), index_n_heads=4, index_head_dim=32, index_topk=4,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_hash_layers=2)

BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "F64": 8}


def elements(shape):
    n = 1
    for x in shape:
        n *= x
    return n


def raw_load(path: Path) -> dict:
    """{key: (dtype, shape, bytes)} of one shard."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length:]
    return {k: (v["dtype"], v["shape"], body[slice(*v["data_offsets"])]) for k, v in header.items()}


def raw_header(tensors: dict, sizes: dict) -> bytes:
    header, at = {}, 0
    for key, (dtype, shape, *_) in tensors.items():
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + sizes[key]]}
        at += sizes[key]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def raw_save(path: Path, tensors: dict) -> None:
    """The inverse of raw_load."""
    sizes = {key: len(value[2]) for key, value in tensors.items()}
    with open(path, "wb") as file:
        file.write(raw_header(tensors, sizes))
        for _, _, value in tensors.values():
            file.write(value)


def save_sparse(folder: Path, tensors: dict, shards: int) -> None:
    """Headers as they are, data as holes: a folder of any size that takes no room. {key: (dtype, shape)}."""
    keys = list(tensors)
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in keys[number * len(keys) // shards:(number + 1) * len(keys) // shards]}
        sizes = {key: elements(shape) * BYTES[dtype] for key, (dtype, shape) in part.items()}
        header = raw_header(part, sizes)
        with open(folder / name, "wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(sizes.values()))
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit(folder: Path, change) -> None:
    """Applies `change({key: (dtype, shape, bytes)})` to all tensors and writes them back, as one shard without an index."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= raw_load(path)
        path.unlink()
    for path in folder.glob("*.index.json"):
        path.unlink()
    change(tensors)
    raw_save(folder / "model.safetensors", tensors)


def published_layout(c: ModelConfig, nvfp4: bool = False, mtp: bool = True) -> dict:
    """{key: (dtype, shape)} of DeepSeek's release, or with `nvfp4` of NVIDIA's export of it (its MTP experts stay MXFP4)."""
    out = {}

    def fp8(name, rows, columns):
        out[name + ".weight"] = ("F8_E4M3", [rows, columns])
        out[name + ".scale"] = ("F8_E8M0", [(rows + 127) // 128, (columns + 127) // 128])

    def expert(name, rows, columns, as_nvfp4):
        if as_nvfp4:
            out[name + ".weight"] = ("U8", [rows, columns // 2])
            out[name + ".weight_scale"] = ("F8_E4M3", [rows, columns // 16])
            out[name + ".weight_scale_2"] = ("F32", [])
            out[name + ".input_scale"] = ("F32", [])
        else:
            out[name + ".weight"] = ("I8", [rows, columns // 2])
            out[name + ".scale"] = ("F8_E8M0", [rows, columns // 32])

    dim, inter, wide = c.hidden_size, c.moe_intermediate_size, c.hc_mult * c.hidden_size

    def block(b, ratio, hashed, as_nvfp4):
        for part in ("attn", "ffn"):
            out[f"{b}.{part}_norm.weight"] = ("BF16", [dim])
            out[f"{b}.hc_{part}_fn"] = ("F32", [24, wide])
            out[f"{b}.hc_{part}_base"] = ("F32", [24])
            out[f"{b}.hc_{part}_scale"] = ("F32", [3])
        a = f"{b}.attn"
        out[f"{a}.attn_sink"] = ("F32", [c.num_attention_heads])
        fp8(f"{a}.wq_a", c.q_lora_rank, dim)
        out[f"{a}.q_norm.weight"] = ("BF16", [c.q_lora_rank])
        fp8(f"{a}.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
        fp8(f"{a}.wkv", c.head_dim, dim)
        out[f"{a}.kv_norm.weight"] = ("BF16", [c.head_dim])
        fp8(f"{a}.wo_a", c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups)
        fp8(f"{a}.wo_b", dim, c.o_groups * c.o_lora_rank)
        for where, width in ((f"{a}.compressor", c.head_dim), (f"{a}.indexer.compressor", c.index_head_dim)):
            if ratio == 4 or (ratio == 128 and "indexer" not in where):
                channels = width * 2 if ratio == 4 else width
                out[f"{where}.wkv.weight"] = out[f"{where}.wgate.weight"] = ("BF16", [channels, dim])
                out[f"{where}.ape"] = ("F32", [ratio, channels])
                out[f"{where}.norm.weight"] = ("BF16", [width])
        if ratio == 4:
            fp8(f"{a}.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            out[f"{a}.indexer.weights_proj.weight"] = ("BF16", [c.index_n_heads, dim])
        out[f"{b}.ffn.gate.weight"] = ("BF16", [c.n_routed_experts, dim])
        if hashed:
            out[f"{b}.ffn.gate.tid2eid"] = ("I64", [c.vocab_size, c.num_experts_per_tok])
        else:
            out[f"{b}.ffn.gate.bias"] = ("F32", [c.n_routed_experts])
        for e in range(c.n_routed_experts):
            expert(f"{b}.ffn.experts.{e}.w1", inter, dim, as_nvfp4)
            expert(f"{b}.ffn.experts.{e}.w2", dim, inter, as_nvfp4)
            expert(f"{b}.ffn.experts.{e}.w3", inter, dim, as_nvfp4)
        for w, rows, columns in (("w1", inter, dim), ("w2", dim, inter), ("w3", inter, dim)):
            fp8(f"{b}.ffn.shared_experts.{w}", rows, columns)

    out["embed.weight"] = ("BF16", [c.vocab_size, dim])
    for layer, ratio in enumerate(c.compress_ratios):
        block(f"layers.{layer}", ratio, layer < c.num_hash_layers, nvfp4)
    out["norm.weight"] = ("BF16", [dim])
    out["head.weight"] = ("BF16", [c.vocab_size, dim])
    if mtp:
        block("mtp.0", 0, False, False)
        fp8("mtp.0.e_proj", dim, dim)
        fp8("mtp.0.h_proj", dim, dim)
        for name in ("enorm", "hnorm", "norm"):
            out[f"mtp.0.{name}.weight"] = ("BF16", [dim])
    for prefix in ("", "mtp.0.") if mtp else ("",):
        out[f"{prefix}hc_head_fn"] = ("F32", [4, wide])
        out[f"{prefix}hc_head_base"] = ("F32", [4])
        out[f"{prefix}hc_head_scale"] = ("F32", [1])
    return out


def layout_bytes(tensors: dict) -> int:
    return sum(elements(shape) * BYTES[dtype] for dtype, shape in tensors.values())
