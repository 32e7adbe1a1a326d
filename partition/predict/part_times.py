"""Times of one rank's part of a model, computed from a profile. Simulated devices in a lab sleep for these times.

A profile is a preset of `devices.catalog`, or a measured speed with the sizes of the model used for the measurement:

    {"preset": "pi4"}
    {"preset": "laptop", "gpu": "rtx-3060", "gpu_memory_bytes": 4e9}
    {"speed": {...}, "layer_bytes": 24e6, "head_bytes": 54e6, "heads": 32}

`speed` has the form that `partition.predict.speeds.speed_to_json` writes, and `gpu` is the preset of a GPU. A device
whose speed has `disk_bytes_per_s` pages weights that do not fit. A profile may also have `rates`: bytes and operations
per second that the device reports about itself before it is measured.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from devices.catalog import CATALOG
from partition import fields
from partition.errors import PlanError
from partition.predict.presets import PartSizes, preset_speed
from partition.predict.speeds import DeviceSpeed, speed_of, speed_to_json

_MOST_BYTES = 1e15
_MOST_HEADS = 1 << 20


def profile_json(speed: DeviceSpeed, sizes: PartSizes) -> dict[str, Any]:
    """Return the profile of a measured device. sizes: sizes of the model used for the measurement."""
    of_model = {"layer_bytes": sizes.layer_bytes, "head_bytes": sizes.head_bytes, "heads": sizes.heads}
    return {"speed": speed_to_json(speed), **of_model}


class PartTimes:
    """Seconds of the parts of one step on one rank, without the all-reduces between them."""

    def __init__(self, profile: Any, sizes: PartSizes, *, last: bool, alone: bool) -> None:
        """profile: a profile as described above.
        sizes: sizes of the rank's slice.
        last: the rank has the head.
        alone: the rank's layers contain no all-reduces.

        Raises PlanError for an invalid profile.
        """
        speed, layer_bytes, head_bytes, heads = _read(profile, sizes)
        self.memory_bytes, self.disk_bytes_per_s = speed.memory_bytes, speed.disk_bytes_per_s
        self._speed = speed
        self._is_one = alone and sizes.heads == heads  # each layer is computed as one part
        self._attention = sizes.attention_bytes / layer_bytes
        self._ff = sizes.ff_bytes / layer_bytes
        self._whole = sizes.layer_bytes / layer_bytes
        self._heads = sizes.heads / heads
        self._head = sizes.head_bytes / head_bytes if last else 0.0
        self.gpu: PartTimes | None = None  # times of parts on the device's GPU, and its memory
        if speed.gpu is not None:
            self.gpu = copy(self)
            self.gpu.memory_bytes, self.gpu._speed = speed.gpu.memory_bytes, speed.gpu

    def step_s(self, rows: int) -> float:
        """Return the seconds of a step outside of layers and head."""
        return self._speed.step_s.at(rows)

    def attention_s(self, rows: int, behind: int, behind_shared: int = 0) -> float:
        """Return the seconds of a layer up to its first all-reduce.

        behind: earlier tokens that the rows attend to, summed over rows.
        behind_shared: the same for rows that share their sequence with other rows of the step, such as prompt rows.
        """
        token_s, prompt_token_s = self._speed.row_token_s(prompt=False), self._speed.row_token_s(prompt=True)
        own = (behind * token_s + behind_shared * prompt_token_s) * self._heads
        if self._is_one:
            return self._whole * self._speed.layer_s.at(rows) + own
        constant, slope = self._speed.part_line_s(rows)
        return constant / 2 + self._attention * slope + own

    def ff_s(self, rows: int) -> float:
        """Return the seconds of the rest of a layer; 0 if the first part is the whole layer."""
        if self._is_one:
            return 0.0
        constant, slope = self._speed.part_line_s(rows)
        return constant / 2 + self._ff * slope

    def head_s(self, outputs: int) -> float:
        """Return the seconds of the head; 0 for a rank without it."""
        return self._head * self._speed.head_s.at(outputs) if outputs else 0.0


def _read(profile: Any, sizes: PartSizes) -> tuple[DeviceSpeed, float, float, int]:
    """Return (speed, bytes of a layer, bytes of the head, heads); the sizes are those of the measured model."""
    preset = profile.get("preset") if isinstance(profile, dict) else None
    if preset is not None:
        if preset not in CATALOG:
            raise PlanError(f"profile: preset is {fields.short(preset)}; expected one of {', '.join(CATALOG)}")
        speed = preset_speed(CATALOG[preset], sizes, preset, preset)
        if (name := profile.get("gpu")) is not None:
            if name not in CATALOG:
                raise PlanError(f"profile: gpu is {fields.short(name)}; expected one of {', '.join(CATALOG)}")
            n_bytes = fields.number(profile.get("gpu_memory_bytes"), "profile.gpu_memory_bytes", fields.MOST_BYTES)
            gpu = preset_speed(CATALOG[name], sizes, name, name)
            speed = replace(speed, gpu=replace(gpu, memory_bytes=n_bytes))
        return speed, sizes.layer_bytes, max(1.0, sizes.head_bytes), max(1, sizes.heads)
    record = fields.record(profile, "profile", ("speed", "layer_bytes", "head_bytes", "heads"), ("rates",))
    layer_bytes, head_bytes = (
        fields.figure(record[key], f"profile.{key}", _MOST_BYTES) for key in ("layer_bytes", "head_bytes")
    )
    heads = fields.number(record["heads"], "profile.heads", _MOST_HEADS)
    if not (layer_bytes and head_bytes and heads):
        raise PlanError("profile: layer_bytes, head_bytes and heads must be above 0")
    return replace(speed_of(record["speed"], "profile", "profile", 0.0)), layer_bytes, head_bytes, heads
