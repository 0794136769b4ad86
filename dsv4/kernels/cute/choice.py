"""Which tile a product is cut into: the one whose predicted time is the least. Needs neither the DSL nor torch.

The constants of bf16 and e4m3 were fitted to every tile's time at Pro's and Flash's shapes on an H200 (docs/measurements.md has the
commands and how near the choice comes), for the order of the fastest tiles rather than for the times. Products an expert have the same
constants, with as many rows for each as if they were spread evenly; those were measured too.
"""

from __future__ import annotations

import functools

from .tiles import BITS, HOPPER_KINDS, NVFP4_KINDS, TILES, Tile

# us a stage. Half the tile takes more than half the time, most so with e4m3, whose one warpgroup multiplies and adds in turn; bf16 tiles of
# 64 and 96 columns and those of 64 rows wait for what comes from L2.
STAGE_US = {("bf16", 128, 256): 0.65, ("bf16", 128, 192): 0.493, ("bf16", 128, 128): 0.332, ("bf16", 128, 96): 0.255,
            ("bf16", 128, 64): 0.2, ("bf16", 64, 128): 0.187, ("bf16", 64, 64): 0.139,
            ("e4m3", 128, 192): 0.575, ("e4m3", 128, 128): 0.365, ("e4m3", 64, 128): 0.3}
L2_BYTES = 120e3  # a us, to a processor: 128 x 64's 24 KB
# nvfp4: guesses for a B200, which nobody has measured, from its 9,000 TFLOP/s and 8 TB/s: additions and multiplications a us of a
# processor, bytes a us that it gets from L2, and the share of a load's time that is felt where the tensor cores take longer.
NVFP4_FLOPS, NVFP4_L2_BYTES, LOADS_SHARE = 45e6, 110e3, 0.2
SHARED_LOADS = {"bf16": 1.015, "e4m3": 0.87}  # times as long in a cluster of 2, which saves loads from L2: few tiles of bf16 feel that
MEMORY_BYTES = {**dict.fromkeys(HOPPER_KINDS, 4.6e6), **dict.fromkeys(NVFP4_KINDS, 7e6)}  # a us, of the whole GPU; H200: 4.8 at most
BOTH = 3  # stages and memory, where they take as long, each make the other late: 1.26 times that long together
LAUNCH_US = 0.4  # that the kernel in front does not hide
TILE_US = 1.4  # storing a tile, 128 columns of it; the loads of the next tile go on
SPLIT_US = 0.2  # sending sums to each other and adding them up, a block and 64 rows
ANEW_US = 4.9  # split: a block's start where another one has ended, and its first stages
REACH = 0.85  # of the processors, for clusters of 4 and 8, each within a GPC: by their times, 24 and 12 ran at once on 132, 32 and 16 not


def stage_us(tile: Tile, m: int) -> float:
    """A stage's products and loads. Where only one warpgroup of two has rows of an expert, its products are hidden behind the loads."""
    if tile.nvfp4:
        multiply = 2 * tile.rows * tile.columns * tile.depth / NVFP4_FLOPS
        load = (tile.rows + tile.columns / tile.cluster) * 128 / NVFP4_L2_BYTES
        return max(load, multiply + LOADS_SHARE * load)
    if tile.grouped and m <= 64:
        return tile.stage_bytes / L2_BYTES
    kind = tile.kind.removesuffix("_grouped")
    return STAGE_US[kind, tile.rows, tile.columns] * (SHARED_LOADS[kind] if tile.cluster > 1 else 1)


def predicted_us(tile: Tile, m: int, n: int, k: int, batch: int, processors: int) -> float:
    """Waves of tiles, each as long as its stages, its end and, as split blocks do not go on to a next tile, a start; and as its share of
    the operands' bytes takes from memory. The last wave may be of few tiles. Its end comes after all loads."""
    blocks = tile.cluster * tile.split
    clusters = -(-m // (tile.rows * tile.cluster)) * -(-n // tile.columns) * batch
    at_once = int(processors * (REACH if blocks > 2 else 1)) // blocks
    full, rest = divmod(clusters - 1, at_once)  # whole waves before the last one, and its tiles but one
    stages = tile.block_stages(k) * stage_us(tile, m)
    end = TILE_US * tile.columns / 128 + (SPLIT_US * tile.split * tile.rows / 64 if tile.split > 1 else 0)
    memory = batch * ((n + m) * k * BITS[tile.kind] / 8 + 2 * m * n) / MEMORY_BYTES[tile.kind] / clusters
    wave = _both(stages + end + (ANEW_US if tile.split > 1 else 0), memory * at_once)
    return LAUNCH_US + full * wave + _both(stages, memory * (rest + 1)) + end


def _both(one: float, other: float) -> float:
    return (one**BOTH + other**BOTH) ** (1 / BOTH)


@functools.lru_cache(maxsize=4096)
def choose(kind: str, m: int, n: int, k: int, batch: int, processors: int) -> Tile:
    """For out [m, batch, n] = x [m, batch, k] times w [batch * n, k] on a GPU with that many multiprocessors."""
    return min((t for t in TILES if t.kind == kind), key=lambda t: predicted_us(t, m, n, k, batch, processors))
