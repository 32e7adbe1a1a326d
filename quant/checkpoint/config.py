"""Values of a Hugging Face config.json, each checked for its type and range when it is read."""

from collections.abc import Mapping
from typing import Any

from quant.errors import ModelFileError

MAX_COUNT = 2**31 - 1  # llama.cpp counts with 32 bits
_MAX_NUMBER = 1e30  # also excludes NaN


class Config:
    """A JSON object with default values. A null counts as a missing value."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], name: str = "config.json") -> None:
        """name: name of the object in errors."""
        self._values = {**defaults, **{key: value for key, value in values.items() if value is not None}}
        self._null = {key for key, value in values.items() if value is None}
        self._name = name

    def error(self, problem: str) -> ModelFileError:
        """Return the error to raise about this object."""
        return ModelFileError(f"{self._name}: {problem}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def is_null(self, key: str) -> bool:
        """Return whether the object has null for a key. Null turns off some options that have a default."""
        return key in self._null

    def value(self, key: str) -> Any:
        """Return the value of a key, of any type, or None if it is missing."""
        return self._values.get(key)

    def count(self, key: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        """Return a whole number from 1 to `most`. Raises ModelFileError for other values, or if there is none."""
        value = self._values.get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self._wrong(key, value, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0. Raises ModelFileError for other values."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_NUMBER:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return True or False. Raises ModelFileError for other values."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a string. Raises ModelFileError for other values."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def items(self, key: str) -> list[Any]:
        """Return a list, or [] if it is missing. Raises ModelFileError for other values."""
        value = self._values.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def section(self, key: str) -> "Config":
        """Return the object under a key, or an empty one if it is missing. Raises ModelFileError for other values."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Config(value, {}, f"{self._name}, {key}")

    def layered(self, key: str, defaults: Mapping[str, Any]) -> "Config":
        """Return this object overridden by the object under a key, with default values."""
        inner = self._values.get(key, {})
        if not isinstance(inner, dict):
            raise self._wrong(key, inner, "an object")
        return Config({**self._values, **dict.fromkeys(self._null), **inner}, defaults, self._name)

    def _wrong(self, key: str, value: Any, needed: str) -> ModelFileError:
        have = "missing" if value is None else f"{value!r:.60}"
        return self.error(f"{key} is {have}, but must be {needed}")
