"""Quantisers of activations: what the model was trained with (KV cache FP8, indexer FP4 after a Hadamard rotation) and what a GEMM's input
may get. The round trips are steps inside other operations: they return the values a reader of the packed form would see, in the input's
dtype. The packed NVFP4 of a tensor-core product is in nvfp4.py."""

from __future__ import annotations

import torch

from ..formats import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK, e2m1_to_float, power_of_two_ceil, round_e2m1

_ONE_OVER_448, _ONE_OVER_6 = torch.tensor(1 / 448, dtype=torch.float32).item(), torch.tensor(1 / 6, dtype=torch.float32).item()


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [..., K] as fp32 [..., ceil(K / block), block]; a ragged last block is filled up with zeros."""
    x = x.float()
    short = -x.shape[-1] % block
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.unflatten(-1, (-1, block))


def fp8_round_trip(x: torch.Tensor, block: int) -> torch.Tensor:
    """FP8 e4m3 with one ue8m0 scale per `block` values along the last axis, and back.

    block 64: the KV cache's non-rotary dims; block 128: the input of an FP8 linear. x [..., K] any float dtype; same shape and
    dtype back. Bit exact to model.md section 9 (official kernel `act_quant`): scale = 2^ceil(log2(max(amax, 1e-4) / 448)).
    """
    v = _blocks(x, block)
    scale = power_of_two_ceil(v.abs().amax(-1, keepdim=True).clamp_min(1e-4) * _ONE_OVER_448)
    q = (v / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (q.float() * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def fp4_round_trip(x: torch.Tensor) -> torch.Tensor:
    """FP4 e2m1 with one ue8m0 scale per 32 values along the last axis, and back: indexer q and k after the Hadamard rotation.

    Same shape and dtype back. Bit exact to model.md section 9 (official kernel `fp4_act_quant`).
    """
    v = _blocks(x, 32)
    scale = power_of_two_ceil(v.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) * _ONE_OVER_6)
    q = e2m1_to_float(round_e2m1(v / scale))
    return (q * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def nvfp4_codes(v: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, scales e4m3) of blocks [S, B, 16] fp32 with the rows' scales [S]; fp32 steps in the order written."""
    row, six = row[:, None], torch.tensor(E2M1_MAX, device=v.device)  # a tensor: CUDA divides by a python number through its reciprocal
    scale = (v.abs().amax(-1) / six / row).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    factor = (scale.float() * row)[..., None]
    code = round_e2m1(torch.where(factor > 0, v.abs() / factor, 0.0)) | torch.signbit(v).to(torch.uint8) << 3
    return torch.where(factor > 0, code, 0), scale


def nvfp4_rows(v: torch.Tensor) -> torch.Tensor:
    """The scale of each row of blocks [S, B, 16]: amax / (6 * 448), 1 where that is not above zero (zeros, NaN)."""
    row = v.abs().amax((-1, -2)) / torch.tensor(E2M1_MAX * E4M3_MAX, device=v.device)
    return torch.where(row > 0, row, 1.0)


def nvfp4_round_trip(x: torch.Tensor) -> torch.Tensor:
    """NVFP4 of a GEMM's input, and back: e2m1 values, one e4m3 scale per 16, one fp32 scale per row (token).

    x [..., K]; same shape and dtype back. The row's scale is amax / (6 * 448), so that the largest block scale is 448; a token's
    result does not depend on its neighbours. A block whose scale rounds to zero becomes zero.
    """
    v = _blocks(x, NVFP4_BLOCK)
    v = v.reshape(-1, *v.shape[-2:])
    row = nvfp4_rows(v)
    code, scale = nvfp4_codes(v, row)
    y = e2m1_to_float(code) * (scale.float() * row[:, None])[..., None]
    return y.flatten(-2)[:, : x.shape[-1]].reshape(x.shape).to(x.dtype)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x @ H * d^-0.5 along the last axis (a power of two), H Sylvester's matrix in natural order; fp32 inside, x's dtype back.

    Orthogonal, so it cancels in q . k except for what the FP4 rounding after it does (model.md section 7).
    """
    d = x.shape[-1]
    if d & (d - 1):
        raise ValueError(f"hadamard: expected a last axis that is a power of two, found {tuple(x.shape)}")
    y, half = x.float(), 1
    while half < d:
        pairs = y.unflatten(-1, (-1, 2, half))
        y = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        half *= 2
    return (y * d**-0.5).to(x.dtype)
