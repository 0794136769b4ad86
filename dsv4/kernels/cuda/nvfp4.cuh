// NVFP4 of activations (dsv4/ops/nvfp4.py): a lane holds 8 consecutive values, two lanes a block of 16, eight lanes the 64 columns whose
// four scales are one word of the hardware's layout (dsv4/kernels/layouts.py). Bit for bit the definition's. All lanes of a warp must come.
#pragma once
#include "common.cuh"

constexpr int kLaneValues = 8;

// A row's packed form. Its codes start at `values`, its scales at `scales`: in plain order, or where `swizzled` orders them.
struct Nvfp4Row {
    uint8_t *values, *scales;
    bool swizzled;
};

// `groups`: K / 16.
__device__ __forceinline__ Nvfp4Row nvfp4_row(uint8_t* values, uint8_t* scales, int64_t row, int groups, bool swizzled) {
    const int64_t plain = row * groups, tiles = row / 128 * ((groups + 3) / 4) * 512;
    return {values + row * groups * 8, scales + (swizzled ? tiles + row % 32 * 16 + row % 128 / 32 * 4 : plain), swizzled};
}

// The largest magnitude's bits. Magnitudes are compared as integers, where NaN is the largest.
__device__ __forceinline__ unsigned largest_bits(const float (&v)[kLaneValues]) {
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < kLaneValues; i++) top = max(top, __float_as_uint(v[i]) & 0x7fffffffu);
    return top;
}

// Of a block of whole warps, the same in every thread; `partial` as in block_sum.
__device__ __forceinline__ unsigned block_max(unsigned top, unsigned* partial) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) top = max(top, __shfl_xor_sync(~0u, top, offset));
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) partial[threadIdx.x / 32] = top;
    __syncthreads();
    top = lane < warps ? partial[lane] : 0;
#pragma unroll
    for (int offset = 16; offset; offset /= 2) top = max(top, __shfl_xor_sync(~0u, top, offset));
    return top;
}

// A row's scale: amax / (6 * 448), 1 where that is not above zero.
__device__ __forceinline__ float nvfp4_row_scale(unsigned top) {
    const float scale = __uint_as_float(top) / 2688.0f;
    return scale > 0.0f ? scale : 1.0f;
}

// a / scale as far as e2m1 can tell it from the rounded quotient, for a scale of at least 2^-100; `one_over` is 1 / scale, rounded to
// nearest. One correction of the product is enough: for each of the 2^23 scales in [1, 2) and all values next to a boundary times it, the
// code is that of the division (tests/kernels/test_to_nvfp4.py); further off, two units in the last place are no matter. An infinite value
// gives NaN.
__device__ __forceinline__ float quotient(float a, float scale, float one_over) {
    const float q = a * one_over;
    return __fmaf_rn(__fmaf_rn(-q, scale, a), one_over, q);
}

// The e2m1 code of a >= 0, plus kCodeBias: to nearest, a tie to the even code, beyond 6 (and NaN) to 6. Adding 2^22 times a's power of two
// (at least 1) rounds a to 0.5, 1 or 2 as e2m1 does, and the low bits count these steps.
constexpr uint32_t kCodeBias = 254;
__device__ __forceinline__ uint32_t biased_code(float a) {
    a = fminf(a, 6.0f);
    const uint32_t power = max(__float_as_uint(a), 0x3f800000u) & 0x7f800000u, large = power + (22u << 23);
    return __float_as_uint(a + __uint_as_float(large)) - large + (power >> 22);
}

// Quantises and stores a lane's values at columns `column`..; in a lane beyond K = 16 `groups` they are zeros.
__device__ __forceinline__ void store_nvfp4(const float (&v)[kLaneValues], float row_scale, const Nvfp4Row& row, int column, int groups) {
    unsigned top = largest_bits(v);
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    const uint32_t byte = to_e4m3(__uint_as_float(top) / 6.0f / row_scale);
    float scale = from_e4m3(byte) * row_scale;
    uint32_t codes = 0;
    if (scale > 0.0f) {  // not so for NaN
        float a[kLaneValues];
#pragma unroll
        for (int i = 0; i < kLaneValues; i++) a[i] = v[i];
        if (scale < 0x1p-60f) {  // both sides of the division
            scale *= 0x1p64f;
#pragma unroll
            for (int i = 0; i < kLaneValues; i++) a[i] *= 0x1p64f;
        }
        const float one_over = 1.0f / scale;
        codes = 0u - kCodeBias * 0x11111111u;
#pragma unroll
        for (int i = 0; i < kLaneValues; i++) codes += biased_code(fabsf(quotient(a[i], scale, one_over))) << 4 * i;
#pragma unroll
        for (int i = 0; i < kLaneValues; i++) codes |= __float_as_uint(v[i]) >> (28 - 4 * i) & 8u << 4 * i;
    }
    const int group = column / 16;
    if (group < groups) *reinterpret_cast<uint32_t*>(row.values + column / 2) = codes;
    if (row.swizzled) {
        uint32_t word = byte << 8 * (group % 4);
        word |= __shfl_xor_sync(~0u, word, 2);
        word |= __shfl_xor_sync(~0u, word, 4);
        if (column % 64 == 0 && group < groups) *reinterpret_cast<uint32_t*>(row.scales + group / 4 * 512) = word;
    } else if (column % 16 == 0 && group < groups) {
        row.scales[group] = byte;
    }
}

// The scales of a row that is not there, in the swizzled order.
__device__ __forceinline__ void store_no_scales(const Nvfp4Row& row, int groups) {
    for (int i = threadIdx.x; i < (groups + 3) / 4; i += blockDim.x) *reinterpret_cast<uint32_t*>(row.scales + i * 512) = 0;
}

// The blocks of a launch: a row each; in the swizzled order also the rows that fill up the last tile.
inline unsigned nvfp4_blocks(int tokens, int swizzled) { return swizzled ? (tokens + 127u) / 128 * 128 : tokens; }

// A thread has kChunks times 8 values of a row, `threads` * 8 columns apart: calls `launch` with kChunks, a compile-time number, and the
// threads.
template <int n> struct Chunks { static constexpr int value = n; };
constexpr int kMaxThreads = 256, kMaxColumns = 8 * kMaxThreads * kLaneValues;
template <class F> static cudaError_t with_chunks(int columns, F launch) {
    const int lanes = (columns + kLaneValues - 1) / kLaneValues;
    auto threads = [=](int chunks) { return dim3((lanes + 32 * chunks - 1) / (32 * chunks) * 32); };
    if (lanes <= kMaxThreads) return launch(Chunks<1>(), threads(1));
    if (lanes <= 2 * kMaxThreads) return launch(Chunks<2>(), threads(2));
    if (lanes <= 4 * kMaxThreads) return launch(Chunks<4>(), threads(4));
    if (lanes <= 8 * kMaxThreads) return launch(Chunks<8>(), threads(8));
    return cudaErrorInvalidValue;
}

// A thread's chunk of a row, as it is in memory: 8 values of T.
template <class T> struct Values {
    Pack<T, kLaneValues> pack;
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kLaneValues; i++) round_to(0.0f, pack.v[i]);
    }
    __device__ __forceinline__ void get(float (&v)[kLaneValues]) const {
#pragma unroll
        for (int i = 0; i < kLaneValues; i++) v[i] = to_float(pack.v[i]);
    }
    __device__ __forceinline__ void set(const float (&v)[kLaneValues]) {
#pragma unroll
        for (int i = 0; i < kLaneValues; i++) round_to(v[i], pack.v[i]);
    }
};
