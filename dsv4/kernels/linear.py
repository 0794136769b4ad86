"""The kernels of dsv4/ops/linear.py: products of 1 to 8 tokens with weights packed once, at load."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..errors import UserError
from ..formats import Weight
from . import MAX_TOKENS
from .launch import HOST, IN, OUT, WEIGHT, Kernel, expect
from .packing import FORMATS, ROWS, Packing, packed_shape

_linear = Kernel("linear", {"x": IN, "weights": WEIGHT, "table": HOST, "first_item": HOST, "out": OUT, "segments": int, "blocks": int,
                            "tiles": int, "tokens": int, "columns": int, "x_stride": int, "group_tiles": int, "bfloat16": int,
                            "parts": int})

MAX_WEIGHTS, MAX_BLOCKS = 8, 320  # cuda/linear.cu: the plan is a kernel parameter, 4 KB at most
_CPU_BLOCKS = 12  # what the emulator runs
# What two parts must save of the largest block's work: for Pro's wq_b (3 %; 65,536 rows) and 8 tokens, writing 4 MB of parts instead of 1
# of results costs more than that on an H200: 29.8 us instead of 29.3.
_WORTH = 1.05


class PackedWeights(NamedTuple):
    """Weights of one input, merged into one launch. `rows`: out features of each; `table`: cuda/linear.cu's, on the CPU; `segments`:
    (tiles, items of a tile, bytes of an item) of each."""

    data: torch.Tensor
    columns: int
    rows: tuple[int, ...]
    table: torch.Tensor
    segments: tuple[tuple[int, int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes read at each use."""
        return self.data.numel()


class Schedule(NamedTuple):
    """How a launch's items are dealt: block i has first_item[i] .. first_item[i + 1] - 1, and no block has part of more than `tiles` tiles.
    `parts`: 1 if blocks begin at tiles; 2 if a tile may be two blocks'."""

    first_item: torch.Tensor
    tiles: int
    parts: int


def pack_weights(weights: tuple[Weight, ...]) -> PackedWeights:
    """Packs 1 to 8 weights [out_i, in] of one input, formats mixed, on their device. Raises UserError for different widths or what
    packing.py refuses."""
    columns = {w.shape[1] for w in weights}
    if not 1 <= len(weights) <= MAX_WEIGHTS or len(columns) != 1 or 0 in columns or any(w.shape[0] == 0 for w in weights):
        raise UserError(f"pack_weights: expected 1 to {MAX_WEIGHTS} weights [out, in] of one in, found {[list(w.shape) for w in weights]}")
    shapes = tuple(packed_shape(w.kind, *w.shape) for w in weights)
    sizes = [tiles * items * size for tiles, items, size in shapes]
    data, packing, at = torch.empty(sum(sizes), dtype=torch.uint8, device=weights[0].device), Packing(len(weights), weights[0].device), [0]
    for number, (weight, shape, size) in enumerate(zip(weights, shapes, sizes, strict=True)):
        packing.matrix(number, weight, data[at[-1] : at[-1] + size].view(shape))
        at.append(at[-1] + size)
    bits = torch.tensor(packing.factors(), dtype=torch.float32).view(torch.int32).tolist()
    table = [[begin, FORMATS[w.kind], w.shape[0], factor] for begin, w, factor in zip(at[:-1], weights, bits, strict=True)]
    return PackedWeights(data, columns.pop(), tuple(w.shape[0] for w in weights), torch.tensor(table, dtype=torch.int64), shapes)


def projections(x: torch.Tensor, weights: PackedWeights, activations: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    """x [S, in] bf16 -> fp32 [S, out_i] each, unrounded, in one launch. Each result is contiguous.

    Raises UserError for other shapes, dtypes or activations.
    """
    refuse_activations("projections", activations)
    expect(len(activations) == len(weights.rows), "projections", f"{len(weights.rows)} activations, as many as weights", x=x)
    out = _launch("projections", x, weights, torch.float32)
    tokens = x.shape[0]
    parts = out.split([tokens * rows for rows in weights.rows])
    return tuple(part.view(tokens, rows) for part, rows in zip(parts, weights.rows, strict=True))


def linear(x: torch.Tensor, weight: PackedWeights, activations: str = "bf16") -> torch.Tensor:
    """x [S, in] bf16 -> [S, out] bf16, rounded once, or fp32 [2, S, out], whose two parts the reader adds and rounds (ops.whole).

    Raises UserError for other shapes, dtypes or activations.
    """
    refuse_activations("linear", (activations,))
    out = _launch("linear", x, weight, torch.bfloat16)
    return out.view(*out.shape[:-1], x.shape[0], -1)


def grouped_linear(x: torch.Tensor, weight: PackedWeights) -> torch.Tensor:
    """x [S, G, in] bf16, weight of one [G * R, in], R a multiple of 16 -> [S, G, R] bf16: group g of x meets rows g * R .. of the weight.

    Raises UserError for other shapes or dtypes.
    """
    expect(x.dim() == 3 and x.shape[1] and weight.rows[0] % (ROWS * x.shape[1]) == 0, "grouped_linear",
           f"x [S, G, in] with G * R = {weight.rows[0]} and R a multiple of {ROWS}", x=x)
    return _launch("grouped_linear", x, weight, torch.bfloat16, grouped=True).view(*x.shape[:2], -1)


def refuse_activations(name: str, activations: tuple[str, ...]) -> None:
    """Raises UserError unless all are bf16."""
    if any(a != "bf16" for a in activations):
        raise UserError(f"{name}: expected bf16 activations, found {', '.join(activations)}: run with --backend torch")


def _launch(name, x, weights, dtype, grouped=False):
    """x [S, in], or [S, groups, in], -> 1-D: [S, out_i] of each weight, one after the other. One weight to be rounded may come in fp32 and
    in two parts, [2, ..], where that spares enough."""
    shape = x.shape
    expect(x.dtype == torch.bfloat16 and len(shape) == 2 + grouped and 1 <= shape[0] <= MAX_TOKENS and shape[-1] == weights.columns, name,
           f"x of 1 to {MAX_TOKENS} tokens in bf16, {weights.columns} wide", x=x)
    expect(dtype == torch.float32 or len(weights.rows) == 1, name, f"one weight, not {len(weights.rows)}", x=x)
    if weights.columns % 8:  # the kernel reads 8 columns at a time; no published checkpoint comes here
        x = torch.nn.functional.pad(x, (0, -weights.columns % 8))
    tokens, groups, columns = shape[0], shape[1] if grouped else 1, x.shape[-1]
    schedule = _schedule(weights.segments, blocks_at_once(x.device), dtype == torch.bfloat16 and not grouped)
    out = torch.empty(tokens * sum(weights.rows), dtype=dtype, device=x.device)
    if schedule.parts == 2:
        out = torch.empty(2, *out.shape, device=x.device)
    group_tiles = weights.rows[0] // ROWS // groups if groups > 1 else 0
    _linear(x=x.contiguous(), weights=weights.data, table=weights.table, first_item=schedule.first_item, out=out,
            segments=len(weights.rows), blocks=len(schedule.first_item) - 1, tiles=schedule.tiles, tokens=tokens, columns=columns,
            x_stride=groups * columns, group_tiles=group_tiles, bfloat16=int(out.dtype == torch.bfloat16), parts=schedule.parts)
    return out


@functools.lru_cache
def blocks_at_once(device: torch.device) -> int:
    """How many blocks of a stream kernel run together: 2 an SM."""
    return min(2 * torch.cuda.get_device_properties(device).multi_processor_count, MAX_BLOCKS) if device.type == "cuda" else _CPU_BLOCKS


@functools.lru_cache(maxsize=1024)
def _schedule(segments: tuple[tuple[int, int, int], ...], blocks: int, may_split: bool = False) -> Schedule:
    """The contiguous ranges of items that keep the largest block's bytes small, for `blocks` blocks: whole tiles, or where `may_split`
    allows it for a single weight and it spares enough, equal numbers of items."""
    first_tile = _deal(segments, _smallest_limit(segments, blocks))
    first_item, parts = _items_before(segments, first_tile), 1
    most_tiles = max(b - a for a, b in zip(first_tile, first_tile[1:], strict=False))
    total, most = first_item[-1], max(b - a for a, b in zip(first_item, first_item[1:], strict=False))
    # As many tiles as blocks, so that a block has no less than a tile and a tile no more than two blocks.
    if may_split and len(segments) == 1 and segments[0][0] > blocks and most * blocks > _WORTH * total:
        first_item, parts, most_tiles = [total * i // blocks for i in range(blocks + 1)], 2, -(-segments[0][0] // blocks) + 1
    return Schedule(torch.tensor(first_item, dtype=torch.int32), most_tiles, parts)


def _items_before(segments, tiles):
    """For each number of a tile, ascending, how many items all tiles before it have."""
    out, first, items = [], 0, 0
    rest = iter(segments)
    count, each, _ = next(rest)
    for tile in tiles:
        while tile > first + count:
            first, items = first + count, items + count * each
            count, each, _ = next(rest)
        out.append(items + (tile - first) * each)
    return out


def _deal(segments, limit):
    """The first tile of each block, and the end, if blocks take tiles in order while their bytes are at most `limit`."""
    first, tile, room = [0], 0, limit
    for tiles, items, size in segments:
        while tiles:
            taken = min(tiles, room // (items * size))
            if not taken:
                first.append(tile)
                room = limit
                continue
            tile, tiles, room = tile + taken, tiles - taken, room - taken * items * size
    return [*first, tile]


def _smallest_limit(segments, blocks):
    """The smallest limit at which _deal needs no more than `blocks`."""
    low, high = max(items * size for _, items, size in segments), sum(tiles * items * size for tiles, items, size in segments)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_deal(segments, middle)) - 1 <= blocks else (middle + 1, high)
    return low
