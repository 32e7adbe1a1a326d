"""Engine processes as their owner sees them, one rank of a group each: commands go there, events come back.

`edge.remote_session` has those on workers, `edge.local_session` those on this device.
"""

from __future__ import annotations

import json
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edge.errors import WorkerError
from edge.peers import Peer
from transport import edge_pb2 as pb
from transport.errors import LinkTimeout, TransportError
from transport.link import DEFAULTS, Deadlines

COMMAND_TIMEOUT_S = 120.0  # for the engine process to say something about a command


class EngineSession(ABC):
    """An engine process. `close()` ends it; it is also a context manager."""

    peer: Peer  # where the other ranks reach it
    pid: int

    def __init__(self, device: str, rank: int) -> None:
        self.device = device  # its name
        self.rank = rank
        self.died: Exception | None = None
        self._events: queue.SimpleQueue[pb.Event | Exception] = queue.SimpleQueue()

    def open(self, world_size: int, secret: bytes, deadlines: Deadlines = DEFAULTS) -> pb.Opened:
        """The first command: make it a rank of a group, and wait until it can be dialled."""
        asked = pb.Open(
            rank=self.rank,
            world_size=world_size,
            secret=secret,
            connect_timeout_s=deadlines.connect_timeout_s,
            step_timeout_s=deadlines.step_timeout_s,
            send_timeout_s=deadlines.send_timeout_s,
        )
        try:
            return self.ask(pb.Command(open=asked)).opened
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
        """Send a command, whose final event `answer` waits for. So several ranks can be told before one answers."""
        if self.died is not None:
            raise self.died
        self._send(command)

    def answer(self, on_event: Callable[[pb.Event], None] | None = None) -> pb.Event:
        """The final event of the oldest command that has none yet."""
        while True:
            try:
                event = self._events.get(timeout=COMMAND_TIMEOUT_S)
            except queue.Empty:
                self.died = LinkTimeout(f"{self.device} said nothing for {COMMAND_TIMEOUT_S:g} s")
                self.close()  # or a late answer would be taken for the next one
                raise self.died from None
            if isinstance(event, Exception):
                self.died = event
                raise event
            kind = event.WhichOneof("event")
            if kind == "failed":
                raise WorkerError(f"{self.device}: {event.failed.message}", event.failed.error)
            if kind == "died":
                self.died = WorkerError(f"{self.device}: {event.died.reason}")
                raise self.died
            if kind != "loading":
                return event
            if on_event:
                on_event(event)

    def load(
        self, slice_: str, options: dict[str, Any] | None = None, progress: Callable[[float], None] | None = None
    ) -> pb.Loaded:
        """Load a slice that is there. `options`: of EngineOptions, by name. progress: the fraction loaded."""
        command = pb.Command(load=pb.Load(slice=slice_, options_json=json.dumps(options or {})))
        return self.ask(command, lambda event: progress(event.loading.fraction) if progress else None).loaded

    def unload(self) -> None:
        """Free what was loaded; the links stay."""
        self.ask(pb.Command(unload=pb.Unload()))

    @abstractmethod
    def close(self) -> None:
        """End the process."""

    @abstractmethod
    def _send(self, command: pb.Command) -> None:
        """Hand a command over."""

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_all(sessions: Sequence[EngineSession], transport: str = "auto") -> list[Any]:
    """Give all ranks links to each other: their states, one list of pb.LinkState per session.

    The first error of any rank, after all have answered.
    """
    peers = [session.peer for session in sessions]
    for session in sessions:
        given = [
            pb.Peer(
                rank=peer.rank,
                name=peer.name,
                host=peer.host,
                port=peer.port,
                tcp_port=peer.tcp_port,
                session=peer.session,
            )
            for peer in peers
            if peer.rank != session.rank
        ]
        session.tell(pb.Command(connect=pb.Connect(peers=given, transport=transport)))
    return [list(event.connected.links) for event in answers(sessions)]


def answers(sessions: Sequence[EngineSession]) -> Iterator[pb.Event]:
    """The final event of every session, in order; where one fails, its error after all others have answered."""
    events: list[pb.Event] = []
    failed: Exception | None = None
    for session in sessions:
        try:
            events.append(session.answer())
        except (TransportError, WorkerError) as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return iter(events)
