"""Pareto front of a model's plans, predicted and measured, and the user's pick from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edge.arguments import checked
from edge.cluster.fleet import Fleet
from edge.planning.choice import PlanChoice
from edge.planning.describe import bound_text, known_json, saved_figures
from edge.planning.measuring import Measurements, measure
from edge.planning.plan_options import DEFAULTS, PlanOptions
from edge.planning.space import PlanSpace, within_divergence
from edge.tasks import SILENT, Steps
from partition.errors import PlanError
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import Plan
from partition.predict.objectives import AXES, OBJECTIVES, searched
from partition.predict.pareto import Point, judged, on_front

FORMAT = "edge-pareto-1"


class Front:
    """Plans of one model, or of one model in several types: the Pareto front and dominated plans."""

    def __init__(
        self,
        spaces: Sequence[PlanSpace],
        axes: Sequence[str] = AXES[:2],
        options: PlanOptions = DEFAULTS,
        *,
        max_divergence: float | None = None,
    ) -> None:
        """Find the plans.

        axes: objectives from AXES.
        options: options that the spaces were created with.
        max_divergence: types with a higher divergence are left out.
        Raises PlanError with needed and available resources if no plan fits or no type is within the limit.
        """
        self.options, self.axes = options, tuple(axes)
        self._all_spaces = tuple(spaces)
        self.spaces = tuple(within_divergence(spaces, max_divergence))
        self.points: list[Point] = []
        self.space_of: dict[str, PlanSpace] = {}  # plan space by key of a point
        # The front over all types consists of points on the fronts of single types. A search within one type can
        # ignore divergence, because divergence is the same for all plans of a file.
        for space in self.spaces:
            points = space.points(searched(axes))
            self.points += points
            self.space_of |= {point.key: space for point in points}
        if not self.points:
            self.spaces[0].best("latency", {})  # raises an error with the reason
        self.measured: Measurements = {}  # measured figures by key of a point
        self.errors: dict[str, str] = {}  # reasons for missing measurements by key of a point

    def __repr__(self) -> str:
        return f"<edge.Front of {self.spaces[0].title}: {len(self.points)} plans by {' and '.join(self.axes)}>"

    @checked
    def measure(self, most: int, fleet: Fleet | None, *, fresh: bool = False, steps: Steps = SILENT) -> None:
        """Run the `most` most promising plans on their devices. The front then uses the measured values.

        If measuring is interrupted, the front uses the values measured so far. Measurements of the last day are reused
        unless `fresh`.
        """
        self.measured, self.errors = {}, {}
        measure(
            self.points, self.space_of, fleet, self.axes, most,
            fresh=fresh, steps=steps, measured=self.measured, errors=self.errors,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the object of `edge pareto --json`: the inputs of planning, and all plans, front first."""
        values = [point.objectives(self.axes) for point in self.points]
        chosen = [
            _measured_values(self.measured[p.key], p, self.axes) if p.key in self.measured else None
            for p in self.points
        ]
        front, middle = judged(values, chosen)
        indexes = [i for i, index in enumerate(chosen) if index is not None]
        best = on_front([chosen[i] or () for i in indexes])
        on_measured = {i for i, on in zip(indexes, best, strict=True) if on}
        as_predicted = on_front(values)

        def place(i: int) -> tuple[bool, tuple[float, ...]]:
            return not front[i], chosen[i] or values[i]

        order = sorted(range(len(self.points)), key=place)
        return {
            "format": FORMAT,
            "kind": self.spaces[0].kind,
            "model": self.spaces[0].title,
            "objectives": [OBJECTIVES[axis].key for axis in self.axes],
            "concurrency": self.points[0].predicted.in_flight,
            "exact": all(space.exact for space in self.spaces),
            "pairs_gap": gap if math.isfinite(gap := max(space.pairs_gap for space in self.spaces)) else None,
            "replicas_gap": gap if math.isfinite(gap := max(space.replicas_gap for space in self.spaces)) else None,
            **known_json(self.spaces[0]),
            "notes": list(dict.fromkeys(note for space in self.spaces for note in space.known.notes)),
            "types": [
                {
                    "type": space.type,
                    "model": str(space.path),
                    "size_bytes": space.size_bytes,
                    "divergence": space.divergence,
                    "left_out": space not in self.spaces,  # exceeds the divergence limit
                }
                for space in self._all_spaces
                if space.type is not None
            ],
            "points": [
                {
                    "id": f"p{number}",
                    **self._described(self.points[i]),
                    "on_front": front[i],
                    "predicted_on_front": as_predicted[i],
                    "knee": i == middle,
                    "measured_on_front": i in on_measured if chosen[i] is not None else None,
                }
                for number, i in enumerate(order, 1)
            ],
        }

    def _described(self, point: Point) -> dict[str, Any]:
        """Return the figures of one plan, independent of other plans, with devices called by their names."""
        space, plan = self.space_of[point.key], point.plan
        return {
            "label": point.label,
            "type": point.type,
            "model": point.model,
            "parallel": point.parallel,
            "plan": plan.to_json(),
            "microbatches": point.predicted.microbatches,
            "devices": [space.names[device] for device in plan.all_devices],
            "predicted": {
                **point.predicted.renamed(space.names).to_json(),
                "bound": bound_text(point.predicted, space.names),
            },
            "measured": self.measured.get(point.key),
            "error": self.errors.get(point.key),
        }

    @checked
    def pick(self, which: str) -> PlanChoice:
        """Return one plan: "knee", an objective for its best plan, or an id of `to_json`.

        If plans were measured, the knee and the best plans are chosen among these. Raises PlanError if `which` is
        none of these.
        """
        picked = pick(self.to_json(), which)
        point = self._point(picked)
        space = self.space_of[point.key]
        why = f"{which} of the front: {point.label}"
        figures = saved_figures(space, point)
        return PlanChoice(space.path, point.plan, why, point.predicted, self.options, figures, file=space.file)

    def plan(self, picked: Mapping[str, Any]) -> tuple[Plan | OnnxPlan, dict[str, Any]]:
        """Return the plan of a point of `to_json`, and the figures to save with it."""
        point = self._point(picked)
        return point.plan, saved_figures(self.space_of[point.key], point)

    def _point(self, picked: Mapping[str, Any]) -> Point:
        """Return the point for an entry of `to_json`."""
        return next(
            point
            for point in self.points
            if point.plan.to_json() == picked["plan"]
            and point.predicted.microbatches == picked["microbatches"]
            and point.predicted.to_json()["draft"] == picked["predicted"]["draft"]
        )


def pick(result: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """Return the point with an id, the "knee", or the best point by an objective.

    If plans on the front were measured, the knee and the best point are chosen among the measured ones. Raises
    PlanError if there is no such point.
    """
    points: list[Mapping[str, Any]] = result["points"]
    front = [point for point in points if point["on_front"]]
    front = [point for point in front if point["measured"]] or front
    if which == "knee":
        return next(point for point in front if point["knee"])
    if (row := OBJECTIVES.get(which)) is not None:
        known = [point for point in front if _figure(point, row.key) is not None]
        if known:
            return min(known, key=lambda point: row.on_axis(_figure(point, row.key)))
    for point in points:
        if point["id"] == which:
            return point
    raise PlanError(
        f"there is no plan {which[:40]!r}; choose one of {points[0]['id']} to {points[-1]['id']}, knee,"
        f" {', '.join(OBJECTIVES)}"
    )


def _figure(point: Mapping[str, Any], what: str) -> Any:
    """Return the measured value if available, else the predicted one."""
    measured = (point["measured"] or {}).get(what)
    return point["predicted"][what] if measured is None else measured


def _measured_values(measured: dict[str, Any], point: Point, axes: Sequence[str]) -> tuple[float, ...]:
    """Return the objectives of a measured point. Unmeasured values, such as energy, are the predicted ones."""
    objectives = [OBJECTIVES[axis] for axis in axes]
    predicted = zip(objectives, point.objectives(axes), strict=True)
    return tuple(row.on_axis(measured[row.key]) if row.key in measured else value for row, value in predicted)
