"""Atomic file writes, checks of free space, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from devices.paths import state_folder

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a disk that has no room
DIRECT = getattr(os, "O_DIRECT", 0)  # flag of reads past the page cache; 0 where the system has none
LOCK_S = 60.0  # to wait for a lock, which whoever has it holds for moments
_LOOK_S = 0.02  # between two tries

# Files and folders of this process that nobody else would remove. Texts: those are found, added and removed at once,
# while paths compare by code that lets other threads in.
_temporary: set[str] = set()


def write_whole(path: Path, content: bytes | bytearray | memoryview, *, sync: bool = True) -> None:
    """Write `content` so that only this user may read it. OSError, which names this file, on failure.

    A reader sees the old file or the new one, never half of one. sync: also after a loss of power.
    """
    try:
        _write_whole(path, content, sync)
    except OSError as error:  # of a temporary file, or of no name at all
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_whole(path: Path, content: bytes | bytearray | memoryview, sync: bool) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    with removed_at_end(Path(temporary)):
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def write_private(path: Path, content: bytes) -> None:
    """The same for what must survive a loss of power, in a folder that is made where it is missing."""
    _make(path.parent)
    write_whole(path, content)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, not only the content
    finally:
        os.close(folder)


@contextmanager
def removed_at_end(path: Path) -> Iterator[None]:
    """Register this file or folder during the block for `remove_temporary`, which a process calls before it ends at
    once."""
    _temporary.add(str(path))
    try:
        yield
    finally:
        _temporary.remove(str(path))


def remove_temporary() -> None:
    """Remove what would be left behind if this process ended now."""
    for path in map(Path, tuple(_temporary)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


@contextmanager
def temporary_beside(path: Path, suffix: str = ".part") -> Iterator[Path]:
    """The name of an empty file beside `path`; it is removed at the end of the block, if it is still there.

    Other programs write to it, and it is renamed when it is whole. Its mode is that of any new file.
    """
    temporary = path.absolute().with_name(f".{path.name}.{os.urandom(4).hex()}{suffix}")
    with removed_at_end(temporary):
        temporary.open("xb").close()
        try:
            yield temporary
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: one process, and one thread of it, at a time. Others wait, as `wait_for_lock`.

    The system frees the lock when its holder ends, however it ends.
    """
    _make(folder)
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        wait_for_lock(handle, folder)
        yield
    finally:
        os.close(handle)


def wait_for_lock(handle: int, folder: Path) -> None:
    """Lock an open file of a folder for oneself alone. TimeoutError where somebody has it for LOCK_S."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"another process holds the lock of {folder} for {LOCK_S:g} s by now, and may be stopped;"
                    f" `fuser {folder}/.lock` names it: end it, or let it go on"
                ) from None
        time.sleep(_LOOK_S)


def claim(path: Path) -> bool:
    """Claim a file to write, for as long as this process lives; False if another process of this user has it.

    Claims are ranges of one file that the system locks, one byte for each name: nothing is left beside the output.
    """
    place = int.from_bytes(hashlib.sha256(os.fsencode(path.resolve())).digest()[:7], "big")
    try:
        fcntl.lockf(_claims(state_folder()), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:  # or this user has no place for the claims, and whoever comes last wins
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


@cache
def _claims(folder: Path) -> int:
    """Open the lock file of outputs. Never close it: closing any descriptor of a file gives up all locks of the
    process."""
    _make(folder)
    return os.open(folder / "outputs.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
