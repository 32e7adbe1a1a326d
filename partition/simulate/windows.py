"""Windows of a request that is alone, in a simulation, by the rules of `edge.llm.windows`."""

from __future__ import annotations

import random
from collections import deque

from partition.predict.drafts import Draft
from partition.simulate.servers import Step


def right_guesses(acceptance: float, guesses: int, chosen: random.Random) -> int:
    """How many of these are right, up to the first that is wrong."""
    right = 0
    while right < guesses and chosen.random() < acceptance:
        right += 1
    return right


class Windows:
    """Those of one request: one after the other is submitted, and looked at when it has come back."""

    def __init__(self, index: int, draft: Draft, chosen: random.Random, cancelled: set[Step]) -> None:
        """index: of the request. cancelled: is given the steps that are still to come, and of no use."""
        self.index = index
        self._draft, self._random, self._cancelled = draft, chosen, cancelled
        self._under_way: deque[Step] = deque()  # the oldest first
        self._came = 0  # of these: that have come back

    @property
    def is_empty(self) -> bool:
        """Whether none is under way that may give tokens."""
        return not self._under_way

    def next(self, left: int) -> Step | None:
        """One more to submit; None where there are enough. left: tokens that the request may still get."""
        behind = sum(step.decodes for step in self._under_way)
        if len(self._under_way) >= self._draft.windows or left <= behind:
            return None
        rows = min(self._draft.rows, left - behind)
        step = Step((self.index,), rows, guesses=rows - 1, follows=bool(self._under_way))
        self._under_way.append(step)
        return step

    def take(self, step: Step) -> bool:
        """A step has come back; whether it is one of these."""
        is_own = step in self._under_way
        self._came += is_own
        return is_own

    def look(self) -> int | None:
        """Tokens that the oldest gives; None where it has not come back. Where a guess is wrong, in it or the first of
        the next, all behind it are cancelled."""
        if not self._came:
            return None
        self._came -= 1
        rows = self._under_way.popleft().decodes
        guesses = rows if self._under_way else rows - 1
        right = right_guesses(self._draft.acceptance, guesses, self._random)
        if right < guesses:
            self.cancel()
        return min(right + 1, rows)

    def cancel(self) -> None:
        """Nothing comes of those that are under way; they are computed all the same."""
        self._cancelled.update([*self._under_way][self._came :])
        self._under_way.clear()
        self._came = 0
