"""Test the limit of connections with a simulated clock and no network, and the names of a peer in the system."""

import resource
import socket

import pytest

from transport import connection_limit
from transport.connection_limit import FIRST_CALL_S, ConnectionLimiter, connections_allowed
from transport.errors import Refused


class Clock:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def crowd(host: str, n: int, first_port: int = 1) -> dict[tuple[str, int], int]:
    """Connections from one host, with inodes of their own."""
    return {(host, first_port + i): hash((host, first_port + i)) for i in range(n)}


def test_who_makes_no_call_is_hung_up_on_in_time() -> None:
    clock = Clock()
    first = ConnectionLimiter(64, clock)
    sockets = crowd("10.0.0.1", 2)
    assert first.look(sockets) == []
    first.admitted("ipv4:10.0.0.1:1", "pi", owner=False)
    clock.now_s += FIRST_CALL_S
    assert first.look(sockets) == []
    clock.now_s += 0.1
    assert first.look(sockets) == [("10.0.0.1", 2)]


def test_another_connection_from_the_same_port_is_another() -> None:
    clock = Clock()
    first = ConnectionLimiter(64, clock)
    first.admitted("ipv6:%5B::1%5D:5", "pi", owner=False)
    assert first.look({("::1", 5): 77}) == []
    clock.now_s += FIRST_CALL_S + 1
    assert first.look({("::1", 5): 77}) == []
    assert first.look({("::1", 5): 78}) == []  # its time begins now
    clock.now_s += FIRST_CALL_S + 1
    assert first.look({("::1", 5): 78}) == [("::1", 5)]


def test_where_there_are_too_many_the_oldest_of_the_largest_crowd_go() -> None:
    clock = Clock()
    first = ConnectionLimiter(64, clock)  # 16 may wait
    honest, many = crowd("10.0.0.1", 3), crowd("10.0.0.66", 13)
    assert first.look(honest | many) == []
    clock.now_s += 1
    more = crowd("10.0.0.66", 5, 500)
    assert sorted(first.look(honest | many | more)) == sorted(list(many)[:5], key=lambda address: address[1])


def test_members_have_a_share_each_and_leave_room_for_the_owner() -> None:
    first = ConnectionLimiter(64, Clock())  # 32 for members, 8 for each
    sockets = crowd("10.0.0.1", 64)
    first.look(sockets)
    ports = iter(range(1, 65))
    for name in ("a", "b", "c", "d"):
        for _ in range(8):
            first.admitted(f"ipv4:10.0.0.1:{next(ports)}", name, owner=False)
    with pytest.raises(Refused, match="d has 8 connections to this worker; close some"):
        first.admitted("ipv4:10.0.0.1:60", "d", owner=False)
    with pytest.raises(Refused, match="this worker has 32 connections of members"):
        first.admitted("ipv4:10.0.0.1:61", "e", owner=False)
    first.admitted("ipv4:10.0.0.1:1", "a", owner=False)  # one that is known makes further calls
    for _ in range(20):
        first.admitted(f"ipv4:10.0.0.1:{next(ports)}", "desk", owner=True)
    first.look({address: inode for address, inode in sockets.items() if address[1] > 1})
    first.admitted("ipv4:10.0.0.1:62", "a", owner=False)  # in the place of the one that ended


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711)),
        ("ipv6:[fe80::1%25eth0]:4711", ("fe80::1", 4711)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4711", ("10.0.0.1", 4711)),
    ],
)
def test_addresses_are_those_of_sockets(peer: str, address: tuple[str, int]) -> None:
    assert connection_limit._address(peer) == address


def test_the_limit_of_open_files_is_raised_and_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(connection_limit, "MOST", 1 << 40)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
        assert connections_allowed() == limits[1] - connection_limit.RESERVE
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limits[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_it_finds_the_connections_to_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as out, server.accept()[0] as used:
            results = []
            for number in connection_limit._sockets():
                with connection_limit._borrowed(number) as sock:
                    if connection_limit._is_connection(sock, port):
                        results.append(number)
            assert results == [used.fileno()]
            assert out.fileno() >= 0
