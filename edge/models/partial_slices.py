"""A slice that is being written: hashed while it arrives, then verified and renamed when it is complete."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from edge.closing import Closing
from edge.errors import DigestMismatch, SliceError
from edge.models.slice_cutting import CHUNK_BYTES, Progress
from edge.models.slice_files import explained, release, size, sync

_QUEUED = 8  # chunks that may wait for hashing while others are written
_SYNC_BYTES = 32 << 20  # bytes after which data is flushed to the disk meanwhile, which shortens the final flush


class PartialStore(Protocol):
    """Interface of the slice store that contains a partial slice."""

    folder: Path

    def locked(self) -> AbstractContextManager[Any]:
        """Lock the folder, so that no other process changes it until the end of the block."""

    def touch(self, path: Path) -> None:
        """Record that a file was just used."""


class Partial(Closing):
    """A slice that one writer at a time writes; made by `SliceStore.receive`.

    Threads hash chunks and flush them to the disk while the next bytes arrive. If the `with` block ends without
    `commit`, the received bytes stay for a later attempt.
    """

    def __init__(
        self, store: PartialStore, digest: str, n_bytes: int, path: Path, handle: int, progress: Progress | None
    ) -> None:
        self.digest = digest
        self.n_bytes = n_bytes
        self.received = 0  # number of received bytes, and position of the next one
        self._store = store
        self._path = path
        self._handle = handle
        self._sha = hashlib.sha256()
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._sync: queue.Queue[bool] = queue.Queue(1)  # True: the bytes written so far may be flushed
        self._synced = 0  # value of `received` at the last flush request
        self._lost: OSError | None = None  # error of a flush, after which data may be lost
        self._threads: list[threading.Thread] = []
        self._open = True
        with explained(store.folder):
            while chunk := os.read(handle, CHUNK_BYTES):
                self._sha.update(chunk)
                self.received += len(chunk)
                if progress:
                    progress(self.received, n_bytes)

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Append bytes. Raises SliceError if there are too many, and NoRoom if the disk is full; written bytes stay."""
        self._check_open()
        chunk = bytes(chunk)  # bytes are not copied; other buffers might change before they are hashed
        if len(chunk) > self.n_bytes - self.received:
            raise SliceError(
                f"slice {self.digest[:12]} was announced with {self.n_bytes} bytes, but {self.received + len(chunk)}"
                " were received"
            )
        rest = memoryview(chunk)
        if not self._threads:
            self._threads = [threading.Thread(target=work, daemon=True) for work in (self._hash, self._put_on_disk)]
            for thread in self._threads:
                thread.start()
        try:
            self._queue.put(chunk)
            with explained(self._store.folder, f"{size(self.n_bytes - self.received)} needed for the rest of a slice"):
                while rest:
                    rest = rest[os.write(self._handle, rest) :]
        except BaseException:
            self.close()  # the hash contains bytes that the file lacks
            raise
        self.received += len(chunk)
        if self.received - self._synced >= _SYNC_BYTES:
            with suppress(queue.Full):  # a flush is already waiting; the next chunk requests another
                self._sync.put_nowait(True)
                self._synced = self.received

    def commit(self) -> Path:
        """Verify the slice, flush it to the disk and rename it. Return its path.

        Raises SliceError if bytes are missing; the received bytes stay. Raises DigestMismatch after deleting a slice
        with another digest.
        """
        self._check_open()
        if self.received != self.n_bytes:
            raise SliceError(
                f"slice {self.digest[:12]} misses bytes: {self.n_bytes} bytes needed, {self.received} received; send"
                " the"
                " rest"
            )
        self._join()
        have = self._sha.hexdigest()
        if have != self.digest:
            self.received = 0  # closing then deletes the file
            self.close()
            raise DigestMismatch(
                f"a slice differs from the announced one: SHA-256 {self.digest} needed, {have} received; it was"
                " deleted."
                " Send it again, and check that both sides have the same model file"
            )
        folder = self._store.folder
        final = folder / f"{self.digest}.slice"
        try:
            with explained(folder):
                os.fsync(self._handle)
                if self._lost is not None:
                    raise self._lost
                with self._store.locked():
                    self._path.replace(final)
                    os.fchmod(self._handle, 0o444)
                    self._store.touch(final)
                    self.close()  # releases the lock, so that other processes can use the file immediately
                sync(folder)
        finally:
            self.close()
        return final

    def _check_open(self) -> None:
        if not self._open:
            raise SliceError(f"slice {self.digest[:12]} is not open for writing any more; begin again with receive")

    def close(self) -> None:
        """Stop writing. The received bytes stay for the next attempt."""
        if self._open:
            self._open = False
            self._join()
            with suppress(OSError, SliceError):
                if self.received:
                    self._store.touch(self._path)
                else:
                    with self._store.locked():
                        self._path.unlink()
            release(self._handle)

    def _join(self) -> None:
        if self._threads:
            self._queue.put(None)
            self._sync.put(False)
            for thread in self._threads:
                thread.join()
            self._threads = []

    def _hash(self) -> None:
        while (chunk := self._queue.get()) is not None:
            self._sha.update(chunk)

    def _put_on_disk(self) -> None:
        while self._sync.get():
            try:
                os.fsync(self._handle)
            except OSError as error:  # the system reports an error once, so `commit` would not see it
                self._lost = error
