// The 64-bit operand of a K-major tile with the 128-byte swizzle, without its address: out [2] = low and high half.
#include "../../../dsv4/kernels/cuda/tensor_map.cuh"

__global__ void operand(uint32_t* out) {
    DYN_SMEM(char, memory);
    grid_dependency_wait();
    const uint64_t bits = wgmma_operand(memory, Swizzle::k128, 1024) & ~uint64_t(0x3fff);
    out[0] = uint32_t(bits), out[1] = uint32_t(bits >> 32);
}
extern "C" int encodings(uint32_t* out, cudaStream_t stream) {
    LAUNCH(operand, dim3(1), dim3(1), 1024, stream, out);
    return cudaGetLastError();
}
