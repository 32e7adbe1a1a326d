"""Share of this process in a memory budget that several processes divide: what it may hold, and what it reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge.errors import NotEnoughMemory
from quant.text import bytes_text

_ANY = 1 << 62  # bytes: without limit
_REPORT_S = 1.0  # between two reports where nothing but the time of computing has changed
WAIT_S = 60.0  # for others to give memory back


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one process, as it reports it."""

    held: int  # bytes that it may have taken
    seen: int  # number of the last limit that it knew before
    computed_s: float = 0.0  # seconds in which it has computed since it was loaded


class ComputedTime:
    """Time in which passes are computed, one after the other. Any thread may read it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began_s: float | None = None  # when the pass under way began
        self._before_s = 0.0  # of all passes before

    def begin(self) -> None:
        """Begin a pass."""
        self._began_s = self._now()

    def end(self) -> bool:
        """End the pass; False if none is under way."""
        began_s, self._began_s = self._began_s, None
        if began_s is not None:
            self._before_s += self._now() - began_s
        return began_s is not None

    @property
    def is_under_way(self) -> bool:
        """True while a pass is computed."""
        return self._began_s is not None

    @property
    def seconds(self) -> float:
        """Return the seconds of all passes until now."""
        began_s = self._began_s
        return self._before_s + (self._now() - began_s if began_s is not None else 0.0)


class MemoryShare:
    """Share of a process. Where nobody divides a budget, it is without limit."""

    def __init__(self) -> None:
        self.limit = _ANY  # bytes; whoever divides the budget changes it at any time
        self.seen = 0  # number of this limit, or of one before
        self._claim: Callable[[int, int], None] | None = None
        self._report: Callable[[MemoryUse], None] = lambda use: None
        self._coming, self._refused = 0, ""
        self._claims = False  # whether the answer to a claim is on its way
        self._changed = threading.Condition()
        self._reported: tuple[int, int] | None = None
        self._reported_s = 0.0

    @property
    def is_divided(self) -> bool:
        """True if somebody divides a budget."""
        return self._claim is not None

    def join(self, claim: Callable[[int, int], None], report: Callable[[MemoryUse], None]) -> None:
        """Hold nothing but what is requested from now on. claim: says what is needed at least, and what can be used at
        most; `follow` gets the answer. report: says what is held."""
        self.limit, self._claim, self._report = 0, claim, report

    def follow(self, n_bytes: int, coming: int, number: int, answers: bool, refused: str = "") -> None:
        """Hold so many bytes from now on. coming: bytes, once others have given them back. number: counts up. answers:
        a claim, and refused: why it is not granted. What was said before the claim came does not count."""
        with self._changed:
            if self._claims and not answers:
                return
            self._claims, self._refused = False, self._refused or refused
            self.limit, self._coming = n_bytes, coming
            self.seen = number  # last: who reads it first knows no older limit
            self._changed.notify_all()

    def ask(self, n_bytes: int | None) -> None:
        """Have this process hold so many bytes, or its least if that is more; None: any again."""
        self.limit = _ANY if n_bytes is None else n_bytes

    def request(self, least: int, most: int) -> int:
        """Return the bytes that may be held, before they are taken; `most` where nobody divides a budget. Where `least`
        is `most`, so much is held from then on. NotEnoughMemory if `least` cannot be had, within a minute."""
        if self._claim is None:
            return most
        with self._changed:
            self._claims = True
        self._claim(least, most)
        with self._changed:
            self._changed.wait_for(
                lambda: self._refused or (not self._claims and self.limit >= max(least, self._coming)), WAIT_S
            )
            refused, self._refused = self._refused, ""
            if refused:
                raise NotEnoughMemory(refused)
            if self.limit < least:
                raise NotEnoughMemory(
                    f"{bytes_text(least)} are needed, {bytes_text(self.limit)} are there: what else is loaded did not"
                    f" give back the rest within {WAIT_S:g} s; try again"
                )
            return min(most, self.limit)

    def report(self, use: MemoryUse) -> None:
        """Report what changed at once, and how much it computes every second."""
        now, figures = time.monotonic(), (use.held, use.seen)
        if figures != self._reported or now - self._reported_s >= _REPORT_S:
            self._reported, self._reported_s = figures, now
            self._report(use)


SHARE = MemoryShare()
