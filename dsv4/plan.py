"""Which layer goes on which device and what that takes, decided before a byte of weights is read; it fits, or says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cache import layer_cache_bytes
from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import DoesNotFit
from .ops.attention import TILE as ATTENTION_TILE
from .ops.indexer import TILE as INDEX_TILE
from .ops.linear import TILE as LINEAR_TILE


@dataclass(frozen=True)
class DevicePlan:
    """One device's share: the layers it runs and bytes by purpose."""

    device: torch.device
    layers: tuple[int, ...]
    weights: int
    cache: int
    scratch: int
    free: int

    @property
    def needed(self) -> int:
        return self.weights + self.cache + self.scratch


@dataclass(frozen=True)
class Plan:
    """The layers to run, in order, each on its device, for `context` tokens in steps of at most `chunk`."""

    layers: tuple[int, ...]
    devices: tuple[DevicePlan, ...]
    context: int
    chunk: int
    keep_dequantised: bool

    def device_of(self, layer: int) -> torch.device:
        """Where a planned layer runs."""
        return next(d.device for d in self.devices if layer in d.layers)


def layer_parameters(config: ModelConfig, layer: int) -> int:
    """Elements of a layer's matrices (model.md section 1, parameter counts, without norms, sinks, ape and mHC)."""
    c, D, r = config, config.hidden_size, config.compress_ratios[layer]
    heads = c.num_attention_heads * c.head_dim
    total = c.q_lora_rank * (D + heads) + D * c.head_dim + c.o_lora_rank * (heads + c.o_groups * D)
    if r:
        total += 2 * config.coff(layer) * c.head_dim * D
    if r == 4:
        total += c.index_n_heads * (c.index_head_dim * c.q_lora_rank + D) + 4 * c.index_head_dim * D
    return total + c.n_routed_experts * D + (c.n_routed_experts + c.n_shared_experts) * 3 * D * c.moe_intermediate_size


def make_plan(checkpoint: Checkpoint, devices: list[torch.device], *, layers: range, context: int, chunk: int, dtype: torch.dtype,
              free_bytes: Callable[[torch.device], int], auto: bool = False, logit_rows: int = 1, expand: bool = True) -> Plan:
    """Contiguous runs of `layers` over `devices`, balanced by bytes; the embedding with the first, the head with the last.

    `auto` takes the fewest of the devices that suffice. With `expand`, quantised weights are kept dequantised (fp32, the same values,
    faster on the definitions) when that takes at most half of what is free. `logit_rows` rows of logits are made at once. Raises
    DoesNotFit with the device, the bytes needed and the bytes free.
    """
    devices = devices[: len(layers)]
    tries = range(1, len(devices) + 1) if auto else (len(devices),)
    for count in tries:
        shares = {keep: _shares(checkpoint, devices[:count], layers, context, chunk, dtype, free_bytes, keep, logit_rows)
                  for keep in (True, False)}
        if expand and all(2 * d.needed <= d.free for d in shares[True]):
            return Plan(tuple(layers), shares[True], context, chunk, True)
        if all(d.needed <= d.free for d in shares[False]):
            return Plan(tuple(layers), shares[False], context, chunk, False)
    worst = max(shares[False], key=lambda d: d.needed - d.free)
    raise DoesNotFit(f"{worst.device}: needs {_gib(worst.needed)} GiB (weights {_gib(worst.weights)}, caches for {context} tokens "
                     f"{_gib(worst.cache)}, scratch {_gib(worst.scratch)}), has {_gib(worst.free)} GiB free: "
                     "give more --devices, a smaller --context or fewer --layers")


def _shares(checkpoint, devices, layers, context, chunk, dtype, free_bytes, keep, logit_rows):
    config = checkpoint.config
    ends = config.vocab_size * config.hidden_size
    expanded = {n: 4 * layer_parameters(config, n) for n in layers}
    weights = {n: expanded[n] if keep else checkpoint.layer_bytes(n) for n in layers}
    caches = {n: layer_cache_bytes(config, n, context, chunk, dtype) for n in layers}
    first, last = checkpoint.nbytes("embed"), 4 * ends if keep else checkpoint.nbytes("head")
    total = sum(weights.values()) + sum(caches.values()) + first + last
    runs, done = [[] for _ in devices], first
    for n in layers:  # a layer goes where the middle of its bytes falls
        size = weights[n] + caches[n]
        runs[min(int((done + size / 2) * len(devices) / total), len(devices) - 1)].append(n)
        done += size
    largest = max(checkpoint.layer_bytes(n) for n in layers)
    runs_devices = [(run, device) for run, device in zip(runs, devices, strict=True) if run]
    return tuple(
        DevicePlan(device, tuple(run),
                   sum(weights[n] for n in run) + first * (i == 0) + last * (i == len(runs_devices) - 1),
                   sum(caches[n] for n in run), largest + _scratch(config, context, chunk, logit_rows), free_bytes(device))
        for i, (run, device) in enumerate(runs_devices))


def _scratch(config, context, chunk, logit_rows):
    """What the torch definitions hold at once: scores of attention and indexer with their copies, the top-k's sort, a dequantised
    tile, a chunk's activations."""
    ratios = {r for r in config.compress_ratios if r}
    entries = context // min(ratios) if ratios else 0
    reachable = config.sliding_window + chunk + entries
    scores = 3 * min(ATTENTION_TILE, chunk * config.num_attention_heads * reachable)
    if 4 in ratios and entries > config.index_topk:  # the products and their relu; then scores, ranks, order (int64) and masks
        scores = max(scores, 2 * min(INDEX_TILE, chunk * config.index_n_heads * entries) + 6 * chunk * entries)
    queries = chunk * config.num_attention_heads * config.head_dim
    streams = chunk * config.hc_mult * config.hidden_size
    return 4 * (scores + LINEAR_TILE // 4 + 6 * queries + 6 * streams + logit_rows * config.vocab_size)


def _gib(n):
    return f"{n / 2**30:.2f}"
