// The instructions that CUDA C++ has no name for, one function each: the only place with inline assembly.
//
// The CPU emulator defines the same names (tests/emulator/emulator.h), so that a kernel is one source. Addresses are ordinary pointers;
// "shared" means that one must point into the block's shared memory.
#pragma once
#ifndef DSV4_EMULATOR
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define PTX_FN __device__ __forceinline__

namespace ptx {
PTX_FN uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
// The L2 policy of data that is read once. Not volatile: the compiler makes one for the whole kernel.
PTX_FN uint64_t read_once() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
}  // namespace ptx

// ---- Products of a warp: c [16, 8] += a [16, K] b [K, 8], fp32 sums. With g = lane / 4, q = lane % 4:
//   c[0..3] = c[g][2q], c[g][2q + 1], c[g + 8][2q], c[g + 8][2q + 1]
//   16-bit values, K = 16: a[0..3] = a[g][2q..], a[g + 8][2q..], a[g][2q + 8..], a[g + 8][2q + 8..]; b[0..1] = b[2q..][g], b[2q + 8..][g]
//   8-bit values, K = 32: a[0..3] = a[g][4q..], a[g + 8][4q..], a[g][4q + 16..], a[g + 8][4q + 16..]; b[0..1] = b[4q..][g], b[4q + 16..][g]
// (".." = the two or four consecutive values along K of one register, the first in its low bits).
#define PTX_MMA(name, shape)                                                                                                       \
    PTX_FN void name(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {                                              \
        asm volatile("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                           \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                          \
    }
PTX_MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
PTX_MMA(mma_f16, "m16n8k16.row.col.f32.f16.f16.f32")
PTX_MMA(mma_e4m3, "m16n8k32.row.col.f32.e4m3.e4m3.f32")
#undef PTX_MMA

// ---- 8x8 matrices of 16-bit values between shared memory and registers. Lane 8 i + j has the address of row j of matrix i (16 bytes,
// aligned). In r[i], lane l gets of matrix i: values 2 (l % 4) and the next of row l / 4; with _trans, of column l / 4.
#define PTX_LDMATRIX_4(name, qualifiers)                                                                             \
    PTX_FN void name(uint32_t (&r)[4], const void* row) {                                                            \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" qualifiers ".shared.b16 {%0,%1,%2,%3}, [%4];"                   \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(ptx::shared_address(row)) : "memory");   \
    }
#define PTX_LDMATRIX_2(name, qualifiers)                                                                             \
    PTX_FN void name(uint32_t (&r)[2], const void* row) {                                                            \
        asm volatile("ldmatrix.sync.aligned.m8n8.x2" qualifiers ".shared.b16 {%0,%1}, [%2];"                         \
                     : "=r"(r[0]), "=r"(r[1]) : "r"(ptx::shared_address(row)) : "memory");                           \
    }
PTX_LDMATRIX_4(ldmatrix_x4, "")
PTX_LDMATRIX_4(ldmatrix_x4_trans, ".trans")
PTX_LDMATRIX_2(ldmatrix_x2, "")
PTX_LDMATRIX_2(ldmatrix_x2_trans, ".trans")
#undef PTX_LDMATRIX_4
#undef PTX_LDMATRIX_2
#define PTX_STMATRIX_4(name, qualifiers)                                                                             \
    PTX_FN void name(void* row, const uint32_t (&r)[4]) {                                                            \
        asm volatile("stmatrix.sync.aligned.m8n8.x4" qualifiers ".shared.b16 [%0], {%1,%2,%3,%4};"                   \
                     ::"r"(ptx::shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");        \
    }
PTX_STMATRIX_4(stmatrix_x4, "")
PTX_STMATRIX_4(stmatrix_x4_trans, ".trans")
#undef PTX_STMATRIX_4
// The transpose of a matrix of 8 x 8 16-bit values: lane 4 g + q gives those of row g and columns 2 q and 2 q + 1, and gets such.
PTX_FN uint32_t movmatrix_trans(uint32_t pair) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
    return r;
}

// ---- Asynchronous copies of 16 bytes (past L1) or 4 by the thread itself. The bytes are there for this thread after cp_async_wait<N>():
// all but the last N committed groups; for others after a barrier as well. Unless the source is `there`, it is not read, and zeros come.
PTX_FN void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(ptx::shared_address(shared)), "l"(global) : "memory");
}
PTX_FN void cp_async_16(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(ptx::shared_address(shared)), "l"(global), "r"(there ? 16 : 0) : "memory");
}
PTX_FN void cp_async_4(void* shared, const void* global, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(ptx::shared_address(shared)), "l"(global), "r"(there ? 4 : 0) : "memory");
}
PTX_FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> PTX_FN void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

// ---- mbarriers: 8 aligned bytes of shared memory. A phase ends when `count` arrivals have come and as many bytes as were expected.
PTX_FN void mbarrier_init(uint64_t* bar, unsigned count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(ptx::shared_address(bar)), "r"(count) : "memory");
}
// By the initialising thread, before bulk copies and other blocks see the barriers; the block's threads need __syncthreads besides.
PTX_FN void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and adds `bytes` to what this phase waits for.
PTX_FN void mbarrier_expect(uint64_t* bar, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(ptx::shared_address(bar)), "r"(bytes) : "memory");
}
PTX_FN void mbarrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(ptx::shared_address(bar)) : "memory");
}
// Until the phase of this parity has ended: the first phase has parity 0, so a wait for parity 1 on a new barrier returns at once.
PTX_FN void mbarrier_wait(uint64_t* bar, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" :: "r"(ptx::shared_address(bar)), "r"(parity) : "memory");
}

// ---- Bulk copies by the copy engine, started by one thread; addresses and size are multiples of 16. `bar` counts the bytes.
PTX_FN void bulk_load(void* shared, const void* global, unsigned bytes, uint64_t* bar) {  // weights: read once
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(ptx::shared_address(shared)), "l"(global), "r"(bytes), "r"(ptx::shared_address(bar)), "l"(ptx::read_once())
                 : "memory");
}
PTX_FN void bulk_load_keep(void* shared, const void* global, unsigned bytes, uint64_t* bar) {  // activations, caches
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(ptx::shared_address(shared)), "l"(global), "r"(bytes), "r"(ptx::shared_address(bar)) : "memory");
}
// Between this thread's ordinary accesses to shared memory and the copy engine's.
PTX_FN void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Tensor copies (TMA): a box of a matrix in global memory, described by a TensorMap (tensor_map.cuh), to `shared` (a multiple of 128
// bytes), row by row; (x, y) is the box' first element, x at a multiple of 16 bytes in its row, and what lies outside the matrix becomes 0.
// The kernel takes its map as `const __grid_constant__ TensorMap`.
PTX_FN void tensor_load(void* shared, const void* map, int x, int y, uint64_t* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(ptx::shared_address(shared)), "l"(map), "r"(x), "r"(y), "r"(ptx::shared_address(bar)) : "memory");
}

// ---- Products of a warpgroup (sm_90a): d [64, N] += a [64, 32 bytes] b [N, 32 bytes]^T, all 128 threads. Warp w has rows 16 w to 16 w +
// 15, and of each 8 columns what mma_bf16 has: d[4 j..4 j + 3]. The operands are in shared memory, rows along K, in the layout that a
// TensorMap with the same swizzle writes: groups of 8 rows, a row as many bytes as the swizzle is wide, the next group `group_bytes`
// further. To go along K within a row, add to `first`. Without a swizzle, a group is cells of 8 rows of 16 bytes each, the next cell along
// K `cell_bytes` further. With 64 columns a is in registers, a warp's 16 rows as mma_bf16 has them; of a sum's products the first says so,
// and d need hold nothing before it. The registers are read until the wait.
enum class Swizzle { kNone, k32, k64, k128 };
PTX_FN uint64_t wgmma_operand(const void* first, Swizzle swizzle, unsigned group_bytes, unsigned cell_bytes = 16) {
    const uint64_t code = swizzle == Swizzle::kNone ? 0 : 4 - static_cast<int>(swizzle);
    return code << 62 | static_cast<uint64_t>(group_bytes >> 4 & 0x3fff) << 32 |
           static_cast<uint64_t>(cell_bytes >> 4 & 0x3fff) << 16 | (ptx::shared_address(first) >> 4 & 0x3fff);
}
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DSV4_WARPGROUPS  // whoever has these functions, the emulator too
PTX_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }    // before the first, and after d was written
PTX_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> PTX_FN void wgmma_wait() {  // all but the last N groups
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
#define PTX_WGMMA_8(name, shape, immediates)                                                                                       \
    PTX_FN void name(float (&d)[4], uint64_t a, uint64_t b) {                                                                      \
        asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned." shape                                 \
                     " {%0,%1,%2,%3}, %4, %5, p, " immediates ";\n}"                                                               \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));                                           \
    }
#define PTX_WGMMA_32(name, shape, immediates)                                                                                      \
    PTX_FN void name(float (&d)[16], uint64_t a, uint64_t b) {                                                                     \
        asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned." shape                                 \
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, " immediates ";\n}"                   \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),   \
                       "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) : "l"(a), "l"(b)); \
    }
PTX_WGMMA_8(wgmma_bf16, "m64n8k16.f32.bf16.bf16", "1, 1, 0, 0")
PTX_WGMMA_8(wgmma_f16, "m64n8k16.f32.f16.f16", "1, 1, 0, 0")
PTX_WGMMA_8(wgmma_e4m3, "m64n8k32.f32.e4m3.e4m3", "1, 1")
PTX_WGMMA_32(wgmma_bf16, "m64n32k16.f32.bf16.bf16", "1, 1, 0, 0")
PTX_WGMMA_32(wgmma_f16, "m64n32k16.f32.f16.f16", "1, 1, 0, 0")
PTX_WGMMA_32(wgmma_e4m3, "m64n32k32.f32.e4m3.e4m3", "1, 1")
#undef PTX_WGMMA_8
#undef PTX_WGMMA_32
// The same with a's rows in registers: of its warp's 16 rows, what mma_bf16 has. The registers must stay as they are until the wait.
#define PTX_O4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PTX_O8(i) PTX_O4(i), PTX_O4(i + 4)
#define PTX_H0 "%0,%1,%2,%3"
#define PTX_H1 ",%8,%9,%10,%11"
#define PTX_S0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define PTX_S1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PTX_S2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define PTX_S3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define PTX_S4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define PTX_S5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define PTX_S6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define PTX_S7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define PTX_WGMMA_A(columns, sums, a0, a1, a2, a3, b0, ...)                                                                        \
    PTX_FN void wgmma_bf16(float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b) {                                         \
        asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #columns                         \
                     "k16.f32.bf16.bf16 {" sums "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b0 ", p, 1, 1, 0;\n}"              \
                     : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                         \
    }
PTX_WGMMA_A(8, PTX_H0, 4, 5, 6, 7, 8, PTX_O4(0))
PTX_WGMMA_A(16, PTX_S0, 8, 9, 10, 11, 12, PTX_O8(0))
PTX_WGMMA_A(24, PTX_S0 PTX_H1, 12, 13, 14, 15, 16, PTX_O8(0), PTX_O4(8))
PTX_WGMMA_A(32, PTX_S0 PTX_S1, 16, 17, 18, 19, 20, PTX_O8(0), PTX_O8(8))
PTX_WGMMA_A(48, PTX_S0 PTX_S1 PTX_S2, 24, 25, 26, 27, 28, PTX_O8(0), PTX_O8(8), PTX_O8(16))
PTX_WGMMA_A(64, PTX_S0 PTX_S1 PTX_S2 PTX_S3, 32, 33, 34, 35, 36, PTX_O8(0), PTX_O8(8), PTX_O8(16), PTX_O8(24))
PTX_WGMMA_A(80, PTX_S0 PTX_S1 PTX_S2 PTX_S3 PTX_S4, 40, 41, 42, 43, 44, PTX_O8(0), PTX_O8(8), PTX_O8(16), PTX_O8(24), PTX_O8(32))
PTX_WGMMA_A(96, PTX_S0 PTX_S1 PTX_S2 PTX_S3 PTX_S4 PTX_S5, 48, 49, 50, 51, 52,
            PTX_O8(0), PTX_O8(8), PTX_O8(16), PTX_O8(24), PTX_O8(32), PTX_O8(40))
PTX_WGMMA_A(128, PTX_S0 PTX_S1 PTX_S2 PTX_S3 PTX_S4 PTX_S5 PTX_S6 PTX_S7, 64, 65, 66, 67, 68,
            PTX_O8(0), PTX_O8(8), PTX_O8(16), PTX_O8(24), PTX_O8(32), PTX_O8(40), PTX_O8(48), PTX_O8(56))
#undef PTX_H0
#undef PTX_H1
#undef PTX_O8
#undef PTX_S0
#undef PTX_S1
#undef PTX_S2
#undef PTX_S3
#undef PTX_S4
#undef PTX_S5
#undef PTX_S6
#undef PTX_S7
#undef PTX_O4
#undef PTX_WGMMA_A
// The registers that each thread of this warpgroup may have from here on; what others give up (_less) is what these take (_more).
template <int N> PTX_FN void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> PTX_FN void registers_less() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
#define PTX_SUMS(c)                                                                                                   \
    c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7]),                                           \
    c(d[8]), c(d[9]), c(d[10]), c(d[11]), c(d[12]), c(d[13]), c(d[14]), c(d[15]),                                     \
    c(d[16]), c(d[17]), c(d[18]), c(d[19]), c(d[20]), c(d[21]), c(d[22]), c(d[23]),                                   \
    c(d[24]), c(d[25]), c(d[26]), c(d[27]), c(d[28]), c(d[29]), c(d[30]), c(d[31])
template <bool first> PTX_FN void wgmma_bf16(float (&d)[32], const uint32_t (&a)[4], uint64_t b);
#define PTX_WGMMA_64(first, c, sum)                                                                                                       \
    template <> PTX_FN void wgmma_bf16<first>(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {                                       \
        asm volatile("{\n.reg .pred p;\nsetp." sum ".u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "                 \
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"        \
                     "%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"                                                               \
                     : PTX_SUMS(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                 \
    }
PTX_WGMMA_64(true, "=f", "ne")
PTX_WGMMA_64(false, "+f", "eq")
#undef PTX_WGMMA_64
// The wait for all of them, which makes d; without it here the compiler might read d before.
PTX_FN void wgmma_wait(float (&d)[32]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : PTX_SUMS("+f") :: "memory"); }
#undef PTX_SUMS
// The fence that a's registers are made before.
template <int N> PTX_FN void wgmma_fence(uint32_t (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3]) :: "memory");
    wgmma_fence();
}
#endif

// ---- Products in tensor memory (sm_100a): 128 lanes of 512 columns of 32 bits a block; an address has the lane in its upper half. One
// thread starts a product or a copy; all that it has started since the last commit has ended when the commit's arrival has come to the
// mbarrier. The operands lie in shared memory as wgmma_operand describes it, with 128 rows of a, and N of b.
PTX_FN uint64_t tensor_operand(const void* first, Swizzle swizzle, unsigned group_bytes, unsigned cell_bytes = 16) {
    const uint64_t code = swizzle == Swizzle::kNone ? 0 : 8 - 2 * static_cast<int>(swizzle);
    return code << 61 | uint64_t(1) << 46 | static_cast<uint64_t>(group_bytes >> 4 & 0x3fff) << 32 |
           static_cast<uint64_t>(cell_bytes >> 4 & 0x3fff) << 16 | (ptx::shared_address(first) >> 4 & 0x3fff);
}
// b the other way round: rows of shared memory are along K and hold N values each, in strips of 64 (128 bytes, swizzled); the next 64 of N
// are `strip_bytes` further, the next 8 of K `group_bytes`. The same memory is a matrix of 64 columns for tensor_operand.
PTX_FN uint64_t tensor_operand_across(const void* first, unsigned group_bytes, unsigned strip_bytes) {
    return tensor_operand(first, Swizzle::k128, group_bytes, strip_bytes);
}
// The instruction descriptors of d [128, columns] in fp32.
constexpr uint32_t kTensorBf16 = 8u << 24 | 1u << 10 | 1u << 7 | 1u << 4, kTensorE4m3 = 8u << 24 | 1u << 4,
                   kTensorNvfp4 = 8u << 24 | 1u << 10 | 1u << 7, kTensorMxfp4 = kTensorNvfp4 | 1u << 23;
constexpr uint32_t kTensorUpperScales = 2u << 29 | 2u << 4;  // of tensor_mma_mxfp4, to be added
constexpr uint32_t kTensorAcross = 1u << 16;                 // of tensor_mma_bf16, to be added: b as tensor_operand_across has it
__host__ __device__ constexpr uint32_t tensor_shape(uint32_t kind, unsigned columns) { return kind | columns / 8 << 17; }

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
// A whole warp: `columns` (32, 64, ... 512) of all lanes; their address goes to shared memory. No more after tensor_relinquish; all are
// freed in the end.
PTX_FN void tensor_alloc(uint32_t* shared, unsigned columns) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(ptx::shared_address(shared)), "r"(columns)
                 : "memory");
}
PTX_FN void tensor_relinquish() { asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory"); }
PTX_FN void tensor_free(uint32_t address, unsigned columns) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(address), "r"(columns) : "memory");
}
// d = a b^T, or d += with `add`; rows of 32 bytes of a and b.
#define PTX_TENSOR_MMA(name, kind)                                                                                              \
    PTX_FN void name(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, bool add) {                                            \
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\ntcgen05.mma.cta_group::1.kind::" kind " [%0], %1, %2, %3, p;\n}" \
                     :: "r"(d), "l"(a), "l"(b), "r"(shape), "r"(static_cast<uint32_t>(add)) : "memory");                        \
    }
PTX_TENSOR_MMA(tensor_mma_bf16, "f16")
PTX_TENSOR_MMA(tensor_mma_e4m3, "f8f6f4")
#undef PTX_TENSOR_MMA
// 64 e2m1 values of a row, and four e4m3 scales: those of row r in lane r % 32 of column r / 32 of `a_scales` (of `b_scales`).
PTX_FN void tensor_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, uint32_t a_scales, uint32_t b_scales, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %6, 0;\ntcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], "
        "[%5], p;\n}" ::"r"(d),
        "l"(a), "l"(b), "r"(shape), "r"(a_scales), "r"(b_scales), "r"(static_cast<uint32_t>(add))
        : "memory");
}
// 64 e2m1 values of a row, and two ue8m0 scales, each of 32 values: bytes 0 and 1 of the cells where tensor_mma_nvfp4 has its four, or with
// kTensorUpperScales bytes 2 and 3.
PTX_FN void tensor_mma_mxfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, uint32_t a_scales, uint32_t b_scales, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %6, 0;\ntcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], "
        "p;\n}" ::"r"(d),
        "l"(a), "l"(b), "r"(shape), "r"(a_scales), "r"(b_scales), "r"(static_cast<uint32_t>(add))
        : "memory");
}
// 32 rows of 16 bytes to 4 columns, the same for each 32 lanes.
PTX_FN void tensor_copy_scales(uint32_t to, uint64_t from) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" :: "r"(to), "l"(from) : "memory");
}
PTX_FN void tensor_commit(uint64_t* bar) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(ptx::shared_address(bar)) : "memory");
}
// A warp's lanes and eight columns: warp w of a warpgroup has lanes 32 w to 32 w + 31. The registers may be used after the wait.
PTX_FN void tensor_load_8(uint32_t (&r)[8], uint32_t from) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]) : "r"(from) : "memory");
}
PTX_FN void tensor_store_8(uint32_t to, const uint32_t (&r)[8]) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1,%2,%3,%4,%5,%6,%7,%8};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7])
                 : "memory");
}
PTX_FN void tensor_wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
template <int N> PTX_FN void tensor_wait_load(uint32_t (&r)[N][8]) {  // and no arithmetic on r is moved before it
    tensor_wait_load();
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) asm volatile("" : "+r"(r[i][j]));
}
PTX_FN void tensor_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
// Before a barrier that hands tensor memory on to other threads, and after it.
PTX_FN void tensor_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
PTX_FN void tensor_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
// a b + c of two floats at once, each rounded once (from sm_100 on).
PTX_FN float2 fma_f32x2(float2 a, float2 b, float2 c) {
    float2 d;
    asm("{\n.reg .b64 a, b, c, d;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\nmov.b64 c, {%6, %7};\nfma.rn.f32x2 d, a, b, c;\n"
        "mov.b64 {%0, %1}, d;\n}" : "=f"(d.x), "=f"(d.y) : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y), "f"(c.x), "f"(c.y));
    return d;
}
#endif

// ---- 16 bytes of weights, read once: not kept in L1, the first to leave L2. Volatile: it stays before grid_dependency_wait().
PTX_FN uint4 load_stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(ptx::read_once()));
    return v;
}

// ---- Named barriers 0 to 15 (0 is __syncthreads') of `threads` threads, a multiple of 32; bar_arrive does not wait.
PTX_FN void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
PTX_FN void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory"); }

// ---- Programmatic dependent launch. wait: until the kernels before this one have ended and their writes are visible. launch: the next
// kernel may start, up to its own wait, when every block has called this or ended.
PTX_FN void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
PTX_FN void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// What a kernel before the one just before this one wrote, or a WEIGHT. It may be read before grid_dependency_wait() if the kernel just
// before calls grid_dependency_launch() behind its own wait: then all before that one had ended when this one began. Past L1.
PTX_FN int load_earlier(const int* p) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// The address p of global memory is worked out here: the compiler would do so where it is first used, behind the wait.
template <class T> PTX_FN void worked_out(T*& p) {
    size_t address = __cvta_generic_to_global(p);
    asm volatile("" : "+l"(address));
    p = static_cast<T*>(__cvta_global_to_generic(address));
}

// ---- atomicInc with a fence before and behind it, for the whole GPU: whoever comes to the counter later sees what this thread wrote, and
// what its block wrote in front of a barrier before. As one instruction it waits once for these writes; two __threadfence() would be two
// fences of the strongest kind.
PTX_FN unsigned atomic_inc_fenced(unsigned* counter, unsigned most) {  // counts up to `most` and then from 0; returns the old value
    unsigned old;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(most) : "memory");
    return old;
}

// ---- Memory that another GPU or the host writes or reads meanwhile: each 8 bytes (4 of store_system) go and come whole, past L1, and are
// ordered with nothing else. p of the pairs: a multiple of 16.
PTX_FN void store_pair_system(uint64_t* p, uint64_t a, uint64_t b) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
PTX_FN void load_pair_system(const uint64_t* p, uint64_t& a, uint64_t& b) {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
PTX_FN void store_system(int* p, int x) { asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
// A clock of the whole machine, in steps of up to a microsecond or so.
PTX_FN uint64_t global_nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory");
    return t;
}

// ---- Clusters (LAUNCH_CLUSTER): blocks of one cluster see each other's shared memory.
PTX_FN unsigned cluster_rank() { unsigned r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
PTX_FN unsigned cluster_size() { unsigned r; asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
PTX_FN void cluster_sync() {  // all threads of the cluster; orders their accesses
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <class T> PTX_FN T* cluster_map(T* shared, unsigned rank) {  // the same place in block `rank`'s shared memory
    uint64_t mapped;
    asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(shared), "r"(rank));
    return reinterpret_cast<T*>(mapped);
}

// ---- Conversions and packed arithmetic; all round to nearest even and keep subnormal numbers. A pair's first value is in the low half.
PTX_FN uint32_t pack_bf16(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
PTX_FN uint32_t pack_f16(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
PTX_FN float bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }
PTX_FN float bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
PTX_FN uint32_t mul_bf16x2(uint32_t a, uint32_t b) { uint32_t r; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
PTX_FN uint32_t mul_f16x2(uint32_t a, uint32_t b) { uint32_t r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
PTX_FN uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
PTX_FN uint32_t max_magnitudes_bf16x2(uint32_t a, uint32_t b) {  // NaN if either is NaN; the sign bits are of no meaning
    uint32_t r;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
PTX_FN uint8_t to_e4m3(float x) {  // beyond the largest: +-448; NaN stays NaN
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(x));
    return static_cast<uint8_t>(r);
}
PTX_FN uint32_t e4m3x2_to_f16x2(uint16_t pair) { uint32_t r; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair)); return r; }
PTX_FN float from_e4m3(uint8_t x) { return __half2float(__ushort_as_half(static_cast<unsigned short>(e4m3x2_to_f16x2(x)))); }
// x, of which the compiler knows no more than that it is in a register: it is computed here and not where it is used.
template <class T> PTX_FN T* opaque(T* global) {
    asm("" : "+l"(global));
    __builtin_assume(__isGlobal(global));
    return global;
}
// x, of which the compiler knows nothing: what is worked out from it is worked out here, and not before a loop around it, to be kept.
PTX_FN int made_here(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
// The larger one and the smaller one, NaN if either is NaN (fmaxf and fminf give the other).
PTX_FN float max_nan(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
PTX_FN float min_nan(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
// 1 / x within 1 unit in the last place, one instruction; subnormal numbers count as zero.
PTX_FN float reciprocal(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
// Byte i of the result is byte (selector >> 4 i) & 7 of b:a (a has bytes 0 to 3).
PTX_FN uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
// One instruction each, also where the compiler would take two as it knows which bits will be used: a where `mask` is 1, else b; x turned.
PTX_FN uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
    return r;
}
PTX_FN uint32_t rotate_left(uint32_t x, unsigned bits) {
    uint32_t r;
    asm("shf.l.wrap.b32 %0, %1, %1, %2;" : "=r"(r) : "r"(x), "r"(bits));
    return r;
}
#undef PTX_FN
#endif
