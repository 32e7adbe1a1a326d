"""Limits that the kernel enforces on this process while it works on data from others."""

from __future__ import annotations

import ctypes
import resource
import signal
from contextlib import suppress
from pathlib import Path

_STATM = Path("/proc/self/statm")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_M_ARENA_MAX = -8  # value in malloc.h


def prefer_oom_kill() -> None:
    """Let the kernel end this process instead of its parent if memory runs out. Does nothing without such a setting."""
    with suppress(OSError):
        _OOM_SCORE.write_text("1000")


def limit_cpu(seconds: float) -> None:
    """End this process after this much more processor time, also in native code; 0 removes the limit."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(more_bytes: int | None) -> None:
    """Limit this process to its current address space plus `more_bytes`; None removes the limit."""
    if not _STATM.exists():
        return  # macOS does not limit address space
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    size_bytes = resource.RLIM_INFINITY
    if more_bytes is not None:
        size_bytes = int(_STATM.read_text().split()[0]) * resource.getpagesize() + more_bytes
    if most != resource.RLIM_INFINITY and not 0 <= size_bytes <= most:
        size_bytes = most
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, most))


def give_back_memory() -> None:
    """Return freed memory to the system. Takes milliseconds; does nothing without glibc.

    glibc's allocator otherwise keeps freed memory between used blocks for the life of the process.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def share_one_arena() -> None:
    """Make all threads allocate from one arena. Does nothing without glibc.

    glibc gives each thread its own arena, which keeps the memory its thread has freed. A burst of large requests would
    otherwise stay in memory many times over.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
