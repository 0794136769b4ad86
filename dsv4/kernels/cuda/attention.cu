// attention: q's per-head norm and RoPE, softmax with a sink over a token's window and compressed entries, whose 512 dims are keys and
// values, packed as in dsv4/kernels/keys.py; output de-rotated and rounded once (dsv4/ops/attention.py, attention_ref).
//
// attention_split: a block takes 8, 16 or 32 heads x a share of one token's keys (flash-decoding); attention_merge adds the shares up. The
// eight warps of a block divide the dims, not the keys: warps 0 to 6 have 64 FP8 dims and so one scale per key, warp 7 has the 64 rotated
// bf16 dims. A warp loads its part of a key straight into the registers that the tensor core's B operand wants, multiplies it with its
// dims of q, stores it in shared memory of its own, and multiplies it there, transposed, with the weights into its dims of the output.
// Only q and scores cross warps.
//
// FP8 dims are multiplied as f16, which holds every e4m3: a pair takes one or two instructions, as bf16 five or six. The scales, powers of
// two, multiply the scores, and the weights before they meet the values. Partial outputs are bf16: this rounding adds about what weights in
// f16 save: the tests hold the error to that of the definition in bf16.
//
// Keys are taken in an order that needs no position: the ring's rows, then the entries. Units of 16 go to the splits in turn. So if a split
// has one tile (`once`), a round trip brings position, q and keys together (with a selection: position, q and names, a second one keys),
// what the token does not see is masked, and the work is even over the splits wherever the token is. The merge reads no position.
//
// Predicted, Pro, CSA (128 heads, 1,152 keys): 8 x 15 blocks of 80 keys, one an SM, which together read 3.9 MB of q and 5.4 MB of keys
// through L2 and write 2 MB. Two round trips of 0.65 us, 0.5 us for the bytes, 770 instructions of a warp behind the keys (two warps a
// scheduler: 0.9 us), 0.3 us for the stores; the merge: a round trip, 0.2 us for its 2 MB, 310 instructions (0.3 us); a dependent launch
// costs 1.1 us beside its round trip: 7 us. HCA (160 keys): 16 x 6 blocks of 8 heads and 32 keys, one round trip, 580 instructions: 5 us.
// 64 heads x 640 keys: 4 x 21 blocks of 16 heads and 32 keys, two round trips, 550 instructions: 6 us.
// Where a split has several tiles, a key's way is what counts: out of L2 once for each group of heads, its expansion, and some 300 bytes of
// shared memory for 16 heads (stored, read as values, 8 warps' parts of the scores written and read). So a block has 32 heads, an SM to
// itself, and asks for the next tile's keys, into the same registers, when it has scored this one's: they come while it weighs and adds.
// HCA at 1M (128 heads, 8,320 keys): 4 x 33 blocks, 4 tiles of 64 keys. A tile: 1,650 cycles of the tensor cores, 2,600 of shared memory
// (values and parts of scores written and read, 64 KB each; weights), 1,010 instructions a warp (two warps a scheduler: 2,020). Barriers
// keep these from overlapping much: predicted 5,000 cycles, 11.4 us for four, as 5,900 were measured with 1,150 instructions and queries
// read again for each tile; start and first keys 3, stores 0.5, the merge of 33 splits, 4.3 MB in one round trip, 2.3: 17.2 us.
// Measured on an H200: 128 heads and 1,152 keys 7.7 us, 160 keys 6.8, 8,320 keys 17.8, where 16 heads a block,
// two blocks an SM and tiles of 48 keys took 25.2, and two tiles in registers 19.2 (docs/measurements.md).
#include "common.cuh"

constexpr int kDim = 512, kPlain = 448, kRotary = kDim - kPlain;  // dims of a head, of these FP8, of these rotated
constexpr int kKeyBytes = kPlain + 2 * kRotary, kScaleBytes = 8;
constexpr int kUnit = 16, kWarpDims = 64, kRingTokens = 8;  // tokens that share a ring of window keys
constexpr int kWarps = kDim / kWarpDims, kThreads = 32 * kWarps, kRotaryWarp = kWarps - 1;
constexpr int kMergeGroups = 4, kMergeThreads = kMergeGroups * (kDim / 8), kMaxSplits = 64;
// A normed q is at most 512^0.5. It goes times 2^11: then f16 holds its bf16 exactly down to 2^-28.
constexpr float kQueryFactor = 2048.0f, kScale = 0.044194173824159216f / kQueryFactor;  // of a score: 512^-0.5
constexpr float kExp2Scale = kScale * 1.4426950408889634f;                              // for powers of two instead of e

// A block's shared memory, for tiles (what lies between two barriers) of kUnits. Values: 16 rows of a unit for each warp, and once more for
// the rotary one: the next tile's dims arrive there while this one's are in use. Scores of a warp and 8 keys: the 2 or 4 floats of each
// lane as mma leaves them. The scores of 8 keys and the rows of weights are padded, which keeps reads free of bank conflicts.
constexpr int kWarpBytes = kUnit * 2 * kWarpDims, kUnitBytes = (kWarps + 1) * kWarpBytes, kQueryBytes = 2 * kDim;
template <int kUnits> constexpr int kLaneKeys = (kUnits + 1) / 2;                   // keys of a tile that a lane looks after
template <int kUnits> constexpr int kRelative = 4 * 32 * kLaneKeys<kUnits>;         // behind a warp's scales, the same as f16
template <int kUnits> constexpr int kWeightStride = 128 * ((kUnits + 3) / 4) + 16;  // of a head
template <int kHeads> constexpr int kRowTiles = (kHeads + 15) / 16;                  // of a tensor core's 16 rows
template <int kHeads> constexpr int kLaneScores = kHeads < 16 ? kHeads : 16;        // bytes, of 8 keys and a row tile
template <int kHeads> constexpr int kWarpScores = kRowTiles<kHeads> * 32 * kLaneScores<kHeads>;
template <int kHeads> constexpr int kOctetScores = kWarps * kWarpScores<kHeads> + 4 * kLaneScores<kHeads>;
template <int kHeads, int kUnits> struct Layout {
    static constexpr int kValues = 0, kScores = kUnits * kUnitBytes, kQueries = kScores + 2 * kUnits * kOctetScores<kHeads>;
    static constexpr int kWeights = kQueries + kHeads * kQueryBytes, kFactors = kWeights + 2 * kHeads * kWeightStride<kUnits>;
    static constexpr int kScales = kFactors + 4 * kHeads, kWarpScales = kRelative<kUnits> + 2 * 32 * kLaneKeys<kUnits>;
    static constexpr int kBytes = kScales + kWarps * kWarpScales;
};

// What a token can see. Without a selection (all entries may be seen) top_k is 0.
struct Cache {
    const uint8_t *window_values, *window_scales, *entry_values, *entry_scales;
    const int* selected;         // [tokens, top_k], -1 where there is none
    int ring, window, entries, ratio, top_k;  // entries: how many there are, or names of them
};

__host__ __device__ constexpr int units_of(int keys) { return (keys + kUnit - 1) / kUnit; }

// Where 16-byte chunk `chunk` of row `row` lies among values of 128-byte rows: eight chunks that are moved together are in different banks.
__device__ __forceinline__ int place(int row, int chunk) { return row * 128 + ((chunk ^ row % 8) << 4); }

// A tile: units first, first + splits, ... as one warp has it. raw[n] are e4m3 dims 16 t to 16 t + 15 of key 8 n + g, with g = lane / 4 and
// t = lane % 4; in the rotary warp the bf16 dims go to shared memory instead, to chunks that this thread alone will touch until it has
// scored them. Apart from these, half-warp i of lanes looks after key `lane % 16` of units i, i + 2 and i + 4.
constexpr int kNone = 0x7fffffff;
template <int kUnits> struct Tile {
    uint4 raw[2 * kUnits];
    const uint8_t *keys[kUnits], *scales[kLaneKeys<kUnits>];  // row 0 of what a unit, the lane's key is of, at this thread's dims
    bool in_ring[kLaneKeys<kUnits>];
    int number[kLaneKeys<kUnits>];     // of the key among the ring's rows, or among the entries or their names; kNone: there is none
    int row[kLaneKeys<kUnits>];        // its row, or any other if there is none
    unsigned mark[kLaneKeys<kUnits>];  // its ue8m0 byte for this warp's dims
};

// A bit for each lane's key of a tile, if the token sees it; and units up to the last such key, at least 1.
template <int kUnits> struct Seen {
    unsigned bits[kLaneKeys<kUnits>];
    int units;
    // Of key 8 n + i.
    __device__ __forceinline__ bool operator()(int n, int i) const { return bits[n / 4] >> (n % 4 * 8 + i) & 1; }
};

// What is known of a tile before the position is. `all`: how many units there are.
template <int kUnits>
__device__ __forceinline__ void plan_tile(Tile<kUnits>& tile, const Cache& cache, int first, int splits, int all, int warp, int lane) {
    const int ring_units = units_of(cache.ring), dims = warp * kWarpDims + lane % 4 * (warp != kRotaryWarp ? 16 : 32);
#pragma unroll
    for (int i = 0; i < kUnits; i++)  // of a unit that is not there the last one is read
        tile.keys[i] = opaque((min(first + i * splits, all - 1) < ring_units ? cache.window_values : cache.entry_values) + dims);
#pragma unroll
    for (int h = 0; h < kLaneKeys<kUnits>; h++) {
        const int mine = 2 * h + lane / kUnit, unit = min(first + mine * splits, all - 1);
        tile.in_ring[h] = unit < ring_units;
        tile.number[h] = (tile.in_ring[h] ? unit : unit - ring_units) * kUnit + lane % kUnit;
        tile.row[h] = min(tile.number[h], (tile.in_ring[h] ? cache.ring : cache.entries) - 1);
        tile.scales[h] = opaque((tile.in_ring[h] ? cache.window_scales : cache.entry_scales) + warp);
        if (mine >= kUnits || first + mine * splits >= all) tile.number[h] = kNone;
    }
}

// From key g of a tile's first unit to key 8 n + g, units `splits` apart.
__device__ __forceinline__ int64_t row_offset(int n, int splits) {
    return int64_t(n / 2 * kUnit * kKeyBytes) * splits + n % 2 * 8 * kKeyBytes;
}

// Asks for the names of selected entries.
template <int kUnits> __device__ __forceinline__ void load_names(Tile<kUnits>& tile, const Cache& cache, int token) {
    if (cache.top_k)
#pragma unroll
        for (int h = 0; h < kLaneKeys<kUnits>; h++)
            if (!tile.in_ring[h]) tile.row[h] = cache.selected[token * cache.top_k + tile.row[h]];
}

// Asks for the keys of a tile, whether the token sees them or not: what rows hold that no token has does not matter.
template <int kUnits> __device__ __forceinline__ void load_tile(Tile<kUnits>& tile, char* values, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < kLaneKeys<kUnits>; h++)
        if (tile.row[h] < 0) tile.row[h] = 0, tile.number[h] = kNone;
    const auto key = [&](int n) {
        return tile.keys[n / 2] + uint64_t(uint32_t(__shfl_sync(~0u, tile.row[n / 4], n % 4 * 8 + g))) * kKeyBytes;
    };
    if (warp != kRotaryWarp) {
#pragma unroll
        for (int n = 0; n < 2 * kUnits; n++) tile.raw[n] = *reinterpret_cast<const uint4*>(key(n));
#pragma unroll
        for (int h = 0; h < kLaneKeys<kUnits>; h++) tile.mark[h] = tile.scales[h][uint64_t(uint32_t(tile.row[h])) * kScaleBytes];
    } else {
#pragma unroll
        for (int h = 0; h < kLaneKeys<kUnits>; h++) tile.mark[h] = 127;  // 2^0
#pragma unroll
        for (int n = 0; n < 2 * kUnits; n++) {
            const uint8_t* from = key(n);
            cp_async_16(values + n / 2 * kUnitBytes + place(n % 2 * 8 + g, 2 * t), from);
            cp_async_16(values + n / 2 * kUnitBytes + place(n % 2 * 8 + g, 2 * t + 1), from + 16);
        }
        cp_async_commit();
    }
}

// A later tile, in one step. Nearly always it is whole units of entries, all of them without a name: then the rows of a unit follow each
// other, and 50 instructions do what would take 180.
template <int kUnits>
__device__ __forceinline__ void load_next(Tile<kUnits>& tile, const Cache& cache, int first, int splits, int all, int token, char* values,
                                          int warp, int lane) {
    const int unit = first - units_of(cache.ring);  // among the entries'
    if (cache.top_k || unit < 0 || (unit + (kUnits - 1) * splits + 1) * kUnit > cache.entries) {
        plan_tile(tile, cache, first, splits, all, warp, lane);
        load_names(tile, cache, token);
        load_tile(tile, values, warp, lane);
        return;
    }
    const int g = lane / 4, t = lane % 4;
    const int dims = warp * kWarpDims + t * (warp != kRotaryWarp ? 16 : 32);
    const uint8_t* key = cache.entry_values + int64_t(unit * kUnit + g) * kKeyBytes + dims;
    const uint8_t* scale = cache.entry_scales + warp;
#pragma unroll
    for (int h = 0; h < kLaneKeys<kUnits>; h++) {
        tile.in_ring[h] = false;
        tile.number[h] = (unit + (2 * h + lane / kUnit) * splits) * kUnit + lane % kUnit;
        tile.mark[h] = 127;  // 2^0
    }
    if (warp != kRotaryWarp) {
#pragma unroll
        for (int n = 0; n < 2 * kUnits; n++) tile.raw[n] = *reinterpret_cast<const uint4*>(key + row_offset(n, splits));
#pragma unroll
        for (int h = 0; h < kLaneKeys<kUnits>; h++) tile.mark[h] = scale[uint64_t(uint32_t(tile.number[h])) * kScaleBytes];
    } else {
#pragma unroll
        for (int n = 0; n < 2 * kUnits; n++) {
            cp_async_16(values + n / 2 * kUnitBytes + place(n % 2 * 8 + g, 2 * t), key + row_offset(n, splits));
            cp_async_16(values + n / 2 * kUnitBytes + place(n % 2 * 8 + g, 2 * t + 1), key + row_offset(n, splits) + 16);
        }
        cp_async_commit();
    }
}

// Finds out which keys of a tile its token sees, and cuts units off behind the last one.
template <int kUnits> __device__ __forceinline__ Seen<kUnits> see(const Tile<kUnits>& tile, const Cache& cache, int position) {
    const int own = int(unsigned(position) % unsigned(cache.ring));  // unsigned divisions are shorter
    const int oldest = min(cache.window, position + 1);
    Seen<kUnits> seen;
    seen.units = 1;
#pragma unroll
    for (int h = 0; h < kLaneKeys<kUnits>; h++) {
        const int number = tile.number[h], age = own - number + (number > own ? cache.ring : 0);
        const bool closed = cache.top_k || (min(number, cache.entries) + 1) * cache.ratio <= position + 1;
        seen.bits[h] = __ballot_sync(~0u, tile.in_ring[h] ? (number < cache.ring) & (age < oldest) : (number < cache.entries) & closed);
        if (seen.bits[h]) seen.units = 2 * h + (seen.bits[h] >> kUnit ? 2 : 1);
    }
    return seen;
}

// Keys 8 n to 8 n + 7, as pairs of 16-bit values: their products with the warp's dims of q go to `scores`, times the keys' scales; they
// themselves to `values`. Pair i are the thread's dims 2 i and 2 i + 1: chunk 2 t has the even pairs, chunk 2 t + 1 the odd ones, so that
// the two columns which a later mma gives a thread are, with those of the next chunk, four neighbouring dims.
template <int kHeads, bool kIsRotary>
__device__ __forceinline__ void score_keys(char* scores, char* values, const uint32_t (&pair)[8],
                                           const uint32_t (&q)[kRowTiles<kHeads>][4][4], int n, int lane, float2 scale) {
    const int key = n % 2 * 8 + lane / 4, chunk = 2 * (lane % 4);
    float sum[kRowTiles<kHeads>][2][4] = {};  // two, as a product waits 33 cycles for the one before
#pragma unroll
    for (int j = 0; j < 4; j++) {  // registers as they are stored
        const uint32_t b[2] = {pair[j % 2 * 4 + j / 2], pair[j % 2 * 4 + j / 2 + 2]};
#pragma unroll
        for (int r = 0; r < kRowTiles<kHeads>; r++) {
            if (kIsRotary) mma_bf16(sum[r][j % 2], q[r][j], b);
            else mma_f16(sum[r][j % 2], q[r][j], b);
        }
    }
    *reinterpret_cast<uint4*>(values + n / 2 * kUnitBytes + place(key, chunk)) = uint4{pair[0], pair[2], pair[4], pair[6]};
    *reinterpret_cast<uint4*>(values + n / 2 * kUnitBytes + place(key, chunk + 1)) = uint4{pair[1], pair[3], pair[5], pair[7]};
#pragma unroll
    for (int r = 0; r < kRowTiles<kHeads>; r++) {
        float product[kLaneScores<kHeads> / 4];
#pragma unroll
        for (int i = 0; i < kLaneScores<kHeads> / 4; i++) product[i] = (sum[r][0][i] + sum[r][1][i]) * (i % 2 ? scale.y : scale.x);
        store(reinterpret_cast<float*>(scores + n * kOctetScores<kHeads> + (32 * r + lane) * kLaneScores<kHeads>), product);
    }
}

// The scales of a tile for one warp: as floats, for scores; and relative to the largest exponent so far, as f16, for weights. A weight of 1
// loses bits only where its key's scale is below 2^-14 of the largest, and is 0 below 2^-24. Returns the factor for what was summed up
// relative to the old exponent.
template <int kUnits>
__device__ __forceinline__ float keep_scales(char* scales, Tile<kUnits>& tile, const Seen<kUnits>& seen, unsigned& exponent, int lane) {
    unsigned largest = exponent;
    bool spoilt = false;
#pragma unroll
    for (int h = 0; h < kLaneKeys<kUnits>; h++) {
        const bool is = seen.bits[h] >> lane & 1;
        spoilt |= !is & (tile.mark[h] == 255);
        tile.mark[h] = is ? tile.mark[h] : 0;
        largest = max(largest, tile.mark[h]);
    }
    largest = __reduce_max_sync(~0u, largest);
    const auto power = [](int exponent) { return __uint_as_float(max(exponent, 0) << 23); };  // 2^(exponent - 127), or 0
#pragma unroll
    for (int h = 0; h < kLaneKeys<kUnits>; h++) {
        const unsigned mark = tile.mark[h];
        const float scale = mark == 255 ? NAN : power(mark), relative = mark == 255 ? NAN : power(int(127 + mark - largest));
        reinterpret_cast<float*>(scales)[32 * h + lane] = scale;
        reinterpret_cast<uint16_t*>(scales + kRelative<kUnits>)[32 * h + lane] = static_cast<uint16_t>(pack_f16(relative, 0.0f));
    }
    if (__any_sync(~0u, spoilt))  // a weight of 0 would not make a NaN harmless; a code is NaN only where the scale is
#pragma unroll
        for (int n = 0; n < 2 * kUnits; n++) {
            const unsigned mask = seen(n, lane / 4) ? ~0u : 0;
            tile.raw[n].x &= mask, tile.raw[n].y &= mask, tile.raw[n].z &= mask, tile.raw[n].w &= mask;
        }
    const float grown = power(int(127 + exponent - largest));
    exponent = largest;
    __syncwarp();
    return grown;
}

// e4m3 is exact in f16, and no scale is needed yet: a score is multiplied by it, and a weight before it meets the value.
template <int kHeads, int kUnits>
__device__ __forceinline__ void score_plain_tile(char* scores, char* values, const char* scales, const Tile<kUnits>& tile,
                                                 const uint32_t (&q)[kRowTiles<kHeads>][4][4], int units, int lane) {
#pragma unroll
    for (int n = 0; n < 2 * kUnits; n++) {
        if (n / 2 >= units) break;
        const uint32_t word[4] = {tile.raw[n].x, tile.raw[n].y, tile.raw[n].z, tile.raw[n].w};
        uint32_t pair[8];
#pragma unroll
        for (int i = 0; i < 8; i++) pair[i] = e4m3x2_to_f16x2(static_cast<uint16_t>(word[i / 2] >> i % 2 * 16));
        score_keys<kHeads, false>(scores, values, pair, q, n, lane, reinterpret_cast<const float2*>(scales)[4 * n + lane % 4]);
    }
}

template <int kHeads, int kUnits>
__device__ __forceinline__ void score_rotary_tile(char* scores, char* values, const Seen<kUnits>& seen,
                                                  const uint32_t (&q)[kRowTiles<kHeads>][4][4], int lane) {
#pragma unroll
    for (int n = 0; n < 2 * kUnits; n++) {
        if (n / 2 >= seen.units) break;
        const int key = n % 2 * 8 + lane / 4, chunk = 2 * (lane % 4);
        const bool is = seen(n, lane / 4);  // as in keep_scales
        const uint4 low = *reinterpret_cast<const uint4*>(values + n / 2 * kUnitBytes + place(key, chunk));
        const uint4 high = *reinterpret_cast<const uint4*>(values + n / 2 * kUnitBytes + place(key, chunk + 1));
        const uint32_t pair[8] = {is ? low.x : 0,  is ? low.y : 0,  is ? low.z : 0,  is ? low.w : 0,
                                  is ? high.x : 0, is ? high.y : 0, is ? high.z : 0, is ? high.w : 0};
        score_keys<kHeads, true>(scores, values, pair, q, n, lane, {1.0f, 1.0f});
    }
}

// The softmax so far of heads warp, warp + 8, ...: the largest score (unscaled) in every lane, the sum of weights in parts.
template <int kHeads> struct Running {
    float top[kHeads / 8], sum[kHeads / 8];
};

// The largest of a warp's numbers: one instruction, on integers of the same order.
__device__ __forceinline__ float warp_max(float x) {
    const int bits = __float_as_int(x), top = __reduce_max_sync(~0u, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(top ^ (top >> 31 & 0x7fffffff));
}

// Adds the warps' parts of the scores up, for a warp's heads and all keys of the tile: lane (n, t) has keys 8 n + 2 t and the next and, of
// more than 64 keys, those 64 further. Leaves weights relative to the largest score so far, in f16 and in bf16, and the factors for what
// was summed before.
template <int kHeads, int kUnits, bool kOnce>
__device__ __forceinline__ void weigh_tile(Running<kHeads>& running, char* shared, const Seen<kUnits>& seen, int warp, int lane) {
    using At = Layout<kHeads, kUnits>;
    constexpr int kMine = kHeads / 8, kPasses = (kUnits + 3) / 4;
    const int n = lane / 4, t = lane % 4;
    float score[kPasses][2 * kMine], top[kMine], from[kMine];
    const auto add_up = [&](int pass) {
        // A lane without keys reads what another has.
        const char* parts = shared + At::kScores + min(n + 8 * pass, 2 * seen.units - 1) * kOctetScores<kHeads> +
                            (4 * warp + t) * kLaneScores<kHeads>;
        float sum[2 * kMine] = {};
#pragma unroll
        for (int r = 0; r < kRowTiles<kHeads>; r++)
#pragma unroll
            for (int w = 0; w < kWarps; w++) {
                constexpr int kOfTile = kLaneScores<kHeads> / 4;
                float part[kOfTile];
                load(part, reinterpret_cast<const float*>(parts + w * kWarpScores<kHeads> + 32 * r * kLaneScores<kHeads>));
#pragma unroll
                for (int i = 0; i < kOfTile; i++) sum[kOfTile * r + i] = w ? sum[kOfTile * r + i] + part[i] : part[i];
            }
        const unsigned low = seen.bits[2 * pass], high = 2 * pass + 1 < kLaneKeys<kUnits> ? seen.bits[2 * pass + 1] : 0;
        const unsigned bits = (lane < 16 ? low : high) >> 2 * (lane % 16);
#pragma unroll
        for (int i = 0; i < 2 * kMine; i++) score[pass][i] = bits >> i % 2 & 1 ? sum[i] : -INFINITY;
    };
    add_up(0);
#pragma unroll
    for (int h = 0; h < kMine; h++) top[h] = fmaxf(score[0][2 * h], score[0][2 * h + 1]);
    if (kPasses > 1 && seen.units > 4) {
        add_up(kPasses - 1);
#pragma unroll
        for (int h = 0; h < kMine; h++) top[h] = fmaxf(top[h], fmaxf(score[kPasses - 1][2 * h], score[kPasses - 1][2 * h + 1]));
    }
#pragma unroll
    for (int h = 0; h < kMine; h++) {
        top[h] = warp_max(kOnce ? top[h] : fmaxf(running.top[h], top[h]));
        from[h] = top[h] == -INFINITY ? 0.0f : top[h];  // no key yet: all weights are exp(-inf) = 0
        if (!kOnce) {
            const float factor = exp2f((running.top[h] - from[h]) * kExp2Scale);
            running.sum[h] *= factor;
            if (lane == 0) reinterpret_cast<float*>(shared + At::kFactors)[warp + 8 * h] = factor;
        }
        running.top[h] = top[h];
    }
    char* weights = shared + At::kWeights + warp * kWeightStride<kUnits> + 4 * lane;
    const auto weigh = [&](int pass) {
#pragma unroll
        for (int h = 0; h < kMine; h++) {
            const float p[2] = {exp2f((score[pass][2 * h] - from[h]) * kExp2Scale),
                                exp2f((score[pass][2 * h + 1] - from[h]) * kExp2Scale)};
            running.sum[h] = kOnce && pass == 0 ? p[0] + p[1] : running.sum[h] + (p[0] + p[1]);
            *reinterpret_cast<uint32_t*>(weights + 8 * h * kWeightStride<kUnits> + 128 * pass) = pack_f16(p[0], p[1]);
            *reinterpret_cast<uint32_t*>(weights + (kHeads + 8 * h) * kWeightStride<kUnits> + 128 * pass) = pack_bf16(p[0], p[1]);
        }
    };
    weigh(0);
    if (kPasses > 1 && seen.units > 4) weigh(kPasses - 1);
}

// out += weights . values, for the warp's dims. `relative`: the keys' scales as f16.
template <int kHeads, int kUnits, bool kIsRotary>
__device__ __forceinline__ void add_values(float (&out)[kRowTiles<kHeads>][8][4], const char* weights, const char* values,
                                           const char* relative, int units, int lane) {
    const int row = lane % 16, chunk = lane / 16;
#pragma unroll
    for (int unit = 0; unit < kUnits; unit++) {
        if (unit >= units) break;
        uint32_t p[kRowTiles<kHeads>][4], v[4];
#pragma unroll
        for (int r = 0; r < kRowTiles<kHeads>; r++) {
            ldmatrix_x4(p[r], weights + (16 * r + lane % (kHeads < 16 ? kHeads : 16)) * kWeightStride<kUnits> + 16 * (2 * unit + chunk));
            if (!kIsRotary) {
                const uint32_t* scale = reinterpret_cast<const uint32_t*>(relative) + 8 * unit + lane % 4;
                p[r][0] = mul_f16x2(p[r][0], scale[0]), p[r][2] = mul_f16x2(p[r][2], scale[4]);
                if (kHeads >= 16) p[r][1] = mul_f16x2(p[r][1], scale[0]), p[r][3] = mul_f16x2(p[r][3], scale[4]);
            }
        }
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            ldmatrix_x4_trans(v, values + unit * kUnitBytes + place(row, n + chunk));
#pragma unroll
            for (int r = 0; r < kRowTiles<kHeads>; r++) {
                if (kIsRotary) mma_bf16(out[r][n], p[r], {v[0], v[1]}), mma_bf16(out[r][n + 1], p[r], {v[2], v[3]});
                else mma_f16(out[r][n], p[r], {v[0], v[1]}), mma_f16(out[r][n + 1], p[r], {v[2], v[3]});
            }
        }
    }
    __syncwarp();  // the next tile's values take their place
}

// fp32 q of heads warp, warp + 8, ...: the lane's dims 4 lane + 128 i and the next three, and the angles of those with i = 3.
template <int kHeads> struct Query {
    float v[kHeads / 8][16], cos[2], sin[2];
};

// `q`: of the block's first head, of `heads` that there are; heads that there are not are like the last one.
template <int kHeads>
__device__ __forceinline__ void load_query(Query<kHeads>& query, const float* q, int heads, const float* cos, const float* sin, int warp,
                                           int lane) {
#pragma unroll
    for (int h = 0; h < kHeads / 8; h++)
#pragma unroll
        for (int i = 0; i < 16; i += 4)
            load(reinterpret_cast<float(&)[4]>(query.v[h][i]), q + min(warp + 8 * h, heads - 1) * kDim + 4 * lane + 32 * i);
    query.cos[0] = query.cos[1] = 1.0f, query.sin[0] = query.sin[1] = 0.0f;  // plain dims turn by nothing
    if (lane >= 16) load(query.cos, cos + 2 * lane - 32), load(query.sin, sin + 2 * lane - 32);
}

// Leaves q normed, rotated, times kQueryFactor and rounded to bf16 in shared memory (f16 for dims that meet f16, which changes no value
// above 2^-28), in the order in which fetch_query's A operands have it.
template <int kHeads> __device__ __forceinline__ void norm_query(char* queries, Query<kHeads>& query, float eps, int warp, int lane) {
    float sum[kHeads / 8][2] = {};
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int h = 0; h < kHeads / 8; h++) sum[h][i % 2] += query.v[h][i] * query.v[h][i];
#pragma unroll
    for (int h = 0; h < kHeads / 8; h++) sum[h][0] += sum[h][1];
#pragma unroll
    for (int offset = 16; offset; offset /= 2)
#pragma unroll
        for (int h = 0; h < kHeads / 8; h++) sum[h][0] += __shfl_xor_sync(~0u, sum[h][0], offset);
    // Of 64 dims, lane 4 t + u (and 16 more: the next 64) has pairs 2 u and 2 u + 1 of score_keys' thread t.
    const int chunk = lane % 4 ^ warp ^ lane / 16 * 4;
    char* row = queries + warp * kQueryBytes + lane / 16 * 128 + lane % 16 / 4 * 4;
#pragma unroll
    for (int h = 0; h < kHeads / 8; h++) {
        float(&v)[16] = query.v[h];
        const float scale = rsqrtf(sum[h][0] / kDim + eps) * kQueryFactor;
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] *= scale;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float a = v[12 + 2 * i], b = v[13 + 2 * i];
            v[12 + 2 * i] = a * query.cos[i] - b * query.sin[i], v[13 + 2 * i] = a * query.sin[i] + b * query.cos[i];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t pair = pack_bf16(v[2 * i], v[2 * i + 1]), same = pack_f16(bf16_lo(pair), bf16_hi(pair));
            *reinterpret_cast<uint32_t*>(row + 8 * h * kQueryBytes + i / 2 * 256 + ((chunk ^ i % 2 * 4) << 4)) =
                i >= 6 && lane >= 16 ? pair : same;
        }
    }
}

// The A operands of the block's heads and the warp's dims, for score_keys: of product j, thread t's first pair is chunk u's, where j / 2
// says which half of the pairs, and u = j % 2 * 2; its second pair chunk u + 1's.
template <int kHeads>
__device__ __forceinline__ void fetch_query(uint32_t (&q)[kRowTiles<kHeads>][4][4], const char* queries, int warp, int lane) {
    const int head = lane % (kHeads < 16 ? kHeads : 16);  // 8 heads are in both halves of the rows; what comes of the second is not used
#pragma unroll
    for (int r = 0; r < kRowTiles<kHeads>; r++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            ldmatrix_x4(q[r][j], queries + (16 * r + head) * kQueryBytes + warp * 128 +
                                     (((j / 2 * 4 + j % 2 * 2 + lane / 16) ^ head % 8 ^ warp % 2 * 4) << 4));
}

// kOnce: a split has one tile at most. Keys of the first tile are asked for before the position is known, those of a later one when the
// tile in front of it has been scored. Every split leaves a result, also if it sees no key.
template <int kHeads, int kUnits, bool kOnce>
__global__ void __launch_bounds__(kThreads, kHeads == 32 ? 1 : 2)
attention_split(const float* q, const float* cos, const float* sin, const int64_t* positions, Cache cache, __nv_bfloat16* partial,
                float2* stats, int heads, float eps) {
    using At = Layout<kHeads, kUnits>;
    constexpr int kMine = kHeads / 8, kTiles = kRowTiles<kHeads>;
    DYN_SMEM(char, shared);
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);  // the same in all lanes, which the compiler cannot know otherwise
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int split = blockIdx.x, splits = gridDim.x, token = blockIdx.z, head = blockIdx.y * kHeads, row = token * heads + head;
    char* scores = shared + At::kScores + warp * kWarpScores<kHeads>;
    char *scales = shared + At::kScales + warp * At::kWarpScales, *values = shared + At::kValues + warp * kWarpBytes;
    const int64_t rings_before = int64_t(token / kRingTokens) * cache.ring;
    cache.window_values += rings_before * kKeyBytes, cache.window_scales += rings_before * kScaleBytes;
    int all = units_of(cache.ring) + units_of(cache.entries);
    Query<kHeads> asked;
    Tile<kUnits> tile;
    plan_tile(tile, cache, split, splits, all, warp, lane);
    grid_dependency_launch();
    if (splits) grid_dependency_wait();  // always; without a branch ptxas puts the arithmetic above behind the wait
    const int position = int(positions[token]);
    const auto store_stats = [&](int h, float top, float sum) {  // of head warp + 8 h in lane 0, of the next of the warp's in lane 16
        const int mine = warp + 8 * (h + lane / 16);
        if (lane % 16 == 0 && mine < kHeads && head + mine < heads) stats[(row + mine) * splits + split] = {top, sum};
    };
    load_names(tile, cache, token);
    load_query(asked, q + row * kDim, heads - head, cos + token * (kRotary / 2), sin + token * (kRotary / 2), warp, lane);
    load_tile(tile, values, warp, lane);
    norm_query(shared + At::kQueries, asked, eps, warp, lane);
    Seen<kUnits> seen = see(tile, cache, position);
    __syncthreads();
    if (!kOnce && cache.ratio) all = min(all, units_of(cache.ring) + units_of(int(unsigned(position + 1) / unsigned(cache.ratio))));
    unsigned exponent = 0;
    float out[kTiles][8][4] = {};
    Running<kHeads> running;
#pragma unroll
    for (int h = 0; h < kMine; h++) running.top[h] = -INFINITY, running.sum[h] = 0.0f;
    uint32_t query[kTiles][4][4];
    fetch_query<kHeads>(query, shared + At::kQueries, warp, lane);
    for (int first = split;;) {
        const float grown = keep_scales(scales, tile, seen, exponent, lane);
        if (warp != kRotaryWarp) {
            score_plain_tile<kHeads>(scores, values, scales, tile, query, seen.units, lane);
        } else {
            cp_async_wait<0>();
            score_rotary_tile<kHeads>(scores, values, seen, query, lane);
        }
        first += kUnits * splits;
        const bool more = !kOnce && first < all;
        char* other = values;
        if (more) {  // into the same registers: two more phases follow, in which the keys arrive
            if (warp == kRotaryWarp) other = shared + (2 * kRotaryWarp + 1) * kWarpBytes - (values - shared);  // the other buffer
            load_next(tile, cache, first, splits, all, token, other, warp, lane);
        }
        __syncthreads();
        weigh_tile<kHeads, kUnits, kOnce>(running, shared, seen, warp, lane);
        __syncthreads();
        if (!kOnce) {
            const float* factors = reinterpret_cast<const float*>(shared + At::kFactors) + g;
#pragma unroll
            for (int r = 0; r < kTiles; r++) {
                const float factor[2] = {factors[16 * r] * grown, kHeads >= 16 ? factors[16 * r + 8] * grown : 0.0f};
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) out[r][n][i] *= factor[i / 2];
            }
        }
        const char* weights = shared + At::kWeights;
        const char* relative = scales + kRelative<kUnits>;
        if (warp != kRotaryWarp) add_values<kHeads, kUnits, false>(out, weights, values, relative, seen.units, lane);
        else add_values<kHeads, kUnits, true>(out, weights + kHeads * kWeightStride<kUnits>, values, relative, seen.units, lane);
        if (!more) break;
        values = other, seen = see(tile, cache, position);
    }

#pragma unroll
    for (int h = 0; h < kMine; h += 2) {
        const int further = h + 1 < kMine ? h + 1 : h;
        const float other_sum = running.sum[further], other_top = running.top[further];
        float sum = (lane < 16 ? running.sum[h] : other_sum) + __shfl_xor_sync(~0u, lane < 16 ? other_sum : running.sum[h], 16);
#pragma unroll
        for (int offset = 8; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        store_stats(h, lane < 16 ? running.top[h] : other_top, sum);
    }
    const float factor = __uint_as_float(exponent << 23);
    partial += ((row + g) * splits + split) * kDim + threadIdx.x / 32 * kWarpDims + 4 * t;
#pragma unroll
    for (int h = 0; h < kMine; h++)
        if (head + g + 8 * h < heads)
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                const float(&low)[4] = out[h / 2][n], (&high)[4] = out[h / 2][n + 1];
                store(partial + 8 * h * splits * kDim + 8 * n,
                      {low[h % 2 * 2] * factor, low[h % 2 * 2 + 1] * factor, high[h % 2 * 2] * factor, high[h % 2 * 2 + 1] * factor});
            }
}

// One block a head: out = (sum_i e_i partial_i) / (sum_i e_i sum_i + e_sink), e = exp(. - the largest), then the inverse RoPE. Group k of
// 64 threads, which have 8 dims each, adds splits k, k + 4, ... up, of which kAhead are on their way at a time; then a thread has one pair
// of dims.
template <int kAhead>
__global__ void __launch_bounds__(kMergeThreads) attention_merge(const __nv_bfloat16* partial, const float2* stats, const float* sink,
                                                                 const float* cos, const float* sin, __nv_bfloat16* out, int heads,
                                                                 int splits) {
    DYN_SMEM(float, sums);  // [kMergeGroups, kDim]
    const int head = blockIdx.x, token = blockIdx.y, row = token * heads + head, lane = threadIdx.x % 32;
    const int group = threadIdx.x / (kDim / 8), column = threadIdx.x % (kDim / 8) * 8, pair = 2 * threadIdx.x;
    const float of_sink = sink[head];  // a weight
    const auto* values = reinterpret_cast<const uint4*>(partial + (row * splits + group) * kDim + column);  // of split `group`
    const float2* of_splits = stats + row * splits + lane;
    grid_dependency_launch();
    grid_dependency_wait();
    float2 of_split[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
    if (lane < splits) of_split[0] = of_splits[0];
    if (lane + 32 < splits) of_split[1] = of_splits[32];
    uint4 eight[kAhead] = {};
    const auto load_splits = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int split = first + group + kMergeGroups * i;
            eight[i] = uint4{0, 0, 0, 0};
            if (split < splits) eight[i] = values[(first + kMergeGroups * i) * (kDim / 8)];
        }
    };
    float c = 1.0f, s = 0.0f;
    if (splits) {  // always, on their way while the weights are found; as a branch, or ptxas makes three turns of it
        load_splits(0);
        if (pair >= kPlain) c = cos[token * (kRotary / 2) + (pair - kPlain) / 2], s = sin[token * (kRotary / 2) + (pair - kPlain) / 2];
    }

    const float top = warp_max(fmaxf(of_split[0].x, of_split[1].x));
    const float weight[2] = {exp2f((of_split[0].x - top) * kExp2Scale), exp2f((of_split[1].x - top) * kExp2Scale)};
    float total = weight[0] * of_split[0].y + weight[1] * of_split[1].y;
#pragma unroll
    for (int offset = 16; offset; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
    total += expf(of_sink - top * kScale);  // infinity if the sink is so much larger, and then all of the output is 0
    float sum[8] = {};
    const auto add_splits = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int split = first + group + kMergeGroups * i;
            const float w = __shfl_sync(~0u, split < 32 ? weight[0] : weight[1], split % 32);
            const uint32_t words[4] = {eight[i].x, eight[i].y, eight[i].z, eight[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) sum[2 * j] += w * bf16_lo(words[j]), sum[2 * j + 1] += w * bf16_hi(words[j]);
        }
    };
    add_splits(0);
    for (int first = kMergeGroups * kAhead; first < splits; first += kMergeGroups * kAhead) load_splits(first), add_splits(first);
    store(sums + group * kDim + column, reinterpret_cast<float(&)[4]>(sum[0]));
    store(sums + group * kDim + column + 4, reinterpret_cast<float(&)[4]>(sum[4]));
    __syncthreads();
    float o[2] = {};
#pragma unroll
    for (int k = 0; k < kMergeGroups; k++) {
        float two[2];
        load(two, sums + k * kDim + pair);
        o[0] += two[0], o[1] += two[1];
    }
    const float scale = reciprocal(total), a = o[0] * scale, b = o[1] * scale;
    store(out + row * kDim + pair, {a * c + b * s, b * c - a * s});
}

// q [tokens, heads, 512], sink [heads], cos and sin [tokens, 32] fp32; positions [tokens]; values [rows, 576] and scales [rows, 8] of the
// window's `ring` rows, for each 8 tokens a ring of their own, and of `entries` entries (ratio 0: none); selected [tokens, top_k] (top_k 0: all entries). Working space: partial
// [tokens, heads, splits, 512] bf16 and stats [tokens, heads, splits, 2], up to 64 splits. out [tokens, heads, 512] bf16. All but
// positions, scales and selected are 16-byte aligned. A block has `block_heads` heads and takes `tile` units of 16 keys at a time: 8 and 2,
// 16 and 2 or 5 if that is all of a split, else 32 and 4.
extern "C" int attention(const float* q, const float* sink, const float* cos, const float* sin, const int64_t* positions,
                         const uint8_t* window_values, const uint8_t* window_scales, const uint8_t* entry_values,
                         const uint8_t* entry_scales, const int* selected, __nv_bfloat16* partial, float* stats, __nv_bfloat16* out,
                         int tokens, int heads, int ring, int window_size, int entries, int ratio, int top_k, int splits, int block_heads,
                         int tile, float eps, cudaStream_t stream) {
    const Cache cache = {window_values, window_scales, entry_values, entry_scales, selected, ring, window_size, top_k ? top_k : entries,
                         ratio, top_k};
    const int units = units_of(ring) + units_of(cache.entries), once = block_heads != 32;
    if (splits < 1 || splits > kMaxSplits || (once && units > tile * splits)) return cudaErrorInvalidValue;
    float2* pairs = reinterpret_cast<float2*>(stats);
    const auto launch = [&](auto kernel, int bytes) {
        LAUNCH(kernel, dim3(splits, (heads + block_heads - 1) / block_heads, tokens), dim3(kThreads), bytes, stream, q, cos, sin, positions,
               cache, partial, pairs, heads, eps);
    };
    if (block_heads == 8 && tile == 2) launch(attention_split<8, 2, true>, Layout<8, 2>::kBytes);
    else if (block_heads == 16 && tile == 2) launch(attention_split<16, 2, true>, Layout<16, 2>::kBytes);
    else if (block_heads == 16 && tile == 5) launch(attention_split<16, 5, true>, Layout<16, 5>::kBytes);
    else if (block_heads == 32 && tile == 4) launch(attention_split<32, 4, false>, Layout<32, 4>::kBytes);
    else return cudaErrorInvalidValue;
    const auto merge = splits <= 6 * kMergeGroups ? attention_merge<6> : attention_merge<9>;  // 33 splits in one round trip
    LAUNCH(merge, dim3(heads, tokens), dim3(kMergeThreads), 4 * kMergeGroups * kDim, stream, partial, pairs, sink, cos, sin, out, heads,
           splits);
    return cudaGetLastError();
}
