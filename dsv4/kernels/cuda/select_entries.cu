// select_entries: the top_k largest of a token's first n = (position + 1) / ratio scores, exactly, as ascending indices
// (dsv4/ops/indexer.py).
//
// Scores become 32-bit keys of the same order. What is searched is a cut: all keys above it are taken and, of those that equal it, the
// first few. Up to 16,384 entries one block has all keys in shared memory. A longer row goes to 64 blocks, quads of entries in turn:
//   1. each passes its best 39 to 64 keys on, and a bound: what it keeps back is not above that. The bound is the 40th largest of the
//      maxima of 128 groups of its keys;
//   2. the last block to arrive finds the cut of these candidates, which is at most the true one. Only blocks whose bound reaches it can
//      have kept something back, and it reads those blocks' entries again. Of 1,024 entries a block has 16 +- 4, so mostly there are none;
//      at worst, with equal scores, it is every block (predicted: 200 us).
// The entries that are taken become a bit each; what lies in front of a bit is the entry's place, so the indices ascend in whatever order
// the candidates came. Atomics count and mark and never decide what comes out.
//
// Measured on an H200: 262,144 entries 10.0 us (docs/measurements.md); 1,024 entries 4.8, before positions and scores came in one round
// trip. Predicted were 4.2 for these, and 7.5 for 262,144: launch 1, scores (16 KB a block, L2) 0.8, bound and candidates 0.7, their way through L2 and the
// last block's start 1.5, 33 KB of candidates 0.8, the cut 1.3, bits and places 0.8, output 0.5. Eight tokens of them: 16 us, in two waves.
#include "common.cuh"
#include "ptx.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kOneBlock = 16384;                                // entries that one block has alone
constexpr int kAhead = 4096;                                    // of these, so many are read before the position is known
constexpr int kBlocks = 64, kMine = 8;                          // blocks of a longer row, keys of a thread
constexpr int kMaxEntries = kBlocks * kThreads * kMine;         // 262,144
constexpr int kGroups = 128, kReach = 40;                       // a block's bound: so many of its groups' maxima reach it
constexpr int kSlots = 64, kCandidates = kBlocks * kSlots;      // of a block, of all
constexpr int kFound = 2 * kCandidates + kBlocks;               // words of a token in global memory: keys, entries, bounds
constexpr int kMaxTopK = 2 * kThreads;                          // Range has as many parts
constexpr int kBins = 4096, kBinsOfThread = kBins / kThreads;
static_assert(kCandidates == 8 * kThreads && kGroups == 8 * kWarps && kThreads == 4 * kGroups && kMaxEntries / 32 == 16 * kThreads,
              "what a thread, a warp has");

struct alignas(16) Shared {
    uint32_t bins[kBins];         // zero between the searches
    uint4 ranges[kWarps];
    unsigned sums[kWarps];
    int bin, above, inside;
    uint32_t largest[kThreads], keys[kSlots], entries[kSlots], bound;  // of a block of a long row
    unsigned passed_on;
    bool last;
    // Of the words of bits: a byte each for how many are set, then how many are in front of it in its group of four words; what is in front
    // of each group. Thread t has those of words 16 t to 16 t + 15.
    uint4 counts[kThreads], before[kThreads];
};

// Words behind Shared: keys; where they are candidates, their entries; a bit for each entry of the row, set if it is taken.
constexpr int kWords = kOneBlock + kOneBlock / 32;
static_assert(2 * kCandidates + kMaxEntries / 32 <= kWords, "a row of one block needs the most");

// A number of the same order as x, above 0, which stands for no entry. Zeros are equal; NaN is -inf.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x == x ? x + 0.0f : -INFINITY);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The entry that is number j of block `block` of a long row.
__device__ __forceinline__ int entry_of(int block, int j) { return (j / 4 * kBlocks + block) * 4 + j % 4; }

// All keys above `key` are taken, and the first `ties` that equal it.
struct Cut { uint32_t key; int ties; };

// What a thread knows of its keys: how many, the least, and the largest of each of two parts.
struct Range {
    uint32_t least = ~0u, even = 0, odd = 0, count = 0;
    __device__ __forceinline__ void add(uint32_t key) {
        const uint32_t larger = max(even, key);
        even = odd, odd = larger;  // they change places
        least = min(least, key ? key : ~0u), count += key != 0;
    }
};

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

// The cut that takes k <= kMaxTopK of the keys that each(use) hands to use(key), in every thread of the block; {0, 0} if there are fewer.
// `range`: of the same keys. What was written before is seen by `each`.
//
// Counts the keys in 4,096 equal parts of a range and goes on in the part with the k-th largest: mostly once or twice. The first range is
// narrow: if each of the 1,024 parts that Range has of the keys holds one, at least k keys reach the least of the parts' largest. Keys that
// equal the low end are not counted, so many zeros cost nothing.
template <class Each> __device__ __forceinline__ Cut cut_of(const Range& range, const Each& each, int k, Shared& s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint4 of_warp = {__reduce_min_sync(~0u, range.least), __reduce_min_sync(~0u, min(range.even, range.odd)),
                           __reduce_max_sync(~0u, max(range.even, range.odd)), __reduce_add_sync(~0u, range.count)};
    if (lane == 0) s.ranges[warp] = of_warp;
    __syncthreads();
    const uint4 other = s.ranges[lane % kWarps];
    if (int(__reduce_add_sync(~0u, lane < kWarps ? other.w : 0u)) < k) return {0, 0};
    uint32_t low = max(__reduce_min_sync(~0u, other.x), __reduce_min_sync(~0u, other.y)), high = __reduce_max_sync(~0u, other.z);
    for (;;) {
        const uint32_t width = high - low;
        const int shift = width ? max(0, 32 - 12 - __clz(width - 1)) : 0;
        if (width == 0) return {low, k};
        each([&](uint32_t key) {
            if (key - low - 1 < width) atomicAdd(&s.bins[(key - low - 1) >> shift], 1u);
        });
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
        if (int(total) < k) return {low, k - int(total)};  // only of the first range
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
        if (s.inside == k) return {low, 0};
        if (shift == 0) return {low + 1, k};
        high = low + min(high - low, 1u << shift);
    }
}

// Step 1, for entries `block` has: scores[i] is that of number threadIdx.x + i kThreads. `found`: the token's kFound words.
__device__ __forceinline__ void pass_on(const float (&scores)[kMine], int n, Shared& s, uint32_t* found) {
    const int block = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t keys[kMine], largest = 0;
#pragma unroll
    for (int i = 0; i < kMine; i++) {
        keys[i] = entry_of(block, threadIdx.x + i * kThreads) < n ? key_of(scores[i]) : 0;
        largest = max(largest, keys[i]);
    }
    s.largest[threadIdx.x] = largest;
    __syncthreads();
    const auto group_of = [&](int g) {  // threads g, g + 128, ...
        return max(max(s.largest[g], s.largest[g + kGroups]), max(s.largest[g + 2 * kGroups], s.largest[g + 3 * kGroups]));
    };
    const uint32_t own = group_of(warp * 8 + lane % 8);  // a warp compares eight groups with all
    uint32_t groups[kGroups / 32], bound = 0;
#pragma unroll
    for (int i = 0; i < kGroups / 32; i++) groups[i] = group_of(i * 32 + lane);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t group = __shfl_sync(~0u, own, i);
        int reached_by = 0;
#pragma unroll
        for (int j = 0; j < kGroups / 32; j++) reached_by += __popc(__ballot_sync(~0u, groups[j] >= group));
        if (reached_by >= kReach) bound = max(bound, group);
    }
    if (lane == 0) atomicMax(&s.bound, bound);
    __syncthreads();
    bound = s.bound;
#pragma unroll
    for (int i = 0; i < kMine; i++)
        if (keys[i] > bound) {
            const unsigned number = atomicAdd(&s.passed_on, 1u), slot = number % 16 * 4 + number / 16;  // a quad of slots has one early
            if (number < kSlots) s.keys[slot] = keys[i], s.entries[slot] = entry_of(block, threadIdx.x + i * kThreads);
        }
    __syncthreads();
    const bool fit = s.passed_on <= kSlots;  // else all are kept back
    if (threadIdx.x < kSlots) {
        found[block * kSlots + threadIdx.x] = fit ? s.keys[threadIdx.x] : 0;
        found[kCandidates + block * kSlots + threadIdx.x] = s.entries[threadIdx.x];
    }
    if (threadIdx.x == 0) found[2 * kCandidates + block] = fit ? bound : ~0u;
}

// `gridDim.x` blocks, 1 or kBlocks, a token. `aligned`: rows of `capacity` scores can be read in 16-byte accesses.
__global__ void __launch_bounds__(kThreads, 1)
select_entries_kernel(const float* scores, const int64_t* positions, uint32_t* found, unsigned* arrivals, int* out, int capacity, int ratio,
                      int top_k, int aligned) {
    DYN_SMEM(Shared, s);
    uint32_t* list = reinterpret_cast<uint32_t*>(s + 1);
    const int thread = threadIdx.x, lane = thread % 32, token = blockIdx.y;
    for (int i = thread; i < kBins / 4; i += kThreads) reinterpret_cast<uint4*>(s->bins)[i] = uint4{0, 0, 0, 0};
    s->counts[thread] = uint4{0, 0, 0, 0};
    if (thread < kSlots) s->keys[thread] = s->entries[thread] = 0;
    if (thread == 0) s->bound = s->passed_on = 0;
    scores += int64_t(token) * capacity;
    grid_dependency_launch();
    grid_dependency_wait();

    // Scores are on their way before the position is known, whether the token sees them or not.
    const bool may_be_long = gridDim.x > 1;
    const auto copy = [&](int from, int to) {
        for (int i = from + 4 * thread; i < to; i += 4 * kThreads)
            if (aligned)
                cp_async_16(list + i, scores + i);
            else
                for (int e = i; e < i + 4 && e < to; e++) list[e] = __float_as_uint(scores[e]);
    };
    float mine[kMine] = {};
    const int ahead = may_be_long ? 0 : min(capacity, kAhead);
    if (may_be_long) {
#pragma unroll
        for (int i = 0; i < kMine; i++) {
            const int entry = entry_of(blockIdx.x, thread + i * kThreads);
            if (entry < capacity) mine[i] = scores[entry];
        }
    } else {
        copy(0, ahead);
    }
    // 32 bits: what depends on the ratio alone is worked out meanwhile, which a division of 64 does not allow.
    const int n = int(min(unsigned(capacity), (unsigned(positions[token]) + 1) / unsigned(ratio)));
    out += int64_t(token) * top_k;
    const bool is_long = n > kOneBlock;
    if (!is_long && blockIdx.x > 0) return;
    if (n <= top_k) {
        for (int i = thread; i < top_k; i += kThreads) out[i] = i < n ? i : -1;
        return;
    }

    const int count = is_long ? kCandidates : (n + kThreads - 1) / kThreads * kThreads;
    uint32_t *entries = list + count, *bits = is_long ? entries + count : entries;
    Range range;
    uint32_t bounds[2] = {};  // of blocks `lane` and lane + 32
    if (!is_long) {
        if (ahead < n) copy(ahead, n);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        for (int i = thread; i < count; i += kThreads) {
            const uint32_t key = i < n ? key_of(__uint_as_float(list[i])) : 0;
            list[i] = key;
            range.add(key);
        }
    } else {
        found += int64_t(token) * kFound;
        pass_on(mine, n, *s, found);
        if (!last_to_arrive(arrivals + token, kBlocks, &s->last)) return;
        const uint4* quads = reinterpret_cast<const uint4*>(found);
        uint4 loaded[4];  // two of keys, two of entries
#pragma unroll
        for (int i = 0; i < 4; i++) loaded[i] = __ldcg(quads + thread + i * kThreads);
#pragma unroll
        for (int i = 0; i < 2; i++) bounds[i] = __ldcg(found + 2 * kCandidates + lane + 32 * i);
        for (int i = thread; i < kMaxEntries / 128; i += kThreads) reinterpret_cast<uint4*>(bits)[i] = uint4{0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 4; i++) reinterpret_cast<uint4*>(list)[thread + i * kThreads] = loaded[i];
#pragma unroll
        for (int i = 0; i < 2; i++) range.add(loaded[i].x), range.add(loaded[i].y), range.add(loaded[i].z), range.add(loaded[i].w);
    }

    uint64_t behind = 0;  // bits of the blocks whose bound reaches the cut
    const auto each = [&](const auto& use) {
#pragma unroll 4
        for (int i = thread; i < count; i += kThreads) use(list[i], is_long ? int(entries[i]) : i);
        for (uint64_t left = behind; left; left &= left - 1) {
            const int block = __ffsll(left) - 1;
            const uint32_t bound = __shfl_sync(~0u, block < 32 ? bounds[0] : bounds[1], block % 32);
#pragma unroll
            for (int i = 0; i < kMine; i++) {
                const int entry = entry_of(block, thread + i * kThreads);
                const uint32_t key = entry < n ? key_of(scores[entry]) : 0;
                use(key <= bound ? key : 0, entry);  // what is above was passed on
            }
        }
    };
    Cut cut;
    uint32_t tied = 0, first_tie = 0;  // of keys that equal `tied` those whose ~entry reaches first_tie are taken
    const auto ranked = [&](uint32_t key, int entry) { return tied == 0 ? key : key == tied ? ~uint32_t(entry) : 0; };
    for (;;) {
        const Cut of_ranked = cut_of(range, [&](const auto& use) { each([&](uint32_t key, int entry) { use(ranked(key, entry)); }); },
                                     tied ? cut.ties : top_k, *s);
        if (tied) {
            first_tie = of_ranked.key + (of_ranked.ties == 0);
            break;
        }
        cut = of_ranked;
        const bool first_time = is_long && !behind;
        if (first_time) {
            const uint32_t reached = cut.key + (cut.ties == 0);
            behind = __ballot_sync(~0u, bounds[0] >= reached) | uint64_t(__ballot_sync(~0u, bounds[1] >= reached)) << 32;
        }
        if (!first_time || !behind) {
            if (cut.ties == 0) break;
            tied = cut.key;
        }
        __syncthreads();
        range = Range();
        each([&](uint32_t key, int entry) { range.add(ranked(key, entry)); });
    }
    const auto taken = [&](uint32_t key, int entry) { return key > cut.key || (tied && key == tied && ~uint32_t(entry) >= first_tie); };

    auto* group_counts = reinterpret_cast<uint32_t*>(s->counts);
    if (is_long)
        each([&](uint32_t key, int entry) {
            const int word = entry / 32;
            if (taken(key, entry)) atomicOr(&bits[word], 1u << entry % 32), atomicAdd(&group_counts[word / 4], 1u << word % 4 * 8);
        });
    else  // a warp has the keys of a word
        for (int i = thread; i < count; i += kThreads) {
            const uint32_t word = __ballot_sync(~0u, taken(list[i], i));
            if (lane == 0) bits[i / 32] = word, reinterpret_cast<uint8_t*>(s->counts)[i / 32] = static_cast<uint8_t>(__popc(word));
        }
    __syncthreads();
    const uint4 own = s->counts[thread];
    const uint4 upto = {own.x * 0x01010101u, own.y * 0x01010101u, own.z * 0x01010101u, own.w * 0x01010101u};  // a byte and those below it
    unsigned total;
    uint4 before;
    before.x = scan((upto.x >> 24) + (upto.y >> 24) + (upto.z >> 24) + (upto.w >> 24), s->sums, total);
    before.y = before.x + (upto.x >> 24), before.z = before.y + (upto.y >> 24), before.w = before.z + (upto.z >> 24);
    s->before[thread] = before;
    s->counts[thread] = {upto.x - own.x, upto.y - own.y, upto.z - own.z, upto.w - own.w};
    __syncthreads();
    each([&](uint32_t key, int entry) {
        const int word = entry / 32, group = word / 4;
        if (taken(key, entry))
            out[reinterpret_cast<uint32_t*>(s->before)[group] + (group_counts[group] >> word % 4 * 8 & 0xff) +
                __popc(bits[word] & ((1u << entry % 32) - 1))] = entry;
    });
}

// scores [tokens, capacity] fp32, of which row s holds (positions[s] + 1) / ratio values; positions [tokens] int64 -> out [tokens, top_k]
// int32. tokens 1 to 65,535, capacity up to 262,144, top_k 1 to 1,024. For a capacity above 16,384: found [tokens, 8256] (workspace),
// 16-byte aligned, and arrivals, a counter for each token, 0; else null.
extern "C" int select_entries(const float* scores, const int64_t* positions, int* found, int* arrivals, int* out, int tokens, int capacity,
                              int ratio, int top_k, cudaStream_t stream) {
    if (capacity > kMaxEntries || top_k > kMaxTopK) return cudaErrorInvalidValue;
    const int blocks = capacity <= kOneBlock ? 1 : kBlocks;
    LAUNCH(select_entries_kernel, dim3(blocks, tokens), dim3(kThreads), sizeof(Shared) + kWords * sizeof(uint32_t), stream, scores,
           positions, reinterpret_cast<uint32_t*>(found), reinterpret_cast<unsigned*>(arrivals), out, capacity, ratio, top_k,
           int(rows_aligned(scores, capacity)));
    return cudaGetLastError();
}
