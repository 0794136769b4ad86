// attention_sm100: attention (attention.cu, which says what that is) on Blackwell's tensor cores, for the tokens of a step or of a prompt.
// sm_90a has none of them: there the function returns cudaErrorNotSupported.
//
// 128 heads are a product's rows and 64 keys its columns; weights times values has the same keys, read the other way round, and 512 dims
// of fp32 sums, which are all of tensor memory: the scores would have no place. So two blocks, a cluster, divide the dims: each has 256 of
// q, of the keys and of the output, half of the work in all of this, and they exchange their halves of the scores through each other's
// shared memory and make the same softmax of the sum. In a step there are up to 4 such pairs a token, which share its keys and put their
// parts together at the end, in the same cluster: one launch and no workspace.
//
// Keys are expanded to bf16 with their scales, times 2^-32 so that the factor which does it, 2^120 times the scale, is a bf16; exact for
// scales up to 2^39 and above what bf16 calls subnormal. Weights are rounded to bf16, as the definition rounds them. A row's reference
// follows its largest score once that is 2^8 above, so the sums in tensor memory are seldom rescaled.
//
// Warps 0 to 3 have the rows' softmax, a thread a row; warps 4 to 7 expand the next 64 keys and ask for those behind; a thread of warp 8
// multiplies.
//
// Prediction for a B200 at 1.85 GHz: 64 keys are 16 products of 128 x 64 x 16, bound by shared memory, which gives 6 KB in 48 clocks, and
// 4 of 128 x 256 x 16, 12 KB in 96: 1,150 clocks; a softmax, which the products of the next keys cover in part, 1,000; together some 1,500.
// A token of Pro (1,152 keys) takes two SMs 27,000 clocks and 3,000 for q and the output: a chunk of 4,096 tokens 0.9 ms on 148 SMs. A step
// of one token, 4 pairs with 5 tiles each: 8 us. With 64 heads half of every product is of rows that are not there. Not measured: no B200
// has run it.
#include "common.cuh"

constexpr int kHalf = 256, kStrip = 64;  // dims of a block, of a head's 512; of a row of shared memory, and of a scale
constexpr int kRows = 128, kKeys = 64;   // heads of a cluster; keys of a tile
constexpr int kThreads = 288, kMaxSplits = 4;

// Bytes of a block's shared memory. A matrix of bf16 is strips of 64 columns, rows of 128 bytes in the swizzle of 128 bytes.
struct Layout {
    static constexpr int kRow = 2 * kStrip, kQueryStrip = kRows * kRow, kKeyStrip = kKeys * kRow, kTile = kHalf / kStrip * kKeyStrip;
    static constexpr int kQueries = 0, kTiles = kQueries + kHalf / kStrip * kQueryStrip;   // q; two tiles of keys
    static constexpr int kWeights = kTiles + 2 * kTile;                                   // the softmax of a tile
    static constexpr int kScores = kWeights + kRows * 2 * kKeys, kScoresOfTile = kKeys * kRows * 4;  // the other block's, [key, row]
    static constexpr int kParts = 0;  // in the end, where q and keys were: the output's sums, [dim, row]
    static constexpr int kStats = kScores + 2 * kScoresOfTile, kSquares = kStats + kRows * 8, kSeen = kSquares + kRows * 4;
    static constexpr int kBarriers = kSeen + 4 * 16, kAddress = kBarriers + 3 * 8, kBytes = kAddress + 8;
    static_assert(kHalf * kRows * 4 <= kWeights, "the sums take the place of q and keys");
};

// What a token can see. Without a selection (all entries may be seen) top_k is 0, without entries ratio.
struct Cache {
    const uint8_t *window_values, *window_scales, *entry_values, *entry_scales;
    const int* selected;  // [tokens, top_k], -1 where there is none
    int ring, window, entries, ratio, top_k;
};
struct Query {
    const float *q, *sink, *cos, *sin;
    int heads;
    float eps;
};

#ifdef HAS_TENSOR_MEMORY
constexpr int kDim = 2 * kHalf, kPlain = 448, kRotary = kDim - kPlain;  // dims of a head, of these FP8, of these rotated
constexpr int kKeyBytes = kPlain + 2 * kRotary, kScaleBytes = 8;
constexpr float kLog2e = 1.4426950408889634f, kKeyFactor = 0x1p-32f;
constexpr float kScoreFactor = 0.044194173824159216f * kLog2e / kKeyFactor;  // 512^-0.5, for powers of two
constexpr float kSlack = 8.0f;                                               // of a row's reference, as a power of two
constexpr unsigned kLargestScale = 254 - 88;                                 // the factor's exponent is the scale's byte + 88

// What a lane holds of a tile on its way: of key 2 i + lane / 16 of its warp's 16, dims 16 (lane % 16) to the 15 behind.
struct Ahead {
    uint4 values[kKeys / 8], more[kKeys / 8];  // 16 e4m3, or 16 bf16
    unsigned mark[kKeys / 8];                  // the ue8m0 byte
    unsigned seen;                             // a bit for each of the 16 keys
};

struct Block {
    static constexpr int kSoftmaxWarps = 4, kMultiplier = 8;
    static constexpr unsigned kColumns = 512, kScoreColumns = kHalf;  // of tensor memory: the output's sums, then two tiles' scores
    static constexpr int kRound = 1 << 30;                            // in a key's row number: of the window's ring

    char* memory;
    const Cache& cache;
    int half, split, splits, token, position, own, keys, tiles;  // own: how many keys of the window; keys: all; tiles: of each split

    __device__ __forceinline__ uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(memory + Layout::kBarriers) + i; }
    __device__ __forceinline__ uint64_t* scored() const { return barrier(0); }   // a tile's product with q has ended
    __device__ __forceinline__ uint64_t* weighed() const { return barrier(1); }  // its weights are there
    __device__ __forceinline__ uint64_t* added() const { return barrier(2); }    // their product with the values has ended
    template <class T> __device__ __forceinline__ T* at(int offset) const { return reinterpret_cast<T*>(memory + offset); }
    // A bit for each of 4 times 16 keys. While a tile's are read, those of the next but one may be written.
    __device__ __forceinline__ unsigned* seen(int tile) const { return at<unsigned>(Layout::kSeen) + tile % 4 * 4; }
    __device__ __forceinline__ int partner() const { return cluster_rank() ^ 1; }

    // Norm, RoPE and rounding of the block's dims of q, by warps 0 to 7: 16 rows each, a lane has 8 dims of each. Meets the cluster once.
    __device__ __forceinline__ void prepare(const Query& query, int head) const {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
        const bool rotates = half == 1 && lane >= 24;
        const float* q = query.q + (int64_t(token) * query.heads + head + first) * kDim + half * kHalf + lane * 8;
        float v[16][8];
#pragma unroll
        for (int i = 0; i < 16; i++)
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
                float(&four)[4] = reinterpret_cast<float(&)[4]>(v[i][j]);
                if (head + first + i < query.heads) load(four, q + i * kDim + j);
                else four[0] = four[1] = four[2] = four[3] = 0.0f;
            }
        float c[4] = {1.0f, 1.0f, 1.0f, 1.0f}, s[4] = {};
        if (rotates) {
            load(c, query.cos + token * (kRotary / 2) + (lane - 24) * 4);
            load(s, query.sin + token * (kRotary / 2) + (lane - 24) * 4);
        }
        float squares[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            squares[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) squares[i] += v[i][j] * v[i][j];
        }
#pragma unroll
        for (int offset = 16; offset; offset /= 2)
#pragma unroll
            for (int i = 0; i < 16; i++) squares[i] += __shfl_xor_sync(~0u, squares[i], offset);
        float* theirs = cluster_map(at<float>(Layout::kSquares), partner());
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (lane == i) theirs[first + i] = squares[i];
        cluster_sync();
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float scale = rsqrtf((squares[i] + at<float>(Layout::kSquares)[first + i]) / kDim + query.eps);
#pragma unroll
            for (int j = 0; j < 8; j++) v[i][j] *= scale;
            if (rotates)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float a = v[i][2 * j], b = v[i][2 * j + 1];
                    v[i][2 * j] = a * c[j] - b * s[j], v[i][2 * j + 1] = a * s[j] + b * c[j];
                }
            const uint4 row = {pack_bf16(v[i][0], v[i][1]), pack_bf16(v[i][2], v[i][3]), pack_bf16(v[i][4], v[i][5]),
                               pack_bf16(v[i][6], v[i][7])};
            const int place = (first + i) * Layout::kRow + ((lane % 8 ^ i % 8) << 4);
            *at<uint4>(Layout::kQueries + lane / 8 * Layout::kQueryStrip + place) = row;
        }
    }

    // The row of the lane's key of a tile, with kRound in it if it is one of the window's ring; -1 if there is none.
    __device__ __forceinline__ int name(int tile) const {
        const int key = (split + tile * splits) * kKeys + (threadIdx.x / 32 - kSoftmaxWarps) * 16 + threadIdx.x % 16;
        if (tile >= tiles || key >= keys) return -1;
        if (key < own) return int(unsigned(position - own + 1 + key) % unsigned(cache.ring)) | kRound;
        return cache.top_k ? cache.selected[int64_t(token) * cache.top_k + key - own] : key - own;
    }
    __device__ __forceinline__ void fetch(Ahead& ahead, int mine) const {
        const int lane = threadIdx.x % 32, chunk = lane % 16;
        const bool rotary = half == 1 && chunk >= 12;
        const int dims = rotary ? kPlain + (chunk - 12) * 32 : half * kHalf + chunk * 16;
        ahead.seen = __ballot_sync(~0u, mine >= 0) & 0xffff;
#pragma unroll
        for (int i = 0; i < kKeys / 8; i++) {
            const int named = __shfl_sync(~0u, mine, 2 * i + lane / 16);
            ahead.values[i] = ahead.more[i] = uint4{0, 0, 0, 0}, ahead.mark[i] = 0;
            if (named < 0) continue;
            const int64_t row = named & ~kRound;
            const uint8_t* from = (named & kRound ? cache.window_values : cache.entry_values) + row * kKeyBytes + dims;
            ahead.values[i] = *reinterpret_cast<const uint4*>(from);
            if (rotary) ahead.more[i] = *reinterpret_cast<const uint4*>(from + 16);
            else ahead.mark[i] = (named & kRound ? cache.window_scales : cache.entry_scales)[row * kScaleBytes + half * 4 + chunk / 4];
        }
    }
    // Two e4m3 in the upper bytes of each half of a word, times 2^-120.
    static __device__ __forceinline__ uint32_t shifted(uint32_t word) { return (word & 0x80008000u) | (word >> 4 & 0x07f007f0u); }
    __device__ __forceinline__ void expand(const Ahead& ahead, int tile) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - kSoftmaxWarps, chunk = lane % 16, strip = chunk / 4;
        const bool rotary = half == 1 && chunk >= 12;
        if (lane == 0) seen(tile)[warp] = ahead.seen;
#pragma unroll
        for (int i = 0; i < kKeys / 8; i++) {
            const uint32_t words[4] = {ahead.values[i].x, ahead.values[i].y, ahead.values[i].z, ahead.values[i].w};
            const uint32_t more[4] = {ahead.more[i].x, ahead.more[i].y, ahead.more[i].z, ahead.more[i].w};
            // 2^-32 for bf16; for e4m3 the scale times 2^(120 - 32), NaN beyond bf16's.
            const uint32_t factor = (rotary ? 0x2f80u : ahead.mark[i] <= kLargestScale ? (ahead.mark[i] + 88) << 7 : 0x7fc0u) * 0x10001u;
            uint32_t pairs[8];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                pairs[2 * j] = shifted(byte_perm(words[j], 0, 0x1404)), pairs[2 * j + 1] = shifted(byte_perm(words[j], 0, 0x3424));
            }
            if (rotary)
#pragma unroll
                for (int j = 0; j < 4; j++) pairs[j] = words[j], pairs[4 + j] = more[j];
#pragma unroll
            for (int j = 0; j < 8; j++) pairs[j] = mul_bf16x2(pairs[j], factor);
            const int key = warp * 16 + 2 * i + lane / 16;
            char* row = memory + Layout::kTiles + tile % 2 * Layout::kTile + strip * Layout::kKeyStrip + key * Layout::kRow;
            const uint4 low = {pairs[0], pairs[1], pairs[2], pairs[3]}, high = {pairs[4], pairs[5], pairs[6], pairs[7]};
            // Strips are in the same banks, so the lanes of every other strip begin with `high`.
            const int place = chunk % 4 * 2 ^ key % 8, odd = strip % 2;
            *reinterpret_cast<uint4*>(row + ((place ^ odd) << 4)) = odd ? high : low;
            *reinterpret_cast<uint4*>(row + ((place ^ odd ^ 1) << 4)) = odd ? low : high;
        }
        fence_async_shared();
    }

    __device__ __forceinline__ void expand_tiles(Ahead& ahead, int named) const {
        for (int i = 0; i < tiles; i++) {
            if (i + 1 < tiles) {
                if (i) mbarrier_wait(added(), (i - 1) % 2);
                expand(ahead, i + 1);
                fetch(ahead, named);
                named = name(i + 3);
            }
            cluster_sync();
        }
    }

    __device__ __forceinline__ void score(uint32_t columns, int tile) const {
        const uint32_t scores = columns + kScoreColumns + tile % 2 * kKeys;
        const char* keys = memory + Layout::kTiles + tile % 2 * Layout::kTile;
        for (int strip = 0; strip < kHalf / kStrip; strip++) {
            const uint64_t q = tensor_operand(memory + Layout::kQueries + strip * Layout::kQueryStrip, Swizzle::k128, 8 * Layout::kRow);
            const uint64_t k = tensor_operand(keys + strip * Layout::kKeyStrip, Swizzle::k128, 8 * Layout::kRow);
            for (int step = 0; step < 4; step++)  // 16 dims are 32 bytes, 2 units of an operand's address
                tensor_mma_bf16(scores, q + 2 * step, k + 2 * step, tensor_shape(kTensorBf16, kKeys), strip + step > 0);
        }
        tensor_commit(scored());
    }
    __device__ __forceinline__ void add_values(uint32_t columns, int tile) const {
        const uint64_t weights = tensor_operand(memory + Layout::kWeights, Swizzle::k128, 8 * Layout::kRow);
        const char* keys = memory + Layout::kTiles + tile % 2 * Layout::kTile;
        for (int step = 0; step < kKeys / 16; step++)
            tensor_mma_bf16(columns, weights + 2 * step,
                            tensor_operand_across(keys + step * 16 * Layout::kRow, 8 * Layout::kRow, Layout::kKeyStrip),
                            tensor_shape(kTensorBf16, kHalf) | kTensorAcross, tile + step > 0);
        tensor_commit(added());
    }
    // By warp 8, of which one thread has work.
    __device__ __forceinline__ void multiply(uint32_t columns) const {
        const bool mine = threadIdx.x % 32 == 0;
        if (mine) score(columns, 0);
        for (int i = 0; i < tiles; i++) {
            __syncwarp();
            cluster_sync();
            if (!mine) continue;
            tensor_fence_after();
            if (i + 1 < tiles) score(columns, i + 1);
            mbarrier_wait(weighed(), i % 2);
            tensor_fence_after();
            add_values(columns, i);
        }
        __syncwarp();
    }

    // A thread's row: its reference, a power of two, and the sum of its weights.
    __device__ __forceinline__ float2 weigh_tiles(uint32_t columns) const {
        const int row = threadIdx.x, lane = row % 32;
        const uint32_t lanes = columns + (row / 32 * 32 << 16);
        float reference = -INFINITY, sum = 0.0f;
        for (int i = 0; i < tiles; i++) {
            mbarrier_wait(scored(), i % 2);
            tensor_fence_after();
            float* mine = at<float>(Layout::kScores + i % 2 * Layout::kScoresOfTile) + row;
            float* theirs = cluster_map(mine, partner());
            uint32_t r[kKeys / 8][8];
#pragma unroll
            for (int j = 0; j < kKeys / 8; j++) tensor_load_8(r[j], lanes + kScoreColumns + i % 2 * kKeys + j * 8);
            tensor_wait_load(r);
#pragma unroll
            for (int k = 0; k < kKeys; k++) theirs[k * kRows] = __uint_as_float(r[k / 8][k % 8]);
            tensor_fence_before();
            cluster_sync();
            float top = -INFINITY;
#pragma unroll
            for (int k = 0; k < kKeys; k++) {
                const float score = (__uint_as_float(r[k / 8][k % 8]) + mine[k * kRows]) * kScoreFactor;
                const float masked = seen(i)[k / 16] >> k % 16 & 1 ? score : -INFINITY;
                r[k / 8][k % 8] = __float_as_uint(masked);
                top = fmaxf(top, masked);  // a NaN is not in it, but in its weight
            }
            float factor = 1.0f;
            if (top > reference + kSlack) factor = exp2f(reference - top), reference = top, sum *= factor;
            if (i) {
                mbarrier_wait(added(), (i - 1) % 2);
                tensor_fence_after();
                if (__any_sync(~0u, factor != 1.0f)) {
                    for (int column = 0; column < kHalf; column += 32) {
                        uint32_t o[4][8];
#pragma unroll
                        for (int j = 0; j < 4; j++) tensor_load_8(o[j], lanes + column + 8 * j);
                        tensor_wait_load(o);
#pragma unroll
                        for (int j = 0; j < 4; j++) {
#pragma unroll
                            for (int k = 0; k < 8; k++) o[j][k] = __float_as_uint(__uint_as_float(o[j][k]) * factor);
                            tensor_store_8(lanes + column + 8 * j, o[j]);
                        }
                    }
                    tensor_wait_store();
                }
            }
            const float from = reference == -INFINITY ? 0.0f : reference;  // no key yet: all weights are 0
#pragma unroll
            for (int chunk = 0; chunk < kKeys / 8; chunk++) {
                float p[8];
#pragma unroll
                for (int j = 0; j < 8; j++) p[j] = exp2f(__uint_as_float(r[chunk][j]) - from), sum += p[j];
                *at<uint4>(Layout::kWeights + row * Layout::kRow + ((chunk ^ row % 8) << 4)) = {
                    pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]), pack_bf16(p[4], p[5]), pack_bf16(p[6], p[7])};
            }
            fence_async_shared();
            tensor_fence_before();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(weighed());
        }
        return {reference, sum};
    }

    // By warps 0 to 7, a row and half of the columns each: the splits' sums put together, the sink, the inverse RoPE. Meets the cluster
    // once.
    __device__ __forceinline__ void finish(uint32_t columns, float2 stats, const Query& query, int head, __nv_bfloat16* out) const {
        const int row = threadIdx.x % kRows, group = threadIdx.x / kRows;
        const uint32_t lanes = columns + (row / 32 * 32 << 16);
        if (tiles > 1) mbarrier_wait(added(), tiles % 2);  // one after the other: a phase ago, the parity was the same
        mbarrier_wait(added(), (tiles - 1) % 2);
        tensor_fence_after();
        const auto sums = [&](int column, float(&o)[8]) {
            uint32_t r[1][8];
            tensor_load_8(r[0], lanes + column);
            tensor_wait_load(r);
#pragma unroll
            for (int j = 0; j < 8; j++) o[j] = __uint_as_float(r[0][j]);
        };
        if (group == 0) at<float2>(Layout::kStats)[row] = stats;
        if (splits > 1)
            for (int column = group * kHalf / 2; column < (group + 1) * kHalf / 2; column += 8) {
                float o[8];
                sums(column, o);
#pragma unroll
                for (int j = 0; j < 8; j++) at<float>(Layout::kParts)[(column + j) * kRows + row] = o[j];
            }
        cluster_sync();
        float2 of_split[kMaxSplits];
        float top = -INFINITY, weight[kMaxSplits], total;
#pragma unroll
        for (int i = 0; i < kMaxSplits; i++)
            if (i < splits) {
                of_split[i] = cluster_map(at<float2>(Layout::kStats), 2 * i + half)[row];
                top = fmaxf(top, of_split[i].x);
            }
        const bool there = head + row < query.heads;
        total = there ? exp2f(query.sink[head + row] * kLog2e - top) : 1.0f;  // infinity if the sink is so much larger: the output is 0
#pragma unroll
        for (int i = 0; i < kMaxSplits; i++)
            if (i < splits) weight[i] = exp2f(of_split[i].x - top), total += weight[i] * of_split[i].y;
        const float scale = 1.0f / kKeyFactor / total;
        const int each = kHalf / splits / 2, first = split * kHalf / splits + group * each;
        __nv_bfloat16* to = out + (int64_t(token) * query.heads + head + row) * kDim + half * kHalf;
        for (int column = first; column < first + each; column += 8) {
            float o[8] = {};
            if (splits == 1) {
                sums(column, o);
            } else {
#pragma unroll
                for (int i = 0; i < kMaxSplits; i++) {
                    if (i >= splits) break;
                    const float* part = cluster_map(at<float>(Layout::kParts), 2 * i + half) + column * kRows + row;
#pragma unroll
                    for (int j = 0; j < 8; j++) o[j] += weight[i] * part[j * kRows];
                }
            }
#pragma unroll
            for (int j = 0; j < 8; j++) o[j] *= scale;
            if (half * kHalf + column >= kPlain) {
                const int64_t pair = int64_t(token) * (kRotary / 2) + (half * kHalf + column - kPlain) / 2;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float c = query.cos[pair + j], s = query.sin[pair + j], a = o[2 * j], b = o[2 * j + 1];
                    o[2 * j] = a * c + b * s, o[2 * j + 1] = b * c - a * s;
                }
            }
            if (there) store(to + column, o);
        }
    }
};
#endif

__global__ void __launch_bounds__(kThreads, 1)
attention_sm100_kernel(const Query query, const int64_t* positions, const Cache cache, __nv_bfloat16* out) {
#ifdef HAS_TENSOR_MEMORY
    DYN_SMEM(char, memory);
    grid_dependency_launch();
    grid_dependency_wait();
    const int warp = threadIdx.x / 32, head = blockIdx.y * kRows, token = blockIdx.z, rank = cluster_rank(), splits = cluster_size() / 2;
    const int position = int(positions[token]), own = min(cache.window, position + 1);
    const int entries = !cache.ratio ? 0 : cache.top_k ? cache.top_k : min((position + 1) / cache.ratio, cache.entries);
    const int all = (own + entries + kKeys - 1) / kKeys, tiles = (all + splits - 1) / splits;  // of some splits the last has no key
    const Block block{memory, cache, rank % 2, rank / 2, splits, token, position, own, own + entries, tiles};
    if (threadIdx.x == 0) {
        mbarrier_init(block.scored(), 1);
        mbarrier_init(block.weighed(), Block::kSoftmaxWarps);
        mbarrier_init(block.added(), 1);
        mbarrier_fence_init();
    }
    if (warp == Block::kMultiplier) {
        tensor_alloc(block.at<uint32_t>(Layout::kAddress), Block::kColumns);
        tensor_relinquish();
        tensor_fence_before();
    }
    cluster_sync();  // all blocks are there
    if (warp < Block::kMultiplier) {
        block.prepare(query, head);
        fence_async_shared();
    } else {
        cluster_sync();
    }
    Ahead ahead;
    int named = -1;
    if (warp >= Block::kSoftmaxWarps && warp < Block::kMultiplier) {
        block.fetch(ahead, block.name(0));
        named = block.name(1);
        block.expand(ahead, 0);
        block.fetch(ahead, named);
        named = block.name(2);
    }
    __syncthreads();
    tensor_fence_after();
    const uint32_t columns = *block.at<uint32_t>(Layout::kAddress);
    float2 stats = {};
    if (warp < Block::kSoftmaxWarps) stats = block.weigh_tiles(columns);
    else if (warp < Block::kMultiplier) block.expand_tiles(ahead, named);
    else block.multiply(columns);
    if (warp < Block::kMultiplier) block.finish(columns, stats, query, head, out);
    else cluster_sync();
    tensor_fence_before();
    cluster_sync();  // others have read what this block has
    if (warp == Block::kMultiplier) {
        tensor_fence_after();
        tensor_free(columns, Block::kColumns);
    }
#endif
}

// As attention, but for any number of tokens and without a workspace. splits: 1, 2 or 4 pairs of blocks share a token's keys.
extern "C" int attention_sm100(const float* q, const float* sink, const float* cos, const float* sin, const int64_t* positions,
                               const uint8_t* window_values, const uint8_t* window_scales, const uint8_t* entry_values,
                               const uint8_t* entry_scales, const int* selected, __nv_bfloat16* out, int tokens, int heads, int ring,
                               int window_size, int entries, int ratio, int top_k, int splits, float eps, cudaStream_t stream) {
    if (!built_for_tensor_memory()) return cudaErrorNotSupported;
    if (tokens < 1 || tokens > 65535 || (splits != 1 && splits != 2 && splits != kMaxSplits)) return cudaErrorInvalidValue;
    const Query query{q, sink, cos, sin, heads, eps};
    const Cache cache{window_values, window_scales, entry_values, entry_scales, selected, ring, window_size, entries, ratio, top_k};
    LAUNCH_CLUSTER(attention_sm100_kernel, dim3(2 * splits, (heads + kRows - 1) / kRows, tokens), dim3(kThreads), 2 * splits,
                   Layout::kBytes, stream, query, positions, cache, out);
    return cudaGetLastError();
}
