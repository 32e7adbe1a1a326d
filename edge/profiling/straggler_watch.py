"""Straggler watch: detect devices that became slow while a model runs on them, and correct estimates by their steps.

A device whose speed was only estimated is no straggler if the estimate was wrong.

The next plan of the running model uses the new speed. The cached measurement of the device is discarded, so that the
next survey measures the device again.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from devices.remembered import Remembered
from edge.cluster.fleet import device
from edge.cluster.roster import mark_slow
from edge.llm.interface import TextEngine
from edge.parallel.engine import DistributedEngine
from edge.parallel.step_times import KEPT
from edge.profiling.llm_survey import REMEMBERED
from edge.profiling.survey import Survey
from partition.errors import PlanError
from partition.plan.plan import Plan
from partition.predict.cost import Work
from partition.predict.hysteresis import CHANGED, LONE_CHANGED, NEW_PLAN, clearly_better, clearly_off
from partition.predict.predict import compute_s
from partition.predict.speeds import DeviceSpeed

LEAST_STEPS = 16  # minimum number of steps for judging a rank
IN_A_ROW = 3  # number of consecutive windows
MOST_OFF = 100.0  # largest correction of an estimate by one window; more would be a mistake


class StragglerWatch:
    """Monitor of the step times of ranks, across plans.

    Step times depend on the number of rows, so each number of rows has its own detector.
    """

    def __init__(self, survey: Survey[DeviceSpeed] | None, work: Work | None) -> None:
        """Create a monitor. survey, work: measurements and workload behind plans; None: the user gave the plan."""
        self.survey, self._work = survey, work  # `survey` is updated with each detected change
        self.windows = 0  # number of windows of steps so far
        self.corrected = False  # True if steps corrected an estimate; the owner of the watch sets it to False again
        self.notes: list[str] = []  # a clause for each device that is clearly slower or faster than before
        self._engine: DistributedEngine | None = None
        self._detectors: dict[int, StragglerDetector] = {}  # detectors by the number of rows in a step
        self._seen = 0  # decode steps at the last look

    def begin(self, engine: TextEngine, plan: Plan, names: Sequence[str]) -> None:
        """Follow another plan. names: display names of its devices by rank."""
        self._engine = engine if isinstance(engine, DistributedEngine) else None
        self._plan, self._names, self._seen = plan, tuple(names), 0
        self._detectors.clear()

    @property
    def is_due(self) -> bool:
        """Return whether enough steps have passed since the last look."""
        return self._engine is not None and self._engine.own_times.decoded - self._seen >= LEAST_STEPS

    def look(self, engine: TextEngine) -> None:
        """Request the ranks' step times, and add each detected change to `notes` and to the survey.

        Raises the errors of links.
        """
        if engine is not self._engine or self._engine is None:
            return
        last = min(KEPT, self._engine.own_times.decoded - self._seen)
        rows, steps = self._engine.own_times.usual_rows(last)
        if steps < LEAST_STEPS:  # the next look has more
            return
        self._seen = self._engine.own_times.decoded
        times = self._engine.times(last=last, rows=rows)
        decode = [rank.get("decode") for rank in times]
        if not all(summary is not None and summary.steps >= LEAST_STEPS for summary in decode):
            return
        self.windows += 1
        took_s = [summary.compute_ms.p10 / 1e3 for summary in decode if summary is not None]
        self._correct_estimates(took_s, rows)
        detector = self._detectors.setdefault(rows, StragglerDetector(self._expected_s(rows)))
        changes = detector.window(took_s)
        if changes:  # expectations for other numbers of rows are obsolete
            self._detectors = {rows: detector}
        self.notes += [self._noted(change) for change in changes]

    def _expected_s(self, rows: int) -> list[float | None]:
        """Return the compute seconds of each rank by the measurements, or None for a rank without a measurement."""
        estimates = self._estimates()
        predicted = self._predicted_s(rows)
        pairs = zip(self._plan.devices, predicted, strict=True)
        return [None if device(address) in estimates else seconds for address, seconds in pairs]

    def _predicted_s(self, rows: int) -> list[float | None]:
        if self.survey is not None and self._work is not None:
            try:
                by_device = {device(speed.device): speed for speed in self.survey.speeds}
                return compute_s(self._plan, self._work, by_device, self.survey.links, rows)
            except (PlanError, KeyError):  # the running plan has unmeasured devices
                pass
        return [None] * self._plan.world_size

    def _estimates(self) -> set[str]:
        """Return the devices whose speeds were only estimated."""
        return {device(speed.device) for speed in self.survey.speeds if speed.estimate} if self.survey else set()

    def _correct_estimates(self, took_s: Sequence[float], rows: int) -> None:
        """Multiply the estimates of devices by actual over predicted seconds of their steps."""
        estimates, predicted = self._estimates(), self._predicted_s(rows)
        factors: dict[str, float] = {}
        for address, seconds, expected_s in zip(self._plan.devices, took_s, predicted, strict=True):
            is_alone = self._plan.devices.count(address) == 1
            if device(address) not in estimates or not is_alone or seconds <= 0 or not expected_s:
                continue
            if clearly_off(seconds, expected_s, by=NEW_PLAN):
                factors[device(address)] = min(MOST_OFF, max(1 / MOST_OFF, seconds / expected_s))
        if factors and self.survey is not None:
            speeds = tuple(speed.times(factors.get(device(speed.device), 1.0)) for speed in self.survey.speeds)
            self.survey, self.corrected = replace(self.survey, speeds=speeds), True

    def _noted(self, change: SpeedChange) -> str:
        """Record a change in the survey, discard the device's cached measurement, and return a clause for display."""
        address = device(self._plan.devices[change.rank])
        mark_slow(address, change.times)
        if self.survey is not None and self._plan.devices.count(self._plan.devices[change.rank]) == 1:
            speeds = []
            for speed in self.survey.speeds:
                if device(speed.device) == address:
                    Remembered(REMEMBERED).forget(speed.key)
                    # Steps have already corrected an estimate.
                    speed = speed if speed.estimate else speed.times(change.times)
                speeds.append(speed)
            self.survey = replace(self.survey, speeds=tuple(speeds))
        became = f"{change.times:.1f} times as long as it did"
        if change.times < 1:
            became = f"{100 * (1 - change.times):.0f} % less than it did"
        return f"{self._names[change.rank]} computes {became}"


class SpeedChange(NamedTuple):
    """Change of a rank's step times."""

    rank: int
    times: float  # new time over expected time: above 1 slower, below 1 faster


class StragglerDetector:
    """Straggler detector for the ranks of one plan. It detects devices that became slow, or fast again.

        ratio(rank, window) = time of its steps / expected time of its steps

    A window is one answer or several. A rank is slow if its ratio exceeds CHANGED, and CHANGED times the ratio of the
    best rank, in IN_A_ROW consecutive windows. If only one rank computes, because the owner is thin, there is no rank
    to compare with. That rank is slow if its ratio exceeds LONE_CHANGED.

    A single slow moment therefore does not count. A cause that slows all devices, such as a long history, does not
    count either, because no other plan would help. The time of a window is the 10th percentile of its steps, so a burst
    within the window does not count either.
    """

    def __init__(self, expected_s: Sequence[float | None]) -> None:
        """Create a detector.

        expected_s: predicted compute seconds of each rank in a decode step; None: learned from its first windows.
        """
        self._expected_s = list(expected_s)
        self._first: list[list[float]] = [[] for _ in expected_s]
        # Each list has the latest ratios of a rank, `_ratios` relative to the best rank.
        self._ratios: list[deque[float]] = [deque(maxlen=IN_A_ROW) for _ in expected_s]
        self._own: list[deque[float]] = [deque(maxlen=IN_A_ROW) for _ in expected_s]

    def window(self, took_s: Sequence[float]) -> list[SpeedChange]:
        """Add a window: compute seconds of each rank in a decode step.

        Return the ranks that are clearly slower or faster than expected. Their new speed is then the expected one.
        """
        ratios = [self._ratio(rank, seconds) for rank, seconds in enumerate(took_s)]
        known = [ratio for ratio in ratios if ratio is not None]
        if not known:
            return []
        is_lone = sum(seconds > 0 for seconds in took_s) == 1
        changes = []
        for rank, ratio in enumerate(ratios):
            if ratio is None:
                continue
            self._own[rank].append(ratio)
            slower, faster = min(ratio, ratio / min(known)), max(ratio, ratio / max(known))
            if is_lone:
                slower = faster = ratio
            self._ratios[rank].append(slower if slower > 1 else min(1.0, faster))
            if self._is_clear(self._ratios[rank], LONE_CHANGED if is_lone else CHANGED):
                changes.append(self._changed(rank))
        return changes

    def _ratio(self, rank: int, seconds: float) -> float | None:
        """Return the ratio, or None until the expected time is known."""
        expected_s = self._expected_s[rank]
        if seconds <= 0:
            return None
        if expected_s:
            return seconds / expected_s
        self._first[rank].append(seconds)
        if len(self._first[rank]) == IN_A_ROW:
            self._expected_s[rank] = statistics.median(self._first[rank])
        return None

    def _is_clear(self, ratios: Sequence[float], threshold: float) -> bool:
        all_slow = clearly_better(1.0, min(ratios), by=threshold)
        all_fast = clearly_better(max(ratios), 1.0, by=threshold)
        return len(ratios) == IN_A_ROW and (all_slow or all_fast)

    def _changed(self, rank: int) -> SpeedChange:
        times = statistics.median(self._own[rank])
        self._expected_s[rank] = (self._expected_s[rank] or 0.0) * times
        self._ratios[rank].clear()
        return SpeedChange(rank, times)
