"""What the GEMMs' blocks have in common: they stay, and go from tile to tile and round a ring of stages."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .tiles import Tile

WARP = 32
OUT_BUFFERS = 2  # of COLUMNS_OUT columns: one is filled while the other one is stored
RASTER_ROWS = 2048  # rows whose tiles are done before the next ones: a wave reads about as much of x as of w


@cute.jit
def following(stage: Int32, phase: Int32, stages: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """The next place of the ring, and the parity that its barriers' phases have there."""
    stage += 1
    if stage == stages:
        stage, phase = Int32(0), phase ^ 1
    return stage, phase


class Persistent:
    """The tiles of a block, `blocks` of which are a cluster."""

    def __init__(self, tile: Tile):
        self.tile = tile
        self.blocks = tile.cluster * tile.split  # one of the two is 1

    @cute.jit
    def sync_cluster(self):
        if const_expr(self.blocks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def extent(self, out: cute.Tensor):
        """(tiles of the cluster's height in a column, such tiles in a batch entry)"""
        rows_down = cute.ceil_div(out.shape[0], self.tile.rows * self.tile.cluster)
        return rows_down, rows_down * cute.ceil_div(out.shape[1], self.tile.columns)

    @cute.jit
    def place(self, t: Int32, rows_down: Int32, per_batch: Int32, rank: Int32):
        """The t-th tile of this block's cluster: (tile row, tile column, batch entry). Down RASTER_ROWS rows, then to the next column."""
        tile = self.tile
        high = max(1, RASTER_ROWS // (tile.rows * tile.cluster))
        across_all = per_batch // rows_down
        batch, t = t // per_batch, t % per_batch
        band, t = t // (high * across_all), t % (high * across_all)
        here = cutlass.min(rows_down - band * high, high)  # the last band may be lower
        down, across = band * high + t % here, t // here
        return (down * tile.cluster + rank if const_expr(tile.cluster > 1) else down), across, batch

    @cute.jit
    def entry(self, plan: cute.Tensor, number: Int32):
        """(expert, first row, rows, tile of scales) of an entry of Groups' plan (../layouts.py)."""
        found = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(plan[number, None], found)
        return found[0], found[1], found[2], found[3]
