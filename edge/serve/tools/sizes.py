"""Bounds for JSON in requests that others work with: schemas, tools, variables. One place, for all ways in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edge.serve.http.errors import BadRequest

MOST_VALUES = 30_000  # objects, lists, texts and numbers: those of some 500 tools
MOST_CHARACTERS = 1 << 20  # of texts, names and numbers: a prompt with them would have 250,000 tokens
MOST_DEPTH = 100
MOST_NAME = 1000  # characters of a name in an object, or of a reference


class JsonSize:
    """Size of all that a field of a request has."""

    def __init__(self, param: str) -> None:
        """param: name of the field, for errors."""
        self._param = param
        self._n_values = self._n_characters = 0

    def add(self, value: Any, whose: str = "") -> None:
        """Add a value. whose: begins errors, "the tool 'f'". BadRequest beyond a bound, or for a number that JSON does
        not have."""
        waiting = [(value, 0)]
        while waiting:
            part, depth = waiting.pop()
            self._n_values += 1
            if depth > MOST_DEPTH:
                raise self._error(whose, f"is nested more than {MOST_DEPTH} deep")
            if isinstance(part, Mapping):
                for name, own in part.items():
                    is_reference = name == "$ref" and isinstance(own, str)
                    for text in (name, own) if is_reference else (name,):
                        if len(text) > MOST_NAME:
                            kind = "reference" if text is own else "name"
                            raise self._error(
                                whose, f"has a {kind} of {len(text)} characters; {MOST_NAME} are the most: {text!r:.40}"
                            )
                    self._n_characters += len(name)
                    waiting.append((own, depth + 1))
            elif isinstance(part, (list, tuple)):
                waiting += ((own, depth + 1) for own in part)
            elif isinstance(part, str):
                self._n_characters += len(part)
            elif isinstance(part, float) and not math.isfinite(part):
                raise self._error(whose, "has a number that is not finite")
            elif isinstance(part, int):
                self._n_characters += part.bit_length() // 3
            if self._n_values + len(waiting) > MOST_VALUES:
                raise self._error(
                    whose, f"has more than {MOST_VALUES} values, or has them together with others of this field"
                )
            if self._n_characters > MOST_CHARACTERS:
                raise self._error(
                    whose, f"has more than {MOST_CHARACTERS} characters, or has them together with others of this field"
                )

    def _error(self, whose: str, what: str) -> BadRequest:
        return BadRequest(f"{whose or self._param} {what}; make it smaller", self._param)
