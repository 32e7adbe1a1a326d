"""How the ranks of a group come to have links: the lower rank dials, the higher one answers, and both know the secret.

A rank is reached in two ways: its own TCP port, and a gRPC stream through its daemon, which relays to the rank's door,
a Unix socket. The dialler tries both, measures, and keeps the faster. So a rank behind a firewall that lets only the
daemon's port through is reached all the same.

On the Unix socket the daemon first says, in a CONTROL frame, whom it admitted: the name in the certificate, nothing in
the clear. Then, on either, the first frame both ways is HELLO. Then the dialler measures (transport/measure.py), and at
last says USE, or closes.
"""

from __future__ import annotations

import hmac
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge import log
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused, TransportError
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import TENSOR_BYTES, LinkFigures, answer, done, measure, round_trips
from transport.tcp_link import TcpLink

if TYPE_CHECKING:  # loaded only where there are credentials: it takes cryptography with it
    from transport.security import Credentials

Fetch = Callable[[], "Credentials"]  # asked at every connection: certificates and revocations change meanwhile
SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{SECRET_BYTES}sHH")  # secret, from rank, to rank
_USE = b"use"
_TRIAL_S = 0.1  # for measuring one of the two ways
_MEASURE_S = 0.1  # for the latency and bandwidth of the one in use, from which `auto` chooses an allreduce
_MOST_NAME = 256  # bytes of whom the daemon admitted
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
    figures: LinkFigures  # a first, short measurement
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
        credentials: Fetch | None,
        poll_s: float,
        streams: bool = False,
    ) -> None:
        """Listens at once; OSError where that is not possible. `credentials`: TLS on the TCP port.

        streams: what links are for (`transport.tcp_link.tune`).
        """
        self.rank = rank
        self._secret = secret
        self._deadlines = deadlines
        self._credentials = credentials
        self._poll_s = poll_s
        self._streams = streams
        self._links: dict[int, tuple[Link, str]] = {}  # and the name of who dialled, where that is known
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
        for listener in (self._tcp, self._unix):
            threading.Thread(target=self._accept, args=(listener,), daemon=True, name="doorway").start()

    def wait_for(self, names: Mapping[int, str], timeout_s: float) -> dict[int, Link]:
        """The links of these ranks once all have dialled. LinkTimeout names those that have not; Refused where another
        device than the named one dialled as such a rank, which shows where there are credentials.
        """
        with self._came:
            self._came.wait_for(lambda: names.keys() <= self._links.keys(), timeout_s)
            missing = sorted(names.keys() - self._links.keys())
            if missing:
                raise LinkTimeout(f"ranks {missing} did not dial rank {self.rank} within {timeout_s:g} s")
            for rank, name in names.items():
                found = self._links[rank][1]
                if self._credentials is not None and found != name:
                    raise Refused(f"rank {rank} was to be {name}, it is {found or 'nobody we know'} who dialled as it")
            return {rank: self._links.pop(rank)[0] for rank in names}

    def close(self) -> None:
        """Take no more links, and end those that nobody waited for."""
        with self._came:
            self._closed = True
            for link, _ in self._links.values():
                link.close()
        self._tcp.close()
        self._unix.close()

    def _accept(self, listener: socket.socket) -> None:
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
                args = (sock, listener is self._unix, peer, slots)
                threading.Thread(target=self._welcome, args=args, daemon=True, name="welcome").start()
            else:
                sock.close()

    def _welcome(self, sock: socket.socket, relayed: bool, peer: str, slots: threading.Semaphore) -> None:
        """One connection, from its first byte until it is of use or refused."""
        try:
            name = ""
            if self._credentials is not None and not relayed:
                sock, name = self._secured(sock, peer, self._credentials())
            link = TcpLink(sock, peer, self._deadlines, self._poll_s, self._streams)
            try:
                if relayed:
                    name = bytes(link.receive(self._deadlines.connect_timeout_s, _MOST_NAME).payload).decode()
                rank = self._greet(link)
                answer(link)
                if bytes(link.receive(self._deadlines.connect_timeout_s * _WAYS_WAIT).payload) != _USE:
                    raise ProtocolError(f"{link.peer} neither uses nor closes its link")
                with self._came:
                    if self._closed:
                        raise Refused(f"{link.peer} came too late")
                    self._check_free(rank, link)
                    self._links[rank] = link, name
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

    def _secured(self, sock: socket.socket, peer: str, credentials: Credentials) -> tuple[socket.socket, str]:
        from transport import security

        timeout_s = self._deadlines.connect_timeout_s
        context = security.server_context(credentials)
        tls = security.handshake(sock, context, server_side=True, peer=peer, timeout_s=timeout_s)
        try:
            found = security.admit(tls.getpeercert(binary_form=True), credentials, security.MEMBERS)
        except BaseException:
            tls.close()
            raise
        return tls, found.name

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
        if source >= self.rank:
            link.refuse(f"rank {source} is dialled by rank {self.rank}, not the other way round")
            raise Refused(f"{link.peer} says it is rank {source}")
        link.peer = f"rank {source}"
        with self._came:
            self._check_free(source, link)
        link.send(frame.payload, Kind.HELLO)
        return int(source)

    def _check_free(self, rank: int, link: Link) -> None:
        """Refuse whoever comes second."""
        if rank in self._links:
            link.refuse(f"rank {rank} has a link already")
            raise Refused(f"{link.peer} dialled again, as somebody who has a link already")


def dial(
    peer: Peer,
    rank: int,
    secret: bytes,
    *,
    deadlines: Deadlines,
    credentials: Fetch | None,
    transport: str = "auto",
    poll_s: float,
    streams: bool = False,
) -> Dialled:
    """A link to a higher rank, over TCP or gRPC, whichever answers 8 KiB sooner; or as `transport` says.

    What counts is a tenth of the trips, the fast ones: others tell of a busy or throttled processor more than of a way.

    The error of the last way tried where none works.
    """
    own = credentials() if credentials else None
    ways: dict[str, Callable[[], Link]] = {}
    if transport in ("auto", "tcp") and peer.tcp_port:
        ways["tcp"] = lambda: _dial_tcp(peer, deadlines, own, poll_s, streams)
    if transport in ("auto", "grpc"):
        ways["grpc"] = lambda: _dial_grpc(peer, deadlines, own)
    if not ways:
        raise Refused(f"{peer} takes no TCP links; use gRPC")
    links: dict[str, Link] = {}
    taken: dict[str, list[float]] = {}  # round trips
    fast: dict[str, float] = {}
    trips: dict[str, float] = {}  # medians
    failed: dict[str, TransportError] = {}
    for kind, connect in ways.items():
        try:
            links[kind] = connect()
            _hello(links[kind], rank, peer, secret)
            taken[kind] = times = round_trips(links[kind], TENSOR_BYTES, _TRIAL_S)
            fast[kind], trips[kind] = times[len(times) // 10], times[len(times) // 2]
        except TransportError as error:
            failed[kind] = error
    best = min(fast, key=lambda kind: fast[kind], default="")
    for kind, link in links.items():
        if kind != best:
            link.close()
    if not best:
        raise list(failed.values())[-1]
    link = links[best]
    try:
        if streams:  # nobody sums over them, so nobody asks
            done(link)
            figures = LinkFigures(trips[best], max(taken[best]), min(taken[best]), math.inf, math.inf)
        else:
            figures = measure(link, _MEASURE_S)
        link.send(_USE, Kind.CONTROL)
    except BaseException:
        link.close()
        raise
    return Dialled(link, trips.get("tcp", 0.0), trips.get("grpc", 0.0), figures, _why(best, trips, failed))


def _why(best: str, trips: dict[str, float], failed: dict[str, TransportError]) -> str:
    others = [f"{kind} {trips[kind] * 1e6:.0f} us" for kind in trips if kind != best]
    others += [f"{kind} failed: {error}" for kind, error in failed.items()]
    return f"{best} {trips[best] * 1e6:.0f} us for 8 KiB there and back" + "".join(f", {other}" for other in others)


def _hello(link: Link, rank: int, peer: Peer, secret: bytes) -> None:
    hello = _HELLO.pack(secret, rank, peer.rank)
    link.send(hello, Kind.HELLO)
    back = link.receive(link.deadlines.connect_timeout_s)
    if back.kind is not Kind.HELLO or bytes(back.payload) != hello:
        raise ProtocolError(f"{peer} did not return our HELLO")


def _dial_tcp(peer: Peer, deadlines: Deadlines, credentials: Credentials | None, poll_s: float, streams: bool) -> Link:
    sock = connect(peer.host, peer.tcp_port, str(peer), deadlines.connect_timeout_s)
    if credentials is not None:
        from transport import security

        context = security.client_context(credentials)
        tls = security.handshake(
            sock, context, server_side=False, peer=str(peer), timeout_s=deadlines.connect_timeout_s
        )
        try:
            found = security.admit(tls.getpeercert(binary_form=True), credentials, security.MEMBERS)
            if found.name != peer.name:
                raise Refused(f"{peer} was to answer at {peer.host}:{peer.tcp_port}, it is {found.name}")
        except BaseException:
            tls.close()
            raise
        sock = tls
    return TcpLink(sock, str(peer), deadlines, poll_s, streams)


def connect(host: str, port: int, peer: str, timeout_s: float) -> socket.socket:
    """A TCP connection; LinkTimeout or Refused."""
    try:
        return socket.create_connection((host, port), timeout_s)
    except TimeoutError:
        where = f"{peer} at {host}:{port}"
        raise LinkTimeout(f"{where}: no connection within {timeout_s:g} s (connect_timeout_s)") from None
    except OSError as error:
        raise Refused(f"{peer} at {host}:{port}: {error.strerror or error}") from error


def _dial_grpc(peer: Peer, deadlines: Deadlines, credentials: Credentials | None) -> Link:
    from edge.channel import open_channel
    from transport import grpc_link

    # A worker without credentials was told that everything may pass in the clear.
    insecure = credentials is None
    channel, found = open_channel(peer.host, peer.port, credentials, deadlines.connect_timeout_s, insecure)
    if credentials is not None and (found is None or found.name != peer.name):
        channel.close()
        who = found.name if found else "somebody in the clear"
        raise Refused(f"{peer} was to answer at {peer.host}:{peer.port}, it is {who}")

    def ended() -> None:  # in gRPC's thread, which closing the channel waits for
        threading.Thread(target=channel.close, daemon=True, name="close").start()

    return grpc_link.dial(channel, str(peer), peer.session, deadlines, ended)
