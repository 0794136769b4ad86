// update_caches: all that a step leaves in an attention layer's caches, and the query latent that goes on (dsv4/ops/update_caches.py): the
// queries and keys of latents.cuh beside the compressors of compress.cuh. No block needs another.
//
// SWA layers have vectors only: blocks of 128 threads, one a vector, 2 a token. Elsewhere blocks of 256: first one a pool (HCA 1, CSA 2),
// as these take the longest, then one a token with its query and its key.
//
// A dependent launch costs 1.8 us on an H200, and the parts cost no more beside each other: 1.8 us for SWA and CSA, 2.2 in HCA and where a
// CSA block closes; 6 us where an HCA block does (compress.cuh). What a block costs besides is room among the blocks of the kernels before
// and behind, two of `linear` an SM with 57,344 registers: it starts when one of those has ended, and keeps one from loading weights. So
// it is small. SWA's fit beside both: 128 threads x 48 registers, 20 bytes of shared memory. Elsewhere it is 256 x 104 to 128, which fits
// beside one, on 2 SMs for HCA and 3 for CSA and one token. A block of 512 threads would take both places.
#include "compress.cuh"
#include "latents.cuh"

constexpr int kSwa = 0;  // the ratio of a layer without pools

template <int kRatio> constexpr int kThreads = kRatio == kSwa ? kVectorThreads : kPoolThreads;

template <int kRatio> union Shared {
    VectorShared vectors[kThreads<kRatio> / kVectorThreads];
    float pooled[kRatio == kSwa ? 1 : kMostClosed * kKey];
};

template <int kRatio>
__global__ void __launch_bounds__(kThreads<kRatio>) update_caches_kernel(Latents latents, Pool main, Pool index, const float* entry_cos,
                                                                         const float* entry_sin, int tokens, int pools) {
    constexpr int kVectors = kThreads<kRatio> / kVectorThreads;  // of a block
    DYN_SMEM(Shared<kRatio>, shared);
    const int block = blockIdx.x;
    if constexpr (kRatio != kSwa)
        if (block == 0)
            return compress_pool<kRatio, kKey>(main, latents.positions, entry_cos, entry_sin, tokens, latents.eps, shared->pooled);
    if constexpr (kRatio == kCsa)
        if (block < pools)
            return compress_pool<kCsa, kIndex>(index, latents.positions, entry_cos, entry_sin, tokens, latents.eps, shared->pooled);
    const int part = threadIdx.x / kVectorThreads;
    finish_vector(latents, (block - pools) * kVectors + part, threadIdx.x % kVectorThreads, 1 + part, shared->vectors[part]);
}

// Tokens at `positions` [tokens], consecutive, below 2^32; tokens <= 8 and <= ring. qa [tokens, rank], kv [tokens, 512], q_norm [rank],
// kv_norm [512], cos and sin [tokens, 32], fp32; qr [tokens, rank] bf16; window_values [ring, 576] and window_scales [ring, 8]: Keys, of
// which the rows positions[s] % ring are written. rank: a multiple of 4 up to 2,048.
// ratio: 0 (SWA: all that follows is null), 4 (c = 2) or 128 (c = 1). main_*, attention's pool: kv, score [tokens, c * 512],
// ape [ratio, c * 512], norm [512], kv_state and score_state [c * ratio, c * 512], fp32; values and scales: Keys. index_*: the indexer's,
// with 128 for 512, and IndexKeys; null without one, as for ratio 128. entry_cos and entry_sin [tokens, 32]: the angles of the first
// position of the token's block.
extern "C" int update_caches(const float* qa, const float* kv, const float* q_norm, const float* kv_norm, const float* cos,
                             const float* sin, const int64_t* positions, void* qr, uint8_t* window_values, uint8_t* window_scales, const float* main_kv,
                             const float* main_score, const float* main_ape, const float* main_norm, float* main_kv_state,
                             float* main_score_state, uint8_t* main_values, uint8_t* main_scales, const float* index_kv,
                             const float* index_score, const float* index_ape, const float* index_norm, float* index_kv_state,
                             float* index_score_state, uint8_t* index_values, uint8_t* index_scales, const float* entry_cos,
                             const float* entry_sin, int tokens, int rank, int ring, int ratio, float eps, cudaStream_t stream) {
    const Latents latents{qa, kv, q_norm, kv_norm, cos, sin, positions, static_cast<__nv_bfloat16*>(qr), window_values, window_scales,
                          rank, ring, eps};
    const Pool main{main_kv, main_score, main_ape, main_norm, main_kv_state, main_score_state, main_values, main_scales};
    const Pool index{index_kv, index_score, index_ape, index_norm, index_kv_state, index_score_state, index_values, index_scales};
    const int pools = ratio == kSwa ? 0 : index_kv ? 2 : 1;
    if (tokens > kMostTokens || (ratio != kSwa && ratio != kCsa && ratio != kHca) || (ratio != kCsa && index_kv))
        return cudaErrorInvalidValue;
    if (!rows_aligned(qa, rank) || !rows_aligned(kv, kKey) || rank > kVectorThreads * kQuads * 4) return cudaErrorInvalidValue;
    if (!rows_aligned(main_kv, kKey) || !rows_aligned(main_score, kKey) || !rows_aligned(index_kv, kIndex) ||
        !rows_aligned(index_score, kIndex))
        return cudaErrorInvalidValue;
    if (ratio == kSwa)
        LAUNCH(update_caches_kernel<kSwa>, dim3(2 * tokens), dim3(kThreads<kSwa>), sizeof(Shared<kSwa>), stream, latents, main, index,
               entry_cos, entry_sin, tokens, pools);
    else
        LAUNCH(ratio == kCsa ? update_caches_kernel<kCsa> : update_caches_kernel<kHca>, dim3(pools + tokens), dim3(kPoolThreads),
               sizeof(Shared<kHca>), stream, latents, main, index, entry_cos, entry_sin, tokens, pools);
    return cudaGetLastError();
}
