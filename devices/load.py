"""Cores that other programs, and the host of a virtual machine, keep busy beside this process."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

_LEAST_S = 0.05  # the system counts in hundredths of a second

Counted = tuple[float, float, float]
"""Counters in seconds: the clock, all cores in use by anybody, this process."""


def counted() -> Counted:
    """Read the system's counters; `steal` is the host's share. Without counters: no use by others."""
    try:
        cores = psutil.cpu_times()
    except OSError:  # Android shows programs no /proc/stat
        return time.monotonic(), 0.0, time.process_time()
    idle = cores.idle + getattr(cores, "iowait", 0.0)
    guests = getattr(cores, "guest", 0.0) + getattr(cores, "guest_nice", 0.0)  # counted as user, too
    return time.monotonic(), sum(cores) - guests - idle, time.process_time()


class OthersLoad:
    """Meter of the cores that others use between two readings."""

    def __init__(self, count: Callable[[], Counted] = counted) -> None:
        self._count = count
        self._before = count()

    def cores(self) -> float:
        """Return the mean number of cores in use by others since the last measurement; 0 if that was too short ago."""
        now, before = self._count(), self._before
        took_s = now[0] - before[0]
        if took_s < _LEAST_S:
            return 0.0
        self._before = now
        return max(0.0, (now[1] - before[1]) - (now[2] - before[2])) / took_s
