// What every kernel source starts with: one spelling for nvcc and for the CPU emulator (tests/emulator), value types, reductions.
//
// Rules for the sources: launches through LAUNCH, shared memory through DYN_SMEM only, inline assembly only in ptx.cuh.
#pragma once
#ifndef DSV4_EMULATOR
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace emu {
// Starts `kernel` so that it overlaps the end of the one before it in the stream: it must call grid_dependency_wait() (ptx.cuh) before it
// touches what earlier kernels write or read. Failures are left for cudaGetLastError().
template <class... Parameters, class... Arguments>
inline void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes, cudaStream_t stream,
                   Arguments... arguments) {
    if (shared_bytes > 48 * 1024 &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)) != cudaSuccess)
        return;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
    config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}
__device__ __forceinline__ void check_aligned(const void*, unsigned) {}
}  // namespace emu

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) emu::launch(kernel, grid, block, 1, shared_bytes, stream, __VA_ARGS__)
// Groups of `cluster` consecutive blocks (blockIdx.x) run together: grid.x must be a multiple of it; at most 8.
#define LAUNCH_CLUSTER(kernel, grid, block, cluster, shared_bytes, stream, ...) \
    emu::launch(kernel, grid, block, cluster, shared_bytes, stream, __VA_ARGS__)
#define DYN_SMEM(type, name)                              \
    extern __shared__ __align__(1024) char dynamic_smem[]; \
    type* name = reinterpret_cast<type*>(dynamic_smem)
#endif

#include "ptx.cuh"

// Code for tensor memory (ptx.cuh) stands within this; a kernel that needs it is empty elsewhere, and its C function refuses before it
// launches. The emulator is all architectures.
#if defined(DSV4_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define HAS_TENSOR_MEMORY
#endif
inline bool built_for_tensor_memory() {
#if !defined(DSV4_EMULATOR) && defined(__CUDA_ARCH_LIST__)
    constexpr int architectures[] = {__CUDA_ARCH_LIST__};  // one: build.py compiles for one
    return architectures[0] >= 1000;
#else
    return true;
#endif
}

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

// Whether this block is the last of `blocks` that come here. What the threads of all of them wrote before, all threads of the last one see,
// through L2 (__ldcg). `arrivals`: a counter in global memory, 0 before the launch and, as it wraps, behind it. `last`: in shared memory.
__device__ __forceinline__ bool last_to_arrive(unsigned* arrivals, unsigned blocks, bool* last) {
    __syncthreads();
    if (threadIdx.x == 0) *last = atomic_inc_fenced(arrivals, blocks - 1) == blocks - 1;
    __syncthreads();
    return *last;
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
