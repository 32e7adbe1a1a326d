"""Devices that became slow, or fast again: on a battery, hot, or busy with something else. Told by what steps take.

    ratio(rank, window) = what its steps took / what they were expected to take

A window is an answer or several. A rank is slow where its ratio is above CHANGED, and above CHANGED times that of the
rank that does best, in IN_A_ROW windows, one after the other. So no single bad moment counts; nor does what all devices
suffer, such as a long history, as no other plan would help. What a window takes is what a tenth of its steps stays
below: a burst within it is not seen either.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from partition.predict.hysteresis import CHANGED, clearly_better

IN_A_ROW = 3  # windows
LEAST_STEPS = 16  # of a window


class Change(NamedTuple):
    """A rank takes other times than it did."""

    rank: int
    times: float  # as long as expected until now: above 1 slower, below 1 faster


class Slowness:
    """Detector of stragglers among the ranks of one plan."""

    def __init__(self, expected_s: Sequence[float | None]) -> None:
        """expected_s: by rank, what it computes of a decode step as predicted. None: as its first windows show."""
        self._expected_s = list(expected_s)
        self._first: list[list[float]] = [[] for _ in expected_s]
        self._ratios: list[deque[float]] = [deque(maxlen=IN_A_ROW) for _ in expected_s]  # against the others'
        self._own: list[deque[float]] = [deque(maxlen=IN_A_ROW) for _ in expected_s]

    def window(self, took_s: Sequence[float]) -> list[Change]:
        """Take in what each rank computed of a decode step, in seconds: which of them are clearly slower, or faster,
        than expected by now. They are expected to go on like that."""
        ratios = [self._ratio(rank, seconds) for rank, seconds in enumerate(took_s)]
        known = [ratio for ratio in ratios if ratio is not None]
        if not known:
            return []
        changes = []
        for rank, ratio in enumerate(ratios):
            if ratio is None:
                continue
            self._own[rank].append(ratio)
            slower, faster = min(ratio, ratio / min(known)), max(ratio, ratio / max(known))
            self._ratios[rank].append(slower if slower > 1 else min(1.0, faster))
            if self._is_clear(self._ratios[rank]):
                changes.append(self._changed(rank))
        return changes

    def _ratio(self, rank: int, seconds: float) -> float | None:
        """None until it is known what to expect."""
        expected_s = self._expected_s[rank]
        if seconds <= 0:
            return None
        if expected_s:
            return seconds / expected_s
        self._first[rank].append(seconds)
        if len(self._first[rank]) == IN_A_ROW:
            self._expected_s[rank] = statistics.median(self._first[rank])
        return None

    def _is_clear(self, ratios: Sequence[float]) -> bool:
        all_slow = clearly_better(1.0, min(ratios), by=CHANGED)
        all_fast = clearly_better(max(ratios), 1.0, by=CHANGED)
        return len(ratios) == IN_A_ROW and (all_slow or all_fast)

    def _changed(self, rank: int) -> Change:
        times = statistics.median(self._own[rank])
        self._expected_s[rank] = (self._expected_s[rank] or 0.0) * times
        self._ratios[rank].clear()
        return Change(rank, times)
