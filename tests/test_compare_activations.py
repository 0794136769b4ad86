"""helpers/compare_activations.py: it measures what the model computes, shows a difference where it is made, says what it cannot do."""

import json

import pytest
import torch

from dsv4 import ops, runtime
from dsv4.checkpoint import Checkpoint
from dsv4.config import PRESETS
from dsv4.formats import Weight, e2m1_to_float
from dsv4.kernels.layouts import swiglu_scale
from dsv4.layers import Numerics
from dsv4.ops.experts import Expert, Experts, _expert, moe_ref
from dsv4.ops.quant import nvfp4_codes, nvfp4_round_trip
from dsv4.synthetic import SyntheticCheckpoint
from helpers import compare_activations
from helpers.compare_activations import EXACT, VARIANTS, Agreeing, Layers, Variant, answers, bundled_items, constant_expert, moe_by
from single_shot_inference import BUNDLED

CPU = torch.device("cpu")


def test_the_layers_are_those_of_the_model():
    """Exactly and quantised, the accumulated streams and the logits equal, bit for bit, those of a model with these numerics."""
    ids, checkpoint = list(range(3, 27)), Checkpoint.open(BUNDLED)
    runtime.prepare_torch(0)
    runs = Layers(checkpoint, ids, CPU)
    found = []
    for n in range(6):
        runs.layer(n)
        found.append({"exact": runs.exact} | runs.found)
    logits = {row.variant: row for row in runs.head()}
    models = {name: compare_activations.load(checkpoint, 24, variant) for name, variant in ({"exact": EXACT} | VARIANTS).items()}
    rows = {}
    for name, model in models.items():
        seen = []
        model.on_layer = lambda n, streams, seen=seen: seen.append(streams.settled())
        with ops.trying_kernel("moe", moe_by((VARIANTS | {"exact": EXACT})[name].expert)):
            rows[name] = model.forward(ids, model.new_cache(), "all")
        for n, X in enumerate(seen):
            assert torch.equal(X, found[n][name]), (name, n)
    for name, row in logits.items():
        again = Agreeing("logits", name)
        again.add(rows[name], rows["exact"], 0)
        assert row == again and row.divergence > 0, name


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_its_moe_is_the_operation(activations):
    torch.manual_seed(0)
    checkpoint = SyntheticCheckpoint(PRESETS["tiny"], "nvidia", CPU)
    expert = [Expert(*(checkpoint.weight(f"layers.3.ffn.{name}.{w}") for w in ("w1", "w2", "w3")))
              for name in (*(f"experts.{e}" for e in range(8)), "shared_experts")]
    x, chosen = torch.randn(9, 192), torch.stack([torch.randperm(8)[:2] for _ in range(9)]).int()
    call = x, Experts(expert[:8], expert[8]), chosen, torch.rand(9, 2), 10.0, activations, "fp8"
    assert torch.equal(moe_by(_expert)(*call), moe_ref(*call))


def test_the_constant_scale_is_that_of_a_blackwell_epilogue():
    """Block by block from the quantiser's steps; and where nothing is NVFP4 the expert is the usual one."""
    torch.manual_seed(0)
    expert = Expert(*(Weight.plain(torch.randn(shape) * shape[1] ** -0.5) for shape in ((32, 48), (48, 32), (32, 48))))
    x, weights, limit = 3 * torch.randn(5, 48), torch.rand(5), 2.0
    seen = nvfp4_round_trip(x)
    gate, up = (seen @ w.payload.T for w in (expert.w1, expert.w3))
    a = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    row = torch.full((5,), swiglu_scale(limit))
    code, scale = nvfp4_codes(a.unflatten(-1, (-1, 16)), row)
    a = e2m1_to_float(code) * (scale.float() * row[:, None])[..., None]
    want = weights[:, None] * (a.flatten(1) @ expert.w2.payload.T)
    got = constant_expert(x, expert, limit, "nvfp4", weights)
    assert (got - want).abs().max() <= 1e-6 * want.abs().max()  # the weight is applied before the sum, in fp32
    assert (got - _expert(x, expert, limit, "nvfp4", weights)).abs().max() > 1e-3 * want.abs().max()  # the row's own scale rounds otherwise
    for activations in ("bf16", "fp8"):
        assert torch.equal(constant_expert(x, expert, limit, activations, weights), _expert(x, expert, limit, activations, weights))


def louder(x, expert, limit, activations, weights):
    return 1.05 * _expert(x, expert, limit, activations, weights)


def test_a_difference_shows_where_it_is_made(monkeypatch, tmp_path, capsys):
    """`keys` differs in attention alone, `louder` in the experts alone."""
    variants = {"same": Variant(Numerics()), "louder": Variant(Numerics(), louder), "keys": Variant(Numerics(kv_quant=False))}
    monkeypatch.setattr(compare_activations, "VARIANTS", variants)
    path = tmp_path / "out.json"
    argv = ["--preset", "tiny", "--layers", "2:6", "--prompt", "20", "--json", str(path)]
    assert compare_activations.main(argv) == 0
    written = json.loads(path.read_text())
    for row in written["rows"]:
        changed = {"same": (), "louder": ("moe", "streams", "accumulated"), "keys": ("attention", "streams", "accumulated")}[row["variant"]]
        for part in ("attention", "moe", "streams", "accumulated"):
            assert (row[part]["relative"] > 0) == (part in changed), (row, part)
        if row["variant"] == "louder":
            assert abs(row["moe"]["relative"] - 0.05) < 1e-5 and row["streams"]["relative"] < 0.05 and row["experts"]["overlap"] == 1
    first, second = (next(r for r in written["rows"] if r["variant"] == "louder" and r["layer"].startswith(f"layer {n}")) for n in (2, 3))
    assert first["accumulated"] == first["streams"] and second["accumulated"] != second["streams"]
    assert [(r["variant"], r["divergence"] == 0, r["rows"]) for r in written["logits"]] == [
        ("same", True, 20), ("louder", False, 20), ("keys", False, 20)]
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 + 4 * 3 + 4 and out[2].startswith("layer 2 CSA hash     same")


def nothing(x, expert, limit, activations, weights):
    return torch.zeros_like(x)


def test_answers(monkeypatch, capsys):
    """A variant that computes the same agrees in everything; without its experts it answers nothing right."""
    monkeypatch.setattr(compare_activations, "VARIANTS", {"same": Variant(Numerics()), "nothing": Variant(Numerics(), nothing)})
    monkeypatch.setattr(compare_activations, "DISTANCES", (64, 256))
    rows = answers(bundled_items(3, 1))
    assert [(row.group, row.variant) for row in rows] == [
        (group, variant) for group in ("questions", "recall 64", "recall 256") for variant in ("exact", "same", "nothing")]
    by = {(row.group, row.variant): row for row in rows}
    questions = by["questions", "same"]
    assert (questions.prompts, questions.same, questions.right) == (3, 3, 3) and questions.rows > questions.answer_rows > 6
    for group in ("questions", "recall 64", "recall 256"):
        exact, same, none = (by[group, name] for name in ("exact", "same", "nothing"))
        assert exact.best == same.best == same.rows and same.answer_best == same.answer_rows and same.divergence == 0
        assert none.answer_best < none.answer_rows and none.same == none.right == 0 and none.worst_divergence > 0.1
        assert none.divergence <= none.rows * none.worst_divergence
    assert by["recall 256", "same"].rows > 250 > by["recall 64", "same"].rows > 64
    assert len({len(line.rstrip()) for line in capsys.readouterr().out.splitlines()}) == 1


def test_questions_are_taken_evenly():
    groups = bundled_items(5, 0)
    every = bundled_items(None, 0)["questions"]
    assert list(groups) == ["questions"] and len(every) == 502
    assert groups["questions"] == [every[i * len(every) // 5] for i in range(5)]


def test_what_cannot_be_compared(capsys, tmp_path):
    for argv, code, words in ((["--preset", "tiny", "--layers", "5:9"], 2, "--layers: expected at most 0:6"),
                              (["--model", "/nonexistent"], 3, "/nonexistent"),
                              (["--preset", "tiny", "--prompt-ids", "5000"], 2, "token id 5000"),
                              (["--preset", "tiny", "--json", str(tmp_path / "no" / "out")], 2, "--json: ")):
        assert compare_activations.main(argv) == code
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and words in error
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("flag", ["--questions", "--recall"])
def test_answers_are_the_bundled_checkpoints_alone(capsys, flag):
    with pytest.raises(SystemExit) as exit:
        compare_activations.main(["--preset", "tiny", flag, "5"])
    assert exit.value.code == 2
    assert f"error: {flag}: expected no --preset, whose layers are compared on tokens, not on answers" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--layers", "0:1"], ["--prompt-ids", "1,2"], ["--device", "cuda:0"], ["--seed", "3"]])
def test_layers_are_a_models(capsys, argv):
    with pytest.raises(SystemExit) as exit:
        compare_activations.main(argv)
    assert exit.value.code == 2 and f"error: {argv[0]}: expected --model or --preset with it" in capsys.readouterr().err
