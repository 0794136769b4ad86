// index_scores: sum over 64 heads of w * relu(q . k) for a token's query and every entry's key, fp32 (dsv4/ops/indexer.py,
// index_scores_ref).
//
// A warp takes 16 entries at a time, four warps (a warpgroup) 64 that lie together. Lane 4 g + t copies block t (32 values, one scale) of
// keys g and g + 8 to shared memory, for itself alone, three rounds ahead, and expands them to bf16 in registers, where they are the A
// operand of wgmma (m64n64k16): the queries of 64 heads, B, are in shared memory. A key is read and expanded once, for all tokens; the sum
// over the heads stays within a lane but for its last two steps. Which dim is where along K does not matter to a dot product, so the
// queries are stored in the order in which the nibbles come. Values are exact in bf16 and their products in fp32. Queries are made (RoPE,
// Hadamard, FP4) by every block for itself, a warp for 4 heads. Where there is no wgmma, mma.sync has the same operands.
//
// While the tensor core multiplies a warpgroup's keys, its warps expand the next ones into other registers. So even if all four warpgroups
// are in step, and wait for their products at the same time, it idles only while they add them up (100 of a warp's 290 instructions for 16
// keys), and not for the expansion (180) too.
//
// Of a warp, 16 keys and one token: 290 instructions (114 of the integer pipe, which takes one every second cycle), and 8 products, 32
// cycles of the tensor core each. With mma.sync they took 830 cycles of it for 32 keys, beside 850 instructions, and the two hardly
// overlapped: 17.6 us on an H200 for 262,144 entries, 4.4 for 1,024; warps in turns, by named barriers: 18.7.
// Measured now: 13.3 us for 262,144, where 9.5 were predicted: launch 1, position, queries and first keys 0.8, queries 1.1, the first expansion 0.3, 31 tiles an SM
// of 290 to 360 cycles 5.1 to 6.4 (their 17.8 MB: 4), the last sums 0.3. Where nothing is computed: 1 us.
#include "index_query.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32, kGroups = kThreads / 128;
constexpr int kBlocks = 132;                          // one for each SM of an H200
constexpr int kMaxTokens = 8;
constexpr int kEntries = 16, kTile = 4 * kEntries;    // of a warp, of a warpgroup at a time
constexpr int kSteps = kDim / 16;
constexpr int kStages = 3;                            // tiles of a warpgroup that are on their way
// e2m1 bits moved into a bf16 are the value times 2^-126. The scale that undoes it would overflow, so keys stay times 2^-32 and weights get
// 2^32, or half of that, as relu's sum has twice the value. A key's scale beyond 2^33 (they are RMS-normed, so none comes near) counts as
// NaN, which is byte 255.
constexpr unsigned kScaleShift = 126 - 32, kLargestScale = 254 - kScaleShift;
constexpr float kWeightFactor = 0x1p31f;

// A block's shared memory. Of a token: its queries as wgmma's B operand in two halves of 64 dims each, rows (heads) of 128 bytes, swizzled;
// and its weights, of lane t of 4 those that its sums want, in their order, in rows that start in different banks. Of a warp and a stage:
// what each lane has copied for itself, two keys' 16 bytes and two keys' scales.
constexpr int kHalfBytes = kHeads * 128, kQueryBytes = 2 * kHalfBytes, kWeightStride = kHeads / 4 + 4;
constexpr int kWeightBytes = 4 * 4 * kWeightStride, kStageBytes = 32 * 2 * (16 + 4);
constexpr int shared_bytes(int tokens) { return tokens * (kQueryBytes + kWeightBytes) + kWarps * kStages * kStageBytes; }

// x to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with its sign, |x| <= 6; ties to the even code: multiples of half its power of two, or of
// 0.5 below 1, by the rounding of an addition.
__device__ __forceinline__ float round_e2m1(float x) {
    const float large = fmaxf(__uint_as_float(__float_as_uint(x) & 0x7f800000u), 1.0f) * 0x1.8p22f;
    return (x + large) - large;
}

// What a lane is given of a token's query: dims 16 u to 16 u + 15 of its warp's head i, where lane = 8 i + u; their angles, if they turn.
struct Query { float v[16], cos[8], sin[8], weight; };

__device__ __forceinline__ void ask(Query& query, const float* q, const float* cos, const float* sin, const float* head_weights,
                                    int token) {
    const int head = threadIdx.x / 8;
    load_index_query(q + (token * kHeads + head) * kDim, cos + token * (kRope / 2), sin + token * (kRope / 2), query.v, query.cos, query.sin);
    query.weight = head_weights[token * kHeads + head];
}

// The queries and weights of one token.
__device__ __forceinline__ void prepare(Query& query, char* queries, float* weights) {
    const int lane = threadIdx.x % 32, u = lane % 8, head = threadIdx.x / 8;
    float(&v)[16] = query.v;
    const unsigned exponent = index_query(v, query.cos, query.sin);
    const float scale = exponent == kNanScale ? NAN : __uint_as_float(exponent << 23);
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = round_e2m1(v[i]) * scale;
    // Word w of the 16 bytes that lane t of 4 expands has nibbles 0 to 7 of dims 32 t + 8 w on. Pair j of it is nibbles j and j + 4, and has
    // places 16 s + 8 (j % 2) + 2 t and the next along K, where s = 2 w + j / 2: chunk 2 s + j % 2, of which a half has 8.
    char* row = queries + u % 2 * kHalfBytes + head * 128 + u / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            *reinterpret_cast<uint32_t*>(row + (((4 * half + j) ^ head % 8) << 4)) = pack_bf16(v[half * 8 + j], v[half * 8 + j + 4]);
    if (u == 0) weights[head % 8 / 2 * kWeightStride + head / 8 * 2 + head % 2] = query.weight * kHeadFactor * kWeightFactor;
}

// Where a lane's part of a warp's 16 keys is: block t (32 values, one scale) of keys g and g + 8, and the scales of all their blocks, where
// lane = 4 g + t. Behind the last key there are zeros.
struct Keys {
    const uint8_t *values, *scales;  // of key g
    int entry;                       // g's number
    __device__ __forceinline__ void fetch(char* stage, int lane, int capacity) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            cp_async_16(stage + i * 512 + lane * 16, values + i * 8 * (kDim / 2), entry + 8 * i < capacity);
            cp_async_4(stage + 1024 + i * 128 + lane * 4, scales + i * 8 * 4, entry + 8 * i < capacity);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void move(int entries) { values += entries * (kDim / 2), scales += entries * 4, entry += entries; }
};

// Values j and j + 4 of a word of 8 nibbles, times 2^-126: sign at bit 15, the rest at 8:6. In two copies of the word the signs of two
// pairs each are moved by 6, where they lie over others; then one shift takes a pair where it belongs.
__device__ __forceinline__ void expand_word(uint32_t word, uint32_t (&pair)[4]) {
    constexpr uint32_t kMask = 0x81c081c0u, kLowSigns = 0x22002200u, kHighSigns = 0x00220022u;
    const uint32_t turned = rotate_left(word, 6);
    const uint32_t low = select_bits(turned, word, kLowSigns), high = select_bits(turned, word, kHighSigns);
    pair[0] = low << 6 & kMask;
    pair[1] = low << 2 & kMask;
    pair[2] = rotate_left(high, 30) & kMask;
    pair[3] = rotate_left(high, 26) & kMask;
}

// The A operand of a warp's 16 keys.
__device__ __forceinline__ void expand(const char* stage, uint32_t (&a)[kSteps][4]) {
    const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 four = *reinterpret_cast<const uint4*>(stage + i * 512 + lane * 16);
        const uint32_t of_blocks = *reinterpret_cast<const uint32_t*>(stage + 1024 + i * 128 + lane * 4);
        const uint32_t twice = byte_perm(of_blocks, 0, t * 0x101u | 0x4040u);
        const uint32_t scale = twice <= kLargestScale * 0x10001u ? twice * 128 + kScaleShift * 128 * 0x10001u : 0x7fc07fc0u;
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int w = 0; w < 4; w++) {
            uint32_t pair[4];
            expand_word(words[w], pair);
#pragma unroll
            for (int j = 0; j < 4; j++) a[2 * w + j / 2][j % 2 * 2 + i] = mul_bf16x2(pair[j], scale);
        }
    }
}

// c = a warp's 16 keys times 64 queries: c[4 j + i], c[4 j + 2 + i] are of keys g and g + 8 and head 8 j + 2 t + i. They are there after
// finish(); with wgmma a is in use until then.
__device__ __forceinline__ void begin(float (&c)[kHeads / 2], uint32_t (&a)[kSteps][4], const char* queries) {
#ifdef DSV4_WARPGROUPS
    const uint64_t b = wgmma_operand(queries, Swizzle::k128, 1024);
    wgmma_fence(a);
    wgmma_bf16<true>(c, a[0], b);
#pragma unroll
    for (int step = 1; step < kSteps; step++) wgmma_bf16<false>(c, a[step], b + (step / 4 * kHalfBytes + step % 4 * 32) / 16);
    wgmma_commit();
#else
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kHeads / 8; j++) {
        float sum[4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {  // lane 8 i + r has the address of row r of chunk 2 step + i
            uint32_t b[4];
            ldmatrix_x4(b, queries + step / 4 * kHalfBytes + (8 * j + lane % 8) * 128 + (((step % 4 * 2 + lane / 8) ^ lane % 8) << 4));
            mma_bf16(sum, a[step], {b[0], b[1]});
            mma_bf16(sum, a[step + 1], {b[2], b[3]});
        }
#pragma unroll
        for (int i = 0; i < 4; i++) c[4 * j + i] = sum[i];
    }
#endif
}

__device__ __forceinline__ void finish([[maybe_unused]] float (&c)[kHeads / 2]) {
#ifdef DSV4_WARPGROUPS
    wgmma_wait(c);
#endif
}

// Twice the larger of x and 0, NaN if x is: no instruction of the integer pipe, which has enough to do.
__device__ __forceinline__ float twice_relu(float x) { return x + fabsf(x); }

__global__ void __launch_bounds__(kThreads, 1)
index_scores_kernel(const float* q, const float* cos, const float* sin, const float* head_weights, const uint8_t* values,
                    const uint8_t* scales, const int64_t* positions, float* scores, int all_tokens, int capacity, int top_k) {
    DYN_SMEM(char, shared);
    const int first_token = blockIdx.y * kMaxTokens, tokens = min(all_tokens - first_token, kMaxTokens);
    q += int64_t(first_token) * kHeads * kDim, cos += first_token * (kRope / 2), sin += first_token * (kRope / 2);
    head_weights += first_token * kHeads, positions += first_token;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);  // the same in all lanes, which the compiler cannot know otherwise
    const int stride = int(gridDim.x) * kGroups * kTile;
    int tile = (int(gridDim.x) * (warp / 4) + int(blockIdx.x)) * kTile;  // the warpgroup's: blocks get equal parts, then warpgroups
    const int mine = warp % 4 * kEntries + g;
    float* weights = reinterpret_cast<float*>(shared + tokens * kQueryBytes);
    char* stages = shared + tokens * (kQueryBytes + kWeightBytes) + warp * kStages * kStageBytes;
    Keys keys = {values + int64_t(tile + mine) * (kDim / 2) + t * 16, scales + int64_t(tile + mine) * 4, tile + mine};
    Query query;
    grid_dependency_launch();
    grid_dependency_wait();
    // One round trip brings the position, the first token's query and the first keys, whether a token sees them or not.
    const int64_t position = positions[tokens - 1];
    ask(query, q, cos, sin, head_weights, 0);
    keys.fetch(stages, lane, capacity);
    __syncthreads();  // for ptxas alone, which would put the reads behind the branch
    const int64_t visible = (position + 1) / kRatio;
    const int n = visible < capacity ? int(visible) : capacity;
    if (n <= top_k || int(blockIdx.x) * kTile >= n) return;
#pragma unroll
    for (int i = 1; i < kStages; i++) {
        keys.move(stride);
        keys.fetch(stages + i * kStageBytes, lane, n);
    }
    for (int token = 0;;) {
        prepare(query, shared + token * kQueryBytes, weights + token * 4 * kWeightStride);
        if (++token == tokens) break;
        ask(query, q, cos, sin, head_weights, token);
    }
    fence_async_shared();
    __syncthreads();
    int used = 0;
    const auto expand_next = [&](uint32_t (&a)[kSteps][4]) {
        cp_async_wait<kStages - 1>();
        expand(stages + used, a);
        keys.move(stride);
        keys.fetch(stages + used, lane, n);
        used = used == (kStages - 1) * kStageBytes ? 0 : used + kStageBytes;
    };
    // The scores of the warp's 16 entries; meanwhile the next ones, if there are any, are expanded.
    const auto score = [&](uint32_t (&a)[kSteps][4], uint32_t (&next)[kSteps][4]) {
        for (int token = 0; token < tokens; token++) {
            float c[kHeads / 2], sum[2][2] = {};  // [key][head 2 t or the next of each 8]
            begin(c, a, shared + token * kQueryBytes);
            if (token == tokens - 1) expand_next(next);
            finish(c);
#pragma unroll
            for (int j = 0; j < kHeads / 8; j += 2) {
                float w[4];
                load(w, weights + (token * 4 + t) * kWeightStride + 2 * j);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    sum[i / 2 % 2][i % 2] = fmaf(w[i / 4 * 2 + i % 2], twice_relu(c[4 * j + i]), sum[i / 2 % 2][i % 2]);
            }
            // Over the 4 lanes of equal g, the first round of which leaves each one key.
            const bool further = lane & 1;
            const float low = sum[0][0] + sum[0][1], high = sum[1][0] + sum[1][1];
            float score = (further ? high : low) + __shfl_xor_sync(~0u, further ? low : high, 1);
            score += __shfl_xor_sync(~0u, score, 2);
            const int entry = tile + mine + 8 * further;
            if (t < 2 && entry < n) scores[(blockIdx.y * kMaxTokens + token) * unsigned(capacity) + entry] = score;
        }
        tile += stride;
    };
    uint32_t even[kSteps][4];
#ifdef DSV4_WARPGROUPS
    uint32_t odd[kSteps][4];
#else
    uint32_t(&odd)[kSteps][4] = even;  // where begin() has ended, a is free
#endif
    if (tile < n) expand_next(even);
    while (tile < n) {
        score(even, odd);
        if (tile < n) score(odd, even);
    }
}

// q [tokens, 64 * 128], cos and sin [tokens, 32], head_weights [tokens, 64] fp32; values [capacity, 64] and scales [capacity, 4] uint8
// (IndexKeys); positions [tokens] int64 -> scores [tokens, capacity] fp32. tokens from 1 on, of which 8 share what is read of the keys
// (blockIdx.y), tokens * capacity below 2^32, values at a multiple of 16 bytes, scales of 4.
extern "C" int index_scores(const float* q, const float* cos, const float* sin, const float* head_weights, const uint8_t* values,
                            const uint8_t* scales, const int64_t* positions, float* scores, int tokens, int capacity, int top_k,
                            cudaStream_t stream) {
    if (tokens < 1) return cudaErrorInvalidValue;
    const int units = (capacity + kTile - 1) / kTile, blocks = units < kBlocks ? units : kBlocks;
    LAUNCH(index_scores_kernel, dim3(blocks, (tokens + kMaxTokens - 1) / kMaxTokens), dim3(kThreads),
           shared_bytes(tokens < kMaxTokens ? tokens : kMaxTokens), stream, q, cos, sin, head_weights, values, scales,
           positions, scores, tokens, capacity, top_k);
    return cudaGetLastError();
}
