"""out = x @ w^T on Blackwell's tensor cores in NVFP4, in CuTeDSL. tiles.py says what a tile is, ../layouts.py how the operands lie.

x [m, k] and w [n, k] are e2m1 codes, two a byte, with an e4m3 scale for 16 of K, in the 128 x 4 order; x has an fp32 scale a row (a token),
w one in all. out [m, n] is bf16:

    out[i, j] = row_scales[i] * scale * sum over blocks b of 16 of x_scale[i, b] * w_scale[j, b] * sum over k in b of x[i, k] * w[j, k]

The tensor cores do the sums (fp32 in tensor memory); the scales of rows and of w are applied in fp32 to the complete sum, and there is one
rounding. So a token's result does not depend on its neighbours.

A block of threads is 4 warps that write the output, one that loads and one that multiplies. A stage of the ring has 128 bytes of K (256
values: four products of 64) of both operands, and their scales, all by TMA; rows and columns beyond the operands are zeros, scales of them
too. One thread copies a stage's scales to tensor memory and starts its four products; `empty[stage]` hears of their end. A tile's sums are
complete at `done`; then 128 threads, one a row, read them from tensor memory while the next tile's products go to other sums, and arrive at
`free`. Two times 256 columns of sums and the scales' do not fit into 512: there the sums of successive tiles overlap, the columns that they
share are read first, and `free` is for those.

cluster = 2: two blocks, one below the other, are a pair whose tensor cores take one product of 256 rows. Each loads its rows of x, half of
the rows of w and all of w's scales. The upper block's thread starts the products of both, and its barriers `full` and `free` count for
both.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import blackwell_helpers, blockscaled_layout

from .persistent import OUT_BUFFERS, WARP, Persistent, following
from .tiles import COLUMNS_OUT, SCALE_TILE, STAGE_WIDTH, STEPS, TENSOR_COLUMNS, Tile

SCALE_BLOCK = 16
WRITERS = 4  # warps: each reads the 32 lanes of tensor memory that have its number, modulo 4
LOADER, MULTIPLIER = WRITERS, WRITERS + 1
THREADS = (WRITERS + 2) * WARP


@cute.jit
def fence(when: cutlass.Constexpr):
    """Tensor memory, around a barrier that hands it on: "before" the arrival, "after" the wait."""
    cute.arch.inline_ptx(f"tcgen05.fence::{when}_thread_sync;")


class Nvfp4Gemm(Persistent):
    """The kernel for one tile. `__call__` is what is compiled: the host's side, which makes the TMA descriptors and launches."""

    def __init__(self, tile: Tile):
        super().__init__(tile)
        self.pair = tile.cluster == 2
        self.group = tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE
        self.shape = tile.rows * tile.cluster, tile.columns, STEPS * 64  # of a stage's product
        self.w_rows = tile.columns // tile.cluster
        self.overlap = tile.sums_apart < tile.columns
        self.sums = 1 if self.overlap else 2  # barriers for them
        self.parts = tile.columns // COLUMNS_OUT

    def mma(self) -> cute.TiledMma:
        op = tcgen05.MmaMXF4NVF4Op(Float8E4M3FN, (*self.shape[:2], 64), self.group, tcgen05.OperandSource.SMEM)
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    @cute.jit
    def __call__(self, x_address: cute.Pointer, w_address: cute.Pointer, x_scale_address: cute.Pointer, w_scale_address: cute.Pointer,
                 row_scales_address: cute.Pointer, out_address: cute.Pointer, m: Int32, n: Int32, k: Int32, processors: Int32,
                 scale: Float32, stream: cuda.CUstream):
        tile = self.tile
        n, width = cute.assume(n, divby=8), cute.assume(k // 2, divby=16)  # TMA wants rows of a multiple of 16 bytes
        x = cute.make_tensor(x_address, cute.make_layout((m, width), stride=(width, 1)))
        w = cute.make_tensor(w_address, cute.make_layout((n, width), stride=(width, 1)))
        out = cute.make_tensor(out_address, cute.make_layout((m, n), stride=(n, 1)))
        row_scales = cute.make_tensor(row_scales_address, cute.make_layout((m,)))
        steps, words = cute.ceil_div(k, 64), SCALE_TILE // 4
        x_scale, w_scale = (
            cute.make_tensor(address, cute.make_layout((words, steps, cute.ceil_div(rows, 128)), stride=(1, words, words * steps)))
            for address, rows in ((x_scale_address, m), (w_scale_address, n)))

        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, BFloat16)
        out_buffers = cute.tile_to_shape(atom, (WARP, COLUMNS_OUT, OUT_BUFFERS, WRITERS), order=(0, 1, 2, 3))

        store = cpasync.CopyBulkTensorTileS2GOp()
        loads, x_stages, w_stages = self.loads(x, w, x_scale, w_scale)
        store_out, stored = cpasync.make_tiled_tma_atom(store, out, cute.select(out_buffers, mode=[0, 1]), (WARP, COLUMNS_OUT))

        tiles = cute.round_up(cute.ceil_div(m, tile.rows), tile.cluster) * cute.ceil_div(n, tile.columns)
        grid = cutlass.min(tiles, processors // tile.cluster * tile.cluster)
        self.kernel(*loads, store_out, stored, out, row_scales, scale, x_stages, w_stages, out_buffers).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], cluster=[self.blocks, 1, 1] if const_expr(self.blocks > 1) else None,
            min_blocks_per_mp=1, stream=stream)

    def loads(self, x: cute.Tensor, w: cute.Tensor, x_scale: cute.Tensor, w_scale: cute.Tensor) -> tuple:
        """((TMA copy, its coordinates' tensor) of each operand in turn, the layouts of x's and of w's stages)"""
        tile, load, words = self.tile, cpasync.CopyBulkTensorTileG2SOp(self.group), SCALE_TILE // 4
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, Uint8)
        x_stages, w_stages = (cute.tile_to_shape(atom, (rows, STAGE_WIDTH, tile.stages), order=(0, 1, 2))
                              for rows in (tile.rows, self.w_rows))
        found = []
        for tensor, stages, rows in ((x, x_stages, tile.rows), (w, w_stages, self.w_rows)):
            found += cpasync.make_tiled_tma_atom(load, tensor, cute.select(stages, mode=[0, 1]), (rows, STAGE_WIDTH))
        for tensor, rows in ((x_scale, tile.rows), (w_scale, tile.columns)):
            box = words, STEPS, rows // 128
            found += cpasync.make_tiled_tma_atom(load, tensor, cute.make_layout(box), box)
        return found, x_stages, w_stages

    @cute.kernel
    def kernel(self, load_x: cute.CopyAtom, x: cute.Tensor, load_w: cute.CopyAtom, w: cute.Tensor, load_x_scale: cute.CopyAtom,
               x_scale: cute.Tensor, load_w_scale: cute.CopyAtom, w_scale: cute.Tensor, store_out: cute.CopyAtom, stored: cute.Tensor,
               out: cute.Tensor, row_scales: cute.Tensor, scale: Float32, x_stages: cute.ComposedLayout, w_stages: cute.ComposedLayout,
               out_buffers: cute.ComposedLayout):
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // WARP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem, full, empty, done, free, memory, ring, w_ring, x_scale_ring, w_scale_ring = self.shared()
        s_out = smem.allocate_tensor(BFloat16, out_buffers.outer, byte_alignment=1024, swizzle=out_buffers.inner)
        if thread == 0:
            for descriptor in [load_x, load_w, load_x_scale, load_w_scale, store_out]:
                cpasync.prefetch_descriptor(descriptor)
        columns = self.begin(full, empty, done, free, memory, warp, thread)

        k_tiles = cute.ceil_div(x.shape[1], STAGE_WIDTH)
        rows_down, per_batch = self.extent(out)
        first, step = cute.arch.block_idx()[0] // self.blocks, cute.arch.grid_dim()[0] // self.blocks

        if warp == LOADER:
            self.load(load_x, x, load_w, w, load_x_scale, x_scale, load_w_scale, w_scale,
                      cute.make_tensor(cute.recast_ptr(ring, x_stages.inner, Uint8), x_stages.outer),
                      cute.make_tensor(cute.recast_ptr(w_ring, w_stages.inner, Uint8), w_stages.outer), x_scale_ring, w_scale_ring,
                      full, empty, rank, k_tiles, rows_down, per_batch, first, step)
        elif warp == MULTIPLIER:
            if rank == 0:
                self.multiply(ring, w_ring, x_scale_ring, w_scale_ring, columns, full, empty, done, free, k_tiles, per_batch, first, step)
        else:
            self.store(columns, s_out, store_out, stored, row_scales, scale, done, free, rank, rows_down, per_batch, first, step, thread)

        self.end(columns, warp)

    # ---------------------------------------------------------------------------------------------------------- begin, end

    def shared(self) -> tuple:
        """(allocator, barriers full, empty, done, free, address of the tensor memory, rings of x, of w, of their scales)"""
        tile, smem = self.tile, cutlass.memory.SmemAllocator()
        full, empty = smem.allocate_array(Int64, tile.stages), smem.allocate_array(Int64, tile.stages)
        done, free = smem.allocate_array(Int64, self.sums), smem.allocate_array(Int64, self.sums)
        memory = smem.allocate_array(Int32, 1)
        ring = smem.allocate(tile.stages * tile.stage_bytes, byte_alignment=1024)
        w_ring = ring + tile.stages * tile.rows * STAGE_WIDTH
        x_scale_ring = w_ring + tile.stages * self.w_rows * STAGE_WIDTH
        w_scale_ring = x_scale_ring + tile.stages * tile.rows // 128 * STEPS * SCALE_TILE
        return smem, full, empty, done, free, memory, ring, w_ring, x_scale_ring, w_scale_ring

    @cute.jit
    def begin(self, full: cute.Pointer, empty: cute.Pointer, done: cute.Pointer, free: cute.Pointer, memory: cute.Pointer, warp: Int32,
              thread: Int32) -> cute.Pointer:
        """Barriers and tensor memory are there for all -> the latter's columns."""
        tile = self.tile
        if thread == 0:
            for i in range_constexpr(tile.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, 1)
            for i in range_constexpr(self.sums):
                cute.arch.mbarrier_init(done + i, 1)
                cute.arch.mbarrier_init(free + i, WRITERS * tile.cluster)
        if warp == MULTIPLIER:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, memory, is_two_cta=self.pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
            fence("before")
        cute.arch.mbarrier_init_fence()
        self.sync_cluster()
        fence("after")
        return cute.arch.retrieve_tmem_ptr(Float32, 16, memory)

    @cute.jit
    def end(self, columns: cute.Pointer, warp: Int32):
        """Nobody uses tensor memory any more, nor will signal the other block."""
        fence("before")
        self.sync_cluster()
        if warp == MULTIPLIER:
            fence("after")
            cute.arch.dealloc_tmem(columns, TENSOR_COLUMNS, is_two_cta=self.pair)

    # -------------------------------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, load_x: cute.CopyAtom, x: cute.Tensor, load_w: cute.CopyAtom, w: cute.Tensor, load_x_scale: cute.CopyAtom,
             x_scale: cute.Tensor, load_w_scale: cute.CopyAtom, w_scale: cute.Tensor, s_x: cute.Tensor, s_w: cute.Tensor,
             x_scale_ring: cute.Pointer, w_scale_ring: cute.Pointer, full: cute.Pointer, empty: cute.Pointer, rank: Int32, k_tiles: Int32,
             rows_down: Int32, per_batch: Int32, first: Int32, step: Int32):
        """The loader's warp: every stage of every tile of this block, as soon as there is room."""
        tile = self.tile
        to_x, from_x = self.partition(load_x, s_x, x, (tile.rows, STAGE_WIDTH))
        to_w, from_w = self.partition(load_w, s_w, w, (self.w_rows, STAGE_WIDTH))
        words = SCALE_TILE // 4
        x_box, w_box = (words, STEPS, tile.rows // 128), (words, STEPS, tile.columns // 128)
        s_x_scale, s_w_scale = (cute.make_tensor(cute.recast_ptr(scales, dtype=Int32), cute.make_layout((*box, tile.stages)))
                                for scales, box in ((x_scale_ring, x_box), (w_scale_ring, w_box)))
        to_x_scale, from_x_scale = self.partition(load_x_scale, s_x_scale, x_scale, x_box)
        to_w_scale, from_w_scale = self.partition(load_w_scale, s_w_scale, w_scale, w_box)

        stage, phase = Int32(0), Int32(1)  # a fresh barrier counts as having completed the phase of parity 1: the ring starts empty
        for t in cutlass.range(first, per_batch, step):
            down, across, _ = self.place(t, rows_down, per_batch, rank)
            w_place = across * tile.cluster + rank if const_expr(self.pair) else across
            for i in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, tile.stage_bytes * tile.cluster)
                come = full + stage
                cute.copy(load_x, from_x[None, down, i], to_x[None, stage], tma_bar_ptr=come)
                cute.copy(load_w, from_w[None, w_place, i], to_w[None, stage], tma_bar_ptr=come)
                cute.copy(load_x_scale, from_x_scale[None, 0, i, down], to_x_scale[None, stage], tma_bar_ptr=come)
                cute.copy(load_w_scale, from_w_scale[None, 0, i, across], to_w_scale[None, stage], tma_bar_ptr=come)
                stage, phase = following(stage, phase, tile.stages)

    @cute.jit
    def partition(self, load: cute.CopyAtom, shared: cute.Tensor, tensor: cute.Tensor, box: cutlass.Constexpr):
        """(places in shared memory by stage, boxes by their numbers)"""
        boxes = cute.local_tile(tensor, box, (None,) * cute.rank(tensor))
        return cpasync.tma_partition(load, 0, cute.make_layout(1), cute.group_modes(shared, 0, len(box)),
                                     cute.group_modes(boxes, 0, len(box)))

    # ---------------------------------------------------------------------------------------------------------- multiply

    @cute.jit
    def multiply(self, ring: cute.Pointer, w_ring: cute.Pointer, x_scale_ring: cute.Pointer, w_scale_ring: cute.Pointer,
                 columns: cute.Pointer, full: cute.Pointer, empty: cute.Pointer, done: cute.Pointer, free: cute.Pointer, k_tiles: Int32,
                 per_batch: Int32, first: Int32, step: Int32):
        """The multiplier's warp: one thread of it starts the products of every stage, and says when they are over."""
        tile, mma = self.tile, self.mma()
        x_layout = blackwell_helpers.make_smem_layout_a(mma, self.shape, Float4E2M1FN, tile.stages)
        w_layout = blackwell_helpers.make_smem_layout_b(mma, self.shape, Float4E2M1FN, tile.stages)
        a = mma.make_fragment_A(cute.make_tensor(cute.recast_ptr(ring, x_layout.inner, Float4E2M1FN), x_layout.outer))
        b = mma.make_fragment_B(cute.make_tensor(cute.recast_ptr(w_ring, w_layout.inner, Float4E2M1FN), w_layout.outer))
        sums = mma.make_fragment_C(mma.partition_shape_C(self.shape[:2])).layout

        scales = columns + (TENSOR_COLUMNS - tile.scale_columns)
        layout = blockscaled_layout.make_smem_layout_sfa(mma, self.shape, SCALE_BLOCK, tile.stages)
        of_x = blockscaled_layout.make_tmem_layout_sfa(mma, self.shape, SCALE_BLOCK, cute.slice_(layout, (None, None, None, 0)))
        of_x = cute.make_tensor(cute.recast_ptr(scales, dtype=Float8E4M3FN), of_x)
        copy_x, from_x, to_x = self.scale_copy(x_scale_ring, layout, of_x)
        layout = blockscaled_layout.make_smem_layout_sfb(mma, self.shape, SCALE_BLOCK, tile.stages)
        of_w = blockscaled_layout.make_tmem_layout_sfb(mma, self.shape, SCALE_BLOCK, cute.slice_(layout, (None, None, None, 0)))
        of_w = cute.make_tensor(cute.recast_ptr(scales + tile.rows // 32 * STEPS, dtype=Float8E4M3FN), of_w)
        copy_w, from_w, to_w = self.scale_copy(w_scale_ring, layout, of_w)

        stage, phase, place, turn = Int32(0), Int32(0), Int32(0), Int32(1)
        which = Int32(0)
        for _ in cutlass.range(first, per_batch, step):
            cute.arch.mbarrier_wait(free + place, turn)
            fence("after")
            d = cute.make_tensor(columns + which * tile.sums_apart, sums)
            for i in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                fence("after")
                cute.copy(copy_x, from_x[None, None, None, None, stage], to_x)
                cute.copy(copy_w, from_w[None, None, None, None, stage], to_w)
                for s in range_constexpr(STEPS):
                    mma.set(tcgen05.Field.ACCUMULATE, i > 0 if const_expr(s == 0) else True)
                    cute.gemm(mma, d, [a[None, None, s, stage], of_x[None, None, s]], [b[None, None, s, stage], of_w[None, None, s]], d)
                self.commit(empty + stage)
                stage, phase = following(stage, phase, tile.stages)
            self.commit(done + place)
            place, turn = following(place, turn, self.sums)
            which = which ^ 1

    @cute.jit
    def scale_copy(self, shared: cute.Pointer, layout: cute.Layout, to: cute.Tensor):
        """(copy, a stage's scales in shared memory, their place in tensor memory)"""
        to = cute.filter_zeros(to)
        copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), Float8E4M3FN), to)
        stages = cute.filter_zeros(cute.make_tensor(cute.recast_ptr(shared, dtype=Float8E4M3FN), layout))
        one = copy.get_slice(0)
        return copy, tcgen05.get_s2t_smem_desc_tensor(copy, one.partition_S(stages)), one.partition_D(to)

    @cute.jit
    def commit(self, barrier: cute.Pointer):
        """The barrier hears when all products that were started are over; of a pair, those of both blocks do."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier, 3 if const_expr(self.pair) else None, self.group)

    # ------------------------------------------------------------------------------------------------------------- store

    @cute.jit
    def store(self, columns: cute.Pointer, s_out: cute.Tensor, store_out: cute.CopyAtom, stored: cute.Tensor, row_scales: cute.Tensor,
              scale: Float32, done: cute.Pointer, free: cute.Pointer, rank: Int32, rows_down: Int32, per_batch: Int32, first: Int32,
              step: Int32, thread: Int32):
        """A warp's 32 rows, COLUMNS_OUT columns at a time: a thread has a row. It is scaled, rounded, put into shared memory and stored by
        TMA, which leaves out what is beyond m and n."""
        tile = self.tile
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        buffers = s_out[None, None, None, warp]
        from_smem, to_out = self.partition(store_out, buffers, stored, (WARP, COLUMNS_OUT))
        mma = self.mma()
        layout = mma.make_fragment_C(mma.partition_shape_C(self.shape[:2])).layout
        read = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(COLUMNS_OUT)), Float32)

        place, turn, which = Int32(0), Int32(0), Int32(0)
        for t in cutlass.range(first, per_batch, step):
            down, across, _ = self.place(t, rows_down, per_batch, rank)
            row = down * tile.rows + thread
            factor = Float32(0.0)
            if row < row_scales.shape[0]:
                factor = row_scales[row] * scale
            d = cute.make_tensor(columns + which * tile.sums_apart, layout)
            parts = cute.flat_divide(d[(None, None), 0, 0], (tile.rows, COLUMNS_OUT))
            copy = tcgen05.make_tmem_copy(read, parts[None, None, 0, 0]).get_slice(thread)
            source = copy.partition_S(parts)
            values = cute.make_rmem_tensor(copy.partition_D(cute.make_identity_tensor((tile.rows, COLUMNS_OUT))).shape, Float32)
            cute.arch.mbarrier_wait(done + place, turn)
            fence("after")
            for p in range_constexpr(self.parts):
                part = Int32(p)
                if const_expr(self.overlap):  # what the next tile's sums overlap comes first
                    if which == 0:
                        part = Int32(self.parts - 1 - p)
                cute.copy(copy, source[None, None, None, 0, part], values)
                cute.arch.fence_view_async_tmem_load()
                if const_expr(p == (0 if self.overlap else self.parts - 1)):
                    fence("before")
                    cute.arch.sync_warp()
                    self.release(free + place, lane)
                exact, rounded = cute.make_rmem_tensor(COLUMNS_OUT, Float32), cute.make_rmem_tensor(COLUMNS_OUT, BFloat16)
                for i in range_constexpr(COLUMNS_OUT):
                    exact[i] = values[i] * factor
                rounded.store(exact.load().to(BFloat16))
                buffer = p % OUT_BUFFERS
                cute.arch.cp_async_bulk_wait_group(OUT_BUFFERS - 1, read=True)
                cute.arch.sync_warp()  # the buffer is free
                for v in range_constexpr(COLUMNS_OUT // 8):
                    piece = cute.local_tile(buffers[None, None, buffer], (1, 8), (lane, v))
                    cute.autovec_copy(cute.local_tile(rounded, (8,), (v,)), cute.coalesce(piece))
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()  # the buffer is full
                with cute.arch.elect_one():
                    cute.copy(store_out, from_smem[None, buffer], to_out[None, down * WRITERS + warp, across * self.parts + part])
                    cute.arch.cp_async_bulk_commit_group()
            place, turn = following(place, turn, self.sums)
            which = which ^ 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def release(self, free: cute.Pointer, lane: Int32):
        """This warp has read sums: one arrival at the block that multiplies."""
        if lane == 0:
            if const_expr(self.pair):
                cute.arch.mbarrier_arrive(free, 0)
            else:
                cute.arch.mbarrier_arrive(free)
