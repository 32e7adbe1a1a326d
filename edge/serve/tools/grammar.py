"""Rules of a Lark grammar, and those of values that are written otherwise than in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edge.bounds.json_arrays import MAX_ITEMS, bounded
from edge.serve.http.errors import BadRequest
from edge.serve.tools.formats import Notation
from edge.serve.tools.functions import json_text
from edge.serve.tools.schemas import references, resolved, types
from edge.serve.tools.values import is_bare_key
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
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = {"description", "title", "default", "examples", *_DEFINITIONS}
_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
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


def unwritable(key: str) -> BadRequest:
    """Return the error for a property whose name would not be read again."""
    return BadRequest(f"the property {key!r:.80} of a tool cannot be written in the call format of this model", "tools")


class Grammar:
    """Collects rules."""

    def __init__(self, notation: Notation) -> None:
        self.lines: list[str] = []
        self._notation = notation
        self.document: Mapping[str, Any] = {}  # that references point into
        self._rules: dict[str, str] = {}  # by what follows their name
        self._count = 0
        self._references: dict[str, str] = {}  # rules of the document, by reference

    def begin(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Begin with a function's parameters, into which references now point. Return them as `root_of` does."""
        self.document, self._references = schema, {}
        return root_of({"type": "object", **self.resolved(schema)})

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema, or what its reference stands for. BadRequest if that is nothing."""
        target = resolved(schema, self.document)
        if target is None and schema is not None:
            raise BadRequest(f"the reference {schema['$ref']!r:.80} in the parameters of a tool leads nowhere", "tools")
        return target if isinstance(target, Mapping) else {}

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
        self._count += 1
        return f"{name}_{self._count}"

    def literal(self, text: str) -> str:
        """Return a rule for exactly this text; "" for none."""
        return self.rule(_quoted(text), "lit") if text else ""

    def up_to(self, mark: str, name: str) -> str:
        """Return a rule for any text up to and with a mark. name: free, if nothing depends on the text, or raw."""
        key = f"{name}: {mark}"
        if key not in self._rules:
            self._rules[key] = self._named(name)
            self.lines.append(f"{self._rules[key]}[lazy]: /{ANYTHING}/ {_quoted(mark)}")
        return self._rules[key]

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for JSON of a schema, in a grammar of its own, so that references in it work."""
        return self.rule(f"%json {json_schema(schema)}", "json")

    def json_part(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for JSON of a part of the parameters. BadRequest if it refers to more than definitions."""
        part = {**schema, **{name: self.document[name] for name in _DEFINITIONS if name in self.document}}
        for reference in references(part):
            if not reference.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS)):
                raise BadRequest(f"the reference {reference!r:.80} in a tool is to no definition of it", "tools")
            self.resolved({"$ref": reference})
        return self.json(part)

    def other_key(self, root: Mapping[str, Any], before: str = "", behind: str = "") -> str:
        """Return a rule for a key that is none of the properties, between two texts."""
        names = "|".join(re.escape(name) for name in root["properties"] if re.fullmatch(_KEY, name))
        others = f" & ~/{before}({names}){behind}/" if names else ""
        return self.rule(f"/{before}{_KEY}{behind}/{others}", "KEY")

    def value(self, schema: Any) -> str:
        """Return a rule for a value of a schema in the notation."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str):
            if reference not in self._references:
                name = self._references[reference] = self._named("reference")
                self.lines.append(f"{name}: {self.value(self.resolved(schema))}")
            return self._references[reference]
        schema = schema if isinstance(schema, Mapping) else {}
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            return self.rule(" | ".join(self._constant(value) for value in values))
        for keyword in ("anyOf", "oneOf"):
            if alternatives := schema.get(keyword):
                rest = {key: value for key, value in schema.items() if key not in (keyword, *_ANNOTATIONS)}
                return self.rule(" | ".join(self.value(self._with(rest, own)) for own in alternatives))
        allowed = [kind for kind in (*_ALL_TYPES, "integer") if kind in (types(schema, {}) or _ALL_TYPES)]
        if allowed == list(_ALL_TYPES) and not schema.keys() - _ANNOTATIONS:
            return self._any()
        return self.rule(" | ".join(self._of_type(kind, schema) for kind in allowed))

    def _with(self, rest: Mapping[str, Any], alternative: Any) -> Any:
        """Return an alternative with what its schema says beside it. BadRequest where both have one keyword."""
        if not rest:
            return alternative
        own = self.resolved(alternative)
        if keyword := next((key for key in rest if own.get(key, rest[key]) != rest[key]), None):
            raise BadRequest(f"{keyword} beside and in an anyOf of a tool cannot be held in this call format", "tools")
        return {**rest, **own}

    def _constant(self, value: Any) -> str:
        return self.literal(written(value, self._notation))

    def _any(self) -> str:
        if "any" not in self._rules:
            name = self._rules["any"] = self._named("any")
            self.lines.append(f"{name}: {' | '.join(self._of_type(kind, {}) for kind in _ALL_TYPES)}")
        return self._rules["any"]

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
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
            item, least = self.value(schema.get("items")), int(schema.get("minItems", 0))
            most = int(schema.get("maxItems", max(MAX_ITEMS, least)))
            more = f"({self.literal(notation.item)} {item}){{{max(least - 1, 0)},{max(most - 1, 0)}}}"
            items = f"({item} {more})" if most else ""
            return f"{self.literal('[')} {items}{'' if least or not most else '?'} {self.literal(']')}"
        inner = self.members(root_of(schema), notation.key, bare=notation.bare_keys)
        return f"{self.literal('{')} {inner} {self.literal('}')}"

    def _string(self, quote: str) -> str:
        if self._notation.escapes:
            return rf"/{quote}([^{quote}\\\x00-\x1f]|\\[\\{quote}nrt])*{quote}/"
        return f"{self.literal(quote)} {self.up_to(quote, 'raw')}"

    def members(self, root: Mapping[str, Any], separator: str, *, bare: bool) -> str:
        """Return a rule for the members of an object, in the order of its properties. root: as `root_of` returns it.
        bare: keys have no quotes."""
        for key in root["properties"] if bare else ():
            if not is_bare_key(key, separator):
                raise unwritable(key)
        quote = "" if bare else self._notation.quotes[0]
        items = [
            (f"{self.literal(f'{quote}{key}{quote}{separator}')} {self.value(schema)}", key in root["required"])
            for key, schema in root["properties"].items()
        ]
        comma, rest = self.literal(self._notation.item), ("", "")  # of members behind none, and behind some
        if (more := root["additionalProperties"]) is not False:
            item = f"{self.other_key(root, quote, quote + separator)} {self.value(more)}"
            rest = (self.rule(f"({item} ({comma} {item})*)?"), self.rule(f"({comma} {item})*"))
        for item, is_required in reversed(items):
            first, behind = f"{item} {rest[1]}", f"{comma} {item} {rest[1]}"
            if not is_required:
                first, behind = f"({first})? | {rest[0]}".rstrip("| "), f"({behind})? | {rest[1]}".rstrip("| ")
            rest = self.rule(first), self.rule(behind)
        return rest[0]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # Lark has no control characters
