"""Slices on disk, each named by the SHA-256 of its bytes. A slice that was sent or cut once is not sent or cut again.

    <digest>.slice            a complete slice, verified and read-only
    <digest>.<size>.partial   the received part of a slice, which the next attempt continues
    .lock                     locked briefly while a slice is added, removed or opened

Locks on the files show which slices are in use by threads and processes. A lock ends with its process. Access times
record the last use and survive a restart. Modification times do not change, because weight paging treats a file with
another modification time as another file.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from devices.files import make_private, try_lock, wait_for_lock
from edge.errors import NoRoom, SliceBusy, SliceError
from edge.models.partial_slices import Partial
from edge.models.slice_cutting import Progress, chunks
from edge.models.slice_files import explained, lock, open_alone, release, size
from partition.fields import is_digest
from partition.slices.recipe import Recipe

_NAME = re.compile(r"(?P<digest>[0-9a-f]{64})\.(slice|(?P<n_bytes>[0-9]{1,15})\.partial)")


class SliceFile(NamedTuple):
    """A complete or partial slice in the folder."""

    path: Path
    digest: str
    announced: int | None  # final size in bytes; None for a complete slice
    n_bytes: int  # present size in bytes
    used_ns: int


class SliceStore:
    """A folder with at most `max_bytes` of slices, including partial ones. It is created if it is missing.

    Several threads and processes may use one folder. Raises SliceError if the folder cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int, remedy: str = "start with a larger --cache-size") -> None:
        """remedy: advice in errors if `max_bytes` is too small"""
        self.folder = folder
        self.max_bytes = max_bytes
        self._remedy = remedy
        with explained(folder):
            make_private(folder)
            self._last_ns = max((file.used_ns for file in self.files()), default=0)

    def find(self, digest: str) -> Path | None:
        """Return the complete, verified file of a slice, or None. This counts as a use, but only `use` prevents
        eviction."""
        path = self._path(digest)
        with explained(self.folder):
            try:
                if not stat.S_ISREG(path.lstat().st_mode):
                    return None
                self.touch(path)
            except FileNotFoundError:
                return None
        return path

    @contextmanager
    def use(self, digest: str) -> Iterator[Path]:
        """Yield the file of a slice, which is not evicted inside the block. Raises SliceError if it is missing."""
        with ExitStack() as stack:
            with self.locked():  # prevents an eviction between `find` and the lock
                path = self.find(digest)
                if path is None:
                    raise SliceError(f"slice {digest[:12]} is not in {self.folder}; send it, or cut it again")
                with explained(self.folder):
                    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(release, handle)
                    try_lock(handle, shared=True)
            yield path
            self.find(digest)  # marks the end of the use

    def used_bytes(self) -> int:
        """Return the bytes of all slices and partial slices in the folder."""
        with explained(self.folder):
            return sum(file.n_bytes for file in self.files())

    def receive(self, digest: str, n_bytes: int, progress: Progress | None = None) -> Partial:
        """Begin or continue to write a slice. Return a context manager that takes the bytes from `.received` on.

        Bytes of an earlier attempt are hashed first, and `progress` reports this. Raises SliceError if the slice is
        complete or is being written by another writer, and NoRoom if it cannot fit.
        """
        partial = self._partial(digest, n_bytes)
        if not 0 < n_bytes < 10**15:
            raise SliceError(f"slice {digest[:12]} is said to have {n_bytes} bytes; expected at least 1")
        with self.locked(), explained(self.folder), ExitStack() as undo:
            if self.find(digest):
                raise SliceError(f"slice {digest[:12]} is in {self.folder} already; use that")
            for file in self.files():
                if file.digest == digest and file.announced != n_bytes:  # the earlier sender has gone
                    release(open_alone(file.path, digest))
                    file.path.unlink()
            handle = open_alone(partial, digest)
            undo.callback(release, handle)
            received = os.fstat(handle).st_size
            if received > n_bytes:
                received = 0
                os.ftruncate(handle, 0)
            if not received:
                undo.callback(partial.unlink)
            self._make_room(digest, n_bytes, n_bytes - received)
            undo.pop_all()
        try:
            return Partial(self, digest, n_bytes, partial, handle, progress)
        except BaseException:
            release(handle)
            raise

    def received_bytes(self, digest: str, n_bytes: int) -> int:
        """Return the bytes of this slice from an earlier attempt. Raises SliceBusy if an attempt is running."""
        with explained(self.folder):
            try:
                handle = os.open(self._partial(digest, n_bytes), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return 0
            with ExitStack() as stack:
                stack.callback(release, handle)
                if not lock(handle):
                    raise SliceBusy(f"slice {digest[:12]} is being written by another process")
                return min(os.fstat(handle).st_size, n_bytes)

    def put_cut(
        self, recipe: Recipe, model: str | os.PathLike[str] | BinaryIO, digest: str, progress: Progress | None = None
    ) -> Path:
        """Cut a slice into the store, unless it exists. Return its path. `progress` gets the present bytes and the
        total.

        Raises the errors of `receive` and `edge.models.slice_cutting.chunks`. Raises DigestMismatch if recipe and model
        make another slice.
        """
        path = self.find(digest)
        if path:
            return path
        with self.receive(digest, recipe.n_bytes, progress) as partial:
            for chunk in chunks(recipe, model, partial.received):
                partial.write(chunk)
                if progress:
                    progress(partial.received, recipe.n_bytes)
            return partial.commit()

    def _path(self, digest: str) -> Path:
        """Return the path of a slice. Digests come from other machines, so only 64 hexadecimal digits may form a
        path."""
        if not is_digest(digest):
            raise SliceError(f"{digest[:80]!r} is not the name of a slice; expected 64 lower-case hexadecimal digits")
        return self.folder / f"{digest}.slice"

    def _partial(self, digest: str, n_bytes: int) -> Path:
        return self._path(digest).with_name(f"{digest}.{n_bytes}.partial")

    def remove(self, path: Path) -> None:
        """Delete one of `files`. Raises SliceBusy if it is in use or being written."""
        with self.locked(), explained(self.folder):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if not lock(handle):
                    raise SliceBusy(f"{path.name} is in use; first end the program that uses it")
                path.unlink()
            finally:
                release(handle)

    def touch(self, path: Path) -> None:
        """Mark a file as the most recently used, even if the clock was set back."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        with suppress(PermissionError):  # the folder belongs to another user
            os.utime(path, ns=(self._last_ns, path.stat().st_mtime_ns))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the store, so that no other process adds, removes or opens a slice inside the block.

        Raises SliceError if another process holds the lock for too long.
        """
        with explained(self.folder):
            handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with explained(self.folder):
                wait_for_lock(handle, self.folder)
            yield
        finally:
            release(handle)

    def files(self) -> list[SliceFile]:
        """Return the files in the folder, least recently used first."""
        files = []
        with os.scandir(self.folder) as listing:
            entries = [(entry, match) for entry in listing if (match := _NAME.fullmatch(entry.name))]
        for entry, match in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # just renamed or evicted
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            announced = int(match["n_bytes"]) if match["n_bytes"] else None
            used_ns = max(status.st_atime_ns, status.st_mtime_ns)
            files.append(SliceFile(Path(entry.path), match["digest"], announced, status.st_size, used_ns))
        return sorted(files, key=lambda file: (file.used_ns, file.path))

    def _make_room(self, digest: str, n_bytes: int, n_disk: int) -> None:
        """Evict the least recently used slices until a slice fits below the limit and on the disk. Called under the
        lock.

        digest: digest of the new slice
        n_bytes: its size
        n_disk: its bytes that are not written yet

        Slices in use and slices being written are not evicted. The latter count with their final size. If eviction
        cannot make enough room, nothing is evicted and NoRoom is raised with need and have.
        """
        folder, limit = self.folder, size(self.max_bytes)
        if n_bytes > self.max_bytes:
            raise NoRoom(
                f"{size(n_bytes)} needed for a slice, the cache {folder} holds at most {limit}; {self._remedy}"
            )
        free = shutil.disk_usage(folder).free
        used = 0
        idle: list[SliceFile] = []
        with ExitStack() as locks:
            for file in self.files():
                if file.digest == digest:
                    continue
                handle = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                locks.callback(release, handle)
                used += file.n_bytes
                if lock(handle):
                    idle.append(file)
                elif file.announced:
                    used += file.announced - file.n_bytes
                    free -= file.announced - file.n_bytes
            over, short = used + n_bytes - self.max_bytes, n_disk - free
            evicted = []
            for file in idle:
                if over <= 0 and short <= 0:
                    break
                evicted.append(file)
                over -= file.n_bytes
                short -= file.n_bytes
            if over > 0:
                raise NoRoom(
                    f"{size(n_bytes)} needed for a slice in the cache {folder}, which holds at most {limit};"
                    f" {size(self.max_bytes - n_bytes + over)} are in use; {self._remedy}"
                )
            if short > 0:
                raise NoRoom(
                    f"{size(n_disk)} needed for a slice on the disk of {folder}, {size(n_disk - short)} free even"
                    " without what can be evicted; free some, or choose another folder"
                )
            for file in evicted:
                file.path.unlink()
