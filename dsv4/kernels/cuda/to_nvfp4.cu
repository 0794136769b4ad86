// to_nvfp4: rows of fp32 or bf16 as NVFP4 (dsv4/ops/nvfp4.py): e2m1 codes, an e4m3 scale per 16, plain or swizzled, an fp32 scale per row.
//
// A block has a row and keeps it in registers: one read, one barrier for the row's amax. 2.5625 bytes a value of bf16 (read 2, write 0.5
// and 1/16), so 16,384 x 7,168 are 301 MB and 70 us at the H200's 4.3 TB/s. sm_90a's SASS has about 30 instructions a value, which its 132
// SMs issue in 120 us at 1.75 GHz: so it is bound by these, not by memory. Neither has been measured. 4 x 7,168: latency, about 3 us.
#include "nvfp4.cuh"

template <class T, int kChunks>
__global__ void __launch_bounds__(kMaxThreads) to_nvfp4_kernel(const T* x, uint8_t* values, uint8_t* scales, float* row_scales, int tokens,
                                                               int groups, bool swizzled) {
    DYN_SMEM(unsigned, partial);
    grid_dependency_launch();
    grid_dependency_wait();  // all inputs are activations
    const int64_t token = blockIdx.x;
    const Nvfp4Row row = nvfp4_row(values, scales, token, groups, swizzled);
    if (token >= tokens) return store_no_scales(row, groups);
    Values<T> kept[kChunks];
    float v[kLaneValues];
    unsigned top = 0;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int column = (c * blockDim.x + threadIdx.x) * kLaneValues;
        kept[c].clear();
        if (column < groups * 16) kept[c].pack = *reinterpret_cast<const Pack<T, kLaneValues>*>(x + token * groups * 16 + column);
    }
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        kept[c].get(v);
        top = max(top, largest_bits(v));
    }
    const float scale = nvfp4_row_scale(block_max(top, partial));
    if (threadIdx.x == 0) row_scales[token] = scale;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        kept[c].get(v);
        store_nvfp4(v, scale, row, (c * blockDim.x + threadIdx.x) * kLaneValues, groups);
    }
}

template <class T>
static cudaError_t choose(const T* x, uint8_t* values, uint8_t* scales, float* row_scales, int tokens, int columns, int swizzled,
                          cudaStream_t stream) {
    if (!rows_aligned(x, columns) || columns % 16) return cudaErrorInvalidValue;
    return with_chunks(columns, [=](auto chunks, dim3 threads) {
        auto kernel = to_nvfp4_kernel<T, decltype(chunks)::value>;
        LAUNCH(kernel, dim3(nvfp4_blocks(tokens, swizzled)), threads, 32 * sizeof(unsigned), stream, x, values, scales, row_scales, tokens,
               columns / 16, swizzled != 0);
        return cudaGetLastError();
    });
}

// x [tokens, columns] of `dtype`, columns a multiple of 16 up to 16,384; values [tokens, columns / 2]; scales [tokens, columns / 16], or
// whole tiles of 128 rows and 4 groups if `swizzled`; row_scales [tokens].
extern "C" int to_nvfp4(const void* x, uint8_t* values, uint8_t* scales, float* row_scales, int tokens, int columns, int dtype,
                        int swizzled, cudaStream_t stream) {
    if (dtype == kBfloat16)
        return choose(static_cast<const __nv_bfloat16*>(x), values, scales, row_scales, tokens, columns, swizzled, stream);
    if (dtype == kFloat32)
        return choose(static_cast<const float*>(x), values, scales, row_scales, tokens, columns, swizzled, stream);
    return cudaErrorInvalidValue;
}
