"""Set of the best solutions found so far, and a test whether a partial solution can still improve it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partition.search.fits import COMPARED, Fits

Array = NDArray[np.float64]
_MAX_CELLS = 50_000  # table cells; each new solution rebuilds the table


@dataclass(frozen=True)
class Solution:
    """A complete solution: indices of the groups in order, and cuts from 0 to n."""

    groups: tuple[int, ...]
    cuts: tuple[int, ...]
    measures: tuple[float, ...]  # measures of the whole solution: sums and peaks
    objectives: tuple[float, ...]
    devices: int


def no_worse(costs: Array, others: Array) -> NDArray[np.bool_]:
    """Return where `costs` [K, ...] are at most `others` [K, ...] in all K rows, so that they dominate.

    The arrays are broadcast against each other.
    """
    dominates: NDArray[np.bool_] = np.all(costs <= others, axis=0)
    return dominates


class Best:
    """Set of non-dominated solutions. Of equal objectives, the solution with the fewest devices stays, then the
    first found.
    """

    def __init__(self) -> None:
        self.solutions: list[Solution] = []  # sorted by the first objective
        self._known: _Known | None = None

    def add(self, new: list[Solution]) -> None:
        """Add new solutions and drop those that they dominate. The new ones must not be dominated, also not by each
        other.
        """
        if not new:
            return
        objectives = np.array([solution.objectives for solution in new]).T
        rest = [old for old in self.solutions if not no_worse(objectives, np.array(old.objectives)[:, None]).any()]
        self.solutions = sorted([*rest, *new], key=lambda solution: solution.objectives)
        self._known = None

    def beats(self, objectives: Array, devices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which partial solutions are dominated: [N].

        objectives: lower bounds of their objectives, [K, N].
        devices: lower bounds of their numbers of devices, [N].
        """
        if not self.solutions:
            return np.zeros(len(devices), bool)
        self._known = self._known or _Known(self.solutions)
        return self._known.beats(objectives, devices)


class _Known:
    """Index of the known solutions, to look up whether one of them is better."""

    def __init__(self, solutions: list[Solution]) -> None:
        self._objectives = np.array([solution.objectives for solution in solutions]).T  # [K, M]
        self._devices = np.array([solution.devices for solution in solutions])
        self._last = max(range(len(self._objectives)), key=lambda k: len(np.unique(self._objectives[k])))
        self._least = Fits(*self._split(self._objectives), max_cells=_MAX_CELLS)

    def _split(self, objectives: Array) -> tuple[Array, Array]:
        """Split off the objective with the most different values. Return (that objective, the others)."""
        return objectives[self._last], np.delete(objectives, self._last, axis=0)

    def beats(self, objectives: Array, devices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the same as `Best.beats`."""
        last, others = self._split(objectives)
        least = self._least.least(others)
        beaten: NDArray[np.bool_] = least < last
        ties = np.flatnonzero(least == last)
        step = max(1, COMPARED // self._objectives.size)
        for at in range(0, len(ties), step):
            part = ties[at : at + step]
            new = objectives[:, None, part]
            no_more = no_worse(self._objectives[:, :, None], new)
            # A solution is equal if it is at most as large everywhere and nowhere smaller.
            better = (self._devices[:, None] <= devices[part]) | (self._objectives[:, :, None] < new).any(axis=0)
            beaten[part] = (no_more & better).any(axis=0)
        return beaten
