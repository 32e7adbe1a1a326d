"""How much of the time something else had the processor, while this process wanted it: other programs, or the host.

A process that its own control group holds back is not disturbed: that is its share, and part of what is measured.
"""

from __future__ import annotations

import os
from pathlib import Path

from devices.probe import throttled_s

_PROC = Path("/proc")
_STEAL = 8  # the column of /proc/stat: user, nice, system, idle, iowait, irq, softirq and steal come after the name


class Watch:
    """Counts from when it was made. Systems that do not tell count nothing, as those without /proc."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._before = self._now()

    def lost_s(self) -> float:
        """Seconds since it was made that threads of this process waited for a core that others had, added up, and that
        the host of a virtual machine took from it. Counting goes on from here."""
        now, before = self._now(), self._before
        self._before = now
        waited, stolen, held = (max(0.0, a - b) for a, b in zip(now, before, strict=True))
        return max(0.0, waited - held) + stolen

    def _now(self) -> tuple[float, float, float]:
        """Seconds so far: threads waited for a core, the host took, control groups held back."""
        return _waited_s(self._proc / "self" / "task"), _stolen_s(self._proc / "stat"), throttled_s()


def _waited_s(tasks: Path) -> float:
    """Of all threads of this process: in the queue of a core. The kernel counts nanoseconds."""
    waited = 0
    try:
        threads = os.listdir(tasks)
    except OSError:
        return 0.0
    for thread in threads:
        try:
            waited += int((tasks / thread / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # it has ended; or this kernel does not count
            continue
    return waited / 1e9


def _stolen_s(stat: Path) -> float:
    """Of all cores together: the host of this virtual machine ran something else."""
    try:
        with stat.open() as lines:
            return int(lines.readline().split()[_STEAL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
