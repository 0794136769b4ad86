"""Every kernel there is, at its place in a whole model: the same logits as with the definitions."""

import contextlib

import torch

from dsv4 import kernels, ops
from dsv4.ops import backend

from ..emulator.emulator import emulated, needs_gxx
from ..memory_checkpoint import model_of, random_checkpoint


@needs_gxx
def test_the_model_runs_on_emulated_kernels(seed):
    model = model_of(random_checkpoint("small", 0), context=16)
    ids = torch.randint(model.config.vocab_size, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    want = model.forward(ids, model.new_cache(), "all")
    calls = []

    def counted(name, kernel):
        def call(*args, **kwargs):
            calls.append(name)
            return kernel(*args, **kwargs)
        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(emulated())
        for name, kernel in kernels.wrappers().items():
            stack.enter_context(backend.trying(name, counted(name, kernel)))
        cache = model.new_cache()  # a prefill, then two tokens
        got = torch.cat([model.forward(part, cache, "all") for part in (ids[:4], ids[4:5], ids[5:])])
    assert set(calls) == kernels.wrappers().keys() and calls.count("mhc_post") == 3
    # fp32 sums in another order, as in tests/test_model.py; a wrong formula gives 0.01 and more.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert ops.rms_norm(torch.ones(1, 2), torch.ones(2), 1e-6).shape == (1, 2)  # and the definitions are back
