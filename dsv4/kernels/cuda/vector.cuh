// A 128-vector in the registers of one warp, and what is done to keys and queries there: RMS norm, RoPE, Hadamard, FP8 and FP4.
//
// Lane l holds the four consecutive values 4 l to 4 l + 3 (a quad), so a 512-vector is four warps. A block of 64 values is 16 lanes, one of
// 32 values 8 lanes, a RoPE pair lies within a lane: nothing here needs a barrier but sum_of_warps. Each step rounds where dsv4/ops does;
// quantisers and Hadamard give its bits exactly. All lanes of a warp must come.
#pragma once
#include "common.cuh"

constexpr int kRope = 64;                // rotary dims, the last ones of a vector
constexpr int kKey = 512, kPlain = 448;  // a key, and its part that is FP8
constexpr int kIndex = 128;              // an indexer's key
constexpr int kKeyBytes = 576, kKeyScales = 8, kIndexBytes = 64, kIndexScales = 4;  // the rows of Keys and IndexKeys (keys.py)

__device__ __forceinline__ float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ __forceinline__ float square_sum(const float (&v)[4]) { return v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]; }

// The sum over a warp, the same in every lane and in every run.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

// The sum over kWarps consecutive warps of a block, the first a multiple of kWarps. `partial`: kWarps floats of shared memory, free again
// after the warps' next barrier; `barrier`: the number of the named barrier that they meet at.
template <int kWarps> __device__ __forceinline__ float sum_of_warps(float x, float* partial, int barrier) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32 % kWarps] = x;
    bar_sync(barrier, 32 * kWarps);
    x = partial[0];
#pragma unroll
    for (int i = 1; i < kWarps; i++) x += partial[i];
    return x;
}

// The angles of a quad's two pairs.
struct Angles { float cos[2], sin[2]; };

// Those of the quad at dims dim.. of a vector of `dims`; cos and sin: the token's kRope / 2 of each. Nothing is read for other dims.
__device__ __forceinline__ Angles load_angles(int dim, int dims, const float* cos, const float* sin) {
    Angles angles = {};
    const int pair = (dim - (dims - kRope)) / 2;
    if (dim >= dims - kRope) {
        load(angles.cos, cos + pair);
        load(angles.sin, sin + pair);
    }
    return angles;
}

__device__ __forceinline__ void rotate(float (&v)[4], const Angles& angles) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float a = v[2 * i], b = v[2 * i + 1];
        v[2 * i] = a * angles.cos[i] - b * angles.sin[i];
        v[2 * i + 1] = a * angles.sin[i] + b * angles.cos[i];
    }
}

// The quad at dims dim.. of a key of `dims`: RMS norm (`scale` is its factor), weight, RoPE on the last kRope dims, one rounding to bf16.
__device__ __forceinline__ void norm_rope(float (&v)[4], float scale, const float (&weight)[4], const Angles& angles, int dim, int dims) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = v[i] * scale * weight[i];
    if (dim >= dims - kRope) rotate(v, angles);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = round_bf16(v[i]);
}

// The 128 values of a warp times Sylvester's matrix and 128^-0.5, in fp32: butterflies over 1, 2, 4, .. 64 values. The caller rounds.
__device__ __forceinline__ void hadamard_128(float (&v)[4]) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float other = __shfl_xor_sync(~0u, v[i], lanes);
            v[i] = threadIdx.x & lanes ? other - v[i] : v[i] + other;
        }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] *= 0.08838834764831845f;
}

// The ue8m0 scale of the kLanes lanes that make a block: the exponent byte of 2^ceil(log2(max(amax, smallest) * one_over)), and the factor
// that divides by it. 255 (NaN) where a value is not finite. Magnitudes are compared as integers, where NaN is the largest.
template <int kLanes>
__device__ __forceinline__ unsigned block_scale(const float (&v)[4], float smallest, float one_over, float& factor) {
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned magnitude = __float_as_uint(v[i]) & 0x7fffffffu;
        top = magnitude > top ? magnitude : top;
    }
#pragma unroll
    for (int offset = kLanes / 2; offset; offset /= 2) {
        const unsigned other = __shfl_xor_sync(~0u, top, offset);
        top = other > top ? other : top;
    }
    const unsigned bits = __float_as_uint(fmaxf(__uint_as_float(top), smallest) * one_over);
    const unsigned byte = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    factor = __uint_as_float((254 - byte) << 23);  // 2^(127 - byte): a normal number, as bf16's largest is 2^120 * 448 and 2^126 * 6
    return top < 0x7f800000u ? byte : 255;
}

// A quad as 4 e4m3 bytes, the first in the low one; `scale`: the byte of its block of 64 (16 lanes). All NaN in a block that is not finite.
__device__ __forceinline__ uint32_t quantize_e4m3(const float (&v)[4], unsigned& scale) {
    float factor;
    scale = block_scale<16>(v, 1e-4f, 1.0f / 448, factor);
    uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) bytes |= uint32_t(to_e4m3(v[i] * factor)) << 8 * i;
    return scale == 255 ? 0x7f7f7f7f : bytes;
}

// A quad as 4 e2m1 nibbles, the first in the low one; `scale`: the byte of its block of 32 (8 lanes). Zeros lose their sign, as in the
// definition; in a block that is not finite all nibbles are 0.
__device__ __forceinline__ uint32_t quantize_e2m1(const float (&v)[4], unsigned& scale) {
    float factor;
    scale = block_scale<8>(v, 6 * 0x1p-126f, 1.0f / 6, factor);
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x = v[i] * factor, a = fabsf(x);  // a tie goes to the even code
        const uint32_t code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
        codes |= (code | (x < 0.0f ? 8u : 0u)) << 4 * i;
    }
    return scale == 255 ? 0 : codes;
}

// Stores the quad at dims dim.. of a key, rounded to bf16, into its row of Keys.
__device__ __forceinline__ void store_key(const float (&v)[4], int dim, uint8_t* values, uint8_t* scales) {
    unsigned scale;
    const uint32_t bytes = quantize_e4m3(v, scale);
    if (dim < kPlain)
        *reinterpret_cast<uint32_t*>(values + dim) = bytes;
    else
        *reinterpret_cast<uint2*>(values + kPlain + 2 * (dim - kPlain)) = uint2{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
    if (dim % 64 == 0) scales[dim / 64] = dim < kPlain ? scale : 0;
}

// Stores the quad at dims dim.. of an indexer's key, rotated by Hadamard and rounded to bf16, into its row of IndexKeys.
__device__ __forceinline__ void store_index_key(const float (&v)[4], int dim, uint8_t* values, uint8_t* scales) {
    unsigned scale;
    const uint32_t codes = quantize_e2m1(v, scale);
    *reinterpret_cast<uint16_t*>(values + dim / 2) = static_cast<uint16_t>(codes);
    if (dim % 32 == 0) scales[dim / 32] = scale;
}
