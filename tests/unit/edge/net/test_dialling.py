"""A dial is answered by the device that was named, not just by any member of the cluster."""

import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from devices.errors import TrustError
from edge.net import peers
from edge.net.dialling import Dialled, Dialler
from edge.net.peers import HELLO, SECRET_BYTES, STRIPE, Listener, Peer
from tests.support import memory_link
from tests.support.helpers import until
from tests.support.trust import Cluster, membership_in, shown
from transport import security
from transport.errors import LinkClosed, ProtocolError, Refused
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import LinkFigures
from transport.striped_link import MOST_STRIPES, StripedLink
from transport.tcp_link import TcpLink

SECRET = bytes(range(SECRET_BYTES))
QUICK = Deadlines(5.0, 5.0, 5.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A cluster of a desk, its owner, and two members."""
    cluster = Cluster(tmp_path_factory.mktemp("c"), time.time())
    for name in ("pi", "mallory"):
        cluster.joined(name)
    return cluster


def dialled(cluster: Cluster, transport: str, **where: Any) -> None:
    """Dial `pi` as the desk, and hang up."""
    peer = Peer(**({"rank": 1, "name": "pi", "host": "127.0.0.1", "port": 0, "tcp_port": 0, "session": "s"} | where))
    own = shown(membership_in(cluster.at("desk")))
    Dialler(0, SECRET, QUICK, lambda: own, 0, transport).dial(peer).link.close()


@pytest.mark.parametrize(("answers", "admitted"), [("pi", True), ("mallory", False)])
def test_over_tcp(cluster: Cluster, tmp_path: Path, answers: str, admitted: bool) -> None:
    """mallory knows the secret and is a member: it may still not be taken for pi."""
    own = shown(membership_in(cluster.at(answers)))
    listener = Listener("127.0.0.1", tmp_path / "door", 1, SECRET, QUICK, lambda: own, 0)
    try:
        if admitted:
            dialled(cluster, "tcp", tcp_port=listener.tcp_port)
        else:
            with pytest.raises(Refused, match=r"rank 1 \(pi\) was to answer at .*, it is mallory"):
                dialled(cluster, "tcp", tcp_port=listener.tcp_port)
    finally:
        listener.close()


def test_over_grpc(cluster: Cluster) -> None:
    own = shown(membership_in(cluster.at("mallory")))
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", security.grpc_server_credentials(lambda: own))
    server.start()
    try:
        with pytest.raises(Refused, match=r"rank 1 \(pi\) was to answer at .*, it is mallory"):
            dialled(cluster, "grpc", port=port)
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("returned", "accepted"),
    [
        (HELLO.pack(SECRET, 0, 1), True),
        (HELLO.pack(SECRET, 1, 0), False),
        (HELLO.pack(bytes(SECRET_BYTES), 0, 1), False),
    ],
)
def test_a_peer_returns_the_very_hello(returned: bytes, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not know the secret cannot."""
    here, there = memory_link.pair()
    monkeypatch.setattr(Dialler, "_tcp", lambda *_: here)
    there.send(returned, Kind.HELLO)
    dialler = Dialler(0, SECRET, QUICK, None, 0, "tcp")
    peer = Peer(1, "pi", "127.0.0.1", 0, 1, "s")
    if accepted:
        assert dialler.connect("tcp", peer) is here
    else:
        with pytest.raises(ProtocolError, match=r"rank 1 \(pi\) did not return our HELLO"):
            dialler.connect("tcp", peer)
        assert here.broken is not None


def test_an_error_at_the_second_way_leaves_no_link_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where this device's credentials are replaced by damaged ones."""
    here, there = memory_link.pair()
    monkeypatch.setattr(Dialler, "_tcp", lambda *_: here)
    there.send(HELLO.pack(SECRET, 0, 1), Kind.HELLO)
    ways: list[Any] = [None]

    def credentials() -> Any:
        if not ways:
            raise TrustError("the credentials are damaged")
        return ways.pop()

    with pytest.raises(TrustError):
        Dialler(0, SECRET, QUICK, credentials, 0).dial(Peer(1, "pi", "127.0.0.1", 1, 1, "s"))
    assert here.broken is not None


# Several addresses of one device.


@pytest.mark.parametrize("secure", [False, True], ids=["in the clear", "tls"])
def test_an_impostor_at_the_first_address_is_refused_and_the_next_is_tried(
    cluster: Cluster, tmp_path: Path, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With certificates it is a member that knows the secret; in the clear, a rank of another group."""
    desk, pi, mallory = (shown(membership_in(cluster.at(name))) for name in ("desk", "pi", "mallory"))
    listener = Listener("127.0.0.2", tmp_path / "pi", 1, SECRET, QUICK, (lambda: pi) if secure else None, 0)
    port, create = listener.tcp_port, socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda at, **how: create((at[0], port), **how))
    secret = SECRET if secure else bytes(SECRET_BYTES)
    other = Listener("127.0.0.1", tmp_path / "m", 1, secret, QUICK, (lambda: mallory) if secure else None, 0)
    try:
        peer = Peer(1, "pi", "127.0.0.1", 0, port, "s", ("127.0.0.2", "127.0.0.1"))
        dialler = Dialler(0, SECRET, QUICK, (lambda: desk) if secure else None, 0, "tcp")
        result = dialler.dial(peer)
        assert "; at 127.0.0.2, as 127.0.0.1 did not answer first" in result.why
        (there,) = listener.wait_for({0: "desk"}, 5.0).values()
        result.link.send(b"x")
        assert bytes(there.receive().payload) == b"x"
        assert other._links == {}
        for link in (result.link, there):
            link.close()
        # What answered is dialled first from then on.
        listener.expect(0)
        again = dialler.connect("tcp", replace(peer, addresses=()))
        assert isinstance(again, TcpLink)
        again.close()
    finally:
        listener.close()
        other.close()


def test_every_address_is_somebody_elses(cluster: Cluster) -> None:
    own = shown(membership_in(cluster.at("mallory")))
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("0.0.0.0:0", security.grpc_server_credentials(lambda: own))
    server.start()
    try:
        with pytest.raises(
            Refused, match=r"at 127\.0\.0\.1:.* it is mallory; nor .*\(at 127\.0\.0\.2: .* it is mallory\)$"
        ):
            dialled(cluster, "grpc", port=port, addresses=("127.0.0.2",))
    finally:
        server.stop(None).wait()


# Several connections of one link.

FAR = LinkFigures(0.05, 0.06, 0.05, 8e6, 8e6)


def far(monkeypatch: pytest.MonkeyPatch, striped_bytes_per_s: float) -> None:
    """Links seem to be 25 ms long: one connection carries 8 MB/s, several together as much as is said."""

    def figures(_: Dialler, link: Link, seconds: float = 0.0) -> LinkFigures:
        rate = striped_bytes_per_s if isinstance(link, StripedLink) else FAR.send_bytes_per_s
        return LinkFigures(0.05, 0.06, 0.05, rate, rate)

    monkeypatch.setattr(Dialler, "figures", figures)


@pytest.mark.parametrize("secure", [False, True], ids=["in the clear", "tls"])
def test_a_far_link_has_several_connections_where_they_carry_more(
    cluster: Cluster, tmp_path: Path, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    far(monkeypatch, 40e6)
    with linked(cluster, tmp_path, secure) as (result, there):
        assert isinstance(result.link, StripedLink)
        assert isinstance(there, StripedLink)
        assert len(result.link.links) == len(there.links) == 4
        assert "; 4 connections carry 38.1 MiB/s together, one 7.63 MiB/s" in result.why
        assert result.figures.send_bytes_per_s == 40e6
        data = bytes(range(256)) * 4000
        result.link.send(data)
        assert bytes(there.receive(max_bytes=len(data)).payload) == data
        there.send(data[:7])
        assert bytes(result.link.receive().payload) == data[:7]


def test_a_far_link_stays_one_connection_where_more_carry_no_more(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far(monkeypatch, 9e6)
    with linked(cluster, tmp_path) as (result, there):
        assert type(result.link) is type(there) is TcpLink
        assert result.why.endswith("; 4 connections carry no more than one: 7.63 MiB/s")
        there.send(b"x")
        assert bytes(result.link.receive().payload) == b"x"


def test_a_peer_that_knows_no_such_links_is_reached_over_one(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one takes a longer HELLO for a damaged one."""
    far(monkeypatch, 40e6)
    monkeypatch.setattr(peers, "STRIPE", struct.Struct(""))
    with linked(cluster, tmp_path) as (result, there):
        assert type(result.link) is type(there) is TcpLink
        assert "; 4 connections at once failed: " in result.why


def test_a_near_link_is_not_tried_with_several(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dialler, "_striped", None)  # calling it fails
    with linked(cluster, tmp_path) as (result, _):
        assert type(result.link) is TcpLink


@pytest.mark.parametrize(("number", "n"), [(0, MOST_STRIPES + 1), (2, 2), (0, 0)])
def test_a_connection_that_cannot_be_is_refused(cluster: Cluster, tmp_path: Path, number: int, n: int) -> None:
    """Also one of the same number again; and a link that never comes whole ends with the listener."""
    listener = Listener("127.0.0.1", tmp_path / "door", 1, SECRET, QUICK, None, 0)
    dialler = Dialler(0, SECRET, QUICK, None, 0, "tcp")
    peer = Peer(1, "pi", "127.0.0.1", 0, listener.tcp_port, "s")
    first = dialler.connect("tcp", peer, STRIPE.pack(bytes(8), 0, 2))
    until(lambda: bool(listener._stripes), "the first connection is not kept")  # or another would be the first
    try:
        for stripe in (STRIPE.pack(bytes(8), number, n), STRIPE.pack(bytes(8), 0, 2)):
            with pytest.raises(LinkClosed):
                dialler.connect("tcp", peer, stripe).receive()
    finally:
        listener.close()
    with pytest.raises(LinkClosed):
        first.receive()


@contextmanager
def linked(cluster: Cluster, folder: Path, secure: bool = False) -> Iterator[tuple[Dialled, Link]]:
    """A link as rank 0 dialled it, and as rank 1 has it."""
    here, there = (shown(membership_in(cluster.at(name))) for name in ("desk", "pi"))
    listener = Listener("127.0.0.1", folder / "door", 1, SECRET, QUICK, (lambda: there) if secure else None, 0)
    dialler = Dialler(0, SECRET, QUICK, (lambda: here) if secure else None, 0, "tcp")
    try:
        result = dialler.dial(Peer(1, "pi", "127.0.0.1", 0, listener.tcp_port, "s"))
        links = listener.wait_for({0: "desk"}, 5.0)
        yield result, links[0]
        result.link.close()
        links[0].close()
    finally:
        listener.close()
