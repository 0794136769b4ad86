"""Decoding: one token in, the next one out. Step by step, or, on the kernels, as one captured CUDA graph per GPU."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from . import ops, streaming
from .cache import Cache
from .errors import CheckpointError
from .kernels import launch
from .kernels.hop import Hop, linked
from .model import Model
from .plan import DevicePlan
from .sampler import Sampler

T = TypeVar("T")


class Decoder:
    """One answer: `sample` takes the prompt's last logits, `step` runs the last token and samples the next.

    `logits` [vocab] fp32: the row behind the last sampled token.
    """

    def __init__(self, model: Model, cache: Cache, sampler: Sampler):
        self.model, self.cache, self.sampler = model, cache, sampler
        self.logits: torch.Tensor | None = None
        self._token: torch.Tensor | None = None

    def sample(self, logits: torch.Tensor) -> int:
        """The token behind these logits, which are those of the cache's last token."""
        self.logits = logits
        self._token = self.sampler(logits, torch.tensor([self.cache.position - 1], device=logits.device))
        return self._checked()

    def step(self) -> int:
        """Runs the last token and samples the next. Raises as Model.forward does."""
        return self.sample(self.model.forward([int(self._token)], self.cache))

    def _fetched(self) -> int:
        return int(self._token)  # the step's one synchronisation

    def _checked(self) -> int:
        token = self._fetched()
        if token < 0:
            raise CheckpointError(f"non-finite logits after {self.cache.position} tokens: expected finite numbers; run with "
                                  "--backend torch, which names the first layer that makes them")
        return token


def capture(device: torch.device, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """`work` on a GPU as a CUDA graph: what replays it, and its result, whose tensors every replay fills anew. Nothing runs yet.

    Where experts are streamed the graph is cut: the host brings those that the part before has chosen. The parts share one pool of memory,
    as they are replayed in the order of their capture, and one stream, of this GPU: torch's own for captures is of the first GPU that one
    was made on, and would leave the others' work outside.
    """
    parts: list[Callable[[], None]] = []

    def begin():
        graph = torch.cuda.CUDAGraph()
        capturing.enter_context(torch.cuda.graph(graph, pool=pool, stream=stream))
        parts.append(graph.replay)

    def cut(bring):
        capturing.close()  # ends the capture of the part
        parts.append(bring)
        begin()

    with torch.cuda.device(device), contextlib.ExitStack() as capturing, streaming.cutting(cut):
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        begin()
        out = work()

    def replay():
        with torch.cuda.device(device):
            for part in parts:
                part()

    return replay, out


@dataclass
class Stage:
    """A GPU's part of the step and the tensors that its graph reads and writes.

    counts int64 [2]: the position of the token to run, and the step's number; the graph counts both up. ids int64 [1]: the token. X [1, n,
    D]: the streams that come in (the first stage makes its own). out: the streams that go out, or on the last GPU (logits [vocab], token
    [1]). arrives: what brings X and ids within the graph, on the first GPU the ids alone; without it the host copies them before.
    leaves: the next stage's, or on the last GPU the first one's.
    """

    share: DevicePlan
    counts: torch.Tensor
    ids: torch.Tensor
    X: torch.Tensor
    arrives: Hop | None = None
    leaves: Hop | None = None
    replay: Callable[[], None] | None = None
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def positions(self) -> torch.Tensor:
        return self.counts[:1]

    @property
    def number(self) -> torch.Tensor:
        return self.counts[1:]


class GraphDecoder(Decoder):
    """The same as one CUDA graph per GPU, captured at the first step and replayed for every token: token, position and counts live on the
    devices, and the host waits once a token, to read it, and once for each layer whose experts are streamed.

    Between GPUs that can write each other's memory the graphs hand on the streams, and the token back to the first, by themselves
    (kernels/hop.py): all are launched at once, and each waits on its GPU for the one before, which was launched first. A hop's memory is
    written again in the next step alone, which is launched when the host has read this one's token: the last GPU made it of what all
    others had taken by then. Between others, and between two stages of one GPU, the host gives copies, and torch makes each GPU wait for
    the other by events.
    """

    def __init__(self, model: Model, cache: Cache, sampler: Sampler):
        super().__init__(model, cache, sampler)
        self._position = -1  # where the stages stand, with the last token; -1: elsewhere
        self._number = 0  # of the last step that was begun, never used again
        self._stages = []
        for share in model.plan.devices:
            counts = torch.zeros(2, dtype=torch.int64, device=share.device)
            ids = torch.zeros(1, dtype=torch.int64, device=share.device)
            self._stages.append(Stage(share, counts, ids, _streams(model, share.device)))
        for before, stage in zip([self._stages[-1], *self._stages], self._stages, strict=False):
            if linked(before.share.device, stage.share.device):
                nbytes = 0 if stage is self._stages[0] else stage.X.nbytes
                before.leaves = stage.arrives = Hop(before.share.device, stage.share.device, nbytes)

    def sample(self, logits: torch.Tensor) -> int:
        """As Decoder's."""
        self._position = -1  # its token has not gone to the stages
        return super().sample(logits)

    @torch.inference_mode()
    def step(self) -> int:
        """Replays the graphs. Raises CheckpointError when the logits are not finite, KernelError when a hop waited in vain."""
        self.model.check([0], self.cache)  # that there is room; the token itself was sampled on the device
        elsewhere, self._position = self._position != self.cache.position, -1  # until all has been given
        self._number += 2 if elsewhere else 1  # the last GPU may have sent a token under the next number, which nobody must take now
        first, last, streams = self._stages[0], self._stages[-1], None
        if elsewhere:  # the prompt, or another caller, moved on; or a step was broken off
            for stage in self._stages:
                stage.positions.fill_(self.cache.position)
                stage.number.fill_(self._number)
            if first.arrives is not None:
                first.arrives.send(None, self._token, last.number)
        for stage in self._stages:
            if stage.arrives is None:
                stage.ids.copy_(self._token)
                if streams is not None:
                    stage.X.copy_(streams)
            if stage.replay is None:
                self._capture(stage)
            stage.replay()
            streams = stage.out
        self.logits, self._token = last.out
        self.cache.position += 1
        self._position = self.cache.position
        return self._checked()

    def _fetched(self) -> int:
        token = super()._fetched()
        for stage in self._stages:
            if stage.arrives is not None:
                stage.arrives.check()
        return token

    def _capture(self, stage: Stage) -> None:
        """Captures a stage, after a run on throw-away state that builds and loads its kernels, which a capture cannot, and hops nowhere."""
        seen = self.sampler.seen.clone()
        trial = replace(stage, ids=stage.ids.clone(), counts=torch.zeros_like(stage.counts), arrives=None, leaves=None)
        self._work(trial, self.model.new_cache(min(256, self.cache.context)))
        self.sampler.seen.copy_(seen)
        stage.replay, stage.out = capture(stage.share.device, lambda: self._work(stage, self.cache))

    def _work(self, stage: Stage, cache: Cache) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What a stage does for a token; returns its `out`."""
        model, devices = self.model, self.model.plan.devices
        first, last = stage.share is devices[0], stage.share is devices[-1]

        def arrived() -> torch.Tensor:
            if stage.arrives is not None:
                stage.arrives.receive(None if first else stage.X, stage.ids, stage.number)
            return model.embedded(stage.ids) if first else stage.X

        out = model.run_share(stage.share, arrived, stage.ids, stage.positions, cache)
        if last:
            logits = model.head(out)[0]
            out = logits, self.sampler(logits, stage.positions)
            stage.counts += 1
            if stage.leaves is not None:
                stage.leaves.send(None, out[1], stage.number)  # the next step's, whose first GPU takes it under that step's number
        else:
            if stage.leaves is not None:
                stage.leaves.send(out, stage.ids, stage.number)
            stage.counts += 1  # behind what the next GPU waits for
        return out


def _streams(model: Model, device: torch.device) -> torch.Tensor:
    """[1, n, D], a token's."""
    return torch.zeros(1, model.config.hc_mult, model.config.hidden_size, dtype=model.numerics.dtype, device=device)


def compare_with_prefill(model: Model, ids: list[int], rows: torch.Tensor, first: int) -> tuple[str, str | None]:
    """Holds rows first - 1 .. len(ids) - 1 of logits `rows` [n, vocab], made by decoding, to a fresh prefill of the tokens `ids`.

    Returns (what was found, what is wrong or None). The same arithmetic in other shapes sums in another order: 1e-5 of a row's size in
    fp32, 4e-3 in bf16; and now and then that turns the choice of an expert or an entry, which moves a row by up to 0.4. The bundled
    checkpoint in bf16 on a CPU, 701 rows: 4e-3 in the median, 3 rows above 0.1. So half of the rows must agree closely, and all but one
    in a hundred roughly.
    """
    cache, errors, changed = model.new_cache(), [], []
    for start in range(0, len(ids), cache.chunk):
        fresh = model.forward(ids[start : start + cache.chunk], cache, "all").cpu()
        for i, row in enumerate(fresh, start):
            if i >= first - 1:
                error = float((rows[i] - row).norm() / row.norm())
                errors.append(math.inf if math.isnan(error) else error)
                if rows[i].argmax() != row.argmax():
                    changed.append(i)
    half, most = (1e-4, 1e-3) if model.numerics.dtype == torch.float32 else (2e-2, 1e-1)
    median, far = sorted(errors)[len(errors) // 2], sum(e > most for e in errors)
    told = (f"decode-consistency: {len(errors)} rows of logits against a fresh prefill: relative difference {median:.1e} in the median, "
            f"{max(errors):.1e} at most, above {most:g} in {far}; the largest logit is another one in {len(changed)}"
            + (f" (first after token {changed[0]})" if changed else ""))
    if median <= half and far <= max(1, len(errors) // 100) and max(errors) < math.inf:
        return told, None
    return told, (f"--decode-consistency: expected differences of at most {half:g} in the median and above {most:g} in one row of a "
                  f"hundred, found {median:.1e} and {far} of {len(errors)}: the cache does not hold what the prefill saw")


def hops(model: Model) -> str | None:
    """How a decode step goes from GPU to GPU: by "peer stores" (kernels/hop.py), by "events" (torch's copies), or both, with the pairs of
    the latter. None where there is no hop."""
    pairs = list(itertools.pairwise(share.device for share in model.plan.devices))
    copied = [f"{a} to {b}" for a, b in pairs if not (captures() and linked(a, b))]
    if not copied:
        return "peer stores" if pairs else None
    return "events" if len(copied) == len(pairs) else f"peer stores; events from {', '.join(copied)}"


def hop_us(model: Model, trips: int = 32) -> float | None:
    """us that a token's streams take from a GPU to the next, as decoding moves them: of the slowest two neighbours, half of a round trip, a
    mean over `trips` one behind the other. None where there is no hop.

    By peer stores it is what a step's graphs have more than those of one GPU: a graph on each of the two, and of each hop both launches,
    the sender's behind the kernel whose streams it sends and the receiver's up to the start of the next; the way of the token too, and no
    launch of a graph. By events it is torch's copy with what the GPUs wait for each other around it.
    """
    devices, slowest = [share.device for share in model.plan.devices], None
    for first, second in itertools.pairwise(devices):
        rounds = _pushed_rounds if captures() and linked(first, second) and linked(second, first) else _copied_rounds
        begin_all, check = rounds(model, first, second, trips)
        with torch.cuda.device(first):
            for _ in range(2):  # the first time is not counted
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(20_000_000)  # 10 ms, in which the host queues all of it: that takes it longer than a hop takes
                begin.record()
                begin_all()
                end.record()
                end.synchronize()
                check()
        slowest = max(slowest or 0.0, 1e3 * begin.elapsed_time(end) / (2 * trips))
    return slowest


def _copied_rounds(model: Model, first: torch.device, second: torch.device, trips: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """(What gives the GPUs so many round trips of the streams, by copies; what raises where one failed.)"""
    here, there = _streams(model, first), _streams(model, second)

    def begin():
        for _ in range(trips):
            there.copy_(here)
            here.copy_(there)

    return begin, lambda: None


def _pushed_rounds(model: Model, first: torch.device, second: torch.device, trips: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """The same by peer stores, as a graph on each GPU: what comes is what is sent on."""
    nbytes = _streams(model, first).nbytes
    there, back = Hop(first, second, nbytes), Hop(second, first, nbytes)

    def captured(device, *ways):
        X, token = _streams(model, device), torch.zeros(1, dtype=torch.int64, device=device)
        numbers = torch.arange(1, trips + 1, device=device)

        def work():
            for number in numbers.split(1):
                for way in ways:
                    way(X, token, number)
            numbers.add_(trips)  # those of the next replay
            return X, token, numbers  # kept with the graph, which has their addresses

        return capture(device, work)

    graphs = captured(first, there.send, back.receive), captured(second, there.receive, back.send)

    def begin():
        for replay, _ in graphs:
            replay()

    def check():
        there.check()
        back.check()

    return begin, check


def captures() -> bool:
    """Whether steps are captured: where the kernels run, unless DSV4_SYNC=1 asks for one launch at a time. Definitions look at values."""
    return ops.max_tokens() is not None and not launch.SYNC


def decoder(model: Model, cache: Cache, sampler: Sampler) -> Decoder:
    """Graphs where steps are captured, else step by step."""
    return (GraphDecoder if captures() else Decoder)(model, cache, sampler)
