// index_scores_sm100: index_scores (index_scores.cu, which says what that is) on Blackwell's tensor cores, for one token of a step or all
// of a prompt's. sm_90a has none of them: there the function returns cudaErrorNotSupported.
//
// Codes and scales of keys and queries are what tcgen05.mma kind::mxf4 takes, so nothing is expanded: products are exact, their sums fp32.
// A tile of 128 entries is the product's rows and the 64 heads of a token its columns, so a thread of the epilogue owns an entry, reads its
// 64 products from tensor memory and adds up the heads in registers. A block has up to 8 tokens and makes their queries itself, once; it
// takes every gridDim.x-th tile of entries. One warp loads keys (a tensor copy) and their scales (through registers: they lie entry by
// entry and the copy to tensor memory wants those of 4 times 32 entries side by side), one thread multiplies into 6 accumulators in turn,
// two warpgroups take the accumulators in turn.
//
// What is not finite has the scale byte 255, with which the product is NaN.
//
// Prediction for a B200 at 1.85 GHz: the epilogue takes a head's product with one max (16 lanes a clock and quarter of an SM) and half of a
// fma.f32x2, 128 clocks a tile and token on an SM, its tensor core a quarter of that. So 148 SMs score 2.7e11 pairs of token and entry a
// second: 8 tokens x 262,144 entries in 8 us, a chunk of 4,096 tokens over 32,768 entries in 0.5 ms. One token over 262,144 entries is
// 17.8 MB, 2.3 us at 8 TB/s, and some 3 us for the launch, the queries and the first keys. A block's 8 queries cost 13,000 clocks, 12
// tiles' worth. Not measured: no B200 has run it.
#include "index_query.cuh"
#include "nvfp4.cuh"
#include "tensor_map.cuh"

constexpr int kEntries = 128, kRowBytes = kDim / 2, kTokens = 8;  // entries of a tile; bytes of a key's or query's codes; tokens of a block
constexpr int kStages = 8, kSlots = 6;                            // tiles on their way; accumulators, of kHeads columns each
constexpr int kThreads = 320, kScaleTile = 512;                   // the latter: bytes of 128 rows, as tensor_copy_scales takes them

struct Layout {  // of shared memory, in bytes
    static constexpr int kKeys = 0, kQueries = kStages * kEntries * kRowBytes, kKeyScales = kQueries + kTokens * kHeads * kRowBytes;
    static constexpr int kQueryScales = kKeyScales + kStages * kScaleTile, kWeights = kQueryScales + kTokens / 2 * kScaleTile;
    static constexpr int kBarriers = kWeights + kTokens * kHeads * 4, kAddress = kBarriers + 2 * (kStages + kSlots) * 8;
    static constexpr int kBytes = kAddress + 8;
};

#ifdef HAS_TENSOR_MEMORY
// Where the scales of row r of a product lie in their tile.
__device__ __forceinline__ int scale_place(int row) { return row % 32 * 16 + row / 32 * 4; }

struct Block {
    static constexpr int kScorers = 8, kLoader = 8, kMultiplier = 9;  // how many warps, and which
    static constexpr unsigned kColumns = 512, kQueryColumns = kSlots * kHeads, kKeyColumns = kQueryColumns + 4 * kTokens / 2;  // of scales
    static_assert(kThreads == 32 * (kMultiplier + 1) && kKeyColumns + 4 * kStages <= kColumns, "warps and tensor memory");
    char* memory;
    const uint32_t* scales;
    int tokens, entries, first, stride, tiles;  // entry tiles first, first + stride, ...: `tiles` of them

    __device__ __forceinline__ uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(memory + Layout::kBarriers) + i; }
    __device__ __forceinline__ uint64_t* full(int tile) const { return barrier(tile % kStages); }  // arrivals: of the copy, of the scales
    __device__ __forceinline__ uint64_t* empty(int tile) const { return barrier(kStages + tile % kStages); }  // one for each token
    __device__ __forceinline__ uint64_t* done(int unit) const { return barrier(2 * kStages + unit % kSlots); }
    __device__ __forceinline__ uint64_t* taken(int unit) const { return barrier(2 * kStages + kSlots + unit % kSlots); }  // 4 warps
    __device__ __forceinline__ char* keys(int tile) const { return memory + Layout::kKeys + tile % kStages * kEntries * kRowBytes; }
    __device__ __forceinline__ char* key_scales(int tile) const { return memory + Layout::kKeyScales + tile % kStages * kScaleTile; }
    __device__ __forceinline__ int entry(int tile) const { return (first + tile * stride) * kEntries; }  // its first

    // The queries, in the layout of a tensor copy with the swizzle of 64 bytes, their scales and weights; by the scorers.
    __device__ __forceinline__ void prepare(const float* q, const float* cos, const float* sin, const float* head_weights) const {
        const int lane = threadIdx.x % 32, u = lane % 8;
        if (tokens % 2 && threadIdx.x < kHeads)  // the copy of the last scale tile takes its second half along
            *reinterpret_cast<uint32_t*>(memory + Layout::kQueryScales + tokens / 2 * kScaleTile + scale_place(kHeads + threadIdx.x)) = 0;
        for (int i = threadIdx.x / 32; i < tokens * kHeads / 4; i += kScorers) {
            const int row = i * 4 + lane / 8, token = row / kHeads;
            float v[16], of_cos[8], of_sin[8];
            load_index_query(q + row * kDim, cos + token * (kRope / 2), sin + token * (kRope / 2), v, of_cos, of_sin);
            const unsigned scale = index_query(v, of_cos, of_sin);
            uint32_t codes[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t& word = codes[half] = 0u - kCodeBias * 0x11111111u;
#pragma unroll
                for (int j = 0; j < 8; j++) word += biased_code(fabsf(v[half * 8 + j])) << 4 * j;
#pragma unroll
                for (int j = 0; j < 8; j++) word |= __float_as_uint(v[half * 8 + j]) >> (28 - 4 * j) & 8u << 4 * j;
            }
            const int place = row * kRowBytes + ((u / 2 ^ row / 2 % 4) << 4) + u % 2 * 8;
            *reinterpret_cast<uint2*>(memory + Layout::kQueries + place) = uint2{codes[0], codes[1]};
            if (u % 2 == 0) memory[Layout::kQueryScales + row / 128 * kScaleTile + scale_place(row % 128) + u / 2] = char(scale);
            if (u == 0) reinterpret_cast<float*>(memory + Layout::kWeights)[row] = head_weights[row] * kHeadFactor;
        }
    }

    // A lane's scales of a tile: of entries lane, lane + 32, ...
    __device__ __forceinline__ uint4 fetch_scales(int tile) const {
        const int mine = entry(tile) + threadIdx.x % 32;
        uint4 words = {0, 0, 0, 0};
        if (mine < entries) words.x = scales[mine];
        if (mine + 32 < entries) words.y = scales[mine + 32];
        if (mine + 64 < entries) words.z = scales[mine + 64];
        if (mine + 96 < entries) words.w = scales[mine + 96];
        return words;
    }
    __device__ __forceinline__ void load_keys(const TensorMap& map, int tile) const {
        if (threadIdx.x % 32) return;
        mbarrier_expect(full(tile), kEntries * kRowBytes);
        tensor_load(keys(tile), &map, 0, entry(tile), full(tile));
    }
    __device__ __forceinline__ void load(const TensorMap& map) const {
        uint4 ahead[kStages];
#pragma unroll
        for (int i = 0; i < kStages; i++) ahead[i] = i < tiles ? fetch_scales(i) : uint4{0, 0, 0, 0};
        for (int i = 0; i < min(kStages, tiles); i++) load_keys(map, i);
        for (int round = 0; round < tiles; round += kStages)
#pragma unroll
            for (int i = 0; i < kStages; i++) {
                const int tile = round + i;
                if (tile >= tiles) break;
                if (round) {
                    const unsigned parity = (round / kStages - 1) % 2;
                    mbarrier_wait(full(tile), parity);  // over when the next is, but the emulator takes no such word from a product
                    mbarrier_wait(empty(tile), parity);
                    load_keys(map, tile);
                }
                *reinterpret_cast<uint4*>(key_scales(tile) + threadIdx.x % 32 * 16) = ahead[i];
                fence_async_shared();
                __syncwarp();
                if (threadIdx.x % 32 == 0) mbarrier_arrive(full(tile));
                if (tile + kStages < tiles) ahead[i] = fetch_scales(tile + kStages);
            }
    }

    // A unit is a tile of entries with a token; units are counted over the tokens of a tile, then over the tiles.
    __device__ __forceinline__ void multiply(uint32_t columns) const {
        for (int i = 0; 2 * i < tokens; i++)
            tensor_copy_scales(columns + kQueryColumns + 4 * i,
                               tensor_operand(memory + Layout::kQueryScales + i * kScaleTile, Swizzle::kNone, 128));
        constexpr uint32_t kShape = tensor_shape(kTensorMxfp4, kHeads);
        for (int tile = 0, unit = 0; tile < tiles; tile++) {
            mbarrier_wait(full(tile), tile / kStages % 2);
            const uint32_t key_cells = columns + kKeyColumns + tile % kStages * 4;
            tensor_copy_scales(key_cells, tensor_operand(key_scales(tile), Swizzle::kNone, 128));
            const uint64_t of_keys = tensor_operand(keys(tile), Swizzle::k64, 8 * kRowBytes);
            for (int token = 0; token < tokens; token++, unit++) {
                if (unit >= kSlots) {
                    mbarrier_wait(taken(unit), (unit / kSlots - 1) % 2);
                    tensor_fence_after();
                }
                const uint64_t of_query =
                    tensor_operand(memory + Layout::kQueries + token * kHeads * kRowBytes, Swizzle::k64, 8 * kRowBytes);
                const uint32_t d = columns + unit % kSlots * kHeads, query_cells = columns + kQueryColumns + 2 * token;
                // The second half of the dims is 32 bytes, 2 units of an operand's address, further.
                tensor_mma_mxfp4(d, of_keys, of_query, kShape, key_cells, query_cells, false);
                tensor_mma_mxfp4(d, of_keys + 2, of_query + 2, kShape | kTensorUpperScales, key_cells, query_cells, true);
                tensor_commit(done(unit));
            }
        }
    }

    // Warpgroup g takes units g, g + 2, ...; a thread has row `threadIdx.x % 128` of each.
    __device__ __forceinline__ void score(uint32_t columns, float* scores, int capacity) const {
        const int group = threadIdx.x / 128, row = threadIdx.x % 128, lane = threadIdx.x % 32;
        const uint32_t lanes = columns + (row / 32 * 32 << 16);
        int tile = 0, token = group;
        for (int unit = group; unit < tiles * tokens; unit += 2, token += 2) {
            while (token >= tokens) token -= tokens, tile++;
            mbarrier_wait(done(unit), unit / kSlots % 2);
            tensor_fence_after();
            if (row == 0) mbarrier_arrive(empty(tile));  // its keys have been read
            const float2* weights = reinterpret_cast<const float2*>(memory + Layout::kWeights) + token * kHeads / 2;
            float2 sum[2] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t r[4][8];
#pragma unroll
                for (int i = 0; i < 4; i++) tensor_load_8(r[i], lanes + unit % kSlots * kHeads + half * 32 + i * 8);
                tensor_wait_load(r);
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const uint32_t *two = &r[i / 4][i % 4 * 2];
                    const float2 product = {max_nan(__uint_as_float(two[0]), 0.0f), max_nan(__uint_as_float(two[1]), 0.0f)};
                    sum[i % 2] = fma_f32x2(weights[half * 16 + i], product, sum[i % 2]);
                }
            }
            tensor_fence_before();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(taken(unit));
            const int mine = entry(tile) + row;
            const float score = (sum[0].x + sum[0].y) + (sum[1].x + sum[1].y);
            if (mine < entries) scores[int64_t(token) * capacity + mine] = score;
        }
    }
};
#endif

__global__ void __launch_bounds__(kThreads, 1)
index_scores_sm100_kernel(const float* q, const float* cos, const float* sin, const float* head_weights,
                          const __grid_constant__ TensorMap values, const uint8_t* scales, const int64_t* positions, float* scores,
                          int tokens, int capacity, int top_k) {
#ifdef HAS_TENSOR_MEMORY
    DYN_SMEM(char, memory);
    grid_dependency_launch();
    grid_dependency_wait();
    // The groups of tokens that see the most come first.
    const int token = (int(gridDim.y) - 1 - int(blockIdx.y)) * kTokens, mine = min(kTokens, tokens - token);
    const auto visible = [&](int token) { return int(min(int64_t(capacity), (positions[token] + 1) / kRatio)); };
    const int entries = visible(token + mine - 1), splits = gridDim.x, first = blockIdx.x;
    const int tiles = ((entries + kEntries - 1) / kEntries - first + splits - 1) / splits;
    if (visible(tokens - 1) <= top_k || tiles <= 0) return;
    const Block block{memory, reinterpret_cast<const uint32_t*>(scales), mine, entries, first, splits, tiles};
    uint32_t* address = reinterpret_cast<uint32_t*>(memory + Layout::kAddress);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 32 * Block::kLoader) {
        for (int i = 0; i < kStages; i++) mbarrier_init(block.full(i), 2), mbarrier_init(block.empty(i), mine);
        for (int i = 0; i < kSlots; i++) mbarrier_init(block.done(i), 1), mbarrier_init(block.taken(i), 4);
        mbarrier_fence_init();
    }
    if (warp == Block::kMultiplier) {
        tensor_alloc(address, Block::kColumns);
        tensor_relinquish();
        tensor_fence_before();
    }
    if (warp == Block::kLoader) {  // does not wait for the queries
        __syncwarp();
        bar_arrive(1, kThreads);
        block.load(values);
    }
    if (warp < Block::kScorers) {
        block.prepare(q + token * kHeads * kDim, cos + token * (kRope / 2), sin + token * (kRope / 2), head_weights + token * kHeads);
        fence_async_shared();
    }
    if (warp != Block::kLoader) bar_sync(1, kThreads);
    tensor_fence_after();
    const uint32_t columns = warp != Block::kLoader ? *address : 0;
    if (threadIdx.x == 32 * Block::kMultiplier) block.multiply(columns);
    if (warp < Block::kScorers) block.score(columns, scores + int64_t(token) * capacity, capacity);
    tensor_fence_before();
    __syncthreads();
    if (warp == Block::kMultiplier) {
        tensor_fence_after();
        tensor_free(columns, Block::kColumns);
    }
#endif
}

// As index_scores, but for any number of tokens, at consecutive positions. splits: how many blocks share the entries of 8 tokens.
extern "C" int index_scores_sm100(const float* q, const float* cos, const float* sin, const float* head_weights, const uint8_t* values,
                                  const uint8_t* scales, const int64_t* positions, float* scores, int tokens, int capacity, int top_k,
                                  int splits, cudaStream_t stream) {
    if (!built_for_tensor_memory()) return cudaErrorNotSupported;
    const int groups = (tokens + kTokens - 1) / kTokens;
    if (tokens < 1 || capacity < 1 || splits < 1 || groups > 65535) return cudaErrorInvalidValue;
    TensorMap map;
    const cudaError_t error = make_tensor_map(&map, 1, values, kRowBytes, capacity, kRowBytes, kRowBytes, kEntries, Swizzle::k64);
    if (error != cudaSuccess) return error;
    LAUNCH(index_scores_sm100_kernel, dim3(splits, groups), dim3(kThreads), Layout::kBytes, stream, q, cos, sin, head_weights, map, scales,
           positions, scores, tokens, capacity, top_k);
    return cudaGetLastError();
}
