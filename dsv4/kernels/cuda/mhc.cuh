// What mhc_pre and hc_head share: the projection of the four streams by the rows of fn with the streams' inner products on the way (a grid
// of column slices), and the collapse of the streams with the RMS norm behind it (a grid of column blocks). dsv4/ops/mhc.py has the
// meaning.
//
// The norm's sum of squares of x = sum_j w_j X'_j is w^T G w, where G_jk = X'_j . X'_k. So no block of the second kernel needs more of a
// row than its own columns: it adds the slices' parts of G as it adds those of the projections, in one read.
// - w^T G w is of x before any rounding. So x is rounded once, behind the norm, where the definition rounds it before and behind: a column
//   that outweighs all others, rounded (by up to 2^-8) before a factor that knows nothing of it, would be off by that.
// - Where the streams cancel, w^T G w is what is left of far larger terms. It is wrong by 2^-21 (the tensor cores' sums) of (sum_j w_j
//   |X'_j|)^2 at most, which is at most 4 B, B = sum_j w_j^2 G_jj. From B / 64 up that is 2^-13 of it, 2^-14 in the factor: 1/32 of a bf16
//   rounding. Below, or beyond fp32, every block adds the squares of the whole row itself, which is longer and right for any streams.
//
// The partial sums go from the first to the second as float [tokens][rows + 11][128 slices]: the rows of fn, the ten entries of G's upper
// triangle, the trace again by fp32 FMA, for the RMS of all streams. Eight lanes add one of them, in a fixed order. Of a narrow row the
// last slices are empty and zeros.
#pragma once
#include "common.cuh"

namespace mhc {

using bf16 = __nv_bfloat16;
constexpr int kStreams = 4, kProducts = kStreams * (kStreams + 1) / 2;
constexpr int kSums = kProducts + 1;              // beside the rows of fn
constexpr int kMostParts = 4;                     // of a block's output
constexpr int kSlice = 64;                        // most columns of each stream in a slice
constexpr int kRowsPerWarp = 4;                   // rows of fn that a warp has of a slice
constexpr int kQuads = kSlice * kStreams / 4 / 32;  // 16-byte pieces of a row that a lane has
constexpr int kSlices = 128;                      // of a row, as the first kernel has blocks
constexpr int kMostTokens = 8;                    // a warp each
constexpr int kProjectThreads = 32 * kMostTokens;
constexpr int kLanes = 8, kReads = kSlices / 4 / kLanes;  // lanes that add a sum, each with so many reads of four slices
constexpr int kMixThreads = 128;                  // one half adds sums, the other has 8 columns each
constexpr int kMixColumns = 8 * kMixThreads / 2;
constexpr int kSlots = 2 * (kMixThreads / 2 / kLanes);  // two sums for each eight threads
constexpr int kMixShared = (kSlots + kMixThreads / 32) * sizeof(float);

// This warp's number, which ptxas then knows to be the same in all lanes: where a branch depends on it, shuffles need no second form.
__device__ __forceinline__ int warp_number() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

template <int LANES = 32> __device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
    for (int offset = LANES / 2; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

// Four sums over the warp at once, in 6 shuffles instead of 20: lanes 8 i to 8 i + 7 get that of s[i].
__device__ __forceinline__ float lane_sums(const float (&s)[4]) {
    const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    const float first = (upper ? s[2] : s[0]) + __shfl_xor_sync(~0u, upper ? s[0] : s[2], 16);
    const float second = (upper ? s[3] : s[1]) + __shfl_xor_sync(~0u, upper ? s[1] : s[3], 16);
    return lane_sum<8>((odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 8));
}

__device__ __forceinline__ void unpack(uint4 from, float (&to)[8]) {
    to[0] = bf16_lo(from.x), to[1] = bf16_hi(from.x), to[2] = bf16_lo(from.y), to[3] = bf16_hi(from.y);
    to[4] = bf16_lo(from.z), to[5] = bf16_hi(from.z), to[6] = bf16_lo(from.w), to[7] = bf16_hi(from.w);
}

// A lane's 8 columns of one stream, in bf16.
__device__ __forceinline__ uint4 pack(const float (&from)[8]) {
    return make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]), pack_bf16(from[6], from[7]));
}

// The return that is pending, or all null. o: bf16 [tokens, columns], or `parts` > 0 partial sums, fp32 [parts, tokens, columns], which are
// added in order and rounded to bf16.
struct Return { const void* o; const float *post, *comb; bf16* streams; int parts; };

// A lane's part of a token's streams X' in this block's columns: 8 columns of stream lane / 4 % 4, post * o + comb^T X, rounded to bf16 and
// written to Return's `streams`, or X itself where nothing is pending. Its addresses are worked out before the wait. Lanes beyond `width`
// read the row's last columns, so that every load is on its way before the first is needed.
struct Stream {
    const bf16 *X, *o;
    const float *parts, *post, *comb;
    bf16* out;
    int first;

    __device__ __forceinline__ Stream(const Return& last, const bf16* X_, int token, int columns, int begin) {
        const int lane = threadIdx.x % 32, k = lane / 4 % kStreams, row = token * kStreams;
        first = lane / 16 * 32 + lane % 4 * 8;
        const int column = min(begin + first, columns - 8), at = token * columns + column;
        X = X_ + (last.streams ? row : row + k) * columns + column;
        o = static_cast<const bf16*>(last.o) + at, parts = static_cast<const float*>(last.o) + at;
        post = last.post + row + k, comb = last.comb + row * kStreams + k;
        out = last.streams + (row + k) * columns + column;
        worked_out(X), worked_out(o), worked_out(parts), worked_out(post), worked_out(comb), worked_out(out);
    }

    // o from `count` partial sums of `size` values, or as it is.
    __device__ __forceinline__ uint4 whole(int count, int size) const {
        if (count == 0) return *reinterpret_cast<const uint4*>(o);
        float part[kMostParts][8];
#pragma unroll
        for (int p = 0; p < kMostParts; p++)
            if (p < count) load(part[p], parts + p * size);
#pragma unroll
        for (int p = 1; p < kMostParts; p++) {
            if (p >= count) break;
#pragma unroll
            for (int i = 0; i < 8; i++) part[0][i] += part[p][i];
        }
        return pack(part[0]);
    }

    __device__ __forceinline__ uint4 make(const Return& last, int tokens, int columns, int width) const {
        if (!last.streams) return *reinterpret_cast<const uint4*>(X);
        uint4 in[kStreams];
        float c[kStreams], x[8], value[8];
#pragma unroll
        for (int j = 0; j < kStreams; j++) in[j] = *reinterpret_cast<const uint4*>(X + j * columns), c[j] = comb[j * kStreams];
        const float p = *post;
        unpack(whole(last.parts, tokens * columns), x);
#pragma unroll
        for (int i = 0; i < 8; i++) value[i] = p * x[i];
#pragma unroll
        for (int j = 0; j < kStreams; j++) {
            unpack(in[j], x);
#pragma unroll
            for (int i = 0; i < 8; i++) value[i] += c[j] * x[i];
        }
        const uint4 rounded = pack(value);
        if (first < width) *reinterpret_cast<uint4*>(out) = rounded;
        return rounded;
    }
};

// The products of a token's streams in this slice to partials[entry * kSlices]: the upper triangle of G, and the trace. `mine` is a lane's
// Stream, and with that the fragments of an mma whose a and b are both the streams (their order along K is any, as it is the same). Rows
// and columns 0 to 3 of c are the products of the slice's first 32 columns, 4 to 7 those of the others.
__device__ __forceinline__ void multiply_streams(uint4 mine, float* partials) {
    const int lane = threadIdx.x % 32, j = lane / 4, k = lane % 4 * 2;
    const uint32_t word[4] = {mine.x, mine.y, mine.z, mine.w};
    float c[4] = {}, value[8], square = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i += 2) mma_bf16(c, {word[i], 0, word[i + 1], 0}, {word[i], word[i + 1]});
    unpack(mine, value);
#pragma unroll
    for (int i = 0; i < 8; i++) square += value[i] * value[i];
    square = lane_sum(square);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float product = c[i] + __shfl_down_sync(~0u, c[i], 18);  // from row j + 4, column k + 4
        if (j <= k + i && k < kStreams) partials[(j * (7 - j) / 2 + k + i) * kSlices] = product;
    }
    if (lane == 0) partials[kProducts * kSlices] = square;
}

// First kernel, kSlices blocks of kProjectThreads for each kMostTokens tokens (blockIdx.y). A warp has four rows of fn, in registers; lane l has values 4 l to 4 l + 3 and 128 + 4 l
// to 128 + 4 l + 3 of the slice's four streams in a row. The tokens' streams are made by the warps from the last on, which for one or two
// tokens have no row of fn and multiply the streams while the others do that.
template <int ROWS>
__device__ __forceinline__ void project(const Return& last, const bf16* X, const float* fn, float* partials, int tokens, int columns,
                                        int slice) {
    static_assert(ROWS % kRowsPerWarp == 0 && ROWS / kRowsPerWarp <= kMostTokens, "whole warps have rows of fn");
    DYN_SMEM(float, staged);
    const int warp = warp_number(), lane = threadIdx.x % 32, begin = blockIdx.x * slice, width = min(slice, columns - begin);
    uint4 weights[kQuads][kRowsPerWarp];  // on their way before anything is waited for; beyond the slice any, as X' is zero there
    if (warp < ROWS / kRowsPerWarp) {
#pragma unroll
        for (int i = 0; i < kQuads; i++) {
            const int value = 4 * min(lane + i * 32, slice - 1), stream = (value >= slice) + (value >= 2 * slice) + (value >= 3 * slice);
            const int column = min(begin + value - stream * slice, columns - 4);
            const float* const first = fn + (warp * kRowsPerWarp * kStreams + stream) * columns + column;
#pragma unroll
            for (int r = 0; r < kRowsPerWarp; r++) weights[i][r] = load_stream(first + r * kStreams * columns);
        }
    }
    const int first = blockIdx.y * kMostTokens, here = min(tokens - first, kMostTokens), mine = kMostTokens - 1 - warp;
    const Stream stream(last, X, first + mine, columns, begin);
    grid_dependency_launch();
    grid_dependency_wait();
    partials += first * (ROWS + kSums) * kSlices + blockIdx.x;
    if (width <= 0) {
#pragma unroll 1
        for (int i = threadIdx.x; i < here * (ROWS + kSums); i += kProjectThreads) partials[i * kSlices] = 0.0f;
        return;
    }
    uint4 held;
    if (mine < here) {
        float value[8];
        held = stream.make(last, tokens, columns, width);
        if (stream.first >= width) held = make_uint4(0, 0, 0, 0);
        unpack(held, value);
        if (stream.first < slice) store(staged + (mine * kStreams + lane / 4 % kStreams) * slice + stream.first, value);
    }
    __syncthreads();
    if (mine < here) multiply_streams(held, partials + (mine * (ROWS + kSums) + ROWS) * kSlices);
    if (warp >= ROWS / kRowsPerWarp) return;
    for (int token = 0; token < here; token++) {
        float sum[kRowsPerWarp] = {};
#pragma unroll
        for (int i = 0; i < kQuads; i++) {
            float v[4];
            load(v, staged + token * kStreams * slice + 4 * min(lane + i * 32, slice - 1));
            if (lane + i * 32 >= slice) v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll
            for (int r = 0; r < kRowsPerWarp; r++) {
                sum[r] += __uint_as_float(weights[i][r].x) * v[0];
                sum[r] += __uint_as_float(weights[i][r].y) * v[1];
                sum[r] += __uint_as_float(weights[i][r].z) * v[2];
                sum[r] += __uint_as_float(weights[i][r].w) * v[3];
            }
        }
        const float total = lane_sums(sum);
        if (lane % 8 == 0) partials[(token * (ROWS + kSums) + warp * kRowsPerWarp + lane / 8) * kSlices] = total;
    }
}

// A sum over the slices by eight lanes, which all get it. first_slice: where a lane begins to read sum `number`, asked for before the wait.
struct Slices { float four[kReads][4]; };

__device__ __forceinline__ const float* first_slice(const float* partials, int number) {
    partials += number * kSlices + threadIdx.x % kLanes * 4;
    worked_out(partials);
    return partials;
}

__device__ __forceinline__ Slices read_slices(const float* first) {
    Slices slices;
#pragma unroll
    for (int i = 0; i < kReads; i++) load(slices.four[i], first + i * kLanes * 4);
    return slices;
}

__device__ __forceinline__ float add_slices(const Slices& slices) {
    float sum[kReads];
#pragma unroll
    for (int i = 0; i < kReads; i++) sum[i] = (slices.four[i][0] + slices.four[i][1]) + (slices.four[i][2] + slices.four[i][3]);
    static_assert(kReads == 4, "all are added");
    return lane_sum<kLanes>((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// 1 / RMS from the sum of the squares and 1 / their number.
__device__ __forceinline__ float rms_factor(float square, float share, float eps) { return rsqrtf(square * share + eps); }

// Second kernel, block `block` of ceil(columns / kMixColumns) for a token: x = sum_j w_j X'_j and its RMS norm, w_j = sigmoid(m_j * scale +
// base_j) + hc_eps; `share` is 1 / columns. One half of the threads adds the sums while the other waits for its columns (ptxas lets a
// thread that does both ask for columns behind the first additions, a second trip to L2). `shared`: kMixShared bytes.
template <int ROWS>
__device__ __forceinline__ void collapse(const bf16* X, const float* partials, const float* base, const float* scale, const float* norm,
                                         bf16* x, int block, int columns, float share, float norm_eps, float hc_eps, float* shared) {
    const int token = blockIdx.y, half = warp_number() / (kMixThreads / 64);
    const int own = block * kMixColumns + threadIdx.x % (kMixThreads / 2) * 8, column = min(own, columns - 8);
    const float bias = base[threadIdx.x % kStreams], slope = scale[0];  // weights, as all that is read before the wait
    float weight[8], w[kStreams], s[kSlots], v[8] = {};
    uint4 in[kStreams];
    load(weight, norm + column);
    X += token * kStreams * columns;
    partials += token * (ROWS + kSums) * kSlices;
    const int slot = threadIdx.x / kLanes % (kSlots / 2);  // and slot + kSlots / 2: the first rows of fn, then G and its trace
    const float* const low = first_slice(partials, slot < kStreams ? slot : slot - kStreams + ROWS);
    const float* const high = first_slice(partials, min(slot + kSlots / 2 - kStreams, kSums - 1) + ROWS);
    const bf16* mine = X + column;
    worked_out(mine);
    grid_dependency_launch();
    grid_dependency_wait();
    if (half == 0) {
        const Slices slices[2] = {read_slices(low), read_slices(high)};
        const float sums[2] = {add_slices(slices[0]), add_slices(slices[1])};
        if (threadIdx.x % kLanes == 0) shared[slot] = sums[0], shared[slot + kSlots / 2] = sums[1];
    } else {
#pragma unroll
        for (int j = 0; j < kStreams; j++) in[j] = *reinterpret_cast<const uint4*>(mine + j * columns);
    }
    __syncthreads();
    load(s, shared);
    const float *G = s + kStreams, m = shared[threadIdx.x % kStreams] * rms_factor(G[kProducts], share / kStreams, norm_eps);
    const float weighted = sigmoid(m * slope + bias) + hc_eps;
#pragma unroll
    for (int j = 0; j < kStreams; j++) w[j] = __shfl_sync(~0u, weighted, j);
    const float apart = w[0] * w[0] * G[0] + w[1] * w[1] * G[4] + w[2] * w[2] * G[7] + w[3] * w[3] * G[9];
    const float cross = w[0] * (w[1] * G[1] + w[2] * G[2] + w[3] * G[3]) + w[1] * (w[2] * G[5] + w[3] * G[6]) + w[2] * w[3] * G[8];
    float square = apart + 2.0f * cross;
    if (!(square >= 0.015625f * apart && square < INFINITY)) {  // the same in all threads of all blocks
        square = 0.0f;
#pragma unroll 1
        for (int i = threadIdx.x * 8; i < columns; i += kMixThreads * 8) {
            float value[8] = {}, stream[8];
#pragma unroll
            for (int j = 0; j < kStreams; j++) {
                unpack(*reinterpret_cast<const uint4*>(X + j * columns + i), stream);
#pragma unroll
                for (int n = 0; n < 8; n++) value[n] += w[j] * stream[n];
            }
#pragma unroll
            for (int n = 0; n < 8; n++) square += value[n] * value[n];
        }
        square = block_sum(square, shared + kSlots);
    }
    if (half == 0 || own >= columns) return;
    const float factor = rms_factor(square, share, norm_eps);
#pragma unroll
    for (int j = 0; j < kStreams; j++) {
        float stream[8];
        unpack(in[j], stream);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += w[j] * stream[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = v[i] * factor * weight[i];
    store(x + token * columns + column, v);
}

}  // namespace mhc
