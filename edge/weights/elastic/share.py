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

    resident: int  # bytes that it may have taken
    seen: int  # number of the last limit that it knew before
    computed_s: float = 0.0  # seconds in which it has computed, or loaded to compute


class MemoryShare:
    """Share of a process. Where nobody divides a budget, it is without limit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.limit = _ANY  # bytes; whoever divides the budget changes it at any time
        self.seen = 0  # number of this limit, or of one before
        self._least = 0  # bytes that are needed, whatever is asked for
        self._claim: Callable[[int, int], None] | None = None
        self._report: Callable[[MemoryUse], None] = lambda use: None
        self._coming, self._refused = 0, ""
        self._claims = False  # whether the answer to a claim is on its way
        self._changed = threading.Condition()
        self._reported: tuple[int, int] | None = None
        self._reported_s = 0.0
        self._began_s: float | None = None  # when the pass under way began
        self._computed_s = 0.0  # of the passes before

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
        self.limit = _ANY if n_bytes is None else max(n_bytes, self._least)

    def request(self, least: int, most: int) -> int:
        """Return the bytes that may be held, before they are taken; `most` where nobody divides a budget. Where `least`
        is `most`, so much is held from then on. NotEnoughMemory if `least` cannot be had, within a minute."""
        if self._claim is None:
            self._least, self.limit = least, max(least, self.limit)
            return most
        with self._changed:
            self._claims, self._refused = True, ""
        self._claim(least, most)
        with self._changed:
            self._changed.wait_for(
                lambda: self._refused or (not self._claims and self.limit >= max(least, self._coming)), WAIT_S
            )
            if self._refused:
                raise NotEnoughMemory(self._refused)
            if self.limit < least:
                raise NotEnoughMemory(
                    f"{bytes_text(least)} are needed, {bytes_text(self.limit)} are there: what else is loaded did not"
                    f" give back the rest within {WAIT_S:g} s; try again"
                )
            return min(most, self.limit)

    def begin_pass(self) -> None:
        """Count the time from now on as time of computing, also that of loading for it."""
        self._began_s = self._clock()

    def end_pass(self) -> None:
        """Count it no more."""
        began_s, self._began_s = self._began_s, None
        if began_s is not None:
            self._computed_s += self._clock() - began_s

    def report(self, resident: int, seen: int) -> None:
        """Report what changed at once, and how much is computed every second. resident, seen: of
        `MemoryUse`."""
        now, began_s, figures = self._clock(), self._began_s, (resident, seen)
        if figures != self._reported or now - self._reported_s >= _REPORT_S:
            self._reported, self._reported_s = figures, now
            self._report(MemoryUse(resident, seen, self._computed_s + (0.0 if began_s is None else now - began_s)))


SHARE = MemoryShare()
