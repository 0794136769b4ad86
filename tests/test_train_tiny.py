"""The training code of the bundled checkpoint (helpers/tiny_*.py, train_tiny.py): data, rounding, gradients, one step.

The training forward is compared with reference/oracle.py, its fast roundings with dsv4/formats.py, its prompts with
`encoding`. The trained result is tested in test_tiny.py.
"""

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "helpers"))

import tiny_data as td  # noqa: E402
import tiny_facts as tf  # noqa: E402
import tiny_model as tm  # noqa: E402
import train_tiny as tt  # noqa: E402

import encoding  # noqa: E402
from dsv4 import formats  # noqa: E402
from dsv4.config import PRESETS  # noqa: E402
from reference import oracle  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return td.train_tokenizer()


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return td.Encoder(tokenizer)


# -------------------------------------------------------------------------------------------------------------- data
def test_facts_are_many_asked_in_four_ways_and_do_not_contradict():
    facts = tf.facts()
    assert len(facts) >= 160 and sum(f.family == "capital" for f in facts) >= 120
    assert len({(f.family, f.key) for f in facts}) == len(facts)
    answers = {}
    for fact in facts + tf.small_talk():
        assert len(set(fact.questions)) >= 4, fact
        for question in fact.questions:
            assert answers.setdefault(question, fact.answer) == fact.answer, question
    assert answers["What is the capital of France?"] == "The capital of France is Paris."


def test_sums_and_numerals_are_right():
    for fact in tf.words_and_sums():
        if fact.family == "sum":
            a, sign, b = fact.key.split()
            value = {"+": int(a) + int(b), "*": int(a) * int(b), "-": int(a) - int(b)}[sign]
            assert fact.answer.endswith(f" is {value}.") and fact.thought.count(str(value))


def test_tokenizer_is_deterministic_and_small(tokenizer):
    assert tokenizer.get_vocab_size() == td.VOCAB == PRESETS["tiny"].vocab_size
    assert td.train_tokenizer().to_str() == tokenizer.to_str()


def test_a_conversation_is_the_tokens_of_the_rendered_string(encoder):
    """Sentence-wise ids equal the whole string's, and the string is the encoder's rendering: chat, thinking, effort max,
    system, several turns (earlier ones without their reasoning)."""
    sampler = td.Sampler(encoder.tokenizer, 3)
    for think, effort, system, count in ((False, False, "", 1), (True, False, "", 1), (True, True, "", 1), (False, False, "Be short.", 2),
                                         (True, False, "Be short.", 3), (True, True, "Be short.", 2)):
        turns = [sampler.question() for _ in range(count)]
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns[:-1]:
            messages += [{"role": "user", "content": " ".join(turn.user)}, {"role": "assistant", "content": turn.answer}]
        messages.append({"role": "user", "content": " ".join(turns[-1].user)})
        rendered = encoding.render(messages, think="max" if effort else "on" if think else "off").text
        prompt = td.prompt_string(turns, think, system, effort)
        assert prompt == rendered
        ids, answers = encoder.conversation(turns, think, system, effort)
        both = prompt + td.completion_string(turns[-1], think)
        assert ids == encoder.tokenizer.encode(both, add_special_tokens=False).ids
        completion = encoder.tokenizer.encode(td.completion_string(turns[-1], think), add_special_tokens=False).ids
        assert answers[-len(completion):] == [True] * len(completion) and not answers[-len(completion) - 1]


def test_batches_fit_their_bucket_and_repeat_with_their_seed(encoder):
    sampler = td.Sampler(encoder.tokenizer, 0)
    for bucket, length in (("short", 64), ("middle", 256), ("long", 1088)):
        sampler.rng.seed("a")
        ids, answers = sampler.batch(bucket, 3, length)
        assert ids.shape == answers.shape == (3, length) and (ids[:, 0] == 0).all() and answers.any(1).all()
        assert not (answers & (ids == 2)).any(), "no loss on padding"
        text = encoder.tokenizer.decode([int(i) for i in ids[0] if i != 2], skip_special_tokens=False)
        assert encoder.tokenizer.encode(text, add_special_tokens=False).ids == [int(i) for i in ids[0] if i != 2]
        sampler.rng.seed("a")
        assert (sampler.batch(bucket, 3, length)[0] == ids).all()


@pytest.mark.parametrize("distance", [64, 128, 512, 1000])
def test_recall_prompts_hold_the_statement_once_at_its_distance(encoder, distance):
    for item in td.recall_items(encoder, distance, 8):
        statement = item.completion.removesuffix(td.EOS).split(td.END_THINK)[-1]
        assert item.prompt.count(statement) == 1
        after = encoder.piece(item.prompt[item.prompt.index(statement) + len(statement):])
        assert abs(len(after) - distance) <= 8 + 2  # sentences are up to 16 tokens long


# ----------------------------------------------------------------------------------------------------------- rounding
def test_fast_roundings_are_those_of_the_formats(rng):
    for shape in ((64, 192), (300, 130), (128, 128)):
        w = torch.randn(shape, generator=rng) * torch.logspace(-3, 1, shape[1])
        assert torch.equal(tm.fake_fp8_block(w), formats.quantize_fp8_block(w).dequantize())
    w1, w3 = (torch.randn(2, 3, 32, 64, generator=rng) * torch.rand(2, 3, 32, 1, generator=rng) for _ in range(2))
    for fake, w in zip(tm.fake_nvfp4(w1, w3), (w1, w3), strict=True):
        for i in range(2):
            for e in range(3):
                shared = formats.nvfp4_global_scale(w1[i, e], w3[i, e])
                assert torch.equal(fake[i, e], formats.quantize_nvfp4(w[i, e], shared).dequantize())
    x = torch.cat([torch.linspace(-8, 8, 641), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    assert torch.equal(tm.round_e2m1(x), torch.tensor(formats.E2M1_VALUES)[formats.round_e2m1(x).long()])
    keys = torch.randn(2, 5, 192, generator=rng)
    rounded = tm.round_keys(keys, 64, torch.tensor([1.0, 0.0]))
    assert torch.equal(rounded[1], keys[1]) and torch.equal(rounded[0, :, 128:], keys[0, :, 128:])
    # x + (rounded - x): one rounding of the sum, 2^-24 relative
    assert torch.allclose(rounded[0, :, :128], oracle.fp8_sim64(keys[0, :, :128]), rtol=2**-23, atol=1e-7)


def test_sinkhorn_has_the_models_values_and_nearly_its_gradient(rng):
    logits, upstream = (torch.randn(500, 4, 4, generator=rng) for _ in range(2))
    exact, ours = (logits.clone().requires_grad_() for _ in range(2))
    values = oracle.sinkhorn(exact, 20, 1e-6)
    (values * upstream).sum().backward()
    fast = tm.Sinkhorn.apply(ours, 20, 1e-6)
    (fast * upstream).sum().backward()
    assert torch.equal(values, fast)
    # the limit's gradient against that of 39 unrolled steps: equal up to what 20 iterations leave unconverged
    assert torch.nn.functional.cosine_similarity(exact.grad.flatten(), ours.grad.flatten(), dim=0) > 0.99
    assert 0.95 < float(ours.grad.norm() / exact.grad.norm()) < 1.05


# -------------------------------------------------------------------------------------------------------------- model
def random_state(config, seed):
    params, buffers = tm.init_params(config, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, p in params.items():  # away from neutral values, which would hide a mistake
        if name.endswith(("norm", "scale", "base", "sink")):
            p += 0.2 * torch.randn(p.shape, generator=generator)
    buffers["gate_bias"].normal_(0, 0.1, generator=generator)
    return params, buffers


def oracle_weights(config, params, buffers):
    named = tm.native(config, params, buffers)
    return lambda name: named[name] if name in named else named[name.removesuffix(".weight")]


def test_the_training_forward_is_the_oracles():
    config = dataclasses.replace(PRESETS["tiny"], index_topk=24)
    params, buffers = random_state(config, 5)
    length = 290  # past the window, two 128-blocks, and 72 CSA entries of which 24 are chosen
    ids = torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    off = tm.Switches(torch.zeros(2), torch.zeros(2), torch.ones(()))
    with torch.no_grad():
        logits, index_loss, chosen = tm.TinyModel(config, length, "cpu")(params, buffers, ids, off)
        expected = oracle.forward(config.to_dict(), oracle_weights(config, params, buffers), ids, keep_hidden=False).logits
    assert float((logits - expected).abs().max()) < 1e-4  # fp32 sums in another order; logits have a spread of 1
    assert index_loss.shape == (2, length) and bool((index_loss[:, 7:] > 0).all())  # two entries to choose from
    assert torch.equal(chosen.sum(-1), torch.full((3, 2, length), 2.0))


def test_a_step_trains_every_parameter_and_keeps_the_export_exact(tmp_path, tokenizer):
    """Short config, all buckets' code: gradients reach every parameter, the export holds the fake-quantised values."""
    config = dataclasses.replace(PRESETS["tiny"], index_topk=8)
    state = tt.State(config, 0, 1e-3, torch.device("cpu"))
    step = tt.Step(state, 2, 160)
    sampler = td.Sampler(tokenizer, 0)
    ids, answers = sampler.batch("long", 2, 160)
    step.ids.copy_(torch.from_numpy(ids))
    step.answers.copy_(torch.from_numpy(answers))
    before = state.snapshot()
    state.set_progress(10, 20)
    step()
    assert bool(torch.isfinite(step.result).all()) and float(step.result[2]) > 0
    assert [name for name, p in state.params.items() if p.grad is None or not bool(p.grad.abs().sum() > 0)] == []
    assert not torch.equal(before["gate_bias"], state.buffers["gate_bias"])
    size = tt.export(state, tokenizer, tmp_path / "tiny")
    assert size <= 12_000_000
    _, read = oracle.open_checkpoint(tmp_path / "tiny")
    expected = tm.native(config, tm.quantise_weights(state.params), state.buffers)
    for name in expected:
        stored = read(name if name.endswith((".weight", "_fn", "_base", "_scale", "attn_sink", "ape", "bias", "tid2eid"))
                      else f"{name}.weight")
        # straight-through is x + (rounded - x), one rounding more than the stored value: 2^-24 of x
        assert torch.allclose(stored.float(), expected[name].float(), rtol=2**-22, atol=1e-8), name


def test_schedule_repeats_and_begins_without_long_rows():
    plan = tt.schedule(1000, 7)
    assert plan == tt.schedule(1000, 7) and "long" not in plan[:150] and plan.count("long") > 150


def test_answered_means_greedy_generation_gives_the_completion():
    """Against an explicit greedy loop, on a toy model whose next token depends on all tokens before."""
    rng = random.Random(0)

    def logits_fn(ids):
        rows = torch.zeros(len(ids), 11)
        for i in range(len(ids)):
            rows[i, sum(ids[: i + 1]) % 11] = 1.0
        return rows

    for _ in range(50):
        prompt, n = [rng.randrange(11) for _ in range(rng.randint(1, 5))], rng.randint(1, 6)
        greedy = list(prompt)
        for _ in range(n):
            greedy.append(int(logits_fn(greedy)[-1].argmax()))
        completion = greedy[len(prompt):]
        assert td.answered(logits_fn, prompt, completion)
        at = rng.randrange(n)
        wrong = [*completion[:at], (completion[at] + 1) % 11, *completion[at + 1:]]
        assert not td.answered(logits_fn, prompt, wrong)
