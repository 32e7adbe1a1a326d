"""Errors between two devices. Links and collectives raise only these for a peer's faults."""

from edge.errors import EdgeError


class TransportError(EdgeError):
    """Base of this package's errors. The message names the peer, the need and the finding."""


class LinkTimeout(TransportError):
    """A named deadline passed; the message gives its name and its length."""


class LinkClosed(TransportError):
    """The peer closed the link, or went away."""


class ProtocolError(TransportError):
    """Received bytes break the protocol of this version: damaged, cut off, out of order, or too large."""


class Refused(TransportError):
    """The peer answered and does not want us: no credentials, revoked ones, no such session, no room."""
