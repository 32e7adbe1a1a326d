"""Addresses of workers by name: of the running lab, of this machine's browsers, of announced members, and of workers
that answered before.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from devices import discovery
from devices.errors import DiscoveryError
from devices.lab.lab import status
from devices.names import is_name, join_address, parse_address
from devices.paths import authority_folder, config_folder
from devices.remembered import KEPT_AGE_S, Remembered
from devices.trust.authority import is_owned
from devices.trust.roster import Roster
from edge.browser.browsers import Browser, Browsers
from transport.security import OWNER

BROWSERS_FOLDER = "browsers"  # in the folder of configuration: records of this machine's browsers
_HERE = "127.0.0.1"  # host of the workers of browsers that are no members
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
        known = known or browser_address(text)
        known = known or (text in joined_members() and _announced().get(text)) or last_address(text)
        if known:
            return known
    return join_address(host, port)


def page_address(page: Browser) -> str:
    """Return the address of a browser's worker, at which members reach it if it is a member; "" without a worker."""
    host = _HERE
    if is_owned(authority_folder()):
        with suppress(DiscoveryError):  # this machine has no network
            host = discovery.announced_addresses("0.0.0.0")[0]
    return join_address(host, page.port) if page.port else ""


def browser_address(name: str) -> str:
    """Return the address of the worker of this machine's browser; "" if there is none."""
    pages = (page for page in Browsers(config_folder() / BROWSERS_FOLDER).all() if page.name == name)
    return next(map(page_address, pages), "")


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
