"""What the tests of the CuTeDSL kernels need: the DSL, nvcc to link with, and g++ behind it."""

import importlib.metadata

import pytest

from dsv4.kernels.cute.tiles import DSL

from ...emulator.emulator import ON_GPU


@pytest.fixture
def dsl(nvcc, kernel_cache):
    """Skips, with what to install, where the DSL is not."""
    try:
        found = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found != DSL:
        pytest.skip(f"needs nvidia-cutlass-dsl {DSL}, found {found or 'none'}: pip install 'dsv4[test]'")
    return kernel_cache


@pytest.fixture
def objects(request):
    """Kernels that can run: on a GPU those of the cache that is set, which need not have the DSL beside them."""
    if not ON_GPU:
        request.getfixturevalue("dsl")
