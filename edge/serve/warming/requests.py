"""Background requests that compute prefixes, in the scheduler of an engine process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from edge.errors import EdgeError
from edge.llm.continuation import Request
from edge.llm.requests import Event, RequestState
from edge.llm.scheduler import Scheduler
from edge.serve.engine.inputs import InputProcessor
from edge.serve.warming.allowance import Allowance
from edge.serve.warming.prefix import Prefix
from edge.serve.warming.warmer import Warmer

_FIRST_NUMBER = 1 << 53  # a server with a million requests per second would take 285 years to reach this number


class WarmingRequests:
    """The requests of a warmer, one at a time. Its methods must be called by the engine thread."""

    def __init__(
        self,
        inputs: InputProcessor,
        scheduler: Callable[[], Scheduler],
        put: Callable[[Callable[[], object]], None],
        allowance: Allowance,
    ) -> None:
        """scheduler: returns the current scheduler. put: adds a job for the engine thread."""
        self._scheduler = scheduler
        # Larger than all request numbers of the server, because the scheduler preempts the highest number first.
        self._numbers = itertools.count(_FIRST_NUMBER)
        self._running: dict[int, tuple[Prefix, RequestState]] = {}  # by request number
        self.warmer = Warmer(
            inputs,
            start=lambda prefix: put(partial(self._begin, prefix)),
            cancel=lambda prefix: put(partial(self._cancel, prefix)),
            allowance=allowance,
        )

    def stepped(self, events: Sequence[Event], seconds: float) -> None:
        """Process the results of a scheduler step."""
        ended = {event.request for event in events if event.finish_reason is not None}
        for number, (prefix, state) in list(self._running.items()):
            if state in self._scheduler().queues.running or state.answer:  # otherwise it waits or was preempted
                self.warmer.ran(prefix, seconds)
            if number in ended:
                del self._running[number]
                self.warmer.ended(prefix, state)

    def lost(self) -> None:
        """Handle that the scheduler dropped all requests."""
        for prefix, _ in self._running.values():
            self.warmer.ended(prefix, None)
        self._running.clear()

    def _begin(self, prefix: Prefix) -> None:
        request = Request(
            prefix.tokens, 1, namespace=prefix.namespace, adapters=prefix.adapters, background=True, ends=False
        )
        try:
            state = self._scheduler().prepare(request, number=next(self._numbers))
        except EdgeError:  # the prefix does not fit any more
            self.warmer.ended(prefix, None)
            return
        self._running[state.number] = prefix, state
        self._scheduler().enqueue(state)

    def _cancel(self, prefix: Prefix) -> None:
        for number, (other, _) in self._running.items():
            if other is prefix:
                self._scheduler().cancel(number)
