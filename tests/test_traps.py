"""The known traps that only show in a whole layer, each named after its number in docs/design.md. Those of one operation are in its file.

The definition here is the layer's own, in float64, one query at a time with explicit lists of keys (model.md sections 4 to 8). It can
also be told to make a mistake: a test holds the layer to the right one and sees that the wrong ones are far away.
"""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.cache import LayerCache
from dsv4.layers import Binder, Numerics
from dsv4.layers.attention import Attention
from dsv4.layers.mhc import Head, HyperConnection, Streams
from dsv4.layers.moe import MoE
from dsv4.layers.step import Rope, Step
from dsv4.ops import fp4_round_trip, fp8_round_trip, hadamard, indexer
from tests.memory_checkpoint import CPU, model_of, random_checkpoint
from tests.ops.test_experts import slow_expert, slow_matvec
from tests.ops.test_mhc import slow_head, slow_post, slow_pre
from tests.ops.test_rope import slow_frequencies
from tests.ops.test_router import slow_router

S = 270  # two HCA entries and a part, 67 CSA entries and a part, many windows of 16
LAYERS = {0: 1, 4: 2, 128: 3}  # ratio -> a layer of it in the config "small"
# fp32 against float64 through five matrices: measured 2e-6 on outputs of up to 2; the mildest mistake makes 1e-2.
TOLERANCE = 5e-5
FAR = 2e-3


def rms(v, weight=1.0):
    return v * (v.square().mean(-1, keepdim=True) + 1e-6) ** -0.5 * weight


def turn(v, positions, frequencies, back=False):
    """Complex rotation of neighbouring pairs at the end of the last axis of v [n, ..., d] by its row's position."""
    angles = torch.tensor([[p * f for f in frequencies] for p in positions], dtype=torch.float64)
    z = torch.polar(torch.ones_like(angles), -angles if back else angles)
    z = z.view(len(positions), *[1] * (v.dim() - 2), len(frequencies))
    n = 2 * len(frequencies)
    pairs = torch.view_as_complex(v[..., -n:].contiguous().unflatten(-1, (-1, 2)))
    return torch.cat((v[..., :-n], torch.view_as_real(pairs * z).flatten(-2)), -1)


def pooled(kv, score, ape, r, swapped):
    """One entry per full block, from the list of its slots."""
    d = kv.shape[1] // 2 if r == 4 else kv.shape[1]
    halves = (slice(d, 2 * d), slice(0, d)) if swapped else (slice(0, d), slice(d, 2 * d))
    score = score + torch.stack([ape[t % r] for t in range(len(kv))])
    out = []
    for s in range(len(kv) // r):
        own = range(s * r, s * r + r)
        slots = [(t, halves[1] if r == 4 else slice(None)) for t in own]
        if r == 4 and s:
            slots += [(t - 4, halves[0]) for t in own]
        p = torch.stack([score[t, c] for t, c in slots]).softmax(0)
        out.append((p * torch.stack([kv[t, c] for t, c in slots])).sum(0))
    return torch.stack(out)


def by_definition(checkpoint, layer, x, *, q_norm=True, sink=lambda s: s, output_position=lambda t: t, base=None, window=0, early=0,
                  swapped=False, entry_at=0, last_limit=False):
    """(the attention layer's output [S, D], which rows have no near-tie in the indexer's choice). The options are mistakes."""
    c, r = checkpoint.config, checkpoint.config.compress_ratios[layer]
    dims, x = c.qk_rope_head_dim, x.double()
    plain = slow_frequencies(dims, c.rope_theta)
    yarn = slow_frequencies(dims, c.compress_rope_theta, c.rope_factor, c.rope_original_length, c.rope_beta_fast, c.rope_beta_slow)
    kinds = dict.fromkeys(("qk", "entries", "index"), yarn if r else plain) | {part: {"plain": plain, "yarn": yarn}[kind]
                                                                              for part, kind in (base or {}).items()}

    def get(name):
        return checkpoint.state[f"layers.{layer}.attn.{name}"].double()

    def compressed(prefix, frequencies):
        kv, score = x @ get(prefix + "wkv.weight").T, x @ get(prefix + "wgate.weight").T
        entries = rms(pooled(kv, score, get(prefix + "ape"), r, swapped), get(prefix + "norm.weight"))
        return turn(entries, [s * r + entry_at for s in range(len(entries))], frequencies)

    n, H, d = len(x), c.num_attention_heads, c.head_dim
    positions = list(range(n))
    qr = rms(x @ get("wq_a.weight").T, get("q_norm.weight"))
    q = (qr @ get("wq_b.weight").T).view(n, H, d)
    q = turn(rms(q) if q_norm else q, positions, kinds["qk"])
    k = turn(rms(x @ get("wkv.weight").T, get("kv_norm.weight")), positions, kinds["qk"])
    if r:
        entries = compressed("compressor.", kinds["entries"])
    if r == 4:
        iq = turn((qr @ get("indexer.wq_b.weight").T).view(n, c.index_n_heads, c.index_head_dim), positions, kinds["index"])
        ik = compressed("indexer.compressor.", kinds["index"])
        weights = x @ get("indexer.weights_proj.weight").T / math.sqrt(c.index_head_dim * c.index_n_heads)
    out, clear = [], []
    for t in positions:
        keys, certain = k[max(0, t - c.sliding_window + 1 - window) : t + 1], True
        if r:
            visible = min(((n if last_limit else t + 1) + early) // r, len(entries))
            chosen = list(range(visible))
            if r == 4 and visible > c.index_topk:
                score = weights[t] @ torch.relu(iq[t] @ ik[:visible].T)
                chosen = sorted(chosen, key=lambda s: -score[s])
                certain = bool(score[chosen[c.index_topk - 1]] - score[chosen[c.index_topk]] > 1e-5)  # fp32 noise is 1e-6
                chosen = chosen[: c.index_topk]
            keys = torch.cat((keys, entries[chosen]))
        extra = sink(get("attn_sink"))
        a = torch.cat((q[t] @ keys.T / math.sqrt(d), extra[:, None]), 1).softmax(1)[:, :-1]
        out.append(a @ keys)
        clear.append(certain)
    o = turn(torch.stack(out), [output_position(t) for t in positions], kinds["qk"], back=True)
    groups = o.reshape(n, c.o_groups, -1)
    wo_a = get("wo_a.weight").view(c.o_groups, -1, groups.shape[-1])
    z = torch.cat([groups[:, g] @ wo_a[g].T for g in range(c.o_groups)], 1)
    return z @ get("wo_b.weight").T, torch.tensor(clear)


class Layer:
    """The package's attention layer over a cache, fed in pieces."""

    def __init__(self, checkpoint, layer, context=S, kv_quant=False):
        self.config = checkpoint.config
        self.attention = Attention(Binder(checkpoint, f"layers.{layer}.attn.", CPU, Numerics(kv_quant=kv_quant)), self.config, layer)
        self.cache, self.rope = LayerCache(self.config, layer, context, context, torch.float32, CPU), Rope(self.config)

    def __call__(self, x, pieces=None, position=0):
        out = []
        for piece in x.split(pieces or [len(x)]):
            step = Step.at(torch.arange(position, position + len(piece)), torch.zeros(len(piece), dtype=torch.long), self.rope)
            out.append(self.attention(piece, step, self.cache))
            position += len(piece)
        return torch.cat(out)


@pytest.fixture
def checkpoint(seed):
    return random_checkpoint("small", seed)


@pytest.fixture
def x(checkpoint, rng):
    return torch.randn(S, checkpoint.config.hidden_size, generator=rng)


def close(got, right, rows=None):
    want, clear = right
    if rows is not None:
        want, clear = want[rows], clear[rows]
    assert clear.float().mean() > 0.9  # a near-tie of the indexer may go either way; they are rare
    assert (got - want)[clear].abs().max() < TOLERANCE


def distance(got, wrong, rows=slice(None)):
    return (got - wrong[0][rows])[wrong[1][rows]].abs().max()


MISTAKES = {
    "test_trap_04 no norm of q": (0, 4, 128, {"q_norm": False}),
    "test_trap_05 sink scaled like a score": (0, 4, 128, {"sink": lambda s: s / 8}),
    "test_trap_05 no sink": (0, 4, 128, {"sink": lambda s: torch.full_like(s, float("-inf"))}),
    "test_trap_06 output not turned back": (0, 4, 128, {"output_position": lambda t: 0}),
    "test_trap_06 turned back by another position": (0, 4, 128, {"output_position": lambda t: t - t % 4}),
    "test_trap_07 plain base for q and k": (4, 128, {"base": {"qk": "plain"}}),
    "test_trap_07 plain base for entries": (4, 128, {"base": {"entries": "plain"}}),
    "test_trap_07 plain base for the indexer": (4, {"base": {"index": "plain"}}),
    "test_trap_07 YaRN in a window layer": (0, {"base": {"qk": "yarn"}}),
    "test_trap_08 window of W + 1": (0, 4, 128, {"window": 1}),
    "test_trap_08 window of W - 1": (0, 4, 128, {"window": -1}),
    "test_trap_08 entry one token early": (4, 128, {"early": 1}),
    "test_trap_08 entry one token late": (4, 128, {"early": -1}),
    "test_trap_09 halves of the channels swapped": (4, {"swapped": True}),
    "test_trap_09 entry at the previous block": (4, {"entry_at": -4}),
    "test_trap_25 all queries with the last one's limit": (4, 128, {"last_limit": True}),
}


@pytest.mark.parametrize("ratio", LAYERS)
def test_the_attention_layer_is_its_definition_and_none_of_the_mistakes(checkpoint, x, ratio):
    """Traps 4 to 9 and 25 in the place where they bite; `MISTAKES` names them."""
    got = Layer(checkpoint, LAYERS[ratio])(x)
    close(got, by_definition(checkpoint, LAYERS[ratio], x))
    for name, (*ratios, mistake) in MISTAKES.items():
        if ratio in ratios:
            assert distance(got, by_definition(checkpoint, LAYERS[ratio], x, **mistake)) > FAR, name


@pytest.mark.parametrize("ratio,edges", [(0, (14, 15, 16, 17)), (4, (2, 3, 4, 6, 7, 8)), (128, (126, 127, 128, 254, 255, 256))])
def test_trap_08_visibility_at_the_edges(checkpoint, x, ratio, edges):
    """Entry s from t = (s + 1) r - 1 on, the block's last token included; the window of 16 loses key 0 at t = 16."""
    got = Layer(checkpoint, LAYERS[ratio])(x)
    right = by_definition(checkpoint, LAYERS[ratio], x)
    changes = [({"window": 1}, (16,)), ({"window": -1}, (15,))] if ratio == 0 else [
        ({"early": 1}, [t for t in edges if (t + 2) % ratio == 0]), ({"early": -1}, [t for t in edges if (t + 1) % ratio == 0])]
    for t in edges:
        assert (got - right[0])[t].abs().max() < TOLERANCE, t
    for mistake, first in changes:
        wrong = by_definition(checkpoint, LAYERS[ratio], x, **mistake)[0]
        for t in first:
            assert (got - wrong)[t].abs().max() > FAR / 10, (mistake, t)  # one key of 2 to 20 more or less
        for t in set(edges) - set(first):
            if t < 16 or ratio:
                assert (right[0] - wrong)[t].abs().max() < 1e-12, (mistake, t)


@pytest.mark.parametrize("ratio", LAYERS)
def test_trap_06_the_output_is_turned_back_by_the_querys_own_position_in_every_piece(checkpoint, x, ratio):
    """A piece that starts at 37 or 129 knows where it is; turning by the place inside the piece would be far off."""
    pieces = [37, 92, 1, 129, 11]
    got = Layer(checkpoint, LAYERS[ratio])(x, pieces)
    close(got, by_definition(checkpoint, LAYERS[ratio], x))
    starts = [0, 37, 129, 130, 259]
    wrong = by_definition(checkpoint, LAYERS[ratio], x, output_position=lambda t: t - max(s for s in starts if s <= t))
    assert distance(got, wrong) > FAR


@pytest.mark.parametrize("ratio", [4, 128])
def test_trap_10_compressor_state_after_a_prefill_of_any_length_and_a_short_prompt(checkpoint, x, ratio):
    right = by_definition(checkpoint, LAYERS[ratio], x)
    layer = Layer(checkpoint, LAYERS[ratio])
    firsts = (1, 2, 3, 5, 6, 7, 30) if ratio == 4 else (1, 3, 5, 127, 129, 130, 255)
    for first in firsts:  # the same cache again and again: each run starts a new sequence
        layer.cache.reset()
        stop = min(S, first + 140)  # past the next block's end
        got = layer(x[:stop], [first, 2, 1, 1, 1, stop - first - 5])
        close(got, right, slice(0, stop))
    for short in (1, 2, 3):  # shorter than a block: the last sequence's rows must not be pooled
        layer.cache.reset()
        close(layer(x[: short + 9], [short, *[1] * 9]), right, slice(0, short + 9))


@pytest.mark.parametrize("ratio", LAYERS)
def test_trap_25_queries_of_one_piece_do_not_see_what_comes_after_them(checkpoint, x, rng, ratio):
    """Other tokens from place p on change nothing before p: neither by the mask, the top-k, nor by the set of entries gathered."""
    first = Layer(checkpoint, LAYERS[ratio])(x)
    for p in (5, 128, 200, 255):
        other = torch.cat((x[:p], torch.randn(S - p, x.shape[1], generator=rng)))
        got = Layer(checkpoint, LAYERS[ratio])(other)
        assert (got[:p] - first[:p]).abs().max() < 1e-5  # another set of gathered entries sums in another order
        assert (got[p] - first[p]).abs().max() > FAR


def test_trap_25_last_row_of_every_prompt_length_is_the_row_of_the_long_prompt(checkpoint, rng):
    """The whole model: logits after n tokens, prefilled alone, are row n - 1 of the prefill of all."""
    model = model_of(checkpoint, S)
    ids = torch.randint(0, checkpoint.config.vocab_size, (S,), generator=rng).tolist()
    rows = model.forward(ids, model.new_cache(), "all")
    differences = torch.stack([(model.forward(ids[:n], model.new_cache()) - rows[n - 1]).abs().max() for n in
                               (1, 2, 3, 4, 5, 15, 16, 17, 127, 128, 129, 255, 256, 257)])
    # fp32 in other shapes makes 1e-5 on logits of order 1. One near-tie (1e-5 apart) of experts or entries may flip: about 0.04 then.
    assert (differences > 1e-4).sum() <= 1


def test_trap_27_with_64_index_heads_one_by_one_and_at_once_agree(checkpoint, x):
    """Few heads make exact zeros that tie; 64 do not, and 67 entries are cut to 4 the same way however they were fed."""
    layer = Layer(checkpoint, LAYERS[4])
    assert checkpoint.config.index_n_heads == 64
    close(layer(x, [1] * S), by_definition(checkpoint, LAYERS[4], x))


def test_trained_quantisers_stand_where_the_model_was_trained_with_them(checkpoint, x, monkeypatch):
    """kv_quant: FP8 on the non-rotary dims of window keys and entries, Hadamard then FP4 on all dims of index q and k; off: neither."""
    queries, scores = [], indexer.weighted_relu
    monkeypatch.setattr(indexer, "weighted_relu", lambda q, *rest: (queries.append(q), scores(q, *rest))[1])
    on, off = Layer(checkpoint, LAYERS[4], kv_quant=True), Layer(checkpoint, LAYERS[4])
    on(x), off(x)
    assert torch.equal(queries[0], fp4_round_trip(hadamard(queries[1])))
    plain = checkpoint.config.head_dim - checkpoint.config.qk_rope_head_dim
    count = S // 4
    for got, exact in ((on.cache.window[:S], off.cache.window[:S]), (on.cache.main.entries[:count], off.cache.main.entries[:count])):
        assert torch.equal(got[:, :plain], fp8_round_trip(exact[:, :plain], 64)) and torch.equal(got[:, plain:], exact[:, plain:])
        assert not torch.equal(got, exact)
    assert torch.equal(on.cache.index.entries[:count], fp4_round_trip(hadamard(off.cache.index.entries[:count])))


def moe_by_definition(checkpoint, layer, x, ids, *, uniform=False, clamp_after=False, limit_shared=True):
    """The MoE of a hash layer, token by token."""
    c = checkpoint.config

    def weights(prefix):
        return tuple(checkpoint.state[f"layers.{layer}.ffn.{prefix}.{w}.weight"].double().tolist() for w in ("w1", "w2", "w3"))

    def expert(row, tables, weight=1.0, limit=c.swiglu_limit):
        if not clamp_after:
            return slow_expert(row, *tables, limit, weight)
        w1, w2, w3 = tables
        a = [weight * min(g / (1 + math.exp(-g)), limit) * max(-limit, min(limit, u))
             for g, u in zip(slow_matvec(w1, row), slow_matvec(w3, row), strict=True)]
        return slow_matvec(w2, a)

    tables = [weights(f"experts.{e}") for e in range(c.n_routed_experts)]
    chosen = checkpoint.state[f"layers.{layer}.ffn.gate.tid2eid"][ids].tolist()
    gate = checkpoint.state[f"layers.{layer}.ffn.gate.weight"].double().tolist()
    _, scores = slow_router(x.double().tolist(), gate, c.num_experts_per_tok, c.routed_scaling_factor, chosen=chosen)
    out = []
    for row, picks, ws in zip(x.double().tolist(), chosen, scores, strict=True):
        parts = [expert(row, weights("shared_experts"), limit=c.swiglu_limit if limit_shared else 1e9)]
        parts += [expert(row, tables[e], c.routed_scaling_factor / len(picks) if uniform else w) for e, w in zip(picks, ws, strict=True)]
        out.append([math.fsum(column) for column in zip(*parts, strict=True)])
    return torch.tensor(out)


def test_traps_11_and_12_in_a_hash_layer(checkpoint, rng):
    """Hash layers weigh by gathered scores; the clamp comes before silu, in the shared expert too."""
    c, layer = checkpoint.config, 0
    ids = torch.randint(0, c.vocab_size, (6,), generator=rng)
    x = torch.randn(6, c.hidden_size, generator=rng)
    got = MoE(Binder(checkpoint, f"layers.{layer}.ffn.", CPU, Numerics()), c, layer)(x, Step.at(torch.arange(11, 17), ids, Rope(c)))
    assert (got - moe_by_definition(checkpoint, layer, x, ids)).abs().max() < TOLERANCE
    for mistake in ({"uniform": True}, {"clamp_after": True}, {"limit_shared": False}):
        assert (got - moe_by_definition(checkpoint, layer, x, ids, **mistake)).abs().max() > 10 * FAR, mistake


def test_traps_02_and_03_around_a_block(checkpoint, rng):
    """X' = post f(pre X) + comb^T X, with the streams from before the block; not comb X, and no residual beside it."""
    c = checkpoint.config
    X = torch.randn(3, c.hc_mult, c.hidden_size, generator=rng)
    site = HyperConnection(Binder(checkpoint, "layers.2.", CPU, Numerics()), c, "ffn")
    got = site(Streams(X), lambda x: torch.tanh(x) + 1).settled()
    weights = [checkpoint.state[f"layers.2.hc_ffn_{part}"].double().tolist() for part in ("fn", "base", "scale")]
    for s in range(3):
        x, post, comb = slow_pre(X[s].double().tolist(), *weights, c.hc_sinkhorn_iters)
        o = (torch.tanh(rms(torch.tensor(x, dtype=torch.float64), checkpoint.state["layers.2.ffn_norm.weight"].double())) + 1).tolist()
        assert (got[s] - torch.tensor(slow_post(o, X[s].double().tolist(), post, comb))).abs().max() < TOLERANCE
        transposed = [list(row) for row in zip(*comb, strict=True)]
        assert (got[s] - torch.tensor(slow_post(o, X[s].double().tolist(), post, transposed))).abs().max() > FAR


def test_trap_01_the_head_collapses_by_hc_head_then_norms_then_multiplies_in_fp32(checkpoint, rng):
    c = checkpoint.config
    X = torch.randn(2, c.hc_mult, c.hidden_size, generator=rng)
    got = Head(Binder(checkpoint, "", CPU, Numerics()), c)(X)
    weights = [checkpoint.state[f"hc_head_{part}"].double().tolist() for part in ("fn", "base", "scale")]
    norm, head = checkpoint.state["norm.weight"].double(), checkpoint.state["head.weight"].double()
    for s in range(2):
        collapsed = torch.tensor(slow_head(X[s].double().tolist(), *weights), dtype=torch.float64)
        assert (got[s] - rms(collapsed, norm) @ head.T).abs().max() < TOLERANCE
        for wrong in (X[s, 0], X[s].mean(0)):
            assert (got[s] - rms(wrong.double(), norm) @ head.T).abs().max() > 10 * FAR
