"""Ctrl-C during native code: stop a decode at its next graph node instead of at its end."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_stops(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGINT calls `stop` at once, from another thread; KeyboardInterrupt follows when native code returns.

    Python runs its own handlers only between bytecodes, and one decode of a long prompt on a slow device is a minute
    of native code. The interpreter writes the signal's number to a socket right away, and a thread reads that.
    Does nothing outside the main thread, where Python has no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGINT:
                stop()

    watcher = threading.Thread(target=watch, name="interrupt", daemon=True)
    watcher.start()
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        writer.close()  # ends the watcher's recv
        watcher.join()
        reader.close()
