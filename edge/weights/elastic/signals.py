"""Memory signals of a process: SIGUSR1 asks it to give memory back, and SIGUSR2 lets it have the memory again."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge import log

_ASKS = {signal.SIGUSR1: 0, signal.SIGUSR2: None}


def follow_memory_signals(ask: Callable[[int | None], object]) -> None:
    """Call `ask` in its own thread: with 0 bytes for SIGUSR1, with None for SIGUSR2. Call this in the main thread."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # its `put` is reentrant
    for number in _ASKS:
        signal.signal(number, lambda number, _: signals.put(number))

    def follow() -> None:
        while True:
            number = signals.get()
            try:
                ask(_ASKS[signal.Signals(number)])
            except Exception as error:  # a later signal may succeed
                log.warning("memory-signal", number=number, why=str(error))

    threading.Thread(target=follow, daemon=True, name="memory signals").start()


def ignore_memory_signals() -> None:
    """Ignore these signals, because the process that divides memory handles them. Call this in the main thread.

    Service managers send them to all processes.
    """
    for number in _ASKS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def memory_signals_blocked() -> Iterator[None]:
    """Block these signals, so that a process started in the block survives one that comes before it ignores them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS)
