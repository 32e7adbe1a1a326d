"""Requests that may have ended an engine process: they are asked again one at a time, so that the one which ends the
next process, too, is known. It fails, and is refused from then on; no other request pays."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge.errors import PoisonousRequest

ENDS_IN_A_ROW = 2  # ends of processes that handled a request, after which it fails
REFUSED_S = 600.0  # for which the same request is refused then
_MOST_KNOWN = 1000  # requests; the oldest are forgotten
# Of a request, what two that are the same may differ in.
_OWN = ("generated", "namespace", "number", "place")


class Case:
    """A request, with the processes that ended while they handled it."""

    def __init__(self, what: str, arguments: Callable[[], Mapping[str, Any]]) -> None:
        """what: its name. arguments: returns them as JSON values."""
        self.what, self.arguments = what, arguments
        self.ends = 0  # processes in a row
        self.ended_by: Exception | None = None  # why the last of them ended, until the request is sent again
        self.is_cause = False  # it alone was handled by those that ended
        self.is_abandoned = False  # nobody waits for it, and the process handles it

    def digest(self) -> bytes:
        """Return a digest that requests share which are the same, whoever sends them."""
        values = {key: value for key, value in self.arguments().items() if key not in _OWN}
        if isinstance(sampling := values.get("sampling"), Mapping):
            values["sampling"] = {key: value for key, value in sampling.items() if key != "seed"}
        text = json.dumps([self.what, values], sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()


class Suspects:
    """Requests of one model that may have ended its process. For one event loop."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """name: of the model. clock: seconds."""
        self._name, self._clock = name, clock
        self.handled: dict[int, Case] = {}  # requests that the process has not answered, by number
        self._suspects: set[Case] = set()
        self._tried: Case | None = None  # the suspect that is asked again
        self._next: Case | None = None  # the one that was asked again when the last process ended: first, and alone
        self._changed = asyncio.Event()
        # By digest: until when it is known, processes that it ended, and how the last one ended.
        self._known: dict[bytes, tuple[float, int, str]] = {}

    async def turn(self, case: Case) -> None:
        """Wait until a request may be sent: suspects go one at a time, before all others. PoisonousRequest for one that
        ended two processes a short time ago."""
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
        """Return whether a request has to wait for its turn."""
        return bool(self._suspects) and self._tried is not case

    def ended(self, cases: Sequence[Case], reason: Exception) -> Case | None:
        """Note that a process ended for this reason while it handled these requests. Return the request that ended it,
        if that is certain."""
        cases = list(dict.fromkeys(cases))
        is_alone = len(cases) == 1
        if self._tried is not None:  # others may have gone on beside it, as their answers had begun
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
        """Suspect a request no more: a process answered it, at least in part."""
        if case.ends:
            self._known.pop(case.digest(), None)
        case.ends = 0
        self.leave(case)

    def leave(self, case: Case) -> None:
        """Let others go on: the request is not sent again. It is suspected if somebody sends the same."""
        self._suspects.discard(case)
        self._tried = None if self._tried is case else self._tried
        self._next = None if self._next is case else self._next
        self._changed.set()

    def abandon(self, number: int, case: Case) -> None:
        """Send a request no more. The process may handle it nevertheless: until it is done, it stays a suspect."""
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
        """Return the error of a request that ends the process."""
        return PoisonousRequest(
            f"this request ended the engine process of {self._name} each time ({reason}), and is refused for"
            f" {REFUSED_S / 60:g} minutes; change it, for instance make it shorter, and report this"
        )

    def _recall(self, case: Case) -> None:
        """Suspect a request like one that ended a process a short time ago."""
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
