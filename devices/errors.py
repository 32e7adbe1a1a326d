"""What can go wrong with who may take part."""


class TrustError(Exception):
    """A cluster, an invitation or a certificate that cannot be used; the message says what to do."""


class DiscoveryError(Exception):
    """Workers cannot be found, or this one not announced, through the network; addresses given by hand still work."""


class LabFileError(Exception):
    """A lab file that cannot be used; the message names the key, what it needs and what it has."""


class ClusterFileError(Exception):
    """A file that describes a cluster, and cannot be used; the message names the key, what it needs and what it has."""


class LabError(Exception):
    """A lab that cannot be brought up: one is up already, or a worker does not start; the message says why."""
