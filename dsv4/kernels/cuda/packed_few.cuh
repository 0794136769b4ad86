// The kernel of packed_gemm.cuh for routed experts with tiles of up to 32 tokens, which should take no longer than their weights take to
// come from memory. wgmma with weights from registers waits for the product before; here a warp multiplies two packed tiles (32 rows) with
// mma.sync. Its weights are expanded into the registers of operand A, as in the other kernels; the tokens are operand B, 8, 16, 24 or 32 of
// them, read from shared memory once for both tiles. No product waits for the one before but where they add to the same sums, and those of
// 32 tokens and 32 rows are eight chains. One chain a sum, in the order of the columns, as wgmma has it: the bits are the same (on an H200
// all hidden values and 69 million sums of Flash's and Pro's experts with 1,024 tokens).
//
// A block is kFewWarps warps that multiply, 32 rows each, and a thread that loads; one an SM. A stage of the ring is 64 or 128 columns of
// the weights of all of the block's tiles (1 KB a tile, of bf16 2), one tensor copy, and of the tokens, in eights; an item's scales come
// with the first of its stages, to one of two places in turn. So a warp waits once and arrives once for 128 columns of FP4. Copies by a
// warp that loads, a tile each, would be 500 instructions a stage by count, for which its scheduler has 1,940 cycles; other warps take
// 1,380 of these.
//
// ns of an SM for 64 columns x 128 rows of NVFP4 (4.6 KB, for which DRAM at 4.3 TB/s needs 141), measured on an H200 at 1.7 GHz with so
// many tokens for every expert, w1 with w3 and w2 of Flash and Pro: 144 to 157 with 8, 149 to 172 with 16, 190 to 195 with 24, 219 to 235
// with 32, where the narrow kernel of packed_gemm.cuh takes 250 to 279 with any of them. With 8 it is DRAM (119 to 131 with weights from
// L2); with 24 and 32 the products, then the expansion: of 32 tokens 150 to 183 without most products, 190 to 214 without the expansion, no
// less with weights from L2 or without loading tokens. Two tiles of 32 are slower than one of 64 in the narrow kernel (445 to 480 against
// 318 to 331), and so is this kernel with 64 tokens a tile and 12 warps (393 to 412). Other forms, with 1,024 tokens, were between 2 %
// faster and 7 % slower: 12 warps; 8 warps, two blocks an SM; 8 warps of 4 tiles; 3 stages (docs/measurements.md).
#pragma once
#include "packed_plan.cuh"

constexpr int kFewTokens = 32;                                  // of a tile
constexpr int kFewWarps = 16, kWarpTiles = 2;                   // that multiply; packed tiles of each
constexpr int kFewMath = kFewWarps * 32, kFewThreads = kFewMath + 128, kFewTiles = kFewWarps * kWarpTiles;
constexpr int kFewMathRegisters = 112, kFewLoadRegisters = 32;
constexpr int kFewBox = 8;                                      // tokens of a tensor copy and of a product

template <int kFormat> struct FewSizes {
    static constexpr int kStages = kFormat == kBf16 ? 3 : 4;
    static constexpr int kChunks = kFormat == kNvfp4 || kFormat == kMxfp4 ? 2 : 1;  // of a stage
    static constexpr int kItemStages = item_chunks(kFormat) / kChunks;
    static constexpr int kCodeBytes = kCodes / kItemStages, kScaleBytes = item_bytes(kFormat) - kCodes;  // a tile's, of a stage; of an item
    static constexpr int kTokenBytes = kFewTokens * kChunk * 2, kCodesAt = kChunks * kTokenBytes;        // of a chunk; in a stage
    static constexpr int kStageBytes = kCodesAt + kFewTiles * kCodeBytes;
    static constexpr int kScalesAt = kStages * kStageBytes, kSharedAt = kScalesAt + 2 * kFewTiles * kScaleBytes;

    struct Shared {
        uint64_t full[kStages], empty[kStages];
        Rows rows;
    };
    static constexpr int kBytes = kSharedAt + sizeof(Shared);
    static_assert(kBytes <= 227 << 10, "memory");
    // Where a stage is free, the item before its own is not read any more but for its last kStages - 1 stages.
    static_assert(!kScaleBytes || kStages <= kItemStages + 1, "an item's scales are read when the next but one comes");
};

// Of x; of the weights, a packed tile a row of 8-byte words: a stage's codes and an item's scales of all of a block's tiles.
struct FewMaps {
    TensorMap tokens, codes, scales;
};

// One thread loads.
template <int kFormat>
__device__ __forceinline__ void load_few(const FewMaps& maps, const Plan& plan, typename FewSizes<kFormat>::Shared& shared, char* memory) {
    using S = FewSizes<kFormat>;
    Ring<S::kStages> at;
    at.parity = 1;
    int place = 0;  // of the scales
    for (Walk walk(plan, shared.rows, kFewTiles); walk.next();) {
        const int boxes = (walk.tokens + kFewBox - 1) / kFewBox, bytes = boxes * S::kChunks * kFewBox * kChunk * 2;
        const int tile = walk.matrix * plan.tiles + walk.across * kFewTiles;  // beyond a matrix' last one is any: not stored
#pragma unroll 1
        for (int stage = 0; stage < plan.items * S::kItemStages; stage++) {
            const int in_item = stage % S::kItemStages, item = stage / S::kItemStages * item_bytes(kFormat);
            uint64_t* full = &shared.full[at.index];
            char* to = memory + at.index * S::kStageBytes;
            mbarrier_wait(&shared.empty[at.index], at.parity);
            mbarrier_expect(full, bytes + kFewTiles * (S::kCodeBytes + (in_item ? 0 : S::kScaleBytes)));
            tensor_load(to + S::kCodesAt, &maps.codes, (item + in_item * S::kCodeBytes) / 8, tile, full);
            if (S::kScaleBytes && in_item == 0) {
                tensor_load(memory + S::kScalesAt + place * kFewTiles * S::kScaleBytes, &maps.scales, (item + kCodes) / 8, tile, full);
                place ^= 1;
            }
#pragma unroll 1
            for (int i = 0; i < boxes; i++)
#pragma unroll
                for (int c = 0; c < S::kChunks; c++)
                    tensor_load(to + c * S::kTokenBytes + i * kFewBox * kChunk * 2, &maps.tokens, (stage * S::kChunks + c) * kChunk,
                                walk.first_row + i * kFewBox, full);
            at.next();
        }
    }
}

// sum += two tiles' 64 columns with those of N tokens at `tokens`, where the lane's first row of ldmatrix is.
template <int kFormat, int N>
__device__ __forceinline__ void multiply_chunk(float (&sum)[kWarpTiles][N / 8][4], const Weights<kFormat> (&weights)[kWarpTiles], int v,
                                               const char* tokens, int place) {
    uint32_t a[kWarpTiles][4][4];
#pragma unroll
    for (int t = 0; t < kWarpTiles; t++) weights[t].expand(v, a[t]);
#pragma unroll
    for (int half = 0; half < 2; half++) {  // 32 columns, two products
        uint32_t b[N / 8][4];
#pragma unroll
        for (int j = 0; j < N / 8; j++) ldmatrix_x4(b[j], tokens + (place ^ 64 * half) + j * 8 * kChunk * 2);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int t = 0; t < kWarpTiles; t++)
#pragma unroll
                for (int j = 0; j < N / 8; j++) mma_bf16(sum[t][j], a[t][2 * half + i], {b[j][2 * i], b[j][2 * i + 1]});
    }
}

// A lane has of each 8 tokens those of number 2 q and 2 q + 1, and of a tile w1's row g and w3's: column g of hidden's 8.
template <int N>
__device__ __forceinline__ void store_hidden(const float (&sum)[kWarpTiles][N / 8][4], const Plan& plan, const Walk& walk, int first_tile,
                                             int lane) {
    const int g = lane / 4, q = lane % 4;
    const Swiglu swiglu(plan, plan.factors ? plan.factors + 3 * walk.matrix : nullptr);
    float weight[N / 8][2];
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) weight[j][e] = row_weight(plan, walk, 8 * j + 2 * q + e);
#pragma unroll
    for (int t = 0; t < kWarpTiles; t++) {
        const int column = (first_tile + t) * (kRows / 2) + g;
        if (column >= plan.out_columns) continue;
        __nv_bfloat16* to = static_cast<__nv_bfloat16*>(plan.out) + int64_t(walk.first_row + 2 * q) * plan.out_columns +
                            column / kChunk * kChunk + arranged_place(column % kChunk, plan.short_order);
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float value = swiglu(sum[t][j][e], sum[t][j][e + 2], weight[j][e]);
                if (8 * j + 2 * q + e < walk.tokens)
                    to[(8 * j + e) * int64_t(plan.out_columns)] = __float2bfloat16_rn(column < plan.columns ? value : 0.0f);
            }
    }
}

template <int kFormat, int kResult, int N>
__device__ __forceinline__ void tile_of_few(const Plan& plan, const Walk& walk, typename FewSizes<kFormat>::Shared& shared, char* memory,
                                            Ring<FewSizes<kFormat>::kStages>& at, int& scales_place) {
    using S = FewSizes<kFormat>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int place = lane % 8 * kChunk * 2 + ((lane / 8 ^ lane % 8) * 16);  // row `lane % 8`, its 16 bytes number lane / 8, swizzled
    const char* codes = memory + S::kCodesAt + warp * kWarpTiles * S::kCodeBytes + 16 * lane;
    const char* scales = memory + S::kScalesAt + warp * kWarpTiles * S::kScaleBytes + 16 * lane;
    float sum[kWarpTiles][N / 8][4] = {};
#pragma unroll 1
    for (int stage = 0; stage < plan.items * S::kItemStages; stage++) {
        const char *tokens = memory + at.index * S::kStageBytes, *codes_here = codes + at.index * S::kStageBytes;
        const char* scales_here = scales + scales_place * kFewTiles * S::kScaleBytes;
        const int pair = stage % S::kItemStages * S::kChunks / 2;
        mbarrier_wait(&shared.full[at.index], at.parity);
        const Weights<kFormat> weights[kWarpTiles] = {{codes_here, scales_here, pair},
                                                       {codes_here + S::kCodeBytes, scales_here + S::kScaleBytes, pair}};
#pragma unroll
        for (int c = 0; c < S::kChunks; c++) multiply_chunk<kFormat, N>(sum, weights, c, tokens + c * S::kTokenBytes, place);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.empty[at.index]);
        at.next();
        if (stage % S::kItemStages == S::kItemStages - 1) scales_place ^= 1;
    }
    const int first_tile = walk.across * kFewTiles + warp * kWarpTiles;
    if constexpr (kResult == kSwiglu) {
        store_hidden<N>(sum, plan, walk, first_tile, lane);
    } else {
#pragma unroll
        for (int t = 0; t < kWarpTiles; t++) store_floats<N>(sum[t][0], plan, walk, first_tile + t, lane);
    }
}

template <int kFormat, int kResult>
__global__ void __launch_bounds__(kFewThreads, 1)
    PACKED_FEW_KERNEL(const __grid_constant__ FewMaps maps, const __grid_constant__ Plan plan) {
#ifdef HAS_WGMMA
    using S = FewSizes<kFormat>;
    DYN_SMEM(char, memory);
    auto& shared = *reinterpret_cast<typename S::Shared*>(memory + S::kSharedAt);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kStages; i++) mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], kFewWarps);
        mbarrier_fence_init();
    }
    grid_dependency_launch();
    grid_dependency_wait();
    count_tiles<kFewThreads>(plan, shared.rows);
    if (threadIdx.x >= kFewMath) {
        registers_less<kFewLoadRegisters>();
        if (threadIdx.x == kFewMath) load_few<kFormat>(maps, plan, shared, memory);
        return;
    }
    registers_more<kFewMathRegisters>();
    Ring<S::kStages> at;
    int scales_place = 0;
    for (Walk walk(plan, shared.rows, kFewTiles); walk.next();) {
        if (walk.tokens <= 8) tile_of_few<kFormat, kResult, 8>(plan, walk, shared, memory, at, scales_place);
        else if (walk.tokens <= 16) tile_of_few<kFormat, kResult, 16>(plan, walk, shared, memory, at, scales_place);
        else if (walk.tokens <= 24) tile_of_few<kFormat, kResult, 24>(plan, walk, shared, memory, at, scales_place);
        else tile_of_few<kFormat, kResult, 32>(plan, walk, shared, memory, at, scales_place);
    }
#endif
}

template <int kFormat, int kResult>
static cudaError_t launch_few(const void* x, int x_columns, const Plan& plan, int blocks, cudaStream_t stream) {
    using S = FewSizes<kFormat>;
    FewMaps maps;
    const size_t tile = size_t(plan.items) * item_bytes(kFormat);
    const unsigned words = unsigned(tile / 8), tiles = unsigned(plan.matrices) * plan.tiles;
    cudaError_t error = make_tensor_map(&maps.tokens, 2, x, x_columns, plan.rows, size_t(x_columns) * 2, kChunk, kFewBox, Swizzle::k128);
    if (error == cudaSuccess)
        error = make_tensor_map(&maps.codes, 8, plan.weights, words, tiles, tile, S::kCodeBytes / 8, kFewTiles, Swizzle::kNone);
    if (error == cudaSuccess && S::kScaleBytes)
        error = make_tensor_map(&maps.scales, 8, plan.weights, words, tiles, tile, S::kScaleBytes / 8, kFewTiles, Swizzle::kNone);
    if (error != cudaSuccess) return error;
    auto kernel = PACKED_FEW_KERNEL<kFormat, kResult>;
    LAUNCH(kernel, dim3(blocks), dim3(kFewThreads), FewSizes<kFormat>::kBytes, stream, maps, plan);
    return cudaGetLastError();
}
