"""This device's credentials, from the files of devices/ to what transport/ shows to peers."""

from __future__ import annotations

from pathlib import Path

from devices import credentials as held
from devices.paths import credentials_folder
from transport.security import Credentials


def credentials(folder: Path | None = None) -> Credentials | None:
    """What this device shows and whom it believes; None where it is in no cluster. TrustError for damaged files."""
    membership = held.load(folder or credentials_folder())
    return None if membership is None else of(membership)


def of(membership: held.Membership) -> Credentials:
    """A membership as credentials."""
    return Credentials(membership.authority, membership.certificate, membership.key, membership.revoked)
