"""Atomic file writes, checks of free space, and locks between processes."""

from __future__ import annotations

import atexit
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
from devices.streams import note_once

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a disk without room
DIRECT = getattr(os, "O_DIRECT", 0)  # flag for reads that bypass the page cache; 0 if the system has none
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of file systems without locks
LOCK_S = 60.0  # longest wait for a lock, which its holder normally keeps for moments
_LOOK_S = 0.02  # time between two attempts to lock

# Files and folders that only this process removes. They are texts, because adding and removing a text is atomic, while
# comparing paths runs Python code that lets other threads in.
_temporary: set[str] = set()


def write_whole(path: Path, content: bytes | bytearray | memoryview, *, sync: bool = True) -> None:
    """Write a file that only this user may read. A reader sees the old file or the new one, never half of one.

    sync: make the file survive a loss of power.

    Raises OSError with the name of this file.
    """
    try:
        _write_whole(path, content, sync)
    except OSError as error:  # it names the temporary file, or no file
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
    """Write a file with `write_whole`, create its folder if it is missing, and make both survive a loss of power."""
    make_private(path.parent)
    write_whole(path, content)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # stores the new name, not only the content
    finally:
        os.close(folder)


@contextmanager
def removed_at_end(path: Path) -> Iterator[None]:
    """Register a file or folder for `remove_temporary` during the block, for a process that may end suddenly."""
    _temporary.add(str(path))
    try:
        yield
    finally:
        _temporary.remove(str(path))


def remove_temporary() -> None:
    """Remove registered files and folders, before this process ends suddenly."""
    for path in map(Path, tuple(_temporary)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


@contextmanager
def temporary_beside(path: Path, suffix: str = ".part") -> Iterator[Path]:
    """Create an empty file next to `path`, yield its path, and remove it after the block if it is still there.

    Other programs write to it, and it is renamed when it is complete. Its mode is that of any new file. An OSError of
    the temporary file, or one of a full disk without a name, gets the name of `path`.
    """
    temporary = path.absolute().with_name(f".{path.name}.{os.urandom(4).hex()}{suffix}")
    with removed_at_end(temporary):
        try:
            temporary.open("xb").close()
            yield temporary
        except OSError as error:
            if str(error.filename) == str(temporary) or (error.filename is None and error.errno in FULL):
                error.filename = str(path)
            raise
        finally:
            with suppress(OSError):
                temporary.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock during the block: one thread of one process at a time. Others wait, as in `wait_for_lock`.

    The system frees the lock when its holder ends for any reason.
    """
    make_private(folder)
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        wait_for_lock(handle, folder)
        yield
    finally:
        os.close(handle)


def wait_for_lock(handle: int, folder: Path) -> None:
    """Lock an open file of a folder exclusively. Raises TimeoutError if another process keeps the lock for LOCK_S."""
    deadline = time.monotonic() + LOCK_S
    while not try_lock(handle):
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"another process has held the lock of {folder} for {LOCK_S:g} s, and may be stopped;"
                f" `fuser {folder}/.lock` names it: end it, or let it continue"
            )
        time.sleep(_LOOK_S)


def try_lock(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file exclusively or `shared`; return False if another process holds the lock.

    On a file system without locks this returns True. That is harmless unless two processes write at the same time.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def claim(path: Path) -> bool:
    """Claim a file for writing until this process ends; return False if another process of this user has it.

    Claims are locked ranges of one file, one byte for each name, so nothing is left next to the output.
    """
    place = int.from_bytes(hashlib.sha256(os.fsencode(path.resolve())).digest()[:7], "big")
    try:
        claims = _claims(state_folder())
    except OSError as error:  # this user cannot store claims, so the last writer wins
        note_unkept(state_folder(), error)
        return True
    try:
        fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:  # another process has it, or the file system has no locks
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


@cache
def _claims(folder: Path) -> int:
    """Open the lock file of outputs. Never close it: closing any descriptor of a file frees all of its locks."""
    make_private(folder)
    return os.open(folder / "outputs.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def make_private(folder: Path) -> None:
    """Create a folder that only this user may use, and missing folders above it. Raises OSError."""
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # the folder exists; or the disk is read-only, which is reported even if the folder exists
        if not folder.is_dir():
            raise


def usable(folder: Path) -> Path:
    """Return this folder for files that can be computed again, and create it if it is missing.

    If it cannot be written, return a temporary folder that is removed when this process ends.
    """
    return folder if is_usable(folder) else _passing() / folder.name


def is_usable(folder: Path) -> bool:
    """Return whether this user can write to a folder, which is created if it is missing. Print a line if not."""
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"!")
    except OSError as error:
        note_unkept(folder, error)
        return False
    return True


@cache
def _passing() -> Path:
    folder = tempfile.mkdtemp(prefix="edge-")
    _temporary.add(folder)
    atexit.register(_remove_of, os.getpid(), folder)
    return Path(folder)


def _remove_of(process: int, folder: str) -> None:
    """Remove a folder if this is the process that created it, and not a fork of it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def note_unkept(path: Path, error: OSError) -> None:
    """Print, once in a process, that this user's files cannot be written, and that the rest works."""
    why = str(error.strerror or error)
    note_once("unkept", f"{path} cannot be used ({why}): nothing is stored there, and measurements are repeated")
