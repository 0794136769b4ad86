"""The hop of a decode step from a GPU to the next: the streams and the token, pushed over the link into the next one's memory."""

from __future__ import annotations

import ctypes

import torch

from ..errors import KernelError
from .launch import IN, INOUT, PEER, Kernel, expect

LIMIT_MS = 10_000  # a step is tens of ms, hundreds under a debugger; a GPU that is waited for longer has stopped
_PROBE = -1  # the number of what is sent to try the link; those of steps are positive

_hop = Kernel("hop", {"streams": INOUT, "token": INOUT, "packets": PEER, "sequence": IN, "failed": PEER, "words": int, "receive": int,
                      "limit_ms": int})


def linked(sender: torch.device, receiver: torch.device) -> bool:
    """Whether there can be a Hop: two GPUs, of which the first can write the second's memory. On a single one a kernel that waits for a
    later one of the same stream would wait for ever."""
    return sender != receiver and sender.type == receiver.type == "cuda" and torch.cuda.can_device_access_peer(sender, receiver)


class Hop:
    """From `sender` to `receiver`: each step's `nbytes` of streams (a multiple of 8, or 0) and its token.

    Both launch and return. `sequence` int64 [1] is the step's number, from 1 up, on the device that runs: what is sent under a number is
    received under the same, once. A step's packets overwrite those of the step before, so the caller sends only when these were received.
    """

    def __init__(self, sender: torch.device, receiver: torch.device, nbytes: int):
        """Tries the link. Raises KernelError where what is sent does not come."""
        self.sender, self.receiver, self.words = sender, receiver, nbytes // 8
        self.packets = torch.zeros(self.words + 1, 2, dtype=torch.int64, device=receiver)
        self.failed = torch.zeros(1, dtype=torch.int32, pin_memory=receiver.type == "cuda")  # the host reads it, and waits for nothing
        self._failed = ctypes.c_int32.from_address(self.failed.data_ptr())  # 0.1 us a look, at each hop of each token; by torch 2
        self._probe()

    def send(self, streams: torch.Tensor | None, token: torch.Tensor, sequence: torch.Tensor) -> None:
        """On the sender: streams of `nbytes`, any shape and dtype (None: there are none), and token int64 [1]."""
        self._launch(streams, token, sequence, 0)

    def receive(self, streams: torch.Tensor | None, token: torch.Tensor, sequence: torch.Tensor) -> None:
        """On the receiver: waits for them and writes them to these. When they do not come within LIMIT_MS, `check` says so."""
        self._launch(streams, token, sequence, 1)

    def check(self) -> None:
        """Raises KernelError when a `receive` that has ended was in vain."""
        if self._failed.value:
            self._failed.value = 0
            raise KernelError(f"hop to {self.receiver}: expected the streams of {self.sender} within {LIMIT_MS / 1000:g} s, found none: a "
                              "kernel there stopped, or the link did; DSV4_SYNC=1 hops by copies and names the kernel")

    def _launch(self, streams: torch.Tensor | None, token: torch.Tensor, sequence: torch.Tensor, receive: int) -> None:
        nbytes = 0 if streams is None else streams.numel() * streams.element_size()
        expect(nbytes == 8 * self.words and token.shape == sequence.shape == (1,) and token.dtype == sequence.dtype == torch.int64, "hop",
               f"streams of {8 * self.words} bytes, token [1] and sequence [1] in int64",
               **({} if streams is None else {"streams": streams}), token=token, sequence=sequence)
        _hop(streams=streams, token=token, packets=self.packets, sequence=sequence, failed=self.failed, words=self.words, receive=receive,
             limit_ms=LIMIT_MS)

    def _probe(self) -> None:
        """Sends random bits. torch's copies make each GPU's memory the other's peer, with either of its allocators; and both kernels are
        loaded, which a capture could not. A machine may claim peers and lose what they write (an IOMMU that translates): here it shows.
        """
        sent = torch.randint(2**62, (self.words + 1,))
        here, there = sent.to(self.sender), torch.zeros_like(sent, device=self.receiver)
        there.copy_(here)
        here.copy_(there)
        there.zero_()
        for way, values in ((self.send, here), (self.receive, there)):
            way(values[:-1] if self.words else None, values[-1:], torch.full((1,), _PROBE, device=values.device))
        came = there.cpu()
        self.check()
        if not torch.equal(came, sent):
            raise KernelError(f"hop to {self.receiver}: expected to receive what {self.sender} sent, found other bits: its stores do not "
                              "reach that GPU (an IOMMU that translates them?); DSV4_SYNC=1 hops by copies")
