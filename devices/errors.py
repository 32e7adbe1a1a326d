"""Errors about devices and clusters."""

from edge.errors import EdgeError


class TrustError(EdgeError):
    """A cluster, an invitation or a certificate is invalid; the message gives a remedy."""


class DiscoveryError(EdgeError):
    """Workers cannot be discovered, or this worker cannot be announced. Typed addresses still work."""


class LabFileError(EdgeError):
    """A lab file is not valid. The message names the key, the needed value and the value found."""


class ClusterFileError(EdgeError):
    """A cluster file is invalid; the message names the key, its value and valid values."""


class LabError(EdgeError):
    """A lab cannot be started: another lab is running, or a worker does not start. The message gives the reason."""
