// to_nvfp4: rows of fp32 or bf16 as NVFP4 (dsv4/ops/nvfp4.py): e2m1 codes, an e4m3 scale per 16, plain or swizzled, an fp32 scale per row.
//
// A block has a row and keeps it in registers: one read, one barrier for the row's amax. 2.5625 bytes a value of bf16 (read 2, write 0.5
// and 1/16), so 4,096 x 7,168 are 75 MB and 17.5 us at the H200's 4.3 TB/s. sm_90a's SASS has 15 instructions a value in two chunks, 6.4 of
// them the ALUs': 132 SMs at 1.75 GHz issue them in 15 us, these in 13. Seven such blocks of 224 threads and 40 registers share an SM, 100
// KB of reads. On an H200 23.6 us (docs/measurements.md). With a block of 16 as two lanes' and IEEE divisions it took 43 us for 20
// instructions a value, 10 of them the ALUs', so that waiting was half of it: four blocks of 224 threads shared an SM.
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
    Group<T> kept[kChunks];
    unsigned tops[kChunks], top = 0;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int group = c * blockDim.x + threadIdx.x;
        if (group < groups) kept[c].load(x + (token * groups + group) * kGroup);
    }
#pragma unroll
    for (int c = 0; c < kChunks; c++) top = max(top, tops[c] = kept[c].largest());
    const RowScale scale = nvfp4_row_scale(block_max(top, partial));
    if (threadIdx.x == 0) row_scales[token] = scale.scale.value;
#pragma unroll
    for (int c = 0; c < kChunks; c++) store_nvfp4(kept[c], tops[c], scale, row, c * blockDim.x + threadIdx.x, groups);
}

template <class T>
static cudaError_t choose(const T* x, uint8_t* values, uint8_t* scales, float* row_scales, int tokens, int columns, int swizzled,
                          cudaStream_t stream) {
    if (!rows_aligned(x, columns) || columns % kGroup) return cudaErrorInvalidValue;
    return with_chunks(columns / kGroup, [=](auto chunks, dim3 threads) {
        auto kernel = to_nvfp4_kernel<T, decltype(chunks)::value>;
        LAUNCH(kernel, dim3(nvfp4_blocks(tokens, swizzled)), threads, 32 * sizeof(unsigned), stream, x, values, scales, row_scales, tokens,
               columns / kGroup, swizzled != 0);
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
