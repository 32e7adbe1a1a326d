"""Preview of a switch to another plan: the changes in words and figures. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL, Plan, Range, Shard, Slice, Stage
from partition.slices.gguf_slice import slice_recipe
from quant.text import bytes_text, counted, listed, number_text

OWN = "this device"
_ANY_DIGEST = "0" * 64  # the size of a slice does not depend on it
_MOST_NAMED = 3  # devices named in a sentence
_FIGURES = ("latency_s", "throughput_per_s", "ttft_s", "memory_bytes", "in_flight")


@dataclass(frozen=True)
class Part:
    """The slice of one rank that computes."""

    copy: int  # number of the copy of the model
    device: str
    cut: Slice
    is_prefill: bool = False

    def text(self, plan: Plan) -> str:
        """Return the layers, and the heads if several devices share them, in words."""
        layers, heads = self.cut.layers, self.cut.heads
        text = "all layers" if len(layers) == plan.sizes.layers else f"layers {layers.start}-{layers.stop - 1}"
        if len(layers) == 1:
            text = f"layer {layers.start}"
        if len(heads) < plan.sizes.heads:
            text += f", heads {heads.start}-{heads.stop - 1}"
        return f"{text}, for prompts" if self.is_prefill else text


def parts(plan: Plan) -> Iterator[Part]:
    """Yield the parts of a plan, copy by copy."""
    for number, copy in enumerate(plan.copies):
        for placement in copy.placements:
            for rank, device in enumerate(placement.devices):
                if (cut := placement.slice(rank)).layers:
                    yield Part(number, device, cut, placement is copy.prefill)


def _key(plan: Plan) -> list[str]:
    """Return equal values for plans with equal parts."""
    return sorted(map(repr, parts(plan)))


def alone(plan: Plan) -> Plan:
    """Return the plan that runs the model of another plan on this device alone."""
    n = plan.sizes
    whole = Shard(LOCAL, Range(0, n.heads), Range(0, n.ff), Range(0, n.vocab))
    return Plan(plan.model, plan.model_digest, n, (Stage(Range(0, n.layers), (whole,)),))


def preview(path: Path, plan: Plan, before: Plan, front: Any) -> dict[str, Any]:
    """Return what a switch would change.

    path: file of the model.
    before: the present plan.
    front: JSON of a front, with predictions and names of devices.
    Raises the errors of reading the file, and CannotSlice if the model cannot be cut like this.
    """
    file, names = ModelFile.open(path), _names(front)
    present = {(part.device, part.cut) for part in parts(before)}
    devices = []
    for part in parts(plan):
        is_new = part.device != LOCAL and (part.device, part.cut) not in present
        devices.append(
            {
                "device": part.device,
                "name": names.get(part.device, part.device),
                "copy": part.copy,
                "layers": part.cut.layers.to_json(),
                "heads": part.cut.heads.to_json(),
                "for_prompts": part.is_prefill,
                "text": part.text(plan),
                "send_bytes": slice_recipe(file, _ANY_DIGEST, part.cut).n_bytes if is_new else 0,
            }
        )
    predicted, now = _figures(front, plan), _figures(front, before)
    same = _key(plan) == _key(before)
    words = ["The model already runs like this."] if same else list(_words(plan, before, devices, names))
    return {
        "status": "preview",
        "changes": [*words, *_speeds(predicted, now)],
        "same": same,
        "devices": devices,
        "send_bytes": sum(entry["send_bytes"] for entry in devices),
        "predicted": predicted,
        "now": now,
    }


def _words(plan: Plan, before: Plan, devices: list[dict[str, Any]], names: Mapping[str, str]) -> Iterator[str]:
    def name(device: str) -> str:
        return names.get(device, device)

    used, previous = plan.computing_devices, before.computing_devices
    yield (
        f"The model will run on {_on(used, names)} instead of {_on(previous, names)}."
        if set(used) != set(previous)
        else f"The model stays on {_on(used, names)}, with other parts of it on each device."
    )
    for copy in range(len(plan.copies)):
        own = [entry for entry in devices if entry["copy"] == copy]
        where = "; ".join(f"{entry['name']}: {entry['text']}" for entry in own)
        yield f"Copy {copy + 1}: {where}." if plan.replicas else f"{where[:1].upper()}{where[1:]}."
    for entry in devices:
        if entry["send_bytes"]:
            size = bytes_text(entry["send_bytes"])
            yield f"Up to {size} are sent to {entry['name']}; less if it still has them from an earlier run."
    if gone := [name(device) for device in previous if device not in used]:
        yield f"{listed(gone)} will not be used any more."
    yield "Answers in progress pause during the switch, and then continue."


def _on(devices: tuple[str, ...], names: Mapping[str, str]) -> str:
    if len(devices) > _MOST_NAMED:
        return counted(len(devices), "device")
    return listed([names.get(device, device) for device in devices])


def _speeds(predicted: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[str]:
    if predicted is None:
        return
    alone, together = 1 / predicted["latency_s"], predicted["throughput_per_s"]
    several = f"{number_text(together)} for {predicted['in_flight']} at once"
    if now is None or now == predicted:
        yield f"Expected: {number_text(alone)} tokens/s for one answer, {several}."
        return
    yield (
        f"Expected: {number_text(alone)} tokens/s for one answer (now {number_text(1 / now['latency_s'])}),"
        f" {several} (now {number_text(now['throughput_per_s'])})."
    )


def _names(front: Any) -> dict[str, str]:
    """Return the names of devices by address, as a front has them."""
    devices = front.get("devices", ()) if isinstance(front, dict) else ()
    named = {
        str(entry["address"]): str(entry["name"])
        for entry in (devices if isinstance(devices, list) else ())
        if isinstance(entry, dict) and "address" in entry and "name" in entry
    }
    return {**named, LOCAL: OWN}


def _figures(front: Any, plan: Plan) -> dict[str, Any] | None:
    """Return the measured or predicted figures of a plan, or None if the front does not have it."""
    own = _key(plan)
    points = front.get("points", ()) if isinstance(front, dict) else ()
    for point in points if isinstance(points, list) else ():
        try:
            if _key(Plan.from_json(point["plan"])) == own:
                figures = {**point["predicted"], **(point.get("measured") or {})}
                if figures["latency_s"] > 0 and figures["throughput_per_s"] >= 0:
                    return {key: figures[key] for key in _FIGURES}
        except (PlanError, KeyError, TypeError, ValueError):  # a file of the user; other points may be readable
            continue
    return None
