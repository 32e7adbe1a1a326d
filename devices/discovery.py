"""Finding workers in the local network through multicast DNS (Bonjour, Avahi), so that nobody has to type addresses.

An announcement is an invitation, not a proof: who answers at the address is checked when connecting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures as futures
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from devices.errors import DiscoveryError
from devices.names import MAX_NAME
from devices.network import Interface, address_of, is_usable, nearest_first, own_networks

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_edge-worker._tcp.local."
BROWSE_S = 3.0  # two rounds of questions: answers given within the last second are not repeated at once

MAX_FOUND = 256  # workers; more than a home network has, fewer than a flood would bring
MAX_PROPERTIES = 16
MAX_KEY = 32  # characters
MAX_VALUE = 128
_GRACE_S = 0.3  # for the details of who was heard of last
# Before zeroconf's own look for the name, of at least 1.15 s. Who answered within the last second answers again up to
# 1.24 s after our question.
_LISTEN_S = 0.5
_GROUP = "224.0.0.251"
_PORT = 5353
_BY_HAND = "give the workers' addresses by hand"


@dataclass(frozen=True)
class Announcement:
    """Announcement of a worker to everybody in the network."""

    name: str
    port: int
    addresses: tuple[str, ...]  # from `announced_addresses`
    version: str  # of the runtime
    cluster: str = ""  # the first hexadecimal digits of the cluster's fingerprint; empty: in none
    secure: bool = False  # whether it speaks TLS only


@dataclass(frozen=True, order=True)
class Discovered:
    """A worker that announced itself. Everything in here is its own claim, cut to printable text of bounded length."""

    name: str
    addresses: tuple[str, ...]  # the likeliest to be reachable from here first; never empty
    port: int
    properties: Mapping[str, str] = field(compare=False)


class Announcer:
    """Announces a worker from `start` to `close`, or within a `with` block. `start` blocks for up to three seconds.

    `interfaces` are IPv4 addresses of the interfaces to announce on. By default those of the announced addresses, so
    that a worker that listens on one network is not announced in another.
    """

    def __init__(self, announcement: Announcement, interfaces: Sequence[str] | None = None) -> None:
        if not announcement.addresses:
            raise DiscoveryError("no address to announce: only link-local ones, or no network")
        name = announcement.name
        if not name or not name.isprintable() or len(name.encode()) > MAX_NAME:
            raise DiscoveryError(f"a device name has 1 to {MAX_NAME} bytes of printable text, not {name!r:.80}")
        self._announcement = announcement
        of_ipv4 = [address for address in announcement.addresses if ":" not in address]
        self._interfaces = (of_ipv4 or None) if interfaces is None else interfaces  # None: all
        self._zeroconf: Zeroconf | None = None
        self.name = announcement.name  # as announced; another after `start` where a device of that name is there

    def start(self) -> None:
        """Announce. DiscoveryError if the network does not allow that; the worker can be reached all the same."""
        from zeroconf import DNSQuestionType, Error, ServiceBrowser, ServiceInfo

        if self._zeroconf is not None:
            return
        announcement = self._announcement
        info = ServiceInfo(
            SERVICE,
            f"{announcement.name}.{SERVICE}",
            port=announcement.port,
            properties={
                "version": announcement.version,
                "cluster": announcement.cluster,
                "secure": "1" if announcement.secure else "0",
            },
            # Not the host's own name: that may belong to another mDNS service here, with other addresses.
            server=f"edge-{secrets.token_hex(4)}.local.",
            parsed_addresses=list(announcement.addresses),
        )
        zeroconf = _opened(self._interfaces)
        try:
            # Zeroconf looks whether the name is taken, but asks to be answered alone. On one machine the answer to one
            # process can reach another, so we also ask what everybody hears: it is in zeroconf's cache then.
            browser = ServiceBrowser(zeroconf, SERVICE, [lambda **_: None], question_type=DNSQuestionType.QM)
            try:
                time.sleep(_LISTEN_S)
                zeroconf.register_service(info, allow_name_change=True)
            finally:
                browser.cancel()
        except (Error, OSError, RuntimeError, TimeoutError, futures.TimeoutError) as error:
            zeroconf.close()
            raise DiscoveryError(f"cannot announce {announcement.name} ({_reason(error)}): {_BY_HAND}") from error
        except BaseException:
            zeroconf.close()
            raise
        self._zeroconf = zeroconf
        self.name = info.name.removesuffix(f".{SERVICE}")

    def close(self) -> None:
        """Withdraw the announcement. May be called again."""
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is not None:
            _close(zeroconf)

    def __enter__(self) -> Announcer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Listener:
    """Listener that tracks which services are present, and requests the details of each while browsing goes on."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._lock = threading.Lock()
        self._alive: dict[str, str] = {}  # case does not count in names
        self._requests: list[futures.Future[bool]] = []

    def __call__(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        """Handle a change, on zeroconf's thread; the keywords are zeroconf's own."""
        from zeroconf import Error, ServiceInfo, ServiceStateChange

        with self._lock:
            if state_change is ServiceStateChange.Removed:
                self._alive.pop(name.lower(), None)
                return
            if name.lower() in self._alive or len(self._alive) >= MAX_FOUND or len(self._requests) >= 2 * MAX_FOUND:
                return
            try:
                info = ServiceInfo(service_type, name)
            except (Error, ValueError):  # a name that is none
                return
            self._alive[name.lower()] = name
            rest_s = max(_GRACE_S, self._deadline - time.monotonic())
            if zeroconf.loop is not None and zeroconf.loop.is_running():
                request = info.async_request(zeroconf, rest_s * 1000)
                self._requests.append(asyncio.run_coroutine_threadsafe(request, zeroconf.loop))

    def infos(self, zeroconf: Zeroconf) -> list[ServiceInfo]:
        """Return the services that are present now and whose details arrived."""
        from zeroconf import ServiceInfo

        with self._lock:
            requests = list(self._requests)
        futures.wait(requests, timeout=2 * _GRACE_S)
        with self._lock:  # after the wait: who said goodbye meanwhile is gone
            infos = [ServiceInfo(SERVICE, name) for name in self._alive.values()]
        return [info for info in infos if info.load_from_cache(zeroconf)]


def browse(timeout_s: float = BROWSE_S, interfaces: Sequence[str] | None = None) -> list[Discovered]:
    """The workers that announce themselves within `timeout_s` seconds, sorted; without those that said goodbye.

    `interfaces` are IPv4 addresses of the interfaces to ask on; by default all. Takes the whole time, as nobody knows
    how many are out there. DiscoveryError if this machine cannot ask.
    """
    from zeroconf import ServiceBrowser

    deadline = time.monotonic() + timeout_s
    zeroconf = _opened(interfaces)
    try:
        listener = _Listener(deadline)
        browser = ServiceBrowser(zeroconf, SERVICE, handlers=[listener])
        try:
            time.sleep(max(0.0, deadline - time.monotonic()))
            infos = listener.infos(zeroconf)
        finally:
            browser.cancel()
    finally:
        _close(zeroconf)
    own = own_networks()
    return sorted(worker for info in infos if (worker := _discovered(info, own)) is not None)


def announced_addresses(listen: str) -> tuple[str, ...]:
    """The addresses to announce for a worker that listens on `listen`.

    For "0.0.0.0" all IPv4 addresses of this machine, for "::" or "" the IPv6 ones too, without loopback. Otherwise the
    address itself, or those of a host name. Never link-local ones of IPv6, which lead nowhere without the name of an
    interface. DiscoveryError if that leaves none.
    """
    if listen in ("0.0.0.0", "::", ""):
        candidates = [entry.ip for entry in own_networks()]
        addresses = [ip for ip in candidates if not ip.is_loopback and (ip.version == 4 or listen != "0.0.0.0")]
    else:
        try:
            resolved = socket.getaddrinfo(listen, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise DiscoveryError(f"cannot announce {listen!r}: no such address or host ({_reason(error)})") from error
        addresses = [ip for entry in resolved if (ip := address_of(str(entry[4][0]))) is not None]
    usable = {ip for ip in addresses if is_usable(ip)}
    if not usable:
        raise DiscoveryError(
            f"no address to announce for a worker that listens on {listen or 'all interfaces'}: "
            "connect this device to a network, or let the worker listen on an address of one"
        )
    return tuple(str(ip) for ip in sorted(usable, key=lambda ip: (ip.version, int(ip))))


def _opened(interfaces: Sequence[str] | None) -> Zeroconf:
    """Zeroconf on the interfaces that can multicast; DiscoveryError if none can."""
    from zeroconf import Zeroconf

    if interfaces is None:
        interfaces = [str(entry.ip) for entry in own_networks() if entry.version == 4]
    usable = [address for address in dict.fromkeys(interfaces) if _can_multicast(address)]
    if not usable:
        raise DiscoveryError(
            "discovery is not possible: multicast works on no network interface of this machine "
            f"({', '.join(interfaces) or 'no IPv4 address'}): {_BY_HAND}"
        )
    # On a thread of its own, as Zeroconf would otherwise attach to an event loop that runs here and that we block.
    with futures.ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(Zeroconf, interfaces=usable).result()
        except (OSError, RuntimeError) as error:
            raise DiscoveryError(f"discovery cannot use UDP port {_PORT} ({_reason(error)}): {_BY_HAND}") from error


def _can_multicast(address: str) -> bool:
    """Return whether the interface with this IPv4 address can join and reach the mDNS group. Sends nothing."""
    try:
        packed = socket.inet_aton(address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_GROUP) + packed)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, packed)
            probe.connect((_GROUP, _PORT))  # only asks for a route
    except OSError:
        return False
    return True


def _close(zeroconf: Zeroconf) -> None:
    """Close; a network that went away meanwhile is no error then."""
    from zeroconf import Error

    with contextlib.suppress(Error, OSError, TimeoutError, futures.TimeoutError):
        zeroconf.close()


def _discovered(info: ServiceInfo, own: Sequence[Interface]) -> Discovered | None:
    """Check and bound an announcement; return None if it has no usable address or port."""
    addresses = nearest_first(info.parsed_addresses(), own)
    name = _printable(info.name[: -len(SERVICE) - 1])
    if not addresses or not name or not info.port or not 0 < info.port < 1 << 16:
        return None
    properties: dict[str, str] = {}
    for key, value in list(info.properties.items())[:MAX_PROPERTIES]:
        properties[_decoded(key, MAX_KEY)] = _decoded(value or b"", MAX_VALUE)
    return Discovered(name, addresses, info.port, properties)


def _decoded(raw: bytes, limit: int) -> str:
    return _printable(raw[:limit].decode("utf-8", "replace"))


def _printable(text: str) -> str:
    """Remove characters that would move the cursor of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _reason(error: BaseException) -> str:
    """Return the message of an error, or its class name where it has none, as timeouts."""
    return str(error) or type(error).__name__
