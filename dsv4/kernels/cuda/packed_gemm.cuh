// y = x W^T for any number of tokens and the weights as decode packs them (packing.py), so that one copy of the weights serves both; W is
// one matrix, or one an expert, whose rows of x lie together. Hopper's tensor cores (wgmma): sm_90a only, elsewhere the functions return
// cudaErrorNotSupported. packed_gemm_*.cu compile it, a format each, and say what its kernels are called.
//
// The weights are the product's 64-row operand A, from registers, the tokens operand B, from shared memory. A packed tile of 16 rows is one
// warp's part of A, and a lane's bytes are its own: 16 codes of a row become 8 pairs of bf16, exactly, with expand_e2m1 and the scales of
// stream.cuh. A lane holds 16 consecutive columns where the instruction wants 2 of each 8, so x must come in that order of columns in each
// 64 (arrange.cuh): the kernel that gathers the rows writes it (arrange_tokens), for w2 the epilogue of w1 and w3.
//
// There are four kernels, by the tokens that a tile may have (`most`); with all of them a token's result has the same bits. packed_plan.cuh
// is what they share. This file has three (`Size`), whose block is 128 rows of packed tiles by up to 256 tokens: two warpgroups that
// multiply 64 rows each, and threads that load. Weights come by bulk copies into a ring, tokens by TMA into another one, whose slots hold
// 64 columns of the most tokens, 128 of half of them. The product is as wide as the tile has tokens, which may be far fewer than `most`:
//   wide, up to 256    128, 192 and 256 columns; 2 items of weights (512 columns of FP4, 37 KB) and 4 slots of 32 KB
//   middle, up to 128  32, 64, 96 and 128 columns; 3 items and 6 slots of 16 KB
//   narrow, up to 96   of experts alone: two blocks an SM, one of which multiplies while the other expands; 32, 64 and 96 columns; 40 KB of
//                      weights (bf16 and FP8: 48) in stages of 128 columns (bf16: 64), and 4 slots of 12 KB. Its 32 columns are for experts
//                      with fewer tokens than others, and what is left of more than `most`: of tiles of 96 with 96 tokens an expert at
//                      random, 928 cycles a chunk in the mean, and 984 if none were below 64 (both by count)
//   few, up to 32      of experts alone, by mma.sync: packed_few.cuh
// In the first two the next chunk's weights (64 columns) are expanded into the other one of two sets of 16 registers while a chunk is
// multiplied; the narrow one has 104 registers a thread, enough for one set.
//
// Blocks go from tile to tile until none is left; the next tile's copies come while one is stored. Tiles go down the tokens first (up to 8
// of them, then the next rows), so that neighbours in time share weights. An expert without tokens has no tile.
//
// Where a weight has few rows, its tiles are cut along K into parts (prompts.py: how many depends on the weight alone, as the order of
// additions does), which follow each other in the walk, so that different blocks multiply them at the same time. A block leaves its sums in
// global memory, a thread's lie as it has them; the last of a tile's to arrive adds them in the order of the parts and stores the tile.
//
// Instructions a warp for 64 columns of NVFP4: 32 to expand, 16 multiplications by scales, 4 to make these, 1.5 loads, about 45 around, for
// 4 products that take 512 cycles with 256 tokens and 64 with 32 (a scheduler and its tensor core have two warps of each block). Measured
// on an H200: 91 to 99 % of torch's bf16 rate where tiles of 256 tokens fill the GPU; but narrower ones take 1,070 cycles a chunk with 128
// tokens, 830 with 96, 650 with 64 and 540 with 32: a product waits for the one before, as its A comes from registers, and ptxas puts all
// that expands the next chunk behind the fourth one, where it hides behind that alone. Expanding the next product's weights behind each
// product, which ptxas cannot move, was slower. Two narrow blocks take 1,430 cycles for a chunk each with 96 tokens, 1,140 with 64 and 900
// with 32 (at 1.7 GHz), a seventh less than one after the other, where their schedulers need 400 (docs/measurements.md). One dense product
// has too few tiles for two blocks an SM to be worth it: 57 us and not 50 for 1,024 tokens of Pro's wq_a.
//
// ptxas adds up the registers of all products of a kernel that may be on their way around a loop. Where they are too many, it makes every
// wgmma wait for the one before ("insufficient register resources", without spilling any): with all widths in one kernel; in the narrow one
// with two sets of A, but for one width up to 64 alone.
//
// FP8: the block scale multiplies the weights in bf16, which is exact if it has up to 4 significant bits (prompts.takes); decode applies it
// to the sums of 128 columns, for which there are no registers here.
#pragma once
#include "packed_few.cuh"

constexpr int kMath = 256, kGemmThreads = kMath + 128;             // two warpgroups that multiply, one whose warps load
constexpr int kTiles = 8, kBlockRows = kTiles * kRows;             // packed tiles of a block, one a warp
constexpr int kMaxN = 256, kBox = 32;                              // tokens of a tile; of a tensor copy
constexpr int kNarrowTokens = 96;                                  // of a tile for which two blocks share an SM
constexpr int kMaxSlots = 6, kMaxStages = 5, kScales = 2;          // of tokens, of weights, of an item's scales: on their way or in use
constexpr int kOutTokens = 32, kOutStride = kBlockRows + 8;        // of a buffer of results; bf16 from token to token: no bank conflicts
constexpr int kOutBytes = kOutTokens * kOutStride * 2;

enum Size { kNarrow = 0, kMiddle = 1, kWide = 2 };

struct Shared {
    uint64_t slot_full[kMaxSlots], slot_empty[kMaxSlots], stage_full[kMaxStages], stage_empty[kMaxStages];
    uint64_t scales_full[kScales], scales_empty[kScales];
    Rows rows;
    bool last;
};

// A kernel's tiles, registers and shared memory: slots, buffers of results, `Shared`, stages of weights. A stage is an item of each of the
// 8 tiles. The narrow kernel (kFine) has room for one such: there it is 128 columns of FP4 (8 KB) or FP8 (16), 64 of bf16 (16), and an
// item's scales, whose bytes are not in the order of the columns, have a ring of their own behind the stages. Few tokens wait for weights,
// so the middle kernel has three items on the way.
template <int kFormat, Size kSize> struct Sizes {
    static constexpr bool kFine = kSize == kNarrow, kFp4 = kFormat == kNvfp4 || kFormat == kMxfp4;
    static constexpr int kBlocks = kFine ? 2 : 1;  // on an SM
    static constexpr int kTokens = kSize == kWide ? 256 : kSize == kMiddle ? 128 : kNarrowTokens;
    static constexpr int kMathRegisters = kFine ? 104 : 232, kLoadRegisters = kFine ? 32 : 40;
    static constexpr int kSlots = kSize == kMiddle ? 6 : 4, kStages = kSize == kWide ? 2 : kFine && kFp4 ? 5 : 3;
    static constexpr int kStageChunks = !kFine ? item_columns(kFormat) / kChunk : kFormat == kBf16 ? 1 : 2;
    static constexpr int kChunkBytes = kCodes * kChunk / item_columns(kFormat);  // a tile's
    static constexpr int kItemBytes = item_bytes(kFormat) - (kFine ? kCodes : 0);  // a tile's, too: what comes of an item at a time
    static constexpr int kStageBytes = kFine ? kStageChunks * kChunkBytes : kItemBytes;
    static constexpr int kSlotBytes = kTokens * kChunk * 2, kResultsAt = kSlots * kSlotBytes;
    static constexpr int kBuffers = kFine ? 1 : 2, kSharedAt = kResultsAt + kBuffers * kOutBytes;
    static constexpr int kStagesAt = kSharedAt + (sizeof(Shared) + 127) / 128 * 128, kScalesAt = kStagesAt + kStages * kTiles * kStageBytes;
    static constexpr int kItemsAt = kFine ? kScalesAt : kStagesAt, kBytes = kScalesAt + (kFine ? kScales * kTiles * kItemBytes : 0);
    static_assert(kSlots <= kMaxSlots && kStages <= kMaxStages && kBytes <= (kFine ? kSharedBytes : 227 << 10), "memory");
    static_assert(kMath * kMathRegisters + 128 * kLoadRegisters <= 65536 / kBlocks / kGemmThreads / 8 * 8 * kGemmThreads, "registers");
};

// The columns of the product for so many tokens.
template <Size kSize> __device__ __forceinline__ int width(int tokens) {
    return kSize == kWide ? (tokens <= 128 ? 128 : tokens <= 192 ? 192 : 256) : (tokens + 31) / 32 * 32;
}
// Chunks of 64 columns that a slot holds.
template <int kFormat, Size kSize> __host__ __device__ constexpr int slot_chunks(int n) {
    constexpr int kTokens = Sizes<kFormat, kSize>::kTokens;
    const int fit = n * 4 <= kTokens ? 4 : n * 2 <= kTokens ? 2 : 1;
    return fit < item_chunks(kFormat) ? fit : item_chunks(kFormat);
}

// One side's places in the rings.
template <int kFormat, Size kSize> struct Rings {
    Ring<Sizes<kFormat, kSize>::kSlots> slot;
    Ring<Sizes<kFormat, kSize>::kStages> stage;
    Ring<kScales> scales;
};

// ---------------------------------------------------------------------------------------------------------------------- load

// A slot's `n` tokens, of which `chunks` chunks from number `first` on.
template <int kFormat, Size kSize>
__device__ __forceinline__ void load_slot(const TensorMap& map, const Plan& plan, const Walk& walk, Shared& shared, char* memory,
                                          Rings<kFormat, kSize>& at, int n, int first, int chunks) {
    using S = Sizes<kFormat, kSize>;
    uint64_t* full = &shared.slot_full[at.slot.index];
    mbarrier_wait(&shared.slot_empty[at.slot.index], at.slot.parity);
    mbarrier_expect(full, chunks * n * kChunk * 2);
#pragma unroll 1  // the narrow kernel's warps that load have 32 registers a thread
    for (int c = 0; c < chunks; c++) {
        const int column = walk.matrix * plan.x_step + (first + c) * kChunk;
        char* to = memory + at.slot.index * S::kSlotBytes + c * n * kChunk * 2;
#pragma unroll 1
        for (int row = 0; row < n; row += kBox) tensor_load(to + row * kChunk * 2, &map, column, walk.first_row + row, full);
    }
    at.slot.next();
}

// Whole items and tokens, by one thread.
template <int kFormat, Size kSize>
__device__ __forceinline__ void load_tiles(const TensorMap& map, const Plan& plan, Shared& shared, char* memory) {
    using S = Sizes<kFormat, kSize>;
    Rings<kFormat, kSize> at;
    at.slot.parity = at.stage.parity = 1;  // a new barrier counts as having completed the phase of parity 1: the rings are empty
    bool waits = !plan.offsets;            // for the kernel before this one; the block's other threads wait for the tokens
    for (Walk walk(plan, shared.rows, kTiles); walk.next();) {
        const int n = width<kSize>(walk.tokens), chunks = slot_chunks<kFormat, kSize>(n);
        const char* weights = plan.weights + walk.matrix * plan.matrix_bytes;
        const int begin = walk.first_unit() * unit_chunks(kFormat), end = walk.end_unit() * unit_chunks(kFormat);
        for (int item = begin / item_chunks(kFormat); item * item_chunks(kFormat) < end; item++) {
            mbarrier_wait(&shared.stage_empty[at.stage.index], at.stage.parity);
            mbarrier_expect(&shared.stage_full[at.stage.index], kTiles * item_bytes(kFormat));
            for (int i = 0; i < kTiles; i++) {
                const int tile = min(walk.across * kTiles + i, plan.tiles - 1);  // beyond the last one, any: not stored
                bulk_load_keep(memory + S::kItemsAt + (at.stage.index * kTiles + i) * item_bytes(kFormat),
                               weights + (int64_t(tile) * plan.items + item) * item_bytes(kFormat), item_bytes(kFormat),
                               &shared.stage_full[at.stage.index]);
            }
            at.stage.next();
            if (waits) grid_dependency_wait(), waits = false;
            const int end_here = min((item + 1) * item_chunks(kFormat), end);
            for (int first = max(item * item_chunks(kFormat), begin); first < end_here; first += chunks)
                load_slot(map, plan, walk, shared, memory, at, n, first, chunks);
        }
    }
}

// Narrow: `bytes` of an item, from byte `skip` on, of each of the block's tiles, one behind the other, a lane each: eight copies of one
// thread were 190 instructions, for 128 columns, for which a scheduler's warps that multiply have 400.
template <int kFormat>
__device__ __forceinline__ void load_pieces(char* to, int item, int skip, int bytes, const Plan& plan, const Walk& walk, uint64_t* full) {
    const int lane = threadIdx.x % 32, tile = min(walk.across * kTiles + lane, plan.tiles - 1);  // beyond the last one, any: not stored
    const int number = (walk.matrix * plan.tiles + tile) * plan.items + item;
    if (lane == 0) mbarrier_expect(full, kTiles * bytes);
    __syncwarp();
    if (lane < kTiles)
        bulk_load_keep(to + lane * bytes, plan.weights + int64_t(number) * item_bytes(kFormat) + skip, bytes, full);
}

// Narrow: the weights, a warp's work, and the tokens, another one's, so that weights are on the way for as long as there is room.
template <int kFormat, Size kSize> __device__ __forceinline__ void load_weights(const Plan& plan, Shared& shared, char* memory) {
    using S = Sizes<kFormat, kSize>;
    Rings<kFormat, kSize> at;
    at.stage.parity = at.scales.parity = 1;
    for (Walk walk(plan, shared.rows, kTiles); walk.next();) {
        const int begin = walk.first_unit() * unit_chunks(kFormat), end = walk.end_unit() * unit_chunks(kFormat);
        for (int chunk = begin; chunk < end; chunk += S::kStageChunks) {
            const int item = chunk / item_chunks(kFormat), in_item = chunk % item_chunks(kFormat);
            if (S::kItemBytes != 0 && (chunk == begin || in_item == 0)) {
                mbarrier_wait(&shared.scales_empty[at.scales.index], at.scales.parity);
                load_pieces<kFormat>(memory + S::kItemsAt + at.scales.index * kTiles * S::kItemBytes, item, kCodes, S::kItemBytes, plan,
                                     walk, &shared.scales_full[at.scales.index]);
                at.scales.next();
            }
            mbarrier_wait(&shared.stage_empty[at.stage.index], at.stage.parity);
            load_pieces<kFormat>(memory + S::kStagesAt + at.stage.index * kTiles * S::kStageBytes, item, in_item * S::kChunkBytes,
                                 S::kStageBytes, plan, walk, &shared.stage_full[at.stage.index]);
            at.stage.next();
        }
    }
}

template <int kFormat, Size kSize>
__device__ __forceinline__ void load_tokens(const TensorMap& map, const Plan& plan, Shared& shared, char* memory) {
    Rings<kFormat, kSize> at;
    at.slot.parity = 1;
    for (Walk walk(plan, shared.rows, kTiles); walk.next();) {
        const int n = width<kSize>(walk.tokens), chunks = slot_chunks<kFormat, kSize>(n), end = walk.end_unit() * unit_chunks(kFormat);
        for (int first = walk.first_unit() * unit_chunks(kFormat); first < end; first += chunks)
            load_slot(map, plan, walk, shared, memory, at, n, first, chunks);
    }
}

// ------------------------------------------------------------------------------------------------------------------ multiply

#ifdef HAS_WGMMA

// Starts sum += the 64 columns of a with those of the tokens at `b`.
template <int N> __device__ __forceinline__ void issue(float (&sum)[N / 2], const uint32_t (&a)[4][4], const char* b) {
    const uint64_t operand = wgmma_operand(b, Swizzle::k128, 8 * kChunk * 2);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_bf16(sum, a[i], operand + 2 * i);
    wgmma_commit();
}

// sum += the products over the columns of a tile's part.
template <int kFormat, Size kSize, int N>
__device__ __forceinline__ void multiply(float (&sum)[N / 2], const Walk& walk, Shared& shared, char* memory, Rings<kFormat, kSize>& at) {
    using S = Sizes<kFormat, kSize>;
    constexpr int kPairs = item_chunks(kFormat) / 2, kInSlot = slot_chunks<kFormat, kSize>(N), kSlotPairs = kInSlot > 1 ? kInSlot / 2 : 1;
    constexpr int kUnitPairs = unit_chunks(kFormat) / 2;
    static_assert(kUnitPairs % kSlotPairs == 0 && kPairs % kUnitPairs == 0, "parts of whole slots, items of whole parts");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = walk.first_unit() * kUnitPairs, end = walk.end_unit() * kUnitPairs;
    uint32_t a[2][4][4];
    uint64_t* before = nullptr;  // the barrier of the slot that is being read
    const char* b = nullptr;
#pragma unroll 1
    for (int pair = begin; pair < end;) {
        const char* mine = memory + S::kItemsAt + (at.stage.index * kTiles + warp) * item_bytes(kFormat) + 16 * lane;
        const int end_here = min(end, (pair / kPairs + 1) * kPairs);
        mbarrier_wait(&shared.stage_full[at.stage.index], at.stage.parity);
#pragma unroll 1
        for (; pair < end_here; pair++) {
            const Weights<kFormat> weights(mine + 2 * S::kChunkBytes * (pair % kPairs), mine + kCodes, pair % kPairs);
#pragma unroll
            for (int v = 0; v < 2; v++) {
                weights.expand(v, a[v]);
                const bool fresh = kInSlot == 1 || (v == 0 && pair % kSlotPairs == 0);  // the slot's first chunk
                if (fresh) {
                    mbarrier_wait(&shared.slot_full[at.slot.index], at.slot.parity);
                    b = memory + at.slot.index * S::kSlotBytes;
                }
                issue<N>(sum, a[v], b);
                wgmma_wait<1>();  // the chunk before is read
                b += N * kChunk * 2;
                if (fresh) {
                    if (before && lane == 0) mbarrier_arrive(before);
                    before = &shared.slot_empty[at.slot.index];
                    at.slot.next();
                }
            }
        }
        if (lane == 0) mbarrier_arrive(&shared.stage_empty[at.stage.index]);  // all lanes have read their weights: they met at the wait
        at.stage.next();
    }
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(before);
}

// The same of the narrow kernel: one set of operand A, stages of weights that are parts of an item, an item's scales by themselves.
template <int kFormat, Size kSize, int N>
__device__ __forceinline__ void multiply_narrow(float (&sum)[N / 2], const Walk& walk, Shared& shared, char* memory,
                                                Rings<kFormat, kSize>& at) {
    using S = Sizes<kFormat, kSize>;
    constexpr int kInItem = item_chunks(kFormat), kInSlot = slot_chunks<kFormat, kSize>(N), kInStage = S::kStageChunks;
    static_assert(unit_chunks(kFormat) % kInSlot == 0 && unit_chunks(kFormat) % kInStage == 0, "parts of whole slots and stages");
    static_assert(kInItem % 2 == 0 && 2 % kInStage == 0, "two chunks at a time");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int begin = walk.first_unit() * unit_chunks(kFormat), end = walk.end_unit() * unit_chunks(kFormat);
    uint32_t a[4][4];
    const char* b = nullptr;
#pragma unroll 1
    for (int chunk = begin; chunk < end;) {
        const char* scales = memory + S::kItemsAt + (at.scales.index * kTiles + warp) * S::kItemBytes + 16 * lane;
        const int end_here = min(end, (chunk / kInItem + 1) * kInItem);
        if (S::kItemBytes) mbarrier_wait(&shared.scales_full[at.scales.index], at.scales.parity);
#pragma unroll 1
        for (; chunk < end_here; chunk += 2) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (i % kInStage == 0) mbarrier_wait(&shared.stage_full[at.stage.index], at.stage.parity);
                const char* codes = memory + S::kStagesAt + (at.stage.index * kTiles + warp) * S::kStageBytes + 16 * lane;
                Weights<kFormat>(codes, scales, chunk % kInItem / 2).expand(i % kInStage, a);
                if (kInSlot == 1 || (i == 0 && chunk % kInSlot == 0)) {
                    mbarrier_wait(&shared.slot_full[at.slot.index], at.slot.parity);
                    b = memory + at.slot.index * S::kSlotBytes;
                }
                issue<N>(sum, a, b);
                wgmma_wait<0>();
                b += N * kChunk * 2;
                if (kInSlot == 1 || (i == 1 && (chunk + 2) % kInSlot == 0)) {
                    if (lane == 0) mbarrier_arrive(&shared.slot_empty[at.slot.index]);
                    at.slot.next();
                }
                if ((i + 1) % kInStage == 0) {  // all lanes have read their weights: they met at the wait
                    if (lane == 0) mbarrier_arrive(&shared.stage_empty[at.stage.index]);
                    at.stage.next();
                }
            }
        }
        if (S::kItemBytes) {
            if (lane == 0) mbarrier_arrive(&shared.scales_empty[at.scales.index]);
            at.scales.next();
        }
    }
}

// --------------------------------------------------------------------------------------------------------------------- store

// A thread holds of rows g and g + 8 of its warp's tile the tokens 2 q and 2 q + 1 of each 8.
template <int kResult, int kBuffers, int N>
__device__ __forceinline__ void store(const float (&sum)[N / 2], const Plan& plan, const Walk& walk, char* results) {
    const int t = made_here(threadIdx.x), lane = t % 32, warp = t / 32, q = lane % 4;
    const int64_t first_out = walk.first_row * int64_t(plan.out_columns) + walk.matrix * plan.out_step;
    const float* factors = plan.factors ? plan.factors + 3 * walk.matrix : nullptr;
    if constexpr (kResult == kFloats) {
        store_floats<N>(sum, plan, walk, walk.across * kTiles + warp, lane);
        return;
    }
    constexpr int kTileColumns = kResult == kSwiglu ? kRows / 2 : kRows, kVectors = kTiles * kTileColumns / 8;
    const int row = t / kVectors, vector = t % kVectors, column = walk.across * kTiles * kTileColumns + vector * 8;  // what it writes
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(plan.out) + first_out + int64_t(row) * plan.out_columns + column;
    const Swiglu swiglu(plan, factors);
    const float factor = swiglu.gate_factor;
#pragma unroll
    for (int part = 0; part < N / kOutTokens; part++) {
        __nv_bfloat16* buffer = reinterpret_cast<__nv_bfloat16*>(results + part % kBuffers * kOutBytes);
        uint32_t pairs[4][2];  // of each 8 tokens: of rows g and g + 8
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* s = sum + part * 16 + j * 4;
            if constexpr (kResult == kSwiglu) {
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int token = part * kOutTokens + 8 * j + 2 * q + e;
                    value[e] = swiglu(s[e], s[e + 2], row_weight(plan, walk, token));
                }
                pairs[j][0] = pack_bf16(value[0], value[1]);
            } else {
                pairs[j][0] = pack_bf16(s[0] * factor, s[1] * factor);
                pairs[j][1] = pack_bf16(s[2] * factor, s[3] * factor);
            }
        }
        // Turned over: rows become neighbours. The buffer, of two, was read before the last barrier but one.
        if (kBuffers == 1 && part) bar_sync(1, kMath);
        if constexpr (kResult == kSwiglu) {
            stmatrix_x4_trans(buffer + lane * kOutStride + warp * kTileColumns, {pairs[0][0], pairs[1][0], pairs[2][0], pairs[3][0]});
        } else {
#pragma unroll
            for (int j = 0; j < 4; j += 2)
                stmatrix_x4_trans(buffer + (8 * j + lane / 16 * 8 + lane % 8) * kOutStride + warp * kTileColumns + lane / 8 % 2 * 8,
                                  {pairs[j][0], pairs[j][1], pairs[j + 1][0], pairs[j + 1][1]});
        }
        bar_sync(1, kMath);
#pragma unroll
        for (int i = 0; i < kOutTokens; i += kMath / kVectors) {
            const __nv_bfloat16* from = buffer + (row + i) * kOutStride;
            uint4* place = reinterpret_cast<uint4*>(to + int64_t(part * kOutTokens + i) * plan.out_columns);
            if (row + part * kOutTokens + i >= walk.tokens) continue;
            if constexpr (kResult == kSwiglu) {
                uint32_t four[4];
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const int c = arranged_column(vector, w, plan.short_order);
                    four[w] = walk.across * kChunk + c < plan.columns ? *reinterpret_cast<const uint32_t*>(from + c) : 0;
                }
                *place = uint4{four[0], four[1], four[2], four[3]};
            } else if (column < plan.columns) {
                *place = load_16(from + vector * 8);
            }
        }
    }
    bar_sync(1, kMath);  // before the next tile's first part overwrites what the last but one left
}

// Leaves a part's sums in global memory. Whether all parts of the tile are there: then sum becomes theirs, added in the order of the parts
// (the first two in either, which are the same bits).
template <int N> __device__ __forceinline__ bool add_parts(float (&sum)[N / 2], const Plan& plan, const Walk& walk, Shared& shared) {
    const int64_t part_step = int64_t(plan.most / 8) * kMath;
    float4* parts = reinterpret_cast<float4*>(plan.partial) + walk.tile() * plan.parts * part_step + threadIdx.x;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
        __stcg(parts + walk.part() * part_step + i * kMath, float4{sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]});
    const unsigned most = plan.parts - 1;
    bar_sync(1, kMath);  // as last_to_arrive, without the warps that load
    if (threadIdx.x == 0) shared.last = atomic_inc_fenced(plan.arrivals + walk.tile(), most) == most;
    bar_sync(1, kMath);
    if (!shared.last) return false;
    const bool keeps = walk.part() < 2;  // its own sums are in front, and need not be read
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] = keeps ? sum[i] : 0.0f;
#pragma unroll 1
    for (int p = 0; p < plan.parts; p++) {
        if (keeps && p == walk.part()) continue;
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const float4 other = __ldcg(parts + p * part_step + i * kMath);
            sum[4 * i] += other.x, sum[4 * i + 1] += other.y, sum[4 * i + 2] += other.z, sum[4 * i + 3] += other.w;
        }
    }
    return true;
}

template <int kFormat, int kResult, Size kSize, int N>
__device__ __forceinline__ void tile(const Plan& plan, const Walk& walk, Shared& shared, char* memory, Rings<kFormat, kSize>& at) {
    using S = Sizes<kFormat, kSize>;
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] = 0.0f;
    if constexpr (S::kFine) multiply_narrow<kFormat, kSize, N>(sum, walk, shared, memory, at);
    else multiply<kFormat, kSize, N>(sum, walk, shared, memory, at);
    if (plan.parts > 1 && !add_parts<N>(sum, plan, walk, shared)) return;
    store<kResult, S::kBuffers, N>(sum, plan, walk, memory + S::kResultsAt);
}
#endif

template <int kFormat, int kResult, Size kSize>
__global__ void __launch_bounds__(kGemmThreads, (Sizes<kFormat, kSize>::kBlocks))
    PACKED_GEMM_KERNEL(const __grid_constant__ TensorMap map, const __grid_constant__ Plan plan) {
#ifdef HAS_WGMMA
    using S = Sizes<kFormat, kSize>;
    DYN_SMEM(char, memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory + S::kSharedAt);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kSlots; i++) mbarrier_init(&shared.slot_full[i], 1), mbarrier_init(&shared.slot_empty[i], kMath / 32);
        for (int i = 0; i < S::kStages; i++) mbarrier_init(&shared.stage_full[i], 1), mbarrier_init(&shared.stage_empty[i], kMath / 32);
        for (int i = 0; i < kScales; i++) mbarrier_init(&shared.scales_full[i], 1), mbarrier_init(&shared.scales_empty[i], kMath / 32);
        mbarrier_fence_init();
    }
    grid_dependency_launch();
    if (plan.offsets || S::kFine) grid_dependency_wait();  // else the thread that loads does so, behind the first weights
    count_tiles<kGemmThreads>(plan, shared.rows);
    if (threadIdx.x >= kMath) {
        registers_less<S::kLoadRegisters>();
        if constexpr (S::kFine) {
            if (threadIdx.x / 32 == kMath / 32) load_weights<kFormat, kSize>(plan, shared, memory);
            if (threadIdx.x == kMath + 32) load_tokens<kFormat, kSize>(map, plan, shared, memory);
        } else if (threadIdx.x == kMath) {
            load_tiles<kFormat, kSize>(map, plan, shared, memory);
        }
        return;
    }
    registers_more<S::kMathRegisters>();
    Rings<kFormat, kSize> at;
    for (Walk walk(plan, shared.rows, kTiles); walk.next();) {
        const int n = width<kSize>(walk.tokens);
        if constexpr (kSize == kWide) {
            if (n == 128) tile<kFormat, kResult, kSize, 128>(plan, walk, shared, memory, at);
            else if (n == 192) tile<kFormat, kResult, kSize, 192>(plan, walk, shared, memory, at);
            else tile<kFormat, kResult, kSize, 256>(plan, walk, shared, memory, at);
        } else {
            if (n == 32) tile<kFormat, kResult, kSize, 32>(plan, walk, shared, memory, at);
            else if (n == 64) tile<kFormat, kResult, kSize, 64>(plan, walk, shared, memory, at);
            if constexpr (S::kTokens > 64) if (n == 96) tile<kFormat, kResult, kSize, 96>(plan, walk, shared, memory, at);
            if constexpr (S::kTokens > 96) if (n == 128) tile<kFormat, kResult, kSize, 128>(plan, walk, shared, memory, at);
        }
    }
#endif
}

template <int kFormat, int kResult, Size kSize>
static cudaError_t launch(const void* x, int x_columns, const Plan& plan, int blocks, cudaStream_t stream) {
    TensorMap map;
    const cudaError_t error = make_tensor_map(&map, 2, x, x_columns, plan.rows, size_t(x_columns) * 2, kChunk, kBox, Swizzle::k128);
    if (error != cudaSuccess) return error;
    auto kernel = PACKED_GEMM_KERNEL<kFormat, kResult, kSize>;
    LAUNCH(kernel, dim3(blocks), dim3(kGemmThreads), (Sizes<kFormat, kSize>::kBytes), stream, map, plan);
    return cudaGetLastError();
}

template <int kFormat, int kResult>
static cudaError_t launch(const void* x, int x_columns, const Plan& plan, int blocks, cudaStream_t stream) {
    if (plan.most > Sizes<kFormat, kMiddle>::kTokens) return launch<kFormat, kResult, kWide>(x, x_columns, plan, blocks, stream);
    if constexpr (kResult != kRounded) {
        if (plan.offsets && plan.most <= kFewTokens) return launch_few<kFormat, kResult>(x, x_columns, plan, blocks, stream);
        if (plan.offsets && plan.most <= kNarrowTokens) return launch<kFormat, kResult, kNarrow>(x, x_columns, plan, blocks, stream);
    }
    return launch<kFormat, kResult, kMiddle>(x, x_columns, plan, blocks, stream);
}

template <int kFormat>
static cudaError_t launch(int result, const void* x, int x_columns, const Plan& plan, int blocks, cudaStream_t stream) {
    if (result == kRounded) return launch<kFormat, kRounded>(x, x_columns, plan, blocks, stream);
    if (result == kSwiglu) return launch<kFormat, kSwiglu>(x, x_columns, plan, blocks, stream);
    return launch<kFormat, kFloats>(x, x_columns, plan, blocks, stream);
}

// weights: `matrices` packed ones of one shape, one after the other. Two ways to have several:
//   offsets [matrices + 1] int32, ascending from 0 to rows: matrix e multiplies rows offsets[e] .. of x [rows, x_columns], experts;
//   without: matrix e multiplies all rows of x [rows, matrices * x_columns] at columns e * x_columns .., groups, and fills such of out.
// x bf16, arranged (arrange.cuh), x_columns a multiple of 64, the weights' columns no more. factors fp32 [matrices, 3] (of w1, w3, w2), or
// null: `factor` for all. most: tokens of a tile, a multiple of 32 up to 256. result:
//   0  out bf16 [rows, (matrices *) columns], columns a multiple of 8;
//   1  the weights are pairs (w1 with w3): out bf16 [rows, columns up to the next multiple of 64], arranged in the order of `short_order`:
//      silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weights [rows] fp32 (null: 1);
//   2  out fp32 [rows, (matrices *) columns].
// parts: of K, up to its units, which are 256 columns (of bf16 weights 128). Of more than one, partial: a workspace of parts * most * 128
// fp32 values for each tile of out (128 packed rows of a matrix by up to `most` tokens); arrivals: a counter for each of them, 0 before and
// behind the launch.
template <int kFormat>
static cudaError_t packed_gemm(const void* x, const void* weights, const float* factors, const int* offsets, const float* row_weights,
                               void* out, float* partial, int* arrivals, int rows, int columns, int x_columns, int matrices, int result,
                               int most, int parts, int short_order, int blocks, float factor, float limit, cudaStream_t stream) {
#if !defined(DSV4_EMULATOR) && defined(__CUDA_ARCH_LIST__)
    constexpr int architectures[] = {__CUDA_ARCH_LIST__};  // one: build.py compiles for one
    if (architectures[0] != 900) return cudaErrorNotSupported;
#endif
    if (rows < 1 || columns < 1 || x_columns < 1 || x_columns % kChunk || matrices < 1 || matrices > kMaxMatrices || most < kBox ||
        most > kMaxN || most % kBox || (columns % 8 && result != kFloats) || result < kRounded || result > kFloats ||
        (offsets && parts > 1) || (result == kSwiglu && !offsets && matrices > 1))
        return cudaErrorInvalidValue;
    const int tile_rows = result == kSwiglu ? kRows / 2 : kRows, width = offsets ? x_columns : matrices * x_columns;
    Plan plan = {};
    plan.weights = static_cast<const char*>(weights), plan.factors = factors, plan.row_weights = row_weights, plan.offsets = offsets;
    plan.out = out, plan.rows = rows, plan.columns = columns, plan.matrices = matrices, plan.most = most;
    plan.tiles = (columns + tile_rows - 1) / tile_rows, plan.items = (x_columns + item_columns(kFormat) - 1) / item_columns(kFormat);
    plan.partial = partial, plan.arrivals = reinterpret_cast<unsigned*>(arrivals), plan.parts = parts;
    plan.units = plan.items * (item_chunks(kFormat) / unit_chunks(kFormat));
    if (parts < 1 || parts > plan.units || (parts > 1 && (!partial || !arrivals))) return cudaErrorInvalidValue;
    plan.matrix_bytes = int64_t(plan.tiles) * plan.items * item_bytes(kFormat);
    plan.x_step = offsets ? 0 : x_columns, plan.out_step = offsets ? 0 : columns;
    plan.out_columns = result == kSwiglu ? (columns + kChunk - 1) / kChunk * kChunk : offsets ? columns : matrices * columns;
    plan.short_order = short_order, plan.factor = factor, plan.limit = limit;
    return launch<kFormat>(result, x, width, plan, blocks, stream);
}
