"""How the ranks of a group come to have links: the lower rank dials, the higher one answers, and both know the secret.

A rank is reached in two ways: its own TCP port, and a gRPC stream through its daemon, which relays to the rank's door,
a Unix socket. The dialler tries both, measures, and keeps the faster. So a rank behind a firewall that lets only the
daemon's port through is reached all the same.

First frame both ways is HELLO. Then the dialler measures (transport/measure.py), and at last says USE, or closes.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge import log
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused, TransportError
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import TENSOR_BYTES, answer, done, round_trips
from transport.tcp_link import TcpLink

if TYPE_CHECKING:  # loaded only where there are credentials: it takes cryptography with it
    from transport.security import Credentials

SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{SECRET_BYTES}sHH")  # secret, from rank, to rank
_USE = b"use"
_TRIAL_S = 0.1  # for measuring one of the two ways
_HANDSHAKES = 64  # at a time; a stranger's connections wait in the kernel beyond that
_WAYS_WAIT = 4  # connect timeouts a dialler may take with the other way before it says USE
_LOOK_S = 0.5  # how often an accepting thread looks whether it should end


@dataclass(frozen=True)
class Peer:
    """Where a rank is reached."""

    rank: int
    name: str
    host: str
    port: int  # of its daemon
    tcp_port: int  # of the rank itself; 0 if it takes no TCP links
    session: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


@dataclass(frozen=True)
class Dialled:
    """A link to a peer and how it was chosen."""

    link: Link
    tcp_s: float  # round trip of 8 KiB, median; 0 where it was not reached or not tried
    grpc_s: float
    why: str


class Doorway:
    """Where a rank is dialled: a TCP port and a Unix socket. Every connection must first name the secret."""

    def __init__(
        self,
        host: str,
        door: Path,
        rank: int,
        secret: bytes,
        deadlines: Deadlines,
        credentials: Credentials | None,
        poll_s: float,
    ) -> None:
        """Listens at once; OSError where that is not possible. `credentials`: TLS on the TCP port."""
        self.rank = rank
        self._secret = secret
        self._deadlines = deadlines
        self._credentials = credentials
        self._poll_s = poll_s
        self._links: dict[int, Link] = {}
        self._came = threading.Condition()
        self._closed = False
        v6 = ":" in host
        family = socket.AF_INET6 if v6 else socket.AF_INET
        both = v6 and socket.has_dualstack_ipv6()  # :: is for IPv4 as well, as the daemon has it
        self._tcp = socket.create_server((host, 0), family=family, backlog=_HANDSHAKES, dualstack_ipv6=both)
        self.tcp_port: int = self._tcp.getsockname()[1]
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(str(door))
        self._unix.listen(_HANDSHAKES)
        for listener, secure in ((self._tcp, credentials is not None), (self._unix, False)):
            threading.Thread(target=self._accept, args=(listener, secure), daemon=True, name="doorway").start()

    def wait_for(self, ranks: Collection[int], timeout_s: float) -> dict[int, Link]:
        """The links of these ranks once all have dialled. LinkTimeout names those that have not."""
        with self._came:
            self._came.wait_for(lambda: set(ranks) <= self._links.keys(), timeout_s)
            missing = sorted(set(ranks) - self._links.keys())
            if missing:
                raise LinkTimeout(f"ranks {missing} did not dial rank {self.rank} within {timeout_s:g} s")
            return {rank: self._links.pop(rank) for rank in ranks}

    def close(self) -> None:
        """Take no more links, and end those that nobody waited for."""
        with self._came:
            self._closed = True
            for link in self._links.values():
                link.close()
        self._tcp.close()
        self._unix.close()

    def _accept(self, listener: socket.socket, secure: bool) -> None:
        listener.settimeout(_LOOK_S)
        slots = threading.Semaphore(_HANDSHAKES)  # of its own: strangers on the TCP port must not block the door
        while not self._closed:
            try:
                sock, address = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or out of descriptors: some will come back
                time.sleep(_LOOK_S)
                continue
            peer = f"{address[0]}:{address[1]}" if listener is self._tcp else "a gRPC stream"
            if slots.acquire(timeout=_LOOK_S):
                args = (sock, secure, peer, slots)
                threading.Thread(target=self._welcome, args=args, daemon=True, name="welcome").start()
            else:
                sock.close()

    def _welcome(self, sock: socket.socket, secure: bool, peer: str, slots: threading.Semaphore) -> None:
        """One connection, from its first byte until it is of use or refused."""
        try:
            if secure:
                sock = self._secured(sock, peer)
            link = TcpLink(sock, peer, self._deadlines, self._poll_s)
            try:
                rank = self._greet(link)
                answer(link)
                if bytes(link.receive(self._deadlines.connect_timeout_s * _WAYS_WAIT).payload) != _USE:
                    raise ProtocolError(f"{link.peer} neither uses nor closes its link")
                with self._came:
                    if self._closed:
                        raise Refused(f"{link.peer} came too late")
                    self._links[rank] = link
                    self._came.notify_all()
            except BaseException:
                link.close()
                raise
        except LinkClosed:
            pass  # the dialler found a better way
        except Exception as error:  # a stranger, or a damaged connection: nobody waits for it, and others still come
            log.info("connection-refused", peer=peer, error=type(error).__name__, why=error)
        finally:
            slots.release()

    def _secured(self, sock: socket.socket, peer: str) -> socket.socket:
        from transport import security

        assert self._credentials is not None
        timeout_s = self._deadlines.connect_timeout_s
        context = security.server_context(self._credentials)
        tls = security.handshake(sock, context, server_side=True, peer=peer, timeout_s=timeout_s)
        try:
            security.admit(tls.getpeercert(binary_form=True), self._credentials, security.MEMBERS)
        except BaseException:
            tls.close()
            raise
        return tls

    def _greet(self, link: Link) -> int:
        frame = link.receive(self._deadlines.connect_timeout_s, _HELLO.size)
        if frame.kind is not Kind.HELLO or len(frame.payload) != _HELLO.size:
            raise ProtocolError(f"{link.peer} did not begin with HELLO")
        secret, source, target = _HELLO.unpack(frame.payload)
        if not hmac.compare_digest(secret, self._secret):
            link.refuse("the secret is not this group's")
            raise Refused(f"{link.peer} does not know the group's secret")
        if target != self.rank:
            link.refuse(f"this is rank {self.rank}, not {target}")
            raise Refused(f"{link.peer} looks for rank {target}")
        link.peer = f"rank {source}"
        link.send(frame.payload, Kind.HELLO)
        return int(source)


def dial(
    peer: Peer,
    rank: int,
    secret: bytes,
    *,
    deadlines: Deadlines,
    credentials: Credentials | None,
    transport: str = "auto",
    poll_s: float,
) -> Dialled:
    """A link to a higher rank, over TCP or gRPC, whichever answers 8 KiB sooner; or as `transport` says.

    The error of the last way tried where none works.
    """
    ways: dict[str, Callable[[], tuple[Link, Callable[[], None]]]] = {}
    if transport in ("auto", "tcp") and peer.tcp_port:
        ways["tcp"] = lambda: (_dial_tcp(peer, deadlines, credentials, poll_s), _nothing)
    if transport in ("auto", "grpc"):
        ways["grpc"] = lambda: _dial_grpc(peer, deadlines, credentials)
    if not ways:
        raise Refused(f"{peer} takes no TCP links; use gRPC")
    links: dict[str, tuple[Link, Callable[[], None]]] = {}
    trips: dict[str, float] = {}
    failed: dict[str, TransportError] = {}
    for kind, connect in ways.items():
        try:
            links[kind] = connect()
            _hello(links[kind][0], rank, peer, secret)
            trips[kind] = _trial(links[kind][0])
        except TransportError as error:
            failed[kind] = error
            if kind in links:
                _, end = links.pop(kind)
                end()
    if not trips:
        raise list(failed.values())[-1]
    best = min(trips, key=lambda kind: trips[kind])
    for kind, (link, end) in links.items():
        if kind != best:
            link.close()
            end()
    links[best][0].send(_USE, Kind.CONTROL)
    return Dialled(links[best][0], trips.get("tcp", 0.0), trips.get("grpc", 0.0), _why(best, trips, failed))


def _why(best: str, trips: dict[str, float], failed: dict[str, TransportError]) -> str:
    others = [f"{kind} {trips[kind] * 1e6:.0f} us" for kind in trips if kind != best]
    others += [f"{kind} failed: {error}" for kind, error in failed.items()]
    return f"{best} {trips[best] * 1e6:.0f} us for 8 KiB there and back" + "".join(f", {other}" for other in others)


def _trial(link: Link) -> float:
    trips = round_trips(link, TENSOR_BYTES, _TRIAL_S)
    done(link)
    return trips[len(trips) // 2]


def _hello(link: Link, rank: int, peer: Peer, secret: bytes) -> None:
    hello = _HELLO.pack(secret, rank, peer.rank)
    link.send(hello, Kind.HELLO)
    back = link.receive(link.deadlines.connect_timeout_s)
    if back.kind is not Kind.HELLO or bytes(back.payload) != hello:
        raise ProtocolError(f"{peer} did not return our HELLO")


def _dial_tcp(peer: Peer, deadlines: Deadlines, credentials: Credentials | None, poll_s: float) -> Link:
    sock = connect(peer.host, peer.tcp_port, str(peer), deadlines.connect_timeout_s)
    if credentials is not None:
        from transport import security

        context = security.client_context(credentials)
        tls = security.handshake(
            sock, context, server_side=False, peer=str(peer), timeout_s=deadlines.connect_timeout_s
        )
        found = security.admit(tls.getpeercert(binary_form=True), credentials, security.MEMBERS)
        if found.name != peer.name:
            tls.close()
            raise Refused(f"{peer} was to answer at {peer.host}:{peer.tcp_port}, it is {found.name}")
        sock = tls
    return TcpLink(sock, str(peer), deadlines, poll_s)


def connect(host: str, port: int, peer: str, timeout_s: float) -> socket.socket:
    """A TCP connection; LinkTimeout or Refused."""
    try:
        return socket.create_connection((host, port), timeout_s)
    except TimeoutError:
        where = f"{peer} at {host}:{port}"
        raise LinkTimeout(f"{where}: no connection within {timeout_s:g} s (connect_timeout_s)") from None
    except OSError as error:
        raise Refused(f"{peer} at {host}:{port}: {error.strerror or error}") from error


def _dial_grpc(peer: Peer, deadlines: Deadlines, credentials: Credentials | None) -> tuple[Link, Callable[[], None]]:
    from edge.channel import open_channel
    from transport import grpc_link

    # A worker without credentials was told that everything may pass in the clear.
    insecure = credentials is None
    channel, found = open_channel(peer.host, peer.port, credentials, deadlines.connect_timeout_s, insecure)
    if found is not None and found.name != peer.name:
        channel.close()
        raise Refused(f"{peer} was to answer at {peer.host}:{peer.port}, it is {found.name}")
    return grpc_link.dial(channel, str(peer), peer.session, deadlines), channel.close


def _nothing() -> None:
    pass
