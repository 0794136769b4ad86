"""dsv4/loader.py: what it brings is what Checkpoint reads, in long ranges, so many bytes ahead, on all devices at once; faults are named,
and no thread outlives a loading."""

import errno
import gc
import json
import os
import re
import signal
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4 import loader, ops, shards
from dsv4.checkpoint import Checkpoint, needs_of_layer, needs_outside_layers
from dsv4.errors import CheckpointError, DoesNotFit, UserError
from dsv4.exports import FORMATS
from dsv4.formats import Weight
from dsv4.kernels import packing
from dsv4.layers import Numerics
from dsv4.loader import Part, load
from dsv4.model import Model
from dsv4.plan import DevicePlan, Plan
from dsv4.synthetic import SyntheticCheckpoint
from helpers.make_checkpoint import random_weights, write_checkpoint, write_true_size
from tests.checkpoints import MINI, edit
from tests.emulator.emulator import emulated, needs_gxx

CPU, CPU_0 = torch.device("cpu"), torch.device("cpu", 0)  # two devices to a loader, one to torch


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """MINI as a release lies on the disk: a shard a layer, in the library's order."""
    folder = tmp_path_factory.mktemp("release") / "nvidia"
    write_true_size(folder, MINI, "nvidia", range(4), seed=2, threads=1)
    return folder


@pytest.fixture
def checkpoint(pristine, tmp_path):
    folder = tmp_path / "model"
    os.system(f"cp -r {pristine} {folder}")
    return Checkpoint.open(folder)


@pytest.fixture(autouse=True)
def no_thread_outlives_a_loading():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


WAYS = ["straight", "slots", pytest.param("kernels", marks=needs_gxx)]


@pytest.fixture
def go(monkeypatch):
    """go(way): what is loaded from now on comes to the host's memory as to a CPU's, or as to a GPU's without and with kernels."""
    lock, original = threading.Lock(), loader.read_to_gpu

    def emulate(*what):
        with lock, emulated():  # one at a time
            return original(*what)

    def choose(way):
        monkeypatch.setattr(loader, "_staged", lambda device: way != "straight")
        monkeypatch.setattr(loader, "_by_kernels", lambda part: way == "kernels")
        monkeypatch.setattr(loader, "read_to_gpu", emulate)

    return choose


def everything(source, checkpoint, needs):
    """{name: tensors} of all needs: payload, scale and the global scale of a linear."""
    out = {}
    for need in needs:
        if need.linear:
            weight = source.weight(need.name)
            out[need.name] = (weight.payload, weight.scale, weight.global_scale, weight.divisor)
        else:
            out[need.name] = (source.tensor(need.name),)
    return out


def parts_of(checkpoint, devices=(CPU,), bind=everything):
    """The layers, dealt to devices, and what lies outside them with the first."""
    all_needs = [needs_outside_layers(checkpoint.config), *(needs_of_layer(checkpoint.config, n) for n in range(4))]
    return [Part(f"part {i}", devices[i % len(devices)], needs, 1000 + i, lambda source, needs=needs: bind(source, checkpoint, needs))
            for i, needs in enumerate(all_needs)]


def same(a, b):
    return a is b if a is None or b is None else a == b if not torch.is_tensor(a) else (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def assert_loaded(checkpoint, made, parts):
    for part in parts:
        want = everything(checkpoint, checkpoint, part.needs)
        assert made[part.name].keys() == want.keys()
        for name, values in want.items():
            assert all(same(a, b) for a, b in zip(made[part.name][name], values, strict=True)), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_loaded_is_what_the_checkpoint_reads(format, way, go, tmp_path, monkeypatch):
    """Every format and spelling, fused experts too; every way, in pieces of some slots."""
    write_checkpoint(tmp_path, MINI, random_weights(MINI, seed=4), format, shards=3)
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr(loader, "PIECE", 5000)
    monkeypatch.setattr(loader, "SLOT", 700)
    go(way)
    for devices in ((CPU,), (CPU, CPU_0)):
        parts = parts_of(checkpoint, devices)
        assert_loaded(checkpoint, load(checkpoint, parts, threads=3), parts)


@pytest.mark.parametrize("format", ["nvidia", "bf16"])
def test_tensors_at_odd_offsets(format, tmp_path):
    """Files in order of names, with scalars between the experts' bytes, and single bytes that move what follows them."""
    write_checkpoint(tmp_path, MINI, random_weights(MINI, seed=4), format)

    def shift(tensors):
        before = dict(tensors) | {f"layers.{n}.ffn.experts.{e}.w1.bias_vl": ("U8", [1], b"x") for n in range(4) for e in (0, 1, 3)}
        tensors.clear()
        for key in sorted(before):
            tensors[key] = before[key]

    edit(tmp_path, shift)
    checkpoint = Checkpoint.open(tmp_path)
    parts = parts_of(checkpoint)
    made = load(checkpoint, parts)
    assert_loaded(checkpoint, made, parts)
    tensors = [t for part in made.values() for values in part.values() for t in values if torch.is_tensor(t)]
    assert all(t.storage_offset() * t.element_size() % 4 == 0 for t in tensors)  # packing looks at four bytes at once
    assert any(t.storage_offset() for t in tensors)


def test_a_loaded_model_gives_the_logits_of_one_that_was_read_tensor_by_tensor(checkpoint):
    layers = tuple(range(4))
    plan = Plan(layers, (DevicePlan(CPU, layers, 0, 0, 0, 0),), 16, 16, False)

    class NoFiles:  # not a Checkpoint: bound as it is
        config, tensor, weight, kind = checkpoint.config, checkpoint.tensor, checkpoint.weight, checkpoint.kind
        nbytes, layer_bytes = checkpoint.nbytes, checkpoint.layer_bytes

    logits = []
    for source in (checkpoint, NoFiles()):
        model = Model(source, plan, Numerics())
        logits.append(model.forward(list(range(12)), model.new_cache(), "all"))
    assert torch.equal(*logits) and logits[0].std() > 0.1
    # Two devices, to the loader: its lanes bind at the same time, the pipeline is the same.
    halves = (DevicePlan(CPU, layers[:2], 0, 0, 0, 0), DevicePlan(CPU_0, layers[2:], 0, 0, 0, 0))
    model = Model(checkpoint, Plan(layers, halves, 16, 16, False), Numerics())
    assert torch.equal(model.forward(list(range(12)), model.new_cache(), "all"), logits[0])


# --------------------------------------------------------------------------------------------------- ranges, order, overlap


def test_routed_experts_are_few_long_ranges_and_their_tensors_views(checkpoint, monkeypatch):
    read, original = [], loader.read_range
    monkeypatch.setattr(loader, "read_range", lambda folder, run, *rest: (read.append(run), original(folder, run, *rest)))
    needs = needs_of_layer(MINI, 2)
    made = load(checkpoint, [Part("layer 2", CPU, needs, 1, lambda source: everything(source, checkpoint, needs))])["layer 2"]
    experts = [run for run in read if len(run.entries) > 1]
    assert sorted(len(run.entries) for run in experts) == [12, 12, 12]  # global scales; scales; codes: 4 small experts of 3 weights each
    assert len(read) == 3 + sum(2 if checkpoint.entries(n) and n.linear and n.name.split(".")[-1] not in (
        "wkv", "wgate", "weights_proj") or n.name.endswith("attn.wkv") else 1 for n in needs if n.kind != "routed experts")
    payloads = [made[f"layers.2.ffn.experts.{e}.{w}"][0] for e in range(4) for w in ("w1", "w2", "w3")]
    assert len({p.untyped_storage().data_ptr() for p in payloads}) == 1
    # Global scales become numbers: they are read to the host, whatever the device.
    on_host = [entry.key for unit in loader._units(checkpoint, needs) if unit.on_host for run in unit.runs for entry in run.entries]
    assert len(on_host) == 12 and all(key.endswith("weight_scale_2") for key in on_host)
    # Nothing else keeps a layer's bytes: every other tensor has memory of its own size.
    others = [t for name, values in made.items() if ".experts." not in name for t in values if torch.is_tensor(t)]
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in others)


def test_pieces_come_in_the_order_of_the_shards_and_experts_by_number(checkpoint, monkeypatch):
    """An expert is larger than a piece here: each is read by itself, its codes as one range and its scales as another."""
    places, original = [], loader.read_range

    def read(folder, run, begin, *rest):
        expert = re.search(r"\.experts\.(\d+)\.\w+\.weight", run.entries[0].key)
        places.append((run.shard, int(expert[1]) if expert and not run.entries[0].key.endswith("_2") else -1, run.begin, begin))
        original(folder, run, begin, *rest)

    monkeypatch.setattr(loader, "read_range", read)
    monkeypatch.setattr(loader, "PIECE", 500)
    load(checkpoint, parts_of(checkpoint)[1:], threads=1)
    assert len(places) > 100 and places == sorted(places)
    for number in range(4):
        assert len({run for shard, expert, run, _ in places if expert == number}) == 4 * 2  # of four layers


class Reads:
    """What `read_range` was asked for; `settle` waits until no more comes."""

    def __init__(self, monkeypatch):
        self.bytes, self.shards, lock, original = 0, set(), threading.Lock(), loader.read_range

        def read(folder, run, begin, view, *rest):
            original(folder, run, begin, view, *rest)
            with lock:
                self.bytes += len(view)
                self.shards.add(run.shard)

        monkeypatch.setattr(loader, "read_range", read)

    def settle(self):
        before = -1
        while before != self.bytes:
            before = self.bytes
            time.sleep(0.1)
        return self.bytes


def test_so_many_bytes_are_read_ahead_and_no_more(checkpoint, monkeypatch):
    """Of the next parts too; and as tensors are taken, as much is read again."""
    reads, parts = Reads(monkeypatch), parts_of(checkpoint)[1:]
    size = sum(checkpoint.layer_bytes(n) for n in range(4))
    largest = max(unit.nbytes for part in parts for unit in loader._units(checkpoint, part.needs))
    monkeypatch.setattr(loader, "AHEAD", size // 2)
    seen = []

    def bind(source, checkpoint, needs):
        seen.append((reads.settle(), len(reads.shards)))
        if len(seen) == 1:
            for need in needs[:12]:  # norms, mHC, and the attention's first weights
                source.weight(need.name) if need.linear else source.tensor(need.name)
            assert reads.settle() > seen[0][0]

    load(checkpoint, parts_of(checkpoint, bind=bind)[1:], threads=1)
    assert size // 2 - largest < seen[0][0] <= size // 2 and seen[0][1] in (2, 3)  # layers differ in size
    assert [ahead for ahead, _ in seen] == sorted(ahead for ahead, _ in seen) and seen[-1][0] <= reads.bytes <= size + 4 * loader.GAP


@pytest.mark.parametrize("ahead", [1, 3000, 1 << 20])
def test_any_order_of_taking_is_served(checkpoint, monkeypatch, ahead):
    """Also what has not been begun, when what was begun fills the room; each byte is read once; and what is left is dropped."""
    monkeypatch.setattr(loader, "PIECE", 700)
    monkeypatch.setattr(loader, "AHEAD", ahead)

    def backwards(source, checkpoint, needs):
        return everything(source, checkpoint, needs[::-1])

    def some(source, checkpoint, needs):
        return everything(source, checkpoint, needs[5:1:-3])

    for devices in ((CPU,), (CPU, CPU_0)):
        parts, reads = parts_of(checkpoint, devices, backwards), Reads(monkeypatch)
        made = load(checkpoint, parts, threads=2)
        assert reads.bytes == sum(unit.nbytes for part in parts for unit in loader._units(checkpoint, part.needs))
        assert_loaded(checkpoint, made, parts)
        few = [replace(part, needs=part.needs[5:1:-3]) for part in parts]
        assert_loaded(checkpoint, load(checkpoint, parts_of(checkpoint, devices, some), threads=2), few)


def test_devices_load_at_the_same_time(checkpoint):
    """Both devices' first parts must be in `bind` together, or the barrier breaks."""
    barrier, where = threading.Barrier(2, timeout=20), {}

    def bind(source, checkpoint, needs):
        where.setdefault(threading.current_thread().name, []).append(needs[0].name)
        if len(where[threading.current_thread().name]) == 1:
            barrier.wait()
        return everything(source, checkpoint, needs)

    parts = parts_of(checkpoint, (CPU, CPU_0), bind)
    assert_loaded(checkpoint, load(checkpoint, parts, threads=2), parts)
    assert sorted(map(len, where.values())) == [2, 3]  # a thread a device, its parts in order
    assert where["bind cpu:0"] == ["layers.0.attn_norm.weight", "layers.2.attn_norm.weight"]


def test_readers_serve_the_devices_in_turn(checkpoint, monkeypatch):
    """One reading thread, two devices: neither waits until the other has all of its bytes."""
    shards_read, go, original = [], threading.Event(), loader.read_range

    def read(folder, run, *rest):
        go.wait(20)
        shards_read.append(run.shard)
        original(folder, run, *rest)

    monkeypatch.setattr(loader, "read_range", read)
    threading.Timer(0.2, go.set).start()  # both have begun by then
    load(checkpoint, parts_of(checkpoint, (CPU, CPU_0))[1:3], threads=1)
    assert len(set(shards_read)) == 2 and len(set(shards_read[1:11:2])) == len(set(shards_read[2:12:2])) == 1
    assert shards_read[1] != shards_read[2]


def test_a_unit_is_waited_for_once(checkpoint, monkeypatch):
    """And its binder is woken only for that: an expert's nine tensors cost no lock, no event and no call of the callback each."""
    waited, woken, told = [], [], []
    wait_for, notify = loader._Loading._wait_for, threading.Condition.notify
    monkeypatch.setattr(loader._Loading, "_wait_for", lambda self, lane, unit: (waited.append(unit), wait_for(self, lane, unit))[1])
    part = parts_of(checkpoint)[1]
    lanes = []
    monkeypatch.setattr(loader._Loading, "_end", lambda self, workers: (lanes.extend(self.lanes), [w.join() for w in workers]))
    monkeypatch.setattr(threading.Condition, "notify", lambda self, n=1: (woken.append(self), notify(self, n))[1])
    load(checkpoint, [part], lambda *event: told.append(event), threads=3)
    units = loader._units(checkpoint, part.needs)
    assert len(waited) == len(set(map(id, waited))) == len(units) < sum(len(run.entries) for unit in units for run in unit.runs) / 2
    assert len([c for c in woken if c is lanes[0].arrived]) <= len(units) + 1  # and at the end


@pytest.mark.parametrize("devices", [(CPU,), (CPU, CPU_0)])
def test_who_waits_is_woken_and_need_not_look(checkpoint, monkeypatch, devices):
    monkeypatch.setattr(loader, "TICK", 20.0)
    monkeypatch.setattr(loader, "PIECE", 2000)
    original, start = loader.read_range, time.monotonic()
    monkeypatch.setattr(loader, "read_range", lambda *what: (time.sleep(0.002), original(*what)))
    monkeypatch.setattr(loader, "AHEAD", 8000)

    def on_progress(*event):
        assert time.monotonic() - start < 15

    parts = parts_of(checkpoint, devices)
    assert_loaded(checkpoint, load(checkpoint, parts, on_progress, threads=3), parts)
    on_progress()


def test_tensors_of_bytes_at_any_place():
    """Of a slice too; one dimension, none, no element."""
    whole = torch.arange(256, dtype=torch.uint8)
    for dtype, shape, size in (("U8", (3, 8), 24), ("F8_E4M3", (2, 4), 8), ("F8_E8M0", (2, 4), 8), ("F4", (3, 16), 24),
                               ("BF16", (2, 3), 12), ("F32", (), 4), ("U8", (5,), 5), ("I64", (2,), 16), ("U8", (0, 4), 0)):
        entry = shards.Entry("shard", "key", dtype, shape, 1000, 1000 + size)
        for begin, at in ((0, 0), (0, 8), (16, 8)):
            found = shards.tensor_of(whole[begin:], entry, at)
            assert found.shape == (shape if dtype != "F4" else (24,)) and found.is_contiguous()
            assert found.dtype == shards.TORCH_DTYPES[dtype]
            assert found.reshape(-1).view(torch.uint8).tolist() == list(range(begin + at, begin + at + size))


def test_a_tensor_larger_than_what_is_read_ahead_has_others_read_behind_it(checkpoint, monkeypatch):
    """The embedding is: without it readers would wait until it is bound."""
    part, begun, seen = parts_of(checkpoint)[0], [], []
    largest = max(unit.nbytes for unit in loader._units(checkpoint, part.needs))
    monkeypatch.setattr(loader, "AHEAD", largest // 2)
    begin, wait_for = loader._Loading._begin, loader._Loading._wait_for
    monkeypatch.setattr(loader._Loading, "_begin", lambda self, lane, unit, **how: begun.append(unit) or begin(self, lane, unit, **how))
    monkeypatch.setattr(loader._Loading, "_wait_for",
                        lambda self, lane, unit: seen.append((unit, len(begun))) or wait_for(self, lane, unit))
    load(checkpoint, [part])
    at = next(number for number, unit in enumerate(begun, 1) if unit.nbytes == largest)
    assert next(count for unit, count in seen if unit.nbytes == largest) > at


def damage(checkpoint, name):
    """Makes the first scale of a linear NaN; its entry."""
    entry = checkpoint.entries(next(n for n in needs_of_layer(MINI, 2) if n.name == name)).scale
    with open(checkpoint.folder / entry.shard, "r+b") as file:
        file.seek(entry.begin)
        file.write({"F8_E4M3": b"\x7f", "F8_E8M0": b"\xff"}.get(entry.dtype) or b"\xff\xff\xff\x7f")
    checkpoint.stamps.clear()
    return entry


@pytest.mark.parametrize("name", ["layers.2.ffn.experts.3.w2", "layers.2.attn.wq_a"])
@pytest.mark.parametrize("packs,staged", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("said", [UserError("packing: expected scales that are numbers, found NaN"),
                                  CheckpointError("layers.2.x.weight: expected finite numbers, found NaN or infinity")])
def test_scales_that_are_nan(checkpoint, monkeypatch, name, packs, staged, said):
    """Where packing looks at them, on a GPU, they are not looked at before; what it says then, or whoever dequantised the weight, comes out
    with the tensor's name. For that scales are read again, and nothing else."""
    monkeypatch.setattr(loader, "_staged", lambda device: staged)
    entry, asked, again, read = damage(checkpoint, name), [], [], Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, entry: again.append(entry) or read(self, entry))

    def bind(source, checkpoint, needs):
        for need in needs:
            if need.linear:
                asked.append(need.name)
                source.weight(need.name)
        raise said

    parts = [replace(part, packs=packs) for part in parts_of(checkpoint, bind=bind)[3:4]]
    with pytest.raises(CheckpointError, match=f"{entry.shard}: {re.escape(entry.key)}: .* NaN.*; the checkpoint is damaged: fetch the sha"):
        load(checkpoint, parts)
    assert (asked[-1] == name) == (not (packs and staged))
    scales = {e for layout in checkpoint._layouts.values() for e in (layout.scale, layout.global_scale)}
    assert bool(again) == (packs and staged) and set(again) <= scales


def test_a_second_look_can_be_stopped(checkpoint, monkeypatch):
    """And is told, as it may take long."""
    monkeypatch.setattr(loader, "_staged", lambda device: True)
    read, calls = Checkpoint.read, []
    monkeypatch.setattr(Checkpoint, "read", lambda self, entry: time.sleep(loader.TICK) or read(self, entry))

    def bind(source, checkpoint, needs):
        for need in needs:
            if need.linear:
                source.weight(need.name)
        raise UserError("packing: expected other weights")

    def on_progress(count, part, device):
        calls.append(count)
        if count == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(checkpoint, [replace(part, packs=True) for part in parts_of(checkpoint, bind=bind)[2:3]], on_progress)


def test_what_packing_refuses_of_a_good_checkpoint_comes_out(checkpoint, monkeypatch):
    monkeypatch.setattr(loader, "_staged", lambda device: True)

    def bind(source, checkpoint, needs):
        everything(source, checkpoint, needs)
        raise UserError("packing: expected other weights")

    with pytest.raises(UserError, match="^packing: expected other weights$"):
        load(checkpoint, [replace(part, packs=True) for part in parts_of(checkpoint, bind=bind)[2:3]])


@pytest.mark.parametrize("which", ["torch", "cuda"])
def test_a_model_s_parts_are_packed_by_the_kernels_alone(checkpoint, monkeypatch, which):
    """All of its weights: none that was not looked at is kept as it is. Without the kernels each is looked at."""
    layers, unseen, packed, parts, alive = tuple(range(4)), set(), set(), [], []  # alive: so that no address is used twice
    monkeypatch.setattr(loader, "_staged", lambda device: True)
    ops.select_backend(which)
    weight, launch = Checkpoint.weight, packing._Packer.__init__

    def taken(self, name, read=None, check=True):
        made = weight(self, name, read, check)
        alive.append(made)
        if not check:
            unseen.add(made.payload.data_ptr())
        return made

    def looked(self, weight):
        packed.add(weight.payload.data_ptr())
        launch(self, weight)

    monkeypatch.setattr(Checkpoint, "weight", taken)
    monkeypatch.setattr(packing._Packer, "__init__", looked)
    monkeypatch.setattr("dsv4.model.load", lambda c, given, told: (parts.extend(given), load(c, given, told))[1])
    try:
        Model(checkpoint, Plan(layers, (DevicePlan(CPU, layers, 0, 0, 0, 0),), 16, 16, False), Numerics(dtype=torch.bfloat16))
    finally:
        ops.select_backend("torch")
    assert bool(unseen) == (which == "cuda") and unseen <= packed
    assert [part.packs for part in parts] == [False] + [which == "cuda"] * 5


def test_what_is_taken_is_given_away_and_can_be_read_again(checkpoint):
    def bind(source, checkpoint, needs):
        first = source.tensor("layers.1.hc_attn_fn")
        again = source.tensor("layers.1.hc_attn_fn")
        assert torch.equal(first, again) and first.data_ptr() != again.data_ptr()
        return isinstance(source.weight("layers.3.attn.wq_a"), Weight)  # no part of it: read now

    assert load(checkpoint, [Part("x", CPU, needs_of_layer(MINI, 1), 1, lambda source: bind(source, checkpoint, None))]) == {"x": True}


# ------------------------------------------------------------------------------------------------------------- progress


def test_progress_counts_every_part_in_the_calling_thread(checkpoint, monkeypatch):
    monkeypatch.setattr(loader, "PIECE", 2000)
    told, threads = {}, set()

    def on_progress(count, part, device):
        assert count >= 0 and device in (CPU, CPU_0)
        told.setdefault(part, []).append(count)
        threads.add(threading.current_thread())

    parts = parts_of(checkpoint, (CPU, CPU_0))
    load(checkpoint, parts, on_progress)
    assert {name: sum(counts) for name, counts in told.items()} == {part.name: part.nbytes for part in parts}
    assert threads == {threading.main_thread()} and max(map(len, told.values())) > 5


def drawn_parts(made, devices):
    return [replace(part, nbytes=sum(map(made.bytes_of, part.needs))) for part in parts_of(made, devices)]


@pytest.mark.parametrize("devices", [(CPU,), (CPU, CPU_0)])
def test_weights_that_are_drawn_are_so_on_their_device_when_they_are_asked_for(devices, monkeypatch):
    """Told tensor by tensor, and the same ones wherever they are; on several devices at the same time."""
    made, told, drawn = SyntheticCheckpoint(MINI, "nvidia", "meta"), [], []
    barrier, draw = threading.Barrier(len(devices), timeout=20), SyntheticCheckpoint.weight

    def weight(self, name):
        if not drawn.count(self.device):
            barrier.wait()
        drawn.append(self.device)
        return draw(self, name)

    monkeypatch.setattr(SyntheticCheckpoint, "weight", weight)
    parts = drawn_parts(made, devices)
    got = load(made, parts, lambda *event: told.append(event))
    assert set(drawn) == set(devices) and made.device.type == "meta"
    monkeypatch.setattr(SyntheticCheckpoint, "weight", draw)
    assert_loaded(made.on(CPU), got, parts)
    for part in parts:
        counts = [count for count, name, device in told if name == part.name and device == part.device and count]
        assert sum(counts) == part.nbytes and len(counts) > 5


def test_drawing_ends_between_two_tensors(monkeypatch):
    """Ctrl-C and the like: at true size a layer takes a CPU some seconds."""
    made, asked = SyntheticCheckpoint(MINI, "nvidia", "meta"), []
    draw = SyntheticCheckpoint.weight
    monkeypatch.setattr(SyntheticCheckpoint, "weight", lambda self, name: (asked.append(name), draw(self, name))[1])

    def stop(count, part, device):
        if len(asked) == 3:
            raise Enough

    with pytest.raises(Enough):
        load(made, drawn_parts(made, (CPU,)), stop)
    assert len(asked) == 3


def test_a_checkpoint_of_another_kind_is_asked_for_each_tensor():
    class Held:
        config, kind = MINI, "plain"

        def tensor(self, name):
            return torch.ones(4, dtype=torch.uint8)

        def weight(self, name):
            return Weight.plain(torch.ones(1, 2, dtype=torch.uint8))

    told = []
    bind = (lambda source: [source.tensor("x"), source.weight("y").payload, source.tensor("x")], lambda source: source.kind)
    parts = [Part(name, CPU, [], 7, bind[i]) for i, name in enumerate("ab")]
    made = load(Held(), parts, lambda *event: told.append(event))
    assert made["b"] == "plain" and [len(t.view(-1)) for t in made["a"]] == [4, 2, 4]
    assert [event for event in told if event[0]] == [(4, "a", CPU), (2, "a", CPU), (1, "a", CPU), (7, "b", CPU)]


class Enough(Exception):
    pass


@pytest.mark.parametrize("devices", [(CPU,), (CPU, CPU_0)])
def test_what_the_callback_raises_ends_the_loading(checkpoint, devices):
    """Between two tensors: the part that is being bound is given up."""
    begun, ended = [], []

    def on_progress(count, part, device):
        if begun:
            raise Enough

    def bind(source, checkpoint, needs):
        begun.append(1)
        time.sleep(3 * loader.TICK)
        everything(source, checkpoint, needs)
        ended.append(1)

    with pytest.raises(Enough):
        load(checkpoint, parts_of(checkpoint, devices, bind), on_progress)
    assert len(begun) <= len(devices) and not ended


def test_a_disk_that_hangs_does_not_keep_ctrl_c_waiting(checkpoint, monkeypatch):
    """The callback is called although nothing is read, and what the signal raises comes out; the read ends afterwards."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    hangs = threading.Event()
    monkeypatch.setattr(loader, "read_range", lambda *_: hangs.wait(20))
    calls = []

    def on_progress(count, part, device):
        calls.append(count)
        if len(calls) == 3:
            threading.Timer(0.2, hangs.set).start()
            signal.raise_signal(signal.SIGINT)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        load(checkpoint, parts_of(checkpoint), on_progress)
    assert time.monotonic() - start < 5 and calls == [0, 0, 0]


# --------------------------------------------------------------------------------------------------------------- faults


def refused(checkpoint, *pieces, error=CheckpointError):
    with pytest.raises(error) as caught:
        load(checkpoint, parts_of(checkpoint))
    assert all(piece in str(caught.value) for piece in pieces) and "\n" not in str(caught.value), caught.value
    return caught.value


SHARD = "model-00004-of-00007.safetensors"  # layer 2


@pytest.mark.parametrize("way", WAYS)
def test_a_shard_that_was_written_to_since_its_header_was_read(checkpoint, way, go):
    go(way)
    entry = checkpoint.entries(needs_of_layer(MINI, 2)[0])
    assert entry.shard == SHARD
    os.utime(checkpoint.folder / SHARD, ns=(1, 1))
    refused(checkpoint, f"{SHARD}: layers.2.", "the shard changed after its header was read, seen after reading up to offset")


def test_a_shard_that_changes_while_it_is_read(checkpoint, monkeypatch):
    """The header was fine, so were the first bytes; the stamp is looked at behind every read."""
    original = os.preadv

    def preadv(file, buffers, at):
        got = original(file, buffers, at)
        if os.readlink(f"/proc/self/fd/{file}").endswith(SHARD) and at > 5000:
            with open(checkpoint.folder / SHARD, "r+b") as writer:
                writer.seek(-1, os.SEEK_END)
                writer.write(b"\x55")
        return got

    monkeypatch.setattr(shards.os, "preadv", preadv)
    refused(checkpoint, f"{SHARD}: layers.2.", "the shard changed after its header was read")


@pytest.mark.parametrize("way", WAYS)
def test_a_shard_that_is_cut_off_or_gone(checkpoint, way, go, monkeypatch):
    go(way)
    last = max((e for need in needs_of_layer(MINI, 2) for e in getattr(checkpoint.entries(need), "entries", [])), key=lambda e: e.end)
    with open(checkpoint.folder / SHARD, "r+b") as file:
        file.truncate(last.end - 10)
    refused(checkpoint, f"{SHARD}: layers.2.", "the shard changed after its header was read")
    checkpoint.stamps.clear()  # a file system that does not say
    refused(checkpoint, f"{SHARD}: {last.key}: expected {last.nbytes} bytes at offset {last.begin}, found {last.nbytes - 10}: the shard ch")
    # Of two pieces beyond the end, whichever is read first names what there is.
    monkeypatch.setattr(loader, "PIECE", 8)
    with open(checkpoint.folder / SHARD, "r+b") as file:
        file.truncate(last.begin + 1)
    refused(checkpoint, f"{SHARD}: {last.key}: expected {last.nbytes} bytes at offset {last.begin}, found 1: the shard ch")
    (checkpoint.folder / SHARD).unlink()
    refused(checkpoint, f"{SHARD}: layers.2.", "reading at offset", "failed: No such file or directory")


def test_a_disk_that_fails(checkpoint, monkeypatch):
    original, bad = os.preadv, checkpoint.entries(next(n for n in needs_of_layer(MINI, 2) if n.name.endswith("experts.3.w2"))).payload

    def preadv(file, buffers, at):
        if os.readlink(f"/proc/self/fd/{file}").endswith(SHARD) and at <= bad.begin < at + len(buffers[0]):
            if at < bad.begin:  # what lies before it can be read
                return original(file, [buffers[0][: bad.begin - at]], at)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(file, buffers, at)

    monkeypatch.setattr(shards.os, "preadv", preadv)
    refused(checkpoint, f"{SHARD}: {bad.key}: reading at offset {bad.begin} failed: Input/output error")


def test_a_shard_that_may_not_be_read(checkpoint, monkeypatch):
    """At its header and at its weights."""
    def refuse(original, *name):
        def opened(path, *how, **more):
            if str(path).endswith(SHARD):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return original(path, *how, **more)

        monkeypatch.setattr(*name, opened)

    refuse(os.open, shards.os, "open")
    refused(checkpoint, f"{SHARD}: layers.2.", "reading at offset", "failed: Permission denied")
    refuse(open, "builtins.open")
    with pytest.raises(CheckpointError, match=f"{SHARD}: cannot be read: Permission denied$"):
        Checkpoint.open(checkpoint.folder)


def test_a_host_without_memory_to_pin(checkpoint, go, monkeypatch):
    go("slots")
    empty = torch.empty

    def refuses(*shape, **how):
        if "pin_memory" in how:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        return empty(*shape, **how)

    monkeypatch.setattr(torch, "empty", refuses)
    refused(checkpoint, "the host: expected 16.78 MB of pinned memory for each reading thread, found CUDA error: out of memory: end what",
            error=DoesNotFit)


def test_a_tensor_without_bytes_does_not_shorten_a_run():
    whole, none = (shards.Entry("s", key, "U8", (end - 100,), 100, end) for key, end in (("whole", 200), ("none", 100)))
    assert [(run.begin, run.end) for run in shards.runs_of([whole, none])] == [(100, 200)]


def test_a_shard_that_ends_in_a_gap(tmp_path):
    """The tensor behind the gap is the one that is missing."""
    (tmp_path / "s").write_bytes(bytes(20))
    first, second = (shards.Entry("s", key, "U8", (8,), begin, begin + 8) for key, begin in (("first", 0), ("second", 40)))
    with pytest.raises(CheckpointError, match="^s: second: expected 8 bytes at offset 40, found 0: the shard changed"):
        shards.read_range(tmp_path, shards.Run("s", 0, 48, (first, second)), 0, memoryview(bytearray(48)))


def test_a_disk_that_fails_below_the_kernels(checkpoint, go, monkeypatch):
    """read_to_gpu says where: in the second of two ranges here, of an expert's codes and scales."""
    go("kernels")
    seen, original = [], loader.read_to_gpu

    def fails(file, ranges, *rest):
        if os.readlink(f"/proc/self/fd/{file}").endswith(SHARD) and len(ranges) > 1 and not seen:
            seen.append(ranges)
            return 1, 100, errno.EIO
        return original(file, ranges, *rest)

    monkeypatch.setattr(loader, "read_to_gpu", fails)
    text = str(refused(checkpoint, f"{SHARD}: layers.2.ffn.experts."))
    at = seen[0][1][0] + 100
    entries = [e for n in needs_of_layer(MINI, 2) if n.linear for e in checkpoint.entries(n).entries]
    key = next(e.key for e in entries if e.begin <= at < e.end)
    assert text == f"{SHARD}: {key}: reading at offset {at} failed: Input/output error"


def test_a_read_below_the_kernels_is_told_to_stop(checkpoint, go, monkeypatch):
    """By what the C function looks at: a load ends within a slot's time and not a piece's."""
    go("kernels")

    def waits(file, ranges, to, slots, stop):
        for _ in range(2000):
            if int(stop):
                return 0, 0, 0
            time.sleep(0.005)
        return len(ranges), 0, 0

    def on_progress(*_):
        raise Enough

    monkeypatch.setattr(loader, "read_to_gpu", waits)
    start = time.monotonic()
    with pytest.raises(Enough):
        load(checkpoint, parts_of(checkpoint), on_progress)
    assert time.monotonic() - start < 5


def test_an_expert_s_ranges_are_one_piece(checkpoint, monkeypatch):
    """Codes and scales lie apart in a shard, and one call reads both; of as many experts as a piece holds, and never more than a piece."""
    needs = [need for need in needs_of_layer(MINI, 2) if need.kind == "routed experts"]
    expert = sum(entry.nbytes for need in needs for entry in checkpoint.entries(need).entries[:2]) // 4
    for piece, units, pieces in ((5 * expert, 1, 1), (2 * expert, 2, 1), (2 * expert - 1, 4, 1), (expert - 1, 4, 2)):
        monkeypatch.setattr(loader, "PIECE", piece)
        found = [unit for unit in loader._units(checkpoint, needs) if not unit.on_host]
        assert len(found) == units
        for unit in found:
            begins, memory = [0, unit.runs[0].nbytes], torch.arange(unit.nbytes)
            cut = loader._pieces(unit, begins, memory)
            assert len(unit.runs) == 2 and len(cut) == pieces and [len(p.ranges) for p in cut][-1] == (2 if pieces == 1 else 1)
            assert all(sum(size for _, _, size, _ in p.ranges) == len(p.target) <= piece for p in cut)
            assert torch.equal(torch.cat([p.target for p in cut]), memory)
            for run, begin, size, at in (r for p in cut for r in p.ranges):
                assert run.begin <= begin and begin + size <= run.end and at >= 0


def test_what_binding_raises_comes_out(checkpoint, tmp_path):
    def bind(source, checkpoint, needs):
        raise CheckpointError("layers.9: no good")

    with pytest.raises(CheckpointError, match="^layers.9: no good$"):
        load(checkpoint, parts_of(checkpoint, (CPU, CPU_0), bind))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), MemoryError(),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")])
@pytest.mark.parametrize("where", ["bind", "buffers"])
def test_memory_that_runs_out(checkpoint, monkeypatch, error, where):
    def fail(*args, **kwargs):
        raise error

    parts = parts_of(checkpoint, bind=fail if where == "bind" else everything)
    if where == "buffers":
        monkeypatch.setattr(loader, "_units", fail)
    with pytest.raises(DoesNotFit) as caught:
        load(checkpoint, parts)
    text, start = str(caught.value), "cpu: out of memory while loading part 0: it needs 1.00 kB, with the 4 parts behind it 5.01 kB"
    assert text.startswith(f"{start}, and room to pack it, ")
    assert "are free: end what else uses this memory, or give more --devices" in text and caught.value.exit_code == 4


@pytest.mark.parametrize("found, free, missing", [
    ("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has", 2000, "2.10 MB or more missing"),  # more than what is to come
    ("CUDA out of memory. Tried to allocate 20 B", 2000, "1.01 kB or more missing"),  # of 3,006 B in the parts 2, 3 and 4
    ("CUDA out of memory. Tried to allocate 20.00 KiB", 10**6, None)])  # in pieces
def test_how_much_memory_was_missing(checkpoint, monkeypatch, found, free, missing):
    def bind(source, checkpoint, needs):
        if "layers.1.attn_norm.weight" in [need.name for need in needs]:
            raise torch.OutOfMemoryError(found)

    monkeypatch.setattr(loader.runtime, "free_bytes", lambda device: free)
    with pytest.raises(DoesNotFit) as caught:
        load(checkpoint, parts_of(checkpoint, bind=bind))
    text = str(caught.value)
    assert "cpu: out of memory while loading part 2: it needs 1.00 kB, with the 2 parts behind it 3.01 kB" in text
    assert "are free" in text and ("missing" not in text if missing is None else f": {missing}: end what" in text)


@pytest.mark.parametrize("devices", [(CPU,), (CPU, CPU_0)])
@pytest.mark.parametrize("why", [torch.OutOfMemoryError("CUDA out of memory"), Enough()])
def test_memory_is_given_back_when_a_loading_ends(checkpoint, devices, why, monkeypatch):
    """All that was read and bound, though the error is still held and nothing looks for reference cycles."""
    alive, tensor_of, bound = [], loader.tensor_of, []

    def bind(source, checkpoint, needs):
        if len(bound) == 3:
            raise why
        bound.append(1)
        return everything(source, checkpoint, needs)

    def counted(data, *where):
        alive.append(weakref.ref(data.untyped_storage()))
        return tensor_of(data, *where)

    monkeypatch.setattr(loader, "tensor_of", counted)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises((DoesNotFit, Enough)) as caught:
            load(checkpoint, parts_of(checkpoint, devices, bind))
        caught.value.__traceback__ = None
        made = caught.value
        del caught
        assert made and len(alive) > 10 and not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


def test_readers_are_two_a_core_up_to_eight_or_ten_a_gpu(monkeypatch):
    for cores, want in ((3, [6, 6, 6]), (16, [8, 10, 20]), (96, [8, 10, 20])):
        monkeypatch.setattr(loader.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert [loader.reading_threads(gpus) for gpus in (0, 1, 2)] == want


def test_the_release_s_layout_is_what_these_tests_say(pristine):
    weight_map = json.loads((pristine / "model.safetensors.index.json").read_text())["weight_map"]
    assert {weight_map[k] for k in weight_map if k.startswith("layers.2.")} == {SHARD} and Path(pristine / SHARD).exists()
