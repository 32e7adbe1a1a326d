"""Queues of a scheduler: which requests wait for a slot, run, can be submitted or are computed elsewhere."""

from __future__ import annotations

import itertools
from collections import deque

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
