"""Candidate plans of one model on one cluster, with predictions and measurements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

from devices.probe import default_threads
from devices.remembered import Remembered, key_of
from edge.cluster.fleet import Fleet
from edge.planning.measure import Measured
from edge.planning.plan_options import PlanOptions
from edge.profiling.links import rough_text
from edge.profiling.profile import ClusterProfile
from edge.profiling.survey import own_profile
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.objectives import OBJECTIVES
from partition.predict.pareto import Point
from partition.predict.speeds import Links, LinkSpeed
from partition.search.changes import Change

Space = TypeVar("Space", bound="PlanSpace")
MOST_SUBSETS_OF = 4  # maximum number of devices for computing the fronts of all subsets of devices


class PlanSpace(ABC):
    """Base class of the plans of one model on one cluster, for all kinds of models."""

    kind: str  # kind of model: "llm" or "onnx"
    cache: str  # name of the cached device times
    title: str  # display name of the model
    known: ClusterProfile[Any]
    type: str | None = None  # type of the weights, if several files of one model are compared
    divergence: float | None = None  # divergence of that type in nats per token; None: not measured
    size_bytes: int = 0  # size of the file
    file: ModelFile | None = None  # file of a language model

    def __init__(self, path: Path, known: ClusterProfile[Any], options: PlanOptions) -> None:
        """Create a plan space. options: workload that `known` was measured with."""
        self.path, self.known, self._options = path, known, options
        self.exact = True  # True: the search of `points` was exhaustive
        self.pairs_gap = 0.0  # see `Phases.gap`
        self.replicas_gap = 0.0  # see `Replicas.gap`

    @property
    def names(self) -> dict[str, str]:
        """Device names by address in a plan."""
        return {speed.device: speed.name for speed in self.known.speeds}

    @abstractmethod
    def points(self, axes: Sequence[str]) -> list[Point]:
        """Return the front, and other plans for comparison."""

    @abstractmethod
    def best(self, objective: str, caps: Mapping[str, float]) -> tuple[Point, str]:
        """Return the best plan by one objective, and the reason in one line.

        caps: limits of objectives.

        Raises PlanError with needed and available resources if nothing fits.
        """

    @abstractmethod
    def changes(self, objective: str, caps: Mapping[str, float]) -> list[Change]:
        """Return the gain of single changes, within the same caps."""

    @abstractmethod
    def fastest(self, objective: str) -> Point:
        """Return the best plan by one objective. Unlike `best`, it does not prefer this device if others gain little.

        Raises PlanError with needed and available resources if nothing fits.
        """

    @abstractmethod
    def cost(self, point: Point, objective: str) -> float:
        """Return the predicted cost of a plan of this space or of one with other links. Smaller is better."""

    def with_link(self: Space, link: LinkSpeed) -> Space:
        """Return the same plan space with every link between two devices replaced by `link`."""
        space = copy(self)
        space.known = replace(self.known, links=Links(dict.fromkeys(self.known.links.between, link)))
        return space

    @abstractmethod
    def measure(self, point: Point, fleet: Fleet | None) -> Measured:
        """Run a plan on its devices and measure it. Raises the errors of deployments and engines."""

    @abstractmethod
    def depends_on(self, point: Point) -> list[str]:
        """Return the values that a measurement depends on, in addition to devices and links."""

    def can_run(self, point: Point) -> bool:
        """Return whether a plan can be measured: none of its devices is a preset, and it lacks a prefill placement."""
        presets = any(speed.preset for speed in self.known.speeds if speed.device in point.plan.all_devices)
        return not presets and point.predicted.prefill is None

    def measured_key(self, point: Point, fleet: Fleet | None) -> str:
        """Return the cache key of a measurement."""
        others = [fleet.profiles[device] for device in point.plan.all_devices if fleet and device != LOCAL]
        pairs = permutations(dict.fromkeys((LOCAL, *point.plan.all_devices)), 2)
        links = [rough_text(self.known.links.between.get(pair)) for pair in pairs]
        own = own_profile(LOCAL, self._options.threads or default_threads())
        return key_of([*self.depends_on(point), *links], own, *others)

    def forget(self, point: Point) -> None:
        """Discard the cached times of a plan's devices, so that the next command measures them."""
        for speed in self.known.speeds:
            if speed.device in point.plan.all_devices and speed.key:
                Remembered(self.cache).forget(speed.key)


def within_divergence(spaces: Sequence[PlanSpace], most: float | None) -> list[PlanSpace]:
    """Return the types with a divergence of at most `most` nats per token; None: all.

    Raises PlanError with the lowest divergence if no type is within the limit.
    """
    if most is None:
        return list(spaces)
    row = OBJECTIVES["divergence"]
    within = [space for space in spaces if row.figure(space.divergence) <= most]
    if not within:
        least = min(spaces, key=lambda space: row.figure(space.divergence))
        raise PlanError(
            f"no type has a divergence of at most {row.describe(most)}; the lowest is"
            f" {row.describe(row.figure(least.divergence))}, of {least.type}; raise the limit or name a larger type"
        )
    return within
