"""The next token from logits: penalty, temperature, top-k, top-p, one draw. In integers, so that every device draws the same token.

A token's mass stands for 2^40 * exp((logit - largest logit) / temperature). It is an integer function of that fp32 quotient, so sums of
masses are exact in any order: no device and no number of threads changes a token. top_p and the uniform number count in steps of 2^-30.
"""

from __future__ import annotations

import torch

from .backend import operation

FLT_MAX = 3.4028234663852886e38
STEPS = 1 << 30  # top_p and u are multiples of 1 / STEPS
# 2^31 * 2^x on [0, 1] for a minimax polynomial of degree 6, lowest power first: relative error 3e-9 with the truncations below, increasing.
POWER_OF_TWO = (2147483652, 1488521813, 515889645, 119149570, 20785153, 2671403, 466052)
_LOG2_E = 193635251  # log2(e) * 2^27
_MASS_ENDS = -28.5  # below this quotient a mass rounds to 0 (below -28.42 already)


def settings(temperature: float, top_p: float, repetition_penalty: float) -> tuple[float, int, float]:
    """What the arithmetic uses: temperature and penalty within fp32 (temperature 0 stays: greedy), top_p in steps of 2^-30, 0 for off."""
    if temperature:
        temperature = min(max(temperature, 1e-30), 3e38)
    return temperature, 0 if top_p >= 1 else max(1, round(top_p * STEPS)), min(max(repetition_penalty, 1e-30), 1e30)


def masses(quotient: torch.Tensor) -> torch.Tensor:
    """fp32 quotients, 0 or less -> int64 masses: round(2^40 * e^quotient) within 3e-9 of the value and 1.

    -quotient in steps of 2^-30 (rounded down), times log2(e), is n + g with n whole and 0 <= g < 1; the mass is 2^40 * 2^-n * 2^-g with
    2^-g = 2^(1-g) / 2 by the polynomial. Products stay below 2^63, results below 2^40 + 2^12.
    """
    inside = quotient >= _MASS_ENDS
    steps = torch.where(inside, -quotient * STEPS, 0.0).to(torch.int64)
    product = steps * _LOG2_E
    n, rest = product >> 57, (0xFFFFFFFF - (product >> 25 & 0xFFFFFFFF)) >> 1  # rest: 1 - g in steps of 2^-31
    power = torch.full_like(rest, POWER_OF_TWO[-1])
    for coefficient in POWER_OF_TWO[-2::-1]:
        power = coefficient + (power * rest >> 31)
    return torch.where(inside, (power << 8) + (1 << n >> 1) >> n, 0)


def share(total: torch.Tensor, steps: int | torch.Tensor) -> torch.Tensor:
    """floor(total * steps / 2^30), exact for total < 2^58 and steps <= 2^30: 88 bits do not fit, two halves do."""
    return (total >> 30) * steps + ((total & STEPS - 1) * steps >> 30)


def sample_ref(logits: torch.Tensor, seen: torch.Tensor, uniforms: torch.Tensor, positions: torch.Tensor, *, temperature: float,
               top_k: int, top_p: float, repetition_penalty: float) -> torch.Tensor:
    """The token [1] int64, or -1 if any logit is NaN or infinite. seen[token] becomes 1 (nothing with -1).

    logits [V] fp32; seen [V] uint8, 1 for tokens of the prompt and the answer so far; uniforms [N] fp32 in [0, 1), of which
    uniforms[positions[-1]] is used (the last one if N is smaller); positions [S] int64. `repetition_penalty` divides positive logits of
    seen tokens and multiplies their others, within fp32's range. `temperature` 0 takes the largest logit, the lowest id among equals.
    Otherwise tokens in descending order of logit, equals in ascending order of id: the first `top_k` (0: all), of these the fewest whose
    masses reach `top_p` of theirs (1: all); and of these, in ascending order of id, the first whose running sum of masses exceeds u
    times their sum.
    """
    temperature, top_p_steps, penalty = settings(temperature, top_p, repetition_penalty)
    if not bool(logits.isfinite().all()):
        return torch.full((1,), -1, dtype=torch.int64, device=logits.device)
    penalised = torch.where(logits > 0, logits / logits.new_tensor(penalty), logits * penalty).clamp(-FLT_MAX, FLT_MAX)
    logits = torch.where(seen != 0, penalised, logits) if penalty != 1 else logits
    ids = torch.arange(len(logits), device=logits.device)
    if temperature == 0:
        token = torch.where(logits == logits.max(), ids, len(logits)).min()
    else:
        order = torch.sort(logits, descending=True, stable=True).indices
        mass = masses((logits - logits.max()) / logits.new_tensor(temperature))
        kept = ids < (top_k or len(logits))  # by place in the order
        if top_p_steps:
            sums = (mass[order] * kept).cumsum(0)
            before = sums - mass[order]
            kept &= before < -share(-sums[-1:], top_p_steps)  # rounded up
        mass = torch.zeros_like(mass).scatter_(0, order, mass[order] * kept)
        u = uniforms[positions[-1:].clamp(max=len(uniforms) - 1)]
        sums = mass.cumsum(0)
        token = torch.where(sums > share(sums[-1:], (u * STEPS).to(torch.int64).clamp(0, STEPS - 1)), ids, len(logits)).min()
    seen[token] = 1
    return token[None]


sample = operation(sample_ref)
