// mhc_pre: the last block's output returns to the streams, then a block's input is made of them (dsv4/ops/mhc.py, mhc_pre_ref):
// X' = post * o + comb^T X; m = fn . X' / rms(X'); x = rms_norm(sum_j pre_j X'_j); the next post; the next comb by sinkhorn.
//
// Two dependent launches, each with one trip to L2 behind its wait. project: a slice of columns a block (Pro: 128 of 56, Flash: 128 of 32),
// fn in registers before the wait. mix: a block a token for post and comb, a warp each, and a block for each 512 columns of x (14, 8).
// Pro, one token: fn is 2.75 MB = 0.6 us at 4.5 TB/s, all ahead of the wait; X, o and X' are 130 KB in L2. Behind its read, project has
// 40 + 32 FMA, a barrier and 5 shuffles, about 450 cycles of the compiled code. Behind theirs (11 KB a block), mix's blocks for x have 3
// shuffles, a barrier, a sigmoid and two roots, about 500; the warp for comb has 3 shuffles, a softmax and sinkhorn's 39 steps of about 39
// cycles, in all about 1,950. So comb is what mix takes, and x is there 0.75 us before it. Predicted for both launches, Pro and Flash:
// 4.1 us.
// Measured on an H200: Pro 3.8 us, Flash 3.6 (docs/measurements.md).
#include "mhc.cuh"

namespace mhc {

constexpr int kRows = (2 + kStreams) * kStreams;

// 1 / v_i of four values, as the product of the others times one reciprocal, of the product of all. A reciprocal each would queue at the
// one unit that a warp has for them, 8 cycles each; and what 1 / v_i is a factor of need not wait for the reciprocal, which comes in last.
struct Inverse {
    float others[kStreams], whole;
    __device__ __forceinline__ void of(const float (&v)[kStreams]) {
        const float low = v[0] * v[1], high = v[2] * v[3];
        whole = reciprocal(low * high);
        others[0] = v[1] * high, others[1] = v[0] * high, others[2] = v[3] * low, others[3] = v[2] * low;
    }
};

// Sinkhorn of the softmaxed 4 x 4 matrix C, in the registers of one thread: rows and columns are divided by (their sum + eps) in turn, the
// columns first and last. Only the 4 + 4 divisors are carried: with C = diag(1 / R) C0 diag(1 / Q) a row step C_jk / (sum_k C_jk + eps) is
// R_j <- sum_k C0_jk / Q_k + eps R_j. The same formula, 20 instead of 32 operations a step, and no rounding of C between the steps. The
// product of four divisors neither overflows nor vanishes: no step enlarges it from 1 (the sums that it takes on have the mean 1), and it
// stays above the permanent of C0, 24 eps^3.
__device__ __forceinline__ void sinkhorn(float (&C)[kStreams][kStreams], int iterations, float eps) {
    float R[kStreams], Q[kStreams];
    Inverse row, column;
#pragma unroll
    for (int k = 0; k < kStreams; k++) {
        R[k] = row.others[k] = 1.0f;
        Q[k] = eps + (C[0][k] + C[1][k] + C[2][k] + C[3][k]);
    }
    row.whole = 1.0f;
    column.of(Q);
#pragma unroll 2  // a branch is 7 cycles
    for (int step = 1; step < iterations; step++) {
#pragma unroll
        for (int j = 0; j < kStreams; j++) {
            const float* const c = C[j];
            const float sum = c[0] * column.others[0] + c[1] * column.others[1] + c[2] * column.others[2] + c[3] * column.others[3];
            R[j] = __fmaf_rn(column.whole, sum, eps * R[j]);
        }
        row.of(R);
#pragma unroll
        for (int k = 0; k < kStreams; k++) {
            const float sum = C[0][k] * row.others[0] + C[1][k] * row.others[1] + C[2][k] * row.others[2] + C[3][k] * row.others[3];
            Q[k] = __fmaf_rn(row.whole, sum, eps * Q[k]);
        }
        column.of(Q);
    }
#pragma unroll
    for (int j = 0; j < kStreams; j++)
#pragma unroll
        for (int k = 0; k < kStreams; k++) C[j][k] *= (row.others[j] * row.whole) * (column.others[k] * column.whole);
}

// The next comb of a token, by a warp: eight lanes have a row of it. `shared`: 16 floats.
__device__ __forceinline__ void connect(const float* partials, const float* base, const float* scale, float* comb, float share,
                                        int iterations, float norm_eps, float hc_eps, float* shared) {
    const int row = threadIdx.x / kLanes % kStreams, first = 2 * kStreams + row * kStreams;
    float bias[kStreams], logit[kStreams], C[kStreams][kStreams], sum = 0.0f;
    load(bias, base + first);  // weights: before the wait
    const float slope = scale[2];
    const float *const trace = first_slice(partials, kRows + kProducts), *const own = first_slice(partials, first);
    grid_dependency_launch();
    grid_dependency_wait();
    Slices slices[kStreams];
#pragma unroll
    for (int k = 0; k < kStreams; k++) slices[k] = read_slices(own + k * kSlices);
    const Slices squares = read_slices(trace);
    const float factor = rms_factor(add_slices(squares), share / kStreams, norm_eps) * slope;
#pragma unroll
    for (int k = 0; k < kStreams; k++) logit[k] = add_slices(slices[k]) * factor + bias[k];
    const float top = fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3]));
#pragma unroll
    for (int k = 0; k < kStreams; k++) sum += logit[k] = expf(logit[k] - top);
    const float inverse = reciprocal(sum);
#pragma unroll
    for (int k = 0; k < kStreams; k++) logit[k] = logit[k] * inverse + hc_eps;
    if (threadIdx.x % kLanes == 0) store(shared + row * kStreams, logit);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kStreams; j++) load(C[j], shared + j * kStreams);
    sinkhorn(C, iterations, hc_eps);
    if (threadIdx.x % 32) return;
#pragma unroll
    for (int j = 0; j < kStreams; j++) store(comb + j * kStreams, C[j]);
}

// The next post of a token, by a warp: eight lanes have an entry.
__device__ __forceinline__ void weigh(const float* partials, const float* base, const float* scale, float* post, float share,
                                      float norm_eps) {
    const int entry = threadIdx.x / kLanes % kStreams;
    const float bias = base[kStreams + entry], slope = scale[1];  // weights: before the wait
    const float *const trace = first_slice(partials, kRows + kProducts), *const own = first_slice(partials, kStreams + entry);
    grid_dependency_launch();
    grid_dependency_wait();
    const Slices squares = read_slices(trace), slices = read_slices(own);
    const float factor = rms_factor(add_slices(squares), share / kStreams, norm_eps) * slope;
    const float value = add_slices(slices) * factor + bias;
    if (threadIdx.x % kLanes == 0) post[entry] = 2.0f * sigmoid(value);
}

}  // namespace mhc

__global__ void __launch_bounds__(mhc::kProjectThreads, 2) mhc_pre_project(const mhc::Return last, const mhc::bf16* X, const float* fn,
                                                                           float* partials, int tokens, int columns, int slice) {
    mhc::project<mhc::kRows>(last, X, fn, partials, tokens, columns, slice);
}

// 1 block a SM: or ptxas saves registers and lets the warp for comb ask for its 20 reads in two trips.
__global__ void __launch_bounds__(mhc::kMixThreads, 1) mhc_pre_mix(const mhc::bf16* X, const float* partials, const float* base,
                                                                   const float* scale, const float* norm, mhc::bf16* x, float* post,
                                                                   float* comb, int columns, float share, int iterations, float norm_eps,
                                                                   float hc_eps) {
    using namespace mhc;
    DYN_SMEM(float, shared);
    const int token = blockIdx.y, warp = warp_number();
    if (blockIdx.x) {
        collapse<kRows>(X, partials, base, scale, norm, x, blockIdx.x - 1, columns, share, norm_eps, hc_eps, shared);
        return;
    }
    partials += token * (kRows + kSums) * kSlices;
    if (warp == 0) connect(partials, base, scale, comb + token * kStreams * kStreams, share, iterations, norm_eps, hc_eps, shared);
    else if (warp == 1) weigh(partials, base, scale, post + token * kStreams, share, norm_eps);
}

// What is pending, or all null: o [tokens, columns], or `parts` > 0 (up to 4) partial sums [parts, tokens, columns] in fp32; post
// [tokens, 4], comb [tokens, 4, 4]; streams [tokens, 4, columns] for X'. X [tokens, 4, columns]. fn [24, 4 columns], base [24], scale [3],
// norm [columns]. partials [tokens, 35, 128] is a workspace. x [tokens, columns], next_post, next_comb as post and comb.
// 1 to 65,535 tokens, tokens * 4 * columns below 2^31; columns a multiple of 8 up to 8,192, slice one of 8 up to 64 of which 128 are a row; at least one iteration.
extern "C" int mhc_pre(const void* o, const __nv_bfloat16* X, const float* post, const float* comb, const float* fn, const float* base,
                       const float* scale, const float* norm, __nv_bfloat16* streams, float* partials, __nv_bfloat16* x, float* next_post,
                       float* next_comb, int parts, int tokens, int columns, int slice, int iterations, float norm_eps, float hc_eps,
                       cudaStream_t stream) {
    using namespace mhc;
    const int staged = min(tokens, kMostTokens) * kStreams * slice * sizeof(float), blocks = 1 + (columns + kMixColumns - 1) / kMixColumns;
    LAUNCH(mhc_pre_project, dim3(kSlices, (tokens + kMostTokens - 1) / kMostTokens), dim3(kProjectThreads), staged, stream, Return{o, post, comb, streams, parts}, X, fn, partials,
           tokens, columns, slice);
    if (const cudaError_t error = cudaGetLastError()) return error;
    LAUNCH(mhc_pre_mix, dim3(blocks, tokens), dim3(kMixThreads), kMixShared, stream, streams ? streams : X, partials, base, scale, norm, x,
           next_post, next_comb, columns, 1.0f / columns, iterations, norm_eps, hc_eps);
    return cudaGetLastError();
}
