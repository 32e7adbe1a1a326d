"""Planner of language models: exact search over devices, their order, groups that share layers, and cuts.

`partition.search.search` runs the search. This module computes the costs of stages by the formulas of
`partition.predict.cost`, and converts solutions to plans. Device 0 is the owner. It holds the tokens, so it is part of
the first stage, or forms a stage without layers before it (a thin owner).
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
from partition.predict.speeds import DeviceSpeed, Links, next_to_another
from partition.search.best import Solution
from partition.search.problem import Outdone, Problem, check_watts, one_stage, with_peaks
from partition.search.search import Front, front
from partition.search.stage_group import StageGroup
from quant.front import non_dominated

Array = NDArray[np.float64]
MOST_EXACT = 8  # devices; all groups are tried up to this number, then only groups with the fastest links
_MOST_GROUPS = 96  # groups of each size with more than MOST_EXACT devices
_GROUP_OF = 4  # largest group with more than MOST_EXACT devices
_FEW = 4  # devices; any search is fast up to this number
BEAM = 250  # beam width with more than MOST_EXACT devices
_WIDE_BEAM = 1000  # beam width with fewer devices, if memory is one of three objectives


@dataclass(frozen=True)
class Placed:
    """A plan with its number of microbatches and its objectives."""

    plan: Plan
    microbatches: int
    # In the requested order, smaller is better: seconds, seconds per token, bytes, joules.
    objectives: tuple[float, ...]


def with_microbatches(plan: Plan, microbatches: int, concurrency: int) -> Plan:
    """Return the plan with its number of microbatches.

    The number is left out for a plan with one stage, and if the scheduler would choose it anyway for `concurrency`
    requests.
    """
    n_stages = len(plan.computing)
    is_usual = n_stages == 1 or microbatches == cost.groups(concurrency, n_stages)
    return replace(plan, microbatches=None if is_usual else microbatches)


class Planner:
    """Planner for one model with one quantization type, on given devices."""

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
        """speeds: speeds of the devices, the owner's device first.
        model, digest: name and digest of the model for its plans.
        tensor: True if devices may share layers.
        pipeline: True if there may be several stages.
        thin: True if the owner may have no layers.

        Raises PlanError without the owner's device.
        """
        if not speeds or speeds[0].device != LOCAL:
            raise PlanError("the first device must be the owner's own")
        self.work, self.speeds, self.links = work, tuple(speeds), links
        self._model, self._digest, self.tensor, self.pipeline = clean_name(model), digest, tensor, pipeline
        self.thin = thin
        self._for_prompts = False  # passed on to each `StageGroup`
        self._hops: dict[tuple[Hashable, tuple[int, ...], tuple[int, ...]], Array] = {}  # cache by measures and groups
        # Cache by members, memory, and whether they page.
        self._smaller: dict[tuple[tuple[int, ...], tuple[int | None, ...], bool], StageGroup] = {}
        self.groups = [StageGroup(work, self.speeds, links, members) for members in self._members(tensor)]
        self._owner = self.groups[0]

    def front(
        self,
        objectives: Sequence[str],
        microbatches: Sequence[int] | None = None,
        caps: Sequence[float] | None = None,
        *,
        outdone: Outdone | None = None,
        single: bool = True,
    ) -> tuple[list[Placed], bool]:
        """Return the non-dominated plans, sorted by the first objective, and True if the search was exact.

        microbatches: numbers of microbatches in flight to try, as `cost.groups` makes them; None: 1, 2, 4 ... up to the
            number of requests.
        caps: largest allowed cost of each objective.
        outdone: marks unwanted objectives.
        single: True if plans with one computing stage are wanted whatever the microbatches are.
        """
        plans: list[Placed] = []
        exact = True
        counts = self.microbatches if microbatches is None else microbatches
        in_groups = {cost.groups(self.work.concurrency, n) for n in counts}
        for n_groups in sorted({1, *in_groups} if single else in_groups):
            result = self._search(objectives, n_groups, caps, outdone, several_stages=n_groups in in_groups)
            exact &= result.exact
            plans += [Placed(self.plan(solution), n_groups, solution.objectives) for solution in result.solutions]
        return non_dominated(plans, lambda placed: placed.objectives), exact

    def best(self, objective: str, caps: Mapping[str, float]) -> Placed | None:
        """Return the best plan by an objective, or None if no plan fits. caps: largest allowed costs of objectives."""
        names, most = limited_by(objective, caps)
        return next(iter(self.front(names, caps=most)[0]), None)

    @property
    def by_device(self) -> dict[str, DeviceSpeed]:
        """Speeds by device."""
        return {speed.device: speed for speed in self.speeds}

    def predict(self, plan: Plan, microbatches: int | None = None) -> Prediction:
        """Predict the cost of a plan on these devices, as `partition.predict.predict`."""
        return predict(plan, self.work, self.by_device, self.links, microbatches)

    def like(self, speeds: Sequence[DeviceSpeed], links: Links) -> Planner:
        """Return a planner for the same model and work, with other devices or links."""
        kinds = {"tensor": self.tensor, "pipeline": self.pipeline, "thin": self.thin}
        return Planner(self.work, speeds, links, self._model, self._digest, **kinds)

    def for_prompts(self) -> Planner:
        """Return a planner for prefill placements. Ranks share layers by their prefill speed, and never by memory."""
        other = copy(self)
        other._smaller, other._for_prompts = {}, True
        other.groups = [
            StageGroup(self.work, self.speeds, self.links, group.members, for_prompts=True)
            if len(group.members) > 1
            else group
            for group in self.groups
        ]
        return other

    def with_memory(self, n_bytes: Mapping[int, int], *, pages: bool = False) -> Planner:
        """Return a planner in which these devices have other amounts of memory.

        n_bytes: bytes by the index of a device. Groups of other devices, their costs and hops are shared with this
            planner.
        pages: True if they may page, and have their GPU, as before. Otherwise another model fills the GPU first.
        """
        other = copy(self)
        speeds = list(self.speeds)
        for i, n in n_bytes.items():
            speeds[i] = replace(speeds[i], memory_bytes=n) if pages else next_to_another(speeds[i], n)
        other.speeds = tuple(speeds)
        other.groups = []
        for group in self.groups:
            key = group.members, tuple(n_bytes.get(i) for i in group.members), pages
            if n_bytes.keys().isdisjoint(group.members):
                self._smaller[key] = group
            elif key not in self._smaller:
                self._smaller[key] = StageGroup(
                    self.work, other.speeds, self.links, group.members, for_prompts=self._for_prompts
                )
            other.groups.append(self._smaller[key])
        other._owner = other.groups[0]
        return other

    def whole_bytes(self) -> list[int]:
        """Return the largest bytes that any plan needs on each device if no memory is short."""
        most = [0] * len(self.speeds)
        for group in self.groups:
            for i, need in zip(group.members, group.whole_bytes(), strict=True):
                most[i] = max(most[i], ceil(need))
        return most

    def only_own(self) -> Planner:
        """Return the planner for the owner's device alone."""
        return self.like(self.speeds[:1], self.links)

    def shares(self) -> list[float]:
        """Return the share of every layer on each device, by measured speed, if all devices share all layers."""
        return StageGroup(self.work, self.speeds, self.links, tuple(range(len(self.speeds)))).parts()

    @property
    def microbatches(self) -> list[int]:
        """Numbers of groups to try: 1, 2, 4 ... and the number of requests, if groups of equal size contain all
        requests.
        """
        most = self.work.concurrency
        return sorted({cost.groups(most, n) for n in (*(1 << i for i in range(most.bit_length())), most)})

    def problem(self, objectives: Sequence[str], microbatches: int) -> Problem:
        """Return the search problem. Its measures are those that the objectives need.

        Sums: seconds of a lone token, of a pass, and of a prompt; joules; busy seconds of overloaded hosts. Peaks: busy
            seconds of a microbatch and of a prompt; bytes.
        """
        hosts = crowded(speed.host for speed in self.speeds) if self.pipeline else []
        stages = self.pipeline and len(self.speeds) > 1
        idles = any(speed.idle_watts for speed in self.speeds)
        measures = Measures(self.work, tuple(objectives), microbatches, hosts, stages=stages, idles=idles)
        check_watts(objectives, self.speeds)
        may_be_thin = self.thin and (self._for_prompts or self.work.drafts_thin)
        thin = cache(self._owner.thin_costs) if may_be_thin else None
        groups = [group.costs(measures, LOCAL, thin) for group in self.groups]
        n = self.work.limits.sizes.layers
        return Problem(n, len(measures.sums), tuple(groups), lambda a, b: self._hop(measures, a, b), measures)

    def half_problem(self, objectives: Sequence[str], microbatches: int, devices: Sequence[int]) -> Problem:
        """Return the problem for one placement of a pair, with additional objectives.

        These are the transfer time of the prompt's KV cache to or from the owner, and the bytes on each of `devices`
        (indices).
        """
        peaks = [
            np.stack([group.moved_s(LOCAL, to_owner=self._for_prompts), *map(group.bytes_of, devices)])
            for group in self.groups
        ]
        thin_owner = np.array([0.0, *(0.0 if i else self.speeds[0].runtime_bytes for i in devices)])
        enter = [thin_owner * (0 not in group.members) for group in self.groups]
        return with_peaks(self.problem(objectives, microbatches), peaks, enter)

    def bytes_held(self, solution: Solution) -> list[float]:
        """Return the bytes that a solution's placement holds on each device."""
        n_bytes = [0.0] * len(self.speeds)
        if 0 not in self.groups[solution.groups[0]].members:
            n_bytes[0] = self.speeds[0].runtime_bytes
        for index, cut in zip(solution.groups, pairwise(solution.cuts), strict=True):
            for i in self.groups[index].members:
                n_bytes[i] = float(self.groups[index].bytes_of(i)[cut])
        return n_bytes

    def plan(self, solution: Solution) -> Plan:
        """Return the plan of a solution."""
        stages = []
        if 0 not in self.groups[solution.groups[0]].members:
            [own] = shards(self.work.limits, (LOCAL,), (1.0,), last=False)
            stages.append(Stage(NOTHING, (replace(own, threads=self.speeds[0].threads),)))
        for group, (start, stop) in zip(solution.groups, pairwise(solution.cuts), strict=True):
            stages.append(Stage(Range(start, stop), self.groups[group].shards(start, stop)))
        return Plan(self._model, self._digest, self.work.limits.sizes, tuple(stages))

    def _search(
        self,
        objectives: Sequence[str],
        microbatches: int,
        caps: Sequence[float] | None,
        outdone: Outdone | None,
        *,
        several_stages: bool,
    ) -> Front:
        """several_stages: False if plans with one computing stage suffice, because more stages cannot be better."""
        problem = self.problem(objectives, microbatches)
        if not several_stages:
            problem = one_stage(problem)
        beam = self.beam(len(objectives) > 2 and "memory" in objectives)
        most = None if caps is None else np.array(caps, float)
        return front(replace(problem, caps=most), beam=beam, outdone=outdone)

    def beam(self, of_memory: bool) -> int | None:
        """Return the beam width of a search, or None for an exact search.

        of_memory: memory is compared with two other objectives.
        """
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
        several = [group for group in several if all(self.speeds[i].shares_layers for i in group)]
        if not self.pipeline:
            return [group for group in (*singles, *several) if 0 in group]  # a single stage that includes the owner
        return [*singles, *several]

    def _near(self, most: int) -> list[tuple[int, ...]]:
        """Return the groups of devices with the fastest all-reduce, if there are too many groups to try all."""
        candidates: list[tuple[float, tuple[int, ...]]] = []
        grown: list[tuple[int, ...]] = [(i,) for i in range(len(self.speeds))]

        def sum_s(group: tuple[int, ...]) -> float:
            way = self.links.slowest([self.speeds[i].device for i in group])
            return self.work.sum_s(1, len(group), way.latency_s, way.bytes_per_s)

        for _ in range(most - 1):
            grown = sorted({tuple(sorted((*g, i))) for g in grown for i in range(len(self.speeds)) if i not in g})
            timed = [(sum_s(group), group) for group in grown]
            timed.sort()
            grown = [group for _, group in timed[:_MOST_GROUPS]]
            candidates += timed[: _MOST_GROUPS // (most - 1)]
        return [group for _, group in candidates]

    def _hop(self, measures: Measures, a: int, b: int) -> Array:
        key = measures.key, self.groups[a].members, self.groups[b].members
        if key not in self._hops:
            self._hops[key] = self._hop_costs(measures, a, b)
        return self._hops[key]

    def _hop_costs(self, measures: Measures, a: int, b: int) -> Array:
        n = self.work.limits.sizes.layers
        if 0 in self.groups[b].members:  # the owner can only be in the first stage
            return np.full((len(measures.names), n + 1), np.inf)
        before, after = self.groups[a].devices, self.groups[b].devices

        def hop(rows: float) -> tuple[float, float]:
            return cost.hop_s(self.work, before, after, self.links, rows)

        return np.repeat(measures.for_hop(hop)[:, None], n + 1, axis=1)
