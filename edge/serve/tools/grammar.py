"""Rules of a Lark grammar, including rules for values in notations other than JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge.errors import SamplingError
from edge.serve.http.errors import BadRequest
from edge.serve.tools.alternatives import ALL_TYPES, Flattener, NotHeldError, constants, text_expressions, types
from edge.serve.tools.functions import Function
from edge.serve.tools.values import is_bare_key
from edge.text.constraints.schemas import AT, LEAVES, PLACE, normal_schema, place_below
from edge.text.json_arrays import MAX_ITEMS, with_bounds
from edge.text.templates.formats import JSON, Notation
from edge.text.templates.writing import written

# Fixed separators as in templates, because a small model may write endless optional white space.
_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
ANYTHING = r"(.|\n)*"
_NUMBERS = {
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/",
}
NO_VALUE = "the schema allows no value"
# Keywords of texts, and below those of numbers.
_LIMITS = {"string": {"minLength", "maxLength", "pattern", "format"}}
_LIMITS |= {kind: {*LEAVES} - _LIMITS["string"] for kind in ("integer", "number")}
_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_MAX_RULES = 20_000
_MAX_CHARACTERS = 4 << 20
_MAX_WORK = 100_000  # maximum cost; takes less than a second on a slow processor
# A text whose beginning looks like JSON of another type. Only the first character counts, as in the lexer.
JSON_LIKE = r"[ \t\n]*([{\[0-9-]|true|false|null|True|False|None)(?s:.*)"


def json_schema(schema: Mapping[str, Any], param: str = "tools") -> str:
    """Return a schema as JSON for the grammar. Raises BadRequest if it has numbers that JSON cannot represent."""
    try:
        return json.dumps({**with_bounds(schema), **_STYLE}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise BadRequest("a schema has a number that is too large, or is nested too deeply", param) from None


def normal(schema: Mapping[str, Any], param: str, whose: str = "") -> dict[str, Any]:
    """Return a schema in normal form. Raises BadRequest if it cannot be enforced."""
    try:
        return normal_schema(schema, whose)
    except SamplingError as error:
        raise BadRequest(str(error), param) from None
    except RecursionError:
        raise BadRequest(f"{whose or 'the schema'} is nested too deeply; simplify it", param) from None


class Grammar:
    """Builds the rules of a grammar."""

    def __init__(self, notation: Notation) -> None:
        self.lines: list[str] = []
        self._notation = notation
        self._whose = ""  # owner of the schema that is being processed
        self._definitions: Mapping[str, Any] = {}
        self._flattener = Flattener({}, self.spend)
        self._rules: dict[str, str] = {}  # rule names by name and body
        self._count = self._n_characters = self._work = 0
        self._references: dict[str, str] = {}  # rules of definitions, by reference
        self._waiting: list[tuple[str, str, str]] = []  # rules without a body yet: name, reference and place

    def begin(self, function: Function) -> dict[str, Any]:
        """Begin a function's parameters. Return their schema in normal form. Raises BadRequest."""
        self._whose = f"the tool {function.name!r}"
        schema = normal({"type": "object", **function.parameters}, "tools", self._whose)
        self._definitions, self._references = schema.get("$defs", {}), {}
        self._flattener = Flattener(self._definitions, self.spend)
        return schema

    def end(self) -> None:
        """Write the rules of referenced definitions. It uses a loop, because chains of references may be long."""
        while self._waiting:
            name, reference, at = self._waiting.pop()
            schema = self._definitions[reference.removeprefix("#/$defs/")]
            if not (body := self.value(schema, at)):
                raise self.error(at, NO_VALUE)
            self._add(f"{name}: {body}")

    def error(self, at: str, what: str) -> BadRequest:
        """Return the error for a place in the schema."""
        return BadRequest(", ".join(filter(None, (self._whose, at and f"property {at}"))) + f": {what}", "tools")

    def spend(self, work: int) -> None:
        """Add to the cost. Raises BadRequest if it exceeds the limit."""
        self._work += work
        if self._work > _MAX_WORK:
            raise self._too_large()

    def _too_large(self) -> BadRequest:
        return BadRequest(
            f"{self._whose or 'a tool'}: the parameters need a grammar of more than {_MAX_RULES} rules, or"
            f" {_MAX_CHARACTERS} characters; do not require calls, or make the schema smaller",
            "tools",
        )

    def alternatives(self, schema: Any, at: str = "") -> list[dict[str, Any]]:
        """Return the alternatives of a schema. Raises BadRequest if it cannot be enforced."""
        try:
            return self._flattener.flat(schema)
        except NotHeldError as error:
            raise self.error(at, str(error)) from None

    def rule(self, body: str, name: str = "rule", at: str = "") -> str:
        """Return the name of a rule with this body. at: place of a schema, for errors of the compiler."""
        key = f"{name}: {body}"
        if key not in self._rules:
            self._rules[key] = self._named(name)
            self._add(f"{PLACE}{at}\n{self._rules[key]}: {body}" if at else f"{self._rules[key]}: {body}")
        return self._rules[key]

    def _add(self, line: str) -> None:
        self._n_characters += len(line)
        if self._n_characters > _MAX_CHARACTERS:
            raise self._too_large()
        self.lines.append(line)

    def _named(self, name: str) -> str:
        if self._count > _MAX_RULES:
            raise self._too_large()
        self._count += 1
        return f"{name}_{self._count}"

    def literal(self, text: str) -> str:
        """Return a rule for exactly this text, or "" for an empty text."""
        return self.rule(_quoted(text), "lit") if text else ""

    def up_to(self, mark: str, name: str) -> str:
        """Return a rule for any text up to and including a mark.

        name: "free" if nothing depends on the text, or "raw".
        """
        key = f"{name}: {mark}"
        if key not in self._rules:
            self._rules[key] = self._named(name)
            self._add(f"{self._rules[key]}[lazy]: /{ANYTHING}/ {_quoted(mark)}")
        return self._rules[key]

    def text_up_to(self, mark: str, way: Mapping[str, Any], at: str, *, no_json: bool = False) -> str:
        """Return a rule for a text of an alternative and the mark after it.

        no_json: exclude texts that look like JSON of another type. Raises BadRequest if the text cannot be enforced.
        """
        try:
            expressions = [f"/{expression}/" for expression in text_expressions(way)]
        except NotHeldError as error:
            raise self.error(at, str(error)) from None
        if no_json:
            expressions.append(f"~/{JSON_LIKE}/")
        if not expressions:
            return self.up_to(mark, "raw")
        text = self.rule(" & ".join([f"/{ANYTHING}/", *expressions]), "TEXT", at=self._place(at))
        key = f"raw: {text} {mark}"
        if key not in self._rules:
            self._rules[key] = self._named("raw")
            self._add(f"{self._rules[key]}[lazy]: {text} {_quoted(mark)}")
        return self._rules[key]

    def _place(self, at: str) -> str:
        return ", ".join(filter(None, (self._whose, at and f"property {at}")))

    def json(self, schema: Mapping[str, Any], at: str = "") -> str:
        """Return a rule for JSON of a schema, as a separate grammar with the definitions that it needs."""
        needed: dict[str, Any] = {}
        waiting: list[Any] = [{key: value for key, value in schema.items() if key != "$defs"}]
        while waiting:
            for reference in references(waiting.pop(), self.spend):
                if (name := reference.removeprefix("#/$defs/")) not in needed:
                    needed[name] = self._definitions[name]
                    waiting.append(needed[name])
        part = {**schema, "$defs": needed} if needed else {key: own for key, own in schema.items() if key != "$defs"}
        return self.rule(f"%json {json_schema(part)}", "json", at=self._place(at))

    def other_key(self, root: Mapping[str, Any], before: str = "", behind: str = "") -> str:
        """Return a rule for a key other than the properties, between the texts `before` and `behind`."""
        names = "|".join(re.escape(name) for name in root.get("properties", ()) if re.fullmatch(_KEY, name))
        others = f" & ~/{before}({names}){behind}/" if names else ""
        return self.rule(f"/{before}{_KEY}{behind}/{others}", "KEY")

    def value(self, schema: Any, at: str = "") -> str:
        """Return a rule for a value of a schema in the notation, or "" if no value is allowed."""
        if isinstance(schema, bool):
            return self._any() if schema else ""
        self.spend(1 + len(schema))
        said = schema.keys() - {AT}
        if said == {"$ref"}:
            reference = schema["$ref"]
            if reference not in self._references:
                self._references[reference] = self._named("reference")
                self._waiting.append((self._references[reference], reference, at))
            return self._references[reference]
        if self._notation == JSON and not references(schema, self.spend):
            return self.json(schema, at)
        if said == {"anyOf"}:
            return self._either([self.value(part, at) for part in schema["anyOf"]])
        try:
            ways = self._flattener.flat(schema)
            return self._either([own for way in ways for own in self._of_types(way, at)])
        except NotHeldError as error:
            if self._notation == JSON:
                return self.json(schema, at)
            raise self.error(at, f"{error} in the call format of this model") from None

    def _either(self, bodies: Sequence[str]) -> str:
        bodies = list(dict.fromkeys(body for body in bodies if body))
        return self.rule(" | ".join(bodies)) if bodies else ""

    def _of_types(self, way: Mapping[str, Any], at: str) -> list[str]:
        """Return rules for a value of an alternative, one for each type. Raises NotHeldError."""
        if (values := constants(way)) is not None:
            return [self.literal(written(value, self._notation)) for value in values]
        if not way.keys() - {AT}:
            return [self._any()]
        return [self._of_type(kind, way, at) for kind in types(way)]

    def _any(self) -> str:
        if "any" not in self._rules:
            name = self._rules["any"] = self._named("any")
            self._add(f"{name}: {' | '.join(self._of_type(kind, {}, '') for kind in ALL_TYPES)}")
        return self._rules["any"]

    def _of_type(self, kind: str, way: Mapping[str, Any], at: str) -> str:
        if kind in ("boolean", "null"):
            values = (True, False) if kind == "boolean" else (None,)
            return " | ".join(self.literal(written(value, self._notation)) for value in values)
        if kind == "array":
            return self._array(way, at)
        if kind == "object":
            inner = self.members(way, self._notation.key, at, bare=self._notation.bare_keys)
            return f"{self.literal('{')} {inner} {self.literal('}')}"
        limits = {key: way[key] for key in _LIMITS[kind] if key in way}
        if limits and (kind in _NUMBERS or '"' in self._notation.quotes):
            return self.json({"type": kind, **limits, AT: self._place(at)}, at)
        if kind in _NUMBERS:
            return _NUMBERS[kind]
        quote = self._notation.quotes[0]
        if self._notation.escapes:
            return rf"/{quote}([^{quote}\\\x00-\x1f]|\\[\\{quote}nrt])*{quote}/"
        return f"{self.literal(quote)} {self.text_up_to(quote, way, at)}"

    def _array(self, way: Mapping[str, Any], at: str) -> str:
        """Return the rule of an array. If its first items have separate schemas, all of them are required."""
        first = way.get("prefixItems") or (way["items"] if isinstance(way.get("items"), list) else [])
        more = way.get("additionalItems" if first and "prefixItems" not in way else "items", True)
        least = max(way.get("minItems", 0), 0)
        most = way.get("maxItems", max(MAX_ITEMS, least))
        if first:
            most = least = max(min(len(first), most), least)
        if most < least:
            return ""
        items = [self.value(part, at) for part in first[:most]]
        rest = self.value(more, at) if most > len(items) else ""
        if not rest and (least > len(items) or not all(items)):
            return ""
        comma, body = self.literal(self._notation.item), f" {self.literal(self._notation.item)} ".join(items)
        if rest and items:
            body += f" ({comma} {rest}){{{least - len(items)},{most - len(items)}}}"
        elif rest:
            repeated = f"({comma} {rest}){{{max(least - 1, 0)},{most - 1}}}"
            body = f"({rest} {repeated}){'' if least else '?'}"
        return f"{self.literal('[')} {body} {self.literal(']')}"

    def members(self, way: Mapping[str, Any], separator: str, at: str = "", *, bare: bool) -> str:
        """Return a rule for the members of an object, in the order of its properties.

        bare: keys have no quotes. Raises NotHeldError.
        """
        root = root_of(way)
        quote = "" if bare else self._notation.quotes[0]
        items = []
        for key, schema in root["properties"].items():
            is_required, below = key in root["required"], place_below(at, key)
            is_written = not bare or is_bare_key(key, separator)
            if is_written and (value := self.value(schema, below)):
                name = key if bare else written(key, self._notation)
                items.append((f"{self.literal(name + separator)} {value}", is_required))
            elif is_required:
                raise self.error(below, NO_VALUE) if is_written else self.unwritable(key)
        # Rules for further members: after no member, and after at least one.
        comma, rest = self.literal(self._notation.item), ("", "")
        more = root["additionalProperties"]
        if more is not False and (value := self.value(more, at)):
            item = f"{self.other_key(root, quote, quote + separator)} {value}"
            rest = (self.rule(f"({item} ({comma} {item})*)?"), self.rule(f"({comma} {item})*"))
        for item, is_required in reversed(items):
            first, behind = f"{item} {rest[1]}", f"{comma} {item} {rest[1]}"
            if not is_required:
                first, behind = f"({first})? | {rest[0]}".rstrip("| "), f"({behind})? | {rest[1]}".rstrip("| ")
            rest = self.rule(first), self.rule(behind)
        return rest[0]

    def unwritable(self, key: str) -> BadRequest:
        """Return the error for a required property whose name the parser could not read back."""
        return self.error("", f"the required property {key!r:.80} cannot be written in the call format of this model")


def root_of(way: Mapping[str, Any]) -> dict[str, Any]:
    """Return an alternative's `properties`, the set of `required`, and `additionalProperties`.

    Raises NotHeldError if it has further constraints on objects.
    """
    required = set(way.get("required", ()))
    properties = way.get("properties", {})
    more = way.get("additionalProperties", not properties)
    if way.get("additionalProperties") is False and (missing := sorted(required - properties.keys())):
        raise NotHeldError(f"the required property {missing[0]!r:.80} is not defined: it cannot be enforced")
    further = {key: True if more is False else more for key in way.get("required", ()) if key not in properties}
    properties = {**properties, **further}
    if "patternProperties" in way:
        raise NotHeldError("the keyword patternProperties cannot be enforced")
    if way.get("minProperties", 0) > len(required):
        raise NotHeldError("the keyword minProperties cannot be enforced with fewer required properties")
    if way.get("maxProperties", len(properties)) < len(properties) or ("maxProperties" in way and more is not False):
        raise NotHeldError("the keyword maxProperties cannot be enforced")
    return {"properties": properties, "required": required, "additionalProperties": more}


def references(schema: Any, spend: Callable[[int], None]) -> set[str]:
    """Return the references in a normalized schema at any depth, except those in its definitions."""
    names: set[str] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            spend(1)
            for key, value in part.items():
                if key == "$ref":
                    names.add(value)
                elif key in ("properties", "patternProperties"):
                    waiting += value.values()
                elif key not in ("enum", "const", "$defs"):
                    waiting += value if isinstance(value, list) else [value]
    return names


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # Lark does not accept control characters
