"""The best solutions that a search has found so far, and whether a partial one can still lead to a better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_MAX_CELLS = 1_000_000


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
        self.found: list[Solution] = []  # by the first objective
        self._stairs: _Stairs | None = None

    def add(self, new: Solution) -> None:
        """Takes a solution in, unless one that is here is as good, and drops those that it beats."""
        if any(_beats(old, new) for old in self.found):
            return
        rest = [old for old in self.found if not (new.objectives <= old.objectives).all()]
        self.found = sorted([*rest, new], key=lambda found: tuple(found.objectives))
        self._stairs = None

    def beats(self, objectives: Array, devices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which solutions, with at least these `objectives` [K, N] and `devices` [N], are not worth looking for: [N].

        With very many solutions and objectives some are not recognised.
        """
        if not self.found:
            return np.zeros(len(devices), bool)
        if self._stairs is None:
            self._stairs = _Stairs(self.found)
        return self._stairs.beats(objectives, devices)


class _Stairs:
    """The solutions that are known, in a table to look others up in.

    least[a, b, ...] = the smallest last objective of those whose other objectives are, one by one, among the a, b,
                       ... smallest that there are
    """

    def __init__(self, found: list[Solution]) -> None:
        step = 1
        while (len(found) // step + 1) ** (len(found[0].objectives) - 1) > _MAX_CELLS:
            step += 1
        known = np.array([one.objectives for one in found[::step]]).T
        self._edges = [np.unique(row) for row in _but_last(known)]
        shape = [len(edges) + 1 for edges in self._edges]
        places = self._places(known, "right")
        self._devices = np.zeros(shape, np.int64)  # those of the solution that is exactly here
        self._devices[places] = [one.devices for one in found[::step]]
        self._least = np.full(shape, np.inf)
        self._least[places] = known[-1]
        for axis in range(len(shape)):
            np.minimum.accumulate(self._least, axis=axis, out=self._least)

    def _places(self, objectives: Array, side: Literal["left", "right"]) -> tuple[NDArray[np.int64], ...]:
        pairs = zip(self._edges, _but_last(objectives), strict=True)
        return tuple(np.searchsorted(edges, row, side=side) for edges, row in pairs)

    def beats(self, objectives: Array, devices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """As `Best.beats`."""
        last = objectives[-1]
        no_more, less = self._places(objectives, "right"), self._places(objectives, "left")
        least = self._least[no_more]
        beaten: NDArray[np.bool_] = least < last
        for axis, place in enumerate(less):
            one_less = (*no_more[:axis], place, *no_more[axis + 1 :])
            beaten |= self._least[one_less] <= last
        # What is no worse, and in nothing better, is equal.
        beaten |= (least == last) & (self._devices[no_more] <= devices)
        return beaten


def _but_last(objectives: Array) -> Array:
    """All objectives but the last; one that says nothing where there are no others."""
    return objectives[:-1] if len(objectives) > 1 else np.zeros_like(objectives)


def _beats(old: Solution, new: Solution) -> bool:
    """Whether one solution is better than another, or as good with no more devices."""
    if not (old.objectives <= new.objectives).all():
        return False
    return old.devices <= new.devices or bool((old.objectives < new.objectives).any())
