// NVFP4 of activations (dsv4/ops/nvfp4.py): a lane holds a group, 16 consecutive values with one scale, so that lanes exchange nothing but
// the row's amax. Four groups' scales are one word of the hardware's layout (dsv4/kernels/layouts.py). Bit for bit the definition's.
//
// An SM issues four warps' instructions a cycle, but only two of them to the ALUs, which do all that is no product or sum: logic, shifts,
// min, max. So codes are made of products and sums, 8 instructions a value of which 3 are the ALUs', and a usual row has no IEEE division
// (about 10 instructions, or a call). The kernels' heads have the sums.
#pragma once
#include "common.cuh"

constexpr int kGroup = 16;

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

// Of a block of whole warps, the same in every thread; `partial` as in block_sum.
__device__ __forceinline__ unsigned block_max(unsigned top, unsigned* partial) {
    top = __reduce_max_sync(~0u, top);
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) partial[threadIdx.x / 32] = top;
    __syncthreads();
    return __reduce_max_sync(~0u, lane < warps ? partial[lane] : 0);
}

// A group as it is in memory. largest: the largest magnitude's bits, compared as integers, where NaN is the largest. signs: of the 8 values
// of a half, value i's in bit 4 i + 3, other bits mean nothing. multiply_signs: those of products by `by`; magnitudes are lost.
template <class T> struct Group;
template <> struct Group<__nv_bfloat16> {
    uint32_t pairs[kGroup / 2] = {};
    __device__ __forceinline__ void load(const __nv_bfloat16* from) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 four = reinterpret_cast<const uint4*>(from)[i];
            pairs[4 * i] = four.x, pairs[4 * i + 1] = four.y, pairs[4 * i + 2] = four.z, pairs[4 * i + 3] = four.w;
        }
    }
    __device__ __forceinline__ void store(__nv_bfloat16* to) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
            reinterpret_cast<uint4*>(to)[i] = make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
    }
    __device__ __forceinline__ unsigned largest() const {
        uint32_t top = pairs[0];
#pragma unroll
        for (int i = 1; i < kGroup / 2; i++) top = max_magnitudes_bf16x2(top, pairs[i]);
        return max((top & 0x7fffu) << 16, top & 0x7fff0000u);
    }
    __device__ __forceinline__ float value(int i) const { return i % 2 ? bf16_hi(pairs[i / 2]) : bf16_lo(pairs[i / 2]); }
    __device__ __forceinline__ float magnitude(int i) const { return fabsf(value(i)); }
    __device__ __forceinline__ uint32_t signs(int half) const { return signs_of_pairs(&pairs[4 * half]); }
    __device__ __forceinline__ void multiply_signs(const Group& by) {
#pragma unroll
        for (int i = 0; i < kGroup / 2; i++) pairs[i] ^= by.pairs[i];
    }
    // The upper bytes hold the signs: those of even values to the lower half of their byte of the codes, those of odd ones to the upper.
    static __device__ __forceinline__ uint32_t signs_of_pairs(const uint32_t* four) {
        const uint32_t first = byte_perm(four[0], four[1], 0x7531), second = byte_perm(four[2], four[3], 0x7531);
        return select_bits(byte_perm(first, second, 0x6420) >> 4, byte_perm(first, second, 0x7531), 0x0f0f0f0fu);
    }
};
template <> struct Group<float> {
    float values[kGroup] = {};
    __device__ __forceinline__ void load(const float* from) { ::load(values, from); }
    __device__ __forceinline__ unsigned largest() const {
        unsigned top = 0;
#pragma unroll
        for (int i = 0; i < kGroup; i++) top = max(top, __float_as_uint(values[i]) & 0x7fffffffu);
        return top;
    }
    __device__ __forceinline__ float value(int i) const { return values[i]; }
    __device__ __forceinline__ float magnitude(int i) const { return fabsf(values[i]); }
    __device__ __forceinline__ uint32_t signs(int half) const {
        uint32_t uppers[4];  // of pairs, as they would be in bf16
#pragma unroll
        for (int i = 0; i < 4; i++)
            uppers[i] = byte_perm(__float_as_uint(values[8 * half + 2 * i]), __float_as_uint(values[8 * half + 2 * i + 1]), 0x7632);
        return Group<__nv_bfloat16>::signs_of_pairs(uppers);
    }
    __device__ __forceinline__ void multiply_signs(const Group& by) {
#pragma unroll
        for (int i = 0; i < kGroup; i++) values[i] = __uint_as_float(__float_as_uint(values[i]) ^ __float_as_uint(by.values[i]));
    }
};

// a / b with `one_over` 1 / b, rounded: to the last bit for b = 6 and b = 2,688, for any b as far as e2m1 can tell.
__device__ __forceinline__ float quotient(float a, float b, float one_over) {
    const float q = a * one_over;
    return __fmaf_rn(__fmaf_rn(-q, b, a), one_over, q);
}

// Divides many numbers by one: 1 / value in two parts, so that a quotient is two products and a sum in two instructions. As far as e2m1 and
// e4m3 can tell it is the rounded quotient, for all 2^23 mantissas of `value` and each reciprocal `near` that is off by up to a unit in the
// last place (tests/kernels/test_to_nvfp4.py). 1 / value = one_over (1 + off + off^2 + ..): one value in 2^23 needs off^2, where off + off^2
// lies just between two numbers and must round up, hence the 1.0001.
struct Divisor {
    float value, one_over, rest;
    __device__ __forceinline__ float divide(float a) const { return __fmaf_rn(a, one_over, a * rest); }
};
__device__ __forceinline__ Divisor divisor(float value, float near) {
    const float one_over = __fmaf_rn(__fmaf_rn(-near, value, 1.0f), near, near), off = __fmaf_rn(-one_over, value, 1.0f);
    return {value, one_over, one_over * __fmaf_rn(off, 1.0001f * off, off)};
}
__device__ __forceinline__ Divisor divisor(float value) { return divisor(value, reciprocal(value)); }

// A row's scale. `usual`: no quotient comes near the ends of fp32, so that the ones above serve.
struct RowScale {
    Divisor scale;
    bool usual;
};

// Of a row whose largest magnitude has the bits `top`: amax / (6 * 448), 1 where that is not above zero. Usual rows are finite.
__device__ __forceinline__ RowScale nvfp4_row_scale(unsigned top) {
    const float most = __uint_as_float(top);
    if (most >= 0x1p-50f && most <= 0x1p60f) return {divisor(quotient(most, 2688.0f, 1.0f / 2688.0f)), true};
    const float scale = most / 2688.0f;
    return {divisor(scale > 0.0f ? scale : 1.0f), false};
}

// The e2m1 code of q in [0, 12], plus kCodeBias: to nearest, a tie to the even code, all above 5 the last. It is the least of three lines,
// each rounded to a whole number, as a sum from 2^23 on is, with ties to even: 2 q, q + 2 and 6 + q / 10, which is 6.5 at 5. The factor is
// the number below 0.1, so that 5 is below the tie; the number above 5 is above it.
constexpr uint32_t kCodeBias = 0x4b000000u;  // 2^23
__device__ __forceinline__ uint32_t biased_code(float q) {
    const float small = __fmaf_rn(q, 2.0f, 0x1p23f), large = q + (0x1p23f + 2.0f), last = __fmaf_rn(q, 0x1.999998p-4f, 0x1p23f + 6.0f);
    return min(min(__float_as_uint(small), __float_as_uint(large)), __float_as_uint(last));
}

// Quantises and stores a lane's group; `top`: its largest magnitude. In a lane beyond `groups` its values are zeros.
template <class Values>
__device__ __forceinline__ void store_nvfp4(const Values& v, unsigned top, const RowScale& of_row, const Nvfp4Row& row, int group,
                                            int groups) {
    const float most = __uint_as_float(top);
    uint32_t byte, codes[2] = {0u - kCodeBias * 0x11111111u, 0u - kCodeBias * 0x11111111u};
    float scale;
    if (of_row.usual) {
        byte = to_e4m3(of_row.scale.divide(quotient(most, 6.0f, 1.0f / 6.0f)));
        scale = from_e4m3(byte) * of_row.scale.value;
        const Divisor by = divisor(scale);
#pragma unroll
        for (int i = 0; i < kGroup; i++) codes[i / 8] += biased_code(by.divide(v.magnitude(i))) << i % 8 * 4;
    } else {
        byte = to_e4m3(most / 6.0f / of_row.scale.value);
        scale = from_e4m3(byte) * of_row.scale.value;
#pragma unroll
        for (int i = 0; i < kGroup; i++) codes[i / 8] += biased_code(fminf(v.magnitude(i) / scale, 6.0f)) << i % 8 * 4;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)  // no code where the scale is zero or NaN
        codes[half] = scale > 0.0f ? codes[half] | (v.signs(half) & 0x88888888u) : 0;
    if (group < groups) *reinterpret_cast<uint2*>(row.values + group * 8) = make_uint2(codes[0], codes[1]);
    if (row.swizzled) {
        if (group < (groups + 3) / 4 * 4) row.scales[group / 4 * 512 + group % 4] = byte;
    } else if (group < groups) {
        row.scales[group] = byte;
    }
}

// The scales of a row that is not there, in the swizzled order.
__device__ __forceinline__ void store_no_scales(const Nvfp4Row& row, int groups) {
    for (int i = threadIdx.x; i < (groups + 3) / 4; i += blockDim.x) *reinterpret_cast<uint32_t*>(row.scales + i * 512) = 0;
}

// The blocks of a launch: a row each; in the swizzled order also the rows that fill up the last tile.
inline unsigned nvfp4_blocks(int tokens, int swizzled) { return swizzled ? (tokens + 127u) / 128 * 128 : tokens; }

// A thread has kChunks groups of a row, `threads` groups apart: calls `launch` with kChunks, a compile-time number, and the threads.
template <int n> struct Chunks { static constexpr int value = n; };
constexpr int kMaxThreads = 256, kMaxColumns = 4 * kMaxThreads * kGroup;
template <class F> static cudaError_t with_chunks(int groups, F launch) {
    auto threads = [=](int chunks) { return dim3((groups + 32 * chunks - 1) / (32 * chunks) * 32); };
    if (groups <= kMaxThreads) return launch(Chunks<1>(), threads(1));
    if (groups <= 2 * kMaxThreads) return launch(Chunks<2>(), threads(2));
    if (groups <= 4 * kMaxThreads) return launch(Chunks<4>(), threads(4));
    return cudaErrorInvalidValue;
}
