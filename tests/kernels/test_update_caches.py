"""update_caches whole, on the CPU emulator: queries, keys and pools of one launch, for every kind of layer.

What each part computes is held against its definition in test_latents.py and test_compress.py.
"""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import build
from dsv4.kernels.keys import IndexKeys, Keys
from dsv4.kernels.launch import Kernel
from dsv4.ops.norm import kv_norm_rope
from dsv4.ops.update_caches import update_caches_ref

from ..emulator.emulator import emulated, needs_gxx
from . import test_compress, test_latents
from .test_compress import Cache, Sequence, feed, pools_of, same
from .test_latents import EPS, Site

pytestmark = needs_gxx
KINDS = {"SWA": None, "HCA": (128, 1), "CSA": (4, 2), "CSA without an indexer": (4, 1)}  # ratio, pools


class Layer:
    """A step of S tokens from `position` in a layer of this kind: `site`, and `sequence` if it has pools."""

    def __init__(self, rng, kind, S, position, rank=64):
        self.site = Site(rng, S=S, rank=rank, position=position)
        self.sequence = KINDS[kind] and Sequence(rng, KINDS[kind][0], S, first=position, pools=KINDS[kind][1])

    def run(self, **how):
        """(qr, the window afterwards, the pools' Cache afterwards or None)."""
        window, cache = Keys(*(t.clone() for t in self.site.window)), self.sequence and Cache(self.sequence)
        beside = ()
        if cache:
            inputs, _, cos, sin = feed(self.sequence, self.sequence.first, self.sequence.n)
            beside = inputs, pools_of(self.sequence, cache.states, cache.entries), cos, sin
        with emulated(**how):
            qr = self.site.call(window, EPS, True, *beside)
        return qr, window, cache

    def check(self, qr, window, cache):
        test_latents.check(self.site, qr, window)
        if cache:
            test_compress.check(self.sequence, cache)


# None, one or two blocks of 4 close, or one of 128; the ring (136) ends within the step.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("S,position", [(1, 0), (1, 126), (1, 127), (2, 250), (5, 130), (7, 249), (8, 132), (8, 1_048_571)])
def test_everything_of_every_kind_of_layer(rng, kind, S, position):
    layer = Layer(rng, kind, S, position)
    layer.check(*layer.run())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [4, 1024, 1536, 2048])
def test_the_widths_of_the_query_in_either_order_of_threads(rng, kind, rank):
    layer = Layer(rng, kind, 3, 254, rank=rank)
    (qr, window, cache), (qr_too, window_too, cache_too) = layer.run(), layer.run(reverse=True)
    layer.check(qr, window, cache)
    assert torch.equal(qr, qr_too) and same(window, window_too) and (cache is None or same(cache.tensors(), cache_too.tensors()))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "SWA"])
def test_queries_and_keys_are_the_same_beside_pools(rng, kind):
    layer = Layer(rng, kind, 8, 253, rank=100)
    beside, (alone, window_alone) = layer.run(), test_latents.run(layer.site)
    assert torch.equal(beside[0], alone) and same(beside[1], window_alone)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_definition(rng, kind):
    """The definition on bf16 caches: the same but for a few roundings that fp32 sums in another order turn."""
    layer = Layer(rng, kind, 8, 124)
    qr, window, cache = layer.run()
    site, sequence, memory, pools, inputs, angles = layer.site, layer.sequence, torch.zeros(136, 512).bfloat16(), (), (), (None, None)
    if sequence:
        states, entries = sequence.state(), [torch.zeros(len(e.values), p["d"]).bfloat16() for e, p in
                                             zip(cache.entries, sequence.pools, strict=True)]
        pools, (inputs, _, *angles) = pools_of(sequence, states, entries), feed(sequence, 124, 8)
    want = update_caches_ref(site.qa, site.kv, site.q_norm, site.kv_norm, site.cos, site.sin, memory, inputs, pools, *angles,
                             site.positions, EPS, True)
    pairs = [(qr, want), (window.unpack()[site.positions % 136], memory[site.positions % 136])]
    for p, keys in zip(pools, cache.entries if cache else (), strict=True):
        blocks = range(124 // sequence.ratio, 132 // sequence.ratio)
        pairs.append((type(keys)(*(t[list(blocks)] for t in keys)).unpack(), p.entries[list(blocks)]))
        assert same((p.kv_state, p.score_state), cache.states[len(pairs) - 3])
    assert len(pairs) == 2 + len(pools)
    for got, ours in pairs:
        assert (got == ours).double().mean() > 0.98
        assert ((got - ours).double().norm(dim=-1) <= 0.02 * ours.double().norm(dim=-1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_the_norms_weight_makes_infinite_spoils_its_block(rng, kind):
    """Nothing before it is: the sums of squares are finite, and no value is NaN. The window's second key has a zero there."""
    layer = Layer(rng, kind, 2, 127)
    site, sequence = layer.site, layer.sequence
    site.kv[:, 70], site.kv_norm[70] = torch.tensor([50.0, 0.0]), 3e38
    for p in sequence.pools if sequence else ():
        dim = 70 if p["d"] == 512 else 5
        p["kv"][:, dim :: p["d"]], p["norm"][dim] = 50, 3e38
    key = kv_norm_rope(site.kv.bfloat16(), site.kv_norm, site.cos, site.sin, EPS, False)
    assert key[0].isinf().nonzero().tolist() == [[70]] and not key.isnan().any()
    _, window, cache = layer.run()
    for keys, n in [(window, 127), *((keys, 127 // sequence.ratio) for keys in (cache.entries if cache else ()))]:
        values, scales = (t[n] for t in keys)
        if isinstance(keys, Keys):
            assert scales.eq(255).nonzero().tolist() == [[1]] and (values[64:128] == 0x7F).all()
            assert keys.unpack()[n].isnan().nonzero().flatten().tolist() == list(range(64, 128))
        else:  # Hadamard's transform spreads it over the whole key
            assert (scales == 255).all() and (values == 0).all()
    assert window.unpack()[128].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_one_launch(rng, kind, monkeypatch):
    calls = []
    monkeypatch.setattr(Kernel, "__call__", lambda self, **values: calls.append((self.name, values["ratio"])))
    Layer(rng, kind, 2, 7).run()
    assert calls == [("update_caches", KINDS[kind][0] if KINDS[kind] else 0)]


def test_on_an_h200_a_block_fits_beside_those_of_linear(nvcc, kernel_cache):
    """By an SM's 65,536 registers: an SWA or HCA layer's beside two blocks of `linear`, a CSA layer's beside one (update_caches.cu)."""
    def entries(name):
        """Entry -> registers that a thread is given."""
        return {e.entry: -(-e.registers // 8) * 8 for e in build.usage(build.build(name, "sm_90a"))}

    (of_linear,) = (256 * n for n in entries("linear").values())
    ours = entries("update_caches")
    assert sorted(entry.split("kernelILi")[1].split("E")[0] for entry in ours) == ["0", "128", "4"]
    for entry, registers in ours.items():
        beside, threads = (1, 256) if "kernelILi4E" in entry else (2, 128)
        assert beside * of_linear + threads * registers <= 65536, entry


def test_pools_that_no_layer_has(rng):
    layer = Layer(rng, "HCA", 2, 200)
    cache = Cache(layer.sequence)
    inputs, _, cos, sin = feed(layer.sequence, 200, 2)
    pools = pools_of(layer.sequence, cache.states, cache.entries)
    for more, most in ((inputs * 2, pools * 2), (inputs, ())):
        with emulated(), pytest.raises(UserError, match="update_caches: expected no pool, one of ratio 128, or one or two of 4"):
            layer.site.call(layer.site.window, EPS, True, more, most, cos, sin)
    three = Layer(rng, "CSA", 2, 200)
    cache = Cache(three.sequence)
    inputs, _, cos, sin = feed(three.sequence, 200, 2)
    pools = pools_of(three.sequence, cache.states, cache.entries)
    with emulated(), pytest.raises(UserError, match="one or two of 4.*found ape_0 .4, 1024. float32, ape_1 .4, 256. float32, ape_2"):
        three.site.call(three.site.window, EPS, True, (*inputs, inputs[0]), (*pools, pools[0]), cos, sin)
    assert all((t == 0x5A).all() for keys in cache.entries for t in keys) and isinstance(cache.entries[1], IndexKeys)
