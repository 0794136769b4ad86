// The weight stream: what every kernel shares that multiplies packed weights by a few tokens (linear.cu, the experts).
//
// A matrix [rows, columns] is packed (dsv4/kernels/packing.py) into tiles of 16 rows, a tile into items of 16 rows x 256 bytes of codes:
// 128 columns of bf16, 256 of FP8, 512 of FP4, the item's scales behind the codes. Item i of tile t lies at (t * items + i) * item_bytes.
// A warp reads an item in eight loads of 512 consecutive bytes, 16 a lane, and feeds them to mma.m16n8k16 as its 16-row operand A. The
// tokens are the 8 columns of operand B: an item's column order is such that a lane's part of B is 8 consecutive columns of x, one 16-byte
// load of x as the previous kernel wrote it. Below, g = lane / 4 and q = lane % 4; a lane has parts of rows g and g + 8.
//
// Every weight is expanded to bf16 without rounding, products are summed in fp32:
//   kBf16    as stored.
//   kFp8     e4m3: sign, exponent and mantissa shifted into a bf16's places are the value * 2^-120; one multiplication by 2^120. The block
//            scales (fp32, one for 8 rows x 128 columns) multiply the sums of their 128 columns, which stay finite for x up to 5e33.
//   kNvfp4   e2m1 shifted into place is the value * 2^-126; one multiplication by scale * 2^106 gives value * scale * 2^-20, of at most 6
//            significant bits. The caller multiplies the sum by `factor` of packing.py, 2^20 * global scale.
//   kMxfp4   the same with a power of two for 32 columns; factor is 1 unless a scale is above 2.
// Words of codes are re-coded by packing.py, which inverts expand_e2m1 and expand_e4m3: 8 operations for 8 e2m1, 4 for 4 e4m3.
//
// A block is 8 warps; two blocks fit an SM. A block's work is a sequence of items in memory's order, and warp w has items w, w + 8, w +
// 16, .. of it: what the block reads at a time lies together (with a contiguous part a warp, an H200 took up to 15 % longer). A warp
// streams its items through a ring of its own in shared memory (bulk copies, an mbarrier a slot, no barrier with other warps). Of each tile
// that it has items of it leaves the 16 rows x tokens as a "piece" in shared memory; after a __syncthreads the pieces of a tile are added
// in the order of the warps. So the result depends on shapes and partition alone, never on time. Where a block's tiles are more than there
// is memory for pieces, they are added in rounds; for one token there is one round, and no warp waits for another before the end.
//
// A kernel (linear.cu is the model) has:
//   struct Stretch                  a warp's items that follow each other in memory, kWarps apart: at least `const char* items; int count,
//                                   format;`, and what the kernel needs to find x and to know the tile
//   struct Walk { next(Stretch&) }  one warp's stretches in order; false for ever after the last. Copyable: one copy runs ahead to issue
//                                   the copies, so it may read only what no earlier kernel writes (or knows that the wait is over)
//   Layout                          the block's shared memory, the same on host and device
//   Source                          what the items are to the products: Stream::multiply()
//   Stream<Walk, Stretch>           begin(), then multiply() for all items, in the walk's order
//   Sum                             the products of items with x, for one tile
//   Layout::keep(), piece_sum()     a warp's piece; after __syncthreads, the sum of a tile's
#pragma once
#include "common.cuh"
#include "ptx.cuh"

enum Format { kBf16 = 0, kFp8 = 1, kNvfp4 = 2, kMxfp4 = 3 };

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRows = 16;      // of a tile
constexpr int kCodes = 4096;   // bytes of codes of an item, before its scales
constexpr int kMaxTokens = 8;  // columns of the product's operand B
constexpr int kSharedBytes = 113 * 1024;  // of a block at most, if two are to fit an SM: 228 KB, of which CUDA takes 1 KB a block

__host__ __device__ constexpr int item_columns(int format) { return format == kBf16 ? 128 : format == kFp8 ? 256 : 512; }
__host__ __device__ constexpr int item_bytes(int format) {
    return kCodes + (format == kFp8 ? 16 : format == kNvfp4 ? 512 : format == kMxfp4 ? 256 : 0);
}

// The columns of x that neighbouring lanes' parts are apart.
__host__ __device__ constexpr int lane_columns(int format) { return format == kBf16 ? 8 : 16; }

// ---------------------------------------------------------------------------------------------------------------- expansion

// A re-coded word -> its 8 e2m1 as bf16 pairs (columns 0 1, 2 3, 4 5, 6 7), each value * 2^-126: sign at bit 15, the rest at 8:6.
__device__ __forceinline__ void expand_e2m1(uint32_t w, uint32_t (&pair)[4]) {
    constexpr uint32_t kMask = 0x81C081C0u;
    pair[0] = (w << 2) & kMask;
    pair[1] = (w << 6) & kMask;
    pair[2] = (w ^ (w >> 8)) & kMask;
    pair[3] = (w << 12 | w >> 20) & kMask;
}

// A re-coded word -> its 4 e4m3 as bf16 pairs (columns 0 1, 2 3), each value * 2^-120: sign at bit 15, the rest at 10:4.
__device__ __forceinline__ void expand_e4m3(uint32_t w, uint32_t (&pair)[2]) {
    constexpr uint32_t kMask = 0x87F087F0u;
    pair[0] = (w << 4) & kMask;
    pair[1] = (w ^ (w >> 4)) & kMask;
}

// Byte i as two equal bf16. NVFP4: five bits of exponent and three of mantissa, the value scale * 2^106; MXFP4: all eight are exponent.
template <int kFormat> __device__ __forceinline__ uint32_t scale_pair(uint32_t four, int i) {
    const uint32_t twice = byte_perm(four, 0, 0x4040 | i | i << 8);
    return kFormat == kNvfp4 ? twice * 16 + 0x70007000u : twice * 128;
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ uint4 load_16(const void* p) {
    emu::check_aligned(p, 16);
    return *static_cast<const uint4*>(p);
}

// ------------------------------------------------------------------------------------------------------------------- products

// A lane's part of x for one item: vectors of 8 consecutive columns, of FP4 4 of the 16 at a time. Where one was used up, the next one is
// loaded. kAhead: behind an item's last vectors those of the next item too. x comes from L2 where L1 cannot hold it (16,384 columns; w2's,
// of which each expert has its own), and waiting for it took a third of a warp's time. w1 and w3 do without: theirs
// is one x that L1 holds, and it cost 0.5 to 1 us more than it brought (docs/measurements.md).
template <int kFormat, bool kWhole, bool kAhead> struct Operand {
    static constexpr int kHeld = kFormat == kFp8 ? 8 : 4;
    const __nv_bfloat16 *x, *next;  // of this item and the next one: this lane's token, at the lane's first column; 16-byte aligned
    int left, next_left;  // how many columns there are from there on, a multiple of 8; unless kWhole none beyond is read
    uint4 held[kHeld];

    static __device__ __forceinline__ constexpr int column(int n) {
        return kFormat == kBf16 ? 32 * n : kFormat == kFp8 ? n / 2 * 64 + n % 2 * 8 : n / 4 * 128 + n / 2 % 2 * 64 + n % 2 * 8;
    }
    __device__ __forceinline__ uint4 load(int n) const {
        return kWhole || column(n) < left ? load_16(x + column(n)) : uint4{0, 0, 0, 0};
    }
    // To the next item; with its first vectors.
    __device__ __forceinline__ void go_on() { x = next, left = next_left; }
    __device__ __forceinline__ void begin() {
        go_on();
#pragma unroll
        for (int n = 0; n < kHeld; n++) held[n] = load(n);
    }
};

// The sums of one tile's 16 rows with the 8 columns of operand B, spread over a warp: lane (g, q) has rows g (0, 1) and g + 8 (2, 3) of
// tokens 2q (0, 2) and 2q + 1 (1, 3). Two sets, added at the end, so that two products are on the way at a time.
struct Sum {
    float even[4] = {}, odd[4] = {};

    __device__ __forceinline__ float total(int i) const { return even[i] + odd[i]; }

    // Adds one item in shared memory, of which `mine` is the lane's first 16 bytes.
    template <int kUnroll, int kFormat, bool kWhole, bool kAhead>
    __device__ __forceinline__ void add(const char* mine, Operand<kFormat, kWhole, kAhead>& x) {
        if constexpr (kFormat == kBf16) add_bf16<kAhead>(mine, x);
        else if constexpr (kFormat == kFp8) add_fp8<kAhead>(mine, x);
        else add_fp4<kUnroll, kAhead, kFormat>(mine, x);
    }

private:
    // A lane's 16 bytes are one operand A: two columns of row g, of row g + 8, the next two of g, of g + 8. Two such are 8 columns.
    template <bool kAhead, class X> __device__ __forceinline__ void add_bf16(const char* mine, X& x) {
        if (kAhead) x.go_on();
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const uint4 a = load_16(mine + 1024 * u), next = load_16(mine + 1024 * u + 512);
            const uint4& b = x.held[u];
            mma_bf16(even, {a.x, a.y, a.z, a.w}, {b.x, b.y});
            mma_bf16(odd, {next.x, next.y, next.z, next.w}, {b.z, b.w});
            if (kAhead) x.held[u] = x.load(u);
        }
    }

    // 16 bytes of row g, then of row g + 8, are 16 columns in four words. The scales are those of rows 0 to 7 and 8 to 15, for the first
    // 128 columns and for the others.
    template <bool kAhead, class X> __device__ __forceinline__ void add_fp8(const char* mine, X& x) {
        const uint4 bits = load_16(mine + kCodes - 16 * (threadIdx.x % 32));
        if (kAhead) x.go_on();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float part[4] = {};
#pragma unroll
            for (int u = 2 * half; u < 2 * half + 2; u++) {
                const uint4 low = load_16(mine + 1024 * u), high = load_16(mine + 1024 * u + 512);
#pragma unroll
                for (int p = 0; p < 4; p += 2) {
                    const uint4& b = x.held[2 * u + p / 2];
                    mma_fp8(part, word(low, p), word(high, p), b.x, b.y);
                    mma_fp8(part, word(low, p + 1), word(high, p + 1), b.z, b.w);
                    if (kAhead) x.held[2 * u + p / 2] = x.load(2 * u + p / 2);
                }
            }
            const float low_scale = __uint_as_float(word(bits, 2 * half)), high_scale = __uint_as_float(word(bits, 2 * half + 1));
#pragma unroll
            for (int i = 0; i < 4; i++) even[i] = __fmaf_rn(i < 2 ? low_scale : high_scale, part[i], even[i]);
        }
    }

    // A lane has 16 consecutive columns, one group of NVFP4, in two words, twice in its 16 bytes. Its scales are 16 bytes: for
    // each 64 columns those of rows g and g + 8. MXFP4: lanes 2i and 2i + 1 share the group of 32 and these bytes.
    template <int kUnroll, bool kAhead, int kFormat, class X> __device__ __forceinline__ void add_fp4(const char* mine, X& x) {
        const int lane = threadIdx.x % 32;
        const uint32_t* scales = reinterpret_cast<const uint32_t*>(mine + kCodes - (kFormat == kNvfp4 ? 0 : 16 * (lane - lane / 2)));
#pragma unroll kUnroll
        for (int u = 0; u < 4; u++, mine += 1024) {
            const uint4 low = load_16(mine), high = load_16(mine + 512);
            const uint32_t four = scales[u];
            if (u < 3) x.x += 128, x.left -= 128;
            else if (kAhead) x.go_on();
#pragma unroll
            for (int v = 0; v < 2; v++) {
                const uint32_t low_scale = scale_pair<kFormat>(four, 2 * v), high_scale = scale_pair<kFormat>(four, 2 * v + 1);
#pragma unroll
                for (int p = 2 * v; p < 2 * v + 2; p++) {
                    const uint4& b = x.held[p];
                    uint32_t l[4], h[4];
                    expand_e2m1(word(low, p), l);
                    expand_e2m1(word(high, p), h);
#pragma unroll
                    for (int i = 0; i < 4; i++) l[i] = mul_bf16x2(l[i], low_scale), h[i] = mul_bf16x2(h[i], high_scale);
                    mma_bf16(even, {l[0], h[0], l[1], h[1]}, {b.x, b.y});
                    mma_bf16(odd, {l[2], h[2], l[3], h[3]}, {b.z, b.w});
                    if (kAhead || u < 3) x.held[p] = x.load(p);
                }
            }
        }
    }

    // Four columns of row g and of row g + 8, one word each.
    static __device__ __forceinline__ void mma_fp8(float (&sum)[4], uint32_t low, uint32_t high, uint32_t b0, uint32_t b1) {
        constexpr uint32_t k2to120 = 0x7B807B80u;  // as two bf16
        uint32_t l[2], h[2];
        expand_e4m3(low, l);
        expand_e4m3(high, h);
#pragma unroll
        for (int i = 0; i < 2; i++) l[i] = mul_bf16x2(l[i], k2to120), h[i] = mul_bf16x2(h[i], k2to120);
        mma_bf16(sum, {l[0], h[0], l[1], h[1]}, {b0, b1});
    }
};

// ---------------------------------------------------------------------------------------------------------------------- shared memory

// A block's shared memory: a ring of `depth` slots and up to `pieces` pieces for each warp, and the rings' barriers.
struct Layout {
    int depth, slot_bytes, pieces, tokens;

    __host__ __device__ int piece_floats() const { return kRows * tokens; }
    __host__ __device__ int piece_offset() const { return kWarps * depth * slot_bytes; }
    __host__ __device__ int barrier_offset() const { return piece_offset() + kWarps * pieces * piece_floats() * 4; }
    __host__ __device__ int bytes() const { return barrier_offset() + kWarps * depth * 8; }

    __device__ __forceinline__ float* piece(char* memory, int warp, int index) const {
        return reinterpret_cast<float*>(memory + piece_offset()) + (warp * pieces + index) * piece_floats();
    }

    // The warp's piece of the round's tile number `index`: element [token][row].
    __device__ __forceinline__ void keep(char* memory, int index, const Sum& sum) const {
        const int lane = threadIdx.x % 32, row = lane / 4, token = 2 * (lane % 4);
        float* to = piece(memory, threadIdx.x / 32, index) + token * kRows + row;
        if (token < tokens) to[0] = sum.total(0), to[8] = sum.total(2);
        if (token + 1 < tokens) to[kRows] = sum.total(1), to[kRows + 8] = sum.total(3);
    }

    // N elements of a tile from `element`, a multiple of N, on (token * kRows + row): the sums of the pieces of the warps that had one of
    // its items, which are `first` .. `end` - 1 in the sequence that was dealt; in the order of the warps, after a barrier of the block.
    template <int N>
    __device__ __forceinline__ void piece_sum(float (&total)[N], char* memory, int index, int element, int first, int end) const {
#pragma unroll
        for (int j = 0; j < N; j++) total[j] = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) {
            if (((warp - first) & (kWarps - 1)) >= end - first) continue;
            float some[N];
            load(some, piece(memory, warp, index) + element);
#pragma unroll
            for (int j = 0; j < N; j++) total[j] += some[j];
        }
    }
    __device__ __forceinline__ float piece_sum(char* memory, int index, int element, int first, int end) const {
        float total[1];
        piece_sum(total, memory, index, element, first, end);
        return total[0];
    }
};

// ------------------------------------------------------------------------------------------------------------------------------ stream

// The number of this thread's warp, which the compiler then knows to be the same in all of its lanes.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, int(threadIdx.x) / 32, 0); }

// One warp's items on their way through its ring. The warp that has read a slot refills it itself, so a slot needs no second barrier.
// What changes from item to item is pointers that are moved on.
//
template <class Walk, class Stretch, int kDepth = 0> class Stream {
public:
    // Shared memory as of `layout`, whose barriers this warp sets up.
    __device__ __forceinline__ Stream(const Layout& layout, char* memory) : layout_depth_(layout.depth), slot_bytes_(layout.slot_bytes) {
        const int warp = warp_index();
        slot_ = memory + warp * depth() * slot_bytes_;
        full_ = reinterpret_cast<uint64_t*>(memory + layout.barrier_offset()) + warp * depth();
        if (threadIdx.x % 32 == 0) {
#pragma unroll 1
            for (int i = 0; i < depth(); i++) mbarrier_init(full_ + i, 1);
            mbarrier_fence_init();
        }
        __syncwarp();
    }

    // Issues the copies of the walk's first items.
    __device__ __forceinline__ void begin(const Walk& walk) {
        ahead_ = walk;
        resume();
    }

    // Fills the slots that begin() found no item for: a walk may end, for a time, before grid_dependency_wait(). Before the first
    // multiply().
    __device__ __forceinline__ void resume() {
#pragma unroll 1
        for (; filled_ < depth() && (left_ || refill()); filled_++) issue(slot_ + filled_ * slot_bytes_, full_ + filled_);
    }

    // The products of the next items with x, all of one format. Source tells what the items are: more(), whether there is another one;
    // x(.., column), this lane's token from the item's first column on, which is number `column` of columns(); next(), to the warp's next
    // item, returns whether the sum of the one before is complete, which then goes to done(sum). whole: no item reaches beyond the columns'
    // end.
    // kUnroll: how many quarters of an FP4 item follow each other in the code. 1 is the fastest (0.6 of the 12.6 us that w2 of six experts
    // of Flash takes), but in linear.cu one register too many. kAhead: see Operand.
    template <int kUnroll, bool kAhead, class Source> __device__ __forceinline__ void multiply(int format, bool whole, Source& source) {
        if (format == kBf16) whole ? run<kUnroll, kAhead, kBf16, true>(source) : run<kUnroll, kAhead, kBf16, false>(source);
        else if (format == kFp8) whole ? run<kUnroll, kAhead, kFp8, true>(source) : run<kUnroll, kAhead, kFp8, false>(source);
        else if (format == kNvfp4) whole ? run<kUnroll, kAhead, kNvfp4, true>(source) : run<kUnroll, kAhead, kNvfp4, false>(source);
        else whole ? run<kUnroll, kAhead, kMxfp4, true>(source) : run<kUnroll, kAhead, kMxfp4, false>(source);
    }

private:
    template <int kUnroll, bool kAhead, int kFormat, bool kWhole, class Source> __device__ __forceinline__ void run(Source& source) {
        const int lane = threadIdx.x % 32, skip = lane_columns(kFormat) * (lane % 4);
        bool more = source.more(), complete = false;
        if (!more) return;
        Sum sum;
        Operand<kFormat, kWhole, kAhead> operand;
        const auto find_x = [&] {
            int column;
            operand.next = source.x(item_columns(kFormat), column) + skip, operand.next_left = source.columns() - column - skip;
        };
        const auto go_on = [&] {
            complete = source.next(), more = source.more();
            if (more) find_x();  // behind the last item the same again
        };
        find_x();
        operand.begin();
#pragma unroll 1
        while (more) {
            if (kAhead) go_on();
            mbarrier_wait(full_, parity_);
            sum.template add<kUnroll>(slot_ + 16 * lane, operand);
            __syncwarp();
            if (left_ || refill()) issue(slot_, full_);
            slot_ += slot_bytes_, full_++;
            if (++index_ == depth()) index_ = 0, parity_ ^= 1, slot_ -= depth() * slot_bytes_, full_ -= depth();
            if (!kAhead) go_on();
            if (complete) source.done(sum), sum = Sum();
            if (!kAhead && more) operand.begin();
        }
    }

    // The next stretch to be issued; whether there is one.
    __device__ __forceinline__ bool refill() {
        Stretch stretch;
        if (!ahead_.next(stretch)) return false;
        next_ = stretch.items, left_ = stretch.count, bytes_ = stretch.bytes;
        return true;
    }

    // Copies the next item to a slot.
    __device__ __forceinline__ void issue(char* slot, uint64_t* full) {
        if (threadIdx.x % 32 == 0) {
            mbarrier_expect(full, bytes_);
            bulk_load(slot, next_, bytes_, full);
        }
        next_ += kWarps * bytes_, left_--;
    }

    __device__ __forceinline__ int depth() const { return kDepth ? kDepth : layout_depth_; }

    int layout_depth_, slot_bytes_;
    char* slot_;      // whose turn it is
    uint64_t* full_;  // its barrier
    int index_ = 0, parity_ = 0, filled_ = 0;
    Walk ahead_;
    const char* next_ = nullptr;
    int left_ = 0, bytes_ = 0;  // left_: items of the stretch that is being issued
};
