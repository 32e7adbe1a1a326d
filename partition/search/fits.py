"""The least value among options that fit into a budget: time of what has room in so much memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
COMPARED = 2_000_000  # numbers at a time, where solutions are compared one by one
_MAX_CELLS = 4_000_000  # of a table; where it would have more, options are compared one by one


class Fits:
    """Options with a value and needs of each kind.

    least[a, b, ...] = the smallest value of the options whose needs are, kind by kind, among the a, b, ... smallest
    """

    def __init__(self, values: Array, needs: Array, max_cells: int = _MAX_CELLS) -> None:
        """values: of labels, [N]. needs: resources that each takes, [kinds, N]. max_cells: of a table."""
        self._values, self._needs = values, needs
        self._edges = [np.unique(row) for row in needs]
        shape = [len(edge) + 1 for edge in self._edges]
        self._least: Array | None = None
        if not shape:  # nothing is needed
            self._least = np.array(values.min(initial=np.inf))
            return
        if math.prod(shape) <= max_cells:
            self._least = np.full(shape, np.inf)
            np.minimum.at(self._least, self._places(needs), values)
            for axis in range(len(shape)):
                np.minimum.accumulate(self._least, axis=axis, out=self._least)

    def least(self, budget: Array) -> Array:
        """Return the smallest value that fits into each budget [kinds, M]: [M]; inf where nothing does."""
        if self._least is not None:
            return np.broadcast_to(self._least[self._places(budget)], budget.shape[1:])
        least = np.full(budget.shape[1], np.inf)
        step = max(1, COMPARED // self._needs.size)
        for at in range(0, budget.shape[1], step):
            part = slice(at, at + step)
            has_room = (self._needs[:, :, None] <= budget[:, None, part]).all(axis=0)
            least[part] = np.where(has_room, self._values[:, None], np.inf).min(axis=0, initial=np.inf)
        return least

    def _places(self, budget: Array) -> tuple[NDArray[np.int64], ...]:
        return tuple(np.searchsorted(edge, row, side="right") for edge, row in zip(self._edges, budget, strict=True))
