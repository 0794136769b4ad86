"""Which tile a product is cut into: the one whose predicted time is the least. Needs neither the DSL nor torch.

The constants of bf16 and e4m3 were fitted to every tile's time at Pro's and Flash's shapes on an H200 (docs/measurements.md has the
command and how near the choice comes), for the order of the fastest tiles rather than for the times: those predicted for the chosen tiles
are 0.81 to 1.19 of the measured ones, the lowest where a split product also waits for memory. Products an expert have the same constants;
nobody has timed those.
"""

from __future__ import annotations

import functools

from .tiles import BITS, HOPPER_KINDS, NVFP4_KINDS, TILES, Tile

# us a stage. Half the tile takes more than half the time, most so with e4m3, whose one warpgroup multiplies and adds in turn. bf16 64 x 64
# is a guess: its 16 KB come from L2 at 95 KB a us of a processor.
STAGE_US = {("bf16", 128, 256): 0.66, ("bf16", 128, 192): 0.50, ("bf16", 128, 128): 0.345, ("bf16", 64, 128): 0.19, ("bf16", 64, 64): 0.17,
            ("e4m3", 128, 192): 0.60, ("e4m3", 128, 128): 0.44, ("e4m3", 64, 128): 0.30}
# nvfp4: guesses for a B200, which nobody has measured, from its 9,000 TFLOP/s and 8 TB/s: additions and multiplications a us of a
# processor, bytes a us that it gets from L2, and the share of a load's time that is felt where the tensor cores take longer.
NVFP4_FLOPS, NVFP4_L2_BYTES, LOADS_SHARE = 45e6, 110e3, 0.2
# Times as long in a cluster of 2, which saves loads from L2: for few tiles these are the limit.
SHARED_LOADS = {("bf16", 128): 1.01, ("bf16", 192): 1.01, ("bf16", 256): 1.01, ("e4m3", 128): 1.12, ("e4m3", 192): 0.98}
MEMORY_BYTES = {**dict.fromkeys(HOPPER_KINDS, 3.7e6), **dict.fromkeys(NVFP4_KINDS, 7e6)}  # a us, of the whole GPU
LAUNCH_US = 2.8
TILE_US = 0.53  # storing a tile, 128 columns of it; the loads of the next tile go on
SPLIT_US = 0.57  # meeting a cluster and adding up its sums, a block and 64 rows
REACH = 0.85  # of the processors, for clusters of 4 and 8, each within a GPC: by their times, 24 and 12 ran at once on 132, 32 and 16 not


def stage_us(tile: Tile) -> float:
    """A stage's products and loads."""
    if tile.nvfp4:
        multiply = 2 * tile.rows * tile.columns * tile.depth / NVFP4_FLOPS
        load = (tile.rows + tile.columns / tile.cluster) * 128 / NVFP4_L2_BYTES
        return max(load, multiply + LOADS_SHARE * load)
    shared = SHARED_LOADS[tile.kind, tile.columns] if tile.cluster > 1 else 1
    return STAGE_US[tile.kind.removesuffix("_grouped"), tile.rows, tile.columns] * shared


def predicted_us(tile: Tile, m: int, n: int, k: int, batch: int, processors: int) -> float:
    """Waves of tiles, each as long as its stages, its end, and, as split blocks do not go on to a next tile, a launch; the last end comes
    after all loads, which never take less than the operands' bytes from memory."""
    blocks = tile.cluster * tile.split
    clusters = -(-m // (tile.rows * tile.cluster)) * -(-n // tile.columns) * batch
    waves = -(-clusters // (int(processors * (REACH if blocks > 2 else 1)) // blocks))
    stages = tile.block_stages(k) * stage_us(tile)
    end = TILE_US * tile.columns / 128 + (SPLIT_US * tile.split * tile.rows / 64 if tile.split > 1 else 0)
    between = end + (LAUNCH_US if tile.split > 1 else 0)
    memory = batch * ((n + m) * k * BITS[tile.kind] / 8 + 2 * m * n) / MEMORY_BYTES[tile.kind]
    return LAUNCH_US + max(waves * stages + (waves - 1) * between, memory) + end


@functools.lru_cache(maxsize=4096)
def choose(kind: str, m: int, n: int, k: int, batch: int, processors: int) -> Tile:
    """For out [m, batch, n] = x [m, batch, k] times w [batch * n, k] on a GPU with that many multiprocessors."""
    return min((t for t in TILES if t.kind == kind), key=lambda t: predicted_us(t, m, n, k, batch, processors))
