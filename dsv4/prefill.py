"""Reading a prompt: its chunks one behind the other through the devices, so that each device works on a chunk of its own.

The host puts a chunk into every device's queue (its stream), in the order of the layers, and goes on with the next chunk; events between
the queues say what waits for what. It waits for a chunk only when `ahead` others are behind it. So n chunks through d equal devices take
as long as n + d - 1 on one of them, and not n * d.

On the kernels a chunk is 1,024 tokens or 8 (runtime.choose_steps). Giving the kernels of 8 one by one takes the host 0.36 ms a layer (they
do nothing, one thread of a virtual machine), 15 ms for Flash, where each of two H200 has about 5 ms of work (predicted). So a device's part
of a whole chunk is captured as a CUDA graph, once, behind a first chunk that brings the kernels to the device; what is left of the prompt,
and a short prompt, goes launch by launch. Both are the same kernels on the same numbers: the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from . import decode
from .cache import Cache
from .model import Model
from .plan import DevicePlan

CAPTURED_FROM = 8  # whole chunks to come; for fewer a capture, which is a pass of the host over the layers and more, would not pay


class Queue:
    """What a device is given to do, in order: the stream that torch has for a GPU now, or (`own`) another one. A CPU has done a thing when
    it was given it, and marks are None."""

    def __init__(self, device: torch.device, own: bool = False):
        gpu = device.type == "cuda"
        self.stream = (torch.cuda.Stream(device) if own else torch.cuda.current_stream(device)) if gpu else None

    def mark(self) -> torch.cuda.Event | None:
        """What is reached when all has been done that was given so far."""
        return self.stream.record_event() if self.stream is not None else None

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """What is given from now on waits for the mark, of any device."""
        if mark is not None:
            self.stream.wait_event(mark)

    def current(self):
        """Within it, what torch does on this device goes here."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()


class _Stage:
    """A device's part: its layers, its queue, and the tensors that a captured chunk reads, of which a shorter one uses the first rows.

    ids, positions int64 [chunk], X [chunk, n, D] (None on the first device, which makes its own): of the chunk that is run next. Streams
    come into `landing` from the device before by a queue of their own (`arriving`): there they wait until those before them were taken,
    and for nothing else of this device, so that the one before can be two chunks ahead.
    """

    def __init__(self, share: DevicePlan, model: Model, chunk: int, first: bool):
        self.share, self.queue, self.arriving = share, Queue(share.device), Queue(share.device, own=True)
        self.ids, self.positions = torch.zeros(2, chunk, dtype=torch.int64, device=share.device)
        shape, dtype = (chunk, model.config.hc_mult, model.config.hidden_size), model.numerics.dtype
        self.X, self.landing = (None if first else torch.zeros(shape, dtype=dtype, device=share.device) for _ in range(2))
        self.taken = self.queue.mark()
        self.prompt: torch.Tensor | None = None  # all of its ids
        self.replay: Callable[[], None] | None = None
        self.out: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def fetch(self, at: int, size: int, start: int, X: torch.Tensor | None, before: Queue | None) -> None:
        """The inputs of `size` tokens, the prompt's from `at` on, the first of which has the position `start`; X [size, n, D] is what the
        stage before gives to its queue."""
        self.ids[:size].copy_(self.prompt[at : at + size])
        torch.arange(start + at, start + at + size, out=self.positions[:size])
        if X is None:
            return
        self.arriving.wait(before.mark())
        self.arriving.wait(self.taken)
        with self.arriving.current():  # between GPUs torch copies on X's current stream, and makes it and this one wait for each other
            self.landing[:size].copy_(X)
        arrived = self.arriving.mark()
        before.wait(arrived)  # X may be written again
        self.queue.wait(arrived)
        self.X[:size].copy_(self.landing[:size])
        self.taken = self.queue.mark()


@dataclass
class _Chunk:
    """One that was given to the devices: its tokens, where the sequence stands behind it, what the head made of it, and whether all is
    finite, on its way to the host until `landed`; by layer on the devices where it was not captured."""

    size: int
    end: int
    logits: torch.Tensor | None
    fine: torch.Tensor
    finite: dict[str, torch.Tensor]
    landed: torch.cuda.Event | None


class Prefill:
    """Reads prompts into a cache.

    `ahead`: how many chunks the host puts behind the one that it waits for; by default two for each device, one that it runs and one that
    lands there meanwhile. On a CPU there are none.
    """

    def __init__(self, model: Model, cache: Cache, ahead: int | None = None):
        self.model, self.cache = model, cache
        self.ahead = 2 * len(model.plan.devices) if ahead is None else ahead
        self._stages = [_Stage(share, model, cache.chunk, share is model.plan.devices[0]) for share in model.plan.devices]

    @torch.inference_mode()
    def read(self, ids: list[int], on_chunk: Callable[[int, torch.Tensor | None], None] | None = None,
             rows: bool = False) -> torch.Tensor:
        """Runs the next len(ids) tokens of the sequence, at least one; returns the logits after the last one, fp32 [vocab].

        `on_chunk(tokens, logits)` is called for every chunk in order, once it has been run and counted; with `rows` with its logits
        [tokens, vocab] fp32, and then each chunk is waited for: rows of many at once are not planned for. What it raises ends the reading,
        and what was not told of is not counted. Raises UserError and CheckpointError as Model.forward does.
        """
        model, cache, chunk = self.model, self.cache, self.cache.chunk
        model.check(ids, cache)
        start, flying, last = cache.position, deque(), None
        for stage in self._stages:
            stage.prompt = torch.tensor(ids, device=stage.share.device)
        for at in range(0, len(ids), chunk):
            size, end = min(chunk, len(ids) - at), at + chunk >= len(ids)
            captured = size == chunk and decode.captures() and (
                self._stages[0].replay is not None or at > 0 and len(ids) - at >= CAPTURED_FROM * chunk)
            last = self._put(at, size, start, captured, "all" if rows else "last" if end else "none")
            flying.append(last)
            while flying and (end or rows or flying[0].landed is None or len(flying) > self.ahead):
                self._land(flying.popleft(), on_chunk, rows)
        return last.logits[-1]

    def _put(self, at: int, size: int, start: int, captured: bool, logits: str) -> _Chunk:
        """Gives a chunk to all devices."""
        X, before, finite = None, None, {}
        for stage in self._stages:
            stage.fetch(at, size, start, X, before)
            if not captured:
                X, fine = self._work(stage, size, finite)
            else:
                if stage.replay is None:
                    stage.replay, stage.out = decode.capture(stage.share.device, lambda stage=stage: self._work(stage, size, None))
                stage.replay()
                X, fine = stage.out
            before = stage.queue
        out = None
        if logits != "none":
            out = self.model.head(X if logits == "all" else X[-1:])
            fine = fine & out.isfinite().all()
        fine = fine.to("cpu", non_blocking=True)
        return _Chunk(size, start + at + size, out, fine, finite, before.mark())

    def _work(self, stage: _Stage, size: int, finite: dict[str, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a device does for a chunk: (the streams that go out; of the last device whether they are finite)."""
        model, devices, ids = self.model, self.model.plan.devices, stage.ids[:size]
        X = model.embedded(ids, finite) if stage.X is None else stage.X[:size]
        X = model.run_share(stage.share, X, ids, stage.positions[:size], self.cache, finite)
        return X, X.isfinite().all() if stage.share is devices[-1] else None

    def _land(self, chunk: _Chunk, on_chunk, rows: bool) -> None:
        """Waits for a chunk, and counts and tells it."""
        if chunk.landed is not None:
            chunk.landed.synchronize()
        self.model.refuse_non_finite(bool(chunk.fine), chunk.finite, chunk.end)
        self.cache.position = chunk.end
        if on_chunk is not None:
            on_chunk(chunk.size, chunk.logits if rows else None)
