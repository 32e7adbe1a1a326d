"""Devices that stand still while somebody waits for them: said in words, and again when they go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from edge.cluster.session import EngineSession
from edge.net.peers import BEAT_S

SILENT_S = 2.5 * BEAT_S  # without a word; fewer beats may be late on a busy device
_LOOK_S = 0.5


class Silence:
    """Looks at engine processes until it is closed.

    The first line comes after SILENT_S, the next when the silence has lasted twice as long, and so on.
    """

    def __init__(
        self,
        sessions: Callable[[], Iterable[EngineSession]],
        say: Callable[[str], None],
        is_busy: Callable[[], bool] = lambda: True,
    ) -> None:
        """is_busy: whether anybody waits for them; nothing is said otherwise."""
        self._sessions, self._say, self._is_busy = sessions, say, is_busy
        self._said: dict[EngineSession, float] = {}  # silence in seconds, when it was last said
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="silence").start()

    def look(self) -> None:
        """Say what is new."""
        for session in list(self._sessions()):
            silent_s, said_s = session.silent_s, self._said.get(session, 0.0)
            if silent_s < said_s:
                del self._said[session]
                self._say(f"{session.device} answers again")
            elif silent_s >= max(SILENT_S, 2 * said_s) and self._is_busy():
                self._said[session] = silent_s
                self._say(f"waiting for {session.device}: no answer for {silent_s:.0f} s")

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()
