"""Devices by name, and memory: what is free and what was used."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from dsv4 import ops, runtime
from dsv4.checkpoint import Checkpoint
from dsv4.config import PRESETS
from dsv4.errors import UserError
from dsv4.machines import assumed
from dsv4.synthetic import SyntheticCheckpoint
from helpers.make_checkpoint import write_true_size
from tests.checkpoints import MINI


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch say that it sees this many GPUs."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize("count,spec,names", [
    (0, "auto", ["cpu"]), (0, "cpu", ["cpu"]), (2, "auto", ["cuda:0", "cuda:1"]), (2, "cpu", ["cpu"]), (2, "cuda:1", ["cuda:1"]),
    (4, "cuda:2,cuda:0", ["cuda:2", "cuda:0"]), (2, " cuda:0 , cuda:1 ", ["cuda:0", "cuda:1"]), (1, "cuda", ["cuda:0"]),
])
def test_resolve_devices(gpus, count, spec, names):
    gpus(count)
    assert runtime.resolve_devices(spec) == [torch.device(name) for name in names]


@pytest.mark.parametrize("count,spec", [
    (0, "cuda:0"), (2, "cuda:2"), (2, "cuda:0,cuda:0"), (2, "cuda,cuda:0"), (2, "cpu,cuda:0"), (0, "cpu,cpu"), (0, ""), (0, "gpu"),
    (0, "meta"), (0, "mps"), (2, "cuda:0,"), (2, "cuda:-1"), (2, "cuda:99999999999"), (2, "cuda:0;cuda:1"), (2, "0,1"),
])
def test_devices_that_are_not_there(gpus, count, spec):
    gpus(count)
    with pytest.raises(UserError) as caught:
        runtime.resolve_devices(spec)
    assert "--devices" in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("count,spec,message", [
    (0, "cuda:0", r"--device: cuda:0: torch .* sees 0 GPUs; use --device cpu"),
    (2, "cuda:2", r"--device: cuda:2: torch .* sees 2 GPUs; use --device cpu"),
    *((2, spec, f"--device: expected cpu or one GPU such as cuda:0, found '{spec}'") for spec in ("auto", "cuda:0,cuda:1", "gpu", "")),
])
def test_a_helpers_device_is_one_and_there(gpus, count, spec, message):
    gpus(count)
    assert runtime.resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError) as caught:
        runtime.resolve_device(spec)
    assert re.fullmatch(message, str(caught.value))


def files(monkeypatch, contents):
    """Runs free_bytes over files of our own."""

    class Fake:
        def __init__(self, path):
            self.path = str(path)

        def read_text(self):
            if self.path not in contents:
                raise FileNotFoundError(self.path)
            return contents[self.path]

    monkeypatch.setattr(runtime, "Path", Fake)
    return runtime.free_bytes(torch.device("cpu"))


MEMINFO = "MemTotal:       8000000 kB\nMemFree:         100000 kB\nMemAvailable:    4000000 kB\n"
GROUP = "/sys/fs/cgroup/memory."


def test_free_bytes_is_what_the_system_calls_available(monkeypatch):
    assert files(monkeypatch, {"/proc/meminfo": MEMINFO}) == 4000000 * 1024
    assert files(monkeypatch, {"/proc/meminfo": MEMINFO, GROUP + "max": "max\n", GROUP + "current": "123\n"}) == 4000000 * 1024


def test_free_bytes_stays_within_the_control_group(monkeypatch):
    limits = {"/proc/meminfo": MEMINFO, GROUP + "max": "2000000000\n", GROUP + "current": "500000000\n"}
    assert files(monkeypatch, limits) == 1500000000
    assert files(monkeypatch, limits | {GROUP + "max": "9000000000000\n"}) == 4000000 * 1024
    cached = {GROUP + "stat": "anon 1\ninactive_file 300000000\nactive_file 7\n"}  # shards that were read: given back on demand
    assert files(monkeypatch, limits | cached) == 1800000000


def test_free_bytes_here_is_a_sensible_number():
    total = runtime.os.sysconf("SC_PHYS_PAGES") * runtime.os.sysconf("SC_PAGE_SIZE")
    assert 0 < runtime.free_bytes(torch.device("cpu")) <= total


def test_peak_bytes_sees_what_was_touched():
    """128 MiB more must show, in bytes and not in KiB; in a process of its own, where no memory lies free that was touched before."""
    done = subprocess.run([sys.executable, "-c", "import torch; from dsv4 import runtime; cpu = [torch.device('cpu')]; "
                           "before = runtime.peak_bytes(cpu); held = torch.ones(32 << 20); after = runtime.peak_bytes(cpu); "
                           "assert set(before) == {'host'}; print(after['host'] - before['host'])"],
                          capture_output=True, text=True, check=True)
    assert (112 << 20) < int(done.stdout) < (1 << 30)


@pytest.mark.parametrize("layer_bytes,threads", [(1 << 20, 1), (1 << 30, 2)])
def test_prepare_torch(layer_bytes, threads):
    """Products in fp32 stay in fp32; one thread for a model of small layers, what there is for a large one."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(2)
    try:
        runtime.prepare_torch(layer_bytes)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32


@pytest.fixture
def hopper(monkeypatch):
    """One GPU, as torch would report it, on a machine with a compiler."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(runtime.build, "find_nvcc", lambda: None)
    yield [torch.device("cuda", 0)]
    ops.select_backend("torch")


BF16, CPU = torch.bfloat16, torch.device("cpu")


def choose(backend, devices, dtype=BF16, kv_quant="model", activations="auto", machine=None, config=PRESETS["tiny"], format="nvidia",
           layers=None):
    """(the backend that is selected, what kept GPUs from the kernels)"""
    ops.select_backend("torch")
    checkpoint = SyntheticCheckpoint(config, format, "meta")
    layers = range(config.num_hidden_layers) if layers is None else layers
    why = runtime.choose_backend(backend, checkpoint, layers, devices, dtype, kv_quant, activations, machine)
    return ops.selected_backend(), why


IMPOSSIBLE = [  # for the kernels
    ({"devices": [CPU]}, "--backend cuda: expected GPUs, found cpu"),
    ({"dtype": torch.float32}, "--dtype: expected bfloat16 with --backend cuda, found float32"),
    ({"kv_quant": "off"}, "--kv-quant: expected model with --backend cuda, whose caches are FP8 and FP4, found off"),
    ({"activations": "fp8"}, "--activations: expected bf16 with --backend cuda, which decodes on exact activations, found fp8"),
    ({"config": replace(PRESETS["tiny"], index_n_heads=32)}, "expected index_n_heads to be 64, which the kernels are written for, fou"),
    ({"machine": assumed("2xRTX PRO 6000")}, "compute capability 9.0, 10.0 or 10.3, found RTX PRO 6000 with 12.0"),
]


@pytest.mark.parametrize("arguments,message", IMPOSSIBLE)
def test_the_kernels_refuse_what_they_cannot_do_before_anything_is_loaded(hopper, arguments, message):
    """Asked for by name in one line; and not taken where the choice is free, which says why, but where nobody thinks of a GPU."""
    arguments = {"devices": hopper} | arguments
    with pytest.raises(UserError) as caught:
        choose("cuda", **arguments)
    text = str(caught.value)
    assert message in text and text.endswith(": run with --backend torch") and "\n" not in text and ops.selected_backend() == "torch"
    backend, why = choose("auto", **arguments)
    assert backend == "torch" and (why is None if arguments["devices"] == [CPU] else why == text.removesuffix(": run with --backend torch"))


def steps(devices, machine=None, checkpoint=None):
    """(the most tokens of a step on the kernels, what keeps a prompt at 8)"""
    checkpoint = checkpoint or SyntheticCheckpoint(PRESETS["tiny"], "nvidia", "meta")
    ops.select_backend("cuda")
    why = runtime.choose_steps(checkpoint, range(6), devices, machine)
    return ops.max_tokens(), why


def test_how_many_tokens_a_prompts_steps_have(hopper, monkeypatch):
    """Decided by every GPU, or the assumed machine's, and the values of FP8 scales whose dtype does not say what they are."""
    assert steps(hopper) == steps(hopper, assumed("8xH100")) == (1024, None)
    assert steps(hopper, assumed("8xB200")) == (8, "expected a GPU with wgmma (compute capability 9.0) for more, found B200 with 10.0")
    assert steps(hopper, assumed("2x96"))[1].endswith("for more, found GPU of 96 GiB")
    ops.select_backend("torch")
    assert runtime.choose_steps(None, range(6), hopper) is None and ops.max_tokens() is None
    scales = {}
    checkpoint = SyntheticCheckpoint(PRESETS["tiny"], "nvidia", "meta")
    checkpoint.fp8_scales = scales.get
    scales["layers.3.attn.wq_b"] = torch.tensor([[0.5, 1.875], [3.0, 2.0**-20]])
    assert steps(hopper, checkpoint=checkpoint) == (1024, None)
    scales["layers.3.attn.wq_b"][0, 1] = 1.9375
    assert steps(hopper, checkpoint=checkpoint) == (
        8, "layers.3.attn.wq_b: expected FP8 scales of up to 4 significant bits for more, found others")
    both = [*hopper, torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 + device.index, 0))
    assert steps(both) == (8, "expected a GPU with wgmma (compute capability 9.0) for more, found cuda:1 with 10.0")


@pytest.mark.parametrize("format,expected", [("nvidia", None), ("base-fp8", torch.float32), ("compressed-tensors", torch.float32)])
def test_fp8_scales_that_may_be_any_numbers_are_read(tmp_path, format, expected):
    write_true_size(tmp_path / "it", MINI, format, range(4), seed=2, threads=1)
    checkpoint = Checkpoint.open(tmp_path / "it")
    scales = checkpoint.fp8_scales("layers.0.attn.wq_a")
    assert (None if scales is None else scales.dtype) == expected
    assert expected is None or torch.equal(scales, checkpoint.weight("layers.0.attn.wq_a").scale)
    assert checkpoint.fp8_scales("layers.0.attn.compressor.wkv") is checkpoint.fp8_scales("head") is None


def test_a_gpu_that_the_kernels_do_not_know(hopper, monkeypatch):
    """One among several is enough."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 if device.index == 0 else 8, 0))
    assert choose("cuda", hopper) == choose("auto", hopper) == ("cuda", None)
    both = [*hopper, torch.device("cuda", 1)]
    with pytest.raises(UserError, match="compute capability 9.0, 10.0 or 10.3, found H200 with 8.0: run with --backend torch$"):
        choose("cuda", both)
    assert choose("auto", both) == ("torch", "--backend cuda: expected a GPU of compute capability 9.0, 10.0 or 10.3, found H200 with 8.0")


def test_where_the_choice_is_free_the_kernels_run_on_what_surely_works(hopper, monkeypatch):
    """An unknown GPU, weights that bf16 may not hold, no compiler: by name they are tried."""
    for format in ("nvidia", "official", "compressed-tensors", "all-nvfp4", "base-fp8", "bf16"):
        assert choose("auto", hopper, format=format) == ("cuda", None)
    assert choose("torch", hopper) == ("torch", None)
    for machine in ("8xH100", "8xB200", "4xB300"):
        assert choose("auto", hopper, machine=assumed(machine)) == ("cuda", None)
    odd = replace(PRESETS["tiny"], weight_block_size=(64, 64))
    for arguments, message in (
        ({"machine": assumed("2x96")}, "--assume: expected a GPU by its name, found GPU of 96 GiB, which tells no architecture"),
        ({"format": "f32"}, "head: expected a weight in BF16, FP8, NVFP4 or MXFP4, found F32, which bf16 may not hold"),
        ({"config": odd}, "layers.0.attn.wq_a: expected FP8 blocks of a multiple of 8 rows and 128 columns, found 64x64"),
    ):
        assert choose("auto", hopper, **arguments) == ("torch", message)
        assert choose("cuda", hopper, **arguments) == ("cuda", None)
    stored = SyntheticCheckpoint.stored
    monkeypatch.setattr(SyntheticCheckpoint, "stored", lambda self, need: stored(self, need)._replace(kind="mxfp4")
                        if need.name == "layers.2.ffn.experts.5.w3" else stored(self, need))
    message = "layers.2.ffn.experts.5.w3: expected the experts of a layer in one format, nvfp4, found mxfp4"
    assert choose("auto", hopper) == ("torch", message) and choose("auto", hopper, layers=range(3, 6)) == ("cuda", None)

    monkeypatch.setattr(SyntheticCheckpoint, "stored", lambda self, need: stored(self, need)._replace(kind="plain", dtype="BF16")
                        if need.name == "layers.1.ffn.shared_experts.w3" else stored(self, need))
    message = "layers.1.ffn.shared_experts.w3: expected the experts of a layer in one format, fp8, found plain"
    assert choose("auto", hopper) == ("torch", message)

    def missing():
        raise UserError("kernels: expected nvcc, found none: install it")

    monkeypatch.setattr(SyntheticCheckpoint, "stored", stored)
    monkeypatch.setattr(runtime.build, "find_nvcc", missing)
    assert choose("auto", hopper) == ("torch", "kernels: expected nvcc, found none: install it")
    assert choose("auto", hopper, machine=assumed("8xH200")) == ("cuda", None)  # whose compiler nobody knows


def test_all_kernels_are_built_for_the_devices_that_there_are(hopper, monkeypatch):
    built = []
    monkeypatch.setattr(runtime.build, "build_ahead", built.extend)
    runtime.build_kernels(hopper * 2)
    assert built == [(name, "sm_90a") for name in runtime.build.names()]


def test_what_a_gpus_fault_becomes():
    fault = runtime.gpu_fault(RuntimeError("CUDA error: an illegal memory access was encountered\nmore"))
    assert fault.exit_code == 1 and "\n" not in str(fault)
    assert "illegal memory access was encountered: DSV4_SYNC=1 names the kernel" in str(fault)
    full = runtime.gpu_fault(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert full.exit_code == 4 and "CUDA out of memory" in str(full)
    with pytest.raises(RuntimeError, match="^shapes$"):
        runtime.gpu_fault(RuntimeError("shapes"))
