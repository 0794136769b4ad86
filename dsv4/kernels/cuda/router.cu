// router: the experts of each token and their weights (dsv4/ops/router.py, router_ref), in two launches.
//
// Scores: a block has one row of the gate. Its first 16 KB are on the way before the wait, so that in a chain they arrive while the norm
// runs; after it remain x (from L2), one pass of FMA in fp32 (bf16 products would choose other experts) and a sum over four warps. 384 x
// 7,168 in bf16 are 5.5 MB: 1.2 us at 4.5 TB/s. Choice: a warp a token, for each chosen expert one maximum of 384 keys. 2.4 + 1.8 us,
// nearly all of it latency.
#include "common.cuh"
#include "ptx.cuh"

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMaxTokens = 8, kGroup = 4;  // tokens whose x is in shared memory at a time
constexpr int kMaxExperts = 384, kPerLane = kMaxExperts / 32;

// 8 weights of a row, fp32 or bf16, as they are loaded, and how many such packs a thread has under way at once.
template <class T> struct RowPack;
template <> struct RowPack<float> {
    static constexpr int kAhead = 4;
    uint4 half[2];
    __device__ __forceinline__ void load(const float* row) { half[0] = load_stream(row), half[1] = load_stream(row + 4); }
    __device__ __forceinline__ float get(int i) const {
        const uint4& h = half[i / 4];
        return __uint_as_float(i % 4 == 0 ? h.x : i % 4 == 1 ? h.y : i % 4 == 2 ? h.z : h.w);
    }
};
template <> struct RowPack<__nv_bfloat16> {
    static constexpr int kAhead = 8;
    uint4 v;
    __device__ __forceinline__ void load(const __nv_bfloat16* row) { v = load_stream(row); }
    __device__ __forceinline__ float get(int i) const {
        const uint32_t pair = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
        return i % 2 ? bf16_hi(pair) : bf16_lo(pair);
    }
};

// As torch's softplus: linear above 20.
__device__ __forceinline__ float score(float logit) { return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit))); }

// scores[s, e] for row e = block of the gate [experts, columns] and x [tokens, columns], tokens up to kTokens. A thread has columns 8 p to
// 8 p + 7 for p = its number and every 128th from there on, of the row in registers and of x in shared memory, where all
// copies are under way at once; the compiler would line up loads to registers. It reads what it copied itself, so there is no barrier.
template <class T, int kTokens>
__global__ void __launch_bounds__(kThreads) router_scores(const __nv_bfloat16* x, const T* gate, float* scores, int tokens, int experts,
                                                          int columns) {
    constexpr int kAhead = RowPack<T>::kAhead, kTogether = kTokens < kGroup ? kTokens : kGroup;
    DYN_SMEM(uint4, staged);  // [token of a group][pack of a thread][thread]
    const int expert = blockIdx.x, packs = columns / 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    gate += int64_t(expert) * columns;
    RowPack<T> row[kAhead] = {};
    const auto load_row = [&](int base) {
#pragma unroll
        for (int k = 0; k < kAhead; k++) {
            const int pack = base + k * kThreads + threadIdx.x;
            if (pack < packs) row[k].load(gate + pack * 8);
        }
    };
    load_row(0);
    grid_dependency_launch();
    grid_dependency_wait();
    float sum[kTokens] = {};
    for (int base = 0; base < packs; base += kAhead * kThreads) {
        if (base) load_row(base);
#pragma unroll
        for (int group = 0; group < kTokens; group += kTogether) {
#pragma unroll
            for (int s = 0; s < kTogether; s++)
#pragma unroll
                for (int k = 0; k < kAhead; k++) {
                    const int pack = base + k * kThreads + threadIdx.x;
                    if (pack < packs && group + s < tokens)
                        cp_async_16(staged + (s * kAhead + k) * kThreads + threadIdx.x, x + int64_t(group + s) * columns + pack * 8);
                }
            cp_async_commit();
            cp_async_wait<0>();
#pragma unroll
            for (int s = 0; s < kTogether; s++)
#pragma unroll
                for (int k = 0; k < kAhead; k++) {
                    if (base + k * kThreads + int(threadIdx.x) >= packs || group + s >= tokens) break;
                    const uint4 v = staged[(s * kAhead + k) * kThreads + threadIdx.x];
                    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        sum[group + s] = fmaf(row[k].get(2 * i), bf16_lo(pairs[i]), sum[group + s]);
                        sum[group + s] = fmaf(row[k].get(2 * i + 1), bf16_hi(pairs[i]), sum[group + s]);
                    }
                }
        }
    }
    __syncthreads();  // staged becomes the warps' sums
    float* partial = reinterpret_cast<float*>(staged);
#pragma unroll
    for (int s = 0; s < kTokens; s++) {
#pragma unroll
        for (int offset = 16; offset; offset /= 2) sum[s] += __shfl_xor_sync(~0u, sum[s], offset);
        if (lane == 0) partial[s * kWarps + warp] = sum[s];
    }
    __syncthreads();
    if (int(threadIdx.x) < tokens) {
        const float* p = partial + threadIdx.x * kWarps;
        scores[threadIdx.x * experts + expert] = score((p[0] + p[1]) + (p[2] + p[3]));
    }
}

// A number of the same order as x, which is not -0 (no score is): NaN is below all numbers and above `kTaken`.
constexpr uint32_t kTaken = 0;
__device__ __forceinline__ uint32_t key_of(float x) {
    if (!(x == x)) return 1;
    const uint32_t bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// One warp a token. With a table: its row of the token's id. Otherwise the `top_k` largest of score + bias, equals in ascending order.
__global__ void __launch_bounds__(32) router_choose(const float* scores, const float* bias, const int64_t* table, const int64_t* ids,
                                                    int* chosen, float* weights, int experts, int top_k, int64_t vocab, float route_scale) {
    const int token = blockIdx.x, lane = threadIdx.x;
    scores += token * experts;
    float added[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; i++) added[i] = bias && i * 32 + lane < experts ? bias[i * 32 + lane] : 0.0f;
    grid_dependency_launch();
    grid_dependency_wait();
    int mine = 0;  // lane j: the j-th expert
    if (table) {
        if (lane < top_k) {  // ids and table are checked where they are made; whatever they hold, no address leaves the arrays
            const int64_t id = ids[token] < 0 ? 0 : ids[token] < vocab ? ids[token] : vocab - 1, expert = table[id * top_k + lane];
            mine = expert < 0 ? 0 : expert < experts ? int(expert) : experts - 1;
        }
    } else {
        uint32_t keys[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; i++) keys[i] = i * 32 + lane < experts ? key_of(scores[i * 32 + lane] + added[i]) : kTaken;
        for (int j = 0; j < top_k; j++) {
            uint32_t best = keys[0];
            int place = 0;
#pragma unroll
            for (int i = 1; i < kPerLane; i++)
                if (keys[i] > best) best = keys[i], place = i;
            const uint32_t largest = __reduce_max_sync(~0u, best);
            const int winner = int(__reduce_min_sync(~0u, best == largest ? unsigned(place * 32 + lane) : ~0u));
            if (lane == j) mine = winner;
#pragma unroll
            for (int i = 0; i < kPerLane; i++)
                if (i * 32 + lane == winner) keys[i] = kTaken;
        }
    }
    const float picked = lane < top_k ? scores[mine] : 0.0f;
    float sum = 0.0f;
    for (int j = 0; j < top_k; j++) sum += __shfl_sync(~0u, picked, j);
    if (lane < top_k) {
        chosen[token * top_k + lane] = mine;
        weights[token * top_k + lane] = picked / sum * route_scale;
    }
}

template <class T, int kTokens>
static void launch(const __nv_bfloat16* x, const T* gate, float* scores, int tokens, int experts, int columns, cudaStream_t stream) {
    constexpr int kStaged = (kTokens < kGroup ? kTokens : kGroup) * RowPack<T>::kAhead * kThreads * sizeof(uint4);
    auto kernel = router_scores<T, kTokens>;
    LAUNCH(kernel, dim3(experts), dim3(kThreads), kStaged, stream, x, gate, scores, tokens, experts, columns);
}

template <class T>
static void launch_scores(const __nv_bfloat16* x, const T* gate, float* scores, int tokens, int experts, int columns, cudaStream_t stream) {
    if (tokens == 1) launch<T, 1>(x, gate, scores, tokens, experts, columns, stream);
    else if (tokens == 2) launch<T, 2>(x, gate, scores, tokens, experts, columns, stream);
    else if (tokens <= 4) launch<T, 4>(x, gate, scores, tokens, experts, columns, stream);
    else launch<T, kMaxTokens>(x, gate, scores, tokens, experts, columns, stream);
}

// x [tokens, columns] bf16, gate [experts, columns] of `gate_dtype`, scores [tokens, experts] fp32 (workspace); bias [experts] fp32, or
// table [vocab, top_k] int64 with ids [tokens] int64 -> chosen [tokens, top_k] int32, weights [tokens, top_k] fp32. tokens and top_k 1 to
// 8, experts up to 384, columns a multiple of 8, x and gate at multiples of 16 bytes.
extern "C" int router(const void* x, const void* gate, const float* bias, const int64_t* table, const int64_t* ids, float* scores,
                      int* chosen, float* weights, int tokens, int experts, int columns, int top_k, int vocab, float route_scale,
                      int gate_dtype, cudaStream_t stream) {
    const auto* rows = static_cast<const __nv_bfloat16*>(x);
    if (gate_dtype == kBfloat16)
        launch_scores(rows, static_cast<const __nv_bfloat16*>(gate), scores, tokens, experts, columns, stream);
    else
        launch_scores(rows, static_cast<const float*>(gate), scores, tokens, experts, columns, stream);
    if (const cudaError_t error = cudaGetLastError()) return error;
    LAUNCH(router_choose, dim3(tokens), dim3(32), 0, stream, scores, bias, table, ids, chosen, weights, experts, top_k, int64_t(vocab),
           route_scale);
    return cudaGetLastError();
}
