"""All plans of a language model on a cluster that are worth looking at, and what they do when they are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from pathlib import Path

from devices.probe import default_threads
from edge.cluster.deployment import DEFAULT_EXCHANGE, Deployment, Exchange
from edge.cluster.fleet import Fleet
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.planning.arrange import can_share, name_of
from edge.planning.measure import Measured, measured
from edge.survey.cache import SpeedCache, key_of
from edge.survey.links import told as told_link
from edge.survey.profile import ClusterProfile
from edge.survey.survey import own_profile
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.pareto import Point, told, without_repeats
from partition.predict.predict import predict
from partition.search.changes import Change, changes
from partition.search.explain import best, kind_of, reason
from partition.search.planner import Planner
from quant.gguf.file import GgufFile

_MOST_SUBSETS_OF = 4  # devices: fronts of all their subsets are looked at; of more, only of the whole


class LlmSpace:
    """The plans of one file."""

    kind = "llm"

    def __init__(
        self,
        path: Path,
        file: GgufFile,
        digest: str,
        work: Work,
        known: ClusterProfile,
        *,
        threads: int | None = None,
        memory: int | None = None,
        exchange: Exchange = DEFAULT_EXCHANGE,
        type_: str | None = None,
    ) -> None:
        """threads: of this device, where a plan runs. memory: bytes that this process may hold
        then. type_: of the weights, where several files are compared."""
        self.path, self.file, self.digest, self.work, self.known = path, file, digest, work, known
        self.title = name_of(file)
        self.exact = True  # the search of `points`
        self._threads, self._memory, self._exchange, self._type = threads, memory, exchange, type_

    @property
    def names(self) -> dict[str, str]:
        """Of devices, by what a plan calls them."""
        return {speed.device: speed.name for speed in self.known.speeds}

    def planner(self, members: Sequence[int] | None = None, *, tensor: bool = True, pipeline: bool = True) -> Planner:
        """Of some of the devices, this one among them; None: of all."""
        speeds = [self.known.speeds[i] for i in members] if members is not None else self.known.speeds
        share = tensor and can_share(self.file)
        return Planner(
            self.work, speeds, self.known.links, name_of(self.file), self.digest, tensor=share, pipeline=pipeline
        )

    def points(self, axes: Sequence[str]) -> list[Point]:
        """The front, and other plans that tell what it is worth: the fronts of fewer devices, and of one kind alone."""
        n = len(self.known.speeds)
        subsets: list[tuple[int, ...]] = [tuple(range(n)), (0,)]
        if n <= _MOST_SUBSETS_OF:
            subsets += [(0, *some) for size in range(1, n - 1) for some in combinations(range(1, n), size)]
        found: list[Point] = []
        for members in dict.fromkeys(subsets):
            for tensor, pipeline in ((True, True), (False, True), (True, False)):
                placed, exact = self.planner(members, tensor=tensor, pipeline=pipeline).front(axes)
                found += [self.point(one.plan, one.microbatches) for one in placed]
                if members == subsets[0] and tensor and pipeline:
                    self.exact = exact
        return without_repeats(found)

    def point(self, plan: Plan, microbatches: int | None = None) -> Point:
        """A plan, predicted."""
        of = {speed.device: speed for speed in self.known.speeds}
        predicted = predict(plan, self.work, of, self.known.links, microbatches)
        stages = [([of[device].name for device in one.devices], one.what) for one in predicted.stages]
        return Point(plan, predicted, kind_of(plan), told(stages), self._type, str(self.path))

    def best(self, objective: str, caps: Mapping[str, float]) -> tuple[Point, str]:
        """The plan to take by one objective, and why, in one line. caps: what objectives may be at most."""
        planner = self.planner()
        placed = best(planner, objective, caps)
        return self.point(placed.plan, placed.microbatches), reason(planner, placed, objective, caps)

    def changes(self, objective: str, caps: Mapping[str, float]) -> list[Change]:
        """What one change would buy, within the same caps."""
        return changes(self.planner(), objective, caps)

    def can_run(self, point: Point) -> bool:
        """Whether all of its devices are there: presets are not."""
        return not any(speed.estimate for speed in self.known.speeds if speed.device in point.plan.devices)

    def measured_key(self, point: Point, fleet: Fleet | None) -> str:
        """What a measurement depends on."""
        others = [fleet.profiles[device] for device in point.plan.devices if fleet and device != LOCAL]
        work = (self.work.context, self.work.prompt, self.work.depth, self.work.kv.name)
        of = [point.key, repr(work), str(self._exchange)]
        links = [told_link(self.known.links.between.get(pair)) for pair in permutations(point.plan.devices, 2)]
        return key_of([*of, *links], own_profile(LOCAL, self._threads or default_threads()), *others)

    def measure(self, point: Point, fleet: Fleet | None) -> Measured:
        """Run a plan on its devices. The errors of Deployment and Engine."""
        plan, many = point.plan, point.predicted.microbatches
        assert isinstance(plan, Plan)
        options = EngineOptions(
            context=self.work.context,
            sequences=self.work.concurrency,
            threads=self._threads or plan.shard(0).threads or default_threads(),  # as predicted
            kv_type=self.work.kv.name,
            memory=min((n for n in (plan.shard(0).memory, self._memory) if n is not None), default=None),
        )
        if plan.world_size == 1:
            with Engine(self.path, options) as engine:
                return measured(engine, self.work, many, {})
        assert fleet is not None
        with Deployment(fleet, plan, self.file, options, self._exchange) as deployment:
            return measured(deployment.engine, self.work, many, deployment.memory_bytes)

    def forget(self, point: Point) -> None:
        """Let the next command measure the devices of a plan anew."""
        for speed in self.known.speeds:
            if speed.device in point.plan.devices and speed.key:
                SpeedCache().forget(speed.key)

    def check_feasible(self) -> None:
        """PlanError, with need and have, where no plan fits."""
        best(self.planner(), "latency")
