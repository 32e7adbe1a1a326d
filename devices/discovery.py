"""Discovery of workers in the local network by multicast DNS (Bonjour, Avahi), without typing addresses.

An announcement proves nothing: the connection checks which device answers at the address.
"""

from __future__ import annotations

import asyncio
import concurrent.futures as futures
import contextlib
import logging
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
BROWSE_S = 3.0  # two rounds of queries: a service repeats an answer only after one second

MAX_FOUND = 256  # workers; more than a home network has, fewer than a flood of announcements
MAX_PROPERTIES = 16
MAX_KEY = 32  # characters
MAX_VALUE = 128
_GRACE_S = 0.3  # time for the details of the worker that was heard last
# Time to listen before zeroconf probes the name, which takes at least 1.15 s. A service that answered within the last
# second answers our query up to 1.24 s later.
_LISTEN_S = 0.5
_GROUP = "224.0.0.251"
_PORT = 5353
_BY_HAND = "give the addresses of the workers instead"


@dataclass(frozen=True)
class Announcement:
    """Announcement of a worker to the network."""

    name: str
    port: int
    addresses: tuple[str, ...]  # from `announced_addresses`
    version: str  # version of the runtime
    cluster: str = ""  # first hexadecimal digits of the cluster's fingerprint; empty without a cluster
    secure: bool = False  # True if the worker accepts only TLS


@dataclass(frozen=True, order=True)
class Discovered:
    """A worker that announced itself. All fields are its own claims, cut to printable text of limited length."""

    name: str
    addresses: tuple[str, ...]  # never empty; the address most likely reachable from here comes first
    port: int
    properties: Mapping[str, str] = field(compare=False)


class Announcer:
    """Announces a worker from `start` to `close`, or within a `with` block. `start` blocks for up to three seconds.

    interfaces: IPv4 addresses of the interfaces to announce on. The default is those of the announced addresses, so
    that a worker that listens on one network is not announced in another.
    """

    def __init__(self, announcement: Announcement, interfaces: Sequence[str] | None = None) -> None:
        if not announcement.addresses:
            raise DiscoveryError("there is no address to announce: this device has only link-local ones, or no network")
        name = announcement.name
        if not name or not name.isprintable() or len(name.encode()) > MAX_NAME:
            raise DiscoveryError(f"a device name needs 1 to {MAX_NAME} bytes of printable text, got {name!r:.80}")
        self._announcement = announcement
        of_ipv4 = [address for address in announcement.addresses if ":" not in address]
        self._interfaces = (of_ipv4 or None) if interfaces is None else interfaces  # None means all interfaces
        self._zeroconf: Zeroconf | None = None
        self.name = announcement.name  # the announced name; `start` changes it if another device has it

    def start(self) -> None:
        """Announce the worker. Raises DiscoveryError if the network does not allow it; the worker still works."""
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
            # Not the host's own name, which another mDNS service here may use with other addresses.
            server=f"edge-{secrets.token_hex(4)}.local.",
            parsed_addresses=list(announcement.addresses),
        )
        zeroconf = _opened(self._interfaces)
        try:
            # Zeroconf checks if the name is taken, but asks for a unicast answer. On one machine such an answer can
            # reach the wrong process. So a multicast query comes first, and its answer is in zeroconf's cache in time.
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
        """Withdraw the announcement. It can be called repeatedly."""
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is not None:
            _close(zeroconf)

    def __enter__(self) -> Announcer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Listener:
    """Listener that tracks which services are present, and requests the details of each of them."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._lock = threading.Lock()
        self._alive: dict[str, str] = {}  # name by lower-case name, because names ignore case
        self._requests: list[futures.Future[bool]] = []

    def __call__(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        """Handle a change, on zeroconf's thread. Zeroconf passes the arguments by keyword."""
        from zeroconf import Error, ServiceInfo, ServiceStateChange

        with self._lock:
            if state_change is ServiceStateChange.Removed:
                self._alive.pop(name.lower(), None)
                return
            if name.lower() in self._alive or len(self._alive) >= MAX_FOUND or len(self._requests) >= 2 * MAX_FOUND:
                return
            try:
                info = ServiceInfo(service_type, name)
            except (Error, ValueError):  # the name is not valid
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
        with self._lock:  # only now: services that said goodbye during the wait are gone
            infos = [ServiceInfo(SERVICE, name) for name in self._alive.values()]
        return [info for info in infos if info.load_from_cache(zeroconf)]


def browse(timeout_s: float = BROWSE_S, interfaces: Sequence[str] | None = None) -> list[Discovered]:
    """Return the workers that announce themselves within `timeout_s` seconds, sorted, without those that said goodbye.

    It always takes the whole time, because the number of workers is unknown.

    interfaces: IPv4 addresses of the interfaces to query on; by default all.

    Raises DiscoveryError if this machine cannot use multicast.
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
    """Return the addresses to announce for a worker that listens on `listen`.

    For "0.0.0.0" these are all IPv4 addresses of this machine; for "::" or "" also the IPv6 ones; never loopback. For
    another address or a host name they are its addresses. Link-local IPv6 addresses are left out, because they lead
    nowhere without the name of an interface.

    Raises DiscoveryError if no address is left.
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
    """Return Zeroconf on the interfaces that can multicast. Raises DiscoveryError if none can."""
    from zeroconf import Zeroconf

    if interfaces is None:
        interfaces = [str(entry.ip) for entry in own_networks() if entry.version == 4]
    usable = [address for address in dict.fromkeys(interfaces) if _can_multicast(address)]
    if not usable:
        raise DiscoveryError(
            "discovery is not possible: multicast works on no network interface of this machine "
            f"({', '.join(interfaces) or 'no IPv4 address'}): {_BY_HAND}"
        )
    # It would print a traceback for each message on an interface that has gone, as when Wi-Fi disconnects.
    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)
    # In a thread of its own: Zeroconf would otherwise attach to an event loop that runs in this thread, and block it.
    with futures.ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(Zeroconf, interfaces=usable).result()
        except (OSError, RuntimeError) as error:
            raise DiscoveryError(f"discovery cannot use UDP port {_PORT} ({_reason(error)}): {_BY_HAND}") from error


def _can_multicast(address: str) -> bool:
    """Return whether the interface with this IPv4 address can join and reach the mDNS group, without sending."""
    try:
        packed = socket.inet_aton(address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_GROUP) + packed)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, packed)
            probe.connect((_GROUP, _PORT))  # asks only for a route
    except OSError:
        return False
    return True


def _close(zeroconf: Zeroconf) -> None:
    """Close zeroconf. A network that has disappeared is not an error at this point."""
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
    """Replace characters that would move the cursor of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _reason(error: BaseException) -> str:
    """Return the message of an error, or its class name if it has none, like a timeout."""
    return str(error) or type(error).__name__
