"""Which devices became slow while a model ran on them, and what the next plan is to go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge.cluster.fleet import device
from edge.cluster.roster import mark_slow
from edge.llm.interface import TextEngine
from edge.parallel.engine import DistributedEngine
from edge.parallel.step_times import KEPT, Summary
from edge.survey.corrections import Corrections
from edge.survey.slowness import LEAST_STEPS, Change, Slowness
from edge.survey.survey import Survey
from partition.errors import PlanError
from partition.plan.plan import Plan
from partition.predict.cost import Work
from partition.predict.predict import compute_s
from partition.predict.speeds import DeviceSpeed


class SlowWatch:
    """Follows what ranks take, plan after plan. Steps of several requests take as long as there are many of them, so
    each number of rows is followed by itself."""

    def __init__(self, survey: Survey[DeviceSpeed] | None, work: Work | None) -> None:
        """survey, work: what plans are made from; None: they are given."""
        self.survey, self._work = survey, work  # the survey is corrected by what is seen
        self.windows = 0  # that were looked at
        self.found: list[str] = []  # a clause for each device that is clearly slower or faster than it was
        self._first: list[dict[str, Summary]] | None = None  # of each rank, at the first look at steps of one row
        self._engine: DistributedEngine | None = None
        self._slowness: dict[int, Slowness] = {}  # by rows of a step
        self._seen = 0  # decode steps

    def begin(self, engine: TextEngine, plan: Plan, names: Sequence[str]) -> None:
        """Another plan runs. names: of its devices by rank, for people."""
        self._engine = engine if isinstance(engine, DistributedEngine) else None
        self._plan, self._names, self._seen = plan, tuple(names), 0
        self._slowness.clear()
        self._first = None

    @property
    def is_due(self) -> bool:
        """Whether enough steps were made since the last look."""
        return self._engine is not None and self._engine.own_times.decoded - self._seen >= LEAST_STEPS

    def look(self, engine: TextEngine) -> None:
        """Ask the ranks for their times, and add to what is `found`. What plans are made from is corrected. Errors of
        links."""
        if engine is not self._engine or self._engine is None:
            return
        last = min(KEPT, self._engine.own_times.decoded - self._seen)
        rows, steps = self._engine.own_times.usual_rows(last)
        if steps < LEAST_STEPS:  # others follow
            return
        self._seen = self._engine.own_times.decoded
        times = self._engine.times(last=last, rows=rows)
        if rows == 1 and self._first is None:
            self._first = times
        found = [rank.get("decode") for rank in times]
        if not all(one is not None and one.steps >= LEAST_STEPS for one in found):
            return
        self.windows += 1
        took_s = [one.compute_ms.p10 / 1e3 for one in found if one is not None]
        slowness = self._slowness.setdefault(rows, Slowness(self._expected_s(rows)))
        changes = slowness.window(took_s)
        if changes:  # what other numbers of rows were expected to take holds no longer
            self._slowness = {rows: slowness}
        self.found += [self._corrected(change) for change in changes]

    def first_times(self) -> list[dict[str, Summary]]:
        """Times of each rank, with steps of one row, at the first look since the plan began; after that, nothing."""
        times, self._first = self._first or [], [] if self._first is not None else None
        return times

    def _expected_s(self, rows: int) -> list[float | None]:
        if self.survey is not None and self._work is not None:
            try:
                of = {device(speed.device): speed for speed in self.survey.speeds}
                return compute_s(self._plan, self._work, of, self.survey.links, rows)
            except (PlanError, KeyError):  # what runs is not what was measured
                pass
        return [None] * self._plan.world_size

    def _corrected(self, change: Change) -> str:
        address = device(self._plan.devices[change.rank])
        mark_slow(address, change.times)
        if self.survey is not None and self._plan.devices.count(self._plan.devices[change.rank]) == 1:
            speeds = []
            for speed in self.survey.speeds:
                if device(speed.device) == address:
                    Corrections().learn(speed, change.times)
                    speed = replace(speed.times(change.times), corrected=speed.corrected * change.times)
                speeds.append(speed)
            self.survey = replace(self.survey, speeds=tuple(speeds))
        became = f"{change.times:.1f} times as long as it did"
        if change.times < 1:
            became = f"{100 * (1 - change.times):.0f} % less than it did"
        return f"{self._names[change.rank]} computes {became}"
