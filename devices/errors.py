"""What can go wrong with who may take part."""


class TrustError(Exception):
    """A cluster, an invitation or a certificate that cannot be used; the message says what to do."""


class DiscoveryError(Exception):
    """Workers cannot be found, or this one not announced, through the network; addresses given by hand still work."""
