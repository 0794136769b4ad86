"""Products with packed weights on the CPU emulator against their definitions, and how launches are dealt to blocks."""

import pytest
import torch

from dsv4 import ops
from dsv4.errors import UserError
from dsv4.formats import Weight
from dsv4.kernels import linear
from dsv4.ops.linear import matmul_fp32

from ..emulator.emulator import emulated, needs_gxx
from . import compare
from .weights import KINDS, any_weight

pytestmark = needs_gxx

# [rows, columns]: one row, ragged tiles, one item and ragged items of each format, more tiles than warps.
SHAPES = [(1, 16), (15, 192), (16, 512), (17, 528), (130, 1040), (300, 1536)]


def run(name, x, weights, *arguments, **how):
    """An operation of dsv4/kernels/linear.py on weights that are packed for it: every kernel call of this file."""
    packed = linear.pack_weights(weights)
    with emulated(**how):
        return getattr(linear, name)(x, packed, *arguments)


def project(x, *weights, **how):
    return run("projections", x, weights, ("bf16",) * len(weights), **how)


def exact(x, weight):
    return x.double() @ weight.dequantize().double().T


def assert_as_good(got, x, weight):
    """4 roundings of the absolute terms: tensor cores cut off, and do not round, what they add."""
    low = matmul_fp32(x, weight).to(got.dtype)
    scale = x.double().abs() @ weight.dequantize().double().abs().T
    compare.assert_as_good(got, low, exact(x, weight), roundings=4, scale=scale)


def tokens(rng, S, *shape):
    return torch.randn(S, *shape, generator=rng).bfloat16()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_definition(rng, kind, rows, columns, reverse):
    columns += -columns % 32 if kind == "mxfp4" else 0
    weight, x = any_weight(rng, kind, rows, columns), tokens(rng, 1 + rows % 8, columns)
    (got,) = project(x, weight, reverse=reverse)
    assert got.dtype == torch.float32 and got.is_contiguous()
    assert_as_good(got, x, weight)


@pytest.mark.parametrize("S", range(1, 9))
@pytest.mark.parametrize("kind", ["plain", "fp8", "nvfp4", "mxfp4"])
def test_every_token_has_its_own_row(rng, kind, S):
    weight = any_weight(rng, kind, 40, 544)
    x = tokens(rng, S, 544)
    (got,) = project(x, weight)
    assert_as_good(got, x, weight)
    rounded = run("linear", x, (weight,))
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, got.bfloat16())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("S", [1, 3, 8])
@pytest.mark.parametrize("kind", ["plain", "fp8", "nvfp4", "mxfp4"])
def test_tiles_of_two_blocks(rng, kind, S, reverse):
    """17 tiles on 12 blocks: most begin within a tile. Each tile's second part is 0 where one block has it all."""
    weight, x = any_weight(rng, kind, 270, 2080), tokens(rng, S, 2080)
    parts = run("linear", x, (weight,), reverse=reverse)
    assert parts.shape == (2, S, 270) and parts.dtype == torch.float32
    second = [bool((parts[1, :, row : row + 16] != 0).any()) for row in range(0, 270, 16)]
    assert any(second) and not all(second)
    assert_as_good(parts[0] + parts[1], x, weight)
    assert_as_good(ops.whole(parts, torch.bfloat16), x, weight)


# Blocks that run at once, and with them warps with many tiles, with a part of one and with none.
@pytest.mark.parametrize("blocks", [1, 2, 4, 7, 12, 40, 264])
def test_merged_formats_in_every_partition(rng, monkeypatch, blocks):
    monkeypatch.setattr(linear, "_CPU_BLOCKS", blocks)
    linear.blocks_at_once.cache_clear()
    columns, S = 1600, 3
    weights = [any_weight(rng, kind, rows, columns) for kind, rows in zip(KINDS, (70, 33, 64, 1, 90, 47), strict=True)]
    x = tokens(rng, S, columns)
    forward, backward = (project(x, *weights, reverse=reverse) for reverse in (False, True))
    for got, again, weight in zip(forward, backward, weights, strict=True):
        assert torch.equal(got, again) and got.shape == (S, weight.shape[0]) and got.is_contiguous()
        assert_as_good(got, x, weight)
    linear.blocks_at_once.cache_clear()


@pytest.mark.parametrize("kind, rows, columns", [("plain", 1600, 16), ("fp8", 700, 1536), ("nvfp4", 600, 2048)])
def test_more_tiles_than_a_block_has_memory_for(rng, monkeypatch, kind, rows, columns):
    """One block for all: 38 tiles and more, of 1, 6 and 4 items, and memory for about 12 at a time with 8 tokens."""
    monkeypatch.setattr(linear, "_CPU_BLOCKS", 1)
    linear.blocks_at_once.cache_clear()
    weight, x = any_weight(rng, kind, rows, columns), tokens(rng, 8, columns)
    assert_as_good(project(x, weight)[0], x, weight)
    linear.blocks_at_once.cache_clear()


def test_as_many_blocks_as_a_plan_has_room_for(rng, monkeypatch):
    """A tile each."""
    monkeypatch.setattr(linear, "_CPU_BLOCKS", linear.MAX_BLOCKS)
    linear.blocks_at_once.cache_clear()
    weight, x = any_weight(rng, "plain", 16 * linear.MAX_BLOCKS, 16), tokens(rng, 2, 16)
    schedule = linear._schedule(linear.pack_weights((weight,)).segments, linear.MAX_BLOCKS)
    assert (len(schedule.first_item) - 1, schedule.tiles, schedule.parts) == (320, 1, 1)
    assert_as_good(project(x, weight)[0], x, weight)
    linear.blocks_at_once.cache_clear()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["plain", "fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("groups, rows, columns", [(1, 16, 512), (2, 64, 1024), (5, 16, 96), (16, 32, 544)])
def test_groups_meet_their_own_x(rng, kind, groups, rows, columns, reverse):
    weight, S = any_weight(rng, kind, groups * rows, columns), 1 + groups % 3
    x = tokens(rng, S, groups, columns)
    got = run("grouped_linear", x, (weight,), reverse=reverse)
    assert got.shape == (S, groups, rows) and got.dtype == torch.bfloat16
    for g in range(groups):
        assert_as_good(got[:, g], x[:, g], weight.rows(g * rows, (g + 1) * rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1536, 7168, 16384])
def test_real_widths(rng, kind, columns):
    weight = any_weight(rng, kind, 40, columns)
    x = tokens(rng, 2, columns)
    assert_as_good(project(x, weight)[0], x, weight)


@pytest.mark.parametrize("kind, item, group", [("plain", 128, 8), ("fp8", 256, 8), ("nvfp4", 512, 16), ("mxfp4", 512, 32)])
def test_around_the_end_of_an_item(rng, kind, item, group):
    for columns in (item - group, item + group, 2 * item - group):
        weight, x = any_weight(rng, kind, 17, columns), tokens(rng, 2, columns)
        assert_as_good(project(x, weight)[0], x, weight)


@pytest.mark.parametrize("block", [(8, 128), (24, 384), (37, 1100)])
def test_fp8_blocks(rng, block):
    """Blocks of 8 rows change scales within a tile."""
    rows = 37 if block[0] % 8 else 70
    for kind in ("fp8", "fp8 fp32"):
        weight, x = any_weight(rng, kind, rows, 1100, block), tokens(rng, 3, 1100)
        assert_as_good(project(x, weight)[0], x, weight)


@pytest.mark.parametrize("columns", [1, 7, 12, 200, 513])
def test_columns_that_are_no_multiple_of_8(rng, columns):
    x = tokens(rng, 2, columns)
    for kind in ("plain", "fp8"):
        weight = any_weight(rng, kind, 20, columns)
        assert_as_good(project(x, weight)[0], x, weight)
    grouped = x.unsqueeze(1).expand(-1, 2, -1) * torch.tensor([1, 2]).view(1, 2, 1).bfloat16()
    weight = any_weight(rng, "fp8", 32, columns)
    got = run("grouped_linear", grouped, (weight,))
    assert_as_good(got[:, 1], grouped[:, 1], weight.rows(16, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_only_one_column_counts(rng, kind):
    """x with a single 1 in turn: each column of the weight, exactly (but for the global scale's one rounding)."""
    columns = 544
    weight = any_weight(rng, kind, 17, columns)
    values = weight.dequantize()
    order = torch.randperm(columns, generator=rng)[:48]
    for some in order.split(8):
        (got,) = project(torch.eye(columns)[some].bfloat16(), weight)
        torch.testing.assert_close(got, values[:, some].T, rtol=2e-7 if "nvfp4" in kind else 0, atol=0)


def test_extremes_of_the_codes(rng):
    """The largest, the smallest and the zero codes and scales of each format, of both signs."""
    x = tokens(rng, 2, 512)
    largest, smallest = torch.full((4, 256), 0xF7, dtype=torch.uint8), torch.full((4, 256), 0x91, dtype=torch.uint8)
    negative_zero = torch.full((4, 256), 0x88, dtype=torch.uint8)
    for codes in (largest, smallest, negative_zero, 0 * largest):
        for scale in (0x7E, 0x08, 0x07, 0x01, 0x00, 0xFE, 0x81, 0x80):
            e4m3 = torch.full((4, 32), scale, dtype=torch.uint8).view(torch.float8_e4m3fn)
            for global_scale in (1.0, 2.0**-90, 3e30):
                weight = Weight("nvfp4", (4, 512), codes, e4m3, float(torch.tensor(global_scale)), block=(1, 16))
                (got,) = project(x, weight)
                if exact(x, weight).float().isfinite().all():
                    assert_as_good(got, x, weight)
        for low, high in ((2, 128), (127, 127), (118, 244), (0, 0)):
            if low or codes is not largest and codes is not smallest:
                e8m0 = torch.tensor([low, high] * 8, dtype=torch.uint8).repeat(4, 1)
                weight = Weight("mxfp4", (4, 512), codes, e8m0, block=(1, 32))
                assert_as_good(project(x, weight)[0], x, weight)
    for code in (0x7E, 0xFE, 0x08, 0x07, 0x01, 0x81, 0x80, 0x00):
        e4m3 = torch.full((4, 512), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
        for scale in (torch.tensor([0, 100, 127, 230], dtype=torch.uint8), torch.tensor([1e-30, 0.0, 1.0, 1e30])):
            weight = Weight("fp8", (4, 512), e4m3, scale[None], block=(128, 128))
            assert_as_good(project(x, weight)[0], x, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_of_x(rng, kind):
    """Zero, huge, tiny and non-finite tokens, which leave their neighbours alone."""
    weight = any_weight(rng, kind, 33, 544)
    x = tokens(rng, 8, 544)
    usual = project(x, weight)[0]
    x[1], x[2], x[4] = 0, x[2] * 1e33, x[4] * 1e-30
    x[5, 100], x[6, 543] = float("nan"), float("-inf")
    got = project(x, weight)[0]
    assert torch.equal(got[[0, 3, 7]], usual[[0, 3, 7]]) and (got[1] == 0).all()
    assert got[5].isnan().all() and not got[6].isfinite().any()
    calm = torch.tensor([0, 1, 2, 3, 4, 7])
    assert_as_good(got[calm], x[calm], weight)


def test_x_at_the_end_of_its_range(rng):
    """The largest x under weights as small as a checkpoint's: sums stay finite where the definition's do."""
    x = torch.full((1, 1024), 3e38).bfloat16() * (torch.randint(0, 2, (1, 1024), generator=rng) * 2 - 1).bfloat16()
    for kind in ("nvfp4", "mxfp4"):
        weight = any_weight(rng, kind, 16, 1024)
        if kind == "nvfp4":
            weight.global_scale = 2.0**-24
        else:
            weight.scale = torch.full_like(weight.scale, 100)
        assert exact(x, weight).float().isfinite().all()
        assert_as_good(project(x, weight)[0], x, weight)


# ------------------------------------------------------------------------------------------------------- the deal


def segments(*matrices):
    """(kind, rows, columns) each -> what PackedWeights.segments has."""
    return tuple(linear.packed_shape(*m) for m in matrices)


def busiest(segments, schedule):
    """The largest block's bytes by brute force; checks that every item is dealt once, whole tiles unless there are two parts, that a tile
    is no more than two blocks', and that no block has more tiles than are planned."""
    sizes = [(items, size) for tiles, items, size in segments for _ in range(tiles)]
    tile_of = [tile for tile, (items, _) in enumerate(sizes) for _ in range(items)]
    first, most, owners = schedule.first_item.tolist(), 0, {}
    ranges = list(zip(first, first[1:], strict=False))
    assert first[0] == 0 and first[-1] == len(tile_of) and all(a <= b for a, b in ranges)
    for block, (a, b) in enumerate(ranges):
        mine = tile_of[a:b]
        most = max(most, sum(sizes[tile][1] for tile in mine))
        for tile in set(mine):
            owners.setdefault(tile, []).append(block)
        assert len(set(mine)) <= schedule.tiles
    assert max(map(len, owners.values())) <= schedule.parts
    return most


PRO = {
    "wq_a, wkv": [("fp8", 1536, 7168), ("fp8", 512, 7168)],
    "HCA": [("fp8", 1536, 7168), ("fp8", 512, 7168), ("plain", 512, 7168), ("plain", 512, 7168)],
    "wq_b": [("fp8", 65536, 1536)],
    "wq_b with the indexer's": [("fp8", 65536, 1536), ("fp8", 8192, 1536)],
    "wo_a": [("fp8", 16384, 4096)],
    "wo_b": [("fp8", 7168, 16384)],
    "wo_b nvfp4": [("nvfp4", 7168, 16384)],
    "wq_b nvfp4": [("nvfp4", 65536, 1536)],
    "head": [("plain", 129280, 7168)],
    "Flash wo_b": [("fp8", 4096, 8192)],
    "Flash wq_b": [("fp8", 32768, 1024)],
    "Flash wo_a": [("fp8", 8192, 4096)],
    "Flash head": [("plain", 129280, 4096)],
}


@pytest.mark.parametrize("name", PRO)
@pytest.mark.parametrize("blocks", [264, 296])  # H200, B200
def test_real_launches_are_dealt_evenly(name, blocks):
    """In bytes against the mean: one block has up to 1.04 times in launches that fill the machine, and those that may be split."""
    parts = segments(*PRO[name])
    split = "wo_b" in name
    schedule = linear._schedule(parts, blocks, split)
    total = sum(tiles * items * size for tiles, items, size in parts)
    assert len(schedule.first_item) - 1 <= blocks
    assert schedule.parts == (2 if name in ("wo_b", "wo_b nvfp4") else 1)
    worst = busiest(parts, schedule) * blocks / total
    if name in ("wq_a, wkv", "HCA"):  # fewer tiles than blocks
        assert worst < 2.4, worst
    else:
        assert worst < (1.04 if blocks == 264 or schedule.parts == 2 else 1.19), worst


def test_what_is_not_worth_two_parts():
    """Pro's wq_b on an H200: 16 tiles in the largest block, 15.5 in the mean."""
    assert linear._schedule(segments(*PRO["wq_b"]), 264, True).parts == 1


def test_deals_of_any_size(rng):
    for n in range(300):
        count = int(torch.randint(1, 9, (1,), generator=rng)) if n % 2 else 1
        parts = tuple((int(t), int(i), 4096) for t, i in zip(torch.randint(1, 60, (count,), generator=rng),
                                                             torch.randint(1, 20, (count,), generator=rng), strict=True))
        blocks = int(torch.randint(1, 320, (1,), generator=rng))
        schedule = linear._schedule.__wrapped__(parts, blocks, n % 4 == 0)
        assert len(schedule.first_item) - 1 <= blocks
        mean = sum(tiles * items * 4096 for tiles, items, _ in parts) / blocks
        largest = max(items for _, items, _ in parts) * 4096
        assert busiest(parts, schedule) < max(mean, largest) + largest


# -------------------------------------------------------------------------------------------------------- refusals


def test_what_is_refused(rng):
    weight, other = any_weight(rng, "fp8", 32, 64), any_weight(rng, "fp8", 32, 128)
    packed = linear.pack_weights((weight,))
    x = tokens(rng, 2, 64)
    for bad in (x.float(), x[:, :32], x[0], tokens(rng, 9, 64), x[:0], x[None]):
        with pytest.raises(UserError, match=r"(projections|linear): expected x of 1 to 8 tokens in bf16, 64 wide, found x \["):
            project(bad, weight)
    with pytest.raises(UserError, match="projections: expected bf16 activations, found fp8: run with --backend torch"):
        linear.projections(x, packed, ("fp8",))
    with pytest.raises(UserError, match="linear: expected bf16 activations, found nvfp4"):
        linear.linear(x, packed, "nvfp4")
    with pytest.raises(UserError, match="projections: expected 1 activations, as many as weights"):
        linear.projections(x, packed, ("bf16", "bf16"))
    for bad in (x, tokens(rng, 2, 3, 64), tokens(rng, 2, 4, 64)):
        with pytest.raises(UserError, match=r"grouped_linear: expected x \[S, G, in\] with G \* R = 32 and R a multiple of 16"):
            linear.grouped_linear(bad, packed)
    with pytest.raises(UserError, match="linear: expected one weight, not 2"):
        linear.linear(x, linear.pack_weights((weight, weight)))
    for bad in ((), (weight, other), (weight,) * 9, (weight.rows(0, 0),)):
        with pytest.raises(UserError, match=r"pack_weights: expected 1 to 8 weights \[out, in\] of one in, found"):
            linear.pack_weights(bad)
