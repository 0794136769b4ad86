"""The build: what its cache is keyed by, builds at once and killed ones, and one clear message for each thing that goes wrong.

A shell script stands for nvcc where the compiler itself is not the subject: it writes half an object, waits, and writes the rest.
"""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from dsv4.errors import UserError
from dsv4.kernels import build

ROOT = Path(__file__).parents[2]
SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo "nvcc, release {version}"; exit 0; fi
echo run >> "{log}"
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
printf half > "$out"
sleep ${{FAKE_SECONDS:-0}}
printf "half and half" > "$out"
"""


class Fake:
    """A folder with a stand-in for nvcc, a cache, and a source of two headers."""

    def __init__(self, tmp_path, monkeypatch):
        self.folder, self.monkeypatch = tmp_path, monkeypatch
        self.log, self.cache, self.source = tmp_path / "log", tmp_path / "deep" / "cache", tmp_path / "src" / "k.cu"
        self.source.parent.mkdir()
        self.source.write_text('#include "a.cuh"\n#include <cstdint>\n')
        (self.source.parent / "a.cuh").write_text('#pragma once\n  #  include "b.cuh"\n')
        (self.source.parent / "b.cuh").write_text("#define B 1\n")
        monkeypatch.setenv("DSV4_KERNEL_CACHE", str(self.cache))
        self.install("nvcc", "1.0")

    def script(self, path: Path, version="1.0") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SCRIPT.format(log=self.log, version=version))
        path.chmod(0o755)
        return path

    def install(self, name, version):
        self.monkeypatch.setenv("DSV4_NVCC", str(self.script(self.folder / name, version)))

    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def build(self, arch="sm_90a") -> Path:
        return build.build("k", arch, self.source)

    def objects(self):
        return [p for p in self.cache.iterdir() if p.suffix == ".so"]

    def leftovers(self):
        return [p for p in self.cache.iterdir() if p.name.startswith("building-")]

    def start(self, *arguments, **environment):
        return subprocess.Popen([sys.executable, "-m", "dsv4.kernels.build", *arguments], cwd=ROOT, env={**os.environ, **environment},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return Fake(tmp_path, monkeypatch)


def test_trap_24_the_key_is_content_and_not_time(fake):
    first = fake.build()
    assert first.parent == fake.cache and first.read_text() == "half and half" and fake.runs() == 1
    later = time.time() + 1000
    for path in fake.source.parent.iterdir():
        os.utime(path, (later, later))
    assert fake.build() == first and fake.runs() == 1


def test_the_key_covers_source_direct_and_indirect_headers_architecture_flags_and_compiler(fake, monkeypatch):
    seen = {fake.build()}
    changes = [
        lambda: fake.source.write_text(fake.source.read_text() + "// more\n"),
        lambda: (fake.source.parent / "a.cuh").write_text('#include "b.cuh"\n'),
        lambda: (fake.source.parent / "b.cuh").write_text("#define B 2\n"),
        lambda: monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DX")),
        lambda: fake.install("other", "1.1"),
    ]
    for change in changes:
        change()
        seen.add(fake.build())
    seen.add(fake.build("sm_100a"))
    assert len(seen) == fake.runs() == 7 and len(fake.objects()) == 7
    fake.install("moved", "1.1")  # the same compiler in another place
    assert fake.build() in seen and fake.runs() == 7


def test_contents_cannot_be_confused_by_moving_the_border_between_files(fake):
    """Two pairs of files whose names and contents are the same when written one behind the other."""
    include = '#include "a.cuh"\n'
    fake.source.write_text(f"{include}k.cu{include}")
    (fake.source.parent / "a.cuh").write_text("12")
    first = fake.build()
    fake.source.write_text(include)
    (fake.source.parent / "a.cuh").write_text(f"12k.cu{include}")
    assert fake.build() != first


def test_an_object_appears_whole_by_a_rename(fake, monkeypatch):
    """Where the rename fails, as on a full disk, nothing has the object's name."""
    replace = os.replace

    def refuse(source, target):
        if target.suffix == ".so":
            raise OSError(28, "No space left on device")
        replace(source, target)
    monkeypatch.setattr(build.os, "replace", refuse)
    with pytest.raises(UserError, match=r"expected to write .*k-sm_90a-\w+\.so, found No space left on device: free some space"):
        fake.build()
    assert not fake.objects() and not fake.leftovers()


def test_processes_building_at_once(fake):
    running = [fake.start("mhc_post", "--arch", "sm_90a", FAKE_SECONDS="0.5") for _ in range(3)]
    for process in running:
        output = process.communicate(timeout=60)
        assert process.returncode == 0, output
    (built,) = fake.objects()
    assert built.read_text() == "half and half" and not fake.leftovers()


def test_trap_24_a_killed_build_leaves_nothing_that_is_used(fake):
    process = fake.start("mhc_post", "--arch", "sm_90a", FAKE_SECONDS="60")
    deadline = time.time() + 60
    while not (half := list(fake.cache.glob("building-*/kernel.so"))):
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert half[0].exists() and not fake.objects() and len(fake.leftovers()) == 1
    alive = fake.cache / f"building-{build.socket.gethostname()}-{os.getpid()}-x"
    alive.mkdir()  # of a process that runs
    assert build.build("mhc_post", "sm_90a").read_text() == "half and half"
    assert fake.leftovers() == [alive]


def test_compile_error_shows_the_compilers_lines_and_leaves_nothing(nvcc, tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "bad.cu"
    source.write_text("__global__ void k(float* x) {\n    x[0] = undeclared;\n}\n")
    with pytest.raises(UserError) as caught:
        build.build("bad", "sm_90a", source)
    assert "bad.cu does not compile for sm_90a with " + nvcc.path in str(caught.value)
    assert 'bad.cu(2): error: identifier "undeclared" is undefined' in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_warning_is_an_error(nvcc, tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_KERNEL_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "warns.cu"
    source.write_text("__global__ void k(float* x) {\n    int unused = 3;\n    x[0] = 1;\n}\n")
    with pytest.raises(UserError, match=r"warns.cu\(2\): (error|warning).*unused"):
        build.build("warns", "sm_90a", source)


def test_missing_header_names_the_file(fake):
    (fake.source.parent / "b.cuh").unlink()
    with pytest.raises(UserError, match=r"expected the source .*b\.cuh, found No such file"):
        fake.build()


def test_unknown_architecture(fake):
    with pytest.raises(UserError, match=r"expected an architecture out of sm_90a, sm_100a, sm_103a, found 'sm_80'"):
        fake.build("sm_80")


def test_nvcc_is_looked_for_in_four_places_in_order(fake, tmp_path, monkeypatch):
    """DSV4_NVCC, CUDA_HOME, PATH, the PyPI package; the last needs a link flag."""
    chosen = os.environ["DSV4_NVCC"]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    fake.script(tmp_path / "home" / "bin" / "nvcc")
    fake.script(tmp_path / "path" / "nvcc")
    package = fake.script(tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvcc")
    # The scripts need no PATH but for sleep, which --version does not reach.
    assert build.find_nvcc().path == chosen
    monkeypatch.delenv("DSV4_NVCC")
    assert build.find_nvcc().path == str(tmp_path / "home" / "bin" / "nvcc")
    monkeypatch.delenv("CUDA_HOME")
    assert build.find_nvcc().path == str(tmp_path / "path" / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvcc").unlink()
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    found = build.find_nvcc()
    assert found.path == str(package) and found.link == (f"-L{tmp_path / 'site' / 'nvidia' / 'cu13' / 'lib'}",)


def test_no_nvcc_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("DSV4_NVCC", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "_pypi_nvcc", lambda: None)
    with pytest.raises(UserError, match=r"found none: install the CUDA toolkit .* or pip install nvidia-cuda-nvcc==13.0.88") as caught:
        build.build("mhc_post", "sm_90a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexit 3\n"])
def test_an_nvcc_that_does_not_run(tmp_path, monkeypatch, content):
    path = tmp_path / "nvcc"
    if content:
        path.write_text(content)
        path.chmod(0o755)
    monkeypatch.setenv("DSV4_NVCC", str(path))
    with pytest.raises(UserError, match=r"expected .*/nvcc to be nvcc, found .* fails .*set DSV4_NVCC or CUDA_HOME") as caught:
        build.build("mhc_post", "sm_90a")
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written(fake, monkeypatch, tmp_path):
    """A file in the way, and a file system that takes no folders. (Tests may run as root, whom modes do not stop.)"""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "cache", Path("/proc/dsv4")):
        monkeypatch.setenv("DSV4_KERNEL_CACHE", str(place))
        with pytest.raises(UserError, match=r"expected a folder that can be written .*found .* \(.+\): set DSV4_KERNEL_CACHE") as caught:
            fake.build()
        assert str(place) in str(caught.value) and "\n" not in str(caught.value)
    assert fake.runs() == 0


def test_a_full_cache_that_cannot_be_written_serves(fake, monkeypatch):
    built = fake.build()

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")
    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", refuse)
    assert fake.build() == built
    with pytest.raises(UserError, match=r"Read-only file system"):
        fake.build("sm_100a")


def test_default_cache_folder(monkeypatch):
    monkeypatch.delenv("DSV4_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert build.cache_folder() == Path("/x/dsv4/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert build.cache_folder() == Path("/h/.cache/dsv4/kernels")


def test_command_line_builds_all_ahead_with_a_bar_on_a_terminal(fake):
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # a new one has no columns, and tqdm then writes nothing
    done = subprocess.run([sys.executable, "-m", "dsv4.kernels.build", "--all", "--arch", "sm_90a,sm_100a"], cwd=ROOT, stderr=terminal,
                          stdout=subprocess.PIPE, text=True, timeout=60)
    os.close(terminal)
    bar = os.read(master, 1 << 16).decode()
    os.close(master)
    total = 2 * len(build.names())
    assert done.returncode == 0 and done.stdout == f"{total} objects in {fake.cache}\n"
    assert f"{total}/{total}" in bar and "kernels" in bar
    assert {p.name.rsplit("-", 1)[0] for p in fake.objects()} == {f"{n}-{a}" for n in build.names() for a in ("sm_90a", "sm_100a")}


@pytest.mark.parametrize("arguments,message", [
    ([], "either --all or the names of kernels, found neither"),
    (["--all", "mhc_post"], "found both"),
    (["nothing"], f"expected names out of {', '.join(build.names())}, found 'nothing'"),
    (["--all", "--arch", "sm_90a,sm_80"], "found 'sm_80'"),
])
def test_command_line_mistakes(fake, capsys, arguments, message):
    assert build.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: kernels: ") and message in error and error.count("\n") == 1
