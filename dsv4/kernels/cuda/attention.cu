// attention: q's per-head norm and RoPE, softmax with a sink over a token's window and compressed entries, whose 512 dims are keys and
// values, packed as in dsv4/kernels/keys.py; output de-rotated and rounded once (dsv4/ops/attention.py, attention_ref).
//
// attention_split: a block takes 16 heads x a share of one token's keys (flash-decoding); attention_merge adds the shares up. The eight
// warps of a block divide the dims, not the keys: warps 0 to 6 have 64 FP8 dims and so one scale per key, warp 7 has the 64 rotated bf16
// dims. A warp loads its part of a key straight into the registers that the tensor core's B operand wants, multiplies it with its dims of
// q, stores it as bf16 in shared memory of its own, and multiplies it there, transposed, with P into its dims of the output. Only scores
// cross warps.
//
// Pro, CSA (128 heads, 1,152 keys): 8 x 18 blocks of 64 keys, each reads 70 KB and writes 33 KB. Latency decides: position, selection and
// keys are three dependent loads (1.3 us), expanding and multiplying 64 keys 1 us, launch, barriers and stores 1.5 us; the merge reads
// 4.7 MB from L2 (2 us with its launch). So 6 us are expected; for 128 heads x 192 keys and 64 x 640 5 us (48 and 80 blocks of 32 keys).
#include "common.cuh"

constexpr int kDim = 512, kPlain = 448, kRotary = kDim - kPlain;  // dims of a head, of these FP8, of these rotated
constexpr int kKeyBytes = kPlain + 2 * kRotary, kScaleBytes = 8;
constexpr int kHeads = 16;             // of a block: the tensor core's rows
constexpr int kTile = 64;              // keys between two barriers
constexpr int kWarpDims = 64;          // the dims of a warp: one scale's, or the rotated ones
constexpr int kWarps = kDim / kWarpDims, kThreads = 32 * kWarps, kRotaryWarp = kWarps - 1;
constexpr int kMergeThreads = kDim / 4, kMaxSplits = 64, kAhead = 20;
constexpr float kScale = 0.044194173824159216f, kExp2Scale = kScale * 1.4426950408889634f;  // 512^-0.5, and for powers of two instead of e

// Shared memory. Scores of a warp and 8 keys are 32 float4 as mma leaves them; these and the rows of weights are padded, which keeps reads
// by other warps free of bank conflicts. The rotated dims have a second buffer: the next tile's arrive there while this one's are in use.
constexpr int kScoreStride = 36, kWeightStride = 144, kValueBytes = kTile * 2 * kWarpDims;
constexpr int kScores = 0, kValues = kWarps * (kTile / 8) * kScoreStride * 16;
constexpr int kWeights = kValues + (kWarps + 1) * kValueBytes, kFactors = kWeights + kWeightStride * kHeads;
constexpr int kSquares = kFactors + 4 * kHeads, kAngles = kSquares + 4 * kWarps * kHeads, kSharedBytes = kAngles + 4 * kRotary;
static_assert(2 * (kSharedBytes + 1024) <= 228 * 1024, "two blocks a SM");

// What a token can see. Without entries ratio is 0; without a selection (all entries are seen) top_k is 0.
struct Cache {
    const uint8_t *window_values, *window_scales, *entry_values, *entry_scales;
    const int* selected;  // [tokens, top_k], -1 where there is none
    int ring, window, entries, ratio, top_k;
};

// How a token's `count` keys, `window` of them in the ring, are split into shares (the last may be shorter), a multiple of 16.
struct Plan {
    int own, window, count, share;  // own: the ring's row of the token itself
};

// Shares of 32 keys while they fill at most half of the blocks that the grid has; then of one tile; then of what fills all blocks.
__device__ __forceinline__ Plan plan_for(const int64_t* positions, const Cache& cache, int token, int splits) {
    const int position = int(positions[token]);
    Plan p;
    p.own = unsigned(position) % unsigned(cache.ring);  // unsigned divisions are shorter
    p.window = min(position + 1, cache.window);
    p.count = p.window;
    if (cache.ratio) p.count += min(int(unsigned(position + 1) / unsigned(cache.ratio)), cache.top_k ? cache.top_k : cache.entries);
    p.share = 32;
    if (p.count > splits / 2 * 32) p.share = kTile;
    if (p.count > splits * kTile) p.share = (p.count + 16 * splits - 1) / (16 * splits) * 16;
    return p;
}

// Key `i` of a token, if it has one there: its bytes and its scales. False if not; then it is its own key, which can always be read.
__device__ __forceinline__ bool locate(const uint8_t*& key, const uint8_t*& scales, const Cache& cache, const Plan& plan, int token, int i,
                                       bool there) {
    int row = plan.own + 1 - plan.window + i;
    if (row < 0) row += cache.ring;
    int entry = there ? i - plan.window : -1;
    const bool recent = there && i < plan.window;
    if (cache.top_k && entry >= 0) entry = cache.selected[int64_t(token) * cache.top_k + entry];
    if (!recent) row = entry < 0 ? plan.own : entry;
    const bool in_ring = recent || entry < 0;
    key = (in_ring ? cache.window_values : cache.entry_values) + int64_t(row) * kKeyBytes;
    scales = (in_ring ? cache.window_scales : cache.entry_scales) + int64_t(row) * kScaleBytes;
    return recent || entry >= 0;
}

// Where 16-byte chunk `chunk` of row `row` lies among values of 128-byte rows: eight chunks that are moved together are in different banks.
__device__ __forceinline__ int place(int row, int chunk) { return row * 128 + ((chunk ^ row % 8) << 4); }

// A tile's keys as one warp has them. raw[n] are e4m3 dims 16 t to 16 t + 15 of key 8 n + g, with g = lane / 4 and t = lane % 4; in the
// rotary warp the bf16 dims go to shared memory instead, to chunks that this thread alone will touch until it has scored them.
struct Tile {
    uint4 raw[kTile / 8];
    unsigned mark[2];  // lane l: the ue8m0 bytes of keys l and l + 32; in the rotary warp, whether there are these keys
};

// Keys `begin` to begin + left - 1, or as many of them as fit, in steps of 16.
__device__ __forceinline__ void load_tile(Tile& tile, char* values, const Cache& cache, const Plan& plan, int token, int begin, int left,
                                          int steps, int warp, int lane) {
    int64_t mine[2];  // the key's distance from the window, and not its address, of which ptxas would not know that it is global
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint8_t *key, *scales;
        const bool there = locate(key, scales, cache, plan, token, begin + 32 * half + lane, 32 * half + lane < left);
        tile.mark[half] = warp != kRotaryWarp ? scales[warp] : there;
        mine[half] = reinterpret_cast<int64_t>(key) - reinterpret_cast<int64_t>(cache.window_values);
    }
    const int g = lane / 4, t = lane % 4;
    if (warp != kRotaryWarp) {
#pragma unroll
        for (int n = 0; n < kTile / 8; n++) {
            if (n >= 2 * steps) break;
            const auto* key = reinterpret_cast<const uint4*>(cache.window_values + __shfl_sync(~0u, mine[n / 4], n % 4 * 8 + g));
            tile.raw[n] = key[warp * (kWarpDims / 16) + t];
        }
    } else {
#pragma unroll 1
        for (int n = 0; n < 2 * steps; n++) {
            const auto* key = cache.window_values + __shfl_sync(~0u, n < 4 ? mine[0] : mine[1], n % 4 * 8 + g);
            cp_async_16(values + place(8 * n + g, 2 * t), key + kPlain + 32 * t);
            cp_async_16(values + place(8 * n + g, 2 * t + 1), key + kPlain + 32 * t + 16);
        }
        cp_async_commit();
    }
}

// Keys 8 n to 8 n + 7, as bf16: their products with the warp's dims of q go to `scores`, they themselves to `values`. Bits 0 and 1 of
// `seen` are of keys 8 n + 2 t and the next: the scores of one that is not seen are -inf. pair[2 i] are the first and the third of the
// thread's dims 4 i to 4 i + 3, pair[2 i + 1] the others; chunk 2 t has the even pairs, chunk 2 t + 1 the odd ones, so that the two columns
// which a later mma gives a thread are, with those of the next chunk, four neighbouring dims.
__device__ __forceinline__ void score_keys(float4* scores, char* values, const uint32_t (&pair)[8], const uint32_t (&q)[4][4], int n,
                                           int lane, unsigned seen) {
    const int key = 8 * n + lane / 4, chunk = 2 * (lane % 4);
    float sum[2][4] = {};  // two, as a product waits 33 cycles for the one before
#pragma unroll
    for (int j = 0; j < 4; j++) mma_bf16(sum[j % 2], q[j], {pair[2 * j], pair[2 * j + 1]});
    *reinterpret_cast<uint4*>(values + place(key, chunk)) = uint4{pair[0], pair[2], pair[4], pair[6]};
    *reinterpret_cast<uint4*>(values + place(key, chunk + 1)) = uint4{pair[1], pair[3], pair[5], pair[7]};
#pragma unroll
    for (int i = 0; i < 4; i++) sum[0][i] = seen >> i % 2 & 1 ? sum[0][i] + sum[1][i] : -INFINITY;
    scores[n * kScoreStride + lane] = float4{sum[0][0], sum[0][1], sum[0][2], sum[0][3]};
}

__device__ __forceinline__ void score_plain_tile(float4* scores, char* values, const Tile& tile, const uint32_t (&q)[4][4], int steps,
                                                 int lane) {
    const uint32_t power[2] = {(tile.mark[0] << 7) * 0x10001, (tile.mark[1] << 7) * 0x10001};  // twice 2^(scale - 127); infinity for 255
#pragma unroll
    for (int n = 0; n < kTile / 8; n++) {
        if (n >= 2 * steps) break;
        const uint32_t word[4] = {tile.raw[n].x, tile.raw[n].y, tile.raw[n].z, tile.raw[n].w};
        const uint32_t times = __shfl_sync(~0u, power[n / 4], n % 4 * 8 + lane / 4);
        uint32_t pair[8];
        // e4m3 -> bf16: sign, exponent and fraction are put in place, which makes value * 2^-120 (subnormals too). Both products are exact.
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t even = (word[i] << 4 & 0x07f007f0) | (word[i] << 8 & 0x80008000);
            const uint32_t odd = (word[i] >> 4 & 0x07f007f0) | (word[i] & 0x80008000);
            pair[2 * i] = mul_bf16x2(mul_bf16x2(even, 0x7b807b80), times);  // 0x7b80: 2^120
            pair[2 * i + 1] = mul_bf16x2(mul_bf16x2(odd, 0x7b807b80), times);
        }
        score_keys(scores, values, pair, q, n, lane, 3);
    }
}

// -inf from this warp is enough to make the sums of all warps -inf.
__device__ __forceinline__ void score_rotary_tile(float4* scores, char* values, const Tile& tile, const uint32_t (&q)[4][4], int steps,
                                                  int lane) {
    const unsigned there[2] = {__ballot_sync(~0u, tile.mark[0]), __ballot_sync(~0u, tile.mark[1])};
    cp_async_wait<0>();
#pragma unroll 1
    for (int n = 0; n < 2 * steps; n++) {
        const int key = 8 * n + lane / 4, chunk = 2 * (lane % 4);
        uint32_t pair[8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 v = *reinterpret_cast<const uint4*>(values + place(key, chunk + half));
            pair[4 * half] = byte_perm(v.x, v.y, 0x5410), pair[4 * half + 1] = byte_perm(v.x, v.y, 0x7632);
            pair[4 * half + 2] = byte_perm(v.z, v.w, 0x5410), pair[4 * half + 3] = byte_perm(v.z, v.w, 0x7632);
        }
        score_keys(scores, values, pair, q, n, lane, (n < 4 ? there[0] : there[1]) >> (n % 4 * 8 + chunk));
    }
}

// The softmax so far of heads `warp` and warp + 8: the largest score (unscaled) in every lane, the sum of weights in parts.
struct Running {
    float top[2], sum[2];
};

// Adds the warps' parts of the scores up, for two heads and all keys of the tile: lane (n, t) has keys 8 n + 2 t and the next. Leaves bf16
// weights relative to the largest score so far, and the factor for what was summed before.
__device__ __forceinline__ void weigh_tile(Running& running, char* shared, int steps, int warp, int lane) {
    const int n = lane / 4, t = lane % 4;
    float score[4];
#pragma unroll
    for (int i = 0; i < 4; i++) score[i] = n < 2 * steps ? 0.0f : -INFINITY;
    if (n < 2 * steps) {
        const float4* scores = reinterpret_cast<const float4*>(shared + kScores) + n * kScoreStride + 4 * warp + t;
#pragma unroll 4
        for (int w = 0; w < kWarps; w++) {
            const float4 part = scores[w * (kTile / 8) * kScoreStride];
            score[0] += part.x, score[1] += part.y, score[2] += part.z, score[3] += part.w;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = fmaxf(running.top[h], fmaxf(score[2 * h], score[2 * h + 1]));
#pragma unroll
        for (int offset = 16; offset; offset /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
        const float from = top == -INFINITY ? 0.0f : top;  // no key yet: all weights are exp(-inf) = 0
        const float factor = exp2f((running.top[h] - from) * kExp2Scale);
        const float p[2] = {exp2f((score[2 * h] - from) * kExp2Scale), exp2f((score[2 * h + 1] - from) * kExp2Scale)};
        running.top[h] = top;
        running.sum[h] = running.sum[h] * factor + (p[0] + p[1]);
        const int row = warp + 8 * h;
        *reinterpret_cast<uint32_t*>(shared + kWeights + row * kWeightStride + 16 * n + 4 * t) = pack_bf16(p[0], p[1]);
        if (lane == 0) reinterpret_cast<float*>(shared + kFactors)[row] = factor;
    }
}

// out = out * factor + weights . values, for the warp's dims.
__device__ __forceinline__ void add_values(float (&out)[8][4], const char* shared, const char* values, int steps, int lane) {
    const float* factors = reinterpret_cast<const float*>(shared + kFactors) + lane / 4;
    const float factor[2] = {factors[0], factors[8]};
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[n][i] *= factor[i / 2];
#pragma unroll
    for (int step = 0; step < kTile / 16; step++) {
        if (step >= steps) break;
        const int row = lane % 16, chunk = lane / 16;
        uint32_t p[4], v[4];
        ldmatrix_x4(p, shared + kWeights + row * kWeightStride + 16 * (2 * step + chunk));
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            ldmatrix_x4_trans(v, values + place(16 * step + row, n + chunk));
            mma_bf16(out[n], p, {v[0], v[1]});
            mma_bf16(out[n + 1], p, {v[2], v[3]});
        }
    }
    __syncwarp();  // the next tile's values take their place
}

// fp32 q -> the A operand of the thread's heads g and g + 8 and its 16 dims of each: normed over the head and, in the rotary warp, rotated.
// `q` is at these dims of head g, behind which there are `heads`; `cos` and `sin` at the token's angles.
__device__ __forceinline__ void norm_query(uint32_t (&query)[4][4], char* shared, const float* q, int heads, const float* cos,
                                           const float* sin, float eps, int warp, int lane) {
    float* squares = reinterpret_cast<float*>(shared + kSquares);
    float* angles = reinterpret_cast<float*>(shared + kAngles);
    float v[2][16] = {};  // heads that there are not are zeros
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (8 * h < heads)
#pragma unroll
            for (int i = 0; i < 16; i += 4) {
                float four[4];
                load(four, q + 8 * h * kDim + i);
#pragma unroll
                for (int j = 0; j < 4; j++) v[h][i + j] = four[j];
            }
    // Two warps fetch the angles for the rotary one, which has no registers left for loads ahead.
    const float angle = warp == 0 ? cos[lane] : warp == 1 ? sin[lane] : 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) sum += v[h][i] * v[h][i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) squares[warp * kHeads + lane / 4 + 8 * h] = sum;
    }
    if (warp < 2) angles[threadIdx.x] = angle;
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; w++) sum += squares[w * kHeads + lane / 4 + 8 * h];
        const float scale = rsqrtf(sum / kDim + eps);
#pragma unroll
        for (int i = 0; i < 16; i++) v[h][i] *= scale;
    }
    if (warp == kRotaryWarp)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float c = angles[lane % 4 * 8 + i], s = angles[kRotary / 2 + lane % 4 * 8 + i];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float a = v[h][2 * i], b = v[h][2 * i + 1];
                v[h][2 * i] = a * c - b * s, v[h][2 * i + 1] = a * s + b * c;
            }
        }
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            query[j][h] = pack_bf16(v[h][4 * j], v[h][4 * j + 2]);
            query[j][2 + h] = pack_bf16(v[h][4 * j + 1], v[h][4 * j + 3]);
        }
}

__global__ void __launch_bounds__(kThreads, 2) attention_split(const float* q, const float* cos, const float* sin, const int64_t* positions,
                                                               Cache cache, float* partial, float2* stats, int heads, int splits,
                                                               float eps) {
    DYN_SMEM(char, shared);
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);  // the same in all lanes, which the compiler cannot know otherwise
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x, token = blockIdx.z, head = blockIdx.y * kHeads + g;
    grid_dependency_launch();
    grid_dependency_wait();
    const Plan plan = plan_for(positions, cache, token, splits);
    int begin = split * plan.share, left = min(plan.share, plan.count - begin);
    if (left <= 0) return;

    const int64_t row = int64_t(token) * heads + head;
    uint32_t query[4][4];
    float out[8][4];
    Running running;
    Tile tile;
    int steps = 0;  // of 16 keys, of the tile that is scored
    float4* scores = reinterpret_cast<float4*>(shared + kScores) + warp * (kTile / 8) * kScoreStride;
    int values = kValues + warp * kValueBytes;
    for (bool first = true;; first = false) {  // the next tile is on its way while q is normed, or the softmax of the one before made
        const int next = warp == kRotaryWarp ? 2 * kValues + (2 * kRotaryWarp + 1) * kValueBytes - values : values;  // the other buffer
        const int next_steps = min((left + 15) / 16, kTile / 16);
        if (left > 0) load_tile(tile, shared + next, cache, plan, token, begin, left, next_steps, warp, lane);
        if (first) {
            norm_query(query, shared, q + row * kDim + warp * kWarpDims + 16 * t, heads - head, cos + token * (kRotary / 2),
                       sin + token * (kRotary / 2), eps, warp, lane);
#pragma unroll
            for (int n = 0; n < 8; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
            running = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
        } else {
            __syncthreads();
            weigh_tile(running, shared, steps, warp, lane);
            __syncthreads();
            add_values(out, shared, shared + values, steps, lane);
            if (left <= 0) break;
        }
        values = next, steps = next_steps;
        if (warp != kRotaryWarp) score_plain_tile(scores, shared + values, tile, query, steps, lane);
        else score_rotary_tile(scores, shared + values, tile, query, steps, lane);
        begin += kTile, left -= kTile;
    }

    partial += (row * splits + split) * kDim + warp * kWarpDims + 4 * t;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (head + 8 * h < heads)
#pragma unroll
            for (int n = 0; n < 8; n += 2)
                store(partial + int64_t(8 * h) * splits * kDim + 8 * n,
                      {out[n][2 * h], out[n + 1][2 * h], out[n][2 * h + 1], out[n + 1][2 * h + 1]});
        float sum = running.sum[h];
#pragma unroll
        for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        const int mine = blockIdx.y * kHeads + warp + 8 * h;
        if (lane == 0 && mine < heads) stats[(int64_t(token) * heads + mine) * splits + split] = {running.top[h], sum};
    }
}

// One block a head: out = (sum_i e_i partial_i) / (sum_i e_i sum_i + e_sink), e = exp(. - the largest), then the inverse RoPE.
__global__ void __launch_bounds__(kMergeThreads) attention_merge(const float* partial, const float2* stats, const float* sink,
                                                                 const float* cos, const float* sin, const int64_t* positions, Cache cache,
                                                                 __nv_bfloat16* out, int heads, int splits) {
    const int head = blockIdx.x, token = blockIdx.y, lane = threadIdx.x % 32, mine = 4 * threadIdx.x;
    const int64_t row = int64_t(token) * heads + head;
    const float of_sink = sink[head];  // a weight
    grid_dependency_launch();
    grid_dependency_wait();
    const Plan plan = plan_for(positions, cache, token, splits);
    const int active = (plan.count + plan.share - 1) / plan.share;
    partial += row * splits * kDim + mine;
    float ahead[kAhead][4];  // on their way while the weights are found
#pragma unroll
    for (int i = 0; i < kAhead; i++)
        if (i < active) load(ahead[i], partial + i * kDim);
    float c[2] = {}, s[2] = {};
    const int pair = token * (kRotary / 2) + (mine - kPlain) / 2;
    if (mine >= kPlain) load(c, cos + pair), load(s, sin + pair);

    float top[2], sum[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const bool is = lane + 32 * h < active;
        const float2 of_split = is ? stats[row * splits + lane + 32 * h] : float2{-INFINITY, 0.0f};
        top[h] = of_split.x * kScale, sum[h] = of_split.y;
    }
    float largest = fmaxf(top[0], top[1]);
#pragma unroll
    for (int offset = 16; offset; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
    const float weight[2] = {expf(top[0] - largest), expf(top[1] - largest)};
    float total = weight[0] * sum[0] + weight[1] * sum[1];
#pragma unroll
    for (int offset = 16; offset; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
    total += expf(of_sink - largest);  // infinity if the sink is so much larger, and then all of the output is 0

    float o[4] = {};
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
        if (i >= active) break;
        const float w = __shfl_sync(~0u, weight[0], i);
#pragma unroll
        for (int j = 0; j < 4; j++) o[j] += w * ahead[i][j];
    }
#pragma unroll 8
    for (int i = kAhead; i < active; i++) {
        float four[4];
        load(four, partial + i * kDim);
        const float w = __shfl_sync(~0u, i < 32 ? weight[0] : weight[1], i % 32);
#pragma unroll
        for (int j = 0; j < 4; j++) o[j] += w * four[j];
    }
    const float scale = 1.0f / total;
#pragma unroll
    for (int j = 0; j < 4; j++) o[j] *= scale;
    if (mine >= kPlain)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float a = o[2 * i], b = o[2 * i + 1];
            o[2 * i] = a * c[i] + b * s[i], o[2 * i + 1] = b * c[i] - a * s[i];
        }
    store(out + row * kDim + mine, o);
}

// q [tokens, heads, 512], sink [heads], cos and sin [tokens, 32] fp32; positions [tokens]; values [rows, 576] and scales [rows, 8] of the
// window's `ring` rows and of `entries` entries (ratio 0: none); selected [tokens, top_k] (top_k 0: all entries). Working space: partial
// [tokens, heads, splits, 512] and stats [tokens, heads, splits, 2], up to 64 splits. out [tokens, heads, 512] bf16. All but positions,
// scales and selected are 16-byte aligned.
extern "C" int attention(const float* q, const float* sink, const float* cos, const float* sin, const int64_t* positions,
                         const uint8_t* window_values, const uint8_t* window_scales, const uint8_t* entry_values,
                         const uint8_t* entry_scales, const int* selected, float* partial, float* stats, __nv_bfloat16* out, int tokens,
                         int heads, int ring, int window_size, int entries, int ratio, int top_k, int splits, float eps,
                         cudaStream_t stream) {
    if (splits < 1 || splits > kMaxSplits) return cudaErrorInvalidValue;
    const Cache cache = {window_values, window_scales, entry_values, entry_scales, selected, ring, window_size, entries, ratio, top_k};
    float2* pairs = reinterpret_cast<float2*>(stats);
    LAUNCH(attention_split, dim3(splits, (heads + kHeads - 1) / kHeads, tokens), dim3(kThreads), kSharedBytes, stream, q, cos, sin,
           positions, cache, partial, pairs, heads, splits, eps);
    LAUNCH(attention_merge, dim3(heads, tokens), dim3(kMergeThreads), 0, stream, partial, pairs, sink, cos, sin, positions, cache, out,
           heads, splits);
    return cudaGetLastError();
}
