"""How many tokens of prompts may go into a step beside answers, so that answers stay fluent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_S = 0.25  # that a step with prompt tokens may take: a reader hardly sees a pause of that
LEAST_ROWS, FIRST_ROWS = 8, 64
_REMEMBERED = 8  # steps; the best of them counts, so that a burst of somebody else's work does not


class StepBudget:
    """Follows how fast prompts are computed here. Powers of two: engines learn a graph for each number of rows."""

    def __init__(self, most_rows: int, clock: Callable[[], float]) -> None:
        """most_rows: of a step. clock: seconds."""
        self._most, self._clock = most_rows, clock
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)  # prompt tokens a second
        self.rows = min(FIRST_ROWS, most_rows)

    @contextmanager
    def timed(self, prompt_rows: int, *, beside: bool) -> Iterator[None]:
        """Around a step with so many tokens of prompts. beside: with answers."""
        began = self._clock()
        yield
        took_s = self._clock() - began
        if not beside or prompt_rows < LEAST_ROWS or took_s <= 0:
            return
        self._rates.append(prompt_rows / took_s)
        fitting = int(max(self._rates) * STEP_S)
        self.rows = max(min(LEAST_ROWS, self._most), min(1 << max(fitting, 1).bit_length() - 1, self._most))
