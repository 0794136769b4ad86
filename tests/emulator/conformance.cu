// Each instruction of ptx.cuh and each intrinsic that computes something, on inputs from test_conformance.py: the emulator's results are
// held against definitions written with tensors and, on a machine with a GPU, against the GPU's. A file without conditions: what runs is
// the instruction.
#include "../../dsv4/kernels/cuda/common.cuh"

// One warp a problem. a [n, 32, 4], b [n, 32, 2], c [n, 32, 4]: the lanes' registers.
template <int kind> __global__ void products(const uint32_t* a, const uint32_t* b, const float* c, float* out) {
    grid_dependency_wait();
    const int lane = blockIdx.x * 32 + threadIdx.x;
    uint32_t ra[4], rb[2];
    float rc[4];
    for (int i = 0; i < 4; i++) ra[i] = a[lane * 4 + i], rc[i] = c[lane * 4 + i];
    for (int i = 0; i < 2; i++) rb[i] = b[lane * 2 + i];
    if (kind == 0) mma_bf16(rc, ra, rb);
    if (kind == 1) mma_f16(rc, ra, rb);
    if (kind == 2) mma_e4m3(rc, ra, rb);
    for (int i = 0; i < 4; i++) out[lane * 4 + i] = rc[i];
}
extern "C" int conformance_mma(const uint32_t* a, const uint32_t* b, const float* c, float* out, int n, int kind, cudaStream_t stream) {
    if (kind == 0) LAUNCH(products<0>, dim3(n), dim3(32), 0, stream, a, b, c, out);
    if (kind == 1) LAUNCH(products<1>, dim3(n), dim3(32), 0, stream, a, b, c, out);
    if (kind == 2) LAUNCH(products<2>, dim3(n), dim3(32), 0, stream, a, b, c, out);
    return cudaGetLastError();
}

// x: 64 rows of 8 16-bit values. Row order[i] goes to lane i. Out [7, 32, 4]: ldmatrix x4, x4.trans, x2, x2.trans (upper registers 0);
// what is in memory after stmatrix, and its .trans, of lane i's registers 4 i.. to row order[i] (as 32-bit words); movmatrix.trans of what
// ldmatrix x4 brought.
__global__ void matrices(const uint4* x, const int* order, uint32_t* out) {
    DYN_SMEM(uint4, rows);
    grid_dependency_wait();
    const int t = threadIdx.x;
    rows[t] = x[t], rows[t + 32] = x[t + 32];
    __syncwarp();
    uint32_t four[4], two[2], mine[4];
    const uint4* row = rows + load_earlier(order + t);
    uint32_t* to = out + t * 4;
    ldmatrix_x4(four, row);
    for (int i = 0; i < 4; i++) to[i] = four[i];
    uint32_t turned[4];
    ldmatrix_x4_trans(turned, row);
    for (int i = 0; i < 4; i++) to[128 + i] = turned[i];
    ldmatrix_x2(two, row);
    for (int i = 0; i < 4; i++) to[256 + i] = i < 2 ? two[i] : 0;
    ldmatrix_x2_trans(two, row);
    for (int i = 0; i < 4; i++) to[384 + i] = i < 2 ? two[i] : 0;
    __syncwarp();
    for (int i = 0; i < 4; i++) mine[i] = t * 4 + i;
    stmatrix_x4(rows + order[t], mine);
    __syncwarp();
    const uint4 v = rows[order[t]];
    to[512] = v.x, to[513] = v.y, to[514] = v.z, to[515] = v.w;
    __syncwarp();
    stmatrix_x4_trans(rows + order[t], mine);
    __syncwarp();
    const uint4 w = rows[order[t]];
    to[640] = w.x, to[641] = w.y, to[642] = w.z, to[643] = w.w;
    for (int i = 0; i < 4; i++) to[768 + i] = movmatrix_trans(four[i]);
}
extern "C" int conformance_matrices(const void* x, const int* order, uint32_t* out, cudaStream_t stream) {
    LAUNCH(matrices, dim3(1), dim3(32), 1024, stream, static_cast<const uint4*>(x), order, out);
    return cudaGetLastError();
}

// x [64 KB] through shared memory in rounds of 4 KB: cp.async in three groups under way (in odd rounds pieces of 4 bytes for those of 16 with
// an odd number; zeros for the last 1,000 bytes), bulk copies in a ring of three slots with a thread of its own, and load_stream; out
// [3, 64 KB].
constexpr int kRound = 4096, kRounds = 16, kSlots = 3, kThreads = 128;
__global__ void copies(const uint4* x, uint4* out) {
    DYN_SMEM(char, memory);
    worked_out(x);
    grid_dependency_launch();
    grid_dependency_wait();
    const int t = threadIdx.x, words = kRound / 16;
    auto slot = [&](int round) { return reinterpret_cast<uint4*>(memory + round % kSlots * kRound); };
    auto issue = [&](int round) {
        if (round < kRounds)
            for (int i = t; i < words; i += kThreads) {
                uint4* to = slot(round) + i;
                const uint4* from = x + round * words + i;
                const int left = kRounds * words * 16 - 1000 - (round * words + i) * 16;  // bytes up to the zeros
                if (round % 2 == 0) {
                    cp_async_16(to, from);
                } else if (i % 2 == 0) {
                    cp_async_16(to, from, left >= 16);
                } else {
                    for (int k = 0; k < 4; k++)
                        cp_async_4(reinterpret_cast<char*>(to) + 4 * k, reinterpret_cast<const char*>(from) + 4 * k, left >= 4 * k + 4);
                }
            }
        cp_async_commit();
    };
    issue(0), issue(1);
    for (int round = 0; round < kRounds; round++) {
        cp_async_wait<1>();
        __syncthreads();  // the round is there for all, and all have left the slot before it
        issue(round + 2);
        for (int i = t; i < words; i += kThreads) out[round * words + i] = slot(round)[words - 1 - i];
    }
    fence_async_shared();  // the copy engine writes next where the block has read and written
    if (t < 64) bar_arrive(1, kThreads), bar_sync(2, kThreads);  // __syncthreads in two halves
    else bar_sync(1, kThreads), bar_arrive(2, kThreads);
    uint64_t* full = reinterpret_cast<uint64_t*>(memory + kSlots * kRound);
    uint64_t* empty = full + kSlots;
    if (t == 0) {
        for (int i = 0; i < kSlots; i++) mbarrier_init(full + i, 1), mbarrier_init(empty + i, kThreads - 32);
        mbarrier_fence_init();
    }
    __syncthreads();
    if (t < 32) {  // the copying warp
        for (int round = 0; t == 0 && round < kRounds; round++) {
            const int s = round % kSlots;
            mbarrier_wait(empty + s, (round / kSlots & 1) ^ 1);
            mbarrier_expect(full + s, kRound);
            bulk_load(slot(round), x + round * words, kRound / 2, full + s);
            bulk_load_keep(slot(round) + words / 2, x + round * words + words / 2, kRound / 2, full + s);
        }
    } else {
        for (int round = 0; round < kRounds; round++) {
            const int s = round % kSlots;
            mbarrier_wait(full + s, round / kSlots & 1);
            for (int i = t - 32; i < words; i += kThreads - 32) out[(kRounds + round) * words + i] = slot(round)[words - 1 - i];
            mbarrier_arrive(empty + s);
        }
    }
    for (int i = t; i < kRounds * words; i += kThreads) out[2 * kRounds * words + i] = load_stream(x + i);
}
extern "C" int conformance_copies(const void* x, void* out, cudaStream_t stream) {
    LAUNCH(copies, dim3(1), dim3(kThreads), kSlots * kRound + 64, stream, static_cast<const uint4*>(x), static_cast<uint4*>(out));
    return cudaGetLastError();
}

// i runs over all 16-bit patterns. packed [10, n]: words of a x b, a x b + c in bf16 pairs, a x b in f16 pairs, the f16 pair of e4m3 pair i,
// bf16 pair of the floats x[i] and y[i], byte_perm of a and b by c, f16 pair of the floats, bits of a and b selected by c, a rotated by
// i % 32, the larger magnitudes of a and b in bf16 pairs without their signs. small [n]: to_e4m3(x[i]); floats [3, n]:
// from_e4m3(i), bf16_lo(a), bf16_hi(a).
__global__ void conversions(const uint32_t* a, const uint32_t* b, const uint32_t* c, const float* x, const float* y, uint32_t* packed,
                            uint8_t* small, float* floats, int n) {
    grid_dependency_wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    packed[i] = mul_bf16x2(a[i], b[i]);
    packed[n + i] = fma_bf16x2(a[i], b[i], c[i]);
    packed[2 * n + i] = mul_f16x2(a[i], b[i]);
    packed[3 * n + i] = e4m3x2_to_f16x2(uint16_t(i));
    packed[4 * n + i] = pack_bf16(x[i], y[i]);
    packed[5 * n + i] = byte_perm(a[i], b[i], c[i]);
    packed[6 * n + i] = pack_f16(opaque(x)[made_here(i)], y[i]);
    packed[7 * n + i] = select_bits(a[i], b[i], c[i]);
    packed[8 * n + i] = rotate_left(a[i], i % 32);
    packed[9 * n + i] = max_magnitudes_bf16x2(a[i], b[i]) & 0x7fff7fff;
    small[i] = to_e4m3(x[i]);
    floats[i] = from_e4m3(uint8_t(i));
    floats[n + i] = bf16_lo(a[i]);
    floats[2 * n + i] = bf16_hi(a[i]);
}
extern "C" int conformance_conversions(const uint32_t* a, const uint32_t* b, const uint32_t* c, const float* x, const float* y,
                                       uint32_t* packed, uint8_t* small, float* floats, int n, cudaStream_t stream) {
    LAUNCH(conversions, dim3((n + 255) / 256), dim3(256), 0, stream, a, b, c, x, y, packed, small, floats, n);
    return cudaGetLastError();
}

// Shuffles, votes and reductions of one warp; x [32] floats, k [32] integers. out [16, 32].
__global__ void lanes(const float* x, const int* k, int* out) {
    grid_dependency_wait();
    const int t = threadIdx.x, i = k[t];
    const float v = x[t];
    int row = 0;
    auto put = [&](int value) { out[row++ * 32 + t] = value; };
    put(__float_as_int(__shfl_sync(~0u, v, i & 31)));
    put(__float_as_int(__shfl_sync(~0u, v, i & 31, 8)));
    put(__float_as_int(__shfl_xor_sync(~0u, v, 21)));
    put(__float_as_int(__shfl_xor_sync(~0u, v, 5, 4)));
    put(__float_as_int(__shfl_down_sync(~0u, v, 7)));
    put(__float_as_int(__shfl_down_sync(~0u, v, 3, 8)));
    put(__float_as_int(__shfl_up_sync(~0u, v, 7)));
    put(__float_as_int(__shfl_up_sync(~0u, v, 3, 8)));
    put(__ballot_sync(~0u, i > 0));
    put(__any_sync(~0u, i == 3));
    put(__all_sync(~0u, i != 3));
    put(__reduce_add_sync(~0u, i));
    put(__reduce_max_sync(~0u, i));
    put(__reduce_min_sync(~0u, unsigned(i)));
    put(__reduce_xor_sync(~0u, unsigned(i)));
    put(t % 3 ? __shfl_sync(0xb6db6db6u, i, 1) : __shfl_sync(0x49249249u, i, 30));
}
extern "C" int conformance_lanes(const float* x, const int* k, int* out, cudaStream_t stream) {
    LAUNCH(lanes, dim3(1), dim3(32), 0, stream, x, k, out);
    return cudaGetLastError();
}

// Four blocks of a cluster: out [4, 32] = rank * 1000 + what the next block has in its shared memory, x [4, 32].
__global__ void neighbours(const int* x, int* out) {
    DYN_SMEM(int, row);
    grid_dependency_wait();
    const int t = threadIdx.x, rank = int(cluster_rank());
    row[t] = x[rank * 32 + t];
    cluster_sync();
    out[rank * 32 + t] = rank * 1000 + *cluster_map(row + t, (rank + 1) % cluster_size());
    cluster_sync();  // nobody leaves while its memory is read
}
extern "C" int conformance_cluster(const int* x, int* out, cudaStream_t stream) {
    LAUNCH_CLUSTER(neighbours, dim3(4), dim3(32), 4, 128, stream, x, out);
    return cudaGetLastError();
}

// Arithmetic and bits: x [n] floats, k [n] -> out [17, n].
__global__ void scalars(const float* x, const int* k, int* out, int n) {
    grid_dependency_wait();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float v = x[i];
        const int a = k[i];
        int row = 0;
        auto put = [&](int value) { out[row++ * n + i] = value; };
        put(__popc(a)), put(__ffs(a)), put(__clz(a)), put(int(__brev(a)));
        put(__ffsll((static_cast<long long>(a) << 32))), put(__clzll(static_cast<long long>(unsigned(a))));
        put(__float2int_rn(v)), put(__float2int_rz(v)), put(int(__float2uint_rn(v)));
        put(__float_as_int(__fmaf_rn(v, v, 1.0f))), put(__float_as_int(__int2float_rn(a)));
        put(__float_as_int(__fsqrt_rn(fabsf(v)))), put(__float_as_int(__fdiv_rn(1.0f, v))), put(min(a, 7) + max(a, -7));
        put(__float_as_int(max_nan(v, __int_as_float(a)))), put(__float_as_int(reciprocal(v)));
        put(__float_as_int(min_nan(v, __int_as_float(a))));
    }
}
extern "C" int conformance_scalars(const float* x, const int* k, int* out, int n, cudaStream_t stream) {
    LAUNCH(scalars, dim3(1), dim3(128), 0, stream, x, k, out, n);
    return cudaGetLastError();
}

// Each of n blocks leaves 64 values of x in `values` and counts up to `most`, which out[1, block] gets the old value of; the last of them to
// arrive at counters[1] leaves the sums in out[0].
__global__ void arrivals(const int* x, int* values, unsigned* counters, int* out, int most) {
    DYN_SMEM(bool, last);
    grid_dependency_wait();
    const int t = threadIdx.x, n = gridDim.x;
    values[blockIdx.x * 64 + t] = x[blockIdx.x * 64 + t];
    if (t == 0) out[n + blockIdx.x] = int(atomic_inc_fenced(counters, most));
    if (!last_to_arrive(counters + 1, n, last)) return;
    int sum = 0;
    for (int b = 0; b < n; b++) sum += __ldcg(values + b * 64 + t);
    for (int i = t; i < n; i += 64) out[i] = i == t ? sum : 0;
}
extern "C" int conformance_arrivals(const int* x, int* values, unsigned* counters, int* out, int n, int most, cudaStream_t stream) {
    LAUNCH(arrivals, dim3(n), dim3(64), sizeof(bool), stream, x, values, counters, out, most);
    return cudaGetLastError();
}

// out [2 n, 2]: pair i of x [n, 2] by the loads and stores of other GPUs' memory, and the same by what this thread then reads there; counters
// [2]: what all threads store, and 1 if no clock went back and thread 0's ran on.
__global__ void system_accesses(const uint64_t* x, uint64_t* out, int* counters, int n) {
    grid_dependency_wait();
    const int i = threadIdx.x;
    const uint64_t began = global_nanoseconds();
    uint64_t a, b;
    load_pair_system(x + 2 * i, a, b);
    store_pair_system(out + 2 * i, a, b);
    load_pair_system(out + 2 * i, a, b);
    store_pair_system(out + 2 * (n + i), a, b);
    store_system(counters, 7);
    uint64_t now = global_nanoseconds();
    if (i) return;
    while (now == began) now = global_nanoseconds();
    store_system(counters + 1, now > began && now - began < 1'000'000'000);
}
extern "C" int conformance_system(const void* x, void* out, int* counters, int n, cudaStream_t stream) {
    LAUNCH(system_accesses, dim3(1), dim3(n), 0, stream, static_cast<const uint64_t*>(x), static_cast<uint64_t*>(out), counters, n);
    return cudaGetLastError();
}
