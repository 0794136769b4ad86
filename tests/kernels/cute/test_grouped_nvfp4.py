"""The grouped NVFP4 products against exact ones of their packed operands: their PTX on the CPU (ptx.py), or a Blackwell GPU with
DSV4_TEST_GPU=1."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.kernels.cute import grouped as wrappers
from dsv4.kernels.cute.grouped import grouped_nvfp4_linear, grouped_swiglu_nvfp4
from dsv4.kernels.cute.tiles import TILES, Tile
from dsv4.kernels.layouts import (
    GroupedNvfp4,
    Nvfp4,
    grouped_gate_up,
    grouped_operand,
    plan_entries,
    swiglu_scale,
    unswizzle_scales,
)
from dsv4.ops.grouped import group_choices_ref, group_nvfp4_ref, grouped_nvfp4_linear_ref, grouped_swiglu_nvfp4_ref
from dsv4.ops.nvfp4 import to_nvfp4_ref, unpack_nvfp4

from ...emulator.emulator import ON_GPU
from .. import compare, packed
from ..weights import any_weight
from .emulate import emulated, emulated_kernel
from .ptx import TensorMap

if ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 10:
    pytestmark = pytest.mark.skip(reason="this GPU has no NVFP4 tensor cores")

ROWS, SWIGLU = ([t for t in TILES if t.kind == kind] for kind in ("nvfp4_grouped", "nvfp4_swiglu"))
LIMIT = 10.0
NAN = 0x7F  # of e4m3
SHAPES = [(384, 7168, 3072), (256, 4096, 2048)]  # experts, K, I of Pro and Flash


def ids(tile):
    return tile.name.removeprefix("gemm_nvfp4_")


def weights_of(rng, E, rows, K, size=3.0):
    """An expert's weight of any codes and scales, with a scale of its own: products of about `size` with normal tokens."""
    found = [any_weight(rng, "nvfp4", rows, K) for _ in range(E)]
    for w in found:
        w.global_scale *= size / (w.dequantize().norm(dim=-1).mean().item() + 1e-30) * 2 ** (torch.rand((), generator=rng).item() * 2 - 1)
    return found


def spread(rng, counts, k=1):
    """chosen [S, k]: each expert as often as `counts` says, anywhere."""
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    return slots[torch.randperm(len(slots), generator=rng)].view(-1, k)


def tokens(rng, chosen, experts, K):
    """(groups, tokens in NVFP4 as their rows), NaN where the scales have no rows."""
    groups = group_choices_ref(chosen, experts)
    x = group_nvfp4_ref(to_nvfp4_ref(torch.randn(len(chosen), K, generator=rng)), groups)
    wide = x.scales.numel() // len(groups.tiles)
    x.scales[groups.counts[0] * wide :] = NAN
    return groups, x


def exact_products(x, groups, weights):
    """For each expert with rows: (rows, exact products, sums of their terms' sizes), in float64."""
    offsets = groups.offsets.tolist()
    for e, (first, last) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if first < last:
            values, w = unpack_nvfp4(x.of(groups, e)).double(), weights[e].dequantize().double()
            yield e, slice(first, last), values @ w.T, values.abs() @ w.abs().T


def check_rows(rng, chosen, E, K, n, tile=None, seed=0):
    groups, x = tokens(rng, chosen, E, K)
    weights = weights_of(rng, E, n, K)
    with emulated(seed):
        got = grouped_nvfp4_linear(x, groups, grouped_operand(weights), tile)
    want = grouped_nvfp4_linear_ref(x, groups, grouped_operand(weights))
    for _, rows, exact, sizes in exact_products(x, groups, weights):  # roundings: as in test_gemm_nvfp4.py
        compare.assert_as_good(got[rows], want[rows], exact, roundings=K // 16 + 4, scale=sizes)
    return got


def swiglu_interval(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up) for gates and ups (low, high) that may be two neighbours in bf16, and fp32's errors: exp's, the
    sum's, the quotient's and the product's, and as many of a GPU's exp."""
    ends = []
    for g in gate:
        g = g.clamp(max=limit)
        ends += [g * torch.sigmoid(g) * u.clamp(-limit, limit) for u in up]
    low, high = torch.stack(ends).amin(0), torch.stack(ends).amax(0)
    return low - 8 * packed.ROUNDING * low.abs(), high + 8 * packed.ROUNDING * high.abs()


def check_swiglu(rng, chosen, E, K, inner, tile=None, seed=0, limit=LIMIT, size=3.0):
    groups, x = tokens(rng, chosen, E, K)
    w1, w3 = weights_of(rng, E, inner, K, size), weights_of(rng, E, inner, K, size)
    weights = torch.rand(chosen.shape, generator=rng)
    operand = grouped_gate_up(w1, w3)
    with emulated(seed):
        got = grouped_swiglu_nvfp4(x, groups, operand, weights, limit, tile)
    want = grouped_swiglu_nvfp4_ref(x, groups, operand, weights, limit)
    assert torch.equal(got.row_scales, want.row_scales)
    assert torch.equal(got.row_scales, swiglu_scale(limit) * weights.flatten()[groups.order.long()])
    noise = (K // 16 + 4) * packed.ROUNDING
    halves, intervals, scales = [list(exact_products(x, groups, half)) for half in (w1, w3)], [], []
    for (e, rows, *gate), (_, _, *up) in zip(*halves, strict=True):
        ends = [packed.bf16(packed.around(exact, noise * sizes)) for exact, sizes in (gate, up)]
        intervals.append(swiglu_interval(*ends, limit))
        mine = got.of(groups, e)
        scales.append(mine.plain_scales())
        high, count = -(-mine.scales.numel() // (-(-inner // 64) * 512)) * 128, rows.stop - rows.start
        fill = unswizzle_scales(mine.scales, high, -(-inner // 64) * 4)
        assert (fill[count:] == 0).all() and (fill[:, inner // 16 :] == 0).all()  # behind the rows and the columns
    plain = Nvfp4(got.values, torch.cat(scales), got.row_scales, False)
    packed.assert_nvfp4_of(plain, [torch.cat(end) for end in zip(*intervals, strict=True)], swiglu_scale(limit))
    differ = (got.values != want.values).float().mean(), (got.scales != want.scales)[: used(groups, got)].float().mean()
    assert max(differ) < 0.02, differ  # the definition's own fp32 is uncertain in the same few places
    if not ON_GPU:
        assert (got.scales[used(groups, got) :] == 0xFF).all()  # untouched
    return got


def used(groups, x: GroupedNvfp4):
    """Bytes of scales that are some expert's."""
    return int(groups.counts[0]) * x.scales.numel() // len(groups.tiles)


@pytest.fixture
def few_processors(monkeypatch):
    """A small grid, so that a block has several tiles, of several experts."""
    monkeypatch.setattr(wrappers, "processors", lambda device: 2)


RAGGED = [0, 1, 0, 0, 130, 260, 0]  # no rows, one, a whole tile and some, more than a pair's


@pytest.mark.parametrize("tile", ROWS, ids=ids)
def test_rows(objects, rng, few_processors, tile):
    """Ragged groups; then columns, and more stages than the ring has: a block goes round all its barriers."""
    check_rows(rng, spread(rng, RAGGED), len(RAGGED), tile.depth + 32, 72, tile)
    check_rows(rng, spread(rng, [3, 0, 140]), 3, tile.depth * (tile.stages - 1) + 32, tile.columns + 72, tile, seed=1)


@pytest.mark.parametrize("tile", SWIGLU, ids=ids)
def test_swiglu(objects, rng, few_processors, tile):
    check_swiglu(rng, spread(rng, RAGGED), len(RAGGED), tile.depth + 32, 32, tile)
    check_swiglu(rng, spread(rng, [3, 0, 140]), 3, tile.depth * (tile.stages - 1) + 32, tile.columns // 2 + 32, tile, seed=1)


# One token; one expert; all to one of several; a token's choices alike; more experts than rows.
@pytest.mark.parametrize("chosen,experts", [
    ([[0]], 1), ([[2, 0, 5]], 7), ([[1, 1], [1, 1], [1, 1]], 3), ([[3]] * 129, 4), ([[0, 6], [6, 0]], 300),
])
def test_few(objects, rng, chosen, experts):
    """By the tile that is chosen."""
    chosen = torch.tensor(chosen, dtype=torch.int32)
    check_rows(rng, chosen, experts, 64, 24)
    check_swiglu(rng, chosen, experts, 64, 32)


@pytest.mark.parametrize("limit,size", [(0.5, 3.0), (7.0, 10.0), (10.0, 300.0)])
def test_the_clamp(objects, rng, limit, size):
    """Some values beyond the limit; most. The largest value of all is the limit's."""
    chosen = spread(rng, [20, 9])
    got = check_swiglu(rng, chosen, 2, 96, 64, limit=limit, size=size)
    bound = limit**2 * torch.sigmoid(torch.tensor(limit)).item()
    assert max(unpack_nvfp4(got.of(group_choices_ref(chosen, 2), e)._replace(row_scales=torch.full((n,), swiglu_scale(limit)))).abs().max()
               for e, n in enumerate((20, 9))) == pytest.approx(bound, rel=0.04)  # e4m3's rounding of the scale


def bits(x: GroupedNvfp4, groups):
    return x.values, x.scales[: used(groups, x)], x.row_scales


@pytest.mark.parametrize("columns,cluster", [(128, 1), (256, 2)])
def test_order_does_not_matter(objects, seed, few_processors, columns, cluster):
    """The same bits whoever comes first (on a GPU: twice)."""
    def run(order):
        rng = torch.Generator().manual_seed(seed)
        chosen = spread(rng, [150, 0, 20])
        groups, tile = group_choices_ref(chosen, 3), Tile("nvfp4_swiglu", 128, columns, cluster)
        got = check_swiglu(rng, chosen, 3, 288, 96, tile, seed=order)
        return *bits(got, groups), check_rows(rng, chosen, 3, 288, 136, Tile("nvfp4_grouped", 128, columns, cluster), seed=order)
    first, second = run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def exact_case(rng, E, K, inner, chosen):
    """Codes of whole numbers and scales of 1, powers of two elsewhere, so that sums have no rounding; gates of w1 are such that silu's last
    bit is sure: 0, or beyond the limit. -> (groups, x, w1 and w3, w2, weights)"""
    groups, x = tokens(rng, chosen, E, K)
    x.scales[: used(groups, x)] = torch.where(x.scales[: used(groups, x)] > 0, 0x38, 0).to(torch.uint8)
    x = x._replace(values=x.values & 0x77, row_scales=torch.exp2(torch.randint(-3, 4, (len(x.values),), generator=rng).float()))

    def whole(rows, columns):
        found = [any_weight(rng, "nvfp4", rows, columns) for _ in range(E)]
        for w in found:
            w.scale = torch.ones_like(w.scale.float()).to(torch.float8_e4m3fn)
            w.global_scale = 2.0 ** int(torch.randint(-6, -2, (), generator=rng))
        return found
    w1, w3, w2 = whole(inner, K), whole(inner, K), whole(72, K)
    for w in w1:  # rows of zeros, or of what is positive
        keep = torch.randint(0, 2, (inner, 1), generator=rng, dtype=torch.uint8)
        w.payload = (w.payload & 0x77 | 0x44) * keep
        w.global_scale = 16.0
    return groups, x, grouped_gate_up(w1, w3), grouped_operand(w2), torch.randn(chosen.shape, generator=rng)


def test_bit_for_bit_where_sums_and_silu_are_sure(objects, rng):
    chosen = spread(rng, [9, 0, 131, 3])
    groups, x, gate_up, down, weights = exact_case(rng, 4, 288, 96, chosen)
    want = grouped_swiglu_nvfp4_ref(x, groups, gate_up, weights, LIMIT)
    assert (want.values[:, :8] != 0).any() and (want.scales[: used(groups, want)] == 0x7E).any()
    for tile in SWIGLU:
        with emulated():
            got = grouped_swiglu_nvfp4(x, groups, gate_up, weights, LIMIT, tile)
        assert all(torch.equal(a, b) for a, b in zip(bits(got, groups), bits(want, groups), strict=True)), tile.name
    want = grouped_nvfp4_linear_ref(x, groups, down)
    for tile in ROWS:
        with emulated():
            assert torch.equal(grouped_nvfp4_linear(x, groups, down, tile), want), tile.name


def test_a_real_depth(objects, rng):
    """Pro's K, 28 stages; one entry of a pair, whose lower block has no rows. Sums of at most 36 * 7,168 quarters are exact in fp32."""
    chosen = spread(rng, [0, 5])
    groups, x, gate_up, down, weights = exact_case(rng, 2, 7168, 64, chosen)
    with emulated():
        got = grouped_swiglu_nvfp4(x, groups, gate_up, weights, LIMIT, Tile("nvfp4_swiglu", 128, 256, cluster=2))
        out = grouped_nvfp4_linear(x, groups, down, Tile("nvfp4_grouped", 128, 256, cluster=2))
    want = grouped_swiglu_nvfp4_ref(x, groups, gate_up, weights, LIMIT)
    assert all(torch.equal(a, b) for a, b in zip(bits(got, groups), bits(want, groups), strict=True))
    assert torch.equal(out, grouped_nvfp4_linear_ref(x, groups, down))


def test_every_tile_gives_the_same_bits(objects, rng):
    chosen = spread(rng, [140, 0, 7])
    (groups, x), operand = tokens(rng, chosen, 3, 352), grouped_gate_up(*(weights_of(rng, 3, 96, 352) for _ in range(2)))
    weights, found = torch.rand(chosen.shape, generator=rng), []
    for tile in SWIGLU:
        with emulated():
            found.append(bits(grouped_swiglu_nvfp4(x, groups, operand, weights, LIMIT, tile), groups))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("tile", [Tile("nvfp4_swiglu", 128, 128), Tile("nvfp4_swiglu", 128, 128, cluster=2)], ids=ids)
def test_a_token_s_result_does_not_depend_on_its_neighbours(objects, rng, tile):
    """A NaN and an infinity spoil their token's rows, as defined, and no other one's, in their expert or in the next."""
    chosen = spread(rng, [70, 40, 0, 80], k=2)
    groups = group_choices_ref(chosen, 4)
    v, operand = torch.randn(len(chosen), 96, generator=rng), grouped_gate_up(*(weights_of(rng, 4, 64, 96) for _ in range(2)))
    down, weights = grouped_operand(weights_of(rng, 4, 40, 64)), torch.rand(chosen.shape, generator=rng)

    def run(v):
        with emulated():
            hidden = grouped_swiglu_nvfp4(group_nvfp4_ref(to_nvfp4_ref(v), groups), groups, operand, weights, LIMIT, tile)
            return hidden, grouped_nvfp4_linear(hidden, groups, down, Tile("nvfp4_grouped", 128, 128, tile.cluster))
    clean, clean_out = run(v)
    v[5, 3], v[6, 70] = float("nan"), float("inf")
    hidden, out = run(v)
    spoilt = groups.rows[5:7].flatten().long()
    others = torch.ones(len(out), dtype=torch.bool)
    others[spoilt] = False
    want = grouped_swiglu_nvfp4_ref(group_nvfp4_ref(to_nvfp4_ref(v), groups), groups, operand, weights, LIMIT)
    assert out[spoilt].isnan().all() and torch.equal(out[others], clean_out[others])
    assert torch.equal(hidden.values[others], clean.values[others]) and torch.equal(hidden.values[spoilt], want.values[spoilt])
    for e in (0, 1, 3):
        first, last = groups.offsets[e : e + 2].tolist()
        mine, before, defined = (x.of(groups, e).plain_scales() for x in (hidden, clean, want))
        assert torch.equal(mine[others[first:last]], before[others[first:last]])
        assert torch.equal(mine[~others[first:last]], defined[~others[first:last]])


@pytest.mark.skipif(ON_GPU, reason="of what the CPU captures")
@pytest.mark.parametrize("tile", [*ROWS, *SWIGLU], ids=ids)
@pytest.mark.parametrize("rows", [6, 24576])
def test_launches_at_the_model_s_shapes(dsl, tile, rows):
    """Every copy's tensor, box and swizzle, and the grid, as the host function makes them; the addresses and numbers as they are given."""
    kernel, at = emulated_kernel(tile), [(i + 1) << 40 for i in range(13)]
    for experts, hidden, inner in SHAPES:
        k, n = (hidden, 2 * inner) if tile.kind == "nvfp4_swiglu" else (inner, hidden)
        scale_tiles = plan_entries(rows, experts, 128)
        entries = plan_entries(rows, experts, 128 * tile.cluster)
        launch = kernel.launch([*at, rows, n, k, experts, entries, scale_tiles, 148, 10.0, 0.5])
        steps, width = k // 64, k // 2
        assert [TensorMap.decode(p) for p in launch.parameters if len(p) == 128] == [
            TensorMap(at[0], 1, (width, rows), (1, width), (128, 128), True),
            TensorMap(at[1], 1, (width, n, experts), (1, width, width * n), (128, tile.columns // tile.cluster, 1), True),
            TensorMap(at[2], 4, (128, steps, scale_tiles), (4, 512, 512 * steps), (128, 4, 1), False),
            TensorMap(at[3], 4, (128, steps, n // 128, experts), (4, 512, 512 * steps, 4 * n * steps),
                      (128, 4, tile.columns // 128, 1), False)]
        given = [int.from_bytes(p[:8], "little") for p in launch.parameters if len(p) in (8, 16)]
        assert [a for a in given if a in at] == at[4:]
        tiles = entries * tile.cluster * (n // tile.columns)
        assert (launch.grid, launch.block, launch.cluster) == ((min(tiles, 148), 1, 1), (192, 1, 1), tile.cluster)


def test_nothing_to_do(rng):
    groups, _ = tokens(rng, spread(rng, [2]), 1, 64)
    none = group_choices_ref(torch.empty(0, 2, dtype=torch.int32), 3)
    x = group_nvfp4_ref(to_nvfp4_ref(torch.empty(0, 64)), none)
    assert grouped_nvfp4_linear(x, none, grouped_operand(weights_of(rng, 3, 16, 64))).shape == (0, 16)
    operand = grouped_gate_up(weights_of(rng, 3, 32, 64), weights_of(rng, 3, 32, 64))
    assert grouped_swiglu_nvfp4(x, none, operand, torch.empty(0, 2), LIMIT).values.shape == (0, 16)


@pytest.mark.parametrize("change", [
    lambda x, g, w: (x._replace(scales=x.scales[:-1]), g, w), lambda x, g, w: (x, g, w._replace(scales=w.scales[:, :-1])),
    lambda x, g, w: (x, g, w._replace(scale=w.scale.double())), lambda x, g, w: (x, g, w._replace(values=w.values[:, :28])),
    lambda x, g, w: (x, g, w._replace(scale=w.scale[:1])), lambda x, g, w: (x._replace(values=x.values[:1]), g, w),
    lambda x, g, w: (x, g._replace(offsets=g.offsets[:-1]), w), lambda x, g, w: (x._replace(values=x.values[:, :24]), g, w),
])
def test_refusals(rng, change):
    groups, x = tokens(rng, spread(rng, [2, 1]), 2, 64)
    gate_up, down = (grouped_gate_up(weights_of(rng, 2, 32, 64), weights_of(rng, 2, 32, 64)), grouped_operand(weights_of(rng, 2, 32, 64)))
    weights = torch.ones(3, 1)
    with pytest.raises(UserError, match=r"^grouped_nvfp4_linear: expected x \[N, K\] of these groups.*with a scale an expert, found"):
        grouped_nvfp4_linear(*change(x, groups, down))
    expected = r"^grouped_swiglu_nvfp4: expected x \[N, K\] of these groups.*two scales an expert, weights \[S, k\].*, found"
    with pytest.raises(UserError, match=expected):
        grouped_swiglu_nvfp4(*change(x, groups, gate_up), weights, LIMIT)
    for bad, limit in ((weights.T, LIMIT), (weights.double(), LIMIT), (weights, 0.0), (weights, 1e6), (weights, float("nan"))):
        with pytest.raises(UserError, match=expected):
            grouped_swiglu_nvfp4(x, groups, gate_up, bad, limit)
    with pytest.raises(UserError, match="expected tensors on a GPU, found cpu"):
        grouped_nvfp4_linear(x, groups, down)


def check_on(device, rows, E, K, inner, tiles):
    """Both products, operands made on the CPU and everything else on `device`, which for the references is its definition."""
    rng = torch.Generator().manual_seed(rows)
    chosen = torch.randint(0, E, (rows, 2), generator=rng, dtype=torch.int32)
    chosen[:, 0].clamp_(max=E // 2)
    groups, x = tokens(rng, chosen, E, K)
    gate_up, down = grouped_gate_up(*(weights_of(rng, E, inner, K) for _ in range(2))), grouped_operand(weights_of(rng, E, K, inner))
    weights = torch.rand(chosen.shape, generator=rng)
    groups, x, gate_up, down = (type(t)(*(v.to(device) for v in t)) for t in (groups, x, gate_up, down))
    want = grouped_swiglu_nvfp4_ref(x, groups, gate_up, weights.to(device), LIMIT)
    want_rows = grouped_nvfp4_linear_ref(want, groups, down)
    for columns, cluster in tiles:
        got = grouped_swiglu_nvfp4(x, groups, gate_up, weights.to(device), LIMIT, Tile("nvfp4_swiglu", 128, columns, cluster))
        differ = [(a != b).float().mean() for a, b in zip(bits(got, groups), bits(want, groups), strict=True)]
        # Bits differ where a sum's last bits decide a rounding to bf16, exp's a code: some in a thousand.
        assert max(differ) < 0.02 and differ[2] == 0, (columns, cluster, differ)
        out = grouped_nvfp4_linear(want, groups, down, Tile("nvfp4_grouped", 128, columns, cluster)).double()
        assert (out - want_rows.double()).norm() < 0.001 * want_rows.double().norm()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: set DSV4_TEST_GPU=1")
@pytest.mark.parametrize("rows,K,inner", [(1, 7168, 3072), (333, 7168, 3072), (2048, 4096, 2048)])
def test_at_the_model_s_shapes(rows, K, inner):
    check_on("cuda", rows, 6, K, inner, [(columns, cluster) for columns in (128, 256) for cluster in (1, 2)])


@pytest.mark.skipif(ON_GPU, reason="the same without one")
def test_the_check_of_the_model_s_shapes(dsl):
    with emulated():
        check_on("cpu", 70, 3, 512, 128, [(128, 1), (256, 2)])


def test_the_interleaving_is_the_quantiser_s(rng):
    """What the epilogue takes for gates and ups are w1's and w3's products."""
    groups, x = tokens(rng, spread(rng, [4]), 1, 64)
    w1, w3 = weights_of(rng, 1, 32, 64), weights_of(rng, 1, 32, 64)
    both = grouped_gate_up(w1, w3)
    gate, up = (grouped_nvfp4_linear_ref(x, groups, grouped_operand(w)) for w in (w1, w3))
    one = grouped_nvfp4_linear_ref(x, groups, both._replace(scale=torch.ones(1)))
    parts = one.unflatten(1, (-1, 2, 16))
    for i, half in enumerate((gate, up)):
        torch.testing.assert_close(parts[:, :, i].flatten(1).double() * both.scale[0, i].double(), half.double(), rtol=2**-7, atol=0)
