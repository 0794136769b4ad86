"""How random weights are drawn: the one place, for checkpoints that are written (helpers/make_checkpoint.py) and those that are only made
(synthetic.py). Quantised linears are drawn as codes and scales, which is as fast as memory and needs no fp32 copy.

Nothing is left at a neutral value that would hide a mistake: norms are 1 + 0.1 N(0,1), sinks, hc base and scale N(0, 0.5), the router's
bias N(0, 0.1), tid2eid distinct experts per token; matrices have variance 1/in, so that activations keep their size at any depth. Every
draw depends on its generator alone; on the "meta" device, without one, only shapes and dtypes come out.
"""

from __future__ import annotations

import math
import struct
import zlib

import torch

from .formats import MXFP4_BLOCK, NVFP4_BLOCK, Weight, e8m0_to_float, from_reciprocal

CHUNK = 1 << 22  # normal numbers drawn at once, in fp32
_E2M1_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)  # of uniform codes
_E4M3_FIRST, _E4M3_COUNT = 0x50, 32  # E4M3 magnitudes from 8 to 120: four exponents
_E4M3_RMS = math.sqrt(sum(((8 + i % 8) * 2.0 ** (i // 8)) ** 2 for i in range(_E4M3_COUNT)) / _E4M3_COUNT)
_NVFP4_SCALE_RMS = math.sqrt((0.75**2 + 0.8125**2 + 0.875**2 + 0.9375**2 + 1 + 1.125**2 + 1.25**2 + 1.375**2) / 8)


def generator_of(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of a tensor: its draw depends on the seed, its name and the device's kind alone."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def draw_tensor(name: str, shape: tuple[int, ...], experts: int, dtype: torch.dtype, generator: torch.Generator | None,
                device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor that is no quantised linear, in `dtype`; tid2eid in int64. By its native name."""
    if name.endswith("tid2eid"):
        start = torch.randint(experts, (shape[0], 1), generator=generator, device=device)
        return (start + torch.arange(shape[1], device=device)) % experts  # distinct in a row
    if name.endswith("norm.weight"):
        return _normal(shape, 0.1, dtype, generator, device, mean=1.0)
    if name.endswith("gate.bias"):
        return _normal(shape, 0.1, dtype, generator, device)
    if len(shape) == 1:
        return _normal(shape, 0.5, dtype, generator, device)
    if name.endswith("ape"):
        return _normal(shape, 0.3, dtype, generator, device)
    return _normal(shape, 1.0 if name == "embed.weight" else shape[1] ** -0.5, dtype, generator, device)


def draw_linear(name: str, shape: tuple[int, int], kind: str, plain: torch.dtype, generator: torch.Generator | None,
                device: torch.device | str = "cpu", block: tuple[int, int] = (128, 128), float_scales: bool = False) -> Weight:
    """A linear as `kind` stores it (exports.Format's kinds); `plain` is the dtype of one that is not quantised, `block` and
    `float_scales` (fp32 instead of E8M0) are an FP8 one's."""
    rows, columns = shape
    if kind == "plain":
        return Weight.plain(draw_tensor(name, shape, 0, plain, generator, device))
    if kind == "fp8":
        codes = _codes(rows, columns, 0x80 | _E4M3_COUNT - 1, _E4M3_FIRST, generator, device)
        scale = torch.full((-(-rows // block[0]), -(-columns // block[1])), 127 + round(math.log2(columns**-0.5 / _E4M3_RMS)),
                           dtype=torch.uint8, device=device)
        return Weight("fp8", shape, codes.view(torch.float8_e4m3fn), e8m0_to_float(scale) if float_scales else scale, block=block)
    payload, size = _codes(rows, columns // 2, 0xFF, 0, generator, device), columns**-0.5 / _E2M1_RMS
    if kind == "mxfp4":  # a power of two or its double: 2.5 in the mean of squares
        scale = _codes(rows, columns // MXFP4_BLOCK, 1, 127 + round(math.log2(size / 2.5**0.5)), generator, device)
        return Weight("mxfp4", shape, payload, scale, block=(1, MXFP4_BLOCK))
    codes = _codes(rows, columns // NVFP4_BLOCK, 7, 0x34, generator, device)  # e4m3 0.75 to 1.375
    size = _fp32(size / _NVFP4_SCALE_RMS)
    weight = Weight("nvfp4", shape, payload, codes.view(torch.float8_e4m3fn), size, block=(1, NVFP4_BLOCK))
    return weight if kind == "nvfp4" else from_reciprocal(weight, _fp32(1.0 / weight.global_scale))


def _fp32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def _normal(shape, std, dtype, generator, device, mean=0.0):
    """N(mean, std), drawn a chunk of rows at a time, so that fp32 copies stay small beside a result of another dtype."""
    out = torch.empty(shape, dtype=dtype, device=device)
    step = max(1, CHUNK * shape[0] // max(1, out.numel()))
    for part in out.split(step):
        part.copy_(torch.randn(part.shape, generator=generator, device=device).mul_(std).add_(mean))
    return out


def _codes(rows, columns, mask, offset, generator, device):
    """uint8 [rows, columns]: random bits under `mask`, plus `offset`; 8 at a time, which is 3 times as fast as torch.randint."""
    words = torch.empty(-(-rows * columns // 8), dtype=torch.int64, device=device).random_(-(2**63), None, generator=generator)
    if mask != 0xFF:
        words &= _eightfold(mask)
    if offset:
        words += _eightfold(offset)  # no byte overflows into the next
    return words.view(torch.uint8)[: rows * columns].view(rows, columns)


def _eightfold(byte):
    value = int.from_bytes(bytes([byte]) * 8, "little")
    return value - (value >> 63 << 64)
