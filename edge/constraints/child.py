"""Process that follows constraints: one for a model, which knows the vocabulary, and a fork of it for each answer.

The kernel limits each fork: what takes too much processor time, or more memory than there is, ends that fork and its
answer alone. The first process compiles nothing. It starts forks, reports how each ended, and kills those whose socket
the parent has closed. It ends when the parent does.

On the socket of a fork, requests and answers are lines of JSON. An answer with "mask" is followed by the rows of
allowed tokens, as bits. `accept` has no answer: its error is reported by the answer to the next request.
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
from edge.constraints.constraint import Mask
from edge.constraints.matchers import Matcher, Matchers
from edge.constraints.process import COMPILE_S, MOST_AT_ONCE_S, ROOM_BYTES, TOKEN_S, WITH_TOKENIZER
from edge.errors import SamplingError
from edge.llama.llama import Model

_LEAST_S = 0.002  # of a timer: 0 would mean no timer


def main() -> None:
    """Start forks until the parent has gone."""
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
                with suppress(SamplingError, ImportError):  # the fork tries again, and reports the error
                    _ = matchers.tokenizer
            forks.start(socket.socket(fileno=descriptors[0]), control, matchers)


class _Forks:
    """The running forks."""

    def __init__(self) -> None:
        self.poll = select.poll()
        # By socket, for each fork: its process id, its socket to the parent, and a socket that shows us its end.
        self._by_handle: dict[int, tuple[int, socket.socket, socket.socket]] = {}

    def start(self, its_socket: socket.socket, control: socket.socket, matchers: Matchers) -> None:
        """Fork a process for one answer."""
        life, its_life = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for sock in {control, life, *(sock for _, *sockets in self._by_handle.values() for sock in sockets)}:
                sock.close()  # a copy in this fork would hide that the other end was closed
            _die_with(its_life)
            _Fork(its_socket, matchers).serve()
            os._exit(0)
        its_life.close()
        for sock in (its_socket, life):
            self._by_handle[sock.fileno()] = pid, its_socket, life
            self.poll.register(sock, 0)  # hang-ups alone

    def attend(self, handle: int) -> None:
        """Reap a fork: the parent has closed its socket, or it has ended."""
        if handle not in self._by_handle:  # both happened, and the first was attended to
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
    """Let SIGIO end this process when the other end of a socket is closed, also inside native code."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # it was closed before
        os._exit(0)


class _Fork:
    """Follows one constraint, in a process of its own."""

    def __init__(self, its_socket: socket.socket, matchers: Matchers) -> None:
        self._stream, self._matchers = its_socket.makefile("rwb"), matchers
        self._left_s = MOST_AT_ONCE_S
        self._error: str | None = None  # of a request that has no answer

    def serve(self) -> None:
        """Answer until the parent closes the socket."""
        prefer_oom_kill()
        with suppress(OSError):
            request = json.loads(self._stream.readline())
            limit_memory(ROOM_BYTES + 8 * len(request["source"]))
            limit_cpu(COMPILE_S)
            try:
                matcher = self._matchers.matcher(request["kind"], request["source"])
                matcher.mask()  # most constraints that cannot be followed fail here, before an answer has begun
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
        """Count processor time inside the block; a request that uses more than is left ends this process."""
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
    with suppress(OSError):  # the parent has gone
        main()
    sys.stdout.flush()
    os._exit(0)  # nothing is left to free
