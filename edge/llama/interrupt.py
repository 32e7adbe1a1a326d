"""Ctrl-C around native code: a decode stops at its next graph node, a load ends soon, and no Ctrl-C is lost.

Python runs signal handlers only between bytecodes, but one decode of a long prompt on a slow device takes a minute of
native code. If a handler raises inside a Python function that native code called, the exception and the function's
result are dropped. The graph would then continue without its hooks.
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
    """Computation that another thread can stop."""

    def stop(self) -> None:
        """Make the current and all later passes raise Interrupted."""

    def resume(self) -> None:
        """Allow passes again."""


class PassStopped(Interrupted):
    """A pass was stopped and may be computed again."""


class StopFlag:
    """Stop flag of decodes that distinguishes one stopped pass from a stopped engine. Safe in any thread."""

    def __init__(self, flag: Any) -> None:
        """flag: bytes that native code checks between two nodes; empty means continue."""
        self.flag = flag
        self._is_stopped = False  # False: a raised flag ends one decode only

    def stop(self) -> None:
        """End the current decode and all later ones."""
        self._is_stopped, self.flag.value = True, b"x"

    def end_pass(self) -> None:
        """End the current decode, or the next one if none runs."""
        self.flag.value = b"x"

    def resume(self) -> None:
        """Allow decodes again."""
        self._is_stopped, self.flag.value = False, b""

    def error(self) -> Interrupted:
        """Return the error for a stopped decode. If only one pass was stopped, allow the next one."""
        if not self._is_stopped:
            self.flag.value = b""
        if self._is_stopped:  # `stop` may have run since the previous line
            self.flag.value = b"x"
            return Interrupted("stopped on request")
        return PassStopped("stopped to be computed again")


@contextmanager
def interrupt_stops(engine: Stoppable) -> Iterator[None]:
    """Make Ctrl-C stop the engine inside the block, which then raises Interrupted. A second Ctrl-C raises
    KeyboardInterrupt.

    The interpreter immediately writes the signal number to a socket, and a thread reads it there. Does nothing outside
    the main thread, because Python delivers signals only there.
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
        engine.stop()  # the watcher may not have started yet, or may have ended
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
    """Defer Ctrl-C and SIGTERM to the end of the block. Needed for native code with callbacks."""
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
    """Call `handle` with the interrupted frame on Ctrl-C inside the block, instead of raising KeyboardInterrupt."""
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
    """Call `note` on SIGTERM inside the block, and the process's own handler at the end of the block."""
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
    """Return whether this is the main thread and SIGINT has its default handler."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
