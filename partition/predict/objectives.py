"""Table of objectives of plans: figure, unit, direction, and texts for display and limits.

`edge plan`, `edge pareto`, the searches, the Pareto front and its page use this table. It imports nothing heavy,
because command help is made from it.
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
    """A property of plans that a search optimizes. Searches minimize its cost."""

    key: str  # attribute of predictions and measurements: a number, or bytes by device; then the largest counts
    label: str
    unit: str  # unit after a figure; {thing} is "token" or "input", {a thing} the same with its article
    limit: tuple[str, str]  # option that limits the figure: placeholder and help text
    scale: float = 1.0  # factor between the internal unit and the displayed unit
    rate: bool = False  # True if larger is better; the cost is then the inverse
    time: bool = False  # True if several devices have to be clearly better than one device
    power: bool = False  # True if each device's power must be known
    network: bool = True  # True if ONNX networks have the objective, too
    # True for a property of a file, which is equal for all of its plans; it is measured, never searched.
    of_file: bool = False
    text: Callable[[float], str] = number_text

    def figure(self, value: float | Mapping[str, float] | None) -> float:
        """Return the figure as one number. An unknown figure is infinite."""
        if value is None:
            return math.inf
        return float(max(value.values(), default=0.0) if isinstance(value, Mapping) else value)

    def on_axis(self, value: float | Mapping[str, float] | None) -> float:
        """Return the figure as a front compares it: smaller is better, so a rate is negative."""
        return -self.figure(value) if self.rate else self.figure(value)

    def cost(self, figure: float) -> float:
        """Return the cost of a figure: for a rate, the seconds per item."""
        return 1 / figure if self.rate else figure

    def cost_of(self, predicted: Any) -> float:
        """Return the cost of a prediction or a measurement."""
        return self.cost(self.figure(getattr(predicted, self.key)))

    def unit_of(self, thing: str) -> str:
        """Return the unit for a plan that computes tokens or inputs."""
        return self.unit.replace("{thing}", thing).replace("{a thing}", with_article(thing))

    def describe(self, cost: float, thing: str = "token") -> str:
        """Return a cost as text: "12.3 ms a token", "40.0 tokens/s"."""
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
AXES: tuple[AxisName, ...] = ("latency", "throughput", "ttft", "memory", "energy", "divergence")  # axes of a front
SEARCHED = tuple(name for name, objective in OBJECTIVES.items() if not objective.of_file)
OF_NETWORKS = tuple(name for name, objective in OBJECTIVES.items() if objective.network)


def default_axes(types: Collection[str] = ()) -> tuple[AxisName, ...]:
    """Return the default axes of a front: latency and throughput, and divergence if types are compared."""
    return (*AXES[:2], "divergence") if types else AXES[:2]


def searched(names: Iterable[str]) -> tuple[str, ...]:
    """Return the objectives in which plans of one file differ."""
    return tuple(name for name in names if not OBJECTIVES[name].of_file)


def check_objectives(names: Iterable[str], known: Iterable[str] = SEARCHED, kind: str = "") -> None:
    """Raise PlanError for an unknown objective.

    known: known objectives.
    kind: kind of models, for the message.
    """
    for name in names:
        if name not in known:
            raise PlanError(f"the objective {name[:40]!r}{kind}; known are {', '.join(known)}")


def limited_by(objective: str, caps: Mapping[str, float]) -> tuple[tuple[str, ...], list[float]]:
    """Return (objectives, caps) for a search of the best plan within caps. The objective comes first, without a cap
    unless one is given.
    """
    names = (objective, *(name for name in caps if name != objective))
    return names, [caps.get(name, math.inf) for name in names]
