// Kernels with one planted mistake each, and their right forms, for test_emulator.py: which one runs is an argument.
#include "../../dsv4/kernels/cuda/common.cuh"

enum Fault {
    kNone, kReadPastEnd, kReadBefore, kWritePastEnd, kWriteInput, kReadOutput, kSkipOutput, kFarRead, kStraddle,          // global memory
    kSharedPastEnd, kSharedUnwritten, kSharedStale,                                                                    // shared memory
    kRaceWrites, kRaceReadThenWrite, kRaceShuffle, kRaceAtomic, kRaceAtomicAfterPlain, kRaceNamed,                       // races
    kMissingBarrier, kEarlyReturn, kTwoPlaces, kNamedShort, kNamedCounts, kNamedUneven, kNamedId, kSpin,               // barriers
    kShuffle32, kLaneOutsideMask, kNotInMask, kDivergentWarp, kDifferentCollectives, kMissingLane, kLastWarp,          // warps
    kMisaligned, kTooManyThreads, kTooMuchShared,                                                                      // launch
};

// x [blocks * 64] -> out [blocks * 64]: each value plus its neighbour's (in the block, cyclic), through shared memory.
__global__ void neighbours(const float* x, float* out, int fault) {
    DYN_SMEM(float, row);
    const int t = threadIdx.x, n = blockDim.x;
    x += blockIdx.x * n;
    out += blockIdx.x * n;
    if (fault == kWriteInput) const_cast<float*>(x)[t] = 0;
    if (fault == kReadBefore && blockIdx.x == 0) row[t] = x[t - 1];
    if (fault == kFarRead) row[t] = x[t + (1 << 20)];
    if (fault == kStraddle) row[t] = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(x + t) + 2);
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
    DYN_SMEM(float, row);
    if (blockIdx.x == 0) row[threadIdx.x] = 1;
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = row[threadIdx.x];
}

// Each step is right but for one missing order; values are never wrong on this machine, so only the race itself can be found.
__global__ void races(const float* x, float* out, int fault) {
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
    volatile const float* flag = x;
    while (*flag != 12345.0f) {}
    out[threadIdx.x] = 1;
}

__global__ void collectives(const float* x, float* out, int fault) {
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

extern "C" int faults(const float* x, float* out, int blocks, int fault, cudaStream_t stream) {
    const int n = 64, bytes = n * sizeof(float);
    if (fault >= kRaceWrites && fault <= kRaceNamed) LAUNCH(races, dim3(blocks), dim3(n), bytes, stream, x, out, fault);
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

// Every collective, atomic and conversion once: x [64] -> integers and floats in `out`, a row a thing.
__global__ void everything(const float* x, const int* k, float* f, int* i, int* counters) {
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
    for (int seen = counters[3], old;; seen = old)
        if ((old = atomicCAS(&counters[3], seen, seen + a)) == seen) break;
}

extern "C" int instructions(const float* x, const int* k, float* f, int* i, int* counters, cudaStream_t stream) {
    LAUNCH(everything, dim3(1), dim3(64), 0, stream, x, k, f, i, counters);
    return cudaGetLastError();
}

// Thread and block numbers in three dimensions: out[linear block][linear thread] = both, packed.
__global__ void coordinates(int* out) {
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] = block * 1000 + thread;
}

extern "C" int numbering(int* out, cudaStream_t stream) {
    LAUNCH(coordinates, dim3(2, 3, 2), dim3(5, 2, 3), 0, stream, out);
    return cudaGetLastError();
}
