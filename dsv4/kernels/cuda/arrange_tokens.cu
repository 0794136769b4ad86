// arrange_tokens: rows of x, as they are or gathered by number, in the order of columns that packed_gemm.cuh wants (arrange.cuh), with
// zeros up to the next multiple of 64 columns.
//
// A thread makes 16 bytes of four words that lie 16 or 32 bytes apart; eight threads read whole 32-byte sectors together. Bytes alone
// count: 4,096 rows of 7,168 are 117 MB there and back, predicted 30 us on an H200.
#include "common.cuh"
#include "arrange.cuh"

constexpr int kThreads = 256;

struct Plan {
    const uint32_t* x;  // pairs
    const int* source;
    uint4* out;
    unsigned vectors, of_row;  // 16 bytes each: of out, of a row of it
    int columns;
    bool short_order;
};

__global__ void __launch_bounds__(kThreads) arrange_tokens_kernel(const Plan plan) {
    grid_dependency_launch();
    grid_dependency_wait();
    const unsigned i = blockIdx.x * kThreads + threadIdx.x;  // 32 bits: the division by of_row counts
    if (i >= plan.vectors) return;
    const unsigned row = i / plan.of_row, vector = i % plan.of_row;
    const uint32_t* x = plan.x + int64_t(plan.source ? plan.source[row] : int(row)) * (plan.columns / 2);
    uint32_t four[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const int column = int(vector) / 8 * kChunk + arranged_column(int(vector) % 8, w, plan.short_order);
        four[w] = column < plan.columns ? x[column / 2] : 0;
    }
    plan.out[i] = uint4{four[0], four[1], four[2], four[3]};
}

// x bf16 [any, columns], columns even; source [rows] int32: rows of x, or null: all of it; out bf16 [rows, columns up to a
// multiple of 64].
extern "C" int arrange_tokens(const void* x, const int* source, void* out, int rows, int columns, int short_order, cudaStream_t stream) {
    const int of_row = (columns + kChunk - 1) / kChunk * (kChunk / 8);
    const int64_t vectors = int64_t(rows) * of_row;
    if (rows < 1 || columns < 2 || columns % 2 || vectors > 0x7fffffff) return cudaErrorInvalidValue;
    const Plan plan{static_cast<const uint32_t*>(x), source, static_cast<uint4*>(out), unsigned(vectors), unsigned(of_row), columns,
                    short_order != 0};
    LAUNCH(arrange_tokens_kernel, dim3(unsigned((vectors + kThreads - 1) / kThreads)), dim3(kThreads), 0, stream, plan);
    return cudaGetLastError();
}
