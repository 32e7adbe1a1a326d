"""Threads that read weights from files into memory, in this CPU's layout, while the engine computes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from edge.errors import WeightsError
from edge.llama.address_space import HUGE_PAGE, PAGE, AddressSpace, huge_pages, pages
from edge.llama.buffers import ROW_GROUP, Weight
from edge.weights.direct_file import DirectFile

READ_TIMEOUT_S = 120.0  # timeout for one chunk; the slowest cards need a tenth of a second
DEFAULT_THREADS = 2
DEFAULT_CHUNK = HUGE_PAGE - 2 * PAGE  # bytes: one huge page, including the surrounding pages


class ReaderCounts(NamedTuple):
    """Read statistics since the reader was created, or between two readings of them."""

    n_bytes: int = 0
    busy_s: float = 0.0  # seconds in which at least one chunk was read or repacked
    wait_s: float = 0.0  # seconds in which the engine waited for weights


@dataclass(eq=False, slots=True)
class Job:
    """Read of a part of a weight: `n_bytes` of a file to a place in memory.

    Without repacking, the bytes are read in place if `offset` and `start` have the same offset within a page. The rest
    of the first and last page is then read, too.
    """

    weight: Weight
    source: DirectFile
    offset: int  # offset of a row in the file
    n_bytes: int
    space: AddressSpace
    start: int  # offset in `space`
    repacked: bool
    next: int = 0  # first byte of the next chunk
    left: int = field(init=False)  # bytes that have not arrived yet
    at_work: int = 0  # number of threads that are reading a chunk of it
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.left = self.n_bytes

    @property
    def in_place(self) -> bool:
        """True if the disk writes directly to the weight's place, at full speed."""
        return not self.repacked and self.space.huge and (self.start - self.offset) % PAGE == 0

    @property
    def done(self) -> bool:
        """True if the job is finished or has failed."""
        return self.left == 0 or self.error is not None

    def chunk(self, most: int) -> int:
        """Return the bytes of the next chunk, about `most`, so that chunks have similar sizes.

        A chunk has whole groups of rows if these are repacked. Otherwise it extends to the end of a page.
        """
        left = self.n_bytes - self.next
        even = -(-left // -(-left // most))
        unit = self.weight.row_bytes * ROW_GROUP if self.repacked else PAGE
        skip = 0 if self.repacked else (self.offset + self.next) % PAGE
        return min(max(unit, min(-(-even // unit), most // unit) * unit) - skip, left)


def _buffer(row_bytes: int, chunk: int) -> int:
    """Return the bytes for a chunk and the surrounding pages. A chunk may be one group of long rows."""
    return max(pages(chunk), row_bytes * ROW_GROUP) + 2 * PAGE


class Reader:
    """A few threads with a queue of jobs. `close()` ends them."""

    def __init__(
        self,
        row_bytes: int,
        threads: int = DEFAULT_THREADS,
        chunk: int = DEFAULT_CHUNK,
        *,
        verify: bool = False,
    ) -> None:
        """row_bytes: bytes of the longest row.
        chunk: bytes per read.
        verify: compare the digest of repeated reads with the first one.
        """
        self.threads, self._row_bytes = threads, row_bytes
        self.chunk = max(PAGE, pages(chunk))
        self._digests: dict[tuple[str, int], bytes] | None = {} if verify else None
        self._urgent: deque[Job] = deque()
        self._ahead: deque[Job] = deque()
        lock = threading.RLock()
        self._turn = threading.Condition(lock)  # wakes the threads
        self._arrival = threading.Condition(lock)
        self._n_bytes, self._busy_s, self._wait_s = 0, 0.0, 0.0
        self._at_work, self._since = 0, 0.0  # number of reading threads, and start of the time in which there is one
        self._closed = False
        self.hangs = False  # True: a thread did not end, and may still write to its buffer
        self._threads, self._staging = _start(self, threads, threading.Event())

    @staticmethod
    def memory(row_bytes: int, threads: int, chunk: int) -> int:
        """Return the bytes that a reader takes for itself."""
        return threads * huge_pages(_buffer(row_bytes, chunk))

    def submit(self, job: Job) -> Job:
        """Queue a job after all others."""
        self._queue(self._ahead, (job,))
        return job

    def submit_urgent(self, jobs: Sequence[Job]) -> None:
        """Queue jobs in this order, before all jobs from `submit`."""
        self._queue(self._urgent, jobs)

    def _queue(self, queue: deque[Job], jobs: Sequence[Job]) -> None:
        """Queue jobs, except jobs that have failed or whose last chunk is being read."""
        with self._turn:
            for job in jobs:
                if job.next < job.n_bytes and job.error is None:
                    self._forget(job)
                    queue.append(job)
            self._turn.notify_all()

    def wait(self, job: Job) -> None:
        """Wait until the job's bytes are in place. Raises WeightsError if they cannot be read."""
        if not job.done:
            began = time.perf_counter()
            self._until_done(job)
            self._wait_s += time.perf_counter() - began
        if job.error is not None:
            raise job.error

    def drop(self, *jobs: Job) -> None:
        """Cancel jobs, and return when nothing writes to their places any more.

        All jobs are cancelled before the first wait, so that no further chunk of them is read.
        """
        with self._turn:
            for job in jobs:
                self._forget(job)
            deadline = time.monotonic() + READ_TIMEOUT_S
            for job in jobs:
                while job.at_work:
                    if not self._arrival.wait(max(0.0, deadline - time.monotonic())):
                        raise self._late(job)

    def counts(self) -> ReaderCounts:
        """Return the statistics since the reader was created."""
        with self._turn:
            now = time.perf_counter() - self._since if self._at_work else 0.0
            return ReaderCounts(self._n_bytes, self._busy_s + now, self._wait_s)

    def close(self) -> None:
        """End the threads. Queued jobs are not processed."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
            self._turn.notify_all()
        deadline = time.monotonic() + READ_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.hangs = any(thread.is_alive() for thread in self._threads)
        for space in () if self.hangs else self._staging:
            space.close()

    def _until_done(self, job: Job) -> None:
        with self._turn:
            while not job.done:
                left = job.left
                if not self._arrival.wait(READ_TIMEOUT_S) and job.left == left:
                    raise self._late(job)

    def _late(self, job: Job) -> WeightsError:
        return WeightsError(
            f"{job.source.path}: nothing of {job.weight.name}, at offset {job.offset}, arrived in {READ_TIMEOUT_S:g} s;"
            " check the disk, then load the model again"
        )

    def _forget(self, job: Job) -> None:
        for queue in (self._urgent, self._ahead):
            if job in queue:
                queue.remove(job)

    # --- in the threads ---

    def _work(self, staging: AddressSpace, over: threading.Event) -> None:
        room = staging.view(0, staging.n_bytes)
        while (chunk := self._next(over)) is not None:
            job, at, n_bytes = chunk
            error: Exception | None = None
            try:
                self._bring(job, at, n_bytes, staging, room)
            except Exception as caught:  # the engine must learn of any error
                error = caught
            self._did(job, n_bytes, error)

    def _next(self, over: threading.Event) -> tuple[Job, int, int] | None:
        """Return (job, first byte, bytes) of the next chunk, or None if the reader is closed or the helpers must
        end."""
        with self._turn:
            while not (self._urgent or self._ahead or self._closed or over.is_set()):
                self._turn.wait()
            if self._closed or over.is_set():
                return None
            queue = self._urgent or self._ahead
            job = queue[0]
            at, n_bytes = job.next, job.chunk(self.chunk)
            job.next += n_bytes
            if job.next == job.n_bytes:
                queue.popleft()
            if not self._at_work:
                self._since = time.perf_counter()
            self._at_work += 1
            job.at_work += 1
            return job, at, n_bytes

    def _bring(self, job: Job, at: int, n_bytes: int, staging: AddressSpace, room: memoryview) -> None:
        offset, start = job.offset + at, job.start + at
        if job.in_place:
            page = start // PAGE * PAGE
            into = job.space.view(page, pages(start + n_bytes) - page)
            skip = job.source.read(offset, n_bytes, into)
            chunk = into[skip : skip + n_bytes]
        else:
            skip = job.source.read(offset, n_bytes, room)
            chunk = room[skip : skip + n_bytes]
        if self._digests is not None:
            self._check(job, offset, chunk)
        if job.repacked:
            job.weight.repack(staging.address + skip, n_bytes // job.weight.row_bytes, job.space.address + start)
        elif not job.in_place:  # numpy copies without the interpreter's lock
            np.copyto(np.frombuffer(job.space.view(start, n_bytes), np.uint8), np.frombuffer(chunk, np.uint8))

    def _did(self, job: Job, n_bytes: int, error: Exception | None) -> None:
        with self._turn:
            job.left -= n_bytes
            job.at_work -= 1
            self._n_bytes += n_bytes
            self._at_work -= 1
            if not self._at_work:
                self._busy_s += time.perf_counter() - self._since
            if error is not None:
                job.error = job.error or error
                self._forget(job)
            if job.done or not job.at_work:
                self._arrival.notify_all()

    def _check(self, job: Job, offset: int, data: memoryview) -> None:
        assert self._digests is not None
        digest = hashlib.sha256(data).digest()
        if self._digests.setdefault((str(job.source.path), offset), digest) != digest:
            raise WeightsError(
                f"{job.source.path}: {len(data)} bytes of {job.weight.name} at offset {offset} differ from the bytes"
                " that were read the first time; the disk or the memory is faulty, or the file was changed"
            )


def helper_reader(reader: Reader, threads: int) -> Reader:
    """Return a reader with its own threads that shares the digests for verification."""
    other = Reader(reader._row_bytes, threads, reader.chunk)
    other._digests = reader._digests
    return other


def beside_bytes(reader: Reader, threads: int) -> int:
    """Return the bytes that a helper reader takes for itself."""
    return reader.memory(reader._row_bytes, threads, reader.chunk)


@contextmanager
def helped(reader: Reader, threads: int) -> Iterator[None]:
    """Add threads to a reader inside the block. Their memory is `beside_bytes`.

    While nothing else computes, more threads can repack in parallel.
    """
    over = threading.Event()
    helpers, staging = _start(reader, threads, over)
    try:
        yield
    finally:
        _end(reader, helpers, staging, over)


def started(target: Callable[..., None], args: tuple[Any, ...], name: str) -> threading.Thread:
    """Return a running thread. Raises WeightsError if the system cannot start one."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise WeightsError(
            f"weights are read by threads, and the system cannot start another one ({error}); end some, or raise"
            " its limit (ulimit -u)"
        ) from error
    return thread


def _start(reader: Reader, threads: int, over: threading.Event) -> tuple[list[threading.Thread], list[AddressSpace]]:
    """Start threads that read until `over` is set. Return them and their memory. Raises WeightsError without any
    running."""
    staging = [AddressSpace(_buffer(reader._row_bytes, reader.chunk), huge=True) for _ in range(threads)]
    running: list[threading.Thread] = []
    try:
        for space in staging:
            running.append(started(reader._work, (space, over), "weights"))
    except BaseException:
        _end(reader, running, staging, over)
        raise
    return running, staging


def _end(
    reader: Reader, threads: Sequence[threading.Thread], staging: Sequence[AddressSpace], over: threading.Event
) -> None:
    """End the threads of `_start`, and free their memory."""
    with reader._turn:
        over.set()
        reader._turn.notify_all()
    for thread, space in zip_longest(threads, staging):
        if thread is not None:
            thread.join(READ_TIMEOUT_S)
        if thread is not None and thread.is_alive():
            reader._threads.append(thread)  # `close` then reports that a thread hangs
        else:
            space.close()
