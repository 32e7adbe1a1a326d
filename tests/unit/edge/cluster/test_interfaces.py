"""Test that an address with an interface of the owner is used by the owner alone."""

from typing import Any

import pytest

from edge.cluster.session import RemoteSession, tell_peers
from edge.net.peers import Peer
from transport import edge_pb2 as pb
from transport.errors import Refused


class Session(RemoteSession):
    """A rank that notes what it is told."""

    def __init__(self, rank: int) -> None:
        self.rank, self.died, self.told = rank, None, list[pb.Command]()

    def _send(self, command: pb.Command) -> None:
        self.told.append(command)


def peer(rank: int, host: str, *addresses: str) -> Peer:
    return Peer(rank, f"pi{rank}", host, 7070, 7071, "s", addresses)


def test_a_rank_that_others_dial_has_no_address_with_an_interface() -> None:
    sessions: list[Any] = [Session(1), Session(2)]
    ranks = [peer(0, "0.0.0.0"), peer(1, "fe80::1%eth0"), peer(2, "fe80::2%eth0")]
    with pytest.raises(Refused) as refused:
        tell_peers(sessions, ranks, "auto")
    assert str(refused.value) == (
        "pi2 must be reachable for other devices, but fe80::2%eth0 names an interface of this device; give its host"
        " name, or"
        " an address without %"
    )
    assert [session.told for session in sessions] == [[], []]


def test_a_rank_that_told_other_addresses_is_dialled_there() -> None:
    sessions: list[Any] = [Session(1), Session(2)]
    ranks = [peer(0, "0.0.0.0"), peer(1, "10.0.0.1"), peer(2, "fe80::2%eth0", "10.0.0.2", "fd00::2")]
    tell_peers(sessions, ranks, "auto")
    message = sessions[0].told[0].connect.peers[1]
    assert (message.rank, message.host, list(message.addresses)) == (2, "10.0.0.2", ["10.0.0.2", "fd00::2"])


def test_the_owner_dials_it() -> None:
    sessions: list[Any] = [Session(1), Session(2)]
    tell_peers(sessions, [peer(0, "0.0.0.0"), peer(1, "fe80::1%eth0"), peer(2, "192.168.0.2")], "auto")
    assert [len(session.told) for session in sessions] == [1, 1]
