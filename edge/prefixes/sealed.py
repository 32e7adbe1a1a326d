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
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from edge.prefixes.keys import derived
from edge.prefixes.reading import Block, read_ahead
from edge.prefixes.store import PrefixStore

QUEUE_BYTES = 64 << 20  # of data that may wait to be written
AHEAD_BYTES = 8 << 20  # of files that may be in memory while they are read
KEEP_WAIT_S = 1.0  # for room in the queue; then a block is dropped: what is kept is an advantage, never a duty
_MAGIC = b"edge.kv\x01"
_NONCE_BYTES, _TAG_BYTES = 12, 16


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

    def take(self, links: Sequence[bytes]) -> Generator[memoryview]:
        """The data of the first links, in order, each valid until the next one is asked for: the memory is used again,
        as fresh memory takes longer than the cipher. A thread reads ahead, and ends with the iterator.

        It ends before the first that is missing, or not what was kept: such a file is removed. That may be sooner than
        `count` has said.
        """
        opened = memoryview(bytearray())
        with closing(read_ahead(self.store, self._there(links), self._ahead_limit)) as files:
            for block, content in files:
                if len(opened) < len(content):
                    opened = memoryview(bytearray(len(content)))
                data = content if block.data is not None else self.unseal(block.name, content, opened)
                if data is None:
                    self.store.remove(block.name)
                    return
                with self._changed:
                    self.taken_bytes += len(data)
                yield data

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

    def unseal(self, name: bytes, content: memoryview, into: memoryview) -> memoryview | None:
        """The data in a file, in memory with room for `content`; None where it is not what was kept under this name
        with this key."""
        start = len(_MAGIC) + _NONCE_BYTES
        n_bytes = len(content) - start - _TAG_BYTES
        if n_bytes < 0 or content[: len(_MAGIC)] != _MAGIC:
            return None
        try:
            self._cipher.decrypt_into(content[len(_MAGIC) : start], content[start:], _MAGIC + name, into[:n_bytes])
        except (InvalidTag, ValueError):
            return None
        return into[:n_bytes]

    def _there(self, links: Sequence[bytes]) -> Iterator[Block]:
        """The leading blocks that are there. What comes after one that is not is of no use."""
        for link in links:
            name = self._name(link)
            with self._changed:
                data = self._queue.get(link)
            n_bytes = self.store.n_bytes(name) if data is None else len(data)
            if n_bytes is None:
                return
            yield Block(name, n_bytes, data)

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
