"""Measuring the most promising plans on the real workers; what was measured in the last day is taken from then."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apps.planning import Space
    from edge.fleet import Fleet
    from partition.pareto import Point

Measurements = dict[str, dict[str, Any]]


def measure(
    args: argparse.Namespace, points: Sequence[Point], of: Mapping[str, Space], fleet: Fleet | None
) -> tuple[Measurements, dict[str, str]]:
    """(what --measure plans did, why others could not be measured), by the key of a point.

    Each is remembered as soon as it is measured, so that an interrupted command goes on where it was.
    """
    from apps.progress import progress
    from edge.errors import EdgeError
    from edge.remembered import Remembered
    from partition.errors import CannotSlice, PlanError
    from partition.pareto import promising
    from transport.errors import TransportError

    remembered = Remembered("measured-plans")
    found: Measurements = {}
    errors: dict[str, str] = {}
    runnable = [points[i] for i in promising(points, args.axes) if of[points[i].key].can_run(points[i])]
    chosen = runnable[: args.measure]
    with progress("Measuring plans", len(chosen), "plans") as bar:
        for i, point in enumerate(chosen):
            bar.update(i, what=point.label)
            space = of[point.key]
            key = space.measured_key(point, fleet)
            known = None if args.fresh else remembered.get(key)
            if known is not None:
                found[point.key] = known[0] | {"age_s": round(known[1], 1)}
                continue
            try:
                values = space.measure(point, fleet).to_json()
            except (EdgeError, PlanError, CannotSlice, TransportError) as error:
                errors[point.key] = str(error)
                print(f"edge pareto: {point.label} could not be measured: {error}", file=sys.stderr)
                continue
            values["memory_bytes"] = {space.names.get(d, d): n for d, n in values["memory_bytes"].items()}
            remembered.put(key, values)
            found[point.key] = values | {"age_s": 0.0}
        bar.update(len(chosen))
    return found, errors
