"""Safetensors shards: headers, checked against the file, and the bytes of one tensor. Owns the file format; knows no names.

A shard is 8 bytes of header length (little endian), a JSON header {key: dtype, shape, data_offsets}, then the tensors' bytes
without gap or overlap. Source: the safetensors format description (huggingface/safetensors, README).
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from .errors import CheckpointError

_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
         "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
TORCH_DTYPES = {"U8": torch.uint8, "I8": torch.uint8, "F4": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,
          "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
FLOATS, PACKED = ("BF16", "F16", "F32"), ("U8", "I8", "F4")
_READ_AT_MOST = 1 << 30  # the system reads at most 2 GiB at a time
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


class Stamp(NamedTuple):
    """What tells that a shard is still the file whose header was read."""

    size: int
    modified: int


def stamp_of(file: Path | int) -> Stamp:
    """Of a path or an open file. Raises OSError."""
    found = os.stat(file)
    return Stamp(found.st_size, found.st_mtime_ns)


class Run(NamedTuple):
    """Entries that lie one behind the other in a shard and are read as one range; small gaps are read too."""

    shard: str
    begin: int
    end: int
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def runs_of(entries: Iterable[Entry], gap: int = 0) -> list[Run]:
    """The entries in the order in which they lie, those that are at most `gap` bytes apart together."""
    runs: list[list[Entry]] = []
    for entry in sorted(entries, key=lambda e: (e.shard, e.begin)):
        last = runs[-1][-1] if runs else None
        if last is not None and last.shard == entry.shard and entry.begin - last.end <= gap:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return [Run(run[0].shard, run[0].begin, max(entry.end for entry in run), tuple(run)) for run in runs]


@dataclass
class OpenShard:
    """A run's shard while it is read. `at` is how far that has come: errors name the tensor there."""

    file: int
    run: Run
    at: int

    def cut_short(self) -> CheckpointError:
        """The file ends at `at` or, as others read what lies before, sooner."""
        entry, end = _entry_at(self.run, self.at), min(self.at, os.fstat(self.file).st_size)
        return CheckpointError(f"{self.run.shard}: {entry.key}: expected {entry.nbytes} bytes at offset {entry.begin}, found "
                               f"{max(0, end - entry.begin)}: the shard changed after its header was read")


def _entry_at(run, at):
    """The tensor whose byte that is, or in a gap the next one."""
    after = bisect.bisect_right(run.entries, at, key=lambda entry: entry.begin)
    entry = run.entries[max(0, after - 1)]
    return run.entries[after] if at >= entry.end and after < len(run.entries) else entry


@contextlib.contextmanager
def open_shard(folder: Path, run: Run, begin: int, stamp: Stamp | None = None) -> Iterator[OpenShard]:
    """The run's shard for a read from `begin`. Raises CheckpointError naming shard, tensor and offset: for an OSError of the block, and
    behind it when the shard is no longer the file of this stamp."""
    shard = OpenShard(-1, run, begin)
    try:
        shard.file = os.open(folder / run.shard, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            yield shard
            if stamp is not None and stamp_of(shard.file) != stamp:
                key = _entry_at(shard.run, shard.at - 1).key
                raise CheckpointError(f"{run.shard}: {key}: the shard changed after its header was read, seen after reading up to offset "
                                      f"{shard.at}: load again once nothing writes to it")
        finally:
            os.close(shard.file)
    except OSError as error:
        raise CheckpointError(f"{run.shard}: {_entry_at(shard.run, shard.at).key}: reading at offset {shard.at} failed: "
                              f"{error.strerror or error}") from None


def read_range(folder: Path, run: Run, begin: int, view: memoryview, stamp: Stamp | None = None) -> None:
    """Fills `view` with the bytes of the run's shard from `begin`. Errors as open_shard's, and for a file that ends before."""
    with open_shard(folder, run, begin, stamp) as shard:
        while shard.at < begin + len(view):
            got = os.preadv(shard.file, [view[shard.at - begin :][:_READ_AT_MOST]], shard.at)
            if not got:
                raise shard.cut_short()
            shard.at += got


def tensor_of(data: torch.Tensor, entry: Entry, at: int = 0) -> torch.Tensor:
    """An entry's bytes, those from `at` on of `data` (uint8, flat), as a tensor of its dtype and shape; F8_E8M0, I8 and F4 as uint8
    (reinterpreted), F4 flat."""
    dtype, shape = TORCH_DTYPES[entry.dtype], entry.shape if entry.dtype != "F4" else (entry.nbytes,)
    if dtype.itemsize > 1 or len(shape) != 2:
        return data[at : at + entry.nbytes].view(dtype).reshape(shape)
    if dtype != torch.uint8:  # an expert has six such tensors, and a call of torch costs more than reading 10 KB
        data = data.view(dtype)
    return data.as_strided(shape, (shape[1], 1), data.storage_offset() + at)


def read_entry(folder: Path, entry: Entry, stamp: Stamp | None = None) -> torch.Tensor:
    """One entry in fresh memory (no memory map: resident is what the caller keeps), as `tensor_of` gives it. Raises CheckpointError
    naming shard, tensor and offset."""
    data = torch.empty(entry.nbytes, dtype=torch.uint8)
    read_range(folder, Run(entry.shard, entry.begin, entry.end, (entry,)), entry.begin, memoryview(data.numpy()), stamp)
    return tensor_of(data, entry)


_SAFETENSORS_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if name not in ("I8", "F4", "F8_E8M0")} | {
    torch.int8: "I8", torch.float8_e8m0fnu: "F8_E8M0"}


class NewShard:
    """A safetensors file whose tensors are known by dtype and shape and come in any order, from any thread: none is held. What does not
    come is a hole, which reads as zeros and takes no room. In a with-block; the file gets its name when the block ends, or is removed.

    Tensors lie as the safetensors library puts them: by the size of their dtype, the largest first, then by dtype and name.
    """

    _ORDER = ("I64", "F32", "I32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "I8", "U8")  # the library's, of what we write

    def __init__(self, path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]):
        self.path, self._part = path, path.with_name(f".{path.name}.{os.getpid()}.part")
        names = {key: _SAFETENSORS_NAMES[dtype] for key, (dtype, _) in tensors.items()}
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for key in sorted(tensors, key=lambda k: (self._ORDER.index(names[k]), k)):
            dtype, shape = tensors[key]
            size = math.prod(shape) * dtype.itemsize
            header[key] = {"dtype": names[key], "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        self._text = text + b" " * (-len(text) % 8)
        self._at = {key: (tensors[key], 8 + len(self._text) + header[key]["data_offsets"][0]) for key in tensors}
        self.nbytes = at

    def __enter__(self) -> NewShard:
        self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.write(self._file, struct.pack("<Q", len(self._text)))
            self._write(memoryview(self._text), 8)
            os.ftruncate(self._file, 8 + len(self._text) + self.nbytes)
        except BaseException:
            self.__exit__(OSError)
            raise
        return self

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Raises ValueError unless it has the dtype and shape that were said, OSError where the disk does not take it."""
        said, at = self._at[key]
        if (tensor.dtype, tuple(tensor.shape)) != said:
            raise ValueError(f"{key}: expected {said}, found {(tensor.dtype, tuple(tensor.shape))}")
        self._write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()), at)

    def _write(self, view, at):
        while view:
            done = os.pwrite(self._file, view[: 1 << 30], at)
            view, at = view[done:], at + done

    def __exit__(self, failed, *_) -> None:
        os.close(self._file)
        if failed:
            self._part.unlink(missing_ok=True)
        else:
            os.replace(self._part, self.path)


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
