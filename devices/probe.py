"""Probe of this machine: cores and memory, as the operating system and its limits on this process define them."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_PRESSURE = Path("/proc/pressure/memory")
_ANY = 1 << 62  # bytes: more is no limit
_MOST_MEMORY_MB = 256  # read to measure the memory: more than caches hold
_LEAST_MEMORY_MB = 64
MEMORY_SHARE = 4  # at most one fourth of the free memory is taken for a measurement


def default_threads() -> int:
    """Threads to compute with: the physical cores this process may use. Hyperthreads only contend for them."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, math.ceil(cpu_quota() or usable), psutil.cpu_count(logical=False) or usable))


def cpu_quota() -> float | None:
    """Cores that the control groups let this process keep busy, on the average of a period; None without a quota."""
    return min((share for group in _own_groups("cpu") if (share := _cpu_share(*group))), default=None)


def quota_group() -> int:
    """The inode of the innermost control group with a CPU quota that this process is in; 0 without a quota."""
    return next((group.stat().st_ino for group, version in _own_groups("cpu") if _cpu_share(group, version)), 0)


def throttled_s() -> float:
    """Seconds that the control groups of this process have kept those in them from running so far, because their quota
    was used up; 0 without a quota."""
    seconds = [0.0]
    for group, version in _own_groups("cpu"):
        if _cpu_share(group, version) is None:
            continue
        try:
            stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
            seconds.append(int(stat["throttled_time"]) / 1e9 if version == 1 else int(stat["throttled_usec"]) / 1e6)
        except (OSError, ValueError, KeyError):
            continue
    return max(seconds)


def available_memory() -> int:
    """Bytes a new allocation could have without swapping: the machine's, or the control group's if that is less."""
    return max(0, memory_room())


def memory_room() -> int:
    """The same; below 0, the bytes by which a control group passes the limit that it is to keep to."""
    rooms = (_room(*group) for group in _own_groups("memory"))
    return min([int(psutil.virtual_memory().available), *(room for room in rooms if room is not None)])


def memory_stalled_s() -> float:
    """Seconds, since this machine or the control group began to count, in which some process waited for memory; 0 where
    the kernel does not count, as in a group of version 1 with a limit: others that wait are in groups of their own."""
    groups = list(_own_groups("memory"))
    rooms = [_room(group, version) for group, version in groups if version == 1]
    if any(room is not None and room < psutil.virtual_memory().total for room in rooms):
        return 0.0
    for path in (*(group / "memory.pressure" for group, version in groups if version == 2), _PRESSURE):
        with suppress(OSError, ValueError, IndexError):
            some = path.read_text().splitlines()[0]
            return int(some.rpartition("total=")[2]) / 1e6
    return 0.0


def _own_groups(controller: str) -> Iterable[tuple[Path, int]]:
    """(folder, version) of the control groups this process is in, for one controller, from its own to the outermost."""
    try:
        return _groups(_OWN_GROUPS.read_text(), controller, _CGROUPS)
    except OSError:  # not Linux
        return ()


@lru_cache(8)  # memory is looked at ten times a second
def _groups(text: str, controller: str, root: Path) -> Sequence[tuple[Path, int]]:
    groups = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount, version = (root / controller, 1) if controllers else (root, 2)
        own = mount / path.lstrip("/")
        groups += [(group, version) for group in (own, *own.parents) if group.is_relative_to(mount)]
    return groups


def _room(group: Path, version: int) -> int | None:
    """Bytes a memory group has left, counting the cache it gives back when asked, below 0 where it is above the limit
    that it is to keep to; None if it has no limit: neither that one, nor the one that kills."""
    limit_files, use_file, cache_line = (
        (("memory.limit_in_bytes", "memory.soft_limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else (("memory.max", "memory.high"), "memory.current", "inactive_file")
    )
    limits = []
    for name in limit_files:
        with suppress(OSError, ValueError):  # "max" where there is none
            limits.append(int((group / name).read_text()))
    try:
        if (limit := min(limits)) > _ANY:
            return None
        used = int((group / use_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return limit - used + int(stat.get(cache_line, 0))


def _cpu_share(group: Path, version: int) -> float | None:
    """Cores a CPU group may keep busy; None if it has no quota."""
    try:
        if version == 1:
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        else:
            quota, period = map(int, (group / "cpu.max").read_text().split())  # "max" where there is none
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None


def own_rss() -> int:
    """Bytes of memory this process holds now."""
    return int(psutil.Process().memory_info().rss)


def rss(pid: int) -> int:
    """Bytes of memory another process holds now; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def peak_rss() -> int:
    """The most bytes of memory this process ever held."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    try:  # Linux; its getrusage remembers what the process was before it became this program
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def memory_bandwidth_gbps(threads: int, most_bytes: int | None = None, repeats: int = 5) -> float:
    """GB/s that `threads` threads read from memory: the bound of decoding, which reads every weight once a token.

    Each thread takes dot products of its own part of an array far larger than the caches; the best of `repeats`.
    most_bytes: that it may take. OSError if that, or a part of what is free, is too little to tell.
    """
    import numpy as np

    room = available_memory() // MEMORY_SHARE
    megabytes = min(_MOST_MEMORY_MB, (room if most_bytes is None else min(room, most_bytes)) // 1_000_000)
    if megabytes < _LEAST_MEMORY_MB:
        raise OSError(f"less than {_LEAST_MEMORY_MB} MB of memory may be taken to measure it")

    parts = [np.ones(megabytes * 1_000_000 // 4 // threads, np.float32) for _ in range(threads)]
    n_bytes = sum(part.nbytes for part in parts)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            began = time.perf_counter()
            list(pool.map(lambda part: float(np.dot(part, part)), parts))
            best = max(best, n_bytes / (time.perf_counter() - began))
    return best / 1e9
