"""Steps of more than 8 tokens on the CPU emulator: each kernel gives a token what it has in a step of 8 or less, which its own tests hold
to the definition; attention and the products, which sum in another order, are held to theirs."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels import attention as attention_module
from dsv4.kernels import experts, front, indexer, linear, mhc, prompts
from dsv4.kernels import router as router_module
from dsv4.kernels.keys import Keys, Window, new_window
from dsv4.ops.indexer import select_entries_ref
from dsv4.ops.linear import matmul_fp32

from ..emulator.emulator import ON_GPU, emulated, needs_gxx
from . import compare, test_compress, test_index_scores, test_latents, test_mhc_pre
from .test_attention import Case as AttentionCase
from .test_attention import R, W, nans, put
from .test_attention import assert_as_good as attention_as_good
from .test_compress import feed, pools_of, same
from .test_moe import LIMIT, assert_as_good, choice, layer
from .test_update_caches import KINDS, Layer
from .weights import any_weight

pytestmark = needs_gxx
no_wgmma = pytest.mark.skipif(ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
                              reason="this GPU has no wgmma")
TOKENS = pytest.mark.parametrize("S", [9, 16, 21])


def steps(S):
    return [slice(i, min(i + 8, S)) for i in range(0, S, 8)]


def assert_steps(together, parts):
    """`parts`: of each 8 tokens."""
    together = together if isinstance(together, tuple) else (together,)
    parts = [part if isinstance(part, tuple) else (part,) for part in parts]
    for whole, *rows in zip(together, *parts, strict=True):
        assert torch.equal(whole, torch.cat(rows))


@TOKENS
@pytest.mark.parametrize("pending", [None, 0, 2])
def test_mhc_pre_and_hc_head(rng, S, pending):
    D = 200
    X, site, constants = test_mhc_pre.random_streams(rng, S, D), test_mhc_pre.random_site(rng, D), test_mhc_pre.CONSTANTS
    last = None if pending is None else test_mhc_pre.random_pending(rng, S, D)
    if pending:
        last = last._replace(o=torch.randn(pending, S, D, generator=rng))

    def part(at):
        return last and last._replace(o=last.o[..., at, :].contiguous(), post=last.post[at], comb=last.comb[at])

    fn, base, scale, norm = site
    of_head = fn[:4].contiguous(), base[:4], scale[:1], norm
    eps = {name: constants[name] for name in ("norm_eps", "hc_eps")}
    with emulated():
        assert_steps(mhc.mhc_pre(X, last, *site, **constants), [mhc.mhc_pre(X[s], part(s), *site, **constants) for s in steps(S)])
        assert_steps(mhc.hc_head(X, *of_head, **eps), [mhc.hc_head(X[s], *of_head, **eps) for s in steps(S)])


@TOKENS
def test_router(rng, S):
    x, gate, bias = torch.randn(S, 40, generator=rng).bfloat16(), torch.randn(12, 40, generator=rng) / 6, torch.randn(12, generator=rng)
    table, ids = torch.randint(12, (50, 3), generator=rng), torch.randint(50, (S,), generator=rng)
    with emulated():
        for selection in ({"bias": bias}, {"table": table, "ids": ids}):
            def run(at, selection=selection):
                return router_module.router(x[at], gate, 3, 2.5, **{k: v[at] if k == "ids" else v for k, v in selection.items()})
            for _ in range(2):  # the counters are at 0 again
                assert_steps(run(slice(S)), [run(s) for s in steps(S)])


@TOKENS
def test_index_scores_and_select_entries(rng, S):
    """Tokens that see more than top_k entries and, in the first step, tokens that do not."""
    *query, keys, positions = test_index_scores.site(rng, S, 40, capacity=43)
    visible = ((positions + 1) // 4).tolist()
    for top_k in (7, 37):
        with emulated():
            scores = indexer.index_scores(*query, keys, positions, top_k, True)
            parts = [indexer.index_scores(*(t[s] for t in query), keys, positions[s], top_k, True) for s in steps(S)]
            chosen = indexer.select_entries(scores, positions, 4, top_k)
            assert_steps(chosen, [indexer.select_entries(part, positions[s], 4, top_k) for part, s in zip(parts, steps(S), strict=True)])
        for row, of_step, n in zip(scores, torch.cat(parts), visible, strict=True):
            assert n <= top_k or torch.equal(row[:n], of_step[:n])


def test_select_entries_of_64_blocks_a_token(rng):
    scores, positions = torch.randn(9, 16500, generator=rng), 4 * 16500 - 9 + torch.arange(9)
    with emulated():
        assert torch.equal(indexer.select_entries(scores, positions, 4, 64), select_entries_ref(scores, positions, 4, 64))


def with_long(keys, rows):
    """The ring, and beside it a longer one of other bytes."""
    return Window(*(t.clone() for t in keys), *(torch.full((rows, t.shape[1]), 0x5A, dtype=torch.uint8) for t in keys))


@TOKENS
@pytest.mark.parametrize("kind", KINDS)
def test_update_caches(rng, kind, S):
    """Blocks of 4 and one of 128 close in the second step; both rings end within it."""
    layer, whole = Layer(rng, kind, S, 131 if "CSA" in kind else 119), slice(0, S)
    site, results = layer.site, []
    for cuts in ([whole], steps(S)):
        window, cache = with_long(site.window, W + 21), layer.sequence and test_compress.Cache(layer.sequence)
        rows = []
        for at in cuts:
            part = test_latents.Site(rng, S=at.stop - at.start)
            for name in ("qa", "kv", "cos", "sin", "positions"):
                setattr(part, name, getattr(site, name)[at])
            part.q_norm, part.kv_norm, beside = site.q_norm, site.kv_norm, ()
            if cache:
                inputs, _, cos, sin = feed(layer.sequence, layer.sequence.first + at.start, at.stop - at.start)
                beside = inputs, pools_of(layer.sequence, cache.states, cache.entries), cos, sin
            with emulated():
                rows.append(part.call(window, test_latents.EPS, True, *beside))
        results.append((torch.cat(rows), window, cache.tensors() if cache else ()))
    (qr, window, cache), (qr_too, window_too, cache_too) = results
    assert torch.equal(qr, qr_too) and same(window, window_too) and same(cache, cache_too)
    test_latents.check(site, qr, Keys(*window[:2]))
    if cache:  # a definition in one step leaves other rows behind a closed block
        test_compress.check(layer.sequence, _cache(layer, cache), [at.stop - at.start for at in steps(S)])
    p, others = site.positions, torch.ones(W + 21, dtype=torch.bool)
    others[p % (W + 21)] = False
    for ring, longer in zip(window[:2], window[2:], strict=True):
        assert torch.equal(longer[p % (W + 21)], ring[p % R]) and (longer[others] == 0x5A).all()


def _cache(layer, tensors):
    """The tensors of a Cache as one again."""
    cache, tensors = test_compress.Cache(layer.sequence), list(tensors)
    n = len(cache.states)
    cache.states = [tuple(tensors[2 * i : 2 * i + 2]) for i in range(n)]
    cache.entries = [type(e)(*tensors[2 * (n + i) : 2 * (n + i) + 2]) for i, e in enumerate(cache.entries)]
    return cache


class LongCase(AttentionCase):
    """Attention's inputs whose keys lie in a long ring; the short one, which these steps do not look at, is NaN."""

    def __init__(self, rng, *, S, position, chunk, **how):
        super().__init__(rng, S=S, position=position, **how)
        self.rows = W + chunk
        held = nans(self.rows)
        seen = torch.arange(max(0, position - W + 1), position + S)
        put(held, seen % self.rows, torch.randn(len(seen), 512, generator=rng))
        self.window, self.held = Window(*nans(R), *held), held

    def keys(self, s):
        t = int(self.positions[s])
        keys = self.held.unpack()[torch.arange(max(0, t - W + 1), t + 1) % self.rows]
        if self.entries is None:
            return keys
        rows = slice((t + 1) // self.ratio) if self.selected is None else self.selected[s][self.selected[s] >= 0]
        return torch.cat((keys, self.entries.unpack()[rows]))


@TOKENS
@pytest.mark.parametrize("position", [0, 3, 126, 300])
@pytest.mark.parametrize("kind", ["SWA", "CSA", "HCA"])
def test_attention(rng, S, position, kind):
    how = {"SWA": {}, "CSA": {"ratio": 4, "top_k": 20}, "HCA": {"ratio": 128}}[kind]
    case = LongCase(rng, S=S, position=position, chunk=21, H=2, **how)
    with emulated():
        got = attention_module.attention(*case.arguments()).unflatten(1, (-1, 512))
    case.window = case.held  # for the definition: one ring
    attention_as_good(got, case)


def test_new_window(rng):
    for chunk, rows in ((1, 1), (8, 8)):
        window = new_window(W, chunk, 512, torch.bfloat16, "cpu")
        assert type(window) is Keys and len(window.values) == W + rows
    window = new_window(W, 100, 512, torch.bfloat16, "cpu")
    assert [t.shape for t in window] == [(W + 8, 576), (W + 8, 8), (W + 100, 576), (W + 100, 8)]


@no_wgmma
@TOKENS
def test_products(rng, S):
    """Weights of several formats and both orders of columns, widths that are no multiple of 8; one; and groups."""
    weights = [any_weight(rng, kind, rows, 224) for kind, rows in (("fp8", 40), ("plain", 33), ("nvfp4", 64), ("plain", 8))]
    x, packed = torch.randn(S, 224, generator=rng).bfloat16(), linear.pack_weights(tuple(weights))
    with emulated():
        many = front.projections(x, packed, ("bf16",) * 4)
        ones = [front.linear(x, linear.pack_weights((w,))) for w in weights[::2]]
    for got, weight in zip((*many, *ones), (*weights, *weights[::2]), strict=True):
        assert got.dtype == (torch.bfloat16 if any(got is one for one in ones) else torch.float32)
        w = weight.dequantize().double()
        compare.assert_as_good(got, matmul_fp32(x, weight).to(got.dtype), x.double() @ w.T, roundings=4, scale=x.double().abs() @ w.abs().T)
    weight, x = any_weight(rng, "fp8", 48, 128, block=(8, 128)), torch.randn(S, 3, 128, generator=rng).bfloat16()
    with emulated():
        got = front.grouped_linear(x, linear.pack_weights((weight,)))
    terms, w = "mgk,grk->mgr", weight.dequantize().view(3, 16, 128)
    scale = torch.einsum(terms, x.double().abs(), w.double().abs())
    compare.assert_as_good(got, torch.einsum(terms, x.float(), w).bfloat16(), torch.einsum(terms, x.double(), w.double()), 4, scale)


@no_wgmma
@TOKENS
def test_moe(rng, S):
    parts, x, (chosen, weights) = layer(rng, 96, 64, 5, "nvfp4", "fp8"), torch.randn(S, 96, generator=rng).bfloat16(), choice(rng, S, 2, 5)
    with emulated():
        got = front.moe(x, experts.pack_experts(*parts), chosen, weights, LIMIT)
    assert_as_good(got, x, *parts, chosen, weights)


def test_8_tokens_stream_the_weights_and_9_share_them(rng, monkeypatch):
    called = []
    for module, names in ((linear, ("projections", "linear", "grouped_linear")), (experts, ("moe",)), (prompts, (
            "projections", "linear", "grouped_linear", "moe"))):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, at=module, name=name: called.append((at, name)) or (None,))
    monkeypatch.setattr(front, "_arranged", lambda *_: None)
    packed = linear.pack_weights((any_weight(rng, "plain", 16, 64),))
    for S in (8, 9):
        x = torch.zeros(S, 64).bfloat16()
        front.projections(x, packed, ("bf16",)), front.linear(x, packed), front.grouped_linear(x[:, None], packed)
        front.moe(x, None, None, None, LIMIT)
    names = ("projections", "linear", "grouped_linear", "moe")
    assert called == [*((experts if name == "moe" else linear, name) for name in names), *((prompts, name) for name in names)]


def test_what_is_refused(rng):
    packed = linear.pack_weights((any_weight(rng, "plain", 16, 64),))
    with pytest.raises(UserError, match=r"linear: expected x of up to 1024 tokens, found x \[1025, 64\]"):
        front.linear(torch.zeros(1025, 64).bfloat16(), packed)
    for call in (lambda x: front.linear(x, packed, "fp8"), lambda x: front.projections(x, packed, ("nvfp4",)),
                 lambda x: front.moe(x, None, None, None, LIMIT, "bf16", "fp8")):
        with pytest.raises(UserError, match="expected bf16 activations, found .*: run with --backend torch"):
            call(torch.zeros(9, 64).bfloat16())
    case = LongCase(rng, S=9, position=0, chunk=7)
    with pytest.raises(UserError, match="attention: expected a long window of at least 128 . 9 - 1 rows"):
        attention_module.attention(*case.arguments())
    case.window = case.held
    with pytest.raises(UserError, match="attention: expected q .*S 1 to 8"):
        attention_module.attention(*case.arguments())
