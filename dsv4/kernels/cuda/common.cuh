// What every kernel source starts with: one spelling for nvcc and for the CPU emulator (tests/emulator), value types, reductions.
//
// Rules for the sources: launches through LAUNCH, shared memory through DYN_SMEM only, no inline assembly outside the #else below.
#pragma once
#ifndef DSV4_EMULATOR
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define DYN_SMEM(type, name)                              \
    extern __shared__ __align__(1024) char dynamic_smem[]; \
    type* name = reinterpret_cast<type*>(dynamic_smem)

namespace emu {
__device__ __forceinline__ void check_aligned(const void*, unsigned) {}
}
#endif

// The C interface's `dtype` argument.
enum Dtype { kFloat32 = 0, kBfloat16 = 1 };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void round_to(float x, float& y) { y = x; }
__device__ __forceinline__ void round_to(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

// N consecutive values of T, moved as one access: 16 bytes, 32 as two, or a single value (N = 1) where rows are ragged.
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T v[N]; };

template <int N, class T> __device__ __forceinline__ void load(float (&to)[N], const T* from) {
    emu::check_aligned(from, alignof(Pack<T, N>));
    const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = to_float(pack.v[i]);
}

template <int N, class T> __device__ __forceinline__ void store(T* to, const float (&from)[N]) {
    emu::check_aligned(to, alignof(Pack<T, N>));
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; i++) round_to(from[i], pack.v[i]);
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Whether rows of `columns` values at `pointer` can be moved in 16-byte accesses.
template <class T> inline bool rows_aligned(const T* pointer, int columns) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && columns * sizeof(T) % 16 == 0;
}

// Sum over a block of whole warps, the same in every thread and in every run. `partial`: one float a warp in shared memory, which
// must not be in use; it may be used again after the next barrier.
__device__ __forceinline__ float block_sum(float x, float* partial) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    x = lane < warps ? partial[lane] : 0.0f;
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}
