// Tokens added to the open block of a compressor, and the entries of the blocks that they close (`compress` of dsv4/ops/compressor.py), as
// a part of a kernel.
//
// A block of kPoolThreads does one pool: attention's entries (512 wide), or the indexer's keys (128). A thread has two channels, in both
// halves where blocks overlap, and is alone with their state: it pools them, leaves their part of the entries in shared memory and puts
// back what stays open. After the one barrier the entries are finished, a warp with four consecutive values a lane (vector.cuh): norm,
// RoPE, packing. Up to 8 tokens close at most two blocks of 4, or one of 128.
//
// Latency on an H200 after the wait: position and token from L2 (0.3 us), then ape's row (CSA: in L1 by then; HCA: 0.7 us from memory);
// where a block closes, its rows (0.3 us, 0.7 from memory; 56 KB through one SM for CSA). A closing HCA block takes 512 KB through one SM,
// which moves 64 bytes a clock at most: 4.7 us. Its exponentials take as long, beside the loads; with 32 to 64 KB on the way at any time
// it should be 6 us once in 128 tokens, 0.05 us a token. A cluster of 8 blocks could do it in 2, but at every token it would have to wait
// until eight SMs of one GPC have room among the blocks of the kernel before: likely more than the 0.03 us that it saves on average.
#pragma once
#include "vector.cuh"

constexpr int kPoolThreads = 256;
constexpr int kCsa = 4, kHca = 128;  // tokens a block; CSA's overlap: a token has channels for the next block and its own
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

// Pools the blocks that close into pooled [closed, kDim]: the block before by its first half, the block itself by the second. The last one
// becomes the state's block before.
template <int kDim>
__device__ __forceinline__ void pool_csa(const Compressor<kCsa, kDim>& from, int closed, int channel, const CsaApe& ape, float* pooled) {
    Pair before[kCsa], block[2][kCsa];
#pragma unroll
    for (int j = 0; j < kCsa; j++) before[j] = from.load_pair(from.pool.kv_state, from.pool.score_state, j, channel);
    for (int b = 0; b < closed; b++) {
        Pair slots[2 * kCsa];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < kCsa; j++) block[h][j] = from.read(kCsa * b + j, h * kDim + channel, ape[h][j]);
#pragma unroll
        for (int j = 0; j < kCsa; j++) slots[j] = before[j], slots[kCsa + j] = block[1][j], before[j] = block[0][j];
        Mean mean;
        float value[2];
        mean.add(slots);
        mean.finish(value);
        store(pooled + b * kDim + channel, value);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < kCsa; j++) from.write_state(j, h * kDim + channel, block[h][j]);
}

// Pools the block that closes: a group of 8 rows is added up while the next one is on its way. Only the last has new tokens in it.
template <int kDim>
__device__ __forceinline__ void pool_hca(const Compressor<kHca, kDim>& from, int channel, float* pooled) {
    constexpr int kGroup = kMostTokens;
    Mean mean;
    Pair now[kGroup], next[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; i++) now[i] = from.load_pair(from.pool.kv_state, from.pool.score_state, i, channel);
#pragma unroll 2
    for (int first = kGroup; first < kHca - kGroup; first += kGroup) {
#pragma unroll
        for (int i = 0; i < kGroup; i++) next[i] = from.load_pair(from.pool.kv_state, from.pool.score_state, first + i, channel);
        mean.add(now);
#pragma unroll
        for (int i = 0; i < kGroup; i++) now[i] = next[i];
    }
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
        float ape[2];
        load(ape, from.pool.ape + (kHca - kGroup + i) * kDim + channel);
        next[i] = from.read(kHca - kGroup + i, channel, ape);
    }
    mean.add(now);
    mean.add(next);
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

// A block's work, all of its threads. positions: of the step's tokens; cos and sin: the angles of the first positions of their blocks.
// pooled: kMostClosed * kDim floats of shared memory.
template <int kRatio, int kDim>
__device__ __forceinline__ void compress_pool(const Pool& pool, const int64_t* positions, const float* cos, const float* sin, int tokens,
                                              float eps, float* pooled) {
    using Of = Compressor<kRatio, kDim>;
    constexpr int kFinishers = kDim / 4;  // threads that finish one entry
    static_assert(kDim <= 2 * kPoolThreads && kMostClosed * kFinishers <= kPoolThreads);
    const int thread = threadIdx.x, channel = thread * 2, entry = thread / kFinishers, dim = thread % kFinishers * 4;
    const bool owns = channel < kDim;
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
    if (owns)
#pragma unroll
        for (int h = 0; h < Of::kHalves; h++) newest[h] = Of::load_pair(pool.kv, pool.score, 0, h * kDim + channel);
    const unsigned position = static_cast<unsigned>(positions[0]);
    const int held = position % kRatio, closed = (held + tokens) / kRatio;
    const Of from{pool, held};
    if (!closed) {
        if (owns) write_open(from, tokens, closed, channel, newest);
        return;
    }

    Angles angles = {};
    const int last = (entry + 1) * kRatio - 1 - held;  // the entry's last token
    if (entry < closed) angles = load_angles(dim, kDim, cos + last * (kRope / 2), sin + last * (kRope / 2));
    if (owns) {
        if constexpr (kRatio == kCsa)
            pool_csa(from, closed, channel, ape, pooled);
        else
            pool_hca(from, channel, pooled);
        write_open(from, tokens, closed, channel, newest);
    }
    __syncthreads();  // the entries are pooled
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
