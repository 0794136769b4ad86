"""Which tile a product is cut into: the one whose predicted time is the least. Needs neither the DSL nor torch."""

from __future__ import annotations

import functools

from .tiles import BITS, TILES, Tile

# One multiprocessor of an H200 at its power limit: multiplications and additions a us on the tensor cores, bytes a us that it gets from L2.
# Guesses, from cuBLAS's 750 and 1,150 TFLOP/s and Triton's 600 with 128 x 128 tiles, until helpers/bench_gemm.py --sweep has measured all.
# nvfp4: of a B200, from its 9,000 TFLOP/s and 8 TB/s and the same shares of them; no B200 has been measured.
FLOPS = {"bf16": 6.5e6, "e4m3": 9.6e6, "nvfp4": 45e6}
L2_BYTES = {"bf16": 75e3, "e4m3": 75e3, "nvfp4": 110e3}
LOADS_SHARE = 0.2  # of a load's time that it costs even where the tensor cores take longer
MEMORY_BYTES = {"bf16": 4.2e6, "e4m3": 4.2e6, "nvfp4": 7e6}  # a us, of the whole GPU
LAUNCH_US, TILE_US, SPLIT_US = 3.0, 0.6, 1.5  # once; a tile's end that nothing hides; meeting the cluster twice and adding up


def predicted_us(tile: Tile, m: int, n: int, k: int, batch: int, processors: int) -> float:
    """Waves of tiles, each as long as its tensor cores or its loads take; never less than the operands take from memory."""
    down = -(-m // (tile.rows * tile.cluster)) * tile.cluster
    blocks, cluster = down * -(-n // tile.columns) * batch * tile.split, tile.cluster * tile.split
    waves = -(-blocks // (processors // cluster * cluster))
    multiply = 2 * tile.rows * tile.columns * tile.depth / FLOPS[tile.kind]
    load = (tile.rows + tile.columns / tile.cluster) * 128 / L2_BYTES[tile.kind]
    compute = waves * (tile.block_stages(k) * max(load, multiply + LOADS_SHARE * load) + TILE_US) + (SPLIT_US if tile.split > 1 else 0)
    memory = batch * ((n + m) * k * BITS[tile.kind] / 8 + 2 * m * n) / MEMORY_BYTES[tile.kind]
    return LAUNCH_US + max(compute, memory)


@functools.lru_cache(maxsize=4096)
def choose(kind: str, m: int, n: int, k: int, batch: int, processors: int) -> Tile:
    """For out [m, batch, n] = x [m, batch, k] times w [batch * n, k] on a GPU with that many multiprocessors."""
    return min((t for t in TILES if t.kind == kind), key=lambda t: predicted_us(t, m, n, k, batch, processors))
