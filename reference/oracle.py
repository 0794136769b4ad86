"""DeepSeek-V4 (Pro, Flash, any smaller one), the whole model in plain PyTorch, fp32: the definition to compare with.

Read it top to bottom: quantisers, norm and RoPE, mHC, compressor, indexer, attention, MoE, block, forward; then a slow
checkpoint reader. The whole sequence is computed at once with explicit causal masks: no KV cache, no chunks, no dtype
but fp32. It imports nothing of `dsv4`. Where each formula comes from: reference/README.md, which has the same section
numbers. Everything is differentiable (no in-place operation on a tensor that needs a gradient; the only data-dependent
control flow is the expert loop) and runs on any device.

Letters: B batch, S tokens, D hidden_size, n = hc_mult streams, H heads, d = head_dim, rd = qk_rope_head_dim, V words,
r = compress ratio of the layer (0: none, 4: CSA, 128: HCA), T = S // r entries, E experts, k experts per token.

`config` is the dict of the published config.json. `weights` (and `w`, the same with a prefix already applied) is any
callable: native name, with `.weight` where the checkpoint has it -> dequantised fp32 tensor (tid2eid: int64).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Callable[[str], Tensor]


def under(weights: Weights, prefix: str) -> Weights:
    """The same weights with `prefix` put before every name."""
    return lambda name: weights(prefix + name)


# ----------------------------------------------------------------------------------- 9. trained quantisation
def power_of_two_ceil(v: Tensor) -> Tensor:
    """2^ceil(log2 v) for fp32 v > 0, on the bits: no logarithm that could round."""
    bits = v.contiguous().view(torch.int32)
    biased_exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
    return (biased_exponent << 23).view(torch.float32)


def _in_blocks(x: Tensor, size: int) -> Tensor:
    """[..., c] -> [..., ceil(c/size), size]; a short last block is filled with zeros: no maximum changes."""
    return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def fp8_sim64(x: Tensor) -> Tensor:
    """x rounded to e4m3 with a power-of-two scale per 64 of the last dim, and back (fp32; exact in bf16 too)."""
    y = _in_blocks(x.float(), 64)
    amax = y.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    s = power_of_two_ceil(amax * torch.tensor(1 / 448, dtype=torch.float32, device=x.device))
    q = (y / s).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return (q * s).flatten(-2)[..., : x.shape[-1]]


def fp4_sim32(x: Tensor) -> Tensor:
    """x rounded to e2m1 with a power-of-two scale per 32 of the last dim, and back (fp32; exact in bf16 too)."""
    y = _in_blocks(x.float(), 32)
    amax = y.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126)
    s = power_of_two_ceil(amax * torch.tensor(1 / 6, dtype=torch.float32, device=x.device))
    return (e2m1_round((y / s).clamp(-6, 6)) * s).flatten(-2)[..., : x.shape[-1]]


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the low 3 bits of the code; bit 3 is the sign


def e2m1_round(y: Tensor) -> Tensor:
    """Nearest e2m1 value of |y| <= 6; a tie goes to the even code, so it is >= where the upper code is even."""
    a = y.abs()
    code = (a > 0.25).int() + (a >= 0.75).int() + (a > 1.25).int() + (a >= 1.75).int()
    code = code + (a > 2.5).int() + (a >= 3.5).int() + (a > 5.0).int()
    return torch.copysign(torch.tensor(E2M1, device=y.device)[code.long()], y)


def hadamard(x: Tensor) -> Tensor:
    """x @ H * c^-0.5 over the last dim c (a power of two), H in Sylvester order: H_2m = [[H, H], [H, -H]]."""
    h = torch.ones(1, 1, device=x.device)
    while h.shape[0] < x.shape[-1]:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return x @ h * x.shape[-1] ** -0.5


class Quantisers(NamedTuple):
    """What the model was trained with: `kv` on dims 0..d-rd of window keys and entries, `index` on indexer q and k.

    `kv_quant` takes True (the model's), False (none) or one of these, e.g. with straight-through gradients:
    Quantisers(lambda x: x + (fp8_sim64(x) - x).detach(), ...).
    """

    kv: Callable[[Tensor], Tensor]
    index: Callable[[Tensor], Tensor]


def quantisers(kv_quant: bool | Quantisers) -> Quantisers:
    if isinstance(kv_quant, Quantisers):
        return kv_quant
    return Quantisers(fp8_sim64, lambda x: fp4_sim32(hadamard(x))) if kv_quant else Quantisers(lambda x: x, lambda x: x)


# ------------------------------------------------------------------------------------- 2, 4.1. norm and RoPE
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dim, times `weight` if there is one."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else weight * y


def rope_frequencies(config: dict, ratio: int, device=None) -> Tensor:
    """[rd/2] fp32. r = 0: rope_theta, plain. r > 0: compress_rope_theta with YaRN, always on, no mscale."""
    rd = config["qk_rope_head_dim"]
    theta = config["compress_rope_theta"] if ratio else config["rope_theta"]
    f = 1.0 / theta ** (torch.arange(0, rd, 2, dtype=torch.float32, device=device) / rd)
    yarn = config.get("rope_scaling")
    if not ratio or not yarn:
        return f

    def turns(beta):  # the (fractional) dim whose wavelength fits `beta` times into the original context
        return rd * math.log(yarn["original_max_position_embeddings"] / (2 * math.pi * beta)) / (2 * math.log(theta))

    lo = max(math.floor(turns(yarn["beta_fast"])), 0)
    hi = min(math.ceil(turns(yarn["beta_slow"])), rd - 1)
    i = torch.arange(rd // 2, dtype=torch.float32, device=device)
    ramp = ((i - lo) / (hi - lo if hi != lo else 0.001)).clamp(0, 1)
    return f / yarn["factor"] * ramp + f * (1 - ramp)


def rope(x: Tensor, positions: Tensor, f: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the interleaved pairs of the LAST 2*len(f) dims of x [B, S, ..., d] by positions [S] * f."""
    angle = positions.float()[:, None] * f  # fp32 product, like the official code: not fp64
    angle = angle.reshape(angle.shape[0], *[1] * (x.ndim - 3), f.shape[0])
    cos, sin = angle.cos(), -angle.sin() if inverse else angle.sin()
    keep, turn = x.split([x.shape[-1] - 2 * f.shape[0], 2 * f.shape[0]], dim=-1)
    a, b = turn[..., 0::2], turn[..., 1::2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([keep, turned], dim=-1)


# ---------------------------------------------------------------------------------------------------- 3. mHC
def stream_mix(config: dict, X: Tensor, fn: Tensor) -> Tensor:
    """(v @ fn^T) / rms(v), v = the n streams of a token side by side: ONE scale per token over all n*D values."""
    v = X.flatten(-2)
    rho = torch.rsqrt(v.square().mean(-1, keepdim=True) + config["rms_norm_eps"])
    return (v @ fn.T) * rho


def sinkhorn(C: Tensor, iterations: int, eps: float) -> Tensor:
    """Logits [..., n, n] -> nearly doubly stochastic. Softmax is the first row step; the LAST step is on columns."""
    C = C.softmax(-1) + eps
    C = C / (C.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        C = C / (C.sum(-1, keepdim=True) + eps)
        C = C / (C.sum(-2, keepdim=True) + eps)
    return C


def mhc_pre(config: dict, w: Weights, X: Tensor, site: str) -> tuple[Tensor, Tensor, Tensor]:
    """X [B,S,n,D], site "attn" or "ffn" -> block input x [B,S,D], post [B,S,n], comb [B,S,n,n]."""
    n, eps = config["hc_mult"], config["hc_eps"]
    m = stream_mix(config, X, w(f"hc_{site}_fn"))
    scale, base = w(f"hc_{site}_scale"), w(f"hc_{site}_base")
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb = sinkhorn(comb, config["hc_sinkhorn_iters"], eps)
    return (pre[..., None] * X).sum(-2), post, comb


def mix_streams(comb: Tensor, X: Tensor) -> Tensor:
    """The residual: sum over the FIRST index of comb, that is comb^T @ X."""
    return torch.einsum("bsjk,bsjd->bskd", comb, X)


def mhc_post(o: Tensor, X: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Block output o [B,S,D] and the X that went into mhc_pre -> the next X [B,S,n,D]. No other residual add."""
    return post[..., None] * o[..., None, :] + mix_streams(comb, X)


def hc_head(config: dict, weights: Weights, X: Tensor) -> Tensor:
    """The final collapse of the streams [B,S,n,D] -> [B,S,D]: a learned gate, not stream 0 and not the mean."""
    m = stream_mix(config, X, weights("hc_head_fn"))
    a = torch.sigmoid(m * weights("hc_head_scale") + weights("hc_head_base")) + config["hc_eps"]
    return (a[..., None] * X).sum(-2)


# -------------------------------------------------------------------------------- 5, 6. masks and compressor
def window_mask(S: int, window: int, device=None) -> Tensor:
    """[S, S] bool: query t sees keys max(0, t-window+1) .. t, `window` keys with itself."""
    t, j = torch.arange(S, device=device)[:, None], torch.arange(S, device=device)[None]
    return (j <= t) & (j > t - window)


def visible_entries(S: int, ratio: int, device=None) -> Tensor:
    """[S, S // ratio] bool: query t sees entry s iff s < (t+1) // ratio; the block that ends at t is visible to t."""
    t, s = torch.arange(S, device=device)[:, None], torch.arange(S // ratio, device=device)[None]
    return s < (t + 1) // ratio


def overlap(z: Tensor, fill: float) -> Tensor:
    """CSA: blocks [B,T,4,2d] -> eight slots [B,T,8,d]: previous block's first half of the channels (`fill` before
    the first block), own block's second half.
    """
    first, second = z.chunk(2, dim=-1)
    previous = F.pad(first, (0, 0, 0, 0, 1, 0), value=fill)[:, :-1]
    return torch.cat([previous, second], dim=2)


def compressor(config: dict, w: Weights, x: Tensor, ratio: int) -> Tensor:
    """Attn-normed x [B,S,D] -> entries [B,T,d], normed and rotated, not quantised. A partial tail gives none."""
    B, S, _ = x.shape
    T = S // ratio
    ape = w("ape")
    kv = (x @ w("wkv.weight").T)[:, : T * ratio].reshape(B, T, *ape.shape)
    score = (x @ w("wgate.weight").T)[:, : T * ratio].reshape(B, T, *ape.shape) + ape
    if ratio == 4:
        kv, score = overlap(kv, 0.0), overlap(score, -math.inf)
    e = (score.softmax(dim=2) * kv).sum(dim=2)  # over the slots, separately for every channel
    e = rms_norm(e, w("norm.weight"), config["rms_norm_eps"])
    first_token = torch.arange(T, device=x.device) * ratio
    return rope(e, first_token, rope_frequencies(config, ratio, x.device))


# ------------------------------------------------------------------------------------------------ 7. indexer
def indexer(config: dict, w: Weights, x: Tensor, qr: Tensor, ratio: int, kv_quant: bool | Quantisers = False) -> Tensor:
    """x [B,S,D], normed query latent qr [B,S,q_lora_rank] -> scores [B,S,T], not yet masked."""
    heads, dim = config["index_n_heads"], config["index_head_dim"]
    quantise = quantisers(kv_quant).index
    t = torch.arange(x.shape[1], device=x.device)
    q = (qr @ w("wq_b.weight").T).unflatten(-1, (heads, dim))  # no per-head norm here
    q = quantise(rope(q, t, rope_frequencies(config, ratio, x.device)))
    k = quantise(compressor(config, under(w, "compressor."), x, ratio))
    gate = (x @ w("weights_proj.weight").T) * (dim**-0.5 * heads**-0.5)  # may be negative
    return torch.einsum("bsh,bsht->bst", gate, torch.einsum("bshd,btd->bsht", q, k).relu())


def select_entries(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """[B,S,T] bool: at most top_k of the visible entries of each query, those with the highest scores; ties: the lower index."""
    best = scores.masked_fill(~visible, -math.inf).sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & visible


# ---------------------------------------------------------------------------------------------- 4. attention
def sink_softmax(scores: Tensor, sink: Tensor) -> Tensor:
    """softmax of scores [B,H,S,keys] with one more logit per head that has no value: it is in the denominator only."""
    column = sink[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def unrotate(o: Tensor, positions: Tensor, f: Tensor) -> Tensor:
    """Keys are also the values and carry RoPE: turn the output o [B,S,H,d] back by the QUERY's position."""
    return rope(o, positions, f, inverse=True)


def grouped_output(config: dict, w: Weights, o: Tensor) -> Tensor:
    """o [B,S,H,d] -> [B,S,D]: each group of H/o_groups neighbouring heads through its own wo_a, all through wo_b."""
    groups = config["o_groups"]
    o = o.flatten(-2).unflatten(-1, (groups, -1))
    wo_a = w("wo_a.weight").unflatten(0, (groups, -1))
    return torch.einsum("bsgi,goi->bsgo", o, wo_a).flatten(-2) @ w("wo_b.weight").T


def attention(config: dict, layer: int, w: Weights, x: Tensor, *, kv_quant: bool | Quantisers = False) -> Tensor:
    """x [B,S,D], attn-normed; w names relative to `layers.N.attn.` -> [B,S,D]."""
    S, d, rd, eps = x.shape[1], config["head_dim"], config["qk_rope_head_dim"], config["rms_norm_eps"]
    ratio = config["compress_ratios"][layer]
    t = torch.arange(S, device=x.device)
    f = rope_frequencies(config, ratio, x.device)

    def quantise_keys(keys):
        return torch.cat([quantisers(kv_quant).kv(keys[..., : d - rd]), keys[..., d - rd :]], dim=-1)

    qr = rms_norm(x @ w("wq_a.weight").T, w("q_norm.weight"), eps)
    q = (qr @ w("wq_b.weight").T).unflatten(-1, (config["num_attention_heads"], d))
    q = rope(rms_norm(q, None, eps), t, f)
    k = rope(rms_norm(x @ w("wkv.weight").T, w("kv_norm.weight"), eps), t, f)
    keys = quantise_keys(k)
    allowed = window_mask(S, config["sliding_window"], x.device)[None]
    if ratio:
        entries = quantise_keys(compressor(config, under(w, "compressor."), x, ratio))
        seen = visible_entries(S, ratio, x.device)[None]
        if ratio == 4:
            scores = indexer(config, under(w, "indexer."), x, qr, ratio, kv_quant)
            seen = select_entries(scores, seen, config["index_topk"])
        # A recent token counts twice, raw and compressed, on purpose.
        keys = torch.cat([keys, entries], dim=1)
        allowed = torch.cat([allowed.expand(seen.shape[0], -1, -1), seen], dim=-1)
    a = torch.einsum("bshd,bkd->bhsk", q, keys) * d**-0.5
    p = sink_softmax(a.masked_fill(~allowed[:, None], -math.inf), w("attn_sink"))
    o = torch.einsum("bhsk,bkd->bshd", p, keys)  # K and V are the same tensor
    return grouped_output(config, w, unrotate(o, t, f))


# ---------------------------------------------------------------------------------------------------- 8. MoE
def router_scores(w: Weights, x: Tensor) -> Tensor:
    """x [..., D] -> sqrt(softplus(gate logits)) [..., E]."""
    return F.softplus(x @ w("gate.weight").T).sqrt()


def routing_weights(scores: Tensor, experts: Tensor, factor: float) -> Tensor:
    """The chosen experts' own scores, normalised to sum to `factor`; without the selection bias; hash layers too."""
    chosen = scores.gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) * factor


def route(config: dict, layer: int, w: Weights, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D], ids [...] -> experts [..., k] int64, weights [..., k]. Hash layers look experts up by token id."""
    scores = router_scores(w, x)
    if layer < config["num_hash_layers"]:
        experts = w("gate.tid2eid")[ids]
    else:
        experts = (scores + w("gate.bias")).topk(config["num_experts_per_tok"], dim=-1).indices
    return experts, routing_weights(scores, experts, config["routed_scaling_factor"])


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): clamped BEFORE silu, the gate from above only."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert(config: dict, w: Weights, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """One gated MLP [..., D] -> [..., D]; the routing weight [...] goes in before w2."""
    a = swiglu(x @ w("w1.weight").T, x @ w("w3.weight").T, config["swiglu_limit"])
    if weight is not None:
        a = weight[..., None] * a
    return a @ w("w2.weight").T


def moe(config: dict, layer: int, w: Weights, x: Tensor, ids: Tensor) -> Tensor:
    """x [B,S,D], ffn-normed; ids [B,S]; w names relative to `layers.N.ffn.` -> [B,S,D]. Reads only the experts hit."""
    flat = x.flatten(0, 1)
    experts, weight = route(config, layer, w, flat, ids.flatten())
    out = expert(config, under(w, "shared_experts."), flat)
    for e in experts.unique().tolist():
        token, slot = torch.where(experts == e)
        out = out.index_add(0, token, expert(config, under(w, f"experts.{e}."), flat[token], weight[token, slot]))
    return out.view_as(x)


# ------------------------------------------------------------------------------------------------ 2. forward
def block(config: dict, layer: int, w: Weights, X: Tensor, ids: Tensor, *, kv_quant=False, moe=moe) -> Tensor:
    """X [B,S,n,D] -> X [B,S,n,D]; w names relative to `layers.N.`; `moe`: any function with the same arguments."""
    eps = config["rms_norm_eps"]
    x, post, comb = mhc_pre(config, w, X, "attn")
    o = attention(config, layer, under(w, "attn."), rms_norm(x, w("attn_norm.weight"), eps), kv_quant=kv_quant)
    X = mhc_post(o, X, post, comb)
    x, post, comb = mhc_pre(config, w, X, "ffn")
    o = moe(config, layer, under(w, "ffn."), rms_norm(x, w("ffn_norm.weight"), eps), ids)
    return mhc_post(o, X, post, comb)


class Output(NamedTuple):
    logits: Tensor  # [B,S,V]; row t predicts token t+1
    hidden: list[Tensor]  # X [B,S,n,D] before the first layer and after every layer that ran; empty without keep_hidden


def forward(
    config: dict,
    weights: Weights,
    ids: Tensor,
    *,
    kv_quant: bool | Quantisers = False,
    layers: range | None = None,
    moe=moe,
    keep_hidden: bool = True,
) -> Output:
    """ids [B,S] int64 -> Output. `layers` runs only those (for diagnosis), embedding and head always."""
    h = weights("embed.weight")[ids]
    X = h[:, :, None, :].expand(-1, -1, config["hc_mult"], -1)  # all streams start equal
    hidden = [X] if keep_hidden else []
    for layer in layers if layers is not None else range(config["num_hidden_layers"]):
        X = block(config, layer, under(weights, f"layers.{layer}."), X, ids, kv_quant=kv_quant, moe=moe)
        if keep_hidden:
            hidden.append(X)
    y = rms_norm(hc_head(config, weights, X), weights("norm.weight"), config["rms_norm_eps"])
    return Output(y @ weights("head.weight").T, hidden)


# --------------------------------------------------------------------- 10. a slow, obvious checkpoint reader
E8M0 = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan])
FP4 = torch.tensor([*E2M1, *(-v for v in E2M1)])


def unpack_fp4(packed: Tensor) -> Tensor:
    """[out, in/2] bytes -> [out, in] fp32: the LOW nibble of byte j is element 2j, the high one 2j+1."""
    byte = packed.view(torch.uint8).int()
    return FP4[torch.stack([byte & 15, byte >> 4], dim=-1).flatten(-2)]


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Scale [a, b] -> [a*rows, b*columns], every element repeated."""
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def scale_values(scale: Tensor) -> Tensor:
    """fp32 values of a stored scale; E8M0 bytes (also when stored as U8) are exponents and never cast as numbers."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return E8M0[scale.view(torch.uint8).int()]
    return scale.float()


def dequantise(get: Callable[[str], Tensor | None], block_size: tuple[int, int]) -> Tensor:
    """One linear's fp32 weight [out, in] from what stands next to it; `get(".weight_scale")` gives a sibling or None.

    Recognised by dtype and siblings, never by config.json. Raises ValueError for anything else.
    """
    payload = next(t for s in (".weight", ".weight_packed") if (t := get(s)) is not None)
    scale = next((t for s in (".scale", ".weight_scale", ".weight_scale_inv") if (t := get(s)) is not None), None)
    if scale is None:
        if payload.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{payload.dtype} payload without a scale")
        return payload.float()
    if payload.dtype == torch.float8_e4m3fn:  # FP8 blocks; all three scale names multiply
        expected = [-(-size // block) for size, block in zip(payload.shape, block_size, strict=True)]
        if list(scale.shape) != expected:
            raise ValueError(f"FP8 block scale has shape {list(scale.shape)}, expected {expected}")
        return payload.float() * spread(scale_values(scale), *block_size)[: payload.shape[0], : payload.shape[1]]
    if payload.dtype not in (torch.int8, torch.uint8, torch.float4_e2m1fn_x2):
        raise ValueError(f"{payload.dtype} payload with a scale")
    size = {torch.float8_e4m3fn: 16, torch.float8_e8m0fnu: 32, torch.uint8: 32}.get(scale.dtype, 0)  # NVFP4, MXFP4
    value = unpack_fp4(payload)
    if [scale.shape[0], scale.shape[1] * size] != list(value.shape):
        raise ValueError(f"{scale.dtype} scale of shape {list(scale.shape)} for FP4 values {list(value.shape)}")
    value = value * spread(scale_values(scale), 1, size)
    if size == 32:
        return value
    multiply, divide = get(".weight_scale_2"), get(".weight_global_scale")
    if (multiply is None) == (divide is None):
        raise ValueError("NVFP4 needs exactly one of weight_scale_2 and weight_global_scale")
    return value * multiply.float() if multiply is not None else value / divide.float()


def open_checkpoint(folder: str | Path, cache: bool = False) -> tuple[dict, Weights]:
    """(config, weights) of a folder with config.json and safetensors shards in native names.

    A tensor is read and dequantised when `weights(name)` asks for it and then forgotten, so a big checkpoint streams;
    with `cache` all stays in memory as fp32 (small checkpoints, many forwards). KeyError for a tensor that is not
    there, ValueError for one in no known format.
    """
    from safetensors import safe_open

    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    block_size = tuple((config.get("quantization_config") or {}).get("weight_block_size") or (128, 128))
    index = folder / "model.safetensors.index.json"
    names = {path.name for path in folder.glob("*.safetensors")}
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
    shards = [safe_open(folder / name, framework="pt") for name in sorted(names)]
    where = {key: shard for shard in shards for key in shard.keys()}
    kept: dict[str, Tensor] = {}

    def read(key: str) -> Tensor | None:
        return where[key].get_tensor(key) if key in where else None

    def weights(name: str) -> Tensor:
        if name in kept:
            return kept[name]
        base = name.removesuffix(".weight")
        if name not in where and base + ".weight_packed" not in where:
            raise KeyError(f"{folder}: no tensor {name} in {len(shards)} shards")
        try:
            tensor = dequantise(lambda s: read(base + s), block_size) if base != name else read(name)
        except ValueError as error:
            raise ValueError(f"{folder}: {base}: {error}") from None
        tensor = tensor.float() if tensor.is_floating_point() else tensor.long()
        if cache:
            kept[name] = tensor
        return tensor

    return config, weights


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reference.oracle", description="Plain fp32 forward, one prompt.")
    parser.add_argument("--model", required=True, help="folder with config.json and safetensors in native names")
    parser.add_argument("--prompt-ids", required=True, help="token ids: 1,2,3")
    parser.add_argument("--kv-quant", choices=("model", "off"), default="model")
    parser.add_argument("--dump", help="safetensors: token_ids, logits [S,V], hidden.0 .. hidden.L [S,n,D]")
    args = parser.parse_args()
    try:
        ids = torch.tensor([[int(i) for i in args.prompt_ids.split(",")]])
        with torch.no_grad():
            out = forward(*open_checkpoint(args.model), ids, kv_quant=args.kv_quant == "model")
    except (OSError, KeyError, IndexError, ValueError) as error:
        parser.error(str(error))
    for logit, token in zip(*out.logits[0, -1].topk(5), strict=True):
        print(f"{token.item():8d}  {logit.item():+.4f}")
    if args.dump:
        from safetensors.torch import save_file

        tensors = {"token_ids": ids[0], "logits": out.logits[0]}
        tensors |= {f"hidden.{i}": X[0].contiguous() for i, X in enumerate(out.hidden)}
        save_file(tensors, args.dump)


if __name__ == "__main__":
    main()
