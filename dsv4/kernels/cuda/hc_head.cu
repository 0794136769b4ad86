// hc_head: the last collapse of the streams and the last norm (dsv4/ops/mhc.py, hc_head_ref): m = fn . X / rms(X), four rows;
// out = rms_norm(bf16(sum_j (sigmoid(m_j * scale + base_j) + hc_eps) X_j)). Once a token.
//
// Two dependent launches, as mhc_pre's without post and comb. Pro: fn 0.46 MB ahead of the wait, then 0.4 and 1.1 us: 1.6 + 2.3 us.
#include "mhc.cuh"

__global__ void __launch_bounds__(mhc::kProjectThreads, 2) hc_head_project(const mhc::bf16* X, const float* fn, float* partials,
                                                                           int tokens, int columns, int slice) {
    mhc::project<mhc::kStreams>(nullptr, X, nullptr, nullptr, fn, nullptr, partials, tokens, columns, slice);
}

__global__ void __launch_bounds__(mhc::kCollapseThreads) hc_head_collapse(const mhc::bf16* X, const float* partials, const float* base,
                                                                          const float* scale, const float* norm, mhc::bf16* out,
                                                                          int columns, int blocks, float norm_eps, float hc_eps) {
    DYN_SMEM(float, shared);
    mhc::collapse<mhc::kStreams>(X, partials, base, scale, norm, out, columns, blocks, norm_eps, hc_eps, shared);
}

// X [tokens, 4, columns], fn [4, 4 columns], base [4], scale [1], norm [columns]; partials [tokens, 5, ceil(columns / slice)] is a
// workspace; out [tokens, columns]. 1 to 8 tokens; columns a multiple of 8 up to 8,192, slice one of 4 up to 64.
extern "C" int hc_head(const __nv_bfloat16* X, const float* fn, const float* base, const float* scale, const float* norm, float* partials,
                       __nv_bfloat16* out, int tokens, int columns, int slice, float norm_eps, float hc_eps, cudaStream_t stream) {
    const int blocks = (columns + slice - 1) / slice, staged = tokens * mhc::kStreams * mhc::kSlice * sizeof(float);
    LAUNCH(hc_head_project, dim3(blocks), dim3(mhc::kProjectThreads), staged, stream, X, fn, partials, tokens, columns, slice);
    if (const cudaError_t error = cudaGetLastError()) return error;
    LAUNCH(hc_head_collapse, dim3(1, tokens), dim3(mhc::collapse_threads(columns)), mhc::kCollapseShared, stream, X, partials, base, scale,
           norm, out, columns, blocks, norm_eps, hc_eps);
    return cudaGetLastError();
}
