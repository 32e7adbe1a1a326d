"""Parser of function calls in an answer, while it is generated. How the text is split does not matter."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from edge.serve.tools.functions import CallFormat
from quant.text import overlap

_MARK = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True)
class ParsedCall:
    """A call of a function of the request."""

    name: str
    arguments: str  # JSON of an object


class CallParser:
    """Separates text and calls. Text that may begin a call is held back until that is known. A call with broken JSON,
    or of an unknown function, is text."""

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        """names: of the functions of the request."""
        self._form = form
        self._names = frozenset(names)
        self._pending = ""  # text that was not returned yet
        self._scan: _JsonEnd | None = None  # search for the end of JSON in it
        self._is_start = True  # only white space came before
        self._after_call = False  # white space, a closing mark and separators of calls are left out

    def add(self, text: str) -> list[str | ParsedCall]:
        """Add text, and return the parts that are now known, in order."""
        self._pending += text
        return self._known(final=False)

    def end(self) -> list[str | ParsedCall]:
        """Return the rest."""
        return self._known(final=True)

    def _known(self, final: bool) -> list[str | ParsedCall]:
        known: list[str | ParsedCall] = []
        while self._pending:
            before = len(self._pending), self._scan, self._after_call
            if self._after_call:
                self._leave_out(final)
            elif self._scan is not None:
                known += self._json(final)
            else:
                known += self._text(final)
            if (len(self._pending), self._scan, self._after_call) == before:
                break  # it takes more text
        return known

    def _text(self, final: bool) -> list[str]:
        """Return text up to a possible beginning of a call."""
        form, pending = self._form, self._pending
        start = len(pending) - len(pending.lstrip())
        if self._is_start and form.bare:
            if pending.startswith(form.bare, start):
                self._scan = _JsonEnd(start)
                return []
            if not final and form.bare.startswith(pending[start:]):
                return []
        at = pending.find(form.opens) if form.opens else -1
        if at >= 0:
            if at > 0:
                return self._give(at)
            json_at = _next_character(pending, len(form.opens))
            if json_at is None:
                return self._give(len(pending)) if final else []
            if pending[json_at] == ("[" if form.is_list else "{"):
                self._scan = _JsonEnd(json_at)
                return []
            return self._give(json_at)
        return self._give(len(pending) - (0 if final else overlap(pending, form.opens)))

    def _json(self, final: bool) -> list[str | ParsedCall]:
        """Return the calls if the JSON is complete; text if it is none."""
        assert self._scan is not None
        end = self._scan.find(self._pending)
        if end is None and not final:
            return []
        scan, self._scan = self._scan, None
        calls = self._calls(self._pending[scan.start : end]) if end is not None else None
        if calls is None:
            return [*self._give(end or len(self._pending))]
        self._pending = self._pending[end:]
        self._is_start, self._after_call = False, True
        return [*calls]

    def _leave_out(self, final: bool) -> None:
        """Drop the marks that follow a call and are no text."""
        form, pending = self._form, self._pending.lstrip()
        if form.closes and pending.startswith(form.closes):
            self._pending = pending[len(form.closes) :]
            return
        if form.closes and form.closes.startswith(pending) and not final:
            return  # it may become the closing mark
        separator = form.between.strip()
        if not form.opens and separator and pending.startswith(separator):
            self._pending, self._is_start = pending[len(separator) :], True
            return
        if not pending:
            self._pending = pending if final else self._pending
            return
        self._pending, self._after_call = pending, False
        self._is_start = not form.opens and pending.startswith(form.bare)

    def _calls(self, text: str) -> list[ParsedCall] | None:
        """Return the calls of complete JSON; None if it has no calls of known functions."""
        try:
            value = json.loads(text, parse_constant=_refuse)
            values = value if self._form.is_list else [value]
            return [self._call(call) for call in values] or None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def _call(self, value: dict[str, Any]) -> ParsedCall:
        name, arguments = value["name"], value[self._form.arguments]
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError("no call")
        return ParsedCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))

    def _give(self, length: int) -> list[str]:
        """Return the first characters of the pending text."""
        text, self._pending = self._pending[:length], self._pending[length:]
        self._is_start = self._is_start and not text.strip()
        return [text] if text else []


class _JsonEnd:
    """Finds the end of an object or a list in a growing text. Each character is read once."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._at = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return the place after it; None while it has not ended."""
        while (mark := _MARK.search(text, self._at)) is not None:
            self._at = mark.end()
            character = mark.group()
            if character == "\\":
                if self._at == len(text):
                    self._at -= 1  # the character after the backslash has not come yet
                    return None
                self._at += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None


def _next_character(text: str, start: int) -> int | None:
    """Return the place of the first character that is no white space."""
    rest = text[start:].lstrip()
    return len(text) - len(rest) if rest else None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
