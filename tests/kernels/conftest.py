"""Kernels are compiled into the checkout's build/ folder, which git ignores: only what changed is compiled again."""

import os
import shutil
from pathlib import Path

import pytest

from dsv4.errors import UserError
from dsv4.kernels import build


@pytest.fixture
def kernel_cache(monkeypatch):
    folder = Path(__file__).parents[2] / "build" / "kernels"
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(folder))
    return folder


@pytest.fixture
def nvcc():
    """Skips, with what to install, where there is no nvcc (or no g++, which nvcc calls)."""
    try:
        found = build.find_nvcc()
    except UserError as error:
        if os.environ.get("DSV4_NVCC"):
            raise
        pytest.skip(str(error))
    if shutil.which("g++") is None:
        pytest.skip("nvcc needs g++ (Debian, Ubuntu: apt install g++)")
    return found
