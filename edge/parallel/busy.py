"""Compute seconds of a process, and the share of the time in which it computed."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WINDOW_S = 2.0  # the share is that of the last seconds


class ComputeClock:
    """Counter of compute seconds. One thread computes, and any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._total_s = clock, 0.0
        self._since: float | None = None  # None while nothing is computed

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the time of the block."""
        self._since = began = self._clock()
        try:
            yield
        finally:
            self._since = None
            self._total_s += self._clock() - began

    def subtract(self, seconds: float) -> None:
        """Do not count these seconds of the last computation."""
        self._total_s -= seconds

    @property
    def computed_s(self) -> float:
        """Seconds so far, including a computation that has not ended."""
        since = self._since
        return self._total_s + (0.0 if since is None else self._clock() - since)


class BusyShare:
    """Share of the last seconds in which a process computed. Threads may add and read at the same time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readings: deque[tuple[float, float]] = deque()  # (time, compute seconds so far), oldest first

    def add(self, computed_s: float) -> None:
        """Add a reading of the counter. Impossible readings are ignored, because they come from another device."""
        now = self._clock()
        if not 0 <= computed_s < math.inf:
            return
        if self._readings and computed_s < self._readings[-1][1]:  # another part was loaded, whose counter began at 0
            self._readings.clear()
        while len(self._readings) > 1 and self._readings[1][0] <= now - WINDOW_S:
            self._readings.popleft()
        self._readings.append((now, computed_s))

    @property
    def share(self) -> float:
        """The share, 0 to 1; 0 without two readings, or if the last reading is old."""
        readings = list(self._readings)
        if len(readings) < 2 or self._clock() - readings[-1][0] > WINDOW_S:
            return 0.0
        (first, before_s), (last, computed_s) = readings[0], readings[-1]
        return min(1.0, (computed_s - before_s) / (last - first)) if last > first else 0.0
