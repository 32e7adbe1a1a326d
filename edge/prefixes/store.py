"""Small files on disk under names of 32 bytes, of which those that were not used for longest make room for others.

    <64 hexadecimal digits>.kv             a file, whole
    .<64 hexadecimal digits>.kv.<random>   one that is being written, or what a killed process has left of it

Modification times say what was used last, and so outlive a restart. Nothing here is a promise: whatever cannot be
written is not there, and whatever cannot be read neither.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
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

DEFAULT_BYTES = 2 << 30  # of all files
MOST_FILE_BYTES = 256 << 20  # of one: no file that somebody else puts here may fill the memory
NAME_BYTES = 32
ABANDONED_S = 3600.0  # since a file that is not whole was last written to: then nobody writes it any more

_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.kv\.\w+")
_COUNTS_PER_LIMIT = 16  # so often is the folder counted while as much is written as it may hold: others write, too
_SPARE_BYTES = 256 << 20  # that stay free on the disk, or a fiftieth of a small one: a cache must not fill it
_SPARE_OF_DISK = 50
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Errors that say nothing of the file: there is none, or this process may not open one.
_OF_THE_PROCESS = (errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)


class KeptFile(NamedTuple):
    """A file in the folder."""

    path: Path
    n_bytes: int
    used_ns: int  # last, since 1970


def default_folder() -> Path:
    """This user's folder of the prefix cache."""
    return cache_folder() / "prefixes"


class PrefixStore:
    """A folder of files that holds at most `max_bytes`. Made at the first write, readable by this user alone.

    Any number of threads and processes may use one folder. Each counts what the others write now and then: together
    they pass the limit by at most a sixteenth of it each.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.problem: str | None = None  # why something was not kept, the first time, in one line
        self._lock = threading.Lock()  # of what follows
        self._used = 0  # bytes in the folder, as far as this process knows
        self._oldest: deque[KeptFile] = deque()  # as counted last, what was not used for longest first
        self._until_count = 0  # bytes that may still be written before the folder is counted again
        self._last_ns = 0

    def write(self, name: bytes, data: bytes | bytearray) -> bool:
        """Put a file there, whole or not at all, in place of what has the name. False where it cannot be (`problem`).

        What was not used for longest is removed, until there is room below the limit and on the disk.
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
                self.problem = f"a prompt is not kept in {self.folder}: {exc.strerror or exc}"
            return False
        return True

    def read(self, name: bytes, into: memoryview, *, direct: bool = False) -> int | None:
        """Read a file, which counts as used now, into memory that begins on a page: how many bytes it has. None where
        there is none, or none that can be read and has room there. direct: past the page cache, where the system can;
        its last page must have room, too.

        What has the name and is no such file is removed; it is never followed or waited for.
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
            except OSError as exc:  # some filesystems refuse direct reads here, others when it is read
                if exc.errno in _OF_THE_PROCESS:
                    return None
        self.remove(name)  # a link, a pipe, a damaged place of the disk: as long as it is there, nothing else can be
        return None

    def is_cached(self, name: bytes) -> bool:
        """Return whether a file is in the page cache, as far as its beginning says so. True where the system does not
        tell."""
        try:
            handle = os.open(self._path(name), _FLAGS)
            try:
                return os.preadv(handle, [bytearray(1)], 0, os.RWF_NOWAIT) > 0
            finally:
                os.close(handle)
        except (OSError, AttributeError, NotImplementedError) as exc:
            return not isinstance(exc, BlockingIOError)

    def head(self, name: bytes, most: int) -> bytes | None:
        """The first bytes of a file, `most` of them at most. None where there is none, or none that can be read."""
        try:
            handle = os.open(self._path(name), _FLAGS)
            try:
                return os.pread(handle, most, 0) if stat.S_ISREG(os.fstat(handle).st_mode) else None
            finally:
                os.close(handle)
        except OSError:
            return None

    def n_bytes(self, name: bytes) -> int | None:
        """The size of a file, or None where there is none."""
        return self._size(self._path(name))

    def touch(self, name: bytes) -> bool:
        """Return whether there is a file of this name, which then counts as used now."""
        path = self._path(name)
        if self._size(path) is None:
            return False
        self._mark_used(path)
        return True

    def remove(self, name: bytes) -> None:
        """Remove what has a name, if it is there and can be removed."""
        path = self._path(name)
        size = self._size(path) or 0
        with suppress(OSError):
            path.unlink()
            with self._lock:
                self._used -= size

    def files(self) -> list[KeptFile]:
        """All that are whole, what was not used for longest first. PrefixError where the folder cannot be read."""
        return self._listed()[0]

    def used_bytes(self) -> int:
        """Bytes in the folder, with files that are being written. PrefixError where it cannot be read."""
        files, temporary = self._listed()
        return sum(file.n_bytes for file in (*files, *temporary))

    def clear(self) -> int:
        """Remove all files and what killed processes have left: bytes that were freed. PrefixError where one stays."""
        files, temporary = self._listed()
        freed = 0
        for file in (*files, *filter(_is_abandoned, temporary)):
            try:
                file.path.unlink()
            except FileNotFoundError:
                continue
            except OSError as exc:
                raise PrefixError(
                    f"{file.path} cannot be removed: {exc.strerror}; see who owns the folder, and remove it"
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
        """Evict files until there is room, and write. OSError where there is none."""
        with self._lock:
            self._make_room(len(data))
            self._used += len(data)  # from now on, for other threads
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
        """Remove until so many more bytes fit, under the lock. OSError (ENOSPC) with need and have where they cannot.

        Files that were counted are taken in order while there are any, so that thousands are not looked at for each.
        refused: bytes that the disk did not take, though it shows room: for a quota, or for the number of files.
        """
        for must_count in (self._until_count <= 0, True):
            if must_count:
                self._count()
            disk = shutil.disk_usage(self.folder)
            spare = min(_SPARE_BYTES, disk.total // _SPARE_OF_DISK)
            short = n_bytes + spare - disk.free
            excess = max(self._used + n_bytes - self.max_bytes, short, refused)
            if excess <= self._used:  # else the disk is full of other things: what is here stays
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
        """The bytes that are gone with the file of those counted that was not used for longest."""
        file = self._oldest.popleft()
        try:
            if file.path.lstat().st_mtime_ns != file.used_ns:
                return 0  # used, or written anew, since
            file.path.unlink()
        except FileNotFoundError:  # another process has removed it
            pass
        self._used -= file.n_bytes
        return file.n_bytes

    def _count(self) -> None:
        """List the files of the folder, and remove those that killed processes left unfinished."""
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
                f"{self.folder} cannot be read: {exc.strerror}; see who owns it, and remove it if it is no folder"
            ) from exc

    def _scan(self) -> tuple[list[KeptFile], list[KeptFile]]:
        """Whole files, what was not used for longest first, and those that are not whole."""
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
        """Say that a file was used just now: after all that were counted, also where the clock was set back.
        before_ns: what it says already, where that is known."""
        with suppress(OSError):  # gone, or on a disk that is only read
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
    """Read so many bytes, or as many as there are: how many. OSError."""
    done = 0
    while done < n_bytes:
        got = os.preadv(handle, [into[done:]], done)
        if not got:
            break
        done += got
    return min(done, n_bytes)


def _is_abandoned(file: KeptFile) -> bool:
    return abs(time.time() - file.used_ns / 1e9) > ABANDONED_S
