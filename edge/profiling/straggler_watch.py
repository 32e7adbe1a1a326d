"""Straggler watch: notices devices that became slow while a model runs on them.

The next plan of the running model goes by the new speed. The remembered measurement of the device is forgotten, so that
the next survey measures the device again.
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
from partition.predict.hysteresis import CHANGED, LONE_CHANGED, clearly_better
from partition.predict.predict import compute_s
from partition.predict.speeds import DeviceSpeed

LEAST_STEPS = 16  # steps that a look needs to say anything about a rank
IN_A_ROW = 3  # windows


class StragglerWatch:
    """Follows the step times of ranks, plan after plan. Steps of several requests take longer, so each number of rows
    is followed by itself."""

    def __init__(self, survey: Survey[DeviceSpeed] | None, work: Work | None) -> None:
        """survey, work: measurements and work that plans are made from; None if a person gave the plan."""
        self.survey, self._work = survey, work  # speeds in the survey change with each finding
        self.windows = 0  # number of windows of steps so far
        self.notes: list[str] = []  # a clause for each device that is clearly slower or faster than it was
        self._engine: DistributedEngine | None = None
        self._detectors: dict[int, StragglerDetector] = {}  # by rows of a step
        self._seen = 0  # decode steps at the last look

    def begin(self, engine: TextEngine, plan: Plan, names: Sequence[str]) -> None:
        """Follow another plan. names: of its devices by rank, for people."""
        self._engine = engine if isinstance(engine, DistributedEngine) else None
        self._plan, self._names, self._seen = plan, tuple(names), 0
        self._detectors.clear()

    @property
    def is_due(self) -> bool:
        """Return whether there were enough steps since the last look."""
        return self._engine is not None and self._engine.own_times.decoded - self._seen >= LEAST_STEPS

    def look(self, engine: TextEngine) -> None:
        """Ask the ranks for their times. Add each finding to `notes` and to the survey. The errors of links."""
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
        detector = self._detectors.setdefault(rows, StragglerDetector(self._expected_s(rows)))
        changes = detector.window(took_s)
        if changes:  # expectations for other numbers of rows hold no longer
            self._detectors = {rows: detector}
        self.notes += [self._noted(change) for change in changes]

    def _expected_s(self, rows: int) -> list[float | None]:
        if self.survey is not None and self._work is not None:
            try:
                by_device = {device(speed.device): speed for speed in self.survey.speeds}
                return compute_s(self._plan, self._work, by_device, self.survey.links, rows)
            except (PlanError, KeyError):  # the running plan has devices that were not measured
                pass
        return [None] * self._plan.world_size

    def _noted(self, change: SpeedChange) -> str:
        """Note a finding in the survey, forget the measurement of its device, and return a clause for people."""
        address = device(self._plan.devices[change.rank])
        mark_slow(address, change.times)
        if self.survey is not None and self._plan.devices.count(self._plan.devices[change.rank]) == 1:
            speeds = []
            for speed in self.survey.speeds:
                if device(speed.device) == address:
                    Remembered(REMEMBERED).forget(speed.key)
                    speed = speed.times(change.times)
                speeds.append(speed)
            self.survey = replace(self.survey, speeds=tuple(speeds))
        became = f"{change.times:.1f} times as long as it did"
        if change.times < 1:
            became = f"{100 * (1 - change.times):.0f} % less than it did"
        return f"{self._names[change.rank]} computes {became}"


class SpeedChange(NamedTuple):
    """A change of a rank's step times."""

    rank: int
    times: float  # new time over expected time: above 1 slower, below 1 faster


class StragglerDetector:
    """Straggler detector for the ranks of one plan: devices that became slow, or fast again, by times of their steps.

        ratio(rank, window) = time of its steps / expected time of its steps

    A window is an answer or several. A rank is slow if its ratio is above CHANGED, and above CHANGED times that of the
    best rank, in IN_A_ROW windows one after the other. The only rank that computes, beside a thin owner, has none to be
    compared with, and is slow above LONE_CHANGED. So no single bad moment counts; nor does a cause that slows all
    devices, such as a long history, because no other plan would help. The time of a window is the 10th percentile of
    its steps, so that a burst within it does not count either.
    """

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

    def _is_clear(self, ratios: Sequence[float], threshold: float) -> bool:
        all_slow = clearly_better(1.0, min(ratios), by=threshold)
        all_fast = clearly_better(max(ratios), 1.0, by=threshold)
        return len(ratios) == IN_A_ROW and (all_slow or all_fast)

    def _changed(self, rank: int) -> SpeedChange:
        times = statistics.median(self._own[rank])
        self._expected_s[rank] = (self._expected_s[rank] or 0.0) * times
        self._ratios[rank].clear()
        return SpeedChange(rank, times)
