"""An engine process on a worker, behind its daemon."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import grpc

from edge.engine_session import EngineSession
from edge.errors import WorkerError
from edge.peers import Peer
from edge.remote import Remote, explained
from transport import edge_pb2 as pb
from transport import rpc
from transport.errors import LinkClosed, TransportError
from transport.link import DEFAULTS, Deadlines


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
        """Starts the process, on these cores of the worker where some are named, and waits until it can be dialled.

        streams: what its links are for (`transport.tcp_link.tune`).
        """
        super().__init__(worker.label, rank)
        self._commands: queue.SimpleQueue[pb.Command | None] = queue.SimpleQueue()
        self._call = rpc.stub(worker.channel, "Session")(iter(self._commands.get, None))
        threading.Thread(target=self._read, daemon=True, name=f"events of {worker.name}").start()
        opened = self.open(world_size, secret, deadlines, affinity, streams)
        self.name, self.pid = opened.session, opened.pid
        self.peer = Peer(rank, worker.name, worker.host, worker.port, opened.tcp_port, opened.session)

    def close(self) -> None:
        """End the process."""
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
