"""How the next token is drawn: the settings, and their state over one answer. The draw itself is ops.sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from . import ops
from .errors import CheckpointError, UserError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 are off; repetition_penalty above 1 makes seen tokens less likely."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self):
        for name, expected, holds in (
            ("temperature", "0 or more", self.temperature >= 0), ("top_k", "0 (off) or more", self.top_k >= 0),
            ("top_p", "above 0, at most 1", 0 < self.top_p <= 1), ("repetition_penalty", "above 0", self.repetition_penalty > 0),
        ):
            if not holds or getattr(self, name) == math.inf:
                raise UserError(f"--{name.replace('_', '-')}: expected a number {expected}, found {getattr(self, name)}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"--seed: expected 0 to 2^63 - 1, found {self.seed}")


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """So many token ids, uniform over the vocabulary."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def generation_defaults(checkpoint) -> tuple[dict, set[int]]:
    """What generation_config.json says: the settings of Sampling that it has (do_sample false is temperature 0), and the ids that end
    an answer, with those of config.json. Raises CheckpointError for values that cannot be."""
    raw, source, settings = checkpoint.generation_config, checkpoint.folder / "generation_config.json", {}
    for name, types in (("temperature", (int, float)), ("top_k", (int,)), ("top_p", (int, float)), ("repetition_penalty", (int, float))):
        if raw.get(name) is not None:
            if type(raw[name]) not in types or abs(raw[name]) >= 2**63:
                raise CheckpointError(f"{source}: {name}: expected a number, found {str(raw[name])[:40]!r}")
            settings[name] = raw[name]
    try:
        Sampling(**settings)
    except UserError as error:
        raise CheckpointError(f"{source}: {error}") from None
    if raw.get("do_sample") is False:
        settings["temperature"] = 0.0
    more, vocab = raw.get("eos_token_id"), checkpoint.config.vocab_size
    more = more if isinstance(more, list) else [] if more is None else [more]
    for i in more:
        if type(i) is not int or not 0 <= i < vocab:
            raise CheckpointError(f"{source}: eos_token_id: expected ids below {vocab}, found {str(i)[:40]!r}")
    return settings, {*checkpoint.config.eos_token_ids, *more}


class Sampler:
    """The settings, what was seen and the random numbers of one answer, on the device that makes the logits.

    Position p's draw uses the p-th number of the seed's sequence, so a seed gives the same tokens on every device that makes the same
    logits (ops/sample.py).
    """

    def __init__(self, sampling: Sampling, prompt_ids: list[int], vocab_size: int, context: int, device):
        self.sampling = sampling
        generator = torch.Generator()
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        self.uniforms = torch.rand(context, generator=generator).to(device)
        self.seen = torch.zeros(vocab_size, dtype=torch.uint8)
        self.seen[prompt_ids] = 1
        self.seen = self.seen.to(device)

    def __call__(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """logits [vocab] fp32 and the position of the token behind them, positions [S] (the last counts) -> the next token, int64 [1];
        -1 if a logit is not finite. Greedy ties go to the lowest id."""
        s = self.sampling
        return ops.sample(logits, self.seen, self.uniforms, positions, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p,
                          repetition_penalty=s.repetition_penalty)
