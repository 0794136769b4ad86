"""The grouped bf16 and e4m3 products against exact ones: their PTX on the CPU (ptx.py), or a Hopper GPU with DSV4_TEST_GPU=1."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.cute import grouped as wrappers
from dsv4.kernels.cute.gemm import gemm, gemm_fp8
from dsv4.kernels.cute.grouped import grouped_fp8_rows, grouped_gemm, grouped_gemm_fp8
from dsv4.kernels.cute.tiles import TILES, Tile
from dsv4.kernels.layouts import plan_entries
from dsv4.ops.grouped import group_choices_ref

from ...emulator.emulator import ON_GPU
from .. import compare
from .emulate import emulated, emulated_kernel
from .ptx import TensorMap
from .test_gemm import operands_fp8
from .test_grouped_nvfp4 import spread

if ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
    pytestmark = pytest.mark.skip(reason="these kernels are for Hopper GPUs")

BF16, E4M3 = ([t for t in TILES if t.kind == kind] for kind in ("bf16_grouped", "e4m3_grouped"))
RAGGED = [0, 1, 63, 64, 65, 128, 129, 0]  # a warpgroup's rows and a tile's, one less and one more; no rows at both ends
FEW = [3, 0, 140]
SHAPES = [(384, 7168, 3072), (256, 4096, 2048)]  # experts, K, I of Pro and Flash


def ids(tile):
    return tile.name.removeprefix("gemm_")


def operands(rng, kind, groups, K, n):
    """(x, w) and, for e4m3, their scales: (x, x_scale, w, w_scale)."""
    rows, experts = len(groups.order), len(groups.offsets) - 1
    if kind == "bf16_grouped":
        return [torch.randn(*shape, generator=rng).bfloat16() for shape in ((rows, K), (experts, n, K))]
    drawn = [operands_fp8(rng, 0, K, n)[2:] for _ in range(experts)]
    sizes = torch.exp2(torch.randint(-6, 7, (rows, -(-K // 128)), generator=rng).float()).repeat_interleave(128, 1)[:, :K]
    x = grouped_fp8_rows(torch.randn(rows, K, generator=rng) * sizes, groups)
    return *x, *(torch.stack(parts) for parts in zip(*drawn, strict=True))


def multiply(given, groups, tile=None):
    if len(given) == 2:
        return grouped_gemm(given[0], groups, given[1], tile)
    x, x_scale, w, w_scale = given
    return grouped_gemm_fp8(x, x_scale, groups, w, w_scale, tile)


def product(given, groups, tile=None, seed=0):
    with emulated(seed):
        return multiply(given, groups, tile)


def exact_values(given, groups):
    """(x [N, K], w [E, n, K]) in float64. A row's scales are where the plan's entry says, which no function of layouts.py reads."""
    if len(given) == 2:
        return [t.double() for t in given]
    x, x_scale, w, w_scale = given
    (N, K), n = x.shape, w.shape[1]
    scale = torch.full((N, len(x_scale)), float("nan"), dtype=torch.float64, device=x.device)
    for _, first, rows, tile in groups.tiles[: groups.counts[0]].tolist():
        scale[first : first + rows] = x_scale[:, 128 * tile : 128 * tile + rows].T.double()
    w_scale = w_scale.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[:, :, :K]
    return x.double() * scale.repeat_interleave(128, 1)[:, :K], w.double() * w_scale


def check(rng, counts, K, n, kind, tile=None, seed=0):
    """As near to the exact product as fp32 sums are; the emulator finds bytes that are not written, or written anywhere else."""
    groups = group_choices_ref(spread(rng, counts), len(counts))
    given = operands(rng, kind, groups, K, n)
    got = product(given, groups, tile, seed)
    assert got.shape == (sum(counts), n) and got.dtype == torch.bfloat16
    x, w = exact_values(given, groups)
    hopper = 2**10 if ON_GPU and kind == "e4m3_grouped" else 0  # as in test_gemm.py
    for e, (first, last) in enumerate(zip(groups.offsets.tolist(), groups.offsets[1:].tolist(), strict=False)):
        if first < last:
            mine, of_expert = x[first:last], w[e].T
            low = (mine.float() @ of_expert.float()).bfloat16()
            compare.assert_as_good(got[first:last], low, mine @ of_expert, roundings=K + hopper, scale=mine.abs() @ of_expert.abs())
    return got


@pytest.fixture
def few_processors(monkeypatch):
    """A small grid: a block has several tiles, of several experts, and tiles are not run in the order of their rows."""
    monkeypatch.setattr(wrappers, "processors", lambda device: 3)


@pytest.mark.parametrize("tile", [*BF16, *E4M3], ids=ids)
def test_ragged(objects, rng, few_processors, tile):
    """Ragged groups; then columns, and more stages than the ring has: a block goes round all its barriers, with and without rows for its
    second warpgroup."""
    check(rng, RAGGED, tile.depth + 16, 72, tile.kind, tile)
    check(rng, FEW, tile.depth * (tile.stages + 1) + 48, tile.columns + 72, tile.kind, tile, seed=1)


# One row; all on one expert of several, the last one and the first; more experts than rows.
@pytest.mark.parametrize("kind,counts", [(kind, counts) for kind in ("bf16_grouped", "e4m3_grouped") for counts in (
    [1], [0, 0, 150], [150, 0, 0], [0] * 100 + [1] + [0] * 200 + [2])])
def test_few(objects, rng, kind, counts):
    """By the tile that is chosen."""
    check(rng, counts, 64, 24, kind)


@pytest.mark.parametrize("tile", [*BF16, *E4M3], ids=ids)
def test_one_expert_has_the_bits_of_the_dense_product(objects, rng, tile):
    """The same products in the same order, whatever the row's tile."""
    groups = group_choices_ref(spread(rng, [0, 133]), 2)
    given = operands(rng, tile.kind, groups, 3 * tile.depth + 16, 136)
    got, kind = product(given, groups, tile), tile.kind.removesuffix("_grouped")
    dense = next(t for t in TILES if (t.kind, t.rows, t.columns, t.split) == (kind, tile.rows, tile.columns, 1))
    with emulated(1):
        if len(given) == 2:
            want = gemm(given[0], given[1][1], dense)
        else:
            x, x_scale, w, w_scale = given  # of one expert, scales begin at the first tile, and fp8_rows' fill is to the next multiple of 4
            want = gemm_fp8(x, x_scale[:, :136].contiguous(), w[1], w_scale[1], dense)
    assert torch.equal(got, want)


@pytest.mark.parametrize("tile", [Tile("bf16_grouped", 128, 192), Tile("e4m3_grouped", 128, 192)], ids=ids)
def test_order_does_not_matter(objects, seed, few_processors, tile):
    """The same bits whoever comes first (on a GPU: twice)."""
    first, second = (check(torch.Generator().manual_seed(seed), [70, 0, 20], 640, 200, tile.kind, tile, order) for order in (1, 2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("tile", [Tile("bf16_grouped", 128, 128), Tile("e4m3_grouped", 128, 192)], ids=ids)
def test_a_row_s_result_does_not_depend_on_its_neighbours(objects, rng, tile):
    """NaN in an expert's first and last row spoils these and no other row, in the same tile or in the next expert's."""
    groups = group_choices_ref(spread(rng, [30, 70, 5]), 3)
    given = list(operands(rng, tile.kind, groups, 160, 72))
    clean = product(given, groups, tile)
    bad = torch.tensor([0, 29, 30, 99])
    given[0][bad, 3] = torch.tensor(float("nan")).to(given[0].dtype)
    got, others = product(given, groups, tile), torch.ones(105, dtype=torch.bool)
    others[bad] = False
    assert got[bad].isnan().all() and torch.equal(got[others], clean[others])


@pytest.mark.skipif(ON_GPU, reason="of what the emulator finds")
@pytest.mark.parametrize("tile", [Tile("bf16_grouped", 128, 256), Tile("e4m3_grouped", 128, 128)], ids=ids)
@pytest.mark.parametrize("entries", range(4))
def test_an_entry_writes_its_rows_alone(objects, rng, tile, entries):
    """Of a plan that ends before its rows do, exactly the entries' rows are written: none of the next expert's, by TMA or by threads."""
    counts, n = [64, 1, 100], 72
    groups = group_choices_ref(spread(rng, counts), len(counts))
    given = operands(rng, tile.kind, groups, 64, n)
    cut = groups._replace(counts=torch.tensor([entries, 0], dtype=torch.int32))
    if entries == len(counts):
        product(given, cut, tile)
        return
    missing, all_ = 2 * n * sum(counts[entries:]), 2 * n * sum(counts)
    with pytest.raises(AssertionError, match=f"^{missing} of {all_} bytes of an output were never written"):
        product(given, cut, tile)


@pytest.mark.skipif(ON_GPU, reason="of what the CPU captures")
@pytest.mark.parametrize("tile", [*BF16, *E4M3], ids=ids)
@pytest.mark.parametrize("rows", [6, 24576])
def test_launches_at_the_model_s_shapes(dsl, tile, rows):
    """Every copy's tensor, box and swizzle, and the grid, as the host function makes them; the addresses and numbers as they are given."""
    kernel, at = emulated_kernel(tile), [(i + 1) << 40 for i in range(7)]
    size = 1 if tile.scaled else 2
    for experts, hidden, inner in SHAPES:
        for k, n in ((hidden, 2 * inner), (inner, hidden)):
            entries = plan_entries(rows, experts, 128)
            launch = kernel.launch([*at, rows, n, k, experts, entries, 132])
            scales = [TensorMap(at[2], 4, (128 * entries, k // 128), (4, 512 * entries), (128, 1), False)] if tile.scaled else []
            assert [TensorMap.decode(p) for p in launch.parameters if len(p) == 128] == [
                TensorMap(at[0], size, (k, rows), (size, size * k), (tile.depth, 128), True),
                TensorMap(at[1], size, (k, n, experts), (size, size * k, size * k * n), (tile.depth, tile.columns, 1), True), *scales,
                TensorMap(at[6], 2, (n, rows), (2, 2 * n), (64, 64), True)]
            tiles = entries * -(-n // tile.columns)
            assert (launch.grid, launch.block, launch.cluster) == ((min(tiles, 132), 1, 1), (384, 1, 1), 1)


def test_nothing_to_do(rng):
    none = group_choices_ref(torch.empty(0, 2, dtype=torch.int32), 3)
    given = operands(rng, "e4m3_grouped", none, 64, 16)
    assert grouped_gemm_fp8(given[0], given[1], none, *given[2:]).shape == (0, 16)
    bf16 = [given[0].bfloat16(), given[2].bfloat16()]
    assert grouped_gemm(bf16[0], none, bf16[1]).shape == (0, 16)
    some = group_choices_ref(torch.zeros(4, 1, dtype=torch.int32), 3)
    assert grouped_gemm(torch.zeros(4, 64).bfloat16(), some, bf16[1][:, :0]).shape == (4, 0)


@pytest.mark.parametrize("change", [
    lambda x, s, g, w, t: (x.float(), s, g, w, t), lambda x, s, g, w, t: (x, s, g, w.float(), t), lambda x, s, g, w, t: (x[1:], s, g, w, t),
    lambda x, s, g, w, t: (x[:, :48], s, g, w, t), lambda x, s, g, w, t: (x[:, :60], s, g, w[:, :, :60], t),
    lambda x, s, g, w, t: (x, s, g, w[:, :12], t), lambda x, s, g, w, t: (x, s, g, w[0], t), lambda x, s, g, w, t: (x[None], s, g, w, t),
    lambda x, s, g, w, t: (x, s, g._replace(offsets=g.offsets[:-1]), w, t), lambda x, s, g, w, t: (x, s, g, w[:1], t)])
def test_refusals(rng, change):
    groups = group_choices_ref(spread(rng, [2, 1]), 2)
    given = operands(rng, "e4m3_grouped", groups, 64, 16)
    x, x_scale, groups, w, w_scale = change(*given[:2], groups, *given[2:])
    with pytest.raises(UserError, match=r"^grouped_gemm_fp8: expected x \[N, K\] of these groups [^\n]*, found x [^\n]*$"):
        grouped_gemm_fp8(x, x_scale, groups, w, w_scale)
    x, w = (t.bfloat16() if t.dtype == torch.float8_e4m3fn else t for t in (x, w))
    with pytest.raises(UserError, match=r"^grouped_gemm: expected x \[N, K\] of these groups [^\n]*, found x [^\n]*$"):
        grouped_gemm(x, groups, w)


@pytest.mark.parametrize("change", [lambda s, t: (s[:, :-1], t), lambda s, t: (s[:0], t), lambda s, t: (s.double(), t),
                                    lambda s, t: (s, t[:1]), lambda s, t: (s, t.double()), lambda s, t: (s, t[0])])
def test_refused_scales(rng, change):
    groups = group_choices_ref(spread(rng, [2, 1]), 2)
    x, x_scale, w, w_scale = operands(rng, "e4m3_grouped", groups, 64, 16)
    x_scale, w_scale = change(x_scale, w_scale)
    with pytest.raises(UserError, match=r"^grouped_gemm_fp8: expected [^\n]* with fp32 scales [^\n]*, found x [^\n]*$"):
        grouped_gemm_fp8(x, x_scale, groups, w, w_scale)


def test_a_gpu_is_needed(rng):
    groups = group_choices_ref(spread(rng, [2, 1]), 2)
    x, w = operands(rng, "bf16_grouped", groups, 64, 16)
    with pytest.raises(UserError, match="expected tensors on a GPU, found cpu"):
        grouped_gemm(x, groups, w)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: set DSV4_TEST_GPU=1")
@pytest.mark.parametrize("kind", ["bf16_grouped", "e4m3_grouped"])
@pytest.mark.parametrize("rows,K,n", [(1, 7168, 6144), (333, 3072, 7168), (2048, 4096, 4096)])
def test_at_the_model_s_shapes(kind, rows, K, n):
    """Everything on the GPU, experts of very different sizes. The share of error beyond the output's rounding is small."""
    rng = torch.Generator().manual_seed(rows)
    chosen = torch.randint(0, 6, (rows, 2), generator=rng, dtype=torch.int32)
    chosen[:, 0].clamp_(max=3)
    groups = group_choices_ref(chosen, 7)
    given = [t.cuda() for t in operands(rng, kind, groups, K, n)]
    groups = type(groups)(*(t.cuda() for t in groups))
    x, w = exact_values(given, groups)
    exact = torch.cat([x[first:last] @ w[e].T for e, (first, last) in enumerate(
        zip(groups.offsets.tolist(), groups.offsets[1:].tolist(), strict=False))])
    rounding = (exact.bfloat16().double() - exact).norm()
    for tile in (t for t in TILES if t.kind == kind):
        assert (multiply(given, groups, tile).double() - exact).norm() <= (1.02 if len(given) == 2 else 1.15) * rounding, tile.name
