"""Echo of the terminal: off while a command computes, so that typed keys do not appear in its output.

Typed keys wait in the terminal for the next program that reads them, such as the prompt of a chat.
"""

from __future__ import annotations

import os
import signal
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_INPUT, _OUTPUT = 0, 1
_LFLAG, _IFLAG = 3, 0  # positions in the attributes of a terminal
_usual: list[Any] | None = None  # attributes of the terminal before its echo was turned off
_lock = threading.RLock()  # a signal handler may interrupt the thread that holds it


@contextmanager
def echo_off() -> Iterator[None]:
    """Turn off the echo of the terminal in this block. Do nothing if input or output is no terminal.

    Enter, Ctrl-D and backspace wait unchanged, like other keys. Ctrl-C and Ctrl-Z still send their signals.
    """
    global _usual
    if _usual is not None or not (os.isatty(_INPUT) and os.isatty(_OUTPUT)):
        yield
        return
    try:
        _usual = termios.tcgetattr(_INPUT)
    except termios.error:  # the terminal has gone
        yield
        return
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGTSTP, lambda *_: suspend()) if is_main else None
    try:
        _turn_off()
        yield
    finally:
        restore_echo()
        _usual = None
        if is_main:
            signal.signal(signal.SIGTSTP, handler or signal.SIG_DFL)  # None: another language had set it


def restore_echo() -> None:
    """Turn the echo on again, if it was on before `echo_off`. Safe in any thread."""
    if _usual is not None:
        _set(_usual)


def suspend() -> None:
    """Stop this process until it is continued, with the terminal as it was before `echo_off`."""
    restore_echo()
    os.kill(os.getpid(), signal.SIGSTOP)
    _turn_off()


def _turn_off() -> None:
    if _usual is not None:
        quiet = list(_usual)
        quiet[_LFLAG] &= ~(termios.ECHO | termios.ICANON)
        quiet[_IFLAG] &= ~termios.ICRNL
        _set(quiet)


def _set(attributes: list[Any]) -> None:
    """Set the attributes of the terminal. A process in the background would be stopped for it, so it sets none."""
    with _lock, suppress(OSError, termios.error):
        if os.tcgetpgrp(_INPUT) == os.getpgrp():
            termios.tcsetattr(_INPUT, termios.TCSANOW, attributes)
