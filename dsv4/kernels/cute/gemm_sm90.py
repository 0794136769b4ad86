"""out = x @ w^T on Hopper's tensor cores, in CuTeDSL: bf16, or e4m3 with DeepSeek's block scales. tiles.py says what a tile is.

x [m, batch, k] and w [batch * n, k] lie K-major, out [m, batch, n] is bf16; sums are fp32, rounded once. e4m3 has one fp32 scale per token
and 128 of K and one per 128 x 128 of w; the tensor cores sum 128 products (Hopper keeps 14 bits of the largest), everything beyond is fp32:

    out[i, j] = sum over blocks b of 128 of x_scale[b, i] * w_scale[j / 128, b] * sum over k in b of x[i, k] * w[j, k]

A block of threads is one warp that loads and `rows` / 64 warpgroups that multiply, 64 rows each. The loader brings x and w by TMA into a
ring of stages, each 128 bytes of K wide (one atom of the 128-byte swizzle: 64 bf16 or 128 e4m3); `full[stage]` says that one has come,
`empty[stage]` that every reader is done with it. Each warpgroup has a wgmma in flight while it waits for the next stage; with e4m3 it also
adds the last block's products to its sums meanwhile, for which tiles of 128 columns have two sets of registers. Those of 192 have one, and
the two warpgroups take turns: one multiplies while the other adds. They read 104 KB of shared memory and TMA's copies for 1.5 times the
products of 80 KB, and by count that memory, at 128 bytes a cycle, takes longer than the tensor cores (80 KB: 640 cycles; the products
512). A block goes from tile to tile until none is left; while one tile is stored, the next one's stages come.

cluster: blocks one below the other need the same w, so each loads a part of it for all (multicast), which halves what comes from L2. A
stage is empty when the warpgroups of all of them are done with it.
split: few tiles and a long K leave the GPU idle, so a cluster divides K; then every block adds up the partial sums of its share of the
columns, in the order of K, so that the result does not depend on who was first. A block sends its sums of the others' shares out of its
registers, to a place beside their rings, as they may still multiply; `sums_full` says that all of its own have come. Then nobody touches
its memory any more, and it may end.

A kernel starts before the one before it has ended (LAUNCH in ../cuda/common.cuh says the rule), with barriers, descriptors and the first
w, which no kernel writes. Only the loader calls griddepcontrol_wait: it does so before it asks for x and x_scale, and nobody else touches
what other kernels write or read before a stage is full, which it is when x has come; each block has a stage, with `split` maybe one of
zeros beyond K. So each block has waited before it writes, and when it ends, all kernels before it have ended too.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import BFloat16, Float8E4M3FN, Float32, Int16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from .persistent import OUT_BUFFERS, WARP, Persistent, following
from .tiles import COLUMNS_OUT, SCALE_BLOCK, SCALE_PART, TURN, Tile

K, SMEM = OperandMajorMode.K, warpgroup.OperandSource.SMEM
WARPGROUP = 128
LOADER_REGISTERS, MATH_REGISTERS = 40, 232  # of a thread, where they are moved
MY_TURN = 3  # the named barrier of the first warpgroup's turn; the second one's is behind it. 1 and 2 are store's


class Gemm(Persistent):
    """The kernel for one tile. `__call__` is what is compiled: the host's side, which makes the TMA descriptors and launches."""

    def __init__(self, tile: Tile):
        super().__init__(tile)
        self.scaled = tile.scaled
        self.dtype = Float8E4M3FN if self.scaled else BFloat16
        self.groups = tile.rows // 64
        self.threads = (self.groups + 1) * WARPGROUP
        self.alternate = self.scaled and not tile.in_turns  # the warpgroups, of which there are two
        self.moves_registers = self.scaled and self.groups == 2  # three sets of sums do not fit into the 168 that 384 threads have each

    @cute.jit
    def __call__(self, x_address: cute.Pointer, w_address: cute.Pointer, x_scale_address: cute.Pointer, w_scale_address: cute.Pointer,
                 out_address: cute.Pointer, m: Int32, n: Int32, k: Int32, batch: Int32, processors: Int32, stream: cuda.CUstream):
        tile, dtype = self.tile, self.dtype
        k, n = cute.assume(k, divby=16 * 8 // dtype.width), cute.assume(n, divby=8)  # TMA wants rows of a multiple of 16 bytes
        row, matrix = Int64(batch) * k, Int64(n) * k
        x = cute.make_tensor(x_address, cute.make_layout((m, k, batch), stride=(row, 1, k)))
        w = cute.make_tensor(w_address, cute.make_layout((n, k, batch), stride=(k, 1, matrix)))
        out_row = cute.assume(Int64(batch) * n, divby=8)  # or `add_up` would store a value at a time
        out = cute.make_tensor(out_address, cute.make_layout((m, n, batch), stride=(out_row, 1, n)))

        x_stages, w_stages, out_buffers = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if const_expr(tile.cluster > 1) else load
        load_x, x = cpasync.make_tiled_tma_atom(load, x, cute.select(x_stages, mode=[0, 1]), (tile.rows, tile.depth))
        load_w, w = cpasync.make_tiled_tma_atom(shared, w, cute.select(w_stages, mode=[0, 1]), (tile.columns, tile.depth), tile.cluster)
        store_out, stored = cpasync.make_tiled_tma_atom(store, out, cute.select(out_buffers, mode=[0, 1]), (64, COLUMNS_OUT))
        load_x_scale, x_scale, w_scale = None, None, None
        if const_expr(self.scaled):
            k_blocks = cute.ceil_div(k, SCALE_BLOCK)
            padded = cute.assume(cute.round_up(m, 4), divby=4)
            x_scale = cute.make_tensor(x_scale_address, cute.make_layout((padded, k_blocks), stride=(1, padded)))
            w_blocks = cute.make_layout((cute.ceil_div(n, SCALE_BLOCK), k_blocks), stride=(k_blocks, 1))
            w_scale = cute.make_tensor(w_scale_address, w_blocks)
            load_x_scale, x_scale = cpasync.make_tiled_tma_atom(load, x_scale, cute.make_layout((tile.rows, 1)), (tile.rows, 1))

        tiles = cute.round_up(cute.ceil_div(m, tile.rows), tile.cluster) * cute.ceil_div(n, tile.columns) * batch
        grid = tiles * tile.split if const_expr(tile.split > 1) else cutlass.min(tiles, processors // tile.cluster * tile.cluster)
        self.kernel(load_x, x, load_w, w, load_x_scale, x_scale, w_scale, store_out, stored, out, x_stages, w_stages, out_buffers).launch(
            grid=[grid, 1, 1], block=[self.threads, 1, 1], cluster=[self.blocks, 1, 1] if const_expr(self.blocks > 1) else None,
            min_blocks_per_mp=1, stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, load_x: cute.CopyAtom, x: cute.Tensor, load_w: cute.CopyAtom, w: cute.Tensor, load_x_scale: cute.CopyAtom | None,
               x_scale: cute.Tensor | None, w_scale: cute.Tensor | None, store_out: cute.CopyAtom, stored: cute.Tensor, out: cute.Tensor,
               x_stages: cute.ComposedLayout, w_stages: cute.ComposedLayout, out_buffers: cute.ComposedLayout):
        tile = self.tile
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        full, empty, s_x, s_w, s_scale, s_out, sums_full, received = self.shared(x_stages, w_stages, out_buffers)
        if thread == 0:
            for descriptor in [load_x, load_w, store_out]:
                cpasync.prefetch_descriptor(descriptor)
            for i in range_constexpr(tile.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, tile.cluster * self.groups * WARPGROUP // WARP)
            if const_expr(tile.split > 1):
                cute.arch.mbarrier_init(sums_full, 1)
                cute.arch.mbarrier_arrive_and_expect_tx(sums_full, tile.received_bytes)  # before the cluster meets, and any can come
        cute.arch.mbarrier_init_fence()
        self.sync_cluster()

        k_tiles = cute.ceil_div(cute.ceil_div(x.shape[1], tile.depth), tile.split)  # of this block; beyond K, TMA brings zeros
        if const_expr(self.scaled):
            k_tiles = cute.round_up(k_tiles, tile.turn)
        first_k = rank * k_tiles if const_expr(tile.split > 1) else Int32(0)
        rows_down, per_batch = self.extent(out)
        first, step = cute.arch.block_idx()[0] // self.blocks, cute.arch.grid_dim()[0] // self.blocks
        last = per_batch * out.shape[2]

        if group == self.groups:
            if const_expr(self.moves_registers):
                cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if thread < self.groups * WARPGROUP + WARP:
                self.load(load_x, x, load_w, w, load_x_scale, x_scale, s_x, s_w, s_scale, full, empty, rank, first_k, k_tiles,
                          rows_down, per_batch, first, step, last)
        else:
            if const_expr(self.moves_registers):
                cute.arch.setmaxregister_increase(MATH_REGISTERS)
            a, b, sums = self.operands(s_x, s_w, group)
            stage, phase = Int32(0), Int32(0)
            if const_expr(self.alternate):
                if group == 1:
                    cute.arch.barrier_arrive(barrier_id=MY_TURN, number_of_threads=2 * WARPGROUP)  # the other one begins
            for t in cutlass.range(first, last, step):
                down, across, batch = self.place(t, rows_down, per_batch, rank)
                if const_expr(tile.in_turns):
                    stage, phase = self.multiply_scaled(a, b, sums, s_scale, w_scale, full, empty, stage, phase, first_k, k_tiles,
                                                        across * tile.columns // SCALE_BLOCK, thread)
                elif const_expr(self.scaled):
                    phase = self.multiply_scaled_wide(a, b, sums, s_scale, w_scale, full, empty, phase, first_k, k_tiles,
                                                      across * (tile.columns // SCALE_PART), group, thread)
                else:
                    stage, phase = self.multiply(a, b, sums, full, empty, stage, phase, k_tiles, thread)
                if const_expr(tile.split == 1):
                    self.store(sums, s_out, store_out, stored, down * self.groups + group, across, batch, thread)
            if const_expr(self.alternate):
                if group == 0:
                    cute.arch.barrier(barrier_id=MY_TURN, number_of_threads=2 * WARPGROUP)  # a last arrival, so that none is left
            if const_expr(tile.split == 1):
                if thread % WARPGROUP < WARP:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            else:
                self.send_sums(sums, received, sums_full, rank, thread)
                down, across, batch = self.place(first, rows_down, per_batch, rank)
                cute.arch.mbarrier_wait(sums_full, 0)
                for share in range_constexpr(tile.split):
                    if rank == share:
                        self.add_up(sums, received, out, share, down, across, batch, thread)

        if const_expr(tile.split == 1):
            self.sync_cluster()  # no block of a cluster may end while another one may still signal it

    def layouts(self) -> tuple:
        """In shared memory, of the stages of x and of w and of the output's buffers."""
        tile, kind = self.tile, warpgroup.SmemLayoutAtomKind.K_SW128
        atom, out = warpgroup.make_smem_layout_atom(kind, self.dtype), warpgroup.make_smem_layout_atom(kind, BFloat16)
        x_stages, w_stages = (cute.tile_to_shape(atom, (rows, tile.depth, tile.stages), order=(0, 1, 2))
                              for rows in (tile.rows, tile.columns))
        return x_stages, w_stages, cute.tile_to_shape(out, (64, COLUMNS_OUT, OUT_BUFFERS, self.groups), order=(0, 1, 2, 3))

    def shared(self, x_stages: cute.ComposedLayout, w_stages: cute.ComposedLayout, out_buffers: cute.ComposedLayout) -> tuple:
        """(barriers full and empty, the ring's stages of x, of w and of x's scales, the output's buffers; with `split` instead of these the
        other blocks' sums, after their barrier: [4, thread, 8 columns of the share, block])"""
        tile, smem = self.tile, cutlass.memory.SmemAllocator()
        full = smem.allocate_array(Int64, tile.stages)
        empty = smem.allocate_array(Int64, tile.stages)
        sums_full = smem.allocate_array(Int64, 1) if tile.split > 1 else None
        ring = smem.allocate(tile.stages * tile.stage_bytes, byte_alignment=1024)
        s_x = cute.make_tensor(cute.recast_ptr(ring, x_stages.inner, self.dtype), x_stages.outer)
        s_w = cute.make_tensor(cute.recast_ptr(ring + tile.stages * tile.rows * 128, w_stages.inner, self.dtype), w_stages.outer)
        s_scale, s_out, received = None, None, None
        if self.scaled:
            scales = ring + tile.stages * (tile.rows + tile.columns) * 128
            s_scale = cute.make_tensor(cute.recast_ptr(scales, dtype=Float32), cute.make_layout((tile.rows, 1, tile.stages)))
        if tile.split == 1:
            s_out = smem.allocate_tensor(BFloat16, out_buffers.outer, byte_alignment=1024, swizzle=out_buffers.inner)
        else:
            places = cute.make_layout((4, self.groups * WARPGROUP, tile.columns // 8 // tile.split, tile.split - 1))
            received = smem.allocate_tensor(Float32, places, byte_alignment=16)
        return full, empty, s_x, s_w, s_scale, s_out, sums_full, received

    def mma(self) -> cute.TiledMma:
        """One warpgroup's wgmma: 64 rows of x by all columns of the tile."""
        shape = (64, self.tile.columns, 256 // self.dtype.width)
        op = (warpgroup.MmaF8Op(self.dtype, self.dtype, Float32, shape, SMEM, K, K) if self.scaled else
              warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, SMEM, K, K))
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def operands(self, s_x: cute.Tensor, s_w: cute.Tensor, group: Int32) -> tuple:
        """(the warpgroup's 64 rows of x and all of w, by stage, as wgmma reads them; registers for its sums)"""
        tile, mma = self.tile, self.mma()
        thr_mma = mma.get_slice(0)
        mine = cute.local_tile(s_x, (64, tile.depth, tile.stages), (group, 0, 0))
        return (mma.make_fragment_A(thr_mma.partition_A(mine)), mma.make_fragment_B(thr_mma.partition_B(s_w)),
                cute.make_rmem_tensor(mma.partition_shape_C((64, tile.columns)), Float32))

    # -------------------------------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, load_x: cute.CopyAtom, x: cute.Tensor, load_w: cute.CopyAtom, w: cute.Tensor, load_x_scale, x_scale, s_x: cute.Tensor,
             s_w: cute.Tensor, s_scale, full: cute.Pointer, empty: cute.Pointer, rank: Int32, first_k: Int32, k_tiles: Int32,
             rows_down: Int32, per_batch: Int32, first: Int32, step: Int32, last: Int32):
        """The loader's one warp: every stage of every tile of this block, as soon as there is room; into the empty ring w, then, when the
        kernels before this one have ended, x."""
        tile = self.tile
        alone, together = cute.make_layout(1), cute.make_layout(tile.cluster)
        g_x = cute.local_tile(x, (tile.rows, tile.depth), (None, None, None))
        g_w = cute.local_tile(w, (tile.columns, tile.depth), (None, None, None))
        to_x, from_x = cpasync.tma_partition(load_x, 0, alone, cute.group_modes(s_x, 0, 2), cute.group_modes(g_x, 0, 2))
        part = rank if const_expr(tile.cluster > 1) else 0
        to_w, from_w = cpasync.tma_partition(load_w, part, together, cute.group_modes(s_w, 0, 2), cute.group_modes(g_w, 0, 2))
        to_scale, from_scale = None, None
        if const_expr(self.scaled):
            g_scale = cute.local_tile(x_scale, (tile.rows, 1), (None, None))
            to_scale, from_scale = cpasync.tma_partition(load_x_scale, 0, alone, cute.group_modes(s_scale, 0, 2),
                                                         cute.group_modes(g_scale, 0, 2))

        begun = cutlass.min(k_tiles, tile.stages)
        _, across, batch = self.place(first, rows_down, per_batch, rank)
        for i in cutlass.range(begun, unroll=1):
            self.begin_stage(load_w, from_w[None, across, first_k + i, batch], to_w[None, i], full + i)
        # The next kernel may start when all blocks of this one have come here, so none of them lacks a processor. One like this takes half
        # of the shared memory or more: its blocks find room where a block of this one has ended, and wait for the end of all.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        stage, phase = Int32(0), Int32(1)  # a fresh barrier counts as having completed the phase of parity 1: the ring starts empty
        for t in cutlass.range(first, last, step):
            down, across, batch = self.place(t, rows_down, per_batch, rank)
            for i in cutlass.range(k_tiles, unroll=1):
                come = full + stage
                if begun > 0:
                    begun -= 1
                else:
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    self.begin_stage(load_w, from_w[None, across, first_k + i, batch], to_w[None, stage], come)
                cute.copy(load_x, from_x[None, down, first_k + i, batch], to_x[None, stage], tma_bar_ptr=come)
                if const_expr(self.scaled):
                    cute.copy(load_x_scale, from_scale[None, down, first_k + i], to_scale[None, stage], tma_bar_ptr=come)
                stage, phase = following(stage, phase, tile.stages)

    @cute.jit
    def begin_stage(self, load_w: cute.CopyAtom, from_w: cute.Tensor, to_w: cute.Tensor, come: cute.Pointer):
        """Its barrier learns of all of its bytes, and w is on its way."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(come, self.tile.stage_bytes)
        everyone = {"mcast_mask": Int16((1 << self.tile.cluster) - 1)} if const_expr(self.tile.cluster > 1) else {}
        cute.copy(load_w, from_w, to_w, tma_bar_ptr=come, **everyone)

    # ---------------------------------------------------------------------------------------------------------- multiply

    @cute.jit
    def issue(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stage: Int32, fresh):
        """Starts the products of a stage: c += x w^T, or c = x w^T where `fresh`."""
        mma = self.mma()
        warpgroup.fence()
        for i in range_constexpr(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not fresh if const_expr(i == 0) else True)
            cute.gemm(mma, c, a[None, None, i, stage], b[None, None, i, stage], c)
        warpgroup.commit_group()

    @cute.jit
    def release(self, empty: cute.Pointer, stage: Int32, thread: Int32):
        """This warp is done with the stage: one arrival at each block of the cluster, as all of them load into it."""
        lane = thread % WARP
        if const_expr(self.scaled):
            cute.arch.sync_warp()  # all lanes have read their scales
        if lane < self.tile.cluster:
            if const_expr(self.tile.cluster > 1):
                cute.arch.mbarrier_arrive(empty + stage, lane)
            else:
                cute.arch.mbarrier_arrive(empty + stage)

    @cute.jit
    def multiply(self, a: cute.Tensor, b: cute.Tensor, sums: cute.Tensor, full: cute.Pointer, empty: cute.Pointer,
                 stage: Int32, phase: Int32, k_tiles: Int32, thread: Int32):
        """sums = x w^T over this block's K."""
        before = stage
        for i in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            self.issue(a, b, sums, stage, i == 0)
            warpgroup.wait_group(1)  # the stage before is read
            if i > 0:
                self.release(empty, before, thread)
            before = stage
            stage, phase = following(stage, phase, self.tile.stages)
        warpgroup.wait_group(0)
        self.release(empty, before, thread)
        return stage, phase

    @cute.jit
    def multiply_scaled(self, a: cute.Tensor, b: cute.Tensor, sums: cute.Tensor, s_scale: cute.Tensor, w_scale: cute.Tensor,
                        full: cute.Pointer, empty: cute.Pointer, stage: Int32, phase: Int32, first_k: Int32, k_tiles: Int32,
                        w_block: Int32, thread: Int32):
        """sums = the scaled products of all blocks of 128. Within a turn the next block is started before the last one is added. ptxas does
        not follow that from one turn to the next and would make every wgmma wait, so a turn ends with nothing in flight; the other
        warpgroup's products fill that gap."""
        row = thread // WARP * 16 + thread % WARP // 4  # a thread holds values of this row and of the one 8 below
        products = cute.make_rmem_tensor(sums.shape, Float32), cute.make_rmem_tensor(sums.shape, Float32)
        scales = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        of_w = cute.make_rmem_tensor(TURN, Float32)
        self.read_w_scales(of_w, w_scale, w_block, first_k)
        sums.fill(0.0)
        before = stage
        for i in cutlass.range(0, k_tiles, TURN, unroll=1):
            for j in range_constexpr(TURN):
                now, last = j % 2, (j + 1) % 2
                cute.arch.mbarrier_wait(full + stage, phase)
                self.issue(a, b, products[now], stage, True)
                scales[now][0] = s_scale[row, 0, stage] * of_w[j]
                scales[now][1] = s_scale[row + 8, 0, stage] * of_w[j]
                if const_expr(j > 0):
                    warpgroup.wait_group(1)
                    self.release(empty, before, thread)
                    self.add_scaled(sums, products[last], scales[last])
                before = stage
                stage, phase = following(stage, phase, self.tile.stages)
            self.read_w_scales(of_w, w_scale, w_block, first_k + i + TURN)  # they come while the next turn's first block is waited for
            warpgroup.wait_group(0)
            self.release(empty, before, thread)
            self.add_scaled(sums, products[(TURN - 1) % 2], scales[(TURN - 1) % 2])
        return stage, phase

    @cute.jit
    def read_w_scales(self, of_w: cute.Tensor, w_scale: cute.Tensor, w_block: Int32, block: Int32):
        """The weight's scales of a turn's blocks. Beyond K, where the products are zeros, the last one stands for them."""
        for j in range_constexpr(TURN):
            of_w[j] = w_scale[w_block, cutlass.min(block + j, w_scale.shape[1] - 1)]

    @cute.jit
    def add_scaled(self, sums: cute.Tensor, products: cute.Tensor, scales: cute.Tensor):
        """A thread's values come in fours: two neighbours of its row, then two of the row 8 below."""
        for i in range_constexpr(cute.size(sums)):
            sums[i] = sums[i] + products[i] * scales[i // 2 % 2]

    @cute.jit
    def multiply_scaled_wide(self, a: cute.Tensor, b: cute.Tensor, sums: cute.Tensor, s_scale: cute.Tensor, w_scale: cute.Tensor,
                             full: cute.Pointer, empty: cute.Pointer, phase: Int32, first_k: Int32, k_tiles: Int32,
                             first_part: Int32, group: Int32, thread: Int32):
        """The same for a tile whose columns meet several scales of the weight, and of which there is one set of products: while a warpgroup
        adds a block's to its sums, the other one multiplies. They start their products in turns, so that the tensor cores end one
        warpgroup's before the other's, and not both late. The whole ring is written out, so that a stage's places are constants: what
        stands between a wait and its products is time of the tensor cores."""
        tile, parts = self.tile, self.tile.columns // SCALE_PART
        # Shuffled to itself, or ptxas makes both anew in each stage, out of the thread's number, and the products wait for it: 6 % of all.
        lane = thread % WARP
        row = cute.arch.shuffle_sync(thread // WARP * 16 + lane // 4, lane)  # a thread holds values of this row and of the one 8 below
        lane = cute.arch.shuffle_sync(lane, lane)
        products = cute.make_rmem_tensor(sums.shape, Float32)
        of_w, of_x = cute.make_rmem_tensor(parts, Float32), cute.make_rmem_tensor(2, Float32)
        self.read_part_scales(of_w, w_scale, first_part, first_k)
        sums.fill(0.0)
        for i in cutlass.range(0, k_tiles, tile.stages, unroll=1):
            for stage in range_constexpr(tile.stages):
                cute.arch.barrier(barrier_id=MY_TURN + group, number_of_threads=2 * WARPGROUP)
                cute.arch.mbarrier_wait(full + stage, phase)
                self.issue(a, b, products, stage, True)
                cute.arch.barrier_arrive(barrier_id=MY_TURN + 1 - group, number_of_threads=2 * WARPGROUP)
                scales = cute.make_rmem_tensor((parts, 2), Float32)
                for half in range_constexpr(2):
                    of_x[half] = s_scale[row + 8 * half, 0, stage]
                for part in range_constexpr(parts):
                    for half in range_constexpr(2):
                        scales[part, half] = of_x[half] * of_w[part]
                self.read_part_scales(of_w, w_scale, first_part, first_k + i + stage + 1)  # they come while this block is multiplied
                warpgroup.wait_group(0)
                self.release(empty, stage, lane)
                for n in range_constexpr(cute.size(sums)):  # in fours: two neighbours of its row, then two of the row 8 below
                    sums[n] = sums[n] + products[n] * scales[8 * (n // 4) // SCALE_PART, n // 2 % 2]
            phase = phase ^ 1
        return phase

    @cute.jit
    def read_part_scales(self, of_w: cute.Tensor, w_scale: cute.Tensor, first_part: Int32, block: Int32):
        """The weight's scales of the tile's columns for a block of K; beyond both as above."""
        block = cutlass.min(block, w_scale.shape[1] - 1)
        for part in range_constexpr(self.tile.columns // SCALE_PART):
            row = (first_part + part) // (SCALE_BLOCK // SCALE_PART)
            of_w[part] = w_scale[cutlass.min(row, w_scale.shape[0] - 1), block]

    # ------------------------------------------------------------------------------------------------------------- store

    @cute.jit
    def store(self, sums: cute.Tensor, s_out: cute.Tensor, store_out: cute.CopyAtom, stored: cute.Tensor,
              down: Int32, across: Int32, batch: Int32, thread: Int32, rows: Int32 | None = None, out: cute.Tensor | None = None):
        """A warpgroup's 64 rows, COLUMNS_OUT columns at a time: rounded, put into shared memory and stored by TMA, which leaves out what
        is beyond m and n. The loader is at the next tile meanwhile. rows, out: what `send` of a grouped product needs."""
        group, lane = thread // WARPGROUP, thread % WARPGROUP
        buffers = s_out[None, None, None, group]
        to_smem = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
        copy = cute.make_tiled_copy_S(to_smem, cute.make_tiled_copy_C_atom(to_smem, self.mma()))
        target = copy.get_slice(lane).partition_D(buffers)
        values, rounded = copy.retile(sums), cute.make_rmem_tensor(target.shape[:3], BFloat16)
        exact = cute.make_rmem_tensor(rounded.shape, Float32)
        from_smem, to_out = cpasync.tma_partition(
            store_out, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2),
            cute.group_modes(cute.local_tile(stored, (64, COLUMNS_OUT), (None, None, None)), 0, 2))
        size, parts = cute.size(rounded), self.tile.columns // COLUMNS_OUT
        for part in range_constexpr(parts):
            for i in range_constexpr(size):
                exact[i] = values[part * size + i]
            rounded.store(exact.load().to(BFloat16))
            if lane < WARP:  # the last store of this tile may still be read; those of the tile before have long been
                cute.arch.cp_async_bulk_wait_group(min(part, OUT_BUFFERS - 1), read=True)
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=WARPGROUP)  # the buffer is free
            cute.copy(copy, rounded, target[None, None, None, part % OUT_BUFFERS])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=WARPGROUP)  # the buffer is full
            self.send(store_out, from_smem, to_out, buffers, part, down, across, batch, lane, rows, out)

    @cute.jit
    def send(self, store_out: cute.CopyAtom, from_smem: cute.Tensor, to_out: cute.Tensor, buffers: cute.Tensor, part: cutlass.Constexpr,
             down: Int32, across: Int32, batch: Int32, lane: Int32, rows: Int32 | None, out: cute.Tensor | None):
        """A full buffer to its place."""
        if lane < WARP:
            column = across * (self.tile.columns // COLUMNS_OUT) + part
            cute.copy(store_out, from_smem[None, part % OUT_BUFFERS], to_out[None, down, column, batch])
            cute.arch.cp_async_bulk_commit_group()

    # ------------------------------------------------------------------------------------------------------------- split

    @cute.jit
    def send_sums(self, sums: cute.Tensor, received: cute.Tensor, sums_full: cute.Pointer, rank: Int32, thread: Int32):
        """To each other block what this thread has of its share, for the same thread there. A thread's values come in fours, one of each 8
        columns: two neighbours of its row, then two of the row 8 below."""
        tile, vectors = self.tile, received.shape[2]
        bits = cute.recast_tensor(sums, Int32)
        for share in range_constexpr(tile.split):
            if rank != share:
                slot = rank - Int32(rank > share)  # a block has no place for its own
                for j in range_constexpr(vectors):
                    i = 4 * (share * vectors + j)
                    cute.arch.store_async_dsmem(received[None, thread, j, slot].iterator, (bits[i], bits[i + 1], bits[i + 2], bits[i + 3]),
                                                sums_full, share)

    @cute.jit
    def add_up(self, sums: cute.Tensor, received: cute.Tensor, out: cute.Tensor, share: cutlass.Constexpr, down: Int32, across: Int32,
               batch: Int32, thread: Int32):
        """This block's share of the tile's columns: its own sums and the others', in the order of K, rounded and stored."""
        tile, vectors = self.tile, received.shape[2]
        row = down * tile.rows + thread // WARP * 16 + thread % WARP // 4
        pieces = cute.make_rmem_tensor((4, tile.split, vectors), Float32)
        for j in range_constexpr(vectors):
            for block in range_constexpr(tile.split):
                if const_expr(block == share):
                    for e in range_constexpr(4):
                        pieces[e, block, j] = sums[4 * (share * vectors + j) + e]
                else:
                    cute.autovec_copy(received[None, thread, j, block - (block > share)], pieces[None, block, j])
        for j in range_constexpr(vectors):
            total, rounded = pieces[None, 0, j], cute.make_rmem_tensor((2, 2), BFloat16)
            for block in range_constexpr(1, tile.split):
                for e in range_constexpr(4):
                    total[e] = total[e] + pieces[e, block, j]
            rounded.store(cute.make_tensor(total.iterator, rounded.layout).load().to(BFloat16))
            pair = (across * tile.columns + (share * vectors + j) * 8) // 2 + thread % 4
            for half in range_constexpr(2):
                i = row + 8 * half
                if i < out.shape[0] and pair * 2 < out.shape[1]:
                    cute.autovec_copy(rounded[None, half], cute.coalesce(cute.local_tile(out[None, None, batch], (1, 2), (i, pair))))
