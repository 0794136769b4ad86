"""The emulator finds each planted mistake, names it, and computes what a GPU does where there is none."""

import ctypes
import platform
import re
import signal

import pytest
import torch

from dsv4.kernels.launch import HOST, IN, INOUT, OUT, WORK, Kernel

from .emulator import GUARD, HERE, EmulatorError, Guarded, Machine, needs_gxx

pytestmark = needs_gxx
SOURCE = HERE / "faults.cu"
FAULTS = re.findall(r"\bk\w+", re.search(r"enum Fault \{(.*?)\};", SOURCE.read_text(), re.DOTALL)[1])
KERNEL = Kernel("faults", {"x": IN, "out": OUT, "blocks": int, "fault": int})


def run(fault: str, reverse=False, blocks=2, x=None):
    x = torch.arange(64.0 * blocks) if x is None else x
    out = torch.empty_like(x)
    error = Machine(SOURCE, reverse).run(KERNEL, [x, out, blocks, FAULTS.index(fault)])
    assert error == 0
    return out


@pytest.mark.parametrize("reverse", [False, True])
def test_a_right_kernel_runs_in_either_order_of_threads(reverse):
    x = torch.randn(128)
    assert torch.equal(run("kNone", reverse, x=x), x + x.view(2, 64).roll(-1, 1).flatten())


# Which of the two comes second is the order of threads.
TWO_PLACES = r": at faults.cu:\d+, at faults.cu:\d+$"
RACE = r"(read|write|atomic update) of byte \d+ of shared memory, which thread \d+ (read|wrote) with no barrier between" + TWO_PLACES
UNORDERED = r"read of byte \d+ of out, which thread \d+ of block \(\d,0,0\) wrote: nothing orders the blocks of a launch" + TWO_PLACES
IN_FLIGHT = r"read of byte \d+ of shared memory, which a copy in flight writes, with no wait for it between" + TWO_PLACES
NOT_EARLIER = r"no kernel of this call came just before that launched this one behind its own wait at faults.cu:\d+$"
EXPECTED = {
    "kReadPastEnd": r"block \(1,0,0\) thread \(63,0,0\): read of 4 bytes 0 bytes past the end of x \(512 bytes\) at faults.cu:\d+",
    "kReadBefore": r"block \(0,0,0\) thread \(0,0,0\): read of 4 bytes 4 bytes before the start of x \(512 bytes\) at faults.cu:\d+$",
    "kFarRead": r"thread \(0,0,0\): read of 4 bytes outside every allocation at faults.cu:\d+$",
    "kStraddle": r"block \(1,0,0\) thread \(63,0,0\): read of 4 bytes across the end of x at faults.cu:\d+$",
    "kUnaligned": r"thread \(0,0,0\): read of 4 bytes at an address that is no multiple of 4 at faults.cu:\d+$",
    "kWritePastEnd": r"block \(1,0,0\) thread \(63,0,0\): write of 4 bytes 0 bytes past the end of out",
    "kWriteInput": r"write to x, which is an input at faults.cu:\d+$",
    "kReadOutput": r"thread \(63,0,0\): read of byte 252 of out, which nobody has written at faults.cu:\d+$",
    "kSkipOutput": r"8 of the 512 bytes of output out were never written",
    "kSharedPastEnd": r"thread \(63,0,0\): write of 4 bytes 0 bytes past the end of shared memory \(256 bytes\)",
    "kSharedUnwritten": r"read of 4 bytes 0 bytes past the end of shared memory \(256 bytes\)",
    "kSharedStale": r"block \(1,0,0\) thread \(63,0,0\): read of byte 252 of shared memory, which nobody has written",
    "kRaceWrites": r"write of byte 0 of shared memory, which thread \d+ wrote with no barrier between: at faults.cu:\d+, at faults.cu:\d+$",
    "kRaceReadThenWrite": RACE,
    "kRaceShuffle": RACE,
    "kRaceAtomic": RACE,
    "kRaceAtomicAfterPlain": RACE,
    "kRaceNamed": RACE,
    "kMissingBarrier": r"read of byte 4 of shared memory, which nobody has written",
    "kEarlyReturn": r"divergent barrier: threads 0-31 waiting at __syncthreads \(faults.cu:\d+\); threads 32-63 exited",
    "kTwoPlaces": r"thread \(32,0,0\): divergent barrier: __syncthreads at faults.cu:\d+, but thread 0 came to the one at faults.cu:\d+",
    "kNamedShort": r"barrier 1 of 96 threads in a block of 64",
    "kNamedCounts": r"divergent barrier 1: 32 threads expected here, 64 by thread 0",
    "kNamedUneven": r"barrier 1 of 33 threads: not a multiple of 32",
    "kNamedId": r"barrier 16: a block has barriers 0 to 15",
    "kSpin": r"thread \(0,0,0\): deadlock: 20000000 accesses without waiting",
    "kShuffle32": r"__shfl_xor_sync: 32 is not in 0 to 31",
    "kLaneOutsideMask": r"warp collective reads lane 8, which mask 0x000000ff does not name",
    "kNotInMask": r"thread \(8,0,0\): __shfl_sync: lane 8 is not in its own mask 0x000000ff",
    "kDivergentWarp": r"deadlock: threads 0-15 exited; threads 16-31 waiting at __shfl_sync of lanes 0xffffffff",
    "kDifferentCollectives": r"divergent warp: __shfl_down_sync at faults.cu:\d+, but thread 0 came to __shfl_xor_sync at faults.cu:\d+",
    "kMissingLane": r"deadlock: threads 0-6 waiting at __shfl_sync of lanes 0xffffffff \(faults.cu:\d+\); thread 7 exited",
    "kLastWarp": r"mask 0xffffffff names lanes that the block's last warp of 16 threads does not have",
    "kMisaligned": r"vector access to an address that is no multiple of 16 bytes",
    "kTooManyThreads": r"block \(1025,1,1\), 256 bytes of shared memory: beyond a GPU's limits",
    "kReadBeforeGridWait": r"read of x before grid_dependency_wait\(\): .* at faults.cu:\d+$",
    "kWriteBeforeGridWait": r"write of out before grid_dependency_wait\(\)",
    "kNoGridWait": r"no thread calls grid_dependency_wait\(\)",
    "kGlobalWrites": r"write of byte 8 of out, which thread 0 wrote with no barrier between: at faults.cu:\d+, at faults.cu:\d+$",
    "kGlobalReadThenWrite": r"(read|write) of byte \d+ of out, which thread \d+ (read|wrote) with no barrier between",
    "kGlobalOtherBlock": r"read of byte 252 of out, which thread 63 of block \(0,0,0\) wrote: nothing orders the blocks of a launch",
    "kGlobalPlainAndAtomic": r"atomic update of byte 0 of out, which thread 0 of block \(0,0,0\) wrote: nothing orders",
    "kReadOnlyWritten": r"load_stream of byte \d+ of out, which this launch has written: it may see the old value" + TWO_PLACES,
    "kLdgWritten": r"__ldg of byte \d+ of out, which this launch has written: it may see the old value" + TWO_PLACES,
    "kMmaHalfWarp": r"divergent warp: mma_bf16 at faults.cu:\d+, but thread 31 came to stmatrix_x4 at faults.cu:\d+$",
    "kMmaTwoPlaces": r"divergent warp: mma_bf16 at faults.cu:\d+, but thread \d+ came to mma_bf16 at faults.cu:\d+$",
    "kLdmatrixMisaligned": r"ldmatrix_x4: byte 504 of shared memory is no multiple of 16 at faults.cu:\d+$",
    "kLdmatrixUnwritten": r"thread \(9,0,0\): read of byte 144 of shared memory, which nobody has written at faults.cu:\d+$",
    "kLdmatrixGlobal": r"ldmatrix_x4: not an address in the block's shared memory, but in x at faults.cu:\d+$",
    "kLdmatrixRace": r"read of byte 512 of shared memory, which nobody has written",
    "kStmatrixRace": RACE,
    "kAsyncNoWait": IN_FLIGHT,
    "kAsyncFewGroups": IN_FLIGHT,
    "kAsyncUncommitted": IN_FLIGHT,
    "kAsyncNoBarrier": r"read of byte \d+ of shared memory, which thread 0 wrote with no barrier between",
    "kAsyncReuse": RACE,
    "kAsyncReuseLate": r"write of byte \d+ of shared memory, which thread (3[2-9]|4\d) read with no barrier between" + TWO_PLACES,
    "kAsyncMisaligned": r"cp_async_16: byte 4 of shared memory is no multiple of 16",
    "kAsyncSource": r"read of 16 bytes 0 bytes past the end of x \(512 bytes\) at faults.cu:\d+$",
    "kBulkNoWait": r"read of byte 0 of shared memory, which nobody has written",
    "kBulkOtherWait": r"read of byte \d+ of shared memory, which a bulk copy wrote, with no wait for its mbarrier between" + TWO_PLACES,
    "kBulkReuse": IN_FLIGHT,
    "kBulkNotAwaited": r"all threads have ended, and 1 bulk copies into their shared memory have not",
    "kBulkUnfenced": r"bulk_load: no mbarrier_fence_init\(\) since mbarrier_init",
    "kBulkAfterStore": r"bulk_load of byte 20 of shared memory, which thread 0 wrote, with no fence_async_shared\(\) between" + TWO_PLACES,
    "kBulkSize": r"bulk_load: 250 bytes are no multiple of 16",
    "kBulkMisaligned": r"bulk_load: byte 4 of shared memory is no multiple of 16",
    "kBulkSource": r"read of 256 bytes 0 bytes past the end of x \(512 bytes\)",
    "kBulkPastEnd": r"bulk_load of 256 bytes across the end of shared memory",
    "kBulkTooEarly": r"read of x before grid_dependency_wait\(\)",
    "kMbarrierNone": r"mbarrier_wait: no mbarrier at byte 256 of shared memory: mbarrier_init has not run, or it .* at faults.cu:\d+$",
    "kMbarrierOverwritten": r"mbarrier_wait: no mbarrier at byte 256 of shared memory",
    "kMbarrierNoBarrier": r"atomic update of byte 256 of shared memory, which thread 0 wrote with no barrier between",
    "kMbarrierParity": r"deadlock: thread 0 waiting at the mbarrier at byte 264 for parity 0 \(faults.cu:\d+\), which has 32 of 32 "
                       r"arrivals and 0 bytes to come in phase 0; threads 1-31 exited; threads 32-63 waiting at the mbarrier at byte 256",
    "kMbarrierEarly": r"read of byte 0 of shared memory, which nobody has written",
    "kMbarrierArrivals": r"mbarrier_arrive: more than the 1 arrivals that the mbarrier was made for, in phase 0",
    "kMbarrierExpect": r"mbarrier_expect: 1048576 bytes are more than an mbarrier can expect \(1048575\)",
    "kMbarrierBytes": r"threads 32-63 waiting at the mbarrier at byte 256 .*, which has 0 of 1 arrivals and 256 bytes to come in phase 0$",
    "kMbarrierTwice": r"mbarrier_init: byte 256 of shared memory is an mbarrier already",
    "kMbarrierMisaligned": r"mbarrier_init: byte 244 of shared memory is no multiple of 8",
    "kClusterNoSync": r"read of byte 252 of shared memory, which nobody has written",
    "kClusterRank": r"cluster_map: rank 2 in a cluster of 2 blocks",
    "kClusterExited": r"the shared memory of block \(1,0,0\), whose threads have all ended",
    "kClusterMissing": r"deadlock: block \(0,0,0\) threads 0-62 waiting at cluster_sync \(faults.cu:\d+\); thread 63 exited; block",
    "kNamedReused": r"read of byte \d+ of shared memory, which thread \d+ wrote with no barrier between",
    "kTensorNoMap": r"tensor_load: no TensorMap that make_tensor_map has made at faults.cu:\d+$",
    "kTensorMisaligned": r"tensor_load: byte 16 of shared memory is no multiple of 128",
    "kTensorColumn": r"tensor_load: column -4 begins at byte -8 of the matrix' rows, no multiple of 16 at faults.cu:\d+$",
    "kTensorPastEnd": r"read of 32 bytes 0 bytes past the end of x \(512 bytes\) at faults.cu:\d+$",
    "kWgmmaNoFence": r"wgmma: no wgmma_fence\(\) before the first product, or since the last wait",
    "kWgmmaNoWait": r"warp 0 ends with products in flight: no wgmma_wait<0>\(\)",
    "kWgmmaNoProxyFence": r"wgmma of byte 0 of shared memory, which thread 0 wrote, with no fence_async_shared\(\) between" + TWO_PLACES,
    "kWgmmaUnwritten": r"wgmma: read of byte 1232 of shared memory, which nobody has written at faults.cu:\d+$",
    "kWgmmaOverwritten": r"write of byte 0 of shared memory, which a product in flight reads, with no wait for it between" + TWO_PLACES,
    "kWgmmaOneWarpLess": r"warp 3 has begun 0 products of its warpgroup, warp 0 1$",
    "kWgmmaFewThreads": r"wgmma_bf16: the warpgroup has fewer than 128 threads",
    "kWgmmaRegistersNoFence": r"wgmma: no wgmma_fence\(\) since the last commit, before registers of a are read .* at faults.cu:\d+$",
    "kWgmmaLanesDiffer": r"wgmma: lane 5 has other operands than lane 0 at faults.cu:\d+$",
    "kTensorColumns": r"tensor_alloc: 48 columns are not 32, 64, 128, 256 or 512 at faults.cu:\d+$",
    "kTensorNotAllocated": r"tensor_mma_bf16: the block has no tensor memory allocated",
    "kTensorNotFreed": r"the block ends with tensor memory allocated$",
    "kTensorNoCommit": r"thread 0 ends with products in tensor memory that no commit follows$",
    "kTensorNotAwaited": r"read of cell \d+ of tensor memory \(512 a lane\), which nobody has written",
    "kTensorVersion": r"tensor_mma_bf16: a descriptor of version 0, not 1",
    "kTensorShape": r"tensor_mma_bf16: the instruction descriptor 0x08040010 is not one of tensor_shape",
    "kTensorLanes": r"tensor_load_8: warp 1 of its warpgroup has lanes 32 to 63, not 0",
    "kTensorScaleByte": r"tensor_mma_mxfp4: the instruction descriptor 0x28840480 is not one of tensor_shape",
    "kTensorNoScales": r"tensor_mma_mxfp4: lane 0, column 16 of tensor memory was not written",
    "kTensorUnwritten": r"tensor_mma_bf16: adds to lane 0, column 0 of d, which was not written",
    "kTensorOverwritten": r"write of byte 0 of shared memory, which a product in flight reads, with no wait for it between" + TWO_PLACES,
    "kDivideByZero": r"thread \(0,0,0\): an integer division by zero, or whose result is too large at faults.cu:\d+$",
    "kRemainderOfZero": r"thread \(0,0,0\): an integer division by zero, or whose result is too large at faults.cu:\d+$",
    "kNamedHalves": r"barrier 1 of 64 threads: nothing orders this arrival after that of threads 0-31 at the barrier's use before, so",
    "kNamedAhead": r"barrier 1 of 64 threads: nothing orders this arrival after that of threads 32-63 at the barrier's use before, so",
    "kNamedTwice": r"barrier 1 of 64 threads: the warp has come to this use of it already$",
    "kArriveUnfenced": UNORDERED,
    "kArriveUnseen": UNORDERED,
    "kArriveNoBarrier": UNORDERED,
    "kEarlierAlone": r"load_earlier of x before grid_dependency_wait\(\): " + NOT_EARLIER,
    "kEarlierTooEarly": r"load_earlier of x before grid_dependency_wait\(\): " + NOT_EARLIER,
    "kEarlierWritten": r"load_earlier of out, which the kernel before may be writing at faults.cu:\d+$",
    "kEarlierPastEnd": r"thread \(0,0,0\): read of 4 bytes 0 bytes past the end of x \(512 bytes\) at faults.cu:\d+$",
    "kTooMuchShared": r"233472 bytes of shared memory: beyond a GPU's limits",
}


def skip_unless_divisions_trap(fault):
    if fault in ("kDivideByZero", "kRemainderOfZero") and platform.machine() != "x86_64":
        pytest.skip("a division by zero is no signal on this processor")


def test_every_fault_is_in_the_table():
    assert EXPECTED.keys() == set(FAULTS) - {"kNone"}


@pytest.mark.parametrize("fault", EXPECTED)
def test_planted_fault(fault):
    skip_unless_divisions_trap(fault)
    with pytest.raises(EmulatorError, match=EXPECTED[fault]) as caught:
        run(fault)
    assert "\n" not in str(caught.value) and "@+" not in str(caught.value)
    assert run("kNone").isfinite().all()  # and the next launch is not disturbed


def test_a_missing_barrier_is_found_in_both_orders():
    """Each order hides some: here thread 0 reads its right neighbour, and in reverse thread 63 reads thread 0."""
    with pytest.raises(EmulatorError, match=r"thread \(63,0,0\): read of byte 0 of shared memory, which nobody has written"):
        run("kMissingBarrier", reverse=True)


@pytest.mark.parametrize("fault", [f for f in EXPECTED if f.startswith("kRace")])
def test_a_race_is_found_in_reverse_too(fault):
    with pytest.raises(EmulatorError, match="with no barrier between"):
        run(fault, reverse=True)


@pytest.mark.parametrize("fault", [f for f in EXPECTED if f.startswith("kArrive")])
def test_blocks_that_nothing_orders_are_found_in_reverse_too(fault):
    with pytest.raises(EmulatorError, match=UNORDERED):
        run(fault, reverse=True, blocks=3)


@pytest.mark.parametrize("fault,threads", [("kNamedHalves", "96-127"), ("kNamedAhead", "32-63")])
def test_groups_that_may_mix_at_a_named_barrier_are_found_in_reverse_too(fault, threads):
    """Each order takes them apart, one group after the other."""
    with pytest.raises(EmulatorError, match=f"nothing orders this arrival after that of threads {threads} at the barrier's use before"):
        run(fault, reverse=True)


def test_an_empty_tensor_has_a_place_and_a_null_pointer_none():
    x, empty = torch.arange(64.0), torch.empty(0)
    for arguments, message in (((x, empty), r"63,0,0\): write of 4 bytes 252 bytes past the end of out \(0 bytes\)"),
                               ((empty, x), r"0,0,0\): read of 4 bytes 0 bytes past the end of x \(0 bytes\)"),
                               ((None, empty), r"0,0,0\): read of 4 bytes outside every allocation"),
                               ((None, x), r"0,0,0\): read of 4 bytes outside every allocation"),
                               ((x, None), r"63,0,0\): write of 4 bytes outside every allocation")):
        with pytest.raises(EmulatorError, match=message + r" at faults.cu:\d+$"):
            Machine(SOURCE).run(KERNEL, [*arguments, 1, FAULTS.index("kNone")])


def test_a_division_by_zero_is_caught_as_often_as_it_comes_and_only_in_a_launch():
    skip_unless_divisions_trap("kDivideByZero")

    def handler():
        action = ctypes.create_string_buffer(512)  # a struct sigaction
        assert ctypes.CDLL(None).sigaction(int(signal.SIGFPE), None, action) == 0
        return ctypes.c_void_p.from_buffer(action).value

    before = handler()
    for _ in range(3):
        with pytest.raises(EmulatorError, match="faults: divisions: block .0,0,0. thread .0,0,0.: an integer division"):
            run("kDivideByZero")
    assert handler() == before


@pytest.mark.parametrize("fault,message", [
    ("kTensorNotAwaited", "a product in flight writes"), ("kBulkNoWait", "a copy in flight writes"),
    ("kBulkOtherWait", "a copy in flight writes")])
def test_what_is_in_flight_belongs_to_nobody(fault, message):
    """In this order the reader comes after the start, and the newest copy ends first."""
    with pytest.raises(EmulatorError, match=message):
        run(fault, reverse=True)


@pytest.mark.parametrize("reverse", [False, True])
def test_barriers_syncwarp_atomics_and_named_barriers_order_accesses(reverse):
    """The kernel of the planted races with none of them."""
    x, out = torch.randn(128), torch.empty(128)
    assert Machine(SOURCE, reverse).run(Kernel("ordered", {"x": IN, "out": OUT, "blocks": int}), [x, out, 2]) == 0
    assert torch.equal(out, x.view(4, 32).roll(-1, 1).flatten() + 64 - 64)


RIGHT_FORMS = ("global_memory", "matrices", "async_copies", "ring", "cluster", "reused", "tensor", "product", "tensor_memory", "two_copies",
               "halves", "rounds", "divisions", "arrivals", "earlier")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("which", range(len(RIGHT_FORMS)), ids=RIGHT_FORMS)
def test_no_fault_no_report(rng, which, reverse):
    """The kernels of the planted faults of later instructions, right."""
    x = torch.randn(128, generator=rng)
    if RIGHT_FORMS[which] == "divisions":
        x = x.abs() + 1
    out = torch.empty(128 if RIGHT_FORMS[which] in ("cluster", "halves", "arrivals") else 64)
    assert Machine(SOURCE, reverse).run(Kernel("right_forms", {"x": IN, "out": OUT, "which": int}), [x, out, which]) == 0
    want = {"global_memory": x[:64], "tensor": x[:64], "two_copies": x[:64],
            "async_copies": 2 * x[:64], "cluster": x.view(2, 64).flip(0, 1).flatten(), "rounds": x[:64], "earlier": x[:64],
            "halves": x.view(2, 64).flip(1).flatten(),
            "divisions": (100 // x[63].trunc()).expand(64)}
    if RIGHT_FORMS[which] == "arrivals":  # the last block has summed the values of both, and the counter is 0 again
        assert torch.equal(out.view(2, 64)[:, :63], (x[:63] + x[64:127]).expand(2, 63)) and out[63].view(torch.int32) == 0
    if RIGHT_FORMS[which] in want:
        assert torch.equal(out, want[RIGHT_FORMS[which]])
    if RIGHT_FORMS[which] == "ring":  # twice the same 64 values
        torch.testing.assert_close(out[32:], 2 * x[:64].sum().expand(32), rtol=0, atol=1e-4)


@pytest.mark.parametrize("reverse", [False, True])
def test_named_barriers_of_a_producer_and_a_consumer(reverse):
    x, out = torch.randn(64), torch.empty(64)
    assert Machine(SOURCE, reverse).run(Kernel("producer_consumer", {"x": IN, "out": OUT}), [x, out]) == 0
    assert torch.equal(out, 2 * x)


def row_bits(f):
    """The bits of floats, with one NaN."""
    return torch.where(f.isnan(), float("nan"), f).view(torch.int32)


def lanes(x, index):
    """Each warp's values at `index` [32] of the warp."""
    return x.view(2, 32)[:, index].flatten()


@pytest.mark.parametrize("reverse", [False, True])
def test_collectives_atomics_and_conversions(rng, reverse):
    """Against the CUDA programming guide's definitions, written with tensors."""
    x = torch.randn(64, generator=rng) * torch.exp2(torch.randint(-20, 20, (64,), generator=rng))
    x[:6] = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1 + 2**-8, 1 + 3 * 2**-8])  # the last two are ties of bf16
    k = torch.randint(-5, 6, (64,), generator=rng, dtype=torch.int32)
    f, i, counters = torch.empty(10, 64), torch.empty(8, 64, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    kernel = Kernel("instructions", {"x": IN, "k": IN, "f": OUT, "i": OUT, "counters": OUT})
    assert Machine(SOURCE, reverse).run(kernel, [x, k, f, i, counters]) == 0
    lane = torch.arange(32)
    down8, up8 = lane + 3, lane - 3
    want = torch.stack([
        lanes(x, torch.full((32,), 3)), lanes(x, lane // 8 * 8 + 3), lanes(x, lane ^ 5),
        lanes(x, torch.where(lane + 3 < 32, lane + 3, lane)), lanes(x, torch.where(lane >= 3, lane - 3, lane)),
        lanes(x, torch.where(down8 // 8 == lane // 8, down8, lane)), lanes(x, torch.where(up8 // 8 == lane // 8, up8, lane)),
        x.bfloat16().float(), f[8], lanes(x, torch.where(lane < 16, lane ^ 1, lane ^ 2)),
    ])
    assert (row_bits(f) == row_bits(want)).all(1).tolist() == [True] * 10
    root = (x.double().square() + 1).rsqrt()
    torch.testing.assert_close(f[8].double(), root, rtol=3 * 2**-24, atol=0, equal_nan=True)  # square and sum halve under the root
    warps = k.view(2, 32).long()
    ballot = ((warps > 0).long() << lane).sum(1).to(torch.int32)  # wraps as the GPU's 32 bits do
    unsigned_max = (warps % 2**32).amax(1).to(torch.int32)
    per_warp = torch.stack([ballot, (warps == 5).any(1).int(), (warps < 5).all(1).int(), warps.sum(1).int(), warps.amax(1).int(),
                            warps.amin(1).int(), unsigned_max])
    assert torch.equal(i[:7], per_warp.repeat_interleave(32, 1).int()) and torch.equal(i[7], x.view(torch.int32))
    assert counters.tolist() == [64, max(0, int(k.max())), min(0, int(k.min())), int(k.sum())]


@pytest.mark.parametrize("reverse", [False, True])
def test_coordinates_in_three_dimensions(reverse):
    out = torch.empty(12 * 30, dtype=torch.int32)
    assert Machine(SOURCE, reverse).run(Kernel("numbering", {"out": OUT}), [out]) == 0
    assert torch.equal(out.view(12, 30), (torch.arange(12)[:, None] * 1000 + torch.arange(30)).int())


def test_memory_of_a_call():
    """What a kernel may read is copied in, what it may write out, 0xFF around; on a GPU, a write there is found afterwards."""
    kernel = Kernel("k", {"a": IN, "b": OUT, "c": INOUT, "w": WORK, "h": HOST, "none": IN, "n": int})
    a, b, c, w, h = torch.arange(5.0), torch.zeros(3), torch.tensor([7, 8]), torch.zeros(4), torch.ones(2)
    memory = Guarded(kernel, [a, b, c, w, h, None, 9], {"c": 8}, torch.device("cpu"))
    views = {name: view for name, _, _, view in memory.tensors}
    assert memory.arguments == [*(views[name].data_ptr() for name in "abcw"), h.data_ptr(), None, 9]
    assert [views[name].data_ptr() % 256 for name in "abcw"] == [0, 0, 8, 0]
    assert torch.equal(views["a"].view(torch.float32), a) and torch.equal(views["c"].view(torch.int64), c)
    assert (views["b"] == 0xFF).all() and (views["w"] == 0xFF).all()
    views["b"].view(torch.float32).copy_(a[:3])
    views["c"].view(torch.int64)[1] = 3
    memory.check_surroundings()
    memory.copy_back()
    assert torch.equal(b, a[:3]) and c.tolist() == [7, 3]
    memory.memory[2][views["c"].storage_offset() + 16 + GUARD // 2] = 0
    with pytest.raises(EmulatorError, match="k: wrote outside c"):
        memory.check_surroundings()
