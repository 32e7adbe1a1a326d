"""A cluster in a temporary folder: its owner, and devices in any state of trust."""

from pathlib import Path

from devices.trust import certificates, credentials
from devices.trust.authority import Authority
from devices.trust.credentials import Membership
from transport.security import Credentials

HOUR_S, YEAR_S = 3600, 365 * 86_400


class Cluster:
    """The owner's side, and one folder of credentials for each device. `now` is when all of it happens."""

    def __init__(self, folder: Path, now: float, owner: str = "desk") -> None:
        self.folder, self.now = folder, now
        self.authority = Authority.create(folder / "authority", owner, folder / owner, now)
        self.owner = membership_in(folder / owner)

    def at(self, name: str) -> Path:
        """The folder of a device's credentials."""
        return self.folder / name

    def invited(self, name: str) -> Membership:
        """A device that stored its token and was not enrolled."""
        credentials.store_token(self.at(name), self.authority.invite(name, HOUR_S, self.now), self.now)
        return membership_in(self.at(name))

    def joined(self, name: str) -> Membership:
        """A device that was enrolled."""
        invited = self.invited(name)
        csr = credentials.pending_csr(self.at(name), name)
        certificate = self.authority.enroll(invited.certificate, csr, self.now)
        return credentials.install(self.at(name), certificate, self.now)


def csr_for(name: str) -> bytes:
    """Return a request for a certificate, for a key that nobody keeps."""
    return certificates.make_request(certificates.new_key(), name)


def membership_in(folder: Path) -> Membership:
    """The membership in a folder, which must be there."""
    membership = credentials.load(folder)
    assert membership is not None
    return membership


def shown(membership: Membership) -> Credentials:
    """Return the credentials that a device shows to others."""
    return Credentials(membership.authority, membership.certificate, membership.key, membership.revoked)
