"""Requests that have come to an engine process and are still prepared: background requests wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge.errors import Interrupted
from edge.llm.interface import TextEngine
from edge.llm.requests import only_background
from edge.llm.scheduler import Scheduler


class Arrivals:
    """Those requests, by the server's numbers. `waits_for` and `interruptible` are for the engine thread."""

    def __init__(self, engine: TextEngine, wake: Callable[[], None]) -> None:
        """wake: has the engine thread look again whether there is a step to be made."""
        self._engine, self._wake = engine, wake
        self._cancelled: dict[int, threading.Event] = {}
        self._foreground: set[int] = set()  # those that somebody waits for
        self._lock = threading.Lock()  # around the next
        self._may_interrupt = self._interrupted = False  # the current step

    def expect(self, number: int, *, background: bool) -> None:
        """Register a request. The step under way is stopped where it may be."""
        self._cancelled[number] = threading.Event()
        if background:
            return
        self._foreground.add(number)
        with self._lock:
            if self._may_interrupt:
                self._interrupted = True
                self._engine.stop()

    def cancel(self, number: int) -> None:
        """Note that nobody waits for a request any more, if it is here."""
        if (cancelled := self._cancelled.get(number)) is not None:
            cancelled.set()

    def is_cancelled(self, number: int) -> bool:
        """Return whether a request was cancelled."""
        cancelled = self._cancelled.get(number)
        return cancelled is not None and cancelled.is_set()

    def prepared(self, number: int) -> bool:
        """Forget a request, which begins now or was refused; return whether it was cancelled."""
        self._foreground.discard(number)
        self._wake()
        return self._cancelled.pop(number).is_set()

    def waits_for(self, scheduler: Scheduler) -> bool:
        """Return whether the next step would have nothing but background requests, while others are prepared."""
        # Without any there are events to be sent.
        requests = (*scheduler.running, *scheduler.waiting, *scheduler.slots.away.requests)
        return bool(self._foreground) and bool(requests) and only_background(requests)

    @contextmanager
    def interruptible(self, scheduler: Scheduler, *, is_alone: bool) -> Iterator[None]:
        """Around a step, which is stopped for who comes where it has prompts in the background alone. It is made again
        later. is_alone: the model is on this device alone."""
        engine, requests = self._engine, (*scheduler.running, *scheduler.waiting, *scheduler.slots.away.requests)
        # Ranks complete a step in any case; what recurrent layers hold of a part of one, and drafts, cannot be told.
        is_simple = is_alone and engine.rollback is None and engine.paging is None
        with self._lock:
            self._may_interrupt = is_simple and all(r.request.background and not r.answer for r in requests)
        try:
            yield
        except Interrupted:
            if not self._interrupted:  # but by the end of the process
                raise
        finally:
            with self._lock:
                if self._interrupted:
                    engine.resume()
                self._may_interrupt = self._interrupted = False
