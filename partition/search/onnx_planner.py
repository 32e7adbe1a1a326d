"""Planner of ONNX pipelines: exact search over devices, their order, and the cuts.

`partition.search.search` runs the search. This module computes the costs of stages and hops by the formulas of
`partition.predict.onnx_predict`, and converts solutions to plans. Inputs come from the owner, and outputs return to the
owner.
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

# Measures that add up, and the objectives that need them.
_SUMS = {"alone": ("latency", "throughput"), "joules": ("energy",)}
_PEAKS = {"busy": ("throughput",), "bytes": ("memory",)}


@dataclass(frozen=True)
class OnnxPlaced:
    """A plan with its prediction and objectives."""

    plan: OnnxPlan
    predicted: Prediction
    # In the requested order, smaller is better: seconds, seconds per input, bytes, joules.
    objectives: tuple[float, ...]


class OnnxPlanner:
    """Planner for one ONNX model on given devices."""

    def __init__(
        self,
        work: OnnxWork,
        speeds: Sequence[OnnxDevice],
        links: Links,
        model: str,
        digest: str,
        in_flight: int | None = None,
    ) -> None:
        """model, digest: name and digest of the model for its plans.
        in_flight: largest number of inputs in flight; None: enough to fill the pipeline.

        Raises PlanError without devices, for a repeated device, and if a device was measured with other segments.
        """
        names = [speed.device for speed in speeds]
        if not 1 <= len(names) == len(set(names)) <= MOST_STAGES:
            raise PlanError(f"the devices {', '.join(names)!s:.200}; expected 1 to {MOST_STAGES}, each once")
        for speed in speeds:
            if len(speed.segments_s) != work.segments:
                raise PlanError(
                    f"{speed.name}: {len(speed.segments_s)} segments were measured, {work.segments} are to be placed;"
                    " measure it again"
                )
        if in_flight is not None and not 1 <= in_flight <= MOST_IN_FLIGHT:
            raise PlanError(f"{in_flight} inputs in flight; expected 1 to {MOST_IN_FLIGHT}")
        self.work, self.speeds, self.links = work, tuple(speeds), links
        self.in_flight = in_flight
        self._model, self._digest = clean_name(model), digest

    def front(
        self, objectives: Sequence[str] = ("latency", "throughput"), caps: Sequence[float] | None = None
    ) -> tuple[list[OnnxPlaced], bool]:
        """Return the non-dominated plans, sorted by the first objective, and True if the search was exact.

        caps: largest allowed cost of each objective.

        Raises PlanError for an unknown objective.
        """
        beam = None if len(self.speeds) <= MOST_EXACT else BEAM
        result = front(self.problem(objectives, caps), beam=beam)
        return [self._placed(solution) for solution in result.solutions], result.exact

    def best(self, objective: str, caps: Mapping[str, float]) -> OnnxPlaced | None:
        """Return the best plan by an objective, or None if no plan fits. caps: largest allowed costs of objectives."""
        names, most = limited_by(objective, caps)
        return next(iter(self.front(names, most)[0]), None)

    def only_own(self) -> OnnxPlanner:
        """Return the planner for the owner's device alone. Raises PlanError if it was not measured."""
        return self.only(LOCAL)

    def only(self, device: str) -> OnnxPlanner:
        """Return the planner for one device alone."""
        speeds = [speed for speed in self.speeds if speed.device == device]
        return OnnxPlanner(self.work, speeds, self.links, self._model, self._digest, self.in_flight)

    def singles(self, objectives: Sequence[str] = ("latency", "throughput")) -> list[OnnxPlaced]:
        """Return the plan with the whole model on each device that has room for it, in the order of the devices."""
        return [placed for speed in self.speeds for placed in self.only(speed.device).front(objectives)[0]]

    def problem(self, objectives: Sequence[str], caps: Sequence[float] | None = None) -> Problem:
        """Return the search problem.

        Its measures are those that the objectives need. Sums: seconds and joules of one input. Peaks: seconds that one
        input occupies a stage or link, and bytes on a device.
        """
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
            if self.speeds[b].device == LOCAL:  # the owner can only have the first stage
                return np.full((len(measures.names), n + 1), np.inf)
            return self._hop(measures, self.speeds[a].device, self.speeds[b].device, self.work.crossing_bytes)

        most = None if caps is None else np.array(caps, float)
        return Problem(n, len(measures.sums), tuple(groups), hop, measures, most)

    def plan(self, solution: Solution) -> OnnxPlan:
        """Return the plan of a solution."""
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
        """Return the measures of every stage [i, j) on a device: [D, n+1, n+1]; inf if it does not fit."""
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
        """Return the measures of sending `n_bytes` from `a` to `b`: [D, N]."""
        link = way(self.links, a, b)
        seconds = np.array([hop_s(link, n) for n in n_bytes])
        nothing = np.zeros(len(n_bytes))
        return measures.select({}, alone=seconds.sum(axis=1), joules=nothing, busy=seconds[:, 1], bytes=nothing)


class _Measures:
    """Measures that the search adds and compares, and the objectives computed from them."""

    def __init__(self, objectives: Sequence[str], in_flight: int, hosts: Sequence[str]) -> None:
        """hosts: hosts that stages may overload. The seconds in which all cores of a host are busy are sums, too."""
        self._objectives, self._in_flight = tuple(objectives), in_flight
        self._hosts = list(hosts) if "throughput" in objectives and in_flight > 1 else []
        self.sums = [name for name, users in _SUMS.items() if {*users} & {*objectives}] + self._hosts
        peaks = [name for name, users in _PEAKS.items() if {*users} & {*objectives}]
        self.names = [*self.sums, *peaks]

    def select(self, hosts: Mapping[str, Array], **values: Array) -> Array:
        """Return the needed measures: [D, ...]. hosts: seconds that each host is busy."""
        values = {host: hosts.get(host, np.zeros_like(values["alone"])) for host in self._hosts} | values
        return np.array([values[name] for name in self.names], float)

    def __call__(self, values: Array) -> Array:
        """Convert measures [D, N] to objectives [K, N]: seconds, seconds per input, bytes, joules."""
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
    """Return `OnnxWork.held_bytes` of every stage [i, j): [n+1, n+1]. Cells with j <= i are arbitrary."""
    weights = np.array(work.weights_before, float)
    memory: Array = weights[None, :] - weights[:, None]
    for a, b, n_bytes in work.again:
        memory[: a + 1, b + 1 :] -= n_bytes
    activations = np.array(work.activation_bytes, float)
    for i in range(work.segments):
        memory[i, i + 1 :] += np.maximum.accumulate(activations[i:])
    return memory
