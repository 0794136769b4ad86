"""The cache of CuTeDSL objects: what makes a new one, what a second start does, what is refused."""

import importlib.metadata
import shutil
import subprocess

import pytest

from dsv4.errors import UserError
from dsv4.kernels import build as cuda_build
from dsv4.kernels.cute import build, tiles
from dsv4.kernels.cute.tiles import TILES, Tile

TILE = Tile("bf16", 64, 128)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_child(monkeypatch):
    """A child process would be a failure."""
    def refuse(*args, **kwargs):
        raise AssertionError(f"a process was started: {args}")
    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_names_are_unique_and_objects_differ_by_all_that_they_are_made_of(monkeypatch, tmp_path):
    assert len({tile.name for tile in TILES}) == len(TILES) == len(set(TILES))
    names = {build.target(tile, arch) for tile in TILES for arch in ("sm_90a", "sm_100a")}
    assert len(names) == 2 * len(TILES)
    before = build.target(TILE, "sm_90a")
    monkeypatch.setattr(build, "DSL", "4.8.2")
    assert build.target(TILE, "sm_90a") not in names
    monkeypatch.undo()
    sources = build.FOLDER
    for name in build.SOURCES:
        folder = tmp_path / name
        shutil.copytree(sources, folder, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(build, "FOLDER", folder)
        assert build.target(TILE, "sm_90a") == before
        with (folder / name).open("a") as source:
            source.write("\n")
        assert build.target(TILE, "sm_90a") != before


def test_sources_are_all_that_the_child_imports_of_this_package():
    """Whoever adds a module there must add it to the hash."""
    imported = {line.split()[1].removeprefix(".") + ".py" for name in build.SOURCES
                for line in (build.FOLDER / name).read_text().splitlines() if line.startswith("from .") and not line.startswith("from ..")}
    assert imported | {"compile.py"} == set(build.SOURCES)


def test_a_start_compiles_what_is_missing_and_the_next_one_nothing(dsl, cache, capsys, monkeypatch):
    assert build.main([TILE.name]) == 0
    assert capsys.readouterr().out == f"1 compiled, 0 were there: {cache}\n"
    target = build.target(TILE, "sm_90a")
    assert {path.name for path in cache.iterdir()} == {target, f"{target}.txt"}  # nothing is left of the work
    report = build.report(TILE, "sm_90a")
    assert report.stack == 0 and 32 <= report.registers <= 255 and "wgmma" in report.ptx

    def refuse(*args, **kwargs):
        raise AssertionError("a second start looks for a compiler")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(build, "_check_compilers", refuse)
    assert build.build(TILE, "sm_90a") == cache / target
    assert build.main([TILE.name]) == 0
    assert capsys.readouterr().out == f"0 compiled, 1 were there: {cache}\n"


def test_a_tile_that_does_not_compile_is_named_and_leaves_nothing(dsl, cache):
    wide = Tile("bf16", 128, 512)  # an instruction has up to 256 columns, and the child knows no such tile
    with pytest.raises(UserError, match=f"{wide.name} does not compile for sm_90a with nvidia-cutlass-dsl {tiles.DSL}"):
        build.build_ahead([wide], "sm_90a")
    assert not list(cache.iterdir())


def test_a_compiler_that_fails_says_why(dsl, cache, monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo release 13.0 && exit\necho no space left >&2\nexit 3\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("DSV4_NVCC", str(nvcc))
    with pytest.raises(UserError, match=f"(?s){TILE.name} does not compile.*no space left"):
        build.build_ahead([TILE], "sm_90a")
    assert not list(cache.iterdir())


@pytest.mark.parametrize("found", ["4.7.0", None])
def test_without_the_dsl_one_line_says_what_to_install(nvcc, cache, no_child, monkeypatch, found):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError) as caught:
        build.build(TILE, "sm_90a")
    assert str(caught.value) == (f"kernels: expected nvidia-cutlass-dsl {tiles.DSL}, found {found or 'none'}: pip install "
                                 f"nvidia-cutlass-dsl=={tiles.DSL}, or bring the compiled kernels in DSV4_KERNEL_CACHE")


def test_refusals(cache, no_child, capsys):
    with pytest.raises(UserError, match="gemm_bf16_64x128 is for sm_90a, found 'sm_100a': run with --backend torch"):
        build.build(TILE, "sm_100a")
    with pytest.raises(UserError, match="gemm_nvfp4_128x128 is for sm_100a and sm_103a, found 'sm_90a'"):
        build.build_ahead(TILES, "sm_90a")
    with pytest.raises(SystemExit):
        build.main(["--arch", "sm_80"])
    assert build.main(["gemm_fp4"]) == 2
    assert "expected names out of" in capsys.readouterr().err
    assert not cache.exists()


def test_without_nvcc_nothing_is_started(cache, monkeypatch):
    monkeypatch.setenv("DSV4_NVCC", "/nonexistent/nvcc")
    with pytest.raises(UserError, match="expected /nonexistent/nvcc to be nvcc"):
        build.build(TILE, "sm_90a")
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_one_line(dsl, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="expected a folder that can be written"):
        build.build(TILE, "sm_90a")


def test_a_killed_child_s_folder_is_removed_by_the_next_build(dsl, cache, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 2**22 + 1)  # nobody's
    folder = cuda_build.building_folder(cache)
    monkeypatch.undo()
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(cache))
    folder._finalizer.detach()
    assert list(cache.iterdir())
    cuda_build.building_folder(cache).cleanup()
    assert not list(cache.iterdir())


def test_the_dsl_is_pinned_in_one_version():
    project = (build.FOLDER.parents[2] / "pyproject.toml").read_text()
    assert project.count("nvidia-cutlass-dsl") == project.count(f"nvidia-cutlass-dsl=={tiles.DSL}") == 2
