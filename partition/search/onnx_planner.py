"""The best pipelines of an ONNX model: exact, over all orders of all devices, subsets of them, and cuts.

`partition.search.search` finds them; here is what stages and hops cost it, by the formulas of
`partition.predict.onnx_predict`, and what comes of the placements it finds. Inputs come from the owner, and outputs go
back there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from partition.errors import PlanError
from partition.plan.onnx_plan import MOST_STAGES, OnnxPlan, OnnxStage
from partition.plan.plan import LOCAL, Range, clean_name
from partition.predict.hosts import crowded, used
from partition.predict.objectives import OF_NETWORKS, check_objectives, limited_by
from partition.predict.onnx_predict import MOST_IN_FLIGHT, OnnxDevice, OnnxWork, hop_s, predict, way
from partition.predict.prediction import Prediction
from partition.predict.speeds import Links
from partition.search.best import Solution
from partition.search.planner import BEAM, MOST_EXACT
from partition.search.problem import Group, Problem, check_watts
from partition.search.search import front

Array = NDArray[np.float64]

_SUMS = {"alone": ("latency", "throughput"), "joules": ("energy",)}  # and the objectives that need them
_PEAKS = {"busy": ("throughput",), "bytes": ("memory",)}


@dataclass(frozen=True)
class OnnxPlaced:
    """A plan that was found, and what it is predicted to do."""

    plan: OnnxPlan
    predicted: Prediction
    objectives: tuple[float, ...]  # as asked for, each to be small: seconds, seconds an input, bytes, joules


class OnnxPlanner:
    """Finds plans for one model on some devices."""

    def __init__(
        self,
        work: OnnxWork,
        speeds: Sequence[OnnxDevice],
        links: Links,
        model: str,
        digest: str,
        in_flight: int | None = None,
    ) -> None:
        """model, digest: as a plan names them. in_flight: inputs at most; None: as many as fill the pipeline.
        PlanError without devices, for one that is there twice, and for measurements of another number of segments."""
        names = [speed.device for speed in speeds]
        if not 1 <= len(names) == len(set(names)) <= MOST_STAGES:
            raise PlanError(f"the devices {', '.join(names)!s:.200}; needed are 1 to {MOST_STAGES}, each once")
        for speed in speeds:
            if len(speed.segments_s) != work.segments:
                raise PlanError(
                    f"{speed.name}: {len(speed.segments_s)} segments were measured, {work.segments} are to be placed;"
                    " measure it again"
                )
        if in_flight is not None and not 1 <= in_flight <= MOST_IN_FLIGHT:
            raise PlanError(f"{in_flight} inputs in flight; needed are 1 to {MOST_IN_FLIGHT}")
        self.work, self.speeds, self.links = work, tuple(speeds), links
        self.in_flight = in_flight
        self._model, self._digest = clean_name(model), digest

    def front(
        self, objectives: Sequence[str] = ("latency", "throughput"), caps: Sequence[float] | None = None
    ) -> tuple[list[OnnxPlaced], bool]:
        """The non-dominated plans, sorted by the first objective, and whether the search was exhaustive.

        caps: what each objective may be at most. PlanError for an objective that is none.
        """
        beam = None if len(self.speeds) <= MOST_EXACT else BEAM
        result = front(self.problem(objectives, caps), beam=beam)
        return [self._placed(solution) for solution in result.solutions], result.exact

    def best(self, objective: str, caps: Mapping[str, float]) -> OnnxPlaced | None:
        """Return the plan that is predicted to be the best by an objective; None if nothing fits, or is within caps on
        objectives."""
        names, most = limited_by(objective, caps)
        return next(iter(self.front(names, most)[0]), None)

    def only_own(self) -> OnnxPlanner:
        """Return the planner for the owner's device alone. PlanError if that was not measured."""
        return self.only(LOCAL)

    def only(self, device: str) -> OnnxPlanner:
        """Return the planner for one device alone."""
        speeds = [speed for speed in self.speeds if speed.device == device]
        return OnnxPlanner(self.work, speeds, self.links, self._model, self._digest, self.in_flight)

    def singles(self, objectives: Sequence[str] = ("latency", "throughput")) -> list[OnnxPlaced]:
        """The whole model on each device that has room for it, in the order of the devices."""
        return [placed for speed in self.speeds for placed in self.only(speed.device).front(objectives)[0]]

    def problem(self, objectives: Sequence[str], caps: Sequence[float] | None = None) -> Problem:
        """The search's problem. Its measures: sums of seconds and of joules for one input, peaks of seconds that a
        stage or a link is taken up by one, and of bytes on a device; those that the objectives need."""
        check_objectives(objectives, OF_NETWORKS, " of an ONNX model")
        check_watts(objectives, self.speeds)
        measures = _Measures(objectives, self.in_flight or MOST_IN_FLIGHT, crowded(speed.host for speed in self.speeds))
        n, last = self.work.segments, self.work.crossing_bytes[-1]
        groups = []
        for i, speed in enumerate(self.speeds):
            enter = self._hop(measures, LOCAL, speed.device, [self.work.crossing_bytes[0]])
            leave = self._hop(measures, speed.device, LOCAL, [last])
            groups.append(Group((i,), self._stages(measures, speed), enter[:, 0], leave[:, 0]))

        def hop(a: int, b: int) -> Array:
            if self.speeds[b].device == LOCAL:  # only the first stage can be the owner's
                return np.full((len(measures.names), n + 1), np.inf)
            return self._hop(measures, self.speeds[a].device, self.speeds[b].device, self.work.crossing_bytes)

        most = None if caps is None else np.array(caps, float)
        return Problem(n, len(measures.sums), tuple(groups), hop, measures, most)

    def plan(self, solution: Solution) -> OnnxPlan:
        """The plan of a solution."""
        at, labels = self.work.positions, self.work.labels
        stages = tuple(
            OnnxStage(self.speeds[group].device, Range(at[start], at[stop]), labels[stop])
            for group, (start, stop) in zip(solution.groups, pairwise(solution.cuts), strict=True)
        )
        return OnnxPlan(self._model, self._digest, at[-1], stages)

    def predict(self, plan: OnnxPlan) -> Prediction:
        """Predict the cost of a plan on these devices."""
        return predict(plan, self.work, {speed.device: speed for speed in self.speeds}, self.links, self.in_flight)

    def _placed(self, solution: Solution) -> OnnxPlaced:
        plan = self.plan(solution)
        return OnnxPlaced(plan, self.predict(plan), solution.objectives)

    def _stages(self, measures: _Measures, speed: OnnxDevice) -> Array:
        """Return the cost of every stage [i, j) on a device: [D, n+1, n+1]; inf if it has no room."""
        n = self.work.segments
        before = np.array(speed.before_s)
        seconds = speed.stage_s + (before[None, :] - before[:, None])
        memory = speed.runtime_bytes + _segment_bytes(self.work)
        watts = 0.0 if speed.watts is None else speed.watts
        hosts = {host: part * seconds for host, part in used([speed.host]).items()}
        stages = measures.select(hosts, alone=seconds, joules=seconds * watts, busy=seconds, bytes=memory)
        possible = (np.arange(n + 1)[:, None] < np.arange(n + 1)) & (memory <= speed.memory_bytes)
        stages[:, ~possible] = np.inf
        return stages

    def _hop(self, measures: _Measures, a: str, b: str, n_bytes: Sequence[int]) -> Array:
        """Return the cost of sending `n_bytes` from `a` to `b`: [D, N]."""
        link = way(self.links, a, b)
        seconds = np.array([hop_s(link, n) for n in n_bytes])
        nothing = np.zeros(len(n_bytes))
        return measures.select({}, alone=seconds.sum(axis=1), joules=nothing, busy=seconds[:, 1], bytes=nothing)


class _Measures:
    """Measures that the search adds up and compares, and the objectives computed from them."""

    def __init__(self, objectives: Sequence[str], in_flight: int, hosts: Sequence[str]) -> None:
        """hosts: that stages may crowd. Seconds that they keep all cores of each busy are sums, too."""
        self._objectives, self._in_flight = tuple(objectives), in_flight
        self._hosts = list(hosts) if "throughput" in objectives and in_flight > 1 else []
        self.sums = [name for name, users in _SUMS.items() if {*users} & {*objectives}] + self._hosts
        peaks = [name for name, users in _PEAKS.items() if {*users} & {*objectives}]
        self.names = [*self.sums, *peaks]

    def select(self, hosts: Mapping[str, Array], **values: Array) -> Array:
        """Select the needed measures: [D, ...]. hosts: seconds that each host is busy."""
        values = {host: hosts.get(host, np.zeros_like(values["alone"])) for host in self._hosts} | values
        return np.array([values[name] for name in self.names], float)

    def __call__(self, values: Array) -> Array:
        """Measures [D, N] -> objectives [K, N]: seconds, seconds an input, bytes, joules."""
        measures, costs = dict(zip(self.names, values, strict=True)), []
        for name in self._objectives:
            if name == "throughput":
                costs.append(
                    np.maximum.reduce(
                        [
                            measures["busy"],
                            measures["alone"] / self._in_flight,
                            *(measures[host] for host in self._hosts),
                        ]
                    )
                )
            else:
                costs.append(measures[{"latency": "alone", "memory": "bytes", "energy": "joules"}[name]])
        return np.array(costs)


def _segment_bytes(work: OnnxWork) -> Array:
    """[n+1, n+1]: `OnnxWork.held_bytes` of every stage [i, j); of j <= i anything."""
    weights = np.array(work.weights_before, float)
    memory: Array = weights[None, :] - weights[:, None]
    for a, b, n_bytes in work.again:
        memory[: a + 1, b + 1 :] -= n_bytes
    activations = np.array(work.activation_bytes, float)
    for i in range(work.segments):
        memory[i, i + 1 :] += np.maximum.accumulate(activations[i:])
    return memory
