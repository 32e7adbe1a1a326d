"""Bounds of arrays in JSON schemas: an array without `maxItems` gets one, because a small model may never close it.

A schema describes an array if its `type` includes array, or if it has no type but keywords of items. The bound is
MAX_ITEMS, or `minItems` if that is larger. A schema with `maxItems` stays unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_ITEMS = 128
_ITEMS = ("items", "prefixItems", "minItems", "additionalItems")  # keywords that describe an array even without a type
_ONE = ("items", "additionalItems", "additionalProperties")  # keywords whose value is a schema
_SEVERAL = ("items", "prefixItems", "anyOf", "oneOf", "allOf")  # keywords whose value is a list of schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose value maps names to schemas
_SAME_VALUE = ("anyOf", "oneOf", "allOf")  # keywords that describe the same value as the schema around them


def bounded(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the schema with a bound for each unbounded array, and the JSON pointers of these arrays."""
    pointers: list[str] = []
    return _bounded(schema, "#", False, pointers), pointers


def with_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with a bound for each unbounded array.

    It computes no pointers, because these may be far longer than the schema.
    """
    limited: dict[str, Any] = _bounded(schema, None, False, [])
    return limited


def bounds_line(pointers: Sequence[str]) -> str:
    """Return a message that names the bounded arrays."""
    named = ", ".join(pointers[:3]) + (f" and {len(pointers) - 3} more" if len(pointers) > 3 else "")
    arrays = "is an array" if len(pointers) == 1 else "are arrays"
    return f"{named} {arrays} without maxItems: {MAX_ITEMS} items at most; set maxItems for another bound"


def _bounded(schema: Any, pointer: str | None, is_bounded: bool, pointers: list[str]) -> Any:
    """Return the schema with bounds, and append the pointers of new ones.

    pointer: place of this schema; None: no pointers are needed.
    is_bounded: an enclosing schema bounds the same value.
    """
    if not isinstance(schema, Mapping):
        return schema
    is_bounded = is_bounded or "maxItems" in schema or _branch_bounds(schema)
    adds_bound = _is_open_array(schema) and not is_bounded
    is_bounded = is_bounded or adds_bound
    result = dict(schema)
    for key, value in schema.items():
        inside = is_bounded and key in _SAME_VALUE
        here = _below(pointer, key)
        if key in _NAMED and isinstance(value, Mapping):
            result[key] = {name: _bounded(inner, _below(here, name), False, pointers) for name, inner in value.items()}
        elif key in _SEVERAL and isinstance(value, list):
            result[key] = [_bounded(inner, _below(here, str(i)), inside, pointers) for i, inner in enumerate(value)]
        elif key in _ONE:
            result[key] = _bounded(value, here, False, pointers)
    if adds_bound:
        least = schema.get("minItems")
        result["maxItems"] = max(MAX_ITEMS, least) if isinstance(least, int) else MAX_ITEMS
        if pointer is not None:
            pointers.append(pointer)
    return result


def _branch_bounds(schema: Mapping[str, Any]) -> bool:
    """Return True if a branch of `allOf` has a bound. Such a branch describes the same value."""
    parts = schema.get("allOf")
    return isinstance(parts, list) and any(isinstance(part, Mapping) and "maxItems" in part for part in parts)


def _is_open_array(schema: Mapping[str, Any]) -> bool:
    """Return True if the schema describes an array that may continue after the listed items."""
    kind = schema.get("type")
    is_array = "array" in kind if isinstance(kind, str | list) else any(key in schema for key in _ITEMS)
    if isinstance(schema.get("items"), list):
        return is_array and schema.get("additionalItems") is not False
    return is_array and schema.get("items") is not False


def _below(pointer: str | None, key: str) -> str | None:
    return None if pointer is None else f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
