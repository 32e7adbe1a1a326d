"""Shares of one memory budget: divided among processes by use, not by who came first, and never below what each needs.

A process that computes gets more, one that is idle gives way. Nothing is promised twice: a share grows by what others
have given back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge.elastic.share import MemoryUse
from edge.errors import NotEnoughMemory
from quant.text import bytes_text

WHOLE = 1000  # weight of a process that computes all the time
IDLE = 10  # weight of one that does not: memory that nobody else can use is its
_MEAN_S = 120.0  # time constant of the mean of use: who takes turns within a minute is used alike
SETTLED_S = 30.0  # shares that follow use stay for so long
_GAIN = 8  # and change only where a process in use gains one part in so many
_WAIT_S = 60.0  # for others to give memory back


@dataclass(frozen=True)
class Claim:
    """Claim of one process on the budget."""

    least: int  # bytes
    most: int  # bytes
    weight: int  # of its use, from IDLE to WHOLE


def divide(budget: int, claims: Mapping[str, Claim]) -> dict[str, int]:
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
    held: int = 0
    least: int = 0
    most: int = 0
    use: float = 0.0  # part of the time that it computed lately, 0 to 1


@dataclass
class _Member:
    use: MemoryUse
    seen_s: float  # when it reported
    busy: float = 1.0  # mean part of the time that it computed lately: who comes is about to be used
    share: int = 0  # bytes that it is to have
    limit: int = 0  # bytes that it was told
    left: int = 0  # bytes that it held when it was told to hold less, until it has
    waits: bool = True  # for its first share

    @property
    def taken(self) -> int:
        return max(min(self.limit, self.use.most), self.left)

    @property
    def claim(self) -> Claim:
        return Claim(self.use.least, self.use.most, max(IDLE, round(WHOLE * self.busy)))


class MemoryShares:
    """Division of one budget among processes, by name. Called from any thread."""

    def __init__(
        self, budget: Callable[[], int], tell: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """budget: returns the bytes that there are now. tell: gives a process its new limit in bytes; it must not wait
        for that process."""
        self._budget_now, self._tell, self._clock = budget, tell, clock
        self._budget = budget()
        self._asked: int | None = None
        self._members: dict[str, _Member] = {}
        self._divided_s = 0.0
        self._changed = threading.Condition()

    def room(self, name: str) -> int:
        """Return the bytes that a process could have if all others went to their least."""
        with self._changed:
            self._budget = self._budget_now()
            return self._budget - sum(m.use.least for other, m in self._members.items() if other != name)

    def join(self, name: str, least: int, most: int, what: str, *, again: bool = False) -> None:
        """Divide the budget with this process, too, or again. what: loads, for the error. NotEnoughMemory, and nothing
        changes, if the others cannot give `least`. again: only if it has not left."""
        with self._changed:
            if again and name not in self._members:
                return
            left = self.room(name)
            if least > left:
                raise NotEnoughMemory(
                    f"{what} needs at least {bytes_text(least)}, and of {bytes_text(max(0, self._budget))} that are"
                    f" shared {bytes_text(max(0, left))} can be had: what else is loaded needs"
                    f" {bytes_text(self._budget - left)}"
                )
            before = self._members.get(name)
            self._members[name] = member = _Member(MemoryUse(least, max(least, most)), self._clock())
            if before is not None:
                member.limit, member.left = before.limit, before.left
            self._divide()

    def fix(self, name: str, n_bytes: int) -> None:
        """Note that a process holds so many bytes, and cannot change."""
        with self._changed:
            use = MemoryUse(n_bytes, n_bytes, n_bytes)
            if name in self._members and self._members[name].use != use:
                self._members[name] = _Member(use, self._clock(), limit=n_bytes, waits=False)
                self._divide()

    def grant(self, name: str, send: Callable[[int], None] = lambda n_bytes: None) -> int:
        """Wait until others have given back what the first share of a process takes, and return its bytes; 0 if it has
        left or asked again. send: gives it the share, before any later limit. NotEnoughMemory if they have not
        within a minute."""
        with self._changed:
            member = self._members.get(name)
            if member is None:
                return 0
            self._changed.wait_for(
                lambda: self._members.get(name) is not member or member.limit >= member.share, _WAIT_S
            )
            if self._members.get(name) is not member:
                return 0
            if member.limit < member.use.least:
                raise NotEnoughMemory(
                    f"{bytes_text(member.use.least)} are needed, {bytes_text(member.limit)} are there: what else is"
                    f" loaded did not give back the rest within {_WAIT_S:g} s; try again"
                )
            member.waits = False
            send(member.limit)
            return member.limit

    def report(self, name: str, use: MemoryUse) -> None:
        """Note what a process reports, and divide anew where that is clearly better."""
        with self._changed:
            member = self._members.get(name)
            if member is None or member.waits:
                return
            now = self._clock()
            if (passed_s := now - member.seen_s) > 0:
                busy = min(1.0, max(0.0, use.computed_s - member.use.computed_s) / passed_s)
                member.busy += (busy - member.busy) * (1 - math.exp(-passed_s / _MEAN_S))
            member.use, member.seen_s = use, now
            if use.limit <= member.limit:  # else it does not know yet that it is to hold less
                member.left = use.held
            shares = self._shares()
            if now - self._divided_s >= SETTLED_S and any(
                m.busy * WHOLE > IDLE and shares[other] - m.share > m.share // _GAIN
                for other, m in self._members.items()
            ):
                self._divide()
            else:
                member.share = max(min(member.share, use.most), use.least)
                self._settle()

    def leave(self, name: str) -> None:
        """Let others have what a process had."""
        with self._changed:
            if self._members.pop(name, None) is not None:
                self._divide()

    def ask(self, n_bytes: int | None) -> None:
        """Have all processes together hold so many bytes from now on, or their least if that is more. None: the whole
        budget again."""
        with self._changed:
            self._asked = n_bytes
            self._divide()

    def figures(self) -> dict[str, Share]:
        """Return the share of each process."""
        with self._changed:
            return {
                name: Share(m.limit, m.use.held, m.use.least, m.use.most, round(m.busy, 3))
                for name, m in self._members.items()
            }

    def _shares(self) -> dict[str, int]:
        budget = self._budget if self._asked is None else min(self._budget, self._asked)
        return divide(budget, {name: m.claim for name, m in self._members.items()})

    def _divide(self) -> None:
        self._divided_s, self._budget = self._clock(), self._budget_now()
        for name, share in self._shares().items():
            self._members[name].share = share
        self._settle()

    def _settle(self) -> None:
        """Tell who is to hold less, and let others have what is there."""
        for name, member in self._members.items():
            if member.share < member.limit:
                member.left, member.limit = member.taken, member.share
                self._told(name, member)
        free = self._budget - sum(m.taken for m in self._members.values())
        for name, member in self._members.items():
            if (more := min(free + member.taken - member.limit, member.share - member.limit)) > 0:
                free -= max(0, member.limit + more - member.taken)
                member.limit += more
                self._told(name, member)
        self._changed.notify_all()

    def _told(self, name: str, member: _Member) -> None:
        if not member.waits:
            self._tell(name, member.limit)
