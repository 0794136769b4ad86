// sum_rows: for each token its shared expert's sums and those of its chosen experts, in the order that `places` names them, rounded once.
//
// fp32 sums in a fixed order, so a run is repeatable. Bytes alone count: 4,096 tokens of Pro with 6 experts are 880 MB, predicted 210 us
// on an H200.
#include "common.cuh"

constexpr int kThreads = 256, kVector = 4;

struct Plan {
    const float *base, *rows;
    const int* places;
    __nv_bfloat16* out;
    int columns, top_k;
};

__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const Plan plan) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int column = (blockIdx.y * kThreads + threadIdx.x) * kVector, token = blockIdx.x;
    if (column >= plan.columns) return;
    float sum[kVector] = {}, add[kVector];
    if (plan.base) load(sum, plan.base + int64_t(token) * plan.columns + column);
    for (int k = 0; k < plan.top_k; k++) {
        load(add, plan.rows + int64_t(plan.places[token * plan.top_k + k]) * plan.columns + column);
#pragma unroll
        for (int i = 0; i < kVector; i++) sum[i] += add[i];
    }
    store(plan.out + int64_t(token) * plan.columns + column, sum);
}

// base fp32 [tokens, columns] or null, rows fp32 [any, columns], places [tokens, top_k] int32 (rows) -> out bf16 [tokens, columns].
// columns: a multiple of 4.
extern "C" int sum_rows(const float* base, const float* rows, const int* places, void* out, int tokens, int columns, int top_k,
                        cudaStream_t stream) {
    if (tokens < 1 || columns < 1 || columns % kVector || top_k < 1) return cudaErrorInvalidValue;
    const Plan plan{base, rows, places, static_cast<__nv_bfloat16*>(out), columns, top_k};
    LAUNCH(sum_rows_kernel, dim3(tokens, (columns + kVector * kThreads - 1) / (kVector * kThreads)), dim3(kThreads), 0, stream, plan);
    return cudaGetLastError();
}
