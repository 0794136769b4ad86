"""The kernel of dsv4/ops/experts.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import UserError
from . import MAX_TOKENS
from .launch import IN, OUT, WEIGHT, WORK, Kernel, expect
from .linear import blocks_at_once
from .packing import FORMATS, ROWS, Packing, packed_shape

_MAX_TOP_K, _MAX_EXPERTS = 8, 384

_moe = Kernel("moe", {"x": IN, "up_shared": WEIGHT, "up_routed": WEIGHT, "down_shared": WEIGHT, "down_routed": WEIGHT, "factors": WEIGHT,
                      "chosen": IN, "weights": IN, "hidden": WORK, "out": OUT, "tokens": int, "columns": int, "inner": int, "experts": int,
                      "top_k": int, "up_shared_format": int, "up_routed_format": int, "down_shared_format": int, "down_routed_format": int,
                      "blocks": int, "parts": int, "limit": float})


class PackedExperts(NamedTuple):
    """The experts of a layer as the kernel streams them. up_* and down_*: uint8 [experts, tiles, items, item bytes], one expert in those of
    the shared one; factors [experts + 1, 3] fp32 of w1, w3, w2, the shared expert's last; formats: of the four, in this order."""

    up_shared: torch.Tensor
    up_routed: torch.Tensor
    down_shared: torch.Tensor
    down_routed: torch.Tensor
    factors: torch.Tensor
    formats: tuple[int, int, int, int]
    columns: int
    inner: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self[:5])


def pack_experts(routed: Sequence, shared) -> PackedExperts:
    """Packs the routed experts, ops.Expert each, all of one format for w1 with w3 and one for w2, and the shared expert, on its device.

    Each expert is taken from `routed` once, in order, and not kept: a sequence that loads them one by one needs memory for one. Raises
    UserError for formats or shapes that differ, and for what packing.py refuses.
    """
    if not 1 <= len(routed) <= _MAX_EXPERTS:
        raise UserError(f"pack_experts: expected 1 to {_MAX_EXPERTS} experts, found {len(routed)}")
    (inner, columns), device, last = shared.w1.shape, shared.w1.device, len(routed)
    packing = Packing(3 * last + 3, device)  # on a GPU the host looks at all of them once
    up_routed, down_routed, formats_routed = _pack("expert {}", routed, inner, columns, device, packing, 0)
    up_shared, down_shared, formats_shared = _pack("the shared expert", [shared], inner, columns, device, packing, last)
    factors = torch.tensor(packing.factors()).view(-1, 3)
    formats = formats_shared[0], formats_routed[0], formats_shared[1], formats_routed[1]
    return PackedExperts(up_shared, up_routed, down_shared, down_routed, factors.to(device), formats, columns, inner)


def pack_shared(up: torch.Tensor, down: torch.Tensor, kinds: tuple[str, str], shared) -> PackedExperts:
    """The shared expert packed beside `places` for routed ones of these formats, which `pack_expert` or a copy fills later: `moe` takes the
    places' numbers for experts. Their rows of `factors` are to be filled too. Errors as pack_experts."""
    (inner, columns), device = shared.w1.shape, shared.w1.device
    packing = Packing(3, device)
    up_shared, down_shared, formats = _pack("the shared expert", [shared], inner, columns, device, packing, 0)
    factors = torch.tensor([1.0] * 3 * len(up) + packing.factors()).view(-1, 3)
    formats = formats[0], FORMATS[kinds[0]], formats[1], FORMATS[kinds[1]]
    return PackedExperts(up_shared, up, down_shared, down, factors.to(device), formats, columns, inner)


def _pack(called, experts, inner, columns, device, packing, first):
    """(w1 with w3, w2, the two formats) of experts of one format, which are number `first` and the following to `packing`. called: how
    errors name number {}."""
    kinds = None
    numbers = itertools.count()
    for expert in experts:  # without enumerate, which holds an expert until the next one is there
        i = next(numbers)
        if kinds is None and expert.w1.kind == expert.w3.kind:
            kinds = expert.w1.kind, expert.w2.kind
            up, down = places(len(experts), kinds, inner, columns, device)
        place = (up[i], down[i]) if kinds else (None, None)
        pack_expert(called.format(i), expert, kinds, inner, columns, *place, packing, first + i)
        del expert
    return up, down, (FORMATS[kinds[0]], FORMATS[kinds[1]])


def places(count: int, kinds: tuple[str, str], inner: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for `count` experts of these formats (of w1 and w3, of w2) as PackedExperts has them: up_routed, down_routed."""
    shapes = packed_shape(kinds[0], inner, columns, ROWS // 2), packed_shape(kinds[1], columns, inner)
    return tuple(torch.empty(count, *shape, dtype=torch.uint8, device=device) for shape in shapes)


def pack_expert(called: str, expert, kinds: tuple[str, str] | None, inner: int, columns: int, up: torch.Tensor, down: torch.Tensor,
                packing: Packing, number: int) -> None:
    """Packs one ops.Expert of these formats into an expert's place of up_* and down_*; `packing` has its row of `factors` from number
    3 * `number` on. Raises UserError, in which it is `called` so, for other formats or shapes."""
    w1, w2, w3 = expert
    if kinds is None or (w1.kind, w2.kind, w3.kind) != (*kinds, kinds[0]) or w1.shape != (inner, columns) or w2.shape != (columns, inner) \
            or w3.shape != w1.shape:
        raise UserError(f"pack_experts: expected experts of one format, w1 and w3 {[inner, columns]} alike, w2 {[columns, inner]}, "
                        f"found w1, w2, w3 of {', '.join(w.kind for w in expert)} and {', '.join(str(list(w.shape)) for w in expert)} in "
                        f"{called}")
    packing.pair(3 * number, w1, w3, up)
    packing.matrix(3 * number + 2, w2, down)


def moe(x: torch.Tensor, experts: PackedExperts, chosen: torch.Tensor, weights: torch.Tensor, limit: float, activations: str = "bf16",
        shared_activations: str = "bf16") -> torch.Tensor:
    """x [S, D] bf16, chosen [S, k] int32, weights [S, k] fp32 -> fp32 [P, S, D], whose 2 or 4 parts the reader adds and rounds (ops.whole):
    the shared expert's sums, then those of the chosen ones.

    Raises UserError for other shapes or dtypes (S and k up to 8, D and the experts' inner size multiples of 8) or activations.
    """
    if activations != "bf16" or shared_activations != "bf16":
        raise UserError(f"moe: expected bf16 activations, found {activations} and {shared_activations}: run with --backend torch")
    S, k = chosen.shape if chosen.dim() == 2 else (-1, -1)
    expect(1 <= S <= MAX_TOKENS and 1 <= k <= _MAX_TOP_K and x.shape == (S, experts.columns) and weights.shape == chosen.shape
           and experts.columns % 8 == experts.inner % 8 == 0 and x.dtype == torch.bfloat16 and chosen.dtype == torch.int32
           and weights.dtype == torch.float32, "moe",
           f"x [S, {experts.columns}] in bf16, chosen [S, k] in int32 and weights [S, k] in fp32, S and k up to {MAX_TOKENS}, widths "
           "multiples of 8", x=x, chosen=chosen, weights=weights)
    hidden = torch.empty(S * (1 + k) + 1, experts.inner, dtype=torch.bfloat16, device=x.device)
    blocks = blocks_at_once(x.device)
    out = torch.empty(4 if experts.down_shared.shape[1] > blocks else 2, S, experts.columns, device=x.device)
    up_shared, up_routed, down_shared, down_routed = experts.formats
    _moe(x=x.contiguous(), up_shared=experts.up_shared, up_routed=experts.up_routed, down_shared=experts.down_shared,
         down_routed=experts.down_routed, factors=experts.factors, chosen=chosen.contiguous(), weights=weights.contiguous(), hidden=hidden,
         out=out, tokens=S, columns=experts.columns, inner=experts.inner, experts=len(experts.factors) - 1, top_k=k,
         up_shared_format=up_shared, up_routed_format=up_routed, down_shared_format=down_shared, down_routed_format=down_routed,
         blocks=blocks, parts=len(out), limit=limit)
    return out
