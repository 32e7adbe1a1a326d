"""Parser of tool calls in an answer while it is generated. The result does not depend on the chunks of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from edge.serve.tools.reader import NoCallError, Reader, Reading
from edge.serve.tools.styles import read_call
from edge.text.templates.formats import CallFormat
from quant.text import overlap


@dataclass(frozen=True)
class CallStart:
    """Start of a call of a known function."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: the next part of the JSON object."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """End of a call. Its arguments are complete, or the text stopped being a valid call."""

    is_complete: bool = True


Part = str | CallStart | CallArguments | CallEnd


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts with consecutive arguments joined."""
    for is_arguments, same in groupby(parts, lambda part: isinstance(part, CallArguments)):
        if is_arguments:
            yield CallArguments("".join(part.text for part in same if isinstance(part, CallArguments)))
        else:
            yield from same


class CallParser:
    """Separates text from calls. Invalid calls and calls of unknown functions are returned as text.

    Text that may begin a call is held back until that is certain. When streaming, a call is returned as soon as its
    name is known and its arguments have begun. If such a call turns out to be invalid, its arguments stay incomplete,
    so that no client executes it, and the rest of it becomes text.
    """

    def __init__(
        self,
        form: CallFormat,
        functions: Mapping[str, Any],
        *,
        streams: bool = False,
        is_constrained: bool = False,
        is_single: bool = False,
    ) -> None:
        """functions: JSON schemas of parameters by function name.
        streams: return calls while they are generated; otherwise only complete calls.
        is_constrained: a grammar of this format constrains the answer, so calls begin only with its first mark.
        is_single: the answer ends after its first complete call.
        """
        self.form, self._functions, self._streams, self.is_single = form, functions, streams, is_single
        self._starts = form.starts
        if is_constrained:
            self._starts = () if form.bare else form.starts[:1]
        self._parts: list[Part] = []  # certain parts that were not returned yet
        self._pending: list[Part] = []  # parts of a call that may still become text
        self._is_open = self._is_refused = False
        self.has_broken = False  # a call of a known function was invalid
        self._begin()

    def _begin(self) -> None:
        self._reader = Reader()
        self._given_at = 0  # text before this position was returned, as text or as a call
        self._running = self._answer()
        next(self._running)

    def add(self, text: str) -> list[Part]:
        """Add text, and return the parts that are now certain, in order."""
        self._reader.add(text)
        return self._known()

    def end(self) -> list[Part]:
        self._reader.is_final = True
        return self._known()

    def break_off(self) -> list[Part]:
        """Return the rest of the parts before a thought. Parsing restarts after the thought."""
        parts = self.end()
        self._begin()
        return parts

    def _known(self) -> list[Part]:
        next(self._running, None)
        known, self._parts = self._parts, []
        return list(_joined(known))

    # Callbacks of `read_call`.

    def begin(self, name: str) -> None:
        """Begin a call of this function. Calls of unknown functions are not returned."""
        self._is_refused = name not in self._functions
        self._put(CallStart(name))
        self._is_open = True

    def give(self, text: str) -> None:
        self._put(CallArguments(text))

    def end_call(self) -> None:
        """End a call with complete arguments. Raises NoCallError for an unknown function."""
        if self._is_refused:
            raise NoCallError("unknown function")
        self._put(CallEnd())
        self._parts += self._pending
        self._pending, self._is_open, self._given_at = [], False, self._reader.at

    def _put(self, part: Part) -> None:
        if self._is_refused:
            return
        (self._parts if self._streams else self._pending).append(part)
        if self._streams:
            self._given_at = self._reader.at

    # The answer, from its beginning to its end.

    def _answer(self) -> Reading[None]:
        reader = self._reader
        yield
        if self.form.bare and (yield from self._is_bare()):
            yield from self._calls()
        while True:
            reader.drop()
            self._given_at = 0
            if not (yield from self._text()):
                return
            yield from self._calls()

    def _is_bare(self) -> Reading[bool]:
        """Return True if a call begins the answer without a mark. White space before it is then consumed."""
        yield from self._reader.space()
        is_bare = bool((yield from self._reader.begins(self.form.bare)))
        if not is_bare:
            self._reader.at = 0
        return is_bare

    def _text(self) -> Reading[bool]:
        """Return text up to a mark. The result is False at the end of the answer."""
        reader = self._reader
        while True:
            places = [place for mark in self._starts if (place := reader.text.find(mark, reader.at)) >= 0]
            holds = 0 if reader.is_final else max((overlap(reader.text, mark) for mark in self._starts), default=0)
            self._give_text(min(places, default=max(reader.at, len(reader.text) - holds)))
            if places or reader.is_final:
                return bool(places)
            reader.drop()
            self._given_at = 0
            yield

    def _give_text(self, end: int) -> None:
        reader = self._reader
        if text := reader.text[self._given_at : end]:
            self._parts.append(text)
        self._given_at = reader.at = end

    def _calls(self) -> Reading[None]:
        """Read calls with the white space and marks after them. Invalid calls are returned as text."""
        reader, form = self._reader, self.form
        start = reader.at
        try:
            if form.begins not in form.opens:
                yield from reader.may_take(*form.opens)
            while True:
                yield from reader.space()
                if form.begins:
                    yield from reader.take(form.begins)
                yield from read_call(reader, form, self._functions, self)
                if not (yield from self._goes_on()):
                    return
        except NoCallError:
            self._pending = []
            if self._is_open and not self._is_refused:
                self.has_broken = True
                if self._streams:
                    self._parts.append(CallEnd(is_complete=False))
            self._is_open = self._is_refused = False
            # Text is not read twice, so that the work is linear in its length.
            self._give_text(len(reader.text) if reader.is_final else max(reader.at, start + 1))

    def _goes_on(self) -> Reading[bool]:
        """Read the text after a call. Return True if another call follows."""
        reader, form = self._reader, self.form
        yield from reader.space()
        while (yield from reader.may_take(*filter(None, (form.ends.strip(), *form.skipped)))):
            yield from reader.space()
        self._given_at = reader.at
        if form.closes and (yield from reader.may_take(form.closes)):
            yield from reader.space()
        elif form.begins and (yield from reader.begins(form.begins)):
            return True
        elif form.bare and form.style == "json":
            yield from reader.may_take(form.between.strip())
            yield from reader.space()
            if (yield from reader.begins(form.bare)):
                return True
            reader.at = self._given_at
        self._given_at = reader.at
        return False
