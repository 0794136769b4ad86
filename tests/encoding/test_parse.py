"""encoding.parse and StreamParser: every way of cutting a completion gives the same message, nothing of a tag leaks,
and well-formed completions parse as DeepSeek's own parser parses them."""

import json
import random

import pytest
from recipe_oracle import recipe_parse

import encoding
from encoding import Event, StreamParser, parse, render

EOS = "<｜end▁of▁sentence｜>"
CALL_F = (
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="city" string="true">Köln "am\\Rhein"\n</b> 日本</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">[1, {"k": 2.50}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)  # fmt: skip
CALL_G = '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
CALLS = f"<｜DSML｜tool_calls>\n{CALL_F}{CALL_G}</｜DSML｜tool_calls>"
ARGUMENTS_F = '{"city": "Köln \\"am\\\\Rhein\\"\\n</b> 日本", "n": [1, {"k": 2.50}]}'
BOTH = [("f", ARGUMENTS_F), ("g", "{}")]


def message(content="", reasoning=None, calls=(), error=None):
    built = {
        "role": "assistant",
        "content": content,
        "reasoning": reasoning,
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    return {**built, "error": error} if error else built


# name: (completion, the prompt opened the reasoning, message)
WELL_FORMED = {
    "answer": ("Paris.", False, message("Paris.")),
    "nothing": ("", False, message()),
    "ends in less-than": ("1 <", False, message("1 <")),
    "lookalikes": (
        "a < b <t </b> <|DSML|> <thin </thinking <｜x｜ \n\n<p>\n\n", False,
        message("a < b <t </b> <|DSML|> <thin </thinking <｜x｜ \n\n<p>\n\n"),
    ),
    "emoji": ("👩‍👩‍👧 e\u0301 日本", False, message("👩‍👩‍👧 e\u0301 日本")),
    "reasoning": ("because\n\nof it</think>Paris.", True, message("Paris.", "because\n\nof it")),
    "no reasoning": ("</think>Paris.", True, message("Paris.", "")),
    "tools": (f"Let me look.\n\n{CALLS}", False, message("Let me look.", None, BOTH)),
    "tools only": (f"\n\n{CALLS}", False, message("", None, BOTH)),
    "tools without a blank line": (CALLS, False, message("", None, BOTH)),
    "reasoning and tools": (f"hm</think>\n\n{CALLS}", True, message("", "hm", BOTH)),
    "reasoning, text and tools": (f"hm</think>So\n\n{CALLS}", True, message("So", "hm", BOTH)),
    "odd names, no newlines": (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="a b>c"><｜DSML｜parameter name="x>y" string="true">'
        '</｜DSML｜parameter><｜DSML｜parameter name="" string="false"> null </｜DSML｜parameter></｜DSML｜invoke>'
        "</｜DSML｜tool_calls>", False, message("", None, [("a b>c", '{"x>y": "", "":  null }')]),
    ),
    "markers inside a text value": (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="w">\n<｜DSML｜parameter name="t" string="true"><think></think>'
        '｜DSML｜</param <</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        False, message("", None, [("w", '{"t": "<think></think>｜DSML｜</param <"}')]),
    ),
}  # fmt: skip


def found(text):
    """How an error shows what it met: the first 40 characters of what was not read."""
    return f", found {text[:40]!r}"


# What this parser keeps or takes out where the package decides otherwise; still no error.
BY_DESIGN = {
    "newlines are kept": ("\n\nhm\n\n</think>\n\nyes", True, message("\n\nyes", "\n\nhm\n\n")),
    "only one blank line belongs to the calls": (f"So\n\n\n{CALLS}", False, message("So\n", None, BOTH)),
    "name like an attribute": (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name=" string= x" string="true">'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
        False, message("", None, [("f", '{" string= x": ""}')]),
    ),
    "repeated <think>": ("<think>hm</think>yes", True, message("yes", "hm")),
    "<think> though the prompt closed it": ("<think>hm</think>yes", False, message("yes", "hm")),
}
UNCLOSED = "the reasoning was never closed: expected </think> before the end"
CUT_OFF = "the tool call was cut off before its end"
OPEN = "<｜DSML｜tool_calls>\n"
F_OPEN = f'{OPEN}<｜DSML｜invoke name="f">\n'
P_TEXT, P_JSON = '<｜DSML｜parameter name="p" string="true">', '<｜DSML｜parameter name="p" string="false">'
P_CLOSE, F_CLOSE = "</｜DSML｜parameter>\n", "</｜DSML｜invoke>\n"
EXPECT_INVOKE = 'a broken tool call: expected <｜DSML｜invoke name=" or </｜DSML｜tool_calls>'
EXPECT_PARAMETER = 'a broken tool call: expected <｜DSML｜parameter name=" or </｜DSML｜invoke>'
EXPECT_CLOSE = "a broken tool call: expected </｜DSML｜parameter>"
MALFORMED = {
    "reasoning never closed": ("hm, 1 <", True, message("", "hm, 1 ", error=UNCLOSED)),
    "nothing when thinking": ("", True, message("", "", error=UNCLOSED)),
    "reasoning up to EOS": (f"hm\n{EOS}", True, message("", "hm\n", error=UNCLOSED)),
    "calls inside the reasoning": (
        f"hm\n\n{CALLS}", True,
        message("", "hm", BOTH, "the reasoning was never closed: expected </think> before the tool calls"),
    ),
    "stray </think>": ("a</think>b", False, message("ab", error="a stray </think> in the content was taken out")),
    "second </think>": (
        "a</think>b</think>c", True, message("bc", "a", error="a stray </think> in the content was taken out"),
    ),
    "second <think>": (
        "a<think>b</think>c", True, message("c", "ab", error="a second <think> inside the reasoning was taken out"),
    ),
    "<think> in the answer": ("a<think>b", False, message("ab", error="a stray <think> in the content was taken out")),
    "next turn": ("a<｜User｜>b", False, message("ab", error="a stray <｜User｜> in the content was taken out")),
    "BOS in the reasoning": (
        "a<｜begin▁of▁sentence｜></think>b", True,
        message("b", "a", error="a stray <｜begin▁of▁sentence｜> in the reasoning was taken out"),
    ),
    "text after EOS": (f"a{EOS}\n bc", False, message("a", error=f"text after {EOS} was left out, found 'bc'")),
    "cut inside EOS": ("a<｜end▁of", False, message("a", error="the text ends inside a marker")),
    "cut before the calls": ("a\n\n<", False, message("a", error="the text ends inside a marker")),
    "cut inside EOS after calls": (
        f"{CALLS}<｜end", False, message("", None, BOTH, "the text ends inside a marker"),
    ),
    "bare DSML": (
        "a｜DSML｜tool_calls>", False,
        message("a", error="a tool-call tag out of place in the content, found '｜DSML｜tool_calls>'"),
    ),
    "closing tag in the answer": (
        f"a</｜DSML｜invoke>{'b' * 50}", False,
        message("a", error=f"a tool-call tag out of place in the content, found '</｜DSML｜invoke>{'b' * 25}'"),
    ),
    "other block": (
        "a\n\n<｜DSML｜function_calls>", False,
        message("a", error="a broken tool call: expected <｜DSML｜tool_calls>, found '<｜DSML｜function_calls>'"),
    ),
    "empty block": (
        f"a\n\n{OPEN}</｜DSML｜tool_calls>", False, message("a", error="the tool-call block holds no call"),
    ),
    "text between calls": (
        f"{OPEN}{CALL_G}and{CALL_G}", False,
        message("", None, [("g", "{}")], EXPECT_INVOKE + found(f"and{CALL_G}")),
    ),
    "text after the calls": (
        f"{CALLS}\nDone.", False, message("", None, BOTH, "text after the tool calls was left out, found 'Done.'"),
    ),
    "name never closed": (
        f'{OPEN}<｜DSML｜invoke name="f>\n{F_CLOSE}', False,
        message("", None, [], EXPECT_INVOKE + found(f'<｜DSML｜invoke name="f>\n{F_CLOSE}')),
    ),
    "a name that swallows a tag": (
        f'{OPEN}<｜DSML｜invoke name="f>\n{P_TEXT}">', False,
        message("", None, [], EXPECT_INVOKE + found(f'<｜DSML｜invoke name="f>\n{P_TEXT}')),
    ),
    "a name that is a tag": (
        f'{OPEN}<｜DSML｜invoke name="<｜DSML｜invoke">', False,
        message("", None, [], EXPECT_INVOKE + found('<｜DSML｜invoke name="<｜DSML｜invoke">')),
    ),
    "text instead of a parameter": (
        f"{F_OPEN}x=1\n{F_CLOSE}", False,
        message("", None, [("f", "")], EXPECT_PARAMETER + found(f"x=1\n{F_CLOSE}")),
    ),
    "parameter without string=": (
        f'{F_OPEN}<｜DSML｜parameter name="p">v{P_CLOSE}', False,
        message("", None, [("f", "")], EXPECT_PARAMETER + found(f'<｜DSML｜parameter name="p">v{P_CLOSE}')),
    ),
    "string= of a third kind": (
        f'{F_OPEN}<｜DSML｜parameter name="p" string="yes">v{P_CLOSE}', False,
        message("", None, [("f", "")], EXPECT_PARAMETER + found('<｜DSML｜parameter name="p" string="yes">v</')),
    ),
    "parameter twice": (
        f"{F_OPEN}{P_TEXT}v{P_CLOSE}{P_TEXT}w{P_CLOSE}", False,
        message("", None, [("f", '{"p": "v"')],
                "the parameter 'p' of 'f' was given twice" + found(f"{P_TEXT}w{P_CLOSE}")),
    ),
    "value that is not JSON": (
        f"{F_OPEN}{P_JSON}[1,{P_CLOSE}{F_CLOSE}", False,
        message("", None, [("f", '{"p": [1,')], "a string=\"false\" parameter of 'f' is not JSON (Expecting value: "
                "line 1 column 4 (char 3))" + found(f"[1,{P_CLOSE}{F_CLOSE}")),
    ),
    "value that adds a key": (
        f'{F_OPEN}{P_JSON}1, "q": 2{P_CLOSE}{F_CLOSE}', False,
        message("", None, [("f", '{"p": 1, "q": 2')], "a string=\"false\" parameter of 'f' is not JSON (Extra data: "
                "line 1 column 2 (char 1))" + found(f'1, "q": 2{P_CLOSE}{F_CLOSE}')),
    ),
    "NaN": (
        f"{F_OPEN}{P_JSON}NaN{P_CLOSE}", False,
        message("", None, [("f", '{"p": NaN')], "a string=\"false\" parameter of 'f' is not JSON (NaN is not a JSON "
                "value), found 'NaN</｜DSML｜parameter>\\n'"),
    ),
    "value never closed": (
        f"{F_OPEN}{P_TEXT}v\n{F_CLOSE}", False,
        message("", None, [("f", '{"p": "v\\n')], f"{EXPECT_CLOSE}, found '</｜DSML｜invoke>\\n'"),
    ),
    "a tag opens inside a value": (
        f"{F_OPEN}{P_TEXT}v{P_TEXT}w", False,
        message("", None, [("f", '{"p": "v')],
                EXPECT_CLOSE + found(f"{P_TEXT}w")),
    ),
    "EOS inside a value": (f"{F_OPEN}{P_TEXT}v{EOS}", False, message("", None, [("f", '{"p": "v')], CUT_OFF)),
    "EOS between calls": (f"{OPEN}{CALL_G}{EOS}", False, message("", None, [("g", "{}")], CUT_OFF)),
    "cut inside a closing tag": (
        f"{F_OPEN}{P_TEXT}v</｜DSML｜par", False, message("", None, [("f", '{"p": "v')], CUT_OFF),
    ),
}  # fmt: skip
ALL = {**WELL_FORMED, **BY_DESIGN, **MALFORMED}


def stream(chunks, thinking):
    """(message, events) of a completion in chunks, neighbouring fragments joined."""
    parser = StreamParser(thinking)
    events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.close()
    joined = []
    for event in events:
        if joined and event.kind.startswith(("r", "c", "tool_a")) and joined[-1].kind == event.kind \
                and joined[-1].index == event.index:  # fmt: skip
            joined[-1] = Event(event.kind, joined[-1].text + event.text, event.index)
        else:
            joined.append(event)
    return parser.message, joined


def check_events(events, whole):
    """The events carry exactly the message."""
    def text(kind, index=None):
        return "".join(event.text for event in events if (event.kind, event.index) == (kind, index))

    assert text("content") == whole["content"] and text("reasoning") == (whole["reasoning"] or "")
    for i, call in enumerate(whole["tool_calls"]):
        assert text("tool_name", i) == call["function"]["name"]
        assert text("tool_arguments", i) == call["function"]["arguments"]
        assert [e.index for e in events if e.kind == "tool_name"].count(i) == 1
    assert [event.text for event in events if event.kind == "error"] == ([whole["error"]] if "error" in whole else [])
    finished = [event.index for event in events if event.kind == "tool_end"]
    assert finished == list(range(len(whole["tool_calls"])))[: len(finished)]
    for index in finished:
        assert isinstance(json.loads(whole["tool_calls"][index]["function"]["arguments"]), dict)


@pytest.mark.parametrize("eos", ["", EOS], ids=["", "EOS"])
@pytest.mark.parametrize("name", [*WELL_FORMED, *BY_DESIGN])
def test_whole(name, eos):
    text, thinking, expected = ALL[name]
    assert parse(text + eos, thinking=thinking) == expected


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name):
    text, thinking, expected = MALFORMED[name]
    assert parse(text, thinking=thinking) == expected


@pytest.mark.parametrize("name", WELL_FORMED)
def test_equals_recipe(name):
    text, thinking, expected = WELL_FORMED[name]
    theirs = recipe_parse(text, thinking)
    assert theirs["content"] == expected["content"].lstrip("\n")  # the package drops leading newlines
    assert (theirs["reasoning"] or "") == (expected["reasoning"] or "")
    assert theirs["calls"] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in expected["tool_calls"]
    ]


def test_random_completions_equal_the_message_and_recipe(seed):
    """A random assistant message, written as the model would write it, comes back from both parsers, cut anywhere."""
    rng = random.Random(seed)
    texts = ["a", "hé", "日本\n\nx", "< b", '"q\\', "</b>", "<|x|>", "👩‍👩‍👧", "x\ty"]
    values = [*texts, "", "\n", 1, -2.5, None, True, [], [1, {"k": "ü"}], {"a": {"b": "</c>"}}]
    question, tools = {"role": "user", "content": "q"}, [{"type": "function", "function": {"name": "f"}}]
    for trial in range(400):
        thinking = rng.random() < 0.5
        arguments = [{key: rng.choice(values) for key in rng.sample(["a", "b-c", "日"], rng.randint(0, 3))}
                     for _ in range(rng.randint(0, 3))]  # fmt: skip
        calls = [{"id": f"call_{i}", "type": "function", "function": {"name": rng.choice("fg"), "arguments": a}}
                 for i, a in enumerate(arguments)]  # fmt: skip
        answer = {"role": "assistant", "content": rng.choice(texts), "tool_calls": calls}
        answer["reasoning"] = rng.choice(texts) if thinking else None
        prompt = render([question], think="on" if thinking else "off", tools=tools)
        whole = render([question, answer], think="on" if thinking else "off", tools=tools)
        assert whole.text.startswith(prompt.text)
        text = whole.text[len(prompt.text) :].removesuffix(EOS)
        chunks, rest = [], text
        while rest:
            size = rng.choice([1, 2, 3, 5, 8, 13, 100])
            chunks, rest = [*chunks, rest[:size]], rest[size:]
        got, events = stream(chunks, thinking)
        check_events(events, got)
        assert (got["content"], got["reasoning"]) == (answer["content"], answer["reasoning"]), (seed, trial, chunks)
        read = [json.loads(call["function"]["arguments"]) for call in got["tool_calls"]]
        assert read == arguments and "error" not in got, (seed, trial, chunks)
        theirs = recipe_parse(text, thinking)
        assert (theirs["content"], theirs["reasoning"]) == (answer["content"], answer["reasoning"]), (seed, trial, text)
        assert theirs["calls"] == [(call["function"]["name"], call["function"]["arguments"]) for call in
                                   got["tool_calls"]], (seed, trial, text)  # fmt: skip


def test_where_recipe_differs():
    """It trims newlines around its markers, keeps a repeated <think>, and says nothing about malformed output."""
    trimmed = recipe_parse(BY_DESIGN["newlines are kept"][0], True)
    assert (trimmed["content"], trimmed["reasoning"]) == ("yes", "hm")
    assert recipe_parse(BY_DESIGN["only one blank line belongs to the calls"][0], False)["content"] == "So"
    assert recipe_parse("<think>hm</think>yes", True)["reasoning"] == "<think>hm"
    assert recipe_parse("a<think>b", False)["content"] == "a<think>b"
    assert recipe_parse(f"{CALLS}zzz", False)["calls"] == BOTH


@pytest.mark.parametrize("name", ALL)
def test_every_split(name):
    text, thinking, expected = ALL[name]
    text += EOS if name in WELL_FORMED else ""
    whole, events = stream([text], thinking)
    assert whole == expected
    check_events(events, whole)
    assert stream(list(text), thinking) == (whole, events)
    for i in range(len(text) + 1):
        assert stream([text[:i], "", text[i:]], thinking) == (whole, events), i


def test_random_splits_of_random_mixtures(seed):
    """Any mixture of fragments of the grammar gives one message however it is cut, and no event holds a tag."""
    rng = random.Random(seed)
    fragments = [OPEN, F_OPEN, P_TEXT, P_JSON, P_CLOSE, F_CLOSE, CALLS, CALL_G, "</｜DSML｜tool_calls>", EOS, "<think>"]
    fragments += ["</think>", "<｜User｜>", "｜DSML｜", "\n\n", "\n", "<", "</", "text", "日本", '"', "1", '">', "｜"]
    for trial in range(1500):
        parts = rng.choices(fragments, k=rng.randint(1, 8))
        if rng.random() < 0.5:
            parts = [rng.choice(["", "hm</think>"]), F_OPEN, P_TEXT, "v", P_CLOSE, *parts]
        text, thinking = "".join(parts), rng.random() < 0.5
        whole, events = stream([text], thinking)
        check_events(events, whole)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
        chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert stream(chunks, thinking) == (whole, events), (seed, trial, text, chunks)
        prose = whole["content"] + "|" + (whole["reasoning"] or "")
        for tag in ("<think>", "</think>", "｜DSML｜", EOS, "<｜User｜>", "tool_calls", "invoke"):
            assert tag not in prose, (seed, trial, text)
        for call in whole["tool_calls"]:
            assert "<｜DSML｜" not in call["function"]["arguments"], (seed, trial, text)
            assert "</｜DSML｜" not in call["function"]["arguments"], (seed, trial, text)


@pytest.mark.parametrize("name", [name for name in WELL_FORMED if "looka" not in name and "value" not in name])
def test_no_prefix_of_a_tag_leaks(name):
    """Cut a completion anywhere: what has been said by then, and what is said at the end, is the beginning of the right
    message. (The newlines before a block are only known to belong to it when its tag begins.)"""
    text, thinking, expected = WELL_FORMED[name]
    text += EOS
    for cut in range(len(text)):
        parser = StreamParser(thinking)
        so_far = parser.feed(text[:cut])
        for events in (so_far, so_far + parser.close()):
            said = {kind: "".join(e.text for e in events if e.kind == kind) for kind in ("content", "reasoning")}
            content = said["content"].rstrip("\n") if expected["tool_calls"] else said["content"]
            content = content.removesuffix("<") if text[cut - 1] == "<" else content  # "<" alone is an ordinary ending
            assert expected["content"].startswith(content), cut
            assert (expected["reasoning"] or "").startswith(said["reasoning"]), cut
            for i, call in enumerate(expected["tool_calls"]):
                arguments = "".join(e.text for e in events if (e.kind, e.index) == ("tool_arguments", i))
                assert call["function"]["arguments"].startswith(arguments), cut
            assert {e.text for e in events if e.kind == "tool_name"} <= {c["function"]["name"] for c in
                                                                        expected["tool_calls"]}  # fmt: skip


def test_text_is_not_held_back_longer_than_needed():
    parser = StreamParser(False)
    assert parser.feed("Hello") == [Event("content", "Hello")]
    assert parser.feed(" <") == [Event("content", " ")]
    assert parser.feed("b>\n\n") == [Event("content", "<b>")]
    assert parser.feed("<｜DSML｜tool_calls>") == []
    assert parser.feed('<｜DSML｜invoke name="f">') == [Event("tool_name", "f", 0)]
    assert parser.feed('<｜DSML｜parameter name="p" string="true">a"') == [Event("tool_arguments", '{"p": "a\\"', 0)]
    assert parser.feed("b<") == [Event("tool_arguments", "b", 0)]
    assert parser.feed("</｜DSML｜parameter></｜DSML｜invoke>") == [
        Event("tool_arguments", '<"}', 0), Event("tool_end", "", 0),
    ]  # fmt: skip
    assert parser.feed("</｜DSML｜tool_calls>" + EOS) == [] == parser.close() == parser.close()
    with pytest.raises(ValueError, match="^StreamParser.feed: the parser was closed; make a new one for another compl"):
        parser.feed("x")


def test_rendered_and_parsed_again():
    """What a completion said, put into the history, is written exactly as the model wrote it."""
    question = {"role": "user", "content": "q"}
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    for text, thinking, think in [(f"hm\n</think>\nSo\n\n{CALLS}", True, "on"), (f"So\n\n{CALLS}", False, "off")]:
        prompt = render([question], think=think, tools=tools)
        assert prompt.thinking == thinking
        answered = render([question, parse(text + EOS, thinking=prompt.thinking)], think=think, tools=tools)
        assert answered.text == prompt.text + text.replace("2.50", "2.5") + EOS


def test_parse_is_public():
    assert encoding.parse("x", thinking=False) == message("x")
