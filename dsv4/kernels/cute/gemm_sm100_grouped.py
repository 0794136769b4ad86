"""A product an expert on Blackwell's tensor cores in NVFP4, in CuTeDSL: gemm_sm100.py's, whose blocks, stages and barriers these are, for
the rows of each expert (../layouts.py, Groups). ../../ops/grouped.py has what it computes.

x has the rows of all experts one behind the other, without gaps; scales are in tiles of 128 rows, and each expert's rows begin a tile. w is
[experts, n, k]. A list that lies on the device (`plan`) says of each tile of 128 rows, or of 256 for a pair: the expert, its first row, how
many rows there are, the tile of scales. So the host knows neither how many tiles there are nor whose, and an expert without rows has none.
Tile t of the output is column t mod columns of entry t / columns: the tiles of a few entries are under way at once, and an expert's
weight, 25 MB of Pro's w1 and w3 with their scales, stays in L2 for its next entry.

A tile's rows are loaded whole: behind the expert's last row come those of the next one (beyond the last, zeros). What the tensor cores make
of them is stored nowhere. So the output is written by the threads, a row each, and not by TMA, which would write whole boxes: 16 bytes a
store, a row's columns one after the other. At an estimated store of a thread a cycle, 128 x 256 in bf16 take 4,096 cycles, 2.2 us; the next
tile's products, which run meanwhile, take 3 (Flash's w2) or 4.5 (Pro's) by choice.py's guess.

A warp none of whose 32 rows is there reads and computes nothing, and only hands the sums on.

"nvfp4_grouped" leaves bf16: row_scales[row] * scales[expert] * sum. "nvfp4_swiglu" has 16 columns of w1, the gates, and the same 16 of w3,
the ups, in turn, each with a scale of its own. A thread has both, 16 of each a block of NVFP4: it rounds them to bf16, as the model has
them, clamps them, and packs silu(gate) * up with the constant scale of a row, which goes out multiplied by the row's routing weight. Codes
and scales lie as the next product takes them; rows of a tile of scales that the expert does not have get zeros. About 45 instructions of
PTX a value and the divisions' steps: for a tile of 256 columns, 128 values a thread, some 7,000 of each of 4 warps, which issue side by
side: 4 us if one issues every cycle, which it will not quite. The products of the next tile take 6 us (Flash) or 10 (Pro). No time here has
been measured.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8, Uint16, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, tcgen05

from .gemm_sm100 import LOADER, MULTIPLIER, SCALE_BLOCK, THREADS, Nvfp4Gemm, fence
from .persistent import WARP, following
from .tiles import COLUMNS_OUT, SCALE_TILE, STAGE_WIDTH, STEPS, Tile

BLOCKS_OUT = COLUMNS_OUT // (2 * SCALE_BLOCK)  # swiglu: NVFP4 blocks made at a time
CODES = "{.reg .b8 e2m1_0, e2m1_1, e2m1_2, e2m1_3;\n" + "".join(
    f"cvt.rn.satfinite.e2m1x2.f32 e2m1_{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};\n" for i in range(4)) + \
    "mov.b32 {$w0}, {e2m1_0, e2m1_1, e2m1_2, e2m1_3};}"
FROM_E4M3 = "{.reg .b32 f16_both;\n.reg .b16 f16_low, f16_high;\ncvt.rn.f16x2.e4m3x2 f16_both, {$r0};\n" \
            "mov.b32 {f16_low, f16_high}, f16_both;\ncvt.f32.f16 {$w0}, f16_low;\ncvt.f32.f16 {$w1}, f16_high;}"


def bits(x: Float32) -> Int32:
    return x.bitcast(Int32)


class GroupedNvfp4Gemm(Nvfp4Gemm):
    """The kernel for one tile, of kind "nvfp4_grouped" or "nvfp4_swiglu"; the former needs no order, weights, out_scales, out_row_scales,
    limit and scale."""

    def __init__(self, tile: Tile):
        super().__init__(tile)
        self.swiglu = tile.kind == "nvfp4_swiglu"

    @cute.jit
    def __call__(self, x_address: cute.Pointer, w_address: cute.Pointer, x_scale_address: cute.Pointer, w_scale_address: cute.Pointer,
                 row_scales: cute.Pointer, scales: cute.Pointer, plan_address: cute.Pointer, counts: cute.Pointer, order: cute.Pointer,
                 weights: cute.Pointer, out: cute.Pointer, out_scales: cute.Pointer, out_row_scales: cute.Pointer, m: Int32, n: Int32,
                 k: Int32, experts: Int32, entries: Int32, scale_tiles: Int32, processors: Int32, limit: Float32, scale: Float32,
                 stream: cuda.CUstream):
        tile = self.tile
        width = cute.assume(k // 2, divby=16)  # TMA wants rows of a multiple of 16 bytes
        steps, words, tiles = cute.ceil_div(k, 64), SCALE_TILE // 4, cute.ceil_div(n, 128)
        x = cute.make_tensor(x_address, cute.make_layout((m, width), stride=(width, 1)))
        w = cute.make_tensor(w_address, cute.make_layout((n, width, experts), stride=(width, 1, n * width)))
        x_scale = cute.make_tensor(x_scale_address, cute.make_layout((words, steps, scale_tiles), stride=(1, words, words * steps)))
        of_expert = cute.make_layout((words, steps, tiles, experts), stride=(1, words, words * steps, words * steps * tiles))
        loads, x_stages, w_stages = self.loads(x, w, x_scale, cute.make_tensor(w_scale_address, of_expert))
        plan = cute.make_tensor(plan_address, cute.make_layout((entries, 4), stride=(4, 1)))

        across = cute.ceil_div(n, tile.columns)
        grid = cutlass.min(entries * across * tile.cluster, processors // tile.cluster * tile.cluster)
        self.kernel(*loads, x_stages, w_stages, row_scales, scales, plan, counts, order, weights, out, out_scales, out_row_scales, n,
                    across, limit, scale).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], cluster=[self.blocks, 1, 1] if const_expr(self.blocks > 1) else None,
            min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(self, load_x: cute.CopyAtom, x: cute.Tensor, load_w: cute.CopyAtom, w: cute.Tensor, load_x_scale: cute.CopyAtom,
               x_scale: cute.Tensor, load_w_scale: cute.CopyAtom, w_scale: cute.Tensor, x_stages: cute.ComposedLayout,
               w_stages: cute.ComposedLayout, row_scales: cute.Pointer, scales: cute.Pointer, plan: cute.Tensor, counts: cute.Pointer,
               order: cute.Pointer, weights: cute.Pointer, out: cute.Pointer, out_scales: cute.Pointer, out_row_scales: cute.Pointer,
               n: Int32, across: Int32, limit: Float32, scale: Float32):
        tile, thread = self.tile, cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // WARP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        _, full, empty, done, free, memory, ring, w_ring, x_scale_ring, w_scale_ring = self.shared()
        if thread == 0:
            for descriptor in [load_x, load_w, load_x_scale, load_w_scale]:
                cpasync.prefetch_descriptor(descriptor)
        columns = self.begin(full, empty, done, free, memory, warp, thread)

        k_tiles = cute.ceil_div(x.shape[1], STAGE_WIDTH)
        first, step = cute.arch.block_idx()[0] // self.blocks, cute.arch.grid_dim()[0] // self.blocks
        last = (counts + (tile.cluster - 1)).load() * across

        if warp == LOADER:
            self.load_groups(load_x, x, load_w, w, load_x_scale, x_scale, load_w_scale, w_scale,
                             cute.make_tensor(cute.recast_ptr(ring, x_stages.inner, Uint8), x_stages.outer),
                             cute.make_tensor(cute.recast_ptr(w_ring, w_stages.inner, Uint8), w_stages.outer), x_scale_ring, w_scale_ring,
                             full, empty, plan, rank, k_tiles, across, first, step, last)
        elif warp == MULTIPLIER:
            if rank == 0:
                self.multiply(ring, w_ring, x_scale_ring, w_scale_ring, columns, full, empty, done, free, k_tiles, last, first, step)
        else:
            self.store_groups(columns, row_scales, scales, plan, order, weights, out, out_scales, out_row_scales, n, limit, scale, done,
                              free, rank, across, first, step, last, thread)

        self.end(columns, warp)

    # -------------------------------------------------------------------------------------------------------------- load

    @cute.jit
    def load_groups(self, load_x: cute.CopyAtom, x: cute.Tensor, load_w: cute.CopyAtom, w: cute.Tensor, load_x_scale: cute.CopyAtom,
                    x_scale: cute.Tensor, load_w_scale: cute.CopyAtom, w_scale: cute.Tensor, s_x: cute.Tensor, s_w: cute.Tensor,
                    x_scale_ring: cute.Pointer, w_scale_ring: cute.Pointer, full: cute.Pointer, empty: cute.Pointer, plan: cute.Tensor,
                    rank: Int32, k_tiles: Int32, across: Int32, first: Int32, step: Int32, last: Int32):
        """As `load`, where the plan says."""
        tile, words = self.tile, SCALE_TILE // 4
        to_w, from_w = self.partition(load_w, s_w, w, (self.w_rows, STAGE_WIDTH))
        x_box, w_box = (words, STEPS, tile.rows // 128), (words, STEPS, tile.columns // 128)
        s_x_scale, s_w_scale = (cute.make_tensor(cute.recast_ptr(scales, dtype=Int32), cute.make_layout((*box, tile.stages)))
                                for scales, box in ((x_scale_ring, x_box), (w_scale_ring, w_box)))
        to_x_scale, from_x_scale = self.partition(load_x_scale, s_x_scale, x_scale, x_box)
        to_w_scale, from_w_scale = self.partition(load_w_scale, s_w_scale, w_scale, w_box)

        stage, phase = Int32(0), Int32(1)
        for t in cutlass.range(first, last, step):
            expert, row, _, scale_tile = self.entry(plan, t // across)
            column = t % across
            w_place = column * tile.cluster + rank if const_expr(self.pair) else column
            to_x, from_x = self.partition(load_x, s_x, cute.domain_offset((row + rank * tile.rows, 0), x), (tile.rows, STAGE_WIDTH))
            for i in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, tile.stage_bytes * tile.cluster)
                come = full + stage
                cute.copy(load_x, from_x[None, 0, i], to_x[None, stage], tma_bar_ptr=come)
                cute.copy(load_w, from_w[None, w_place, i, expert], to_w[None, stage], tma_bar_ptr=come)
                cute.copy(load_x_scale, from_x_scale[None, 0, i, scale_tile + rank], to_x_scale[None, stage], tma_bar_ptr=come)
                cute.copy(load_w_scale, from_w_scale[None, 0, i, column, expert], to_w_scale[None, stage], tma_bar_ptr=come)
                stage, phase = following(stage, phase, tile.stages)

    # ------------------------------------------------------------------------------------------------------------- store

    @cute.jit
    def store_groups(self, columns: cute.Pointer, row_scales: cute.Pointer, scales: cute.Pointer, plan: cute.Tensor, order: cute.Pointer,
                     weights: cute.Pointer, out: cute.Pointer, out_scales: cute.Pointer, out_row_scales: cute.Pointer, n: Int32,
                     limit: Float32, scale: Float32, done: cute.Pointer, free: cute.Pointer, rank: Int32, across: Int32, first: Int32,
                     step: Int32, last: Int32, thread: Int32):
        """A thread's row, COLUMNS_OUT columns at a time."""
        tile, lane = self.tile, thread % WARP
        first_of_warp = rank * tile.rows + cute.arch.make_warp_uniform(thread // WARP) * WARP
        mma = self.mma()
        layout = mma.make_fragment_C(mma.partition_shape_C(self.shape[:2])).layout
        read = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(COLUMNS_OUT)), Float32)
        mine = rank * tile.rows + thread
        # What a row takes in `out` (words of 8 codes, or bf16 values) and in a tile of scales (words of 4).
        width = n // 16 if const_expr(self.swiglu) else n
        scale_words = cute.ceil_div(n, 128)

        place, turn, which = Int32(0), Int32(0), Int32(0)
        for t in cutlass.range(first, last, step):
            expert, row, rows, scale_tile = self.entry(plan, t // across)
            column = t % across
            row += mine
            here, some = mine < rows, first_of_warp < rows
            factor, factor_up = Float32(0.0), Float32(0.0)
            if here:
                factor = (row_scales + row).load()
                if const_expr(self.swiglu):
                    factor_up = factor * (scales + 2 * expert + 1).load()
                    factor *= (scales + 2 * expert).load()
                    if column == 0:
                        (out_row_scales + row).store(scale * (weights + (order + row).load()).load())
                else:
                    factor *= (scales + expert).load()
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
                if some:
                    cute.copy(copy, source[None, None, None, 0, part], values)
                    cute.arch.fence_view_async_tmem_load()
                if const_expr(p == (0 if self.overlap else self.parts - 1)):
                    fence("before")
                    cute.arch.sync_warp()
                    self.release(free + place, lane)
                start = column * tile.columns + part * COLUMNS_OUT
                if const_expr(self.swiglu):
                    block_scales = Uint16(0)
                    if some:
                        codes, made = self.packed(values, factor, factor_up, limit, scale)
                        if here:
                            block_scales = made
                            if start < n:
                                to = cute.make_tensor(out + cute.assume(row * width + start // 16, divby=4), cute.make_layout(4))
                                cute.autovec_copy(codes, to)
                    if rank * tile.rows < rows and start < scale_words * 128:
                        # Scales of row r and group g: bytes 16 (r % 32) + 4 (r / 32) + g of the tile; two groups are half a word.
                        word = (scale_tile + rank) * scale_words + start // 128
                        half = word * (SCALE_TILE // 2) + lane * 8 + thread // WARP * 2 + start // COLUMNS_OUT % 2
                        (out_scales + half).store(block_scales)
                elif some:
                    exact, rounded = cute.make_rmem_tensor(COLUMNS_OUT, Float32), cute.make_rmem_tensor(COLUMNS_OUT, BFloat16)
                    for i in range_constexpr(COLUMNS_OUT):
                        exact[i] = values[i] * factor
                    rounded.store(exact.load().to(BFloat16))
                    for v in range_constexpr(COLUMNS_OUT // 8):
                        if here and start + 8 * v < n:
                            to = cute.make_tensor(out + cute.assume(row * width + start + 8 * v, divby=8), cute.make_layout(8))
                            cute.autovec_copy(cute.local_tile(rounded, (8,), (v,)), to)
            place, turn = following(place, turn, self.sums)
            which = which ^ 1

    @cute.jit
    def packed(self, values: cute.Tensor, factor: Float32, factor_up: Float32, limit: Float32, scale: Float32):
        """Sums of 16 gates, 16 ups, 16 gates, 16 ups -> (32 codes in 4 words, 2 scales in half a word) of silu(gate) * up."""
        both = cute.make_rmem_tensor(BLOCKS_OUT * SCALE_BLOCK, Float32)
        wanted = cute.make_rmem_tensor(BLOCKS_OUT, Float32)
        for b in range_constexpr(BLOCKS_OUT):
            top = Int32(0)
            for i in range_constexpr(SCALE_BLOCK):
                gate = (values[2 * SCALE_BLOCK * b + i] * factor).to(BFloat16).to(Float32)
                up = (values[2 * SCALE_BLOCK * b + SCALE_BLOCK + i] * factor_up).to(BFloat16).to(Float32)
                gate = limit if gate > limit else gate  # comparisons that let NaN through
                up = limit if up > limit else up
                up = -limit if up < -limit else up
                value = gate / (1.0 + cute.math.exp(-gate)) * up
                both[SCALE_BLOCK * b + i] = value
                top = cutlass.max(top, bits(value) & 0x7FFFFFFF)  # as whole numbers, where NaN is the largest
            wanted[b] = top.bitcast(Float32) / 6.0 / scale
        block_scales = cute.arch.inline_ptx("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint16],
                                            read_only_args=[wanted[0], wanted[1]])
        steps = cute.arch.inline_ptx(FROM_E4M3, write_only_types=[Float32, Float32], read_only_args=[block_scales])
        codes = cute.make_rmem_tensor(BLOCKS_OUT * 2, Int32)
        for b in range_constexpr(BLOCKS_OUT):
            step = steps[b] * scale
            one_over = 1.0 / step
            for half in range_constexpr(2):
                scaled = []
                for i in range_constexpr(8):
                    # The quotient as far as a code can tell it from the rounded one (../cuda/nvfp4.cuh), with the sign of the value.
                    value = both[SCALE_BLOCK * b + 8 * half + i]
                    size = (bits(value) & 0x7FFFFFFF).bitcast(Float32)
                    q = size * one_over
                    q = cute.math.fma(cute.math.fma(-q, step, size), one_over, q)
                    scaled.append((bits(q) | bits(value) & -0x80000000).bitcast(Float32))
                word = cute.arch.inline_ptx(CODES, write_only_types=[Int32], read_only_args=scaled)
                codes[2 * b + half] = word if step > 0.0 else Int32(0)  # not so for NaN
        return codes, block_scales
