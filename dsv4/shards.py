"""Safetensors shards: headers, checked against the file, and the bytes of one tensor. Owns the file format; knows no names.

A shard is 8 bytes of header length (little endian), a JSON header {key: dtype, shape, data_offsets}, then the tensors' bytes
without gap or overlap. Source: the safetensors format description (huggingface/safetensors, README).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch

from .errors import CheckpointError

_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
         "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
TORCH_DTYPES = {"U8": torch.uint8, "I8": torch.uint8, "F4": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,
          "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
FLOATS, PACKED = ("BF16", "F16", "F32"), ("U8", "I8", "F4")
_HEADER_LIMIT = 100_000_000  # the safetensors library's own limit


class Entry(NamedTuple):
    """A tensor on disk: bytes begin..end of a shard (absolute). A slice of a fused tensor is an entry of its own."""

    shard: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def part(self, index: int, count: int, shape: tuple[int, ...], key: str) -> Entry:
        """The index-th of `count` equal contiguous parts."""
        step = self.nbytes // count
        return Entry(self.shard, key, self.dtype, shape, self.begin + index * step, self.begin + (index + 1) * step)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one shard, checked against the file's size. Raises CheckpointError naming the shard."""
    name = path.name

    def wrong(what):
        return CheckpointError(f"{name}: {what}: the shard is truncated or corrupt; fetch it again")

    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if size == 0:
                raise wrong("expected a safetensors shard, found a file of zero length")
            if start == b"version ":
                raise wrong("expected a safetensors shard, found a Git LFS pointer (run git lfs pull)")
            length = int.from_bytes(start, "little")
            if size < 8 or not 2 <= length <= min(size - 8, _HEADER_LIMIT):
                raise wrong(f"expected a header that fits the file of {size} bytes, found a header length of {length}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise wrong(f"expected a JSON header, found {error}") from None
    header.pop("__metadata__", None)
    entries, data = {}, 8 + length
    for key, item in header.items():
        try:
            dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
            if not isinstance(dtype, str) or not all(type(x) is int and x >= 0 for x in (*shape, begin, end)):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise wrong(f"{key}: expected dtype, shape and data_offsets, found {str(item)[:80]}") from None
        if dtype not in _BITS:
            raise CheckpointError(f"{name}: {key}: expected a known dtype, found {dtype!r}")
        if end - begin != (math.prod(shape) * _BITS[dtype] + 7) // 8:
            raise wrong(f"{key}: expected {math.prod(shape) * _BITS[dtype] // 8} bytes for {dtype} {list(shape)}, "
                        f"found the offsets {begin} to {end}")
        entries[key] = Entry(name, key, dtype, shape, data + begin, data + end)
    at = data
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
        if entry.begin != at:
            what = "overlaps the tensor before it" if entry.begin < at else "leaves a gap before it"
            raise wrong(f"{entry.key}: expected data at offset {at - data}, found {entry.begin - data}, which {what}")
        at = entry.end
    if at != size:
        raise wrong(f"expected {at} bytes, as its header says, found {size}")
    return entries


def read_entry(folder: Path, entry: Entry) -> torch.Tensor:
    """The bytes of one entry in fresh memory (no memory map: resident is what the caller keeps), as a tensor of its dtype and
    shape; F8_E8M0, I8 and F4 as uint8 (reinterpreted), F4 flat. Raises CheckpointError naming shard, tensor and offset."""
    buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
    view, done = memoryview(buffer.numpy()), 0
    try:
        with open(folder / entry.shard, "rb", buffering=0) as file:
            file.seek(entry.begin)
            while done < entry.nbytes:  # the system reads at most 2 GiB at a time
                got = file.readinto(view[done:])
                if not got:
                    raise CheckpointError(f"{entry.shard}: {entry.key}: expected {entry.nbytes} bytes at offset {entry.begin}, "
                                          f"found {done}: the shard changed after its header was read")
                done += got
    except OSError as error:
        raise CheckpointError(f"{entry.shard}: {entry.key}: reading at offset {entry.begin + done} failed: "
                              f"{error.strerror or error}") from None
    return buffer.view(TORCH_DTYPES[entry.dtype]).reshape(entry.shape if entry.dtype != "F4" else (-1,))


def write_shard(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file under a temporary name beside `path` and renames it: a new file or none. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = path.with_name(f".{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata=metadata)
        os.umask(umask := os.umask(0))
        os.chmod(part, 0o666 & ~umask)  # the library makes it private
        os.replace(part, path)
    except SafetensorError as error:  # a full disk, in the library's words
        raise OSError(str(error)) from None
    finally:
        part.unlink(missing_ok=True)
