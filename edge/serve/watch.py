"""Whether an engine process answers: it is asked every few seconds, and ended where it does not.

Its control thread answers, whatever the engine thread computes, and says for how long that has been at one thing. Times
are counted in questions without an answer, so that a server that was itself suspended blames nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge.errors import EngineGone

# Whoever asks for health needs no key, so it tells neither names nor paths.
RESTARTING = "its engine process ended; the next is being started, and the log says why"


@dataclass(frozen=True)
class Deadlines:
    """How long a process may take."""

    ask_s: float = 5.0  # between two questions, and for an answer
    silent_s: float = 10.0  # without an answer: then `/health` says so
    stuck_s: float = 30.0  # without an answer: then it is ended
    step_s: float = 600.0  # for one step: of a large model, read from a slow disk, it may take minutes


DEADLINES = Deadlines()


class Watch:
    """Over the process of one model, and those that replace it."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._task: asyncio.Task[None] | None = None
        self._silent_s = 0.0  # it has said nothing for so long
        self._busy_s: float | None = None  # at one step, when it was asked last; None: it waits for requests
        self._ended_by: str | None = None  # why the process before did

    def begin(self, beat: Callable[[], Awaitable[Mapping[str, Any]]], end: Callable[[str], None]) -> None:
        """Watch over a process that has loaded its model. beat: asks it, as `ServingLoop.beat` answers. end: told why
        the process is to be ended."""
        self.leave(None)
        self._task = asyncio.create_task(self._watch(beat, end))

    def leave(self, reason: str | None) -> None:
        """The process has ended, by itself for this reason, or as it was told to."""
        if self._task is not None:
            self._task.cancel()
        self._task, self._ended_by, self._silent_s, self._busy_s = None, reason, 0.0, None

    def to_json(self, failed: Exception | None = None) -> dict[str, Any]:
        """As an item of `ServedModels.health`. failed: why no process is started any more."""
        if failed is not None:
            return {"state": "failed", "reason": "its model cannot be run; the log says why"}
        if self._ended_by is not None:
            return {"state": "restarting", "reason": self._ended_by}
        if self._silent_s >= self._deadlines.silent_s:
            return {"state": "silent", "reason": f"an engine process has said nothing for {self._silent_s:g} s"}
        if self._task is None:
            return {"state": "loading"}
        return {"state": "waiting"} if self._busy_s is None else {"state": "computing", "busy_s": self._busy_s}

    async def _watch(self, beat: Callable[[], Awaitable[Mapping[str, Any]]], end: Callable[[str], None]) -> None:
        limits = self._deadlines
        while True:
            try:
                told = await asyncio.wait_for(beat(), limits.ask_s)
            except asyncio.TimeoutError:
                self._silent_s += limits.ask_s
                if self._silent_s >= limits.stuck_s:
                    return end(f"its process has said nothing for {self._silent_s:g} s")
                continue
            except EngineGone:  # whoever hears that sees to what is next
                return None
            self._silent_s, self._busy_s = 0.0, told["busy_s"]
            if self._busy_s is not None and self._busy_s > limits.step_s:
                return end(f"one step takes more than {limits.step_s:g} s")
            await asyncio.sleep(limits.ask_s)
