// update_caches: all that a step leaves in an attention layer's caches, and the query latent that goes on (dsv4/ops/update_caches.py): the
// queries and keys of latents.cuh beside the compressors of compress.cuh. No block needs another, but where an HCA block closes.
//
// SWA and HCA layers have blocks of 128 threads: for HCA first those of its pool, then one a vector, 2 a token. CSA's are of 256: one a
// pool, as these take the longest, then one a token with its query and its key.
//
// A dependent launch costs 1.3 us on an H200 with all that there is to do where nothing closes. CSA closes a block in 2.5 us, HCA in 3
// (predicted; compress.cuh). What a block costs besides is room among the blocks of the kernels before and behind, two of `linear` an SM
// with 57,344 registers: it starts when one of those has ended, and keeps one from loading weights. So it is small: 128 threads x 64
// registers and 5 KB of shared memory fit beside both. CSA's are 256 x 128, which fit beside one, on 3 SMs for one token. A block of 512
// threads would take both places.
// Measured on an H200: 1.0 us where nothing closes, CSA 2.3, HCA 2.9 where a block does (docs/measurements.md).
#include "compress.cuh"
#include "latents.cuh"

constexpr int kSwa = 0;  // the ratio of a layer without pools

template <int kRatio> constexpr int kThreads = kRatio == kCsa ? kPoolThreads : kVectorThreads;
template <int kRatio> constexpr int kBlocksOfSm = kRatio == kCsa ? 2 : 8;  // of 128 x 64 registers
static_assert(kHcaThreads == kVectorThreads);

template <int kRatio> union Shared { VectorShared vectors[1]; };
template <> union Shared<kCsa> {
    VectorShared vectors[kPoolThreads / kVectorThreads];
    float pooled[kMostClosed * kKey];
};
template <> union Shared<kHca> {
    VectorShared vectors[1];
    HcaShared pool;
};

template <int kRatio>
__global__ void __launch_bounds__(kThreads<kRatio>, kBlocksOfSm<kRatio>)
    update_caches_kernel(Latents latents, Pool main, Pool index, const float* entry_cos, const float* entry_sin, float* pooled,
                         unsigned* arrivals, int tokens, int pool_blocks) {
    constexpr int kVectors = kThreads<kRatio> / kVectorThreads;  // of a block
    DYN_SMEM(Shared<kRatio>, shared);
    const int block = blockIdx.x;
    if constexpr (kRatio == kHca)
        if (block < kHcaBlocks)
            return compress_hca(main, latents.positions, entry_cos, entry_sin, tokens, latents.eps, block, pooled, arrivals, shared->pool);
    if constexpr (kRatio == kCsa) {
        if (block == 0) return compress_csa<kKey>(main, latents.positions, entry_cos, entry_sin, tokens, latents.eps, shared->pooled);
        if (block < pool_blocks)
            return compress_csa<kIndex>(index, latents.positions, entry_cos, entry_sin, tokens, latents.eps, shared->pooled);
    }
    const int part = threadIdx.x / kVectorThreads;
    finish_vector(latents, (block - pool_blocks) * kVectors + part, threadIdx.x % kVectorThreads, 1 + part, shared->vectors[part]);
}

template <int kRatio>
static void launch(const Latents& latents, const Pool& main, const Pool& index, const float* entry_cos, const float* entry_sin,
                   float* pooled, int* arrivals, int tokens, int pool_blocks, cudaStream_t stream) {
    LAUNCH(update_caches_kernel<kRatio>, dim3(pool_blocks + 2 * tokens * kVectorThreads / kThreads<kRatio>), dim3(kThreads<kRatio>),
           sizeof(Shared<kRatio>), stream, latents, main, index, entry_cos, entry_sin, pooled, reinterpret_cast<unsigned*>(arrivals),
           tokens, pool_blocks);
}

// The same from another token on.
static Latents from(Latents a, int token) {
    a.qa += token * a.rank, a.kv += token * kKey, a.qr += token * a.rank, a.positions += token;
    a.cos += token * (kRope / 2), a.sin += token * (kRope / 2);
    return a;
}
static Pool from(Pool pool, int64_t values) {
    if (pool.kv) pool.kv += values, pool.score += values;
    return pool;
}

// Tokens at `positions` [tokens], consecutive, below 2^32, a launch for each 8; 8 of them, or all, are no more than `ring`. qa [tokens, rank], kv [tokens, 512], q_norm [rank],
// kv_norm [512], cos and sin [tokens, 32], fp32; qr [tokens, rank] bf16; window_values [ring, 576] and window_scales [ring, 8]: Keys, of
// which the rows positions[s] % ring are written, the last token's last; long_*: the same in a ring of long_ring rows, or null. rank: a multiple of 4 up to 2,048.
// ratio: 0 (SWA: all that follows is null), 4 (c = 2) or 128 (c = 1). main_*, attention's pool: kv, score [tokens, c * 512],
// ape [ratio, c * 512], norm [512], kv_state and score_state [c * ratio, c * 512], fp32; values and scales: Keys. index_*: the indexer's,
// with 128 for 512, and IndexKeys; null without one, as for ratio 128. entry_cos and entry_sin [tokens, 32]: the angles of the first
// position of the token's block. pooled [512] fp32 (workspace) and arrivals (a counter, 0): for ratio 128, else null.
extern "C" int update_caches(const float* qa, const float* kv, const float* q_norm, const float* kv_norm, const float* cos,
                             const float* sin, const int64_t* positions, void* qr, uint8_t* window_values, uint8_t* window_scales,
                             uint8_t* long_values, uint8_t* long_scales, const float* main_kv, const float* main_score, const float* main_ape, const float* main_norm,
                             float* main_kv_state, float* main_score_state, uint8_t* main_values, uint8_t* main_scales, const float* index_kv,
                             const float* index_score, const float* index_ape, const float* index_norm, float* index_kv_state,
                             float* index_score_state, uint8_t* index_values, uint8_t* index_scales, const float* entry_cos,
                             const float* entry_sin, float* pooled, int* arrivals, int tokens, int rank, int ring, int long_ring, int ratio,
                             float eps, cudaStream_t stream) {
    const Latents latents{qa, kv, q_norm, kv_norm, cos, sin, positions, static_cast<__nv_bfloat16*>(qr), window_values, window_scales,
                          long_values, long_scales, rank, ring, long_ring, eps};
    const Pool main{main_kv, main_score, main_ape, main_norm, main_kv_state, main_score_state, main_values, main_scales};
    const Pool index{index_kv, index_score, index_ape, index_norm, index_kv_state, index_score_state, index_values, index_scales};
    if (tokens < 1 || (ratio != kSwa && ratio != kCsa && ratio != kHca) || (ratio != kCsa && index_kv))
        return cudaErrorInvalidValue;
    if (!rows_aligned(qa, rank) || !rows_aligned(kv, kKey) || rank > kVectorThreads * kQuads * 4) return cudaErrorInvalidValue;
    if (!rows_aligned(main_kv, kKey) || !rows_aligned(main_score, kKey) || !rows_aligned(index_kv, kIndex) ||
        !rows_aligned(index_score, kIndex))
        return cudaErrorInvalidValue;
    const int halves = ratio == kCsa ? 2 : 1;
    for (int first = 0; first < tokens; first += kMostTokens) {  // in turn, as the states go from token to token
        const int count = min(tokens - first, kMostTokens);
        const Latents those = from(latents, first);
        const Pool of_main = from(main, first * halves * kKey), of_index = from(index, first * halves * kIndex);
        const float *c = entry_cos ? entry_cos + first * (kRope / 2) : nullptr, *s = entry_sin ? entry_sin + first * (kRope / 2) : nullptr;
        if (ratio == kSwa)
            launch<kSwa>(those, of_main, of_index, c, s, pooled, arrivals, count, 0, stream);
        else if (ratio == kHca)
            launch<kHca>(those, of_main, of_index, c, s, pooled, arrivals, count, kHcaBlocks, stream);
        else
            launch<kCsa>(those, of_main, of_index, c, s, pooled, arrivals, count, index_kv ? 2 : 1, stream);
    }
    return cudaGetLastError();
}
