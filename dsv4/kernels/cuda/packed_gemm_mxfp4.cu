// packed_gemm_mxfp4: packed_gemm.cuh with MXFP4 weights.
#define PACKED_GEMM_KERNEL packed_gemm_mxfp4_kernel
#include "packed_gemm.cuh"

extern "C" int packed_gemm_mxfp4(const void* x, const void* weights, const float* factors, const int* offsets, const float* row_weights,
                                 void* out, int rows, int columns, int x_columns, int matrices, int result, int most, int parts,
                                 int short_order, int blocks, float factor, float limit, cudaStream_t stream) {
    return packed_gemm<kMxfp4>(x, weights, factors, offsets, row_weights, out, rows, columns, x_columns, matrices, result, most, parts,
                               short_order, blocks, factor, limit, stream);
}
