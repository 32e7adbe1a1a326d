"""Results of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from partition import fields
from quant.text import number_text

REQUIRED = 0.9  # fraction of requests that must meet the targets at the highest arrival rate
_AT_ITS_LIMIT = 0.95  # utilization above which a stage or link counts as saturated
# Fields that the JSON nests in other objects or omits.
_IN_OTHERS = ("of_text", "in_flight_mean", "waiting_mean", "waiting_max")


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a time over requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread | None:
        """Return the distribution, or None without values. Percentiles interpolate linearly between the sorted
        values.
        """
        if not values:
            return None
        ordered = sorted(values)
        return cls(math.fsum(ordered) / len(ordered), *(_percentile(ordered, part) for part in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets of a request, in seconds."""

    ttft_s: float = math.inf  # largest time to the first token
    itl_s: float = math.inf  # largest mean time between later tokens (TPOT)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met both targets. Failed requests did not."""

    targets: Targets
    within: float  # fraction of all requests that met the targets
    requests_per_s: float  # requests that met the targets, per simulated second
    # Highest Poisson rate at which REQUIRED of the requests meet the targets; None: unknown.
    most_arrivals_per_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON. A target that is not set is null."""
        limits = {name: seconds if math.isfinite(seconds) else None for name, seconds in asdict(self.targets).items()}
        return {"targets": limits, **{name: getattr(self, name) for name in self.__slots__[1:]}}


@dataclass(frozen=True, slots=True)
class Use:
    """Utilization of a stage or link over the whole simulation."""

    devices: tuple[str, ...]  # devices of the stage; for a link, (sender, receiver)
    is_link: bool
    utilization: float  # fraction of the time in which it was busy
    queue_mean: float  # mean number of waiting requests
    queue_max: int

    @property
    def name(self) -> str:
        """Name for people."""
        return (" to " if self.is_link else " + ").join(self.devices)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        ends = {"from": self.devices[0], "to": self.devices[1]} if self.is_link else {"devices": list(self.devices)}
        return {**ends, "utilization": self.utilization, "queue": {"mean": self.queue_mean, "max": self.queue_max}}


@dataclass(frozen=True)
class Simulated:
    """Results of simulating requests on a plan."""

    requests: int
    completed: int
    failed: int
    failed_in_flight: int  # failed requests that had arrived before the deployment ended
    stalled_s: float | None  # time at which a device left and ended the deployment; None: no device left before the end
    left: str | None  # the device that left
    of_text: bool  # True for a language model
    seconds: float  # time from the start to the last response, or to the end of the deployment
    ttft_s: Spread | None  # time from arrival to the first token; None for an ONNX model
    tpot_s: Spread | None  # mean time between tokens of each request with several tokens
    latency_s: Spread | None  # time from arrival to the last token, or to the outputs of an input
    throughput_per_s: float  # tokens, or inputs, per second
    stages: tuple[Use, ...]
    links: tuple[Use, ...]
    waiting_mean: float  # mean number of requests without a place in flight
    waiting_max: int
    in_flight: int  # number of places in flight
    in_flight_mean: float
    arrivals_per_s: float | None  # None: closed-loop arrivals
    capacity_per_s: float  # requests of this size per second that the plan can serve, by the cost model
    goodput: Goodput | None = None  # None if no targets are set

    @property
    def devices(self) -> dict[str, float]:
        """Fraction of the time in which each device computed. For ranks of one stage, all-reduces are included."""
        total: dict[str, float] = {}
        for stage in self.stages:  # a device that serves several copies has a stage in each copy
            for device in stage.devices:
                total[device] = min(1.0, total.get(device, 0.0) + stage.utilization)
        return total

    @property
    def saturates(self) -> str | None:
        """Sentence about the saturated stage, link or places in flight; None if nothing is saturated."""
        busiest = max((*self.stages, *self.links), key=lambda use: use.utilization)
        if busiest.utilization >= _AT_ITS_LIMIT:
            does = "the way from" if busiest.is_link else "computing on"
            return f"{does} {busiest.name} takes {100 * busiest.utilization:.0f} % of the time"
        if self.in_flight_mean >= _AT_ITS_LIMIT * self.in_flight:
            return (
                f"all {self.in_flight} places in flight are taken, and nothing is busy all the time: a plan for more at"
                " once could do more"
            )
        return None

    @property
    def notes(self) -> list[str]:
        """Notes in full sentences: arrivals exceed the capacity, or the deployment ended early."""
        sentences = []
        if self.arrivals_per_s is not None and self.arrivals_per_s > self.capacity_per_s:
            sentences.append(
                f"arrivals of {number_text(self.arrivals_per_s)}/s are above what the plan can do,"
                f" {number_text(self.capacity_per_s)}/s: the queue grows"
            )
        if self.stalled_s is not None:
            sentences.append(
                f"{self.left} left at {self.stalled_s:g} s, which ends the deployment; failed requests:"
                f" {self.failed_in_flight} in flight or waiting, {self.failed - self.failed_in_flight} to come later"
            )
        return sentences

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = {name: value for name, value in fields.encoded(self).items() if name not in _IN_OTHERS}
        return values | {
            "devices": self.devices,
            "in_flight": {"most": self.in_flight, "mean": self.in_flight_mean},
            "waiting": {"mean": self.waiting_mean, "max": self.waiting_max},
            "saturates": self.saturates,
            "notes": self.notes,
        }


def _percentile(ordered: Sequence[float], part: float) -> float:
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
