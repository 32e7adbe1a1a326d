"""Plans as points: which are on the front, and which of these is a good compromise."""

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
    """A plan, and what it is predicted to do."""

    plan: Plan | OnnxPlan
    predicted: Prediction
    parallel: str  # single, pipeline, tensor, hybrid
    label: str  # the plan in a few words
    type: str | None = None  # of the weights, where several are compared
    model: str = ""  # the file to run it with

    @cached_property
    def key(self) -> str:
        """The same for the same plan, run the same way."""
        identity: list[Any] = [self.plan.to_json(), self.predicted.microbatches, self.predicted.in_flight]
        if self.predicted.draft is not None:
            identity.append(self.predicted.draft.to_json())
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def objectives(self, axes: Sequence[str]) -> tuple[float, ...]:
        """Each to be small: seconds, minus a rate, bytes on the fullest device, joules."""
        objectives = [OBJECTIVES[axis] for axis in axes]
        return tuple(objective.on_axis(getattr(self.predicted, objective.key)) for objective in objectives)


def on_front(values: Sequence[tuple[float, ...]]) -> list[bool]:
    """Return for each point whether it is on the Pareto front. Of equal points the first is.

    Values that differ by less than a part in a billion are equal.
    """
    rounded = [tuple(float(f"{x:.9g}") for x in point) for point in values]
    front = set(non_dominated(range(len(values)), lambda i: rounded[i]))
    return [i in front for i in range(len(values))]


def knee(values: Sequence[tuple[float, ...]]) -> int | None:
    """Return the knee of a front: the point nearest to the best of each axis, axes scaled to the front's span.

    sqrt(sum over axes of ((value - least) / (most - least))^2); None without points.
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
    """(of each, whether it is on the front; the number of the knee): by measurement where there is one.

    predicted, measured: `Point.objectives`, and the same as measured; None if it was not. What was measured is on
    the front where nothing else that was measured dominates it: a promise does not. What was only predicted is where
    nothing at all does. The knee is that of the front as measured, where anything was.
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
    """The first of each plan that is run the same way."""
    return list({point.key: point for point in reversed(points)}.values())[::-1]


def stages_text(predicted: Prediction, names: Mapping[str, str]) -> str:
    """Stages in a few words: who holds what. names: of devices."""
    return " | ".join(
        f"{'+'.join(names[device] for device in stage.devices)} {stage.what}" for stage in predicted.stages
    )


def promising(points: Sequence[Point], axes: Sequence[str]) -> list[int]:
    """The order in which to measure points: the knee of the front, its ends, then whatever of it is the farthest from
    those before; at last the others, those nearest to the front first."""
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
