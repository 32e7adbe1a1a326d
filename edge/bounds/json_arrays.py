"""Arrays in JSON schemas: those without `maxItems` get one, because a small model may never close them.

Only schemas that speak of arrays are bounded: their `type` is array, alone or among others, or they have no type and
describe items. The bound is MAX_ITEMS, or `minItems` where that is more. A schema with `maxItems` is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_ITEMS = 128
_ITEMS = ("items", "prefixItems", "minItems", "additionalItems")  # what describes an array, where no type does
_ONE = ("items", "additionalItems", "additionalProperties")  # keywords whose value is a schema
_SEVERAL = ("items", "prefixItems", "anyOf", "oneOf", "allOf")  # whose value is a list of schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # whose value has schemas by name
_SAME_VALUE = ("anyOf", "oneOf", "allOf")  # these describe the value that the schema around them describes


def bounded(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schema with a bound for each array that has none, and where these are, as JSON pointers."""
    places: list[str] = []
    return _bounded(schema, "#", False, places), places


def bounds_line(places: Sequence[str]) -> str:
    """Return the line that names arrays which were bounded."""
    named = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    arrays = "is an array" if len(places) == 1 else "are arrays"
    return f"{named} {arrays} without maxItems: {MAX_ITEMS} items at most; set maxItems for another bound"


def _bounded(schema: Any, place: str, is_bounded: bool, places: list[str]) -> Any:
    """is_bounded: a schema around this one bounds the same value."""
    if not isinstance(schema, Mapping):
        return schema
    is_bounded = is_bounded or "maxItems" in schema or _branch_bounds(schema)
    adds_bound = _is_open_array(schema) and not is_bounded
    is_bounded = is_bounded or adds_bound
    result = dict(schema)
    for key, value in schema.items():
        inside = is_bounded and key in _SAME_VALUE
        here = f"{place}/{_escaped(key)}"
        if key in _NAMED and isinstance(value, Mapping):
            result[key] = {
                name: _bounded(one, f"{here}/{_escaped(name)}", False, places) for name, one in value.items()
            }
        elif key in _SEVERAL and isinstance(value, list):
            result[key] = [_bounded(one, f"{here}/{i}", inside, places) for i, one in enumerate(value)]
        elif key in _ONE:
            result[key] = _bounded(value, here, False, places)
    if adds_bound:
        least = schema.get("minItems")
        result["maxItems"] = max(MAX_ITEMS, least) if isinstance(least, int) else MAX_ITEMS
        places.append(place)
    return result


def _branch_bounds(schema: Mapping[str, Any]) -> bool:
    """Whether a part that holds beside the others has a bound."""
    parts = schema.get("allOf")
    return isinstance(parts, list) and any(isinstance(part, Mapping) and "maxItems" in part for part in parts)


def _is_open_array(schema: Mapping[str, Any]) -> bool:
    """Whether it describes an array that may go on after the items that are listed."""
    kind = schema.get("type")
    is_array = "array" in kind if isinstance(kind, str | list) else any(key in schema for key in _ITEMS)
    if isinstance(schema.get("items"), list):
        return is_array and schema.get("additionalItems") is not False
    return is_array and schema.get("items") is not False


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
