// The emulator's machine: the blocks of one cluster at a time (one block, without clusters), their threads as fibers that run until they
// wait, and a check at every memory access. Compiled without instrumentation and linked to each emulated kernel, so a shared object is
// one kernel file and its own machine. README.md says what is found; the comments here say how.
#include "emulator.h"

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#if defined(__x86_64__)
#include <csignal>
#include <ucontext.h>
#endif

extern "C" char __ehdr_start __attribute__((visibility("hidden"))), _end __attribute__((visibility("hidden")));  // by the linker

// ---- Fibers: emu_switch leaves one stack for another. x86-64 has its own, as ucontext asks the kernel for the signal mask each time.
#if defined(__x86_64__)
struct Context { void* stack_pointer; };
extern "C" void emu_switch(Context* from, Context* to);
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov (%rsi), %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
static void prepare(Context& context, char* stack, size_t size, void (*entry)()) {
    auto top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t(15)) - 2;  // 16-byte aligned
    *top = reinterpret_cast<void*>(entry);  // where emu_switch returns to
    memset(top - 6, 0, 6 * sizeof(void*));
    context.stack_pointer = top - 6;
}
#else
#include <ucontext.h>
struct Context { ucontext_t context; };
static void emu_switch(Context* from, Context* to) { swapcontext(&from->context, &to->context); }
static void prepare(Context& context, char* stack, size_t size, void (*entry)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = stack;
    context.context.uc_stack.ss_size = size;
    context.context.uc_link = nullptr;
    makecontext(&context.context, entry, 0);
}
#endif

namespace emu {
dim3 thread_index, block_index, block_size, grid_size;

namespace {
constexpr size_t kStack = 64 * 1024;          // bytes a thread; a larger frame is reported as an access outside everything
constexpr size_t kApart = kStack + 13 * 64;   // from stack to stack: at multiples of 4 KB all of them would share a few lines of the cache
constexpr size_t kGuard = 64 * 1024;          // bytes around every region that belong to nobody
constexpr long kSpin = 20'000'000;            // accesses of one thread without waiting: taken for a loop on a flag that nobody sets
constexpr unsigned kPoison = 0xFF;            // NaN as fp32 and bf16, -1 as an integer
constexpr long kMaxBytes = (1 << 20) - 1;     // what an mbarrier can expect
constexpr uint64_t kMbarrier = 0x6d62617272696572;  // the bytes of an mbarrier, xor its address

// ---- What threads know of each other. A thread's life is cut into stretches, from one release (an arrival at a barrier, a fence) to the
// next. A clock has at [u] the last stretch of thread u of the cluster that is known to be over, and in `others` the same of the launch's
// other clusters, by number; null: nothing is known. Shared, as a barrier gives all its threads the same.
using Stretches = std::vector<uint32_t>;
using Others = std::shared_ptr<const std::vector<std::shared_ptr<const Stretches>>>;
struct Known : Stretches {
    using Stretches::Stretches;
    Others others;
};
using Clock = std::shared_ptr<const Known>;

uint32_t last_over(const Stretches& s, size_t i) { return i < s.size() ? s[i] : 0; }
bool covers(const Stretches& a, const Stretches& b) {
    for (size_t i = 0; i < b.size(); i++) if (last_over(a, i) < b[i]) return false;
    return true;
}
void include(Stretches& to, const Stretches& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}
Others with_cluster(const Others& a, size_t number, const Stretches& stretches) {
    auto result = a ? std::make_shared<std::vector<std::shared_ptr<const Stretches>>>(*a)
                    : std::make_shared<std::vector<std::shared_ptr<const Stretches>>>();
    if (result->size() <= number) result->resize(number + 1);
    auto both = std::make_shared<Stretches>(stretches);
    if ((*result)[number]) include(*both, *(*result)[number]);
    (*result)[number] = both;
    return result;
}
Others join(const Others& a, const Others& b) {
    if (!b || a == b) return a;
    Others result = a;
    for (size_t i = 0; i < b->size(); i++) {
        const bool mine = result && i < result->size() && (*result)[i];
        if ((*b)[i] && !(mine && covers(*(*result)[i], *(*b)[i]))) result = with_cluster(result, i, *(*b)[i]);
    }
    return result;
}
Clock join(const Clock& a, const Clock& b) {
    if (!b || a == b) return a;
    if (!a) return b;
    const Others others = join(a->others, b->others);
    if (others == a->others && covers(*a, *b)) return a;
    if (join(b->others, a->others) == b->others && covers(*b, *a)) return b;
    auto both = std::make_shared<Known>(*a);
    include(*both, *b);
    both->others = others;
    return both;
}

struct Block;
struct Piece { char* to; const char* from; size_t bytes; };  // from null: zeros
struct Copy { std::vector<Piece> pieces; size_t bytes; uint32_t access; };  // `access`: the touch that its target has while it is in flight

struct Wait {  // for the report of a deadlock
    const char* what = nullptr;
    const char* file = nullptr;
    int line = 0;
    unsigned id = 0, threads = 0;     // of a named barrier; `id` is the parity at an mbarrier and the mask of a warp collective
    uintptr_t mbarrier = 0;
    bool operator==(const Wait& o) const {
        return what == o.what && file == o.file && line == o.line && id == o.id && threads == o.threads && mbarrier == o.mbarrier;
    }
};

struct Fiber {
    Context context;
    dim3 index;
    Block* block = nullptr;
    char* stack = nullptr;
    unsigned linear = 0, id = 0;      // in its block, and in its cluster
    bool done = false, waiting = false;
    Wait wait;
    uint32_t fenced = 0;              // touches before this number came before its last fence_async_shared()
    bool after_grid_wait = false;     // grid_dependency_wait() was called, by it or by a thread that it has waited for
    Clock known;
    Others released, seen;            // what its next atomics publish: as of its last fence; what they have found, for its next fence
    uint32_t stretch = 1;
    uint32_t version = 0;             // of its stretch and knowledge together
    std::vector<Copy> open_group;     // cp.async
    std::deque<std::vector<Copy>> groups;
    std::vector<uint32_t> started;    // touches of what it has started in tensor memory since its last commit
};

// What the threads that come to one barrier tell.
struct Gathering {
    Clock joined, last;               // `last`: what was added last, mostly the same clock again
    std::vector<std::pair<unsigned, uint32_t>> over;  // stretches that end with the arrival
    bool after_grid_wait = false;
    void add(Fiber&);
    void tell(Fiber&, const Clock&) const;  // a fiber that was added
    Clock finish();                         // and starts anew
};

struct Barrier {
    unsigned arrived = 0, expected = 0, first = 0;
    const char* file = nullptr;      // of the __syncthreads; null at a named one
    int line = 0;
    Gathering gathering;
    std::vector<Fiber*> waiting;
    std::vector<std::pair<unsigned, uint32_t>> before;  // of a named one: the arrivals of its last use
};

struct Meeting {  // the lanes of one mask of one warp
    unsigned arrived = 0, first = 0;
    const char *what = nullptr, *file = nullptr;
    int line = 0;
    void* lanes[32] = {};
};

struct Mbarrier {
    unsigned count = 0, pending = 0, phase = 0;
    long bytes = 0;                   // expected and not yet there
    unsigned engine = 0;              // the copies' place in a clock: [engine] counts the phases that have ended
    bool fenced = false;
    unsigned initialiser = 0;
    Gathering gathering;
    Clock last;                       // of the phase before this one
    bool last_after_grid_wait = false;
    std::vector<std::pair<Fiber*, unsigned>> waiting;  // with the parity
};

struct Bulk {
    Copy copy;
    uintptr_t mbarrier;
    std::vector<uint32_t> committed;  // of a commit: the touches that it ends
    bool after_grid_wait;             // the thread that started it was: who sees its end is too
};

// ---- Memory, and who touched it. A byte has two numbers: its writes and its reads, each the newest of a chain of touches. Touches are
// numbered through the whole call, so a number also says in which launch and which cluster it was made.
constexpr uint32_t kHost = 0, kNobody = 1, kFirstTouch = 2;  // "read by nobody" is 0
constexpr uint16_t kInFlight = 0xFFFF;                       // in place of a thread: an asynchronous copy, ordered before nothing yet
struct Touch {
    uint32_t earlier, stretch, place;
    uint16_t thread, atomic : 1, length : 15;  // of the chain
    uint16_t pipe = 0;  // 1 + the thread that started it, of a product in tensor memory: one thread's follow each other
};

struct Region {  // memory that a kernel may touch
    std::string name;
    const char* unit = "byte";
    uintptr_t begin = 0, end = 0;
    bool writable = false, weight = false, shared = false;
    std::vector<uint32_t> writes, reads;  // a number a byte; empty where nothing can be written
};

// What a warp has under way of its warpgroup's products.
struct Products {
    bool fenced = false, behind_commit = false;      // behind_commit: no fence since
    unsigned count = 0;                              // begun in all
    std::vector<uint32_t> open;                      // touches of the reads in flight, not yet committed
    std::deque<std::vector<uint32_t>> groups;
};

constexpr unsigned kLanes = 128, kColumns = 512;
struct TensorMemory {
    Region cells;                                    // a number a cell of 32 bits, lane by lane
    std::vector<uint32_t> values;
    unsigned sizes[kColumns] = {};                   // of the allocation that begins at a column
    bool used[kColumns] = {};
    bool relinquished = false;
};

struct Block {
    dim3 index;
    unsigned alive = 0;                // threads that have not ended
    Region shared;
    Barrier barriers[16];
    std::vector<Meeting> warps;                        // of all 32 lanes
    std::map<std::pair<unsigned, unsigned>, Meeting> parts;  // (warp, mask)
    std::vector<Products> products;                    // of each warp
    std::unique_ptr<TensorMemory> tensor;              // once it is allocated
};

struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Fiber> fibers;
    Barrier barrier;
    std::unordered_map<uintptr_t, Mbarrier> mbarriers;
    std::deque<Bulk> copies;
    unsigned engines = 0;
};

std::deque<Region> regions;        // global memory, registered by the host before the call; a deque, as pointers to them are kept
Cluster cluster;
Fiber* current = nullptr;          // null: host code runs, which is not checked
Context scheduler;
std::unique_ptr<char[]> stacks, arena;
size_t stacks_bytes = 0, arena_bytes = 0;
void (*body)(const void*);
const void* closure;
size_t closure_bytes;
const char* kernel_name = "";
struct Copied { void* to; const void* from; size_t bytes; Region* region; };
std::vector<Copied> queue;         // of the host's copies to the device; the first queue_done have been made
size_t queue_done = 0;
std::string error;
cudaError_t status = cudaSuccess;
bool reverse = false;
long accesses = 0;
bool waited_for_grid = false;      // any thread of the launch
unsigned launches = 0;             // of this call so far
bool launched_early = false;       // a thread of the launch called grid_dependency_launch() before grid_dependency_wait()
bool all_before_ended = false;     // when this launch began, but for the one just before: that one is of this call, and did not
bool reading_earlier = false;
std::vector<Touch> touches;
uint32_t launch_first = kFirstTouch;                      // the first touch of this launch
std::vector<std::pair<uint32_t, dim3>> clusters_begun;    // the first touch of each cluster of this launch, and its first block
std::unordered_map<uintptr_t, Others> published;          // what atomics of this launch have published, by the address in global memory
uint32_t versions = 0;

// Bytes with one history are many, so what an access makes of a chain is remembered: direct-mapped, by the chain, the thread's version and
// the access.
struct Memo { uint32_t chain, version, access, result; };
constexpr size_t kMemos = 8192;
Memo additions[kMemos], orders[kMemos];
Memo& memo(Memo (&table)[kMemos], uint32_t chain, uint32_t version, uint32_t access) {
    const uint32_t hash = chain * 0x9E3779B1u ^ version * 0xC2B2AE3Du ^ access * 0x27D4EB2Fu;
    return table[(hash ^ hash >> 15) % kMemos];
}

// Addresses to regions: a direct-mapped cache of pages. No two regions have bytes of one page, as kGuard is its size.
struct Page { uintptr_t page; Region* region; };
Page pages[256];

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
uint32_t place_of(const void* pc) { return uint32_t(static_cast<const char*>(pc) - &__ehdr_start); }
#define CALLER place_of(__builtin_return_address(0))

void Gathering::add(Fiber& f) {
    if (last != f.known) joined = join(joined, f.known), last = f.known;
    over.emplace_back(f.id, f.stretch++);
    f.version = ++versions;
    after_grid_wait |= f.after_grid_wait;
}
void Gathering::tell(Fiber& f, const Clock& clock) const {
    f.known = clock;  // which has all that the fiber knew
    f.version = ++versions;
    f.after_grid_wait |= after_grid_wait;
}
Clock Gathering::finish() {
    auto all = std::make_shared<Known>(cluster.fibers.size() + cluster.engines);
    if (joined) include(*all, *joined), all->others = joined->others;
    for (auto [thread, stretch] : over) (*all)[thread] = std::max((*all)[thread], stretch);
    joined.reset();
    last.reset();
    over.clear();
    return all;
}

void wait(const Wait& reason) {
    current->waiting = true;
    current->wait = reason;
    emu_switch(&current->context, &scheduler);
}

// ---- Races

const char* verb(Access kind) { return kind == Access::kRead ? "read" : kind == Access::kWrite ? "write" : "atomic update"; }

uint32_t touch(uint32_t earlier, unsigned thread, uint32_t stretch, bool atomic, uint32_t place) {
    const unsigned length = earlier < kFirstTouch ? 1 : std::min(touches[earlier].length + 1u, 32767u);
    touches.push_back({earlier, stretch, place, uint16_t(thread), atomic, uint16_t(length & 0x7fff), 0});
    return uint32_t(touches.size() - 1);
}
// The number of the cluster that made a touch of this launch.
size_t cluster_of(uint32_t number) {
    auto next = std::upper_bound(clusters_begun.begin(), clusters_begun.end(), number, [](uint32_t n, auto& c) { return n < c.first; });
    return size_t(next - clusters_begun.begin()) - 1;
}
bool ordered(uint32_t number) {
    if (number < launch_first) return true;
    const Touch& t = touches[number];
    if (number < clusters_begun.back().first) {
        const Others others = current->known ? current->known->others : nullptr;
        const size_t c = others ? cluster_of(number) : 0;
        return others && c < others->size() && (*others)[c] && last_over(*(*others)[c], t.thread) >= t.stretch;
    }
    if (t.thread == current->id) return true;
    return t.thread != kInFlight && current->known && t.thread < current->known->size() && (*current->known)[t.thread] >= t.stretch;
}

[[noreturn]] void race(const Region& r, size_t byte, Access kind, const char* did, uint32_t number, uint32_t place) {
    const Touch& t = touches[number];
    std::string who;
    const unsigned threads = block_size.x * block_size.y * block_size.z;
    if (t.thread == kInFlight)
        who = say("a %s in flight %s, with no wait for it between", *did == 'r' || t.pipe ? "product" : "copy",
                  *did == 'r' ? "reads" : "writes");
    else if (number < clusters_begun.back().first) {
        dim3 b = clusters_begun[cluster_of(number)].second;
        who = say("thread %u of block (%u,%u,%u) %s: nothing orders the blocks of a launch", t.thread % threads, b.x + t.thread / threads,
                  b.y, b.z, did);
    } else if (t.thread >= cluster.fibers.size()) who = say("a bulk copy wrote, with no wait for its mbarrier between");
    else if (cluster.blocks.size() > 1) {
        const Fiber& f = cluster.fibers[t.thread];
        who = say("thread %u of block (%u,%u,%u) %s with no barrier between", f.linear, f.block->index.x, f.block->index.y,
                  f.block->index.z, did);
    } else who = say("thread %u %s with no barrier between", t.thread, did);
    fail("%s of %s %zu of %s, which %s: @+0x%x, @+0x%x", verb(kind), r.unit, byte, r.name.c_str(), who.c_str(), place, t.place);
}

// Fails unless all touches of a chain come before the access, which is the current thread's.
void check_order(uint32_t chain, const Region& r, size_t byte, Access kind, const char* did, uint32_t place) {
    if (chain < launch_first) return;
    const bool atomic = kind == Access::kAtomic;
    auto conflict = [&](uint32_t t) { return !ordered(t) && !(atomic && touches[t].atomic); };
    if (touches[chain].earlier < launch_first) {
        if (conflict(chain)) race(r, byte, kind, did, chain, place);
        return;
    }
    Memo& m = memo(orders, chain, current->version, atomic);
    if (m.chain == chain && m.version == current->version && m.access == atomic) return;
    for (uint32_t t = chain; t >= launch_first; t = touches[t].earlier) if (conflict(t)) race(r, byte, kind, did, t, place);
    m = {chain, current->version, atomic, 0};
}

// The chain without what a later access cannot race with alone: touches that are known to come before the current one, and all but the
// newest of one thread. A plain write stays below atomic ones. Touches of other clusters keep their numbers.
uint32_t pruned(uint32_t chain, bool keep_plain) {
    static std::vector<uint32_t> kept, seen;  // seen[2 thread + atomic]: the call that met it
    static uint32_t call = 0;
    call++;
    kept.clear();
    const uint32_t first = clusters_begun.back().first;
    uint32_t t = chain;
    for (; t >= first && touches[t].thread != kInFlight; t = touches[t].earlier) {  // one in flight is still to change, so it stays
        const size_t who = 2 * size_t(touches[t].thread) + touches[t].atomic;
        if (who >= seen.size()) seen.resize(who + 1);
        if (seen[who] == call) continue;
        seen[who] = call;
        if (!ordered(t) || (keep_plain && !touches[t].atomic)) kept.push_back(t);
    }
    uint32_t head = t >= launch_first ? t : 0;
    for (auto i = kept.rbegin(); i != kept.rend(); ++i) {
        const Touch copy = touches[*i];
        head = touch(head, copy.thread, copy.stretch, copy.atomic, copy.place);
    }
    return head;
}

// The chain with the current access at its head.
uint32_t with_access(uint32_t chain, Access kind, uint32_t place) {
    const Fiber& me = *current;
    const bool atomic = kind == Access::kAtomic;
    auto mine = [&](const Touch& t) { return t.thread == me.id && t.stretch == me.stretch && t.atomic == atomic; };
    const uint32_t first = clusters_begun.back().first;
    if (chain >= first && mine(touches[chain])) return chain;
    const uint32_t access = place << 2 | unsigned(kind);
    Memo& m = memo(additions, chain, me.version, access);
    if (m.chain == chain && m.version == me.version && m.access == access) return m.result;
    uint32_t result = chain;
    bool there = false;
    if (chain >= first) {
        const unsigned length = touches[chain].length;
        if (length < 64)
            for (uint32_t t = chain; t >= first && !there; t = touches[t].earlier) there = mine(touches[t]);
        if (!there && (length % 64 == 0 || ordered(chain))) result = pruned(chain, atomic);
    }
    if (!there) result = touch(result < launch_first ? 0 : result, me.id, me.stretch, atomic, place);
    m = {chain, me.version, access, result};
    return result;
}

// An access of the current thread to bytes of one history: their new numbers.
__attribute__((always_inline)) inline void meet_history(uint32_t& writes, uint32_t& reads, const Region& r, size_t byte, Access kind,
                                                        uint32_t place) {
    if (kind == Access::kWrite) {
        const bool again = !reads && writes >= clusters_begun.back().first && touches[writes].thread == current->id &&
                           touches[writes].stretch == current->stretch && touches[writes].length == 1 && !touches[writes].atomic;
        if (again) return;
        check_order(writes, r, byte, kind, "wrote", place);
        check_order(reads, r, byte, kind, "read", place);
        writes = with_access(0, kind, place);
        reads = 0;
        return;
    }
    if (writes == kNobody) fail("read of %s %zu of %s, which nobody has written @+0x%x", r.unit, byte, r.name.c_str(), place);
    check_order(writes, r, byte, kind, "wrote", place);
    if (kind == Access::kRead) {
        reads = with_access(reads, kind, place);
    } else {
        check_order(reads, r, byte, kind, "read", place);
        writes = with_access(writes, kind, place);
    }
}

__attribute__((always_inline)) inline void track(Region& r, size_t byte, size_t size, Access kind, uint32_t place) {
    uint32_t *writes = &r.writes[byte], *reads = &r.reads[byte];
    for (size_t i = 0; i < size;) {  // by runs of one history: nearly always one
        const uint32_t w = writes[i], d = reads[i];
        uint32_t new_w = w, new_d = d;
        meet_history(new_w, new_d, r, byte + i, kind, place);
        do writes[i] = new_w, reads[i] = new_d, i++;
        while (i < size && writes[i] == w && reads[i] == d);
    }
}

// ---- Places

std::string where(uintptr_t address) {
    const Region* near = nullptr;
    uintptr_t distance = ~uintptr_t(0);
    auto consider = [&](const Region& r) {
        if (address >= r.begin && address < r.end) return;
        uintptr_t d = address >= r.end ? address - r.end : r.begin - address;
        if (d < distance) { distance = d; near = &r; }
    };
    for (auto& r : regions) consider(r);
    for (auto& b : cluster.blocks) consider(b->shared);
    for (auto& r : regions) if (address >= r.begin && address < r.end) return "in " + r.name;
    if (!near || distance > kGuard) return "outside every allocation";
    return say("%zu bytes %s %s (%zu bytes)", size_t(distance), address >= near->end ? "past the end of" : "before the start of",
               near->name.c_str(), size_t(near->end - near->begin));
}

Region* find(uintptr_t a) {
    Region& shared = current->block->shared;
    if (a >= shared.begin && a < shared.end) return &shared;
    Page& page = pages[a / kGuard % 256];
    if (page.region && page.page == a / kGuard && a >= page.region->begin && a < page.region->end) return page.region;
    for (auto& r : regions)
        if (a >= r.begin && a < r.end) { page = {a / kGuard, &r}; return &r; }
    for (auto& b : cluster.blocks)
        if (a >= b->shared.begin && a < b->shared.end) {
            if (!b->alive) fail("the shared memory of block (%u,%u,%u), whose threads have all ended", b->index.x, b->index.y, b->index.z);
            return &b->shared;
        }
    return nullptr;
}

[[noreturn]] __attribute__((noinline)) void outside(uintptr_t a, size_t size, Access kind, uint32_t place) {
    fail("%s of %zu bytes %s @+0x%x", verb(kind), size, where(a).c_str(), place);
}

__attribute__((noinline)) void before_grid_wait(const Region& r, Access kind, uint32_t place) {
    fail("%s of %s before grid_dependency_wait(): the kernel before may still be running (only a WEIGHT may be read) @+0x%x", verb(kind),
         r.name.c_str(), place);
}

__attribute__((always_inline)) inline void check_region(Region& r, uintptr_t a, size_t size, Access kind, uint32_t place) {
    if (a + size > r.end) fail("%s of %zu bytes across the end of %s @+0x%x", verb(kind), size, r.name.c_str(), place);
    if (!current->after_grid_wait && !reading_earlier && !r.shared && !(r.weight && kind == Access::kRead)) before_grid_wait(r, kind, place);
    if (r.writable) track(r, a - r.begin, size, kind, place);
    else if (kind != Access::kRead) fail("write to %s, which is an input @+0x%x", r.name.c_str(), place);
}

__attribute__((always_inline)) inline void check(const void* address, size_t size, bool write, const void* pc) {
    if (!current) return;
    uintptr_t a = reinterpret_cast<uintptr_t>(address);
    if (++accesses > kSpin) fail("deadlock: %ld accesses without waiting or ending: a loop on a flag that no other thread can set?", kSpin);
    if (a - reinterpret_cast<uintptr_t>(current->stack) <= kStack - size) return;
    const Access kind = write ? Access::kWrite : Access::kRead;
    const uint32_t place = place_of(pc);
    if (Region* r = find(a)) return check_region(*r, a, size, kind, place);
    if (!write) {  // the kernel's arguments, and constants of the object
        auto c = reinterpret_cast<uintptr_t>(closure), image = reinterpret_cast<uintptr_t>(&__ehdr_start);
        if ((a >= c && a + size <= c + closure_bytes) || (a >= image && a + size <= reinterpret_cast<uintptr_t>(&_end))) return;
    }
    outside(a, size, kind, place);
}
__attribute__((always_inline)) inline void check_aligned_access(const void* address, size_t size, bool write, const void* pc) {
    if (size > 1 && current && reinterpret_cast<uintptr_t>(address) % size)
        fail("%s of %zu bytes at an address that is no multiple of %zu @+0x%x", write ? "write" : "read", size, size, place_of(pc));
    check(address, size, write, pc);
}

// A block of shared memory that an instruction other than a plain load or store works on.
Region& shared_range(const void* address, size_t bytes, unsigned alignment, const char* what, uint32_t place) {
    uintptr_t a = reinterpret_cast<uintptr_t>(address);
    Region& s = current->block->shared;
    if (a < s.begin || a >= s.end) fail("%s: not an address in the block's shared memory, but %s @+0x%x", what, where(a).c_str(), place);
    if (a + bytes > s.end) fail("%s of %zu bytes across the end of shared memory @+0x%x", what, bytes, place);
    if (a % alignment) fail("%s: byte %zu of shared memory is no multiple of %u @+0x%x", what, size_t(a - s.begin), alignment, place);
    return s;
}

// ---- Asynchronous copies: the bytes move as late as the kernel allows. Until then the target is poison that belongs to nobody. What is in
// flight is a touch of no thread; when somebody has waited for it, that same touch becomes one of the thread, or of the mbarrier's phase.

// Loads through the read-only path, and the copy engine's, do not see what this launch has written with ordinary stores.
void check_not_written(const Region& r, uintptr_t a, size_t bytes, const char* what, uint32_t place) {
    for (size_t i = a - r.begin; r.writable && i < a - r.begin + bytes; i++)
        if (r.writes[i] >= launch_first && r.writes[i] >= kFirstTouch)
            fail("%s of byte %zu of %s, which this launch has written: it may see the old value: @+0x%x, @+0x%x", what, i, r.name.c_str(),
                 place, touches[r.writes[i]].place);
}

// Writes of threads that the copy engine is to follow need a fence, by the writer or by the thread that starts the copy.
void check_fenced(const Region& s, size_t first, size_t bytes, const char* what, uint32_t place) {
    for (size_t i = first; i < first + bytes; i++) {
        const uint32_t w = s.writes[i];
        if (w < clusters_begun.back().first || w < kFirstTouch || touches[w].thread >= cluster.fibers.size()) continue;
        if (w >= current->fenced && w >= cluster.fibers[touches[w].thread].fenced)
            fail("%s of byte %zu of shared memory, which thread %u wrote, with no fence_async_shared() between: @+0x%x, @+0x%x", what, i,
                 touches[w].thread, place, touches[w].place);
    }
}

// Bytes of global memory that an asynchronous copy reads.
void check_source_range(const void* from, size_t bytes, const char* what, uint32_t place) {
    const uintptr_t a = reinterpret_cast<uintptr_t>(from);
    Region* source = find(a);
    if (!source) outside(a, bytes, Access::kRead, place);
    if (source->shared) fail("%s: the source is shared memory @+0x%x", what, place);
    check_region(*source, a, bytes, Access::kRead, place);
    check_not_written(*source, a, bytes, what, place);
}
void check_source(const void* from, size_t bytes, const char* what, uint32_t place, unsigned alignment = 16) {
    if (reinterpret_cast<uintptr_t>(from) % alignment) fail("%s: the source is no multiple of %u @+0x%x", what, alignment, place);
    check_source_range(from, bytes, what, place);
}
// The target, which all that used it before must be ordered before: by the current thread, which starts the copy.
uint32_t begin_copy(void* to, size_t bytes, unsigned alignment, const char* what, uint32_t place) {
    Region& s = shared_range(to, bytes, alignment, what, place);
    const size_t first = reinterpret_cast<uintptr_t>(to) - s.begin;
    track(s, first, bytes, Access::kWrite, place);
    const uint32_t in_flight = touch(0, kInFlight, 0, false, place);
    std::fill_n(&s.writes[first], bytes, in_flight);
    memset(to, kPoison, bytes);
    return in_flight;
}
void end_copy(const Copy& c, unsigned thread, uint32_t stretch) {
    for (auto& p : c.pieces) p.from ? memcpy(p.to, p.from, p.bytes) : memset(p.to, 0, p.bytes);
    touches[c.access].thread = uint16_t(thread);
    touches[c.access].stretch = stretch;
}

Mbarrier& mbarrier_at(uint64_t* bar, const char* what, uint32_t place) {
    Region& s = shared_range(bar, 8, 8, what, place);
    uintptr_t a = reinterpret_cast<uintptr_t>(bar);
    if (*bar != (kMbarrier ^ a) || !cluster.mbarriers.count(a))
        fail("%s: no mbarrier at byte %zu of shared memory: mbarrier_init has not run, or it was written over @+0x%x", what,
             size_t(a - s.begin), place);
    track(s, a - s.begin, 8, Access::kAtomic, place);
    return cluster.mbarriers[a];
}

// What the phase that has ended last tells a thread that waits for it, whether it has arrived or not.
void learn(Fiber& f, const Mbarrier& m) {
    f.known = join(m.last, f.known);
    f.version = ++versions;
    f.after_grid_wait |= m.last_after_grid_wait;
}

// Ends the phase if nothing is missing.
void maybe_end_phase(Mbarrier& m) {
    if (m.pending || m.bytes) return;
    auto clock = std::const_pointer_cast<Known>(m.gathering.finish());  // fresh, so still ours to change
    (*clock)[m.engine] = m.phase + 1;
    m.last = clock;
    m.last_after_grid_wait = m.gathering.after_grid_wait;
    size_t kept = 0;
    for (auto& [fiber, parity] : m.waiting) {
        if (parity == (m.phase & 1)) learn(*fiber, m), fiber->waiting = false;
        else m.waiting[kept++] = {fiber, parity};
    }
    m.waiting.resize(kept);
    m.gathering.after_grid_wait = false;
    m.phase++;
    m.pending = m.count;
}

void give_up(cudaError_t code, const std::string& reason) {
    status = code;
    dim3 b = cluster.blocks[0]->index;
    error = say("%s: block (%u,%u,%u): ", kernel_name, b.x, b.y, b.z) + reason;
}

void finish_bulk(size_t i) {
    Bulk bulk = cluster.copies[i];
    cluster.copies.erase(cluster.copies.begin() + i);
    Mbarrier& m = cluster.mbarriers[bulk.mbarrier];
    m.gathering.after_grid_wait |= bulk.after_grid_wait;
    if (bulk.committed.empty()) {
        end_copy(bulk.copy, m.engine, m.phase + 1);
        m.bytes -= bulk.copy.bytes;
    } else {
        for (uint32_t t : bulk.committed) touches[t].thread = uint16_t(m.engine), touches[t].stretch = m.phase + 1;
        if (m.pending == 0) return give_up(719, "a commit of tensor products is more than the arrivals that its mbarrier was made for");
        m.pending--;
    }
    maybe_end_phase(m);
}

// ---- Blocks and their threads

void thread_main() {
    body(closure);
    current->done = true;
    current->block->alive--;
    emu_switch(&current->context, &scheduler);
}

std::string state_of(const Fiber& f) {
    if (f.done) return "exited";
    const Wait& w = f.wait;
    std::string place = say(" (%s:%d)", base_name(w.file), w.line);
    if (w.mbarrier) {
        const Mbarrier& m = cluster.mbarriers[w.mbarrier];
        return say("waiting at the mbarrier at byte %zu for parity %u", size_t(w.mbarrier - f.block->shared.begin), w.id) + place +
               say(", which has %u of %u arrivals and %ld bytes to come in phase %u", m.pending, m.count, m.bytes, m.phase);
    }
    if (w.threads) return say("waiting at barrier %u of %u threads", w.id, w.threads) + place;
    if (w.id) return say("waiting at %s of lanes 0x%08x", w.what, w.id) + place;
    return say("waiting at %s", w.what) + place;
}

// "threads 0-63 waiting at ...; threads 64-127 exited"
std::string who_waits_where() {
    std::string result;
    for (auto& b : cluster.blocks) {
        if (cluster.blocks.size() > 1) result += say("%sblock (%u,%u,%u) ", result.empty() ? "" : "; ", b->index.x, b->index.y, b->index.z);
        auto* f = &cluster.fibers[0];
        size_t n = cluster.fibers.size() / cluster.blocks.size();
        while (f->block != b.get()) f += n;
        bool first = true;
        for (size_t i = 0; i < n && result.size() < 400;) {
            size_t j = i;
            auto same = [](const Fiber& x, const Fiber& y) { return x.done == y.done && (x.done || x.wait == y.wait); };
            while (j + 1 < n && same(f[j + 1], f[i])) j++;
            result += (first ? "" : "; ") + (i == j ? say("thread %zu ", i) : say("threads %zu-%zu ", i, j)) + state_of(f[i]);
            first = false;
            i = j + 1;
        }
        if (result.size() >= 400) return result + "; ...";
    }
    return result;
}

std::string deadlock_report() {
    bool exited = false, at_sync = false;
    for (auto& f : cluster.fibers) { exited |= f.done; at_sync |= !f.done && !strcmp(f.wait.what, "__syncthreads"); }
    return (exited && at_sync ? "divergent barrier: " : "deadlock: ") + who_waits_where();
}

void prepare_cluster(dim3 first, unsigned blocks, size_t shared_bytes) {
    const unsigned n = block_size.x * block_size.y * block_size.z;
    clusters_begun.emplace_back(uint32_t(touches.size()), first);
    cluster.barrier = {};
    cluster.mbarriers.clear();
    cluster.copies.clear();
    cluster.engines = 0;
    cluster.fibers = std::vector<Fiber>(n * blocks);
    cluster.blocks.resize(blocks);
    for (unsigned rank = 0; rank < blocks; rank++) {
        if (!cluster.blocks[rank]) cluster.blocks[rank] = std::make_unique<Block>();
        Block& b = *cluster.blocks[rank];
        b.index = dim3(first.x + rank, first.y, first.z);
        b.alive = n;
        for (auto& barrier : b.barriers) barrier = {};
        b.warps.assign((n + 31) / 32, {});
        b.parts.clear();
        b.products.assign((n + 31) / 32, {});
        b.tensor.reset();
        b.shared.name = "shared memory";
        b.shared.begin = (reinterpret_cast<uintptr_t>(arena.get()) + kGuard + 1023) / 1024 * 1024 +
                         rank * (kGuard + (shared_bytes + 1023) / 1024 * 1024);
        b.shared.end = b.shared.begin + shared_bytes;
        b.shared.writable = b.shared.shared = true;
        b.shared.writes.assign(shared_bytes, kNobody);
        b.shared.reads.assign(shared_bytes, 0);
        memset(reinterpret_cast<void*>(b.shared.begin), kPoison, shared_bytes);
        for (unsigned i = 0; i < n; i++) {
            Fiber& f = cluster.fibers[rank * n + i];
            f.block = &b;
            f.linear = i;
            f.id = rank * n + i;
            f.version = ++versions;
            f.index = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
            f.stack = &stacks[f.id * kApart];
            prepare(f.context, f.stack, kStack, thread_main);
        }
    }
}

void run_cluster() {
    const size_t n = cluster.fibers.size();
    for (;;) {
        bool alive = false, progress = false;
        for (size_t i = 0; i < n; i++) {
            Fiber& f = cluster.fibers[reverse ? n - 1 - i : i];
            if (f.done) continue;
            alive = true;
            if (f.waiting) continue;
            progress = true;
            current = &f;
            thread_index = f.index;
            block_index = f.block->index;
            accesses = 0;
            emu_switch(&scheduler, &f.context);
            current = nullptr;
            if (status != cudaSuccess) return;
        }
        if (!alive) break;
        if (progress) continue;
        if (cluster.copies.empty()) return give_up(719, deadlock_report());  // cudaErrorLaunchFailure
        finish_bulk(reverse ? cluster.copies.size() - 1 : 0);
        if (status != cudaSuccess) return;
    }
    for (auto& f : cluster.fibers)
        if (!f.started.empty()) return give_up(719, say("thread %u ends with products in tensor memory that no commit follows", f.linear));
    for (auto& b : cluster.blocks)
        if (b->tensor && std::count(b->tensor->used, b->tensor->used + kColumns, true))
            return give_up(719, "the block ends with tensor memory allocated");
    for (auto& b : cluster.blocks)
        for (size_t w = 0; w < b->products.size(); w++) {
            const Products &mine = b->products[w], &first = b->products[w / 4 * 4];
            if (mine.count != first.count)
                return give_up(719,
                               say("warp %zu has begun %u products of its warpgroup, warp %zu %u", w, mine.count, w / 4 * 4, first.count));
            if (!mine.open.empty() || !mine.groups.empty())
                return give_up(719, say("warp %zu ends with products in flight: no wgmma_wait<0>()", w));
        }
    if (!cluster.copies.empty())
        give_up(719, say("all threads have ended, and %zu bulk copies into their shared memory have not: nobody waited for them",
                         cluster.copies.size()));
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
    emu_switch(&current->context, &scheduler);  // the fibers are abandoned
    __builtin_unreachable();
}

void* shared_memory() { return reinterpret_cast<void*>(current->block->shared.begin); }
unsigned linear_thread() { return current->linear; }
cudaError_t last_error() { cudaError_t result = status; status = cudaSuccess; return result; }

cudaError_t copy_to_device(void* to, const void* from, size_t bytes) {
    const uintptr_t a = reinterpret_cast<uintptr_t>(to);
    for (auto& r : regions)
        if (a >= r.begin && a + bytes <= r.end && r.writable) {
            queue.push_back({to, from, bytes, &r});
            return cudaSuccess;
        }
    error = say("copy of %zu bytes to the device: the target is %s", bytes, where(a).c_str());
    return 700;
}
cudaError_t record(cudaEvent_t& event) { event = reinterpret_cast<cudaEvent_t>(queue.size() + 1); return cudaSuccess; }
cudaError_t wait_for(cudaEvent_t event) {
    for (const size_t end = reinterpret_cast<size_t>(event) - 1; queue_done < end; queue_done++) {
        const Copied& c = queue[queue_done];
        memcpy(c.to, c.from, c.bytes);
        std::fill_n(c.region->writes.begin() + (reinterpret_cast<uintptr_t>(c.to) - c.region->begin), c.bytes, kHost);
    }
    return cudaSuccess;
}

void access(const void* address, size_t size, Access kind, unsigned alignment, const char* what, const void* pc) {
    uintptr_t a = reinterpret_cast<uintptr_t>(address);
    if (a % alignment) fail("%s: the address is no multiple of %u bytes @+0x%x", what, alignment, place_of(pc));
    Region* r = find(a);
    if (!r) outside(a, size, kind, place_of(pc));
    check_region(*r, a, size, kind, place_of(pc));
}

// An atomic publishes what its thread knew at its last fence, and finds what others have published at the same address, which the thread
// knows from its next fence on. (Within shared memory it says nothing: what orders a block's threads is barriers.)
void atomic(const void* address, size_t size, const char* what, const void* pc) {
    access(address, size, Access::kAtomic, unsigned(size), what, pc);
    const uintptr_t a = reinterpret_cast<uintptr_t>(address);
    if (find(a)->shared) return;
    Others& here = published[a];
    current->seen = join(current->seen, here);
    here = join(here, current->released);
}
void fence() {
    Fiber& f = *current;
    auto known = f.known ? std::make_shared<Known>(*f.known) : std::make_shared<Known>(cluster.fibers.size());
    const size_t mine = clusters_begun.size() - 1;
    known->others = join(known->others, f.seen);
    if (f.seen && mine < f.seen->size() && (*f.seen)[mine]) include(*known, *(*f.seen)[mine]);
    if (known->size() <= f.id) known->resize(f.id + 1);
    (*known)[f.id] = f.stretch++;
    f.known = known;
    f.version = ++versions;
    f.released = with_cluster(known->others, mine, *known);
}

// The current lane comes to the meeting of `mask`; all must come to the same instruction. Whether it is the last one.
static bool come(Meeting& m, unsigned mask, void* mine, const char* what, const char* file, int line) {
    const unsigned me = current->linear % 32;
    if (!m.arrived) { m.what = what; m.file = file; m.line = line; m.first = current->linear; }
    if (m.line != line || (m.file != file && strcmp(m.file, file)) || (m.what != what && strcmp(m.what, what)))
        fail("divergent warp: %s at %s:%d, but thread %u came to %s at %s:%d", what, base_name(file), line, m.first, m.what,
             base_name(m.file), m.line);
    m.lanes[me] = mine;
    m.arrived |= 1u << me;
    return m.arrived == mask;
}
// The fibers of a mask of the current warp.
template <class F> static void each_lane(unsigned mask, F f) {
    Fiber* first = current - current->linear % 32;
    for (unsigned i = 0; i < 32; i++) if (mask >> i & 1) f(first[i], i);
}

void meet(unsigned mask, void* mine, void (*combine)(void* const*), bool orders_memory, const char* what, const char* file, int line) {
    const unsigned me = current->linear % 32, warp = current->linear / 32;
    if (!(mask >> me & 1)) fail("%s: lane %u is not in its own mask 0x%08x", what, me, mask);
    const unsigned present = block_size.x * block_size.y * block_size.z - warp * 32;
    if (present < 32 && mask >> present)
        fail("%s: mask 0x%08x names lanes that the block's last warp of %u threads does not have", what, mask, present);
    // Lanes of overlapping masks may still be on their way to this one, so each mask has a meeting of its own.
    Block& block = *current->block;
    Meeting& m = mask == ~0u ? block.warps[warp] : block.parts[{warp, mask}];
    if (!come(m, mask, mine, what, file, line)) return wait({what, file, line, mask, 0, 0});
    m.arrived = 0;
    if (combine) combine(m.lanes);
    Gathering gathering;
    if (orders_memory) each_lane(mask, [&](Fiber& f, unsigned) { gathering.add(f); });
    Clock clock = orders_memory ? gathering.finish() : nullptr;
    each_lane(mask, [&](Fiber& f, unsigned i) {
        if (orders_memory) gathering.tell(f, clock);
        f.waiting = false;
        m.lanes[i] = nullptr;
    });
}

static void end_barrier(Barrier& b) {
    const Clock clock = b.gathering.finish();
    for (Fiber* f : b.waiting) b.gathering.tell(*f, clock), f->waiting = false;
    b.waiting.clear();
    b.gathering.after_grid_wait = false;
    b.arrived = 0;
}

void sync_block(const char* file, int line) {
    Barrier& b = current->block->barriers[0];
    if (b.arrived == 0) {
        b.expected = block_size.x * block_size.y * block_size.z;
        b.file = file;
        b.line = line;
        b.first = current->linear;
    }
    if (!b.file)
        fail("divergent barrier 0: __syncthreads at %s:%d, but thread %u came to bar_sync or bar_arrive", base_name(file), line, b.first);
    if (b.line != line || strcmp(b.file, file))
        fail("divergent barrier: __syncthreads at %s:%d, but thread %u came to the one at %s:%d", base_name(file), line, b.first,
             base_name(b.file), b.line);
    b.gathering.add(*current);
    b.waiting.push_back(current);
    if (++b.arrived < b.expected) return wait({"__syncthreads", file, line, 0, 0, 0});
    end_barrier(b);
}

// Two uses of a named barrier, one after the other, may have different warps. That they do not mix is for the kernel to say: a warp must
// know of every other warp's arrival at the use before (of any lane's, as a warp comes as one), or it could have come in that warp's place.
// And a warp that comes twice to one use has not waited for the others.
static void check_use(const Barrier& b, int id, unsigned mask) {
    Clock known;
    each_lane(mask, [&](Fiber& f, unsigned) { known = join(known, f.known); });
    for (auto& arrival : b.gathering.over)
        if (cluster.fibers[arrival.first].linear / 32 == current->linear / 32)
            fail("barrier %d of %u threads: the warp has come to this use of it already", id, b.expected);
    auto warp_of = [&](size_t i) { return cluster.fibers[b.before[i].first].linear / 32; };
    for (size_t i = 0, first = 0; i < b.before.size(); first = i) {
        bool after = warp_of(i) == current->linear / 32;
        for (; i < b.before.size() && warp_of(i) == warp_of(first); i++)
            after |= known && b.before[i].first < known->size() && (*known)[b.before[i].first] >= b.before[i].second;
        if (!after)
            fail("barrier %d of %u threads: nothing orders this arrival after that of threads %u-%u at the barrier's use before, so these "
                 "could meet in the same use", id, b.expected, cluster.fibers[b.before[first].first].linear,
                 cluster.fibers[b.before[i - 1].first].linear);
    }
}

// A warp comes to a named barrier as one: its lanes meet first, and the last to come acts for all.
void named_barrier(int id, unsigned threads, bool blocking, const char* file, int line) {
    const unsigned size = block_size.x * block_size.y * block_size.z;
    if (id < 0 || id > 15) fail("barrier %d: a block has barriers 0 to 15", id);
    if (threads == 0 || threads % 32) fail("barrier %d of %u threads: not a multiple of 32", id, threads);
    if (threads > size) fail("barrier %d of %u threads in a block of %u", id, threads, size);
    const unsigned left = size - current->linear / 32 * 32, mask = left >= 32 ? ~0u : (1u << left) - 1;
    const Wait reason{"barrier", file, line, unsigned(id), threads, 0};
    Meeting& m = current->block->warps[current->linear / 32];
    if (!come(m, mask, nullptr, blocking ? "bar_sync" : "bar_arrive", file, line)) return wait(reason);
    m.arrived = 0;
    Barrier& b = current->block->barriers[id];
    if (b.arrived == 0) { b.expected = threads; b.file = nullptr; b.first = current->linear / 32 * 32; }
    if (b.expected != threads) fail("divergent barrier %d: %u threads expected here, %u by thread %u", id, threads, b.expected, b.first);
    check_use(b, id, mask);
    each_lane(mask, [&](Fiber& f, unsigned) {
        b.gathering.add(f);
        if (blocking) b.waiting.push_back(&f);
        else f.waiting = false;
    });
    b.arrived += 32;
    if (b.arrived == threads) b.before = b.gathering.over, end_barrier(b);
    else if (blocking) wait(reason);
}

// ---- Matrix instructions

namespace {
template <int K, class Decode> void multiply(Fragments* const* lanes, Decode decode) {
    constexpr int per = K / 8;  // values of one register
    float a[K][16], b[K][8], c[16][8];
    for (int l = 0; l < 32; l++) {
        const int g = l / 4, q = l % 4;
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < per; j++) a[per * (q + 4 * (i / 2)) + j][g + 8 * (i % 2)] = decode(lanes[l]->a[i], j);
            c[g + 8 * (i / 2)][2 * q + i % 2] = lanes[l]->c[i];
        }
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < per; j++) b[per * (q + 4 * i) + j][g] = decode(lanes[l]->b[i], j);
    }
    for (int k = 0; k < K; k++)
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 8; column++) c[row][column] += a[k][row] * b[k][column];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) lanes[l]->c[i] = c[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
}
template <class T> T bits_as(uint32_t bits) { T x; memcpy(&x, &bits, sizeof x); return x; }
}  // namespace

Sums mma(Values values, Fragments mine, const char* what, const char* file, int line) {
    auto of = [](void* const* lanes) { return reinterpret_cast<Fragments* const*>(lanes); };
    static_assert(std::is_same_v<decltype(of(nullptr)), Fragments* const*>);
    void (*combine)(void* const*) = nullptr;
    if (values == Values::kBf16)
        combine = [](void* const* lanes) {
            multiply<16>(reinterpret_cast<Fragments* const*>(lanes),
                         [](uint32_t r, int j) { return bits_as<float>(j ? r & 0xffff0000u : r << 16); });
        };
    else if (values == Values::kF16)
        combine = [](void* const* lanes) {
            multiply<16>(reinterpret_cast<Fragments* const*>(lanes),
                         [](uint32_t r, int j) { return half_to_float(uint16_t(r >> 16 * j)); });
        };
    else
        combine = [](void* const* lanes) {
            multiply<32>(reinterpret_cast<Fragments* const*>(lanes), [](uint32_t r, int j) { return e4m3_to_float(uint8_t(r >> 8 * j)); });
        };
    meet(~0u, &mine, combine, false, what, file, line);
    Sums sums;
    memcpy(sums.c, mine.c, sizeof sums.c);
    return sums;
}

namespace {
struct Matrices { uint16_t row[8]; Four registers; };  // a lane's row in memory, and its part of each matrix
// Values 2 q and 2 q + 1 of row g, or (transposed) rows 2 q and 2 q + 1 of column g.
template <bool transposed> void load_matrices(void* const* lanes) {
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) {
            uint32_t pair = 0;
            for (int j = 0; j < 2; j++) {
                const int along = 2 * (l % 4) + j, across = l / 4;
                const auto& row = static_cast<const Matrices*>(lanes[8 * i + (transposed ? along : across)])->row;
                pair |= uint32_t(row[transposed ? across : along]) << 16 * j;
            }
            static_cast<Matrices*>(lanes[l])->registers.r[i] = pair;
        }
}
template <bool transposed> void store_matrices(void* const* lanes) {
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++)
            for (int half = 0; half < 2; half++) {
                const int row = transposed ? 2 * (l % 4) + half : l / 4, column = transposed ? l / 4 : 2 * (l % 4) + half;
                const uint32_t pair = static_cast<const Matrices*>(lanes[l])->registers.r[i];
                static_cast<Matrices*>(lanes[8 * i + row])->row[column] = uint16_t(pair >> 16 * half);
            }
}
}  // namespace

// A row is read (or written) by the lane that gives its address.
Four ldmatrix(const void* row, int matrices, bool transposed, const char* what, const char* file, int line) {
    const uint32_t place = CALLER;
    Matrices mine{};
    if (int(current->linear % 32) < 8 * matrices) {  // the other lanes' addresses are not used
        Region& s = shared_range(row, 16, 16, what, place);
        track(s, reinterpret_cast<uintptr_t>(row) - s.begin, 16, Access::kRead, place);
        memcpy(mine.row, row, 16);
    }
    meet(~0u, &mine, transposed ? load_matrices<true> : load_matrices<false>, false, what, file, line);
    return mine.registers;
}
void stmatrix(void* row, Four registers, bool transposed, const char* what, const char* file, int line) {
    const uint32_t place = CALLER;
    Matrices mine{{}, registers};
    meet(~0u, &mine, transposed ? store_matrices<true> : store_matrices<false>, false, what, file, line);
    Region& s = shared_range(row, 16, 16, what, place);
    track(s, reinterpret_cast<uintptr_t>(row) - s.begin, 16, Access::kWrite, place);
    memcpy(row, mine.row, 16);
}

// ---- Copies and mbarriers

void read_only(const void* p, size_t size) {
    const uintptr_t a = reinterpret_cast<uintptr_t>(p);
    if (Region* r = find(a); r && a + size <= r->end)
        check_not_written(*r, a, size, "__ldg", CALLER);  // what is outside, the load will find
}
Four load_stream(const void* p) {
    access(p, 16, Access::kRead, 16, "load_stream", __builtin_return_address(0));
    const uintptr_t a = reinterpret_cast<uintptr_t>(p);
    check_not_written(*find(a), a, 16, "load_stream", CALLER);
    Four v;
    memcpy(v.r, p, 16);
    return v;
}

void cp_async(void* shared, const void* global, unsigned bytes, bool there, const char* what) {
    const uint32_t place = CALLER;
    if (there) check_source(global, bytes, what, place, bytes);
    const uint32_t access = begin_copy(shared, bytes, bytes, what, place);
    const char* source = there ? static_cast<const char*>(global) : nullptr;
    current->open_group.push_back({{{static_cast<char*>(shared), source, bytes}}, bytes, access});
}
void cp_async_commit() {
    current->groups.push_back(std::move(current->open_group));
    current->open_group.clear();
}
void cp_async_wait(unsigned groups) {
    while (current->groups.size() > groups) {
        for (auto& copy : current->groups.front()) end_copy(copy, current->id, current->stretch);
        current->groups.pop_front();
    }
}

void mbarrier_init(uint64_t* bar, unsigned count) {
    const uint32_t place = CALLER;
    Region& s = shared_range(bar, 8, 8, "mbarrier_init", place);
    uintptr_t a = reinterpret_cast<uintptr_t>(bar);
    if (count == 0 || count >= 1u << 20) fail("mbarrier_init: a count of %u is not in 1 to 1048575 @+0x%x", count, place);
    if (*bar == (kMbarrier ^ a)) fail("mbarrier_init: byte %zu of shared memory is an mbarrier already @+0x%x", size_t(a - s.begin), place);
    track(s, a - s.begin, 8, Access::kWrite, place);
    *bar = kMbarrier ^ a;
    Mbarrier& m = cluster.mbarriers[a] = {};
    m.count = m.pending = count;
    m.engine = unsigned(cluster.fibers.size()) + cluster.engines++;
    m.initialiser = current->id;
}
void fence_async() {
    current->fenced = uint32_t(touches.size());
    mbarrier_fence();
}
void mbarrier_fence() {
    for (auto& [address, m] : cluster.mbarriers) if (m.initialiser == current->id) m.fenced = true;
}
void mbarrier_arrive(uint64_t* bar, unsigned bytes, const char* what) {
    const uint32_t place = CALLER;
    Mbarrier& m = mbarrier_at(bar, what, place);
    if (m.pending == 0)
        fail("%s: more than the %u arrivals that the mbarrier was made for, in phase %u @+0x%x", what, m.count, m.phase, place);
    if (m.bytes + long(bytes) > kMaxBytes)
        fail("%s: %ld bytes are more than an mbarrier can expect (%ld) @+0x%x", what, m.bytes + bytes, kMaxBytes, place);
    m.bytes += bytes;
    m.pending--;
    m.gathering.add(*current);
    maybe_end_phase(m);
}
void mbarrier_wait(uint64_t* bar, unsigned parity, const char* file, int line) {
    const uint32_t place = CALLER;
    if (parity > 1) fail("mbarrier_wait: a parity of %u is not 0 or 1 @+0x%x", parity, place);
    Mbarrier& m = mbarrier_at(bar, "mbarrier_wait", place);
    if ((m.phase & 1) == parity) {
        m.waiting.emplace_back(current, parity);
        return wait({"mbarrier_wait", file, line, parity, 0, reinterpret_cast<uintptr_t>(bar)});
    }
    if (m.last) learn(*current, m);  // there is no phase before the first
}
// A copy of the copy engine, to be made of `pieces`.
static void start_bulk(void* shared, std::vector<Piece> pieces, size_t bytes, unsigned alignment, uint64_t* bar, const char* what,
                       uint32_t place) {
    Mbarrier& m = mbarrier_at(bar, what, place);
    if (!m.fenced)
        fail("%s: no mbarrier_fence_init() since mbarrier_init, so the copy engine may not see the mbarrier @+0x%x", what, place);
    Region& s = shared_range(shared, bytes, alignment, what, place);
    check_fenced(s, reinterpret_cast<uintptr_t>(shared) - s.begin, bytes, what, place);
    const uint32_t access = begin_copy(shared, bytes, alignment, what, place);
    cluster.copies.push_back({{std::move(pieces), bytes, access}, reinterpret_cast<uintptr_t>(bar), {}, current->after_grid_wait});
}
void bulk_load(void* shared, const void* global, unsigned bytes, uint64_t* bar) {
    const uint32_t place = CALLER;
    if (bytes == 0 || bytes % 16) fail("bulk_load: %u bytes are no multiple of 16 @+0x%x", bytes, place);
    check_source(global, bytes, "bulk_load", place);
    start_bulk(shared, {{static_cast<char*>(shared), static_cast<const char*>(global), bytes}}, bytes, 16, bar, "bulk_load", place);
}

#include "tensor.h"

void grid_wait() {
    current->after_grid_wait = true;
    current->version = ++versions;
    waited_for_grid = true;
}
void grid_launch() { launched_early |= !current->after_grid_wait; }
uint64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
int load_earlier(const int* p) {
    const uint32_t place = CALLER;
    const Region* r = find(reinterpret_cast<uintptr_t>(p));
    if (!current->after_grid_wait && r && !r->weight) {
        if (!all_before_ended) fail("load_earlier of %s before grid_dependency_wait(): no kernel of this call came just before that launched "
                                    "this one behind its own wait @+0x%x", r->name.c_str(), place);
        if (r->writable) fail("load_earlier of %s, which the kernel before may be writing @+0x%x", r->name.c_str(), place);
    }
    reading_earlier = true;
    check_aligned_access(p, sizeof *p, false, __builtin_return_address(0));
    reading_earlier = false;
    return *p;
}

// ---- Conversions, to nearest even

namespace {
// The code of |x| in a format with M stored mantissa bits and smallest normal exponent E; a mantissa that is full carries into the
// exponent.
template <int M, int E> unsigned encode(double x) {
    if (x == 0) return 0;
    int e;
    frexp(x, &e);
    e = std::max(e - 1, E);
    return (unsigned(e - E) << M) + unsigned(nearbyint(ldexp(x, M - e)));
}
float bf16_to_float(uint16_t x) { return bits_as<float>(uint32_t(x) << 16); }
}  // namespace

float half_to_float(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16, e = x >> 10 & 31, m = x & 1023;
    if (e == 31) return bits_as<float>(sign | 0x7f800000 | m << 13);
    if (e == 0) return sign ? -float(m) * 0x1p-24f : float(m) * 0x1p-24f;
    return bits_as<float>(sign | (e + 112) << 23 | m << 13);
}
uint16_t float_to_half(float x) {
    if (x != x) return 0x7fff;
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (fabsf(x) >= 65520) return sign | 0x7c00;
    return uint16_t(sign | encode<10, -14>(fabsf(x)));
}
float e4m3_to_float(uint8_t x) {
    static const auto table = [] {
        std::vector<float> t(256);
        for (int i = 0; i < 256; i++) {
            const int e = i >> 3 & 15, m = i & 7;
            const float v = (i & 127) == 127 ? NAN : ldexpf(float(e ? 8 + m : m), std::max(e, 1) - 10);
            t[i] = i & 128 ? -v : v;
        }
        return t;
    }();
    return table[x];
}
uint8_t float_to_e4m3(float x) {
    if (x != x) return 0x7f;
    const unsigned code = fabsf(x) > 448 ? 0x7e : encode<3, -6>(fabsf(x));
    return uint8_t((std::signbit(x) ? 0x80 : 0) | code);
}
uint16_t multiply_add_bf16(uint16_t a, uint16_t b, uint16_t c) {
    const double p = double(bf16_to_float(a)) * bf16_to_float(b), q = bf16_to_float(c);  // the product is exact
    double sum = p + q;
    if (sum != sum) return 0x7fff;
    if (std::isfinite(sum)) {
        // Where the sum is not exact, the neighbour with an odd last bit: 53 bits that are rounded once more to 8 then round as the exact
        // sum would.
        const double part = sum - p, rest = (p - (sum - part)) + (q - part);
        uint64_t bits;
        memcpy(&bits, &sum, 8);
        if (rest != 0 && !(bits & 1)) sum = nextafter(sum, rest > 0 ? INFINITY : -INFINITY);
    }
    const uint16_t sign = std::signbit(sum) ? 0x8000 : 0;
    if (std::isinf(sum)) return sign | 0x7f80;
    return uint16_t(sign | std::min(encode<7, -126>(fabs(sum)), 0x7f80u));
}

#if defined(__x86_64__)
// An integer division by zero is a signal on this processor; a GPU goes on with some value. While a launch runs, it is a mistake of the
// current thread. SA_NODEFER: the handler does not return, and the signal stays open.
namespace {
struct Divisions {
    struct sigaction before;
    Divisions() {
        struct sigaction mine = {};
        mine.sa_sigaction = [](int, siginfo_t*, void* context) {
            const auto pc = reinterpret_cast<const char*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
            if (!current) abort();
            fail("an integer division by zero, or whose result is too large @+0x%x", place_of(pc + 1));  // one on, as for a call
        };
        mine.sa_flags = SA_SIGINFO | SA_NODEFER;
        sigaction(SIGFPE, &mine, &before);
    }
    ~Divisions() { sigaction(SIGFPE, &before, nullptr); }
};
}  // namespace
#else
struct Divisions {};
#endif

void launch(const char* name, dim3 grid, dim3 threads, unsigned blocks, size_t shared_bytes, void (*run)(const void*), const void* c,
            size_t c_bytes) {
    if (status != cudaSuccess) return;  // an earlier launch of this call has failed
    const size_t n = size_t(threads.x) * threads.y * threads.z;
    kernel_name = name;
    if (n == 0 || n > 1024 || threads.z > 64 || !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 ||
        shared_bytes > 227 * 1024 || !blocks || blocks > 8 || grid.x % blocks) {
        status = 9;  // cudaErrorInvalidConfiguration
        error = say("%s: launch of grid (%u,%u,%u), clusters of %u, block (%u,%u,%u), %zu bytes of shared memory: beyond a GPU's limits",
                    name, grid.x, grid.y, grid.z, blocks, threads.x, threads.y, threads.z, shared_bytes);
        return;
    }
    grid_size = grid, block_size = threads, body = run, closure = c, closure_bytes = c_bytes;
    if (stacks_bytes < n * blocks * kApart) stacks.reset(new char[stacks_bytes = n * blocks * kApart]);
    const size_t needed = blocks * (shared_bytes + kGuard + 1024) + kGuard + 1024;
    if (arena_bytes < needed) arena.reset(new char[arena_bytes = needed]);
    launch_first = uint32_t(touches.size());
    clusters_begun.clear();
    published.clear();
    waited_for_grid = false;
    all_before_ended = launches++ && !launched_early;
    launched_early = reading_earlier = false;
    [[maybe_unused]] const Divisions divisions;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x += blocks) {
                prepare_cluster(reverse ? dim3(grid.x - blocks - x, grid.y - 1 - y, grid.z - 1 - z) : dim3(x, y, z), blocks, shared_bytes);
                run_cluster();
                if (status != cudaSuccess) return;
            }
    if (!waited_for_grid)
        give_up(719, "no thread calls grid_dependency_wait(): the kernel after this one may start before the one before has ended");
}

unsigned cluster_rank() { return current->id / unsigned(cluster.fibers.size() / cluster.blocks.size()); }
unsigned cluster_size() { return unsigned(cluster.blocks.size()); }
void* cluster_map(const void* shared, unsigned rank) {
    Region& mine = shared_range(shared, 1, 1, "cluster_map", CALLER);
    if (rank >= cluster.blocks.size()) fail("cluster_map: rank %u in a cluster of %zu blocks", rank, cluster.blocks.size());
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(shared) - mine.begin + cluster.blocks[rank]->shared.begin);
}
void cluster_sync(const char* file, int line) {
    Barrier& b = cluster.barrier;
    b.gathering.add(*current);
    b.waiting.push_back(current);
    if (++b.arrived < cluster.fibers.size()) return wait({"cluster_sync", file, line, 0, 0, 0});
    end_barrier(b);
}
}  // namespace emu

// The host's side (emulator.py, by ctypes). kind: 0 an input, 1 an output, 2 both, 3 an input that no kernel writes, 4 a workspace
extern "C" {
void emu_reset(int reverse) {
    using namespace emu;
    regions.clear();
    error.clear();
    status = cudaSuccess;
    launches = 0;
    queue.clear();
    queue_done = 0;
    emu::reverse = reverse;
    std::vector<Touch>(kFirstTouch).swap(touches);  // memory too: of a long launch 500 MB
    memset(additions, 0, sizeof additions);  // version 0 is nobody's
    memset(orders, 0, sizeof orders);
    memset(pages, 0, sizeof pages);
}
void emu_region(const char* name, uintptr_t begin, size_t size, int kind) {
    emu::Region r;
    r.name = name;
    r.begin = begin;
    r.end = begin + size;
    r.writable = kind == 1 || kind == 2 || kind == 4;
    r.weight = kind == 3;
    if (r.writable) {
        r.writes.assign(size, kind == 2 ? emu::kHost : emu::kNobody);
        r.reads.assign(size, 0);
    }
    emu::regions.push_back(std::move(r));
}
size_t emu_unwritten(size_t i) { auto& w = emu::regions[i].writes; return std::count(w.begin(), w.end(), emu::kNobody); }
const char* emu_error() { return emu::error.c_str(); }

// What -fsanitize=thread calls. The plain forms are promises of alignment: a GPU faults where one is broken.
#define EMU_ACCESS(n)                                                                                                             \
    void __tsan_read##n(void* a) { emu::check_aligned_access(a, n, false, __builtin_return_address(0)); }                         \
    void __tsan_write##n(void* a) { emu::check_aligned_access(a, n, true, __builtin_return_address(0)); }                         \
    void __tsan_unaligned_read##n(void* a) { emu::check(a, n, false, __builtin_return_address(0)); }                              \
    void __tsan_unaligned_write##n(void* a) { emu::check(a, n, true, __builtin_return_address(0)); }                              \
    void __tsan_volatile_read##n(void* a) { emu::check_aligned_access(a, n, false, __builtin_return_address(0)); }                \
    void __tsan_volatile_write##n(void* a) { emu::check_aligned_access(a, n, true, __builtin_return_address(0)); }
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
