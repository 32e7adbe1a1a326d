"""Files with plans in them: a saved plan, and what edge plan, edge pareto and edge simulate print with --json. Each
command that takes one takes all of them."""

from __future__ import annotations

from typing import Any

PLANNED, PARETO, SIMULATED = "edge-planned-1", "edge-pareto-1", "edge-simulated-1"
SAVED = ("edge-plan-1", "edge-onnx-plan-1")  # partition.plan.plan.FORMAT, partition.plan.onnx_plan.FORMAT
EXTRA_KEYS = ("predicted", "devices")  # what a saved plan may have beside itself, to be simulated


def plan_in(values: Any) -> Any:
    """The plan of such a file, as JSON: of a front the one at the knee. What is no such file stays as it is, for
    whoever reads plans to refuse it."""
    if not isinstance(values, dict):
        return values
    kind = values.get("format")
    if kind == SIMULATED:
        return plan_in(values.get("planned"))
    if kind == PLANNED:
        return values.get("plan")
    if kind == PARETO:
        chosen = at_knee(values.get("points"))
        return None if chosen is None else chosen.get("plan")
    if kind in SAVED:
        return {name: value for name, value in values.items() if name not in EXTRA_KEYS}
    return values


def at_knee(points: Any) -> dict[str, Any] | None:
    """The point of a front at its knee; else the first on the front, or the first of all."""
    entries = [entry for entry in points if isinstance(entry, dict)] if isinstance(points, list) else []
    for name in ("knee", "on_front"):
        knee = next((entry for entry in entries if entry.get(name) is True), None)
        if knee is not None:
            return knee
    return next(iter(entries), None)
