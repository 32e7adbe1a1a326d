"""Queue of requests in the process of a network."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edge.onnx.samples import Feeds

MOST_ROWS = 32  # rows of one run: more would not be faster, and would delay other requests


@dataclass
class Timing:
    """Durations of one run in nanoseconds."""

    compute_input: int = 0  # joining inputs
    compute_infer: int = 0
    compute_output: int = 0  # dividing outputs


@dataclass
class Work:
    """A request that waits or is computed."""

    number: int
    feeds: Feeds
    outputs: tuple[str, ...]  # names of the requested outputs; empty: all
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    queue_ns: int = 0  # time until its first run began
    infer_ns: int = 0  # computing time of its runs so far
    cancelled: bool = False
    parts: list[Feeds] = field(default_factory=list)  # outputs of the first rows, if it is computed in several runs

    @property
    def rows(self) -> int:
        """Size of the first dimension; 1 if the inputs have none."""
        return min((len(array) if array.ndim else 1 for array in self.feeds.values()), default=1)

    @property
    def key(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Shapes without the first dimension. Requests with the same key can be joined."""
        return tuple((name, array.shape[1:]) for name, array in sorted(self.feeds.items()))

    def begin(self) -> None:
        """Record that the first run of the request begins."""
        if not self.parts:
            self.queue_ns = time.monotonic_ns() - self.arrived_ns


class Works:
    """Requests in the order of arrival. Any thread may call the methods."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()
        self._running: list[Work] = []
        self._changed = threading.Condition()
        self._closed = False

    def put(self, work: Work) -> None:
        """Add a request at the end."""
        with self._changed:
            self._waiting.append(work)
            self._changed.notify_all()

    def take(self, most_rows: int = 0, until: Callable[[], bool] = lambda: False) -> list[Work]:
        """Wait for a request. Return it with waiting requests of the same key, or [] at the end.

        most_rows: rows of all requests together; the first request may have more. 0: return only the first request.
        until: returns True if the caller no longer wants a request; call `wake` when its value changes.
        """
        with self._changed:
            while True:
                self._waiting = deque(work for work in self._waiting if not work.cancelled)
                if self._closed or until():
                    return []
                if self._waiting:
                    break
                self._changed.wait()
            first = self._waiting.popleft()
            works, rows = [first], first.rows
            if rows < most_rows:
                for work in [work for work in self._waiting if work.key == first.key]:
                    if rows + work.rows <= most_rows:
                        works.append(work)
                        rows += work.rows
                        self._waiting.remove(work)
            self._running = works
            return works

    def is_closed(self) -> bool:
        """Return True after `close`."""
        return self._closed

    def wake(self) -> None:
        """Make waiting callers of `take` look at `until` again."""
        with self._changed:
            self._changed.notify_all()

    def cancel(self, number: int) -> bool:
        """Drop a request. Return True if no other request needs the current run."""
        with self._changed:
            for work in (*self._waiting, *self._running):
                if work.number == number:
                    work.cancelled = True
            return bool(self._running) and all(work.cancelled for work in self._running)

    def close(self) -> None:
        """End the queue. `take` returns [] from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
