"""Plans as points of a Pareto front, and the choice of a good compromise on the front."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import Plan
from partition.predict.objectives import OBJECTIVES
from partition.predict.prediction import Prediction
from quant.front import non_dominated


@dataclass(frozen=True)
class Point:
    """A plan with its prediction."""

    plan: Plan | OnnxPlan
    predicted: Prediction
    parallel: str  # "single", "pipeline", "tensor", "hybrid" or "replicas"
    label: str  # short description of the plan
    type: str | None = None  # quantization type, if several are compared
    model: str = ""  # model file to run the plan with

    @cached_property
    def key(self) -> str:
        """Identifier that is equal for equal plans that run the same way."""
        identity: list[Any] = [self.plan.to_json(), self.predicted.microbatches, self.predicted.in_flight]
        if self.predicted.draft is not None:
            identity.append(self.predicted.draft.to_json())
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def objectives(self, axes: Sequence[str]) -> tuple[float, ...]:
        """Return the values of the axes, smaller is better: seconds, minus a rate, bytes on the fullest device,
        joules.
        """
        objectives = [OBJECTIVES[axis] for axis in axes]
        return tuple(objective.on_axis(getattr(self.predicted, objective.key)) for objective in objectives)


def on_front(values: Sequence[tuple[float, ...]]) -> list[bool]:
    """Return for each point whether it is on the Pareto front. Of equal points, only the first one is.

    Values that differ by less than a relative 1e-9 are equal.
    """
    rounded = [tuple(float(f"{x:.9g}") for x in point) for point in values]
    front = set(non_dominated(range(len(values)), lambda i: rounded[i]))
    return [i in front for i in range(len(values))]


def knee(values: Sequence[tuple[float, ...]]) -> int | None:
    """Return the knee of a front: the point nearest to the best of each axis, with axes scaled to the front's span.

    The distance is sqrt(sum over axes of ((value - least) / (most - least))^2). Return None without points.
    """
    if not values:
        return None
    axes = list(zip(*values, strict=True))
    spans = [(min(axis), max(axis) - min(axis) or 1.0) for axis in axes]

    def distance(i: int) -> float:
        return math.hypot(*((x - least) / span for x, (least, span) in zip(values[i], spans, strict=True)))

    return min(range(len(values)), key=lambda i: (distance(i), i))


def judged(
    predicted: Sequence[tuple[float, ...]], measured: Sequence[tuple[float, ...] | None]
) -> tuple[list[bool], int | None]:
    """Return (whether each point is on the front, index of the knee), by measurements if they exist.

    predicted: `Point.objectives` of each point.
    measured: the same values as measured, or None.

    A measured point is on the front if no other measured point dominates it. A point that is only predicted is on the
    front if no point at all dominates it. The knee is that of the measured front if anything was measured.
    """
    sure = [(i, values) for i, values in enumerate(measured) if values is not None]
    front = [False] * len(predicted)
    for (i, _), on in zip(sure, on_front([values for _, values in sure]), strict=True):
        front[i] = on
    promised = [(i, predicted[i]) for i, values in enumerate(measured) if values is None]
    every = on_front([values for _, values in (*sure, *promised)])
    for (i, _), on in zip(promised, every[len(sure) :], strict=True):
        front[i] = on
    among = [(i, values) for i, values in sure or promised if front[i]]
    among.sort(key=lambda pair: pair[1])
    middle = knee([values for _, values in among])
    return front, None if middle is None else among[middle][0]


def without_repeats(points: Sequence[Point]) -> list[Point]:
    """Return the points without repetitions of a plan that runs the same way. The first of equal points stays."""
    return list({point.key: point for point in reversed(points)}.values())[::-1]


def stages_text(predicted: Prediction, names: Mapping[str, str]) -> str:
    """Return a short text with the devices and layers of each stage of each copy. names: device names."""
    if predicted.copies:
        return "; ".join(f"copy {i}: {stages_text(copy, names)}" for i, copy in enumerate(predicted.copies, 1))
    return " | ".join(
        f"{'+'.join(names[device] for device in stage.devices)} {stage.what}" for stage in predicted.stages
    )


def promising(points: Sequence[Point], axes: Sequence[str]) -> list[int]:
    """Return the order in which to measure points.

    The order is: the knee of the front, its ends, then each time the point of the front that is farthest from the
    chosen ones. At last come the other points, nearest to the front first.
    """
    values = [point.objectives(axes) for point in points]
    front = [i for i, on in enumerate(on_front(values)) if on]
    front.sort(key=lambda i: values[i])
    middle = knee([values[i] for i in front])
    if middle is None:
        return []
    chosen = list(dict.fromkeys([front[middle], front[0], front[-1]]))
    spans = [max(axis) - min(axis) or 1.0 for axis in zip(*(values[i] for i in front), strict=True)]

    def apart(a: int, b: int) -> float:
        return math.hypot(*((x - y) / span for x, y, span in zip(values[a], values[b], spans, strict=True)))

    while len(chosen) < len(front):
        rest = [i for i in front if i not in chosen]
        chosen.append(max(rest, key=lambda i: (min(apart(i, j) for j in chosen), -i)))
    others = [i for i in range(len(points)) if i not in front]
    return chosen + sorted(others, key=lambda i: (min(apart(i, j) for j in front), i))
