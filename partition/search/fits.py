"""Lookup of the least value among options that fit into a budget, for example time within memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
COMPARED = 2_000_000  # numbers in memory at a time in pairwise comparisons
_MAX_CELLS = 4_000_000  # limit on table cells; above it, options are compared one by one


class Fits:
    """Options, each with a value and with needs of several kinds.

    least[a, b, ...] = the smallest value of options whose needs are among the a smallest of the first kind, the b
    smallest of the second kind, and so on
    """

    def __init__(self, values: Array, needs: Array, max_cells: int = _MAX_CELLS) -> None:
        """values: value of each option, [N].
        needs: needs of each option, [kinds, N].
        max_cells: largest table size.
        """
        self._values, self._needs = values, needs
        self._edges = [np.unique(row) for row in needs]
        shape = [len(edge) + 1 for edge in self._edges]
        self._least: Array | None = None
        if not shape:  # options without needs
            self._least = np.array(values.min(initial=np.inf))
            return
        if math.prod(shape) <= max_cells:
            self._least = np.full(shape, np.inf)
            np.minimum.at(self._least, self._places(needs), values)
            for axis in range(len(shape)):
                np.minimum.accumulate(self._least, axis=axis, out=self._least)

    def least(self, budget: Array) -> Array:
        """Return the smallest value that fits into each budget: [M], inf if none does. budget: [kinds, M]."""
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
