"""Plans, devices and links as text and as plain values, with devices called by their names."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partition.plan.formats import PLANNED
from partition.plan.plan import LOCAL
from partition.predict.objectives import OBJECTIVES
from partition.predict.pareto import Point
from partition.predict.prediction import Prediction
from partition.predict.speeds import DeviceSpeed, speed_to_json
from quant.text import age_text, bytes_text, counted, number_text, seconds_text

if TYPE_CHECKING:
    from edge.planning.space import PlanSpace
    from partition.predict.onnx_predict import OnnxDevice
    from partition.search.changes import Change

STAGE_COLUMNS = ("stage", "device", "holds", "computes", "then sends", "memory")
_OLD_S = 60.0  # a note reports measurements older than this
_SPEEDS = ("layer_s", "half_layer_s", "head_s", "step_s", "token_s", "prompt_token_s", "disk_bytes_per_s")


def known_json(space: PlanSpace) -> dict[str, Any]:
    """Return the devices and links behind the plans."""
    known, names = space.known, space.names
    return {
        "devices": [
            {
                "name": speed.name,
                "address": speed.device,
                "estimate": speed.estimate,
                "preset": speed.preset,
                "measured_age_s": None if speed.estimate else round(speed.age_s, 1),
                "measured_while_busy": speed.busy,
                "memory_bytes": speed.memory_bytes,
                "speeds": _speeds_json(speed),
                **_gpu_json(speed),
            }
            for speed in known.speeds
        ],
        "links": [
            {
                "from": names.get(a, a),
                "to": names.get(b, b),
                "latency_s": way.latency_s,
                "bytes_per_s": way.bytes_per_s,
                "estimate": way.estimate,
                "age_s": round(way.age_s, 1),
            }
            for (a, b), way in known.links.between.items()
        ],
        "notes": list(known.notes),
    }


def joining_commands(known: Mapping[str, Any], used: Collection[str], model: str | None) -> list[str]:
    """Return the commands that join a device for each preset of a plan and plan again; [] for a plan without presets.

    known: object of `known_json`.
    used: names of the plan's devices.
    model: model as the user typed it; None: the bundled model.
    """
    others = [entry for entry in known["devices"] if entry["address"] != LOCAL]
    presets = [entry["name"] for entry in others if entry["preset"] and entry["name"] in used]
    if not presets:
        return []
    addresses = ",".join(entry["address"] for entry in others)
    again = ["edge", "plan", *([model] if model else []), "--workers", addresses]
    return [*(f"edge cluster invite {name}" for name in presets), shlex.join(again)]


def notes(space: PlanSpace) -> list[str]:
    """Return notes on the measurements behind the plans, one sentence each."""
    known = space.known
    oldest_s = max(measured.age_s for measured in (*known.speeds, *known.links.between.values()))
    notes = [f"measured {age_text(oldest_s)}; --fresh measures again"] if oldest_s > _OLD_S else []
    busy = [measured.name for measured in known.speeds if measured.busy]
    if busy:
        notes.append(f"measured while busy: {', '.join(busy)}; it may be faster, and is measured again next time")
    return [*known.notes, *notes]


def planned_json(
    space: PlanSpace,
    objective: str,
    point: Point,
    why: str,
    changes: Sequence[Change],
    encoder: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the object of `edge plan --json`: the best plan by an objective, the reason, and the gain of changes.

    encoder: place of the image encoder, from `place_json`.
    """
    return {
        "format": PLANNED,
        "kind": space.kind,
        "model": str(space.path),
        "type": space.type,
        "objective": objective,
        "plan": point.plan.to_json(),
        "parallel": point.parallel,
        "predicted": point.predicted.to_json(),
        "why": why,
        "changes": [change.to_json() for change in changes],
        "encoder": encoder,
        **known_json(space),
    }


def saved_figures(space: PlanSpace, point: Point) -> dict[str, Any]:
    """Return the values to save with a plan, so that it can be simulated."""
    devices = [{"name": name, "address": device} for device, name in space.names.items()]
    return {"predicted": point.predicted.to_json(), "devices": devices}


def _speeds_json(speed: DeviceSpeed | OnnxDevice) -> dict[str, Any]:
    """Return the measured or estimated times of a device."""
    if not isinstance(speed, DeviceSpeed):
        return {"segments_s": list(speed.segments_s), "stage_s": speed.stage_s}
    values = speed_to_json(speed)
    return {name: values[name] for name in _SPEEDS}


def _gpu_json(speed: DeviceSpeed | OnnxDevice) -> dict[str, Any]:
    """Return the memory and the times of a device's GPU; {} if it is not described."""
    gpu = speed.gpu if isinstance(speed, DeviceSpeed) else None
    if gpu is None:
        return {}
    return {"gpu": {"memory_bytes": gpu.memory_bytes, "fixed_bytes": gpu.runtime_bytes, "speeds": _speeds_json(gpu)}}


def bound_text(predicted: Prediction, names: Mapping[str, str]) -> str:
    """Return the part that takes most of the latency, with devices called by their names."""
    text = predicted.bound
    for device, name in sorted(names.items(), key=lambda item: -len(item[0])):
        text = text.replace(device, name) if device != "local" else text
    return text


def stage_rows(predicted: Prediction, names: Mapping[str, str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns, and a row for each stage.

    Stages of a prefill placement come last, with the time of the whole prompt. Stages of several copies are numbered by
    copy and stage.
    """
    if predicted.copies:
        copies = ((i, _stage_rows(copy, names)) for i, copy in enumerate(predicted.copies, 1))
        return STAGE_COLUMNS, [(f"copy {i}: {number}", *rest) for i, rows in copies for number, *rest in rows]
    rows = _stage_rows(predicted, names)
    if predicted.prefill is not None:
        stages = zip(predicted.prefill.stages, _stage_rows(predicted.prefill, names), strict=True)
        for stage, (number, device, holds, _, sends, memory) in stages:
            tokens, prompt_s = stage.rows_s.points[-1]
            computes = f"{seconds_text(prompt_s)} for {counted(tokens, 'token')}"
            rows.append((f"prompts {number}", device, holds, computes, sends, memory))
    return STAGE_COLUMNS, rows


def _stage_rows(predicted: Prediction, names: Mapping[str, str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for i, stage in enumerate(predicted.stages):
        sums = f", {number_text(1e3 * stage.sums_s)} of it sums" if stage.sums_s else ""
        paged = f", pages {bytes_text(stage.paged_bytes)}" if stage.paged_bytes else ""
        memory = " + ".join(bytes_text(n) for n in stage.memory_bytes.values())
        rows.append(
            (
                str(i),
                " + ".join(names.get(device, device) for device in stage.devices),
                stage.what,
                f"{seconds_text(stage.compute_s)}{sums}",
                seconds_text(stage.transfer_s),
                f"{memory}{paged}",
            )
        )
    return rows


def prediction_rows(predicted: Prediction, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the figures of the whole plan: its objectives except memory, which stages show, and its bottleneck."""
    thing = "token" if predicted.ttft_s is not None else "input"
    many = f"{predicted.in_flight} in flight"
    if predicted.ttft_s is not None:
        many = f"{counted(predicted.in_flight, 'request')} in {counted(predicted.microbatches, 'microbatch')}"
    if predicted.copies:
        many = f"{counted(predicted.in_flight, 'request')} on {len(predicted.copies)} copies"
    prompt = f" of a prompt of {predicted.prompt} tokens"
    more = {"latency": ", one alone", "throughput": f" with {many}", "ttft": prompt, "divergence": " from the model"}
    figures = ((name, row, getattr(predicted, row.key)) for name, row in OBJECTIVES.items())
    rows = [
        (row.label, f"{row.describe(row.cost(figure), thing)}{more.get(name, '')}")
        for name, row, figure in figures
        if isinstance(figure, float | int)
    ]
    for i, copy in enumerate(predicted.copies, 1):
        rate = f"{number_text(copy.throughput_per_s)} tokens/s"
        rows.append((f"copy {i}", f"{rate} with {counted(copy.in_flight, 'request')}"))
    if predicted.draft is not None:
        draft = predicted.draft
        gain = f"{draft.tokens:.2f} tokens a pass; {seconds_text(predicted.plain_s)} a token without"
        rows.append(("drafts", f"{draft.describe(names)}: {gain}"))
    if predicted.prefill is not None:
        took = f"computed in {seconds_text(predicted.prefill.ttft_s or 0.0)}, handed over"
        rows.append(("prompts", f"{took} {seconds_text(predicted.hand_over_s)} later, then one more token"))
    return [*rows, *_places(predicted, names), ("bound", bound_text(predicted, names))]


def _places(predicted: Prediction, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a line about each device with a described GPU: the bytes in each of its memories, and on its disk."""
    rows = []
    for placement in predicted.copies or (predicted, *([predicted.prefill] if predicted.prefill else [])):
        for stage in placement.stages:
            for device, on_gpu in (stage.gpu_bytes or {}).items():
                parts = [(on_gpu, "on the GPU"), (stage.memory_bytes[device] - on_gpu, "in memory")]
                parts += [(stage.paged_bytes, "on disk")] if stage.paged_bytes else []
                rows.append((names.get(device, device), ", ".join(f"{bytes_text(n)} {where}" for n, where in parts)))
    return rows
