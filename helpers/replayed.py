"""Calls of operations that can be made again, on copies of what they read, so that a benchmark finds nothing in L2; and torch's bf16
products of the same shapes, likewise."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_leaves, tree_map

from dsv4.ops import backend

from .timing import Call

COLD = 400 << 20  # bytes between two reads of the same ones
MOST_CALLS, COPIES = 512, 4 << 30  # limits of a graph, and of the memory that goes into copies


@dataclass(frozen=True)
class Recorded:
    """A call of an operation that can be made again."""

    name: str
    function: Callable
    args: tuple
    kwargs: dict
    result: object = None

    def __call__(self) -> object:
        return self.function(*self.args, **self.kwargs)

    def cloned(self, keep: set[int]) -> tuple[Recorded, int]:
        """The same on copies of its tensors but those whose storage is in `keep`; and the bytes copied."""
        size = 0

        def clone(value):
            nonlocal size
            if not isinstance(value, torch.Tensor) or storage(value) in keep:
                return value
            size += value.numel() * value.element_size()
            return value.clone()

        args, kwargs = tree_map(clone, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs), size


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def storages(*things: object) -> set[int]:
    """Of all tensors in these."""
    return {storage(t) for t in tree_leaves(things) if isinstance(t, torch.Tensor)}


@contextlib.contextmanager
def recording():
    """The list of the operations that are called within the block, each with its result."""
    calls: list[Recorded] = []
    before = dict(backend._chosen)

    def recorder(name, function):
        def call(*args, **kwargs):
            calls.append(Recorded(name, function, args, kwargs, function(*args, **kwargs)))
            return calls[-1].result
        return call

    for name, definition in backend._definitions.items():
        backend._chosen[name] = recorder(name, before.get(name, definition))
    try:
        yield calls
    finally:
        backend._chosen.clear()
        backend._chosen.update(before)


def cold(device: torch.device, calls: list[Recorded], read: int, keep: set[int], experts: int) -> list[Recorded]:
    """The calls and as many like them on copies of what they read, `read` bytes each, as it takes for COLD bytes; `keep`: storages of what
    the step itself has just made. A layer's experts are not copied: others of them are chosen."""
    out, copied = list(calls), 0
    wanted = min(MOST_CALLS, math.ceil(COLD / read)) if read and device.type != "cpu" else 1
    for n in range(len(calls), wanted):
        source = calls[n % len(calls)]
        if source.name == "moe":
            x, packed, chosen, *rest = source.args
            out.append(replace(source, args=(x, packed, other_experts(chosen, experts, n), *rest)))
            continue
        copy, size = source.cloned(keep)
        copied += size
        if copied > COPIES:
            break
        out.append(copy)
    return out


def other_experts(chosen: torch.Tensor, experts: int, n: int) -> torch.Tensor:
    """The n-th choice of as many experts a token: for one token, sets that have none in common; for several, random ones."""
    tokens, k = chosen.shape
    if tokens == 1:
        rows = [torch.arange(n * k, (n + 1) * k) % experts]
    else:
        generator = torch.Generator().manual_seed(n)
        rows = [torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]
    return torch.stack(rows).to(chosen)


def bf16_products(shapes: list[tuple[int, int, int]], tokens: int, device: torch.device) -> list[Call]:
    """torch's products of these shapes, on as many copies of the weights as it takes for COLD bytes."""
    def drawn(*shape):
        return torch.randn(*(shape[1:] if shape[0] == 1 else shape), device=device, dtype=torch.bfloat16)

    given, size, calls = [drawn(batch, tokens, columns) for batch, _, columns in shapes], sum(2 * math.prod(shape) for shape in shapes), []
    for _ in range(min(MOST_CALLS, math.ceil(COLD / size))):
        weights = [drawn(*shape).transpose(-1, -2) for shape in shapes]
        calls.append(lambda weights=weights: [x @ w for x, w in zip(given, weights, strict=True)])
    return calls
