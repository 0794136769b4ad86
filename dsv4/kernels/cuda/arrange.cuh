// The order of x's columns that packed_gemm multiplies with packed weights.
//
// wgmma's instruction i of the four of a chunk of 64 columns takes places 16 i + s, s = 0..15, from the tokens' rows in shared memory, and
// lane q = 0..3 of each four brings the weights of s = 2 q, 2 q + 1, 2 q + 8, 2 q + 9. In a packed weight (packing.py) that lane has the
// columns 16 q .. 16 q + 15 of the 64 (FP4, FP8), or 8 q .. 8 q + 7 of each 32 (bf16: the short order). So place 16 i + 8 h + 2 q + e holds
// column 16 q + 4 i + 2 h + e, or in the short order 32 (i / 2) + 8 q + 4 (i % 2) + 2 h + e.
#pragma once

constexpr int kChunk = 64;  // columns

// The first column of the pair in word `word` (0 to 3) of 16-byte vector `vector` (0 to 7) of a chunk.
__host__ __device__ constexpr int arranged_column(int vector, int word, bool short_order) {
    return short_order ? vector / 4 * 32 + word * 8 + vector % 4 * 2 : word * 16 + vector * 2;
}
// Where column `column` of a chunk is: the inverse.
__host__ __device__ constexpr int arranged_place(int column, bool short_order) {
    return short_order ? column / 32 * 32 + column / 4 % 2 * 16 + column / 2 % 2 * 8 + column / 8 % 4 * 2 + column % 2
                       : column % 16 / 2 * 8 + column / 16 * 2 + column % 2;
}
