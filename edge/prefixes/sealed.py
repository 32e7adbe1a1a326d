"""Blocks that a rank keeps, encrypted: written behind its back, and read ahead of it.

A file holds

    8 bytes    what this is, and its version
    12 bytes   nonce, random
    the rest   the data in AES-256-GCM, and its tag; the first 8 bytes and the file's name are authenticated with it

So whatever is not just what was kept under this name with this key is not there: bytes cannot be changed, cut off or
put under another name.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from edge.prefixes.keys import derived
from edge.prefixes.store import PrefixStore

QUEUE_BYTES = 64 << 20  # of data that may wait to be written
AHEAD_BYTES = 8 << 20  # of data that may be read before it is asked for: little, so that the same memory is used again
RUN_BYTES = 4 << 20  # of blocks that are handed over together: each time takes as long as to read a small one
KEEP_WAIT_S = 1.0  # for room in the queue; then a block is dropped: what is kept is an advantage, never a duty
READ_TIMEOUT_S = 30.0  # for blocks that are handed over together; then they are not there
_MAGIC = b"edge.kv\x01"
_NONCE_BYTES = 12


@dataclass(slots=True)
class _Run:
    """Blocks that are read and handed over together."""

    links: list[tuple[bytes, bytes]] = field(default_factory=list)  # and the names of their files
    n_bytes: int = 0  # some more where they are files already


class SealedBlocks:
    """Blocks of data by their links, in a store that may hold those of other keys as well.

    Blocks are dropped, or found missing, where anything is wrong; nothing here raises for a disk.
    """

    def __init__(self, store: PrefixStore, key: bytes, buffer_bytes: tuple[int, int] | None = None) -> None:
        """key: of whoever may read the blocks, 32 bytes; it is kept in memory only. buffer_bytes: of data that may wait
        to be written, and be read ahead; None: QUEUE_BYTES and AHEAD_BYTES."""
        self._queue_limit, self._ahead_limit = buffer_bytes or (QUEUE_BYTES, AHEAD_BYTES)
        self.kept_blocks = 0  # written by this object
        self.kept_bytes = 0  # of data in them
        self.dropped_blocks = 0  # not written: the disk is too slow, full, or cannot be written to
        self.taken_bytes = 0  # of data that was read, or was still to be written
        self.store = store
        self._key = key
        self._cipher = AESGCM(derived(key, b"seal"))
        self._changed = threading.Condition()  # of what follows, and of the figures
        self._queue: dict[bytes, bytes] = {}  # data by link, in order; the first is being written
        self._queued_bytes = 0
        self._writer: threading.Thread | None = None
        self._closed = False

    @property
    def problem(self) -> str | None:
        """Why something was not kept, the first time, in one line for people; None where nothing was amiss."""
        return self.store.problem

    def keep(self, link: bytes, data: bytes) -> None:
        """Have a thread write a block. One that is there counts as used now.

        Where the disk is behind, this waits for at most KEEP_WAIT_S, and then drops the block.
        """
        with self._changed:
            if self._closed or link in self._queue:
                return
        if self.store.touch(self._name(link)):
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._fits(len(data)), KEEP_WAIT_S) or self._closed:
                self.dropped_blocks += 1
                return
            if link in self._queue:
                return
            self._queue[link] = data
            self._queued_bytes += len(data)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="keeping prompts", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def count(self, links: Sequence[bytes]) -> int:
        """How many of the first links have a block that is there, or is to be written."""
        for n, link in enumerate(links):
            if self._size(link, self._name(link)) is None:
                return n
        return len(links)

    def take(self, links: Sequence[bytes]) -> Generator[bytes]:
        """The data of the first links, in order, read ahead by a thread that ends with the iterator.

        It ends before the first that is missing, or not what was kept: such a file is removed. That may be sooner than
        `count` has said.
        """
        runs = self._runs(links)
        following = next(runs, None)
        reading: deque[tuple[Future[list[bytes]], _Run]] = deque()
        pool = ThreadPoolExecutor(1, "kept prompts")
        ahead = 0  # bytes that are being read
        try:
            while True:
                while following is not None and (not reading or ahead + following.n_bytes <= self._ahead_limit):
                    reading.append((pool.submit(self._read_run, following), following))
                    ahead += following.n_bytes
                    following = next(runs, None)
                if not reading or not wait([reading[0][0]], READ_TIMEOUT_S).done:
                    return
                future, run = reading.popleft()
                ahead -= run.n_bytes
                for data in future.result():
                    with self._changed:
                        self.taken_bytes += len(data)
                    yield data
                if len(future.result()) < len(run.links):
                    return
        finally:
            futures = [future for future, _ in reading]
            for future in futures:
                future.cancel()
            pool.shutdown(wait=not wait(futures, READ_TIMEOUT_S).not_done)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is to be written any more; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait as `flush`, drop the rest, and end the thread. Blocks can still be taken."""
        is_written = self.flush(timeout_s)
        with self._changed:
            self._closed = True
            for link in list(self._queue)[1:]:  # the first is being written
                self._queued_bytes -= len(self._queue.pop(link))
                self.dropped_blocks += 1
            self._changed.notify_all()
        if self._writer is not None and is_written:
            self._writer.join(timeout_s)
        return is_written

    def seal(self, name: bytes, data: bytes) -> bytes:
        """The content of the file of this name."""
        nonce = os.urandom(_NONCE_BYTES)
        return b"".join((_MAGIC, nonce, self._cipher.encrypt(nonce, data, _MAGIC + name)))

    def unseal(self, name: bytes, content: bytes) -> bytes | None:
        """The data in a file; None where it is not what was kept under this name with this key."""
        start = len(_MAGIC) + _NONCE_BYTES
        if len(content) < start or not content.startswith(_MAGIC):
            return None
        try:
            return self._cipher.decrypt(content[len(_MAGIC) : start], memoryview(content)[start:], _MAGIC + name)
        except (InvalidTag, ValueError):
            return None

    def _runs(self, links: Sequence[bytes]) -> Iterator[_Run]:
        """The leading blocks that are there, as many together as are handed over. The disk is told of each."""
        most = min(RUN_BYTES, self._ahead_limit // 2)
        run = _Run()
        for link in links:
            name = self._name(link)
            size = self._size(link, name)
            if size is None:  # what comes after it is of no use
                break
            if run.links and run.n_bytes + size > most:
                yield run
                run = _Run()
            self.store.expect(name)
            run.links.append((link, name))
            run.n_bytes += size
        if run.links:
            yield run

    def _name(self, link: bytes) -> bytes:
        return derived(self._key, b"name", link)

    def _fits(self, n_bytes: int) -> bool:
        return not self._queue or self._queued_bytes + n_bytes <= self._queue_limit

    def _size(self, link: bytes, name: bytes) -> int | None:
        """Bytes of a block, some more where it is a file already; None where it is not there."""
        with self._changed:
            data = self._queue.get(link)
        return self.store.n_bytes(name) if data is None else len(data)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                if not self._queue:
                    return
                link, data = next(iter(self._queue.items()))
            is_written = False
            try:
                name = self._name(link)
                is_written = self.store.write(name, self.seal(name, data))
            except (MemoryError, OverflowError):  # larger than what can be encrypted at once
                pass
            finally:
                with self._changed:
                    del self._queue[link]
                    self._queued_bytes -= len(data)
                    self.kept_blocks += is_written
                    self.kept_bytes += is_written * len(data)
                    self.dropped_blocks += not is_written
                    self._changed.notify_all()

    def _read_run(self, run: _Run) -> list[bytes]:
        """The data of its leading blocks, up to the first that is missing."""
        found: list[bytes] = []
        for link, name in run.links:
            data = self._read(link, name)
            if data is None:
                break
            found.append(data)
        return found

    def _read(self, link: bytes, name: bytes) -> bytes | None:
        with self._changed:
            data = self._queue.get(link)
        if data is not None:
            return data
        content = self.store.read(name)
        if content is None:
            return None
        data = self.unseal(name, content)
        if data is None:
            self.store.remove(name)
        return data
