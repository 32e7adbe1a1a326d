"""Probe of this machine: cores and memory that the system and its limits let this process use."""

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
_ANY = 1 << 62  # bytes; a larger limit means no limit
_MOST_MEMORY_MB = 256  # most memory to read in a measurement: more than caches hold
_LEAST_MEMORY_MB = 64
MEMORY_SHARE = 4  # a measurement takes at most one fourth of the free memory


def default_threads() -> int:
    """Return the number of physical cores this process may use. Hyperthreads would only compete for them."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, math.ceil(cpu_quota() or usable), psutil.cpu_count(logical=False) or usable))


def cpu_quota() -> float | None:
    """Return the average number of cores that control groups let this process use, or None without a quota."""
    return min((share for group in _own_groups("cpu") if (share := _cpu_share(*group))), default=None)


def quota_group() -> int:
    """Return the inode of this process's innermost control group with a CPU quota, or 0 without a quota."""
    return next((group.stat().st_ino for group, version in _own_groups("cpu") if _cpu_share(group, version)), 0)


def throttled_s() -> float:
    """Return the seconds in which control groups have throttled this process so far; 0 without a quota."""
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
    """Return the bytes that can be allocated without swapping: the machine's, or the control group's if less."""
    return max(0, memory_room())


def memory_room() -> int:
    """Return the same as `available_memory`, but negative if a control group exceeds its soft limit."""
    rooms = (_room(*group) for group in _own_groups("memory"))
    return min([int(psutil.virtual_memory().available), *(room for room in rooms if room is not None)])


def memory_stalled_s() -> float:
    """Return the seconds in which some process waited for memory, since the machine or control group began to count.

    Return 0 if the kernel does not count. It does not in a version 1 group with a limit: processes that wait for memory
    are in groups of their own.
    """
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
    """Return (folder, version) of this process's control groups for a controller, from the innermost outwards."""
    try:
        return _groups(_OWN_GROUPS.read_text(), controller, _CGROUPS)
    except OSError:  # not Linux
        return ()


@lru_cache(8)  # memory is checked ten times per second
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
    """Return the bytes left in a memory group, including its reclaimable cache, or None if it has no limit.

    The result is negative above the soft limit, which counts like the limit that kills.
    """
    limit_files, use_file, cache_line = (
        (("memory.limit_in_bytes", "memory.soft_limit_in_bytes"), "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else (("memory.max", "memory.high"), "memory.current", "inactive_file")
    )
    limits = []
    for name in limit_files:
        with suppress(OSError, ValueError):  # the text is "max" without a limit
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
    """Return the number of cores a CPU group may keep busy, or None if it has no quota."""
    try:
        if version == 1:
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        else:
            quota, period = map(int, (group / "cpu.max").read_text().split())  # "max" means no quota
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None


def own_rss() -> int:
    """Return the bytes of memory this process uses now."""
    return int(psutil.Process().memory_info().rss)


def rss(pid: int) -> int:
    """Return the bytes of memory another process uses now; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def peak_rss() -> int:
    """Return the largest number of bytes of memory that this process has used."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    try:  # on Linux, getrusage also counts the program that ran in this process before exec
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def memory_bandwidth_gbps(threads: int, most_bytes: int | None = None, repeats: int = 5) -> float:
    """Return the memory bandwidth in GB/s. It limits decoding, which reads every weight once per token.

    Each thread computes dot products on its own part of an array far larger than the caches. The best of `repeats`
    counts.

    threads: number of threads that read.
    most_bytes: limit of the memory to use.

    Raises OSError if that limit, or a share of the free memory, is too small for a measurement.
    """
    import numpy as np

    room = available_memory() // MEMORY_SHARE
    megabytes = min(_MOST_MEMORY_MB, (room if most_bytes is None else min(room, most_bytes)) // 1_000_000)
    if megabytes < _LEAST_MEMORY_MB:
        raise OSError(f"measuring the memory needs {_LEAST_MEMORY_MB} MB, but less is available; free some memory")

    parts = [np.ones(megabytes * 1_000_000 // 4 // threads, np.float32) for _ in range(threads)]
    n_bytes = sum(part.nbytes for part in parts)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            began = time.perf_counter()
            list(pool.map(lambda part: float(np.dot(part, part)), parts))
            best = max(best, n_bytes / (time.perf_counter() - began))
    return best / 1e9
