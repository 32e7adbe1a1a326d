"""Jobs that other threads submit to the engine thread, which runs them between steps."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from edge.errors import EngineError

T = TypeVar("T")
_JOB_S = 600.0  # maximum wait for a job; a step of a large model may take a minute


class EngineJobs:
    """Queue of jobs. `take` and `timed` are for the engine thread, the other methods for all threads."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._began: float | None = None  # start time of the engine thread's current job or step
        self.put = self._queue.put  # adds a job, which must not raise errors; None makes `take` return False

    def take(self, is_busy: Callable[[], bool]) -> bool:
        """Run all jobs in the queue. Wait for a job if the engine is not busy. Return False at the end."""
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
        """Context that measures the duration of a job or a step."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    @property
    def busy_s(self) -> float | None:
        """Duration of the engine thread's current job or step in seconds, or None if it is idle."""
        began = self._began
        return None if began is None else time.monotonic() - began

    def result(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine thread. Return its result or raise its error."""
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
