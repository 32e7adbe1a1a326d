"""Credentials of a cluster's member: its own key and certificate, the cluster's certificate, revoked certificates.

They are files of one folder. `device.pem` has the key, its certificate, the cluster's certificate and, on an invited
device, the invitation's certificate. They share one file so that they fit together even after a crash. `revoked.pem` is
the newest list of revoked certificates; a device gets it at its owner's first visit. `pending.pem` is a new key that
waits for the owner's signature.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from devices.errors import TrustError
from devices.files import locked, note_unkept, write_private
from devices.trust import certificates
from devices.trust.certificates import DAY_S, INVITED, OWNER, WORKER, Holder
from devices.trust.invitation import parse_token

DEVICE_FILE, CRL_FILE, PENDING_FILE = "device.pem", "revoked.pem", "pending.pem"
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----\n[A-Za-z0-9+/=\n]+-----END \1-----\n")


@dataclass(frozen=True)
class Membership:
    """A member's files as PEM, and properties read from them."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    invitation: bytes | None = None  # invitation with which this device joined; None for the owner
    crl: bytes | None = None

    @cached_property
    def holder(self) -> Holder:
        """This device's name, role and serial, and the validity of its certificate."""
        return certificates.holder(certificates.from_pem(self.certificate))

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that identify the cluster."""
        return certificates.fingerprint(certificates.from_pem(self.authority))

    @cached_property
    def crl_number(self) -> int:
        """Number of the list of revoked certificates; 0 without a list."""
        return self._crl[0]

    @cached_property
    def revoked(self) -> frozenset[int]:
        """Serials of revoked certificates."""
        return self._crl[1]

    @cached_property
    def _crl(self) -> tuple[int, frozenset[int]]:
        if self.crl is None:
            return 0, frozenset()
        return certificates.read_crl(self.crl, certificates.from_pem(self.authority))


def load(folder: Path) -> Membership | None:
    """Return the checked membership in a folder.

    Return None if there is none, or if the folder is in another user's home.

    Raises TrustError if files are damaged.
    """
    try:
        device = (folder / DEVICE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    except PermissionError as error:
        if os.access(folder, os.X_OK):  # the file exists and belongs to another user
            raise
        note_unkept(folder, error)
        return None
    try:
        membership = _parse(device)
        if (folder / CRL_FILE).exists():
            membership = replace(membership, crl=(folder / CRL_FILE).read_bytes())
            membership.revoked  # noqa: B018 - report a damaged list now instead of at the first connection
    except TrustError as error:
        raise TrustError(
            f"the credentials in {folder} are damaged ({error}); delete {folder} and join again"
        ) from error
    return membership


def save(folder: Path, membership: Membership) -> None:
    """Store a membership. Its key and certificates replace those in the folder together or not at all."""
    if membership.crl is not None:
        write_private(folder / CRL_FILE, membership.crl)
    blocks = [membership.key, membership.certificate, membership.authority, membership.invitation or b""]
    write_private(folder / DEVICE_FILE, b"".join(blocks))


def store_token(folder: Path, token: str, now: float | None = None) -> None:
    """Store the content of a token. The same token again changes nothing, even if it has expired.

    A later token of the same cluster replaces the membership and a pending key, because the owner invited the device
    again.

    Raises TrustError if the token is damaged, forged or expired, or if this device belongs to another cluster or owns
    this one.
    """
    invitation = parse_token(token)
    authority, certificate = certificates.to_pem(invitation.authority), certificates.to_pem(invitation.certificate)
    name = invitation.holder.name
    with locked(folder):
        membership = load(folder)
        if membership is not None:
            if membership.authority != authority:
                raise TrustError(
                    f"this device is {membership.holder.name} in another cluster; to leave that one, delete {folder}"
                )
            if membership.holder.role == OWNER:
                raise TrustError("this machine owns the cluster; use the token on the device that is to join")
            if membership.invitation == certificate:
                return
        now = time.time() if now is None else now
        late_s = now - invitation.holder.expires
        if late_s >= 0:
            raise TrustError(
                f"the invitation of {name} expired {_ago(late_s)} ago, by this device's clock; "
                f"run `edge cluster invite {name}` on the owner's machine for a new one"
            )
        crl = membership.crl if membership is not None else None
        (folder / PENDING_FILE).unlink(missing_ok=True)  # first, so that a crash cannot leave an old key behind
        save(folder, Membership(authority, certificate, certificates.key_to_pem(invitation.key), certificate, crl))


def pending_csr(folder: Path, name: str) -> bytes:
    """Return a certificate request. Its key is created here and stored until `install` or another token.

    The key stays the same because the owner signs only one, and this device may restart before the answer arrives.
    """
    path = folder / PENDING_FILE
    with locked(folder):
        try:
            key = certificates.key_from_pem(path.read_bytes())
        except (FileNotFoundError, TrustError):  # TrustError means a damaged file
            key = certificates.new_key()
            write_private(path, certificates.key_to_pem(key))
        return certificates.make_request(key, name)


def install(folder: Path, certificate: bytes, now: float | None = None) -> Membership:
    """Store the certificate that the owner signed for the key of `pending_csr`; return the new membership.

    Raises TrustError and changes nothing unless this cluster signed it for this key, this name and the role worker.
    """
    with locked(folder):
        membership = required_membership(folder)
        try:
            key = (folder / PENDING_FILE).read_bytes()
        except FileNotFoundError:
            raise TrustError("a certificate arrived without a pending request; join with a token first") from None
        received = certificates.from_pem(certificate)
        to = certificates.holder(received)
        if not certificates.is_issued_by(received, certificates.from_pem(membership.authority)):
            raise TrustError("the received certificate is from another cluster")
        if to.role != WORKER or to.name != membership.holder.name:
            raise TrustError(
                f"the received certificate is for the {to.role} {to.name}, but this device is {membership.holder.name}"
            )
        if to.expires <= (time.time() if now is None else now):
            raise TrustError("the received certificate has already expired, by this device's clock; set the clock")
        if not certificates.same_key(received, certificates.key_from_pem(key).public_key()):
            raise TrustError("the received certificate is not for the key of this device")
        joined = replace(membership, certificate=certificates.to_pem(received), key=key)
        save(folder, joined)
        (folder / PENDING_FILE).unlink(missing_ok=True)
        return load(folder) or joined


def update_crl(folder: Path, crl: bytes) -> Membership:
    """Store a list of revoked certificates if it is newer; return the membership with the list stored then.

    A list that is older, or lacks serials of the stored one, would readmit a device, so it changes nothing.

    Raises TrustError if the cluster's owner did not sign the list.
    """
    with locked(folder):
        membership = required_membership(folder)
        number, revoked = certificates.read_crl(crl, certificates.from_pem(membership.authority))
        if number <= membership.crl_number or not revoked >= membership.revoked:
            return membership
        write_private(folder / CRL_FILE, crl)
        return load(folder) or membership


def required_membership(folder: Path) -> Membership:
    """Return the membership in a folder. Raises TrustError if there is none."""
    membership = load(folder)
    if membership is None:
        raise TrustError(f"this device is in no cluster: {folder} has no credentials; join with a token first")
    return membership


def _parse(device: bytes) -> Membership:
    """Return the parts of device.pem, after checking that they belong together."""
    blocks = [(match[1], match[0]) for match in _BLOCK.finditer(device)]
    pems = [pem for _, pem in blocks]
    kinds = [kind for kind, _ in blocks]
    if kinds not in ([b"PRIVATE KEY"] + [b"CERTIFICATE"] * n for n in (2, 3)):
        raise TrustError(f"{DEVICE_FILE} lacks its key or a certificate")
    membership = Membership(pems[2], pems[1], pems[0], pems[3] if len(pems) == 4 else None)
    own, authority = certificates.from_pem(membership.certificate), certificates.from_pem(membership.authority)
    if not certificates.is_issued_by(own, authority):
        raise TrustError("the certificate is from another cluster")
    if not certificates.same_key(own, certificates.key_from_pem(membership.key).public_key()):
        raise TrustError("the key does not belong to the certificate")
    if (membership.holder.role == INVITED) and membership.invitation != membership.certificate:
        raise TrustError("the invitation is missing")
    return membership


def _ago(seconds: float) -> str:
    """Return a time span in its largest useful unit, such as "3 h"."""
    for unit, length in (("days", DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
