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

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a disk that has no room
DIRECT = getattr(os, "O_DIRECT", 0)  # flag of reads past the page cache; 0 where the system has none
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of file systems without locks
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
    make_private(path.parent)
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
    make_private(folder)
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        wait_for_lock(handle, folder)
        yield
    finally:
        os.close(handle)


def wait_for_lock(handle: int, folder: Path) -> None:
    """Lock an open file of a folder for oneself alone. TimeoutError where somebody has it for LOCK_S."""
    deadline = time.monotonic() + LOCK_S
    while not try_lock(handle):
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"another process holds the lock of {folder} for {LOCK_S:g} s by now, and may be stopped;"
                f" `fuser {folder}/.lock` names it: end it, or let it go on"
            )
        time.sleep(_LOOK_S)


def try_lock(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file, for oneself alone or `shared`; return False if somebody else has it. A file system without
    locks counts as locked: no harm comes of that unless two processes write at the same time."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def claim(path: Path) -> bool:
    """Claim a file to write, for as long as this process lives; False if another process of this user has it.

    Claims are ranges of one file that the system locks, one byte for each name: nothing is left beside the output.
    """
    place = int.from_bytes(hashlib.sha256(os.fsencode(path.resolve())).digest()[:7], "big")
    try:
        claims = _claims(state_folder())
    except OSError as error:  # this user has no place for the claims, and the last writer wins
        note_unkept(state_folder(), error)
        return True
    try:
        fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:  # or the file system has no locks
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


@cache
def _claims(folder: Path) -> int:
    """Open the lock file of outputs. Never close it: closing any descriptor of a file gives up all locks of the
    process."""
    make_private(folder)
    return os.open(folder / "outputs.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def make_private(folder: Path) -> None:
    """Make a folder that only this user may use, and the folders above it that are missing. OSError."""
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # it is there; or the disk cannot be written, which hides that it is there
        if not folder.is_dir():
            raise


def usable(folder: Path) -> Path:
    """Return this folder of files that can be computed again, made if it is missing; if it cannot be written, a folder
    that is removed at the end of this process."""
    return folder if is_usable(folder) else _passing() / folder.name


def is_usable(folder: Path) -> bool:
    """Return whether this user can write to a folder, which is made if it is missing. People are told if not."""
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
    """Remove a folder if this is the process that made it, and no fork of it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def note_unkept(path: Path, error: OSError) -> None:
    """Tell people, once in a process, that this user's files cannot be written, and that all else works."""
    why = str(error.strerror or error)
    note_once("unkept", f"{path} cannot be used ({why}): nothing is kept there, and what is measured is measured again")
