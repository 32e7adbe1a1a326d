"""Calls of functions in an answer, recognized while it comes. How the text is split does not matter."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from edge.serve.tools.formats import CallFormat

_MARK = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True)
class ParsedCall:
    """A call of a function that the request has."""

    name: str
    arguments: str  # JSON of an object


class CallParser:
    """Separates text and calls. What may begin a call is held back until that is known. What turns out to be none is
    text: its JSON is broken, or there is no such function."""

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        """names: of the functions there are."""
        self._form = form
        self._names = frozenset(names)
        self._held = ""  # not given yet
        self._scan: _JsonEnd | None = None  # of the JSON in it
        self._is_start = True  # nothing but white space came before
        self._after_call = False  # white space, a closing mark and what stands between calls are left out

    def add(self, text: str) -> list[str | ParsedCall]:
        """What is known with this text, in order."""
        self._held += text
        return self._known(final=False)

    def end(self) -> list[str | ParsedCall]:
        """The rest."""
        return self._known(final=True)

    def _known(self, final: bool) -> list[str | ParsedCall]:
        known: list[str | ParsedCall] = []
        while self._held:
            before = len(self._held), self._scan, self._after_call
            if self._after_call:
                self._leave_out(final)
            elif self._scan is not None:
                known += self._json(final)
            else:
                known += self._text(final)
            if (len(self._held), self._scan, self._after_call) == before:
                break  # more must come
        return known

    def _text(self, final: bool) -> list[str]:
        """Text up to what may begin a call."""
        form, held = self._form, self._held
        start = len(held) - len(held.lstrip())
        if self._is_start and form.bare:
            if held.startswith(form.bare, start):
                self._scan = _JsonEnd(start)
                return []
            if not final and form.bare.startswith(held[start:]):
                return []
        at = held.find(form.opens) if form.opens else -1
        if at >= 0:
            if at > 0:
                return self._give(at)
            json_at = _next_character(held, len(form.opens))
            if json_at is None:
                return self._give(len(held)) if final else []
            if held[json_at] == ("[" if form.is_list else "{"):
                self._scan = _JsonEnd(json_at)
                return []
            return self._give(json_at)
        return self._give(len(held) - (0 if final else _overlap(held, form.opens)))

    def _json(self, final: bool) -> list[str | ParsedCall]:
        """The calls, where the JSON is complete; text, where it is none."""
        assert self._scan is not None
        end = self._scan.find(self._held)
        if end is None and not final:
            return []
        scan, self._scan = self._scan, None
        calls = self._calls(self._held[scan.start : end]) if end is not None else None
        if calls is None:
            return [*self._give(end or len(self._held))]
        self._held = self._held[end:]
        self._is_start, self._after_call = False, True
        return [*calls]

    def _leave_out(self, final: bool) -> None:
        """Drop what follows a call and is no text."""
        form, held = self._form, self._held.lstrip()
        if form.closes and held.startswith(form.closes):
            self._held = held[len(form.closes) :]
            return
        if form.closes and form.closes.startswith(held) and not final:
            return  # it may become the closing mark
        separator = form.between.strip()
        if not form.opens and separator and held.startswith(separator):
            self._held, self._is_start = held[len(separator) :], True
            return
        if not held:
            self._held = held if final else self._held
            return
        self._held, self._after_call = held, False
        self._is_start = not form.opens and held.startswith(form.bare)

    def _calls(self, text: str) -> list[ParsedCall] | None:
        """The calls of complete JSON; None where it is not calls of functions there are."""
        try:
            value = json.loads(text, parse_constant=_refuse)
            values = value if self._form.is_list else [value]
            return [self._call(one) for one in values] or None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def _call(self, value: dict[str, Any]) -> ParsedCall:
        name, arguments = value["name"], value[self._form.arguments]
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError("no call")
        return ParsedCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))

    def _give(self, length: int) -> list[str]:
        """The first characters of what is held, as text."""
        text, self._held = self._held[:length], self._held[length:]
        self._is_start = self._is_start and not text.strip()
        return [text] if text else []


class _JsonEnd:
    """Finds where an object or a list ends, in a text that grows. Each character is looked at once."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._at = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The place after it; None while it has not ended."""
        while (mark := _MARK.search(text, self._at)) is not None:
            self._at = mark.end()
            character = mark.group()
            if character == "\\":
                if self._at == len(text):
                    self._at -= 1  # what it stands before has not come
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
    """Where the first character is that is no white space."""
    rest = text[start:].lstrip()
    return len(text) - len(rest) if rest else None


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
