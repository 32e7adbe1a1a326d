"""The four things that a kind of model says: how it is cut, what its parts cost, how a part is loaded, how a step runs.

All else (reach, compare, send, open, connect, watch, replace) is written once, in the `Supervisor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edge.cluster.fleet import Fleet
from edge.cluster.rank_group import RankGroup
from edge.tasks import Progress, Steps
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import Plan

P = TypeVar("P", bound=Plan | OnnxPlan)
E = TypeVar("E")  # what runs steps: an engine, a pipeline


@dataclass(frozen=True)
class Running(Generic[P, E]):
    """A plan that runs."""

    engine: E
    plan: P
    why: str
    names: tuple[str, ...]  # of the plan's devices by rank, for people
    workers: frozenset[str] = field(default_factory=frozenset)  # addresses of those that answered when it began
    ranks: RankGroup | None = None  # on other devices; None where there are none

    @property
    def leaving(self) -> list[str]:
        """The devices that are about to end."""
        return self.ranks.leaving if self.ranks else []


class Deciding(ABC, Generic[P]):
    """Asks the planner of a kind of model how it is to be cut over the devices that answer, and what that costs."""

    note = ""  # said to people after the devices that a model goes on with
    moves = True  # also to a better plan, where nothing was lost
    needs_worker = False  # this device alone, without an engine process, does not do
    shunned: set[str]  # addresses of workers that could not do their part

    @property
    @abstractmethod
    def addresses(self) -> list[str]:
        """The workers that may take part."""

    @abstractmethod
    def over(self, fleet: Fleet | None, notes: list[str], steps: Steps) -> tuple[P, str]:
        """Return the plan for this device and the workers of a fleet, and why it is this one. notes: about workers that
        do not answer. PlanError where none fits."""

    @abstractmethod
    def pays(self, plan: P, current: P) -> bool:
        """Return whether a plan is clearly better than the one that runs."""


class Building(ABC, Generic[P, E]):
    """Loads the parts of a kind of model on their devices."""

    @abstractmethod
    def load(self, fleet: Fleet | None, plan: P, life: ExitStack, steps: Steps) -> tuple[E, RankGroup | None]:
        """Return what runs the steps of a plan, and its ranks on other devices. life: is given what ends it. The errors
        of deployments and engines."""

    @abstractmethod
    def send_ahead(self, fleet: Fleet, plan: P, check: Progress) -> None:
        """Bring the parts of a plan to its workers before it takes over. check: ends this by raising."""
