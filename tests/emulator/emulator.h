// CUDA C++ on the CPU: what a kernel source sees in place of the CUDA headers (README.md says what that establishes).
//
// The device code is compiled as plain C++ with -fsanitize=thread, whose calls at every load and store end in runtime.cpp (not in
// the sanitizer's library), and linked with it. This header holds what must be inline: types, launches, collectives, intrinsics.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define DSV4_EMULATOR 1
#define __global__ static
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ the_emulator_has_no_static_shared_memory_use_DYN_SMEM

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1;

namespace emu {
// The running thread's coordinates; the scheduler writes them at every switch.
extern dim3 thread_index, block_index, block_size, grid_size;

// runtime.cpp. `file` and `line` are the caller's, for reports and for finding threads that wait in different places.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void* shared_memory();
unsigned linear_thread();
void barrier(int id, unsigned threads, bool wait, bool all, const char* file, int line);
void exchange(unsigned mask, const void* value, unsigned size, void* lanes, bool orders_memory, const char* what, const char* file, int line);
void set_atomic(bool);
void launch(const char* name, dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*), const void* closure, size_t closure_bytes);
cudaError_t last_error();
void check_aligned(const void* address, unsigned alignment);

// Runs kernel(arguments...) once a thread. The closure outlives the launch, which is synchronous.
template <class Kernel, class... Arguments>
void launch_kernel(const char* name, dim3 grid, dim3 block, size_t shared_bytes, Kernel kernel, Arguments... arguments) {
    auto body = [=] { kernel(arguments...); };
    launch(name, grid, block, shared_bytes, [](const void* closure) { (*static_cast<const decltype(body)*>(closure))(); }, &body, sizeof body);
}

// What the lanes of one warp brought to a collective.
template <class T> struct Lanes {
    T value[32];
    unsigned mask;
    T from(unsigned lane) const {
        if (lane > 31 || !(mask >> lane & 1)) fail("warp collective reads lane %u, which mask 0x%08x does not name", lane, mask);
        return value[lane];
    }
    template <class F> T reduce(F f) const {  // in lane order
        T result{};
        bool first = true;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) { result = first ? value[i] : f(result, value[i]); first = false; }
        return result;
    }
};

template <class T> Lanes<T> gather(unsigned mask, T value, const char* what, const char* file, int line, bool orders_memory = false) {
    static_assert(sizeof(T) <= 16, "a warp collective moves at most 16 bytes a lane");
    Lanes<T> all;
    all.mask = mask;
    exchange(mask, &value, sizeof value, all.value, orders_memory, what, file, line);
    return all;
}

inline void check_shuffle(const char* what, int offset, int width) {
    if (width < 1 || width > 32 || (width & (width - 1))) fail("%s: width %d is no power of two up to 32", what, width);
    if (offset < 0 || offset > 31) fail("%s: %d is not in 0 to 31", what, offset);
}
inline unsigned lane() { return linear_thread() % 32; }
}  // namespace emu

#define threadIdx (emu::thread_index)
#define blockIdx (emu::block_index)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)

// The two constructs whose CUDA spelling is not C++; cuda/common.cuh defines the same names for nvcc.
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    ((void)(stream), emu::launch_kernel(#kernel, grid, block, shared_bytes, kernel, __VA_ARGS__))
#define DYN_SMEM(type, name) type* name = static_cast<type*>(emu::shared_memory())

#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()  // default arguments: the place of the call

inline cudaError_t cudaGetLastError() { return emu::last_error(); }

// Barriers. __syncthreads must be one place in the source for all threads; the named ones may be reached from several.
inline void __syncthreads(EMU_SITE) { emu::barrier(0, 0, true, true, file, line); }
inline void bar_sync(int id, int threads, EMU_SITE) { emu::barrier(id, threads, true, false, file, line); }
inline void bar_arrive(int id, int threads, EMU_SITE) { emu::barrier(id, threads, false, false, file, line); }

// Warp collectives. Of these only __syncwarp orders the lanes' accesses to memory.
constexpr int warpSize = 32;
inline void __syncwarp(unsigned mask = ~0u, EMU_SITE) { emu::gather(mask, 0, "__syncwarp", file, line, true); }

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_SITE) {
    emu::check_shuffle("__shfl_sync", source, width);
    return emu::gather(mask, value, "__shfl_sync", file, line).from((emu::lane() & -width) | (source & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMU_SITE) {
    emu::check_shuffle("__shfl_xor_sync", bits, width);
    auto all = emu::gather(mask, value, "__shfl_xor_sync", file, line);
    unsigned source = emu::lane() ^ bits;
    return source > (emu::lane() | (width - 1)) ? value : all.from(source);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32, EMU_SITE) {
    emu::check_shuffle("__shfl_down_sync", delta, width);
    auto all = emu::gather(mask, value, "__shfl_down_sync", file, line);
    unsigned source = emu::lane() + delta;
    return source > (emu::lane() | (width - 1)) ? value : all.from(source);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32, EMU_SITE) {
    emu::check_shuffle("__shfl_up_sync", delta, width);
    auto all = emu::gather(mask, value, "__shfl_up_sync", file, line);
    int source = int(emu::lane()) - delta;
    return source < int(emu::lane() & -width) ? value : all.from(source);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
    unsigned bit = predicate ? 1u << emu::lane() : 0;
    return emu::gather(mask, bit, "__ballot_sync", file, line).reduce([](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int predicate, EMU_SITE) {
    return emu::gather(mask, int(predicate != 0), "__any_sync", file, line).reduce([](int a, int b) { return a | b; });
}
inline int __all_sync(unsigned mask, int predicate, EMU_SITE) {
    return emu::gather(mask, int(predicate != 0), "__all_sync", file, line).reduce([](int a, int b) { return a & b; });
}
#define EMU_REDUCE(name, type, expression)                                                                                   \
    inline type name(unsigned mask, type value, EMU_SITE) {                                                                  \
        return emu::gather(mask, value, #name, file, line).reduce([](type a, type b) -> type { return expression; });       \
    }
EMU_REDUCE(__reduce_add_sync, unsigned, a + b)
EMU_REDUCE(__reduce_add_sync, int, int(unsigned(a) + unsigned(b)))
EMU_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMU_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMU_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMU_REDUCE(__reduce_min_sync, int, a < b ? a : b)
#undef EMU_REDUCE

// Atomics: a thread is switched only where it waits, so plain code is atomic. They return the old value.
namespace emu {
struct Atomic {  // within it, an access is no race with other atomics
    Atomic() { set_atomic(true); }
    ~Atomic() { set_atomic(false); }
};
}  // namespace emu
#define EMU_ATOMIC(name, expression)                             \
    template <class T> T name(T* address, T value) {             \
        emu::Atomic atomic;                                      \
        T old = *address;                                        \
        *address = expression;                                   \
        return old;                                              \
    }
EMU_ATOMIC(atomicAdd, old + value)
EMU_ATOMIC(atomicMax, old > value ? old : value)
EMU_ATOMIC(atomicMin, old < value ? old : value)
EMU_ATOMIC(atomicOr, old | value)
EMU_ATOMIC(atomicExch, value)
#undef EMU_ATOMIC
template <class T> T atomicCAS(T* address, T expected, T value) {
    emu::Atomic atomic;
    T old = *address;
    if (old == expected) *address = value;
    return old;
}

// Arithmetic. Exactly rounded here; rsqrtf and __expf are good to about 2 units in the last place on a GPU.
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }

// bfloat16: the upper half of a float; rounds to nearest even, NaN becomes 0x7fff as on the GPU.
struct __nv_bfloat16 { uint16_t bits; };
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
