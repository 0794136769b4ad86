"""Routed experts that do not stay on their device (--stream-weights): they wait in the host's memory or in the checkpoint's files, and
those that a step's tokens chose are brought when it needs them. Owns where they wait, how they come, and how fast that was.

A layer's experts are an object that stands where `ops.pack_experts`' result does and has `bring(chosen, ids)`: what `ops.moe` takes in
their place. Their order stays that of their numbers, so that every sum is the resident layer's, bit for bit.

    definitions  the sequence `Experts.routed`, which has an expert when it is asked for
    kernels      slots for as many experts as a step can choose, shared by the layers of a device and filled in ascending order; `chosen`
                 becomes slots. From the host: packed at load, so that what is copied is what the kernel streams. From files: packed at once

The host waits for the router's choice, once a streamed layer. So a captured step is cut there (`cutting`): graph, bringing, graph, ...

Predicted for an H200 with a link of 54 GB/s, not measured: from the host a layer's six experts take 1.6 ms (Flash, 85 MB) or 4.1 ms (Pro,
223 MB) in copies of 5 to 25 MB at 95 % or more of the link, and between two layers' copies the link is idle for 0.15 to 0.25 ms: 85 to 95 %
of it over all of a step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from . import loader, ops
from .checkpoint import Checkpoint, Need
from .formats import Weight
from .kernels.experts import pack_expert, pack_shared, places
from .kernels.packing import Packing
from .shards import TORCH_DTYPES, Entry, Run, read_range, runs_of, tensor_of

WINDOW = 256 << 20  # bytes of experts that are read ahead of the one in use; a token's six of Pro are 223 MB
PIECE = 8 << 20  # bytes that a thread reads at once: the six experts of a token are work for all threads
BLOCK = 1 << 30  # pinned memory is taken in powers of two, at most so much
ALIGN = 256
NEARLY_ALL = 4  # choices for each expert of a layer from which on its experts are read before they are chosen: e^-4 are then not used
SAMPLE, SAMPLE_SECONDS = 1 << 30, 2.0  # what is read at most to measure a disk
SAMPLE_COPY = 32 << 20  # bytes of one of the 64 copies that measure a link
_W = ("w1", "w2", "w3")

_cut: Callable[[Callable[[], None]], None] | None = None


@contextlib.contextmanager
def cutting(cut: Callable[[Callable[[], None]], None]):
    """Within it, what the host must do in the middle of a step is given to `cut` instead of done: the step is being captured."""
    global _cut
    _cut = cut
    try:
        yield
    finally:
        _cut = None


def ahead(expert: int, count: int) -> int:
    """How many of a layer's `count` experts of so many bytes are read ahead."""
    return max(2, min(count, WINDOW // max(1, expert)))


def pinned_bytes(count: int, size: int) -> int:
    """What `count` experts of `size` bytes take of pinned memory, the rounding included."""
    fit = max(1, BLOCK // max(1, size))
    full, rest = divmod(count, fit)
    return full * _power_of_two(fit * size) + (_power_of_two(rest * size) if rest else 0)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()


def _aligned(size, to=ALIGN):
    return -(-size // to) * to


def _host_bytes(size, device):
    """Memory of the host for a device; pinned for a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Tally:
    """Experts and bytes that were brought, and the seconds in which some of them moved: of files the time in which a read was under way, of
    the host's memory that of the copies."""

    def __init__(self):
        self.experts, self.bytes, self.seconds = 0, 0, 0.0
        self._lock, self._moving, self._since, self._copies = threading.Lock(), 0, 0.0, []

    @contextlib.contextmanager
    def moving(self, size: int):
        """Around a read of so many bytes, in any thread."""
        with self._lock:
            if not self._moving:
                self._since = time.perf_counter()
            self._moving += 1
        try:
            yield
        finally:
            with self._lock:
                self._moving -= 1
                self.bytes += size
                if not self._moving:
                    self.seconds += time.perf_counter() - self._since

    @contextlib.contextmanager
    def copying(self, size: int, device: torch.device):
        """Around copies of so many bytes that are queued on the device's current stream."""
        if device.type != "cuda":
            with self.moving(size):
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        yield
        end.record(torch.cuda.current_stream(device))
        self.bytes += size
        self._copies.append((begin, end))
        if len(self._copies) > 1000:
            self.settle()

    def settle(self) -> None:
        """Counts the seconds of the copies that were queued; waits for them."""
        for begin, end in self._copies:
            end.synchronize()
            self.seconds += 1e-3 * begin.elapsed_time(end)
        self._copies = []


# ------------------------------------------------------------------------------------------------------- from the files


@dataclass
class _Reading:
    """An expert on its way from the files to a buffer. places: where its tensors begin there."""

    key: tuple[int, int]
    buffer: _Buffer
    places: dict[Entry, int]
    nbytes: int
    pieces: list[Future] = field(default_factory=list)


class _Buffer:
    """Memory of the host for one expert. A GPU's copy from it is `copied` when it may be written to again."""

    def __init__(self):
        self.data, self.copied = torch.empty(0, dtype=torch.uint8), None


class Reader:
    """Experts by (layer, number) from a checkpoint's files for one device, some ahead of the one in use. Asked by one thread.

    Raises CheckpointError with shard, tensor and offset where a file fails, is shorter or is not the one whose header was read.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, layers: Sequence[int], tally: Tally):
        c = checkpoint.config
        self.checkpoint, self.device, self.tally, self.layers, self.count = checkpoint, device, tally, layers, c.n_routed_experts
        self.pool = ThreadPoolExecutor(loader.reading_threads(), thread_name_prefix=f"experts for {device}")
        self.queue: deque[tuple[int, int]] = deque()
        self.begun: dict[tuple[int, int], _Reading] = {}
        self.seen: set[tuple[int, int]] = set()  # what was read in this run
        self.in_use: _Buffer | None = None
        self.on_device = torch.empty(0, dtype=torch.uint8, device=device)  # of a GPU: what the expert in use is there
        size = max(sum(entry.nbytes for entry in self._entries(layer, 0)) for layer in layers)
        self.free = [_Buffer() for _ in range(ahead(size, self.count) + 1)]
        self.global_scales = {}
        for layer in layers:
            scales = [at.global_scale for e in range(self.count) for at in self._layouts(layer, e) if at.global_scale is not None]
            for run in runs_of(scales, loader.GAP):
                data = torch.empty(run.nbytes, dtype=torch.uint8)
                self._read(run, run.begin, data)
                self.global_scales |= {entry: tensor_of(data[entry.begin - run.begin : entry.end - run.begin].clone(), entry)
                                       for entry in run.entries}

    def want(self, keys: list[tuple[int, int]], guessed: Iterable[tuple[int, int]] = ()) -> None:
        """What `take` will be asked for, in this order; behind it what may be wanted then. What was begun for nothing is forgotten."""
        self._let_go()
        for key in self.begun.keys() - set(keys):
            self._wait(reading := self.begun.pop(key))
            self.free.append(reading.buffer)
        self.queue = deque(key for key in (*keys, *guessed) if key not in self.begun)
        self._begin()

    def take(self, key: tuple[int, int]) -> ops.Expert:
        """The expert on its device, until the next call of `take` or `want`."""
        self._let_go()
        if key not in self.begun:
            self.want([key])
        self._begin()
        self._wait(reading := self.begun.pop(key))
        self.in_use = reading.buffer
        data = reading.buffer.data
        if self.device.type == "cuda":
            if len(self.on_device) < len(data):
                self.on_device = torch.empty(len(data), dtype=torch.uint8, device=self.device)
            self.on_device[: reading.nbytes].copy_(data[: reading.nbytes], non_blocking=True)
            reading.buffer.copied = torch.cuda.current_stream(self.device).record_event()
            data = self.on_device

        def tensor(entry):
            if entry in self.global_scales:
                return self.global_scales[entry]
            at = reading.places[entry]
            if at % max(4, TORCH_DTYPES[entry.dtype].itemsize):  # 4: packing reads four bytes at once
                return tensor_of(data[at : at + entry.nbytes].clone(), entry)
            return tensor_of(data, entry, at)

        return ops.Expert(*(self.checkpoint.weight(name, tensor) for name in self._names(*key)))

    def rate(self) -> float:
        """GB/s of reading alone, with nothing to do beside it: of experts that were not read yet, as far as there are some."""
        self.want([])
        fresh = [key for layer in self.layers for e in range(self.count) if (key := (layer, e)) not in self.seen]
        keys = fresh or [(layer, e) for layer in self.layers for e in range(self.count)]
        tally, self.tally, size, start = self.tally, Tally(), 0, time.perf_counter()
        try:
            for at in range(0, len(keys), len(self.free)):
                self.want(batch := keys[at : at + len(self.free)])
                for key in batch:
                    reading = self.begun.pop(key)
                    self._wait(reading)
                    size += reading.nbytes
                    self.free.append(reading.buffer)
                if size >= SAMPLE or time.perf_counter() - start >= SAMPLE_SECONDS:
                    break
            return self.tally.bytes / self.tally.seconds / 1e9
        finally:
            self.tally = tally

    def _names(self, layer, number):
        return [f"layers.{layer}.ffn.experts.{number}.{w}" for w in _W]

    def _layouts(self, layer, number):
        return [self.checkpoint.entries(Need(name, "routed experts", (), True)) for name in self._names(layer, number)]

    def _entries(self, layer, number):
        return [entry for at in self._layouts(layer, number) for entry in (at.payload, at.scale) if entry is not None]

    def _begin(self):
        """Reads of the next experts, as long as there are buffers."""
        while self.queue and self.free:
            key = self.queue.popleft()
            runs, ranges, end = runs_of(self._entries(*key), loader.GAP), [], 0
            for run in runs:  # at an address that ends as the place in the file does: there tensors lie at multiples of their elements
                begin = _aligned(end) + run.begin % ALIGN
                end = begin + run.nbytes
                ranges.append((run, begin))
            buffer = self.free.pop()
            if len(buffer.data) < end:
                buffer.data = _host_bytes(end, self.device)
            if buffer.copied is not None:
                buffer.copied.synchronize()
                buffer.copied = None
            reading = _Reading(key, buffer, {e: at + e.begin - run.begin for run, at in ranges for e in run.entries}, end)
            for run, begin in ranges:
                for at in range(0, run.nbytes, PIECE):
                    part = buffer.data[begin + at : begin + min(at + PIECE, run.nbytes)]
                    reading.pieces.append(self.pool.submit(self._read_counted, run, run.begin + at, part))
            self.begun[key] = reading
            self.seen.add(key)
            self.tally.experts += 1

    def _read_counted(self, run, begin, part):
        with self.tally.moving(len(part)):
            self._read(run, begin, part)

    def _read(self, run: Run, begin: int, part: torch.Tensor):
        read_range(self.checkpoint.folder, run, begin, memoryview(part.numpy()), self.checkpoint.stamps.get(run.shard))

    def _wait(self, reading):
        for piece in reading.pieces:
            piece.result()

    def _let_go(self):
        if self.in_use is not None:
            self.free.append(self.in_use)
            self.in_use = None


# -------------------------------------------------------------------------------------------------- in the host's memory


class Shelf:
    """Memory of the host for `count` experts in parts of so many bytes, in blocks of a power of two, which pinned memory takes anyway."""

    def __init__(self, count: int, sizes: Sequence[int], device: torch.device):
        self.sizes, self.size = sizes, shelf_size(sizes)
        self._fit, self._blocks = max(1, BLOCK // self.size), []
        for first in range(0, count, self._fit):
            self._blocks.append(_host_bytes(_power_of_two(min(self._fit, count - first) * self.size), device))

    def parts(self, number: int) -> list[torch.Tensor]:
        """An expert's, uint8 each."""
        block, at = divmod(number, self._fit)
        at, out = at * self.size, []
        for size in self.sizes:
            out.append(self._blocks[block][at : at + size])
            at += _aligned(size)
        return out


def shelf_size(sizes: Sequence[int]) -> int:
    """Bytes of an expert on a Shelf."""
    return sum(map(_aligned, sizes))


def _bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


# ------------------------------------------------------------------------------------------------------ a layer's experts


class _Layer:
    """What the experts of a layer have in common, however they are kept."""

    def __init__(self, supply: Supply, layer: int):
        self.supply, self.layer, self.table = supply, layer, None  # table: of a hash layer, each token's experts
        self.tally, self.reader = supply.tally, supply.reader

    def _want(self, numbers: list[int], choices: int, ids: torch.Tensor) -> None:
        """Has them read, and behind them what the next streamed layer will need, where that can be known: by the tokens' ids, or because
        so many tokens choose nearly all."""
        following, guessed = self.supply.layer_after(self.layer), ()
        if following is not None and following.table is not None:
            guessed = torch.unique(following.table[ids]).tolist()
        elif following is not None and choices >= NEARLY_ALL * self.reader.count:
            guessed = range(self.reader.count)
        self.reader.want([(self.layer, e) for e in numbers], [(following.layer, e) for e in guessed])


class OnDemand(_Layer, Sequence):
    """For the definitions: `routed` of ops.Experts, whose experts come to the device one by one, when they are asked for."""

    def __init__(self, supply: Supply, layer: int, routed: Sequence[ops.Expert], shared: ops.Expert):
        super().__init__(supply, layer)
        self.shared, self.count = shared, len(routed)
        self.kept: list[ops.Expert] = []
        shelf = None
        for number in range(self.count) if self.reader is None else ():
            expert = routed[number]
            tensors = [t for w in expert for t in (w.payload, w.scale) if t is not None]
            shelf = shelf or Shelf(self.count, [t.nbytes for t in tensors], supply.device)
            parts = shelf.parts(number)
            if [len(part) for part in parts] != [t.nbytes for t in tensors]:  # layers of several formats
                parts = Shelf(1, [t.nbytes for t in tensors], supply.device).parts(0)
            for part, tensor in zip(parts, tensors, strict=True):
                part.copy_(_bytes_of(tensor))
            left = iter(parts)
            self.kept.append(ops.Expert(*(_at(w, left) for w in expert)))

    def bring(self, chosen: torch.Tensor, ids: torch.Tensor) -> tuple[ops.Experts, torch.Tensor]:
        """chosen [S, k] of the tokens `ids` -> what `moe` takes for experts and chosen."""
        if self.reader is not None:
            self._want(torch.unique(chosen).tolist(), chosen.numel(), ids)
        return ops.Experts(self, self.shared), chosen

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> ops.Expert:
        if self.reader is not None:
            return self.reader.take((self.layer, number))
        expert, device = self.kept[number], self.supply.device
        self.tally.experts += 1
        with self.tally.copying(sum(w.nbytes for w in expert), device):
            return ops.Expert(*(w.to(device, non_blocking=True) for w in expert))


def _at(weight: Weight, parts) -> Weight:
    """The same weight, whose tensors lie in the next of these parts."""
    def moved(tensor):
        return None if tensor is None else next(parts).view(tensor.dtype).view(tensor.shape)

    return replace(weight, payload=moved(weight.payload), scale=moved(weight.scale))


class InSlots(_Layer):
    """For the kernels: packed experts, of which a step's chosen ones come to the device's slots."""

    def __init__(self, supply: Supply, layer: int, routed: Sequence[ops.Expert], shared: ops.Expert):
        super().__init__(supply, layer)
        self.inner, self.columns = shared.w1.shape
        self.kinds = tuple(supply.checkpoint.kind(f"layers.{layer}.ffn.experts.0.{w}") for w in ("w1", "w2"))
        up, down = supply.places(self.kinds, self.inner, self.columns)
        self.packed = pack_shared(up, down, self.kinds, shared)
        self.slots = torch.zeros(supply.tokens, supply.top_k, dtype=torch.int32, device=supply.device)  # `chosen` of a captured step
        # What is copied without a wait must be pinned: the next part of a step is queued while the experts are still on their way.
        self.slots_on_host = _host_bytes(self.slots.nbytes, supply.device).view(torch.int32).view(self.slots.shape)
        self.factors_on_host = _host_bytes(12 * len(up), supply.device).view(torch.float32).view(-1, 3)
        self.shelf = self.factors = None
        if self.reader is None:
            self.shelf = Shelf(len(routed), [up[0].nbytes, down[0].nbytes], supply.device)
            packing = Packing(3 * len(routed), supply.device)
            for number in range(len(routed)):
                self._pack(number, routed[number], number % len(up), packing, number)
                for part, place in zip(self.shelf.parts(number), (up, down), strict=True):
                    part.copy_(place[number % len(up)].view(-1), non_blocking=True)
            if supply.device.type == "cuda":
                torch.cuda.current_stream(supply.device).synchronize()
            self.factors = torch.tensor(packing.factors()).view(-1, 3)

    def bring(self, chosen: torch.Tensor, ids: torch.Tensor) -> tuple[object, torch.Tensor]:
        """chosen [S, k] of the tokens `ids` -> what `moe` takes for experts and chosen."""
        slots, on_host = self.slots[: len(chosen)], self.slots_on_host[: len(chosen)]

        def fill():
            distinct, place = torch.unique(chosen.cpu(), return_inverse=True)  # ascending, as the sums are
            self._fill(distinct.tolist(), chosen.numel(), ids)
            on_host.copy_(place)
            slots.copy_(on_host, non_blocking=True)

        (fill if _cut is None else lambda: _cut(fill))()
        return self.packed, slots

    def _fill(self, numbers, choices, ids):
        """The host has waited for the choice, so nothing reads the slots any more, nor what is copied to them."""
        up, down = self.packed.up_routed, self.packed.down_routed
        if self.reader is None:
            self.tally.experts += len(numbers)
            with self.tally.copying(len(numbers) * (up[0].nbytes + down[0].nbytes), self.supply.device):
                for slot, number in enumerate(numbers):
                    for part, place in zip(self.shelf.parts(number), (up, down), strict=True):
                        place[slot].view(-1).copy_(part, non_blocking=True)
            self.factors_on_host[: len(numbers)] = self.factors[numbers]
        else:
            self._want(numbers, choices, ids)
            packing = Packing(3 * len(numbers), self.supply.device)
            for slot, number in enumerate(numbers):
                self._pack(number, self.reader.take((self.layer, number)), slot, packing, slot)
            self.factors_on_host[: len(numbers)] = torch.tensor(packing.factors()).view(-1, 3)
        self.packed.factors[: len(numbers)].copy_(self.factors_on_host[: len(numbers)], non_blocking=True)

    def _pack(self, number, expert, slot, packing, place):
        up, down = self.packed.up_routed[slot], self.packed.down_routed[slot]
        pack_expert(f"expert {number} of layer {self.layer}", expert, self.kinds, self.inner, self.columns, up, down, packing, place)


class Supply:
    """One device's streamed experts: `of(layer)` makes a layer's at load, where `ops.pack_experts` makes resident ones.

    source: "host" or "disk". tokens: the most of a step. top_k: the experts of a token.
    """

    def __init__(self, checkpoint: Checkpoint, source: str, device: torch.device, layers: Sequence[int], tokens: int):
        self.checkpoint, self.source, self.device, self.tokens = checkpoint, source, device, tokens
        self.top_k, self.count = checkpoint.config.num_experts_per_tok, checkpoint.config.n_routed_experts
        self.layers, self.made, self.tally = list(layers), {}, Tally()
        self.reader = Reader(checkpoint, device, self.layers, self.tally) if source == "disk" else None
        self._places: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, layer: int) -> Callable[[Sequence[ops.Expert], ops.Expert], _Layer]:
        """What makes the experts of a layer of the routed ones, which are not asked for if they stay in their files, and the shared one."""
        kind = InSlots if ops.selected_backend() == "cuda" else OnDemand

        def pack(routed, shared):
            self.made[layer] = kind(self, layer, routed, shared)
            return self.made[layer]

        return pack

    def layer_after(self, layer: int) -> _Layer | None:
        """The next streamed layer of this device."""
        at = self.layers.index(layer) + 1
        return self.made.get(self.layers[at]) if at < len(self.layers) else None

    def places(self, kinds: tuple[str, str], inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots for experts of these formats."""
        if kinds not in self._places:
            self._places[kinds] = places(slots_of(self.tokens, self.top_k, self.count), kinds, inner, columns, self.device)
        return self._places[kinds]

    def rate(self) -> float:
        """GB/s of the disk or the link with nothing else to do, measured now."""
        if self.reader is not None:
            return self.reader.rate()
        source, tally = _host_bytes(SAMPLE_COPY, self.device), Tally()
        target = torch.empty(SAMPLE_COPY, dtype=torch.uint8, device=self.device)
        target.copy_(source)  # the first one is not counted
        with tally.copying(64 * SAMPLE_COPY, self.device):
            for _ in range(64):
                target.copy_(source, non_blocking=True)
        tally.settle()
        return tally.bytes / tally.seconds / 1e9


def slots_of(tokens: int, top_k: int, count: int) -> int:
    """The most experts that so many tokens choose."""
    return min(tokens * top_k, count)


def report(supplies: Iterable[Supply], token_ms: float | None = None) -> dict | None:
    """What was brought: `bytes`, the `seconds` in which they moved, GB/s of that, and what the link or disk was measured at behind it; the
    bytes of a token, and GB/s of a decode step as a whole if it takes `token_ms`. None if nothing was brought."""
    used = [s for s in supplies if s.tally.bytes]
    for supply in used:
        supply.tally.settle()
    if not used:
        return None
    size, seconds = sum(s.tally.bytes for s in used), sum(s.tally.seconds for s in used)
    token = round(sum(s.tally.bytes / s.tally.experts * s.top_k * len(s.layers) for s in used))
    measured = size / sum(s.tally.bytes / s.rate() for s in used)
    return {"from": used[0].source, "bytes": size, "seconds": round(seconds, 4), "gb_per_s": round(size / seconds / 1e9, 3),
            "measured_gb_per_s": round(measured, 3), "fraction": round(size / seconds / 1e9 / measured, 3), "token_bytes": token,
            "decode_gb_per_s": round(token / token_ms / 1e6, 3) if token_ms else None}
