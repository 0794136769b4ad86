"""What a CuTeDSL GEMM is compiled for, and how it divides a product. Needs neither the DSL nor torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

DSL = "4.8.1"  # nvidia-cutlass-dsl; pyproject.toml pins the same
SCALE_BLOCK = 128  # e4m3: values of K, and rows of the weight, to a scale
COLUMNS_OUT = 64  # of the output, stored at a time: 128 bytes
STAGE_WIDTH = 128  # bytes of K in a stage
SHARED_BYTES = 227 << 10  # that a block can have on Hopper
MAX_STAGES = 8
TURN = 4  # e4m3: stages between two moments without a product in flight (gemm_sm90.py says why)


@dataclass(frozen=True)
class Tile:
    """rows x columns of the output are one block's at a time (rows: tokens, columns: rows of the weight).

    kind: "bf16" or "e4m3". cluster: blocks one below the other that share each load of the weight. split: blocks that divide K among
    them. One of the two is 1.
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
    def depth(self) -> int:
        """Values of K in a stage."""
        return STAGE_WIDTH // (2 if self.kind == "bf16" else 1)

    @property
    def stage_bytes(self) -> int:
        """Both operands, and for e4m3 an fp32 scale a row."""
        return (self.rows + self.columns) * STAGE_WIDTH + (4 * self.rows if self.kind == "e4m3" else 0)

    @property
    def stages(self) -> int:
        """As many as fit beside the barriers (1 KB, to the next multiple of 1 KB) and the two buffers of a warpgroup's output."""
        out = 0 if self.split > 1 else 2 * self.rows * COLUMNS_OUT * 2
        return min(MAX_STAGES, (SHARED_BYTES - 1024 - out) // self.stage_bytes)

    def block_stages(self, k: int) -> int:
        """Stages that one block goes through for a tile. Those beyond K bring zeros."""
        stages = -(-k // (self.depth * self.split))
        return -(-stages // TURN) * TURN if self.kind == "e4m3" else stages


def _tiles() -> tuple[Tile, ...]:
    whole = {"bf16": ((128, 256), (128, 192), (128, 128), (64, 128)), "e4m3": ((128, 128), (64, 128))}
    found = []
    for kind, sizes in whole.items():
        for size in sizes:
            tile = Tile(kind, *size)
            found.append(tile)
            if tile.rows == 128:
                found.append(replace(tile, cluster=2))
            if tile.columns == 128:
                found += [replace(tile, split=s) for s in (2, 4, 8)]
    return tuple(found)


TILES = _tiles()
