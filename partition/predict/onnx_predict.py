"""Cost model of an ONNX model's plan: seconds, bytes and joules, by formula, from measurements.

The candidate cuts divide a graph into segments. A stage is segments in a row; one input at a time passes through it.
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

MOST_IN_FLIGHT = 64  # inputs that a pipeline keeps under way, where nothing smaller is asked for


@dataclass(frozen=True)
class OnnxDevice:
    """Speeds of one device with one ONNX model that is cut into segments."""

    device: str  # as in a plan: a worker's address, or LOCAL
    name: str  # for people
    segments_s: tuple[float, ...]  # each segment, once, beside what every stage takes
    stage_s: float  # seconds of a stage beside its segments
    memory_bytes: int  # memory the model may take there
    runtime_bytes: int  # part of it that a process takes beside weights and activations
    watts: float | None = None  # while it computes
    estimate: bool = False  # not measured
    age_s: float = 0.0  # since it was measured
    busy: bool = False  # it was measured while something else kept the device busy
    quiet_s: float | None = None  # seconds of the whole model in the last remembered quiet moment
    key: str = ""  # key under which the figures are remembered
    host: Host | None = None  # where it runs; None: on a machine of its own

    def __post_init__(self) -> None:
        if not all(0 <= seconds < math.inf for seconds in (*self.segments_s, self.stage_s)):
            raise PlanError(f"{self.name}: a segment that takes no finite time of 0 s or more; measure it again")
        if self.watts is not None and not 0 < self.watts < math.inf:
            raise PlanError(f"{self.name}: watts is {self.watts}; needed is a number above 0")

    def times(self, factor: float) -> OnnxDevice:
        """Return the same speeds with all computing slowed by a factor."""
        segments_s = tuple(seconds * factor for seconds in self.segments_s)
        quiet_s = None if self.quiet_s is None else self.quiet_s * factor
        return replace(self, segments_s=segments_s, stage_s=self.stage_s * factor, quiet_s=quiet_s)

    @property
    def at_best(self) -> OnnxDevice:
        """The lower bound of its figures: the same where they were measured in a quiet moment."""
        part = lower_bound_factor(self.seconds(0, len(self.segments_s)), self.busy, self.quiet_s)
        return self if part == 1 else self.times(part)

    @cached_property
    def before_s(self) -> tuple[float, ...]:
        """[segments + 1]: seconds of the segments before each."""
        return tuple(accumulate(self.segments_s, initial=0.0))

    def seconds(self, start: int, stop: int) -> float:
        """Return seconds of one input through the stage of segments [start, stop): stage_s + their sum."""
        return self.stage_s + (self.before_s[stop] - self.before_s[start])


@dataclass(frozen=True)
class OnnxWork:
    """A graph that can be cut in these places, in bytes."""

    positions: tuple[int, ...]  # [segments + 1]: nodes before each boundary: 0, ascending, all of them
    labels: tuple[str, ...]  # [segments + 1]: what is just before it; "" at both ends
    crossing_bytes: tuple[int, ...]  # [segments + 1]: what crosses there; the model's inputs first, its outputs last
    weight_bytes: tuple[int, ...]  # [segments]: of its weights
    again: tuple[tuple[int, int, int], ...]  # (a, b, bytes): weights of segment a that b, the next to, uses as well
    activation_bytes: tuple[int, ...]  # [segments]: the most that one of its nodes takes and makes

    @classmethod
    def from_graph(cls, graph: OnnxGraph, cuts: Sequence[Cut], wire: str = "f32") -> OnnxWork:
        """A graph with these candidate cuts, which ascend. wire: of float32 between stages; what the owner hands over
        and gets back goes as it is. PlanError for cuts that are none, CannotSlice for shapes that nobody knows."""
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
        """[segments + 1]: bytes of the weights of the segments before each; shared ones count in all of them."""
        return tuple(accumulate(self.weight_bytes, initial=0))

    def held_bytes(self, start: int, stop: int) -> int:
        """Return memory of the stage of segments [start, stop): its weights, each once, and the largest of its
        activations."""
        shared = sum(n for a, b, n in self.again if start <= a and b < stop)
        weights = self.weights_before[stop] - self.weights_before[start] - shared
        return weights + max(self.activation_bytes[start:stop])

    def bounds(self, plan: OnnxPlan) -> tuple[int, ...]:
        """The boundaries that a plan cuts at, both ends among them. PlanError if one was not a candidate."""
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
    """Predict the cost of `plan` on devices of these speeds, by device. in_flight: inputs; None: as many as fill the
    pipeline.

        latency    = enter + sum over stages of (stage + hop), where
        stage      = OnnxDevice.seconds of its segments
        hop, enter = latency of the link + bytes / its bandwidth; 0 if the owner keeps what it has
        throughput = 1 / max(busiest, latency / in flight)
        busiest    = the longest stage, or bytes / bandwidth of the busiest link, or what stages of one host take there

    Of so many inputs in flight each takes the latency at least (Little's law); in no time less than `busiest` does
    another one complete. PlanError if the plan, a device or a link was not measured.
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
    """Inputs in flight that keep what is busiest at work all the time, where that many may be: latency / busiest."""
    return min(MOST_IN_FLIGHT, max(1, math.ceil(latency_s / busiest_s))) if busiest_s else MOST_IN_FLIGHT


def way(links: Links, a: str, b: str) -> LinkSpeed | None:
    """The link from `a` to `b`; None if nothing has to move."""
    return None if a == b else links.get(a, b)


def hop_s(link: LinkSpeed | None, n_bytes: int) -> tuple[float, float]:
    """(latency, how long the bytes keep the link busy); they take both together."""
    return (0.0, 0.0) if link is None else (link.latency_s, n_bytes / link.bytes_per_s)


def wire_bytes(values: Sequence[Value], wire: str) -> int:
    """Return the bytes of tensors on the wire."""
    codec = WIRES[wire]
    return sum(
        codec.n_bytes(value.n_bytes // 4) if codec is not None and value.type == "float32" else value.n_bytes
        for value in values
    )
