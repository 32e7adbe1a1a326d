"""Reserve address ranges without memory, fill them on first write, and release them page by page."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import numpy as np

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20  # size on most machines; another size costs speed, not correctness
# Python has this name since 3.11
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MAP_POPULATE") else 0)
_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | _NO_RESERVE


def pages(n_bytes: int) -> int:
    """Return `n_bytes` rounded up to whole pages."""
    return -(-n_bytes // PAGE) * PAGE


def huge_pages(n_bytes: int) -> int:
    """Return `n_bytes` rounded up to whole huge pages."""
    return -(-n_bytes // HUGE_PAGE) * HUGE_PAGE


class AddressSpace:
    """Reserved range of `n_bytes` addresses. A page reads as zeros and takes no memory until it is written."""

    def __init__(self, n_bytes: int, *, huge: bool = False, whole: bool = True) -> None:
        """Reserve the range.

        huge: use huge pages. A disk fills huge pages at twice the speed, because fewer pages are announced to it.
        whole: round the size up to whole huge pages. If False, the last part of the range uses small pages.
        """
        self.huge = huge
        self.n_bytes = huge_pages(max(1, n_bytes)) if huge and whole else pages(max(1, n_bytes))
        self._map = mmap.mmap(-1, self.n_bytes + (HUGE_PAGE if huge else 0), flags=_FLAGS)
        self._bytes = np.frombuffer(self._map, np.uint8)
        start = int(self._bytes.ctypes.data)
        self._skip = -start % HUGE_PAGE if huge else 0
        self.address = start + self._skip
        if sys.platform == "linux":
            with suppress(OSError):  # Without this advice, the system chooses the page size.
                advice = mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE
                n_advised = self.n_bytes // HUGE_PAGE * HUGE_PAGE if huge else self.n_bytes
                self._map.madvise(advice, self._skip, n_advised)
                if n_advised < self.n_bytes:
                    self._map.madvise(mmap.MADV_NOHUGEPAGE, self._skip + n_advised, self.n_bytes - n_advised)

    def view(self, start: int, n_bytes: int) -> memoryview:
        """Return a writable view of `n_bytes` bytes from offset `start`. The view is valid until `close`."""
        return memoryview(self._map)[self._skip + start : self._skip + start + n_bytes]

    def populate(self, start: int, n_bytes: int) -> None:
        """Allocate memory for these bytes, which must still be zeros. Runs without the interpreter's lock."""
        self._bytes[self._skip + start : self._skip + start + n_bytes : PAGE] = 0

    def release(self, start: int, end: int) -> None:
        """Release the memory of all whole pages in [start, end). These pages read as zeros again."""
        start, end = pages(start), end // PAGE * PAGE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, self._skip + start, end - start)

    def close(self) -> None:
        """Release the whole range. The addresses must not be used afterwards."""
        self._bytes = np.empty(0, np.uint8)  # drop our own view of the map
        with suppress(BufferError):  # If another view still exists, the memory is freed with that view.
            self._map.close()
