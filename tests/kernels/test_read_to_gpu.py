"""read_to_gpu on the CPU emulator, whose copies happen when they are waited for and no sooner: a slot that is filled too early shows."""

import errno
import os

import pytest
import torch

from dsv4.errors import KernelError
from dsv4.kernels.read_to_gpu import read_to_gpu

from ..emulator.emulator import ON_GPU, EmulatorError, emulated, needs_gxx

pytestmark = needs_gxx


@pytest.fixture
def file(tmp_path, rng):
    data = torch.randint(0, 256, (100_000,), generator=rng, dtype=torch.uint8)
    (tmp_path / "data").write_bytes(data.numpy().tobytes())
    opened = os.open(tmp_path / "data", os.O_RDONLY)
    yield opened, data
    os.close(opened)


def slots_of(count, size):
    return torch.empty(count, size, dtype=torch.uint8, pin_memory=ON_GPU)


def read(file, ranges, size, slots=(2, 1000), stop=0):
    """(What read_to_gpu returns, the target), which was 0xEE before where nothing was read."""
    to = torch.full((size,), 0xEE, dtype=torch.uint8)
    with emulated():
        return read_to_gpu(file, ranges, to, slots_of(*slots), torch.tensor([stop], dtype=torch.int32)), to


@pytest.mark.parametrize("slots", [(1, 1000), (2, 1000), (3, 777), (8, 1), (2, 1 << 20)])
def test_ranges(file, slots):
    """One that a slot holds, one of many slots with a ragged end, single bytes, none; in any order, with room between."""
    opened, data = file
    most = 40 if slots[1] == 1 else 50_000
    ranges = [(99_999, 1, 0), (17, most, 256), (3, 0, 300 + most), (50_000, min(most, 1000), 512 + most), (0, 1, 2000 + most)]
    came, to = read(opened, ranges, 2500 + most, slots)
    assert came == (5, 0, 0)
    for begin, size, at in ranges:
        assert torch.equal(to[at : at + size], data[begin : begin + size])


def test_no_ranges(file):
    assert read(file[0], [], 10)[0] == (0, 0, 0)


def test_a_file_that_ends(file):
    """What is before the end has come."""
    opened, data = file
    came, to = read(opened, [(10, 2500, 0), (97_000, 5000, 2560)], 8000)
    assert came == (1, 3000, 0)
    assert torch.equal(to[:2500], data[10:2510]) and torch.equal(to[2560:5560], data[97_000:])
    assert read(opened, [(100_000, 1, 0)], 1)[0] == (0, 0, 0)


def test_a_read_that_fails(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)  # which opens, and cannot be read
    try:
        assert read(folder, [(0, 0, 0), (0, 10, 0)], 10)[0] == (1, 0, errno.EISDIR)
    finally:
        os.close(folder)
    assert read(folder, [(0, 10, 0)], 10)[0] == (0, 0, errno.EBADF)


def test_stop(file):
    came, to = read(file[0], [(0, 5000, 0)], 5000, stop=1)
    assert came == (0, 0, 0)


@pytest.mark.parametrize("slots", [(9, 10), (1, 0)])
def test_slots_that_it_does_not_take(file, slots):
    with pytest.raises(KernelError, match="^read_to_gpu: expected the kernel to launch, found CUDA error 1:"):
        read(file[0], [(0, 10, 0)], 10, slots)


@pytest.mark.skipif(ON_GPU, reason="of the emulator")
def test_a_target_outside_the_memory(file):
    with pytest.raises(EmulatorError, match="copy of 10 bytes to the device: the target is 90 bytes past the end of to"):
        read(file[0], [(0, 10, 100)], 10)
