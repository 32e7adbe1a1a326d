"""What is known of devices and links, and what bounds a plan, as plain values that name the devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from partition.predict.pareto import Point
from partition.predict.prediction import Prediction
from partition.predict.speeds import DeviceSpeed, speed_to_json

if TYPE_CHECKING:
    from edge.planning.spaces import PlanSpace
    from partition.predict.onnx_predict import OnnxDevice

_SPEEDS = ("layer_s", "half_layer_s", "head_s", "step_s", "token_s", "disk_bytes_per_s")


def known_json(space: PlanSpace) -> dict[str, Any]:
    """The devices and links that plans were made from."""
    known, names = space.known, space.names
    return {
        "devices": [
            {
                "name": speed.name,
                "address": speed.device,
                "estimate": speed.estimate,
                "measured_age_s": None if speed.estimate else round(speed.age_s, 1),
                "measured_while_busy": speed.busy,
                "corrected": getattr(speed, "corrected", 1.0),
                "memory_bytes": speed.memory_bytes,
                "speeds": _speeds_json(speed),
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


def beside(space: PlanSpace, point: Point) -> dict[str, Any]:
    """What a saved plan has beside itself, so that it can be simulated."""
    devices = [{"name": name, "address": device} for device, name in space.names.items()]
    return {"predicted": point.predicted.to_json(), "devices": devices}


def _speeds_json(speed: DeviceSpeed | OnnxDevice) -> dict[str, Any]:
    """What a device was measured, or is estimated, to take."""
    if not isinstance(speed, DeviceSpeed):
        return {"segments_s": list(speed.segments_s), "stage_s": speed.stage_s}
    values = speed_to_json(speed)
    return {name: values[name] for name in _SPEEDS}


def bound_text(predicted: Prediction, names: Mapping[str, str]) -> str:
    """What takes the most of the latency, with devices called by their names."""
    text = predicted.bound
    for device, name in sorted(names.items(), key=lambda one: -len(one[0])):
        text = text.replace(device, name) if device != "local" else text
    return text
