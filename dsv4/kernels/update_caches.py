"""The kernel of dsv4/ops/update_caches.py."""

from __future__ import annotations

import torch

from ..errors import UserError
from . import MAX_TOKENS, PROMPT_TOKENS
from .arrivals import arrivals
from .keys import HEAD_DIM, INDEX_BYTES, INDEX_DIM, INDEX_SCALES, KEY_BYTES, KEY_SCALES, ROPE_DIM, Keys, Window
from .launch import IN, INOUT, OUT, WEIGHT, WORK, Kernel, expect

MAX_Q_RANK = 2048
SWA, CSA, HCA = 0, 4, 128  # tokens a block; in CSA a token has channels for the next block's entry and for its own
_MOST_POOLS = {SWA: 0, CSA: 2, HCA: 1}

_POOL = {"kv": IN, "score": IN, "ape": WEIGHT, "norm": WEIGHT, "kv_state": INOUT, "score_state": INOUT, "values": INOUT, "scales": INOUT}
_update_caches = Kernel("update_caches", {
    "qa": IN, "kv": IN, "q_norm": WEIGHT, "kv_norm": WEIGHT, "cos": IN, "sin": IN, "positions": IN, "qr": OUT, "window_values": INOUT,
    "window_scales": INOUT, "long_values": INOUT, "long_scales": INOUT,
    **{f"{part}_{name}": kind for part in ("main", "index") for name, kind in _POOL.items()}, "entry_cos": IN, "entry_sin": IN,
    "pooled": WORK, "arrivals": INOUT, "tokens": int, "rank": int, "ring": int, "long_ring": int, "ratio": int, "eps": float})


def _pool(part: str, tensors: tuple | None, pool, S: int, ratio: int, dim: int, row: tuple[int, int]) -> dict:
    """One pool's arguments of the C function, checked: `dim` wide, entries of `row` bytes (values, scales). Without one, null."""
    if tensors is None:
        return {f"{part}_{name}": None for name in _POOL}
    (kv, score), halves = tensors, 2 if ratio == CSA else 1
    width, T = halves * dim, len(pool.entries.values)
    expect(kv.shape == score.shape == (S, width) and pool.ape.shape == (ratio, width) and pool.norm.shape == (dim,)
           and pool.kv_state.shape == pool.score_state.shape == (halves * ratio, width)
           and all(t.dtype == torch.float32 for t in (kv, score, *pool[:4])), "update_caches",
           f"kv and score [S, {width}], ape [{ratio}, {width}], norm [{dim}], states [{halves * ratio}, {width}], all fp32",
           kv=kv, score=score, ape=pool.ape, norm=pool.norm, kv_state=pool.kv_state, score_state=pool.score_state)
    expect(pool.entries.values.shape == (T, row[0]) and pool.entries.scales.shape == (T, row[1])
           and pool.entries.values.dtype == pool.entries.scales.dtype == torch.uint8, "update_caches",
           f"entries of values [T, {row[0]}] and scales [T, {row[1]}] in uint8", values=pool.entries.values, scales=pool.entries.scales)
    values = (kv.contiguous(), score.contiguous(), pool.ape.contiguous(), pool.norm.contiguous(), pool.kv_state, pool.score_state,
              pool.entries.values, pool.entries.scales)
    return {f"{part}_{name}": value for name, value in zip(_POOL, values, strict=True)}


def update_caches(qa: torch.Tensor, kv: torch.Tensor, q_norm: torch.Tensor, kv_norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                  window: Keys | Window, compressed: tuple, pools: tuple, entry_cos: torch.Tensor | None, entry_sin: torch.Tensor | None,
                  positions: torch.Tensor, eps: float, quantize: bool) -> torch.Tensor:
    """S = 1..1,024 tokens at consecutive positions int64 [S], a launch for each 8: RMS norm of the query's latent, returned; RMS norm and
    RoPE of the keys, packed into `window`: kv[s] in row positions[s] % R of R (a Window's rings both); the tokens into the pools'
    states, and the entries that they close.

    qa [S, q_rank], kv [S, 512], q_norm [q_rank], kv_norm [512], cos and sin [S, 32], fp32; R at least S or 8, q_rank a multiple of 4 up to
    2,048 -> bf16 [S, q_rank]. pools: ops.Pool with packed entries, all else fp32: none (SWA), one of ratio r = 128, or of r = 4 first
    attention's, d = 512 with Keys, then maybe the indexer's, d = 128 with IndexKeys. ape [r, c*d], norm [d], states [c*r, c*d], compressed:
    their (kv, score) [S, c*d] each; c = 2 for r = 4, c = 1 for r = 128. entry_cos, entry_sin [S, 32] fp32: the angles of the first
    position of each token's block; None without pools. States and entries are changed in place and must be contiguous. Raises UserError
    for other shapes or dtypes, and without `quantize`.
    """
    if not quantize:
        raise UserError("update_caches: expected quantize=True, as the kernels' caches are FP8 and FP4, found False: run with --backend "
                        "torch")
    (S, rank), R = qa.shape if qa.dim() == 2 else (-1, -1), len(window.values)
    half = ROPE_DIM // 2
    expect(1 <= S <= PROMPT_TOKENS and 4 <= rank <= MAX_Q_RANK and rank % 4 == 0 and kv.shape == (S, HEAD_DIM) and q_norm.shape == (rank,)
           and kv_norm.shape == (HEAD_DIM,) and cos.shape == sin.shape == (S, half) and positions.shape == (S,)
           and positions.dtype == torch.int64 and all(t.dtype == torch.float32 for t in (qa, kv, q_norm, kv_norm, cos, sin)),
           "update_caches",
           f"qa [S, q_rank], kv [S, {HEAD_DIM}], q_norm [q_rank], kv_norm [{HEAD_DIM}], cos and sin [S, {half}] in fp32, positions [S] in "
           f"int64, S from 1 to {PROMPT_TOKENS}, q_rank a multiple of 4 up to {MAX_Q_RANK}",
           qa=qa, kv=kv, q_norm=q_norm, kv_norm=kv_norm, cos=cos, sin=sin, positions=positions)
    expect(min(S, MAX_TOKENS) <= R and window.values.shape == (R, KEY_BYTES) and window.scales.shape == (R, KEY_SCALES)
           and window.values.dtype == window.scales.dtype == torch.uint8, "update_caches",
           f"a window of values [R, {KEY_BYTES}] and scales [R, {KEY_SCALES}] in uint8, R at least S or {MAX_TOKENS}",
           values=window.values, scales=window.scales)
    long = Keys(window.long_values, window.long_scales) if isinstance(window, Window) else Keys(None, None)
    ratio = len(pools[0].ape) if pools else SWA
    expect(len(compressed) == len(pools) <= _MOST_POOLS.get(ratio, -1), "update_caches",
           f"no pool, one of ratio {HCA}, or one or two of {CSA}, and projections for each",
           **{f"ape_{i}": p.ape for i, p in enumerate(pools)}, **{f"kv_{i}": kv for i, (kv, _) in enumerate(compressed)})
    if pools:
        angles = (entry_cos, entry_sin)
        expect(all(t is not None and t.shape == (S, half) and t.dtype == torch.float32 for t in angles), "update_caches",
               f"entry_cos and entry_sin [S, {half}] in fp32 with pools",
               **{name: t for name, t in zip(("entry_cos", "entry_sin"), angles, strict=True) if t is not None})
        entry_cos, entry_sin = (t.contiguous() for t in angles)
    pairs, every = (*compressed, None, None), (*pools, None, None)
    qr = torch.empty(S, rank, dtype=torch.bfloat16, device=qa.device)
    shared = ratio == HCA  # among the blocks of its pool
    _update_caches(
        qa=qa.contiguous(), kv=kv.contiguous(), q_norm=q_norm.contiguous(), kv_norm=kv_norm.contiguous(), cos=cos.contiguous(),
        sin=sin.contiguous(), positions=positions.contiguous(), qr=qr, window_values=window.values, window_scales=window.scales,
        long_values=long.values, long_scales=long.scales, **_pool("main", pairs[0], every[0], S, ratio, HEAD_DIM, (KEY_BYTES, KEY_SCALES)),
        **_pool("index", pairs[1], every[1], S, ratio, INDEX_DIM, (INDEX_BYTES, INDEX_SCALES)),
        entry_cos=entry_cos if pools else None, entry_sin=entry_sin if pools else None,
        pooled=torch.empty(HEAD_DIM, dtype=torch.float32, device=qa.device) if shared else None,
        arrivals=arrivals("update_caches", qa.device) if shared else None, tokens=S, rank=rank, ring=R,
        long_ring=0 if long.values is None else len(long.values), ratio=ratio, eps=eps)
    return qr
