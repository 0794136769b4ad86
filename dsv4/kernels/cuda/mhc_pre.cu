// mhc_pre: the last block's output returns to the streams, then a block's input is made of them (dsv4/ops/mhc.py, mhc_pre_ref):
// X' = post * o + comb^T X; m = fn . X' / rms(X'); x = rms_norm(sum_j pre_j X'_j); the next post; the next comb by sinkhorn.
//
// Two dependent launches. project: a slice of columns a block (Pro: 128 blocks of 56, Flash: 128 of 32), fn in registers before the wait.
// mix: two blocks a token, one for x, one for post and comb.
// Pro, one token, planned at 1.8 GHz: fn is 2.75 MB = 0.6 us at 4.5 TB/s, all ahead of the wait; X, o and X' are 130 KB in L2. Behind the
// wait project has one L2 read, 40 + 32 FMA and 3 shuffles, about 700 cycles (0.4 us). mix has, for x, 57 KB into one SM (900 cycles at 64
// bytes a clock), a barrier and a block sum, about 2,000 cycles (1.1 us); beside it the sums, a softmax and sinkhorn's 39 steps of 50
// cycles (4 FMA, 4 reciprocals 8 cycles apart), about 2,700 cycles (1.5 us). With 1.2 us a launch in a PDL chain: 1.6 + 2.7 us. One block
// alone makes x because its norm then needs no sum over blocks, and sinkhorn takes longer anyway.
#include "mhc.cuh"

namespace mhc {

constexpr int kRows = (2 + kStreams) * kStreams;

// Sinkhorn of the softmaxed 4 x 4 matrix C, in the registers of one thread: rows and columns are divided by (their sum + eps) in turn, the
// columns first and last. Only the 4 + 4 divisors are carried: with C = diag(1 / R) C0 diag(1 / Q) a row step C_jk / (sum_k C_jk + eps) is
// R_j <- sum_k C0_jk / Q_k + eps R_j. The same formula, 20 instead of 32 operations a step, and no rounding of C between the steps.
__device__ __forceinline__ void sinkhorn(float (&C)[kStreams][kStreams], int iterations, float eps) {
    float R[kStreams], Q[kStreams], row[kStreams], column[kStreams];  // row = 1 / R, column = 1 / Q
#pragma unroll
    for (int j = 0; j < kStreams; j++) R[j] = Q[j] = row[j] = 1.0f;
#pragma unroll 1
    for (int step = 0;; step++) {
#pragma unroll
        for (int k = 0; k < kStreams; k++) {
            Q[k] = eps * Q[k] + C[0][k] * row[0] + C[1][k] * row[1] + C[2][k] * row[2] + C[3][k] * row[3];
            column[k] = reciprocal(Q[k]);
        }
        if (step + 1 >= iterations) break;
#pragma unroll
        for (int j = 0; j < kStreams; j++) {
            R[j] = eps * R[j] + C[j][0] * column[0] + C[j][1] * column[1] + C[j][2] * column[2] + C[j][3] * column[3];
            row[j] = reciprocal(R[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < kStreams; j++)
#pragma unroll
        for (int k = 0; k < kStreams; k++) C[j][k] *= row[j] * column[k];
}

// post and comb of a token from the projection. `shared`: 16 logits and the softmax of them.
__device__ __forceinline__ void connections(const float* partials, const float* base, const float* scale, float* post, float* comb,
                                            int columns, int blocks, int iterations, float norm_eps, float hc_eps, float* shared) {
    constexpr int kEntries = kStreams * kStreams;
    const int token = blockIdx.y, lane = threadIdx.x % 32;
    const float bias = lane < kRows ? base[lane] : 0.0f, post_slope = scale[1], comb_slope = scale[2];  // weights: before the wait
    grid_dependency_launch();
    grid_dependency_wait();
    for (int row = kStreams + threadIdx.x / 32; row < kRows; row += blockDim.x / 32) {
        const float slope = row < 2 * kStreams ? post_slope : comb_slope;
        const float m = projection(read_parts<kRows>(partials, token, row, blocks), columns, norm_eps);
        const float value = m * slope + __shfl_sync(~0u, bias, row);
        if (lane) continue;
        if (row < 2 * kStreams) post[token * kStreams + row - kStreams] = 2.0f * sigmoid(value);
        else shared[row - 2 * kStreams] = value;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float logit = shared[lane % kEntries];  // lanes 16 to 31 do as lanes 0 to 15; four lanes have a row
    float top = fmaxf(logit, __shfl_xor_sync(~0u, logit, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float e = expf(logit - top);
    const float soft = __fdividef(e, lane_sum<kStreams>(e)) + hc_eps;
    if (lane < kEntries) shared[kEntries + lane] = soft;
    __syncwarp();
    if (lane) return;
    float C[kStreams][kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; j++) load(C[j], shared + kEntries + j * kStreams);
    sinkhorn(C, iterations, hc_eps);
#pragma unroll
    for (int j = 0; j < kStreams; j++) store(comb + (token * kStreams + j) * kStreams, C[j]);
}

}  // namespace mhc

__global__ void __launch_bounds__(mhc::kProjectThreads, 2) mhc_pre_project(const mhc::bf16* o, const mhc::bf16* X, const float* post,
                                                                           const float* comb, const float* fn, mhc::bf16* streams,
                                                                           float* partials, int tokens, int columns, int slice) {
    mhc::project<mhc::kRows>(o, X, post, comb, fn, streams, partials, tokens, columns, slice);
}

__global__ void __launch_bounds__(mhc::kCollapseThreads) mhc_pre_mix(const mhc::bf16* X, const float* partials, const float* base,
                                                                     const float* scale, const float* norm, mhc::bf16* x, float* post,
                                                                     float* comb, int columns, int blocks, int iterations, float norm_eps,
                                                                     float hc_eps) {
    DYN_SMEM(float, shared);
    if (blockIdx.x == 0) mhc::collapse<mhc::kRows>(X, partials, base, scale, norm, x, columns, blocks, norm_eps, hc_eps, shared);
    else mhc::connections(partials, base, scale, post, comb, columns, blocks, iterations, norm_eps, hc_eps, shared);
}

// o [tokens, columns], X [tokens, 4, columns], post [tokens, 4], comb [tokens, 4, 4]: the return that is pending, with streams
// [tokens, 4, columns] for X'; or null for all but X. fn [24, 4 columns], base [24], scale [3], norm [columns]. partials
// [tokens, 25, ceil(columns / slice)] is a workspace. x [tokens, columns], next_post, next_comb as post and comb. 1 to 8 tokens; columns a
// multiple of 8 up to 8,192, slice one of 4 up to 64; at least one iteration.
extern "C" int mhc_pre(const __nv_bfloat16* o, const __nv_bfloat16* X, const float* post, const float* comb, const float* fn,
                       const float* base, const float* scale, const float* norm, __nv_bfloat16* streams, float* partials,
                       __nv_bfloat16* x, float* next_post, float* next_comb, int tokens, int columns, int slice, int iterations,
                       float norm_eps, float hc_eps, cudaStream_t stream) {
    const int blocks = (columns + slice - 1) / slice, staged = tokens * mhc::kStreams * mhc::kSlice * sizeof(float);
    LAUNCH(mhc_pre_project, dim3(blocks), dim3(mhc::kProjectThreads), staged, stream, o, X, post, comb, fn, streams, partials, tokens,
           columns, slice);
    if (const cudaError_t error = cudaGetLastError()) return error;
    LAUNCH(mhc_pre_mix, dim3(2, tokens), dim3(mhc::collapse_threads(columns)), mhc::kCollapseShared, stream, streams ? streams : X,
           partials, base, scale, norm, x, next_post, next_comb, columns, blocks, iterations, norm_eps, hc_eps);
    return cudaGetLastError();
}
