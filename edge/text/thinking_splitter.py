"""Splits an answer into thought and text while it is generated. The split does not depend on the chunks of text."""

from __future__ import annotations

from typing import NamedTuple

from edge.text.thinking_format import State, ThinkingFormat
from quant.text import overlap


class Split(NamedTuple):
    """Parts of an answer that are certain."""

    thought: str = ""
    text: str = ""  # text of the answer itself


class ThoughtSplitter:
    """Separates thoughts from text.

    Text that may be part of a mark is held back until that is certain. White space around thoughts is removed. `state`
    is the state of the answer after the added text.
    """

    def __init__(self, form: ThinkingFormat, state: State = "start") -> None:
        """state: state of the answer at the end of its prompt."""
        self.state: State = state
        self._form = form
        self._pending = ""  # text that was not returned yet
        self._strips = state == "thought"  # white space at this position is removed
        self._has_thought = False
        self._unclosed: tuple[str, ...] = ()  # end mark of a thought that a call ended; the mark may still follow

    def add(self, text: str) -> Split:
        """Add text, and return the parts that are certain now."""
        self._pending += text
        return self._certain(final=False)

    def end(self) -> Split:
        """Return the text that was held back."""
        return self._certain(final=True)

    def _certain(self, final: bool) -> Split:
        thought: list[str] = []
        text: list[str] = []
        while True:
            before = self.state, len(self._pending)
            if self.state == "thought":
                thought.append(self._thought(final))
            elif self.state == "start":
                self._start(final)
            else:
                text.append(self._text(final))
            if (self.state, len(self._pending)) == before:
                return Split("".join(thought), "".join(text))

    def _start(self, final: bool) -> None:
        """Determine the first mark of the answer, if it begins with one."""
        form, rest = self._form, self._pending.lstrip()
        marks = (form.opens, *form.headers, *form.skipped)
        mark = next((mark for mark in marks if rest.startswith(mark)), None)
        if mark is not None:
            # White space after the start mark of a gpt-oss message belongs to its header.
            self._pending, self._strips = rest[len(mark) :], mark not in form.skipped or not form.headers
            if mark not in form.skipped:
                self.state = "thought" if mark == form.opens else "answer"
        elif final or (rest and not any(mark.startswith(rest) for mark in marks)):
            self.state = "answer"

    def _thought(self, final: bool) -> str:
        """Return the next part of a thought, up to its end."""
        form, pending = self._form, self._pending
        marks = (form.closes, *form.calls)
        at, mark = min(((at, mark) for mark in marks if (at := pending.find(mark)) >= 0), default=(-1, ""))
        is_call = mark in form.calls
        end = at if at >= 0 else len(pending) - (0 if final else max(overlap(pending, mark) for mark in marks))
        thought = pending[:end].rstrip()
        rest = pending[end + (0 if is_call else len(mark)) :]
        self._pending = rest if at >= 0 else "" if final else pending[len(thought) :]
        if self._strips:
            thought = thought.lstrip()
            if thought and self._has_thought:
                thought = f"\n\n{thought}"  # separate it from an earlier thought
        self._strips = self._strips and not thought
        self._has_thought = self._has_thought or bool(thought)
        if at >= 0:
            self._unclosed = (form.closes,) if is_call else ()
            self.state, self._strips = "start" if form.headers and not is_call else "answer", True
        return thought

    def _text(self, final: bool) -> str:
        """Return the next part of the answer, up to a mark."""
        form = self._form
        if self._strips:
            self._pending = self._pending.lstrip()
        pending = self._pending
        marks = (*form.headers, *form.skipped, *((form.opens,) if form.again else ()), *self._unclosed)
        places = [(at, mark) for mark in marks if (at := pending.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._pending = pending[at + len(mark) :]
            if mark == form.opens:
                self.state, self._strips = "thought", True
                return pending[:at]
            if mark in self._unclosed:
                self._unclosed = ()
        else:
            at = len(pending) - (0 if final else max((overlap(pending, mark) for mark in marks), default=0))
            self._pending = pending[at:]
        self._strips = self._strips and at == 0
        return pending[:at]
