"""Health watch of an engine process: sends heartbeats every few seconds, and kills a process that does not answer.

The control thread of the process answers, independently of its engine thread, and reports the duration of the current
step. Silence is measured in unanswered heartbeats, so that suspending the server does not count as silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge.errors import EngineGone

# /health needs no key, so this text has neither names nor paths.
RESTARTING = "its engine process ended; the next one is starting, and the log has the reason"


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of a process, in seconds."""

    ask_s: float = 5.0  # interval of heartbeats, and wait for an answer
    silent_s: float = 10.0  # time without an answer after which `/health` reports it
    stuck_s: float = 30.0  # time without an answer after which the process is killed
    step_s: float = 600.0  # maximum time of one step; a large model on a slow disk may take minutes


DEADLINES = Deadlines()


class Watch:
    """Watches the process of one model, and the processes that replace it."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._task: asyncio.Task[None] | None = None
        self._silent_s = 0.0  # time since the last answer
        self._busy_s: float | None = None  # duration of the current step at the last answer; None: idle
        self._ended_by: str | None = None  # reason why the previous process ended

    def begin(self, heartbeat: Callable[[], Awaitable[Mapping[str, Any]]], end: Callable[[str], None]) -> None:
        """Watch a process that has loaded its model.

        heartbeat: returns the result of `ServingLoop.heartbeat`.
        end: kills the process, for the given reason.
        """
        self.leave(None)
        self._task = asyncio.create_task(self._watch(heartbeat, end))

    def leave(self, reason: str | None) -> None:
        """Stop watching. reason: why the process crashed; None: it was asked to end."""
        if self._task is not None:
            self._task.cancel()
        self._task, self._ended_by, self._silent_s, self._busy_s = None, reason, 0.0, None

    def to_json(self, failed: Exception | None = None) -> dict[str, Any]:
        """Return an item of `ServedModels.health`. failed: why no process is started any more."""
        if failed is not None:
            return {"state": "failed", "reason": "its model cannot be run; the log says why"}
        if self._ended_by is not None:
            return {"state": "restarting", "reason": self._ended_by}
        if self._silent_s >= self._deadlines.silent_s:
            return {"state": "silent", "reason": f"an engine process has said nothing for {self._silent_s:g} s"}
        if self._task is None:
            return {"state": "loading"}
        return {"state": "waiting"} if self._busy_s is None else {"state": "computing", "busy_s": self._busy_s}

    async def _watch(self, heartbeat: Callable[[], Awaitable[Mapping[str, Any]]], end: Callable[[str], None]) -> None:
        limits = self._deadlines
        while True:
            try:
                beat_answer = await asyncio.wait_for(heartbeat(), limits.ask_s)
            except asyncio.TimeoutError:
                self._silent_s += limits.ask_s
                if self._silent_s >= limits.stuck_s:
                    return end(f"its process has said nothing for {self._silent_s:g} s")
                continue
            except EngineGone:  # `EngineProcess` starts the next process
                return None
            self._silent_s, self._busy_s = 0.0, beat_answer["busy_s"]
            if self._busy_s is not None and self._busy_s > limits.step_s:
                return end(f"one step takes more than {limits.step_s:g} s")
            await asyncio.sleep(limits.ask_s)
