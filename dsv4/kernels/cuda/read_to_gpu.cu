// read_to_gpu: ranges of a file to a GPU's memory, by way of pinned slots. The host's work alone, without a kernel. It is C because a load's
// reading threads are Python's: each of their calls gives the interpreter's lock away and waits to have it back, and the thread that binds
// the weights waits along. A call reads a piece (loader.PIECE). Measured on an H200 with 16 cores, from the page cache: 40 GB/s, and 27
// with some calls of Python for each piece (docs/measurements.md).
#include <cerrno>
#include <unistd.h>

#include "common.cuh"

namespace {
constexpr int kMaxSlots = 8;

// What says that a slot's copy has ended. Events belong to a device, so they are made for each call, which takes 1 us.
struct Copies {
    cudaEvent_t events[kMaxSlots] = {};
    bool under_way[kMaxSlots] = {};

    ~Copies() {
        for (cudaEvent_t event : events)
            if (event) cudaEventDestroy(event);
    }
    cudaError_t wait(int slot) {
        if (!under_way[slot]) return cudaSuccess;
        under_way[slot] = false;
        return cudaEventSynchronize(events[slot]);
    }
    cudaError_t begin(int slot, char* to, const char* from, size_t bytes, cudaStream_t stream) {
        cudaError_t error = cudaSuccess;
        if (!events[slot]) error = cudaEventCreateWithFlags(&events[slot], cudaEventDisableTiming);
        if (!error) error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
        if (!error) error = cudaEventRecord(events[slot], stream);
        under_way[slot] = !error;
        return error;
    }
};

// Reads up to `bytes`; fewer at the file's end and where it fails, then with the errno.
int64_t read_whole(int file, char* to, int64_t bytes, int64_t from, int& failed) {
    int64_t done = 0;
    while (done < bytes) {
        const ssize_t got = pread(file, to + done, bytes - done, from + done);
        if (got > 0) {
            done += got;
        } else if (got == 0 || errno != EINTR) {
            failed = got ? errno : 0;
            break;
        }
    }
    return done;
}
}  // namespace

// ranges [count, 3]: where in the file, how many bytes, where in `to`; slots: slot_count of slot_bytes each, pinned; stop [1]: the host sets
// it to another number than 0 to have no more read. Returns when all that was read has been copied; then found [3] says how far that is: in
// which range (count: all are done), how many of its bytes, and the errno of what failed (0: the file's end, or `stop`).
extern "C" int read_to_gpu(const int64_t* ranges, char* to, char* slots, int64_t* found, const int* stop, int file, int count,
                           int slot_bytes, int slot_count, cudaStream_t stream) {
    if (slot_bytes < 1 || slot_count < 1 || slot_count > kMaxSlots) return cudaErrorInvalidValue;
    Copies copies;
    cudaError_t error = cudaSuccess;
    int64_t range = 0, done = 0;
    int failed = 0;
    for (int slot = 0; range < count && !error; slot = (slot + 1) % slot_count) {
        const int64_t begin = ranges[3 * range], left = ranges[3 * range + 1] - done;
        if (*static_cast<const volatile int*>(stop)) break;
        const int64_t bytes = left < slot_bytes ? left : slot_bytes;
        char* place = slots + static_cast<int64_t>(slot) * slot_bytes;
        if ((error = copies.wait(slot))) break;
        const int64_t got = read_whole(file, place, bytes, begin + done, failed);
        if (got) error = copies.begin(slot, to + ranges[3 * range + 2] + done, place, got, stream);
        done += got;
        if (got < bytes) break;
        if (done == ranges[3 * range + 1]) range++, done = 0;
    }
    for (int slot = 0; slot < slot_count; slot++) {
        const cudaError_t last = copies.wait(slot);
        if (!error) error = last;
    }
    found[0] = range, found[1] = done, found[2] = failed;
    return error;
}
