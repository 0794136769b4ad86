"""Which layer goes on which device and what that takes, decided before a byte of weights is read; it fits, or says what would fit instead.

Sizes come from the checkpoint's headers, the layouts of dsv4/kernels/packing.py and allocations on torch's meta device. Nothing here needs
a GPU, so a plan can be made for a machine that one does not have (machines.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from . import loader, ops, streaming
from .cache import layer_cache_bytes
from .checkpoint import Checkpoint, Need, Stored, needs_of_layer, needs_outside_layers
from .config import ModelConfig
from .drawing import CHUNK
from .errors import DoesNotFit, UserError
from .kernels import MAX_TOKENS
from .kernels.attention import UNIT, shares_of
from .kernels.keys import KEY_BYTES, KEY_SCALES
from .kernels.packing import ROWS, packed_shape
from .machines import GIB, reserved
from .ops.attention import TILE as ATTENTION_TILE
from .ops.indexer import TILE as INDEX_TILE
from .ops.linear import TILE as LINEAR_TILE


@dataclass(frozen=True)
class DevicePlan:
    """One device's share: the layers it runs and bytes by purpose.

    weights, cache: kept. scratch: held besides at the peak of a step. graphs: the captured steps' own memory. loading: held
    besides the weights at the peak of the load, before there are caches. reserved: left free for what no tensor shows (machines.py).
    streamed: the layers whose routed experts stay elsewhere, which are so many `streamed_bytes` there; slots: room for those on their way.
    """

    device: torch.device
    layers: tuple[int, ...]
    weights: int
    cache: int
    scratch: int
    free: int
    graphs: int = 0
    loading: int = 0
    reserved: int = 0
    streamed: tuple[int, ...] = ()
    streamed_bytes: int = 0
    slots: int = 0

    @property
    def needed(self) -> int:
        """At the higher of the two peaks, the load's and the run's."""
        return self.weights + self.slots + max(self.loading, self.cache + self.scratch + self.graphs)

    @property
    def missing(self) -> int:
        """Bytes that are not there; 0 if it fits."""
        return max(0, self.needed + self.reserved - self.free)


@dataclass(frozen=True)
class Plan:
    """The layers to run, in order, each on its device, for `context` tokens in steps of at most `chunk`; `host`: memory that a run on
    GPUs takes beside them. stream: where the experts of streamed layers stay, "host" or "disk"; None: all are resident."""

    layers: tuple[int, ...]
    devices: tuple[DevicePlan, ...]
    context: int
    chunk: int
    keep_dequantised: bool
    host: int = 0
    stream: str | None = None

    @property
    def fits(self) -> bool:
        return not any(d.missing for d in self.devices)

    def device_of(self, layer: int) -> torch.device:
        """Where a planned layer runs."""
        return self.share_of(layer).device

    def share_of(self, layer: int) -> DevicePlan:
        """The share of a planned layer's device."""
        return next(d for d in self.devices if layer in d.layers)

    def left_in_files(self, layer: int) -> bool:
        """Whether a layer's routed experts are not read when it is loaded."""
        return self.stream == "disk" and layer in self.share_of(layer).streamed


@dataclass(frozen=True)
class Wish:
    """What is to be run. `logit_rows` rows of logits are made at once and `dump_rows` kept on the host; `caches` of the whole context are
    held. `expand`: quantised weights are kept dequantised (fp32, the same values, faster on the definitions) when that takes at most half
    of what is free. `auto`: on the fewest of the devices that suffice; `per_device`: so many layers on each. `drawn`: the weights are made
    on the devices and not read. `stream`: where routed experts that do not fit the devices may stay, "host" or "disk"."""

    layers: range
    context: int
    chunk: int
    dtype: torch.dtype
    logit_rows: int = 1
    dump_rows: int = 0
    caches: int = 1
    expand: bool = True
    auto: bool = False
    per_device: tuple[int, ...] | None = None
    drawn: bool = False
    stream: str | None = None


class Room(NamedTuple):
    """A device and the bytes it has free."""

    device: torch.device
    free: int


class Instead(NamedTuple):
    """What would fit, the rest as wished: the largest context, the fewest GPUs (like the one with the most free) without streaming, the
    longest run of layers from the first one, where experts may stay if they may not yet, the longest chunk of the prompt if it must be a
    shorter one; None where nothing does."""

    context: int | None
    devices: int | None
    layers: range | None
    stream: str | None = None
    chunk: int | None = None


def make_plan(checkpoint: Checkpoint, devices: list[torch.device], *, layers: range, context: int, chunk: int, dtype: torch.dtype,
              free_bytes: Callable[[torch.device], int], auto: bool = False, logit_rows: int = 1, expand: bool = True,
              drawn: bool = False, stream: str | None = None) -> Plan:
    """The plan of a Wish. Raises DoesNotFit with the device, the bytes needed, the bytes free and what would fit."""
    wish = Wish(layers, context, chunk, dtype, logit_rows, expand=expand, auto=auto, drawn=drawn, stream=stream)
    return Planner(checkpoint, [Room(d, free_bytes(d)) for d in devices], wish).fitting()


class Planner:
    """Plans for one checkpoint, of which it reads sizes only. The backend must have been selected: it decides what weights and caches
    become. `host_free`: bytes that the host has for what is streamed from there (None: it is not judged)."""

    def __init__(self, checkpoint: Checkpoint, rooms: list[Room], wish: Wish, host_free: int | None = None):
        if wish.stream == "host" and rooms[0].device.type == "cpu":
            raise UserError("--stream-weights host: expected GPUs, found cpu, whose memory is the host's: "
                            + ("leave it out" if wish.drawn else "use --stream-weights disk"))
        if wish.stream == "disk" and wish.drawn:
            raise UserError("--stream-weights disk: expected a checkpoint's files, found weights that are drawn: use --stream-weights host")
        self.checkpoint, self.rooms, self.wish, self.host_free = checkpoint, rooms, wish, host_free
        self.packs = ops.selected_backend() == "cuda"
        self._sizes: dict[str, Sizes] = {}
        self._caches: dict[tuple, int] = {}

    @cached_property
    def plan(self) -> Plan:
        """The plan of the wish, whether it fits or not."""
        return self._plan(self.rooms, self.wish)

    def fitting(self) -> Plan:
        """The plan; raises DoesNotFit in one line where it does not."""
        if self.plan.fits:
            if self._host_suffices(self.plan):
                return self.plan
            raise DoesNotFit(f"--stream-weights host: needs {gib(self.plan.host)} GiB of host memory (experts "
                             f"{gib(sum(d.streamed_bytes for d in self.plan.devices))}), has {gib(self.host_free)} GiB free: "
                             + ("take more GPUs or fewer --layers" if self.wish.drawn else "--stream-weights disk needs none for them"))
        worst = max(self.plan.devices, key=lambda d: d.missing)
        scale, unit = scale_of(worst.needed)
        needed, weights, cache, reserved, free = (
            f"{size / scale:.2f}" for size in (worst.needed, worst.weights, worst.cache, worst.reserved, worst.free))
        raise DoesNotFit(
            f"{worst.device}: needs {needed} {unit} (weights {weights}, caches for {self.wish.context} tokens {cache}, "
            f"scratch {(worst.needed - worst.weights - worst.cache) / scale:.2f}"
            + (f") and {reserved} in reserve" if worst.reserved else ")")
            + f", has {free} {unit} free: {self.advice()}; --plan shows all of it")

    def _host_suffices(self, plan: Plan) -> bool:
        return plan.stream != "host" or self.host_free is None or plan.host <= self.host_free

    def advice(self) -> str:
        """What would fit instead, in words."""
        context, devices, layers, stream, chunk = self.instead
        ways = [f"--prefill-chunk {chunk}"] if chunk else []
        ways += [f"--context {context}"] if context else []
        ways += [f"{devices} such GPUs"] if devices else []
        ways += [f"--layers {layers.start}:{layers.stop}"] if layers else []
        ways += [f"--stream-weights {stream}"] if stream else []
        if not ways:
            return "nothing smaller fits: more memory is needed (another device, or a larger --memory where it was given)"
        return "it fits with " + ", or with ".join(ways)

    @cached_property
    def instead(self) -> Instead:
        """What would fit. Each is found by trying."""
        wish, most = self.wish, self.checkpoint.config.max_position_embeddings

        def with_context(n):
            return self._plan(self.rooms, replace(wish, context=n, chunk=min(wish.chunk, n))).fits

        def with_chunk(n):
            return self._plan(self.rooms, replace(wish, chunk=n)).fits

        def with_layers(n):  # the counts per device were given for all of them
            return self._plan(self.rooms, replace(wish, layers=wish.layers[:n], per_device=None)).fits

        count, largest = None, max(self.rooms, key=lambda room: room.free)
        if largest.device.type == "cuda":
            need = 0 if self.plan.keep_dequantised else sum(d.weights + d.cache + d.streamed_bytes for d in self.plan.devices)
            for n in range(max(1, need // max(1, largest.free)), len(wish.layers) + 1):
                rooms = [Room(torch.device("cuda", i), largest.free) for i in range(n)]
                if self._plan(rooms, replace(wish, auto=False, per_device=None, stream=None)).fits:
                    count = n
                    break
        stream = next((where for where in ("host", "disk") if self._would_stream(where)), None)
        layers = len(wish.layers) if self.plan.fits else _largest(with_layers, len(wish.layers) - 1)
        chunk = None if self.plan.fits else _largest(with_chunk, wish.chunk - 1) or None
        return Instead(_largest(with_context, most) or None, count, wish.layers[:layers] if layers else None, stream, chunk)

    def _would_stream(self, where: str) -> bool:
        """Whether it fits with experts that stay there, and not without. Host memory that nobody knows is hoped for only where there is
        nothing else."""
        wish, on_cpu = self.wish, self.rooms[0].device.type == "cpu"
        if self.plan.fits or wish.stream or (where == "disk" and wish.drawn):
            return False
        if where == "host" and (on_cpu or (self.host_free is None and not wish.drawn)):
            return False
        plan = self._plan(self.rooms, replace(wish, stream=where))
        return plan.fits and self._host_suffices(plan)

    # ---- one plan

    def _plan(self, rooms: list[Room], wish: Wish) -> Plan:
        if wish.per_device:
            rooms = rooms[: len(wish.per_device)]
        rooms, shares = rooms[: len(wish.layers)], ()
        for count in range(1, len(rooms) + 1) if wish.auto and not wish.per_device else (len(rooms),):
            if wish.expand and not self.packs:
                shares = self._shares("fp32", rooms[:count], wish)
                if all(2 * d.needed <= d.free for d in shares):
                    return self._made(shares, wish, True)
            shares = self._shares("packed" if self.packs else "stored", rooms[:count], wish)
            if not any(d.missing for d in shares):
                break
        if wish.stream and any(d.missing for d in shares):  # only now: resident on more devices comes before streamed on fewer
            shares = self._shares("packed" if self.packs else "stored", rooms, wish, wish.stream)
        return self._made(shares, wish, False)

    def _made(self, shares, wish, keep):
        stream = wish.stream if any(d.streamed for d in shares) else None
        return Plan(tuple(wish.layers), shares, wish.context, wish.chunk, keep, self._host(shares, wish, keep), stream)

    def _shares(self, form: str, rooms: list[Room], wish: Wish, stream: str | None = None) -> tuple[DevicePlan, ...]:
        """Balanced by bytes; where that does not fit, as what the devices have free. stream: where routed experts go that do not fit."""
        if wish.per_device:
            return self._devices(form, rooms, wish, wish.per_device, stream)
        sizes, caches = self._sizes_of(form), self._cache_bytes(wish)
        layers = [sizes.layers[n].kept + caches[n] for n in wish.layers]
        shares = ()
        for room in ([1] * len(rooms), [max(1, r.free) for r in rooms]):
            shares = self._devices(form, rooms, wish, split(layers, sizes.first.kept, sizes.last.kept, room), stream)
            if not any(d.missing for d in shares):
                break
        return shares

    def _devices(self, form, rooms, wish, counts, stream) -> tuple[DevicePlan, ...]:
        """Of a device's layers as few as can be are streamed, the first ones, and so the hash layers, whose choice is known early."""
        trial = self._cache_bytes(replace(wish, context=min(256, wish.context), caches=1)) if self.packs else {}
        out, start = [], 0
        for i, (room, count) in enumerate(zip(rooms, counts, strict=True)):
            layers, ends = wish.layers[start : start + count], (i == 0, i == len(rooms) - 1)

            def device(streamed, room=room, layers=layers, ends=ends):
                return self._device(form, room, wish, tuple(layers), ends, trial, tuple(layers[:streamed]), stream)

            made = device(0)
            if made.missing and stream:
                resident = _largest(lambda n, device=device, count=count: not device(count - n).missing, count - 1)
                made = device(count - resident)
            out.append(made)
            start += count
        return tuple(out)

    def _device(self, form, room, wish, layers, ends, trial, streamed, stream) -> DevicePlan:
        sizes, caches, (first, last) = self._sizes_of(form), self._cache_bytes(wish), ends
        parts = [sizes.first] * first + [sizes.layers[n].streamed(stream) if n in streamed else sizes.layers[n] for n in layers]
        parts += [sizes.last] * last
        weights, peak = 0, 0
        steps = [step for part in parts for step in part.steps]
        unread, ahead = (0, 0) if wish.drawn else (sum(step.read for step in steps), loader.AHEAD)
        for step in steps:  # as loader.py does: AHEAD bytes on their way, a unit being bound and the one before it not yet let go
            unread = max(0, unread - step.read)
            weights += step.kept
            peak = max(peak, weights + min(ahead + 2 * step.unit, step.passing + unread) + step.loading)
        scratch = self._step(room.device, wish, wish.chunk, form) + (4 * wish.context + self.checkpoint.config.vocab_size) * last
        scratch += 8 * wish.context + (0 if first else 2 * self._streams(wish))  # the prompt, and where streams arrive (prefill.py)
        graphs = 0
        if self.packs:  # of a token, captured behind a run on a small cache, and of a chunk
            graphs = sum(trial[n] for n in layers) + sum(self._step(room.device, wish, n, form) for n in {1, wish.chunk})
        return DevicePlan(room.device, layers, weights, sum(caches[n] for n in layers), scratch, room.free, graphs, peak - weights,
                          reserved(weights) if room.device.type == "cuda" else 0, streamed,
                          sum(sizes.layers[n].expert * self.checkpoint.config.n_routed_experts for n in streamed),
                          self._slots(form, room.device, wish, streamed, stream))

    def _streams(self, wish):
        """A chunk's, as they go from device to device."""
        return wish.chunk * self.checkpoint.config.hc_mult * self.checkpoint.config.hidden_size * wish.dtype.itemsize

    def _slots(self, form, device, wish, streamed, stream):
        """Room for the experts of streamed layers that are on their way (streaming.py)."""
        if not streamed:
            return 0
        c, layers = self.checkpoint.config, [self._sizes_of(form).layers[n] for n in streamed]
        kept, read = max(layer.expert for layer in layers), max(layer.steps[-1].read for layer in layers) // c.n_routed_experts
        if not self.packs:
            if stream == "host":  # one in use and the one that takes its place
                return 2 * kept
            return read * (1 + streaming.ahead(read, c.n_routed_experts) if device.type == "cpu" else 1)
        slots = streaming.slots_of(wish.chunk, c.num_experts_per_tok, c.n_routed_experts)
        total = slots * kept + len(layers) * (12 * (slots + 1) + 4 * wish.chunk * c.num_experts_per_tok)
        if stream == "disk":  # packed when they come, from memory of their own
            total += max(layer.steps[-1].loading for layer in layers)
            total += read * (1 + streaming.ahead(read, c.n_routed_experts) if device.type == "cpu" else 1)
        return total

    def _step(self, device, wish, tokens, form):
        """What a step of so many tokens holds at once."""
        config, rows = self.checkpoint.config, min(tokens, wish.logit_rows)
        if self.packs:
            return kernel_scratch(config, wish.context, tokens, rows)
        largest = 0 if form == "fp32" else self._sizes_of(form).largest_matrix
        return definition_scratch(config, wish.context, tokens, rows, min(largest, LINEAR_TILE) * (4 if device.type == "cpu" else 12))

    def _sizes_of(self, form):
        if form not in self._sizes:
            self._sizes[form] = sizes_of(self.checkpoint, self.wish.layers, form, self.rooms[0].device, self.wish.drawn)
        return self._sizes[form]

    def _cache_bytes(self, wish) -> dict[int, int]:
        """By layer; layers of one compress ratio have equal caches."""
        config, out = self.checkpoint.config, {}
        for n in wish.layers:
            key = config.compress_ratios[n], wish.context, wish.chunk
            if key not in self._caches:
                self._caches[key] = layer_cache_bytes(config, n, wish.context, wish.chunk, wish.dtype)
            out[n] = wish.caches * self._caches[key]
        return out

    def _host(self, shares, wish, keep):
        """Beside the GPUs: the process, the readers' pinned buffers, if any, a weight's fp32 copy, and the rows of logits that are kept."""
        if shares[0].device.type == "cpu":
            return shares[0].needed
        sizes = self._sizes_of("fp32" if keep else "packed" if self.packs else "stored")
        buffers = 0 if wish.drawn else loader.SLOTS * loader.SLOT * loader.MAX_READERS_OF_GPU * len({d.device for d in shares})
        for d in shares:
            experts = self.checkpoint.config.n_routed_experts
            if d.streamed and wish.stream == "host":
                buffers += sum(streaming.pinned_bytes(experts, sizes.layers[n].expert) for n in d.streamed)
            elif d.streamed:
                read = max(sizes.layers[n].steps[-1].read for n in d.streamed) // experts
                buffers += (1 + streaming.ahead(read, experts)) * streaming.pinned_bytes(1, read)
        return HOST + buffers + 4 * sizes.largest_matrix * keep + 4 * wish.dump_rows * self.checkpoint.config.vocab_size


HOST = 2 << 30  # Python, torch and CUDA's host side, and the tables of 285,660 headers (Pro); not measured with a GPU yet


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, if all below it do; 0 if 1 does not."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = most if high > most and low == 0 else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ----------------------------------------------------------------------------------------------------------- the split


def split(sizes: list[int], first: int, last: int, room: list[int]) -> tuple[int, ...]:
    """How many of the layers, of so many bytes, each device takes: contiguous runs, none empty, `first` bytes more on the first device and
    `last` more on the last. The largest share in proportion to `room` is as small as it can be; of these splits, the most even one."""
    count, n, sums = len(room), len(sizes), [0]
    for size in sizes:
        sums.append(sums[-1] + size)

    def load(d, i, j):
        return (sums[j] - sums[i] + first * (d == 0) + last * (d == count - 1)) / room[d]

    def best(cost, join):
        """By dynamic programming: costs[j] of the first j layers on the devices so far, and where the last device's run began."""
        costs, cuts = [0.0] + [math.inf] * n, []
        for d in range(count):
            ends = range(d + 1, n - (count - 1 - d) + 1)
            found = {j: min((join(costs[i], cost(load(d, i, j))), i) for i in range(d, j)) for j in ends}
            costs = [found[j][0] if j in found else math.inf for j in range(n + 1)]
            cuts.append({j: i for j, (_, i) in found.items()})
        end, counts = n, []
        for cut in reversed(cuts):
            counts.append(end - cut[end])
            end = cut[end]
        return costs[n], tuple(reversed(counts))

    limit, _ = best(lambda x: x, max)
    _, counts = best(lambda x: x * x if x <= limit * (1 + 1e-9) else math.inf, lambda a, b: a + b)
    return counts


# ----------------------------------------------------------------------------------------------------------- the sizes


class Binding(NamedTuple):
    """Bytes of what is bound together, on its device: what stays; what is read of its files; of that, what something else is made of and is
    there until the end (all of the routed experts', of the rest the largest); what is read and bound as one; and what is held besides."""

    kept: int
    read: int
    passing: int
    unit: int
    loading: int


class Part(NamedTuple):
    """A layer or an end of the model, in the steps in which it is bound: what is no routed expert, then these. expert: what each of these
    takes where it is kept."""

    steps: tuple[Binding, ...]
    expert: int = 0

    @property
    def kept(self) -> int:
        return sum(step.kept for step in self.steps)

    def streamed(self, where: str) -> Part:
        """The same when its routed experts do not stay: read, made into something and taken to the host, or not read."""
        alone, routed = self.steps
        return Part((alone, routed._replace(kept=0, passing=routed.read)) if where == "host" else (alone,))


class Sizes(NamedTuple):
    """Of a checkpoint whose weights take one form: the embedding, the layers, the head with what is before it; the most elements that a
    matrix has."""

    first: Part
    layers: dict[int, Part]
    last: Part
    largest_matrix: int


def sizes_of(checkpoint: Checkpoint, layers: range, form: str, device: torch.device, drawn: bool = False) -> Sizes:
    """`form` of linears: "fp32" (dequantised copies), "stored" (as on disk) or "packed" (as the kernels stream them). `drawn`: see Wish."""
    config, matrices = checkpoint.config, [0]

    def part(needs: Sequence[Need], factors: int = 0) -> Part:
        described = [(need, checkpoint.stored(need)) for need in needs]
        matrices.extend(math.prod(need.shape) for need in needs if need.linear)
        groups = [(r, [d for d in described if (d[0].kind == "routed experts") == r]) for r in (False, True)]
        steps = tuple(binding(group, routed, factors) for routed, group in groups if group)
        return Part(steps, (steps[1].kept - factors) // config.n_routed_experts if len(steps) > 1 else 0)

    def binding(described: list[tuple[Need, Stored]], routed: bool, factors: int) -> Binding:
        kept = sum(kept_bytes(need, stored, form) for need, stored in described)
        sizes = [stored.nbytes for _, stored in described]
        passing = [stored.nbytes for need, stored in described if not _stays(need, stored, form)] or [0]
        loading = loading_bytes(described, form, device)
        if drawn:  # in fp32 first
            normal = [math.prod(need.shape) for need, stored in described if stored.kind == "plain" and stored.dtype != "I64"]
            loading = max(loading, 4 * min(CHUNK, max(normal, default=0)))
        if not routed:
            return Binding(kept, sum(sizes), max(passing), max(sizes), loading)
        expert = sum(sizes) // config.n_routed_experts
        together = 1 if drawn else max(1, loader.PIECE // max(1, expert))  # as many as a piece holds
        unit = min(sum(sizes), together * expert)
        return Binding(kept + factors, sum(sizes), sum(passing), unit, loading)

    embed, *head = needs_outside_layers(config)
    factors = 12 * (config.n_routed_experts + 1) if form == "packed" else 0
    in_layers = {n: part(needs_of_layer(config, n), factors) for n in layers}
    return Sizes(part([embed]), in_layers, part(head), max(matrices))


def _stays(need: Need, stored: Stored, form: str) -> bool:
    """Whether what is read is what is kept, and not something made of it."""
    if need.linear:
        return form == "stored" or (form == "fp32" and stored.dtype == "F32")
    return stored.dtype in ("F32", "I64") or need.name == "embed.weight"


def kept_bytes(need: Need, stored: Stored, form: str) -> int:
    """What a tensor or linear takes on its device once it is loaded (layers/binder.py, ops.pack_*)."""
    count, name = math.prod(need.shape), need.name
    if not need.linear:
        if name == "embed.weight":
            return stored.nbytes
        if name.endswith("tid2eid"):
            return 8 * count
        return (2 if form == "packed" and name.endswith("gate.weight") and stored.dtype == "BF16" else 4) * count
    if form == "fp32":
        return 4 * count
    if form == "stored":  # without the global scale, which is a python number
        return {"nvfp4": count // 2 + count // 16, "mxfp4": count // 2 + count // 32}.get(stored.kind, stored.nbytes)
    if "experts." in name and name.endswith("w3"):
        return 0  # in the tiles of w1
    tile_rows = ROWS // 2 if "experts." in name and name.endswith("w1") else ROWS
    return math.prod(packed_shape(stored.kind, *need.shape, tile_rows))


def loading_bytes(described: list[tuple[Need, Stored]], form: str, device: torch.device) -> int:
    """What binding these holds for a while: what isfinite makes of a small tensor, a weight that is looked through for NaN and therefore
    dequantised, and of packing on a CPU about four times the codes of a chunk; on a GPU only what is not bf16 is copied before."""
    most = largest = 0
    for need, stored in described:
        count = math.prod(need.shape)
        if not need.linear:  # the embedding and the table are not looked through
            most = max(most, 0 if need.name.endswith(("embed.weight", "tid2eid")) else 7 * count)
        else:
            if device.type == "cpu":
                largest = max(largest, stored.nbytes)
            elif form == "packed" and stored.kind == "plain" and stored.dtype != "BF16":
                most = max(most, 8 * count)
            if "compressor" in need.name or "indexer" in need.name:
                most = max(most, 12 * count)
    return max(most, 4 * min(1 << 20, largest) if form == "packed" else 0)


def definition_scratch(config: ModelConfig, context: int, tokens: int, logit_rows: int, matrix_bytes: int) -> int:
    """What the torch definitions hold at once in a step: scores of attention and indexer with their copies, the top-k's sort, a dequantised
    tile (`matrix_bytes`), the tokens' activations."""
    ratios = {r for r in config.compress_ratios if r}
    entries = context // min(ratios) if ratios else 0
    reachable = config.sliding_window + tokens + entries
    scores = 3 * min(ATTENTION_TILE, tokens * config.num_attention_heads * reachable)
    if 4 in ratios and entries > config.index_topk:  # the products and their relu; then scores, ranks, order (int64) and masks
        scores = max(scores, 2 * min(INDEX_TILE, tokens * config.index_n_heads * entries) + 6 * tokens * entries)
    queries = tokens * config.num_attention_heads * config.head_dim
    streams = tokens * config.hc_mult * config.hidden_size
    return 4 * (scores + 6 * queries + 6 * streams + logit_rows * config.vocab_size) + matrix_bytes


def kernel_scratch(config: ModelConfig, context: int, tokens: int, logit_rows: int) -> int:
    """What the kernels' wrappers allocate in a step and hold at once in the layer that takes the most, and the logits: the projections
    (fp32), the attention's partial sums (bf16) or before them the indexer's scores of every entry, the sums that mHC's two kernels share,
    the streams, a block's output in parts."""
    c = config
    if tokens > MAX_TOKENS:
        return prompt_scratch(c, context, tokens, logit_rows)
    queries = c.num_attention_heads * c.head_dim
    entries = {0: 0, 4: c.index_topk, 128: context // 128}  # that a token attends to, by ratio
    most = 0
    for ratio in {*c.compress_ratios}:
        units = -(-(c.sliding_window + tokens) // UNIT) - (-entries[ratio] // UNIT)
        splits = shares_of(units, c.num_attention_heads, tokens)["splits"]
        layer = splits * (2 * queries + 8 * c.num_attention_heads) + 2 * queries
        if ratio == 4:  # scores, then attention; the indexer's projections are of one piece with attention's
            layer = 4 * c.index_topk + max(layer, 4 * (context // 4))
            layer += 4 * (c.index_n_heads * (c.index_head_dim + 1) + 4 * c.index_head_dim)
        most = max(most, layer)
    fp32 = c.q_lora_rank + 5 * c.head_dim + queries + 35 * 128 + 4 * c.hidden_size  # 35 x 128: mHC's sums; 4: the parts
    bf16 = c.o_groups * c.o_lora_rank + (2 * c.hc_mult + 2) * c.hidden_size
    return tokens * (4 * fp32 + 2 * bf16 + most) + 4 * logit_rows * c.vocab_size


def prompt_scratch(config: ModelConfig, context: int, tokens: int, logit_rows: int) -> int:
    """The same of a step on the products of a prompt, in attention or in the experts, whichever takes more. Streams before and behind a
    site, its input and the last block's output are there in both."""
    c = config
    queries, ring = c.num_attention_heads * c.head_dim, c.sliding_window + MAX_TOKENS
    most = 0
    for ratio in {*c.compress_ratios}:
        compressed = {0: 0, 4: 4 * (c.head_dim + c.index_head_dim) + c.index_n_heads, 128: 2 * c.head_dim}[ratio]
        projected = c.q_lora_rank + c.head_dim + compressed
        entries = {0: 0, 4: c.index_topk, 128: context // 128}[ratio]
        splits = shares_of(-(-ring // UNIT) - (-entries // UNIT), c.num_attention_heads, tokens)["splits"]
        index_q, scores = (c.index_n_heads * c.index_head_dim, context // 4 + c.index_topk) if ratio == 4 else (0, 0)
        attended = 2 * queries + max(splits * (2 * queries + 8 * c.num_attention_heads), 2 * queries + 4 * c.o_groups * c.o_lora_rank)
        layer = 4 * (projected + queries + index_q) + 2 * c.q_lora_rank + max(4 * scores, 4 * c.index_topk * (ratio == 4) + attended)
        most = max(most, layer)
    k, inner = c.num_experts_per_tok, -(-c.moe_intermediate_size // 64) * 64
    experts = k * (6 * c.hidden_size + 2 * inner + 64) + 6 * c.hidden_size + 2 * inner  # rows of w2 in fp32, behind gathered tokens
    streams = 2 * (2 * c.hc_mult + 3) * c.hidden_size + 35 * 128
    rings = -(-tokens // MAX_TOKENS) * ring * (KEY_BYTES + KEY_SCALES + 24)  # for each 8 tokens, and which rows they have
    return tokens * (streams + max(most, experts)) + rings + 4 * logit_rows * c.vocab_size


def scale_of(size: int) -> tuple[int, str]:
    """The unit that such a size is told in: its bytes and its name."""
    return (GIB, "GiB") if size >= GIB else (1 << 20, "MiB")


def gib(size: int) -> str:
    """In GiB, two digits behind the point."""
    return f"{size / GIB:.2f}"
