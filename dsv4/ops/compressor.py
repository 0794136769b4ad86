"""The compressor: tokens of a block pooled into one entry, per channel, by a softmax over the block's slots, with the state that
carries an open block from one call to the next; the entry normed, rotated, quantised and written (model.md section 6)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .norm import kv_norm_rope
from .quant import fp4_round_trip, hadamard


class Pool(NamedTuple):
    """One compressor's weights and memory: ape [r, c*d] and norm [d] fp32; the open block kv_state and score_state (see `pool`) and
    entries [T, d], written in place. `for_index`: the entries are the indexer's keys."""

    ape: torch.Tensor
    norm: torch.Tensor
    kv_state: torch.Tensor
    score_state: torch.Tensor
    entries: torch.Tensor
    for_index: bool


def pool(kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, kv_state: torch.Tensor, score_state: torch.Tensor,
                 position: int) -> torch.Tensor:
    """Takes S tokens from `position` on, returns the entries of the blocks they close, [closed, d] fp32, before norm and RoPE.

    kv, score [S, c*d] fp32: the two projections (score without ape); ape [r, c*d] fp32; c = 2 for ratio r = 4, else 1.
    kv_state, score_state [c*r, c*d] fp32, updated in place: with c = 2 the first r rows hold the last closed block, the last r rows the
    open one (zeros and -inf at the start of a sequence). HCA pools the block's r tokens. CSA pools 2r slots: the previous block's tokens
    by the first half of their channels, this block's by the second half.
    """
    (r, width), S = ape.shape, kv.shape[0]
    overlap = kv_state.shape[0] == 2 * r
    held = position % r  # tokens of the open block that came in earlier calls
    open_kv, open_score = kv_state[-r:], score_state[-r:]
    slots = (held + torch.arange(S, device=kv.device)) % r
    kv = torch.cat((open_kv[:held], kv))
    score = torch.cat((open_score[:held], score + ape[slots]))
    closed = kv.shape[0] // r
    blocks_kv, blocks_score = (v[: closed * r].view(closed, r, width) for v in (kv, score))
    if closed and overlap:
        d = width // 2
        pooled_kv = torch.cat((torch.cat((kv_state[None, :r], blocks_kv[:-1]))[..., :d], blocks_kv[..., d:]), 1)
        pooled_score = torch.cat((torch.cat((score_state[None, :r], blocks_score[:-1]))[..., :d], blocks_score[..., d:]), 1)
        kv_state[:r], score_state[:r] = blocks_kv[-1], blocks_score[-1]
    else:
        pooled_kv, pooled_score = blocks_kv, blocks_score
    rest = kv.shape[0] - closed * r
    open_kv[:rest], open_score[:rest] = kv[closed * r :], score[closed * r :]
    return (pooled_score.softmax(1) * pooled_kv).sum(1) if closed else kv.new_empty(0, width // (2 if overlap else 1))


def compress(inputs: tuple[tuple[torch.Tensor, torch.Tensor], ...], pools: tuple[Pool, ...], positions: torch.Tensor,
             cos: torch.Tensor, sin: torch.Tensor, eps: float, quantize: bool) -> None:
    """Takes the tokens at `positions` [S], consecutive, into each pool's state and writes the entries of the blocks they close.

    inputs: each pool's two projections (kv, score), [S, c*d] fp32. cos, sin [S, rope/2]: the angles of the first position of each token's
    block, where its entry stands. An entry is rounded to the run's dtype, RMS-normed, rotated and, if `quantize`, FP8 on the non-rotary
    dims, or, for the indexer, FP4 on all dims after a Hadamard rotation. All pools of a call have the same ratio.
    """
    first = int(positions[0])
    for (kv, score), p in zip(inputs, pools, strict=True):
        pooled, ratio = pool(kv, score, p.ape, p.kv_state, p.score_state, first), len(p.ape)
        if len(pooled):
            closing = (positions + 1) % ratio == 0
            entry = kv_norm_rope(pooled.to(p.entries.dtype), p.norm, cos[closing], sin[closing], eps, quantize and not p.for_index)
            if quantize and p.for_index:
                entry = fp4_round_trip(hadamard(entry))
            p.entries[first // ratio : first // ratio + len(pooled)] = entry
