"""Share of this process in a memory budget that several processes divide: what it may hold, and what it reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_ANY = 1 << 62  # bytes: without limit
_REPORT_S = 1.0  # between two reports where nothing but the time of computing has changed


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one process, as it reports it. Bytes."""

    least: int  # that it needs; with less it is refused
    most: int  # beyond which more is of no use
    held: int = 0  # that it may have taken; 0: it asks for its first share
    limit: int = 0  # that it knew then
    computed_s: float = 0.0  # seconds in which it has computed since it was loaded


class MemoryShare:
    """Share of a process. Where nobody divides a budget, it is without limit."""

    def __init__(self) -> None:
        self.limit = _ANY  # bytes; whoever divides the budget changes it at any time
        self._ask: Callable[[MemoryUse], int] | None = None
        self._tell: Callable[[MemoryUse], None] = lambda use: None
        self._told: tuple[int, int, int, int] | None = None
        self._told_s = 0.0

    @property
    def is_divided(self) -> bool:
        """True if somebody divides a budget."""
        return self._ask is not None

    def join(self, ask: Callable[[MemoryUse], int], tell: Callable[[MemoryUse], None]) -> None:
        """Follow who divides a budget. ask: returns the first share, once it is there and `limit`
        is set. tell: reports."""
        self._ask, self._tell = ask, tell

    def ask(self, n_bytes: int | None) -> None:
        """Have this process hold so many bytes, or its least if that is more; None: any again."""
        self.limit = _ANY if n_bytes is None else n_bytes

    def request(self, least: int, most: int) -> int:
        """Return the bytes of the first share, before anything is loaded; `most` where nobody divides a budget.
        NotEnoughMemory if `least` cannot be had."""
        if self._ask is None:
            return most
        return min(most, self._ask(MemoryUse(least, most)))

    def report(self, use: MemoryUse) -> None:
        """Report what changed at once, and how much it computes every second."""
        now, figures = time.monotonic(), (use.least, use.most, use.held, use.limit)
        if figures != self._told or now - self._told_s >= _REPORT_S:
            self._told, self._told_s = figures, now
            self._tell(use)

    def fix(self, n_bytes: int) -> None:
        """Report that what was loaded holds so many bytes, and cannot change."""
        self._tell(MemoryUse(n_bytes, n_bytes, n_bytes, self.limit))


SHARE = MemoryShare()
