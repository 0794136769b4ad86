"""Every number of the model, from config.json. Owns the three spellings of that file (the published one, the one of
DeepSeek's `inference/` folder, the one transformers saves) and the presets; holds no weights and imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .errors import CheckpointError, UserError

MODEL_TYPE = "deepseek_v4"
LAYER_KINDS = {0: "SWA", 4: "CSA", 128: "HCA"}

# inference/config.json spells the same numbers in its own way.
_INFERENCE_SPELLING = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window", "moe_inter_dim": "moe_intermediate_size", "n_activated_experts": "num_experts_per_tok",
    "n_hash_layers": "num_hash_layers", "route_scale": "routed_scaling_factor", "norm_eps": "rms_norm_eps",
    "original_seq_len": "rope_original_length", "beta_fast": "rope_beta_fast", "beta_slow": "rope_beta_slow",
    "n_mtp_layers": "num_nextn_predict_layers", "score_func": "scoring_func",
}
_TRANSFORMERS_LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
# Settings of the family that this project does not vary: another value means another model.
_FIXED = {"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "num_key_value_heads": 1, "tie_word_embeddings": False,
          "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape. Field names are those of the published config.json, except the `rope_*` ones, which it nests.

    `compress_ratios` has one entry per main layer: 0 (SWA, window only), 4 (CSA) or 128 (HCA). Defaults are V4-Flash.
    Source: model.md section 1.
    """

    vocab_size: int = 129280
    hidden_size: int = 4096
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0) + (4, 128) * 20 + (4,)
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    n_routed_experts: int = 256
    num_experts_per_tok: int = 6
    n_shared_experts: int = 1
    moe_intermediate_size: int = 2048
    num_hash_layers: int = 3
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0  # 1.0: no YaRN
    rope_original_length: int = 65536
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    max_position_embeddings: int = 1048576
    bos_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    weight_block_size: tuple[int, int] = (128, 128)
    num_nextn_predict_layers: int = 1

    def __post_init__(self):
        for field in fields(self):
            value, want = getattr(self, field.name), field.type
            if want == "int" and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31):
                raise CheckpointError(f"config.json: {field.name} must be a whole number from 0 to 2147483647, found {value!r}")
            if want == "float" and (not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value)):
                raise CheckpointError(f"config.json: {field.name} must be a finite number, found {value!r}")
        may_be_zero = {"num_hash_layers", "num_nextn_predict_layers", "n_shared_experts", "bos_token_id"}
        for field in fields(self):
            if field.type in ("int", "float") and field.name not in may_be_zero and getattr(self, field.name) <= 0:
                raise CheckpointError(f"config.json: {field.name} must be above 0, found {getattr(self, field.name)!r}")
        for name, most in (("num_hidden_layers", 1024), ("n_routed_experts", 16384)):  # the audit makes a list of all their names
            self._check(getattr(self, name) <= most, name, f"at most {most}", getattr(self, name))
        for name in ("rope_theta", "compress_rope_theta"):
            self._check(getattr(self, name) > 1, name, "above 1", getattr(self, name))
        self._check(len(self.compress_ratios) == self.num_hidden_layers, "compress_ratios",
                    f"one entry for each of the {self.num_hidden_layers} layers", len(self.compress_ratios))
        wrong = [r for r in self.compress_ratios if not isinstance(r, int) or r not in LAYER_KINDS]
        self._check(not wrong, "compress_ratios", "0, 4 or 128", wrong[:1])
        self._check(self.num_attention_heads % self.o_groups == 0, "o_groups",
                    f"a divisor of num_attention_heads = {self.num_attention_heads}", self.o_groups)
        self._check(self.num_experts_per_tok <= self.n_routed_experts, "num_experts_per_tok",
                    f"at most n_routed_experts = {self.n_routed_experts}", self.num_experts_per_tok)
        self._check(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even number", self.qk_rope_head_dim)
        self._check(self.qk_rope_head_dim <= min(self.head_dim, self.index_head_dim), "qk_rope_head_dim",
                    f"at most head_dim = {self.head_dim} and index_head_dim = {self.index_head_dim}", self.qk_rope_head_dim)
        self._check(self.n_shared_experts == 1, "n_shared_experts", "1", self.n_shared_experts)
        self._check(len(self.weight_block_size) == 2 and all(isinstance(b, int) and b > 0 for b in self.weight_block_size),
                    "weight_block_size", "two positive whole numbers", self.weight_block_size)
        self._check(self.eos_token_ids and all(isinstance(i, int) and i >= 0 for i in self.eos_token_ids), "eos_token_id",
                    "a token id or a list of them", self.eos_token_ids)

    @staticmethod
    def _check(holds, name, expected, found):
        if not holds:
            raise CheckpointError(f"config.json: {name} must be {expected}, found {found!r}")

    def coff(self, layer: int) -> int:
        """Channel groups of the layer's compressor: 2 where blocks overlap (CSA), else 1 (model.md section 6)."""
        return 2 if self.compress_ratios[layer] == 4 else 1

    def kind(self, layer: int) -> str:
        """SWA, CSA or HCA."""
        return LAYER_KINDS[self.compress_ratios[layer]]

    def is_hash_layer(self, layer: int) -> bool:
        """Whether the layer's experts come from the token id and not from the scores (model.md section 8)."""
        return layer < self.num_hash_layers

    def check_tokens(self, ids: list[int]) -> None:
        """Raises UserError for an id outside the vocabulary."""
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise UserError(f"token id {wrong}: expected 0 to {self.vocab_size - 1}, the checkpoint's vocabulary")

    @classmethod
    def from_dict(cls, raw: dict, source: str = "config.json") -> ModelConfig:
        """From a parsed config.json in any of its three spellings; keys that are not the model's shape are ignored."""
        if not isinstance(raw, dict):
            raise CheckpointError(f"{source}: expected a JSON object, found {type(raw).__name__}")
        inference = "dim" in raw and "model_type" not in raw
        if not inference and raw.get("model_type") != MODEL_TYPE:
            raise CheckpointError(f"{source}: expected model_type {MODEL_TYPE!r}, found {raw.get('model_type')!r}: "
                                  "this runner knows DeepSeek-V4 (Pro, Flash and smaller ones of the family) only")
        raw = {_INFERENCE_SPELLING.get(key, key) if inference else key: value for key, value in raw.items()}
        for key, value in _FIXED.items():
            if raw.get(key, value) != value:
                raise CheckpointError(f"{source}: {key} must be {value!r} for DeepSeek-V4, found {raw[key]!r}")
        try:
            values = {**_plain(raw), **_schedule(raw), **_rope(raw), **_ids(raw), **_blocks(raw)}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{source}: cannot be read as a DeepSeek-V4 config: {type(error).__name__}: {error}") from None
        # Numbers without which the shapes cannot be known, and those that no shape would check and in which Pro and Flash differ.
        missing = sorted({"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "compress_ratios",
                          "routed_scaling_factor", "num_experts_per_tok", "index_topk"} - values.keys())
        if not {"rope_scaling", "rope_parameters", "rope_factor"} & raw.keys():
            missing.append("rope_scaling")
        if missing:
            raise CheckpointError(f"{source}: {missing[0]} is missing (and {len(missing) - 1} more): a DeepSeek-V4 config.json names it")
        return cls(**values)

    def to_dict(self) -> dict:
        """The published spelling; `compress_ratios` ends with the entry of the MTP layer, as DeepSeek's files do."""
        nested = {"compress_ratios", "eos_token_ids", "weight_block_size", "rope_factor", "rope_original_length", "rope_beta_fast",
                  "rope_beta_slow"}
        out = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": MODEL_TYPE}
        out |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in nested}
        out |= {key: value for key, value in _FIXED.items()}
        out["compress_ratios"] = [*self.compress_ratios, *[0] * self.num_nextn_predict_layers]
        out["eos_token_id"] = self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids)
        out["rope_scaling"] = None
        if self.rope_factor != 1.0:
            out["rope_scaling"] = {"type": "yarn", "factor": self.rope_factor, "beta_fast": self.rope_beta_fast,
                                   "beta_slow": self.rope_beta_slow, "original_max_position_embeddings": self.rope_original_length}
        return out


def _plain(raw):
    skip = {"compress_ratios", "eos_token_ids", "weight_block_size"}
    kinds = {f.name: f.type for f in fields(ModelConfig) if f.name not in skip}
    return {name: float(raw[name]) if kind == "float" and isinstance(raw[name], int) else raw[name]
            for name, kind in kinds.items() if raw.get(name) is not None}


def _schedule(raw):
    out, layers = {}, raw["num_hidden_layers"]
    if not isinstance(layers, int):
        raise ValueError(f"num_hidden_layers must be a whole number, found {layers!r}")
    if "compress_ratios" in raw:
        out["compress_ratios"] = tuple(raw["compress_ratios"])[:layers]  # the rest are MTP layers
    elif "layer_types" in raw:
        out["compress_ratios"] = tuple(_TRANSFORMERS_LAYER_TYPES[kind] for kind in raw["layer_types"])
        rates = raw.get("compress_rates") or {}
        if any(rates.get(kind, rate) != rate for kind, rate in _TRANSFORMERS_LAYER_TYPES.items()):
            raise ValueError(f"compress_rates must be 4 and 128, found {rates}")
    if "num_hash_layers" not in raw and "mlp_layer_types" in raw:
        kinds = list(raw["mlp_layer_types"])
        out["num_hash_layers"] = kinds.count("hash_moe")
        if kinds != sorted(kinds):  # "hash_moe" sorts before "moe"
            raise ValueError("mlp_layer_types must name the hash layers first")
    return out


def _rope(raw):
    out = {}
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    scaling = scaling.get("compress", scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "yarn":
        if scaling.get("attention_factor", 1.0) != 1.0:
            raise ValueError(f"YaRN's attention_factor must be 1.0 for DeepSeek-V4, found {scaling['attention_factor']}")
        for name, key in (("rope_factor", "factor"), ("rope_original_length", "original_max_position_embeddings"),
                          ("rope_beta_fast", "beta_fast"), ("rope_beta_slow", "beta_slow")):
            if key in scaling:
                out[name] = scaling[key] if name == "rope_original_length" else float(scaling[key])
    elif kind in ("default", None) and "rope_factor" not in raw:
        out["rope_factor"] = 1.0
    elif kind not in ("default", None):
        raise ValueError(f"rope type must be yarn or default, found {kind!r}")
    nested = raw.get("rope_parameters") or {}
    if isinstance(nested.get("main"), dict):
        out["rope_theta"] = float(nested["main"]["rope_theta"])
        out["compress_rope_theta"] = float(nested["compress"]["rope_theta"])
    if "qk_rope_head_dim" not in raw and raw.get("partial_rotary_factor") is not None:
        out["qk_rope_head_dim"] = int(raw["head_dim"] * raw["partial_rotary_factor"])
    return out


def _ids(raw):
    eos = raw.get("eos_token_id")
    return {} if eos is None else {"eos_token_ids": tuple(eos) if isinstance(eos, list) else (eos,)}


def _blocks(raw):
    quantization = raw.get("quantization_config") or {}
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    return {} if block is None else {"weight_block_size": tuple(block)}


PRESETS = {
    "flash": ModelConfig(),
    "pro": ModelConfig(hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1536, o_groups=16,
                       compress_ratios=(128, 128) + (4, 128) * 29 + (4,), index_topk=1024, n_routed_experts=384,
                       moe_intermediate_size=3072, routed_scaling_factor=2.5),
    # The bundled checkpoint: the kernels' dims as in the real model, everything else small (checkpoints/tiny).
    "tiny": ModelConfig(vocab_size=1024, hidden_size=192, num_hidden_layers=6, num_attention_heads=4, q_lora_rank=64, o_groups=2,
                        o_lora_rank=64, compress_ratios=(0, 128, 4, 128, 4, 0), index_topk=128, n_routed_experts=8,
                        num_experts_per_tok=2, moe_intermediate_size=128, num_hash_layers=3),
}
