"""A weight in the layout that the kernels stream (cuda/stream.cuh, whose expressions this file inverts). On a GPU cuda/pack.cu makes it,
with no memory but the result's; the torch code here is its definition, and what a CPU's weights take: beyond the result it needs about four
times the codes of a chunk of 1 MB.

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

import ctypes
import functools
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from ..errors import UserError
from ..formats import MXFP4_BLOCK, NVFP4_BLOCK, Weight, e8m0_to_float
from . import launch
from .launch import IN, INOUT, OUT, Kernel

BF16, FP8, NVFP4, MXFP4 = range(4)  # stream.cuh's Format
FORMATS = {"plain": BF16, "fp8": FP8, "nvfp4": NVFP4, "mxfp4": MXFP4}
ROWS, CODES = 16, 4096
ITEM_COLUMNS = (128, 256, 512, 512)
ITEM_BYTES = (CODES, CODES + 16, CODES + 512, CODES + 256)
NVFP4_SHIFT = 20  # the kernels' NVFP4 sums are 2^-20 of code * scale
_CHUNK = 1 << 20  # bytes of codes that the definition packs at once
_MX_HIGHEST, _MX_LOWEST, _MX_NATURAL = 254, 128, -126  # stored exponents of MXFP4; the offset at which stored values are the true ones


def packed_shape(kind: str, rows: int, columns: int, tile_rows: int = ROWS) -> tuple[int, int, int]:
    """(tiles, items of a tile, bytes of an item) of a matrix; `tile_rows` is 8 in a pair."""
    code = FORMATS[kind]
    return -(-rows // tile_rows), -(-columns // ITEM_COLUMNS[code]), ITEM_BYTES[code]


_pack = Kernel("pack", {"codes": IN, "scales": IN, "second_codes": IN, "second_scales": IN, "out": OUT, "found": INOUT, "record": int,
                        "format": int, "rows": int, "columns": int, "row_bytes": int, "block_rows": int, "block_columns": int,
                        "row_offset": int, "scale_rows": int, "scale_columns": int, "floats": int})
_RECORD = 8  # words of cuda/pack.cu's record: what is wrong (bits), then four extremes of MXFP4's scales
_CODE_IS_NAN, _SCALE_IS_NAN = 1, 2


class Packing:
    """Packs weights of one device, each under a number below `count`. On a GPU the host does not wait for any: `factors` does, once for
    all, and raises what the others found. On a CPU they raise it themselves."""

    def __init__(self, count: int, device: torch.device):
        self.by_kernel = device.type == "cuda" or launch.emulator is not None
        self._found = torch.zeros(count, _RECORD, dtype=torch.int32, device=device) if self.by_kernel else None
        self._factors, self._kinds = [1.0] * count, [""] * count

    def matrix(self, number: int, weight: Weight, out: torch.Tensor) -> None:
        """Packs `weight` into `out`, uint8 of packed_shape. Raises UserError if the codes or scales are none that bf16 and the layout hold
        exactly."""
        _check_destination(weight, ROWS, out)
        if self.by_kernel:
            self._launch(number, out, weight, None)
        else:
            self._factors[number] = _Packer(weight).write(out, slice(0, 2))

    def pair(self, number: int, first: Weight, second: Weight, out: torch.Tensor) -> None:
        """Packs two weights of one format and shape (w1 and w3 of an expert), under `number` and the next one, as tiles of 8 rows of
        `first` and the same 8 of `second`, so that a lane has both. Errors as `matrix`."""
        if first.kind != second.kind or first.shape != second.shape:
            raise UserError(f"packing: expected two weights of one format and shape, found {first.kind} {list(first.shape)} and "
                            f"{second.kind} {list(second.shape)}")
        _check_destination(first, ROWS // 2, out)
        if not self.by_kernel:
            self._factors[number] = _Packer(first).write(out, slice(0, 1))
            self._factors[number + 1] = _Packer(second).write(out, slice(1, 2))
        elif first.kind == "fp8" and _fp8_place(first) != _fp8_place(second):  # one is a slice from within a block: no expert is
            raise UserError("packing: expected two FP8 weights with blocks alike")
        else:
            self._launch(number, out, first, second)

    def factors(self) -> list[float]:
        """By number, what the kernels' sums must be multiplied by. Raises UserError, as `matrix` does, for the first weight that has it."""
        if self.by_kernel:
            for number, (kind, (wrong, *extremes)) in enumerate(zip(self._kinds, self._found[:, :5].tolist(), strict=True)):
                if wrong & _CODE_IS_NAN:
                    raise _no_numbers("FP8 weights")
                if wrong & _SCALE_IS_NAN:
                    raise _no_numbers("NVFP4 scales" if kind == "nvfp4" else "FP8 scales")
                if kind == "mxfp4":
                    low, high, live_low, live_high = (256 - x if i % 2 == 0 else x - 1 for i, x in enumerate(extremes))
                    offset, _ = _mxfp4_offset(low, high, lambda live=(live_low, live_high): None if live[1] < 0 else live)
                    self._factors[number] = _mxfp4_factor(offset)
        return self._factors

    def _launch(self, number, out, first, second):
        code, (rows, columns) = FORMATS[first.kind], first.shape
        both, block, offset, scales, floats = [first] if second is None else [first, second], (1, 1), 0, (1, 1), 0
        for at, weight in enumerate(both, number):
            self._kinds[at] = weight.kind
            if code == NVFP4:
                self._factors[at] = _nvfp4_factor(weight)
            elif code == FP8:
                _check_fp8_blocks(weight)
                block, offset, scales = weight.block, weight.row_offset, tuple(weight.scale.shape)
                floats = int(weight.scale.dtype == torch.float32)
            elif code == BF16:
                _check_plain(weight)
        if not rows * columns:
            return
        codes = [w.payload if code != BF16 or w.payload.dtype == torch.bfloat16 else w.payload.to(torch.bfloat16) for w in both]
        sides = [t if t is None or t.is_contiguous() else t.contiguous() for t in (*codes, *(w.scale for w in both))]
        if second is None:
            sides = [sides[0], None, sides[1], None]
        _pack(codes=sides[0], scales=sides[2], second_codes=sides[1], second_scales=sides[3], out=out, found=self._found, record=number,
              format=code, rows=rows, columns=columns, row_bytes=(2 * columns, columns, columns // 2, columns // 2)[code],
              block_rows=block[0], block_columns=block[1], row_offset=offset, scale_rows=scales[0], scale_columns=scales[1], floats=floats)


def _check_destination(weight, tile_rows, out):
    shape = packed_shape(weight.kind, *weight.shape, tile_rows)
    if out.dtype != torch.uint8 or out.shape != shape or not out.is_contiguous():
        raise UserError(f"packing: expected a contiguous uint8 {list(shape)} to write to, found {out.dtype} {list(out.shape)}")


# --------------------------------------------------------------------------------------------- what both forms refuse


def _no_numbers(what):
    return UserError(f"packing: expected {what} that are numbers, found NaN{' or infinity' * (what == 'FP8 scales')}")


def _check_plain(weight):
    """Waits for the device where the weight is not bf16, which no published checkpoint has."""
    payload = weight.payload
    if payload.dtype == torch.bfloat16:
        return
    for part in payload.split(4096):
        if not torch.equal(part, part.to(torch.bfloat16).to(part.dtype)):
            kind = str(payload.dtype).removeprefix("torch.")
            raise UserError(f"packing: expected weights that bf16 holds exactly, found {kind} ones that it does not")


def _fp8_place(weight):
    return weight.block, weight.row_offset, weight.scale.shape, weight.scale.dtype


def _check_fp8_blocks(weight):
    (high, wide), (rows, columns) = weight.block, weight.shape
    one_row, one_column = weight.row_offset + rows <= high, columns <= wide
    if not (one_row or high % 8 == weight.row_offset % 8 == 0) or not (one_column or wide % 128 == 0):
        raise UserError(f"packing: expected FP8 blocks of a multiple of 8 rows and 128 columns, found {high}x{wide} from row "
                        f"{weight.row_offset}")


def _nvfp4_factor(weight):
    """Of the kernels' sums; rounded to fp32 as the tensors that it ends in are, without making one."""
    factor = ctypes.c_float(ctypes.c_float(weight.global_scale).value * 2.0**NVFP4_SHIFT).value
    if not 0 < factor < float("inf"):
        raise UserError(f"packing: expected an NVFP4 global scale above 0 and below 2^108, found {weight.global_scale}")
    return factor


def _mxfp4_offset(low, high, live):
    """(what is taken from a scale's exponent to store it, whether groups of zeros are stored as 0 and so do not count). low, high: of all
    scales; live(): of those of groups that are not zero, or None."""
    if low >= _MX_LOWEST + _MX_NATURAL and high <= _MX_HIGHEST + _MX_NATURAL:
        return _MX_NATURAL, False
    if high < 255:
        low, high = live() or (_MX_LOWEST + _MX_NATURAL,) * 2
    offset = max(_MX_NATURAL, high - _MX_HIGHEST)
    if high == 255 or low - offset < _MX_LOWEST:
        raise UserError(f"packing: expected MXFP4 scales from 2^-125 up, within 2^{_MX_HIGHEST - _MX_LOWEST} of each other, found "
                        f"2^{low - 127} to 2^{high - 127}")
    return offset, True


def _mxfp4_factor(offset):
    return 2.0 ** (offset - _MX_NATURAL)


# ------------------------------------------------------------------------------------------------------ the definition


class _Packer:
    """One weight on its way: the checks and constants of the matrix, then chunks of tiles."""

    def __init__(self, weight: Weight):
        self.weight, self.code, self.columns = weight, FORMATS[weight.kind], weight.shape[1]
        self.factor, self.offset, self.live_only = 1.0, _MX_NATURAL, False
        (lambda: _check_plain(weight), self._check_fp8, self._check_nvfp4, self._check_mxfp4)[self.code]()

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
        step = max(1, _CHUNK // (height * items * 256))
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

    # ---- FP8

    def _check_fp8(self):
        _check_fp8_blocks(self.weight)
        for part in self.weight.payload.view(torch.int8).split(4096):
            if bool(((part == 127) | (part == -1)).any()):
                raise _no_numbers("FP8 weights")
        scale = self.weight.scale
        if bool((scale == 255).any() if scale.dtype == torch.uint8 else not scale.isfinite().all()):
            raise _no_numbers("FP8 scales")

    def _fp8_scales(self, start, halves, items):
        """fp32 [halves, items, 2]: the scale of 8 rows each from row `start`, for 128 columns each; any one where all is padding."""
        weight = self.weight
        scales = e8m0_to_float(weight.scale) if weight.scale.dtype == torch.uint8 else weight.scale
        row = (torch.arange(halves) * 8 + start + weight.row_offset) // weight.block[0]
        column = torch.arange(items * 2) * 128 // weight.block[1]
        return scales[row.clamp(max=scales.shape[0] - 1)[:, None], column.clamp(max=scales.shape[1] - 1)]

    # ---- NVFP4

    def _check_nvfp4(self):
        self.factor = _nvfp4_factor(self.weight)
        bits = self.weight.scale.view(torch.uint8)
        low, high = _extremes(bits) if bits.numel() else (1, 1)
        self.live_only = low == 0 or high > 127  # some scale is zero or negative
        if high >= 127 and bool(((bits & 127) == 127).any()):
            raise _no_numbers("NVFP4 scales")

    def _nvfp4(self, words, scales):
        """The scale 0 has no code, so its group's codes become 0; a negative scale's sign goes to its group's codes."""
        if self.live_only:
            keep = torch.where((scales & 127) == 0, 0, -1).to(torch.int32)
            flip = torch.where(scales > 127, 0x88888888 - (1 << 32), 0).to(torch.int32)
            groups = words.view(*scales.shape, NVFP4_BLOCK // 8)
            words = ((groups ^ flip[..., None]) & keep[..., None]).view(words.shape)
        return words, _nvfp4_scale_codes()[scales.int()]

    # ---- MXFP4

    def _check_mxfp4(self):
        scales = self.weight.scale
        if not scales.numel():
            return

        def live():
            parts = zip(self.weight.payload.split(4096), scales.split(4096), strict=True)
            seen = torch.cat([s[_live(p.contiguous().view(torch.int32), s)].unique() for p, s in parts])
            return (int(seen.min()), int(seen.max())) if seen.numel() else None

        self.offset, self.live_only = _mxfp4_offset(*_extremes(scales), live)
        self.factor = _mxfp4_factor(self.offset)

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
def _tables(code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [65536] each: the word of the low and of the high 16 bits of codes."""
    words = torch.tensor(_inverse(_expand_e4m3 if code == FP8 else _expand_e2m1), dtype=torch.int64)
    half = torch.arange(1 << 16)
    tables = []
    for first in (0, 16):
        table = torch.zeros(1 << 16, dtype=torch.int64)
        for bit in range(16):
            table ^= torch.where(half >> bit & 1 == 1, words[first + bit], 0)
        tables.append(torch.where(table >= 1 << 31, table - (1 << 32), table).to(torch.int32))
    return tuple(tables)


def _recoded(codes: torch.Tensor, code: int) -> torch.Tensor:
    """int32 codes in their own order -> the words that stream.cuh expands to them."""
    low, high = _tables(code)
    flat = codes.reshape(-1)
    words = low.index_select(0, flat & 0xFFFF)
    words ^= high.index_select(0, flat.bitwise_right_shift(16).bitwise_and_(0xFFFF))
    return words.view(codes.shape)


@functools.lru_cache
def _nvfp4_scale_codes() -> torch.Tensor:
    """uint8 [256]: e4m3 -> five bits of exponent + 9 and three of mantissa, normalised; the sign is dropped, 0 has no code."""
    codes = torch.zeros(128, dtype=torch.uint8)
    for byte in range(1, 127):
        mantissa, exponent = byte & 7, max(byte >> 3, 1) - 7
        mantissa += 8 if byte >> 3 else 0
        while mantissa < 8:
            mantissa, exponent = mantissa * 2, exponent - 1
        codes[byte] = exponent + 9 << 3 | mantissa & 7
    return codes.repeat(2)
