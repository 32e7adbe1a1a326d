"""Normalization of JSON schemas: only keywords that a compiler enforces, and one definition for each reference.

Annotations and keywords without effect are left out. Outdated and foreign spellings are replaced by current ones. The
normal form never allows more than the original schema, with one exception: an unknown `format` is ignored, as JSON
Schema prescribes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from edge.errors import SamplingError

AT = "x-at"  # keyword that compilers ignore; holds the place of a schema, for errors
PLACE = "// of "  # begins a line of a grammar with the place of the rule below it
MOST_PARTS = 50_000  # maximum subschemas, including those behind references
MOST_PLACE = 120  # characters of a place in an error
_MOST_NUMBER = 10**17  # largest bound of numbers that the compiler supports
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())  # enforced formats
_TYPES = {name: name for name in ("string", "number", "integer", "boolean", "null", "array", "object")} | {
    "str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean", "list": "array",
    "dict": "object",
}  # fmt: skip
_ALL = frozenset(("string", "number", "boolean", "null", "array", "object"))
_ONE = ("additionalProperties", "additionalItems")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LEAVES = frozenset(("minLength", "maxLength", "pattern", "format", *_NUMBERS))  # keywords of texts and numbers
# Keywords that no compiler enforces, with the values that constrain nothing.
_NOT_HELD: Mapping[str, tuple[Any, ...]] = {
    "not": (False,), "if": (), "contains": (), "uniqueItems": (False,), "dependentSchemas": ({},),
    "dependentRequired": ({},), "dependencies": ({},), "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}), "$dynamicRef": (), "$recursiveRef": (),
}  # fmt: skip


def target(reference: str, root: Any) -> Any:
    """Return the part of a document that a JSON reference points to, or None if it points to nothing."""
    pointer = unquote(reference)
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    part = root
    for step in pointer.split("/")[1:]:
        if isinstance(part, list):
            part = part[int(step)] if step.isdecimal() and len(step) < 10 and int(step) < len(part) else None
        else:
            key = step.replace("~1", "/").replace("~0", "~")
            part = part.get(key) if isinstance(part, Mapping) else None
    return part


def normal_schema(schema: Mapping[str, Any], whose: str = "") -> dict[str, Any]:
    """Return the schema in normal form.

    whose: owner of the schema at the start of errors, such as "the tool 'f'".
    Raises SamplingError with the place if the schema is invalid or no compiler can enforce it.
    """
    return _Normal(schema, whose).whole()


class _Normal:
    """Normalizes one document."""

    def __init__(self, document: Mapping[str, Any], whose: str) -> None:
        self._document, self._whose = document, whose
        self._names: dict[str, str] = {}  # names of definitions, by reference
        self._waiting: list[tuple[str, Any, str]] = []  # pending definitions: name, schema and place
        self._n_parts = 0

    def whole(self) -> dict[str, Any]:
        """Return the normalized document."""
        root = self._schema(self._document, "")
        whole: dict[str, Any] = {AT: self._whose, **root} if isinstance(root, dict) else {"enum": [], AT: self._whose}
        definitions: dict[str, Any] = {}
        while self._waiting:  # a loop, because a long chain of references would exceed the recursion limit
            name, schema, at = self._waiting.pop()
            definitions[name] = self._schema(schema, at)
        self._refuse_circles(definitions)
        return {**whole, "$defs": definitions} if definitions else whole

    def _error(self, at: str, what: str) -> SamplingError:
        place = ", ".join(filter(None, (self._whose, at and f"property {at}")))
        return SamplingError(f"{place}: {what}" if place else what)

    def _schema(self, schema: Any, at: str) -> Any:
        """Return a schema in normal form. at: path of property names to the schema."""
        self._n_parts += 1
        if self._n_parts > MOST_PARTS:
            raise self._error("", f"the schema has more than {MOST_PARTS} parts; make it smaller")
        if isinstance(schema, bool):
            return schema
        if schema is None:
            return {}
        if not isinstance(schema, Mapping):
            raise self._error(at, f"needs a JSON schema, got {schema!r:.40}")
        said: dict[str, Any] = {}
        for keyword, value in schema.items():
            if value is not None or keyword == "const":
                self._keyword(keyword, value, schema, said, at)
        if LEAVES & said.keys():
            said[AT] = ", ".join(filter(None, (self._whose, at and f"property {at}")))
        return self._with_null(said) if schema.get("nullable") is True else said

    def _keyword(self, keyword: str, value: Any, schema: Mapping[str, Any], said: dict[str, Any], at: str) -> None:
        """Add a keyword to the normalized schema `said`, if it constrains something."""
        if keyword in _NAMED:
            own = self._checked(value, dict, keyword, at)
            if own or keyword == "properties":
                said[keyword] = {name: self._schema(part, place_below(at, name)) for name, part in own.items()}
        elif keyword in _SEVERAL or (keyword == "items" and isinstance(value, list)):
            if parts := [self._schema(part, at) for part in self._checked(value, list, keyword, at)]:
                said[keyword] = parts
        elif keyword in _ONE or keyword == "items":
            said[keyword] = self._schema(value, at)
        elif keyword == "$ref":
            said[keyword] = self._reference(self._checked(value, str, keyword, at), at)
        elif keyword in _COUNTS:
            self._count(keyword, value, said, at)
        elif keyword in _NUMBERS:
            self._number(keyword, value, schema, said, at)
        elif keyword == "type":
            self._type(value, said, at)
        elif keyword == "required":
            if not isinstance(value, bool):  # in an early draft, a Boolean concerns the property around this schema
                names = self._checked(value, list, keyword, at)
                said[keyword] = list(dict.fromkeys(self._checked(name, str, keyword, at) for name in names))
        elif keyword == "enum":
            said[keyword] = self._checked(value, list, keyword, at)
            if not value:
                raise self._error(at, "an enum without values allows no value")
        elif keyword == "pattern":
            said[keyword] = self._checked(value, str, keyword, at)
        elif keyword == "const" or (keyword == "format" and isinstance(value, str) and value in FORMATS):
            said[keyword] = value
        elif keyword in _NOT_HELD and not self._says_nothing(keyword, value, schema, said):
            raise self._error(at, f"the keyword {keyword} cannot be enforced; leave it out, or use no constraint")

    def _says_nothing(self, keyword: str, value: Any, schema: Mapping[str, Any], said: dict[str, Any]) -> bool:
        if keyword == "unevaluatedProperties" and not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf", "if"}:
            # Without subschemas, no other keyword evaluates properties.
            said.setdefault("additionalProperties", self._schema(value, ""))
            return True
        if keyword == "uniqueItems" and schema.get("maxItems") in (0, 1):
            return True
        if keyword == "if" and not schema.keys() & {"then", "else"}:
            return True
        neutral = _NOT_HELD[keyword]
        return any(value is other if isinstance(other, bool) else value == other for other in neutral)

    def _checked(self, value: Any, kind: type, keyword: str, at: str) -> Any:
        if not isinstance(value, kind):
            names: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
            raise self._error(at, f"{keyword} must be {names[kind]}, not {value!r:.40}")
        return value

    def _reference(self, reference: str, at: str) -> str:
        own = str(self._document.get("$id") or "")
        pointer = reference.removeprefix(own) if own else reference
        if pointer not in self._names:
            definition = target(pointer, self._document)
            if not isinstance(definition, (Mapping, bool)):
                raise self._error(at, f"the reference {reference!r:.80} leads nowhere in the schema")
            self._names[pointer] = str(len(self._names))
            self._waiting.append((self._names[pointer], definition, at))
        return f"#/$defs/{self._names[pointer]}"

    def _refuse_circles(self, definitions: Mapping[str, Any]) -> None:
        """Raise SamplingError if a chain of references leads only back to itself."""
        ends: set[str] = set()
        for name in definitions:
            chain: dict[str, None] = {}
            while name not in ends:
                if name in chain:
                    raise self._error("", "a reference in the schema leads only to itself")
                chain[name] = None
                own = definitions[name]
                if not isinstance(own, dict) or "$ref" not in own:
                    break
                name = own["$ref"].removeprefix("#/$defs/")
            ends.update(chain)

    def _count(self, keyword: str, value: Any, said: dict[str, Any], at: str) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != value // 1:
            raise self._error(at, f"{keyword} must be a whole number from 0, not {value!r:.40}")
        if value or keyword.startswith("max"):
            said[keyword] = int(value)

    def _number(self, keyword: str, value: Any, schema: Mapping[str, Any], said: dict[str, Any], at: str) -> None:
        # In draft 4, a Boolean belongs to the bound with the same name.
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            if value and isinstance(bound := schema.get(keyword.removeprefix("exclusive").lower()), (int, float)):
                self._number(keyword, bound, {}, said, at)
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._error(at, f"{keyword} must be a number, not {value!r:.40}")
        is_lower = keyword.endswith("inimum")
        if keyword == "multipleOf":
            if not 0 < value < _MOST_NUMBER:
                raise self._error(at, f"multipleOf must be above 0 and at most {_MOST_NUMBER}, not {value!r:.40}")
        elif value > _MOST_NUMBER if is_lower else value < -_MOST_NUMBER:
            raise self._error(at, f"{keyword} is beyond {_MOST_NUMBER}, the maximum: {value!r:.40}")
        else:
            value = max(value, -_MOST_NUMBER) if is_lower else min(value, _MOST_NUMBER)
        said[keyword] = value

    def _type(self, value: Any, said: dict[str, Any], at: str) -> None:
        names = [value] if isinstance(value, str) else self._checked(value, list, "type", at)
        known = [_TYPES.get(str("null" if name is None else name).lower()) for name in names]
        if any(isinstance(name, str) and name.lower() == "any" for name in names):
            return
        if not names or None in known:
            raise self._error(at, f"type must be one of {', '.join(sorted(_ALL))}, integer, not {value!r:.40}")
        said["type"] = known[0] if isinstance(value, str) else list(dict.fromkeys(known))

    def _with_null(self, said: dict[str, Any]) -> dict[str, Any]:
        """Return the schema with null allowed as well, for the keyword `nullable`."""
        if said.keys() - {"type", "enum", AT} - LEAVES and set(said) & {"$ref", "anyOf", "oneOf", "allOf", "const"}:
            return {"anyOf": [said, {"type": "null"}]}
        if "enum" in said and None not in said["enum"]:
            said["enum"] = [*said["enum"], None]
        if "type" in said:
            names = [said["type"]] if isinstance(said["type"], str) else said["type"]
            said["type"] = list(dict.fromkeys([*names, "null"]))
        return said


def place_below(at: str, name: str) -> str:
    """Return the place of a property, shortened if it is long."""
    shown = name if name.isidentifier() else repr(name)
    return at if len(at) > MOST_PLACE else f"{at}.{shown:.40}" if at else f"{shown:.40}"


Reason = Callable[[Mapping[str, Any]], str]
"""Returns why a schema cannot be compiled, or "" if it can."""


def culprit(schema: Any, reason: Reason) -> str:
    """Return the place and reason of the first text or number schema that cannot be compiled by itself, or "" if all
    can."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += reversed(part)
        elif isinstance(part, Mapping):
            waiting += reversed(list(part.values()))
            leaf = {key: part[key] for key in (*LEAVES, "type") if key in part}
            if AT in part and LEAVES & part.keys() and (why := reason(leaf)):
                pattern = f"the pattern {part['pattern']!r:.60}: " if isinstance(part.get("pattern"), str) else ""
                return f"{part[AT]}: {pattern}{why}".removeprefix(": ")
    return ""
