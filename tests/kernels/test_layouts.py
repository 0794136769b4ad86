"""The hardware's layouts against element-by-element definitions and against what torch.nn.functional.scaled_mm documents."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dsv4.kernels import layouts

SHAPES = [(1, 1), (1, 4), (31, 5), (128, 4), (129, 4), (130, 9), (384, 16), (40, 448)]


def scales_of(rng, rows, groups):
    return torch.randint(1, 127, (rows, groups), generator=rng, dtype=torch.uint8)


@pytest.mark.parametrize("rows,groups", SHAPES)
def test_swizzle_element_by_element(rng, rows, groups):
    """cuBLAS' formula (1D block scaling factors layout): tiles of 128 x 4, in a tile (outer % 32) * 16 + (outer / 32) * 4 + inner."""
    scales = scales_of(rng, rows, groups)
    got = layouts.swizzle_scales(scales)
    wide = -(-groups // 4)
    want = [0] * (-(-rows // 128) * wide * 512)
    for row in range(rows):
        for group in range(groups):
            tile = row // 128 * wide + group // 4
            want[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4] = int(scales[row, group])
    assert got.tolist() == want and len(want) == layouts.swizzled_bytes(rows, groups)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
@pytest.mark.parametrize("rows,groups", SHAPES)
def test_swizzle_and_back(rng, rows, groups, dtype):
    scales = scales_of(rng, rows, groups).view(dtype)
    there = layouts.swizzle_scales(scales)
    back = layouts.unswizzle_scales(there, rows, groups)
    assert there.dtype == back.dtype == dtype and back.shape == scales.shape and there.is_contiguous() and back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_unswizzle_refuses_another_size(rng):
    with pytest.raises(ValueError, match="129 rows of 4: expected 1024 bytes, found 512"):
        layouts.unswizzle_scales(layouts.swizzle_scales(scales_of(rng, 128, 4)), 129, 4)


@pytest.fixture(scope="module")
def torchs():
    """to_blocked and from_blocked of torch's own tests of scaled_mm; taken out of their file, whose import wants expecttest."""
    path = Path(torch.__file__).parent / "testing" / "_internal" / "common_quantized.py"
    if not path.exists():
        pytest.skip("this torch comes without its tests' helpers")
    wanted = {"ceil_div", "from_blocked", "to_blocked"}
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    names = {"torch": torch}
    exec(compile(tree, str(path), "exec"), names)
    return SimpleNamespace(**{name: names[name] for name in wanted})


@pytest.mark.parametrize("rows,groups", SHAPES)
def test_swizzle_is_torchs(rng, torchs, rows, groups):
    """What torch's tests of scaled_mm make and read as SWIZZLE_32_4_4."""
    scales = scales_of(rng, rows, groups)
    swizzled = layouts.swizzle_scales(scales)
    assert torch.equal(swizzled, torchs.to_blocked(scales).view(-1))
    assert torch.equal(torchs.from_blocked(torch.empty(rows, groups * 16), swizzled, 16), scales)


def scaled_mm(m, n, k, a_scales, b_scales):
    """torch's front of the NVFP4 product on tensors without data: it checks sizes, dtypes and the swizzle."""
    kind, swizzle = F.ScalingType, F.SwizzleType
    a, b = (torch.empty(rows, k // 2, dtype=torch.float4_e2m1fn_x2, device="meta") for rows in (m, n))
    one = torch.empty(1, device="meta")
    recipe, order = [kind.BlockWise1x16, kind.TensorWise], [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
    return F.scaled_mm(a, b.t(), [a_scales, one], recipe, [b_scales, one], recipe, order, order)


@pytest.mark.parametrize("m,n,k", [(1, 128, 64), (130, 256, 160), (16, 2048, 7168)])
def test_scaled_mm_takes_these_sizes_and_no_others(rng, m, n, k):
    scales = [layouts.swizzle_scales(scales_of(rng, rows, k // 16).view(torch.float8_e4m3fn)).to("meta") for rows in (m, n)]
    assert scaled_mm(m, n, k, *scales).shape == (m, n)
    plain = torch.empty(m * k // 16 + 1, dtype=torch.float8_e4m3fn, device="meta")
    with pytest.raises(RuntimeError, match="scale_a must have"):
        scaled_mm(m, n, k, plain, scales[1])


@pytest.mark.parametrize("rows,columns", [(1, 2), (3, 64), (5, 66), (128, 192)])
def test_k_major_element_by_element_and_back(rng, rows, columns):
    """Two codes a byte, the even one low; rows and columns filled up with zeros."""
    codes = torch.randint(16, (rows, columns), generator=rng, dtype=torch.uint8)
    packed = layouts.pack_k_major(codes, 64, 8)
    assert packed.shape == (-(-rows // 8) * 8, -(-columns // 64) * 32)
    for row in range(packed.shape[0]):
        for byte in range(packed.shape[1]):
            low, high = (int(codes[row, k]) if row < rows and k < columns else 0 for k in (2 * byte, 2 * byte + 1))
            assert packed[row, byte] == low + 16 * high
    assert torch.equal(layouts.unpack_k_major(packed, rows, columns), codes)
    assert torch.equal(layouts.pad_k_major(layouts.pack_k_major(codes, 2), 64, 8), packed)


def test_what_needs_no_fill_is_not_copied(rng):
    payload = torch.randint(256, (128, 64), generator=rng, dtype=torch.uint8)
    assert layouts.pad_k_major(payload, 64, 128) is payload


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner,group", [(16, 16), (48, 16), (40, 16), (7, 16), (6, 1), (20, 8)])
def test_gate_and_up_row_by_row_and_back(rng, inner, group, dtype):
    gate, up = (torch.randint(120, (inner, 3), generator=rng, dtype=torch.uint8) for _ in range(2))
    gate, up = (t.view(dtype) if dtype.itemsize == 1 else t.to(dtype) for t in (gate, up))
    both = layouts.interleave_gate_up(gate, up, group)
    assert both.dtype == dtype and both.shape == (-(-inner // group) * 2 * group, 3)
    rows = both.view(torch.uint8) if dtype.itemsize == 1 else both
    for row in range(len(both)):
        source, i = (gate, up)[row // group % 2], row // (2 * group) * group + row % group
        source = source.view(torch.uint8) if dtype.itemsize == 1 else source
        assert torch.equal(rows[row], source[i]) if i < inner else (rows[row] == 0).all()
    for part, want in zip(layouts.separate_gate_up(both, inner, group), (gate, up), strict=True):
        assert part.dtype == dtype and part.tolist() == want.tolist()


def test_gate_and_up_must_be_alike():
    with pytest.raises(ValueError, match="gate and up: expected one shape"):
        layouts.interleave_gate_up(torch.zeros(4, 2), torch.zeros(4, 3))
