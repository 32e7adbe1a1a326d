"""Divide one memory budget among processes by use instead of order of arrival. Each process keeps its minimum.

A busy process gets more, and an idle process gives memory back. No byte is promised twice: a share grows only by memory
that others have given back. This module never waits; the process that needs memory does
(`edge/weights/elastic/share.py`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from edge.errors import NotEnoughMemory
from edge.weights.elastic.share import MemoryUse
from quant.text import bytes_text

WHOLE = 1000  # weight of a process that computes all the time
IDLE = 10  # weight of an idle process: it keeps memory that no other process can use
_MEAN_S = 120.0  # time constant of the mean use: processes that alternate within a minute count as equally used
SETTLED_S = 30.0  # minimum seconds between changes that follow use
_GAIN = 8  # shares change only if a process in use gains more than this fraction

_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Claim:
    """Claim of one process on the budget."""

    least: int  # bytes
    most: int  # bytes
    weight: int  # weight of its use, from IDLE to WHOLE


def divide(budget: int, claims: Mapping[_Name, Claim]) -> dict[_Name, int]:
    """Return the bytes of each process: its minimum, and a part of the rest in proportion to its weight, up to `most`.

    Each process gets its minimum, even if these exceed the budget.
    """
    shares = {name: claim.least for name, claim in claims.items()}
    rest = max(0, budget - sum(shares.values()))
    growing = dict(claims)
    while growing:
        weight = sum(claim.weight for claim in growing.values())
        full = [name for name, c in growing.items() if rest * c.weight >= (c.most - c.least) * weight]
        if not full:
            break
        for name in full:  # the bytes it leaves go to the others
            claim = growing.pop(name)
            shares[name], rest = claim.most, rest - (claim.most - claim.least)
    for name, claim in growing.items():
        shares[name] += rest * claim.weight // weight
    return shares


@dataclass(frozen=True)
class Share:
    """Share of one process in bytes, for display."""

    limit: int = 0  # bytes that the process may hold
    resident: int = 0  # bytes in the last report of the process
    least: int = 0  # bytes that the process needs
    most: int = 0  # bytes that the process can use at most
    use: float = 0.0  # recent fraction of time spent computing, 0 to 1; always 0 for a fixed share


@dataclass(eq=False)
class Member:
    """Process with a part of the budget. Only `MemoryShares` changes it, except for `tell`."""

    name: str
    # Called with its limit in bytes, the limit once others have given memory back, an increasing number, and whether
    # this answers a claim, which makes earlier messages obsolete.
    tell: Callable[[int, int, int, bool], None]
    least: int = 0  # bytes that it needs
    most: int = 0  # bytes that it can use at most
    share: int = 0  # bytes that it should have
    limit: int = 0  # bytes that it may hold now
    sent: tuple[int, int] = 0, 0  # limit and share as last sent
    number: int = 0  # number of the last message
    left: int = 0  # bytes that it may still hold until it acknowledges its limit
    resident: int = 0  # bytes in its last report
    busy: float = 1.0  # recent mean fraction of time spent computing; a new process is assumed to become active soon
    computed: tuple[float, float] | None = None  # seconds it has computed, and the time of that report

    @property
    def reserved(self) -> int:
        """Bytes that no other process may have."""
        return min(max(self.limit, self.left), self.most)


class MemoryShares:
    """Division of one budget among processes. Thread-safe."""

    def __init__(self, budget: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """budget: returns the current total in bytes."""
        self._budget_now, self._clock = budget, clock
        self._budget = budget()
        self._target: int | None = None
        self._members: list[Member] = []
        self._looked_s = 0.0
        self._lock = threading.Lock()

    def budget(self) -> int:
        """Return the total bytes for all processes."""
        with self._lock:
            self._budget = self._budget_now()
            return self._budget

    def join(self, name: str, tell: Callable[[int, int, int, bool], None]) -> Member:
        """Add a process, which may hold nothing yet. tell: see `Member`; it must not wait for that process."""
        member = Member(name, tell)
        with self._lock:
            self._members.append(member)
        return member

    def claim(self, member: Member, least: int, most: int, what: str) -> None:
        """Claim memory for a process and divide anew. The process always receives its limit.

        what: purpose of the claim, for the error message.
        Raises NotEnoughMemory, without any change, if the others cannot give that much back.
        """
        with self._lock:
            if member not in self._members:
                return
            self._budget = self._budget_now()
            others = sum(m.least for m in self._members if m is not member)
            room = max(0, self._budget - others)
            if least > max(room, member.least):
                raise NotEnoughMemory(
                    f"{what} needs at least {bytes_text(least)}, and of {bytes_text(max(0, self._budget))} that are"
                    f" shared {bytes_text(room)} are available: other loaded parts need {bytes_text(others)}"
                )
            self._claimed(member, least, max(least, most))

    def fix(self, member: Member, n_bytes: int) -> None:
        """Record that a process, which knows its limit, holds `n_bytes` until its next claim."""
        with self._lock:
            if member in self._members:
                member.limit = n_bytes
                self._claimed(member, n_bytes, n_bytes)

    def report(self, member: Member, use: MemoryUse) -> None:
        """Record a report of a process. Divide the budget anew if a process in use would gain clearly."""
        with self._lock:
            if member not in self._members:
                return
            now = self._clock()
            if member.computed is not None and (passed_s := now - member.computed[1]) > 0:
                busy = min(1.0, max(0.0, use.computed_s - member.computed[0]) / passed_s)
                member.busy += (busy - member.busy) * (1 - math.exp(-passed_s / _MEAN_S))
            member.computed, member.resident = (use.computed_s, now), use.resident
            if use.seen == member.number:  # otherwise it may still hold its old limit
                member.left = use.resident
            if now - self._looked_s >= SETTLED_S and self._is_to_change():
                self._divide()
            else:
                self._settle()

    def leave(self, member: Member) -> None:
        """Remove a process that has ended, and give its memory to the others."""
        with self._lock:
            if member in self._members:
                self._members.remove(member)
                self._divide()

    def ask(self, n_bytes: int | None) -> None:
        """Limit all processes together to `n_bytes`, or to their minimums if these are more. None restores the whole
        budget."""
        with self._lock:
            self._target = n_bytes
            self._divide()

    def figures(self) -> dict[str, Share]:
        """Return the shares of the processes that need memory, by name. Processes with the same name count together."""
        shares = dict[str, Share]()
        with self._lock:
            for m in (member for member in self._members if member.most > 0):
                use = 0.0 if m.computed is None else round(m.busy, 3)
                other = shares.get(m.name, Share())
                shares[m.name] = Share(
                    other.limit + m.limit,
                    other.resident + m.resident,
                    other.least + m.least,
                    other.most + m.most,
                    max(other.use, use),
                )
        return shares

    def _claimed(self, member: Member, least: int, most: int) -> None:
        member.left = min(member.reserved, most)
        member.least, member.most, member.computed = least, most, None
        if least == most:
            member.resident = most
        self._divide(member)

    def _is_to_change(self) -> bool:
        """Update the budget. Return whether it is too small for all shares, or a process in use would gain enough."""
        self._looked_s, self._budget = self._clock(), self._budget_now()
        return sum(m.share for m in self._members) > self._budget or any(
            m.busy * WHOLE > IDLE and share - m.share > m.share // _GAIN for m, share in self._shares().items()
        )

    def _shares(self) -> dict[Member, int]:
        budget = self._budget if self._target is None else min(self._budget, self._target)
        claims = {m: Claim(m.least, m.most, max(IDLE, round(WHOLE * m.busy))) for m in self._members}
        return divide(budget, claims)

    def _divide(self, claimed: Member | None = None) -> None:
        self._looked_s, self._budget = self._clock(), self._budget_now()
        for member, share in self._shares().items():
            member.share = share
        self._settle(claimed)

    def _settle(self, claimed: Member | None = None) -> None:
        """Lower limits that exceed a share, distribute the free bytes, and notify processes whose limit has changed.

        claimed: process that is notified in any case.
        """
        for member in self._members:
            if member.share < member.limit:
                member.left, member.limit = max(member.left, member.limit), member.share
        free = self._budget - sum(m.reserved for m in self._members)
        for member in self._members:
            own = member.reserved - member.limit  # bytes that it may hold anyway
            if (more := min(max(0, free) + own, member.share - member.limit)) > 0:
                member.limit += more
                free -= max(0, more - own)
        for member in self._members:
            if member.sent != (member.limit, member.share) or member is claimed:
                member.sent, member.number = (member.limit, member.share), member.number + 1
                member.tell(*member.sent, member.number, member is claimed)
