"""Dialling of a higher rank: over TCP if the rank can be reached, otherwise over a gRPC stream through its daemon."""

from __future__ import annotations

import math
import socket
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from devices.network import nearest_first, own_networks
from edge.net.peers import HELLO, Fetch, Peer
from edge.net.racing import race
from transport.errors import LinkTimeout, ProtocolError, Refused, TransportError
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import TENSOR_BYTES, LinkFigures, finish, measure_once, round_trips
from transport.tcp_link import TcpLink

if TYPE_CHECKING:  # cryptography is loaded only if there are credentials
    from transport.security import Credentials

KINDS = ("tcp", "grpc")  # in the order in which they are tried
_ROUND_TRIPS_S = 0.03  # time for round trips of 8 KiB
_MEASURE_S = 0.1  # time for latency and bandwidth; `auto` chooses an allreduce by them
_MOST_WHY = 300  # characters of another rank's text


@dataclass(frozen=True)
class LinkState:
    """One link between two ranks, for people."""

    ranks: tuple[int, int]  # the lower one, which dialled, comes first
    kind: str
    why: str  # reason for this kind
    round_trip_s: float = 0.0  # median of 8 KiB there and back; 0: not measured
    bytes_per_s: float = 0.0  # the slower direction of a short measurement; 0: not measured

    def __post_init__(self) -> None:
        """Raise ValueError for values that no link has, because they come from another device."""
        low, high = self.ranks
        figures = (self.round_trip_s, self.bytes_per_s)
        if not 0 <= low < high or self.kind not in KINDS or not all(0 <= figure < math.inf for figure in figures):
            raise ValueError(f"ranks {low} and {high} have no link of kind {self.kind!r:.80} with these figures")
        printable = "".join(c if c.isprintable() else " " for c in self.why)[:_MOST_WHY]
        object.__setattr__(self, "why", printable)

    def to_json(self) -> dict[str, Any]:
        """Return plain values by field."""
        return {"ranks": list(self.ranks), "kind": self.kind, "why": self.why}


@dataclass(frozen=True)
class Dialled:
    """A link to a peer, its figures, and the reason for its kind."""

    link: Link
    round_trip_s: float  # median of 8 KiB there and back
    figures: LinkFigures  # a first, short measurement
    why: str

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second in the slower direction; 0 if they were not measured."""
        slower = min(self.figures.send_bytes_per_s, self.figures.receive_bytes_per_s)
        return slower if math.isfinite(slower) else 0.0


@dataclass(frozen=True)
class Dialler:
    """Dials the higher ranks of a group, on behalf of one rank."""

    rank: int
    secret: bytes
    deadlines: Deadlines
    credentials: Fetch | None
    poll_s: float
    transport: str = "auto"  # auto, or the only kind to dial: tcp, grpc
    streams: bool = False  # purpose of the links (`transport.tcp_link.TcpLink`)

    def dial(self, peer: Peer) -> Dialled:
        """Return a measured link to a higher rank. If no kind of link works, raise the error of the last kind."""
        kinds = [kind for kind in KINDS if self.transport in ("auto", kind) and (kind != "tcp" or peer.tcp_port)]
        if not kinds:
            raise Refused(f"{peer} takes no TCP links; use gRPC")
        notes = ""
        for kind in kinds:
            try:
                host, link = self.connect(kind, peer)
                break
            except TransportError as error:
                if kind == kinds[-1]:
                    raise
                notes = f", {kind} failed: {error}"
        if host != peer.host:
            notes += f"; at {host}, as {peer.host} did not answer first"
        try:
            return self._measured(link, notes)
        except BaseException:
            link.close()
            raise

    def _measured(self, link: Link, notes: str) -> Dialled:
        """Measure a new link. notes: clauses about kinds of links and addresses that failed"""
        times = round_trips(link, TENSOR_BYTES, _ROUND_TRIPS_S)
        median_s = times[len(times) // 2]
        if self.streams:  # no sums go over these links, so their bandwidth is not needed
            figures = LinkFigures(median_s, times[-1], times[0], math.inf, math.inf)
        else:
            figures = measure_once(link, _MEASURE_S)
        finish(link)
        why = f"{link.kind} {median_s * 1e6:.0f} us for 8 KiB there and back{notes}"
        return Dialled(link, median_s, figures, why)

    def connect(self, kind: str, peer: Peer) -> tuple[str, Link]:
        """Dial a peer over one kind of link, and perform the handshake. Return the address that answered, and the link.

        The address that the owner uses is tried first, then the other addresses of the peer's device.
        """
        own = self.credentials() if self.credentials else None
        hosts = [peer.host]
        if peer.addresses:
            hosts = list(dict.fromkeys([peer.host, *nearest_first(peer.addresses, own_networks())]))

        def dial(host: str, timeout_s: float) -> Link:
            return self._greeted(kind, replace(peer, host=host), own, timeout_s)

        timeout_s = self.deadlines.connect_timeout_s
        return (peer.host, dial(peer.host, timeout_s)) if len(hosts) == 1 else race(hosts, dial, timeout_s)

    def _greeted(self, kind: str, peer: Peer, own: Credentials | None, timeout_s: float) -> Link:
        """Dial a peer at one address, and perform the handshake. timeout_s: limit of connecting"""
        link = self._tcp(peer, own, timeout_s) if kind == "tcp" else self._grpc(peer, own, timeout_s)
        hello = HELLO.pack(self.secret, self.rank, peer.rank)
        try:
            link.send(hello, Kind.HELLO)
            back = link.receive(self.deadlines.connect_timeout_s)
            if back.kind is not Kind.HELLO or bytes(back.payload) != hello:
                raise ProtocolError(f"{peer} did not return our HELLO")
        except BaseException:
            link.close()
            raise
        return link

    def _tcp(self, peer: Peer, own: Credentials | None, timeout_s: float) -> Link:
        sock = connect(peer.host, peer.tcp_port, str(peer), timeout_s)
        if own is not None:
            from transport import security

            context = security.client_context(own)
            tls = security.handshake(
                sock, context, server_side=False, peer=str(peer), timeout_s=self.deadlines.connect_timeout_s
            )
            try:
                identity = security.admit(tls.getpeercert(binary_form=True), own, security.MEMBERS)
                if identity.name != peer.name:
                    raise Refused(f"{peer} was expected at {peer.host}:{peer.tcp_port}, but {identity.name} answered")
            except BaseException:
                tls.close()
                raise
            sock = tls
        return TcpLink(sock, str(peer), self.deadlines, self.poll_s, self.streams)

    def _grpc(self, peer: Peer, own: Credentials | None, timeout_s: float) -> Link:
        from edge.net.channel import open_channel
        from transport import grpc_link

        # A worker without credentials was started to allow unencrypted connections.
        insecure = own is None
        channel, identity = open_channel(peer.host, peer.port, own, timeout_s, insecure)
        if own is not None and (identity is None or identity.name != peer.name):
            channel.close()
            name = identity.name if identity else "a worker without encryption"
            raise Refused(f"{peer} was expected at {peer.host}:{peer.port}, but {name} answered")

        def ended() -> None:  # runs in gRPC's thread, and closing the channel waits for that thread
            threading.Thread(target=channel.close, daemon=True, name="close").start()

        return grpc_link.dial(channel, str(peer), peer.session, self.deadlines, ended)


def connect(host: str, port: int, peer: str, timeout_s: float) -> socket.socket:
    """Open a TCP connection. Raise LinkTimeout or Refused."""
    try:
        return socket.create_connection((host, port), timeout_s)
    except TimeoutError:
        where = f"{peer} at {host}:{port}"
        raise LinkTimeout(f"{where}: no connection within {timeout_s:g} s (connect_timeout_s)") from None
    except OSError as error:
        raise Refused(f"{peer} at {host}:{port}: {error.strerror or error}") from error
