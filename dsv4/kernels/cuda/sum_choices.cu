// sum_choices: a token's shared expert and the rows of its choices, added in fp32 in the order of the experts' numbers (dsv4/ops/grouped.py),
// which is that of the rows.
//
// A thread has 8 columns of a token and reads the rows where they are, so the second product writes its rows as they come. 4,096 tokens x 6
// rows of 7,168 in bf16, the shared expert's too, are 470 MB: 109 us at the H200's 4.3 TB/s, 67 us at a B200's 7; in fp32, as the products on
// Hopper leave them, 880 MB: 205 us. Not measured.
#include "common.cuh"

constexpr int kThreads = 256, kMaxSlots = 8, kColumns = 8;

template <class Row, class T>
__global__ void __launch_bounds__(kThreads) sum_choices_kernel(const Row* y, const int* rows, const T* shared, __nv_bfloat16* out,
                                                               int columns, int slots) {
    grid_dependency_launch();
    grid_dependency_wait();  // all inputs are activations
    const int64_t token = blockIdx.x;
    const int column = (blockIdx.y * kThreads + threadIdx.x) * kColumns;
    if (column >= columns) return;
    float total[kColumns];
    load(total, shared + token * columns + column);
    int mine[kMaxSlots];
#pragma unroll
    for (int i = 0; i < kMaxSlots; i++) mine[i] = i < slots ? rows[token * slots + i] : 0x7fffffff;
    int last = -1;
    for (int n = 0; n < slots; n++) {
        int next = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < kMaxSlots; i++)
            if (mine[i] > last && mine[i] < next) next = mine[i];
        float v[kColumns];
        load(v, y + int64_t(next) * columns + column);
#pragma unroll
        for (int i = 0; i < kColumns; i++) total[i] += v[i];
        last = next;
    }
    store(out + token * columns + column, total);
}

template <class Row, class T>
static cudaError_t launch(const Row* y, const int* rows, const T* shared, __nv_bfloat16* out, int tokens, int columns, int slots,
                          cudaStream_t stream) {
    if (!rows_aligned(y, columns) || !rows_aligned(shared, columns) || !rows_aligned(out, columns) || slots < 1 || slots > kMaxSlots)
        return cudaErrorInvalidValue;
    auto kernel = sum_choices_kernel<Row, T>;
    LAUNCH(kernel, dim3(tokens, (columns / kColumns + kThreads - 1) / kThreads), dim3(kThreads), 0, stream, y, rows, shared, out, columns,
           slots);
    return cudaGetLastError();
}

template <class Row>
static cudaError_t launch(const void* y, const int* rows, const void* shared, __nv_bfloat16* out, int tokens, int columns, int slots,
                          int dtype, cudaStream_t stream) {
    const Row* of = static_cast<const Row*>(y);
    if (dtype == kBfloat16) return launch(of, rows, static_cast<const __nv_bfloat16*>(shared), out, tokens, columns, slots, stream);
    if (dtype == kFloat32) return launch(of, rows, static_cast<const float*>(shared), out, tokens, columns, slots, stream);
    return cudaErrorInvalidValue;
}

// y [tokens * slots, columns] of `row_dtype`; rows [tokens, slots], all different; shared [tokens, columns] of `dtype`; out [tokens,
// columns]. columns a multiple of 8, 1 to 8 slots.
extern "C" int sum_choices(const void* y, const int* rows, const void* shared, __nv_bfloat16* out, int tokens, int columns, int slots,
                           int row_dtype, int dtype, cudaStream_t stream) {
    if (row_dtype == kBfloat16) return launch<__nv_bfloat16>(y, rows, shared, out, tokens, columns, slots, dtype, stream);
    if (row_dtype == kFloat32) return launch<float>(y, rows, shared, out, tokens, columns, slots, dtype, stream);
    return cudaErrorInvalidValue;
}
