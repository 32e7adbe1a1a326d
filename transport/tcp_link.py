"""A link over a stream socket: TCP, TLS over TCP, or a Unix socket inside one machine. The fast data plane.

The socket does not block. A wait first polls for a moment, because a wake-up from a blocking wait costs more than a
short message, then blocks in poll(2). The polling time grows if polling succeeds, and shrinks otherwise.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from transport.errors import ProtocolError, Refused, TransportError
from transport.frame import HEADER_BYTES, Frame, Kind, parse_header
from transport.link import DEFAULTS, Deadlines, Link

POLL_S = 400e-6  # longest polling before a blocking wait: a round trip on a fast wire, and little time of a core
_POLL_LEAST = 1 / 64  # share of POLL_S that remains if polling never pays, for instance with more ranks than cores
_SEND_BUFFER = 256 << 10  # Linux doubles it. Collectives rely on room for two of their chunks
# The kernel notices a silent loss (power, cable, Wi-Fi) after about idle + interval x probes seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
_VANISHED_MS = 5000  # the same while data is in flight: see `vanished`
_LOOK_S = 1.0  # time between two checks for a lost peer during a wait
_INFO_BYTES = 60
_TCP_INFO = 11  # socket.TCP_INFO, which only Linux has
_LAST_ACK = struct.Struct("=I")
_INTERNET = (socket.AF_INET, socket.AF_INET6)

yield_cpu: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class _Wait:
    """Deadline of one whole frame: a peer that sends single bytes does not prolong it."""

    __slots__ = ("deadline", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s

    def rest(self, timeout_s: float) -> _Wait:
        """Return the wait for the rest of a frame: until this deadline or `timeout_s` from now, whichever is
        earlier."""
        rest = _Wait(timeout_s)
        return rest if rest.deadline < self.deadline else self


class TcpLink(Link):
    """Frames over a connected stream socket, which it owns."""

    kind = "tcp"

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        deadlines: Deadlines = DEFAULTS,
        poll_s: float = POLL_S,
        streams: bool = False,
    ) -> None:
        """poll_s: maximum polling time of a wait before it blocks, in seconds; 0 for a rank that a CPU quota throttles.

        streams: True if the link carries tensors without replies. The kernel then lets the send buffer grow to the
        bytes in flight. On a path with a long delay a fixed buffer would limit each round trip to its size.
        """
        super().__init__(peer, deadlines)
        self._socket = sock
        if sock.family in _INTERNET:
            self.local_address = sock.getsockname()[0]
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._lock = threading.Lock()  # OpenSSL's state allows only one thread
        self._header = bytearray(HEADER_BYTES)
        self._poll_most_s = poll_s
        self._poll_s = poll_s
        self._info = sock.family in _INTERNET and sys.platform == "linux"
        tune(sock)
        if not streams:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The socket's descriptor, for poll(2)."""
        return self._socket.fileno()

    # Sending.

    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        if self._tls:
            self._write_all([memoryview(header + payload)], timeout_s)
        else:
            parts = [memoryview(header), payload]
            sent = self._try_send(parts)
            if sent < HEADER_BYTES + len(payload):  # rare, because a short message nearly always fits
                self._write_all(_after(parts, sent), timeout_s)

    def _write_both(self, frame: bytes, header: bytes, payload: memoryview, timeout_s: float) -> None:
        if self._tls:
            super()._write_both(frame, header, payload, timeout_s)
        else:
            self._write_all([memoryview(frame + header), payload], timeout_s)

    def _write_all(self, parts: list[memoryview], timeout_s: float) -> None:
        deadline = None
        while True:
            parts = _after(parts, self._try_send(parts))
            if not parts:
                return
            deadline = deadline or time.monotonic() + timeout_s
            self._wait_for_room(deadline)

    def _try_send(self, parts: list[memoryview]) -> int:
        """Send without waiting; return how many bytes went out."""
        try:
            if self._tls:
                with self._lock:
                    return self._socket.send(parts[0])
            return self._socket.sendmsg(parts)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except (OSError, ValueError) as error:  # ValueError: the socket was closed by another thread
            raise self._failed(error) from error

    def _wait_for_room(self, deadline: float) -> None:
        """Wait until the socket can take bytes."""
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLOUT)
        except ValueError as error:  # the socket was closed by another thread
            raise self._failed(error) from error
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._send_timeout()
            if poller.poll(min(left, _LOOK_S) * 1000):
                return
            self._look()

    # Receiving.

    def _read(self, timeout_s: float, max_bytes: int) -> Frame:
        header = self._header
        wait = _Wait(timeout_s)
        self._fill(memoryview(header), wait, inside=False)
        kind, length, _ = self._received.parsed(parse_header, header)
        self._received.limit(kind, length, max_bytes)
        payload = bytearray(length)
        self._fill(memoryview(payload), wait.rest(self.deadlines.step_timeout_s), inside=True)
        return Frame(kind, payload)

    def _read_into(self, buffer: memoryview, timeout_s: float, kind: Kind) -> None:
        """Read header and payload in one system call: the frame is nearly always the expected one."""
        header = memoryview(self._header)
        wait = _Wait(timeout_s)
        got = self._receive([header] if self._tls else [header, buffer], wait)
        if got < HEADER_BYTES:
            self._fill(header[got:], wait, inside=True)
            got = HEADER_BYTES
        received, length, _ = self._received.parsed(parse_header, header)
        got -= HEADER_BYTES
        if received is kind and length == len(buffer):
            if got < length:
                self._fill(buffer[got:], wait.rest(self.deadlines.step_timeout_s), inside=True)
            return
        # An unexpected frame ends the link. If it is the last frame of the peer, its reason may be partly in `buffer`.
        self._received.limit(received, length, len(buffer))
        payload = bytearray(buffer[: min(got, length)]).ljust(length, b"\0")
        self._fill(memoryview(payload)[got:], wait.rest(self.deadlines.step_timeout_s), inside=True)
        self._received.expect(received, payload, kind, len(buffer))

    def _fill(self, view: memoryview, wait: _Wait, inside: bool) -> None:
        """Read exactly this many bytes. inside: the stream must not end here, because a frame has begun."""
        while view:
            got = self._receive([view], wait, inside)
            inside = True
            view = view[got:]
            if view and time.monotonic() > wait.deadline:  # a peer that sends single bytes does not prolong the wait
                raise self._timeout(wait.timeout_s)

    def _receive(self, views: list[memoryview], wait: _Wait, inside: bool = False) -> int:
        """Wait for bytes; return their number.

        Raises LinkClosed at the end of the stream, or ProtocolError if it is inside a frame.
        """
        got = self._try_receive(views)
        if got is None:
            got = self._poll(views)
        if got is None:
            got = self._block(views, wait)
        if got:
            return got
        if inside:
            raise ProtocolError(f"the stream from {self.peer} ends inside a frame: it was cut off")
        raise self._gone("it closed the connection without giving a reason")

    def _poll(self, views: list[memoryview]) -> int | None:
        """Poll for a moment; return None if nothing came. The outcome sets the length of the next poll."""
        if not self._poll_most_s:
            return None
        deadline = time.perf_counter() + self._poll_s
        while time.perf_counter() < deadline:
            got = self._try_receive(views)
            if got is not None:
                self._poll_s = self._poll_most_s
                return got
            yield_cpu()  # the process that computes the data may need this core
        self._poll_s = max(self._poll_s / 2, self._poll_most_s * _POLL_LEAST)
        return None

    def _block(self, views: list[memoryview], wait: _Wait) -> int:
        began = time.perf_counter()
        while True:
            left = wait.deadline - time.monotonic()
            if left <= 0:
                raise self._timeout(wait.timeout_s)
            if not self._readable.poll(min(left, _LOOK_S) * 1000):
                self._look()
                continue
            got = self._try_receive(views)
            if got is not None:
                if time.perf_counter() - began < self._poll_most_s:
                    self._poll_s = self._poll_most_s  # a little more polling would have caught it
                return got

    def _look(self) -> None:
        """Raise LinkClosed if data is in flight to a peer that vanished, or the link was closed here.

        No other call notices this soon, and the descriptor may belong to another file later.
        """
        if self.broken is not None:
            raise self._gone()
        if self._info and vanished(self._socket_info()):
            raise self._gone("it no longer answers")

    def _socket_info(self) -> bytes:
        try:
            return self._socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        except OSError as error:
            raise self._failed(error) from error

    def _try_receive(self, views: list[memoryview]) -> int | None:
        """Receive without waiting; return the bytes received: 0 at the end of the stream, None if nothing is there
        yet."""
        try:
            if self._tls:
                with self._lock:
                    return self._socket.recv_into(views[0])
            if len(views) == 1:
                return self._socket.recv_into(views[0])
            return self._socket.recvmsg_into(views)[0]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except ssl.SSLEOFError:
            return 0  # without TLS's own goodbye; whether bytes are missing shows where in a frame we are
        except (OSError, ValueError) as error:
            raise self._failed(error) from error

    # Ending.

    def _failed(self, error: Exception) -> TransportError:
        if isinstance(error, ssl.SSLEOFError):
            return self._gone("it closed the connection without giving a reason")
        if isinstance(error, ssl.SSLError):
            # In TLS 1.3 a dialler learns only at its first read that it was rejected.
            if "ALERT" in (error.reason or ""):
                return Refused(f"{self.peer} refused this device: {error.reason}")
            return ProtocolError(f"the encrypted stream from {self.peer} is damaged: {error.reason or error}")
        return self._gone(getattr(error, "strerror", None) or error)

    def _end(self) -> None:
        # shutdown wakes a thread that waits in poll; close alone would not.
        # The lock keeps other threads out of TLS, whose next bytes would otherwise be sent without encryption.
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _after(parts: list[memoryview], n: int) -> list[memoryview]:
    """Return `parts` without their first `n` bytes."""
    while parts and n >= len(parts[0]):
        n -= len(parts[0])
        parts = parts[1:]
    return [parts[0][n:], *parts[1:]] if parts else []


def tune(sock: socket.socket) -> None:
    """Set a socket up for links: non-blocking, no delay for small messages, a dead peer noticed in seconds."""
    sock.setblocking(False)
    if sock.family in _INTERNET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def vanished(tcp_info: bytes) -> bool:
    """Return whether the peer vanished: Linux retransmits, and no answer came for some seconds.

    TCP_USER_TIMEOUT would be the kernel's own way. But it also ends a connection whose peer answers and is only too
    busy to read.

    tcp_info: the socket's TCP_INFO.
    """
    retransmits, probes = tcp_info[2], tcp_info[3]  # tcpi_retransmits, tcpi_probes: since the last sign of life
    (silent_ms,) = _LAST_ACK.unpack_from(tcp_info, 56)  # tcpi_last_ack_recv
    return max(retransmits, probes) >= 2 and silent_ms >= _VANISHED_MS
