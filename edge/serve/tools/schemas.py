"""Types that the schema of a function's parameters allows, for values that are written as they are, without quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
_DEPTH = 8  # of references and alternatives that are followed
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def type_of(value: Any) -> str:
    """Return the JSON schema's name for a value's type."""
    return _TYPES.get(type(value), "null")


def resolved(schema: Any, root: Schema) -> Any:
    """Return a schema, or what its reference into the root's definitions stands for."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = root
        for part in reference.lstrip("#/").split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema


def types(schema: Any, root: Schema, depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows; none: any."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return frozenset()
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(values := schema.get("enum"), Sequence) and not isinstance(values, str):
        return frozenset(map(type_of, values))
    if isinstance(own := schema.get("type"), str):
        return frozenset({own})
    if isinstance(own, Sequence):
        return frozenset(name for name in own if isinstance(name, str))
    for key in ("anyOf", "oneOf"):
        if isinstance(alternatives := schema.get(key), Sequence):
            each = [types(alternative, root, depth + 1) for alternative in alternatives]
            return frozenset().union(*each) if all(each) else frozenset()
    return frozenset()


def is_text(allowed: frozenset[str]) -> bool:
    """Return whether every value of these types is a text."""
    return allowed == {"string"}


def admits(allowed: frozenset[str], source: str) -> bool:
    """Return whether types allow a value, given as JSON, as something else than a text."""
    kinds = {"{": {"object"}, "[": {"array"}, "t": {"boolean"}, "f": {"boolean"}, "n": {"null"}, '"': {"string"}}
    numbers = {"number"} if set(".eE") & set(source) else {"number", "integer"}
    return "string" not in allowed or bool(kinds.get(source[0], numbers) & (allowed - {"string"}))
