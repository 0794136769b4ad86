"""helpers/bench_load.py: its rows on the bundled checkpoint, and what it refuses in one line."""

import re

import pytest

from dsv4 import loader
from helpers import bench_load
from single_shot_inference import BUNDLED as FOLDER


def test_its_rows(monkeypatch, capsys):
    monkeypatch.setattr(loader, "reading_threads", loader.reading_threads)  # which it replaces
    assert bench_load.main(["--model", str(FOLDER), "--devices", "cpu", "--layers", "1:3", "--threads", "1,2", "--repeat", "1"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert re.search(r" GB in \d shards, .* cpu, backend torch", first)
    names = [name for n in (1, 2) for name in (f"plain reads, {n} threads, one buffer each", f"plain reads, {n} threads, fresh memory")]
    assert [row[:44].strip() for row in rows] == names + [f"load, {n} reading threads" for n in (1, 2)]
    assert all(float(row[44:51]) > 0 for row in rows)


@pytest.mark.parametrize("argv,code,words", [
    (["--model", "/nope"], 3, "error: /nope: expected a checkpoint folder, found no such folder"),
    (["--model", str(FOLDER), "--layers", "4:12"], 2, "error: --layers: expected at most 0:6, found 4:12"),
])
def test_what_it_refuses(capsys, argv, code, words):
    assert bench_load.main([*argv, "--devices", "cpu"]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(words) and err.count("\n") == 1


def test_threads_that_are_none(capsys):
    with pytest.raises(SystemExit) as caught:
        bench_load.main(["--model", str(FOLDER), "--threads", "1,0"])
    assert caught.value.code == 2 and "--threads: expected a whole number from 1 to 256, found '0'" in capsys.readouterr().err
