"""Lanes: several links over one, each with frames in an order of its own.

Groups of requests that are computed by turns exchange their tensors each over a lane, so that no group waits for a
frame of another. A frame of a lane travels in a LANE frame of the link below: one byte with the number of the lane,
then the frame with its header. A thread of each link reads all that comes, whoever waits for it: so ranks that send
large tensors to each other over several lanes never block each other.

A lane that ends, or breaks, ends the link below and all of its lanes: what they carry belongs together.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from transport.errors import LinkClosed, ProtocolError, TransportError
from transport.frame import HEADER_BYTES, Frame, Kind, parse_frame
from transport.link import IDLE_S, Link

_LAST_S = 1.0  # for the thread that reads to notice that the link below has ended
_MOST_BYTES = 4 << 20  # of a frame: the larger tensors are sent in parts of a mebibyte
_MOST_WAITING = 256 << 20  # bytes that came for a lane and were not taken: more than the states of any step
_FRAME_BYTES = 512  # that a frame which waits takes beside its payload
_HEAD_BYTES = 1 + HEADER_BYTES


def lanes(link: Link, n: int) -> list[Link]:
    """Return `n` lanes of a link, which nothing else may use from now on."""
    trunk = Trunk(link, n)
    return [Lane(trunk, number) for number in range(n)]


class Trunk:
    """The link below, and the frames that have come for lanes."""

    def __init__(self, link: Link, n: int) -> None:
        """n: number of lanes."""
        self.link = link
        self._waiting: list[deque[memoryview]] = [deque() for _ in range(n)]
        self._bytes = [0] * n  # of these
        self._changed = threading.Condition()
        self._error: TransportError | None = None  # why nothing comes any more
        threading.Thread(target=self._read_all, daemon=True, name="lanes").start()

    def receive(self, number: int, timeout_s: float) -> memoryview | None:
        """Return the next frame of a lane; None where none came in time. The errors of `Link.receive`, once all that
        came before is taken."""
        waiting = self._waiting[number]
        with self._changed:
            self._changed.wait_for(lambda: waiting or self._error, timeout_s)
            if waiting:
                frame = waiting.popleft()
                self._bytes[number] -= len(frame) + _FRAME_BYTES
                return frame
            if self._error is None:
                return None
            raise type(self._error)(*self._error.args) from self._error

    def _read_all(self) -> None:
        """Queue what comes for its lane, until the link ends."""
        try:
            while True:
                self._queue(self.link.receive(IDLE_S, _MOST_BYTES))
        except TransportError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            with suppress(TransportError):
                self.link.close()

    def _queue(self, outer: Frame) -> None:
        data = memoryview(outer.payload)
        if outer.kind is not Kind.LANE or len(data) < _HEAD_BYTES or data[0] >= len(self._waiting):
            raise ProtocolError(
                f"{self.link.peer} sent {len(data)} bytes of {outer.kind.name} where a frame of one of"
                f" {len(self._waiting)} lanes was expected; use the same version on all devices"
            )
        number, frame = data[0], data[1:]
        with self._changed:
            self._waiting[number].append(frame)
            self._bytes[number] += len(frame) + _FRAME_BYTES
            if self._bytes[number] > _MOST_WAITING:
                raise ProtocolError(
                    f"{self.link.peer} sent {len(self._waiting[number])} frames, with {self._bytes[number]} bytes,"
                    " that nobody waits for"
                )
            self._changed.notify_all()


class Lane(Link):
    """One lane, as a link. Closing it closes the link below."""

    def __init__(self, trunk: Trunk, number: int) -> None:
        super().__init__(trunk.link.peer, trunk.link.deadlines)
        self.kind, self.local_address = trunk.link.kind, trunk.link.local_address
        self._trunk, self._number = trunk, number

    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        try:
            self._trunk.link.send(bytes((self._number,)) + header + payload, Kind.LANE, timeout_s)
        except LinkClosed:
            while True:  # what came before may say why; when all is taken, this raises why the link below ended
                frame = self._read(_LAST_S, _MOST_BYTES)
                self._received.raise_last(frame.kind, frame.payload)

    def _read(self, timeout_s: float, max_bytes: int) -> Frame:
        data = self._trunk.receive(self._number, timeout_s)
        if data is None:
            raise self._timeout(timeout_s)
        frame = self._received.parsed(parse_frame, data)
        self._received.limit(frame.kind, len(frame.payload), max_bytes)
        return frame

    def _end(self) -> None:
        with suppress(TransportError):
            self._trunk.link.close()
