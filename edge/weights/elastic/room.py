"""Memory that this process could hold: what it has, and what is free for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from devices.probe import memory_room, memory_stalled_s, own_rss
from edge.weights.elastic.share import SHARE, MemoryShare


@dataclass(frozen=True)
class Room:
    """Readings of memory. Tests bring their own."""

    resident: Callable[[], int] = own_rss  # bytes in memory now
    free: Callable[[], int] = memory_room  # bytes that an allocation could have; below 0: to be given back
    stalled_s: Callable[[], float] = memory_stalled_s  # seconds, since some time
    now: Callable[[], float] = time.monotonic
    share: MemoryShare = SHARE

    def for_process(self, planned: int) -> int:
        """Return the bytes that plans of this process may come to. planned: those of its plan now. What it holds beyond
        that is not there for weights, nor what is beyond its share."""
        return min(min(self.resident(), planned) + self.free(), self.share.limit)


ROOM = Room()
