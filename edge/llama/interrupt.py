"""Ctrl-C around native code: a decode stops at its next graph node, a load ends soon, and none is lost.

Python runs signal handlers only between bytecodes, and one decode of a long prompt on a slow device is a minute of
native code. And an exception that a handler raises in a Python function which native code called is dropped there, and
the function's answer with it: a graph would go on without its hooks.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from edge.ending import end_soon
from edge.errors import Interrupted


class Stoppable(Protocol):
    """Something whose computation can be stopped from another thread."""

    def stop(self) -> None:
        """Make what runs, and all that follows, raise Interrupted."""

    def resume(self) -> None:
        """Compute again."""


class PassStopped(Interrupted):
    """A pass was stopped, and may be computed again."""


class StopFlag:
    """Flag at which a decode ends, with who has raised it. For any thread."""

    def __init__(self, flag: Any) -> None:
        """flag: bytes that native code looks at between two nodes; empty: go on."""
        self.flag = flag
        self._is_stopped = False  # else a flag that is up ends one decode

    def stop(self) -> None:
        """End what runs, and all that follows."""
        self._is_stopped, self.flag.value = True, b"x"

    def end_pass(self) -> None:
        """End what runs, or what follows if nothing does."""
        self.flag.value = b"x"

    def resume(self) -> None:
        """Let all run again."""
        self._is_stopped, self.flag.value = False, b""

    def error(self) -> Interrupted:
        """Return the error of a decode that ended. If only that was to end, the next one runs."""
        if not self._is_stopped:
            self.flag.value = b""
        if self._is_stopped:  # also since the line before
            self.flag.value = b"x"
            return Interrupted("stopped on request")
        return PassStopped("stopped to be computed again")


@contextmanager
def interrupt_stops(engine: Stoppable) -> Iterator[None]:
    """Let Ctrl-C stop the engine inside the block, which raises Interrupted; a second one is an ordinary
    KeyboardInterrupt.

    The interpreter writes a signal's number to a socket at once, whatever runs; a thread reads it there.
    Does nothing outside the main thread, where Python has no signals.
    """
    if not _has_signals():
        yield
        return
    engine.resume()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                engine.stop()
                end_soon(number[0])

    watcher = threading.Thread(target=watch, name="interrupt", daemon=True)
    watcher.start()

    def on_interrupt(*_: object) -> None:
        engine.stop()  # the watcher may not be there yet, or no more
        signal.signal(signal.SIGINT, handler)

    handler = signal.signal(signal.SIGINT, on_interrupt)
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        with _termination_deferred(engine.stop):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, handler)
        writer.close()  # ends the watcher's recv
        watcher.join()
        reader.close()
        engine.resume()


@contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM inside the block; they take effect at its end. For native code with callbacks."""
    noted: list[int] = []
    if not _has_signals():
        yield noted
        return
    handler = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        with _termination_deferred(lambda: noted.append(signal.SIGTERM)):
            yield noted
    finally:
        signal.signal(signal.SIGINT, handler)
    if noted:
        raise KeyboardInterrupt


@contextmanager
def handled_interrupts(handle: Callable[[FrameType | None], None]) -> Iterator[None]:
    """Call `handle` on Ctrl-C inside the block, with the frame that is interrupted, in place of a KeyboardInterrupt."""
    if not _has_signals():
        yield
        return
    handler = signal.signal(signal.SIGINT, lambda _, frame: handle(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _termination_deferred(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` on SIGTERM inside the block; its own handler is called at the end, whatever else is raised then."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler):
        yield
        return
    received: list[int] = []

    def on_termination(number: int, _: object) -> None:
        received.append(number)
        note()

    signal.signal(signal.SIGTERM, on_termination)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        if received:
            handler(received[0], None)


def _has_signals() -> bool:
    """Return whether this is the main thread, and SIGINT has its default handler."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
