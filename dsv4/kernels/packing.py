"""A weight in the layout that the kernels stream (cuda/stream.cuh, whose expressions this file inverts). Torch only, on the weight's
device; beyond the result it needs about four times the codes of a chunk, 1 MB on a CPU and 64 MB on a GPU.

A matrix is tiles of 16 rows; a tile is items of 16 rows x 256 bytes of codes, with the scales of these codes behind them:

    format    columns of an item   scales                                               bytes
    BF16      128                  none                                                 4096
    FP8       256                  fp32, one for 8 rows x 128 columns                   4096 + 16
    NVFP4     512                  one byte for 1 x 16: 5 bits of exponent, 3 mantissa  4096 + 512
    MXFP4     512                  one byte for 1 x 32: the exponent                    4096 + 256

Rows and columns are filled up with zeros. In an item's codes, the 16 bytes of lane g * 4 + q stand at (2 u + h) * 512 + lane * 16, for u
in 0..3. With FP8 and FP4 they are of row 8 h + g: the columns 64 u + 16 q + 0..15 (FP8), 128 u + 64 v + 16 q + 0..15 for v = 0, 1 (FP4).
With BF16 they are of both rows, g and 8 + g: the columns 32 u + 8 q + 4 h + 0, 1 of both, then + 2, 3 of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from ..errors import UserError
from ..formats import MXFP4_BLOCK, NVFP4_BLOCK, Weight, e8m0_to_float

BF16, FP8, NVFP4, MXFP4 = range(4)  # stream.cuh's Format
FORMATS = {"plain": BF16, "fp8": FP8, "nvfp4": NVFP4, "mxfp4": MXFP4}
ROWS, CODES = 16, 4096
ITEM_COLUMNS = (128, 256, 512, 512)
ITEM_BYTES = (CODES, CODES + 16, CODES + 512, CODES + 256)
NVFP4_SHIFT = 20  # the kernels' NVFP4 sums are 2^-20 of code * scale
_MX_HIGHEST, _MX_LOWEST, _MX_NATURAL = 254, 128, -126  # stored exponents of MXFP4; the offset at which stored values are the true ones


def packed_shape(kind: str, rows: int, columns: int, tile_rows: int = ROWS) -> tuple[int, int, int]:
    """(tiles, items of a tile, bytes of an item) of a matrix; `tile_rows` is 8 in a pair."""
    code = FORMATS[kind]
    return -(-rows // tile_rows), -(-columns // ITEM_COLUMNS[code]), ITEM_BYTES[code]


def pack_matrix(weight: Weight, out: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """`weight` as uint8 [tiles, items, item bytes] (into `out` if given) and the factor by which the kernels' sums must be multiplied.

    Raises UserError if the codes or scales are none that bf16 and the layout hold exactly.
    """
    out = _destination(weight, ROWS, out)
    return out, _Packer(weight).write(out, slice(0, 2))


def pack_pair(first: Weight, second: Weight, out: torch.Tensor | None = None) -> tuple[torch.Tensor, tuple[float, float]]:
    """Two weights of one format and shape (w1 and w3 of an expert) as tiles of 8 rows of `first` and the same 8 of `second`, so that a
    lane has both; returns as pack_matrix, with a factor each."""
    if first.kind != second.kind or first.shape != second.shape:
        raise UserError(f"packing: expected two weights of one format and shape, found {first.kind} {list(first.shape)} and {second.kind} "
                        f"{list(second.shape)}")
    out = _destination(first, ROWS // 2, out)
    return out, (_Packer(first).write(out, slice(0, 1)), _Packer(second).write(out, slice(1, 2)))


def _destination(weight, tile_rows, out):
    shape = packed_shape(weight.kind, *weight.shape, tile_rows)
    if out is None:
        return torch.empty(shape, dtype=torch.uint8, device=weight.device)
    if out.dtype != torch.uint8 or tuple(out.shape) != shape or not out.is_contiguous():
        raise UserError(f"packing: expected a contiguous uint8 {list(shape)} to write to, found {out.dtype} {list(out.shape)}")
    return out


class _Packer:
    """One weight on its way: the checks and constants of the matrix, then chunks of tiles."""

    def __init__(self, weight: Weight):
        self.weight, self.code, self.columns = weight, FORMATS[weight.kind], weight.shape[1]
        self.factor, self.offset, self.live_only = 1.0, _MX_NATURAL, False
        (self._check_plain, self._check_fp8, self._check_nvfp4, self._check_mxfp4)[self.code]()

    def write(self, out: torch.Tensor, halves: slice) -> float:
        """Fills the rows `halves` (0: the first 8 of each tile, 1: the others) of all tiles."""
        tiles, items, item_bytes = out.shape
        codes = out.view(torch.int32)[..., : CODES // 4]
        if self.code == BF16:  # [tile, item, u, half, g, q, word, in two steps]
            codes = codes.view(tiles, items, 4, 2, 8, 4, 2, 2)[..., halves].permute(0, 1, 2, 7, 4, 5, 3, 6)
        else:
            codes = codes.view(tiles, items, 4, 2, 8, 4, 4)[:, :, :, halves].unflatten(6, (2, 2))
        behind = out[..., CODES:]
        height = 8 * (halves.stop - halves.start)
        limit = 1 << 20 if out.device.type == "cpu" else 1 << 26
        step = max(1, limit // (height * items * 256))
        for start in range(0, tiles, step):
            stop = min(tiles, start + step)
            rows = slice(start * height, min(stop * height, self.weight.shape[0]))
            self._write_chunk(rows, (stop - start) * height, codes[start:stop], behind[start:stop], halves)
        return self.factor

    def _write_chunk(self, rows, padded_rows, codes, behind, halves):
        weight, count, items, half = self.weight, codes.shape[0], codes.shape[1], codes.shape[3]
        payload = weight.payload[rows]
        if self.code == BF16:
            payload = payload.to(torch.bfloat16)
        words = _padded(payload.contiguous().view(torch.uint8), padded_rows, items * 256).view(torch.int32)
        if self.code in (BF16, FP8):
            grid = (_recoded(words, FP8) if self.code == FP8 else words).view(count, half, 8, items, 4, 4, 2, 2)
            codes.copy_(grid.permute(0, 3, 4, 1, 2, 5, 6, 7))
            if self.code == FP8:
                place = behind.view(torch.float32).view(count, items, 2, 2)[..., halves]  # [tile, item, 128 columns, half]
                place.copy_(self._fp8_scales(rows.start, count * half, items).view(count, half, items, 2).permute(0, 2, 3, 1))
            return
        wide = NVFP4_BLOCK if self.code == NVFP4 else MXFP4_BLOCK
        scales = _padded(weight.scale[rows].view(torch.uint8), padded_rows, items * 512 // wide)
        if self.code == NVFP4:
            words, scales = self._nvfp4(words, scales)
            place = behind.view(count, items, 8, 4, 4, 2, 2)  # [tile, item, g, q, u, v, half]
        else:
            scales = self._mxfp4(words, scales)
            place = behind.view(count, items, 8, 2, 4, 2, 2)  # q / 2 in q's place
        grid = _recoded(words, NVFP4).view(count, half, 8, items, 4, 2, 4, 2)  # v before q
        codes.copy_(grid.permute(0, 3, 4, 1, 2, 6, 5, 7))
        scales = scales.view(count, half, 8, items, 4, 2, place.shape[3])
        place[..., halves].copy_(scales.permute(0, 3, 2, 6, 4, 5, 1))

    # ---- bf16

    def _check_plain(self):
        payload = self.weight.payload
        if payload.dtype == torch.bfloat16:
            return
        for part in payload.split(4096):
            if not torch.equal(part, part.to(torch.bfloat16).to(part.dtype)):
                kind = str(payload.dtype).removeprefix("torch.")
                raise UserError(f"packing: expected weights that bf16 holds exactly, found {kind} ones that it does not")

    # ---- FP8

    def _check_fp8(self):
        weight = self.weight
        (high, wide), (rows, columns) = weight.block, weight.shape
        one_row, one_column = weight.row_offset + rows <= high, columns <= wide
        if not (one_row or high % 8 == weight.row_offset % 8 == 0) or not (one_column or wide % 128 == 0):
            raise UserError(f"packing: expected FP8 blocks of a multiple of 8 rows and 128 columns, found {high}x{wide} from row "
                            f"{weight.row_offset}")
        for part in weight.payload.view(torch.int8).split(4096):
            if bool(((part == 127) | (part == -1)).any()):
                raise UserError("packing: expected FP8 weights that are numbers, found NaN")

    def _fp8_scales(self, start, halves, items):
        """fp32 [halves, items, 2]: the scale of 8 rows each from row `start`, for 128 columns each; any one where all is padding."""
        weight = self.weight
        scales = e8m0_to_float(weight.scale) if weight.scale.dtype == torch.uint8 else weight.scale
        row = (torch.arange(halves, device=weight.device) * 8 + start + weight.row_offset) // weight.block[0]
        column = torch.arange(items * 2, device=weight.device) * 128 // weight.block[1]
        return scales[row.clamp(max=scales.shape[0] - 1)[:, None], column.clamp(max=scales.shape[1] - 1)]

    # ---- NVFP4

    def _check_nvfp4(self):
        self.factor = float(torch.tensor(self.weight.global_scale, dtype=torch.float32) * 2.0**NVFP4_SHIFT)
        if not 0 < self.factor < float("inf"):
            raise UserError(f"packing: expected an NVFP4 global scale above 0 and below 2^108, found {self.weight.global_scale}")
        bits = self.weight.scale.view(torch.uint8)
        low, high = _extremes(bits) if bits.numel() else (1, 1)
        self.live_only = low == 0 or high > 127  # some scale is zero or negative
        if high >= 127 and bool(((bits & 127) == 127).any()):
            raise UserError("packing: expected NVFP4 scales that are numbers, found NaN")

    def _nvfp4(self, words, scales):
        """The scale 0 has no code, so its group's codes become 0; a negative scale's sign goes to its group's codes."""
        if self.live_only:
            keep = torch.where((scales & 127) == 0, 0, -1).to(torch.int32)
            flip = torch.where(scales > 127, 0x88888888 - (1 << 32), 0).to(torch.int32)
            groups = words.view(*scales.shape, NVFP4_BLOCK // 8)
            words = ((groups ^ flip[..., None]) & keep[..., None]).view(words.shape)
        return words, _nvfp4_scale_codes(scales.device)[scales.int()]

    # ---- MXFP4

    def _check_mxfp4(self):
        scales = self.weight.scale
        if not scales.numel():
            return
        low, high = _extremes(scales)
        natural = range(_MX_LOWEST + _MX_NATURAL, _MX_HIGHEST + _MX_NATURAL + 1)
        if low in natural and high in natural:
            return
        self.live_only = True
        parts = zip(self.weight.payload.split(4096), scales.split(4096), strict=True)
        seen = torch.cat([s[_live(p.contiguous().view(torch.int32), s)].unique() for p, s in parts])
        low, high = (int(seen.min()), int(seen.max())) if seen.numel() else (natural[0], natural[0])
        self.offset = max(_MX_NATURAL, high - _MX_HIGHEST)
        if high == 255 or low - self.offset < _MX_LOWEST:
            raise UserError(f"packing: expected MXFP4 scales from 2^-125 up, within 2^{_MX_HIGHEST - _MX_LOWEST} of each other, found "
                            f"2^{low - 127} to 2^{high - 127}")
        self.factor = 2.0 ** (self.offset - _MX_NATURAL)

    def _mxfp4(self, words, scales):
        codes = (scales.int() - self.offset).to(torch.uint8)
        return torch.where(_live(words, scales), codes, 0) if self.live_only else codes


def _extremes(values):
    """The least and the largest as numbers, for which the host waits once."""
    return torch.stack(torch.aminmax(values)).tolist()


def _live(words, scales):
    """Which groups of 32 hold a code other than +-0."""
    return ((words.view(*scales.shape, 4) & 0x77777777) != 0).any(-1)


def _padded(matrix, rows, columns):
    missing = columns - matrix.shape[1], rows - matrix.shape[0]
    return pad(matrix, (0, missing[0], 0, missing[1])) if any(missing) else matrix.contiguous()


# ------------------------------------------------------------------------------------------------------------ codes


def _expand_e2m1(w: int) -> int:
    """What expand_e2m1 of stream.cuh makes of a word, as the 8 codes it stands for: code j in bits 4 j + 0..3."""
    codes = 0
    for pair, bits in enumerate((w << 2, w << 6, w ^ w >> 8, w << 12 | w >> 20)):
        for half in range(2):
            value = bits >> 16 * half
            codes |= (value >> 6 & 7 | value >> 12 & 8) << 8 * pair + 4 * half
    return codes


def _expand_e4m3(w: int) -> int:
    """The same of expand_e4m3: 4 codes of 8 bits."""
    codes = 0
    for pair, bits in enumerate((w << 4, w ^ w >> 4)):
        for half in range(2):
            value = bits >> 16 * half
            codes |= (value >> 4 & 127 | value >> 8 & 128) << 16 * pair + 8 * half
    return codes


def _inverse(expand: Callable[[int], int]) -> list[int]:
    """The words that expand to each single bit; any codes are the exclusive or of single bits, and so is their word."""
    rows = [(expand(1 << bit), 1 << bit) for bit in range(32)]
    for bit in range(32):
        pivot = next(i for i in range(bit, 32) if rows[i][0] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        rows = [row if i == bit or not row[0] >> bit & 1 else (row[0] ^ rows[bit][0], row[1] ^ rows[bit][1]) for i, row in enumerate(rows)]
    return [word for _, word in rows]


@functools.lru_cache
def _tables(code: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [65536] each: the word of the low and of the high 16 bits of codes."""
    words = torch.tensor(_inverse(_expand_e4m3 if code == FP8 else _expand_e2m1), dtype=torch.int64)
    half = torch.arange(1 << 16)
    tables = []
    for first in (0, 16):
        table = torch.zeros(1 << 16, dtype=torch.int64)
        for bit in range(16):
            table ^= torch.where(half >> bit & 1 == 1, words[first + bit], 0)
        tables.append(torch.where(table >= 1 << 31, table - (1 << 32), table).to(torch.int32).to(device))
    return tuple(tables)


def _recoded(codes: torch.Tensor, code: int) -> torch.Tensor:
    """int32 codes in their own order -> the words that stream.cuh expands to them."""
    low, high = _tables(code, codes.device)
    flat = codes.reshape(-1)
    words = low.index_select(0, flat & 0xFFFF)
    words ^= high.index_select(0, flat.bitwise_right_shift(16).bitwise_and_(0xFFFF))
    return words.view(codes.shape)


@functools.lru_cache
def _nvfp4_scale_codes(device: torch.device) -> torch.Tensor:
    """uint8 [256]: e4m3 -> five bits of exponent + 9 and three of mantissa, normalised; the sign is dropped, 0 has no code."""
    codes = torch.zeros(128, dtype=torch.uint8)
    for byte in range(1, 127):
        mantissa, exponent = byte & 7, max(byte >> 3, 1) - 7
        mantissa += 8 if byte >> 3 else 0
        while mantissa < 8:
            mantissa, exponent = mantissa * 2, exponent - 1
        codes[byte] = exponent + 9 << 3 | mantissa & 7
    return codes.repeat(2).to(device)
