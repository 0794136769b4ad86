// CUDA C++ on the CPU: what a kernel source sees in place of the CUDA headers (README.md says what that establishes).
//
// The device code is compiled as plain C++ with -fsanitize=thread, whose calls at every load and store end in runtime.cpp (not in
// the sanitizer's library), and linked with it. This header holds what must be inline: types, launches, collectives, intrinsics.
#pragma once
#include <math.h>  // not <cmath>: CUDA has isfinite, isnan, fabsf and their kin outside std

#include <cstdint>
#include <cstring>
#include <type_traits>

#define DSV4_EMULATOR 1
#define DSV4_WARPGROUPS
#define __global__ static
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __shared__ the_emulator_has_no_static_shared_memory_use_DYN_SMEM

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
#define EMU_VECTOR(type, name)                                              \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                \
    struct alignas(4 * sizeof(type)) name##4 { type x, y, z, w; };          \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }        \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMU_VECTOR(unsigned char, uchar)
EMU_VECTOR(unsigned short, ushort)
EMU_VECTOR(int, int)
EMU_VECTOR(unsigned, uint)
EMU_VECTOR(float, float)
#undef EMU_VECTOR
using cudaStream_t = void*;
using cudaError_t = int;
using cudaEvent_t = void*;  // runtime.cpp numbers them from 1
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801;
constexpr int cudaMemcpyHostToDevice = 1, cudaEventDisableTiming = 2;

#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()  // default arguments: the place of the call
#define EMU_UNCHECKED __attribute__((no_sanitize("thread"), noinline))             // the emulator's own accesses are not the kernel's

// A matrix in global memory, as make_tensor_map of tensor_map.cuh describes it.
enum class Swizzle { kNone, k32, k64, k128 };  // bytes of a row of chunks that are mixed
struct alignas(64) TensorMap {
    const char* address;
    size_t row_bytes;
    unsigned element_bytes, width, height, box_width, box_height;
    Swizzle swizzle;
    bool made;
    char unused[128 - 48];
};

namespace emu {
// The running thread's coordinates; the scheduler writes them at every switch.
extern dim3 thread_index, block_index, block_size, grid_size;

// runtime.cpp. `file` and `line` are the caller's, for reports and for finding threads that wait in different places.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void* shared_memory();
unsigned linear_thread();
cudaError_t last_error();
// What the host queues in a stream beside launches: it happens when somebody waits for an event behind it, no sooner.
cudaError_t copy_to_device(void* to, const void* from, size_t bytes);
cudaError_t record(cudaEvent_t& event);
cudaError_t wait_for(cudaEvent_t event);
void launch(const char* name, dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes, void (*body)(const void*), const void* closure,
            size_t closure_bytes);
void sync_block(const char* file, int line);
void named_barrier(int id, unsigned threads, bool wait, const char* file, int line);
// Checks an access that no instruction of the kernel makes: an atomic's (a read and a write in one), or those of the functions below. What
// atomics and fences say to other blocks is in runtime.cpp.
enum class Access { kRead, kWrite, kAtomic };
void access(const void* address, size_t size, Access kind, unsigned alignment, const char* what, const void* place);
void atomic(const void* address, size_t size, const char* what, const void* place);
void fence();
bool make_map(TensorMap* map, int element_bytes, const void* address, unsigned width, unsigned height, size_t row_bytes, unsigned box_width,
              unsigned box_height, Swizzle swizzle);
void tensor_load(void* shared, const void* map, int x, int y, uint64_t* bar);
// The lanes of `mask` meet, each with something of its own, and the last to come runs `combine` for all: lanes[i] is lane i's, null if
// absent.
void meet(unsigned mask, void* mine, void (*combine)(void* const* lanes), bool orders_memory, const char* what, const char* file, int line);

struct Four { uint32_t r[4]; };
struct Fragments { float c[4]; uint32_t a[4], b[2]; };  // one lane's
struct Sums { float c[4]; };
enum class Values { kBf16, kF16, kE4m3 };
struct Tile { float d[128]; };  // one thread's sums of a warpgroup's product, up to 256 columns
// `rows`: the thread's registers of a, or null where a is in shared memory.
void wgmma(Values values, int columns, Tile& mine, const uint32_t* rows, uint64_t a, uint64_t b, const char* what, const char* file,
           int line);
void wgmma_fence(const char* file, int line);
void wgmma_commit(const char* file, int line);
void wgmma_wait(unsigned groups, const char* file, int line);
uint64_t operand(const void* first, uint64_t fields);
struct Eight { uint32_t r[8]; };
void tensor_alloc(uint32_t* shared, unsigned columns, const char* file, int line);
void tensor_relinquish(const char* file, int line);
void tensor_free(uint32_t address, unsigned columns, const char* file, int line);
enum class Kind { kBf16, kE4m3, kNvfp4, kMxfp4 };
void tensor_mma(Kind kind, uint32_t d, uint64_t a, uint64_t b, uint32_t shape, uint32_t a_scales, uint32_t b_scales, bool add);
void tensor_copy_scales(uint32_t to, uint64_t from);
void tensor_commit(uint64_t* bar);
Eight tensor_load(uint32_t from, const char* file, int line);
void tensor_store(uint32_t to, Eight registers, const char* file, int line);
Sums mma(Values values, Fragments mine, const char* what, const char* file, int line);
Four ldmatrix(const void* row, int matrices, bool transposed, const char* what, const char* file, int line);
void stmatrix(void* row, Four registers, bool transposed, const char* what, const char* file, int line);
Four load_stream(const void* p);
void cp_async(void* shared, const void* global, unsigned bytes, bool there, const char* what);
void cp_async_commit();
void cp_async_wait(unsigned groups);
void mbarrier_init(uint64_t* bar, unsigned count);
void mbarrier_fence();
void fence_async();
void read_only(const void* address, size_t size);
void mbarrier_arrive(uint64_t* bar, unsigned bytes, const char* what);
void mbarrier_wait(uint64_t* bar, unsigned parity, const char* file, int line);
void bulk_load(void* shared, const void* global, unsigned bytes, uint64_t* bar);
void grid_wait();
void grid_launch();
int load_earlier(const int* p);
uint64_t nanoseconds();
unsigned cluster_rank();
unsigned cluster_size();
void cluster_sync(const char* file, int line);
void* cluster_map(const void* shared, unsigned rank);
float half_to_float(uint16_t);
uint16_t float_to_half(float);
float e4m3_to_float(uint8_t);
uint8_t float_to_e4m3(float);
uint16_t multiply_add_bf16(uint16_t a, uint16_t b, uint16_t c);  // one rounding

// Runs kernel(arguments...) once a thread. The closure outlives the launch, which is synchronous.
template <class... Parameters, class... Arguments>
void launch_kernel(const char* name, dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes, void (*kernel)(Parameters...),
                   Arguments... arguments) {
    auto body = [=] { kernel(arguments...); };
    launch(
        name, grid, block, cluster, shared_bytes, [](const void* closure) { (*static_cast<const decltype(body)*>(closure))(); }, &body,
        sizeof body);
}

inline unsigned lane() { return linear_thread() % 32; }
inline void check_aligned(const void* address, unsigned alignment) {
    if (reinterpret_cast<uintptr_t>(address) % alignment) fail("vector access to an address that is no multiple of %u bytes", alignment);
}

template <class T> struct Shuffle { T value; unsigned source; };
// The value of lane `source`, or one's own if `source` is 32 (a shuffle past the end of its group).
template <class T>
EMU_UNCHECKED T shuffle(unsigned mask, T value, int offset, unsigned source, int width, const char* what, const char* file, int line) {
    static_assert(sizeof(T) <= 8, "shuffles move 4 or 8 bytes a lane");
    if (width < 1 || width > 32 || (width & (width - 1))) fail("%s: width %d is no power of two up to 32", what, width);
    if (offset < 0 || offset > 31) fail("%s: %d is not in 0 to 31", what, offset);
    if (source > 31) source = lane();
    if (!(mask >> source & 1)) fail("warp collective reads lane %u, which mask 0x%08x does not name", source, mask);
    Shuffle<T> mine{value, source};
    meet(mask, &mine, [](void* const* lanes) __attribute__((no_sanitize("thread"))) {
        T values[32] = {};
        for (int i = 0; i < 32; i++) if (lanes[i]) values[i] = static_cast<Shuffle<T>*>(lanes[i])->value;
        for (int i = 0; i < 32; i++)
            if (lanes[i]) static_cast<Shuffle<T>*>(lanes[i])->value = values[static_cast<Shuffle<T>*>(lanes[i])->source];
    }, false, what, file, line);
    return mine.value;
}

// F::of over all lanes' values, in lane order.
template <class F, class T> EMU_UNCHECKED T reduce(unsigned mask, T value, const char* what, const char* file, int line) {
    meet(mask, &value, [](void* const* lanes) __attribute__((no_sanitize("thread"))) {
        int first = 0;
        while (!lanes[first]) first++;
        T result = *static_cast<T*>(lanes[first]);
        for (int i = first + 1; i < 32; i++) if (lanes[i]) result = F::of(result, *static_cast<T*>(lanes[i]));
        for (int i = first; i < 32; i++) if (lanes[i]) *static_cast<T*>(lanes[i]) = result;
    }, false, what, file, line);
    return value;
}
#define EMU_FUNCTION(name, expression) \
    struct name { template <class T> static __attribute__((no_sanitize("thread"))) T of(T a, T b) { return expression; } }
EMU_FUNCTION(Sum, T(unsigned(a) + unsigned(b)));
EMU_FUNCTION(Max, a > b ? a : b);
EMU_FUNCTION(Min, a < b ? a : b);
EMU_FUNCTION(And, a & b);
EMU_FUNCTION(Or, a | b);
EMU_FUNCTION(Xor, a ^ b);
#undef EMU_FUNCTION
}  // namespace emu

#define threadIdx (emu::thread_index)
#define blockIdx (emu::block_index)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)

// The constructs whose CUDA spelling is not C++; cuda/common.cuh defines the same names for nvcc.
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    ((void)(stream), emu::launch_kernel(#kernel, grid, block, 1, shared_bytes, kernel, __VA_ARGS__))
#define LAUNCH_CLUSTER(kernel, grid, block, cluster, shared_bytes, stream, ...) \
    ((void)(stream), emu::launch_kernel(#kernel, grid, block, cluster, shared_bytes, kernel, __VA_ARGS__))
#define DYN_SMEM(type, name) type* name = static_cast<type*>(emu::shared_memory())

inline cudaError_t cudaGetLastError() { return emu::last_error(); }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, cudaStream_t) { return emu::copy_to_device(to, from, bytes); }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, int) { return emu::record(*event); }
inline cudaError_t cudaEventRecord(cudaEvent_t& event, cudaStream_t) { return emu::record(event); }
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) { return emu::wait_for(event); }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

// Barriers. __syncthreads must be one place in the source for all threads; the named ones may be reached from several.
__forceinline__ void __syncthreads(EMU_SITE) { emu::sync_block(file, line); }
__forceinline__ void bar_sync(int id, int threads, EMU_SITE) { emu::named_barrier(id, threads, true, file, line); }
__forceinline__ void bar_arrive(int id, int threads, EMU_SITE) { emu::named_barrier(id, threads, false, file, line); }
__forceinline__ void __threadfence() { emu::fence(); }  // orders blocks, with an atomic before or behind it
__forceinline__ void __threadfence_block() {}  // what orders a block's threads here is barriers

// Warp collectives. Of these only __syncwarp orders the lanes' accesses to memory.
constexpr int warpSize = 32;
__forceinline__ void __syncwarp(unsigned mask = ~0u, EMU_SITE) { emu::meet(mask, nullptr, nullptr, true, "__syncwarp", file, line); }

template <class T> __forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_SITE) {
    return emu::shuffle(mask, value, source, (emu::lane() & -width) | (source & (width - 1)), width, "__shfl_sync", file, line);
}
template <class T> __forceinline__ T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMU_SITE) {
    unsigned source = emu::lane() ^ bits;
    return emu::shuffle(mask, value, bits, source > (emu::lane() | (width - 1)) ? 32 : source, width, "__shfl_xor_sync", file, line);
}
template <class T> __forceinline__ T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32, EMU_SITE) {
    unsigned source = emu::lane() + delta;
    return emu::shuffle(mask, value, delta, source > (emu::lane() | (width - 1)) ? 32 : source, width, "__shfl_down_sync", file, line);
}
template <class T> __forceinline__ T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32, EMU_SITE) {
    int source = int(emu::lane()) - delta;
    return emu::shuffle(mask, value, delta, source < int(emu::lane() & -width) ? 32 : source, width, "__shfl_up_sync", file, line);
}
__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
    return emu::reduce<emu::Or>(mask, predicate ? 1u << emu::lane() : 0u, "__ballot_sync", file, line);
}
__forceinline__ int __any_sync(unsigned mask, int predicate, EMU_SITE) {
    return emu::reduce<emu::Or>(mask, int(predicate != 0), "__any_sync", file, line);
}
__forceinline__ int __all_sync(unsigned mask, int predicate, EMU_SITE) {
    return emu::reduce<emu::And>(mask, int(predicate != 0), "__all_sync", file, line);
}
#define EMU_REDUCE(name, type, function) \
    __forceinline__ type name(unsigned mask, type value, EMU_SITE) { return emu::reduce<emu::function>(mask, value, #name, file, line); }
EMU_REDUCE(__reduce_add_sync, unsigned, Sum)
EMU_REDUCE(__reduce_add_sync, int, Sum)
EMU_REDUCE(__reduce_max_sync, unsigned, Max)
EMU_REDUCE(__reduce_max_sync, int, Max)
EMU_REDUCE(__reduce_min_sync, unsigned, Min)
EMU_REDUCE(__reduce_min_sync, int, Min)
EMU_REDUCE(__reduce_and_sync, unsigned, And)
EMU_REDUCE(__reduce_or_sync, unsigned, Or)
EMU_REDUCE(__reduce_xor_sync, unsigned, Xor)
#undef EMU_REDUCE

// Atomics: a thread is switched only where it waits, so plain code is atomic. They return the old value.
#define EMU_ATOMIC(name, expression)                                                                   \
    template <class T> EMU_UNCHECKED T name(T* address, std::common_type_t<T> value) {                 \
        emu::atomic(address, sizeof(T), #name, __builtin_return_address(0));                           \
        T old = *address;                                                                              \
        *address = expression;                                                                         \
        return old;                                                                                    \
    }
EMU_ATOMIC(atomicAdd, old + value)
EMU_ATOMIC(atomicSub, old - value)
EMU_ATOMIC(atomicMax, old > value ? old : value)
EMU_ATOMIC(atomicMin, old < value ? old : value)
EMU_ATOMIC(atomicAnd, old & value)
EMU_ATOMIC(atomicOr, old | value)
EMU_ATOMIC(atomicXor, old ^ value)
EMU_ATOMIC(atomicExch, value)
EMU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef EMU_ATOMIC
template <class T> EMU_UNCHECKED T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
    emu::atomic(address, sizeof(T), "atomicCAS", __builtin_return_address(0));
    T old = *address;
    if (old == expected) *address = value;
    return old;
}

// Loads with a cache hint are loads; __ldg's path sees nothing that the launch writes.
template <class T> __forceinline__ T __ldg(const T* p) {
    emu::read_only(p, sizeof(T));
    return *p;
}
template <class T> __forceinline__ T __ldcg(const T* p) { return *p; }
template <class T> __forceinline__ T __ldcs(const T* p) { return *p; }
template <class T> __forceinline__ void __stcs(T* p, T value) { *p = value; }
template <class T> __forceinline__ void __stcg(T* p, T value) { *p = value; }

// Arithmetic. Exactly rounded here where x86-64's libm is; rsqrtf, __expf, __logf and __fdividef are good to about 2 units in the last
// place on a GPU.
#define EMU_MINMAX(type)                                            \
    inline type min(type a, type b) { return b < a ? b : a; }       \
    inline type max(type a, type b) { return a < b ? b : a; }
EMU_MINMAX(int)
EMU_MINMAX(unsigned)
EMU_MINMAX(long)
EMU_MINMAX(unsigned long)
EMU_MINMAX(long long)
EMU_MINMAX(unsigned long long)
#undef EMU_MINMAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
template <class To, class From>
EMU_UNCHECKED To emu_bits(From x) {
    To y;
    static_assert(sizeof y == sizeof x, "");
    memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline float __uint_as_float(unsigned bits) { return emu_bits<float>(bits); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline float __int_as_float(int bits) { return emu_bits<float>(bits); }
// To an integer: NaN becomes 0 and values beyond the range its ends.
inline int __float2int_rn(float x) {
    return x >= 0x1p31f ? 0x7fffffff : x <= -0x1p31f ? int(0x80000000u) : x == x ? int(nearbyintf(x)) : 0;
}
inline int __float2int_rz(float x) { return __float2int_rn(truncf(x)); }
inline int __float2int_rd(float x) { return __float2int_rn(floorf(x)); }
inline int __float2int_ru(float x) { return __float2int_rn(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return x >= 0x1p32f ? ~0u : x > 0 ? unsigned(nearbyintf(x)) : 0u; }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }

// Bits.
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (static_cast<unsigned long long>(b) << 32) | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return r;
}

// bfloat16: the upper half of a float; rounds to nearest even, NaN becomes 0x7fff as on the GPU.
struct __nv_bfloat16 { uint16_t bits; };
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }

// ---- What cuda/ptx.cuh names, which also says what each does and how fragments are laid out.

// Products are exact. They are added in fp32 to c one after the other, k = 0 first; a GPU adds several at once and may differ in the last
// bits.
#define EMU_MMA(name, values)                                                                                                     \
    __forceinline__ void name(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_SITE) {                          \
        const emu::Sums sums =                                                                                                    \
            emu::mma(emu::Values::values, {{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, #name, file, line); \
        c[0] = sums.c[0], c[1] = sums.c[1], c[2] = sums.c[2], c[3] = sums.c[3];                                                   \
    }
EMU_MMA(mma_bf16, kBf16)
EMU_MMA(mma_f16, kF16)
EMU_MMA(mma_e4m3, kE4m3)
#undef EMU_MMA

#define EMU_LDMATRIX(name, n, transposed)                                                              \
    __forceinline__ void name(uint32_t (&r)[n], const void* row, EMU_SITE) {                                    \
        const emu::Four four = emu::ldmatrix(row, n, transposed, #name, file, line);                   \
        for (int i = 0; i < n; i++) r[i] = four.r[i];                                                  \
    }
EMU_LDMATRIX(ldmatrix_x4, 4, false)
EMU_LDMATRIX(ldmatrix_x2, 2, false)
EMU_LDMATRIX(ldmatrix_x4_trans, 4, true)
EMU_LDMATRIX(ldmatrix_x2_trans, 2, true)
#undef EMU_LDMATRIX
__forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4], EMU_SITE) {
    emu::stmatrix(row, {{r[0], r[1], r[2], r[3]}}, false, "stmatrix_x4", file, line);
}
__forceinline__ void stmatrix_x4_trans(void* row, const uint32_t (&r)[4], EMU_SITE) {
    emu::stmatrix(row, {{r[0], r[1], r[2], r[3]}}, true, "stmatrix_x4_trans", file, line);
}

__forceinline__ uint32_t movmatrix_trans(uint32_t pair, EMU_SITE) {
    const unsigned g = emu::lane() / 4, from = emu::lane() % 4 * 8 + g / 2, shift = g % 2 * 16;  // who has column g of row 2 q; + 4: of the next
    const uint32_t low = emu::shuffle(~0u, pair, from, from, 32, "movmatrix_trans", file, line) >> shift & 0xffff;
    return low | (emu::shuffle(~0u, pair, from + 4, from + 4, 32, "movmatrix_trans", file, line) >> shift & 0xffff) << 16;
}

__forceinline__ void cp_async_16(void* shared, const void* global) { emu::cp_async(shared, global, 16, true, "cp_async_16"); }
__forceinline__ void cp_async_16(void* shared, const void* global, bool there) {
    emu::cp_async(shared, global, 16, there, "cp_async_16");
}
__forceinline__ void cp_async_4(void* shared, const void* global, bool there) { emu::cp_async(shared, global, 4, there, "cp_async_4"); }
__forceinline__ void cp_async_commit() { emu::cp_async_commit(); }
template <int N> __forceinline__ void cp_async_wait() { emu::cp_async_wait(N); }

__forceinline__ void mbarrier_init(uint64_t* bar, unsigned count) { emu::mbarrier_init(bar, count); }
__forceinline__ void mbarrier_fence_init() { emu::mbarrier_fence(); }
__forceinline__ void mbarrier_expect(uint64_t* bar, unsigned bytes) { emu::mbarrier_arrive(bar, bytes, "mbarrier_expect"); }
__forceinline__ void mbarrier_arrive(uint64_t* bar) { emu::mbarrier_arrive(bar, 0, "mbarrier_arrive"); }
__forceinline__ void mbarrier_wait(uint64_t* bar, unsigned parity, EMU_SITE) { emu::mbarrier_wait(bar, parity, file, line); }
__forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes, uint64_t* bar) {
    emu::bulk_load(shared, global, bytes, bar);
}
__forceinline__ void bulk_load_keep(void* shared, const void* global, unsigned bytes, uint64_t* bar) {
    emu::bulk_load(shared, global, bytes, bar);
}
__forceinline__ void fence_async_shared() { emu::fence_async(); }

inline cudaError_t make_tensor_map(TensorMap* map, int element_bytes, const void* address, unsigned width, unsigned height,
                                   size_t row_bytes, unsigned box_width, unsigned box_height, Swizzle swizzle) {
    return emu::make_map(map, element_bytes, address, width, height, row_bytes, box_width, box_height, swizzle) ? cudaSuccess
                                                                                                                : cudaErrorInvalidValue;
}
__forceinline__ void tensor_load(void* shared, const void* map, int x, int y, uint64_t* bar) { emu::tensor_load(shared, map, x, y, bar); }

__forceinline__ uint64_t wgmma_operand(const void* first, Swizzle swizzle, unsigned group_bytes, unsigned cell_bytes = 16) {
    const uint64_t code = swizzle == Swizzle::kNone ? 0 : 4 - unsigned(swizzle);
    return emu::operand(first, code << 62 | uint64_t(group_bytes >> 4 & 0x3fff) << 32 | uint64_t(cell_bytes >> 4 & 0x3fff) << 16);
}
__forceinline__ void wgmma_fence(EMU_SITE) { emu::wgmma_fence(file, line); }
__forceinline__ void wgmma_commit(EMU_SITE) { emu::wgmma_commit(file, line); }
template <int N> __forceinline__ void wgmma_wait(EMU_SITE) { emu::wgmma_wait(N, file, line); }
#define EMU_WGMMA(name, values)                                                                            \
    template <int n> __forceinline__ void name(float (&d)[n], uint64_t a, uint64_t b, EMU_SITE) {          \
        static_assert(n == 4 || n == 16, "8 or 32 columns");                                               \
        emu::Tile mine = {};                                                                               \
        for (int i = 0; i < n; i++) mine.d[i] = d[i];                                                      \
        emu::wgmma(emu::Values::values, 2 * n, mine, nullptr, a, b, #name, file, line);                    \
        for (int i = 0; i < n; i++) d[i] = mine.d[i];                                                      \
    }
EMU_WGMMA(wgmma_bf16, kBf16)
EMU_WGMMA(wgmma_f16, kF16)
EMU_WGMMA(wgmma_e4m3, kE4m3)
#undef EMU_WGMMA
template <int n> __forceinline__ void wgmma_bf16(float (&d)[n], const uint32_t (&a)[4], uint64_t b, EMU_SITE) {
    static_assert(n % (n <= 16 ? 4 : 8) == 0 && n <= 64, "8, 16, 24, 32, 48, 64, 80, 96 or 128 columns");
    emu::Tile mine = {};
    for (int i = 0; i < n; i++) mine.d[i] = d[i];
    emu::wgmma(emu::Values::kBf16, 2 * n, mine, a, 0, b, "wgmma_bf16", file, line);
    for (int i = 0; i < n; i++) d[i] = mine.d[i];
}
template <int N> __forceinline__ void registers_more() {}
template <int N> __forceinline__ void registers_less() {}
template <bool first> __forceinline__ void wgmma_bf16(float (&d)[32], const uint32_t (&a)[4], uint64_t b, EMU_SITE) {
    emu::Tile mine = {};
    if (!first) for (int i = 0; i < 32; i++) mine.d[i] = d[i];
    emu::wgmma(emu::Values::kBf16, 64, mine, a, 0, b, "wgmma_bf16", file, line);
    for (int i = 0; i < 32; i++) d[i] = mine.d[i];
}
__forceinline__ void wgmma_wait(float (&)[32], EMU_SITE) { emu::wgmma_wait(0, file, line); }
template <int N> __forceinline__ void wgmma_fence(uint32_t (&)[N][4], EMU_SITE) { emu::wgmma_fence(file, line); }

__forceinline__ uint64_t tensor_operand(const void* first, Swizzle swizzle, unsigned group_bytes, unsigned cell_bytes = 16) {
    const uint64_t code = swizzle == Swizzle::kNone ? 0 : 8 - 2 * unsigned(swizzle);
    return emu::operand(
        first, code << 61 | uint64_t(1) << 46 | uint64_t(group_bytes >> 4 & 0x3fff) << 32 | uint64_t(cell_bytes >> 4 & 0x3fff) << 16);
}
__forceinline__ uint64_t tensor_operand_across(const void* first, unsigned group_bytes, unsigned strip_bytes) {
    return tensor_operand(first, Swizzle::k128, group_bytes, strip_bytes);
}
constexpr uint32_t kTensorBf16 = 8u << 24 | 1u << 10 | 1u << 7 | 1u << 4, kTensorE4m3 = 8u << 24 | 1u << 4,
                   kTensorNvfp4 = 8u << 24 | 1u << 10 | 1u << 7, kTensorMxfp4 = kTensorNvfp4 | 1u << 23;
constexpr uint32_t kTensorUpperScales = 2u << 29 | 2u << 4, kTensorAcross = 1u << 16;
constexpr uint32_t tensor_shape(uint32_t kind, unsigned columns) { return kind | columns / 8 << 17; }
__forceinline__ void tensor_alloc(uint32_t* shared, unsigned columns, EMU_SITE) { emu::tensor_alloc(shared, columns, file, line); }
__forceinline__ void tensor_relinquish(EMU_SITE) { emu::tensor_relinquish(file, line); }
__forceinline__ void tensor_free(uint32_t address, unsigned columns, EMU_SITE) { emu::tensor_free(address, columns, file, line); }
__forceinline__ void tensor_mma_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, bool add) {
    emu::tensor_mma(emu::Kind::kBf16, d, a, b, shape, 0, 0, add);
}
__forceinline__ void tensor_mma_e4m3(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, bool add) {
    emu::tensor_mma(emu::Kind::kE4m3, d, a, b, shape, 0, 0, add);
}
__forceinline__ void tensor_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, uint32_t a_scales, uint32_t b_scales, bool add) {
    emu::tensor_mma(emu::Kind::kNvfp4, d, a, b, shape, a_scales, b_scales, add);
}
__forceinline__ void tensor_mma_mxfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, uint32_t a_scales, uint32_t b_scales, bool add) {
    emu::tensor_mma(emu::Kind::kMxfp4, d, a, b, shape, a_scales, b_scales, add);
}
__forceinline__ void tensor_copy_scales(uint32_t to, uint64_t from) { emu::tensor_copy_scales(to, from); }
__forceinline__ void tensor_commit(uint64_t* bar) { emu::tensor_commit(bar); }
__forceinline__ void tensor_load_8(uint32_t (&r)[8], uint32_t from, EMU_SITE) {
    const emu::Eight eight = emu::tensor_load(from, file, line);
    for (int i = 0; i < 8; i++) r[i] = eight.r[i];
}
__forceinline__ void tensor_store_8(uint32_t to, const uint32_t (&r)[8], EMU_SITE) {
    emu::tensor_store(to, {{r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]}}, file, line);
}
__forceinline__ void tensor_wait_load() {}
template <int N> __forceinline__ void tensor_wait_load(uint32_t (&)[N][8]) {}
__forceinline__ void tensor_wait_store() {}
__forceinline__ void tensor_fence_before() {}
__forceinline__ void tensor_fence_after() {}

__forceinline__ uint4 load_stream(const void* p) {
    const emu::Four v = emu::load_stream(p);
    return {v.r[0], v.r[1], v.r[2], v.r[3]};  // in pieces: where a call's result goes straight to memory, g++ does not report the store
}

__forceinline__ void grid_dependency_wait() { emu::grid_wait(); }
__forceinline__ void grid_dependency_launch() { emu::grid_launch(); }
__forceinline__ int load_earlier(const int* p) { return emu::load_earlier(p); }
template <class T> __forceinline__ void worked_out(T*&) {}

__forceinline__ unsigned atomic_inc_fenced(unsigned* counter, unsigned most) {
    __threadfence();
    const unsigned old = atomicInc(counter, most);
    __threadfence();
    return old;
}

// Another GPU's or the host's accesses do not happen within a launch here, so these order and wait for nothing.
__forceinline__ void store_pair_system(uint64_t* p, uint64_t a, uint64_t b) {
    emu::check_aligned(p, 16);
    p[0] = a, p[1] = b;
}
__forceinline__ void load_pair_system(const volatile uint64_t* p, uint64_t& a, uint64_t& b) {  // volatile: each poll is a read
    emu::check_aligned(const_cast<const uint64_t*>(p), 16);
    a = p[0], b = p[1];
}
EMU_UNCHECKED inline void store_system(int* p, int x) {  // by several threads, as an atomic's
    emu::atomic(p, sizeof x, "store_system", __builtin_return_address(0));
    *p = x;
}
inline uint64_t global_nanoseconds() { return emu::nanoseconds(); }

__forceinline__ unsigned cluster_rank() { return emu::cluster_rank(); }
__forceinline__ unsigned cluster_size() { return emu::cluster_size(); }
__forceinline__ void cluster_sync(EMU_SITE) { emu::cluster_sync(file, line); }
template <class T> __forceinline__ T* cluster_map(T* shared, unsigned rank) { return static_cast<T*>(emu::cluster_map(shared, rank)); }

__forceinline__ uint32_t pack_bf16(float lo, float hi) {
    return __float2bfloat16_rn(lo).bits | uint32_t(__float2bfloat16_rn(hi).bits) << 16;
}
__forceinline__ uint32_t pack_f16(float lo, float hi) { return emu::float_to_half(lo) | uint32_t(emu::float_to_half(hi)) << 16; }
__forceinline__ float bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }
__forceinline__ float bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
namespace emu {
template <class F> uint32_t both_halves(F f) { return f(0) | uint32_t(f(16)) << 16; }
}  // namespace emu
__forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    return emu::both_halves([=](int i) { return emu::multiply_add_bf16(uint16_t(a >> i), uint16_t(b >> i), uint16_t(c >> i)); });
}
__forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, b, 0x80008000u); }  // plus -0, which changes no product
__forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {  // a product of two f16 is exact in fp32
    return emu::both_halves(
        [=](int i) { return emu::float_to_half(emu::half_to_float(uint16_t(a >> i)) * emu::half_to_float(uint16_t(b >> i))); });
}
__forceinline__ uint32_t max_magnitudes_bf16x2(uint32_t a, uint32_t b) {
    return emu::both_halves([=](int i) {
        const uint16_t x = a >> i & 0x7fff, y = b >> i & 0x7fff, larger = x > y ? x : y;
        return larger > 0x7f80 ? uint16_t(0x7fff) : uint16_t(larger | ((a ^ b) >> i & 0x8000));
    });
}
__forceinline__ uint8_t to_e4m3(float x) { return emu::float_to_e4m3(x); }
__forceinline__ float from_e4m3(uint8_t x) { return emu::e4m3_to_float(x); }
__forceinline__ uint32_t e4m3x2_to_f16x2(uint16_t pair) {
    return emu::both_halves([=](int i) { return emu::float_to_half(emu::e4m3_to_float(uint8_t(pair >> i / 2))); });
}
template <class T> __forceinline__ T* opaque(T* x) { return x; }
__forceinline__ int made_here(int x) { return x; }
__forceinline__ float max_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
__forceinline__ float2 fma_f32x2(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
__forceinline__ float min_nan(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
__forceinline__ float reciprocal(float x) {  // of subnormal numbers, and subnormal ones, as of zero and zero
    const float r = 1.0f / (fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x);
    return fabsf(r) < 0x1p-126f ? copysignf(0.0f, r) : r;
}
__forceinline__ uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
__forceinline__ uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) { return (a & mask) | (b & ~mask); }
__forceinline__ uint32_t rotate_left(uint32_t x, unsigned bits) { return x << bits % 32 | x >> (32 - bits) % 32; }
