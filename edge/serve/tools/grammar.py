"""Rules of a Lark grammar, and those of values that are written otherwise than in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edge.bounds.json_arrays import MAX_ITEMS, bounded
from edge.serve.http.errors import BadRequest
from edge.serve.tools.formats import Notation
from edge.serve.tools.functions import json_text
from edge.serve.tools.schemas import resolved, types
from edge.serve.tools.writing import written

# Separators as in templates, so that a small model does not write white space without end.
_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
ANYTHING = r"(.|\n)*"
_NUMBERS = {
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/",
}
_ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")
_NOT_HELD = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentSchemas", "propertyNames")
_MAX_RULES = 20_000


def json_schema(schema: Mapping[str, Any], param: str = "tools") -> str:
    """Return a schema in its grammar's form. BadRequest as `json_text`."""
    try:
        limited, _ = bounded(schema)
    except RecursionError:
        raise BadRequest("the schema is nested too deep", param) from None
    return json_text({**limited, **_STYLE}, param)


def root_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with its `properties`, `required` and `additionalProperties` filled in. BadRequest
    if it says more than these."""
    if keyword := next((keyword for keyword in _NOT_HELD if keyword in schema), None):
        raise BadRequest(
            f"{keyword} in the parameters of a tool cannot be held in the call format of this model", "tools"
        )
    required = [str(key) for key in schema.get("required", ())]
    properties = schema.get("properties", {})
    properties = {**properties, **{key: {} for key in required if key not in properties}}
    more = schema.get("additionalProperties", not properties)
    return {**schema, "properties": properties, "required": required, "additionalProperties": more}


class Grammar:
    """Collects rules."""

    KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"

    def __init__(self, notation: Notation) -> None:
        self.lines: list[str] = []
        self._notation = notation
        self._rules: dict[str, str] = {}  # by what follows their name
        self._references: dict[str, str] = {}

    def rule(self, body: str, name: str = "rule") -> str:
        """Return the name of a rule with this body."""
        key = f"{name}: {body}"
        if not body.strip("() ?|"):
            raise ValueError("a schema allows no value")
        if key not in self._rules:
            self._rules[key] = self._named(name)
            self.lines.append(f"{self._rules[key]}: {body}")
        return self._rules[key]

    def _named(self, name: str) -> str:
        if len(self.lines) > _MAX_RULES:
            raise BadRequest("the parameters of the tools make too large a grammar", "tools")
        return f"{name}_{len(self._rules) + len(self._references)}"

    def literal(self, text: str) -> str:
        """Return a rule for exactly this text; "" for none."""
        return self.rule(json.dumps(text, ensure_ascii=False), "lit") if text else ""

    def up_to(self, mark: str, name: str) -> str:
        """Return a rule for any text up to and with a mark. name: free, if nothing depends on the text, or raw."""
        key = f"{name}: {mark}"
        if key not in self._rules:
            self._rules[key] = self._named(name)
            self.lines.append(f"{self._rules[key]}[lazy]: /{ANYTHING}/ {json.dumps(mark, ensure_ascii=False)}")
        return self._rules[key]

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for JSON of a schema, in a grammar of its own, so that references in it work."""
        return self.rule(f"%json {json_schema(schema)}", "json")

    def value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return a rule for a value of a schema in the notation."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str):
            if reference not in self._references:
                name = self._references[reference] = self._named("reference")
                self.lines.append(f"{name}: {self.value(resolved(schema, root), root)}")
            return self._references[reference]
        schema = schema if isinstance(schema, Mapping) else {}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            return self.rule(" | ".join(self._constant(value) for value in values))
        if alternatives := schema.get("anyOf") or schema.get("oneOf"):
            return self.rule(" | ".join(self.value(alternative, root) for alternative in alternatives))
        allowed = [kind for kind in (*_ALL_TYPES, "integer") if kind in (types(schema, root) or _ALL_TYPES)]
        if allowed == list(_ALL_TYPES) and not schema.keys() - {"description", "title", "default"}:
            return self._any(root)
        return self.rule(" | ".join(self._of_type(kind, schema, root) for kind in allowed))

    def _constant(self, value: Any) -> str:
        return self.literal(written(value, self._notation))

    def _any(self, root: Mapping[str, Any]) -> str:
        if "any" not in self._references:
            name = self._references["any"] = self._named("any")
            kinds = (self._of_type(kind, {}, root) for kind in _ALL_TYPES)
            self.lines.append(f"{name}: {' | '.join(kinds)}")
        return self._references["any"]

    def _of_type(self, kind: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        notation = self._notation
        if kind in _NUMBERS:
            return _NUMBERS[kind]
        if kind == "boolean":
            return f"{self._constant(True)} | {self._constant(False)}"
        if kind == "null":
            return self._constant(None)
        if kind == "string":
            return self._string(notation.quotes[0])
        if kind == "array":
            item, least = self.value(schema.get("items"), root), int(schema.get("minItems", 0))
            most = int(schema.get("maxItems", max(MAX_ITEMS, least)))
            more = f"({self.literal(notation.item)} {item}){{{max(least - 1, 0)},{max(most - 1, 0)}}}"
            items = f"({item} {more})" if most else ""
            return f"{self.literal('[')} {items}{'' if least or not most else '?'} {self.literal(']')}"
        inner = self.members(root_of({**schema, **definitions(root)}), notation.key, bare=notation.bare_keys)
        return f"{self.literal('{')} {inner} {self.literal('}')}"

    def _string(self, quote: str) -> str:
        if self._notation.escapes:
            return rf"/{quote}([^{quote}\\\x00-\x1f]|\\[\\{quote}nrt])*{quote}/"
        return f"{self.literal(quote)} {self.up_to(quote, 'raw')}"

    def members(self, root: Mapping[str, Any], separator: str, *, bare: bool) -> str:
        """Return a rule for the members of an object, in the order of its properties. root: as `root_of` returns it.
        bare: keys have no quotes."""
        quote = "" if bare else self._notation.quotes[0]
        items = [
            (f"{self.literal(f'{quote}{key}{quote}{separator}')} {self.value(schema, root)}", key in root["required"])
            for key, schema in root["properties"].items()
        ]
        comma, rest = self.literal(self._notation.item), ("", "")  # of members behind none, and behind some
        if (more := root["additionalProperties"]) is not False:
            item = f"{self.literal(quote)} {self.KEY} {self.literal(quote + separator)} {self.value(more, root)}"
            rest = (self.rule(f"({item} ({comma} {item})*)?"), self.rule(f"({comma} {item})*"))
        for item, is_required in reversed(items):
            first, behind = f"{item} {rest[1]}", f"{comma} {item} {rest[1]}"
            if not is_required:
                first, behind = f"({first})? | {rest[0]}".rstrip("| "), f"({behind})? | {rest[1]}".rstrip("| ")
            rest = self.rule(first), self.rule(behind)
        return rest[0]


def definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that references in it point to."""
    return {name: root[name] for name in ("$defs", "definitions") if name in root}
