"""JSON files that contain plans: a saved plan, and the --json output of edge plan, edge pareto and edge simulate.

Commands that accept one of these files accept all of them.
"""

from __future__ import annotations

from typing import Any

PLANNED, PARETO, SIMULATED = "edge-planned-1", "edge-pareto-1", "edge-simulated-1"
SAVED = ("edge-plan-1", "edge-onnx-plan-1")  # equal to FORMAT in partition.plan.plan and partition.plan.onnx_plan
EXTRA_KEYS = ("predicted", "devices")  # extra fields that a saved plan may have for simulation


def plan_in(values: Any) -> Any:
    """Return the plan in such a file, as JSON; of a Pareto front, the plan at its knee.

    Other values are returned unchanged, so that the reader of plans refuses them.
    """
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
    """Return the point at the knee of a front, else the first point on the front, else the first point."""
    entries = [entry for entry in points if isinstance(entry, dict)] if isinstance(points, list) else []
    for name in ("knee", "on_front"):
        knee = next((entry for entry in entries if entry.get(name) is True), None)
        if knee is not None:
            return knee
    return next(iter(entries), None)
