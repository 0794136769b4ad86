// What the emulator decodes, 64 bits each without addresses, into out [2 * 5]: wgmma's operand of a K-major tile with the 128-byte swizzle;
// tcgen05's; that of a copy of scales, without a swizzle; the instruction descriptors of NVFP4 products with 128 and 256 columns.
#include "../../../dsv4/kernels/cuda/tensor_map.cuh"

__global__ void encode(uint32_t* out) {
    DYN_SMEM(char, memory);
    grid_dependency_wait();
    const uint64_t address = 0x3fff;
    const uint64_t bits[] = {wgmma_operand(memory, Swizzle::k128, 1024) & ~address, tensor_operand(memory, Swizzle::k128, 1024) & ~address,
                             tensor_operand(memory, Swizzle::kNone, 128) & ~address, tensor_shape(kTensorNvfp4, 128),
                             tensor_shape(kTensorNvfp4, 256)};
    for (int i = 0; i < 5; i++) out[2 * i] = uint32_t(bits[i]), out[2 * i + 1] = uint32_t(bits[i] >> 32);
}
extern "C" int encodings(uint32_t* out, cudaStream_t stream) {
    LAUNCH(encode, dim3(1), dim3(1), 1024, stream, out);
    return cudaGetLastError();
}
