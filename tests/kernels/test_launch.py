"""From wrapper to kernel: what is refused before a launch, and what is said when CUDA refuses."""

import re
import types
from pathlib import Path

import pytest
import torch

from dsv4.errors import KernelError, UserError
from dsv4.kernels import build, launch
from dsv4.kernels.launch import HOST, IN, INOUT, OUT, PEER, Kernel


@pytest.mark.parametrize("capability,arch", [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")])
def test_architecture_of_a_gpu(monkeypatch, capability, arch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert launch.architecture(torch.device("cuda:0")) == arch


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_another_gpu_is_one_clear_line(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    with pytest.raises(UserError, match=rf"found Some GPU with {capability[0]}\.{capability[1]}: run with --backend torch"):
        launch.architecture(torch.device("cuda:0"))


def test_tensors_on_a_cpu_are_refused():
    with pytest.raises(UserError, match="rms_norm: expected tensors on a GPU, found cpu: run with --backend torch"):
        Kernel("rms_norm", {"x": IN})(x=torch.ones(2, 4))


def test_arguments_are_checked_by_name_and_layout():
    kernel = Kernel("k", {"x": IN, "out": OUT, "n": int})
    with pytest.raises(TypeError, match="k takes x, out, n, got x, n"):
        kernel(x=torch.ones(2), n=3)
    with pytest.raises(UserError, match=r"k: expected contiguous tensors of one device, found \[2, 3\] of strides \[1, 2\] on cpu"):
        kernel(x=torch.ones(3, 2).T, out=torch.ones(2), n=3)


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for the GPU: CPU tensors take its path, and the kernel returns `state.error`."""
    state = types.SimpleNamespace(error=0, fault=None, calls=[])

    def synchronize(device):
        if state.fault:
            raise RuntimeError(state.fault)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_raw_stream", lambda device: 77)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def as_on_gpu(kernel, values):
        return kernel._on_gpu(0, [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values])
    monkeypatch.setattr(launch, "emulator", as_on_gpu)

    def function(*arguments):
        state.calls.append(arguments)
        return state.error
    state.kernel = Kernel("k", {"x": IN, "n": int})
    state.kernel._functions[0] = function
    return state


def test_trap_21_addresses_and_torchs_current_stream_reach_the_kernel(gpu):
    x = torch.ones(2)
    gpu.kernel(x=x, n=3)
    assert gpu.calls == [(x.data_ptr(), 3, 77)]


def test_host_tensors_empty_ones_and_none(gpu):
    """A HOST tensor goes by its address too; an absent tensor is a null pointer, as is an empty one."""
    kernel = Kernel("k", {"x": IN, "table": HOST, "absent": IN, "empty": OUT})
    kernel._functions = gpu.kernel._functions
    x, table = torch.ones(2), torch.ones(3)
    kernel(x=x, table=table, absent=None, empty=torch.ones(0))
    assert gpu.calls == [(x.data_ptr(), table.data_ptr(), None, 0, 77)]
    with pytest.raises(TypeError, match="k: expected at least one tensor"):
        kernel(x=None, table=table, absent=None, empty=None)


def test_a_peers_memory_may_be_anywhere(gpu, monkeypatch):
    """A PEER tensor decides nothing: the kernel runs where the others are. It has to be contiguous all the same."""
    x, there = torch.ones(2), torch.ones(3, 3)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: 0 if t is x else 1)
    for kind in (PEER, INOUT):
        kernel = Kernel("k", {"there": kind, "x": IN})
        kernel._functions = gpu.kernel._functions
        if kind == PEER:
            kernel(there=there, x=x)
            assert gpu.calls == [(there.data_ptr(), x.data_ptr(), 77)]
        for value in [there.T[:2]] if kind == PEER else [there, there.T[:2]]:
            with pytest.raises(UserError, match="k: expected contiguous tensors of one device"):
                kernel(there=value, x=x)


def test_a_refused_launch_names_the_kernel(gpu):
    gpu.error = 98
    with pytest.raises(KernelError, match="k: expected the kernel to launch, found CUDA error 98: DSV4_SYNC=1 shows"):
        gpu.kernel(x=torch.ones(2), n=3)


def test_with_dsv4_sync_a_fault_names_the_kernel(gpu, monkeypatch):
    gpu.fault = "an illegal memory access was encountered\nand much more"
    gpu.kernel(x=torch.ones(2), n=3)  # without it, the fault is someone else's to find
    monkeypatch.setattr(launch, "SYNC", True)
    with pytest.raises(KernelError, match=r"^k: expected the kernel to end, found an illegal memory access was encountered: "):
        gpu.kernel(x=torch.ones(2), n=3)


CONFORMANCE = sorted((Path(__file__).parents[1] / "emulator").glob("conformance*.cu"))


@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
@pytest.mark.parametrize("source", CONFORMANCE, ids=lambda source: source.stem)
def test_the_instructions_of_ptx_compile(nvcc, kernel_cache, source, arch):
    """The kernels that run each instruction on its own, with and without a cluster."""
    for usage in build.usage(build.build(source.stem, arch, source)):
        assert (usage.spill_stores, usage.stack) == (0, 0), usage


def test_every_instruction_of_ptx_is_among_them():
    declared = re.findall(r"PTX_FN \S+ (\w+)\(|^PTX_\w+\((\w+), \"", (build.SOURCES / "ptx.cuh").read_text(), re.MULTILINE)
    names = {a or b for a, b in declared} - {"shared_address", "read_once", "name"}  # the first two are ptx.cuh's own
    text = "".join(source.read_text() for source in CONFORMANCE)
    assert len(names) > 40 and not {name for name in names if not re.search(rf"\b{name}\b", text)}


def test_an_object_that_does_not_load(tmp_path, monkeypatch):
    """One line with the file: whoever reads a file meanwhile must not take it for that one's error."""
    (tmp_path / "k.so").write_bytes(b"no object")
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90a")
    kernel = Kernel("k", {"x": IN})
    monkeypatch.setattr(kernel, "built", lambda arch: tmp_path / "k.so")
    with pytest.raises(KernelError, match=r"^k: expected an object that loads, found [^\n]*k\.so: [^\n]*: remove it, so that"):
        kernel.load(0)
