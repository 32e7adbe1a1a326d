"""Limits that the kernel holds this process to, while it works on what others sent."""

from __future__ import annotations

import ctypes
import resource
import signal
from contextlib import suppress
from pathlib import Path

_STATM = Path("/proc/self/statm")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_M_ARENA_MAX = -8  # of malloc.h


def prefer_oom_kill() -> None:
    """Let the kernel end this process first when memory runs out, not its parent, where the system has such a
    setting."""
    with suppress(OSError):
        _OOM_SCORE.write_text("1000")


def limit_cpu(seconds: float) -> None:
    """End this process after so much processor time from now on, also in native code; 0: do not."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(more_bytes: int | None) -> None:
    """Let this process have so many bytes of address space beside what it has; None: as many as it may."""
    if not _STATM.exists():
        return  # macOS limits no address space
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    size_bytes = resource.RLIM_INFINITY
    if more_bytes is not None:
        size_bytes = int(_STATM.read_text().split()[0]) * resource.getpagesize() + more_bytes
    if most != resource.RLIM_INFINITY and not 0 <= size_bytes <= most:
        size_bytes = most
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, most))


def give_back_memory() -> None:
    """Give back what was freed. The allocator of glibc keeps it, in the middle of what is in use, for as long as the
    process lives. Takes milliseconds; does nothing if there is no such allocator."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def share_one_arena() -> None:
    """Have all threads take memory from one arena. glibc gives each thread its own, and every arena keeps what its
    threads have freed, so that a burst of large requests stays in memory many times over. Does nothing if there is no
    such allocator."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
