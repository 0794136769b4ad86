"""Products of many tokens with the weights that decode packs (packed_gemm, wgmma) on the CPU emulator, against their definitions."""

import pytest
import torch

from dsv4.errors import UserError
from dsv4.formats import Weight
from dsv4.kernels import build, experts, linear, prompts
from dsv4.kernels.prompts import Cut
from dsv4.ops.experts import Expert
from dsv4.ops.linear import matmul_fp32

from ..emulator.emulator import ON_GPU, emulated, needs_gxx
from . import compare
from .test_moe import LIMIT, assert_as_good, choice, layer, quantized
from .weights import any_weight

pytestmark = needs_gxx
if ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
    pytestmark = pytest.mark.skip(reason="this GPU has no wgmma")

KINDS = ("plain", "fp8", "nvfp4", "mxfp4")
GEMMS = [kernel.name for kernel in prompts._GEMMS.values()]


def tokens(rng, *shape):
    """Of different sizes."""
    size = torch.exp2(torch.randint(-4, 5, (shape[0], *[1] * (len(shape) - 1)), generator=rng))
    return (torch.randn(*shape, generator=rng) * size).bfloat16()


def arranged(x, packed, source=None):
    return prompts.arrange(x, prompts.takes_short_order(int(packed.table[0, 1])), source)


def product(x, *weights, tile=None, **how):
    packed = linear.pack_weights(weights)
    with emulated(**how):
        return prompts.linear(arranged(x, packed), packed, tile)


def check(got, x, weight):
    """4 roundings of the absolute terms: tensor cores cut off, and do not round, what they add."""
    w = weight.dequantize().double()
    low = matmul_fp32(x, weight).to(got.dtype)
    compare.assert_as_good(got, low, x.double() @ w.T, roundings=4, scale=x.double().abs() @ w.abs().T)


# One token; every width of the product and its edges; tiles of several widths; ragged rows, with warpgroups that have none, and more than a
# block's; K below a chunk, of ragged chunks, stages and items, of several items, so that the rings go round, tile after tile.
SHAPES = [(1, 8, 64, 32), (33, 136, 192, 32), (64, 16, 544, 64), (97, 264, 320, 128), (129, 128, 512, 96), (130, 40, 1024, 128),
          (190, 24, 96, 128), (257, 272, 160, 128), (440, 128, 2080, 128), (300, 136, 1184, 80), (150, 264, 2624, 64), (104, 24, 3136, 32),
          (44, 536, 640, 16), (47, 8, 576, 48)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("M,rows,columns,most", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_definition(rng, kind, M, rows, columns, most, reverse):
    weight, x = any_weight(rng, kind, rows, columns), tokens(rng, M, columns)
    (got,) = product(x, weight, tile=Cut(most, 1), reverse=reverse)
    assert got.shape == (M, rows) and got.dtype == torch.bfloat16
    check(got, x, weight)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_token_has_the_same_result_in_any_tile(rng, parts):
    """Bit for bit: alone, among others, in any width; the columns divided among parts too."""
    weight, x = any_weight(rng, "nvfp4", 130 + 6, 1088), tokens(rng, 200, 1088)
    first, *others = (product(x, weight, tile=tile)[0] for tile in prompts.CUTS if tile.parts == parts)
    assert all(torch.equal(r, first) for r in others)
    assert torch.equal(product(x[77:78], weight, tile=Cut(32, parts))[0], first[77:78])


@pytest.mark.parametrize("kind", KINDS)
def test_more_blocks_than_tiles_and_tiles_than_blocks(rng, monkeypatch, kind):
    """300 tokens and 304 rows in tiles of 32 tokens: 20 of them, on 1 to 40 blocks; bands of 8 tiles down. The same bits, then, in tiles of
    two widths in turn."""
    weight, x = any_weight(rng, kind, 304, 192), tokens(rng, 300, 192)
    results = []
    for blocks in (1, 2, 7, 40):
        monkeypatch.setattr(prompts, "blocks_of", lambda _, blocks=blocks: blocks)
        results += product(x, weight, tile=Cut(32, 1)) + product(x[:110], weight, tile=Cut(96, 1))
    check(results[0], x, weight)
    for whole, part in zip(results[::2], results[1::2], strict=True):
        assert torch.equal(whole, results[0]) and torch.equal(part, results[0][:110])


# Columns that fill no stage, of which the last parts have none; packed tiles that fill no block; shares without tokens.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("parts,M,rows,columns,most,blocks",
                         [(2, 70, 136, 1024, 32, 4), (2, 129, 40, 1600, 64, 2), (2, 33, 264, 2560, 96, 3), (2, 300, 24, 1856, 128, 2),
                          (2, 9, 8, 576, 128, 6), (2, 65, 144, 64, 64, 3), (4, 70, 136, 1600, 32, 4), (4, 250, 528, 1024, 64, 8),
                          (4, 72, 72, 1152, 64, 5), (4, 150, 136, 2112, 64, 4), (4, 13, 8, 1024, 32, 12), (4, 40, 24, 96, 64, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_columns(rng, monkeypatch, kind, parts, M, rows, columns, most, blocks, reverse):
    monkeypatch.setattr(prompts, "blocks_of", lambda _: blocks)
    weight, x = any_weight(rng, kind, rows, columns), tokens(rng, M, columns)
    (got,) = product(x, weight, tile=Cut(most, parts), reverse=reverse)
    check(got, x, weight)


@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4"])  # whose sums are not multiplied by a factor
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_are_added_in_their_order(rng, monkeypatch, parts, kind):
    """The same bits from any number of blocks; and those of the parts' own products, one after the other."""
    weight, x = any_weight(rng, kind, 144, 1280), tokens(rng, 100, 1280)
    packed, results = linear.pack_weights((weight,)), []
    for blocks in (1, 2, 8, 40):
        monkeypatch.setattr(prompts, "blocks_of", lambda _, blocks=blocks: blocks)
        with emulated():
            results += prompts.projections(x, packed, Cut(32, parts))
    assert all(torch.equal(r, results[0]) for r in results[1:])
    total = None
    for part in range(parts):  # alone: the other columns of x are zero, which adds nothing
        alone = torch.where(torch.arange(1280) // (128 if kind == "mxfp4" and parts == 2 else 64) % parts == part, x, 0.0)
        with emulated():
            (sums,) = prompts.projections(alone, packed, Cut(64, 1))
        total = sums if total is None else total + sums
    assert torch.equal(results[0], total)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("kind", ["nvfp4", "plain"])
def test_parts_of_every_result(rng, monkeypatch, kind, parts):
    """fp32 rows of any number of columns, groups, and SwiGLU (the shared expert's; the columns of routed ones no parts share)."""
    monkeypatch.setattr(prompts, "parts_of", lambda rows, columns, parts=parts: parts)
    weight, x = any_weight(rng, kind, 19, 1024), tokens(rng, 70, 1024)
    with emulated():
        (got,) = prompts.projections(x, linear.pack_weights((weight,)))
    compare.assert_as_good(got, matmul_fp32(x, weight), x.double() @ weight.dequantize().double().T, roundings=4,
                           scale=x.double().abs() @ weight.dequantize().double().abs().T)
    weight, x = any_weight(rng, kind, 2 * 144, 800, block=(16, 16)), tokens(rng, 70, 2, 800)
    packed = linear.pack_weights((weight,))
    with emulated():
        got = prompts.grouped_linear(arranged(x, packed), packed)
    w, terms = weight.dequantize().view(2, 144, 800), "mgk,grk->mgr"
    compare.assert_as_good(got, torch.einsum(terms, x.float(), w).bfloat16(), torch.einsum(terms, x.double(), w.double()), roundings=4,
                           scale=torch.einsum(terms, x.double().abs(), w.double().abs()))
    x, (chosen, weights) = torch.randn(45, 1024, generator=rng).bfloat16(), choice(rng, 45, 2, 4)
    parts = layer(rng, 1024, 800, 4, kind, kind)
    assert_as_good(moe(x, experts.pack_experts(*parts), chosen, weights), x, *parts, chosen, weights)


# us on an H200 by (tokens of a tile, parts), of those that took up to 1.6 times as long as the fastest: helpers/bench_prompts.py --sweep,
# 2026-12-01 (docs/measurements.md).
MEASURED = {
    "pro wq_a, 1024": (1024, 7168, 1536, {(48, 1): 42.7, (64, 1): 46.4, (80, 1): 51.6, (96, 1): 56.5, (64, 2): 54.7, (96, 2): 35.4,
        (128, 2): 42.1, (64, 4): 53.7}),
    "pro wkv, 1024": (1024, 7168, 512, {(32, 2): 23.7, (64, 2): 27.2, (32, 4): 29.7, (64, 4): 19.5}),
    "pro wo_b, 1024": (1024, 16384, 7168, {(48, 1): 499.5, (64, 1): 448.2, (80, 1): 374.7, (96, 1): 414.8, (128, 1): 347.4,
        (64, 2): 450.8, (96, 2): 401.4, (128, 2): 388.8}),
    "pro wo_b, 4096": (4096, 16384, 7168, {(48, 1): 1936.2, (64, 1): 1598.5, (80, 1): 1492.8, (96, 1): 1374.9, (128, 1): 1215.8,
        (64, 2): 1804.1, (96, 2): 1519.0, (128, 2): 1379.4}),
    "pro shared w1 w3, 1024": (1024, 7168, 6144, {(48, 1): 176.8, (64, 1): 148.3, (80, 1): 168.1, (96, 1): 122.9, (128, 1): 156.6,
        (64, 2): 174.9, (96, 2): 144.6, (128, 2): 132.3}),
    "pro shared w1 w3, 4096": (4096, 7168, 6144, {(48, 1): 725.0, (64, 1): 606.3, (80, 1): 566.2, (96, 1): 497.6, (128, 1): 472.7,
        (64, 2): 710.2, (96, 2): 587.4, (128, 2): 539.9}),
    "flash wq_a, 1024": (1024, 4096, 1024, {(32, 1): 22.7, (48, 1): 24.9, (64, 1): 27.1, (32, 2): 27.2, (64, 2): 18.3, (96, 2): 21.0,
        (128, 2): 24.9, (64, 4): 22.9}),
    "flash wkv, 1024": (1024, 4096, 512, {(16, 1): 20.2, (32, 2): 15.0, (64, 2): 16.9, (96, 2): 20.4, (32, 4): 18.4, (64, 4): 12.9}),
    "flash wo_b, 1024": (1024, 8192, 4096, {(64, 1): 112.4, (80, 1): 124.9, (96, 1): 138.8, (128, 1): 90.3, (64, 2): 131.4,
        (96, 2): 121.8, (128, 2): 99.7}),
    "flash shared w1 w3, 1024": (1024, 4096, 4096, {(48, 1): 75.1, (64, 1): 57.7, (80, 1): 63.6, (96, 1): 70.6, (128, 1): 47.8,
        (64, 2): 68.3, (96, 2): 62.7, (128, 2): 53.2}),
    "flash shared w2, 1024": (1024, 2048, 4096, {(48, 1): 39.6, (64, 1): 31.3, (80, 1): 34.4, (96, 1): 38.1, (128, 1): 27.2,
        (64, 2): 37.8, (96, 2): 34.5, (128, 2): 30.1}),
}
# The same of experts' w1 with w3, whose tokens differ in number, by tokens of a tile.
MEASURED_EXPERTS = {
    "flash, 24": (6 * 1024, 4096, 4096, 256, {32: 735, 48: 729, 64: 728}),
    "flash, 96": (6 * 4096, 4096, 4096, 256, {96: 1906, 128: 1371}),
    "pro, 16": (6 * 1024, 7168, 6144, 384, {32: 2782, 48: 2774, 64: 2846}),
    "pro, 64": (6 * 4096, 7168, 6144, 384, {64: 6104, 96: 4413, 128: 4619}),
}


@pytest.mark.parametrize("name", MEASURED)
def test_times_of_dense_products(name):
    """As predicted within a sixth, with 2 us for launch and start: the GPU's clock, taken as 1.7 GHz, was 1.5 to 1.98 in such runs. The
    chosen tile is the fastest that was measured."""
    tokens, K, N, times = MEASURED[name]
    predicted = {cut: prompts._busiest(tokens, N, K, None, 132, Cut(*cut)) / 1700 + 2 for cut in times}
    assert all(predicted[cut] == pytest.approx(us, rel=1 / 6) for cut, us in times.items())
    assert times[prompts.cut(tokens, N, K, None, 132)] == min(times.values())


@pytest.mark.parametrize("name", MEASURED_EXPERTS)
def test_the_chosen_tile_of_experts_is_among_the_fastest(name):
    """Within 2 %: widths beyond the tokens of most experts differ by noise."""
    tokens, K, N, experts, times = MEASURED_EXPERTS[name]
    assert times[prompts.cut(tokens, N, K, experts, 132).most] <= 1.02 * min(times.values())


def test_how_many_parts():
    """By the weight alone, up to a step's 1,024 tokens; few rows have more of them, few columns fewer."""
    assert [prompts.parts_of(rows, 7168) for rows in (64, 512, 1024, 1536, 2048, 3072, 131072)] == [4, 4, 2, 2, 2, 1, 1]
    assert [prompts.parts_of(512, columns) for columns in (64, 127, 128, 512, 1024, 16384)] == [1, 1, 2, 2, 4, 4]
    assert {prompts.cut(tokens, 1024, 7168, None, 132).parts for tokens in (9, 100, 1024)} == {2}
    assert prompts.cut(1025, 1024, 7168, None, 132).parts == 1
    assert prompts.cut(1024, 512, 7168, 1, 132).parts == 1  # experts, however few


def test_several_weights_of_one_input(rng):
    weights, x = [any_weight(rng, kind, rows, 608) for kind, rows in (("nvfp4", 72), ("fp8", 136), ("mxfp4", 8))], tokens(rng, 50, 608)
    for got, weight in zip(product(x, *weights), weights, strict=True):
        check(got, x, weight)


@pytest.mark.parametrize("kind,columns", [("fp8", 16384), ("nvfp4", 7168), ("plain", 4096)])
def test_widths_of_the_model(rng, kind, columns):
    weight, x = any_weight(rng, kind, 128, columns), tokens(rng, 3, columns)
    check(product(x, weight)[0], x, weight)


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_groups(rng, kind):
    """wo_a's: group g of x meets rows g * R .. of the weight; K fills no item."""
    G, R, K, M = 3, 144, 96, 70
    weight, x = any_weight(rng, kind, G * R, K, block=(8, 128)), tokens(rng, M, G, K)
    packed = linear.pack_weights((weight,))
    with emulated():
        got = prompts.grouped_linear(arranged(x, packed), packed)
    w, terms = weight.dequantize().view(G, R, K), "mgk,grk->mgr"
    low = torch.einsum(terms, x.float(), w).bfloat16()
    exact = torch.einsum(terms, x.double(), w.double())
    compare.assert_as_good(got, low, exact, roundings=4, scale=torch.einsum(terms, x.double().abs(), w.double().abs()))


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_stay_apart(rng, kind, parts):
    """Not a number in one group of a token, where K ends within an item: the other groups do not see it."""
    G, K = 3, 96
    weight, x = any_weight(rng, kind, G * 16, K, block=(8, 128)), tokens(rng, 5, G, K)
    x[2, 1, 3], x[4, 2, 5] = float("nan"), float("inf")
    packed = linear.pack_weights((weight,))
    with emulated():
        got = prompts.grouped_linear(arranged(x, packed), packed, Cut(32, parts))
    assert [(m, g) for m in range(5) for g in range(G) if not got[m, g].isfinite().all()] == [(2, 1), (4, 2)]


def test_extremes(rng):
    """Not a number and infinity stay with their token; the largest scales and codes; no token."""
    weight, x = any_weight(rng, "nvfp4", 128, 512), tokens(rng, 40, 512)
    weight.scale.view(torch.uint8)[:, :] = 0x7E  # 448
    x[3, 100], x[17, 0] = float("nan"), float("inf")
    (got,) = product(x, weight)
    fine = [i for i in range(40) if i not in (3, 17)]
    assert got[3].isnan().all() and not got[17].isfinite().any()
    check(got[fine], x[fine], weight)
    assert product(x[:0], weight)[0].shape == (0, 128)


@pytest.mark.parametrize("short_order", [False, True])
@pytest.mark.parametrize("K", [2, 64, 150])
def test_arranged_columns(rng, short_order, K):
    """Element by element, by the definition in arrange.cuh."""
    x, source = torch.randn(5, K, generator=rng).bfloat16(), torch.tensor([4, 0, 0, 3], dtype=torch.int32)
    with emulated():
        got = prompts.arrange(x, short_order, source)
    assert got.columns == K and got.short_order == short_order and got.values.shape == (4, -(-K // 64) * 64)
    padded = torch.nn.functional.pad(x, (0, -K % 64))
    for chunk in range(0, padded.shape[1], 64):
        for place in range(64):
            i, h, q, e = place // 16, place // 8 % 2, place // 2 % 4, place % 2
            column = 32 * (i // 2) + 8 * q + 4 * (i % 2) + 2 * h + e if short_order else 16 * q + 4 * i + 2 * h + e
            assert torch.equal(got.values[:, chunk + place], padded[source.long(), chunk + column])


def test_routing(rng):
    chosen, weights = choice(rng, 50, 3, 7)
    chosen[chosen == 2] = 6  # an expert without tokens, and tokens with one expert twice
    with emulated():
        groups, source, of_row = prompts.route(chosen, weights, 9)
    offsets = groups.offsets
    assert source.dtype == offsets.dtype == torch.int32 and offsets[0] == 0 and offsets[9] == 150
    for e in range(9):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        token, slot = torch.where(chosen == e)
        assert source[rows].tolist() == token.tolist() and torch.equal(of_row[rows], weights[token, slot])
    assert torch.equal(source[groups.rows.long()], torch.arange(50, dtype=torch.int32)[:, None].expand(50, 3))


def moe(x, packed, chosen, weights, limit=LIMIT, how=None):
    with emulated(**(how or {})):
        return prompts.moe(x, packed, chosen, weights, limit)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind,shared_kind", [("nvfp4", "fp8"), ("mxfp4", "plain"), ("fp8", "nvfp4"), ("plain", "mxfp4")])
def test_moe(rng, kind, shared_kind, reverse):
    """Experts with none and with different numbers of tokens; widths that fill no block, item or chunk."""
    D, inner, E, k, S = 192, 96, 6, 2, 45
    x, (chosen, weights) = torch.randn(S, D, generator=rng).bfloat16(), choice(rng, S, k, E)
    chosen[chosen == 3] = 5
    parts = layer(rng, D, inner, E, kind, shared_kind)
    got = moe(x, experts.pack_experts(*parts), chosen, weights, how={"reverse": reverse})
    assert_as_good(got, x, *parts, chosen, weights)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("most", [16, 32, 80])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_with_few_tokens(rng, kind, most, reverse):
    """1 to 70 tokens an expert, some with none, in tiles of all widths up to `most`; K of ragged chunks, stages and items; a block's tiles
    are of different experts and widths."""
    D, inner = 608, 352
    S, counts = 200, [1, 12, 31, 33, 0, 53, 70]
    chosen = torch.repeat_interleave(torch.arange(7, dtype=torch.int32), torch.tensor(counts))[torch.randperm(S, generator=rng)][:, None]
    x, weights = torch.randn(S, D, generator=rng).bfloat16(), torch.rand(S, 1, generator=rng) + 0.1
    parts = layer(rng, D, inner, 7, kind, kind)
    with emulated(reverse=reverse):
        got = prompts.moe(x, experts.pack_experts(*parts), chosen, weights, LIMIT, Cut(most, 1))
    assert_as_good(got, x, *parts, chosen, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_have_the_same_bits_in_any_tile(rng, monkeypatch, kind):
    """From any number of blocks; K of several items, so that all rings go round."""
    D, inner, S = 1120, 160, 70
    chosen, weights = choice(rng, S, 2, 3)
    x, packed = torch.randn(S, D, generator=rng).bfloat16(), experts.pack_experts(*layer(rng, D, inner, 3, kind, "fp8"))
    results = []
    for blocks, most in ((3, 128), (1, 80), (20, 32), (2, 16)):
        monkeypatch.setattr(prompts, "blocks_of", lambda _, blocks=blocks: blocks)
        with emulated():
            results.append(prompts.moe(x, packed, chosen, weights, LIMIT, Cut(most, 1)))
    assert all(torch.equal(r, results[0]) for r in results[1:])


def test_an_expert_of_many_tiles(rng):
    """300 tokens, of which all choose expert 1: two tiles of tokens there, and in w2 several of rows."""
    D, inner, S = 264, 136, 300
    x, parts = torch.randn(S, D, generator=rng).bfloat16(), layer(rng, D, inner, 4, "plain", "plain")
    chosen, weights = torch.tensor([[1, 3]] * S, dtype=torch.int32), torch.rand(S, 2, generator=rng) + 0.1
    chosen[::7, 1] = 0
    got = moe(x, experts.pack_experts(*parts), chosen, weights)
    assert_as_good(got, x, *parts, chosen, weights)


def test_decode_and_prompt_agree_on_one_copy(rng):
    """The same packed experts: the moe kernel of a step and this one are within the rounding of their output."""
    x, (chosen, weights) = torch.randn(6, 512, generator=rng).bfloat16(), choice(rng, 6, 2, 8)
    packed = experts.pack_experts(*layer(rng, 512, 256, 8, "nvfp4", "fp8"))
    with emulated():
        step = experts.moe(x, packed, chosen, weights, LIMIT).sum(0)
    got = moe(x, packed, chosen, weights)
    assert (got.double() - step.double()).norm() < 2 * 2**-9 * step.double().norm()


def test_clamps(rng):
    """At a limit that nearly all gates and ups pass, and one that none does."""
    D, inner = 64, 64
    x, parts = torch.randn(9, D, generator=rng).bfloat16() * 30, layer(rng, D, inner, 3, "nvfp4", "fp8")
    chosen, weights = choice(rng, 9, 1, 3)
    packed, results = experts.pack_experts(*parts), []
    for limit in (0.5, 1e4):
        results.append(moe(x, packed, chosen, weights, limit))
        assert_as_good(results[-1], x, *parts, chosen, weights, limit)
    assert not torch.equal(*results)


def test_what_is_refused(rng):
    packed, plain = (linear.pack_weights((any_weight(rng, kind, 32, 64),)) for kind in ("nvfp4", "plain"))
    x = torch.zeros(3, 64).bfloat16()
    with emulated():
        for wrong in (x.float(), x[0], x[:, :63]):
            with pytest.raises(UserError, match=r"arrange: expected x \[M, K\] or \[M, G, K\] in bf16, K even.*, found x \["):
                prompts.arrange(wrong, False)
        with pytest.raises(UserError, match="arrange: expected .*, found .*source .* int64"):
            prompts.arrange(x, False, torch.zeros(2, dtype=torch.int64))
        for order, weights in ((True, packed), (False, plain)):
            with pytest.raises(UserError, match="linear: expected x of 64 columns in the (short|long) order"):
                prompts.linear(prompts.arrange(x, order), weights)
        with pytest.raises(UserError, match="linear: expected x of 64 columns"):
            prompts.linear(prompts.arrange(x[:, :32], False), packed)
        with pytest.raises(UserError, match=r"linear: expected x of \[M, K\], found x \[3, 5, 64\]"):
            prompts.linear(prompts.arrange(x[:, None].expand(3, 5, 64), False), packed)
        with pytest.raises(UserError, match="grouped_linear: expected .* one weight of G"):
            prompts.grouped_linear(prompts.arrange(x[:, None].expand(3, 5, 64), False), packed)
    layers = experts.pack_experts(*layer(rng, 64, 32, 3, "nvfp4", "fp8"))
    chosen, weights = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    for args in ((x.float(), chosen, weights), (x[:2], chosen, weights), (x, chosen.long(), weights), (x, chosen, weights.double()),
                 (x, chosen[0], weights[0])):
        with pytest.raises(UserError, match=r"moe: expected x \[S, 64\] in bf16"):
            moe(args[0], layers, *args[1:])
    assert prompts.takes(any_weight(rng, "fp8", 8, 64)) and not prompts.takes(any_weight(rng, "fp8 fp32", 8, 64))


def test_products_with_an_exact_answer(rng):
    """Whole numbers: every sum and result is exact, so equal."""
    x = torch.randint(-4, 5, (70, 256), generator=rng).bfloat16()
    w = torch.randint(-1, 2, (64, 256), generator=rng).float()
    for kind in ("plain", "fp8", "mxfp4"):
        weight = quantized(w, kind)
        assert torch.equal(weight.dequantize(), w)
        assert torch.equal(product(x, weight)[0], (x.float() @ w.T).bfloat16())


def test_zero_experts_and_zero_weights(rng):
    """w2 of zeros leaves the shared expert; a routing weight of 0 too."""
    D, inner = 64, 32
    parts, shared = layer(rng, D, inner, 2, "nvfp4", "fp8")
    none = Expert(parts[0].w1, Weight("nvfp4", (D, inner), torch.zeros_like(parts[0].w2.payload), parts[0].w2.scale, 0.5, block=(1, 16)),
                  parts[0].w3)
    x, (chosen, weights) = torch.randn(20, D, generator=rng).bfloat16(), choice(rng, 20, 1, 2)
    only_shared = moe(x, experts.pack_experts([none, none], shared), chosen, weights)
    assert torch.equal(moe(x, experts.pack_experts(parts, shared), chosen, weights * 0), only_shared)
    assert only_shared.float().norm() > 0


@pytest.mark.parametrize("name", GEMMS)
def test_no_product_waits_for_another_one(nvcc, kernel_cache, name):
    """ptxas says in its report where it makes wgmma run one after the other."""
    report = (build.build(name, "sm_90a").parent / f"{build.build(name, 'sm_90a').name}.txt").read_text()
    assert "Compiling entry function" in report and "wgmma" not in report


@pytest.mark.parametrize("name", GEMMS)
def test_registers(nvcc, kernel_cache, name):
    """A kernel a result and number of parts, whose 640 threads share 65,536 registers; 512 of them then take from the others."""
    used = [entry.registers for entry in build.usage(build.build(name, "sm_90a"))]
    assert len(used) == 9 and max(used) == 96
