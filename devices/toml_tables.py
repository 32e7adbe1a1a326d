"""Tables of a TOML file that a user wrote, with checks for each key."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from devices.sizes import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@contextmanager
def reading_toml(path: Path, fault: type[Exception]) -> Iterator[dict[str, Any]]:
    """Yield the content of a TOML file. A `fault` raised in the block gets the file's name.

    Raises `fault` if the file is not valid TOML, and OSError if it cannot be read.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # invalid TOML or UTF-8, or a number of thousands of digits
        raise fault(f"{path} is not valid TOML: {error}") from error
    except RecursionError:
        raise fault(f"{path} cannot be read: its tables or lists are nested too deeply; use fewer levels") from None
    try:
        yield data
    except fault as error:
        raise fault(f"{path}: {error}") from None


def tables(data: Mapping[str, Any], key: str, fault: type[Exception]) -> list[Table]:
    """Return the tables below lines [[key]]; [] if there are none."""
    listed = data.get(key, [])
    if not isinstance(listed, list) or not all(isinstance(table, Mapping) for table in listed):
        raise fault(f"{key} needs to be tables, each below a line [[{key}]]")
    return [Table(table, f"{key}[{i}]", fault) for i, table in enumerate(listed)]


def check_keys(values: Mapping[str, Any], keys: Sequence[str], where: str, fault: type[Exception]) -> None:
    """Raise `fault` if `values` has a key that is not in `keys`."""
    for key in values:
        if key not in keys:
            raise fault(f"{where} has an unknown key {str(key)[:80]!r}; known keys are {', '.join(keys)}")


def short_text(value: object) -> str:
    """Return the repr of a value, cut to fit into one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True)
class Table:
    """One TOML table. A wrong value raises `fault` with the key, what is needed and what was found."""

    values: Mapping[str, Any]
    where: str  # "device[0]"
    fault: type[Exception]

    def get(self, key: str) -> Any:
        """Return the value of a key unchanged, or None if the key is missing."""
        return self.values.get(key)

    def refuse(self, key: str, needs: str) -> NoReturn:
        """Raise `fault` for the value of a key."""
        raise self.fault(f"{self.where}.{key} {needs}; got {short_text(self.get(key))}")

    def check_keys(self, keys: Sequence[str]) -> None:
        """Raise `fault` if the table has a key that is not in `keys`."""
        check_keys(self.values, keys, self.where, self.fault)

    def number(self, key: str, least: float, most: float, why: str = "") -> float | None:
        """Return a number in a range, or None if the key is missing. why: reason of the bounds, for messages."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            unit = ", without a unit" if isinstance(value, str) else ""
            self.refuse(key, f"needs a number from {least:g} to {most:g}{unit}{why and f' ({why})'}")
        return float(value)

    def whole(self, key: str, least: int, most: int) -> int | None:
        """Return a whole number in a range, or None if the key is missing."""
        value = self.number(key, least, most)
        if value is not None and value != int(value):
            self.refuse(key, "needs a whole number")
        return None if value is None else int(value)

    def size(self, key: str) -> int | None:
        """Return bytes from a text such as "1GiB", or None if the key is missing."""
        value = self.get(key)
        if value is None:
            return None
        try:
            return parse_bytes(value if isinstance(value, str) else "")
        except ValueError:
            self.refuse(key, 'needs a size such as "1GiB" or "900MiB"')
