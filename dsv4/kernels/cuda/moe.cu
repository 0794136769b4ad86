// moe: the chosen experts of 1 to 8 tokens and the shared one (dsv4/ops/experts.py, moe_ref), in two launches on the weight stream.
//
//   up     w1 and w3, in tiles of 8 rows of each, so that one lane has gate and up: clamp, silu(gate) * up * routing weight, rounded to
//          bf16, to `hidden` [token, 1 + top_k, inner], place 0 for the shared expert, with a row of zeros behind
//   down   w2 of each expert with its own row of hidden, summed over the experts in fp32, the shared one first, then by ascending number;
//          rounded to bf16 once
//
// A cluster of blocks has whole tiles and its blocks split their columns. up: clusters of 2, each a part of the shared expert's tiles and
// of the tiles of all distinct chosen experts, such that their bytes together are even. down: clusters of 4, each a few tiles with all
// their experts: 448 tiles (Pro) over 66 clusters are 7 at most where the mean is 6.8; a tile's 12 + 36 items are 12 a block, and a block's
// are split evenly over its warps. With one block a tile, 264 blocks would have 2 at most where the mean is 1.7: 15 % of 22 us lost; sums
// through global memory would need a third launch, 1.8 us.
//
// Every weight of a distinct expert is read once, whatever number of tokens chose it: the tokens are the 8 columns of operand B, in `down`
// with zeros for tokens that did not choose. The shared expert does not depend on the choice: its items come first in every warp and fill
// the ring before the wait, while the router runs. The choice is looked up by one warp while the others multiply these.
// Memory for many tokens' sums is bounded by rounds over the chosen experts' tiles; one token has one round.
//
// Pro, one token (NVFP4 experts, FP8 shared): up 192.8 MB, 42.8 + 2 us at 4.5 TB/s; down 96.3 MB, 21.4 + 2 us. Flash: 73.4 and 36.7 MB,
// 18.3 and 10.2 us.
#include "stream.cuh"

constexpr int kMaxTopK = 8, kMaxExperts = 384, kMaxChosen = kMaxTokens * kMaxTopK;
constexpr int kMaxBytes = 112 * 1024;  // of shared memory a block, so that two fit an SM

template <bool kDown> constexpr int kClusterOf = kDown ? 4 : 2;

// The packed weights of one kind: expert e at weights + e * bytes, tiles of `items` items.
struct Matrix {
    const char* weights;
    int64_t bytes;
    int format, items;
};

struct Plan {
    Matrix shared, routed;
    const __nv_bfloat16* x;        // up: x [tokens, columns]; down: hidden
    __nv_bfloat16* out;            // up: hidden; down: out [tokens, rows]
    const int* chosen;             // [tokens, top_k]
    const float* weights;          // [tokens, top_k]
    const float* factors;          // [experts + 1, 3]: of w1, w3, w2; the shared expert's behind the others
    int tiles, columns, rows, tokens, top_k, experts;
    float limit;
    int clusters;
    int shared_cost, routed_cost;  // of a tile, in any unit
    int at_once;                   // chosen experts' tiles of a cluster that are summed at a time
    Layout ring, first, rest;      // the streams; the pieces of the shared expert's tiles and of a round's
    int first_at, rest_at;
};

// What a cluster does, in each block's shared memory. The list of experts: the shared one, then, known after the wait, the distinct chosen
// ones in ascending order.
struct List {
    uint64_t ready;                  // mbarrier: the chosen ones are known
    int waited[kWarps];              // of a warp: it is behind grid_dependency_wait(), so `ready` will come
    int shared_begin, shared_units;  // the cluster's tiles of the shared expert
    int begin, units;                // and of the chosen ones
    int count;                       // distinct chosen experts
    int expert[1 + kMaxChosen];      // its number, which for the shared one is that of experts
    signed char place[1 + kMaxChosen][kMaxTokens];  // of a token's values in hidden; -1 where it did not choose the expert
    float weight[1 + kMaxChosen][kMaxTokens];
    float factors[3 * (kMaxExperts + 1)];
    int ids[kMaxChosen], leaders[kMaxChosen];  // all choices; the expert where it comes first, else INT_MAX
    float weights[kMaxChosen];
};

constexpr int kRingAt = (sizeof(List) + 127) / 128 * 128;  // the list is in front of the rings

// The items of a tile that are this block's: [begin, end).
struct Slice {
    int begin, end;
    __device__ __forceinline__ Slice(int items, int rank, int blocks) : begin(items * rank / blocks), end(items * (rank + 1) / blocks) {}
    __device__ __forceinline__ int count() const { return end - begin; }
};

// The first of the shared expert's tiles of cluster `index`.
__device__ __forceinline__ int shared_begin(const Plan& plan, int index) { return plan.tiles * index / plan.clusters; }

// The first of the `count` chosen experts' tiles of cluster `index` in `up`: so many that with the shared ones the cost is even. Where the
// shared ones alone may be more than an even part, the tiles are dealt evenly. Both are ascending.
__device__ __forceinline__ int routed_begin(const Plan& plan, int index, int count) {
    const int tiles = count * plan.tiles, all = tiles * plan.routed_cost + plan.tiles * plan.shared_cost;
    if (all / plan.clusters < (plan.tiles + plan.clusters - 1) / plan.clusters * plan.shared_cost) return tiles * index / plan.clusters;
    return (all * index / plan.clusters - shared_begin(plan, index) * plan.shared_cost) / plan.routed_cost;
}

// The row of hidden that is 0, for tokens that did not choose an expert.
__device__ __forceinline__ int zero_row(const Plan& plan) { return plan.tokens * (1 + plan.top_k); }

struct Run {
    const char* items;
    int count, format;
    int unit, expert, item;  // the tile's place in the phase; the expert's in the list; the first item's in its tile
};

// A warp's items. Phase -1 is the shared expert's tiles, 0 and up are the rounds of the chosen experts': known after the wait.
template <bool kDown> struct Walk {
    static constexpr int kCluster = kClusterOf<kDown>;
    const Plan* plan;
    List* list;
    int phase, unit, place, left;  // place: in the block's slice of the unit

    __device__ __forceinline__ Slice slice() const {
        const int items = phase < 0 ? plan->shared.items : kDown ? list->count * plan->routed.items : plan->routed.items;
        return Slice(items, blockIdx.x % kCluster, kCluster);
    }

    // Warps round the shared part down and the others up, so that together they differ by one item at most.
    __device__ __forceinline__ void enter(int new_phase, int units) {
        phase = new_phase;
        const int each = slice().count(), items = units * each, up = phase < 0 ? 0 : kWarps - 1, warp = threadIdx.x / 32;
        const int start = (items * warp + up) / kWarps;
        left = (items * (warp + 1) + up) / kWarps - start;
        unit = each ? start / each : 0, place = each ? start % each : 0;
    }

    // False before the wait, and at the end. After the wait the choice must be known: the kernel waits for it where the stream is dry, and
    // not here, where ptxas would take every branch for a divergent one (and fill the descriptor's registers anew before every load of x).
    __device__ __forceinline__ bool next_phase() {
        if (!list->waited[threadIdx.x / 32]) return false;
        const int done = (phase + 1) * plan->at_once;
        if (done >= list->units) return false;
        enter(phase + 1, min(plan->at_once, list->units - done));
        return true;
    }

    __device__ __forceinline__ bool next(Run& run) {
        while (left == 0)
            if (!next_phase()) return false;
        const Slice mine = slice();
        run.unit = unit, run.expert = 0, run.item = mine.begin + place, run.count = min(mine.count() - place, left);
        const Matrix& matrix = phase < 0 ? plan->shared : plan->routed;
        run.items = matrix.weights, run.format = matrix.format;
        int tile = list->shared_begin + unit;
        if (phase >= 0) {
            if (kDown) {  // the tile's items of all experts are one row of items
                tile += phase * plan->at_once;
                run.expert = 1 + run.item / matrix.items, run.item %= matrix.items;
                run.count = min(run.count, matrix.items - run.item);
            } else {
                const int of_all = list->begin + phase * plan->at_once + unit;
                run.expert = 1 + of_all / plan->tiles, tile = of_all % plan->tiles;
            }
            run.items += list->expert[run.expert] * matrix.bytes;
        }
        run.items += (int64_t(tile) * matrix.items + run.item) * item_bytes(run.format);
        left -= run.count, place += run.count;
        if (place == mine.count()) place = 0, unit++;
        return true;
    }
};

// By one warp: the list. An expert that a token has twice counts once, with both weights.
template <bool kDown> __device__ __forceinline__ void make_list(const Plan& plan, List& list) {
    const int lane = threadIdx.x % 32, choices = plan.tokens * plan.top_k;
    for (int i = lane; i < choices; i += 32) list.ids[i] = plan.chosen[i], list.weights[i] = plan.weights[i];
    __syncwarp();
    int count = 0;
    for (int first = 0; first < choices; first += 32) {
        const int i = first + lane;
        bool leads = i < choices;
        for (int j = 0; j < i && leads; j++) leads = list.ids[j] != list.ids[i];
        if (i < choices) list.leaders[i] = leads ? list.ids[i] : 0x7fffffff;
        count += __popc(__ballot_sync(~0u, leads));
    }
    for (int i = plan.tokens + lane; i < (1 + count) * plan.tokens; i += 32) list.place[i / plan.tokens][i % plan.tokens] = -1;
    __syncwarp();
    for (int i = lane; i < choices; i += 32) {
        const int id = list.ids[i], token = i / plan.top_k;
        int expert = 1;
        for (int j = 0; j < choices; j++) expert += list.leaders[j] < id;
        int place = 0;
        float weight = 0.0f;
        for (int j = plan.top_k - 1; j >= 0; j--)
            if (list.ids[token * plan.top_k + j] == id) place = 1 + j, weight += list.weights[token * plan.top_k + j];
        if (list.leaders[i] == id) list.expert[expert] = id;
        if (i == token * plan.top_k + place - 1) list.place[expert][token] = place, list.weight[expert][token] = weight;
    }
    const int begin = kDown ? list.shared_begin : routed_begin(plan, blockIdx.x / kClusterOf<kDown> + lane % 2, count);
    const int end = __shfl_sync(~0u, begin, 1);
    if (lane == 0) list.count = count, list.begin = begin, list.units = kDown ? list.shared_units : end - begin;
}

template <bool kDown> __global__ void __launch_bounds__(kThreads, kBlocksPerSm) moe_kernel(const __grid_constant__ Plan plan) {
    DYN_SMEM(char, memory);
    List& list = *reinterpret_cast<List*>(memory);
    constexpr int kCluster = kClusterOf<kDown>;
    const int rank = blockIdx.x % kCluster, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        const int index = blockIdx.x / kCluster, begin = shared_begin(plan, index);
        list.shared_begin = begin, list.shared_units = shared_begin(plan, index + 1) - begin, list.expert[0] = plan.experts;
        mbarrier_init(&list.ready, 1);
    }
    if (lane == 0) list.waited[warp] = 0;
    __syncthreads();
    Walk<kDown> walk{&plan, &list, 0, 0, 0, 0};
    walk.enter(-1, list.shared_units);
    Stream<Walk<kDown>, Run> stream(plan.ring, memory + kRingAt);
    stream.begin(walk);
    grid_dependency_launch();
    for (int i = threadIdx.x; i < 3 * (plan.experts + 1); i += kThreads) list.factors[i] = plan.factors[i];
    if (threadIdx.x < kMaxTokens) list.place[0][threadIdx.x] = 0, list.weight[0][threadIdx.x] = 1.0f;
    __syncthreads();
    grid_dependency_wait();
    if (lane == 0) list.waited[warp] = 1;
    __syncwarp();
    if (warp == 0) {  // the others begin with the shared expert's items
        make_list<kDown>(plan, list);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&list.ready);
    }
    bool known = false;
    if (stream.thirsty()) mbarrier_wait(&list.ready, 0), known = true;
    stream.resume();
    if (!kDown)
        for (int i = blockIdx.x * kThreads + threadIdx.x; i < plan.rows; i += gridDim.x * kThreads)
            plan.out[int64_t(zero_row(plan)) * plan.rows + i] = __float2bfloat16_rn(0.0f);

    const int token = lane / 4 < plan.tokens ? lane / 4 : 0;  // the product's other columns are not used

    // A sum of a tile over the cluster, in every one of its blocks, once the blocks' sums are in place.
    const auto total = [&](const Layout& layout, char* pieces, int unit, int element) {
        float sum = 0.0f;
#pragma unroll
        for (int block = 0; block < kCluster; block++) sum += cluster_map(layout.sum(pieces, unit), block)[element];
        return sum;
    };
    // hidden of one token and row: list place `expert`, tile of that expert.
    const auto swiglu = [&](const Layout& layout, char* pieces, int unit, int expert, int tile, int element) {
        const int s = element / 8, row = tile * 8 + element % 8, place = list.place[expert][s];
        if (place < 0) return;
        float gate = total(layout, pieces, unit, s * kRows + element % 8), up = total(layout, pieces, unit, s * kRows + 8 + element % 8);
        gate = gate > plan.limit ? plan.limit : gate;  // from above only; NaN stays
        up = up > plan.limit ? plan.limit : up < -plan.limit ? -plan.limit : up;
        const float value = gate / (1.0f + expf(-gate)) * up * list.weight[expert][s];
        plan.out[(int64_t(s) * (1 + plan.top_k) + place) * plan.rows + row] = __float2bfloat16_rn(value);
    };

    for (int phase = -1; phase < 1 || phase * plan.at_once < list.units; phase++) {
        const Layout& layout = phase < 0 ? plan.first : plan.rest;
        char* const pieces = memory + (phase < 0 ? plan.first_at : plan.rest_at);
        if (phase >= 0) walk.next_phase();

        // This warp's items; a piece for each tile among them.
        int first = 0, last = -1;
        Sum tile;
        Run run;
        while (walk.left && walk.next(run)) {
            if (run.unit != last) {
                if (last < 0) first = run.unit;
                else layout.keep(pieces, last - first, tile);
                last = run.unit, tile = Sum();
            }
            const int wide = item_columns(run.format), place = list.place[run.expert][token];
            const int row = !kDown ? token : place < 0 ? zero_row(plan) : token * (1 + plan.top_k) + place;
            const __nv_bfloat16* x = plan.x + int64_t(row) * plan.columns + run.item * wide;
            int left = plan.columns - run.item * wide;
            Sum sum;
            for (int i = 0; i < run.count; i++, x += wide, left -= wide) {
                sum.add(run.format, stream.item(), x, left);
                if (!known && stream.dry()) mbarrier_wait(&list.ready, 0), known = true;
                stream.release();
            }
#pragma unroll
            for (int i = 0; i < 4; i++)  // rows 0-7 are w1's, rows 8-15 w3's
                tile.even[i] = fmaf(list.factors[3 * list.expert[run.expert] + (kDown ? 2 : i / 2)], sum.total(i), tile.even[i]);
        }
        if (last >= 0) layout.keep(pieces, last - first, tile);
        layout.set_range(pieces, first, last);
        if (phase < 0) continue;

        // All warps' pieces are there: the round's sums, and with the first those of the shared expert.
        __syncthreads();
        const int done = phase * plan.at_once, units = min(plan.at_once, list.units - done), size = layout.piece_floats();
        char* const first_pieces = memory + plan.first_at;
        if (phase == 0)
            for (int i = threadIdx.x; i < list.shared_units * size; i += kThreads)
                plan.first.sum(first_pieces, 0)[i] = plan.first.piece_sum(first_pieces, i / size, i % size);
        for (int i = threadIdx.x; i < units * size; i += kThreads) layout.sum(pieces, 0)[i] = layout.piece_sum(pieces, i / size, i % size);
        cluster_sync();
        if (kDown) {
            for (int i = threadIdx.x; rank + i / size * kCluster < units; i += kThreads) {  // units rank, rank + cluster, ...
                const int unit = rank + i / size * kCluster, element = i % size;
                const int row = (list.begin + done + unit) * kRows + element % kRows;
                if (row >= plan.rows) continue;
                const float sum = total(plan.first, first_pieces, done + unit, element) + total(layout, pieces, unit, element);
                plan.out[int64_t(element / kRows) * plan.rows + row] = __float2bfloat16_rn(sum);
            }
        } else {
            const int half = size / 2;
            if (phase == 0)
                for (int i = threadIdx.x; rank + i / half * kCluster < list.shared_units; i += kThreads) {
                    const int unit = rank + i / half * kCluster;
                    swiglu(plan.first, first_pieces, unit, 0, list.shared_begin + unit, i % half);
                }
            for (int i = threadIdx.x; rank + i / half * kCluster < units; i += kThreads) {
                const int unit = rank + i / half * kCluster, of_all = list.begin + done + unit;
                swiglu(layout, pieces, unit, 1 + of_all / plan.tiles, of_all % plan.tiles, i % half);
            }
        }
        cluster_sync();  // before a block's sums are overwritten, or end
    }
}

static int aligned(int bytes) { return (bytes + 15) / 16 * 16; }

// Deals tiles to `plan.clusters` clusters. Whether their sums fit a block's shared memory, at least one chosen expert's tile at a time.
template <bool kDown> static bool deal(Plan& plan) {
    // Costs of tiles in units of such size that their sum, times a cluster's number, fits 31 bits.
    const int chosen = min(plan.tokens * plan.top_k, plan.experts), shared_units = (plan.tiles + plan.clusters - 1) / plan.clusters;
    int64_t shared_cost = plan.shared.items * item_bytes(plan.shared.format);
    int64_t routed_cost = plan.routed.items * item_bytes(plan.routed.format);
    while ((chosen * routed_cost + shared_cost) * plan.tiles * plan.clusters >> 31)
        shared_cost = (shared_cost + 1) / 2, routed_cost = (routed_cost + 1) / 2;
    plan.shared_cost = int(shared_cost), plan.routed_cost = int(routed_cost);
    // A sum of each tile, and the pieces of each warp: of all tiles of a cluster, or of as many as there is memory for.
    const int item = max(item_bytes(plan.shared.format), item_bytes(plan.routed.format));
    const auto pieces_of = [&](int units) { return Layout{0, 0, units / kWarps + 2, units, plan.tokens}; };
    plan.ring = {2, (item + 127) / 128 * 128, 0, 0, plan.tokens};
    plan.first = pieces_of(shared_units);
    plan.first_at = aligned(kRingAt + plan.ring.bytes());
    plan.rest_at = aligned(plan.first_at + plan.first.bytes());
    plan.at_once = kDown ? shared_units : int((chosen * routed_cost + shared_cost) * plan.tiles / plan.clusters / routed_cost) + 2;
    for (; plan.at_once > 0; plan.at_once--) {
        plan.rest = pieces_of(plan.at_once);
        if (plan.rest_at + plan.rest.bytes() <= kMaxBytes) return true;
    }
    return false;
}

// Starts `blocks` blocks, or fewer where there are fewer tiles, or more where a cluster's tiles would be too many for its memory.
template <bool kDown> static cudaError_t launch(Plan plan, int blocks, cudaStream_t stream) {
    constexpr int kCluster = kClusterOf<kDown>;
    plan.clusters = min(max(blocks / kCluster, 1), plan.tiles);
    while (!deal<kDown>(plan)) plan.clusters++;  // one tile a cluster always fits
    LAUNCH_CLUSTER(moe_kernel<kDown>, dim3(plan.clusters * kCluster), dim3(kThreads), kCluster, plan.rest_at + plan.rest.bytes(), stream,
                   plan);
    return cudaGetLastError();
}

static Matrix matrix(const void* data, int format, int tiles, int columns) {
    const int items = (columns + item_columns(format) - 1) / item_columns(format);
    return {static_cast<const char*>(data), int64_t(tiles) * items * item_bytes(format), format, items};
}

// x [tokens, columns] bf16; up_* and down_*: packed w1 with w3 [inner, columns] and w2 [columns, inner] (packing.py), one expert after the
// other; factors [experts + 1, 3] fp32 of w1, w3, w2; chosen [tokens, top_k] int32, weights [tokens, top_k] fp32; hidden [tokens * (1 +
// top_k) + 1, inner] bf16 (workspace) -> out [tokens, columns] bf16. tokens and top_k 1 to 8; columns and inner multiples of 8. blocks: how
// many run at once.
extern "C" int moe(const void* x, const void* up_shared, const void* up_routed, const void* down_shared, const void* down_routed,
                   const float* factors, const int* chosen, const float* weights, void* hidden, void* out, int tokens, int columns,
                   int inner, int experts, int top_k, int up_shared_format, int up_routed_format, int down_shared_format,
                   int down_routed_format, int blocks, float limit, cudaStream_t stream) {
    if (tokens < 1 || tokens > kMaxTokens || top_k < 1 || top_k > kMaxTopK || experts > kMaxExperts) return cudaErrorInvalidValue;
    Plan up = {};
    up.chosen = chosen, up.weights = weights, up.factors = factors;
    up.tokens = tokens, up.top_k = top_k, up.experts = experts, up.limit = limit;
    Plan down = up;
    up.x = static_cast<const __nv_bfloat16*>(x), up.out = static_cast<__nv_bfloat16*>(hidden);
    up.tiles = (inner + kRows / 2 - 1) / (kRows / 2), up.columns = columns, up.rows = inner;
    up.shared = matrix(up_shared, up_shared_format, up.tiles, columns), up.routed = matrix(up_routed, up_routed_format, up.tiles, columns);
    down.x = up.out, down.out = static_cast<__nv_bfloat16*>(out);
    down.tiles = (columns + kRows - 1) / kRows, down.columns = inner, down.rows = columns;
    down.shared = matrix(down_shared, down_shared_format, down.tiles, inner);
    down.routed = matrix(down_routed, down_routed_format, down.tiles, inner);
    if (const cudaError_t error = launch<false>(up, blocks, stream)) return error;
    return launch<true>(down, blocks, stream);
}
