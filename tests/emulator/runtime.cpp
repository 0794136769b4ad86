// The emulator's machine: one block at a time, its threads as fibers that run until they wait, and a check at every memory access.
// Compiled without instrumentation and linked to each emulated kernel, so a shared object is one kernel file and its own machine.
#include "emulator.h"

#include <cstdarg>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <ucontext.h>
#include <vector>

extern "C" char __ehdr_start __attribute__((visibility("hidden"))), _end __attribute__((visibility("hidden")));  // by the linker

namespace emu {
dim3 thread_index, block_index, block_size, grid_size;

namespace {
constexpr size_t kStack = 64 * 1024;          // bytes a thread; a larger frame is reported as an access outside everything
constexpr size_t kGuard = 64 * 1024;          // bytes around shared memory that belong to nobody
constexpr long kSpin = 20'000'000;            // accesses of one thread without waiting: taken for a loop on a flag that nobody sets
constexpr unsigned kPoison = 0xFF;            // NaN as fp32 and bf16, -1 as an integer

struct Region {  // memory that a kernel may touch
    std::string name;
    uintptr_t begin, end;
    bool writable;
    std::vector<bool> written;  // a flag a byte; empty: all written
};

struct Fiber {
    ucontext_t context;
    dim3 index;
    unsigned linear;
    bool done = false;
    const uint64_t* generation = nullptr;  // waits until it differs from `seen`
    uint64_t seen = 0;
    std::string reason;
};

// A vector clock: entry u is the last stretch of thread u (from one release to the next) that is known to be over. Empty: nothing known.
using Clock = std::vector<uint32_t>;
void join(Clock& into, const Clock& from) {
    if (into.empty()) { into = from; return; }
    for (size_t i = 0; i < from.size(); i++)
        if (from[i] > into[i]) into[i] = from[i];
}

struct Access { unsigned thread; uint32_t stretch; bool atomic; unsigned long place; };
struct SharedByte {             // who touched it last
    std::vector<Access> writes;  // the last plain one, and atomic ones since
    std::vector<Access> reads;   // those that no later access is ordered after
};

struct Barrier {
    unsigned arrived = 0, expected = 0;
    uint64_t generation = 0;
    const char* file = nullptr;
    int line = 0;
    unsigned first = 0;
    Clock known[2];  // by generation, as the next may begin before all have left
};

struct Meeting {  // the lanes of one mask of one warp
    uint64_t generation = 0;
    unsigned arrived = 0, first = 0;
    const char *what = nullptr, *file = nullptr;
    int line = 0;
    Clock known[2];
    unsigned char value[2][32][16];  // two, because a fast lane may bring its next value before a slow one has read
};

struct Block {
    std::vector<Fiber> fibers;
    Barrier barriers[16];
    std::vector<std::map<unsigned, Meeting>> warps;
    std::vector<Clock> clocks;           // a thread; empty where there is no shared memory to watch
    std::vector<SharedByte> bytes;
};

std::vector<Region> regions;       // global memory, registered by the host before the call
Region shared;                     // of the running block
std::unique_ptr<Block> block;
Fiber* current = nullptr;          // null: host code runs, which is not checked
ucontext_t scheduler;
std::unique_ptr<char[]> stacks;
size_t stacks_bytes = 0;
void (*body)(const void*);
const void* closure;
size_t closure_bytes;
const char* kernel_name = "";
std::string error;
cudaError_t status = cudaSuccess;
bool reverse = false;
bool in_atomic = false;
long accesses = 0;

std::string format(const char* text, va_list list) {
    char buffer[600];
    vsnprintf(buffer, sizeof buffer, text, list);
    return buffer;
}
__attribute__((format(printf, 1, 2))) std::string say(const char* text, ...) {
    va_list list;
    va_start(list, text);
    std::string result = format(text, list);
    va_end(list);
    return result;
}
const char* base_name(const char* path) { const char* slash = strrchr(path, '/'); return slash ? slash + 1 : path; }

void wait(const uint64_t* generation, std::string reason) {
    current->generation = generation;
    current->seen = *generation;
    current->reason = std::move(reason);
    swapcontext(&current->context, &scheduler);
}

// The current thread tells what it knows (and begins a new stretch), or learns what the others told.
void release(Clock& known) {
    if (block->clocks.empty()) return;
    Clock& mine = block->clocks[current->linear];
    join(known, mine);
    mine[current->linear]++;
}
void acquire(const Clock& known) {
    if (!block->clocks.empty()) join(block->clocks[current->linear], known);
}

// Two accesses of one byte of shared memory, one of them a write, with no barrier between them.
void check_race(size_t byte, bool write, unsigned long place) {
    unsigned me = current->linear;
    const Clock& mine = block->clocks[me];
    SharedByte& b = block->bytes[byte];
    auto ordered = [&](const Access& a) { return a.thread == me || mine[a.thread] >= a.stretch; };
    auto conflicts = [&](const std::vector<Access>& accesses, const char* what) {
        for (auto& a : accesses)
            if (!ordered(a) && !(a.atomic && in_atomic))
                fail("%s of byte %zu of shared memory, which thread %u %s with no barrier between: @+0x%lx, @+0x%lx", write ? "write" : "read",
                     byte, a.thread, what, place, a.place);
    };
    conflicts(b.writes, "wrote");
    if (write) conflicts(b.reads, "read");
    if (write && !in_atomic) b.writes.clear(), b.reads.clear();  // all of them are ordered before this one
    auto& list = write ? b.writes : b.reads;
    size_t kept = 0;
    for (auto& a : list)
        if (!ordered(a) || (write && !a.atomic)) list[kept++] = a;  // an atomic write leaves the plain one in the list
    list.resize(kept);
    list.push_back({me, mine[me], in_atomic, place});
}

void thread_main() {
    body(closure);
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

// "threads 0-63 waiting at ...; threads 64-127 exited"
std::string who_waits_where() {
    std::string result;
    auto& f = block->fibers;
    for (size_t i = 0; i < f.size();) {
        size_t j = i;
        auto state = [](const Fiber& x) { return x.done ? std::string("exited") : "waiting at " + x.reason; };
        while (j + 1 < f.size() && state(f[j + 1]) == state(f[i])) j++;
        result += (result.empty() ? "" : "; ") + (i == j ? say("thread %zu ", i) : say("threads %zu-%zu ", i, j)) + state(f[i]);
        i = j + 1;
        if (result.size() > 400) { result += "; ..."; break; }
    }
    return result;
}

std::string deadlock_report() {
    bool exited = false, at_sync = false;
    for (auto& f : block->fibers) { exited |= f.done; at_sync |= f.reason.rfind("__syncthreads", 0) == 0 && !f.done; }
    return (exited && at_sync ? "divergent barrier: " : "deadlock: ") + who_waits_where();
}

void prepare_block(size_t shared_bytes) {
    unsigned n = block_size.x * block_size.y * block_size.z;
    block = std::make_unique<Block>();
    block->fibers.resize(n);
    block->warps.resize((n + 31) / 32);
    memset(reinterpret_cast<void*>(shared.begin), kPoison, shared_bytes);
    shared.written.assign(shared_bytes, false);
    in_atomic = false;
    if (shared_bytes) {
        block->bytes.resize(shared_bytes);
        block->clocks.assign(n, Clock(n, 0));
        for (unsigned i = 0; i < n; i++) block->clocks[i][i] = 1;
    }
    for (unsigned i = 0; i < n; i++) {
        Fiber& f = block->fibers[i];
        f.linear = i;
        f.index = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = &stacks[i * kStack];
        f.context.uc_stack.ss_size = kStack;
        f.context.uc_link = nullptr;
        makecontext(&f.context, thread_main, 0);
    }
}

void run_block() {
    size_t n = block->fibers.size();
    for (;;) {
        bool alive = false, progress = false;
        for (size_t i = 0; i < n; i++) {
            Fiber& f = block->fibers[reverse ? n - 1 - i : i];
            if (f.done) continue;
            alive = true;
            if (f.generation && *f.generation == f.seen) continue;
            f.generation = nullptr;
            progress = true;
            current = &f;
            thread_index = f.index;
            accesses = 0;
            swapcontext(&scheduler, &f.context);
            current = nullptr;
            if (status != cudaSuccess) return;
        }
        if (!alive) return;
        if (!progress) {
            status = 719;  // cudaErrorLaunchFailure
            error = say("%s: block (%u,%u,%u): ", kernel_name, block_index.x, block_index.y, block_index.z) + deadlock_report();
            return;
        }
    }
}

std::string where(uintptr_t address) {
    const Region* near = nullptr;
    uintptr_t distance = ~uintptr_t(0);
    auto consider = [&](const Region& r) {
        uintptr_t d = address >= r.end ? address - r.end : r.begin - address;
        if (address < r.begin || address >= r.end) if (d < distance) { distance = d; near = &r; }
    };
    for (auto& r : regions) consider(r);
    consider(shared);
    if (!near || distance > kGuard) return "outside every allocation";
    return say("%zu bytes %s %s (%zu bytes)", size_t(distance), address >= near->end ? "past the end of" : "before the start of",
               near->name.c_str(), size_t(near->end - near->begin));
}

bool check_region(Region& r, uintptr_t a, size_t size, bool write, unsigned long offset) {
    if (a < r.begin || a >= r.end) return false;
    if (a + size > r.end) fail("%s of %zu bytes across the end of %s @+0x%lx", write ? "write" : "read", size, r.name.c_str(), offset);
    if (write && !r.writable) fail("write to %s, which is an input @+0x%lx", r.name.c_str(), offset);
    if (r.written.empty()) return true;
    for (size_t i = a - r.begin; i < a - r.begin + size; i++) {
        if (write) r.written[i] = true;
        else if (!r.written[i]) fail("read of byte %zu of %s, which nobody has written @+0x%lx", i, r.name.c_str(), offset);
    }
    return true;
}

void check(const void* address, size_t size, bool write, const void* pc) {
    if (!current) return;
    uintptr_t a = reinterpret_cast<uintptr_t>(address);
    uintptr_t stack = reinterpret_cast<uintptr_t>(&stacks[current->linear * kStack]);
    if (++accesses > kSpin) fail("deadlock: %ld accesses without waiting or ending: a loop on a flag that no other thread can set?", kSpin);
    if (a >= stack && a + size <= stack + kStack) return;
    auto offset = static_cast<unsigned long>(static_cast<const char*>(pc) - &__ehdr_start);
    if (check_region(shared, a, size, write, offset)) {
        for (size_t i = 0; i < size; i++) check_race(a - shared.begin + i, write, offset);
        return;
    }
    for (auto& r : regions) if (check_region(r, a, size, write, offset)) return;
    if (!write) {  // the kernel's arguments, and constants of the object
        auto c = reinterpret_cast<uintptr_t>(closure), image = reinterpret_cast<uintptr_t>(&__ehdr_start);
        if ((a >= c && a + size <= c + closure_bytes) || (a >= image && a + size <= reinterpret_cast<uintptr_t>(&_end))) return;
    }
    fail("%s of %zu bytes %s @+0x%lx", write ? "write" : "read", size, where(a).c_str(), offset);
}
}  // namespace

void fail(const char* text, ...) {
    va_list list;
    va_start(list, text);
    std::string reason = format(text, list);
    va_end(list);
    status = 700;  // cudaErrorIllegalAddress
    error = say("%s: block (%u,%u,%u) thread (%u,%u,%u): ", kernel_name, block_index.x, block_index.y, block_index.z, thread_index.x,
                thread_index.y, thread_index.z) + reason;
    setcontext(&scheduler);  // the fibers are abandoned
    __builtin_unreachable();
}

void set_atomic(bool value) { in_atomic = value; }
void* shared_memory() { return reinterpret_cast<void*>(shared.begin); }
unsigned linear_thread() { return current->linear; }
cudaError_t last_error() { cudaError_t result = status; status = cudaSuccess; return result; }

void check_aligned(const void* address, unsigned alignment) {
    if (current && reinterpret_cast<uintptr_t>(address) % alignment) fail("vector access to an address that is no multiple of %u bytes", alignment);
}

void barrier(int id, unsigned threads, bool blocking, bool all, const char* file, int line) {
    if (all) threads = block->fibers.size();
    if (id < 0 || id > 15) fail("barrier %d: a block has barriers 0 to 15", id);
    if (!all && (threads == 0 || threads % 32)) fail("barrier %d of %u threads: not a multiple of 32", id, threads);
    if (threads > block->fibers.size()) fail("barrier %d of %u threads in a block of %zu", id, threads, block->fibers.size());
    Barrier& b = block->barriers[id];
    if (b.arrived == 0) { b.expected = threads; b.file = file; b.line = line; b.first = current->linear; }
    if (b.expected != threads) fail("divergent barrier %d: %u threads expected here, %u by thread %u", id, threads, b.expected, b.first);
    if (all && (b.line != line || strcmp(b.file, file)))
        fail("divergent barrier: __syncthreads at %s:%d, but thread %u came to the one at %s:%d", base_name(file), line, b.first,
             base_name(b.file), b.line);
    Clock& known = b.known[b.generation & 1];
    if (b.arrived == 0) known.clear();
    release(known);
    if (++b.arrived == threads) { b.arrived = 0; b.generation++; }
    else if (blocking)
        wait(&b.generation, (all ? std::string("__syncthreads") : say("barrier %d of %u threads", id, threads)) + say(" (%s:%d)", base_name(file), line));
    if (blocking) acquire(known);
}

void exchange(unsigned mask, const void* value, unsigned size, void* lanes, bool orders_memory, const char* what, const char* file, int line) {
    unsigned me = current->linear % 32;
    if (!(mask >> me & 1)) fail("%s: lane %u is not in its own mask 0x%08x", what, me, mask);
    unsigned first_thread = current->linear / 32 * 32, present = unsigned(block->fibers.size()) - first_thread;
    if (present < 32 && mask >> present) fail("%s: mask 0x%08x names lanes that the block's last warp of %u threads does not have", what, mask, present);
    Meeting& m = block->warps[current->linear / 32][mask];  // lanes of overlapping masks may still be on their way to this one
    if (!m.arrived) { m.what = what; m.file = file; m.line = line; m.first = current->linear; }
    if (m.line != line || strcmp(m.file, file) || strcmp(m.what, what))
        fail("divergent warp: %s at %s:%d, but thread %u came to %s at %s:%d", what, base_name(file), line, m.first, m.what, base_name(m.file), m.line);
    auto& buffer = m.value[m.generation & 1];
    memcpy(buffer[me], value, size);
    Clock& known = m.known[m.generation & 1];
    if (!m.arrived) known.clear();
    if (orders_memory) release(known);
    m.arrived |= 1u << me;
    if (m.arrived == mask) { m.arrived = 0; m.generation++; }
    else wait(&m.generation, say("%s of lanes 0x%08x (%s:%d)", what, mask, base_name(file), line));
    if (orders_memory) acquire(known);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(static_cast<char*>(lanes) + i * size, buffer[i], size);
        else memset(static_cast<char*>(lanes) + i * size, kPoison, size);
}

void launch(const char* name, dim3 grid, dim3 threads, size_t shared_bytes, void (*run)(const void*), const void* c, size_t c_bytes) {
    size_t n = size_t(threads.x) * threads.y * threads.z;
    kernel_name = name;
    if (n == 0 || n > 1024 || threads.z > 64 || !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || shared_bytes > 227 * 1024) {
        status = 9;  // cudaErrorInvalidConfiguration
        error = say("%s: launch of grid (%u,%u,%u), block (%u,%u,%u), %zu bytes of shared memory: beyond a GPU's limits", name, grid.x, grid.y, grid.z,
                    threads.x, threads.y, threads.z, shared_bytes);
        return;
    }
    grid_size = grid, block_size = threads, body = run, closure = c, closure_bytes = c_bytes;
    if (stacks_bytes < n * kStack) stacks.reset(new char[stacks_bytes = n * kStack]);
    std::vector<char> arena(shared_bytes + 2 * kGuard + 1024, char(kPoison));
    shared.name = "shared memory";
    shared.begin = (reinterpret_cast<uintptr_t>(arena.data()) + kGuard + 1023) / 1024 * 1024;
    shared.end = shared.begin + shared_bytes;
    shared.writable = true;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                block_index = reverse ? dim3(grid.x - 1 - x, grid.y - 1 - y, grid.z - 1 - z) : dim3(x, y, z);
                prepare_block(shared_bytes);
                run_block();
                if (status != cudaSuccess) { block.reset(); shared = {}; return; }
            }
    block.reset();
    shared = {};
}
}  // namespace emu

// The host's side (emulator.py, by ctypes)
extern "C" {
void emu_reset(int reverse) { emu::regions.clear(); emu::error.clear(); emu::status = cudaSuccess; emu::reverse = reverse; }
void emu_region(const char* name, uintptr_t begin, size_t size, int writable, int written) {
    emu::regions.push_back({name, begin, begin + size, writable != 0, std::vector<bool>(written ? 0 : size, false)});
}
size_t emu_unwritten(size_t i) { size_t n = 0; for (bool b : emu::regions[i].written) n += !b; return n; }
const char* emu_error() { return emu::error.c_str(); }

// What -fsanitize=thread calls.
#define EMU_ACCESS(n)                                                                                              \
    void __tsan_read##n(void* a) { emu::check(a, n, false, __builtin_return_address(0)); }                         \
    void __tsan_write##n(void* a) { emu::check(a, n, true, __builtin_return_address(0)); }                         \
    void __tsan_unaligned_read##n(void* a) { emu::check(a, n, false, __builtin_return_address(0)); }               \
    void __tsan_unaligned_write##n(void* a) { emu::check(a, n, true, __builtin_return_address(0)); }               \
    void __tsan_volatile_read##n(void* a) { emu::check(a, n, false, __builtin_return_address(0)); }                \
    void __tsan_volatile_write##n(void* a) { emu::check(a, n, true, __builtin_return_address(0)); }
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
void __tsan_read_range(void* a, size_t n) { emu::check(a, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* a, size_t n) { emu::check(a, n, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
