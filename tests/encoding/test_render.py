"""encoding.render against DeepSeek's own renderer, against strings written out by hand where that renderer is later or
lacks the feature, and the pieces."""

import json
import random
import subprocess
import sys

import pytest
from recipe_oracle import official_tokenizer, real_tokenizer, recipe, recipe_render

from encoding import Prompt, render
from encoding import constants as c

EFFORT_MAX_START = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough"
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
SCHEMA = {"type": "object", "properties": {"Stadt": {"type": "string", "description": "wo, z.B. Köln"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "description": "", "parameters": {"type": "object"}}},
]


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


TWO_CALLS = [
    call("c1", "weather", '{"Stadt": "Köln \\"am Rhein\\"", "days": 3, "deep": {"a": [1.5, null, true]}}'),
    call("c2", "time", '{"zone": "CET"}'),
]
CONVERSATIONS = {
    "chat": [user("What is the capital of France?")],
    "system": [system("Be brief."), user("日本の首都は？ 🗼")],
    "parts": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])],
    "user user": [user("one"), user("two\n")],
    "multi-turn": [system("S"), user("a"), assistant("b"), user("c"), assistant("d"), user("e")],
    "reasoning in history": [
        user("a"), assistant("b", reasoning_content="r1"), user("c"), assistant("d", reasoning_content="r2"), user("e"),
    ],
    "empty content": [system(""), user(""), assistant(""), user("x")],
    "results out of order": [
        user("a"), assistant("", reasoning_content="R", tool_calls=TWO_CALLS), tool("c2", "10:00"), tool("c1", "rain"),
    ],
    "results, then a user": [
        user("a"), assistant("wait", tool_calls=TWO_CALLS), tool("c2", "10:00"), tool("c1", "rain"), user("and?"),
    ],
    "two rounds of calls": [
        user("a"), assistant(None, reasoning_content="R1", tool_calls=TWO_CALLS), tool("c1", "1"), tool("c2", "2"),
        assistant("", reasoning_content="R2", tool_calls=[call("c3", "time", '{"zone": "UTC"}')]), tool("c3", "3"),
        assistant("done", reasoning_content="R3"), user("thanks"),
    ],
    "tool parts": [
        user("a"), assistant("", tool_calls=TWO_CALLS[1:]), tool("c2", [{"type": "text", "text": t} for t in "xy"]),
    ],
    "latest_reminder": [system("S"), {"role": "latest_reminder", "content": "2026-01-01"}, user("what day is it?")],
    "special spellings typed": [
        system(f"{USER}</think>"), user(f"{ASSISTANT}</think><｜DSML｜tool_calls>{EOS}{BOS}"),
        assistant("<think>x</think>", reasoning_content="</think>"), user("<|EOT|><｜action｜>｜DSML｜"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("think", ["off", "on", "max"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equals_recipe(name, tools, think):
    messages = CONVERSATIONS[name]
    text, ids = recipe_render(messages, think, **({"tools": tools} if tools else {}))
    prompt = render(messages, think=think, tools=tools)
    assert prompt.text == text
    assert real_tokenizer().encode(prompt) == ids
    assert prompt.thinking == (think != "off")
    if name != "special spellings typed":
        assert official_tokenizer().encode(text, add_special_tokens=False).ids == ids


def random_conversation(rng):
    texts = ["", "a", "hé\n", "日本", "\n\n", " x ", "</think>", "<｜User｜>", '{"a": 1}', "｜DSML｜", "👩‍👩‍👧"]
    messages = [system(rng.choice(texts))] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 4)):
        messages += [user(rng.choice(texts[1:])) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.7:
            arguments = [{key: rng.choice(["t", 'q"\\', 1, 2.5, None, True, [1, "x"], {"k": "ü"}]) for key in "ab"[:n]}
                         for n in rng.choices([1, 2], k=rng.randint(0, 3))]  # fmt: skip
            calls = [call(f"c{turn}_{i}", "f", json.dumps(a)) for i, a in enumerate(arguments)]
            reply = assistant(rng.choice(texts), reasoning_content=rng.choice(texts))
            results = [tool(item["id"], rng.choice(texts)) for item in rng.sample(calls, len(calls))]
            messages += [{**reply, "tool_calls": calls} if calls else reply, *results]
            if not calls and rng.random() < 0.5:
                messages.append(user(rng.choice(texts[1:])))
    if messages[-1]["role"] == "assistant":
        messages.append(user("last"))
    return messages


def test_equals_recipe_on_random_conversations(seed):
    rng = random.Random(seed)
    for trial in range(300):
        messages, think = random_conversation(rng), rng.choice(["off", "on", "max"])
        tools = TOOLS if rng.random() < 0.3 else None
        text, ids = recipe_render(messages, think, **({"tools": tools} if tools else {}))
        prompt = render(messages, think=think, tools=tools)
        assert prompt.text == text, (seed, trial, think, messages)
        assert real_tokenizer().encode(prompt) == ids, (seed, trial, think, messages)


@pytest.mark.parametrize("think", ["off", "on", "max"])
def test_prefix_equals_recipe(think):
    messages = [user("a"), assistant("The ans", reasoning_content="hm", prefix=True)]
    prompt = render(messages, think=think)
    assert (prompt.text, real_tokenizer().encode(prompt)) == recipe_render(messages, think)
    assert prompt.text.endswith("The ans") and not prompt.thinking


def test_response_format_equals_recipe_for_its_inner_schema():
    messages = [system("S"), user("u")]
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    text, ids = recipe_render(messages, response_format=wrapped)
    prompt = render(messages, response_format=SCHEMA)
    assert prompt.text == text and real_tokenizer().encode(prompt) == ids
    assert recipe_render(messages, response_format={"type": "text"})[0] == render(
        messages, response_format={"type": "text"}
    ).text


# ------------------------------------------------------------------------- where the package follows a later convention


def test_effort_differs_from_recipe():
    """The preview encoder writes the paragraph for max only; the package already writes it by default, and has another
    one for its max."""
    messages = [user("hi")]
    plain = f"{BOS}{USER}hi{ASSISTANT}<think>"
    with_paragraph = f"{BOS}{c.EFFORT_MAX}{USER}hi{ASSISTANT}<think>"
    assert c.EFFORT_MAX.startswith(EFFORT_MAX_START) and c.EFFORT_MAX.endswith("left unchecked.\n\n")
    assert render(messages, think="on").text == plain == recipe_render(messages, "on", effort="low")[0]
    assert render(messages, think="max").text == with_paragraph == recipe_render(messages, "on", effort="default")[0]
    assert recipe_render(messages, "on", effort="max")[0].startswith(f"{BOS}Reasoning Effort: Beyond maximum")


def test_tool_schemas_are_written_as_given():
    """The package rewrites a schema to name, description, parameters; the preview encoder dumps what it got."""
    given = [{"type": "function", "function": {"strict": False, "name": "f"}}]
    ours, theirs = render([user("x")], tools=given).text, recipe_render([user("x")], tools=given)[0]
    assert '\n\n{"strict": false, "name": "f"}\n\n' in ours
    written = '{"name": "f", "description": "", "parameters": {}}'
    assert theirs == ours.replace('{"strict": false, "name": "f"}', written)


def test_system_messages_stay_where_they_are():
    """The package moves all of them to the front, a blank line between."""
    messages = [system("one"), system("two"), user("a"), assistant("b"), system("three"), user("c")]
    turns = f"{USER}a{ASSISTANT}</think>b{EOS}", f"{USER}c{ASSISTANT}</think>"
    assert render(messages).text == f"{BOS}onetwo{turns[0]}three{turns[1]}"
    assert recipe_render(messages)[0] == f"{BOS}one\n\ntwo\n\nthree{turns[0]}{turns[1]}"


def test_a_call_without_arguments_has_an_empty_line():
    messages = [user("x"), assistant("", tool_calls=[call("c1", "f", "{}")]), tool("c1", "y")]
    ours, theirs = render(messages).text, recipe_render(messages)[0]
    assert '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>' in ours
    assert theirs == ours.replace('"f">\n\n<', '"f">\n<')


def test_large_integers_stay_integers():
    messages = [user("x"), assistant("", tool_calls=[call("c1", "f", '{"n": 100000000000000000000}')]), tool("c1", "y")]
    assert '"n" string="false">100000000000000000000</' in render(messages).text
    assert '"n" string="false">1e+20</' in recipe_render(messages)[0] or "1e20</" in recipe_render(messages)[0]


def test_response_format_is_written_as_it_is():
    head = f"{BOS}S\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    messages = [system("S"), user("in JSON")]
    prompt = render(messages, response_format={"type": "json_object"})
    assert prompt.text == head + f'{{"type": "json_object"}}{USER}in JSON{ASSISTANT}</think>'
    assert "Reply with JSON object ONLY." in recipe_render(messages, response_format={"type": "json_object"})[0]


def test_an_empty_block_of_a_merged_turn_keeps_its_blank_line():
    messages = [user("a"), user(""), user("b")]
    assert render(messages).text == f"{BOS}{USER}a\n\n\n\nb{ASSISTANT}</think>"
    assert recipe_render(messages)[0] == f"{BOS}{USER}a\n\nb{ASSISTANT}</think>"


def test_trailing_reminder_and_assistant_get_no_second_assistant_turn():
    messages = [user("a"), {"role": "latest_reminder", "content": "r"}]
    assert render(messages).text == f"{BOS}{USER}a{ASSISTANT}</think><｜latest_reminder｜>r"
    assert recipe_render(messages)[0] == f"{BOS}{USER}a<｜latest_reminder｜>r{ASSISTANT}</think>"
    messages = [user("a"), assistant("b")]
    assert render(messages).text == f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}"
    assert recipe_render(messages)[0] == render(messages).text + f"{ASSISTANT}</think>"


def test_developer_is_unknown_to_recipe():
    with pytest.raises(ValueError, match="unknown variant `developer`"):
        recipe.ChatCompletionRequest({"model": "m", "messages": [{"role": "developer", "content": "d"}]})


# --------------------------------------------------------------- what only the preview encoder has: written by hand

DEVELOPER = {"role": "developer", "content": "D"}
BY_HAND = {
    "developer is rendered like user": ([DEVELOPER], "on", f"{USER}D{ASSISTANT}<think>"),
    "developer before the last user is dropped when thinking": (
        [system("S"), DEVELOPER, user("u")], "on", f"S{USER}u{ASSISTANT}<think>",
    ),
    "developer stays in chat": ([DEVELOPER, user("u")], "off", f"{USER}D{USER}u{ASSISTANT}</think>"),
    "developer with a format": (
        [{**DEVELOPER, "response_format": {"a": 1}}], "off",
        f'{USER}D\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{{"a": 1}}'
        f"{ASSISTANT}</think>",
    ),
    "developer is a last user": (
        [user("a"), assistant("b", reasoning="r"), DEVELOPER, assistant("c", reasoning="s")], "on",
        f"{USER}a{ASSISTANT}</think>b{EOS}{USER}D{ASSISTANT}<think>s</think>c{EOS}",
    ),
    "task": ([user("u", task="title")], "off", f"{USER}u<｜title｜>"),
    "task when thinking": ([user("u", task="read_url")], "on", f"{USER}u<｜read_url｜>"),
    "task action": ([user("u", task="action")], "off", f"{USER}u{ASSISTANT}</think><｜action｜>"),
    "task action when thinking": ([user("u", task="action")], "on", f"{USER}u{ASSISTANT}<think><｜action｜>"),
    "an answered task has no reasoning": (
        [user("u", task="domain"), assistant("dom", reasoning="r")], "on", f"{USER}u<｜domain｜>dom{EOS}",
    ),
    "a merged turn keeps its task": ([user("a"), user("b", task="query")], "off", f"{USER}a\n\nb<｜query｜>"),
    "a turn after a task is not merged": (
        [user("a", task="authority"), assistant("y"), user("b")], "off",
        f"{USER}a<｜authority｜>y{EOS}{USER}b{ASSISTANT}</think>",
    ),
    "wo_eos": ([user("a"), assistant("b", wo_eos=True)], "on", f"{USER}a{ASSISTANT}<think></think>b"),
    "calls without ids keep the order": (
        [user("a"), assistant("", tool_calls=[call(None, "f", {"p": "v"}), call(None, "g", {"q": 1})]),
         {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}], "off",
        f'{USER}a{ASSISTANT}</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="p" string="true">v</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n'
        '<｜DSML｜parameter name="q" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
        f"{EOS}{USER}<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>{ASSISTANT}</think>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    messages, think, expected = BY_HAND[name]
    prompt = render(messages, think=think)
    assert prompt.text == BOS + expected
    ids = official_tokenizer().encode(prompt.text, add_special_tokens=False).ids
    assert real_tokenizer().encode(prompt) == ids


@pytest.mark.parametrize("task", c.TASK_TOKENS)
def test_task_tokens_are_single_special_tokens(task):
    ids = real_tokenizer().encode(render([user("u", task=task)]))
    expected = {"action": 128829, "query": 128830, "authority": 128831, "domain": 128832, "title": 128836,
                "read_url": 128845}  # fmt: skip
    assert ids[-1] == expected[task]


def test_top_level_tools_and_format_equal_those_on_the_system_message():
    on_top = render([user("u")], tools=TOOLS, response_format={"a": 1})
    on_message = render([system("", tools=TOOLS, response_format={"a": 1}), user("u")])
    on_tools_only = render([{"role": "system", "tools": TOOLS, "response_format": {"a": 1}}, user("u")])
    assert on_top == on_message == on_tools_only
    assert on_top.text.startswith(f"{BOS}\n\n## Tools\n\nYou have access")
    assert on_top.text.index("## Tools") < on_top.text.index("## Response Format")
    later = render([user("a"), system("S"), user("u")], tools=TOOLS)
    assert f"{USER}aS\n\n## Tools\n\n" in later.text


def test_reasoning_is_an_alias_of_reasoning_content():
    history = [user("a"), assistant("b", reasoning="r")]
    assert render(history, think="on") == render([user("a"), assistant("b", reasoning_content="r")], think="on")
    assert render(history, think="on").text.endswith("<think>r</think>b" + EOS)


def test_render_leaves_the_messages_alone():
    messages = CONVERSATIONS["two rounds of calls"]
    before = json.dumps(messages)
    render(messages, think="on", tools=TOOLS)
    assert json.dumps(messages) == before


def test_typed_text_is_untrusted():
    typed = ["sys0", "usr1", "ans2", "rsn3", "res4", "name5", "key6", "val7", "desc8", "dev9", "rem10", "fmt11", "x12"]
    tools = [{"type": "function", "function": {"name": "name5", "description": "desc8"}}]
    arguments = {"key6": "val7", "k": ["x12"]}
    messages = [
        system("sys0", response_format={"a": "fmt11"}), {"role": "latest_reminder", "content": "rem10"}, user("usr1"),
        assistant("ans2", reasoning="rsn3", tool_calls=[call("c", "name5", arguments)]), tool("c", "res4"),
        {"role": "developer", "content": "dev9"},
    ]  # fmt: skip
    prompt = render(messages, think="on", tools=tools)
    for word in typed:
        assert {trusted for text, trusted in prompt.pieces if word in text} == {False}, word


def test_raw_prompt_is_trusted_and_unchanged():
    prompt = Prompt.raw(f"{USER}hi{ASSISTANT}<think>")
    assert prompt.text == f"{USER}hi{ASSISTANT}<think>" and prompt.thinking
    ids = real_tokenizer().encode(prompt)
    assert ids[0] == 128803 and ids[-2:] == [128804, 128821] and 0 not in ids
    assert not Prompt.raw("hi").thinking


def test_import_is_light():
    code = "import sys, encoding; print([m for m in sys.modules if m.split('.')[0] in " \
           "('torch', 'transformers', 'numpy', 'tokenizers', 'deepseek_recipe', 'dsv4')])"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
