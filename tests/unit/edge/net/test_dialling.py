"""Who answers a dial is the device that was named, not just any member of the cluster."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge.net.dialling import Dialler
from edge.net.peers import HELLO, SECRET_BYTES, Listener, Peer
from tests.support import memory_link
from tests.support.trust import Cluster, held, shown
from transport import security
from transport.errors import ProtocolError, Refused
from transport.frame import Kind
from transport.link import Deadlines

SECRET = bytes(range(SECRET_BYTES))
QUICK = Deadlines(5.0, 5.0, 5.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Of a desk, its owner, and two members."""
    cluster = Cluster(tmp_path_factory.mktemp("c"), time.time())
    for name in ("pi", "mallory"):
        cluster.joined(name)
    return cluster


def dialled(cluster: Cluster, transport: str, **where: Any) -> None:
    """Dial `pi` as the desk, and hang up."""
    peer = Peer(**({"rank": 1, "name": "pi", "host": "127.0.0.1", "port": 0, "tcp_port": 0, "session": "s"} | where))
    own = shown(held(cluster.at("desk")))
    Dialler(0, SECRET, QUICK, lambda: own, 0, transport).dial(peer).link.close()


@pytest.mark.parametrize(("answers", "admitted"), [("pi", True), ("mallory", False)])
def test_over_tcp(cluster: Cluster, tmp_path: Path, answers: str, admitted: bool) -> None:
    """mallory knows the secret and is a member: it may still not be taken for pi."""
    own = shown(held(cluster.at(answers)))
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
    own = shown(held(cluster.at("mallory")))
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
