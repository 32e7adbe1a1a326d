"""This device's credentials: read from the files of devices/, in the form that transport/ shows to peers."""

from __future__ import annotations

from pathlib import Path

from devices.paths import credentials_folder
from devices.trust import credentials as files
from transport.security import Credentials


def credentials(folder: Path | None = None) -> Credentials | None:
    """Load this device's credentials; None if it is in no cluster. Raises TrustError for damaged files."""
    stored = files.load(folder or credentials_folder())
    return None if stored is None else from_membership(stored)


def required(folder: Path) -> Credentials:
    """Return the credentials in a folder that had some before. Raises TrustError if they are missing."""
    return from_membership(files.required_membership(folder))


def from_membership(stored: files.Membership) -> Credentials:
    """Return the credentials of a membership."""
    return Credentials(stored.authority, stored.certificate, stored.key, stored.revoked)
