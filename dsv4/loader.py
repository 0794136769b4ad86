"""Brings the parts of a model (embedding, layers, head) from a checkpoint's files to their devices, and binds them there. Owns threads,
buffers and their order; knows nothing of what a layer does with its weights.

Reading threads take pieces of files, from all devices in turn. Each device has a thread that binds its parts in order (a single device has
the calling thread), and AHEAD bytes are read before it asks for them, whichever part they are of: what is packed while it is read is never
there as a whole. A CPU's bytes are read to where they stay. A GPU's go through a reading thread's pinned slots and are copied on a stream
of the device's own. Routed experts are read by number, each (or as many small ones as make up a piece) as the ranges that it is on disk,
and their tensors are views; anything else is read by itself, so that keeping a norm does not keep a layer.

All these threads are Python's, and for its lock a load to a GPU waited more than for anything else (docs/design.md, docs/measurements.md).
So where kernels run, a piece is read and copied by one call without that lock (kernels/read_to_gpu.py); without them, where there need be
no compiler, by some calls a slot. The binding thread waits once a unit and takes its tensors without a lock, calls torch once or twice a
tensor, and is woken only with what it waits for.

Weights that are drawn (synthetic.py) take no reading threads: each is drawn on its device by the thread that binds it, when it is asked
for, and nothing ahead of that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from . import runtime
from .checkpoint import Checkpoint, Layout, Need, human_bytes
from .errors import DoesNotFit, KernelError, UserError
from .formats import Weight
from .kernels.read_to_gpu import prepare, read_to_gpu
from .shards import TORCH_DTYPES, Entry, Run, open_shard, read_range, runs_of, tensor_of
from .synthetic import SyntheticCheckpoint

PIECE = 80 << 20  # bytes that a thread takes at once: two experts of Pro, five of Flash
SLOT, SLOTS = 8 << 20, 2  # bytes that it reads at once; of its pinned ones, one is copied while the other is filled
ALIGN = 16  # bytes, of a run in its unit's memory
GAP = 4096  # bytes between two experts' tensors that are read along: activation scales, which nothing here uses
TICK = 0.1  # seconds after which `on_progress` is called though nothing was read: what it looks at (Ctrl-C) must not wait for a disk
MAX_READERS, MAX_READERS_OF_GPU = 8, 10  # for the host's own memory in all; for each GPU
AHEAD = 2 << 30  # bytes of a device on their way: pieces being read, and units that wait to be taken

Progress = Callable[[int, str, torch.device], None]


@dataclass
class Part:
    """One part of a model: where it goes, what it needs of the checkpoint, its bytes as `on_progress` counts them, and what makes it from
    a source of tensors (a Checkpoint, or something like it). `packs`: all weights go through the kernels' packing.Packing, which looks at
    every scale; then a GPU's are not looked at when they are taken, for which the host would wait."""

    name: str
    device: torch.device
    needs: Sequence[Need]
    nbytes: int
    bind: Callable[[object], object]
    packs: bool = False


def reading_threads(gpus: int = 0) -> int:
    """How many threads read at once for so many GPUs, or for the host: two a core, as they wait for memory and disks, but so many that more
    do not help (docs/measurements.md)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_READERS_OF_GPU * gpus or MAX_READERS, 2 * cores)


def load(checkpoint: object, parts: list[Part], on_progress: Progress | None = None, threads: int | None = None) -> dict[str, object]:
    """What `bind` made of every part, by name. Parts of different devices are loaded at the same time, those of one device in order.

    `on_progress(bytes read since the last call, part, device)` is called in the calling thread, within about TICK seconds for every piece
    and every part that is bound, and with 0 bytes where there is nothing to tell for so long; the counts of a part sum to its nbytes. What
    it raises, and what a signal handler raises, ends the loading: all threads are gone when `load` returns or raises. A checkpoint that is
    no `Checkpoint` (none of files) is asked for each tensor; a synthetic one draws it on the part's device.

    Raises CheckpointError for a shard that fails or changes while it is read, DoesNotFit for a device without enough memory.
    """
    gpus = len({part.device for part in parts if _staged(part.device)})
    return _Loading(checkpoint, parts, on_progress or (lambda *_: None), threads or reading_threads(gpus)).run()


class Source:
    """A part's tensors, read ahead; stands where a Checkpoint does for a Binder. Each is given away once, so that what is not kept is free
    again; asked for another time, it is read another time."""

    def __init__(self, checkpoint: Checkpoint, take: Callable[[Entry], torch.Tensor], check: bool = True):
        self.config, self.kind, self._checkpoint, self._take, self._check = checkpoint.config, checkpoint.kind, checkpoint, take, check
        self._given: list[str] = []  # weights whose scales were not looked at

    def tensor(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name, self._take)

    def weight(self, name: str) -> Weight:
        if not self._check:
            self._given.append(name)
        return self._checkpoint.weight(name, self._take, self._check)

    def look_again(self, look_up: Callable[[], None]) -> None:
        """Raises the CheckpointError that says what is wrong with the scales of a weight, if it is that; reads these once more, and calls
        `look_up` between two."""
        for name in self._given:
            look_up()
            self._checkpoint.check_scales(name)


class _Asked:
    """A part's tensors from a checkpoint without files, each made when it is asked for; `before()` and `after(bytes)` surround that."""

    def __init__(self, checkpoint: object, before: Callable[[], None], after: Callable[[int], None]):
        self.config, self.kind, self._checkpoint, self._before, self._after = checkpoint.config, checkpoint.kind, checkpoint, before, after

    def tensor(self, name: str) -> torch.Tensor:
        return self._ask(self._checkpoint.tensor, name)

    def weight(self, name: str) -> Weight:
        return self._ask(self._checkpoint.weight, name)

    def _ask(self, make, name):
        self._before()
        value = make(name)
        self._after(value.nbytes)
        return value


class _Stopped(Exception):
    """The loading ends for a reason that another thread has told."""


@dataclass
class _Lane:
    """One device's parts in order, and of those that were looked at the units that are not being read yet. Its binding thread waits for the
    unit `awaited` at `arrived`."""

    device: torch.device
    parts: list[Part]
    arrived: threading.Condition
    stream: torch.cuda.Stream | None = None  # of the copies
    readings: list[_Reading] = field(default_factory=list)
    waiting: deque[_Unit] = field(default_factory=deque)
    pieces: deque[_Piece] = field(default_factory=deque)
    awaited: _Unit | None = None
    ahead: int = 0  # `counted` bytes that were begun and are not taken
    bound: int = 0


@dataclass
class _Reading:
    """A part on its way."""

    part: Part
    lane: _Lane
    units: dict[Entry, _Unit]
    total: int
    read: int = 0
    told: int = 0


@dataclass(eq=False)
class _Unit:
    """Tensors that are read together, to memory of their own: one, or some experts' all. `places` (its tensors that are not taken: that
    memory, and where in it each begins; of numbers for the host a memoryview) is None before the reading has begun."""

    runs: list[Run]
    on_host: bool = False
    reading: _Reading | None = None
    places: dict[Entry, tuple[torch.Tensor | memoryview, int]] | None = None
    left: int = 0  # bytes that are not read
    read: bool = False
    taken: bool = False  # some tensor

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)

    @property
    def counted(self) -> int:
        """Bytes as AHEAD limits them: half of it at most, or the readers would stand still when the embedding has been read."""
        return min(self.nbytes, max(1, AHEAD // 2))


@dataclass
class _Piece:
    """Ranges of one shard, and the bytes where they stay. ranges: of which run, from where in the file, how many, where in `target`."""

    unit: _Unit
    ranges: list[tuple[Run, int, int, int]]
    target: torch.Tensor


class _Slots:
    """A reading thread's pinned memory, and of a GPU without kernels the copies from it that are under way."""

    def __init__(self):
        self.at, self.copied, self.stream = 0, [None] * SLOTS, None

    @functools.cached_property
    def memory(self) -> torch.Tensor:
        """uint8 [SLOTS, SLOT], taken when it is first asked for. Raises DoesNotFit."""
        try:
            return torch.empty(SLOTS, SLOT, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        except RuntimeError as error:  # in which CUDA says "out of memory" of the host's
            raise DoesNotFit(f"the host: expected {human_bytes(SLOTS * SLOT)} of pinned memory for each reading thread, found "
                             f"{str(error).splitlines()[0]}: end what else uses the host's memory") from None

    def on(self, stream: torch.cuda.Stream | None) -> None:
        """What this thread copies is queued there; for good, and not around each copy: that is five more calls."""
        if stream is not None and stream is not self.stream:
            torch.cuda.set_stream(stream)
            self.stream = stream

    def take(self, size: int) -> torch.Tensor:
        """The next slot, once what was in it has been copied."""
        self.at = (self.at + 1) % SLOTS
        self._wait(self.at)
        return self.memory[self.at, :size]

    def copy(self, slot: torch.Tensor, target: torch.Tensor) -> None:
        """Copies the slot that was taken last."""
        target.copy_(slot, non_blocking=True)
        if self.stream is not None:
            self.copied[self.at] = self.stream.record_event()

    def wait(self) -> None:
        """Until all has been copied."""
        for slot in range(SLOTS):
            self._wait(slot)

    def _wait(self, slot):
        if self.copied[slot] is not None:
            self.copied[slot].synchronize()
            self.copied[slot] = None


def _staged(device: torch.device) -> bool:
    """Whether what is read goes through pinned memory."""
    return device.type != "cpu"


def _by_kernels(part: Part) -> bool:
    """Whether it is for a GPU and kernels: then there is a compiler."""
    return part.packs and part.device.type == "cuda"


class _Loading:
    """One call of `load`. What threads share is touched under `lock`. Each kind of thread waits where only what it waits for wakes it:
    readers at `work`, a lane's binder at its `arrived`, a calling thread that binds nothing at `news`."""

    def __init__(self, checkpoint, parts, on_progress, threads):
        self.checkpoint, self.on_progress = checkpoint, on_progress
        self.threads = threads if isinstance(checkpoint, Checkpoint) else 0
        self.lock = threading.RLock()  # a signal's exception may come where it is just held
        self.work, self.news = threading.Condition(self.lock), threading.Condition(self.lock)
        self.made: dict[str, object] = {}
        self.events: list[tuple[int, str, torch.device]] = []
        self.error: BaseException | None = None
        self.stopping = False
        self.stop = torch.zeros(1, dtype=torch.int32)  # the same, for who does not look at Python's objects
        self.by_kernels = any(map(_by_kernels, parts))
        self.lanes = [_Lane(d, [p for p in parts if p.device == d], threading.Condition(self.lock),
                            torch.cuda.Stream(d) if d.type == "cuda" else None) for d in dict.fromkeys(p.device for p in parts)]
        self.turn = 0
        # One device is bound in the calling thread: what a thread allocates and frees, the C library keeps for that thread.
        self.alone = len(self.lanes) == 1
        self.last, self.delivered = (self.lanes[0].parts[0].name, self.lanes[0].device), time.monotonic()

    def run(self):
        for lane in self.lanes if self.by_kernels else ():
            if lane.stream is not None:
                prepare(lane.device)
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
        except BaseException:  # Ctrl-C, or what on_progress raised
            self._stop()
            self._end(workers)
            self._give_back()
            raise
        self._stop()
        self._end(workers)
        if self.error is not None:
            self._give_back()
            raise self.error
        return self.made

    @staticmethod
    def _end(workers):
        for worker in workers:
            if worker.ident is not None:
                worker.join()

    def _give_back(self):
        """Parts, and the units, whose lanes refer to each other; not what the frames of an error that is still held refer to."""
        self.made.clear()
        for lane in self.lanes:
            for reading in lane.readings:
                for unit in reading.units.values():
                    unit.places = None
                reading.units = {}
            lane.waiting.clear()
            lane.pieces.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _deliver(self, wait=0.0):
        """In the calling thread: tells `on_progress` what there is, after at most `wait` seconds, or, every TICK, that there is nothing."""
        with self.lock:
            if wait and not self._finished():
                self.news.wait(wait)
            events, self.events = self.events, []
        if not events and time.monotonic() - self.delivered >= TICK:
            events = [(0, *self.last)]
        for event in events:
            self.last, self.delivered = event[1:], time.monotonic()
            self.on_progress(*event)

    def _finished(self):
        return self.error is not None or all(lane.bound == len(lane.parts) for lane in self.lanes)

    def _stop(self, error=None):
        with self.lock:
            self.error, self.stopping = self.error or error, True
            self.stop.fill_(1)
            for condition in (self.work, self.news, *(lane.arrived for lane in self.lanes)):
                condition.notify_all()

    @contextlib.contextmanager
    def _telling(self, part):
        """What goes wrong with a part, of `part()`, in a thread, is for the calling thread to raise; all threads stop."""
        try:
            yield
        except _Stopped:
            pass
        except BaseException as error:
            short = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
            if short and part():
                error.__traceback__ = None  # its frames hold what was being made
                error = self._out_of_memory(part(), str(error))
            self._stop(error)

    def _out_of_memory(self, part, found):
        """What to do, and how much is missing: of what is still to come as it lies in the files, or of what was asked for last."""
        parts = next(lane.parts for lane in self.lanes if lane.device == part.device)
        behind = parts[parts.index(part) :]
        todo, free = sum(p.nbytes for p in behind), None
        with contextlib.suppress(RuntimeError):  # a GPU whose driver says nothing more
            free = max(0, runtime.free_bytes(part.device))
        asked = re.search(r"Tried to allocate ([\d.]+) ([KMG]?)i?B", found)
        least = int(float(asked[1]) * 1024 ** " KMG".index(asked[2] or " ")) if asked else 0
        told, most = "" if free is None else f", {human_bytes(free)} are free", max(todo, least)
        told += f": {human_bytes(most - free)} or more missing" if free is not None and most > free else ""
        return DoesNotFit(f"{part.device}: out of memory while loading {part.name}: it needs {human_bytes(part.nbytes)}, with the "
                          f"{len(behind) - 1} parts behind it {human_bytes(todo)}, and room to pack it{told}: end what else uses this "
                          "memory, or give more --devices, a smaller --context or fewer --layers")

    # ---- binding: a thread a device, which begins its units and takes their tensors

    def _bind_parts(self, lane):
        with self._telling(lambda: lane.parts[min(lane.bound, len(lane.parts) - 1)]):
            with torch.cuda.device(lane.device) if lane.stream is not None else contextlib.nullcontext():
                for number, part in enumerate(lane.parts):
                    made = self._bind(part, self._source(lane, number))
                    with self.lock:
                        self.made[part.name] = made
                        reading = lane.readings[number]
                        self.events.append((part.nbytes - reading.told, part.name, part.device))
                        reading.told = part.nbytes
                        self._drop_rest(lane, reading)
                        lane.bound += 1
                        self.news.notify()
                if lane.stream is not None:
                    torch.cuda.current_stream(lane.device).synchronize()  # an error in it belongs here

    def _bind(self, part, source):
        try:
            return part.bind(source)
        except KernelError:
            raise
        except UserError:  # of packing, or of a weight that was dequantised and is not finite
            if isinstance(source, Source):
                source.look_again(lambda: self._look_up(TICK))
            raise

    def _source(self, lane, number):
        if not self.threads:
            reading = _Reading(lane.parts[number], lane, {}, lane.parts[number].nbytes)
            lane.readings.append(reading)
            made = self.checkpoint
            made = made.on(lane.device) if isinstance(made, SyntheticCheckpoint) else made
            return _Asked(made, lambda: self._look_up(0.0), lambda size: self._count_made(reading, size))
        self._read_ahead(lane, number)
        reading, check = lane.readings[number], not (lane.parts[number].packs and _staged(lane.device))
        return Source(self.checkpoint, lambda entry: self._take(lane, number, reading, entry), check)

    def _read_ahead(self, lane, number):
        """Looks at part `number`, and begins the next units for which there is room, of whichever part."""
        while True:
            while lane.waiting and (not lane.ahead or lane.ahead + lane.waiting[0].counted <= AHEAD):
                self._begin(lane, lane.waiting[0])
            if len(lane.readings) == len(lane.parts) or (lane.waiting and len(lane.readings) > number):
                return
            part = lane.parts[len(lane.readings)]
            units = _units(self.checkpoint, part.needs)
            reading = _Reading(part, lane, {entry: unit for unit in units for run in unit.runs for entry in run.entries},
                               sum(unit.nbytes for unit in units))
            for unit in units:
                unit.reading = reading
            with self.lock:
                lane.waiting.extend(units)
                lane.readings.append(reading)
                self._tell_the_end()

    def _begin(self, lane, unit, first=False):
        """Memory for a unit's bytes, and the pieces in which they are to be read, before or behind those that wait."""
        begins, size = [], 0
        for run in unit.runs:
            begins.append(-(-size // ALIGN) * ALIGN)
            size = begins[-1] + run.nbytes
        data = torch.empty(size, dtype=torch.uint8, device="cpu" if unit.on_host else lane.device)
        held = memoryview(data.numpy()) if unit.on_host else data
        pieces = _pieces(unit, begins, data)
        if lane.stream is not None:  # the memory may have been another unit's, whose last use is queued there
            lane.stream.wait_event(torch.cuda.current_stream(lane.device).record_event())
        placed = zip(unit.runs, begins, strict=True)
        unit.places = {entry: (held, at + entry.begin - run.begin) for run, at in placed for entry in run.entries}
        unit.left, unit.read = unit.nbytes, not pieces
        lane.ahead += unit.counted
        with self.lock:
            lane.waiting.remove(unit)
            if first:
                lane.pieces.extendleft(reversed(pieces))
            else:
                lane.pieces.extend(pieces)
            self.work.notify(len(pieces))
            self._tell_the_end()

    def _take(self, lane, number, reading, entry):
        """A tensor, once it has been read; a number for the host as one."""
        self._look_up(TICK)
        unit = reading.units.get(entry)
        if unit is None:
            return self.checkpoint.read(entry)
        if unit.places is None:  # asked for before its turn
            self._begin(lane, unit, first=True)
        if not unit.taken:
            self._wait_for(lane, unit)
        place = unit.places.pop(entry, None)
        if place is None:
            return self.checkpoint.read(entry)
        data, at = place
        if isinstance(data, memoryview):  # F32, as the audit says
            value = struct.unpack_from("<f", data, at)[0]
        elif at % max(4, TORCH_DTYPES[entry.dtype].itemsize):  # 4: packing reads four bytes at once
            value = tensor_of(data[at : at + entry.nbytes].clone(), entry)
        else:
            value = tensor_of(data, entry, at)
        if not unit.places:
            lane.ahead -= unit.counted
            del data, place  # before memory is taken for others
            self._read_ahead(lane, number)
        return value

    def _drop_rest(self, lane, reading):
        """What a part did not take."""
        begun = {id(unit): unit for unit in reading.units.values() if unit.places}
        lane.ahead -= sum(unit.counted for unit in begun.values())
        lane.waiting = deque(unit for unit in lane.waiting if unit.reading is not reading)
        reading.units = {}

    def _wait_for(self, lane, unit):
        """Until the unit has been read and is on its device."""
        while not unit.read:  # set last, so it may be looked at without the lock
            with self.lock:
                if self.stopping:
                    raise _Stopped
                lane.awaited = unit
                if not unit.read:
                    lane.arrived.wait(TICK)
                lane.awaited = None
            self._look_up(TICK)
        unit.taken = True

    def _look_up(self, pause):
        """Between two tensors: ends the binding when the loading ends. Tells what there is if nothing was told for `pause` seconds."""
        if self.stopping:
            raise _Stopped
        if self.alone and time.monotonic() - self.delivered >= pause:
            self._deliver()

    def _count_made(self, reading, size):
        with self.lock:
            reading.read += size
            self._tell(reading, min(reading.read, reading.total))  # a tensor may be asked for twice

    def _tell(self, reading, told):
        if told > reading.told:
            self.events.append((told - reading.told, reading.part.name, reading.part.device))
            reading.told = told

    # ---- reading: threads for all devices

    def _read_pieces(self):
        slots = _Slots()
        while self._read_piece(slots):
            pass

    def _read_piece(self, slots):
        """Reads the next one, if there will be any. A thread that waits for it holds none: a piece keeps its unit's memory."""
        piece = self._next_piece()
        if piece is None:
            return False
        with self._telling(lambda: piece.unit.reading.part):
            if not _staged(piece.target.device):
                self._read_straight(piece)
            elif self.by_kernels:
                self._read_by_kernels(piece, slots)
            else:
                self._read_by_slots(piece, slots)
        return True

    def _read_straight(self, piece):
        place = memoryview(piece.target.numpy())
        for run, begin, size, at in _parts(piece):
            self._read_to(run, begin, place[at : at + size])
            self._have_read(piece.unit, size)

    def _read_by_slots(self, piece, slots):
        slots.on(piece.unit.reading.lane.stream)
        try:
            for run, begin, size, at in _parts(piece):
                slot = slots.take(size)
                self._read_to(run, begin, memoryview(slot.numpy()))
                slots.copy(slot, piece.target[at : at + size])
        finally:
            slots.wait()  # who is told of a failure gives the memory back
        self._have_read(piece.unit, sum(size for _, _, size, _ in piece.ranges))

    def _read_to(self, run, begin, view):
        if self.stopping:
            raise _Stopped
        read_range(self.checkpoint.folder, run, begin, view, self.checkpoint.stamps.get(run.shard))

    def _read_by_kernels(self, piece, slots):
        slots.on(piece.unit.reading.lane.stream)
        run, begin, *_ = piece.ranges[0]
        with open_shard(self.checkpoint.folder, run, begin, self.checkpoint.stamps.get(run.shard)) as shard:
            number, done, failed = read_to_gpu(shard.file, [part[1:] for part in piece.ranges], piece.target, slots.memory, self.stop)
            complete = number == len(piece.ranges)
            shard.run, begin, size, _ = piece.ranges[number - complete]
            shard.at = begin + (size if complete else done)
            if failed:
                raise OSError(failed, os.strerror(failed))
            if not complete:
                raise _Stopped if self.stopping else shard.cut_short()
        self._have_read(piece.unit, sum(size for _, _, size, _ in piece.ranges))

    def _have_read(self, unit, size):
        with self.lock:
            unit.left -= size
            self._count(unit.reading, size)
            if not unit.left:
                unit.read = True
                if unit.reading.lane.awaited is unit:
                    unit.reading.lane.arrived.notify()

    def _count(self, reading, size):
        reading.read += size
        self._tell(reading, reading.part.nbytes * reading.read // reading.total)

    def _next_piece(self):
        """The next piece of the next device that has one; None when there are no more."""
        with self.lock:
            while not self.stopping:
                for lane in self.lanes[self.turn :] + self.lanes[: self.turn]:
                    if lane.pieces:
                        self.turn = (self.lanes.index(lane) + 1) % len(self.lanes)
                        return lane.pieces.popleft()
                if self._no_more():
                    return None
                self.work.wait()
        return None

    def _no_more(self):
        return all(len(lane.readings) == len(lane.parts) and not lane.waiting for lane in self.lanes)

    def _tell_the_end(self):
        if self._no_more():
            self.work.notify_all()


def _units(checkpoint: Checkpoint, needs: Sequence[Need]) -> list[_Unit]:
    """What to read for `needs`, as it is asked for: what is no routed expert, in the order of the shards, and then the experts by number.
    Global scales are for the host: they become numbers."""
    alone, scalars, routed = [], [], {}
    for need in needs:
        found = checkpoint.entries(need)
        if isinstance(found, Layout):
            together = routed.setdefault(need.name.rpartition(".")[0], []) if need.kind == "routed experts" else alone
            together += [entry for entry in (found.payload, found.scale) if entry is not None]
            scalars += [found.global_scale] if found.global_scale is not None else []
        elif found is not None:
            alone.append(found)
    units = [_Unit([run], on_host=True) for run in runs_of(scalars, GAP)] + [_Unit([run]) for entry in alone for run in runs_of([entry])]
    units.sort(key=lambda unit: (unit.runs[0].shard, unit.runs[0].begin))
    group, size = [], 0
    for entries in routed.values():
        nbytes = sum(entry.nbytes for entry in entries)
        if group and size + nbytes > PIECE:
            units.append(_Unit(runs_of(group, GAP)))
            group, size = [], 0
        group, size = group + entries, size + nbytes
    return units + ([_Unit(runs_of(group, GAP))] if group else [])


def _pieces(unit: _Unit, begins: list[int], data: torch.Tensor) -> list[_Piece]:
    """Of at most PIECE bytes. begins: where the unit's runs lie in `data`."""
    cut: list[list[tuple[Run, int, int, int]]] = []
    room = 0
    for run, place in zip(unit.runs, begins, strict=True):
        done = 0
        while done < run.nbytes:
            if not room or cut[-1][0][0].shard != run.shard:
                cut.append([])
                room = PIECE
            size = min(room, run.nbytes - done)
            cut[-1].append((run, run.begin + done, size, place + done))
            done, room = done + size, room - size
    pieces = []
    for ranges in cut:
        first, (_, _, size, last) = ranges[0][3], ranges[-1]
        pieces.append(_Piece(unit, [(*rest, at - first) for *rest, at in ranges], data[first : last + size]))
    return pieces


def _parts(piece: _Piece) -> Iterator[tuple[Run, int, int, int]]:
    """Its ranges in parts of at most SLOT bytes."""
    for run, begin, size, at in piece.ranges:
        for done in range(0, size, SLOT):
            yield run, begin + done, min(SLOT, size - done), at + done
