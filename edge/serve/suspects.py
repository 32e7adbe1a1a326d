"""Requests that may have crashed an engine process.

They are sent again one at a time, to find the request that crashes the next process as well. Only this request fails,
and it is refused for some time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge.errors import PoisonousRequest

ENDS_IN_A_ROW = 2  # crashes while handling a request after which the request fails
REFUSED_S = 600.0  # seconds for which an equal request is refused afterwards
_MOST_KNOWN = 1000  # remembered requests; the oldest are forgotten
# Arguments that equal requests may differ in.
_OWN = ("client", "generated", "namespace", "number", "place", "priority", "tag")


class Case:
    """A request, with the processes that crashed while handling it."""

    def __init__(self, what: str, arguments: Callable[[], Mapping[str, Any]]) -> None:
        """what: name of the request. arguments: returns its arguments as JSON values."""
        self.what, self.arguments = what, arguments
        self.ends = 0  # consecutive processes that crashed
        self.ended_by: Exception | None = None  # reason of the last crash, until the request is sent again
        self.is_cause = False  # it was the only request that the crashed processes handled
        self.is_abandoned = False  # its client has disconnected, but the process still handles it

    def digest(self) -> bytes:
        """Return a digest that is the same for equal requests, regardless of the client."""
        values = {key: value for key, value in self.arguments().items() if key not in _OWN}
        if isinstance(sampling := values.get("sampling"), Mapping):
            values["sampling"] = {key: value for key, value in sampling.items() if key != "seed"}
        text = json.dumps([self.what, values], sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()


class Suspects:
    """Requests of one model that may have crashed its process. Use it in one event loop."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """name: name of the model. clock: returns seconds."""
        self._name, self._clock = name, clock
        self.handled: dict[int, Case] = {}  # unanswered requests by number
        self._suspects: set[Case] = set()
        self._tried: Case | None = None  # suspect that is being tried again
        self._next: Case | None = None  # suspect that was tried when the last process crashed; it goes first, and alone
        self._changed = asyncio.Event()
        # By digest: time until which the request is remembered, processes that it crashed, and the last reason.
        self._known: dict[bytes, tuple[float, int, str]] = {}

    async def turn(self, case: Case) -> None:
        """Wait until a request may be sent. Suspects go one at a time, before all other requests.

        Raises PoisonousRequest if an equal request recently crashed two processes.
        """
        if case not in self._suspects:
            self._recall(case)
        while not self._may_go(case):
            self._changed.clear()
            await self._changed.wait()

    def _may_go(self, case: Case) -> bool:
        if case not in self._suspects:
            return not self._suspects
        if self._tried is None and self._next in (None, case):
            self._tried = case
        return self._tried is case

    def waits(self, case: Case) -> bool:
        """Return True if a request has to wait for its turn."""
        return bool(self._suspects) and self._tried is not case

    def ended(self, cases: Sequence[Case], reason: Exception) -> Case | None:
        """Record that a process crashed while it handled these requests.

        reason: error of the crash. Return the request that caused it, if that is certain.
        """
        cases = list(dict.fromkeys(cases))
        is_alone = len(cases) == 1
        if self._tried is not None:  # answers that had begun may have continued next to it
            self._next, self._tried = self._tried, None
        for case in cases:
            case.ended_by = reason
            case.ends = case.ends + 1 if is_alone else max(case.ends, 1)
            self._suspects.add(case)
            self._known[case.digest()] = self._clock() + REFUSED_S, case.ends, str(reason)
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self.forget_handled()
        if not is_alone or cases[0].ends < ENDS_IN_A_ROW:
            return None
        cases[0].is_cause = True
        self.leave(cases[0])
        return cases[0]

    def acquit(self, case: Case) -> None:
        """Clear a request of suspicion, because a process answered at least a part of it."""
        if case.ends:
            self._known.pop(case.digest(), None)
        case.ends = 0
        self.leave(case)

    def leave(self, case: Case) -> None:
        """Remove a request that is not sent again, so that others may proceed. Equal requests remain suspicious."""
        self._suspects.discard(case)
        self._tried = None if self._tried is case else self._tried
        self._next = None if self._next is case else self._next
        self._changed.set()

    def abandon(self, number: int, case: Case) -> None:
        """Abandon a request. It stays a suspect while the process still handles it."""
        case.is_abandoned = self.handled.get(number) is case
        if not case.is_abandoned:
            self.leave(case)

    def forget_handled(self) -> None:
        """Forget the requests of a process that has ended."""
        for case in self.handled.values():
            if case.is_abandoned:
                self.leave(case)
        self.handled.clear()

    def error(self, reason: object) -> PoisonousRequest:
        """Return the error for a request that crashes the process."""
        return PoisonousRequest(
            f"this request crashed the engine process of {self._name} each time ({reason}), and is refused for"
            f" {REFUSED_S / 60:g} minutes; change it, for example shorten it, and report this problem"
        )

    def _recall(self, case: Case) -> None:
        """Suspect a request if an equal one recently crashed a process."""
        if not self._known:
            return
        now = self._clock()
        self._known = {digest: known for digest, known in self._known.items() if now < known[0]}
        _, ends, reason = self._known.get(case.digest(), (now, 0, ""))
        if ends >= ENDS_IN_A_ROW:
            raise self.error(reason)
        if ends:
            case.ends = ends
            self._suspects.add(case)
