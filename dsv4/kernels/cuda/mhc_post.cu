// mhc_post: out[s, k] = post[s, k] * o[s] + sum_j comb[s, j, k] * X[s, j], for 4 streams (dsv4/ops/mhc.py, mhc_post_ref).
//
// A thread has the same N columns of all four streams, so every value is read once; comb is used by its FIRST index j.
#include "common.cuh"

constexpr int kStreams = 4, kThreads = 128;

template <class T, int N>
__global__ void __launch_bounds__(kThreads) mhc_post_kernel(const T* o, const T* X, const float* post, const float* comb, T* out, int columns) {
    grid_dependency_launch();
    grid_dependency_wait();  // all inputs are activations
    const int64_t token = blockIdx.y;
    const int column = (blockIdx.x * kThreads + threadIdx.x) * N;
    if (column >= columns) return;
    const int64_t streams = token * kStreams * columns + column;
    post += token * kStreams;
    comb += token * kStreams * kStreams;
    float in[kStreams][N], block[N], sum[N];
    load(block, o + token * columns + column);
#pragma unroll
    for (int j = 0; j < kStreams; j++) load(in[j], X + streams + int64_t(j) * columns);
#pragma unroll
    for (int k = 0; k < kStreams; k++) {
        const float p = post[k];
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = p * block[i];
#pragma unroll
        for (int j = 0; j < kStreams; j++) {
            const float c = comb[j * kStreams + k];
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += c * in[j][i];
        }
        store(out + streams + int64_t(k) * columns, sum);
    }
}

template <class T, int N>
static cudaError_t launch(const T* o, const T* X, const float* post, const float* comb, T* out, int tokens, int columns, cudaStream_t stream) {
    auto kernel = mhc_post_kernel<T, N>;
    LAUNCH(kernel, dim3((columns / N + kThreads - 1) / kThreads, tokens), dim3(kThreads), 0, stream, o, X, post, comb, out, columns);
    return cudaGetLastError();
}

template <class T>
static cudaError_t choose(const T* o, const T* X, const float* post, const float* comb, T* out, int tokens, int columns, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    if (rows_aligned(o, columns) && rows_aligned(X, columns) && rows_aligned(out, columns))
        return launch<T, N>(o, X, post, comb, out, tokens, columns, stream);
    return launch<T, 1>(o, X, post, comb, out, tokens, columns, stream);
}

// o [tokens, columns], X and out [tokens, 4, columns] of `dtype`; post [tokens, 4], comb [tokens, 4, 4] fp32. 1 to 65,535 tokens.
extern "C" int mhc_post(const void* o, const void* X, const float* post, const float* comb, void* out, int tokens, int columns, int dtype,
                        cudaStream_t stream) {
    using bf16 = __nv_bfloat16;
    if (dtype == kBfloat16)
        return choose(static_cast<const bf16*>(o), static_cast<const bf16*>(X), post, comb, static_cast<bf16*>(out), tokens, columns, stream);
    if (dtype == kFloat32)
        return choose(static_cast<const float*>(o), static_cast<const float*>(X), post, comb, static_cast<float*>(out), tokens, columns, stream);
    return cudaErrorInvalidValue;
}
