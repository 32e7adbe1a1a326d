"""Processor time that other programs, or the host of a virtual machine, took from this process.

A process that its own control group throttles is not disturbed: its quota is part of the measured device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from devices.probe import throttled_s

try:
    import resource
except ImportError:  # this system has no such module
    resource = None  # type: ignore[assignment]

_PROC = Path("/proc")
_STEAL = 8  # column of steal in /proc/stat, after the name, user, nice, system, idle, iowait, irq and softirq
_LEAST_S = 0.05  # the system counts in hundredths of a second
_LEAST_LOAD_S = 0.5  # a shorter time would show single tasks instead of the load

Counted = tuple[float, float, float]
"""Counters in seconds: the clock, use of all cores by all programs, use by this process."""


def counted() -> Counted:
    """Read the system's counters. The host's `steal` counts as use. A system without counters shows no use."""
    try:
        cores = psutil.cpu_times()
    except OSError:  # Android hides /proc/stat from programs
        return time.monotonic(), 0.0, time.process_time()
    idle = cores.idle + getattr(cores, "iowait", 0.0)
    guests = getattr(cores, "guest", 0.0) + getattr(cores, "guest_nice", 0.0)  # already included in `user`
    return time.monotonic(), sum(cores) - guests - idle, time.process_time()


class OthersLoad:
    """Meter of the cores that other programs use between two readings."""

    def __init__(self, count: Callable[[], Counted] = counted) -> None:
        self._count = count
        self._before = count()

    def cores(self) -> float:
        """Return the mean number of cores that other programs used since the last reading; 0 if it was too recent."""
        now, before = self._count(), self._before
        took_s = now[0] - before[0]
        if took_s < _LEAST_S:
            return 0.0
        self._before = now
        return max(0.0, (now[1] - before[1]) - (now[2] - before[2])) / took_s


class ProcessorLoad:
    """Share of this machine's processors that all programs use. Threads may read it at the same time."""

    def __init__(self, count: Callable[[], Counted] = counted, cores: int | None = None) -> None:
        """cores: number of processors; None: those of this machine."""
        self._count, self._cores = count, cores or psutil.cpu_count() or 1
        self._before = count()
        self._share: float | None = None

    def share(self) -> float | None:
        """Return the share between the last two readings, 0 to 1, or None before the second reading.

        A reading less than half a second after the last one returns its share again.
        """
        now, before = self._count(), self._before
        if now[0] - before[0] >= _LEAST_LOAD_S:
            self._before = now
            self._share = min(1.0, max(0.0, (now[1] - before[1]) / (now[0] - before[0]) / self._cores))
        return self._share


class LostTimeMeter:
    """Counter of processor time that this process lost to others since the counter was created.

    It stays at 0 on a system that reports neither how long threads wait nor how much the cores are used.
    """

    def __init__(
        self,
        proc: Path = _PROC,
        cores: Callable[[], Counted] = counted,
        preempted: Callable[[], int] = lambda: _preempted(),
    ) -> None:
        """Start counting.

        proc: folder of the kernel's counters.
        cores, preempted: use of all cores, and number of times this process had to leave one. They are used on kernels
            that do not count how long threads wait.
        """
        self._proc, self._cores, self._preempted = proc, cores, preempted
        self._tells = any((proc / "self" / "task").glob("*/schedstat"))
        self._before = self._now()

    def lost_s(self) -> float:
        """Return the seconds lost since the last call, or since the counter was created.

        They are the time in which threads of this process waited for a core, plus the time that the host of a virtual
        machine took.
        """
        now, before = self._now(), self._before
        self._before = now
        waited, stolen, throttled, used, idle, left = (max(0.0, a - b) for a, b in zip(now, before, strict=True))
        # Idle cores could have run the waiting threads. A process that was never preempted did not wait.
        if not self._tells:
            waited = max(0.0, used - stolen - idle) if left else 0.0
        return max(0.0, waited - throttled) + stolen

    def _now(self) -> tuple[float, float, float, float, float, float]:
        """Read the counters.

        They are the seconds that threads waited for a core, that the host took, that control groups throttled, that
        other programs used cores and that cores were idle; then the number of preemptions.
        """
        stolen, throttled = _stolen_s(self._proc / "stat"), throttled_s()
        if self._tells:
            return _waited_s(self._proc / "self" / "task"), stolen, throttled, 0.0, 0.0, 0.0
        clock, used, own = self._cores()
        return 0.0, stolen, throttled, used - own, clock * (os.cpu_count() or 1) - used, float(self._preempted())


def _preempted() -> int:
    """Return how often threads of this process were preempted; 0 if the system does not count it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0


def _waited_s(tasks: Path) -> float:
    """Return the seconds that all threads of this process have waited for a core. The kernel counts nanoseconds."""
    waited = 0
    try:
        threads = os.listdir(tasks)
    except OSError:
        return 0.0
    for thread in threads:
        try:
            waited += int((tasks / thread / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended, or this kernel does not count
            continue
    return waited / 1e9


def _stolen_s(stat: Path) -> float:
    """Return the seconds, over all cores, that the host of this virtual machine took for other work."""
    try:
        with stat.open() as lines:
            return int(lines.readline().split()[_STEAL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
