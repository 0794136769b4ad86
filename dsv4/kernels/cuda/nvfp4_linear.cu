// nvfp4_linear: y = x W^T for NVFP4 x of up to 128 tokens and NVFP4 W, on sm_100a's tensor cores (dsv4/ops/nvfp4.py). sm_90a has none of
// them: there the function returns cudaErrorNotSupported.
//
// The weights are the product's 128 rows and the tokens its columns, so a token costs no more than its bytes. A block has 128 rows and a
// piece of K, in chunks of 256 columns; `splits` blocks that share rows are a cluster and add their sums in the order of K, so a run is
// repeatable. One thread loads (tensor copies for the codes, bulk copies for the scales, which lie in memory as the copy to tensor memory
// wants them), one thread multiplies, and all 128 write. Weights start before grid_dependency_wait().
//
// 0.5625 bytes a weight: w1 and w3 of an expert of Pro (6,144 x 7,168) are 24.8 MB and 3.1 us at the B200's 8 TB/s. Of one tile, 128 x
// 7,168 in 8 splits, a block reads 65 KB; 6 chunks, 110 KB, are on their way at once. Not measured: no B200 has run it.
#include "tensor_map.cuh"

constexpr int kThreads = 128, kRows = 128, kRowBytes = 128, kSteps = 4;  // a chunk: 128 bytes of each row, four steps of 64 columns
constexpr int kScaleTile = 512, kScales = kSteps * kScaleTile;           // of 128 rows and a step; of a chunk

template <int N> struct Layout {
    static constexpr int kStages = N == 128 ? 4 : 6;
    static constexpr int kTokens = kRows * kRowBytes, kRowScales = kTokens + N * kRowBytes, kTokenScales = kRowScales + kScales;
    static constexpr int kStage = kTokenScales + kScales;  // bytes
    static constexpr int kSums = kStages * kStage, kBarriers = kSums + N * kRows * 4, kBytes = kBarriers + (2 * kStages + 1) * 8 + 8;
    static constexpr unsigned kColumns = N == 128 ? 256 : N == 64 ? 128 : 64;  // of tensor memory: N of sums, 8 of scales a step
    static_assert(N + 8 * kSteps <= kColumns, "tensor memory");
};

struct Plan {
    const uint8_t *weight_scales, *x_scales;
    const float* row_scales;
    __nv_bfloat16* out;
    int tokens, rows, steps, splits;  // steps: of 64 columns
    float scale;
};

#ifdef HAS_TENSOR_MEMORY
template <int N> struct Block {
    using L = Layout<N>;
    char* memory;
    const Plan& plan;
    int tile, first, last;  // chunks

    __device__ __forceinline__ uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(memory + L::kBarriers) + i; }
    __device__ __forceinline__ uint64_t* full(int stage) const { return barrier(stage); }
    __device__ __forceinline__ uint64_t* empty(int stage) const { return barrier(L::kStages + stage); }
    __device__ __forceinline__ uint64_t* done() const { return barrier(2 * L::kStages); }
    __device__ __forceinline__ uint32_t* address() const { return reinterpret_cast<uint32_t*>(barrier(2 * L::kStages + 1)); }
    __device__ __forceinline__ char* stage(int chunk) const { return memory + (chunk - first) % L::kStages * L::kStage; }
    __device__ __forceinline__ int steps(int chunk) const { return min(kSteps, plan.steps - chunk * kSteps); }

    __device__ __forceinline__ void load_weights(const TensorMap& map, int chunk) const {
        uint64_t* bar = full((chunk - first) % L::kStages);
        const int scales = steps(chunk) * kScaleTile;
        mbarrier_expect(bar, (kRows + N) * kRowBytes + 2 * scales);
        tensor_load(stage(chunk), &map, chunk * kRowBytes, tile * kRows, bar);
        bulk_load(stage(chunk) + L::kRowScales, plan.weight_scales + (int64_t(tile) * plan.steps + chunk * kSteps) * kScaleTile, scales,
                  bar);
    }
    __device__ __forceinline__ void load_tokens(const TensorMap& map, int chunk) const {
        uint64_t* bar = full((chunk - first) % L::kStages);
        tensor_load(stage(chunk) + L::kTokens, &map, chunk * kRowBytes, 0, bar);
        bulk_load_keep(stage(chunk) + L::kTokenScales, plan.x_scales + chunk * kScales, steps(chunk) * kScaleTile, bar);
    }
    __device__ __forceinline__ void load(const TensorMap& weights, const TensorMap& tokens) const {
        const int ahead = min(last, first + L::kStages);
        for (int chunk = first; chunk < ahead; chunk++) load_weights(weights, chunk);
        grid_dependency_launch();
        grid_dependency_wait();
        for (int chunk = first; chunk < ahead; chunk++) load_tokens(tokens, chunk);
        for (int chunk = ahead; chunk < last; chunk++) {
            const int i = (chunk - first) % L::kStages, parity = ((chunk - first) / L::kStages - 1) % 2;
            mbarrier_wait(full(i), parity);  // long over when the next is, but the emulator takes no such word from a product
            mbarrier_wait(empty(i), parity);
            load_weights(weights, chunk);
            load_tokens(tokens, chunk);
        }
    }
    __device__ __forceinline__ void multiply(uint32_t d) const {
        const uint32_t scales = d + N;
        for (int chunk = first; chunk < last; chunk++) {
            const int i = (chunk - first) % L::kStages;
            mbarrier_wait(full(i), (chunk - first) / L::kStages % 2);
            const char* at = stage(chunk);
            for (int k = 0; k < steps(chunk); k++) {
                tensor_copy_scales(scales + 8 * k, tensor_operand(at + L::kRowScales + k * kScaleTile, Swizzle::kNone, 128));
                tensor_copy_scales(scales + 8 * k + 4, tensor_operand(at + L::kTokenScales + k * kScaleTile, Swizzle::kNone, 128));
                tensor_mma_nvfp4(d, tensor_operand(at + k * 32, Swizzle::k128, 8 * kRowBytes),
                                 tensor_operand(at + L::kTokens + k * 32, Swizzle::k128, 8 * kRowBytes), tensor_shape(kTensorNvfp4, N),
                                 scales + 8 * k, scales + 8 * k + 4, chunk > first || k > 0);
            }
            tensor_commit(chunk + 1 < last ? empty(i) : done());
        }
        // These have come before the last one, as products end in order; the emulator, which knows no order of commits, wants to be told.
        for (int chunk = max(first, last - L::kStages); chunk < last - 1; chunk++)
            mbarrier_wait(empty((chunk - first) % L::kStages), (chunk - first) / L::kStages % 2);
    }
};
#endif

template <int N>
__global__ void __launch_bounds__(kThreads) nvfp4_linear_kernel(const __grid_constant__ TensorMap weights,
                                                                const __grid_constant__ TensorMap tokens, const Plan plan) {
#ifdef HAS_TENSOR_MEMORY
    DYN_SMEM(char, memory);
    using L = Layout<N>;
    const int t = threadIdx.x, warp = t / 32, rank = cluster_rank(), chunks = (plan.steps + kSteps - 1) / kSteps;
    const Block<N> block{memory, plan, static_cast<int>(blockIdx.x) / plan.splits, rank * chunks / plan.splits,
                         (rank + 1) * chunks / plan.splits};
    if (t == 0) {
        for (int i = 0; i < 2 * L::kStages + 1; i++) mbarrier_init(block.barrier(i), 1);
        mbarrier_fence_init();
    }
    if (warp == 1) {
        tensor_alloc(block.address(), L::kColumns);
        tensor_relinquish();
        tensor_fence_before();
    }
    __syncthreads();
    tensor_fence_after();
    const uint32_t d = *block.address();
    if (t == 0) block.load(weights, tokens);
    if (t == 32) block.multiply(d);
    __syncwarp();  // so that the other lanes do not spin beside these two
    grid_dependency_wait();
    mbarrier_wait(block.done(), 0);
    tensor_fence_after();
    float* sums = reinterpret_cast<float*>(memory + L::kSums);
    uint32_t r[8];
    for (int i = 0; i < N; i += 8) {
        tensor_load_8(r, d + (warp * 32 << 16) + i);
        tensor_wait_load();
#pragma unroll
        for (int j = 0; j < 8; j++) sums[(i + j) * kRows + t] = __uint_as_float(r[j]);
    }
    tensor_fence_before();
    cluster_sync();  // also of this block's threads
    if (warp == 1) {
        tensor_fence_after();
        tensor_free(d, L::kColumns);
    }
    const int row = block.tile * kRows + t;
    for (int token = rank; token < plan.tokens && row < plan.rows; token += plan.splits) {
        float sum = 0.0f;
        for (int other = 0; other < plan.splits; other++) sum += cluster_map(sums, other)[token * kRows + t];
        plan.out[int64_t(token) * plan.rows + row] = __float2bfloat16_rn(sum * (plan.row_scales[token] * plan.scale));
    }
    cluster_sync();  // a block's shared memory is there until it ends
#endif
}

template <int N> static cudaError_t launch(const uint8_t* weights, const uint8_t* x, const Plan& plan, int columns, cudaStream_t stream) {
    TensorMap weight_map, token_map;
    cudaError_t error = make_tensor_map(&weight_map, 1, weights, columns / 2, plan.rows, columns / 2, kRowBytes, kRows, Swizzle::k128);
    if (error == cudaSuccess) error = make_tensor_map(&token_map, 1, x, columns / 2, plan.tokens, columns / 2, kRowBytes, N, Swizzle::k128);
    if (error != cudaSuccess) return error;
    auto kernel = nvfp4_linear_kernel<N>;
    LAUNCH_CLUSTER(kernel, dim3((plan.rows + kRows - 1) / kRows * plan.splits), dim3(kThreads), plan.splits, Layout<N>::kBytes, stream,
                   weight_map, token_map, plan);
    return cudaGetLastError();
}

// weights [rows, columns / 2] and x [tokens, columns / 2], K-major codes; weight_scales and x_scales in whole tiles of 128 rows and 4
// groups; row_scales [tokens], scale: of all weights; out [tokens, rows] bf16. columns: a multiple of 32; tokens: 1 to 128; splits: 1 to 8,
// at most ceil(columns / 256).
extern "C" int nvfp4_linear(const uint8_t* weights, const uint8_t* weight_scales, const uint8_t* x, const uint8_t* x_scales,
                            const float* row_scales, void* out, int tokens, int rows, int columns, int splits, float scale,
                            cudaStream_t stream) {
    if (!built_for_tensor_memory()) return cudaErrorNotSupported;
    const int most = (columns + 255) / 256;
    if (columns % 32 || tokens < 1 || tokens > 128 || splits < 1 || splits > 8 || splits > most) return cudaErrorInvalidValue;
    const Plan plan{weight_scales, x_scales, row_scales, static_cast<__nv_bfloat16*>(out), tokens, rows, (columns + 63) / 64, splits,
                    scale};
    if (tokens <= 16) return launch<16>(weights, x, plan, columns, stream);
    if (tokens <= 32) return launch<32>(weights, x, plan, columns, stream);
    if (tokens <= 64) return launch<64>(weights, x, plan, columns, stream);
    return launch<128>(weights, x, plan, columns, stream);
}
