"""Reading of prefix cache files by a thread that is slightly ahead of the consumer, into reused memory.

A fast disk fills huge pages at more than twice the rate of the page cache. Files are therefore read past the page
cache. The exceptions are files in the page cache, and slow disks. With these the page cache costs nothing and may save
a second read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import takewhile
from typing import NamedTuple

from edge.llama.address_space import HUGE_PAGE, AddressSpace, pages
from edge.prefixes.group import Buffer, Header, read_header
from edge.prefixes.store import PrefixStore

READ_TIMEOUT_S = 30.0  # timeout for one buffer; later data counts as missing
FAST_BYTES_PER_S = 500e6  # speed of a disk that the page cache would slow down
SLOW_FILES = 3  # consecutive slow files after which a disk counts as slow, because one may be slow by chance


class Run(NamedTuple):
    """Consecutive blocks of a history that go to one file."""

    hashes: Sequence[bytes]
    data: Buffer


class Content(NamedTuple):
    """Content of a few blocks."""

    header: Header | None  # header of their file; None if they are still to be written
    data: memoryview  # the whole file, or the data itself if it is not written yet
    n_blocks: int  # number of blocks
    n_shared: int  # number of leading blocks that belong to this history


def read_ahead(reader: HistoryReader, room: int) -> Generator[Content]:
    """Yield the content of the leading blocks that exist, in order. A content is valid until the next one.

    room: bytes of memory for files; a larger file gets memory of its own

    The thread ends with the iterator.
    """
    half = max(1, room // 2)  # one half is read while the other is consumed
    free = deque(AddressSpace(half, huge=half >= HUGE_PAGE) for _ in range(2))
    reading: deque[tuple[AddressSpace, Future[list[Content]]]] = deque()
    pool = ThreadPoolExecutor(1, "reading prompts")
    try:
        while True:
            while free:
                space = free.popleft()
                reading.append((space, pool.submit(reader.read, space.view(0, space.n_bytes))))
            if not wait([reading[0][1]], READ_TIMEOUT_S).done:
                return
            space, future = reading.popleft()
            if not future.result():
                return
            yield from future.result()
            free.append(space)
    finally:
        futures = [future for _, future in reading]
        for future in futures:
            future.cancel()
        pool.shutdown(wait=not wait(futures, READ_TIMEOUT_S).not_done)


class HistoryReader:
    """Reads files along the hashes of a history, and measures the speed of the disk."""

    def __init__(
        self,
        store: PrefixStore,
        hashes: Sequence[bytes],
        name: Callable[[bytes], bytes],
        queued: Callable[[bytes], Run | None],
    ) -> None:
        """name: returns the name of the file whose first block has a hash
        queued: returns the unwritten run whose first block has a hash
        """
        self._store, self._hashes, self._name, self._queued = store, hashes, name, queued
        self._at = 0  # index of the next hash; the number of hashes at the end
        self._slow_files = 0  # number of slow files read last
        # True while all files so far were in the page cache. After the first miss, no more files are checked, because a
        # check takes time.
        self._in_cache = True

    def read(self, into: memoryview) -> list[Content]:
        """Return the next blocks, up to the size of the buffer; nothing at the end."""
        contents: list[Content] = []
        used = 0
        while self._at < len(self._hashes):
            # Asked first, because a run that leaves the queue is already in a file.
            run = self._queued(self._hashes[self._at])
            name = self._name(self._hashes[self._at])
            n_bytes = self._store.n_bytes(name)
            if n_bytes is not None:
                if used and len(into) - used < n_bytes:
                    break
                room = into[used:] if n_bytes <= len(into) else AddressSpace(n_bytes).view(0, pages(n_bytes))
                content = self._in_file(name, room[: pages(n_bytes)])
                used += pages(n_bytes)
            else:
                content = self._waiting(run) if run else None
            if content is None:
                self._at = len(self._hashes)
                break
            contents.append(content)
            self._at += content.n_shared
        return contents

    def _in_file(self, name: bytes, into: memoryview) -> Content | None:
        """Return the next content from this file. A damaged file is removed."""
        self._in_cache = self._in_cache and self._store.is_cached(name)
        direct = self._slow_files < SLOW_FILES and not self._in_cache
        began = time.perf_counter()
        n_bytes = self._store.read(name, into, direct=direct)
        if n_bytes is None:
            return None
        if direct:
            is_slow = n_bytes < FAST_BYTES_PER_S * (time.perf_counter() - began)
            self._slow_files = self._slow_files + 1 if is_slow else 0
        header = read_header(into[:n_bytes], name)
        if header is None:
            self._store.remove(name)
            return None
        n_shared = n_same(header.names, map(self._name, self._hashes[self._at :]))
        return Content(header, into[:n_bytes], len(header.names), n_shared)

    def _waiting(self, run: Run) -> Content:
        n_shared = n_same(run.hashes, self._hashes[self._at :])
        return Content(None, memoryview(run.data), len(run.hashes), n_shared)


def n_same(a: Iterable[bytes], b: Iterable[bytes]) -> int:
    """Return the number of equal leading items."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
