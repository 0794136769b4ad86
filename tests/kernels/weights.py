"""Weights whose bytes are drawn, not quantised: every code and every scale a format has, in any shape; and one or two of them packed."""

import torch

from dsv4.formats import Weight, from_reciprocal
from dsv4.kernels.packing import ROWS, Packing, packed_shape

KINDS = ("plain", "fp8", "fp8 fp32", "nvfp4", "nvfp4 divisor", "mxfp4")


def _bytes(rng, *shape, low=0, high=256):
    return torch.randint(low, high, shape, generator=rng, dtype=torch.uint8)


def any_weight(rng, kind: str, rows: int, columns: int, block: tuple[int, int] = (128, 128)) -> Weight:
    """`kind`: one of KINDS. columns must be a multiple of 16 (NVFP4) or 32 (MXFP4). About one NVFP4 scale in 16 is 0; MXFP4 scales span
    2^20."""
    if kind == "plain":
        return Weight.plain(torch.randn(rows, columns, generator=rng).bfloat16())
    if kind.startswith("fp8"):
        codes = _bytes(rng, rows, columns)
        codes[codes & 127 == 127] = 0x80  # -0 where there would be NaN
        shape = -(-rows // block[0]), -(-columns // block[1])
        scale = torch.rand(shape, generator=rng) + 0.5 if kind == "fp8 fp32" else _bytes(rng, *shape, low=110, high=130)
        return Weight("fp8", (rows, columns), codes.view(torch.float8_e4m3fn), scale, block=block)
    codes = _bytes(rng, rows, columns // 2)
    if kind == "mxfp4":
        return Weight("mxfp4", (rows, columns), codes, _bytes(rng, rows, columns // 32, low=108, high=129), block=(1, 32))
    scale = _bytes(rng, rows, columns // 16, high=127) * (_bytes(rng, rows, columns // 16) > 15)
    weight = Weight("nvfp4", (rows, columns), codes, scale.view(torch.float8_e4m3fn), 0.0123, block=(1, 16))
    return from_reciprocal(weight, 81.3) if kind == "nvfp4 divisor" else weight


def pack_matrix(weight: Weight, out: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """`weight` as packing.Packing packs it, into `out` if given, and its factor."""
    out = _destination(weight, ROWS) if out is None else out
    packing = Packing(1, weight.device)
    packing.matrix(0, weight, out)
    return out, packing.factors()[0]


def pack_pair(first: Weight, second: Weight) -> tuple[torch.Tensor, tuple[float, float]]:
    """Two weights as Packing.pair packs them, and a factor each."""
    out, packing = _destination(first, ROWS // 2), Packing(2, first.device)
    packing.pair(0, first, second, out)
    return out, tuple(packing.factors())


def _destination(weight, tile_rows):
    return torch.empty(packed_shape(weight.kind, *weight.shape, tile_rows), dtype=torch.uint8, device=weight.device)
