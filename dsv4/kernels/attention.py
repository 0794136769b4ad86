"""The kernel of dsv4/ops/attention.py."""

from __future__ import annotations

import torch

from . import MAX_TOKENS, PROMPT_TOKENS
from .keys import HEAD_DIM, KEY_BYTES, KEY_SCALES, ROPE_DIM, Keys, Window
from .launch import IN, OUT, WEIGHT, WORK, Kernel, expect, tensor_memory_blocks

UNIT = 16  # keys that go to a split together
_SMS, _MAX_SPLITS = 132, 64  # of an H200

_KEYS = {"q": IN, "sink": WEIGHT, "cos": IN, "sin": IN, "positions": IN, "window_values": IN, "window_scales": IN, "entry_values": IN,
         "entry_scales": IN, "selected": IN}
_SIZES = {"tokens": int, "heads": int, "ring": int, "window_size": int, "entries": int, "ratio": int, "top_k": int, "splits": int}
_attention = Kernel("attention", {**_KEYS, "partial": WORK, "stats": WORK, "out": OUT, **_SIZES, "block_heads": int, "tile": int,
                                  "eps": float})
_attention_sm100 = Kernel("attention_sm100", {**_KEYS, "out": OUT, **_SIZES, "eps": float})


def shares_of(units: int, heads: int, tokens: int) -> dict[str, int]:
    """Into how many splits a token's units of 16 keys go, the heads of a block, and how many units it takes at a time.

    The less a block does, the sooner it ends; but a split of fewer than 32 keys costs the merge what it saves, and there should be no more
    blocks than SMs. Where each of these would have more than 80 keys, a block of 32 heads takes its keys in turns.
    """
    for block_heads, tile in ((8, 2), (16, 2), (16, 5)):
        splits = -(-units // tile)
        if splits <= _MAX_SPLITS and splits * -(-heads // block_heads) * tokens <= _SMS:
            return {"splits": splits, "block_heads": block_heads, "tile": tile}
    return {"splits": max(1, min(_MAX_SPLITS, _SMS // (-(-heads // 32) * tokens))), "block_heads": 32, "tile": 4}


def _are_keys(keys: Keys) -> bool:
    n = len(keys.values)
    return (keys.values.shape == (n, KEY_BYTES) and keys.scales.shape == (n, KEY_SCALES) and keys.values.data_ptr() % 16 == 0
            and all(t.dtype == torch.uint8 for t in keys))


def attention(q: torch.Tensor, sink: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
              window: Keys | Window, window_size: int, entries: Keys | None, ratio: int, selected: torch.Tensor | None,
              eps: float) -> torch.Tensor:
    """q [S, H * 512] fp32, as projected -> [S, H * 512] bf16, S 1 to 8, or with a Window to 1,024, any H.

    sink [H], cos and sin [S, 32] fp32; positions int64 [S], consecutive, whose values are read on the device only. Token s sees the last
    `window_size` positions, position p in row p mod R of `window` (R rows, at least window_size + S - 1, or + 7), and of the first
    (positions[s] + 1) // ratio rows of `entries` those that `selected` [S, k] int32 names (-1: none), or all if that is None; `ratio` has
    no meaning without entries. Raises UserError for other shapes or dtypes.
    """
    prompt = isinstance(window, Window) and len(q) > MAX_TOKENS
    arguments = _arguments("attention", PROMPT_TOKENS if prompt else MAX_TOKENS, q, sink, cos, sin, positions, window, window_size, entries,
                           ratio, selected, eps, MAX_TOKENS)
    S, H, ring = arguments["tokens"], arguments["heads"], arguments["ring"]
    if prompt:
        expect(len(window.long_values) >= window_size + S - 1, "attention", f"a long window of at least {window_size} + {S} - 1 rows",
               window=window.long_values)
        arguments |= zip(("window_values", "window_scales"), window.rings(positions), strict=True)
    bound = arguments["top_k"] or arguments["entries"]
    shares = shares_of(-(-ring // UNIT) + -(-bound // UNIT), H, S)
    _attention(**arguments, partial=arguments["out"].new_empty(S, H, shares["splits"], HEAD_DIM),
               stats=q.new_empty(S, H, shares["splits"], 2), **shares)
    return arguments["out"]


def attention_sm100(q: torch.Tensor, sink: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, window: Keys,
                    window_size: int, entries: Keys | None, ratio: int, selected: torch.Tensor | None, eps: float) -> torch.Tensor:
    """attention on Blackwell's tensor cores, for any number of tokens up to 65,535; a key's scale beyond 2^39 counts as NaN. Raises
    UserError on other GPUs too.

    No layer calls it yet (docs/kernels.md says why): ops.trying_kernel("attention", attention_sm100) does.
    """
    name = "attention_sm100"
    arguments = _arguments(name, 65535, q, sink, cos, sin, positions, window, window_size, entries, ratio, selected, eps)
    blocks = tensor_memory_blocks(name, q.device, "attention")
    bound = window_size + (arguments["top_k"] or arguments["entries"])
    _attention_sm100(**arguments, splits=_pairs(arguments["tokens"] * -(-arguments["heads"] // 128), -(-bound // 64), blocks))
    return arguments["out"]


def _pairs(clusters: int, tiles: int, blocks: int) -> int:
    """How many pairs of blocks share a token's keys: as many as run at once, and have a tile of 64 keys each."""
    splits = 1
    while splits < 4 and 2 * splits <= tiles and 4 * splits * clusters <= blocks:
        splits *= 2
    return splits


def _arguments(name, most_tokens, q, sink, cos, sin, positions, window, window_size, entries, ratio, selected, eps, ring_tokens=None):
    """The kernels' common arguments, checked, with room for the result. ring_tokens: how many tokens share a ring, if not all."""
    S = len(q) if q.dim() == 2 else 0
    H = len(sink) if sink.dim() == 1 else 0
    expect(1 <= S <= most_tokens and H > 0 and q.shape == (S, H * HEAD_DIM) and cos.shape == sin.shape == (S, ROPE_DIM // 2)
           and positions.shape == (S,) and all(t.dtype == torch.float32 for t in (q, sink, cos, sin)) and positions.dtype == torch.int64,
           name, f"q [S, H * {HEAD_DIM}], sink [H], cos and sin [S, {ROPE_DIM // 2}] in fp32 and positions [S] in int64, S 1 to "
           f"{most_tokens}", q=q, sink=sink, cos=cos, sin=sin, positions=positions)
    for whose, keys in (("window's", window), ("entries'", entries)):
        if keys is not None:
            expect(_are_keys(keys), name, f"{whose} values [n, {KEY_BYTES}], 16-byte aligned, and scales [n, {KEY_SCALES}] in uint8",
                   **keys._asdict())
    together = min(S, ring_tokens or S)
    expect(1 <= window_size <= len(window.values) + 1 - together, name, f"a window of at least {window_size} + {together} - 1 rows",
           window=window.values)
    if entries is not None:
        expect(ratio >= 1, name, f"a ratio of at least 1 with entries, got {ratio}", entries=entries.values)
    if selected is not None:
        expect(entries is not None and selected.dim() == 2 and len(selected) == S and selected.shape[1] >= 1
               and selected.dtype == torch.int32, name, f"entries, and selected [{S}, k] in int32", selected=selected)
    if entries is not None and not len(entries.values):  # what names are there are none
        entries = selected = None
    q = q.contiguous()
    expect(q.data_ptr() % 16 == 0, name, "q 16-byte aligned", q=q)
    return {"q": q, "sink": sink, "cos": cos.contiguous(), "sin": sin.contiguous(), "positions": positions,
            "window_values": window.values, "window_scales": window.scales, "entry_values": entries and entries.values,
            "entry_scales": entries and entries.scales, "selected": None if selected is None else selected.contiguous(),
            "out": torch.empty(S, H * HEAD_DIM, dtype=torch.bfloat16, device=q.device), "tokens": S, "heads": H, "ring": len(window.values),
            "window_size": window_size, "entries": 0 if entries is None else len(entries.values), "ratio": 0 if entries is None else ratio,
            "top_k": 0 if selected is None else selected.shape[1], "eps": eps}
