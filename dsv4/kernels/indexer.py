"""The kernels of dsv4/ops/indexer.py."""

from __future__ import annotations

import torch

from . import PROMPT_TOKENS
from .arrivals import arrivals
from .keys import INDEX_BYTES, INDEX_DIM, INDEX_SCALES, ROPE_DIM, IndexKeys
from .launch import IN, INOUT, OUT, WORK, Kernel, expect, tensor_memory_blocks

HEADS = 64  # index_n_heads of every published checkpoint
_MAX_ENTRIES, _MAX_TOP_K = 1 << 18, 1024
_ONE_BLOCK, _FOUND = 1 << 14, 8256  # entries that one block has alone; words in which 64 blocks pass a token's candidates on
GROUP_TOKENS, TILE_ENTRIES = 8, 128  # of a block of index_scores_sm100; of its products
_QUERIES_TILES = 12  # what the queries of 8 tokens cost it, in tiles of entries for them: a prediction

_SCORES = {"q": IN, "cos": IN, "sin": IN, "head_weights": IN, "values": IN, "scales": IN, "positions": IN, "scores": WORK, "tokens": int,
           "capacity": int, "top_k": int}
_index_scores = Kernel("index_scores", _SCORES)
_index_scores_sm100 = Kernel("index_scores_sm100", {**_SCORES, "splits": int})
_select_entries = Kernel("select_entries", {"scores": IN, "positions": IN, "found": WORK, "arrivals": INOUT, "out": OUT, "tokens": int,
                                            "capacity": int, "ratio": int, "top_k": int})


def index_scores(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_weights: torch.Tensor, keys: IndexKeys,
                 positions: torch.Tensor, top_k: int, quantize: bool) -> torch.Tensor:
    """q [S, 64 * 128], cos and sin [S, 32], head_weights [S, 64], all fp32; keys of T entries; positions int64 [S] -> fp32 [S, T].

    See dsv4/ops/indexer.py. Row s holds numbers for its first (positions[s] + 1) // 4 entries, and nothing that may be read behind them, or
    anywhere in rows 8 i to 8 i + 7 if that is at most top_k for their last token. An entry whose key is NaN has the score NaN. S 1 to
    1,024. Raises UserError for other shapes or dtypes, and without `quantize`: the packed keys are FP4.
    """
    arguments = _arguments("index_scores", PROMPT_TOKENS, q, cos, sin, head_weights, keys, positions, top_k, quantize)
    if arguments["capacity"] > top_k:
        _index_scores(**arguments)
    return arguments["scores"]


def index_scores_sm100(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_weights: torch.Tensor, keys: IndexKeys,
                       positions: torch.Tensor, top_k: int, quantize: bool) -> torch.Tensor:
    """index_scores on Blackwell's tensor cores, for any number of tokens at consecutive positions. Raises UserError on other GPUs too.

    No layer calls it yet (docs/kernels.md says why): ops.trying_kernel("index_scores", index_scores_sm100) does.
    """
    arguments = _arguments("index_scores_sm100", None, q, cos, sin, head_weights, keys, positions, top_k, quantize)
    blocks = tensor_memory_blocks("index_scores_sm100", q.device, "index_scores")
    if arguments["capacity"] > top_k:
        _index_scores_sm100(**arguments, splits=_splits(len(q), arguments["capacity"], blocks))
    return arguments["scores"]


def _splits(tokens: int, entries: int, blocks: int) -> int:
    """How many blocks share a group of tokens' entries: what gives the busiest of `blocks` SMs the least to do, in tiles of entries."""
    groups, tiles = -(-tokens // GROUP_TOKENS), -(-entries // TILE_ENTRIES)
    queries = _QUERIES_TILES * min(tokens, GROUP_TOKENS) / GROUP_TOKENS

    def time(splits):
        return -(-groups * splits // blocks) * (-(-tiles // splits) + queries)
    return min(range(1, min(tiles, max(1, 4 * blocks // groups)) + 1), key=time)


def _arguments(name, most_tokens, q, cos, sin, head_weights, keys, positions, top_k, quantize):
    """The kernels' common arguments, checked, with room for the scores."""
    S, T = len(q), len(keys.values)
    expect(1 <= S <= (most_tokens or S) and q.shape == (S, HEADS * INDEX_DIM) and cos.shape == sin.shape == (S, ROPE_DIM // 2)
           and head_weights.shape == (S, HEADS) and positions.shape == (S,)
           and q.dtype == cos.dtype == sin.dtype == head_weights.dtype == torch.float32 and positions.dtype == torch.int64, name,
           f"q [S, {HEADS} * {INDEX_DIM}], cos and sin [S, {ROPE_DIM // 2}] and head_weights [S, {HEADS}] in fp32 and positions [S] in "
           f"int64, S {f'1 to {most_tokens}' if most_tokens else 'at least 1'}", q=q, cos=cos, sin=sin, head_weights=head_weights,
           positions=positions)
    expect(keys.values.shape == (T, INDEX_BYTES) and keys.scales.shape == (T, INDEX_SCALES)
           and keys.values.dtype == keys.scales.dtype == torch.uint8, name,
           f"values [T, {INDEX_BYTES}] and scales [T, {INDEX_SCALES}] in uint8", **keys._asdict())
    expect(quantize, name, "quantised queries (--kv-quant on), as the packed keys are FP4", q=q)
    return {"q": q.contiguous(), "cos": cos.contiguous(), "sin": sin.contiguous(), "head_weights": head_weights.contiguous(),
            "values": keys.values, "scales": keys.scales, "positions": positions,
            "scores": torch.empty(S, T, dtype=torch.float32, device=q.device), "tokens": S, "capacity": T, "top_k": top_k}


def select_entries(scores: torch.Tensor, positions: torch.Tensor, ratio: int, top_k: int) -> torch.Tensor:
    """scores [S, T] fp32, positions int64 [S] -> int32 [S, top_k]; see dsv4/ops/indexer.py.

    Row s counts up to its first (positions[s] + 1) // ratio scores. S up to 1,024, T up to 262,144, top_k 1 to 1,024. Raises UserError for
    other shapes or dtypes.
    """
    S, T = scores.shape if scores.dim() == 2 else (-1, -1)
    expect(S <= PROMPT_TOKENS and 0 <= T <= _MAX_ENTRIES and positions.shape == (S,) and scores.dtype == torch.float32
           and positions.dtype == torch.int64 and ratio >= 1 and 1 <= top_k <= _MAX_TOP_K, "select_entries",
           f"scores [S, T] in fp32 and positions [S] in int64, S up to {PROMPT_TOKENS}, T up to {_MAX_ENTRIES}, top_k 1 to {_MAX_TOP_K}, a "
           f"ratio of at least 1, got top_k {top_k} and ratio {ratio}", scores=scores, positions=positions)
    out = torch.empty(S, top_k, dtype=torch.int32, device=scores.device)
    if S:
        found = torch.empty(S, _FOUND, dtype=torch.int32, device=scores.device) if T > _ONE_BLOCK else None
        counters = None if found is None else arrivals("select_entries", scores.device, PROMPT_TOKENS)
        _select_entries(scores=scores.contiguous(), positions=positions, found=found, arrivals=counters, out=out, tokens=S, capacity=T,
                        ratio=ratio, top_k=top_k)
    return out
