// The second part of runtime.cpp, which includes it within namespace emu: tensor copies, the products of warpgroups, and tensor memory.
#pragma once

// ---- Tensor copies

bool make_map(TensorMap* map, int element_bytes, const void* address, unsigned width, unsigned height, size_t row_bytes, unsigned box_width,
              unsigned box_height, Swizzle swizzle) {
    const size_t inner = size_t(box_width) * element_bytes;
    const bool good = (element_bytes == 1 || element_bytes == 2 || element_bytes == 8) &&
                      reinterpret_cast<uintptr_t>(address) % 16 == 0 && row_bytes % 16 == 0 && width && height &&
                      row_bytes >= size_t(width) * element_bytes && box_width && box_height && box_width <= 256 && box_height <= 256 &&
                      inner % 16 == 0 && (swizzle == Swizzle::kNone || inner == size_t(16) << unsigned(swizzle));
    *map = {static_cast<const char*>(address), row_bytes, unsigned(element_bytes), width, height, box_width, box_height, swizzle, good, {}};
    return good;
}

// Where the byte at an offset of shared memory goes: the number of its 16-byte chunk within 32, 64 or 128 bytes is mixed with higher bits
// of the offset.
static size_t swizzled(size_t offset, Swizzle swizzle) {
    const size_t chunks = (size_t(1) << unsigned(swizzle)) - 1;
    return offset ^ (offset >> 7 & chunks) << 4;
}

void tensor_load(void* shared, const void* map_address, int x, int y, uint64_t* bar) {
    const uint32_t place = CALLER;
    const TensorMap m = *static_cast<const TensorMap*>(map_address);
    if (reinterpret_cast<uintptr_t>(map_address) % 64 || !m.made)
        fail("tensor_load: no TensorMap that make_tensor_map has made @+0x%x", place);
    if (x * long(m.element_bytes) % 16)  // a GPU calls it an illegal instruction
        fail("tensor_load: column %d begins at byte %ld of the matrix' rows, no multiple of 16 @+0x%x", x, x * long(m.element_bytes), place);
    const size_t inner = m.box_width * m.element_bytes, bytes = inner * m.box_height;
    Region& s = shared_range(shared, bytes, 128, "tensor_load", place);
    const size_t first = reinterpret_cast<uintptr_t>(shared) - s.begin;
    // The part of a row of the box that lies in the matrix, in elements of the box.
    const long from = std::clamp(-long(x), 0L, long(m.box_width)), to = std::clamp(long(m.width) - x, from, long(m.box_width));
    std::vector<Piece> pieces;
    for (unsigned row = 0; row < m.box_height; row++) {
        const long line = long(y) + row;
        const bool inside = line >= 0 && line < long(m.height) && from < to;
        const char* source = m.address + line * long(m.row_bytes) + long(x) * m.element_bytes;
        if (inside) check_source_range(source + from * m.element_bytes, (to - from) * m.element_bytes, "tensor_load", place);
        for (unsigned i = 0; i < m.box_width; i++) {
            const size_t offset = swizzled(first + row * inner + i * m.element_bytes, m.swizzle);
            const bool there = inside && long(i) >= from && long(i) < to;
            pieces.push_back({reinterpret_cast<char*>(s.begin) + offset, there ? source + i * m.element_bytes : nullptr, m.element_bytes});
        }
    }
    start_bulk(shared, std::move(pieces), bytes, 128, bar, "tensor_load", place);
}

// ---- wgmma. A warp computes its 16 rows when its lanes have come; what it reads counts as being read until it has waited for the group.

uint64_t operand(const void* first, uint64_t fields) {
    Region& s = shared_range(first, 16, 16, "wgmma_operand", CALLER);
    return fields | (reinterpret_cast<uintptr_t>(first) - s.begin) >> 4;
}

namespace {
struct Product {  // what a lane brings
    Tile* tile;
    const uint32_t* rows;  // of a, unless it is in shared memory
    Values values;
    unsigned columns, groups;
    uint64_t a, b;
    uint32_t place;
};

Products& products_of_warp() { return current->block->products[current->linear / 32]; }

// Reads 16-byte chunks of shared memory for a product. That they are being read is kept in `reads`.
class OperandReader {
    std::vector<uint32_t>& reads;
    const uint16_t pipe;
    const char* what;
    const uint32_t place;
    uint32_t before = ~0u, in_flight = 0;

public:
    OperandReader(std::vector<uint32_t>& reads, uint16_t pipe, const char* what, uint32_t place)
        : reads(reads), pipe(pipe), what(what), place(place) {}
    void read(size_t chunk, unsigned char* to) {  // at this byte of shared memory
        Region& s = current->block->shared;
        const char* address = reinterpret_cast<const char*>(s.begin) + chunk;
        shared_range(address, 16, 16, what, place);
        check_fenced(s, chunk, 16, what, place);
        for (size_t i = chunk; i < chunk + 16; i++) {
            if (s.writes[i] == kNobody) fail("%s: read of byte %zu of shared memory, which nobody has written @+0x%x", what, i, place);
            check_order(s.writes[i], s, i, Access::kRead, "wrote", place);
            if (s.reads[i] != before) {
                before = s.reads[i];
                in_flight = touch(before < launch_first ? 0 : before, kInFlight, 0, false, place);
                touches[in_flight].pipe = pipe;
                reads.push_back(in_flight);
            }
            s.reads[i] = in_flight;
        }
        memcpy(to, address, 16);
    }
};

// The fields that wgmma's and tcgen05's descriptors have in common, in bytes; the swizzle's code differs.
struct Operand {
    size_t first, cell, group;
    explicit Operand(uint64_t fields)
        : first((fields & 0x3fff) << 4), cell((fields >> 16 & 0x3fff) << 4), group((fields >> 32 & 0x3fff) << 4) {}
};

// Rows of an operand, `chunks` times 16 bytes each, into `to`.
void read_operand(uint64_t operand, Swizzle swizzle, unsigned first_row, unsigned rows, unsigned chunks, unsigned char* to,
                  std::vector<uint32_t>& reads, uint16_t pipe, const char* what, uint32_t place) {
    const Operand at(operand);
    OperandReader reader(reads, pipe, what, place);
    for (unsigned row = first_row; row < first_row + rows; row++)
        for (unsigned c = 0; c < chunks; c++) {
            const size_t step = swizzle == Swizzle::kNone ? at.cell : 16;
            const size_t offset = at.first + row / 8 * at.group + row % 8 * (size_t(16) << unsigned(swizzle)) + c * step;
            reader.read(swizzled(offset, swizzle), to + (row - first_row) * 16 * chunks + 16 * c);
        }
}

// The same of 16-bit values that lie the other way round, in strips of 64 rows with the swizzle of 128 bytes: 16 values of each row.
void read_operand_across(uint64_t operand, unsigned rows, unsigned char* to, std::vector<uint32_t>& reads, uint16_t pipe, const char* what,
                         uint32_t place) {
    const Operand at(operand);
    OperandReader reader(reads, pipe, what, place);
    for (unsigned k = 0; k < 16; k++)
        for (unsigned row = 0; row < rows; row += 8) {
            unsigned char chunk[16];
            const size_t offset = at.first + row / 64 * at.cell + k / 8 * at.group + k % 8 * 128 + row % 64 * 2;
            reader.read(swizzled(offset, Swizzle::k128), chunk);
            for (unsigned i = 0; i < 8; i++) memcpy(to + (row + i) * 32 + 2 * k, chunk + 2 * i, 2);
        }
}

void multiply_warpgroup(void* const* lanes) {
    auto& mine = *static_cast<Product*>(lanes[0]);
    for (int l = 1; l < 32; l++)
        if (static_cast<Product*>(lanes[l])->a != mine.a || static_cast<Product*>(lanes[l])->b != mine.b)
            fail("wgmma: lane %d has other operands than lane 0 @+0x%x", l, mine.place);
    Products& warp = products_of_warp();
    if (!warp.fenced) fail("wgmma: no wgmma_fence() before the first product, or since the last wait @+0x%x", mine.place);
    if (mine.rows && warp.behind_commit)
        fail("wgmma: no wgmma_fence() since the last commit, before registers of a are read that were written since @+0x%x", mine.place);
    warp.count++;
    static unsigned char a[16][32], b[256][32];
    auto swizzle = [](uint64_t operand) { return operand >> 62 ? Swizzle(4 - unsigned(operand >> 62)) : Swizzle::kNone; };
    if (mine.rows) {  // register r of lane l: values 2 (l % 4) and the next of k = 8 (r / 2).. of row l / 4 + 8 (r % 2)
        for (int l = 0; l < 32; l++)
            for (int r = 0; r < 4; r++)
                memcpy(&a[l / 4 + r % 2 * 8][r / 2 * 16 + l % 4 * 4], &static_cast<Product*>(lanes[l])->rows[r], 4);
    } else {
        read_operand(mine.a, swizzle(mine.a), current->linear / 32 % 4 * 16, 16, 2, a[0], warp.open, 0, "wgmma", mine.place);
    }
    read_operand(mine.b, swizzle(mine.b), 0, mine.columns, 2, b[0], warp.open, 0, "wgmma", mine.place);
    const unsigned K = mine.values == Values::kE4m3 ? 32 : 16;
    auto value = [&](const unsigned char* row, unsigned k) {
        if (mine.values == Values::kE4m3) return e4m3_to_float(row[k]);
        const uint16_t bits = uint16_t(row[2 * k] | row[2 * k + 1] << 8);
        return mine.values == Values::kF16 ? half_to_float(bits) : bits_as<float>(uint32_t(bits) << 16);
    };
    static float left[16][32], right[256][32];
    for (unsigned k = 0; k < K; k++) {
        for (unsigned row = 0; row < 16; row++) left[row][k] = value(a[row], k);
        for (unsigned column = 0; column < mine.columns; column++) right[column][k] = value(b[column], k);
    }
    for (int l = 0; l < 32; l++)
        for (unsigned i = 0; i < mine.columns / 2; i++) {
            const unsigned row = l / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + 2 * (l % 4) + i % 2;
            float& sum = static_cast<Product*>(lanes[l])->tile->d[i];
            for (unsigned k = 0; k < K; k++) sum += left[row][k] * right[column][k];
        }
}
}  // namespace

void wgmma(Values values, int columns, Tile& mine, const uint32_t* rows, uint64_t a, uint64_t b, const char* what, const char* file,
           int line) {
    if (current->linear / 128 * 128 + 128 > block_size.x * block_size.y * block_size.z)
        fail("%s: the warpgroup has fewer than 128 threads", what);
    Product product{&mine, rows, values, unsigned(columns), 0, a, b, CALLER};
    meet(~0u, &product, multiply_warpgroup, false, what, file, line);
}
void wgmma_fence(const char* file, int line) {
    meet(~0u, nullptr, [](void* const*) { products_of_warp().fenced = true, products_of_warp().behind_commit = false; }, false,
         "wgmma_fence", file, line);
}
void wgmma_commit(const char* file, int line) {
    meet(~0u, nullptr, [](void* const*) {
        Products& warp = products_of_warp();
        warp.groups.push_back(std::move(warp.open));
        warp.open.clear();
        warp.behind_commit = true;
    }, false, "wgmma_commit", file, line);
}
// Orders the warp's lanes as __syncwarp does: what they do next comes after the warp's reads.
void wgmma_wait(unsigned groups, const char* file, int line) {
    Product product{};
    product.groups = groups;
    meet(~0u, &product, [](void* const* lanes) {
        Products& warp = products_of_warp();
        while (warp.groups.size() > static_cast<Product*>(lanes[0])->groups) {
            for (uint32_t t : warp.groups.front()) touches[t].thread = uint16_t(current->id), touches[t].stretch = current->stretch;
            warp.groups.pop_front();
        }
        warp.fenced = !warp.groups.empty();
    }, true, "wgmma_wait", file, line);
}

// ---- Tensor memory (tcgen05). A product or copy is done when it is started, and counts as being under way until the mbarrier of its
// commit was waited for.

namespace {
struct Columns { uint32_t* shared; uint32_t address; unsigned columns, place; };

TensorMemory& tensor_memory(const char* what, uint32_t place) {
    if (!current->block->tensor) fail("%s: the block has no tensor memory allocated @+0x%x", what, place);
    return *current->block->tensor;
}
size_t cell_at(TensorMemory& m, uint32_t address, unsigned lane, unsigned column, const char* what, uint32_t place) {
    lane += address >> 16, column += address & 0xffff;
    if (lane >= kLanes || column >= kColumns || !m.used[column])
        fail("%s: lane %u, column %u of tensor memory is not allocated @+0x%x", what, lane, column, place);
    return lane * size_t(kColumns) + column;
}
// An access of what the current thread has started; what it has started before comes before it.
void access_in_pipe(TensorMemory& m, size_t cell, bool write, uint32_t& started, const char* what, uint32_t place) {
    const uint16_t pipe = uint16_t(current->id + 1);
    uint32_t &writes = m.cells.writes[cell], &reads = m.cells.reads[cell];
    if (!write && writes == kNobody)
        fail("%s: lane %zu, column %zu of tensor memory was not written @+0x%x", what, cell / kColumns, cell % kColumns, place);
    auto check = [&](uint32_t chain, const char* did) {
        for (uint32_t t = chain; t >= launch_first && t >= kFirstTouch; t = touches[t].earlier)
            if (touches[t].pipe != pipe && !ordered(t)) race(m.cells, cell, write ? Access::kWrite : Access::kRead, did, t, place);
    };
    check(writes, "wrote");
    if (write) check(reads, "read");
    if (!started) {
        started = touch(0, kInFlight, 0, false, place);
        touches[started].pipe = pipe;
        current->started.push_back(started);
    }
    if (write) writes = started, reads = 0;
    else if (reads != started) {
        const uint32_t read = touch(reads < launch_first ? 0 : reads, kInFlight, 0, false, place);
        touches[read].pipe = pipe;
        current->started.push_back(read);
        reads = read;
    }
}
Swizzle tensor_swizzle(uint64_t operand, const char* what, uint32_t place) {
    if ((operand >> 46 & 7) != 1) fail("%s: a descriptor of version %u, not 1 @+0x%x", what, unsigned(operand >> 46 & 7), place);
    const unsigned code = unsigned(operand >> 61);
    if (code % 2) fail("%s: a descriptor with swizzle %u, which is none that is known here @+0x%x", what, code, place);
    return code ? Swizzle(4 - code / 2) : Swizzle::kNone;
}
uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
const float kE2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
}  // namespace

void tensor_alloc(uint32_t* shared, unsigned columns, const char* file, int line) {
    Columns mine{shared, 0, columns, CALLER};
    meet(~0u, &mine, [](void* const* lanes) {
        const Columns& c = *static_cast<Columns*>(lanes[current->linear % 32]);
        auto& memory = current->block->tensor;
        if (!memory) {
            memory = std::make_unique<TensorMemory>();
            memory->cells.name = "tensor memory (512 a lane)";
            memory->cells.unit = "cell";
            memory->cells.shared = memory->cells.writable = true;
            memory->cells.writes.assign(kLanes * kColumns, kNobody);
            memory->cells.reads.assign(kLanes * kColumns, 0);
            memory->values.assign(kLanes * kColumns, 0xffffffffu);
        }
        if (c.columns < 32 || c.columns > kColumns || (c.columns & (c.columns - 1)))
            fail("tensor_alloc: %u columns are not 32, 64, 128, 256 or 512 @+0x%x", c.columns, c.place);
        if (memory->relinquished) fail("tensor_alloc after tensor_relinquish @+0x%x", c.place);
        unsigned first = 0;
        while (first < kColumns && std::count(memory->used + first, memory->used + first + c.columns, true)) first += c.columns;
        if (first >= kColumns) fail("tensor_alloc: no %u columns are free, so it waits for ever @+0x%x", c.columns, c.place);
        std::fill_n(memory->used + first, c.columns, true);
        memory->sizes[first] = c.columns;
        Region& s = shared_range(c.shared, 4, 4, "tensor_alloc", c.place);
        track(s, reinterpret_cast<uintptr_t>(c.shared) - s.begin, 4, Access::kWrite, c.place);
        *c.shared = first;
    }, true, "tensor_alloc", file, line);
}
void tensor_relinquish(const char* file, int line) {
    meet(
        ~0u, nullptr,
        [](void* const*) {
            if (current->block->tensor) current->block->tensor->relinquished = true;
        },
        false, "tensor_relinquish", file, line);
}
void tensor_free(uint32_t address, unsigned columns, const char* file, int line) {
    Columns mine{nullptr, address, columns, CALLER};
    meet(~0u, &mine, [](void* const* lanes) {
        const Columns& c = *static_cast<Columns*>(lanes[current->linear % 32]);
        TensorMemory& m = tensor_memory("tensor_free", c.place);
        if (c.address >= kColumns || m.sizes[c.address] != c.columns)
            fail("tensor_free: %u columns at %u were not allocated @+0x%x", c.columns, c.address, c.place);
        for (size_t lane = 0; lane < kLanes; lane++)  // all use of them must have ended
            for (unsigned column = c.address; column < c.address + c.columns; column++) {
                const size_t cell = lane * kColumns + column;
                check_order(m.cells.writes[cell], m.cells, cell, Access::kWrite, "wrote", c.place);
                check_order(m.cells.reads[cell], m.cells, cell, Access::kWrite, "read", c.place);
                m.cells.writes[cell] = kNobody, m.cells.reads[cell] = 0;
            }
        std::fill_n(m.used + c.address, c.columns, false);
        m.sizes[c.address] = 0;
    }, true, "tensor_free", file, line);
}

// Terms are added in fp32, k = 0 first, to d; with scales, the exact sum of the products of a block of 16 or 32 is scaled and then added.
void tensor_mma(Kind kind, uint32_t d, uint64_t a, uint64_t b, uint32_t shape, uint32_t a_scales, uint32_t b_scales, bool add) {
    struct Format { const char* what; uint32_t shape; unsigned K, block; };  // values of 32 bytes; values of a scale, 0: there is none
    static const Format formats[] = {{"tensor_mma_bf16", kTensorBf16, 16, 0},
                                     {"tensor_mma_e4m3", kTensorE4m3, 32, 0},
                                     {"tensor_mma_nvfp4", kTensorNvfp4, 64, 16},
                                     {"tensor_mma_mxfp4", kTensorMxfp4, 64, 32}};
    const auto [what, expected, K, block] = formats[int(kind)];
    const uint32_t place = CALLER;
    TensorMemory& m = tensor_memory(what, place);
    const bool across = kind == Kind::kBf16 && (shape & kTensorAcross);
    const unsigned N = (shape >> 17 & 63) * 8, upper = kind == Kind::kMxfp4 && (shape & kTensorUpperScales) == kTensorUpperScales ? 2 : 0;
    if ((shape & ~(63u << 17)) != (expected | (upper ? kTensorUpperScales : 0) | (across ? kTensorAcross : 0)))
        fail("%s: the instruction descriptor 0x%08x is not one of tensor_shape @+0x%x", what, shape, place);
    if (N < 16 || N > 256 || N % 16) fail("%s: %u columns are no multiple of 16 up to 256 @+0x%x", what, N, place);
    const uint16_t pipe = uint16_t(current->id + 1);
    uint32_t written = 0, read = 0;
    // Values of a row, and behind each block of them its scale.
    struct Row { float values[64]; double scales[4]; };
    auto rows_of = [&, K = K, block = block, what = what](uint64_t operand, bool across, unsigned rows, uint32_t scales) {
        static unsigned char bytes[256][32];
        const Swizzle swizzle = tensor_swizzle(operand, what, place);
        if (across && swizzle != Swizzle::k128) fail("%s: rows along K with another swizzle than 128 bytes @+0x%x", what, place);
        if (across) read_operand_across(operand, rows, bytes[0], current->started, pipe, what, place);
        else read_operand(operand, swizzle, 0, rows, 2, bytes[0], current->started, pipe, what, place);
        std::vector<Row> out(rows);
        for (unsigned r = 0; r < rows; r++) {
            for (unsigned k = 0; k < K; k++) {
                if (block) out[r].values[k] = kE2m1[bytes[r][k / 2] >> 4 * (k % 2) & 15];
                else if (kind == Kind::kE4m3) out[r].values[k] = e4m3_to_float(bytes[r][k]);
                else out[r].values[k] = bits_as<float>(uint32_t(bytes[r][2 * k]) << 16 | uint32_t(bytes[r][2 * k + 1]) << 24);
            }
            if (!block) continue;
            const size_t cell = cell_at(m, scales, r % 32, r / 32, what, place);
            access_in_pipe(m, cell, false, read, what, place);
            for (unsigned g = 0; g < K / block; g++) {
                const unsigned byte = m.values[cell] >> 8 * (upper + g) & 0xff;
                out[r].scales[g] = kind == Kind::kNvfp4 ? e4m3_to_float(byte & 0x7f) : byte == 255 ? NAN : ldexp(1.0, int(byte) - 127);
            }
        }
        return out;
    };
    const std::vector<Row> left = rows_of(a, false, 128, a_scales), right = rows_of(b, across, N, b_scales);
    for (unsigned row = 0; row < 128; row++)
        for (unsigned column = 0; column < N; column++) {
            const size_t cell = cell_at(m, d, row, column, what, place);
            if (add && m.cells.writes[cell] == kNobody)
                fail("%s: adds to lane %u, column %u of d, which was not written @+0x%x", what, row, column, place);
            float sum = add ? bits_as<float>(m.values[cell]) : 0.0f;
            const Row &x = left[row], &y = right[column];
            for (unsigned k = 0; !block && k < K; k++) sum += x.values[k] * y.values[k];
            for (unsigned g = 0; block && g < K / block; g++) {
                float part = 0;
                for (unsigned k = g * block; k < (g + 1) * block; k++) part += x.values[k] * y.values[k];
                sum = float(sum + part * x.scales[g] * y.scales[g]);
            }
            access_in_pipe(m, cell, true, written, what, place);
            m.values[cell] = bits_of(sum);
        }
}
void tensor_copy_scales(uint32_t to, uint64_t from) {
    const uint32_t place = CALLER;
    TensorMemory& m = tensor_memory("tensor_copy_scales", place);
    unsigned char rows[32 * 16];
    read_operand(from, tensor_swizzle(from, "tensor_copy_scales", place), 0, 32, 1, rows, current->started, uint16_t(current->id + 1),
                 "tensor_copy_scales", place);
    uint32_t written = 0;
    for (unsigned lane = 0; lane < kLanes; lane++)
        for (unsigned column = 0; column < 4; column++) {
            const size_t cell = cell_at(m, to, lane, column, "tensor_copy_scales", place);
            access_in_pipe(m, cell, true, written, "tensor_copy_scales", place);
            memcpy(&m.values[cell], rows + lane % 32 * 16 + column * 4, 4);
        }
}
void tensor_commit(uint64_t* bar) {
    const uint32_t place = CALLER;
    Mbarrier& m = mbarrier_at(bar, "tensor_commit", place);
    if (!m.fenced) fail("tensor_commit: no mbarrier_fence_init() since mbarrier_init @+0x%x", place);
    if (current->started.empty()) fail("tensor_commit: this thread has started nothing @+0x%x", place);
    cluster.copies.push_back({{}, reinterpret_cast<uintptr_t>(bar), std::move(current->started), current->after_grid_wait});
    current->started.clear();
}

namespace {
void check_lanes(uint32_t address, const char* what, uint32_t place) {
    const unsigned warp = current->linear / 32 % 4;
    if (address >> 16 != 32 * warp)
        fail("%s: warp %u of its warpgroup has lanes %u to %u, not %u @+0x%x", what, warp, 32 * warp, 32 * warp + 31, address >> 16, place);
}
}  // namespace
Eight tensor_load(uint32_t from, const char* file, int line) {
    const uint32_t place = CALLER;
    TensorMemory& m = tensor_memory("tensor_load_8", place);
    check_lanes(from, "tensor_load_8", place);
    meet(~0u, nullptr, nullptr, false, "tensor_load_8", file, line);
    Eight r;
    for (unsigned i = 0; i < 8; i++) {
        const size_t cell = cell_at(m, from, current->linear % 32, i, "tensor_load_8", place);
        track(m.cells, cell, 1, Access::kRead, place);
        r.r[i] = m.values[cell];
    }
    return r;
}
void tensor_store(uint32_t to, Eight registers, const char* file, int line) {
    const uint32_t place = CALLER;
    TensorMemory& m = tensor_memory("tensor_store_8", place);
    check_lanes(to, "tensor_store_8", place);
    meet(~0u, nullptr, nullptr, false, "tensor_store_8", file, line);
    for (unsigned i = 0; i < 8; i++) {
        const size_t cell = cell_at(m, to, current->linear % 32, i, "tensor_store_8", place);
        track(m.cells, cell, 1, Access::kWrite, place);
        m.values[cell] = registers.r[i];
    }
}
