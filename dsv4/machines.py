"""GPUs that one does not have: what `--assume 8xB200` stands for, and how much of a GPU's memory a plan may use. Imports nothing heavy.

Totals are those that torch reports (mem_get_info()[1]; "total capacity" in the out-of-memory errors that people post), in GiB: less than
nvidia-smi shows (H200 143771 MiB = 140.40 GiB, B200 183359 = 179.06, B300 275040 = 268.59, RTX PRO 6000 97887 = 95.59), and that is
less than the name says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30

KNOWN = {  # name -> (GiB as torch reports them, compute capability)
    "H100": (79.15, (9, 0)),  # the 80 GB one: 79.15 to 79.25 were seen
    "H200": (139.72, (9, 0)),  # 139.72 to 139.81
    "B200": (178.35, (10, 0)),
    "B300": (267.69, (10, 3)),
    "RTX PRO 6000": (94.97, (12, 0)),
}

# What a process takes of a GPU before its first tensor: the CUDA context, about 600 MiB on an H200. A GPU that is there needs no such
# number: what it has free is asked for when the context exists.
CONTEXT = 640 << 20

# What is left free of every GPU. 256 MiB: the compiled kernels, cuBLAS' workspace (32 MiB on Hopper), the allocator's half-filled segments
# of small tensors. And a share of the weights: torch cuts blocks below 10 MiB from segments of 20 MiB and rounds larger ones up to 2 MiB,
# so that the definitions' experts (Pro's: 10.5 MiB of codes and 1.3 MiB of scales in a segment of 12) take 1.6 % more than their bytes.
RESERVED, RESERVED_SHARE = 256 << 20, 0.02


@dataclass(frozen=True)
class Machine:
    """`count` equal GPUs; `capability` is None where only the memory was given."""

    name: str
    count: int
    total: int
    capability: tuple[int, int] | None

    @property
    def free(self) -> int:
        """Bytes of a GPU that one process finds free."""
        return max(0, self.total - CONTEXT)


def assumed(text: str) -> Machine:
    """8xB200, 2xRTX PRO 6000, or GiB as torch reports them: 2x96. Raises ValueError with what was expected."""
    expected = f"expected a number of GPUs and their name or GiB, such as 8xB200 or 2x96 (names: {', '.join(KNOWN)}), found {text[:40]!r}"
    match = re.fullmatch(r"\s*(\d{1,4})\s*[xX]\s*(.{1,40})", text)
    if match is None or int(match[1]) == 0:
        raise ValueError(expected)
    count, what = int(match[1]), match[2].strip()
    known = {_plain(name): name for name in KNOWN}
    if _plain(what) in known:
        name = known[_plain(what)]
        gib, capability = KNOWN[name]
        return Machine(name, count, int(gib * GIB), capability)
    if re.fullmatch(r"\d{1,5}(\.\d{1,3})?( ?GiB)?", what) and float(what.removesuffix("GiB")) > 0:
        gib = float(what.removesuffix("GiB"))
        return Machine(f"GPU of {gib:g} GiB", count, int(gib * GIB), None)
    raise ValueError(expected)


def reserved(weights: int) -> int:
    """What is left free of a GPU that holds so many bytes of weights."""
    return RESERVED + int(RESERVED_SHARE * weights)


def _plain(name):
    return re.sub(r"[\s_-]|NVIDIA", "", name.upper())
