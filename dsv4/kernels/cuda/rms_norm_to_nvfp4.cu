// rms_norm_to_nvfp4: y = rms_norm(x) in bf16, and y as NVFP4 (dsv4/ops/nvfp4.py): what the projections or experts behind a norm take, in
// one pass.
//
// A block has a row and keeps it in registers, first x and then y. Two barriers: the sum of squares, y's amax. 4.5625 bytes a value (read
// 2, write 2.5625): 4,096 x 7,168 are 134 MB and 31 us at the H200's 4.3 TB/s. sm_90a's SASS has 24 instructions a value in two chunks, 9.5
// of them the ALUs': 24 and 19 us. Four such blocks of 224 threads and 64 registers share an SM, and the weights' 4 bytes a value come from
// its L1. On an H200 47 us (docs/measurements.md); before, with y rounded value by value (F2F, a quarter of the ALUs' rate or less), 56.
#include "nvfp4.cuh"

template <int kChunks>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_to_nvfp4_kernel(const __nv_bfloat16* x, const float* weight, __nv_bfloat16* y,
                                                                        uint8_t* values, uint8_t* scales, float* row_scales, int tokens,
                                                                        int groups, float eps, bool swizzled) {
    DYN_SMEM(float, partial);  // 32 for the sum, 32 for the largest
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t token = blockIdx.x;
    const Nvfp4Row row = nvfp4_row(values, scales, token, groups, swizzled);
    if (token >= tokens) return store_no_scales(row, groups);
    Group<__nv_bfloat16> kept[kChunks];
    unsigned tops[kChunks], top = 0;
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int group = c * blockDim.x + threadIdx.x;
        if (group < groups) kept[c].load(x + (token * groups + group) * kGroup);
    }
#pragma unroll
    for (int c = 0; c < kChunks; c++)
#pragma unroll
        for (int i = 0; i < kGroup; i++) sum += kept[c].value(i) * kept[c].value(i);
    // 1 / sqrt in two roundings as on the CPU, and not rsqrtf: once a row it costs nothing.
    const float factor = 1.0f / sqrtf(block_sum(sum, partial) / (groups * kGroup) + eps);
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int group = c * blockDim.x + threadIdx.x;
        if (group < groups) {
            float w[kGroup];
            load(w, weight + group * kGroup);
#pragma unroll
            for (int i = 0; i < kGroup; i += 2)
                kept[c].pairs[i / 2] = pack_bf16(kept[c].value(i) * factor * w[i], kept[c].value(i + 1) * factor * w[i + 1]);
            kept[c].store(y + (token * groups + group) * kGroup);
        }
        top = max(top, tops[c] = kept[c].largest());
    }
    const RowScale scale = nvfp4_row_scale(block_max(top, reinterpret_cast<unsigned*>(partial + 32)));
    if (threadIdx.x == 0) row_scales[token] = scale.scale.value;
#pragma unroll
    for (int c = 0; c < kChunks; c++) store_nvfp4(kept[c], tops[c], scale, row, c * blockDim.x + threadIdx.x, groups);
}

// x and y [tokens, columns] bf16, weight [columns] fp32; the rest as in to_nvfp4.
extern "C" int rms_norm_to_nvfp4(const void* x, const float* weight, void* y, uint8_t* values, uint8_t* scales, float* row_scales,
                                 int tokens, int columns, float eps, int swizzled, cudaStream_t stream) {
    const auto* in = static_cast<const __nv_bfloat16*>(x);
    auto* out = static_cast<__nv_bfloat16*>(y);
    const bool aligned = rows_aligned(in, columns) && rows_aligned(out, columns) && rows_aligned(weight, columns);
    if (!aligned || columns % kGroup) return cudaErrorInvalidValue;
    return with_chunks(columns / kGroup, [=](auto chunks, dim3 threads) {
        auto kernel = rms_norm_to_nvfp4_kernel<decltype(chunks)::value>;
        LAUNCH(kernel, dim3(nvfp4_blocks(tokens, swizzled)), threads, 64 * sizeof(float), stream, in, weight, out, values, scales,
               row_scales, tokens, columns / kGroup, eps, swizzled != 0);
        return cudaGetLastError();
    });
}
