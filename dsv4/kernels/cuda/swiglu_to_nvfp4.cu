// swiglu_to_nvfp4: silu(min(gate, limit)) * clamp(up, -limit, limit) as NVFP4 with a row scale that is known before (dsv4/ops/nvfp4.py), so
// that nothing is reduced over a row: what a GEMM's epilogue does with the 16 gates and 16 ups of a block that it holds.
//
// A lane makes a group of its 16 gates and 16 ups, on its own. 4.5625 bytes a value from bf16 (8.5625 from fp32): 4,096 x 3,072 are 57 MB
// and 13.4 us at the H200's 4.3 TB/s. sm_90a's SASS has 33 instructions a value, 12.6 of them the ALUs', and 2 more of the special units:
// 14, 11 and 7 us at 132 SMs of 1.75 GHz, so issue and memory are as long as one another. The exponential is 8 of them, its sum, clamps,
// quotient and products 9, the loads' conversions 2, the codes 8. On an H200 20.8 us (docs/measurements.md); with 8 values a lane and IEEE
// divisions it took 43. In an epilogue the 4 (8) bytes fall away.
#include "nvfp4.cuh"

// Of gates and ups: magnitudes, and the signs of `factors`, which are the products'.
template <class T> struct Products {
    float magnitudes[kGroup];
    Group<T> factors;
    __device__ __forceinline__ float magnitude(int i) const { return magnitudes[i]; }
    __device__ __forceinline__ uint32_t signs(int half) const { return factors.signs(half); }
};

// |silu(g)|. The sum is kept finite, as infinity times its reciprocal, 0, is no number; of the largest sums too the reciprocal is 0.
__device__ __forceinline__ float silu_magnitude(float g) {
    const float sum = fminf(1.0f + expf(-g), 0x1p127f);
    return quotient(fabsf(g), sum, reciprocal(sum));
}

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
    // A gate is not clamped from below, and |silu| has 0.278 there: below that limit values pass limit^2, and codes must be cut.
    const RowScale of_row = {divisor(scale), limit >= 0.279f && scale <= 0x1p50f};
    for (int group = threadIdx.x; group < (groups + 3) / 4 * 4; group += blockDim.x) {
        Products<T> a;
        Group<T> gate, up;
        if (group < groups) {
            const T* block = h + (token * groups + group) * 2 * kGroup;
            gate.load(block);
            up.load(block + kGroup);
        }
        unsigned top = 0;
#pragma unroll
        for (int i = 0; i < kGroup; i++) {  // minima that let NaN through
            a.magnitudes[i] = silu_magnitude(min_nan(gate.value(i), limit)) * min_nan(up.magnitude(i), limit);
            top = max(top, __float_as_uint(a.magnitudes[i]));
        }
        gate.multiply_signs(up);
        a.factors = gate;
        store_nvfp4(a, top, of_row, row, group, groups);
    }
}

template <class T>
static cudaError_t launch(const T* h, const float* weights, uint8_t* values, uint8_t* scales, float* row_scales, int tokens, int columns,
                          float limit, float scale, int swizzled, cudaStream_t stream) {
    if (!rows_aligned(h, 2 * columns) || columns % kGroup) return cudaErrorInvalidValue;
    const int groups = columns / kGroup;
    auto kernel = swiglu_to_nvfp4_kernel<T>;
    LAUNCH(kernel, dim3(nvfp4_blocks(tokens, swizzled)), dim3(groups < kMaxThreads ? (groups + 31) / 32 * 32 : kMaxThreads), 0, stream, h,
           weights, values, scales, row_scales, tokens, groups, limit, scale, swizzled != 0);
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
