"""Measure how long a lab's threads were ready to run but waited for a core: the error that this machine adds.

Linux counts it for each thread, in nanoseconds: the second number of /proc/PID/task/TID/schedstat
(Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")


class CoreWaits:
    """Measures what processes wait for cores while something is done."""

    def __init__(
        self, pids: Callable[[], Iterable[int]], clock: Callable[[], float], proc: Path = Path("/proc")
    ) -> None:
        """pids: of the processes that there are now. clock: in seconds."""
        self._pids, self._clock, self._proc = pids, clock, proc

    def during(self, work: Callable[[], T]) -> tuple[T, float]:
        """Return (what `work` returns, part of its time that the process waited for cores that waited the longest; 0
        where the kernel does not say)."""
        before, began = self._waited_s(), self._clock()
        result = work()
        took_s = self._clock() - began
        waits = [seconds - before.get(pid, 0.0) for pid, seconds in self._waited_s().items()]
        return result, max(waits, default=0.0) / max(took_s, 1e-9)

    def _waited_s(self) -> dict[int, float]:
        """Seconds that all threads of a process have waited, by process."""
        waits: dict[int, float] = {}
        for pid in self._pids():
            for path in (self._proc / str(pid) / "task").glob("*/schedstat"):
                with suppress(OSError):  # it has ended
                    waits[pid] = waits.get(pid, 0.0) + 1e-9 * int(path.read_text().split()[1])
        return waits


def first_of(supervisor: int) -> list[int]:
    """Return the processes of a lab that steps wait for: this one, its ranks, and its switch. They run before all
    others (`devices.sleeping.run_first`); workers' own processes do not, and may wait without harm."""
    with suppress(psutil.Error):
        own = psutil.Process(supervisor).children(recursive=True)
        return [os.getpid(), *(child.pid for child in own if _runs_first(child.pid))]
    return [os.getpid()]


def _runs_first(pid: int) -> bool:
    if sys.platform == "linux":
        with suppress(OSError):  # it has ended
            return os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO
    return False
