"""Reader of a text that comes in pieces. Its methods are generators: each yields where it needs more text, and gives
the same result however the text is split."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]


class NoCallError(Exception):
    """The text is no call, or not one that may be made. The parser handles it: nobody else sees it."""


class Reader:
    """The text that has come, and the place up to which it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_final = False  # nothing more comes

    def add(self, piece: str) -> None:
        """Add a piece behind the text."""
        text, self.text = self.text, ""
        text += piece  # Python copies a long text unless this is the only reference to it
        self.text = text

    def drop(self) -> None:
        """Forget the text before the place."""
        self.text, self.at = self.text[self.at :], 0

    @property
    def is_empty(self) -> bool:
        """True if all that has come was read."""
        return self.at >= len(self.text)

    def character(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self.is_empty and not self.is_final:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Reading[None]:
        while (yield from self.character()).isspace():
            self.at += 1

    def begins(self, *marks: str) -> Reading[str]:
        """Return the mark that the rest begins with, without reading it; "" if it is none of them."""
        while True:
            for mark in marks:
                if self.text.startswith(mark, self.at):
                    return mark
            rest = self.text[self.at : self.at + max(map(len, marks), default=0)]
            if self.is_final or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield

    def may_take(self, *marks: str) -> Reading[str]:
        """Read one of these marks if it is there; return it, or ""."""
        mark = yield from self.begins(*marks)
        self.at += len(mark)
        return mark

    def take(self, *marks: str) -> Reading[str]:
        """Read one of these marks and return it. NoCallError if it is none of them."""
        mark = yield from self.may_take(*marks)
        if not mark:
            raise NoCallError(f"one of {marks} was needed")
        return mark

    def run(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """Read as many characters as match a class of characters, and return them. NoCallError if they are too many."""
        while True:
            match = pattern.match(self.text, self.at)
            end = match.end() if match else self.at
            if end - self.at > most:
                raise NoCallError(f"more than {most} characters")
            if end < len(self.text) or self.is_final:
                read, self.at = self.text[self.at : end], end
                return read
            yield

    def until(self, marks: tuple[str, ...], most: int) -> Reading[str]:
        """Read the text before the next of these marks, and return it. NoCallError if none comes soon enough."""
        while True:
            places = [
                place for mark in marks if (place := self.text.find(mark, self.at, self.at + most + len(mark))) >= 0
            ]
            if places:
                read, self.at = self.text[self.at : min(places)], min(places)
                return read
            if self.is_final or len(self.text) - self.at > most + max(map(len, marks)):
                raise NoCallError(f"none of {marks} within {most} characters")
            yield
