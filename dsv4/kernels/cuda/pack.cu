// pack: a weight, or the two of a pair, as a checkpoint stores it -> the layout that stream.cuh reads (dsv4/kernels/packing.py, whose torch
// code is the definition, byte by byte).
//
// A block makes an item, a thread 16 bytes of its codes. What a warp reads of a row are 32 bytes, whole sectors; it writes 512 bytes at
// once. Read once, written once: an expert of Flash is 13.4 MB, 27 MB of traffic, for which 10 us were predicted; an H200 takes 17, in two
// launches (docs/measurements.md), beside 250 us for its way there. So 8 bytes a load are enough, and addresses need only be multiples of
// 4: payloads are slices of what was read.
//
// The words are re-coded by shifts: expand_e2m1 and expand_e4m3 are linear over GF(2), and so is their inverse. What is wrong with a
// weight, and what factor MXFP4 gets, stands in its record of `found` (zeros before), at which the host looks once for many weights. MXFP4
// takes a launch more, whose extremes decide how exponents are stored.
#include "stream.cuh"

enum Word { kWrong, kLow, kHigh, kLiveLow, kLiveHigh, kRecord = 8 };  // of a record; extremes as 256 - low and high + 1, 0 if there is none
enum Wrong { kCodeIsNaN = 1, kScaleIsNaN = 2 };  // FP8's scales: infinite too
constexpr int kNatural = -126, kHighest = 254;  // MXFP4: the offset at which stored exponents are the true ones; the highest stored
constexpr int kMaxBlocks = 1024;                // of the launch that looks for extremes

struct Weights {
    const uint8_t *first_codes, *second_codes, *first_scales, *second_scales;  // of both, or one alone
    int* found;  // the record of the first
    int rows, columns, row_bytes, pair;
    int unit;  // what the codes' addresses are multiples of: 8, 4 or 1
    int block_rows, block_columns, row_offset, scale_rows, scale_columns, floats;  // FP8

    // Not arrays, whose elements by number would take a copy of all in local memory.
    __device__ __forceinline__ const uint8_t* codes(int which) const { return which ? second_codes : first_codes; }
    __device__ __forceinline__ const uint8_t* scales(int which) const { return which ? second_scales : first_scales; }
};

// 8 bytes of a row from `at` on, which is a multiple of 8; zeros from `end` on.
__device__ __forceinline__ uint2 load_8(const uint8_t* row, int at, int end, int unit) {
    uint32_t words[2] = {};
    if (at >= end) return {0, 0};
    if (unit == 8) return *reinterpret_cast<const uint2*>(row + at);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int from = at + 4 * i;
        if (unit == 4) {
            if (from < end) words[i] = *reinterpret_cast<const uint32_t*>(row + from);
            continue;
        }
#pragma unroll
        for (int b = 0; b < 4; b++)
            if (from + b < end) words[i] |= uint32_t(row[from + b]) << 8 * b;
    }
    return {words[0], words[1]};
}

// The word that expand_e2m1 expands to these 8 codes.
__device__ __forceinline__ uint32_t e2m1_word(uint32_t c) {
    uint32_t w = (c & 0x7u) << 4 | (c & 0x8u) << 10 | (c & 0x70u) << 16 | (c & 0x80u) << 22 | (c >> 8 & 0x7u) | (c >> 2 & 0x200u) |
                 (c & 0x7000u) << 4 | (c & 0x8000u) << 10 | (c & 0x07000000u) << 2 | (c >> 24 & 0x8u) | (c >> 18 & 0x1C00u) |
                 (c >> 12 & 0x80000u);
    w |= (c & 0x00800000u) << 8 | (c & 0x00400000u) << 2;                                         // bits 31, 24
    w |= (c << 2 & 0x00800000u) ^ (w >> 8 & 0x00800000u);                                         // 23
    w |= (c << 10 & 0x40000000u) ^ (w << 8 & 0x40000000u);                                        // 30
    w |= (c >> 4 & 0x8000u) ^ (w >> 8 & 0x8000u);                                                 // 15
    w |= (c >> 10 & 0x80u) ^ (w >> 8 & 0x80u);                                                    // 7
    return w | ((c >> 10 & 0x100u) ^ (w >> 8 & 0x100u)) | ((c >> 2 & 0x4000u) ^ (w << 8 & 0x4000u));  // 8, 14
}

// The word that expand_e4m3 expands to these 4 codes.
__device__ __forceinline__ uint32_t e4m3_word(uint32_t c) {
    uint32_t w = (c & 0x7Fu) | (c & 0x80u) << 4 | (c & 0x7F00u) << 8 | (c & 0x8000u) << 12 | (c & 0x80000000u);
    w |= (c & 0x07000000u) ^ (w << 4 & 0x07000000u);                                              // bits 24 to 26
    w |= (c >> 4 & 0x00800000u) ^ (w >> 4 & 0x00800000u);                                         // 23
    w |= (c & 0x70000000u) ^ (w << 4 & 0x70000000u);                                              // 28 to 30
    w |= (c >> 8 & 0x700u) ^ (w << 4 & 0x700u);                                                   // 8 to 10
    w |= (c >> 12 & 0x80u) ^ (w >> 4 & 0x80u);                                                    // 7
    w |= (c >> 8 & 0x7000u) ^ (w << 4 & 0x7000u);                                                 // 12 to 14
    return w | ((c >> 8 & 0x8000u) ^ (w >> 4 & 0x8000u));                                         // 15
}

// An e4m3 scale as five bits of exponent + 9 and three of mantissa, normalised; without its sign.
__device__ __forceinline__ uint32_t nvfp4_scale(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15, mantissa = byte & 7;
    if (exponent) return (exponent + 2) << 3 | mantissa;
    const int top = mantissa > 3 ? 2 : mantissa > 1 ? 1 : 0;
    return mantissa ? top << 3 | (mantissa << (3 - top) & 7) : 0;
}

struct Exponents {
    int offset;
    bool live_only;  // groups of zeros have the code 0
};

__device__ __forceinline__ Exponents exponents(const int* record) {
    const int low = 256 - record[kLow], high = record[kHigh] - 1, highest = record[kLiveHigh] ? record[kLiveHigh] - 1 : 0;
    if (low >= 2 && high <= 128) return {kNatural, false};
    return {max(kNatural, highest - kHighest), true};
}

template <int kFormat> __global__ void __launch_bounds__(kThreads) pack_kernel(Weights weights, uint8_t* out, int items) {
    DYN_SMEM(uint8_t, scales);
    grid_dependency_launch();
    grid_dependency_wait();
    const int tile = blockIdx.x / items, item = blockIdx.x % items, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int u = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
    uint8_t* to = out + int64_t(blockIdx.x) * item_bytes(kFormat);

    // The row g of half h of the tile, and how many of its bytes there are.
    const auto row_of = [&](int h) { return weights.pair ? tile * 8 + g : tile * 16 + 8 * h + g; };
    const auto codes = [&](int h, int at) {
        const int row = row_of(h);
        const uint8_t* from = weights.codes(weights.pair ? h : 0) + int64_t(row) * weights.row_bytes;
        return load_8(from, item * 256 + at, row < weights.rows ? weights.row_bytes : 0, weights.unit);
    };
    const int row = row_of(half), which = weights.pair ? half : 0;
    int* record = weights.found + kRecord * which;

    uint4 words;
    if constexpr (kFormat == kBf16) {  // here `half` is which 8 of the lane's 16 columns
        const uint2 low = codes(0, 64 * u + 16 * q + 8 * half), high = codes(1, 64 * u + 16 * q + 8 * half);
        words = {low.x, high.x, low.y, high.y};
    } else if constexpr (kFormat == kFp8) {
        const uint2 low = codes(half, 64 * u + 16 * q), high = codes(half, 64 * u + 16 * q + 8);
        const uint32_t four[4] = {low.x, low.y, high.x, high.y};
        bool nan = false;
#pragma unroll
        for (int i = 0; i < 4; i++) nan |= (((four[i] & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0;
        if (nan) atomicOr(&record[kWrong], int(kCodeIsNaN));
        words = {e4m3_word(four[0]), e4m3_word(four[1]), e4m3_word(four[2]), e4m3_word(four[3])};
        if (threadIdx.x < 4) {  // [128 columns, half]
            const int columns = threadIdx.x / 2, of = threadIdx.x % 2, first = (weights.pair ? tile : 2 * tile + of) * 8;
            const int r = min((first + weights.row_offset) / weights.block_rows, weights.scale_rows - 1);
            const int c = min((item * 256 + columns * 128) / weights.block_columns, weights.scale_columns - 1);
            const int64_t at = int64_t(r) * weights.scale_columns + c;
            const uint8_t* from = weights.scales(weights.pair ? of : 0);
            uint32_t bits;
            if (weights.floats) bits = reinterpret_cast<const uint32_t*>(from)[at];
            else bits = from[at] == 0 ? 0x00400000u : uint32_t(from[at]) << 23;
            if ((bits & 0x7F800000u) == 0x7F800000u)
                atomicOr(&weights.found[kRecord * (weights.pair ? of : 0) + kWrong], int(kScaleIsNaN));
            reinterpret_cast<uint32_t*>(to + kCodes)[threadIdx.x] = bits;
        }
    } else {
        constexpr int kWide = kFormat == kNvfp4 ? 16 : 32;
        const int groups = weights.columns / kWide;
        uint2 pair[2];
#pragma unroll
        for (int v = 0; v < 2; v++) {
            uint2 c = codes(half, 64 * u + 32 * v + 8 * q);
            const int group = item * (512 / kWide) + (128 * u + 64 * v + 16 * q) / kWide;
            const bool there = row < weights.rows && group < groups;
            uint32_t scale = there ? weights.scales(which)[int64_t(row) * groups + group] : 0;
            if constexpr (kFormat == kNvfp4) {  // the scale 0 has no code: its group's codes become 0; the sign goes to the codes
                if ((scale & 127) == 127) atomicOr(&record[kWrong], int(kScaleIsNaN));
                const uint32_t keep = scale & 127 ? ~0u : 0u, flip = scale > 127 ? 0x88888888u : 0u;
                c.x = (c.x ^ flip) & keep, c.y = (c.y ^ flip) & keep;
                scales[16 * lane + 4 * u + 2 * v + half] = nvfp4_scale(scale);
            } else {
                const Exponents stored = exponents(record);
                uint32_t live = (c.x | c.y) & 0x77777777u;
                live |= __shfl_xor_sync(~0u, live, 1);
                scale = stored.live_only && !live ? 0 : scale - stored.offset;
                if (q % 2 == 0) scales[16 * (lane / 2) + 4 * u + 2 * v + half] = scale;
            }
            pair[v] = {e2m1_word(c.x), e2m1_word(c.y)};
        }
        words = {pair[0].x, pair[0].y, pair[1].x, pair[1].y};
    }
    emu::check_aligned(to, 16);
    reinterpret_cast<uint4*>(to)[threadIdx.x] = words;
    if constexpr (kFormat == kNvfp4 || kFormat == kMxfp4) {
        __syncthreads();
        if (int(threadIdx.x) < (item_bytes(kFormat) - kCodes) / 16)
            reinterpret_cast<uint4*>(to + kCodes)[threadIdx.x] = reinterpret_cast<const uint4*>(scales)[threadIdx.x];
    }
}

// The extremes of the scales of blockIdx.y's weight, of all and of those of groups that hold another code than +-0.
__global__ void __launch_bounds__(kThreads) pack_extremes_kernel(Weights weights) {
    DYN_SMEM(unsigned, partial);  // [warp][4]
    grid_dependency_launch();
    grid_dependency_wait();
    const uint8_t *codes = weights.codes(blockIdx.y), *scales = weights.scales(blockIdx.y);
    const int64_t groups = int64_t(weights.rows) * (weights.columns / 32);
    unsigned most[4] = {};
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < groups; i += int64_t(gridDim.x) * kThreads) {
        const unsigned scale = scales[i];
        const uint2 low = load_8(codes + 16 * i, 0, 8, weights.unit), high = load_8(codes + 16 * i, 8, 16, weights.unit);
        most[0] = max(most[0], 256 - scale), most[1] = max(most[1], scale + 1);
        if ((low.x | low.y | high.x | high.y) & 0x77777777u) most[2] = max(most[2], 256 - scale), most[3] = max(most[3], scale + 1);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        most[i] = __reduce_max_sync(~0u, most[i]);
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32 * 4 + i] = most[i];
    }
    __syncthreads();
    if (threadIdx.x >= 4) return;
    unsigned top = 0;
    for (int warp = 0; warp < kWarps; warp++) top = max(top, partial[4 * warp + threadIdx.x]);
    atomicMax(&weights.found[kRecord * blockIdx.y + kLow + threadIdx.x], int(top));
}

template <int kFormat> static cudaError_t launch(const Weights& weights, uint8_t* out, int tiles, cudaStream_t stream) {
    const int items = (weights.columns + item_columns(kFormat) - 1) / item_columns(kFormat);
    if (kFormat == kMxfp4) {
        const int64_t blocks = (int64_t(weights.rows) * (weights.columns / 32) + kThreads - 1) / kThreads;
        LAUNCH(pack_extremes_kernel, dim3(blocks < kMaxBlocks ? unsigned(blocks) : kMaxBlocks, weights.pair ? 2 : 1), dim3(kThreads),
               kWarps * 4 * sizeof(unsigned), stream, weights);
    }
    LAUNCH(pack_kernel<kFormat>, dim3(unsigned(tiles) * items), dim3(kThreads), 512, stream, weights, out, items);
    return cudaGetLastError();
}

// codes [rows, row_bytes] of a weight in `format` (stream.cuh) and of the second one of a pair, or null; scales as packing.py says, of FP8
// [scale_rows, scale_columns] in fp32 if `floats`, else as E8M0; out [tiles, items, item bytes]; found [records, 8]: record number `record`
// is the first weight's, the next one the second's.
extern "C" int pack(const uint8_t* codes, const uint8_t* scales, const uint8_t* second_codes, const uint8_t* second_scales, uint8_t* out,
                    int* found, int record, int format, int rows, int columns, int row_bytes, int block_rows, int block_columns,
                    int row_offset, int scale_rows, int scale_columns, int floats, cudaStream_t stream) {
    const int pair = second_codes != nullptr, tile_rows = pair ? 8 : 16, tiles = (rows + tile_rows - 1) / tile_rows;
    if (rows < 1 || columns < 1 || block_rows < 1 || block_columns < 1 || reinterpret_cast<uintptr_t>(out) % 16)
        return cudaErrorInvalidValue;
    const uintptr_t places = reinterpret_cast<uintptr_t>(codes) | reinterpret_cast<uintptr_t>(second_codes) | uintptr_t(row_bytes);
    const int unit = places % 8 == 0 ? 8 : places % 4 == 0 ? 4 : 1;
    const Weights weights{codes, second_codes, scales, second_scales, found + kRecord * record, rows, columns, row_bytes, pair, unit,
                          block_rows, block_columns, row_offset, scale_rows, scale_columns, floats};
    switch (format) {
        case kBf16: return launch<kBf16>(weights, out, tiles, stream);
        case kFp8: return launch<kFp8>(weights, out, tiles, stream);
        case kNvfp4: return launch<kNvfp4>(weights, out, tiles, stream);
        case kMxfp4: return launch<kMxfp4>(weights, out, tiles, stream);
    }
    return cudaErrorInvalidValue;
}
