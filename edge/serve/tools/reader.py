"""Reader of a text that arrives in chunks.

Its methods are generators that yield when they need more text. Their results do not depend on the chunks.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]


class NoCallError(Exception):
    """The text is not a valid call. Only the parser handles this error."""


class Reader:
    """The received text, and the position up to which it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_final = False  # no more text follows

    def add(self, piece: str) -> None:
        """Append a chunk of text."""
        text, self.text = self.text, ""
        text += piece  # Python extends a string in place only if this is its only reference
        self.text = text

    def drop(self) -> None:
        """Drop the text before the current position."""
        self.text, self.at = self.text[self.at :], 0

    @property
    def is_empty(self) -> bool:
        """True if all received text was read."""
        return self.at >= len(self.text)

    def character(self) -> Reading[str]:
        """Return the next character without reading it, or "" at the end."""
        while self.is_empty and not self.is_final:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Reading[None]:
        while (yield from self.character()).isspace():
            self.at += 1

    def begins(self, *marks: str) -> Reading[str]:
        """Return the mark that begins the remaining text, without reading it, or ""."""
        while True:
            for mark in marks:
                if self.text.startswith(mark, self.at):
                    return mark
            rest = self.text[self.at : self.at + max(map(len, marks), default=0)]
            if self.is_final or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield

    def may_take(self, *marks: str) -> Reading[str]:
        """Read one of these marks if it comes next. Return it, or ""."""
        mark = yield from self.begins(*marks)
        self.at += len(mark)
        return mark

    def take(self, *marks: str) -> Reading[str]:
        """Read one of these marks and return it. Raises NoCallError if none of them comes next."""
        mark = yield from self.may_take(*marks)
        if not mark:
            raise NoCallError(f"expected one of {marks}")
        return mark

    def run(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """Read all characters of a class and return them. Raises NoCallError if there are more than `most`."""
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
        """Read the text before the next of these marks, and return it.

        Raises NoCallError if none occurs within `most` characters.
        """
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
