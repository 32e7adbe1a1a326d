"""A link over several TCP connections, for long fast paths that one connection does not fill.

What one connection has under way is bounded by its buffers, which a system limits (on Linux a few mebibytes), and a
packet that is lost halves it. A frame is cut into pieces, which go out over the connections in turn, each in a STRIPE
frame of its own; the other end takes them in the same order. So frames stay in order, and each connection is sealed and
checked as one alone is. A short frame is one piece: it takes no longer than over one connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle

from transport.errors import ProtocolError, TransportError
from transport.frame import HEADER_BYTES, Frame, Header, Kind, parse_header
from transport.link import DEFAULTS, Deadlines, Link
from transport.measure import LinkFigures

MOST_STRIPES = 8
PIECE_BYTES = 64 << 10  # with the header in the first one
_LEAST_STRIPES = 4  # so many buffers, at their least, hold what collectives send before they receive
_FAR_S = 0.005  # a shorter round trip is filled by any buffer
_STREAM_BYTES = 2 << 20  # that a connection has under way: half of its buffer is what the system needs for packets
_FULL_BYTES_PER_S = 125e6  # a fast home network, or a line of a fast one
_BUFFER_BYTES = 192 << 10  # half of what a link's send buffer holds: with less under way, the path is what holds it


class StripedLink(Link):
    """Frames over several connected links of one kind, which it owns."""

    def __init__(self, links: Sequence[Link], deadlines: Deadlines = DEFAULTS) -> None:
        """links: in the same order at both ends."""
        super().__init__(links[0].peer, deadlines)
        self.kind, self.local_address = links[0].kind, links[0].local_address
        self.links = tuple(links)
        self._out: Iterator[Link] = cycle(links)
        self._in: Iterator[Link] = cycle(links)

    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        first, deadline = PIECE_BYTES - HEADER_BYTES, time.monotonic() + timeout_s
        next(self._out).send(header + payload[:first], Kind.STRIPE, timeout_s)
        for lo in range(first, len(payload), PIECE_BYTES):
            left_s = max(0.0, deadline - time.monotonic())
            next(self._out).send(payload[lo : lo + PIECE_BYTES], Kind.STRIPE, left_s)

    def _read(self, timeout_s: float, max_bytes: int) -> Frame:
        deadline = time.monotonic() + timeout_s
        header, begun = self._begin(timeout_s)
        self._received.limit(header.kind, header.length, max_bytes)
        payload = bytearray(header.length)
        self._rest(memoryview(payload), begun, deadline)
        return Frame(header.kind, payload)

    def _read_into(self, buffer: memoryview, timeout_s: float, kind: Kind) -> None:
        deadline = time.monotonic() + timeout_s
        header, begun = self._begin(timeout_s)
        if header.kind is kind and header.length == len(buffer):
            self._rest(buffer, begun, deadline)
            return
        self._received.limit(header.kind, header.length, len(buffer))
        payload = bytearray(header.length)
        self._rest(memoryview(payload), begun, deadline)
        self._received.expect(header.kind, payload, kind, len(buffer))

    def _begin(self, timeout_s: float) -> tuple[Header, memoryview]:
        """The header of the next frame, and what of its payload is in the same piece."""
        piece = next(self._in).receive(timeout_s, PIECE_BYTES)
        data = memoryview(piece.payload)
        if piece.kind is not Kind.STRIPE:
            raise ProtocolError(
                f"{self.peer} sent {piece.kind.name} over one of {len(self.links)} connections of a link"
            )
        header = self._received.parsed(parse_header, data)
        begun = data[HEADER_BYTES:]
        if len(begun) != min(header.length, PIECE_BYTES - HEADER_BYTES):
            raise ProtocolError(f"{self.peer} began a frame of {header.length} bytes with {len(begun)}")
        return header, begun

    def _rest(self, payload: memoryview, begun: memoryview, deadline: float) -> None:
        """Fill `payload` with what a frame began with, and with its further pieces."""
        payload[: len(begun)] = begun
        for lo in range(len(begun), len(payload), PIECE_BYTES):
            left_s = max(0.0, min(deadline - time.monotonic(), self.deadlines.step_timeout_s))
            next(self._in).receive_into(payload[lo : lo + PIECE_BYTES], left_s, Kind.STRIPE)

    def _end(self) -> None:
        for link in self.links:
            with suppress(TransportError):
                link.close()


def stripes(figures: LinkFigures) -> int:
    """Return how many connections a link should try, by the figures of one: 1 where it is near, or has so little under
    way that its buffer is not what holds it."""
    round_trip_s = figures.round_trip_best_s
    rate = max(figures.send_bytes_per_s, figures.receive_bytes_per_s)
    if round_trip_s < _FAR_S or rate * round_trip_s < _BUFFER_BYTES:
        return 1
    return min(MOST_STRIPES, max(_LEAST_STRIPES, -int(-_FULL_BYTES_PER_S * round_trip_s // _STREAM_BYTES)))
