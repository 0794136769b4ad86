"""The kernel of dsv4/ops/compressor.py."""

from __future__ import annotations

import torch

from ..errors import UserError
from . import MAX_TOKENS
from .keys import HEAD_DIM, INDEX_BYTES, INDEX_DIM, INDEX_SCALES, KEY_BYTES, KEY_SCALES, ROPE_DIM
from .launch import IN, INOUT, WEIGHT, Kernel, expect

CSA, HCA = 4, 128  # tokens a block; in CSA a token has channels for the next block's entry and for its own

_POOL = {"kv": IN, "score": IN, "ape": WEIGHT, "norm": WEIGHT, "kv_state": INOUT, "score_state": INOUT, "values": INOUT, "scales": INOUT}
_compress = Kernel("compress", {**_POOL, **{f"index_{name}": kind for name, kind in _POOL.items()}, "positions": IN, "cos": IN, "sin": IN,
                                "tokens": int, "ratio": int, "eps": float})


def _arguments(tensors: tuple, pool, S: int, ratio: int, dim: int, row: tuple[int, int]) -> dict:
    """One pool's arguments of the C function, checked: `dim` wide, entries of `row` bytes (values, scales)."""
    (kv, score), halves = tensors, 2 if ratio == CSA else 1
    width, T = halves * dim, len(pool.entries.values)
    expect(kv.shape == score.shape == (S, width) and pool.ape.shape == (ratio, width) and pool.norm.shape == (dim,)
           and pool.kv_state.shape == pool.score_state.shape == (halves * ratio, width)
           and all(t.dtype == torch.float32 for t in (kv, score, *pool[:4])), "compress",
           f"kv and score [S, {width}], ape [{ratio}, {width}], norm [{dim}], states [{halves * ratio}, {width}], all fp32",
           kv=kv, score=score, ape=pool.ape, norm=pool.norm, kv_state=pool.kv_state, score_state=pool.score_state)
    expect(pool.entries.values.shape == (T, row[0]) and pool.entries.scales.shape == (T, row[1])
           and pool.entries.values.dtype == pool.entries.scales.dtype == torch.uint8, "compress",
           f"entries of values [T, {row[0]}] and scales [T, {row[1]}] in uint8", values=pool.entries.values, scales=pool.entries.scales)
    return {"kv": kv.contiguous(), "score": score.contiguous(), "ape": pool.ape.contiguous(), "norm": pool.norm.contiguous(),
            "kv_state": pool.kv_state, "score_state": pool.score_state, "values": pool.entries.values, "scales": pool.entries.scales}


def compress(inputs: tuple, pools: tuple, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float,
             quantize: bool) -> None:
    """Takes S = 1..8 tokens at consecutive positions int64 [S] into the states of one or two pools and writes the entries they close.

    pools: ops.Pool with packed entries, all else fp32: first attention's, d = 512 with Keys, then, if r = 4, maybe the indexer's, d = 128
    with IndexKeys. ape [r, c*d], norm [d], states [c*r, c*d], inputs (kv, score) [S, c*d] each; c = 2 for r = 4, c = 1 for r = 128.
    cos, sin [S, 32] fp32: the angles of the first position of each token's block. States and entries are changed in place and must be
    contiguous. Raises UserError for other shapes or dtypes, and without `quantize`.
    """
    if not quantize:
        raise UserError("compress: expected quantize=True, as the kernels' entries are FP8 and FP4, found False: run with --backend torch")
    S, ratio, most = len(positions), len(pools[0].ape), {CSA: 2, HCA: 1}
    expect(1 <= S <= MAX_TOKENS and positions.shape == (S,) and cos.shape == sin.shape == (S, ROPE_DIM // 2)
           and positions.dtype == torch.int64 and cos.dtype == sin.dtype == torch.float32, "compress",
           f"positions [S] in int64, cos and sin [S, {ROPE_DIM // 2}] in fp32, S from 1 to {MAX_TOKENS}",
           positions=positions, cos=cos, sin=sin)
    expect(1 <= len(pools) <= most.get(ratio, 0) and len(inputs) == len(pools), "compress",
           f"one pool of ratio {HCA}, or one or two of {CSA}, and inputs for each", **{f"ape_{i}": p.ape for i, p in enumerate(pools)})
    arguments = _arguments(inputs[0], pools[0], S, ratio, HEAD_DIM, (KEY_BYTES, KEY_SCALES))
    index = dict.fromkeys(_POOL)  # null without an indexer
    if len(pools) == 2:
        index = _arguments(inputs[1], pools[1], S, ratio, INDEX_DIM, (INDEX_BYTES, INDEX_SCALES))
    _compress(**arguments, **{f"index_{name}": value for name, value in index.items()}, positions=positions.contiguous(),
              cos=cos.contiguous(), sin=sin.contiguous(), tokens=S, ratio=ratio, eps=eps)
