// select_entries: the top_k largest of a token's first n = (position + 1) / ratio scores, exactly, as ascending indices
// (dsv4/ops/indexer.py).
//
// Scores become 32-bit keys of the same order and stay in shared memory. What is searched is a cut: all keys above it are taken and, of
// those that equal it, the first few. One launch: a block a token up to 16,384 entries, else a cluster of 8, whose work is
//   1. a maximum for each group of at most 16 keys, 16,384 groups; all of them go to every block. Their top_k-th largest is a lower bound
//      of the cut;
//   2. the keys above that bound, typically 1.05 top_k and never more than 16 top_k, go to every block. Their top_k-th largest is the cut.
//      If there are fewer than top_k, the bound is the cut itself (it then equals many keys);
//   3. every block knows what the blocks before it take, and writes its indices in order.
// Atomics count (integers, in shared memory) and never decide an order.
//
// Prediction: n <= top_k 1 us; 1,024 to 16,384 entries 3 to 4.5 us; 262,144 entries (1 MB, from L2, 128 KB a block) 9 to 10 us: launch 1,
// loads 2, two cuts 3, exchanges (57 KB into each block, then little) 3, output 0.5.
// Measured on an H200: 4.8 us for 1,024 entries; 27.4 for 262,144, three times what was predicted (docs/measurements.md).
#include "common.cuh"
#include "ptx.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kCluster = 8;
constexpr int kMaxRounds = 16;                // quads of scores that a thread can have
constexpr int kPerRound = 4 * kThreads;       // scores of a block in one round
constexpr int kMaxEntries = kCluster * kMaxRounds * kPerRound;  // 262,144
constexpr int kGroups = kCluster * 4 * kThreads;                // 16,384: four a thread
constexpr int kOneBlock = kGroups;            // entries that one block has alone
constexpr int kMaxTopK = 2 * kThreads;        // cut_of's first range needs as many parts of its list
constexpr int kBins = 4096, kBinsOfThread = kBins / kThreads;
static_assert(kMaxTopK * (kMaxEntries / kGroups) <= kGroups, "the keys above the bound fit where the groups were");

struct alignas(16) Shared {
    uint32_t bins[kBins];        // zero between the searches
    uint32_t least[kWarps], low[kWarps], high[kWarps];
    unsigned sums[kWarps], before[kWarps];
    int bin, above, inside;
    unsigned counts[kCluster];   // of each block of the cluster: keys above the bound, and 2^16 for each that equals it
};

// A number of the same order as x, above 0, which stands for no entry. Zeros are equal; NaN is -inf.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x == x ? x + 0.0f : -INFINITY);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// All keys above `key` are taken, and the first `ties` that equal it.
struct Cut { uint32_t key; int ties; };

// The sum over the block's threads before this one, and over all. `sums`: free again after the next barrier.
__device__ __forceinline__ unsigned scan(unsigned x, unsigned* sums, unsigned& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = x;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const unsigned other = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    const unsigned of_warp = lane < kWarps ? sums[lane] : 0;
    total = __reduce_add_sync(~0u, of_warp);
    return __reduce_add_sync(~0u, lane < warp ? of_warp : 0u) + sum - x;
}

// The cut that takes k of list[0 .. count), k <= count, in every thread of the block. Begins and ends with a barrier.
//
// Counts the keys in 4,096 equal parts of a range and goes on in the part with the k-th largest: at most 3 times, mostly 1 or 2, as the
// first range is narrow: the list has 1,024 parts (two a thread), so at least k keys reach the least of the parts' largest keys.
__device__ __forceinline__ Cut cut_of(const uint32_t* list, int count, int k, Shared& s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t least = ~0u, even = 0, odd = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const uint32_t key = list[i], larger = max(even, key);
        least = min(least, key);
        even = odd, odd = larger;  // they change places
    }
    least = __reduce_min_sync(~0u, least);
    uint32_t low = __reduce_min_sync(~0u, min(even, odd)), high = __reduce_max_sync(~0u, max(even, odd));
    if (lane == 0) s.least[warp] = least, s.low[warp] = low, s.high[warp] = high;
    __syncthreads();
    const int other_warp = lane % kWarps;
    low = max(__reduce_min_sync(~0u, s.least[other_warp]), __reduce_min_sync(~0u, s.low[other_warp]));
    high = __reduce_max_sync(~0u, s.high[other_warp]);
    for (;;) {
        const int shift = max(0, 32 - 12 - __clz(high - low));
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += kThreads) {
            const uint32_t above_low = list[i] - low;
            if (above_low <= high - low) atomicAdd(&s.bins[above_low >> shift], 1u);
        }
        __syncthreads();
        // Thread 0 has the uppermost parts, so a scan over the threads goes downwards.
        const int first = kBins - (int(threadIdx.x) + 1) * kBinsOfThread;
        uint4* own = reinterpret_cast<uint4*>(s.bins + first);
        const uint4 lower = own[0], upper = own[1];
        const unsigned bins[kBinsOfThread] = {lower.x, lower.y, lower.z, lower.w, upper.x, upper.y, upper.z, upper.w};
        own[0] = own[1] = uint4{0, 0, 0, 0};
        unsigned sum = 0, total;
#pragma unroll
        for (int i = 0; i < kBinsOfThread; i++) sum += bins[i];
        int above = scan(sum, s.sums, total);
        if (above < k && k <= above + int(sum)) {
#pragma unroll
            for (int i = kBinsOfThread - 1; i >= 0; i--) {
                if (above < k && k <= above + int(bins[i])) s.bin = first + i, s.above = above, s.inside = bins[i];
                above += bins[i];
            }
        }
        __syncthreads();
        k -= s.above;
        low += uint32_t(s.bin) << shift;
        if (s.inside == k) return {low - 1, 0};
        if (shift == 0) return {low, k};
        high = min(high, low + (1u << shift) - 1);
    }
}

// Steps 1 and 2, for a cluster's `quads`, `rounds` of each thread: the cut, and how many keys above it and equal to it the blocks before
// this one have. `list`: kGroups words of shared memory.
__device__ __forceinline__ Cut cut_of_cluster(const uint4* quads, int rounds, int top_k, Shared& s, uint32_t* list, int& above,
                                              int& equal) {
    const int rank = blockIdx.x;
    uint32_t largest[4] = {};
    for (int j = 0; j < rounds; j++) {
        const uint4 q = quads[j * kThreads + threadIdx.x];
        const uint32_t group = max(largest[0], max(max(q.x, q.y), max(q.z, q.w)));
        largest[0] = largest[1], largest[1] = largest[2], largest[2] = largest[3], largest[3] = group;  // round j is of group j % 4
    }
    for (int r = 0; r < kCluster; r++)
        reinterpret_cast<uint4*>(cluster_map(list, r))[rank * kThreads + threadIdx.x] = {largest[0], largest[1], largest[2], largest[3]};
    cluster_sync();
    const Cut bound = cut_of(list, kGroups, top_k, s);

    const auto count_of = [](uint32_t key, Cut cut) { return key > cut.key ? 1u : key == cut.key ? 1u << 16 : 0; };
    unsigned count = 0, total;
    for (int j = 0; j < rounds; j++) {
        const uint4 q = quads[j * kThreads + threadIdx.x];
        count += count_of(q.x, bound) + count_of(q.y, bound) + count_of(q.z, bound) + count_of(q.w, bound);
    }
    int place = scan(count, s.sums, total) & 0xffff;
    if (threadIdx.x < kCluster) cluster_map(s.counts, threadIdx.x)[rank] = total;
    cluster_sync();
    int listed = 0;
    above = equal = 0;
    for (int r = 0; r < kCluster; r++) {
        if (r == rank) above = listed;
        if (r < rank) equal += s.counts[r] >> 16;
        listed += s.counts[r] & 0xffff;
    }
    if (listed < top_k) return {bound.key, top_k - listed};  // in all blocks; none touches another's memory from here on

    place += above;
    for (int j = 0; j < rounds; j++) {
        const uint4 q = quads[j * kThreads + threadIdx.x];
        const uint32_t keys[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (keys[e] > bound.key) {
                for (int r = 0; r < kCluster; r++) cluster_map(list, r)[place] = keys[e];
                place++;
            }
    }
    cluster_sync();
    const Cut cut = cut_of(list, listed, top_k, s);
    count = 0;
    for (int i = threadIdx.x; i < above; i += kThreads) count += count_of(list[i], cut);
    scan(count, s.before, total);
    above = total & 0xffff, equal = total >> 16;
    return cut;
}

// The x blocks of a row of the grid are a cluster and have one token's entries, in order. In a block warps have theirs in order, `rounds`
// times 128 consecutive ones. `aligned`: rows of `capacity` scores can be read in 16-byte accesses.
__global__ void __launch_bounds__(kThreads, 1)
select_entries_kernel(const float* scores, const int64_t* positions, int* out, int capacity, int ratio, int top_k, int aligned) {
    DYN_SMEM(Shared, s);
    uint4* quads = reinterpret_cast<uint4*>(s + 1);  // quad j of thread t at j * kThreads + t: scores, then keys
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < kBins / 4; i += kThreads) reinterpret_cast<uint4*>(s->bins)[i] = uint4{0, 0, 0, 0};
    if (gridDim.x > 1) cluster_sync();  // all blocks have begun before one writes into another's shared memory
    grid_dependency_launch();
    grid_dependency_wait();
    const int64_t visible = (positions[blockIdx.y] + 1) / ratio;
    const int n = visible < capacity ? int(visible) : capacity;
    scores += int64_t(blockIdx.y) * capacity;
    out += int64_t(blockIdx.y) * top_k;
    if (n <= top_k) {
        if (blockIdx.x == 0)
            for (int i = threadIdx.x; i < top_k; i += kThreads) out[i] = i < n ? i : -1;
        return;
    }
    const int blocks = n <= kOneBlock ? 1 : kCluster;
    if (int(blockIdx.x) >= blocks) return;

    // All copies are under way before the first is waited for. A thread reads what it copied itself.
    const int rounds = (n + blocks * kPerRound - 1) / (blocks * kPerRound);
    const int start = (int(blockIdx.x) * kWarps + warp) * rounds * 128 + lane * 4;  // the first entry of this thread
    for (int j = 0; j < rounds; j++) {
        const int first = start + j * 128;
        uint4* quad = quads + j * kThreads + threadIdx.x;
        if (aligned && first + 4 <= n)
            cp_async_16(quad, scores + first);
        else
            for (int e = 0; e < 4 && first + e < n; e++) reinterpret_cast<float*>(quad)[e] = scores[first + e];
    }
    cp_async_commit();
    cp_async_wait<0>();
    for (int j = 0; j < rounds; j++) {
        uint32_t* quad = reinterpret_cast<uint32_t*>(quads + j * kThreads + threadIdx.x);
        for (int e = 0; e < 4; e++) quad[e] = start + j * 128 + e < n ? key_of(__uint_as_float(quad[e])) : 0;
    }

    Cut cut;
    int above = 0, equal = 0;  // so many keys come before
    if (blocks == 1)
        cut = cut_of(reinterpret_cast<const uint32_t*>(quads), rounds * kPerRound, top_k, *s);
    else
        cut = cut_of_cluster(quads, rounds, top_k, *s, reinterpret_cast<uint32_t*>(quads + kMaxRounds * kThreads), above, equal);

    // Per quad: bits 0 to 3 for keys above the cut, 16 to 19 for keys that equal it; their numbers in the halves of a word.
    const auto taken_of = [&](int j) {
        const uint4 q = quads[j * kThreads + threadIdx.x];
        const uint32_t keys[4] = {q.x, q.y, q.z, q.w};
        unsigned taken = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) taken |= keys[e] > cut.key ? 1u << e : keys[e] == cut.key && cut.ties ? 1u << (16 + e) : 0;
        return taken;
    };
    const auto number = [](unsigned taken) { return unsigned(__popc(taken & 0xf) + (__popc(taken >> 16) << 16)); };
    unsigned count = 0, total;
    for (int j = 0; j < rounds; j++) count += number(taken_of(j));
    const unsigned in_warps_before = __shfl_sync(~0u, scan(count, s->sums, total), 0);
    above += in_warps_before & 0xffff, equal += in_warps_before >> 16;
    for (int j = 0; j < rounds; j++) {
        const unsigned taken = taken_of(j);
        if (!__any_sync(~0u, taken)) continue;
        unsigned sum = number(taken);
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const unsigned other = __shfl_up_sync(~0u, sum, offset);
            if (lane >= offset) sum += other;
        }
        const unsigned in_lanes_before = sum - number(taken), in_warp = __shfl_sync(~0u, sum, 31);
        int larger = above + (in_lanes_before & 0xffff), tied = equal + (in_lanes_before >> 16);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int entry = start + j * 128 + e;
            if (taken >> e & 1)
                out[larger++ + min(tied, cut.ties)] = entry;
            else if (taken >> (16 + e) & 1 && tied < cut.ties)
                out[larger + tied++] = entry;
        }
        above += in_warp & 0xffff, equal += in_warp >> 16;
    }
}

// scores [tokens, capacity] fp32, of which row s holds (positions[s] + 1) / ratio values; positions [tokens] int64 -> out [tokens, top_k]
// int32. tokens 1 to 65,535, capacity up to 262,144, top_k 1 to 1,024.
extern "C" int select_entries(const float* scores, const int64_t* positions, int* out, int tokens, int capacity, int ratio, int top_k,
                              cudaStream_t stream) {
    if (capacity > kMaxEntries || top_k > kMaxTopK) return cudaErrorInvalidValue;
    const int cluster = capacity <= kOneBlock ? 1 : kCluster;
    const size_t words = cluster == 1 ? kOneBlock : kMaxRounds * kPerRound + kGroups;
    LAUNCH_CLUSTER(select_entries_kernel, dim3(cluster, tokens), dim3(kThreads), cluster, sizeof(Shared) + words * sizeof(uint32_t), stream,
                   scores, positions, out, capacity, ratio, top_k, int(rows_aligned(scores, capacity)));
    return cudaGetLastError();
}
