"""Pipeline plans of an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations

from devices.probe import own_rss
from edge.cluster.fleet import Fleet
from edge.cluster.onnx_ranks import OnnxRanks
from edge.onnx.bench import Flow, FlowSpeed, sequential
from edge.onnx.bench import measure as measure_flow
from edge.onnx.engine import OnnxEngine
from edge.onnx.model import OnnxSource
from edge.onnx.samples import Array
from edge.planning.choice import PlanChoice
from edge.planning.measure import ROUNDS, Measured, spread
from edge.planning.plan_options import DEFAULTS, PlanOptions
from edge.planning.space import MOST_SUBSETS_OF, PlanSpace
from edge.profiling.onnx_survey import REMEMBERED
from edge.profiling.profile import ClusterProfile
from edge.tasks import SILENT, Steps
from partition.errors import PlanError
from partition.plan.onnx_cuts import Cut, choose, cut_at
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.onnx_split import split
from partition.plan.plan import LOCAL
from partition.predict.hysteresis import clearly_better, plan_threshold
from partition.predict.objectives import OBJECTIVES, limited_by
from partition.predict.onnx_predict import OnnxDevice, OnnxWork
from partition.predict.pareto import Point, stages_text, without_repeats
from partition.predict.speeds import Links
from partition.search.changes import FASTER, Change, faster_links
from partition.search.explain import busy_words, is_busy
from partition.search.onnx_planner import OnnxPlaced, OnnxPlanner

# Limits of the runs in a measuring round, and the approximate seconds of all rounds.
_LEAST_REPEATS, _MOST_REPEATS, _ABOUT_S = 4, 40, 3.0


class OnnxSpace(PlanSpace):
    """Pipeline plans of an ONNX model."""

    kind, cache = "onnx", REMEMBERED
    known: ClusterProfile[OnnxDevice]

    def __init__(
        self,
        model: OnnxSource,
        known: ClusterProfile[OnnxDevice],
        cuts: Sequence[Cut],
        options: PlanOptions = DEFAULTS,
    ) -> None:
        super().__init__(model.file.path, known, options)
        self.model, self.title = model, model.name
        self.work = OnnxWork.from_graph(model.graph, cuts, options.wire)

    def planner(self, speeds: Sequence[OnnxDevice] | None = None, links: Links | None = None) -> OnnxPlanner:
        """Return a planner. speeds: some of the devices; None: all. links: None: the measured links."""
        return OnnxPlanner(
            self.work, speeds or self.known.speeds, links or self.known.links, self.model.name, self.model.digest,
            self._options.concurrency,
        )  # fmt: skip

    def points(self, axes: Sequence[str]) -> list[Point]:
        """Return the front, the whole model on each device, and the fronts of fewer devices."""
        speeds = self.known.speeds
        placed, self.exact = self.planner().front(axes)
        placements = [*placed, *self.planner().singles(axes)]
        if len(speeds) <= MOST_SUBSETS_OF:
            for size in range(2, len(speeds)):
                for some in combinations(speeds, size):
                    placements += self.planner(some).front(axes)[0]
        return without_repeats([self.point(placement) for placement in placements])

    def point(self, placed: OnnxPlaced) -> Point:
        """Return a point for a placed plan."""
        parallel = "pipeline" if len(placed.predicted.stages) > 1 else "single"
        label = stages_text(placed.predicted, self.names)
        return Point(placed.plan, placed.predicted, parallel, label, None, str(self.path))

    def best(self, objective: str, caps: Mapping[str, float]) -> tuple[Point, str]:
        objectives, most = limited_by(objective, caps)
        best, single = self.planner().best(objective, caps), self._single(objectives, most)
        if best is None:
            raise PlanError(self._nothing(caps))
        text = partial(OBJECTIVES[objective].describe, thing="input")
        several = f"pipeline of {len(best.plan.stages)} stages: {text(best.objectives[0])}"
        if single is None:
            return self.point(best), f"{several}, no single device can run it"
        alone = f"{text(single.objectives[0])} on {self.names[single.plan.devices[0]]} alone"
        busy = busy_words(self.known.speeds)
        if not self._outdoes(best, single, objective):
            why = self.model.places_text(2) or f"more are no better{busy}"
            return self.point(single), f"use one device: {alone}; {why}"
        return self.point(best), f"{several}, {alone}{busy}"

    def _outdoes(self, new: OnnxPlaced, old: OnnxPlaced, objective: str) -> bool:
        """Return whether a plan is clearly better than the whole model on one device, even if that device were idle."""
        row = OBJECTIVES[objective]
        if not row.time:
            return new.objectives[0] < old.objectives[0]
        [device] = old.plan.devices
        speeds = [speed.at_best if speed.device == device else speed for speed in self.known.speeds]
        planner = self.planner(speeds)
        new_s, old_s = (row.cost_of(planner.predict(placed.plan)) for placed in (new, old))
        return clearly_better(new_s, old_s, by=plan_threshold(is_busy(self.known.speeds, new.plan.devices)))

    def changes(self, objective: str, caps: Mapping[str, float]) -> list[Change]:
        placed = self.planner(links=faster_links(self.known.links)).best(objective, caps)
        return [Change(f"links {FASTER:g} times faster", placed.objectives[0] if placed else None)]

    def fastest(self, objective: str) -> Point:
        placed = self.planner().best(objective, {})
        if placed is None:
            raise PlanError(self._nothing({}))
        return self.point(placed)

    def cost(self, point: Point, objective: str) -> float:
        assert isinstance(point.plan, OnnxPlan)
        return OBJECTIVES[objective].cost_of(self.planner().predict(point.plan))

    def depends_on(self, point: Point) -> list[str]:
        sizes = [repr(self.work.crossing_bytes), repr(self.work.activation_bytes)]  # sizes differ with open dimensions
        options = self._options
        return [point.key, options.transport, options.wire, str(options.concurrency), *sizes]

    def measure(self, point: Point, fleet: Fleet | None) -> Measured:
        plan, feeds, options = point.plan, self.model.sample, self._options
        assert isinstance(plan, OnnxPlan)
        about = round(_ABOUT_S / ROUNDS / point.predicted.latency_s)
        repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, about))
        if not plan.remote:
            with OnnxEngine(self.path, options.threads) as engine:
                rounds = _rounds(sequential(engine.run), feeds, repeats, 1)
                return _best(rounds, {LOCAL: own_rss()})
        assert fleet is not None
        with OnnxRanks(fleet, self.model, plan, transport=options.transport, threads=options.threads) as ranks:
            flow = partial(ranks.start().map, wire=options.wire)
            rounds = _rounds(flow, feeds, repeats, options.concurrency)
            return _best(rounds, {stage.device: stage.memory_bytes or own_rss() for stage in ranks.loaded})

    def _single(self, objectives: Sequence[str], most: Sequence[float]) -> OnnxPlaced | None:
        """Return the whole model on one device within the limits: this device, unless another is clearly better."""
        singles = [
            placement for placement in self.planner().singles(objectives)
            if all(value <= cap for value, cap in zip(placement.objectives, most, strict=True))
        ]  # fmt: skip
        own = next((placement for placement in singles if placement.plan.devices[0] == LOCAL), None)
        if own is not None:
            singles = [own, *(placement for placement in singles if self._outdoes(placement, own, objectives[0]))]
        return min(singles, key=lambda placement: placement.objectives[0], default=None)

    def _nothing(self, caps: Mapping[str, float]) -> str:
        need = sum(self.work.weight_bytes) / 2**20
        have = "; ".join(
            f"{speed.name} has {max(0, speed.memory_bytes - speed.runtime_bytes) / 2**20:,.0f}"
            for speed in self.known.speeds
        )
        limits = f" within the limits of {', '.join(caps)}" if caps else ""
        return (
            f"no plan fits{limits}: the weights need {need:,.0f} MiB besides activations, and besides its own process"
            f" {have}; relax the limits, or add a device"
        )


def _rounds(flow: Flow, feeds: Mapping[str, Array], repeats: int, window: int | None) -> list[FlowSpeed]:
    """Measure several rounds. All rounds have as many inputs in flight as the first one."""
    rounds = [measure_flow(flow, feeds, repeats, window)]
    return rounds + [measure_flow(flow, feeds, repeats, rounds[0].window) for _ in range(ROUNDS - 1)]


def _best(rounds: Sequence[FlowSpeed], memory_bytes: Mapping[str, int]) -> Measured:
    latency_s = [timing.latency_ms_median / 1e3 for timing in rounds]
    throughput_per_s = [timing.throughput_per_s for timing in rounds]
    apart = max(spread(latency_s), spread(throughput_per_s))
    return Measured(min(latency_s), max(throughput_per_s), None, memory_bytes, apart)


def arrange_network(
    model: OnnxSource,
    devices: Sequence[str],
    *,
    cuts: Sequence[str] | None = None,
    shares: Sequence[float] | None = None,
    threads: int | None = None,
    steps: Steps = SILENT,
) -> PlanChoice:
    """Choose a plan for an ONNX model on these devices, in their order.

    cuts: labels or positions of cuts; None: the cuts follow from `shares`.
    shares: relative work of each device; None: equal shares.
    threads: threads of this device; None: its default.
    Raises PlanError for unknown cuts.
    """
    path = model.file.path
    model.check_places(len(devices))
    if cuts is not None:
        plan = model.plan(devices, [cut_at(model.graph, where) for where in cuts])
        return PlanChoice(path, plan, "as --cut says", is_given=True, keeps_off=LOCAL not in devices)
    parts = tuple(shares or (1.0,) * len(devices))
    places = choose(model.graph, "auto")
    if len(places) < len(parts):
        places = choose(model.graph, "all")
    with steps.step(f"Timing the nodes of {model.name}"):
        seconds = model.node_seconds(threads)
    work = "estimated work" if seconds is None else "work as this device does it"
    why = f"as --shares says, by {work}" if shares else f"equal parts of the {work}"
    plan = model.plan(devices, split(model.graph, places, parts, seconds))
    return PlanChoice(path, plan, why, is_given=shares is not None, keeps_off=LOCAL not in devices)
