"""The best plans of a language model: exact, over all orders of all devices, groups that share layers, and cuts.

`partition.search.search` finds them; here is what stages cost it, by the formulas of `partition.predict.cost`, and what
comes of the placements it finds. Device 0 is the owner: it has the tokens, so it is in the first stage, or alone in one
without layers before it (a thin owner).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

from partition.errors import PlanError
from partition.plan.plan import LOCAL, NOTHING, Plan, Range, Stage, clean_name
from partition.plan.tensor import shards
from partition.predict import cost
from partition.predict.cost import Work
from partition.predict.hosts import crowded
from partition.predict.measures import Measures
from partition.predict.objectives import limited_by
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import DeviceSpeed, Links
from partition.search.best import Solution
from partition.search.problem import Problem, check_watts, one_stage, with_peaks
from partition.search.search import Front, front
from partition.search.stage_group import StageGroup
from quant.front import non_dominated

Array = NDArray[np.float64]
MOST_EXACT = 8  # devices of which all groups are tried; of more, pairs and those that are linked best
_MOST_GROUPS = 96  # then
_GROUP_OF = 4  # devices at most, then
_FEW = 4  # devices, for which any search is quick
BEAM = 250  # partial solutions at each place, where devices are too many for an exact search
_WIDE_BEAM = 1000  # where they are not, but memory is one objective of three


@dataclass(frozen=True)
class Placed:
    """A plan that was found, and how it is to run."""

    plan: Plan
    microbatches: int
    objectives: tuple[float, ...]  # as asked for, each to be small: seconds, seconds a token, bytes, joules


def with_microbatches(plan: Plan, microbatches: int, concurrency: int) -> Plan:
    """Return the plan with its number of microbatches. A plan of one stage has none, nor one whose number the scheduler
    chooses anyway for `concurrency` requests."""
    n_stages = len(plan.computing)
    is_usual = n_stages == 1 or microbatches == cost.groups(concurrency, n_stages)
    return replace(plan, microbatches=None if is_usual else microbatches)


class Planner:
    """Finds plans for one model, with one type of weights, on some devices."""

    def __init__(
        self,
        work: Work,
        speeds: Sequence[DeviceSpeed],
        links: Links,
        model: str,
        digest: str,
        *,
        tensor: bool = True,
        pipeline: bool = True,
        thin: bool = True,
    ) -> None:
        """speeds: the owner's device first. tensor, pipeline: whether layers may be shared, and put one after another.
        thin: whether the owner may be without layers. PlanError without devices."""
        if not speeds or speeds[0].device != LOCAL:
            raise PlanError("the first device is to be the owner's own")
        self.work, self.speeds, self.links = work, tuple(speeds), links
        self._model, self._digest, self._tensor, self._pipeline = clean_name(model), digest, tensor, pipeline
        self._thin = thin
        self._for_prompts = False  # as of `StageGroup`
        self._hops: dict[tuple[Hashable, int, int], Array] = {}  # by measures and groups
        self._smaller: dict[tuple[tuple[int, ...], tuple[int | None, ...]], StageGroup] = {}  # by members and memory
        self._groups = [StageGroup(work, self.speeds, links, members) for members in self._members(tensor)]

    def front(
        self,
        objectives: Sequence[str],
        microbatches: Sequence[int] | None = None,
        caps: Sequence[float] | None = None,
    ) -> tuple[list[Placed], bool]:
        """The non-dominated plans, sorted by the first objective, and whether the search was exhaustive.

        microbatches: how many may be in flight where several stages compute, as `cost.groups` makes them; None: 1, 2, 4
        ... up to the number of requests. caps: what these objectives may be at most.
        """
        plans: list[Placed] = []
        exact = True
        counts = self.microbatches if microbatches is None else microbatches
        in_groups = {cost.groups(self.work.concurrency, n) for n in counts}
        for n_groups in sorted({1, *in_groups}):
            result = self._search(objectives, n_groups, caps, several_stages=n_groups in in_groups)
            exact &= result.exact
            plans += [Placed(self.plan(solution), n_groups, solution.objectives) for solution in result.solutions]
        return non_dominated(plans, lambda placed: placed.objectives), exact

    def best(self, objective: str, caps: Mapping[str, float]) -> Placed | None:
        """Return the plan that is predicted to be the best by an objective; None if nothing fits, or is within caps on
        objectives."""
        names, most = limited_by(objective, caps)
        return next(iter(self.front(names, caps=most)[0]), None)

    @property
    def by_device(self) -> dict[str, DeviceSpeed]:
        """The speeds, by device."""
        return {speed.device: speed for speed in self.speeds}

    def predict(self, plan: Plan, microbatches: int | None = None) -> Prediction:
        """Predict the cost of a plan on these devices, as `partition.predict.predict`."""
        return predict(plan, self.work, self.by_device, self.links, microbatches)

    def like(self, speeds: Sequence[DeviceSpeed], links: Links) -> Planner:
        """Return a planner for the same model and work with other devices or links."""
        kinds = {"tensor": self._tensor, "pipeline": self._pipeline, "thin": self._thin}
        return Planner(self.work, speeds, links, self._model, self._digest, **kinds)

    def for_prompts(self) -> Planner:
        """Return the same planner for placements that compute prompts alone: ranks share layers by how fast they are
        in steps of a prompt's rows, and never by memory."""
        other = copy(self)
        other._smaller, other._for_prompts = {}, True
        other._groups = [
            StageGroup(self.work, self.speeds, self.links, group.members, for_prompts=True)
            if len(group.members) > 1
            else group
            for group in self._groups
        ]
        return other

    def with_memory(self, n_bytes: Mapping[int, int]) -> Planner:
        """Return the same planner where these devices, by number, have so many bytes for a model, and do not page.

        What no memory changes is shared: groups of other devices, what their stages cost, hops.
        """
        other = copy(self)
        other.speeds = tuple(
            replace(speed, memory_bytes=n_bytes[i], disk_bytes_per_s=None) if i in n_bytes else speed
            for i, speed in enumerate(self.speeds)
        )
        other._groups = []
        for group in self._groups:
            key = group.members, tuple(n_bytes.get(i) for i in group.members)
            if n_bytes.keys().isdisjoint(group.members):
                self._smaller[key] = group
            elif key not in self._smaller:
                self._smaller[key] = StageGroup(
                    self.work, other.speeds, self.links, group.members, for_prompts=self._for_prompts
                )
            other._groups.append(self._smaller[key])
        return other

    def whole_bytes(self) -> list[int]:
        """Return the most bytes that any plan for which no memory is short needs on each device."""
        most = [0] * len(self.speeds)
        for group in self._groups:
            for i, need in zip(group.members, group.whole_bytes(), strict=True):
                most[i] = max(most[i], ceil(need))
        return most

    def only_own(self) -> Planner:
        """The same, with the owner's device alone."""
        return self.like(self.speeds[:1], self.links)

    def shares(self) -> list[float]:
        """Part of every layer that each device computes, by measured speed, if all devices share every layer."""
        return StageGroup(self.work, self.speeds, self.links, tuple(range(len(self.speeds)))).parts

    @property
    def microbatches(self) -> list[int]:
        """1, 2, 4 ... and as many as there are requests, where so many groups of one size make up all of them."""
        most = self.work.concurrency
        return sorted({cost.groups(most, n) for n in (*(1 << i for i in range(most.bit_length())), most)})

    def problem(self, objectives: Sequence[str], microbatches: int) -> Problem:
        """The search's problem.

        Its measures: sums of seconds alone, of a pass, of a prompt, of joules, and of seconds that a crowded host is
        busy; peaks of seconds busy, of a prompt's, and of bytes; those that objectives need.
        """
        hosts = crowded(speed.host for speed in self.speeds) if self._pipeline else []
        stages = self._pipeline and len(self.speeds) > 1
        measures = Measures(self.work, tuple(objectives), microbatches, hosts, stages=stages)
        check_watts(objectives, self.speeds)
        may_be_thin = self._thin and (self._for_prompts or self.work.drafts_thin)
        thin = cache(self._groups[0].thin_costs) if may_be_thin else None
        groups = [group.costs(measures, LOCAL, thin) for group in self._groups]
        n = self.work.limits.sizes.layers
        return Problem(n, len(measures.sums), tuple(groups), lambda a, b: self._hop(measures, a, b), measures)

    def half_problem(self, objectives: Sequence[str], microbatches: int, devices: Sequence[int]) -> Problem:
        """The problem of one of two placements, with more objectives: the way of the prompt's keys and values to the
        owner, or from it, and the bytes on each of these devices, by number."""
        peaks = [
            np.stack([group.moved_s(LOCAL, to_owner=self._for_prompts), *map(group.bytes_of, devices)])
            for group in self._groups
        ]
        thin_owner = np.array([0.0, *(0.0 if i else self.speeds[0].runtime_bytes for i in devices)])
        enter = [thin_owner * (0 not in group.members) for group in self._groups]
        return with_peaks(self.problem(objectives, microbatches), peaks, enter)

    def bytes_held(self, solution: Solution) -> list[float]:
        """Return the bytes that a solution's placement holds on each device."""
        n_bytes = [0.0] * len(self.speeds)
        if 0 not in self._groups[solution.groups[0]].members:
            n_bytes[0] = self.speeds[0].runtime_bytes
        for index, cut in zip(solution.groups, pairwise(solution.cuts), strict=True):
            for i in self._groups[index].members:
                n_bytes[i] = float(self._groups[index].bytes_of(i)[cut])
        return n_bytes

    def plan(self, solution: Solution) -> Plan:
        """The plan of a solution."""
        stages = []
        if 0 not in self._groups[solution.groups[0]].members:
            [own] = shards(self.work.limits, (LOCAL,), (1.0,), last=False)
            stages.append(Stage(NOTHING, (replace(own, threads=self.speeds[0].threads),)))
        for group, (start, stop) in zip(solution.groups, pairwise(solution.cuts), strict=True):
            stages.append(Stage(Range(start, stop), self._groups[group].shards(start, stop)))
        return Plan(self._model, self._digest, self.work.limits.sizes, tuple(stages))

    def _search(
        self,
        objectives: Sequence[str],
        microbatches: int,
        caps: Sequence[float] | None,
        *,
        several_stages: bool,
    ) -> Front:
        """several_stages: whether several may compute; without, none of them outdoes those where one does."""
        problem = self.problem(objectives, microbatches)
        if not several_stages:
            problem = one_stage(problem)
        beam = self.beam(len(objectives) > 2 and "memory" in objectives)
        most = None if caps is None else np.array(caps, float)
        return front(replace(problem, caps=most), beam=beam)

    def beam(self, of_memory: bool) -> int | None:
        """Return how many partial solutions a search keeps at each place; None: all. of_memory: whether it compares
        memory beside two other objectives."""
        if len(self.speeds) > MOST_EXACT:
            return BEAM
        return _WIDE_BEAM if of_memory and len(self.speeds) > _FEW else None

    def _members(self, tensor: bool) -> list[tuple[int, ...]]:
        n = len(self.speeds)
        singles = [(i,) for i in range(n)]
        limits = self.work.limits
        most = limits.most_ranks if tensor else 1
        if n <= MOST_EXACT:
            several = [group for size in range(2, min(n, most) + 1) for group in combinations(range(n), size)]
        else:
            several = self._near(min(_GROUP_OF, most))
        if not self._pipeline:
            return [group for group in (*singles, *several) if 0 in group]  # one stage, of which the owner is part
        return [*singles, *several]

    def _near(self, most: int) -> list[tuple[int, ...]]:
        """Groups of devices that sum the fastest, where there are too many to try them all."""
        candidates: list[tuple[float, tuple[int, ...]]] = []
        grown: list[tuple[int, ...]] = [(i,) for i in range(len(self.speeds))]
        for _ in range(most - 1):
            grown = sorted({tuple(sorted((*g, i))) for g in grown for i in range(len(self.speeds)) if i not in g})
            timed = [(self._sum_s(group), group) for group in grown]
            timed.sort()
            grown = [group for _, group in timed[:_MOST_GROUPS]]
            candidates += timed[: _MOST_GROUPS // (most - 1)]
        return [group for _, group in candidates]

    def _sum_s(self, group: tuple[int, ...]) -> float:
        way = self.links.slowest([self.speeds[i].device for i in group])
        return self.work.sum_s(1, len(group), way.latency_s, way.bytes_per_s)

    def _hop(self, measures: Measures, a: int, b: int) -> Array:
        key = measures.key, a, b
        if key not in self._hops:
            self._hops[key] = self._hop_costs(measures, a, b)
        return self._hops[key]

    def _hop_costs(self, measures: Measures, a: int, b: int) -> Array:
        n = self.work.limits.sizes.layers
        if 0 in self._groups[b].members:  # the owner is in the first stage
            return np.full((len(measures.names), n + 1), np.inf)
        before, after = self._groups[a].devices, self._groups[b].devices

        def hop(rows: float) -> tuple[float, float]:
            return cost.hop_s(self.work, before, after, self.links, rows)

        return np.repeat(measures.for_hop(hop)[:, None], n + 1, axis=1)
