"""Brings the parts of a model (embedding, layers, head) from a checkpoint's files to their devices, and binds them there. Owns threads,
buffers and their order; knows nothing of what a layer does with its weights.

Reading threads take pieces of files, from all devices in turn. Each device has a thread that binds its parts in order (a single device has
the calling thread). While a part is bound (copied, repacked, expanded), the one after it is read, and no more: at most two parts of a
device are in flight. A CPU's bytes are read to where they stay. A GPU's go through two pinned buffers a reading thread, a piece each, and
are copied on a stream of their own. The routed experts of a layer are read as the long ranges that they are on disk, and their tensors
are views; anything else is read by itself, so that keeping a norm does not keep a layer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import runtime
from .checkpoint import Checkpoint, Layout, Need, human_bytes
from .errors import DoesNotFit
from .formats import Weight
from .shards import TORCH_DTYPES, Entry, Run, read_range, runs_of, tensor_of

PIECE = 32 << 20  # bytes that a thread reads at once
GAP = 4096  # bytes between two experts' tensors that are read along: activation scales, which nothing here uses
TICK = 0.1  # seconds after which `on_progress` is called though nothing was read: what it looks at (Ctrl-C) must not wait for a disk
MAX_READERS = 8

Progress = Callable[[int, str, torch.device], None]


@dataclass
class Part:
    """One part of a model: where it goes, what it needs of the checkpoint, its bytes as `on_progress` counts them, and what makes it from
    a source of tensors (a Checkpoint, or something like it)."""

    name: str
    device: torch.device
    needs: list[Need]
    nbytes: int
    bind: Callable[[object], object]


def reading_threads() -> int:
    """How many threads read at once: two a core, as they wait for memory and disks, up to MAX_READERS (docs/measurements.md)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_READERS, 2 * cores)


def load(checkpoint: object, parts: list[Part], on_progress: Progress | None = None, threads: int | None = None) -> dict[str, object]:
    """What `bind` made of every part, by name. Parts of different devices are loaded at the same time, those of one device in order.

    `on_progress(bytes read since the last call, part, device)` is called in the calling thread, after every piece, and every TICK seconds
    with 0 bytes; the counts of a part sum to its nbytes. What it raises, and what a signal handler raises, ends the loading: all threads
    are gone when `load` returns or raises. A checkpoint that is no `Checkpoint` (none of files) is bound as it is.

    Raises CheckpointError for a shard that fails or changes while it is read, DoesNotFit for a device without enough memory.
    """
    return _Loading(checkpoint, parts, on_progress or (lambda *_: None), threads or reading_threads()).run()


class Source:
    """A part's tensors, read already; stands where a Checkpoint does for a Binder. Each is given away once, so that what is not kept is
    free again; asked for another time, it is read another time."""

    def __init__(self, checkpoint: Checkpoint, look_up: Callable[[], None]):
        self.config, self._checkpoint, self._look_up = checkpoint.config, checkpoint, look_up
        self.places: dict[Entry, tuple[torch.Tensor, int]] = {}  # the run's bytes, and where in them the entry begins

    def tensor(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name, self._take)

    def weight(self, name: str) -> Weight:
        return self._checkpoint.weight(name, self._take)

    def _take(self, entry):
        self._look_up()
        place = self.places.pop(entry, None)
        if place is None:
            return self._checkpoint.read(entry)
        data, at = place
        data = data[at : at + entry.nbytes]
        if at % max(4, TORCH_DTYPES[entry.dtype].itemsize):  # 4: packing reads four bytes at once
            data = data.clone()
        return tensor_of(data, entry)


class _Stopped(Exception):
    """The loading ends for a reason that another thread has told."""


@dataclass
class _Lane:
    """One device's parts in order."""

    device: torch.device
    parts: list[Part]
    stream: torch.cuda.Stream | None = None  # of the copies
    begun: list[_Reading] = field(default_factory=list)
    pieces: deque[_Piece] = field(default_factory=deque)
    bound: int = 0


@dataclass
class _Reading:
    """A part on its way."""

    part: Part
    lane: _Lane
    source: object
    total: int = 0
    left: int = 0
    read: int = 0
    told: int = 0
    copied: torch.cuda.Event | None = None


@dataclass
class _Piece:
    """Bytes to read, and where they stay."""

    reading: _Reading
    run: Run
    begin: int
    target: torch.Tensor


class _Slots:
    """A reading thread's two pinned buffers: while one is copied to a device, the other is filled."""

    def __init__(self):
        self.buffers, self.copied, self.at = [torch.empty(0), torch.empty(0)], [None, None], 0

    def take(self, size: int) -> torch.Tensor:
        """The other buffer, once what was in it has been copied."""
        self.at = 1 - self.at
        if self.copied[self.at] is not None:
            self.copied[self.at].synchronize()
        if self.buffers[self.at].numel() < size:  # torch pins powers of two
            self.buffers[self.at] = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self.buffers[self.at][:size]

    def copy(self, slot: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copies the buffer that was taken last."""
        if stream is None:
            target.copy_(slot)
            return
        with torch.cuda.stream(stream):
            target.copy_(slot, non_blocking=True)
        self.copied[self.at] = stream.record_event()


def _staged(device: torch.device) -> bool:
    """Whether what is read goes through pinned buffers."""
    return device.type != "cpu"


class _Loading:
    """One call of `load`. What threads share is touched under `changed`."""

    def __init__(self, checkpoint, parts, on_progress, threads):
        self.checkpoint, self.on_progress = checkpoint, on_progress
        self.threads = threads if isinstance(checkpoint, Checkpoint) else 0
        self.changed = threading.Condition()
        self.made: dict[str, object] = {}
        self.events: list[tuple[int, str, torch.device]] = []
        self.error: BaseException | None = None
        self.stopping = False
        self.lanes = [_Lane(d, [p for p in parts if p.device == d], torch.cuda.Stream(d) if d.type == "cuda" else None)
                      for d in dict.fromkeys(p.device for p in parts)]
        self.turn = 0
        # One device is bound in the calling thread: what a thread allocates and frees, the C library keeps for that thread.
        self.alone = len(self.lanes) == 1
        self.last, self.delivered = (self.lanes[0].parts[0].name, self.lanes[0].device), time.monotonic()

    def run(self):
        workers = [threading.Thread(target=self._read_pieces, name=f"read {n}", daemon=True) for n in range(self.threads)]
        if not self.alone:
            workers += [threading.Thread(target=self._bind_parts, args=(lane,), name=f"bind {lane.device}", daemon=True)
                        for lane in self.lanes]
        try:
            for worker in workers:
                worker.start()
            if self.alone:
                self._bind_parts(self.lanes[0])
            while not self._finished():
                self._deliver(TICK)
            self._deliver()
        finally:
            self._stop()
            for worker in workers:
                if worker.ident is not None:
                    worker.join()
        if self.error is not None:
            self.made.clear()
            self.lanes.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            raise self.error
        return self.made

    def _deliver(self, wait=0.0):
        """In the calling thread: tells `on_progress` what there is, after at most `wait` seconds, or, every TICK, that there is nothing."""
        with self.changed:
            if wait and not self.events and not self._finished():
                self.changed.wait(wait)
            events, self.events = self.events, []
        if not events and time.monotonic() - self.delivered >= TICK:
            events = [(0, *self.last)]
        for event in events:
            self.last, self.delivered = event[1:], time.monotonic()
            self.on_progress(*event)

    def _finished(self):
        return self.error is not None or all(lane.bound == len(lane.parts) for lane in self.lanes)

    def _stop(self, error=None):
        with self.changed:
            self.error, self.stopping = self.error or error, True
            self.changed.notify_all()

    @contextlib.contextmanager
    def _telling(self, part):
        """What goes wrong with a part, of `part()`, in a thread, is for the calling thread to raise; all threads stop."""
        try:
            yield
        except _Stopped:
            pass
        except BaseException as error:
            short = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
            self._stop(_out_of_memory(part()) if short and part() else error)

    # ---- binding: a thread a device

    def _bind_parts(self, lane):
        with self._telling(lambda: lane.parts[min(lane.bound, len(lane.parts) - 1)]):
            with torch.cuda.device(lane.device) if lane.stream is not None else contextlib.nullcontext():
                for number, part in enumerate(lane.parts):
                    while len(lane.begun) < min(len(lane.parts), number + 2):
                        self._begin(lane, lane.parts[len(lane.begun)])
                    reading = self._ready(lane, number)
                    if reading.copied is not None:
                        torch.cuda.current_stream(lane.device).wait_event(reading.copied)
                    made = part.bind(reading.source)
                    with self.changed:
                        self.made[part.name], reading.source = made, None  # what was not taken goes
                        self._tell(reading, part.nbytes)
                        lane.bound += 1
                        self.changed.notify_all()
                if lane.stream is not None:
                    torch.cuda.current_stream(lane.device).synchronize()  # an error in it belongs here

    def _begin(self, lane, part):
        """Memory for a part's bytes, and the pieces in which they are to be read, in the order of the shards."""
        if not self.threads:
            lane.begun.append(_Reading(part, lane, self.checkpoint))
            return
        source = Source(self.checkpoint, self._look_up)
        reading, pieces = _Reading(part, lane, source), []
        for run, on_host in _runs(self.checkpoint, part.needs):
            data = torch.empty(run.nbytes, dtype=torch.uint8, device="cpu" if on_host else part.device)
            source.places |= {entry: (data, entry.begin - run.begin) for entry in run.entries}
            pieces += [_Piece(reading, run, run.begin + at, data[at : at + PIECE]) for at in range(0, run.nbytes, PIECE)]
        if lane.stream is not None:  # the memory may have been another part's, whose last use is queued there
            lane.stream.wait_event(torch.cuda.current_stream(lane.device).record_event())
        reading.left, reading.total = len(pieces), sum(piece.target.numel() for piece in pieces)
        with self.changed:
            lane.begun.append(reading)
            lane.pieces.extend(pieces)
            self.changed.notify_all()

    def _ready(self, lane, number):
        """The part's reading, once all of it is there."""
        while True:
            with self.changed:
                if self.stopping:
                    raise _Stopped
                if not lane.begun[number].left:
                    return lane.begun[number]
                if not self.alone:
                    self.changed.wait()
            if self.alone:
                self._deliver(TICK)

    def _look_up(self):
        """Between two tensors: ends the binding when the loading ends."""
        if self.stopping:
            raise _Stopped
        if self.alone:
            self._deliver()

    def _tell(self, reading, told):
        if told > reading.told:
            self.events.append((told - reading.told, reading.part.name, reading.part.device))
            reading.told = told
            self.changed.notify_all()

    # ---- reading: threads for all devices

    def _read_pieces(self):
        slots, piece = _Slots(), None
        with self._telling(lambda: piece and piece.reading.part):
            while (piece := self._next_piece()) is not None:
                stamp = self.checkpoint.stamps.get(piece.run.shard)
                direct = not _staged(piece.target.device)
                place = piece.target if direct else slots.take(piece.target.numel())
                read_range(self.checkpoint.folder, piece.run, piece.begin, memoryview(place.numpy()), stamp)
                if not direct:
                    slots.copy(place, piece.target, piece.reading.lane.stream)
                self._read(piece)

    def _next_piece(self):
        """The next piece of the next device that has one; None when there are no more."""
        with self.changed:
            while not self.stopping:
                for lane in self.lanes[self.turn :] + self.lanes[: self.turn]:
                    if lane.pieces:
                        self.turn = (self.lanes.index(lane) + 1) % len(self.lanes)
                        return lane.pieces.popleft()
                if all(len(lane.begun) == len(lane.parts) for lane in self.lanes):
                    return None
                self.changed.wait()
        return None

    def _read(self, piece):
        reading = piece.reading
        with self.changed:
            reading.left -= 1
            reading.read += piece.target.numel()
            self._tell(reading, reading.part.nbytes * reading.read // reading.total)
            if not reading.left:
                if reading.lane.stream is not None:
                    reading.copied = reading.lane.stream.record_event()
                self.changed.notify_all()


def _runs(checkpoint: Checkpoint, needs: list[Need]) -> list[tuple[Run, bool]]:
    """What to read for `needs`, in the order of the shards; and whether it is for the host, as global scales are: they become numbers."""
    alone, routed, scalars = [], [], []
    for need in needs:
        found = checkpoint.entries(need)
        if isinstance(found, Layout):
            together = routed if need.kind == "routed experts" else alone
            together += [entry for entry in (found.payload, found.scale) if entry is not None]
            scalars += [found.global_scale] if found.global_scale is not None else []
        elif found is not None:
            alone.append(found)
    runs = [(run, False) for run in runs_of(routed, GAP)] + [(run, True) for run in runs_of(scalars, GAP)]
    runs += [(run, False) for entry in alone for run in runs_of([entry])]
    return sorted(runs, key=lambda item: (item[0].shard, item[0].begin))


def _out_of_memory(part):
    try:
        free = f", {human_bytes(max(0, runtime.free_bytes(part.device)))} are free"
    except RuntimeError:  # a GPU whose driver says nothing more
        free = ""
    return DoesNotFit(f"{part.device}: out of memory while loading {part.name}: it needs {human_bytes(part.nbytes)} and room to pack it"
                      f"{free}: give more --devices, a smaller --context or fewer --layers")
