"""Measured speeds that planning uses: of devices computing a model's parts, and of the links between them.

Plain values. `edge` measures them, `devices.catalog` makes estimates of them, and a cluster file may override some.
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

FASTEST_LINK_BYTES_PER_S = 50e9  # 400 Gbit/s: a link that is said to do more contradicts the memory behind it
MOST_S = 3600.0  # for anything that is measured, such as a step or a round trip; longer times are refused


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by the rows of a batch: measured at some, on straight lines between them and beyond the last two."""

    points: tuple[tuple[int, float], ...]  # (rows, seconds), rows ascending

    def __post_init__(self) -> None:
        rows = [n for n, _ in self.points]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise PlanError(f"a curve at rows {rows}; needed are one or more, ascending from 1")
        if not all(0 <= seconds <= MOST_S for _, seconds in self.points):
            raise PlanError(f"a curve of {[seconds for _, seconds in self.points]} seconds; needed are 0 to {MOST_S:g}")

    def to_json(self) -> list[list[float]]:
        """[[rows, seconds], ...]."""
        return [[rows, seconds] for rows, seconds in self.points]

    @classmethod
    def from_json(cls, values: Any, where: str) -> Curve:
        """The curve that `to_json` wrote; PlanError names what is wrong."""
        points = []
        for i, point in enumerate(fields.items(values, where)):
            pair = fields.items(point, f"{where}[{i}]")
            if len(pair) != 2:
                raise PlanError(f"{where}[{i}]: {len(pair)} numbers; needed are rows and seconds")
            points.append((fields.number(pair[0], f"{where}[{i}]"), fields.figure(pair[1], f"{where}[{i}]", MOST_S)))
        return cls(tuple(points))

    def at(self, rows: float) -> float:
        """Seconds of a step of so many rows, never less than 0. Below the first point it is the first's."""
        if rows <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        (a, low), (b, high) = next((pair for pair in pairwise(self.points) if rows <= pair[1][0]), self.points[-2:])
        return max(0.0, low + (high - low) * (rows - a) / (b - a))

    def times(self, factor: float) -> Curve:
        """The same, so many times as long."""
        return Curve(tuple((rows, seconds * factor) for rows, seconds in self.points))


@dataclass(frozen=True)
class DeviceSpeed:
    """Speeds of one device with one language model, or one type of its weights."""

    device: str  # as in a plan: a worker's address, or LOCAL
    name: str  # for people
    step_s: Curve  # seconds of a step beside its layers and its head
    layer_s: Curve  # one layer, the average one
    token_s: float  # seconds of a layer's attention for each row of a decoding step and each earlier token
    half_layer_s: Curve  # half of its heads and of its FFN columns; a half of layer_s where it cannot be shared
    head_s: Curve  # the last norm and all rows of the head, for every row of the batch
    memory_bytes: int  # memory the model may take there
    runtime_bytes: int  # part of it that a process takes beside weights and KV cache
    prompt_token_s: float | None = None  # as token_s for a row of a long prompt; None: the same
    sum_s: float = 0.0  # processor time for its part in one all-reduce: system calls, adding, cold caches
    disk_bytes_per_s: float | None = None  # it reads weights at, where it pages; None: it cannot
    watts: float | None = None  # while it computes
    threads: int | None = None  # threads it was measured with, if not as many as the device offers
    estimate: bool = False  # not measured
    age_s: float = 0.0  # since it was measured
    busy: bool = False  # it was measured while something else kept the device busy
    quiet_s: float | None = None  # seconds of a layer decoding one row in the last remembered quiet moment
    key: str = ""  # key under which the figures are remembered
    host: Host | None = None  # where it runs; None: on a machine of its own

    def __post_init__(self) -> None:
        for name in ("disk_bytes_per_s", "watts"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise PlanError(f"{self.name}: {name} is {value}; needed is a number above 0")

    def times(self, factor: float) -> DeviceSpeed:
        """Return the same speeds with all computing slowed by a factor."""
        curves = {name: getattr(self, name).times(factor) for name in _CURVES}
        quiet_s = None if self.quiet_s is None else self.quiet_s * factor
        prompt_token_s = None if self.prompt_token_s is None else self.prompt_token_s * factor
        token_s = self.token_s * factor
        return replace(self, **curves, token_s=token_s, prompt_token_s=prompt_token_s, quiet_s=quiet_s)

    def row_token_s(self, *, prompt: bool) -> float:
        """Return seconds of a layer's attention for each row and each earlier token. prompt: rows have one sequence."""
        return self.prompt_token_s if prompt and self.prompt_token_s is not None else self.token_s

    @property
    def at_best(self) -> DeviceSpeed:
        """The lower bound of its figures: the same where they were measured in a quiet moment."""
        part = lower_bound_factor(self.seconds, self.busy, self.quiet_s)
        return self if part == 1 else self.times(part)

    @property
    def seconds(self) -> float:
        """Return seconds of one layer, decoding one row."""
        return self.layer_s.at(1)

    @property
    def rate(self) -> float:
        """Layers a second, decoding."""
        return 1 / max(self.seconds, 1e-9)

    def part_s(self, part: float, rows: float) -> float:
        """Seconds of a layer of which the device computes `part`, by weights, for so many rows.

        A straight line through the half and the whole, both measured: part = 1 gives layer_s, 1/2 half_layer_s.
        """
        whole, half = self.layer_s.at(rows), self.half_layer_s.at(rows)
        return max(0.0, half + (whole - half) * (2 * part - 1))

    def part_line_s(self, rows: float) -> tuple[float, float]:
        """Return the seconds of a layer of which the device has nothing, and what a whole one takes more."""
        constant = self.part_s(0.0, rows)
        return constant, self.part_s(1.0, rows) - constant


def together(speeds: Sequence[DeviceSpeed]) -> list[DeviceSpeed]:
    """The devices where all of them compute at once: those of a host that has fewer cores than they have threads take
    so many times as long."""
    by_host = demand(speed.host for speed in speeds)
    return [speed.times(max(1.0, by_host[speed.host.id])) if speed.host else speed for speed in speeds]


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed of one direction between two devices."""

    latency_s: float  # a small message, one way
    bytes_per_s: float
    estimate: bool = False
    age_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise PlanError(f"a link with a latency of {self.latency_s} s; needed is 0 or more")
        if not 0 < self.bytes_per_s <= FASTEST_LINK_BYTES_PER_S:
            raise PlanError(
                f"a link of {self.bytes_per_s:.3g} bytes/s; needed is a number above 0, at most"
                f" {FASTEST_LINK_BYTES_PER_S:.3g}, which no memory behind it exceeds; measure it again"
            )


NOWHERE = LinkSpeed(0.0, FASTEST_LINK_BYTES_PER_S)  # from a device to itself


@dataclass(frozen=True)
class Links:
    """The links between devices, both ways: by (from, to). PlanError for a pair that is not known."""

    between: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)

    def get(self, a: str, b: str) -> LinkSpeed:
        """Return the link from `a` to `b`."""
        if a == b:
            return NOWHERE
        try:
            return self.between[a, b]
        except KeyError:
            raise PlanError(f"the link from {a} to {b} was not measured; probe the devices again") from None

    def slowest(self, members: Sequence[str]) -> LinkSpeed:
        """The largest latency and the least bandwidth of any way between these devices."""
        ways = [self.get(a, b) for a in members for b in members if a != b] or [NOWHERE]
        return LinkSpeed(max(way.latency_s for way in ways), min(way.bytes_per_s for way in ways))


_CURVES = ("step_s", "layer_s", "half_layer_s", "head_s")
_NUMBERS = ("token_s", "memory_bytes", "runtime_bytes", "sum_s")
_OPTIONAL = ("prompt_token_s", "disk_bytes_per_s")


def speed_to_json(speed: DeviceSpeed) -> dict[str, Any]:
    """Return a device's measurements as plain values, without its name, its age, and corrections from use."""
    values: dict[str, Any] = {name: getattr(speed, name).to_json() for name in _CURVES}
    return values | {name: getattr(speed, name) for name in (*_NUMBERS, *_OPTIONAL, "busy")}


def speed_of(values: Any, device: str, name: str, age_s: float) -> DeviceSpeed:
    """The speed that `speed_to_json` wrote, of a device called so now; PlanError names what is wrong."""
    record = fields.record(values, name, (*_CURVES, *_NUMBERS), (*_OPTIONAL, "busy"))
    numbers: dict[str, Any] = {}
    for key in (*_NUMBERS, *(name for name in _OPTIONAL if record.get(name) is not None)):
        value = record[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise PlanError(f"{name}: {key} is {fields.short(value)}; needed is a number of 0 or more")
        numbers[key] = value
    curves: dict[str, Any] = {key: Curve.from_json(record[key], f"{name}: {key}") for key in _CURVES}
    return DeviceSpeed(device, name, **curves, **numbers, age_s=age_s, busy=record.get("busy") is True)
