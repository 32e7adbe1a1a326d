"""Liveness monitor: reports workers that miss heartbeats, that recover, and that announce their leaving."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edge.cluster.session import EngineSession
from edge.net.peers import HEARTBEAT_S
from edge.tasks import Repeated

SILENT_S = 5 * HEARTBEAT_S  # silence before a message; a busy device may delay fewer heartbeats
LOST_S = 3 * HEARTBEAT_S  # silence, while this device ran, after which the process counts as lost
_LOOK_S = HEARTBEAT_S / 2


class LivenessMonitor:
    """Failure detector for engine processes. A silent process is first suspected and later lost.

    The first message comes after SILENT_S, and further messages each time the silence has doubled. After LOST_S the
    process is given up if a `lost` callback exists. For that, checks are counted instead of seconds: if this device
    itself stood still, heartbeats may be waiting to be read.
    """

    def __init__(
        self,
        sessions: Callable[[], Iterable[EngineSession]],
        say: Callable[[str], None],
        is_busy: Callable[[], bool] = lambda: True,
        lost: Callable[[EngineSession], None] | None = None,
        leaves: Callable[[EngineSession], None] = lambda session: None,
    ) -> None:
        """Start checking in a thread.

        sessions: returns the engine processes to check.
        say: shows a message.
        is_busy: returns True while a request waits for the processes. Otherwise nothing is reported.
        lost: called with a process that is given up.
        leaves: called at each check with each process whose device is about to leave.
        """
        self._sessions, self._say, self._is_busy, self._lost = sessions, say, is_busy, lost
        self._leaves = leaves
        self._said: dict[EngineSession, float] = {}  # length of the silence, in seconds, when it was last reported
        # Last measured silence, and checks without a heartbeat since.
        self._checks: dict[EngineSession, tuple[float, int]] = {}
        self._looks = Repeated(self.look, _LOOK_S, "silence")

    def look(self) -> None:
        """Report sessions that stopped responding, recovered or are leaving, since the last check."""
        for session in list(self._sessions()):
            if session.leaving:
                self._leaves(session)
            silent_s, said_s = session.silent_s, self._said.get(session, 0.0)
            if silent_s is None:  # the process has ended
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
        """Stop checking."""
        self._looks.close()
