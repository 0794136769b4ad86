// mhc_post: out[s, k] = post[s, k] * o[s] + sum_j comb[s, j, k] * X[s, j], for 4 streams (dsv4/ops/mhc.py, mhc_post_ref).
//
// A thread has the same N columns of all four streams, so every value is read once; comb is used by its FIRST index j.
#include "common.cuh"

constexpr int kStreams = 4, kThreads = 128;

// o: of T, or `parts` > 0 partial sums of it in fp32, which are added in order and rounded to T.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) mhc_post_kernel(const void* o, const T* X, const float* post, const float* comb, T* out,
                                                            int parts, int columns) {
    grid_dependency_launch();
    grid_dependency_wait();  // all inputs are activations
    const int64_t token = blockIdx.y;
    const int column = (blockIdx.x * kThreads + threadIdx.x) * N;
    if (column >= columns) return;
    const int64_t own = token * columns + column, streams = token * kStreams * columns + column;
    post += token * kStreams;
    comb += token * kStreams * kStreams;
    float in[kStreams][N], block[N], sum[N];
    if (parts == 0) load(block, static_cast<const T*>(o) + own);
    else load(block, static_cast<const float*>(o) + own);
#pragma unroll
    for (int j = 0; j < kStreams; j++) load(in[j], X + streams + int64_t(j) * columns);
    for (int p = 1; p < parts; p++) {
        load(sum, static_cast<const float*>(o) + int64_t(p) * gridDim.y * columns + own);
#pragma unroll
        for (int i = 0; i < N; i++) block[i] += sum[i];
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        T rounded;
        round_to(block[i], rounded);
        block[i] = to_float(rounded);
    }
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
static cudaError_t launch(const void* o, const T* X, const float* post, const float* comb, T* out, int parts, int tokens, int columns,
                          cudaStream_t stream) {
    auto kernel = mhc_post_kernel<T, N>;
    LAUNCH(kernel, dim3((columns / N + kThreads - 1) / kThreads, tokens), dim3(kThreads), 0, stream, o, X, post, comb, out, parts, columns);
    return cudaGetLastError();
}

template <class T>
static cudaError_t choose(const void* o, const T* X, const float* post, const float* comb, T* out, int parts, int tokens, int columns,
                          cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    const bool aligned = parts ? rows_aligned(static_cast<const float*>(o), columns) : rows_aligned(static_cast<const T*>(o), columns);
    if (aligned && rows_aligned(X, columns) && rows_aligned(out, columns))
        return launch<T, N>(o, X, post, comb, out, parts, tokens, columns, stream);
    return launch<T, 1>(o, X, post, comb, out, parts, tokens, columns, stream);
}

// o [tokens, columns] of `dtype`, or `parts` > 0 partial sums [parts, tokens, columns] in fp32; X and out [tokens, 4, columns] of `dtype`;
// post [tokens, 4], comb [tokens, 4, 4] fp32. 1 to 65,535 tokens.
extern "C" int mhc_post(const void* o, const void* X, const float* post, const float* comb, void* out, int parts, int tokens, int columns,
                        int dtype, cudaStream_t stream) {
    using bf16 = __nv_bfloat16;
    if (dtype == kBfloat16)
        return choose(o, static_cast<const bf16*>(X), post, comb, static_cast<bf16*>(out), parts, tokens, columns, stream);
    if (dtype == kFloat32)
        return choose(o, static_cast<const float*>(X), post, comb, static_cast<float*>(out), parts, tokens, columns, stream);
    return cudaErrorInvalidValue;
}
