// index_scores: sum over 64 heads of w * relu(q . k) for a token's query and every entry's key, fp32 (dsv4/ops/indexer.py,
// index_scores_ref).
//
// A warp takes 32 entries at a time. Lane 4 g + t reads the bytes of block t (32 values, one scale) of key g of each 8, expands them to
// bf16 in registers, where they are the B operand of m16n8k16, and every token's queries (A, from shared memory) pass over them: a key is
// read and expanded once. Which dim is where along K does not matter to a dot product, so the queries are stored in the order in which the
// nibbles come. Values are exact in bf16 and their products in fp32. Queries are made (RoPE, Hadamard, FP4) by every block for itself, a
// warp for 4 heads.
//
// With one token, expansion and products take turns: of the four warps of a quarter of the SM two expand 32 keys each (350 instructions of
// a warp, most of them at half rate: 700 to 960 cycles for two) while the others multiply (256 mma: 1,650 cycles at 640 TFLOP/s). All four
// in step, as they start, would leave the tensor cores idle for the first of these times in each of the four rounds of 262,144 entries.
//
// Measured on an H200 without turns, and with a round trip for the position of its own: 4.4 us for 1,024 entries, 17.5 for 262,144
// (docs/measurements.md). Predicted with them: 3.8 us and 11: launch 1, position, queries and first keys 0.8, queries 0.9, the first
// expansion 0.4, products 6.9 (4.3 GFLOP; the 17.8 MB of keys take 4), the last sums 0.5. Where nothing is computed: 1 us.
#include "index_query.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBlocks = 132;                       // one for each SM of an H200
constexpr int kMaxTokens = 8;
constexpr int kTiles = 4, kEntries = 8 * kTiles;   // of a warp at a time
constexpr int kSteps = kDim / 16, kRows = kHeads / 16;
constexpr bool kTurns = true;                      // with one token; with more, the products are nearly all of the work
// e2m1 bits moved into a bf16 are the value times 2^-126. The scale that undoes it would overflow, so keys stay times 2^-32 and weights get
// 2^32. A key's scale beyond 2^33 (they are RMS-normed, so none comes near) counts as NaN, which is byte 255.
constexpr unsigned kScaleShift = 126 - 32, kLargestScale = 254 - kScaleShift;
constexpr float kWeightFactor = 0x1p32f;

struct Token {
    uint4 q[kRows][kSteps][32];                    // the A fragment of each lane
    float weights[kHeads];                         // times kHeadFactor and kWeightFactor
};

// x to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with its sign, |x| <= 6; ties to the even code: multiples of a step, by the rounding of an
// addition.
__device__ __forceinline__ float round_e2m1(float x) {
    const float a = fabsf(x), large = a < 2.0f ? 0x1.8p22f : a < 4.0f ? 0x1.8p23f : 0x1.8p24f;
    return (x + large) - large;
}

// What a lane is given of a token's query: dims 16 u to 16 u + 15 of its warp's head i, where lane = 8 i + u; their angles, if they turn.
struct Query { float v[16], cos[8], sin[8], weight; };

__device__ __forceinline__ int head_of(int warp, int lane) { return warp / 4 * 16 + lane / 8 % 2 * 8 + warp % 4 * 2 + lane / 16; }

__device__ __forceinline__ void ask(Query& query, const float* q, const float* cos, const float* sin, const float* head_weights,
                                    int token) {
    const int head = head_of(threadIdx.x / 32, threadIdx.x % 32);
    load_index_query(q + (token * kHeads + head) * kDim, cos + token * (kRope / 2), sin + token * (kRope / 2), query.v, query.cos,
                     query.sin);
    query.weight = head_weights[token * kHeads + head];
}

// The queries and weights of one token.
__device__ __forceinline__ void prepare(Query& query, Token& to) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, u = lane % 8;
    const int row_tile = warp / 4, g = warp % 4 * 2 + lane / 16, upper = lane / 8 % 2;
    float(&v)[16] = query.v;
    const unsigned exponent = index_query(v, query.cos, query.sin);
    const float scale = exponent == kNanScale ? NAN : __uint_as_float(exponent << 23);
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = round_e2m1(v[i]) * scale;
    // Word w of a block of 32 values has nibbles 0 to 7; pair j of it is nibbles j and j + 4, register j % 2 of step 2 w + j / 2.
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t* fragment = reinterpret_cast<uint32_t*>(&to.q[row_tile][2 * (u % 2 * 2 + half) + j / 2][g * 4 + u / 2]);
            fragment[j % 2 * 2 + upper] = pack_bf16(v[half * 8 + j], v[half * 8 + j + 4]);
        }
    if (u == 0) to.weights[head_of(warp, lane)] = query.weight * kHeadFactor * kWeightFactor;
}

// What a lane holds of 32 packed keys: 16 bytes of one key in each 8, and the four scales of key `lane`.
struct Packed { uint4 words[kTiles]; uint32_t scales; };

__device__ __forceinline__ void fetch(Packed& to, const uint8_t* values, const uint8_t* scales, int first, int capacity) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
        const int64_t entry = first + j * 8 + g;
        to.words[j] = entry < capacity ? *reinterpret_cast<const uint4*>(values + entry * (kDim / 2) + t * 16) : uint4{0, 0, 0, 0};
    }
    to.scales = first + lane < capacity ? *reinterpret_cast<const uint32_t*>(scales + int64_t(first + lane) * 4) : 0;
}

// Values j and j + 4 of a word of 8 nibbles, times 2^-126.
template <int j> __device__ __forceinline__ uint32_t pair(uint32_t word) {
    const uint32_t magnitude = j == 3 ? word >> 6 : j == 2 ? word >> 2 : j == 1 ? word << 2 : word << 6;
    return (magnitude & 0x01c001c0u) | (word << (12 - 4 * j) & 0x80008000u);
}

__device__ __forceinline__ void expand(const Packed& from, uint32_t (&b)[kTiles][kSteps][2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
        const unsigned byte = __shfl_sync(~0u, from.scales, j * 8 + lane / 4) >> lane % 4 * 8 & 0xff;
        const uint32_t scale = (byte <= kLargestScale ? (byte + kScaleShift) << 7 : 0x7fc0u) * 0x10001u;
        const uint32_t words[4] = {from.words[j].x, from.words[j].y, from.words[j].z, from.words[j].w};
#pragma unroll
        for (int w = 0; w < 4; w++) {
            b[j][2 * w][0] = mul_bf16x2(pair<0>(words[w]), scale);
            b[j][2 * w][1] = mul_bf16x2(pair<1>(words[w]), scale);
            b[j][2 * w + 1][0] = mul_bf16x2(pair<2>(words[w]), scale);
            b[j][2 * w + 1][1] = mul_bf16x2(pair<3>(words[w]), scale);
        }
    }
}

__device__ __forceinline__ float relu(float x) { return max_nan(x, 0.0f); }

__global__ void __launch_bounds__(kThreads, 1)
index_scores_kernel(const float* q, const float* cos, const float* sin, const float* head_weights, const uint8_t* values,
                    const uint8_t* scales, const int64_t* positions, float* scores, int all_tokens, int capacity, int top_k) {
    DYN_SMEM(Token, prepared);
    const int first_token = blockIdx.y * kMaxTokens, tokens = min(all_tokens - first_token, kMaxTokens);
    q += int64_t(first_token) * kHeads * kDim, cos += first_token * (kRope / 2), sin += first_token * (kRope / 2);
    head_weights += first_token * kHeads, positions += first_token, scores += int64_t(first_token) * capacity;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = int(gridDim.x) * kWarps * kEntries;
    int first = (int(gridDim.x) * warp + int(blockIdx.x)) * kEntries;  // blocks get equal parts, then warps
    Query query;
    Packed packed;
    grid_dependency_launch();
    grid_dependency_wait();
    // One round trip brings the position, the first token's query and the first keys, whether a token sees them or not.
    const int64_t position = positions[tokens - 1];
    fetch(packed, values, scales, first, capacity);
    ask(query, q, cos, sin, head_weights, 0);
    __syncthreads();  // for ptxas alone, which would put the reads behind the branch
    const int64_t visible = (position + 1) / kRatio;
    const int n = visible < capacity ? int(visible) : capacity;
    if (n <= top_k || int(blockIdx.x) * kEntries >= n) return;
    for (int token = 0;;) {
        prepare(query, prepared[token]);
        if (++token == tokens) break;
        ask(query, q, cos, sin, head_weights, token);
    }
    __syncthreads();
    // With one token, half of the warps expand keys while the other half, two of each quarter of the SM, multiplies: kinds take turns.
    const bool turns = kTurns && tokens == 1;
    const int kind = warp / 4 % 2;
    if (turns && kind == 1) bar_arrive(1, kThreads);  // it is the other kind's turn
    for (int of_block = int(blockIdx.x) * kEntries; of_block < n; of_block += stride, first += stride) {  // as often in every warp
        const bool more = of_block + stride < n;
        uint32_t b[kTiles][kSteps][2];
        expand(packed, b);
        fetch(packed, values, scales, more ? first + stride : capacity, capacity);
        if (turns) bar_sync(1 + kind, kThreads);
        for (int token = 0; token < tokens; token++) {
            float sum[kTiles][2] = {};  // of entries 2 t and 2 t + 1 of each 8, over the heads of this lane
#pragma unroll 1
            for (int m = 0; m < kRows; m++) {
                float c[kTiles][4] = {};
#pragma unroll
                for (int step = 0; step < kSteps; step++) {
                    const uint4 fragment = prepared[token].q[m][step][lane];
                    const uint32_t a[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
#pragma unroll
                    for (int j = 0; j < kTiles; j++) mma_bf16(c[j], a, b[j][step]);
                }
                const float upper = prepared[token].weights[m * 16 + lane / 4], lower = prepared[token].weights[m * 16 + 8 + lane / 4];
#pragma unroll
                for (int j = 0; j < kTiles; j++)
#pragma unroll
                    for (int i = 0; i < 2; i++) sum[j][i] = fmaf(lower, relu(c[j][2 + i]), fmaf(upper, relu(c[j][i]), sum[j][i]));
            }
            if (turns && (kind == 0 || more)) bar_arrive(2 - kind, kThreads);
            // Over the 8 lanes of equal t; each round halves what a lane is responsible for, down to one entry.
            const bool far = lane & 16, middle = lane & 8, near = lane & 4;
            float of_half[2][2], of_tile[2];
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    of_half[j][i] = (far ? sum[2 + j][i] : sum[j][i]) + __shfl_xor_sync(~0u, far ? sum[j][i] : sum[2 + j][i], 16);
#pragma unroll
            for (int i = 0; i < 2; i++)
                of_tile[i] = (middle ? of_half[1][i] : of_half[0][i]) + __shfl_xor_sync(~0u, middle ? of_half[0][i] : of_half[1][i], 8);
            const float score = (near ? of_tile[1] : of_tile[0]) + __shfl_xor_sync(~0u, near ? of_tile[0] : of_tile[1], 4);
            const int entry = first + (far * 2 + middle) * 8 + lane % 4 * 2 + near;
            if (entry < n) scores[int64_t(token) * capacity + entry] = score;
        }
    }
}

// q [tokens, 64 * 128], cos and sin [tokens, 32], head_weights [tokens, 64] fp32; values [capacity, 64] and scales [capacity, 4] uint8
// (IndexKeys); positions [tokens] int64 -> scores [tokens, capacity] fp32. tokens from 1 on, of which 8 share
// what is read of the keys (blockIdx.y), values at a multiple of 16 bytes.
extern "C" int index_scores(const float* q, const float* cos, const float* sin, const float* head_weights, const uint8_t* values,
                            const uint8_t* scales, const int64_t* positions, float* scores, int tokens, int capacity, int top_k,
                            cudaStream_t stream) {
    if (tokens < 1) return cudaErrorInvalidValue;
    const int units = (capacity + kEntries - 1) / kEntries, blocks = units < kBlocks ? units : kBlocks;
    LAUNCH(index_scores_kernel, dim3(blocks, (tokens + kMaxTokens - 1) / kMaxTokens), dim3(kThreads),
           min(tokens, kMaxTokens) * sizeof(Token), stream, q, cos, sin, head_weights, values, scales,
           positions, scores, tokens, capacity, top_k);
    return cudaGetLastError();
}
