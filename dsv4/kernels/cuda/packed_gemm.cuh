// y = x W^T for any number of tokens and the weights as decode packs them (packing.py), so that one copy of the weights serves both; W is
// one matrix, or one an expert, whose rows of x lie together. Hopper's tensor cores (wgmma): sm_90a only, elsewhere the functions return
// cudaErrorNotSupported. packed_gemm_*.cu compile it, a format each.
//
// The weights are the product's 64-row operand A, from registers, the tokens operand B, from shared memory. A packed tile of 16 rows is one
// warp's part of A, and a lane's bytes are its own: 16 codes of a row become 8 pairs of bf16, exactly, with expand_e2m1 and the scales of
// stream.cuh. A lane holds 16 consecutive columns where the instruction wants 2 of each 8, so x must come in that order of columns in each
// 64 (arrange.cuh): the kernel that gathers the rows writes it (arrange_tokens), for w2 the epilogue of w1 and w3.
//
// A block is four warpgroups that multiply, 64 rows each, and a thread that loads; one an SM. Its tile is 256 rows by up to 128 tokens, of
// which the product is as wide as there are, in eights up to 32, in sixteens up to 96. A stage of the ring is 128 columns of FP4 (64 of FP8
// and bf16): one tensor copy of the codes of all 16 packed tiles, one of the tokens for each 64 columns; as many stages as fit, of FP4 with
// 128 tokens 4. An item's scales come with the first of its stages, into a ring of their own. A warpgroup expands 64 columns into 16
// registers, starts their four products and waits for these; meanwhile the other three expand or multiply. With all tokens a tile may have,
// `most`, a token's result has the same bits: one chain of products a sum, in the order of the columns.
//
// Blocks go from tile to tile until none is left; the next tile's copies come while one is stored. Tiles go down the tokens first (up to
// kBand of them, then the next rows), so that neighbours in time share weights. An expert without tokens has no tile.
//
// Where a weight has few rows, its tiles are cut along K into two or four parts (prompts.py: how many depends on the weight alone, as the
// order of additions does), one for each block of a cluster. Behind the products each sends every other one that one's share of the tokens,
// a thread to the same thread, adds up its own share in the order of the parts, rounds and stores it. A warp waits for the same warps of
// the other blocks alone. A block loads its own share first, the next block's behind it, and so on: so a share's registers are known.
//
// Instructions a warp for 64 columns of NVFP4: 75, of which 48 expand, so a scheduler with its four warps has 300 for 256 rows; the tensor
// cores take 128 cycles for 32 tokens, 512 for 128. Measured on an H200, cycles of 64 columns x 256 rows at 1.7 GHz, by dense products: 490
// with 16 tokens, 580 with 32, 740 with 64, 930 with 96, 1,170 with 128, and 93 to 101 % of torch's bf16 rate with 4,096 tokens where a
// weight has 1,024 rows or more. Of experts, whose weights come from DRAM (480 cycles): 540 with 8 tokens, 640 with 24, 920 with 64, 1,320
// with 128. So the warpgroups expand at the same time and multiply at the same time; having them multiply in turns, by named barriers, was
// slower in each of eight forms. Two warpgroups had 1,310 for 128 rows and 256 tokens, and two such blocks an SM 1,140 for 128 rows and 64
// tokens each: two warpgroups hide less. A box of tokens is as high as the product is wide: boxes of 16 and of 8 rows took 2 and 35 %
// longer than of 32, with 128 tokens. (docs/measurements.md)
//
// FP8: the block scale multiplies the weights in bf16, which is exact if it has up to 4 significant bits (prompts.takes); decode applies it
// to the sums of 128 columns, for which there are no registers here.
#pragma once
#include "arrange.cuh"
#include "stream.cuh"
#include "tensor_map.cuh"

#if defined(DSV4_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA
#endif

constexpr int kMath = 512, kGemmThreads = kMath + 128;           // that multiply; and a warpgroup of which one thread loads
constexpr int kMathRegisters = 112, kLoadRegisters = 32;         // of a thread
constexpr int kTiles = kMath / 32, kBlockRows = kTiles * kRows;  // packed tiles of a block, one a warp
constexpr int kMost = 128;                                       // tokens of a tile
constexpr int kMaxStages = 8, kScales = 2;                       // of an item's scales: on their way or in use
constexpr int kTilesAhead = 16;                                  // the one that is stored, those of all stages behind it, the end
constexpr int kBand = 8;                                         // tiles of tokens before the next rows
constexpr int kMaxMatrices = 384;
static_assert(kMath * kMathRegisters + 128 * kLoadRegisters <= 65536 / kGemmThreads / 8 * 8 * kGemmThreads, "registers");

enum Result { kRounded = 0, kSwiglu = 1, kFloats = 2 };

struct Plan {
    const float *factors, *row_weights;  // factors [matrices, 3] or null: `factor`
    const int* offsets;                  // [matrices + 1], or null: all have all rows
    void* out;
    int parts, units;                    // of K: 1, 2 or 4; what is never parted
    int rows, columns, matrices, tiles, items, most;  // columns: of one matrix' out; tiles: packed ones; most: tokens of a tile
    int stages, stage_bytes;
    int x_columns, x_width;              // of a matrix' weights, in 64s; of x
    int x_step, out_step, out_columns;   // from one matrix' columns to the next one's; of a row of out
    bool short_order;                    // of hidden's columns (arrange.cuh)
    float factor, limit;
};

// The columns of the product for so many tokens, and their number: 8, 16, 24, 32, 48, 64, 80, 96, 128; of parts 32, 64, 96, 128, shares of
// eights. With 112 as well ptxas ran out of registers ("insufficient register resources": it adds up those of all products of a kernel that
// may be on their way around a loop) and made every wgmma wait for the one before.
__host__ __device__ constexpr int width(int tokens, int parts = 1) {
    const int step = parts > 1 || tokens > 96 ? 32 : tokens <= 32 ? 8 : 16;
    return (tokens + step - 1) / step * step;
}
__host__ __device__ constexpr int width_number(int width) { return width <= 32 ? width / 8 - 1 : width <= 96 ? width / 16 + 1 : 8; }
constexpr int kNumbers = width_number(kMost) + 1;

// Of x, a box for each width; of the weights, a packed tile a row of 8-byte words: a stage's codes and an item's scales of a block's tiles.
struct Maps {
    TensorMap tokens[kNumbers], codes, scales;
};

// A format's stages.
template <int kFormat> struct Stage {
    static constexpr int kChunks = kFormat == kNvfp4 || kFormat == kMxfp4 ? 2 : 1;  // of 64 columns
    static constexpr int kInItem = item_columns(kFormat) / (kChunks * kChunk), kInUnit = kInItem < 4 / kChunks ? kInItem : 4 / kChunks;
    static constexpr int kCodeBytes = kCodes / kInItem, kScaleBytes = item_bytes(kFormat) - kCodes;  // a tile's, of a stage; of an item
};

template <int kStages> struct Ring {  // a place in a ring of `kStages`, or of as many as next() is told
    int index = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next(int stages = kStages) {
        if (++index == stages) index = 0, parity ^= 1;
    }
};

// Where the matrices' rows of x and tiles of tokens are; in shared memory.
struct Rows {
    int begin[kMaxMatrices], end[kMaxMatrices], first[kMaxMatrices + 1];  // a matrix' rows of x; its first tile of tokens
    int sums[kGemmThreads / 32];                                          // of a warp's
};

// Of out: the thread that loads says so to the others.
struct Tile {
    int matrix, first_row, tokens, across;  // tokens: 0 behind the last one; across: which rows of the matrix
};

struct alignas(16) Shared {
    uint64_t full[kMaxStages], empty[kMaxStages], scales_empty[kScales];
    uint64_t sums_full[kMath / 32], sums_empty[kMath / 32];  // a warp's: other blocks' sums are here; they have read what they got
    Rows rows;
    Tile tiles[kTilesAhead];
};
constexpr int kDynamicBytes = 227 << 10;

// The tiles of this block, or of its cluster, one after the other.
template <int kParts> struct Walk {
    const Plan& plan;
    const Rows& rows;
    int t, step, across_all;
    Tile tile = {};

    __device__ __forceinline__ Walk(const Plan& plan, const Rows& rows)
        : plan(plan), rows(rows), t(int(blockIdx.x) / kParts), step(int(gridDim.x) / kParts),
          across_all((plan.tiles + kTiles - 1) / kTiles) {
        t -= step;
    }

    __device__ __forceinline__ bool next() {
        t += step;
        if (t >= rows.first[plan.matrices] * across_all) return false;
        while (t >= rows.first[tile.matrix + 1] * across_all) tile.matrix++;
        int i = t - rows.first[tile.matrix] * across_all;
        const int down_all = rows.first[tile.matrix + 1] - rows.first[tile.matrix], band = i / (kBand * across_all);
        i -= band * kBand * across_all;
        const int here = min(kBand, down_all - band * kBand), down = band * kBand + i % here;
        tile.across = i / here;
        tile.first_row = rows.begin[tile.matrix] + down * plan.most;
        tile.tokens = min(plan.most, rows.end[tile.matrix] - tile.first_row);
        return true;
    }
};

// Which part of K is this block's, its number in the cluster; and where part number `part` begins, in units.
template <int kParts> __device__ __forceinline__ int my_part() { return int(blockIdx.x) % kParts; }
template <int kParts> __device__ __forceinline__ int first_unit(const Plan& plan, int part) { return plan.units * part / kParts; }

// Fills `rows`, by all threads of the block.
__device__ __forceinline__ void count_tiles(const Plan& plan, Rows& rows) {
    constexpr int kEach = (kMaxMatrices + kGemmThreads - 1) / kGemmThreads;  // consecutive matrices of a thread
    const int t = threadIdx.x, lane = t % 32;
    int mine[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
        const int matrix = t * kEach + i;
        int begin = 0, end = 0;
        if (matrix < plan.matrices) {
            begin = plan.offsets ? plan.offsets[matrix] : 0, end = plan.offsets ? plan.offsets[matrix + 1] : plan.rows;
            rows.begin[matrix] = begin, rows.end[matrix] = end;
        }
        mine[i] = (end - begin + plan.most - 1) / plan.most, sum += mine[i];
    }
    int before = -sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) rows.sums[t / 32] = sum;
    __syncthreads();
    for (int i = 0; i < t / 32; i++) sum += rows.sums[i];
    before += sum;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
        const int matrix = t * kEach + i;
        if (matrix < plan.matrices) rows.first[matrix] = before;
        before += mine[i];
        if (matrix == plan.matrices - 1) rows.first[matrix + 1] = before;
    }
    __syncthreads();
}

// A lane's part of 128 columns, number `pair` of the item, on its way to operand A; `mine` is its first 16 bytes of them, `scales` of the
// item's. expand: the first or second 64 columns (v), four operands of 16.
template <int kFormat> struct Weights {  // FP4: 16 columns of two rows are two words each, for each v
    uint4 low, high;
    uint32_t four;

    __device__ __forceinline__ Weights(const char* mine, const char* scales, int pair) {
        low = load_16(mine), high = load_16(mine + 512);
        const int lane = threadIdx.x % 32;
        four = *reinterpret_cast<const uint32_t*>(scales + 4 * pair - (kFormat == kNvfp4 ? 0 : 16 * (lane - lane / 2)));
    }
    __device__ __forceinline__ void expand(int v, uint32_t (&a)[4][4]) const {
        const uint32_t low_scale = scale_pair<kFormat>(four, 2 * v), high_scale = scale_pair<kFormat>(four, 2 * v + 1);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint32_t l[4], h[4];
            expand_e2m1(word(low, 2 * v + p), l);
            expand_e2m1(word(high, 2 * v + p), h);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[2 * p + i / 2][i % 2 * 2] = mul_bf16x2(l[i], low_scale);
                a[2 * p + i / 2][i % 2 * 2 + 1] = mul_bf16x2(h[i], high_scale);
            }
        }
    }
};
template <> struct Weights<kFp8> {  // 16 columns of two rows are four words each, for each v
    const char* mine;
    uint32_t scale[2];  // of rows g and g + 8, as two bf16

    __device__ __forceinline__ Weights(const char* mine, const char* scales, int pair) : mine(mine) {
        scales = scales - 16 * (threadIdx.x % 32) + 8 * pair;
#pragma unroll
        for (int half = 0; half < 2; half++) scale[half] = byte_perm(*reinterpret_cast<const uint32_t*>(scales + 4 * half), 0, 0x3232);
    }
    __device__ __forceinline__ void expand(int v, uint32_t (&a)[4][4]) const {
        constexpr uint32_t k2to120 = 0x7B807B80u;  // as two bf16; times a scale it might be too large for one
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 codes = load_16(mine + 1024 * v + 512 * half);
#pragma unroll
            for (int p = 0; p < 4; p++) {
                uint32_t pair[2];
                expand_e4m3(word(codes, p), pair);
#pragma unroll
                for (int i = 0; i < 2; i++) a[p][2 * i + half] = mul_bf16x2(mul_bf16x2(pair[i], k2to120), scale[half]);
            }
        }
    }
};
template <> struct Weights<kBf16> {  // 16 bytes are an operand
    const char* mine;

    __device__ __forceinline__ Weights(const char* mine, const char*, int) : mine(mine) {}
    __device__ __forceinline__ void expand(int v, uint32_t (&a)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 operand = load_16(mine + 2048 * v + 512 * i);
            a[i][0] = operand.x, a[i][1] = operand.y, a[i][2] = operand.z, a[i][3] = operand.w;
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------- load

// One thread: every stage of every tile of this block, as soon as there is room.
template <int kFormat, int kParts>
__device__ __forceinline__ void load_tiles(const Maps& maps, const Plan& plan, Shared& shared, char* memory) {
    using S = Stage<kFormat>;
    char* scales_at = memory + plan.stages * plan.stage_bytes;
    Ring<kMaxStages> at;
    Ring<kScales> scales;
    at.parity = scales.parity = 1;  // a new barrier counts as having completed the phase of parity 1: the rings are empty
    bool waits = !plan.offsets;     // for the kernel before this one; the block's other threads wait for the tokens
    const int part = my_part<kParts>();
    const int begin = first_unit<kParts>(plan, part) * S::kInUnit, end = first_unit<kParts>(plan, part + 1) * S::kInUnit;
    int place = 0;
    for (Walk<kParts> walk(plan, shared.rows); walk.next(); place = (place + 1) % kTilesAhead) {
        const Tile& tile = walk.tile;
        const int n = width(tile.tokens, kParts), chunk_bytes = n * kChunk * 2, column = tile.matrix * plan.x_step;
        const int packed = tile.matrix * plan.tiles + tile.across * kTiles;  // beyond a matrix' last one is any: not stored
        const int share = n / kParts;
        const TensorMap* tokens = &maps.tokens[width_number(share)];
#pragma unroll 1
        for (int stage = begin; stage < end; stage++) {
            const int in_item = stage % S::kInItem, word = stage / S::kInItem * (item_bytes(kFormat) / 8);
            const bool scaled = S::kScaleBytes && (in_item == 0 || stage == begin);
            uint64_t* full = &shared.full[at.index];
            char* to = memory + at.index * plan.stage_bytes;
            if (scaled) mbarrier_wait(&shared.scales_empty[scales.index], scales.parity);
            mbarrier_wait(&shared.empty[at.index], at.parity);
            if (stage == begin) shared.tiles[place] = tile;
            mbarrier_expect(full, S::kChunks * chunk_bytes + kTiles * (S::kCodeBytes + (scaled ? S::kScaleBytes : 0)));
            tensor_load(to, &maps.codes, word + in_item * (S::kCodeBytes / 8), packed, full);
            if (scaled) {
                tensor_load(scales_at + scales.index * kTiles * S::kScaleBytes, &maps.scales, word + kCodes / 8, packed, full);
                scales.next();
            }
            if (waits) grid_dependency_wait(), waits = false;
            to += kTiles * S::kCodeBytes;
#pragma unroll
            for (int c = 0; c < S::kChunks; c++) {
                const int chunk = (stage * S::kChunks + c) * kChunk;  // behind the last one zeros, not the next matrix' columns
#pragma unroll
                for (int i = 0; i < kParts; i++)
                    tensor_load(to + c * chunk_bytes + i * share * kChunk * 2, tokens,
                                chunk < plan.x_columns ? column + chunk : plan.x_width, tile.first_row + (part + i) % kParts * share, full);
            }
            at.next(plan.stages);
        }
    }
    mbarrier_wait(&shared.empty[at.index], at.parity);
    shared.tiles[place].tokens = 0;
    mbarrier_arrive(&shared.full[at.index]);
}

// ------------------------------------------------------------------------------------------------------------------ multiply

#ifdef HAS_WGMMA

// sum += the products over this block's columns of a tile of N tokens.
template <int kFormat, int kParts, int N>
__device__ __forceinline__ void multiply(float (&sum)[N / 2], const Plan& plan, Shared& shared, const char* memory, Ring<kMaxStages>& at,
                                         Ring<kScales>& scales) {
    using S = Stage<kFormat>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = my_part<kParts>();
    const int begin = first_unit<kParts>(plan, part) * S::kInUnit, end = first_unit<kParts>(plan, part + 1) * S::kInUnit;
    const char* my_scales = memory + plan.stages * plan.stage_bytes + warp * S::kScaleBytes + 16 * lane;
    uint32_t a[4][4];
#pragma unroll 1
    for (int stage = begin; stage < end; stage++) {
        const char *here = memory + at.index * plan.stage_bytes, *tokens = here + kTiles * S::kCodeBytes;
        const int in_item = stage % S::kInItem;
        mbarrier_wait(&shared.full[at.index], at.parity);
        // FP4: the pair of chunks; of the others a pair's first or second one.
        const Weights<kFormat> weights(here + warp * S::kCodeBytes + 16 * lane, my_scales + scales.index * kTiles * S::kScaleBytes,
                                       in_item * S::kChunks / 2);
#pragma unroll
        for (int c = 0; c < S::kChunks; c++) {
            weights.expand(c, a);
            const uint64_t operand = wgmma_operand(tokens + c * N * kChunk * 2, Swizzle::k128, 8 * kChunk * 2);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) wgmma_bf16(sum, a[i], operand + 2 * i);
            wgmma_commit();
            wgmma_wait<0>();
        }
        if (lane == 0) mbarrier_arrive(&shared.empty[at.index]);  // all lanes have read their weights: they met at the wait
        at.next(plan.stages);
        if (S::kScaleBytes && (in_item == S::kInItem - 1 || stage == end - 1)) {
            if (lane == 0) mbarrier_arrive(&shared.scales_empty[scales.index]);
            scales.next();
        }
    }
}

// --------------------------------------------------------------------------------------------------------------------- store

// A hidden value.
struct Swiglu {
    float gate_factor, up_factor, limit;

    __device__ __forceinline__ Swiglu(const Plan& plan, const float* factors)
        : gate_factor(factors ? factors[0] : plan.factor), up_factor(factors ? factors[1] : plan.factor), limit(plan.limit) {}
    __device__ __forceinline__ float operator()(float gate, float up, float weight) const {
        gate *= gate_factor, up *= up_factor;
        gate = gate > limit ? limit : gate;  // from above only; NaN stays
        up = up > limit ? limit : up < -limit ? -limit : up;
        return __fdividef(gate, 1.0f + __expf(-gate)) * up * weight;
    }
};

// The routing weight of the tile's token number `token`.
__device__ __forceinline__ float row_weight(const Plan& plan, const Tile& tile, int token) {
    return plan.row_weights && token < tile.tokens ? plan.row_weights[tile.first_row + token] : 1.0f;
}

// A lane has of rows g and g + 8 of its warp's packed tile the tokens 2 q and 2 q + 1 of each 8. fp32: 32 bytes of a token at a time,
// straight from the registers. bf16: turned over first, so that a lane has two neighbouring columns of token g.
template <int kResult, int N> __device__ __forceinline__ void store(const float* sum, const Plan& plan, const Tile& tile) {
    const int t = made_here(threadIdx.x), lane = t % 32, g = lane / 4, q = lane % 4, packed = tile.across * kTiles + t / 32;
    const float* factors = plan.factors ? plan.factors + 3 * tile.matrix : nullptr;
    const int64_t step = plan.out_columns, first = tile.first_row * step + tile.matrix * plan.out_step;
    if constexpr (kResult == kFloats) {
        const float factor = factors ? factors[2] : plan.factor;
        const int column = packed * kRows + g;
        float* to = static_cast<float*>(plan.out) + first + 2 * q * step + column;
        int left = tile.tokens - 2 * q;
#pragma unroll
        for (int i = 0; i < N / 2; i += 4, to += 8 * step, left -= 8) {
            if (column < plan.columns && left > 0) to[0] = sum[i] * factor;
            if (column < plan.columns && left > 1) to[step] = sum[i + 1] * factor;
            if (column + 8 < plan.columns && left > 0) to[8] = sum[i + 2] * factor;
            if (column + 8 < plan.columns && left > 1) to[step + 8] = sum[i + 3] * factor;
        }
    } else {
        const Swiglu swiglu(plan, factors);
        constexpr int kTileColumns = kResult == kSwiglu ? kRows / 2 : kRows;
        const int column = packed * kTileColumns + 2 * q, limit = kResult == kSwiglu ? plan.out_columns : plan.columns;
        const int place = kResult == kSwiglu ? column / kChunk * kChunk + arranged_place(column % kChunk, plan.short_order) : column;
        __nv_bfloat16* to = static_cast<__nv_bfloat16*>(plan.out) + first + g * step + place;
#pragma unroll
        for (int i = 0; i < N / 2; i += 4, to += 8 * step) {
            const bool here = 2 * i + g < tile.tokens;
            if constexpr (kResult == kSwiglu) {
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++) value[e] = swiglu(sum[i + e], sum[i + e + 2], row_weight(plan, tile, 2 * i + 2 * q + e));
                const uint32_t pair = movmatrix_trans(pack_bf16(value[0], value[1]));
                if (here && column < limit) *reinterpret_cast<uint32_t*>(to) = column < plan.columns ? pair : 0;
            } else {
                const float factor = swiglu.gate_factor;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t pair = movmatrix_trans(pack_bf16(sum[i + 2 * half] * factor, sum[i + 2 * half + 1] * factor));
                    if (here && column + 8 * half < limit) *reinterpret_cast<uint32_t*>(to + 8 * half) = pair;
                }
            }
        }
    }
}

// The sums of all blocks of the cluster, in their order, for this block's share of N tokens: sum's first ones. `received`: a place for each
// other block's, of which this block is number `part`.
template <int N, int kParts>
__device__ __forceinline__ void add_parts(float (&sum)[N / 2], float4* received, int part, Shared& shared, unsigned& parity) {
    constexpr int kShare = N / 2 / kParts, kPlace = kShare / 4 * kMath;
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    mbarrier_wait_cluster(&shared.sums_empty[warp], parity ^ 1);
#pragma unroll
    for (int i = 1; i < kParts; i++) {  // to the block i further on, which has this one's kParts - i further on
        float4* place = received + (kParts - i - 1) * kPlace + t;
#pragma unroll
        for (int j = 0; j < kShare; j += 4) {
            const float* s = sum + i * kShare + j;
            store_cluster(place + j / 4 * kMath, (part + i) % kParts, float4{s[0], s[1], s[2], s[3]});
        }
    }
    __syncwarp();
    if (lane < kParts && lane != part) mbarrier_arrive_cluster(&shared.sums_full[warp], lane);
    mbarrier_wait_cluster(&shared.sums_full[warp], parity);
#pragma unroll
    for (int j = 0; j < kShare; j += 4) {
        float4 total = {-0.0f, -0.0f, -0.0f, -0.0f};  // plus x: x, whatever it is
#pragma unroll
        for (int p = 0; p < kParts; p++) {
            float4 other = {sum[j], sum[j + 1], sum[j + 2], sum[j + 3]};
            if (p != part) other = received[((p - part + kParts) % kParts - 1) * kPlace + j / 4 * kMath + t];
            total.x += other.x, total.y += other.y, total.z += other.z, total.w += other.w;
        }
        sum[j] = total.x, sum[j + 1] = total.y, sum[j + 2] = total.z, sum[j + 3] = total.w;
    }
    __syncwarp();
    if (lane < kParts && lane != part) mbarrier_arrive_cluster(&shared.sums_empty[warp], lane);
    parity ^= 1;
}

template <int kFormat, int kResult, int kParts, int N>
__device__ __forceinline__ void finish(const Plan& plan, const Tile& tile, Shared& shared, char* memory, Ring<kMaxStages>& at,
                                       Ring<kScales>& scales, unsigned& parity) {
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] = 0.0f;
    multiply<kFormat, kParts, N>(sum, plan, shared, memory, at, scales);
    if constexpr (kParts == 1) {
        store<kResult, N>(sum, plan, tile);
    } else {
        const int part = my_part<kParts>(), first = part * (N / kParts);
        add_parts<N, kParts>(sum, reinterpret_cast<float4*>(&shared + 1), part, shared, parity);
        store<kResult, N / kParts>(sum, plan, {tile.matrix, tile.first_row + first, tile.tokens - first, tile.across});
    }
}
#endif

template <int kFormat, int kResult, int kParts>
__global__ void __launch_bounds__(kGemmThreads, 1)
    PACKED_GEMM_KERNEL(const __grid_constant__ Maps maps, const __grid_constant__ Plan plan) {
#ifdef HAS_WGMMA
    DYN_SMEM(char, memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory + plan.stages * plan.stage_bytes + kScales * kTiles * Stage<kFormat>::kScaleBytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < plan.stages; i++) mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], kMath / 32);
        for (int i = 0; i < kScales; i++) mbarrier_init(&shared.scales_empty[i], kMath / 32);
        for (int i = 0; i < kMath / 32 && kParts > 1; i++)
            mbarrier_init(&shared.sums_full[i], kParts - 1), mbarrier_init(&shared.sums_empty[i], kParts - 1);
        mbarrier_fence_init();
    }
    grid_dependency_launch();
    if (plan.offsets) grid_dependency_wait();  // else the thread that loads does so, behind the first weights
    count_tiles(plan, shared.rows);
    if (kParts > 1) cluster_sync();  // all blocks' barriers are there
    if (threadIdx.x >= kMath) {
        registers_less<kLoadRegisters>();
        if (threadIdx.x == kMath) load_tiles<kFormat, kParts>(maps, plan, shared, memory);
        return;
    }
    registers_more<kMathRegisters>();
    Ring<kMaxStages> at;
    Ring<kScales> scales;
    unsigned parity = 0;  // of the exchanges
    for (int place = 0;; place = (place + 1) % kTilesAhead) {
        mbarrier_wait(&shared.full[at.index], at.parity);
        const Tile& tile = shared.tiles[place];
        if (!tile.tokens) break;
        switch (width_number(width(tile.tokens, kParts))) {
            case 3: finish<kFormat, kResult, kParts, 32>(plan, tile, shared, memory, at, scales, parity); break;
            case 5: finish<kFormat, kResult, kParts, 64>(plan, tile, shared, memory, at, scales, parity); break;
            case 7: finish<kFormat, kResult, kParts, 96>(plan, tile, shared, memory, at, scales, parity); break;
            case 8: finish<kFormat, kResult, kParts, 128>(plan, tile, shared, memory, at, scales, parity); break;
            default:
                if constexpr (kParts == 1) {
                    switch (width_number(width(tile.tokens))) {
                        case 0: finish<kFormat, kResult, 1, 8>(plan, tile, shared, memory, at, scales, parity); break;
                        case 1: finish<kFormat, kResult, 1, 16>(plan, tile, shared, memory, at, scales, parity); break;
                        case 2: finish<kFormat, kResult, 1, 24>(plan, tile, shared, memory, at, scales, parity); break;
                        case 4: finish<kFormat, kResult, 1, 48>(plan, tile, shared, memory, at, scales, parity); break;
                        case 6: finish<kFormat, kResult, 1, 80>(plan, tile, shared, memory, at, scales, parity);
                    }
                }
        }
    }
    // The other blocks' last access to this one's memory: they say that they have read what they got.
    if (kParts > 1) mbarrier_wait_cluster(&shared.sums_empty[threadIdx.x / 32], parity ^ 1);
#endif
}

template <int kFormat, int kResult, int kParts>
static cudaError_t launch(const void* x, int x_columns, const void* weights, Plan plan, int blocks, cudaStream_t stream) {
    using S = Stage<kFormat>;
    const int most = width(plan.most, kParts), sums = most * kBlockRows * 4 / kParts * (kParts - 1);
    const int beside = kScales * kTiles * S::kScaleBytes + int(sizeof(Shared)) + sums;
    plan.stage_bytes = S::kChunks * most * kChunk * 2 + kTiles * S::kCodeBytes;
    plan.stages = (kDynamicBytes - beside) / plan.stage_bytes;
    plan.stages = plan.stages < kMaxStages ? plan.stages : kMaxStages;
    Maps maps;
    const size_t tile_bytes = size_t(plan.items) * item_bytes(kFormat);
    const unsigned words = unsigned(tile_bytes / 8), tiles = unsigned(plan.matrices) * plan.tiles;
    cudaError_t error = make_tensor_map(&maps.codes, 8, weights, words, tiles, tile_bytes, S::kCodeBytes / 8, kTiles, Swizzle::kNone);
    if (error == cudaSuccess && S::kScaleBytes)
        error = make_tensor_map(&maps.scales, 8, weights, words, tiles, tile_bytes, S::kScaleBytes / 8, kTiles, Swizzle::kNone);
    for (int n = width(1); n <= most && error == cudaSuccess; n = width(n + 1))
        error = make_tensor_map(&maps.tokens[width_number(n)], 2, x, x_columns, plan.rows, size_t(x_columns) * 2, kChunk, n, Swizzle::k128);
    if (error != cudaSuccess) return error;
    auto kernel = PACKED_GEMM_KERNEL<kFormat, kResult, kParts>;
    LAUNCH_CLUSTER(kernel, dim3((blocks + kParts - 1) / kParts * kParts), dim3(kGemmThreads), kParts,
                   plan.stages * plan.stage_bytes + beside, stream, maps, plan);
    return cudaGetLastError();
}

template <int kFormat, int kResult>
static cudaError_t launch(const void* x, int x_columns, const void* weights, const Plan& plan, int blocks, cudaStream_t stream) {
    if (plan.parts == 1) return launch<kFormat, kResult, 1>(x, x_columns, weights, plan, blocks, stream);
    if (plan.parts == 2) return launch<kFormat, kResult, 2>(x, x_columns, weights, plan, blocks, stream);
    return launch<kFormat, kResult, 4>(x, x_columns, weights, plan, blocks, stream);
}

// weights: `matrices` packed ones of one shape, one after the other. Two ways to have several:
//   offsets [matrices + 1] int32, ascending from 0 to rows: matrix e multiplies rows offsets[e] .. of x [rows, x_columns], experts;
//   without: matrix e multiplies all rows of x [rows, matrices * x_columns] at columns e * x_columns .., groups, and fills such of out.
// x bf16, arranged (arrange.cuh), x_columns a multiple of 64, the weights' columns no more. factors fp32 [matrices, 3] (of w1, w3, w2), or
// null: `factor` for all. most: tokens of a tile, up to 128. result:
//   0  out bf16 [rows, (matrices *) columns], columns a multiple of 8;
//   1  the weights are pairs (w1 with w3): out bf16 [rows, columns up to the next multiple of 64], arranged in the order of `short_order`:
//      silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weights [rows] fp32 (null: 1);
//   2  out fp32 [rows, (matrices *) columns].
// parts: of K, 1 or, without offsets, 2 or 4, each of 256 columns (of bf16 weights 128) at least; blocks is rounded up to a multiple.
template <int kFormat>
static cudaError_t packed_gemm(const void* x, const void* weights, const float* factors, const int* offsets, const float* row_weights,
                               void* out, int rows, int columns, int x_columns, int matrices, int result, int most, int parts,
                               int short_order, int blocks, float factor, float limit, cudaStream_t stream) {
#if !defined(DSV4_EMULATOR) && defined(__CUDA_ARCH_LIST__)
    constexpr int architectures[] = {__CUDA_ARCH_LIST__};  // one: build.py compiles for one
    if (architectures[0] != 900) return cudaErrorNotSupported;
#endif
    using S = Stage<kFormat>;
    if (rows < 1 || columns < 1 || x_columns < 1 || x_columns % kChunk || matrices < 1 || matrices > kMaxMatrices || most < 1 ||
        most > kMost || (columns % 8 && result != kFloats) || result < kRounded || result > kFloats || (offsets && parts > 1) ||
        (result == kSwiglu && !offsets && matrices > 1))
        return cudaErrorInvalidValue;
    const int tile_rows = result == kSwiglu ? kRows / 2 : kRows, x_width = offsets ? x_columns : matrices * x_columns;
    Plan plan = {};
    plan.factors = factors, plan.row_weights = row_weights, plan.offsets = offsets;
    plan.out = out, plan.rows = rows, plan.columns = columns, plan.matrices = matrices, plan.most = most;
    plan.tiles = (columns + tile_rows - 1) / tile_rows, plan.items = (x_columns + item_columns(kFormat) - 1) / item_columns(kFormat);
    plan.parts = parts, plan.units = plan.items * (S::kInItem / S::kInUnit);
    if ((parts != 1 && parts != 2 && parts != 4) || parts > plan.units) return cudaErrorInvalidValue;
    plan.x_columns = x_columns, plan.x_width = x_width, plan.x_step = offsets ? 0 : x_columns, plan.out_step = offsets ? 0 : columns;
    plan.out_columns = result == kSwiglu ? (columns + kChunk - 1) / kChunk * kChunk : offsets ? columns : matrices * columns;
    plan.short_order = short_order, plan.factor = factor, plan.limit = limit;
    if (result == kRounded) return launch<kFormat, kRounded>(x, x_width, weights, plan, blocks, stream);
    if (result == kSwiglu) return launch<kFormat, kSwiglu>(x, x_width, weights, plan, blocks, stream);
    return launch<kFormat, kFloats>(x, x_width, weights, plan, blocks, stream);
}
