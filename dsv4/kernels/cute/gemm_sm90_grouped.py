"""A product an expert on Hopper's tensor cores, bf16 or e4m3, in CuTeDSL: gemm_sm90.py's, whose arithmetic, stages and barriers these are,
for the rows of each expert (../layouts.py, Groups).

x [N, k] has the rows of all experts one behind the other, without gaps; w is [experts, n, k], out bf16 [N, n]. A list that lies on the
device (`plan`) says of each tile of 128 rows: the expert, its first row, how many rows there are, the tile of scales. So the host knows
neither how many tiles there are nor whose, and an expert without rows has none. Tile t of the output is column t mod columns of entry
t / columns: the tiles of a few entries are under way at once, so that neighbours read the same x, and those of one expert the same w.

A tile's rows are loaded whole: behind the expert's last row come those of the next one (beyond the last, zeros). What the tensor cores make
of them is stored nowhere. A warpgroup whose 64 rows are all the expert's stores them by TMA, in boxes; the others write the same buffers'
rows by 16 bytes a thread, as TMA leaves out only what is outside of the whole output. A warpgroup that has no row neither multiplies nor
stores, and only hands the stages on: with 16 rows an expert (1,024 tokens of Pro) that is half of all products.

e4m3: the scales of 128 rows and a block of K come by TMA too. An expert's first row may be any, and a copy's box of fp32 is to begin at a
multiple of 16 bytes; so each expert's scales begin a tile of 128 (layouts.group_scales), whose number the plan has.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from .gemm_sm90 import LOADER_REGISTERS, MATH_REGISTERS, MY_TURN, WARPGROUP, Gemm
from .persistent import OUT_BUFFERS, WARP, following
from .tiles import COLUMNS_OUT, SCALE_BLOCK, SCALE_PART, Tile


class GroupedGemm(Gemm):
    """The kernel for one tile, of kind "bf16_grouped", which needs no scales, or "e4m3_grouped"."""

    def __init__(self, tile: Tile):
        super().__init__(tile)
        self.moves_registers = True  # 128 sums and an entry do not fit into 168 either

    @cute.jit
    def __call__(self, x_address: cute.Pointer, w_address: cute.Pointer, x_scale_address: cute.Pointer, w_scale_address: cute.Pointer,
                 plan_address: cute.Pointer, counts: cute.Pointer, out_address: cute.Pointer, m: Int32, n: Int32, k: Int32,
                 experts: Int32, entries: Int32, processors: Int32, stream: cuda.CUstream):
        tile = self.tile
        k, n = cute.assume(k, divby=16 * 8 // self.dtype.width), cute.assume(n, divby=8)  # TMA wants rows of a multiple of 16 bytes
        x = cute.make_tensor(x_address, cute.make_layout((m, k), stride=(k, 1)))
        w = cute.make_tensor(w_address, cute.make_layout((n, k, experts), stride=(k, 1, Int64(n) * k)))
        row = cute.assume(Int64(n), divby=8)
        out = cute.make_tensor(out_address, cute.make_layout((m, n), stride=(row, 1)))
        plan = cute.make_tensor(plan_address, cute.make_layout((entries, 4), stride=(4, 1)))
        x_stages, w_stages, out_buffers = self.layouts()

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_x, x = cpasync.make_tiled_tma_atom(load, x, cute.select(x_stages, mode=[0, 1]), (tile.rows, tile.depth))
        load_w, w = cpasync.make_tiled_tma_atom(load, w, cute.select(w_stages, mode=[0, 1]), (tile.columns, tile.depth))
        batch = cute.make_tensor(out_address, cute.make_layout((m, n, 1), stride=(row, 1, m * row)))  # of one, as `store` has it
        store_out, stored = cpasync.make_tiled_tma_atom(store, batch, cute.select(out_buffers, mode=[0, 1]), (64, COLUMNS_OUT))
        load_x_scale, x_scale, w_scale = None, None, None
        if const_expr(self.scaled):
            k_blocks, n_blocks = cute.ceil_div(k, SCALE_BLOCK), cute.ceil_div(n, SCALE_BLOCK)
            padded = cute.assume(entries * tile.rows, divby=tile.rows)
            x_scale = cute.make_tensor(x_scale_address, cute.make_layout((padded, k_blocks), stride=(1, padded)))
            load_x_scale, x_scale = cpasync.make_tiled_tma_atom(load, x_scale, cute.make_layout((tile.rows, 1)), (tile.rows, 1))
            of_experts = cute.make_layout((n_blocks, k_blocks, experts), stride=(k_blocks, 1, n_blocks * k_blocks))
            w_scale = cute.make_tensor(w_scale_address, of_experts)

        columns = cute.ceil_div(n, tile.columns)
        self.kernel(load_x, x, load_w, w, load_x_scale, x_scale, w_scale, store_out, stored, out, plan, counts, columns, x_stages, w_stages,
                    out_buffers).launch(
            grid=[cutlass.min(entries * columns, processors), 1, 1], block=[self.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(self, load_x: cute.CopyAtom, x: cute.Tensor, load_w: cute.CopyAtom, w: cute.Tensor, load_x_scale: cute.CopyAtom | None,
               x_scale: cute.Tensor | None, w_scale: cute.Tensor | None, store_out: cute.CopyAtom, stored: cute.Tensor, out: cute.Tensor,
               plan: cute.Tensor, counts: cute.Pointer, columns: Int32, x_stages: cute.ComposedLayout, w_stages: cute.ComposedLayout,
               out_buffers: cute.ComposedLayout):
        tile, thread = self.tile, cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        full, empty, s_x, s_w, s_scale, s_out, _, _ = self.shared(x_stages, w_stages, out_buffers)
        if thread == 0:
            for descriptor in [load_x, load_w, store_out]:
                cpasync.prefetch_descriptor(descriptor)
            for i in range_constexpr(tile.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, self.groups * WARPGROUP // WARP)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        k_tiles = cute.round_up(cute.ceil_div(x.shape[1], tile.depth), tile.turn)  # beyond K, TMA brings zeros
        first, step, last = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], counts.load() * columns

        if group == self.groups:
            if const_expr(self.moves_registers):
                cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if thread < self.groups * WARPGROUP + WARP:
                self.load_groups(load_x, x, load_w, w, load_x_scale, x_scale, s_x, s_w, s_scale, full, empty, plan, k_tiles, columns,
                                 first, step, last)
        else:
            if const_expr(self.moves_registers):
                cute.arch.setmaxregister_increase(MATH_REGISTERS)
            a, b, sums = self.operands(s_x, s_w, group)
            stage, phase = Int32(0), Int32(0)
            if const_expr(self.alternate):
                if group == 1:
                    cute.arch.barrier_arrive(barrier_id=MY_TURN, number_of_threads=2 * WARPGROUP)  # the other one begins
            for t in cutlass.range(first, last, step):
                expert, row, rows, _ = self.entry(plan, t // columns)
                column = t % columns
                row, rows = row + group * 64, rows - group * 64  # of this warpgroup
                if rows > 0:
                    if const_expr(tile.in_turns):
                        stage, phase = self.multiply_scaled(a, b, sums, s_scale, w_scale[None, None, expert], full, empty, stage, phase,
                                                            Int32(0), k_tiles, column * tile.columns // SCALE_BLOCK, thread)
                    elif const_expr(self.scaled):
                        phase = self.multiply_scaled_wide(a, b, sums, s_scale, w_scale[None, None, expert], full, empty, phase, Int32(0),
                                                          k_tiles, column * (tile.columns // SCALE_PART), group, thread)
                    else:
                        stage, phase = self.multiply(a, b, sums, full, empty, stage, phase, k_tiles, thread)
                    self.store(sums, s_out, store_out, cute.domain_offset((row, 0, 0), stored), 0, column, 0, thread, rows,
                               cute.domain_offset((row, 0), out))
                else:
                    stage, phase = self.pass_by(full, empty, stage, phase, k_tiles, group, thread)
            if const_expr(self.alternate):
                if group == 0:
                    cute.arch.barrier(barrier_id=MY_TURN, number_of_threads=2 * WARPGROUP)  # a last arrival, so that none is left
            if thread % WARPGROUP < WARP:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    # -------------------------------------------------------------------------------------------------------------- load

    @cute.jit
    def load_groups(self, load_x: cute.CopyAtom, x: cute.Tensor, load_w: cute.CopyAtom, w: cute.Tensor, load_x_scale, x_scale,
                    s_x: cute.Tensor, s_w: cute.Tensor, s_scale, full: cute.Pointer, empty: cute.Pointer, plan: cute.Tensor,
                    k_tiles: Int32, columns: Int32, first: Int32, step: Int32, last: Int32):
        """As `load`, where the plan says."""
        tile = self.tile
        to_w, from_w = self.partition(load_w, s_w, w, (tile.columns, tile.depth))
        to_scale, from_scale = None, None
        if const_expr(self.scaled):
            to_scale, from_scale = self.partition(load_x_scale, s_scale, x_scale, (tile.rows, 1))

        stage, phase = Int32(0), Int32(1)  # the ring starts empty
        for t in cutlass.range(first, last, step):
            expert, row, _, scale_tile = self.entry(plan, t // columns)
            column = t % columns
            to_x, from_x = self.partition(load_x, s_x, cute.domain_offset((row, 0), x), (tile.rows, tile.depth))
            for i in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, tile.stage_bytes)
                come = full + stage
                cute.copy(load_x, from_x[None, 0, i], to_x[None, stage], tma_bar_ptr=come)
                cute.copy(load_w, from_w[None, column, i, expert], to_w[None, stage], tma_bar_ptr=come)
                if const_expr(self.scaled):
                    cute.copy(load_x_scale, from_scale[None, scale_tile, i], to_scale[None, stage], tma_bar_ptr=come)
                stage, phase = following(stage, phase, tile.stages)

    @cute.jit
    def partition(self, load: cute.CopyAtom, shared: cute.Tensor, tensor: cute.Tensor, box: cutlass.Constexpr):
        """(places in shared memory by stage, boxes by their numbers)"""
        boxes = cute.local_tile(tensor, box, (None,) * cute.rank(tensor))
        return cpasync.tma_partition(load, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(boxes, 0, 2))

    # ---------------------------------------------------------------------------------------------------------- multiply

    @cute.jit
    def pass_by(self, full: cute.Pointer, empty: cute.Pointer, stage: Int32, phase: Int32, k_tiles: Int32, group: Int32, thread: Int32):
        """Without a product: stages are given back once they have come, or an arrival would count for the round before, and turns as they
        are got."""
        for _ in cutlass.range(k_tiles, unroll=1):
            if const_expr(self.alternate):
                cute.arch.barrier(barrier_id=MY_TURN + group, number_of_threads=2 * WARPGROUP)
            cute.arch.mbarrier_wait(full + stage, phase)
            if const_expr(self.alternate):
                cute.arch.barrier_arrive(barrier_id=MY_TURN + 1 - group, number_of_threads=2 * WARPGROUP)
            self.release(empty, stage, thread)
            stage, phase = following(stage, phase, self.tile.stages)
        return stage, phase

    # ------------------------------------------------------------------------------------------------------------- store

    @cute.jit
    def send(self, store_out: cute.CopyAtom, from_smem: cute.Tensor, to_out: cute.Tensor, buffers: cute.Tensor, part: cutlass.Constexpr,
             down: Int32, across: Int32, batch: Int32, lane: Int32, rows: Int32, out: cute.Tensor):
        """64 rows by TMA, fewer by the threads: 8 of them write 128 bytes of a row."""
        column, buffer, vectors = across * (self.tile.columns // COLUMNS_OUT) + part, part % OUT_BUFFERS, COLUMNS_OUT // 8
        if rows >= 64:
            if lane < WARP:
                cute.copy(store_out, from_smem[None, buffer], to_out[None, down, column, batch])
                cute.arch.cp_async_bulk_commit_group()
        else:
            for i in range_constexpr(64 * vectors // WARPGROUP):
                row, vector = i * (WARPGROUP // vectors) + lane // vectors, lane % vectors
                place = column * vectors + vector
                if row < rows and place * 8 < out.shape[1]:
                    piece = cute.make_rmem_tensor(8, BFloat16)
                    cute.autovec_copy(cute.coalesce(cute.local_tile(buffers[None, None, buffer], (1, 8), (row, vector))), piece)
                    cute.autovec_copy(piece, cute.coalesce(cute.local_tile(out, (1, 8), (row, place))))
