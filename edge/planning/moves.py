"""Values of a link's bandwidth or delay at which the best plan changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from partition.predict.pareto import Point

MOST_PLANS = 24  # largest number of searches for a plan in one scan
_NEAR = 1.005  # a change is located if the values on both sides differ by less than this factor
_EQUAL = 1 + 1e-6  # costs within this factor are equal
_STEPS = 24  # bisection steps for the value at which two plans cost the same


@dataclass(frozen=True)
class Move:
    """A value at which the best plan changes."""

    at: float
    below: Point  # best plan below the value
    above: Point  # best plan above the value


class MoveScan:
    """Finds the moves in a range of values.

    Two plans cross at the value at which they cost the same. Predictions are enough to find it. If the search has no
    better plan there, the best plan moves at this value. Otherwise the better plan divides the range into two.
    """

    def __init__(self, best: Callable[[float], Point], cost: Callable[[Point, float], float]) -> None:
        """best: returns the best plan at a value. cost: returns the cost of a plan at a value."""
        self._best, self._cost = best, cost
        self._left = MOST_PLANS
        self.complete = True  # False if some moves may be missing, because the searches ran out
        self.moves: list[Move] = []  # ascending

    def search(self, low: float, high: float) -> None:
        """Add the moves between two positive values. A move that is followed by its reverse may be missed."""
        ends = self._planned(low), self._planned(high)
        if ends[0] is not None and ends[1] is not None:
            self._divide(low, ends[0], high, ends[1])

    def _planned(self, value: float) -> Point | None:
        """Return the best plan at a value, or None if the searches ran out."""
        if not self._left:
            self.complete = False
            return None
        self._left -= 1
        return self._best(value)

    def _divide(self, low: float, below: Point, high: float, above: Point) -> None:
        if below.label == above.label or self._equal(below, above, low) or self._equal(above, below, high):
            return
        if high < low * _NEAR:
            self.moves.append(Move(math.sqrt(low * high), below, above))
            return
        at = self._crossing(low, below, high, above)
        middle = self._planned(at)
        if middle is None:
            return
        if self._cost(middle, at) * _EQUAL >= min(self._cost(below, at), self._cost(above, at)):
            self.moves.append(Move(at, below, above))
            return
        self._divide(low, below, at, middle)
        self._divide(at, middle, high, above)

    def _equal(self, best: Point, other: Point, value: float) -> bool:
        return self._cost(other, value) <= self._cost(best, value) * _EQUAL

    def _crossing(self, low: float, below: Point, high: float, above: Point) -> float:
        """Return a value at which both plans cost the same. `below` is better at `low`, `above` is better at `high`."""
        for _ in range(_STEPS):
            middle = math.sqrt(low * high)
            if self._cost(below, middle) <= self._cost(above, middle):
                low = middle
            else:
                high = middle
        return math.sqrt(low * high)
