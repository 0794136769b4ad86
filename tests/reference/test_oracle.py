"""The oracle's forward: against transformers at every prompt length, against deliberate mistakes, and part by part."""

import ast
import copy
import math
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from reference import oracle
from reference.oracle import Quantisers
from tests.hf import hf_configs, hf_model, native_state, redraw

# Measured over lengths 1..300: 8.3e-6 (small), 3.8e-6 (real_dims), 6.6e-6 (odd), with logits of standard deviation 0.9.
# Summation order alone makes that; 1e-4 leaves room for another BLAS. The mildest mistake of MISTAKES makes 1.1.
# A near-tie of the indexer decided the other way makes about 0.04: if a machine shows one, do not widen this.
TOLERANCE = 1e-4
LENGTH = 300
NAMES = list(hf_configs())


@cache
def case(name):
    """(config, weights, ids [1,300], transformers' logits [1,300,V], its X after every layer, the model)."""
    model, config = hf_model(name, seed=0)
    ids = torch.randint(0, config["vocab_size"], (1, LENGTH), generator=torch.Generator().manual_seed(1))
    streams = []
    hooks = [layer.register_forward_hook(lambda m, a, out: streams.append(out)) for layer in model.model.layers]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return config, native_state(model).__getitem__, ids, logits, streams, model


def run(name, length=LENGTH, **options):
    config, weights, ids, *_ = case(name)
    with torch.no_grad():
        return oracle.forward(config, weights, ids[:, :length], **options)


def distance(name, length=LENGTH, **options):
    return (run(name, length, **options).logits - case(name)[3][:, :length]).abs().max().item()


@pytest.mark.parametrize("name", NAMES)
def test_every_length_1_to_300_equals_transformers(name):
    """Rows 0..S-1 of transformers' pass over 300 tokens are its answers for a prompt of S tokens (next test)."""
    worst = {S: distance(name, S) for S in range(1, LENGTH + 1)}
    S = max(worst, key=worst.get)
    print(f"{name}: max |dlogit| {worst[S]:.2e} at length {S}")
    assert worst[S] <= TOLERANCE, f"length {S}"


@pytest.mark.parametrize("name", NAMES)
def test_transformers_is_consistent_with_itself(name):
    *_, ids, logits, _, model = case(name)
    for S in (1, 2, 3, 4, 5, 16, 17, 18, 127, 128, 129, 255, 256):
        with torch.no_grad():
            short = model(ids[:, :S], use_cache=False).logits
        # Measured 5.2e-6; half of TOLERANCE is what the comparison above can spare.
        assert (short - logits[:, :S]).abs().max() <= TOLERANCE / 2, f"length {S}"


@pytest.mark.parametrize("name", NAMES)
def test_hidden_state_after_every_layer_equals_transformers(name):
    config, weights, ids, _, streams, _ = case(name)
    hidden = run(name).hidden
    assert len(hidden) == config["num_hidden_layers"] + 1 == len(streams) + 1
    assert torch.equal(hidden[0], weights("embed.weight")[ids][:, :, None].expand(-1, -1, 4, -1))
    for layer, (ours, theirs) in enumerate(zip(hidden[1:], streams, strict=True)):
        # Relative to the largest element of X (4 to 9 at the end). Measured at most 1.8e-6.
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max(), f"layer {layer}"


def test_batch_rows_are_independent():
    config, weights, *_ = case("small")
    ids = torch.randint(0, config["vocab_size"], (3, 150), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        together = oracle.forward(config, weights, ids).logits
        for row in range(3):
            alone = oracle.forward(config, weights, ids[row : row + 1]).logits[0]
            assert (together[row] - alone).abs().max() <= TOLERANCE


def test_layers_and_keep_hidden():
    config, weights, ids, *_ = case("small")
    full = run("small", 40)
    part = run("small", 40, layers=range(0, 2))
    assert len(part.hidden) == 3 and torch.equal(part.hidden[2], full.hidden[2])
    assert not torch.equal(part.logits, full.logits)
    bare = run("small", 40, keep_hidden=False)
    assert bare.hidden == [] and torch.equal(bare.logits, full.logits)


def test_moe_can_be_replaced():
    seen = []

    def spy(config, layer, w, x, ids):
        seen.append(layer)
        return oracle.moe(config, layer, w, x, ids)

    assert torch.equal(run("small", 20, moe=spy).logits, run("small", 20).logits)
    assert seen == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------------- deliberate mistakes must be seen

REAL = {name: getattr(oracle, name) for name in dir(oracle)}


def _uniform_hash(config, layer, w, x, ids):
    experts, weight = REAL["route"](config, layer, w, x, ids)
    if layer < config["num_hash_layers"]:
        weight = torch.full_like(weight, config["routed_scaling_factor"] / weight.shape[-1])
    return experts, weight


def _visible(S, ratio, shift):
    t, s = torch.arange(S)[:, None], torch.arange(S // ratio)[None]
    return s < (t + 1 + shift) // ratio


def _rope_two_halves(x, positions, f, inverse=False):
    rd = 2 * len(f)
    order = torch.cat([torch.arange(0, rd, 2), torch.arange(1, rd, 2)])
    keep, turn = x.split([x.shape[-1] - rd, rd], dim=-1)
    turned = torch.empty_like(turn)
    turned[..., order] = turn
    y = REAL["rope"](torch.cat([keep, turned], -1), positions, f, inverse)
    return torch.cat([y[..., :-rd], y[..., -rd:][..., order]], -1)


MISTAKES = {
    "stream 0 instead of hc_head": ("hc_head", lambda config, weights, X: X[:, :, 0]),
    "comb not transposed": ("mix_streams", lambda comb, X: torch.einsum("bskj,bsjd->bskd", comb, X)),
    "uniform hash weights": ("route", _uniform_hash),
    "window of W+1": ("window_mask", lambda S, W, device=None: REAL["window_mask"](S, W + 1, device)),
    "sink left out": ("sink_softmax", lambda scores, sink: scores.softmax(-1)),
    "no inverse RoPE": ("unrotate", lambda o, positions, f: o),
    "clamp after silu": ("swiglu", lambda g, u, limit: F.silu(g).clamp(max=limit) * u.clamp(-limit, limit)),
    "entry visible one token late": ("visible_entries", lambda S, r, device=None: _visible(S, r, -1)),
    "entry visible one token early": ("visible_entries", lambda S, r, device=None: _visible(S, r, 1)),
    # beyond what was asked for
    "gate clamped on both sides": (
        "swiglu",
        lambda g, u, limit: F.silu(g.clamp(-limit, limit)) * u.clamp(-limit, limit),
    ),
    "sink scaled": ("sink_softmax", lambda scores, sink: REAL["sink_softmax"](scores, sink * 64**-0.5)),
    "no unweighted norm of q": (
        "rms_norm",
        lambda x, weight, eps: x if weight is None else REAL["rms_norm"](x, weight, eps),
    ),
    "one RoPE base for all layers": (
        "rope_frequencies",
        lambda config, ratio, device=None: REAL["rope_frequencies"](config, 0, device),
    ),
    "RoPE without YaRN": (
        "rope_frequencies",
        lambda config, ratio, device=None: REAL["rope_frequencies"]({**config, "rope_scaling": None}, ratio, device),
    ),
    "RoPE on two halves": ("rope", _rope_two_halves),
    "CSA streams swapped": ("overlap", lambda z, fill: REAL["overlap"](torch.cat(z.chunk(2, -1)[::-1], -1), fill)),
    "indexer ignored": ("select_entries", lambda scores, visible, k: visible.expand_as(scores)),
    "weights not normalised": ("routing_weights", lambda scores, experts, factor: scores.gather(-1, experts) * factor),
    "no sinkhorn": ("sinkhorn", lambda C, iterations, eps: C.softmax(-1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_deliberate_mistake_is_seen(mistake, monkeypatch):
    """The comparison with transformers fails, by more than ten times its tolerance, for each single mistake."""
    function, wrong = MISTAKES[mistake]
    monkeypatch.setattr(oracle, function, wrong)
    wrong_by = distance("small")
    print(f"{mistake}: {wrong_by:.3f}")
    assert wrong_by > 10 * TOLERANCE


# --------------------------------------------------------------------------------------- part by part, by hand


def test_window_is_w_keys_with_the_query_itself():
    mask = oracle.window_mask(10, 4)
    for t in range(10):
        assert mask[t].nonzero().flatten().tolist() == list(range(max(0, t - 3), t + 1))


@pytest.mark.parametrize("ratio", [4, 128])
def test_entry_is_visible_from_the_token_that_closes_its_block(ratio):
    mask = oracle.visible_entries(3 * ratio + 1, ratio)
    assert mask.shape == (3 * ratio + 1, 3)
    assert [mask[t].sum().item() for t in (0, ratio - 2, ratio - 1, ratio)] == [0, 0, 1, 1]
    assert [mask[t].sum().item() for t in (2 * ratio - 2, 2 * ratio - 1, 3 * ratio - 1, 3 * ratio)] == [1, 2, 3, 3]
    assert mask[2 * ratio - 1].tolist() == [True, True, False]


def test_csa_pools_the_previous_first_half_and_the_own_second_half():
    z = torch.arange(2 * 4 * 6, dtype=torch.float32).reshape(1, 2, 4, 6)  # two blocks of 4 tokens, d = 3
    slots = oracle.overlap(z, -math.inf)
    assert slots.shape == (1, 2, 8, 3)
    assert torch.isneginf(slots[0, 0, :4]).all()
    assert torch.equal(slots[0, 0, 4:], z[0, 0, :, 3:])
    assert torch.equal(slots[0, 1, :4], z[0, 0, :, :3])
    assert torch.equal(slots[0, 1, 4:], z[0, 1, :, 3:])


@pytest.mark.parametrize("ratio", [4, 128])
def test_compressor_equals_a_loop_over_channels(ratio):
    """Entries written out with python loops: ape by position, softmax per channel, norm, RoPE at position s*r."""
    generator = torch.Generator().manual_seed(ratio)
    d, width = 6, 12 if ratio == 4 else 6
    config = {
        **hf_configs()["small"],
        "qk_rope_head_dim": 2,
        "rope_scaling": None,
    }
    names = {"wkv.weight": (width, 5), "wgate.weight": (width, 5), "ape": (ratio, width), "norm.weight": (d,)}
    w = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    x = torch.randn(1, 2 * ratio + 3, 5, generator=generator)
    got = oracle.compressor(config, w.__getitem__, x, ratio)
    assert got.shape == (1, 2, d)
    kv, gate = (x[0] @ w["wkv.weight"].T).double(), (x[0] @ w["wgate.weight"].T).double()
    for s in range(2):
        entry = []
        for c in range(d):
            if ratio == 4:
                slots = [(t, c) for t in range(4 * s - 4, 4 * s) if t >= 0] + [(4 * s + i, d + c) for i in range(4)]
            else:
                slots = [(128 * s + i, c) for i in range(128)]
            e = [math.exp(gate[t, ch] + w["ape"][t % ratio, ch]) for t, ch in slots]
            entry.append(sum(p * kv[t, ch].item() for p, (t, ch) in zip(e, slots, strict=True)) / sum(e))
        rms = math.sqrt(sum(v * v for v in entry) / d + 1e-6)
        entry = [v / rms * g.item() for v, g in zip(entry, w["norm.weight"], strict=True)]
        a, b = entry[-2:]
        angle = float(s * ratio)  # pair 0 turns by one radian per position
        entry[-2:] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
        # fp32 sums of up to 128 products against doubles: measured 3e-7.
        assert torch.allclose(got[0, s].double(), torch.tensor(entry, dtype=torch.float64), atol=1e-5)


def test_a_prompt_shorter_than_a_block_has_no_entry():
    config, weights, ids, *_ = case("small")
    x = torch.randn(1, 3, config["hidden_size"])
    w = oracle.under(weights, "layers.2.attn.compressor.")
    assert oracle.compressor(config, w, x, 4).shape == (1, 0, config["head_dim"])
    assert run("small", 3, kv_quant=True).logits.isfinite().all()


def test_sink_takes_weight_and_gives_no_value():
    scores = torch.tensor([[[[0.0, math.log(3.0), -math.inf]]]])
    p = oracle.sink_softmax(scores, torch.tensor([math.log(4.0)]))
    assert p.shape == scores.shape
    assert torch.allclose(p, torch.tensor([1 / 8, 3 / 8, 0.0]))
    assert oracle.sink_softmax(scores, torch.tensor([200.0])).max() < 1e-30  # a dominating sink: no overflow, no output


def test_comb_is_summed_over_its_first_index():
    comb = torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]])[None, None]  # stream j goes to j+1
    X = torch.randn(1, 1, 4, 8)
    post = torch.zeros(1, 1, 4)
    assert torch.equal(oracle.mhc_post(torch.ones(1, 1, 8), X, post, comb), X.roll(1, dims=2))


def test_sinkhorn_starts_with_a_row_softmax_and_ends_on_columns():
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) * 3
    once = oracle.sinkhorn(logits, 1, 0.0)
    rows = logits.exp() / logits.exp().sum(1, keepdim=True)
    assert torch.allclose(once, rows / rows.sum(0, keepdim=True), atol=1e-6)
    twice = oracle.sinkhorn(logits, 2, 0.0)
    assert torch.allclose(twice.sum(0), torch.ones(4), atol=1e-6)  # columns exact to rounding
    assert (twice.sum(1) - 1).abs().max() > 1e-3  # rows not yet
    assert (oracle.sinkhorn(logits, 20, 1e-6).sum(1) - 1).abs().max() < 1e-3


def test_swiglu_clamps_the_gate_from_above_only():
    gate, up = torch.tensor([-50.0, 20.0, 5.0]), torch.tensor([1.0, -30.0, 30.0])
    expected = torch.tensor([-50 / (1 + math.exp(50)), -10 * 10 / (1 + math.exp(-10)), 10 * 5 / (1 + math.exp(-5))])
    assert torch.allclose(oracle.swiglu(gate, up, 10.0), expected)


def test_routing_weights_come_from_the_scores_without_the_bias():
    config = {"num_hash_layers": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5}
    z = torch.tensor([0.5, -1.0, 2.0, 1.0])
    w = {
        "gate.weight": z[:, None],
        "gate.bias": torch.tensor([9.0, 8.0, 0.0, 0.0]),
        "gate.tid2eid": torch.tensor([[0, 1], [3, 1]]),
    }.__getitem__
    x, ids = torch.ones(1, 1), torch.tensor([1])
    score = [math.sqrt(math.log(1 + math.exp(v))) for v in z.tolist()]
    experts, weight = oracle.route(config, 1, w, x, ids)  # learned: the bias chooses 0 and 1
    assert experts.tolist() == [[0, 1]]
    assert weight[0].tolist() == pytest.approx([1.5 * s / (score[0] + score[1]) for s in score[:2]], rel=1e-6)
    experts, weight = oracle.route(config, 0, w, x, ids)  # hash: row of token 1, gathered scores, not 1/k
    assert experts.tolist() == [[3, 1]]
    assert weight[0].tolist() == pytest.approx([1.5 * score[e] / (score[3] + score[1]) for e in (3, 1)], rel=1e-6)


def test_yarn_of_the_published_config():
    """Pairs 0..15 keep their frequency, pairs 25..31 turn 16 times slower; a layer without compressor is untouched."""
    config = hf_configs()["real_dims"]
    plain = 160000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    f = oracle.rope_frequencies(config, 4).double()
    assert torch.allclose(f[:16], plain[:16], rtol=1e-6)
    assert torch.allclose(f[25:], plain[25:] / 16, rtol=1e-6)
    ramp = (torch.arange(16, 25) - 15) / 10
    assert torch.allclose(f[16:25], plain[16:25] * (1 - ramp * 15 / 16), rtol=1e-6)
    assert torch.equal(f, oracle.rope_frequencies(config, 128).double())
    base = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    assert torch.allclose(oracle.rope_frequencies(config, 0).double(), base, rtol=1e-6)


def test_frequencies_are_bit_identical_to_transformers():
    for name in NAMES:
        config, model = case(name)[0], case(name)[5]
        rotary = model.model.rotary_emb
        assert torch.equal(oracle.rope_frequencies(config, 0), rotary.main_inv_freq)
        assert torch.equal(oracle.rope_frequencies(config, 4), rotary.compress_inv_freq)


@pytest.mark.parametrize("original, fast", [(6, 32), (300, 32), (10**12, 10**9), (10**12, 32)])
def test_yarn_at_its_limits_is_bit_identical_to_transformers(original, fast):
    """A ramp whose ends meet at 0 (original length 6), one that ends beyond the last dim, one that starts there."""
    config = hf_configs()["small"]
    config["rope_scaling"].update(original_max_position_embeddings=original, beta_fast=fast)
    rotary = DeepseekV4RotaryEmbedding(DeepseekV4Config(**copy.deepcopy(config)))
    assert torch.equal(oracle.rope_frequencies(config, 128), rotary.compress_inv_freq)


def test_every_epsilon_is_where_transformers_has_it():
    """1e-6 is too small to be seen in the comparisons above, so both epsilons are made large here, and different."""
    config = {**hf_configs()["small"], "rms_norm_eps": 0.3, "hc_eps": 0.1, "hc_sinkhorn_iters": 3}
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**copy.deepcopy(config), attn_implementation="eager")).float().eval()
    redraw(model, 0)
    ids = case("small")[2][:, :150]
    with torch.no_grad():
        ours = oracle.forward(config, native_state(model).__getitem__, ids).logits
        assert (ours - model(ids, use_cache=False).logits).abs().max() <= TOLERANCE  # measured 6e-6
        other = oracle.forward({**config, "hc_eps": 0.0}, native_state(model).__getitem__, ids).logits
    assert (ours - other).abs().max() > 10 * TOLERANCE


def test_rope_turns_the_last_dims_and_back():
    x = torch.randn(1, 5, 3, 10, generator=torch.Generator().manual_seed(0))
    f = torch.tensor([1.0, 0.1])
    t = torch.arange(5) + 100
    y = oracle.rope(x, t, f)
    assert torch.equal(y[..., :6], x[..., :6])
    a, b = x[0, 2, 1, 8:].tolist()  # pair 1 = the last two dims, position 102
    c, s = math.cos(10.2), math.sin(10.2)
    assert y[0, 2, 1, 8:].tolist() == pytest.approx([a * c - b * s, a * s + b * c], abs=1e-5)
    assert torch.allclose(oracle.rope(y, t, f, inverse=True), x, atol=1e-5)


# ------------------------------------------------------------------------------------- the trained quantisation


def test_kv_quant_touches_the_right_tensors():
    """Window keys and entries lose only their first d-rd dims to `kv`; indexer q and k go through `index` whole."""
    seen = []

    def spy(kind):
        def keep(x):
            seen.append((kind, tuple(x.shape)))
            return x

        return keep

    spied = run("small", 130, kv_quant=Quantisers(spy("kv"), spy("index")))
    assert torch.equal(spied.logits, run("small", 130).logits)
    window, q, k = ("kv", (1, 130, 48)), ("index", (1, 130, 64, 32)), ("index", (1, 32, 32))
    csa = [window, ("kv", (1, 32, 48)), q, k]
    assert sorted(seen) == sorted([window, window, *csa, window, ("kv", (1, 1, 48)), *csa])


def test_kv_quant_true_is_fp8_on_keys_and_hadamard_fp4_in_the_indexer():
    explicit = Quantisers(oracle.fp8_sim64, lambda x: oracle.fp4_sim32(oracle.hadamard(x)))
    on = run("real_dims", 200, kv_quant=True).logits
    assert torch.equal(on, run("real_dims", 200, kv_quant=explicit).logits)
    assert (on - run("real_dims", 200).logits).abs().max() > 10 * TOLERANCE


def test_index_scores_by_hand():
    """Two heads, written out: RoPE, Hadamard, FP4, on q and k alike; relu per head; gate * dim^-0.5 * heads^-0.5."""
    generator = torch.Generator().manual_seed(5)
    config = {**hf_configs()["small"], "index_n_heads": 2, "index_head_dim": 32}
    names = {"wq_b.weight": (64, 7), "weights_proj.weight": (2, 9)}
    names |= {f"compressor.{n}": s for n, s in {"wkv.weight": (64, 9), "wgate.weight": (64, 9), "ape": (4, 64)}.items()}
    w = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    w["compressor.norm.weight"] = torch.ones(32)
    x, qr = torch.randn(1, 9, 9, generator=generator), torch.randn(1, 9, 7, generator=generator)
    got = oracle.indexer(config, w.__getitem__, x, qr, 4, kv_quant=True)
    assert got.shape == (1, 9, 2)
    f = oracle.rope_frequencies(config, 4)
    k = oracle.compressor(config, oracle.under(w.__getitem__, "compressor."), x, 4)
    for t in range(9):
        gate = (w["weights_proj.weight"] @ x[0, t]).tolist()
        for s in range(2):
            score = 0.0
            for h in range(2):
                q = oracle.rope((w["wq_b.weight"][32 * h : 32 * h + 32] @ qr[0, t])[None, None], torch.tensor([t]), f)
                dot = sum(
                    a * b
                    for a, b in zip(
                        oracle.fp4_sim32(oracle.hadamard(q[0, 0])).tolist(),
                        oracle.fp4_sim32(oracle.hadamard(k[0, s])).tolist(),
                        strict=True,
                    )
                )
                score += gate[h] * max(dot, 0.0) / math.sqrt(32) / math.sqrt(2)
            # Products of FP4 values are exact; only the sums round. Measured 2e-6 on scores up to 40.
            assert got[0, t, s].item() == pytest.approx(score, abs=1e-4)


def test_quantised_keys_are_the_values_too(monkeypatch):
    """With a quantiser that erases, the first d-rd dims of every head's output are 0, in all kinds of layers."""
    outputs = []

    def keep(config, w, o):
        outputs.append(o)
        return REAL["grouped_output"](config, w, o)

    monkeypatch.setattr(oracle, "grouped_output", keep)
    run("small", 140, kv_quant=Quantisers(torch.zeros_like, lambda x: x))
    assert len(outputs) == 5
    for o in outputs:
        assert (o[..., :48] == 0).all() and (o[..., 48:] != 0).any()


def test_hadamard_alone_cancels_in_the_index_scores():
    """Both q and k are turned by the same orthogonal matrix: without the rounding the logits do not change."""
    turned = Quantisers(lambda x: x, oracle.hadamard)
    assert distance("small", kv_quant=turned) <= TOLERANCE


@pytest.mark.parametrize("name", ["small", "odd"])
def test_gradients_reach_every_weight(name):
    """With straight-through quantisers; only what merely selects (indexer, selection bias) has no gradient."""
    config, weights, ids, *_ = case(name)
    leaves = {}

    def leaf(key):
        if key not in leaves:
            leaves[key] = weights(key).clone()
            if leaves[key].is_floating_point():
                leaves[key].requires_grad_()
        return leaves[key]

    def through(quantise):
        return lambda x: x + (quantise(x) - x).detach()

    quantise = Quantisers(through(oracle.fp8_sim64), through(lambda x: oracle.fp4_sim32(oracle.hadamard(x))))
    logits = oracle.forward(config, leaf, ids[:, :140], kv_quant=quantise).logits
    F.cross_entropy(logits[0, :-1], ids[0, 1:140]).backward()
    for key, value in leaves.items():
        if not value.is_floating_point() or ".indexer." in key or key.endswith("gate.bias"):
            assert value.grad is None, key
        else:
            assert value.grad is not None and value.grad.isfinite().all() and value.grad.abs().max() > 0, key


def test_the_oracle_stands_alone_and_stays_readable():
    """It imports nothing of the package it judges, and fits in 500 lines."""
    source = Path(oracle.__file__).read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    standard = {"__future__", "argparse", "json", "math", "collections", "pathlib", "typing"}
    assert {module.split(".")[0] for module in modules} == standard | {"torch", "safetensors"}
    assert len(source.splitlines()) <= 500
