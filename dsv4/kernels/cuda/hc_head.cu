// hc_head: the last collapse of the streams and the last norm (dsv4/ops/mhc.py, hc_head_ref): m = fn . X / rms(X), four rows;
// out = rms_norm(sum_j (sigmoid(m_j * scale + base_j) + hc_eps) X_j). Once a token.
//
// Two dependent launches, as mhc_pre's without a return, post and comb. Pro: fn 0.46 MB ahead of the wait. Predicted: 1.8 us each.
// Measured on an H200: 2.3 us (docs/measurements.md).
#include "mhc.cuh"

__global__ void __launch_bounds__(mhc::kProjectThreads, 2) hc_head_project(const mhc::bf16* X, const float* fn, float* partials,
                                                                           int tokens, int columns, int slice) {
    mhc::project<mhc::kStreams>({}, X, fn, partials, tokens, columns, slice);
}

__global__ void __launch_bounds__(mhc::kMixThreads) hc_head_collapse(const mhc::bf16* X, const float* partials, const float* base,
                                                                     const float* scale, const float* norm, mhc::bf16* out, int columns,
                                                                     float share, float norm_eps, float hc_eps) {
    DYN_SMEM(float, shared);
    mhc::collapse<mhc::kStreams>(X, partials, base, scale, norm, out, blockIdx.x, columns, share, norm_eps, hc_eps, shared);
}

// X [tokens, 4, columns], fn [4, 4 columns], base [4], scale [1], norm [columns]; partials [tokens, 15, 128] is a
// workspace; out [tokens, columns]. 1 to 65,535 tokens, tokens * 4 * columns below 2^31; columns a multiple of 8
// up to 8,192, slice one of 8 up to 64 of which 128 are a row.
extern "C" int hc_head(const __nv_bfloat16* X, const float* fn, const float* base, const float* scale, const float* norm, float* partials,
                       __nv_bfloat16* out, int tokens, int columns, int slice, float norm_eps, float hc_eps, cudaStream_t stream) {
    using namespace mhc;
    const int staged = min(tokens, kMostTokens) * kStreams * slice * sizeof(float), blocks = (columns + kMixColumns - 1) / kMixColumns;
    LAUNCH(hc_head_project, dim3(kSlices, (tokens + kMostTokens - 1) / kMostTokens), dim3(kProjectThreads), staged, stream, X, fn, partials, tokens, columns, slice);
    if (const cudaError_t error = cudaGetLastError()) return error;
    LAUNCH(hc_head_collapse, dim3(blocks, tokens), dim3(kMixThreads), kMixShared, stream, X, partials, base, scale, norm, out, columns,
           1.0f / columns, norm_eps, hc_eps);
    return cudaGetLastError();
}
