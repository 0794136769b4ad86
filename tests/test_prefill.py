"""Reading a prompt over several devices: the bits of one device; chunks overlap; and nothing is read before it is there or written while it
is read, whatever order the devices' queues run in."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dsv4 import decode, prefill
from dsv4.checkpoint import Checkpoint
from dsv4.errors import CheckpointError, UserError
from dsv4.layers import Numerics
from dsv4.model import Model
from dsv4.plan import DevicePlan, Plan
from dsv4.prefill import CAPTURED_FROM, Prefill
from dsv4.sampler import Sampler, Sampling
from tests.memory_checkpoint import CPU, model_of, random_checkpoint
from tests.test_decode import fake_capture

CONTEXT = 100


def model_over(devices: int, chunk: int):
    """The small model in so many shares, its caches for chunks of so many tokens."""
    model = model_of(random_checkpoint("small", 0), CONTEXT, Numerics())
    layers = model.plan.layers
    cuts = [round(i * len(layers) / devices) for i in range(devices + 1)]
    shares = tuple(DevicePlan(CPU, layers[a:b], 0, 0, 0, 0) for a, b in zip(cuts, cuts[1:], strict=False))
    model.plan = Plan(layers, shares, CONTEXT, chunk, False)
    return model


def random_prompt(model, length, seed):
    return torch.randint(model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def captured(monkeypatch) -> list:
    """Captures where there is no GPU; the devices whose parts were captured."""
    made = []
    monkeypatch.setattr(decode, "captures", lambda: True)
    monkeypatch.setattr(decode, "capture", lambda device, work: made.append(device) or fake_capture(device, work))
    return made


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("devices", [1, 3])
def test_any_split_gives_the_bits_of_one_chunk_after_the_other(devices, graphs, monkeypatch, seed):
    """Logits of every token, of the last one alone, and of what is read behind it: the caches are the same too. A short prompt and a ragged
    end go launch by launch."""
    made, chunk, model = captured(monkeypatch) if graphs else [], 4, model_over(devices, 4)
    ids, more = random_prompt(model, 4 * (CAPTURED_FROM + 2) + 3, seed), random_prompt(model, 6, seed + 1)
    one, cache = model_over(1, chunk), model_over(1, chunk).new_cache()
    want = [one.forward(ids[i : i + chunk], cache, "all") for i in range(0, len(ids), chunk)]
    behind = [one.forward(part, cache) for part in (more[:4], more[4:])][-1]
    cache.reset()
    wanted = [one.forward(ids[i : i + chunk], cache) for i in range(0, len(ids), chunk)][-1]  # one row is another product than three
    torch.testing.assert_close(wanted, want[-1][-1])
    for rows in (True, False):
        told, reader = [], Prefill(model, model.new_cache())
        last = reader.read(ids, lambda size, logits, told=told: told.append((size, logits)), rows=rows)
        assert torch.equal(last, want[-1][-1] if rows else wanted) and reader.cache.position == len(ids)
        assert [size for size, _ in told] == [4] * (CAPTURED_FROM + 2) + [3]
        if rows:
            assert torch.equal(torch.cat([logits for _, logits in told]), torch.cat(want))
        else:
            assert [logits for _, logits in told] == [None] * len(told)
        assert torch.equal(reader.read(more), behind)
        assert len(made) == (devices * (1 if rows else 2) if graphs else 0)  # once each, of either reader


def test_a_prompt_too_short_for_a_capture_makes_none(monkeypatch):
    made, model = captured(monkeypatch), model_over(2, 4)
    reader = Prefill(model, model.new_cache())
    reader.read(list(range(4 * CAPTURED_FROM + 3)))
    assert not made
    reader.read(list(range(4 * CAPTURED_FROM + 4)))
    assert len(made) == 2


def test_what_is_refused_counts_no_tokens():
    model = model_over(2, 4)
    reader = Prefill(model, model.new_cache())
    for ids, expected in (([], "at least one token, found none"), ([1] * (CONTEXT + 1), f"hold {CONTEXT} tokens, found {CONTEXT + 1}"),
                          ([model.config.vocab_size], "token id")):
        with pytest.raises(UserError, match=expected):
            reader.read(ids)
    assert reader.cache.position == 0


@pytest.mark.parametrize("graphs", [False, True])
def test_non_finite_streams_end_it_in_the_chunk_that_meets_them(graphs, monkeypatch):
    """By layer where it went launch by launch; a captured chunk says how to find it."""
    captured(monkeypatch) if graphs else None
    model, told = model_over(2, 4), []
    model.embed = model.embed.clone()
    model.embed[7] = float("inf")
    reader = Prefill(model, model.new_cache())
    expected = "found others: DSV4_SYNC=1 names" if graphs else "the embedding made the first"
    with pytest.raises(CheckpointError, match=f"non-finite logits after 12 tokens: expected finite numbers, {expected}"):
        reader.read([5] * 10 + [7] + [5] * 30, lambda size, rows: told.append(size))
    assert told == [4, 4] and reader.cache.position == 8


def test_what_the_callback_raises_ends_it():
    model = model_over(2, 4)
    reader, told = Prefill(model, model.new_cache()), []

    def stop(size, rows):
        told.append(size)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reader.read([5] * 40, stop)
    assert reader.cache.position == 12


# ------------------------------------------------------------------------------------------- the order of the devices' queues


class Machine(TorchDispatchMode):
    """Devices that are late. Every operation of torch is one of a queue, which is followed with a clock (by queue: what is known to be done
    where it begins) and with a time: a device's layers take 1, anything else nothing. `races`: what was touched by two queues that do not
    wait for each other, at least one of them writing, or given back to the allocator so. Reading a number makes the host wait for it."""

    def __init__(self):
        super().__init__()
        self.queues, self.stack, self.races, self.host, self.host_time, self.busy = [], [None], [], {}, 0.0, []
        self.accesses: dict[int, list] = {}  # by storage: (queue, its count, whether it wrote)

    def touch(self, tensors, writes, cost=0.0):
        queue = self.stack[-1]
        if queue is None:
            return
        queue.begin()
        begun = max(queue.time, self.host_time)
        queue.time = begun + cost
        if cost:
            self.busy.append((queue, begun, queue.time))
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.accesses:
                self.accesses[storage._cdata] = []
                weakref.finalize(storage, self.free, storage._cdata, self.stack[0])  # nothing is allocated by an arriving queue
            seen, wrote = self.accesses[storage._cdata], any(storage._cdata == w.untyped_storage()._cdata for w in writes)
            self.races += [(other.name, queue.name) for other, count, written in seen
                           if (wrote or written) and queue.clock.get(other, 0) < count]
            seen.append((queue, queue.clock[queue], wrote))

    def free(self, key, owner):
        self.races += [("free", other.name) for other, count, _ in self.accesses.pop(key, []) if owner.clock.get(other, 0) < count]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(func._schema.arguments)]
        tensors = [(a, t) for a, value in given for t in (value if isinstance(value, list | tuple) else [value])
                   if isinstance(t, torch.Tensor)]
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero):
            self.look(args[0])
            return out
        writes = [t for a, t in tensors if a.alias_info is not None and a.alias_info.is_write]
        if writes or not any(a.alias_info is not None for a, _ in tensors):  # no view
            made = [out] if isinstance(out, torch.Tensor) else []
            self.touch([t for _, t in tensors] + made, writes + made)
        return out

    def look(self, tensor):
        """The host reads a number. It waits for all that its queue was given, if it does not know it done."""
        for queue, count, wrote in self.accesses.get(tensor.untyped_storage()._cdata, []):
            if wrote and self.host.get(queue, 0) < count:
                self.host |= {q: max(n, self.host.get(q, 0)) for q, n in queue.clock.items()}
                self.host_time = max(self.host_time, queue.time)


@dataclass
class Mark:
    machine: Machine
    clock: dict
    time: float

    def synchronize(self):
        self.machine.host |= {q: max(n, self.machine.host.get(q, 0)) for q, n in self.clock.items()}
        self.machine.host_time = max(self.machine.host_time, self.time)


def queues_of(machine):
    class Queue:
        def __init__(self, device, own=False):
            self.name, self.clock, self.time = f"{len(machine.queues) // 2}{' arriving' * own}", {}, 0.0
            machine.queues.append(self)

        def begin(self):
            for queue, count in machine.host.items():
                self.clock[queue] = max(count, self.clock.get(queue, 0))
            self.clock[self] = self.clock.get(self, 0) + 1

        def mark(self):
            return Mark(machine, dict(self.clock), max(self.time, machine.host_time))

        def wait(self, mark):
            for queue, count in mark.clock.items():
                self.clock[queue] = max(count, self.clock.get(queue, 0))
            self.time = max(self.time, mark.time)

        @contextlib.contextmanager
        def current(self):
            machine.stack.append(self)
            yield
            machine.stack.pop()

    return Queue


def on_late_devices(model, ids, monkeypatch, chunks=1, ahead=None, graphs=False) -> Machine:
    """What happened while the prompt was read."""
    machine = Machine()
    if graphs:
        captured(monkeypatch)
    monkeypatch.setattr(prefill, "Queue", queues_of(machine))
    run_share, fetch, to = model.run_share, prefill._Stage.fetch, torch.Tensor.to

    def layers(share, X, ids, positions, cache, finite=None):
        with _disable_current_modes():
            out = run_share(share, X, ids, positions, cache)
        machine.touch([X, ids, positions, out], [out], cost=1.0)
        return out

    def fetched(stage, *args):
        machine.stack[-1] = stage.queue  # what is given to this device from now on
        fetch(stage, *args)

    def on_its_way(tensor, *args, non_blocking=False, **kwargs):  # to the host: a copy, which the device's queue makes
        return tensor.clone() if non_blocking else to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", on_its_way)
    monkeypatch.setattr(model, "run_share", layers)
    monkeypatch.setattr(prefill._Stage, "fetch", fetched)
    reader = Prefill(model, model.new_cache(), ahead)
    with machine:
        machine.logits = reader.read(ids)
    machine.stack[-1] = None
    monkeypatch.undo()
    return machine


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("devices", [2, 4])
def test_chunks_overlap_and_race_with_nothing(devices, graphs, monkeypatch, seed):
    """n chunks take n + d - 1, and while chunk c is on a device the one before it has chunk c + 1. One after the other they take n * d."""
    model, chunks = model_over(devices, 4), CAPTURED_FROM + 3
    ids = random_prompt(model, 4 * chunks, seed)
    machine = on_late_devices(model, ids, monkeypatch, graphs=graphs)
    assert not machine.races, sorted(set(machine.races))
    assert max(queue.time for queue in machine.queues) == machine.host_time == chunks + devices - 1
    began = {}
    for queue, start, _ in machine.busy:
        began.setdefault(queue.name, []).append(start)
    assert began == {str(d): [float(d + c) for c in range(chunks)] for d in range(devices)}
    assert torch.equal(machine.logits, Prefill(model_over(1, 4), model_over(1, 4).new_cache()).read(ids))
    alone = on_late_devices(model, ids, monkeypatch, ahead=0, graphs=graphs)
    assert not alone.races and alone.host_time == chunks * devices


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_device_holds_back_no_more_than_it_must(slow, monkeypatch):
    """Three devices, one of which takes 3 for a chunk: all others wait for it and it waits for nobody."""
    model, touch, chunks = model_over(3, 4), Machine.touch, CAPTURED_FROM

    def slower(machine, tensors, writes, cost=0.0):
        touch(machine, tensors, writes, cost * (3 if machine.stack[-1] and machine.stack[-1].name == str(slow) else 1))

    with monkeypatch.context() as patch:
        patch.setattr(Machine, "touch", slower)
        machine = on_late_devices(model, [5] * 4 * chunks, patch)
    assert not machine.races and machine.host_time == 3 * chunks + 2


def test_any_split_of_the_bundled_checkpoint_gives_its_tokens_and_logits():
    """Cut at every place, and loaded by two lanes at once: a prompt and 12 greedy steps, bit for bit those of one device."""
    checkpoint = Checkpoint.open(Path(__file__).parents[1] / "checkpoints" / "tiny")
    layers, prompt = tuple(range(checkpoint.config.num_hidden_layers)), list(range(40, 77))

    def plan(cuts, other=CPU):
        shares = [layers[a:b] for a, b in zip((0, *cuts), (*cuts, len(layers)), strict=True)]
        return Plan(layers, tuple(DevicePlan((CPU, other)[i % 2], share, 0, 0, 0, 0) for i, share in enumerate(shares)), CONTEXT, 8, False)

    def answer(model):
        cache = model.new_cache()
        it = decode.Decoder(model, cache, Sampler(Sampling(temperature=0), prompt, model.config.vocab_size, CONTEXT, CPU))
        tokens, rows = [it.sample(Prefill(model, cache).read(prompt))], [it.logits]
        for _ in range(12):
            tokens.append(it.step())
            rows.append(it.logits)
        return tokens, torch.stack(rows)

    model = Model(checkpoint, plan(()), Numerics(keep_dequantised=True))
    want, answers = answer(model), []
    for cuts in [(n,) for n in layers[1:]] + [(1, 2, 5), layers[1:]]:
        model.plan = plan(cuts)
        answers.append(answer(model))
    answers.append(answer(Model(checkpoint, plan((2, 4), torch.device("cpu", 0)), Numerics(keep_dequantised=True))))
    assert all(tokens == want[0] and torch.equal(rows, want[1]) for tokens, rows in answers) and len(answers) == len(layers) + 2
