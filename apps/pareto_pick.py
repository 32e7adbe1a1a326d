"""Choosing a plan of `edge pareto`, and what to do with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apps.options import UsageError

_BEST = {"latency": "latency_s", "ttft": "ttft_s", "energy": "energy_j"}


def pick(result: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """The point that is called so: an id, "knee", or an axis for the best of it. UsageError where there is none."""
    points: list[Mapping[str, Any]] = result["points"]
    front = [point for point in points if point["on_front"]]
    if which == "knee":
        return next(point for point in front if point["knee"])
    if which == "throughput":
        return max(front, key=lambda point: point["predicted"]["throughput_per_s"])
    if which == "memory":
        return min(front, key=lambda point: max(point["predicted"]["memory_bytes"].values()))
    if which in _BEST:
        known = [point for point in front if point["predicted"][_BEST[which]] is not None]
        if known:
            return min(known, key=lambda point: point["predicted"][_BEST[which]])
    for point in points:
        if point["id"] == which:
            return point
    raise UsageError(
        f"there is no plan {which[:40]!r}; needed is one of {points[0]['id']} to {points[-1]['id']}, knee, latency,"
        " throughput or memory"
    )


def use(kind: str, point: Mapping[str, Any], saved: Path | None) -> str:
    """How to run it, in one line."""
    told = f"picked {point['id']}: {point['label']}"
    if saved is None:
        return f"{told}; --save FILE writes the plan"
    model = shlex.quote(point["model"])
    command = f"edge chat {model}" if kind == "llm" else f"edge run {model}"
    return f"{told}; saved. Next: {command} --plan {shlex.quote(str(saved))}"
