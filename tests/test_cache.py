"""The caches against a plain list of everything that came in (model.md sections 4.2, 5 and 6.1)."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache import Cache, CompressorState, LayerCache, layer_cache_bytes
from dsv4.config import PRESETS, ModelConfig
from tests.hf import hf_configs

CONFIGS = {**PRESETS, **{name: ModelConfig.from_dict(raw) for name, raw in hf_configs().items()}}


def keys(config, n, first=0):
    """Key of position p: p in every dim, so that a key names itself."""
    return torch.arange(first, first + n, dtype=torch.float32)[:, None].expand(n, config.head_dim)


def feed(cache, config, pieces):
    """Feeds pieces one after the other and holds every answer to the list of positions that may be reached."""
    W, position = config.sliding_window, 0
    for n in pieces:
        got = cache.extend_window(keys(config, n, position), position)
        assert got[:, 0].tolist() == list(range(max(0, position - W + 1), position + n)), (position, n)
        assert (got == got[:, :1]).all()
        position += n
        for p in range(max(0, position - W), position):  # the ring: position p lies in slot p mod W
            assert cache.window[p % W, 0] == p
    return position


@pytest.mark.parametrize("name", ["small", "odd", "tiny"])
def test_window_ring_in_one_piece_token_by_token_and_past_its_end(name):
    config = CONFIGS[name]
    W = config.sliding_window
    for pieces in ([1], [3, 1], [W - 1, 1, 1], [W], [W, 1], [W + 1, 1], [2 * W + 3, 1, 1], [1] * (2 * W + 3), [W - 1, W, W + 1],
                   [5, 3 * W, 2]):
        feed(LayerCache(config, 0, 10 * W, torch.float32, "cpu"), config, pieces)


def test_window_ring_at_random_cuts(rng):
    config = CONFIGS["odd"]
    for _ in range(20):
        pieces = torch.randint(1, 60, (12,), generator=rng).tolist()
        feed(LayerCache(config, 0, 1000, torch.float32, "cpu"), config, pieces)


def test_a_new_sequence_starts_without_the_old_keys():
    config = CONFIGS["small"]
    cache = LayerCache(config, 0, 100, torch.float32, "cpu")
    feed(cache, config, [40])
    cache.reset()
    feed(cache, config, [2, 1, 1])


def test_extend_window_keeps_the_keys_it_was_given():
    """The window is a copy: what the layer does to its keys afterwards does not reach into the cache."""
    config = CONFIGS["small"]
    cache, given = LayerCache(config, 0, 100, torch.float32, "cpu"), keys(CONFIGS["small"], 3).clone()
    cache.extend_window(given, 0)
    given.fill_(-1)
    assert cache.window[:3, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("ratio,shape", [(4, (8, 16)), (128, (128, 8))])
def test_compressor_state_starts_at_value_0_and_score_minus_infinity(ratio, shape):
    state = CompressorState(ratio, 8, "cpu")
    for _ in range(2):
        assert state.kv.shape == state.score.shape == shape and state.kv.dtype == state.score.dtype == torch.float32
        assert (state.kv == 0).all() and (state.score == float("-inf")).all()
        state.kv.fill_(3), state.score.fill_(3)
        state.reset()


@pytest.mark.parametrize("layer,entries,index,states", [(0, False, False, 0), (2, True, True, 2), (3, True, False, 1)])
def test_what_each_kind_of_layer_holds(layer, entries, index, states):
    cache = LayerCache(CONFIGS["small"], layer, 300, torch.bfloat16, "cpu")
    assert hasattr(cache, "entries") == entries and hasattr(cache, "index_keys") == index and len(cache.states) == states
    assert cache.window.shape == (16, 64) and cache.window.dtype == torch.bfloat16
    if entries:
        assert cache.entries.shape == (300 // cache.ratio, 64) and cache.entries.dtype == torch.bfloat16
    if index:
        assert cache.index_keys.shape == (75, 32)


def test_reset_of_the_whole_cache():
    config = CONFIGS["small"]
    cache = Cache({n: LayerCache(config, n, 20, torch.float32, "cpu") for n in range(5)}, 20)
    cache.position = 17
    states = [state for layer in cache.layers.values() for state in layer.states]
    assert len(states) == 5  # two CSA layers of two, one HCA layer of one
    for state in states:
        state.kv.fill_(1), state.score.fill_(1)
    cache.reset()
    assert cache.position == 0 and all((s.kv == 0).all() and (s.score == float("-inf")).all() for s in states)


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
            cache = LayerCache(config, layer, context, dtype, "cpu")
            assert layer_cache_bytes(config, layer, context, dtype) == sum(t.untyped_storage().nbytes() for t in tensors_in(cache))


def test_pro_at_the_full_context():
    """A CSA layer in bf16 at 1,048,576 tokens: 262,144 entries of 512 and of 128 values are 335.5 MB; the rest is small."""
    config = PRESETS["pro"]
    csa = layer_cache_bytes(config, 2, 1 << 20, torch.bfloat16)
    assert csa == 2 * (128 * 512 + (1 << 18) * (512 + 128)) + 2 * 4 * 8 * (1024 + 256)
    assert layer_cache_bytes(config, 1, 1 << 20, torch.bfloat16) == 2 * (128 * 512 + (1 << 13) * 512) + 2 * 4 * 128 * 512
