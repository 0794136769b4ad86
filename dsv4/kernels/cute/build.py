"""The CuTeDSL GEMMs as shared objects, one a tile and architecture, in the cache folder of the other kernels (see ../build.py).

An object's name holds a hash of the sources that it is made from, the DSL's version, the architecture and the tile; so one that is there is
never made again, and who finds all of them needs neither the DSL nor nvcc. What is missing is made by child processes, as the DSL compiles
for one architecture a process.

    python -m dsv4.kernels.cute.build [NAME...] [--arch sm_90a]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

from ...errors import UserError
from .. import build as cuda_build
from .tiles import ARCHITECTURES, DSL, TILES, Tile

FOLDER = Path(__file__).parent
SOURCES = ("compile.py", "gemm_sm90.py", "gemm_sm90_grouped.py", "gemm_sm100.py", "gemm_sm100_grouped.py", "persistent.py", "tiles.py")


@dataclass(frozen=True)
class Report:
    """What was compiled: registers of a thread, bytes of its stack (0: no spills), the text of the assembly."""

    registers: int
    stack: int
    ptx: str


def target(tile: Tile, arch: str) -> str:
    """The object's file name in the cache folder."""
    digest = hashlib.sha256()
    for part in [*((FOLDER / name).read_bytes() for name in SOURCES), DSL.encode(), arch.encode(), repr(astuple(tile)).encode()]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{tile.name}-{arch}-{digest.hexdigest()[:20]}.so"


def report(tile: Tile, arch: str) -> Report:
    """Of an object that is in the cache."""
    return Report(**json.loads((cuda_build.cache_folder() / f"{target(tile, arch)}.txt").read_text()))


def build(tile: Tile, arch: str) -> Path:
    """The shared object, from the cache or compiled now with a line about it. Raises UserError as `build_ahead` does."""
    path = cuda_build.cache_folder() / target(tile, arch)
    if not path.exists():
        build_ahead([tile], arch)
    return path


def build_ahead(tiles: Iterable[Tile], arch: str) -> int:
    """Compiles what the cache lacks, on all cores and under a bar -> how many. Raises UserError: an architecture that these tiles are not
    for, no DSL or another version of it, no nvcc, a cache that cannot be written, or a compile error."""
    tiles = list(tiles)
    for tile in tiles:
        if arch not in ARCHITECTURES[tile.kind]:
            raise UserError(f"kernels: {tile.name} is for {' and '.join(ARCHITECTURES[tile.kind])}, found {arch!r}: run with --backend "
                            "torch")
    cache = cuda_build.cache_folder()
    missing = [tile for tile in tiles if not (cache / target(tile, arch)).exists()]
    if not missing:
        return 0
    _check_compilers()
    from tqdm import tqdm

    workers = min(len(missing), os.cpu_count() or 1)
    with (cuda_build.building_folder(cache) as folder,
          tqdm(total=len(missing), desc="CuTeDSL kernels", unit="file", disable=None) as bar, ThreadPoolExecutor(workers) as pool):
        running = [pool.submit(_compile, missing[i::workers], arch, Path(folder), bar) for i in range(workers)]
        for done in running:
            done.result()
    return len(missing)


def _check_compilers() -> None:
    cuda_build.find_nvcc()
    try:
        found = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found != DSL:
        raise UserError(f"kernels: expected nvidia-cutlass-dsl {DSL}, found {found or 'none'}: pip install nvidia-cutlass-dsl=={DSL}, or "
                        "bring the compiled kernels in DSV4_KERNEL_CACHE")


def _compile(tiles: list[Tile], arch: str, folder: Path, bar) -> None:
    """One child process for these tiles; each object goes into the cache as soon as it is made."""
    byname = {tile.name: tile for tile in tiles}
    root = str(FOLDER.parents[2])
    environment = {**os.environ, "CUTE_DSL_ARCH": arch, "CUTE_DSL_NO_CACHE": "1",
                   "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", f"{__package__}.compile", str(folder), *byname]
    with (tempfile.TemporaryFile("w+") as errors,
          subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as child):
        for line in child.stdout:
            if (tile := byname.pop(line.strip(), None)) is not None:
                made = folder / f"{tile.name}.so", (folder / f"{tile.name}.json").read_text()
                cuda_build.compile_into(cuda_build.cache_folder(), target(tile, arch), lambda _, made=made: made)
                bar.update()
        if child.wait() or byname:
            errors.seek(0)
            raise UserError(f"kernels: {next(iter(byname), 'a tile')} does not compile for {arch} with nvidia-cutlass-dsl {DSL}:\n"
                            f"{errors.read().strip()}")


def main(argv: list[str] | None = None) -> int:
    """The command line: builds ahead. Exit code 0, or 2 with the error on stderr."""
    names, architectures = {tile.name: tile for tile in TILES}, sorted({a for each in ARCHITECTURES.values() for a in each})
    parser = argparse.ArgumentParser(prog="python -m dsv4.kernels.cute.build",
                                     description="Compiles the CuTeDSL GEMMs into the cache folder (DSV4_KERNEL_CACHE).")
    parser.add_argument("names", nargs="*", help=f"all of the architecture's unless given: {', '.join(names)}")
    parser.add_argument("--arch", default="sm_90a", choices=architectures, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        if unknown := sorted(set(args.names) - set(names)):
            raise UserError(f"kernels: expected names out of {', '.join(names)}, found {unknown[0]!r}")
        tiles = [names[name] for name in args.names] or [t for t in TILES if args.arch in ARCHITECTURES[t.kind]]
        made = build_ahead(tiles, args.arch)
        print(f"{made} compiled, {len(tiles) - made} were there: {cuda_build.cache_folder()}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
