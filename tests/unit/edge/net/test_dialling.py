"""Test dialling a rank: the kind of link, and that the named device answers, not another member of the cluster."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge.net import dialling
from edge.net.dialling import Dialled, Dialler, LinkState
from edge.net.peers import HELLO, SECRET_BYTES, Listener, Peer
from edge.net.rendezvous import _agree
from tests.support import memory_link
from tests.support.trust import Cluster, membership_in, shown
from transport import security
from transport.errors import LinkClosed, ProtocolError, Refused, TransportError
from transport.frame import Kind
from transport.link import Deadlines
from transport.measure import LinkFigures

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
            with pytest.raises(Refused, match=r"rank 1 \(pi\) was expected at .*, but mallory"):
                dialled(cluster, "tcp", tcp_port=listener.tcp_port)
    finally:
        listener.close()


def test_over_grpc(cluster: Cluster) -> None:
    own = shown(membership_in(cluster.at("mallory")))
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", security.grpc_server_credentials(lambda: own))
    server.start()
    try:
        with pytest.raises(Refused, match=r"rank 1 \(pi\) was expected at .*, but mallory"):
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
        assert dialler.connect("tcp", peer) == ("127.0.0.1", here)
    else:
        with pytest.raises(ProtocolError, match=r"rank 1 \(pi\) did not return our HELLO"):
            dialler.connect("tcp", peer)
        assert here.broken is not None


def test_link_that_cannot_be_measured_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = memory_link.pair()
    monkeypatch.setattr(Dialler, "_tcp", lambda *_: here)
    there.send(HELLO.pack(SECRET, 0, 1), Kind.HELLO)
    there.close()
    with pytest.raises(TransportError):
        Dialler(0, SECRET, QUICK, None, 0).dial(Peer(1, "pi", "127.0.0.1", 1, 1, "s"))
    assert here.broken is not None


# The kind of link.


def kinds_dialled(patch: pytest.MonkeyPatch, **failing: TransportError) -> list[str]:
    """Replace dialling, by kind, by links in memory or these errors. Return the kinds that are dialled."""
    dialled = []

    def connect(self: Dialler, kind: str, peer: Peer) -> tuple[str, Any]:
        dialled.append(kind)
        if kind in failing:
            raise failing[kind]
        link, _ = memory_link.pair()
        link.kind = kind
        return peer.host, link

    patch.setattr(Dialler, "connect", connect)
    patch.setattr(dialling, "round_trips", lambda *_: [1e-4, 2e-4, 5e-4])
    patch.setattr(dialling, "measure_once", lambda *_: figures(1e-4, 1e9, 1e9))
    return dialled


def figures(round_trip_s: float, send: float, receive: float) -> LinkFigures:
    return LinkFigures(round_trip_s, round_trip_s, round_trip_s, send, receive)


@pytest.mark.parametrize(
    ("transport", "tcp_port", "kinds"),
    [("auto", 1, ["tcp"]), ("tcp", 1, ["tcp"]), ("grpc", 1, ["grpc"]), ("auto", 0, ["grpc"])],
)
def test_first_kind_that_connects_is_used(
    transport: str, tcp_port: int, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled = kinds_dialled(monkeypatch)
    result = Dialler(0, SECRET, QUICK, None, 0, transport).dial(Peer(1, "pi", "127.0.0.1", 1, tcp_port, "s"))
    assert dialled == kinds
    assert (result.link.kind, result.round_trip_s) == (kinds[0], 2e-4)
    assert result.why == f"{kinds[0]} 200 us for 8 KiB there and back"


def test_grpc_is_used_if_tcp_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = kinds_dialled(monkeypatch, tcp=LinkClosed("nothing listens there"))
    result = Dialler(0, SECRET, QUICK, None, 0).dial(Peer(1, "pi", "127.0.0.1", 1, 1, "s"))
    assert dialled == ["tcp", "grpc"]
    assert result.why == "grpc 200 us for 8 KiB there and back, tcp failed: nothing listens there"


def test_last_error_is_raised_if_no_kind_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds_dialled(monkeypatch, tcp=LinkClosed("no TCP"), grpc=LinkClosed("no gRPC"))
    with pytest.raises(LinkClosed, match="no gRPC"):
        Dialler(0, SECRET, QUICK, None, 0).dial(Peer(1, "pi", "127.0.0.1", 1, 1, "s"))


@pytest.mark.parametrize("worst", [figures(1e-3, 5e6, 9e6), figures(1e-3, 9e6, 5e6)], ids=["sending", "receiving"])
def test_group_agrees_on_its_worst_link(worst: LinkFigures) -> None:
    agreed: list[tuple[float, float]] = []

    class Agrees:
        def agree(self, latency_s: float, bandwidth: float) -> None:
            agreed.append((latency_s, bandwidth))

    link, _ = memory_link.pair()
    dialled = [Dialled(link, 0.0, own, "") for own in (worst, figures(4e-3, 8e6, 7e6))]
    _agree(Agrees(), dialled)  # type: ignore[arg-type]
    assert agreed == [(2e-3, 5e6)]


def test_link_state_of_another_device_is_checked_and_printable() -> None:
    state = LinkState((1, 2), "grpc", "a\x1b[31m" + "b" * 1000)
    assert state.to_json() == {"ranks": [1, 2], "kind": "grpc", "why": "a [31m" + "b" * 294}
    for ranks, kind in (((2, 1), "tcp"), ((1, 1), "tcp"), ((-1, 1), "tcp"), ((0, 1), "smoke")):
        with pytest.raises(ValueError, match="have no link of kind"):
            LinkState(ranks, kind, "")


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
            Refused, match=r"at 127\.0\.0\.1:.* mallory answered; nor .*\(at 127\.0\.0\.2:.* but mallory answered\)$"
        ):
            dialled(cluster, "grpc", port=port, addresses=("127.0.0.2",))
    finally:
        server.stop(None).wait()
