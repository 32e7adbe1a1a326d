"""All plans of one model on one cluster that are worth looking at, and what they do when they are run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from devices.probe import default_threads
from devices.remembered import Remembered, key_of
from edge.cluster.fleet import Fleet
from edge.planning.measure import Measured
from edge.planning.plan_options import PlanOptions
from edge.profiling.links import rough_text
from edge.profiling.profile import ClusterProfile
from edge.profiling.survey import own_profile
from partition.errors import PlanError
from partition.plan.plan import LOCAL
from partition.predict.objectives import OBJECTIVES
from partition.predict.pareto import Point
from partition.search.changes import Change

MOST_SUBSETS_OF = 4  # devices: fronts of all their subsets are looked at; of more, only of the whole


class PlanSpace(ABC):
    """The plans of one model on one cluster: what all kinds of model have in common."""

    kind: str  # of model: "llm" or "onnx"
    cache: str  # what its devices' times are remembered as
    title: str  # the model's name, for people
    known: ClusterProfile[Any]
    type: str | None = None  # of the weights, where several files of one model are compared
    divergence: float | None = None  # of that type from the model, nats a token; None: not measured
    size_bytes: int = 0  # of the file

    def __init__(self, path: Path, known: ClusterProfile[Any], options: PlanOptions) -> None:
        """options: of the work; those that the space was measured with."""
        self.path, self.known, self._options = path, known, options
        self.exact = True  # the search of `points`
        self.pairs_gap = 0.0  # as `Phases.gap`

    @property
    def names(self) -> dict[str, str]:
        """Names of devices, by what a plan calls them."""
        return {speed.device: speed.name for speed in self.known.speeds}

    @abstractmethod
    def points(self, axes: Sequence[str]) -> list[Point]:
        """The front, and other plans that tell what it is worth."""

    @abstractmethod
    def best(self, objective: str, caps: Mapping[str, float]) -> tuple[Point, str]:
        """The plan to take by one objective, and why, in one line. caps: what objectives may be at most.

        PlanError, with need and have, where nothing fits.
        """

    @abstractmethod
    def changes(self, objective: str, caps: Mapping[str, float]) -> list[Change]:
        """Return the gain of single changes, within the same caps."""

    @abstractmethod
    def measure(self, point: Point, fleet: Fleet | None) -> Measured:
        """Run a plan on its devices. The errors of deployments and engines."""

    @abstractmethod
    def depends_on(self, point: Point) -> list[str]:
        """Return the values that a measurement depends on, beside devices and links."""

    def can_run(self, point: Point) -> bool:
        """Return whether a plan can be measured: all of its devices are there, which presets are not, and prompts have
        no placement of their own."""
        estimated = any(speed.estimate for speed in self.known.speeds if speed.device in point.plan.devices)
        return not estimated and point.predicted.prefill is None

    def measured_key(self, point: Point, fleet: Fleet | None) -> str:
        """Return the key that a measurement is remembered under."""
        others = [fleet.profiles[device] for device in point.plan.devices if fleet and device != LOCAL]
        pairs = permutations(dict.fromkeys((LOCAL, *point.plan.devices)), 2)
        links = [rough_text(self.known.links.between.get(pair)) for pair in pairs]
        own = own_profile(LOCAL, self._options.threads or default_threads())
        return key_of([*self.depends_on(point), *links], own, *others)

    def forget(self, point: Point) -> None:
        """Let the next command measure the devices of a plan anew."""
        for speed in self.known.speeds:
            if speed.device in point.plan.devices and speed.key:
                Remembered(self.cache).forget(speed.key)


def within_divergence(spaces: Sequence[PlanSpace], most: float | None) -> list[PlanSpace]:
    """Return the types whose divergence is at most so many nats a token; all without a limit. PlanError, with the least
    divergence there is, where none is."""
    if most is None:
        return list(spaces)
    row = OBJECTIVES["divergence"]
    within = [space for space in spaces if row.figure(space.divergence) <= most]
    if not within:
        least = min(spaces, key=lambda space: row.figure(space.divergence))
        raise PlanError(
            f"no type has a divergence of at most {row.describe(most)}; the least there is is"
            f" {row.describe(row.figure(least.divergence))}, of {least.type}; raise the limit or name a larger type"
        )
    return within
