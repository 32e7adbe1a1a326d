"""Standard streams of a process that work even if they are closed, full, or have another encoding.

A log line that cannot be written never raises and never stops its writer. Lines of standard error go through a bounded
queue to a thread that may block. A non-blocking descriptor is no alternative: that setting belongs to the open file,
which other processes share.
"""

from __future__ import annotations

import atexit
import codecs
import io
import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

OUTPUT = "standard output"  # the name of standard output in errors
_MOST_LINES = 1000  # lines that wait for a reader; further lines are dropped
_PROMPT_S = 0.1  # time to wait for a line to be written, so that both streams keep their order on a terminal
_END_S = 1.0  # time for a slow reader when the process ends
_LOOK_MS = 1000  # time between two attempts on a descriptor that another program made non-blocking
_BYTES_OR_MARK = "edge.bytes-or-mark"  # name of an encoding error handler


def protect_streams(*, is_command: bool = True) -> None:
    """Make standard error lossy, open closed streams, and replace characters that a stream's encoding lacks.

    Call this once, before the process opens any other file.

    is_command: False leaves standard output unchanged, for a process whose output is a protocol.
    """
    global _is_command
    _is_command = is_command
    _open_closed()
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not isinstance(getattr(sys.stderr, "buffer", None), _LossyWriter):
        sys.stderr = _lossy(2, sys.stderr)
    if is_command and not isinstance(getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Output):
        is_terminal = os.isatty(1)
        codecs.register_error(_BYTES_OR_MARK, _bytes_or_mark)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(1, "w", closefd=False)),
            encoding=_encoding(sys.stdout),
            errors="replace" if is_terminal else _BYTES_OR_MARK,
            line_buffering=is_terminal,
            write_through=bool(getattr(sys.stdout, "write_through", False)),
        )


def output_as_log() -> None:
    """Treat standard output like standard error, for a server that prints only status lines there."""
    if isinstance(getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Output):
        sys.stdout = _lossy(1, sys.stdout)


def give_up_output() -> None:
    """Drop buffered standard output and discard the rest. The interpreter flushes it once more when it ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def note_once(subject: str, line: str) -> None:
    """Print a line on standard error, once for each subject and only in the process of a command.

    Child processes, and programs that import edge, print none.
    """
    if _is_command and subject not in _noted:
        _noted.add(subject)
        sys.stderr.write(f"edge: {''.join(c if c.isprintable() else ' ' for c in line)}\n")


_noted: set[str] = set()
_is_command = False


def _open_closed() -> None:
    """Put /dev/null in the place of closed standard streams.

    Otherwise the next file or socket would get their numbers, and native code would write its messages into it. Writing
    to a closed standard output remains an error.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                opened = os.open(os.devnull, mode)
                if opened != descriptor:
                    os.dup2(opened, descriptor)
                    os.close(opened)
                os.set_inheritable(descriptor, True)


def _lossy(descriptor: int, instead_of: object) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        _LossyWriter(descriptor),  # type: ignore[arg-type]
        encoding=_encoding(instead_of),
        errors="backslashreplace",
        line_buffering=True,
    )


def _encoding(stream: object) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def _bytes_or_mark(error: UnicodeError) -> tuple[bytes, int]:
    """Encode the bytes of a file name that is not text unchanged, and any other character as a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return b"".join(bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff" else b"?" for c in lacking), error.end


class _Output(io.FileIO):
    """Standard output. Errors carry its name. It waits for a descriptor that another program made non-blocking."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            while (n_bytes := super().write(data)) is None:
                _wait_for(1)
        except OSError as error:
            raise OSError(error.errno, error.strerror, OUTPUT) from None
        return n_bytes


class _LossyWriter(io.RawIOBase):
    """Raw stream that never raises, and never blocks for longer than _PROMPT_S."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_ending = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # a child has no writer thread yet, and its own lines
        atexit.register(self._end)

    def _begin(self) -> None:
        self._lines: queue.SimpleQueue[tuple[bytes, Callable[[], object]]] = queue.SimpleQueue()  # safe in a signal
        self._starting = threading.Lock()
        self._has_thread = False
        self._is_prompt = True  # the reader keeps up, as far as known
        self._dropped = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        line, written = bytes(data), threading.Event()
        if self._is_ending:  # there is no writer thread any more, and a new one could not start
            self._write_if_read(line)
            return len(line)
        if self._lines.qsize() >= _MOST_LINES:
            self._dropped += 1
            return len(line)
        self._lines.put((line, written.set))
        if not self._has_thread and self._starting.acquire(blocking=False):
            with suppress(RuntimeError):  # a thread cannot start: memory is short, or the interpreter ends
                threading.Thread(target=self._run, name="log lines", daemon=True).start()
                self._has_thread = True
            self._starting.release()
        if self._is_prompt and not written.wait(_PROMPT_S):
            self._is_prompt = False
        return len(line)

    def _run(self) -> None:
        while True:
            line, written = self._lines.get()
            self._write(line)
            written()
            if self._lines.empty():
                self._is_prompt = True
                dropped, self._dropped = self._dropped, 0
                if dropped:
                    self._write(f"edge: {dropped} lines were dropped here, because no program read them\n".encode())

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        with suppress(OSError):  # the stream is closed, or its disk is full
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:
                    _wait_for(self._descriptor)

    def _write_if_read(self, line: bytes) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        for start in range(0, len(line), select.PIPE_BUF):
            if poll.poll(0):  # a ready pipe has room for this many bytes
                self._write(line[start : start + select.PIPE_BUF])

    def _end(self) -> None:
        if self._has_thread:
            last = threading.Event()
            self._lines.put((b"", last.set))
            last.wait(_END_S)
        self._is_ending = True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def _wait_for(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll(_LOOK_MS)
