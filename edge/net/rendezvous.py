"""Rendezvous of the ranks of a group: each rank dials the higher ranks and waits for the lower ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from devices.probe import cpu_quota
from edge.net import peers
from edge.net.dialling import KINDS, Dialled, Dialler
from transport.collective import Group
from transport.errors import LinkClosed, Refused
from transport.link import Deadlines, Link
from transport.tcp_link import POLL_S

TRANSPORTS = ("auto", *KINDS)


def join(
    rank: int,
    secret: bytes,
    others: Sequence[peers.Peer],
    *,
    deadlines: Deadlines,
    credentials: peers.Fetch | None,
    transport: str,
    poll_s: float,
    listener: peers.Listener | None = None,
    streams: bool = False,
) -> tuple[Group, dict[int, Dialled]]:
    """Return the group of this rank and `others`, and the links that this rank dialled, by rank.

    listener: listener for the lower ranks, closed at the end; None for rank 0
    streams: purpose of the links (`transport.tcp_link.TcpLink`)

    Raises the error of the first link that failed, after closing all links.
    """
    above = sorted((peer for peer in others if peer.rank > rank), key=lambda peer: peer.rank)
    below = {peer.rank: peer.name for peer in others if peer.rank < rank}
    dialler = Dialler(rank, secret, deadlines, credentials, poll_s, transport, streams)
    links: dict[int, Link] = {}
    dialled: dict[int, Dialled] = {}
    try:
        for peer in above:
            try:
                dialled[peer.rank] = dialler.dial(peer)
            except LinkClosed as error:  # LinkClosed would suggest a link that worked before
                raise Refused(f"{peer} cannot be reached: {error}") from error
            links[peer.rank] = dialled[peer.rank].link
        if listener is not None:
            # The lower ranks dial one after the other, over TCP and then over gRPC, and measure.
            links |= listener.wait_for(below, 4 * deadlines.connect_timeout_s * (len(others) + 1))
        group = Group(rank, links)
        _agree(group, dialled.values())
        return group, dialled
    except BaseException:
        for link in links.values():
            link.close()
        raise
    finally:
        if listener is not None:
            listener.close()


def _agree(group: Group, dialled: Collection[Dialled]) -> None:
    """Agree on the worst latency and bandwidth in the group. dialled: the links that this rank measured."""
    figures = [link.figures for link in dialled]
    group.agree(
        max((f.latency_s for f in figures), default=0.0),
        min((min(f.send_bytes_per_s, f.receive_bytes_per_s) for f in figures), default=math.inf),
    )


def polling_s(threads: int) -> float:
    """Return the seconds that a wait may poll: 0 under a CPU quota that the computing threads use up."""
    quota = cpu_quota()
    return POLL_S if quota is None or quota >= threads else 0.0
