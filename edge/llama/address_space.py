"""Anonymous memory by address: reserved as a range, filled where it is written, given back piece by piece."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20  # of most machines; elsewhere what lies on it is as good as anywhere
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MAP_POPULATE") else 0)  # named from 3.11 on
_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | _NO_RESERVE


def pages(n_bytes: int) -> int:
    """`n_bytes` rounded up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def huge_pages(n_bytes: int) -> int:
    """`n_bytes` rounded up to whole huge pages."""
    return -(-n_bytes // HUGE_PAGE) * HUGE_PAGE


class AddressSpace:
    """`n_bytes` of addresses. A page takes memory from its first write on; before, it reads as zeros."""

    def __init__(self, n_bytes: int, *, huge: bool = False, whole: bool = True) -> None:
        """huge: in huge pages, of which it takes whole ones. A disk fills them at twice the speed, where the memory it
        writes to must be announced to it page by page. whole: False: what does not fill a huge page is in small
        ones."""
        self.huge = huge
        self.n_bytes = huge_pages(max(1, n_bytes)) if huge and whole else pages(max(1, n_bytes))
        self._map = mmap.mmap(-1, self.n_bytes + (HUGE_PAGE if huge else 0), flags=_FLAGS)
        self._bytes = np.frombuffer(self._map, np.uint8)
        start = int(self._bytes.ctypes.data)
        self._skip = -start % HUGE_PAGE if huge else 0
        self.address = start + self._skip
        with suppress(AttributeError, OSError):  # no such advice here: pages are as the system likes them
            advice = mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE
            n_advised = self.n_bytes // HUGE_PAGE * HUGE_PAGE if huge else self.n_bytes
            self._map.madvise(advice, self._skip, n_advised)
            if n_advised < self.n_bytes:
                self._map.madvise(mmap.MADV_NOHUGEPAGE, self._skip + n_advised, self.n_bytes - n_advised)

    def view(self, start: int, n_bytes: int) -> memoryview:
        """The bytes from `start` on, writable. Valid until `close`."""
        return memoryview(self._map)[self._skip + start : self._skip + start + n_bytes]

    def populate(self, start: int, n_bytes: int) -> None:
        """Have memory for these bytes, which read as zeros. Runs without the interpreter's lock."""
        self._bytes[self._skip + start : self._skip + start + n_bytes : PAGE] = 0

    def release(self, start: int, end: int) -> None:
        """Let go of the memory of all whole pages in [start, end); they read as zeros again."""
        start, end = pages(start), end // PAGE * PAGE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, self._skip + start, end - start)

    def close(self) -> None:
        """Give everything back. Nobody may use the addresses any more. Once is enough."""
        self._bytes = np.empty(0, np.uint8)  # no view of it
        with suppress(BufferError):  # a view is still held: the memory goes with the last one
            self._map.close()
