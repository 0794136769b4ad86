// What the kernels of packed_gemm.cuh and packed_few.cuh share: a product's plan, the walk through its tiles, weights on their way to
// operand A, results.
#pragma once
#include "arrange.cuh"
#include "stream.cuh"
#include "tensor_map.cuh"

#if defined(DSV4_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA  // and setmaxnreg
#endif

constexpr int kBand = 8;            // tiles of tokens before the next rows
constexpr int kMaxMatrices = 384;
constexpr int kUnit = 4;            // chunks of K that are never parted; an item, if that is less

enum Result { kRounded = 0, kSwiglu = 1, kFloats = 2 };

struct Plan {
    const char* weights;
    const float *factors, *row_weights;  // factors [matrices, 3] or null: `factor`
    const int* offsets;                  // [matrices + 1], or null: all have all rows
    void* out;
    float* partial;                      // [tiles of out, parts, most / 8, kMath, 4], if parts > 1
    unsigned* arrivals;                  // a counter for each tile of out
    int parts, units;                    // of K
    int64_t matrix_bytes;
    int rows, columns, matrices, tiles, items, most;  // columns: of one matrix' out; tiles: packed ones; most: tokens of a tile
    int x_step, out_step, out_columns;   // from one matrix' columns to the next one's; of a row of out
    bool short_order;                    // of hidden's columns (arrange.cuh)
    float factor, limit;
};

// Chunks of 64 columns of an item.
__host__ __device__ constexpr int item_chunks(int format) { return item_columns(format) / kChunk; }
// Chunks of a unit: whole slots of any width of tile.
__host__ __device__ constexpr int unit_chunks(int format) { return item_chunks(format) < kUnit ? item_chunks(format) : kUnit; }

// A place in a ring of `kStages`.
template <int kStages> struct Ring {
    int index = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == kStages) index = 0, parity ^= 1;
    }
};

// Where the matrices' rows of x and tiles of tokens are; in shared memory.
struct Rows {
    int begin[kMaxMatrices], end[kMaxMatrices], first[kMaxMatrices + 1];  // a matrix' rows of x; its first tile of tokens
    int sums[32];                                                         // of a warp's
};

// The tiles of this block, or parts of tiles, one after the other; both sides walk alike.
struct Walk {
    const Plan& plan;
    const Rows& rows;
    int t, across_all;
    int matrix = 0, first_row = 0, tokens = 0, across = 0;  // of the current tile; across: which rows

    // tiles: packed ones of a block.
    __device__ __forceinline__ Walk(const Plan& plan, const Rows& rows, int tiles)
        : plan(plan), rows(rows), t(int(blockIdx.x) - int(gridDim.x)), across_all((plan.tiles + tiles - 1) / tiles) {}

    __device__ __forceinline__ bool next() {
        t += gridDim.x;
        if (t >= rows.first[plan.matrices] * across_all * plan.parts) return false;
        const int tile = this->tile();
        while (tile >= rows.first[matrix + 1] * across_all) matrix++;
        int i = tile - rows.first[matrix] * across_all;
        const int down_all = rows.first[matrix + 1] - rows.first[matrix], band = i / (kBand * across_all);
        i -= band * kBand * across_all;
        const int here = min(kBand, down_all - band * kBand), down = band * kBand + i % here;
        across = i / here;
        first_row = rows.begin[matrix] + down * plan.most;
        tokens = min(plan.most, rows.end[matrix] - first_row);
        return true;
    }
    // Made anew where they are used: registers are dear while a tile is multiplied.
    __device__ __forceinline__ int tile() const { return t / plan.parts; }
    __device__ __forceinline__ int part() const { return t % plan.parts; }
    __device__ __forceinline__ int first_unit() const { return plan.units * part() / plan.parts; }
    __device__ __forceinline__ int end_unit() const { return plan.units * (part() + 1) / plan.parts; }
};

// Fills `rows`, by all threads of the block, of which there are kThreads.
template <int kThreads> __device__ __forceinline__ void count_tiles(const Plan& plan, Rows& rows) {
    constexpr int kEach = (kMaxMatrices + kThreads - 1) / kThreads;  // consecutive matrices of a thread
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

// -------------------------------------------------------------------------------------------------------------------- results

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

// The routing weight of the walk's token number `token`.
__device__ __forceinline__ float row_weight(const Plan& plan, const Walk& walk, int token) {
    return plan.row_weights && token < walk.tokens ? plan.row_weights[walk.first_row + token] : 1.0f;
}

// A lane's sums of packed tile number `tile` with N tokens, to rows of fp32: 32 bytes of a token at a time, straight from the registers.
// It has of rows g and g + 8 the tokens 2 q and 2 q + 1 of each 8.
template <int N> __device__ __forceinline__ void store_floats(const float* sum, const Plan& plan, const Walk& walk, int tile, int lane) {
    const int g = lane / 4, q = lane % 4, column = tile * kRows + g, step = plan.out_columns;
    const float factor = plan.factors ? plan.factors[3 * walk.matrix + 2] : plan.factor;
    float* to = static_cast<float*>(plan.out) + (walk.first_row + 2 * q) * int64_t(step) + walk.matrix * plan.out_step + column;
    int left = walk.tokens - 2 * q;
#pragma unroll
    for (int i = 0; i < N / 2; i += 4, to += 8 * step, left -= 8) {
        if (column < plan.columns && left > 0) to[0] = sum[i] * factor;
        if (column < plan.columns && left > 1) to[step] = sum[i + 1] * factor;
        if (column + 8 < plan.columns && left > 0) to[8] = sum[i + 2] * factor;
        if (column + 8 < plan.columns && left > 1) to[step + 8] = sum[i + 3] * factor;
    }
}
