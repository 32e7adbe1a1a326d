"""Signals that ask a process for memory: SIGUSR1 for all that it can give back, SIGUSR2 when it may have it again."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge import log

_ASKS = {signal.SIGUSR1: 0, signal.SIGUSR2: None}


def follow_memory_signals(ask: Callable[[int | None], object]) -> None:
    """Call `ask` in a thread of its own: with 0 bytes at SIGUSR1, with None at SIGUSR2. For the main thread."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # its `put` may interrupt itself
    for number in _ASKS:
        signal.signal(number, lambda number, _: signals.put(number))

    def follow() -> None:
        while True:
            number = signals.get()
            try:
                ask(_ASKS[signal.Signals(number)])
            except Exception as error:  # the next one may succeed
                log.warning("memory-signal", number=number, why=str(error))

    threading.Thread(target=follow, daemon=True, name="memory signals").start()


def ignore_memory_signals() -> None:
    """Leave them to the process that divides memory: service managers send them to all processes. For the main
    thread."""
    for number in _ASKS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def memory_signals_blocked() -> Iterator[None]:
    """Have a process that is started in the block live on where one comes before it ignores them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS)
