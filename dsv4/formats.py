"""The number formats of the weights. Owns the bytes -> values rule of each format (`Weight.dequantize`) and the quantisers
with which checkpoints are made; knows nothing of files, names or layers. Needs torch only.

    kind    payload                        scale                                   value of element [o, i]
    nvfp4   uint8 [out, in/2], two a byte  float8_e4m3fn [out, in/16]              (e2m1 * scale[o, i//16]) * global_scale
    mxfp4   uint8 [out, in/2], two a byte  uint8 [out, in/32], E8M0                e2m1 * 2^(scale[o, i//32] - 127)
    fp8     float8_e4m3fn [out, in]        uint8 (E8M0) or float32 [out/b, in/b]   e4m3 * scale[o//b, i//b], b usually 128
    plain   bfloat16, float16, float32     none                                    as stored

A byte holds element 2j in its low nibble and element 2j+1 in its high one. All arithmetic is fp32 in the order written above;
e2m1 * e4m3 is exact there, so an NVFP4 value is rounded once, by the global scale. Sources: OCP Microscaling Formats 1.0 (E2M1,
E4M3, E8M0), NVIDIA ModelOpt (two-level NVFP4), DeepSeek's inference/kernel.py (FP8 blocks), checkpoints.md section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX, E4M3_MAX, E4M3_TINY = 6.0, 448.0, 2.0 ** -9  # E4M3_TINY: the smallest E4M3 above zero
NVFP4_BLOCK, MXFP4_BLOCK = 16, 32
# Elements handled at a time: 1 MiB of fp32, which stays in a core's cache through all passes and bounds the scratch.
_CHUNK = 1 << 18
_tables: dict = {}


def _table(name: str, device) -> torch.Tensor:
    """Byte -> value, made once per device: e2m1 pairs (as one 8-byte item, so that a gather moves both), e4m3, e8m0."""
    key = (name, str(device))
    if key not in _tables:
        byte = torch.arange(256, dtype=torch.int64)
        if name == "e2m1":
            nibble = torch.tensor(E2M1_VALUES, dtype=torch.float32)
            table = torch.stack([nibble[byte & 15], nibble[byte >> 4]], dim=1).view(torch.int64).view(-1)
        elif name == "e4m3":
            table = byte.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
        else:  # 2^(byte - 127): the byte is fp32's exponent field, but for 0 (subnormal 2^-127) and 255 (NaN)
            bits = (byte << 23).to(torch.int32)
            bits[0], bits[255] = 1 << 22, 0x7FC00000
            table = bits.view(torch.float32)
        _tables[key] = table.to(device)
    return _tables[key]


def e8m0_to_float(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8, or float8_e8m0fnu reinterpreted) -> fp32 2^(byte - 127); 255 is NaN. Never a numeric cast: as a
    number, 2^-7 would become the byte 0."""
    byte = byte.view(torch.uint8)
    return _table("e8m0", byte.device)[byte.to(torch.int64)]


def power_of_two_ceil(v: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2 v) for fp32 v > 0, on the bits: no logarithm, so exact at every power of two (model.md section 9)."""
    bits = v.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


@dataclass
class Weight:
    """A linear's weight [out, in] in the format in which it is stored (see the table at the top of this file).

    `global_scale` multiplies: a python float that holds an fp32 value, 1.0 where the format has none. Where the checkpoint
    stores the reciprocal (compressed-tensors), `divisor` keeps the stored number: `dequantize` divides by it, so that the result is
    that of the format's own definition, and `global_scale` is 1/divisor rounded to fp32, for kernels that can only multiply
    (they differ from the definition by at most 1.5 units in the last place of fp32).
    `block` is (rows, columns) per scale; the last block of a row or column may be ragged. `row_offset` is the place of row 0 in its
    block, not 0 only for a row slice of an FP8 weight that starts inside a block.
    """

    kind: str
    shape: tuple[int, int]
    payload: torch.Tensor
    scale: torch.Tensor | None = None
    global_scale: float = 1.0
    divisor: float | None = None
    block: tuple[int, int] = (1, 1)
    row_offset: int = 0

    @classmethod
    def plain(cls, tensor: torch.Tensor) -> Weight:
        """A [out, in] tensor of bf16, fp16 or fp32 as it is."""
        return cls("plain", tuple(tensor.shape), tensor)

    @property
    def device(self) -> torch.device:
        return self.payload.device

    @property
    def nbytes(self) -> int:
        """Bytes held: payload, scales, and 4 for a global scale."""
        scale = 0 if self.scale is None else self.scale.numel() * self.scale.element_size()
        return self.payload.numel() * self.payload.element_size() + scale + (4 if self.kind == "nvfp4" else 0)

    def to(self, device, non_blocking: bool = False) -> Weight:
        """The same weight on another device, still packed; itself if it is there."""
        if device == self.payload.device:
            return self
        scale = None if self.scale is None else self.scale.to(device, non_blocking=non_blocking)
        return replace(self, payload=self.payload.to(device, non_blocking=non_blocking), scale=scale)

    def rows(self, start: int, stop: int) -> Weight:
        """Rows start..stop-1 as a view (no copy), for any start; kernels that want whole blocks look at `row_offset`."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"rows {start}:{stop} of a weight with {self.shape[0]} rows")
        scale, offset, high = self.scale, 0, self.block[0]
        if scale is not None:
            first, last = self.row_offset + start, self.row_offset + stop
            scale, offset = scale[first // high:-(-last // high)], first % high
        return replace(self, shape=(stop - start, self.shape[1]), payload=self.payload[start:stop], scale=scale, row_offset=offset)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values as [out, in] of `dtype`, on the payload's device: exact in fp32 (bit-equal to the definition, element by
        element); another dtype is that rounded once. Beyond the result it holds about 1 MiB on the CPU."""
        if self.kind == "plain":
            return self.payload.to(dtype)
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        rows, columns = self.shape
        scales = self._float_scales()
        # A 0-d tensor: CUDA divides by a python number through its reciprocal, which rounds twice.
        divisor = None if self.divisor is None else torch.tensor(self.divisor, dtype=torch.float32, device=self.device)
        step = max(1, _CHUNK // max(1, columns)) if self.device.type == "cpu" else max(1, rows)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            values = self._values(start, stop)
            self._apply_scales(values, scales, start, stop)
            if divisor is not None:
                values.div_(divisor)
            elif self.kind == "nvfp4":
                values.mul_(self.global_scale)
            out[start:stop] = values
        return out

    def _values(self, start, stop):
        """Unscaled fp32 values of rows start..stop-1."""
        part = self.payload[start:stop]
        if self.kind == "fp8":
            index = part.view(torch.uint8).reshape(-1).to(torch.int32)
            return _table("e4m3", self.device).index_select(0, index).view(part.shape)
        pairs = _table("e2m1", self.device).index_select(0, part.reshape(-1).to(torch.int32))
        return pairs.view(torch.float32).view(stop - start, self.shape[1])

    def _float_scales(self):
        if self.scale.dtype == torch.uint8:
            return e8m0_to_float(self.scale)
        if self.scale.dtype == torch.float8_e4m3fn:
            return _table("e4m3", self.device)[self.scale.view(torch.uint8).to(torch.int32)]
        return self.scale

    def _apply_scales(self, values, scales, start, stop):
        high, wide = self.block
        columns = self.shape[1]
        if high == 1:
            scales = scales[start:stop]
        else:
            block_row = (torch.arange(start, stop, device=self.device) + self.row_offset) // high
            scales = scales[block_row]
        whole = columns // wide
        if whole:
            values[:, :whole * wide].view(stop - start, whole, wide).mul_(scales[:, :whole, None])
        if columns % wide:
            values[:, whole * wide:].mul_(scales[:, whole:])

    def problem(self) -> str | None:
        """What is wrong with the scales (NaN, infinite; a global scale that is not above zero), or None."""
        if self.scale is not None:
            if self.scale.dtype == torch.uint8:
                bad, what = self.scale == 255, "an E8M0 scale of 0xFF, which is NaN"
            elif self.scale.dtype == torch.float8_e4m3fn:
                # One pass over signed bytes settles the usual case (0x7F is the largest, 0xFF below 0), 50 times faster than the
                # comparisons below: 58 GB of a Pro checkpoint's bytes are such scales.
                low, high = torch.aminmax(self.scale.view(torch.int8)) if self.scale.numel() else (0, 0)
                byte = self.scale.view(torch.uint8)
                bad, what = ((byte & 127) == 127 if low < 0 or high == 127 else None), "an E4M3 scale that is NaN"
            else:
                bad, what = ~torch.isfinite(self.scale), "a block scale that is NaN or infinite"
            if bad is not None and bool(bad.any()):
                row, column = (int(x) for x in bad.nonzero()[0])
                return f"{what} at [{row}, {column}]"
        for number in (self.global_scale, self.divisor):
            if number is not None and not 0.0 < number < float("inf"):
                return f"expected a finite global scale above zero, found {number}"
        return None


def from_reciprocal(weight: Weight, stored: float) -> Weight:
    """The NVFP4 weight whose checkpoint stores `stored` = 1/global_scale (compressed-tensors): the values are divided by it."""
    reciprocal = torch.tensor(1.0) / torch.tensor(stored, dtype=torch.float32)
    return replace(weight, divisor=stored, global_scale=float(reciprocal))


# ---------------------------------------------------------------------------------------------------------- quantisers


def _blocks(w, high, wide):
    """[out, in] -> [out/high, in/wide, high * wide] fp32, ragged blocks filled with zeros."""
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, -columns % wide, 0, -rows % high))
    tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    return tiles.transpose(1, 2).reshape(tiles.shape[0], tiles.shape[2], high * wide)


def _unblocks(tiles, high, wide, shape):
    """The inverse of _blocks."""
    rows, columns = tiles.shape[:2]
    full = tiles.view(rows, columns, high, wide).transpose(1, 2).reshape(rows * high, columns * wide)
    return full[:shape[0], :shape[1]].contiguous()


def _e8m0_for(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The smallest power of two s with amax / s <= largest, as an E8M0 byte (0 for a block of zeros). Exact: the exponents and
    mantissas are compared, no logarithm and no division is rounded."""
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    limit, limit_exponent = torch.frexp(torch.tensor(largest))
    k = exponent - int(limit_exponent) + (mantissa > limit).to(exponent.dtype)
    return torch.where(amax > 0, (k + 127).clamp(0, 254), 0).to(torch.uint8)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> E2M1 code 0..15 (uint8), round to nearest, ties to the even code, beyond 6 to 6; the sign bit is that of x < 0.
    x must not be NaN."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for bound, tie_goes_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= bound) if tie_goes_up else (a > bound)
    return code | ((x < 0).to(torch.uint8) << 3)


def e2m1_to_float(code: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0..15 (uint8) -> fp32 values."""
    return torch.tensor(E2M1_VALUES, device=code.device)[code.int()]


def _pack(code):
    """Codes [out, in] -> bytes [out, in/2], the even element in the low nibble."""
    return (code[:, 0::2] | (code[:, 1::2] << 4)).contiguous()


def _matrix(w, wide, what):
    if w.dim() != 2 or w.shape[1] % wide:
        raise ValueError(f"{what}: expected [out, in] with in a multiple of {wide}, found {tuple(w.shape)}")
    if not bool(torch.isfinite(w).all()):
        raise ValueError(f"{what}: the weight holds NaN or infinity")


def quantize_fp8_block(w: torch.Tensor, block: tuple[int, int] = (128, 128), ue8m0: bool = True) -> Weight:
    """[out, in] -> FP8 E4M3 with one scale per block: the smallest power of two that keeps the block within 448 (ue8m0, as in the
    official release), or amax/448 in fp32 (as in -Base). A block of zeros gets the smallest E8M0, or 1.0. RNE."""
    _matrix(w, 1, "FP8")
    tiles = _blocks(w, *block)
    amax = tiles.abs().amax(dim=-1)
    if ue8m0:
        scale = _e8m0_for(amax, E4M3_MAX)
        factor = e8m0_to_float(scale)
    else:
        factor = amax / E4M3_MAX
        scale = factor = torch.where(factor > 0, factor, torch.ones_like(factor))
    values = (tiles / factor[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    payload = _unblocks(values.view(torch.uint8), *block, w.shape).view(torch.float8_e4m3fn)
    return Weight("fp8", tuple(w.shape), payload, scale, block=tuple(block))


def nvfp4_global_scale(*weights: torch.Tensor) -> float:
    """amax / (6 * 448) over all the given weights (w1 and w3 of an expert usually share one), an fp32 value; 1.0 for zeros."""
    amax = torch.stack([w.float().abs().amax() for w in weights]).amax()
    scale = amax / (E2M1_MAX * E4M3_MAX)
    return float(scale) if float(scale) > 0 else 1.0


def quantize_nvfp4(w: torch.Tensor, global_scale: float | None = None) -> Weight:
    """[out, in] -> NVFP4 in ModelOpt's two levels: global_scale = amax/(6*448) unless given; scale = e4m3(block amax / (6 *
    global_scale)) per 16, within [2^-9, 448]; value = e2m1(w / (scale * global_scale)). Every step in fp32, RNE."""
    _matrix(w, NVFP4_BLOCK, "NVFP4")
    global_scale = nvfp4_global_scale(w) if global_scale is None else float(torch.tensor(global_scale, dtype=torch.float32))
    if not 0.0 < global_scale < float("inf"):
        raise ValueError(f"NVFP4: expected a finite global scale above zero, found {global_scale}")
    tiles = w.float().reshape(w.shape[0], -1, NVFP4_BLOCK)
    g = torch.tensor(global_scale, dtype=torch.float32, device=w.device)
    wanted = tiles.abs().amax(dim=-1) / (E2M1_MAX * g)
    scale = wanted.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    code = round_e2m1(tiles / (scale.float() * g)[..., None]).view(w.shape)
    return Weight("nvfp4", tuple(w.shape), _pack(code), scale, global_scale, block=(1, NVFP4_BLOCK))


def quantize_mxfp4(w: torch.Tensor) -> Weight:
    """[out, in] -> MXFP4: per 32 columns the smallest power of two that keeps the block within 6 (as DeepSeek's FP4, and unlike the
    OCP floor rule it never clips), byte 0 for zeros; e2m1 RNE."""
    _matrix(w, MXFP4_BLOCK, "MXFP4")
    tiles = w.float().reshape(w.shape[0], -1, MXFP4_BLOCK)
    scale = _e8m0_for(tiles.abs().amax(dim=-1), E2M1_MAX)
    code = round_e2m1(tiles / e8m0_to_float(scale)[..., None]).view(w.shape)
    return Weight("mxfp4", tuple(w.shape), _pack(code), scale, block=(1, MXFP4_BLOCK))


def mxfp4_largest_exponent(*weights: Weight) -> int:
    """max(scale byte - 127) over the blocks that hold a nonzero value; -127 if there is none. Pass w1 and w3 for a shared scale."""
    largest = -127
    for weight in weights:
        live = _live_blocks(weight)
        if bool(live.any()):
            largest = max(largest, int(weight.scale[live].max()) - 127)
    return largest


def _live_blocks(weight):
    """Which blocks of 32 hold a value other than +-0: [out, in/32] bool."""
    return ((weight.payload & 0x77) != 0).view(weight.shape[0], -1, MXFP4_BLOCK // 2).any(dim=-1)


def mxfp4_to_nvfp4(weight: Weight, largest_exponent: int | None = None) -> Weight:
    """The same values as NVFP4, without loss: nibbles unchanged, global scale 2^(kmax - 8), each scale 2^k as two E4M3 scales
    2^(k - kmax + 8). Raises ValueError where a block is more than 2^17 below the largest, beyond E4M3's range of powers of two.
    `largest_exponent` (kmax) from mxfp4_largest_exponent gives several weights one global scale."""
    if weight.kind != "mxfp4":
        raise ValueError(f"expected an mxfp4 weight, found {weight.kind}")
    kmax = mxfp4_largest_exponent(weight) if largest_exponent is None else largest_exponent
    live = _live_blocks(weight)
    power = weight.scale.to(torch.int32) - 127 - (kmax - 8)  # E4M3 holds 2^-9 ... 2^8
    power = torch.where(live, power, torch.full_like(power, -9))  # zeros stay zeros under any scale
    if int(power.max()) > 8 or int(power.min()) < -9:
        raise ValueError(f"MXFP4 to NVFP4 without loss: scales must lie within 2^17 of the largest, found exponents "
                         f"{int(power.min()) + kmax - 8} to {int(power.max()) + kmax - 8} with the largest {kmax}")
    scale = torch.exp2(power.float()).to(torch.float8_e4m3fn)
    scale = scale.view(torch.uint8).repeat_interleave(2, dim=1).view(torch.float8_e4m3fn)
    return Weight("nvfp4", weight.shape, weight.payload, scale, 2.0 ** max(kmax - 8, -135), block=(1, NVFP4_BLOCK))
