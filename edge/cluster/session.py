"""Engine processes as their owner sees them, one rank of a group each: commands go there, events come back.

`RemoteSession` is on a worker, behind its daemon; `LocalSession` is on this device, without one: it dials, and is never
dialled.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc

from devices.network import usable_elsewhere
from edge.closing import Closing
from edge.cluster.client import Remote, explained
from edge.cluster.failures import failure_reason, is_cause
from edge.errors import WorkerError
from edge.net.peers import Peer
from edge.worker.limits import ResourceLimits
from edge.worker.process import RankProcess
from transport import edge_pb2 as pb
from transport import rpc
from transport.errors import LinkClosed, LinkTimeout, Refused, TransportError
from transport.link import DEFAULTS, Deadlines, Link

COMMAND_TIMEOUT_S = 120.0  # for the engine process to say something about a command
WHOLE_TIMEOUT_S = 3600.0  # for a command that says something now and then: a load from a slow card


class EngineSession(Closing):
    """An engine process. `close()` ends it; it is also a context manager."""

    peer: Peer  # where the other ranks reach it
    pid: int

    def __init__(self, device: str, rank: int) -> None:
        self.device = device  # its name
        self.rank = rank
        self.died: Exception | None = None
        self.leaving = False  # its device is about to end: who goes on elsewhere soon, loses nothing
        self._events: queue.SimpleQueue[pb.Event | Exception] = queue.SimpleQueue()
        self._heard_at: float | None = None  # None: not yet, or no more

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last word of the process; None where it has yet to say one, or has ended."""
        heard_at = self._heard_at
        return None if heard_at is None else time.monotonic() - heard_at

    def _hear(self, event: pb.Event | Exception) -> None:
        """Take in what the process says, or why it says no more."""
        over = isinstance(event, Exception) or event.WhichOneof("event") == "died"
        self._heard_at = None if over else time.monotonic()
        if isinstance(event, Exception) or event.WhichOneof("event") != "alive":
            self._events.put(event)
        else:
            self.leaving |= event.alive.leaving

    def open(self, request: pb.Open) -> pb.Opened:
        """The first command: make it a rank of a group, and wait until it can be dialled."""
        try:
            return self.ask(pb.Command(open=request)).opened
        except BaseException:
            self.close()
            raise

    def ask(self, command: pb.Command, on_event: Callable[[pb.Event], None] | None = None) -> pb.Event:
        """Send a command and wait for its final event; `on_event` gets those before.

        WorkerError where the command failed or the process died, LinkClosed where the worker is gone.
        """
        self.tell(command)
        return self.answer(on_event)

    def tell(self, command: pb.Command) -> None:
        """Send a command, whose final event `answer` waits for. So several ranks can have it before one answers."""
        if self.died is not None:
            raise self.died
        self._send(command)

    def answer(self, on_event: Callable[[pb.Event], None] | None = None) -> pb.Event:
        """The final event of the oldest command that has none yet."""
        deadline = time.monotonic() + WHOLE_TIMEOUT_S
        while True:
            try:
                event = self._events.get(timeout=COMMAND_TIMEOUT_S)
            except queue.Empty:
                raise self._given_up(f"said nothing for {COMMAND_TIMEOUT_S:g} s") from None
            said = self._checked(event)
            if said.WhichOneof("event") != "loading":
                return said
            if time.monotonic() > deadline:
                raise self._given_up(f"did not do what it was asked within {WHOLE_TIMEOUT_S:g} s")
            if on_event:
                on_event(said)

    def _given_up(self, why: str) -> LinkTimeout:
        self.died = error = LinkTimeout(f"{self.device} {why}")
        self.close()  # or a late answer would be taken for the next one
        return error

    def _checked(self, event: pb.Event | Exception) -> pb.Event:
        """An event; what it means is raised where that is an error."""
        if isinstance(event, Exception):
            self.died = event
            raise event
        kind = event.WhichOneof("event")
        if kind == "failed":
            raise WorkerError(f"{self.device}: {event.failed.message}", event.failed.error)
        if kind == "died":
            self.died = WorkerError(f"{self.device}: {event.died.reason}")
            raise self.died
        return event

    def end_reason(self) -> Exception | None:
        """The reason why it can do no more, as it said unasked: its command failed, or it died. None: it can."""
        if self.died is None:
            with suppress(queue.Empty):
                event = self._events.get_nowait()
                try:
                    self._checked(event)
                except (TransportError, WorkerError) as error:
                    self.died = error
        return self.died

    def unload(self) -> None:
        """Free what was loaded; the links stay."""
        self.ask(pb.Command(unload=pb.Unload()))

    @abstractmethod
    def close(self) -> None:
        """End the process."""

    @abstractmethod
    def _send(self, command: pb.Command) -> None:
        """Hand a command over."""


def connect_all(sessions: Sequence[EngineSession], transport: str = "auto") -> list[Any]:
    """Give all ranks links to each other: their states, one list of pb.LinkState per session.

    Where ranks fail, the error that says most, after all have answered.
    """
    tell_peers(sessions, [session.peer for session in sessions], transport)
    return [list(event.connected.links) for event in answers(sessions)]


def tell_peers(sessions: Sequence[EngineSession], ranks: Sequence[Peer], transport: str) -> None:
    """Tell each session to link to all other `ranks`; `answers` waits for what comes of it. Refused if another
    device is to dial a rank at an address that only this one can use, and the rank's device told no other."""
    commands = []
    for session in sessions:
        others = [_as_told(peer, session) for peer in ranks if peer.rank != session.rank]
        messages = [pb.Peer(**asdict(peer)) for peer in others]
        commands.append(pb.Command(connect=pb.Connect(peers=messages, transport=transport)))
    for session, command in zip(sessions, commands, strict=True):
        session.tell(command)


def _as_told(peer: Peer, session: EngineSession) -> Peer:
    """Return the peer with an address that the session can dial."""
    if "%" not in peer.host or not isinstance(session, RemoteSession) or session.rank > peer.rank:
        return peer
    if not peer.addresses:
        raise Refused(
            f"{peer.name} is to be dialled by other devices, and {peer.host} names an interface of this one;"
            " give its host name, or an address without %"
        )
    return replace(peer, host=peer.addresses[0])


def answers(sessions: Sequence[EngineSession]) -> Iterator[pb.Event]:
    """The final event of every session, in order. Where some fail, the error that says most, once all have answered."""
    events: list[pb.Event] = []
    failed: list[Exception] = []
    for session in sessions:
        try:
            events.append(session.answer())
        except (TransportError, WorkerError) as error:
            failed.append(error)
    if failed:
        raise failure_reason(failed)
    return iter(events)


def measured(a: EngineSession, b: EngineSession, seconds: float) -> pb.Measured:
    """Measure the link between two sessions from `a`, for about so long."""
    b.tell(pb.Command(answer=pb.Answer(rank=a.rank)))
    a.tell(pb.Command(measure=pb.Measure(rank=b.rank, seconds=seconds)))
    return next(answers([a, b])).measured


_HOST = "127.0.0.1"  # its listener is of no use to other devices


class LocalSession(EngineSession):
    """Rank 0 of a group, on this device."""

    def __init__(
        self,
        device: str,
        world_size: int,
        secret: bytes,
        credentials: Path | None,
        threads: int,
        streams: bool = False,
    ) -> None:
        """Start the process. credentials: the folder, where its links are encrypted. streams: what its links are for
        (`transport.tcp_link.tune`)."""
        super().__init__(device, 0)
        self._child = RankProcess(_HOST, credentials, ResourceLimits(threads), "local")
        threading.Thread(target=self._read, daemon=True, name="events of this device").start()
        self.pid = self.open(pb.Open(world_size=world_size, secret=secret, streams=streams)).pid
        self.peer = Peer(0, device, _HOST, 0, 0, "local")

    def close(self) -> None:
        self._child.stop()

    def _send(self, command: pb.Command) -> None:
        self._child.send(command)

    def _read(self) -> None:
        while (event := self._child.receive()) is not None:
            self._hear(event)
        self._hear(self._child.died() or LinkClosed(f"the session on {self.device} was closed"))


class RemoteSession(EngineSession):
    """One rank of a group, on a worker."""

    def __init__(
        self,
        worker: Remote,
        rank: int,
        world_size: int,
        secret: bytes,
        deadlines: Deadlines = DEFAULTS,
        affinity: Sequence[int] = (),
        streams: bool = False,
    ) -> None:
        """Start the process, on these cores of the worker where some are named, and wait until it can be dialled.

        streams: what its links are for (`transport.tcp_link.tune`).
        """
        super().__init__(worker.label, rank)
        self._commands: queue.SimpleQueue[pb.Command | None] = queue.SimpleQueue()
        self._call = rpc.stub(worker.channel, "Session")(iter(self._commands.get, None))
        threading.Thread(target=self._read, daemon=True, name=f"events of {worker.name}").start()
        request = pb.Open(
            rank=rank, world_size=world_size, secret=secret, affinity=affinity, streams=streams, **asdict(deadlines)
        )
        opened = self.open(request)
        self.name, self.pid = opened.session, opened.pid
        addresses = usable_elsewhere(opened.addresses)
        self.peer = Peer(rank, worker.name, worker.host, worker.port, opened.tcp_port, opened.session, addresses)

    def close(self) -> None:
        self._commands.put(None)
        self._call.cancel()

    def _send(self, command: pb.Command) -> None:
        self._commands.put(command)

    def _read(self) -> None:
        try:
            with explained(self.device):
                for event in self._call:
                    self._hear(event)
            self._hear(LinkClosed(f"{self.device} ended the session"))
        except (TransportError, WorkerError, grpc.RpcError) as error:
            self._hear(error)


REASON_S = 1.5  # for a rank to say why it made others wait for too long
# For a rank to say why its link broke: its daemon first waits for a process that is about to end and for what it
# said last (`edge.worker.process.EXIT_S` each), and that a daemon's host has vanished is known after five seconds.
LAST_REASON_S = 6.0
_LOOK_S = 0.02


def last_failure(error: Exception, links: Iterable[Link] | None, sessions: Sequence[EngineSession]) -> Exception:
    """Return a session's reason for its end, where a link broke and it gives one in a moment; else the error.

    A process that died is the cause; ranks that lost their links to it only follow. links: of this process; None where
    they were never made. Where one broke all are closed: a rank that waits for this one ends then, and speaks.
    """
    links = None if links is None else list(links)
    broken = links is None or any(link.broken for link in links)
    if not (broken and isinstance(error, TransportError)):
        return error
    for link in links or ():
        link.close("another link broke")
    deadline = time.monotonic() + (REASON_S if isinstance(error, LinkTimeout) else LAST_REASON_S)
    while True:
        reasons = [reason for session in sessions if (reason := session.end_reason()) is not None]
        if any(map(is_cause, reasons)) or len(reasons) == len(sessions) or time.monotonic() > deadline:
            return failure_reason(reasons, error)
        time.sleep(_LOOK_S)
