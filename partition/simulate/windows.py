"""Windows of a request that is alone, in a simulation, by the rules of `edge.llm.in_flight`."""

from __future__ import annotations

import random
from collections import deque

from partition.predict.drafts import Draft
from partition.simulate.servers import SimulatedStep


def draw_accepted(acceptance: float, drafts: int, chosen: random.Random) -> int:
    """Draw how many draft tokens are accepted, up to the first rejected one."""
    right = 0
    while right < drafts and chosen.random() < acceptance:
        right += 1
    return right


class Windows:
    """Draft windows of one request: submitted one after the other, verified when they return."""

    def __init__(self, index: int, draft: Draft, chosen: random.Random, cancelled: set[SimulatedStep]) -> None:
        """index: of the request. cancelled: is given the steps that are still to come, and of no use."""
        self.index = index
        self._draft, self._random, self._cancelled = draft, chosen, cancelled
        self._under_way: deque[SimulatedStep] = deque()  # the oldest first
        self._returned = 0  # windows that have come back

    @property
    def is_empty(self) -> bool:
        """True if no window in flight can give tokens."""
        return not self._under_way

    def next(self, left: int) -> SimulatedStep | None:
        """Return one more window to submit; None if there are enough. left: tokens that the request may still get."""
        behind = sum(step.decodes for step in self._under_way)
        if len(self._under_way) >= self._draft.windows or left <= behind:
            return None
        rows = min(self._draft.rows, left - behind)
        step = SimulatedStep((self.index,), rows, drafts=rows - 1, follows=bool(self._under_way))
        self._under_way.append(step)
        return step

    def take(self, step: SimulatedStep) -> bool:
        """A step has come back; whether it is one of these."""
        is_own = step in self._under_way
        self._returned += is_own
        return is_own

    def look(self) -> int | None:
        """Verify the oldest window; return the number of its tokens, or None if it has not come back. If a draft token
        is rejected, in it or as the first of the next, all windows behind are cancelled."""
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
        """Discard the windows in flight; they are computed all the same."""
        self._cancelled.update([*self._under_way][self._returned :])
        self._under_way.clear()
        self._returned = 0
