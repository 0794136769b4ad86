"""The choice of implementation. An operation is a name with a torch definition (`NAME_ref`, the meaning) and, on the `cuda`
backend, a kernel of the same name. The backend is chosen once, at start, for all operations: no silent fallback."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from ..errors import UserError

_definitions: dict[str, Callable] = {}
_kernels: dict[str, Callable] = {}  # what `register` was told, and those of dsv4/kernels once "cuda" was selected
_chosen: dict[str, Callable] = {}  # what runs instead of the definition
_max_tokens: int | None = None
_selected = "torch"


def operation(definition: Callable) -> Callable:
    """Makes the public operation NAME from its torch definition NAME_ref; it runs what `select` chose."""
    name = definition.__name__.removesuffix("_ref")
    _definitions[name] = definition

    @functools.wraps(definition)
    def call(*args, **kwargs):
        return _chosen.get(name, definition)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def register(name: str, kernel: Callable) -> None:
    """Offers a kernel for an operation to the "cuda" backend: same arguments, same result as the definition."""
    if name not in _definitions:
        raise ValueError(f"no operation {name!r}: expected one of {', '.join(sorted(_definitions))}")
    _kernels[name] = kernel


@contextlib.contextmanager
def trying(name: str, kernel: Callable):
    """Runs `kernel` as operation `name` inside a with-block, everything else as selected: to try one kernel in the whole model."""
    if name not in _definitions:
        raise ValueError(f"no operation {name!r}: expected one of {', '.join(sorted(_definitions))}")
    before = dict(_chosen)
    _chosen[name] = kernel
    try:
        yield
    finally:
        _chosen.clear()
        _chosen.update(before)


def max_tokens() -> int | None:
    """The most tokens that the chosen implementation takes in one step; None: any number."""
    return _max_tokens


def allow_prompts() -> None:
    """On the kernels: from now on a step may have as many tokens as their products of a prompt take. For GPUs and weights of which that was
    found (runtime.choose_steps)."""
    global _max_tokens
    from .. import kernels

    _max_tokens = kernels.PROMPT_TOKENS


def selected() -> str:
    """The backend that was chosen."""
    return _selected


def select(backend: str) -> None:
    """Chooses the implementation of every operation: "torch" or "cuda". Raises UserError when a kernel is missing."""
    global _max_tokens, _selected
    _chosen.clear()
    _max_tokens, _selected = None, "torch"
    if backend == "cuda":
        from .. import kernels  # here, as the torch backend needs none of it

        for name, kernel in kernels.wrappers().items():
            if name not in _kernels:  # one that was registered before stays
                register(name, kernel)
        missing = sorted(_definitions.keys() - _kernels.keys())
        if missing:
            raise UserError(f"--backend cuda: expected a kernel for every operation, found none for {missing[0]!r} (and {len(missing) - 1} "
                            "more): run with --backend torch, which also takes --devices cuda:0")
        _chosen.update(_kernels)
        _max_tokens, _selected = kernels.MAX_TOKENS, backend
    elif backend != "torch":
        raise UserError(f"--backend: expected torch or cuda, found {backend!r}")
