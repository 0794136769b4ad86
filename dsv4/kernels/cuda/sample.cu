// sample: the next token from logits (dsv4/ops/sample.py, sample_ref), the same token on every device: all sums are of integers.
//
// One cluster of 8 blocks, each with a slice of the ids in its shared memory; the blocks exchange sums by writing into one another's.
// 129,280 logits are 517 KB: 65 KB a block, 16 a thread, two batches of loads of 0.5 us from L2. Greedy: that, two reductions and one
// exchange: 3.5 us with the launch. A draw adds the masses (50 instructions each: 3.5 us) and two passes: 9 us. top_k and top_p each find a
// threshold key in 16 steps of two bits, the first five of 1.9 us, the others of 0.7 us, as few keys remain: 17 us, 0.15 % of a Pro token.
// Measured on an H200: greedy 5.1 us (docs/measurements.md).
#include "common.cuh"
#include "ptx.cuh"

constexpr int kBlocks = 8, kMaxThreads = 1024, kMaxWarps = kMaxThreads / 32;
constexpr int kBatch = 8;  // loads of a thread that are under way at once
constexpr float kLargest = 3.402823466e38f;

struct Exchange {
    uint64_t best[kBlocks];          // of each block: its largest key in the upper word, that token's id inverted in the lower
    uint64_t sums[2][3][kBlocks];    // of each block; two sets in turn, so that one barrier an exchange is enough
    uint64_t partial[3][kMaxWarps];  // of each warp of this block
};

// fp32 (no NaN) -> an unsigned number of the same order; the zeros are equal. Numbers are 0x00800000 to 0xff7fffff.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// masses() of dsv4/ops/sample.py, where the numbers are explained.
__device__ __forceinline__ uint64_t mass_of(float quotient) {
    if (!(quotient >= -28.5f)) return 0;
    const uint64_t product = uint64_t(-quotient * 1073741824.0f) * 193635251u;
    const int n = int(product >> 57);
    const uint32_t rest = ~uint32_t(product >> 25) & ~1u;  // twice the definition's, so that a shift by 31 is the upper word of a product
    constexpr uint32_t coefficients[] = {2147483652u, 1488521813u, 515889645u, 119149570u, 20785153u, 2671403u};
    uint32_t power = 466052u;
#pragma unroll
    for (int i = 5; i >= 0; i--) power = coefficients[i] + uint32_t(uint64_t(power) * rest >> 32);
    return ((uint64_t(power) << 8) + (uint64_t(1) << n >> 1)) >> n;
}

// floor(total * steps / 2^30) in two halves, as 88 bits do not fit.
__device__ __forceinline__ uint64_t share(uint64_t total, uint64_t steps) {
    return (total >> 30) * steps + ((total & 0x3fffffff) * steps >> 30);
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

struct Cluster {
    Exchange* shared;
    int rank, warps, warp, lane, turn;

    // Tells every block this block's N sums, of which each warp has put its own into `partial`. All threads of the cluster call it.
    template <int N> __device__ __forceinline__ const uint64_t (&tell())[3][kBlocks] {
        __syncthreads();
        turn ^= 1;
        for (int k = warp; k < N; k += warps) {
            const uint64_t sum = warp_sum(lane < warps ? shared->partial[k][lane] : 0);
            if (lane < kBlocks) cluster_map(shared, lane)->sums[turn][k][rank] = sum;
        }
        cluster_sync();
        return shared->sums[turn];
    }

    // Sums over the cluster, in place and in every thread.
    template <int N> __device__ __forceinline__ void sum(uint64_t (&x)[N]) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            const uint64_t part = warp_sum(x[k]);
            if (lane == 0) shared->partial[k][warp] = part;
        }
        const auto& sums = tell<N>();
#pragma unroll
        for (int k = 0; k < N; k++) {
            x[k] = 0;
#pragma unroll
            for (int block = 0; block < kBlocks; block++) x[k] += sums[k][block];
        }
    }
};

// The largest key T for which the weights of keys >= T sum to `need` or more; `above` becomes the sum of those > T. Two bits of T a step:
// the keys that begin as T does remain (a bit each of `left`: a thread has at most 32), the others are above it, and in `above`, or below.
template <class Weight>
__device__ __forceinline__ uint32_t find_threshold(Cluster& cluster, const uint32_t* keys, int n, uint64_t need, uint64_t& above,
                                                   Weight weight) {
    uint32_t threshold = 0, left = 0, bit = 1;
    for (int i = threadIdx.x; i < n; i += blockDim.x, bit <<= 1) left |= bit;
    above = 0;
    for (int shift = 30; shift >= 0; shift -= 2) {
        uint64_t sums[3] = {};
        for (uint32_t rest = left; rest; rest &= rest - 1) {
            const int place = __ffs(rest) - 1, i = threadIdx.x + place * blockDim.x;
            const uint32_t key = keys[i];
            if (shift < 30 && (key ^ threshold) >> (shift + 2)) {
                left ^= 1u << place;
                continue;
            }
            const uint64_t w = weight(i);
#pragma unroll
            for (int k = 0; k < 3; k++) sums[k] += (key >> shift & 3) > unsigned(k) ? w : 0;
        }
        cluster.sum(sums);
        const uint64_t before = above;
        uint32_t digit = 3;
#pragma unroll
        for (int k = 2; k >= 0; k--)
            if (before + sums[k] < need) digit = k, above = before + sums[k];
        threshold |= digit << shift;
    }
    return threshold;
}

__global__ void __launch_bounds__(kMaxThreads) sample_kernel(const float* logits, uint8_t* seen, const float* uniforms,
                                                             const int64_t* positions, int64_t* token, int vocab, int slice, int count,
                                                             int tokens, float temperature, int top_k, int top_p, float penalty) {
    DYN_SMEM(Exchange, shared);
    uint64_t* mass = reinterpret_cast<uint64_t*>(shared + 1);
    uint32_t* keys = reinterpret_cast<uint32_t*>(mass + slice);
    Cluster cluster{shared, int(cluster_rank()), int(blockDim.x / 32), int(threadIdx.x / 32), int(threadIdx.x % 32), 0};
    const int first = cluster.rank * slice, n = vocab - first < slice ? vocab - first : slice;
    grid_dependency_launch();
    cluster_sync();  // all blocks run: their shared memory may be written
    grid_dependency_wait();

    float u = 0.0f;
    if (temperature > 0.0f) {
        const int64_t position = positions[tokens - 1];
        u = uniforms[position < count ? position : count - 1];
    }
    uint64_t best = 0;
    for (int from = threadIdx.x; from < n; from += kBatch * blockDim.x) {
        float x[kBatch];
        bool penalised[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            const int i = from + j * blockDim.x;
            x[j] = i < n ? logits[first + i] : 0.0f;
            penalised[j] = penalty != 1.0f && i < n ? seen[first + i] : false;
        }
#pragma unroll
        for (int j = 0; j < kBatch; j++) {
            const int i = from + j * blockDim.x;
            if (i >= n) break;
            if (!(fabsf(x[j]) <= kLargest)) best = ~uint64_t(0);
            if (penalised[j]) x[j] = fminf(fmaxf(x[j] > 0.0f ? x[j] / penalty : x[j] * penalty, -kLargest), kLargest);
            const uint32_t key = key_of(x[j]);
            if (temperature > 0.0f) keys[i] = key;
            best = larger(best, uint64_t(key) << 32 | uint32_t(~(first + i)));
        }
    }
#pragma unroll
    for (int offset = 16; offset; offset /= 2) best = larger(best, __shfl_xor_sync(~0u, best, offset));
    if (cluster.lane == 0) shared->partial[0][cluster.warp] = best;
    __syncthreads();
    if (cluster.warp == 0) {
        best = cluster.lane < cluster.warps ? shared->partial[0][cluster.lane] : 0;
#pragma unroll
        for (int offset = 16; offset; offset /= 2) best = larger(best, __shfl_xor_sync(~0u, best, offset));
        if (cluster.lane < kBlocks) cluster_map(shared, cluster.lane)->best[cluster.rank] = best;
    }
    cluster_sync();
    for (int block = 0; block < kBlocks; block++) best = larger(best, shared->best[block]);

    if (best == ~uint64_t(0) || temperature == 0.0f) {
        if (cluster.rank == 0 && threadIdx.x == 0) {
            const int64_t chosen = best == ~uint64_t(0) ? -1 : int64_t(~uint32_t(best));
            *token = chosen;
            if (chosen >= 0) seen[chosen] = 1;
        }
        return;
    }

    const float largest = value_of(best >> 32);
    for (int i = threadIdx.x; i < n; i += blockDim.x) mass[i] = mass_of((value_of(keys[i]) - largest) / temperature);

    // Kept: keys above the threshold, and at it the `ties` tokens of lowest id. At first everything.
    uint32_t threshold = 0;
    uint64_t ties = 0, above;
    const auto mass_at = [&](uint32_t key) { return mass_of((value_of(key) - largest) / temperature); };
    if (top_k && top_k < vocab) {
        threshold = find_threshold(cluster, keys, n, top_k, above, [](int) { return uint64_t(1); });
        ties = top_k - above;
    }
    if (top_p) {
        uint64_t total[1] = {0};
        for (int i = threadIdx.x; i < n; i += blockDim.x) total[0] += keys[i] > threshold ? mass[i] : 0;
        cluster.sum(total);
        total[0] += ties ? ties * mass_at(threshold) : 0;
        const uint64_t dropped = share(total[0], 0x40000000 - top_p), need = total[0] - dropped;  // the share of top_p, rounded up
        threshold = find_threshold(cluster, keys, n, need, above, [&](int i) { return mass[i]; });  // not below top_k's, as need <= total
        const uint64_t each = mass_at(threshold);
        ties = (need - above + each - 1) / each;
    }
    const uint64_t tie_mass = ties ? mass_at(threshold) : 0;

    // A warp takes consecutive ids: its mass above the threshold, its ties.
    __syncthreads();
    const int range = (slice + cluster.warps - 1) / cluster.warps;
    const int begin = cluster.warp * range, end = begin + range < n ? begin + range : n;
    uint64_t own = 0, own_ties = 0;
    for (int i = begin + cluster.lane; i < end; i += 32) own += keys[i] > threshold ? mass[i] : 0, own_ties += keys[i] == threshold;
    own = warp_sum(own), own_ties = warp_sum(own_ties);
    if (cluster.lane == 0) shared->partial[0][cluster.warp] = own, shared->partial[1][cluster.warp] = own_ties;
    const auto& sums = cluster.tell<2>();

    // Walks blocks, then warps, then ids to where the running sum exceeds the target.
    const auto kept = [&](uint64_t sum, uint64_t its_ties, uint64_t ties_before) {
        const uint64_t left = ties > ties_before ? ties - ties_before : 0;
        return sum + (its_ties < left ? its_ties : left) * tie_mass;
    };
    uint64_t total = 0, ties_before = 0;
    for (int block = 0; block < kBlocks; block++) {
        total += kept(sums[0][block], sums[1][block], ties_before);
        ties_before += sums[1][block];
    }
    const int64_t steps = int64_t(u * 1073741824.0f);
    const uint64_t target = share(total, steps < 0 ? 0 : steps > 0x3fffffff ? 0x3fffffff : steps);
    uint64_t running = 0;
    ties_before = 0;
    const auto passed = [&](uint64_t sum, uint64_t its_ties) {  // the target lies further on
        const uint64_t part = kept(sum, its_ties, ties_before);
        if (running + part > target) return false;
        running += part;
        ties_before += its_ties;
        return true;
    };
    int block = 0, warp = 0;
    while (passed(sums[0][block], sums[1][block])) block++;
    if (block != cluster.rank) return;
    while (passed(shared->partial[0][warp], shared->partial[1][warp])) warp++;
    if (warp != cluster.warp) return;
    for (int i = begin + cluster.lane;; i += 32) {
        const uint32_t key = i < end ? keys[i] : 0;
        const bool tie = i < end && key == threshold;
        const unsigned tied = __ballot_sync(~0u, tie), below = (1u << cluster.lane) - 1;
        uint64_t sum = key > threshold || (tie && ties_before + __popc(tied & below) < ties) ? mass[i] : 0;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const uint64_t lower = __shfl_up_sync(~0u, sum, offset);
            if (cluster.lane >= offset) sum += lower;
        }
        const unsigned beyond = __ballot_sync(~0u, running + sum > target);
        if (beyond) {
            if (cluster.lane == __ffs(beyond) - 1) *token = first + i, seen[first + i] = 1;
            return;
        }
        running += __shfl_sync(~0u, sum, 31);
        ties_before += __popc(tied);
    }
}

// logits [vocab] fp32, seen [vocab] uint8 (in and out), uniforms [count] fp32, positions [tokens] int64 -> token [1] int64. temperature 0
// is greedy; top_k 0 is off; top_p in steps of 2^-30, 0 is off. vocab up to 150,000.
extern "C" int sample(const float* logits, uint8_t* seen, const float* uniforms, const int64_t* positions, int64_t* token, int vocab,
                      int count, int tokens, float temperature, int top_k, int top_p, float penalty, cudaStream_t stream) {
    const int slice = (vocab + kBlocks - 1) / kBlocks, threads = slice < kMaxThreads ? (slice + 31) / 32 * 32 : kMaxThreads;
    const size_t each = temperature > 0.0f ? sizeof(uint64_t) + sizeof(uint32_t) : 0;  // greedy keeps nothing
    LAUNCH_CLUSTER(sample_kernel, dim3(kBlocks), dim3(threads), kBlocks, sizeof(Exchange) + slice * each, stream, logits, seen, uniforms,
                   positions, token, vocab, slice, count, tokens, temperature, top_k, top_p, penalty);
    return cudaGetLastError();
}
