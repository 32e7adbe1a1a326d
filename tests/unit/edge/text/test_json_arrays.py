"""Test the bounds of arrays in JSON schemas: a default bound is added, and a schema's own bound is kept."""

from typing import Any

import pytest

from edge.text.json_arrays import MAX_ITEMS, bounded, bounds_line

NAMES = {"type": "array", "items": {"type": "string"}}
BOUND = {**NAMES, "maxItems": MAX_ITEMS}


@pytest.mark.parametrize(
    ("schema", "expected", "places"),
    [
        (NAMES, BOUND, ["#"]),
        ({"type": ["array", "null"]}, {"type": ["array", "null"], "maxItems": MAX_ITEMS}, ["#"]),
        ({"items": {"type": "string"}}, {"items": {"type": "string"}, "maxItems": MAX_ITEMS}, ["#"]),
        ({**NAMES, "minItems": 3}, {**BOUND, "minItems": 3}, ["#"]),
        ({**NAMES, "minItems": 999}, {**NAMES, "minItems": 999, "maxItems": 999}, ["#"]),
        (
            {"type": "array", "items": NAMES},
            {"type": "array", "items": BOUND, "maxItems": MAX_ITEMS},
            ["#/items", "#"],
        ),
        (
            {"type": "array", "prefixItems": [NAMES, {"type": "null"}]},
            {"type": "array", "prefixItems": [BOUND, {"type": "null"}], "maxItems": MAX_ITEMS},
            ["#/prefixItems/0", "#"],
        ),
        (
            {"type": "array", "items": [NAMES]},
            {"type": "array", "items": [BOUND], "maxItems": MAX_ITEMS},
            ["#/items/0", "#"],
        ),
        (
            {"type": "object", "properties": {"a/b": NAMES, "items": {"type": "string"}}},
            {"type": "object", "properties": {"a/b": BOUND, "items": {"type": "string"}}},
            ["#/properties/a~1b"],
        ),
        (
            {"patternProperties": {"^x": NAMES}, "additionalProperties": NAMES},
            {"patternProperties": {"^x": BOUND}, "additionalProperties": BOUND},
            ["#/patternProperties/^x", "#/additionalProperties"],
        ),
        (
            {"$ref": "#/$defs/names", "$defs": {"names": NAMES}, "definitions": {"more": NAMES}},
            {"$ref": "#/$defs/names", "$defs": {"names": BOUND}, "definitions": {"more": BOUND}},
            ["#/$defs/names", "#/definitions/more"],
        ),
        ({"anyOf": [NAMES, {"type": "null"}]}, {"anyOf": [BOUND, {"type": "null"}]}, ["#/anyOf/0"]),
        ({"oneOf": [{"type": "null"}, NAMES]}, {"oneOf": [{"type": "null"}, BOUND]}, ["#/oneOf/1"]),
        ({"type": "array", "anyOf": [NAMES]}, {"type": "array", "anyOf": [NAMES], "maxItems": MAX_ITEMS}, ["#"]),
    ],
    ids=str,
)
def test_arrays_get_a_bound(schema: dict[str, Any], expected: dict[str, Any], places: list[str]) -> None:
    assert bounded(schema) == (expected, places)


@pytest.mark.parametrize(
    "schema",
    [
        {**NAMES, "maxItems": 5000},
        {**NAMES, "maxItems": 0},
        {"maxItems": 5000, "anyOf": [NAMES, {"type": "array", "items": {"type": "integer"}}]},
        {"allOf": [NAMES, {"maxItems": 5000}]},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
        {"const": NAMES, "enum": [NAMES], "default": NAMES, "examples": [NAMES]},
        {"$ref": "#/$defs/a", "$defs": {"a": True}},
        {},
        {"type": 7, "properties": 3, "items_": NAMES},
    ],
    ids=str,
)
def test_what_has_a_bound_or_needs_none_stays(schema: dict[str, Any]) -> None:
    assert bounded(schema) == (schema, [])


def test_the_schema_that_was_given_is_not_changed() -> None:
    schema = {"type": "object", "properties": {"a": dict(NAMES)}}
    bounded(schema)
    assert schema == {"type": "object", "properties": {"a": NAMES}}


def test_people_are_told() -> None:
    line = "#/a is an array without maxItems: 128 items at most; set maxItems for another bound"
    assert bounds_line(["#/a"]) == line
    assert bounds_line(list("abcde")).startswith("a, b, c and 2 more are arrays without maxItems: 128 items")
