"""The caches against a plain list of everything that came in (model.md sections 4.2, 5 and 6.1)."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache import Cache, CompressorCache, LayerCache, layer_cache_bytes
from dsv4.config import PRESETS, ModelConfig
from tests.hf import hf_configs

CONFIGS = {**PRESETS, **{name: ModelConfig.from_dict(raw) for name, raw in hf_configs().items()}}


@pytest.mark.parametrize("ratio,shape", [(4, (8, 16)), (128, (128, 8))])
def test_compressor_state_starts_at_value_0_and_score_minus_infinity(ratio, shape):
    state = CompressorCache(ratio, 8, None, "cpu")
    for _ in range(2):
        assert state.kv.shape == state.score.shape == shape and state.kv.dtype == state.score.dtype == torch.float32
        assert (state.kv == 0).all() and (state.score == float("-inf")).all()
        state.kv.fill_(3), state.score.fill_(3)
        state.reset()


@pytest.mark.parametrize("layer,entries,index", [(0, False, False), (2, True, True), (3, True, False)])
def test_what_each_kind_of_layer_holds(layer, entries, index):
    cache = LayerCache(CONFIGS["small"], layer, 300, 9, torch.bfloat16, "cpu")
    assert (cache.main is not None) == entries and (cache.index is not None) == index
    assert cache.window.shape == (16 + 9, 64) and cache.window.dtype == torch.bfloat16
    if entries:
        assert cache.main.entries.shape == (300 // cache.ratio, 64) and cache.main.entries.dtype == torch.bfloat16
    if index:
        assert cache.index.entries.shape == (75, 32)
    assert len(LayerCache(CONFIGS["small"], layer, 5, 9, torch.bfloat16, "cpu").window) == 16 + 5  # a step is no longer than the context


def test_reset_of_the_whole_cache():
    config = CONFIGS["small"]
    cache = Cache({n: LayerCache(config, n, 20, 20, torch.float32, "cpu") for n in range(5)}, 20, 20)
    cache.position = 17
    parts = [part for layer in cache.layers.values() for part in (layer.main, layer.index) if part]
    assert len(parts) == 5  # two CSA layers of two, one HCA layer of one
    for part in parts:
        part.kv.fill_(1), part.score.fill_(1)
    cache.reset()
    assert cache.position == 0 and all((p.kv == 0).all() and (p.score == float("-inf")).all() for p in parts)


def tensors_in(thing, seen=None):
    """Every tensor that can be reached from an object's attributes, once."""
    seen = {} if seen is None else seen
    if isinstance(thing, torch.Tensor):
        seen[id(thing)] = thing
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            tensors_in(part, seen)
    elif hasattr(thing, "__dict__"):
        tensors_in(list(vars(thing).values()), seen)
    return seen.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_layer_cache_bytes_is_what_is_allocated(name, dtype):
    config = CONFIGS[name]
    for context in (1, 3, 4, 127, 128, 1001):
        for layer in (0, 1, 2, config.num_hidden_layers - 1):
            cache = LayerCache(config, layer, context, 8, dtype, "cpu")
            assert layer_cache_bytes(config, layer, context, 8, dtype) == sum(t.untyped_storage().nbytes() for t in tensors_in(cache))


def test_pro_at_the_full_context():
    """A CSA layer in bf16 at 1,048,576 tokens: 262,144 entries of 512 and of 128 values are 335.5 MB; the rest is small."""
    config = PRESETS["pro"]
    csa = layer_cache_bytes(config, 2, 1 << 20, 8, torch.bfloat16)
    assert csa == 2 * (136 * 512 + (1 << 18) * (512 + 128)) + 2 * 4 * 8 * (1024 + 256)
    assert layer_cache_bytes(config, 1, 1 << 20, 8, torch.bfloat16) == 2 * (136 * 512 + (1 << 13) * 512) + 2 * 4 * 128 * 512
