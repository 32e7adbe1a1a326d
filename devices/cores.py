"""CPU affinity of a process: parsing lists of cores, and setting them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection

MOST = 4096  # core numbers are below this on every system
_MOST_TEXT = 80  # longest list of cores in an error; lists from other devices can be very long
_PART = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the core numbers in "0,2-3", sorted and without repetition. Raises ValueError if the text is not valid."""
    cores: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < MOST:
            raise ValueError(f"needs cores such as 0,2-3, got {text[:80]!r}")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))


def cores_text(cores: Collection[int]) -> str:
    """Return core numbers as text such as "0,2-3"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def usable_cores() -> tuple[int, ...]:
    """Return the cores this thread may run on. Raises ValueError if the system does not let programs choose."""
    if sys.platform != "darwin":
        return tuple(sorted(os.sched_getaffinity(0)))
    raise ValueError("this system does not let programs choose their cores; leave --affinity out")


def check_cores(cores: Collection[int]) -> None:
    """Raise ValueError unless this thread may run on all of these cores."""
    usable = usable_cores()
    lacking = set(cores).difference(usable)
    if lacking:
        text = cores_text(lacking)
        text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
        raise ValueError(f"core {text} is not available here; choose from {cores_text(usable)}")


def pin_to_cores(cores: Collection[int]) -> None:
    """Bind this thread, and threads that it starts from now on, to cores. Raises ValueError if that is not allowed."""
    check_cores(cores)
    if sys.platform != "darwin":
        os.sched_setaffinity(0, cores)
