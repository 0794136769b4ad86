"""The kernels of dsv4/ops/grouped.py around its two products, which are in cute/grouped.py."""

from __future__ import annotations

import torch

from ..formats import NVFP4_BLOCK
from .launch import DTYPES, IN, OUT, WORK, Kernel, expect
from .layouts import SCALE_ROWS, TMA_COLUMNS, GroupedNvfp4, Groups, Nvfp4, plan_entries, swizzled_bytes

MAX_EXPERTS, MAX_SLOTS = 8192, 8  # shared memory of cuda/group_choices.cu; kMaxSlots of cuda/sum_choices.cu

_group_choices = Kernel("group_choices", {"chosen": IN, "order": OUT, "rows": OUT, "offsets": OUT, "tiles": WORK, "pairs": WORK,
                                          "counts": OUT, "choices": int, "experts": int})
_group_nvfp4 = Kernel("group_nvfp4", {"values": IN, "scales": IN, "row_scales": IN, "order": IN, "tiles": IN, "counts": IN,
                                      "out_values": OUT, "out_scales": WORK, "out_row_scales": OUT, "columns": int, "slots": int,
                                      "entries": int, "swizzled": int})
_sum_choices = Kernel("sum_choices", {"y": IN, "rows": IN, "shared": IN, "out": OUT, "tokens": int, "columns": int, "slots": int,
                                      "row_dtype": int, "dtype": int})


def group_choices(chosen: torch.Tensor, experts: int) -> Groups:
    """chosen [S, k] int32 of 0 .. experts - 1, which nobody checks, 1 to 8,192 experts. Raises UserError for other shapes or dtypes."""
    expect(chosen.dim() == 2 and chosen.shape[1] > 0 and chosen.dtype == torch.int32 and 1 <= experts <= MAX_EXPERTS, "group_choices",
           f"chosen [S, k] in int32 and 1 to {MAX_EXPERTS} experts instead of {experts}", chosen=chosen)
    N = chosen.numel()
    shapes = (N,), chosen.shape, (experts + 1,), *((plan_entries(N, experts, h), 4) for h in (SCALE_ROWS, 2 * SCALE_ROWS)), (2,)
    if not N:
        return Groups(*(torch.zeros(shape, dtype=torch.int32, device=chosen.device) for shape in shapes))
    groups = Groups(*(torch.empty(shape, dtype=torch.int32, device=chosen.device) for shape in shapes))
    _group_choices(chosen=chosen.contiguous(), **groups._asdict(), choices=N, experts=experts)
    return groups


def group_nvfp4(x: Nvfp4, groups: Groups) -> GroupedNvfp4:
    """x of S rows, K a multiple of 32, either order of scales. Raises UserError for other shapes."""
    (S, width), (N,) = x.values.shape, groups.order.shape
    blocks = 2 * width // NVFP4_BLOCK
    expect(width > 0 and 2 * width % TMA_COLUMNS == 0 and len(groups.rows) == S and x.row_scales.shape == (S,)
           and x.scales.numel() == (swizzled_bytes(S, blocks) if x.swizzled else S * blocks), "group_nvfp4",
           f"x [S, K] of these groups' tokens, K a multiple of {TMA_COLUMNS}", values=x.values, scales=x.scales, row_scales=x.row_scales,
           rows=groups.rows)
    device = x.values.device
    out = GroupedNvfp4(torch.empty(N, width, dtype=torch.uint8, device=device),
                       torch.empty(swizzled_bytes(SCALE_ROWS * len(groups.tiles), blocks), dtype=torch.uint8, device=device),
                       torch.empty(N, device=device))
    if N:
        _group_nvfp4(values=x.values.contiguous(), scales=x.scales.contiguous(), row_scales=x.row_scales.contiguous(), order=groups.order,
                     tiles=groups.tiles, counts=groups.counts, out_values=out.values, out_scales=out.scales,
                     out_row_scales=out.row_scales, columns=2 * width, slots=groups.rows.shape[1], entries=len(groups.tiles),
                     swizzled=int(x.swizzled))
    return out


def sum_choices(y: torch.Tensor, groups: Groups, shared: torch.Tensor) -> torch.Tensor:
    """y [N, D] and shared [S, D] in bf16 or fp32, D a multiple of 8, up to 8 choices a token -> bf16 [S, D]. Raises UserError for other
    shapes or dtypes."""
    S, k = groups.rows.shape
    expect(y.dim() == shared.dim() == 2 and y.shape[0] == S * k and shared.shape == (S, y.shape[1]) and y.shape[1] % 8 == 0 and y.shape[1]
           and 1 <= k <= MAX_SLOTS and y.dtype in DTYPES and shared.dtype in DTYPES, "sum_choices",
           f"y [S k, D] and shared [S, D] in bf16 or fp32, D a multiple of 8, k up to {MAX_SLOTS}", y=y, shared=shared,
           rows=groups.rows)
    out = torch.empty(S, y.shape[1], dtype=torch.bfloat16, device=y.device)
    if S:
        _sum_choices(y=y.contiguous(), rows=groups.rows, shared=shared.contiguous(), out=out, tokens=S, columns=y.shape[1], slots=k,
                     row_dtype=DTYPES[y.dtype], dtype=DTYPES[shared.dtype])
    return out
