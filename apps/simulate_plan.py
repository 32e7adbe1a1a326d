"""What `edge simulate` reads: the predictions of `edge plan --json` and `edge pareto --json`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.options import UsageError

if TYPE_CHECKING:
    from partition.prediction import Prediction

PLANNED, PARETO = "edge-planned-1", "edge-pareto-1"  # formats of apps.plan and apps.pareto
MOST_BYTES = 64 << 20  # of a file that is read


def read_planned(path: Path, point: str | None) -> tuple[Prediction, dict[str, str], str | None]:
    """The prediction with devices called by their names, the names by address, and which point of a front it is.

    point: an id, "knee", or None for the knee, else the first on the front. PlanError for a file that is not one of
    `edge plan --json` or `edge pareto --json`, UsageError for a point that is not there, OSError.
    """
    from partition.errors import PlanError

    try:
        values = json.loads(read_text(path))
        if not isinstance(values, dict) or values.get("format") not in (PLANNED, PARETO):
            raise PlanError("it is not what edge plan --json or edge pareto --json writes, with predictions")
        names = _names(values.get("devices", []))
        if values["format"] == PARETO:
            chosen = _point(values, point)
            return _prediction(chosen, names), names, chosen["id"]
        if point is not None:
            raise UsageError(f"--point is of edge pareto; {path} has one plan")
        return _prediction(values, names), names, None
    except (ValueError, RecursionError, OverflowError) as error:  # among them PlanError, and what is not JSON
        raise PlanError(f"{path} cannot be simulated: {error}") from None


def read_text(path: Path) -> str:
    """What a file says; UsageError where that is more than MOST_BYTES, ValueError where it is no text, OSError."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES >> 20} MiB, which is the most that is read")
    return content.decode()


def _names(devices: Any) -> dict[str, str]:
    from partition import fields

    found: dict[str, str] = {}
    for i, one in enumerate(fields.items(devices, "devices")):
        known = one if isinstance(one, dict) else {}
        address = fields.text(known.get("address"), f"devices[{i}].address")
        found[address] = fields.text(known.get("name"), f"devices[{i}].name")
    return found if len(set(found.values())) == len(found) else {}  # then addresses tell them apart


def _point(values: dict[str, Any], wanted: str | None) -> dict[str, Any]:
    """The point of this id; else the knee, else the first on the front."""
    from partition import fields
    from partition.errors import PlanError

    points = fields.items(values.get("points"), "points")
    for i, one in enumerate(points):
        if not isinstance(one, dict):
            raise PlanError(f"points[{i}]: {fields.told(one)}; needed is an object")
        fields.text(one.get("id"), f"points[{i}].id")
    if not points:
        raise PlanError("points is empty; needed is one plan or more")
    found: dict[str, Any] | None
    if wanted is None or wanted == "knee":
        found = next((one for one in points if one.get("knee") is True), None)
        if found is None and wanted is None:
            found = next((one for one in points if one.get("on_front") is True), points[0])
    else:
        found = next((one for one in points if one["id"] == wanted), None)
    if found is None:
        raise UsageError(
            f"there is no plan {wanted!r:.60}; needed is one of {points[0]['id']} to {points[-1]['id']}, or knee"
        )
    return found


def _prediction(values: dict[str, Any], names: dict[str, str]) -> Prediction:
    from partition.prediction import Prediction

    predicted = Prediction.from_json(values.get("predicted"))
    stages = tuple(
        replace(stage, devices=tuple(names.get(device, device) for device in stage.devices))
        for stage in predicted.stages
    )
    return replace(predicted, stages=stages)
