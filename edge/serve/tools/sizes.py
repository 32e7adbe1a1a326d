"""Size limits of JSON in requests, such as schemas, tools and variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edge.serve.http.errors import BadRequest

MOST_VALUES = 30_000  # objects, lists, texts and numbers; enough for about 500 tools
MOST_CHARACTERS = 1 << 20  # characters of texts, names and numbers; a prompt with these would have 250,000 tokens
MOST_DEPTH = 100
MOST_NAME = 1000  # characters of a name in an object, or of a reference


class JsonSize:
    """Total size of the values in one field of a request."""

    def __init__(self, param: str) -> None:
        """param: name of the field, for errors."""
        self._param = param
        self._n_values = self._n_characters = 0

    def add(self, value: Any, whose: str = "") -> None:
        """Add a value.

        whose: owner of the value at the start of errors, such as "the tool 'f'". Raises BadRequest if a limit is
        exceeded, or for a number that JSON cannot represent.
        """
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
                                whose,
                                f"has a {kind} of {len(text)} characters, at most {MOST_NAME} allowed: {text!r:.40}",
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
                    whose, f"has more than {MOST_VALUES} values, alone or together with the rest of this field"
                )
            if self._n_characters > MOST_CHARACTERS:
                raise self._error(
                    whose, f"has more than {MOST_CHARACTERS} characters, alone or together with the rest of this field"
                )

    def _error(self, whose: str, what: str) -> BadRequest:
        return BadRequest(f"{whose or self._param} {what}; make it smaller", self._param)
