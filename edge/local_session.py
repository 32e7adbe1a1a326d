"""An engine process on this device, without a daemon: the owner's own rank, which dials and is never dialled."""

from __future__ import annotations

import threading
from pathlib import Path

from edge.child import Child
from edge.engine_session import EngineSession
from edge.lent import Lent
from edge.peers import Peer
from transport import edge_pb2 as pb
from transport.errors import LinkClosed
from transport.link import DEFAULTS, Deadlines

_HOST = "127.0.0.1"  # its doorway is of no use to other devices


class LocalSession(EngineSession):
    """Rank 0 of a group, on this device."""

    def __init__(
        self,
        device: str,
        world_size: int,
        secret: bytes,
        credentials: Path | None,
        threads: int,
        deadlines: Deadlines = DEFAULTS,
        streams: bool = False,
    ) -> None:
        """Starts the process. credentials: the folder, where its links are encrypted. streams: what its links are for
        (`transport.tcp_link.tune`)."""
        super().__init__(device, 0)
        self._child = Child(_HOST, credentials, Lent(threads), "local")
        threading.Thread(target=self._read, daemon=True, name="events of this device").start()
        self.pid = self.open(world_size, secret, deadlines, streams=streams).pid
        self.peer = Peer(0, device, _HOST, 0, 0, "local")

    def close(self) -> None:
        """End the process."""
        self._child.stop()

    def _send(self, command: pb.Command) -> None:
        self._child.send(command)

    def _read(self) -> None:
        while (event := self._child.receive()) is not None:
            self._hear(event)
        self._hear(self._child.died() or LinkClosed(f"the session on {self.device} was closed"))
