"""The best solutions that a search has found so far, and whether a partial one can still lead to a better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_MAX_CELLS = 50_000  # of a table; where it would have more, solutions are compared one by one
COMPARED = 2_000_000  # numbers at a time, then


@dataclass(frozen=True)
class Solution:
    """A solution: groups by their index in the tables, cuts from 0 to n, all measures and objectives."""

    groups: tuple[int, ...]
    cuts: tuple[int, ...]
    values: Array  # [measures]
    objectives: Array  # [K]
    devices: int


class Best:
    """Non-dominated solutions. Of those with equal objectives the one with the fewest devices, then the first found."""

    def __init__(self) -> None:
        self.solutions: list[Solution] = []  # by the first objective
        self._known: _Stairs | _Rows | None = None

    def add(self, new: list[Solution]) -> None:
        """Add solutions that `beats` does not dominate, nor one another, and drop those that they dominate."""
        if not new:
            return
        objectives = np.array([solution.objectives for solution in new])
        rest = [old for old in self.solutions if not (objectives <= old.objectives).all(axis=1).any()]
        self.solutions = sorted([*rest, *new], key=lambda solution: tuple(solution.objectives))
        self._known = None

    def beats(self, objectives: Array, devices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which solutions with at least these `objectives` [K, N] and `devices` [N] are dominated: [N]."""
        if not self.solutions:
            return np.zeros(len(devices), bool)
        if self._known is None:
            rows = np.array([solution.objectives for solution in self.solutions]).T
            different = sorted(len(np.unique(row)) for row in rows)
            cells = math.prod(count + 1 for count in different[:-1])
            self._known = (_Stairs if cells <= _MAX_CELLS else _Rows)(self.solutions)
        return self._known.beats(objectives, devices)


class _Stairs:
    """The solutions that are known, in a table to look others up in.

    least[a, b, ...] = the smallest value, in the objective with the most different values, of those whose other
                       objectives are, one by one, among the a, b, ... smallest that there are
    """

    def __init__(self, solutions: list[Solution]) -> None:
        objectives = np.array([solution.objectives for solution in solutions]).T
        edges = [np.unique(row) for row in objectives]
        self._last = max(range(len(edges)), key=lambda k: len(edges[k]))
        self._axes = [(k, values) for k, values in enumerate(edges) if k != self._last or len(edges) == 1]
        places = self._places(objectives, "right")
        shape = [len(values) + 1 for _, values in self._axes]
        self._devices = np.zeros(shape, np.int64)  # those of the solution that is exactly here
        self._devices[places] = [solution.devices for solution in solutions]
        self._least = np.full(shape, np.inf)
        self._least[places] = objectives[self._last]
        for axis in range(len(shape)):
            np.minimum.accumulate(self._least, axis=axis, out=self._least)

    def _places(self, objectives: Array, side: Literal["left", "right"]) -> tuple[NDArray[np.int64], ...]:
        return tuple(np.searchsorted(values, objectives[k], side=side) for k, values in self._axes)

    def beats(self, objectives: Array, devices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the same as `Best.beats`."""
        last, places = objectives[self._last], self._places(objectives, "right")
        least = self._least[places]
        beaten: NDArray[np.bool_] = least < last
        ties = np.flatnonzero(least == last)
        if len(ties):
            last, no_more = last[ties], tuple(place[ties] for place in places)
            less = self._places(objectives[:, ties], "left")
            # What is no worse, and in nothing better, is equal.
            better = self._devices[no_more] <= devices[ties]
            for axis, place in enumerate(less):
                one_less = (*no_more[:axis], place, *no_more[axis + 1 :])
                better |= self._least[one_less] <= last
            beaten[ties] = better
        return beaten


class _Rows:
    """The solutions that are known, to compare others with each of them: for many objectives, of which a table would
    be large."""

    def __init__(self, solutions: list[Solution]) -> None:
        self._objectives = np.array([solution.objectives for solution in solutions]).T  # [K, M]
        self._devices = np.array([solution.devices for solution in solutions])

    def beats(self, objectives: Array, devices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the same as `Best.beats`."""
        beaten = np.zeros(len(devices), bool)
        step = max(1, COMPARED // self._objectives.size)
        for at in range(0, len(devices), step):
            part = slice(at, at + step)
            new = objectives[:, None, part]
            no_more = (self._objectives[:, :, None] <= new).all(axis=0)
            better = (self._devices[:, None] <= devices[part]) | (self._objectives[:, :, None] < new).any(axis=0)
            beaten[part] = (no_more & better).any(axis=0)
        return beaten
