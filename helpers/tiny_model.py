"""The training forward of the bundled checkpoint: batched, static shapes, differentiable, quantisation-aware.

Owns: the parameters (same-shaped weights of all layers stacked, so that a step is few kernels), their fake-quantised
values with straight-through gradients, the forward pass and its two auxiliary terms (indexer, router balance), and the
export to native names. The definition of the model is `reference/oracle.py`; `helpers/train_tiny.py` and the tests
compare this file with it. No data-dependent control flow and no host copies: a step can be captured in a CUDA graph.

Shapes: B rows, S tokens, D hidden, n streams, H heads, d head_dim, L layers, E experts, I expert width, T entries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.config import ModelConfig

FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "shared_w1", "shared_w3", "shared_w2", "index_wq_b")
BF16 = ("embed", "head", "norm", "attn_norm", "ffn_norm", "q_norm", "kv_norm", "gate", "comp4_wkv", "comp4_wgate", "comp4_norm",
        "comp128_wkv", "comp128_wgate", "comp128_norm", "index_weights", "index_wkv", "index_wgate", "index_norm")


class Switches(NamedTuple):
    """Tensors that turn parts on without another graph: [B] 0/1 per row for the first two, a 0-d 0/1 for the last.

    kv_quant: the trained FP8 rounding of keys and entries. bf16: residual streams and block outputs rounded to bf16.
    sparse: the indexer's top-k decides which CSA entries are seen (else all visible ones are).
    """

    kv_quant: Tensor
    bf16: Tensor
    sparse: Tensor


# ------------------------------------------------------------------------------------------------- fake quantisation
def through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` forward, the identity backward."""
    return x + (rounded - x).detach()


def power_of_two_ceil(v: Tensor) -> Tensor:
    """2^ceil(log2 v), fp32 v > 0, from the bits (model.md section 9)."""
    bits = v.contiguous().view(torch.int32)
    return ((((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()) << 23).view(torch.float32)


def fake_fp8_block(w: Tensor) -> Tensor:
    """[..., out, in] -> its values after FP8 with a power-of-two scale per 128 x 128 block (ragged at the end)."""
    out, width = w.shape[-2:]
    t = F.pad(w, (0, -width % 128, 0, -out % 128)).unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    amax = t.abs().amax((-3, -1), keepdim=True).clamp(min=1e-30)
    scale = power_of_two_ceil(amax / 448)
    q = (t / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scale
    return q.flatten(-4, -3).flatten(-2)[..., :out, :width]


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 (and negatives), ties to the even code: torch.round is half-to-even, and the
    codes' parity is that of the multiple of the spacing."""
    a = x.abs().clamp(max=6)
    r = torch.where(a < 2, (a * 2).round() / 2, torch.where(a < 4, a.round(), (a / 2).round() * 2))
    return torch.copysign(r, x)


def fake_nvfp4(*stacks: Tensor) -> list[Tensor]:
    """[L, E, out, in] stacks that share one global scale per expert (w1 with w3) -> their values after NVFP4."""
    amax = torch.stack([w.abs().amax((-2, -1)) for w in stacks]).amax(0)[..., None, None, None].clamp(min=1e-30)
    g = amax / (6 * 448)
    out = []
    for w in stacks:
        t = w.unflatten(-1, (-1, 16))
        scale = (t.abs().amax(-1, keepdim=True) / (6 * g)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).to(torch.float32)
        out.append((round_e2m1(t / (scale * g)) * scale * g).flatten(-2))
    return out


def quantise_weights(p: dict[str, Tensor]) -> dict[str, Tensor]:
    """The exported values of every parameter, differentiable straight through; same shapes and names."""
    out = dict(p)
    for name in BF16:
        out[name] = through(p[name], p[name].bfloat16().float())
    for name in FP8:
        out[name] = through(p[name], fake_fp8_block(p[name].detach()))
    w1, w3 = fake_nvfp4(p["w1"].detach(), p["w3"].detach())
    out["w1"], out["w3"] = through(p["w1"], w1), through(p["w3"], w3)
    out["w2"] = through(p["w2"], fake_nvfp4(p["w2"].detach())[0])
    return out


def by_layer(w: dict[str, Tensor]) -> dict[str, Tensor | tuple]:
    """Stacked weights split along their first axis (hc_*: the first two), once per step: the backward of one unbind is one
    kernel, that of one index is three. hc_scale's three numbers are spread over the 24 outputs that they scale."""
    whole = ("embed", "head", "norm")
    out: dict = {name: t if name in whole or name.startswith("hc") else t.unbind(0) for name, t in w.items()}
    pre, post, comb = w["hc_scale"].split(1, -1)
    spread = torch.cat([pre.expand(*pre.shape[:2], 4), post.expand(*pre.shape[:2], 4), comb.expand(*pre.shape[:2], 16)], -1)
    for name, t in (("hc_fn", w["hc_fn"]), ("hc_base", w["hc_base"]), ("hc_scale", spread)):
        flat = t.flatten(0, 1).unbind(0)
        out[name] = tuple(zip(flat[0::2], flat[1::2], strict=True))
    return out


def round_keys(x: Tensor, rope_dims: int, on: Tensor) -> Tensor:
    """[B, ..., d]: all but the last `rope_dims` through FP8 with a power-of-two scale per 64, in the rows where `on` is 1."""
    y = x.detach()[..., : x.shape[-1] - rope_dims].unflatten(-1, (-1, 64))
    scale = power_of_two_ceil(y.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / 448))
    q = (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scale
    change = F.pad((q - y).flatten(-2), (0, rope_dims))
    return x + change * on.view(-1, *[1] * (x.ndim - 1))


# -------------------------------------------------------------------------------------------------------- parameters
def layers_of(config: ModelConfig, ratio: int) -> list[int]:
    return [i for i, r in enumerate(config.compress_ratios) if r == ratio]


def init_params(config: ModelConfig, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters, buffers): fp32 on the CPU, the same for the same seed. Buffers: tid2eid int64, gate_bias."""
    c, D, d = config, config.hidden_size, config.head_dim
    L, E, inner, wide = c.num_hidden_layers, c.n_routed_experts, c.moe_intermediate_size, c.hc_mult * c.hidden_size
    csa, hca = len(layers_of(c, 4)), len(layers_of(c, 128))
    heads, back = c.num_attention_heads * d, (2 * L) ** -0.5  # the last linear of a block: 1/sqrt(number of blocks)
    index = c.index_n_heads * c.index_head_dim
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, std):
        return torch.randn(shape, generator=generator) * std

    p = {"embed": normal(c.vocab_size, D, std=0.5), "head": normal(c.vocab_size, D, std=D**-0.5),
         "hc_fn": normal(L, 2, 24, wide, std=0.01), "hc_head_fn": normal(4, wide, std=0.01)}
    for name, out, width, gain in (("wq_a", c.q_lora_rank, D, 1), ("wq_b", heads, c.q_lora_rank, 1), ("wkv", d, D, 1),
                                   ("wo_a", c.o_groups * c.o_lora_rank, heads // c.o_groups, 1),
                                   ("wo_b", D, c.o_groups * c.o_lora_rank, back), ("gate", E, D, 1), ("shared_w1", inner, D, 1),
                                   ("shared_w3", inner, D, 1), ("shared_w2", D, inner, back)):
        p[name] = normal(L, out, width, std=gain * width**-0.5)
    for name, out, width, gain in (("w1", inner, D, 1), ("w3", inner, D, 1), ("w2", D, inner, back)):
        p[name] = normal(L, E, out, width, std=gain * width**-0.5)
    for kind, count, ratio, out in (("comp4", csa, 4, 2 * d), ("comp128", hca, 128, d), ("index", csa, 4, 2 * c.index_head_dim)):
        p[f"{kind}_wkv"], p[f"{kind}_wgate"] = normal(count, out, D, std=D**-0.5), normal(count, out, D, std=0.1 * D**-0.5)
        p[f"{kind}_ape"] = normal(count, ratio, out, std=0.02)
        p[f"{kind}_norm"] = torch.ones(count, c.index_head_dim if kind == "index" else d)
    p["index_wq_b"] = normal(csa, index, c.q_lora_rank, std=c.q_lora_rank**-0.5)
    p["index_weights"] = normal(csa, c.index_n_heads, D, std=D**-0.5)
    ones = {"norm": (D,), "attn_norm": (L, D), "ffn_norm": (L, D), "q_norm": (L, c.q_lora_rank), "kv_norm": (L, d),
            "hc_scale": (L, 2, 3), "hc_head_scale": (1,)}
    p |= {name: torch.ones(shape) for name, shape in ones.items()}
    base = torch.zeros(24)
    base[:4] = -1.1  # sigmoid 0.25: the block sees the streams' mean
    base[8:] = 3 * torch.eye(4).flatten()  # near the identity: streams mostly keep to themselves
    p["hc_base"] = base.repeat(L, 2, 1)
    p["hc_head_base"], p["attn_sink"] = torch.full((4,), -1.1), torch.zeros(L, c.num_attention_heads)
    hashed = c.num_hash_layers
    order = torch.rand(hashed, c.vocab_size, E, generator=generator).argsort(-1)
    return p, {"tid2eid": order[..., : c.num_experts_per_tok].contiguous(), "gate_bias": torch.zeros(L - hashed, E)}


def native(config: ModelConfig, p: dict[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """{native name: tensor} as `make_checkpoint.write_checkpoint` takes it: a linear by its module name."""
    out = {"embed.weight": p["embed"], "head": p["head"], "norm.weight": p["norm"]}
    out |= {f"hc_head_{part}": p[f"hc_head_{part}"] for part in ("fn", "base", "scale")}
    for i, ratio in enumerate(config.compress_ratios):
        at, attn, ffn = f"layers.{i}.", f"layers.{i}.attn.", f"layers.{i}.ffn."
        out |= {f"{at}attn_norm.weight": p["attn_norm"][i], f"{at}ffn_norm.weight": p["ffn_norm"][i]}
        for site, name in enumerate(("attn", "ffn")):
            out |= {f"{at}hc_{name}_{part}": p[f"hc_{part}"][i, site] for part in ("fn", "base", "scale")}
        out |= {attn + name: p[name][i] for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "attn_sink")}
        out |= {f"{attn}{name}.weight": p[name][i] for name in ("q_norm", "kv_norm")}
        kinds = [] if not ratio else [("compressor.", f"comp{ratio}")] + [("indexer.compressor.", "index")] * (ratio == 4)
        at_ratio = layers_of(config, ratio).index(i)
        for prefix, kind in kinds:
            out |= {f"{attn}{prefix}{part}": p[f"{kind}_{part}"][at_ratio] for part in ("wkv", "wgate", "ape")}
            out[f"{attn}{prefix}norm.weight"] = p[f"{kind}_norm"][at_ratio]
        if ratio == 4:
            out[attn + "indexer.wq_b"], out[attn + "indexer.weights_proj"] = p["index_wq_b"][at_ratio], p["index_weights"][at_ratio]
        out[ffn + "gate.weight"] = p["gate"][i]
        if config.is_hash_layer(i):
            out[ffn + "gate.tid2eid"] = buffers["tid2eid"][i]
        else:
            out[ffn + "gate.bias"] = buffers["gate_bias"][i - config.num_hash_layers]
        for w in ("w1", "w2", "w3"):
            out[f"{ffn}shared_experts.{w}"] = p[f"shared_{w}"][i]
            out |= {f"{ffn}experts.{e}.{w}": p[w][i, e] for e in range(config.n_routed_experts)}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in out.items()}


# ----------------------------------------------------------------------------------------------------------- forward
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rope_table(config: ModelConfig, length: int, compressed: bool, device) -> Tensor:
    """[2, length, rd/2]: cos and sin (model.md section 4.1)."""
    rd, theta = config.qk_rope_head_dim, config.compress_rope_theta if compressed else config.rope_theta
    f = 1.0 / theta ** (torch.arange(0, rd, 2, dtype=torch.float32) / rd)
    if compressed and config.rope_factor != 1.0:
        def turns(beta):
            return rd * math.log(config.rope_original_length / (2 * math.pi * beta)) / (2 * math.log(theta))

        lo, hi = max(math.floor(turns(config.rope_beta_fast)), 0), min(math.ceil(turns(config.rope_beta_slow)), rd - 1)
        ramp = ((torch.arange(rd // 2) - lo) / max(hi - lo, 0.001)).clamp(0, 1)
        f = f / config.rope_factor * ramp + f * (1 - ramp)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * f
    return torch.stack([angle.cos(), angle.sin()]).to(device)


def rope(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """x [B, S, ..., d] with table [2, S, rd/2]: the last rd dims rotated in interleaved pairs."""
    cos, sin = table.reshape(2, table.shape[1], *[1] * (x.ndim - 3), table.shape[2])
    sin = -sin if inverse else sin
    keep, turn = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    a, b = turn[..., 0::2], turn[..., 1::2]
    return torch.cat([keep, torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1)


class Sinkhorn(torch.autograd.Function):
    """logits [..., 4, 4], iterations, eps -> the model's values (model.md section 3.1), with the gradient of the limit.

    At the limit c (rows and columns sum to 1) the derivative of one column step is g -> g - sum_j g c, of one row step
    g -> g - sum_k g c, and the input enters only as c = a * scaling, because scaling rows and columns of the input does
    not move the limit. So the backward needs c alone, not the 39 intermediate matrices. Cosine with the exact gradient:
    above 0.99 on random logits.
    """

    @staticmethod
    def forward(ctx, logits, iterations, eps):
        logits = logits.contiguous()
        if logits.is_cuda:
            import tiny_sinkhorn

            c = tiny_sinkhorn.forward(logits, iterations, eps)
        else:
            c = logits.softmax(-1) + eps
            c = c / (c.sum(-2, keepdim=True) + eps)
            for _ in range(iterations - 1):
                c = c / (c.sum(-1, keepdim=True) + eps)
                c = c / (c.sum(-2, keepdim=True) + eps)
        ctx.save_for_backward(logits, c)
        ctx.numbers = iterations, eps
        return c

    @staticmethod
    def backward(ctx, g):
        logits, c = ctx.saved_tensors
        iterations, eps = ctx.numbers
        if logits.is_cuda:
            import tiny_sinkhorn

            return tiny_sinkhorn.backward(logits, c, g.contiguous(), iterations, eps), None, None
        for _ in range(iterations):
            g = g - (g * c).sum(-2, keepdim=True)
            g = g - (g * c).sum(-1, keepdim=True)
        soft = logits.softmax(-1)
        g = g * c / (soft + eps)
        return soft * (g - (g * soft).sum(-1, keepdim=True)), None, None


class TinyModel:
    """The forward pass for one sequence length. Holds masks and tables; parameters come with each call."""

    def __init__(self, config: ModelConfig, length: int, device):
        self.config, self.length = config, length
        self.tables = {r: rope_table(config, length, bool(r), device) for r in set(config.compress_ratios)}
        t = torch.arange(length, device=device)[:, None]
        j = t.T
        self.window = (j <= t) & (j > t - config.sliding_window)
        self.visible = {r: j[:, : length // r] < (t + 1) // r for r in set(config.compress_ratios) if r}

    def mhc(self, w, layer: int, site: int, X: Tensor):
        c, n = self.config, self.config.hc_mult
        v = X.flatten(-2)
        m = (v @ w["hc_fn"][layer][site].T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        pre, post, mix = (m * w["hc_scale"][layer][site] + w["hc_base"][layer][site]).split([n, n, n * n], -1)
        comb = Sinkhorn.apply(mix.unflatten(-1, (n, n)), c.hc_sinkhorn_iters, c.hc_eps)
        return ((torch.sigmoid(pre) + c.hc_eps)[..., None] * X).sum(-2), 2 * torch.sigmoid(post), comb

    def compress(self, w, kind: str, i: int, x: Tensor, ratio: int) -> Tensor:
        """Entries [B, T, dim], normed and rotated."""
        T = self.length // ratio
        cut = x[:, : T * ratio]
        kv = (cut @ w[f"{kind}_wkv"][i].T).unflatten(1, (T, ratio))
        score = (cut @ w[f"{kind}_wgate"][i].T).unflatten(1, (T, ratio)) + w[f"{kind}_ape"][i]
        if ratio == 4:
            half = kv.shape[-1] // 2
            kv = torch.cat([F.pad(kv[:, :-1, :, :half], (0, 0, 0, 0, 1, 0)), kv[..., half:]], 2)
            score = torch.cat([F.pad(score[:, :-1, :, :half], (0, 0, 0, 0, 1, 0), value=-1e30), score[..., half:]], 2)
        e = rms_norm((score.softmax(2) * kv).sum(2), w[f"{kind}_norm"][i], self.config.rms_norm_eps)
        return rope(e, self.tables[ratio][:, : T * ratio : ratio])

    def index_scores(self, w, i: int, x: Tensor, qr: Tensor) -> Tensor:
        """[B, S, T]; the indexer learns from its own loss only, so its inputs are constants here."""
        c, x, qr = self.config, x.detach(), qr.detach()
        q = rope((qr @ w["index_wq_b"][i].T).unflatten(-1, (c.index_n_heads, c.index_head_dim)), self.tables[4])
        k = self.compress(w, "index", i, x, 4)
        gate = (x @ w["index_weights"][i].T) * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        scores = (q.flatten(1, 2) @ k.mT).unflatten(1, (self.length, c.index_n_heads)).relu()  # [B, S, heads, T]
        return (gate[:, :, None, :] @ scores).squeeze(2)

    def attention(self, w, layer: int, x: Tensor, on: Switches):
        """-> (output [B, S, D], indexer loss per token [B, S] or None)."""
        c, eps = self.config, self.config.rms_norm_eps
        ratio = c.compress_ratios[layer]
        table, rd, B, S = self.tables[ratio], c.qk_rope_head_dim, x.shape[0], self.length
        i = layers_of(c, ratio).index(layer)
        qr = rms_norm(x @ w["wq_a"][layer].T, w["q_norm"][layer], eps)
        q = (qr @ w["wq_b"][layer].T).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = rope(rms_norm(q, None, eps), table)
        keys = round_keys(rope(rms_norm(x @ w["wkv"][layer].T, w["kv_norm"][layer], eps), table), rd, on.kv_quant)
        allowed = self.window.expand(B, -1, -1)
        T = S // ratio if ratio else 0
        indexed = ratio == 4 and c.index_topk < T
        if T:
            entries = round_keys(self.compress(w, f"comp{ratio}", i, x, ratio), rd, on.kv_quant)
            keys = torch.cat([keys, entries], 1)
            seen = self.visible[ratio].expand(B, -1, -1)
            if indexed:
                scores = self.index_scores(w, i, x, qr).masked_fill(~seen, -1e30)
                least = scores.detach().topk(c.index_topk, -1, sorted=False).values.amin(-1, keepdim=True)
                seen = seen & ((scores >= least) | (on.sparse == 0))
            allowed = torch.cat([allowed, seen], -1)
        heads = c.num_attention_heads
        a = (q.flatten(1, 2) @ keys.mT).unflatten(1, (S, heads)) * c.head_dim**-0.5  # [B, S, H, keys]
        a = a.masked_fill(~allowed[:, :, None], -1e30)
        sink = w["attn_sink"][layer].view(1, 1, heads, 1).expand(B, S, heads, 1)
        p = torch.cat([a, sink], -1).softmax(-1)[..., :-1]
        loss = None
        if indexed:  # the attention mass on the entries, summed over heads, is what the scores should rank
            target = p.detach()[..., S:].sum(2)
            target = target / target.sum(-1, keepdim=True).clamp(min=1e-6)
            loss = -(target * scores.log_softmax(-1).masked_fill(~self.visible[4], 0)).sum(-1)
        o = rope((p.flatten(1, 2) @ keys).unflatten(1, (S, heads)), table, inverse=True)
        o = o.flatten(-2).unflatten(-1, (c.o_groups, -1))
        z = torch.einsum("bsgi,goi->bsgo", o, w["wo_a"][layer].unflatten(0, (c.o_groups, -1)))
        return z.flatten(-2) @ w["wo_b"][layer].T, loss

    def moe(self, w, buffers, layer: int, x: Tensor, ids: Tensor):
        """-> (output, chosen [B, S, E] of 0/1): every expert is computed for every token, the unchosen weigh 0."""
        c, hashed = self.config, self.config.num_hash_layers
        score = F.softplus(x @ w["gate"][layer].T).sqrt()
        if layer < hashed:
            best = buffers["tid2eid"][layer][ids]
        else:
            best = (score.detach() + buffers["gate_bias"][layer - hashed]).topk(c.num_experts_per_tok, -1).indices
        chosen = torch.zeros_like(score).scatter(-1, best, 1.0)
        weight = score * chosen
        weight = weight / weight.sum(-1, keepdim=True) * c.routed_scaling_factor

        def swiglu(gate, up):
            return F.silu(gate.clamp(max=c.swiglu_limit)) * up.clamp(-c.swiglu_limit, c.swiglu_limit)

        E, inner = c.n_routed_experts, c.moe_intermediate_size
        a = swiglu(x @ w["w1"][layer].flatten(0, 1).T, x @ w["w3"][layer].flatten(0, 1).T).unflatten(-1, (E, inner))
        routed = (a * weight[..., None]).flatten(-2) @ w["w2"][layer].transpose(1, 2).flatten(0, 1)
        shared = swiglu(x @ w["shared_w1"][layer].T, x @ w["shared_w3"][layer].T) @ w["shared_w2"][layer].T
        return routed + shared, chosen

    def __call__(self, weights: dict[str, Tensor], buffers: dict[str, Tensor], ids: Tensor, on: Switches):
        """weights as `quantise_weights` gives them (or raw parameters), ids [B, S] -> (logits [B, S, V], indexer loss [B, S]
        summed over CSA layers or None where nothing is chosen, experts chosen [learned layers, B, S, E] of 0/1)."""
        c, eps, w = self.config, self.config.rms_norm_eps, by_layer(weights)
        rows = on.bf16[:, None, None]

        def rounded(x):  # bf16 in the rows that ask for it
            return x + (x.bfloat16().float() - x).detach() * (rows if x.ndim == 3 else rows[..., None])

        # a product with 0/1 instead of a gather: exact (bf16 values), and its backward has no sort, no atomics, no host wait
        one_hot = (ids[..., None] == torch.arange(c.vocab_size, device=ids.device)).float()
        X = (one_hot @ w["embed"])[:, :, None].expand(-1, -1, c.hc_mult, -1)
        index_loss, loads = None, []
        for layer in range(c.num_hidden_layers):
            x, post, comb = self.mhc(w, layer, 0, X)
            o, loss = self.attention(w, layer, rounded(rms_norm(x, w["attn_norm"][layer], eps)), on)
            X = rounded(post[..., None] * rounded(o)[..., None, :] + comb.mT @ X)
            x, post, comb = self.mhc(w, layer, 1, X)
            o, chosen = self.moe(w, buffers, layer, rounded(rms_norm(x, w["ffn_norm"][layer], eps)), ids)
            X = rounded(post[..., None] * rounded(o)[..., None, :] + comb.mT @ X)
            if loss is not None:
                index_loss = loss if index_loss is None else index_loss + loss
            if layer >= c.num_hash_layers:
                loads.append(chosen)
        v = X.flatten(-2)
        m = (v @ w["hc_head_fn"].T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        a = torch.sigmoid(m * w["hc_head_scale"] + w["hc_head_base"]) + c.hc_eps
        y = rms_norm((a[..., None] * X).sum(-2), w["norm"], eps)
        return y @ w["head"].T, index_loss, torch.stack(loads)
