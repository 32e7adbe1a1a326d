"""Files of kept blocks, read by a thread a little ahead of who takes them, into memory that is used again.

A fast disk fills huge pages at more than twice the rate that it fills the page cache with. So files are read past the
cache, unless they are in it, or the disk is slow: then the cache costs nothing, and saves reading them once more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from edge.llama.address_space import HUGE_PAGE, AddressSpace, pages
from edge.prefixes.store import PrefixStore

RUN_BYTES = 4 << 20  # of files that are handed over together: each time takes as long as to read a small one
READ_TIMEOUT_S = 30.0  # for files that are handed over together; then they are not there
FAST_BYTES_PER_S = 500e6  # of a disk that the page cache would slow down


class Block(NamedTuple):
    """A block that is there."""

    name: bytes  # of its file
    n_bytes: int
    data: bytes | None  # where it is still to be written


def read_ahead(store: PrefixStore, blocks: Iterator[Block], most_bytes: int) -> Generator[tuple[Block, memoryview]]:
    """The blocks whose files can be read, in order, with what is in them, which is valid until the next one is asked
    for. It ends before the first that cannot. The thread ends with the iterator. most_bytes: of files in memory."""
    runs = _runs(blocks, min(RUN_BYTES, most_bytes // 2))
    free = deque(AddressSpace(1) for _ in range(2))  # one is read while the other is taken
    reading: deque[tuple[list[Block], AddressSpace, Future[list[memoryview]]]] = deque()
    pool = ThreadPoolExecutor(1, "kept prompts")
    reader = _Reader(store)
    following = next(runs, None)
    try:
        while True:
            while following is not None and free:
                space = _with_room(free.popleft(), sum(pages(block.n_bytes) for block in following))
                reading.append((following, space, pool.submit(reader.read, following, space.view(0, space.n_bytes))))
                following = next(runs, None)
            if not reading or not wait([reading[0][2]], READ_TIMEOUT_S).done:
                return
            run, space, future = reading.popleft()
            contents = future.result()
            yield from zip(run, contents, strict=False)
            if len(contents) < len(run):
                return
            free.append(space)
    finally:
        futures = [future for _, _, future in reading]
        for future in futures:
            future.cancel()
        pool.shutdown(wait=not wait(futures, READ_TIMEOUT_S).not_done)


class _Reader:
    """What the thread does, and has learnt of the disk."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._is_fast = True  # until it is not

    def read(self, run: Sequence[Block], into: memoryview) -> list[memoryview]:
        """What is in the first files of a run, up to one that cannot be read."""
        files = [block.name for block in run if block.data is None]
        is_cached = not files or self._store.is_cached(files[0])
        direct = self._is_fast and not is_cached
        for name in () if is_cached or direct else files:
            self._store.expect(name)
        began = time.perf_counter()
        found: list[memoryview] = []
        n_read = at = 0
        for block in run:
            if block.data is not None:
                found.append(memoryview(block.data))
                continue
            room = into[at : at + pages(block.n_bytes)]
            n_bytes = self._store.read(block.name, room, direct=direct)
            if n_bytes is None:
                break
            found.append(room[:n_bytes])
            at += len(room)
            n_read += n_bytes
        if direct:
            self._is_fast = n_read >= FAST_BYTES_PER_S * (time.perf_counter() - began)
        return found


def _runs(blocks: Iterator[Block], most_bytes: int) -> Iterator[list[Block]]:
    """As many blocks together as have so many bytes, or one that is larger."""
    run: list[Block] = []
    n_bytes = 0
    for block in blocks:
        if run and n_bytes + block.n_bytes > most_bytes:
            yield run
            run, n_bytes = [], 0
        run.append(block)
        n_bytes += block.n_bytes
    if run:
        yield run


def _with_room(space: AddressSpace, n_bytes: int) -> AddressSpace:
    """A space of at least so many bytes: this one, or one in its place."""
    if n_bytes <= space.n_bytes:
        return space
    space.close()
    return AddressSpace(n_bytes, huge=n_bytes >= HUGE_PAGE)
