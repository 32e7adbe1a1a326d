"""Batches of requests: rows are joined only after a test has shown that they do not affect each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from edge.errors import EdgeError
from edge.onnx.samples import TYPES, Array, Feeds, Input, Output

Run = Callable[[Feeds], Feeds]
# Largest difference between a row that is computed alone and in a batch, relative to the largest value.
_TOLERANCES = {"float16": 1e-2, "float32": 1e-3, "float64": 1e-6}
_PAYS = 0.9  # joined rows must take less than this share of the time of separate rows
_QUICK_S = 0.05  # a quicker run is timed three times
_MOST_TESTS = 3  # tests that fail with an error, after which rows count as dependent


class RowTest:
    """Result of a test of whether the first dimension counts independent rows. The test uses the first request that
    could be joined.

    A network with an open first dimension may still mix its rows, for example by a softmax over the first dimension.
    """

    def __init__(self, inputs: Sequence[Input], outputs: Sequence[Output]) -> None:
        self._possible = (
            bool(inputs)
            and all(bool(input_.shape) and isinstance(input_.shape[0], str) for input_ in inputs)
            and all(output.type in TYPES for output in outputs)
        )
        self._independent: bool | None = None if self._possible else False
        self._failed_tests = 0
        self.pays = False  # whether joined rows take less time than separate rows

    @property
    def is_possible(self) -> bool:
        """True unless the rows were found to depend on each other."""
        return self._independent is not False

    def independent(self, run: Run, feeds: Feeds) -> bool:
        """Return True if rows are independent. The first call tests this with the first row of `feeds`."""
        if self._independent is None:
            try:
                self._independent = self._test(run, feeds)
            except EdgeError:  # for example a reshape to one row, or an invalid request
                self._failed_tests += 1
                if self._failed_tests == _MOST_TESTS:
                    self._independent = False
        return bool(self._independent)

    def _test(self, run: Run, feeds: Feeds) -> bool:
        first = {name: np.ascontiguousarray(array[:1]) for name, array in feeds.items()}
        # The values of the first row in another order: another row with valid values.
        second = {name: np.ascontiguousarray(array.ravel()[::-1].reshape(array.shape)) for name, array in first.items()}
        both = {name: np.concatenate([first[name], second[name]]) for name in first}
        separate_s, outputs = _timed(run, first)
        others = run(second)
        joined_s, joined = _timed(run, both)
        self.pays = joined_s < _PAYS * 2 * separate_s
        rows = [{name: array[i : i + 1] for name, array in joined.items() if len(array.shape)} for i in range(2)]
        return all(
            _equal(alone, row) and all(len(array) == 2 for array in joined.values())
            for alone, row in zip((outputs, others), rows, strict=True)
        )


def joined(several: Sequence[Feeds]) -> Feeds:
    """Return the inputs of several requests one behind the other."""
    if len(several) == 1:
        return several[0]
    return {name: np.concatenate([feeds[name] for feeds in several]) for name in several[0]}


def divided(outputs: Feeds, rows: Sequence[int]) -> list[Feeds] | None:
    """Return the outputs of each request, or None if an output has another number of rows.

    rows: number of rows of each request.
    """
    if any(not array.ndim or len(array) != sum(rows) for array in outputs.values()):
        return None
    ends = np.cumsum(rows)
    return [{name: array[end - n : end] for name, array in outputs.items()} for n, end in zip(rows, ends, strict=True)]


def _timed(run: Run, feeds: Feeds) -> tuple[float, Feeds]:
    """Return the shortest time of a run, and its outputs."""
    times, outputs = [], {}
    for _ in range(3):
        start = time.perf_counter()
        outputs = run(feeds)
        times.append(time.perf_counter() - start)
        if times[-1] > _QUICK_S:
            break
    return min(times), outputs


def _equal(alone: Feeds, row: Feeds) -> bool:
    return alone.keys() == row.keys() and all(_close(alone[name], row[name]) for name in alone)


def _close(alone: Array, row: Array) -> bool:
    if alone.shape != row.shape:
        return False
    tolerance = _TOLERANCES.get(alone.dtype.name)
    if tolerance is None:
        return bool((alone == row).all())
    finite = np.isfinite(alone)
    if not np.array_equal(alone[~finite], row[~finite], equal_nan=True):
        return False
    largest = np.abs(alone[finite]).max(initial=0.0)
    return bool((np.abs(alone[finite] - row[finite]) <= tolerance * largest).all())
