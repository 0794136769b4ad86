// swiglu_to_nvfp4: silu(min(gate, limit)) * clamp(up, -limit, limit) as NVFP4 with a row scale that is known before (dsv4/ops/nvfp4.py), so
// that nothing is reduced over a row: what a GEMM's epilogue does with the 16 gates and 16 ups of a block that it holds.
//
// A lane makes 8 values of its 8 gates and 8 ups; lanes are on their own but for their block's amax. 8.5625 bytes a value from fp32 (4.5625
// from bf16): 16,384 x 3,072 are 431 MB and 100 us at the H200's 4.3 TB/s, about what its instructions, by an estimate of 55 a value, take
// too. In an epilogue the 8 (4) bytes fall away. Not measured.
#include "nvfp4.cuh"

template <class T>
__global__ void __launch_bounds__(kMaxThreads) swiglu_to_nvfp4_kernel(const T* h, const float* weights, uint8_t* values, uint8_t* scales,
                                                                      float* row_scales, int tokens, int groups, float limit, float scale,
                                                                      bool swizzled) {
    grid_dependency_launch();
    grid_dependency_wait();  // all inputs are activations
    const int64_t token = blockIdx.x;
    const Nvfp4Row row = nvfp4_row(values, scales, token, groups, swizzled);
    if (token >= tokens) return store_no_scales(row, groups);
    if (threadIdx.x == 0) row_scales[token] = weights ? scale * weights[token] : scale;
    for (int first = 0; first < groups * 16; first += blockDim.x * kLaneValues) {
        const int column = first + threadIdx.x * kLaneValues;
        float gate[kLaneValues] = {}, up[kLaneValues] = {};
        if (column < groups * 16) {
            const T* block = h + token * groups * 32 + column / 16 * 32 + column % 16;
            load(gate, block);
            load(up, block + 16);
        }
#pragma unroll
        for (int i = 0; i < kLaneValues; i++) {  // comparisons that let NaN through
            const float g = gate[i] > limit ? limit : gate[i], u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
            gate[i] = g / (1.0f + expf(-g)) * u;
        }
        store_nvfp4(gate, scale, row, column, groups);
    }
}

template <class T>
static cudaError_t launch(const T* h, const float* weights, uint8_t* values, uint8_t* scales, float* row_scales, int tokens, int columns,
                          float limit, float scale, int swizzled, cudaStream_t stream) {
    if (!rows_aligned(h, 2 * columns) || columns % 16) return cudaErrorInvalidValue;
    const int lanes = columns / kLaneValues;
    auto kernel = swiglu_to_nvfp4_kernel<T>;
    LAUNCH(kernel, dim3(nvfp4_blocks(tokens, swizzled)), dim3(lanes < kMaxThreads ? (lanes + 31) / 32 * 32 : kMaxThreads), 0, stream, h,
           weights, values, scales, row_scales, tokens, columns / 16, limit, scale, swizzled != 0);
    return cudaGetLastError();
}

// h [tokens, 2 columns] of `dtype`, 16 gates and their 16 ups in turn; weights [tokens] or null; scale: of each row before its weight; the
// rest as in to_nvfp4, with any multiple of 16 as `columns`.
extern "C" int swiglu_to_nvfp4(const void* h, const float* weights, uint8_t* values, uint8_t* scales, float* row_scales, int tokens,
                               int columns, int dtype, float limit, float scale, int swizzled, cudaStream_t stream) {
    if (dtype == kBfloat16)
        return launch(static_cast<const __nv_bfloat16*>(h), weights, values, scales, row_scales, tokens, columns, limit, scale, swizzled,
                      stream);
    if (dtype == kFloat32)
        return launch(static_cast<const float*>(h), weights, values, scales, row_scales, tokens, columns, limit, scale, swizzled, stream);
    return cudaErrorInvalidValue;
}
