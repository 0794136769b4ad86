"""Tiles fit the GPU, and the chosen one is of the right kind and near what its predicted time says."""

import pytest

from dsv4.kernels.cute.choice import choose, predicted_us
from dsv4.kernels.cute.tiles import COLUMNS_OUT, HOPPER_KINDS, NVFP4_KINDS, SHARED_BYTES, STEPS, TENSOR_COLUMNS, TILES, TURN, Tile

SHAPES = [(7168, 1536, 1), (7168, 512, 1), (1536, 65536, 1), (4096, 1024, 16), (16384, 7168, 1), (64, 64, 2), (192, 24, 1)]


@pytest.mark.parametrize("tile", TILES, ids=lambda t: t.name)
def test_tiles_fit(tile):
    """Ring, barriers, output or the other blocks' sums of a share of the columns; that is of groups of 8."""
    assert tile.stages >= (3 if tile.nvfp4 else 4) and 1 in (tile.cluster, tile.split)
    out = 0 if tile.split > 1 or (tile.nvfp4 and tile.grouped) else 2 * tile.rows * 64 * 2
    assert 1024 + tile.stages * tile.stage_bytes + out + tile.received_bytes <= SHARED_BYTES
    assert tile.columns % (8 * tile.split) == 0 and tile.received_bytes * tile.split == tile.rows * tile.columns * 4 * (tile.split - 1)


@pytest.mark.parametrize("tile", [t for t in TILES if t.nvfp4], ids=lambda t: t.name)
def test_tensor_memory_has_room(tile):
    """For the sums of two tiles and the scales of a stage. What two tiles share is read at once, as it is given back then."""
    assert tile.scale_columns == STEPS * (4 + tile.columns // 32)
    assert tile.sums_apart + tile.columns + tile.scale_columns <= TENSOR_COLUMNS
    assert 0 <= tile.columns - tile.sums_apart <= COLUMNS_OUT


@pytest.mark.parametrize("kind", [*HOPPER_KINDS, *NVFP4_KINDS])
@pytest.mark.parametrize("k,n,batch", SHAPES)
def test_the_choice_is_the_least_time_of_its_kind(kind, k, n, batch):
    for m in (1, 3, 64, 128, 1000, 8192):
        tile = choose(kind, m, n, k, batch, 132)
        times = {t: predicted_us(t, m, n, k, batch, 132) for t in TILES if t.kind == kind}
        assert tile.kind == kind and times[tile] == min(times.values()) > 0


def test_stages_of_a_block():
    assert Tile("bf16", 128, 128).block_stages(7168) == 112 and Tile("bf16", 128, 128, split=8).block_stages(7168) == 14
    assert Tile("bf16", 128, 128, split=4).block_stages(65) == 1
    assert Tile("e4m3", 128, 128).block_stages(1536) == 12 and Tile("e4m3", 128, 128).block_stages(130) == TURN
    assert Tile("e4m3", 64, 128, split=8).block_stages(7168) == 8
    wide = Tile("e4m3", 128, 192)
    assert wide.block_stages(1536) == 12 and wide.block_stages(130) == wide.stages == 4
    assert Tile("nvfp4", 128, 128).block_stages(7168) == 28 and Tile("nvfp4", 128, 256, cluster=2).block_stages(272) == 2


def test_large_products_are_cut_into_large_tiles_and_thin_ones_are_split():
    assert choose("bf16", 8192, 7168, 16384, 1, 132) == Tile("bf16", 128, 256)
    assert choose("bf16", 16, 512, 7168, 1, 132).split >= 4
    assert choose("e4m3", 8192, 7168, 16384, 1, 132) == Tile("e4m3", 128, 192, cluster=2)
    assert choose("nvfp4", 8192, 7168, 16384, 1, 148) == Tile("nvfp4", 128, 256, cluster=2)
    assert choose("nvfp4", 16, 1536, 7168, 1, 148).columns == 128  # as many blocks as can be
    assert choose("nvfp4_swiglu", 64, 6144, 7168, 384, 148).cluster == 1  # a pair's lower block would have no rows
    assert choose("nvfp4_swiglu", 1024, 6144, 7168, 384, 148) == Tile("nvfp4_swiglu", 128, 256, cluster=2)
    assert choose("bf16_grouped", 1024, 6144, 7168, 384, 132).columns > 128
    assert choose("e4m3_grouped", 1024, 6144, 7168, 384, 132).columns == 128  # without a cluster those of 192 are slower
    assert choose("e4m3_grouped", 1, 512, 4096, 6, 132).columns == 128  # as many blocks as can be


# By kind and M (of an expert, where there are several), for each (N, K, batch): tiles within 2 %, of bf16 experts 3 %, of the fastest one
# on an H200. docs/measurements.md has the sweeps that these are from; 7 rows whose chosen tile is further behind are left out.
FASTEST = {
    ("bf16", 128): {
        (1536, 7168, 1): "128x64_s4", (512, 7168, 1): "64x64_s4", (65536, 1536, 1): "128x128", (1024, 4096, 16): "128x128",
        (7168, 16384, 1): "128x128_s2", (6144, 7168, 1): "128x96_s2", (7168, 3072, 1): "128x64", (8192, 1536, 1): "128x64",
        (512, 4096, 1): "64x64_s4", (32768, 1024, 1): "128x64 128x128", (1024, 4096, 8): "128x64", (4096, 8192, 1): "128x128_s2 64x64",
        (4096, 4096, 1): "64x64 128x64", (4096, 2048, 1): "64x64"},
    ("bf16", 2048): {
        (1536, 7168, 1): "128x192", (512, 7168, 1): "128x128_s2", (65536, 1536, 1): "128x192_c2 128x192 128x256_c2 128x256",
        (1024, 4096, 16): "128x256_c2 128x256", (7168, 16384, 1): "128x128",
        (6144, 7168, 1): "128x192 128x192_c2 128x256 128x256_c2 128x128 128x128_c2", (7168, 3072, 1): "128x128 128x128_c2",
        (8192, 1536, 1): "128x256 128x256_c2", (1024, 4096, 1): "128x128", (512, 4096, 1): "128x128_s2 64x128",
        (32768, 1024, 1): "128x192 128x192_c2 128x256_c2", (1024, 4096, 8): "128x256 128x256_c2",
        (4096, 8192, 1): "128x256_c2 128x256 128x128_c2", (4096, 4096, 1): "128x256 128x256_c2",
        (4096, 2048, 1): "128x256 128x128 128x256_c2", (8192, 1024, 1): "128x256 128x256_c2 128x128"},
    ("bf16", 8192): {
        (512, 7168, 1): "128x256 128x256_c2", (65536, 1536, 1): "128x192_c2 128x256_c2 128x192 128x256",
        (7168, 16384, 1): "128x256_c2 128x256 128x192", (7168, 3072, 1): "128x256_c2 128x256 128x192_c2 128x192",
        (8192, 1536, 1): "128x192 128x192_c2 128x256_c2 128x256", (1024, 4096, 1): "128x256 128x256_c2",
        (512, 4096, 1): "128x256 128x256_c2", (32768, 1024, 1): "128x192_c2 128x192 128x256_c2 128x256",
        (1024, 4096, 8): "128x256_c2 128x256", (4096, 8192, 1): "128x128_c2 128x192_c2 128x256 128x256_c2",
        (4096, 4096, 1): "128x256_c2 128x256 128x192_c2", (4096, 2048, 1): "128x256_c2 128x256",
        (8192, 1024, 1): "128x192_c2 128x192 128x256_c2"},
    ("e4m3", 128): {
        (1536, 7168, 1): "64x128_s4", (512, 7168, 1): "64x128_s8", (65536, 1536, 1): "128x128", (7168, 16384, 1): "128x128_s2",
        (6144, 7168, 1): "128x128_s2", (7168, 3072, 1): "128x128_s2", (8192, 1536, 1): "64x128 128x128", (1024, 4096, 1): "64x128_s4",
        (512, 4096, 1): "64x128_s8", (32768, 1024, 1): "128x128", (4096, 2048, 1): "128x128_s2 64x128_s2", (8192, 1024, 1): "64x128"},
    ("e4m3", 2048): {
        (1536, 7168, 1): "128x192_c2", (512, 7168, 1): "128x128_s2", (65536, 1536, 1): "128x192_c2", (7168, 16384, 1): "128x192_c2",
        (6144, 7168, 1): "128x192_c2", (7168, 3072, 1): "128x192_c2 128x128", (8192, 1536, 1): "128x128", (1024, 4096, 1): "128x128",
        (512, 4096, 1): "128x128_s2", (32768, 1024, 1): "128x192_c2", (4096, 8192, 1): "128x128", (4096, 4096, 1): "128x128",
        (4096, 2048, 1): "128x128", (8192, 1024, 1): "128x128"},
    ("e4m3", 8192): {
        (1536, 7168, 1): "128x192_c2", (512, 7168, 1): "128x128", (65536, 1536, 1): "128x192_c2", (7168, 16384, 1): "128x192_c2",
        (6144, 7168, 1): "128x192_c2", (7168, 3072, 1): "128x192_c2", (8192, 1536, 1): "128x192_c2", (1024, 4096, 1): "128x128",
        (512, 4096, 1): "128x128", (32768, 1024, 1): "128x192_c2", (4096, 8192, 1): "128x192_c2", (4096, 4096, 1): "128x192_c2",
        (4096, 2048, 1): "128x192_c2", (8192, 1024, 1): "128x192_c2"},
    ("bf16_grouped", 16): {(6144, 7168, 384): "128x256 128x192", (7168, 3072, 384): "128x256 128x192"},
    ("bf16_grouped", 24): {(4096, 4096, 256): "128x256 128x192", (4096, 2048, 256): "128x256 128x192 128x128"},
    ("bf16_grouped", 64): {(6144, 7168, 384): "128x192 128x256"},
    ("e4m3_grouped", 16): {(6144, 7168, 384): "128x192", (7168, 3072, 384): "128x192 128x128"},
    ("e4m3_grouped", 24): {(4096, 4096, 256): "128x192 128x128", (4096, 2048, 256): "128x192"},
    ("e4m3_grouped", 96): {(4096, 4096, 256): "128x128", (4096, 2048, 256): "128x192 128x128"},
}


@pytest.mark.parametrize("kind,m,n,k,batch", [(*which, *shape) for which, rows in FASTEST.items() for shape in rows])
def test_the_choice_is_a_tile_that_was_measured_to_be_fast(kind, m, n, k, batch):
    assert choose(kind, m, n, k, batch, 132).name in [f"gemm_{kind}_{tile}" for tile in FASTEST[kind, m][n, k, batch].split()]
