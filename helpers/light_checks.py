"""The checks of first_light.py. Each is a function that gives rows, one after the other, and runs in a child process (children.py): what
it has said stays said if the GPU stops it.

A row is a dict: `shows` (machine, compiles, roof, right, layer, fast), `what`, `kernel` (a source of dsv4/kernels/cuda or gemm_KIND; None
if it is of no one), `verdict` (pass, fail, skipped; first_light.py makes a pass `slow`), `why`, and numbers. On a CPU the definitions stand
in the kernels' place, so that the plumbing can be tested: the numbers mean nothing.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import torch

from dsv4 import kernels, runtime
from dsv4.config import PRESETS
from dsv4.errors import UserError
from dsv4.kernels import build
from dsv4.kernels.cute import build as cute_build
from dsv4.kernels.cute.tiles import ARCHITECTURES, DSL, TILES
from dsv4.kernels.launch import architecture
from dsv4.kernels.layouts import interleave_gate_up, swizzle_scales
from dsv4.layers.mhc import Streams
from dsv4.machines import GIB, KNOWN
from dsv4.ops import backend
from dsv4.ops.nvfp4 import to_nvfp4_ref
from dsv4.synthetic import SyntheticCheckpoint

from . import bench_decode, bench_gemm, compare_layers, replayed, timing
from .compare_layers import OPERATION_OF, RUNS, Agreement, Overlap

SOURCE_OF = {"projections": "linear", "grouped_linear": "linear"}  # operation -> its source, where the names differ
COSINE = 0.9999  # least for the same input, and the relative error of such a turn: compare_layers' --limit, which an H200 keeps by far
ACCUMULATED = 0.999  # of a layer whose kernels get what kernels made: four layers of Pro lose 1e-3 (docs/measurements.md)
OVERLAP = 0.95  # of choices: two scores that fp32 cannot tell apart may change places at the edge (tests/test_compare_layers.py)
# Error of a product over that of rounding it to bf16. e4m3: Hopper's tensor cores drop bits of 32 products (tests/kernels/cute).
BEYOND_ROUNDING = {"bf16": 1.02, "nvfp4": 1.02, "e4m3": 1.15}
UNCERTAIN = 0.02  # of SwiGLU's codes: silu's last bit turns one at a boundary (tests/kernels/test_swiglu_to_nvfp4.py)


def row(shows: str, what: str, kernel: str | None = None, wrong: str | None = None, **numbers) -> dict:
    """A pass, or a fail with what is wrong."""
    return {"shows": shows, "what": what, "kernel": kernel, "verdict": "fail" if wrong else "pass", "why": wrong or ""} | numbers


def skipped(shows: str, what: str, why: str, kernel: str | None = None) -> dict:
    return row(shows, what, kernel) | {"verdict": "skipped", "why": why}


def source_of(operation: str) -> str:
    """The file of dsv4/kernels/cuda that an operation's kernel is in."""
    return SOURCE_OF.get(operation, operation)


def implementations(device: torch.device) -> dict[str, Callable]:
    """By operation: the kernels; on a CPU none, so that definitions run."""
    return kernels.wrappers() if device.type == "cuda" else {}


def implementation(name: str, device: torch.device) -> Callable:
    return implementations(device).get(name, backend._definitions[name])


def prepare(device: torch.device) -> None:
    """torch's settings, and its device. On a CPU, in this child process: few calls, as times mean nothing, and definitions as products."""
    runtime.prepare_torch(1 << 40)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are captured on the current one
    else:
        timing.CALLS, timing.WARM, timing.TIMED = 1, 0, 2
        bench_gemm.COLD = bench_gemm.GRAPH_US = bench_gemm.MIN_CALLS = bench_gemm.TIMED = 1
        bench_gemm.Product.ours = lambda self, i, tile=None: lambda: self.exact().bfloat16()
        bench_gemm.Product.raw = lambda self, i: self.definition()


# --------------------------------------------------------------------------------------------------------- the machine


def nvidia_smi(query: str, device: torch.device) -> dict[str, str]:
    """Field -> what nvidia-smi says of this GPU; {} where it says nothing."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # CUDA_VISIBLE_DEVICES may number them otherwise
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(query.split(","), values, strict=False)) if done.returncode == 0 else {}


def driver_cuda() -> tuple[int, int]:
    """The newest CUDA that the driver runs."""
    version = ctypes.c_int()
    if error := ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
        raise UserError(f"cuDriverGetVersion: expected a version, found CUDA error {error}: reinstall the driver")
    return version.value // 1000, version.value % 1000 // 10


def machine(device: torch.device) -> Iterator[dict]:
    """Driver, torch, toolkits, memory."""
    properties = torch.cuda.get_device_properties(device)
    found = nvidia_smi("driver_version,power.limit,clocks.max.sm,ecc.errors.uncorrected.volatile.total,pcie.link.gen.max", device)
    cuda = driver_cuda()
    built = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    yield row("machine", "driver", wrong=f"torch is built for CUDA {torch.version.cuda}, the driver runs {cuda[0]}.{cuda[1]}: "
              "install a newer driver" if built[0] > cuda[0] else None, driver=found.get("driver_version", "unknown"),
              runs_cuda=f"{cuda[0]}.{cuda[1]}", torch=torch.__version__)
    yield row("machine", "GPU", name=properties.name, capability=f"{properties.major}.{properties.minor}", arch=architecture(device),
              multiprocessors=properties.multi_processor_count, gpus=torch.cuda.device_count(),
              **{key: value for key, value in found.items() if key != "driver_version"})
    errors = found.get("ecc.errors.uncorrected.volatile.total", "0")
    if errors.isdecimal() and int(errors):
        yield row("machine", "ECC", wrong=f"{errors} uncorrected memory errors since the driver was loaded: reset or replace the GPU")
    nvcc = build.find_nvcc()
    release = nvcc.version.split("release ")[-1].split(",")[0]
    yield row("machine", "toolkit", wrong=f"nvcc {release} is newer than the driver's CUDA {cuda[0]}.{cuda[1]}: install a newer driver"
              if int(release.split(".")[0]) > cuda[0] else None, nvcc=release)
    try:
        dsl = importlib.metadata.version("nvidia-cutlass-dsl")
        yield row("machine", "CuTeDSL", wrong=None if dsl == DSL else f"expected nvidia-cutlass-dsl {DSL}, found {dsl}", found=dsl)
    except importlib.metadata.PackageNotFoundError:
        yield skipped("machine", "CuTeDSL", "not installed: the GEMMs' objects must be in the cache folder")
    yield from memory(device)


def memory(device: torch.device) -> Iterator[dict]:
    """How much there is, how much is free, and whether what is written to it is read again."""
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    known = [gib for card, (gib, _) in KNOWN.items() if card in name]
    wrong = None
    if known and total / GIB < 0.99 * known[0]:
        wrong = f"expected about {known[0]} GiB (dsv4/machines.py), found {total / GIB:.2f}"
    elif free < 0.9 * total:
        wrong = f"{(total - free) / GIB:.1f} GiB are in use: end what else runs on this GPU, or the times below are not the kernels'"
    yield row("machine", "memory", wrong=wrong, total_gib=total / GIB, free_gib=free / GIB)
    chunks, wrong = [], None
    while torch.cuda.mem_get_info(device)[0] > 3 * GIB:
        chunks.append(torch.full((GIB // 8,), (len(chunks) + 1) * 0x0123456789ABCD, dtype=torch.int64, device=device))
    for n, chunk in enumerate(chunks):  # all are written before the first is read
        low, high = (int(end) for end in torch.aminmax(chunk))
        if not low == high == (n + 1) * 0x0123456789ABCD:
            wrong = f"chunk {n} of 1 GiB reads back as {low:#x} to {high:#x}: the memory is broken"
    yield row("machine", "memory, written and read", wrong=wrong, gib=len(chunks))


def links(device: torch.device) -> Iterator[dict]:
    """Host to GPU, and between GPUs: GB/s of 256 MiB, us of 64 KiB there and back / 2."""
    size = 256 << 20
    host, there = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device=device)
    yield row("machine", "host to GPU", gb_s=size / _seconds(device, lambda: there.copy_(host)) / 1e9)
    yield row("machine", "GPU to host", gb_s=size / _seconds(device, lambda: host.copy_(there)) / 1e9)
    count = torch.cuda.device_count()
    if count == 1:
        yield skipped("machine", "GPU to GPU", "one GPU")
        return
    large, small = ([torch.full((n,), i, dtype=torch.uint8, device=f"cuda:{i}") for i in range(count)] for n in (size, 1 << 16))
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            seconds = _seconds(torch.device("cuda", a), lambda a=a, b=b: large[b].copy_(large[a]))
            hop = _seconds(torch.device("cuda", a), lambda a=a, b=b: small[b].copy_(small[a]))
            wrong = None if int(large[b][-1]) == a and int(large[b][0]) == a else "the copy's bytes are others"
            large[b].fill_(b)
            if wrong is None and not torch.cuda.can_device_access_peer(a, b):
                wrong = "no peer access: copies go through the host"
            yield row("machine", f"GPU {a} to GPU {b}", wrong=wrong, gb_s=size / seconds / 1e9, hop_us=1e6 * hop)


def _seconds(device: torch.device, call: Callable, times: int = 5) -> float:
    """The fastest of some calls, each waited for."""
    best = math.inf
    for _ in range(times + 1):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


# ------------------------------------------------------------------------------------------------------------ building


def build_cuda(arch: str) -> Iterator[dict]:
    """Every source of dsv4/kernels/cuda, several at once."""
    def one(name: str) -> dict:
        start = time.monotonic()
        try:
            used = build.usage(build.build(name, arch))
        except (UserError, ValueError) as error:
            print(error)
            return row("compiles", arch, name, wrong=str(error).splitlines()[0])
        spilled = max((use.spill_stores + use.spill_loads + use.stack for use in used), default=0)
        registers = max((use.registers for use in used), default=0)
        return row("compiles", arch, name, seconds=time.monotonic() - start, registers=registers, spilled=spilled)

    with ThreadPoolExecutor() as pool:
        yield from pool.map(one, build.names())


def build_cute(arch: str) -> Iterator[dict]:
    """Every CuTeDSL tile of the architecture, or the objects that the cache has of them."""
    tiles = [tile for tile in TILES if arch in ARCHITECTURES[tile.kind]]
    why = "no object after the build"
    try:
        cute_build.build_ahead(tiles, arch)
    except UserError as error:
        print(error)
        why = str(error).splitlines()[0]
    for kind in dict.fromkeys(tile.kind for tile in tiles):
        mine = [tile for tile in tiles if tile.kind == kind]
        missing = [tile.name for tile in mine if not (build.cache_folder() / cute_build.target(tile, arch)).exists()]
        spilled = max((cute_build.report(tile, arch).stack for tile in mine if tile.name not in missing), default=0)
        wrong = f"{len(missing)} of {len(mine)} tiles are not there, {missing[0]} the first: {why}" if missing else None
        yield row("compiles", arch, f"gemm_{kind}", wrong=wrong, tiles=len(mine) - len(missing), spilled=spilled)


# --------------------------------------------------------------------------------------------------------------- roofs


def roofs(device: torch.device) -> Iterator[dict]:
    """What this GPU reads in a second, and what its tensor cores do, by torch: what the kernels are measured against."""
    prepare(device)
    yield _read(device, 4 << 30 if device.type == "cuda" else 1 << 16)
    n = 8192 if device.type == "cuda" else 64
    for kind in bench_gemm.KINDS:
        if device.type == "cuda" and kind == "nvfp4" and architecture(device) not in ARCHITECTURES[kind]:
            yield skipped("roof", kind, "needs sm_100")
            continue
        try:
            product = bench_gemm.Product(kind, n, n, n, 1, device, cold=1)
            (time_,) = timing.measured(device, [_e4m3(product.x, product.weights[0]) if kind == "e4m3" else product.torchs(0)])
        except (RuntimeError, ValueError, ImportError, AttributeError) as refusal:
            print(refusal)
            yield skipped("roof", kind, f"torch refuses: {str(refusal).splitlines()[0]}")
            continue
        yield row("roof", kind, tflops=2e-6 * n**3 / time_["us"], by=f"torch's product of {n} x {n} x {n}")


def _read(device: torch.device, size: int) -> dict:
    """The faster of two ways of torch's to read so many bytes."""
    x = torch.ones(size // 4, device=device)
    weight = x.view(torch.bfloat16).view(-1, 1 << (14 if device.type == "cuda" else 6))
    vector = torch.ones(weight.shape[1], dtype=torch.bfloat16, device=device)
    ways: dict[str, timing.Call] = {"sum": x.sum, "matrix times vector": lambda: weight @ vector}
    times = [time_["us"] for time_ in timing.measured(device, *([way] for way in ways.values()))]
    us = min(times)
    return row("roof", "read", tb_s=1e-6 * size / us, by=f"torch's {list(ways)[times.index(us)]} of {size >> 20} MiB")


def _e4m3(x: torch.Tensor, w: torch.Tensor) -> timing.Call:
    """torch's product with one scale a tensor, which every GPU with FP8 has; those a block are Hopper's alone."""
    from torch.nn.functional import ScalingType, scaled_mm

    one = torch.ones(1, device=x.device)
    return lambda: scaled_mm(x, w.T, one, ScalingType.TensorWise, one, ScalingType.TensorWise, output_dtype=torch.bfloat16)


# ----------------------------------------------------------------------------------- kernels against their definitions


def layer(device: torch.device, preset: str, number: int | None, format: str = "nvidia", past: int = 8192, prompt: int = 136,
          decode: int = 8) -> Iterator[dict]:
    """One synthetic layer (None: the head) behind `past` random keys, from random streams: every stage against the definition, by
    operation, and the streams that leave it."""
    prepare(device)
    config = PRESETS[preset]
    draw = torch.Generator().manual_seed(number or 0)
    ids = torch.randint(config.vocab_size, (prompt + decode,), generator=draw).tolist()
    checkpoint = SyntheticCheckpoint(config, format, device)
    both = compare_layers.Layers(checkpoint, ids, decode, past, device, implementations(device), seed=0)
    for i, step in enumerate(both.steps):  # four different streams: embeddings would hide which is which
        X = torch.randn(len(step.ids), config.hc_mult, config.hidden_size, generator=draw).bfloat16().to(device)
        both.wanted[i] = both.found[i] = Streams(X)
    rows = both.head() if number is None else both.layer(number)
    print("\n".join(compare_layers.table_lines(rows)))  # the last lines of a child that dies behind it
    name, bad = f"{preset} {rows[0].layer}" + ("" if format == "nvidia" else f", {format}"), compare_layers.beyond(rows, COSINE)
    for operation in dict.fromkeys(OPERATION_OF[r.stage] for r in rows):
        mine = [r for r in rows if OPERATION_OF[r.stage] == operation]
        agreements = [(r.runs[RUNS[0]], f"{r.stage}, {r.phase}") for r in mine]
        values = [(a, at) for a, at in agreements if isinstance(a, Agreement)]
        choices = [(a.overlap, at) for a, at in agreements if isinstance(a, Overlap)]
        worst, at = max(values, key=lambda pair: math.inf if math.isnan(pair[0].relative) else pair[0].relative, default=(None, ""))
        wrong = [f"{r.stage}, {r.phase}: cosine {r.runs[RUNS[0]].cosine:.6f}, relative {r.runs[RUNS[0]].relative:.1e}"
                 for r in mine if r in bad]
        wrong += [f"{at}: {overlap:.4f} of the definition's choices" for overlap, at in choices if overlap < OVERLAP]
        numbers = {"relative": worst.relative, "one_minus_cosine": 1 - min(1.0, worst.cosine), "at": at} if worst else {}
        if choices:
            numbers["overlap"] = min(overlap for overlap, _ in choices)
        yield row("right", f"{name}: {operation}", source_of(operation), wrong="; ".join(wrong) or None, **numbers)
    if number is not None:
        ends = [r for r in rows if r.stage == "streams"]
        same, own = (min(r.runs[run].cosine for r in ends) for run in RUNS)
        overlaps: dict[str, float] = {}  # of entries, of experts
        for r in rows:
            if isinstance(own_choices := r.runs[RUNS[1]], Overlap):
                overlaps[r.stage] = min(overlaps.get(r.stage, 1.0), own_choices.overlap)
        # What was chosen otherwise, by inputs that differ in their last bits, is at most its own part of the output.
        least, fewest = ACCUMULATED - sum(1 - overlap for overlap in overlaps.values()), min(overlaps.values(), default=1.0)
        fine = same >= COSINE and own >= least and fewest >= OVERLAP
        found = f"cosine {same:.6f} and, with kernels' inputs, {own:.6f}"
        found += f" with {fewest:.4f} of the choices" if overlaps else ""
        yield row("layer", name, wrong=None if fine else found, cosine=same, cosine_accumulated=own,
                  **({"overlap_accumulated": fewest} if overlaps else {}))


def quantisers(device: torch.device, preset: str, tokens: Iterable[int]) -> Iterator[dict]:
    """to_nvfp4, rms_norm_to_nvfp4 and swiglu_to_nvfp4 at this model's widths: bytes, then time at the most tokens."""
    prepare(device)
    config, draw, eps = PRESETS[preset], torch.Generator(device).manual_seed(1), 1e-6
    K, inner, limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
    norm_weight = torch.randn(K, generator=draw, device=device)
    to, norm, swiglu = (implementation(name, device) for name in ("to_nvfp4", "rms_norm_to_nvfp4", "swiglu_to_nvfp4"))

    def drawn(m: int, columns: int) -> torch.Tensor:
        sizes = torch.exp2(torch.randint(-8, 9, (m, 1), generator=draw, device=device).float())
        return (torch.randn(m, columns, generator=draw, device=device) * sizes).bfloat16()

    def halves(m: int) -> torch.Tensor:
        gate, up = (4 * torch.randn(inner, m, generator=draw, device=device) for _ in range(2))
        return interleave_gate_up(gate, up).T.bfloat16().contiguous()

    for m in tokens:
        for swizzled in (False, True):
            order = f"{m} tokens, scales {'swizzled' if swizzled else 'plain'}"
            x = drawn(m, K)
            yield row("right", f"{preset} to_nvfp4: {order}", "to_nvfp4", _other_bytes(to(x, swizzled), to_nvfp4_ref(x, swizzled)))
            y, packed = norm(x, norm_weight, eps, swizzled)
            want, _ = backend._definitions["rms_norm_to_nvfp4"](x, norm_weight, eps, swizzled)
            off = float((y.float() - want.float()).norm() / want.float().norm())
            wrong = _other_bytes(packed, to_nvfp4_ref(y, swizzled)) or (None if off < 2**-9 else f"the norm is {off:.1e} off")
            yield row("right", f"{preset} rms_norm_to_nvfp4: {order}", "rms_norm_to_nvfp4", wrong, relative=off)
            h, weights = halves(m), torch.rand(m, generator=draw, device=device)
            got, want = (f(h, weights, limit, swizzled) for f in (swiglu, backend._definitions["swiglu_to_nvfp4"]))
            differ = max(float((a != b).float().mean()) for a, b in zip(got[:2], want[:2], strict=True))
            wrong = None if differ < UNCERTAIN and torch.equal(got.row_scales, want.row_scales) else \
                f"{differ:.2%} of codes or scales are others" if differ >= UNCERTAIN else "row scales are others"
            yield row("right", f"{preset} swiglu_to_nvfp4: {order}", "swiglu_to_nvfp4", wrong, other_bytes=differ)
    m = max(tokens)
    forms = {"to_nvfp4": (drawn, K, lambda x: to(x, True), 2),
             "rms_norm_to_nvfp4": (drawn, K, lambda x: norm(x, norm_weight, eps, True), 4),
             "swiglu_to_nvfp4": (lambda m, _: halves(m), inner, lambda h: swiglu(h, None, limit, True), 4)}
    for name, (make, columns, call, plain) in forms.items():
        size = m * columns * (plain + 9 / 16)  # read, and what is written
        inputs = [make(m, columns) for _ in range(math.ceil(replayed.COLD / size) if device.type == "cuda" else 1)]
        (time_,) = timing.measured(device, [lambda x=x, call=call: call(x) for x in inputs])
        yield row("fast", f"{preset} {name}: {m} tokens", name, bytes=round(size), launches=1, **time_)


def _other_bytes(got, want) -> str | None:
    """Where two Nvfp4 differ, None if nowhere."""
    for name, a, b in zip(("values", "scales", "row scales"), got[:3], want[:3], strict=True):
        if a.shape != b.shape:
            return f"{name}: expected shape {list(b.shape)}, found {list(a.shape)}"
        a, b = (t.contiguous().view(torch.uint8) for t in (a, b))
        if not torch.equal(a, b):
            return f"{name}: {int((a != b).sum())} of {b.numel()} bytes are others"
    return None


def sample(device: torch.device, preset: str, draws: int = 20) -> Iterator[dict]:
    """Tokens drawn from logits of the model's vocabulary: those of the definition on a CPU, every one."""
    prepare(device)
    ours, definition = implementation("sample", device), backend._definitions["sample"]
    draw, size = torch.Generator(device).manual_seed(1), PRESETS[preset].vocab_size
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    for called, other in (("greedy", {}), ("drawn", {"temperature": 1.0}),
                          ("top-k, top-p, penalty", {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1})):
        wrong = None
        for _ in range(draws):
            logits, seen = 4 * torch.randn(size, generator=draw, device=device), torch.zeros(size, dtype=torch.uint8, device=device)
            seen[torch.randint(size, (size // 3,), generator=draw, device=device)] = 1
            uniforms, positions = torch.rand(1, generator=draw, device=device), torch.zeros(1, dtype=torch.int64, device=device)
            given = [t.to("cpu", copy=True) for t in (logits, seen, uniforms, positions)]
            want, got = definition(*given, **greedy | other), ours(logits, seen, uniforms, positions, **greedy | other)
            if int(got) != int(want):
                wrong = f"token {int(got)}, the definition's {int(want)}"
            elif not torch.equal(seen.cpu(), given[1]):
                wrong = "other tokens are marked as seen"
        yield row("right", f"{preset} sample: {called}", "sample", wrong)


TESTS = Path(__file__).resolve().parent.parent / "tests" / "kernels"


def test_files() -> dict[str, list[str]]:
    """Test file, from tests/kernels -> the kernels that it is of: test_NAME.py of those whose names begin with NAME, as far as it goes."""
    found: dict[str, list[str]] = {}
    stems = {path.stem.removeprefix("test_"): path.name for path in TESTS.glob("test_*.py")}
    for kernel in build.names():
        if names := [stem for stem in stems if kernel == stem or kernel.startswith(f"{stem}_")]:
            found.setdefault(stems[max(names, key=len)], []).append(kernel)
    formats = (f"packed_gemm_{form}" for form in ("bf16", "fp8", "mxfp4", "nvfp4"))
    others = {"test_prompts.py": [*formats, "arrange_tokens"],
              "test_grouped.py": ["group_choices", "group_nvfp4", "sum_choices"],
              "cute/test_gemm.py": ["gemm_bf16", "gemm_e4m3"], "cute/test_gemm_nvfp4.py": ["gemm_nvfp4"],
              "cute/test_grouped_gemm.py": ["gemm_bf16_grouped", "gemm_e4m3_grouped"],
              "cute/test_grouped_nvfp4.py": ["gemm_nvfp4_grouped", "gemm_nvfp4_swiglu"]}
    return found | {name: of for name, of in others.items() if (TESTS / name).exists()}


def tests(file: str, of: Iterable[str]) -> Iterator[dict]:
    """A test file of tests/kernels on this machine's GPU, in a process of its own."""
    if importlib.util.find_spec("pytest") is None:
        yield from (skipped("right", file, "needs pytest", kernel) for kernel in of)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={path}", str(TESTS / file)]
        done = subprocess.run(command, cwd=TESTS.parent.parent, env=os.environ | {"DSV4_TEST_GPU": "1"}, capture_output=True, text=True)
        print(done.stdout + done.stderr)
        cases = list(ElementTree.parse(path).iter("testcase")) if path.exists() else []
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    passed = sum(not len([part for part in case if part.tag in ("failure", "error", "skipped")]) for case in cases)
    wrong = None
    if bad:
        part = next(part for part in bad[0] if part.tag in ("failure", "error"))
        said = (part.get("message") or "").strip().splitlines() or ["no message"]
        wrong = f"{bad[0].get('name')}: {said[0]}" + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
    elif done.returncode not in (0, 5):  # 5: nothing was collected
        wrong = f"pytest ended with {done.returncode}"
    for kernel in of:
        if wrong is None and not passed:
            yield skipped("right", f"{file}: {len(cases)} tests", "its tests skip this machine", kernel)
        else:
            yield row("right", f"{file}: {passed} of {len(cases)} tests pass, {len(cases) - passed - len(bad)} are skipped", kernel, wrong)


# ------------------------------------------------------------------------------------------------------------ products


def _product_wrong(kind: str, numbers: dict, key: str = "error") -> str | None:
    most = BEYOND_ROUNDING[kind] * numbers["rounding"]
    return None if numbers[key] <= most else f"error {numbers[key]:.2e}, of which rounding to bf16 is {numbers['rounding']:.2e}"


def tiles(device: torch.device, kind: str) -> Iterator[dict]:
    """Every CuTeDSL tile of a kind on a product of Pro's depth that is ragged in tokens and columns."""
    prepare(device)
    m, k, n = (333, 7168, 1544) if device.type == "cuda" else (5, 96, 40)
    product = bench_gemm.Product(kind, m, k, n, 1, device, cold=1)
    exact = product.exact()
    for tile in (tile for tile in TILES if tile.kind == kind):
        numbers = {"error": bench_gemm.error(product.ours(0, tile), exact), "rounding": bench_gemm.error(exact.bfloat16, exact)}
        yield row("right", f"{tile.name}: {m} x {k} x {n}", f"gemm_{kind}", _product_wrong(kind, numbers), **numbers)


def products(device: torch.device, preset: str, kind: str, tokens: Iterable[int], names: Iterable[str] | None = None) -> Iterator[dict]:
    """The model's products (`names` of them), by all voices: CuTeDSL, raw CUDA where it has one, torch's cuBLAS, the definition."""
    prepare(device)
    for name, k, n, groups in bench_gemm.shapes(PRESETS[preset]):
        if (names is not None and name not in names) or (groups > 1 and kind != "bf16"):
            continue
        for m in tokens:
            numbers = bench_gemm.measure(bench_gemm.Product(kind, m, k, n, groups, device), device, False)
            wrong = _product_wrong(kind, numbers)
            if wrong is None and "torch_error" in numbers and _product_wrong(kind, numbers, "torch_error"):
                numbers["note"] = f"torch's own error is {numbers['torch_error']:.2e}"
            bits = bench_gemm.BITS[kind] + (0.5 if kind == "nvfp4" else 0)  # a scale for 16 values
            size = round(groups * (k * (n + m) * bits / 8 + 2 * m * n))
            flops = 2 * groups * m * k * n
            yield row("right", f"{preset} {name}, {m} tokens", f"gemm_{kind}", wrong, **numbers, bytes=size, flops=flops)
            if "raw_error" in numbers:
                yield row("right", f"{preset} {name}, {m} tokens", "nvfp4_linear", _product_wrong(kind, numbers, "raw_error"),
                          error=numbers["raw_error"], rounding=numbers["rounding"], us=numbers["raw_us"], launches=1, bytes=size)


def grouped(device: torch.device, preset: str, tokens: int = 300, experts: int = 8) -> Iterator[dict]:
    """Routed experts' w1 and w3 by torch's scaled_grouped_mm, against ours expert by expert: an independent reading of ragged NVFP4."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_grouped_mm

    prepare(device)
    config, draw = PRESETS[preset], torch.Generator(device).manual_seed(1)
    k, n = config.hidden_size, 2 * config.moe_intermediate_size
    ends = torch.sort(torch.randint(1, tokens, (experts - 1,), generator=draw, device=device)).values.tolist() + [tokens]
    parts = [bench_gemm.Product("nvfp4", max(1, end - start), k, n, 1, device, cold=1)
             for start, end in zip([0, *ends], ends, strict=False)]
    ends = torch.tensor([len(part.x.values) for part in parts], device=device).cumsum(0).to(torch.int32)
    a, b = torch.cat([part.x.values for part in parts]), torch.stack([part.weights[0].values for part in parts])
    a_scales = torch.cat([swizzle_scales(part.x.plain_scales()).view(-1, k // 16) for part in parts])
    b_scales = torch.stack([part.weights[0].scales for part in parts])
    ones, of_all = torch.ones(experts, device=device), torch.tensor([part.weights[0].scale for part in parts], device=device)
    recipe, fp8, fp4 = [ScalingType.BlockWise1x16, ScalingType.TensorWise], torch.float8_e4m3fn, torch.float4_e2m1fn_x2
    what = f"{preset} routed w1 w3, {experts} experts, {len(a)} tokens (CuTeDSL: one by one)"

    def theirs() -> torch.Tensor:
        return scaled_grouped_mm(a.view(fp4), b.view(fp4).transpose(-2, -1), [a_scales.view(fp8), ones], recipe,
                                 [b_scales.view(fp8), of_all], recipe, SwizzleType.SWIZZLE_32_4_4, SwizzleType.SWIZZLE_32_4_4,
                                 offs=ends, output_dtype=torch.bfloat16)

    def ours() -> list[torch.Tensor]:
        return [part.ours(0)() for part in parts]

    numbers, wrong = {"kind": "nvfp4", "error": 0.0, "rounding": 0.0, "torch_error": 0.0}, None
    try:
        got = theirs().split([len(part.x.values) for part in parts])
        timed = timing.measured(device, [ours], [theirs])
        numbers |= {"us": timed[0]["us"], "torch_us": timed[1]["us"], "launches": experts}
    except (RuntimeError, ValueError, AttributeError) as refusal:
        print(refusal)
        got, numbers["torch_refuses"] = [None] * experts, str(refusal).splitlines()[0]
        del numbers["torch_error"]
    for i, (part, rows) in enumerate(zip(parts, got, strict=True)):
        exact = part.exact()
        found = {"error": bench_gemm.error(part.ours(0), exact), "rounding": bench_gemm.error(exact.bfloat16, exact)}
        if rows is not None:
            found["torch_error"] = bench_gemm.error(part.as_ours(lambda rows=rows: rows), exact)
        if wrong is None and (more := _product_wrong("nvfp4", found)):
            wrong = f"expert {i}: {more}"
        numbers |= {key: max(numbers[key], value) for key, value in found.items()}
    yield row("right", what, "gemm_nvfp4", wrong, **numbers)


# --------------------------------------------------------------------------------------------------------------- speed


OPERATION_OF_ROW = {label: name for name, labels in bench_decode.ROWS.items() for label in labels} | {
    label: name for name, label in bench_decode.END_ROWS.items()}


def kernel_of_row(name: str) -> str | None:
    """The source that a row of bench_decode is of; None for a layer."""
    if name.startswith("alone: "):
        return "moe" if " experts" in name else "linear"
    return source_of(OPERATION_OF_ROW[name.split(": ", 1)[1].split(",")[0]]) if ": " in name else None


def decode(device: torch.device, preset: str, kind: str | None, contexts: Iterable[int]) -> Iterator[dict]:
    """What a decoded token takes: layers of a kind and their operations (kind None: what belongs to no layer), as bench_decode has them."""
    prepare(device)
    gpu, config = device.type == "cuda", PRESETS[preset]
    first, *others = contexts
    kinds = [kind or config.kind(0)]
    with torch.inference_mode():
        bench = bench_decode.Bench(config, "nvidia", device, first, 1, "cuda" if gpu else "torch", kinds)
        if kind is None:
            yield from map(_decode_row(preset, first), [*bench.ends(gpu), *bench.alone(gpu)])
            return
        yield from map(_decode_row(preset, first), [*bench.layers(kind), *bench.operations(kind, gpu)])
        for context in others:
            before = bench.read(kind)
            bench.at(context)
            more = [name for name, size in bench.read(kind).items() if size != before[name]]
            yield from map(_decode_row(preset, context), [*bench.layers(kind), *bench.operations(kind, gpu, more)])


def _decode_row(preset: str, context: int) -> Callable[[dict], dict]:
    def make(found: dict) -> dict:
        name = found["row"]
        numbers = {"launches" if key == "kernels" else key: value for key, value in found.items() if value is not None}
        return row("fast", f"{preset} {name}, {context} tokens", kernel_of_row(name), **numbers, preset=preset, context=context)
    return make


