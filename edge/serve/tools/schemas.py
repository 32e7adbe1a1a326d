"""Types that a function's parameter schema allows, to interpret values that are written without quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge.text.constraints.schemas import target

Schema = Mapping[str, Any]
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def type_of(value: Any) -> str:
    """Return the JSON schema name of a value's type."""
    return _TYPES.get(type(value), "null")


def resolved(schema: Any, root: Schema) -> Any:
    """Return the schema after following its references into the root, or None if one leads nowhere."""
    followed: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        if reference in followed:
            return None
        followed.add(reference)
        schema = target(reference, root)
    return schema


def types(schema: Any, root: Schema) -> frozenset[str]:
    """Return the types that a schema allows. An empty set means any type."""
    names: set[str] = set()
    followed: set[str] = set()
    waiting = [schema]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping):
            return frozenset()
        if schema.get("nullable") is True:
            names.add("null")
        alternatives = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in followed:
                followed.add(reference)
                waiting.append(target(reference, root))
        elif "const" in schema:
            names.add(type_of(schema["const"]))
        elif isinstance(values := schema.get("enum"), Sequence) and not isinstance(values, str):
            names.update(map(type_of, values))
        elif isinstance(own := schema.get("type"), str):
            names.add(own.lower())
        elif isinstance(own, Sequence):
            names.update(name.lower() for name in own if isinstance(name, str))
        elif isinstance(alternatives, Sequence):
            waiting += alternatives
        else:
            return frozenset()
    return frozenset(names)


def is_text(allowed: frozenset[str]) -> bool:
    """Return True if every value of these types is a text."""
    return allowed == {"string"}


def admits(allowed: frozenset[str], source: str) -> bool:
    """Return True if the type of a JSON value is allowed, not counting strings. If strings are not allowed, always
    return True, because the value cannot be a text.

    source: the value's JSON.
    """
    kinds = {"{": {"object"}, "[": {"array"}, "t": {"boolean"}, "f": {"boolean"}, "n": {"null"}, '"': {"string"}}
    numbers = {"number"} if set(".eE") & set(source) else {"number", "integer"}
    return "string" not in allowed or bool(kinds.get(source[0], numbers) & (allowed - {"string"}))
