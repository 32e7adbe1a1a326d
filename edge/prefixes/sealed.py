"""Encrypted blocks of a rank's KV cache, written in the background and read ahead."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import closing

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from edge.prefixes.group import HEADER_BYTES, Buffer, data_bytes, read_header, seal, unseal
from edge.prefixes.keys import derived
from edge.prefixes.reading import HistoryReader, Run, n_same, read_ahead
from edge.prefixes.store import PrefixStore

QUEUE_BYTES = 64 << 20  # limit of data that waits to be written
AHEAD_BYTES = 8 << 20  # limit of files in memory for reading ahead
KEEP_WAIT_S = 1.0  # seconds to wait for room in the queue; then blocks are dropped, which costs only computation


class SealedBlocks:
    """Blocks of data by their hashes (`block_hashes`), in a store that may also hold blocks of other keys.

    Hashes must be consecutive hashes of a history from a `group_start` on, because a file is found by its first block.
    If anything fails, blocks are dropped or count as missing. Disk errors are never raised.
    """

    def __init__(self, store: PrefixStore, key: bytes, buffer_bytes: tuple[int, int] | None = None) -> None:
        """key: 32 bytes that permit reading the blocks; it stays in memory only
        buffer_bytes: limits of data waiting to be written and of data read ahead; None: QUEUE_BYTES and AHEAD_BYTES
        """
        self._queue_limit, self._ahead_limit = buffer_bytes or (QUEUE_BYTES, AHEAD_BYTES)
        self.kept_blocks = 0  # blocks written by this object
        self.dropped_blocks = 0  # blocks not written because the disk is slow, full or not writable
        self.store = store
        self._key = key
        self._cipher = AESGCM(derived(key, b"seal"))
        self._changed = threading.Condition()  # guards the following fields and both counters
        self._queue: dict[bytes, Run] = {}  # runs by their first hash, in order; the first run is being written
        self._queued_bytes = 0
        self._writer: threading.Thread | None = None
        self._closed = False

    @property
    def is_writing(self) -> bool:
        """True while blocks are being written or waiting."""
        return bool(self._queue)

    def keep(self, hashes: Sequence[bytes], data: Buffer) -> None:
        """Queue blocks for writing to one file in a thread, unless they are queued already.

        If the queue is full, wait for at most KEEP_WAIT_S, then drop the blocks.
        """
        with self._changed:
            if self._closed or hashes[0] in self._queue:
                return
            if not self._changed.wait_for(lambda: self._closed or self._fits(len(data)), KEEP_WAIT_S) or self._closed:
                self.dropped_blocks += len(hashes)
                return
            if hashes[0] in self._queue:
                return
            self._queue[hashes[0]] = Run(hashes, data)
            self._queued_bytes += len(data)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="keeping prompts", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def count(self, hashes: Sequence[bytes], *, use: bool = False) -> int:
        """Count the leading hashes whose blocks are stored or queued. use: record that these blocks were used"""
        count = 0
        while count < len(hashes):
            run, name = self._queued(hashes[count]), self._name(hashes[count])
            head = self.store.head(name, HEADER_BYTES)
            header = read_header(head, name) if head else None
            if header:
                count += n_same(header.names, map(self._name, hashes[count:]))
                if use:
                    self.store.touch(name)
            elif run is not None:
                count += n_same(run.hashes, hashes[count:])
            else:
                break
        return count

    def take(self, hashes: Sequence[bytes]) -> Generator[tuple[memoryview, int, int]]:
        """Yield the stored data of the leading blocks, in order: (data, number of blocks, number of matching blocks).

        The data is valid until the next item, because the memory is reused; allocating fresh memory takes longer than
        decryption. A thread reads ahead and ends with the iterator. The iteration ends before the first block that is
        missing or damaged. A damaged file is removed. The result can therefore be shorter than `count` said before.
        """
        reader = HistoryReader(self.store, hashes, self._name, self._queued)
        opened = memoryview(bytearray())
        with closing(read_ahead(reader, self._ahead_limit)) as contents:
            for header, content, n_blocks, n_shared in contents:
                data = content
                if header is not None:
                    n_bytes = max(0, data_bytes(header, content))
                    if len(opened) < n_bytes:
                        opened = memoryview(bytearray(n_bytes))
                    data = opened[:n_bytes]
                    if not unseal(self._cipher, header, content, data):
                        self.store.remove(header.names[0])
                        return
                yield data, n_blocks, n_shared

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued blocks are written. Return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait as `flush` does, drop the rest of the queue, and end the thread. Blocks can still be read."""
        is_written = self.flush(timeout_s)
        with self._changed:
            self._closed = True
            for first in list(self._queue)[1:]:  # the first run is being written
                run = self._queue.pop(first)
                self._queued_bytes -= len(run.data)
                self.dropped_blocks += len(run.hashes)
            self._changed.notify_all()
        if self._writer is not None and is_written:
            self._writer.join(timeout_s)
        return is_written

    def _name(self, block_hash: bytes) -> bytes:
        return derived(self._key, b"name", block_hash)

    def _queued(self, block_hash: bytes) -> Run | None:
        """Return the queued run that begins with this block. Return None if it exceeds the whole store and will be
        dropped."""
        with self._changed:
            run = self._queue.get(block_hash)
        return run if run is not None and len(run.data) < self.store.max_bytes else None

    def _fits(self, n_bytes: int) -> bool:
        return not self._queue or self._queued_bytes + n_bytes <= self._queue_limit

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                if not self._queue:
                    return
                first, (hashes, data) = next(iter(self._queue.items()))
            is_written = False
            try:
                names = [self._name(block_hash) for block_hash in hashes]
                is_written = self.store.write(names[0], seal(self._cipher, names, data))
            except (MemoryError, OverflowError):  # too large to encrypt in one operation
                pass
            finally:
                with self._changed:
                    del self._queue[first]
                    self._queued_bytes -= len(data)
                    self.kept_blocks += is_written * len(hashes)
                    self.dropped_blocks += (not is_written) * len(hashes)
                    self._changed.notify_all()
