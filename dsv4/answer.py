"""The answer as it comes: tokens in, text out to whom it concerns. Imports nothing heavy."""

from __future__ import annotations

import json
import sys

from .terminal import say


class Answer:
    """The generated tokens, streamed as text: the answer to standard output, the reasoning, dim, to standard error.

    `tokenizer`: without one, the ids are shown. `parser` (encoding.StreamParser) tells reasoning and tool calls from the answer; without
    one, the text is the answer. `quiet`: nothing is shown.
    """

    def __init__(self, tokenizer, parser, eos: set[int], quiet: bool):
        self.tokenizer, self.parser, self.eos, self.quiet = tokenizer, parser, eos, quiet
        self.ids: list[int] = []
        self.text, self._reasoning_open, self._wrote = "", False, False
        self.broken: OSError | None = None  # why standard output takes no more; what else there is to do is done first
        self.detokenizer = tokenizer.detokenizer() if tokenizer else None
        self.dim = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")

    def push(self, token: int) -> None:
        self.ids.append(token)
        if token not in self.eos:
            self._text(self.detokenizer.push(token) if self.detokenizer else f"{token} ")

    def close(self) -> None:
        if self.detokenizer:
            self._text(self.detokenizer.flush())
        if self.parser:
            self._show(self.parser.close())
            for call in self.parser.message["tool_calls"]:
                self._write(sys.stdout, "\n" + json.dumps({"tool_call": call["function"]}, ensure_ascii=False))
        if self._reasoning_open:
            self._write(sys.stderr, "\n")
        self._write(sys.stdout, "\n" if self._wrote else "")
        if self.message.get("error"):
            self._write(sys.stderr, f"note: {self.message['error']}\n")

    @property
    def message(self) -> dict:
        """The parsed message; without a parser, its text."""
        if self.parser:
            return self.parser.message
        return {"role": "assistant", "content": self.text, "reasoning": None, "tool_calls": []}

    def _text(self, text):
        self.text += text
        if self.parser:
            self._show(self.parser.feed(text))
        else:
            self._write(sys.stdout, text)

    def _show(self, events):
        for event in events:
            if event.kind == "reasoning":
                self._write(sys.stderr, f"{self.dim[0]}{event.text}{self.dim[1]}")
                self._reasoning_open = True
            elif event.kind == "content":
                if self._reasoning_open:
                    self._write(sys.stderr, "\n")
                    self._reasoning_open = False
                self._write(sys.stdout, event.text)

    def _write(self, stream, text):
        if not text or self.quiet:
            return
        if stream is sys.stderr:
            say(text, end="")
        elif self.broken is None:
            try:
                stream.write(text)
                stream.flush()
                self._wrote = True
            except OSError as error:
                self.broken = error
