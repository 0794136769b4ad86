"""The synthetic checkpoint: true shapes and formats, values that keep the size of what passes through, and a model that runs on it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import single_shot_inference as script
from dsv4 import ops
from dsv4.cache import Cache, LayerCache
from dsv4.config import PRESETS
from dsv4.exports import FORMATS
from dsv4.layers import Numerics
from dsv4.model import Model
from dsv4.plan import make_plan
from dsv4.synthetic import SyntheticCheckpoint, fill
from helpers.make_checkpoint import TRUE_SIZE_FORMATS, write_true_size
from tests.test_cli import one_line, run  # noqa: F401

CPU = torch.device("cpu")
SIMPLE = ("nvidia", "official", "all-nvfp4", "bf16")


@pytest.mark.parametrize("format", FORMATS)
def test_every_linear_is_what_the_format_says_and_has_variance_1_over_in(format):
    checkpoint = SyntheticCheckpoint(PRESETS["tiny"], format, CPU)
    for name in ("layers.2.attn.wq_b", "layers.2.attn.wkv", "layers.2.ffn.experts.3.w2", "layers.2.ffn.shared_experts.w1", "head"):
        need, weight = checkpoint.needs[name], checkpoint.weight(name)
        values = weight.dequantize()
        assert weight.problem() is None and tuple(values.shape) == need.shape
        assert values.std() * need.shape[1] ** 0.5 == pytest.approx(1, abs=0.45)  # a power of two as scale is up to 1.41 off
        assert abs(values.mean()) < 0.03 * values.std() and len(values.unique()) > 15  # both signs alike, all codes
        assert weight.nbytes == checkpoint.bytes_of(need)
        assert torch.equal(values, checkpoint.weight(name).dequantize())  # a name's draw is its own
    assert checkpoint.tensor("layers.0.hc_attn_fn").dtype == torch.float32
    assert not torch.equal(checkpoint.tensor("layers.0.attn_norm.weight"), checkpoint.tensor("layers.1.attn_norm.weight"))
    table = checkpoint.tensor("layers.0.ffn.gate.tid2eid")
    assert table.shape == (1024, 2) and (table[:, 0] != table[:, 1]).all() and len(table.unique()) == 8
    other = SyntheticCheckpoint(PRESETS["tiny"], format, CPU, seed=1)
    assert not torch.equal(other.weight("head").dequantize(), checkpoint.weight("head").dequantize())


def test_bytes_are_those_of_the_published_layers():
    """A Pro CSA layer's experts, NVFP4: 14.27 GB; its attention in FP8."""
    checkpoint = SyntheticCheckpoint(PRESETS["pro"], "nvidia", "meta")
    assert checkpoint.nbytes("layers.2.ffn.experts.") == pytest.approx(14.27e9, rel=1e-3)
    assert checkpoint.nbytes("layers.2.attn.wo_b") == 16384 * 7168 * (1 + 1 / 16384)
    assert checkpoint.layer_bytes(2) > checkpoint.layer_bytes(3) > checkpoint.nbytes("layers.3.ffn.")


@pytest.mark.parametrize("format", SIMPLE)
def test_a_model_runs_on_it_and_its_streams_keep_their_size(format):
    checkpoint = SyntheticCheckpoint(PRESETS["tiny"], format, CPU)
    plan = make_plan(checkpoint, [CPU], layers=range(6), context=64, chunk=64, dtype=torch.float32, free_bytes=lambda device: 10**12)
    model, sizes = Model(checkpoint, plan, Numerics()), []
    model.on_layer = lambda n, streams: sizes.append(float(streams.settled().square().mean().sqrt()))
    logits = model.forward(list(range(40)), model.new_cache(), "all")
    assert logits.isfinite().all() and 0.3 < logits.std() < 3
    assert all(0.1 < size < 10 for size in sizes), sizes


# --------------------------------------------------------------------------------------------------------- the runner


PROMPT = ("--random-prompt", 150, "--max-new-tokens", 12)


def test_the_runner_runs_what_it_draws(run):  # noqa: F811
    """Ids in, ids out, to the last one; and the same from run to run without a seed."""
    code, out, err = run("--synthetic", "tiny", *PROMPT, "--json")
    result = json.loads(out)
    assert code == 0 and result["model"] == "synthetic tiny, nvidia" and result["finish_reason"] == "length"
    assert len(result["output_ids"]) == 12 and result["timing"]["prefill_tokens"] == len(result["prompt_ids"]) == 150
    assert len(set(result["prompt_ids"])) > 100 and max(result["prompt_ids"]) < 1024
    assert err.count("\n") == 1 and " ms/token, median " in err
    code, out, _ = run("--synthetic", "tiny", *PROMPT)
    assert code == 0 and out == " ".join(map(str, result["output_ids"])) + " \n"
    ids = ",".join(map(str, result["prompt_ids"]))
    assert run("--synthetic", "tiny", "--prompt-ids", ids, "--max-new-tokens", 12)[1] == out
    other = json.loads(run("--synthetic", "tiny", *PROMPT, "--json", "--seed", 7)[1])
    assert other["prompt_ids"] != result["prompt_ids"]


def test_the_runner_gives_what_a_folder_of_the_same_weights_gives(run, tmp_path):  # noqa: F811
    """Official and NVFP4, some layers of it; against what make_checkpoint.py writes."""
    for format in ("official", "nvidia"):
        write_true_size(tmp_path / format, PRESETS["tiny"], format, range(6))
        ways = (("--synthetic", "tiny", "--synthetic-format", format), ("--model", tmp_path / format, "--temperature", 0))
        drawn, read = (json.loads(run(*way, *PROMPT, "--layers", "1:5", "--json")[1])["output_ids"] for way in ways)
        assert len(drawn) == 12 and drawn[: len(read)] == read  # an end may come up in what is read


def test_decode_consistency_of_a_model_that_is_drawn(run):  # noqa: F811
    code, out, err = run("--synthetic", "tiny", "--random-prompt", 130, "--decode-consistency", 6)
    assert code == 0 and len(out.split()) == 6 and "decode-consistency: 7 rows of logits" in err


def test_the_measured_peak_stands_beside_the_plans(run):  # noqa: F811
    """On the CPU beside what the process held before; 256 MB of caches show in both."""
    def peaks(context):
        code = "import sys, single_shot_inference as s; sys.exit(s.main(sys.argv[1:]))"
        done = subprocess.run([sys.executable, "-c", code, "--synthetic", "tiny", "--random-prompt", "3", "--max-new-tokens", "3", "--json",
                               "--context", str(context)], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120)
        result = json.loads(done.stdout)
        return result["memory"]["host"], result["planned"]["host"]

    (least, least_planned), (most, most_planned) = peaks(64), peaks(400_000)
    assert most - least > 200 << 20 and most_planned - least_planned > 200 << 20
    assert abs(least - least_planned) < 64 << 20


def test_a_past_that_nobody_ran(run):  # noqa: F811
    """The step is at the end of it and sees it, though no token of it is run; the same keys every time."""
    def ids(*argv):
        code, out, _ = run("--synthetic", "tiny", "--prompt-ids", "5,6", "--max-new-tokens", 6, "--json", *argv)
        result = json.loads(out)
        assert code == 0 and len(result["output_ids"]) == 6 and result["timing"]["prefill_tokens"] == 2
        return result["output_ids"]

    assert ids("--past", 4093) == ids("--past", 4093) != ids()
    for past, context in ((4093, 8189), ((1 << 20) - 1, 1 << 20)):
        assert json.loads(run("--synthetic", "tiny", "--plan", "--json", "--past", past)[1])["context"] == context
    assert run("--synthetic", "tiny", "--prompt-ids", "5,6", "--max-new-tokens", 6, "--past", 1 << 20)[2].startswith(
        "error: --context: expected at most the model's 1048576 positions, found 1048584 (1048576 tokens of --past, a prompt of 2 tokens")


def test_a_filled_cache_has_finite_keys_that_differ():
    """As the definitions and as the kernels hold them."""
    for which in ("torch", "cuda"):
        ops.select_backend(which)
        try:
            caches = [Cache({n: LayerCache(PRESETS["tiny"], n, 512, 8, torch.bfloat16, CPU) for n in layers}, 512, 8)
                      for layers in (range(6), (2, 4))]
        finally:
            ops.select_backend("torch")
        for cache in caches:
            fill(cache)
        for layer in caches[0].layers.values():
            for keys in (layer.window, *(part.entries for part in (layer.main, layer.index) if part)):
                values = keys if which == "torch" else keys.unpack()
                assert values.isfinite().all() and len(values.unique(dim=0)) == len(values)
        for n in (2, 4):  # on its own as among others
            for a, b in ([c.layers[n].main.entries for c in caches], [c.layers[n].window for c in caches]):
                a, b = ((a,), (b,)) if which == "torch" else (a, b)
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("argv, words", [
    (["--past", "3", "hello"], "--past does not go without --synthetic"),
    (["--synthetic", "tiny", "--random-prompt", "3", "--past", "3", "--dump-logits", "x"], "--dump-logits does not go with --past"),
    (["--synthetic", "tiny", "--random-prompt", "3", "--past", "3", "--decode-consistency", "2"], "--decode-consistency does not go with"),
    (["--synthetic", "tiny", "--plan", "--past", "30", "--context", "30"],
     "--context: expected more than the 30 tokens of --past, found 30"),
    (["--synthetic", "tiny", "--random-prompt", "3", "--stream-weights", "host"], "whose memory is the host's: leave it out"),
    (["--synthetic", "tiny", "--random-prompt", "3", "--past", "30", "--context", "32"],
     "--context: expected at least the 30 of --past and the prompt's 3 tokens, found 32"),
    (["--synthetic", "tiny", "--random-prompt", 2 * 10**9],  # before any of them is drawn
     "--context: expected at most the model's 1048576 positions, found 2000000512 (a prompt of 2000000000 tokens and 512 new ones)"),
    (["--synthetic", "tiny"], "expected a prompt, found none"),
    (["--synthetic", "tiny", "hello"], "--synthetic does not go with PROMPT: random weights have no tokenizer: give --prompt-ids or "),
    (["--synthetic", "tiny", "--messages", "x"], "--synthetic does not go with --messages"),
    (["--synthetic", "tiny", "--model", "x", "--random-prompt", "3"], "--synthetic does not go with --model: its weights are in no folder"),
    (["--synthetic", "tiny", "--inspect"], "--synthetic does not go with --inspect"),
    (["--synthetic", "large", "--random-prompt", "3"], "--synthetic: invalid choice: 'large'"),
    (["--synthetic-format", "official", "hello"], "--synthetic-format does not go without --synthetic"),
    (["--random-prompt", "3", "hello"], "expected one prompt, found PROMPT and --random-prompt"),
    (["--random-prompt", "0"], "expected a whole number from 1"),
    (["--random-prompt", "3", "--system", "x"], "--system does not go with --random-prompt"),
    (["--random-prompt", "3", "--raw"], "--raw does not go with --random-prompt"),
    (["--random-prompt", "3", "--print-prompt"], "--print-prompt does not go with --random-prompt"),
    (["--synthetic", "tiny", "--prompt-ids", "1024"], "token id 1024: expected 0 to 1023"),
    (["--synthetic", "tiny", "--random-prompt", "3", "--layers", "2:7"], "--layers: expected at most 0:6, found 2:7"),
])
def test_wrong_arguments(run, argv, words):  # noqa: F811
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and words in one_line(err)


def test_a_random_prompt_for_a_checkpoint_with_a_tokenizer(run):  # noqa: F811
    """Its answer is text."""
    code, out, _ = run("--random-prompt", 9, "--max-new-tokens", 4, "--json", "--temperature", 0)
    result = json.loads(out)
    assert code == 0 and len(result["prompt_ids"]) == 9 and not result["text"].startswith(str(result["output_ids"][0]))


def test_a_plan_of_what_nobody_has(run):  # noqa: F811
    """Neither files nor GPUs: Flash on two H200, and nothing to read."""
    code, out, err = run("--plan", "--synthetic", "flash", "--assume", "2xH200", "--context", 131072)
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0] == "model      synthetic flash, nvidia (flash), its weights are drawn; all of 43 layers"
    assert lines[9:11] == ["host       2.00 GiB needed, free: not known", "disk       nothing: no weight is read"]
    plan = json.loads(run("--plan", "--synthetic", "flash", "--assume", "2xH200", "--context", 131072, "--json")[1])
    expert = 3 * (2048 * 4096 * 9 // 16 + 4)
    assert plan["sizes_from"] == "preset" and plan["disk"]["total"] == 0 and plan["host"]["needed"] == 2 << 30
    assert 2 * expert <= plan["devices"][0]["loading"] < 8 * expert  # no bytes that are read ahead
    code, out, _ = run("--plan", "--synthetic", "pro", "--synthetic-format", "official", "--layers", "0:9", "--assume", "1xH200", "--json")
    assert code == 0 and json.loads(out)["model"] == "synthetic pro, official"


def test_the_formats_that_the_runner_offers_are_the_releases():
    action = next(a for a in parser_of(script) if a.dest == "synthetic_format")
    assert tuple(action.choices) == TRUE_SIZE_FORMATS


def parser_of(module):
    """The arguments that the script declares."""
    seen = []

    class Seen(Exception):
        pass

    def parse_args(self, argv):
        seen.extend(self._actions)
        raise Seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.OneLineParser, "parse_args", parse_args)
        with pytest.raises(Seen):
            module.parse_arguments([])
    return seen
