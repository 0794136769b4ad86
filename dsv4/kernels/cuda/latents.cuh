// The two vectors that the first projections leave, finished (`latents` of dsv4/ops/norm.py), as a part of a kernel: qr = rms_norm(qa), and
// RoPE(rms_norm(kv)) as a packed key in the window's ring (kv is rounded to bf16 before the norm, qa is not).
//
// kVectorThreads consecutive threads do one vector of one token: all of a block or a part of it, whose only barrier is a named one.
// Everything lies in registers. Pro reads 8 KB a token: no bandwidth, only latency: with the weights loaded before the wait, on an H200
// about 0.3 us for the inputs from L2 and 0.15 us from there to the last store.
#pragma once
#include "vector.cuh"

constexpr int kVectorThreads = 128, kQuads = 4;  // a query's latent has up to kVectorThreads * kQuads quads

struct Latents {
    const float *qa, *kv, *q_norm, *kv_norm, *cos, *sin;  // [tokens, rank], [tokens, 512], [rank], [512], [tokens, 32] twice
    const int64_t* positions;
    __nv_bfloat16* qr;         // [tokens, rank]
    uint8_t *values, *scales;            // Keys: the window
    uint8_t *long_values, *long_scales;  // the same keys in a longer ring, or null
    int rank, ring, long_ring;           // rings: their rows
    float eps;
};

// A vector's shared memory.
struct VectorShared {
    float partial[kVectorThreads / 32];
    int slot, long_slot;
};

__device__ __forceinline__ void query_latent(const Latents& a, int token, int thread, int barrier, VectorShared& shared) {
    float v[kQuads][4], w[kQuads][4], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kQuads; k++) {
        const int i = (k * kVectorThreads + thread) * 4;
        if (i < a.rank) load(w[k], a.q_norm + i);
    }
    grid_dependency_launch();
    grid_dependency_wait();
#pragma unroll
    for (int k = 0; k < kQuads; k++) {
        const int i = (k * kVectorThreads + thread) * 4;
        if (i < a.rank) load(v[k], a.qa + token * a.rank + i);
    }
#pragma unroll
    for (int k = 0; k < kQuads; k++)
        if ((k * kVectorThreads + thread) * 4 < a.rank) sum += square_sum(v[k]);
    const float scale = rsqrtf(sum_of_warps<kVectorThreads / 32>(sum, shared.partial, barrier) / a.rank + a.eps);
#pragma unroll
    for (int k = 0; k < kQuads; k++) {
        const int i = (k * kVectorThreads + thread) * 4;
        if (i >= a.rank) break;
#pragma unroll
        for (int j = 0; j < 4; j++) v[k][j] = v[k][j] * scale * w[k][j];
        store(a.qr + token * a.rank + i, v[k]);
    }
}

__device__ __forceinline__ void window_key(const Latents& a, int token, int thread, int barrier, VectorShared& shared) {
    const int dim = thread * 4;
    float v[4], w[4];
    load(w, a.kv_norm + dim);
    grid_dependency_launch();
    grid_dependency_wait();
    const unsigned position = static_cast<unsigned>(a.positions[token]);
    load(v, a.kv + token * kKey + dim);
    const Angles angles = load_angles(dim, kKey, a.cos + token * (kRope / 2), a.sin + token * (kRope / 2));
    if (dim == 0) shared.slot = position % a.ring, shared.long_slot = a.long_values ? position % a.long_ring : 0;  // before the barrier, so that ptxas loads it with the rest and not 0.3 us later
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = round_bf16(v[i]);
    const float scale = rsqrtf(sum_of_warps<kVectorThreads / 32>(square_sum(v), shared.partial, barrier) / kKey + a.eps);
    norm_rope(v, scale, w, angles, dim, kKey);
    store_key(v, dim, a.values + shared.slot * kKeyBytes, a.scales + shared.slot * kKeyScales);
    if (a.long_values) store_key(v, dim, a.long_values + shared.long_slot * kKeyBytes, a.long_scales + shared.long_slot * kKeyScales);
}

// Vectors 2 s and 2 s + 1: token s' query and key. `thread`: the number among the vector's; `barrier`: a named barrier of its own.
__device__ __forceinline__ void finish_vector(const Latents& a, int vector, int thread, int barrier, VectorShared& shared) {
    if (vector % 2 == 0)
        query_latent(a, vector / 2, thread, barrier, shared);
    else
        window_key(a, vector / 2, thread, barrier, shared);
}
