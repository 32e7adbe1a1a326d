"""Errors about membership of a cluster."""

from edge.errors import EdgeError


class TrustError(EdgeError):
    """A cluster, an invitation or a certificate is invalid; the message gives a remedy."""


class DiscoveryError(EdgeError):
    """Workers cannot be discovered, or this one not announced; addresses given by hand still work."""


class LabFileError(EdgeError):
    """A lab file that cannot be used; the message names the key, what it needs and what it has."""


class ClusterFileError(EdgeError):
    """A cluster file is invalid; the message names the key, its value and valid values."""


class LabError(EdgeError):
    """A lab that cannot be brought up: one is up already, or a worker does not start; the message says why."""
