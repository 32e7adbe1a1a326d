"""Small files on disk with names of 32 bytes. The least recently used files are evicted to make room.

    <64 hexadecimal digits>.kv             a complete file
    .<64 hexadecimal digits>.kv.<random>   a file that is being written, or was left by a killed process

Modification times record the last use and survive a restart. The store gives no guarantee: a file that cannot be
written or read counts as missing.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from devices.files import DIRECT, FULL, make_private, write_whole
from devices.paths import cache_folder
from edge.errors import PrefixError
from quant.text import bytes_text

DEFAULT_BYTES = 2 << 30  # default limit of all files together
MOST_FILE_BYTES = 256 << 20  # limit of one file, so that a planted file cannot fill the memory
NAME_BYTES = 32
ABANDONED_S = 3600.0  # seconds since the last write after which an incomplete file counts as abandoned

_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.kv\.\w+")
# The folder is counted again after 1/16 of the limit was written, because other processes write, too.
_COUNTS_PER_LIMIT = 16
_SPARE_BYTES = 256 << 20  # bytes that stay free on the disk, or 1/50 of a small disk
_SPARE_OF_DISK = 50
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Errors that do not mean that the file is bad: it is missing, or this process cannot open any or this one.
_OF_THE_PROCESS = (errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)


class KeptFile(NamedTuple):
    """A file in the folder."""

    path: Path
    n_bytes: int
    used_ns: int  # time of the last use, since 1970


def default_folder() -> Path:
    """Return the user's folder of the prefix cache."""
    return cache_folder() / "prefixes"


class PrefixStore:
    """A folder with at most `max_bytes` of files. The first write creates it, readable only by this user.

    Several threads and processes may use one folder. Each counts the folder from time to time. Each process can exceed
    the limit by at most a sixteenth of it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.problem: str | None = None  # reason of the first failure to store a file, in one line
        self._lock = threading.Lock()  # guards the following fields
        self._used = 0  # bytes in the folder, as known to this process
        self._oldest: deque[KeptFile] = deque()  # files at the last count, least recently used first
        self._until_count = 0  # bytes that may be written before the next count
        self._last_ns = 0

    def write(self, name: bytes, data: bytes | bytearray) -> bool:
        """Write or replace a file atomically. Return False on failure (`problem` has the reason).

        The least recently used files are removed until the file fits below the limit and on the disk.
        """
        path = self._path(name)
        try:
            most = min(self.max_bytes, MOST_FILE_BYTES)
            if len(data) > most:
                raise OSError(
                    errno.EFBIG,
                    f"{len(data):,} bytes needed for a part of it, {most:,} allowed; allow more",
                )
            make_private(self.folder)
            self._write(path, data)
        except OSError as exc:
            if self.problem is None:
                self.problem = f"a prompt is not stored in {self.folder}: {exc.strerror or exc}"
            return False
        return True

    def read(self, name: bytes, into: memoryview, *, direct: bool = False) -> int | None:
        """Read a file into page-aligned memory. Return its size, or None if it is missing, unreadable or too large.

        into: memory for the file; with `direct` it needs room for the complete last page
        direct: bypass the page cache if the system supports it

        This counts as a use. An entry of that name that is not a regular file is removed; links are not followed.
        """
        for flags in (_FLAGS | DIRECT, _FLAGS) if direct and DIRECT else (_FLAGS,):
            try:
                handle = os.open(self._path(name), flags)
                try:
                    status = os.fstat(handle)
                    if not stat.S_ISREG(status.st_mode) or status.st_size > len(into):
                        break
                    self._mark_used(handle, status.st_mtime_ns)
                    return _fill(handle, status.st_size, into)
                finally:
                    os.close(handle)
            except OSError as exc:  # some filesystems refuse direct access when opening, others when reading
                if exc.errno in _OF_THE_PROCESS:
                    return None
        self.remove(name)  # a link, a pipe, or a damaged part of the disk would block this name
        return None

    def is_cached(self, name: bytes) -> bool:
        """Return whether the beginning of a file is in the page cache. Return True if the system cannot tell."""
        cached = True
        try:
            handle = os.open(self._path(name), _FLAGS)
            try:
                if sys.platform == "linux":
                    cached = os.preadv(handle, [bytearray(1)], 0, os.RWF_NOWAIT) > 0
            finally:
                os.close(handle)
        except (OSError, NotImplementedError) as exc:
            cached = not isinstance(exc, BlockingIOError)
        return cached

    def head(self, name: bytes, most: int) -> bytes | None:
        """Return the first `most` bytes of a file, or fewer; None if it is missing or unreadable."""
        try:
            handle = os.open(self._path(name), _FLAGS)
            try:
                return os.pread(handle, most, 0) if stat.S_ISREG(os.fstat(handle).st_mode) else None
            finally:
                os.close(handle)
        except OSError:
            return None

    def n_bytes(self, name: bytes) -> int | None:
        """Return the size of a file; None if it is missing."""
        return self._size(self._path(name))

    def touch(self, name: bytes) -> bool:
        """Record a use of a file. Return False if it is missing."""
        path = self._path(name)
        if self._size(path) is None:
            return False
        self._mark_used(path)
        return True

    def remove(self, name: bytes) -> None:
        """Remove a file if it exists and can be removed."""
        path = self._path(name)
        size = self._size(path) or 0
        with suppress(OSError):
            path.unlink()
            with self._lock:
                self._used -= size

    def files(self) -> list[KeptFile]:
        """Return the complete files, least recently used first. Raises PrefixError if the folder cannot be read."""
        return self._listed()[0]

    def used_bytes(self) -> int:
        """Return the bytes of all files, including incomplete ones. Raises PrefixError if the folder cannot be read."""
        files, temporary = self._listed()
        return sum(file.n_bytes for file in (*files, *temporary))

    def clear(self) -> int:
        """Remove all files and abandoned incomplete files. Return the freed bytes.

        Raises PrefixError if a file cannot be removed.
        """
        files, temporary = self._listed()
        freed = 0
        for file in (*files, *filter(_is_abandoned, temporary)):
            try:
                file.path.unlink()
            except FileNotFoundError:
                continue
            except OSError as exc:
                raise PrefixError(
                    f"{file.path} cannot be removed: {exc.strerror}; check the owner of the folder, and remove it"
                ) from exc
            freed += file.n_bytes
        with self._lock:
            self._until_count = 0
        return freed

    def _path(self, name: bytes) -> Path:
        if len(name) != NAME_BYTES:
            raise ValueError(f"a name has {NAME_BYTES} bytes, not {len(name)}")
        return self.folder / f"{name.hex()}.kv"

    def _write(self, path: Path, data: bytes | bytearray) -> None:
        """Evict files until there is room, and write. Raises OSError if there is no room."""
        with self._lock:
            self._make_room(len(data))
            self._used += len(data)  # visible to other threads from now on
            self._until_count -= len(data)
        gone = len(data)
        try:
            before = self._size(path) or 0
            try:
                write_whole(path, data, sync=False)
            except OSError as exc:
                if exc.errno not in FULL:
                    raise
                with self._lock:
                    self._make_room(0, len(data))
                write_whole(path, data, sync=False)
            gone = before
        finally:
            with self._lock:
                self._used -= gone
        self._mark_used(path)

    def _make_room(self, n_bytes: int, refused: int = 0) -> None:
        """Remove files until `n_bytes` more fit. Called under the lock. Raises OSError (ENOSPC) if they cannot fit.

        Counted files are removed in order, so that thousands of files are not listed for each write.

        refused: bytes that the disk refused although it reports room, because of a quota or the number of files
        """
        for must_count in (self._until_count <= 0, True):
            if must_count:
                self._count()
            disk = shutil.disk_usage(self.folder)
            spare = min(_SPARE_BYTES, disk.total // _SPARE_OF_DISK)
            short = n_bytes + spare - disk.free
            excess = max(self._used + n_bytes - self.max_bytes, short, refused)
            if excess <= self._used:  # otherwise other data fills the disk, and eviction would not help
                while excess > 0 and self._oldest:
                    excess -= self._remove_oldest()
                if excess <= 0:
                    return
        raise OSError(
            errno.ENOSPC,
            f"{bytes_text(max(n_bytes, refused) + spare)} needed on the disk, {bytes_text(disk.free)} free (a quota may"
            " leave less); free some",
        )

    def _remove_oldest(self) -> int:
        """Remove the least recently used file of the last count. Return the freed bytes."""
        file = self._oldest.popleft()
        try:
            if file.path.lstat().st_mtime_ns != file.used_ns:
                return 0  # used or rewritten since the count
            file.path.unlink()
        except FileNotFoundError:  # another process has removed it
            pass
        self._used -= file.n_bytes
        return file.n_bytes

    def _count(self) -> None:
        """List the files of the folder, and remove those that killed processes left incomplete."""
        files, temporary = self._scan()
        self._used = sum(file.n_bytes for file in files)
        for file in temporary:
            if _is_abandoned(file):
                file.path.unlink(missing_ok=True)
            else:
                self._used += file.n_bytes
        self._oldest = deque(files)
        self._until_count = self.max_bytes // _COUNTS_PER_LIMIT
        self._last_ns = max([self._last_ns, *(file.used_ns for file in files[-1:])])

    def _listed(self) -> tuple[list[KeptFile], list[KeptFile]]:
        try:
            return self._scan()
        except FileNotFoundError:
            return [], []
        except OSError as exc:
            raise PrefixError(
                f"{self.folder} cannot be read: {exc.strerror}; check its owner, and remove it if it is not a folder"
            ) from exc

    def _scan(self) -> tuple[list[KeptFile], list[KeptFile]]:
        """Return the complete files, least recently used first, and the incomplete files."""
        files: list[KeptFile] = []
        temporary: list[KeptFile] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                kind = files if _NAME.fullmatch(entry.name) else temporary if _TEMPORARY.fullmatch(entry.name) else None
                if kind is None:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # just removed or renamed
                    continue
                if stat.S_ISREG(status.st_mode):
                    kind.append(KeptFile(Path(entry.path), status.st_size, status.st_mtime_ns))
        return sorted(files, key=lambda file: (file.used_ns, file.path)), temporary

    def _mark_used(self, file: int | Path, before_ns: int | None = None) -> None:
        """Record that a file was just used: after all counted files, even if the clock was set back.

        before_ns: the file's present modification time, if known
        """
        with suppress(OSError):  # the file is missing, or the disk is read-only
            before_ns = os.stat(file).st_mtime_ns if before_ns is None else before_ns
            with self._lock:
                self._last_ns = max(time.time_ns(), self._last_ns + 1, before_ns + 1)
                used_ns = self._last_ns
            os.utime(file, ns=(used_ns, used_ns))

    @staticmethod
    def _size(path: Path) -> int | None:
        try:
            status = path.lstat()
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) and status.st_size <= MOST_FILE_BYTES else None


def _fill(handle: int, n_bytes: int, into: memoryview) -> int:
    """Read `n_bytes` bytes, or fewer if the file is shorter. Return the number read. Raises OSError on failure."""
    done = 0
    while done < n_bytes:
        got = os.preadv(handle, [into[done:]], done)
        if not got:
            break
        done += got
    return min(done, n_bytes)


def _is_abandoned(file: KeptFile) -> bool:
    return abs(time.time() - file.used_ns / 1e9) > ABANDONED_S
