"""Result of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from partition import fields
from quant.text import number_text

REQUIRED = 0.9  # part of the requests that is to meet the targets, for the highest rate of arrivals
_AT_ITS_LIMIT = 0.95  # of the time busy
_IN_OTHERS = ("of_text", "in_flight_mean", "waiting_mean", "waiting_max")  # fields that JSON has in others, or not


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a time over requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread | None:
        """Compute the distribution; None without values. Percentiles interpolate linearly between the sorted values."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(math.fsum(ordered) / len(ordered), *(_percentile(ordered, part) for part in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets of a request, in seconds."""

    ttft_s: float = math.inf  # to its first token, at most
    itl_s: float = math.inf  # between tokens after it, at most, in the mean (TPOT)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met both targets; those that failed did not."""

    targets: Targets
    within: float  # part of all requests
    requests_per_s: float  # that met them, over the simulated time
    most_arrivals_per_s: float | None = None  # at random, at which REQUIRED of the requests meet them; None: unknown

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; a target that is none is null."""
        limits = {name: seconds if math.isfinite(seconds) else None for name, seconds in asdict(self.targets).items()}
        return {"targets": limits, **{name: getattr(self, name) for name in self.__slots__[1:]}}


@dataclass(frozen=True, slots=True)
class Use:
    """A stage, or a link, over the whole time."""

    devices: tuple[str, ...]  # of a link: from, to
    is_link: bool
    utilization: float  # the part of the time in which it was busy
    queue_mean: float  # requests that waited for it
    queue_max: int

    @property
    def name(self) -> str:
        """Name for people."""
        return (" to " if self.is_link else " + ").join(self.devices)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ends = {"from": self.devices[0], "to": self.devices[1]} if self.is_link else {"devices": list(self.devices)}
        return {**ends, "utilization": self.utilization, "queue": {"mean": self.queue_mean, "max": self.queue_max}}


@dataclass(frozen=True)
class Simulated:
    """Results of simulating requests on a plan."""

    requests: int
    completed: int
    failed: int
    failed_in_flight: int  # of these, that had arrived when it ended
    stalled_s: float | None  # when a device left and the deployment ended; None: that did not happen before the end
    left: str | None  # that device
    of_text: bool  # whether the plan is of a language model
    seconds: float  # from the beginning to the last answer, or to the end of the deployment
    ttft_s: Spread | None  # from a request's arrival to its first token; None for an ONNX model
    tpot_s: Spread | None  # of each request that has several tokens, the mean after the first
    latency_s: Spread | None  # from a request's arrival to its last token, or to the outputs of an input
    throughput_per_s: float  # tokens, or inputs
    stages: tuple[Use, ...]
    links: tuple[Use, ...]
    waiting_mean: float  # requests that none of the places in flight was free for
    waiting_max: int
    in_flight: int  # these places
    in_flight_mean: float
    arrivals_per_s: float | None  # None: as fast as clients got their answers
    capacity_per_s: float  # requests of this size that the plan can do, by formula
    goodput: Goodput | None = None  # None without targets

    @property
    def devices(self) -> dict[str, float]:
        """The part of the time in which each computed, for ranks of a stage with their sums."""
        return {device: stage.utilization for stage in self.stages for device in stage.devices}

    @property
    def saturates(self) -> str | None:
        """Describe what is saturated; None if nothing is."""
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
        """Return notes, a sentence each: that arrivals exceed capacity, that the simulation ended early."""
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
        """Plain values for JSON."""
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
