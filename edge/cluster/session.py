"""Engine sessions: the owner's side of engine processes, each one rank of a group. The owner sends commands and
receives events.

A `RemoteSession` runs behind the daemon of a worker. A `LocalSession` runs on this device without a daemon; it dials
other ranks and is never dialled.
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
from edge.parallel.busy import BusyShare
from edge.worker.limits import ResourceLimits
from edge.worker.process import RankProcess
from transport import edge_pb2 as pb
from transport import rpc
from transport.errors import LinkClosed, LinkTimeout, Refused, TransportError
from transport.link import DEFAULTS, Deadlines, Link

COMMAND_TIMEOUT_S = 120.0  # time for the engine process to send any event about a command
WHOLE_TIMEOUT_S = 3600.0  # time for a command that reports progress, such as a load from a slow disk


class EngineSession(Closing):
    """A session of an engine process. `close()` ends the process; a session is also a context manager."""

    peer: Peer  # address at which the other ranks reach the process
    pid: int

    def __init__(self, device: str, rank: int) -> None:
        self.device = device  # device name
        self.rank = rank
        self.died: Exception | None = None
        self.leaving = False  # True if the device announced that it is about to leave
        self._events: queue.SimpleQueue[pb.Event | Exception] = queue.SimpleQueue()
        self._heard_at: float | None = None  # None before the first event and after the last
        self._busy = BusyShare()
        self.gpu_bytes: tuple[int, int] | None = None  # total and free bytes of the device's GPUs; None: no GPU

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last event or heartbeat. None before the first event and after the process has ended."""
        heard_at = self._heard_at
        return None if heard_at is None else time.monotonic() - heard_at

    def _hear(self, event: pb.Event | Exception) -> None:
        """Queue an event or the error that ended the session. Heartbeats only update the state."""
        over = isinstance(event, Exception) or event.WhichOneof("event") == "died"
        self._heard_at = None if over else time.monotonic()
        if isinstance(event, Exception) or event.WhichOneof("event") != "alive":
            self._events.put(event)
            return
        alive = event.alive
        self.leaving |= alive.leaving
        if not alive.leaving:  # otherwise the daemon sent it
            self._busy.add(alive.computed_s)
            self.gpu_bytes = (alive.gpu_total_bytes, alive.gpu_free_bytes) if alive.gpu_total_bytes else None

    @property
    def busy(self) -> float:
        """Share of the last seconds in which the process computed, 0 to 1."""
        return self._busy.share

    def open(self, request: pb.Open) -> pb.Opened:
        """Send the first command, which makes the process a rank of a group. Wait until other ranks can dial it."""
        try:
            return self.ask(pb.Command(open=request)).opened
        except BaseException:
            self.close()
            raise

    def ask(self, command: pb.Command, on_event: Callable[[pb.Event], None] | None = None) -> pb.Event:
        """Send a command and return its final event.

        on_event: called with each progress event before it.

        Raises WorkerError if the command failed or the process died, and LinkClosed if the worker is gone.
        """
        self.tell(command)
        return self.answer(on_event)

    def tell(self, command: pb.Command) -> None:
        """Send a command without waiting. Several ranks can start before `answer` waits for the first of them."""
        if self.died is not None:
            raise self.died
        self._send(command)

    def answer(self, on_event: Callable[[pb.Event], None] | None = None) -> pb.Event:
        """Return the final event of the oldest command that has none yet. Raises the errors of `ask`."""
        deadline = time.monotonic() + WHOLE_TIMEOUT_S
        while True:
            try:
                event = self._events.get(timeout=COMMAND_TIMEOUT_S)
            except queue.Empty:
                raise self._given_up(f"sent nothing for {COMMAND_TIMEOUT_S:g} s") from None
            said = self._checked(event)
            if said.WhichOneof("event") != "loading":
                return said
            if time.monotonic() > deadline:
                raise self._given_up(f"did not finish the command within {WHOLE_TIMEOUT_S:g} s")
            if on_event:
                on_event(said)

    def _given_up(self, why: str) -> LinkTimeout:
        self.died = error = LinkTimeout(f"{self.device} {why}")
        self.close()  # otherwise a late event would be taken for the answer to the next command
        return error

    def _checked(self, event: pb.Event | Exception) -> pb.Event:
        """Return the event, or raise the error that it reports."""
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
        """Return the error if the process has failed or died on its own, else None."""
        if self.died is None:
            with suppress(queue.Empty):
                event = self._events.get_nowait()
                try:
                    self._checked(event)
                except (TransportError, WorkerError) as error:
                    self.died = error
        return self.died

    def unload(self) -> None:
        """Free the loaded model. The links stay."""
        self.ask(pb.Command(unload=pb.Unload()))

    @abstractmethod
    def close(self) -> None:
        """End the process."""

    @abstractmethod
    def _send(self, command: pb.Command) -> None:
        """Queue a command for the process."""


def connect_all(sessions: Sequence[EngineSession], transport: str = "auto") -> list[Any]:
    """Link all ranks to each other. Return a list of pb.LinkState for each session.

    If ranks fail, the most informative error is raised after all of them have answered.
    """
    tell_peers(sessions, [session.peer for session in sessions], transport)
    return [list(event.connected.links) for event in answers(sessions)]


def tell_peers(sessions: Sequence[EngineSession], ranks: Sequence[Peer], transport: str) -> None:
    """Tell each session to link to all other `ranks`. Wait for the result with `answers`.

    Raises Refused if a rank's only address is valid on this device alone, but another device has to dial it.
    """
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
            f"{peer.name} must be reachable for other devices, but {peer.host} names an interface of this device;"
            " give its host name, or an address without %"
        )
    return replace(peer, host=peer.addresses[0])


def answers(sessions: Sequence[EngineSession]) -> Iterator[pb.Event]:
    """Return the final event of every session, in order. If some fail, raise the most informative error after all have
    answered.
    """
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
    """Measure the link between two sessions, from `a`, for about `seconds`."""
    b.tell(pb.Command(answer=pb.Answer(rank=a.rank)))
    a.tell(pb.Command(measure=pb.Measure(rank=b.rank, seconds=seconds)))
    return next(answers([a, b])).measured


_HOST = "127.0.0.1"  # address of its listener, which other devices do not use


class LocalSession(EngineSession):
    """A session of rank 0 on this device."""

    def __init__(
        self,
        device: str,
        world_size: int,
        secret: bytes,
        credentials: Path | None,
        threads: int,
        streams: bool = False,
    ) -> None:
        """Start the process.

        credentials: folder of the certificate if links are encrypted, else None.
        streams: True if the links carry tensors without replies (`transport.tcp_link.TcpLink`).
        """
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
    """A session of one rank on a worker."""

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
        """Start the process and wait until other ranks can dial it.

        affinity: CPU cores of the worker to run on; empty: any.
        streams: True if the links carry tensors without replies (`transport.tcp_link.TcpLink`).
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


REASON_S = 1.5  # time for a rank to report why it made others wait too long
# Time for a rank to report why its link broke. Its daemon first waits up to two times `edge.worker.process.EXIT_S`: for
# the process to end, and for its last event. A vanished host is noticed after five seconds.
LAST_REASON_S = 6.0
_LOOK_S = 0.02


def last_failure(error: Exception, links: Iterable[Link] | None, sessions: Sequence[EngineSession]) -> Exception:
    """Return a session's reason if a link broke and a session reports its end shortly afterwards; else `error`.

    A process that died is the cause; ranks that only lost their links to it are not. If a link broke, all links are
    closed, so that ranks that wait for this process also end and report.

    links: links of this process; None if they were never made.
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
