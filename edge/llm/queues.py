"""Queues of a scheduler: which requests wait for a slot, run, can be submitted or are computed elsewhere."""

from __future__ import annotations

import itertools
from collections import Counter, deque

from edge.llm.requests import RequestState


class Queues:
    """The requests of a scheduler, from `Scheduler.enqueue` until they end."""

    def __init__(self) -> None:
        self.numbers = itertools.count()  # numbers of requests, in order of arrival
        self.waiting: deque[RequestState] = deque()  # requests without a slot
        self.running: list[RequestState] = []  # requests with a slot, in order of admission
        self.ready: deque[RequestState] = deque()  # running requests whose next rows can be submitted
        self.remote: list[RequestState] = []  # running requests whose prompt another placement computes
        self.preemptions = {"foreground": 0, "background": 0}  # number of preemptions by kind of request

    @property
    def all(self) -> list[RequestState]:
        """All requests, the waiting ones first."""
        return [*self.waiting, *self.running]

    @property
    def without_logits(self) -> list[RequestState]:
        """Running requests that wait for no logits, which a scheduler may preempt."""
        return [*self.ready, *self.remote]

    @property
    def is_background(self) -> bool:
        """True if all requests run in the background."""
        return all(state.request.background for queue in (self.running, self.waiting) for state in queue)

    @property
    def next_waiting(self) -> RequestState:
        """The waiting request that begins next.

        Urgent priorities come first, then clients without a running request, then the fair order, and then arrival.
        """
        running = {state.request.client for state in self.running if state.request.client}

        def key(state: RequestState) -> tuple[bool, int, bool, float]:
            priority, tag = state.request.order
            return state.request.background, priority, state.request.client in running, tag

        return min(self.waiting, key=key)

    def displaced_by(self, state: RequestState) -> RequestState | None:
        """Return the running request that a waiting one displaces if there is no room for both; None if it waits.

        This is a request with a less urgent priority, or, for a client without running requests, one of the client that
        has most of them.
        """
        may = [own for own in self.without_logits if own.request.order[0] > state.request.order[0]]
        if not may:
            running = Counter(own.request.client for own in self.running)
            client, n = max(running.items(), key=lambda item: item[1], default=("", 0))
            if n < 2 or not client or state.request.client in (*running, ""):
                return None
            may = [own for own in self.without_logits if own.request.client == client]
            may = [own for own in may if own.request.order[0] == state.request.order[0]]
        return max(may, key=lambda own: (own.request.order[0], own.number), default=None)

    def remove(self, state: RequestState) -> None:
        """Remove a request from all queues."""
        for queue in (self.waiting, self.ready, self.remote, self.running):
            if state in queue:
                queue.remove(state)

    def admit(self, state: RequestState) -> None:
        """Note that a waiting request has a slot."""
        self.waiting.remove(state)
        self.running.append(state)

    def preempt(self, state: RequestState) -> None:
        """Let a running request wait again, before all others."""
        self.remove(state)
        self.waiting.appendleft(state)
        self.preemptions["background" if state.request.background else "foreground"] += 1

    def preempt_all(self) -> None:
        """Let all running requests wait again, before all others, because their engine was lost."""
        self.waiting.extendleft(reversed(self.running))
        for queue in (self.running, self.ready, self.remote):
            queue.clear()
