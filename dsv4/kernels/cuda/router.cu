// router: the experts of each token and their weights (dsv4/ops/router.py, router_ref), in one launch.
//
// Scores: the tensor cores multiply 8 to 12 rows of the gate by all tokens (bf16 products are exact, their sums fp32; an fp32 gate is three
// bf16 terms). A block has these rows in one of four slices of the columns, so for 256 or 384 experts there are 128 blocks, on as many
// SMs. Its weights are on the way before the wait, 43 KB of Pro's, so that in a chain they arrive while the norm runs (5.5 MB, 1.2 us at
// 4.5 TB/s). After it come the slice of x from L2 (a whole x for each SM would be 1.8 MB out of the few slices of L2 that hold it), 14
// products a warp and a sum over the eight warps.
//
// Choice: the last block to arrive adds up the slices, and a warp chooses for each token. The top_k-th largest of the maxima of 12 groups
// of 32 keys bounds the top_k-th largest key from below: of 384 random keys 7.8 reach it (for top_k 6), and only these are compared with
// each other.
//
// Predicted for one token of Pro behind the launch's 1.3 us: x 0.25 us, products and their sum 0.2, the counter 0.6, the slices' sums 0.25,
// scores and choice 0.4.
// Measured on an H200: 3.5 us (docs/measurements.md).
#include "common.cuh"
#include "ptx.cuh"

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTile = 16, kMaxTokens = 8;  // of a product: rows, of which a block has up to 12, and tokens
constexpr int kSlices = 4;                 // of the columns: a float4 of sums
constexpr int kRowBlocks = 32;             // and as many blocks for the experts
constexpr int kStep = 32;                  // columns that a warp multiplies at a time, a lane 8 of a row: two products
constexpr int kStride = kStep * kWarps;    // from a warp's step to its next
constexpr int kMaxTopK = 8, kMaxExperts = 384, kPerLane = kMaxExperts / 32, kPerThread = (kMaxExperts + kThreads - 1) / kThreads;

// 8 consecutive weights of a row, fp32 or bf16, as they are loaded; words(i): the i-th of the bf16 terms that they are the sum of.
template <class T> struct RowPack;
template <> struct RowPack<__nv_bfloat16> {
    static constexpr int kTerms = 1;
    uint4 v;
    __device__ __forceinline__ void load(const __nv_bfloat16* row) { v = load_stream(row); }
    __device__ __forceinline__ uint4 words(int) const { return v; }
};
template <> struct RowPack<float> {
    static constexpr int kTerms = 3;
    uint4 half[2];
    __device__ __forceinline__ void load(const float* row) { half[0] = load_stream(row), half[1] = load_stream(row + 4); }
    __device__ __forceinline__ static uint32_t pair(uint32_t lo, uint32_t hi, int term) {
        float a = __uint_as_float(lo), b = __uint_as_float(hi);
        uint32_t rounded = pack_bf16(a, b);
        for (int i = 0; i < term; i++) {
            a -= bf16_lo(rounded), b -= bf16_hi(rounded);  // exact
            rounded = pack_bf16(a, b);
        }
        return rounded;
    }
    __device__ __forceinline__ uint4 words(int term) const {
        return {pair(half[0].x, half[0].y, term), pair(half[0].z, half[0].w, term), pair(half[1].x, half[1].y, term),
                pair(half[1].z, half[1].w, term)};
    }
};

// Of the experts; at most 12 of a product's rows.
__host__ __device__ __forceinline__ int rows_of_block(int experts) { return (experts + kRowBlocks - 1) / kRowBlocks; }

// What is chosen from, and where to: the arguments of the C function.
struct Choice {
    const float* bias;
    const int64_t *table, *ids;
    int* chosen;
    float* weights;
    int top_k, vocab;
    float route_scale;
};

// A token's shared memory. Candidates are compared kFill at once, of which the last may be fill.
constexpr int kFill = 8;
struct Ranking {
    alignas(16) float scores[kMaxExperts];
    union {
        uint32_t keys[kMaxExperts];
        uint64_t candidates[kMaxExperts + kFill];
    };
    int best[kMaxTopK];
};
struct Shared {
    bool last;  // this block was the last to arrive
    union {
        float sums[kWarps][kTile][kMaxTokens];  // of each warp
        Ranking tokens[kMaxTokens];
    };
    static size_t bytes(int tokens) { return sizeof(Shared) - (kMaxTokens - tokens) * sizeof(Ranking); }
};
static_assert(sizeof(Shared::sums) <= sizeof(Ranking));

// As torch's softplus: linear above 20.
__device__ __forceinline__ float score(float logit) { return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit))); }

// A number of the same order as x, which is not -0 (no score is): NaN is below all numbers and above `kNone`.
constexpr uint32_t kNone = 0;
__device__ __forceinline__ uint32_t key_of(float x) {
    if (!(x == x)) return 1;
    const uint32_t bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A lane's packs of kSteps steps, all under way at once; 0 from `left` columns on, counted from the first.
template <class T, int kSteps> __device__ __forceinline__ void load_row(RowPack<T> (&packs)[kSteps], const T* from, int left) {
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
        packs[k] = {};
        if (kStride * k < left) packs[k].load(from + kStride * k);
    }
}
template <int kSteps> __device__ __forceinline__ void load_x(uint4 (&packs)[kSteps], const __nv_bfloat16* from, int left) {
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
        packs[k] = {};
        if (kStride * k < left) packs[k] = *reinterpret_cast<const uint4*>(from + kStride * k);
    }
}

// The `top_k` largest of the keys, equals in ascending order: lane j returns the j-th. All lanes of a warp.
__device__ __forceinline__ int choose(Ranking& of, int top_k) {
    const int lane = threadIdx.x % 32;
    uint32_t key[kPerLane], top[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; i++) key[i] = of.keys[i * 32 + lane];
    __syncwarp();  // candidates take their place
#pragma unroll
    for (int i = 0; i < kPerLane; i++) top[i] = __reduce_max_sync(~0u, key[i]);
    uint32_t mine = top[0];  // a group's largest
#pragma unroll
    for (int i = 1; i < kPerLane; i++)
        if (lane == i) mine = top[i];
    int as_large = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) as_large += top[i] >= mine;
    const uint32_t bound = max(__reduce_max_sync(~0u, as_large >= top_k ? mine : kNone), kNone + 1);
    int n = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
        if (top[i] < bound) continue;
        const unsigned who = __ballot_sync(~0u, key[i] >= bound);
        if (key[i] >= bound) of.candidates[n + __popc(who & ((1u << lane) - 1))] = uint64_t(key[i]) << 32 | ~unsigned(i * 32 + lane);
        n += __popc(who);
    }
    if (lane < kFill) of.candidates[n + lane] = 0;
    __syncwarp();
    for (int i = lane; i < n; i += 32) {
        const uint64_t candidate = of.candidates[i];
        int rank = 0;
        for (int j = 0; j < n; j += kFill)
#pragma unroll
            for (int k = 0; k < kFill; k++) rank += of.candidates[j + k] > candidate;
        if (rank < top_k) of.best[rank] = int(~unsigned(candidate));
    }
    __syncwarp();
    return lane < top_k ? of.best[lane] : 0;
}

template <class T, int kSteps>
__global__ void __launch_bounds__(kThreads) router_kernel(const __nv_bfloat16* x, const T* gate, float* sums, unsigned* arrivals,
                                                          Choice choice, int all_tokens, int experts, int columns) {
    DYN_SMEM(Shared, shared);
    const int first_token = blockIdx.z * kMaxTokens, tokens = min(all_tokens - first_token, kMaxTokens);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    // A lane has 8 columns of a step, and of them rows g and g + 8 and token g. Which column is which k of a product is free.
    const int g = lane / 4, rows = rows_of_block(experts), row = blockIdx.x * rows + g, slice = blockIdx.y;
    const int of_slice = (columns + kStep * kSlices - 1) / (kStep * kSlices) * kStep;
    const int first = slice * of_slice + warp * kStep + lane % 4 * 8, left = min((slice + 1) * of_slice, columns) - first;
    const int left_low = g < rows && row < experts ? left : 0, left_high = g + 8 < rows && row + 8 < experts ? left : 0;
    const int left_x = g < tokens ? left : 0;
    gate += int64_t(row) * columns + first, x += (first_token + g) * columns + first, sums += first_token * experts * kSlices;
    RowPack<T> low[kSteps], high[kSteps];
    load_row(low, gate, left_low);
    load_row(high, gate + 8 * columns, left_high);
    float added[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
        const int e = i * kThreads + thread;
        added[i] = choice.bias && e < experts ? choice.bias[e] : 0.0f;
    }
    grid_dependency_launch();
    grid_dependency_wait();

    uint4 inputs[kSteps];
    load_x(inputs, x, left_x);
    float c[4][4] = {};  // products that follow each other go to different sums
    for (int base = 0;;) {
#pragma unroll
        for (int k = 0; k < kSteps; k++)
#pragma unroll
            for (int term = 0; term < RowPack<T>::kTerms; term++) {
                const uint4 a = low[k].words(term), b = high[k].words(term), v = inputs[k];
                mma_bf16(c[k % 2 * 2], {a.x, b.x, a.y, b.y}, {v.x, v.y});
                mma_bf16(c[k % 2 * 2 + 1], {a.z, b.z, a.w, b.w}, {v.z, v.w});
            }
        base += kStride * kSteps;
        if (base >= of_slice) break;
        load_row(low, gate + base, left_low - base);
        load_row(high, gate + base + 8 * columns, left_high - base);
        load_x(inputs, x + base, left_x - base);
    }
    // The row of the table comes from memory while the blocks arrive. ids and table are checked where they are made; whatever they hold, no
    // address leaves the arrays.
    int64_t given = 0;
    if (choice.table && warp < tokens && lane < choice.top_k) {
        const int64_t id = choice.ids[first_token + warp], inside = id < 0 ? 0 : id < choice.vocab ? id : choice.vocab - 1;
        given = choice.table[inside * choice.top_k + lane];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) shared->sums[warp][g + i / 2 * 8][lane % 4 * 2 + i % 2] = (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]);
    __syncthreads();
    const int token = thread % kMaxTokens, tile_row = thread / kMaxTokens, expert = blockIdx.x * rows + tile_row;
    if (token < tokens && tile_row < rows && expert < experts) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; w++) sum += shared->sums[w][tile_row][token];
        sums[(token * experts + expert) * kSlices + slice] = sum;
    }
    if (!last_to_arrive(arrivals + blockIdx.z, gridDim.x * gridDim.y, &shared->last)) return;

    for (int s = 0; s < tokens; s++) {
        float4 parts[kPerThread];
#pragma unroll
        for (int i = 0; i < kPerThread; i++) {
            const int e = i * kThreads + thread;
            parts[i] = {};
            if (e < experts) parts[i] = __ldcg(reinterpret_cast<const float4*>(sums) + s * experts + e);
        }
#pragma unroll
        for (int i = 0; i < kPerThread; i++) {
            const int e = i * kThreads + thread;
            if (e >= kMaxExperts) break;
            const float of_expert = score((parts[i].x + parts[i].y) + (parts[i].z + parts[i].w));
            shared->tokens[s].scores[e] = of_expert;
            shared->tokens[s].keys[e] = e < experts ? key_of(of_expert + added[i]) : kNone;
        }
    }
    __syncthreads();
    if (warp >= tokens) return;
    Ranking& ranking = shared->tokens[warp];
    // Lane j: the j-th expert.
    const int mine = !choice.table ? choose(ranking, choice.top_k) : given < 0 ? 0 : given < experts ? int(given) : experts - 1;
    const float picked = lane < choice.top_k ? ranking.scores[mine] : 0.0f;
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < kMaxTopK; j++) total += __shfl_sync(~0u, picked, j);
    if (lane < choice.top_k) {
        choice.chosen[(first_token + warp) * choice.top_k + lane] = mine;
        choice.weights[(first_token + warp) * choice.top_k + lane] = picked / total * choice.route_scale;
    }
}

template <class T, int kSteps>
static void launch(const __nv_bfloat16* x, const T* gate, float* sums, unsigned* arrivals, const Choice& choice, int tokens, int experts,
                   int columns, cudaStream_t stream) {
    auto kernel = router_kernel<T, kSteps>;
    const int rows = rows_of_block(experts);
    LAUNCH(kernel, dim3((experts + rows - 1) / rows, kSlices, (tokens + kMaxTokens - 1) / kMaxTokens), dim3(kThreads),
           Shared::bytes(min(tokens, kMaxTokens)), stream, x, gate, sums, arrivals,
           choice, tokens, experts, columns);
}

// x [tokens, columns] bf16, gate [experts, columns] of `gate_dtype`, sums [tokens, experts, 4] fp32 (workspace), arrivals: a counter for
// each 8 tokens, 0;
// bias [experts] fp32, or table [vocab, top_k] int64 with ids [tokens] int64 -> chosen [tokens, top_k] int32, weights [tokens, top_k] fp32.
// tokens from 1 on, tokens * columns below 2^31, top_k 1 to 8, experts up to 384, columns a multiple of 8, x, gate and sums at multiples of 16 bytes.
extern "C" int router(const void* x, const void* gate, const float* bias, const int64_t* table, const int64_t* ids, float* sums,
                      int* arrivals, int* chosen, float* weights, int tokens, int experts, int columns, int top_k, int vocab,
                      float route_scale, int gate_dtype, cudaStream_t stream) {
    const auto* rows = static_cast<const __nv_bfloat16*>(x);
    auto* counter = reinterpret_cast<unsigned*>(arrivals);
    const Choice choice{bias, table, ids, chosen, weights, top_k, vocab, route_scale};
    const auto* halves = static_cast<const __nv_bfloat16*>(gate);
    if (gate_dtype == kFloat32)
        launch<float, 4>(rows, static_cast<const float*>(gate), sums, counter, choice, tokens, experts, columns, stream);
    else if (columns > 4 * kSlices * kStride && columns <= 7 * kSlices * kStride)  // Pro's, at once
        launch<__nv_bfloat16, 7>(rows, halves, sums, counter, choice, tokens, experts, columns, stream);
    else
        launch<__nv_bfloat16, 4>(rows, halves, sums, counter, choice, tokens, experts, columns, stream);
    return cudaGetLastError();
}
