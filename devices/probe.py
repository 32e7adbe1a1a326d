"""What this machine is: cores and memory, as the operating system and its limits on this process have it."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# Files of a control group: its limit, its use, and the line of memory.stat that counts cache it gives back when asked.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def default_threads() -> int:
    """Threads to compute with: the physical cores this process may run on. Hyperthreads only contend for them."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


def available_memory() -> int:
    """Bytes a new allocation could have without swapping: the machine's, or the control group's if that is less."""
    available = int(psutil.virtual_memory().available)
    room = _cgroup_room()
    return available if room is None else min(available, room)


def _cgroup_room() -> int | None:
    """Bytes left under the tightest limit of this process's control group and those around it; None without one."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = _CGROUPS, _VERSION_2
        elif "memory" in controllers.split(","):
            mount, files = _CGROUPS / "memory", _VERSION_1
        else:
            continue
        own = mount / path.lstrip("/")
        groups = [group for group in (own, *own.parents) if group.is_relative_to(mount)]
        rooms += [room for group in groups if (room := _room(group, files)) is not None]
    return min(rooms, default=None)


def _room(group: Path, files: tuple[str, str, str]) -> int | None:
    limit_file, use_file, cache_line = files
    try:
        limit = int((group / limit_file).read_text())  # "max" where there is none
        used = int((group / use_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, limit - used + int(stat.get(cache_line, 0)))


def own_rss() -> int:
    """Bytes of memory this process holds now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """The most bytes of memory this process ever held."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_bandwidth_gbps(threads: int, megabytes: int = 256, repeats: int = 5) -> float:
    """GB/s that `threads` threads read from memory: the bound of decoding, which reads every weight once a token.

    Each thread takes dot products of its own part of an array far larger than the caches; the best of `repeats`.
    """
    import numpy as np

    parts = [np.ones(megabytes * 1_000_000 // 4 // threads, np.float32) for _ in range(threads)]
    n_bytes = sum(part.nbytes for part in parts)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            began = time.perf_counter()
            list(pool.map(lambda part: float(np.dot(part, part)), parts))
            best = max(best, n_bytes / (time.perf_counter() - began))
    return best / 1e9
