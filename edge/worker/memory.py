"""Memory of a worker: the daemon divides it among sessions, and each engine process asks, reports and follows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

from devices.probe import own_rss, rss
from devices.processes.limits import give_back_memory
from edge.elastic.share import SHARE, MemoryUse
from edge.elastic.shares import MemoryShares
from edge.errors import NotEnoughMemory
from quant.text import bytes_text
from transport import edge_pb2 as pb
from transport.errors import TransportError

_MIB = 1 << 20
_PROCESS_BYTES = 96 * _MIB  # of an engine process that has loaded nothing yet; it takes 60 to 75 MiB
_DAEMON_BYTES = 24 * _MIB  # that the daemon may need later: received data, and its pages


class WorkerMemory:
    """The daemon's end: the memory that a worker lends, and what of it each session has."""

    def __init__(self, limit_bytes: int, send: Callable[[str, pb.Command], None]) -> None:
        """send: sends a command to the process of a session, by name."""
        self._limit_bytes, self._send = limit_bytes, send
        self._shares = MemoryShares(lambda: limit_bytes - _daemon_bytes(), self._tell)
        self.room, self.leave, self.ask, self.figures = (
            self._shares.room, self._shares.leave, self._shares.ask, self._shares.figures,
        )  # fmt: skip

    def open(self, name: str) -> None:
        """Have room for the process of a session, which has loaded nothing. NotEnoughMemory."""
        with self._advised():
            self._shares.join(name, _PROCESS_BYTES, _PROCESS_BYTES, "a session that has loaded nothing")
            try:
                self._shares.grant(name)
            except NotEnoughMemory:
                self.leave(name)
                raise

    def empty(self, name: str, pid: int) -> None:
        """Note that the process of a session has nothing loaded."""
        self._shares.fix(name, max(_PROCESS_BYTES, rss(pid)))

    def note(self, name: str, use: pb.MemoryUse) -> None:
        """Note what a process reports, or give it the first share that it asks for, once that is there."""
        if use.held:
            self._shares.report(name, MemoryUse(use.least, use.most, use.held, use.limit, use.computed_s))
        else:
            threading.Thread(target=self._admit, args=(name, use), daemon=True, name="share").start()

    def _admit(self, name: str, use: pb.MemoryUse) -> None:
        try:
            with self._advised():
                self._shares.join(name, use.least, use.most, "what is to be loaded", again=True)
                self._shares.grant(name, lambda n: self._send(name, _share(bytes=n, first=True)))
        except NotEnoughMemory as error:
            self._send(name, _share(refused=str(error), first=True))

    def _tell(self, name: str, n_bytes: int) -> None:
        self._send(name, _share(bytes=n_bytes))

    @contextmanager
    def _advised(self) -> Iterator[None]:
        try:
            yield
        except NotEnoughMemory as error:
            raise NotEnoughMemory(
                f"{error}; the daemon takes {bytes_text(_daemon_bytes())} of this worker's"
                f" {bytes_text(self._limit_bytes)}: start it with more --memory, or end a session"
            ) from None


def _share(bytes: int = 0, refused: str = "", first: bool = False) -> pb.Command:
    return pb.Command(share=pb.MemoryShare(bytes=bytes, refused=refused, first=first))


def _daemon_bytes() -> int:
    """Bytes that the daemon holds and may need later, without received data that was freed."""
    give_back_memory()
    return own_rss() + _DAEMON_BYTES


class WorkerShare:
    """The process's end. `follow` is called by the thread that reads what the daemon sends."""

    def __init__(self, emit: Callable[[pb.Event], None]) -> None:
        """emit: sends an event to the daemon."""
        self._emit = emit
        self._first: queue.SimpleQueue[pb.MemoryShare] = queue.SimpleQueue()

    def join(self) -> None:
        """Ask the daemon before anything is loaded, and report to it from then on."""
        SHARE.join(self._ask, self._report)

    def follow(self, share: pb.MemoryShare) -> None:
        """Hold so much from now on."""
        if not share.refused:
            SHARE.limit = share.bytes
        if share.first:
            self._first.put(share)

    def _ask(self, use: MemoryUse) -> int:
        self._report(use)
        share = self._first.get()  # the daemon answers within a minute, or this process ends with it
        if share.refused:
            raise NotEnoughMemory(share.refused)
        return share.bytes

    def _report(self, use: MemoryUse) -> None:
        with suppress(TransportError):  # the daemon has gone, and this process ends
            self._emit(pb.Event(memory=pb.MemoryUse(**asdict(use))))
