"""Files of the slice store: locks on files in use, and readable errors."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from devices.files import FULL, try_lock
from edge.errors import NoRoom, SliceBusy, SliceError


@contextmanager
def explained(folder: Path, need: str = "room needed for a slice") -> Iterator[None]:
    """Convert OSErrors to SliceError, or to NoRoom if the disk is full."""
    try:
        yield
    except OSError as exc:
        if exc.errno in FULL:
            free = shutil.disk_usage(folder).free
            raise NoRoom(f"the disk of {folder} is full: {need}, {size(free)} free; free some, then go on") from exc
        raise SliceError(f"the cache {folder} cannot be used: {exc.strerror or exc}") from exc


def open_alone(path: Path, digest: str) -> int:
    """Open and lock a partial file, which is created if it is missing. Raises SliceBusy if another writer has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not lock(handle):
        os.close(handle)
        raise SliceBusy(f"slice {digest[:12]} is being written by another process; try again when that is done")
    return handle


def lock(handle: int) -> bool:
    """Lock an open file exclusively; return False if another process has a lock on it."""
    return try_lock(handle)


def release(handle: int) -> None:
    """Unlock and close a file. Closing alone would leave the lock to a child process that inherited the file."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    with ExitStack() as stack:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, handle)
        os.fsync(handle)


def size(n_bytes: int) -> str:
    """Return a number of bytes as text for people."""
    return f"{n_bytes / 2**20:,.0f} MiB" if n_bytes >= 10 << 20 else f"{n_bytes:,} bytes"
