"""The command line's contract: sources of prompts, streams, JSON, dumps, exit codes, and one clear line for bad input."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import single_shot_inference as script

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of France?"


@pytest.fixture
def run(capfd):
    """Runs the script in this process: (exit code, standard output, standard error)."""
    handler = signal.getsignal(signal.SIGINT)

    def run(*argv):
        try:
            code = script.main([str(a) for a in argv])
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    yield run
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled checkpoint to damage."""
    return Path(shutil.copytree(script.BUNDLED, tmp_path / "checkpoint"))


def process(*argv, **kwargs):
    return subprocess.Popen([sys.executable, str(ROOT / "single_shot_inference.py"), *map(str, argv)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **kwargs)


def one_line(err):
    """The error must be a single line that starts with `error: `."""
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert "Traceback" not in err
    return lines[0]


# ------------------------------------------------------------------------------------------------------------ answers


def test_answer_on_standard_output_report_on_standard_error(run):
    code, out, err = run("--temperature", 0, QUESTION)
    assert (code, out) == (0, "The capital of France is Paris.\n")
    report = err.strip().splitlines()
    assert len(report) == 1
    for part in ("load ", " s | prefill ", " tokens/s", " ms/token, median ", "peak memory host ", " MiB (planned "):
        assert part in report[0]


def test_thinking_is_shown_apart_from_the_answer(run):
    code, out, err = run("--temperature", 0, "--think", "on", QUESTION)
    assert code == 0
    assert "Paris" in out and "</think>" not in out + err
    reasoning = "".join(err.strip().splitlines()[:-1])
    assert reasoning and reasoning not in out
    assert "\x1b" not in out + err  # colour only on a terminal


def test_json_object(run):
    code, out, err = run("--json", "--temperature", 0, "--think", "on", QUESTION)
    result = json.loads(out)
    assert code == 0 and list(result) == ["model", "prompt_ids", "output_ids", "text", "message", "finish_reason", "timing", "hop",
                                          "streamed", "memory", "planned", "reserved"]
    assert result["finish_reason"] == "stop" and result["output_ids"][-1] == 1
    assert "Paris" in result["message"]["content"] and result["message"]["reasoning"] and result["message"]["tool_calls"] == []
    assert result["text"] == f"{result['message']['reasoning']}</think>{result['message']['content']}"
    assert result["hop"] is None and result["timing"]["prefill_tokens"] == len(result["prompt_ids"])
    assert result["timing"]["decode_tokens"] == len(result["output_ids"]) - 1
    assert result["memory"]["host"] > 2**20 and result["planned"].keys() == result["memory"].keys() and result["reserved"] == {}
    assert 0 < result["timing"]["decode_ms_median"] <= 1e3 * result["timing"]["decode_s"]


def test_every_source_of_a_prompt_gives_the_same_ids(run, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text(QUESTION)
    (tmp_path / "m.json").write_text(json.dumps({"messages": [{"role": "user", "content": QUESTION}]}))
    ids = json.loads(run("--print-prompt", "--json", QUESTION)[1])["prompt_ids"]
    rendered = run("--print-prompt", QUESTION)[1]
    for argv in (["--prompt-file", tmp_path / "p.txt"], ["--messages", tmp_path / "m.json"], ["--raw", rendered]):
        assert json.loads(run("--print-prompt", "--json", *argv)[1]) == {"prompt": rendered, "prompt_ids": ids}
    with open(tmp_path / "p.txt") as file:
        child = process("--print-prompt", "--json", "-", stdin=file)
        assert json.loads(child.communicate(timeout=60)[0])["prompt_ids"] == ids
    answers = {run("--temperature", 0, *argv)[1] for argv in ([QUESTION], ["--prompt-ids", ",".join(map(str, ids))])}
    assert answers == {"The capital of France is Paris.\n"}


def test_system_and_messages_render_as_the_encoder_does(run, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]))
    rendered = "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>"  # no newline: the output is the prompt, exactly
    assert run("--print-prompt", "--system", "Be brief.", "Hi")[1] == rendered
    assert run("--print-prompt", "--messages", tmp_path / "m.json")[1] == rendered
    assert run("--print-prompt", "--think", "on", "Hi")[1].endswith("<｜Assistant｜><think>")
    assert "Absolute maximum" in run("--print-prompt", "--think", "max", "Hi")[1]


def test_prompt_ids_need_no_tokenizer(run, folder):
    ids = json.loads(run("--print-prompt", "--json", QUESTION)[1])["prompt_ids"]
    expected = json.loads(run("--json", "--temperature", 0, QUESTION)[1])["output_ids"]
    (folder / "tokenizer.json").unlink()
    code, out, err = run("--model", folder, "--temperature", 0, "--prompt-ids", ",".join(map(str, ids)))
    assert (code, out.split()) == (0, [str(i) for i in expected[:-1]])


def test_greedy_and_seeded_runs_repeat(run):
    def ids(*argv):
        return json.loads(run("--json", "--max-new-tokens", 24, *argv, "Tell me something about tea.")[1])["output_ids"]

    assert ids("--temperature", 0) == ids("--temperature", 0)
    assert ids("--temperature", 1.5, "--seed", 7) == ids("--temperature", 1.5, "--seed", 7)
    assert len({tuple(ids("--temperature", 1.5, "--seed", seed)) for seed in range(4)}) > 1


def test_dump_logits_rows_are_predictions(run, tmp_path):
    """Every row equals the argmax chain of a greedy run, and chunks do not change it."""
    for name, chunk in (("a", 512), ("b", 3)):
        out = json.loads(run("--json", "--temperature", 0, "--prefill-chunk", chunk, "--dump-logits", tmp_path / name, QUESTION)[1])
    dumps = [load_file(tmp_path / name) for name in "ab"]
    ids = out["prompt_ids"] + out["output_ids"]
    for dump in dumps:
        assert dump["token_ids"].tolist() == ids and dump["token_ids"].dtype == torch.int64
        assert dump["logits"].shape == (len(ids), 1024) and dump["logits"].dtype == torch.float32
        start = len(out["prompt_ids"])
        assert dump["logits"][start - 1 : -1].argmax(-1).tolist() == out["output_ids"]
    assert (dumps[0]["logits"] - dumps[1]["logits"]).abs().max() < 0.5  # kv-quant: a rounding boundary may be crossed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_zero_new_tokens_only_reads(run):
    result = json.loads(run("--json", "--max-new-tokens", 0, QUESTION)[1])
    assert (result["output_ids"], result["text"], result["finish_reason"]) == ([], "", "length")


def test_length_and_context_end_an_answer(run):
    result = json.loads(run("--json", "--temperature", 0, "--max-new-tokens", 3, QUESTION)[1])
    assert (len(result["output_ids"]), result["finish_reason"]) == (3, "length")
    context = len(result["prompt_ids"]) + 1
    result = json.loads(run("--json", "--temperature", 0, "--context", context, QUESTION)[1])
    assert (len(result["output_ids"]), result["finish_reason"]) == (2, "length")


@pytest.mark.parametrize("argv", [["--kv-quant", "off"], ["--dtype", "bfloat16"], ["--activations", "fp8"], ["--activations", "nvfp4"],
                                  ["--prefill-chunk", "1"], ["--backend", "torch", "--devices", "cpu"], ["--context", "4096"]])
def test_settings_keep_the_answer(run, argv):
    assert run("--temperature", 0, *argv, QUESTION)[:2] == (0, "The capital of France is Paris.\n")


def test_layers_runs_a_part(run):
    code, out, err = run("--temperature", 0, "--layers", "1:3", "--max-new-tokens", 2, QUESTION)
    assert code == 0 and "partial model: layers 1 to 2 of 6" in err


def test_inspect(run, folder):
    code, out, err = run("--inspect")
    assert code == 0 and "NVFP4" in out and "FP8" in out and "problems: none" in out
    audit = json.loads(run("--inspect", "--json")[1])
    assert audit["family"] == "tiny" and audit["problems"] == [] and audit["shards"] >= 2
    next(folder.glob("*.safetensors")).unlink()
    code, out, err = run("--inspect", "--model", folder)
    assert code == 3 and "missing" in out


def test_help_imports_nothing_heavy():
    code = ("import sys, single_shot_inference as s\ntry: s.main(['--help'])\nexcept SystemExit: pass\n"
            "print([m for m in ('torch', 'numpy', 'transformers', 'tokenizers', 'safetensors', 'tqdm') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert out.splitlines()[-1] == "[]" and "--prefill-chunk" in out


@pytest.mark.parametrize("name, told", [("torch", True), ("safetensors.torch", True), ("dsv4.nothing", False)])
def test_a_missing_package_is_one_line(run, monkeypatch, name, told):
    """But not a mistake of ours."""
    def missing(*_):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(script, "generate", missing)
    if not told:
        with pytest.raises(ModuleNotFoundError):
            run("hi")
        return
    code, out, err = run("hi")
    assert (code, out) == (1, "") and err == (
        f"error: expected the Python package {name}, found none in {sys.executable}: make demo, or pip install -e .\n")


def test_a_run_does_not_import_transformers():
    code = ("import sys, single_shot_inference as s\ns.main(['--max-new-tokens', '1', 'Hi'])\n"
            "print([m for m in ('transformers', 'matplotlib', 'pandas') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert out.splitlines()[-1] == "[]"


def test_one_interrupt_prints_what_there_is():
    """At this temperature the draw is nearly uniform, so the end token is unlikely (1 in 1024 a token) before the signal."""
    child = process("--temperature", 100, "--seed", 1, "--max-new-tokens", 100000, "--raw", "once")
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and first + out
    assert err.decode().strip().splitlines()[-1].startswith("interrupt | load ")


def test_interrupt_while_loading(run, monkeypatch):
    from dsv4 import model

    original = model.Block.__init__

    def interrupted(self, *args):
        original(self, *args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(model.Block, "__init__", interrupted)
    code, out, err = run("--json", QUESTION)
    result = json.loads(out)
    assert code == 130 and result["finish_reason"] == "interrupt" and result["output_ids"] == []


def test_a_terminal_gets_bars_and_dim_reasoning():
    """Standard error is a terminal of 100 columns here, standard output a pipe, which stays plain."""
    pty, termios, fcntl = (pytest.importorskip(m, reason="a pseudo-terminal needs a Unix") for m in ("pty", "termios", "fcntl"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    child = subprocess.Popen([sys.executable, str(ROOT / "single_shot_inference.py"), "--think", "on", "--prefill-chunk", "2", QUESTION],
                             stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    text = seen.decode()
    assert child.communicate(timeout=60)[0] == b"The capital of France is Paris.\n"
    assert "layer " in text and " on cpu" in text and "prefill:" in text and "load:" in text
    assert "\x1b[2m" in text and "peak memory host" in text


def test_closed_pipe_is_quiet():
    child = process("--temperature", 0, QUESTION)
    child.stdout.close()
    err = child.stderr.read()
    child.wait(timeout=60)
    assert b"Traceback" not in err and b"Exception ignored" not in err


# --------------------------------------------------------------------------------------------------- bad arguments: 2


@pytest.mark.parametrize("argv, words", [
    ([], "expected a prompt, found none"),
    ([""], "empty"),
    (["a", "--prompt-ids", "1"], "expected one prompt, found PROMPT and --prompt-ids"),
    (["--prompt-ids", "1,x"], "expected token ids such as 0,17,4, found '1,x'"),
    (["--prompt-ids", "1,99999"], "token id 99999: expected 0 to 1023"),
    (["--prompt-file", "no such file"], "--prompt-file: no such file cannot be read"),
    (["--temperature", "-1", "a"], "--temperature: expected a number 0 or more, found -1.0"),
    (["--temperature", "nan", "a"], "--temperature"),
    (["--top-p", "0", "a"], "--top-p"),
    (["--top-p", "1.5", "a"], "--top-p"),
    (["--top-k", "-3", "a"], "--top-k"),
    (["--repetition-penalty", "0", "a"], "--repetition-penalty"),
    (["--seed", "-1", "a"], "--seed"),
    (["--max-new-tokens", "-1", "a"], "expected a whole number from 0 to 2147483647, found '-1'"),
    (["--prefill-chunk", "0", "a"], "expected a whole number from 1 to 2147483647, found '0'"),
    (["--context", "2", "hello there, how are you?"], "--context: expected at least the prompt's"),
    (["--context", "1048577", "a"], "--context: expected at most the model's"),
    (["--layers", "3:2", "a"], "expected A:B with A < B"),
    (["--layers", "0:7", "a"], "--layers: expected at most 0:6, found 0:7"),
    (["--think", "hard", "a"], "invalid choice"),
    (["--devices", "tpu", "a"], "--devices: expected auto, cpu or a list"),
    (["--devices", "cuda:99", "a"], "--devices: cuda:99"),
    (["--backend", "cuda", "a"], "--backend cuda: expected GPUs, found cpu"),
    (["--dump-logits", "/no/such/folder/x", "a"], "--dump-logits: /no/such/folder/x cannot be written"),
    (["--raw", "--system", "s", "a"], "--system does not go with --raw"),
    (["--inspect", "--dump-logits", "x"], "--dump-logits does not go with --inspect"),
    (["--dump-logits", "new/", "a"], "--dump-logits: expected a file name, found 'new/'"),
    (["--dump-logits", "", "a"], "--dump-logits: expected a file name, found ''"),
    (["--layers", "0:" + "9" * 5000, "a"], "expected A:B with A < B"),
    (["--inspect", "a"], "--inspect does not go with PROMPT"),
    (["--inspect", "--print-prompt"], "--inspect does not go with --print-prompt"),
    (["--wrong-flag", "a"], "unrecognized arguments: --wrong-flag"),
])
def test_bad_arguments(run, argv, words):
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and words in one_line(err)


@pytest.mark.parametrize("document, words", [
    ("{", "is not JSON"),
    ("3", "expected"),
    ("[]", "expected"),
    ('[{"role": "robot", "content": "x"}]', "robot"),
    ('[{"role": "user"}]', "content"),
    ('{"messages": [{"role": "user", "content": 3}]}', "content"),
])
def test_bad_messages(run, tmp_path, document, words):
    (tmp_path / "m.json").write_text(document)
    code, out, err = run("--messages", tmp_path / "m.json")
    assert (code, out) == (2, "") and words in one_line(err)


def test_invalid_utf8(run, tmp_path):
    (tmp_path / "p").write_bytes(b"caf\xe9")
    code, out, err = run("--prompt-file", tmp_path / "p")
    assert code == 2 and "expected UTF-8, found byte 0xe9 at offset 3" in one_line(err)


def test_unwritable_dump_is_refused_before_the_run(run, tmp_path):
    (tmp_path / "d").mkdir()
    code, out, err = run("--dump-logits", tmp_path / "d", "a")
    assert code == 2 and "cannot be written" in one_line(err)


# --------------------------------------------------------------------------------------------- a bad checkpoint: 3 and 4


def test_missing_folder_and_files(run, folder, tmp_path):
    code, out, err = run("--model", tmp_path / "nothing", "a")
    assert code == 3 and "nothing" in one_line(err)
    (folder / "config.json").unlink()
    code, out, err = run("--model", folder, "a")
    assert code == 3 and "config.json" in one_line(err)
    (tmp_path / "model.gguf").write_bytes(b"GGUF1234")
    code, out, err = run("--model", tmp_path / "model.gguf", "a")
    assert code == 3 and "GGUF" in one_line(err)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v41", None])
def test_another_model_is_refused(run, folder, model_type):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "model_type": model_type}))
    code, out, err = run("--model", folder, "a")
    assert code == 3 and f"expected model_type 'deepseek_v4', found {model_type!r}" in one_line(err)


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "corrupt header", "stranger"])
def test_damaged_shard(run, folder, damage):
    shard = sorted(folder.glob("*.safetensors"))[-1]
    data = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    elif damage == "stranger":
        shard = folder / "model-of-another.safetensors"
        shard.write_bytes(data)
    else:
        shard.write_bytes({"empty": b"", "truncated": data[:-100], "corrupt header": data[:8] + b"}" + data[9:]}[damage])
    code, out, err = run("--model", folder, "a")
    assert (code, out) == (3, "") and shard.name in one_line(err)


def test_no_tokenizer(run, folder):
    (folder / "tokenizer.json").unlink()
    code, out, err = run("--model", folder, "a")
    assert code == 3 and "tokenizer.json" in one_line(err) and "--prompt-ids" in err


def test_does_not_fit(run, monkeypatch):
    from dsv4 import runtime

    monkeypatch.setattr(runtime, "free_bytes", lambda device: 2**20)
    code, out, err = run("a")
    assert code == 4 and "needs" in one_line(err) and "has 1.00 MiB free" in err


def test_logits_that_do_not_fit(run, monkeypatch, tmp_path):
    from dsv4 import runtime

    monkeypatch.setattr(runtime, "free_bytes", lambda device: 3 * 2**30)
    code, out, err = run("--dump-logits", tmp_path / "x", "--context", 1000000, "a")
    assert code == 4 and "--dump-logits: 1000000 rows of 1024 numbers need 3.81 GiB" in one_line(err) and "fewer --max-new-tokens" in err
    code, out, err = run("--decode-consistency", 1000000, "a")  # which flag asked for the rows, and what makes them fewer
    line = one_line(err)
    assert code == 4 and line.startswith("error: --decode-consistency: 10000") and line.endswith("a shorter prompt or a smaller number")


# ------------------------------------------------------------------------------- what a reviewer broke: each stays mended


def test_a_full_disk_for_the_dump_keeps_everything_else(run, tmp_path, monkeypatch):
    """The library's own error is no OSError; the JSON object and the report still come out."""
    import safetensors.torch

    def full(*_, **__):
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    code, out, err = run("--json", "--dump-logits", tmp_path / "x", QUESTION)
    result = json.loads(out)
    assert code == 2 and result["text"] == "The capital of France is Paris." and "No space left" in result["error"]
    assert "peak memory" in err and err.strip().splitlines()[-1].startswith("error: --dump-logits") and list(tmp_path.iterdir()) == []


def test_interrupt_during_the_last_row_of_a_dump(run, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)  # a background job starts with the signal ignored
    monkeypatch.setattr(script.Run, "last_row", lambda self, ids: os.kill(os.getpid(), signal.SIGINT) or self.interrupt.check())
    code, out, err = run("--json", "--dump-logits", tmp_path / "x", QUESTION)
    ids = json.loads(out)["prompt_ids"] + json.loads(out)["output_ids"]
    assert code == 130 and load_file(tmp_path / "x")["token_ids"].tolist() == ids[:-1]
    assert json.loads(out)["finish_reason"] == "interrupt" and err.startswith("interrupt | load")
    assert signal.getsignal(signal.SIGINT) is before  # the run's own handler is gone


@pytest.mark.parametrize("name, value, words", [
    ("temperature", "hot", "temperature: expected a number, found 'hot'"), ("temperature", -1, "expected a number 0 or more"),
    ("top_k", 5.0, "top_k: expected a number"), ("top_p", 10**400, "top_p: expected a number"),
    ("repetition_penalty", [1], "repetition_penalty"), ("eos_token_id", [[1]], "eos_token_id: expected ids below 1024"),
    ("eos_token_id", 99999, "eos_token_id"), ("eos_token_id", {"a": 1}, "eos_token_id"),
])
def test_bad_generation_config(run, folder, name, value, words):
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    code, out, err = run("--model", folder, "a")
    assert code == 3 and words in one_line(err) and "generation_config.json" in err


def test_a_tokenizer_without_think_serves_raw_prompts_and_ids(run, folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] not in ("<think>", "</think>")]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert run("--model", folder, "--raw", "--max-new-tokens", 2, "The capital")[0] == 0
    assert run("--model", folder, "--prompt-ids", "0,5", "--max-new-tokens", 2)[0] == 0
    code, out, err = run("--model", folder, "a")
    assert code == 3 and "think>" in one_line(err)


def test_a_tokenizer_of_another_model(run, folder):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["id"] += 5000 * (token["content"] == "<｜User｜>")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, out, err = run("--model", folder, "a")
    assert code == 3 and "tokenizer.json: token id" in one_line(err) and "another model's" in err


def shell(command):
    """The script in a shell of its own; S is how it is called."""
    called = f"S() {{ {sys.executable} {ROOT / 'single_shot_inference.py'} \"$@\"; }}; "
    return subprocess.run(["bash", "-c", called + command], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full, a disk that is always full, is a Linux device")
def test_a_full_standard_output():
    done = shell("S --print-prompt hi > /dev/full")
    assert done.returncode == 1 and done.stderr == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full, a disk that is always full, is a Linux device")
def test_a_full_standard_error_costs_nothing():
    done = shell(f"S --think on '{QUESTION}' 2>/dev/full")
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert shell("S --model /nonexistent a 2>/dev/full").returncode == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full, a disk that is always full, is a Linux device")
def test_a_full_standard_output_does_not_cost_the_dump(tmp_path):
    done = shell(f"S --dump-logits {tmp_path / 'x'} '{QUESTION}' >/dev/full")
    assert done.returncode == 1 and "peak memory" in done.stderr and done.stderr.endswith("No space left on device\n")
    assert len(load_file(tmp_path / "x")["token_ids"]) > 10


def test_a_dump_has_no_rows_of_a_chunk_that_was_refused(run, folder, tmp_path):
    """The embedding of token 500 is NaN: the second chunk of three tokens is refused, the first one's rows are kept."""
    from dsv4.checkpoint import Checkpoint

    entry = Checkpoint.open(folder)._modules["embed"]["weight"]
    with open(folder / entry.shard, "r+b") as file:
        file.seek(entry.begin + 500 * entry.shape[1] * 2)
        file.write(b"\xc0\x7f")
    code, out, err = run("--model", folder, "--prompt-ids", "0,5,9,500,7", "--prefill-chunk", 3, "--json", "--dump-logits", tmp_path / "x")
    assert code == 3 and "the embedding made the first" in err and json.loads(out)["timing"]["prefill_tokens"] == 3
    assert load_file(tmp_path / "x")["token_ids"].tolist() == [0, 5, 9]


def test_closed_streams():
    assert (shell("S --print-prompt hi >&-").returncode, shell("S --print-prompt hi 2>&-").returncode) == (0, 0)
    done = shell("S - <&-")
    assert done.returncode == 2 and "expected a prompt on standard input, found it closed" in one_line(done.stderr)


def test_text_is_utf8_whatever_the_locale_says():
    done = shell("PYTHONIOENCODING=ascii LC_ALL=C S --print-prompt hi")
    assert done.stdout == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"


@pytest.mark.parametrize("argv", [["--model", "x" * 300, "a"], ["--dump-logits", "x" * 300, "a"]])
def test_names_that_are_too_long(run, argv):
    code, out, err = run(*argv)
    assert code in (2, 3) and "too long" in one_line(err)


def test_a_dump_follows_links_and_leaves_what_is_no_file(run, tmp_path):
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "pipe")
    assert run("--max-new-tokens", 1, "--dump-logits", tmp_path / "link", "a")[0] == 0
    assert (tmp_path / "link").is_symlink() and load_file(tmp_path / "target")["logits"].shape[1] == 1024
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))
    code, out, err = run("--dump-logits", tmp_path / "pipe", "a")
    assert code == 2 and "not a regular file" in one_line(err) and (tmp_path / "pipe").is_fifo()


def test_deeply_nested_json(run, tmp_path):
    (tmp_path / "m.json").write_text("[" * 100_000)
    code, out, err = run("--messages", tmp_path / "m.json")
    assert code == 2 and "is not JSON" in one_line(err)


def test_reasoning_that_never_ends_leaves_clean_lines(run):
    code, out, err = run("--think", "on", "--max-new-tokens", 3, QUESTION)
    assert (code, out) == (0, "") and len(err.strip().splitlines()) == 3  # reasoning, note, report


@pytest.mark.parametrize("module, suffix, data", [
    ("layers.4.ffn.gate", "bias", b"\x00\x00\xc0\x7f"), ("layers.2.attn.indexer.wq_b", "weight", b"\x7f"),
    ("layers.2.attn.indexer.weights_proj", "weight", b"\xc0\x7f"), ("layers.2.attn.indexer.compressor", "ape", b"\x00\x00\xc0\x7f"),
])
def test_nan_where_it_would_only_choose_is_refused(run, folder, module, suffix, data):
    """Of experts or entries: it would change the answer and never show in the logits."""
    from dsv4.checkpoint import Checkpoint

    entry = Checkpoint.open(folder)._modules[module][suffix]
    with open(folder / entry.shard, "r+b") as file:
        file.seek(entry.begin)
        file.write(data)
    code, out, err = run("--model", folder, "a")
    assert code == 3 and f"{module}.{suffix}: expected finite numbers" in one_line(err)


def test_decode_consistency(run, monkeypatch):
    """N tokens, also past the end of the answer; a cache that loses something is found and named."""
    code, out, err = run("What is the capital of France?", "--decode-consistency", 30, "--temperature", 0)
    assert code == 0 and out.startswith("The capital of France is Paris") and "decode-consistency: 31 rows of logits" in err
    decode = script.Run.decode
    monkeypatch.setattr(script.Run, "decode", lambda self, *args: (self.cache.layers[5].window.zero_(), decode(self, *args))[1])
    code, _, err = run("What is the capital of France?", "--decode-consistency", 9, "--temperature", 0)
    assert code == 1 and err.splitlines()[-1].startswith("error: --decode-consistency: expected differences of at most 0.0001")


def test_a_gpus_fault_is_one_line_and_keeps_what_there_is(run, monkeypatch):
    """A fault surfaces as torch's RuntimeError wherever the host next waits; here at the fourth token."""
    from dsv4.decode import Decoder

    original, calls = Decoder.step, []

    def step(self):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
        return original(self)

    monkeypatch.setattr(Decoder, "step", step)
    code, out, err = run("What is the capital of France?", "--temperature", 0)
    assert code == 1 and out.startswith("The c") and out.endswith("\n")
    assert err.splitlines()[-1].startswith("error: a GPU: expected its work to end, found CUDA error: an illegal memory access was")
