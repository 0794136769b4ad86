"""Every operation as its kernel, in the whole bundled model on the emulator: the answer of the definitions."""

from pathlib import Path

import pytest
import torch

import encoding
from dsv4 import kernels, ops, runtime
from dsv4.checkpoint import Checkpoint
from dsv4.decode import Decoder
from dsv4.layers import Numerics
from dsv4.model import Model
from dsv4.ops import backend
from dsv4.plan import make_plan
from dsv4.sampler import Sampler, Sampling

from ..emulator.emulator import emulated, needs_gxx

FOLDER = Path(__file__).parents[2] / "checkpoints" / "tiny"
CPU = torch.device("cpu")
CONTEXT = 40
NOT_IN_BF16 = {"group_choices", "group_nvfp4", "grouped_nvfp4_linear", "grouped_swiglu_nvfp4", "nvfp4_linear", "rms_norm_to_nvfp4",
               "sum_choices", "swiglu_to_nvfp4", "to_nvfp4"}  # operations of NVFP4 activations


def load(name: str, chunk: int | None = None) -> Model:
    """In bf16 with the trained quantisers; `chunk` tokens of a prompt at once, by default 8 on the kernels."""
    ops.select_backend(name)
    if chunk:
        ops.allow_prompts()
    checkpoint = Checkpoint.open(FOLDER)
    layers, chunk = range(checkpoint.config.num_hidden_layers), chunk or ops.max_tokens() or CONTEXT
    plan = make_plan(checkpoint, [CPU], layers=layers, context=CONTEXT, chunk=chunk, dtype=torch.bfloat16, free_bytes=runtime.free_bytes,
                     expand=name == "torch")
    return Model(checkpoint, plan, Numerics(dtype=torch.bfloat16, keep_dequantised=plan.keep_dequantised))


@pytest.fixture(autouse=True)
def torch_again():
    yield
    ops.select_backend("torch")
    backend._kernels.clear()


def greedy(model: Model, prompt: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and the logits they were taken from: a prefill in chunks or at once, then steps."""
    cache, rows = model.new_cache(), []
    it = Decoder(model, cache, Sampler(Sampling(temperature=0), prompt, model.config.vocab_size, CONTEXT, CPU))
    for i in range(0, len(prompt), cache.chunk):
        logits = model.forward(prompt[i : i + cache.chunk], cache)
    tokens = [it.sample(logits)]
    rows.append(it.logits)
    for _ in range(steps):
        tokens.append(it.step())
        rows.append(it.logits)
    return tokens, torch.stack(rows)


@needs_gxx
@pytest.mark.parametrize("chunk,steps", [(None, 2), (11, 1)])
def test_the_bundled_model_answers_on_emulated_kernels(monkeypatch, chunk, steps):
    tokenizer = encoding.Tokenizer(FOLDER / "tokenizer.json")
    prompt = tokenizer.encode(encoding.render([{"role": "user", "content": "What is the capital of France?"}]))
    want, rows = greedy(load("torch"), prompt, steps)
    called = set()

    def counted(name, kernel):
        def call(*args, **kwargs):
            called.add(name)
            return kernel(*args, **kwargs)
        return call

    monkeypatch.setattr(kernels, "wrappers", lambda wrappers=kernels.wrappers: {n: counted(n, k) for n, k in wrappers().items()})
    with emulated():
        got, ours = greedy(load("cuda", chunk), prompt, steps)
    assert called == backend._definitions.keys() - NOT_IN_BF16
    assert got == want
    # bf16 on both sides: two right programs differ by roundings of 2^-9 through 6 layers, and by a choice of experts now and then.
    errors = (ours - rows).norm(dim=1) / rows.norm(dim=1)
    assert errors.max() < 0.03, errors  # 0.008 was the largest of 13 steps
