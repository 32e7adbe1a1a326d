"""Cost model of an ONNX model's plan: seconds, bytes and joules, by formula, from measurements.

Candidate cuts divide the graph into segments. A stage is a run of segments. One input at a time passes through a stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from partition.errors import PlanError
from partition.model.onnx_graph import OnnxGraph
from partition.model.onnx_shapes import Value
from partition.plan.onnx_cuts import Cut, routes
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL
from partition.predict.hosts import Host, crowding, used
from partition.predict.hysteresis import lower_bound_factor
from partition.predict.prediction import Prediction, StagePrediction
from partition.predict.speeds import Curve, Links, LinkSpeed
from quant.wire import WIRES

MOST_IN_FLIGHT = 64  # default limit on inputs in a pipeline


@dataclass(frozen=True)
class OnnxDevice:
    """Measured speeds of one device for one ONNX model divided into segments."""

    device: str  # a worker's address, or LOCAL, as in a plan
    name: str  # display name
    segments_s: tuple[float, ...]  # seconds of each segment, without the fixed time of a stage
    stage_s: float  # fixed seconds of a stage
    memory_bytes: int  # memory that the model may use
    runtime_bytes: int  # part of memory_bytes that a process takes in addition to weights and activations
    watts: float | None = None  # power while the device computes
    estimate: bool = False  # True if not measured
    age_s: float = 0.0  # seconds since the measurement
    busy: bool = False  # True if other work used the device during the measurement
    key: str = ""  # key under which the figures are remembered
    host: Host | None = None  # machine that the device runs on; None: not shared

    def __post_init__(self) -> None:
        if not all(0 <= seconds < math.inf for seconds in (*self.segments_s, self.stage_s)):
            raise PlanError(f"{self.name}: a segment that takes no finite time of 0 s or more; measure it again")
        if self.watts is not None and not 0 < self.watts < math.inf:
            raise PlanError(f"{self.name}: watts is {self.watts}; expected a number above 0")

    def times(self, factor: float) -> OnnxDevice:
        """Return the same speeds with all computation slowed down by a factor."""
        segments_s = tuple(seconds * factor for seconds in self.segments_s)
        return replace(self, segments_s=segments_s, stage_s=self.stage_s * factor)

    @property
    def preset(self) -> bool:
        """True for a preset. Devices of ONNX models are either presets or measured."""
        return self.estimate

    @property
    def at_best(self) -> OnnxDevice:
        """Lower bound of the times. Equal to the times if they were measured in a quiet moment."""
        part = lower_bound_factor(self.busy)
        return self if part == 1 else self.times(part)

    @cached_property
    def before_s(self) -> tuple[float, ...]:
        """[segments + 1]: seconds of the segments before each segment."""
        return tuple(accumulate(self.segments_s, initial=0.0))

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds of one input in the stage of segments [start, stop): stage_s plus the segments' times."""
        return self.stage_s + (self.before_s[stop] - self.before_s[start])


@dataclass(frozen=True)
class OnnxWork:
    """A graph with candidate cuts, and the bytes of its segments and boundaries."""

    positions: tuple[int, ...]  # [segments + 1]: number of nodes before each boundary, from 0 to all nodes
    labels: tuple[str, ...]  # [segments + 1]: name of the value before each boundary; "" at both ends
    # [segments + 1]: bytes that cross each boundary, from the model's inputs to its outputs.
    crossing_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]  # [segments]: bytes of weights
    # (a, b, bytes): weights that segment a shares with b, the next segment that uses them.
    again: tuple[tuple[int, int, int], ...]
    activation_bytes: tuple[int, ...]  # [segments]: largest bytes of inputs and outputs of one node

    @classmethod
    def from_graph(cls, graph: OnnxGraph, cuts: Sequence[Cut], wire: str = "f32") -> OnnxWork:
        """Return the work for a graph with ascending candidate cuts.

        wire: type of float32 tensors between stages. Tensors from and to the owner are not converted.

        Raises PlanError for an unknown wire type or an invalid cut, and CannotSlice for unknown shapes.
        """
        if wire not in WIRES:
            raise PlanError(f"the wire type {wire[:40]!r}; known are {', '.join(WIRES)}")
        positions = (0, *(cut.position for cut in cuts), len(graph.nodes))
        inputs, *between, outputs = routes(graph, positions[1:-1])
        users: dict[str, list[int]] = {}
        for segment, (start, stop) in enumerate(pairwise(positions)):
            for name in {name for node in graph.nodes[start:stop] for name in node.weights}:
                users.setdefault(name, []).append(segment)
        return cls(
            positions,
            ("", *(cut.label for cut in cuts), ""),
            (wire_bytes(inputs, "f32"), *(wire_bytes(values, wire) for values in between), wire_bytes(outputs, "f32")),
            tuple(graph.stage_weight_bytes(start, stop) for start, stop in pairwise(positions)),
            tuple((a, b, graph.weight_bytes[name]) for name, at in users.items() for a, b in pairwise(at)),
            tuple(graph.activation_bytes(start, stop) for start, stop in pairwise(positions)),
        )

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.positions) - 1

    @cached_property
    def weights_before(self) -> tuple[int, ...]:
        """[segments + 1]: bytes of weights of the segments before each segment. Shared weights count in every
        segment.
        """
        return tuple(accumulate(self.weight_bytes, initial=0))

    def held_bytes(self, start: int, stop: int) -> int:
        """Return the memory of the stage of segments [start, stop): each weight once, plus the largest activations."""
        shared = sum(n for a, b, n in self.again if start <= a and b < stop)
        weights = self.weights_before[stop] - self.weights_before[start] - shared
        return weights + max(self.activation_bytes[start:stop])

    def bounds(self, plan: OnnxPlan) -> tuple[int, ...]:
        """Return the boundary indices of a plan's cuts, including both ends. Raises PlanError if a cut is not a
        candidate.
        """
        positions = (0, *plan.cuts, plan.n_nodes)
        places = {position: i for i, position in enumerate(self.positions)}
        if plan.n_nodes != self.positions[-1] or not all(position in places for position in positions):
            raise PlanError(
                f"the plan cuts {plan.n_nodes} nodes at {list(plan.cuts)}; measured are {self.positions[-1]} nodes with"
                f" cuts at {list(self.positions[1:-1])!s:.200}"
            )
        return tuple(places[position] for position in positions)


def predict(
    plan: OnnxPlan,
    work: OnnxWork,
    speeds: Mapping[str, OnnxDevice],
    links: Links,
    in_flight: int | None = None,
) -> Prediction:
    """Predict the cost of `plan`.

    speeds: speeds by device.
    in_flight: inputs in the pipeline; None: enough to fill it.

        latency    = enter + sum over stages of (stage + hop)
        stage      = OnnxDevice.seconds of its segments
        hop, enter = latency of the link + bytes / bandwidth; 0 if the value stays on its device
        throughput = 1 / max(busiest, latency / in flight)
        busiest    = the longest stage, or bytes / bandwidth of the busiest link, or the time of a host's stages

    Each input takes at least the latency, so throughput is limited by latency / in flight (Little's law). The interval
    between two results is at least `busiest`.

    Raises PlanError if the plan, a device or a link was not measured.
    """
    bounds = work.bounds(plan)
    unknown = [device for device in plan.devices if device not in speeds]
    if unknown:
        raise PlanError(f"{', '.join(unknown)} was not measured; measured are {', '.join(speeds)}")
    ways = [way(links, a, b) for a, b in pairwise((LOCAL, *plan.devices, LOCAL))]
    moved = [hop_s(hop, work.crossing_bytes[bound]) for hop, bound in zip(ways, bounds, strict=True)]
    stages, joules = [], 0.0
    for i, (stage, (start, stop)) in enumerate(zip(plan.stages, pairwise(bounds), strict=True)):
        speed = speeds[stage.device]
        seconds = speed.seconds(start, stop)
        joules += seconds * (math.nan if speed.watts is None else speed.watts)
        stages.append(
            StagePrediction(
                devices=(stage.device,),
                what=f"up to {work.labels[stop] or 'its end'}",
                compute_s=seconds,
                busy_s=seconds,
                transfer_s=sum(moved[i + 1]),
                transfer_busy_s=moved[i + 1][1],
                memory_bytes={stage.device: speed.runtime_bytes + work.held_bytes(start, stop)},
                rows_s=Curve(((1, seconds),)),
            )
        )
    enter_s = sum(moved[0])
    latency_s = enter_s + sum(hop.compute_s + hop.transfer_s for hop in stages)
    if in_flight != 1:
        crowd = crowding([(used([speeds[hop.devices[0]].host]), hop.busy_s) for hop in stages])
        stages = [replace(hop, crowding=times) for hop, times in zip(stages, crowd, strict=True)]
    busiest_s = max(moved[0][1], *(max(hop.busy_s * hop.crowding, hop.transfer_busy_s) for hop in stages))
    n_in_flight = in_flight or filling(latency_s, busiest_s)
    return Prediction(
        latency_s=latency_s,
        throughput_per_s=1 / max(busiest_s, latency_s / n_in_flight, 1e-12),
        ttft_s=None,
        prompt=None,
        energy_j=None if math.isnan(joules) else joules,
        enter_s=enter_s,
        enter_busy_s=moved[0][1],
        stages=tuple(stages),
        in_flight=n_in_flight,
        microbatches=n_in_flight,
    )


def filling(latency_s: float, busiest_s: float) -> int:
    """Return the number of inputs that keep the busiest stage or link working: latency / busiest, within limits."""
    return min(MOST_IN_FLIGHT, max(1, math.ceil(latency_s / busiest_s))) if busiest_s else MOST_IN_FLIGHT


def way(links: Links, a: str, b: str) -> LinkSpeed | None:
    """Return the link from `a` to `b`, or None if nothing has to move."""
    return None if a == b else links.get(a, b)


def hop_s(link: LinkSpeed | None, n_bytes: int) -> tuple[float, float]:
    """Return (latency, busy seconds of the link). The transfer takes the sum of both."""
    return (0.0, 0.0) if link is None else (link.latency_s, n_bytes / link.bytes_per_s)


def wire_bytes(values: Sequence[Value], wire: str) -> int:
    """Return the bytes of tensors on the wire."""
    codec = WIRES[wire]
    return sum(
        codec.n_bytes(value.n_bytes // 4) if codec is not None and value.type == "float32" else value.n_bytes
        for value in values
    )
