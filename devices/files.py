"""Files that are whole or not there, room for them, and a lock between processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write `content` so that only this user may read it. OSError on failure.

    A reader sees the old file or the new one, never half of one.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
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


def check_room(path: Path, need: int) -> None:
    """Nothing, or OSError when the disk of `path` has not `need` bytes free."""
    free = shutil.disk_usage(path.absolute().parent).free
    if free < need:
        raise OSError(
            f"no room for {path}: {need / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free on that disk; free some"
            " room or name a file on another disk"
        )


@contextmanager
def temporary_beside(path: Path, suffix: str = ".part") -> Iterator[Path]:
    """The name of an empty file beside `path`; it is removed at the end of the block, if it is still there.

    Other programs write to it, and it is renamed when it is whole. Its mode is that of any new file.
    """
    temporary = path.absolute().with_name(f".{path.name}.{os.urandom(4).hex()}{suffix}")
    temporary.open("xb").close()
    try:
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: one process, and one thread of it, at a time. Others wait.

    The system frees the lock when its holder ends, however it ends.
    """
    _make(folder)
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
