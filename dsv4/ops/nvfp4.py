"""The inputs of NVFP4 tensor-core products, packed (alone, behind an RMS norm, behind SwiGLU; the rule is quant.nvfp4_round_trip's), and
the product itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..formats import NVFP4_BLOCK, e2m1_to_float
from ..kernels.layouts import GATE_UP, Nvfp4, Nvfp4Operand, pack_k_major, swiglu_scale, swizzle_scales, unpack_k_major, unswizzle_scales
from .backend import operation
from .norm import rms_norm
from .quant import nvfp4_codes, nvfp4_rows


def _pack_nvfp4(v: torch.Tensor, row: torch.Tensor, swizzled: bool) -> Nvfp4:
    code, scale = nvfp4_codes(v.unflatten(-1, (-1, NVFP4_BLOCK)), row)
    scale = scale.view(torch.uint8) & 0x7F  # one NaN, whatever its sign was
    return Nvfp4(pack_k_major(code.flatten(-2), 2), swizzle_scales(scale) if swizzled else scale, row, swizzled)


def unpack_nvfp4(x: Nvfp4) -> torch.Tensor:
    """The values [S, K] in fp32 that a reader of the packed form sees."""
    code = unpack_k_major(x.values, len(x.values), 2 * x.values.shape[1])
    scale = x.plain_scales().view(torch.float8_e4m3fn).float() * x.row_scales[:, None]
    return (e2m1_to_float(code).unflatten(-1, (-1, NVFP4_BLOCK)) * scale[..., None]).flatten(-2)


def to_nvfp4_ref(x: torch.Tensor, swizzled: bool = False) -> Nvfp4:
    """The packed form of nvfp4_round_trip: x [S, K] any float dtype, K a multiple of 16; `swizzled`: the scales in the hardware's order.

    Codes have x's sign, also where they round to zero; all are 0 in a block whose scale is zero or NaN. A NaN makes its block's scale NaN
    and its row's 1; an infinity makes the row's scale infinite, so that all of the row reads as NaN.
    """
    v = x.float()
    return _pack_nvfp4(v, nvfp4_rows(v.unflatten(-1, (-1, NVFP4_BLOCK))), swizzled)


def rms_norm_to_nvfp4_ref(x: torch.Tensor, weight: torch.Tensor, eps: float, swizzled: bool = False) -> tuple[torch.Tensor, Nvfp4]:
    """(rms_norm(x), its NVFP4): x [S, K], weight [K] fp32. The norm in x's dtype is what the router and unquantised weights take."""
    y = rms_norm(x, weight, eps)
    return y, to_nvfp4_ref(y, swizzled)


def swiglu_to_nvfp4_ref(h: torch.Tensor, weights: torch.Tensor | None, limit: float, swizzled: bool = False) -> Nvfp4:
    """NVFP4 of silu(gate) * up, the clamps of model.md section 8 before it: h [S, 2 I] any float dtype, 16 gates and their 16 ups in turn
    (layouts.interleave_gate_up), weights [S] fp32 (the routing weight of each row) or None -> rows of I values.

    The rows' scale is known before a row is: |silu(gate) * up| < limit^2 (for limits from 0.279 on; of smaller ones it cuts what gates
    below zero make), so limit^2 / (6 * 448), times the routing weight. So the weight is applied in fp32 before w2, as everywhere, and costs
    no bits. Blocks below about limit^2 * 2^-15 get coarser scales, those below
    limit^2 * 2^-19 become zero. Nothing is rounded to h's dtype in between.
    """
    gate, up = h.float().unflatten(-1, (-1, 2, GATE_UP)).unbind(-2)
    a = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    bound = torch.full((len(h),), swiglu_scale(limit), dtype=torch.float32, device=h.device)
    packed = _pack_nvfp4(a.flatten(-2), bound, swizzled)
    return packed if weights is None else packed._replace(row_scales=bound * weights)


def nvfp4_linear_ref(x: Nvfp4, weight: Nvfp4Operand) -> torch.Tensor:
    """x of K columns times weight [out, K]^T as an NVFP4 tensor core does it -> bf16 [S, out]: fp32 sums of e2m1 * e4m3 products, which are
    exact, and at the end the row's scale times the weight's. A row's result does not depend on its neighbours."""
    S, K, out = len(x.values), 2 * x.values.shape[1], len(weight.values)
    scales = unswizzle_scales(weight.scales, out, K // NVFP4_BLOCK), x.plain_scales()
    w, v = (e2m1_to_float(unpack_k_major(codes, rows, K)).unflatten(-1, (-1, NVFP4_BLOCK)) * s.view(torch.float8_e4m3fn).float()[..., None]
            for codes, rows, s in zip((weight.values, x.values), (out, S), scales, strict=True))
    return (v.flatten(1) @ w.flatten(1).T * (x.row_scales * weight.scale)[:, None]).to(torch.bfloat16)


nvfp4_linear = operation(nvfp4_linear_ref)
to_nvfp4 = operation(to_nvfp4_ref)
rms_norm_to_nvfp4 = operation(rms_norm_to_nvfp4_ref)
swiglu_to_nvfp4 = operation(swiglu_to_nvfp4_ref)
