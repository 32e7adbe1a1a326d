"""Liveness monitor: reports workers that stop responding, by their missing heartbeats, that recover, or that announce
that they are leaving."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edge.cluster.session import EngineSession
from edge.net.peers import HEARTBEAT_S
from edge.tasks import Repeated

SILENT_S = 5 * HEARTBEAT_S  # without a word; fewer beats may be late on a busy device
LOST_S = 3 * HEARTBEAT_S  # without a word, while this device ran: then the process stands still
_LOOK_S = HEARTBEAT_S / 2


class LivenessMonitor:
    """Failure detector: looks at engine processes until it is closed. A silent one is suspected, and then lost.

    The first line comes after SILENT_S, the next when the silence has lasted twice as long, and so on. A process that
    is silent for LOST_S is given up where somebody wants to know. For that, checks are counted and not seconds: where
    this device itself stood still, words may be waiting to be read.
    """

    def __init__(
        self,
        sessions: Callable[[], Iterable[EngineSession]],
        say: Callable[[str], None],
        is_busy: Callable[[], bool] = lambda: True,
        lost: Callable[[EngineSession], None] | None = None,
        leaves: Callable[[EngineSession], None] = lambda session: None,
    ) -> None:
        """is_busy: whether anybody waits for them; nothing is said otherwise. lost: called with who is given up.
        leaves: called at each look, with each whose device is about to end."""
        self._sessions, self._say, self._is_busy, self._lost = sessions, say, is_busy, lost
        self._leaves = leaves
        self._said: dict[EngineSession, float] = {}  # silence in seconds, when it was last said
        self._checks: dict[EngineSession, tuple[float, int]] = {}  # silence at the last look, and checks without a word
        self._looks = Repeated(self.look, _LOOK_S, "silence")

    def look(self) -> None:
        """Report sessions that stopped responding, recovered or are leaving, since the last check."""
        for session in list(self._sessions()):
            if session.leaving:
                self._leaves(session)
            silent_s, said_s = session.silent_s, self._said.get(session, 0.0)
            if silent_s is None:  # it has ended, and answers no more
                self._said.pop(session, None)
                self._checks.pop(session, None)
                continue
            before_s, checks = self._checks.get(session, (0.0, 0))
            checks = checks + 1 if silent_s > before_s else 0
            self._checks[session] = silent_s, checks
            if self._lost is not None and checks * _LOOK_S >= LOST_S and self._is_busy():
                self._checks[session] = silent_s, 0
                self._said.pop(session, None)
                self._lost(session)
            elif silent_s < said_s:
                del self._said[session]
                self._say(f"{session.device} answers again")
            elif silent_s >= max(SILENT_S, 2 * said_s) and self._is_busy():
                self._said[session] = silent_s
                self._say(f"waiting for {session.device}: no answer for {silent_s:.0f} s")

    def close(self) -> None:
        """Look no more."""
        self._looks.close()
