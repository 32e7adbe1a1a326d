"""Input of a simulation: a saved or printed plan with its predictions, and times of requests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partition import fields
from partition.errors import PlanError
from partition.plan.formats import PARETO, PLANNED, SAVED, SIMULATED, at_knee, plan_in
from partition.plan.plan import Range
from partition.predict.prediction import NO_LAYERS, Prediction
from partition.simulate.arrivals import MOST_REQUESTS, Arrivals, TraceError, closed, poisson, trace

MOST_BYTES = 64 << 20  # maximum size of a file
REQUESTS, GEN_TOKENS = 200, 128  # default number of requests, and of tokens in an answer


@dataclass(frozen=True)
class Planned:
    """A plan and its predictions, read from a file."""

    predicted: Prediction  # prediction, with device names instead of addresses
    names: dict[str, str]  # device names by address
    point: str | None  # id of the point, for a front
    known: dict[str, Any]  # the plan in the format of edge plan


def read_planned(path: Path, point: str | None) -> Planned:
    """Return the plan in a file of edge plan, edge pareto or edge simulate.

    point: an id or "knee"; None: the knee, or the first point on the front if there is no knee.
    Raises PlanError if the file is of another kind or has no predictions, or if the point does not exist; OSError if it
    cannot be read.
    """
    content = _content(path)
    try:
        values = json.loads(content.decode())
        if isinstance(values, dict) and values.get("format") == SIMULATED:
            values = values.get("planned")
        kind = values.get("format") if isinstance(values, dict) else None
        if kind not in (PLANNED, PARETO, *SAVED):
            raise PlanError("it is not a plan: use a file of edge plan, edge pareto or edge simulate")
        devices = values.get("devices", [])
        names = _names(devices)
        if point is not None and kind != PARETO:
            raise PlanError("--point is for files of edge pareto; this file has one plan")
        values_of_plan = _point(values, point) if kind == PARETO else values
        if kind in SAVED:
            _check_beside(values)
        plan = plan_in(values_of_plan if kind in SAVED else values_of_plan.get("plan"))
        known = {"format": PLANNED, "plan": plan, "predicted": values_of_plan.get("predicted"), "devices": devices}
        return Planned(
            Prediction.from_json(values_of_plan.get("predicted")).renamed(names),
            names,
            values_of_plan["id"] if kind == PARETO else None,
            known,
        )
    except (ValueError, RecursionError, OverflowError) as error:  # includes PlanError and JSON errors
        raise PlanError(f"{path} cannot be simulated: {error}") from None


def arrivals(
    predicted: Prediction,
    kind: str,
    value: float | str,
    *,
    requests: int | None = None,
    prompt: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
) -> Arrivals:
    """Return arrivals of requests.

    kind: "poisson" with a rate per second, "closed" with a number of clients, or "trace" with a file.
    requests, prompt, tokens: number of requests, and tokens of each; None: from the trace or the plan.
    Raises PlanError for too many requests, and for tokens with an ONNX model; TraceError for an invalid trace; OSError
    if the file cannot be read.
    """
    of_text = predicted.prompt is not None
    if not of_text and (prompt or tokens):
        option = "--prompt-tokens" if prompt else "--gen-tokens"
        raise PlanError(f"{option} is for language models; this plan is for an ONNX model")
    if max(requests or 0, int(value) if kind == "closed" else 0) > MOST_REQUESTS:
        raise PlanError(f"the maximum is {MOST_REQUESTS:,} requests or clients")
    prompt, tokens = prompt or predicted.prompt or 1, (tokens or GEN_TOKENS) if of_text else 1
    if kind == "poisson":
        return poisson(float(value), requests or REQUESTS, prompt, tokens, seed)
    if kind == "closed":
        return closed(int(value), requests or max(REQUESTS, int(value)), prompt, tokens)
    path = Path(str(value))
    content = _content(path)
    try:
        requests_of_trace = trace(content.decode().splitlines(), prompt, tokens, requests or MOST_REQUESTS)
        if not of_text and any((arrival.prompt, arrival.tokens) != (1, 1) for arrival in requests_of_trace.requests):
            raise TraceError("tokens are for language models; for an ONNX model give only the seconds")
        return requests_of_trace
    except ValueError as error:
        raise TraceError(f"{path} cannot be used as a trace: {error}") from None


def _content(path: Path) -> bytes:
    """Read a file. Raises PlanError if it exceeds MOST_BYTES, or OSError if it cannot be read."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise PlanError(f"{path} has more than {MOST_BYTES >> 20} MiB, which is the maximum")
    return content


def _names(devices: Any) -> dict[str, str]:
    names: dict[str, str] = {}
    for i, entry in enumerate(fields.items(devices, "devices")):
        known = entry if isinstance(entry, dict) else {}
        address = fields.text(known.get("address"), f"devices[{i}].address")
        names[address] = fields.text(known.get("name"), f"devices[{i}].name")
    return names if len(set(names.values())) == len(names) else {}  # otherwise addresses distinguish them


def _check_beside(plan: dict[str, Any]) -> None:
    """Raise PlanError if a saved plan has no predictions, or if they do not match because it was edited."""
    if "predicted" not in plan:
        raise PlanError("it has no predictions; edge plan --save and edge pareto --save write them")
    predicted = plan["predicted"] if isinstance(plan["predicted"], dict) else {}
    _check_stages(plan.get("stages"), predicted.get("stages"))
    replicas, copies = plan.get("replicas"), predicted.get("copies")
    if isinstance(replicas, list) and isinstance(copies, list):
        for replica, copy in zip(replicas, copies[1:], strict=False):
            if isinstance(replica, dict) and isinstance(copy, dict):
                _check_stages(replica.get("stages"), copy.get("stages"))


def _check_stages(stages: Any, said: Any) -> None:
    """Raise PlanError if the stages of a saved plan differ from those that were predicted."""
    if isinstance(stages, list) and isinstance(said, list):
        own = [_stage_parts(stage) for stage in stages]
        predicted = [_said(stage, stage_parts) for stage, stage_parts in zip(said, own, strict=False)]
        if own != predicted or len(own) != len(said):
            raise PlanError("it was edited after it was predicted; make it again with edge plan --save")


def _stage_parts(stage: Any) -> tuple[list[Any], str]:
    """Return the devices of a stage of a saved plan, and its layers ("" for an ONNX model)."""
    known = stage if isinstance(stage, dict) else {}
    shards = known.get("shards", [known])
    shards = [shard for shard in shards if isinstance(shard, dict)] if isinstance(shards, list) else []
    return [shard.get("device") for shard in shards], _layers(known.get("layers"))


def _layers(layers: Any) -> str:
    known = isinstance(layers, list) and len(layers) == 2 and all(isinstance(n, int) for n in layers)
    if not known:
        return ""
    return f"layers {Range(layers[0], layers[1])}" if layers[0] < layers[1] else NO_LAYERS


def _said(stage: Any, parts: tuple[list[Any], str]) -> tuple[Any, Any]:
    """Return the devices and the layers of a predicted stage, in the form of `_stage_parts`."""
    known = stage if isinstance(stage, dict) else {}
    return known.get("devices"), known.get("what") if parts[1] else ""


def _point(values: dict[str, Any], point_id: str | None) -> dict[str, Any]:
    """Return the point with this id. None: the knee, or the first point on the front if there is no knee."""
    points = fields.items(values.get("points"), "points")
    for i, point in enumerate(points):
        if not isinstance(point, dict):
            raise PlanError(f"points[{i}]: {fields.short(point)}; expected an object")
        fields.text(point.get("id"), f"points[{i}].id")
    if not points:
        raise PlanError("points is empty; at least one plan is needed")
    wants_knee = point_id in (None, "knee")
    chosen = at_knee(points) if wants_knee else next((point for point in points if point["id"] == point_id), None)
    if point_id == "knee" and chosen is not None and chosen.get("knee") is not True:
        chosen = None
    if chosen is None:
        raise PlanError(
            f"there is no plan {point_id!r:.60}; choose one of {points[0]['id']} to {points[-1]['id']}, or knee"
        )
    return chosen
