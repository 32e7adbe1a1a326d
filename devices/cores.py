"""CPU affinity of a program: parsing what people write, and setting it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

MOST = 4096  # no system has a core of this number
_MOST_TEXT = 80  # of a list of cores in an error; longer ones come from other devices, and can be very long
_PART = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers in "0,2-3", in order, each once. ValueError says what is wrong."""
    cores: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < MOST:
            raise ValueError(f"needs cores such as 0,2-3, got {text[:80]!r}")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))


def cores_text(cores: Collection[int]) -> str:
    """The same the other way: "0,2-3"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def usable_cores() -> tuple[int, ...]:
    """The cores this thread may run on. ValueError if the system does not let programs choose."""
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError("this system does not let programs choose their cores; leave --affinity out")
    return tuple(sorted(os.sched_getaffinity(0)))


def check_cores(cores: Collection[int]) -> None:
    """Raise ValueError unless this thread may run on all of these cores."""
    usable = usable_cores()
    lacking = set(cores).difference(usable)
    if lacking:
        text = cores_text(lacking)
        text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
        raise ValueError(f"core {text} cannot be used here; those that can are {cores_text(usable)}")


def pin_to_cores(cores: Collection[int]) -> None:
    """Run this thread, and those it starts from now on, on these cores only. ValueError if it may not."""
    check_cores(cores)
    os.sched_setaffinity(0, cores)
