"""The best solutions that a search has found so far, and whether a partial one can still lead to a better."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partition.search.fits import COMPARED, Fits

Array = NDArray[np.float64]
_MAX_CELLS = 50_000  # of a table, which each new solution makes again


@dataclass(frozen=True)
class Solution:
    """Solution: groups by their index, in order, and the cuts from 0 to n."""

    groups: tuple[int, ...]
    cuts: tuple[int, ...]
    measures: tuple[float, ...]  # of the whole: sums, and the largest of those that peak
    objectives: tuple[float, ...]
    devices: int


def no_worse(costs: Array, others: Array) -> NDArray[np.bool_]:
    """Return where `costs` [K, ...] are at most `others` [K, ...] in each of the K rows: they dominate them there.

    The arrays are broadcast against each other.
    """
    dominates: NDArray[np.bool_] = np.all(costs <= others, axis=0)
    return dominates


class Best:
    """Non-dominated solutions. Of those with equal objectives the one with the fewest devices, then the first found."""

    def __init__(self) -> None:
        self.solutions: list[Solution] = []  # by the first objective
        self._known: _Known | None = None

    def add(self, new: list[Solution]) -> None:
        """Add solutions that `beats` does not dominate, nor one another, and drop those that they dominate."""
        if not new:
            return
        objectives = np.array([solution.objectives for solution in new]).T
        rest = [old for old in self.solutions if not no_worse(objectives, np.array(old.objectives)[:, None]).any()]
        self.solutions = sorted([*rest, *new], key=lambda solution: solution.objectives)
        self._known = None

    def beats(self, objectives: Array, devices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which solutions with at least these `objectives` [K, N] and `devices` [N] are dominated: [N]."""
        if not self.solutions:
            return np.zeros(len(devices), bool)
        self._known = self._known or _Known(self.solutions)
        return self._known.beats(objectives, devices)


class _Known:
    """The solutions that are known, to look up whether one of them is better."""

    def __init__(self, solutions: list[Solution]) -> None:
        self._objectives = np.array([solution.objectives for solution in solutions]).T  # [K, M]
        self._devices = np.array([solution.devices for solution in solutions])
        self._last = max(range(len(self._objectives)), key=lambda k: len(np.unique(self._objectives[k])))
        self._least = Fits(*self._split(self._objectives), max_cells=_MAX_CELLS)

    def _split(self, objectives: Array) -> tuple[Array, Array]:
        """Return the objective in which known solutions have the most different values, and the others."""
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
            # What is no worse, and in nothing better, is equal.
            better = (self._devices[:, None] <= devices[part]) | (self._objectives[:, :, None] < new).any(axis=0)
            beaten[part] = (no_more & better).any(axis=0)
        return beaten
