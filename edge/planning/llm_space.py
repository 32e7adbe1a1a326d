"""Plans of a language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from devices.probe import default_threads
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import Exchange, LlmRanks
from edge.llm.engine import Engine
from edge.planning.arrange import can_share, name_of
from edge.planning.drafted import with_draft_held, with_drafts
from edge.planning.encoder_place import EncoderPlace
from edge.planning.measure import Measured, measured, of_copies
from edge.planning.plan_options import DEFAULTS, PlanOptions, engine_options
from edge.planning.space import MOST_SUBSETS_OF, PlanSpace
from edge.planning.type_files import TypeFile
from edge.profiling.llm_survey import REMEMBERED
from edge.profiling.profile import ClusterProfile
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import Plan
from partition.predict.cost import Work
from partition.predict.drafts import ROWS, Draft
from partition.predict.hysteresis import PLAN, PREFILL, clearly_better
from partition.predict.objectives import OBJECTIVES
from partition.predict.pareto import Point, stages_text, without_repeats
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import DeviceSpeed
from partition.search.changes import Change, changes
from partition.search.explain import best, infeasible, kind_of, reason
from partition.search.phases import Phases, paired, prefill_reason
from partition.search.planner import Placed, Planner, with_microbatches
from partition.search.replicas import Replicas, replicated


class LlmSpace(PlanSpace):
    """Plans of one model file."""

    kind, cache = "llm", REMEMBERED
    known: ClusterProfile[DeviceSpeed]
    file: ModelFile

    def __init__(
        self,
        file: ModelFile,
        digest: str,
        work: Work,
        known: ClusterProfile[DeviceSpeed],
        options: PlanOptions = DEFAULTS,
        type_file: TypeFile | None = None,
        *,
        draft: Draft | None = None,
        encoder: EncoderPlace | None = None,
        phases: bool = True,
    ) -> None:
        """Create the plan space.

        type_file: type of the weights, if several types are compared.
        draft: draft that plans may use. The search chooses its number of rows.
        encoder: place of an image and audio encoder that shares the devices.
        phases: True: plans may have a separate prefill placement.
        """
        super().__init__(file.path, known, options)
        self.file, self.digest, self.work = file, digest, work
        self.title, self.size_bytes = name_of(file), file.size_bytes
        if type_file is not None:
            self.type, self.divergence = type_file.name, type_file.divergence
        self._can_share = len(known.speeds) > 1 and can_share(file)
        self._exchange = Exchange(options.transport, wire=options.wire)
        self._phases, self.encoder = phases, encoder
        self._works = with_drafts(work, draft, len(known.speeds))  # the one without drafts comes first

    def planner(
        self,
        members: Sequence[int] | None = None,
        *,
        tensor: bool = True,
        pipeline: bool = True,
        work: Work | None = None,
    ) -> Planner:
        """Return the planner for some devices.

        members: indices of the devices, including this device; None: all devices.
        work: workload with drafts; None: the workload without drafts.
        """
        planned_work = work or self.work
        speeds = [self.known.speeds[i] for i in members] if members is not None else self.known.speeds
        own, *others = self._with_reserved(speeds, planned_work.draft)
        named_speeds = [replace(own, name="this device"), *others]  # name in messages
        share = tensor and self._can_share
        return Planner(
            planned_work,
            named_speeds,
            self.known.links,
            name_of(self.file),
            self.digest,
            tensor=share,
            pipeline=pipeline,
        )

    def planner_for(self, point: Point) -> Planner:
        """Return the planner for replanning a point after a loss: without drafts, but with the memory of its draft
        reserved."""
        planner = self.planner()
        return planner.like(with_draft_held(planner.speeds, point.predicted.draft), planner.links)

    def _with_reserved(self, speeds: Sequence[DeviceSpeed], draft: Draft | None) -> list[DeviceSpeed]:
        """Return the devices with the memory of the draft and of the encoder reserved."""
        reserved = with_draft_held(speeds, draft)
        return reserved if self.encoder is None else self.encoder.with_encoder(reserved)

    def points(self, axes: Sequence[str]) -> list[Point]:
        """Return the front and plans for comparison: fronts of fewer devices, and of only one kind of parallelism."""
        n = len(self.known.speeds)
        subsets: list[tuple[int, ...]] = [tuple(range(n)), (0,)]
        if n <= MOST_SUBSETS_OF:
            subsets += [(0, *some) for size in range(1, n - 1) for some in combinations(range(1, n), size)]
        points: list[Point] = []
        for members in dict.fromkeys(subsets):
            for tensor, pipeline in ((True, True), (False, True), (True, False)):
                placed, exact = self.planner(members, tensor=tensor, pipeline=pipeline).front(axes)
                points += [self.point(placement.plan, placement.microbatches) for placement in placed]
                if members == subsets[0] and tensor and pipeline:
                    self.exact = exact
                    points += self._replicas(axes, placed)
        for work in self._works[1:]:
            placed, _ = self.planner(work=work).front(axes)
            drafted = [self.point(placement.plan, placement.microbatches, work) for placement in placed]
            points += [point for point in drafted if point.predicted.draft]
        if "ttft" in axes and self._phases:
            points += self._pairs(axes)
        return without_repeats([*points, *self._drafted(points)])

    def _replicas(self, axes: Sequence[str], others: Sequence[Placed]) -> list[Point]:
        """Return plans with replicas that are better than all `others`."""
        search = Replicas(self.planner())
        plans = search.plans(axes, others=others)
        self.exact, self.replicas_gap = self.exact and search.exact, search.gap
        return [self.point(placed.plan, placed.microbatches) for placed in plans]

    def _pairs(self, axes: Sequence[str]) -> list[Point]:
        """Return plans with a prefill placement that clearly lowers the TTFT."""
        phases = Phases(self.planner())
        pairs = [(pair, self.point(pair.plan, pair.microbatches)) for pair in phases.pairs(axes)]
        self.exact, self.pairs_gap = self.exact and phases.exact, phases.gap
        return [
            point
            for pair, point in pairs
            if clearly_better(
                point.predicted.ttft_s or 0.0,
                self.point(pair.plan.placements[0], pair.microbatches).predicted.ttft_s or 0.0,
                by=PREFILL,
            )
        ]

    def _drafted(self, points: Sequence[Point]) -> list[Point]:
        """Return each of these plans with its best number of draft rows, if drafts make it faster."""
        drafted = []
        for point in points:
            assert isinstance(point.plan, Plan)
            if point.predicted.draft is None and len(self._works) > 1 and not point.plan.replicas:
                tried = [self._tried(point.plan, point.predicted.microbatches, work) for work in self._works[1:]]
                fastest = min(
                    (candidate for candidate in tried if candidate),
                    key=lambda candidate: candidate.predicted.latency_s,
                    default=point,
                )
                if fastest.predicted.latency_s < point.predicted.latency_s:
                    drafted.append(fastest)
        return drafted

    def _tried(self, plan: Plan, microbatches: int | None, work: Work) -> Point | None:
        """Return a plan with drafts, or None if the draft does not fit."""
        try:
            return self.point(plan, microbatches, work)
        except PlanError:
            return None

    def point(self, plan: Plan, microbatches: int | None = None, work: Work | None = None) -> Point:
        """Predict a plan. work: workload with drafts; None: without drafts."""
        planned_work = work or self.work
        by_device = {speed.device: speed for speed in self._with_reserved(self.known.speeds, planned_work.draft)}
        predicted = replace(
            predict(plan, planned_work, by_device, self.known.links, microbatches), divergence=self.divergence
        )
        label = stages_text(predicted, self.names) + (
            f"; {predicted.draft.describe(self.names)}" if predicted.draft else ""
        )
        if predicted.prefill is not None:
            label += f"; prompts from {plan.prefill_from} tokens on: {stages_text(predicted.prefill, self.names)}"
        if not plan.replicas:  # each copy has its own number of microbatches and of requests
            plan = with_microbatches(plan, predicted.microbatches, planned_work.concurrency)
        return Point(plan, predicted, kind_of(plan), label, self.type, str(self.path))

    def best(self, objective: str, caps: Mapping[str, float]) -> tuple[Point, str]:
        """Return the best plan as `PlanSpace.best` does, with a prefill placement if that is clearly better."""
        refused: PlanError | None = None
        plain = None
        try:
            planner, plain = self._best(objective, caps)
            why = reason(planner, plain, objective, caps)
        except PlanError as error:
            planner, refused = self.planner(), error
        placed = paired(planner, plain, objective, caps) if self._phases else None
        if placed is None:
            if plain is None:
                copies = replicated(planner, None, objective, caps)
                if copies is not None:
                    return self.point(copies.plan, copies.microbatches), reason(planner, copies, objective, caps)
                assert refused is not None
                raise refused
            placed = plain
        elif plain is None or placed.plan.placements[0] != plain.plan:
            why = reason(planner, placed, objective, caps)
        copies = replicated(self.planner(), placed, objective, caps)
        if copies is not None:
            return self.point(copies.plan, copies.microbatches), reason(self.planner(), copies, objective, caps)
        point = self.point(placed.plan, placed.microbatches, planner.work)
        draft = point.predicted.draft
        more = [draft.describe(self.names)] if draft else []
        if placed.plan.prefill is not None:
            more.append(prefill_reason(planner, placed))
        return point, "; ".join([why, *more])

    def _best(self, objective: str, caps: Mapping[str, float]) -> tuple[Planner, Placed]:
        """Return the best plan. It has drafts only if drafts are clearly better or no other plan is within the caps."""
        candidates: list[tuple[Planner, Placed]] = []
        refused: PlanError | None = None
        for work in self._works:
            planner = self.planner(work=work)
            try:
                candidates.append((planner, best(planner, objective, caps)))
            except PlanError as error:
                refused = refused or error
        if not candidates:
            assert refused is not None
            raise refused

        def value(candidate: tuple[Planner, Placed]) -> float:
            plain = candidate[0].work.draft is None
            return candidate[1].objectives[0] / (PLAN if plain else 1.0)

        return min(candidates, key=value)

    def changes(self, objective: str, caps: Mapping[str, float]) -> list[Change]:
        planner, _ = self._best(objective, caps)
        return changes(planner, objective, caps)

    def fastest(self, objective: str) -> Point:
        planners = [(work, self.planner(work=work)) for work in self._works]
        fitting = [(work, placed) for work, planner in planners if (placed := planner.best(objective, {})) is not None]
        points = [self.point(placed.plan, placed.microbatches, work) for work, placed in fitting]
        points += self._replicas((objective,), [placed for work, placed in fitting if work.draft is None])
        if objective == "ttft" and self._phases:
            points += self._pairs((objective,))
        if not points:
            raise PlanError(infeasible(self.planner()))
        return min(points, key=lambda point: OBJECTIVES[objective].cost_of(point.predicted))

    def cost(self, point: Point, objective: str) -> float:
        """Return the cost with the number of draft rows that suits the plan best."""
        assert isinstance(point.plan, Plan)
        plan, microbatches = point.plan, point.predicted.microbatches
        tried = (self._tried(plan, microbatches, work) for work in self._works[: 1 if plan.replicas else None])
        costs = (OBJECTIVES[objective].cost_of(candidate.predicted) for candidate in tried if candidate)
        return min(costs, default=math.inf)

    def depends_on(self, point: Point) -> list[str]:
        work = (self.work.context, self.work.prompt, self.work.depth, self.work.kv.name)
        return [point.key, repr(work), str(self._exchange)]

    def measure(self, point: Point, fleet: Fleet | None) -> Measured:
        assert isinstance(point.plan, Plan)
        if not point.predicted.copies:
            return self._measured(point.plan, point.predicted, fleet)
        # Copies are measured one after another.
        copies = zip(point.plan.copies, point.predicted.copies, strict=True)
        return of_copies([self._measured(copy, predicted, fleet) for copy, predicted in copies])

    def _measured(self, plan: Plan, predicted: Prediction, fleet: Fleet | None) -> Measured:
        """Run one copy of a model with the requests of its prediction, and measure it."""
        draft, many = predicted.draft, predicted.microbatches
        work = replace(self.work, concurrency=predicted.in_flight)
        memory = min((n for n in (plan.shard(0).memory, self._options.memory) if n is not None), default=None)
        options = replace(
            engine_options(self._options),
            context=self.work.context,
            sequences=work.concurrency,
            threads=self._options.threads or plan.shard(0).threads or default_threads(),  # the number in the prediction
            memory=memory,
            reserved=draft.held_bytes if draft and draft.worker is None and memory else 0,
            outputs=max(ROWS[-1], work.concurrency) if draft else None,
            rollback=(draft.rollback or 0) if draft else 0,
        )
        if plan.world_size == 1:
            with Engine(self.file, options) as engine:
                return measured(engine, work, many, {}, draft)
        assert fleet is not None
        with LlmRanks(fleet, plan, self.file, options, self._exchange) as ranks:
            return measured(ranks.engine, work, many, ranks.memory_bytes, draft)
