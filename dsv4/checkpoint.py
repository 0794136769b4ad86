"""A checkpoint folder: shards, the audit of their headers, names in every spelling, and one weight by its meaning.
Owns everything between files and `Weight`s; knows nothing of layers or devices.

The folder is audited before a byte of weights is read: the headers say which tensor lies where, with which shape and dtype,
and `audit()` holds that against what the config needs. A format is recognised by dtype and sibling keys, never by metadata
alone: exporters' metadata differ between revisions of the same repository. Sources: DeepSeek's release (names, dtypes),
ModelOpt and compressed-tensors exports, transformers' conversion_mapping; checkpoints.md sections 0 and 2 to 5, model.md section 11.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from .config import PRESETS, ModelConfig
from .errors import CheckpointError
from .formats import MXFP4_BLOCK, NVFP4_BLOCK, Weight, from_reciprocal
from .shards import FLOATS, PACKED, Entry, Stamp, read_entry, read_header, stamp_of, tensor_of

# ------------------------------------------------------------------------------------------------------------- names
# Native names are DeepSeek's own ("layers.3.attn.wq_a.weight"). This is the one table of other spellings: transformers'
# module names, and the hybrid that its save_pretrained writes (native names with some of transformers' and `attn.norm`).
# A key's "model." is dropped, `self_attn` and `mlp` become `attn` and `ffn`, then the longest entry that is a prefix applies.
TOP_ALIASES = {
    "embed_tokens": "embed", "lm_head": "head",
    "hc_head.hc_fn": "hc_head_fn", "hc_head.hc_base": "hc_head_base", "hc_head.hc_scale": "hc_head_scale",
}
LAYER_ALIASES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "attn.q_a_proj": "attn.wq_a", "attn.q_a_norm": "attn.q_norm", "attn.q_b_proj": "attn.wq_b", "attn.kv_proj": "attn.wkv",
    "attn.o_a_proj": "attn.wo_a", "attn.o_b_proj": "attn.wo_b", "attn.sinks": "attn.attn_sink", "attn.norm": "attn.kv_norm",
    "attn.compressor.kv_proj": "attn.compressor.wkv", "attn.compressor.gate_proj": "attn.compressor.wgate",
    "attn.compressor.position_bias": "attn.compressor.ape", "attn.compressor.kv_norm": "attn.compressor.norm",
    "attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
    "attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
    "attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "attn_hc.fn": "hc_attn_fn", "attn_hc.base": "hc_attn_base", "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn", "ffn_hc.base": "hc_ffn_base", "ffn_hc.scale": "hc_ffn_scale",
    "ffn.gate.e_score_correction_bias": "ffn.gate.bias",
    "ffn.experts.*.gate_proj": "ffn.experts.*.w1", "ffn.experts.*.up_proj": "ffn.experts.*.w3",
    "ffn.experts.*.down_proj": "ffn.experts.*.w2",
    "ffn.shared_experts.gate_proj": "ffn.shared_experts.w1", "ffn.shared_experts.up_proj": "ffn.shared_experts.w3",
    "ffn.shared_experts.down_proj": "ffn.shared_experts.w2",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"((?:ffn|mlp)\.experts\.)(\d+)(\..+)")
_templates: dict[str, str] = {}  # translated tails with the expert's number taken out: a Pro checkpoint has ~60


def _apply(aliases, name):
    for alias in sorted(aliases, key=len, reverse=True):
        if name == alias or name.startswith(alias + "."):
            return aliases[alias] + name[len(alias):]
    return name


def native_name(key: str) -> str:
    """A key of any known spelling -> its native name; an unknown key comes back without "model." and otherwise as it is."""
    name = key[6:] if key.startswith("model.") else key
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _apply(TOP_ALIASES, name)
    tail, expert = layer[2], None
    match = _EXPERT.fullmatch(tail)
    if match is not None:
        tail, expert = match[1] + "*" + match[3], match[2]
    if tail not in _templates:
        prefix, dot, rest = tail.partition(".")
        _templates[tail] = _apply(LAYER_ALIASES, {"self_attn": "attn", "mlp": "ffn"}.get(prefix, prefix) + dot + rest)
    tail = _templates[tail]
    return f"layers.{layer[1]}.{tail if expert is None else tail.replace('*', expert, 1)}"


# What is left out on purpose, by name. `input_scale` and its kin belong to activation quantisation and to cache quantisation
# schemes of other engines; nothing here reads them (weight-only, or scales taken from the activations themselves).
SKIPPED_SUFFIXES = {"input_scale", "input_scale_2", "input_global_scale", "q_scale", "k_scale", "v_scale", "kv_scale", "bias_vl"}
SCALE_SUFFIXES = {"scale", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"}


def _skip_reason(name, config):
    if name.startswith("mtp."):
        return "mtp.* (multi-token prediction; not used for plain generation)"
    module, _, suffix = name.rpartition(".")
    if suffix in SKIPPED_SUFFIXES:
        return f"*.{suffix}"
    if suffix.endswith("inv_freq"):
        return "*.inv_freq (rotary buffers, computed from the config)"
    layer = re.fullmatch(r"layers\.(\d+)\.ffn\.gate", module)
    if suffix == "bias" and layer and int(layer[1]) < config.num_hash_layers:
        return "gate.bias on hash layers (they have no bias)"
    return None


# ------------------------------------------------------------------------------------------------ what a config needs


@dataclass(frozen=True)
class Need:
    """One thing the config asks for: a linear (module name, any format) or a tensor (full key, plain)."""

    name: str
    kind: str  # module kind, for the audit's table
    shape: tuple[int, ...]
    linear: bool = False


class Stored(NamedTuple):
    """How one Need lies on disk. `kind` is a Weight's: "plain", "fp8", "nvfp4" or "mxfp4"; `dtype` that of its elements or codes, as
    safetensors calls it; `nbytes` counts its scales."""

    kind: str
    dtype: str
    nbytes: int


@functools.lru_cache(maxsize=64)  # a plan goes through all layers several times; 1,177 needs are in one of Pro's 61
def needs_of_layer(config: ModelConfig, layer: int) -> tuple[Need, ...]:
    """Every linear and tensor of one layer, native names (model.md section 11)."""
    c, p, out = config, f"layers.{layer}.", []
    dim, ratio, streams = c.hidden_size, c.compress_ratios[layer], c.hc_mult

    def linear(kind, name, rows, columns):
        out.append(Need(p + name, kind, (rows, columns), True))

    def tensor(kind, name, *shape):
        out.append(Need(p + name, kind, shape))

    for branch in ("attn", "ffn"):
        tensor("norms", f"{branch}_norm.weight", dim)
        tensor("mHC", f"hc_{branch}_fn", (2 + streams) * streams, streams * dim)
        tensor("mHC", f"hc_{branch}_base", (2 + streams) * streams)
        tensor("mHC", f"hc_{branch}_scale", 3)
    linear("attention", "attn.wq_a", c.q_lora_rank, dim)
    tensor("norms", "attn.q_norm.weight", c.q_lora_rank)
    linear("attention", "attn.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
    linear("attention", "attn.wkv", c.head_dim, dim)
    tensor("norms", "attn.kv_norm.weight", c.head_dim)
    linear("attention", "attn.wo_a", c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups)
    linear("attention", "attn.wo_b", dim, c.o_groups * c.o_lora_rank)
    tensor("attention", "attn.attn_sink", c.num_attention_heads)

    def compressor(kind, name, width, coff):
        linear(kind, f"{name}.wkv", coff * width, dim)
        linear(kind, f"{name}.wgate", coff * width, dim)
        tensor(kind, f"{name}.ape", ratio, coff * width)
        tensor("norms", f"{name}.norm.weight", width)

    if ratio:
        compressor("compressor", "attn.compressor", c.head_dim, c.coff(layer))
    if ratio == 4:
        linear("indexer", "attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        linear("indexer", "attn.indexer.weights_proj", c.index_n_heads, dim)
        compressor("indexer", "attn.indexer.compressor", c.index_head_dim, 2)
    tensor("gate", "ffn.gate.weight", c.n_routed_experts, dim)
    if layer < c.num_hash_layers:
        tensor("gate", "ffn.gate.tid2eid", c.vocab_size, c.num_experts_per_tok)
    else:
        tensor("gate", "ffn.gate.bias", c.n_routed_experts)
    for w, rows, columns in (("w1", c.moe_intermediate_size, dim), ("w2", dim, c.moe_intermediate_size),
                             ("w3", c.moe_intermediate_size, dim)):
        linear("shared experts", f"ffn.shared_experts.{w}", rows, columns)
        for expert in range(c.n_routed_experts):
            linear("routed experts", f"ffn.experts.{expert}.{w}", rows, columns)
    return tuple(out)


def needs_outside_layers(config: ModelConfig) -> list[Need]:
    """Embedding, final norm, hc_head and head."""
    dim, streams = config.hidden_size, config.hc_mult
    return [Need("embed.weight", "embed", (config.vocab_size, dim)), Need("norm.weight", "norms", (dim,)),
            Need("hc_head_fn", "mHC", (streams, streams * dim)), Need("hc_head_base", "mHC", (streams,)),
            Need("hc_head_scale", "mHC", (1,)), Need("head", "head", (config.vocab_size, dim), True)]


def read_json(path: Path, what: str) -> dict:
    """A JSON object's file. Raises CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected {what}, found: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected {what} (a JSON object), found {type(value).__name__}")
    return value


# ------------------------------------------------------------------------------------------------------------- audit


@dataclass
class Layout:
    """Where and in which format a linear lies."""

    kind: str
    label: str
    shape: tuple[int, int]
    payload: Entry
    scale: Entry | None = None
    global_scale: Entry | None = None
    divides: bool = False

    @property
    def entries(self) -> list[Entry]:
        return [e for e in (self.payload, self.scale, self.global_scale) if e is not None]


@dataclass
class Audit:
    """What the headers say. `formats` is {module kind: {format: [tensors or linears, bytes]}}; `skipped` is {reason: [keys, bytes]};
    `unknown` holds keys nothing here knows; `problems` holds one line for each thing that is wrong."""

    folder: str
    family: str
    layers: dict[str, int] = field(default_factory=dict)
    shards: int = 0
    formats: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    skipped: dict[str, list[int]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(size for kind in self.formats.values() for _, size in kind.values())

    def count(self, table: dict, key: str, size: int) -> None:
        row = table.setdefault(key, [0, 0])
        row[0], row[1] = row[0] + 1, row[1] + size

    def lines(self, most: int = 20) -> list[str]:
        """For people: at most `most` unknown keys and problems each."""
        out = [f"checkpoint  {self.folder}",
               f"family      {self.family}",
               "layers      " + ", ".join(f"{n} {kind}" for kind, n in self.layers.items()),
               f"shards      {self.shards}, {human_bytes(self.total_bytes)} used", ""]
        for kind, formats in self.formats.items():
            for label, (n, size) in formats.items():
                out.append(f"  {kind:<16}{label:<34}{n:>7}  {human_bytes(size):>10}")
        out += [f"  skipped         {reason}: {n} keys, {human_bytes(size)}" for reason, (n, size) in self.skipped.items()]
        for title, items in (("unknown keys", self.unknown), ("problems", self.problems)):
            out += ["", f"{title}: {len(items) or 'none'}"] + [f"  {item}" for item in items[:most]]
            out += [f"  ... and {len(items) - most} more"] * (len(items) > most)
        return out

    def to_dict(self) -> dict:
        """For --json."""
        def table(rows):
            return {key: {"count": n, "bytes": size} for key, (n, size) in rows.items()}

        return {"folder": self.folder, "family": self.family, "layers": dict(self.layers), "shards": self.shards, "bytes": self.total_bytes,
                "formats": {kind: table(rows) for kind, rows in self.formats.items()}, "skipped": table(self.skipped),
                "unknown": list(self.unknown), "problems": list(self.problems)}


def human_bytes(size: int) -> str:
    """12.3 GB: powers of ten, as model cards count."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if size >= 10 ** power:
            return f"{size / 10 ** power:.2f} {unit}"
    return f"{size} B"


def family(config: ModelConfig) -> str:
    """Pro, Flash or tiny by the numbers that size the weights (lengths and token ids may differ), else custom."""
    def size(c):
        return (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.n_routed_experts, c.moe_intermediate_size, c.compress_ratios)

    return next((name for name, preset in PRESETS.items() if size(preset) == size(config)), "custom")


# -------------------------------------------------------------------------------------------------------- checkpoint


class Checkpoint:
    """An opened checkpoint folder. Attributes: folder (Path), config (ModelConfig), generation_config (dict, empty if the folder has
    none). Reading copies the bytes into fresh memory (no memory map): what is resident is what the
    caller keeps."""

    def __init__(self, folder: Path):
        self.folder = folder
        raw = read_json(folder / "config.json", "the model's config")
        self.config = ModelConfig.from_dict(raw, source=str(folder / "config.json"))
        self.block = _fp8_block(raw, self.config)
        path = folder / "generation_config.json"
        self.generation_config = read_json(path, "generation settings") if path.exists() else {}
        self.stamps: dict[str, Stamp] = {}
        self._problems: list[str] = []
        self._modules: dict[str, dict[str, Entry]] = {}  # module -> last part of the key -> entry
        self._layouts: dict[str, Layout] = {}
        self._sizes: dict[str, int] = {}  # native name -> bytes, of what the config needs
        self._needed: set[str] = set()  # modules of which the config needs something
        self._faulty: set[str] = set()  # linears that have a problem already
        self._lost: set[str] = set()  # names that the index puts into a shard that cannot be read
        self._shards = 0
        self._read_shards()
        self._split_fused_experts()
        self._audit = self._make_audit()

    @classmethod
    def open(cls, folder, strict: bool = True) -> Checkpoint:
        """Reads configs and all headers, and audits them. Raises CheckpointError where there is nothing to audit (no folder, no
        config.json, another model) and, unless `strict` is False, for the first problem of the audit."""
        folder = Path(folder)
        try:
            _check_folder(folder)
        except OSError as error:  # a name too long, a folder that must not be entered
            raise CheckpointError(f"{folder}: expected a checkpoint folder, found: {error.strerror or error}") from None
        # 285,660 keys (Pro) are as many small objects; the collector walks them again and again and doubles the time (7 s to 3.5 s).
        collecting = gc.isenabled()
        gc.disable()
        try:
            checkpoint = cls(folder)
        finally:
            if collecting:
                gc.enable()
        problems = checkpoint._audit.problems
        if strict and problems:
            more = f" (and {len(problems) - 1} more; --inspect lists them)" if len(problems) > 1 else ""
            raise CheckpointError(f"{folder}: {problems[0]}{more}")
        return checkpoint

    def audit(self) -> Audit:
        """What the folder holds and what is wrong with it."""
        return self._audit

    # ---- headers

    def _read_shards(self):
        index, files = self._index(), {path.name: path for path in sorted(self.folder.glob("*.safetensors"))}
        placed: dict[str, list[str]] = {name: [] for name in files} if index is None else {}
        for key, name in (index or {}).items():
            placed.setdefault(name, []).append(key)
        for name in sorted(files.keys() - placed.keys()):
            self._problems.append(f"{name}: a shard that the index does not name: remove it, or fetch the index it belongs to")
        where: dict[str, str] = {}
        for name in sorted(placed):
            if name not in files:
                self._problems.append(f"{name}: missing: the index names this shard, the folder does not hold it; fetch it")
                self._lost.update(map(native_name, placed[name]))
                continue
            self._shards += 1
            try:
                with contextlib.suppress(OSError):  # read_header says it
                    self.stamps[name] = stamp_of(files[name])
                entries = read_header(files[name])
            except CheckpointError as error:
                if index is None:  # nothing else to audit
                    raise CheckpointError(f"{self.folder}: {error}") from None
                self._problems.append(str(error))
                self._lost.update(map(native_name, placed[name]))
                continue
            for key, entry in entries.items():
                self._add(key, entry, where)
                if index is not None and index.get(key) != name:
                    says = f"puts it into {index[key]}" if key in index else "does not name it"
                    self._problems.append(f"{name}: {key}: expected this tensor where the index says, but it {says}")
            for key in placed[name]:
                if key not in entries:
                    self._problems.append(f"{name}: {key}: missing: the index puts this tensor here")
                    self._lost.add(native_name(key))

    def _add(self, key, entry, where):
        name = native_name(key)
        if name in where:
            self._problems.append(f"{entry.shard}: {key}: expected each tensor once, found it in {where[name]} as well")
            return
        where[name] = entry.shard
        module, _, suffix = name.rpartition(".")
        self._modules.setdefault(module, {})[suffix] = entry

    def _index(self):
        """{key: shard}, or None for a single file without an index."""
        indexes = sorted(self.folder.glob("*.safetensors.index.json"))
        if len(indexes) > 1:
            raise CheckpointError(f"{self.folder}: expected one *.safetensors.index.json, found {len(indexes)}")
        if indexes:
            weight_map = read_json(indexes[0], "an index of shards").get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                    isinstance(name, str) and Path(name).name == name for name in weight_map.values()):
                raise CheckpointError(f"{indexes[0]}: expected weight_map, from tensor to shard, found {str(weight_map)[:60]}")
            return weight_map
        shards = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not shards:
            gguf = " but GGUF files, which this runner does not read" if list(self.folder.glob("*.gguf")) else ""
            raise CheckpointError(f"{self.folder}: expected *.safetensors shards, found none{gguf}")
        if len(shards) > 1:
            raise CheckpointError(f"{self.folder}: expected model.safetensors.index.json for {len(shards)} shards, found none; fetch it")
        return None

    def _split_fused_experts(self):
        """Gives the experts of transformers' fused tensors (gate_up_proj [E, 2I, D], gate first, and down_proj [E, D, I]; with or
        without FP8 block scales) entries of their own, each a range of the file."""
        c = self.config
        for layer in range(c.num_hidden_layers):
            module = f"layers.{layer}.ffn.experts"
            fused = self._modules.get(module)
            if not fused:
                continue
            for name, projections in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
                for ending, suffix in (("", "weight"), ("_scale_inv", "weight_scale_inv"), ("_scale", "weight_scale")):
                    entry = fused.get(name + ending)
                    if entry is None:
                        continue
                    parts = c.n_routed_experts * len(projections)
                    if len(entry.shape) != 3 or entry.shape[0] != c.n_routed_experts or entry.shape[1] % len(projections):
                        self._problems.append(f"{entry.shard}: {entry.key}: expected [{c.n_routed_experts} experts, rows, columns], "
                                              f"found {list(entry.shape)}")
                        continue
                    shape = (entry.shape[1] // len(projections), entry.shape[2])
                    for part in range(parts):
                        expert, which = divmod(part, len(projections))
                        own = f"{module}.{expert}.{projections[which]}"
                        if suffix in self._modules.setdefault(own, {}):
                            self._problems.append(f"{entry.shard}: {entry.key}: expected each tensor once, found {own}.{suffix} as well")
                            break
                        self._modules[own][suffix] = entry.part(part, parts, shape, f"{entry.key}[{expert}]")
                    fused.pop(name + ending)

    # ---- audit

    def _make_audit(self):
        c = self.config
        kinds = Counter(c.kind(layer) for layer in range(c.num_hidden_layers))
        layers = {kind: kinds[kind] for kind in ("SWA", "CSA", "HCA") if kinds[kind]}
        layers |= {"hash router": min(c.num_hash_layers, c.num_hidden_layers),
                   "learned router": max(0, c.num_hidden_layers - c.num_hash_layers)}
        audit = Audit(str(self.folder), family(c), layers, self._shards, problems=self._problems)
        claimed: set[int] = set()
        self._layer_sizes = []
        self._compare_experts(audit)
        for need in needs_outside_layers(c):
            self._check_need(need, audit, claimed)
        for layer in range(c.num_hidden_layers):
            before = audit.total_bytes
            for need in needs_of_layer(c, layer):
                self._check_need(need, audit, claimed)
            self._layer_sizes.append(audit.total_bytes - before)
        for module, entries in self._modules.items():
            for suffix, entry in entries.items():
                if id(entry) not in claimed:
                    self._check_rest(module, suffix, entry, audit)
        return audit

    def _compare_experts(self, audit):
        """One line, instead of thousands, for a checkpoint whose experts were pruned while its config was not."""
        ids = {int(match[1]) for match in map(re.compile(r"layers\.0\.ffn\.experts\.(\d+)\.w1").fullmatch, self._modules) if match}
        if ids and len(ids) != self.config.n_routed_experts and not self._lost:
            audit.problems.append(f"layers.0: expected {self.config.n_routed_experts} routed experts, as config.json says, "
                                  f"found {len(ids)}")

    def _check_need(self, need, audit, claimed):
        table = audit.formats.setdefault(need.kind, {})
        self._needed.add(need.name if need.linear else need.name.rpartition(".")[0])
        if need.linear:
            layout = self._recognise(need, audit)
            if layout is None:
                return
            self._layouts[need.name] = layout
            claimed.update(map(id, layout.entries))
            size = self._sizes[need.name] = sum(entry.nbytes for entry in layout.entries)
            audit.count(table, layout.label, size)
            return
        module, _, suffix = need.name.rpartition(".")
        entry = self._modules.get(module, {}).get(suffix)
        if entry is None:
            if need.name not in self._lost:
                audit.problems.append(f"{need.name}: missing: expected {list(need.shape)}, found it in no shard")
            return
        claimed.add(id(entry))
        expected = ("I64", "I32") if suffix == "tid2eid" else FLOATS
        if entry.dtype not in expected:
            audit.problems.append(f"{entry.shard}: {entry.key}: expected dtype {' or '.join(expected)}, found {entry.dtype}")
        elif entry.shape != need.shape:
            audit.problems.append(f"{entry.shard}: {entry.key}: expected shape {list(need.shape)}, found {list(entry.shape)}")
        else:
            self._sizes[need.name] = entry.nbytes
            audit.count(table, entry.dtype, entry.nbytes)

    def _check_rest(self, module, suffix, entry, audit):
        name = f"{module}.{suffix}" if module else suffix
        reason = _skip_reason(name, self.config)
        if reason is not None:
            audit.count(audit.skipped, reason, entry.nbytes)
        elif suffix in SCALE_SUFFIXES or suffix.endswith("zero_point"):
            self._check_scale(module, entry, audit)
        else:
            audit.unknown.append(entry.key)

    def _check_scale(self, module, entry, audit):
        """A scale that no format claimed. A linear's own complaint, if it has one, says more than its scale's."""
        siblings = self._modules[module]
        payload = siblings.get("weight") or siblings.get("weight_packed")
        if payload is None:
            if not {f"{module}.weight", f"{module}.weight_packed"} & self._lost:
                audit.problems.append(f"{entry.shard}: {entry.key}: a scale without payload: expected {module}.weight or "
                                      ".weight_packed beside it, found neither")
        elif module not in self._needed:
            audit.unknown.append(entry.key)
        elif module not in self._faulty:
            audit.problems.append(f"{entry.shard}: {entry.key}: expected no such scale beside {payload.dtype} {list(payload.shape)}, "
                                  f"found {entry.dtype} {list(entry.shape)}")

    def _recognise(self, need, audit) -> Layout | None:
        """The format of a linear from dtypes and siblings (checkpoints.md section 0), its shapes checked; None after a problem."""
        found = self._modules.get(need.name, {})
        payload = found.get("weight") or found.get("weight_packed")
        if payload is None:
            if not {f"{need.name}.weight", f"{need.name}.weight_packed"} & self._lost:
                audit.problems.append(f"{need.name}.weight: missing: expected [out, in] = {list(need.shape)}, found it in no shard")
            return None

        def wrong(entry, what):
            self._faulty.add(need.name)
            audit.problems.append(f"{entry.shard}: {entry.key}: {what}")

        scale = next((found[s] for s in ("weight_scale", "scale", "weight_scale_inv") if s in found), None)
        top = found.get("weight_scale_2") or found.get("weight_global_scale")
        rows, columns = need.shape
        if payload.dtype in FLOATS:
            layout = Layout("plain", payload.dtype, need.shape, payload)
            shapes = [(payload, need.shape)]
        elif payload.dtype == "F8_E4M3":
            if scale is None:
                return wrong(payload, "expected a block scale (.scale, .weight_scale or .weight_scale_inv) beside F8_E4M3, found none")
            high, wide = self.block
            layout = Layout("fp8", f"FP8 {high}x{wide}, {scale.dtype} scales", need.shape, payload, scale)
            shapes = [(payload, need.shape), (scale, (-(-rows // high), -(-columns // wide)))]
            if scale.dtype not in ("F8_E8M0", "U8", "F32", "BF16"):
                return wrong(scale, f"expected dtype F8_E8M0, F32 or BF16 for an FP8 block scale, found {scale.dtype}")
        elif payload.dtype in PACKED:
            four = self._four_bit(need, payload, scale, top, found, wrong)
            if four is None:
                return None
            layout, shapes = four
        else:
            return wrong(payload, f"expected dtype BF16, F16, F32, F8_E4M3, U8 or I8, found {payload.dtype}")
        for entry, shape in shapes:
            if entry.shape != shape:
                return wrong(entry, f"expected shape {list(shape)} for {layout.label}, found {list(entry.shape)}")
        return layout

    def _four_bit(self, need, payload, scale, top, found, wrong):
        rows, columns = need.shape
        if scale is None:
            return wrong(payload, f"expected a scale beside packed {payload.dtype}, found none")
        if scale.dtype == "F8_E4M3":
            block, divides = NVFP4_BLOCK, "weight_scale_2" not in found
            if top is None:
                return wrong(payload, "expected weight_scale_2 or weight_global_scale beside NVFP4, found neither")
            if top.dtype != "F32" or math.prod(top.shape) != 1:
                return wrong(top, f"expected one F32 number, found {top.dtype} {list(top.shape)}")
            label = "NVFP4 (compressed-tensors)" if divides else "NVFP4 (ModelOpt)"
            layout = Layout("nvfp4", label, need.shape, payload, scale, top, divides)
        elif scale.dtype in ("F8_E8M0", "U8"):
            block = MXFP4_BLOCK
            if top is not None:
                return wrong(top, f"expected no global scale beside {scale.dtype} scales (MXFP4), found one")
            layout = Layout("mxfp4", "MXFP4", need.shape, payload, scale)
        else:
            return wrong(scale, f"expected dtype F8_E4M3 (NVFP4) or F8_E8M0 or U8 (MXFP4) for a 4-bit weight's scale, found {scale.dtype}")
        if columns % block:
            return wrong(payload, f"expected columns in a multiple of {block} for {layout.label}, found {columns}")
        packed = columns if payload.dtype == "F4" else columns // 2  # F4 counts elements, the others bytes
        return layout, [(payload, (rows, packed)), (scale, (rows, columns // block))]

    # ---- reading

    def entries(self, need: Need) -> Layout | Entry | None:
        """Where a linear (its Layout) or a tensor lies; None where the audit found none."""
        if need.linear:
            return self._layouts.get(need.name)
        module, _, suffix = need.name.rpartition(".")
        return self._modules.get(module, {}).get(suffix)

    def read(self, entry: Entry) -> torch.Tensor:
        """An entry's tensor, read now."""
        return read_entry(self.folder, entry, self.stamps.get(entry.shard))

    def tensor(self, name: str, read: Callable[[Entry], torch.Tensor] | None = None) -> torch.Tensor:
        """A plain tensor by its full native key ("layers.0.attn.attn_sink", "embed.weight"), in the dtype it is stored in. `read`
        gives an entry's tensor where it was read before."""
        module, _, suffix = name.rpartition(".")
        entry = self._modules.get(module, {}).get(suffix)
        if entry is None:
            raise CheckpointError(f"{self.folder}: {name}: missing: found it in no shard")
        layout = self._layouts.get(module)
        if entry.dtype not in (*FLOATS, "I64", "I32") or (layout is not None and layout.kind != "plain"):
            raise CheckpointError(f"{entry.shard}: {entry.key}: expected a plain tensor, found {entry.dtype}; read it as a weight")
        value = (read or self.read)(entry)
        if suffix == "tid2eid" and value.numel() and not 0 <= int(value.min()) <= int(value.max()) < self.config.n_routed_experts:
            raise CheckpointError(f"{entry.shard}: {entry.key}: expected experts from 0 to {self.config.n_routed_experts - 1}, "
                                  f"found {int(value.min())} to {int(value.max())}")
        return value

    def weight(self, name: str, read: Callable[[Entry], torch.Tensor] | None = None, check: bool = True) -> Weight:
        """A linear by its native module name ("layers.0.attn.wq_a", "layers.0.ffn.experts.3.w1", "head"; "embed" and
        "layers.0.ffn.gate" too), still packed. `read` as for `tensor`, and of a global scale the number will do.

        Raises CheckpointError for scales that cannot be (NaN, a zero global scale); without `check`, which waits for the scales' device,
        for global scales alone.
        """
        layout, read = self._layouts.get(name), read or self.read
        if layout is None:
            return Weight.plain(self.tensor(f"{name}.weight", read))
        payload = read(layout.payload)
        if layout.kind == "plain":
            return Weight.plain(payload)
        if layout.payload.dtype == "F4":
            payload = payload.view(layout.shape[0], -1)
        scale, number = read(layout.scale), 1.0
        if scale.dtype == torch.bfloat16:
            scale = scale.float()  # exact
        if layout.global_scale is not None:
            at, number = layout.global_scale, float(read(layout.global_scale))
            if not 0.0 < number < math.inf:
                raise CheckpointError(f"{at.shard}: {at.key}: expected a finite global scale above zero, found {number}; "
                                      "the checkpoint is damaged: fetch the shard again")
        block = {"fp8": self.block, "nvfp4": (1, NVFP4_BLOCK), "mxfp4": (1, MXFP4_BLOCK)}[layout.kind]
        weight = Weight(layout.kind, layout.shape, payload, scale, 1.0 if layout.divides else number, block=block)
        if layout.divides:
            weight = from_reciprocal(weight, number)
        problem = weight.problem() if check else None
        if problem is not None:
            raise CheckpointError(f"{layout.scale.shard}: {layout.scale.key}: {problem}; the checkpoint is damaged: fetch the shard again")
        return weight

    def check_scales(self, name: str) -> None:
        """Reads a linear's scales, without its payload. Raises CheckpointError as `weight`."""
        layout = self._layouts.get(name)
        if layout is not None and layout.kind != "plain":
            payload = tensor_of(torch.empty(layout.payload.nbytes, dtype=torch.uint8, device="meta"), layout.payload)
            self.weight(name, lambda entry: payload if entry is layout.payload else self.read(entry))

    def fp8_scales(self, name: str) -> torch.Tensor | None:
        """The scales of an FP8 linear, read now, where their dtype allows other numbers than powers of two; else None."""
        layout = self._layouts.get(name)
        return self.read(layout.scale) if layout is not None and layout.kind == "fp8" and layout.scale.dtype in FLOATS else None

    def kind(self, name: str) -> str:
        """The format of a linear, as `Weight.kind` will say it, from the headers alone."""
        layout = self._layouts.get(name)
        return "plain" if layout is None else layout.kind

    def stored(self, need: Need) -> Stored:
        """How one thing that the config needs lies on disk, from the headers alone."""
        if need.linear:
            layout = self._layouts[need.name]
            return Stored(layout.kind, layout.payload.dtype, self._sizes[need.name])
        module, _, suffix = need.name.rpartition(".")
        return Stored("plain", self._modules[module][suffix].dtype, self._sizes[need.name])

    def nbytes(self, prefix: str = "") -> int:
        """Bytes of what the config needs whose native name starts with `prefix`, as stored ("" for all)."""
        return sum(size for name, size in self._sizes.items() if name.startswith(prefix))

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one layer, as stored."""
        return self._layer_sizes[layer]


def _fp8_block(raw, config):
    """The FP8 block: weight_block_size, or what compressed-tensors calls block_structure, or 128x128."""
    quantization = raw.get("quantization_config")
    groups = quantization.get("config_groups") if isinstance(quantization, dict) else None
    if isinstance(groups, dict) and "weight_block_size" not in quantization:
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            structure = weights.get("block_structure") if isinstance(weights, dict) else None
            if isinstance(structure, list) and len(structure) == 2 and all(isinstance(x, int) and x > 0 for x in structure):
                return tuple(structure)
    return config.weight_block_size


def _check_folder(folder):
    if folder.is_file():
        try:
            with open(folder, "rb") as file:
                gguf = file.read(4) == b"GGUF" or folder.suffix == ".gguf"
        except OSError as error:
            raise CheckpointError(f"{folder}: expected a folder, found a file that cannot be read: {error.strerror}") from None
        raise CheckpointError(f"{folder}: expected a folder with config.json and *.safetensors, found a "
                              + ("GGUF file, which this runner does not read: use the safetensors release" if gguf else "file"))
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a checkpoint folder, found no such folder: download it first, then give its path")
    if not (folder / "config.json").exists():
        found = "only GGUF files, which this runner does not read" if list(folder.glob("*.gguf")) else "none"
        raise CheckpointError(f"{folder}: expected config.json, found {found}: a checkpoint folder holds it beside its shards")
