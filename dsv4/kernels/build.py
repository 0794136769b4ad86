"""Compiles dsv4/kernels/cuda/NAME.cu with nvcc to one shared object an architecture, and keeps it in a cache folder.

An object's file name holds a hash of everything that it is made from: its source with the local headers it includes, the flags and
nvcc's version text. No time stamps and no lock files: a build happens in a folder of its own inside the cache and ends with one
rename, so builds at the same time do each other's work at worst, and a killed one leaves a folder that the next build removes.

    python -m dsv4.kernels.build --all --arch sm_90a,sm_100a

The environment variables are in docs/kernels.md. This module needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

SOURCES = Path(__file__).parent / "cuda"
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")  # H100 and H200, B200, B300
# Every part is pinned: nvidia-cuda-nvcc alone brings the newest nvvm, whose PTX its ptxas refuses.
PYPI = ("nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.88 "
        "nvidia-cuda-cccl==13.0.85")
FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-Werror", "all-warnings", "-Xptxas", "-v", "-shared", "-Xcompiler", "-fPIC")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_BUILDING = "building-"


def names() -> list[str]:
    """Every kernel source's name."""
    return sorted(path.stem for path in SOURCES.glob("*.cu"))


def cache_folder() -> Path:
    """DSV4_KERNEL_CACHE, else dsv4/kernels under XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("DSV4_KERNEL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4" / "kernels"


@dataclass(frozen=True)
class Nvcc:
    """The compiler, its version text, and the link flags that its place needs."""

    path: str
    version: str
    link: tuple[str, ...] = ()


def _pypi_nvcc() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if found := sorted(Path(folder).glob("cu*/bin/nvcc")):
            return found[-1]
    return None


def find_nvcc() -> Nvcc:
    """DSV4_NVCC, CUDA_HOME/bin, PATH, then the PyPI package. Raises UserError if there is none or it does not run."""
    link: tuple[str, ...] = ()
    if chosen := os.environ.get("DSV4_NVCC"):
        path = chosen
    elif (home := os.environ.get("CUDA_HOME")) and Path(home, "bin", "nvcc").exists():
        path = str(Path(home, "bin", "nvcc"))
    elif on_path := shutil.which("nvcc"):
        path = on_path
    elif package := _pypi_nvcc():
        path, link = str(package), (f"-L{package.parent.parent / 'lib'}",)  # its nvcc.profile looks in lib64, which is not there
    else:
        raise UserError("kernels: expected nvcc in DSV4_NVCC, CUDA_HOME/bin, PATH or this Python's packages, found none: install the CUDA "
                        f"toolkit (12.8 or newer), or pip install {PYPI}")
    return Nvcc(path, _version(path), link)


@functools.lru_cache
def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"kernels: expected {path} to be nvcc, found that `{path} --version` fails ({_short(error)}): set DSV4_NVCC or "
                        "CUDA_HOME to a working one") from None
    return done.stdout


def _short(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def closure(source: Path) -> dict[str, bytes]:
    """The source and every local header it includes, directly or not: relative path -> content. The toolkit's own headers are not in
    it; nvcc's version stands for them."""
    found: dict[str, bytes] = {}
    todo = [source]
    while todo:
        path = todo.pop()
        key = os.path.relpath(path, source.parent)
        if key in found:
            continue
        try:
            found[key] = path.read_bytes()
        except OSError as error:
            raise UserError(f"kernels: expected the source {path}, found {_short(error)}: reinstall dsv4") from None
        todo += [path.parent / name for name in _INCLUDE.findall(found[key].decode())]
    return found


def content_hash(source: Path, *settings: str) -> str:
    """20 hex digits of the source with its includes and the settings (flags, compiler version, architecture)."""
    digest = hashlib.sha256()
    for part in [*(p for item in sorted(closure(source).items()) for p in (item[0].encode(), item[1])), *(s.encode() for s in settings)]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


def compile_into(cache: Path, target: str, make) -> Path:
    """cache/target, made by make(folder) -> (file, report text) if it is not there. The report goes to the same name + ".txt".

    Raises UserError if the cache cannot be written; what `make` raises passes through, and leaves nothing behind.
    """
    path = cache / target
    if path.exists():
        return path
    with building_folder(cache) as name:
        made, report = make(Path(name))
        try:
            text = Path(name) / "report.txt"
            text.write_text(report)
            os.replace(text, cache / f"{target}.txt")  # first, so that an object never lacks its report
            os.replace(made, path)
        except OSError as error:
            raise UserError(f"kernels: expected to write {path}, found {_short(error)}: free some space there, or set DSV4_KERNEL_CACHE "
                            "to another folder") from None
    return path


def building_folder(cache: Path) -> tempfile.TemporaryDirectory:
    """A folder of this process inside the cache, so that what is made there gets its place by a rename. Removes those of killed builds.

    Raises UserError if the cache cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_dead_builds(cache)
        mine = f"{_BUILDING}{socket.gethostname()}-{os.getpid()}-"
        return tempfile.TemporaryDirectory(dir=cache, prefix=mine, ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"kernels: expected a folder that can be written for compiled kernels, found {cache} ({_short(error)}): "
                        "set DSV4_KERNEL_CACHE to another folder") from None


def _remove_dead_builds(cache: Path) -> None:
    """Folders of builds of this host whose process is gone. Other hosts' are left, as their processes cannot be seen from here."""
    for folder in cache.glob(f"{_BUILDING}{socket.gethostname()}-*"):
        pid = folder.name.rsplit("-", 2)[1]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (PermissionError, ValueError):
            pass  # alive, and another user's; or not one of ours


def build(name: str, arch: str, source: Path | None = None) -> Path:
    """The shared object of kernel `name` for `arch`, from the cache or compiled now. `source` replaces cuda/NAME.cu.

    Raises UserError: unknown architecture, no nvcc, a cache that cannot be written, or a compile error (with the compiler's lines).
    """
    if arch not in ARCHITECTURES:
        raise UserError(f"kernels: expected an architecture out of {', '.join(ARCHITECTURES)}, found {arch!r}")
    source = source or SOURCES / f"{name}.cu"
    nvcc = find_nvcc()
    flags = (*FLAGS, *nvcc.link, "-gencode", f"arch=compute_{arch[3:]},code={arch}")
    target = f"{name}-{arch}-{content_hash(source, *FLAGS, arch, nvcc.version)}.so"

    def compile_one(folder: Path) -> tuple[Path, str]:
        made = folder / "kernel.so"
        done = subprocess.run([nvcc.path, *flags, "-o", str(made), str(source)], capture_output=True, text=True)
        if done.returncode or not made.exists():
            raise UserError(f"kernels: {name}.cu does not compile for {arch} with {nvcc.path}:\n{(done.stdout + done.stderr).strip()}")
        return made, done.stdout + done.stderr

    return compile_into(cache_folder(), target, compile_one)


@dataclass(frozen=True)
class Usage:
    """What ptxas says about one entry function."""

    entry: str
    registers: int
    stack: int  # bytes, as are the spills
    spill_stores: int
    spill_loads: int


def usage(built: Path) -> list[Usage]:
    """ptxas' report of a built object; [] for one without kernels (read_to_gpu). Raises ValueError if the report has no entry: one in an
    unknown form says nothing about spills."""
    text = Path(f"{built}.txt").read_text()
    if text.split() == ["ptxas", "info", ":", "0", "bytes", "gmem"]:
        return []
    pattern = (r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
               r".*?Used (\d+) registers")
    found = [Usage(entry, int(registers), int(stack), int(stores), int(loads))
             for entry, stack, stores, loads, registers in re.findall(pattern, text, re.DOTALL)]
    if not found or len(found) != text.count("Compiling entry function"):
        raise ValueError(f"{built}.txt: no report of ptxas for each entry function")
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line: builds ahead, with a progress bar. Exit code 0, or 2 with the first error on stderr."""
    parser = argparse.ArgumentParser(prog="python -m dsv4.kernels.build",
                                     description="Compiles kernels into the cache folder (DSV4_KERNEL_CACHE).")
    parser.add_argument("names", nargs="*", help=f"kernels: {', '.join(names())}")
    parser.add_argument("--all", action="store_true", help="every kernel")
    parser.add_argument("--arch", default="sm_90a,sm_100a",
                        help=f"comma-separated, out of {', '.join(ARCHITECTURES)} (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        if unknown := sorted(set(args.names) - set(names())):
            raise UserError(f"kernels: expected names out of {', '.join(names())}, found {unknown[0]!r}")
        if args.all == bool(args.names):
            raise UserError("kernels: expected either --all or the names of kernels, found " + ("both" if args.all else "neither"))
        jobs = [(name, arch.strip()) for name in (args.names or names()) for arch in args.arch.split(",")]
        build_ahead(jobs)
        print(f"{len(jobs)} objects in {cache_folder()}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def build_ahead(jobs: list[tuple[str, str]]) -> None:
    """Builds these (kernel, architecture), several at once, under a bar. Raises UserError as `build` does, at the first that fails."""
    from tqdm import tqdm

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, tqdm(total=len(jobs), desc="kernels", unit="file", disable=None) as bar:
        running = [pool.submit(build, *job) for job in jobs]
        try:
            for done in as_completed(running):
                done.result()
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


if __name__ == "__main__":
    sys.exit(main())
