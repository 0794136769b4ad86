// group_choices: which rows each expert gets (dsv4/ops/grouped.py): a stable counting sort of a step's choices, and the plans of its tiles.
//
// A block an expert, and no block waits for another: each counts the choices of all experts, adds up those before its own, and then numbers
// its own in their order, up to the last. So they read 8 bytes a choice and expert, through L2: 4,096 tokens x 6 choices and 384 experts
// are 75 MB; with 12 + 12 steps of 2,048 choices a block and three blocks a multiprocessor, 10 us predicted on an H200, not measured.
#include "common.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32, kEach = 4;  // kEach consecutive choices a thread and step
constexpr int kTileRows = 128, kPairRows = 256;

__device__ __forceinline__ int entries(int rows, int height) { return (rows + height - 1) / height; }

// What each int of a warp's lanes is together with those of the lanes before it.
__device__ __forceinline__ int sum_up_to(int x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(~0u, x, offset);
        if (lane >= offset) x += other;
    }
    return x;
}

// Entries of `height` rows for an expert's `count` rows from `first` on.
__device__ __forceinline__ void plan(int* entry, int expert, int first, int count, int height, int scale_tile) {
    for (int i = threadIdx.x; i * height < count; i += kThreads) {
        const int left = count - i * height;
        *reinterpret_cast<int4*>(entry + 4 * i) =
            make_int4(expert, first + i * height, left < height ? left : height, scale_tile + i * (height / kTileRows));
    }
}

__global__ void __launch_bounds__(kThreads) group_choices_kernel(const int* chosen, int* order, int* rows, int* offsets, int* tiles,
                                                                 int* pairs, int* counts, int choices, int experts) {
    DYN_SMEM(int, shared);
    int *count = shared, *before = shared + experts, *hits = before + 3;  // [experts], [3]: rows, tiles and pairs, [2, kWarps]
    const int mine = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    grid_dependency_launch();
    grid_dependency_wait();  // all inputs are activations
    for (int e = threadIdx.x; e < experts; e += kThreads) count[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < choices; i += kThreads) atomicAdd(count + chosen[i], 1);
    __syncthreads();
    if (warp == 0) {
        int sums[3] = {};
        for (int e = lane; e < mine; e += 32) {
            sums[0] += count[e];
            sums[1] += entries(count[e], kTileRows);
            sums[2] += entries(count[e], kPairRows);
        }
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int sum = sum_up_to(sums[i]);
            if (lane == 31) before[i] = sum;
        }
    }
    __syncthreads();
    const int first = before[0], rows_here = count[mine];
    plan(tiles + 4 * before[1], mine, first, rows_here, kTileRows, before[1]);
    plan(pairs + 4 * before[2], mine, first, rows_here, kPairRows, before[1]);
    if (threadIdx.x == 0) {
        offsets[mine] = first;
        if (mine == experts - 1) {
            offsets[experts] = first + rows_here;
            counts[0] = before[1] + entries(rows_here, kTileRows);
            counts[1] = before[2] + entries(rows_here, kPairRows);
        }
    }

    int found = 0;
    for (int step = 0; found < rows_here; step++) {  // the same in all threads
        const int at = (step * kThreads + threadIdx.x) * kEach;
        bool hit[kEach];
        int here = 0;
#pragma unroll
        for (int i = 0; i < kEach; i++) here += hit[i] = at + i < choices && chosen[at + i] == mine;
        const int up_to = sum_up_to(here);
        int* of_warps = hits + step % 2 * kWarps;  // in turn, so that one barrier a step is enough
        if (lane == 31) of_warps[warp] = up_to;
        __syncthreads();
        int row = first + found + up_to - here;
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
            const int theirs = of_warps[w];
            found += theirs;
            if (w < warp) row += theirs;
        }
#pragma unroll
        for (int i = 0; i < kEach; i++)
            if (hit[i]) {
                order[row] = at + i;
                rows[at + i] = row++;
            }
    }
}

// chosen [choices] of 0 .. experts - 1; order [choices], rows [choices], offsets [experts + 1], tiles and pairs [as many as there may be, 4],
// counts [2]. At least one expert.
extern "C" int group_choices(const int* chosen, int* order, int* rows, int* offsets, int* tiles, int* pairs, int* counts, int choices,
                             int experts, cudaStream_t stream) {
    LAUNCH(group_choices_kernel, dim3(experts), dim3(kThreads), (experts + 3 + 2 * kWarps) * sizeof(int), stream, chosen, order, rows,
           offsets, tiles, pairs, counts, choices, experts);
    return cudaGetLastError();
}
