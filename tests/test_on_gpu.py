"""What only GPUs show: the bundled checkpoint on their kernels gives the CPU's answers; graphs, prompts, splits, loading, memory and time.
Runs with DSV4_TEST_GPU=1; what needs two GPUs is skipped where there is one.

The kernels themselves are tested on a GPU by the tests of tests/kernels and tests/emulator under the same variable.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "helpers"))

import tiny_data as td  # noqa: E402

import encoding  # noqa: E402
from dsv4 import decode, loader, ops, runtime  # noqa: E402
from dsv4.checkpoint import Checkpoint  # noqa: E402
from dsv4.config import PRESETS  # noqa: E402
from dsv4.decode import Decoder, GraphDecoder, compare_with_prefill, hop_us, hops  # noqa: E402
from dsv4.errors import DoesNotFit, KernelError, UserError  # noqa: E402
from dsv4.kernels import hop as kernels_hop  # noqa: E402
from dsv4.kernels.experts import pack_experts  # noqa: E402
from dsv4.kernels.hop import linked  # noqa: E402
from dsv4.kernels.linear import pack_weights  # noqa: E402
from dsv4.kernels.packing import Packing, packed_shape  # noqa: E402
from dsv4.layers import Numerics  # noqa: E402
from dsv4.loader import load  # noqa: E402
from dsv4.model import Model  # noqa: E402
from dsv4.ops.experts import Expert  # noqa: E402
from dsv4.plan import DevicePlan, Plan, Planner, Room, Wish, make_plan  # noqa: E402
from dsv4.prefill import Prefill  # noqa: E402
from dsv4.sampler import Sampler, Sampling  # noqa: E402
from dsv4.synthetic import SyntheticCheckpoint, fill  # noqa: E402
from helpers.make_checkpoint import write_true_size  # noqa: E402
from tests.checkpoints import MINI  # noqa: E402
from tests.kernels.weights import KINDS, any_weight, pack_pair  # noqa: E402
from tests.test_loader import everything, parts_of  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("DSV4_TEST_GPU") != "1", reason="needs a GPU: set DSV4_TEST_GPU=1")
FOLDER = ROOT / "checkpoints" / "tiny"
CONTEXT = 2048
BF16 = Numerics(dtype=torch.bfloat16)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


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
    yield Model(checkpoint, plan, BF16)
    ops.select_backend("torch")


@pytest.fixture(scope="module")
def tokenizer():
    return encoding.Tokenizer(FOLDER / "tokenizer.json")


def greedy(model, kind=GraphDecoder):
    last = model.plan.devices[-1].device
    return kind(model, model.new_cache(), Sampler(Sampling(temperature=0), [], model.config.vocab_size, CONTEXT, last))


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


# ------------------------------------------------------------------------------------------------- prompts, several devices


def random_prompt(model, length: int, seed: int) -> list[int]:
    return torch.randint(model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read_by_launches(model, ids: list[int], cache) -> torch.Tensor:
    """The logits after a prompt whose chunks are waited for one by one."""
    for i in range(0, len(ids), cache.chunk):
        logits = model.forward(ids[i : i + cache.chunk], cache)
    return logits


def split_over(devices: tuple[int, ...]) -> Model:
    """The bundled model in as many shares; two shares of one GPU are two stages."""
    checkpoint = Checkpoint.open(FOLDER)
    layers = tuple(range(checkpoint.config.num_hidden_layers))
    cuts = [round(i * len(layers) / len(devices)) for i in range(len(devices) + 1)]
    shares = tuple(DevicePlan(torch.device("cuda", d), layers[a:b], 0, 0, 0, 0) for d, a, b in zip(devices, cuts, cuts[1:], strict=False))
    return Model(checkpoint, Plan(layers, shares, CONTEXT, ops.max_tokens(), False), BF16)


def synchronisations(work) -> int:
    """How often the host waits for a GPU within `work`, as torch counts; waiting for an event does not count."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return len([w for w in seen if "synchroniz" in str(w.message)])


@pytest.mark.parametrize("devices", [(0,), (0, 0), (0, 0, 0), pytest.param((0, 1), marks=two_gpus), pytest.param((1, 0), marks=two_gpus),
                                     pytest.param((0, 1, 0, 1), marks=two_gpus)])
def test_any_split_gives_the_bits_of_one_gpu(model, devices, seed):
    """A prompt on captured chunks and its ragged end, logits and 40 steps on graphs, against one GPU's, launch by launch; twice, as the
    second prompt finds the graphs."""
    split, ids = split_over(devices), random_prompt(model, 1003, seed)
    one = greedy(model, Decoder)
    parts = greedy(split)
    reader = Prefill(split, parts.cache)
    for prompt in (ids, ids[::-1]):
        one.cache.reset()
        parts.cache.reset()
        want, got = read_by_launches(model, prompt, one.cache), reader.read(prompt)
        assert torch.equal(want.cpu(), got.cpu())
        tokens = one.sample(want), parts.sample(got)
        for _ in range(40):
            assert tokens[0] == tokens[1] and torch.equal(one.logits.cpu(), parts.logits.cpu())
            tokens = one.step(), parts.step()
    assert all(stage.replay is not None for stage in reader._stages)
    # The ids go to each stage's device before the first chunk; a step waits for its token.
    one.cache.reset()
    parts.cache.reset()
    waits = synchronisations(lambda: reader.read(ids))
    assert waits <= 2 * len(devices), waits  # and not 126 chunks'
    parts.sample(reader.read([5]))
    parts.step()
    assert 1 <= synchronisations(lambda: [parts.step() for _ in range(10)]) <= 10


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
def test_a_prompt_in_chunks_of_more_than_8(model, monkeypatch, seed):
    """1,500 tokens in chunks of 128 and a ragged one, every row of logits against decode's kernels, 8 at a time, as decode is held to a
    prefill; captured chunks give the bits of single launches, and so does a second prompt."""
    assert runtime.choose_steps(Checkpoint.open(FOLDER), model.plan.layers, [torch.device("cuda", 0)]) is None
    assert ops.max_tokens() == 1024
    try:
        ids, small = random_prompt(model, 1500, seed), model.plan
        monkeypatch.setattr(model, "plan", replace(small, chunk=128))
        rows, reader = torch.empty(len(ids), model.config.vocab_size), Prefill(model, model.new_cache())
        reader.read(ids, lambda n, some: rows[reader.cache.position - n : reader.cache.position].copy_(some), rows=True)
        reader.cache.reset()
        captured = reader.read(ids)
        assert all(stage.replay is not None for stage in reader._stages)
        with monkeypatch.context() as patch:
            patch.setattr(decode, "captures", lambda: False)
            single = Prefill(model, model.new_cache())
            assert torch.equal(single.read(ids), captured) and torch.equal(single.read(ids[:40]), reader.read(ids[:40]))
        reader.cache.reset()
        assert torch.equal(reader.read(ids), captured)
        monkeypatch.setattr(model, "plan", small)
        told, failure = compare_with_prefill(model, ids, rows, 1)
        print(told)
        assert failure is None, told
    finally:
        ops.select_backend("cuda")


def flash_layers(count: int, devices: list[torch.device], context: int):
    """So many drawn layers of Flash in equal shares: (model, a filled cache)."""
    checkpoint = SyntheticCheckpoint(PRESETS["flash"], "nvidia", "cpu")
    rooms = [Room(d, runtime.free_bytes(d)) for d in devices]
    wish = Wish(range(count), context, ops.max_tokens(), torch.bfloat16, per_device=(count // len(devices),) * len(devices), drawn=True)
    model = Model(checkpoint, Planner(checkpoint, rooms, wish).fitting(), BF16)
    cache = model.new_cache()
    fill(cache)
    return model, cache


@two_gpus
def test_chunks_overlap_on_two_gpus(model, monkeypatch):
    """Six layers of Flash, three a GPU: a prompt takes at most two thirds of the time that it takes with one chunk at a time. Half would be
    all of it; chunks choose different numbers of experts, and the copies take their time. And a hop is what it was measured as, roughly."""
    flash, cache = flash_layers(6, [torch.device("cuda", 0), torch.device("cuda", 1)], 8192)
    ids, seconds = random_prompt(flash, 800, 1), {}
    for name, ahead, graphs in (("overlapping", None, True), ("one chunk at a time", 0, True), ("overlapping, no graphs", None, False)):
        with monkeypatch.context() as patch:
            if not graphs:
                patch.setattr(decode, "captures", lambda: False)
            reader, times = Prefill(flash, cache, ahead), []
            for _ in range(4):
                cache.reset()
                start = time.perf_counter()
                logits = reader.read(ids)
                torch.cuda.synchronize(logits.device)
                times.append(time.perf_counter() - start)
            seconds[name] = min(times[1:])  # the first captures
    hop = hop_us(flash)
    print("; ".join(f"{name} {len(ids) / t:.0f} tokens/s" for name, t in seconds.items()) + f"; hop {hop:.2f} us")
    assert seconds["overlapping"] <= seconds["one chunk at a time"] * 2 / 3, seconds
    assert 1 < hop < 50


@two_gpus
def test_hops_by_peer_stores_give_the_bits_of_one_gpu(model, monkeypatch, seed):
    """200 steps on two GPUs whose graphs hand on streams and token by themselves, and by copies with events, against one GPU's. The hop of
    Pro's streams (57,344 bytes) costs at most 5 us, which the issue asks for: events took 8.7, and a flag alone takes 0.7 one way."""
    two = [torch.device("cuda", i) for i in range(2)]
    assert linked(*two) and linked(*two[::-1]), "these GPUs cannot write each other's memory: by events"
    ids, one = random_prompt(model, 37, seed), greedy(model)
    tokens, rows, split = [prefill(one, ids)], [one.logits.cpu()], split_over((0, 1))
    for _ in range(200):
        tokens.append(one.step())
        rows.append(one.logits.cpu())
    told = {}
    for way in ("peer stores", "events"):
        with monkeypatch.context() as patch:
            if way == "events":
                patch.setattr(decode, "linked", lambda sender, receiver: False)
            assert hops(split) == way
            decoder = greedy(split)
            assert all((stage.arrives is not None) == (way == "peer stores") for stage in decoder._stages)
            assert prefill(decoder, ids) == tokens[0]
            for i in range(200):
                assert decoder.step() == tokens[i + 1], (way, i)
                assert torch.equal(decoder.logits.cpu(), rows[i + 1]), (way, i)
            assert prefill(decoder, ids) == tokens[0]
            again, times = timed_steps(decoder, 200)
            assert again == tokens[1:]
            shares = tuple(DevicePlan(d, (i,), 0, 0, 0, 0) for i, d in enumerate(two))
            pro = SimpleNamespace(config=PRESETS["pro"], numerics=BF16, plan=Plan((0, 1), shares, CONTEXT, 8, False))
            told[way] = hop_us(pro)
            print(f"{way}: hop {told[way]:.2f} us; a step of the bundled model {1e6 * statistics.median(times):.1f} us")
    assert 0.7 < told["peer stores"] <= 5, told


@two_gpus
def test_a_gpu_that_never_sends_is_an_error_and_no_hang(model, monkeypatch):
    """The first GPU's part of a step is left out: one line, after the limit, and the next prompt is answered as ever."""
    monkeypatch.setattr(kernels_hop, "LIMIT_MS", 300)
    decoder = greedy(split_over((0, 1)))
    want = [prefill(decoder, [5, 6, 7]), *(decoder.step() for _ in range(5))]
    first = decoder._stages[0]
    replay, first.replay, start = first.replay, lambda: None, time.perf_counter()
    with pytest.raises(KernelError, match=r"^hop to cuda:1: expected the streams of cuda:0 within 0.3 s, found none: [^\n]*$"):
        decoder.step()
    assert 0.3 <= time.perf_counter() - start < 3
    first.replay = replay
    assert [prefill(decoder, [5, 6, 7]), *(decoder.step() for _ in range(5))] == want


# -------------------------------------------------------------------------------------------------------- loading, memory


@pytest.mark.parametrize("devices", [(0,), (0, 0, 0), pytest.param((0, 1), marks=two_gpus)])
@pytest.mark.parametrize("piece,slot", [(1 << 12, 1 << 10), (1 << 16, 1 << 12), (1 << 25, 1 << 23)])
@pytest.mark.parametrize("packs", [False, True])
def test_what_comes_through_pinned_slots_is_what_the_checkpoint_reads(model, tmp_path, monkeypatch, devices, piece, slot, packs):
    """With and without kernels. Small slots are filled many times over while the copies before are under way."""
    write_true_size(tmp_path / "release", MINI, "nvidia", range(4), seed=2, threads=1)
    monkeypatch.setattr(loader, "PIECE", piece)
    monkeypatch.setattr(loader, "SLOT", slot)
    for folder in (tmp_path / "release", FOLDER):
        checkpoint = Checkpoint.open(folder)
        parts = [replace(part, packs=packs) for part in parts_of(checkpoint, [torch.device("cuda", d) for d in devices])]
        for _ in range(2):
            made = load(checkpoint, parts)
            for part in parts:
                for name, values in everything(checkpoint, checkpoint, part.needs).items():
                    for want, got in zip(values, made[part.name][name], strict=True):
                        if torch.is_tensor(want):
                            assert got.device == part.device and got.dtype == want.dtype and got.shape == want.shape, name
                            assert torch.equal(want.contiguous().view(torch.uint8), got.cpu().contiguous().view(torch.uint8)), name
                        else:
                            assert want == got, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows,columns", [(96, 544), (2048, 4096)])
def test_what_a_gpu_packs_is_what_the_definition_packs(model, kind, rows, columns):
    """Every byte and factor of experts and merged weights, slices of one buffer; the host waits for nothing before it asks for factors."""
    device, rng = torch.device("cuda", 0), torch.Generator().manual_seed(rows)
    experts = [Expert(*(any_weight(rng, kind, *shape) for shape in ((rows, columns), (columns, rows), (rows, columns)))) for _ in range(3)]

    def there(weight):
        buffer = torch.empty(weight.payload.nbytes + 4, dtype=torch.uint8, device=device)[4:]
        payload = buffer.view(weight.payload.dtype) if weight.payload.element_size() == 1 else weight.payload.to(device).view(-1)
        payload = payload.view(weight.payload.shape)
        payload.view(torch.uint8).copy_(weight.payload.view(torch.uint8))
        return replace(weight, payload=payload, scale=None if weight.scale is None else weight.scale.to(device))

    on_gpu = [Expert(*map(there, expert)) for expert in experts]
    want, got = pack_experts(experts[:2], experts[2]), pack_experts(on_gpu[:2], on_gpu[2])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(want[:5], got[:5], strict=True)) and want[5:] == got[5:]
    weights = [any_weight(rng, kind, rows, columns) for _ in range(3)]
    on_gpu = [there(weight) for weight in weights]
    want = pack_weights(tuple(weights))
    assert torch.equal(pack_weights(tuple(on_gpu)).data.cpu(), want.data)
    packing, out = Packing(2, device), torch.empty(packed_shape(weights[0].kind, rows, columns, 8), dtype=torch.uint8, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packing.pair(0, *on_gpu[:2], out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    data, factors = pack_pair(*weights[:2])
    assert tuple(packing.factors()) == factors and torch.equal(out.cpu(), data)
    if kind == "nvfp4":
        on_gpu[1].scale.view(torch.uint8)[-1, -1] = 0x7F
        with pytest.raises(UserError, match="packing: expected NVFP4 scales that are numbers, found NaN"):
            pack_weights(tuple(on_gpu))


def used() -> tuple[int, int]:
    """Bytes of torch's tensors, and what all of this GPU's memory has in use."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


@pytest.mark.parametrize("drawn", [False, True])
def test_a_gpu_whose_memory_runs_out_while_loading(model, tmp_path, monkeypatch, drawn):
    """The rest is taken by somebody else after the plan was made: one line, and all memory is back although the error is held."""
    device, layers = torch.device("cuda", 0), tuple(range(4))
    if drawn:
        checkpoint = SyntheticCheckpoint(PRESETS["flash"], "nvidia", "cpu")
    else:  # 170 MB
        config = replace(PRESETS["tiny"], num_hidden_layers=4, compress_ratios=(0,) * 4, n_routed_experts=128, moe_intermediate_size=1024)
        write_true_size(tmp_path / "release", config, "nvidia", range(4), seed=2, threads=2)
        checkpoint = Checkpoint.open(tmp_path / "release")
    size = sum(checkpoint.layer_bytes(n) for n in layers)

    def bring(layers):
        return Model(checkpoint, Plan(layers, (DevicePlan(device, layers, 0, 0, 0, 0),), 64, 8, False), BF16)

    monkeypatch.setattr(loader, "AHEAD", 1 << 20)
    bring((0,))  # what is made once and stays: tables
    before = used()
    filler = torch.empty(torch.cuda.mem_get_info()[0] - size // 2, dtype=torch.uint8, device=device)
    allocated = torch.cuda.memory_allocated()
    with pytest.raises(DoesNotFit) as caught:
        bring(layers)
    left = torch.cuda.memory_allocated()
    text = str(caught.value)
    print(text)
    assert left == allocated and "\n" not in text
    assert text.startswith("cuda:0: out of memory while loading ") and "are free" in text and "or more missing" in text
    del filler
    after = used()
    assert after[0] == before[0] and after[1] - before[1] <= 64 << 20, (before, after)  # kernels that packing loaded


def test_ctrl_c_while_loading_gives_all_back(model):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    checkpoint, calls = Checkpoint.open(FOLDER), []
    layers = tuple(range(checkpoint.config.num_hidden_layers))
    plan = Plan(layers, (DevicePlan(torch.device("cuda", 0), layers, 0, 0, 0, 0),), 64, 8, False)
    before, threads = used(), threading.active_count()

    def on_progress(*event):
        calls.append(event)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Model(checkpoint, plan, BF16, on_progress)
    after = used()
    assert 5 <= len(calls) < 20 and threading.active_count() == threads  # what had been read by then is told
    assert after[0] == before[0] and after[1] - before[1] <= 64 << 20, (before, after)


def test_load_run_unload_20_times(model, tokenizer):
    """In one process, without growth of the GPU's memory or the host's from the fourth time on."""
    prompt = tokenizer.encode(encoding.render([{"role": "user", "content": "What is the capital of France?"}])) * 20
    seen, answers = [], set()
    for _ in range(20):
        again = split_over((0, 0))
        decoder = greedy(again)
        decoder.sample(Prefill(again, decoder.cache).read(prompt))
        answers.add(tuple(decoder.step() for _ in range(50)))
        del again, decoder
        seen.append((*used(), torch.cuda.memory_reserved(), runtime.resident_bytes()))
    for sizes in seen:
        print("tensors {:.1f} MiB, GPU {:.0f}, reserved {:.0f}, host {:.0f}".format(*(size / 2**20 for size in sizes)))
    growth = [last - first for first, last in zip(seen[3], seen[-1], strict=True)]
    assert len(answers) == 1 and growth[0] == 0 and growth[2] <= 0, growth
    assert growth[1] <= 16 << 20 and growth[3] <= 64 << 20, growth  # the driver's own; 4 MiB of the host a time would be a leak


@pytest.mark.parametrize("devices", ["cuda:0", pytest.param("cuda:0,cuda:1", marks=two_gpus)])
@pytest.mark.parametrize("past", [4000, 130_000])
def test_the_plan_is_within_3_percent_of_what_is_measured(devices, past):
    """Six layers of Flash with embedding and head, a prompt on captured chunks and decoding, as the last line of a run has it."""
    done = subprocess.run(
        [sys.executable, "single_shot_inference.py", "--synthetic", "flash", "--layers", "0:6", "--devices", devices, "--past", str(past),
         "--random-prompt", "200", "--max-new-tokens", "20", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    for device in devices.split(","):
        measured, planned, reserved = (result[name][device] for name in ("memory", "planned", "reserved"))
        print(f"{device}: measured {measured / 2**20:.0f} MiB, planned {planned / 2**20:.0f}, {100 * (measured / planned - 1):+.2f} %, "
              f"torch's allocator {reserved / 2**20:.0f}")
        assert abs(measured / planned - 1) <= 0.03
    print(f"host: measured {result['memory']['host'] / 2**20:.0f} MiB, planned {result['planned']['host'] / 2**20:.0f}")
