// compress: tokens added to the open blocks of one or two compressors, and the entries of the blocks that they close
// (dsv4/ops/compressor.py).
//
// A block of the grid does one pool: attention's entries (512 wide), in CSA layers beside them the indexer's keys (128). A thread has two
// channels, in both halves where blocks overlap. Half of the threads pool: they read the states and the new tokens and leave entries in
// shared memory. The other half keep the state: what becomes of it they hold in registers until all have read, and only they write it.
// After that one barrier the first half finish the entries, a warp with four consecutive values a lane (vector.cuh): norm, RoPE, packing.
// Up to 8 tokens close at most two blocks of 4, or one of 128.
//
// Latency on an H200 after the wait: position and token from L2 (0.3 us), then ape's row (CSA: in L1 by then; HCA: 0.7 us from memory);
// where a block closes, its rows (0.3 us, 0.7 from memory; 56 KB through one SM for CSA). With the launch 1.8 us, 2.2 in HCA and where a
// CSA block closes. A closing HCA block takes 512 KB through one SM, 32 KB at a time, 8 to 11 us once in 128 tokens: 0.08 us a token, of
// which a cluster of 8 blocks would save 0.07 and cost its own at every token.
#include "vector.cuh"

constexpr int kThreads = 512, kKeepers = 256;  // the last kKeepers threads keep the state
constexpr int kCsa = 4, kHca = 128;            // tokens a block; CSA's overlap: a token has channels for the next block and its own
constexpr int kMostTokens = 8, kMostClosed = 2;

struct Pool {
    const float *kv, *score;   // the tokens' projections [tokens, width]
    const float *ape, *norm;   // [ratio, width], [d]
    float *kv_state, *score_state;
    uint8_t *values, *scales;  // entries
};

// Two channels of one token or of one row of the state.
struct Pair {
    float kv[2], score[2];
};

template <int kRatio, int kDim> struct Compressor {
    static constexpr int kHalves = kRatio == kCsa ? 2 : 1, kWidth = kHalves * kDim;
    static constexpr int kOpen = kRatio == kCsa ? kRatio : 0;  // the state's first row of the open block; before it the last closed one
    const Pool& pool;
    const int held;  // tokens of the open block that came in earlier calls

    static __device__ __forceinline__ Pair load_pair(const float* kv, const float* score, int row, int channel) {
        Pair pair;
        load(pair.kv, kv + row * kWidth + channel);
        load(pair.score, score + row * kWidth + channel);
        return pair;
    }
    // Row i of the open block's tokens and the new ones in a row, i < held + tokens: from the state, or with its slot's `ape`.
    __device__ __forceinline__ Pair read(int i, int channel, const float (&ape)[2]) const {
        const bool old = i < held;
        Pair pair = load_pair(old ? pool.kv_state : pool.kv, old ? pool.score_state : pool.score, old ? kOpen + i : i - held, channel);
#pragma unroll
        for (int c = 0; c < 2; c++) pair.score[c] = old ? pair.score[c] : pair.score[c] + ape[c];
        return pair;
    }
    __device__ __forceinline__ void write_state(int row, int channel, const Pair& pair) const {
        store(pool.kv_state + row * kWidth + channel, pair.kv);
        store(pool.score_state + row * kWidth + channel, pair.score);
    }
};

// A softmax-weighted mean of two channels, a group of rows at a time. Scores of -inf have weight exactly 0.
struct Mean {
    static constexpr float kLowest = -3.402823466e38f;  // and not -inf, from which a score of -inf would differ by NaN
    float top[2] = {kLowest, kLowest}, total[2] = {}, sum[2] = {};

    template <int kRows> __device__ __forceinline__ void add(const Pair (&rows)[kRows]) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float now = top[c];
#pragma unroll
            for (int i = 0; i < kRows; i++) now = fmaxf(now, rows[i].score[c]);
            const float before = expf(top[c] - now);
            total[c] *= before, sum[c] *= before, top[c] = now;
#pragma unroll
            for (int i = 0; i < kRows; i++) {
                const float weight = expf(rows[i].score[c] - now);
                total[c] += weight;
                sum[c] += weight * rows[i].kv[c];
            }
        }
    }
    // Rounded to bf16, as the norm takes it.
    __device__ __forceinline__ void finish(float (&pooled)[2]) const {
#pragma unroll
        for (int c = 0; c < 2; c++) pooled[c] = round_bf16(sum[c] / total[c]);
    }
};

// CSA's weights for a thread's channels: [half][slot][channel].
using CsaApe = float[2][kCsa][2];

// Pools the blocks that close into pooled [closed, kDim]: the block before by its first half, the block itself by the second.
template <int kDim>
__device__ __forceinline__ void pool_csa(const Compressor<kCsa, kDim>& from, int closed, int channel, const CsaApe& ape, float* pooled) {
    for (int b = 0; b < closed; b++) {
        Pair slots[2 * kCsa];
        if (b == 0)
#pragma unroll
            for (int j = 0; j < kCsa; j++) slots[j] = from.load_pair(from.pool.kv_state, from.pool.score_state, j, channel);
        else
#pragma unroll
            for (int j = 0; j < kCsa; j++) slots[j] = from.read(kCsa * (b - 1) + j, channel, ape[0][j]);
#pragma unroll
        for (int j = 0; j < kCsa; j++) slots[kCsa + j] = from.read(kCsa * b + j, kDim + channel, ape[1][j]);
        Mean mean;
        float value[2];
        mean.add(slots);
        mean.finish(value);
        store(pooled + b * kDim + channel, value);
    }
}

template <int kDim>
__device__ __forceinline__ void pool_hca(const Compressor<kHca, kDim>& from, int channel, float* pooled) {
    constexpr int kGroup = 8;
    Mean mean;
    for (int first = 0; first < kHca; first += kGroup) {
        Pair rows[kGroup];
        if (first + kGroup <= from.held)  // nearly always, and without the choice of `read` half the instructions
#pragma unroll
            for (int i = 0; i < kGroup; i++) rows[i] = from.load_pair(from.pool.kv_state, from.pool.score_state, first + i, channel);
        else
#pragma unroll
            for (int i = 0; i < kGroup; i++) {
                float ape[2];
                load(ape, from.pool.ape + (first + i) * kDim + channel);
                rows[i] = from.read(first + i, channel, ape);
            }
        mean.add(rows);
    }
    float value[2];
    mean.finish(value);
    store(pooled + channel, value);
}

// Puts the tokens of the block that stays open into the state. All are loaded before the first is stored: one latency and not one a token.
// newest: the first new token, where nothing closes.
template <int kRatio, int kDim>
__device__ __forceinline__ void write_open(const Compressor<kRatio, kDim>& from, int tokens, int closed, int channel,
                                           const Pair (&newest)[Compressor<kRatio, kDim>::kHalves]) {
    using Of = Compressor<kRatio, kDim>;
    constexpr int kMost = kRatio - 1 < kMostTokens ? kRatio - 1 : kMostTokens;
    const int first = closed ? closed * kRatio : from.held, count = from.held + tokens - first;  // rows as in `read`
    Pair rows[Of::kHalves][kMost];
    float ape[Of::kHalves][kMost][2];
#pragma unroll
    for (int h = 0; h < Of::kHalves; h++)
#pragma unroll
        for (int j = 0; j < kMost; j++)
            if (j < count) {
                load(ape[h][j], from.pool.ape + (first + j) % kRatio * Of::kWidth + h * kDim + channel);
                if (j == 0 && !closed)
                    rows[h][j] = newest[h];
                else
                    rows[h][j] = from.load_pair(from.pool.kv, from.pool.score, first - from.held + j, h * kDim + channel);
            }
#pragma unroll
    for (int h = 0; h < Of::kHalves; h++)
#pragma unroll
        for (int j = 0; j < kMost; j++)
            if (j < count) {
#pragma unroll
                for (int c = 0; c < 2; c++) rows[h][j].score[c] += ape[h][j][c];
                from.write_state(Of::kOpen + first - closed * kRatio + j, h * kDim + channel, rows[h][j]);
            }
}

template <int kRatio, int kDim>
__device__ __forceinline__ void compress_pool(const Pool& pool, const int64_t* positions, const float* cos, const float* sin, int tokens,
                                              float eps, float* pooled) {
    using Of = Compressor<kRatio, kDim>;
    constexpr int kFinishers = kDim / 4;  // threads that finish one entry
    static_assert(kDim <= 2 * kKeepers && kMostClosed * kFinishers <= kThreads - kKeepers);
    const int thread = threadIdx.x, channel = thread % kKeepers * 2, entry = thread / kFinishers, dim = thread % kFinishers * 4;
    const bool keeps = thread >= kThreads - kKeepers, owns = channel < kDim;
    CsaApe ape;
    float norm[4];
    load(norm, pool.norm + dim);
    if constexpr (kRatio == kCsa)
        if (owns)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int j = 0; j < kCsa; j++) load(ape[h][j], pool.ape + j * Of::kWidth + h * kDim + channel);
    grid_dependency_launch();
    grid_dependency_wait();

    Pair newest[Of::kHalves];  // loaded with the position: all that a step of one token needs, unless it closes a block
    if (keeps && owns)
#pragma unroll
        for (int h = 0; h < Of::kHalves; h++) newest[h] = Of::load_pair(pool.kv, pool.score, 0, h * kDim + channel);
    const unsigned position = static_cast<unsigned>(positions[0]);
    const int held = position % kRatio, closed = (held + tokens) / kRatio;
    const Of from{pool, held};
    if (!closed) {
        if (keeps && owns) write_open(from, tokens, closed, channel, newest);
        return;
    }

    Angles angles = {};
    Pair last[2][kCsa];  // CSA: the last block that closes
    if (!keeps) {
        const int token = (entry + 1) * kRatio - 1 - held;
        if (entry < closed) angles = load_angles(dim, kDim, cos + token * (kRope / 2), sin + token * (kRope / 2));
        if (owns) {
            if constexpr (kRatio == kCsa)
                pool_csa(from, closed, channel, ape, pooled);
            else
                pool_hca(from, channel, pooled);
        }
    } else if (kRatio == kCsa && owns) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < kCsa; j++) last[h][j] = from.read(kCsa * (closed - 1) + j, h * kDim + channel, ape[h][j]);
    }
    __syncthreads();  // the states are read, the entries are pooled
    if (keeps) {
        if (!owns) return;
        if constexpr (kRatio == kCsa)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int j = 0; j < kCsa; j++) from.write_state(j, h * kDim + channel, last[h][j]);
        write_open(from, tokens, closed, channel, newest);
        return;
    }
    if (entry >= closed) return;

    float v[4], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kDim / 128; k++) {  // every warp sums the whole entry: no second barrier
        load(v, pooled + entry * kDim + 128 * k + thread % 32 * 4);
        sum += square_sum(v);
    }
    const float scale = rsqrtf(warp_sum(sum) / kDim + eps);
    load(v, pooled + entry * kDim + dim);
    norm_rope(v, scale, norm, angles, dim, kDim);
    const int64_t row = position / kRatio + entry;
    if constexpr (kDim == kKey) {
        store_key(v, dim, pool.values + row * kKeyBytes, pool.scales + row * kKeyScales);
    } else {
        hadamard_128(v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = round_bf16(v[i]);
        store_index_key(v, dim, pool.values + row * kIndexBytes, pool.scales + row * kIndexScales);
    }
}

template <int kRatio>
__global__ void __launch_bounds__(kThreads) compress_kernel(Pool attention, Pool index, const int64_t* positions,
                                                            const float* cos, const float* sin, int tokens, float eps) {
    DYN_SMEM(float, pooled);
    if (kRatio == kHca || blockIdx.x == 0)
        compress_pool<kRatio, kKey>(attention, positions, cos, sin, tokens, eps, pooled);
    else
        compress_pool<kCsa, kIndex>(index, positions, cos, sin, tokens, eps, pooled);
}

// Tokens at positions[0], positions[0] + 1, .., below 2^32; tokens <= 8; ratio 4 (c = 2) or 128 (c = 1). Attention's pool: kv, score
// [tokens, c * 512], ape [ratio, c * 512], norm [512], kv_state and score_state [c * ratio, c * 512], fp32; values and scales: Keys.
// index_*: the indexer's, with 128 for 512, and IndexKeys; null without one, as for ratio 128. cos and sin [tokens, 32]: the angles of the
// first position of the token's block.
extern "C" int compress(const float* kv, const float* score, const float* ape, const float* norm, float* kv_state, float* score_state,
                        uint8_t* values, uint8_t* scales, const float* index_kv, const float* index_score, const float* index_ape,
                        const float* index_norm, float* index_kv_state, float* index_score_state, uint8_t* index_values,
                        uint8_t* index_scales, const int64_t* positions, const float* cos, const float* sin, int tokens, int ratio,
                        float eps, cudaStream_t stream) {
    const Pool attention{kv, score, ape, norm, kv_state, score_state, values, scales};
    const Pool index{index_kv, index_score, index_ape, index_norm, index_kv_state, index_score_state, index_values, index_scales};
    if (tokens > kMostTokens || (ratio != kCsa && (ratio != kHca || index_kv))) return cudaErrorInvalidValue;
    if (!rows_aligned(kv, kKey) || !rows_aligned(score, kKey) || !rows_aligned(index_kv, kIndex) || !rows_aligned(index_score, kIndex))
        return cudaErrorInvalidValue;
    auto kernel = ratio == kCsa ? compress_kernel<kCsa> : compress_kernel<kHca>;
    LAUNCH(kernel, dim3(index_kv ? 2 : 1), dim3(kThreads), kMostClosed * kKey * sizeof(float), stream, attention, index, positions, cos,
           sin, tokens, eps);
    return cudaGetLastError();
}
