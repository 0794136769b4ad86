// What tensor_load (ptx.cuh) needs to know of a matrix, made on the host: make_tensor_map.
#pragma once
#include "common.cuh"

#ifndef DSV4_EMULATOR
#include <cuda.h>
using TensorMap = CUtensorMap;

// A matrix [height, width] of `element_bytes` (1, 2 or 8), rows `row_bytes` apart; a copy moves a box of [box_height, box_width] of it, no
// side of it more than 256 elements. With a swizzle, a row of the box is as wide as it (32, 64 or 128 bytes), and 16-byte chunk i of row r
// goes to place i ^ (r % 8, r / 2 % 4 or r / 4 % 2) of the row.
inline cudaError_t make_tensor_map(TensorMap* map, int element_bytes, const void* address, unsigned width, unsigned height,
                                   size_t row_bytes, unsigned box_width, unsigned box_height, Swizzle swizzle) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;  // from the driver, so that nothing links against it
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        void* address_of = nullptr;
        const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address_of, 12000, cudaEnableDefault, &found);
        if (error != cudaSuccess) return error;
        if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
        encode = reinterpret_cast<decltype(encode)>(address_of);
    }
    constexpr CUtensorMapSwizzle swizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B,
                                               CU_TENSOR_MAP_SWIZZLE_128B};
    const cuuint64_t sizes[] = {width, height}, strides[] = {row_bytes};
    const cuuint32_t box[] = {box_width, box_height}, steps[] = {1, 1};
    const auto type = element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                      : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                           : CU_TENSOR_MAP_DATA_TYPE_UINT64;
    const CUresult result = encode(map, type, 2, const_cast<void*>(address), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   swizzles[static_cast<int>(swizzle)], CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
#endif
