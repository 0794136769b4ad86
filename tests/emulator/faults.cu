// Kernels with one planted mistake each, and their right forms, for test_emulator.py: which one runs is an argument.
#include "../../dsv4/kernels/cuda/common.cuh"

enum Fault {
    // global memory
    kNone, kReadPastEnd, kReadBefore, kWritePastEnd, kWriteInput, kReadOutput, kSkipOutput, kFarRead, kStraddle, kUnaligned,
    // shared memory
    kSharedPastEnd, kSharedUnwritten, kSharedStale,
    // races
    kRaceWrites, kRaceReadThenWrite, kRaceShuffle, kRaceAtomic, kRaceAtomicAfterPlain, kRaceNamed,
    // barriers
    kMissingBarrier, kEarlyReturn, kTwoPlaces, kNamedShort, kNamedCounts, kNamedUneven, kNamedId, kSpin,
    // warps
    kShuffle32, kLaneOutsideMask, kNotInMask, kDivergentWarp, kDifferentCollectives, kMissingLane, kLastWarp,
    // launch
    kMisaligned, kTooManyThreads, kTooMuchShared,
    // the grid, and dependent launches
    kReadBeforeGridWait, kWriteBeforeGridWait, kNoGridWait, kGlobalWrites, kGlobalReadThenWrite, kGlobalOtherBlock,
    kGlobalPlainAndAtomic, kReadOnlyWritten, kLdgWritten,
    // matrices
    kMmaHalfWarp, kMmaTwoPlaces, kLdmatrixMisaligned, kLdmatrixUnwritten, kLdmatrixGlobal, kLdmatrixRace, kStmatrixRace,
    // cp.async
    kAsyncNoWait, kAsyncFewGroups, kAsyncUncommitted, kAsyncNoBarrier, kAsyncReuse, kAsyncReuseLate, kAsyncMisaligned, kAsyncSource,
    // bulk copies
    kBulkNoWait, kBulkOtherWait, kBulkReuse, kBulkNotAwaited, kBulkUnfenced, kBulkAfterStore, kBulkSize, kBulkMisaligned, kBulkSource,
    kBulkPastEnd, kBulkTooEarly,
    // mbarriers
    kMbarrierNone, kMbarrierOverwritten, kMbarrierNoBarrier, kMbarrierParity, kMbarrierEarly, kMbarrierArrivals, kMbarrierExpect,
    kMbarrierBytes, kMbarrierTwice, kMbarrierMisaligned,
    // clusters
    kClusterNoSync, kClusterRank, kClusterExited, kClusterMissing,
    // a named barrier with other participants
    kNamedReused,
    // tensor copies
    kTensorNoMap, kTensorMisaligned, kTensorColumn, kTensorPastEnd,
    // wgmma
    kWgmmaNoFence, kWgmmaNoWait, kWgmmaNoProxyFence, kWgmmaUnwritten, kWgmmaOverwritten, kWgmmaOneWarpLess, kWgmmaFewThreads,
    kWgmmaLanesDiffer, kWgmmaRegistersNoFence,
    // tensor memory
    kTensorColumns, kTensorNotAllocated, kTensorNotFreed, kTensorNoCommit, kTensorNotAwaited, kTensorVersion, kTensorShape,
    kTensorLanes, kTensorUnwritten, kTensorOverwritten, kTensorScaleByte, kTensorNoScales,
    // whole numbers, and a named barrier of two groups
    kDivideByZero, kRemainderOfZero, kNamedHalves, kNamedAhead, kNamedTwice,
    // the last block to arrive
    kArriveUnfenced, kArriveUnseen, kArriveNoBarrier,
    // earlier writes, read before the wait
    kEarlierAlone, kEarlierTooEarly, kEarlierWritten, kEarlierPastEnd,
};

struct __attribute__((packed)) Unaligned { float value; };  // an access that promises no alignment

// x [blocks * 64] -> out [blocks * 64]: each value plus its neighbour's (in the block, cyclic), through shared memory.
__global__ void neighbours(const float* x, float* out, int fault) {
    grid_dependency_wait();
    DYN_SMEM(float, row);
    const int t = threadIdx.x, n = blockDim.x;
    x += blockIdx.x * n;
    out += blockIdx.x * n;
    if (fault == kWriteInput) const_cast<float*>(x)[t] = 0;
    if (fault == kReadBefore && blockIdx.x == 0) row[t] = x[t - 1];
    if (fault == kFarRead) row[t] = x[t + (1 << 28)];
    if (fault == kStraddle) row[t] = reinterpret_cast<const Unaligned*>(reinterpret_cast<const char*>(x + t) + 2)->value;
    if (fault == kUnaligned) row[t] = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(x + t) + 2);
    if (fault == kReadPastEnd) row[t] = x[t + 1];
    else row[t] = x[t];
    if (fault == kSharedPastEnd && t == n - 1) row[t + 1] = x[t];
    if (fault == kEarlyReturn && t >= 32) return;
    if (fault == kTwoPlaces && t >= 32) __syncthreads();
    else if (fault != kMissingBarrier) __syncthreads();
    float other = row[fault == kSharedUnwritten ? n : (t + 1) % n];
    if (fault == kReadOutput) other += out[t];
    if (fault == kMisaligned) { float v[4]; load(v, x + 1); other += v[0]; }
    if (fault == kSkipOutput && t == 5) return;
    out[fault == kWritePastEnd ? t + 1 : t] = x[t] + other;
}

// Shared memory does not survive from block to block: the second block reads what only the first wrote.
__global__ void stale(float* out) {
    grid_dependency_wait();
    DYN_SMEM(float, row);
    if (blockIdx.x == 0) row[threadIdx.x] = 1;
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = row[threadIdx.x];
}

// Each step is right but for one missing order; values are never wrong on this machine, so only the race itself can be found.
__global__ void races(const float* x, float* out, int fault) {
    grid_dependency_wait();
    DYN_SMEM(float, row);
    const int t = threadIdx.x, n = blockDim.x, next = t / 32 * 32 + (t + 1) % 32;
    x += blockIdx.x * n;
    out += blockIdx.x * n;
    row[t] = 7;
    __syncthreads();
    if (fault == kRaceWrites ? t < 2 : t == 0) row[0] = 8;  // two threads write the same value
    __syncthreads();
    float seen = row[(t + 32) % n];
    if (fault != kRaceReadThenWrite) __syncthreads();  // or a value may be replaced before another thread has read it
    row[t] = x[t];
    if (fault == kRaceShuffle) seen += 0 * __shfl_xor_sync(~0u, seen, 1);  // exchanges values, and orders no memory
    else __syncwarp();
    float neighbour = row[next];
    __syncthreads();
    if (t == 0) row[0] = 0;
    if (fault == kRaceAtomicAfterPlain) __syncwarp();  // which says nothing to the second warp
    else __syncthreads();
    atomicAdd(&row[0], 1.0f);
    if (fault != kRaceAtomic) __syncthreads();
    float count = fault != kRaceAtomic || t == n - 1 ? row[0] : float(n);  // the last thread sees all, here
    // The first warp replaces what the second has read, and waits for it at a named barrier; the wrong one waits before the read.
    if (t >= 32 && fault == kRaceNamed) bar_arrive(2, 64);
    if (t >= 32) seen = row[t - 32];
    if (t >= 32 && fault != kRaceNamed) bar_arrive(2, 64);
    if (t < 32) {
        bar_sync(2, 64);
        row[t] = 5;
    }
    out[t] = neighbour + count - n + (seen > 1e30f);  // n atomics have added one each
}

// Two warps: the first produces, the second consumes, through named barriers that they reach in different places.
__global__ void named(const float* x, float* out, int fault) {
    grid_dependency_wait();
    DYN_SMEM(float, row);
    const int t = threadIdx.x % 32, id = fault == kNamedId ? 16 : 1;
    if (threadIdx.x < 32) {
        row[t] = x[t] * 2;
        row[t + 32] = x[t + 32] * 2;
        bar_arrive(id, fault == kNamedUneven ? 33 : 64);
    } else {
        bar_sync(id, fault == kNamedShort ? 96 : fault == kNamedCounts ? 32 : 64);
        out[t] = row[t];
        out[t + 32] = row[t + 32];
    }
}

__global__ void spin(const float* x, float* out) {
    grid_dependency_wait();
    volatile const float* flag = x;
    while (*flag != 12345.0f) {}
    out[threadIdx.x] = 1;
}

__global__ void collectives(const float* x, float* out, int fault) {
    grid_dependency_wait();
    const int t = threadIdx.x, lane = t % 32;
    float v = x[t];
    if (fault == kShuffle32) v = __shfl_xor_sync(~0u, v, 32);
    if (fault == kLaneOutsideMask && lane < 8) v = __shfl_sync(0xff, v, 8);
    if (fault == kNotInMask) v = __shfl_sync(0xff, v, 0);
    if (fault == kDivergentWarp) v = lane < 16 ? __shfl_sync(0xffff, v, 0) : __shfl_sync(~0u, v, 16);
    if (fault == kDifferentCollectives) {
        if (lane < 16) v = __shfl_xor_sync(~0u, v, 1);
        else v = __shfl_down_sync(~0u, v, 1);
    }
    if (fault == kMissingLane && lane != 7) v = __shfl_sync(~0u, v, 0);
    if (fault == kLastWarp) v = __shfl_sync(~0u, v, 0);
    out[t] = v;
}

// Global memory: out [blocks * 64].
__global__ void global_memory(const float* x, float* out, int fault) {
    const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    float v = 0;
    if (fault == kReadBeforeGridWait) v = x[i];
    if (fault == kWriteBeforeGridWait) out[i] = 0;
    if (fault == kNoGridWait) return;
    grid_dependency_wait();
    out[i] = x[i] + v;
    if (fault == kGlobalWrites && t < 2) out[blockIdx.x * blockDim.x + 2] = 3;
    __syncthreads();
    if (fault == kGlobalReadThenWrite) {
        v = out[i ^ 1];
        out[i] = 0;
    }
    if (fault == kGlobalOtherBlock && blockIdx.x == 1) v = out[t];
    if (fault == kGlobalPlainAndAtomic && t == 0) atomicAdd(out, 1.0f);  // block 0's own thread 0 wrote it plainly, before block 1 adds
    if (fault == kReadOnlyWritten)
        v = load_stream(out + i / 4 * 4).x;  // of the same thread's or the barrier's other side: ordered, and yet
    if (fault == kLdgWritten) v = __ldg(out + i);
    if (v == 12345.0f) out[i] = v;
}

// 64 rows of 8 16-bit values, from x; two warps.
__global__ void matrices(const float* x, float* out, int fault) {
    DYN_SMEM(uint4, rows);
    grid_dependency_wait();
    const int t = threadIdx.x;
    const uint4* source = reinterpret_cast<const uint4*>(x);
    if (fault != kLdmatrixUnwritten || t != 9) rows[t] = source[t % 16];
    if (fault != kLdmatrixRace) __syncthreads();
    uint32_t a[4], b[2] = {0, 0};
    float c[4] = {0, 0, 0, 0};
    const int other = fault == kLdmatrixRace ? t ^ 32 : t;
    const void* row = rows + other;
    if (fault == kLdmatrixMisaligned) row = reinterpret_cast<const char*>(rows) + other * 8;
    if (fault == kLdmatrixGlobal) row = source;
    ldmatrix_x4(a, row);
    if (fault == kMmaTwoPlaces && t % 2) mma_bf16(c, a, b);
    else if (fault != kMmaHalfWarp || t % 32 < 16) mma_bf16(c, a, b);
    stmatrix_x4(rows + (fault == kStmatrixRace ? t ^ 32 : t), a);
    out[t] = c[0];
}

// x [64] floats, copied to shared memory by 16 threads, 16 bytes each, in two groups; then out = the row and its neighbour.
__global__ void async_copies(const float* x, float* out, int fault) {
    DYN_SMEM(float, row);
    grid_dependency_wait();
    const int t = threadIdx.x;
    if (fault == kAsyncReuse) {  // the last rows of a tile that the others may still read
        row[t] = x[t];
        __syncthreads();
        if (row[63 - t] == 12345.0f) return;
    }
    if (fault == kAsyncReuseLate) {  // the reads of warp 1 are over when warp 0 copies, and nothing says so
        row[t] = x[t];
        __syncthreads();
        for (int i = 0; i < 8 && t < 32; i++) __syncwarp();
        if (t >= 32 && row[t - 32] == 12345.0f) return;
    }
    if (t < 16) {
        cp_async_16(row + t * 4 + (fault == kAsyncMisaligned), x + t * 4 + (fault == kAsyncSource ? 128 : 0));
        cp_async_commit();
        cp_async_16(row + 64 + t * 4, x + t * 4);
        if (fault != kAsyncUncommitted) cp_async_commit();
        if (fault == kAsyncFewGroups) cp_async_wait<1>();
        else if (fault != kAsyncNoWait) cp_async_wait<0>();
    }
    if (fault != kAsyncNoBarrier) __syncthreads();
    out[t] = row[t] + row[64 + t];
}

// Two bulk copies with an mbarrier each; all wait for the second, and read the first.
__global__ void two_copies(const float* x, float* out, int fault) {
    DYN_SMEM(float, row);
    grid_dependency_wait();
    uint64_t* bars = reinterpret_cast<uint64_t*>(row + 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) mbarrier_init(bars + i, 1);
        mbarrier_fence_init();
        for (int i = 0; i < 2; i++) {
            mbarrier_expect(bars + i, 256);
            bulk_load(row + 64 * i, x, 256, bars + i);
        }
    }
    __syncthreads();
    if (fault != kBulkOtherWait) mbarrier_wait(bars, 0);
    mbarrier_wait(bars + 1, 0);
    out[threadIdx.x] = row[threadIdx.x];
}

// A ring of one slot: thread 0 copies x [64] to it twice; threads 32 to 63 add it up and say when they have left it. That the kernel before
// has ended they know from the copies alone, which begin behind thread 0's wait.
__global__ void ring(const float* x, float* out, int fault) {
    DYN_SMEM(float, row);
    const int t = threadIdx.x;
    uint64_t* full = reinterpret_cast<uint64_t*>(row + 64);
    uint64_t* empty = full + 1;
    if (t == 0 && fault != kMbarrierNone) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 32);
        if (fault == kMbarrierTwice) mbarrier_init(full, 1);
        if (fault == kMbarrierMisaligned) mbarrier_init(reinterpret_cast<uint64_t*>(row + 61), 1);
        if (fault == kMbarrierOverwritten) row[64] = 0;
        if (fault != kBulkUnfenced) mbarrier_fence_init();
        if (fault == kBulkAfterStore || fault == kNone) row[5] = 7;
        if (fault == kNone) fence_async_shared();
    }
    if (fault != kMbarrierNoBarrier) __syncthreads();
    if (t > 0 && (t < 32 || fault == kBulkNotAwaited)) grid_dependency_wait();
    if (t == 0)
        for (int round = 0; round < (fault == kBulkNotAwaited ? 1 : 2); round++) {
            if (fault != kBulkReuse) mbarrier_wait(empty, (round & 1) ^ (fault != kMbarrierParity));
            else if (round) mbarrier_wait(full, 0);  // the bytes have come; whether they have been read, it does not say
            mbarrier_expect(full, fault == kMbarrierBytes ? 512 : fault == kMbarrierExpect ? 1 << 20 : 256);
            if (round == 0 && fault != kBulkTooEarly) grid_dependency_wait();
            bulk_load(row + (fault == kBulkMisaligned) + (fault == kBulkPastEnd ? 8 : 0), x + (fault == kBulkSource ? 128 : 0),
                      fault == kBulkSize ? 250 : 256, full);
            if (fault == kMbarrierArrivals) mbarrier_arrive(full);
        }
    float sum = 0;
    if (t >= 32 && fault != kBulkNotAwaited)
        for (int round = 0; round < 2; round++) {
            if (fault != kBulkNoWait) mbarrier_wait(full, fault == kMbarrierEarly ? (round & 1) ^ 1 : round & 1);
            for (int i = 0; i < 64; i++) sum += row[i];
            out[t] = sum;
            mbarrier_arrive(empty);
        }
    out[t] = sum;
}

// Two blocks; each reads the other's shared memory.
__global__ void cluster(const float* x, float* out, int fault) {
    DYN_SMEM(float, row);
    grid_dependency_wait();
    const int t = threadIdx.x, rank = int(cluster_rank());
    row[t] = x[rank * 64 + t];
    if (fault != kClusterNoSync) cluster_sync();
    const float* other = cluster_map(row, fault == kClusterRank ? 2 : rank ^ 1);
    if (fault == kClusterExited && rank == 1) return;
    if (fault == kClusterExited) __syncthreads();  // by then, the other has gone
    out[rank * 64 + t] = other[63 - t];
    if (fault == kClusterMissing && t == 63) return;
    cluster_sync();  // nobody leaves while its memory may be read
}

// Warp 2 meets warp 0 at barrier 1. Before it reads, warps 0 and 1 have used the barrier twice more, and warp 0 has written what warp 2
// reads: nothing orders the two.
__global__ void reused(const float* x, float* out, int fault) {
    DYN_SMEM(float, row);
    grid_dependency_wait();
    const int t = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp == 0) {
        bar_sync(1, 64);
        row[t] = x[t];
        bar_arrive(3, 64);  // by which warp 1 knows that warp 2 has come
        bar_sync(1, 64);
        bar_arrive(1, 64);
    }
    if (warp == 1) {
        bar_sync(3, 64);
        bar_sync(1, 64);
        bar_sync(1, 64);
    }
    if (warp == 2) {
        bar_sync(1, 64);
        for (int i = 0; i < 8; i++) __syncwarp();  // time for the others; it tells warp 2 nothing about them
    }
    if (fault == kNone) __syncthreads();
    if (warp == 2) out[t] = row[t], out[t + 32] = row[t];
}

// Two halves of a block, each of which meets at a barrier of its own and goes to the next piece of work when it has met again.
__global__ void halves(const float* x, float* out, int fault) {
    DYN_SMEM(float, row);
    grid_dependency_wait();
    const int t = threadIdx.x, barrier = fault == kNamedHalves ? 1 : 1 + t / 64;
    for (int i = 0; i < 2; i++) {
        row[t] = i ? x[t] : 0;
        bar_sync(barrier, 64);
        out[t] = row[t ^ 63];
        bar_sync(barrier, 64);
    }
}

// A producer and a consumer of two rounds, who share one row: the producer waits at barrier 2 until it has been read.
__global__ void rounds(const float* x, float* out, int fault) {
    DYN_SMEM(float, row);
    grid_dependency_wait();
    const int t = threadIdx.x % 32;
    for (int i = 0; i < 2; i++)
        if (threadIdx.x < 32) {
            if (i && fault == kNone) bar_sync(2, 64);
            if (fault == kNone) row[t] = x[32 * i + t];
            bar_arrive(1, 64);
        } else {
            for (int k = 0; k < 8 && fault == kNamedTwice; k++) __syncwarp();  // time for the producer
            bar_sync(1, 64);
            out[32 * i + t] = fault == kNone ? row[t] : 0;
            if (i == 0 && fault == kNone) bar_arrive(2, 64);
        }
}

// x as whole numbers, the first of which is zero.
__global__ void divisions(const float* x, float* out, int fault) {
    grid_dependency_wait();
    const int t = threadIdx.x, by = int(x[fault == kNone ? 63 : t % 32]);
    out[t] = fault == kRemainderOfZero ? 100 % by : 100 / by;
}

// x as a matrix of 2-byte values, 16 a row: a box of 8 rows to shared memory.
__global__ void tensor(const __grid_constant__ TensorMap map, float* out, int fault) {
    DYN_SMEM(float, rows);
    grid_dependency_wait();
    uint64_t* bar = reinterpret_cast<uint64_t*>(rows + 96);
    TensorMap nothing = {};
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
        mbarrier_expect(bar, 256);
        tensor_load(rows + (fault == kTensorMisaligned ? 4 : 0), fault == kTensorNoMap ? &nothing : &map, fault == kTensorColumn ? -4 : 0, 0,
                    bar);
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
    out[threadIdx.x] = rows[threadIdx.x];
}

// A product of a warpgroup: rows of 32 bytes, which the threads write themselves.
__global__ void product(const float* x, float* out, int fault) {
    DYN_SMEM(uint4, rows);
    grid_dependency_wait();
    const int t = threadIdx.x;
    const uint4* source = reinterpret_cast<const uint4*>(x);
    if (fault != kWgmmaUnwritten || t != 77) rows[t] = source[t % 8];
    if (t < 16) rows[128 + t] = source[t % 8];
    if (fault != kWgmmaNoProxyFence) fence_async_shared();
    __syncthreads();
    float d[4] = {0, 0, 0, 0};
    const uint64_t a = wgmma_operand(rows, Swizzle::k32, 256);
    const uint64_t b = wgmma_operand(rows + 128 + (fault == kWgmmaLanesDiffer && t % 32 == 5 ? 2 : 0), Swizzle::k32, 256);
    if (fault != kWgmmaNoFence) wgmma_fence();
    if (fault != kWgmmaOneWarpLess || t < 96) wgmma_bf16(d, a, b);
    wgmma_commit();
    if (fault == kWgmmaRegistersNoFence) {
        float sums[16] = {};
        const uint32_t registers[4] = {0, 0, 0, 0};
        wgmma_bf16(sums, registers, b);
        wgmma_commit();
    }
    if (fault == kWgmmaOverwritten && t == 0) rows[0] = source[1];
    if (fault != kWgmmaNoWait) wgmma_wait<0>();
    if (t < 64) out[t] = d[0];
    __syncthreads();
    if (fault == kNone && t == 0) rows[0] = source[1];  // which the products have read, and all have waited for them
}

// A product of 128 rows by 16 columns in tensor memory, of rows of 32 bytes, which the threads write themselves.
__global__ void tensor_memory(const float* x, float* out, int fault) {
    DYN_SMEM(uint4, rows);
    grid_dependency_wait();
    const int t = threadIdx.x, warp = t / 32;
    const uint4* source = reinterpret_cast<const uint4*>(x);
    uint64_t* bar = reinterpret_cast<uint64_t*>(rows + 288);
    uint32_t* address = reinterpret_cast<uint32_t*>(bar + 1);
    rows[t] = source[t % 8], rows[t + 128] = source[t % 8];
    if (t < 32) rows[256 + t] = source[t % 8];
    fence_async_shared();
    if (t == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
    }
    if (warp == 0 && fault != kTensorNotAllocated) tensor_alloc(address, fault == kTensorColumns ? 48 : 32);
    if (fault == kTensorNotAllocated && t == 0) *address = 0;
    __syncthreads();
    const uint32_t d = *address;
    if (t == 0) {
        uint64_t a = tensor_operand(rows, Swizzle::k32, 256);
        if (fault == kTensorVersion) a &= ~(uint64_t(1) << 46);
        const uint64_t b = tensor_operand(rows + 256, Swizzle::k32, 256);
        tensor_mma_bf16(d, a, b, tensor_shape(fault == kTensorShape ? kTensorE4m3 : kTensorBf16, 16), fault == kTensorUnwritten);
        tensor_mma_bf16(d, a, b, tensor_shape(kTensorBf16, 16), true);  // follows the first, with no wait between
        const uint32_t fp4 = tensor_shape(kTensorMxfp4, 16);
        if (fault == kTensorScaleByte) tensor_mma_mxfp4(d, a, b, fp4 | 1u << 29, d + 16, d + 20, true);  // scales from byte 1 on
        if (fault == kTensorNoScales) tensor_mma_mxfp4(d, a, b, fp4 | kTensorUpperScales, d + 16, d + 20, true);
        if (fault != kTensorNoCommit) tensor_commit(bar);
        if (fault == kTensorOverwritten) rows[0] = source[1];
    }
    if (fault != kTensorNotAwaited && fault != kTensorNoCommit) mbarrier_wait(bar, 0);
    tensor_fence_after();
    uint32_t r[8] = {0};
    if (fault != kTensorNoCommit) tensor_load_8(r, d + ((fault == kTensorLanes ? 0 : warp * 32) << 16));
    tensor_wait_load();
    if (t < 64) out[t] = __uint_as_float(r[0]);
    tensor_fence_before();
    __syncthreads();
    if (warp == 0 && fault != kTensorNotFreed && fault != kTensorNoCommit) tensor_free(d, 32);
}

// Each block leaves 63 values of x in `out`; the last to arrive, by the counter in out[63], puts their sums in the place of all.
__global__ void clear(float* out) {
    grid_dependency_wait();
    if (threadIdx.x == 0) *reinterpret_cast<unsigned*>(out + 63) = 0;
}
__global__ void arrivals(const float* x, float* out, int fault) {
    DYN_SMEM(bool, last);
    grid_dependency_wait();
    const int t = threadIdx.x, mine = blockIdx.x * 64 + t, blocks = gridDim.x;
    unsigned* counter = reinterpret_cast<unsigned*>(out + 63);
    if (mine != 63) out[mine] = x[mine];
    if (fault == kNone) {
        if (!last_to_arrive(counter, blocks, last)) return;
    } else {
        if (fault != kArriveNoBarrier) __syncthreads();
        if (t == 0) {
            if (fault != kArriveUnfenced) __threadfence();
            *last = atomicAdd(counter, 1u) == unsigned(blocks) - 1;
            if (fault != kArriveUnseen) __threadfence();
        }
        __syncthreads();
        if (!*last) return;
    }
    float sum = 0;
    for (int b = 0; b < blocks && t < 63; b++) sum += __ldcg(out + b * 64 + t);
    for (int b = 0; b < blocks && t < 63; b++) out[b * 64 + t] = sum;
}
static cudaError_t launch_arrivals(const float* x, float* out, int blocks, int fault, cudaStream_t stream) {
    LAUNCH(clear, dim3(1), dim3(32), 0, stream, out);
    LAUNCH(arrivals, dim3(blocks), dim3(64), sizeof(bool), stream, x, out, fault);
    return cudaGetLastError();
}

// Two kernels. The second reads x, which kernels before both may have written, before it waits for the first, which launches it behind its
// own wait.
__global__ void launches_late(int fault) {
    if (fault == kEarlierTooEarly) grid_dependency_launch();
    grid_dependency_wait();
    grid_dependency_launch();
}
__global__ void earlier(const float* x, float* out, int fault) {
    const int t = threadIdx.x;
    const float* from = fault == kEarlierWritten ? out : fault == kEarlierPastEnd ? x + 128 : x;
    const int bits = load_earlier(reinterpret_cast<const int*>(from) + t);
    grid_dependency_wait();
    out[t] = __int_as_float(bits);
}
static cudaError_t launch_earlier(const float* x, float* out, int fault, cudaStream_t stream) {
    if (fault != kEarlierAlone) LAUNCH(launches_late, dim3(1), dim3(64), 0, stream, fault);
    LAUNCH(earlier, dim3(1), dim3(64), 0, stream, x, out, fault);
    return cudaGetLastError();
}

static cudaError_t launch_tensor(const float* x, float* out, int fault, cudaStream_t stream) {
    TensorMap map;
    if (make_tensor_map(&map, 2, x, 16, 16, 32, 16, 8, Swizzle::kNone) != cudaSuccess) return cudaErrorInvalidValue;
    if (fault == kTensorPastEnd) map.address += 9 * 32;  // of x's 16 rows the last seven, and one more
    LAUNCH(tensor, dim3(1), dim3(64), 400, stream, map, out, fault);
    return cudaGetLastError();
}

extern "C" int faults(const float* x, float* out, int blocks, int fault, cudaStream_t stream) {
    const int n = 64, bytes = n * sizeof(float);
    if (fault >= kEarlierAlone) return launch_earlier(x, out, fault, stream);
    if (fault >= kArriveUnfenced) return launch_arrivals(x, out, blocks, fault, stream);
    if (fault == kNamedHalves) LAUNCH(halves, dim3(1), dim3(2 * n), 2 * bytes, stream, x, out, fault);
    else if (fault == kNamedAhead || fault == kNamedTwice) LAUNCH(rounds, dim3(1), dim3(n), bytes, stream, x, out, fault);
    else if (fault >= kDivideByZero) LAUNCH(divisions, dim3(1), dim3(n), 0, stream, x, out, fault);
    else if (fault >= kTensorColumns) LAUNCH(tensor_memory, dim3(1), dim3(128), 289 * 16, stream, x, out, fault);
    else if (fault >= kWgmmaNoFence) LAUNCH(product, dim3(1), dim3(fault == kWgmmaFewThreads ? 96 : 128), 144 * 16, stream, x, out, fault);
    else if (fault >= kTensorNoMap) return launch_tensor(x, out, fault, stream);
    else if (fault == kNamedReused) LAUNCH(reused, dim3(1), dim3(96), bytes, stream, x, out, fault);
    else if (fault >= kClusterNoSync) LAUNCH_CLUSTER(cluster, dim3(2), dim3(n), 2, bytes, stream, x, out, fault);
    else if (fault == kBulkOtherWait) LAUNCH(two_copies, dim3(1), dim3(n), 2 * bytes + 16, stream, x, out, fault);
    else if (fault >= kBulkNoWait) LAUNCH(ring, dim3(1), dim3(n), bytes + 16, stream, x, out, fault);
    else if (fault >= kAsyncNoWait) LAUNCH(async_copies, dim3(1), dim3(n), 2 * bytes, stream, x, out, fault);
    else if (fault >= kMmaHalfWarp) LAUNCH(matrices, dim3(1), dim3(n), n * 16, stream, x, out, fault);
    else if (fault >= kReadBeforeGridWait) LAUNCH(global_memory, dim3(blocks), dim3(n), 0, stream, x, out, fault);
    else if (fault >= kRaceWrites && fault <= kRaceNamed) LAUNCH(races, dim3(blocks), dim3(n), bytes, stream, x, out, fault);
    else if (fault == kSharedStale) LAUNCH(stale, dim3(blocks), dim3(n), bytes, stream, out);
    else if (fault >= kNamedShort && fault <= kNamedId) LAUNCH(named, dim3(1), dim3(n), bytes, stream, x, out, fault);
    else if (fault == kSpin) LAUNCH(spin, dim3(1), dim3(n), 0, stream, x, out);
    else if (fault == kLastWarp) LAUNCH(collectives, dim3(1), dim3(48), 0, stream, x, out, fault);
    else if (fault >= kShuffle32 && fault <= kMissingLane) LAUNCH(collectives, dim3(blocks), dim3(n), 0, stream, x, out, fault);
    else if (fault == kTooManyThreads) LAUNCH(neighbours, dim3(blocks), dim3(1025), bytes, stream, x, out, fault);
    else if (fault == kTooMuchShared) LAUNCH(neighbours, dim3(blocks), dim3(n), 228 * 1024, stream, x, out, fault);
    else LAUNCH(neighbours, dim3(blocks), dim3(n), bytes, stream, x, out, fault);
    return cudaGetLastError();
}

// The right forms of the races and of the named barriers.
extern "C" int ordered(const float* x, float* out, int blocks, cudaStream_t stream) {
    LAUNCH(races, dim3(blocks), dim3(64), 64 * sizeof(float), stream, x, out, int(kNone));
    return cudaGetLastError();
}

extern "C" int producer_consumer(const float* x, float* out, cudaStream_t stream) {
    LAUNCH(named, dim3(1), dim3(64), 64 * sizeof(float), stream, x, out, int(kNone));
    return cudaGetLastError();
}

// The right forms of the kernels above that have no other test: which one is an argument.
extern "C" int right_forms(const float* x, float* out, int which, cudaStream_t stream) {
    const int n = 64, bytes = n * sizeof(float), fault = kNone;
    if (which == 0) LAUNCH(global_memory, dim3(1), dim3(n), 0, stream, x, out, fault);
    if (which == 1) LAUNCH(matrices, dim3(1), dim3(n), n * 16, stream, x, out, fault);
    if (which == 2) LAUNCH(async_copies, dim3(1), dim3(n), 2 * bytes, stream, x, out, fault);
    if (which == 3) LAUNCH(ring, dim3(1), dim3(n), bytes + 16, stream, x, out, fault);
    if (which == 4) LAUNCH_CLUSTER(cluster, dim3(2), dim3(n), 2, bytes, stream, x, out, fault);
    if (which == 5) LAUNCH(reused, dim3(1), dim3(96), bytes, stream, x, out, fault);
    if (which == 6) return launch_tensor(x, out, fault, stream);
    if (which == 7) LAUNCH(product, dim3(1), dim3(128), 144 * 16, stream, x, out, fault);
    if (which == 9) LAUNCH(two_copies, dim3(1), dim3(n), 2 * bytes + 16, stream, x, out, fault);
    if (which == 10) LAUNCH(halves, dim3(1), dim3(2 * n), 2 * bytes, stream, x, out, fault);
    if (which == 11) LAUNCH(rounds, dim3(1), dim3(n), bytes, stream, x, out, fault);
    if (which == 12) LAUNCH(divisions, dim3(1), dim3(n), 0, stream, x, out, fault);
    if (which == 8) LAUNCH(tensor_memory, dim3(1), dim3(128), 289 * 16, stream, x, out, fault);
    if (which == 13) return launch_arrivals(x, out, 2, fault, stream);
    if (which == 14) return launch_earlier(x, out, fault, stream);
    return cudaGetLastError();
}

// Every collective, atomic and conversion once: x [64] -> integers and floats in `out`, a row a thing.
__global__ void everything(const float* x, const int* k, float* f, int* i, int* counters) {
    grid_dependency_wait();
    const int t = threadIdx.x, lane = t % 32;
    const float v = x[t];
    const int a = k[t];
    float* floats = f + t;
    int* ints = i + t;
    floats[0 * 64] = __shfl_sync(~0u, v, 3);
    floats[1 * 64] = __shfl_sync(~0u, v, 3, 8);
    floats[2 * 64] = __shfl_xor_sync(~0u, v, 5);
    floats[3 * 64] = __shfl_down_sync(~0u, v, 3);
    floats[4 * 64] = __shfl_up_sync(~0u, v, 3);
    floats[5 * 64] = __shfl_down_sync(~0u, v, 3, 8);
    floats[6 * 64] = __shfl_up_sync(~0u, v, 3, 8);
    floats[7 * 64] = to_float(__float2bfloat16_rn(v));
    floats[8 * 64] = rsqrtf(v * v + 1);
    floats[9 * 64] = lane < 16 ? __shfl_xor_sync(0x0000ffff, v, 1) : __shfl_xor_sync(0xffff0000, v, 2);  // two halves of a warp apart
    ints[0 * 64] = __ballot_sync(~0u, a > 0);
    ints[1 * 64] = __any_sync(~0u, a == 5);
    ints[2 * 64] = __all_sync(~0u, a < 5);
    ints[3 * 64] = __reduce_add_sync(~0u, a);
    ints[4 * 64] = __reduce_max_sync(~0u, a);
    ints[5 * 64] = __reduce_min_sync(~0u, a);
    ints[6 * 64] = __reduce_max_sync(~0u, unsigned(a));
    ints[7 * 64] = __float_as_uint(v);
    if (t < 4) counters[t] = 0;
    __syncthreads();
    atomicAdd(&counters[0], 1);
    atomicMax(&counters[1], a);
    atomicMin(&counters[2], a);
    for (int seen = 0, old;; seen = old)
        if ((old = atomicCAS(&counters[3], seen, seen + a)) == seen) break;
}

extern "C" int instructions(const float* x, const int* k, float* f, int* i, int* counters, cudaStream_t stream) {
    LAUNCH(everything, dim3(1), dim3(64), 0, stream, x, k, f, i, counters);
    return cudaGetLastError();
}

// Thread and block numbers in three dimensions: out[linear block][linear thread] = both, packed.
__global__ void coordinates(int* out) {
    grid_dependency_wait();
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] = block * 1000 + thread;
}

extern "C" int numbering(int* out, cudaStream_t stream) {
    LAUNCH(coordinates, dim3(2, 3, 2), dim3(5, 2, 3), 0, stream, out);
    return cudaGetLastError();
}
