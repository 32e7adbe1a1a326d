"""Decides when the memory that a process may hold has changed: down at once, up when it has stayed."""

from __future__ import annotations

import threading
from collections import deque

GROW_AFTER_S = 5.0  # of steady room; reading takes the rest of the ten seconds in which memory is taken back
SLACK = 64  # a budget that shrinks is one part in so many less than the room, or it would do so again at once
_STALLED = 0.1  # of the time since the last look: memory that others wait for so long is too little, whatever is free
_NEAR = 4  # room is scarce where it is no more than what is held and one part in so many of that
_STALLED_SHARE = 16  # of what is held is then given back: one part in so many


def limit_of(budget: int) -> int:
    """Return the bytes of room in which a budget that shrinks is so large."""
    return -(-budget * SLACK // (SLACK - 1))


class Governor:
    """Budget of a process, by the room that it sees from time to time, at most `most` bytes. For any thread."""

    def __init__(self, most: int, budget: int) -> None:
        """budget: bytes that it has to begin with."""
        self._most, self.budget = most, budget
        self._seen: deque[tuple[float, int]] = deque()  # (time, room) of looks since the budget last shrank
        self._stalled: tuple[float, float] | None = None  # (time, seconds stalled) of the last look
        self._lock = threading.RLock()  # one thread looks, another changes weights

    def look(self, room: int, loaded: int, stalled_s: float, now_s: float) -> int:
        """Return the budget from now on.

        room: bytes that the process could hold. loaded: bytes that what it has loaded is made for; less room shrinks
        the budget. stalled_s: seconds, since some time, in which processes waited for memory.
        """
        with self._lock:
            before, self._stalled = self._stalled, (now_s, stalled_s)
            stalls = before is not None and stalled_s - before[1] > _STALLED * (now_s - before[0]) > 0
            if stalls and room - loaded < loaded // _NEAR:  # with more, it is others that wait, in groups of their own
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
        """Return the budget that there will be if the room stays as it is, once it has for a third of the time;
        before, the budget of now."""
        with self._lock:
            if not self._seen or now_s - self._seen[0][0] < GROW_AFTER_S / 3:
                return self.budget
            until = [*(at for at, _ in self._seen), now_s][1:]  # a room is there up to the next look
            room = min(room for (_, room), at in zip(self._seen, until, strict=True) if now_s - at < GROW_AFTER_S / 3)
            return room if self._is_more(room) else self.budget

    def _is_more(self, room: int) -> bool:
        """Return whether a room is worth a change."""
        return room > self.budget + 2 * self.budget // SLACK

    def shrink(self, room: int) -> None:
        """Take a little less than a room that is smaller than was thought."""
        with self._lock:
            self._seen.clear()
            self.budget = room - room // SLACK

    def bound(self, limit: int) -> int:
        """Take no more than a limit; return the budget from now on."""
        with self._lock:
            self.budget = min(self.budget, limit)
            return self.budget
