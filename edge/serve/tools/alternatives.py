"""Alternatives of a normalized JSON schema, without references, `anyOf`, `oneOf` and `allOf`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from edge.text.constraints.schemas import AT

COMBINING = ("$ref", "anyOf", "oneOf", "allOf")
ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")
_CHARACTERS, _PAIR = 10, 10  # cost units: characters of JSON to merge, and comparing a pair
_LARGER, _SMALLER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # token of a regular expression


class NotHeldError(Exception):
    """The schema cannot be enforced by rules of a notation. The message has the reason."""


class Flattener:
    """Finds the alternatives of schemas, and caches those of references."""

    def __init__(self, definitions: Mapping[str, Any], spend: Callable[[int], None]) -> None:
        """spend: called with the cost of each part."""
        self._definitions, self._spend = definitions, spend
        self._known: dict[str, list[dict[str, Any]] | None] = {}  # by reference; None: in progress

    def flat(self, schema: Any) -> list[dict[str, Any]]:
        """Return the alternatives; [] if no value is allowed. Raises NotHeldError."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        self._spend(1 + len(schema))
        ways = [{key: value for key, value in schema.items() if key not in (*COMBINING, "$defs")}]
        if "$ref" in schema:
            ways = self._both(ways, self._of_reference(schema["$ref"]))
        for part in schema.get("allOf", ()):
            ways = self._both(ways, self.flat(part))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts = [self.flat(part) for part in schema[keyword]]
                if keyword == "oneOf":
                    self._check_disjoint(parts)
                ways = self._both(ways, [way for own in parts for way in own])
        return ways

    def _of_reference(self, reference: str) -> list[dict[str, Any]]:
        if reference not in self._known:
            self._known[reference] = None
            self._known[reference] = self.flat(self._definitions[reference.removeprefix("#/$defs/")])
        if (ways := self._known[reference]) is None:
            raise NotHeldError("a reference in the schema leads only to itself: this cannot be enforced")
        return ways

    def _both(self, ways: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the alternatives of values allowed by both, without duplicates."""
        merged: dict[str, dict[str, Any]] = {}
        sizes = [1 + len(_key(other)) // _CHARACTERS for other in others]
        for way in ways:
            own_size = len(_key(way)) // _CHARACTERS
            for other, size in zip(others, sizes, strict=True):
                self._spend(own_size + size)
                if (both := _merged(way, other)) is not None:
                    same = both if len(ways) * len(others) > 1 else {}
                    merged[_key({key: value for key, value in same.items() if key != AT})] = both
        return list(merged.values())

    def _check_disjoint(self, parts: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Raise NotHeldError if a value may match two of these parts. parts: alternatives of each part."""
        for mine, its in combinations(parts, 2):
            for way in mine:
                for other in its:
                    self._spend(_PAIR + len(way.get("enum", ())) + len(other.get("enum", ())))
                    if not _are_disjoint(way, other):
                        raise NotHeldError("oneOf with alternatives that share values cannot be enforced")


def _key(value: Any) -> str:
    """Return a text that is the same for equal JSON values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def types(way: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that an alternative allows, restricted to the types of its values if it lists them."""
    own = way.get("type", ALL_TYPES)
    own = (own,) if isinstance(own, str) else tuple(own)
    values = [way["const"]] if "const" in way else way.get("enum")
    return own if values is None else tuple(kind for kind in own if any(_is_of(value, (kind,)) for value in values))


def constants(way: Mapping[str, Any]) -> list[Any] | None:
    """Return the list of values that an alternative allows, or None if it has no list.

    Raises NotHeldError if it has further constraints other than types.
    """
    values = [way["const"]] if "const" in way else way.get("enum")
    if values is None:
        return None
    if more := way.keys() - {"type", "const", "enum", "format", AT}:
        raise NotHeldError(f"{min(more)} together with enum or const cannot be enforced")
    allowed = types(way)
    listed = set(map(_key, way["enum"])) if "const" in way and "enum" in way else None
    return [value for value in values if _is_of(value, allowed) and (listed is None or _key(value) in listed)]


def _is_of(value: Any, allowed: Sequence[str]) -> bool:
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in allowed
    if isinstance(value, (int, float)):
        return "number" in allowed or ("integer" in allowed and value == value // 1)
    return ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object") in allowed


def _merged(way: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an alternative that combines both, or None if no value matches both."""
    both = {**way, **other}
    _check_closed(way, other)
    _check_closed(other, way)
    for key in way.keys() & other.keys():
        mine, its = way[key], other[key]
        if mine == its or key in (AT, "format"):
            continue
        if key == "type":
            common = [name for name in types(way) if name in types(other)]
            if ("integer" in types(way)) != ("integer" in types(other)) and "number" in (*types(way), *types(other)):
                common = [name for name in common if name != "number"] + ["integer"]
            if not common:
                return None
            both[key] = common
        elif key == "required":
            both[key] = list(dict.fromkeys([*mine, *its]))
        elif key == "enum":
            listed = set(map(_key, its))
            both[key] = [value for value in mine if _key(value) in listed]
        elif key == "const":
            return None
        elif key == "properties":
            if any(name in mine and mine[name] != part for name, part in its.items()):
                both[key] = {**mine, **its, **{n: {"allOf": [mine[n], its[n]]} for n in mine.keys() & its.keys()}}
            else:
                both[key] = {**mine, **its}
        elif key in _LARGER or key.startswith("min"):
            both[key] = max(mine, its)
        elif key in _SMALLER or key.startswith("max"):
            both[key] = min(mine, its)
        else:
            raise NotHeldError(f"{key} outside and inside of an anyOf, allOf or reference cannot be enforced")
    return both


def _check_closed(way: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise NotHeldError if one alternative constrains additional properties that the other names."""
    if way.get("additionalProperties", True) in (True, {}) and "patternProperties" not in way:
        return
    if other.get("properties", {}).keys() - way.get("properties", {}).keys():
        raise NotHeldError("properties with additionalProperties in another anyOf or allOf cannot be enforced")


def _are_disjoint(way: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    mine, its = set(types(way)), set(types(other))
    mine, its = ({*kinds, "number"} - {"integer"} if "integer" in kinds else kinds for kinds in (mine, its))
    if not mine & its:
        return True
    if all({"const", "enum"} & side.keys() for side in (way, other)):
        return not _values(way) & _values(other)
    if mine & its != {"object"}:
        return False
    common = set(way.get("required", ())) & set(other.get("required", ()))
    sides = [side.get("properties", {}) for side in (way, other)]
    tags = [[side.get(name) for side in sides] for name in common]
    return any(
        all(isinstance(tag, Mapping) and {"const", "enum"} & tag.keys() for tag in pair)
        and not _values(pair[0]) & _values(pair[1])
        for pair in tags
    )


def _values(way: Mapping[str, Any]) -> set[str]:
    return {_key(value) for value in ([way["const"]] if "const" in way else way["enum"])}


def text_expressions(way: Mapping[str, Any]) -> list[str]:
    """Return regular expressions that a text of an alternative must all match completely. Raises NotHeldError."""
    expressions = []
    if "minLength" in way or "maxLength" in way:
        expressions.append(f"(?s:.{{{way.get('minLength', 0)},{way.get('maxLength', '')}}})")
    if "pattern" in way:
        branches = (_whole(branch) for branch in _branches(way["pattern"]))
        expressions.append(f"({'|'.join(branches)})")
    return expressions


def _branches(pattern: str) -> Iterable[list[str]]:
    """Yield the tokens of each branch of a regular expression."""
    tokens: list[str] = []
    depth = 0
    for token in _TOKEN.findall(pattern):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "|" and not depth:
            yield tokens
            tokens = []
        else:
            tokens.append(token)
    yield tokens


def _whole(tokens: list[str]) -> str:
    """Return an expression for complete texts that contain a match of the tokens."""
    starts, ends = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    inner = tokens[1 if starts else 0 : -1 if ends else None]
    if "^" in inner or "$" in inner:
        raise NotHeldError("a pattern with ^ or $ in its middle cannot be enforced in the call format of this model")
    return f"{'' if starts else '(?s:.*)'}({''.join(map(_written, inner))}){'' if ends else '(?s:.*)'}"


def _written(token: str) -> str:
    """Return a token escaped for a regular expression between slashes."""
    if token in ("/", "\\/"):
        return "\\/"
    if len(token) > 1 and token[0] == "[":
        return re.sub(r"\\.|[/\n\r]", lambda part: _written(part[0]), token, flags=re.DOTALL)
    return json.dumps(token)[1:-1] if token in ("\n", "\r") else token
