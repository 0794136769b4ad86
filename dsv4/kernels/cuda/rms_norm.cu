// rms_norm: out[r] = x[r] * rsqrt(mean(x[r]^2) + eps) * weight, one block a row (dsv4/ops/norm.py, rms_norm_ref).
//
// The row is read twice, the second time from L1: a row of 7,168 bf16 is 14 KB.
#include "common.cuh"

template <class T, int N>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const T* x, const float* weight, T* out, int columns, float eps) {
    DYN_SMEM(float, partial);
    x += int64_t(blockIdx.x) * columns;
    out += int64_t(blockIdx.x) * columns;
    float sum = 0.0f, v[N], w[N];
    for (int i = threadIdx.x * N; i < columns; i += blockDim.x * N) {
        load(v, x + i);
#pragma unroll
        for (int j = 0; j < N; j++) sum += v[j] * v[j];
    }
    const float scale = rsqrtf(block_sum(sum, partial) / columns + eps);
    for (int i = threadIdx.x * N; i < columns; i += blockDim.x * N) {
        load(v, x + i);
        load(w, weight + i);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = v[j] * scale * w[j];
        store(out + i, v);
    }
}

template <class T, int N>
static cudaError_t launch(const void* x, const float* weight, void* out, int rows, int columns, float eps, cudaStream_t stream) {
    const int packs = columns / N, threads = packs >= 1024 ? 1024 : (packs + 31) / 32 * 32;
    auto kernel = rms_norm_kernel<T, N>;
    LAUNCH(kernel, dim3(rows), dim3(threads), threads / 32 * sizeof(float), stream, static_cast<const T*>(x), weight, static_cast<T*>(out), columns,
           eps);
    return cudaGetLastError();
}

template <class T>
static cudaError_t choose(const T* x, const float* weight, void* out, int rows, int columns, float eps, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    if (rows_aligned(x, columns) && rows_aligned(static_cast<T*>(out), columns) && rows_aligned(weight, columns))
        return launch<T, N>(x, weight, out, rows, columns, eps, stream);
    return launch<T, 1>(x, weight, out, rows, columns, eps, stream);
}

// x, out [rows, columns] of `dtype`, weight [columns] fp32; rows and columns at least 1.
extern "C" int rms_norm(const void* x, const float* weight, void* out, int rows, int columns, float eps, int dtype, cudaStream_t stream) {
    if (dtype == kBfloat16) return choose(static_cast<const __nv_bfloat16*>(x), weight, out, rows, columns, eps, stream);
    if (dtype == kFloat32) return choose(static_cast<const float*>(x), weight, out, rows, columns, eps, stream);
    return cudaErrorInvalidValue;
}
