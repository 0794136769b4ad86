"""dsv4/streaming.py: a model whose routed experts come from files or from the host is the resident one, bit for bit; what is read, and how
much of it ahead; faults in the middle of a run; where a captured step is cut; what the plan says of it."""

import errno
import functools
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4 import decode, loader, ops, runtime, shards, streaming
from dsv4.checkpoint import Checkpoint, Need
from dsv4.config import PRESETS
from dsv4.decode import Decoder, GraphDecoder
from dsv4.errors import CheckpointError, DoesNotFit
from dsv4.layers import Numerics
from dsv4.model import Model
from dsv4.plan import DevicePlan, Plan, Planner, Room, Wish, make_plan
from dsv4.report import PlanReport, run_line
from dsv4.sampler import Sampler, Sampling
from dsv4.streaming import Reader, Shelf, Tally, ahead, pinned_bytes, slots_of
from dsv4.synthetic import SyntheticCheckpoint
from helpers.make_checkpoint import write_true_size
from tests.checkpoints import edit
from tests.test_cli import folder, one_line, run  # noqa: F401
from tests.test_decode import fake_capture
from tests.test_plan import Peak

TINY = Path(__file__).parent.parent / "checkpoints" / "tiny"
CPU, CPU_0, CPU_1 = (torch.device("cpu", *index) for index in ((), (0,), (1,)))  # one device to torch
GPUS = [torch.device("cuda", i) for i in range(8)]
GIB = 1 << 30
PROMPT, CONTEXT = list(range(3, 24)), 64


def plan_of(counts, streamed, source, chunk=16):
    """So many layers on each device, of which these are streamed."""
    shares, ends = [], [0, *itertools.accumulate(counts)]
    for device, (a, b) in zip((CPU, CPU_0, CPU_1), itertools.pairwise(ends), strict=False):
        layers = tuple(range(a, b))
        shares.append(DevicePlan(device, layers, 0, 0, 0, 0, streamed=tuple(n for n in layers if n in streamed)))
    return Plan(tuple(range(ends[-1])), tuple(shares), CONTEXT, chunk, False, stream=source)


def model_of(checkpoint, plan, dtype=torch.float32):
    return Model(checkpoint, plan, Numerics(dtype=dtype))


def greedy(model, kind=Decoder, steps=12):
    """Tokens and the rows of logits that they were taken from, of a prompt in chunks and then of steps."""
    cache, rows = model.new_cache(), []
    it = kind(model, cache, Sampler(Sampling(temperature=0), PROMPT, model.config.vocab_size, CONTEXT, model.plan.devices[-1].device))
    for i in range(0, len(PROMPT), cache.chunk):
        logits = model.forward(PROMPT[i : i + cache.chunk], cache)
    tokens = [it.sample(logits)]
    rows.append(it.logits.clone())
    for _ in range(steps):
        tokens.append(it.step())
        rows.append(it.logits.clone())
    return tokens, torch.stack(rows)


@functools.cache
def resident():
    return greedy(model_of(Checkpoint.open(TINY), plan_of((6,), (), None)))


# ------------------------------------------------------------------------------------------------------ the same model


@pytest.mark.parametrize("source", ["host", "disk"])
@pytest.mark.parametrize("counts,streamed", [
    ((6,), range(6)), ((6,), (0, 1)), ((6,), (2, 5)), ((3, 3), range(6)), ((1, 5), (1, 3)), ((2, 2, 2), range(6)), ((5, 1), (5,)),
])
def test_streamed_is_resident_to_the_bit(source, counts, streamed):
    """Of the bundled checkpoint, from both places, on one, two and three devices, all layers or some. Chunks of 16 tokens read nearly all
    experts before they are chosen, those of 5 do not."""
    tokens, rows = resident()
    model = model_of(Checkpoint.open(TINY), plan_of(counts, streamed, source))
    got = greedy(model)
    assert got[0] == tokens and torch.equal(got[1], rows)
    assert sorted(n for supply in model.supplies.values() for n in supply.made) == list(streamed)
    assert streaming.report(model.supplies.values())["from"] == source


@pytest.mark.parametrize("source", ["host", "disk"])
def test_streamed_is_resident_in_other_chunks_and_in_captured_steps(source, monkeypatch):
    checkpoint = Checkpoint.open(TINY)
    want = greedy(model_of(checkpoint, plan_of((6,), (), None, chunk=5), torch.bfloat16))
    got = greedy(model_of(checkpoint, plan_of((2, 4), range(6), source, chunk=5), torch.bfloat16))
    assert got[0] == want[0] and torch.equal(got[1], want[1])
    monkeypatch.setattr(decode, "capture", fake_capture)
    got = greedy(model_of(checkpoint, plan_of((2, 4), range(6), source, chunk=5), torch.bfloat16), GraphDecoder)
    assert got[0] == want[0] and torch.equal(got[1], want[1])


def events_of(model, ids, monkeypatch):
    """What happens while tokens are run behind three others: ("read", (layer, expert)) when a read begins, ("chosen", experts)."""
    events, begin, router = [], Reader._begin, ops.router.__wrapped__

    def recorded(self):
        before = set(self.begun)
        begin(self)
        events.extend(("read", key) for key in sorted(self.begun.keys() - before))

    def routed(*args, **kwargs):
        events.append(("chosen", router(*args, **kwargs)[0]))
        return router(*args, **kwargs)

    cache = model.new_cache()
    model.forward([5, 6, 7], cache)
    monkeypatch.setattr(Reader, "_begin", recorded)
    with ops.trying_kernel("router", routed):
        model.forward(ids, cache)
    return events


def test_decoding_reads_the_chosen_experts_and_no_others(monkeypatch):
    """Of one token: as many as it chooses in each layer, those that the router chose; those of the second and third hash layer before."""
    model = model_of(Checkpoint.open(TINY), plan_of((6,), range(6), "disk"))
    (supply,) = model.supplies.values()
    size = supply.tally.bytes
    events = events_of(model, [8], monkeypatch)
    chosen = [sorted(set(what[0].tolist())) for kind, what in events if kind == "chosen"]
    read = [what for kind, what in events if kind == "read"]
    assert sorted(read) == [(layer, e) for layer, experts in enumerate(chosen) for e in experts] and len(read) == 12
    routers = [i for i, (kind, _) in enumerate(events) if kind == "chosen"]
    for layer, at in enumerate(routers):
        reads = [i for i, event in enumerate(events) if event[0] == "read" and event[1][0] == layer]
        assert (max(reads) < at) if layer in (1, 2) else (min(reads) > at), (layer, events)
    one = sum(e.nbytes for e in supply.reader._entries(0, 0))
    assert 12 * one <= supply.tally.bytes - size <= (12 + 36) * (one + 6 * loader.GAP)  # with those of the three tokens before


def test_a_chunk_that_will_use_nearly_all_has_them_read_before(monkeypatch):
    """16 tokens choose 32 times of 8 experts, 15 choose 30 times."""
    for tokens, early in ((16, True), (15, False)):
        with monkeypatch.context() as patch:
            model = model_of(Checkpoint.open(TINY), plan_of((6,), range(6), "disk"))
            events = events_of(model, list(range(30, 30 + tokens)), patch)
        routers = [i for i, (kind, _) in enumerate(events) if kind == "chosen"]
        before = {what for kind, what in events[: routers[5]] if kind == "read" and what[0] == 5}
        assert before == ({(5, e) for e in range(8)} if early else set()), tokens


def test_a_load_leaves_streamed_experts_in_their_files(monkeypatch):
    """Only their global scales are read; the progress adds up to what is."""
    checkpoint, ranges = Checkpoint.open(TINY), []
    needs = [Need(f"layers.{n}.ffn.experts.{e}.{w}", "", (), True) for n in range(6) for e in range(8) for w in ("w1", "w2", "w3")]
    original = loader.read_range
    for module in (loader, streaming):
        monkeypatch.setattr(module, "read_range", lambda where, what, begin, *rest: (
            ranges.append((what.shard, begin, begin + len(rest[0]))), original(where, what, begin, *rest))[1])
    told, plan = [], plan_of((6,), range(6), "disk")
    Model(checkpoint, plan, Numerics(), lambda size, part, device: told.append(size))
    experts = sum(checkpoint.nbytes(f"layers.{n}.ffn.experts.") for n in range(6))
    assert sum(told) == sum(checkpoint.nbytes(part) for part in ("embed", "layers.", "head")) - experts
    for part in (part for need in needs for at in [checkpoint.entries(need)] for part in (at.payload, at.scale)):
        assert not any(shard == part.shard and begin < part.end and part.begin < end for shard, begin, end in ranges), part


# ------------------------------------------------------------------------------------------------------------ the reader


@pytest.fixture
def reader():
    return Reader(Checkpoint.open(TINY), CPU, range(6), Tally())


def test_an_expert_is_what_the_checkpoint_reads(reader):
    for key in ((0, 0), (5, 7), (3, 2)):
        got = reader.take(key)
        for w, weight in zip(("w1", "w2", "w3"), got, strict=True):
            want = reader.checkpoint.weight(f"layers.{key[0]}.ffn.experts.{key[1]}.{w}")
            assert torch.equal(got_bytes(weight), got_bytes(want)) and weight.global_scale == want.global_scale
            assert torch.equal(weight.dequantize(), want.dequantize())


def test_tensors_that_lie_at_odd_places_are_copied(folder):  # noqa: F811
    """One byte in front of all others, and a header that is not padded: packing reads four bytes at once."""
    name = "layers.3.ffn.experts.6"
    want = [Checkpoint.open(folder).weight(f"{name}.{w}") for w in ("w1", "w2", "w3")]
    places = set()
    for pad in range(4):  # the header's length is as it comes; of four paddings one fits
        edit(folder, lambda tensors, pad=pad: tensors.update({"mtp.0.enorm.weight": ("U8", [1 + pad], bytes(1 + pad))} | {
            key: tensors.pop(key) for key in sorted(tensors.keys() - {"mtp.0.enorm.weight"})}))
        reader = Reader(Checkpoint.open(folder), CPU, range(6), Tally())
        places |= {entry.begin % 4 for entry in reader._entries(3, 6)}
        for weight, other in zip(reader.take((3, 6)), want, strict=True):
            assert weight.payload.data_ptr() % 4 == weight.scale.data_ptr() % 4 == 0
            assert torch.equal(got_bytes(weight), got_bytes(other))
    assert len(places) == 4


def got_bytes(weight):
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in (weight.payload, weight.scale) if t is not None])


def test_so_many_are_on_their_way_and_no_more(monkeypatch):
    checkpoint = Checkpoint.open(TINY)
    size = checkpoint.nbytes("layers.1.ffn.experts.3.")
    monkeypatch.setattr(streaming, "WINDOW", 3 * size + 100)
    reader, keys = Reader(checkpoint, CPU, range(6), Tally()), [(1, e) for e in range(8)]
    assert len(reader.free) == 4  # three on their way and one in use
    reader.want(keys, [(2, 5), (2, 6)])
    assert list(reader.begun) == keys[:4]
    for at, key in enumerate(keys):
        reader.take(key)
        assert list(reader.begun) == [*keys, (2, 5), (2, 6)][at + 1 : at + 4] or at == 0
    reader.want([(2, 4), (2, 6)])  # one guess was right, the other's buffer is free again
    assert list(reader.begun) == [(2, 6), (2, 4)] and len(reader.free) == 2
    with pytest.raises(KeyError):
        reader.begun[2, 5]
    reader.take((2, 4)), reader.take((2, 6)), reader.take((4, 4))  # the last was not announced
    assert len(reader.free) == 3 and not reader.begun


def test_what_is_ahead_and_what_is_pinned():
    assert ahead(37 << 20, 384) == 6 and ahead(14 << 20, 256) == 18 and ahead(1 << 30, 8) == 2 and ahead(1000, 8) == 8
    assert slots_of(8, 6, 256) == 48 and slots_of(1, 6, 256) == 6 and slots_of(8, 2, 8) == 8
    assert pinned_bytes(256, 14_155_776) == 3 * GIB + GIB // 2  # 75 a block, 31 in the last
    assert pinned_bytes(3, 100) == 512 and pinned_bytes(1, 3 * GIB) == 4 * GIB


@pytest.mark.parametrize("count,sizes", [(5, (1000, 24)), (3, (256,)), (1, (7, 7, 7))])
def test_a_shelf_holds_every_part_by_itself(count, sizes, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", 4096)
    shelf = Shelf(count, sizes, CPU)
    assert sum(len(b) for b in shelf._blocks) == pinned_bytes(count, streaming.shelf_size(sizes))
    parts = [part for number in range(count) for part in shelf.parts(number)]
    for i, part in enumerate(parts):
        part.fill_(i)
    assert [len(part) for part in parts] == [*sizes] * count and all((part == i).all() for i, part in enumerate(parts))


def test_the_clock_runs_while_something_moves(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(streaming.time, "perf_counter", lambda: now[0])
    tally = Tally()

    def after(seconds):
        now[0] += seconds

    first, second = tally.moving(10), tally.moving(5)
    first.__enter__(), after(2), second.__enter__(), after(3)
    first.__exit__(None, None, None), after(4), second.__exit__(None, None, None), after(50)
    with tally.copying(1, CPU):
        after(1)
    assert (tally.bytes, tally.seconds) == (16, 10.0)


def test_the_report_sets_the_rate_beside_the_measured_one(monkeypatch):
    class Fake:
        source, tally, top_k, layers = "disk", Tally(), 6, range(5)

        def rate(self):
            return 4.0

    assert streaming.report([]) is None and streaming.report([Fake()]) is None
    Fake.tally.bytes, Fake.tally.seconds, Fake.tally.experts = 3 * 10**9, 1.0, 300
    told = streaming.report([Fake()])
    assert told == {"from": "disk", "bytes": 3 * 10**9, "seconds": 1.0, "gb_per_s": 3.0, "measured_gb_per_s": 4.0, "fraction": 0.75,
                    "token_bytes": 300 * 10**6, "decode_gb_per_s": None}
    assert "streamed 3.00 GB from disk at 3.00 GB/s, 75 % of 4.00 measured | peak" in run_line({}, {"host": 0}, {"host": 0}, "stop", told)
    told = streaming.report([Fake()], token_ms=120.0)
    assert told["decode_gb_per_s"] == 2.5
    assert " of 4.00 measured, 2.50 over a token's time | peak" in run_line({}, {"host": 0}, {"host": 0}, "stop", told)


def test_the_measured_rate_is_of_experts_that_were_not_read(reader):
    reader.take((0, 0))
    tally, read = reader.tally, []
    reader._read_counted = lambda *args, original=reader._read_counted: (read.append(args[0].entries[0].key), original(*args))
    assert reader.rate() > 0 and reader.tally is tally and len(reader.free) == 9
    assert not any(".layers.0.ffn.experts.0." in f".{key}" for key in read) and len({key for key in read}) >= 47


# ---------------------------------------------------------------------------------------------------------------- faults


@pytest.fixture
def damaged(folder):  # noqa: F811
    """(a model that has begun, its cache, the entries of an expert that the next token takes)."""
    model = model_of(Checkpoint.open(folder), plan_of((6,), range(6), "disk"))
    cache = model.new_cache()
    model.forward(PROMPT[:5], cache)
    (supply,) = model.supplies.values()
    table = model.layers[0].moe.experts_of_token
    return model, cache, supply.reader._entries(0, int(table[9].min()))


def refused(model, cache, *pieces):
    with pytest.raises(CheckpointError) as caught:
        model.forward([9], cache)
    text = str(caught.value)
    assert "\n" not in text and all(piece in text for piece in pieces) and caught.value.exit_code == 3, text


def test_a_shard_that_is_written_to_while_it_is_streamed(damaged):
    model, cache, (entry, *_) = damaged
    os.utime(model.supplies[CPU].checkpoint.folder / entry.shard, ns=(1, 1))
    refused(model, cache, f"{entry.shard}: ", "the shard changed after its header was read, seen after reading up to offset ")


def test_a_shard_that_is_cut_off_while_it_is_streamed(damaged):
    model, cache, entries = damaged
    last, checkpoint = max(entries, key=lambda e: e.end), model.supplies[CPU].checkpoint
    os.truncate(checkpoint.folder / last.shard, last.end - 1)
    checkpoint.stamps.clear()  # a file system that does not say
    refused(model, cache, f"{last.shard}: {last.key}: expected {last.nbytes} bytes at offset {last.begin}, found {last.nbytes - 1}")


def test_a_disk_that_fails_while_it_is_streamed(damaged, monkeypatch):
    model, cache, entries = damaged
    entry = min(entries, key=lambda e: e.begin)
    monkeypatch.setattr(shards.os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
    refused(model, cache, f"{entry.shard}: {entry.key}: reading at offset {entry.begin} failed: Input/output error")


def test_what_was_answered_before_a_fault_is_kept(run, folder, monkeypatch):  # noqa: F811
    step = Decoder.step

    def truncating(self):
        if self.cache.position == 16:
            for path in folder.glob("*.safetensors"):
                os.truncate(path, path.stat().st_size // 2)
        return step(self)

    monkeypatch.setattr(Decoder, "step", truncating)
    code, out, err = run("--model", folder, *LITTLE, "--temperature", 0, "What is the capital of France?")
    assert code == 3 and out.startswith("The capital") and "Paris" not in out
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: model-0000") and "the shard changed after its header was read" in line


# --------------------------------------------------------------------------------------------------------- captured steps


def test_a_captured_step_is_cut_where_the_host_brings_experts(monkeypatch):
    """Graphs and what is between them, in order; one pool and one stream of the device for all; nothing is brought while it is captured."""
    told = []

    class Graph:
        made = 0

        def __init__(self):
            self.number = Graph.made
            Graph.made += 1

        def replay(self):
            told.append(f"replay {self.number}")

    class Capture:
        def __init__(self, graph, pool, stream):
            self.graph, self.where = graph, f"{pool} {stream}"

        def __enter__(self):
            told.append(f"begin {self.graph.number} {self.where}")

        def __exit__(self, *_):
            told.append(f"end {self.graph.number}")

    class Device:
        def __init__(self, device):
            pass

        __enter__ = __exit__ = lambda *_: None

    for name, value in (("CUDAGraph", Graph), ("graph", Capture), ("device", Device), ("graph_pool_handle", lambda: "pool"),
                        ("Stream", lambda device: f"stream of {device}")):
        monkeypatch.setattr(torch.cuda, name, value)

    def work():
        for number in (1, 2):
            told.append(f"work {number}")
            streaming._cut(lambda number=number: told.append(f"bring {number}"))
        return "out"

    replay, out = decode.capture(CPU, work)
    assert out == "out" and streaming._cut is None
    where = "pool stream of cpu"
    assert told == [f"begin 0 {where}", "work 1", "end 0", f"begin 1 {where}", "work 2", "end 1", f"begin 2 {where}", "end 2"]
    told.clear()
    replay(), replay()
    assert told == 2 * ["replay 0", "bring 1", "replay 1", "bring 2", "replay 2"]


@pytest.mark.skipif(os.environ.get("DSV4_TEST_GPU") != "1", reason="needs a GPU: set DSV4_TEST_GPU=1")
@pytest.mark.parametrize("kind", [Decoder, GraphDecoder])
def test_on_a_gpu_streamed_is_resident_to_the_bit(kind):
    """The kernels, one launch at a time and as graphs; all layers, or some, so that parts of a graph have several layers."""
    checkpoint, device, rows = Checkpoint.open(TINY), torch.device("cuda", 0), {}
    runtime.prepare_torch(1 << 30)
    assert runtime.choose_backend("auto", checkpoint, range(6), [device], torch.bfloat16, "model", "auto") is None
    try:
        for source, streamed in ((None, ()), ("host", range(6)), ("disk", range(6)), ("host", (1, 4)), ("disk", (5,))):
            share = DevicePlan(device, tuple(range(6)), 0, 0, 0, 0, streamed=tuple(streamed))
            model = model_of(checkpoint, Plan(tuple(range(6)), (share,), CONTEXT, 8, False, stream=source), torch.bfloat16)
            rows[source, len(streamed)] = greedy(model, kind, 40)
            told = streaming.report(model.supplies.values())
            assert (told is None) == (source is None) and (told is None or 0 < told["gb_per_s"] < 1000)
    finally:
        ops.select_backend("torch")
        ops.backend._kernels.clear()
    tokens, want = rows.pop((None, 0))
    for got in rows.values():
        assert got[0] == tokens and torch.equal(got[1], want)


# -------------------------------------------------------------------------------------------------------------- the plan

LITTLE = ("--memory", "0.0155", "--context", "60", "--prefill-chunk", "4", "--stream-weights", "disk")


def planner(checkpoint, free, count=1, host_free=None, **more):
    wish = Wish(range(checkpoint.config.num_hidden_layers), 4096, 8, torch.bfloat16, expand=False, **more)
    return Planner(checkpoint, [Room(d, free) for d in GPUS[:count]], wish, host_free)


@functools.cache
def flash():
    """Twelve layers of it, 43.9 GiB."""
    config = PRESETS["flash"]
    return SyntheticCheckpoint(replace(config, num_hidden_layers=12, compress_ratios=config.compress_ratios[:12]), "nvidia", "meta")


@pytest.fixture
def cuda():
    """The plan of the kernels, which needs no GPU."""
    ops.select_backend("cuda")
    yield
    ops.select_backend("torch")
    ops.backend._kernels.clear()


@pytest.mark.parametrize("source", ["host", "disk"])
def test_as_few_layers_as_can_be_are_streamed(cuda, source):
    it = planner(flash(), 30 * GIB, stream=source)
    (share,) = it.plan.devices
    n = len(share.streamed)
    assert it.plan.fits and it.plan.stream == source and share.streamed == tuple(range(n)) and 0 < n < 12
    fewer = it._device("packed", it.rooms[0], it.wish, share.layers, (True, True), it._cache_bytes(it.wish), share.streamed[1:], source)
    assert fewer.missing
    whole = planner(flash(), 10**13).plan.devices[0].weights
    assert whole == share.weights + share.streamed_bytes + n * 12 * 257  # and the factors of the routed experts
    assert share.slots >= 48 * share.streamed_bytes / n / 256 and share.needed + share.reserved <= share.free
    assert share.needed == share.weights + share.slots + max(share.loading, share.cache + share.scratch + share.graphs)
    extra = it.plan.host - planner(flash(), 10**13).plan.host
    if source == "host":
        assert extra == n * pinned_bytes(256, share.streamed_bytes // n // 256)
    else:
        assert extra == 19 * (16 << 20)


def test_what_fits_is_not_streamed(cuda):
    for count, free, streamed in ((1, 60, 0), (2, 30, 0), (1, 30, 1), (2, 15, 2), (1, 8, 1)):
        plan = planner(flash(), free * GIB, count, stream="disk", auto=True).plan
        assert plan.fits and sum(bool(d.streamed) for d in plan.devices) == streamed, (count, free)
        assert plan.stream == ("disk" if streamed else None)
    assert len(planner(flash(), 60 * GIB, 8, stream="disk", auto=True).plan.devices) == 1
    assert not planner(flash(), 3 * GIB, stream="disk").plan.fits  # less than everything else


def test_what_would_fit_names_streaming_where_it_would(cuda):
    assert planner(flash(), 30 * GIB).instead.stream == "disk"  # host memory that nobody knows is no advice
    assert planner(flash(), 30 * GIB, host_free=100 * GIB).instead.stream == "host"
    assert planner(flash(), 30 * GIB, host_free=10 * GIB).instead.stream == "disk"
    assert planner(flash(), 30 * GIB, drawn=True).instead.stream == "host"
    assert planner(flash(), 30 * GIB, drawn=True, host_free=10 * GIB).instead.stream is None
    assert planner(flash(), 3 * GIB).instead.stream is None and planner(flash(), 60 * GIB).instead.stream is None
    with pytest.raises(DoesNotFit, match="--stream-weights disk; --plan shows"):
        planner(flash(), 30 * GIB).fitting()
    assert planner(flash(), 30 * GIB, stream="host").instead.devices == 2  # on which all of it is resident


def test_host_memory_that_does_not_suffice_is_refused(cuda):
    assert planner(flash(), 30 * GIB, stream="host", host_free=100 * GIB).fitting().stream == "host"
    with pytest.raises(DoesNotFit, match=r"^--stream-weights host: needs .* GiB of host memory \(experts .*\), has 10.00 GiB free: "
                                         "--stream-weights disk needs none for them$"):
        planner(flash(), 30 * GIB, stream="host", host_free=10 * GIB).fitting()


def test_the_report_says_what_is_streamed(cuda):
    from dsv4.announced import Disk

    it = planner(flash(), 15 * GIB, 2, stream="host", drawn=True)
    report = PlanReport(it, None, 100 * GIB, Disk(0, 0, 0))
    lines, told, (first, second) = report.lines(), report.to_dict(), it.plan.devices
    assert max(map(len, lines)) < 140
    assert " ".join(lines[4].split()) == "device layers weights slots caches scratch graphs loading needed reserve free GiB"
    n, token = len(first.streamed), first.streamed_bytes * 6 // 256
    said = next(line for line in lines if line.startswith("streamed   cuda:0"))
    assert said == (f"streamed   cuda:0: the routed experts of layers 0-{n - 1}, {first.streamed_bytes / 1e9:.2f} GB, stay in pinned host "
                    f"memory; a token takes {token / 1e6:.2f} MB")
    assert lines[-1].endswith("; the fewest such GPUs that hold all of it: 4")
    assert told["stream"] == "host" and told["would_fit"]["stream"] is None
    for d, share in zip(told["devices"], (first, second), strict=True):
        assert d["streamed_layers"] == [share.streamed[0], share.streamed[-1] + 1] and d["streamed"] == share.streamed_bytes > 0
        assert d["slots"] == share.slots
    nothing = PlanReport(planner(flash(), 60 * GIB, stream="host", drawn=True), None, 100 * GIB, Disk(0, 0, 0))
    assert "streamed   nothing: all of it fits" in nothing.lines() and nothing.to_dict()["devices"][0]["streamed_layers"] is None


def test_a_checkpoint_larger_than_memory_runs_on_a_cpu(tmp_path, monkeypatch):
    """34 MB with 12 to spend: every tensor that lives while it is loaded and run, against the plan."""
    config = replace(PRESETS["tiny"], num_hidden_layers=2, compress_ratios=(0, 0), n_routed_experts=96, moe_intermediate_size=512)
    write_true_size(tmp_path / "model", config, "nvidia", range(2), threads=1)
    checkpoint = Checkpoint.open(tmp_path / "model")
    expert = checkpoint.nbytes("layers.1.ffn.experts.7.")
    monkeypatch.setattr(streaming, "WINDOW", 4 * expert)
    monkeypatch.setattr(loader, "AHEAD", 4 * expert)
    how = dict(layers=range(2), context=CONTEXT, chunk=16, dtype=torch.float32, expand=False)
    whole = make_plan(checkpoint, [CPU], free_bytes=lambda d: 10**12, **how)
    free = whole.devices[0].needed // 3
    with pytest.raises(DoesNotFit, match="--stream-weights disk"):
        make_plan(checkpoint, [CPU], free_bytes=lambda d: free, **how)
    greedy(model_of(Checkpoint.open(TINY), plan_of((6,), range(6), "disk")), steps=1)  # the formats' tables are made once a process
    with torch.inference_mode(), Peak() as seen:
        plan = make_plan(checkpoint, [CPU], free_bytes=lambda d: free, stream="disk", **how)
        got = greedy(model_of(checkpoint, plan))
    assert checkpoint.nbytes() > 2.5 * free and plan.devices[0].streamed == (0, 1)
    scales = 2 * 3 * 96 * 12  # the global scales, which are numbers of their own
    assert seen.peak <= plan.devices[0].needed + scales <= free + scales
    want = greedy(model_of(checkpoint, whole))
    assert got[0] == want[0] and torch.equal(got[1], want[1])


# ---------------------------------------------------------------------------------------------------- the command line


def test_a_run_tells_what_it_streamed(run):  # noqa: F811
    question = "What is the capital of France?"
    want = json.loads(run("--json", "--temperature", 0, question)[1])
    code, out, _ = run("--json", *LITTLE, "--temperature", 0, question)
    got = json.loads(out)
    assert code == 0 and want["streamed"] is None and got["output_ids"] == want["output_ids"]
    assert list(got["streamed"]) == ["from", "bytes", "seconds", "gb_per_s", "measured_gb_per_s", "fraction", "token_bytes",
                                      "decode_gb_per_s"]
    tokens = len(got["output_ids"]) - 1 + len(got["prompt_ids"])
    one = 41_480  # bytes of an expert; a token has two in each of four layers, which tokens of a chunk may share
    assert got["streamed"]["from"] == "disk" and 0.4 * 8 * tokens * one < got["streamed"]["bytes"] < 1.05 * 8 * tokens * one
    assert got["streamed"]["token_bytes"] == pytest.approx(8 * one, rel=0.01) and got["streamed"]["decode_gb_per_s"] > 0
    code, out, err = run(*LITTLE, "--temperature", 0, question)
    assert (code, out) == (0, "The capital of France is Paris.\n") and " | streamed " in err and " from disk at " in err


def test_more_memory_than_there_is_changes_nothing(run, monkeypatch):  # noqa: F811
    monkeypatch.setattr(runtime, "free_bytes", lambda device: 7 * GIB)
    for memory, free in (("5", 5), ("9", 7)):
        assert json.loads(run("--plan", "--json", "--memory", memory)[1])["devices"][0]["free"] == free * GIB


@pytest.mark.parametrize("argv, code, words", [
    (["--stream-weights", "host", "--devices", "cpu", "a"], 2, "expected GPUs, found cpu, whose memory is the host's: use "),
    (["--stream-weights", "disk", "--synthetic", "tiny", "--prompt-ids", "1"], 2, "expected a checkpoint's files, found weights that are"),
    (["--stream-weights", "tape", "a"], 2, "--stream-weights: invalid choice: 'tape'"),
    (["--memory", "0", "a"], 2, "--memory: expected a number of GiB above 0, such as 40 or 0.5, found '0'"),
    (["--memory", "nan", "a"], 2, "found 'nan'"), (["--memory", "1e9", "a"], 2, "found '1e9'"),
    (["--memory", "x" * 50, "a"], 2, "found 'x"),
    (["--memory", "0.001", "--stream-weights", "disk", "a"], 4, "has 1.02 MiB free: nothing smaller fits"),
    (["--memory", "1e-12", "a"], 4, "has 0.00 MiB free: nothing smaller fits"),
    (["--memory", "0.0155", "--max-new-tokens", "8", "--prefill-chunk", "4", "a" * 400], 4, ", or with --stream-weights disk"),
])
def test_bad_arguments(run, argv, code, words):  # noqa: F811
    got, out, err = run(*argv)
    assert (got, out) == (code, "") and words in one_line(err)


@pytest.mark.parametrize("written,layer,how", [(range(4, 6), 0, "is streamed"), (range(4), 4, "is loaded")])
def test_a_hole_in_a_folder_is_told_when_it_is_reached(tmp_path, run, written, layer, how):  # noqa: F811
    """A release of which some layers were written: the audit is fine, the first expert that is not there is refused."""
    config = replace(PRESETS["tiny"], n_routed_experts=8)
    write_true_size(tmp_path / "model", config, "nvidia", written, threads=1)
    code, _, err = run("--model", tmp_path / "model", *LITTLE, "--prompt-ids", "1,2", "--max-new-tokens", 2)
    line = next(line for line in err.splitlines() if line.startswith("error: "))
    assert code == 3 and f"layers.{layer}.ffn.experts." in line and "expected a finite global scale above zero, found 0.0" in line
    assert "--backend" not in line
