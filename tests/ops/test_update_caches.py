"""update_caches: its two steps, each with its own memory and angles. What these do is held in test_norm.py and test_compressor.py."""

import pytest
import torch

from dsv4 import ops
from dsv4.cache import CompressorCache

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratios", [(), (128,), (4,), (4, 4)])
@pytest.mark.parametrize("quantize", [False, True])
def test_both_steps_and_nothing_else(rng, ratios, dtype, quantize):
    S, first = 6, 124
    positions = torch.arange(first, first + S)
    qa, kv, q_norm, kv_norm = (torch.randn(*shape, generator=rng) for shape in ((S, 48), (S, 512), (48,), (512,)))
    cos, sin = ops.rope_table(positions, ops.rope_frequencies(64, 1e4))
    of_entries, inputs = (None, None), []
    if ratios:
        of_entries = ops.rope_table(positions // ratios[0] * ratios[0], ops.rope_frequencies(64, 1.6e5))

    def memory():
        pools = []
        for n, ratio in enumerate(ratios):
            d, generator = (512, 128)[n], torch.Generator().manual_seed(n)
            width = 2 * d if ratio == 4 else d
            cache = CompressorCache(ratio, d, torch.zeros(40, d, dtype=dtype), "cpu")
            ape, norm = torch.randn(ratio, width, generator=generator), torch.randn(d, generator=generator)
            pools.append(ops.Pool(ape, norm, cache.kv, cache.score, cache.entries, n == 1))
        return torch.zeros(20, 512, dtype=dtype), tuple(pools)

    (window, pools), (window_too, pools_too) = memory(), memory()
    for p in pools:
        inputs.append(tuple(torch.randn(S, p.ape.shape[1], generator=rng) for _ in range(2)))
    qr = ops.update_caches(qa, kv, q_norm, kv_norm, cos, sin, window, tuple(inputs), pools, *of_entries, positions, EPS, quantize)
    want = ops.latents(qa, kv, q_norm, kv_norm, cos, sin, positions, window_too, EPS, quantize)
    if ratios:
        ops.compress(tuple(inputs), pools_too, positions, *of_entries, EPS, quantize)
    assert torch.equal(qr, want) and torch.equal(window, window_too) and window.any()
    for got, ours in zip(pools, pools_too, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got[:5], ours[:5], strict=True))
        assert got.entries.any() and got.kv_state.any()
