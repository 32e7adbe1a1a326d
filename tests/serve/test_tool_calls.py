"""Test tool calls in answers: separated from text, streamed, and inserted into prompts."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.serve.deltas import Begin, Call, Delta, End, Text, Thought, deltas_of
from edge.serve.http.errors import BadRequest
from edge.serve.served import Piece
from edge.serve.tools.conversation import conversation
from edge.serve.tools.functions import Function, FunctionUse
from edge.serve.tools.parser import CallArguments, CallEnd, CallParser, CallStart
from edge.serve.tools.values import MAX_DEPTH
from edge.text.templates.formats import FORMATS, CallFormat, format_of
from edge.text.templates.template import CONTINUES
from edge.text.templates.writing import written_calls
from edge.text.thinking_format import thinking_format
from edge.text.thinking_splitter import ThoughtSplitter
from tests.serve.calls import FUNCTIONS, merged, parsed, splits
from tests.support.thorough import some

BY_NAME = {form.name: form for form in reversed(FORMATS)}
HERMES = BY_NAME["hermes"]
WEATHER, TIME = Function("weather", "Tells the weather.", FUNCTIONS["weather"]), Function("time", "", {})
USER = {"role": "user", "content": "Hi"}
every_form = pytest.mark.parametrize("form", BY_NAME.values(), ids=BY_NAME)

PIECES = [
    "<",
    "</",
    ">",
    "|",
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    '"',
    "'",
    "\\",
    "\\u00",
    "=",
    ":",
    ",",
    "\n",
    " ",
    "Hello",
    "3",
    "tr",
]


def pieces_of(form: CallFormat) -> list[str]:
    """Parts of answers that are likely to mislead a parser of a format."""
    calls = [
        written_calls(form, [(name, {"city": text})])
        for name in ("weather", "nobody")
        for text in ("R", f'{form.closes or form.ends or "}"}"}}')
    ]
    return [*PIECES, *form.marks, *(mark[: len(mark) // 2] for mark in form.marks), *calls, *(c[:-9] for c in calls)]


@given(st.sampled_from(FORMATS), st.booleans(), st.data())
def test_how_an_answer_is_split_changes_nothing(form: CallFormat, streams: bool, data: st.DataObject) -> None:
    answer = "".join(data.draw(st.lists(st.sampled_from(pieces_of(form)), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    parts = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    whole = parsed(form, [answer], streams=streams)
    assert parsed(form, parts, streams=streams) == whole == parsed(form, list(answer), streams=streams)


@given(st.sampled_from(FORMATS), st.data())
def test_what_is_no_call_is_text_as_it_came(form: CallFormat, data: st.DataObject) -> None:
    answer = "".join(data.draw(st.lists(st.sampled_from(pieces_of(form)), max_size=8)))
    response = parsed(form, [answer], {})
    assert response == ([answer] if answer else [])


@given(st.sampled_from(FORMATS), st.data())
def test_a_call_that_streams_is_the_one_that_came_whole(form: CallFormat, data: st.DataObject) -> None:
    """Unless it broke: then its arguments are no JSON."""
    answer = "".join(data.draw(st.lists(st.sampled_from(pieces_of(form)), max_size=8)))
    streamed, whole = parsed(form, [answer], streams=True), parsed(form, [answer])
    complete = [part for part in streamed if isinstance(part, dict) and "arguments" in part]
    assert complete == [part for part in whole if isinstance(part, dict)]
    for part in streamed:
        if isinstance(part, dict) and "partial" in part:
            with pytest.raises(ValueError, match=r"."):
                json.loads(part["partial"])


KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)


@every_form
@settings(max_examples=some(15, 200))
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4), times=st.integers(1, 3))
def test_any_arguments_arrive_unchanged(form: CallFormat, arguments: dict[str, Any], times: int) -> None:
    types = {key: {"type": "string"} for key, value in arguments.items() if isinstance(value, str)}
    functions = {"save": {"type": "object", "properties": types}}
    text = written_calls(form, [("save", arguments)] * times)
    if any(mark in json.dumps(arguments, ensure_ascii=False) for mark in form.notation.quotes if len(mark) > 1):
        return  # no text of Gemma has its quote
    for streams in (False, True):
        response = parsed(form, list(text), functions, streams=streams)
        assert response == [{"name": "save", "arguments": arguments}] * times, text


def test_arguments_stream_as_they_come() -> None:
    parser = CallParser(HERMES, FUNCTIONS, streams=True)
    assert parser.add('<tool_call>{"name": "weather", "argum') == []
    assert parser.add('ents": {"city": "Be') == [CallStart("weather"), CallArguments('{"city": "Be')]
    assert parser.add("rn") == [CallArguments("rn")]
    assert parser.add('"}') == [CallArguments('"')]
    assert parser.add("}") == [CallArguments("}"), CallEnd()]
    parser = CallParser(BY_NAME["qwen-xml"], FUNCTIONS, streams=True)
    assert parser.add("<tool_call><function=weather><parameter=city>\nBe")[-1] == CallArguments('{"city": "Be')
    assert parser.add("rn\n</para") == [CallArguments("rn")]  # what may be the end waits
    assert parser.add("meter></function>") == [CallArguments('"}'), CallEnd()]


class Pieces:
    """An answer of these pieces."""

    prompt_tokens = cached_tokens = 1

    def __init__(self, *pieces: Piece) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for piece in (*self._pieces, Piece("", None, "stop")):
            yield piece

    def cancel(self) -> None:
        """Nothing runs."""


def deltas(form: CallFormat, *pieces: Piece, streams: bool) -> list[Delta]:
    async def collected() -> list[Delta]:
        return [delta async for delta in deltas_of(Pieces(*pieces), CallParser(form, FUNCTIONS, streams=streams))]

    return asyncio.run(collected())


def test_a_thought_ends_a_call_that_is_open() -> None:
    begun = Piece('<|channel|>commentary to=functions.weather<|message|>{"city": "R')
    pieces = (begun, Piece("", thought="Hm."), Piece("Hi."))
    streamed = deltas(BY_NAME["harmony"], *pieces, streams=True)
    kinds = [type(delta) for delta in streamed]
    assert kinds == [Begin, Call, CallArguments, CallEnd, Thought, Text, End]
    assert streamed[3:6] == [CallEnd(is_complete=False), Thought("Hm."), Text("Hi.")]
    whole = deltas(BY_NAME["harmony"], *pieces, streams=False)
    assert whole[1:4] == [Text(begun.text), Thought("Hm."), Text("Hi.")]


def test_a_call_of_gpt_oss_may_name_its_function_before_its_channel() -> None:
    thinking = thinking_format("<|channel|>analysis<|message|>")
    assert thinking is not None
    call = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}'
    for pieces in splits(f"<|channel|>analysis<|message|>Hm.<|end|>{call}"):
        splitter = ThoughtSplitter(thinking)
        texts = [split.text for split in (*map(splitter.add, pieces), splitter.end())]
        assert parsed(BY_NAME["harmony"], texts) == [{"name": "weather", "arguments": {"city": "Rome"}}], pieces


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_behind_which_another_breaks_is_not_to_be_made(streams: bool) -> None:
    good = written_calls(HERMES, [("time", {})])
    broken = '<tool_call>{"name": "time", "arguments": {"a": ]</tool_call>'
    assert deltas(HERMES, Piece(good), streams=streams)[-1] == End("tool_calls", None, 0)
    assert deltas(HERMES, Piece(good + broken), streams=streams)[-1] == End("stop", None, 0)


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_may_have_one_call_ends_with_it(streams: bool) -> None:
    first, second = (written_calls(HERMES, [("time", arguments)]) for arguments in ({}, {"a": 1}))

    class Answer(Pieces):
        cancelled = 0

        def cancel(self) -> None:
            self.cancelled += 1

    async def collected(answer: Answer, *, is_single: bool) -> list[Delta]:
        parser = CallParser(HERMES, FUNCTIONS, streams=streams, is_single=is_single)
        return [delta async for delta in deltas_of(answer, parser)]

    for pieces in (
        (Piece(first + second, 1),),
        (Piece(first, 1), Piece(second, 2)),
        (Piece(first + second, 1, "length"),),
    ):
        answer = Answer(*pieces)
        deltas = asyncio.run(collected(answer, is_single=True))
        assert [type(delta) for delta in deltas] == [Begin, Call, CallArguments, CallEnd, End]
        assert isinstance(deltas[-1], End)
        assert deltas[-1].reason == "tool_calls"
        assert answer.cancelled == 1
    answer = Answer(Piece(first + second))
    assert len([d for d in asyncio.run(collected(answer, is_single=False)) if isinstance(d, Call)]) == 2
    assert answer.cancelled == 0


def test_text_that_cannot_begin_a_call_does_not_wait() -> None:
    parser = CallParser(HERMES, FUNCTIONS)
    assert parser.add("Hello <b") == ["Hello <b"]
    assert parser.add("r> <tool_") == ["r> "]
    assert parser.add("bar>") == ["<tool_bar>"]


@pytest.mark.parametrize("nested", ["[" * 100_000 + "]" * 100_000, '{"a": ' * 300 + "1" + "}" * 300])
def test_what_is_nested_too_deep_is_text(nested: str) -> None:
    answer = f'<tool_call>{{"name": "time", "arguments": {{"x": {nested}}}}}</tool_call>'
    assert parsed(HERMES, [answer]) == [answer]
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    [call] = parsed(HERMES, [f'<tool_call>{{"name": "time", "arguments": {{"x": {deep}}}}}</tool_call>'])
    assert isinstance(call, dict)


def test_a_grammar_says_where_calls_begin() -> None:
    """So that none comes in a text which the grammar leaves free."""
    inner = "<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>"
    current = CallParser(BY_NAME["qwen-xml"], FUNCTIONS, is_constrained=True)
    assert merged([*current.add(inner), *current.end()]) == [inner]
    assert parsed(BY_NAME["qwen-xml"], [inner]) == [{"name": "weather", "arguments": {"city": "Bern"}}]


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


@every_form
def test_the_format_is_the_one_that_the_template_writes(form: CallFormat) -> None:
    signs = next(other for other in FORMATS if other.name == form.name).signs
    assert format_of(f"{{% for tool in tools %}}{{{{ tool }}}}{{% endfor %}} {' ... '.join(signs)}").name == form.name


def test_a_template_without_a_known_format_has_that_of_hermes() -> None:
    assert format_of("{{ messages }}") is HERMES


CALL = {"id": "1", "type": "function", "function": {"name": "time", "arguments": {}}}
LOOP: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "1"},
]


def test_messages_and_tools_go_to_the_engine_as_they_came() -> None:
    known = conversation(LOOP, FunctionUse([WEATHER]), "{{ messages }}")
    assert (list(known.messages), list(known.tools)) == (LOOP, [WEATHER.to_json()])
    silent = conversation([USER], FunctionUse([WEATHER], "none"), "{{ messages }}")
    assert (list(silent.messages), list(silent.tools), silent.parser()) == ([USER], [], None)


def test_an_answer_does_not_go_on_behind_calls() -> None:
    last = {"role": "assistant", "content": "Now:"}
    for message, continues in ((last, True), ({**last, "tool_calls": [CALL]}, False)):
        messages = conversation([USER, message], FunctionUse(()), "{{ messages }}", continues=True).messages
        assert (CONTINUES in messages[-1]) is continues


def test_control_tokens_of_calls_have_text_and_end_a_thought_where_nothing_else_begins_behind_it() -> None:
    template = "{{ tools }}{{ m.tool_calls }}<|tool_call_begin|>"
    free = conversation([USER], FunctionUse([WEATHER]), template)
    assert "<|tool_call_argument_begin|>" in free.marks
    assert free.ends_thought == ("<|tool_calls_section_begin|>",)
    assert not conversation([USER], FunctionUse([WEATHER], "required"), template).ends_thought
    assert not conversation([USER], FunctionUse([WEATHER]), "{{ tools }}<tool_call>").ends_thought
    none = conversation([USER], FunctionUse([WEATHER], "none"), template)
    assert not none.marks
    assert not none.ends_thought


@pytest.mark.parametrize(
    ("types", "value", "json_text"),
    [
        (["string", "integer"], "12", "12"),
        (["string", "integer"], "1.5", '"1.5"'),
        (["string", "number"], "1.5", "1.5"),
        (["string", "null"], "None", "null"),
        (["string", "object"], '{"a": 1}', '{"a": 1}'),
        (["string", "object"], "[1]", '"[1]"'),
        ("string", "12", '"12"'),
        ("integer", "soon", '"soon"'),
        ("array", "['a', True]", '["a", true]'),
        ("number", "1e999", '"1e999"'),
    ],
)
def test_values_without_quotes_are_what_the_schema_says(types: Any, value: str, json_text: str) -> None:
    functions = {"f": {"properties": {"a": {"type": types}}}}
    answer = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert parsed(BY_NAME["glm"], [answer], functions) == [{"name": "f", "arguments": {"a": json.loads(json_text)}}]


def test_types_of_alternatives_that_refer_to_themselves_are_soon_known() -> None:
    again = {"$ref": "#/$defs/a"}
    root = {"properties": {"a": again}, "$defs": {"a": {"anyOf": [*[again] * 30, {"type": "integer"}]}}}
    answer = "<tool_call>f<arg_key>a</arg_key><arg_value>12</arg_value></tool_call>"
    assert parsed(BY_NAME["glm"], [answer], {"f": root}) == [{"name": "f", "arguments": {"a": 12}}]


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": 1.50, "b": 1E2, "a": 12345678901234567890.0}'])
def test_arguments_before_a_name_stay_as_they_are(arguments: str, quoted: bool) -> None:
    parser = CallParser(HERMES, FUNCTIONS)
    answer = f'<tool_call>{{"arguments": {json.dumps(arguments) if quoted else arguments}, "name": "time"}}</tool_call>'
    parts = [*parser.add(answer), *parser.end()]
    assert parts == [CallStart("time"), CallArguments(arguments), CallEnd()]


@pytest.mark.parametrize("streams", [False, True])
def test_a_long_call_is_not_copied_for_each_piece_of_it(streams: bool) -> None:
    parser = CallParser(HERMES, FUNCTIONS, streams=streams)
    tracemalloc.start()
    for piece in ('<tool_call>{"name": "time", "arguments": {"a": "', "word" * 500_000, "word"):
        parser.add(piece)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    parser.add("word")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before < 500_000


def test_splits_are_all_there_are() -> None:
    assert list(splits("abc")) == [["abc"], ["a", "b", "c"], ["a", "bc"], ["ab", "c"]]
