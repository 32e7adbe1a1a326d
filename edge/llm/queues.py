"""Queues of a scheduler: which requests wait for a slot, run, can be submitted or are computed elsewhere."""

from __future__ import annotations

import itertools
from collections import Counter, deque

from edge.llm.requests import RequestState

RESERVED_S = 0.25  # time in which the next request of a client may take the slot of its last one


class Queues:
    """The requests of a scheduler, from `Scheduler.enqueue` until they end."""

    def __init__(self) -> None:
        self.numbers = itertools.count()  # numbers of requests, in order of arrival
        self.waiting: deque[RequestState] = deque()  # requests without a slot
        self.running: list[RequestState] = []  # requests with a slot, in order of admission
        self.ready: deque[RequestState] = deque()  # running requests whose next rows can be submitted
        self.remote: list[RequestState] = []  # running requests whose prompt another placement computes
        self._ended: dict[str, tuple[float, int]] = {}  # end and priority of the last request of each idle client
        self._were_alone = False  # True if the last step had only rows of `newcomers`
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

    def is_reserved(self, state: RequestState, n_slots: int, now: float) -> bool:
        """Return True if the last slot should stay free for the next request of another client.

        Otherwise the waiting request would take the slot, and would be displaced before it has done much. So a client
        cannot have all slots for a short time after another client has ended its only request.

        state: the next waiting request.
        now: seconds.
        """
        client, priority = state.request.client, state.request.order[0]
        n_running = sum(own.request.client == client for own in self.running)
        if not client or not 1 <= n_slots - 1 <= n_running:
            return False
        return any(
            now < ended_at + RESERVED_S and other != client and its_priority <= priority
            for other, (ended_at, its_priority) in self._ended.items()
        )

    def newcomers(self, n_rows: int) -> list[RequestState]:
        """Return the ready prompts for a step without other rows, so that a client's first token comes soon.

        They are short prompts, each the only running request of its client, while another client has several. Two such
        steps never follow each other.

        n_rows: number of rows of a step.
        """
        prompts = [state for state in self.ready if 1 < state.pending <= n_rows and not state.answer]
        if not prompts:  # in most steps
            self._were_alone = False
            return []
        running = Counter(state.request.client for state in self.running if state.request.client)
        several = [state.request.order[0] for state in self.ready if running[state.request.client] > 1]
        prompts = [
            state
            for state in prompts
            if running[state.request.client] == 1 and all(state.request.order[0] <= priority for priority in several)
        ]
        self._were_alone = bool(several and prompts) and not self._were_alone
        return [state for state in prompts if state.adapters == prompts[0].adapters] if self._were_alone else []

    def ended(self, state: RequestState, now: float) -> None:
        """Remove a request that has ended. now: seconds."""
        self.remove(state)
        client, (priority, _) = state.request.client, state.request.order
        self._ended = {other: (at, first) for other, (at, first) in self._ended.items() if now < at + RESERVED_S}
        if client and all(own.request.client != client for own in self.running):
            self._ended[client] = now, priority

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
