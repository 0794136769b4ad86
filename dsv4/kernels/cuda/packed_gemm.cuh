// y = x W^T for any number of tokens and the weights as decode packs them (packing.py), so that one copy of the weights serves both; W is
// one matrix, or one an expert, whose rows of x lie together. Hopper's tensor cores (wgmma): sm_90a only, elsewhere the functions return
// cudaErrorNotSupported. packed_gemm_*.cu compile it, a format each, and say what the kernel is called (PACKED_GEMM_KERNEL).
//
// The weights are the product's 64-row operand A, from registers, the tokens operand B, from shared memory. A packed tile of 16 rows is one
// warp's part of A, and a lane's bytes are its own: 16 codes of a row become 8 pairs of bf16, exactly, with expand_e2m1 and the scales of
// stream.cuh. A lane holds 16 consecutive columns where the instruction wants 2 of each 8, so x must come in that order of columns in each
// 64 (arrange.cuh): the kernel that gathers the rows writes it (arrange_tokens), for w2 the epilogue of w1 and w3.
//
// A block is 128 rows of packed tiles by up to 256 tokens: two warpgroups that multiply 64 rows each, one thread that loads. Weights come
// by bulk copies, an item (512 columns of FP4) of 8 tiles at a time, into a ring of 2; tokens by TMA into a ring of 4 slots of 32 KB, which
// hold 64 columns of 256 tokens, 128 of 128. (Tiles of up to 128 tokens: 3, and 6 of 16 KB.) While a chunk of 64 columns is multiplied,
// the next one's weights are expanded into the other one of two sets of 16 registers. The product is as wide as the tile has tokens, of 32,
// 64, 96, 128, 192 and 256 columns. Blocks go from tile to tile until none is left; the next tile's copies come while one is stored. Tiles
// go down the tokens first (up to 8 of them, then the next rows), so that neighbours in time share weights. An expert without tokens has no
// tile.
//
// Where a weight has few rows, its tiles are cut along K into parts (prompts.py: how many depends on the weight alone, as the order of
// additions does), which follow each other in the walk, so that different blocks multiply them at the same time. A block leaves its sums in
// global memory, a thread's lie as it has them; the last of a tile's to arrive adds them in the order of the parts and stores the tile.
//
// Instructions a warp for 64 columns of NVFP4: 32 to expand, 16 multiplications by scales, 4 to make these, 1.5 loads, about 45 around, for
// 4 products that take 512 cycles with 256 tokens and 64 with 32 (two warps share a scheduler and its tensor core). Measured on an H200: 96
// to 101 % of torch's bf16 rate where tiles of 256 tokens fill the GPU; but narrower ones take 1,070 cycles a chunk with 128 tokens and 540
// with 32, as ptxas puts all that expands a chunk behind the fourth product of the one before, and it hides behind that one alone. Expanding
// the next product's weights behind each product, which ptxas cannot move, was slower: 91 to 96 % with 256 tokens, and 1,130 and 556 cycles
// with 128 and 32 (docs/measurements.md). What is left to try: two blocks an SM for narrow tiles, one of which multiplies while the other
// expands.
//
// FP8: the block scale multiplies the weights in bf16, which is exact if it has up to 4 significant bits (prompts.takes); decode applies it
// to the sums of 128 columns, for which there are no registers here.
#pragma once
#include "arrange.cuh"
#include "stream.cuh"
#include "tensor_map.cuh"

constexpr int kMath = 256, kGemmThreads = kMath + 128;             // two warpgroups that multiply, one that loads
constexpr int kTiles = 8, kBlockRows = kTiles * kRows;             // packed tiles of a block, one a warp
constexpr int kMaxN = 256, kBox = 32;                              // tokens of a tile; of a tensor copy
constexpr int kMaxSlots = 6, kMaxItems = 3;                        // of tokens and of weights, on their way or in use
constexpr int kOutTokens = 32, kOutStride = kBlockRows + 8;        // of a buffer of results; bf16 from token to token: no bank conflicts
constexpr int kOutBytes = kOutTokens * kOutStride * 2;
constexpr int kBand = 8;                                           // tiles of tokens before the next rows
constexpr int kMaxMatrices = 384;
constexpr int kUnit = 4;                                           // chunks of K that are never parted; an item, if that is less
constexpr int kMathRegisters = 232, kLoadRegisters = 40;

enum Result { kRounded = 0, kSwiglu = 1, kFloats = 2 };

struct Plan {
    const char* weights;
    const float *factors, *row_weights;  // factors [matrices, 3] or null: `factor`
    const int* offsets;                  // [matrices + 1], or null: all have all rows
    void* out;
    float* partial;                      // [tiles of out, parts, most / 8, kMath, 4], if parts > 1
    unsigned* arrivals;                  // a counter for each tile of out
    int parts, units;                    // of K
    int64_t matrix_bytes;
    int rows, columns, matrices, tiles, items, most;  // columns: of one matrix' out; tiles: packed ones; most: tokens of a tile
    int x_step, out_step, out_columns;   // from one matrix' columns to the next one's; of a row of out
    bool short_order;                    // of hidden's columns (arrange.cuh)
    float factor, limit;
};

struct Shared {
    uint64_t slot_full[kMaxSlots], slot_empty[kMaxSlots], item_full[kMaxItems], item_empty[kMaxItems];
    int begin[kMaxMatrices], end[kMaxMatrices], first[kMaxMatrices + 1];  // a matrix' rows of x; its first tile of tokens
    int sums[kGemmThreads / 32];
    bool last;
};

// A kernel's tiles and shared memory: slots, two buffers of results, `Shared`, items. Few tokens wait for weights, so narrow tiles have
// three items on the way.
template <bool kWide> struct Sizes {
    static constexpr int kTokens = kWide ? 256 : 128, kSlots = kWide ? 4 : 6, kItems = kWide ? 2 : 3;
    static constexpr int kSlotBytes = kTokens * kChunk * 2, kResultsAt = kSlots * kSlotBytes, kSharedAt = kResultsAt + 2 * kOutBytes;
    static constexpr int kItemsAt = kSharedAt + (sizeof(Shared) + 127) / 128 * 128;
    static constexpr int bytes(int format) { return kItemsAt + kItems * kTiles * item_bytes(format); }
    static_assert(kSlots <= kMaxSlots && kItems <= kMaxItems && kItemsAt + kItems * kTiles * item_bytes(kNvfp4) <= 227 << 10, "memory");
};

// The columns of the product for so many tokens. Two kernels share the widths: in one that has them all, ptxas makes every wgmma wait
// ("insufficient register resources", without spilling any).
template <bool kWide> __device__ __forceinline__ int width(int tokens) {
    return kWide ? (tokens <= 128 ? 128 : tokens <= 192 ? 192 : 256) : (tokens + 31) / 32 * 32;
}
// Chunks of 64 columns that a slot holds; an item is a whole number of slots.
__host__ __device__ constexpr int item_chunks(int format) { return item_columns(format) / kChunk; }
// Chunks of a unit: whole slots of any width of tile.
__host__ __device__ constexpr int unit_chunks(int format) { return item_chunks(format) < kUnit ? item_chunks(format) : kUnit; }
template <bool kWide> __host__ __device__ constexpr int slot_chunks(int format, int n) {
    const int fit = Sizes<kWide>::kTokens / (n > 128 ? 256 : n > 64 ? 128 : n > 32 ? 64 : 32);
    return fit < item_chunks(format) ? fit : item_chunks(format);
}

// A place in a ring of `kStages`.
template <int kStages> struct Ring {
    int index = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == kStages) index = 0, parity ^= 1;
    }
};

template <bool kWide> using Slots = Ring<Sizes<kWide>::kSlots>;
template <bool kWide> using Items = Ring<Sizes<kWide>::kItems>;

// The tiles of this block, or parts of tiles, one after the other; both sides walk alike.
struct Walk {
    const Plan& plan;
    const Shared& shared;
    int t, across_all;
    int matrix = 0, first_row = 0, tokens = 0, across = 0;  // of the current tile; across: which 128 packed rows

    __device__ __forceinline__ Walk(const Plan& plan, const Shared& shared)
        : plan(plan), shared(shared), t(int(blockIdx.x) - int(gridDim.x)), across_all((plan.tiles + kTiles - 1) / kTiles) {}

    __device__ __forceinline__ bool next() {
        t += gridDim.x;
        if (t >= shared.first[plan.matrices] * across_all * plan.parts) return false;
        const int tile = this->tile();
        while (tile >= shared.first[matrix + 1] * across_all) matrix++;
        int i = tile - shared.first[matrix] * across_all;
        const int down_all = shared.first[matrix + 1] - shared.first[matrix], band = i / (kBand * across_all);
        i -= band * kBand * across_all;
        const int here = min(kBand, down_all - band * kBand), down = band * kBand + i % here;
        across = i / here;
        first_row = shared.begin[matrix] + down * plan.most;
        tokens = min(plan.most, shared.end[matrix] - first_row);
        return true;
    }
    // Made anew where they are used: registers are dear while a tile is multiplied.
    __device__ __forceinline__ int tile() const { return t / plan.parts; }
    __device__ __forceinline__ int part() const { return t % plan.parts; }
    __device__ __forceinline__ int first_unit() const { return plan.units * part() / plan.parts; }
    __device__ __forceinline__ int end_unit() const { return plan.units * (part() + 1) / plan.parts; }
};

// ---------------------------------------------------------------------------------------------------------------------- load

template <int kFormat, bool kWide>
__device__ __forceinline__ void load_tiles(const TensorMap& map, const Plan& plan, Shared& shared, char* memory) {
    using S = Sizes<kWide>;
    Slots<kWide> slot;
    Items<kWide> stage;
    slot.parity = stage.parity = 1;  // a new barrier counts as having completed the phase of parity 1: the rings are empty
    bool waits = !plan.offsets;      // for the kernel before this one; the block's other threads wait for the tokens
    for (Walk walk(plan, shared); walk.next();) {
        const int n = width<kWide>(walk.tokens), chunks = slot_chunks<kWide>(kFormat, n);
        const char* weights = plan.weights + walk.matrix * plan.matrix_bytes;
        const int begin = walk.first_unit() * unit_chunks(kFormat), end = walk.end_unit() * unit_chunks(kFormat);
        for (int item = begin / item_chunks(kFormat); item * item_chunks(kFormat) < end; item++) {
            mbarrier_wait(&shared.item_empty[stage.index], stage.parity);
            mbarrier_expect(&shared.item_full[stage.index], kTiles * item_bytes(kFormat));
            for (int i = 0; i < kTiles; i++) {
                const int tile = min(walk.across * kTiles + i, plan.tiles - 1);  // beyond the last one, any: not stored
                bulk_load_keep(memory + S::kItemsAt + (stage.index * kTiles + i) * item_bytes(kFormat),
                               weights + (int64_t(tile) * plan.items + item) * item_bytes(kFormat), item_bytes(kFormat),
                               &shared.item_full[stage.index]);
            }
            stage.next();
            if (waits) grid_dependency_wait(), waits = false;
            const int end_here = min((item + 1) * item_chunks(kFormat), end);
            for (int first = max(item * item_chunks(kFormat), begin); first < end_here; first += chunks) {
                uint64_t* full = &shared.slot_full[slot.index];
                mbarrier_wait(&shared.slot_empty[slot.index], slot.parity);
                mbarrier_expect(full, chunks * n * kChunk * 2);
                for (int c = 0; c < chunks; c++) {
                    const int column = walk.matrix * plan.x_step + (first + c) * kChunk;
                    char* to = memory + slot.index * S::kSlotBytes + c * n * kChunk * 2;
                    for (int row = 0; row < n; row += kBox) tensor_load(to + row * kChunk * 2, &map, column, walk.first_row + row, full);
                }
                slot.next();
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------ multiply

// A lane's part of 128 columns, number `pair` of the item, on its way to operand A; `mine` is its first 16 bytes of the item. expand: the
// first or second 64 of them (v), four operands of 16.
template <int kFormat> struct Weights {  // FP4: 16 columns of two rows are two words each, for each v
    uint4 low, high;
    uint32_t scales;

    __device__ __forceinline__ Weights(const char* mine, int pair) {
        low = load_16(mine + 1024 * pair), high = load_16(mine + 1024 * pair + 512);
        const int lane = threadIdx.x % 32;
        scales = *reinterpret_cast<const uint32_t*>(mine + kCodes + 4 * pair - (kFormat == kNvfp4 ? 0 : 16 * (lane - lane / 2)));
    }
    __device__ __forceinline__ void expand(int v, uint32_t (&a)[4][4]) const {
        const uint32_t low_scale = scale_pair<kFormat>(scales, 2 * v), high_scale = scale_pair<kFormat>(scales, 2 * v + 1);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint32_t l[4], h[4];
            expand_e2m1(word(low, 2 * v + p), l);
            expand_e2m1(word(high, 2 * v + p), h);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[2 * p + i / 2][i % 2 * 2] = mul_bf16x2(l[i], low_scale);
                a[2 * p + i / 2][i % 2 * 2 + 1] = mul_bf16x2(h[i], high_scale);
            }
        }
    }
};
template <> struct Weights<kFp8> {  // 16 columns of two rows are four words each, for each v
    const char* mine;
    uint32_t scale[2];  // of rows g and g + 8, as two bf16

    __device__ __forceinline__ Weights(const char* mine, int pair) : mine(mine + 2048 * pair) {
        const char* scales = mine - 16 * (threadIdx.x % 32) + kCodes + 8 * pair;
#pragma unroll
        for (int half = 0; half < 2; half++) scale[half] = byte_perm(*reinterpret_cast<const uint32_t*>(scales + 4 * half), 0, 0x3232);
    }
    __device__ __forceinline__ void expand(int v, uint32_t (&a)[4][4]) const {
        constexpr uint32_t k2to120 = 0x7B807B80u;  // as two bf16; times a scale it might be too large for one
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 codes = load_16(mine + 1024 * v + 512 * half);
#pragma unroll
            for (int p = 0; p < 4; p++) {
                uint32_t pair[2];
                expand_e4m3(word(codes, p), pair);
#pragma unroll
                for (int i = 0; i < 2; i++) a[p][2 * i + half] = mul_bf16x2(mul_bf16x2(pair[i], k2to120), scale[half]);
            }
        }
    }
};
template <> struct Weights<kBf16> {  // 16 bytes are an operand
    const char* mine;

    __device__ __forceinline__ Weights(const char* mine, int) : mine(mine) {}
    __device__ __forceinline__ void expand(int v, uint32_t (&a)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 operand = load_16(mine + 2048 * v + 512 * i);
            a[i][0] = operand.x, a[i][1] = operand.y, a[i][2] = operand.z, a[i][3] = operand.w;
        }
    }
};

#if defined(DSV4_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA

// Starts sum += the 64 columns of a with those of the tokens at `b`.
template <int N> __device__ __forceinline__ void issue(float (&sum)[N / 2], const uint32_t (&a)[4][4], const char* b) {
    const uint64_t operand = wgmma_operand(b, Swizzle::k128, 8 * kChunk * 2);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_bf16(sum, a[i], operand + 2 * i);
    wgmma_commit();
}

// sum += the products over the columns of a tile's part.
template <int kFormat, bool kWide, int N>
__device__ __forceinline__ void multiply(float (&sum)[N / 2], const Walk& walk, Shared& shared, char* memory, Slots<kWide>& slot,
                                         Items<kWide>& stage) {
    using S = Sizes<kWide>;
    constexpr int kPairs = item_chunks(kFormat) / 2, kInSlot = slot_chunks<kWide>(kFormat, N), kSlotPairs = kInSlot > 1 ? kInSlot / 2 : 1;
    constexpr int kUnitPairs = unit_chunks(kFormat) / 2;
    static_assert(kUnitPairs % kSlotPairs == 0 && kPairs % kUnitPairs == 0, "parts of whole slots, items of whole parts");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = walk.first_unit() * kUnitPairs, end = walk.end_unit() * kUnitPairs;
    uint32_t a[2][4][4];
    uint64_t* before = nullptr;  // the barrier of the slot that is being read
    const char* b = nullptr;
#pragma unroll 1
    for (int pair = begin; pair < end;) {
        const char* mine = memory + S::kItemsAt + (stage.index * kTiles + warp) * item_bytes(kFormat) + 16 * lane;
        const int end_here = min(end, (pair / kPairs + 1) * kPairs);
        mbarrier_wait(&shared.item_full[stage.index], stage.parity);
#pragma unroll 1
        for (; pair < end_here; pair++) {
            const Weights<kFormat> weights(mine, pair % kPairs);
#pragma unroll
            for (int v = 0; v < 2; v++) {
                weights.expand(v, a[v]);
                const bool fresh = kInSlot == 1 || (v == 0 && pair % kSlotPairs == 0);  // the slot's first chunk
                if (fresh) {
                    mbarrier_wait(&shared.slot_full[slot.index], slot.parity);
                    b = memory + slot.index * S::kSlotBytes;
                }
                issue<N>(sum, a[v], b);
                wgmma_wait<1>();  // the chunk before is read
                b += N * kChunk * 2;
                if (fresh) {
                    if (before && lane == 0) mbarrier_arrive(before);
                    before = &shared.slot_empty[slot.index];
                    slot.next();
                }
            }
        }
        if (lane == 0) mbarrier_arrive(&shared.item_empty[stage.index]);  // all lanes have read their weights: they met at the wait
        stage.next();
    }
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(before);
}

// --------------------------------------------------------------------------------------------------------------------- store

// A thread holds of rows g and g + 8 of its warp's tile the tokens 2 q and 2 q + 1 of each 8.
template <int kResult, int N>
__device__ __forceinline__ void store(const float (&sum)[N / 2], const Plan& plan, const Walk& walk, char* results) {
    const int t = made_here(threadIdx.x), lane = t % 32, warp = t / 32, g = lane / 4, q = lane % 4;
    const int64_t first_out = walk.first_row * int64_t(plan.out_columns) + walk.matrix * plan.out_step;
    const float* factors = plan.factors ? plan.factors + 3 * walk.matrix : nullptr;
    if constexpr (kResult == kFloats) {  // 32 bytes of a token at a time, straight from the registers
        const int column = (walk.across * kTiles + warp) * kRows + g, step = plan.out_columns;
        const float factor = factors ? factors[2] : plan.factor;
        float* to = static_cast<float*>(plan.out) + first_out + int64_t(2 * q) * step + column;
        int left = walk.tokens - 2 * q;
#pragma unroll
        for (int i = 0; i < N / 2; i += 4, to += 8 * step, left -= 8) {
            if (column < plan.columns && left > 0) to[0] = sum[i] * factor;
            if (column < plan.columns && left > 1) to[step] = sum[i + 1] * factor;
            if (column + 8 < plan.columns && left > 0) to[8] = sum[i + 2] * factor;
            if (column + 8 < plan.columns && left > 1) to[step + 8] = sum[i + 3] * factor;
        }
        return;
    }
    constexpr int kTileColumns = kResult == kSwiglu ? kRows / 2 : kRows, kVectors = kTiles * kTileColumns / 8;
    const int row = t / kVectors, vector = t % kVectors, column = walk.across * kTiles * kTileColumns + vector * 8;  // what it writes
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(plan.out) + first_out + int64_t(row) * plan.out_columns + column;
    const float gate_factor = factors ? factors[0] : plan.factor, up_factor = factors ? factors[1] : plan.factor;
#pragma unroll
    for (int part = 0; part < N / kOutTokens; part++) {
        __nv_bfloat16* buffer = reinterpret_cast<__nv_bfloat16*>(results + part % 2 * kOutBytes);
        uint32_t pairs[4][2];  // of each 8 tokens: of rows g and g + 8
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* s = sum + part * 16 + j * 4;
            if constexpr (kResult == kSwiglu) {
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int token = part * kOutTokens + 8 * j + 2 * q + e;
                    const float weight = plan.row_weights && token < walk.tokens ? plan.row_weights[walk.first_row + token] : 1.0f;
                    float gate = s[e] * gate_factor, up = s[e + 2] * up_factor;
                    gate = gate > plan.limit ? plan.limit : gate;  // from above only; NaN stays
                    up = up > plan.limit ? plan.limit : up < -plan.limit ? -plan.limit : up;
                    value[e] = __fdividef(gate, 1.0f + __expf(-gate)) * up * weight;
                }
                pairs[j][0] = pack_bf16(value[0], value[1]);
            } else {
                pairs[j][0] = pack_bf16(s[0] * gate_factor, s[1] * gate_factor);
                pairs[j][1] = pack_bf16(s[2] * gate_factor, s[3] * gate_factor);
            }
        }
        // Turned over: rows become neighbours. The buffer was read before the last barrier but one.
        if constexpr (kResult == kSwiglu) {
            stmatrix_x4_trans(buffer + lane * kOutStride + warp * kTileColumns, {pairs[0][0], pairs[1][0], pairs[2][0], pairs[3][0]});
        } else {
#pragma unroll
            for (int j = 0; j < 4; j += 2)
                stmatrix_x4_trans(buffer + (8 * j + lane / 16 * 8 + lane % 8) * kOutStride + warp * kTileColumns + lane / 8 % 2 * 8,
                                  {pairs[j][0], pairs[j][1], pairs[j + 1][0], pairs[j + 1][1]});
        }
        bar_sync(1, kMath);
#pragma unroll
        for (int i = 0; i < kOutTokens; i += kMath / kVectors) {
            const __nv_bfloat16* from = buffer + (row + i) * kOutStride;
            uint4* place = reinterpret_cast<uint4*>(to + int64_t(part * kOutTokens + i) * plan.out_columns);
            if (row + part * kOutTokens + i >= walk.tokens) continue;
            if constexpr (kResult == kSwiglu) {
                uint32_t four[4];
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const int c = arranged_column(vector, w, plan.short_order);
                    four[w] = walk.across * kChunk + c < plan.columns ? *reinterpret_cast<const uint32_t*>(from + c) : 0;
                }
                *place = uint4{four[0], four[1], four[2], four[3]};
            } else if (column < plan.columns) {
                *place = load_16(from + vector * 8);
            }
        }
    }
    bar_sync(1, kMath);  // before the next tile's first part overwrites what the last but one left
}

// Leaves a part's sums in global memory. Whether all parts of the tile are there: then sum becomes theirs, added in the order of the parts
// (the first two in either, which are the same bits).
template <int N> __device__ __forceinline__ bool add_parts(float (&sum)[N / 2], const Plan& plan, const Walk& walk, Shared& shared) {
    const int64_t part_step = int64_t(plan.most / 8) * kMath;
    float4* parts = reinterpret_cast<float4*>(plan.partial) + walk.tile() * plan.parts * part_step + threadIdx.x;
#pragma unroll
    for (int i = 0; i < N / 8; i++)
        __stcg(parts + walk.part() * part_step + i * kMath, float4{sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]});
    const unsigned most = plan.parts - 1;
    bar_sync(1, kMath);  // as last_to_arrive, without the warps that load
    if (threadIdx.x == 0) shared.last = atomic_inc_fenced(plan.arrivals + walk.tile(), most) == most;
    bar_sync(1, kMath);
    if (!shared.last) return false;
    const bool keeps = walk.part() < 2;  // its own sums are in front, and need not be read
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] = keeps ? sum[i] : 0.0f;
#pragma unroll 1
    for (int p = 0; p < plan.parts; p++) {
        if (keeps && p == walk.part()) continue;
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const float4 other = __ldcg(parts + p * part_step + i * kMath);
            sum[4 * i] += other.x, sum[4 * i + 1] += other.y, sum[4 * i + 2] += other.z, sum[4 * i + 3] += other.w;
        }
    }
    return true;
}

template <int kFormat, int kResult, bool kWide, int N>
__device__ __forceinline__ void tile(const Plan& plan, const Walk& walk, Shared& shared, char* memory, Slots<kWide>& slot,
                                     Items<kWide>& stage) {
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] = 0.0f;
    multiply<kFormat, kWide, N>(sum, walk, shared, memory, slot, stage);
    if (plan.parts > 1 && !add_parts<N>(sum, plan, walk, shared)) return;
    store<kResult, N>(sum, plan, walk, memory + Sizes<kWide>::kResultsAt);
}
#endif

// Where each matrix' rows and tiles of tokens begin.
__device__ __forceinline__ void count_tiles(const Plan& plan, Shared& shared) {
    const int t = threadIdx.x, lane = t % 32;
    int begin = 0, end = 0;
    if (t < plan.matrices) {  // no more than threads
        begin = plan.offsets ? plan.offsets[t] : 0, end = plan.offsets ? plan.offsets[t + 1] : plan.rows;
        shared.begin[t] = begin, shared.end[t] = end;
    }
    const int mine = (end - begin + plan.most - 1) / plan.most;
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) shared.sums[t / 32] = sum;
    __syncthreads();
    for (int i = 0; i < t / 32; i++) sum += shared.sums[i];
    if (t < plan.matrices) shared.first[t] = sum - mine;
    if (t == plan.matrices - 1) shared.first[t + 1] = sum;
    __syncthreads();
}

template <int kFormat, int kResult, bool kWide>
__global__ void __launch_bounds__(kGemmThreads, 1) PACKED_GEMM_KERNEL(const __grid_constant__ TensorMap map,
                                                                      const __grid_constant__ Plan plan) {
#ifdef HAS_WGMMA
    DYN_SMEM(char, memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory + Sizes<kWide>::kSharedAt);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Sizes<kWide>::kSlots; i++)
            mbarrier_init(&shared.slot_full[i], 1), mbarrier_init(&shared.slot_empty[i], kMath / 32);
        for (int i = 0; i < Sizes<kWide>::kItems; i++)
            mbarrier_init(&shared.item_full[i], 1), mbarrier_init(&shared.item_empty[i], kMath / 32);
        mbarrier_fence_init();
    }
    grid_dependency_launch();
    if (plan.offsets) grid_dependency_wait();  // else the thread that loads does so, behind the first weights
    count_tiles(plan, shared);
    if (threadIdx.x >= kMath) {
        registers_less<kLoadRegisters>();
        if (threadIdx.x == kMath) load_tiles<kFormat, kWide>(map, plan, shared, memory);
        return;
    }
    registers_more<kMathRegisters>();
    Slots<kWide> slot;
    Items<kWide> stage;
    for (Walk walk(plan, shared); walk.next();) {
        const int n = width<kWide>(walk.tokens);
        if constexpr (kWide) {
            if (n == 128) tile<kFormat, kResult, kWide, 128>(plan, walk, shared, memory, slot, stage);
            else if (n == 192) tile<kFormat, kResult, kWide, 192>(plan, walk, shared, memory, slot, stage);
            else tile<kFormat, kResult, kWide, 256>(plan, walk, shared, memory, slot, stage);
        } else {
            if (n == 32) tile<kFormat, kResult, kWide, 32>(plan, walk, shared, memory, slot, stage);
            else if (n == 64) tile<kFormat, kResult, kWide, 64>(plan, walk, shared, memory, slot, stage);
            else if (n == 96) tile<kFormat, kResult, kWide, 96>(plan, walk, shared, memory, slot, stage);
            else tile<kFormat, kResult, kWide, 128>(plan, walk, shared, memory, slot, stage);
        }
    }
#endif
}

template <int kFormat, int kResult, bool kWide>
static cudaError_t launch(const void* x, int x_columns, const Plan& plan, int blocks, cudaStream_t stream) {
    TensorMap map;
    const cudaError_t error = make_tensor_map(&map, 2, x, x_columns, plan.rows, size_t(x_columns) * 2, kChunk, kBox, Swizzle::k128);
    if (error != cudaSuccess) return error;
    auto kernel = PACKED_GEMM_KERNEL<kFormat, kResult, kWide>;
    LAUNCH(kernel, dim3(blocks), dim3(kGemmThreads), Sizes<kWide>::bytes(kFormat), stream, map, plan);
    return cudaGetLastError();
}

template <int kFormat>
static cudaError_t launch(int result, const void* x, int x_columns, const Plan& plan, int blocks, cudaStream_t stream) {
    const bool wide = plan.most > Sizes<false>::kTokens;
    if (result == kRounded)
        return wide ? launch<kFormat, kRounded, true>(x, x_columns, plan, blocks, stream)
                    : launch<kFormat, kRounded, false>(x, x_columns, plan, blocks, stream);
    if (result == kSwiglu)
        return wide ? launch<kFormat, kSwiglu, true>(x, x_columns, plan, blocks, stream)
                    : launch<kFormat, kSwiglu, false>(x, x_columns, plan, blocks, stream);
    return wide ? launch<kFormat, kFloats, true>(x, x_columns, plan, blocks, stream)
                : launch<kFormat, kFloats, false>(x, x_columns, plan, blocks, stream);
}

// weights: `matrices` packed ones of one shape, one after the other. Two ways to have several:
//   offsets [matrices + 1] int32, ascending from 0 to rows: matrix e multiplies rows offsets[e] .. of x [rows, x_columns], experts;
//   without: matrix e multiplies all rows of x [rows, matrices * x_columns] at columns e * x_columns .., groups, and fills such of out.
// x bf16, arranged (arrange.cuh), x_columns a multiple of 64, the weights' columns no more. factors fp32 [matrices, 3] (of w1, w3, w2), or
// null: `factor` for all. most: tokens of a tile, a multiple of 32 up to 256. result:
//   0  out bf16 [rows, (matrices *) columns], columns a multiple of 8;
//   1  the weights are pairs (w1 with w3): out bf16 [rows, columns up to the next multiple of 64], arranged in the order of `short_order`:
//      silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weights [rows] fp32 (null: 1);
//   2  out fp32 [rows, (matrices *) columns].
// parts: of K, up to its units, which are 256 columns (of bf16 weights 128). Of more than one, partial: a workspace of parts * most * 128
// fp32 values for each tile of out (128 packed rows of a matrix by up to `most` tokens); arrivals: a counter for each of them, 0 before and
// behind the launch.
template <int kFormat>
static cudaError_t packed_gemm(const void* x, const void* weights, const float* factors, const int* offsets, const float* row_weights,
                               void* out, float* partial, int* arrivals, int rows, int columns, int x_columns, int matrices, int result,
                               int most, int parts, int short_order, int blocks, float factor, float limit, cudaStream_t stream) {
#if !defined(DSV4_EMULATOR) && defined(__CUDA_ARCH_LIST__)
    constexpr int architectures[] = {__CUDA_ARCH_LIST__};  // one: build.py compiles for one
    if (architectures[0] != 900) return cudaErrorNotSupported;
#endif
    if (rows < 1 || columns < 1 || x_columns < 1 || x_columns % kChunk || matrices < 1 || matrices > kMaxMatrices || most < kBox ||
        most > kMaxN || most % kBox || (columns % 8 && result != kFloats) || result < kRounded || result > kFloats ||
        (result == kSwiglu && !offsets && matrices > 1))
        return cudaErrorInvalidValue;
    const int tile_rows = result == kSwiglu ? kRows / 2 : kRows, width = offsets ? x_columns : matrices * x_columns;
    Plan plan = {};
    plan.weights = static_cast<const char*>(weights), plan.factors = factors, plan.row_weights = row_weights, plan.offsets = offsets;
    plan.out = out, plan.rows = rows, plan.columns = columns, plan.matrices = matrices, plan.most = most;
    plan.tiles = (columns + tile_rows - 1) / tile_rows, plan.items = (x_columns + item_columns(kFormat) - 1) / item_columns(kFormat);
    plan.partial = partial, plan.arrivals = reinterpret_cast<unsigned*>(arrivals), plan.parts = parts;
    plan.units = plan.items * (item_chunks(kFormat) / unit_chunks(kFormat));
    if (parts < 1 || parts > plan.units || (parts > 1 && (!partial || !arrivals))) return cudaErrorInvalidValue;
    plan.matrix_bytes = int64_t(plan.tiles) * plan.items * item_bytes(kFormat);
    plan.x_step = offsets ? 0 : x_columns, plan.out_step = offsets ? 0 : columns;
    plan.out_columns = result == kSwiglu ? (columns + kChunk - 1) / kChunk * kChunk : offsets ? columns : matrices * columns;
    plan.short_order = short_order, plan.factor = factor, plan.limit = limit;
    return launch<kFormat>(result, x, width, plan, blocks, stream);
}
