// Products in tensor memory (sm_100a), on inputs from test_conformance.py, as conformance.cu does for the rest.
#include "../../dsv4/kernels/cuda/tensor_map.cuh"

// out [128, N] = a [128, row] b [N, row]^T + start, rows of 32, 64 or 128 bytes by the swizzle (32 in two columns of cells without one);
// for nvfp4 with scales [row / 32, 512 bytes] each: those of row r in bytes 16 (r % 32) + 4 (r / 32); for mxfp4 two steps' are in one.
template <int kind, int N>
__global__ void tensor_memory(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, Swizzle swizzle,
                              const uint8_t* a_scales, const uint8_t* b_scales, const float* start, float* out) {
#ifdef HAS_TENSOR_MEMORY
    DYN_SMEM(char, memory);
    grid_dependency_wait();
    const bool cells = swizzle == Swizzle::kNone;
    const int t = threadIdx.x, warp = t / 32, row = cells ? 32 : 16 << static_cast<int>(swizzle), steps = row / 32;
    char *a = memory, *b = a + 128 * 128, *scales = b + N * 128;  // scales: 512 bytes of a and 512 of b a step
    uint64_t* bar = reinterpret_cast<uint64_t*>(scales + 4 * 1024);
    uint32_t* address = reinterpret_cast<uint32_t*>(bar + 2);
    if (t == 0) {
        mbarrier_init(bar, 1);
        mbarrier_init(bar + 1, 1);
        mbarrier_fence_init();
        mbarrier_expect(bar, (128 + N) * row + (kind >= 2 ? steps * 1024 : 0));
        for (int i = 0; i < (cells ? 2 : 1); i++) {
            tensor_load(a + i * 128 * 16, &a_map, i * 16, 0, bar);
            tensor_load(b + i * N * 16, &b_map, i * 16, 0, bar);
        }
        for (int i = 0; kind >= 2 && i < steps; i++) {
            bulk_load_keep(scales + i * 1024, a_scales + i * 512, 512, bar);
            bulk_load_keep(scales + i * 1024 + 512, b_scales + i * 512, 512, bar);
        }
    }
    if (warp == 0) {
        tensor_alloc(address, 64);  // 32 of sums, 8 of scales a step
        tensor_relinquish();
    }
    __syncthreads();
    const uint32_t d = *address, lanes = d + (warp * 32 << 16);
    uint32_t r[8];
    for (int i = 0; i < N; i += 8) {
        for (int j = 0; j < 8; j++) r[j] = __float_as_uint(start[t * N + i + j]);
        tensor_store_8(lanes + i, r);
    }
    tensor_wait_store();
    tensor_fence_before();
    __syncthreads();
    if (t == 0) {
        tensor_fence_after();
        mbarrier_wait(bar, 0);
        for (int k = 0; k < steps; k++) {
            const uint64_t left = tensor_operand(a + k * 32, swizzle, cells ? 128 : 8 * row, 128 * 16);
            const uint64_t right = tensor_operand(b + k * 32, swizzle, cells ? 128 : 8 * row, N * 16);
            if (kind == 0) tensor_mma_bf16(d, left, right, tensor_shape(kTensorBf16, N), true);
            if (kind == 1) tensor_mma_e4m3(d, left, right, tensor_shape(kTensorE4m3, N), true);
            if (kind >= 2) {  // each step's scales have columns of their own: no order is promised between a product and a copy behind it
                const char* of_step = scales + (kind == 2 ? k : k / 2) * 1024;
                const uint32_t a_cells = d + 32 + 8 * k, b_cells = a_cells + 4;
                tensor_copy_scales(a_cells, tensor_operand(of_step, Swizzle::kNone, 128));
                tensor_copy_scales(b_cells, tensor_operand(of_step + 512, Swizzle::kNone, 128));
                if (kind == 2) tensor_mma_nvfp4(d, left, right, tensor_shape(kTensorNvfp4, N), a_cells, b_cells, true);
                const uint32_t shape = tensor_shape(kTensorMxfp4, N) | (k % 2 ? kTensorUpperScales : 0);
                if (kind == 3) tensor_mma_mxfp4(d, left, right, shape, a_cells, b_cells, true);
            }
        }
        tensor_commit(bar + 1);
    }
    mbarrier_wait(bar + 1, 0);
    tensor_fence_after();
    for (int i = 0; i < N; i += 8) {
        tensor_load_8(r, lanes + i);
        tensor_wait_load();
        for (int j = 0; j < 8; j++) out[t * N + i + j] = __uint_as_float(r[j]);
    }
    tensor_fence_before();
    __syncthreads();
    if (warp == 0) tensor_free(d, 64);
#endif
}

template <int kind>
static cudaError_t launch(const void* a, const void* b, const uint8_t* a_scales, const uint8_t* b_scales, const float* start, float* out,
                          int swizzle, cudaStream_t stream) {
    constexpr int N = 32;
    const int row = swizzle ? 16 << swizzle : 32, box = swizzle ? row : 16;
    const Swizzle s = static_cast<Swizzle>(swizzle);
    TensorMap a_map, b_map;
    cudaError_t error = make_tensor_map(&a_map, 1, a, row, 128, row, box, 128, s);
    if (error == cudaSuccess) error = make_tensor_map(&b_map, 1, b, row, N, row, box, N, s);
    if (error != cudaSuccess) return error;
    auto kernel = tensor_memory<kind, N>;
    LAUNCH(kernel, dim3(1), dim3(128), (128 + N) * 128 + 4 * 1024 + 32, stream, a_map, b_map, s, a_scales, b_scales, start, out);
    return cudaGetLastError();
}
extern "C" int conformance_tensor(const void* a, const void* b, const uint8_t* a_scales, const uint8_t* b_scales, const float* start,
                                  float* out, int kind, int swizzle, cudaStream_t stream) {
    if (kind == 0) return launch<0>(a, b, a_scales, b_scales, start, out, swizzle, stream);
    if (kind == 1) return launch<1>(a, b, a_scales, b_scales, start, out, swizzle, stream);
    if (kind == 2) return launch<2>(a, b, a_scales, b_scales, start, out, swizzle, stream);
    return launch<3>(a, b, a_scales, b_scales, start, out, swizzle, stream);
}

// The 64-bit operand of a K-major tile with the swizzle of 128 bytes at byte 0 of shared memory, and the instruction words, as in PTX that
// other compilers emit for the same product: out [5] = low and high half; nvfp4, bf16 and mxfp4's upper half of 128 columns.
__global__ void encodings(uint32_t* out) {
    DYN_SMEM(char, memory);
    grid_dependency_wait();
    const uint64_t zero = tensor_operand(memory, Swizzle::k128, 1024) & ~uint64_t(0x3fff);
    out[0] = uint32_t(zero), out[1] = uint32_t(zero >> 32), out[2] = tensor_shape(kTensorNvfp4, 128),
    out[3] = tensor_shape(kTensorBf16, 128), out[4] = tensor_shape(kTensorMxfp4, 128) | kTensorUpperScales;
}
extern "C" int conformance_encodings(uint32_t* out, cudaStream_t stream) {
    LAUNCH(encodings, dim3(1), dim3(1), 1024, stream, out);
    return cudaGetLastError();
}

// out = a b + c, two at a time.
__global__ void pairs(const float* a, const float* b, const float* c, float* out) {
#ifdef HAS_TENSOR_MEMORY  // of the same architectures
    grid_dependency_wait();
    const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    const float2 d = fma_f32x2({a[i], a[i + 1]}, {b[i], b[i + 1]}, {c[i], c[i + 1]});
    out[i] = d.x, out[i + 1] = d.y;
#endif
}
extern "C" int conformance_pairs(const float* a, const float* b, const float* c, float* out, int n, cudaStream_t stream) {
    LAUNCH(pairs, dim3(n / 256), dim3(128), 0, stream, a, b, c, out);
    return cudaGetLastError();
}

// out [128, 128] = a [128, 64] b [64, 128], bf16, b with rows along K: two strips of 64 columns.
__global__ void across(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, float* out) {
#ifdef HAS_TENSOR_MEMORY
    DYN_SMEM(char, memory);
    grid_dependency_wait();
    const int t = threadIdx.x, warp = t / 32;
    char *a = memory, *b = a + 128 * 128;
    uint64_t* bar = reinterpret_cast<uint64_t*>(b + 2 * 64 * 128);
    uint32_t* address = reinterpret_cast<uint32_t*>(bar + 2);
    if (t == 0) {
        mbarrier_init(bar, 1);
        mbarrier_init(bar + 1, 1);
        mbarrier_fence_init();
        mbarrier_expect(bar, 128 * 128 + 2 * 64 * 128);
        tensor_load(a, &a_map, 0, 0, bar);
        for (int strip = 0; strip < 2; strip++) tensor_load(b + strip * 64 * 128, &b_map, strip * 64, 0, bar);
    }
    if (warp == 0) {
        tensor_alloc(address, 128);
        tensor_relinquish();
    }
    tensor_fence_before();
    __syncthreads();
    tensor_fence_after();
    const uint32_t d = *address;
    if (t == 0) {
        mbarrier_wait(bar, 0);
        for (int k = 0; k < 4; k++)
            tensor_mma_bf16(d, tensor_operand(a + k * 32, Swizzle::k128, 1024), tensor_operand_across(b + k * 2048, 1024, 64 * 128),
                            tensor_shape(kTensorBf16, 128) | kTensorAcross, k > 0);
        tensor_commit(bar + 1);
    }
    mbarrier_wait(bar + 1, 0);
    tensor_fence_after();
    for (int i = 0; i < 128; i += 8) {
        uint32_t r[1][8];
        tensor_load_8(r[0], d + (warp * 32 << 16) + i);
        tensor_wait_load(r);
        for (int j = 0; j < 8; j++) out[t * 128 + i + j] = __uint_as_float(r[0][j]);
    }
    tensor_fence_before();
    __syncthreads();
    if (warp == 0) tensor_free(d, 128);
#endif
}
extern "C" int conformance_across(const void* a, const void* b, float* out, cudaStream_t stream) {
    TensorMap a_map, b_map;
    cudaError_t error = make_tensor_map(&a_map, 2, a, 64, 128, 128, 64, 128, Swizzle::k128);
    if (error == cudaSuccess) error = make_tensor_map(&b_map, 2, b, 128, 64, 256, 64, 64, Swizzle::k128);
    if (error != cudaSuccess) return error;
    LAUNCH(across, dim3(1), dim3(128), 128 * 128 + 2 * 64 * 128 + 32, stream, a_map, b_map, out);
    return cudaGetLastError();
}
