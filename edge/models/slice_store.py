"""Slices on disk, each under the SHA-256 of its bytes: what was sent or cut once is not sent or cut again.

    <digest>.slice            a whole slice, verified and read-only
    <digest>.<size>.partial   what has come of one; the next attempt continues it
    .lock                     held for moments, by whoever adds, removes or begins to use one

Locks on the files themselves tell what is in use, across threads and processes, and end with the process that holds
them. Access times say what was used last, and so outlive a restart. Modification times stay: who pages weights takes a
file whose time changes for another one.
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
    """A slice or a partial one in the folder."""

    path: Path
    digest: str
    announced: int | None  # bytes it will have; None for a whole slice
    n_bytes: int  # bytes it has
    used_ns: int


class SliceStore:
    """A folder of slices that holds at most `max_bytes`, partial ones included. Made where it is missing.

    Any number of threads and processes may use one folder. SliceError if the folder cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int, remedy: str = "start with a larger --cache-size") -> None:
        """remedy: what to do where `max_bytes` is too little."""
        self.folder = folder
        self.max_bytes = max_bytes
        self._remedy = remedy
        with explained(folder):
            make_private(folder)
            self._last_ns = max((file.used_ns for file in self.files()), default=0)

    def find(self, digest: str) -> Path | None:
        """The whole, verified file of a slice, or None. It counts as used now, but only `use` keeps it there."""
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
        """The file of a slice, which is not evicted inside the `with`. SliceError if it is not there."""
        with ExitStack() as stack:
            with self.locked():  # so that nobody evicts it in between
                path = self.find(digest)
                if path is None:
                    raise SliceError(f"slice {digest[:12]} is not in {self.folder}; send it, or cut it again")
                with explained(self.folder):
                    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(release, handle)
                    try_lock(handle, shared=True)
            yield path
            self.find(digest)  # used until now

    def used_bytes(self) -> int:
        """Bytes of all slices and partial ones in the folder."""
        with explained(self.folder):
            return sum(file.n_bytes for file in self.files())

    def receive(self, digest: str, n_bytes: int, progress: Progress | None = None) -> Partial:
        """Begin, or continue, to write a slice: a context manager that takes the bytes from `.received` on.

        Bytes from an earlier attempt are hashed first; `progress` is called with how far that is. SliceError if the
        slice is there already or is being written by somebody else, NoRoom if it cannot fit.
        """
        partial = self._partial(digest, n_bytes)
        if not 0 < n_bytes < 10**15:
            raise SliceError(f"slice {digest[:12]} is said to have {n_bytes} bytes; needed is at least 1")
        with self.locked(), explained(self.folder), ExitStack() as undo:
            if self.find(digest):
                raise SliceError(f"slice {digest[:12]} is in {self.folder} already; use that")
            for file in self.files():
                if file.digest == digest and file.announced != n_bytes:  # whoever announced that has gone
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
        """Bytes that an earlier attempt to write this slice has left. SliceBusy if an attempt is under way."""
        with explained(self.folder):
            try:
                handle = os.open(self._partial(digest, n_bytes), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return 0
            with ExitStack() as stack:
                stack.callback(release, handle)
                if not lock(handle):
                    raise SliceBusy(f"slice {digest[:12]} is being written by somebody else")
                return min(os.fstat(handle).st_size, n_bytes)

    def put_cut(
        self, recipe: Recipe, model: str | os.PathLike[str] | BinaryIO, digest: str, progress: Progress | None = None
    ) -> Path:
        """Cut a slice into the store, unless it is there: its path. `progress` is called with the bytes that are there.

        Raises the errors of `receive` and of `edge.models.slice_cutting.chunks`, and DigestMismatch if the recipe and
        the model make another slice.
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
        """Return the path of a slice. Digests come from other machines: only 64 hexadecimal digits ever reach a
        path."""
        if not is_digest(digest):
            raise SliceError(f"{digest[:80]!r} is no name of a slice; needed are 64 lower-case hexadecimal digits")
        return self.folder / f"{digest}.slice"

    def _partial(self, digest: str, n_bytes: int) -> Path:
        return self._path(digest).with_name(f"{digest}.{n_bytes}.partial")

    def remove(self, path: Path) -> None:
        """Delete one of `files`. SliceBusy if it is in use or being written."""
        with self.locked(), explained(self.folder):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if not lock(handle):
                    raise SliceBusy(f"{path.name} is in use; end what uses it first")
                path.unlink()
            finally:
                release(handle)

    def touch(self, path: Path) -> None:
        """Mark a file as the most recently used, also if the clock was set back."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        with suppress(PermissionError):  # a folder that someone else fills
            os.utime(path, ns=(self._last_ns, path.stat().st_mtime_ns))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the store: no other process adds, removes or begins to use a slice inside the block. SliceError where
        somebody has the lock for too long."""
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
        """Evict what was not used for longest until a slice fits, both below the limit and on the disk: `n_bytes` for
        the slice `digest`, of which `n_disk` are still to be written. Called under the lock.

        Nothing is evicted that is in use or being written, which counts with all the bytes it will have; and nothing at
        all where that would not be enough: then NoRoom says need and have.
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
