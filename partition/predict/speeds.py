"""Measured speeds for planning: devices that compute a model's parts, and links between devices.

These are plain values. `edge` measures them, `devices.catalog` estimates them, and a cluster file may override some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from partition import fields
from partition.errors import PlanError
from partition.predict.hosts import Host, demand
from partition.predict.hysteresis import lower_bound_factor

FASTEST_LINK_BYTES_PER_S = 50e9  # 400 Gbit/s; no memory behind a link can be faster
MOST_S = 3600.0  # largest accepted time of a measurement, such as a step or a round trip


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of the rows of a batch: measured points, with linear interpolation and extrapolation."""

    points: tuple[tuple[int, float], ...]  # (rows, seconds), ascending by rows

    def __post_init__(self) -> None:
        rows = [n for n, _ in self.points]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise PlanError(f"a curve at rows {rows}; expected one or more, ascending from 1")
        if not all(0 <= seconds <= MOST_S for _, seconds in self.points):
            raise PlanError(f"a curve of {[seconds for _, seconds in self.points]} seconds; expected 0 to {MOST_S:g}")

    def to_json(self) -> list[list[float]]:
        """Return [[rows, seconds], ...]."""
        return [[rows, seconds] for rows, seconds in self.points]

    @classmethod
    def from_json(cls, values: Any, where: str) -> Curve:
        """Read the curve that `to_json` wrote. Raises PlanError for invalid values."""
        points = []
        for i, point in enumerate(fields.items(values, where)):
            pair = fields.items(point, f"{where}[{i}]")
            if len(pair) != 2:
                raise PlanError(f"{where}[{i}]: {len(pair)} numbers; expected rows and seconds")
            points.append((fields.number(pair[0], f"{where}[{i}]"), fields.figure(pair[1], f"{where}[{i}]", MOST_S)))
        return cls(tuple(points))

    def at(self, rows: float) -> float:
        """Return the seconds of a step of this many rows, at least 0. Below the first point, its value counts."""
        if rows <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        (a, low), (b, high) = next((pair for pair in pairwise(self.points) if rows <= pair[1][0]), self.points[-2:])
        return max(0.0, low + (high - low) * (rows - a) / (b - a))

    def times(self, factor: float) -> Curve:
        """Return the curve with all seconds multiplied by `factor`."""
        return Curve(tuple((rows, seconds * factor) for rows, seconds in self.points))


@dataclass(frozen=True)
class DeviceSpeed:
    """Speeds of one device with one language model, or with one quantization type of it."""

    device: str  # a worker's address, or LOCAL, as in a plan
    name: str  # display name
    step_s: Curve  # seconds of a step outside of layers and head
    layer_s: Curve  # seconds of one average layer
    token_s: float  # seconds of a layer's attention per decode row and earlier token
    half_layer_s: Curve  # seconds with half of the heads and FFN columns; half of layer_s if it cannot be shared
    head_s: Curve  # seconds of the last norm and the whole head, computed for every row
    memory_bytes: int  # memory that the model may use
    runtime_bytes: int  # part of memory_bytes that a process takes in addition to weights and KV cache
    prompt_token_s: float | None = None  # token_s for a row of a long prompt; None: equal to token_s
    sum_s: float = 0.0  # processor seconds for one all-reduce: system calls, additions, cold caches
    disk_bytes_per_s: float | None = None  # read speed of weights from disk; None: the device cannot page
    watts: float | None = None  # power while the device computes
    idle_watts: float = 0.0  # power while it waits for other devices
    threads: int | None = None  # threads during the measurement; None: all threads that the device offers
    estimate: bool = False  # True if not measured
    preset: bool = False  # True for a preset, a device that is not there; it is also an estimate
    age_s: float = 0.0  # seconds since the measurement
    busy: bool = False  # True if other work used the device during the measurement
    key: str = ""  # key under which the figures are remembered
    host: Host | None = None  # machine that the device runs on; None: not shared
    shares_layers: bool = True  # False: the device computes whole layers only, as a browser's page does
    # The same device with its weights in GPU memory, which `memory_bytes` and `runtime_bytes` then describe. None: the
    # times above are those of the place where all weights are.
    gpu: DeviceSpeed | None = None

    def __post_init__(self) -> None:
        for name in ("disk_bytes_per_s", "watts"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise PlanError(f"{self.name}: {name} is {value}; expected a number above 0")
        if not 0 <= self.idle_watts <= (self.watts or math.inf):
            raise PlanError(
                f"{self.name}: idle_watts is {self.idle_watts:g}; expected 0 to watts, its power while it computes"
            )

    def times(self, factor: float) -> DeviceSpeed:
        """Return the same speeds with all computation slowed down by a factor."""
        curves = {name: getattr(self, name).times(factor) for name in _CURVES}
        prompt_token_s = None if self.prompt_token_s is None else self.prompt_token_s * factor
        gpu = None if self.gpu is None else self.gpu.times(factor)
        return replace(self, **curves, token_s=self.token_s * factor, prompt_token_s=prompt_token_s, gpu=gpu)

    @property
    def tiers(self) -> tuple[DeviceSpeed, ...]:
        """Speeds of each place where weights may be computed: the processor, and the GPU if it is described."""
        return (self,) if self.gpu is None else (self, self.gpu)

    @property
    def room_bytes(self) -> int:
        """Bytes of weights, KV cache and head that fit into the device's memories."""
        return sum(max(0, tier.memory_bytes - tier.runtime_bytes) for tier in self.tiers)

    @property
    def most_bytes(self) -> int:
        """Bytes of the device's memories."""
        return sum(tier.memory_bytes for tier in self.tiers)

    def row_token_s(self, *, prompt: bool) -> float:
        """Return the seconds of a layer's attention per row and earlier token. prompt: the rows share one sequence."""
        return self.prompt_token_s if prompt and self.prompt_token_s is not None else self.token_s

    @property
    def at_best(self) -> DeviceSpeed:
        """Lower bound of the times. Equal to the times if they were measured in a quiet moment."""
        part = lower_bound_factor(self.busy)
        return self if part == 1 else self.times(part)

    @property
    def seconds(self) -> float:
        """Seconds of one layer decoding one row."""
        return self.layer_s.at(1)

    @property
    def rate(self) -> float:
        """Layers per second in decoding."""
        return 1 / max(self.seconds, 1e-9)

    def part_s(self, part: float, rows: float) -> float:
        """Return the seconds of a layer if the device computes the fraction `part` of its weights.

        The value lies on a line through two measurements: part = 1 gives layer_s, and 1/2 gives half_layer_s.
        """
        whole, half = self.layer_s.at(rows), self.half_layer_s.at(rows)
        return max(0.0, half + (whole - half) * (2 * part - 1))

    def part_line_s(self, rows: float) -> tuple[float, float]:
        """Return (seconds of a layer without any share, additional seconds of the whole layer)."""
        constant = self.part_s(0.0, rows)
        return constant, self.part_s(1.0, rows) - constant


def next_to_another(speed: DeviceSpeed, free_bytes: int) -> DeviceSpeed:
    """Return a device for a model that does not page, beside another one that has filled its GPU before its memory.

    free_bytes: bytes that are free in both together.
    """
    gpu = speed.gpu and replace(speed.gpu, memory_bytes=max(0, free_bytes - speed.memory_bytes))
    return replace(
        speed, memory_bytes=min(speed.memory_bytes, free_bytes) if gpu else free_bytes, disk_bytes_per_s=None, gpu=gpu
    )


def together(speeds: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
    """Return the speeds of devices that compute at the same time. Devices slow down if their host has fewer cores
    than they have threads.
    """
    by_host = demand(speed.host for speed in speeds)
    return [speed.times(max(1.0, by_host[speed.host.id])) if speed.host else speed for speed in speeds]


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed of one direction of a link."""

    latency_s: float  # seconds of a small message, one way
    bytes_per_s: float
    estimate: bool = False
    age_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise PlanError(f"a link with a latency of {self.latency_s} s; expected 0 or more")
        if not 0 < self.bytes_per_s <= FASTEST_LINK_BYTES_PER_S:
            raise PlanError(
                f"a link of {self.bytes_per_s:.3g} bytes/s; expected a number above 0, at most"
                f" {FASTEST_LINK_BYTES_PER_S:.3g}, which no memory behind it exceeds; measure it again"
            )


NOWHERE = LinkSpeed(0.0, FASTEST_LINK_BYTES_PER_S)  # link from a device to itself


@dataclass(frozen=True)
class Links:
    """Links between devices, by (sender, receiver)."""

    between: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)

    def get(self, a: str, b: str) -> LinkSpeed:
        """Return the link from `a` to `b`. Raises PlanError if it was not measured."""
        if a == b:
            return NOWHERE
        try:
            return self.between[a, b]
        except KeyError:
            raise PlanError(f"the link from {a} to {b} was not measured; probe the devices again") from None

    def slowest(self, members: Sequence[str]) -> LinkSpeed:
        """Return the largest latency and the smallest bandwidth between any two of these devices."""
        ways = [self.get(a, b) for a in members for b in members if a != b] or [NOWHERE]
        return LinkSpeed(max(way.latency_s for way in ways), min(way.bytes_per_s for way in ways))


_CURVES = ("step_s", "layer_s", "half_layer_s", "head_s")
_NUMBERS = ("token_s", "memory_bytes", "runtime_bytes", "sum_s")
_OPTIONAL = ("prompt_token_s", "disk_bytes_per_s")


def speed_to_json(speed: DeviceSpeed) -> dict[str, Any]:
    """Return a device's measurements as plain values, without its name and age."""
    values: dict[str, Any] = {name: getattr(speed, name).to_json() for name in _CURVES}
    values |= {name: getattr(speed, name) for name in (*_NUMBERS, *_OPTIONAL, "busy")}
    return values if speed.gpu is None else values | {"gpu": speed_to_json(speed.gpu)}


def speed_of(values: Any, device: str, name: str, age_s: float) -> DeviceSpeed:
    """Read the speed that `speed_to_json` wrote.

    device, name: its current address and name.
    Raises PlanError for invalid values.
    """
    record = fields.record(values, name, (*_CURVES, *_NUMBERS), (*_OPTIONAL, "busy", "gpu"))
    numbers: dict[str, Any] = {}
    for key in (*_NUMBERS, *(name for name in _OPTIONAL if record.get(name) is not None)):
        value = record[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise PlanError(f"{name}: {key} is {fields.short(value)}; expected a number of 0 or more")
        numbers[key] = value
    curves: dict[str, Any] = {key: Curve.from_json(record[key], f"{name}: {key}") for key in _CURVES}
    gpu = record.get("gpu")
    if isinstance(gpu, dict) and gpu.get("gpu") is not None:  # refused here, because it may be nested very deeply
        raise PlanError(f"{name}: its gpu has a gpu of its own; leave that out")
    on_gpu = None if gpu is None else speed_of(gpu, device, f"{name}: gpu", age_s)
    return DeviceSpeed(device, name, **curves, **numbers, age_s=age_s, busy=record.get("busy") is True, gpu=on_gpu)
