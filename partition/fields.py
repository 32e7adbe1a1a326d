"""Fields of JSON that a person may write: read with errors that name the field, and written."""

import re
from collections.abc import Collection
from typing import Any

from partition.errors import PlanError

MOST = 2**31 - 1  # llama.cpp keeps its counts in an int
MOST_BYTES = 2**60


def record(values: Any, where: str, needed: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """`values` if it is an object with all of the `needed` keys, and none that are neither needed nor optional."""
    if not isinstance(values, dict):
        raise PlanError(f"{where}: {short(values)}; needed is an object with {', '.join(needed)}")
    for key in values:
        if key not in needed and key not in optional:
            raise PlanError(f"{where}: unknown field {short(key)}; known are {', '.join((*needed, *optional))}")
    for key in needed:
        if key not in values:
            raise PlanError(f"{where}: {key} is missing")
    return values


def items(value: Any, where: str) -> list[Any]:
    """`value` if it is a list."""
    if not isinstance(value, list):
        raise PlanError(f"{where}: {short(value)}; needed is a list")
    return value


def number(value: Any, where: str, most: int = MOST) -> int:
    """`value` if it is a whole number from 0 to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise PlanError(f"{where}: {short(value)}; needed is a whole number from 0 to {most}")
    return value


def number_or_none(value: Any, where: str, most: int = MOST) -> int | None:
    """The same; None is taken as it is."""
    return None if value is None else number(value, where, most)


def text(value: Any, where: str, most: int = 255) -> str:
    """`value` if it is printable text of up to `most` characters."""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise PlanError(f"{where}: {short(value)}; needed is printable text of up to {most} characters")
    return value


def nonempty(record: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the attributes `names` that are neither None nor empty, as JSON values."""
    values = {name: getattr(record, name) for name in names}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None and value != ()
    }


def short(value: Any) -> str:
    """A value as an error shows it. Cut before it is written out: it may be long."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def is_digest(text: str) -> bool:
    """Return whether `text` is a SHA-256 in our form: 64 lower-case hexadecimal digits, nothing else."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None
