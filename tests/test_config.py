"""Every number of Pro and Flash in the three spellings of config.json, and what a wrong file gets (model.md section 1)."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace

import pytest

from dsv4.config import PRESETS, ModelConfig
from dsv4.errors import CheckpointError
from tests.hf import hf_configs

COMMON = {
    "vocab_size": 129280, "head_dim": 512, "qk_rope_head_dim": 64, "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64,
    "index_head_dim": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "num_hash_layers": 3, "swiglu_limit": 10.0, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576, "bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 1,
}
OWN = {
    "flash": {"num_hidden_layers": 43, "hidden_size": 4096, "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8,
              "index_topk": 512, "n_routed_experts": 256, "moe_intermediate_size": 2048, "routed_scaling_factor": 1.5,
              "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0]},
    "pro": {"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
            "index_topk": 1024, "n_routed_experts": 384, "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5,
            "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0]},
}
NAMES = list(OWN)


def published(name: str) -> dict:
    """config.json as DeepSeek publishes it: numbers of model.md section 1, nested RoPE scaling and quantisation."""
    return COMMON | copy.deepcopy(OWN[name]) | {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16", "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "tie_word_embeddings": False,
        "expert_dtype": "fp4", "hidden_act": "silu", "attention_bias": False,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
                                "activation_scheme": "dynamic"},
    }


def inference(name: str) -> dict:
    """inference/config.json: the same numbers under the names of the official code's arguments."""
    names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "qk_rope_head_dim": "rope_head_dim",
             "sliding_window": "window_size", "moe_intermediate_size": "moe_inter_dim", "num_experts_per_tok": "n_activated_experts",
             "num_hash_layers": "n_hash_layers", "routed_scaling_factor": "route_scale", "rms_norm_eps": "norm_eps",
             "num_nextn_predict_layers": "n_mtp_layers"}
    own = COMMON | copy.deepcopy(OWN[name])
    for key in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
        del own[key]
    return {names.get(key, key): value for key, value in own.items()} | {
        "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4", "score_func": "sqrtsoftplus", "original_seq_len": 65536,
        "rope_factor": 16, "beta_fast": 32, "beta_slow": 1}


def of_transformers(raw: dict) -> dict:
    """What transformers makes of the published file and saves."""
    from transformers import DeepseekV4Config

    return json.loads(DeepseekV4Config(**copy.deepcopy(raw)).to_json_string(use_diff=False))


@pytest.mark.parametrize("name", NAMES)
def test_every_published_number(name):
    config, raw = ModelConfig.from_dict(published(name)), published(name)
    for key in (COMMON | OWN[name]).keys() - {"compress_ratios", "eos_token_id"}:
        assert getattr(config, key) == raw[key], key
    assert config.compress_ratios == tuple(raw["compress_ratios"][:-1])  # the last is the MTP layer's
    assert config.eos_token_ids == (1,) and config.weight_block_size == (128, 128)
    assert (config.rope_factor, config.rope_original_length, config.rope_beta_fast, config.rope_beta_slow) == (16, 65536, 32, 1)
    assert config == PRESETS[name]


@pytest.mark.parametrize("name,kinds", [("flash", {"SWA": 2, "CSA": 21, "HCA": 20}), ("pro", {"SWA": 0, "CSA": 30, "HCA": 31})])
def test_layer_schedule(name, kinds):
    config = PRESETS[name]
    layers = range(config.num_hidden_layers)
    assert {kind: [config.kind(n) for n in layers].count(kind) for kind in kinds} == kinds
    for n in layers:
        assert config.kind(n) == (("SWA" if name == "flash" else "HCA") if n < 2 else "HCA" if n % 2 else "CSA")
        assert config.coff(n) == (2 if config.kind(n) == "CSA" else 1)
        assert config.is_hash_layer(n) == (n in (0, 1, 2))


@pytest.mark.parametrize("name", NAMES)
def test_three_spellings_one_config(name):
    assert ModelConfig.from_dict(inference(name)) == ModelConfig.from_dict(of_transformers(published(name))) == PRESETS[name]


@pytest.mark.parametrize("name", list(hf_configs()))
def test_small_configs_in_two_spellings(name):
    raw = hf_configs()[name]
    config = ModelConfig.from_dict(raw)
    assert ModelConfig.from_dict(of_transformers(raw)) == config
    for key in raw.keys() & asdict(config).keys() - {"compress_ratios"}:
        assert getattr(config, key) == raw[key], key
    assert config.rope_original_length == raw["rope_scaling"]["original_max_position_embeddings"]


def test_inference_spelling_keeps_numbers_of_its_own():
    """Numbers that are not the defaults, so that a name that is not understood shows."""
    raw = inference("pro") | {"n_mtp_layers": 2, "window_size": 64, "original_seq_len": 4096, "beta_fast": 16, "beta_slow": 2,
                              "rope_factor": 8, "norm_eps": 1e-5, "n_hash_layers": 5, "rope_head_dim": 32}
    want = replace(PRESETS["pro"], num_nextn_predict_layers=2, sliding_window=64, rope_original_length=4096, rope_beta_fast=16.0,
                   rope_beta_slow=2.0, rope_factor=8.0, rms_norm_eps=1e-5, num_hash_layers=5, qk_rope_head_dim=32)
    assert ModelConfig.from_dict(raw) == want


ROUND_TRIPS = {**PRESETS, "no YaRN": replace(PRESETS["tiny"], rope_factor=1.0), "two ends": replace(PRESETS["tiny"], eos_token_ids=(1, 7)),
               "no MTP": replace(PRESETS["tiny"], num_nextn_predict_layers=0), "no hash": replace(PRESETS["tiny"], num_hash_layers=0)}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip(name, tmp_path):
    """to_dict is the published spelling, as JSON too."""
    config = ROUND_TRIPS[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    raw = config.to_dict()
    assert raw["model_type"] == "deepseek_v4" and len(raw["compress_ratios"]) == config.num_hidden_layers + config.num_nextn_predict_layers
    if name in OWN:
        ours, theirs = ({key: side[key] for key in published(name).keys() & raw.keys()} for side in (raw, published(name)))
        assert ours == theirs and len(ours) > 30
        assert raw["rope_scaling"] == published(name)["rope_scaling"]


def test_transformers_reads_what_to_dict_writes():
    from transformers import DeepseekV4Config

    theirs = DeepseekV4Config(**PRESETS["tiny"].to_dict())
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    assert theirs.layer_types == [kinds[r] for r in PRESETS["tiny"].compress_ratios]
    assert theirs.rope_parameters["compress"]["factor"] == 16 and theirs.num_experts_per_tok == 2


def test_presets_tiny_has_the_kernels_dims():
    tiny, pro = PRESETS["tiny"], PRESETS["pro"]
    for name in ("head_dim", "qk_rope_head_dim", "sliding_window", "index_n_heads", "index_head_dim", "hc_mult"):
        assert getattr(tiny, name) == getattr(pro, name)
    assert {tiny.kind(n) for n in range(tiny.num_hidden_layers)} == {"SWA", "CSA", "HCA"}
    assert {tiny.is_hash_layer(n) for n in range(tiny.num_hidden_layers)} == {True, False}


def without(key):
    return {k: v for k, v in published("flash").items() if k != key}


def changed(**changes):
    return published("flash") | changes


NOT_THIS_MODEL = {
    "V3": (changed(model_type="deepseek_v3"), "deepseek_v3"), "V4.1": (changed(model_type="deepseek_v41"), "deepseek_v41"),
    "no model_type": (without("model_type"), "None"), "a list": ([1], "list"), "nothing": (None, "NoneType"),
    "softmax router": (changed(scoring_func="softmax"), "scoring_func"),
    "grouped keys": (changed(num_key_value_heads=8), "num_key_value_heads"),
    "tied": (changed(tie_word_embeddings=True), "tie_word_embeddings"),
    "inference, softmax": (inference("pro") | {"score_func": "softmax"}, "scoring_func"),
}
WRONG = {
    **{f"{key} missing": (without(key), key)
       for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "compress_ratios")},
    **{f"{key} {value!r}": (changed(**{key: value}), key) for key, value in [
        ("hidden_size", -1), ("hidden_size", 0), ("hidden_size", 4096.5), ("hidden_size", "4096"), ("hidden_size", True),
        ("vocab_size", [1]), ("num_experts_per_tok", 0), ("num_experts_per_tok", 257), ("num_hash_layers", -1), ("n_shared_experts", 2),
        ("n_shared_experts", 0), ("rms_norm_eps", 0), ("rms_norm_eps", float("nan")), ("rope_theta", float("inf")), ("rope_theta", "10000"),
        ("swiglu_limit", -10.0), ("qk_rope_head_dim", 63), ("qk_rope_head_dim", 256), ("o_groups", 7), ("sliding_window", 0),
        ("hc_mult", {}),
        ("eos_token_id", "1"), ("eos_token_id", -1), ("eos_token_id", []), ("num_hidden_layers", "43"),
    ]},
    "short schedule": (changed(compress_ratios=[0, 0, 4]), "compress_ratios"),
    "ratio 8": (changed(compress_ratios=[8] * 44), "compress_ratios"),
    "ratio '4'": (changed(compress_ratios=["4"] * 44), "compress_ratios"),
    "ratio 4.0": (changed(compress_ratios=[4.0] * 44), "compress_ratios"),
    "ratio [4]": (changed(compress_ratios=[[4]] * 44), "compress_ratios"),
    "ratios a number": (changed(compress_ratios=4), ""),
    "layers more than ratios": (changed(num_hidden_layers=60), "compress_ratios"),
    "negative layers": (changed(num_hidden_layers=-1), "num_hidden_layers"),
    "other rope": (changed(rope_scaling={"type": "linear", "factor": 4}), "linear"),
    "mscale": (changed(rope_scaling={"type": "yarn", "factor": 16, "attention_factor": 1.277}), "attention_factor"),
    "rope a string": (changed(rope_scaling="yarn"), ""),
    "factor a string": (changed(rope_scaling={"type": "yarn", "factor": "x"}), ""),
    "block of strings": (changed(quantization_config={"weight_block_size": ["a", "b"]}), "weight_block_size"),
    "block of one": (changed(quantization_config={"weight_block_size": [128]}), "weight_block_size"),
    "block of zero": (changed(quantization_config={"weight_block_size": [0, 128]}), "weight_block_size"),
}
WRONG_OF_TRANSFORMERS = {  # changes of what transformers saves
    "unknown layer type": ({"layer_types": ["full_attention"] * 5}, "full_attention"),
    "other rates": ({"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates"),
    "hash layers last": ({"mlp_layer_types": ["moe", "moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types"),
}


@pytest.mark.parametrize("case", [*NOT_THIS_MODEL, *WRONG, *WRONG_OF_TRANSFORMERS])
def test_a_wrong_config_gets_one_line_that_names_it(case):
    raw, named = (NOT_THIS_MODEL | WRONG | WRONG_OF_TRANSFORMERS)[case]
    if case in WRONG_OF_TRANSFORMERS:
        raw = of_transformers(hf_configs()["small"]) | raw
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(raw, source="folder/config.json")
    text = str(caught.value)
    assert named in text and "config.json" in text and "\n" not in text and caught.value.exit_code == 3



def test_keys_that_are_not_the_shape_are_ignored_and_null_means_default():
    assert ModelConfig.from_dict(changed(use_cache=True, sliding_window=None, something={"new": 1})) == PRESETS["flash"]


@pytest.mark.parametrize("key", ["routed_scaling_factor", "index_topk", "num_experts_per_tok", "rope_scaling"])
def test_what_no_shape_would_check_must_be_there(key):
    """Pro and Flash differ in these, so a default would run the other model's numbers on the right shapes."""
    raw = changed()
    del raw[key]
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("key, value, words", [
    ("n_routed_experts", 10**30, "from 0 to 2147483647"), ("n_routed_experts", 20000, "at most 16384"),
    ("sliding_window", 10**30, "2147483647"), ("compress_rope_theta", 1.0, "above 1"),
])
def test_numbers_that_would_break_what_comes_after(key, value, words):
    with pytest.raises(CheckpointError, match=f"{key} must be .*{words}"):
        ModelConfig.from_dict(changed(**{key: value}))
