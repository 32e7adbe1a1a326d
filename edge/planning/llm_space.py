"""The plans of a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from devices.probe import default_threads
from edge.cluster.deployment import DEFAULT_EXCHANGE, Deployment, Exchange
from edge.cluster.fleet import Fleet
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.planning.arrange import can_share, name_of
from edge.planning.measure import Measured, measured
from edge.planning.space import MOST_SUBSETS_OF, PlanSpace
from edge.survey.llm_survey import REMEMBERED
from edge.survey.profile import ClusterProfile
from partition.plan.plan import Plan
from partition.predict.cost import Work
from partition.predict.pareto import Point, told, without_repeats
from partition.predict.predict import predict
from partition.predict.speeds import DeviceSpeed
from partition.search.changes import Change, changes
from partition.search.explain import best, kind_of, reason
from partition.search.planner import Planner
from quant.gguf.file import GgufFile


class LlmSpace(PlanSpace):
    """The plans of one file."""

    kind, cache = "llm", REMEMBERED
    known: ClusterProfile[DeviceSpeed]

    def __init__(
        self,
        path: Path,
        file: GgufFile,
        digest: str,
        work: Work,
        known: ClusterProfile[DeviceSpeed],
        *,
        threads: int | None = None,
        memory: int | None = None,
        exchange: Exchange = DEFAULT_EXCHANGE,
        type_: str | None = None,
    ) -> None:
        """threads: of this device, where a plan runs. memory: bytes that this process may hold
        then. type_: of the weights, where several files are compared."""
        super().__init__(path, known, threads)
        self.file, self.digest, self.work = file, digest, work
        self.title = name_of(file)
        self._memory, self._exchange, self._type = memory, exchange, type_

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
        if n <= MOST_SUBSETS_OF:
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
        planner = self.planner()
        placed = best(planner, objective, caps)
        return self.point(placed.plan, placed.microbatches), reason(planner, placed, objective, caps)

    def changes(self, objective: str, caps: Mapping[str, float]) -> list[Change]:
        return changes(self.planner(), objective, caps)

    def depends_on(self, point: Point) -> list[str]:
        work = (self.work.context, self.work.prompt, self.work.depth, self.work.kv.name)
        return [point.key, repr(work), str(self._exchange)]

    def measure(self, point: Point, fleet: Fleet | None) -> Measured:
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
