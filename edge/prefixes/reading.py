"""Files of kept blocks, read by a thread a little ahead of who takes them, into memory that is used again.

A fast disk fills huge pages at more than twice the rate that it fills the page cache with. So files are read past the
cache, unless they are in it, or the disk is slow: then the cache costs nothing, and saves reading them once more.
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

READ_TIMEOUT_S = 30.0  # for what is handed over together; then it is not there
FAST_BYTES_PER_S = 500e6  # of a disk that the page cache would slow down
SLOW_FILES = 3  # one after the other that make a disk slow: one may have met a bad moment


class Run(NamedTuple):
    """Consecutive blocks of a history that go to one file."""

    hashes: Sequence[bytes]
    data: Buffer


class Content(NamedTuple):
    """Content of a few blocks."""

    header: Header | None  # of their file; None: they are still to be written
    data: memoryview  # all that is in the file, or the data itself
    n_blocks: int  # that it has
    n_shared: int  # of these, the first: a prompt may share no more of them


def read_ahead(reader: HistoryReader, room: int) -> Generator[Content]:
    """Yield the content of the leading blocks that are there, in order. A content is valid until the next one.

    room: bytes of memory for files; one that is larger gets memory of its own. The thread ends with the iterator.
    """
    half = max(1, room // 2)  # is read while the other is taken
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
    """Reads along the hashes of a history, and learns how fast the disk is."""

    def __init__(
        self,
        store: PrefixStore,
        hashes: Sequence[bytes],
        name: Callable[[bytes], bytes],
        queued: Callable[[bytes], Run | None],
    ) -> None:
        """name: of the file whose first block has a hash. queued: the run whose first block has it, not written yet."""
        self._store, self._hashes, self._name, self._queued = store, hashes, name, queued
        self._at = 0  # of the hashes; their number where nothing more is there
        self._slow_files = 0  # that were read last
        self._in_cache = True  # all so far; after one that is not, the system is not asked of others, which takes time

    def read(self, into: memoryview) -> list[Content]:
        """Return the next blocks, as many as fit into the buffer; nothing at the end."""
        contents: list[Content] = []
        used = 0
        while self._at < len(self._hashes):
            run = self._queued(self._hashes[self._at])  # first: what leaves the queue is in a file by then
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
        """Return the next content of this file. A damaged file is removed."""
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
    """Return how many leading items of both are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
