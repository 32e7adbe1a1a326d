"""Test the schemas of forced tools: the keywords that each kind of call format enforces or refuses."""

import json
from typing import Any

import pytest

from edge.errors import SamplingError
from edge.llama.llama import Model
from edge.models.demo import MODEL_PATH
from edge.serve.http.errors import BadRequest
from edge.serve.tools.constraint import constraint
from edge.serve.tools.functions import Function, FunctionUse
from edge.serve.tools.parser import CallParser
from edge.serve.tools.sizes import MOST_CHARACTERS, MOST_DEPTH, MOST_NAME, MOST_VALUES, JsonSize
from edge.text.constraints.constraint import Constraint
from edge.text.constraints.schemas import normal_schema
from tests.serve.calls import merged
from tests.serve.test_call_grammars import BY_NAME, accepts, written_calls

FORMS = ("hermes", "gemma", "pythonic", "lfm2", "qwen-xml", "glm", "deepseek-dsml", "mistral-args")
OWN_NOTATION = ("gemma", "pythonic", "lfm2")
every_form = pytest.mark.parametrize("form", FORMS)
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def grammar_of(form: str, schema: Any, **more: Any) -> str | None:
    """Return the grammar of calls whose parameter `a` has this schema. more: beside the properties."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}
    return constraint(BY_NAME[form], FunctionUse([Function("f", "", parameters)], "required"))


@every_form
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 5}, [3, 5], [2, 6]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, [3], [2]),
        ({"type": "integer", "multipleOf": 7}, [14], [15]),
        ({"type": "integer", "maximum": 1e300, "minimum": -1e300}, [5], ["x"]),
        ({"type": "string", "minLength": 2, "maxLength": 3.0}, ["ab", "abc"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^[a-c/]+$"}, ["ab/c"], ["abd"]),
        ({"type": "string", "pattern": "b|^x$"}, ["abc", "x"], ["acd", "xx"]),
        ({"type": "string", "pattern": "^a", "maxLength": 3}, ["abc"], ["abcd", "b"]),
        ({"type": "string", "format": "iri-reference"}, ["any text"], [5]),
        ({"type": "string", "format": "no such format"}, ["any text"], [5]),
        ({"type": ["string", "null"]}, ["x", None], [[1]]),
        ({"type": "string", "nullable": True}, ["x", None], [[1]]),
        ({"type": "string", "enum": ["x"], "nullable": True}, ["x", None], ["y"]),
        ({"$ref": "#/$defs/x", "nullable": True}, [7, None], [8]),
        ({"enum": ["x", 1, None, True, {"y": [1]}]}, ["x", 1, None, True, {"y": [1]}], ["y", 2, False]),
        ({"type": "string", "enum": ["x", 1]}, ["x"], [1]),
        ({"type": "integer", "enum": [1, 1.5]}, [1], [1.5]),
        ({"type": "array", "items": NUMBER, "maxItems": 0}, [[]], [[1]]),
        ({"type": "STRING"}, ["x"], [[1]]),
        ({"type": "any"}, ["x", 1], []),
        ({"allOf": [{"$ref": "#/$defs/x"}]}, [7], [8]),
        ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [3], [1, 5]),
        ({"oneOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]}, [5, None], [4]),
        ({"type": "array", "items": NUMBER, "uniqueItems": False, "minItems": 0}, [[], [1, 1]], [["x"]]),
        ({"type": "array", "prefixItems": [NUMBER, TEXT], "items": False}, [[1, "x"]], [["x", 1], [1, "x", 2]]),
        ({"type": "object", "properties": {}, "required": None}, [{}], [[1]]),
        ({"type": "object", "additionalProperties": NUMBER, "propertyNames": TEXT}, [{"k": 1}, {}], [{"k": "x"}]),
        ({"type": "object", "properties": {"k": False, "l": NUMBER}}, [{"l": 1}], [{"k": 1}]),
        ({"anyOf": [{"type": "string", "minLength": 3}, {"type": "integer", "minimum": 5}]}, ["abc", 5], ["ab", 4]),
        ({"type": "object", "properties": {'k "\n é': NUMBER}, "required": []}, [{}], [[1]]),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_schema_says_is_held(form: str, schema: Any, good: list[Any], bad: list[Any]) -> None:
    more = {"$defs": {"x": {"const": 7}}}
    grammar = grammar_of(form, schema, **more)
    for value in good:
        assert any(accepts(grammar, text) for text in both_quotes(form, value)), value
    for value in bad:
        for text in both_quotes(form, value):
            if accepts(grammar, text):  # a text without quotes may look like a value of another type
                assert form in ("qwen-xml", "glm")
                parser = CallParser(BY_NAME[form], {"f": {"properties": {"a": schema}, **more}}, is_constrained=True)
                written = value if isinstance(value, str) else json.dumps(value)
                assert merged([*parser.add(text), *parser.end()]) == [{"name": "f", "arguments": {"a": written}}]


@pytest.mark.parametrize("keyword", ["Length", "Items", "Properties"])
def test_bound_of_zero_holds_where_it_constrains(keyword: str) -> None:
    for bound in (0, 1, 2.0):
        said = normal_schema({f"min{keyword}": bound, f"max{keyword}": bound})
        assert said[f"max{keyword}"] == bound
        assert said.get(f"min{keyword}", 0) == bound


def both_quotes(form: str, value: Any) -> list[str]:
    """Return a call, and the same with the other quotes that Python has."""
    call = written_calls(BY_NAME[form], [("f", {"a": value})])
    return [call, call.replace("'", '"')] if form in ("pythonic", "lfm2") else [call]


@every_form
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": NUMBER},
        {"not": TEXT},
        {"if": TEXT, "then": {"minLength": 3}},
        {"type": "object", "dependentRequired": {"x": ["y"]}},
        {"type": "object", "propertyNames": {"pattern": "^x"}},
        {"type": "object", "unevaluatedProperties": False, "anyOf": [{"required": ["x"]}]},
        {"type": "integer", "minimum": 1e300},
        {"type": "integer", "minimum": "3"},
        {"type": "string", "minLength": -1},
        {"type": "no type"},
        {"type": []},
        {"enum": []},
        {"properties": [1], "type": "object"},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/nothing"},
        {"$ref": "other.json#/x"},
        5,
    ],
    ids=str,
)
def test_what_cannot_be_held_is_refused_by_tool_and_property(form: str, schema: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(form, {"type": "object", "properties": {"b": schema}, "required": ["b"]})
    assert "the tool 'f', property a.b: " in str(caught.value)
    assert caught.value.param == "tools"
    assert len(str(caught.value)) < 400
    free = FunctionUse([Function("f", "", {"properties": {"b": schema}})])
    assert constraint(BY_NAME[form], free) is None


@pytest.mark.parametrize("form", OWN_NOTATION)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {"^x": NUMBER}},
        {"type": "object", "minProperties": 1},
        {"type": "object", "additionalProperties": NUMBER, "maxProperties": 1},
        {"oneOf": [{"type": "string", "minLength": 2}, TEXT]},
        {"enum": ["x"], "minLength": 2},
    ],
    ids=str,
)
def test_a_notation_without_a_keyword_refuses_it_by_tool_and_property(form: str, schema: Any) -> None:
    with pytest.raises(BadRequest, match=r"the tool 'f', property a: .* cannot be enforced"):
        grammar_of(form, schema)


def doubling(levels: int, level: Any) -> dict[str, Any]:
    """Return definitions, each of which has the next one twice. level: returns a definition from a reference."""
    definitions = {f"n{n}": level({"$ref": f"#/$defs/n{n + 1}"}, n) for n in range(levels)}
    return {"$defs": {**definitions, f"n{levels}": TEXT}}


@every_form
@pytest.mark.parametrize("levels", [22, 60])
def test_references_that_double_are_shared(form: str, levels: int) -> None:
    shapes = (
        lambda next_, n: {"anyOf": [next_, next_]},
        lambda next_, n: {"type": ["string", "object"], "anyOf": [next_, next_]},
        lambda next_, n: {"allOf": [next_, next_]},
        lambda next_, n: {"type": "object", "properties": {"l": next_, "r": next_}},
        lambda next_, n: {"type": "array", "prefixItems": [next_, next_]},
    )
    for shape in shapes:
        grammar = grammar_of(form, {"$ref": "#/$defs/n0"}, **doubling(levels, shape))
        assert len(grammar or "") < 800 * levels


@every_form
def test_references_that_double_into_different_schemas_are_bounded(form: str) -> None:
    def level(next_: Any, n: int) -> Any:
        return {"anyOf": [{**next_, "type": "object", "required": [f"{side}{n}"]} for side in "lr"]}

    document = doubling(40, level)
    document["$defs"]["n40"] = {"type": "object"}
    if form in (*OWN_NOTATION, "qwen-xml", "glm", "deepseek-dsml"):
        with pytest.raises(BadRequest, match="the tool 'f': the parameters need a grammar of more than"):
            grammar_of(form, {"$ref": "#/$defs/n0"}, **document)
    else:
        assert len(grammar_of(form, {"$ref": "#/$defs/n0"}, **document) or "") < 40_000


@every_form
def test_definitions_are_not_copied_for_each_property(form: str) -> None:
    large = {"type": "object", "properties": {f"q{n}": NUMBER for n in range(500)}}
    users = {f"p{n}": {"type": "array", "items": {"$ref": "#/$defs/large"}} for n in range(400)}
    schema = {"properties": users, "$defs": {"large": large}}
    grammar = constraint(BY_NAME[form], FunctionUse([Function("f", "", schema)], "required"))
    assert len(grammar or "") < 6 * len(json.dumps(schema))


@every_form
def test_recursive_schemas_are_held(form: str) -> None:
    leaf: dict[str, Any] = {"a": {"kids": [{"kids": []}]}}
    node = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
    grammar = grammar_of(form, {"$ref": "#/$defs/n"}, **{"$defs": {"n": {**node, "required": ["kids"]}}})
    assert accepts(grammar, written_calls(BY_NAME[form], [("f", leaf)]))
    assert not accepts(grammar, written_calls(BY_NAME[form], [("f", {"a": {"kids": [{}]}})]))


@pytest.mark.parametrize(
    ("within", "beyond", "what"),
    [
        ([0] * (MOST_VALUES - 1), [0] * MOST_VALUES, "more than 30000 values"),
        ("x" * MOST_CHARACTERS, "x" * (MOST_CHARACTERS + 1), "more than 1048576 characters"),
        ({"x" * MOST_NAME: 1}, {"x" * (MOST_NAME + 1): 1}, "a name of 1001 characters, at most 1000 allowed"),
        ({"$ref": "x" * MOST_NAME}, {"$ref": "x" * (MOST_NAME + 1)}, "a reference of 1001 characters"),
        (1.5, float("nan"), "a number that is not finite"),
    ],
    ids=["values", "characters", "name", "reference", "number"],
)
def test_sizes_are_bounded_exactly(within: Any, beyond: Any, what: str) -> None:
    JsonSize("tools").add(within)
    with pytest.raises(BadRequest, match=f"^the tool 'f' has {what}") as caught:
        JsonSize("tools").add(beyond, "the tool 'f'")
    assert caught.value.param == "tools"


def test_depth_is_bounded_exactly_and_all_tools_count_together() -> None:
    deep: Any = 1
    for _ in range(MOST_DEPTH):
        deep = [deep]
    JsonSize("format").add(deep)
    with pytest.raises(BadRequest, match=r"^format is nested more than 100 deep"):
        JsonSize("format").add([deep])
    together = JsonSize("tools")
    together.add([0] * (MOST_VALUES - 2))
    with pytest.raises(BadRequest, match=r"^the tool 'g' has more than 30000 values, alone or together"):
        together.add([0], "the tool 'g'")


@pytest.fixture(scope="module")
def model() -> Any:
    model = Model(str(MODEL_PATH), vocabulary_only=True)
    yield model
    model.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", ["(?=x)y", r"(x)\1", "(", r"\bx"])
def test_a_pattern_that_does_not_compile_is_named_without_lines_of_the_grammar(
    form: str, pattern: str, model: Model
) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string", "pattern": pattern}}, "required": ["b"]}
    if form in ("qwen-xml", "glm", "deepseek-dsml"):
        schema = schema["properties"]["b"]  # type: ignore[index]
    with pytest.raises((SamplingError, BadRequest)) as caught:
        Constraint(model, "lark", grammar_of(form, schema) or "")
    assert "the tool 'f', property a" in str(caught.value)
    assert len(str(caught.value)) < 400
    for part in ("lit_", "json_", "%json", " | ", "\n"):
        assert part not in str(caught.value).replace("a|b", "")


def test_a_schema_of_the_answer_names_the_property_whose_pattern_does_not_compile(model: Model) -> None:
    schema = {"type": "object", "properties": {"a": {"items": {"type": "string", "pattern": "(?!x)"}}}}
    with pytest.raises(SamplingError, match=r"property a: the pattern '\(\?!x\)': look-around"):
        Constraint(model, "json_schema", json.dumps(schema))
    with pytest.raises(SamplingError, match="property a: the keyword not cannot be enforced"):
        Constraint(model, "json_schema", json.dumps({"properties": {"a": {"not": {}}}}))
