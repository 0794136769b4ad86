// linear: out = x W^T for 1 to 8 tokens and up to 8 packed weights of one input, formats mixed (dsv4/kernels/linear.py: projections,
// linear, grouped_linear). The stream of weights itself is in stream.cuh.
//
// The launch's tiles are dealt to clusters of 1, 2 or 4 blocks, a contiguous range each (dsv4/kernels/linear.py, _schedule). The blocks of
// a cluster split every tile's columns; the warps of a block split its sequence of items evenly, so no warp has more than one item above
// the mean. Clusters are for launches of few tiles: 448 tiles (16384 -> 7168) are 1.7 a block on 264 blocks, so 2 for some, 18 % above the
// mean; on 66 clusters of 4 they are 6.8, so 7, 3 % above it. The blocks' sums meet once, at the end, in the cluster's shared memory.
//
// Reads every weight once: bytes / 4.5 TB/s + 1.8 us. Instructions a lane and item: 475 (FP4), 233 (FP8), 24 (bf16), and about 80 around
// them; an SM can issue 1,100 in the time that its share of the memory takes for an item. x is read through L1 for every tile.
#include <cstring>

#include "stream.cuh"

constexpr int kMaxSegments = 8, kMaxClusters = 320;

// One weight of the launch: `weights` is a byte offset, `first` its first tile in the launch, `out` the output columns before it.
struct Segment {
    int64_t weights;
    int format, rows, tiles, items, first, out;
    float factor;
};

struct Plan {
    const char* weights;
    const __nv_bfloat16* x;
    void* out;
    Layout layout;
    int cluster_log2, columns, x_stride, group_tiles, bfloat16, segments;  // group_tiles: tiles that share an x; 0: all
    Segment segment[kMaxSegments];
    int first_tile[kMaxClusters + 1];
};

// The items of a tile that are this block's: begin, and how many.
struct Slice {
    int begin, count;
    __device__ __forceinline__ Slice(int items, int rank, int cluster_log2)
        : begin(items * rank >> cluster_log2), count((items * (rank + 1) >> cluster_log2) - begin) {}
};

struct Run {
    const char* items;
    int count, format;
    int segment, tile, item;  // tile counted in the segment; item: the first one's place in its tile
};

// Items of a block in their order: by tile, then by item.
struct Walk {
    const Plan* plan;
    int rank, segment, tile, item, left;  // item counted in the slice

    // `count` items from position `start` of the block whose tiles begin with `first` of the launch.
    __device__ __forceinline__ void seek(const Plan& of, int block_rank, int first, int start, int count) {
        plan = &of, rank = block_rank, left = count, segment = tile = item = 0;
#pragma unroll 1
        for (; segment < of.segments; segment++) {
            const Segment& s = of.segment[segment];
            const int slice = Slice(s.items, rank, of.cluster_log2).count;
            tile = max(first - s.first, 0);
            const int here = max(s.tiles - tile, 0) * slice;
            if (start < here) {
                tile += start / slice, item = start % slice;
                return;
            }
            start -= here;
        }
    }

    __device__ __forceinline__ bool next(Run& run) {
        if (left == 0) return false;
        const Segment& s = plan->segment[segment];
        const Slice slice(s.items, rank, plan->cluster_log2);
        run.format = s.format, run.segment = segment, run.tile = tile, run.item = slice.begin + item;
        run.count = min(slice.count - item, left);
        run.items = plan->weights + s.weights + (int64_t(tile) * s.items + run.item) * item_bytes(s.format);
        left -= run.count, item = 0;
        if (++tile == s.tiles) tile = 0, segment++;
        return true;
    }
};

// Writes one sum: `element` is token * 16 + row of the launch's tile.
__device__ __forceinline__ void emit(const Plan& plan, int tile, int element, float sum) {
    int i = 0;
    while (i + 1 < plan.segments && tile >= plan.segment[i + 1].first) i++;
    const Segment& s = plan.segment[i];
    const int row = (tile - s.first) * kRows + element % kRows, token = element / kRows;
    if (row >= s.rows) return;
    const int64_t at = int64_t(s.out) * plan.layout.tokens + int64_t(token) * s.rows + row;
    if (plan.bfloat16) static_cast<__nv_bfloat16*>(plan.out)[at] = __float2bfloat16_rn(sum * s.factor);
    else static_cast<float*>(plan.out)[at] = sum * s.factor;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm) linear_kernel(const __grid_constant__ Plan plan) {
    DYN_SMEM(char, memory);
    const Layout& layout = plan.layout;
    const int blocks = 1 << plan.cluster_log2, cluster = blockIdx.x >> plan.cluster_log2, rank = blockIdx.x % blocks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = plan.first_tile[cluster], tiles = plan.first_tile[cluster + 1] - first;
    int items = 0;  // of this block
#pragma unroll 1
    for (int i = 0; i < plan.segments; i++) {
        const Segment& s = plan.segment[i];
        const int here = min(first + tiles, s.first + s.tiles) - max(first, s.first);
        items += max(here, 0) * Slice(s.items, rank, plan.cluster_log2).count;
    }
    const int start = items * warp / kWarps, stop = items * (warp + 1) / kWarps;
    Walk walk;
    walk.seek(plan, rank, first, start, stop - start);

    Stream<Walk, Run> stream(layout, memory);
    stream.begin(walk);
    grid_dependency_launch();
    grid_dependency_wait();

    const int token = lane / 4 < layout.tokens ? lane / 4 : 0;  // the product's other columns are not used
    const __nv_bfloat16* x_token = plan.x + token * plan.x_stride;
    int first_kept = 0, kept = 0;
    for (Run run; walk.next(run); kept++) {
        if (kept == 0) first_kept = plan.segment[run.segment].first + run.tile - first;
        const int wide = item_columns(run.format), group = plan.group_tiles ? run.tile / plan.group_tiles : 0;
        const __nv_bfloat16* x = x_token + group * plan.columns + run.item * wide;
        int left = plan.columns - run.item * wide;
        Sum sum;
        for (int i = 0; i < run.count; i++, x += wide, left -= wide) {
            sum.add(run.format, stream.item(), x, left);
            stream.release();
        }
        layout.keep(memory, kept, sum);
    }
    layout.set_range(memory, first_kept, first_kept + kept - 1);
    __syncthreads();

    const int size = layout.piece_floats();
    if (blocks == 1) {
        for (int i = threadIdx.x; i < tiles * size; i += kThreads)
            emit(plan, first + i / size, i % size, layout.piece_sum(memory, i / size, i % size));
        return;
    }
    for (int i = threadIdx.x; i < tiles * size; i += kThreads) layout.sum(memory, 0)[i] = layout.piece_sum(memory, i / size, i % size);
    cluster_sync();
    for (int i = threadIdx.x;; i += kThreads) {  // tiles rank, rank + blocks, ...
        const int tile = rank + i / size * blocks, element = i % size;
        if (tile >= tiles) break;
        float sum = 0.0f;
        for (int block = 0; block < blocks; block++) sum += cluster_map(layout.sum(memory, tile), block)[element];
        emit(plan, first + tile, element, sum);
    }
    cluster_sync();  // a block's shared memory is there until it ends
}

// x bf16 [tokens, x_stride], `columns` values (a multiple of 8) for each group of group_tiles tiles; weights: packed; out fp32, or bf16:
// [tokens, rows] of one weight after the other. On the host: table [segments, 4] (byte offset, format, rows, the factor's bits) and
// first_tile [clusters + 1]; pieces, tiles: the most that a warp and a cluster have (linear.py, Schedule).
extern "C" int linear(const void* x, const void* weights, const int64_t* table, const int* first_tile, void* out, int segments,
                      int clusters, int cluster, int pieces, int tiles, int tokens, int columns, int x_stride, int group_tiles,
                      int bfloat16, cudaStream_t stream) {
    if (segments < 1 || segments > kMaxSegments || clusters > kMaxClusters || tokens < 1 || tokens > kMaxTokens)
        return cudaErrorInvalidValue;
    Plan plan = {};
    plan.weights = static_cast<const char*>(weights), plan.x = static_cast<const __nv_bfloat16*>(x), plan.out = out;
    plan.cluster_log2 = cluster == 4 ? 2 : cluster - 1;
    plan.columns = columns, plan.x_stride = x_stride, plan.group_tiles = group_tiles, plan.bfloat16 = bfloat16, plan.segments = segments;
    int item = 0, first = 0, before = 0;
    for (int i = 0; i < segments; i++, table += 4) {
        Segment& s = plan.segment[i];
        s.weights = table[0], s.format = int(table[1]), s.rows = int(table[2]);
        memcpy(&s.factor, table + 3, sizeof s.factor);
        s.tiles = (s.rows + kRows - 1) / kRows, s.items = (columns + item_columns(s.format) - 1) / item_columns(s.format);
        s.first = first, s.out = before;
        first += s.tiles, before += s.rows;
        item = item_bytes(s.format) > item ? item_bytes(s.format) : item;
    }
    for (int i = 0; i <= clusters; i++) plan.first_tile[i] = first_tile[i];
    // Three slots where items are small, L1 need hold little of x and two blocks fit. With FP4 items 3 were 7 to 13 % slower than 2.
    plan.layout = {3, (item + 127) / 128 * 128, pieces, cluster > 1 ? tiles : 0, tokens};
    if (item > item_bytes(kFp8) || int64_t(tokens) * columns / cluster > 16384 || plan.layout.bytes() > kSharedBytes) plan.layout.depth = 2;
    LAUNCH_CLUSTER(linear_kernel, dim3(clusters * cluster), dim3(kThreads), cluster, plan.layout.bytes(), stream, plan);
    return cudaGetLastError();
}
