"""Jobs for the engine thread: what other threads have it do between two steps."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from edge.errors import EngineError

T = TypeVar("T")
_JOB_S = 600.0  # for the engine thread to do a job: a step of a large model may take a minute


class EngineJobs:
    """Queue of jobs. `take` and `timed` are for the engine thread, the rest is for all threads."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._began: float | None = None  # when the engine thread began its current job or step
        self.put = self._queue.put  # adds a job, which must raise nothing; None: `take` returns False then

    def take(self, is_busy: Callable[[], bool]) -> bool:
        """Do all jobs in the queue; wait for one while the engine is not busy. Return False at the end."""
        while True:
            try:
                job = self._queue.get(block=not is_busy())
            except queue.Empty:
                return True
            if job is None:
                return False
            with self.timed():
                job()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure a job or a step while it is done."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    @property
    def busy_s(self) -> float | None:
        """Seconds that the engine thread has been at one job or step; None: it waits."""
        began = self._began
        return None if began is None else time.monotonic() - began

    def result(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, or raise its error, once the engine thread has done it."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self.put(job)
        if not wait([future], _JOB_S).done:
            raise EngineError(f"the engine has been busy for {_JOB_S:g} s")
        return future.result()
