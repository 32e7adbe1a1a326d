"""Test the grammars of tool calls: each format has one, and it permits exactly the calls that match their schemas."""

import json
from contextlib import suppress
from typing import Any, ClassVar

import llguidance
import pytest

from edge.llama.llama import Model
from edge.serve.engine.grammars import with_control_tokens
from edge.serve.http.errors import BadRequest
from edge.serve.tools.constraint import constraint
from edge.serve.tools.functions import Function, FunctionUse
from edge.serve.tools.parser import CallParser
from edge.text.templates.formats import FORMATS, CallFormat
from edge.text.templates.writing import written_calls
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
        "user-id": {"type": "integer"},
        "first name": {"type": "string"},
        "odd": {"enum": ["a b", None, 7]},
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
    {"city": "Rome", "user-id": 4, "first name": "Ada", "odd": "a b"},
    {"city": "Rome", "odd": None},
    {"city": "Rome", "odd": 7},
)
BAD: tuple[dict[str, Any], ...] = (
    {"city": "Bonn"},
    {},
    {"city": "Oslo", "days": "soon"},
    {"city": "Oslo", "tags": ["a"] * 4},
    {"city": "Oslo", "more": {"x": "a"}},
    {"city": "Oslo", "other": 1},
    {"city": "Oslo", "odd": "c"},
    {"city": "Oslo", "odd": 8},
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


def parse_held(form: CallFormat, text: str) -> Parsed:
    """Return what a parser makes of an answer that followed a grammar."""
    parser = CallParser(form, {"weather": SCHEMA, "time": {}}, is_constrained=True)
    return merged([*parser.add(text), *parser.end()])


@every_form
def test_a_call_that_must_come_follows_its_schema_and_is_recognized(form: CallFormat) -> None:
    grammar = constraint(form, FunctionUse([WEATHER, TIME], "required"))
    for arguments in GOOD:
        good = written_calls(form, [("weather", arguments)])
        assert accepts(grammar, good), good
        assert parse_held(form, good) == [{"name": "weather", "arguments": arguments}]
    once = written_calls(form, [("time", {})])
    assert accepts(grammar, once)
    calls = [[("weather", arguments)] for arguments in BAD]
    bad = [written_calls(form, call) for call in (*calls, [("nobody", {})], [("time", {})] * 2)]
    for text in ("", "Hello", *bad, once[:-1], f"Hello {once}"):
        assert not accepts(grammar, text), text
    several = constraint(form, FunctionUse([WEATHER, TIME], "required", several=True))
    three = [("time", {}), ("weather", GOOD[1]), ("time", {})]
    assert accepts(several, written_calls(form, three))
    assert parse_held(form, written_calls(form, three)) == [{"name": name, "arguments": own} for name, own in three]
    if not form.bare:
        single = constraint(form, FunctionUse([Function("time", "", {}, strict=True)], several=False))
        assert accepts(single, once)
        assert single is not None
        assert ")? TEXT" in single
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
        assert parse_held(form, between) == ["One: ", call, "and ", call, "done"]


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
        {"properties": {"a": {"type": "array", "minItems": float("inf")}}},
        {"properties": {str(n): {"type": "object", "properties": {"a": {"const": n}}} for n in range(2000)}},
    ],
    ids=range(9),
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


def wide(*functions: Function) -> dict[str, str | None]:
    """Return grammars of formats that write values in a notation of their own, or each parameter by itself."""
    use = FunctionUse(functions, "required")
    return {name: constraint(BY_NAME[name], use) for name in ("gemma", "lfm2", "qwen-xml", "glm", "deepseek-dsml")}


def test_references_point_into_the_parameters_of_their_own_function() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    functions = [Function(name, "", {**schema, "$defs": {"a": {"enum": [name]}}}) for name in ("f", "g")]
    for name, grammar in wide(*functions).items():
        assert accepts(grammar, written_calls(BY_NAME[name], [("g", {"a": "g"})])), name
        assert not accepts(grammar, written_calls(BY_NAME[name], [("g", {"a": "f"})])), name


def test_references_are_json_pointers() -> None:
    a, c = {"enum": ["x"]}, {"$ref": "#/$defs/u~1v~0w%20/anyOf/1"}
    schema = {"properties": {"a": a, "b": {"$ref": "#/properties/a"}, "c": c}}
    schema["$defs"] = {"u/v~w ": {"anyOf": [{}, {"enum": ["y"]}]}}
    for name, grammar in wide(Function("f", "", schema)).items():
        assert accepts(grammar, written_calls(BY_NAME[name], [("f", {"b": "x", "c": "y"})])), name
        assert not accepts(grammar, written_calls(BY_NAME[name], [("f", {"b": "y"})])), name
        assert not accepts(grammar, written_calls(BY_NAME[name], [("f", {"c": "x"})])), name
    below = {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": {"const": 1}}}}}
    for name, grammar in wide(Function("f", "", below)).items():
        assert accepts(grammar, written_calls(BY_NAME[name], [("f", {"a": 1})])), name
        assert not accepts(grammar, written_calls(BY_NAME[name], [("f", {"a": 2})])), name


@pytest.mark.parametrize("reference", ["#/$defs/nothing", "https://example.com/a", "#a", "#/$defs/loop"])
def test_a_reference_that_leads_nowhere_is_refused(reference: str) -> None:
    schema = {"properties": {"a": {"$ref": reference}}, "$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    for name in ("gemma", "lfm2", "qwen-xml"):
        with pytest.raises(BadRequest, match=r"leads (nowhere|only to itself)"):
            constraint(BY_NAME[name], FunctionUse([Function("f", "", schema)], "required"))


@pytest.mark.parametrize(("name", "key"), [("gemma", "x:y"), ("lfm2", "x=y"), ("qwen-xml", "x>y"), ("glm", " x")])
def test_a_required_property_that_a_format_cannot_write_is_refused_and_others_left_out(name: str, key: str) -> None:
    schema = {"properties": {key: {}, "a": {"const": 1}}}
    with pytest.raises(BadRequest, match=r"the tool .f.: the required property .* cannot be written"):
        constraint(BY_NAME[name], FunctionUse([Function("f", "", {**schema, "required": [key]})], "required"))
    grammar = constraint(BY_NAME[name], FunctionUse([Function("f", "", schema)], "required"))
    assert accepts(grammar, written_calls(BY_NAME[name], [("f", {"a": 1})]))


def test_alternatives_keep_what_stands_beside_them() -> None:
    inner: dict[str, Any] = {"type": "object", "properties": {"x": {"enum": ["a"]}}, "additionalProperties": False}
    inner["anyOf"] = [{"required": ["x"]}, {"minProperties": 0}]
    for name in ("gemma", "lfm2"):
        grammar = constraint(BY_NAME[name], FunctionUse([Function("f", "", {"properties": {"o": inner}})], "required"))
        assert accepts(grammar, written_calls(BY_NAME[name], [("f", {"o": {"x": "a"}})])), name
        assert not accepts(grammar, written_calls(BY_NAME[name], [("f", {"o": {"x": "b"}})])), name
        twice = Function("f", "", {"properties": {"o": {**inner, "anyOf": [{"properties": {"y": {}}}]}}})
        with pytest.raises(BadRequest, match="the tool 'f', property o: properties with additionalProperties"):
            constraint(BY_NAME[name], FunctionUse([twice], "required"))


CLOSED: dict[str, Any] = {"properties": {"x": {"enum": ["a"]}}, "additionalProperties": False}
WIDE: dict[str, Any] = {"properties": {"y": {"enum": ["b"]}}}


@pytest.mark.parametrize("more", [False, {"type": "string"}])
@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("name", ["gemma", "lfm2"])
def test_closed_part_of_a_schema_is_not_opened_by_its_sibling(name: str, is_swapped: bool, more: Any) -> None:
    """No value with the sibling's property is allowed, and such grammars cannot be written."""
    parts = [{**CLOSED, "additionalProperties": more}, WIDE]
    for schema in (
        {"type": "object", "allOf": parts[::-1] if is_swapped else parts},
        {"type": "object", **parts[is_swapped], "allOf": [parts[not is_swapped]]},
        {"type": "object", **parts[is_swapped], "anyOf": [parts[not is_swapped]]},
    ):
        function = Function("f", "", {"properties": {"o": schema}})
        with pytest.raises(BadRequest, match="the tool 'f', property o: properties with additionalProperties"):
            constraint(BY_NAME[name], FunctionUse([function], "required"))


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("name", ["gemma", "lfm2"])
def test_properties_that_either_part_requires_are_required(name: str, is_swapped: bool) -> None:
    parts: list[dict[str, Any]] = [{"properties": {key: {"enum": ["a"]}}, "required": [key]} for key in "xy"]
    function = Function(
        "f", "", {"properties": {"o": {"type": "object", "allOf": parts[::-1] if is_swapped else parts}}}
    )
    grammar = constraint(BY_NAME[name], FunctionUse([function], "required"))
    both = dict.fromkeys("yx" if is_swapped else "xy", "a")
    assert accepts(grammar, written_calls(BY_NAME[name], [("f", {"o": both})]))
    for key in "xy":
        assert not accepts(grammar, written_calls(BY_NAME[name], [("f", {"o": {key: "a"}})])), key


def test_another_key_may_begin_like_a_property() -> None:
    inner = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "additionalProperties": {"type": "string"}}
    function = Function("f", "", {**inner, "properties": {"city": {"enum": ["Rome"]}, "inner": inner}})
    for name, grammar in wide(function).items():
        for good in ({"city": "Rome", "circle": "x"}, {"inner": {"circle": "x"}}, {"cityx": "x"}):
            assert accepts(grammar, written_calls(BY_NAME[name], [("f", good)])), (name, good)
        for bad in ({"city": "Oslo"}, {"inner": {"city": "Oslo"}}):
            assert not accepts(grammar, written_calls(BY_NAME[name], [("f", bad)])), (name, bad)


def test_a_text_may_end_without_a_line_of_its_own() -> None:
    function = Function("f", "", {"properties": {"a": {"type": "string"}}})
    grammar = constraint(BY_NAME["qwen-xml"], FunctionUse([function], "required"))
    call = "<tool_call>\n<function=f>\n<parameter=a>\nx y</parameter>\n</function>\n</tool_call>"
    assert accepts(grammar, call)


@pytest.mark.parametrize("name", ["gemma", "lfm2", "qwen-xml"])
def test_constants_may_have_control_characters(name: str) -> None:
    function = Function("f", "", {"properties": {"a": {"enum": ["a\x01\x7f\x85b"]}}})
    grammar = constraint(BY_NAME[name], FunctionUse([function], "required"))
    assert accepts(grammar, written_calls(BY_NAME[name], [("f", {"a": "a\x01\x7f\x85b"})]))


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
