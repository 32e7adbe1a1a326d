"""Memory of a worker: the daemon divides it among sessions, and engine processes request, report and adjust their
use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from devices.probe import own_rss, rss
from devices.processes.limits import give_back_memory
from edge.errors import NotEnoughMemory
from edge.weights.elastic.share import SHARE, MemoryShare, MemoryUse
from edge.weights.elastic.shares import Member, MemoryShares
from quant.text import bytes_text
from transport import edge_pb2 as pb
from transport.errors import TransportError

_MIB = 1 << 20
_PROCESS_BYTES = 96 * _MIB  # engine process without a loaded part; 60 to 75 MiB measured
_DAEMON_BYTES = 24 * _MIB  # additional memory that the daemon may need later for received data and its pages


class WorkerMemory:
    """Daemon's side: the worker's memory and each session's share."""

    def __init__(self, limit_bytes: int, send: Callable[[str, pb.Command], None]) -> None:
        """send: sends a command to the process of a session by name."""
        self._limit_bytes, self._send = limit_bytes, send
        self._shares = MemoryShares(lambda: limit_bytes - _daemon_bytes())
        self.budget, self.ask, self.figures = self._shares.budget, self._shares.ask, self._shares.figures
        self.leave = self._shares.leave

    def open(self, name: str) -> Member:
        """Return a member for a new session, after reserving memory for its empty process. Raises NotEnoughMemory."""
        waiting = MemoryShare()
        member = self._shares.join(name, waiting.follow)
        what = "a session that has loaded nothing"
        waiting.join(lambda least, most: self._claim(member, least, most, what), lambda use: None)
        try:
            waiting.request(_PROCESS_BYTES, _PROCESS_BYTES)
        except BaseException:
            self.leave(member)
            raise
        member.tell = partial(self._tell, name)
        return member

    def empty(self, member: Member, pid: int) -> None:
        """Record that the process of a session has nothing loaded."""
        self._shares.fix(member, max(_PROCESS_BYTES, rss(pid)))

    def claim(self, member: Member, claim: pb.MemoryClaim) -> None:
        """Reserve memory for a load, or tell the session's process why there is none."""
        try:
            self._claim(member, claim.least, claim.most, "the part to load")
        except NotEnoughMemory as error:
            self._tell(member.name, *member.sent, member.number, True, str(error))

    def report(self, member: Member, use: pb.MemoryUse) -> None:
        """Record the memory use that the process of a session reports."""
        self._shares.report(member, MemoryUse(use.resident, use.seen, use.computed_s))

    def _claim(self, member: Member, least: int, most: int, what: str) -> None:
        try:
            self._shares.claim(member, least, most, what)
        except NotEnoughMemory as error:
            raise NotEnoughMemory(
                f"{error}; the daemon takes {bytes_text(_daemon_bytes())} of this worker's"
                f" {bytes_text(self._limit_bytes)}: start it with more --memory, or end a session"
            ) from None

    def _tell(self, name: str, n_bytes: int, coming: int, number: int, answers: bool, refused: str = "") -> None:
        share = pb.MemoryShare(bytes=n_bytes, coming=coming, number=number, answers=answers, refused=refused)
        self._send(name, pb.Command(share=share))


def _daemon_bytes() -> int:
    """Return the bytes that the daemon holds and may need later, after freeing unused memory."""
    give_back_memory()
    return own_rss() + _DAEMON_BYTES


def join_daemon(emit: Callable[[pb.Event], None]) -> None:
    """Connect this engine process to the daemon's memory share before anything is loaded. emit: sends an event."""

    def send(event: pb.Event) -> None:
        with suppress(TransportError):  # the daemon has ended, so this process ends, too
            emit(event)

    SHARE.join(
        lambda least, most: send(pb.Event(claim=pb.MemoryClaim(least=least, most=most))),
        lambda use: send(pb.Event(memory=pb.MemoryUse(**asdict(use)))),
    )


def follow_daemon(share: pb.MemoryShare) -> None:
    """Apply a new memory share. Called by the thread that reads the daemon's commands."""
    SHARE.follow(share.bytes, share.coming, share.number, share.answers, share.refused)
