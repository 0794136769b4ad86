// latents: the two vectors that the first projections leave, finished (dsv4/ops/norm.py): qr = rms_norm(qa), and RoPE(rms_norm(kv)) as a
// packed key in the window's ring (kv is rounded to bf16 before the norm, qa is not).
//
// A block does one vector of one token: blocks 0 to S - 1 the query's, S to 2 S - 1 the key's. Everything lies in registers; one barrier.
// Pro reads 8 KB a token: no bandwidth, only latency. On an H200, with the weights loaded before the wait, about 0.3 us for the inputs from
// L2 and 0.15 us from there to the last store: what a dependent launch costs anyway (1.8 us).
#include "vector.cuh"

constexpr int kThreads = 128, kQuads = 4;  // a query's latent has up to kThreads * kQuads quads

struct Shared {
    float partial[kThreads / 32];
    int slot;
};

__device__ __forceinline__ void query_latent(const float* qa, const float* weight, __nv_bfloat16* qr, int token, int rank, float eps,
                                             float* partial) {
    const int thread = threadIdx.x;
    float v[kQuads][4], w[kQuads][4], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kQuads; k++) {
        const int i = (k * kThreads + thread) * 4;
        if (i < rank) load(w[k], weight + i);
    }
    grid_dependency_launch();
    grid_dependency_wait();
#pragma unroll
    for (int k = 0; k < kQuads; k++) {
        const int i = (k * kThreads + thread) * 4;
        if (i < rank) load(v[k], qa + token * rank + i);
    }
#pragma unroll
    for (int k = 0; k < kQuads; k++)
        if ((k * kThreads + thread) * 4 < rank) sum += square_sum(v[k]);
    const float scale = rsqrtf(sum_of_warps<kThreads / 32>(sum, partial) / rank + eps);
#pragma unroll
    for (int k = 0; k < kQuads; k++) {
        const int i = (k * kThreads + thread) * 4;
        if (i >= rank) break;
#pragma unroll
        for (int j = 0; j < 4; j++) v[k][j] = v[k][j] * scale * w[k][j];
        store(qr + token * rank + i, v[k]);
    }
}

__device__ __forceinline__ void window_key(const float* kv, const float* weight, const float* cos, const float* sin,
                                           const int64_t* positions, uint8_t* values, uint8_t* scales, int token, int ring, float eps,
                                           float* partial, int* slot) {
    const int dim = threadIdx.x * 4;
    float v[4], w[4];
    load(w, weight + dim);
    grid_dependency_launch();
    grid_dependency_wait();
    const unsigned position = static_cast<unsigned>(positions[token]);
    load(v, kv + token * kKey + dim);
    const Angles angles = load_angles(dim, kKey, cos + token * (kRope / 2), sin + token * (kRope / 2));
    if (dim == 0) *slot = position % ring;  // before the barrier, so that ptxas loads it with the rest and not 0.3 us later
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = round_bf16(v[i]);
    const float scale = rsqrtf(sum_of_warps<kThreads / 32>(square_sum(v), partial) / kKey + eps);
    norm_rope(v, scale, w, angles, dim, kKey);
    store_key(v, dim, values + *slot * kKeyBytes, scales + *slot * kKeyScales);
}

__global__ void __launch_bounds__(kThreads) latents_kernel(const float* qa, const float* kv, const float* q_norm, const float* kv_norm,
                                                           const float* cos, const float* sin, const int64_t* positions,
                                                           __nv_bfloat16* qr, uint8_t* values, uint8_t* scales, int tokens, int rank,
                                                           int ring, float eps) {
    DYN_SMEM(Shared, shared);
    const int block = blockIdx.x;
    if (block < tokens)
        query_latent(qa, q_norm, qr, block, rank, eps, shared->partial);
    else
        window_key(kv, kv_norm, cos, sin, positions, values, scales, block - tokens, ring, eps, shared->partial, &shared->slot);
}

// qa [tokens, rank], kv [tokens, 512], q_norm [rank], kv_norm [512], cos and sin [tokens, 32], fp32; positions [tokens], below 2^32;
// qr [tokens, rank] bf16; values [ring, 576], scales [ring, 8]: Keys, of which the rows positions[s] % ring are written. rank: a multiple
// of 4 up to 2,048; tokens <= ring.
extern "C" int latents(const float* qa, const float* kv, const float* q_norm, const float* kv_norm, const float* cos, const float* sin,
                       const int64_t* positions, void* qr, uint8_t* values, uint8_t* scales, int tokens, int rank, int ring, float eps,
                       cudaStream_t stream) {
    if (!rows_aligned(qa, rank) || !rows_aligned(kv, kKey) || rank > kThreads * kQuads * 4) return cudaErrorInvalidValue;
    LAUNCH(latents_kernel, dim3(2 * tokens), dim3(kThreads), sizeof(Shared), stream, qa, kv, q_norm, kv_norm, cos, sin,
           positions, static_cast<__nv_bfloat16*>(qr), values, scales, tokens, rank, ring, eps);
    return cudaGetLastError();
}
