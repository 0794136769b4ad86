// The indexer's query of one head, from the projection to FP4: RoPE, Hadamard, a power of two for each 32 dims (dsv4/ops/indexer.py). For
// index_scores.cu, which multiplies its values as bf16, and index_scores_sm100.cu, which multiplies its codes.
#pragma once
#include "common.cuh"

constexpr int kHeads = 64, kDim = 128, kRope = 64, kRatio = 4;
constexpr float kHeadFactor = 0.011048543456039806f;  // of the heads' weights: (128 * 64)^-0.5
constexpr unsigned kNanScale = 255;

// Two values to bf16 and back: one conversion of a pair is several times as fast as two of one value.
__device__ __forceinline__ void round_bf16(float& a, float& b) {
    const uint32_t pair = pack_bf16(a, b);
    a = bf16_lo(pair), b = bf16_hi(pair);
}

// Lane 8 i + u of a warp has dims 16 u to 16 u + 15 of head i, of which `q` has all 128, and if these turn (u from 4 on) the angles of
// their pairs, of the token's 32 in `from_cos` and `from_sin`.
__device__ __forceinline__ void load_index_query(const float* q, const float* from_cos, const float* from_sin, float (&v)[16],
                                                 float (&cos)[8], float (&sin)[8]) {
    const int u = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < 16; i += 4) load(reinterpret_cast<float(&)[4]>(v[i]), q + u * 16 + i);
#pragma unroll
    for (int i = 0; i < 8; i += 4)
        if (u >= 4) {
            load(reinterpret_cast<float(&)[4]>(cos[i]), from_cos + (u - 4) * 8 + i);
            load(reinterpret_cast<float(&)[4]>(sin[i]), from_sin + (u - 4) * 8 + i);
        }
}

// v becomes these dims, rounded to bf16, turned and rotated, over the scale of their 32: at most 6 and not yet rounded. Returns the scale's
// ue8m0 byte, kNanScale (and any v) where a dim is not finite.
__device__ __forceinline__ unsigned index_query(float (&v)[16], const float (&cos)[8], const float (&sin)[8]) {
    const int lane = threadIdx.x % 32, u = lane % 8;
#pragma unroll
    for (int i = 0; i < 16; i += 2) round_bf16(v[i], v[i + 1]);
    if (u >= 4) {  // products rounded before they are added, as in the definition: a bit here can become a step of FP4
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float c = cos[i], s = sin[i], a = v[2 * i], b = v[2 * i + 1];
            v[2 * i] = __fmul_rn(a, c) - __fmul_rn(b, s);
            v[2 * i + 1] = __fmul_rn(a, s) + __fmul_rn(b, c);
            round_bf16(v[2 * i], v[2 * i + 1]);
        }
    }
#pragma unroll
    for (int half = 1; half < 16; half *= 2)
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (!(i & half)) {
                const float a = v[i], b = v[i + half];
                v[i] = a + b, v[i + half] = a - b;
            }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
        const float sign = lane & lanes ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = fmaf(v[i], sign, __shfl_xor_sync(~0u, v[i], lanes));
    }
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        v[i] *= 0.08838834764831845f, v[i + 1] *= 0.08838834764831845f;
        round_bf16(v[i], v[i + 1]);
        top = max_nan(max_nan(top, fabsf(v[i])), fabsf(v[i + 1]));
    }
    const unsigned largest = __float_as_uint(max_nan(top, __shfl_xor_sync(~0u, top, 1)));  // above infinity's bits if any is NaN
    const unsigned exponent = (__float_as_uint(__uint_as_float(largest) * (1.0f / 6)) + 0x7fffff) >> 23;  // of the power of two at or above
    const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] *= inverse;
    return largest < 0x7f800000u ? exponent : kNanScale;
}
