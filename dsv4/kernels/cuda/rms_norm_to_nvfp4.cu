// rms_norm_to_nvfp4: y = rms_norm(x) in bf16, and y as NVFP4 (dsv4/ops/nvfp4.py): what the projections or experts behind a norm take, in
// one pass.
//
// A block has a row and keeps it in registers, first x and then y. Two barriers: the sum of squares, y's amax. 4.5625 bytes a value (read
// 2, write 2.5625): 16,384 x 7,168 are 536 MB and 125 us at the H200's 4.3 TB/s; its instructions, by an estimate of 35 a value, take as
// long. to_nvfp4 behind a norm of its own would read y again, 55 us. Not measured.
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
    const int64_t first = token * groups * 16;
    Values<__nv_bfloat16> kept[kChunks];
    float v[kLaneValues], w[kLaneValues], sum = 0.0f;
    unsigned top = 0;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int column = (c * blockDim.x + threadIdx.x) * kLaneValues;
        kept[c].clear();
        if (column < groups * 16) kept[c].pack = *reinterpret_cast<const Pack<__nv_bfloat16, kLaneValues>*>(x + first + column);
    }
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        kept[c].get(v);
#pragma unroll
        for (int i = 0; i < kLaneValues; i++) sum += v[i] * v[i];
    }
    // 1 / sqrt in two roundings as on the CPU, and not rsqrtf: once a row it costs nothing.
    const float factor = 1.0f / sqrtf(block_sum(sum, partial) / (groups * 16) + eps);
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int column = (c * blockDim.x + threadIdx.x) * kLaneValues;
        if (column >= groups * 16) continue;
        kept[c].get(v);
        load(w, weight + column);
#pragma unroll
        for (int i = 0; i < kLaneValues; i++) v[i] = v[i] * factor * w[i];
        kept[c].set(v);
        *reinterpret_cast<Pack<__nv_bfloat16, kLaneValues>*>(y + first + column) = kept[c].pack;
        kept[c].get(v);  // rounded
        top = max(top, largest_bits(v));
    }
    const float scale = nvfp4_row_scale(block_max(top, reinterpret_cast<unsigned*>(partial + 32)));
    if (threadIdx.x == 0) row_scales[token] = scale;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        kept[c].get(v);
        store_nvfp4(v, scale, row, (c * blockDim.x + threadIdx.x) * kLaneValues, groups);
    }
}

// x and y [tokens, columns] bf16, weight [columns] fp32; the rest as in to_nvfp4.
extern "C" int rms_norm_to_nvfp4(const void* x, const float* weight, void* y, uint8_t* values, uint8_t* scales, float* row_scales,
                                 int tokens, int columns, float eps, int swizzled, cudaStream_t stream) {
    const auto* in = static_cast<const __nv_bfloat16*>(x);
    auto* out = static_cast<__nv_bfloat16*>(y);
    const bool aligned = rows_aligned(in, columns) && rows_aligned(out, columns) && rows_aligned(weight, columns);
    if (!aligned || columns % 16) return cudaErrorInvalidValue;
    return with_chunks(columns, [=](auto chunks, dim3 threads) {
        auto kernel = rms_norm_to_nvfp4_kernel<decltype(chunks)::value>;
        LAUNCH(kernel, dim3(nvfp4_blocks(tokens, swizzled)), threads, 64 * sizeof(float), stream, in, weight, out, values, scales,
               row_scales, tokens, columns / 16, eps, swizzled != 0);
        return cudaGetLastError();
    });
}
