"""Blocks that a rank keeps, encrypted: written behind its back, and read ahead of it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import closing

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from edge.prefixes.group import HEADER_BYTES, Buffer, data_bytes, read_header, seal, unseal
from edge.prefixes.keys import derived
from edge.prefixes.reading import HistoryReader, Run, n_same, read_ahead
from edge.prefixes.store import PrefixStore

QUEUE_BYTES = 64 << 20  # of data that may wait to be written
AHEAD_BYTES = 8 << 20  # of files that may be in memory while they are read
KEEP_WAIT_S = 1.0  # for room in the queue; then blocks are dropped: what is kept is an advantage, never a duty


class SealedBlocks:
    """Blocks of data by their hashes (`block_hashes`), in a store that may hold those of other keys as well.

    Hashes are consecutive ones of a history, from a `group_start` on, as what a file holds is known by its first.
    Blocks are dropped, or found missing, where anything is wrong; nothing here raises for a disk.
    """

    def __init__(self, store: PrefixStore, key: bytes, buffer_bytes: tuple[int, int] | None = None) -> None:
        """key: of whoever may read the blocks, 32 bytes; it is kept in memory only. buffer_bytes: of data that may wait
        to be written, and be read ahead; None: QUEUE_BYTES and AHEAD_BYTES."""
        self._queue_limit, self._ahead_limit = buffer_bytes or (QUEUE_BYTES, AHEAD_BYTES)
        self.kept_blocks = 0  # written by this object
        self.dropped_blocks = 0  # not written: the disk is too slow, full, or cannot be written to
        self.store = store
        self._key = key
        self._cipher = AESGCM(derived(key, b"seal"))
        self._changed = threading.Condition()  # of what follows, and of the figures
        self._queue: dict[bytes, Run] = {}  # by its first hash, in order; the first is being written
        self._queued_bytes = 0
        self._writer: threading.Thread | None = None
        self._closed = False

    @property
    def is_writing(self) -> bool:
        """True while blocks are written, or wait for it."""
        return bool(self._queue)

    def keep(self, hashes: Sequence[bytes], data: Buffer) -> None:
        """Have a thread write blocks that are not there, to one file.

        Where the disk is behind, this waits for at most KEEP_WAIT_S, and then drops them.
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
        """Count the leading hashes whose blocks are stored, or are to be written. use: these count as used now."""
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
        """Yield what is stored of the first blocks, in order: (data, blocks in it, how many of them are wanted).

        Data are valid until the next are asked for: the memory is used again, as fresh memory takes longer than the
        cipher. A thread reads ahead, and ends with the iterator. It ends before the first that is missing, or not what
        was kept: such a file is removed. That may be sooner than `count` has said.
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
        """Wait until nothing is to be written any more; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait as `flush`, drop the rest, and end the thread. Blocks can still be taken."""
        is_written = self.flush(timeout_s)
        with self._changed:
            self._closed = True
            for first in list(self._queue)[1:]:  # the first is being written
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
        """Return the run that begins with this block and waits to be written; None for one larger than the whole store,
        which the writer drops."""
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
            except (MemoryError, OverflowError):  # larger than what can be encrypted at once
                pass
            finally:
                with self._changed:
                    del self._queue[first]
                    self._queued_bytes -= len(data)
                    self.kept_blocks += is_written * len(hashes)
                    self.dropped_blocks += (not is_written) * len(hashes)
                    self._changed.notify_all()
