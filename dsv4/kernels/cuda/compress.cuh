// Tokens added to the open block of a compressor, and the entries of the blocks that they close (`compress` of dsv4/ops/compressor.py), as
// a part of a kernel. A thread has two channels, in both halves where blocks overlap.
//
// CSA: a block of kPoolThreads does one pool: attention's entries (512 wide), or the indexer's keys (128). A thread is alone with its
// channels' state: it pools them, leaves their part of the entries in shared memory and puts back what stays open. After the one barrier
// the entries are finished, a warp with four consecutive values a lane (vector.cuh): norm, RoPE, packing. Up to 8 tokens close at most two
// blocks of 4.
//
// HCA: kHcaBlocks blocks of kHcaThreads with 16 channels each, in groups of 8 threads that share the rows. A closing block reads 512 KB:
// one SM would take 4.7 us for it at 64 bytes a clock, here each thread has its 8 rows under way at once. The block that is last to arrive
// finishes the entry. Up to 8 tokens close at most one block of 128; where none closes, the first groups put a token each into the state.
//
// Latency on an H200 after the wait: position and token from L2 (0.3 us), then ape's row (CSA: in L1 by then; HCA: 0.7 us from memory).
// Where a block closes, its rows, all at once (0.3 us, 0.7 from memory; CSA: 48 KB through one SM, 0.4 us), exponentials and the norm; for
// HCA between them the counter and the pooled channels (0.9 us).
#pragma once
#include "vector.cuh"

constexpr int kPoolThreads = 256;
constexpr int kCsa = 4, kHca = 128;  // tokens a block; CSA's overlap: a token has channels for the next block and its own
constexpr int kMostTokens = 8, kMostClosed = 2;
// Of HCA: blocks, and each one's threads, channels, groups of threads, and the rows of a group.
constexpr int kHcaBlocks = 32, kHcaThreads = 128, kHcaChannels = kKey / kHcaBlocks;
constexpr int kHcaGroups = kHcaThreads / (kHcaChannels / 2), kHcaRows = kHca / kHcaGroups;

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
    // A new token into row `row` of the open block.
    __device__ __forceinline__ void write_open_row(int row, int channel, Pair pair, const float (&ape)[2]) const {
#pragma unroll
        for (int c = 0; c < 2; c++) pair.score[c] += ape[c];
        write_state(kOpen + row, channel, pair);
    }
};

// The softmax of two channels' scores over some rows, and the values weighted by it, both without the division. Scores of -inf have weight
// exactly 0.
struct Mean {
    static constexpr float kLowest = -3.402823466e38f;  // and not -inf, from which a score of -inf would differ by NaN
    float top[2], total[2] = {}, sum[2] = {};

    template <int kRows> __device__ __forceinline__ explicit Mean(const Pair (&rows)[kRows]) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            top[c] = kLowest;
#pragma unroll
            for (int i = 0; i < kRows; i++) top[c] = fmaxf(top[c], rows[i].score[c]);
#pragma unroll
            for (int i = 0; i < kRows; i++) {
                const float weight = expf(rows[i].score[c] - top[c]);
                total[c] += weight;
                sum[c] += weight * rows[i].kv[c];
            }
        }
    }
};

// CSA's weights for a thread's channels: [half][slot][channel].
using CsaApe = float[2][kCsa][2];

// Pools the blocks that close into pooled [closed, kDim], rounded to bf16, as the norm takes it: the block before by its first half, the
// block itself by the second. The last one becomes the state's block before. Rows are loaded ahead of the loop that adds them up: within
// it, ptxas would put some of the loads behind the exponentials of the others.
template <int kDim>
__device__ __forceinline__ void pool_csa(const Compressor<kCsa, kDim>& from, int closed, int channel, const CsaApe& ape, float* pooled) {
    Pair before[kCsa], block[2][kCsa];
    const auto load_block = [&](int b) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < kCsa; j++) block[h][j] = from.read(kCsa * b + j, h * kDim + channel, ape[h][j]);
    };
#pragma unroll
    for (int j = 0; j < kCsa; j++) before[j] = from.load_pair(from.pool.kv_state, from.pool.score_state, j, channel);
    load_block(0);
    for (int b = 0;;) {
        Pair slots[2 * kCsa];
#pragma unroll
        for (int j = 0; j < kCsa; j++) slots[j] = before[j], slots[kCsa + j] = block[1][j], before[j] = block[0][j];
        const Mean mean(slots);
        float value[2];
#pragma unroll
        for (int c = 0; c < 2; c++) value[c] = round_bf16(mean.sum[c] / mean.total[c]);
        store(pooled + b * kDim + channel, value);
        if (++b == closed) break;
        load_block(b);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < kCsa; j++) from.write_state(j, h * kDim + channel, block[h][j]);
}

// Puts the tokens of CSA's block that stays open into the state. All are loaded before the first is stored: one latency and not one a
// token. newest: the first new token, where nothing closes.
template <int kDim>
__device__ __forceinline__ void write_open(const Compressor<kCsa, kDim>& from, int tokens, int closed, int channel,
                                           const Pair (&newest)[2]) {
    using Of = Compressor<kCsa, kDim>;
    constexpr int kMost = kCsa - 1;
    const int first = closed ? closed * kCsa : from.held, count = from.held + tokens - first;  // rows as in `read`
    Pair rows[2][kMost];
    float ape[2][kMost][2];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < kMost; j++)
            if (j < count) {
                load(ape[h][j], from.pool.ape + (first + j) % kCsa * Of::kWidth + h * kDim + channel);
                if (j == 0 && !closed)
                    rows[h][j] = newest[h];
                else
                    rows[h][j] = from.load_pair(from.pool.kv, from.pool.score, first - from.held + j, h * kDim + channel);
            }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < kMost; j++)
            if (j < count) from.write_open_row(first - closed * kCsa + j, h * kDim + channel, rows[h][j], ape[h][j]);
}

// The quad of an entry at dims dim.. (a thread of whole warps each), from its pooled channels: into row `row` of the pool. scale: the RMS
// norm's factor.
template <int kDim>
__device__ __forceinline__ void finish_entry(const Pool& pool, float (&v)[4], float scale, const float (&norm)[4], const Angles& angles,
                                             int dim, int64_t row) {
    norm_rope(v, scale, norm, angles, dim, kDim);
    if constexpr (kDim == kKey) {
        store_key(v, dim, pool.values + row * kKeyBytes, pool.scales + row * kKeyScales);
    } else {
        hadamard_128(v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = round_bf16(v[i]);
        store_index_key(v, dim, pool.values + row * kIndexBytes, pool.scales + row * kIndexScales);
    }
}

// A CSA pool, by all threads of a block. positions: of the step's tokens; cos and sin: the angles of the first positions of their blocks.
// pooled: kMostClosed * kDim floats of shared memory.
template <int kDim>
__device__ __forceinline__ void compress_csa(const Pool& pool, const int64_t* positions, const float* cos, const float* sin, int tokens,
                                             float eps, float* pooled) {
    using Of = Compressor<kCsa, kDim>;
    constexpr int kFinishers = kDim / 4;  // threads that finish one entry
    static_assert(kDim <= 2 * kPoolThreads && kMostClosed * kFinishers <= kPoolThreads);
    const int thread = threadIdx.x, channel = thread * 2, entry = thread / kFinishers, dim = thread % kFinishers * 4;
    const bool owns = channel < kDim;
    CsaApe ape;
    float norm[4];
    load(norm, pool.norm + dim);
    if (owns)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < kCsa; j++) load(ape[h][j], pool.ape + j * Of::kWidth + h * kDim + channel);
    grid_dependency_launch();
    grid_dependency_wait();

    Pair newest[2];  // loaded with the position: all that a step of one token needs, unless it closes a block
    if (owns)
#pragma unroll
        for (int h = 0; h < 2; h++) newest[h] = Of::load_pair(pool.kv, pool.score, 0, h * kDim + channel);
    const unsigned position = static_cast<unsigned>(positions[0]);
    const int held = position % kCsa, closed = (held + tokens) / kCsa;
    const Of from{pool, held};
    if (!closed) {
        if (owns) write_open(from, tokens, closed, channel, newest);
        return;
    }

    Angles angles = {};
    const int last = (entry + 1) * kCsa - 1 - held;  // the entry's last token
    if (entry < closed) angles = load_angles(dim, kDim, cos + last * (kRope / 2), sin + last * (kRope / 2));
    if (owns) {
        pool_csa(from, closed, channel, ape, pooled);
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
    load(v, pooled + entry * kDim + dim);
    finish_entry<kDim>(pool, v, rsqrtf(warp_sum(sum) / kDim + eps), norm, angles, dim, position / kCsa + entry);
}

// The norm's weights, each thread's its own, and the groups' means of a block's channels.
struct HcaShared {
    alignas(16) float norm[kKey];
    float top[kHcaGroups][kHcaChannels], total[kHcaGroups][kHcaChannels], sum[kHcaGroups][kHcaChannels];
    bool last;  // this block was the last to arrive
};

// Block `block` of kHcaBlocks, all of its threads. pooled: [512] in global memory, the entry's channels; arrivals: a counter, 0.
__device__ __forceinline__ void compress_hca(const Pool& pool, const int64_t* positions, const float* cos, const float* sin, int tokens,
                                             float eps, int block, float* pooled, unsigned* arrivals, HcaShared& shared) {
    using Of = Compressor<kHca, kKey>;
    static_assert(kHcaThreads * 4 == kKey && kHcaGroups >= kMostTokens && kHcaRows * kHcaGroups == kHca);
    const int thread = threadIdx.x, group = thread / (kHcaChannels / 2), dim = thread * 4;
    const int mine = thread % (kHcaChannels / 2) * 2, channel = block * kHcaChannels + mine;
    cp_async_16(shared.norm + dim, pool.norm + dim);  // and not to registers, of which the rows take all
    cp_async_commit();
    grid_dependency_launch();
    grid_dependency_wait();

    // Where nothing closes, a group has one of the tokens, loaded with the position.
    Pair newest = {};
    if (group < tokens) newest = Of::load_pair(pool.kv, pool.score, group, channel);
    const unsigned position = static_cast<unsigned>(positions[0]);
    const int held = position % kHca, after = held + tokens - kHca;  // after: tokens of the next block
    const Of from{pool, held};
    float ape[2];
    if (after < 0) {
        if (group < tokens) {
            load(ape, pool.ape + (held + group) * kKey + channel);
            from.write_open_row(held + group, channel, newest, ape);
        }
        cp_async_wait<0>();  // no thread ends with a copy under way
        return;
    }

    Pair rows[kHcaRows];  // group, group + kHcaGroups and so on: only the last may be a new token
#pragma unroll
    for (int i = 0; i < kHcaRows - 1; i++) rows[i] = Of::load_pair(pool.kv_state, pool.score_state, i * kHcaGroups + group, channel);
    constexpr int kLast = (kHcaRows - 1) * kHcaGroups;
    static_assert(kHca - kMostTokens >= kLast);
    load(ape, pool.ape + (kLast + group) * kKey + channel);
    rows[kHcaRows - 1] = from.read(kLast + group, channel, ape);
    __syncthreads();  // nobody waits for another here: without it ptxas loads half of the rows behind the first exponentials
    const Mean mean(rows);
    store(&shared.top[group][mine], mean.top);
    store(&shared.total[group][mine], mean.total);
    store(&shared.sum[group][mine], mean.sum);
    __syncthreads();  // the groups are done, and have read the state
    if (group < after) {
        load(ape, pool.ape + group * kKey + channel);
        from.write_open_row(group, channel, Of::load_pair(pool.kv, pool.score, kHca - held + group, channel), ape);
    }
    if (thread < kHcaChannels) {
        float top = shared.top[0][thread], total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int i = 1; i < kHcaGroups; i++) top = fmaxf(top, shared.top[i][thread]);
#pragma unroll
        for (int i = 0; i < kHcaGroups; i++) {
            const float factor = expf(shared.top[i][thread] - top);
            total += factor * shared.total[i][thread];
            sum += factor * shared.sum[i][thread];
        }
        pooled[block * kHcaChannels + thread] = round_bf16(sum / total);
    }
    cp_async_wait<0>();
    if (!last_to_arrive(arrivals, kHcaBlocks, &shared.last)) return;

    const Angles angles = load_angles(dim, kKey, cos, sin);  // the first token is of the block that closes
    float4 parts[kKey / 128];
#pragma unroll
    for (int k = 0; k < kKey / 128; k++) parts[k] = __ldcg(reinterpret_cast<const float4*>(pooled) + 32 * k + thread % 32);
    const float4 own = __ldcg(reinterpret_cast<const float4*>(pooled) + thread);
    float v[4] = {own.x, own.y, own.z, own.w}, squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kKey / 128; k++) squares += square_sum({parts[k].x, parts[k].y, parts[k].z, parts[k].w});
    float norm[4];
    load(norm, shared.norm + dim);
    finish_entry<kKey>(pool, v, rsqrtf(warp_sum(squares) / kKey + eps), norm, angles, dim, position / kHca);
}
