"""A checkpoint whose shards are not there yet: what config.json and the index of shards tell of its sizes, so that it can be planned for
before it is downloaded. Formats are guessed from names and held to the index's own total."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
from pathlib import Path
from typing import NamedTuple

from .checkpoint import (
    SKIPPED_SUFFIXES,
    Checkpoint,
    Need,
    Stored,
    human_bytes,
    native_name,
    needs_of_layer,
    needs_outside_layers,
    read_json,
)
from .config import ModelConfig
from .errors import CheckpointError
from .exports import ALWAYS_F32
from .formats import MXFP4_BLOCK, NVFP4_BLOCK

INDEX = "*.safetensors.index.json"
MISSING = "what is missing to plan are the shards, whose headers tell the sizes"


class Disk(NamedTuple):
    """Bytes of a checkpoint: in all, of these already there, and free beside them."""

    total: int
    present: int
    free: int

    @property
    def missing(self) -> int:
        """What the rest of the download lacks."""
        return max(0, self.total - self.present - self.free)


class Announced:
    """Stands where a Checkpoint does for a plan. Raises CheckpointError where config.json and the index do not tell the sizes."""

    def __init__(self, folder: Path, index_path: Path):
        self.folder, self.index_name = folder, index_path.name
        raw, index = read_json(folder / "config.json", "the model's config"), read_json(index_path, "an index of shards")
        self.config = ModelConfig.from_dict(raw, source=str(folder / "config.json"))
        self.block = self.config.weight_block_size
        metadata, names = index.get("metadata"), index.get("weight_map")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if type(total) is not int or not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index_path}: expected metadata.total_size and weight_map, found no such thing: {MISSING}")
        self.total = total
        self._suffixes: dict[str, set[str]] = {}
        for name in map(native_name, names):
            module, _, suffix = name.rpartition(".")
            self._suffixes.setdefault(module, set()).add(suffix)
        told = raw.get("expert_dtype", "fp4") == "fp4"  # of experts with a scale; and what has none is BF16, seldom F32
        needed = []
        for self._plain_size, self._four_bit in itertools.product((("BF16", 2), ("F32", 4)), (told, not told)):
            needed.append(self._agrees())
            if needed[-1] is None:
                return
        raise CheckpointError(f"{self.folder}: {self.index_name} says {human_bytes(self.total)}, its names with config.json's shapes "
                              f"come to {human_bytes(needed[0])}: {MISSING}")

    def _agrees(self):
        """None if the needed tensors come to the index's total, but for 1 % and MTP blocks (up to four layers' bytes each: BF16); else to
        what they come."""
        c = self.config
        layers = [sum(self.stored(need).nbytes for need in needs_of_layer(c, n)) for n in range(c.num_hidden_layers)]
        needed = sum(layers) + sum(self.stored(need).nbytes for need in needs_outside_layers(c))
        blocks = {module.split(".")[1] for module in self._suffixes if module.startswith("mtp.")}
        return None if 0.999 * needed <= self.total <= 1.01 * needed + 4 * len(blocks) * max(layers) else needed

    def fp8_scales(self, name: str) -> None:
        """As Checkpoint.fp8_scales: the shards that have them are not here."""

    def stored(self, need: Need) -> Stored:
        """How one thing that the config needs will lie on disk, as its name, its siblings' names and config.json's shapes let expect."""
        count, (module, _, suffix) = math.prod(need.shape), need.name.rpartition(".")
        if not need.linear:
            self._refuse_unless(suffix in self._suffixes.get(module, ()), need.name)
            kind, size = ("I64", 8) if suffix == "tid2eid" else ("F32", 4) if ALWAYS_F32.search(need.name) else self._plain_size
            return Stored("plain", kind, size * count)
        found = self._suffixes.get(need.name, set()) - SKIPPED_SUFFIXES
        self._refuse_unless({"weight", "weight_packed"} & found, need.name)
        if {"weight_scale_2", "weight_global_scale"} & found:
            return Stored("nvfp4", "U8", count // 2 + count // NVFP4_BLOCK + 4)
        if "weight_packed" in found or ({"scale", "weight_scale", "weight_scale_inv"} & found and self._four_bit
                                        and ".ffn.experts." in need.name):
            return Stored("mxfp4", "I8", count // 2 + count // MXFP4_BLOCK)
        if found == {"weight"}:
            kind, size = self._plain_size
            return Stored("plain", kind, size * count)
        high, wide = self.block
        scales = -(-need.shape[0] // high) * -(-need.shape[1] // wide)
        return Stored("fp8", "F8_E4M3", count + scales * (1 if "scale" in found else 4))

    def _refuse_unless(self, there, name):
        if not there:
            raise CheckpointError(f"{self.folder}: {self.index_name} does not name {name}: {MISSING}")


def open_for_plan(folder: Path) -> tuple[Checkpoint | Announced, Disk]:
    """The checkpoint by its headers, or, where shards are missing, by its index; and its bytes on disk. Raises CheckpointError where
    neither tells the sizes."""
    index = None
    with contextlib.suppress(OSError):  # a folder that cannot be entered: Checkpoint.open says so
        index = _index_of_missing_shards(folder)
    if index is None:
        checkpoint = Checkpoint.open(folder)
        size = present_bytes(folder)
        return checkpoint, Disk(size, size, shutil.disk_usage(folder).free)
    announced = Announced(folder, index)
    return announced, Disk(announced.total, present_bytes(folder), shutil.disk_usage(folder).free)


def _index_of_missing_shards(folder):
    """The index's path if it names shards that are not in the folder. Raises CheckpointError for config.json alone."""
    files, indexes = {path.name for path in folder.glob("*.safetensors")}, sorted(folder.glob(INDEX))
    if not indexes and not files and (folder / "config.json").exists() and not list(folder.glob("*.gguf")):
        raise CheckpointError(f"{folder}: expected shards (*.safetensors) or their index, model.safetensors.index.json, found neither: "
                              "fetch the index (a few MB), of which a plan can be made")
    if len(indexes) != 1:
        return None
    names = read_json(indexes[0], "an index of shards").get("weight_map")
    return indexes[0] if not isinstance(names, dict) or not {*map(str, names.values())} <= files else None


def present_bytes(folder: Path) -> int:
    """Of the shards that are in the folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
