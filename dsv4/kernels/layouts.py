"""How block-scaled tensor-core products want their operands in memory, as pure functions on tensors of any device.

Scales, one byte for 16 values of a row, are a matrix [rows, groups]. The hardware takes it in tiles of 128 rows x 4 groups, each 512
contiguous bytes, row by row of tiles. Within a tile ("32x4x4", `SwizzleType.SWIZZLE_32_4_4` of torch, "1D block scaling factors layout" of
cuBLAS) the scale of row r and group g stands at 16 (r % 32) + 4 (r // 32) + g: the 16 bytes of lane r % 32 of tensor memory. A ragged last
tile is filled with zeros, so that values which are not there count nothing (a NaN there would).

Values, two e2m1 codes a byte, the even one low, are rows along K ("K-major"): what a checkpoint holds, but for the fill at the edges.

The rows of a step's routed experts (`Groups`) lie one expert behind the other, without gaps; their scales are in tiles that begin anew with
each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..formats import E2M1_MAX, E4M3_MAX, Weight

SCALE_ROWS, SCALE_GROUPS = 128, 4  # of a tile
TILE_BYTES = SCALE_ROWS * SCALE_GROUPS
MMA_COLUMNS = 64  # K of one NVFP4 product: four scales
TMA_COLUMNS = 32  # a tensor copy wants rows that are multiples of 16 bytes
GATE_UP = 16  # rows of w1, then as many of w3: the gates and ups of one NVFP4 block of the result lie together


class Nvfp4(NamedTuple):
    """Rows [S, K] (tokens) in NVFP4: element [s, k] is e2m1(values) * (e4m3(scales)[s, k // 16] * row_scales[s]).

    values: uint8 [S, K / 2], the even element in the low nibble. scales: uint8, e4m3 bytes of sign 0, [S, K / 16], or flat and in the order
    of `swizzle_scales` if `swizzled`. row_scales: fp32 [S].
    """

    values: torch.Tensor
    scales: torch.Tensor
    row_scales: torch.Tensor
    swizzled: bool

    def plain_scales(self) -> torch.Tensor:
        """The scales' bytes as [S, K / 16], whatever their order is."""
        return unswizzle_scales(self.scales, len(self.values), self.values.shape[1] // 8) if self.swizzled else self.scales


class Nvfp4Operand(NamedTuple):
    """An NVFP4 weight [out, in] as nvfp4_linear takes it. values: uint8 [out, in' / 2], in' the next multiple of 32; scales: e4m3 bytes in
    the order of swizzle_scales; scale: of all elements, an fp32 value."""

    values: torch.Tensor
    scales: torch.Tensor
    scale: float


def nvfp4_operand(weight: Weight) -> Nvfp4Operand:
    """The weight's codes and scales, none changed. Raises ValueError for a weight that is no NVFP4."""
    if weight.kind != "nvfp4":
        raise ValueError(f"expected an nvfp4 weight, found {weight.kind}")
    return Nvfp4Operand(pad_k_major(weight.payload, TMA_COLUMNS), swizzle_scales(weight.scale.view(torch.uint8)), weight.global_scale)


class Groups(NamedTuple):
    """Which rows are whose, on the device: the N = S k choices of `chosen` [S, k], a row each, sorted by expert and within an expert by
    token and slot. All int32.

    order: [N], the choice (token * k + slot) of each row. rows: [S, k], the row of each choice. offsets: [E + 1], an expert's first row.
    tiles and pairs: [plan_entries, 4], an entry for each 128 (256) rows of an expert: the expert, the first row, how many rows, the tile of
    scales that they begin. counts: [2], how many entries these two have; what is behind them means nothing.
    """

    order: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    pairs: torch.Tensor
    counts: torch.Tensor


class GroupedNvfp4(NamedTuple):
    """The rows [N, K] of Groups in NVFP4. values: uint8 [N, K / 2]; scales: e4m3 bytes, `len(groups.tiles)` rows of tiles, those of an
    expert from its first entry's on, zeros in its last tile behind its rows, anything behind the last expert's; row_scales: fp32 [N]."""

    values: torch.Tensor
    scales: torch.Tensor
    row_scales: torch.Tensor

    def of(self, groups: Groups, expert: int) -> Nvfp4:
        """An expert's rows. Waits for the device."""
        first, last = groups.offsets[expert : expert + 2].tolist()
        wide = _tiles(1, self.values.shape[1] // 8)[1] * TILE_BYTES
        tile = _first_tiles(groups)[expert].item() * wide
        scales = self.scales[tile : tile + _tiles(last - first, 1)[0] * wide]
        return Nvfp4(self.values[first:last], scales, self.row_scales[first:last], True)


class GroupedOperand(NamedTuple):
    """The NVFP4 weights of E experts, [E, out, in] together. values: uint8 [E, out, in' / 2], in' the next multiple of 32; scales: e4m3
    bytes [E, swizzled_bytes]; scale: fp32 [E], or [E, 2] where the rows are 16 of w1 and the same 16 of w3 in turn."""

    values: torch.Tensor
    scales: torch.Tensor
    scale: torch.Tensor


def plan_entries(rows: int, experts: int, height: int) -> int:
    """The most entries of `height` rows that so many rows of so many experts can have."""
    return (rows + (height - 1) * min(rows, experts)) // height


def _first_tiles(groups: Groups) -> torch.Tensor:
    """int64 [E]: the tile of scales that an expert's first row begins."""
    tiles = (groups.offsets[1:] - groups.offsets[:-1] + SCALE_ROWS - 1) // SCALE_ROWS
    return tiles.cumsum(0) - tiles


def group_scales(scales: torch.Tensor, groups: Groups) -> torch.Tensor:
    """fp32 scales [B, N] of the rows of Groups, those of one block of K together -> [B, 128 * len(groups.tiles)], where each expert's rows
    begin a tile of 128, as the plan has it; zeros in the fill. Does not wait for the device.

    A copy of a tile's scales begins at a multiple of 16 bytes there, which an expert's first row need not.
    """
    row = torch.arange(scales.shape[1], dtype=torch.int32, device=scales.device)
    expert = torch.searchsorted(groups.offsets[1:], row, right=True)
    out = scales.new_zeros(len(scales), SCALE_ROWS * len(groups.tiles))
    out[:, SCALE_ROWS * _first_tiles(groups)[expert] + row - groups.offsets[expert]] = scales
    return out


def grouped_operand(weights: Sequence[Weight]) -> GroupedOperand:
    """The experts' weights of one shape (w2's). Raises ValueError for a weight that is no NVFP4."""
    operands = [nvfp4_operand(w) for w in weights]
    return GroupedOperand(torch.stack([o.values for o in operands]), torch.stack([o.scales for o in operands]),
                          torch.tensor([o.scale for o in operands], dtype=torch.float32, device=operands[0].values.device))


def grouped_gate_up(gates: Sequence[Weight], ups: Sequence[Weight]) -> GroupedOperand:
    """Each expert's w1 and w3 as one operand, by 16 rows in turn. Raises ValueError for a weight that is no NVFP4, or a w3 of another shape
    than its w1."""
    values, scales, scale = [], [], []
    for pair in zip(gates, ups, strict=True):
        if any(w.kind != "nvfp4" for w in pair):
            raise ValueError(f"expected nvfp4 weights, found {' and '.join(w.kind for w in pair)}")
        values.append(pad_k_major(interleave_gate_up(*(w.payload for w in pair)), TMA_COLUMNS))
        scales.append(swizzle_scales(interleave_gate_up(*(w.scale.view(torch.uint8) for w in pair))))
        scale.append([w.global_scale for w in pair])
    return GroupedOperand(torch.stack(values), torch.stack(scales), torch.tensor(scale, dtype=torch.float32, device=values[0].device))


def swiglu_scale(limit: float) -> float:
    """The fp32 scale of all rows of a SwiGLU whose clamp bounds its result by limit^2 (limits from 0.279 on)."""
    return (torch.tensor(limit, dtype=torch.float32) * limit / (E2M1_MAX * E4M3_MAX)).item()


def _tiles(rows: int, groups: int) -> tuple[int, int]:
    return -(-rows // SCALE_ROWS), -(-groups // SCALE_GROUPS)


def swizzled_bytes(rows: int, groups: int) -> int:
    """The size of what swizzle_scales makes of [rows, groups]."""
    high, wide = _tiles(rows, groups)
    return high * wide * TILE_BYTES


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, groups] of a 1-byte dtype -> flat [swizzled_bytes], same dtype (see the top of this file)."""
    rows, groups = scales.shape
    high, wide = _tiles(rows, groups)
    full = torch.zeros(high * SCALE_ROWS, wide * SCALE_GROUPS, dtype=torch.uint8, device=scales.device)
    full[:rows, :groups] = scales.view(torch.uint8)
    # [tile row, quarter, lane, tile column, group] -> [tile row, tile column, lane, quarter, group]
    return full.view(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """The inverse of swizzle_scales: flat -> [rows, groups]. Raises ValueError for a size that is not theirs."""
    size = swizzled_bytes(rows, groups)
    if swizzled.numel() != size:
        raise ValueError(f"swizzled scales of {rows} rows of {groups}: expected {size} bytes, found {swizzled.numel()}")
    high, wide = _tiles(rows, groups)
    tiles = swizzled.view(torch.uint8).reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high * SCALE_ROWS, wide * SCALE_GROUPS)[:rows, :groups].contiguous().view(swizzled.dtype)


def pack_k_major(codes: torch.Tensor, columns: int = MMA_COLUMNS, rows: int = 1) -> torch.Tensor:
    """e2m1 codes 0..15 [R, K] uint8 -> bytes [R', K' / 2], R' and K' the next multiples of `rows` and `columns` (even); zeros fill up."""
    full = torch.nn.functional.pad(codes, (0, -codes.shape[1] % columns, 0, -codes.shape[0] % rows))
    return full[:, 0::2] | full[:, 1::2] << 4


def unpack_k_major(packed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of pack_k_major: bytes -> codes [rows, columns]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[:rows, :columns].contiguous()


def pad_k_major(payload: torch.Tensor, columns: int = MMA_COLUMNS, rows: int = 1) -> torch.Tensor:
    """A checkpoint's NVFP4 payload [R, K / 2], which is K-major already, filled up as by pack_k_major; itself if nothing is missing."""
    missing = -2 * payload.shape[1] % columns // 2, -payload.shape[0] % rows
    return torch.nn.functional.pad(payload, (0, missing[0], 0, missing[1])) if any(missing) else payload


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor, group: int = GATE_UP) -> torch.Tensor:
    """Rows of w1 and w3 (or their scales) [I, ...] as one matrix [2 I', ...]: `group` rows of gate, the same `group` of up, and so on.

    I' is the next multiple of `group`; rows of zeros fill up.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate and up: expected one shape and dtype, found {list(gate.shape)} {gate.dtype} and {list(up.shape)} "
                         f"{up.dtype}")
    blocks = -(-len(gate) // group)
    out = torch.zeros(blocks, 2, group, *gate.shape[1:], dtype=torch.uint8 if gate.element_size() == 1 else gate.dtype, device=gate.device)
    for i, part in enumerate((gate, up)):
        part = part.view(out.dtype)  # torch cannot index every 1-byte dtype
        whole = len(part) // group
        out[:whole, i] = part[: whole * group].unflatten(0, (whole, group)) if whole else out[:0, i]
        if whole < blocks:
            out[whole, i, : len(part) - whole * group] = part[whole * group :]
    return out.flatten(0, 2).view(gate.dtype)


def separate_gate_up(both: torch.Tensor, rows: int, group: int = GATE_UP) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of interleave_gate_up: (gate, up) of `rows` rows each."""
    parts = both.unflatten(0, (-1, 2, group))
    return tuple(parts[:, i].flatten(0, 1)[:rows].contiguous() for i in range(2))
