"""Settings of every test: exact fp32, one torch thread a worker (pytest-xdist runs a worker a core), and fresh random inputs.

Tests that take `rng` see new numbers in every run. The seed is in the header and in the output of a test that fails;
DSV4_TEST_SEED=<number> repeats a run.
"""

import gc
import os
import signal

import pytest
import torch

from dsv4 import ops

torch.set_num_threads(1)
torch.set_float32_matmul_precision("highest")

# Set for the workers of pytest-xdist too: they inherit the environment, so one run has one seed.
SEED = int(os.environ.setdefault("DSV4_TEST_SEED", str(int.from_bytes(os.urandom(4), "little"))))


def pytest_report_header(config):
    return f"fresh inputs: DSV4_TEST_SEED={SEED}"


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """What was imported and collected lives as long as the run: no collection of garbage has to look at it again, which took 5 to 10 % of
    the time of tests that make many objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def as_it_was():
    """A test leaves the backend and Ctrl-C as it found them: the command line, which some call, chooses the one and ends with the other
    ignored."""
    backend, handler = ops.selected_backend(), signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
    if ops.selected_backend() != backend:
        ops.select_backend(backend)


@pytest.fixture
def seed() -> int:
    """The run's seed; printed, so that pytest shows it with a failure."""
    print(f"repeat with DSV4_TEST_SEED={SEED}")
    return SEED


@pytest.fixture
def rng(seed) -> torch.Generator:
    """torch's generator at the run's seed."""
    return torch.Generator().manual_seed(seed)
