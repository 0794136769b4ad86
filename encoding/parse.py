"""Completions to messages, as a stream: reasoning, content and tool calls, whatever the chunks.

One mechanism: `parse` feeds a StreamParser once. The grammar is the one `encoding.render` writes (model.md section 12);
source: DeepSeek's preview encoder. Text is kept exactly, apart from the two newlines that belong to a tool-call block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from encoding import constants as c

_CALLS_SEPARATED = c.BLOCK_SEPARATOR + c.TAG_OPEN
# In prose (reasoning, content) every one of these is taken out of the text. Longer spellings of the same tag first.
_PROSE_MARKERS = (
    _CALLS_SEPARATED, "\n" + c.TAG_OPEN, c.TAG_OPEN, c.TAG_CLOSE, *c.SPECIAL_TOKENS,
)  # fmt: skip
_VALUE_MARKERS = (c.TAG_OPEN, c.TAG_CLOSE, c.EOS)


@dataclass(frozen=True)
class Event:
    """A piece of the message. kind: "reasoning", "content", "tool_name" (the whole name), "tool_arguments" (a fragment
    of the arguments' JSON text), "tool_end", "error" (one line, from close only). index: which tool call, else None."""

    kind: str
    text: str
    index: int | None = None


class _Markers:
    """Finds the first of several literal markers in text that arrives in chunks."""

    def __init__(self, markers: tuple[str, ...]):
        self._search = re.compile("|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True))).search
        self._starts = {marker[:n] for marker in markers for n in range(1, len(marker))}
        self._longest = max(map(len, markers)) - 1

    def split(self, text: str) -> tuple[str, str | None, str]:
        """(text before, marker, rest); without a marker (safe text, None, held back: may be the start of a marker)."""
        found = self._search(text)
        if found:
            return text[: found.start()], found.group(), text[found.end() :]
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._starts:
                return text[:start], None, text[start:]
        return text, None, ""


_PROSE = _Markers(_PROSE_MARKERS)
_VALUE = _Markers(_VALUE_MARKERS)


def parse(text: str, *, thinking: bool) -> dict:
    """The assistant message of a whole completion: StreamParser fed once.

    thinking: the prompt ended in `<think>` (Prompt.thinking), so the text begins inside the reasoning. Returns role,
    content (str), reasoning (str, or None when there was no reasoning), tool_calls (a list, with id, type, function),
    and, when something was malformed, error (one line). Nothing is raised for malformed text.
    """
    parser = StreamParser(thinking)
    parser.feed(text)
    parser.close()
    return parser.message


class StreamParser:
    """Feed text in chunks of any size; a marker may be split anywhere. Call close() once at the end.

    A fragment of a tag never appears in an event. Tool arguments come out as the text of a JSON object in parameter
    order: string="true" values escaped, string="false" values as written (checked when the value ends). Where a
    completion breaks off inside a call, its arguments stay unclosed on purpose (half an order must not be executed)
    and the error says so. A tag that breaks the grammar ends the message there; a special token that has no business
    in prose (a second `</think>`, `<｜User｜>`) is taken out and reported. EOS ends the message.
    """

    def __init__(self, thinking: bool):
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict] = []
        self._saw_reasoning = thinking
        self._error: str | None = None
        self._buffer = ""
        self._state = self._in_reasoning if thinking else self._in_content
        self._parameters: set[str] = set()  # of the call being read
        self._value_is_text = False
        self._value: list[str] = []
        self._trailing, self._wants_trailing = "", False  # the first characters of what is not read, for the error
        self._closed = False

    def feed(self, text: str) -> list[Event]:
        """The events that text completes."""
        if self._closed:
            raise ValueError("StreamParser.feed: the parser was closed; make a new one for another completion")
        self._buffer += text
        return _joined(self._run())

    def close(self) -> list[Event]:
        """The last events: held-back text, and the error if there is one. A second call gives none."""
        if self._closed:
            return []
        self._closed = True
        events = list(self._finish())
        if self._error:
            events.append(Event("error", self._error))
        return _joined(events)

    @property
    def message(self) -> dict:
        """The message so far, as `parse` returns it."""
        message = {
            "role": "assistant",
            "content": "".join(self._content),
            "reasoning": "".join(self._reasoning) if self._saw_reasoning else None,
            "tool_calls": [
                {
                    "id": f"call_{i}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for i, call in enumerate(self._calls)
            ],
        }
        if self._error:
            message["error"] = self._error
        return message

    # Each state reads from the buffer and yields events; it returns True to go on, False when it needs more text.

    def _run(self) -> Iterator[Event]:
        more = True
        while more:
            more = yield from self._state()

    def _in_reasoning(self):
        text, marker, self._buffer = _PROSE.split(self._buffer)
        yield from self._say("reasoning", text)
        if marker == c.THINK_END:
            self._state = self._in_content
        elif marker == c.THINK_START:
            if "".join(self._reasoning).strip():  # at the start it only repeats what the prompt ended with
                self._fail(f"a second {c.THINK_START} inside the reasoning was taken out")
        elif marker == c.EOS:
            self._fail(f"the reasoning was never closed: expected {c.THINK_END} before the end")
            self._state = self._after_end
        elif marker is not None:
            self._leave_prose(marker, "reasoning")
        return marker is not None

    def _in_content(self):
        text, marker, self._buffer = _PROSE.split(self._buffer)
        yield from self._say("content", text)
        if marker == c.EOS:
            self._state = self._after_end
        elif marker == c.THINK_START and not self._saw_reasoning and not "".join(self._content).strip():
            self._saw_reasoning = True
            self._state = self._in_reasoning
        elif marker is not None:
            self._leave_prose(marker, "content")
        return marker is not None

    def _leave_prose(self, marker: str, where: str) -> None:
        if marker.endswith(c.TAG_OPEN):
            self._buffer = c.TAG_OPEN + self._buffer
            self._state = self._at_calls_open
            if where == "reasoning":
                self._fail(f"the reasoning was never closed: expected {c.THINK_END} before the tool calls")
        elif c.DSML in marker:
            self._buffer = marker + self._buffer
            self._break(f"a tool-call tag out of place in the {where}")
        else:
            self._fail(f"a stray {marker} in the {where} was taken out")

    def _at_calls_open(self):
        yield from ()
        if self._take(c.CALLS_OPEN):
            self._state = self._between_calls
            return True
        return self._expect(c.CALLS_OPEN)

    def _between_calls(self):
        yield from ()
        self._buffer = self._buffer.lstrip()
        if self._take(c.CALLS_CLOSE):
            if not self._calls:
                self._fail("the tool-call block holds no call")
            self._state = self._after_calls
            return True
        tag = _read_tag(self._buffer, c.INVOKE_OPEN, ('">',))
        if tag is None:
            return self._expect(c.INVOKE_OPEN, c.CALLS_CLOSE)
        name, _, self._buffer = tag
        self._calls.append({"name": name, "arguments": []})
        self._parameters = set()
        self._state = self._between_parameters
        yield Event("tool_name", name, len(self._calls) - 1)
        return True

    def _between_parameters(self):
        self._buffer = self._buffer.lstrip()
        if self._take(c.INVOKE_CLOSE):
            yield from self._argue("}" if self._parameters else "{}")
            yield Event("tool_end", "", len(self._calls) - 1)
            self._state = self._between_calls
            return True
        tag = _read_tag(self._buffer, c.PARAMETER_OPEN, ('" string="true">', '" string="false">'))
        if tag is None:
            return self._expect(c.PARAMETER_OPEN, c.INVOKE_CLOSE)
        name, which, rest = tag
        if name in self._parameters:
            self._break(f"the parameter {name!r} of {self._calls[-1]['name']!r} was given twice")
            return True
        self._buffer = rest
        yield from self._argue(f"{', ' if self._parameters else '{'}{_quoted(name)}: ")
        self._parameters.add(name)
        self._value, self._value_is_text = [], which == 0
        yield from self._argue('"' if self._value_is_text else "")
        self._state = self._in_value
        return True

    def _in_value(self):
        text, marker, self._buffer = _VALUE.split(self._buffer)
        self._value.append("" if self._value_is_text else text)
        yield from self._argue(_quoted(text)[1:-1] if self._value_is_text else text)
        if marker is None:
            return False
        self._buffer = marker + self._buffer
        self._state = self._at_value_end
        return True

    def _at_value_end(self):
        if not self._take(c.PARAMETER_CLOSE):
            return self._expect(c.PARAMETER_CLOSE)
        problem = None if self._value_is_text else _json_problem("".join(self._value))
        if problem:
            self._buffer = "".join(self._value) + c.PARAMETER_CLOSE + self._buffer
            self._break(f'a string="false" parameter of {self._calls[-1]["name"]!r} is not JSON ({problem})')
            return True
        yield from self._argue('"' if self._value_is_text else "")
        self._state = self._between_parameters
        return True

    def _after_calls(self):
        yield from ()
        self._buffer = self._buffer.lstrip()
        if self._take(c.EOS):
            self._state = self._after_end
            return True
        if self._buffer and not c.EOS.startswith(self._buffer):
            self._break("text after the tool calls was left out")
            return True
        return False

    def _after_end(self):
        yield from ()
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._break(f"text after {c.EOS} was left out")
            return True
        return False

    def _broken(self):
        """The rest is not read; its first characters go into the error."""
        yield from ()
        if self._wants_trailing:
            self._trailing += self._buffer[: 40 - len(self._trailing)]
        self._buffer = ""
        return False

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        if text:
            (self._reasoning if kind == "reasoning" else self._content).append(text)
            yield Event(kind, text)

    def _argue(self, text: str) -> Iterator[Event]:
        if text:
            self._calls[-1]["arguments"].append(text)
            yield Event("tool_arguments", text, len(self._calls) - 1)

    def _take(self, literal: str) -> bool:
        if not self._buffer.startswith(literal):
            return False
        self._buffer = self._buffer[len(literal) :]
        return True

    def _expect(self, *openings: str) -> bool:
        """False to wait while the buffer can still become one of the openings, else breaks the message (True)."""
        for opening in openings:
            if opening.startswith(self._buffer):
                return False
            if opening.endswith('"') and self._buffer.startswith(opening) and _tag_may_follow(self._buffer, opening):
                return False
        if self._take(c.EOS):
            self._fail("the tool call was cut off before its end")
            self._state = self._after_end
        elif c.EOS.startswith(self._buffer):
            return False
        else:
            self._break(f"a broken tool call: expected {' or '.join(openings)}")
        return True

    def _fail(self, problem: str) -> None:
        self._error = self._error or problem

    def _break(self, problem: str) -> None:
        """Stops reading. If this is the first error, it will show the first characters of what is in the buffer."""
        self._wants_trailing = self._error is None
        self._fail(problem)
        self._state = self._broken

    def _finish(self) -> Iterator[Event]:
        """Resolves held-back text at the end of the input."""
        state, held = self._state, self._buffer
        self._buffer = ""
        if state == self._in_content:
            # "<" and newlines are ordinary ends of an answer; a bar, or a blank line and "<", means a cut-off marker.
            if "｜" in held or held.startswith(f"{c.BLOCK_SEPARATOR}<"):
                self._fail("the text ends inside a marker")
                held = ""
            yield from self._say("content", held)
        elif state == self._in_reasoning:
            self._fail(f"the reasoning was never closed: expected {c.THINK_END} before the end")
            yield from self._say("reasoning", held if held.strip("\n") == "" else "")
        elif state == self._broken:
            if self._trailing:
                self._error += f", found {self._trailing!r}"
        elif state == self._after_calls:
            if held:
                self._fail("the text ends inside a marker")
        elif state != self._after_end:
            self._fail("the tool call was cut off before its end")


def _read_tag(text: str, opening: str, closings: tuple[str, ...]) -> tuple[str, int, str] | None:
    """(name, which closing, rest) of `opening NAME closing`, None when text does not hold it whole. The name ends at
    the first quote."""
    if not text.startswith(opening):
        return None
    end = text.find('"', len(opening))
    if c.DSML in text[len(opening) : max(end, 0)]:
        return None
    for which, closing in enumerate(closings):
        if end >= 0 and text.startswith(closing, end):
            return text[len(opening) : end], which, text[end + len(closing) :]
    return None


def _tag_may_follow(text: str, opening: str) -> bool:
    """Whether text, which starts with opening, can still become a whole tag."""
    end = text.find('"', len(opening))
    if c.DSML in text[len(opening) : end if end >= 0 else None]:
        return False
    closings = ('">',) if opening == c.INVOKE_OPEN else ('" string="true">', '" string="false">')
    return c.EOS not in text if end < 0 else any(closing.startswith(text[end:]) for closing in closings)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_problem(text: str) -> str | None:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON value")

    try:
        json.loads(text, parse_constant=refuse)
    except RecursionError:
        return "nested too deeply"
    except ValueError as error:
        return str(error)
    return None


def _joined(events) -> list[Event]:
    """Neighbouring fragments of one kind and call as one event."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        fragment = event.kind in ("reasoning", "content", "tool_arguments")
        if last and fragment and (last.kind, last.index) == (event.kind, event.index):
            joined[-1] = Event(event.kind, last.text + event.text, event.index)
        else:
            joined.append(event)
    return joined
