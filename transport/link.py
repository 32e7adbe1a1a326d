"""Base of all links: ordered frames to one peer and back, each wait with a named deadline.

A link breaks once: after the first error it is closed and every further call raises LinkClosed. One thread may send
while another receives.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NoReturn

from transport.errors import LinkClosed, LinkTimeout, Refused, TransportError
from transport.frame import HEADER_BYTES, MAX_REASON, SEQUENCES, Buffer, Frame, Kind, pack_header
from transport.received import ReceivedFrames

PART_BYTES = 1 << 20  # limit of a large payload's part in one frame; a gRPC message can have four times as many
IDLE_S = 7 * 86400.0  # wait for the next command: users may pause for long, and a broken link is noticed anyway
CONTROL_BYTES = 1 << 20  # default limit of a payload in `receive`
_GOODBYE_S = 0.05  # time for the last frame of a link, which is optional


@dataclass(frozen=True)
class Deadlines:
    """Longest time of each kind of wait, in seconds. Messages of LinkTimeout use these names."""

    connect_timeout_s: float = 5.0  # time to connect to a peer and complete the handshake
    step_timeout_s: float = 30.0  # time for a peer to send an expected frame
    send_timeout_s: float = 30.0  # time for a peer to accept sent data


DEFAULTS = Deadlines()


class Link(ABC):
    """Connection to one peer. Implementations move bytes; sequence numbers and errors are handled here."""

    kind: str = "?"  # tcp, grpc, memory
    local_address: str = ""  # network address of this end, or "" if it has none

    def __init__(self, peer: str, deadlines: Deadlines = DEFAULTS) -> None:
        self.peer = peer  # name of the peer in messages
        self.deadlines = deadlines
        self.broken: TransportError | None = None  # error that ended the link
        self.sent_bytes = 0  # payload bytes since the link was made
        self.received_bytes = 0
        self.receive_s = 0.0  # time in `receive` and `receive_into`, most of which is waiting for the peer
        self._sent = 0
        self._received = ReceivedFrames(peer)
        self._breaking = threading.Lock()
        self._sending = threading.Lock()  # held while a frame is sent, so that a last frame cannot get inside it

    def send(self, payload: Buffer = b"", kind: Kind = Kind.DATA, timeout_s: float | None = None) -> None:
        """Send one frame; the payload may be changed afterwards.

        Raises LinkTimeout if the peer accepts no data within `timeout_s` (default: `send_timeout_s`), and LinkClosed if
        the peer has disconnected.
        """
        self._check()
        view = memoryview(payload).cast("B")
        with self._sending:
            header = pack_header(kind, len(view), self._sent)
            self._sent = (self._sent + 1) % SEQUENCES
            try:
                self._write(header, view, self.deadlines.send_timeout_s if timeout_s is None else timeout_s)
            except TransportError as error:
                self._fail(error)
            self.sent_bytes += len(view)

    def send_behind(self, head: bytes, payload: Buffer) -> None:
        """Send `head` as a CONTROL frame, followed by `payload` as a DATA frame.

        If the kind of link allows it, both are sent in one call, so that the payload is there when the peer has read
        the head. Raises the errors of `send`.
        """
        self._check()
        view = memoryview(payload).cast("B")
        with self._sending:
            first = pack_header(Kind.CONTROL, len(head), self._sent)
            second = pack_header(Kind.DATA, len(view), (self._sent + 1) % SEQUENCES)
            self._sent = (self._sent + 2) % SEQUENCES
            try:
                self._write_both(first + head, second, view, self.deadlines.send_timeout_s)
            except TransportError as error:
                self._fail(error)
            self.sent_bytes += len(head) + len(view)

    def receive(self, timeout_s: float | None = None, max_bytes: int = CONTROL_BYTES) -> Frame:
        """Receive the next frame, of at most `max_bytes`. The default wait is `step_timeout_s`.

        Raises LinkTimeout, LinkClosed, ProtocolError, or Refused if the peer sent a reason for giving up.
        """
        self._check()
        began = time.perf_counter()
        try:
            frame = self._read(self._time(timeout_s), max_bytes)
            self._received.raise_last(frame.kind, frame.payload)
        except TransportError as error:
            self._fail(error)
        self.received_bytes += len(frame.payload)
        self.receive_s += time.perf_counter() - began
        return frame

    def receive_into(self, buffer: Buffer, timeout_s: float | None = None, kind: Kind = Kind.DATA) -> None:
        """Fill `buffer` with the payload of the next frame, which must be of this kind and of exactly this size."""
        self._check()
        view = memoryview(buffer).cast("B")
        began = time.perf_counter()
        try:
            self._read_into(view, self._time(timeout_s), kind)
        except TransportError as error:
            self._fail(error)
        self.received_bytes += len(view)
        self.receive_s += time.perf_counter() - began

    def close(self, reason: str = "") -> None:
        """Close the link, and notify the peer if that is possible without waiting. Closing twice is harmless."""
        self._break(LinkClosed(f"the link to {self.peer} was closed here"), Kind.CLOSE, reason)

    def refuse(self, reason: str) -> None:
        """Refuse the peer and close: its next receive raises Refused with this reason."""
        self._break(LinkClosed(f"{self.peer} was refused: {reason}"), Kind.ERROR, reason)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Each kind of link implements these methods.

    @abstractmethod
    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        """Send the bytes of one frame within `timeout_s`."""

    def _write_both(self, frame: bytes, header: bytes, payload: memoryview, timeout_s: float) -> None:
        """Send two frames, one after the other. A link overrides this method if it can send both in one call."""
        self._write(frame[:HEADER_BYTES], memoryview(frame)[HEADER_BYTES:], timeout_s)
        self._write(header, payload, timeout_s)

    @abstractmethod
    def _read(self, timeout_s: float, max_bytes: int) -> Frame:
        """Read the next frame, and check it with `self._received`."""

    def _read_into(self, buffer: memoryview, timeout_s: float, kind: Kind) -> None:
        """Read the next frame's payload into `buffer`. A link overrides this method if that saves a copy."""
        frame = self._read(timeout_s, len(buffer))
        self._received.expect(frame.kind, frame.payload, kind, len(buffer))
        buffer[:] = frame.payload

    @abstractmethod
    def _end(self) -> None:
        """Free the resources of the link. This is called once."""

    # All kinds of links share these methods.

    def _time(self, timeout_s: float | None) -> float:
        """Return the timeout of a receive in seconds: `timeout_s`, or the default if it is None."""
        return self.deadlines.step_timeout_s if timeout_s is None else timeout_s

    def _timeout(self, timeout_s: float) -> LinkTimeout:
        named = "step_timeout_s" if timeout_s == self.deadlines.step_timeout_s else "the time given"
        return LinkTimeout(f"{self.peer} sent nothing for {timeout_s:g} s ({named})")

    def _send_timeout(self) -> LinkTimeout:
        return LinkTimeout(f"{self.peer} took no more data for {self.deadlines.send_timeout_s:g} s (send_timeout_s)")

    def _gone(self, cause: object = None) -> LinkClosed:
        return LinkClosed(f"{self.peer} went away" + (f": {cause}" if cause else ""))

    def _check(self) -> None:
        if self.broken is not None:
            raise LinkClosed(f"the link to {self.peer} is broken: {self.broken}")

    def _send_last(self, kind: Kind, reason: str) -> None:
        if not self._sending.acquire(blocking=False):
            return  # another thread is sending a frame
        text = reason.encode(errors="replace")[:MAX_REASON]
        try:
            self._write(pack_header(kind, len(text), self._sent), memoryview(text), _GOODBYE_S)
        except (TransportError, OSError):
            pass  # the last frame is optional
        finally:
            self._sending.release()

    def _fail(self, error: TransportError) -> NoReturn:
        """Break the link because of `error`, and raise it.

        If another thread closed the link meanwhile, raise that reason, unless `error` is the peer's own reason.
        The thread that sends may notice the end before the thread that receives that reason.
        """
        if self.broken is not None and not isinstance(error, Refused):
            raise LinkClosed(str(self.broken)) from error
        self._break(error)
        raise error

    def _break(self, why: TransportError, last: Kind | None = None, reason: str = "") -> None:
        """Close because of `why`, unless the link is broken already. last: kind of a last frame with the reason."""
        with self._breaking:
            if self.broken is not None:
                return
            self.broken = why
        # Set the reason first: the peer may hang up after its last frame, and a waiting thread must see the reason.
        if last is not None:
            self._send_last(last, reason)
        self._end()


def send_parts(link: Link, payload: Buffer) -> None:
    """Send a payload of any size in DATA frames of up to PART_BYTES. Raises the errors of `Link.send`."""
    view = memoryview(payload).cast("B")
    for lo in range(0, len(view), PART_BYTES):
        link.send(view[lo : lo + PART_BYTES])


def receive_parts(link: Link, buffer: Buffer) -> None:
    """Fill `buffer` with the payload that `send_parts` sends. Raises the errors of `Link.receive`."""
    view = memoryview(buffer).cast("B")
    for lo in range(0, len(view), PART_BYTES):
        link.receive_into(view[lo : lo + PART_BYTES])
