"""Decoding: step by step and by captured graphs the same tokens and logits; and the check of decoding against a fresh prefill."""

from __future__ import annotations

import contextlib
import queue
import threading

import pytest
import torch

from dsv4 import decode, kernels, ops
from dsv4.decode import Decoder, GraphDecoder, compare_with_prefill, decoder, hop_us, hops
from dsv4.errors import CheckpointError, KernelError, UserError
from dsv4.kernels import hop
from dsv4.plan import DevicePlan, Plan
from dsv4.sampler import Sampler, Sampling
from tests.emulator.emulator import emulated, needs_gxx
from tests.memory_checkpoint import CPU, model_of, random_checkpoint

CONTEXT = 60


@pytest.fixture
def model():
    return model_of(random_checkpoint("small", 0), CONTEXT)


def fake_capture(device, work):
    """A capture where there is no GPU: `work` runs at once, and its first replay is that run; later ones fill the same tensors."""
    out, replays = work(), []

    def replay():
        if replays:
            again = work()
            for old, new in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (out, again)), strict=True):
                if old is not None:
                    old.copy_(new)
        replays.append(device)

    return replay, out


def answer(kind, model, prompt, steps, **sampling):
    """(tokens, the rows of logits they were drawn from, seen) of a prompt read in two pieces."""
    cache = model.new_cache()
    sampler = Sampler(Sampling(**sampling), prompt, model.config.vocab_size, CONTEXT, CPU)
    it = kind(model, cache, sampler)
    model.forward(prompt[:3], cache, "none")
    tokens, rows = [it.sample(model.forward(prompt[3:], cache))], [it.logits.clone()]
    for _ in range(steps):
        tokens.append(it.step())
        rows.append(it.logits.clone())
    assert cache.position == len(prompt) + steps
    return tokens, torch.stack(rows), sampler.seen


def split(model, devices):
    """The model in so many shares of the CPU."""
    layers = model.plan.layers
    cuts = [round(i * len(layers) / devices) for i in range(devices + 1)]
    shares = tuple(DevicePlan(CPU, layers[a:b], 0, 0, 0, 0) for a, b in zip(cuts, cuts[1:], strict=False))
    model.plan = Plan(layers, shares, CONTEXT, CONTEXT, False)


def test_a_capture_is_on_a_stream_of_its_gpu(monkeypatch):
    """torch.cuda.graph without one takes a stream of the GPU that was captured on first: the second GPU's work would run, uncaptured."""
    log, there = [], torch.device("cuda", 1)

    class Graph:
        def replay(self):
            log.append("replay")

    @contextlib.contextmanager
    def inside(what, *args):
        log.append((what, *args))
        yield
        log.append(("end", what))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device))
    monkeypatch.setattr(torch.cuda, "device", lambda device: inside("device", device))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream=None: inside("graph", stream))
    replay, out = decode.capture(there, lambda: log.append("work") or 7)
    assert log == [("device", there), ("graph", ("stream", there)), "work", ("end", "graph"), ("end", "device")] and out == 7
    replay()
    assert log[5:] == [("device", there), "replay", ("end", "device")]


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 2.0, "seed": 5, "repetition_penalty": 1.5}])
def test_graphs_give_the_tokens_of_single_steps(model, monkeypatch, seed, sampling, devices):
    """Also in several shares: token, position and streams go from stage to stage. Past a CSA block, and with the seen tokens' penalty: a
    trial run that left a trace in the cache, the position or the seen tokens would show."""
    prompt = torch.randint(model.config.vocab_size, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
    want = answer(Decoder, model, prompt, 20, **sampling)
    split(model, devices)
    monkeypatch.setattr(decode, "capture", fake_capture)
    tokens, rows, seen = answer(GraphDecoder, model, prompt, 20, **sampling)
    assert tokens == want[0] and torch.equal(seen, want[2])
    torch.testing.assert_close(rows, want[1], rtol=0, atol=1e-5)


class Links:
    """Which stages get a hop, as `linked` is asked for them: of the first stage (from the last), of the second, and so on."""

    def __init__(self, *answers):
        self.answers, self.asked = answers, 0

    def __call__(self, sender, receiver):
        self.asked += 1
        return self.answers[(self.asked - 1) % len(self.answers)]


@needs_gxx
@pytest.mark.parametrize("links", [(True, True), (True, True, True), (False, True, True), (True, False, True)])
def test_hops_give_the_tokens_of_copies(model, monkeypatch, seed, links):
    """Streams and token through the emulated kernel, or some of them through copies; a second sequence on the same graphs, from a position
    where the stages stand by chance."""
    prompt = torch.randint(model.config.vocab_size, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
    monkeypatch.setattr(decode, "capture", fake_capture)
    split(model, len(links))
    runs = []
    for linked in (Links(False), Links(*links)):
        monkeypatch.setattr(decode, "linked", linked)
        with emulated():
            cache, rows = model.new_cache(), []
            it = GraphDecoder(model, cache, Sampler(Sampling(temperature=0), [], model.config.vocab_size, CONTEXT, CPU))
            asked = [linked.answers[i % len(linked.answers)] for i in range(len(links))]
            assert [stage.arrives is not None for stage in it._stages] == asked
            for ids in (prompt[:3], prompt):  # to position 7, and another 7 tokens
                cache.reset()
                it.sample(model.forward(ids, cache))
                for _ in range(4):
                    it.step()
                    rows.append(it.logits.clone())
            runs.append(torch.stack(rows))
    assert torch.equal(*runs)


@needs_gxx
def test_a_hop_that_waits_in_vain_is_an_error_and_the_next_answer_is_right(model, monkeypatch):
    """What the first stage sends is lost once; then a step is broken off between the stages. Numbers of steps still pair up."""
    monkeypatch.setattr(decode, "capture", fake_capture)
    monkeypatch.setattr(decode, "linked", Links(True))
    monkeypatch.setattr(hop, "LIMIT_MS", 5)
    split(model, 2)
    with emulated():
        cache = model.new_cache()
        it = GraphDecoder(model, cache, Sampler(Sampling(temperature=0), [], model.config.vocab_size, CONTEXT, CPU))

        def answer(steps=3):
            cache.reset()
            return [it.sample(model.forward([5, 6, 7], cache))] + [it.step() for _ in range(steps)]

        want, (first, second) = answer(), it._stages
        answer(1), answer(0)  # so that what was sent last is of the same position
        for lost in (second, first):  # the streams; the token, of which the step before has sent another one
            with monkeypatch.context() as patch:
                patch.setattr(lost.arrives, "send", lambda *_: None)
                with pytest.raises(KernelError, match=r"^hop to cpu: expected the streams of cpu within 0.005 s, found none: [^\n]*$"):
                    it.step()
            assert answer() == want
            answer(0)
        replay = second.replay
        second.replay = lambda: 1 // 0
        with pytest.raises(ZeroDivisionError):
            it.step()
        second.replay = replay
        assert answer() == want


def test_the_graphs_follow_a_cache_that_others_extend(model, monkeypatch):
    monkeypatch.setattr(decode, "capture", fake_capture)
    cache = model.new_cache()
    it = GraphDecoder(model, cache, Sampler(Sampling(temperature=0), [], model.config.vocab_size, CONTEXT, CPU))
    it.sample(model.forward([5, 6, 7], cache))
    it.step()
    it.sample(model.forward([8, 9], cache))  # a second turn
    it.step()
    other = model.new_cache()
    model.forward([5, 6, 7], other)
    first = int(model.forward([5, 6, 7], model.new_cache()).argmax())
    model.forward([first], other)
    expected = model.forward([int(model.forward([8, 9], other).argmax())], other)
    torch.testing.assert_close(it.logits, expected, rtol=0, atol=1e-5)


def test_a_full_cache_and_non_finite_logits_are_errors(model, monkeypatch):
    monkeypatch.setattr(decode, "capture", fake_capture)
    for kind in (Decoder, GraphDecoder):
        cache = model.new_cache()
        it = kind(model, cache, Sampler(Sampling(temperature=0), [], model.config.vocab_size, CONTEXT, CPU))
        it.sample(model.forward(list(range(CONTEXT)), cache))
        with pytest.raises(UserError, match=f"caches hold {CONTEXT} tokens, found {CONTEXT + 1}"):
            it.step()
    model.head.norm = model.head.norm * float("nan")
    cache = model.new_cache()
    cache.position = 3
    it = GraphDecoder(model, cache, Sampler(Sampling(temperature=0), [], model.config.vocab_size, CONTEXT, CPU))
    it.sample(torch.zeros(model.config.vocab_size))
    with pytest.raises(CheckpointError, match="non-finite logits after 4 tokens: .* --backend torch"):
        it.step()


def test_which_decoder(model, monkeypatch):
    def kind():
        return type(decoder(model, model.new_cache(), Sampler(Sampling(), [], model.config.vocab_size, CONTEXT, CPU)))

    assert kind() is Decoder
    monkeypatch.setattr(ops, "max_tokens", lambda: kernels.MAX_TOKENS)
    assert kind() is GraphDecoder
    monkeypatch.setattr(decode.launch, "SYNC", True)
    assert kind() is Decoder


def test_consistency_with_a_prefill_is_found_and_its_loss_too(model, seed):
    prompt = torch.randint(model.config.vocab_size, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    tokens, decoded, _ = answer(Decoder, model, prompt, 12, temperature=0)
    ids, rows = prompt + tokens[:-1], torch.full((CONTEXT, model.config.vocab_size), float("nan"))
    rows[len(prompt) - 1 : len(ids)] = decoded
    model.plan = Plan(model.plan.layers, model.plan.devices, CONTEXT, 8, False)  # the prefill in chunks
    told, failure = compare_with_prefill(model, ids, rows, len(prompt))
    assert failure is None and "13 rows" in told and "another one in 0" in told
    noise = torch.randn(2, model.config.vocab_size, generator=torch.Generator().manual_seed(seed))
    rows[len(prompt) + 4] += 0.1 * noise[0]  # one row may be another choice of expert
    told, failure = compare_with_prefill(model, ids, rows, len(prompt))
    assert failure is None and "above 0.001 in 1;" in told
    rows[len(prompt) + 5] += 0.1 * noise[1]
    told, failure = compare_with_prefill(model, ids, rows, len(prompt))
    assert "found" in failure and "2 of 13" in failure and "\n" not in failure
    rows[len(prompt) - 1 : len(ids)] = decoded * 1.001
    assert "1.0e-03 and" in compare_with_prefill(model, ids, rows, len(prompt))[1]
    rows[len(prompt) - 1 : len(ids)] = decoded
    rows[len(prompt)] = float("nan")  # alone, but never a matter of choice
    assert "found" in compare_with_prefill(model, ids, rows, len(prompt))[1]


def test_a_hop_is_half_of_a_round_trip_of_the_slowest_neighbours(model, monkeypatch):
    """The clock is ours: it counts the copies, and those of the last pair take three times as long."""
    assert hop_us(model) is None  # one device
    at, pairs, copy = [0.0], [], torch.Tensor.copy_

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = at[0]

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    def counted(self, other):
        assert self.shape == other.shape == (1, 4, model.config.hidden_size)
        at[0] += 0.003 if len(pairs) == 3 else 0.001  # ms
        return copy(self, other)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: at.__setitem__(0, at[0] + 10.0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: pairs.append(device) or contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    shares = tuple(DevicePlan(CPU, (n,), 0, 0, 0, 0) for n in range(4))
    model.plan = Plan(tuple(range(4)), shares, CONTEXT, CONTEXT, False)
    assert hop_us(model) == pytest.approx(3.0) and len(pairs) == 3


def test_a_hop_by_peer_stores_is_measured_by_a_graph_on_each_gpu(model, monkeypatch):
    """The two graphs at once, each of so many sends and receives of the same streams, under numbers that pair up and are used once."""
    trips, threads, seen, failures = 5, [], [], []

    class Pipe:
        def __init__(self, sender, receiver, nbytes):
            self.queue, self.nbytes, self.checked = queue.Queue(), nbytes, 0
            seen.append(self)

        def send(self, X, token, number):
            assert X.nbytes == self.nbytes == 4 * 4 * model.config.hidden_size and token.shape == (1,)
            self.queue.put(int(number))

        def receive(self, X, token, number):
            if self.queue.get(timeout=5) != int(number):
                failures.append(int(number))
            self.numbers = [*getattr(self, "numbers", []), int(number)]

        def check(self):
            for thread in threads:
                thread.join()
            self.checked += 1

    def captured(device, work):
        def replay():
            threads.append(threading.Thread(target=work))
            threads[-1].start()

        return replay, None

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.started = len(threads)

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return float(other.started - self.started)

    for name, value in (("Event", Event), ("_sleep", lambda cycles: None), ("device", lambda device: contextlib.nullcontext())):
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in (("Hop", Pipe), ("capture", captured), ("captures", lambda: True), ("linked", lambda a, b: True)):
        monkeypatch.setattr(decode, name, value)
    split(model, 2)
    assert hop_us(model, trips) == pytest.approx(1e3 * 2 / (2 * trips)) and not failures
    there, back = seen
    assert there.numbers == back.numbers == list(range(1, 2 * trips + 1)) and there.checked == back.checked == 2


def test_the_way_of_the_hops_is_told(model, monkeypatch):
    assert hops(model) is None
    shares = tuple(DevicePlan(torch.device("cuda", i), (i,), 0, 0, 0, 0) for i in range(3))
    model.plan = Plan(tuple(range(3)), shares, CONTEXT, CONTEXT, False)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert hops(model) == "events"  # the definitions capture nothing
    monkeypatch.setattr(decode, "captures", lambda: True)
    assert hops(model) == "peer stores"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a.index, b.index) != (1, 2))
    assert hops(model) == "peer stores; events from cuda:1 to cuda:2"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    assert hops(model) == "events"
