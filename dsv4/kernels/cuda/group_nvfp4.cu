// group_nvfp4: tokens in NVFP4 as rows of the experts that chose them (dsv4/ops/grouped.py): codes and scales are copied, the latter to tiles
// that begin anew with each expert.
//
// A warp has a row of a tile of scales, a block 8; blocks of tiles that there are not end at once. 4,096 tokens x 6 of 7,168 are 198 MB read
// and written, most of the reads again from L2: 46 us at the H200's 4.3 TB/s, 29 us at a B200's 7. The product that follows reads 0.6 to 8.5 GB
// of weights. Not measured. (A tensor copy could gather the codes itself, but not the scales, whose tiles mix 32 tokens.)
#include "nvfp4.cuh"

constexpr int kWarps = 8, kTileRows = 128;

__global__ void __launch_bounds__(32 * kWarps) group_nvfp4_kernel(const uint8_t* values, const uint8_t* scales, const float* row_scales,
                                                                  const int* order, const int4* tiles, const int* counts,
                                                                  uint8_t* out_values, uint8_t* out_scales, float* out_row_scales,
                                                                  int groups, int slots, bool swizzled) {
    grid_dependency_launch();
    grid_dependency_wait();  // all inputs are activations
    const int tile = blockIdx.x / (kTileRows / kWarps), lane = threadIdx.x % 32;
    if (tile >= counts[0]) return;
    const int4 entry = tiles[tile];  // expert, first row, rows, tile of scales
    const int in_tile = blockIdx.x % (kTileRows / kWarps) * kWarps + threadIdx.x / 32;
    const Nvfp4Row to = nvfp4_row(out_values, out_scales, int64_t(entry.w) * kTileRows + in_tile, groups, true);
    const int words = (groups + 3) / 4;
    if (in_tile >= entry.z) {
        for (int w = lane; w < words; w += 32) *reinterpret_cast<uint32_t*>(to.scales + w * 512) = 0;
        return;
    }
    const int64_t row = entry.y + in_tile, token = order[row] / slots;
    const uint8_t* from = values + token * groups * 8;
    for (int i = lane; i < groups / 2; i += 32)
        *reinterpret_cast<int4*>(out_values + row * groups * 8 + 16 * i) = *reinterpret_cast<const int4*>(from + 16 * i);
    const uint8_t* of_token = nvfp4_row(nullptr, const_cast<uint8_t*>(scales), token, groups, swizzled).scales;
    for (int w = lane; w < words; w += 32) {
        uint32_t word;
        if (swizzled) {
            word = *reinterpret_cast<const uint32_t*>(of_token + w * 512);
        } else {  // halves of a word: the number of groups is even
            word = *reinterpret_cast<const uint16_t*>(of_token + 4 * w);
            if (4 * w + 2 < groups) word |= uint32_t(*reinterpret_cast<const uint16_t*>(of_token + 4 * w + 2)) << 16;
        }
        *reinterpret_cast<uint32_t*>(to.scales + w * 512) = word;
    }
    if (lane == 0) out_row_scales[row] = row_scales[token];
}

// values [tokens, columns / 2], scales [tokens, columns / 16] or swizzled, row_scales [tokens]; order [rows], a choice each: token * slots +
// slot; tiles [entries, 4] and counts as group_choices leaves them; out_values [rows, columns / 2], out_scales [entries] rows of tiles,
// out_row_scales [rows]. columns a multiple of 32.
extern "C" int group_nvfp4(const uint8_t* values, const uint8_t* scales, const float* row_scales, const int* order, const int* tiles,
                           const int* counts, uint8_t* out_values, uint8_t* out_scales, float* out_row_scales, int columns, int slots,
                           int entries, int swizzled, cudaStream_t stream) {
    if (!rows_aligned(values, columns / 2) || !rows_aligned(out_values, columns / 2) || columns % 32) return cudaErrorInvalidValue;
    LAUNCH(group_nvfp4_kernel, dim3(entries * (kTileRows / kWarps)), dim3(32 * kWarps), 0, stream, values, scales, row_scales, order,
           reinterpret_cast<const int4*>(tiles), counts, out_values, out_scales, out_row_scales, columns / 16, slots, swizzled != 0);
    return cudaGetLastError();
}
