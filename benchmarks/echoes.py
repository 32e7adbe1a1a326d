"""Baselines of links: sockets and gRPC streams with nothing around them, and an echo that takes either."""

from __future__ import annotations

import os
import queue
import socket
import struct
import time
from typing import Any, Protocol

WAIT_S = 10  # for a bare socket's bytes; links have deadlines of their own
BARE_METHOD = "/edge.Bare/Echo"


class End(Protocol):
    """Interface of bare sockets, bare streams and links."""

    def send(self, payload: Any) -> None: ...
    def receive_into(self, buffer: Any) -> None: ...


class Bare:
    """A blocking stream socket with nothing around it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own deadline: Python's settimeout would add a poll before each call.
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", WAIT_S, 0))
        self.socket = sock
        self.send = sock.sendall

    def receive_into(self, buffer: Any) -> None:
        view = memoryview(buffer)
        while view:
            view = view[self._some(view) :]

    def _some(self, view: memoryview) -> int:
        got = self.socket.recv_into(view)
        if not got:
            raise ConnectionError("the other rank went away")
        return got


class BarePolling(Bare):
    """The same, asking again and again as a TcpLink does, and never blocking."""

    def _some(self, view: memoryview) -> int:
        deadline = time.perf_counter() + WAIT_S
        while time.perf_counter() < deadline:
            try:
                return self.socket.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        raise TimeoutError("the other rank sent nothing")


class BareStream:
    """A gRPC stream of raw bytes with nothing around it; the server's end echoes by itself."""

    def __init__(self, channel: Any) -> None:
        outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.call = channel.stream_stream(BARE_METHOD)(iter(outgoing.get, None))
        self.send = outgoing.put

    def receive_into(self, buffer: Any) -> None:
        next(self.call)


def ping(end: End, n_bytes: int, n: int, warm_up: int) -> list[float]:
    """Seconds of each message of `n_bytes` there and back."""
    payload, back, times = bytes(n_bytes), bytearray(n_bytes), []
    for _ in range(warm_up + n):
        began = time.perf_counter()
        end.send(payload)
        end.receive_into(back)
        times.append(time.perf_counter() - began)
    return times[warm_up:]


def echo(end: End, n_bytes: int, n: int) -> None:
    """Be the other end of `ping`; n: with the warm-up."""
    buffer = bytearray(n_bytes)
    for _ in range(n):
        end.receive_into(buffer)
        end.send(buffer)
