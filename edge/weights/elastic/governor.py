"""Decide when a process's memory budget changes: down immediately, up after the room has been stable."""

from __future__ import annotations

import threading
from collections import deque

# Seconds of stable room before the budget grows. Reading uses the rest of the ten seconds in which memory is reclaimed.
GROW_AFTER_S = 5.0
SLACK = 64  # a shrinking budget is smaller than the room by this fraction, or it would shrink again immediately
# If processes wait for memory for more than this fraction of the time, memory is scarce even if some is free.
_STALLED = 0.1
_NEAR = 4  # room is scarce if it exceeds the loaded bytes by at most this fraction
_STALLED_SHARE = 16  # fraction of the loaded bytes that is then given back


def limit_of(budget: int) -> int:
    """Return the room in bytes that gives a shrinking budget this size."""
    return -(-budget * SLACK // (SLACK - 1))


class Governor:
    """Memory budget of a process, from repeated observations of the room, at most `most` bytes. Thread-safe."""

    def __init__(self, most: int, budget: int) -> None:
        """budget: initial budget in bytes."""
        self._most, self.budget = most, budget
        self._seen: deque[tuple[float, int]] = deque()  # (time, room) of looks since the budget last shrank
        self._stalled: tuple[float, float] | None = None  # (time, seconds stalled) of the last look
        self._lock = threading.RLock()  # one thread looks while another changes weights

    def look(self, room: int, loaded: int, stalled_s: float, now_s: float) -> int:
        """Return the new budget.

        room: bytes that the process could hold.
        loaded: planned bytes of the loaded size; less room shrinks the budget.
        stalled_s: total seconds in which processes waited for memory, since an arbitrary start.
        """
        with self._lock:
            before, self._stalled = self._stalled, (now_s, stalled_s)
            stalls = before is not None and stalled_s - before[1] > _STALLED * (now_s - before[0]) > 0
            if stalls and room - loaded < loaded // _NEAR:  # with more room, processes in other groups are waiting
                room = min(room, loaded - loaded // _STALLED_SHARE)
            room = min(room, self._most)
            if room < loaded:
                self.shrink(room)
                return self.budget
            self._seen.append((now_s, room))
            while len(self._seen) > 1 and now_s - self._seen[1][0] >= GROW_AFTER_S:
                self._seen.popleft()
            steady = min(room for _, room in self._seen)
            if now_s - self._seen[0][0] >= GROW_AFTER_S and self._is_more(steady):
                self.budget = steady
            return self.budget

    def coming(self, now_s: float) -> int:
        """Return the expected budget.

        If the room has been larger for a third of GROW_AFTER_S, this is the budget after the rest of that time.
        Otherwise it is the current budget.
        """
        with self._lock:
            if not self._seen or now_s - self._seen[0][0] < GROW_AFTER_S / 3:
                return self.budget
            until = [*(at for at, _ in self._seen), now_s][1:]  # a room lasts until the next look
            room = min(room for (_, room), at in zip(self._seen, until, strict=True) if now_s - at < GROW_AFTER_S / 3)
            return room if self._is_more(room) else self.budget

    def _is_more(self, room: int) -> bool:
        """Return whether the room is worth a change."""
        return room > self.budget + 2 * self.budget // SLACK

    def shrink(self, room: int) -> None:
        """Set the budget slightly below a room that is smaller than expected."""
        with self._lock:
            self._seen.clear()
            self.budget = room - room // SLACK

    def bound(self, limit: int) -> int:
        """Limit the budget, and return it."""
        with self._lock:
            self.budget = min(self.budget, limit)
            return self.budget
