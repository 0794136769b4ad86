"""The CuTeDSL GEMMs against exact products: their PTX on the CPU (ptx.py), or a Hopper GPU with DSV4_TEST_GPU=1."""

import ctypes

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.cute import gemm as wrappers
from dsv4.kernels.cute.gemm import fp8_rows, gemm, gemm_fp8
from dsv4.kernels.cute.tiles import TILES, Tile
from dsv4.ops.quant import fp8_round_trip

from ...emulator.emulator import ON_GPU
from .. import compare
from .emulate import emulated

if ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
    pytestmark = pytest.mark.skip(reason="these kernels are for Hopper GPUs")

BF16 = [t for t in TILES if t.kind == "bf16"]
E4M3 = [t for t in TILES if t.kind == "e4m3"]


def ids(tile):
    return tile.name.removeprefix("gemm_")


def check_bf16(rng, M, K, N, groups=1, tile=None, seed=0):
    x, w = (torch.randn(*shape, generator=rng).bfloat16() for shape in ((M, groups, K), (groups * N, K)))
    with emulated(seed):
        got = gemm(x if groups > 1 else x[:, 0], w, tile)
    assert got.shape == ((M, groups, N) if groups > 1 else (M, N))
    by_group = w.view(groups, N, K)
    exact = torch.einsum("mgk,gnk->mgn", x.double(), by_group.double())
    low = torch.einsum("mgk,gnk->mgn", x.float(), by_group.float()).bfloat16()
    scale = torch.einsum("mgk,gnk->mgn", x.double().abs(), by_group.double().abs())
    compare.assert_as_good(got.view(low.shape), low, exact, roundings=K, scale=scale)
    return got


def operands_fp8(rng, M, K, N):
    """Tokens and weights of different sizes, so that a scale at the wrong place is seen."""
    x = torch.randn(M, K, generator=rng) * torch.exp2(torch.randint(-6, 7, (M, 1), generator=rng).float())
    x *= torch.exp2(torch.randint(-3, 4, (-(-K // 128),), generator=rng).float()).repeat_interleave(128)[:K]
    w = torch.randn(N, K, generator=rng).to(torch.float8_e4m3fn)
    w_scale = torch.rand(-(-N // 128), -(-K // 128), generator=rng) + 0.5  # not powers of two: those of a -Base checkpoint are not
    return *fp8_rows(x), w, w_scale


def dequantized(x, x_scale, w, w_scale):
    (M, K), N = x.shape, w.shape[0]
    w_scale = w_scale.double().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    return x.double() * x_scale[:, :M].T.double().repeat_interleave(128, 1)[:, :K], w.double() * w_scale


def check_fp8(rng, M, K, N, tile=None, seed=0):
    given = operands_fp8(rng, M, K, N)
    with emulated(seed):
        got = gemm_fp8(*given, tile)
    x, w = dequantized(*given)
    # On a GPU each of 32 products loses what is 2^-13 below the largest of them and of the sum so far: half of it on average, 2^10 steps.
    hopper = 2**10 if ON_GPU else 0
    compare.assert_as_good(got, (x.float() @ w.float().T).bfloat16(), x @ w.T, roundings=K + hopper, scale=x.abs() @ w.abs().T)
    return got


@pytest.fixture
def few_processors(monkeypatch):
    """A small grid, so that a block has several tiles."""
    monkeypatch.setattr(wrappers, "processors", lambda device: 4)


@pytest.mark.parametrize("tile", BF16, ids=ids)
def test_bf16(objects, rng, few_processors, tile):
    """Ragged on all sides. More stages than the ring has and more tiles than blocks, or parts of K of which the last is ragged."""
    if tile.split == 1:
        check_bf16(rng, 2 * tile.rows + 37, tile.depth * (tile.stages + 1) + 24, tile.columns + 72, tile=tile)
    else:
        check_bf16(rng, tile.rows + 5, tile.depth * (2 * tile.split - 1) - 40, tile.columns - 24, tile=tile)


@pytest.mark.parametrize("tile", E4M3, ids=ids)
def test_e4m3(objects, rng, few_processors, tile):
    """As above; K in an odd number of blocks of 128, and a part of it that no block of the cluster has."""
    if tile.split == 1:
        check_fp8(rng, tile.rows + 37, tile.depth * (tile.stages + 3) + 48, tile.columns + 72, tile=tile)
    else:
        check_fp8(rng, tile.rows - 7, tile.depth * (2 * tile.split + 1) - 80, tile.columns + 8, tile=tile)


@pytest.mark.parametrize("tile", [Tile("bf16", 128, 256, cluster=2), Tile("bf16", 128, 96, split=2)], ids=ids)
def test_groups(objects, rng, few_processors, tile):
    """wo_a: each group of x meets its own rows of w."""
    check_bf16(rng, 70, 136, 264, groups=3, tile=tile)


def test_every_tile_of_a_tall_product_is_done_once(objects, rng, few_processors):
    """More rows than are gone down at a time before the next column."""
    check_bf16(rng, 2100, 16, 136, tile=Tile("bf16", 128, 128, cluster=2))


@pytest.mark.parametrize("M,K,N", [(1, 8, 8), (1, 64, 512), (3, 200, 128), (65, 72, 40)])
def test_small(objects, rng, M, K, N):
    """By the tile that is chosen: less than a stage, a row, a column's vector."""
    check_bf16(rng, M, K, N)


@pytest.mark.parametrize("M,K,N", [(1, 16, 8), (2, 128, 136), (5, 512, 64)])
def test_small_e4m3(objects, rng, M, K, N):
    check_fp8(rng, M, K, N)


@pytest.mark.parametrize("tile", [Tile("bf16", 128, 192, cluster=2), Tile("bf16", 64, 64, split=4), Tile("e4m3", 128, 128)], ids=ids)
def test_order_does_not_matter(objects, seed, few_processors, tile):
    """The same bits whoever comes first (on a GPU: twice), also where blocks add up their parts of K."""
    check = check_fp8 if tile.kind == "e4m3" else check_bf16
    results = [check(torch.Generator().manual_seed(seed), 150, 640, 328, tile=tile, seed=order) for order in (1, 2)]
    assert torch.equal(*results)


@pytest.mark.parametrize("tile", [t for t in BF16 if t.split > 2], ids=ids)
def test_parts_are_added_in_the_order_of_k(objects, rng, tile):
    """One product a part, of which those of 2^24 go away: what is left of the ones beside them says who came when."""
    part = 2 * tile.depth
    x, w = torch.zeros(tile.rows, part * tile.split), torch.zeros(tile.columns, part * tile.split)
    for i in range(tile.split):
        x[:, part * i] = torch.randint(1, 4, (tile.rows,), generator=rng) * (2.0**24, 1.0, -(2.0**24), 1.0)[i]
        w[:, part * i] = torch.randint(1, 4, (tile.columns,), generator=rng)
    sums = torch.zeros(tile.rows, tile.columns)
    for i in range(tile.split):
        sums = sums + x[:, part * i, None] * w[None, :, part * i]
    with emulated():
        assert torch.equal(gemm(x.bfloat16(), w.bfloat16(), tile), sums.bfloat16())


def test_exact_where_the_sum_is(objects, rng):
    """Small whole numbers: sums of at most 2^8 are exact in bf16, so every bit."""
    x, w = (torch.randint(-1, 2, (n, 192), generator=rng).bfloat16() for n in (100, 144))
    exact = (x.float() @ w.float().T).bfloat16()
    with emulated():
        assert torch.equal(gemm(x, w), exact)
        one = torch.ones(2, 100), torch.ones(2, 2)
        assert torch.equal(gemm_fp8(x.to(torch.float8_e4m3fn), one[0], w.to(torch.float8_e4m3fn), one[1]), exact)


def test_nothing_to_do():
    assert gemm(torch.zeros(0, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)).shape == (0, 8)


@pytest.mark.parametrize("M,K", [(1, 16), (7, 128), (4, 1040)])
def test_fp8_rows_are_what_the_definition_rounds_to(rng, M, K):
    x = torch.randn(M, K, generator=rng) * torch.exp2(torch.randint(-20, 21, (M, 1), generator=rng).float())
    values, scales = fp8_rows(x)
    assert scales.shape == (-(-K // 128), -(-M // 4) * 4) and (scales[:, M:] == 0).all()
    again = values.float() * scales[:, :M].T.repeat_interleave(128, 1)[:, :K]
    assert torch.equal(again, fp8_round_trip(x, 128))


def test_refusals(rng):
    x, w = (torch.randn(n, 64, generator=rng).bfloat16() for n in (3, 16))
    for wrong in ((x.float(), w), (x, w.float()), (x, w[:, :56]), (x[:, :60].contiguous(), w[:, :60].contiguous()), (x, w[:12]),
                  (x[None, None], w), (x.view(1, 3, 64), w), (x[0], w)):
        with pytest.raises(UserError, match="^gemm: expected x"):
            gemm(*wrong)
    values, scale = fp8_rows(x)
    v, w_scale = w.to(torch.float8_e4m3fn), torch.ones(1, 1)
    for wrong in ((x, scale, v, w_scale), (values, scale[:, :3], v, w_scale), (values, scale, v, torch.ones(2, 1)),
                  (values, scale, w, w_scale), (values, scale.double(), v, w_scale), (values[:, :56], scale, v[:, :56], w_scale)):
        with pytest.raises(UserError, match="^gemm_fp8: expected x"):
            gemm_fp8(*wrong)
    with pytest.raises(UserError, match="expected tensors on a GPU, found cpu"):
        gemm(x, w)


@pytest.mark.skipif(ON_GPU, reason="of objects where there is no GPU")
def test_an_object_loads_without_a_gpu_and_says_that_there_is_none(dsl):
    kernel = wrappers.KERNELS[Tile("bf16", 64, 128)]
    function = kernel.bind(ctypes.CDLL(str(kernel.built("sm_90a"))))
    assert function(None, None, None, None, None, 1, 8, 8, 1, 132, None) in (35, 100)  # driver insufficient, no device


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: set DSV4_TEST_GPU=1")
@pytest.mark.parametrize("M,K,N,groups", [
    (1, 7168, 1536, 1), (128, 7168, 512, 1), (333, 1536, 8192, 1), (2048, 1024, 4096, 1), (200, 4096, 1024, 8)])
def test_at_the_model_s_shapes(M, K, N, groups):
    """Operands on the GPU, torch's product in fp32 beside it. The share of error beyond the output's rounding is small."""
    draw = torch.Generator("cuda").manual_seed(M)
    x = torch.randn(M, groups, K, device="cuda", generator=draw).bfloat16()
    w = torch.randn(groups * N, K, device="cuda", generator=draw).bfloat16()
    exact = torch.einsum("mgk,gnk->mgn", x.double(), w.double().view(groups, N, K))
    rounding = (exact.bfloat16().double() - exact).norm()
    for tile in BF16:
        got = gemm(x if groups > 1 else x[:, 0], w, tile).double().view(exact.shape)
        assert (got - exact).norm() <= 1.02 * rounding, tile.name
    if groups == 1:
        given = *fp8_rows(x[:, 0].float()), w.to(torch.float8_e4m3fn), torch.rand(-(-N // 128), -(-K // 128), device="cuda") + 0.5
        left, right = dequantized(*given)
        exact = left @ right.T
        rounding = (exact.bfloat16().double() - exact).norm()
        for tile in E4M3:
            assert (gemm_fp8(*given, tile).double() - exact).norm() <= 1.15 * rounding, tile.name
