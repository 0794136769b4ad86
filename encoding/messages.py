"""Validation: OpenAI-style messages in, turns ready to be written out. Owns EncodingError and the rules for messages.

Every refusal is one line: the place (messages[index] (role).field), what was expected, what was found, what to do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from encoding import constants as c

ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")


class EncodingError(ValueError):
    """A prompt, message list, tokenizer file or token id that cannot be used; str() is one line for the user."""


@dataclass
class Call:
    id: str | None
    name: str
    arguments: dict[str, Any]


@dataclass
class Turn:
    """One message after validation. A user turn holds blocks (text, call position or None for text that was typed)."""

    role: str
    where: str
    content: str = ""
    blocks: list[tuple[str, int | None]] = field(default_factory=list)
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tools: list[dict] = field(default_factory=list)
    response_format: Any = None
    task: str | None = None
    open_ended: bool = False  # an assistant turn to be continued: no EOS


def validate(messages: Any, tools: Any, response_format: Any) -> list[Turn]:
    if not isinstance(messages, list):
        raise EncodingError(f"messages: expected a list, found {kind_of(messages)}; give a list of messages")
    if not messages:
        raise EncodingError("messages: expected at least one message, found an empty list; add a user message")
    turns: list[Turn] = []
    calls: list[Call] = []  # of the nearest assistant message before
    for i, message in enumerate(messages):
        turn = _validate_message(i, message, calls)
        if turn.role == "assistant":
            calls = turn.calls
        turns.append(turn)
    tools = _validate_tools(tools, "tools")
    response_format = _validate_format(response_format, "response_format")
    if tools or response_format:
        system = next((turn for turn in turns if turn.role == "system"), None)
        if system is None:
            system = Turn("system", "system message")
            turns.insert(0, system)
        for name, value in (("tools", tools), ("response_format", response_format)):
            if value and getattr(system, name):
                raise EncodingError(
                    f"{name}: expected once, found at the top level and on {system.where}; keep one of them"
                )
        system.tools = system.tools or tools
        system.response_format = system.response_format or response_format
    return turns


def _validate_message(i: int, message: Any, calls: list[Call]) -> Turn:
    if not isinstance(message, dict):
        raise EncodingError(f"messages[{i}]: expected an object, found {kind_of(message)}; write role and content")
    role = message.get("role")
    if role not in ROLES:
        found = "none" if "role" not in message else repr(role)
        raise EncodingError(f"messages[{i}].role: expected one of {', '.join(ROLES)}, found {found}; set the role")
    turn = Turn(role, f"messages[{i}] ({role})")
    for name in ("tools", "response_format"):
        if message.get(name) and role not in ("system", "developer"):
            raise EncodingError(
                f"{turn.where}.{name}: expected on a system or developer message only, found on {role}; move it there"
            )
    turn.tools = _validate_tools(message.get("tools"), f"{turn.where}.tools")
    turn.response_format = _validate_format(message.get("response_format"), f"{turn.where}.response_format")
    if message.get("tool_calls") and role != "assistant":
        raise EncodingError(f"{turn.where}.tool_calls: expected on an assistant message only, found on {role}; move it")
    turn.task = message.get("task")
    if turn.task is not None and turn.task not in tuple(c.TASK_TOKENS):
        names = ", ".join(c.TASK_TOKENS)
        raise EncodingError(f"{turn.where}.task: expected one of {names}, found {turn.task!r}; choose one of them")
    if role == "assistant":
        _validate_assistant(turn, message)
    optional = bool(turn.calls or turn.reasoning or (role == "system" and (turn.tools or turn.response_format)))
    turn.content = _validate_content(message, turn.where, optional)
    if role == "developer" and not turn.content:
        raise EncodingError(f"{turn.where}.content: expected some text, found an empty string; write it")
    if role == "user":
        turn.blocks = [(turn.content, None)]
    elif role == "tool":
        turn.blocks = [(turn.content, _call_position(message, turn.where, calls))]
    return turn


def _validate_assistant(turn: Turn, message: dict) -> None:
    given = [message[name] for name in ("reasoning_content", "reasoning") if message.get(name) is not None]
    for text in given:
        if not isinstance(text, str):
            raise EncodingError(f"{turn.where}.reasoning_content: expected a string, found {kind_of(text)}; give text")
        check_unicode(text, f"{turn.where}.reasoning_content")
    if len(given) == 2 and given[0] != given[1]:
        raise EncodingError(f"{turn.where}.reasoning: expected the text of reasoning_content, found another; give one")
    turn.reasoning = given[0] if given else ""
    turn.open_ended = bool(message.get("prefix") or message.get("wo_eos"))
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise EncodingError(f"{turn.where}.tool_calls: expected a list, found {kind_of(calls)}; give a list of calls")
    for i, call in enumerate(calls):
        turn.calls.append(_validate_call(call, f"{turn.where}.tool_calls[{i}]"))
    ids = [call.id for call in turn.calls if call.id is not None]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise EncodingError(f"{turn.where}.tool_calls: expected different ids, found {twice!r} twice; rename one call")


def _validate_call(call: Any, where: str) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise EncodingError(
            f'{where}: expected {{"id", "type": "function", "function": {{"name", "arguments"}}}}, '
            f"found {_short(call)}; write the call in OpenAI's form"
        )
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name or '"' in name:
        raise EncodingError(f"{where}.function.name: expected a name without quotes, found {_short(name)}; name it")
    check_unicode(name, f"{where}.function.name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise EncodingError(
                f"{where}.function.arguments: expected the JSON text of an object, found {_short(arguments)} "
                f"({error}); use {{}} for a call without arguments"
            ) from None
    if not isinstance(arguments, dict):
        raise EncodingError(
            f"{where}.function.arguments: expected a JSON object, found {kind_of(arguments)}; use {{}} for no arguments"
        )
    for key, value in arguments.items():
        if not isinstance(key, str):
            raise EncodingError(f"{where}.function.arguments: expected string keys, found {key!r}; make it a string")
        check_unicode(key, f"{where}.function.arguments")
        if isinstance(value, str):
            check_unicode(value, f"{where}.function.arguments[{key!r}]")
    identity = call.get("id")
    if identity is not None and not isinstance(identity, str):
        raise EncodingError(f"{where}.id: expected a string, found {kind_of(identity)}; give the call's id as text")
    return Call(identity or None, name, arguments)


def _call_position(message: dict, where: str, calls: list[Call]) -> int:
    """Where the call answered by a tool message stands among the calls before it. Calls without ids are answered in
    any order, which is kept (position 0 for all: the sort is stable)."""
    identity = message.get("tool_call_id")
    if not calls:
        raise EncodingError(
            f"{where}: expected tool_calls on the assistant message before it, found none; "
            "add the calls or make this a user message"
        )
    if not identity and all(call.id is None for call in calls):
        return 0
    for position, call in enumerate(calls):
        if identity and call.id == identity:
            return position
    known = ", ".join(repr(call.id) for call in calls if call.id) or "no ids on the calls"
    raise EncodingError(
        f"{where}.tool_call_id: expected the id of a call of the assistant message before it ({known}), "
        f"found {_short(identity)}; correct the id"
    )


def _validate_content(message: dict, where: str, optional: bool) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for i, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else None
                found = f"type {kind!r}" if kind not in (None, "text") else _short(part)
                raise EncodingError(
                    f'{where}.content[{i}]: expected {{"type": "text", "text": "..."}}, found {found}; '
                    "the model reads text only"
                )
            texts.append(part["text"])
        content = c.BLOCK_SEPARATOR.join(texts) if texts else None
    if content is None and optional:
        return ""
    if not isinstance(content, str):
        found = "none" if content is None else kind_of(content)
        raise EncodingError(f"{where}.content: expected a string or text parts, found {found}; write the content")
    check_unicode(content, f"{where}.content")
    return content


def _validate_tools(tools: Any, where: str) -> list[dict]:
    """The function objects of OpenAI-style tools."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise EncodingError(f"{where}: expected a list, found {kind_of(tools)}; give a list of tools")
    functions = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise EncodingError(
                f'{where}[{i}]: expected {{"type": "function", "function": {{"name": ...}}}}, found {_short(tool)}; '
                "write the tool in OpenAI's form"
            )
        to_json(function, f"{where}[{i}].function")
        functions.append(function)
    return functions


def _validate_format(response_format: Any, where: str) -> Any:
    if response_format is None or response_format == {"type": "text"}:
        return None
    if not isinstance(response_format, dict):
        raise EncodingError(f"{where}: expected an object, found {kind_of(response_format)}; give a JSON schema")
    to_json(response_format, where)
    return response_format


def to_json(value: Any, where: str) -> str:
    """JSON as the model was trained with it: ", " and ": " between, characters beyond ASCII as they are."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EncodingError(f"{where}: expected a JSON value, found one that is not ({error}); correct it") from None
    check_unicode(text, where)
    return text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_unicode(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EncodingError(
            f"{where}: expected Unicode text, found a lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}; remove it"
        ) from None


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
