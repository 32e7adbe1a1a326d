"""The owner's list of members with their states: invited, joined or revoked. It is stored in members.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from devices.errors import TrustError
from devices.files import write_private
from devices.names import is_name
from devices.trust.certificates import OWNER, ROLES

MEMBERS_FILE = "members.json"
STATES = ("invited", "joined", "revoked")
_VERSION = 1


@dataclass(frozen=True)
class Member:
    """Entry of one device. Times are Unix seconds."""

    name: str
    role: str  # owner or worker: its role after joining
    state: str  # invited, joined or revoked; `state_at` can also return expired
    since: float  # time when it got into this state
    expires: float  # end of the invitation, or of the certificate
    invitation: int | None = None  # serial of the invitation
    serial: int | None = None  # serial of the certificate, once the device has joined
    certificate: str | None = None  # PEM

    def serials(self) -> Iterator[int]:
        """Yield the serials of all certificates issued to the member."""
        yield from (serial for serial in (self.invitation, self.serial) if serial is not None)

    def state_at(self, now: float) -> str:
        """Return the state: invited, joined, revoked or expired."""
        return "expired" if self.state != "revoked" and self.expires <= now else self.state


@dataclass
class Roster:
    """All members by name, and every serial that was ever revoked."""

    members: dict[str, Member] = field(default_factory=dict)
    revoked: dict[int, float] = field(default_factory=dict)  # time of revocation, by serial
    crl_number: int = 1  # grows with every revocation

    @property
    def owner(self) -> Member:
        """The owner's own entry."""
        return next(member for member in self.members.values() if member.role == OWNER)

    def revoke(self, member: Member, now: float) -> None:
        """Revoke all certificates issued to a member."""
        fresh = [serial for serial in member.serials() if serial not in self.revoked]
        self.revoked.update(dict.fromkeys(fresh, now))
        self.crl_number += bool(fresh)

    def merge(self, number: int, revoked: AbstractSet[int], now: float) -> bool:
        """Add the revocations of another list of this cluster; return False if that list is the same or older."""
        ours = self.revoked.keys()
        if (revoked == ours and number <= self.crl_number) or (revoked < ours and number < self.crl_number):
            return False
        self.revoked.update(dict.fromkeys(revoked - ours, now))
        # The next list differs from all lists sent under either number.
        self.crl_number = max(number, self.crl_number) + 1
        for member in self.members.values():
            is_revoked = any(serial in self.revoked for serial in member.serials())
            if is_revoked and member.role != OWNER and member.state != "revoked":
                self.revoke(member, now)  # also certificates issued before this list learned of the revocation
                self.members[member.name] = replace(member, state="revoked", since=now)
        return True

    def save(self, folder: Path) -> None:
        """Write the list, completely or not at all."""
        content = {
            "version": _VERSION,
            "crl_number": self.crl_number,
            "revoked": {f"{serial:x}": when for serial, when in self.revoked.items()},
            "members": [_to_json(member) for member in self.members.values()],
        }
        write_private(folder / MEMBERS_FILE, json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Roster:
        """Load the list in a folder. Raises TrustError if it is damaged, and OSError if it cannot be read."""
        path = folder / MEMBERS_FILE
        try:
            content = json.loads(path.read_bytes())
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}, but this program reads {_VERSION}")
            members = [_from_json(member) for member in content["members"]]
            revoked = {int(serial, 16): float(when) for serial, when in content["revoked"].items()}
            roster = cls({member.name: member for member in members}, revoked, int(content["crl_number"]))
            if [member.role for member in members].count(OWNER) != 1:
                raise ValueError("there must be one owner")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TrustError(
                f"{path} is damaged ({error}); restore it, because it decides who may take part"
            ) from error
        return roster


def _to_json(member: Member) -> dict[str, Any]:
    serials = {"invitation": member.invitation, "serial": member.serial}
    return {**vars(member), **{name: None if n is None else f"{n:x}" for name, n in serials.items()}}


def _from_json(entry: dict[str, Any]) -> Member:
    serials = {name: None if entry[name] is None else int(entry[name], 16) for name in ("invitation", "serial")}
    times = {name: float(entry[name]) for name in ("since", "expires")}
    member = Member(**{**entry, **serials, **times})
    if not is_name(member.name) or member.role not in ROLES or member.state not in STATES:
        raise ValueError(f"member {member.name!r:.80}")
    return member
