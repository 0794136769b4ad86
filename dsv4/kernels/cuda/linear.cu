// linear: out = x W^T for 1 to 8 tokens and up to 8 packed weights of one input, formats mixed (dsv4/kernels/linear.py: projections,
// linear, grouped_linear). The stream of weights itself is in stream.cuh.
//
// The launch's items are one sequence, by weight, tile and place in the tile. A block has a contiguous part of it, which its warps take in
// turn, so no warp has more than one item above the mean. Blocks begin at a tile, or anywhere (dsv4/kernels/linear.py, _schedule): then a
// tile may be two blocks', and out is two parts that the reader adds: the sums of the block that has a tile's first item, and those of the
// one that has its last, 0 where it is the same. That is for launches of few tiles: 448 tiles (16384 -> 7168) are 1.7 a block on 264
// blocks, so 2 for some, 18 % above the mean: 5 of 33 us. Clusters of blocks that add up in each other's shared memory were tried instead:
// on an H200 they cost 2 us (2 blocks) to 12 (4 blocks, of which 66 clusters do not fit at once).
//
// Reads every weight once. Measured on an H200: bytes / 4.6 TB/s + 3.5 us (2.5 up to 50 MB, with two slots), of which 1 us is the end of a
// block (its pieces, and code that is in no cache yet) and 1 the start of the next; 4.2 us with nothing to read. Instructions a lane and
// item: 470 (FP4), 230 (FP8), 24 (bf16), and about 75 around them. x is read through L1 for every tile. At most 112 registers, so that the
// blocks of a small kernel behind this one find room beside two of these.
#include <cstring>

#include "stream.cuh"

constexpr int kMaxSegments = 8, kMaxBlocks = 320;
constexpr int kEach = 2;                // rows of a tile that a thread adds up and writes; 4 are no faster with 8 tokens, slower with one
constexpr int kFewItems = 6 * kWarps;   // of a block: about 50 MB in all

// One weight of the launch: `weights` is a byte offset; `first_tile`, `first_item` are its place in the launch, `out` the output columns
// before it.
struct Segment {
    int64_t weights;
    int format, rows, items, first_tile, first_item, out;  // items: of a tile
    float factor;
};

struct Plan {
    const char* weights;
    const __nv_bfloat16* x;
    void* out;
    Layout layout;
    int columns, x_stride, group_tiles, bfloat16, parts, segments;  // group_tiles: tiles that share an x; 0: all
    bool whole_vectors;                                             // of kEach values: all rows are multiples of it
    int64_t part;                                                   // values of out from one part to the next
    Segment segment[kMaxSegments + 1];                              // behind the last one, the ends of the counts
    int first_item[kMaxBlocks + 1];                                 // of a block
};

struct Stretch {
    const char* items;
    int count, bytes, format;
    int tile, item, tile_items, group;  // the first item's: tile of the launch, place in it; items of a tile; of x
};

// A warp's items, every kWarps-th of the block's, those of one weight and one x at a time.
struct Walk {
    const Plan* plan;
    int segment, tile, item, left;  // the next item's; tile counts from the segment's first; left: items of the block from there on

    // From item `first` of the launch, before `end`.
    __device__ __forceinline__ void seek(const Plan& of, int first, int end) {
        plan = &of, left = end - first, segment = tile = 0, item = first;
        settle();
    }

    // Brings an item number that is beyond its tile, or its segment, to its place.
    __device__ __forceinline__ void settle() {
#pragma unroll 1
        for (;; segment++) {
            const Segment &s = plan->segment[segment], &next = plan->segment[segment + 1];
            const int tiles = item / s.items, rest = next.first_tile - s.first_tile - tile;
            if (tiles < rest || segment + 1 == plan->segments) {
                tile += tiles, item -= tiles * s.items;
                return;
            }
            item -= rest * s.items, tile = 0;
        }
    }

    __device__ __forceinline__ int tile_of_launch() const { return plan->segment[segment].first_tile + tile; }

    // The next stretch, up to the launch's tile `end`.
    __device__ __forceinline__ bool next(Stretch& to, int end = 0x7fffffff) {
        const Segment& s = plan->segment[segment];
        const int first = s.first_tile + tile;
        if (left <= 0 || first >= end) return false;
        int last = min(plan->segment[segment + 1].first_tile, end) - s.first_tile;
        to.group = 0;
        if (plan->group_tiles) to.group = tile / plan->group_tiles, last = min(last, (to.group + 1) * plan->group_tiles);
        to.format = s.format, to.tile = first, to.item = item, to.tile_items = s.items;
        to.bytes = item_bytes(s.format);
        to.items = plan->weights + s.weights + (int64_t(tile) * s.items + item) * to.bytes;
        to.count = (min((last - tile) * s.items - item, left) + kWarps - 1) / kWarps;
        left -= to.count * kWarps, item += to.count * kWarps;
        settle();
        return true;
    }
};

// The items of a stretch, as the products see them.
struct Source {
    const Layout& layout;
    char* memory;
    const __nv_bfloat16* row;  // this lane's token
    int count, item, items, all_columns, index, done_index;  // index: the tile's of the round; done_index: the item's before

    __device__ __forceinline__ bool more() const { return count > 0; }
    __device__ __forceinline__ int columns() const { return all_columns; }
    __device__ __forceinline__ const __nv_bfloat16* x(int wide, int& column) const {
        column = item * wide;
        return row + column;
    }
    __device__ __forceinline__ bool next() {
        count--, item += kWarps, done_index = index;
        for (; item >= items; index++) item -= items;
        return index != done_index || count == 0;
    }
    __device__ __forceinline__ void done(const Sum& sum) { layout.keep(memory, done_index, sum); }
};

// The segment of a tile of the launch.
__device__ __forceinline__ const Segment& segment_of(const Plan& plan, int tile) {
    int i = 0;
    while (i + 1 < plan.segments && tile >= plan.segment[i + 1].first_tile) i++;
    return plan.segment[i];
}

// Stores the sums of neighbouring rows, of which there are `left`, as one where that can be done.
template <class T> __device__ __forceinline__ void write(const Plan& plan, T* to, int left, const float (&sum)[kEach]) {
    if (plan.whole_vectors && left > 0) return store(to, sum);
#pragma unroll
    for (int j = 0; j < kEach; j++)
        if (j < left) round_to(sum[j], to[j]);
}

__global__ void __maxnreg__(112) linear_kernel(const __grid_constant__ Plan plan) {
    DYN_SMEM(char, memory);
    const Layout& layout = plan.layout;
    const int warp = warp_index(), lane = threadIdx.x % 32;
    const int begin = plan.first_item[blockIdx.x], end = plan.first_item[blockIdx.x + 1];
    Walk walk;
    walk.seek(plan, begin + warp, end);
    Stream<Walk, Stretch> stream(layout, memory);
    stream.begin(walk);
    Walk bound;
    bound.seek(plan, begin, end);
    int first = bound.tile_of_launch();  // of the round
    bound.seek(plan, max(begin, end - 1), end);
    const int tiles_end = begin < end ? bound.tile_of_launch() + 1 : first;
    grid_dependency_launch();
    grid_dependency_wait();

    const int token = lane / 4 < layout.tokens ? lane / 4 : 0;  // the product's other columns are not used
    const __nv_bfloat16* x_token = plan.x + token * plan.x_stride;
    for (; first < tiles_end; first += layout.pieces) {
        for (Stretch s; walk.next(s, first + layout.pieces);) {
            const __nv_bfloat16* row = x_token + s.group * plan.columns;
            Source source{layout, memory, row, s.count, s.item, s.tile_items, plan.columns, s.tile - first, 0};
            stream.multiply<2, true>(s.format, plan.columns % item_columns(s.format) == 0, source);
        }
        __syncthreads();
        // 8 threads write a tile's rows for one token. Short: the code is in no cache yet, and the kernel ends with its slowest block.
        const int row = threadIdx.x % (kRows / kEach) * kEach, count = min(layout.pieces, tiles_end - first) * layout.tokens;
        for (int i = threadIdx.x / (kRows / kEach); i < count; i += kThreads / (kRows / kEach)) {
            const int index = layout.tokens == 1 ? i : i / layout.tokens, token = i - index * layout.tokens, tile = first + index;
            const Segment& s = segment_of(plan, tile);
            const int of_segment = tile - s.first_tile, row_out = of_segment * kRows + row;
            const int place = s.first_item + of_segment * s.items - begin, next = place + s.items;  // of its items, counted as the block's
            float sum[kEach];
            layout.piece_sum(sum, memory, index, token * kRows + row, max(place, 0), min(next, end - begin));
#pragma unroll
            for (int j = 0; j < kEach; j++) sum[j] *= s.factor;
            const int64_t to = int64_t(s.out) * layout.tokens + int64_t(token) * s.rows + row_out;
            if (plan.bfloat16) {
                write(plan, static_cast<__nv_bfloat16*>(plan.out) + to, s.rows - row_out, sum);
                continue;
            }
            float* out = static_cast<float*>(plan.out) + to;
            write(plan, out + (place < 0 ? plan.part : 0), s.rows - row_out, sum);
            constexpr float kNone[kEach] = {};
            if (plan.parts == 2 && place >= 0 && next <= end - begin) write(plan, out + plan.part, s.rows - row_out, kNone);
        }
        if (first + layout.pieces < tiles_end) __syncthreads();  // before the pieces are overwritten
    }
}

// x bf16 [tokens, x_stride], `columns` values (a multiple of 8) for each group of group_tiles tiles; weights: packed; out fp32, or bf16:
// [tokens, rows] of one weight after the other; with `parts` 2 (fp32 only) all of it twice. On the host: table [segments, 4] (byte offset,
// format, rows, the factor's bits) and first_item [blocks + 1], with parts 1 numbers of tiles' first items; tiles: the most that a block
// has a part of (linear.py, Schedule).
extern "C" int linear(const void* x, const void* weights, const int64_t* table, const int* first_item, void* out, int segments, int blocks,
                      int tiles, int tokens, int columns, int x_stride, int group_tiles, int bfloat16, int parts, cudaStream_t stream) {
    if (segments < 1 || segments > kMaxSegments || blocks > kMaxBlocks || tokens < 1 || tokens > kMaxTokens || (bfloat16 && parts != 1))
        return cudaErrorInvalidValue;
    Plan plan = {};
    plan.weights = static_cast<const char*>(weights), plan.x = static_cast<const __nv_bfloat16*>(x), plan.out = out;
    plan.columns = columns, plan.x_stride = x_stride, plan.group_tiles = group_tiles;
    plan.bfloat16 = bfloat16, plan.parts = parts, plan.segments = segments;
    int item = 0;
    plan.whole_vectors = true;
    for (int i = 0; i < segments; i++, table += 4) {
        Segment &s = plan.segment[i], &next = plan.segment[i + 1];
        s.weights = table[0], s.format = int(table[1]), s.rows = int(table[2]);
        memcpy(&s.factor, table + 3, sizeof s.factor);
        plan.whole_vectors &= s.rows % kEach == 0;
        const int tiles = (s.rows + kRows - 1) / kRows;
        s.items = (columns + item_columns(s.format) - 1) / item_columns(s.format);
        next.first_tile = s.first_tile + tiles, next.first_item = s.first_item + tiles * s.items, next.out = s.out + s.rows;
        item = item_bytes(s.format) > item ? item_bytes(s.format) : item;
    }
    plan.part = int64_t(plan.segment[segments].out) * tokens;
    int most = 0;  // items of a block
    for (int i = 0; i <= blocks; i++) {
        plan.first_item[i] = first_item[i];
        if (i && first_item[i] - first_item[i - 1] > most) most = first_item[i] - first_item[i - 1];
    }
    // Three slots where blocks have many items, these are small, L1 need hold little of x, and pieces for all tiles fit beside them; else
    // two, and pieces for as many tiles as there is room for. Of few items, blocks that begin early would ask for so many that those which
    // are late in the launch before wait: on an H200 44 MB took 12.4 us with three slots and 11.9 with two, 60 MB (56 items a block) 15.4
    // and 15.3, 80 MB 21.8 and 22.3; CSA's projections of x (56 items, 228 blocks) 13.1 and, on a machine 2 % slower, 14.0.
    const bool deep = most > kFewItems && item <= item_bytes(kFp8) && int64_t(tokens) * columns <= 16384;
    plan.layout = {deep ? 3 : 2, (item + 127) / 128 * 128, tiles, tokens};
    if (plan.layout.bytes() > kSharedBytes) plan.layout.depth = 2;
    while (plan.layout.bytes() > kSharedBytes && plan.layout.pieces > 1) plan.layout.pieces--;
    LAUNCH(linear_kernel, dim3(blocks), dim3(kThreads), plan.layout.bytes(), stream, plan);
    return cudaGetLastError();
}
