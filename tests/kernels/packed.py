"""How packed keys are held against the exact result: bytes must be equal, except where fp32 arithmetic cannot tell.

An exact value comes as an interval [low, high], as wide as the fp32 roundings of its kind may be wrong (and twice the GPU's approximate
functions). It goes through the roundings to bf16, FP8 and FP4 as two values. Where both give the same byte, which is nearly always, the
kernel must give it; where a boundary lies between them, either byte (or one between). All in float64.
"""

import torch

from dsv4.formats import E4M3_MAX, e2m1_to_float, round_e2m1
from dsv4.kernels.keys import IndexKeys, Keys
from dsv4.kernels.layouts import Nvfp4
from dsv4.ops import quant

ROUNDING = 2**-24


def around(exact: torch.Tensor, noise: torch.Tensor):
    return exact - noise, exact + noise


def bf16(interval):
    """Both ends rounded to bf16, as float64."""
    return tuple(end.to(torch.bfloat16).double() for end in interval)


def norm_rope(interval, weight, cos, sin, eps):
    """The interval [n, d] of values that a kernel holds in fp32 -> that of RoPE(rms_norm(v)) before its rounding to bf16."""
    low, high = interval
    weight, cos, sin = weight.double(), cos.double(), sin.double()
    smallest, largest = torch.where(low * high < 0, 0, torch.minimum(low**2, high**2)), torch.maximum(low**2, high**2)
    scales = [torch.rsqrt(v.mean(-1, keepdim=True) + eps) for v in (smallest, largest)]
    ends = torch.stack([end * scale * weight for end in (low, high) for scale in scales])
    middle, radius = (ends.amax(0) + ends.amin(0)) / 2, (ends.amax(0) - ends.amin(0)) / 2
    noise = radius + 12 * ROUNDING * middle.abs()  # the sum's, the mean's, 4 of rsqrtf's two units, three products'
    return around(_turn(middle, cos, sin, -1), _turn(noise, cos.abs(), sin.abs(), 1))


def _turn(v, cos, sin, minus):
    """The rotation; with minus = 1 and magnitudes, the sum of its terms."""
    plain = v.shape[-1] - 2 * cos.shape[-1]
    a, b = v[:, plain::2], v[:, plain + 1 :: 2]
    return torch.cat((v[:, :plain], torch.stack((a * cos + minus * b * sin, a * sin + b * cos), -1).flatten(-2)), -1)


def hadamard(interval):
    """Of bf16 intervals -> before the second rounding to bf16. A row that is certain has a certain result, in the kernels as here."""
    low, high = interval
    certain = (low == high).all(-1, keepdim=True)
    middle, radius = _hadamard((low + high) / 2), (high - low).sum(-1, keepdim=True) / 2 * 128**-0.5
    noise = 8 * ROUNDING * low.abs().maximum(high.abs()).sum(-1, keepdim=True) * 128**-0.5
    exact = quant.hadamard(low.float()).double()
    return tuple(torch.where(certain, exact, end) for end in around(middle, radius + noise))


def _hadamard(x):
    """In float64, from the matrix: element [i, j] has the parity of i & j as its sign."""
    n = x.shape[-1]
    index = torch.arange(n)
    parity = torch.tensor([bin(int(i)).count("1") % 2 for i in range(n)])
    return x @ (1 - 2 * parity[index[:, None] & index].double()) * n**-0.5


def _magnitudes(interval):
    """The smallest and the largest amax that a block [.., block] of the interval can have."""
    low, high = interval
    smallest = torch.where(low * high < 0, 0, torch.minimum(low.abs(), high.abs()))
    return smallest.amax(-1), torch.maximum(low.abs(), high.abs()).amax(-1)


def _assert_blocks(got_code, got_scale, interval, block, smallest, largest, encode, decode, what):
    """got_code [n, K], got_scale [n, K / block]: uint8; encode: fp32 -> code, decode: code -> fp32."""
    ends = [end.unflatten(-1, (-1, block)) for end in interval]
    reciprocal = torch.tensor(1 / largest, dtype=torch.float32)
    bytes_ = [quant.power_of_two_ceil(m.float().clamp_min(smallest) * reciprocal).view(torch.int32) >> 23 for m in _magnitudes(ends)]
    wrong = (got_scale < bytes_[0]) | (got_scale > bytes_[1])
    assert not wrong.any(), f"{what}: scale {got_scale[wrong][0]} at {wrong.nonzero()[0].tolist()}, expected {bytes_[0][wrong][0]}"
    scale = torch.exp2(got_scale.float() - 127)[..., None]
    codes = [encode(end.float() / scale).flatten(-2) for end in ends]
    between = (decode(codes[0]) < decode(got_code)) & (decode(got_code) < decode(codes[1]))
    wrong = (got_code != codes[0]) & (got_code != codes[1]) & ~between
    assert not wrong.any(), f"{what}: byte {got_code[wrong][0]} at {wrong.nonzero()[0].tolist()}, expected {codes[0][wrong][0]}"


def assert_certain(interval):
    """That the intervals say something: most of their bf16 values are one. In a usual row all but a few in a thousand are; but one pooled
    value whose rounding is uncertain moves the norm of its whole row."""
    low, high = interval
    assert (low != high).double().mean() <= 0.25


def assert_keys(got: Keys, interval):
    """Rows of Keys against what norm_rope gave, [n, 512]."""
    assert got.values.dtype == got.scales.dtype == torch.uint8 and (got.scales[:, 7] == 0).all()
    ends = bf16(interval)
    assert_certain(ends)
    _assert_blocks(got.values[:, :448], got.scales[:, :7], [end[:, :448] for end in ends], 64, 1e-4, E4M3_MAX,
                   lambda x: x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8),
                   lambda code: code.contiguous().view(torch.float8_e4m3fn).float(), "FP8")
    rotary = got.values[:, 448:].contiguous().view(torch.bfloat16).double()
    assert ((ends[0][:, 448:] <= rotary) & (rotary <= ends[1][:, 448:])).all(), "rotary dims"


def assert_index_keys(got: IndexKeys, interval):
    """Rows of IndexKeys against what norm_rope gave, [n, 128]."""
    ends = bf16(interval)
    assert_certain(ends)
    code = torch.stack((got.values & 15, got.values >> 4), -1).flatten(-2)
    _assert_blocks(code, got.scales, bf16(hadamard(ends)), 32, 6 * 2.0**-126, 6.0, round_e2m1, e2m1_to_float, "FP4")


def assert_same_nvfp4(got: Nvfp4, want: Nvfp4):
    """Byte by byte, the fill between the rows of swizzled scales too."""
    assert got.swizzled == want.swizzled
    for name, a, b in zip(Nvfp4._fields, got[:3], want[:3], strict=False):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        bits = [t.view(torch.int32) if t.dtype == torch.float32 else t for t in (a, b)]
        wrong = (bits[0] != bits[1]).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise AssertionError(f"{name}: {len(wrong)} differ, first at {list(at)}: {a[at]} expected {b[at]}")


def assert_nvfp4_of(got: Nvfp4, interval, row_scale: float):
    """Rows in NVFP4 with that scale (before routing weights) against exact values in [low, high]; got.row_scales is not looked at."""
    ends = [end.float().unflatten(-1, (-1, 16)) for end in interval]
    scales = [(m.float() / 6 / row_scale).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8) for m in _magnitudes(ends)]
    got_scales = got.plain_scales()
    assert ((scales[0] <= got_scales) & (got_scales <= scales[1])).all(), "scales"
    assert (scales[0] != scales[1]).float().mean() < 0.02  # nearly all are certain
    factor = got_scales.view(torch.float8_e4m3fn).float()[..., None] * row_scale
    codes = torch.stack((got.values & 15, got.values >> 4), -1).flatten(-2).unflatten(-1, (-1, 16))
    values = [e2m1_to_float(round_e2m1(torch.where(factor > 0, end / factor, 0.0))) for end in ends]
    found = e2m1_to_float(codes)
    assert ((values[0] <= found) & (found <= values[1])).all(), "codes"
    assert (values[0] != values[1]).float().mean() < 0.02
