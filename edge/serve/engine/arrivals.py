"""Requests that have reached an engine process and are being prepared. Prefix warming waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge.errors import Interrupted
from edge.llm.interface import TextEngine
from edge.llm.scheduler import Scheduler


class Arrivals:
    """Requests that are being prepared, by the server's numbers.

    Only the engine thread calls `waits_for` and `interruptible`.
    """

    def __init__(self, engine: TextEngine, wake: Callable[[], None]) -> None:
        """wake: makes the engine thread check again for work."""
        self._engine, self._wake = engine, wake
        self._cancelled: dict[int, threading.Event] = {}
        self._lock = threading.Lock()  # guards the next two attributes
        self._may_interrupt = self._interrupted = False  # state of the current step

    def expect(self, number: int) -> None:
        """Register a request, and stop the current step if `interruptible` allows it."""
        self._cancelled[number] = threading.Event()
        with self._lock:
            if self._may_interrupt:
                self._interrupted = True
                self._engine.stop()

    def cancel(self, number: int) -> None:
        """Mark a request as cancelled if it is being prepared."""
        if (cancelled := self._cancelled.get(number)) is not None:
            cancelled.set()

    def is_cancelled(self, number: int) -> bool:
        """Return True if a request was cancelled."""
        cancelled = self._cancelled.get(number)
        return cancelled is not None and cancelled.is_set()

    def prepared(self, number: int) -> bool:
        """Remove a request that now begins or was refused. Return True if it was cancelled."""
        cancelled = self._cancelled.pop(number)
        self._wake()
        return cancelled.is_set()

    def waits_for(self, scheduler: Scheduler) -> bool:
        """Return True if the next step should wait.

        This is the case if it would compute only background requests while other requests are being prepared.
        """
        # A scheduler without requests still has events to send.
        queues = scheduler.queues
        return bool(self._cancelled) and bool(queues.all) and queues.is_background

    @contextmanager
    def interruptible(self, scheduler: Scheduler, *, is_alone: bool) -> Iterator[None]:
        """Let `expect` stop the step in this block if all its rows are prompts of background requests.

        The scheduler repeats a stopped step later.
        is_alone: the model runs on this device alone.
        """
        engine, requests = self._engine, scheduler.queues.all
        # Several ranks cannot stop a step together. Recurrent layers and drafters cannot undo a part of a step.
        is_simple = is_alone and engine.rollback is None and engine.paging is None
        with self._lock:
            self._may_interrupt = is_simple and all(r.request.background and not r.answer for r in requests)
        try:
            yield
        except Interrupted:
            if not self._interrupted:  # the process is ending
                raise
        finally:
            with self._lock:
                if self._interrupted:
                    engine.resume()
                self._may_interrupt = self._interrupted = False
