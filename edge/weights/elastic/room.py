"""Memory that this process could hold: its resident memory and the free memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from devices.probe import memory_room, memory_stalled_s, own_rss
from edge.weights.elastic.share import SHARE, MemoryShare


@dataclass(frozen=True)
class Room:
    """Functions that read the memory of this machine. Tests replace them."""

    resident: Callable[[], int] = own_rss  # bytes in memory now
    free: Callable[[], int] = memory_room  # bytes available to an allocation; below 0: bytes to give back
    stalled_s: Callable[[], float] = memory_stalled_s  # total seconds in which processes waited for memory
    now: Callable[[], float] = time.monotonic
    share: MemoryShare = SHARE

    def for_process(self, planned: int) -> int:
        """Return the bytes that plans of this process may use.

        planned: bytes of the current plan. Memory that the process holds beyond its plan, and memory beyond its share,
        is not available for weights.
        """
        return min(min(self.resident(), planned) + self.free(), self.share.limit)


ROOM = Room()
