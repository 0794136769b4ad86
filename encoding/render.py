"""Turns to the prompt: merging of tool results, dropping of old reasoning, and the text itself.

Source: DeepSeek's preview encoder `encoding/encoding_dsv4.py` (model.md section 12). The package `deepseek-recipe`
follows later conventions in places; the docstring of `render` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from encoding import constants as c
from encoding.messages import EncodingError, Turn, check_unicode, kind_of, to_json, validate

THINK = ("off", "on", "max")


@dataclass(frozen=True)
class Prompt:
    """A prompt as (text, trusted) pieces.

    Trusted text comes from the template: special-token spellings in it become special tokens. Untrusted text was typed
    by someone (any message content, reasoning, tool schema, tool name or argument): it is always plain text.
    is_raw marks a prompt made by `Prompt.raw`.
    """

    pieces: tuple[tuple[str, bool], ...]
    is_raw: bool = False

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def thinking(self) -> bool:
        """True when the prompt itself opened `<think>`, so the completion begins inside the reasoning."""
        return bool(self.pieces) and self.pieces[-1][1] and self.pieces[-1][0].endswith(c.THINK_START)

    @classmethod
    def raw(cls, text: str) -> Prompt:
        """The text as it is, without a template and without an added BOS. It is the caller's own prompt, under full
        control, so it is trusted: `<｜User｜>` in it is the special token. Never build it from somebody else's text."""
        if not isinstance(text, str):
            raise EncodingError(f"raw prompt: expected a string, found {kind_of(text)}; pass the prompt's text")
        if not text:
            raise EncodingError("raw prompt: expected some text, found an empty string; give at least one character")
        check_unicode(text, "raw prompt")
        return cls(((text, True),), is_raw=True)


def render(
    messages: list[dict], *, think: str = "off", tools: list | None = None, response_format: Any = None
) -> Prompt:
    """The DeepSeek-V4 prompt of OpenAI-style messages.

    think: "off" (chat: the prompt ends in `</think>`), "on" (`<think>`), "max" (`<think>`, and the effort paragraph
    right after BOS). tools and response_format given here belong to the first system message, which is created if there
    is none; they may also stand on a system or developer message. response_format is written as the JSON it is; None
    and {"type": "text"} write nothing. An assistant message with `prefix` or `wo_eos` true is left open (no EOS).
    Content is a string or a list of {"type": "text"} parts, which are joined by a blank line.

    In thinking mode without tools, reasoning before the last user turn is dropped, and so are developer messages there.
    Consecutive user and tool messages become one user turn, tool results in the order of the calls. The preview encoder
    loses the `task` of a user message that it merges into an earlier one; here the merged turn keeps it.

    Differences of deepseek-recipe 0.2.0, which follows later releases (this function follows the preview encoder):
    its default effort ("high") already writes the paragraph that is `think="max"` here, its "low" is `think="on"`, and
    its "max" writes another paragraph; it rewrites tool schemas to name, description and parameters; a json_object
    format has a text of its own and a json_schema format writes the inner schema only; a call without arguments and an
    empty message of a merged turn have no blank line; integers beyond 64 bits become floats; all system messages move
    to the front; after a trailing latest_reminder or assistant message it opens another assistant turn; developer
    messages and task tokens do not exist.

    Raises EncodingError for anything malformed.
    """
    if think not in THINK:
        raise EncodingError(f"think: expected one of {', '.join(THINK)}, found {think!r}; choose one of them")
    turns = _merge(validate(messages, tools, response_format))
    thinking = think != "off"
    drop = thinking and not any(turn.tools for turn in turns)
    if drop:
        last = _last_user(turns)
        turns = [turn for i, turn in enumerate(turns) if i >= last or turn.role != "developer"]
    out = _Writer()
    out.trusted(c.BOS)
    if think == "max":
        out.trusted(c.EFFORT_MAX)
    last = _last_user(turns)
    for i, turn in enumerate(turns):
        opens_think = thinking and (not drop or i >= last)
        after_task = i > 0 and turns[i - 1].task is not None
        closes_think = thinking and not after_task and (not drop or i > last)
        _write_turn(out, turn, closes_think)
        following = turns[i + 1] if i + 1 < len(turns) else None
        if following is None or following.role in ("assistant", "latest_reminder"):
            _write_transition(out, turn, thinking, opens_think)
        elif turn.task is not None:
            raise EncodingError(
                f"{turn.where}.task: expected the end of the messages or an assistant message after a task, "
                f"found a {following.role} message; remove the task or what follows it"
            )
    return Prompt(tuple(out.pieces))


def messages_from_json(obj: Any) -> tuple[list[dict], list | None, Any]:
    """(messages, tools, response_format) of decoded JSON: a list of messages, or an object with `messages` and possibly
    `tools` and `response_format`. Validates everything that `render` would; raises EncodingError."""
    if isinstance(obj, list):
        messages, tools, response_format = obj, None, None
    elif isinstance(obj, dict):
        unknown = sorted(set(obj) - {"messages", "tools", "response_format"})
        if unknown:
            raise EncodingError(
                f"messages file: expected the keys messages, tools, response_format, found {unknown[0]!r}; remove it"
            )
        if "messages" not in obj:
            raise EncodingError("messages file: expected the key messages, found none; add it or give the list alone")
        messages, tools, response_format = obj["messages"], obj.get("tools"), obj.get("response_format")
    else:
        raise EncodingError(
            f"messages file: expected a list of messages or an object with messages, found {kind_of(obj)}; "
            'write [{"role": "user", "content": "..."}]'
        )
    _merge(validate(messages, tools, response_format))
    return messages, tools, response_format


# ---------------------------------------------------------------------------------------------------------- writing


class _Writer:
    """Collects pieces, joining neighbours of the same trust."""

    def __init__(self):
        self.pieces: list[tuple[str, bool]] = []

    def trusted(self, text: str) -> None:
        self._add(text, True)

    def typed(self, text: str) -> None:
        self._add(text, False)

    def _add(self, text: str, trust: bool) -> None:
        if not text:
            return
        if self.pieces and self.pieces[-1][1] == trust:
            text = self.pieces.pop()[0] + text
        self.pieces.append((text, trust))


def _write_turn(out: _Writer, turn: Turn, closes_think: bool) -> None:
    if turn.role in ("user", "developer"):
        out.trusted(c.USER)
    elif turn.role == "latest_reminder":
        out.trusted(c.LATEST_REMINDER)
    if turn.role == "user":
        for i, (text, call) in enumerate(turn.blocks):
            out.trusted(c.BLOCK_SEPARATOR if i else "")
            out.trusted(c.TOOL_RESULT_OPEN if call is not None else "")
            out.typed(text)
            out.trusted(c.TOOL_RESULT_CLOSE if call is not None else "")
    elif turn.role == "assistant":
        if closes_think:
            out.typed(turn.reasoning)
            out.trusted(c.THINK_END)
        out.typed(turn.content)
        _write_calls(out, turn)
        out.trusted("" if turn.open_ended else c.EOS)
    else:
        out.typed(turn.content)
    if turn.tools:
        out.trusted(c.BLOCK_SEPARATOR + c.TOOLS_BEFORE)
        out.typed("\n".join(to_json(tool, f"{turn.where}.tools") for tool in turn.tools))
        out.trusted(c.TOOLS_AFTER)
    if turn.response_format:
        out.trusted(c.BLOCK_SEPARATOR + c.RESPONSE_FORMAT)
        out.typed(to_json(turn.response_format, f"{turn.where}.response_format"))


def _write_calls(out: _Writer, turn: Turn) -> None:
    if not turn.calls:
        return
    out.trusted(f"{c.BLOCK_SEPARATOR}{c.CALLS_OPEN}\n")
    for call in turn.calls:
        out.trusted(c.INVOKE_OPEN)
        out.typed(call.name)
        out.trusted('">\n')
        for i, (key, value) in enumerate(call.arguments.items()):
            is_text = isinstance(value, str)
            out.trusted("\n" * (i > 0) + c.PARAMETER_OPEN)
            out.typed(key)
            out.trusted(f'" string="{"true" if is_text else "false"}">')
            out.typed(value if is_text else to_json(value, f"{turn.where}.tool_calls"))
            out.trusted(c.PARAMETER_CLOSE)
        out.trusted(f"\n{c.INVOKE_CLOSE}\n")
    out.trusted(c.CALLS_CLOSE)


def _write_transition(out: _Writer, turn: Turn, thinking: bool, opens_think: bool) -> None:
    """What stands between a turn and the assistant's words that follow it."""
    if turn.task is not None:
        if turn.task == "action":
            out.trusted(c.ASSISTANT + (c.THINK_START if thinking else c.THINK_END))
        out.trusted(c.TASK_TOKENS[turn.task])
    elif turn.role in ("user", "developer"):
        out.trusted(c.ASSISTANT + (c.THINK_START if opens_think else c.THINK_END))


def _last_user(turns: list[Turn]) -> int:
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _merge(turns: list[Turn]) -> list[Turn]:
    """Joins neighbouring user and tool turns into one, results sorted into the order of the calls.

    Each tool turn arrives with its position among the calls of the assistant message before it.
    """
    merged: list[Turn] = []
    for turn in turns:
        before = merged[-1] if merged and merged[-1].role == "user" else None
        if before is not None and (turn.role == "tool" or (turn.role == "user" and before.task is None)):
            before.blocks += turn.blocks
            before.task = turn.task or before.task
        else:
            turn.role = "user" if turn.role == "tool" else turn.role
            merged.append(turn)
    for turn in merged:
        results = iter(sorted((b for b in turn.blocks if b[1] is not None), key=lambda block: block[1]))
        turn.blocks = [next(results) if block[1] is not None else block for block in turn.blocks]
    return merged
