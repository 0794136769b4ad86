"""The machine: which devices, how much memory they have free, how much was used; torch's settings for exact fp32."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from . import kernels, ops
from .checkpoint import Checkpoint, needs_of_layer, needs_outside_layers
from .errors import DoesNotFit, KernelError, UserError
from .kernels import build
from .kernels.launch import architecture, architecture_of
from .kernels.prompts import takes_scales
from .machines import Machine

# Below this many bytes a layer, one thread decodes as fast as two (75 and 71 tokens/s for the bundled checkpoint), and when the other core
# is busy three times as fast (69 and 25; docs/measurements.md): threads that wait for each other at every operation cost more than they
# carry.
_ONE_THREAD_BELOW = 64 << 20


def prepare_torch(layer_bytes: int) -> None:
    """fp32 products in full fp32: TF32 would change which experts and entries are chosen (docs/design.md, numerics). One thread for a
    model whose largest layer has few bytes."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if layer_bytes < _ONE_THREAD_BELOW:
        torch.set_num_threads(1)


def resolve_device(spec: str, instead: str = "--device cpu") -> torch.device:
    """A helper's --device: `cpu`, or one GPU such as `cuda:0`. Raises UserError for what is not there; `instead`: what to use then."""
    if spec == "auto" or "," in spec:
        raise UserError(f"--device: expected cpu or one GPU such as cuda:0, found {spec!r}")
    return resolve_devices(spec, flag="--device", expected="cpu or one GPU such as cuda:0", instead=instead)[0]


def resolve_devices(spec: str, machine: Machine | None = None, flag: str = "--devices",
                    expected: str = "auto, cpu or a list such as cuda:0,cuda:1",
                    instead: str = "--devices cpu or auto") -> list[torch.device]:
    """`auto` (the GPUs that torch sees, else the CPU), `cpu`, or `cuda:0,cuda:1`; of the assumed machine, if given. Raises UserError for
    what is not there, in the words of the option `flag`."""
    if machine is not None:
        count, seen = machine.count, f"--assume has {machine.count} GPUs"
    else:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        seen = f"torch {torch.__version__} sees {count} GPUs; use {instead}"
    if spec == "auto":
        return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    devices = []
    for name in spec.split(","):
        try:
            device = torch.device(name.strip())
        except RuntimeError:
            device = None
        if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
            raise UserError(f"{flag}: expected {expected}, found {spec!r}")
        if device.type == "cuda":
            index = device.index or 0
            if index >= count:
                raise UserError(f"{flag}: {name.strip()}: {seen}")
            device = torch.device("cuda", index)
        devices.append(device)
    if machine is not None and devices[0].type == "cpu":
        raise UserError("--devices: expected GPUs with --assume, found cpu: leave one of them out")
    if len(set(devices)) < len(devices) or (len(devices) > 1 and any(d.type == "cpu" for d in devices)):
        raise UserError(f"--devices: expected different GPUs, or cpu alone, found {spec!r}")
    return devices


def choose_backend(backend: str, checkpoint: Checkpoint, layers: Iterable[int], devices: list[torch.device], dtype: torch.dtype,
                   kv_quant: str, activations: str, machine: Machine | None = None) -> str | None:
    """Selects the operations' implementation: "torch", "cuda", or "auto", which is the kernels where all devices, or the assumed machine's,
    can do with them what is asked for, and else the definitions. Returns what keeps GPUs from the kernels under "auto".

    Raises UserError where "cuda" was asked for and cannot be.
    """
    why = None
    if backend != "torch":
        try:
            _refuse_run(devices, dtype, kv_quant, activations)
            kernels.refuse_sizes(checkpoint.config)
            _refuse_gpus(devices, machine)
            if backend == "auto":
                _refuse_doubts(checkpoint, layers, machine)
        except UserError as error:
            if backend == "cuda":
                raise
            why = str(error).removesuffix(_TORCH) if any(d.type == "cuda" for d in devices) else None
            backend = "torch"
    ops.select_backend("cuda" if backend == "auto" else backend)
    return why


def choose_steps(checkpoint: Checkpoint, layers: Iterable[int], devices: list[torch.device], machine: Machine | None = None) -> str | None:
    """Where the kernels run: lets a prompt's steps have more than 8 tokens (ops.allow_prompts) if all devices, or the assumed machine's,
    and all weights are such as the products for that take. Returns what keeps a prompt at 8 tokens a step.

    FP8 scales that are not powers of two by their dtype are read; of a checkpoint whose shards are not here they count as taken.
    """
    if ops.selected_backend() != "cuda":
        return None
    if machine is None:
        found = [(str(device), torch.cuda.get_device_capability(device)) for device in devices]
    else:
        found = [(machine.name, machine.capability)]
    for name, capability in found:
        if capability != (9, 0):
            return f"expected a GPU with wgmma (compute capability 9.0) for more, found {name}" + (
                f" with {capability[0]}.{capability[1]}" if capability else "")
    config = checkpoint.config
    for need in [*needs_outside_layers(config), *(need for layer in layers for need in needs_of_layer(config, layer))]:
        scales = checkpoint.fp8_scales(need.name) if need.linear else None
        if scales is not None and not takes_scales(scales):
            return f"{need.name}: expected FP8 scales of up to 4 significant bits for more, found others"
    ops.allow_prompts()
    return None


_TORCH = ": run with --backend torch"


def _refuse_run(devices, dtype, kv_quant, activations):
    for flag, fine, expected, found in (
        ("--backend cuda", all(d.type == "cuda" for d in devices), "GPUs",
         f"{devices[0]} (torch {torch.__version__} sees {torch.cuda.device_count()} GPUs)"),
        ("--dtype", dtype == torch.bfloat16, "bfloat16 with --backend cuda", str(dtype).removeprefix("torch.")),
        ("--kv-quant", kv_quant == "model", "model with --backend cuda, whose caches are FP8 and FP4", kv_quant),
        ("--activations", activations in ("auto", "bf16"), "bf16 with --backend cuda, which decodes on exact activations", activations),
    ):
        if not fine:
            raise UserError(f"{flag}: expected {expected}, found {found}{_TORCH}")


def _refuse_gpus(devices, machine):
    if machine is None:
        for device in devices:
            architecture(device)
    elif machine.capability is not None:
        architecture_of(machine.capability, machine.name)


def _refuse_doubts(checkpoint, layers, machine):
    """What asking for the kernels by name would try: an unknown GPU, no compiler, weights of which only packing tells whether it can be."""
    if machine is None:
        build.find_nvcc()
    elif machine.capability is None:
        raise UserError(f"--assume: expected a GPU by its name, found {machine.name}, which tells no architecture{_TORCH}")
    config, experts = checkpoint.config, {}
    for need in [*needs_outside_layers(config), *(need for layer in layers for need in needs_of_layer(config, layer))]:
        if not need.linear:
            continue
        kind, dtype, _ = checkpoint.stored(need)
        if kind == "plain" and dtype != "BF16":
            raise UserError(f"{need.name}: expected a weight in BF16, FP8, NVFP4 or MXFP4, found {dtype}, which bf16 may not hold{_TORCH}")
        if kind == "fp8" and (checkpoint.block[0] % 8 or checkpoint.block[1] % 128):
            raise UserError(f"{need.name}: expected FP8 blocks of a multiple of 8 rows and 128 columns, found "
                            f"{checkpoint.block[0]}x{checkpoint.block[1]}{_TORCH}")
        if "experts." in need.name:  # the routed ones of a layer alike, and the shared one's w1 and w3
            group = need.name.split(".")[1], "shared" in need.name, need.name[-2:].replace("w3", "w1")
            if experts.setdefault(group, kind) != kind:
                raise UserError(f"{need.name}: expected the experts of a layer in one format, {experts[group]}, found {kind}{_TORCH}")


def build_kernels(devices: list[torch.device]) -> None:
    """Compiles what is not in the cache yet, under a bar: before the weights are read, so that a missing compiler shows at once. Raises
    UserError as dsv4/kernels/build.py does."""
    build.build_ahead([(name, arch) for arch in sorted({architecture(d) for d in devices}) for name in build.names()])


def gpu_fault(error: RuntimeError) -> UserError:
    """What a GPU's fault means, which surfaces wherever the host next waits for it; any other error is raised again."""
    found = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, torch.OutOfMemoryError):
        return DoesNotFit(f"a GPU: expected the planned memory to suffice, found {found}: give a smaller --context or fewer --layers")
    if "CUDA error" not in found:
        raise error
    return KernelError(f"a GPU: expected its work to end, found {found}: DSV4_SYNC=1 names the kernel, --backend torch needs none")


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on a device now; for the CPU what the system calls available, within its control group's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _field("/proc/meminfo", "MemAvailable:")
    if available is None:  # not Linux: half of what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit = (_text("/sys/fs/cgroup/memory.max") or "max").strip()
    if limit == "max":
        return available * 1024
    # The group's page cache (the shards that were read) is given back on demand, so it does not count as used.
    used = int(_text("/sys/fs/cgroup/memory.current") or 0) - (_field("/sys/fs/cgroup/memory.stat", "inactive_file") or 0)
    return min(available * 1024, int(limit) - used)


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return None


def _field(path: str, name: str) -> int | None:
    """The number behind `name` in a file of lines such as `name 123`, or None without the file or the name."""
    lines = (_text(path) or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)


def resident_bytes() -> int:
    """What this process has of the host's memory now; 0 where the system does not say."""
    return 1024 * (_field("/proc/self/status", "VmRSS:") or 0)


def reserved_bytes(devices: list[torch.device]) -> dict[str, int]:
    """The most that torch took of each GPU so far: its tensors' peak and what its allocator rounds up or keeps."""
    return {str(d): torch.cuda.max_memory_reserved(d) for d in devices if d.type == "cuda"}


def peak_bytes(devices: list[torch.device]) -> dict[str, int]:
    """Peak memory so far: this process on the host, and torch's allocations on each GPU."""
    import resource
    import sys

    peak = _field("/proc/self/status", "VmHWM:")  # in KiB; ru_maxrss would start at the peak of whoever started this process
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"host": peak * 1024 if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return peaks | {str(d): torch.cuda.max_memory_allocated(d) for d in devices if d.type == "cuda"}
