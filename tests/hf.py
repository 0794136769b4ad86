"""Owns the transformers models that the tests compare with: configs, random weights, and the renaming to native names.

transformers' DeepseekV4ForCausalLM is the outside oracle (fp32, eager attention). Its default initialisation makes a
weak test (norms 1; sinks, mHC bases, position biases and the hash table 0), so every parameter and both buffers are
re-drawn. index_n_heads stays 64 everywhere: with few index heads the ReLU makes exact ties at 0, and then transformers
disagrees with itself from one sequence length to the next. Nothing is written to disk.
"""

from __future__ import annotations

import copy
import re

import torch


def _config(**changes) -> dict:
    """A published-spelling config.json as a dict; `compress_ratios` gets the extra 0 of the MTP entry appended."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        # 1.0 and not 10: gate and up have a standard deviation of about 1 here, so the clamp really binds.
        "swiglu_limit": 1.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "index_n_heads": 64,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    config.update(changes)
    # factor x original, as published: transformers warns otherwise (it changes no frequency).
    yarn = config["rope_scaling"]
    config["max_position_embeddings"] = yarn["factor"] * yarn["original_max_position_embeddings"]
    config["num_hidden_layers"] = len(config["compress_ratios"])
    config["compress_ratios"] = [*config["compress_ratios"], 0]
    return config


def _yarn(original: int) -> dict:
    return {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": original,
        "beta_fast": 32,
        "beta_slow": 1,
    }


def hf_configs() -> dict[str, dict]:
    """name -> DeepseekV4Config keyword arguments in the spelling of the published config.json (fresh copies).

    small: every layer kind and both routers with small dims. real_dims: head_dim 512, rope 64, index 64 x 128,
    window 128, the published YaRN. odd: counts that are no powers of two and do not divide each other.
    """
    return {
        "small": _config(
            vocab_size=512, hidden_size=128, moe_intermediate_size=64, num_attention_heads=4, head_dim=64,
            qk_rope_head_dim=16, q_lora_rank=48, o_groups=2, o_lora_rank=32, n_routed_experts=8, num_experts_per_tok=2,
            compress_ratios=[0, 0, 4, 128, 4], num_hash_layers=2, sliding_window=16, index_head_dim=32, index_topk=4,
            rope_scaling=_yarn(256),
        ),
        "real_dims": _config(
            vocab_size=320, hidden_size=128, moe_intermediate_size=64, num_attention_heads=2, head_dim=512,
            qk_rope_head_dim=64, q_lora_rank=64, o_groups=2, o_lora_rank=64, n_routed_experts=4, num_experts_per_tok=2,
            compress_ratios=[0, 128, 4], num_hash_layers=1, sliding_window=128, index_head_dim=128, index_topk=16,
            rope_scaling=_yarn(65536),
        ),
        "odd": _config(
            vocab_size=389, hidden_size=96, moe_intermediate_size=48, num_attention_heads=6, head_dim=80,
            qk_rope_head_dim=24, q_lora_rank=40, o_groups=3, o_lora_rank=24, n_routed_experts=7, num_experts_per_tok=3,
            compress_ratios=[128, 4, 0, 4, 128, 0], num_hash_layers=3, sliding_window=17, index_head_dim=64,
            index_topk=5, routed_scaling_factor=2.5, rope_scaling=_yarn(128),
        ),
    }  # fmt: skip


def redraw(model, seed: int) -> None:
    """Fill every parameter and the routers' buffers at random, in place.

    Matrices N(0, 0.08^2) (the position biases are 2-D: included), norm vectors 1 + 0.1 N, other vectors (sinks, mHC
    base and scale) N(0, 0.5^2), selection biases N(0, 0.1^2), hash tables: distinct random experts for every token id.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor, std):
        return torch.randn(tensor.shape, generator=generator) * std

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(normal(parameter, 0.08))
            elif name.endswith("norm.weight"):
                parameter.copy_(1 + normal(parameter, 0.1))
            else:
                parameter.copy_(normal(parameter, 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(normal(buffer, 0.1))
            elif name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                order = torch.rand(buffer.shape[0], experts, generator=generator).argsort(dim=1)
                buffer.copy_(order[:, : buffer.shape[1]])


def hf_model(name: str, seed: int = 0):
    """(DeepseekV4ForCausalLM in fp32 on the CPU, eval mode, re-drawn weights; its published-spelling config dict)."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = hf_configs()[name]
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**copy.deepcopy(config), attn_implementation="eager"))
    model = model.float().eval()
    redraw(model, seed)
    return model, config


_TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}
_IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
}
for _site in ("attn", "ffn"):
    for _part in ("fn", "base", "scale"):
        _IN_LAYER[f"{_site}_hc.{_part}"] = f"hc_{_site}_{_part}"
for _hf, _native in (("compressor", "compressor"), ("compressor.indexer", "indexer.compressor")):
    for _a, _b in (
        ("kv_proj.weight", "wkv.weight"),
        ("gate_proj.weight", "wgate.weight"),
        ("position_bias", "ape"),
        ("kv_norm.weight", "norm.weight"),
    ):
        _IN_LAYER[f"self_attn.{_hf}.{_a}"] = f"attn.{_native}.{_b}"


def native_state(model) -> dict[str, torch.Tensor]:
    """DeepSeek's native name -> detached tensor (fp32, `tid2eid` int64), the fused experts split one by one.

    Raises KeyError for a parameter or persistent buffer that has no native name: nothing is dropped silently.
    """
    native = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach()
        if name in _TOP:
            native[_TOP[name]] = tensor
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            raise KeyError(f"no native name for {name}")
        prefix, rest = f"layers.{match[1]}.", match[2]
        if rest == "mlp.experts.gate_up_proj":
            for e, both in enumerate(tensor):
                w1, w3 = both.chunk(2, dim=0)
                native[f"{prefix}ffn.experts.{e}.w1.weight"] = w1
                native[f"{prefix}ffn.experts.{e}.w3.weight"] = w3
        elif rest == "mlp.experts.down_proj":
            for e, w2 in enumerate(tensor):
                native[f"{prefix}ffn.experts.{e}.w2.weight"] = w2
        elif rest in _IN_LAYER:
            native[prefix + _IN_LAYER[rest]] = tensor
        else:
            raise KeyError(f"no native name for {name}")
    return native
