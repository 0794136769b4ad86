"""How long work takes on a GPU: medians over replays of CUDA graphs, and what the profiler says of their kernels. On a CPU, where only
the plumbing of a benchmark is tested, the work is called as it is."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

CALLS, WARM, TIMED = 50, 3, 20
BUSY = 1_000_000  # cycles that keep the GPU busy while a graph is launched
Call = Callable[[], object]


def graph_of(device: torch.device, calls: list[Call]) -> Call:
    """The calls, one after the other, as one CUDA graph; on a CPU, where only the plumbing is tested, as they are."""
    if device.type == "cpu":
        return lambda: [call() for call in calls]
    for call in calls[: len(calls) // 2 + 1]:  # builds and loads what a capture cannot
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def interleaved(device: torch.device, graphs: list[Call]) -> list[list[float]]:
    """Microseconds of each replay of each graph, a round of all graphs after the other, so that clocks and heat are the same for all. The
    GPU is busy until a replay has been launched: what the launch takes on the host is not the graph's."""
    times: list[list[float]] = [[] for _ in graphs]
    for n in range(WARM + TIMED):
        for graph, mine in zip(graphs, times, strict=True):
            if device.type == "cpu":
                start = time.perf_counter()
                graph()
                elapsed = 1e6 * (time.perf_counter() - start)
            else:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(BUSY)
                begin.record()
                graph()
                end.record()
                end.synchronize()
                elapsed = 1e3 * begin.elapsed_time(end)
            if n >= WARM:
                mine.append(elapsed)
    return times


def spread(times: list[float], calls: int) -> dict[str, float]:
    """Median, 10th and 90th percentile of one call."""
    ordered = sorted(t / calls for t in times)
    return {"us": statistics.median(ordered), "p10": ordered[len(ordered) // 10], "p90": ordered[-1 - len(ordered) // 10]}


def measured(device: torch.device, *graphs: list[Call]) -> list[dict[str, float]]:
    """`spread` of each list of calls, called in turn until there are at least CALLS of them."""
    counts = [-(-CALLS // len(calls)) * len(calls) for calls in graphs]
    times = interleaved(device, [graph_of(device, list(itertools.islice(itertools.cycle(calls), n)))
                                 for calls, n in zip(graphs, counts, strict=True)])
    return [spread(mine, n) for mine, n in zip(times, counts, strict=True)]


def kernels_of(device: torch.device, work: Call) -> list[tuple[float, float]] | None:
    """When each kernel that is launched begins and ends, us, by the profiler, in the order of their ends; None on a CPU."""
    if device.type == "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize(device)
    on_gpu = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and "memcpy" not in e.name.lower()]
    return sorted(((e.time_range.start, e.time_range.end) for e in on_gpu), key=lambda span: span[1])


def launches(device: torch.device, call: Call) -> int | None:
    """How many kernels one call launches; None on a CPU."""
    kernels = kernels_of(device, call)
    return None if kernels is None else len(kernels)


def shares_of_kernels(kernels: list[tuple[float, float]] | None, calls: int) -> list[float]:
    """Of a chain of calls, the share of its time that each kernel of a call takes: from the end of the kernel before it to its own end.
    Kernels of such a chain overlap, so that their durations would count some time twice. [] if nothing is known, or the calls differ."""
    each = len(kernels or ()) // calls
    if not each or len(kernels) != each * calls:
        return []
    ends = [end for _, end in kernels]
    steps = [b - a for a, b in itertools.pairwise(ends)][each - 1 :]  # the first call has none before it
    sums = [sum(steps[i::each]) for i in range(each)]
    return [x / sum(sums) for x in sums]
