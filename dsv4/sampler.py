"""The next token from logits: greedy at temperature 0, else a seeded draw."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

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
    """Draws on the CPU, so that a seed gives the same tokens whatever device made the logits bit for bit."""

    def __init__(self, sampling: Sampling, prompt_ids: list[int]):
        self.sampling, self.seen = sampling, set(prompt_ids)
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """logits [vocab] fp32, finite -> a token id. Greedy ties go to the lowest id."""
        s = self.sampling
        logits = logits.float().cpu()
        if s.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(self.seen), dtype=torch.long)
            score = logits[seen]
            penalty = min(max(s.repetition_penalty, 1e-30), 1e30)  # within fp32: 0 * inf would be NaN
            logits = logits.index_copy(0, seen, torch.where(score > 0, score / penalty, score * penalty))
        token = int(logits.argmax()) if s.temperature == 0 else self._draw(logits)
        self.seen.add(token)
        return token

    def _draw(self, logits):
        s = self.sampling
        # The largest logit is taken off before the division: a tiny temperature then gives -inf, not NaN.
        order = torch.sort((logits - logits.max()) / max(s.temperature, 1e-30), descending=True, stable=True)  # in fp32 1e-50 is 0
        probabilities = order.values[: s.top_k or None].softmax(-1)
        if s.top_p < 1:  # the fewest tokens whose sum reaches top_p
            probabilities = probabilities[: int((probabilities.cumsum(-1) < s.top_p).sum()) + 1]
        return int(order.indices[torch.multinomial(probabilities, 1, generator=self.generator)])
