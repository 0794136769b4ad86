"""The hop kernel on the CPU emulator, sender and receiver one behind the other in one memory. Two GPUs: tests/test_on_gpu.py."""

import time

import pytest
import torch

from dsv4.errors import KernelError, UserError
from dsv4.kernels import hop as module
from dsv4.kernels.hop import Hop, linked

from ..emulator.emulator import emulated, needs_gxx

pytestmark = needs_gxx
CPU = torch.device("cpu")


def random_bits(rng, words):
    return torch.randint(-(2**63), 2**63 - 1, (words,), generator=rng)


def number(n):
    return torch.tensor([n])


# No streams; blocks of 256 packets that end early and exactly; the bundled model's streams in bf16, Flash's, Pro's.
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("nbytes", [0, 8, 2032, 2040, 2048, 4 * 4096 * 2, 4 * 7168 * 2])
def test_what_was_sent_comes(rng, nbytes, reverse):
    """Several steps, each over the one before; the halves of the data that look like numbers of steps are data."""
    with emulated(reverse=reverse):
        link = Hop(CPU, CPU, nbytes)
        for step in (1, 2, 3, 2**31, 2**32 - 1, 2**32 + 1):
            sent, token = random_bits(rng, nbytes // 8), random_bits(rng, 1)
            sent[::3] = step << 32 | step if step < 2**31 else -1
            got, got_token = torch.full_like(sent, -1), number(-1)
            link.send(sent if nbytes else None, token, number(step))
            link.receive(got if nbytes else None, got_token, number(step))
            link.check()
            assert torch.equal(got, sent) and torch.equal(got_token, token)


def test_any_dtype_and_shape(rng):
    X = torch.randn(1, 4, 64, generator=rng).bfloat16()
    got, token = torch.zeros_like(X), number(0)
    with emulated():
        link = Hop(CPU, CPU, X.numel() * 2)
        link.send(X, number(129_279), number(1))
        link.receive(got, token, number(1))
    assert torch.equal(got, X) and int(token) == 129_279


@pytest.mark.parametrize("sent,received", [(None, 1), (1, 2), (2, 1), (2**32, 1)])
def test_another_steps_packets_are_not_taken(rng, monkeypatch, sent, received):
    """The wait ends at the limit, with an error once, and writes nothing; the link still works."""
    monkeypatch.setattr(module, "LIMIT_MS", 20)
    streams, token = random_bits(rng, 5), random_bits(rng, 1)
    got, got_token = torch.full_like(streams, 3), number(4)
    with emulated():
        link = Hop(CPU, CPU, 40)
        if sent:
            link.send(streams, token, number(sent))
        start = time.perf_counter()
        link.receive(got, got_token, number(received))
        assert time.perf_counter() - start >= 0.02
        assert got.tolist() == [3] * 5 and got_token.tolist() == [4]
        with pytest.raises(KernelError, match=r"^hop to cpu: expected the streams of cpu within 0.02 s, found none: [^\n]* DSV4_SYNC=1 "):
            link.check()
        link.check()
        link.send(streams, token, number(9))
        link.receive(got, got_token, number(9))
        link.check()
    assert torch.equal(got, streams) and torch.equal(got_token, token)


def test_half_a_packet_is_waited_past(rng, monkeypatch):
    """The two words of a packet may come apart: one with the right number is not enough, whichever it is."""
    monkeypatch.setattr(module, "LIMIT_MS", 5)
    with emulated():
        link = Hop(CPU, CPU, 8)
        for half in (0, 1):
            link.send(random_bits(rng, 1), number(0), number(3 + half))
            link.packets[0, half] = 0
            got = number(7)
            link.receive(got, number(0), number(3 + half))
            assert int(got) == 7
            with pytest.raises(KernelError):
                link.check()


def test_a_link_that_loses_what_is_written(monkeypatch):
    """A machine's peer access may be there and not work: known before the first token."""
    launch = Hop._launch

    def losing(self, streams, token, sequence, receive):
        launch(self, streams, token, sequence, receive)
        if not receive:
            self.packets[1, 0] ^= 1 << 7

    monkeypatch.setattr(Hop, "_launch", losing)
    with emulated(), pytest.raises(KernelError, match=r"^hop to cpu: expected to receive what cpu sent, found other bits: .* by copies$"):
        Hop(CPU, CPU, 64)


def test_what_it_does_not_take():
    with emulated():
        link = Hop(CPU, CPU, 64)
        for streams, token, sequence in ((torch.zeros(7, dtype=torch.int64), number(1), number(1)), (None, number(1), number(1)),
                                         (torch.zeros(8, dtype=torch.int64), number(1).int(), number(1)),
                                         (torch.zeros(8, dtype=torch.int64), number(1), torch.ones(2, dtype=torch.int64))):
            with pytest.raises(UserError, match=r"hop: expected streams of 64 bytes, token \[1\] and sequence \[1\] in int64, found "):
                link.send(streams, token, sequence)


def test_which_devices_are_linked(monkeypatch):
    """Two GPUs of which the sender can write the receiver's memory; never one GPU, whose stream would wait for itself."""
    a, b = (torch.device("cuda", i) for i in range(2))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: (first, second) == (a, b))
    assert linked(a, b) and not linked(b, a) and not linked(a, a) and not linked(CPU, CPU) and not linked(CPU, a)
