"""The NVFP4 GEMM against exact products of its packed operands: its PTX on the CPU (ptx.py), or a Blackwell GPU with DSV4_TEST_GPU=1."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.cute import gemm as wrappers
from dsv4.kernels.cute.gemm import gemm_nvfp4
from dsv4.kernels.cute.tiles import TILES, Tile
from dsv4.kernels.layouts import Nvfp4Operand, nvfp4_operand
from dsv4.ops.nvfp4 import nvfp4_linear_ref, to_nvfp4_ref, unpack_nvfp4

from ...emulator.emulator import ON_GPU
from .. import compare
from ..weights import any_weight
from .emulate import emulated, emulated_kernel
from .ptx import TensorMap

if ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 10:
    pytestmark = pytest.mark.skip(reason="this GPU has no NVFP4 tensor cores")

NVFP4 = [t for t in TILES if t.kind == "nvfp4"]
PAIR = Tile("nvfp4", 128, 256, cluster=2)
SHAPES = [  # (K, N) of Pro's linear layers, then of Flash's
    (7168, 1536), (7168, 512), (1536, 65536), (1536, 8192), (4096, 1024), (16384, 7168), (7168, 6144), (3072, 7168), (7168, 384),
    (4096, 1024), (4096, 512), (1024, 32768), (1024, 8192), (8192, 4096), (4096, 4096), (2048, 4096), (4096, 256)]


def ids(tile):
    return tile.name.removeprefix("gemm_nvfp4_")


def inputs(rng, M, K, N):
    """Tokens of different sizes, a weight of any codes and scales."""
    x = torch.randn(M, K, generator=rng) * torch.exp2(torch.randint(-8, 9, (M, 1), generator=rng).float())
    return to_nvfp4_ref(x, swizzled=True), any_weight(rng, "nvfp4", N, K)


def run(x, operand, tile=None, seed=0):
    with emulated(seed):
        return gemm_nvfp4(x, operand, tile)


def check(rng, M, K, N, tile=None, seed=0):
    x, weight = inputs(rng, M, K, N)
    got = run(x, nvfp4_operand(weight), tile, seed)
    values, w = unpack_nvfp4(x).double(), weight.dequantize().double()
    # A sum of K / 64 instructions, or K / 16 blocks, the scales' product and that with the sum; the reader's roundings of x and of w.
    compare.assert_as_good(got, nvfp4_linear_ref(x, nvfp4_operand(weight)), values @ w.T, roundings=K // 16 + 4,
                           scale=values.abs() @ w.abs().T)
    return got


@pytest.fixture
def few_processors(monkeypatch):
    """A small grid, so that a block has several tiles."""
    monkeypatch.setattr(wrappers, "processors", lambda device: 2)


@pytest.mark.parametrize("tile", NVFP4, ids=ids)
def test_nvfp4(objects, rng, few_processors, tile):
    """Ragged on all sides; more stages than the ring has, more tiles than sums: a block goes twice round all its barriers."""
    check(rng, 2 * tile.rows * tile.cluster + 37, tile.depth * 2 + 48, 2 * tile.columns + 72, tile=tile)
    check(rng, tile.rows * tile.cluster - 3, tile.depth * (tile.stages + 1) + 16, tile.columns + 8, tile=tile, seed=1)


@pytest.mark.parametrize("M,K,N", [(1, 16, 8), (1, 256, 128), (3, 304, 136), (130, 48, 264), (257, 64, 16), (100, 96, 640)])
def test_small(objects, rng, M, K, N):
    """By the tile that is chosen: less than a block of K, a stage, a row, a tile of scales; edges of tiles of scales within a tile."""
    check(rng, M, K, N)


def test_a_real_depth(objects, rng):
    """Pro's K, 28 stages; one tile."""
    check(rng, 5, 7168, 136, tile=PAIR)


@pytest.mark.skipif(ON_GPU, reason="of what the CPU captures")
@pytest.mark.parametrize("tile", NVFP4, ids=ids)
@pytest.mark.parametrize("m", [1, 129, 16384])
def test_launches_at_the_model_s_shapes(dsl, tile, m):
    """Every copy's tensor, box and swizzle, and the grid, as the host function makes them."""
    kernel, at = emulated_kernel(tile), [(i + 1) << 40 for i in range(6)]
    for k, n in SHAPES:
        launch = kernel.launch([*at, m, n, k, 148, 0.5])
        steps, row = k // 64, k // 2
        x_scale, w_scale = ((128, steps, -(-rows // 128)) for rows in (m, n))
        assert [TensorMap.decode(p) for p in launch.parameters if len(p) == 128] == [
            TensorMap(at[0], 1, (row, m), (1, row), (128, 128), True),
            TensorMap(at[1], 1, (row, n), (1, row), (128, tile.columns // tile.cluster), True),
            TensorMap(at[2], 4, x_scale, (4, 512, 512 * steps), (128, 4, 1), False),
            TensorMap(at[3], 4, w_scale, (4, 512, 512 * steps), (128, 4, tile.columns // 128), False),
            TensorMap(at[5], 2, (n, m), (2, 2 * n), (64, 32), True)]
        tiles = -(-m // (128 * tile.cluster)) * tile.cluster * -(-n // tile.columns)
        assert (launch.grid, launch.block, launch.cluster) == ((min(tiles, 148), 1, 1), (192, 1, 1), tile.cluster)


def test_every_tile_of_a_tall_product_is_done_once(objects, rng, few_processors):
    """More rows than are gone down at a time before the next column."""
    check(rng, 2100, 16, 264, tile=PAIR)


@pytest.mark.parametrize("tile", [Tile("nvfp4", 128, 256), PAIR], ids=ids)
def test_order_does_not_matter(objects, seed, few_processors, tile):
    """The same bits whoever comes first (on a GPU: twice)."""
    results = [check(torch.Generator().manual_seed(seed), 300, 640, 520, tile=tile, seed=order) for order in (1, 2, 3)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_every_tile_gives_the_same_bits(objects, rng):
    x, weight = inputs(rng, 140, 336, 272)
    first, *others = (run(x, nvfp4_operand(weight), tile) for tile in NVFP4)
    assert all(torch.equal(first, other) for other in others)


def test_exact_where_the_sum_is(objects, rng):
    """Codes of whole numbers, scales of 1: sums of at most 2^16 in fp32, so every bit; the scales of rows and of the weight too."""
    x, weight = inputs(rng, 20, 512, 136)
    x = x._replace(scales=torch.where(x.scales > 0, 0x38, 0).to(torch.uint8),
                   row_scales=torch.exp2(torch.randint(-3, 4, (20,), generator=rng).float()))
    weight.scale, weight.global_scale = torch.ones_like(weight.scale.float()).to(torch.float8_e4m3fn), 0.25
    exact = unpack_nvfp4(x).double() @ weight.dequantize().double().T
    for tile in NVFP4:
        assert torch.equal(run(x, nvfp4_operand(weight), tile), exact.bfloat16())


def test_a_token_alone_gives_the_same_bits(objects, rng):
    """Whatever stands beside it, a NaN too."""
    v, weight = torch.randn(200, 80, generator=rng), nvfp4_operand(any_weight(rng, "nvfp4", 40, 80))
    together = run(to_nvfp4_ref(v, True), weight, PAIR)
    for i in (7, 150):
        assert torch.equal(run(to_nvfp4_ref(v[i : i + 1], True), weight)[0], together[i])
    v[3, 5], v[4, 70] = float("nan"), float("inf")
    spoilt = run(to_nvfp4_ref(v, True), weight, PAIR)
    assert spoilt[3:5].isnan().all()
    assert torch.equal(spoilt[[0, 1, 2, *range(5, 200)]], together[[0, 1, 2, *range(5, 200)]])


def test_nothing_to_do(rng):
    x, weight = inputs(rng, 1, 64, 8)
    none = x._replace(values=x.values[:0], scales=x.scales[:0], row_scales=x.row_scales[:0])
    assert gemm_nvfp4(none, nvfp4_operand(weight)).shape == (0, 8)


@pytest.mark.parametrize("change", [
    lambda x, w: (to_nvfp4_ref(torch.ones(2, 64)), w), lambda x, w: (to_nvfp4_ref(torch.ones(2, 128), True), w),
    lambda x, w: (x._replace(scales=x.scales[:-1]), w), lambda x, w: (x, Nvfp4Operand(w.values, w.scales[:-1], 1.0)),
    lambda x, w: (x, Nvfp4Operand(w.values[:12], w.scales, 1.0)),
])
def test_refusals(rng, change):
    x, weight = inputs(rng, 2, 64, 16)
    with pytest.raises(UserError, match=r"^gemm_nvfp4: expected x \[M, K / 2\] and a weight of as many columns"):
        gemm_nvfp4(*change(x, nvfp4_operand(weight)))
    with pytest.raises(UserError, match="expected tensors on a GPU, found cpu"):
        gemm_nvfp4(x, nvfp4_operand(weight))


def check_on(device, M, K, N):
    """Operands made on the CPU, everything else on `device`: beyond the output's rounding there is no error that counts."""
    rng = torch.Generator().manual_seed(M)
    x, weight = inputs(rng, M, K, N)
    x, operand = x._replace(**{name: getattr(x, name).to(device) for name in ("values", "scales", "row_scales")}), nvfp4_operand(weight)
    operand = operand._replace(values=operand.values.to(device), scales=operand.scales.to(device))
    exact = unpack_nvfp4(x).double() @ weight.dequantize().to(device).double().T
    rounding = (exact.bfloat16().double() - exact).norm()
    for tile in NVFP4:
        assert (gemm_nvfp4(x, operand, tile).double() - exact).norm() <= 1.02 * rounding, tile.name


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: set DSV4_TEST_GPU=1")
@pytest.mark.parametrize("M,K,N", [(1, 7168, 1536), (128, 7168, 512), (333, 1536, 8192), (2048, 4096, 4096), (4096, 3072, 7168)])
def test_at_the_model_s_shapes(M, K, N):
    check_on("cuda", M, K, N)


@pytest.mark.skipif(ON_GPU, reason="the same without one")
def test_the_check_of_the_model_s_shapes(dsl):
    with emulated():
        check_on("cpu", 130, 512, 264)
