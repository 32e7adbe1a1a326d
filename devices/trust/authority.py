"""The owner's side of a cluster: it invites devices, signs their certificates and revokes them.

Its folder has three files: `ca.key`, which is the ownership of the cluster, `ca.pem` and `members.json`. Each change
holds the folder's lock from reading to writing, so concurrent commands lose nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cryptography import x509

from devices.errors import TrustError
from devices.files import locked, write_private
from devices.names import check_name
from devices.trust import certificates, credentials
from devices.trust.certificates import INVITED, MEMBER_LIFETIME_S, OWNER, WORKER, PrivateKey
from devices.trust.credentials import Membership
from devices.trust.invitation import Invitation
from devices.trust.roster import MEMBERS_FILE, Member, Roster

KEY_FILE, CERTIFICATE_FILE = "ca.key", "ca.pem"


def is_owned(folder: Path) -> bool:
    """Return whether a folder contains a cluster's authority."""
    return os.path.exists(folder / MEMBERS_FILE)  # False in the home of another user, where Path.exists raises


def read_keys(folder: Path) -> tuple[x509.Certificate, PrivateKey]:
    """Return the cluster's own certificate and key. Raises TrustError if they are damaged; nothing is changed."""
    try:
        key = certificates.key_from_pem((folder / KEY_FILE).read_bytes())
        certificate = certificates.from_pem((folder / CERTIFICATE_FILE).read_bytes())
        if not certificates.is_authority(certificate) or not certificates.same_key(certificate, key.public_key()):
            raise TrustError(f"{KEY_FILE} does not belong to {CERTIFICATE_FILE}")
    except TrustError as error:
        raise TrustError(f"the cluster in {folder} is damaged: {error}") from error
    return certificate, key


class Authority:
    """A cluster as its owner manages it, from `create` or `open`. `now` is Unix seconds, by default the clock."""

    def __init__(self, folder: Path, credentials_folder: Path, certificate: x509.Certificate, key: PrivateKey) -> None:
        self.folder = folder
        self.credentials_folder = credentials_folder
        self.certificate = certificate
        self._key = key

    @classmethod
    def create(cls, folder: Path, owner_name: str, credentials_folder: Path, now: float | None = None) -> Authority:
        """Create a cluster, and in `credentials_folder` this machine's membership as its owner.

        Raises TrustError if this machine already owns a cluster or belongs to one.
        """
        check_name(owner_name)
        now = _time(now)
        with locked(folder):
            if (folder / MEMBERS_FILE).exists():
                owner = Roster.load(folder).owner
                raise TrustError(
                    f"this machine already has a cluster, owned by {owner.name} since {_day(owner.since)}; to end it "
                    f"for all devices and start again, delete {folder} and {credentials_folder}"
                )
            membership = credentials.load(credentials_folder)
            if membership is not None:
                raise TrustError(
                    f"this machine is {membership.holder.name} in another cluster; to leave it,"
                    f" delete {credentials_folder}"
                )
            key = certificates.new_key()
            authority = cls(folder, credentials_folder, certificates.make_authority(key, now), key)
            write_private(folder / KEY_FILE, certificates.key_to_pem(key))
            write_private(folder / CERTIFICATE_FILE, authority.pem)
            # The list of members comes last: without it, other code sees no cluster.
            roster = Roster()
            roster.members[owner_name] = Member(owner_name, OWNER, "joined", since=now, expires=now)
            authority._equip_owner(roster, now)
        return authority

    @classmethod
    def open(cls, folder: Path, credentials_folder: Path, now: float | None = None) -> Authority:
        """Open the cluster in a folder, and repair this machine's membership if it is missing or outdated.

        Raises TrustError if there is no cluster, or if its files are damaged.
        """
        if not is_owned(folder):
            raise TrustError("this machine owns no cluster; run `edge cluster init` to create one")
        certificate, key = read_keys(folder)
        authority = cls(folder, credentials_folder, certificate, key)
        with locked(folder):
            authority._mend(_time(now))
        return authority

    @property
    def pem(self) -> bytes:
        """The cluster's own certificate."""
        return certificates.to_pem(self.certificate)

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that identify this cluster."""
        return certificates.fingerprint(self.certificate)

    def members(self, now: float | None = None) -> list[Member]:
        """Return all devices, the owner first, with their current states: invited, joined, revoked, expired."""
        now = _time(now)
        listed = [replace(member, state=member.state_at(now)) for member in Roster.load(self.folder).members.values()]
        return sorted(listed, key=lambda member: (member.role != OWNER, member.name))

    def crl(self) -> bytes:
        """Return the newest list of revoked certificates (PEM), as this machine stores it."""
        membership = credentials.load(self.credentials_folder)
        if membership is None or membership.crl is None:
            raise TrustError(f"the owner's credentials in {self.credentials_folder} are gone; run this command again")
        return membership.crl

    def learn(self, crl: bytes, now: float | None = None) -> frozenset[int]:
        """Add the revocations of a member's list to ours; return all revoked serials.

        This keeps revoked devices out after the owner's files were restored from a backup.

        Raises TrustError if this cluster did not sign the list.
        """
        number, revoked = certificates.read_crl(crl, self.certificate)
        now = _time(now)
        with self._change(now) as roster:
            roster.merge(number, revoked, now)
        return frozenset(roster.revoked)

    def invite(self, name: str, lifetime_s: float, now: float | None = None) -> str:
        """Return a token with which one device can join as `name` within `lifetime_s` seconds.

        An unused earlier invitation for this name becomes invalid. Raises TrustError if the name is taken.
        """
        check_name(name)
        now = _time(now)
        with self._change(now) as roster:
            member = roster.members.get(name)
            if member is not None:
                _check_free(member, now)
                roster.revoke(member, now)
            key = certificates.new_key()
            certificate = self._sign(name, INVITED, key.public_key(), now, now + lifetime_s)
            holder = certificates.holder(certificate)
            invited = Member(name, WORKER, "invited", now, holder.expires, invitation=holder.serial)
            roster.members[name] = invited
        return Invitation(self.certificate, certificate, key).token()

    def enroll(self, invitation: bytes, csr: bytes, now: float | None = None) -> bytes:
        """Return the certificate (PEM) of a device that showed an invitation and sent a certificate request.

        The name comes from the invitation, not from the request. The same key gets the same certificate again, so a
        device can repeat a request whose answer was lost.

        Raises TrustError if the invitation is used, revoked, expired or of another cluster, or if the request is not
        valid.
        """
        now = _time(now)
        shown = certificates.from_pem(invitation)
        if not certificates.is_issued_by(shown, self.certificate):
            raise TrustError("the invitation is from another cluster")
        holder = certificates.holder(shown)
        name = holder.name
        if holder.role != INVITED:
            raise TrustError(f"{name} showed the certificate of a member, role {holder.role}; it has joined already")
        key = certificates.key_of_request(csr)
        with self._change(now) as roster:
            if holder.serial in roster.revoked:
                raise TrustError(f"the invitation of {name} was revoked, or replaced by a newer one")
            member = roster.members.get(name)
            if member is None or member.invitation != holder.serial:
                raise TrustError(f"this invitation of {name} is not known here; run `edge cluster invite {name}`")
            if member.certificate is not None:
                if certificates.same_key(certificates.from_pem(member.certificate.encode()), key):
                    return member.certificate.encode()
                raise TrustError(
                    f"this invitation was used already: {name} joined on {_day(member.since)}. If that was not the "
                    f"device you meant, run `edge cluster revoke {name}` now, and invite it again"
                )
            if holder.expires <= now:
                raise TrustError(f"the invitation of {name} expired; run `edge cluster invite {name}` for a new one")
            certificate = self._sign(name, WORKER, key, now, now + MEMBER_LIFETIME_S)
            roster.members[name] = _joined(member, certificate, now)
        return certificates.to_pem(certificate)

    def web_certificate(self, addresses: Iterable[str], now: float | None = None) -> bytes:
        """Return a new certificate with its key (PEM), for a server on this machine that browsers reach."""
        key = certificates.new_key()
        certificate = certificates.make_web_certificate(
            self.certificate, self._key, addresses, key.public_key(), _time(now)
        )
        return certificates.to_pem(certificate) + self.pem + certificates.key_to_pem(key)

    def revoke(self, name: str, now: float | None = None) -> bool:
        """Refuse a device and its invitation from now on; return False if it was revoked before.

        Other members learn it from the new `crl`. Raises TrustError for an unknown name and for the owner.
        """
        now = _time(now)
        with self._change(now) as roster:
            member = roster.members.get(name)
            if member is None:
                known = ", ".join(n for n, m in roster.members.items() if m.role != OWNER) or "none yet"
                raise TrustError(f"this cluster has no device {name!r:.80}; its devices are: {known}")
            if member.role == OWNER:
                raise TrustError(f"{name} is this machine, which owns the cluster; it cannot be revoked")
            if member.state == "revoked":
                return False
            roster.revoke(member, now)
            roster.members[name] = replace(member, state="revoked", since=now)
            return True

    @contextmanager
    def _change(self, now: float) -> Iterator[Roster]:
        """Yield the list of members, and store it if the block succeeds. This machine learns revocations at the end."""
        with locked(self.folder):
            roster = Roster.load(self.folder)
            number = roster.crl_number
            yield roster
            roster.save(self.folder)
            if roster.crl_number != number:
                credentials.update_crl(self.credentials_folder, self._crl(roster, now))

    def _mend(self, now: float) -> None:
        """Repair members.json and our own files after a crash, a deleted folder or a restored backup."""
        roster, membership = Roster.load(self.folder), credentials.load(self.credentials_folder)
        if membership is not None and (membership.authority != self.pem or membership.holder.role != OWNER):
            raise TrustError(
                f"{self.credentials_folder} contains credentials of {membership.holder.name}, not of this cluster's"
                " owner; delete it, and the owner's will be created again"
            )
        # members.json may come from a backup, without later revocations.
        if membership is not None and roster.merge(membership.crl_number, membership.revoked, now):
            roster.save(self.folder)
        holder = None if membership is None else membership.holder
        # A certificate may not be valid yet if the clock was far ahead when it was signed.
        if holder is None or holder.serial != roster.owner.serial or not holder.begins <= now < holder.expires:
            roster.revoke(roster.owner, now)  # the lost key must not work any more
            self._equip_owner(roster, now)
        elif membership is not None and membership.crl_number < roster.crl_number:
            credentials.update_crl(self.credentials_folder, self._crl(roster, now))

    def _equip_owner(self, roster: Roster, now: float) -> None:
        """Create and store the owner's key and certificate. After a crash between both files, `open` repairs them."""
        key = certificates.new_key()
        certificate = self._sign(roster.owner.name, OWNER, key.public_key(), now, now + MEMBER_LIFETIME_S)
        roster.members[roster.owner.name] = _joined(roster.owner, certificate, roster.owner.since)
        roster.save(self.folder)
        own = certificates.to_pem(certificate)
        membership = Membership(self.pem, own, certificates.key_to_pem(key), crl=self._crl(roster, now))
        credentials.save(self.credentials_folder, membership)

    def _sign(self, name: str, role: str, key: certificates.PublicKey, now: float, until: float) -> x509.Certificate:
        return certificates.make_certificate(self.certificate, self._key, name, role, key, now, until)

    def _crl(self, roster: Roster, now: float) -> bytes:
        return certificates.make_crl(self.certificate, self._key, roster.crl_number, roster.revoked, now)


def _check_free(member: Member, now: float) -> None:
    """Raise TrustError if the name for an invitation is taken."""
    if member.role == OWNER:
        raise TrustError(f"{member.name} is this machine, which owns the cluster; choose another name")
    if member.state_at(now) == "joined":
        raise TrustError(
            f"{member.name} joined on {_day(member.since)}; choose another name, or run"
            f" `edge cluster revoke {member.name}` first"
        )


def _joined(member: Member, certificate: x509.Certificate, now: float) -> Member:
    holder = certificates.holder(certificate)
    pem = certificates.to_pem(certificate).decode()
    return replace(member, state="joined", since=now, expires=holder.expires, serial=holder.serial, certificate=pem)


def _time(now: float | None) -> float:
    return time.time() if now is None else now


def _day(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
