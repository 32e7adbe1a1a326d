"""Addresses of workers by name: of the running lab, of workers that answered before, and of announced members."""

from __future__ import annotations

from functools import lru_cache

from devices import discovery
from devices.errors import DiscoveryError
from devices.lab.lab import status
from devices.names import is_name, join_address, parse_address
from devices.paths import authority_folder
from devices.remembered import KEPT_AGE_S, Remembered
from devices.trust.authority import is_owned
from devices.trust.roster import Roster
from transport.security import OWNER

SEEN = "seen-workers"  # name of the file that remembers the names of workers that answered, by address


def address_of(text: str) -> str:
    """Return HOST:PORT of a worker, from HOST, HOST:PORT or the name of a device.

    The name of a known device has precedence over a host of the same name.

    Raises ValueError if the text is neither an address nor a name.
    """
    host, port = parse_address(text)
    if host == text and is_name(text):
        lab = status()
        known = lab.addresses.get(text) if lab is not None else None
        known = known or (text in joined_members() and _announced().get(text)) or last_address(text)
        if known:
            return known
    return join_address(host, port)


def joined_members() -> list[str]:
    """Return the names of the workers that have joined the cluster that this machine owns."""
    folder = authority_folder()
    members = Roster.load(folder).members.values() if is_owned(folder) else ()
    return [member.name for member in members if member.role != OWNER and member.state == "joined"]


def last_address(name: str) -> str | None:
    """Return the address at which a worker of this name answered last, or None if it never did."""
    seen = Remembered(SEEN)
    for address in reversed(seen.keys(KEPT_AGE_S)):
        entry = seen.get(address, KEPT_AGE_S)
        if entry is not None and entry[0] == name:
            return address
    return None


@lru_cache(maxsize=1)
def _announced() -> dict[str, str]:
    """Return the addresses of all workers that announce themselves, by name. Takes `discovery.BROWSE_S` seconds."""
    try:
        return {worker.name: join_address(worker.addresses[0], worker.port) for worker in discovery.browse()}
    except DiscoveryError:
        return {}
