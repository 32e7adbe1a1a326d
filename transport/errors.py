"""Errors between two devices. Links and collectives raise only these for a peer's faults."""

from edge.errors import EdgeError


class TransportError(EdgeError):
    """Base of this package's errors. The message names the peer, and what was needed and found."""


class LinkTimeout(TransportError):
    """A named deadline passed; the message gives its name and its length."""


class LinkClosed(TransportError):
    """The peer closed the link or disconnected."""


class ProtocolError(TransportError):
    """Received bytes break the protocol of this version: damaged, cut off, out of order, or too large."""


class Refused(TransportError):
    """The peer refused: credentials are missing or revoked, the session does not exist, or the peer has no room."""
