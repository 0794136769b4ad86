// hop: the streams and the token of a decode step from one GPU to the next. The sender stores them into the next GPU's memory, the
// receiver waits there until they have come; the host waits for neither.
//
// Data and flag are one store: a packet is 8 bytes of data in two words of 8 bytes, each with half of them and the step's number, and a
// word comes whole or not at all (a relaxed 64-bit access of system scope). So nothing has to be ordered: a flag behind the data would need
// a fence, which waits until the other GPU has acknowledged the data, about 1 us. The price is twice the bytes: 115 KB for Pro's streams of
// 57 KB, 0.3 us at the 390 GB/s that were measured between two H200.
// Measured between two H200: 2.1 us, as the runner reports it (by events and copies 12.2; docs/measurements.md). Predicted were 3.3: one
// dependent launch 1.8, the loads from L2 0.5, the link 0.7 (measured for a flag) and the bytes 0.3.
//
// A number is used once, and a receiver takes its own only: packets of another step are waited past, so steps that do not pair up end at
// the limit and not in wrong streams. What was sent is overwritten by the next step's: see GraphDecoder, which starts none before.
#include "common.cuh"

constexpr int kThreads = 256;      // a packet each
constexpr unsigned kPolls = 1024;  // between two looks at the clock; a poll is a trip to L2, 0.6 us or more

__global__ void __launch_bounds__(kThreads) hop_send_kernel(const uint64_t* streams, const uint64_t* token, uint64_t* packets,
                                                            const int64_t* sequence, int words) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i > words) return;
    const uint64_t number = static_cast<uint64_t>(*sequence) << 32, data = i < words ? streams[i] : *token;
    store_pair_system(packets + 2 * i, number | static_cast<uint32_t>(data), number | data >> 32);
}

__global__ void __launch_bounds__(kThreads) hop_receive_kernel(uint64_t* streams, uint64_t* token, const uint64_t* packets,
                                                               const int64_t* sequence, int* failed, int words, uint64_t limit) {
    grid_dependency_launch();  // the next kernel's weights may come meanwhile: all blocks of this one have their place
    grid_dependency_wait();
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i > words) return;
    const uint32_t number = static_cast<uint32_t>(*sequence);
    uint64_t low, high, began = 0;
    for (unsigned polls = 1;; polls++) {
        load_pair_system(packets + 2 * i, low, high);
        if (low >> 32 == number && high >> 32 == number) break;
        if (polls % kPolls) continue;
        const uint64_t now = global_nanoseconds();
        if (began == 0) began = now;
        if (now - began > limit) {
            store_system(failed, 1);
            return;
        }
    }
    *(i < words ? streams + i : token) = high << 32 | static_cast<uint32_t>(low);
}

// streams: `words` times 8 bytes (null: 0), token [1]; packets [words + 1] of 16 bytes, aligned to them, in the receiver's memory;
// sequence [1]: the number of the step, of which the lower 32 bits are used, and which is never 0. With `receive`, waits for limit_ms and
// then sets failed [1], which may be the host's memory, and leaves what did not come as it was; else failed is not used.
extern "C" int hop(void* streams, void* token, void* packets, const int64_t* sequence, int* failed, int words, int receive, int limit_ms,
                   cudaStream_t stream) {
    if (words < 0 || (words > 0 && !streams) || (receive && (!failed || limit_ms < 1))) return cudaErrorInvalidValue;
    const dim3 grid(words / kThreads + 1), block(kThreads);
    auto *values = static_cast<uint64_t*>(streams), *id = static_cast<uint64_t*>(token), *to = static_cast<uint64_t*>(packets);
    if (receive)
        LAUNCH(hop_receive_kernel, grid, block, 0, stream, values, id, to, sequence, failed, words, uint64_t(limit_ms) * 1'000'000);
    else
        LAUNCH(hop_send_kernel, grid, block, 0, stream, values, id, to, sequence, words);
    return cudaGetLastError();
}
