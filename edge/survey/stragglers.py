"""Straggler detection: devices that became slow, or fast again, on a battery, hot, or busy, by the times of their
steps.

    ratio(rank, window) = time of its steps / expected time of its steps

A window is an answer or several. A rank is slow if its ratio is above CHANGED, and above CHANGED times that of the best
rank, in IN_A_ROW windows one after the other. So no single bad moment counts; nor does a cause that slows all devices,
such as a long history, because no other plan would help. The time of a window is the 10th percentile of its steps, so
that a burst within it does not count either.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from partition.predict.hysteresis import CHANGED, clearly_better

IN_A_ROW = 3  # windows
LEAST_STEPS = 16  # of a window


class SpeedChange(NamedTuple):
    """A change of a rank's step times."""

    rank: int
    times: float  # new time over expected time: above 1 slower, below 1 faster


class StragglerDetector:
    """Straggler detector for the ranks of one plan."""

    def __init__(self, expected_s: Sequence[float | None]) -> None:
        """expected_s: predicted seconds that each rank computes in a decode step. None: learned from its first
        windows."""
        self._expected_s = list(expected_s)
        self._first: list[list[float]] = [[] for _ in expected_s]
        self._ratios: list[deque[float]] = [deque(maxlen=IN_A_ROW) for _ in expected_s]  # relative to the other ranks'
        self._own: list[deque[float]] = [deque(maxlen=IN_A_ROW) for _ in expected_s]

    def window(self, took_s: Sequence[float]) -> list[SpeedChange]:
        """Add the seconds that each rank computed in a decode step. Return the ranks that are clearly slower, or
        faster, than expected; from then on they are expected to stay so."""
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
        """Return the ratio; None until the expected time is known."""
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

    def _changed(self, rank: int) -> SpeedChange:
        times = statistics.median(self._own[rank])
        self._expected_s[rank] = (self._expected_s[rank] or 0.0) * times
        self._ratios[rank].clear()
        return SpeedChange(rank, times)
