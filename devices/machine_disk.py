"""Reading speed of a disk, with large blocks and, if possible, without the page cache."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from devices.files import DIRECT

_MOST_BYTES = 256 << 20  # largest file to read
_LEAST_BYTES = 16 << 20  # a smaller file would measure the path to the disk more than the disk
_ROOM_SHARE = 4  # the file takes at most one part in four of the free room
_BLOCK = 4 << 20  # bytes of one read
_BLOCKS = 8  # blocks of memory that each thread reads into in turn: more than caches hold, as paged weights have it
_THREADS = 2  # concurrent reads, as when weights are paged
_MOST_WRITE_S = 2.0  # longest time for writing; a slow card gets a smaller file
_MOST_READ_S = 0.5  # longest time for reading
_HUGE = 2 << 20  # bytes of a huge page
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def disk_read_rate(folder: Path) -> tuple[float, str]:
    """Return (bytes per second, the way of reading): "direct", "uncached" or "buffered".

    "direct" bypasses the page cache. "uncached" asks the system to cache nothing (macOS). "buffered" drops the cache
    before reading, on file systems that allow neither.

    A file of at most 256 MiB is written to `folder`, which must exist, and read. The file has no name, so nothing is
    left behind.

    Raises OSError if this disk cannot be measured.
    """
    kind = _filesystem(folder)
    if kind in _IN_MEMORY:
        raise OSError(f"{folder} is in memory ({kind}), not on a disk; choose another folder")
    most = min(_MOST_BYTES, shutil.disk_usage(folder).free // _ROOM_SHARE) // _BLOCK * _BLOCK
    if most < _LEAST_BYTES:
        raise OSError(f"measuring {folder} needs {_LEAST_BYTES * _ROOM_SHARE >> 20} MiB of room; free some")
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        n_bytes = _fill(file.fileno(), most)
        how = _pass_cache(file.fileno())
        return _rate(file.fileno(), n_bytes, again=how != "buffered"), how


def _filesystem(folder: Path) -> str:
    """Return the type of a folder's file system; "" if it is unknown."""
    path, kind, depth = folder.resolve(), "", -1
    with suppress(OSError, psutil.Error):
        for mount in psutil.disk_partitions(all=True):
            parts = len(Path(mount.mountpoint).parts)
            if parts >= depth and path.is_relative_to(mount.mountpoint):
                kind, depth = mount.fstype, parts  # a later mount at the same place hides the earlier one
    return kind


def _fill(fd: int, most: int) -> int:
    """Write blocks to the disk; return the number of bytes written."""
    block = os.urandom(_BLOCK)  # random data, which no disk can compress
    until = time.monotonic() + _MOST_WRITE_S
    n_bytes = 0
    while n_bytes < most and (n_bytes < _LEAST_BYTES or time.monotonic() < until):
        done = os.write(fd, block)
        if done != _BLOCK:
            raise OSError(f"the disk took {done} of {_BLOCK} bytes")
        n_bytes += done
        if n_bytes % (8 * _BLOCK) == 0:
            os.fsync(fd)  # without it, the time limit would measure memory instead of the disk
    os.fsync(fd)
    return n_bytes


def _pass_cache(fd: int) -> str:
    """Make reads bypass the cache in the best way the system has; return the name of that way."""
    if DIRECT:
        with suppress(OSError):  # some file systems refuse here, others refuse the read
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | DIRECT)
            with mmap.mmap(-1, _BLOCK) as block:
                if os.preadv(fd, [block], 0) == _BLOCK:
                    return "direct"
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~DIRECT)
    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return "uncached"
    if sys.platform != "darwin":
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return "buffered"


def _rate(fd: int, n_bytes: int, again: bool) -> float:
    """Return bytes per second, read by a few threads. again: the file may be read repeatedly without a cache."""
    blocks = n_bytes // _BLOCK

    def read(thread: int) -> int:
        done, i = 0, thread
        # At least one block: on a busy machine a thread may start after the time is over.
        while (not done or time.perf_counter() < until) and (again or i < blocks):
            start = i // _THREADS % _BLOCKS * _BLOCK
            done += os.preadv(fd, [buffers[thread][start : start + _BLOCK]], i % blocks * _BLOCK)
            i += _THREADS
        return done

    buffers = [_buffer() for _ in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS) as pool:
        began = time.perf_counter()
        until = began + _MOST_READ_S
        total = sum(pool.map(read, range(_THREADS)))
        return total / (time.perf_counter() - began)


def _buffer() -> memoryview:
    """Return memory for _BLOCKS blocks, in huge pages if possible, as paged weights have it.

    A disk may fill it several times as fast, because a request to the disk has a limited number of pieces, and each
    page is a piece.
    """
    import numpy as np

    size = _BLOCKS * _BLOCK
    space = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # without the advice, the system chooses the pages
            space.madvise(mmap.MADV_HUGEPAGE)
    start = -int(np.frombuffer(space, np.uint8).ctypes.data) % _HUGE
    buffer = memoryview(space)[start : start + size]
    np.frombuffer(buffer, np.uint8)[:: mmap.PAGESIZE] = 1  # otherwise the first reads would wait for pages
    return buffer
