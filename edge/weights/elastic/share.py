"""Share of this process in a memory budget that several processes divide: its limit and its reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge.errors import NotEnoughMemory
from quant.text import bytes_text

_ANY = 1 << 62  # bytes: no limit
_REPORT_S = 1.0  # minimum interval of reports if only the computing time has changed
WAIT_S = 60.0  # time limit for other processes to give memory back


@dataclass(frozen=True)
class MemoryUse:
    """Memory use of one process, as it reports it."""

    resident: int  # maximum bytes that the process may have allocated
    seen: int  # number of the last limit that the process had received before it computed `resident`
    computed_s: float = 0.0  # total seconds of passes, including loading for a pass


class MemoryShare:
    """Share of this process in a budget. Without a divided budget, the share has no limit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.limit = _ANY  # bytes; the process that divides the budget changes it at any time
        self.seen = 0  # number of this limit or of an earlier one
        self._least = 0  # bytes that the process keeps even if it is asked to give memory back
        self._claim: Callable[[int, int], None] | None = None
        self._report: Callable[[MemoryUse], None] = lambda use: None
        self._coming, self._refused = 0, ""
        self._claims = False  # True: the answer to a claim is pending
        self._changed = threading.Condition()
        self._reported: tuple[int, int] | None = None
        self._reported_s = 0.0
        self._began_s: float | None = None  # start of the current pass
        self._computed_s = 0.0  # duration of earlier passes

    @property
    def is_divided(self) -> bool:
        """True if this process shares a budget with others."""
        return self._claim is not None

    def join(self, claim: Callable[[int, int], None], report: Callable[[MemoryUse], None]) -> None:
        """Join a divided budget. From now on, memory must be requested before it is used.

        claim: sends the minimum and maximum of needed bytes; `follow` receives the answer.
        report: sends the memory use.
        """
        self.limit, self._claim, self._report = 0, claim, report

    def follow(self, n_bytes: int, coming: int, number: int, answers: bool, refused: str = "") -> None:
        """Apply a new limit in bytes.

        coming: limit in bytes once other processes have given memory back.
        number: increasing number of the limit.
        answers: True if this answers a claim. Messages from before a pending claim are ignored.
        refused: reason why a claim is refused.
        """
        with self._changed:
            if self._claims and not answers:
                return
            self._claims, self._refused = False, self._refused or refused
            self.limit, self._coming = n_bytes, coming
            self.seen = number  # set last, so that a reader of the number never sees an older limit
            self._changed.notify_all()

    def ask(self, n_bytes: int | None) -> None:
        """Limit this process to `n_bytes`, or to its minimum if that is more. None removes the limit."""
        self.limit = _ANY if n_bytes is None else max(n_bytes, self._least)

    def request(self, least: int, most: int) -> int:
        """Return the bytes that may be held, before they are allocated. Without a divided budget, return `most`.

        If `least` equals `most`, the process holds exactly that amount afterwards. Raises NotEnoughMemory if `least` is
        not available within WAIT_S.
        """
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
                    f"{bytes_text(least)} are needed, {bytes_text(self.limit)} are available: other loaded parts did"
                    f" not give back the rest within {WAIT_S:g} s; try again"
                )
            return min(most, self.limit)

    def begin_pass(self) -> None:
        """Start to count computing time, including loading for a pass."""
        self._began_s = self._clock()

    def end_pass(self) -> None:
        """Stop counting computing time."""
        began_s, self._began_s = self._began_s, None
        if began_s is not None:
            self._computed_s += self._clock() - began_s

    def report(self, resident: int, seen: int) -> None:
        """Report changed memory use immediately, and computing time every second. For the parameters see
        `MemoryUse`."""
        now, began_s, figures = self._clock(), self._began_s, (resident, seen)
        if figures != self._reported or now - self._reported_s >= _REPORT_S:
            self._reported, self._reported_s = figures, now
            self._report(MemoryUse(resident, seen, self._computed_s + (0.0 if began_s is None else now - began_s)))


SHARE = MemoryShare()
