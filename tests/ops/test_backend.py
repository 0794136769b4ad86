"""The choice of implementation: one name an operation, no silent fallback."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import dsv4.ops
from dsv4 import kernels
from dsv4.errors import UserError
from dsv4.ops import backend


@pytest.fixture(autouse=True)
def restore():
    yield
    backend._kernels.clear()
    backend.select("torch")


def modules():
    return [importlib.import_module(f"dsv4.ops.{m.name}") for m in pkgutil.iter_modules(dsv4.ops.__path__)]


def test_every_definition_is_an_operation_of_its_files_and_of_the_package():
    """NAME_ref is the meaning, NAME what runs; both in one file, NAME exported by dsv4.ops."""
    seen = {}
    for module in modules():
        functions = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
        own = {name: f for name, f in functions.items() if name.endswith("_ref")}
        for name, definition in own.items():
            public = name.removesuffix("_ref")
            assert backend._definitions[public] is definition
            assert getattr(module, public) is getattr(dsv4.ops, public) and getattr(module, public).__name__ == public
            assert getattr(module, public).__doc__ == definition.__doc__ and definition.__doc__
            assert public in dsv4.ops.__all__ and public not in seen
            seen[public] = module.__name__
    assert seen.keys() == backend._definitions.keys()
    files = {name.rsplit(".", 1)[-1] for name in seen.values()}
    assert files == {"attention", "experts", "grouped", "indexer", "keys", "linear", "mhc", "nvfp4", "router", "sample", "update_caches"}


def test_cuda_without_kernels_names_an_operation_and_the_way_out(monkeypatch):
    monkeypatch.setattr(kernels, "wrappers", dict)
    with pytest.raises(UserError) as caught:
        backend.select("cuda")
    text = str(caught.value)
    assert "--backend cuda" in text and "--backend torch" in text and "\n" not in text
    assert any(repr(name) in text for name in backend._definitions)
    assert caught.value.exit_code == 2


def test_every_operation_has_a_kernel_and_selecting_cuda_registers_them_and_no_earlier():
    assert not backend._kernels
    backend.select("cuda")
    assert backend._kernels == kernels.wrappers() and backend._kernels.keys() == backend._definitions.keys()


def test_a_kernel_that_was_registered_before_stays():
    backend.register("mhc_post", min)
    backend.select("cuda")
    assert backend._kernels == {**kernels.wrappers(), "mhc_post": min}


def test_one_missing_kernel_is_an_error_too_and_nothing_is_chosen(monkeypatch):
    """All operations but one have a kernel: no silent fallback for that one."""
    backend._kernels.update({name: (lambda *_: "kernel") for name in backend._definitions if name != "moe"})
    monkeypatch.setattr(kernels, "wrappers", dict)
    with pytest.raises(UserError, match="'moe'"):
        backend.select("cuda")
    assert dsv4.ops.pack_weights((1, 2)) == (1, 2) and dsv4.ops.max_tokens() is None


def test_select_switches_every_operation_and_torch_restores_the_definitions():
    backend._kernels.update({name: (lambda *args, name=name, **_: ("kernel", name, args)) for name in backend._definitions})
    backend.select("cuda")
    for name in backend._definitions:
        assert getattr(dsv4.ops, name)(1, 2) == ("kernel", name, (1, 2))
    assert dsv4.ops.max_tokens() == kernels.MAX_TOKENS == 8
    backend.select("torch")
    assert dsv4.ops.pack_weights((1, 2)) == (1, 2) and dsv4.ops.max_tokens() is None


@pytest.mark.parametrize("name", ["", "cpu", "CUDA", "auto"])
def test_unknown_backend(name):
    with pytest.raises(UserError, match="expected torch or cuda"):
        backend.select(name)


def test_trying_one_kernel_in_the_whole_model_and_back():
    with backend.trying("pack_weights", lambda weights: "kernel"):
        assert dsv4.ops.pack_weights((1,)) == "kernel"
        assert dsv4.ops.new_keys(2, 3, torch.float32, "cpu").shape == (2, 3)  # the others are what was selected
    assert dsv4.ops.pack_weights((1,)) == (1,)


def test_a_kernel_for_no_operation_is_refused():
    for call in (lambda: backend.register("mhc_psot", print), lambda: backend.trying("mhc_psot", print).__enter__()):
        with pytest.raises(ValueError, match="no operation 'mhc_psot': expected one of .*mhc_post"):
            call()


def test_a_registered_kernel_runs_on_the_cuda_backend():
    for name in backend._definitions:
        backend.register(name, lambda *_, name=name: name)
    backend.select("cuda")
    assert dsv4.ops.mhc_post(None, None) == "mhc_post" and dsv4.ops.moe() == "moe"
