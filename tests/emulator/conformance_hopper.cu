// Tensor copies (sm_90 and later) and the products of warpgroups (sm_90a), on inputs from test_conformance.py, as conformance.cu does for
// the rest.
#include "../../dsv4/kernels/cuda/tensor_map.cuh"

// One box to shared memory, and all of its bytes as they lie there to `out`.
__global__ void box(const __grid_constant__ TensorMap map, int x, int y, int bytes, uint8_t* out) {
    DYN_SMEM(uint8_t, memory);
    grid_dependency_wait();
    uint64_t* bar = reinterpret_cast<uint64_t*>(memory + bytes);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
        mbarrier_expect(bar, bytes);
        tensor_load(memory, &map, x, y, bar);
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = memory[i];
}
extern "C" int conformance_box(const uint8_t* matrix, uint8_t* out, int element_bytes, int width, int height, int row_bytes, int box_width,
                               int box_height, int swizzle, int x, int y, cudaStream_t stream) {
    TensorMap map;
    const cudaError_t error =
        make_tensor_map(&map, element_bytes, matrix, width, height, row_bytes, box_width, box_height, static_cast<Swizzle>(swizzle));
    if (error != cudaSuccess) return error;
    const int bytes = box_width * box_height * element_bytes;
    LAUNCH(box, dim3(1), dim3(64), bytes + 16, stream, map, x, y, bytes, out);
    return cudaGetLastError();
}

// out [64, N] = a [64, row] b [N, row]^T, rows of 32, 64 or 128 bytes by the swizzle (of 128 bytes in cells without one): tensor copies,
// then one product a step of 32 bytes.
template <int kind, int N>
__global__ void warpgroup(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, Swizzle swizzle, float* out) {
#if defined(DSV4_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    DYN_SMEM(char, memory);
    grid_dependency_wait();
    const bool cells = swizzle == Swizzle::kNone;
    const int t = threadIdx.x, row = cells ? 128 : 16 << static_cast<int>(swizzle), chunk = kind == 2 ? 16 : 8;
    char *a = memory, *b = memory + 64 * 128;
    uint64_t* bar = reinterpret_cast<uint64_t*>(memory + (64 + N) * 128);
    if (t == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
        mbarrier_expect(bar, (64 + N) * row);
        // Without a swizzle, a box is one column of chunks: cells of 8 rows by 16 bytes, one below the other.
        for (int i = 0; i < (cells ? row / 16 : 1); i++) {
            tensor_load(a + i * 64 * 16, &a_map, i * chunk, 0, bar);
            tensor_load(b + i * N * 16, &b_map, i * chunk, 0, bar);
        }
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
    float d[N / 2];
    for (int i = 0; i < N / 2; i++) d[i] = 0;
    wgmma_fence();
    for (int k = 0; k < row / 32; k++) {
        const int a_step = cells ? k * 2 * 64 * 16 : k * 32, b_step = cells ? k * 2 * N * 16 : k * 32;
        const int group = cells ? 128 : 8 * row;
        const uint64_t a_operand = wgmma_operand(a + a_step, swizzle, group, 64 * 16),
                       b_operand = wgmma_operand(b + b_step, swizzle, group, N * 16);
        if (kind == 0) wgmma_bf16(d, a_operand, b_operand);
        if (kind == 1) wgmma_f16(d, a_operand, b_operand);
        if (kind == 2) wgmma_e4m3(d, a_operand, b_operand);
    }
    wgmma_commit();
    wgmma_wait<0>();
    const int warp = t / 32, g = t % 32 / 4, q = t % 4;
    for (int i = 0; i < N / 2; i++) out[(16 * warp + g + 8 * (i / 2 % 2)) * N + i / 4 * 8 + 2 * q + i % 2] = d[i];
#endif
}

// out [64, 64] = a [64, 64] b [64, 64]^T in bf16, a in registers, b in rows of 128 bytes that the threads write, swizzled.
__global__ void from_registers(const uint32_t* a, const uint4* b, float* out) {
#ifdef DSV4_WARPGROUPS
    DYN_SMEM(uint4, rows);
    grid_dependency_wait();
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, q = t % 4;
    for (int i = t; i < 64 * 8; i += 128) rows[i / 8 * 8 + (i % 8 ^ i / 8 % 8)] = b[i];
    fence_async_shared();
    __syncthreads();
    uint32_t registers[4][4];
    for (int step = 0; step < 4; step++)
        for (int i = 0; i < 4; i++) registers[step][i] = a[(row + i % 2 * 8) * 32 + step * 8 + i / 2 * 4 + q];
    float d[32];
    const uint64_t operand = wgmma_operand(rows, Swizzle::k128, 1024);
    wgmma_fence(registers);
    wgmma_bf16<true>(d, registers[0], operand);
    wgmma_bf16<false>(d, registers[1], operand + 2);
    wgmma_bf16<false>(d, registers[2], operand + 4);
    wgmma_bf16<false>(d, registers[3], operand + 6);
    wgmma_commit();
    wgmma_wait(d);
    for (int i = 0; i < 32; i++) out[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + 2 * q + i % 2] = d[i];
#endif
}
extern "C" int conformance_wgmma_registers(const uint32_t* a, const uint4* b, float* out, cudaStream_t stream) {
    LAUNCH(from_registers, dim3(1), dim3(128), 64 * 128, stream, a, b, out);
    return cudaGetLastError();
}

template <int kind, int N> static cudaError_t launch(const void* a, const void* b, float* out, int swizzle, cudaStream_t stream) {
    const Swizzle s = static_cast<Swizzle>(swizzle);
    const int element = kind == 2 ? 1 : 2, row = swizzle ? 16 << swizzle : 128, box_row = swizzle ? row : 16;
    TensorMap a_map, b_map;
    cudaError_t error = make_tensor_map(&a_map, element, a, row / element, 64, row, box_row / element, 64, s);
    if (error == cudaSuccess) error = make_tensor_map(&b_map, element, b, row / element, N, row, box_row / element, N, s);
    if (error != cudaSuccess) return error;
    auto kernel = warpgroup<kind, N>;
    LAUNCH(kernel, dim3(1), dim3(128), (64 + N) * 128 + 16, stream, a_map, b_map, s, out);
    return cudaGetLastError();
}
// The same for bf16 with a's rows in registers, read from a [64, 64] directly; each 16 columns are a group of their own. Two
// more warpgroups give up registers, of 168, for the first one.
template <int N>
__global__ void __launch_bounds__(384, 1) warpgroup_a(const uint32_t* a, const __grid_constant__ TensorMap b_map, float* out) {
#if defined(DSV4_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    DYN_SMEM(char, memory);
    grid_dependency_wait();
    const int t = threadIdx.x, warp = t / 32, g = t % 32 / 4, q = t % 4;
    uint64_t* bar = reinterpret_cast<uint64_t*>(memory + N * 128);
    if (t == 0) {
        mbarrier_init(bar, 1);
        mbarrier_fence_init();
        mbarrier_expect(bar, N * 128);
        tensor_load(memory, &b_map, 0, 0, bar);
    }
    __syncthreads();
    if (t >= 128) {
        registers_less<40>();
        return;
    }
    registers_more<232>();
    mbarrier_wait(bar, 0);
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0;
    uint32_t rows[2][4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint32_t* row = a + (16 * warp + g) * 32 + 8 * k + q;
        rows[k % 2][0] = row[0], rows[k % 2][1] = row[8 * 32], rows[k % 2][2] = row[4], rows[k % 2][3] = row[8 * 32 + 4];
        wgmma_fence();
        wgmma_bf16(d, rows[k % 2], wgmma_operand(memory + 32 * k, Swizzle::k128, 1024));
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < N / 2; i++) out[(16 * warp + g + 8 * (i / 2 % 2)) * N + i / 4 * 8 + 2 * q + i % 2] = d[i];
#endif
}
template <int N> static cudaError_t launch_a(const uint32_t* a, const void* b, float* out, cudaStream_t stream) {
    TensorMap map;
    if (const cudaError_t error = make_tensor_map(&map, 2, b, 64, N, 128, 64, N, Swizzle::k128)) return error;
    auto kernel = warpgroup_a<N>;
    LAUNCH(kernel, dim3(1), dim3(384), N * 128 + 16, stream, a, map, out);
    return cudaGetLastError();
}
extern "C" int conformance_wgmma_a(const void* a, const void* b, float* out, int columns, cudaStream_t stream) {
    const uint32_t* rows = static_cast<const uint32_t*>(a);
    if (columns == 8) return launch_a<8>(rows, b, out, stream);
    if (columns == 16) return launch_a<16>(rows, b, out, stream);
    if (columns == 24) return launch_a<24>(rows, b, out, stream);
    if (columns == 32) return launch_a<32>(rows, b, out, stream);
    if (columns == 48) return launch_a<48>(rows, b, out, stream);
    if (columns == 64) return launch_a<64>(rows, b, out, stream);
    if (columns == 80) return launch_a<80>(rows, b, out, stream);
    if (columns == 96) return launch_a<96>(rows, b, out, stream);
    return launch_a<128>(rows, b, out, stream);
}

extern "C" int conformance_wgmma(const void* a, const void* b, float* out, int kind, int columns, int swizzle, cudaStream_t stream) {
    if (columns == 8) {
        if (kind == 0) return launch<0, 8>(a, b, out, swizzle, stream);
        if (kind == 1) return launch<1, 8>(a, b, out, swizzle, stream);
        return launch<2, 8>(a, b, out, swizzle, stream);
    }
    if (kind == 0) return launch<0, 32>(a, b, out, swizzle, stream);
    if (kind == 1) return launch<1, 32>(a, b, out, swizzle, stream);
    return launch<2, 32>(a, b, out, swizzle, stream);
}
