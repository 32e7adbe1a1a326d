"""This device's credentials, from the files of devices/ to what transport/ shows to peers."""

from __future__ import annotations

from pathlib import Path

from devices.errors import TrustError
from devices.paths import credentials_folder
from devices.trust import credentials as held
from transport.security import Credentials


def credentials(folder: Path | None = None) -> Credentials | None:
    """What this device shows and whom it believes; None where it is in no cluster. TrustError for damaged files."""
    found = held.load(folder or credentials_folder())
    return None if found is None else of(found)


def required(folder: Path) -> Credentials:
    """The credentials in a folder that has had some. TrustError where they are gone."""
    return of(membership(folder))


def membership(folder: Path) -> held.Membership:
    """The membership in a folder that has had one. TrustError where it is gone."""
    found = held.load(folder)
    if found is None:
        raise TrustError(f"the credentials in {folder} are gone; join again")
    return found


def of(found: held.Membership) -> Credentials:
    """A membership as credentials."""
    return Credentials(found.authority, found.certificate, found.key, found.revoked)
