// moe: the chosen experts of 1 to 8 tokens and the shared one (dsv4/ops/experts.py, moe_ref), in two launches on the weight stream.
//
//   up     w1 and w3, in tiles of 8 rows of each, so that one lane has gate and up: clamp, silu(gate) * up * routing weight, rounded to
//          bf16, to `hidden` [token, 1 + top_k, inner], place 0 for the shared expert, with a row of zeros behind
//   down   w2 of each expert with its own row of hidden. Its sums are left in parts, which the reader adds in their order and rounds once:
//          those of the shared expert, then those of the chosen experts by ascending number.
//
// up: a block has whole tiles, a part of the shared expert's and of those of all distinct chosen experts, such that their bytes together
// are even (10 of Pro's tiles a block; half a tile is 4 %). down: a block has a contiguous part of the shared expert's items, tile by tile,
// and one of the chosen experts', by tile and then by expert. A tile may be two blocks', then each leaves a part, as in linear.cu: 448
// tiles (Pro) are 1.7 a block, where whole ones would be 2 for some, 18 % above the mean. Four parts then, else two.
//
// Every weight of a distinct expert is read once, whatever number of tokens chose it: the tokens are the 8 columns of operand B, in `down`
// with zeros for tokens that did not choose. The shared expert does not depend on the choice: its items come first in every warp and fill
// the ring before the wait, while the router runs. The choice is looked up by one warp while the others multiply these. `up` launches `down`
// only behind its own wait, so that `down` may read the choice, and have those experts' weights on the way, while `up` ends.
// A warp of `down` has 8 items between two of its own, so mostly another expert each time: what they are is worked out once, in a table of
// a tile's items. Instructions count: FP4 takes about as long to expand as to arrive, and of the 805 an item that `down` had, 532 are the
// product's; with some 110 beside these, by count, the same experts of Flash took 31.9 us instead of 33.3 (docs/measurements.md).
// Memory for many tokens' sums is bounded by rounds over the chosen experts' tiles; one token has one round.
//
// Bytes, one token (NVFP4 experts, FP8 shared): Pro up 192.8 MB, 42.8 us at 4.5 TB/s, and down 96.3, 21.4; Flash 73.4 and 36.7 MB.
// Measured on an H200, the experts alone: Pro 37.8 + 22.4 us (docs/measurements.md).
// One launch for both, with a barrier of all blocks between (the ring full of w2 meanwhile), was tried: 63.1 us where two were 62.7.
// What is there early is not used up faster, and the barrier waits for the slowest block, 5 us behind the median.
#include "stream.cuh"

constexpr int kMaxTopK = 8, kMaxExperts = 384, kMaxChosen = kMaxTokens * kMaxTopK;
constexpr int kMaxBytes = 112 * 1024;  // of shared memory a block, so that two fit an SM

// The packed weights of one kind: expert e at weights + e * bytes, tiles of `items` items.
struct Matrix {
    const char* weights;
    int64_t bytes;
    int format, items, item_bytes, tile_bytes;
};

struct Plan {
    Matrix shared, routed;
    const __nv_bfloat16* x;        // up: x [tokens, columns]; down: hidden
    void* out;                     // up: hidden; down: out fp32 [parts, tokens, rows]
    const int* chosen;             // [tokens, top_k]
    const float* weights;          // [tokens, top_k]
    const float* factors;          // [experts + 1, 3]: of w1, w3, w2; the shared expert's behind the others
    int tiles, columns, rows, inner, tokens, top_k, experts;
    float limit;
    int blocks, parts;
    int shared_cost, routed_cost;  // of a tile, in any unit
    int at_once;                   // chosen experts' tiles of a block that are summed at a time
    Layout ring, first, rest;      // the streams; the pieces of the shared expert's tiles and of a round's
    int first_at, rest_at, tile_at;
};
constexpr int kDepth = 2;  // of the rings

// A block's items of the shared expert (0) and of the chosen ones (1), which are known with their number. at_*: the first one's expert (up:
// of the chosen ones), tile and place in it.
struct Part {
    int begin, end, at_expert, at_tile, at_item;
};

// What a block does. The list of experts: the shared one, then, known after the wait, the distinct chosen ones in ascending order.
struct List {
    uint64_t ready, scaled;      // mbarriers: the chosen ones are known; their factors are there, as the shared one's are from the start
    int may_wait[kWarps];        // of a warp, for `ready`
    Part part[2];
    int count;                   // distinct chosen experts
    int expert[1 + kMaxChosen];  // its number, which for the shared one is that of experts
    int row[1 + kMaxChosen][kMaxTokens];  // where a token's values of the expert are in hidden: those of 0 where it did not choose it
    float weight[1 + kMaxChosen][kMaxTokens];
    float factors[3 * (1 + kMaxChosen)];  // of w1, w3, w2
};

// down: an item of a tile; first those of the shared expert, then those of the chosen experts one after the other.
struct alignas(16) TileItem {
    const char* weights;  // of tile 0
    int expert, column;   // its place in the list; the item's first column
};

constexpr int kRingAt = (sizeof(List) + 127) / 128 * 128;  // the list is in front of the rings

// The first of block `index`' items of the shared expert.
template <bool kDown> __device__ __forceinline__ int shared_begin(const Plan& plan, int index) {
    return kDown ? plan.tiles * plan.shared.items * index / plan.blocks : plan.tiles * index / plan.blocks * plan.shared.items;
}

// The first of its items of the `count` chosen experts. up: such that with the shared ones the cost is even; where the shared ones alone
// may be more than an even part, the tiles are dealt evenly. Both are ascending.
template <bool kDown> __device__ __forceinline__ int routed_begin(const Plan& plan, int index, int count) {
    const int tiles = count * plan.tiles, all = tiles * plan.routed_cost + plan.tiles * plan.shared_cost;
    if (kDown) return int(int64_t(tiles) * plan.routed.items * index / plan.blocks);
    int first = (all * index / plan.blocks - plan.tiles * index / plan.blocks * plan.shared_cost) / plan.routed_cost;
    if (all / plan.blocks < (plan.tiles + plan.blocks - 1) / plan.blocks * plan.shared_cost) first = tiles * index / plan.blocks;
    return first * plan.routed.items;
}

// Where in hidden the token's values of its choice number `place` - 1 are (0: of the shared expert); behind the tokens is the row that is
// 0, for those that did not choose an expert.
__device__ __forceinline__ int hidden_row(const Plan& plan, int token, int place) {
    return (token * (1 + plan.top_k) + place) * plan.inner;
}
__device__ __forceinline__ int zero_row(const Plan& plan) { return hidden_row(plan, plan.tokens, 0); }

struct Stretch {
    const char* items;
    int count, bytes;
};

// A warp's items, every kWarps-th of the block's: first the shared expert's, then the chosen ones'. A stretch of `up` is of one expert. In
// `down`, where neighbours among a warp's items are mostly of two, it is one item.
template <bool kDown> struct Walk {
    const Plan* plan;
    List* list;
    const TileItem* tile_items;  // down: of this part
    bool chosen;
    int expert, tile, item, left;  // the next item's; left: items of the block from there on
    int chosen_items;              // down: of a tile, those of all chosen experts

    __device__ __forceinline__ const Matrix& matrix() const { return chosen ? plan->routed : plan->shared; }
    __device__ __forceinline__ int of_tile() const { return kDown && chosen ? chosen_items : matrix().items; }

    // Brings an item's number that is beyond its tile's items to its tile, and of the chosen ones in `up` to its expert.
    __device__ __forceinline__ void settle() {
        for (; item >= of_tile(); item -= of_tile()) tile++;
        for (; !kDown && chosen && tile >= plan->tiles; expert++) tile -= plan->tiles;
    }

    // From the warp's first item of a part, whose table is `table`. The chosen ones' turns go on where the shared one's items end.
    __device__ __forceinline__ void start(bool of_chosen, const TileItem* table) {
        chosen = of_chosen, tile_items = table;
        const Part& to = list->part[chosen];
        const int turn = (warp_index() - chosen * (list->part[0].end - list->part[0].begin)) & (kWarps - 1);
        expert = to.at_expert, tile = to.at_tile, item = to.at_item + turn, left = to.end - to.begin - turn;
        if (kDown && chosen) chosen_items = list->count * plan->routed.items;
        settle();
    }
    __device__ __forceinline__ void start_chosen() { start(true, tile_items + plan->shared.items); }

    // The next stretch of the part that the walk is in.
    __device__ __forceinline__ bool next_here(Stretch& to) {
        if (left <= 0) return false;
        const Matrix& matrix = this->matrix();
        to.bytes = matrix.item_bytes;
        if (kDown) {
            to.items = tile_items[item].weights + int64_t(tile) * matrix.tile_bytes, to.count = 1;
            left -= kWarps, item += kWarps;
        } else {
            to.items = matrix.weights + int64_t(tile) * matrix.tile_bytes + item * matrix.item_bytes;
            if (chosen) to.items += list->expert[1 + expert] * matrix.bytes;
            to.count = (min((plan->tiles - tile) * matrix.items - item, left) + kWarps - 1) / kWarps;
            left -= to.count * kWarps, item += to.count * kWarps;
            const int more = item / matrix.items;
            tile += more, item -= more * matrix.items;
        }
        settle();
        return true;
    }

    // The next stretch. False behind the last one, and before the wait behind the shared expert's, as the chosen ones are not known.
    __device__ __forceinline__ bool next(Stretch& to) {
        if (next_here(to)) return true;
        if (chosen || !list->may_wait[warp_index()]) return false;
        mbarrier_wait(&list->ready, 0);
        start_chosen();
        return next_here(to);
    }
};

__device__ __forceinline__ void keep_piece(const Plan& plan, List& list, bool chosen, int index, const Sum& sum) {
    (chosen ? plan.rest : plan.first).keep(reinterpret_cast<char*>(&list) + (chosen ? plan.rest_at : plan.first_at), index, sum);
}

// A warp's items of one part as the products see them, up to the tile `end` of the round that begins with tile `first`. `up`: those of one
// expert and tile follow each other.
template <bool kDown> struct Source {
    const Plan& plan;
    List& list;
    Walk<kDown>& walk;
    const __nv_bfloat16* row;  // this lane's token's
    int token, first, end;     // token: this lane's
    int done_expert = 0, done_tile = 0;  // of the item before

    // A tile's number, in `up` counted through the experts.
    __device__ __forceinline__ int unit() const { return walk.expert * plan.tiles + walk.tile; }
    __device__ __forceinline__ bool more() const { return walk.left > 0 && (!walk.chosen || unit() < end); }
    __device__ __forceinline__ int columns() const { return plan.columns; }
    // The item's first column, and this lane's token's values from there on.
    __device__ __forceinline__ const __nv_bfloat16* x(int wide, int& column) {
        column = walk.item * wide;
        return row + column;
    }
    __device__ __forceinline__ bool next() {
        done_expert = walk.expert, done_tile = walk.tile;
        walk.left -= kWarps, walk.item += kWarps;
        walk.settle();
        return walk.tile != done_tile || walk.expert != done_expert || walk.left <= 0;
    }
    __device__ __forceinline__ void done(const Sum& sum) {
        const float* factors = list.factors + 3 * (walk.chosen + done_expert);
        Sum scaled;
#pragma unroll
        for (int i = 0; i < 4; i++) scaled.even[i] = factors[i / 2] * sum.total(i);  // rows 0-7 are w1's, rows 8-15 w3's
        keep_piece(plan, list, walk.chosen, done_expert * plan.tiles + done_tile - first, scaled);
    }
    __device__ __forceinline__ void finish() {}
};

// `down`: those of a tile follow each other, whose sum several experts add to.
template <> struct Source<true> {
    const Plan& plan;
    List& list;
    Walk<true>& walk;
    const __nv_bfloat16* row;  // hidden
    int token, first, end;
    int expert = 0, done_expert = 0, done_tile = 0;  // their places in the list; done_*: of the item before
    int kept = -1;  // the tile of `total`
    Sum total = {};

    __device__ __forceinline__ bool more() const { return walk.left > 0; }
    __device__ __forceinline__ int columns() const { return plan.columns; }
    __device__ __forceinline__ const __nv_bfloat16* x(int, int& column) {
        const TileItem& of = walk.tile_items[walk.item];
        expert = of.expert, column = of.column;
        return row + list.row[expert][token] + column;
    }
    __device__ __forceinline__ bool next() {
        done_expert = expert, done_tile = walk.tile;
        walk.left -= kWarps, walk.item += kWarps;
        walk.settle();
        return true;
    }
    __device__ __forceinline__ void done(const Sum& sum) {
        if (done_tile != kept) {
            finish();
            kept = done_tile, total = Sum();
        }
        const float factor = list.factors[3 * done_expert + 2];
#pragma unroll
        for (int i = 0; i < 4; i++) total.even[i] = fmaf(factor, sum.total(i), total.even[i]);
    }
    __device__ __forceinline__ void finish() {
        if (kept >= 0) keep_piece(plan, list, walk.chosen, kept - first, total);
    }
};

// By one warp: the block's items of `count` chosen experts.
template <bool kDown> __device__ __forceinline__ void deal(const Plan& plan, List& list, int count) {
    const int lane = threadIdx.x % 32, items = plan.routed.items, outer = (kDown ? count : plan.tiles) * items;
    const int bound = routed_begin<kDown>(plan, blockIdx.x + lane % 2, count), end = __shfl_sync(~0u, bound, 1);
    if (lane) return;
    const int first = bound / outer, rest = bound - first * outer, second = kDown ? 0 : rest / items;
    list.count = count, list.part[1] = {bound, end, kDown ? 0 : first, kDown ? first : second, rest - second * items};
}

// By one warp: the list, but for the block's items where they are dealt already. An expert that a token has twice counts once, with both
// weights. A lane has two choices; what it must know of the others comes by shuffles, as every latency here is one behind the wait.
template <bool kDown> __device__ __forceinline__ void make_list(const Plan& plan, List& list) {
    constexpr int kNone = 0x7fffffff;
    const int lane = threadIdx.x % 32, choices = plan.tokens * plan.top_k;
    int id[2], leader[2], expert[2], count = 0;
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = 32 * h + lane;
        id[h] = i >= choices ? kNone : kDown ? load_earlier(plan.chosen + i) : plan.chosen[i];
        weight[h] = kDown || i >= choices ? 0.0f : plan.weights[i];
    }
    if (plan.tokens == 1) {  // nearly always: each expert once
        int before = 0;
        bool twice = false;
        for (int j = 0; j < choices; j++) {
            const int other = __shfl_sync(~0u, id[0], j);
            before += other < id[0], twice |= other == id[0] && j < lane && lane < choices;
        }
        if (!__any_sync(~0u, twice)) {
            const int expert = 1 + before;
            if (lane < choices) {
                list.expert[expert] = id[0], list.weight[expert][0] = weight[0];
                list.row[expert][0] = hidden_row(plan, 0, 1 + lane);
            }
            return;
        }
    }
    const bool many = choices > 32;
    // The first of equal ones leads.
#pragma unroll
    for (int h = 0; h < 2; h++) leader[h] = id[h];
    for (int j = 0; j < choices; j++) {
        const int other = __shfl_sync(~0u, j < 32 ? id[0] : id[1], j % 32);
        if (j < lane && other == id[0]) leader[0] = kNone;
        if (j < 32 + lane && other == id[1]) leader[1] = kNone;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) count += __popc(__ballot_sync(~0u, leader[h] != kNone));
    // Its place: how many leaders have smaller numbers.
    expert[0] = expert[1] = 1;
    for (int j = 0; j < choices; j++) {
        const int other = __shfl_sync(~0u, j < 32 ? leader[0] : leader[1], j % 32);
        expert[0] += other < id[0], expert[1] += other < id[1];
    }
    for (int i = plan.tokens + lane; i < (1 + count) * plan.tokens; i += 32) list.row[i / plan.tokens][i % plan.tokens] = zero_row(plan);
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (h == 1 && !many) break;
        const int i = 32 * h + lane, token = i / plan.top_k, from = token * plan.top_k;
        // Of a token's equal ones the first has the place, with all weights, added from the last on.
        bool first = i < choices;
        float sum = 0.0f;
        for (int j = plan.top_k - 1; j >= 0; j--) {
            const int at = min(from + j, choices - 1);
            const int low = __shfl_sync(~0u, id[0], at % 32), high = __shfl_sync(~0u, id[1], at % 32);
            const float low_weight = __shfl_sync(~0u, weight[0], at % 32), high_weight = __shfl_sync(~0u, weight[1], at % 32);
            if ((at < 32 ? low : high) != id[h]) continue;
            sum += at < 32 ? low_weight : high_weight;
            if (at < i) first = false;
        }
        if (first) list.row[expert[h]][token] = hidden_row(plan, token, 1 + i - from), list.weight[expert[h]][token] = sum;
        if (i < choices && leader[h] != kNone) list.expert[expert[h]] = id[h];
    }
    const bool fewer = count != list.count;
    __syncwarp();
    if (fewer) deal<kDown>(plan, list, count);
}

template <bool kDown> __global__ void __launch_bounds__(kThreads, 2) moe_kernel(const __grid_constant__ Plan plan) {
    DYN_SMEM(char, memory);
    List& list = *reinterpret_cast<List*>(memory);
    const int warp = warp_index(), lane = threadIdx.x % 32;
    const float of_shared = threadIdx.x < 3 ? plan.factors[3 * plan.experts + threadIdx.x] : 0.0f;
    if (threadIdx.x == 0) {
        const int begin = shared_begin<kDown>(plan, blockIdx.x), tile = begin / plan.shared.items;
        list.part[0] = {begin, shared_begin<kDown>(plan, blockIdx.x + 1), 0, tile, begin - tile * plan.shared.items};
        list.expert[0] = plan.experts;
        mbarrier_init(&list.ready, 32), mbarrier_init(&list.scaled, 32);  // each lane arrives for what it wrote itself
    }
    if (lane == 0) list.may_wait[warp] = 0;
    TileItem* const tile_items = reinterpret_cast<TileItem*>(memory + plan.tile_at);
    for (int i = threadIdx.x; kDown && i < plan.shared.items; i += kThreads)
        tile_items[i] = {plan.shared.weights + i * plan.shared.item_bytes, 0, i * item_columns(plan.shared.format)};
    __syncthreads();
    Walk<kDown> walk;
    walk.plan = &plan, walk.list = &list;
    walk.start(false, tile_items);
    Stream<Walk<kDown>, Stretch, kDepth> stream(plan.ring, memory + kRingAt);
    stream.begin(walk);
    if (kDown) grid_dependency_launch();
    if (warp == 0) deal<kDown>(plan, list, min(plan.tokens * plan.top_k, plan.experts));  // if no expert is chosen twice
    if (threadIdx.x < kMaxTokens) list.row[0][threadIdx.x] = hidden_row(plan, threadIdx.x, 0), list.weight[0][threadIdx.x] = 1.0f;
    if (threadIdx.x < 3) list.factors[threadIdx.x] = of_shared;
    __syncthreads();
    if (!kDown) {
        grid_dependency_wait();
        grid_dependency_launch();
    }
    if (lane == 0) list.may_wait[warp] = 1;
    __syncwarp();
    if (warp == 0) {  // the others begin with the shared expert's items
        make_list<kDown>(plan, list);
        __syncwarp();
        for (int i = lane; kDown && i < list.count * plan.routed.items; i += 32) {
            const int expert = 1 + i / plan.routed.items, item = i - (expert - 1) * plan.routed.items;
            const char* weights = plan.routed.weights + list.expert[expert] * plan.routed.bytes;
            tile_items[plan.shared.items + i] = {weights + item * plan.routed.item_bytes, expert, item * item_columns(plan.routed.format)};
        }
        mbarrier_arrive(&list.ready);
        for (int i = 3 + lane; i < 3 * (1 + list.count); i += 32) list.factors[i] = plan.factors[3 * list.expert[i / 3] + i % 3];
        mbarrier_arrive(&list.scaled);
    }
    stream.resume();
    if (kDown)
        grid_dependency_wait();
    else
        for (int i = blockIdx.x * kThreads + threadIdx.x; i < plan.rows; i += gridDim.x * kThreads)
            static_cast<__nv_bfloat16*>(plan.out)[zero_row(plan) + i] = __float2bfloat16_rn(0.0f);

    const int token = lane / 4 < plan.tokens ? lane / 4 : 0;  // the product's other columns are not used

    for (int round = -1;; round++) {  // of the shared expert; of the chosen ones' tiles in `up`, as many as there are pieces for
        const bool chosen = round >= 0;
        if (round == 0) mbarrier_wait(&list.ready, 0), mbarrier_wait(&list.scaled, 0), walk.start_chosen();
        const int of_tile = walk.of_tile();
        const int first_unit = list.part[chosen].at_tile + list.part[chosen].at_expert * plan.tiles;
        const int first = first_unit + max(round, 0) * plan.at_once;  // the round's first tile

        // This warp's items; a piece for each tile among them.
        const Matrix& matrix = chosen ? plan.routed : plan.shared;
        const __nv_bfloat16* const row = kDown ? plan.x : plan.x + token * plan.columns;
        Source<kDown> source{plan, list, walk, row, token, first, first + plan.at_once};
        stream.template multiply<1, kDown>(matrix.format, plan.columns % item_columns(matrix.format) == 0, source);
        source.finish();
        if (!chosen) continue;

        // All warps' pieces are there: the round's sums, and with the first those of the shared expert.
        __syncthreads();
        // The shared expert's and the chosen ones' in one loop: its code is in no cache yet, and the kernel ends with its slowest block.
        const int tokens = plan.tokens, shared_items = list.part[0].end - list.part[0].begin;
        const auto tiles_of = [&](bool chosen, int of_tile) {  // of the block, in part or whole
            const int begin = list.part[chosen].begin, end = list.part[chosen].end;
            return begin == end ? 0 : (end - 1) / of_tile - begin / of_tile + 1;
        };
        const int left = kDown ? tiles_of(true, of_tile) : list.part[1].end / of_tile - first;
        const int of_shared = round == 0 ? tiles_of(false, plan.shared.items) * tokens : 0;
        constexpr int kOut = kDown ? kRows : kRows / 2;  // as many threads write a tile's values of one token
        for (int i = threadIdx.x / kOut; i < of_shared + min(left, plan.at_once) * tokens; i += kThreads / kOut) {
            const bool chosen = i >= of_shared;
            const Layout& layout = chosen ? plan.rest : plan.first;
            char* const pieces = memory + (chosen ? plan.rest_at : plan.first_at);
            const int of_tile = chosen ? walk.of_tile() : plan.shared.items, at = chosen ? i - of_shared : i;
            const int index = tokens == 1 ? at : at / tokens, token = at - index * tokens;
            int unit = index + (chosen ? first : list.part[0].at_tile), expert = chosen;
            // Its items, counted as the block's: the shared expert's are before the others.
            const int before = list.part[chosen].begin - (chosen ? shared_items : 0), begin = unit * of_tile, end = begin + of_tile;
            const int from = max(begin, list.part[chosen].begin) - before, to = min(end, list.part[chosen].end) - before;
            const int element = token * kRows + threadIdx.x % kOut;
            if constexpr (kDown) {  // the part of the block that has the tile's first item, or the next one
                const int row = unit * kRows + threadIdx.x % kOut;
                if (row >= plan.rows) continue;
                const int64_t next = int64_t(tokens) * plan.rows;
                float* out = static_cast<float*>(plan.out) + int64_t(chosen ? plan.parts / 2 * tokens + token : token) * plan.rows + row;
                out[begin >= list.part[chosen].begin ? 0 : next] = layout.piece_sum(pieces, index, element, from, to);
                if (plan.parts == 4 && to - from == of_tile) out[next] = 0.0f;
            } else {
                for (; unit >= plan.tiles; expert++) unit -= plan.tiles;
                const int row = unit * kOut + threadIdx.x % kOut, at = list.row[expert][token];
                if (at == zero_row(plan) || row >= plan.rows) continue;
                float gate = layout.piece_sum(pieces, index, element, from, to);
                float up = layout.piece_sum(pieces, index, element + kOut, from, to);
                gate = gate > plan.limit ? plan.limit : gate;  // from above only; NaN stays
                up = up > plan.limit ? plan.limit : up < -plan.limit ? -plan.limit : up;
                const float value = gate / (1.0f + expf(-gate)) * up * list.weight[expert][token];
                static_cast<__nv_bfloat16*>(plan.out)[at + row] = __float2bfloat16_rn(value);
            }
        }
        if (left <= plan.at_once) break;
        __syncthreads();  // before the pieces are overwritten
    }
}

static int aligned(int bytes) { return (bytes + 15) / 16 * 16; }

// Plans for `plan.blocks` blocks. Whether their sums fit a block's shared memory, at least one chosen expert's tile at a time.
template <bool kDown> static bool fits(Plan& plan) {
    // Costs of tiles in units of such size that their sum, times a block's number, fits 31 bits.
    const int chosen = min(plan.tokens * plan.top_k, plan.experts), tiles = (plan.tiles + plan.blocks - 1) / plan.blocks;
    int64_t shared_cost = plan.shared.tile_bytes;
    int64_t routed_cost = plan.routed.tile_bytes;
    while ((chosen * routed_cost + shared_cost) * plan.tiles * plan.blocks >> 31)
        shared_cost = (shared_cost + 1) / 2, routed_cost = (routed_cost + 1) / 2;
    plan.shared_cost = int(shared_cost), plan.routed_cost = int(routed_cost);
    // The pieces of each warp: of all tiles of a block (in `down` of one more, as it need not begin with a tile's first item), or of as
    // many as there is memory for.
    const int item = max(plan.shared.item_bytes, plan.routed.item_bytes);
    plan.ring = {kDepth, (item + 127) / 128 * 128, 0, plan.tokens};
    plan.first = {0, 0, tiles + kDown, plan.tokens};
    plan.tile_at = aligned(kRingAt + plan.ring.bytes());
    plan.first_at = aligned(plan.tile_at + (kDown ? (plan.shared.items + chosen * plan.routed.items) * int(sizeof(TileItem)) : 0));
    plan.rest_at = aligned(plan.first_at + plan.first.bytes());
    plan.at_once = kDown ? tiles + 1 : int((chosen * routed_cost + shared_cost) * plan.tiles / plan.blocks / routed_cost) + 2;
    for (; plan.at_once > (kDown ? tiles : 0); plan.at_once--) {
        plan.rest = {0, 0, plan.at_once, plan.tokens};
        if (plan.rest_at + plan.rest.bytes() <= kMaxBytes) return true;
    }
    return false;
}

// Starts `blocks` blocks, or fewer where there are fewer tiles, or more where a block's tiles would be too many for its memory.
template <bool kDown> static cudaError_t launch(Plan plan, int blocks, cudaStream_t stream) {
    for (plan.blocks = min(blocks, plan.tiles); !fits<kDown>(plan); plan.blocks++)
        if (plan.blocks >= plan.tiles) return cudaErrorInvalidValue;  // a tile's table of items alone leaves no room for its sums
    LAUNCH(moe_kernel<kDown>, dim3(plan.blocks), dim3(kThreads), plan.rest_at + plan.rest.bytes(), stream, plan);
    return cudaGetLastError();
}

static Matrix matrix(const void* data, int format, int tiles, int columns) {
    const int items = (columns + item_columns(format) - 1) / item_columns(format);
    const int item = item_bytes(format), tile = items * item;
    return {static_cast<const char*>(data), int64_t(tiles) * tile, format, items, item, tile};
}

// x [tokens, columns] bf16; up_* and down_*: packed w1 with w3 [inner, columns] and w2 [columns, inner] (packing.py), one expert after the
// other; factors [experts + 1, 3] fp32 of w1, w3, w2; chosen [tokens, top_k] int32, weights [tokens, top_k] fp32; hidden [tokens * (1 +
// top_k) + 1, inner] bf16 (workspace) -> out [parts, tokens, columns] fp32: 4 parts, or 2 if w2 has no more tiles than there are blocks.
// tokens and top_k 1 to 8; columns and inner multiples of 8. A tile of w2 has a table of its items, 16 bytes each for the shared and all
// chosen experts, of about 16 KB at most: with 8 tokens and top_k 8, inner up to 2,304 in bf16 beside NVFP4, 9,216 in NVFP4. blocks: how many run at once.
extern "C" int moe(const void* x, const void* up_shared, const void* up_routed, const void* down_shared, const void* down_routed,
                   const float* factors, const int* chosen, const float* weights, void* hidden, float* out, int tokens, int columns,
                   int inner, int experts, int top_k, int up_shared_format, int up_routed_format, int down_shared_format,
                   int down_routed_format, int blocks, int parts, float limit, cudaStream_t stream) {
    Plan up = {};
    up.chosen = chosen, up.weights = weights, up.factors = factors;
    up.tokens = tokens, up.top_k = top_k, up.experts = experts, up.limit = limit;
    up.inner = inner;
    Plan down = up;
    up.x = static_cast<const __nv_bfloat16*>(x), up.out = hidden;
    up.tiles = (inner + kRows / 2 - 1) / (kRows / 2), up.columns = columns, up.rows = inner;
    up.shared = matrix(up_shared, up_shared_format, up.tiles, columns), up.routed = matrix(up_routed, up_routed_format, up.tiles, columns);
    down.x = static_cast<const __nv_bfloat16*>(hidden), down.out = out, down.parts = parts;
    down.tiles = (columns + kRows - 1) / kRows, down.columns = inner, down.rows = columns;
    down.shared = matrix(down_shared, down_shared_format, down.tiles, inner);
    down.routed = matrix(down_routed, down_routed_format, down.tiles, inner);
    if (tokens < 1 || tokens > kMaxTokens || top_k < 1 || top_k > kMaxTopK || experts > kMaxExperts ||
        parts != (down.tiles > blocks ? 4 : 2))
        return cudaErrorInvalidValue;
    if (const cudaError_t error = launch<false>(up, blocks, stream)) return error;
    return launch<true>(down, blocks, stream);
}
