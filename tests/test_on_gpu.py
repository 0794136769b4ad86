"""The bundled checkpoint on a GPU's kernels: the CPU's answers, graphs, memory and time over many steps. Runs with DSV4_TEST_GPU=1.

The kernels themselves are tested on a GPU by the tests of tests/kernels and tests/emulator under the same variable.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "helpers"))

import tiny_data as td  # noqa: E402

import encoding  # noqa: E402
from dsv4 import ops, runtime  # noqa: E402
from dsv4.checkpoint import Checkpoint  # noqa: E402
from dsv4.decode import Decoder, GraphDecoder, compare_with_prefill  # noqa: E402
from dsv4.layers import Numerics  # noqa: E402
from dsv4.model import Model  # noqa: E402
from dsv4.plan import make_plan  # noqa: E402
from dsv4.sampler import Sampler, Sampling  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("DSV4_TEST_GPU") != "1", reason="needs a GPU: set DSV4_TEST_GPU=1")
FOLDER = ROOT / "checkpoints" / "tiny"
CONTEXT = 2048


@pytest.fixture(scope="module")
def model():
    runtime.prepare_torch(1 << 30)
    device = torch.device("cuda", 0)
    checkpoint = Checkpoint.open(FOLDER)
    layers = range(checkpoint.config.num_hidden_layers)
    assert runtime.choose_backend("auto", checkpoint, layers, [device], torch.bfloat16, "model", "auto") is None
    assert ops.selected_backend() == "cuda"
    plan = make_plan(checkpoint, [device], layers=layers, context=CONTEXT, chunk=ops.max_tokens(), dtype=torch.bfloat16,
                     free_bytes=runtime.free_bytes, expand=False)
    yield Model(checkpoint, plan, Numerics(dtype=torch.bfloat16))
    ops.select_backend("torch")


@pytest.fixture(scope="module")
def tokenizer():
    return encoding.Tokenizer(FOLDER / "tokenizer.json")


def greedy(model, kind=GraphDecoder):
    return kind(model, model.new_cache(), Sampler(Sampling(temperature=0), [], model.config.vocab_size, CONTEXT, "cuda:0"))


def prefill(decoder, ids: list[int]) -> int:
    """A new sequence; its first token."""
    decoder.cache.reset()
    for i in range(0, len(ids), decoder.cache.chunk):
        logits = decoder.model.forward(ids[i : i + decoder.cache.chunk], decoder.cache)
    return decoder.sample(logits)


def test_the_answers_of_all_questions_are_the_cpus(model, tokenizer):
    """Every fact once: the completion that the CPU gives, which is right in every one (checkpoints/tiny/README.md)."""
    decoder, wrong = greedy(model), []
    items = td.fact_items(phrasings=1)
    for item in items:
        prompt, completion = (tokenizer.encode(encoding.Prompt.raw(text)) for text in (item.prompt, item.completion))
        tokens = [prefill(decoder, prompt)]
        while len(tokens) < len(completion):
            tokens.append(decoder.step())
        if tokens != completion:
            wrong.append(item.key)
    assert not wrong, f"{len(wrong)} of {len(items)}: {wrong}"


def test_graphs_give_the_tokens_of_single_steps(model, tokenizer):
    prompt = tokenizer.encode(encoding.render([{"role": "user", "content": "What is the capital of France?"}]))
    runs = []
    for kind in (Decoder, GraphDecoder):
        decoder = greedy(model, kind)
        runs.append([prefill(decoder, prompt)] + [decoder.step() for _ in range(300)])  # past CSA and HCA blocks and the window
    assert runs[0] == runs[1]


def test_decode_equals_a_fresh_prefill(model, tokenizer):
    prompt = tokenizer.encode(encoding.render([{"role": "user", "content": "What is the capital of Peru?"}]))
    decoder = greedy(model)
    ids, rows = [*prompt, prefill(decoder, prompt)], torch.empty(CONTEXT, model.config.vocab_size)
    rows[len(prompt) - 1] = decoder.logits
    for _ in range(700):  # 175 CSA entries, more than the 128 that are selected
        ids.append(decoder.step())
        rows[len(ids) - 2] = decoder.logits
    told, failure = compare_with_prefill(model, ids[:-1], rows, len(prompt))
    print(told)
    assert failure is None, told


def timed_steps(decoder, count: int) -> tuple[list[int], list[float]]:
    """The next tokens, and the seconds that each took."""
    tokens, times = [], []
    for _ in range(count):
        start = time.perf_counter()
        tokens.append(decoder.step())
        times.append(time.perf_counter() - start)
    return tokens, times


def test_1000_steps_leave_memory_flat_and_time_within_3_percent(model):
    """The same 200 steps at the start of the same sequence, before and after 1,000 steps, in turn, so that clocks and heat do not decide.
    That a step takes longer at the end of these 1,000 is growth with the context, and printed: the indexer selects from 512 tokens on."""
    decoder, prompt, ratios, growth, seen = greedy(model), list(range(3, 40)), [], [], set()

    def start():
        prefill(decoder, prompt)
        tokens, times = timed_steps(decoder, 200)
        seen.add(tuple(tokens))
        return statistics.median(times)

    for _ in range(2):  # captures; and a prompt beside the graph's memory, for which torch takes another 2 MiB once
        start()
        timed_steps(decoder, 1000)
    memory = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(7):
        before = start()
        _, times = timed_steps(decoder, 1000)
        ratios.append(start() / before)
        growth.append(statistics.median(times[-200:]) / before)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == memory
    drift = statistics.median(ratios)
    print(f"after 1,000 steps the same steps take {drift:.3f} of their time ({min(ratios):.3f} to {max(ratios):.3f}); those at positions "
          f"1037 to 1236 take {statistics.median(growth):.3f} of those at 37 to 236")
    assert drift <= 1.03, ratios
    assert len(seen) == 1  # and give the same tokens


def test_one_synchronisation_a_token(model):
    decoder = greedy(model)
    prefill(decoder, [5, 6, 7])
    decoder.step()  # captures
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(10):
                decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 1 <= len([w for w in seen if "synchroniz" in str(w.message)]) <= 10
