"""Rendezvous of the ranks of a group: each dials those above it and waits for those below."""

from __future__ import annotations

from collections.abc import Sequence

from devices.probe import cpu_quota
from devices.sleeping import sleep_profile
from edge.net import peers
from edge.net.dialling import Dialled, Dialler
from edge.net.relink import Relink, agree
from transport.collective import Group
from transport.errors import LinkClosed, Refused
from transport.link import Deadlines, Link
from transport.tcp_link import POLL_S

TRANSPORTS = ("auto", "tcp", "grpc")


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
) -> tuple[Group, Relink]:
    """The group of this rank and `others`, and how its links were chosen and can be changed.

    listener: where those below dial; None for rank 0, which has none below. It stays open where links may change.
    streams: what the links are for (`transport.tcp_link.tune`). Errors are those of links, of the first rank that
    failed; then no link is left.
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
            except LinkClosed as error:  # not to be taken for a link that was there, and that somebody else closed
                raise Refused(f"{peer} cannot be reached: {error}") from error
            links[peer.rank] = dialled[peer.rank].link
        if listener is not None:
            # Those below dial one after the other, in two ways, and measure.
            links |= listener.wait_for(below, 4 * deadlines.connect_timeout_s * (len(others) + 1))
        group = Group(rank, links)
        agree(group, dialled)
    except BaseException:
        for link in links.values():
            link.close()
        if listener is not None:
            listener.close()
        raise
    relink = Relink(dialler, above, below, dialled, listener)
    if listener is not None and not relink.able:
        listener.close()
    return group, relink


def polling_s(threads: int) -> float:
    """Return how long waits may poll: not at all under a CPU quota that the computing threads use up, nor on a sleeping
    device of a lab, which shares its cores with all others."""
    if sleep_profile():
        return 0.0
    quota = cpu_quota()
    return POLL_S if quota is None or quota >= threads else 0.0
