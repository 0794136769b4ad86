"""What a CuTeDSL GEMM is compiled for, and how it divides a product. Needs neither the DSL nor torch."""

from __future__ import annotations

from dataclasses import dataclass

DSL = "4.8.1"  # nvidia-cutlass-dsl; pyproject.toml pins the same
SCALE_BLOCK = 128  # e4m3: values of K, and rows of the weight, to a scale
SCALE_PART = 64  # e4m3: columns of a tile of 192 that have one scale of the weight, wherever it lies
COLUMNS_OUT = 64  # of the output, stored at a time: 128 bytes
STAGE_WIDTH = 128  # bytes of K in a stage
SHARED_BYTES = 227 << 10  # that a block can have, on Hopper and on Blackwell
MAX_STAGES = 8
SCALE_TILE = 512  # nvfp4: bytes of scales for 128 rows and 64 values of K (layouts.py)
STEPS = 4  # nvfp4: products of 64 values of K in a stage
TENSOR_COLUMNS = 512  # nvfp4: of tensor memory
NVFP4_KINDS = "nvfp4", "nvfp4_grouped", "nvfp4_swiglu"  # one product; one an expert; the same with SwiGLU behind it
HOPPER_KINDS = "bf16", "e4m3", "bf16_grouped", "e4m3_grouped"  # one product; one an expert
ARCHITECTURES = {**dict.fromkeys(HOPPER_KINDS, ("sm_90a",)), **dict.fromkeys(NVFP4_KINDS, ("sm_100a", "sm_103a"))}  # of each kind
TURN = 4  # e4m3: stages between two moments without a product in flight (gemm_sm90.py says why)
BITS = {"bf16": 16, "e4m3": 8, "bf16_grouped": 16, "e4m3_grouped": 8, **dict.fromkeys(NVFP4_KINDS, 4)}  # of a value


@dataclass(frozen=True)
class Tile:
    """rows x columns of the output are one block's at a time (rows: tokens, columns: rows of the weight).

    kind: one of HOPPER_KINDS or NVFP4_KINDS. cluster: blocks one below the other that share each load of the weight; with nvfp4, 2 of
    them are a pair whose tensor cores take one product. split: blocks that divide K among them, then groups of 8 columns. One of
    the two is 1.
    """

    kind: str
    rows: int
    columns: int
    cluster: int = 1
    split: int = 1

    @property
    def name(self) -> str:
        """Of the C function and its object."""
        extra = (f"_c{self.cluster}" if self.cluster > 1 else "") + (f"_s{self.split}" if self.split > 1 else "")
        return f"gemm_{self.kind}_{self.rows}x{self.columns}{extra}"

    @property
    def nvfp4(self) -> bool:
        """Whether the product is one of NVFP4 operands on Blackwell."""
        return self.kind in NVFP4_KINDS

    @property
    def scaled(self) -> bool:
        """Whether the operands are e4m3 with their scales."""
        return BITS[self.kind] == 8

    @property
    def grouped(self) -> bool:
        """Whether there is a product an expert, of as many tokens as chose it."""
        return self.kind not in ("bf16", "e4m3", "nvfp4")

    @property
    def in_turns(self) -> bool:
        """e4m3: whether a warpgroup has registers for two sets of products, and goes through K in turns of TURN stages."""
        return self.scaled and self.columns == SCALE_BLOCK

    @property
    def depth(self) -> int:
        """Values of K in a stage."""
        return STAGE_WIDTH * 8 // BITS[self.kind]

    @property
    def stage_bytes(self) -> int:
        """Both operands. e4m3: and an fp32 scale a row. nvfp4: and the scales of both; a pair's block has half of the weight's rows."""
        if self.nvfp4:
            return ((self.rows + self.columns // self.cluster) * STAGE_WIDTH +
                    (self.rows + self.columns) // 128 * STEPS * SCALE_TILE)
        return (self.rows + self.columns) * STAGE_WIDTH + (4 * self.rows if self.scaled else 0)

    @property
    def stages(self) -> int:
        """As many as fit beside the barriers (1 KB, to the next multiple of 1 KB) and the two buffers of a warpgroup's output, which
        Blackwell's grouped products have not; split ones have the other blocks' sums instead."""
        out = self.received_bytes if self.split > 1 else 0 if self.nvfp4 and self.grouped else 2 * self.rows * COLUMNS_OUT * 2
        return min(MAX_STAGES, (SHARED_BYTES - 1024 - out) // self.stage_bytes)

    @property
    def received_bytes(self) -> int:
        """split: fp32 sums that a block gets from each other one, of its share of the columns."""
        return self.rows * (self.columns // self.split) * 4 * (self.split - 1)

    @property
    def scale_columns(self) -> int:
        """nvfp4: of tensor memory, for the scales of a stage: one a step and 32 rows, of all rows of the product."""
        return (self.rows + self.columns) // 32 * STEPS

    @property
    def sums_apart(self) -> int:
        """nvfp4: columns of tensor memory between the sums of one tile and of the next. Less than a tile's, if two do not fit."""
        return min(self.columns, TENSOR_COLUMNS - self.scale_columns - self.columns)

    @property
    def turn(self) -> int:
        """Stages of which a block goes through a multiple; with a wide e4m3 tile, the whole ring."""
        return TURN if self.in_turns else self.stages if self.scaled else 1

    def block_stages(self, k: int) -> int:
        """Stages that one block goes through for a tile. Those beyond K bring zeros."""
        return -(-k // (self.depth * self.split * self.turn)) * self.turn


# Of one product, on Hopper: (rows, columns): the clusters, then the splits. docs/measurements.md has the products that need each.
_DENSE = {
    "bf16": {(128, 256): ((1, 2), ()), (128, 192): ((1, 2), ()), (128, 128): ((1, 2), (2,)), (128, 96): ((), (2,)), (128, 64): ((1,), (4,)),
             (64, 128): ((1,), ()), (64, 64): ((1,), (2, 4))},
    "e4m3": {(128, 192): ((2,), ()), (128, 128): ((1,), (2,)), (64, 128): ((1,), (2, 4, 8))},
}
# A plan's entries (layouts.Groups) have 128 rows. The experts' tiles are enough for all processors, so K is not split.
_GROUPED = {"bf16": (256, 192, 128), "e4m3": (192, 128)}


def _tiles() -> tuple[Tile, ...]:
    found = [Tile(kind, *size, cluster, split) for kind, sizes in _DENSE.items() for size, (clusters, splits) in sizes.items()
             for cluster, split in [*((c, 1) for c in clusters), *((1, s) for s in splits)]]
    found += [Tile(f"{kind}_grouped", 128, columns) for kind, widths in _GROUPED.items() for columns in widths]
    return *found, *(Tile(kind, 128, columns, cluster) for kind in NVFP4_KINDS for columns in (128, 256) for cluster in (1, 2))


TILES = _tiles()
