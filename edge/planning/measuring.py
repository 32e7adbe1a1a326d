"""Measure the most promising plans on the real workers. Measurements of the last day are reused.

A measurement is doubtful if its rounds differ, or if it is far from the prediction. It is repeated after all others,
until two visits agree. The better measurement counts, because other work only slows a plan down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from devices.remembered import Remembered
from edge.cluster.fleet import Fleet
from edge.errors import EdgeError, Interrupted
from edge.tasks import SILENT, Steps
from partition.predict.pareto import Point, promising

if TYPE_CHECKING:
    from edge.planning.space import PlanSpace

Values = dict[str, Any]
Measurements = dict[str, Values]

VISITS = 3  # maximum number of measurements of a plan
SCATTER = 0.15  # relative difference of rounds or visits that causes another measurement
OFF = 0.5  # relative difference from the prediction that causes another measurement
INTERRUPTED = "interrupted before it was measured"


def measure(
    points: Sequence[Point],
    space_of: Mapping[str, PlanSpace],
    fleet: Fleet | None,
    axes: Sequence[str],
    most: int,
    *,
    fresh: bool = False,
    steps: Steps = SILENT,
    measured: Measurements,
    errors: dict[str, str],
) -> None:
    """Measure the `most` most promising plans.

    measured: receives the figures of plans, by key of a point.
    errors: receives the reasons for failures, by key of a point.
    Each result is stored and cached immediately, so that the next command continues after an interruption.
    """
    remembered = Remembered("measured-plans")
    runnable = [points[i] for i in promising(points, axes) if space_of[points[i].key].can_run(points[i])]
    chosen = runnable[:most]
    keys = {point.key: space_of[point.key].measured_key(point, fleet) for point in chosen}
    for point in chosen:
        known = None if fresh else remembered.get(keys[point.key])
        if known is not None and "visits" in known[0]:  # otherwise written by an older version
            measured[point.key] = known[0] | {"age_s": round(known[1], 1)}
    try:
        for visit in range(VISITS):
            in_question = [
                point for point in chosen if point.key not in errors and in_doubt(point, measured.get(point.key))
            ]
            if not in_question:
                break
            with steps.step("Measuring again" if visit else "Measuring plans", len(in_question), "plans") as show:
                for i, point in enumerate(in_question):
                    show(i, what=point.label)
                    space = space_of[point.key]
                    try:
                        values = space.measure(point, fleet).to_json()
                    except Interrupted:
                        raise
                    except EdgeError as error:
                        errors[point.key] = str(error)
                        steps.say(f"{point.label} could not be measured: {error}")
                        continue
                    values["memory_bytes"] = {space.names.get(d, d): n for d, n in values["memory_bytes"].items()}
                    merged = better(measured.get(point.key), values)
                    remembered.put(keys[point.key], merged)
                    measured[point.key] = merged | {"age_s": 0.0}
                show(len(in_question))
    except (KeyboardInterrupt, SystemExit, Interrupted):
        errors |= {point.key: INTERRUPTED for point in chosen if point.key not in measured.keys() | errors.keys()}
        raise
    for point in chosen:
        if point.key in measured and point.predicted.latency_s > (1 + OFF) * measured[point.key]["latency_s"]:
            # nothing makes a plan faster, so its devices were measured in a slow moment
            space_of[point.key].forget(point)
    for key in measured.keys() & errors.keys():  # an earlier measurement succeeded
        del errors[key]


def in_doubt(point: Point, measured: Values | None) -> bool:
    """Return whether to measure a plan: it was never measured, or its figures are doubtful."""
    if measured is None:
        return True
    if measured["visits"] >= VISITS or measured["agree"]:
        return False
    return measured["visits"] > 1 or measured["spread"] > SCATTER or is_off(point.predicted.to_json(), measured)


def is_off(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> bool:
    """Return whether a prediction differs from the measurement by more than OFF."""
    pairs = [(predicted[what], measured[what]) for what in ("latency_s", "throughput_per_s")]
    return any(not 1 / (1 + OFF) <= said / max(was, 1e-12) <= 1 + OFF for said, was in pairs)


def better(before: Values | None, now: Values) -> Values:
    """Merge the earlier measurements of a plan with a new one.

    Return the best values, with the number of measurements (`visits`), whether two visits agree (`agree`), and the
    relative difference of rounds or visits (`spread`).
    """
    if before is None:
        return now | {"visits": 1, "agree": False}
    slower, faster = sorted((before["latency_s"], now["latency_s"]), reverse=True)
    less, more = sorted((before["throughput_per_s"], now["throughput_per_s"]))
    apart = max(slower / faster, more / max(less, 1e-12)) - 1
    best = {"latency_s": faster, "throughput_per_s": more}
    if "ttft_s" in now:
        best["ttft_s"] = min(before["ttft_s"], now["ttft_s"])
    agree = apart <= SCATTER
    return now | best | {"visits": before["visits"] + 1, "agree": agree, "spread": apart}
