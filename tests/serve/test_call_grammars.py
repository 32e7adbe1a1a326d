"""Grammars of calls: each format has one, it holds calls to their schemas, and what it lets through is a call."""

import json
from contextlib import suppress
from typing import Any, ClassVar

import llguidance
import pytest

from edge.llama.llama import Model
from edge.serve.engine.grammars import with_control_tokens
from edge.serve.http.errors import BadRequest
from edge.serve.tools.constraint import constraint
from edge.serve.tools.formats import FORMATS, CallFormat
from edge.serve.tools.functions import Function, FunctionUse
from edge.serve.tools.parser import CallParser
from edge.serve.tools.writing import written_calls
from tests.serve.calls import Parsed, merged

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "more": {
            "type": "object",
            "properties": {"x": {"type": ["string", "null"]}, "y": {"type": "boolean"}, "z": {"const": 2.5}},
            "required": ["y"],
        },
        "note": {"type": "string"},
        "any": {},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
GOOD: tuple[dict[str, Any], ...] = (
    {"city": "Oslo"},
    {"city": "Rome", "days": -3},
    {"city": "Oslo", "tags": []},
    {"city": "Oslo", "tags": ["a", "it's"], "more": {"x": None, "y": True}},
    {"city": "Oslo", "days": 0, "more": {"y": False, "z": 2.5}, "note": "a < b\n'c'", "any": [1, {"k": "v"}]},
)
BAD: tuple[dict[str, Any], ...] = (
    {"city": "Bonn"},
    {},
    {"city": "Oslo", "days": "soon"},
    {"city": "Oslo", "tags": ["a"] * 4},
    {"city": "Oslo", "more": {"x": "a"}},
    {"city": "Oslo", "other": 1},
)
WEATHER, TIME = Function("weather", "Tells the weather.", SCHEMA), Function("time", "", {})
BY_NAME = {form.name: form for form in reversed(FORMATS)}
HERMES = BY_NAME["hermes"]
every_form = pytest.mark.parametrize("form", BY_NAME.values(), ids=BY_NAME)


def accepts(grammar: str | None, text: str) -> bool:
    """Return whether a grammar allows this and nothing more must come."""
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar or ""))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def held(form: CallFormat, text: str) -> Parsed:
    """Return what a parser makes of an answer that followed a grammar."""
    parser = CallParser(form, {"weather": SCHEMA, "time": {}}, is_constrained=True)
    return merged([*parser.add(text), *parser.end()])


@every_form
def test_a_call_that_must_come_follows_its_schema_and_is_recognized(form: CallFormat) -> None:
    grammar = constraint(form, FunctionUse([WEATHER, TIME], "required"))
    for arguments in GOOD:
        good = written_calls(form, [("weather", arguments)])
        assert accepts(grammar, good), good
        assert held(form, good) == [{"name": "weather", "arguments": arguments}]
    once = written_calls(form, [("time", {})])
    assert accepts(grammar, once)
    calls = [[("weather", arguments)] for arguments in BAD]
    bad = [written_calls(form, call) for call in (*calls, [("nobody", {})], [("time", {})] * 2)]
    for text in ("", "Hello", *bad, once[:-1], f"Hello {once}"):
        assert not accepts(grammar, text), text
    several = constraint(form, FunctionUse([WEATHER, TIME], "required", several=True))
    three = [("time", {}), ("weather", GOOD[1]), ("time", {})]
    assert accepts(several, written_calls(form, three))
    assert held(form, written_calls(form, three)) == [{"name": name, "arguments": own} for name, own in three]
    named = constraint(form, FunctionUse([WEATHER, TIME], name="weather"))
    assert accepts(named, written_calls(form, [("weather", GOOD[0])]))
    assert not accepts(named, once)


@every_form
def test_a_strict_function_may_be_called_only_as_its_schema_says(form: CallFormat) -> None:
    grammar = constraint(form, FunctionUse([Function("weather", "", SCHEMA, strict=True)]))
    once = [("weather", GOOD[1])]
    for good in ("", "Hello.", written_calls(form, once), written_calls(form, once * 2)):
        assert accepts(grammar, good), good
    for arguments in BAD:
        assert not accepts(grammar, written_calls(form, [("weather", arguments)]))
    if not form.bare:
        between = f"One: {written_calls(form, once)} and {written_calls(form, once)} done"
        assert accepts(grammar, between)
        call = {"name": "weather", "arguments": GOOD[1]}
        assert held(form, between) == ["One: ", call, "and ", call, "done"]


def test_with_a_schema_for_text_the_answer_is_a_call_or_follows_it() -> None:
    grammar = constraint(HERMES, FunctionUse([WEATHER]), {"type": "integer"})
    assert accepts(grammar, "12")
    assert accepts(grammar, written_calls(HERMES, [("weather", GOOD[0])]))
    assert not accepts(grammar, "Hello")


def test_nothing_is_held_to_anything_without_need() -> None:
    assert constraint(HERMES, FunctionUse([WEATHER])) is None
    assert constraint(HERMES, FunctionUse([WEATHER], "none"), {"type": "object"}) is None


@pytest.mark.parametrize("name", ["qwen-xml", "gemma", "pythonic"])
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"required": ["a"]}]},
        {"properties": 5},
        {"properties": {"a": {"type": "object", "properties": [1]}}},
        {"required": 7},
        {"properties": {"a": {"type": "array", "minItems": "x"}}},
        {"properties": {"a": {"enum": 3}}},
        {"properties": {"a": {"items": {"items": {"enum": []}}}}},
        {"properties": {str(n): {"type": "object", "properties": {"a": {"const": n}}} for n in range(2000)}},
    ],
    ids=range(8),
)
def test_a_schema_that_a_grammar_cannot_hold_is_refused_or_left_to_the_compiler(name: str, schema: Any) -> None:
    with suppress(BadRequest):
        assert constraint(BY_NAME[name], FunctionUse([Function("f", "", schema)], "required"))


def test_references_to_themselves_and_free_objects_have_grammars() -> None:
    tree = {
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}}}},
    }
    numbers = {"additionalProperties": {"type": "integer"}}
    for name in ("gemma", "lfm2", "qwen-xml", "glm"):
        form = BY_NAME[name]
        grammar = constraint(form, FunctionUse([Function("f", "", tree), Function("g", "", numbers)], "required"))
        for call in (("f", {"root": {"left": {"left": {}}}}), ("g", {"a": 1, "b_2": -2}), ("g", {})):
            assert accepts(grammar, written_calls(form, [call])), (name, call)
        assert not accepts(grammar, written_calls(form, [("g", {"a": "x y"})]))


class Vocabulary(Model):
    """Bytes, and two control tokens."""

    def __init__(self) -> None:
        self.names = {256: "<|open|>", 257: "｜X｜"}

    def __del__(self) -> None:
        """Nothing is to be freed."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        ids: list[int] = []
        while text:
            token = next((token for token, name in self.names.items() if text.startswith(name)), None)
            ids += [token] if token is not None else text[0].encode()
            text = text[len(self.names.get(token or 0, " ")) :]
        return ids

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token in self.names:
            return self.names[token].encode() if special else b""
        return bytes([token])


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        ('lit_0: "<|open|>"', "lit_0: <[256]>"),
        ('lit_1: "a<|open|>b<｜X｜>"', 'lit_1: "a" <[256]> "b<" <[257]> ">"'),
        ('lit_2: "<open>"', 'lit_2: "<open>"'),
        (r'free_3[lazy]: /(.|\n)*/ "<|open|>x"', r'free_3: /(.|\n)*/ <[256]> "x"'),
        (r'free_3[lazy]: /(.|\n)*/ "<｜X｜x>"', r'free_3: /(.|\n)*/ <[257]> "x>"'),
        (
            r'raw_4[lazy]: /(.|\n)*/ "</｜X｜>"',
            'raw_4: head_4 <[257]> ">"\nhead_4[lazy]: /(.|\\n)*/ "</"',
        ),
        (r'raw_5[lazy]: /(.|\n)*/ "\n</x>"', r'raw_5[lazy]: /(.|\n)*/ "\n</x>"'),
        ('json_6: %json {"const": "<|open|>"}', 'json_6: %json {"const": "<|open|>"}'),
    ],
)
def test_control_tokens_take_the_place_of_marks(rule: str, becomes: str) -> None:
    assert with_control_tokens(f"start: lit_0\n{rule}", Vocabulary()) == f"start: lit_0\n{becomes}"


def test_a_grammar_with_control_tokens_holds_what_it_held() -> None:
    """With text before the mark, which the model writes as it was taught to."""

    class Tokens:
        eos_token_id, bos_token_id = 258, None
        special_token_ids: ClassVar = [256, 257, 258]
        tokens: ClassVar = [*(bytes([n]) for n in range(256)), b"<|open|>", "｜X｜".encode(), b"<end>"]

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()), eos_token=[258])
    form = CallFormat("test", "parameters", ("<|open|>",), key="<｜X｜k>", key_end="=", value_end="</｜X｜>", ends="!")
    function = Function("f", "", {"properties": {"a": {"type": "string"}}}, strict=True)
    grammar = with_control_tokens(constraint(form, FunctionUse([function])) or "", Vocabulary())
    for text, is_allowed in (
        ("Hi<|open|>f<｜X｜k>a=x y</｜X｜>! <", True),
        ("Hi<|open|>g", False),
        ("Hi<|open|>f<｜X｜k>b", False),
        ("Hi<|open|>f!", True),
    ):
        matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = Vocabulary().tokenize(text)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == is_allowed, text


def test_json_in_a_grammar_keeps_its_marks() -> None:
    function = Function("f", "", {"properties": {"a": {"const": "<tool_call>"}}})
    grammar = constraint(HERMES, FunctionUse([function], "required")) or ""
    assert json.dumps({"const": "<tool_call>"}) in with_control_tokens(grammar, Vocabulary())
