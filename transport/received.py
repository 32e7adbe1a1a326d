"""Received frames of a link: checks of their order, kind and size. The last frame has the peer's reason for the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from transport.errors import LinkClosed, ProtocolError, Refused
from transport.frame import MAX_REASON, SEQUENCES, Buffer, Kind, Payload

T = TypeVar("T")
_LAST = frozenset({Kind.ERROR, Kind.CLOSE})


class ReceivedFrames:
    """Frames that one peer sends. Errors name the peer."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.sequence = 0  # number of the next frame

    def parsed(self, parse: Callable[[Buffer, int], T], data: Buffer) -> T:
        """Parse the next frame with `parse_header` or `parse_frame`, and count it. Raises ProtocolError."""
        try:
            header = parse(data, self.sequence)
        except ProtocolError as error:
            raise ProtocolError(f"{self._peer}: {error}") from None
        self.sequence = (self.sequence + 1) % SEQUENCES
        return header

    def limit(self, kind: Kind, n_bytes: int, max_bytes: int) -> None:
        """Raise ProtocolError if a payload is larger than expected. No memory is reserved for it before this check."""
        most = MAX_REASON if kind in _LAST else max_bytes
        if n_bytes > most:
            raise ProtocolError(f"{self._peer} sent {n_bytes} bytes of {kind.name} where at most {most} were expected")

    def expect(self, received: Kind, payload: Payload, kind: Kind, n_bytes: int) -> None:
        """Raise the peer's reason if this is its last frame, and ProtocolError if kind or size differ."""
        self.raise_last(received, payload)
        if received is not kind or len(payload) != n_bytes:
            raise ProtocolError(
                f"{self._peer} should have sent {n_bytes} bytes of {kind.name}, but sent {len(payload)} of"
                f" {received.name}"
            )

    def raise_last(self, kind: Kind, payload: Payload) -> None:
        """Raise Refused for an ERROR frame and LinkClosed for a CLOSE frame."""
        if kind not in _LAST:
            return
        reason = printable(bytes(payload)[:MAX_REASON].decode(errors="replace"))
        if kind is Kind.ERROR:
            raise Refused(f"{self._peer}: {reason}")
        raise LinkClosed(f"{self._peer} closed the link" + (f": {reason}" if reason else ""))


def printable(text: str) -> str:
    """Make a peer's text safe to print: no control characters, at most MAX_REASON characters."""
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_REASON].strip()
