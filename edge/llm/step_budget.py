"""How many tokens of prompts may go into a step beside answers, so that answers stay fluent, and whose."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

STEP_S = 0.25  # that a step with prompt tokens may take: a reader hardly sees a pause of that
LEAST_ROWS, FIRST_ROWS = 8, 64
TILE_ROWS = 16  # that kernels take at once: with TinyLlama's shape 16 rows took 145 ms where 15 took 203, and 14 188
OLDEST_PART = 4  # of a step's rows for prompts, one in so many is for the oldest
_REMEMBERED = 8  # steps; the best of them counts, so that a burst of somebody else's work does not


class StepBudget:
    """Follows how fast prompts are computed here. Powers of two: engines learn a graph for each number of rows."""

    def __init__(self, most_rows: int, clock: Callable[[], float]) -> None:
        """most_rows: of a step. clock: seconds."""
        self._most, self._clock = most_rows, clock
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)  # prompt tokens a second
        self.rows = min(FIRST_ROWS, most_rows)

    def beside(self, answers: int) -> int:
        """Rows for prompts in a step that has so many answers: near `rows`, so that the step has whole tiles."""
        whole = (answers + self.rows + TILE_ROWS // 2) // TILE_ROWS * TILE_ROWS
        return whole - answers if whole > answers else self.rows

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


class Prompt(Protocol):
    """A request whose prompt is being computed."""

    number: int  # the oldest has the least

    @property
    def pending(self) -> int:
        """Tokens that were not submitted yet."""


AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)


def parts(prefilling: Sequence[AnyPrompt], room: int) -> list[tuple[AnyPrompt, int]]:
    """How many of so many rows each of these prompts gets. Short ones come first, so that most answers begin soon; the
    oldest always has a part, so that it comes to its end."""
    if not prefilling:
        return []
    oldest = min(prefilling, key=lambda one: one.number)
    reserved = min(oldest.pending, -(-room // OLDEST_PART))
    room -= reserved
    found = []
    for one in sorted(prefilling, key=lambda one: (one.pending, one.number)):
        kept_back = reserved if one is oldest else 0
        n_rows = min(one.pending, room + kept_back)
        if n_rows:
            found.append((one, n_rows))
        room -= max(0, n_rows - kept_back)
    return found
