"""The kernel of dsv4/ops/router.py."""

from __future__ import annotations

import torch

from . import MAX_TOKENS, PROMPT_TOKENS
from .arrivals import arrivals
from .launch import DTYPES, IN, INOUT, OUT, WEIGHT, WORK, Kernel, expect

_MAX_TOP_K, _MAX_EXPERTS, _SLICES = 8, 384, 4

_router = Kernel("router", {"x": IN, "gate": WEIGHT, "bias": WEIGHT, "table": WEIGHT, "ids": IN, "sums": WORK, "arrivals": INOUT,
                            "chosen": OUT, "weights": OUT, "tokens": int, "experts": int, "columns": int, "top_k": int, "vocab": int,
                            "route_scale": float, "gate_dtype": int})


def pack_gate(gate: torch.Tensor) -> torch.Tensor:
    """gate [E, D] fp32 -> the same values in half the bytes where every one is a bf16, as in the published checkpoints; else itself."""
    half = gate.bfloat16()
    return half.contiguous() if torch.equal(half.float(), gate) else gate.contiguous()


def router(x: torch.Tensor, gate: torch.Tensor, top_k: int, route_scale: float, *, bias: torch.Tensor | None = None,
           table: torch.Tensor | None = None, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [S, D] bf16, gate [E, D] fp32 or packed by pack_gate -> (experts [S, k] int32, weights [S, k] fp32).

    Either bias [E] fp32, or table [vocab, k] int64 and ids [S] int64. A score that is NaN is chosen last. Raises UserError for other shapes
    or dtypes: S up to 1,024, k up to 8, E up to 384, D a multiple of 8.
    """
    S, D = x.shape if x.dim() == 2 else (-1, -1)
    E = gate.shape[0]
    given = {"x": x, "gate": gate} | {name: t for name, t in (("bias", bias), ("table", table), ("ids", ids)) if t is not None}
    learned = bias is not None and table is None and bias.shape == (E,) and bias.dtype == torch.float32
    hashed = (bias is None and table is not None and ids is not None and table.shape[1:] == (top_k,) and table.shape[0] > 0
              and ids.shape == (S,) and table.dtype == ids.dtype == torch.int64)
    expect(1 <= S <= PROMPT_TOKENS and gate.shape == (E, D) and D % 8 == 0 and 1 <= top_k <= min(_MAX_TOP_K, E) and E <= _MAX_EXPERTS
           and x.dtype == torch.bfloat16 and gate.dtype in DTYPES and (learned or hashed), "router",
           f"x [S, D] in bf16, gate [E, D] in fp32 or bf16, and bias [E] in fp32 or table [vocab, {top_k}] and ids [S] in int64, S up to "
           f"{PROMPT_TOKENS}, top_k up to 8 and to E, E up to {_MAX_EXPERTS}, D a multiple of 8", **given)
    sums = torch.empty(S, E, _SLICES, dtype=torch.float32, device=x.device)
    weights = torch.empty(S, top_k, dtype=torch.float32, device=x.device)
    chosen = torch.empty(S, top_k, dtype=torch.int32, device=x.device)
    counters = arrivals("router", x.device, PROMPT_TOKENS // MAX_TOKENS)
    _router(x=x.contiguous(), gate=gate, bias=bias, table=table, ids=ids if hashed else None, sums=sums, arrivals=counters, chosen=chosen,
            weights=weights, tokens=S, experts=E, columns=D, top_k=top_k, vocab=len(table) if hashed else 0, route_scale=route_scale,
            gate_dtype=DTYPES[gate.dtype])
    return chosen, weights
