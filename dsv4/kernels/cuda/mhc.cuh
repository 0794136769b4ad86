// What mhc_pre and hc_head share: the projection of the four streams by the rows of fn with the sum of squares on the way (a grid of
// column slices), and the collapse of the streams with the RMS norm behind it (one block a token). dsv4/ops/mhc.py has the meaning.
//
// The partial sums go from the first to the second as float [tokens][rows + 1][blocks]: a row of fn each, then the squares. A warp reads
// one of them as consecutive floats and adds them in a fixed order.
#pragma once
#include "common.cuh"

namespace mhc {

using bf16 = __nv_bfloat16;
constexpr int kStreams = 4;
constexpr int kLanes = 8;                         // threads that share a row of fn within a slice
constexpr int kSlice = 64;                        // most columns of each stream in a slice
constexpr int kSteps = kSlice / 4 / kLanes;       // 16-byte pieces of fn that a thread has of each stream
constexpr int kMostBlocks = 128;                  // slices of a row: four for each lane of the warp that adds them
constexpr int kMostTokens = 8;                    // a warp each
constexpr int kProjectThreads = 32 * kMostTokens;  // with 2 blocks a SM in __launch_bounds__: for more, X is read in four round trips
constexpr int kCollapseThreads = 1024;            // at most, 8 columns each
constexpr int kCollapseShared = (kStreams + kCollapseThreads / 32) * sizeof(float);

// Threads of the second kernel; 8 warps at least, for what mhc_pre does beside the collapse.
inline int collapse_threads(int columns) { return columns <= 2048 ? 256 : (columns / 8 + 31) / 32 * 32; }

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

template <int LANES = 32> __device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
    for (int offset = LANES / 2; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

__device__ __forceinline__ void unpack(uint2 from, float (&to)[4]) {
    to[0] = bf16_lo(from.x), to[1] = bf16_hi(from.x), to[2] = bf16_lo(from.y), to[3] = bf16_hi(from.y);
}

// One token's streams X' of this block's columns, by one warp: post * o + comb^T X, rounded to bf16 and written to `streams`, or X itself
// where `streams` is null. They are left in `staged`, [4][kSlice] in shared memory, zeros beyond `width`. Returns the lane's squares' sum.
// A lane has 4 columns of two neighbouring streams. Lanes beyond `width` read the last columns, so that every load is on its way before
// the first is needed.
__device__ __forceinline__ float stage_streams(const bf16* o, const bf16* X, const float* post, const float* comb, bf16* streams,
                                               float* staged, int token, int columns, int begin, int width) {
    constexpr int kQuads = kSlice / 4;
    const int lane = threadIdx.x % 32, k = lane / kQuads * 2, first = lane % kQuads * 4, column = begin + min(first, width - 4);
    const int64_t row = int64_t(token) * kStreams;
    float value[2][4];
    if (streams) {
        uint2 in[kStreams];
        float p[2], c[kStreams][2];
        const uint2 out = *reinterpret_cast<const uint2*>(o + int64_t(token) * columns + column);
        load(p, post + row + k);
#pragma unroll
        for (int j = 0; j < kStreams; j++) {
            in[j] = *reinterpret_cast<const uint2*>(X + (row + j) * columns + column);
            load(c[j], comb + (row + j) * kStreams + k);
        }
        float x[4];
        unpack(out, x);
#pragma unroll
        for (int i = 0; i < 4; i++) value[0][i] = p[0] * x[i], value[1][i] = p[1] * x[i];
#pragma unroll
        for (int j = 0; j < kStreams; j++) {
            unpack(in[j], x);
#pragma unroll
            for (int i = 0; i < 4; i++) value[0][i] += c[j][0] * x[i], value[1][i] += c[j][1] * x[i];
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint2 rounded = make_uint2(pack_bf16(value[n][0], value[n][1]), pack_bf16(value[n][2], value[n][3]));
            if (first < width) *reinterpret_cast<uint2*>(streams + (row + k + n) * columns + column) = rounded;
            unpack(rounded, value[n]);
        }
    } else {
#pragma unroll
        for (int n = 0; n < 2; n++) unpack(*reinterpret_cast<const uint2*>(X + (row + k + n) * columns + column), value[n]);
    }
    float square = 0.0f;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            value[n][i] = first < width ? value[n][i] : 0.0f;
            square += value[n][i] * value[n][i];
        }
        store(staged + (k + n) * kSlice + first, value[n]);
    }
    return square;
}

// First kernel, ceil(columns / slice) blocks of kProjectThreads. Eight threads have a row of fn, in registers. The tokens' streams are made
// by the warps from the last on, so that for a few tokens the squares are added beside the rows.
template <int ROWS>
__device__ __forceinline__ void project(const bf16* o, const bf16* X, const float* post, const float* comb, const float* fn, bf16* streams,
                                        float* partials, int tokens, int columns, int slice) {
    static_assert(ROWS * kLanes <= kProjectThreads && ROWS * kLanes % 32 == 0, "whole warps have rows of fn");
    DYN_SMEM(float, staged);
    const int row = threadIdx.x / kLanes, begin = blockIdx.x * slice, width = min(slice, columns - begin), first = threadIdx.x % kLanes * 4;
    uint4 weights[kStreams][kSteps];  // on their way before anything is waited for
#pragma unroll
    for (int j = 0; j < kStreams; j++)
#pragma unroll
        for (int i = 0; i < kSteps; i++) {
            const int column = first + i * kLanes * 4;
            weights[j][i] = make_uint4(0, 0, 0, 0);
            if (row < ROWS && column < width) weights[j][i] = load_stream(fn + int64_t(row * kStreams + j) * columns + begin + column);
        }
    grid_dependency_launch();
    grid_dependency_wait();
    const int mine = kMostTokens - 1 - threadIdx.x / 32;
    float square = 0.0f;
    if (mine < tokens) square = stage_streams(o, X, post, comb, streams, staged + mine * kStreams * kSlice, mine, columns, begin, width);
    __syncthreads();
    partials += blockIdx.x;
    if (mine < tokens) {
        square = lane_sum(square);
        if (threadIdx.x % 32 == 0) partials[(mine * (ROWS + 1) + ROWS) * gridDim.x] = square;
    }
    if (row >= ROWS) return;
#pragma unroll 2
    for (int token = 0; token < tokens; token++) {
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < kSteps; i++) {
            if (i * kLanes * 4 >= width) break;
#pragma unroll
            for (int j = 0; j < kStreams; j++) {
                float v[4];
                load(v, staged + (token * kStreams + j) * kSlice + first + i * kLanes * 4);
                sum[0] += __uint_as_float(weights[j][i].x) * v[0];
                sum[1] += __uint_as_float(weights[j][i].y) * v[1];
                sum[2] += __uint_as_float(weights[j][i].z) * v[2];
                sum[3] += __uint_as_float(weights[j][i].w) * v[3];
            }
        }
        const float total = lane_sum<kLanes>((sum[0] + sum[1]) + (sum[2] + sum[3]));
        if (threadIdx.x % kLanes == 0) partials[(token * (ROWS + 1) + row) * gridDim.x] = total;
    }
}

// A row of fn's partial sums and those of the squares, by a warp: four slices a lane, all on their way before the first is needed.
struct Parts { float dot[kMostBlocks / 32], square[kMostBlocks / 32]; };

template <int ROWS> __device__ __forceinline__ Parts read_parts(const float* partials, int token, int row, int blocks) {
    const float *dots = partials + (token * (ROWS + 1) + row) * blocks, *squares = partials + (token * (ROWS + 1) + ROWS) * blocks;
    Parts parts;
#pragma unroll
    for (int i = 0; i < kMostBlocks / 32; i++) {
        const int block = i * 32 + threadIdx.x % 32, there = min(block, blocks - 1);
        parts.dot[i] = dots[there], parts.square[i] = squares[there];
        if (block != there) parts.dot[i] = parts.square[i] = 0.0f;
    }
    return parts;
}

// The projection by the row, scaled by the RMS of all streams; the same in every lane.
__device__ __forceinline__ float projection(const Parts& parts, int columns, float eps) {
    const float dot = lane_sum((parts.dot[0] + parts.dot[1]) + (parts.dot[2] + parts.dot[3]));
    const float square = lane_sum((parts.square[0] + parts.square[1]) + (parts.square[2] + parts.square[3]));
    return dot * rsqrtf(__fdividef(square, kStreams * columns) + eps);
}

// Second kernel, one block a token, 8 columns a thread: x = bf16(sum_j w_j X'_j), w_j = sigmoid(m_j * scale + base_j) + hc_eps; then its
// RMS norm. The first four warps make one w each while all wait for their part of X', behind which the partial sums
// must not queue. `shared`: kCollapseShared bytes.
template <int ROWS>
__device__ __forceinline__ void collapse(const bf16* X, const float* partials, const float* base, const float* scale, const float* norm,
                                         bf16* x, int columns, int blocks, float norm_eps, float hc_eps, float* shared) {
    const int token = blockIdx.y, warp = threadIdx.x / 32, column = threadIdx.x * 8;
    const bool mine = column < columns;
    const float bias = base[min(warp, kStreams - 1)], slope = scale[0];  // weights, as all that is read before the wait
    float weight[8], w[kStreams], v[8], square = 0.0f;
    Parts parts;
    uint4 in[kStreams];
    if (mine) load(weight, norm + column);
    grid_dependency_launch();
    grid_dependency_wait();
    if (warp < kStreams) parts = read_parts<ROWS>(partials, token, warp, blocks);
#pragma unroll
    for (int j = 0; j < kStreams; j++)
        if (mine) in[j] = *reinterpret_cast<const uint4*>(X + (int64_t(token) * kStreams + j) * columns + column);
    if (warp < kStreams) {
        const float weighted = sigmoid(projection(parts, columns, norm_eps) * slope + bias) + hc_eps;
        if (threadIdx.x % 32 == 0) shared[warp] = weighted;
    }
    __syncthreads();
    load(w, shared);
    if (mine) {
        const uint32_t word[4][kStreams] = {{in[0].x, in[1].x, in[2].x, in[3].x}, {in[0].y, in[1].y, in[2].y, in[3].y},
                                            {in[0].z, in[1].z, in[2].z, in[3].z}, {in[0].w, in[1].w, in[2].w, in[3].w}};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float lo = 0.0f, hi = 0.0f;
#pragma unroll
            for (int j = 0; j < kStreams; j++) lo += w[j] * bf16_lo(word[i][j]), hi += w[j] * bf16_hi(word[i][j]);
            const uint32_t rounded = pack_bf16(lo, hi);
            v[2 * i] = bf16_lo(rounded), v[2 * i + 1] = bf16_hi(rounded);
            square += v[2 * i] * v[2 * i] + v[2 * i + 1] * v[2 * i + 1];
        }
    }
    const float factor = rsqrtf(__fdividef(block_sum(square, shared + kStreams), columns) + norm_eps);
    if (!mine) return;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = v[i] * factor * weight[i];
    store(x + int64_t(token) * columns + column, v);
}

}  // namespace mhc
