"""Choosing a plan of `edge pareto`, and what to do with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apps.commands.options import UsageError

_SMALL = {"latency": "latency_s", "ttft": "ttft_s", "energy": "energy_j"}


def pick(result: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """The point that is called so: an id, "knee", or an axis for the best of it. UsageError where there is none.

    The knee and the best are those of the front as measured, where plans were measured: what is only predicted is not
    chosen before them.
    """
    points: list[Mapping[str, Any]] = result["points"]
    front = [point for point in points if point["on_front"]]
    front = [point for point in front if point["measured"]] or front
    if which == "knee":
        return next(point for point in front if point["knee"])
    if which == "throughput":
        return max(front, key=lambda point: _figure(point, "throughput_per_s"))
    if which == "memory":
        return min(front, key=lambda point: max(_figure(point, "memory_bytes").values()))
    if which in _SMALL:
        known = [point for point in front if _figure(point, _SMALL[which]) is not None]
        if known:
            return min(known, key=lambda point: _figure(point, _SMALL[which]))
    for point in points:
        if point["id"] == which:
            return point
    raise UsageError(
        f"there is no plan {which[:40]!r}; needed is one of {points[0]['id']} to {points[-1]['id']}, knee, latency,"
        " throughput or memory"
    )


def _figure(point: Mapping[str, Any], what: str) -> Any:
    """As measured, where it was; else as predicted."""
    found = (point["measured"] or {}).get(what)
    return point["predicted"][what] if found is None else found


def use(kind: str, point: Mapping[str, Any], saved: Path | None) -> str:
    """How to run it, in one line."""
    told = f"picked {point['id']}: {point['label']}"
    if saved is None:
        return f"{told}; --save FILE writes the plan"
    model = shlex.quote(point["model"])
    command = f"edge chat {model}" if kind == "llm" else f"edge run {model}"
    return f"{told}; saved. Next: {command} --plan {shlex.quote(str(saved))}"
