"""Base of deployments: engine processes on workers as ranks 1 and up, linked to this process as rank 0."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial

from edge.closing import Closing
from edge.cluster.failures import is_cause
from edge.cluster.fleet import Fleet, device
from edge.cluster.liveness import LOST_S, LivenessMonitor
from edge.cluster.session import EngineSession, RemoteSession, answers, last_failure, tell_peers
from edge.errors import WorkerError
from edge.net import credentials
from edge.net.dialling import LinkState
from edge.net.peers import SECRET_BYTES, Peer
from edge.net.rendezvous import join
from edge.parallel.engine_kinds import own_kind
from edge.tasks import CancelScope
from transport import edge_pb2 as pb
from transport.collective import Group
from transport.errors import LinkTimeout, TransportError
from transport.link import Deadlines

_NOWHERE = "127.0.0.1"  # placeholder address of rank 0, which is never dialled

# A slow rank may take minutes for a long chunk or a large batch, and reads nothing meanwhile.
DEADLINES = Deadlines(step_timeout_s=300.0, send_timeout_s=300.0)


class RankGroup(Closing):
    """A group of engine sessions on workers. `close()` ends all of them; a `RankGroup` is also a context manager."""

    def __init__(
        self,
        fleet: Fleet,
        world_size: int,
        say: Callable[[str], None],
        *,
        transport: str,
        deadlines: Deadlines,
        streams: bool,
        gives_up: bool = False,
    ) -> None:
        """Prepare the group without opening a session.

        say: called in a separate thread with a message about a device that stands still while a request waits for it.
        streams: True if the links carry tensors without replies (`transport.tcp_link.TcpLink`).
        gives_up: a device that stands still for LOST_S counts as lost. So does a leaving device that cannot be replaced
            in time.
        """
        self._fleet, self._world_size = fleet, world_size
        self._transport, self._deadlines, self._streams = transport, deadlines, streams
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._by_rank: dict[int, EngineSession] = {}
        self._addresses: dict[int, str] = {}  # by rank
        self._group: Group | None = None
        self._closing = CancelScope()
        self._gives_up = gives_up
        lost = self._stood_still if gives_up else None
        liveness = LivenessMonitor(lambda: self._sessions, say, self._is_busy, lost, self._leaves)
        self._closing.then(liveness.close)

    def close(self) -> None:
        """End all sessions and links."""
        self._closing.close()

    def _is_busy(self) -> bool:
        """Return True if a request waits for the ranks."""
        return True

    @property
    def lost(self) -> list[str]:
        """Names of the devices whose process has ended or stands still. Devices that only lost their links to it are
        not included.
        """
        reasons = [(session.device, session.end_reason()) for session in self._sessions]
        return list(dict.fromkeys(device for device, why in reasons if why is not None and is_cause(why)))

    @property
    def lost_addresses(self) -> list[str]:
        """Canonical addresses of the lost devices."""
        lost = self.lost
        return [self._addresses[session.rank] for session in self._sessions if session.device in lost]

    @property
    def leaving(self) -> list[str]:
        """Names of the devices that are about to leave."""
        return list(dict.fromkeys(session.device for session in self._sessions if session.leaving))

    def figures(self) -> dict[int, tuple[float, tuple[int, int] | None]]:
        """Return, for each rank on another device, the share of the last seconds in which it computed, and the total
        and free bytes of its GPUs; None without a GPU.
        """
        return {session.rank: (session.busy, session.gpu_bytes) for session in self._sessions}

    @property
    def _sessions(self) -> list[EngineSession]:
        """Open sessions in the order of their ranks."""
        return [session for _, session in sorted(self._by_rank.items())]

    def _open_session(self, rank: int, address: str, affinity: Sequence[int]) -> EngineSession:
        """Start an engine process on a worker."""
        session = RemoteSession(
            self._fleet.workers[address],
            rank,
            self._world_size,
            self._secret,
            self._deadlines,
            affinity=affinity,
            streams=self._streams,
        )
        self._by_rank[rank], self._addresses[rank] = session, device(address)
        self._closing.then(session.close)
        return session

    def _join(self, threads: int) -> tuple[Group, list[LinkState]]:
        """Link all ranks. Return this process's group and the states of all links, sorted by ranks.

        threads: compute threads of this process.
        """
        sessions = self._sessions
        peers = [session.peer for session in sessions]
        tell_peers(sessions, [Peer(0, self._fleet.local_name, _NOWHERE, 0, 0, ""), *peers], self._transport)
        folder = self._fleet.credentials
        try:
            group, dialled = join(
                0,
                self._secret,
                peers,
                deadlines=self._deadlines,
                credentials=partial(credentials.required, folder) if folder else None,
                transport=self._transport,
                poll_s=own_kind().polling_s(threads),
                streams=self._streams,
            )
        # Another rank may know the cause, for example that it could not reach the next rank.
        except TransportError as error:
            raise self._explained(error) from error
        self._group = group
        self._closing.then(group.close)
        states = [
            LinkState((0, rank), own.link.kind, own.why, own.round_trip_s, own.bytes_per_s)
            for rank, own in dialled.items()
        ]
        for session, event in zip(sessions, answers(sessions), strict=True):
            states += [_state(session.rank, link) for link in event.connected.links]
        return group, sorted(states, key=lambda state: state.ranks)

    def _stood_still(self, session: EngineSession) -> None:
        self._give_up(session, f"stood still for {LOST_S:g} s")

    def _leaves(self, session: EngineSession) -> None:
        """Give up a device that is about to leave, if `gives_up`."""
        if self._gives_up and session.died is None:
            self._give_up(session, "is about to end")

    def _give_up(self, session: EngineSession, why: str) -> None:
        """Stop waiting for a process. Everything that waits for it fails with this reason."""
        session.died = LinkTimeout(f"{session.device} {why}")
        session.close()
        for link in self._group.links.values() if self._group else ():
            link.close(f"another rank {why}")

    def _explained(self, error: Exception) -> Exception:
        """Return a rank's reason for a failure if it reports one shortly after a link broke; else `error`."""
        return last_failure(error, self._group.links.values() if self._group else None, self._sessions)


def _state(rank: int, link: pb.LinkState) -> LinkState:
    """Return the state of a link that another rank dialled. Raises WorkerError if the reported state is invalid."""
    try:
        return LinkState((rank, link.rank), link.kind, link.why, link.round_trip_s, link.bytes_per_s)
    except ValueError as error:
        raise WorkerError(f"rank {rank} sent an impossible state of its links: {error}") from None
