"""Measure the speed of reading a file from a disk without the page cache: the limit for all paged weights."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# (threads, bytes of a read): which is best depends on the disk, so all are measured and the best counts.
SETTINGS = ((1, 4 << 20), (2, 1 << 20), (2, 4 << 20), (4, 1 << 20), (8, 1 << 20))
_HUGE = 2 << 20  # bytes of a huge page
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class NoDirectReads(Exception):
    """Files of this folder cannot be read past the page cache."""


class RawDisk(AbstractContextManager["RawDisk"]):
    """Reads of one file by O_DIRECT. Each measurement goes on in the file where the one before ended, and begins anew
    behind its end, as passes over a model's weights do."""

    def __init__(self, path: Path) -> None:
        """NoDirectReads where the file system, or the operating system, has none."""
        try:
            self._fd = _open_direct(path)
        except OSError as error:
            raise NoDirectReads(f"{path.name} cannot be read past the page cache where it is ({error})") from error
        self._size = os.fstat(self._fd).st_size
        self._at = 0

    def gbps(self, seconds: float, settings: Sequence[tuple[int, int]] = SETTINGS) -> dict[str, float]:
        """GB/s by setting, `seconds` in all; the best is the bound."""
        return {
            f"{threads} x {chunk >> 20} MiB": self.rate(threads, chunk, seconds / len(settings))
            for threads, chunk in settings
        }

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __exit__(self, *_: object) -> None:
        self.close()

    def rate(self, threads: int, chunk: int, seconds: float, ring: int = 0) -> float:
        """GB/s of so many threads. ring: bytes that the reads land in, round and round; at least those under way."""
        chunk = min(chunk, self._size // mmap.PAGESIZE * mmap.PAGESIZE)
        memory = memoryview(_buffer(max(ring // chunk, threads) * chunk))
        lock = threading.Lock()
        n_read = place = 0
        began = time.perf_counter()

        def read() -> None:
            nonlocal n_read, place
            while time.perf_counter() < began + seconds:
                with lock:
                    at = self._at if self._at + chunk <= self._size else 0
                    self._at = at + chunk
                    into = memory[place : place + chunk]
                    place = (place + chunk) % len(memory)
                n = os.preadv(self._fd, [into], at)
                with lock:
                    n_read += n

        workers = [threading.Thread(target=read) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return n_read / (time.perf_counter() - began) / 1e9


def _open_direct(path: Path) -> int:
    """Open a file for reads that bypass the page cache. Raises OSError if the system does not support them."""
    if sys.platform == "linux":
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    raise OSError("this system has no direct reads")


def _buffer(n_bytes: int) -> NDArray[np.uint8]:
    """Memory in huge pages where there are any. A disk fills it twice as fast: a request to it has a limit of pieces,
    and every small page is one."""
    space = mmap.mmap(-1, -(-n_bytes // _HUGE) * _HUGE + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):
            space.madvise(mmap.MADV_HUGEPAGE)
    all_of_it = np.frombuffer(space, np.uint8)  # and keeps it
    start = -all_of_it.ctypes.data % _HUGE
    buffer = all_of_it[start : start + n_bytes]
    buffer[:] = 1
    return buffer


def forget(*paths: Path) -> None:
    """Drop files from the page cache; as root, everything else that nobody uses, too."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # what is not on the disk yet cannot be dropped
            if sys.platform != "darwin":
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if os.access(_DROP_CACHES, os.W_OK):
        try:
            _DROP_CACHES.write_text("1")
        except OSError:  # a container may show the file and not take it
            return
