"""Devices by name, and memory: what is free and what was used."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
import torch

from dsv4 import ops, runtime
from dsv4.config import PRESETS
from dsv4.errors import UserError


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
    """128 MiB above the largest so far (a peak cannot be taken back) must show, in bytes and not in KiB."""
    before = runtime.peak_bytes([torch.device("cpu")])
    assert set(before) == {"host"}
    room = before["host"] + (128 << 20)
    held = [torch.ones(32 << 20 >> 2) for _ in range(max(1, (room - current_bytes()) // (32 << 20) + 1))]
    after = runtime.peak_bytes([torch.device("cpu")])["host"]
    del held
    assert (64 << 20) < after - before["host"] < (1 << 30)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def current_bytes():
    """Resident now: Linux only, like the test that uses it."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


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
    """One GPU, as torch would report it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    yield [torch.device("cuda", 0)]
    ops.select_backend("torch")


def test_the_kernels_refuse_what_they_cannot_do_before_anything_is_loaded(hopper, monkeypatch):
    config, bf16 = PRESETS["tiny"], torch.bfloat16
    for arguments, message in (
        ((config, [torch.device("cpu")], bf16, "model", "auto"), "--backend cuda: expected GPUs, found cpu"),
        ((config, hopper, torch.float32, "model", "auto"), "--dtype: expected bfloat16 with --backend cuda, found float32"),
        ((config, hopper, bf16, "off", "auto"), "--kv-quant: expected model with --backend cuda"),
        ((config, hopper, bf16, "model", "fp8"), "--activations: expected bf16 with --backend cuda"),
        ((replace(config, index_n_heads=32), hopper, bf16, "model", "auto"), "expected index_n_heads to be 64"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            runtime.choose_backend("cuda", *arguments)
        assert "\n" not in str(caught.value) and ops.selected_backend() == "torch"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match="compute capability 9.0, 10.0 or 10.3, found H200 with 8.0"):
        runtime.choose_backend("cuda", config, hopper, bf16, "model", "bf16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    runtime.choose_backend("cuda", config, hopper, bf16, "model", "bf16")
    assert ops.selected_backend() == "cuda"


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
