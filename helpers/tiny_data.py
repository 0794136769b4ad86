"""Training and evaluation sequences of the bundled checkpoint: tokenizer, prompt strings, batches, recall prompts.

Owns: the byte-level BPE tokenizer (trained here, with the special-token spellings of the published one), the layout of
one conversation as token ids with a loss weight per token, the batches of each length bucket, and the evaluation items.
Needs numpy and tokenizers; no torch. The prompt layout is that of the published encoder (chat: `</think>` directly
after `<｜Assistant｜>`; thinking: `<think>`; earlier turns without their reasoning); tests compare it with `encoding`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import tiny_facts as tf

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
# as in the published tokenizer: BOS, EOS and pad are `special` (dropped by skip_special_tokens), the rest are not,
# and they stand at the end of the vocabulary
ADDED = (USER, ASSISTANT, "<|EOT|>", THINK, END_THINK, "｜DSML｜", "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>",
         "<｜authority｜>", "<｜domain｜>", "<｜task｜>", "<｜title｜>", "<｜read_url｜>")
VOCAB = 1024
EFFORT_MAX = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough in your thinking and "
    "comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all "
    "potential paths, edge cases, and adversarial scenarios.\nExplicitly write out your entire deliberation process, "
    "documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no "
    "assumption is left unchecked.\n\n"
)


def train_tokenizer():
    """A byte-level BPE `tokenizers.Tokenizer` of VOCAB ids, with the pre-tokenizer rules of the published one.

    Deterministic for one version of `tokenizers`. Ids: 0 BOS, 1 EOS, 2 pad, then bytes and merges, then ADDED.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    words = (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(ADDED), special_tokens=[AddedToken(t, normalized=False) for t in (BOS, EOS, PAD)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=True, special=False) for text in ADDED])
    return tokenizer


def corpus() -> list[str]:
    """Every distinct sentence that the training set is made of, once each (recall sentences: one per key and value). Recall keys and values
    come often enough to be one token each: what a compressed entry has to carry then is small. Facts get 3 % longer by it."""
    out = []
    for fact in tf.facts() + tf.small_talk():
        out += [*fact.questions, fact.thought, fact.answer]
    out += [*tf.SYSTEM_PROMPTS, tf.UNKNOWN_THOUGHT, tf.UNKNOWN_ANSWER, EFFORT_MAX]
    out += [q.format(name) for q in tf.UNKNOWN_QUESTIONS for name in ("Zorland", "the Quambo", "a blip")]
    for kind, (statement, questions) in tf.RECALL_KINDS.items():
        keys, values = tf.recall_values(kind)
        for i in range(max(len(keys), len(values))):
            key, value = keys[i % len(keys)], values[i % len(values)]
            out += [statement.format(k=key, v=value), *(q.format(k=key) for q in questions)]
    out += [f" {word} " for kind in tf.RECALL_KINDS for words in tf.recall_values(kind) for word in words] * 30
    out += tf.filler_sentences()[::8]
    return out


def save_tokenizer(tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (the published fields: no BOS added, pad shown as EOS)."""
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(text: str) -> dict:
        return {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": True, "rstrip": False,
                "single_word": False}

    config = {"add_bos_token": False, "add_eos_token": False, "bos_token": token(BOS), "clean_up_tokenization_spaces": False,
              "eos_token": token(EOS), "model_max_length": 1048576, "pad_token": token(EOS), "unk_token": None,
              "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Turn:
    """One exchange. `user` is a tuple of sentences (joined with a space)."""

    user: tuple[str, ...]
    thought: str
    answer: str


@dataclass(frozen=True)
class Item:
    """One evaluation item: prompt string, expected completion string (EOS included), and what it belongs to."""

    group: str
    key: str
    prompt: str
    completion: str


def prompt_string(turns: list[Turn], think: bool, system: str = "", effort_max: bool = False) -> str:
    """The prompt up to the last answer, as the published encoder renders it (model.md section 12)."""
    out = BOS + (EFFORT_MAX if effort_max and think else "") + system
    for i, turn in enumerate(turns):
        last = i == len(turns) - 1
        out += USER + " ".join(turn.user) + ASSISTANT + (THINK if think and last else END_THINK)
        out += "" if last else turn.answer + EOS
    return out


def completion_string(turn: Turn, think: bool) -> str:
    return (turn.thought + END_THINK if think else "") + turn.answer + EOS


def fact_turn(fact: tf.Fact, phrasing: int) -> Turn:
    return Turn((fact.questions[phrasing % len(fact.questions)],), fact.thought, fact.answer)


class Encoder:
    """Token ids of conversations, sentence by sentence (a sentence starts at a pre-token border, so pieces add up)."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.piece = lru_cache(maxsize=200_000)(self._piece)

    def _piece(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def user(self, sentences: tuple[str, ...]) -> list[int]:
        out: list[int] = []
        for i, sentence in enumerate(sentences):
            out += self.piece(sentence if i == 0 else " " + sentence)
        return out

    def conversation(self, turns: list[Turn], think: bool, system: str = "", effort_max: bool = False):
        """(ids, answers): answers[i] is True where token i is part of a completion (the reply of any turn, EOS too)."""
        p = self.piece
        ids = [*p(BOS), *(p(EFFORT_MAX) if effort_max and think else ()), *p(system)]
        answers = [False] * len(ids)
        for i, turn in enumerate(turns):
            thinking = think and i == len(turns) - 1
            head = [*p(USER), *self.user(turn.user), *p(ASSISTANT), *p(THINK if thinking else END_THINK)]
            reply = [*(p(turn.thought) + p(END_THINK) if thinking else ()), *p(turn.answer), *p(EOS)]
            ids += head + reply
            answers += [False] * len(head) + [True] * len(reply)
        return ids, answers


class Sampler:
    """Draws training conversations from a seed. `short`, `middle` and `long` return (ids, answers)."""

    def __init__(self, tokenizer, seed: int):
        self.enc, self.rng = Encoder(tokenizer), random.Random(seed)
        self.facts, self.talk, self.filler = tf.facts(), tf.small_talk(), tf.filler_sentences()
        self.kinds = {kind: tf.recall_values(kind) for kind in tf.RECALL_KINDS}

    def batch(self, bucket: str, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """ids int64 [rows, length], right-padded with the pad id 2, and answers bool [rows, length]."""
        ids = np.full((rows, length), 2, np.int64)
        answers = np.zeros((rows, length), bool)
        for row in range(rows):
            tokens, mask = getattr(self, bucket)(length)
            ids[row, :len(tokens)], answers[row, :len(tokens)] = tokens, mask
        return ids, answers

    def system(self) -> str:
        return self.rng.choice(tf.SYSTEM_PROMPTS) if self.rng.random() < 0.2 else ""

    def question(self) -> Turn:
        r = self.rng.random()
        if r < 0.05:
            return Turn((self.rng.choice(tf.UNKNOWN_QUESTIONS).format(self.made_up()),), tf.UNKNOWN_THOUGHT, tf.UNKNOWN_ANSWER)
        if r < 0.07:
            kind = self.rng.choice(list(tf.RECALL_KINDS))
            ask = self.rng.choice(tf.RECALL_KINDS[kind][1]).format(k=self.rng.choice(self.kinds[kind][0]))
            return Turn((ask,), tf.UNKNOWN_THOUGHT, tf.UNKNOWN_ANSWER)
        fact = self.rng.choice(self.talk if r < 0.12 else self.facts)
        return fact_turn(fact, self.rng.randrange(len(fact.questions)))

    def made_up(self) -> str:
        syllables = ("zor", "bla", "qui", "mip", "vun", "tra", "xel", "gop", "fli", "dru", "yam", "kez", "woo", "sni", "puk")
        word = "".join(self.rng.choice(syllables) for _ in range(self.rng.randint(2, 3)))
        return self.rng.choice(("", "", "", "the ", "a ")) + (tf.upper(word) if self.rng.random() < 0.8 else word)

    def short(self, length: int):
        """One question, chat or thinking; a second turn when it fits."""
        while True:
            turns = [self.question() for _ in range(1 if self.rng.random() < 0.8 else 2)]
            ids, answers = self.enc.conversation(turns, self.rng.random() < 0.5, self.system())
            if len(ids) <= length:
                return ids, answers

    def statements(self, count: int) -> list[tuple[str, str, str]]:
        """`count` recallable (kind, key, value), no key twice in one kind."""
        out, seen = [], set()
        while len(out) < count:
            kind = self.rng.choice(list(self.kinds))
            keys, values = self.kinds[kind]
            key = self.rng.choice(keys)
            if (kind, key) not in seen:
                seen.add((kind, key))
                out.append((kind, key, self.rng.choice(values)))
        return out

    def recall_turn(self, known: tuple[str, str, str], before: tuple[str, ...] = ()) -> Turn:
        kind, key, value = known
        statement, asks = tf.RECALL_KINDS[kind]
        answer = statement.format(k=key, v=value)
        return Turn((*before, self.rng.choice(asks).format(k=key)), tf.RECALL_THOUGHT.format(answer), answer)

    def middle(self, length: int):
        """A quarter: conversations of several turns (some under maximal effort); the rest: recall within a short text."""
        if self.rng.random() < 0.75:
            return self.long(length)
        while True:
            count, think = self.rng.randint(1, 6), self.rng.random() < 0.5
            ids, answers = self.enc.conversation([self.question() for _ in range(count)], think, self.system(),
                                                 self.rng.random() < 0.5)
            if len(ids) <= length:
                return ids, answers

    def long(self, length: int):
        """A text of known sentences and scenes with recallable statements between, then questions until it is full."""
        rng = self.rng
        # Short texts leave room for many questions, which is where the signal is; later questions are far from the text anyway.
        text_tokens = rng.randint(20, length // 2) if rng.random() < 0.6 else rng.randint(20, length - 60)
        filler: list[str] = []
        known = self.statements(rng.randint(1, max(2, min(40, text_tokens // 16))))
        ask = rng.sample(known, len(known))  # each once: a second time, the first answer would be nearer than the text
        placed = [tf.RECALL_KINDS[kind][0].format(k=key, v=value) for kind, key, value in known]
        used = len(self.enc.user(tuple(placed)))
        while used < text_tokens:
            filler.append(rng.choice(self.filler))
            used += len(self.enc.piece(" " + filler[-1]))
        text = placed + filler
        rng.shuffle(text)
        if rng.random() < 0.8:
            turns = [self.recall_turn(ask.pop(), tuple(text))]
        else:
            turns = [Turn(tuple(text), "The user tells me something.", "I will remember that.")]
        best = None
        while True:
            ids, answers = self.enc.conversation(turns, False, "")
            if len(ids) > length:
                break
            best = ids, answers
            turns.append(self.recall_turn(ask.pop()) if ask and rng.random() < 0.9 else self.question())
        if best is None:
            return self.long(length)
        thinking = self.enc.conversation(turns[:-1], True, self.system())
        return thinking if rng.random() < 0.6 and len(thinking[0]) <= length else best


def fact_items(phrasings: int | None = None) -> list[Item]:
    """Evaluation items. None: every phrasing in both modes; n: n items per fact, rotating through phrasing and mode."""
    out = []
    for i, fact in enumerate(tf.facts() + tf.small_talk()):
        n = len(fact.questions)
        if phrasings is None:
            chosen = [(q, think) for q in range(n) for think in (False, True)]
        else:
            chosen = [((i + j) % n, (i // n + j) % 2 == 1) for j in range(phrasings)]
        for q, think in chosen:
            turn = fact_turn(fact, q)
            out.append(Item(f"{fact.family}/{'think' if think else 'chat'}", fact.key, prompt_string([turn], think),
                            completion_string(turn, think)))
    return out


def recall_items(encoder: Encoder, distance: int, count: int, seed: int = 1) -> list[Item]:
    """`count` prompts in which one statement stands `distance` tokens (+- 8) before the end of the prompt.

    Filler stands before and after it; every fourth sentence of the filler is a statement about somebody else.
    """
    sampler = Sampler(encoder.tokenizer, seed * 100_003 + distance)
    rng, out = sampler.rng, []

    def filler(others: list) -> str:
        if others and rng.random() < 0.25:
            kind, key, value = others.pop()
            return tf.RECALL_KINDS[kind][0].format(k=key, v=value)
        return rng.choice(sampler.filler)

    while len(out) < count:
        known, *others = sampler.statements(60)
        kind, key, value = known
        statement, asks = tf.RECALL_KINDS[kind]
        ask, statement = rng.choice(asks).format(k=key), statement.format(k=key, v=value)
        after: list[str] = []
        tail = len(encoder.piece(" " + ask)) + 2  # the question, <｜Assistant｜> and the think token
        while tail < distance - 6:
            after.append(filler(others))
            tail += len(encoder.piece(" " + after[-1]))
        if abs(tail - distance) > 8:
            continue
        before = [filler(others) for _ in range(rng.randint(0, 4))]
        turn = Turn((*before, statement, *after, ask), tf.RECALL_THOUGHT.format(statement), statement)
        think = len(out) % 2 == 1
        out.append(Item(f"recall/{distance}", f"{kind} {key}", prompt_string([turn], think), completion_string(turn, think)))
    return out


def answered(logits_fn, prompt_ids: list[int], completion_ids: list[int]) -> bool:
    """True if greedy generation from the prompt gives exactly the completion.

    `logits_fn(ids)` returns float logits [len(ids), vocab], row i predicting token i + 1. Greedy generation equals the
    completion if and only if, with the completion itself as input, the argmax is right at every one of its tokens.
    """
    logits = logits_fn(prompt_ids + completion_ids[:-1])
    start = len(prompt_ids) - 1
    predicted = [int(row.argmax()) for row in logits[start:start + len(completion_ids)]]
    return predicted == list(completion_ids)
