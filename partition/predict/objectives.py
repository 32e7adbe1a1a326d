"""The objectives of plans, a row each: its figure, its unit, its direction, and how people read and limit it.

`edge plan`, `edge pareto`, the searches, the front and its page read this table. It imports nothing heavy, because the
help of commands is made from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partition.errors import PlanError
from quant.text import bytes_text, number_text, with_article

ObjectiveName = Literal["latency", "throughput", "ttft", "memory", "energy"]
AxisName = Literal["latency", "throughput", "ttft", "memory", "energy", "divergence"]


@dataclass(frozen=True)
class Objective:
    """A property that a plan is to be good in. Plans are searched by its cost, which is smaller where it is better."""

    key: str  # the figure of predictions and measurements: a number, or bytes by device, of which the most counts
    label: str
    unit: str  # after a figure; {thing} is a token or an input, {a thing} the same with its article
    limit: tuple[str, str]  # the option that bounds it: what it takes, and its help
    scale: float = 1.0  # units that the figure is multiplied by to be shown, or given
    rate: bool = False  # larger is better, and its cost is the inverse
    time: bool = False  # several devices have to be clearly better in it than one
    power: bool = False  # it needs the power of each device
    network: bool = True  # networks in ONNX have it, too
    of_file: bool = False  # the same for all plans of one file: it is measured, and no search finds a plan by it
    text: Callable[[float], str] = number_text

    def figure(self, value: float | Mapping[str, float] | None) -> float:
        """One number of a prediction's or a measurement's `key`; the worst one where it is not known."""
        if value is None:
            return math.inf
        return float(max(value.values(), default=0.0) if isinstance(value, Mapping) else value)

    def on_axis(self, value: float | Mapping[str, float] | None) -> float:
        """The same as a front compares it: small where it is good. A rate is negative."""
        return -self.figure(value) if self.rate else self.figure(value)

    def cost(self, figure: float) -> float:
        """The cost that plans are searched by: a rate as the seconds of one."""
        return 1 / figure if self.rate else figure

    def cost_of(self, predicted: Any) -> float:
        """Return the cost of what was predicted, or measured."""
        return self.cost(self.figure(getattr(predicted, self.key)))

    def unit_of(self, thing: str) -> str:
        """The unit where a plan computes tokens, or inputs."""
        return self.unit.replace("{thing}", thing).replace("{a thing}", with_article(thing))

    def describe(self, cost: float, thing: str = "token") -> str:
        """A cost as a person reads it: "12.3 ms a token", "40.0 tokens/s"."""
        return f"{self.text(self.cost(cost) * self.scale)} {self.unit_of(thing)}"


OBJECTIVES: Mapping[str, Objective] = {
    "latency": Objective(
        "latency_s", "latency", "ms {a thing}", ("MS", "maximum time for a token or input, in ms"), 1e3, time=True
    ),
    "throughput": Objective(
        "throughput_per_s", "throughput", "{thing}s/s", ("N", "minimum number of tokens or inputs per second"),
        rate=True, time=True,
    ),
    "ttft": Objective(
        "ttft_s", "TTFT", "s to the first token", ("S", "maximum time to the first token, in seconds"),
        time=True, network=False,
    ),
    "memory": Objective(
        "memory_bytes", "memory", "on the fullest device", ("SIZE", "maximum memory on each device"), text=bytes_text
    ),
    "energy": Objective(
        "energy_j", "energy", "J {a thing}", ("J", "maximum energy for a token or input, in joules"), power=True
    ),
    "divergence": Objective(
        "divergence", "divergence", "nats {a thing}", ("NATS", "maximum divergence of a type from the model, in nats"),
        network=False, of_file=True,
    ),
}  # fmt: skip
AXES: tuple[AxisName, ...] = ("latency", "throughput", "ttft", "memory", "energy", "divergence")  # of a front
SEARCHED = tuple(name for name, objective in OBJECTIVES.items() if not objective.of_file)
OF_NETWORKS = tuple(name for name, objective in OBJECTIVES.items() if objective.network)


def default_axes(types: Collection[str] = ()) -> tuple[AxisName, ...]:
    """The axes of a front where none are named: latency and throughput, and divergence where types are compared."""
    return (*AXES[:2], "divergence") if types else AXES[:2]


def searched(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the objectives that plans of one file differ in."""
    return tuple(name for name in names if not OBJECTIVES[name].of_file)


def check_objectives(names: Iterable[str], known: Iterable[str] = SEARCHED, kind: str = "") -> None:
    """PlanError for a name that is none of the `known` objectives. kind: of models, for the error."""
    for name in names:
        if name not in known:
            raise PlanError(f"the objective {name[:40]!r}{kind}; known are {', '.join(known)}")


def limited_by(objective: str, caps: Mapping[str, float]) -> tuple[tuple[str, ...], list[float]]:
    """The objectives of a search for the best plan within caps, that one first, and the most that each may cost."""
    names = (objective, *(name for name in caps if name != objective))
    return names, [caps.get(name, math.inf) for name in names]
