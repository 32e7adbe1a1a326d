"""A command ends within a second of Ctrl-C or SIGTERM, whatever it does then.

Python raises an exception for a signal between bytecodes of the main thread, and what that unwinds may wait for
threads. Neither happens soon where native code computes. So a thread waits for the signal, too: it allows the ordinary
end a moment, removes temporary files, and ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from devices.files import remove_temporary

GRACE_S = 0.6  # for the ordinary end, from the first signal on
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_grace_s = GRACE_S
_ended_by_signals = False
_terminated = False
_signalled = threading.Event()
_NOTED_S = 0.1  # for the thread to see a signal that has been raised


def end_by_signals() -> None:
    """From now on SIGTERM raises SystemExit, and it and SIGINT end this process soon. Once, in the main thread."""
    global _ended_by_signals
    _ended_by_signals = True
    signal.signal(signal.SIGTERM, _raise_exit)
    sys.unraisablehook = _unraisable
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, writer), name="signals", daemon=True).start()


@contextmanager
def signals_are_for_the_program() -> Iterator[None]:
    """Inside, the program itself decides what a signal does: a conversation stops an answer, a daemon sees to its
    sessions."""
    global _ended_by_signals
    before, _ended_by_signals = _ended_by_signals, False
    try:
        yield
    finally:
        _ended_by_signals = before


@contextmanager
def grace(seconds: float) -> Iterator[None]:
    """Inside, the ordinary end has so long from the first signal on: for what is worth being written. A second signal
    ends the process as soon as ever."""
    global _grace_s
    before, _grace_s = _grace_s, seconds
    try:
        yield
    finally:
        _grace_s = before


def end_soon(number: int) -> None:
    """Called from a thread that has seen a signal: ends the process after a moment, where signals do that."""
    if not _ended_by_signals or number not in (signal.SIGINT, signal.SIGTERM):
        return
    seconds = GRACE_S if _signalled.is_set() else _grace_s
    _signalled.set()
    threading.Thread(target=_end, args=(number, seconds), name="ending", daemon=True).start()


def _watch(reader: socket.socket, _writer: socket.socket) -> None:
    """_writer: held open for as long as the process lives."""
    while number := reader.recv(1):
        end_soon(number[0])


def _end(number: int, after_s: float) -> NoReturn:
    time.sleep(after_s)
    with suppress(Exception):  # nothing may keep this process
        remove_temporary()
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
    os._exit(128 + number)


def terminated() -> bool:
    """Whether SIGTERM was received: what it stops may say that it was interrupted."""
    return _terminated


def signalled() -> bool:
    """Whether a signal ends this process: an error that nobody expects is then what it made of native code. Importing a
    native module, for one, turns KeyboardInterrupt into ImportError."""
    return _ended_by_signals and _signalled.wait(_NOTED_S)


def _raise_exit(number: int, _: object) -> NoReturn:
    global _terminated
    _terminated = True
    raise SystemExit(128 + number)


def _unraisable(what: Any) -> None:
    """A signal's exception in a callback of native code, or at the end of an object, is no bug to show."""
    if not isinstance(what.exc_value, (KeyboardInterrupt, SystemExit)):
        sys.__unraisablehook__(what)
