"""Child process that follows constraints. A parent process per model holds the vocabulary and forks for each answer.

The kernel limits each fork. A fork that exceeds its processor time or memory is killed, and only its own answer fails.
The forking process compiles nothing. It starts forks, reports their exit codes, and kills a fork when the server closes
the fork's socket. It ends when the server closes the control socket.

On a fork's socket, requests and answers are lines of JSON. An answer with "mask" is followed by rows of packed bits,
which mark the allowed tokens. `accept` has no answer: the answer to the next request reports its error.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from devices.processes.limits import limit_cpu, limit_memory, prefer_oom_kill
from edge.errors import SamplingError
from edge.llama.llama import Model
from edge.text.constraints.constraint import Mask
from edge.text.constraints.matchers import Matcher, Matchers
from edge.text.constraints.process import COMPILE_S, MOST_AT_ONCE_S, ROOM_BYTES, TOKEN_S, WITH_TOKENIZER

_LEAST_S = 0.002  # minimum of a timer: 0 would disable it


def main() -> None:
    """Start forks until the server closes the control socket."""
    control = socket.socket(fileno=os.dup(0))
    path = b""
    while not path.endswith(b"\n"):
        path += control.recv(1)
    matchers, forks = Matchers(Model(path[:-1].decode(), vocabulary_only=True)), _Forks()
    forks.poll.register(control, select.POLLIN)
    while True:
        for handle, _ in forks.poll.poll():
            if handle != control.fileno():
                forks.attend(handle)
                continue
            kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not kind:
                return
            if kind == WITH_TOKENIZER:
                with suppress(SamplingError, ImportError):  # the fork tries again and reports the error
                    _ = matchers.tokenizer
            forks.start(socket.socket(fileno=descriptors[0]), control, matchers)


class _Forks:
    """The running forks."""

    def __init__(self) -> None:
        self.poll = select.poll()
        # For each fork, by socket: its process id, its socket to the server, and a socket that is closed when it ends.
        self._by_handle: dict[int, tuple[int, socket.socket, socket.socket]] = {}

    def start(self, its_socket: socket.socket, control: socket.socket, matchers: Matchers) -> None:
        """Fork a process for one answer."""
        life, its_life = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for sock in {control, life, *(sock for _, *sockets in self._by_handle.values() for sock in sockets)}:
                sock.close()  # an open copy in this fork would hide that the other end was closed
            _die_with(its_life)
            _Fork(its_socket, matchers).serve()
            os._exit(0)
        its_life.close()
        for sock in (its_socket, life):
            self._by_handle[sock.fileno()] = pid, its_socket, life
            self.poll.register(sock, 0)  # no events except hang-ups

    def attend(self, handle: int) -> None:
        """Reap a fork after the server closed its socket or the fork ended."""
        if handle not in self._by_handle:  # both events occurred, and the first one was handled
            return
        pid, its_socket, life = self._by_handle[handle]
        if handle == its_socket.fileno():
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        for sock in (its_socket, life):
            del self._by_handle[sock.fileno()]
            self.poll.unregister(sock)
        with suppress(OSError):
            its_socket.send(_line(ended=os.waitstatus_to_exitcode(status)))
        its_socket.close()
        life.close()


def _die_with(life: socket.socket) -> None:
    """Make the kernel end this process with SIGIO when the other end of a socket is closed, even inside native code."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # the other end was already closed
        os._exit(0)


class _Fork:
    """Process that follows one constraint."""

    def __init__(self, its_socket: socket.socket, matchers: Matchers) -> None:
        self._stream, self._matchers = its_socket.makefile("rwb"), matchers
        self._left_s = MOST_AT_ONCE_S
        self._error: str | None = None  # error of a request that has no answer

    def serve(self) -> None:
        """Answer requests until the server closes the socket."""
        prefer_oom_kill()
        with suppress(OSError):
            request = json.loads(self._stream.readline())
            limit_memory(ROOM_BYTES + 8 * len(request["source"]))
            limit_cpu(COMPILE_S)
            try:
                matcher = self._matchers.matcher(request["kind"], request["source"])
                matcher.mask()  # detect most unusable constraints before the answer begins
            except Exception as error:
                self._send(error=_reason(error))
                return
            limit_cpu(0)
            self._send(n_vocab=self._matchers.n_vocab)
            for line in self._stream:
                self._answer(matcher, json.loads(line))

    def _answer(self, matcher: Matcher, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"is": "answered"}
        rows: list[Mask | None] = []
        if self._error is None:
            try:
                with self._spending():
                    if "accept" in request:
                        self._left_s = min(self._left_s + TOKEN_S, MOST_AT_ONCE_S)
                        matcher.accept(request["accept"])
                    elif "allows" in request:
                        answer["allowed"] = matcher.allows(request["allows"])
                    elif "masks" in request:
                        rows = matcher.masks(request["masks"])
                    else:
                        rows = [matcher.mask()]
            except Exception as error:
                self._error = _reason(error)
        if "accept" in request:
            return
        if self._error is not None:
            self._send(error=self._error)
            return
        if rows:
            answer["mask"] = [row is not None for row in rows]
        self._send(**answer)
        for row in rows:
            if row is not None:
                self._stream.write(np.packbits(row).data)
        self._stream.flush()

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Count processor time inside the block. A request that exceeds the remaining time ends this process."""
        limit_cpu(max(self._left_s, _LEAST_S))
        began = time.process_time()
        try:
            yield
        finally:
            self._left_s -= time.process_time() - began
            limit_cpu(0)

    def _send(self, **answer: Any) -> None:
        self._stream.write(_line(**answer))
        self._stream.flush()


def _reason(error: Exception) -> str:
    if isinstance(error, (MemoryError, RecursionError)):
        return f"this constraint needs too much memory: {type(error).__name__}"
    return str(error) if isinstance(error, SamplingError) else f"this constraint cannot be used: {error}"


def _line(**answer: Any) -> bytes:
    return json.dumps(answer).encode() + b"\n"


if __name__ == "__main__":
    with suppress(OSError):  # the server has ended
        main()
    sys.stdout.flush()
    os._exit(0)  # skip finalizers: nothing is left to free
