"""Calls of functions in answers: recognized however the text is split, and held to their schemas."""

import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.serve.http.errors import BadRequest
from edge.serve.tools.constraint import constraint
from edge.serve.tools.conversation import conversation
from edge.serve.tools.functions import HERMES, LLAMA3, MISTRAL, CallFormat, Function, FunctionUse, format_of
from edge.serve.tools.parser import CallParser, ParsedCall

FORMATS = (HERMES, LLAMA3, MISTRAL)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
WEATHER = Function("weather", "Tells the weather.", SCHEMA)
TIME = Function("time", "", {})
USER = {"role": "user", "content": "Hi"}


def parsed(form: CallFormat, parts: list[str]) -> list[str | ParsedCall]:
    """Return what a parser makes of an answer, with neighbouring texts as one."""
    parser = CallParser(form, ["weather", "time"])
    response: list[str | ParsedCall] = []
    for one in [x for part in parts for x in parser.add(part)] + parser.end():
        if isinstance(one, str) and response and isinstance(response[-1], str):
            response[-1] += one
        else:
            response.append(one)
    return response


def written(form: CallFormat, name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, form.arguments: arguments})
    return f"{form.opens}{f'[{call}]' if form.is_list else call}{form.closes}"


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "[TOOL_CALLS]",
    "[{",
    '{"name": "time", "',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
]
CALLS = [
    written(form, name, {"city": text})
    for form in FORMATS
    for name in ("weather", "other")
    for text in ("R", '</tool_call>"}')
]
ANSWERS = st.lists(st.sampled_from([*MARKS, *CALLS, " ", "\n", ";", "Hello"]), max_size=8).map("".join)


@given(st.sampled_from(FORMATS), ANSWERS, st.data())
def test_how_an_answer_is_split_changes_nothing(form: CallFormat, answer: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    parts = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert parsed(form, parts) == parsed(form, [answer]) == parsed(form, list(answer))


@given(st.sampled_from(FORMATS), ANSWERS)
def test_text_without_calls_is_given_as_it_is(form: CallFormat, answer: str) -> None:
    response = parsed(form, [answer])
    if not any(isinstance(one, ParsedCall) for one in response):
        assert "".join(one for one in response if isinstance(one, str)) == answer


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(
    arguments=st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers() | st.lists(st.text(max_size=5)))
)
def test_any_arguments_are_told_unchanged(form: CallFormat, arguments: dict[str, Any]) -> None:
    [call] = parsed(form, list(written(form, "time", arguments)))
    assert isinstance(call, ParsedCall)
    assert (call.name, json.loads(call.arguments)) == ("time", arguments)


def test_text_and_several_calls() -> None:
    answer = f"Let me see.\n{written(HERMES, 'time', {})}\n{written(HERMES, 'weather', {'city': 'Oslo'})}\nDone."
    response = parsed(HERMES, [answer])
    assert response == ["Let me see.\n", ParsedCall("time", "{}"), ParsedCall("weather", '{"city": "Oslo"}'), "Done."]
    several = '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}'
    assert parsed(LLAMA3, [several]) == [ParsedCall("time", "{}")] * 2
    both = '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]'
    assert (
        parsed(MISTRAL, [both])
        == parsed(MISTRAL, [both.removeprefix("[TOOL_CALLS]")])
        == [ParsedCall("time", "{}")] * 2
    )


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>",
        '<tool_call>{"name": "time", "arguments": {}',
        '<tool_call>{"name": "time", "arguments": }</tool_call>',
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "time", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "time", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "time", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": ["time"], "arguments": {}}</tool_call>',
        "<tool_call>" + '{"name": ' + "[" * 100_000 + "]" * 100_000 + "}</tool_call>",
    ],
    ids=range(9),
)
def test_what_is_no_call_is_text(broken: str) -> None:
    assert parsed(HERMES, [broken]) == [broken]


def test_text_that_cannot_begin_a_call_does_not_wait() -> None:
    parser = CallParser(HERMES, ["time"])
    assert parser.add("Hello <b") == ["Hello <b"]
    assert parser.add("r> <tool_") == ["r> "]
    assert parser.add("bar>") == ["<tool_bar>"]


def accepts(grammar: str, text: str) -> bool:
    """Return whether a grammar allows this and nothing more must come."""
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    response = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(response) == len(response) and matcher.is_accepting()


def a_call(form: CallFormat, name: str, arguments: Any, *, several: int = 1) -> str:
    """As a constraint has it."""
    inner = json.dumps({"name": name, form.arguments: arguments})
    if form.is_list:
        return "[" + ", ".join([inner] * several) + "]"
    one = f"<tool_call>\n{inner}\n</tool_call>" if form.opens else inner
    return form.between.join([one] * several)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call_that_must_come_follows_its_schema_and_is_recognized(form: CallFormat) -> None:
    grammar = constraint(form, FunctionUse([WEATHER, TIME], "required")) or ""
    good = a_call(form, "weather", {"city": "Oslo"})
    assert accepts(grammar, good)
    assert parsed(form, [good]) == [ParsedCall("weather", '{"city": "Oslo"}')]
    assert accepts(grammar, a_call(form, "time", {}))
    for bad in (
        "",
        "Hello",
        a_call(form, "weather", {"city": "Bonn"}),
        a_call(form, "x", {}),
        a_call(form, "time", {}, several=2),
    ):
        assert not accepts(grammar, bad)
    several = constraint(form, FunctionUse([WEATHER, TIME], "required", several=True)) or ""
    assert accepts(several, a_call(form, "time", {}, several=3))
    named = constraint(form, FunctionUse([WEATHER, TIME], name="weather")) or ""
    assert accepts(named, good)
    assert not accepts(named, a_call(form, "time", {}))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_strict_function_may_be_called_only_as_its_schema_says(form: CallFormat) -> None:
    strict = Function("weather", "", SCHEMA, strict=True)
    grammar = constraint(form, FunctionUse([strict])) or ""
    for good in (
        "",
        "Hello.",
        a_call(form, "weather", {"city": "Rome"}),
        a_call(form, "weather", {"city": "Rome"}, several=2),
    ):
        assert accepts(grammar, good), good
    for bad in (a_call(form, "weather", {"city": "Bonn"}), a_call(form, "weather", {})):
        assert not accepts(grammar, bad)


def test_with_a_schema_for_text_the_answer_is_a_call_or_follows_it() -> None:
    grammar = constraint(HERMES, FunctionUse([WEATHER]), {"type": "integer"}) or ""
    assert accepts(grammar, "12")
    assert accepts(grammar, a_call(HERMES, "weather", {"city": "Rome"}))
    assert not accepts(grammar, "Hello")


def test_nothing_is_held_to_anything_without_need() -> None:
    assert constraint(HERMES, FunctionUse([WEATHER])) is None
    assert constraint(HERMES, FunctionUse([WEATHER], "none"), {"type": "object"}) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"functions": [TIME, TIME]},
        {"functions": [TIME], "name": "nobody"},
        {"functions": [], "choice": "required"},
        {"functions": [Function("f", "", {"type": "string"})]},
        {"functions": [Function(str(i)) for i in range(200)]},
    ],
)
def test_functions_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        FunctionUse(**wrong)


def test_the_format_is_the_one_that_the_template_teaches() -> None:
    assert format_of("{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>") is HERMES
    assert format_of("{{ tools }} [TOOL_CALLS][") is MISTRAL
    assert format_of('{% if tools %}{"name": function name, "parameters": dictionary}') is LLAMA3
    assert format_of("{{ messages }}") is HERMES


def test_a_template_that_knows_no_tools_gets_them_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": {}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    said = conversation(messages, FunctionUse([WEATHER]), "{{ messages }}")
    assert [one["role"] for one in said.messages] == ["system", "user", "assistant", "user"]
    assert '"weather"' in said.messages[0]["content"]
    assert said.messages[2]["content"] == '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    assert said.messages[3]["content"] == "<tool_response>\nnoon\n</tool_response>"
    assert not said.tools
    known = conversation(messages, FunctionUse([WEATHER]), "{{ tools }}<tool_call>")
    assert list(known.messages) == messages
    assert [one["function"]["name"] for one in known.tools] == ["weather"]
    silent = conversation([USER], FunctionUse([WEATHER], "none"), "{{ messages }}")
    assert (list(silent.messages), silent.parser()) == ([USER], None)
