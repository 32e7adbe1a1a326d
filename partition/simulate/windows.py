"""Draft windows of a lone request in a simulation, by the rules of `edge.llm.in_flight`."""

from __future__ import annotations

import random
from collections import deque

from partition.predict.drafts import Draft
from partition.simulate.servers import SimulatedStep


def draw_accepted(acceptance: float, drafts: int, chosen: random.Random) -> int:
    """Draw the number of accepted draft tokens, up to the first rejected one."""
    right = 0
    while right < drafts and chosen.random() < acceptance:
        right += 1
    return right


class Windows:
    """Draft windows of one request. They are submitted one after another, and verified when they return."""

    def __init__(self, index: int, draft: Draft, chosen: random.Random, cancelled: set[SimulatedStep]) -> None:
        """index: index of the request.
        cancelled: set that receives steps of cancelled windows that have not returned.
        """
        self.index = index
        self._draft, self._random, self._cancelled = draft, chosen, cancelled
        self._under_way: deque[SimulatedStep] = deque()  # oldest window first
        self._returned = 0  # number of windows that have returned

    @property
    def is_empty(self) -> bool:
        """True if no window in flight can yield tokens."""
        return not self._under_way

    def next(self, left: int) -> SimulatedStep | None:
        """Return the next window to submit, or None if there are enough.

        left: tokens that the request may still get.
        """
        behind = sum(step.decodes for step in self._under_way)
        if len(self._under_way) >= self._draft.windows or left <= behind:
            return None
        rows = min(self._draft.rows, left - behind)
        step = SimulatedStep((self.index,), rows, drafts=rows - 1, follows=bool(self._under_way))
        self._under_way.append(step)
        return step

    def take(self, step: SimulatedStep) -> bool:
        """Record that a step has returned. Return True if it is one of these windows."""
        is_own = step in self._under_way
        self._returned += is_own
        return is_own

    def look(self) -> int | None:
        """Verify the oldest window. Return the number of its tokens, or None if it has not returned.

        If a draft token is rejected, also the first one of the next window, all later windows are cancelled.
        """
        if not self._returned:
            return None
        self._returned -= 1
        rows = self._under_way.popleft().decodes
        drafts = rows if self._under_way else rows - 1
        right = draw_accepted(self._draft.acceptance, drafts, self._random)
        if right < drafts:
            self.cancel()
        return min(right + 1, rows)

    def cancel(self) -> None:
        """Cancel the windows in flight. The stages still compute them."""
        self._cancelled.update([*self._under_way][self._returned :])
        self._under_way.clear()
        self._returned = 0
