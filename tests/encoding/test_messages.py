"""Every refusal of a message list, a raw prompt or an argument, with its exact text."""

import pytest

import encoding
from encoding import EncodingError, Prompt, render


def user(content, **more):
    return {"role": "user", "content": content, **more}


def system(content, **more):
    return {"role": "system", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tool(identity, content):
    return {"role": "tool", "tool_call_id": identity, "content": content}


def call(identity, name, arguments):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "weather"}}]
TWO_CALLS = [call("c1", "weather", "{}"), call("c2", "time", {"zone": "CET"})]
ASKED = [user("a"), assistant("", tool_calls=TWO_CALLS)]
FORM = '{"id", "type": "function", "function": {"name", "arguments"}}'
ROLES = "system, user, assistant, tool, developer, latest_reminder"
BAD = [
    ("x", "messages: expected a list, found a string; give a list of messages"),
    ([], "messages: expected at least one message, found an empty list; add a user message"),
    ([user("a"), "b"], "messages[1]: expected an object, found a string; write role and content"),
    ([{"role": "fun", "content": "x"}], f"messages[0].role: expected one of {ROLES}, found 'fun'; set the role"),
    ([{"content": "x"}], f"messages[0].role: expected one of {ROLES}, found none; set the role"),
    ([{"role": ["user"], "content": "x"}], f"messages[0].role: expected one of {ROLES}, found ['user']; set the role"),
    ([{"role": "user"}], "messages[0] (user).content: expected a string or text parts, found none; write the content"),
    ([user(None)], "messages[0] (user).content: expected a string or text parts, found none; write the content"),
    ([user([])], "messages[0] (user).content: expected a string or text parts, found none; write the content"),
    ([user(3)], "messages[0] (user).content: expected a string or text parts, found a number; write the content"),
    (
        [assistant(None)],
        "messages[0] (assistant).content: expected a string or text parts, found none; write the content",
    ),
    (
        [user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}])],
        'messages[0] (user).content[1]: expected {"type": "text", "text": "..."}, found type \'image_url\'; '
        "the model reads text only",
    ),
    (
        [user([{"type": "text"}])],
        'messages[0] (user).content[0]: expected {"type": "text", "text": "..."}, found {\'type\': \'text\'}; '
        "the model reads text only",
    ),
    (
        [user("a\ud800")],
        "messages[0] (user).content: expected Unicode text, found a lone surrogate U+D800 at character 1; remove it",
    ),
    (
        [{"role": "developer", "content": ""}],
        "messages[0] (developer).content: expected some text, found an empty string; write it",
    ),
    (
        [user("a", tools=TOOLS)],
        "messages[0] (user).tools: expected on a system or developer message only, found on user; move it there",
    ),
    (
        [user("a", tool_calls=TWO_CALLS)],
        "messages[0] (user).tool_calls: expected on an assistant message only, found on user; move it",
    ),
    (
        [user("a", task="sing")],
        "messages[0] (user).task: expected one of action, query, authority, domain, title, read_url, found 'sing'; "
        "choose one of them",
    ),
    (
        [user("a", task="title"), user("b")],
        "messages[0] (user).task: expected the end of the messages or an assistant message after a task, "
        "found a user message; remove the task or what follows it",
    ),
    (
        [assistant("a", reasoning_content=["r"])],
        "messages[0] (assistant).reasoning_content: expected a string, found a list; give text",
    ),
    (
        [assistant("a", reasoning_content="r", reasoning="s")],
        "messages[0] (assistant).reasoning: expected the text of reasoning_content, found another; give one",
    ),
    (
        [assistant("", tool_calls={"name": "f"})],
        "messages[0] (assistant).tool_calls: expected a list, found an object; give a list of calls",
    ),
    (
        [assistant("", tool_calls=[{"name": "f", "arguments": "{}"}])],
        f"messages[0] (assistant).tool_calls[0]: expected {FORM}, found {{'name': 'f', 'arguments': '{{}}'}}; "
        "write the call in OpenAI's form",
    ),
    (
        [assistant("", tool_calls=[call("c", "", "{}")])],
        "messages[0] (assistant).tool_calls[0].function.name: expected a name without quotes, found ''; name it",
    ),
    (
        [assistant("", tool_calls=[call("c", "f", '{"a": ')])],
        "messages[0] (assistant).tool_calls[0].function.arguments: expected the JSON text of an object, found "
        "'{\"a\": ' (Expecting value: line 1 column 7 (char 6)); use {} for a call without arguments",
    ),
    (
        [assistant("", tool_calls=[call("c", "f", "")])],
        "messages[0] (assistant).tool_calls[0].function.arguments: expected the JSON text of an object, found "
        "'' (Expecting value: line 1 column 1 (char 0)); use {} for a call without arguments",
    ),
    (
        [assistant("", tool_calls=[call("c", "f", '{"a": NaN}')])],
        "messages[0] (assistant).tool_calls[0].function.arguments: expected the JSON text of an object, found "
        "'{\"a\": NaN}' (NaN is not JSON); use {} for a call without arguments",
    ),
    (
        [assistant("", tool_calls=[call("c", "f", "[1]")])],
        "messages[0] (assistant).tool_calls[0].function.arguments: expected a JSON object, found a list; "
        "use {} for no arguments",
    ),
    (
        [assistant("", tool_calls=[call("c", "f", "{}"), call("c", "g", "{}")])],
        "messages[0] (assistant).tool_calls: expected different ids, found 'c' twice; rename one call",
    ),
    (
        [assistant("", tool_calls=[call(7, "f", "{}")])],
        "messages[0] (assistant).tool_calls[0].id: expected a string, found a number; give the call's id as text",
    ),
    (
        [*ASKED, tool("c9", "x")],
        "messages[2] (tool).tool_call_id: expected the id of a call of the assistant message before it ('c1', 'c2'), "
        "found 'c9'; correct the id",
    ),
    (
        [*ASKED, {"role": "tool", "content": "x"}],
        "messages[2] (tool).tool_call_id: expected the id of a call of the assistant message before it ('c1', 'c2'), "
        "found None; correct the id",
    ),
    (
        [*ASKED, tool("c1", "x"), assistant("y"), tool("c2", "z")],
        "messages[4] (tool): expected tool_calls on the assistant message before it, found none; "
        "add the calls or make this a user message",
    ),
    (
        [*ASKED, tool("c1", "x"), assistant("", tool_calls=[call("c3", "time", {})]), tool("c2", "z")],
        "messages[4] (tool).tool_call_id: expected the id of a call of the assistant message before it ('c3'), "
        "found 'c2'; correct the id",
    ),
    (
        [user("a"), tool("c1", "x")],
        "messages[1] (tool): expected tool_calls on the assistant message before it, found none; "
        "add the calls or make this a user message",
    ),
    (
        [system("s", tools={"name": "f"}), user("a")],
        "messages[0] (system).tools: expected a list, found an object; give a list of tools",
    ),
    (
        [system("s", tools=[{"name": "f"}]), user("a")],
        'messages[0] (system).tools[0]: expected {"type": "function", "function": {"name": ...}}, '
        "found {'name': 'f'}; write the tool in OpenAI's form",
    ),
    (
        [system("s", response_format="json"), user("a")],
        "messages[0] (system).response_format: expected an object, found a string; give a JSON schema",
    ),
]


@pytest.mark.parametrize("messages, expected", BAD, ids=range(len(BAD)))
def test_malformed_messages(messages, expected):
    for check in (render, encoding.messages_from_json):
        if check is encoding.messages_from_json and (not isinstance(messages, list) or "after a task" in expected):
            continue
        with pytest.raises(EncodingError) as caught:
            check(messages)
        assert str(caught.value) == expected


@pytest.mark.parametrize(
    "more, expected",
    [
        ({"think": "high"}, "think: expected one of off, on, max, found 'high'; choose one of them"),
        ({"tools": "f"}, "tools: expected a list, found a string; give a list of tools"),
        ({"response_format": [1]}, "response_format: expected an object, found a list; give a JSON schema"),
        (
            {"response_format": {"a": float("nan")}},
            "response_format: expected a JSON value, found one that is not (Out of range float values are not JSON "
            "compliant",
        ),
        (
            {"tools": TOOLS},
            "tools: expected once, found at the top level and on messages[0] (system); keep one of them",
        ),
    ],
)
def test_malformed_arguments(more, expected):
    with pytest.raises(EncodingError) as caught:
        render([system("s", tools=TOOLS), user("u")], **more)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_messages_from_json():
    messages = [user("u")]
    assert encoding.messages_from_json(messages) == (messages, None, None)
    whole = {"messages": messages, "tools": TOOLS, "response_format": {"a": 1}}
    assert encoding.messages_from_json(whole) == (messages, TOOLS, {"a": 1})
    for obj, expected in [
        ("x", 'messages file: expected a list of messages or an object with messages, found a string; write '
              '[{"role": "user", "content": "..."}]'),
        ({"tools": []}, "messages file: expected the key messages, found none; add it or give the list alone"),
        ({"messages": messages, "model": "m"},
         "messages file: expected the keys messages, tools, response_format, found 'model'; remove it"),
        ({"messages": {}}, "messages: expected a list, found an object; give a list of messages"),
    ]:  # fmt: skip
        with pytest.raises(EncodingError) as caught:
            encoding.messages_from_json(obj)
        assert str(caught.value) == expected


def test_raw_prompt_refusals():
    for text, expected in [
        ("", "raw prompt: expected some text, found an empty string; give at least one character"),
        (b"x", "raw prompt: expected a string, found bytes; pass the prompt's text"),
        ("\udc80", "raw prompt: expected Unicode text, found a lone surrogate U+DC80 at character 0; remove it"),
    ]:
        with pytest.raises(EncodingError) as caught:
            Prompt.raw(text)
        assert str(caught.value) == expected
