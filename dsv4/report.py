"""What is told of a run: the plan before it, as a table or an object, and the line after it."""

from __future__ import annotations

from .announced import Announced, Disk
from .checkpoint import family, human_bytes
from .machines import CONTEXT, GIB, Machine
from .plan import Plan, Planner, scale_of


def planned_bytes(plan: Plan, resident: int) -> dict[str, int]:
    """What the plan predicts for runtime.peak_bytes, by its names. On a CPU beside what the process was resident with when it was made."""
    if plan.devices[0].device.type == "cpu":
        return {"host": resident + plan.devices[0].needed}
    return {"host": plan.host} | {str(d.device): d.needed for d in plan.devices}


def run_line(timing: dict, memory: dict, planned: dict, finish: str, streamed: dict | None = None, hop: str | None = None) -> str:
    """The last line on standard error. `memory`: the measured peaks, `planned`: the plan's, `streamed`: as streaming.report says it, `hop`:
    what decode.hops says."""
    parts = [] if finish in ("stop", "length") else [finish]
    if "load_s" in timing:
        parts.append(f"load {timing['load_s']:.2f} s")
    if "prefill_s" in timing:
        parts.append(f"prefill {timing['prefill_tokens']} tokens, {timing['prefill_tokens_per_s']:.1f} tokens/s")
    if timing.get("decode_tokens"):
        parts.append(f"decode {timing['decode_tokens']} tokens, {timing['decode_tokens_per_s']:.1f} tokens/s, "
                     f"{timing['decode_ms_per_token']:.1f} ms/token"
                     + (f", median {timing['decode_ms_median']:.2f}" if "decode_ms_median" in timing else ""))
    if "hop_us" in timing:
        parts.append(f"hop {timing['hop_us']:.1f} us by {hop}")
    if streamed:
        parts.append(f"streamed {human_bytes(streamed['bytes'])} from {streamed['from']} at {streamed['gb_per_s']:.2f} GB/s, "
                     f"{100 * streamed['fraction']:.0f} % of {streamed['measured_gb_per_s']:.2f} measured"
                     + (f", {streamed['decode_gb_per_s']:.2f} over a token's time" if streamed["decode_gb_per_s"] else ""))
    parts.append("peak memory " + ", ".join(f"{name} {size / 2**20:,.0f} MiB (planned {planned[name] / 2**20:,.0f})"
                                            for name, size in memory.items()))
    return " | ".join(parts)


class PlanReport:
    """A plan with what surrounds it: the machine (None: this one), the host's free memory, the checkpoint's bytes on disk. Of an assumed
    machine, host and disk are stated and not judged."""

    def __init__(self, planner: Planner, machine: Machine | None, host_free: int, disk: Disk):
        self.planner, self.plan, self.machine, self.disk = planner, planner.plan, machine, disk
        self.host_free = None if machine else host_free

    @property
    def host_missing(self) -> int:
        """On a CPU the device is the host and says it."""
        on_cpu = self.plan.devices[0].device.type == "cpu"
        return 0 if self.host_free is None or on_cpu else max(0, self.plan.host - self.host_free)

    @property
    def disk_missing(self) -> int:
        return 0 if self.machine else self.disk.missing

    @property
    def fits(self) -> bool:
        return self.plan.fits and not self.host_missing and not self.disk_missing

    @property
    def _sizes_from(self) -> str:
        return "preset" if self.planner.wish.drawn else "index" if isinstance(self.planner.checkpoint, Announced) else "headers"

    def to_dict(self) -> dict:
        """For --json: bytes, and layers as --layers takes them, [first, behind the last]."""
        plan, planner, instead = self.plan, self.planner, self.planner.instead
        devices = []
        for i, d in enumerate(plan.devices):
            devices.append({"device": str(d.device), "layers": [d.layers[0], d.layers[-1] + 1], "embedding": i == 0,
                            "head": i == len(plan.devices) - 1, "weights": d.weights, "caches": d.cache, "scratch": d.scratch,
                            "graphs": d.graphs, "loading": d.loading, "slots": d.slots, "needed": d.needed, "reserved": d.reserved,
                            "free": d.free, "missing": d.missing, "streamed": d.streamed_bytes,
                            "streamed_layers": [d.streamed[0], d.streamed[-1] + 1] if d.streamed else None})
        m = self.machine
        assumed = {"name": m.name, "count": m.count, "total": m.total, "context": CONTEXT} if m else None
        return {"model": str(planner.checkpoint.folder), "family": family(planner.checkpoint.config),
                "sizes_from": self._sizes_from, "assumed": assumed,
                "backend": "cuda" if planner.packs else "torch", "dtype": str(planner.wish.dtype).removeprefix("torch."),
                "layers": [plan.layers[0], plan.layers[-1] + 1], "context": plan.context, "chunk": plan.chunk,
                "dequantised": plan.keep_dequantised, "stream": plan.stream, "fits": self.fits, "devices": devices,
                "host": {"needed": plan.host, "free": self.host_free, "missing": self.host_missing},
                "disk": self.disk._asdict() | {"missing": self.disk_missing},
                "would_fit": {"context": instead.context, "devices": instead.devices,
                              "layers": instead.layers and [instead.layers.start, instead.layers.stop],
                              "stream": instead.stream, "prefill_chunk": instead.chunk}}

    def lines(self) -> list[str]:
        """For people."""
        plan, planner, config = self.plan, self.planner, self.planner.checkpoint.config
        total = sum(d.needed for d in plan.devices)
        scale, unit = scale_of(total)
        source = {"index": "by its index: the shards' headers are not all here", "headers": "by its headers",
                  "preset": "its weights are drawn"}[self._sizes_from]
        form = "packed for the kernels" if planner.packs else "dequantised to fp32" if plan.keep_dequantised else "as stored"
        run = "all" if len(plan.layers) == config.num_hidden_layers else f"{plan.layers[0]} to {plan.layers[-1]}"
        out = [f"model      {planner.checkpoint.folder} ({family(config)}), {source}; {run} of {config.num_hidden_layers} layers",
               f"run        {plan.context} tokens of context, prompts in chunks of {plan.chunk}, "
               f"{str(planner.wish.dtype).removeprefix('torch.')}, backend {'cuda' if planner.packs else 'torch'}, weights {form}",
               self._machine_line(), "",
               f"{'device':<9}{'layers':<16}" + "".join(f"{name:>10}" for name in (
                   "weights", *["slots"] * bool(plan.stream), "caches", "scratch", "graphs", "loading", "needed", "reserve", "free"))
               + f"  {unit}"]

        def row(name, layers, *sizes):
            return f"{name:<9}{layers:<16}" + "".join(" " * 10 if x is None else f"{x / scale:>10.2f}" for x in sizes)

        for i, d in enumerate(plan.devices):
            layers = f"{d.layers[0]}-{d.layers[-1]}" if len(d.layers) > 1 else f"{d.layers[0]}"
            layers = "embed, " * (i == 0) + layers + ", head" * (i == len(plan.devices) - 1)
            slots = [d.slots] * bool(plan.stream)
            out.append(row(str(d.device), layers, d.weights, *slots, d.cache, d.scratch, d.graphs, d.loading, d.needed, d.reserved, d.free)
                       + (f"  {d.missing / scale:.2f} missing" if d.missing else ""))
        if len(plan.devices) > 1:
            columns = ("weights", *["slots"] * bool(plan.stream), "cache", "scratch", "graphs", "loading", "needed", "reserved", "free")
            out.append(row("all", "", *(sum(getattr(d, name) for d in plan.devices) for name in columns)))
        return [*out, "", *self._surroundings(), "", self._verdict()]

    def _machine_line(self):
        used = len(self.plan.devices)
        if self.machine is None:
            return f"machine    this one, {used} device{'s' * (used > 1)} used"
        m = self.machine
        return (f"machine    {m.count} x {m.name}, assumed, {used} used: {m.total / GIB:.2f} GiB each as torch reports it, less "
                f"{CONTEXT / GIB:.2f} for the CUDA context")

    def _surroundings(self):
        out, plan = self._streamed(), self.plan
        if plan.devices[0].device.type != "cpu":
            free = "not known" if self.host_free is None else f"{self.host_free / GIB:.2f} GiB"
            out.append(f"host       {plan.host / GIB:.2f} GiB needed, free: {free}")
        if self.planner.wish.drawn:
            return [*out, "disk       nothing: no weight is read"]
        there = "all of it there" if self.disk.present >= self.disk.total else f"{human_bytes(self.disk.present)} of it there"
        out.append(f"disk       {human_bytes(self.disk.total)}, {there}, {human_bytes(self.disk.free)} free"
                   + (f": {human_bytes(self.disk_missing)} missing" if self.disk_missing else ""))
        return out

    def _streamed(self):
        """What does not stay on the devices."""
        out, config = [], self.planner.checkpoint.config
        where = {"host": "stay in pinned host memory", "disk": "stay in the files"}.get(self.plan.stream)
        for d in self.plan.devices:
            if d.streamed:
                token = d.streamed_bytes * config.num_experts_per_tok // config.n_routed_experts
                out.append(f"streamed   {d.device}: the routed experts of layers {d.streamed[0]}-{d.streamed[-1]}, "
                           f"{human_bytes(d.streamed_bytes)}, {where}; a token takes {human_bytes(token)}")
        if self.planner.wish.stream and not out:
            out.append("streamed   nothing: all of it fits")
        return out

    def _verdict(self):
        if self.fits:
            context, fewest, *_ = self.planner.instead
            count = len(self.planner.wish.per_device or self.planner.rooms)
            on = f" on all {count} devices" if count > 1 else ""
            others = f"; the fewest such GPUs that {'hold all of it' if self.plan.stream else 'do'}: {fewest}" if fewest else ""
            return f"fits       up to {context} tokens of context{on}{others}"
        devices = [str(d.device) for d in self.plan.devices if d.missing]
        short = devices if len(devices) <= 3 else [f"{len(devices)} of {len(self.plan.devices)} devices"]
        short += ["host"] * bool(self.host_missing) + ["disk"] * bool(self.disk_missing)
        lack = f"does not fit: {', '.join(short)}"
        return lack if self.plan.fits else f"{lack}; {self.planner.advice()}"
