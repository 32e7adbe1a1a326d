"""The cluster that this machine owns, as the server needs it: its members, invitations and revocations."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from devices.errors import TrustError
from devices.names import host_name
from devices.paths import authority_folder, config_folder, credentials_folder
from devices.trust import credentials
from devices.trust.authority import Authority, is_owned
from devices.trust.certificates import OWNER
from devices.trust.roster import MEMBERS_FILE, Member, Roster
from edge.browser.browsers import Browser, Browsers
from edge.cluster.members import BROWSERS_FOLDER, last_address, page_address

_AGAIN_S = 5.0  # the list of browsers is read at most this often


@dataclass(frozen=True)
class KnownMember:
    """A member of the cluster other than its owner, or an invited device."""

    name: str
    state: str  # "invited" or "joined"
    since: float  # Unix seconds
    expires: float  # Unix seconds, of the invitation
    address: str  # the last address at which it answered, or "" if it never did
    is_browser: bool


class Members:
    """Members of the cluster. The files are read again only after they have changed."""

    def __init__(self) -> None:
        self._version: tuple[tuple[int, int] | None, dict[str, float]] | None = None
        self._members: list[Member] = []
        self._browsers: list[Browser] = []
        self._changes: dict[str, float] = {}  # time of the last change of each browser's record, by name
        self._addresses: dict[str, str] = {}
        self._read_at = -_AGAIN_S

    @property
    def problem(self) -> str:
        """The reason why this machine cannot invite devices, with what to do; "" if it can."""
        if is_owned(authority_folder()):
            return ""
        try:
            membership = credentials.load(credentials_folder())
        except (TrustError, OSError) as error:
            return str(error)
        if membership is None:
            return "This machine has no cluster yet. Create one to add devices."
        return (
            f"This machine is {membership.holder.name} in a cluster of another machine. Only the owner of a cluster"
            " adds devices: open the page of the server there."
        )

    def known(self) -> list[KnownMember]:
        """Return the invited and the joined devices. A list that cannot be read is empty."""
        try:
            self._read()
        except (TrustError, OSError):
            return []
        now = time.time()
        pages = {browser.name: browser for browser in self._browsers}
        members = [
            KnownMember(
                member.name,
                member.state,
                member.since,
                member.expires,
                page_address(pages[member.name]) if member.name in pages else self._addresses.get(member.name, ""),
                member.name in pages,
            )
            for member in self._members
            if member.role != OWNER and member.state_at(now) in ("invited", "joined")
        ]
        # The pages of a machine without a cluster have no certificates: the list of members lacks them.
        for name in pages.keys() - {member.name for member in members}:
            page = pages[name]
            if page.key is not None or now < page.expires:
                state = "invited" if page.key is None else "joined"
                since = self._changes.get(name, now)
                members.append(KnownMember(name, state, since, page.expires, page_address(page), is_browser=True))
        return members

    def _read(self) -> None:
        folder, now = authority_folder(), time.monotonic()
        browsers = Browsers(config_folder() / BROWSERS_FOLDER)
        changes = browsers.changes()
        version = _version(folder / MEMBERS_FILE), changes
        if version == self._version and now - self._read_at < _AGAIN_S:
            return
        self._members = list(Roster.load(folder).members.values()) if version[0] else []
        self._browsers, self._changes = browsers.all(), changes
        self._addresses = {member.name: last_address(member.name) or "" for member in self._members}
        self._version, self._read_at = version, now


def has_cluster() -> bool:
    """Return True if this machine owns a cluster."""
    return is_owned(authority_folder())


def _version(path: Path) -> tuple[int, int] | None:
    """Return a value that changes with a file, or None if there is no file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size


def create_cluster() -> None:
    """Create a cluster that this machine owns. Raises TrustError as `Authority.create` does."""
    Authority.create(authority_folder(), host_name(), credentials_folder())


def invite(name: str, lifetime_s: float) -> str:
    """Return a token. One worker that uses it joins as `name`. Raises TrustError."""
    return Authority.open(authority_folder(), credentials_folder()).invite(name, lifetime_s)


def revoke(name: str) -> None:
    """Refuse a member, or withdraw an invitation. Raises TrustError."""
    is_forgotten = Browsers(config_folder() / BROWSERS_FOLDER).forget(name)
    if is_owned(authority_folder()) and (name in Roster.load(authority_folder()).members or not is_forgotten):
        Authority.open(authority_folder(), credentials_folder()).revoke(name)
