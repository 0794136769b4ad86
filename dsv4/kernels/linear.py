"""The kernels of dsv4/ops/linear.py: products of 1 to 8 tokens with weights packed once, at load."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..errors import UserError
from ..formats import Weight
from . import MAX_TOKENS
from .launch import HOST, IN, OUT, WEIGHT, Kernel, expect
from .packing import FORMATS, ROWS, pack_matrix, packed_shape

_linear = Kernel("linear", {"x": IN, "weights": WEIGHT, "table": HOST, "first_tile": HOST, "out": OUT, "segments": int, "clusters": int,
                            "cluster": int, "pieces": int, "tiles": int, "tokens": int, "columns": int, "x_stride": int,
                            "group_tiles": int, "bfloat16": int})

MAX_WEIGHTS, MAX_BLOCKS = 8, 320  # cuda/linear.cu: the plan is a kernel parameter, 4 KB at most
_WARPS, _MAX_PIECES = 8, 16  # a warp's pieces are kept in shared memory
_CPU_BLOCKS = 12  # what the emulator runs
_CLUSTERS = (1, 2, 4)
_WORTH = 1.03  # more blocks to a cluster must save 3 % of the largest block's work


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
    """How a launch's tiles are dealt: cluster i of `cluster` blocks has the tiles first_tile[i] .. first_tile[i + 1] - 1; no warp touches
    more than `pieces` of them and no cluster has more than `tiles`."""

    first_tile: torch.Tensor
    cluster: int
    pieces: int
    tiles: int


def pack_weights(weights: tuple[Weight, ...]) -> PackedWeights:
    """Packs 1 to 8 weights [out_i, in] of one input, formats mixed, on their device. Raises UserError for different widths or what
    packing.py refuses."""
    columns = {w.shape[1] for w in weights}
    if not 1 <= len(weights) <= MAX_WEIGHTS or len(columns) != 1 or 0 in columns or any(w.shape[0] == 0 for w in weights):
        raise UserError(f"pack_weights: expected 1 to {MAX_WEIGHTS} weights [out, in] of one in, found {[list(w.shape) for w in weights]}")
    shapes = tuple(packed_shape(w.kind, *w.shape) for w in weights)
    sizes = [tiles * items * size for tiles, items, size in shapes]
    data, table, at = torch.empty(sum(sizes), dtype=torch.uint8, device=weights[0].device), [], 0
    for weight, shape, size in zip(weights, shapes, sizes, strict=True):
        _, factor = pack_matrix(weight, data[at : at + size].view(shape))
        bits = int(torch.tensor(factor, dtype=torch.float32).view(torch.int32))
        table.append([at, FORMATS[weight.kind], weight.shape[0], bits])
        at += size
    return PackedWeights(data, columns.pop(), tuple(w.shape[0] for w in weights), torch.tensor(table, dtype=torch.int64), shapes)


def projections(x: torch.Tensor, weights: PackedWeights, activations: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    """x [S, in] bf16 -> fp32 [S, out_i] each, unrounded, in one launch. Each result is contiguous.

    Raises UserError for other shapes, dtypes or activations.
    """
    _refuse_activations("projections", activations)
    expect(len(activations) == len(weights.rows), "projections", f"{len(weights.rows)} activations, as many as weights", x=x)
    out = _launch("projections", x, weights, torch.float32)
    tokens = x.shape[0]
    parts = out.split([tokens * rows for rows in weights.rows])
    return tuple(part.view(tokens, rows) for part, rows in zip(parts, weights.rows, strict=True))


def linear(x: torch.Tensor, weight: PackedWeights, activations: str = "bf16") -> torch.Tensor:
    """x [S, in] bf16 -> [S, out] bf16, rounded once. Raises UserError for other shapes, dtypes or activations."""
    _refuse_activations("linear", (activations,))
    return _launch("linear", x, weight, torch.bfloat16).view(x.shape[0], -1)


def grouped_linear(x: torch.Tensor, weight: PackedWeights) -> torch.Tensor:
    """x [S, G, in] bf16, weight of one [G * R, in], R a multiple of 16 -> [S, G, R] bf16: group g of x meets rows g * R .. of the weight.

    Raises UserError for other shapes or dtypes.
    """
    expect(x.dim() == 3 and x.shape[1] and weight.rows[0] % (ROWS * x.shape[1]) == 0, "grouped_linear",
           f"x [S, G, in] with G * R = {weight.rows[0]} and R a multiple of {ROWS}", x=x)
    return _launch("grouped_linear", x, weight, torch.bfloat16, grouped=True).view(*x.shape[:2], -1)


def _refuse_activations(name, activations):
    if any(a != "bf16" for a in activations):
        raise UserError(f"{name}: expected bf16 activations, found {', '.join(activations)}: run with --backend torch")


def _launch(name, x, weights, dtype, grouped=False):
    """x [S, in], or [S, groups, in], -> 1-D: [S, out_i] of each weight, one after the other."""
    shape = x.shape
    expect(x.dtype == torch.bfloat16 and len(shape) == 2 + grouped and 1 <= shape[0] <= MAX_TOKENS and shape[-1] == weights.columns, name,
           f"x of 1 to {MAX_TOKENS} tokens in bf16, {weights.columns} wide", x=x)
    expect(dtype == torch.float32 or len(weights.rows) == 1, name, f"one weight, not {len(weights.rows)}", x=x)
    if weights.columns % 8:  # the kernel reads 8 columns at a time; no published checkpoint comes here
        x = torch.nn.functional.pad(x, (0, -weights.columns % 8))
    tokens, groups, columns = shape[0], shape[1] if grouped else 1, x.shape[-1]
    schedule = _schedule(weights.segments, blocks_at_once(x.device))
    out = torch.empty(tokens * sum(weights.rows), dtype=dtype, device=x.device)
    group_tiles = weights.rows[0] // ROWS // groups if groups > 1 else 0
    _linear(x=x.contiguous(), weights=weights.data, table=weights.table, first_tile=schedule.first_tile, out=out,
            segments=len(weights.rows), clusters=len(schedule.first_tile) - 1, cluster=schedule.cluster, pieces=schedule.pieces,
            tiles=schedule.tiles, tokens=tokens, columns=columns, x_stride=groups * columns, group_tiles=group_tiles,
            bfloat16=int(dtype == torch.bfloat16))
    return out


@functools.lru_cache
def blocks_at_once(device: torch.device) -> int:
    """How many blocks of a stream kernel run together: 2 an SM."""
    return min(2 * torch.cuda.get_device_properties(device).multi_processor_count, MAX_BLOCKS) if device.type == "cuda" else _CPU_BLOCKS


@functools.lru_cache(maxsize=1024)
def _schedule(segments: tuple[tuple[int, int, int], ...], blocks: int) -> Schedule:
    """The cluster size and the contiguous ranges of tiles that keep the largest block's bytes small, for `blocks` blocks."""
    fewest = min(items for _, items, _ in segments)
    plans = {}
    for cluster in _CLUSTERS:
        if cluster == 1 or (cluster <= fewest and cluster <= blocks):
            costs = [(tiles, -(-items // cluster) * size) for tiles, items, size in segments]
            plans[cluster] = _smallest_limit(costs, blocks // cluster), costs
    best = min(limit for limit, _ in plans.values())
    cluster, (limit, costs) = next((c, plan) for c, plan in plans.items() if plan[0] <= _WORTH * best)
    first_tile = _deal(costs, limit)
    most_items = most_tiles = 0
    for first, last in zip(first_tile, first_tile[1:], strict=False):
        items, begin = 0, 0
        for tiles, of_tile, _ in segments:
            items += max(0, min(last, begin + tiles) - max(first, begin)) * -(-of_tile // cluster)
            begin += tiles
        most_items, most_tiles = max(most_items, items), max(most_tiles, last - first)
    pieces = -(-(-(-most_items // _WARPS) - 1) // (fewest // cluster)) + 1
    if pieces > _MAX_PIECES:
        raise UserError(f"linear: expected at most {_MAX_PIECES} tiles a warp, found {pieces}: fewer rows, or more columns, are needed")
    return Schedule(torch.tensor(first_tile, dtype=torch.int32), cluster, pieces, most_tiles)


def _deal(costs, limit):
    """The first tile of each bin, and the end, if bins take tiles in order while their sum is at most `limit`. costs: (tiles, cost of
    one)."""
    first, tile, room = [0], 0, limit
    for tiles, cost in costs:
        while tiles:
            taken = min(tiles, room // cost)
            if not taken:
                first.append(tile)
                room = limit
                continue
            tile, tiles, room = tile + taken, tiles - taken, room - taken * cost
    return [*first, tile]


def _smallest_limit(costs, bins):
    """The smallest limit at which _deal needs no more than `bins`."""
    low, high = max(cost for _, cost in costs), sum(tiles * cost for tiles, cost in costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_deal(costs, middle)) - 1 <= bins else (middle + 1, high)
    return low
