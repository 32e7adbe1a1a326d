"""Signal handling: a command ends within a second of Ctrl-C or SIGTERM, whatever it is doing.

Python raises a signal's exception in the main thread, between two bytecodes. The main thread may be in native code or
wait for other threads, so the exception can come late. A second thread therefore waits for the signal, too. It grants
the main thread a grace period, removes temporary files and ends the process.
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

from devices.echo import restore_echo
from devices.files import remove_temporary

GRACE_S = 0.6  # seconds from the first signal until the process is ended
_SHOW_CURSOR = "\x1b[?25h"  # escape sequence that undoes the hidden cursor of a progress bar
_grace_s = GRACE_S
_ended_by_signals = False
_terminated = False
_signalled = threading.Event()
_NOTED_S = 0.1  # seconds within which the watching thread sees a signal
_wakeup: socket.socket | None = None  # where the interpreter writes the numbers of signals
_ALL_READ = 0  # written after them, as no signal has this number
_all_read = threading.Event()
_READ_LIMIT_S = 10.0  # only against a hang


def end_by_signals() -> None:
    """Make SIGTERM raise SystemExit, and end this process soon after SIGINT or SIGTERM.

    Call it once, in the main thread.
    """
    global _ended_by_signals, _wakeup
    _ended_by_signals = True
    signal.signal(signal.SIGTERM, _raise_exit)
    sys.unraisablehook = _unraisable
    reader, _wakeup = socket.socketpair()
    _wakeup.setblocking(False)
    signal.set_wakeup_fd(_wakeup.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


@contextmanager
def signals_are_for_the_program() -> Iterator[None]:
    """Leave signals to the program inside this context.

    For example, a chat stops the current answer, and a daemon closes its sessions. A signal that arrived inside the
    context does not end the process later, even if the watching thread reads it late.
    """
    global _ended_by_signals
    before, _ended_by_signals = _ended_by_signals, False
    try:
        yield
    finally:
        _wait_until_all_read()
        _ended_by_signals = before


@contextmanager
def grace(seconds: float) -> Iterator[None]:
    """Extend the grace period after the first signal inside this context, so that results can be written.

    seconds: the grace period. A second signal still ends the process after GRACE_S.
    """
    global _grace_s
    before, _grace_s = _grace_s, seconds
    try:
        yield
    finally:
        _grace_s = before


def end_soon(number: int) -> None:
    """End the process after the grace period, if `end_by_signals` was called.

    Threads that have seen a signal call this function.
    """
    if not _ended_by_signals or number not in (signal.SIGINT, signal.SIGTERM):
        return
    seconds = GRACE_S if _signalled.is_set() else _grace_s
    _signalled.set()
    threading.Thread(target=_end, args=(number, seconds), name="ending", daemon=True).start()


def _watch(reader: socket.socket) -> None:
    while number := reader.recv(1):
        if number[0] == _ALL_READ:
            _all_read.set()
        end_soon(number[0])


def _wait_until_all_read() -> None:
    """Wait until the watching thread has read all signals so far. Call it in the main thread."""
    if _wakeup is not None:
        _all_read.clear()
        with suppress(BlockingIOError):  # full of unread signals
            _wakeup.send(bytes([_ALL_READ]))
            _all_read.wait(_READ_LIMIT_S)


def _end(number: int, after_s: float) -> NoReturn:
    time.sleep(after_s)
    with suppress(Exception):  # no error may keep this process from ending
        remove_temporary()
        restore_echo()
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
    os._exit(128 + number)


def terminated() -> bool:
    """Return True if SIGTERM was received, so that the caller reports an interruption."""
    return _terminated


def signalled() -> bool:
    """Return True if a signal is ending this process.

    The signal is then the cause of unexpected errors: for example, importing a native module turns KeyboardInterrupt
    into ImportError.
    """
    return _ended_by_signals and _signalled.wait(_NOTED_S)


def _raise_exit(number: int, _: object) -> NoReturn:
    global _terminated
    _terminated = True
    raise SystemExit(128 + number)


def _unraisable(unraisable: Any) -> None:
    """Print no traceback if a signal raised its exception in a native callback or a finalizer."""
    if not isinstance(unraisable.exc_value, (KeyboardInterrupt, SystemExit)):
        sys.__unraisablehook__(unraisable)
