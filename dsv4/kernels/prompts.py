"""Products of many tokens with the weights that decode packs (packing.py), on Hopper, by cuda/packed_gemm.cuh; here is which tiles a
product is cut into (`cut`). No second copy of a weight.

x comes in the kernels' order of columns (`arrange`), once for all weights of one input and one order. `linear` and `grouped_linear` are
dense; `moe` sorts the tokens by expert on the device: the host waits for nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..formats import Weight
from . import PROMPT_TOKENS
from .experts import PackedExperts
from .grouped import MAX_SLOTS, group_choices, sum_choices
from .launch import IN, OUT, WEIGHT, Kernel, expect
from .layouts import Groups
from .linear import PackedWeights
from .packing import BF16, FORMATS, ITEM_BYTES, ROWS

CHUNK = 64  # columns: x is filled up to a multiple
BLOCK_ROWS, MAX_MATRICES = 256, 384  # these as in cuda/packed_gemm.cuh; rows: packed ones, of all parts together
ROUNDED, SWIGLU, FLOATS = range(3)  # its `result`
_CPU_BLOCKS = 3  # what the emulator runs
# Cycles of a processor, for the choice of tiles, from an H200's times (docs/measurements.md): of 64 columns of 256 rows, by the product's
# width, and how many times as many of parts, for whom more comes to shared memory and less of it is used again. Of storing, a token. Of
# adding up parts, a token's sums that a warp gives away.
_CHUNK_CYCLES = {8: 460, 16: 490, 24: 540, 32: 580, 48: 650, 64: 740, 80: 840, 96: 930, 128: 1170}
_PARTS_SLOWER = {1: 1.0, 2: 1.15, 4: 1.5}
_STORE_CYCLES, _GIVE_CYCLES = 28, 10
_PARTS_BLOCKS = 132  # for which processors parts are chosen, the H200's
_SPREAD = (-2, -1, 0, 1, 2, 3)  # standard deviations from the mean number of an expert's tokens, if each token chose at random

_ARGUMENTS = {"x": IN, "weights": WEIGHT, "factors": WEIGHT, "offsets": IN, "row_weights": IN, "out": OUT, "rows": int, "columns": int,
              "x_columns": int, "matrices": int, "result": int, "most": int, "parts": int, "short_order": int, "blocks": int,
              "factor": float, "limit": float}
_bf16 = Kernel("packed_gemm_bf16", _ARGUMENTS)
_fp8 = Kernel("packed_gemm_fp8", _ARGUMENTS)
_nvfp4 = Kernel("packed_gemm_nvfp4", _ARGUMENTS)
_mxfp4 = Kernel("packed_gemm_mxfp4", _ARGUMENTS)
_GEMMS = {FORMATS["plain"]: _bf16, FORMATS["fp8"]: _fp8, FORMATS["nvfp4"]: _nvfp4, FORMATS["mxfp4"]: _mxfp4}
_arrange_tokens = Kernel("arrange_tokens", {"x": IN, "source": IN, "out": OUT, "rows": int, "columns": int, "short_order": int})


class Arranged(NamedTuple):
    """Tokens as packed weights of some formats want them: bf16 [.., K up to a multiple of 64], where x was [.., K] (cuda/arrange.cuh).
    short_order: for bf16 weights; else for FP8 and FP4."""

    values: torch.Tensor
    columns: int
    short_order: bool


class Cut(NamedTuple):
    """How a product is cut: tiles of up to `most` tokens by 256 / parts packed rows, whose columns 1, 2 or 4 `parts` of a block share."""

    most: int
    parts: int


CUTS = tuple(Cut(most, parts) for parts, widths in ((1, (16, 32, 48, 64, 80, 96, 128)), (2, (32, 64, 96, 128)), (4, (32, 64)))
             for most in widths)


class Routing(NamedTuple):
    """Tokens by expert: the rows of these `groups`; source [S k] int32, the token of each row; weights [S k] fp32, of each row."""

    groups: Groups
    source: torch.Tensor
    weights: torch.Tensor


@functools.cache
def blocks_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _CPU_BLOCKS


def takes_short_order(code: int) -> bool:
    """Which of the two orders of columns weights of this format (packing.FORMATS) want."""
    return code == BF16


def takes(weight: Weight) -> bool:
    """Whether these products expand the weight to bf16 without rounding: all but FP8 with a block scale of more than 4 significant bits,
    which is rounded with each of its weights. Reads the scales, so the host waits: once, at load."""
    return weight.kind != "fp8" or takes_scales(weight.scale)


def takes_scales(scales: torch.Tensor) -> bool:
    """`takes` of an FP8 weight's scales alone: uint8 (ue8m0) or any float dtype."""
    return scales.dtype == torch.uint8 or not bool((scales.float().view(torch.int32) & 0xFFFFF).any())


def arrange(x: torch.Tensor, short_order: bool, source: torch.Tensor | None = None) -> Arranged:
    """x [M, K] or [M, G, K] bf16, K even, as Arranged; with source [R] int32 (of an x [M, K]): row i is x[source[i]]. Raises UserError for
    other shapes or dtypes."""
    expect(x.dim() in (2, 3) and x.shape[-1] > 0 and x.shape[-1] % 2 == 0 and x.dtype == torch.bfloat16
           and (source is None or (x.dim() == 2 and source.dim() == 1 and source.dtype == torch.int32)), "arrange",
           "x [M, K] or [M, G, K] in bf16, K even, and source, if any, [R] in int32 with x [M, K]", x=x,
           **({} if source is None else {"source": source}))
    K = x.shape[-1]
    rows = x.shape[:-1] if source is None else source.shape
    out = torch.empty(*rows, -(-K // CHUNK) * CHUNK, dtype=x.dtype, device=x.device)
    if out.numel():
        _arrange_tokens(x=x.contiguous(), source=source, out=out, rows=rows.numel(), columns=K, short_order=int(short_order))
    return Arranged(out, K, short_order)


@functools.cache
def parts_of(rows: int, columns: int) -> int:
    """How many parts, 1, 2 or 4, share the columns of a weight of that many packed rows in a step of up to PROMPT_TOKENS tokens: more where
    an H200 takes a twentieth less time then for PROMPT_TOKENS. By the weight alone: it is the order of additions, and a token's result
    shall not depend on the others of its step."""
    def cycles(parts):
        return min(_busiest(PROMPT_TOKENS, rows, columns, None, _PARTS_BLOCKS, c) for c in CUTS if c.parts == parts)

    best = 1
    for parts in (2, 4):
        if columns >= parts * CHUNK and cycles(parts) < 0.95 * cycles(best):
            best = parts
    return best


def _width(tokens: int, parts: int) -> int:
    """Columns of the tensor cores' product for so many tokens (cuda/packed_gemm.cuh)."""
    step = 32 if parts > 1 or tokens > 96 else 8 if tokens <= 32 else 16
    return -(-tokens // step) * step


def _cycles(width: int, columns: int, parts: int) -> float:
    """A block's time for a tile."""
    return (-(-columns // (CHUNK * parts)) * _CHUNK_CYCLES[width] * _PARTS_SLOWER[parts] + _STORE_CYCLES * width / parts +
            _GIVE_CYCLES * width * (parts - 1) / parts)


def _busiest(tokens: int, rows: int, columns: int, experts: int | None, blocks: int, cut: Cut) -> float:
    """What the busiest of the processors has to do, in cycles."""
    counts, times = [tokens], []  # tokens of a matrix
    if experts:
        mean = tokens / experts
        counts = [max(0, round(mean + z * mean**0.5)) for z in _SPREAD]
    for count in counts:
        whole, rest = divmod(count, cut.most)
        times += [_cycles(_width(n, cut.parts), columns, cut.parts) for n in [cut.most] * whole + [rest] * (rest > 0)]
    tiles = -(-rows // (BLOCK_ROWS // cut.parts)) * (experts or 1) / len(counts)  # for each of these times
    return max(sum(times) * tiles / blocks, max(times) * -(-len(times) * tiles // blocks)) if times else 0


def cut(tokens: int, rows: int, columns: int, experts: int | None, blocks: int) -> Cut:
    """For `tokens` and a weight of so many packed rows, or that many experts of so many each, whose columns no parts share: the tiles for
    which the busiest of the processors (`blocks`) has the least to do. No step has more than PROMPT_TOKENS; a product of more has one
    part, as then there are tiles enough."""
    parts = 1 if experts or tokens > PROMPT_TOKENS else parts_of(rows, columns)
    return _best(tokens, rows, columns, experts, blocks, parts)


@functools.lru_cache(maxsize=4096)  # 0.1 to 0.6 ms each
def _best(tokens: int, rows: int, columns: int, experts: int | None, blocks: int, parts: int) -> Cut:
    return min((c for c in CUTS if c.parts == parts), key=lambda c: _busiest(tokens, rows, columns, experts, blocks, c))


def _gemm(code, result, x, weights, out, rows, columns, matrices, tile, factor=1.0, factors=None, offsets=None, row_weights=None,
          short_order=False, limit=0.0):
    x_columns, device = x.values.shape[-1], out.device
    blocks, packed = blocks_of(device), columns * (2 if result == SWIGLU else 1)
    if offsets is None:
        packed *= matrices
    most, parts = tile or cut(rows, packed, x.columns, None if offsets is None else matrices, blocks)
    _GEMMS[code](x=x.values, weights=weights, factors=factors, offsets=offsets, row_weights=row_weights, out=out, rows=rows,
                 columns=columns, x_columns=x_columns, matrices=matrices, result=result, most=most, parts=parts,
                 short_order=int(short_order), blocks=blocks, factor=factor, limit=limit)


def linear(x: Arranged, weights: PackedWeights, tile: Cut | None = None) -> tuple[torch.Tensor, ...]:
    """x of [M, K], packed weights [N_i, K] -> bf16 [M, N_i] each, rounded once. Any M, N_i a multiple of 8.

    Weights are expanded to bf16 exactly (FP8 if its block scales have up to 4 significant bits: powers of two do) and summed in fp32.
    tile: instead of the chosen one. Raises UserError for other shapes, or an order that is not of a weight's format.
    """
    return tuple(_dense("linear", x, weights, i, 1, tile) for i in range(len(weights.rows)))


def projections(x: torch.Tensor, weights: PackedWeights, tile: Cut | None = None) -> tuple[torch.Tensor, ...]:
    """x [M, K] bf16, packed weights [N_i, K] -> fp32 [M, N_i] each, not rounded. Any M and N_i; x is arranged once for each order that the
    weights want. As `linear` otherwise."""
    orders = [takes_short_order(code) for code in weights.table[:, 1].tolist()]
    arranged = {order: arrange(x, order) for order in sorted(set(orders))}
    return tuple(_dense("projections", arranged[order], weights, i, 1, tile, FLOATS) for i, order in enumerate(orders))


def grouped_linear(x: Arranged, weight: PackedWeights, tile: Cut | None = None) -> torch.Tensor:
    """x of [M, G, K], weight of one [G * R, K], R a multiple of 16 -> bf16 [M, G, R]: group g of x meets rows g * R .. of the weight.
    As `linear` otherwise."""
    expect(x.values.dim() == 3 and len(weight.rows) == 1 and weight.rows[0] % (ROWS * x.values.shape[1]) == 0, "grouped_linear",
           f"x of [M, G, K] and one weight of G * R = {weight.rows[0]} rows, R a multiple of {ROWS}", x=x.values)
    return _dense("grouped_linear", x, weight, 0, x.values.shape[1], tile)


def _dense(name, x, weights, i, groups, tile, result=ROUNDED):
    at, code, rows, bits = weights.table[i].tolist()
    tiles, items, size = weights.segments[i]
    M = x.values.shape[0]
    order = "short" if takes_short_order(code) else "long"
    expect(x.values.shape[1:-1].numel() == groups, name, "x of [M, K]", x=x.values)
    expect(x.columns == weights.columns and (rows % 8 == 0 or result == FLOATS) and x.short_order == takes_short_order(code)
           and groups <= MAX_MATRICES, name, f"x of {weights.columns} columns in the {order} order, and a multiple of 8 rows", x=x.values)
    columns = rows // groups
    out = torch.empty(M, groups, columns, dtype=torch.float32 if result == FLOATS else torch.bfloat16, device=x.values.device)
    if M:
        factor = float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
        _gemm(code, result, x, weights.data[at : at + tiles * items * size], out, M, columns, groups, tile, factor=factor)
    return out if x.values.dim() == 3 else out[:, 0]


def route(chosen: torch.Tensor, weights: torch.Tensor, experts: int) -> Routing:
    """chosen [S, k] int32 in [0, experts), weights [S, k] fp32 -> their Routing, on the device."""
    groups = group_choices(chosen, experts)
    return Routing(groups, groups.order // chosen.shape[1], weights.flatten()[groups.order])


def moe(x: torch.Tensor, experts: PackedExperts, chosen: torch.Tensor, weights: torch.Tensor, limit: float,
        tile: Cut | None = None) -> torch.Tensor:
    """ops.experts.moe for any number of tokens: x [S, D] bf16, chosen [S, k] int32, weights [S, k] fp32 -> [S, D] bf16.

    The hidden values are rounded to bf16 as in the definition; the sums of w2 are fp32 until the last one. Takes S k D fp32 values of
    memory besides. Raises UserError for other shapes or dtypes.
    """
    S, k = chosen.shape if chosen.dim() == 2 else (-1, -1)
    E, D = len(experts.factors) - 1, experts.columns
    expect(1 <= k <= MAX_SLOTS and x.shape == (S, D) and weights.shape == chosen.shape and D % 8 == experts.inner % 8 == 0
           and E <= MAX_MATRICES and x.dtype == torch.bfloat16 and chosen.dtype == torch.int32 and weights.dtype == torch.float32, "moe",
           f"x [S, {D}] in bf16, chosen [S, k] in int32 and weights [S, k] in fp32, k up to {MAX_SLOTS}, widths multiples of 8", x=x,
           chosen=chosen, weights=weights)
    if not S:
        return torch.empty_like(x)
    routing = route(chosen, weights, E)
    up_shared, up_routed, down_shared, down_routed = experts.formats
    hidden = expert_up(arrange(x, takes_short_order(up_shared)), experts.up_shared, up_shared, down_shared, experts.factors[E:],
                       experts.inner, limit, tile=tile)
    base = expert_down(hidden, experts.down_shared, down_shared, experts.factors[E:], D, tile=tile)
    x = arrange(x, takes_short_order(up_routed), routing.source)
    hidden = expert_up(x, experts.up_routed, up_routed, down_routed, experts.factors[:E], experts.inner, limit, routing, tile)
    rows = expert_down(hidden, experts.down_routed, down_routed, experts.factors[:E], D, routing, tile)
    return sum_choices(rows, routing.groups, base)


def expert_up(x: Arranged, packed: torch.Tensor, code: int, next_code: int, factors: torch.Tensor, inner: int, limit: float,
              routing: Routing | None = None, tile: Cut | None = None) -> Arranged:
    """silu(min(w1 x, limit)) * clamp(w3 x, limit) * routing weight of rows sorted by expert, in the order that w2's format wants.

    x of [R, D], packed [E, ..] of format `code` and factors [E, 3] as in PackedExperts; without a routing, one expert has all rows.
    """
    E, R = len(packed), len(x.values)
    expect(factors.shape == (E, 3) and packed.shape[3] == ITEM_BYTES[code] and (E == 1 or routing is not None)
           and x.short_order == takes_short_order(code), "expert_up", "packed [E, tiles, items, bytes] and factors [E, 3]", x=x.values,
           packed=packed, factors=factors)
    out = torch.empty(R, -(-inner // CHUNK) * CHUNK, dtype=torch.bfloat16, device=x.values.device)
    _gemm(code, SWIGLU, x, packed, out, R, inner, E, tile, factors=factors, offsets=routing and routing.groups.offsets,
          row_weights=routing and routing.weights, short_order=takes_short_order(next_code), limit=limit)
    return Arranged(out, inner, takes_short_order(next_code))


def expert_down(hidden: Arranged, packed: torch.Tensor, code: int, factors: torch.Tensor, columns: int, routing: Routing | None = None,
                tile: Cut | None = None) -> torch.Tensor:
    """w2 of the same rows: fp32 [R, columns]."""
    E, R = len(packed), len(hidden.values)
    out = torch.empty(R, columns, device=hidden.values.device)
    _gemm(code, FLOATS, hidden, packed, out, R, columns, E, tile, factors=factors, offsets=routing and routing.groups.offsets)
    return out
