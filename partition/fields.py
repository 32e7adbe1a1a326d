"""Dataclasses from JSON and back. The JSON may be written by people, so errors name the wrong field."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from partition.errors import PlanError

T = TypeVar("T")

MOST = 2**31 - 1  # llama.cpp stores counts in an int
MOST_BYTES = 2**60
_MOST_FIGURE = 1e15


def record(values: Any, where: str, needed: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """Return `values` if it is an object with all `needed` keys, and no keys that are neither needed nor optional."""
    if not isinstance(values, dict):
        raise PlanError(f"{where}: {short(values)}; expected an object with {', '.join(needed)}")
    for key in values:
        if key not in needed and key not in optional:
            raise PlanError(f"{where}: unknown field {short(key)}; known are {', '.join((*needed, *optional))}")
    for key in needed:
        if key not in values:
            raise PlanError(f"{where}: {key} is missing")
    return values


def items(value: Any, where: str) -> list[Any]:
    """Return `value` if it is a list."""
    if not isinstance(value, list):
        raise PlanError(f"{where}: {short(value)}; expected a list")
    return value


def number(value: Any, where: str, most: int = MOST, least: int = 0) -> int:
    """Return `value` if it is a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise PlanError(f"{where}: {short(value)}; expected a whole number from {least} to {most}")
    return value


def figure(value: Any, where: str, most: float = _MOST_FIGURE, least: float = 0.0) -> float:
    """Return `value` as float if it is a number from `least` to `most`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise PlanError(f"{where}: {short(value)}; expected a number from {least:g} to {most:g}")
    return float(value)


def text(value: Any, where: str, most: int = 255) -> str:
    """Return `value` if it is printable text of up to `most` characters."""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise PlanError(f"{where}: {short(value)}; expected printable text of up to {most} characters")
    return value


def short(value: Any) -> str:
    """Return a value as text for an error. Long values are cut before they are formatted."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def is_digest(text: str) -> bool:
    """Return whether `text` is a SHA-256 in our form: exactly 64 lower-case hexadecimal digits."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds in a field's `Annotated` type: of a number, or of the length of a text in characters."""

    most: float
    least: float = 0


def decoded(
    kind: Callable[..., T],
    values: Any,
    where: str,
    *,
    inside: str | None = None,
    format: str = "",
    derived: Collection[str] = (),
) -> T:
    """Return a dataclass from JSON, by its annotations. Fields with a default may be missing.

    where: name of the object in errors
    inside: prefix of field names in errors; None: `where`
    format: required value of the field "format"; "": the field is not permitted
    derived: names of additional fields that follow from the others and are ignored

    Raises PlanError, which names the wrong field and the need. Texts, numbers and lists are checked by the functions
    above.
    """
    if format and isinstance(values, dict) and values.get("format") != format:
        raise PlanError(f"{where}: format is {short(values.get('format'))}, known is {format!r}")
    before = f"{where}." if inside is None else inside
    hints = _hints(kind)
    needed = [name for name, (_, default) in hints.items() if default is MISSING]
    optional = [name for name in hints if name not in needed]
    known = record(values, where, ["format", *needed] if format else needed, [*optional, *derived])
    arguments = {
        name: _decoded(hint, known[name], f"{before}{name}") for name, (hint, _) in hints.items() if name in known
    }
    try:
        return kind(**arguments)
    except PlanError as error:
        raise PlanError(f"{where}: {error}" if before else str(error)) from None


_SCALARS = (str, int, float, type(None))


def encoded(structure: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """Return a dataclass in the form that `decoded` reads.

    without: fields that are left out if they have their default
    """
    kind: Any = type(structure)
    values = {name: (getattr(structure, name), default) for name, (_, default) in _hints(kind).items()}
    return {name: _plain(value) for name, (value, default) in values.items() if name not in without or value != default}


@cache
def _hints(kind: Any) -> Mapping[str, tuple[Any, Any]]:
    """Return annotation and default of each field."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: (hints[field.name], field.default) for field in dataclass_fields(kind)}


def _decoded(hint: Any, value: Any, where: str) -> Any:
    bounds = None
    if get_origin(hint) is Annotated:
        hint, bounds = get_args(hint)
    options = get_args(hint)
    if get_origin(hint) in (UnionType, Union):  # only unions with None occur
        inner = options[0] if bounds is None else Annotated[options[0], bounds]
        return None if value is None else _decoded(inner, value, where)
    if get_origin(hint) is tuple:
        return tuple(_decoded(options[0], item, f"{where}[{i}]") for i, item in enumerate(items(value, where)))
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise PlanError(f"{where}: {short(value)}; expected an object")
        return {text(key, where): _decoded(options[1], item, where) for key, item in value.items()}
    if hint is str:
        return text(value, where, 255 if bounds is None else bounds.most)
    if hint is int:
        return number(value, where, *((bounds.most, bounds.least) if bounds else ()))
    if hint is float:
        return figure(value, where, *((bounds.most, bounds.least) if bounds else ()))
    if hasattr(hint, "from_json"):
        return hint.from_json(value, where)
    return decoded(hint, value, where)


def _plain(value: Any) -> Any:
    # Checked first because nearly all values are scalars, and the checks below are slow.
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "to_json"):
        return value.to_json()
    return encoded(value) if is_dataclass(value) else value
