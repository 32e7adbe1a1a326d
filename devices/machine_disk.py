"""Disk reading speed: with large blocks, past the page cache where the system can."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from devices.files import DIRECT

_MOST_BYTES = 256 << 20  # size limit of the file that is read
_LEAST_BYTES = 16 << 20  # below, what is measured is more the way to the disk than the disk
_ROOM_SHARE = 4  # it takes at most this part of the room that is left
_BLOCK = 4 << 20  # bytes of one read
_THREADS = 2  # reads under way, as when weights are paged
_MOST_WRITE_S = 2.0  # so long the file grows; a slow card then has a smaller one
_MOST_READ_S = 0.5  # so long it is read
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def disk_read_rate(folder: Path) -> tuple[float, str]:
    """(bytes a second, how they were read): "direct" past the page cache; "uncached" where the system is only asked to
    keep nothing (macOS); "buffered" where the filesystem can neither, and the cache is dropped before.

    A file of at most 256 MiB is written to `folder`, which must exist, and read. It has no name there, so nothing is
    left of it however this ends. OSError says why this disk cannot be measured.
    """
    kind = _filesystem(folder)
    if kind in _IN_MEMORY:
        raise OSError(f"{folder} is in memory ({kind}), not on a disk")
    most = min(_MOST_BYTES, shutil.disk_usage(folder).free // _ROOM_SHARE) // _BLOCK * _BLOCK
    if most < _LEAST_BYTES:
        raise OSError(f"{folder} has less than {_LEAST_BYTES * _ROOM_SHARE >> 20} MiB of room")
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        n_bytes = _fill(file.fileno(), most)
        how = _pass_cache(file.fileno())
        return _rate(file.fileno(), n_bytes, again=how != "buffered"), how


def _filesystem(folder: Path) -> str:
    """Return the type of the filesystem of a folder; "" if the system does not tell."""
    path, kind, depth = folder.resolve(), "", -1
    with suppress(OSError, psutil.Error):
        for mount in psutil.disk_partitions(all=True):
            parts = len(Path(mount.mountpoint).parts)
            if parts >= depth and path.is_relative_to(mount.mountpoint):
                kind, depth = mount.fstype, parts  # of two at the same place, the later one hides the other
    return kind


def _fill(fd: int, most: int) -> int:
    """Write blocks and have them on the disk; how many bytes they are."""
    block = os.urandom(_BLOCK)  # random, so that no disk can compress it
    until = time.monotonic() + _MOST_WRITE_S
    n_bytes = 0
    while n_bytes < most and (n_bytes < _LEAST_BYTES or time.monotonic() < until):
        done = os.write(fd, block)
        if done != _BLOCK:
            raise OSError(f"the disk took {done} of {_BLOCK} bytes")
        n_bytes += done
        if n_bytes % (8 * _BLOCK) == 0:
            os.fsync(fd)  # else the memory's speed is what ends the writing
    os.fsync(fd)
    return n_bytes


def _pass_cache(fd: int) -> str:
    """Make reads come from the disk itself, in the best way the system has; return which one."""
    if DIRECT:
        with suppress(OSError):  # some filesystems refuse here, others when read
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | DIRECT)
            with mmap.mmap(-1, _BLOCK) as block:
                if os.preadv(fd, [block], 0) == _BLOCK:
                    return "direct"
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~DIRECT)
    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return "uncached"
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return "buffered"


def _rate(fd: int, n_bytes: int, again: bool) -> float:
    """Return bytes a second, read by a few threads. again: the file may be read repeatedly, as no cache has it."""
    blocks = n_bytes // _BLOCK

    def read(thread: int) -> int:
        done, i = 0, thread
        with mmap.mmap(-1, _BLOCK) as block:  # begins on a page, as direct reads need
            # One block at least: on a busy machine a thread may begin when the time is over.
            while (not done or time.perf_counter() < until) and (again or i < blocks):
                done += os.preadv(fd, [block], i % blocks * _BLOCK)
                i += _THREADS
        return done

    with ThreadPoolExecutor(_THREADS) as pool:
        began = time.perf_counter()
        until = began + _MOST_READ_S
        total = sum(pool.map(read, range(_THREADS)))
        return total / (time.perf_counter() - began)
