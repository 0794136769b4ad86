// y = x W^T for any number of tokens and the weights as decode packs them (packing.py), so that one copy of the weights serves both; W is
// one matrix, or one an expert, whose rows of x lie together. Hopper's tensor cores (wgmma): sm_90a only, elsewhere the functions return
// cudaErrorNotSupported. packed_gemm_*.cu compile it, a format each.
//
// The weights are the product's 64-row operand A, from registers, the tokens operand B, from shared memory. A packed tile of 16 rows is one
// warp's part of A, and a lane's bytes are its own: 16 codes of a row become 8 pairs of bf16, exactly, with expand_e2m1 and the scales of
// stream.cuh. A lane holds 16 consecutive columns where the instruction wants 2 of each 8, so x must come in that order of columns in each
// 64 (arrange.cuh): the kernel that gathers the rows writes it (arrange_tokens), for w2 the epilogue of w1 and w3.
//
// A block is four warpgroups that multiply, 64 rows each, and two threads that load; one an SM. Its tile is 256 rows by up to 128 tokens,
// of which the product is as wide as there are, in eights up to 32, in sixteens up to 96. A stage of the ring is 128 columns of FP4 (64 of
// FP8 and bf16): one tensor copy of the codes of all 16 packed tiles, one of the tokens for each 64 columns; as many stages as fit, of FP4
// with 128 tokens 4. An item's scales come with the first of its stages, into a ring of their own. A warpgroup expands 64 columns into 16
// registers, starts their four products and waits for these; meanwhile the other three expand or multiply. With all tokens a tile may have,
// `most`, a token's result has the same bits: one chain of products a sum, in the order of the columns.
//
// Blocks go from tile to tile until none is left; the next tile's copies come while one is stored. Tiles go down the tokens first (up to
// kBand of them, then the next rows), so that neighbours in time share weights. An expert without tokens has no tile.
//
// Where a weight has few rows, a tile has 128 or 64 of them, and two or four warpgroups share its columns: of each stage, which has more
// columns then, each has the same part (prompts.py: how many parts depends on the weight alone, as the order of additions does). Behind the
// products a warp gives each of the others with its rows that one's share of the tokens, 32 tokens at a time through shared memory, adds up
// its own share in the order of the parts, rounds and stores it.
//
// Instructions a warp for 64 columns of NVFP4: 75, of which 48 expand, so a scheduler with its four warps has 300 for 256 rows; the tensor
// cores take 256 cycles for 32 tokens, 1,024 for 128. Measured on an H200, cycles of 64 columns x 256 rows at 1.7 GHz, by dense products:
// 490 with 16 tokens, 580 with 32, 740 with 64, 930 with 96, 1,170 with 128, and 92 to 100 % of torch's bf16 rate with 4,096 tokens where a
// weight has 1,024 rows or more; of two parts 1.15 times as many, of four 1.5, as more comes to shared memory and less of it is used again.
// Of experts, whose weights come from DRAM (480 cycles): 540 with 8 tokens, 640 with 24, 920 with 64, 1,320 with 128. So with few tokens
// the warpgroups expand at the same time and multiply at the same time; having them multiply in turns, by named barriers, was slower in
// each of eight forms, and so was asking for the next stage's weights before the wait for the products. Two warpgroups had 1,310 for 128
// rows and 256 tokens, and two such blocks an SM 1,140 for 128 rows and 64 tokens each: two warpgroups hide less. A box of tokens is as
// high as the product is wide: boxes of 16 and of 8 rows took 2 and 35 % longer than of 32, with 128 tokens. (docs/measurements.md)
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

constexpr int kMath = 512, kGemmThreads = kMath + 128;           // that multiply; and a warpgroup of which two threads load
constexpr int kMathRegisters = 112, kLoadRegisters = 32;         // of a thread
constexpr int kWarpsOfMath = kMath / 32;                         // each has a packed tile, or a part of its columns
constexpr int kMost = 128;                                       // tokens of a tile
constexpr int kMaxStages = 8, kScales = 2;                       // of an item's scales: on their way or in use
constexpr int kTilesAhead = 16;                                  // the one that is stored, those of all stages behind it, the end
constexpr int kRound = 32;                                       // tokens whose sums parts exchange at a time
constexpr int kBand = 8;                                         // tiles of tokens before the next rows
constexpr int kMaxMatrices = 384;
static_assert(kMath * kMathRegisters + 128 * kLoadRegisters <= 65536 / kGemmThreads / 8 * 8 * kGemmThreads, "registers");

enum Result { kRounded = 0, kSwiglu = 1, kFloats = 2 };

struct Plan {
    const float *factors, *row_weights;  // factors [matrices, 3] or null: `factor`
    const int* offsets;                  // [matrices + 1], or null: all have all rows
    void* out;
    int rows, columns, matrices, items, most;  // columns: of one matrix' out; most: tokens of a tile
    int tiles, tiles_stored;             // packed ones of a matrix; with those that fill up a row of out
    int stages, stage_bytes;
    int x_columns, x_width;              // of a matrix' weights, in 64s; of x
    int x_step, out_step, out_columns;   // from one matrix' columns to the next one's; of a row of out
    bool short_order;                    // of hidden's columns (arrange.cuh)
    float factor, limit;
};

// The columns of the product for so many tokens, and their number: 8, 16, 24, 32, 48, 64, 80, 96, 128; of parts 32 and 64, of two also 96
// and 128. With 112 as well ptxas ran out of registers ("insufficient register resources": it adds up those of all products of a kernel
// that may be on their way around a loop) and made every wgmma wait for the one before.
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

// The stages of a format and number of parts. A piece is what lies together of an item's codes: 128 columns of FP4, 64 of the others.
template <int kFormat, int kParts> struct Stage {
    static constexpr int kInPiece = kFormat == kNvfp4 || kFormat == kMxfp4 ? 2 : 1;            // chunks of 64 columns
    static constexpr int kPieces = kParts < 4 ? kParts : kParts / kInPiece, kChunks = kPieces * kInPiece;  // of a stage
    static constexpr int kMine = kChunks / kParts;                                             // chunks of a part, which lie together
    static constexpr int kItemPieces = item_columns(kFormat) / (kInPiece * kChunk);
    static constexpr int kItemStages = kItemPieces > kPieces ? kItemPieces / kPieces : 1;      // with one copy of the scales
    static constexpr int kTiles = kWarpsOfMath / kParts;                                       // packed ones of a block
    static constexpr int kCodeBytes = kCodes / kItemPieces, kScaleBytes = item_bytes(kFormat) - kCodes;  // a tile's, of a piece; of an item
    static constexpr int kScalePlace = (kTiles * kScaleBytes + 127) / 128 * 128;               // a tensor copy's begin at multiples of 128
    static __host__ __device__ constexpr int bytes(int width) { return kChunks * width * kChunk * 2 + kPieces * kTiles * kCodeBytes; }
    static __host__ __device__ constexpr int stages(const Plan& plan) { return (plan.items * kItemPieces + kPieces - 1) / kPieces; }
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

// Of out: the thread that loads weights says so to the others.
struct alignas(16) Tile {
    int matrix, first_row, tokens, across;  // tokens: 0 behind the last one; across: which rows of the matrix
};

struct Shared {
    uint64_t full[kMaxStages], empty[kMaxStages], scales_empty[kScales];
    Rows rows;
    Tile tiles[kTilesAhead];
};
constexpr int kDynamicBytes = 227 << 10;

// The tiles of this block, one after the other.
struct Walk {
    const Plan& plan;
    const Rows& rows;
    int t, across_all;
    Tile tile = {};

    __device__ __forceinline__ Walk(const Plan& plan, const Rows& rows, int tiles)
        : plan(plan), rows(rows), t(int(blockIdx.x) - int(gridDim.x)), across_all((plan.tiles_stored + tiles - 1) / tiles) {}

    __device__ __forceinline__ bool next() {
        t += int(gridDim.x);
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

// Of a warp, what it multiplies: a packed tile of the block's, and a part of each stage's chunks.
template <int kParts> __device__ __forceinline__ int my_part() { return int(threadIdx.x) / 128 % kParts; }
template <int kParts> __device__ __forceinline__ int my_tile() { return int(threadIdx.x) / 128 / kParts * 4 + int(threadIdx.x) / 32 % 4; }

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

// A lane's part of 128 columns, number `pair` of the item, on its way to operand A; `mine` is its first 16 bytes of them (of FP8 and bf16
// of its 64 columns), `scales` of the item's. expand: the first or second 64 columns (v), four operands of 16. turn: the second ones become
// the first where `second`, which a whole warp agrees on.
template <int kFormat> struct Weights {  // FP4: 16 columns of two rows are two words each, for each v
    uint4 low, high;
    uint32_t four;

    __device__ __forceinline__ Weights(const char* mine, const char* scales, int pair) {
        low = load_16(mine), high = load_16(mine + 512);
        const int lane = threadIdx.x % 32;
        four = *reinterpret_cast<const uint32_t*>(scales + 4 * pair - (kFormat == kNvfp4 ? 0 : 16 * (lane - lane / 2)));
    }
    __device__ __forceinline__ void turn(bool second) {
        if (second) low.x = low.z, low.y = low.w, high.x = high.z, high.y = high.w, four >>= 16;
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

// Two threads: every stage of every tile of this block, as soon as there is room, one its weights, which no kernel writes, the other its
// tokens, when the kernels before this one have ended. Each copy takes its thread some 100 cycles, and one thread was late for parts.
template <int kFormat, int kParts>
__device__ __forceinline__ void load_weights(const Maps& maps, const Plan& plan, Shared& shared, char* memory) {
    using S = Stage<kFormat, kParts>;
    char* scales_at = memory + plan.stages * plan.stage_bytes;
    const int stages = S::stages(plan);
    Ring<kMaxStages> at;
    Ring<kScales> scales;
    at.parity = scales.parity = 1;  // a new barrier counts as having completed the phase of parity 1: the rings are empty
    int place = 0;
    for (Walk walk(plan, shared.rows, S::kTiles); walk.next(); place = (place + 1) % kTilesAhead) {
        const Tile& tile = walk.tile;
        const int bytes = S::bytes(width(tile.tokens, kParts));
        const int packed = tile.matrix * plan.tiles + tile.across * S::kTiles;  // beyond a matrix' last one is any: not stored
#pragma unroll 1
        for (int stage = 0; stage < stages; stage++) {
            const bool scaled = S::kScaleBytes && stage % S::kItemStages == 0;
            uint64_t* full = &shared.full[at.index];
            if (scaled) mbarrier_wait(&shared.scales_empty[scales.index], scales.parity);
            mbarrier_wait(&shared.empty[at.index], at.parity);
            if (stage == 0) shared.tiles[place] = tile;
            mbarrier_expect(full, bytes + (scaled ? S::kTiles * S::kScaleBytes : 0));
#pragma unroll
            for (int i = 0; i < S::kPieces; i++) {
                const int piece = stage * S::kPieces + i;
                const int word = piece / S::kItemPieces * (item_bytes(kFormat) / 8) + piece % S::kItemPieces * (S::kCodeBytes / 8);
                tensor_load(memory + at.index * plan.stage_bytes + i * S::kTiles * S::kCodeBytes, &maps.codes, word, packed, full);
            }
            if (scaled) {
                tensor_load(scales_at + scales.index * S::kScalePlace, &maps.scales,
                            stage / S::kItemStages * (item_bytes(kFormat) / 8) + kCodes / 8, packed, full);
                scales.next();
            }
            at.next(plan.stages);
        }
    }
    mbarrier_wait(&shared.empty[at.index], at.parity);
    shared.tiles[place].tokens = 0;
    mbarrier_arrive(&shared.full[at.index]);
}
template <int kFormat, int kParts>
__device__ __forceinline__ void load_tokens(const Maps& maps, const Plan& plan, Shared& shared, char* memory) {
    using S = Stage<kFormat, kParts>;
    const int stages = S::stages(plan);
    Ring<kMaxStages> at;
    at.parity = 1;
    if (!plan.offsets) grid_dependency_wait();  // else all threads have, for the offsets
    for (Walk walk(plan, shared.rows, S::kTiles); walk.next();) {
        const Tile& tile = walk.tile;
        const int n = width(tile.tokens, kParts), column = tile.matrix * plan.x_step;
        const TensorMap* tokens = &maps.tokens[width_number(n)];
#pragma unroll 1
        for (int stage = 0; stage < stages; stage++) {
            char* to = memory + at.index * plan.stage_bytes + S::kPieces * S::kTiles * S::kCodeBytes;
            mbarrier_wait(&shared.empty[at.index], at.parity);
#pragma unroll
            for (int c = 0; c < S::kChunks; c++, to += n * kChunk * 2) {
                const int chunk = (stage * S::kChunks + c) * kChunk;  // behind the last one zeros, not the next matrix' columns
                tensor_load(to, tokens, chunk < plan.x_columns ? column + chunk : plan.x_width, tile.first_row, &shared.full[at.index]);
            }
            at.next(plan.stages);
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------ multiply

#ifdef HAS_WGMMA

// sum += the products over this warpgroup's columns of a tile of N tokens.
template <int kFormat, int kParts, int N>
__device__ __forceinline__ void multiply(float (&sum)[N / 2], const Plan& plan, Shared& shared, const char* memory, Ring<kMaxStages>& at,
                                         Ring<kScales>& scales) {
    using S = Stage<kFormat, kParts>;
    const int lane = threadIdx.x % 32, stages = S::stages(plan);
    const int mine = my_part<kParts>() * S::kMine, piece = mine / S::kInPiece;  // of a stage: this warpgroup's first chunk; its piece
    const int my_codes = (piece * S::kTiles + my_tile<kParts>()) * S::kCodeBytes + 16 * lane;
    const int my_tokens = S::kPieces * S::kTiles * S::kCodeBytes + mine * N * kChunk * 2;
    const char* my_scales = memory + plan.stages * plan.stage_bytes + my_tile<kParts>() * S::kScaleBytes + 16 * lane;
    uint32_t a[4][4];
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
        const char* here = memory + at.index * plan.stage_bytes;
        mbarrier_wait(&shared.full[at.index], at.parity);
        Weights<kFormat> weights(here + my_codes, my_scales + scales.index * S::kScalePlace,
                                 (stage * S::kPieces + piece) % S::kItemPieces * S::kInPiece / 2);
        if constexpr (S::kMine < S::kInPiece) weights.turn(mine % S::kInPiece);
#pragma unroll
        for (int c = 0; c < S::kMine; c++) {
            weights.expand(c, a);
            const uint64_t operand = wgmma_operand(here + my_tokens + c * N * kChunk * 2, Swizzle::k128, 8 * kChunk * 2);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) wgmma_bf16(sum, a[i], operand + 2 * i);
            wgmma_commit();
            wgmma_wait<0>();
        }
        if (lane == 0) mbarrier_arrive(&shared.empty[at.index]);  // all lanes have read their weights: they met at the wait
        at.next(plan.stages);
        if (S::kScaleBytes && (stage % S::kItemStages == S::kItemStages - 1 || stage == stages - 1)) {
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

// packed: the warp's tile. A lane has of its rows g and g + 8 the tokens 2 q and 2 q + 1 of each 8. fp32: 32 bytes of a token at a time,
// straight from the registers. bf16: turned over first, so that a lane has two neighbouring columns of token g.
template <int kResult, int N> __device__ __forceinline__ void store(const float* sum, const Plan& plan, const Tile& tile, int packed) {
    const int lane = made_here(threadIdx.x) % 32, g = lane / 4, q = lane % 4;
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

// The sums of all parts, in their order, for this part's share of kRound tokens. `given`: a place for what each warp of a packed tile gives
// each other one.
template <int kParts> __device__ __forceinline__ void add_parts(const float* sum, float4* given, float (&total)[kRound / 2 / kParts]) {
    constexpr int kShare = kRound / 2 / kParts, kPlace = kShare / 4 * 32;
    const int part = my_part<kParts>(), tile = my_tile<kParts>();
    given += tile * kParts * (kParts - 1) * kPlace + threadIdx.x % 32;
    bar_sync(1 + tile, 32 * kParts);  // what was given before is read
#pragma unroll
    for (int to = 0; to < kParts; to++) {
        float4* place = given + (to * (kParts - 1) + part - (part > to)) * kPlace;
        const float* s = sum + to * kShare;
        if (to == part) continue;
#pragma unroll
        for (int j = 0; j < kShare; j += 4) place[j * 8] = float4{s[j], s[j + 1], s[j + 2], s[j + 3]};
    }
    bar_sync(1 + tile, 32 * kParts);
#pragma unroll
    for (int j = 0; j < kShare; j++) total[j] = -0.0f;  // plus x: x, whatever it is
#pragma unroll
    for (int from = 0; from < kParts; from++) {
        const float4* place = given + (part * (kParts - 1) + from - (from > part)) * kPlace;
#pragma unroll
        for (int j = 0; j < kShare; j += 4) {
            const float* s = sum + from * kShare + j;
            const float4 other = from == part ? float4{s[0], s[1], s[2], s[3]} : place[j * 8];
            total[j] += other.x, total[j + 1] += other.y, total[j + 2] += other.z, total[j + 3] += other.w;
        }
    }
}

template <int kFormat, int kResult, int kParts, int N>
__device__ __forceinline__ void finish(const Plan& plan, const Tile& tile, Shared& shared, char* memory, Ring<kMaxStages>& at,
                                       Ring<kScales>& scales) {
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] = 0.0f;
    multiply<kFormat, kParts, N>(sum, plan, shared, memory, at, scales);
    const int packed = tile.across * Stage<kFormat, kParts>::kTiles + my_tile<kParts>();
    if constexpr (kParts == 1) {
        store<kResult, N>(sum, plan, tile, packed);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += kRound) {
            constexpr int kShare = kRound / kParts;
            float total[kShare / 2];
            add_parts<kParts>(sum + i / 2, reinterpret_cast<float4*>(&shared + 1), total);
            const int first = i + my_part<kParts>() * kShare;
            store<kResult, kShare>(total, plan, {tile.matrix, tile.first_row + first, tile.tokens - first, tile.across}, packed);
        }
    }
}
#endif

template <int kFormat, int kResult, int kParts>
__global__ void __launch_bounds__(kGemmThreads, 1)
    PACKED_GEMM_KERNEL(const __grid_constant__ Maps maps, const __grid_constant__ Plan plan) {
#ifdef HAS_WGMMA
    using S = Stage<kFormat, kParts>;
    DYN_SMEM(char, memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory + plan.stages * plan.stage_bytes + kScales * S::kScalePlace);
    if (threadIdx.x == 0) {
        for (int i = 0; i < plan.stages; i++) mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], kWarpsOfMath);
        for (int i = 0; i < kScales; i++) mbarrier_init(&shared.scales_empty[i], kWarpsOfMath);
        mbarrier_fence_init();
    }
    grid_dependency_launch();
    if (plan.offsets) grid_dependency_wait();  // else the thread that loads tokens does
    count_tiles(plan, shared.rows);
    if (threadIdx.x >= kMath) {
        registers_less<kLoadRegisters>();
        if (threadIdx.x == kMath) load_weights<kFormat, kParts>(maps, plan, shared, memory);
        if (threadIdx.x == kMath + 32) load_tokens<kFormat, kParts>(maps, plan, shared, memory);
        return;
    }
    registers_more<kMathRegisters>();
    Ring<kMaxStages> at;
    Ring<kScales> scales;
    for (int place = 0;; place = (place + 1) % kTilesAhead) {
        mbarrier_wait(&shared.full[at.index], at.parity);
        const Tile& tile = shared.tiles[place];
        if (!tile.tokens) break;
        const int number = width_number(width(tile.tokens, kParts));
        if (number == width_number(32)) finish<kFormat, kResult, kParts, 32>(plan, tile, shared, memory, at, scales);
        if (number == width_number(64)) finish<kFormat, kResult, kParts, 64>(plan, tile, shared, memory, at, scales);
        if constexpr (kParts < 4) {
            if (number == width_number(96)) finish<kFormat, kResult, kParts, 96>(plan, tile, shared, memory, at, scales);
            if (number == width_number(128)) finish<kFormat, kResult, kParts, 128>(plan, tile, shared, memory, at, scales);
        }
        if constexpr (kParts == 1) {
            switch (number) {
                case width_number(8): finish<kFormat, kResult, 1, 8>(plan, tile, shared, memory, at, scales); break;
                case width_number(16): finish<kFormat, kResult, 1, 16>(plan, tile, shared, memory, at, scales); break;
                case width_number(24): finish<kFormat, kResult, 1, 24>(plan, tile, shared, memory, at, scales); break;
                case width_number(48): finish<kFormat, kResult, 1, 48>(plan, tile, shared, memory, at, scales); break;
                case width_number(80): finish<kFormat, kResult, 1, 80>(plan, tile, shared, memory, at, scales);
            }
        }
    }
#endif
}

template <int kFormat, int kResult, int kParts>
static cudaError_t launch(const void* x, int x_columns, const void* weights, Plan plan, int blocks, cudaStream_t stream) {
    using S = Stage<kFormat, kParts>;
    const int most = width(plan.most, kParts), sums = kMath / 2 * kRound * 4 / kParts * (kParts - 1);
    const int beside = kScales * S::kScalePlace + int(sizeof(Shared)) + sums;
    plan.stage_bytes = S::bytes(most);
    plan.stages = (kDynamicBytes - beside) / plan.stage_bytes;
    plan.stages = plan.stages < kMaxStages ? plan.stages : kMaxStages;
    Maps maps;
    const size_t tile_bytes = size_t(plan.items) * item_bytes(kFormat);
    const unsigned words = unsigned(tile_bytes / 8), tiles = unsigned(plan.matrices) * plan.tiles;
    cudaError_t error = make_tensor_map(&maps.codes, 8, weights, words, tiles, tile_bytes, S::kCodeBytes / 8, S::kTiles, Swizzle::kNone);
    if (error == cudaSuccess && S::kScaleBytes)
        error = make_tensor_map(&maps.scales, 8, weights, words, tiles, tile_bytes, S::kScaleBytes / 8, S::kTiles, Swizzle::kNone);
    for (int n = width(1, kParts); n <= most && error == cudaSuccess; n = width(n + 1, kParts))
        error = make_tensor_map(&maps.tokens[width_number(n)], 2, x, x_columns, plan.rows, size_t(x_columns) * 2, kChunk, n, Swizzle::k128);
    if (error != cudaSuccess) return error;
    auto kernel = PACKED_GEMM_KERNEL<kFormat, kResult, kParts>;
    LAUNCH(kernel, dim3(blocks), dim3(kGemmThreads), plan.stages * plan.stage_bytes + beside, stream, maps, plan);
    return cudaGetLastError();
}

template <int kFormat, int kResult>
static cudaError_t launch(const void* x, int x_columns, const void* weights, const Plan& plan, int parts, int blocks, cudaStream_t stream) {
    if (parts == 1) return launch<kFormat, kResult, 1>(x, x_columns, weights, plan, blocks, stream);
    if (parts == 2) return launch<kFormat, kResult, 2>(x, x_columns, weights, plan, blocks, stream);
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
// parts: of K, 1 or, without offsets, 2 or 4; 4 with `most` up to 64.
template <int kFormat>
static cudaError_t packed_gemm(const void* x, const void* weights, const float* factors, const int* offsets, const float* row_weights,
                               void* out, int rows, int columns, int x_columns, int matrices, int result, int most, int parts,
                               int short_order, int blocks, float factor, float limit, cudaStream_t stream) {
#if !defined(DSV4_EMULATOR) && defined(__CUDA_ARCH_LIST__)
    constexpr int architectures[] = {__CUDA_ARCH_LIST__};  // one: build.py compiles for one
    if (architectures[0] != 900) return cudaErrorNotSupported;
#endif
    if (rows < 1 || columns < 1 || x_columns < 1 || x_columns % kChunk || matrices < 1 || matrices > kMaxMatrices || most < 1 ||
        most > (parts == 4 ? 64 : kMost) || (parts != 1 && parts != 2 && parts != 4) || (offsets && parts > 1) || result < kRounded ||
        result > kFloats || (columns % 8 && result != kFloats) || (result == kSwiglu && !offsets && matrices > 1))
        return cudaErrorInvalidValue;
    const int tile_rows = result == kSwiglu ? kRows / 2 : kRows, x_width = offsets ? x_columns : matrices * x_columns;
    Plan plan = {};
    plan.factors = factors, plan.row_weights = row_weights, plan.offsets = offsets;
    plan.out = out, plan.rows = rows, plan.columns = columns, plan.matrices = matrices, plan.most = most;
    plan.tiles = (columns + tile_rows - 1) / tile_rows, plan.items = (x_columns + item_columns(kFormat) - 1) / item_columns(kFormat);
    plan.x_columns = x_columns, plan.x_width = x_width, plan.x_step = offsets ? 0 : x_columns, plan.out_step = offsets ? 0 : columns;
    plan.out_columns = result == kSwiglu ? (columns + kChunk - 1) / kChunk * kChunk : offsets ? columns : matrices * columns;
    plan.tiles_stored = result == kSwiglu ? plan.out_columns / tile_rows : plan.tiles;
    plan.short_order = short_order, plan.factor = factor, plan.limit = limit;
    if (result == kRounded) return launch<kFormat, kRounded>(x, x_width, weights, plan, parts, blocks, stream);
    if (result == kSwiglu) return launch<kFormat, kSwiglu>(x, x_width, weights, plan, parts, blocks, stream);
    return launch<kFormat, kFloats>(x, x_width, weights, plan, parts, blocks, stream);
}
