"""Shares of one memory budget: divided among processes by use, not by who came first, and never below what each needs.

A process that computes gets more, one that is idle gives way. Nothing is promised twice: a share grows by what others
have given back. Nothing waits here: who needs memory does (`edge/weights/elastic/share.py`).
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
IDLE = 10  # weight of one that does not: memory that nobody else can use is its
_MEAN_S = 120.0  # time constant of the mean of use: who takes turns within a minute is used alike
SETTLED_S = 30.0  # shares that follow use stay for so long
_GAIN = 8  # and change only where a process in use gains one part in so many

_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Claim:
    """Claim of one process on the budget."""

    least: int  # bytes
    most: int  # bytes
    weight: int  # of its use, from IDLE to WHOLE


def divide(budget: int, claims: Mapping[_Name, Claim]) -> dict[_Name, int]:
    """Return the bytes of each: its least, and of the rest a part in proportion to its weight, `most` in all.

    All get their least, whatever the budget.
    """
    shares = {name: claim.least for name, claim in claims.items()}
    rest = max(0, budget - sum(shares.values()))
    growing = dict(claims)
    while growing:
        weight = sum(claim.weight for claim in growing.values())
        full = [name for name, c in growing.items() if rest * c.weight >= (c.most - c.least) * weight]
        if not full:
            break
        for name in full:  # what it leaves is there for the others
            claim = growing.pop(name)
            shares[name], rest = claim.most, rest - (claim.most - claim.least)
    for name, claim in growing.items():
        shares[name] += rest * claim.weight // weight
    return shares


@dataclass(frozen=True)
class Share:
    """Share of one process, for people. Bytes."""

    limit: int = 0  # that it may hold
    resident: int = 0
    least: int = 0
    most: int = 0
    use: float = 0.0  # part of the time that it computed lately, 0 to 1; 0 where it cannot change, and says nothing


@dataclass(eq=False)
class Member:
    """A process that has a part of the budget. `MemoryShares` alone changes it, but for `tell`."""

    name: str
    # Called with its limit in bytes, what that will be once others have given back, a number that counts up, and
    # whether this answers a claim, which ends what was said before.
    tell: Callable[[int, int, int, bool], None]
    least: int = 0  # bytes that it needs
    most: int = 0  # bytes that it holds at most, whatever it may
    share: int = 0  # bytes that it is to have
    limit: int = 0  # bytes that it may hold now
    sent: tuple[int, int] = 0, 0  # limit and share, as it was told last
    number: int = 0  # of that
    left: int = 0  # bytes that it may hold until it reports that it knows its limit
    resident: int = 0  # bytes, as it reported last
    busy: float = 1.0  # mean part of the time that it computed lately: who comes is about to be used
    computed: tuple[float, float] | None = None  # seconds that it computed, and when it reported them

    @property
    def reserved(self) -> int:
        """Bytes that nobody else may have."""
        return min(max(self.limit, self.left), self.most)


class MemoryShares:
    """Division of one budget among processes. For any thread."""

    def __init__(self, budget: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """budget: returns the bytes that there are now."""
        self._budget_now, self._clock = budget, clock
        self._budget = budget()
        self._target: int | None = None
        self._members: list[Member] = []
        self._looked_s = 0.0
        self._lock = threading.Lock()

    def budget(self) -> int:
        """Return the bytes that there are for all."""
        with self._lock:
            self._budget = self._budget_now()
            return self._budget

    def join(self, name: str, tell: Callable[[int, int, int, bool], None]) -> Member:
        """Add a process, which may hold nothing yet. tell: as `Member` has it; it must not wait for that process."""
        member = Member(name, tell)
        with self._lock:
            self._members.append(member)
        return member

    def claim(self, member: Member, least: int, most: int, what: str) -> None:
        """Divide anew, now that a process needs so much; it is told its limit, in any case. what: it needs that for.
        NotEnoughMemory, and nothing changes, if the others cannot give it."""
        with self._lock:
            if member not in self._members:
                return
            self._budget = self._budget_now()
            others = sum(m.least for m in self._members if m is not member)
            room = max(0, self._budget - others)
            if least > max(room, member.least):
                raise NotEnoughMemory(
                    f"{what} needs at least {bytes_text(least)}, and of {bytes_text(max(0, self._budget))} that are"
                    f" shared {bytes_text(room)} can be had: what else is loaded needs {bytes_text(others)}"
                )
            self._claimed(member, least, max(least, most))

    def fix(self, member: Member, n_bytes: int) -> None:
        """Note that a process, which knows its limit, holds so many bytes until it claims others."""
        with self._lock:
            if member in self._members:
                member.limit = n_bytes
                self._claimed(member, n_bytes, n_bytes)

    def report(self, member: Member, use: MemoryUse) -> None:
        """Note what a process reports, and divide anew where that is clearly better."""
        with self._lock:
            if member not in self._members:
                return
            now = self._clock()
            if member.computed is not None and (passed_s := now - member.computed[1]) > 0:
                busy = min(1.0, max(0.0, use.computed_s - member.computed[0]) / passed_s)
                member.busy += (busy - member.busy) * (1 - math.exp(-passed_s / _MEAN_S))
            member.computed, member.resident = (use.computed_s, now), use.resident
            if use.seen == member.number:  # else it may hold what it knew before
                member.left = use.resident
            if now - self._looked_s >= SETTLED_S and self._is_to_change():
                self._divide()
            else:
                self._settle()

    def leave(self, member: Member) -> None:
        """Let others have what a process had. It has ended."""
        with self._lock:
            if member in self._members:
                self._members.remove(member)
                self._divide()

    def ask(self, n_bytes: int | None) -> None:
        """Have all processes together hold so many bytes from now on, or their least if that is more. None: the whole
        budget again."""
        with self._lock:
            self._target = n_bytes
            self._divide()

    def figures(self) -> dict[str, Share]:
        """Return the share of each process that needs some, by name."""
        with self._lock:
            return {
                m.name: Share(m.limit, m.resident, m.least, m.most, 0.0 if m.computed is None else round(m.busy, 3))
                for m in self._members
                if m.most > 0
            }

    def _claimed(self, member: Member, least: int, most: int) -> None:
        member.left = min(member.reserved, most)
        member.least, member.most, member.computed = least, most, None
        if least == most:
            member.resident = most
        self._divide(member)

    def _is_to_change(self) -> bool:
        """Look at the budget, and return whether it is too small for all shares, or a process in use would gain."""
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
        """Have those hold less that have more than their share, let the others have what is there, and tell who has
        another limit. claimed: is told in any case."""
        for member in self._members:
            if member.share < member.limit:
                member.left, member.limit = max(member.left, member.limit), member.share
        free = self._budget - sum(m.reserved for m in self._members)
        for member in self._members:
            own = member.reserved - member.limit  # that it may hold anyway
            if (more := min(max(0, free) + own, member.share - member.limit)) > 0:
                member.limit += more
                free -= max(0, more - own)
        for member in self._members:
            if member.sent != (member.limit, member.share) or member is claimed:
                member.sent, member.number = (member.limit, member.share), member.number + 1
                member.tell(*member.sent, member.number, member is claimed)
