"""Memory that a process has freed, given back to the system. One of nine files with ctypes."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def give_back_memory() -> None:
    """Give back what was freed. The allocator of glibc keeps it, in the middle of what is in use, for as long as the
    process lives. Takes milliseconds; does nothing if there is no such allocator."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
