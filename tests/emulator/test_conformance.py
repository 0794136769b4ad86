"""What each instruction computes: the emulator against definitions written with tensors.

With DSV4_TEST_GPU=1 the same kernels run on this machine's GPU and are held against the same definitions, bit for bit but for the order in
which a product's terms are added.
"""

import numpy as np
import pytest
import torch

from dsv4.kernels.launch import IN, INOUT, OUT, WORK, Kernel

from .emulator import HERE, ON_GPU, machine, needs_gxx, run_on_gpu

pytestmark = needs_gxx
SOURCE, HOPPER, BLACKWELL = (HERE / f"conformance{name}.cu" for name in ("", "_hopper", "_blackwell"))
KINDS = dict.fromkeys(("out", "packed", "small", "floats"), OUT) | {"values": WORK, "counters": INOUT}
# Where it runs: the emulator with threads from the first to the last and back, and the GPU.
PLACES = [False, True, pytest.param("gpu", marks=pytest.mark.skipif(not ON_GPU, reason="DSV4_TEST_GPU=1 runs it on a GPU"))]
LANE = torch.arange(32)
G, Q = LANE // 4, LANE % 4


def run(place, name, source=SOURCE, generation=None, **values):
    if place == "gpu" and generation not in (None, torch.cuda.get_device_capability()[0]):
        pytest.skip(f"instructions of GPUs of compute capability {generation}")
    kinds = {k: KINDS.get(k, IN) if isinstance(v, torch.Tensor) else int for k, v in values.items()}
    kernel = Kernel(f"conformance_{name}", kinds)
    if place == "gpu":
        assert run_on_gpu(kernel, list(values.values()), source=source) == 0
    else:
        assert machine(source, place).run(kernel, list(values.values())) == 0


def registers(values):
    """[..., n values of one register] -> [...] int32, the first value in the low bits."""
    return values.contiguous().view(torch.int32).squeeze(-1)


def fragments(A, B, C):
    """A [n, 16, K], B [n, K, 8], C [n, 16, 8] -> the lanes' registers a [n, 32, 4], b [n, 32, 2], c [n, 32, 4]."""
    per = 4 // A.element_size()  # values of a register
    along = torch.arange(per)
    a = [registers(A[:, (G + 8 * (i % 2))[:, None], per * (Q[:, None] + 4 * (i // 2)) + along]) for i in range(4)]
    b = [registers(B[:, per * (Q[:, None] + 4 * i) + along, G[:, None]]) for i in range(2)]
    return torch.stack(a, -1), torch.stack(b, -1), sums(C)


def sums(C):
    return torch.stack([C[:, G + 8 * (i // 2), 2 * Q + i % 2] for i in range(4)], -1)


MMA = [("bf16", torch.bfloat16, 16), ("f16", torch.float16, 16), ("e4m3", torch.float8_e4m3fn, 32)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", range(3), ids=[name for name, *_ in MMA])
def test_mma(rng, kind, place):
    """Whole numbers, whose sums are exact in any order, and random ones: on the emulator the k-th term is added before the k + 1st."""
    _, dtype, K = MMA[kind]
    shapes = (4, 16, K), (4, K, 8), (4, 16, 8)
    whole = [torch.randint(-15, 16, shape, generator=rng).float() for shape in shapes]
    other = [torch.randn(shape, generator=rng) * torch.exp2(torch.randint(-6, 4, shape, generator=rng)) for shape in shapes]
    A, B, C = (torch.cat(pair) for pair in zip(whole, other, strict=True))
    low, A, B = ([t.to(dtype) for t in (A, B)], *(t.to(dtype).float() for t in (A, B)))
    a, b, c = fragments(*(t.view(torch.uint8) if t.element_size() == 1 else t for t in low), C)
    out = torch.empty(8, 32, 4)
    run(place, "mma", a=a, b=b, c=c, out=out, n=8, kind=kind)
    want = C.clone()
    for k in range(K):
        want += A[:, :, k, None] * B[:, k, None]  # products are exact in fp32
    assert torch.equal(out[:4], sums(want)[:4])
    if place != "gpu":
        assert torch.equal(out, sums(want))
    else:  # tensor cores add groups of terms with a common exponent, cut off below fp32's last bit
        exact = sums(C.double() + A.double() @ B.double())
        scale = sums(C.double().abs() + A.double().abs() @ B.double().abs())
        assert ((out - exact).abs() <= 2.0**-21 * scale).all()


@pytest.mark.parametrize("place", PLACES)
def test_ldmatrix_stmatrix_and_movmatrix(rng, place):
    x = torch.randint(-2**15, 2**15, (64, 8), generator=rng).short()
    order = torch.randperm(64, generator=rng)[:32]
    out = torch.empty(7, 32, 4, dtype=torch.int32)
    run(place, "matrices", x=x, order=order.int(), out=out)
    matrices = x[order].view(4, 8, 8)  # lane 8 i + j gave the address of row j of matrix i
    plain = torch.stack([registers(torch.stack([m[G, 2 * Q], m[G, 2 * Q + 1]], -1)) for m in matrices], -1)
    transposed = torch.stack([registers(torch.stack([m[2 * Q, G], m[2 * Q + 1, G]], -1)) for m in matrices], -1)
    assert torch.equal(out[0], plain) and torch.equal(out[1], transposed) and torch.equal(out[6], transposed)
    assert torch.equal(out[2, :, :2], plain[:, :2]) and torch.equal(out[3, :, :2], transposed[:, :2])
    # lane l's register i, 4 l + i, holds values 2 q and 2 q + 1 of row g of matrix i: word q of row order[8 i + g]
    lane, row = LANE[:, None], torch.arange(4)[None]
    assert torch.equal(out[4], (4 * (4 * (lane % 8) + row) + lane // 8).int())
    # Turned over: row order[8 i + j] holds half j % 2 of lanes 4 r + j / 2, r = 0..7; the upper half is 0. Word w has r = 2 w and 2 w + 1.
    i, j = lane // 8, lane % 8
    low, high = (4 * (4 * r + j // 2) + i for r in (2 * row, 2 * row + 1))
    assert torch.equal(out[5], torch.where(j % 2 == 0, low | high << 16, 0).int())


@pytest.mark.parametrize("place", PLACES)
def test_copies(rng, place):
    """cp.async with groups under way and zeros for what is not there, bulk copies in a ring with full and empty mbarriers, load_stream."""
    x = torch.randint(256, (1 << 16,), generator=rng, dtype=torch.uint8)
    out = torch.empty(3, 1 << 16, dtype=torch.uint8)
    run(place, "copies", x=x, out=out)
    def turned(x):  # the kernel turns each round of 4 KB over, 16 bytes at a time
        return x.view(16, 256, 16).flip(1).flatten()
    assert torch.equal(out[0], turned(torch.cat((x[:-1000], torch.zeros_like(x[-1000:])))))
    assert torch.equal(out[1], turned(x)) and torch.equal(out[2], x)


def halves(words):
    """int32 [n] -> int64 [n, 2], the low half first."""
    return torch.stack([words.long() & 0xffff, words.long() >> 16 & 0xffff], -1)


def one_nan(bits, dtype):
    """16-bit patterns with every NaN as 0x7fff: which NaN comes out is not held."""
    value = bits.to(torch.int32).short().view(dtype)
    return torch.where(value.isnan(), 0x7fff, bits)


@pytest.mark.parametrize("place", PLACES)
def test_conversions_and_packed_arithmetic(rng, place):
    """Each of the 2^16 patterns once on every side: all bf16 and f16 values (subnormals, infinities, NaN) and all pairs of e4m3."""
    n = 1 << 16
    patterns = torch.arange(n)

    def words():
        return (torch.randperm(n, generator=rng) | torch.randperm(n, generator=rng) << 16).to(torch.int32)
    a, b, c = words(), words(), words()
    near = patterns.to(torch.int32) << 16  # bf16 values, and the floats around the middle between two
    x = (near | torch.tensor([0, 0x7fff, 0x8000, 0x8001])[torch.randint(4, (n,), generator=rng)]).to(torch.int32).view(torch.float32)
    y = (torch.randn(n, generator=rng) * torch.exp2(torch.randint(-14, 11, (n,), generator=rng)))
    packed, small, floats = torch.empty(10, n, dtype=torch.int32), torch.empty(n, dtype=torch.uint8), torch.empty(3, n)
    run(place, "conversions", a=a, b=b, c=c, x=x, y=y, packed=packed, small=small, floats=floats, n=n)

    def bf16(words):
        return (halves(words) << 16).to(torch.int32).view(torch.float32)
    # A product of two bf16 or f16 has at most 22 bits, so float64 holds it; the sum with a third is rounded to odd before it becomes bf16.
    A, B, C = (bf16(w).double().numpy() for w in (a, b, c))
    product = torch.from_numpy(A * B)
    assert torch.equal(one_nan(halves(packed[0]), torch.bfloat16), one_nan(bits16(product.numpy(), "bf16"), torch.bfloat16))
    assert torch.equal(one_nan(halves(packed[1]), torch.bfloat16), one_nan(bits16(odd_sum(A * B, C), "bf16"), torch.bfloat16))
    a16, b16 = (halves(w).to(torch.int32).short().view(torch.float16).double().numpy() for w in (a, b))
    assert torch.equal(one_nan(halves(packed[2]), torch.float16), one_nan(bits16(a16 * b16, "f16"), torch.float16))
    e4m3 = torch.stack([patterns & 255, patterns >> 8], -1).to(torch.uint8).view(torch.float8_e4m3fn)
    f16 = e4m3.to(torch.float16).view(torch.int16).long() & 0xffff
    assert torch.equal(one_nan(halves(packed[3]), torch.float16), one_nan(f16, torch.float16))
    pair = torch.stack([x, y], -1).to(torch.bfloat16).view(torch.int16).long() & 0xffff
    assert torch.equal(one_nan(halves(packed[4]), torch.bfloat16), one_nan(pair, torch.bfloat16))
    eight = torch.cat([w.view(torch.uint8).view(n, 4) for w in (a, b)], -1)
    select = torch.stack([c.long() >> 4 * i & 7 for i in range(4)], -1)
    assert torch.equal(packed[5], eight.gather(1, select).view(torch.int32).squeeze(-1))
    pair = torch.stack([x, y], -1).to(torch.float16).view(torch.int16).long() & 0xffff
    assert torch.equal(one_nan(halves(packed[6]), torch.float16), one_nan(pair, torch.float16))
    assert torch.equal(packed[7], (a & c) | (b & ~c))
    turned = (a.long() & 0xffffffff) << patterns % 32
    assert torch.equal(packed[8].long() & 0xffffffff, (turned | turned >> 32) & 0xffffffff)
    magnitudes = torch.maximum(halves(a) & 0x7fff, halves(b) & 0x7fff)
    assert torch.equal(one_nan(halves(packed[9]), torch.bfloat16), one_nan(magnitudes, torch.bfloat16))
    saturated = x.clamp(-448, 448).to(torch.float8_e4m3fn)  # torch's own conversion does not saturate
    assert torch.equal(torch.where(x.isnan(), 0x7f, small.long() & 0xff), torch.where(x.isnan(), 0x7f, saturated.view(torch.uint8).long()))
    assert ((small & 127) == 127)[x.isnan()].all()
    one = (patterns & 255).to(torch.uint8).view(torch.float8_e4m3fn).float()
    for got, want in ((floats[0], one), (floats[1], bf16(a)[:, 0]), (floats[2], bf16(a)[:, 1])):
        assert torch.equal(one_nan32(got.view(torch.int32)), one_nan32(want.view(torch.int32)))


def odd_sum(p, c):
    """p + c in float64, rounded to odd: where it is not exact, the neighbour whose last bit is 1."""
    with np.errstate(all="ignore"):
        s = p + c
        part = s - p
        rest = (p - (s - part)) + (c - part)
        inexact = np.isfinite(s) & (rest != 0) & (s.view(np.int64) & 1 == 0)
        return np.where(inexact, np.nextafter(s, np.where(rest > 0, np.inf, -np.inf)), s)


def bits16(value, kind):
    """float64 -> the 16 bits of the nearest bf16 or f16, ties to even. Neither numpy nor torch rounds float64 to bf16 in one step."""
    if kind == "f16":
        with np.errstate(over="ignore"):
            return torch.from_numpy(value.astype(np.float16).view(np.int16).astype(np.int64) & 0xffff)
    with np.errstate(all="ignore"):
        magnitude = np.abs(value)
        exponent = np.maximum(np.frexp(np.where(np.isfinite(magnitude), magnitude, 1.0))[1] - 1, -126)
        steps = np.rint(np.ldexp(np.where(np.isfinite(magnitude), magnitude, 0.0), 7 - exponent))  # rint rounds ties to even
        rounded = np.ldexp(steps, exponent - 7)
        rounded = np.where(np.isfinite(magnitude), rounded, magnitude).astype(np.float32)  # exact, or infinity beyond the largest
    sign = np.signbit(value).astype(np.int64) << 15
    return torch.from_numpy(rounded.view(np.int32).astype(np.int64) >> 16 & 0x7fff | sign)


@pytest.mark.parametrize("place", PLACES)
def test_shuffles_votes_and_reductions(rng, place):
    x, k = torch.randn(32, generator=rng), torch.randint(-6, 7, (32,), generator=rng, dtype=torch.int32)
    out = torch.empty(16, 32, dtype=torch.int32)
    run(place, "lanes", x=x, k=k, out=out)
    v, i = x.view(torch.int32), k.long()
    low = LANE // 8 * 8
    want = [
        v[i & 31], v[low + (i & 7)], v[LANE ^ 21],
        v[torch.where((LANE ^ 5) > (LANE | 3), LANE, LANE ^ 5)],  # towards a later group of 4: one's own
        v[torch.where(LANE + 7 > 31, LANE, LANE + 7)], v[torch.where(LANE + 3 > low + 7, LANE, LANE + 3)],
        v[torch.where(LANE < 7, LANE, LANE - 7)], v[torch.where(LANE - 3 < low, LANE, LANE - 3)],
        ((i > 0).long() << LANE).sum().int(), (i == 3).any(), (i != 3).all(), i.sum(), i.max(),
        (i % 2**32).min().int(), torch.from_numpy(np.bitwise_xor.reduce(k.numpy(), keepdims=True)),
        torch.where(LANE % 3 > 0, k[1], k[30]),
    ]
    want = torch.stack([w.to(torch.int32).expand(32) if w.numel() == 1 else w.to(torch.int32) for w in want])
    assert (out == want).all(1).tolist() == [True] * 16


@pytest.mark.parametrize("place", PLACES)
def test_clusters(rng, place):
    x = torch.randint(1000, (4, 32), generator=rng, dtype=torch.int32)
    out = torch.empty_like(x)
    run(place, "cluster", x=x, out=out)
    assert torch.equal(out, 1000 * torch.arange(4, dtype=torch.int32)[:, None] + x.roll(-1, 0))


@pytest.mark.parametrize("place", PLACES)
def test_memory_of_other_gpus(rng, place):
    """Here it is this one's; that the pairs come whole from another GPU is test_on_gpu.py's to see. And a clock that runs."""
    x = torch.randint(-(2**63), 2**63 - 1, (64, 2), generator=rng)
    out, counters = torch.empty(2, 64, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    run(place, "system", x=x, out=out, counters=counters, n=64)
    assert torch.equal(out, x.expand(2, -1, -1)) and counters.tolist() == [7, 1]


@pytest.mark.parametrize("place", PLACES)
def test_arrivals(rng, place):
    """A counter that wraps, and what the last block to arrive sees of all others."""
    n, most = 200, 6
    x = torch.randint(1000, (n, 64), generator=rng, dtype=torch.int32)
    out, counters = torch.empty(2, n, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    run(place, "arrivals", x=x, values=torch.empty_like(x), counters=counters, out=out, n=n, most=most)
    assert torch.equal(out[0, :64], x.sum(0).int()) and counters.tolist() == [n % (most + 1), 0]
    assert torch.equal(out[1].sort().values, (torch.arange(n) % (most + 1)).sort().values.int())


@pytest.mark.parametrize("place", PLACES)
def test_arithmetic_and_bits(rng, place):
    n = 512
    x = torch.randn(n, generator=rng) * torch.exp2(torch.randint(-30, 40, (n,), generator=rng))
    x[:11] = torch.tensor([0.0, -0.0, 0.5, 1.5, -2.5, float("inf"), float("-inf"), float("nan"), 2.0**-127, 2.0**127, -2.0**126])
    k = torch.randint(-2**31, 2**31, (n,), generator=rng).to(torch.int32) >> torch.randint(32, (n,), generator=rng).to(torch.int32)
    k[:2] = torch.tensor([0, -2**31])
    out = torch.empty(17, n, dtype=torch.int32)
    run(place, "scalars", x=x, k=k, out=out, n=n)
    unsigned = [int(u) for u in k.long() % 2**32]
    text = [f"{u:032b}" for u in unsigned]
    lead = [t.find("1") if "1" in t else 32 for t in text]
    first = [t[::-1].find("1") + 1 for t in text]

    def clamped(value, low, high):
        return value.nan_to_num(0, high, low).clamp(low, high).long()
    wide = x.double()
    signed = [clamped(wide.round(), -2**31, 2**31 - 1), clamped(wide.trunc(), -2**31, 2**31 - 1), clamped(wide.round(), 0, 2**32 - 1)]
    fused = torch.from_numpy(fma(x.numpy(), x.numpy(), np.float32(1)))
    other = k.view(torch.float32)
    floats = [fused, k.float(), wide.abs().sqrt().float(), (1 / wide).float()]  # torch's own sqrt of float32 is not always the nearest
    largest = torch.where(x.isnan() | other.isnan(), float("nan"), torch.maximum(x, other))
    want = [torch.tensor([t.count("1") for t in text]), torch.tensor(first), torch.tensor(lead),
            torch.tensor([int(t[::-1], 2) for t in text]),
            torch.tensor([f + 32 if f else 0 for f in first]), torch.tensor([c + 32 for c in lead]), *signed,
            *floats, k.long().clamp(max=7) + k.long().clamp(min=-7), largest]
    for row, w in enumerate(want):
        if w.dtype == torch.float32:
            assert torch.equal(one_nan32(out[row]), one_nan32(w.view(torch.int32))), row
        else:
            assert torch.equal(out[row], w.to(torch.int32)), row
    inverse = 1 / torch.where(x.abs() < 2.0**-126, 0 * wide, wide)  # subnormal numbers, and subnormal results, are zero
    inverse = torch.where(inverse.abs() < 2.0**-126, 0, inverse)
    torch.testing.assert_close(out[15].view(torch.float32).double(), inverse, rtol=2.0**-23, atol=0, equal_nan=True)
    smallest = torch.where(x.isnan() | other.isnan(), float("nan"), torch.minimum(x, other))
    assert torch.equal(one_nan32(out[16]), one_nan32(smallest.view(torch.int32)))


def one_nan32(bits):
    return torch.where(bits.view(torch.float32).isnan(), 0x7fffffff, bits)


def fma(a, b, c):
    """a b + c of float32 with one rounding: the product is exact in float64, the sum rounded to odd before it becomes float32."""
    with np.errstate(all="ignore"):
        return odd_sum(a.astype(np.float64) * b, np.broadcast_to(np.float64(c), a.shape)).astype(np.float32)


def box_in_memory(matrix, element, x, y, width, height, swizzle):
    """The bytes of a box of a matrix of bytes [rows, row bytes], as a tensor copy leaves them in shared memory."""
    rows = torch.zeros(height, width * element, dtype=torch.uint8)
    for row in range(height):
        for byte in range(width * element):
            line, column = y + row, x * element + byte
            if 0 <= line < matrix.shape[0] and 0 <= column < matrix.shape[1]:
                rows[row, byte] = matrix[line, column]
    if swizzle:
        chunks = 1 << swizzle  # of 16 bytes in a row
        number = torch.arange(height)[:, None] * chunks // 8 % chunks  # of the line of 128 bytes that the row lies in
        rows = rows.view(height, chunks, 16).gather(1, (torch.arange(chunks) ^ number)[..., None].expand(-1, -1, 16))
    return rows.flatten()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("element", [1, 2, 8])
@pytest.mark.parametrize("swizzle", range(4))
def test_tensor_copies(rng, place, element, swizzle):
    """Each swizzle; a box inside, over the right and lower edge, and over the left and upper one. A box begins at a multiple of 16 bytes of
    a row: anywhere else the copy is an illegal instruction."""
    matrix = torch.randint(1, 256, (30, 160), generator=rng, dtype=torch.uint8)
    width = (16 << swizzle if swizzle else 48) // element
    for x, y in ((16 // element, 3), (128 // element, 20), (-16 // element, -5)):
        out = torch.empty(width * 24 * element, dtype=torch.uint8)
        run(place, "box", HOPPER, matrix=matrix, out=out, element_bytes=element, width=144 // element, height=30, row_bytes=160,
            box_width=width, box_height=24, swizzle=swizzle, x=x, y=y)
        assert torch.equal(out, box_in_memory(matrix[:, :144], element, x, y, width, 24, swizzle)), (x, y)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("columns", [8, 32])
@pytest.mark.parametrize("swizzle", range(4))
@pytest.mark.parametrize("kind", range(3), ids=[name for name, *_ in MMA])
def test_wgmma(rng, place, kind, columns, swizzle):
    """Operands brought by tensor copies of the same swizzle. Sums of whole numbers are exact."""
    _, dtype, _ = MMA[kind]
    K = (16 << swizzle if swizzle else 128) // (1 if kind == 2 else 2)
    for whole in (True, False):
        a, b = (torch.randint(-8, 9, (rows, K), generator=rng) if whole else torch.randn(rows, K, generator=rng) for rows in (64, columns))
        a, b = a.to(dtype), b.to(dtype)
        out = torch.empty(64, columns)
        run(place, "wgmma", HOPPER, generation=9, a=a, b=b, out=out, kind=kind, columns=columns, swizzle=swizzle)
        exact, scale = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        if whole:
            assert torch.equal(out.double(), exact)
        else:  # Hopper adds e4m3 products with 14 bits after the largest term's
            assert ((out - exact).abs() <= (2.0**-12 if place == "gpu" and kind == 2 else 2.0**-18) * scale).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("columns", [8, 16, 24, 32, 48, 64, 80, 96, 128])
def test_wgmma_with_rows_in_registers(rng, place, columns):
    for whole in (True, False):
        draw = (lambda n: torch.randint(-8, 9, (n, 64), generator=rng)) if whole else (lambda n: torch.randn(n, 64, generator=rng))
        a, b, out = draw(64).bfloat16(), draw(columns).bfloat16(), torch.empty(64, columns)
        run(place, "wgmma_a", HOPPER, generation=9, a=a, b=b, out=out, columns=columns)
        exact, scale = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        if whole:
            assert torch.equal(out.double(), exact)
        else:
            assert ((out - exact).abs() <= 2.0**-18 * scale).all()


@pytest.mark.parametrize("place", PLACES)
def test_wgmma_with_a_in_registers(rng, place):
    for whole in (True, False):
        a, b = ((torch.randint(-8, 9, (64, 64), generator=rng) if whole else torch.randn(64, 64, generator=rng)).bfloat16()
                for _ in range(2))
        out = torch.empty(64, 64)
        run(place, "wgmma_registers", HOPPER, generation=9, a=a, b=b, out=out)
        exact, scale = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        assert torch.equal(out.double(), exact) if whole else ((out - exact).abs() <= 2.0**-18 * scale).all()


TENSOR_KINDS = ["bf16", "e4m3", "nvfp4", "mxfp4"]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("swizzle", range(4))
@pytest.mark.parametrize("kind", TENSOR_KINDS)
def test_products_in_tensor_memory(rng, place, kind, swizzle):
    """Added to what was stored there before. Sums of whole numbers are exact, and of e2m1 with scales that are powers of two."""
    row = 16 << swizzle if swizzle else 32
    K = row * {"bf16": 1, "e4m3": 2, "nvfp4": 4, "mxfp4": 4}[kind] // 2
    scales = [torch.zeros(row // 32, 512, dtype=torch.uint8) for _ in range(2)]
    operands = []
    for rows, memory in zip((128, 32), scales, strict=True):
        if kind in ("nvfp4", "mxfp4"):
            codes, block = torch.randint(16, (rows, K), generator=rng), 16 if kind == "nvfp4" else 32
            exponents = torch.randint(-2, 3, (rows, K // block), generator=rng)
            factors = torch.exp2(exponents.float())
            in_bytes = factors.to(torch.float8_e4m3fn).view(torch.uint8) if kind == "nvfp4" else (exponents + 127).to(torch.uint8)
            for tile, four in enumerate(in_bytes.split(4, 1)):  # of row r: bytes 16 (r % 32) + 4 (r / 32)
                memory[tile].view(32, 4, 4)[:, :rows // 32, :four.shape[1]] = four.reshape(rows // 32, 32, -1).transpose(0, 1)
            operands.append(((codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), E2M1[codes] * factors.repeat_interleave(block, 1)))
        else:
            values = torch.randint(-8, 9, (rows, K), generator=rng).to(torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn)
            operands.append((values, values.float()))
    start = torch.randint(-100, 100, (128, 32), generator=rng).float()
    out = torch.empty(128, 32)
    (a, left), (b, right) = operands
    run(place, "tensor", BLACKWELL, generation=10, a=a, b=b, a_scales=scales[0], b_scales=scales[1], start=start, out=out,
        kind=TENSOR_KINDS.index(kind), swizzle=swizzle)
    assert torch.equal(out.double(), start.double() + left.double() @ right.double().T)


@pytest.mark.parametrize("place", PLACES)
def test_a_product_with_rows_along_k(rng, place):
    """b in the layout that its transpose would be brought in for a product along the other side: keys that are values too."""
    a, b = (torch.randint(-8, 9, shape, generator=rng).to(torch.bfloat16) for shape in ((128, 64), (64, 128)))
    out = torch.empty(128, 128)
    run(place, "across", BLACKWELL, generation=10, a=a, b=b, out=out)
    assert torch.equal(out, a.float() @ b.float())


def test_encodings_of_tensor_memory():
    """As in the PTX that CuTeDSL 4.8 emits for its dense nvfp4 kernel of 128 x 128: two constants that were read there."""
    out = torch.empty(5, dtype=torch.int32)
    run(False, "encodings", BLACKWELL, out=out)
    low, high, nvfp4, bf16, mxfp4 = (int(v) for v in out.long() % 2**32)
    assert low + (high << 32) == 4611756662049538048 and nvfp4 == 136316032
    assert bf16 == 8 << 24 | 16 << 17 | 1 << 10 | 1 << 7 | 1 << 4  # M / 16, N / 8, bf16, bf16, fp32
    assert mxfp4 == nvfp4 | 1 << 23 | 2 << 29 | 2 << 4  # ue8m0, from byte 2 of a's scales, and of b's


@pytest.mark.parametrize("place", PLACES)
def test_two_floats_at_once(rng, place):
    """Any three patterns of bits, and sums that cancel down to the product's last bits: one rounding."""
    n = 1 << 14
    a, b, c = (torch.randint(-(1 << 31), 1 << 31, (n,), generator=rng).to(torch.int32).view(torch.float32) for _ in range(3))
    a[n // 2:], b[n // 2:] = torch.randn(2, n // 2, generator=rng)
    c[n // 2:] = -(a * b)[n // 2:] * torch.randint(2, (n // 2,), generator=rng)
    out = torch.empty(n)
    run(place, "pairs", BLACKWELL, generation=10, a=a, b=b, c=c, out=out, n=n)
    A, B, C = (t.double().numpy() for t in (a, b, c))
    with np.errstate(all="ignore"):
        want = torch.from_numpy(odd_sum(A * B, C).astype(np.float32))  # 48 bits of a product, so exact in float64
    assert torch.equal(one_nan32(out.view(torch.int32)), one_nan32(want.view(torch.int32)))
